/* How it works. Every element of every operand is a cell: its content (which element of which ranks' inputs, how often each)
 * and who wrote and read it last. Every rank is three components: its engine, its caller, and its puts under way. Each
 * component has a vector clock. An access is ordered after an earlier one if the clock of its component includes the earlier
 * one. Ranks run in turn until each waits or has ended. A signal keeps the clock of the rank that sent it, and a wait joins
 * that clock. */
#include "plan/plan_check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING UINT32_MAX     /* never written */
#define MIXED (UINT32_MAX - 1) /* contributions of different elements */
#define NOBODY (-1)
#define OPERATIONS 2
#define PUTS_APART_MAX 9 /* group size up to which a rank's puts are distinguished by peer */
#define STEP_TEXT_MAX 200
#define BLOCK_TEXT_MAX 40

/* When a component did something. An engine's epoch n is its n-th step, over both operations. A caller's epoch is 1 before it
 * posts, 2 after the first operation has ended, 3 after the second. Epoch 0 is never. */
struct access {
    uint32_t component; /* engine of rank r: r; its caller: size + r; its puts: see puts_to(), with the engine's epochs */
    uint32_t epoch;
};

/* A reduction over several hosts scales each input once, when the first pass reads it. */
enum scaling {
    RAW,    /* an element of an input as its rank has it, or a copy of it */
    SCALED, /* a sum of scaled elements, or one that a put has scaled */
    WRONG,  /* some input was scaled twice or not at all */
};

struct cell {
    struct access wrote;
    uint32_t reads; /* those since then: 1 + index into check.reads, or 0 */
    uint32_t unit;  /* element of the inputs that its contributions belong to, plus the operation's first_unit */
    uint8_t scaling;
};

struct read {
    struct access by;
    uint32_t next; /* like cell.reads */
};

struct operation {
    const struct shoal_plan_question *question;
    const struct shoal_shape *shape;
    size_t units;        /* units of a part, or of the whole operand if it is not partitioned */
    size_t input_units;  /* of all parts */
    size_t output_units; /* of all parts */
    bool is_on_devices;
    bool has_passes; /* a reduction over several hosts */
    uint32_t first_unit;
    size_t first_input; /* cell of rank 0 */
    size_t first_output;
};

struct cursor {
    int operation; /* OPERATIONS once the rank has ended */
    uint32_t step;
};

struct check {
    int size;
    size_t components;
    int put_targets;
    struct operation operations[OPERATIONS];
    size_t staging_cell;
    size_t staging_units; /* size of a rank's staging buffer; the larger of both operations */
    size_t device_cell;
    size_t device_units; /* size of each part that a rank has for its device; the larger of both operations */
    size_t cell_count;
    struct cell *cells;
    uint8_t *counts; /* counts[cell * size + rank]: how often the cell holds the rank's contribution, at most 255 */
    uint8_t *sum;    /* one more row, for the current step */
    struct read *reads;
    uint32_t read_count;
    uint32_t read_capacity;
    uint32_t read_free;
    uint32_t *clocks;      /* clocks[component * components + other] */
    size_t *signal_first;  /* signal_first[to * size + from]: number of the pair's first signal */
    uint32_t *incremented; /* incremented[to * size + from]: how many of them were sent */
    uint32_t *snapshots;   /* snapshots[signal * components + other] */
    struct cursor *cursors;
    uint8_t *peers;   /* scratch */
    uint8_t *at_hand; /* at_hand[rank]: lent operands of its operation that are in the ring now, as bits */
    char *text;
    size_t text_bytes;
};

static void check_fini(struct check *check)
{
    free(check->cells);
    free(check->counts);
    free(check->sum);
    free(check->reads);
    free(check->clocks);
    free(check->signal_first);
    free(check->incremented);
    free(check->snapshots);
    free(check->cursors);
    free(check->peers);
    free(check->at_hand);
}

/* ---- Components ---------------------------------------------------------------------------------------------------------- */

/* A rank's puts to one peer leave in order, because the peer sees them in order. In large groups all puts of a rank share one
 * component, to limit their number. The epoch is that of the last put. */
static uint32_t puts_to(const struct check *check, int rank, int peer)
{
    return (uint32_t)(2 * check->size + rank * check->put_targets + peer % check->put_targets);
}

static int check_rank_of(const struct check *check, struct access access)
{
    const int component = (int)access.component, puts = component - 2 * check->size;
    return puts >= 0 ? puts / check->put_targets : component % check->size;
}

/* ---- Descriptions of a fault --------------------------------------------------------------------------------------------- */

static enum shoal_status fault(const struct check *check, const char *format, ...) SHOAL_PRINTF(2, 3);

static enum shoal_status fault(const struct check *check, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(check->text, check->text_bytes, format, args);
    va_end(args);
    return SHOAL_ERR_INTERNAL;
}

static const struct shoal_plan *plan_of(const struct check *check, int operation, int rank)
{
    return &check->operations[operation].question->plans[rank];
}

static void describe_step(const struct check *check, int rank, struct cursor at, char text[STEP_TEXT_MAX])
{
    char step[120];
    shoal_plan_print_step(plan_of(check, at.operation, rank), at.step, step, sizeof step);
    snprintf(text, STEP_TEXT_MAX, "rank %d, step %" PRIu32 " of operation %d [%s]", rank, at.step, at.operation + 1, step);
}

static void describe_access(const struct check *check, struct access access, char text[STEP_TEXT_MAX])
{
    const int rank = check_rank_of(check, access);
    struct cursor at = {0, access.epoch - 1};

    if ((int)access.component / check->size == 1) {
        snprintf(text, STEP_TEXT_MAX, "the caller of rank %d, after its plan of operation %" PRIu32 " has ended,", rank,
                 access.epoch - 1);
        return;
    }
    if (at.step >= plan_of(check, 0, rank)->step_count) {
        at.step -= plan_of(check, 0, rank)->step_count;
        at.operation = 1;
    }
    describe_step(check, rank, at, text);
}

/* ---- Clocks -------------------------------------------------------------------------------------------------------------- */

static uint32_t *clock_of(const struct check *check, uint32_t component)
{
    return check->clocks + component * check->components;
}

