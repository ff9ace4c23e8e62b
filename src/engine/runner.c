/* How the engine runs plans: it turns operands into addresses, chunks into slots, steps into bytes. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "engine/call_sizes.h"
#include "engine/engine_state.h"
#include "engine/reduce_step.h"
#include "operand/lent.h"

/* ---- Direct operations: the data travel with the announcements ----------------------------------------------------------- */

/* The data are so small that each part is copied element by element of the tensors' list. */
const void *shoal_runner_pack(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const int parts = request->shape->is_input_partitioned ? engine->size : 1;
    char *const packed = shoal_call_contiguous(call, SHOAL_INPUT);
    for (int part = 0; part < parts && packed != call->input; part++) {
        const size_t at = shoal_call_part_at(call, engine->rank, SHOAL_INPUT, engine->rank, part);
        const size_t count = shoal_call_length(call, engine->rank, engine->rank, part);
        shoal_call_pack(call, engine->rank, request->element_bytes, part, count, packed + at * request->element_bytes);
    }
    return packed;
}

/* An input that is not contiguous was packed when it was announced. */
const char *shoal_runner_contribution_of(struct shoal_engine *engine, const struct shoal_request *request, int from)
{
    if (from == engine->rank)
        return shoal_call_contiguous(&request->call, SHOAL_INPUT);
    const size_t bytes = shoal_engine_payload_bytes(engine, request, from);
    return bytes ? engine->ops->payload(engine->transport, from, request->sequence, bytes) : NULL;
}

/* Returns where this rank's part begins in a contribution, in bytes. */
static size_t own_part_at(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    if (!request->shape->is_input_partitioned)
        return 0;
    const struct shoal_call_parts *parts = shoal_call_parts(call);
    const size_t at = parts && parts->sent ? parts->sent_at[engine->rank] : (size_t)engine->rank * call->count;
    return at * request->element_bytes;
}

static void reduce_payloads(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const size_t at = own_part_at(engine, request), count = shoal_call_length(call, engine->rank, 0, engine->rank);
    void *const dest = shoal_call_contiguous(call, SHOAL_OUTPUT);
    for (int r = 0; r < engine->size; r++)
        engine->scratch.sources[r] = shoal_runner_contribution_of(engine, request, r) + at;
    engine->kernels->reduce[call->type][call->op](&dest, 1, engine->scratch.sources, engine->size, count,
                                                  shoal_engine_operation(engine, call).argument, SHOAL_STORES_CACHED);
    if (SHOAL_UNLIKELY(dest != call->output))
        shoal_call_unpack(call, engine->rank, request->element_bytes, 0, count, dest);
}

static void copy_payload(struct shoal_engine *engine, const struct shoal_request *request, int from)
{
    const struct shoal_call *call = &request->call;
    const int part = request->shape->is_output_partitioned ? from : 0;
    const size_t count = shoal_call_length(call, engine->rank, from, engine->rank);
    if (!count)
        return;
    const char *sent = shoal_runner_contribution_of(engine, request, from) + own_part_at(engine, request);
    if (call->layout) {
        shoal_call_unpack(call, engine->rank, request->element_bytes, part, count, sent);
        return;
    }
    const size_t bytes = count * request->element_bytes;
    char *to = (char *)call->output + (size_t)part * bytes;
    if (to != sent)
        memcpy(to, sent, bytes);
}

static void copy_payloads(struct shoal_engine *engine, const struct shoal_request *request)
{
    for (int from = 0; from < engine->size; from++) {
        if (shoal_shape_contributes(request->shape, from, request->call.root))
            copy_payload(engine, request, from);
    }
}

void shoal_runner_finish_direct(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(request->is_direct && request->next_missing == engine->size);
    const struct shoal_shape *shape = request->shape;
    request->record->algorithm = shoal_engine_direct;
    request->record->done = request->record->arrived; /* accurate to some nanoseconds, and saves a reading of the clock */
    if (!request->bytes || !shoal_shape_receives(shape, engine->rank, request->call.root))
        return;
    if (shape->is_reduced)
        reduce_payloads(engine, request);
    else
        copy_payloads(engine, request);
    if (SHOAL_UNLIKELY(request->call.layout != NULL))
        shoal_operand_release(shoal_call_operand(&request->call, SHOAL_OUTPUT), 0, request->call.count);
}

/* ---- Ranges that are not ready ------------------------------------------------------------------------------------------- */

/* The lowest range is kept, because the oldest chunk holds up the others. */
static void note_unready(struct shoal_engine *engine, struct shoal_request *request, enum shoal_block_operand operand,
                         size_t begin, size_t end)
{
    struct shoal_unready *unready = &request->unready;
    engine->awaits_operand = true;
    if (!unready->operand || begin <= unready->begin)
        *unready = (struct shoal_unready){(uint8_t)(1 + operand), begin, end};
}

