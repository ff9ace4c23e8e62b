#include "predict/predict_script.h"

#include <stdlib.h>
#include <string.h>

#include "collective/rounds.h"

_Static_assert(SHOAL_ACT_NEEDS_INPUT == SHOAL_LEND_INPUT && SHOAL_ACT_NEEDS_OUTPUT == SHOAL_LEND_OUTPUT, "the same bits");

/* ---- Acts ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status script_append(struct shoal_script *script, struct shoal_act act)
{
    if (script->count == script->capacity) {
        const uint32_t more = script->capacity + script->capacity / 2 + 16;
        struct shoal_act *moved = realloc(script->acts, more * sizeof *moved);
        if (!moved)
            return SHOAL_ERR_MEMORY;
        script->acts = moved;
        script->capacity = more;
    }
    script->acts[script->count++] = act;
    return SHOAL_OK;
}

/* Merges work that follows work. */
static enum shoal_status append_work(struct shoal_script *script, uint64_t full_bytes, uint64_t last_bytes)
{
    struct shoal_act *before = script->count ? &script->acts[script->count - 1] : NULL;
    if (!before || before->kind != SHOAL_ACT_WORK)
        return script_append(script, (struct shoal_act){.kind = SHOAL_ACT_WORK, .bytes = {full_bytes, last_bytes}});
    before->bytes[SHOAL_LENGTH_FULL] += full_bytes;
    before->bytes[SHOAL_LENGTH_LAST] += last_bytes;
    return SHOAL_OK;
}

static struct shoal_act send_of(int peer, uint64_t full_bytes, uint64_t last_bytes)
{
    return (struct shoal_act){.kind = SHOAL_ACT_SEND, .peer = (uint16_t)peer, .bytes = {full_bytes, last_bytes}};
}

/* Appends a signal to a rank of this host or of another. */
static enum shoal_status append_increment(const struct shoal_cast *cast, struct shoal_script *script, int rank, int peer)
{
    const bool is_local = shoal_cast_host(cast, rank) == shoal_cast_host(cast, peer);
    return script_append(script,
                         (struct shoal_act){.kind = is_local ? SHOAL_ACT_INCREMENT : SHOAL_ACT_SEND, .peer = (uint16_t)peer});
}

static enum shoal_status append_wait(struct shoal_script *script, int peer, uint32_t value)
{
    return script_append(script, (struct shoal_act){.kind = SHOAL_ACT_WAIT, .peer = (uint16_t)peer, .value = value});
}

/* ---- From blocks to bytes ------------------------------------------------------------------------------------------------ */

/* Returns the same number as the engine's find_span(), for a block of equal parts. */
static size_t block_bytes(const struct shoal_case *asked, struct shoal_block block, size_t elements)
{
    const int parts = shoal_shape_parts(asked->view.shape, block, asked->view.size);
    const unsigned of = (unsigned)(block.of / parts), index = block.index % of;
    const size_t grain = SHOAL_CACHE_LINE / asked->element_bytes;
    size_t length, none;
    const size_t begin = shoal_block_span(elements, grain, index, of, &length);
    if (block.run && block.bin)
        length = block.run * shoal_bin_stride(elements, grain, of);
    else if (block.run)
        length = shoal_block_span(elements, grain, index + block.run, of, &none) - begin;
    return length * asked->element_bytes;
}

/* Returns which of the rank's own operands a step touches. */
static uint8_t step_needs(const struct shoal_plan *plan, const struct shoal_step *step)
{
    uint8_t needs = 0;
    for (uint32_t i = 0; i < (uint32_t)step->source_count + step->dest_count; i++) {
        const struct shoal_block *block = &plan->blocks[step->first_block + i];
        if (block->rank == plan->rank && block->operand == SHOAL_INPUT)
            needs |= SHOAL_ACT_NEEDS_INPUT;
        if (block->rank == plan->rank && block->operand == SHOAL_OUTPUT)
            needs |= SHOAL_ACT_NEEDS_OUTPUT;
    }
    return needs;
}

/* Adds needs to the act that was appended or extended. */
static enum shoal_status note_needs(enum shoal_status status, struct shoal_script *script, uint8_t needs)
{
    if (status == SHOAL_OK && script->count)
        script->acts[script->count - 1].needs |= needs;
    return status;
}

static bool is_of_slot(const struct shoal_plan *plan, const struct shoal_step *step)
{
    const struct shoal_block *blocks = &plan->blocks[step->first_block];
    return shoal_block_is_slot(blocks[0]) || shoal_block_is_slot(blocks[step->source_count]);
}