static void check_join(const struct check *check, uint32_t component, const uint32_t *other)
{
    uint32_t *mine = clock_of(check, component);
    for (size_t i = 0; i < check->components; i++)
        mine[i] = mine[i] > other[i] ? mine[i] : other[i];
}

static bool is_ordered(const struct check *check, struct access earlier, uint32_t component)
{
    return earlier.epoch <= clock_of(check, component)[earlier.component];
}

static struct access access_now(const struct check *check, uint32_t component)
{
    return (struct access){component, clock_of(check, component)[component]};
}

/* Returns the number of the n-th signal, counted from 1 over both operations. */
static size_t signal_number(const struct check *check, int to, int from, uint32_t n)
{
    return check->signal_first[to * check->size + from] + n - 1;
}

/* A rank that waits for the data of a put also knows that the put has completed locally. */
static void check_increment_counter(struct check *check, int to, int from)
{
    const uint32_t n = ++check->incremented[to * check->size + from], puts = puts_to(check, from, to);
    uint32_t *snapshot = check->snapshots + signal_number(check, to, from, n) * check->components;
    memcpy(snapshot, clock_of(check, (uint32_t)from), check->components * sizeof *check->snapshots);
    if (clock_of(check, puts)[puts] == snapshot[from])
        snapshot[puts] = snapshot[from];
}

/* The rank's puts have left: after a wait for them, or at the end. */
static void await_puts(const struct check *check, int rank)
{
    for (int peer = 0; peer < check->put_targets; peer++) {
        const uint32_t puts = puts_to(check, rank, peer);
        clock_of(check, (uint32_t)rank)[puts] = clock_of(check, puts)[puts];
    }
}

/* ---- Cells --------------------------------------------------------------------------------------------------------------- */

struct range {
    size_t first;
    size_t length;
};

/* Also returns true for a collective that promises nothing: its plans may still move data. */
static bool check_contributes(const struct operation *operation, int rank)
{
    return operation->shape->is_empty || shoal_shape_contributes(operation->shape, rank, operation->question->root);
}

static bool check_receives(const struct operation *operation, int rank)
{
    return shoal_shape_receives(operation->shape, rank, operation->question->root);
}

/* Returns the operands that a rank lends, as bits. */
static unsigned lent_by(const struct operation *operation, int rank)
{
    const unsigned lent = operation->shape->is_reduced ? shoal_view_lends(operation->question->view, rank) : 0;
    return lent & ((check_contributes(operation, rank) ? SHOAL_LEND_INPUT : 0) |
                   (check_receives(operation, rank) ? SHOAL_LEND_OUTPUT : 0));
}

/* Operands on a device pass through rings that are apart, even if they are in place there. */
static bool is_in_place(const struct operation *operation, int rank)
{
    return operation->question->in_place && check_contributes(operation, rank) && check_receives(operation, rank) &&
           !lent_by(operation, rank);
}

/* In place, the larger operand has cells. The other operand is the rank's part of it, or all of it. */
static bool is_output_inside(const struct operation *operation)
{
    return operation->shape->is_input_partitioned && !operation->shape->is_output_partitioned;
}

static size_t input_cell(const struct operation *operation, int rank)
{
    const size_t own = (size_t)rank;
    if (!is_in_place(operation, rank) || is_output_inside(operation))
        return operation->first_input + own * operation->input_units;
    const bool is_part = operation->shape->is_output_partitioned && !operation->shape->is_input_partitioned;
    return operation->first_output + own * operation->output_units + (is_part ? own * operation->units : 0);
}

static size_t output_cell(const struct operation *operation, int rank)
{
    const size_t own = (size_t)rank;
    if (!is_in_place(operation, rank) || !is_output_inside(operation))
        return operation->first_output + own * operation->output_units;
    return operation->first_input + own * operation->input_units + own * operation->units;
}

/* Returns the number of elements that one rank sends to another. */
static size_t length_of(const struct check *check, const struct operation *operation, int from, int to)
{
    const unsigned *lengths = operation->question->lengths;
    return lengths ? lengths[from * check->size + to] : operation->units;
}

/* Returns the units of one part of a staging buffer that is not divided into bins. */
static size_t part_units(const struct operation *operation, int size)
{
    const bool is_partitioned = operation->shape->is_input_partitioned || operation->shape->is_output_partitioned;
    return operation->units * (is_partitioned ? (size_t)size : 1);
}

static size_t operand_cell(const struct check *check, const struct operation *operation, const struct shoal_block *block)
{
    if (block->operand == SHOAL_INPUT)
        return input_cell(operation, block->rank);
    if (block->operand == SHOAL_OUTPUT)
        return output_cell(operation, block->rank);
    if (block->operand == SHOAL_ON_DEVICE)
        return check->device_cell + (block->rank * (size_t)SHOAL_ON_DEVICE_PARTS + block->part) * check->device_units;
    return check->staging_cell + block->rank * check->staging_units + block->part * part_units(operation, check->size);
}

/* Returns the range of a block, or a run of blocks, in a bin. */
static struct range bin_range(const struct check *check, const struct operation *operation, const struct shoal_block *block,
                              unsigned of, size_t length)
{
    const size_t stride = shoal_bin_stride(operation->units, 1, of);
    const size_t first = check->staging_cell + block->rank * check->staging_units + (block->bin - 1u) * stride;
    return (struct range){first, block->run ? block->run * stride : length};
}

/* Returns the length of a run of an operand's blocks. */
static size_t check_run_length(size_t count, unsigned index, unsigned run, unsigned of)
{
    size_t last_length, first_length;
    const size_t first = shoal_block_span(count, 1, index, of, &first_length);
    return shoal_block_span(count, 1, index + run - 1, of, &last_length) + last_length - first;
}

static struct range block_range(const struct check *check, const struct operation *operation, const struct shoal_block *block)
{
    const unsigned parts = (unsigned)shoal_shape_parts(operation->shape, *block, check->size), of = block->of / parts;
    struct range range;
    int from, to;
    shoal_shape_route(operation->shape, *block, check->size, &from, &to);
    range.first = operand_cell(check, operation, block) + block->index / of * operation->units;
    const size_t length = length_of(check, operation, from, to);
    range.first += shoal_block_span(length, 1, block->index % of, of, &range.length);
    if (block->run)
        range.length = check_run_length(length, block->index % of, block->run, of);
    return block->bin ? bin_range(check, operation, block, of, range.length) : range;
}

