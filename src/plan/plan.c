#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

static void plan_fail(struct shoal_plan *plan, enum shoal_status status)
{
    if (plan->status == SHOAL_OK)
        plan->status = status;
}

void shoal_plan_init(struct shoal_plan *plan, int rank, int size)
{
    memset(plan, 0, sizeof *plan);
    plan->rank = rank;
    plan->size = size;
    if (size < 1 || size > SHOAL_PLAN_RANKS_MAX || rank < 0 || rank >= size) {
        plan_fail(plan, SHOAL_ERR_UNSUPPORTED);
        return;
    }
    plan->signals_in = calloc((size_t)size, sizeof *plan->signals_in);
    if (!plan->signals_in)
        plan_fail(plan, SHOAL_ERR_MEMORY);
}

void shoal_plan_fini(struct shoal_plan *plan)
{
    free(plan->steps);
    free(plan->blocks);
    free(plan->signals_in);
    memset(plan, 0, sizeof *plan);
}

/* Returns the array, moved if necessary, with room for `wanted` entries. Returns NULL after an error; the first error stays in
 * the plan. */
static void *grown(struct shoal_plan *plan, void *array, uint32_t *capacity, uint32_t wanted, size_t entry_bytes)
{
    if (wanted <= *capacity)
        return array;
    const uint32_t more = wanted + wanted / 2 + 8;
    void *moved = realloc(array, more * entry_bytes);
    if (!moved) {
        plan_fail(plan, SHOAL_ERR_MEMORY);
        return NULL;
    }
    *capacity = more;
    return moved;
}

/* Returns a new last step, or NULL after an error. */
static struct shoal_step *plan_append_step(struct shoal_plan *plan, enum shoal_step_kind kind, int peer)
{
    if (plan->status != SHOAL_OK)
        return NULL;
    if (peer < 0 || peer >= plan->size) {
        plan_fail(plan, SHOAL_ERR_INTERNAL);
        return NULL;
    }
    struct shoal_step *steps = grown(plan, plan->steps, &plan->step_capacity, plan->step_count + 1, sizeof *steps);
    if (!steps)
        return NULL;
    plan->steps = steps;
    SHOAL_ASSERT(plan->step_count < plan->step_capacity);
    struct shoal_step *step = &steps[plan->step_count++];
    *step = (struct shoal_step){.kind = (uint8_t)kind, .peer = (uint16_t)peer, .first_block = plan->block_count};
    return step;
}

static void append_blocks(struct shoal_plan *plan, const struct shoal_block *added, int count)
{
    const uint32_t wanted = plan->block_count + (uint32_t)count;
    struct shoal_block *blocks = grown(plan, plan->blocks, &plan->block_capacity, wanted, sizeof *blocks);
    if (!blocks)
        return;
    plan->blocks = blocks;
    SHOAL_ASSERT(wanted <= plan->block_capacity);
    for (int i = 0; i < count; i++) {
        blocks[plan->block_count++] = added[i];
        if (added[i].operand != SHOAL_STAGING || added[i].bin)
            continue;
        if (added[i].part >= SHOAL_PLAN_PARTS_MAX)
            plan_fail(plan, SHOAL_ERR_UNSUPPORTED);
        else
            shoal_plan_use_staging(plan, added[i].part + 1, added[i].of);
    }
}

static bool is_own(const struct shoal_plan *plan, const struct shoal_block *block, enum shoal_block_operand operand)
{
    return block->rank == plan->rank && block->operand == operand && block->part == 0;
}

/* Part 0 of this rank's staging buffer, or the slot of its device. */
static bool is_own_place(const struct shoal_plan *plan, const struct shoal_block *block)
{
    return is_own(plan, block, SHOAL_STAGING) || is_own(plan, block, SHOAL_ON_DEVICE);
}

static bool is_early(const struct shoal_plan *plan, const struct shoal_step *step)
{
    if (step->kind == SHOAL_STEP_WAIT)
        return step->peer != plan->rank && step->value == 0;
    if (step->kind != SHOAL_STEP_REDUCE || step->source_count != 1)
        return false;
    const struct shoal_block *blocks = &plan->blocks[step->first_block];
    if (!is_own(plan, &blocks[0], SHOAL_INPUT))
        return false;
    for (unsigned i = 1; i <= step->dest_count; i++) {
        if (!is_own_place(plan, &blocks[i]))
            return false;
    }
    return true;
}

uint32_t shoal_plan_count_early(const struct shoal_plan *plan)
{
    uint32_t count = 0;
    while (count < plan->step_count && is_early(plan, &plan->steps[count]))
        count++;
    return count;
}