/* A GPU moves bytes within its own memory in no time. All copies to the output are one act. */
static enum shoal_status append_device(struct shoal_script *script, const struct shoal_plan *plan,
                                       const struct shoal_step *step, uint64_t full_bytes, uint64_t last_bytes)
{
    const struct shoal_block *blocks = &plan->blocks[step->first_block], dest = blocks[step->source_count];
    struct shoal_act *before = script->count ? &script->acts[script->count - 1] : NULL;
    const bool is_out = dest.operand == SHOAL_ON_DEVICE && dest.part == SHOAL_ON_DEVICE_OUT;
    const bool is_back = blocks[0].operand == SHOAL_ON_DEVICE && blocks[0].part == SHOAL_ON_DEVICE_BACK;
    uint64_t others = is_out || is_back;
    for (unsigned i = 0; i < step->source_count; i++)
        others += blocks[i].rank != plan->rank;
    if (before && before->kind == SHOAL_ACT_DEVICE && dest.operand == SHOAL_OUTPUT) {
        before->bytes[SHOAL_LENGTH_FULL] += others * full_bytes;
        before->bytes[SHOAL_LENGTH_LAST] += others * last_bytes;
        return SHOAL_OK;
    }
    const enum shoal_copy_link link = is_out ? SHOAL_COPY_UP : is_back ? SHOAL_COPY_DOWN : SHOAL_COPY_BETWEEN;
    return script_append(script, (struct shoal_act){.kind = SHOAL_ACT_DEVICE,
                                                    .link = (uint8_t)link,
                                                    .bytes = {others * full_bytes, others * last_bytes}});
}

/* Copies of a block to itself, as in place, do not occur: operands are separate. */
static enum shoal_status script_append_step(const struct shoal_cast *cast, struct shoal_script *script,
                                            const struct shoal_plan *plan, const struct shoal_step *step,
                                            const size_t elements[SHOAL_LENGTHS])
{
    const struct shoal_block *blocks = step->source_count ? &plan->blocks[step->first_block] : NULL;
    const size_t full = blocks ? block_bytes(cast->asked, *blocks, elements[SHOAL_LENGTH_FULL]) : 0;
    const size_t last = blocks ? block_bytes(cast->asked, *blocks, elements[SHOAL_LENGTH_LAST]) : 0;
    const size_t operands = (size_t)step->source_count + step->dest_count;
    switch ((enum shoal_step_kind)step->kind) {
    case SHOAL_STEP_REDUCE:
        if (is_of_slot(plan, step))
            return append_device(script, plan, step, full, last);
        return note_needs(append_work(script, operands * full, operands * last), script, step_needs(plan, step));
    case SHOAL_STEP_PUT:
        return note_needs(script_append(script, send_of(step->peer, full, last)), script, step_needs(plan, step));
    case SHOAL_STEP_SIGNAL:
        return append_increment(cast, script, plan->rank, step->peer);
    case SHOAL_STEP_WAIT:
        if (step->peer == plan->rank && step->value) /* needs are the operands that it is to lend */
            return script_append(script, (struct shoal_act){.kind = SHOAL_ACT_WORK, .needs = (uint8_t)step->value});
        if (step->peer == plan->rank) /* no act: a chunk's puts have left long before its last answer arrives */
            return SHOAL_OK;
        return append_wait(script, step->peer, step->value);
    }
    return SHOAL_ERR_INTERNAL;
}

/* ---- Sources of each rank ------------------------------------------------------------------------------------------------ */

static void note_source(struct shoal_cast *cast, int rank, int peer)
{
    uint16_t *index = &cast->index[(size_t)rank * (size_t)cast->size + (size_t)peer];
    if (!*index)
        *index = ++cast->ranks[rank].sources;
}

static enum shoal_status note_owed(struct shoal_cast *cast, const struct shoal_plan *plan)
{
    struct shoal_script_rank *part = &cast->ranks[plan->rank];
    part->owed = calloc((size_t)part->sources + 1, sizeof *part->owed);
    if (!part->owed)
        return SHOAL_ERR_MEMORY;
    for (int peer = 0; peer < cast->size; peer++) {
        if (plan->signals_in[peer])
            part->owed[shoal_cast_index(cast, plan->rank, peer)] = plan->signals_in[peer];
    }
    return SHOAL_OK;
}

/* ---- Meeting ------------------------------------------------------------------------------------------------------------- */

