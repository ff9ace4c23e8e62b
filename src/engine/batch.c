/* Calls from other modules: posts them and waits for their end. */
#include <stdlib.h>

#include "engine/engine_state.h"
#include "engine/progress.h"

/* The caller holds the lock. */
static enum shoal_status post_batch(struct shoal_engine *engine, const struct shoal_batch *batch, struct shoal_request *request)
{
    if (batch->is_group)
        SHOAL_TRY(shoal_engine_post_group(engine, batch->calls, batch->count, request));
    else
        shoal_engine_post(engine, batch->calls, request);
    if (batch->calls->timeout_ms)
        shoal_progress_check_by(engine->progress, request->deadline_ns);
    return SHOAL_OK;
}

/* Frees the layouts of a batch that was not posted. */
static enum shoal_status drop_batch(const struct shoal_batch *batch, enum shoal_status status)
{
    for (size_t i = 0; i < batch->count; i++)
        shoal_layout_free(batch->calls[i].layout);
    return status;
}

enum shoal_status shoal_engine_run(struct shoal_engine *engine, const struct shoal_batch *batch)
{
    struct shoal_progress *progress = engine->progress;
    struct shoal_request request;
    request.is_detached = false;
    request.is_blocking = !batch->is_group; /* messages of a group overlap, so the group is measured as a whole */
    request.done_fn = NULL;
    request.done_arg = NULL;
    request.whole = NULL;
    shoal_progress_lock(progress);
    const enum shoal_status status = post_batch(engine, batch, &request);
    if (SHOAL_LIKELY(status == SHOAL_OK))
        shoal_progress_spin(progress, engine, &request);
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
    if (status != SHOAL_OK)
        return drop_batch(batch, status);
    const enum shoal_status done = shoal_progress_wait(progress, &request, UINT64_MAX);
    if (batch->is_group)
        shoal_waited_add(shoal_progress_waited(progress), request.posted_ticks); /* the engine may be gone */
    return done;
}

enum shoal_status shoal_engine_start(struct shoal_engine *engine, const struct shoal_batch *batch,
                                     struct shoal_request **request_out)
{
    struct shoal_progress *progress = engine->progress;
    const enum shoal_status started = shoal_progress_start_thread(progress);
    if (started != SHOAL_OK)
        return started;
    struct shoal_request *request = calloc(1, sizeof *request);
    if (!request)
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a request");
    shoal_progress_lock(progress);
    const enum shoal_status status = post_batch(engine, batch, request);
    if (status == SHOAL_OK && batch->wait_ms)
        shoal_progress_spin(progress, engine, request);
    else if (status == SHOAL_OK)
        shoal_progress_begin(progress, engine);
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
    if (status != SHOAL_OK) {
        free(request);
        return status;
    }
    *request_out = request;
    if (!batch->wait_ms || shoal_request_wait(request, batch->wait_ms) == SHOAL_PENDING)
        shoal_progress_wake_thread(progress);
    return SHOAL_OK;
}
