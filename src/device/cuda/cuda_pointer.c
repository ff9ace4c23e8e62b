/* Finds the memory that a pointer points to, and the context in which it is used. */
#include <string.h>
#include <unistd.h>

#include "device/cuda/cuda_gpu.h"
#include "device/cuda/cuda_library.h"

/* A machine with devices has one of these files: the first on Linux, the second on the Linux subsystem of Windows. */
static const char *const device_files[] = {"/dev/nvidiactl", "/dev/dxg"};

static bool has_device_file(void)
{
    bool is_there = false;
    for (size_t i = 0; i < SHOAL_COUNT_OF(device_files); i++)
        is_there |= access(device_files[i], F_OK) == 0;
    return is_there;
}

shoal_gpu_ask_fn shoal_gpu_look(void)
{
    return shoal_cuda_library_look(has_device_file());
}

/* A driver that was not started refuses, and so does one that does not know an attribute; each value is then unchanged. Any
 * other error does not concern the memory: a context may have failed, for example. */
struct shoal_gpu_pointer shoal_gpu_classify(shoal_gpu_ask_fn ask, const void *at)
{
    int attributes[] = {SHOAL_CU_POINTER_MEMORY_TYPE, SHOAL_CU_POINTER_IS_MANAGED, SHOAL_CU_POINTER_DEVICE,
                        SHOAL_CU_POINTER_CONTEXT};
    unsigned type = 0, is_managed = 0; /* the driver writes the latter's first byte (a bool), or an int */
    int device = -1;
    void *context = NULL, *values[] = {&type, &is_managed, &device, &context};
    const int result = ask(SHOAL_COUNT_OF(attributes), attributes, values, (uintptr_t)at);
    const bool is_known = result == SHOAL_CU_SUCCESS;
    if (is_known && is_managed)
        return (struct shoal_gpu_pointer){SHOAL_GPU_MEMORY_MANAGED, device, context, 0};
    if (is_known && type == SHOAL_CU_MEMORY_DEVICE)
        return (struct shoal_gpu_pointer){SHOAL_GPU_MEMORY_DEVICE, device, context, 0};
    const bool is_usual = is_known || result == SHOAL_CU_INVALID_VALUE || result == SHOAL_CU_NOT_INITIALIZED;
    return (struct shoal_gpu_pointer){SHOAL_GPU_MEMORY_HOST, -1, NULL, is_usual ? SHOAL_CU_SUCCESS : result};
}

/* ---- Contexts ------------------------------------------------------------------------------------------------------------ */

static bool is_special(const void *stream)
{
    return !stream || (shoal_cu_stream)(uintptr_t)stream == SHOAL_CU_STREAM_LEGACY ||
           (shoal_cu_stream)(uintptr_t)stream == SHOAL_CU_STREAM_PER_THREAD;
}

/* Returns -1 if there is none. */
static int number_of(const struct shoal_gpu *gpu, int handle)
{
    int number = gpu->count - 1;
    while (number >= 0 && gpu->devices[number].handle != handle)
        number--;
    return number;
}

enum shoal_status shoal_cuda_find_device(struct shoal_gpu *gpu, shoal_cu_context context, int *device_out)
{
    shoal_cu_context popped;
    int handle = -1;
    shoal_cu_result result = gpu->calls.context_push(context);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuCtxPushCurrent", result, "entering a context");
    result = gpu->calls.context_device(&handle);
    (void)gpu->calls.context_pop(&popped);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuCtxGetDevice", result, "asking for the device of a context");
    *device_out = number_of(gpu, handle);
    if (*device_out >= 0)
        return SHOAL_OK;
    return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
                          "the CUDA driver says that a context is of device %d, which it does not list", handle);
}

static enum shoal_status find_context_of_stream(struct shoal_gpu *gpu, const struct shoal_gpu_pointer *pointer,
                                                shoal_cu_stream stream, const char *name, void **context_out)
{
    shoal_cu_context context = NULL;
    int device = -1;
    const shoal_cu_result result = gpu->calls.stream_context(stream, &context);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuStreamGetCtx", result,
                               "looking at options.stream (was it destroyed, or is it not a stream?)");
    SHOAL_TRY(shoal_cuda_find_device(gpu, context, &device));
    const bool is_managed = pointer->memory == SHOAL_GPU_MEMORY_MANAGED;
    if (!is_managed && device != pointer->device)
        return shoal_log_fail(gpu->log, SHOAL_ERR_ARGUMENT, "gpu",
                              "%s is in memory of device %d, but options.stream is a stream of device %d: pass a stream of the "
                              "device that has the memory",
                              name, pointer->device, device);
    if (!is_managed && pointer->context && pointer->context != (void *)context)
        return shoal_log_fail(gpu->log, SHOAL_ERR_ARGUMENT, "gpu",
                              "%s is in memory of another context of device %d than options.stream: make both in one context, "
                              "as the CUDA runtime does",
                              name, pointer->device);
    *context_out = context;
    return SHOAL_OK;
}

static enum shoal_status retain_primary(struct shoal_gpu *gpu, int device, void **context_out)
{
    if (!gpu->primary[device]) {
        const shoal_cu_result result = gpu->calls.primary_retain(&gpu->primary[device], gpu->devices[device].handle);
        if (result != SHOAL_CU_SUCCESS)
            return shoal_cuda_fail(gpu->log, &gpu->calls, "cuDevicePrimaryCtxRetain", result,
                                   "getting a device's primary context");
    }
    *context_out = gpu->primary[device];
    return SHOAL_OK;
}

void *shoal_gpu_current_context(const struct shoal_gpu *gpu)
{
    shoal_cu_context current = NULL;
    return gpu->calls.context_current(&current) == SHOAL_CU_SUCCESS ? current : NULL;
}

/* For memory whose context the driver does not report: virtual memory and pools. */
static enum shoal_status find_usual_context(struct shoal_gpu *gpu, int device, void **context_out)
{
    void *current = shoal_gpu_current_context(gpu);
    int handle = -1;
    const bool has_current = current && gpu->calls.context_device(&handle) == SHOAL_CU_SUCCESS;
    const bool is_device = device >= 0 && device < gpu->count; /* managed memory may belong to no device */
    if (!has_current || (is_device && number_of(gpu, handle) != device))
        return retain_primary(gpu, is_device ? device : 0, context_out);
    *context_out = current;
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_find_context(struct shoal_gpu *gpu, const struct shoal_gpu_pointer *pointer, void *stream,
                                         const char *name, void **context_out)
{
    if (!is_special(stream))
        return find_context_of_stream(gpu, pointer, stream, name, context_out);
    if (!pointer->context)
        return find_usual_context(gpu, pointer->device, context_out);
    *context_out = pointer->context;
    return SHOAL_OK;
}