static uint8_t *counts_of(const struct check *check, size_t cell)
{
    return check->counts + cell * (size_t)check->size;
}

static enum shoal_status race(const struct check *check, struct access now, const char *does, const struct shoal_block *block,
                              struct access earlier, const char *did)
{
    char here[STEP_TEXT_MAX], there[STEP_TEXT_MAX], name[BLOCK_TEXT_MAX];
    describe_access(check, now, here);
    describe_access(check, earlier, there);
    shoal_plan_print_block(block, name, sizeof name);
    return fault(check, "race: %s %s %s, which %s %s; nothing orders the two", here, does, name, there, did);
}

static enum shoal_status keep_read(struct check *check, struct cell *cell, struct access by)
{
    for (uint32_t i = cell->reads; i; i = check->reads[i - 1].next) {
        if (check->reads[i - 1].by.component == by.component) {
            check->reads[i - 1].by = by;
            return SHOAL_OK;
        }
    }
    uint32_t at = check->read_free;
    if (at) {
        check->read_free = check->reads[at - 1].next;
    } else {
        if (check->read_count == check->read_capacity) {
            const uint32_t more = 2 * check->read_capacity + 64;
            struct read *moved = realloc(check->reads, more * sizeof *moved);
            if (!moved)
                return SHOAL_ERR_MEMORY;
            check->reads = moved;
            check->read_capacity = more;
        }
        at = ++check->read_count;
    }
    check->reads[at - 1] = (struct read){by, cell->reads};
    cell->reads = at;
    return SHOAL_OK;
}

/* A put to a peer (else NOBODY) reads its source until the put has left. */
static enum shoal_status read_cell(struct check *check, struct access now, const struct shoal_block *block, size_t at, int peer)
{
    struct cell *cell = &check->cells[at];
    struct access by = now;

    if (!is_ordered(check, cell->wrote, now.component))
        return race(check, now, "reads", block, cell->wrote, "writes");
    if (cell->unit == NOTHING && !(block->run && block->bin)) { /* a run of bins may include empty space */
        char here[STEP_TEXT_MAX], name[BLOCK_TEXT_MAX];
        describe_access(check, now, here);
        shoal_plan_print_block(block, name, sizeof name);
        return fault(check, "empty: %s reads %s, which nobody has written before (is a wait missing?)", here, name);
    }
    if (peer != NOBODY) {
        by.component = puts_to(check, (int)now.component, peer);
        clock_of(check, by.component)[by.component] = now.epoch;
    }
    return keep_read(check, cell, by);
}

static enum shoal_status write_cell(struct check *check, struct access now, const struct shoal_block *block, size_t at)
{
    struct cell *cell = &check->cells[at];

    if (!is_ordered(check, cell->wrote, now.component))
        return race(check, now, "writes", block, cell->wrote, "writes");
    while (cell->reads) {
        struct read *read = &check->reads[cell->reads - 1];
        const uint32_t next = read->next;
        if (!is_ordered(check, read->by, now.component))
            return race(check, now, "writes", block, read->by, "reads");
        read->next = check->read_free;
        check->read_free = cell->reads;
        cell->reads = next;
    }
    cell->wrote = now;
    return SHOAL_OK;
}

/* ---- Lent operands ------------------------------------------------------------------------------------------------------- */

/* The input of a rank arrives in its ring, or its output gets a place there. Whatever is there now must be ordered before. */
static enum shoal_status arrive(struct check *check, int rank, int number, enum shoal_block_operand kind)
{
    const struct operation *operation = &check->operations[number];
    const bool is_input = kind == SHOAL_INPUT;
    const struct shoal_block block = is_input ? shoal_input(rank, 0, 1) : shoal_output(rank, 0, 1);
    const size_t first = is_input ? input_cell(operation, rank) : output_cell(operation, rank);
    const size_t units = is_input ? operation->input_units : operation->output_units;

    for (size_t i = 0; i < units; i++) {
        SHOAL_TRY(write_cell(check, access_now(check, (uint32_t)rank), &block, first + i));
        check->cells[first + i].unit = is_input ? operation->first_unit + (uint32_t)i : NOTHING;
        counts_of(check, first + i)[rank] = is_input;
    }
    check->at_hand[rank] |= (uint8_t)(1u << kind);
    return SHOAL_OK;
}

/* Waits until these operands of a rank (bits), as far as it lends them, are in its ring. */
static enum shoal_status await_arrival(struct check *check, int rank, int number, unsigned operands)
{
    operands &= lent_by(&check->operations[number], rank) & ~(unsigned)check->at_hand[rank];
    if (operands & SHOAL_LEND_INPUT)
        SHOAL_TRY(arrive(check, rank, number, SHOAL_INPUT));
    return operands & SHOAL_LEND_OUTPUT ? arrive(check, rank, number, SHOAL_OUTPUT) : SHOAL_OK;
}

/* The engine waits for its own operands before a step that names them. A peer's operand must have been lent. */
static enum shoal_status borrow(struct check *check, int rank, struct cursor at, const struct shoal_block *block)
{
    char here[STEP_TEXT_MAX], name[BLOCK_TEXT_MAX];
    if (block->operand > SHOAL_OUTPUT)
        return SHOAL_OK;
    if (block->rank == rank)
        return await_arrival(check, rank, at.operation, 1u << block->operand);
    const bool is_lent = lent_by(&check->operations[at.operation], block->rank) & 1u << block->operand;
    const bool is_there =
        check->cursors[block->rank].operation == at.operation && check->at_hand[block->rank] & 1u << block->operand;
    if (!is_lent || is_there)
        return SHOAL_OK;
    describe_step(check, rank, at, here);
    shoal_plan_print_block(block, name, sizeof name);
    return fault(check, "lent: %s borrows %s, which its rank has not lent yet or no longer lends", here, name);
}

/* ---- One step ------------------------------------------------------------------------------------------------------------ */

