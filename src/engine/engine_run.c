/* How the engine runs plans: operands to addresses, pieces to slots, steps to bytes. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

/* ---- Direct operations: the data came beside the arrival records -------------------------------------------------------- */

static void reduce_payloads(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    void *const dest = call->output;
    for (int r = 0; r < engine->size; r++)
        engine->sources[r] =
            r == engine->rank ? call->input : engine->ops->payload(engine->transport, r, request->sequence, request->bytes);
    engine->kernels->reduce[call->type][call->op](&dest, 1, engine->sources, engine->size, call->count, engine->size,
                                                  SHOAL_STORES_CACHED);
}

static void copy_payload(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    if (call->root != engine->rank)
        memcpy(call->output, engine->ops->payload(engine->transport, call->root, request->sequence, request->bytes),
               request->bytes);
    else if (call->output != call->input)
        memcpy(call->output, call->input, request->bytes);
}

static void gather_payloads(struct shoal_engine *engine, const struct shoal_request *request)
{
    for (int r = 0; r < engine->size; r++) {
        const void *payload = r == engine->rank ? request->call.input
                                                : engine->ops->payload(engine->transport, r, request->sequence, request->bytes);
        memcpy((char *)request->call.output + (size_t)r * request->bytes, payload, request->bytes);
    }
}

void shoal_engine_finish_direct(struct shoal_engine *engine, struct shoal_request *request)
{
    request->record->algorithm = "direct";
    request->record->done = request->record->arrived; /* to within some nanoseconds, for one reading of the clock less */
    if (!request->bytes)
        return;
    if (request->call.kind == SHOAL_KIND_ALLREDUCE)
        reduce_payloads(engine, request);
    else if (request->call.kind == SHOAL_KIND_BROADCAST)
        copy_payload(engine, request);
    else if (request->call.kind == SHOAL_KIND_EXCHANGE)
        gather_payloads(engine, request);
}

/* ---- Plans --------------------------------------------------------------------------------------------------------------- */

static bool is_plan_for(const struct shoal_cached_plan *cached, const struct shoal_request *request, const uint8_t *shared,
                        size_t bytes)
{
    return cached->shared && cached->kind == request->call.kind && cached->root == request->call.root &&
           memcmp(cached->shared, shared, bytes) == 0;
}

/* The next entry that no operation uses; at most SHOAL_ACTIVE_MAX are in use, one each, so there may be none for a moment. */
static struct shoal_cached_plan *evict(struct shoal_engine *engine)
{
    for (unsigned i = 0; i < SHOAL_PLAN_CACHE; i++) {
        struct shoal_cached_plan *cached = &engine->cache[engine->cache_next++ % SHOAL_PLAN_CACHE];
        if (cached->users)
            continue;
        shoal_plan_fini(&cached->plan);
        free(cached->shared);
        memset(cached, 0, sizeof *cached);
        return cached;
    }
    return NULL;
}

static enum shoal_status build_plan(struct shoal_engine *engine, const struct shoal_request *request, const uint8_t *shared,
                                    struct shoal_cached_plan *cached)
{
    const size_t size = (size_t)engine->size;
    const struct shoal_view view = {engine->size, engine->transport->host, shared, shared + size};
    const struct shoal_row *row = shoal_select_plan(request->call.kind, &view);
    shoal_plan_init(&cached->plan, engine->rank, engine->size);
    row->build(&cached->plan, &view, engine->rank, request->call.root);
    uint8_t *copy = malloc(2 * size);
    if (!copy || cached->plan.status != SHOAL_OK) {
        free(copy);
        shoal_plan_fini(&cached->plan);
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a plan of %d ranks", engine->size);
    }
    memcpy(copy, shared, 2 * size);
    cached->shared = copy;
    cached->row = row;
    cached->kind = request->call.kind;
    cached->root = request->call.root;
    shoal_log_line(engine->log, SHOAL_LOG_DEBUG, "engine", "%s: %s of %zu bytes runs as %s, %u steps, %d window parts",
                   engine->name, shoal_select_kind_name(request->call.kind), request->bytes, row->name, cached->plan.step_count,
                   cached->plan.parts);
    return SHOAL_OK;
}

