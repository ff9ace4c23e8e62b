/* How requests pass through the engine: the engine accepts calls, announces them, compares them with the calls of other ranks,
 * and completes them. */
#include "engine/engine_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "engine/call_sizes.h"

/* ---- Requests ------------------------------------------------------------------------------------------------------------ */

static void start_record(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    struct shoal_record *record = shoal_recorder_next(&engine->recorder);
    if (record->owner)
        record->owner->record = &engine->spare;
    record->owner = request;
    record->sequence = request->sequence;
    record->count = call->count;
    record->posted = request->posted_ticks;
    record->arrived = record->done = 0;
    record->collective = shoal_collective_traits(call->collective)->name;
    record->algorithm = shoal_engine_unknown;
    record->root = call->root;
    record->last_rank = -1;
    record->late = 0;
    record->step = -1;
    record->peer = -1;
    record->trace_tag = call->trace_tag;
    record->type = (uint8_t)call->type;
    record->op = (uint8_t)call->op;
    record->status = SHOAL_PENDING;
    request->record = record;
}

static void push_queue(struct shoal_engine *engine, struct shoal_request *request)
{
    request->next = NULL;
    if (engine->intake.queue_tail && engine->intake.queue_head)
        engine->intake.queue_tail->next = request;
    else
        engine->intake.queue_head = request;
    engine->intake.queue_tail = request;
}

static void push_active(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(engine->size == 1 || engine->intake.active_count < SHOAL_ACTIVE_MAX);
    request->next = NULL;
    if (engine->intake.active_head)
        engine->intake.active_tail->next = request;
    else
        engine->intake.active_head = request;
    engine->intake.active_tail = request;
    engine->intake.active_count++;
}

/* ---- The only rank of its communicator ----------------------------------------------------------------------------------- */

/* Copies part 0 of the input to part 0 of the output. Inlined, because most small calls do nothing else. */
static inline __attribute__((always_inline)) void copy_alone(struct shoal_engine *engine, const struct shoal_request *request,
                                                             size_t begin, size_t end)
{
    const struct shoal_call *call = &request->call;
    const size_t element = request->element_bytes;
    for (size_t at = begin, run; at < end; at += run) {
        run = end - at;
        const void *from = shoal_call_address(call, 0, element, SHOAL_INPUT, 0, at, &run);
        void *const to = shoal_call_address(call, 0, element, SHOAL_OUTPUT, 0, at, &run);
        if (call->op == SHOAL_SCALED_SUM)
            engine->kernels->reduce[call->type][call->op](&to, 1, &from, 1, run, call->scale, SHOAL_STORES_CACHED);
        else if (to != from)
            memcpy(to, from, run * element);
    }
}

/* A copy of fewer bytes is not worth a post, and a part of fewer not a claim. */
#define ALONE_HELPED_BYTES ((size_t)512 << 10)
#define ALONE_PART_BYTES ((size_t)128 << 10)

struct copied_alone {
    struct shoal_engine *engine;
    const struct shoal_request *request;
    size_t count, part_elements;
};

static void copy_part_alone(void *arg, uint32_t part)
{
    const struct copied_alone *copied = arg;
    const size_t begin = part * copied->part_elements;
    copy_alone(copied->engine, copied->request, begin, shoal_min_size(begin + copied->part_elements, copied->count));
}

static SHOAL_NOINLINE void copy_alone_helped(struct shoal_engine *engine, const struct shoal_request *request, size_t count)
{
    const size_t least = ALONE_PART_BYTES / request->element_bytes;
    struct copied_alone copied = {engine, request, count, shoal_max_size(least, count / (SHOAL_HELPERS_PARTS_MAX / 2))};
    shoal_helpers_run(engine->helpers, copy_part_alone, &copied,
                      (uint32_t)((count + copied.part_elements - 1) / copied.part_elements));
}

static size_t count_alone(const struct shoal_request *request)
{
    return request->shape->is_empty ? 0 : shoal_call_length(&request->call, 0, 0, 0);
}

/* For operands of which all elements are ready. */
static void run_alone(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(!engine->intake.active_head); /* operations end in order */
    const size_t count = count_alone(request);
    if (SHOAL_UNLIKELY(count * request->element_bytes >= ALONE_HELPED_BYTES) && engine->helpers)
        copy_alone_helped(engine, request, count);
    else
        copy_alone(engine, request, 0, count);
    request->record->arrived = request->posted_ticks;
    request->record->algorithm = shoal_engine_alone;
    engine->intake.done_sequence = engine->intake.agreed_sequence = engine->intake.acknowledged_sequence = request->sequence;
    shoal_request_complete(request, SHOAL_OK);
}

