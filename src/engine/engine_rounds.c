/* Direct operations over several hosts whose data travel in rounds (collective/rounds.h). Sums and parts accumulate in the
 * place of the result, so the data that a round sends are already there. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "engine/engine_state.h"

/* ---- Peers of a request -------------------------------------------------------------------------------------------------- */

static bool allocate_scratch(struct shoal_engine *engine)
{
    if (!engine->rounds_scratch)
        engine->rounds_scratch = malloc(SHOAL_PAYLOAD_MAX);
    return engine->rounds_scratch;
}

static void mark_peer_set(struct shoal_engine *engine, struct shoal_peer_set *peer_set)
{
    const struct shoal_rounds *rounds = &peer_set->rounds;
    shoal_rounds_find_peers(rounds, peer_set->is_member);
    for (int i = 0; i < rounds->local.count; i++)
        peer_set->is_member[rounds->local.at[i]] = peer_set->is_source[rounds->local.at[i]] = 1;
    for (int i = 0; i < rounds->count; i++) {
        if (rounds->rounds[i].from >= 0)
            peer_set->is_source[rounds->rounds[i].from] = 1;
    }
    peer_set->is_source[engine->rank] = 1;
}

enum shoal_status shoal_engine_prepare_rounds(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_view view = {.size = engine->size, .host = engine->transport->host};
    if (shoal_engine_find_peer_set(engine, request->in_rounds, 0, request))
        return SHOAL_OK;
    struct shoal_peer_set *peer_set = shoal_engine_make_peer_set(engine, request->in_rounds, 0);
    if (!peer_set || !allocate_scratch(engine) || !shoal_rounds_init(&peer_set->rounds, &view, engine->rank)) {
        free(peer_set);
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for the rounds of %d ranks", engine->size);
    }
    mark_peer_set(engine, peer_set);
    if (!shoal_engine_keep_peer_set(engine, peer_set, request))
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for the rounds of %d ranks", engine->size);
    return SHOAL_OK;
}

/* Returns the memory in which sums and parts accumulate. */
static void *result_of(const struct shoal_request *request)
{
    return shoal_call_contiguous(&request->call, SHOAL_OUTPUT);
}

static size_t part_bytes(const struct shoal_request *request)
{
    return request->call.count * request->element_bytes;
}

/* ---- Sums ---------------------------------------------------------------------------------------------------------------- */

static void rounds_reduce(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_pass pass, int count)
{
    void *const sum = result_of(request);
    const struct shoal_reduction operation = shoal_engine_pass(engine, &request->call, pass);
    engine->kernels->reduce[request->call.type][operation.op](&sum, 1, engine->scratch.sources, count, request->call.count,
                                                              operation.argument, SHOAL_STORES_CACHED);
}

static void sum_local(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_ranks *local = &request->peer_set->rounds.local;
    for (int i = 0; i < local->count; i++)
        engine->scratch.sources[i] = shoal_runner_contribution_of(engine, request, local->at[i]);
    rounds_reduce(engine, request, SHOAL_PASS_FIRST, local->count);
}

static void rounds_add(struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_rounds_step *round,
                       const void *came)
{
    void *const sum = result_of(request);
    if (round->is_result) {
        memcpy(sum, came, request->bytes);
        return;
    }
    engine->scratch.sources[round->is_own_first ? 0 : 1] = sum;
    engine->scratch.sources[round->is_own_first ? 1 : 0] = came;
    rounds_reduce(engine, request, round->is_last_sum ? SHOAL_PASS_LAST : SHOAL_PASS_MIDDLE, 2);
}

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

static void rounds_put_part(const struct shoal_request *request, int part, const char *data)
{
    const size_t bytes = part_bytes(request);
    char *const to = (char *)result_of(request) + (size_t)part * bytes;
    if (to != data) /* in place otherwise */
        memcpy(to, data, bytes);
}

static void gather_local(struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_ranks *local = &request->peer_set->rounds.local;
    for (int i = 0; i < local->count; i++)
        rounds_put_part(request, local->at[i], shoal_runner_contribution_of(engine, request, local->at[i]));
}