bool shoal_runner_is_range_ready(struct shoal_engine *engine, struct shoal_request *request, enum shoal_block_operand operand,
                                 size_t begin, size_t end)
{
    const bool is_ready = shoal_operand_is_ready(shoal_call_operand(&request->call, operand), begin, end);
    if (!is_ready)
        note_unready(engine, request, operand, begin, end);
    else if (request->unready.operand == 1 + operand && request->unready.begin == begin)
        request->unready.operand = 0;
    return is_ready;
}

bool shoal_runner_is_taken(struct shoal_engine *engine, struct shoal_request *request)
{
    const bool is_taken = shoal_operand_is_finished(shoal_call_operand(&request->call, SHOAL_OUTPUT));
    if (!is_taken)
        note_unready(engine, request, SHOAL_OUTPUT, 0, 0);
    return is_taken;
}

/* Returns the operands of a request of which ranges become ready later, as bits. */
static uint8_t find_late(const struct shoal_request *request)
{
    if (SHOAL_LIKELY(!request->call.layout))
        return 0;
    return (uint8_t)(shoal_operand_is_late(shoal_call_operand(&request->call, SHOAL_INPUT)) << SHOAL_INPUT |
                     shoal_operand_is_late(shoal_call_operand(&request->call, SHOAL_OUTPUT)) << SHOAL_OUTPUT);
}

static size_t chunk_end(const struct shoal_chunk *chunk)
{
    const struct shoal_request *request = chunk->request;
    return chunk->first + shoal_min_size(request->call.count - chunk->first, request->chunk_elements);
}

/* Returns true if the chunk's range of those operands (bits) is ready. */
static bool are_ready(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned operands)
{
    bool are_all = true;
    for (unsigned operand = SHOAL_INPUT; operand <= SHOAL_OUTPUT; operand++) {
        if (!(chunk->unready & operands & 1u << operand))
            continue;
        if (shoal_runner_is_ready(engine, chunk->request, (enum shoal_block_operand)operand, chunk->first, chunk_end(chunk)))
            chunk->unready &= (uint8_t) ~(1u << operand);
        else
            are_all = false;
    }
    return are_all;
}

/* Returns this rank's operands that a step names, including staging buffers, as bits. */
static unsigned find_own(const struct shoal_engine *engine, const struct shoal_plan *plan, const struct shoal_step *step)
{
    const unsigned count = (unsigned)step->source_count + step->dest_count;
    const struct shoal_block *blocks = count ? &plan->blocks[step->first_block] : NULL;
    unsigned own = step->kind == SHOAL_STEP_WAIT && step->peer == engine->rank ? step->value : 0;
    for (unsigned i = 0; i < count; i++)
        own |= blocks[i].rank == engine->rank ? 1u << blocks[i].operand : 0;
    return own;
}

static bool can_touch(struct shoal_engine *engine, struct shoal_chunk *chunk, const struct shoal_step *step)
{
    return SHOAL_LIKELY(!chunk->unready) || are_ready(engine, chunk, find_own(engine, &chunk->request->cached->plan, step));
}

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

/* Maps a lent operand: its card and its first element. */
static enum shoal_status map_lent(struct shoal_engine *engine, const struct shoal_request *request,
                                  enum shoal_block_operand operand, int owner, shoal_location first, void **memory_out)
{
    const struct shoal_lent_card card = shoal_lent_card_of(first);
    void **const card_out = &request->cards[operand][owner];
    enum shoal_status status = SHOAL_OK;
    *card_out = engine->ops->reach(engine->transport, owner, card.at, card.bytes, &status);
    *memory_out = *card_out ? engine->ops->reach(engine->transport, owner, first, 1, &status) : NULL;
    return status;
}

/* Maps an operand of a peer, or finds that of this rank. *memory_out is NULL if it is not in reach. */
static enum shoal_status map_operand(struct shoal_engine *engine, const struct shoal_request *request,
                                     enum shoal_block_operand operand, int owner, void **memory_out)
{
    const struct shoal_call *call = &request->call;
    const bool is_input = operand == SHOAL_INPUT;
    enum shoal_status status = SHOAL_OK;
    *memory_out = owner == engine->rank ? (is_input ? (void *)(uintptr_t)call->input : call->output) : NULL;
    if (owner == engine->rank || !request->cached->named[(is_input ? 0 : engine->size) + owner])
        return SHOAL_OK;
    const struct shoal_announcement *announcement = engine->ops->announcement(engine->transport, owner, request->sequence);
    const shoal_location location = is_input ? announcement->input : announcement->output;
    const size_t bytes = shoal_call_bytes(call, operand, engine->rank, engine->size, request->element_bytes, owner);
    if (location && request->cached->shared[(is_input ? 0 : engine->size) + owner] == SHOAL_SHARING_LENT)
        return map_lent(engine, request, operand, owner, location, memory_out);
    if (location && (bytes || !is_input))
        *memory_out = engine->ops->reach(engine->transport, owner, location, bytes, &status);
    return status;
}