/* Checks that a reduce is marked partial exactly if contributions are missing: an average divides only at the end. */
static enum shoal_status verify_partial(const struct check *check, struct access now, const struct operation *operation,
                                        const struct shoal_step *step)
{
    bool is_partial = false;
    char here[STEP_TEXT_MAX];

    if (step->source_count == 1 || !operation->shape->is_reduced)
        return SHOAL_OK;
    for (int rank = 0; rank < check->size; rank++)
        is_partial |= check->sum[rank] == 0;
    if (is_partial == step->is_partial)
        return SHOAL_OK;
    describe_access(check, now, here);
    return fault(check, "result: %s %s", here,
                 is_partial ? "lacks contributions, and is not called partial"
                            : "has all contributions, but is called partial");
}

/* Between slots a device sums, even if there is only one source. */
static bool is_copy(const struct shoal_block *blocks, const struct shoal_step *step)
{
    return step->source_count == 1 && !(shoal_block_is_slot(blocks[0]) && shoal_block_is_slot(blocks[1]));
}

/* Returns what a step makes of an element. The blocks of a sum alone determine which sources are raw: inputs, what other ranks
 * of the host stage, and slots of devices. A put scales inputs; a copy changes nothing. */
static enum scaling scaling_after(const struct check *check, struct access now, const struct shoal_block *block,
                                  const struct shoal_step *step, size_t cell, bool is_copy)
{
    const enum scaling scaling = (enum scaling)check->cells[cell].scaling;
    const bool is_put = step->kind == SHOAL_STEP_PUT, is_input = block->operand == SHOAL_INPUT;
    const bool is_staged_by_other = block->operand == SHOAL_STAGING && block->rank != now.component;
    const bool is_read_as_raw = is_input || is_staged_by_other || shoal_block_is_slot(*block);

    if (is_put ? !is_input : is_copy)
        return scaling;
    return scaling == (is_read_as_raw ? RAW : SCALED) ? SCALED : WRONG;
}

/* Element i of the destinations becomes the sum of element i of the sources. In place, a copy to itself writes nothing. */
static enum shoal_status move_unit(struct check *check, struct access now, const struct operation *operation,
                                   const struct shoal_block *blocks, const struct shoal_step *step, size_t i)
{
    const size_t first = block_range(check, operation, &blocks[0]).first + i;
    const bool copies = is_copy(blocks, step);
    enum scaling scaling = RAW;
    uint32_t unit = NOTHING;

    memset(check->sum, 0, (size_t)check->size);
    for (int b = 0; b < step->source_count; b++) {
        const size_t cell = block_range(check, operation, &blocks[b]).first + i;
        const uint8_t *counts = counts_of(check, cell);
        const enum scaling after = scaling_after(check, now, &blocks[b], step, cell, copies);
        SHOAL_TRY(read_cell(check, now, &blocks[b], cell, step->kind == SHOAL_STEP_PUT ? step->peer : NOBODY));
        scaling = after > scaling ? after : scaling;
        unit = unit == NOTHING || unit == check->cells[cell].unit ? check->cells[cell].unit : MIXED;
        for (int rank = 0; rank < check->size; rank++) {
            const int total = check->sum[rank] + counts[rank];
            check->sum[rank] = (uint8_t)(total < UINT8_MAX ? total : UINT8_MAX);
        }
    }
    SHOAL_TRY(verify_partial(check, now, operation, step));
    for (int b = step->source_count; b < step->source_count + step->dest_count; b++) {
        const size_t cell = block_range(check, operation, &blocks[b]).first + i;
        if (copies && cell == first)
            continue;
        SHOAL_TRY(write_cell(check, now, &blocks[b], cell));
        check->cells[cell].unit = unit;
        check->cells[cell].scaling = (uint8_t)scaling;
        memcpy(counts_of(check, cell), check->sum, (size_t)check->size);
    }
    return SHOAL_OK;
}

static enum shoal_status move(struct check *check, int rank, struct cursor at, const struct shoal_step *step)
{
    const struct operation *operation = &check->operations[at.operation];
    const struct shoal_block *blocks = plan_of(check, at.operation, rank)->blocks + step->first_block;
    const size_t length = block_range(check, operation, &blocks[0]).length;

    for (int b = 0; b < step->source_count + step->dest_count; b++)
        SHOAL_TRY(borrow(check, rank, at, &blocks[b]));
    for (int b = 1; b < step->source_count + step->dest_count; b++) {
        const size_t other = block_range(check, operation, &blocks[b]).length;
        if (blocks[b].run ? other < length : other != length) {
            char here[STEP_TEXT_MAX];
            describe_step(check, rank, at, here);
            return fault(check, "form: %s has blocks of different lengths", here);
        }
    }
    for (size_t i = 0; i < length; i++)
        SHOAL_TRY(move_unit(check, access_now(check, (uint32_t)rank), operation, blocks, step, i));
    return SHOAL_OK;
}

/* Returns how often the peer must have incremented the counter, counted over both operations. */
static uint32_t wait_target(const struct check *check, int rank, struct cursor at, const struct shoal_step *step)
{
    const uint32_t before = at.operation == 0 ? 0 : plan_of(check, 0, rank)->signals_in[step->peer];
    return before + step->value;
}

static bool is_blocked(const struct check *check, int rank, struct cursor at)
{
    const struct shoal_step *step = &plan_of(check, at.operation, rank)->steps[at.step];
    return step->kind == SHOAL_STEP_WAIT && step->peer != rank &&
           check->incremented[rank * check->size + step->peer] < wait_target(check, rank, at, step);
}

static enum shoal_status check_run_step(struct check *check, int rank, struct cursor at)
{
    const struct shoal_step *step = &plan_of(check, at.operation, rank)->steps[at.step];

