#include "device/cuda/cuda_gpu.h"

#include <stdlib.h>

#include "device/cuda/cuda_library.h"

/* Stores 0 for an attribute that the driver does not know. */
static shoal_cu_result gpu_attribute(const struct shoal_gpu *gpu, int attribute, shoal_cu_device device, int *value_out)
{
    *value_out = 0;
    const shoal_cu_result result = gpu->calls.device_attribute(value_out, attribute, device);
    return result == SHOAL_CU_INVALID_VALUE ? SHOAL_CU_SUCCESS : result;
}

static shoal_cu_result gpu_look_at_attributes(const struct shoal_gpu *gpu, struct shoal_gpu_device *device)
{
    int can_register, has_waits, can_flush, has_dma_buf, mode;
    const struct {
        int attribute;
        int *value;
    } wanted[] = {{SHOAL_CU_DEVICE_MAJOR, &device->major},
                  {SHOAL_CU_DEVICE_MINOR, &device->minor},
                  {SHOAL_CU_DEVICE_HOST_REGISTER, &can_register},
                  {SHOAL_CU_DEVICE_STREAM_MEMORY_64, &has_waits},
                  {SHOAL_CU_DEVICE_DMA_BUF, &has_dma_buf},
                  {SHOAL_CU_DEVICE_COMPUTE_MODE, &mode},
                  {SHOAL_CU_DEVICE_FLUSH, &can_flush}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(wanted); i++) {
        const shoal_cu_result result = gpu_attribute(gpu, wanted[i].attribute, device->handle, wanted[i].value);
        if (result != SHOAL_CU_SUCCESS)
            return result;
    }
    device->can_register = can_register != 0;
    device->has_value_waits = gpu->calls.memory_ops && has_waits;
    device->can_flush = can_flush != 0;
    device->has_dma_buf = gpu->calls.range_export && has_dma_buf;
    device->is_prohibited = mode == SHOAL_CU_COMPUTE_MODE_PROHIBITED;
    return SHOAL_CU_SUCCESS;
}

static enum shoal_status gpu_look(struct shoal_gpu *gpu, int index)
{
    struct shoal_gpu_device *device = &gpu->devices[index];
    const struct shoal_cuda_calls *calls = &gpu->calls;
    char doing[64];
    snprintf(doing, sizeof doing, "looking at device %d", index);
    shoal_cu_result result = calls->device_get(&device->handle, index);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, calls, "cuDeviceGet", result, doing);
    result = calls->device_name(device->name, sizeof device->name, device->handle);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, calls, "cuDeviceGetName", result, doing);
    result = calls->device_pci(device->pci, sizeof device->pci, device->handle);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, calls, "cuDeviceGetPCIBusId", result, doing);
    result = gpu_look_at_attributes(gpu, device);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, calls, "cuDeviceGetAttribute", result, doing);
    return SHOAL_OK;
}

static enum shoal_status gpu_look_at_all(struct shoal_gpu *gpu)
{
    int count = 0;
    const shoal_cu_result result = gpu->calls.device_count(&count);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuDeviceGetCount", result, "counting devices");
    if (count == 0)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuDeviceGetCount", SHOAL_CU_NO_DEVICE, "counting devices");
    if (count > SHOAL_GPU_DEVICES_MAX)
        return shoal_log_fail(
            gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
            "the CUDA driver shows %d devices, and Shoal knows at most %d: name fewer in CUDA_VISIBLE_DEVICES", count,
            SHOAL_GPU_DEVICES_MAX);
    while (gpu->count < count)
        SHOAL_TRY(gpu_look(gpu, gpu->count++));
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_open(struct shoal_log *log, struct shoal_gpu **gpu_out)
{
    struct shoal_gpu *gpu = calloc(1, sizeof *gpu);
    if (!gpu)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "gpu", "no memory for the list of devices");
    gpu->log = log;
    enum shoal_status status = shoal_cuda_library_open(log, &gpu->calls, &gpu->version);
    if (status == SHOAL_OK)
        status = gpu_look_at_all(gpu);
    if (status == SHOAL_OK)
        *gpu_out = gpu;
    else
        shoal_gpu_close(gpu);
    return status;
}

void shoal_gpu_close(struct shoal_gpu *gpu)
{
    if (!gpu)
        return;
    shoal_cuda_mappings_fini(&gpu->mappings);
    for (int i = 0; i < gpu->count; i++) {
        if (gpu->primary[i])
            (void)gpu->calls.primary_release(gpu->devices[i].handle); /* a driver that shuts down refuses */
    }
    free(gpu);
}

int shoal_gpu_count(const struct shoal_gpu *gpu)
{
    return gpu->count;
}

const struct shoal_gpu_device *shoal_gpu_at(const struct shoal_gpu *gpu, int index)
{
    return &gpu->devices[index];
}

enum shoal_gpu_reach shoal_gpu_reach(const struct shoal_gpu *gpu, int index, int peer)
{
    const struct shoal_cuda_calls *calls = &gpu->calls;
    const int one = gpu->devices[index].handle, other = gpu->devices[peer].handle;
    int can_access = 0, has_atomics = 0;
    if (index == peer || !calls->peer_can_access || calls->peer_can_access(&can_access, one, other) != SHOAL_CU_SUCCESS ||
        !can_access)
        return SHOAL_GPU_REACH_NONE;
    if (calls->peer_attribute &&
        calls->peer_attribute(&has_atomics, SHOAL_CU_PEER_NATIVE_ATOMICS, one, other) != SHOAL_CU_SUCCESS)
        has_atomics = 0;
    return has_atomics ? SHOAL_GPU_REACH_NVLINK : SHOAL_GPU_REACH_PCIE;
}

int shoal_gpu_driver_version(const struct shoal_gpu *gpu)
{
    return gpu->version;
}

/* ---- Inside a context ---------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_cuda_check_capture(const struct shoal_gpu *gpu, int device, shoal_cu_stream stream)
{
    int capture = SHOAL_CU_CAPTURE_NONE;
    char doing[64];
    const shoal_cu_result result = gpu->calls.stream_is_capturing(stream, &capture);
    snprintf(doing, sizeof doing, "looking at options.stream (device %d)", device);
    if (result == SHOAL_CU_SUCCESS && capture == SHOAL_CU_CAPTURE_NONE)
        return SHOAL_OK;
    if (result != SHOAL_CU_SUCCESS && result != SHOAL_CU_STREAM_CAPTURE_IMPLICIT)
        return shoal_cuda_fail(gpu->log, &gpu->calls, "cuStreamIsCapturing", result, doing);
    return shoal_log_fail(
        gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
        "options.stream %s: the counter values of a ring cannot be replayed; leave this call out of the graph",
        result == SHOAL_CU_SUCCESS ? "is being captured into a graph"
                                   : "is the legacy stream while another one is being captured into a graph");
}