static bool is_peer_set(const struct shoal_cast *cast, const uint8_t *peers, int rank, int peer)
{
    return peer != rank && (peers[peer] || shoal_cast_host(cast, rank) == shoal_cast_host(cast, peer));
}

/* Announces the operation to each rank of the peer set, and waits for their announcements. */
static enum shoal_status script_meet(struct shoal_cast *cast, const uint8_t *peers, int rank)
{
    struct shoal_script *script = &cast->ranks[rank].meet;
    SHOAL_TRY(script_append(script, (struct shoal_act){.kind = SHOAL_ACT_PUBLISH}));
    for (int i = 1; i < cast->size; i++) {
        const int peer = (rank + i) % cast->size;
        if (peers[peer])
            SHOAL_TRY(script_append(script, send_of(peer, SHOAL_SCRIPT_ANNOUNCEMENT_BYTES, SHOAL_SCRIPT_ANNOUNCEMENT_BYTES)));
    }
    for (int peer = 0; peer < cast->size; peer++) {
        if (!is_peer_set(cast, peers, rank, peer))
            continue;
        note_source(cast, rank, peer);
        SHOAL_TRY(append_wait(script, peer, 1));
    }
    return SHOAL_OK;
}

/* ---- Direct: all data travel with the announcements ---------------------------------------------------------------------- */

/* If an operand is in parts, a rank needs only its own part. */
static uint64_t direct_work_bytes(const struct shoal_case *asked, int rank)
{
    const struct shoal_shape *shape = asked->view.shape;
    const uint64_t part = asked->count * asked->element_bytes, size = (uint64_t)asked->view.size;
    if (!shoal_shape_receives(shape, rank, 0))
        return 0;
    return shape->is_reduced ? (size + 1) * part : 2 * part * (shape->is_output_partitioned ? size : 1);
}

/* Published data are copied once and go to all ranks. */
static enum shoal_status give_directly(struct shoal_cast *cast, int rank)
{
    const struct shoal_case *asked = cast->asked;
    struct shoal_script *script = &cast->ranks[rank].meet;
    const uint64_t given = shoal_shape_contributes(asked->view.shape, rank, 0) ? asked->selection.payload_bytes : 0;
    const uint64_t sent = SHOAL_SCRIPT_ANNOUNCEMENT_BYTES + given;
    if (given)
        SHOAL_TRY(append_work(script, 2 * given, 2 * given));
    SHOAL_TRY(script_append(script, (struct shoal_act){.kind = SHOAL_ACT_PUBLISH}));
    for (int i = 1; i < cast->size; i++) {
        const int peer = (rank + i) % cast->size;
        note_source(cast, rank, peer);
        if (shoal_cast_host(cast, rank) != shoal_cast_host(cast, peer))
            SHOAL_TRY(script_append(script, send_of(peer, sent, sent)));
    }
    return SHOAL_OK;
}

/* A single rank only copies. */
static enum shoal_status build_direct(struct shoal_cast *cast, int rank)
{
    const struct shoal_shape *shape = cast->asked->view.shape;
    struct shoal_script *script = &cast->ranks[rank].meet;
    if (cast->size > 1)
        SHOAL_TRY(give_directly(cast, rank));
    for (int peer = 0; peer < cast->size; peer++) {
        const bool is_needed =
            shape->is_empty || (shoal_shape_receives(shape, rank, 0) && shoal_shape_contributes(shape, peer, 0));
        if (peer != rank && is_needed)
            SHOAL_TRY(append_wait(script, peer, 1));
    }
    const uint64_t bytes = direct_work_bytes(cast->asked, rank);
    return bytes ? append_work(script, bytes, bytes) : SHOAL_OK;
}

/* ---- In rounds ----------------------------------------------------------------------------------------------------------- */

/* Returns the bytes that travel with an announcement to or from a host that holds those parts. */
static uint64_t round_bytes(const struct shoal_case *asked, struct shoal_ranks held)
{
    const uint64_t part = asked->count * asked->element_bytes;
    return asked->view.shape->is_output_partitioned ? part * (uint64_t)held.count : part;
}

/* For sums, two are read and one is written; parts are copied. */
static uint64_t round_work_bytes(const struct shoal_case *asked, uint64_t bytes)
{
    return (asked->view.shape->is_reduced ? 3 : 2) * bytes;
}