bool shoal_plan_only_sends_input(const struct shoal_plan *plan, bool *copies_out)
{
    *copies_out = false;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct shoal_step *step = &plan->steps[i];
        if (step->kind != SHOAL_STEP_REDUCE)
            continue;
        const struct shoal_block *blocks = &plan->blocks[step->first_block];
        bool reads = false;
        for (unsigned s = 0; s < step->source_count; s++)
            reads |= is_own(plan, &blocks[s], SHOAL_INPUT);
        if (!reads)
            continue;
        if (step->source_count > 1 || step->dest_count > 1 || !is_own(plan, &blocks[1], SHOAL_OUTPUT))
            return false;
        *copies_out = true;
    }
    return true;
}

void shoal_plan_use_staging(struct shoal_plan *plan, int parts, int of)
{
    plan->parts = parts > plan->parts ? parts : plan->parts;
    plan->staging_of = of > plan->staging_of ? of : plan->staging_of;
}

void shoal_plan_use_bins(struct shoal_plan *plan, int bins, int of)
{
    const int wanted = (bins + SHOAL_BINS_IN_PART - 1) / SHOAL_BINS_IN_PART;

    if (bins >= UINT16_MAX)
        plan_fail(plan, SHOAL_ERR_UNSUPPORTED);
    plan->bins = bins;
    shoal_plan_use_staging(plan, wanted < SHOAL_BINNED_PARTS_MAX ? wanted : SHOAL_BINNED_PARTS_MAX, of);
}

void shoal_plan_reduce(struct shoal_plan *plan, const struct shoal_block *sources, int source_count,
                       const struct shoal_block *dests, int dest_count)
{
    struct shoal_step *step = plan_append_step(plan, SHOAL_STEP_REDUCE, plan->rank);
    if (!step)
        return;
    step->source_count = (uint16_t)source_count;
    step->dest_count = (uint16_t)dest_count;
    append_blocks(plan, sources, source_count);
    append_blocks(plan, dests, dest_count);
}

void shoal_plan_reduce_partial(struct shoal_plan *plan, const struct shoal_block *sources, int source_count,
                               struct shoal_block dest)
{
    shoal_plan_reduce(plan, sources, source_count, &dest, 1);
    if (plan->status == SHOAL_OK)
        plan->steps[plan->step_count - 1].is_partial = true;
}

void shoal_plan_copy(struct shoal_plan *plan, struct shoal_block source, struct shoal_block dest)
{
    shoal_plan_reduce(plan, &source, 1, &dest, 1);
}

void shoal_plan_put(struct shoal_plan *plan, struct shoal_block source, struct shoal_block dest)
{
    struct shoal_step *step = plan_append_step(plan, SHOAL_STEP_PUT, dest.rank);
    if (!step)
        return;
    step->source_count = 1;
    step->dest_count = 1;
    append_blocks(plan, &source, 1);
    append_blocks(plan, &dest, 1);
}

void shoal_plan_signal(struct shoal_plan *plan, int peer)
{
    plan_append_step(plan, SHOAL_STEP_SIGNAL, peer);
}

void shoal_plan_wait(struct shoal_plan *plan, int peer)
{
    struct shoal_step *step = plan_append_step(plan, SHOAL_STEP_WAIT, peer);
    if (step)
        step->value = ++plan->signals_in[peer];
}

void shoal_plan_wait_credit(struct shoal_plan *plan, int peer)
{
    plan_append_step(plan, SHOAL_STEP_WAIT, peer);
}

void shoal_plan_wait_puts(struct shoal_plan *plan)
{
    plan_append_step(plan, SHOAL_STEP_WAIT, plan->rank);
}

void shoal_plan_expect_credit(struct shoal_plan *plan, int peer)
{
    if (plan->status != SHOAL_OK)
        return;
    if (peer < 0 || peer >= plan->size)
        plan_fail(plan, SHOAL_ERR_INTERNAL);
    else
        plan->signals_in[peer]++;
}

/* signals_in counts both the signals that the plan waits for and those announced as credits. */
void shoal_plan_find_peers(const struct shoal_plan *plan, const struct shoal_view *view, uint8_t *peers)
{
    for (int peer = 0; peer < plan->size; peer++)
        peers[peer] = plan->signals_in[peer] > 0;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        if (plan->steps[i].kind != SHOAL_STEP_REDUCE)
            peers[plan->steps[i].peer] = 1;
    }
    for (int peer = 0; peer < plan->size; peer++)
        peers[peer] &= !shoal_view_reaches(view, plan->rank, peer);
}

struct shoal_view shoal_view_mask(const struct shoal_view *view, int rank, uint8_t *flags)
{
    struct shoal_view masked = *view;

    for (int peer = 0; peer < view->size; peer++) {
        const bool is_known = shoal_view_reaches(view, rank, peer);
        flags[peer] = is_known && shoal_view_shares_input(view, peer);
        flags[view->size + peer] = is_known && shoal_view_shares_output(view, peer);
    }
    masked.shared_input = flags;
    masked.shared_output = flags + view->size;
    return masked;
}