/* For a call with an operand that becomes ready later, or for any call queued behind such a call. */
static void begin_alone(struct shoal_engine *engine, struct shoal_request *request)
{
    request->is_direct = true;
    request->needed = engine->rank;
    request->announcement.input = request->announcement.output = 0;
    request->chunk_elements = engine->settings->chunk_bytes / request->element_bytes;
    request->chunk_count = (count_alone(request) + request->chunk_elements - 1) / request->chunk_elements;
    request->chunks_done = 0;
    request->record->algorithm = shoal_engine_alone;
    request->state = SHOAL_REQUEST_RUNNING;
    push_active(engine, request);
}

static void post_alone(struct shoal_engine *engine, struct shoal_request *request)
{
    const uintptr_t is_rare = (uintptr_t)request->call.layout | (uintptr_t)engine->intake.active_head; /* one test for both */
    if (SHOAL_UNLIKELY(is_rare) && (engine->intake.active_head || shoal_call_is_asynchronous(&request->call)))
        begin_alone(engine, request);
    else
        run_alone(engine, request);
}

/* Copies the next range of the request if it is ready. */
static bool advance_alone(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(request->chunks_done < request->chunk_count);
    const size_t begin = request->chunks_done * request->chunk_elements;
    const size_t end = shoal_min_size(begin + request->chunk_elements, count_alone(request));
    if (!shoal_runner_is_ready(engine, request, SHOAL_INPUT, begin, end) ||
        !shoal_runner_is_ready(engine, request, SHOAL_OUTPUT, begin, end))
        return false;
    copy_alone(engine, request, begin, end);
    shoal_operand_release(shoal_call_operand(&request->call, SHOAL_INPUT), begin, end);
    shoal_operand_release(shoal_call_operand(&request->call, SHOAL_OUTPUT), begin, end);
    request->chunks_done++;
    return true;
}

static bool progress_alone(struct shoal_engine *engine)
{
    bool did = false;
    for (struct shoal_request *request = engine->intake.active_head; request; request = request->next) {
        while (request->chunks_done < request->chunk_count && advance_alone(engine, request))
            did = true;
        if (request->state == SHOAL_REQUEST_DONE || request->chunks_done < request->chunk_count)
            continue;
        request->record->arrived = request->posted_ticks;
        request->state = SHOAL_REQUEST_DONE;
        engine->intake.agreed_sequence = request->sequence;
        did = true;
    }
    return did;
}

/* ---- Sizes and ranks of a call ------------------------------------------------------------------------------------------- */

/* An operation without a plan needs only the data of the ranks that contribute to this rank's output. A barrier, and any
 * operation with a plan, needs all ranks. So a rank that only contributes continues at once, and checks later whether all ranks
 * made the same call (agree_up_to). */
static int find_needed(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_shape *shape = request->shape;
    const int root = request->call.root;
    if (!request->is_direct || shape->is_empty)
        return SHOAL_NEEDED_ALL;
    if (!shoal_shape_receives(shape, engine->rank, root))
        return engine->rank;
    return shape->root_contributes ? root : SHOAL_NEEDED_ALL;
}

static void engine_measure(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    request->shape = &shoal_collective_traits(call->collective)->shape;
    request->element_bytes = call->collective == SHOAL_COLLECTIVE_SPLIT ? 1 : shoal_type_bytes(call->type);
    const bool is_partitioned = request->shape->is_input_partitioned || request->shape->is_output_partitioned;
    request->bytes = call->count * request->element_bytes * (size_t)(is_partitioned ? engine->size : 1);
}

/* ---- Accepting calls ----------------------------------------------------------------------------------------------------- */