static enum shoal_status append_round(struct shoal_cast *cast, int rank, const struct shoal_rounds_step *round)
{
    const struct shoal_case *asked = cast->asked;
    struct shoal_script *script = &cast->ranks[rank].meet;
    const uint64_t sent = SHOAL_SCRIPT_ANNOUNCEMENT_BYTES + round_bytes(asked, round->held);
    for (int i = 0; i < round->to.count; i++)
        SHOAL_TRY(script_append(script, send_of(round->to.at[i], sent, sent)));
    if (round->from < 0)
        return SHOAL_OK;
    note_source(cast, rank, round->from);
    SHOAL_TRY(append_wait(script, round->from, 1));
    const uint64_t work = round_work_bytes(asked, round_bytes(asked, round->came));
    return work ? append_work(script, work, work) : SHOAL_OK;
}

static enum shoal_status append_rounds(struct shoal_cast *cast, int rank, const struct shoal_rounds *rounds)
{
    struct shoal_script *script = &cast->ranks[rank].meet;
    SHOAL_TRY(script_append(script, (struct shoal_act){.kind = SHOAL_ACT_PUBLISH}));
    for (int i = 0; i < rounds->local.count; i++) {
        if (rounds->local.at[i] == rank)
            continue;
        note_source(cast, rank, rounds->local.at[i]);
        SHOAL_TRY(append_wait(script, rounds->local.at[i], 1));
    }
    const uint64_t work = round_work_bytes(cast->asked, round_bytes(cast->asked, rounds->local));
    if (work)
        SHOAL_TRY(append_work(script, work, work));
    for (int i = 0; i < rounds->count; i++)
        SHOAL_TRY(append_round(cast, rank, &rounds->rounds[i]));
    return SHOAL_OK;
}

static enum shoal_status build_rounds(struct shoal_cast *cast, int rank)
{
    struct shoal_rounds rounds;
    if (!shoal_rounds_init(&rounds, &cast->asked->view, rank))
        return SHOAL_ERR_MEMORY;
    const enum shoal_status status = append_rounds(cast, rank, &rounds);
    shoal_rounds_fini(&rounds);
    return status;
}

/* ---- With a plan --------------------------------------------------------------------------------------------------------- */

static size_t chunk_elements_of(const struct shoal_case *asked, const struct shoal_plan *plan)
{
    if (!asked->selection.is_by_owners)
        return shoal_select_chunk(asked->entry, plan, asked->chunk_bytes, asked->element_bytes);
    const size_t bytes = shoal_select_device_chunk_bytes(asked->model.unit_bytes, asked->chunk_bytes, plan->size, asked->hosts);
    return bytes / asked->element_bytes;
}

/* Equal on all ranks. A barrier is one empty chunk. */
static void count_chunks(struct shoal_cast *cast, const struct shoal_plan *plan, size_t elements[SHOAL_LENGTHS])
{
    const struct shoal_case *asked = cast->asked;
    elements[SHOAL_LENGTH_FULL] = elements[SHOAL_LENGTH_LAST] = 0;
    cast->chunks = asked->view.shape->is_empty;
    if (!asked->count)
        return;
    const size_t chunk = chunk_elements_of(asked, plan);
    cast->chunks = (asked->count + chunk - 1) / chunk;
    cast->chunk_elements = chunk;
    elements[SHOAL_LENGTH_FULL] = shoal_min_size(chunk, asked->count);
    elements[SHOAL_LENGTH_LAST] = asked->count - (cast->chunks - 1) * chunk;
}

static enum shoal_status take_plan(struct shoal_cast *cast, const struct shoal_plan *plan)
{
    uint8_t peers[SHOAL_PLAN_RANKS_MAX];
    size_t elements[SHOAL_LENGTHS];
    SHOAL_TRY(plan->status);
    count_chunks(cast, plan, elements);
    shoal_plan_find_peers(plan, &cast->asked->view, peers);
    SHOAL_TRY(script_meet(cast, peers, plan->rank));
    for (int peer = 0; peer < cast->size; peer++) {
        if (plan->signals_in[peer])
            note_source(cast, plan->rank, peer);
    }
    SHOAL_TRY(note_owed(cast, plan));
    for (uint32_t i = 0; i < plan->step_count; i++)
        SHOAL_TRY(script_append_step(cast, &cast->ranks[plan->rank].chunk, plan, &plan->steps[i], elements));
    return SHOAL_OK;
}

static enum shoal_status build_planned(struct shoal_cast *cast, int rank)
{
    uint8_t flags[2 * SHOAL_PLAN_RANKS_MAX];
    const struct shoal_view masked = shoal_view_mask(&cast->asked->view, rank, flags);
    struct shoal_plan plan;
    shoal_plan_init(&plan, rank, cast->size);
    cast->asked->entry->build(&plan, &masked, rank, 0);
    const enum shoal_status status = take_plan(cast, &plan);
    shoal_plan_fini(&plan);
    return status;
}