/* Finds the operands in this process's memory that the plan names. */
static enum shoal_status map_operands(struct shoal_engine *engine, struct shoal_request *request)
{
    enum shoal_status status = SHOAL_OK;
    request->memory[SHOAL_INPUT] = engine->addresses + request->sequence % SHOAL_ACTIVE_MAX * 4 * (size_t)engine->size;
    request->memory[SHOAL_OUTPUT] = request->memory[SHOAL_INPUT] + engine->size;
    request->cards[SHOAL_INPUT] = request->memory[SHOAL_OUTPUT] + engine->size;
    request->cards[SHOAL_OUTPUT] = request->cards[SHOAL_INPUT] + engine->size;
    memset(request->cards[SHOAL_INPUT], 0, 2 * (size_t)engine->size * sizeof *request->cards[SHOAL_INPUT]);
    for (int r = 0; r < engine->size && status == SHOAL_OK; r++) {
        status = map_operand(engine, request, SHOAL_INPUT, r, &request->memory[SHOAL_INPUT][r]);
        if (status == SHOAL_OK)
            status = map_operand(engine, request, SHOAL_OUTPUT, r, &request->memory[SHOAL_OUTPUT][r]);
    }
    return status;
}

/* If each rank knows only its own lengths of parts, finds the longest of all. */
static void agree_on_count(struct shoal_engine *engine, struct shoal_request *request)
{
    for (int i = 0; i < shoal_engine_source_count(engine, request->peer_set); i++) {
        const int r = shoal_peer_set_source(request->peer_set, i);
        if (r == engine->rank)
            continue;
        const uint64_t count = engine->ops->announcement(engine->transport, r, request->sequence)->descriptor.count;
        request->call.count = shoal_max_size(request->call.count, (size_t)count);
    }
    request->bytes = request->call.count * request->element_bytes * (size_t)engine->size;
}

enum shoal_status shoal_runner_prepare_hosts(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host, .shape = request->shape};
    const struct shoal_selection selection = shoal_engine_selection(engine, request);
    const struct shoal_algorithm *entry = shoal_select_plan(&selection, &view, request->call.root, NULL);
    SHOAL_TRY(engine->ops->reserve_staging(engine->transport, engine->depth, engine->slot_bytes));
    return shoal_engine_find_peers(engine, entry, request);
}

static void cut_chunks(const struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_operand *input = shoal_call_operand(&request->call, SHOAL_INPUT);
    request->chunk_elements = shoal_operand_runs(input)
                                  ? input->chunk_elements
                                  : shoal_select_chunk(request->cached->entry, &request->cached->plan,
                                                       engine->settings->chunk_bytes, request->element_bytes);
    request->chunk_count = (request->call.count + request->chunk_elements - 1) / request->chunk_elements;
    request->part_stride =
        shoal_round_up(shoal_min_size(request->call.count, request->chunk_elements), SHOAL_CACHE_LINE / request->element_bytes);
}

enum shoal_status shoal_runner_prepare(struct shoal_engine *engine, struct shoal_request *request)
{
    if (engine->rank != engine->leader) /* the leader's hint decides for the whole host */
        request->announcement.descriptor.hints =
            engine->ops->announcement(engine->transport, engine->leader, request->sequence)->descriptor.hints;
    if (shoal_call_has_peer_counts(&request->call))
        agree_on_count(engine, request);
    request->chunk_count = request->chunks_started = request->chunks_done = 0;
    if (!request->call.count && !request->shape->is_empty) /* no rank waits for another: operands may be gone */
        return SHOAL_OK;
    SHOAL_TRY(shoal_engine_find_plan(engine, request));
    SHOAL_TRY(map_operands(engine, request));
    request->cached->hints = request->announcement.descriptor.hints;
    const struct shoal_plan *plan = &request->cached->plan;
    SHOAL_ASSERT(!shoal_operand_is_only_put(shoal_call_operand(&request->call, SHOAL_INPUT)) ||
                 shoal_plan_only_sends_input(plan, &(bool){false}));
    if (plan->parts && engine->hosts == 1)
        SHOAL_TRY(engine->ops->reserve_staging(engine->transport, engine->depth, engine->slot_bytes));
    request->record->algorithm = request->cached->entry->variants[request->cached->reach];
    if (request->shape->is_empty) { /* a barrier consists of its steps alone */
        request->chunk_elements = request->chunk_count = 1;
        return SHOAL_OK;
    }
    cut_chunks(engine, request);
    return SHOAL_OK;
}

/* ---- Packing ------------------------------------------------------------------------------------------------------------- */