/* Sets all fields of a request, from the call or to their initial state. */
static void fill_request(struct shoal_engine *engine, const struct shoal_call *call, struct shoal_request *request)
{
    request->engine = engine;
    request->progress = engine->progress;
    request->call = *call;
    request->call.arrays = NULL;
    request->state = SHOAL_REQUEST_QUEUED;
    request->record = NULL;
    request->unready.operand = 0;
    request->cached = NULL;
    request->next_missing = request->next_expected = 0;
    request->peer_set = NULL;
    request->early_steps = 0;
    request->stores.trial = request->width.trial = request->lanes.trial = NULL;
    request->round = -1;
    request->has_sent = false;
    request->excused_ns = 0;
    request->posted_ticks = shoal_clock_ticks();
    request->deadline_ns = shoal_engine_time_ns(engine, request->posted_ticks) +
                           (call->timeout_ms ? call->timeout_ms : engine->timeout_ms) * SHOAL_NS_PER_MS;
    engine_measure(engine, request);
    atomic_store_explicit(&request->awaited, 0, memory_order_relaxed);
    atomic_store_explicit(&request->status, SHOAL_PENDING, memory_order_relaxed);
}

static void post_message(struct shoal_engine *engine, struct shoal_request *request)
{
    request->sequence = 0;
    start_record(engine, request);
    const enum shoal_status status = shoal_p2p_post(engine, request);
    if (status != SHOAL_OK)
        shoal_request_complete(request, status);
}

static void post_collective(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    request->sequence = engine->intake.next_sequence++;
    start_record(engine, request);
    if (engine->size == 1) {
        post_alone(engine, request);
        return;
    }
    const struct shoal_selection selection = shoal_engine_selection(engine, request);
    request->is_direct = shoal_select_is_direct(&selection, &request->in_rounds);
    request->needed = find_needed(engine, request);
    request->payload_bytes = shoal_call_has_peer_counts(call) ? (size_t)engine->locals * sizeof(struct shoal_call_part)
                             : request->is_direct             ? shoal_engine_payload_bytes(engine, request, engine->rank)
                                                              : 0;
    push_queue(engine, request);
}

void shoal_engine_post(struct shoal_engine *engine, const struct shoal_call *call, struct shoal_request *request)
{
    fill_request(engine, call, request);
    if (!engine->is_in_progress) /* a post in a callback checks later; the lists are being walked now */
        shoal_engine_heed_failure(engine);
    if (engine->is_broken)
        shoal_request_complete(request, shoal_engine_failure(engine)->status);
    else if (shoal_request_is_message(request))
        post_message(engine, request);
    else
        post_collective(engine, request);
}

bool shoal_engine_only_puts_input(struct shoal_engine *engine, const struct shoal_call *call, bool *copies_out)
{
    struct shoal_request request = {.call = *call};
    const struct shoal_algorithm *in_rounds;
    if (engine->hosts == 1 || engine->is_broken || !engine->ops->reads_registered_for ||
        shoal_engine_scales_inputs(engine, call))
        return false;
    engine_measure(engine, &request);
    const struct shoal_selection selection = shoal_engine_selection(engine, &request);
    return !shoal_select_is_direct(&selection, &in_rounds) &&
           shoal_engine_plan_only_puts_input(engine, &request, &selection, copies_out);
}

/* ---- Announcing ---------------------------------------------------------------------------------------------------------- */

/* Publishes up to which operation this rank no longer needs its peers' announcements, because peers may wait to reuse them. */
static void acknowledge_done(struct shoal_engine *engine)
{
    const struct shoal_intake *intake = &engine->intake;
    const uint64_t acknowledged =
        intake->agreed_sequence < intake->done_sequence ? intake->agreed_sequence : intake->done_sequence;
    if (acknowledged == intake->acknowledged_sequence)
        return;
    SHOAL_ASSERT((int64_t)(acknowledged - engine->intake.acknowledged_sequence) >
                 0); /* peers reuse memory once its operation is acknowledged, so the number never goes back */
    engine->intake.acknowledged_sequence = acknowledged;
    engine->ops->complete(engine->transport, acknowledged);
    engine->must_flush = true;
}

/* Compares the calls of an operation for which this rank did not wait for all others. Returns false if some calls have not
 * arrived yet, or if they differ and the engine is broken. */
static bool agree_on(struct shoal_engine *engine, uint64_t sequence)
{
    SHOAL_ASSERT(sequence == engine->intake.agreed_sequence + 1);
    const struct shoal_peer_set *peer_set = engine->intake.met[sequence % SHOAL_ANNOUNCEMENTS];
    for (int i = 0; i < shoal_engine_source_count(engine, peer_set); i++) {
        const int r = shoal_peer_set_source(peer_set, i);
        if (r == engine->rank)
            continue;
        const struct shoal_announcement *other = engine->ops->announcement(engine->transport, r, sequence);
        if (!other || !shoal_engine_check_past_call(engine, &engine->intake.called[sequence % SHOAL_ANNOUNCEMENTS], other))
            return false;
    }
    engine->intake.agreed_sequence = sequence;
    return true;
}

