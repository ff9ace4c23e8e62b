/* Streams and memory for work between calls, in one context. */
#include "device/gpu_packer.h"

#include <stdlib.h>

#include "device/cuda/cuda_gpu.h"

struct shoal_gpu_packer {
    struct shoal_gpu *gpu;
    shoal_cu_context context;
    int device;
    shoal_cu_stream caller;
    shoal_cu_event begun; /* marks the caller's stream when work was put on a lane */
    shoal_cu_stream lanes[SHOAL_GPU_LANES];
    shoal_cu_event ended[SHOAL_GPU_LANES]; /* marks the end of each lane's work */
    struct shoal_gpu_kernels *kernels;     /* NULL: not loaded */
};

/* Source of zeros for clearing memory. It is static because a driver may read it late. */
static const char zeros[64 << 10];

static enum shoal_status packer_fail(const struct shoal_gpu_packer *packer, const char *call, shoal_cu_result result,
                                     const char *doing)
{
    char text[128];
    snprintf(text, sizeof text, "%s (device %d)", doing, packer->device);
    return shoal_cuda_fail(packer->gpu->log, &packer->gpu->calls, call, result, text);
}

/* Returns from the calling function if the driver refuses. */
#define PACKER_CALL(packer, member, name, doing, ...)                                    \
    do {                                                                                 \
        const shoal_cu_result packer_result_ = (packer)->gpu->calls.member(__VA_ARGS__); \
        if (packer_result_ != SHOAL_CU_SUCCESS)                                          \
            return packer_fail(packer, name, packer_result_, doing);                     \
    } while (0)

static enum shoal_status packer_enter(const struct shoal_gpu_packer *packer)
{
    PACKER_CALL(packer, context_push, "cuCtxPushCurrent", "entering a context", packer->context);
    return SHOAL_OK;
}

static enum shoal_status packer_exit(const struct shoal_gpu_packer *packer, enum shoal_status status)
{
    shoal_cu_context popped;
    (void)packer->gpu->calls.context_pop(&popped);
    return status;
}

static enum shoal_status packer_visit(const struct shoal_gpu_packer *packer, struct shoal_cuda_visit *visit)
{
    const shoal_cu_result result = shoal_cuda_visit(packer->gpu, packer->context, visit);
    return result == SHOAL_CU_SUCCESS ? SHOAL_OK : packer_fail(packer, "cuCtxPushCurrent", result, "entering a context");
}

static enum shoal_status wait_for_lanes(const struct shoal_gpu_packer *packer)
{
    shoal_cu_result first = SHOAL_CU_SUCCESS;
    for (int i = 0; i < SHOAL_GPU_LANES; i++) {
        const shoal_cu_result result = packer->gpu->calls.stream_synchronize(packer->lanes[i]);
        first = first == SHOAL_CU_SUCCESS ? result : first;
    }
    return first == SHOAL_CU_SUCCESS ? SHOAL_OK : packer_fail(packer, "cuStreamSynchronize", first, "waiting for copies");
}

/* ---- Creation and end ---------------------------------------------------------------------------------------------------- */

static enum shoal_status packer_fill(struct shoal_gpu_packer *packer)
{
    PACKER_CALL(packer, event_create, "cuEventCreate", "making an event", &packer->begun, SHOAL_CU_EVENT_NO_TIMING);
    for (int i = 0; i < SHOAL_GPU_LANES; i++) {
        PACKER_CALL(packer, stream_create, "cuStreamCreateWithPriority", "making a stream", &packer->lanes[i],
                    SHOAL_CU_STREAM_NON_BLOCKING, 0);
        PACKER_CALL(packer, event_create, "cuEventCreate", "making an event", &packer->ended[i], SHOAL_CU_EVENT_NO_TIMING);
    }
    return SHOAL_OK;
}

/* A driver that shuts down refuses; there is no remedy. */
static void packer_empty(struct shoal_gpu_packer *packer)
{
    const struct shoal_cuda_calls *calls = &packer->gpu->calls;
    if (packer->begun)
        (void)calls->event_destroy(packer->begun);
    for (int i = 0; i < SHOAL_GPU_LANES; i++) {
        if (packer->ended[i])
            (void)calls->event_destroy(packer->ended[i]);
        if (packer->lanes[i])
            (void)calls->stream_destroy(packer->lanes[i]);
    }
}

