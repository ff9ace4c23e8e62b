#include "device/cuda/cuda_scope.h"

#include <stdio.h>

enum shoal_status shoal_cuda_scope_fail(const struct shoal_cuda_scope *scope, const char *call, shoal_cu_result result,
                                        const char *doing)
{
    char text[256];
    snprintf(text, sizeof text, "%s (device %d)", doing, scope->device);
    return shoal_cuda_fail(scope->gpu->log, &scope->gpu->calls, call, result, text);
}

/* ---- Entering and leaving ------------------------------------------------------------------------------------------------ */

enum shoal_status shoal_cuda_scope_fail_entering(const struct shoal_cuda_scope *scope, shoal_cu_result result)
{
    return shoal_cuda_scope_fail(scope, "cuCtxPushCurrent", result, "entering a context");
}

enum shoal_status shoal_cuda_scope_enter(const struct shoal_cuda_scope *scope)
{
    const shoal_cu_result result = scope->gpu->calls.context_push(scope->context);
    return result == SHOAL_CU_SUCCESS ? SHOAL_OK : shoal_cuda_scope_fail_entering(scope, result);
}

void shoal_cuda_scope_exit(const struct shoal_cuda_scope *scope)
{
    shoal_cu_context popped;
    (void)scope->gpu->calls.context_pop(&popped);
}

bool shoal_cuda_scope_is_gone(shoal_cu_result entered)
{
    return entered == SHOAL_CU_INVALID_CONTEXT || entered == SHOAL_CU_CONTEXT_IS_DESTROYED || entered == SHOAL_CU_DEINITIALIZED;
}

/* ---- Inside -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_cuda_scope_register(const struct shoal_cuda_scope *scope, void *memory, size_t bytes,
                                            bool *is_registered_out, shoal_cu_address *address_out)
{
    char doing[200];
    snprintf(
        doing, sizeof doing,
        "registering %zu bytes of host memory with the driver (a smaller SHOAL_GPU_UNIT_BYTES needs less; a container's or "
        "WSL's limits may leave less)",
        bytes);
    SHOAL_CUDA_SCOPE_CALL(scope, host_register, "cuMemHostRegister", doing, memory, bytes,
                          SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP);
    *is_registered_out = true;
    SHOAL_CUDA_SCOPE_CALL(scope, host_address, "cuMemHostGetDevicePointer", "asking for the device's address of host memory",
                          address_out, memory, 0);
    return SHOAL_OK;
}

/* ---- Streams ------------------------------------------------------------------------------------------------------------- */

/* A context that has failed returns its error, and starts no further work. */
shoal_cu_result shoal_cuda_scope_query(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count)
{
    shoal_cu_result result = SHOAL_CU_SUCCESS;
    for (int i = 0; i < count && result == SHOAL_CU_SUCCESS; i++)
        result = scope->gpu->calls.stream_query(streams[i]);
    return result;
}

bool shoal_cuda_scope_is_at_work(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(scope->gpu, scope->context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return !shoal_cuda_scope_is_gone(entered);
    const bool is_at_work = shoal_cuda_scope_query(scope, streams, count) == SHOAL_CU_NOT_READY;
    shoal_cuda_leave(scope->gpu, &visit);
    return is_at_work;
}

enum shoal_status shoal_cuda_scope_look(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(scope->gpu, scope->context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_scope_fail_entering(scope, entered);
    const shoal_cu_result result = shoal_cuda_scope_query(scope, streams, count);
    shoal_cuda_leave(scope->gpu, &visit);
    return result == SHOAL_CU_SUCCESS || result == SHOAL_CU_NOT_READY
               ? SHOAL_OK
               : shoal_cuda_scope_fail(scope, "cuStreamQuery", result, "waiting for work on a stream");
}

void shoal_cuda_scope_join(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, const shoal_cu_event *events,
                           int count, shoal_cu_stream stream)
{
    const struct shoal_cuda_calls *calls = &scope->gpu->calls;
    for (int i = 0; i < count; i++)
        if (calls->event_record(events[i], streams[i]) == SHOAL_CU_SUCCESS)
            (void)calls->stream_wait_event(stream, events[i], 0);
}