/* Like agree_on(), but for all operations up to the last. */
static inline bool agree_up_to(struct shoal_engine *engine, uint64_t last)
{
    while (engine->intake.agreed_sequence < last) {
        if (!agree_on(engine, engine->intake.agreed_sequence + 1))
            return false;
    }
    return true;
}

/* Returns the number of operations that all ranks which see the request's announcement have completed. */
static uint64_t find_completed_by_all(struct shoal_engine *engine, const struct shoal_peer_set *peer_set)
{
    agree_up_to(engine, engine->intake.done_sequence);
    acknowledge_done(engine);
    uint64_t least = engine->intake.acknowledged_sequence;
    for (int i = 0; i < (peer_set ? peer_set->met.count : engine->size); i++) {
        const int r = peer_set ? peer_set->met.at[i] : i;
        const uint64_t done = r != engine->rank ? engine->ops->completed(engine->transport, r) : least;
        least = done < least ? done : least;
    }
    return least;
}

/* An announcement and its payload may be overwritten once every rank has completed their operation. */
static bool may_announce(struct shoal_engine *engine, struct shoal_request *request)
{
    const size_t bytes = request->in_rounds ? request->bytes : request->payload_bytes;
    const uint64_t kept = bytes > SHOAL_PAYLOAD_INLINE ? SHOAL_PAYLOADS : SHOAL_ANNOUNCEMENTS;
    if (engine->intake.active_count == SHOAL_ACTIVE_MAX)
        return false;
    if (request->is_direct && !shoal_runner_is_ready(engine, request, SHOAL_INPUT, 0, request->call.count))
        return false; /* the data leave with the announcement */
    if (!request->peer_set && request->sequence - engine->intake.completed_by_all <= kept)
        return true;
    const uint64_t completed = find_completed_by_all(engine, request->peer_set);
    if (engine->is_broken) /* then the request is gone */
        return false;
    if (!request->peer_set)
        engine->intake.completed_by_all = completed;
    return request->sequence - completed <= kept;
}

/* Announces where peers can reach an operand, if they can. An operand that no plan names is not announced, because the program
 * may free it earlier. A rank that is alone on its host lends to nobody. */
static shoal_location locate_operand(struct shoal_engine *engine, struct shoal_request *request,
                                     enum shoal_block_operand operand)
{
    const struct shoal_call_memory memory =
        shoal_call_locate(&request->call, operand, engine->rank, engine->size, request->element_bytes);
    if (!memory.at || (memory.is_lent && engine->locals == 1))
        return 0;
    const shoal_location location = engine->ops->locate(engine->transport, memory.at, memory.bytes);
    if (memory.is_lent && location)
        request->announcement.descriptor.hints |= operand == SHOAL_INPUT ? SHOAL_HINT_LENT_INPUT : SHOAL_HINT_LENT_OUTPUT;
    return location;
}

/* Collects the counts of this host's ranks into one array, which follows the counts of all ranks. */
static const struct shoal_call_part *pick_local_peer_counts(const struct shoal_engine *engine, struct shoal_call_parts *parts)
{
    struct shoal_call_part *picked = parts->peer_counts + parts->size;
    if (engine->hosts == 1)
        return parts->peer_counts;
    for (int r = 0, count = 0; r < engine->size; r++) {
        if (shoal_engine_is_local(engine, r))
            picked[count++] = parts->peer_counts[r];
    }
    return picked;
}

/* Returns the data that travel with the announcement, or NULL if there are none. */
static const void *find_payload(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    SHOAL_ASSERT(request->payload_bytes <= SHOAL_PAYLOAD_MAX);
    if (!request->payload_bytes)
        return NULL;
    if (shoal_call_has_peer_counts(call))
        return pick_local_peer_counts(engine, call->layout->parts);
    return call->layout ? shoal_runner_pack(engine, request) : call->input;
}

/* Returns a hash of the values that must agree but have no field of their own. */
static uint32_t detail_of(const struct shoal_call *call)
{
    uint32_t detail = call->layout ? call->layout->detail : 0;
    if (SHOAL_UNLIKELY(call->op == SHOAL_SCALED_SUM)) {
        const uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, &call->scale, sizeof call->scale);
        detail ^= (uint32_t)(hash ^ hash >> 32);
    }
    return detail;
}

