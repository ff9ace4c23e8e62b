#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"

struct shoal_breakage {
    struct shoal_failure failure;
    shoal_location exposed[2 * SHOAL_ACTIVE_MAX]; /* operands that peers could reach when the engine broke */
    size_t exposed_count;
};

size_t shoal_breakage_bytes(void)
{
    return sizeof(struct shoal_breakage);
}

struct shoal_breakage *shoal_breakage_create(void)
{
    return calloc(1, sizeof(struct shoal_breakage));
}

void shoal_breakage_destroy(struct shoal_breakage *breakage)
{
    free(breakage);
}

const struct shoal_failure *shoal_engine_failure(const struct shoal_engine *engine)
{
    return engine->is_broken ? &engine->breakage->failure : NULL;
}

const shoal_location *shoal_engine_exposed(const struct shoal_engine *engine, size_t *count_out)
{
    *count_out = engine->breakage->exposed_count;
    return engine->breakage->exposed;
}

/* ---- Composing ----------------------------------------------------------------------------------------------------------- */

uint64_t shoal_engine_waited_ms(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const uint64_t timeout_ms = request->call.timeout_ms ? request->call.timeout_ms : engine->timeout_ms;
    const uint64_t posted_ns = request->deadline_ns - timeout_ms * SHOAL_NS_PER_MS;
    return (shoal_engine_now_ns(engine) - posted_ns) / SHOAL_NS_PER_MS;
}

void shoal_engine_begin_failure(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                int rank, struct shoal_failure *failure)
{
    SHOAL_ASSERT(rank < engine->size && status != SHOAL_OK && status != SHOAL_PENDING);
    memset(failure, 0, sizeof *failure);
    failure->struct_bytes = sizeof *failure;
    failure->status = status;
    failure->rank = rank;
    failure->reporter = engine->rank;
    failure->step = -1;
    if (rank >= 0) {
        struct shoal_transport_peer name;
        engine->ops->peer_name(engine->transport, rank, &name);
        failure->pid = name.pid;
        snprintf(failure->host, sizeof failure->host, "%s", name.host);
    }
    if (request) {
        int peer;
        shoal_engine_print_request(request, failure->operation, sizeof failure->operation);
        shoal_runner_find_step(engine, request, &failure->step, &peer);
        failure->sequence = request->sequence;
        failure->waited_ms = shoal_engine_waited_ms(engine, request);
        if (request->record) {
            request->record->step = failure->step;
            request->record->peer = peer;
        }
    }
}

/* ---- Breaking ------------------------------------------------------------------------------------------------------------ */

/* Peers that stopped in the middle may later resume writing there: shoal_comm_free() handles this. */
static void note_exposed(struct shoal_engine *engine)
{
    for (const struct shoal_request *request = shoal_intake_first_announced(engine); request; request = request->next) {
        if (request->state == SHOAL_REQUEST_QUEUED || request->is_direct)
            continue;
        SHOAL_ASSERT(engine->breakage->exposed_count + 2 <= SHOAL_COUNT_OF(engine->breakage->exposed));
        if (request->announcement.output)
            engine->breakage->exposed[engine->breakage->exposed_count++] = request->announcement.output;
        if (request->announcement.input && request->announcement.input != request->announcement.output)
            engine->breakage->exposed[engine->breakage->exposed_count++] = request->announcement.input;
    }
}

static void break_with(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    SHOAL_ASSERT(!engine->is_broken); /* there is one first cause */
    note_exposed(engine);
    engine->breakage->failure = *failure;
    engine->is_broken = true;
    engine->on_break(engine);
    SHOAL_ASSERT(!shoal_intake_first(engine) && !engine->message_count && !shoal_runner_is_busy(engine));
}

void shoal_engine_fail(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    SHOAL_ASSERT(failure->status != SHOAL_OK && failure->reporter == engine->rank);
    struct shoal_failure first;
    if (engine->is_broken)
        return;
    engine->ops->fail(engine->transport, failure);
    break_with(engine, engine->ops->failed(engine->transport, &first) ? &first : failure);
}

void shoal_engine_fail_by_last_error(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                     int rank)
{
    struct shoal_failure failure;
    shoal_engine_begin_failure(engine, request, status, rank, &failure);
    shoal_log_last_error(engine->log, failure.text, sizeof failure.text);
    shoal_engine_fail(engine, &failure);
}

bool shoal_engine_heed_failure(struct shoal_engine *engine)
{
    struct shoal_failure first;
    if (engine->is_broken || !engine->ops->failed(engine->transport, &first))
        return false;
    break_with(engine, &first);
    return true;
}
