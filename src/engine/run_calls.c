/* Calls from other modules: posts them and waits for their end. */
#include <stdlib.h>

#include "engine/engine_state.h"
#include "engine/progress.h"

/* The caller holds the lock. */
static enum shoal_status post_calls(struct shoal_engine *engine, const struct shoal_call *calls, size_t count,
                                    struct shoal_request *request)
{
    if (SHOAL_UNLIKELY(count != 1))
        SHOAL_TRY(shoal_engine_post_group(engine, calls, count, request));
    else
        shoal_engine_post(engine, calls, request);
    if (count && calls->timeout_ms)
        shoal_progress_check_by(engine->progress, request->deadline_ns);
    return SHOAL_OK;
}

enum shoal_status shoal_engine_run(struct shoal_engine *engine, const struct shoal_call *calls, size_t count)
{
    struct shoal_progress *progress = engine->progress;
    struct shoal_request request;
    request.is_detached = false;
    request.is_blocking = count == 1; /* messages of a group overlap, so the group is measured as a whole */
    request.done_fn = NULL;
    request.done_arg = NULL;
    request.whole = NULL;
    shoal_progress_lock(progress);
    const enum shoal_status status = post_calls(engine, calls, count, &request);
    if (SHOAL_LIKELY(status == SHOAL_OK))
        shoal_progress_spin(progress, engine, &request);
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
    if (status != SHOAL_OK)
        return shoal_call_drop(calls, count, status);
    const enum shoal_status done = shoal_progress_wait(progress, &request, UINT64_MAX);
    if (count != 1)
        shoal_waited_add(shoal_progress_waited(progress), request.posted_ticks); /* the engine may be gone */
    return done;
}

enum shoal_status shoal_engine_start(struct shoal_engine *engine, const struct shoal_call *calls, size_t count,
                                     uint32_t wait_ms, struct shoal_request **request_out)
{
    struct shoal_progress *progress = engine->progress;
    const enum shoal_status started = shoal_progress_start_thread(progress);
    if (started != SHOAL_OK)
        return started;
    struct shoal_request *request = calloc(1, sizeof *request);
    if (!request)
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for a request");
    shoal_progress_lock(progress);
    const enum shoal_status status = post_calls(engine, calls, count, request);
    if (status == SHOAL_OK && wait_ms)
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
    if (!wait_ms || shoal_request_wait(request, wait_ms) == SHOAL_PENDING)
        shoal_progress_wake_thread(progress);
    return SHOAL_OK;
}