static enum shoal_status packer_make(struct shoal_gpu_packer *packer)
{
    struct shoal_cuda_visit visit;
    SHOAL_TRY(packer_visit(packer, &visit));
    enum shoal_status status = shoal_cuda_check_capture(packer->gpu, packer->device, packer->caller);
    if (status == SHOAL_OK)
        status = packer_fill(packer);
    if (status != SHOAL_OK)
        packer_empty(packer);
    shoal_cuda_leave(packer->gpu, &visit);
    return status;
}

enum shoal_status shoal_gpu_packer_open(struct shoal_gpu *gpu, void *stream, struct shoal_gpu_packer **packer_out)
{
    const struct shoal_gpu_pointer anywhere = {SHOAL_GPU_MEMORY_MANAGED, -1, NULL, 0};
    void *context;
    int device;
    if (stream == (void *)SHOAL_CU_STREAM_PER_THREAD)
        return shoal_log_fail(
            gpu->log, SHOAL_ERR_ARGUMENT, "gpu",
            "options.stream is the per-thread stream, which is another one in each thread that marks gradients: "
            "make a stream, or pass the legacy one");
    SHOAL_TRY(shoal_gpu_find_context(gpu, &anywhere, stream, "the reducer", &context));
    SHOAL_TRY(shoal_cuda_find_device(gpu, context, &device));
    struct shoal_gpu_packer *packer = calloc(1, sizeof *packer);
    if (!packer)
        return shoal_log_fail(gpu->log, SHOAL_ERR_MEMORY, "gpu", "no memory for work on device %d", device);
    packer->gpu = gpu;
    packer->context = context;
    packer->device = device;
    packer->caller = shoal_cuda_stream(stream);
    const enum shoal_status status = packer_make(packer);
    if (status == SHOAL_OK)
        *packer_out = packer;
    else
        free(packer);
    return status;
}

void shoal_gpu_packer_close(struct shoal_gpu_packer *packer)
{
    struct shoal_cuda_visit visit;
    if (!packer)
        return;
    if (shoal_cuda_visit(packer->gpu, packer->context, &visit) ==
        SHOAL_CU_SUCCESS) { /* otherwise everything is gone with the context */
        packer_empty(packer);
        shoal_cuda_leave(packer->gpu, &visit);
    }
    shoal_gpu_kernels_close(packer->kernels);
    free(packer);
}

enum shoal_status shoal_gpu_packer_load(struct shoal_gpu_packer *packer)
{
    return packer->kernels ? SHOAL_OK : shoal_gpu_kernels_open(packer->gpu, packer->context, &packer->kernels);
}

bool shoal_gpu_packer_has_kernels(const struct shoal_gpu_packer *packer)
{
    return packer->kernels != NULL;
}

int shoal_gpu_packer_device(const struct shoal_gpu_packer *packer)
{
    return packer->device;
}

/* For memory of pools, the driver does not report the context. */
bool shoal_gpu_packer_serves(const struct shoal_gpu_packer *packer, int device, const void *context)
{
    return device == packer->device && (!context || context == (const void *)packer->context);
}