/* Returns the remote ranks that receive the announcement now, or NULL for all. With rounds, remote ranks receive it later
 * together with the data gathered so far. With per-peer counts, each rank receives a different announcement. */
static const uint8_t *find_receivers(const struct shoal_request *request)
{
    if (request->in_rounds || shoal_call_has_peer_counts(&request->call))
        return shoal_no_ranks;
    return request->peer_set ? request->peer_set->is_member : NULL;
}

/* Starts with the next rank, so that not all ranks send to the same rank first. */
static void send_notices(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call_part *peer_counts = request->call.layout->parts->peer_counts;
    for (int i = 1; i < engine->size; i++) {
        const int peer = (engine->rank + i) % engine->size;
        if (!shoal_engine_is_local(engine, peer) && shoal_peer_set_has(request->peer_set, peer))
            engine->ops->announce_to(engine->transport, peer, &request->announcement, &peer_counts[peer],
                                     sizeof peer_counts[peer]);
    }
}

/* A step that failed breaks the engine. */
static void heed_failed_step(struct shoal_engine *engine)
{
    const struct shoal_failed_step *step = shoal_runner_failed_step(engine);
    if (SHOAL_UNLIKELY(step != NULL))
        shoal_engine_fail_by_last_error(engine, step->request, step->status, step->peer);
}

static void engine_announce(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    struct shoal_announcement *announcement = &request->announcement;
    SHOAL_ASSERT(request->state == SHOAL_REQUEST_QUEUED);
    SHOAL_ASSERT(engine->intake.active_count <= SHOAL_ACTIVE_MAX);
    announcement->descriptor = (struct shoal_descriptor){
        .sequence = request->sequence,
        .count = call->count,
        .detail = detail_of(call),
        .root = (int16_t)call->root,
        .collective = (uint8_t)call->collective,
        .type = (uint8_t)call->type,
        .op = (uint8_t)call->op,
        .way = (uint8_t)shoal_call_way(call),
        .type_tag = call->type_tag,
        .posted = (uint32_t)(request->posted_ticks >> 8),
    };
    announcement->input = announcement->output = 0;
    if (!request->is_direct) {
        announcement->input = locate_operand(engine, request, SHOAL_INPUT);
        announcement->output = locate_operand(engine, request, SHOAL_OUTPUT);
        announcement->descriptor.hints |= SHOAL_HINT_PLANNED | shoal_trial_hint(engine, request); /* reads the locations */
    }
    engine->intake.called[request->sequence % SHOAL_ANNOUNCEMENTS] = announcement->descriptor;
    engine->intake.met[request->sequence % SHOAL_ANNOUNCEMENTS] = request->peer_set;
    engine->ops->announce(engine->transport, announcement, find_payload(engine, request), request->payload_bytes,
                          find_receivers(request));
    if (SHOAL_UNLIKELY(engine->hosts > 1) && shoal_call_has_peer_counts(call))
        send_notices(engine, request);
    engine->must_flush = true;
    request->state = SHOAL_REQUEST_ANNOUNCED;
    if (request->is_direct && SHOAL_UNLIKELY(call->layout != NULL))
        shoal_operand_release(shoal_call_operand(call, SHOAL_INPUT), 0, call->count);
    if (request->is_direct || engine->hosts > 1)
        return;
    shoal_runner_start_early(engine, request);
    heed_failed_step(engine);
}

void shoal_engine_fail_request(struct shoal_engine *engine, struct shoal_request *request, enum shoal_status status)
{
    const bool is_group = request->call.collective == SHOAL_COLLECTIVE_GROUP;
    if (shoal_request_status(request) == SHOAL_PENDING)
        shoal_engine_fail_by_last_error(engine, is_group ? NULL : request, status, engine->rank);
}

/* Finds the peers of a request that does not involve all ranks. */
static bool engine_meet(struct shoal_engine *engine, struct shoal_request *request)
{
    const enum shoal_status status =
        request->in_rounds ? shoal_engine_prepare_rounds(engine, request) : shoal_runner_prepare_hosts(engine, request);
    if (status != SHOAL_OK)
        shoal_engine_fail_request(engine, request, status);
    return status == SHOAL_OK;
}

