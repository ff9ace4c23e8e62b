/* Streams: created ones, the legacy one of each context, and one per context and thread. */
#include <stdlib.h>

#include "mock_driver.h"

static struct mock_stream *streams;
static struct mock_stream *dead; /* a thread may still wait for one */
static _Thread_local int capture_mode = SHOAL_CU_CAPTURE_MODE_GLOBAL;

/* ---- Finding ------------------------------------------------------------------------------------------------------------- */

struct mock_stream *mock_stream_next(struct mock_stream *stream)
{
    return stream ? stream->next : streams;
}

static struct mock_stream *add_stream(struct mock_context *context)
{
    struct mock_stream *stream = mock_allocate_zeroed(sizeof *stream);
    stream->context = context;
    stream->queue = mock_queue_for(context->device);
    stream->is_blocking = true;
    stream->next = streams;
    streams = stream;
    return stream;
}

static struct mock_stream *find_special(struct mock_context *context, bool is_legacy)
{
    struct mock_stream *stream = NULL;
    while ((stream = mock_stream_next(stream))) {
        const bool is_ours = stream->is_per_thread && pthread_equal(stream->thread, pthread_self());
        if (stream->context == context && (is_legacy ? stream->is_legacy : is_ours))
            return stream;
    }
    stream = add_stream(context);
    stream->is_legacy = is_legacy;
    stream->is_per_thread = !is_legacy;
    stream->thread = pthread_self();
    return stream;
}

struct mock_stream *mock_stream_find(const struct mock_call *call, shoal_cu_stream stream)
{
    if (!stream || stream == SHOAL_CU_STREAM_LEGACY || stream == SHOAL_CU_STREAM_PER_THREAD)
        return call->context ? find_special(call->context, stream != SHOAL_CU_STREAM_PER_THREAD) : NULL;
    return mock_handle_find(MOCK_STREAM, (uintptr_t)stream);
}

/* ---- Capturing ----------------------------------------------------------------------------------------------------------- */

bool mock_is_capturing(const struct mock_context *context)
{
    struct mock_stream *stream = NULL;
    while ((stream = mock_stream_next(stream)))
        if (stream->context == context && stream->is_blocking && stream->capture == SHOAL_CU_CAPTURE_ACTIVE)
            return true;
    return false;
}

bool mock_capture_forbids(void)
{
    struct mock_stream *stream = NULL;
    bool is_forbidden = false;
    while (capture_mode != SHOAL_CU_CAPTURE_MODE_RELAXED && (stream = mock_stream_next(stream))) {
        if (stream->capture != SHOAL_CU_CAPTURE_ACTIVE)
            continue;
        stream->capture = SHOAL_CU_CAPTURE_INVALIDATED;
        is_forbidden = true;
    }
    return is_forbidden;
}

MOCK_API void mock_cuda_capture(shoal_cu_stream handle, int status)
{
    pthread_mutex_lock(&mock.lock);
    struct mock_stream *stream = mock_handle_find(MOCK_STREAM, (uintptr_t)handle);
    if (stream)
        stream->capture = status;
    else
        mock_fault("mock_cuda_capture was given no stream");
    pthread_mutex_unlock(&mock.lock);
}

