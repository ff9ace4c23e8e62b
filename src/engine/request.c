/* The public functions on requests. Any thread. */
#include <stdlib.h>

#include "engine/engine_state.h"
#include "engine/progress.h"

/* Returns true for a request that was made by this process's parent and was not done: it will never be. */
static bool is_parents(struct shoal_request *request)
{
    return shoal_request_status(request) == SHOAL_PENDING && !shoal_progress_is_parent(request->progress);
}

enum shoal_status shoal_request_wait(struct shoal_request *request, uint32_t timeout_ms)
{
    if (!request)
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_status status = shoal_request_status(request);
    if (status != SHOAL_PENDING)
        return status;
    if (is_parents(request))
        return SHOAL_ERR_STATE;
    struct shoal_progress *progress = request->progress;
    const uint64_t until_ns = timeout_ms == SHOAL_FOREVER ? UINT64_MAX : shoal_clock_ns() + timeout_ms * UINT64_C(1000000);
    const uint64_t begin_ticks = shoal_clock_ticks();
    const enum shoal_status waited = shoal_progress_wait(progress, request, until_ns);
    shoal_waited_add(shoal_progress_waited(progress), begin_ticks);
    return waited;
}

enum shoal_status shoal_request_test(struct shoal_request *request)
{
    if (!request)
        return SHOAL_ERR_ARGUMENT;
    if (is_parents(request))
        return SHOAL_ERR_STATE;
    if (shoal_request_status(request) == SHOAL_PENDING)
        shoal_progress_poll(request->progress);
    return shoal_request_status(request);
}

void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg)
{
    if (!request || !fn || is_parents(request))
        return;
    struct shoal_progress *progress = request->progress;
    if (shoal_request_status(request) == SHOAL_PENDING) {
        shoal_progress_lock(progress);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        if (is_pending) {
            request->done_fn = fn;
            request->done_arg = arg;
        }
        shoal_progress_unlock(progress);
        if (is_pending)
            return;
    }
    fn(arg, shoal_request_status(request));
}

void shoal_request_free(struct shoal_request *request)
{
    if (!request || is_parents(request))
        return;
    if (shoal_request_status(request) == SHOAL_PENDING) {
        struct shoal_progress *progress = request->progress;
        shoal_progress_lock(progress);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        request->is_detached = is_pending;
        shoal_progress_unlock(progress);
        if (is_pending)
            return;
    }
    free(request);
}