    clock_of(check, (uint32_t)rank)[rank]++;
    if (step->kind == SHOAL_STEP_WAIT && step->peer == rank && step->value > 0)
        return await_arrival(check, rank, at.operation, step->value);
    if (step->kind == SHOAL_STEP_WAIT && step->peer == rank) {
        await_puts(check, rank);
        return SHOAL_OK;
    }
    if (step->kind == SHOAL_STEP_WAIT) {
        const uint32_t target = wait_target(check, rank, at, step);
        if (target > 0)
            check_join(check, (uint32_t)rank,
                       check->snapshots + signal_number(check, rank, step->peer, target) * check->components);
        return SHOAL_OK;
    }
    if (step->kind != SHOAL_STEP_SIGNAL)
        SHOAL_TRY(move(check, rank, at, step));
    if (step->kind != SHOAL_STEP_REDUCE)
        check_increment_counter(check, step->peer, rank);
    return SHOAL_OK;
}

/* ---- The end of a rank's plan -------------------------------------------------------------------------------------------- */

/* Checks the cell of element u of the data that the rank receives from `from`. */
static enum shoal_status verify_unit(const struct check *check, int rank, int number, int from, size_t u, size_t cell)
{
    const struct operation *operation = &check->operations[number];
    const struct shoal_shape *shape = operation->shape;
    const size_t wanted = (shape->is_input_partitioned ? (size_t)rank * operation->units : 0) + u;
    const uint32_t unit = check->cells[cell].unit;

    if (unit != operation->first_unit + wanted)
        return fault(
            check,
            "result: rank %d, operation %d: element %zu of the output (from rank %d) comes from %s, not from element %zu", rank,
            number + 1, u, from, unit == MIXED ? "different elements" : "another element", wanted);
    for (int other = 0; other < check->size; other++) {
        const int promised = shape->is_reduced ? check_contributes(operation, other) : other == from;
        const int found = counts_of(check, cell)[other];
        if (found != promised)
            return fault(check,
                         "result: rank %d, operation %d: element %zu of the output (from rank %d) has rank %d's part %d times, "
                         "not %d",
                         rank, number + 1, u, from, other, found, promised);
    }
    if (operation->has_passes && check->cells[cell].scaling != SCALED)
        return fault(check, "scale: rank %d, operation %d: element %zu of the output has inputs that were not scaled once",
                     rank, number + 1, u);
    return SHOAL_OK;
}

/* A barrier moves nothing, but a rank that leaves it must know that all have entered. */
static enum shoal_status verify_barrier(const struct check *check, int rank, int number)
{
    for (int from = 0; from < check->size; from++) {
        const uint32_t first = number == 0 ? 1 : plan_of(check, 0, from)->step_count + 1;
        if (check->size > 1 && clock_of(check, (uint32_t)rank)[from] < first)
            return fault(check, "end: rank %d ends operation %d without knowing that rank %d has begun", rank, number + 1,
                         from);
    }
    return SHOAL_OK;
}

/* The caller reads, then overwrites, the part of its output that comes from a rank, or all of an output that is not
 * partitioned. */
static enum shoal_status end_output(struct check *check, int rank, int number, int from)
{
    const struct operation *operation = &check->operations[number];
    const uint32_t caller = (uint32_t)(check->size + rank);
    const bool is_partitioned = operation->shape->is_output_partitioned;
    const struct shoal_block block = shoal_output(rank, is_partitioned ? from : 0, is_partitioned ? check->size : 1);
    const struct range range = block_range(check, operation, &block);

    for (size_t i = 0; i < range.length; i++) {
        SHOAL_TRY(read_cell(check, access_now(check, caller), &block, range.first + i, NOBODY));
        SHOAL_TRY(verify_unit(check, rank, number, from, i, range.first + i));
        SHOAL_TRY(write_cell(check, access_now(check, caller), &block, range.first + i));
    }
    return SHOAL_OK;
}

/* The caller overwrites the part of its input for a rank, or all of an input that is not partitioned. */
static enum shoal_status end_input(struct check *check, int rank, int number, int to)
{
    const struct operation *operation = &check->operations[number];
    const uint32_t caller = (uint32_t)(check->size + rank);
    const bool is_partitioned = operation->shape->is_input_partitioned;
    const struct shoal_block block = shoal_input(rank, is_partitioned ? to : 0, is_partitioned ? check->size : 1);
    const struct range range = block_range(check, operation, &block);

    for (size_t i = 0; i < range.length; i++)
        SHOAL_TRY(write_cell(check, access_now(check, caller), &block, range.first + i));
    return SHOAL_OK;
}

/* The next chunk in the slot of the rank's device may run in any other slot of staging buffers, so the rank may already write
 * there. */
static enum shoal_status end_device(struct check *check, int rank, int number)
{
    const struct operation *operation = &check->operations[number];
    const struct shoal_block block = shoal_on_device(rank, SHOAL_ON_DEVICE_SLOT, 0, 1);
    const size_t first = operand_cell(check, operation, &block);

    for (size_t i = 0; operation->is_on_devices && i < operation->units; i++)
        SHOAL_TRY(write_cell(check, access_now(check, (uint32_t)rank), &block, first + i));
    return SHOAL_OK;
}

/* The caller now overwrites the input, and reads and overwrites the output. */
static enum shoal_status end_operation(struct check *check, int rank, int number)
{
    const struct operation *operation = &check->operations[number];
    const struct shoal_shape *shape = operation->shape;
    const uint32_t caller = (uint32_t)(check->size + rank);

    SHOAL_TRY(await_arrival(check, rank, number, SHOAL_LEND_INPUT | SHOAL_LEND_OUTPUT));
    check->at_hand[rank] = 0;
    clock_of(check, caller)[caller]++;
    await_puts(check, rank);
    check_join(check, caller, clock_of(check, (uint32_t)rank));
    if (shape->is_empty)
        return verify_barrier(check, rank, number);
    SHOAL_TRY(end_device(check, rank, number));
    if (check_receives(operation, rank) && !shape->is_output_partitioned)
        SHOAL_TRY(end_output(check, rank, number, operation->question->root));
    for (int from = 0; from < check->size && check_receives(operation, rank) && shape->is_output_partitioned; from++)
        SHOAL_TRY(end_output(check, rank, number, from));
    for (int to = 0; to < (shape->is_input_partitioned ? check->size : 1) && check_contributes(operation, rank); to++)
        SHOAL_TRY(end_input(check, rank, number, to));
    return SHOAL_OK;
}

/* ---- All ranks in turn --------------------------------------------------------------------------------------------------- */

/* Records what a rank knows when it starts: the ranks of its host and its peers have posted the operation, so their inputs are
 * written. */