static bool announce_queued(struct shoal_engine *engine)
{
    bool did = false;
    while (!engine->is_broken && engine->intake.queue_head) {
        struct shoal_request *request = engine->intake.queue_head;
        if (SHOAL_UNLIKELY(engine->hosts > 1) && (!request->is_direct || request->in_rounds) && !request->peer_set &&
            !engine_meet(engine, request))
            return true;
        SHOAL_ASSERT(request->state == SHOAL_REQUEST_QUEUED);
        if (!may_announce(engine, request))
            break;
        engine->intake.queue_head = request->next;
        push_active(engine, request);
        if (!engine->intake.start_next && !request->is_direct)
            engine->intake.start_next = request;
        engine_announce(engine, request);
        did = true;
    }
    return did;
}

/* ---- Announcements of other ranks ---------------------------------------------------------------------------------------- */

static inline bool is_needed(const struct shoal_engine *engine, const struct shoal_request *request, int peer)
{
    return peer != engine->rank && (request->needed == SHOAL_NEEDED_ALL || request->needed == peer) &&
           shoal_peer_set_is_source(request->peer_set, peer);
}

/* Finds the rank that came last and its delay after the first. Posting times are ticks / 256 in 32 bits, so differences are
 * valid for minutes. */
static void note_last_rank(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(request->next_missing == engine->size); /* all announcements that it needs have arrived */
    struct shoal_record *record = request->record;
    int32_t first = 0, last = 0;
    record->arrived = shoal_clock_ticks();
    if (request->needed != SHOAL_NEEDED_ALL)
        return;
    record->last_rank = engine->rank;
    for (int i = 0; i < shoal_engine_source_count(engine, request->peer_set); i++) {
        const int r = shoal_peer_set_source(request->peer_set, i);
        if (r == engine->rank)
            continue;
        const struct shoal_announcement *other = engine->ops->announcement(engine->transport, r, request->sequence);
        const int32_t after = (int32_t)(other->descriptor.posted - request->announcement.descriptor.posted);
        first = after < first ? after : first;
        if (after > last) {
            last = after;
            record->last_rank = r;
        }
    }
    record->late = ((int64_t)last - first) * 256;
}

/* Prefetches the data of an announcement that has not arrived yet. The announcement's second line is prefetched at each look,
 * like its first. Separate payload lines are prefetched once: if a rank keeps requesting many lines, they travel back and forth
 * between the cores. */
static void expect_payload(struct shoal_engine *engine, struct shoal_request *request, int peer)
{
    if (!request->is_direct || request->bytes <= SHOAL_PAYLOAD_FIRST || !engine->ops->expect)
        return;
    const size_t bytes = shoal_engine_payload_bytes(engine, request, peer);
    if (bytes <= SHOAL_PAYLOAD_FIRST || (bytes > SHOAL_PAYLOAD_INLINE && request->next_expected > peer))
        return;
    request->next_expected = peer + 1;
    engine->ops->expect(engine->transport, peer, request->sequence, bytes);
}

/* Returns true when all announcements that the request needs have arrived and agree with it. */
static bool have_all_announced(struct shoal_engine *engine, struct shoal_request *request)
{
    for (; request->next_missing < engine->size; request->next_missing++) {
        const int r = request->next_missing;
        if (!is_needed(engine, request, r))
            continue;
        const struct shoal_announcement *other = engine->ops->announcement(engine->transport, r, request->sequence);
        if (!other) {
            expect_payload(engine, request, r);
            return false;
        }
        if (!shoal_engine_check_call(engine, request, r, other))
            return false; /* the engine may be broken now, and the request done */
    }
    if (request->needed == SHOAL_NEEDED_ALL) {
        if (!agree_up_to(engine, request->sequence - 1))
            return false;
        engine->intake.agreed_sequence = request->sequence;
    }
    note_last_rank(engine, request);
    return true;
}

/* Returns true if the request moved. It is done when the announcements of all its sources have arrived, round by round. */
static bool advance_rounds(struct shoal_engine *engine, struct shoal_request *request)
{
    const bool did = shoal_engine_advance_rounds(engine, request);
    if (engine->is_broken || request->round <= request->peer_set->rounds.count)
        return did;
    request->next_missing = engine->size;
    if (agree_up_to(engine, request->sequence - 1))
        engine->intake.agreed_sequence = request->sequence;
    if (engine->is_broken)
        return true;
    note_last_rank(engine, request);
    request->record->algorithm = request->in_rounds->name;
    request->record->done = request->record->arrived;
    request->state = SHOAL_REQUEST_DONE;
    return true;
}