shoal_cu_result mock_capture_mode(int *mode)
{
    ENTER("cuThreadExchangeStreamCaptureMode", 0);
    if (*mode < SHOAL_CU_CAPTURE_MODE_GLOBAL || *mode > SHOAL_CU_CAPTURE_MODE_RELAXED)
        return SHOAL_CU_INVALID_VALUE;
    const int old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_stream_is_capturing(shoal_cu_stream handle, int *status)
{
    ENTER("cuStreamIsCapturing", MOCK_CURRENT);
    const struct mock_stream *stream = mock_stream_find(&call, handle);
    if (!stream)
        return SHOAL_CU_INVALID_HANDLE;
    if (stream->is_legacy && mock_is_capturing(stream->context))
        return SHOAL_CU_STREAM_CAPTURE_IMPLICIT;
    *status = stream->capture;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_stream_for_work(const struct mock_call *call, shoal_cu_stream handle, struct mock_stream **stream_out)
{
    struct mock_stream *stream = mock_stream_find(call, handle);
    if (!stream)
        return SHOAL_CU_INVALID_HANDLE;
    if (stream->is_legacy && mock_is_capturing(stream->context))
        return SHOAL_CU_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture != SHOAL_CU_CAPTURE_NONE) {
        mock_fault("work was put on a stream that is being captured");
        return SHOAL_CU_STREAM_CAPTURE_UNSUPPORTED;
    }
    *stream_out = stream;
    return stream->context->sticky;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static shoal_cu_result create(const struct mock_call *call, shoal_cu_stream *handle, unsigned flags)
{
    if (flags > SHOAL_CU_STREAM_NON_BLOCKING)
        return SHOAL_CU_INVALID_VALUE;
    mock_wait_idle(call);
    if (call->context->sticky)
        return call->context->sticky;
    struct mock_stream *stream = add_stream(call->context);
    stream->is_blocking = flags == SHOAL_CU_STREAM_DEFAULT;
    stream->handle = (shoal_cu_stream)mock_handle_make(MOCK_STREAM, stream);
    *handle = stream->handle;
    return SHOAL_CU_SUCCESS;
}

/* Priorities are clamped to the valid range. */
shoal_cu_result mock_stream_create(shoal_cu_stream *stream, unsigned flags, int priority)
{
    ENTER("cuStreamCreateWithPriority", MOCK_CURRENT | MOCK_UNSAFE);
    (void)priority;
    return create(&call, stream, flags);
}

shoal_cu_result mock_stream_create_plain(shoal_cu_stream *stream, unsigned flags)
{
    ENTER("cuStreamCreate", MOCK_CURRENT | MOCK_UNSAFE);
    return create(&call, stream, flags);
}

static void end_stream(struct mock_stream *stream)
{
    struct mock_stream **link = &streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    mock_queue_leave(stream->queue);
    stream->queue = NULL;
    stream->next = dead;
    dead = stream;
}

void mock_stream_step(struct mock_stream *stream)
{
    stream->pending--;
    if (stream->is_destroyed && stream->pending == 0)
        end_stream(stream);
}

/* The stream's work continues. */
shoal_cu_result mock_stream_destroy(shoal_cu_stream handle)
{
    ENTER("cuStreamDestroy", MOCK_CURRENT);
    struct mock_stream *stream = mock_handle_find(MOCK_STREAM, (uintptr_t)handle);
    if (!stream)
        return SHOAL_CU_INVALID_HANDLE;
    mock_handle_drop((uintptr_t)handle);
    stream->is_destroyed = true;
    if (stream->pending == 0)
        end_stream(stream);
    return SHOAL_CU_SUCCESS;
}

void mock_streams_forget(const struct mock_context *context)
{
    struct mock_stream *stream = streams;
    while (stream) {
        struct mock_stream *next = stream->next;
        if (stream->context == context) {
            mock_handle_drop((uintptr_t)stream->handle);
            end_stream(stream);
        }
        stream = next;
    }
    while (!context && (stream = dead)) {
        dead = stream->next;
        free(stream);
    }
}

/* ---- Queries and waits --------------------------------------------------------------------------------------------------- */

shoal_cu_result mock_stream_context(shoal_cu_stream handle, shoal_cu_context *context)
{
    ENTER("cuStreamGetCtx", handle && (uintptr_t)handle > 2 ? 0 : MOCK_CURRENT);
    const struct mock_stream *stream = mock_stream_find(&call, handle);
    if (!stream)
        return SHOAL_CU_INVALID_HANDLE;
    *context = stream->context->handle;
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result check_asked(const struct mock_call *call, shoal_cu_stream handle, const struct mock_stream **stream_out)
{
    struct mock_stream *stream = mock_stream_find(call, handle);
    if (!stream)
        return SHOAL_CU_INVALID_HANDLE;
    if (stream->capture != SHOAL_CU_CAPTURE_NONE) {
        stream->capture = SHOAL_CU_CAPTURE_INVALIDATED;
        return SHOAL_CU_STREAM_CAPTURE_UNSUPPORTED;
    }
    *stream_out = stream;
    return stream->context->sticky;
}

shoal_cu_result mock_stream_query(shoal_cu_stream handle)
{
    ENTER("cuStreamQuery", MOCK_CURRENT | MOCK_UNSAFE);
    const struct mock_stream *stream;
    MOCK_TRY(check_asked(&call, handle, &stream));
    return stream->pending ? SHOAL_CU_NOT_READY : SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_wait_stream(const struct mock_stream *stream)
{
    while (stream->pending && !stream->context->sticky)
        pthread_cond_wait(&mock.changed, &mock.lock);
    return stream->context->sticky;
}

shoal_cu_result mock_stream_synchronize(shoal_cu_stream handle)
{
    ENTER("cuStreamSynchronize", MOCK_CURRENT | MOCK_UNSAFE);
    const struct mock_stream *stream;
    MOCK_TRY(check_asked(&call, handle, &stream));
    return mock_wait_stream(stream);
}