/* Releases spare capacity, which matters with thousands of ranks. */
static void script_trim(struct shoal_script *script)
{
    struct shoal_act *moved = script->count ? realloc(script->acts, script->count * sizeof *moved) : NULL;
    if (!moved)
        return;
    script->acts = moved;
    script->capacity = script->count;
}

enum shoal_status shoal_cast_init(struct shoal_cast *cast, const struct shoal_case *asked)
{
    const size_t size = (size_t)asked->view.size;
    *cast = (struct shoal_cast){.asked = asked, .size = asked->view.size, .local = asked->view.size / asked->hosts};
    cast->ranks = calloc(size, sizeof *cast->ranks);
    cast->index = calloc(size * size, sizeof *cast->index);
    cast->loads = calloc(size, sizeof *cast->loads);
    if (!cast->ranks || !cast->index || !cast->loads)
        return SHOAL_ERR_MEMORY;
    for (int rank = 0; rank < asked->view.size; rank++) {
        SHOAL_TRY(!asked->entry                                ? build_direct(cast, rank)
                  : shoal_algorithm_is_in_rounds(asked->entry) ? build_rounds(cast, rank)
                                                               : build_planned(cast, rank));
        if (!cast->chunks && cast->ranks[rank].meet.count) /* all data travel with the announcements */
            cast->ranks[rank].meet.acts[0].needs = SHOAL_ACT_NEEDS_INPUT | SHOAL_ACT_NEEDS_OUTPUT;
        script_trim(&cast->ranks[rank].meet);
        script_trim(&cast->ranks[rank].chunk);
    }
    return SHOAL_OK;
}

void shoal_cast_fini(struct shoal_cast *cast)
{
    for (int rank = 0; cast->ranks && rank < cast->size; rank++) {
        free(cast->ranks[rank].meet.acts);
        free(cast->ranks[rank].chunk.acts);
        free(cast->ranks[rank].owed);
    }
    free(cast->ranks);
    free(cast->index);
    free(cast->loads);
}

size_t shoal_cast_bytes(const struct shoal_cast *cast, int rank, bool is_input, size_t elements)
{
    const struct shoal_shape *shape = cast->asked->view.shape;
    const bool has_it = is_input ? shoal_shape_contributes(shape, rank, 0) : shoal_shape_receives(shape, rank, 0);
    const bool is_partitioned = is_input ? shape->is_input_partitioned : shape->is_output_partitioned;
    return has_it ? elements * cast->asked->element_bytes * (is_partitioned ? (size_t)cast->size : 1) : 0;
}

/* ---- Loads --------------------------------------------------------------------------------------------------------------- */

static void load_act(struct shoal_cast *cast, int rank, const struct shoal_act *act, const uint64_t times[SHOAL_LENGTHS])
{
    struct shoal_load *own = &cast->loads[rank], *peer = &cast->loads[act->peer];
    const uint64_t count = times[SHOAL_LENGTH_FULL] + times[SHOAL_LENGTH_LAST];
    const uint64_t bytes =
        times[SHOAL_LENGTH_FULL] * act->bytes[SHOAL_LENGTH_FULL] + times[SHOAL_LENGTH_LAST] * act->bytes[SHOAL_LENGTH_LAST];
    own->work_bytes += act->kind == SHOAL_ACT_WORK ? bytes : 0;
    own->signals += act->kind == SHOAL_ACT_INCREMENT || act->kind == SHOAL_ACT_PUBLISH ? count : 0;
    if (act->kind != SHOAL_ACT_SEND)
        return;
    own->sends += count;
    own->sent_bytes += bytes;
    peer->receives += count;
    peer->received_bytes += bytes;
}

void shoal_cast_load(struct shoal_cast *cast)
{
    const uint64_t once[SHOAL_LENGTHS] = {1, 0}, all[SHOAL_LENGTHS] = {cast->chunks - (cast->chunks > 0), 1};
    memset(cast->loads, 0, (size_t)cast->size * sizeof *cast->loads);
    for (int rank = 0; rank < cast->size; rank++) {
        const struct shoal_script_rank *part = &cast->ranks[rank];
        for (uint32_t i = 0; i < part->meet.count; i++)
            load_act(cast, rank, &part->meet.acts[i], once);
        for (uint32_t i = 0; i < part->chunk.count; i++)
            load_act(cast, rank, &part->chunk.acts[i], all);
    }
}