/* Requests start in order: if one waits for a rank, so do those after it. The rounds of several requests overlap, though. */
static bool start_announced(struct shoal_engine *engine)
{
    bool did = false;
    for (struct shoal_request *request = engine->intake.active_head; request; request = request->next) {
        if (request->state != SHOAL_REQUEST_ANNOUNCED)
            continue;
        if (SHOAL_UNLIKELY(request->in_rounds != NULL)) {
            did |= advance_rounds(engine, request);
            if (engine->is_broken)
                return true;
            continue;
        }
        if (!have_all_announced(engine, request))
            return did || engine->is_broken;
        if (request->is_direct) {
            if (!shoal_runner_is_ready(engine, request, SHOAL_OUTPUT, 0, request->call.count))
                return did;
            did = true;
            shoal_runner_finish_direct(engine, request);
            request->state = SHOAL_REQUEST_DONE;
            continue;
        }
        did = true;
        const enum shoal_status status = shoal_runner_prepare(engine, request);
        if (status != SHOAL_OK) {
            shoal_engine_fail_request(engine, request, status);
            return true;
        }
        request->state = request->chunk_count ? SHOAL_REQUEST_RUNNING : SHOAL_REQUEST_DONE;
    }
    return did;
}

/* ---- The end of operations ----------------------------------------------------------------------------------------------- */

/* Operations whose calls have not been compared may accumulate, but not so far that peers wait for this rank. */
#define UNCOMPARED_MAX (SHOAL_PAYLOADS / 2)

static bool retire_done(struct shoal_engine *engine)
{
    bool did = false;
    while (engine->intake.active_head && engine->intake.active_head->state == SHOAL_REQUEST_DONE &&
           shoal_engine_is_flushed(engine) && /* no thread may make progress afterwards */
           shoal_runner_is_over(engine, engine->intake.active_head)) {
        struct shoal_request *request = engine->intake.active_head;
        engine->intake.active_head = request->next;
        if (engine->intake.start_next == request)
            engine->intake.start_next = request->next;
        SHOAL_ASSERT(engine->intake.active_count > 0);
        SHOAL_ASSERT((int64_t)(request->sequence - engine->intake.done_sequence) > 0); /* operations end in order */
        engine->intake.active_count--;
        engine->intake.done_sequence = request->sequence;
        acknowledge_done(engine);
        if (request->cached) {
            shoal_trial_learn(engine, request);
            shoal_engine_release_plan(request);
        }
        shoal_request_complete(request, SHOAL_OK);
        did = true;
    }
    if (SHOAL_UNLIKELY(engine->intake.done_sequence - engine->intake.acknowledged_sequence > UNCOMPARED_MAX)) {
        agree_up_to(engine, engine->intake.done_sequence);
        acknowledge_done(engine);
    }
    return did;
}

#define MESSAGES_EVERY 16

static bool progress_once(struct shoal_engine *engine)
{
    bool did = false;
    engine->awaits_operand = false;
    if (engine->intake.queue_head)
        did |= announce_queued(engine);
    if (engine->intake.active_head) {
        did |= SHOAL_UNLIKELY(engine->size == 1) ? progress_alone(engine) : start_announced(engine);
        if (!engine->is_broken && (shoal_runner_is_busy(engine) || engine->intake.start_next)) {
            did |= shoal_runner_run_chunks(engine);
            heed_failed_step(engine);
        }
        if (!engine->is_broken)
            did |= retire_done(engine);
    }
    /* Now and then also accepts messages that no receive waits for yet, because their senders may wait for room. */
    if (engine->message_count || (!did && ++engine->idle_turns % MESSAGES_EVERY == 0))
        did |= shoal_p2p_progress(engine);
    if (engine->intake.queue_head) /* posted by a callback, or held back until operations ended */
        did |= announce_queued(engine);
    return did;
}

/* ---- Progress ------------------------------------------------------------------------------------------------------------ */

bool shoal_engine_progress(struct shoal_engine *engine)
{
    if (SHOAL_UNLIKELY(engine->held != NULL))
        shoal_engine_look_at_held(engine);
    if (engine->is_broken || engine->is_in_progress)
        return false;
    engine->is_in_progress = true;
    const bool did = progress_once(engine);
    SHOAL_ASSERT(engine->is_broken || !shoal_runner_failed_step(engine));
    engine->is_in_progress = false;
    return did;
}