/* The source of puts of several tensors, or of scaled ones, packed contiguously until the chunk ends. */
struct shoal_packed {
    struct shoal_packed *next;
    _Alignas(SHOAL_CACHE_LINE) char data[];
};

static void packed_free(struct shoal_packed **list)
{
    while (*list) {
        struct shoal_packed *packed = *list;
        *list = packed->next;
        free(packed);
    }
}

/* Returns false if out of memory. */
static bool make_packed(struct shoal_chunk *chunk, size_t bytes)
{
    struct shoal_packed *packed = aligned_alloc(SHOAL_CACHE_LINE, shoal_round_up(sizeof *packed + bytes, SHOAL_CACHE_LINE));
    if (!packed)
        return false;
    packed->next = chunk->packed;
    chunk->packed = packed;
    return true;
}

/* Packs elements [begin, end) of the block that a step puts: any thread, but only one for each element. */
static void pack_range(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                       const struct shoal_step *step, size_t begin, size_t end)
{
    const struct shoal_call *call = &chunk->request->call;
    const struct shoal_block block = chunk->request->cached->plan.blocks[step->first_block];
    const struct shoal_extent extent = shoal_extent_find(engine, chunk, block);
    const size_t element = chunk->request->element_bytes;
    void *const data = chunk->packed->data + begin * element;
    for (size_t at = begin, run; at < end; at += run) {
        run = end - at;
        const char *from = shoal_extent_address(engine, chunk, slot, block, &extent, at, &run);
        void *const to = chunk->packed->data + at * element;
        engine->kernels->copy(&to, 1, from, run * element, SHOAL_STORES_CACHED);
    }
    if (block.operand == SHOAL_INPUT && shoal_engine_scales_inputs(engine, call)) {
        const struct shoal_reduction first = shoal_engine_pass(engine, call, SHOAL_PASS_FIRST);
        const void *const source = data;
        engine->kernels->reduce[call->type][first.op](&data, 1, &source, 1, end - begin, first.argument, SHOAL_STORES_CACHED);
    }
}

/* ---- Steps that helpers do ----------------------------------------------------------------------------------------------- */

/* A block of fewer bytes is not worth a post, and a part of fewer not a claim: a core copies them in some microseconds. */
#define HELPED_BYTES ((size_t)32 << 10)
#define HELPED_PART_BYTES ((size_t)16 << 10)
/* Parts for each thread, so that one that is late or slower delays the step less. */
#define PARTS_EACH 2
/* The most sources or destinations that a helper has room for. */
#define HELPED_OPERANDS 64

static void run_part_of_step(void *arg, uint32_t part)
{
    const struct shoal_helped_step *work = arg;
    const void *sources[HELPED_OPERANDS], *scaled[HELPED_OPERANDS];
    void *dests[HELPED_OPERANDS];
    const struct shoal_extent_scratch scratch = {sources, dests, scaled};
    const size_t begin = part * work->part_elements;
    shoal_extent_reduce(work->engine, work->chunk, work->slot, work->step, begin,
                        shoal_min_size(begin + work->part_elements, work->elements), &scratch);
}

static void pack_part_of_step(void *arg, uint32_t part)
{
    const struct shoal_helped_step *work = arg;
    const size_t begin = part * work->part_elements;
    pack_range(work->engine, work->chunk, work->slot, work->step, begin,
               shoal_min_size(begin + work->part_elements, work->elements));
}

/* Returns the number of elements of a reduce step or of a put. */
static size_t count_elements(const struct shoal_engine *engine, const struct shoal_chunk *chunk, const struct shoal_step *step)
{
    return shoal_extent_find(engine, chunk, chunk->request->cached->plan.blocks[step->first_block]).elements;
}

/* Returns true if helpers do the step by `run`: it is not done yet. */
static SHOAL_NOINLINE bool runner_post_work(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                                            const struct shoal_step *step, shoal_helpers_fn run)
{
    const size_t elements = count_elements(engine, chunk, step), element = chunk->request->element_bytes;
    const size_t bytes = elements * element, most = (size_t)shoal_helpers_width(engine->helpers) * PARTS_EACH;
    const bool is_early = chunk != &engine->runner.chunks[slot]; /* it ends with the call */
    const bool is_narrow = chunk->request->announcement.descriptor.hints & SHOAL_HINT_NARROW;
    if (bytes < HELPED_BYTES || is_early || is_narrow || step->source_count > HELPED_OPERANDS ||
        step->dest_count > HELPED_OPERANDS)
        return false;
    const size_t parts = shoal_min_size(bytes / HELPED_PART_BYTES, most);
    const size_t each = shoal_round_up((elements + parts - 1) / parts, SHOAL_CACHE_LINE / element);
    chunk->work = (struct shoal_helped_step){engine, chunk, step, slot, elements, each};
    const int ticket = shoal_helpers_post(engine->helpers, run, &chunk->work, (uint32_t)((elements + each - 1) / each));
    if (ticket < 0)
        return false;
    chunk->posted = (uint8_t)(ticket + 1);
    engine->runner.posted++;
    engine->helped++;
    return true;
}