static void start_operation(const struct check *check, int rank, int number)
{
    const struct shoal_view *view = check->operations[number].question->view;

    shoal_plan_find_peers(plan_of(check, number, rank), view, check->peers);
    for (int peer = 0; peer < check->size; peer++) {
        uint32_t *caller = clock_of(check, (uint32_t)rank) + check->size + peer;
        if ((check->peers[peer] || shoal_view_reaches(view, rank, peer)) && *caller == 0)
            *caller = 1;
    }
}

/* The rank's early steps run before that: they know only that their own caller has posted. */
static void start_early(const struct check *check, int rank)
{
    uint32_t *own = clock_of(check, (uint32_t)rank) + check->size + rank;
    *own = *own ? *own : 1;
}

/* Runs the rank as far as possible. Sets *moved_out if it ran any step. */
static enum shoal_status check_run_rank(struct check *check, int rank, bool *moved_out)
{
    struct cursor *at = &check->cursors[rank];

    while (at->operation < OPERATIONS) {
        if (at->step == 0)
            start_early(check, rank);
        if (at->step == shoal_plan_count_early(plan_of(check, at->operation, rank)))
            start_operation(check, rank, at->operation);
        if (at->step < plan_of(check, at->operation, rank)->step_count) {
            if (is_blocked(check, rank, *at))
                return SHOAL_OK;
            SHOAL_TRY(check_run_step(check, rank, *at));
            at->step++;
        } else {
            SHOAL_TRY(end_operation(check, rank, at->operation));
            *at = (struct cursor){at->operation + 1, 0};
        }
        *moved_out = true;
    }
    return SHOAL_OK;
}

static enum shoal_status deadlock(const struct check *check)
{
    size_t used = (size_t)snprintf(check->text, check->text_bytes, "deadlock: no rank can continue");
    for (int rank = 0; rank < check->size && used < check->text_bytes; rank++) {
        char here[STEP_TEXT_MAX];
        if (check->cursors[rank].operation == OPERATIONS)
            snprintf(here, sizeof here, "rank %d has ended", rank);
        else
            describe_step(check, rank, check->cursors[rank], here);
        used += (size_t)snprintf(check->text + used, check->text_bytes - used, "; %s", here);
    }
    return SHOAL_ERR_INTERNAL;
}

static enum shoal_status run_all(struct check *check)
{
    bool moved = true;
    while (moved) {
        moved = false;
        for (int rank = 0; rank < check->size; rank++)
            SHOAL_TRY(check_run_rank(check, rank, &moved));
    }
    for (int rank = 0; rank < check->size; rank++) {
        if (check->cursors[rank].operation < OPERATIONS)
            return deadlock(check);
    }
    return SHOAL_OK;
}

/* ---- Checks without running ---------------------------------------------------------------------------------------------- */

struct refusal {
    const char *kind; /* NULL: allowed */
    const char *why;
};

static bool names_slot(const struct shoal_plan *plan, uint32_t first, uint32_t count)
{
    for (uint32_t b = first; b < first + count; b++) {
        if (shoal_block_is_slot(plan->blocks[b]))
            return true;
    }
    return false;
}

/* Refuses blocks that devices, or the CPU, cannot reach. The rank's device executes each step that names a slot. */
static struct refusal refuse_device(const struct operation *operation, int rank, const struct shoal_step *step,
                                    const struct shoal_block *block, bool is_work, bool is_dest)
{
    const bool is_of_device = block->operand == SHOAL_ON_DEVICE;
    if (is_of_device && block->part >= SHOAL_ON_DEVICE_PARTS)
        return (struct refusal){"range", "a device has no such part"};
    if (is_of_device && block->rank != rank && (is_dest || !shoal_block_is_slot(*block)))
        return (struct refusal){"reach", "others only read a device's slot"};
    if (is_work && step->kind != SHOAL_STEP_REDUCE)
        return (struct refusal){"reach", "the network does not reach a device"};
    if (is_work && block->operand == SHOAL_STAGING)
        return (struct refusal){"reach", "a device does not reach staging buffers"};
    if (operation->is_on_devices && !is_work && block->operand <= SHOAL_OUTPUT)
        return (struct refusal){"reach", "it is on a device, which the processor does not reach"};
    return (struct refusal){NULL, NULL};
}

static struct refusal refuse_block(const struct check *check, int rank, struct cursor at, const struct shoal_step *step,
                                   const struct shoal_block *block, bool is_dest)
{
    const struct operation *operation = &check->operations[at.operation];
    const struct shoal_view *view = operation->question->view;
    const struct shoal_plan *plan = plan_of(check, at.operation, rank);
    const bool is_work = names_slot(plan, step->first_block, (uint32_t)step->source_count + step->dest_count);
    const bool is_there = block->rank < check->size && block->operand <= SHOAL_OUTPUT;
    const bool is_shared = !is_there || lent_by(operation, block->rank) & 1u << block->operand ||
                           (block->operand == SHOAL_INPUT ? shoal_view_shares_input(view, block->rank)
                                                          : shoal_view_shares_output(view, block->rank));

    if (block->rank >= check->size || block->of == 0 || block->index >= block->of || block->operand > SHOAL_ON_DEVICE)
        return (struct refusal){"range", "there is no such block"};
    if (block->of % shoal_shape_parts(operation->shape, *block, check->size))
        return (struct refusal){"range", "its operand is in parts, one for each rank"};
    if (block->operand == SHOAL_STAGING && !block->bin && block->part >= plan->parts)
        return (struct refusal){"range", "the staging buffer has no such part"};
    if (block->bin && block->bin - 1 + shoal_max_size(block->run, 1) > (size_t)plan->bins)
        return (struct refusal){"range", "the staging buffer has no such bin"};
    if ((block->bin && block->operand != SHOAL_STAGING) || (block->run && step->kind != SHOAL_STEP_PUT && !is_work))
        return (struct refusal){"form", "only staging buffers have bins, only puts and devices move several"};
    if (block->run && !block->bin && block->index + block->run > block->of)
        return (struct refusal){"range", "the run goes beyond the last block"};
    if (block->operand == SHOAL_STAGING && is_dest && block->part == 0 && block->rank != rank)
        return (struct refusal){"writers", "part 0 of a staging buffer is written by its own rank alone"};
    if (is_dest && block->operand == SHOAL_INPUT)
        return (struct refusal){"form", "inputs are only read"};
    if (step->kind == SHOAL_STEP_PUT && block->rank != (is_dest ? step->peer : rank))
        return (struct refusal){"form", "a put writes from this rank's block to the peer's"};
    if (step->kind == SHOAL_STEP_PUT && is_dest && block->operand != SHOAL_STAGING)
        return (struct refusal){"form", "a put goes into a staging buffer"};
    const struct refusal of_device = refuse_device(operation, rank, step, block, is_work, is_dest);
    if (of_device.kind || block->rank == rank)
        return of_device;
    if (!is_shared)
        return (struct refusal){"reach", "its rank does not share it"};
    if (step->kind == SHOAL_STEP_REDUCE && !shoal_view_reaches(view, rank, block->rank))
        return (struct refusal){"reach", "it is on another host"};
    return (struct refusal){NULL, NULL};
}