void *shoal_gpu_packer_lane(const struct shoal_gpu_packer *packer, int lane)
{
    return (void *)packer->lanes[lane];
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static shoal_cu_address packer_address(const void *memory)
{
    return (shoal_cu_address)(uintptr_t)memory;
}

/* The part that is already zero is copied to the bytes after it, so that few calls are needed. */
static enum shoal_status put_zeros(const struct shoal_gpu_packer *packer, int lane, shoal_cu_address at, size_t bytes)
{
    const shoal_cu_stream stream = packer->lanes[lane];
    size_t done = bytes < sizeof zeros ? bytes : sizeof zeros;
    PACKER_CALL(packer, copy_to_device, "cuMemcpyHtoDAsync", "clearing a buffer", at, zeros, done, stream);
    for (size_t run; done < bytes; done += run) {
        run = bytes - done < done ? bytes - done : done;
        PACKER_CALL(packer, copy, "cuMemcpyAsync", "clearing a buffer", at + done, at, run, stream);
    }
    return SHOAL_OK;
}

/* All streams wait for it. */
static enum shoal_status clear(struct shoal_gpu_packer *packer, shoal_cu_address at, size_t bytes)
{
    const shoal_cu_stream lane = packer->lanes[0];
    SHOAL_TRY(put_zeros(packer, 0, at, bytes));
    PACKER_CALL(packer, event_record, "cuEventRecord", "marking a cleared buffer", packer->ended[0], lane);
    for (int i = 1; i < SHOAL_GPU_LANES; i++)
        PACKER_CALL(packer, stream_wait_event, "cuStreamWaitEvent", "ordering a stream after a cleared buffer",
                    packer->lanes[i], packer->ended[0], 0);
    PACKER_CALL(packer, stream_wait_event, "cuStreamWaitEvent", "ordering a stream after a cleared buffer", packer->caller,
                packer->ended[0], 0);
    return SHOAL_OK;
}

static enum shoal_status allocate(struct shoal_gpu_packer *packer, size_t bytes, shoal_cu_address *at_out)
{
    char doing[80];
    snprintf(doing, sizeof doing, "allocating %zu bytes for gradients", bytes);
    PACKER_CALL(packer, allocate, "cuMemAlloc", doing, at_out, bytes);
    const enum shoal_status status = clear(packer, *at_out, bytes);
    if (status != SHOAL_OK)
        (void)packer->gpu->calls.release(*at_out);
    return status;
}

enum shoal_status shoal_gpu_packer_allocate(struct shoal_gpu_packer *packer, size_t bytes, void **memory_out)
{
    struct shoal_cuda_visit visit;
    shoal_cu_address at = 0;
    SHOAL_TRY(packer_visit(packer, &visit));
    const enum shoal_status status = allocate(packer, bytes, &at);
    shoal_cuda_leave(packer->gpu, &visit);
    if (status == SHOAL_OK)
        *memory_out = (void *)(uintptr_t)at;
    return status;
}

/* The driver does not know which memory kernels use, so the streams must finish first. A driver that refuses has lost the
 * context, and the memory with it. */
void shoal_gpu_packer_release(struct shoal_gpu_packer *packer, void *memory)
{
    struct shoal_cuda_visit visit;
    if (!memory || shoal_cuda_visit(packer->gpu, packer->context, &visit) != SHOAL_CU_SUCCESS)
        return;
    if (wait_for_lanes(packer) == SHOAL_OK)
        (void)packer->gpu->calls.release(packer_address(memory));
    shoal_cuda_leave(packer->gpu, &visit);
}

static enum shoal_status register_memory(const struct shoal_gpu_packer *packer, void *memory, size_t bytes)
{
    char doing[100];
    snprintf(doing, sizeof doing, "registering %zu bytes of host memory", bytes);
    PACKER_CALL(packer, host_register, "cuMemHostRegister", doing, memory, bytes,
                SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_register(struct shoal_gpu_packer *packer, void *memory, size_t bytes)
{
    struct shoal_cuda_visit visit;
    SHOAL_TRY(packer_visit(packer, &visit));
    const enum shoal_status status = register_memory(packer, memory, bytes);
    shoal_cuda_leave(packer->gpu, &visit);
    return status;
}

/* A driver that refuses has lost the context, and the registration with it. */
void shoal_gpu_packer_unregister(struct shoal_gpu_packer *packer, void *memory)
{
    struct shoal_cuda_visit visit;
    if (shoal_cuda_visit(packer->gpu, packer->context, &visit) != SHOAL_CU_SUCCESS)
        return;
    (void)wait_for_lanes(packer);
    (void)packer->gpu->calls.host_unregister(memory);
    shoal_cuda_leave(packer->gpu, &visit);
}

/* ---- Order --------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_gpu_packer_check(struct shoal_gpu_packer *packer)
{
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, shoal_cuda_check_capture(packer->gpu, packer->device, packer->caller));
}

static enum shoal_status lane_after_caller(const struct shoal_gpu_packer *packer, int lane)
{
    SHOAL_TRY(shoal_cuda_check_capture(packer->gpu, packer->device, packer->caller));
    PACKER_CALL(packer, event_record, "cuEventRecord", "marking the caller's stream", packer->begun, packer->caller);
    PACKER_CALL(packer, stream_wait_event, "cuStreamWaitEvent", "ordering a stream after the caller's", packer->lanes[lane],
                packer->begun, 0);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_begin(struct shoal_gpu_packer *packer, int lane)
{
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, lane_after_caller(packer, lane));
}

static enum shoal_status mark_lane(const struct shoal_gpu_packer *packer, int lane, void **point)
{
    shoal_cu_event event = *point;
    if (!event)
        PACKER_CALL(packer, event_create, "cuEventCreate", "making an event", &event, SHOAL_CU_EVENT_NO_TIMING);
    *point = event;
    PACKER_CALL(packer, event_record, "cuEventRecord", "marking a point of a stream", event, packer->lanes[lane]);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_mark(struct shoal_gpu_packer *packer, int lane, void **point)
{
    struct shoal_cuda_visit visit;
    SHOAL_TRY(packer_visit(packer, &visit));
    const enum shoal_status status = mark_lane(packer, lane, point);
    shoal_cuda_leave(packer->gpu, &visit);
    return status;
}

enum shoal_status shoal_gpu_packer_look(struct shoal_gpu_packer *packer, void *point)
{
    struct shoal_cuda_visit visit;
    SHOAL_TRY(packer_visit(packer, &visit));
    const shoal_cu_result result = packer->gpu->calls.event_query(point);
    shoal_cuda_leave(packer->gpu, &visit);
    if (result == SHOAL_CU_SUCCESS || result == SHOAL_CU_NOT_READY)
        return result == SHOAL_CU_SUCCESS ? SHOAL_OK : SHOAL_PENDING;
    return packer_fail(packer, "cuEventQuery", result, "waiting for copies from a device");
}

void shoal_gpu_packer_forget(struct shoal_gpu_packer *packer, void *point)
{
    struct shoal_cuda_visit visit;
    if (!point || shoal_cuda_visit(packer->gpu, packer->context, &visit) != SHOAL_CU_SUCCESS)
        return;
    (void)packer->gpu->calls.event_destroy(point);
    shoal_cuda_leave(packer->gpu, &visit);
}

static enum shoal_status caller_after_lane(const struct shoal_gpu_packer *packer, int lane)
{
    SHOAL_TRY(shoal_cuda_check_capture(packer->gpu, packer->device, packer->caller));
    PACKER_CALL(packer, event_record, "cuEventRecord", "marking the end of a buffer", packer->ended[lane], packer->lanes[lane]);
    PACKER_CALL(packer, stream_wait_event, "cuStreamWaitEvent", "ordering the caller's stream after a buffer", packer->caller,
                packer->ended[lane], 0);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_join(struct shoal_gpu_packer *packer, int lane)
{
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, caller_after_lane(packer, lane));
}

/* A context that cannot be entered is lost, and so is the work in it. */
void shoal_gpu_packer_give_back(struct shoal_gpu_packer *packer)
{
    struct shoal_cuda_visit visit;
    if (packer_visit(packer, &visit) != SHOAL_OK)
        return;
    for (int lane = 0; lane < SHOAL_GPU_LANES; lane++)
        if (caller_after_lane(packer, lane) != SHOAL_OK)
            (void)packer->gpu->calls.stream_synchronize(packer->lanes[lane]);
    shoal_cuda_leave(packer->gpu, &visit);
}

/* ---- Work ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status put_copy(const struct shoal_gpu_packer *packer, int lane, shoal_cu_address dest,
                                  shoal_cu_address source, size_t bytes)
{
    PACKER_CALL(packer, copy, "cuMemcpyAsync", "copying a gradient", dest, source, bytes, packer->lanes[lane]);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_copy(struct shoal_gpu_packer *packer, int lane, void *dest, const void *source, size_t bytes)
{
    if (!bytes)
        return SHOAL_OK;
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, put_copy(packer, lane, packer_address(dest), packer_address(source), bytes));
}

enum shoal_status shoal_gpu_packer_clear(struct shoal_gpu_packer *packer, int lane, void *dest, size_t bytes)
{
    if (!bytes)
        return SHOAL_OK;
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, put_zeros(packer, lane, packer_address(dest), bytes));
}

static enum shoal_status put_fetch(const struct shoal_gpu_packer *packer, int lane, void *dest, shoal_cu_address source,
                                   size_t bytes)
{
    PACKER_CALL(packer, copy_to_host, "cuMemcpyDtoHAsync", "reading from a device", dest, source, bytes, packer->lanes[lane]);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_fetch(struct shoal_gpu_packer *packer, int lane, void *dest, const void *source,
                                         size_t bytes)
{
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, put_fetch(packer, lane, dest, packer_address(source), bytes));
}

static enum shoal_status put_store(const struct shoal_gpu_packer *packer, int lane, shoal_cu_address dest, const void *source,
                                   size_t bytes)
{
    PACKER_CALL(packer, copy_to_device, "cuMemcpyHtoDAsync", "writing to a device", dest, source, bytes, packer->lanes[lane]);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_packer_store(struct shoal_gpu_packer *packer, int lane, void *dest, const void *source,
                                         size_t bytes)
{
    SHOAL_TRY(packer_enter(packer));
    return packer_exit(packer, put_store(packer, lane, packer_address(dest), source, bytes));
}

enum shoal_status shoal_gpu_packer_settle(struct shoal_gpu_packer *packer)
{
    struct shoal_cuda_visit visit;
    SHOAL_TRY(packer_visit(packer, &visit));
    const enum shoal_status status = wait_for_lanes(packer);
    shoal_cuda_leave(packer->gpu, &visit);
    return status;
}

enum shoal_status shoal_gpu_packer_add(struct shoal_gpu_packer *packer, int lane, enum shoal_type type, void *dest,
                                       const void *source, size_t count)
{
    const struct shoal_gpu_reduction reduction = {.type = type,
                                                  .op = SHOAL_SUM,
                                                  .dest = packer_address(dest),
                                                  .sources = {packer_address(dest), packer_address(source)},
                                                  .source_count = 2,
                                                  .count = count,
                                                  .argument = 1};
    return shoal_gpu_reduce(packer->kernels, &reduction, packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_scale(struct shoal_gpu_packer *packer, int lane, enum shoal_type type, void *values,
                                         size_t count, double factor)
{
    const struct shoal_gpu_reduction reduction = {.type = type,
                                                  .op = SHOAL_SCALED_SUM,
                                                  .dest = packer_address(values),
                                                  .sources = {packer_address(values)},
                                                  .source_count = 1,
                                                  .count = count,
                                                  .argument = factor};
    return shoal_gpu_reduce(packer->kernels, &reduction, packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_narrow(struct shoal_gpu_packer *packer, int lane, enum shoal_type type, void *dest,
                                          const float *source, size_t count, float factor)
{
    return shoal_gpu_narrow(packer->kernels, type, packer_address(dest), packer_address(source), count, factor,
                            packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_widen(struct shoal_gpu_packer *packer, int lane, enum shoal_type type, float *dest,
                                         const void *source, size_t count, float factor)
{
    return shoal_gpu_widen(packer->kernels, type, packer_address(dest), packer_address(source), count, factor,
                           packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_quantize(struct shoal_gpu_packer *packer, int lane, int8_t *values, float *scales,
                                            const float *source, float *error, size_t count)
{
    return shoal_gpu_quantize(packer->kernels, packer_address(values), packer_address(scales), packer_address(source),
                              packer_address(error), count, packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_dequantize(struct shoal_gpu_packer *packer, int lane, float *dest, const int8_t *values,
                                              const float *scales, size_t count, float factor, bool adds)
{
    return shoal_gpu_dequantize(packer->kernels, packer_address(dest), packer_address(values), packer_address(scales), count,
                                factor, adds, packer->lanes[lane]);
}

enum shoal_status shoal_gpu_packer_square(struct shoal_gpu_packer *packer, int lane, enum shoal_type type, double *sums,
                                          const void *source, size_t count, double factor)
{
    return shoal_gpu_square(packer->kernels, type, packer_address(sums), packer_address(source), count, factor,
                            packer->lanes[lane]);
}