static const void *collect_parts(struct shoal_engine *engine, const struct shoal_request *request, struct shoal_ranks parts)
{
    const size_t bytes = part_bytes(request);
    const char *from = result_of(request);
    SHOAL_ASSERT((size_t)parts.count * bytes <= SHOAL_PAYLOAD_MAX); /* the scratch memory has room */
    for (int i = 0; i < parts.count; i++)
        memcpy(engine->rounds_scratch + (size_t)i * bytes, from + parts.at[i] * bytes, bytes);
    return engine->rounds_scratch;
}

static void put_parts(const struct shoal_request *request, struct shoal_ranks parts, const char *data)
{
    for (int i = 0; i < parts.count; i++)
        rounds_put_part(request, parts.at[i], data + (size_t)i * part_bytes(request));
}

/* ---- Rounds -------------------------------------------------------------------------------------------------------------- */

/* Returns the payload bytes of an announcement to or from a host that has those parts. */
static size_t rounds_bytes_of(const struct shoal_request *request, struct shoal_ranks held)
{
    return request->shape->is_output_partitioned ? (size_t)held.count * part_bytes(request) : request->bytes;
}

static void send_held(struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_rounds_step *round)
{
    const size_t bytes = rounds_bytes_of(request, round->held);
    const void *data = NULL;
    if (bytes && round->to.count)
        data = request->shape->is_output_partitioned ? collect_parts(engine, request, round->held) : result_of(request);
    for (int i = 0; i < round->to.count; i++)
        engine->ops->announce_to(engine->transport, round->to.at[i], &request->announcement, data, bytes);
    engine->must_flush |= round->to.count > 0;
}

static void rounds_take(struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_rounds_step *round)
{
    SHOAL_ASSERT(round->from >= 0 && round->from != engine->rank);
    const size_t bytes = rounds_bytes_of(request, round->came);
    if (!bytes)
        return;
    const void *came = engine->ops->payload(engine->transport, round->from, request->sequence, bytes);
    if (request->shape->is_output_partitioned)
        put_parts(request, round->came, came);
    else
        rounds_add(engine, request, round, came);
}

/* Returns false if the announcement has not arrived, or if it differs and the engine is broken. */
static bool has_come(struct shoal_engine *engine, struct shoal_request *request, int rank)
{
    request->next_missing = rank;
    if (rank == engine->rank)
        return true;
    const struct shoal_announcement *other = engine->ops->announcement(engine->transport, rank, request->sequence);
    return other && shoal_engine_check_call(engine, request, rank, other);
}

static bool begin_local(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_ranks *local = &request->peer_set->rounds.local;
    for (int i = 0; i < local->count; i++) {
        if (!has_come(engine, request, local->at[i]))
            return false;
    }
    if (!request->bytes)
        return true;
    if (request->shape->is_output_partitioned)
        gather_local(engine, request);
    else
        sum_local(engine, request);
    return true;
}

static bool end_round(struct shoal_engine *engine, struct shoal_request *request, const struct shoal_rounds_step *round)
{
    if (!request->has_sent)
        send_held(engine, request, round);
    request->has_sent = true;
    if (round->from < 0)
        return true;
    if (!has_come(engine, request, round->from))
        return false;
    rounds_take(engine, request, round);
    return true;
}

/* Copies the result to an output that is not plain memory. */
static void give_result(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    const int parts = request->shape->is_output_partitioned ? engine->size : 1;
    for (int part = 0; part < parts && result_of(request) != call->output && request->bytes; part++)
        shoal_call_unpack(call, engine->rank, request->element_bytes, part, call->count,
                          (const char *)result_of(request) + (size_t)part * part_bytes(request));
}

bool shoal_engine_advance_rounds(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_rounds *rounds = &request->peer_set->rounds;
    bool did = false;
    SHOAL_ASSERT(request->round >= -1 && request->round <= rounds->count + 1);
    for (; request->round < rounds->count; request->round++) {
        const bool is_over =
            request->round < 0 ? begin_local(engine, request) : end_round(engine, request, &rounds->rounds[request->round]);
        if (!is_over)
            return did;
        request->has_sent = false;
        did = true;
    }
    if (request->round > rounds->count || !shoal_runner_is_ready(engine, request, SHOAL_OUTPUT, 0, request->call.count))
        return did;
    give_result(engine, request);
    shoal_operand_release(shoal_call_operand(&request->call, SHOAL_OUTPUT), 0, request->call.count);
    request->round++;
    return true;
}