static enum shoal_status inspect_blocks(const struct check *check, int rank, struct cursor at, const struct shoal_step *step)
{
    const struct shoal_plan *plan = plan_of(check, at.operation, rank);
    const uint32_t count = (uint32_t)step->source_count + step->dest_count;
    char here[STEP_TEXT_MAX], name[BLOCK_TEXT_MAX];

    if (step->source_count == 0 || step->dest_count == 0 || step->first_block + count > plan->block_count ||
        (step->kind == SHOAL_STEP_PUT && count != 2))
        return fault(check, "form: rank %d, step %" PRIu32 " of operation %d has %d sources, %d destinations", rank, at.step,
                     at.operation + 1, step->source_count, step->dest_count);
    for (uint32_t b = 0; b < count; b++) {
        const struct shoal_block *block = &plan->blocks[step->first_block + b];
        const struct refusal refusal = refuse_block(check, rank, at, step, block, b >= step->source_count);
        if (!refusal.kind)
            continue;
        describe_step(check, rank, at, here);
        shoal_plan_print_block(block, name, sizeof name);
        return fault(check, "%s: %s, block %s: %s", refusal.kind, here, name, refusal.why);
    }
    return SHOAL_OK;
}

/* Counts signals in check->incremented. Sets waits[peer] to the last signal waited for. */
static enum shoal_status inspect_step(struct check *check, int rank, struct cursor at, uint32_t *waits)
{
    const struct shoal_step *step = &plan_of(check, at.operation, rank)->steps[at.step];
    char here[STEP_TEXT_MAX];

    if (step->kind > SHOAL_STEP_WAIT)
        return fault(check, "form: rank %d, step %" PRIu32 " of operation %d is of no kind", rank, at.step, at.operation + 1);
    if (step->kind == SHOAL_STEP_REDUCE)
        return inspect_blocks(check, rank, at, step);
    if (step->kind == SHOAL_STEP_WAIT && step->peer == rank && step->value <= (SHOAL_LEND_INPUT | SHOAL_LEND_OUTPUT))
        return SHOAL_OK;
    if (step->peer >= check->size || step->peer == rank) {
        describe_step(check, rank, at, here);
        return fault(check, "range: %s names a peer that is none", here);
    }
    if (step->kind == SHOAL_STEP_WAIT && step->value > 0) {
        if (step->value <= waits[step->peer]) {
            describe_step(check, rank, at, here);
            return fault(check, "counter: %s waits for a signal that was waited for before", here);
        }
        waits[step->peer] = step->value;
    }
    if (step->kind != SHOAL_STEP_WAIT)
        check->incremented[step->peer * check->size + rank]++;
    return step->kind == SHOAL_STEP_PUT ? inspect_blocks(check, rank, at, step) : SHOAL_OK;
}

static enum shoal_status inspect_counters(const struct check *check, int rank, int operation, const uint32_t *waits)
{
    const struct shoal_plan *plan = plan_of(check, operation, rank);

    for (int from = 0; from < check->size; from++) {
        const uint32_t incremented = check->incremented[rank * check->size + from];
        const uint32_t waited = waits[rank * check->size + from];
        if (incremented == plan->signals_in[from] && waited <= incremented)
            continue;
        return fault(check,
                     "counter: operation %d: rank %d signals rank %d %u times, which waits for #%u and expects %u in all",
                     operation + 1, from, rank, incremented, waited, plan->signals_in[from]);
    }
    return SHOAL_OK;
}

static enum shoal_status inspect_plan(struct check *check, int rank, int operation, uint32_t *waits)
{
    const struct shoal_plan *plan = plan_of(check, operation, rank);

    if (plan->status != SHOAL_OK || plan->rank != rank || plan->size != check->size)
        return fault(check, "form: the plan of rank %d for operation %d was not built for it (%s)", rank, operation + 1,
                     shoal_status_text(plan->status));
    if (plan->parts != plan_of(check, operation, 0)->parts)
        return fault(check, "form: in operation %d rank %d names %d parts of staging buffers, rank 0 names %d", operation + 1,
                     rank, plan->parts, plan_of(check, operation, 0)->parts);
    if (plan->bins != plan_of(check, operation, 0)->bins)
        return fault(check, "form: in operation %d rank %d divides staging buffers into %d bins, rank 0 into %d", operation + 1,
                     rank, plan->bins, plan_of(check, operation, 0)->bins);
    if (plan->staging_of != plan_of(check, operation, 0)->staging_of)
        return fault(check, "form: in operation %d rank %d partitions staging buffers into %d blocks, rank 0 into %d",
                     operation + 1, rank, plan->staging_of, plan_of(check, operation, 0)->staging_of);
    for (uint32_t step = 0; step < plan->step_count; step++)
        SHOAL_TRY(inspect_step(check, rank, (struct cursor){operation, step}, waits));
    return SHOAL_OK;
}

static void free_words(uint32_t **words)
{
    free(*words);
}

static enum shoal_status inspect(struct check *check, int operation)
{
    const size_t pairs = (size_t)check->size * (size_t)check->size;
    SHOAL_SCOPED(free_words) uint32_t *waits = calloc(pairs, sizeof *waits);