static enum shoal_status find_plan(struct shoal_engine *engine, struct shoal_request *request)
{
    uint8_t shared[2 * SHOAL_PLAN_RANKS_MAX];
    const size_t size = (size_t)engine->size;
    for (size_t r = 0; r < size; r++) {
        const struct shoal_arrival *arrival =
            (int)r == engine->rank ? &request->arrival : engine->ops->arrival(engine->transport, (int)r, request->sequence);
        shared[r] = arrival->input != 0;
        shared[size + r] = arrival->output != 0;
    }
    struct shoal_cached_plan *cached = NULL;
    for (unsigned i = 0; i < SHOAL_PLAN_CACHE && !cached; i++)
        cached = is_plan_for(&engine->cache[i], request, shared, 2 * size) ? &engine->cache[i] : NULL;
    if (!cached) {
        cached = evict(engine);
        if (!cached)
            return shoal_log_fail(engine->log, SHOAL_ERR_INTERNAL, "engine", "all plans are in use");
        SHOAL_TRY(build_plan(engine, request, shared, cached));
    }
    cached->users++;
    request->cached = cached;
    return SHOAL_OK;
}

static enum shoal_status find_addresses(struct shoal_engine *engine, struct shoal_request *request)
{
    enum shoal_status status = SHOAL_OK;
    request->inputs = engine->addresses + request->sequence % SHOAL_ACTIVE_MAX * 2 * (size_t)engine->size;
    request->outputs = request->inputs + engine->size;
    for (int r = 0; r < engine->size; r++) {
        if (r == engine->rank) {
            request->inputs[r] = (void *)(uintptr_t)request->call.input;
            request->outputs[r] = request->call.output;
            continue;
        }
        const struct shoal_arrival *arrival = engine->ops->arrival(engine->transport, r, request->sequence);
        request->inputs[r] = request->outputs[r] = NULL;
        if (arrival->input && status == SHOAL_OK)
            request->inputs[r] = engine->ops->reach(engine->transport, r, arrival->input, request->bytes, &status);
        if (arrival->output && status == SHOAL_OK)
            request->outputs[r] = arrival->output == arrival->input
                                      ? request->inputs[r]
                                      : engine->ops->reach(engine->transport, r, arrival->output, request->bytes, &status);
    }
    return status;
}

