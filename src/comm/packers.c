#include "comm/packers.h"

#include <stdio.h>

#include "comm/context.h"

enum shoal_status shoal_packer_open(struct shoal_context *context, void *stream, struct shoal_gpu_packer **packer_out)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_reducer_create"));
    SHOAL_TRY(shoal_drivers_open(context));
    return shoal_gpu_packer_open(context->drivers.gpu, stream, packer_out);
}

/* Managed memory serves both. */
static bool host_takes(const struct shoal_gpu_pointer *pointer, char *wrong, size_t wrong_bytes)
{
    if (pointer->memory != SHOAL_GPU_MEMORY_DEVICE)
        return true;
    snprintf(wrong, wrong_bytes, "lies on device %d: make the reducer with is_on_device", pointer->device);
    return false;
}

static bool device_takes(const struct shoal_gpu_packer *packer, const struct shoal_gpu_pointer *pointer, char *wrong,
                         size_t wrong_bytes)
{
    const int device = shoal_gpu_packer_device(packer);
    if (pointer->error)
        snprintf(wrong, wrong_bytes, "lies where the driver does not say: cuPointerGetAttributes answered %s",
                 shoal_gpu_error_name(pointer->error));
    else if (pointer->memory == SHOAL_GPU_MEMORY_HOST)
        snprintf(wrong, wrong_bytes,
                 "lies in host memory, or was freed: all gradients of a reducer that is_on_device lie on its device, here %d",
                 device);
    else if (pointer->memory == SHOAL_GPU_MEMORY_DEVICE && pointer->device != device)
        snprintf(wrong, wrong_bytes, "lies on device %d, but the reducer's stream is of device %d: make one for each device",
                 pointer->device, device);
    else if (pointer->memory == SHOAL_GPU_MEMORY_DEVICE && !shoal_gpu_packer_serves(packer, pointer->device, pointer->context))
        snprintf(wrong, wrong_bytes,
                 "lies in another context of device %d than the reducer's stream: make both in one, as the CUDA runtime does",
                 device);
    else
        return true;
    return false;
}

/* In a callback no driver is asked: it may be waiting for this thread. */
bool shoal_packer_takes(const struct shoal_comm *comm, const struct shoal_gpu_packer *packer, const void *memory, char *wrong,
                        size_t wrong_bytes)
{
    const bool is_inside = shoal_progress_is_inside(comm->context->progress);
    if (!packer && (is_inside || !comm->devices.ask))
        return true;
    if (is_inside) {
        snprintf(wrong, wrong_bytes,
                 "lies on a device, whose driver must not be called in a callback: mark it in another thread");
        return false;
    }
    const struct shoal_gpu_pointer pointer = shoal_gpu_classify(comm->devices.ask, memory);
    return packer ? device_takes(packer, &pointer, wrong, wrong_bytes) : host_takes(&pointer, wrong, wrong_bytes);
}
