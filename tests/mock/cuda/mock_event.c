/* Events. Each record makes a new mark in its stream; a wait is for the mark that was the last one at that time. */
#include <stdlib.h>

#include "mock_driver.h"

#define KNOWN_FLAGS 7u

struct mock_event {
    shoal_cu_event handle;
    struct mock_context *context;
    struct mock_mark *mark; /* the last one; NULL: never recorded */
};

/* ---- Marks --------------------------------------------------------------------------------------------------------------- */

struct mock_mark *mock_mark_hold(struct mock_mark *mark)
{
    mark->holders++;
    return mark;
}

void mock_mark_drop(struct mock_mark *mark)
{
    if (mark && --mark->holders == 0)
        free(mark);
}

void mock_mark_reach(struct mock_mark *mark)
{
    mark->is_reached = true;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static struct mock_event *find_event(shoal_cu_event handle)
{
    return mock_handle_find(MOCK_EVENT, (uintptr_t)handle);
}

shoal_cu_result mock_event_create(shoal_cu_event *handle, unsigned flags)
{
    ENTER("cuEventCreate", MOCK_CURRENT);
    if (flags & ~KNOWN_FLAGS)
        return SHOAL_CU_INVALID_VALUE;
    struct mock_event *event = mock_allocate_zeroed(sizeof *event);
    event->context = call.context;
    event->handle = (shoal_cu_event)mock_handle_make(MOCK_EVENT, event);
    *handle = event->handle;
    return SHOAL_CU_SUCCESS;
}

static void end_event(struct mock_event *event)
{
    mock_handle_drop((uintptr_t)event->handle);
    mock_mark_drop(event->mark);
    free(event);
}

/* A stream that waits for the event continues to wait for its mark. */
shoal_cu_result mock_event_destroy(shoal_cu_event handle)
{
    ENTER("cuEventDestroy", MOCK_CURRENT);
    struct mock_event *event = find_event(handle);
    if (!event)
        return SHOAL_CU_INVALID_HANDLE;
    end_event(event);
    return SHOAL_CU_SUCCESS;
}

void mock_events_forget(const struct mock_context *context)
{
    size_t at = 0;
    struct mock_event *event;
    while ((event = mock_handle_next(MOCK_EVENT, &at)))
        if (event->context == context)
            end_event(event);
}

/* ---- Recording and waiting ----------------------------------------------------------------------------------------------- */

static void set_mark(struct mock_event *event)
{
    mock_mark_drop(event->mark);
    event->mark = mock_mark_hold(mock_allocate_zeroed(sizeof *event->mark));
}

shoal_cu_result mock_event_record(shoal_cu_event event_handle, shoal_cu_stream stream_handle)
{
    ENTER("cuEventRecord", MOCK_CURRENT);
    struct mock_event *event = find_event(event_handle);
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(&call, stream_handle, &stream));
    if (!event || event->context != stream->context)
        return SHOAL_CU_INVALID_HANDLE;
    set_mark(event);
    struct mock_op *op = mock_op_make(MOCK_RECORD, NULL, NULL);
    op->mark = mock_mark_hold(event->mark);
    mock_post(stream, op);
    return SHOAL_CU_SUCCESS;
}

/* A wait for an event that was never recorded ends at once. */
shoal_cu_result mock_stream_wait_event(shoal_cu_stream stream_handle, shoal_cu_event event_handle, unsigned flags)
{
    ENTER("cuStreamWaitEvent", MOCK_CURRENT);
    const struct mock_event *event = find_event(event_handle);
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(&call, stream_handle, &stream));
    if (!event)
        return SHOAL_CU_INVALID_HANDLE;
    if (flags)
        return SHOAL_CU_INVALID_VALUE;
    if (!event->mark)
        return SHOAL_CU_SUCCESS;
    struct mock_op *op = mock_op_make(MOCK_WAIT_MARK, NULL, NULL);
    op->mark = mock_mark_hold(event->mark);
    mock_post(stream, op);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_event_query(shoal_cu_event handle)
{
    ENTER("cuEventQuery", MOCK_CURRENT | MOCK_UNSAFE);
    const struct mock_event *event = find_event(handle);
    if (!event)
        return SHOAL_CU_INVALID_HANDLE;
    if (event->context->sticky)
        return event->context->sticky;
    return !event->mark || event->mark->is_reached ? SHOAL_CU_SUCCESS : SHOAL_CU_NOT_READY;
}

shoal_cu_result mock_event_synchronize(shoal_cu_event handle)
{
    ENTER("cuEventSynchronize", MOCK_CURRENT | MOCK_UNSAFE);
    const struct mock_event *event = find_event(handle);
    if (!event)
        return SHOAL_CU_INVALID_HANDLE;
    const struct mock_context *context = event->context; /* the event may be destroyed meanwhile */
    struct mock_mark *mark = event->mark ? mock_mark_hold(event->mark) : NULL;
    while (mark && !mark->is_reached && !context->sticky)
        pthread_cond_wait(&mock.changed, &mock.lock);
    mock_mark_drop(mark);
    return context->sticky;
}
