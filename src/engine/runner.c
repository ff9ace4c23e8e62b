/* How the engine runs plans: it turns operands into addresses, chunks into slots, steps into bytes. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "device/device_ring.h"
#include "engine/call_sizes.h"
#include "engine/engine_state.h"
#include "engine/reduce_step.h"

/* ---- Direct operations: the data travel with the announcements ----------------------------------------------------------- */

/* The data are so small that each part is copied element by element of the tensors' list. */
const void *shoal_engine_pack(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const int parts = request->shape->is_input_partitioned ? engine->size : 1;
    for (int part = 0; part < parts; part++) {
        const size_t at = shoal_call_part_at(call, engine->rank, SHOAL_OPERAND_INPUT, engine->rank, part);
        const size_t count = shoal_call_length(call, engine->rank, engine->rank, part);
        shoal_call_pack(call, engine->rank, request->element_bytes, part, count,
                        call->layout->input_scratch + at * request->element_bytes);
    }
    return call->layout->input_scratch;
}

/* An input that is not contiguous was packed when it was announced. */
const char *shoal_engine_contribution_of(struct shoal_engine *engine, const struct shoal_request *request, int from)
{
    const struct shoal_layout *layout = request->call.layout;
    if (from == engine->rank)
        return layout && layout->input_scratch ? layout->input_scratch : request->call.input;
    const size_t bytes = shoal_engine_payload_bytes(engine, request, from);
    return bytes ? engine->ops->payload(engine->transport, from, request->sequence, bytes) : NULL;
}

/* Returns where this rank's part begins in a contribution, in bytes. */
static size_t own_part_at(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    if (!request->shape->is_input_partitioned)
        return 0;
    const struct shoal_layout *layout = call->layout;
    const size_t at = layout && layout->sent ? layout->sent_at[engine->rank] : (size_t)engine->rank * call->count;
    return at * request->element_bytes;
}

static void reduce_payloads(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const bool is_apart = call->layout && call->layout->output_scratch;
    const size_t at = own_part_at(engine, request), count = shoal_call_length(call, engine->rank, 0, engine->rank);
    void *const dest = is_apart ? call->layout->output_scratch : call->output;
    for (int r = 0; r < engine->size; r++)
        engine->sources[r] = shoal_engine_contribution_of(engine, request, r) + at;
    engine->kernels->reduce[call->type][call->op](&dest, 1, engine->sources, engine->size, count,
                                                  shoal_engine_operation(engine, call).argument, SHOAL_STORES_CACHED);
    if (is_apart)
        shoal_call_unpack(call, engine->rank, request->element_bytes, 0, count, dest);
}

