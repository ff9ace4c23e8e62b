/* The end of a request: its flight record, the sums that other processes read, its callback. */
#include <stdlib.h>

#include "base/assert.h"
#include "engine/engine_state.h"

void shoal_engine_withdraw_wait(struct shoal_engine *engine)
{
    if (!engine->is_wait_said || engine->is_broken)
        return;
    engine->ops->say_waits_for(engine->transport, shoal_intake_done(engine) + 1, -1);
    shoal_recorder_note_wait(&engine->recorder, -1, 0);
    engine->is_wait_said = false;
}

static void completion_note_sent(struct shoal_engine *engine)
{
    struct shoal_traffic traffic = {.sent_bytes = 0};
    engine->ops->traffic(engine->transport, &traffic);
    shoal_recorder_note_sent(&engine->recorder, traffic.sent_bytes);
}

/* Publishes sums for other processes: how long the program waited, and what was sent. A request that lost its record uses the
 * spare one, which may still hold the end of an earlier request: `ticks` is then negative, and is not counted. */
static inline void note_sums(struct shoal_engine *engine, const struct shoal_request *request, uint64_t done_ticks)
{
    struct shoal_waited *waited = engine->waited;
    if (SHOAL_UNLIKELY(!waited))
        return;
    const int64_t ticks = (int64_t)(done_ticks - request->posted_ticks);
    waited->in_calls += request->is_blocking && ticks > 0 ? (uint64_t)ticks : 0;
    shoal_recorder_note_waited(&engine->recorder,
                               waited->in_calls + atomic_load_explicit(&waited->without_lock, memory_order_relaxed));
    if (SHOAL_UNLIKELY(engine->ops->traffic != NULL)) /* not within one host */
        completion_note_sent(engine);
}

static inline void note_end(struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_record *record)
{
    engine->last = record;
    shoal_recorder_count(&engine->recorder, request->bytes, record->last_rank == engine->rank, record->late);
    note_sums(engine, request, record->done);
    if (SHOAL_UNLIKELY(engine->is_wait_said))
        shoal_engine_withdraw_wait(engine);
}

void shoal_request_complete(struct shoal_request *request, enum shoal_status status)
{
    SHOAL_ASSERT(status != SHOAL_PENDING && shoal_request_status(request) == SHOAL_PENDING); /* it ends once */
    const bool is_detached = request->is_detached;
    const shoal_done_fn fn = request->done_fn;
    void *arg = request->done_arg;
    struct shoal_record *record = request->record;
    if (record) {
        if (!record->done)
            record->done = shoal_clock_ticks();
        record->status = (uint8_t)status;
        record->step = -1;
        if (request->engine)
            note_end(request->engine, request, record);
        record->owner = NULL;
        request->record = NULL;
    }
    if (SHOAL_UNLIKELY(request->call.layout != NULL)) {
        shoal_layout_free(request->call.layout);
        request->call.layout = NULL;
    }
    request->state = SHOAL_REQUEST_DONE;
    request->engine = NULL;
    /* release: a thread that reads the status sees the outputs. After this store a request on a stack may be gone. */
    atomic_store_explicit(&request->status, (int)status, memory_order_release);
    if (fn)
        fn(arg, status);
    if (is_detached)
        free(request);
}