enum shoal_status shoal_engine_prepare(struct shoal_engine *engine, struct shoal_request *request)
{
    if (engine->rank != 0) /* rank 0's hint counts for all */
        request->arrival.descriptor.hints = engine->ops->arrival(engine->transport, 0, request->sequence)->descriptor.hints;
    SHOAL_TRY(find_plan(engine, request));
    SHOAL_TRY(find_addresses(engine, request));
    const struct shoal_plan *plan = &request->cached->plan;
    if (plan->parts)
        SHOAL_TRY(
            engine->ops->reserve_window(engine->transport, engine->depth, (size_t)plan->parts * engine->settings->piece_bytes));
    request->record->algorithm = request->cached->row->name;
    request->piece_elements =
        shoal_select_piece(request->cached->row, plan, engine->settings->piece_bytes, shoal_type_bytes(request->call.type));
    request->piece_count = (request->call.count + request->piece_elements - 1) / request->piece_elements;
    request->pieces_started = request->pieces_done = 0;
    return SHOAL_OK;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

struct place {
    char *address;
    size_t elements;
};

static struct place find_place(struct shoal_engine *engine, const struct shoal_piece *piece, unsigned slot,
                               struct shoal_block block)
{
    const struct shoal_request *request = piece->request;
    const size_t element = shoal_type_bytes(request->call.type);
    struct place place;
    const size_t begin = shoal_block_span(piece->count, SHOAL_CACHE_LINE / element, block.index, block.of, &place.elements);
    if (block.operand == SHOAL_OPERAND_WINDOW) {
        char *window = engine->ops->window(engine->transport, block.rank, slot);
        place.address = window + block.part * engine->settings->piece_bytes + begin * element;
        return place;
    }
    char *base = block.operand == SHOAL_OPERAND_INPUT ? request->inputs[block.rank] : request->outputs[block.rank];
    place.address = base + (piece->first + begin) * element;
    return place;
}

/* Addresses that agree in their low 28 bits fight for the same place in the first cache of some processors, which predict a
 * line's place from them: reading one and writing the other in one loop is then several times slower. */
static bool collide(const void *a, const void *b)
{
    const uintptr_t low_bits = ((uintptr_t)1 << 28) - 1;
    return a != b && (((uintptr_t)a ^ (uintptr_t)b) & low_bits) < SHOAL_CACHE_LINE;
}

static bool any_collide(const struct shoal_engine *engine, const struct shoal_step *step)
{
    for (unsigned d = 0; d < step->dest_count; d++) {
        for (unsigned s = 0; s < step->source_count; s++) {
            if (collide(engine->dests[d], engine->sources[s]))
                return true;
        }
    }
    return false;
}

/* Reduces by way of a buffer that stays in the first cache, so that no loop reads and writes colliding addresses. */
static void reduce_apart(struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_step *step,
                         size_t elements, enum shoal_stores stores)
{
    _Alignas(SHOAL_PAGE) char buffer[SHOAL_PAGE];
    void *const into = buffer;
    const size_t element = shoal_type_bytes(request->call.type), chunk = sizeof buffer / element;
    for (size_t at = 0; at < elements; at += chunk) {
        const size_t count = shoal_min_size(chunk, elements - at);
        engine->kernels->reduce[request->call.type][request->call.op](&into, 1, engine->sources, step->source_count, count,
                                                                      engine->size, SHOAL_STORES_CACHED);
        engine->kernels->copy(engine->dests, step->dest_count, buffer, count * element, stores);
        for (unsigned s = 0; s < step->source_count; s++)
            engine->sources[s] = (const char *)engine->sources[s] + count * element;
        for (unsigned d = 0; d < step->dest_count; d++)
            engine->dests[d] = (char *)engine->dests[d] + count * element;
    }
}

static void run_reduce(struct shoal_engine *engine, const struct shoal_piece *piece, unsigned slot,
                       const struct shoal_step *step)
{
    const struct shoal_request *request = piece->request;
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    const enum shoal_stores stores =
        request->arrival.descriptor.hints & SHOAL_HINT_STREAMING ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
    struct place place = {0};
    for (unsigned i = 0; i < step->source_count; i++) {
        place = find_place(engine, piece, slot, blocks[i]);
        engine->sources[i] = place.address;
    }
    if (!place.elements)
        return;
    const size_t elements = place.elements;
    for (unsigned i = 0; i < step->dest_count; i++)
        engine->dests[i] = find_place(engine, piece, slot, blocks[step->source_count + i]).address;
    if (step->source_count > 1 && any_collide(engine, step))
        reduce_apart(engine, request, step, elements, stores);
    else if (step->source_count > 1)
        engine->kernels->reduce[request->call.type][request->call.op](engine->dests, step->dest_count, engine->sources,
                                                                      step->source_count, elements, engine->size, stores);
    else if (step->dest_count > 1 || engine->dests[0] != engine->sources[0])
        engine->kernels->copy(engine->dests, step->dest_count, engine->sources[0],
                              elements * shoal_type_bytes(request->call.type), stores);
}

static bool is_met(struct shoal_engine *engine, unsigned slot, const struct shoal_step *step)
{
    const uint64_t base = engine->slot_base[slot * (unsigned)engine->size + step->peer];
    /* Signed: while a credit is still owed the counter is below the base. */
    return (int64_t)(engine->ops->counter(engine->transport, step->peer, slot) - base) >= (int64_t)step->value;
}

/* Offsets of a put count from the window slot, or from the peer's output. */
static enum shoal_status run_put(struct shoal_engine *engine, const struct shoal_piece *piece, unsigned slot,
                                 const struct shoal_step *step)
{
    const struct shoal_request *request = piece->request;
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    const struct place source = find_place(engine, piece, slot, blocks[0]);
    const size_t element = shoal_type_bytes(request->call.type);
    size_t elements;
    size_t offset =
        element * shoal_block_span(piece->count, SHOAL_CACHE_LINE / element, blocks[1].index, blocks[1].of, &elements);
    shoal_location location = 0;
    if (blocks[1].operand == SHOAL_OPERAND_WINDOW) {
        offset += blocks[1].part * engine->settings->piece_bytes;
    } else {
        location = engine->ops->arrival(engine->transport, step->peer, request->sequence)->output;
        offset += piece->first * element;
    }
    return engine->ops->put(engine->transport, step->peer, slot, location, offset, source.address, elements * element);
}

/* True when the step is done; false when it has to wait, or when it failed (then the engine is broken). */
static bool run_step(struct shoal_engine *engine, struct shoal_piece *piece, unsigned slot, const struct shoal_step *step)
{
    enum shoal_status status = SHOAL_OK;
    switch ((enum shoal_step_kind)step->kind) {
    case SHOAL_STEP_WAIT:
        return is_met(engine, slot, step);
    case SHOAL_STEP_SIGNAL:
        engine->ops->signal(engine->transport, step->peer, slot);
        engine->must_flush = true;
        return true;
    case SHOAL_STEP_REDUCE:
        run_reduce(engine, piece, slot, step);
        return true;
    case SHOAL_STEP_PUT:
        status = run_put(engine, piece, slot, step);
        engine->must_flush = true;
        break;
    }
    if (status != SHOAL_OK && status != SHOAL_PENDING) {
        struct shoal_failure failure;
        shoal_engine_begin_failure(engine, piece->request, status, step->peer, &failure);
        shoal_log_last_error(engine->log, failure.text, sizeof failure.text);
        shoal_engine_fail(engine, &failure);
    }
    return status == SHOAL_OK;
}

/* ---- Pieces -------------------------------------------------------------------------------------------------------------- */

static void end_piece(struct shoal_engine *engine, struct shoal_piece *piece, unsigned slot)
{
    struct shoal_request *request = piece->request;
    uint64_t *base = &engine->slot_base[slot * (unsigned)engine->size];
    for (int r = 0; r < engine->size; r++)
        base[r] += request->cached->plan.signals_in[r];
    piece->request = NULL;
    engine->piece_active--;
    if (++request->pieces_done == request->piece_count)
        request->state = SHOAL_REQUEST_DONE;
}

static bool run_piece(struct shoal_engine *engine, struct shoal_piece *piece, unsigned slot)
{
    const struct shoal_plan *plan = &piece->request->cached->plan;
    const uint32_t before = piece->step;
    while (piece->step < plan->step_count && run_step(engine, piece, slot, &plan->steps[piece->step])) {
        if (SHOAL_UNLIKELY(engine->on_step != NULL))
            engine->on_step(engine->on_step_arg, piece->request->sequence, piece->first / piece->request->piece_elements, plan,
                            piece->step);
        piece->step++;
    }
    const bool did = piece->step != before;
    if (!engine->is_broken && piece->step == plan->step_count)
        end_piece(engine, piece, slot);
    return did;
}

/* Gives free slots to the next pieces, in order. */
static bool start_pieces(struct shoal_engine *engine)
{
    bool did = false;
    while (engine->start_next) {
        struct shoal_request *request = engine->start_next;
        if (request->state == SHOAL_REQUEST_ANNOUNCED)
            return did;
        if (request->state == SHOAL_REQUEST_DONE || request->pieces_started == request->piece_count) {
            engine->start_next = request->next;
            continue;
        }
        struct shoal_piece *piece = &engine->pieces[engine->piece_next % engine->depth];
        if (piece->request)
            return did;
        piece->request = request;
        piece->first = request->pieces_started++ * request->piece_elements;
        piece->count = shoal_min_size(request->piece_elements, request->call.count - piece->first);
        piece->step = 0;
        engine->piece_next++;
        engine->piece_active++;
        did = true;
    }
    return did;
}

bool shoal_engine_run_pieces(struct shoal_engine *engine)
{
    bool did = start_pieces(engine);
    if (engine->ops->enter && !engine->ops->enter(engine->transport))
        return did; /* shoal_engine_check takes it up */
    /* Oldest first: it is what the others wait for. */
    for (uint64_t i = engine->depth; i > 0 && !engine->is_broken; i--) {
        const unsigned slot = (unsigned)((engine->piece_next + engine->depth - i) % engine->depth);
        if (engine->pieces[slot].request)
            did |= run_piece(engine, &engine->pieces[slot], slot);
    }
    if (engine->ops->leave)
        engine->ops->leave(engine->transport);
    return did;
}