static void copy_payload(struct shoal_engine *engine, const struct shoal_request *request, int from)
{
    const struct shoal_call *call = &request->call;
    const int part = request->shape->is_output_partitioned ? from : 0;
    const size_t count = shoal_call_length(call, engine->rank, from, engine->rank);
    if (!count)
        return;
    const char *sent = shoal_engine_contribution_of(engine, request, from) + own_part_at(engine, request);
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

void shoal_engine_finish_direct(struct shoal_engine *engine, struct shoal_request *request)
{
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
        shoal_runner_release(request, SHOAL_OPERAND_OUTPUT, 0, request->call.count);
}

/* ---- Operands on a device ------------------------------------------------------------------------------------------------ */

bool shoal_runner_is_range_ready(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_operand operand,
                                 size_t begin, size_t end)
{
    const struct shoal_device_operand *device = shoal_call_device(&request->call, operand);
    if (!device || begin == end || device->ops->is_ready(device, begin, end))
        return true;
    engine->awaits_device = true;
    return false;
}

bool shoal_runner_is_taken(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_device_operand *device = shoal_call_device(&request->call, SHOAL_OPERAND_OUTPUT);
    if (!device || device->ops->is_finished(device))
        return true;
    engine->awaits_device = true;
    return false;
}

void shoal_runner_release(const struct shoal_request *request, enum shoal_operand operand, size_t begin, size_t end)
{
    struct shoal_device_operand *device = shoal_call_device(&request->call, operand);
    if (device && begin < end)
        device->ops->release(device, begin, end);
}

/* Returns the operands of a request that are on a device, as bits. */
static uint8_t find_on_device(const struct shoal_request *request)
{
    const struct shoal_layout *layout = request->call.layout;
    if (SHOAL_LIKELY(!layout))
        return 0;
    return (uint8_t)((layout->device[SHOAL_OPERAND_INPUT] != NULL) << SHOAL_OPERAND_INPUT |
                     (layout->device[SHOAL_OPERAND_OUTPUT] != NULL) << SHOAL_OPERAND_OUTPUT);
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
    for (unsigned operand = SHOAL_OPERAND_INPUT; operand <= SHOAL_OPERAND_OUTPUT; operand++) {
        if (!(chunk->unready & operands & 1u << operand))
            continue;
        if (shoal_runner_is_ready(engine, chunk->request, (enum shoal_operand)operand, chunk->first, chunk_end(chunk)))
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

/* Returns the address of a peer's operand, or NULL if the plan does not name it. If the peer lends it, that is its first
 * element, and this also finds the card that describes its ring: at the beginning of the same segment. */
static void *find_address(struct shoal_engine *engine, struct shoal_request *request, int peer, enum shoal_operand operand,
                          enum shoal_status *status)
{
    const bool is_input = operand == SHOAL_OPERAND_INPUT;
    const size_t flag = (size_t)peer + (is_input ? 0 : (size_t)engine->size), element = request->element_bytes;
    if (!request->cached->named[flag] || *status != SHOAL_OK)
        return NULL;
    const struct shoal_announcement *announcement = engine->ops->announcement(engine->transport, peer, request->sequence);
    const shoal_location location = is_input ? announcement->input : announcement->output;
    const shoal_location card = shoal_location_of(shoal_location_segment(location), 0);
    size_t bytes = is_input ? shoal_call_input_bytes(&request->call, engine->rank, engine->size, element, peer)
                            : shoal_call_output_bytes(&request->call, engine->rank, engine->size, element, peer);
    if (location && request->cached->shared[flag] == SHOAL_SHARING_LENT) {
        request->cards[flag] = engine->ops->reach(engine->transport, peer, card, sizeof(struct shoal_device_card), status);
        if (!request->cards[flag])
            return NULL;
        bytes = 1;
    }
    return location && (bytes || !is_input) ? engine->ops->reach(engine->transport, peer, location, bytes, status) : NULL;
}

/* Finds the addresses of those peers' operands that the plan names. */
static enum shoal_status find_addresses(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const int size = engine->size;
    enum shoal_status status = SHOAL_OK;
    request->inputs = engine->addresses + request->sequence % SHOAL_ACTIVE_MAX * 4 * (size_t)size;
    request->outputs = request->inputs + size;
    request->cards = request->outputs + size;
    for (int r = 0; r < size; r++) {
        const bool is_own = r == engine->rank;
        request->cards[r] = request->cards[size + r] = NULL;
        request->inputs[r] =
            is_own ? (void *)(uintptr_t)call->input : find_address(engine, request, r, SHOAL_OPERAND_INPUT, &status);
        request->outputs[r] = is_own ? call->output : find_address(engine, request, r, SHOAL_OPERAND_OUTPUT, &status);
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

enum shoal_status shoal_engine_prepare_hosts(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host, .shape = request->shape};
    const struct shoal_selection selection = shoal_engine_selection(engine, request);
    const struct shoal_algorithm *entry = shoal_select_plan(&selection, &view, request->call.root, NULL);
    SHOAL_TRY(engine->ops->reserve_staging(engine->transport, engine->depth, engine->slot_bytes));
    return shoal_engine_find_peers(engine, entry, request);
}

static void cut_chunks(const struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_device_sum *sum = shoal_call_sum(&request->call);
    request->chunk_elements = sum ? sum->unit_elements
                                  : shoal_select_chunk(request->cached->entry, &request->cached->plan,
                                                       engine->settings->chunk_bytes, request->element_bytes);
    request->chunk_count = (request->call.count + request->chunk_elements - 1) / request->chunk_elements;
    request->part_stride =
        shoal_round_up(shoal_min_size(request->call.count, request->chunk_elements), SHOAL_CACHE_LINE / request->element_bytes);
}

enum shoal_status shoal_engine_prepare(struct shoal_engine *engine, struct shoal_request *request)
{
    if (engine->rank != engine->leader) /* the leader's hint decides for the whole host */
        request->announcement.descriptor.hints =
            engine->ops->announcement(engine->transport, engine->leader, request->sequence)->descriptor.hints;
    if (request->call.layout && request->call.layout->peer_counts)
        agree_on_count(engine, request);
    request->chunk_count = request->chunks_started = request->chunks_done = 0;
    if (!request->call.count && !request->shape->is_empty) /* no rank waits for another: operands may be gone */
        return SHOAL_OK;
    SHOAL_TRY(shoal_engine_find_plan(engine, request));
    SHOAL_TRY(find_addresses(engine, request));
    request->cached->hints = request->announcement.descriptor.hints;
    const struct shoal_plan *plan = &request->cached->plan;
    SHOAL_ASSERT(!shoal_call_input_stays(&request->call) || shoal_plan_only_sends_input(plan, &(bool){false}));
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

/* Returns the number of elements of a reduce step. */
static size_t count_elements(const struct shoal_engine *engine, const struct shoal_chunk *chunk, const struct shoal_step *step)
{
    return shoal_extent_find(engine, chunk, chunk->request->cached->plan.blocks[step->first_block]).elements;
}

/* Returns true if helpers do the step: it is not done yet. */
static SHOAL_NOINLINE bool runner_post_work(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                                            const struct shoal_step *step)
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
    const int ticket =
        shoal_helpers_post(engine->helpers, run_part_of_step, &chunk->work, (uint32_t)((elements + each - 1) / each));
    if (ticket < 0)
        return false;
    chunk->posted = (uint8_t)(ticket + 1);
    engine->runner.posted++;
    return true;
}

static bool has_work_ended(struct shoal_engine *engine, struct shoal_chunk *chunk)
{
    if (!shoal_helpers_has_ended(engine->helpers, chunk->posted - 1))
        return false;
    chunk->posted = 0;
    engine->runner.posted--;
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
        chunk->posted = 0;
        engine->runner.posted--;
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
        return can_touch(engine, chunk, step); /* what it is to lend */
    if (step->peer == engine->rank)            /* it waits for this rank's own puts */
        return run_is_locally_complete(engine, slot);
    const uint64_t base = engine->runner.slot_base[slot * (unsigned)engine->size + step->peer];
    /* Signed: while a credit is still owed, the counter is below the base. */
    return (int64_t)(engine->ops->counter(engine->transport, step->peer, slot) - base) >= (int64_t)step->value;
}

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

/* Returns NULL if out of memory. */
static const char *pack_block(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot, struct shoal_block block,
                              const struct shoal_extent *extent)
{
    const struct shoal_call *call = &chunk->request->call;
    const size_t element = chunk->request->element_bytes;
    struct shoal_packed *packed =
        aligned_alloc(SHOAL_CACHE_LINE, shoal_round_up(sizeof *packed + extent->elements * element, SHOAL_CACHE_LINE));
    if (!packed)
        return NULL;
    for (size_t at = 0, run; at < extent->elements; at += run) {
        run = extent->elements - at;
        const char *from = shoal_extent_address(engine, chunk, slot, block, extent, at, &run);
        memcpy(packed->data + at * element, from, run * element);
    }
    if (block.operand == SHOAL_OPERAND_INPUT && shoal_engine_scales_inputs(engine, call)) {
        const struct shoal_reduction first = shoal_engine_pass(engine, call, SHOAL_PASS_FIRST);
        void *const data = packed->data;
        const void *source = data;
        engine->kernels->reduce[call->type][first.op](&data, 1, &source, 1, extent->elements, first.argument,
                                                      SHOAL_STORES_CACHED);
    }
    packed->next = chunk->packed;
    chunk->packed = packed;
    return packed->data;
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
    const bool is_input = blocks[0].operand == SHOAL_OPERAND_INPUT;
    const bool is_apart = run < from.elements || (is_input && shoal_engine_scales_inputs(engine, &request->call));
    if (is_apart && !(source = chunk->is_packed ? chunk->packed->data : pack_block(engine, chunk, slot, blocks[0], &from)))
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory to pack %zu elements", from.elements);
    const enum shoal_status status =
        engine->ops->put(engine->transport, step->peer, slot, to.staging_at, source, from.elements * request->element_bytes);
    chunk->is_packed = is_apart && status == SHOAL_PENDING;
    return status;
}

/* Returns the work of this rank's device that a step is, or SHOAL_DEVICE_WORKS if the CPU does it. */
static enum shoal_device_work find_work(const struct shoal_plan *plan, const struct shoal_step *step)
{
    const struct shoal_block from = plan->blocks[step->first_block], to = plan->blocks[step->first_block + step->source_count];
    if (step->kind != SHOAL_STEP_REDUCE || (!shoal_block_is_slot(from) && !shoal_block_is_slot(to)))
        return SHOAL_DEVICE_WORKS;
    if (!shoal_block_is_slot(from))
        return from.operand == SHOAL_OPERAND_INPUT ? SHOAL_DEVICE_BRING : SHOAL_DEVICE_TAKE_BACK;
    return shoal_block_is_slot(to)              ? SHOAL_DEVICE_REDUCE
           : to.operand == SHOAL_OPERAND_OUTPUT ? SHOAL_DEVICE_GATHER
                                                : SHOAL_DEVICE_HAND_OUT;
}

/* Returns true if the step copies an input that stays on the device to the output there. */
static bool is_left_to_device(const struct shoal_chunk *chunk, const struct shoal_step *step, int rank)
{
    const struct shoal_block *source = &chunk->request->cached->plan.blocks[step->first_block];
    return shoal_call_input_stays(&chunk->request->call) && source->rank == rank && source->operand == SHOAL_OPERAND_INPUT;
}

/* A rank that fails publishes its failure, and then releases its streams, which may write to memory that this rank, or its
 * device, is reading. So the data count only if no rank has failed by the time they were read. A failure that is being
 * published counts as well, because a rank that finds another one publishing waits only a moment. */
static bool do_data_count(struct shoal_engine *engine)
{
    struct shoal_failure failure;
    return !(engine->ops->is_failing && engine->ops->is_failing(engine->transport)) &&
           !engine->ops->failed(engine->transport, &failure);
}

static bool run_work(struct shoal_engine *engine, const struct shoal_chunk *chunk, enum shoal_device_work work)
{
    if (shoal_device_sum_run(shoal_call_sum(&chunk->request->call), shoal_extent_unit(chunk), work))
        return do_data_count(engine);
    engine->awaits_device = true;
    return false;
}

/* Returns true if the step is done, false if it has to wait. */
static bool run_reduce_step(struct shoal_engine *engine, struct shoal_chunk *chunk, unsigned slot,
                            const struct shoal_step *step)
{
    const bool is_lent = SHOAL_UNLIKELY(chunk->request->cached->is_lent);
    if (SHOAL_UNLIKELY(chunk->posted))
        return has_work_ended(engine, chunk) && (!is_lent || do_data_count(engine));
    if (SHOAL_UNLIKELY(shoal_call_sum(&chunk->request->call) != NULL)) {
        const enum shoal_device_work work = find_work(&chunk->request->cached->plan, step);
        if (work != SHOAL_DEVICE_WORKS)
            return run_work(engine, chunk, work);
    }
    if (is_left_to_device(chunk, step, engine->rank))
        return true;
    if (!can_touch(engine, chunk, step))
        return false;
    if (SHOAL_UNLIKELY(engine->helpers != NULL) && runner_post_work(engine, chunk, slot, step))
        return false;
    const struct shoal_extent_scratch scratch = {engine->sources, engine->dests, engine->scaled};
    shoal_extent_reduce(engine, chunk, slot, step, 0, count_elements(engine, chunk, step), &scratch);
    return !is_lent || do_data_count(engine);
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
        shoal_runner_release(request, SHOAL_OPERAND_INPUT, chunk->first, chunk_end(chunk));
        shoal_runner_release(request, SHOAL_OPERAND_OUTPUT, chunk->first, chunk_end(chunk));
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
        chunk->unready = find_on_device(request);
        chunk->shift = find_shift(engine, request);
        chunk->step = request->chunks_started ? 0 : request->early_steps;
        chunk->first = request->chunks_started++ * request->chunk_elements;
        engine->runner.next++;
        engine->runner.active++;
    }
    return did;
}

/* This rank may not touch peers' operands once a failure was published, and its peers wait until it is outside. It stays inside
 * from turn to turn while helpers work. */
static void leave_operands(struct shoal_engine *engine)
{
    if (engine->ops->leave)
        engine->ops->leave(engine->transport);
}

static bool enter_operands(struct shoal_engine *engine)
{
    struct shoal_failure failure;
    if (SHOAL_LIKELY(!engine->runner.posted))
        return !engine->ops->enter || engine->ops->enter(engine->transport);
    if (!engine->ops->failed(engine->transport, &failure))
        return true;
    stop_work(engine);
    leave_operands(engine);
    return false;
}

/* Packed data may still be on its way, so it stays until the engine is freed. */
void shoal_engine_drop_chunks(struct shoal_engine *engine)
{
    if (SHOAL_UNLIKELY(engine->runner.posted)) {
        stop_work(engine);
        leave_operands(engine);
    }
    for (unsigned i = 0; i < engine->depth; i++)
        engine->runner.left_packed[i] = engine->runner.chunks[i].packed;
    memset(engine->runner.chunks, 0, sizeof engine->runner.chunks);
    engine->runner.active = 0;
}

/* The operation is the only one, so its first chunk uses the next slot. Steps may be repeated: they write only this rank's
 * staging buffer, and no rank reads it before a signal. */
void shoal_engine_start_early(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_chunk chunk = {.request = request, .unready = find_on_device(request)};
    const bool is_alone = shoal_intake_is_alone(engine, request) && !engine->runner.active;
    if (!is_alone || !request->call.count || (request->call.layout && request->call.layout->peer_counts) ||
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
}

bool shoal_engine_run_chunks(struct shoal_engine *engine)
{
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
    if (SHOAL_LIKELY(!engine->runner.posted))
        leave_operands(engine);
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

static bool is_unready(const struct shoal_request *request, enum shoal_operand operand, size_t begin, size_t end)
{
    const struct shoal_device_operand *device = shoal_call_device(&request->call, operand);
    return device && begin < end && !device->ops->is_ready(device, begin, end);
}

/* Returns true if this rank's device has not done the work that the chunk waits for. */
static bool is_at_work(const struct shoal_chunk *chunk)
{
    const struct shoal_plan *plan = &chunk->request->cached->plan;
    const struct shoal_step *step = chunk->step < plan->step_count ? &plan->steps[chunk->step] : NULL;
    const enum shoal_device_work work = step ? find_work(plan, step) : SHOAL_DEVICE_WORKS;
    return work != SHOAL_DEVICE_WORKS &&
           !shoal_device_sum_has_ended(shoal_call_sum(&chunk->request->call), shoal_extent_unit(chunk), work);
}

/* Returns the first operand without which the oldest chunk cannot continue. */
static int find_unready_of_chunk(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_chunk *chunk = oldest_chunk(engine, request);
    if (chunk && shoal_call_sum(&request->call))
        return is_at_work(chunk) ? SHOAL_OPERAND_INPUT : -1;
    if (!chunk || !chunk->unready)
        return -1;
    const struct shoal_plan *plan = &request->cached->plan;
    const struct shoal_step *step = chunk->step < plan->step_count ? &plan->steps[chunk->step] : NULL;
    const unsigned wanted = chunk->unready & (step ? find_own(engine, plan, step) : ~0u);
    for (unsigned operand = SHOAL_OPERAND_INPUT; operand <= SHOAL_OPERAND_OUTPUT; operand++) {
        if (wanted & 1u << operand && is_unready(request, (enum shoal_operand)operand, chunk->first, chunk_end(chunk)))
            return (int)operand;
    }
    return -1;
}

static int find_unready_alone(const struct shoal_request *request)
{
    const size_t begin = request->chunks_done * request->chunk_elements;
    const size_t end = shoal_min_size(begin + request->chunk_elements, request->call.count);
    return is_unready(request, SHOAL_OPERAND_INPUT, begin, end)    ? SHOAL_OPERAND_INPUT
           : is_unready(request, SHOAL_OPERAND_OUTPUT, begin, end) ? SHOAL_OPERAND_OUTPUT
                                                                   : -1;
}

static int find_unready_running(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return engine->size == 1 ? find_unready_alone(request) : find_unready_of_chunk(engine, request);
}

/* An input that travels with an announcement must be ready before that. */
static int find_unready_input(const struct shoal_engine *engine, const struct shoal_request *request)
{
    (void)engine;
    const bool is_unready_now = request->is_direct && is_unready(request, SHOAL_OPERAND_INPUT, 0, request->call.count);
    return is_unready_now ? SHOAL_OPERAND_INPUT : -1;
}

/* All data have arrived; only the device's memory for the result is not ready. */
static int find_unready_output(const struct shoal_request *request, bool has_all_come)
{
    const bool is_unready_now = has_all_come && is_unready(request, SHOAL_OPERAND_OUTPUT, 0, request->call.count);
    return is_unready_now ? SHOAL_OPERAND_OUTPUT : -1;
}

static int find_unready_met(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return find_unready_output(request, request->is_direct && request->next_missing == engine->size);
}

static int find_unready_in_rounds(const struct shoal_engine *engine, const struct shoal_request *request)
{
    (void)engine;
    return find_unready_output(request, request->round == request->peer_set->rounds.count);
}

static int find_unfinished(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_device_operand *output = shoal_call_device(&request->call, SHOAL_OPERAND_OUTPUT);
    (void)engine;
    return output && !output->ops->is_finished(output) ? SHOAL_OPERAND_OUTPUT : -1;
}

int shoal_runner_find_unready(const struct shoal_engine *engine, const struct shoal_request *request)
{
    static int (*const in_phase[SHOAL_PHASE_END])(const struct shoal_engine *, const struct shoal_request *) = {
        [SHOAL_PHASE_QUEUED] = find_unready_input,        [SHOAL_PHASE_MEETING] = find_unready_met,
        [SHOAL_PHASE_IN_ROUNDS] = find_unready_in_rounds, [SHOAL_PHASE_RUNNING] = find_unready_running,
        [SHOAL_PHASE_LEAVING] = find_unfinished,
    };
    if (SHOAL_LIKELY(!shoal_call_is_on_device(&request->call)))
        return -1;
    return in_phase[shoal_request_phase(request)](engine, request);
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
    if (shoal_runner_find_unready(engine, request) >= 0)
        return false;
    if (!chunk || chunk->step == plan->step_count)
        return chunk || request->state == SHOAL_REQUEST_DONE;
    const struct shoal_step *step = &plan->steps[chunk->step];
    return step->kind == SHOAL_STEP_PUT || (step->kind == SHOAL_STEP_WAIT && step->peer == engine->rank && !step->value);
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