static void forget_work(struct shoal_engine *engine, struct shoal_chunk *chunk)
{
    chunk->posted = 0;
    engine->runner.posted--;
    engine->helped--;
}

static bool has_work_ended(struct shoal_engine *engine, struct shoal_chunk *chunk)
{
    if (!shoal_helpers_has_ended(engine->helpers, chunk->posted - 1))
        return false;
    forget_work(engine, chunk);
    return true;
}

/* When a communicator breaks: afterwards no helper touches an operand. */
static void stop_work(struct shoal_engine *engine)
{
    for (unsigned i = 0; i < engine->depth && engine->runner.posted; i++) {
        struct shoal_chunk *chunk = &engine->runner.chunks[i];
        if (!chunk->posted)
            continue;
        (void)shoal_helpers_stop(engine->helpers, chunk->posted - 1);
        forget_work(engine, chunk);
    }
    SHOAL_ASSERT(!engine->runner.posted);
}

/* Does a part of the oldest step that has one left. */
static bool help_with_oldest(struct shoal_engine *engine)
{
    for (uint64_t i = engine->depth; i > 0; i--) {
        const struct shoal_chunk *chunk = &engine->runner.chunks[(engine->runner.next + engine->depth - i) % engine->depth];
        if (chunk->posted && shoal_helpers_help(engine->helpers, chunk->posted - 1))
            return true;
    }
    return false;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static bool run_is_locally_complete(const struct shoal_engine *engine, unsigned slot)
{
    return SHOAL_LIKELY(!engine->ops->is_locally_complete) || engine->ops->is_locally_complete(engine->transport, slot);
}

static bool is_met(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot, const struct shoal_step *step)
{
    if (step->peer == engine->rank && step->value)
        return can_touch(engine, chunk, step); /* it waits for the operands to lend */
    if (step->peer == engine->rank)            /* it waits for this rank's own puts */
        return run_is_locally_complete(engine, slot);
    const uint64_t base = engine->runner.slot_base[slot * (unsigned)engine->size + step->peer];
    /* Signed: while a credit is still owed, the counter is below the base. */
    return (int64_t)(engine->ops->counter(engine->transport, step->peer, slot) - base) >= (int64_t)step->value;
}

/* Packs the source of a put. Returns PENDING while helpers do it. */
static enum shoal_status pack_source(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                                     const struct shoal_step *step)
{
    const size_t elements = count_elements(engine, chunk, step);
    if (chunk->posted)
        return has_work_ended(engine, chunk) ? SHOAL_OK : SHOAL_PENDING;
    if (!make_packed(chunk, elements * chunk->request->element_bytes))
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory to pack %zu elements", elements);
    if (engine->helpers && runner_post_work(engine, chunk, slot, step, pack_part_of_step))
        return SHOAL_PENDING;
    pack_range(engine, chunk, slot, step, 0, elements);
    return SHOAL_OK;
}

static enum shoal_status run_put(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                                 const struct shoal_step *step)
{
    const struct shoal_request *request = chunk->request;
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    const struct shoal_extent from = shoal_extent_find(engine, chunk, blocks[0]);
    const struct shoal_extent to = shoal_extent_find(engine, chunk, blocks[1]);
    size_t run = from.elements;
    const char *source = shoal_extent_address(engine, chunk, slot, blocks[0], &from, 0, &run);
    const bool is_input = blocks[0].operand == SHOAL_INPUT;
    const bool is_apart = run < from.elements || (is_input && shoal_engine_scales_inputs(engine, &request->call));
    if (is_apart && !chunk->is_packed) {
        SHOAL_TRY(pack_source(engine, chunk, slot, step));
        chunk->is_packed = true;
    }
    source = is_apart ? chunk->packed->data : source;
    if (SHOAL_UNLIKELY(engine->ops->limit_lanes != NULL))
        engine->ops->limit_lanes(engine->transport, chunk->request->announcement.descriptor.hints & SHOAL_HINT_ONE_LANE);
    const enum shoal_status status =
        engine->ops->put(engine->transport, step->peer, slot, to.staging_at, source, from.elements * request->element_bytes);
    chunk->is_packed = is_apart && status == SHOAL_PENDING;
    return status;
}

/* Returns true if the step copies an input that is only put to this rank's own output. */
static bool is_left_to_owner(const struct shoal_chunk *chunk, const struct shoal_step *step, int rank)
{
    const struct shoal_block *source = &chunk->request->cached->plan.blocks[step->first_block];
    return shoal_operand_is_only_put(shoal_call_operand(&chunk->request->call, SHOAL_INPUT)) && source->rank == rank &&
           source->operand == SHOAL_INPUT;
}

/* Lets the owner of the input do the step. */
static enum shoal_operand_does run_by_owner(struct shoal_engine *engine, const struct shoal_chunk *chunk,
                                            const struct shoal_step *step)
{
    struct shoal_request *request = chunk->request;
    struct shoal_operand *input = shoal_call_operand(&request->call, SHOAL_INPUT);
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    const enum shoal_operand_does does =
        input->ops->run(input, blocks[0], blocks[step->source_count], shoal_chunk_number(chunk));
    if (does == SHOAL_OPERAND_IS_AT_WORK)
        note_unready(engine, request, SHOAL_INPUT, chunk->first, chunk_end(chunk));
    if (does != SHOAL_OPERAND_HAS_DONE)
        return does;
    if (request->unready.begin == chunk->first)
        request->unready.operand = 0;
    return shoal_engine_do_data_count(engine) ? does : SHOAL_OPERAND_IS_AT_WORK;
}

/* Returns true if the step is done, false if it has to wait. */
static bool run_reduce_step(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                            const struct shoal_step *step)
{
    const bool is_checked = chunk->request->cached->reaches_operands;
    if (SHOAL_UNLIKELY(chunk->posted))
        return has_work_ended(engine, chunk) && (!is_checked || shoal_engine_do_data_count(engine));
    if (shoal_operand_runs(shoal_call_operand(&chunk->request->call, SHOAL_INPUT))) {
        const enum shoal_operand_does does = run_by_owner(engine, chunk, step);
        if (does != SHOAL_OPERAND_DOES_NOTHING)
            return does == SHOAL_OPERAND_HAS_DONE;
    }
    if (is_left_to_owner(chunk, step, engine->rank))
        return true;
    if (!can_touch(engine, chunk, step))
        return false;
    if (SHOAL_UNLIKELY(engine->helpers != NULL) && runner_post_work(engine, chunk, slot, step, run_part_of_step))
        return false;
    shoal_extent_reduce(engine, chunk, slot, step, 0, count_elements(engine, chunk, step), &engine->scratch);
    return !is_checked || shoal_engine_do_data_count(engine);
}

/* Returns true if the step is done, false if it has to wait or has failed. */
static bool run_step(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot, const struct shoal_step *step)
{
    enum shoal_status status = SHOAL_OK;
    SHOAL_ASSERT(step->peer < engine->size);
    switch ((enum shoal_step_kind)step->kind) {
    case SHOAL_STEP_WAIT:
        return is_met(engine, chunk, slot, step);
    case SHOAL_STEP_SIGNAL:
        engine->ops->signal(engine->transport, step->peer, slot);
        engine->must_flush = true;
        return true;
    case SHOAL_STEP_REDUCE:
        return run_reduce_step(engine, chunk, slot, step);
    case SHOAL_STEP_PUT:
        if (!can_touch(engine, chunk, step))
            return false;
        status = run_put(engine, chunk, slot, step);
        engine->must_flush = true;
        break;
    }
    if (status != SHOAL_OK && status != SHOAL_PENDING)
        engine->runner.failed = (struct shoal_failed_step){chunk->request, status, step->peer};
    return status == SHOAL_OK;
}

/* ---- Chunks -------------------------------------------------------------------------------------------------------------- */

static void end_chunk(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot)
{
    struct shoal_request *request = chunk->request;
    SHOAL_ASSERT(engine->runner.active > 0);
    SHOAL_ASSERT(request->chunks_done < request->chunks_started && request->chunks_started <= request->chunk_count);
    uint64_t *base = &engine->runner.slot_base[slot * (unsigned)engine->size];
    for (int r = 0; r < engine->size; r++)
        base[r] += request->cached->plan.signals_in[r];
    packed_free(&chunk->packed);
    if (SHOAL_UNLIKELY(request->call.layout != NULL)) {
        shoal_operand_release(shoal_call_operand(&request->call, SHOAL_INPUT), chunk->first, chunk_end(chunk));
        shoal_operand_release(shoal_call_operand(&request->call, SHOAL_OUTPUT), chunk->first, chunk_end(chunk));
    }
    chunk->request = NULL;
    engine->runner.active--;
    if (++request->chunks_done == request->chunk_count)
        request->state = SHOAL_REQUEST_DONE;
}

static bool run_chunk(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot)
{
    const struct shoal_plan *plan = &chunk->request->cached->plan;
    const uint32_t before = chunk->step;
    while (chunk->step < plan->step_count && run_step(engine, chunk, slot, &plan->steps[chunk->step])) {
        if (SHOAL_UNLIKELY(engine->on_step != NULL))
            engine->on_step(engine->on_step_arg, chunk->request->sequence, chunk->first / chunk->request->chunk_elements, plan,
                            chunk->step);
        chunk->step++;
    }
    const bool did = chunk->step != before;
    if (shoal_runner_failed_step(engine) || chunk->step < plan->step_count || !run_is_locally_complete(engine, slot))
        return did;
    if (SHOAL_UNLIKELY(chunk->unready) && !are_ready(engine, chunk, ~0u)) /* no step named the operand */
        return did;
    end_chunk(engine, chunk, slot);
    return true;
}

/* On one host, consecutive chunks of a slot follow each other in it and wrap around to its start, the same on all ranks. Lines
 * that were used just before may still be in another core's private cache; writing those takes three times longer than writing
 * lines that have moved to the shared cache or to memory. */
static size_t find_shift(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_plan *plan = &request->cached->plan;
    if (engine->hosts > 1 || !plan->parts)
        return 0;
    const bool is_partitioned = request->shape->is_input_partitioned || request->shape->is_output_partitioned;
    const size_t parts = is_partitioned && plan->staging_of > 1 ? (size_t)engine->size : 1;
    const size_t used = parts * request->part_stride * request->element_bytes;
    return engine->runner.next / engine->depth % (engine->slot_bytes / used) * used;
}

/* Assigns free slots to the next chunks, in order. */
static bool run_start_chunks(struct shoal_engine *engine)
{
    bool did = false;
    for (struct shoal_request *request; (request = shoal_intake_next_to_start(engine)) != NULL; did = true) {
        struct shoal_chunk *chunk = &engine->runner.chunks[engine->runner.next % engine->depth];
        if (chunk->request)
            return did;
        SHOAL_ASSERT(engine->runner.active < engine->depth);
        SHOAL_ASSERT(!chunk->packed && !chunk->posted);
        chunk->request = request;
        chunk->is_packed = false;
        chunk->unready = find_late(request);
        chunk->shift = find_shift(engine, request);
        chunk->step = request->chunks_started ? 0 : request->early_steps;
        chunk->first = request->chunks_started++ * request->chunk_elements;
        engine->runner.next++;
        engine->runner.active++;
    }
    return did;
}

static bool enter_operands(struct shoal_engine *engine)
{
    if (SHOAL_LIKELY(shoal_engine_enter(engine)))
        return true;
    if (engine->runner.posted) {
        stop_work(engine);
        shoal_engine_leave(engine);
    }
    return false;
}

/* Packed data may still be on its way, so it stays until the engine is freed. */
void shoal_runner_drop_chunks(struct shoal_engine *engine)
{
    if (SHOAL_UNLIKELY(engine->runner.posted)) {
        stop_work(engine);
        shoal_engine_leave(engine);
    }
    for (unsigned i = 0; i < engine->depth; i++)
        engine->runner.left_packed[i] = engine->runner.chunks[i].packed;
    memset(engine->runner.chunks, 0, sizeof engine->runner.chunks);
    engine->runner.active = 0;
}

/* The operation is the only one, so its first chunk uses the next slot. Steps may be repeated: they write only this rank's
 * staging buffer, and no rank reads it before a signal. */
void shoal_runner_start_early(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_chunk chunk = {.request = request, .unready = find_late(request)};
    const bool is_alone = shoal_intake_is_alone(engine, request) && !engine->runner.active;
    if (!is_alone || !request->call.count || shoal_call_has_peer_counts(&request->call) ||
        !shoal_engine_guess_plan(engine, request))
        return;
    shoal_engine_flush(engine); /* sleeping peers wake in the meantime */
    if (engine->rank != engine->leader)
        request->announcement.descriptor.hints = request->cached->hints;
    cut_chunks(engine, request);
    chunk.shift = find_shift(engine, request);
    const struct shoal_plan *plan = &request->cached->plan;
    const unsigned slot = (unsigned)(engine->runner.next % engine->depth);
    for (; chunk.step < request->cached->early_steps; chunk.step++) {
        if (!run_step(engine, &chunk, slot, &plan->steps[chunk.step]))
            break;
        if (SHOAL_UNLIKELY(engine->on_step != NULL))
            engine->on_step(engine->on_step_arg, request->sequence, 0, plan, chunk.step);
    }
    request->early_steps = chunk.step;
    request->unready.operand = 0; /* it waits for the others' announcements */
}

bool shoal_runner_run_chunks(struct shoal_engine *engine)
{
    SHOAL_ASSERT(!shoal_runner_failed_step(engine));
    bool did = run_start_chunks(engine);
    if (!enter_operands(engine))
        return did; /* shoal_engine_check() handles it */
    /* Oldest first, because other ranks wait for it. */
    for (uint64_t i = engine->depth; i > 0 && !shoal_runner_failed_step(engine); i--) {
        const unsigned slot = (unsigned)((engine->runner.next + engine->depth - i) % engine->depth);
        if (engine->runner.chunks[slot].request)
            did |= run_chunk(engine, &engine->runner.chunks[slot], slot);
    }
    if (SHOAL_UNLIKELY(engine->runner.posted) && !did)
        did = help_with_oldest(engine);
    shoal_engine_leave(engine);
    return did;
}

/* ---- Waits --------------------------------------------------------------------------------------------------------------- */

static const struct shoal_chunk *oldest_chunk(const struct shoal_engine *engine, const struct shoal_request *request)
{
    for (uint64_t i = engine->depth; i > 0 && request->state == SHOAL_REQUEST_RUNNING; i--) {
        const struct shoal_chunk *chunk = &engine->runner.chunks[(engine->runner.next + engine->depth - i) % engine->depth];
        if (chunk->request == request)
            return chunk;
    }
    return NULL;
}

bool shoal_runner_is_unready(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_unready *unready = &request->unready;
    const struct shoal_chunk *chunk = oldest_chunk(engine, request);
    if (SHOAL_LIKELY(!request->call.layout))
        return false;
    if (!unready->operand ||
        (chunk && chunk->first != unready->begin)) /* a later chunk waits for its range, and for this one */
        return false;
    const struct shoal_operand *operand = shoal_call_operand(&request->call, (enum shoal_block_operand)(unready->operand - 1));
    return unready->begin == unready->end
               ? !shoal_operand_is_finished(operand)
               : shoal_operand_runs(operand) || !shoal_operand_is_ready(operand, unready->begin, unready->end);
}

void shoal_runner_find_step(const struct shoal_engine *engine, const struct shoal_request *request, int *step_out,
                            int *peer_out)
{
    const struct shoal_chunk *chunk = oldest_chunk(engine, request);
    const struct shoal_plan *plan = chunk ? &request->cached->plan : NULL;
    const struct shoal_step *step = chunk && chunk->step < plan->step_count ? &plan->steps[chunk->step] : NULL;
    *step_out = chunk ? (int)chunk->step : -1;
    *peer_out = step && step->kind == SHOAL_STEP_WAIT && step->peer != engine->rank ? step->peer : -1;
}

/* A step that waits for this rank itself waits for its puts, and so does a chunk after its last step. */
bool shoal_runner_is_leaving(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_chunk *chunk = oldest_chunk(engine, request);
    const struct shoal_plan *plan = chunk ? &request->cached->plan : NULL;
    if (shoal_runner_is_unready(engine, request))
        return false;
    if (!chunk || chunk->step == plan->step_count)
        return chunk || request->state == SHOAL_REQUEST_DONE;
    const struct shoal_step *step = &plan->steps[chunk->step];
    const bool is_own_wait = step->kind == SHOAL_STEP_WAIT && step->peer == engine->rank && !step->value;
    return is_own_wait || (step->kind == SHOAL_STEP_PUT && !chunk->posted);
}

bool shoal_runner_is_helped(const struct shoal_engine *engine, const struct shoal_request *request)
{
    bool is_helped = false;
    for (unsigned i = 0; i < engine->depth; i++)
        is_helped |= engine->runner.chunks[i].request == request && engine->runner.chunks[i].posted;
    return is_helped;
}

bool shoal_runner_is_step_for(const struct shoal_engine *engine, const struct shoal_request *request, int peer)
{
    for (unsigned i = 0; i < engine->depth; i++) {
        const struct shoal_chunk *chunk = &engine->runner.chunks[i];
        const struct shoal_plan *plan = &request->cached->plan;
        if (chunk->request == request && chunk->step < plan->step_count && plan->steps[chunk->step].kind != SHOAL_STEP_REDUCE &&
            plan->steps[chunk->step].peer == peer)
            return true;
    }
    return false;
}

uint64_t shoal_runner_mark(const struct shoal_engine *engine, uint64_t mark)
{
    mark = mark * 31 + engine->runner.next;
    for (unsigned i = 0; i < engine->depth; i++)
        mark = mark * 31 + engine->runner.chunks[i].step;
    return mark;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

bool shoal_runner_init(struct shoal_engine *engine, uint64_t start)
{
    const size_t counters = engine->depth * (size_t)engine->size;
    engine->runner.slot_base = calloc(counters, sizeof *engine->runner.slot_base);
    for (size_t i = 0; engine->runner.slot_base && i < counters; i++)
        engine->runner.slot_base[i] = start;
    return engine->runner.slot_base != NULL;
}

void shoal_runner_fini(struct shoal_engine *engine)
{
    for (unsigned i = 0; i < engine->depth; i++) {
        if (run_is_locally_complete(engine, i)) /* otherwise it is leaked: the network may still read it */
            packed_free(&engine->runner.left_packed[i]);
    }
    free(engine->runner.slot_base);
}