    if (!waits)
        return SHOAL_ERR_MEMORY;
    memset(check->incremented, 0, pairs * sizeof *check->incremented);
    for (int rank = 0; rank < check->size; rank++)
        SHOAL_TRY(inspect_plan(check, rank, operation, waits + rank * check->size));
    for (int rank = 0; rank < check->size; rank++)
        SHOAL_TRY(inspect_counters(check, rank, operation, waits));
    return SHOAL_OK;
}

/* ---- Start --------------------------------------------------------------------------------------------------------------- */

/* Returns how much of a staging buffer the operation uses. */
static size_t staging_units(const struct check *check, const struct operation *operation)
{
    const struct shoal_plan *plan = &operation->question->plans[0];
    const bool is_partitioned = operation->shape->is_input_partitioned || operation->shape->is_output_partitioned;

    if (plan->bins == 0)
        return (size_t)plan->parts * part_units(operation, check->size);
    return (size_t)plan->bins * shoal_bin_stride(operation->units, 1, is_partitioned ? 1 : (unsigned)plan->staging_of);
}

/* Assigns cells to the operation. */
static void lay_out(struct check *check, struct operation *operation, const struct shoal_plan_question *question)
{
    const size_t size = (size_t)check->size;

    operation->question = question;
    operation->shape = question->shape;
    operation->units = question->units;
    operation->input_units = question->units * (question->shape->is_input_partitioned ? size : 1);
    operation->output_units = question->units * (question->shape->is_output_partitioned ? size : 1);
    operation->first_unit = (uint32_t)check->cell_count;
    operation->first_input = check->cell_count;
    operation->first_output = operation->first_input + size * operation->input_units;
    check->cell_count = operation->first_output + size * operation->output_units;
    check->staging_units = shoal_max_size(check->staging_units, staging_units(check, operation));
    operation->is_on_devices = names_slot(question->plans, 0, question->plans[0].block_count);
    for (int rank = 1; rank < check->size && question->shape->is_reduced; rank++)
        operation->has_passes |= !shoal_view_reaches(question->view, 0, rank);
    check->device_units = shoal_max_size(check->device_units, operation->is_on_devices ? operation->units : 0);
}

/* Every caller has written its input before it posts. */
static void fill_inputs(const struct check *check, const struct operation *operation)
{
    for (int rank = 0; rank < check->size; rank++) {
        const bool is_there = check_contributes(operation, rank) && !(lent_by(operation, rank) & SHOAL_LEND_INPUT);
        for (size_t i = 0; is_there && i < operation->input_units; i++) {
            const size_t cell = input_cell(operation, rank) + i;
            check->cells[cell].wrote = (struct access){(uint32_t)(check->size + rank), 1};
            check->cells[cell].unit = operation->first_unit + (uint32_t)i;
            counts_of(check, cell)[rank] = 1;
        }
    }
}

/* Allocates room for the signals of both operations, in the order of pairs. */
static enum shoal_status make_signals(struct check *check)
{
    const int size = check->size;
    size_t total = 0;

    for (int to = 0; to < size; to++) {
        for (int from = 0; from < size; from++) {
            check->signal_first[to * size + from] = total;
            for (int i = 0; i < OPERATIONS; i++)
                total += plan_of(check, i, to)->signals_in[from];
        }
    }
    check->snapshots = malloc((total + 1) * check->components * sizeof *check->snapshots);
    return check->snapshots ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static enum shoal_status make_cells(struct check *check)
{
    const size_t size = (size_t)check->size;

    check->staging_cell = check->cell_count;
    check->cell_count += size * check->staging_units;
    check->device_cell = check->cell_count;
    check->cell_count += size * SHOAL_ON_DEVICE_PARTS * check->device_units;
    check->cells = calloc(check->cell_count + 1, sizeof *check->cells);
    check->counts = calloc(check->cell_count + 1, size);
    check->sum = calloc(size, 1);
    if (!check->cells || !check->counts || !check->sum)
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < check->cell_count; i++)
        check->cells[i].unit = NOTHING;
    for (int i = 0; i < OPERATIONS; i++)
        fill_inputs(check, &check->operations[i]);
    return SHOAL_OK;
}

/* Callers begin at epoch 1, before they post both operations. */
static enum shoal_status make_clocks(struct check *check)
{
    const size_t size = (size_t)check->size;

    check->put_targets = check->size <= PUTS_APART_MAX ? check->size : 1;
    check->components = (2 + (size_t)check->put_targets) * size;
    check->clocks = calloc(check->components * check->components, sizeof *check->clocks);
    check->signal_first = calloc(size * size, sizeof *check->signal_first);
    check->incremented = calloc(size * size, sizeof *check->incremented);
    check->cursors = calloc(size, sizeof *check->cursors);
    check->peers = calloc(size, 1);
    check->at_hand = calloc(size, 1);
    if (!check->clocks || !check->signal_first || !check->incremented || !check->cursors || !check->peers || !check->at_hand)
        return SHOAL_ERR_MEMORY;
    for (size_t caller = size; caller < 2 * size; caller++)
        check->clocks[caller * check->components + caller] = 1;
    return SHOAL_OK;
}

enum shoal_status shoal_plan_check(const struct shoal_plan_question *question, char *text, size_t text_bytes)
{
    const struct shoal_plan_question *next = question->next ? question->next : question;
    SHOAL_SCOPED(check_fini)
    struct check check = {.size = question->view->size, .text = text, .text_bytes = text_bytes};

    if (text_bytes > 0)
        text[0] = 0;
    if (next->view->size != check.size)
        return fault(&check, "form: the operations have different numbers of ranks");
    lay_out(&check, &check.operations[0], question);
    lay_out(&check, &check.operations[1], next);
    SHOAL_TRY(make_clocks(&check));
    for (int i = 0; i < OPERATIONS; i++)
        SHOAL_TRY(inspect(&check, i));
    memset(check.incremented, 0, (size_t)(check.size * check.size) * sizeof *check.incremented);
    SHOAL_TRY(make_signals(&check));
    SHOAL_TRY(make_cells(&check));
    return run_all(&check);
}
