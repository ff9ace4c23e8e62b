#include "device/cuda/cuda_place.h"

#include <stdio.h>

enum shoal_status shoal_cuda_place_fail(const struct shoal_cuda_place *place, const char *call, shoal_cu_result result,
                                        const char *doing)
{
    char text[256];
    snprintf(text, sizeof text, "%s (device %d)", doing, place->device);
    return shoal_cuda_fail(place->gpu->log, &place->gpu->calls, call, result, text);
}

/* ---- Going in and out ---------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_cuda_place_fail_entering(const struct shoal_cuda_place *place, shoal_cu_result result)
{
    return shoal_cuda_place_fail(place, "cuCtxPushCurrent", result, "entering a context");
}

enum shoal_status shoal_cuda_place_enter(const struct shoal_cuda_place *place)
{
    const shoal_cu_result result = place->gpu->calls.context_push(place->context);
    return result == SHOAL_CU_SUCCESS ? SHOAL_OK : shoal_cuda_place_fail_entering(place, result);
}

void shoal_cuda_place_exit(const struct shoal_cuda_place *place)
{
    shoal_cu_context popped;
    (void)place->gpu->calls.context_pop(&popped);
}

bool shoal_cuda_place_is_gone(shoal_cu_result entered)
{
    return entered == SHOAL_CU_INVALID_CONTEXT || entered == SHOAL_CU_CONTEXT_IS_DESTROYED || entered == SHOAL_CU_DEINITIALIZED;
}

/* ---- Inside -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_cuda_place_register(const struct shoal_cuda_place *place, void *memory, size_t bytes,
                                            bool *is_registered_out, shoal_cu_address *address_out)
{
    char doing[200];
    snprintf(
        doing, sizeof doing,
        "registering %zu bytes of host memory with the driver (a smaller SHOAL_GPU_UNIT_BYTES needs less; a container's or "
        "WSL's limits may leave less)",
        bytes);
    SHOAL_CUDA_PLACE_CALL(place, host_register, "cuMemHostRegister", doing, memory, bytes,
                          SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP);
    *is_registered_out = true;
    SHOAL_CUDA_PLACE_CALL(place, host_address, "cuMemHostGetDevicePointer", "asking for the device's address of host memory",
                          address_out, memory, 0);
    return SHOAL_OK;
}

/* ---- Streams ------------------------------------------------------------------------------------------------------------- */

/* A context that has failed answers with its error, and begins nothing any more. */
shoal_cu_result shoal_cuda_place_query(const struct shoal_cuda_place *place, const shoal_cu_stream *streams, int count)
{
    shoal_cu_result result = SHOAL_CU_SUCCESS;
    for (int i = 0; i < count && result == SHOAL_CU_SUCCESS; i++)
        result = place->gpu->calls.stream_query(streams[i]);
    return result;
}

bool shoal_cuda_place_is_at_work(const struct shoal_cuda_place *place, const shoal_cu_stream *streams, int count)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(place->gpu, place->context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return !shoal_cuda_place_is_gone(entered);
    const bool is_at_work = shoal_cuda_place_query(place, streams, count) == SHOAL_CU_NOT_READY;
    shoal_cuda_leave(place->gpu, &visit);
    return is_at_work;
}

enum shoal_status shoal_cuda_place_look(const struct shoal_cuda_place *place, const shoal_cu_stream *streams, int count)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(place->gpu, place->context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_place_fail_entering(place, entered);
    const shoal_cu_result result = shoal_cuda_place_query(place, streams, count);
    shoal_cuda_leave(place->gpu, &visit);
    return result == SHOAL_CU_SUCCESS || result == SHOAL_CU_NOT_READY
               ? SHOAL_OK
               : shoal_cuda_place_fail(place, "cuStreamQuery", result, "waiting for work on a stream");
}

void shoal_cuda_place_join(const struct shoal_cuda_place *place, const shoal_cu_stream *streams, const shoal_cu_event *events,
                           int count, shoal_cu_stream stream)
{
    const struct shoal_cuda_calls *calls = &place->gpu->calls;
    for (int i = 0; i < count; i++)
        if (calls->event_record(events[i], streams[i]) == SHOAL_CU_SUCCESS)
            (void)calls->stream_wait_event(stream, events[i], 0);
}
