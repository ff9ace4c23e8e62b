#include "comm/packers.h"

#include <stdio.h>

#include "comm/context.h"

enum shoal_status shoal_packer_open(struct shoal_context *context, void *stream, struct shoal_gpu_packer **packer_out)
{
    SHOAL_TRY(shoal_context_check(context, "shoal_reducer_create"));
    SHOAL_TRY(shoal_drivers_open(context));
    pthread_mutex_lock(&context->drivers.lock); /* it may retain a context, as a call may at the same time */
    const enum shoal_status status = shoal_gpu_packer_open(context->drivers.gpu, stream, packer_out);
    pthread_mutex_unlock(&context->drivers.lock);
    return status;
}

static enum shoal_status tell_error(const struct shoal_gpu_pointer *pointer, char *wrong, size_t wrong_bytes)
{
    snprintf(wrong, wrong_bytes, "is in memory that the driver cannot describe: cuPointerGetAttributes answered %s",
             shoal_gpu_error_name(pointer->error));
    return SHOAL_ERR_SYSTEM;
}

/* Managed memory works for both. A failed driver cannot distinguish device memory from host memory; the processor can. */
static enum shoal_status check_for_host(const struct shoal_gpu_pointer *pointer, const void *memory, char *wrong,
                                        size_t wrong_bytes)
{
    if (pointer->error && !shoal_devices_is_readable(memory))
        return tell_error(pointer, wrong, wrong_bytes);
    if (pointer->memory != SHOAL_GPU_MEMORY_DEVICE)
        return SHOAL_OK;
    snprintf(wrong, wrong_bytes, "is on device %d: make the reducer with is_on_device", pointer->device);
    return SHOAL_ERR_ARGUMENT;
}

static enum shoal_status check_for_device(const struct shoal_gpu_packer *packer, const struct shoal_gpu_pointer *pointer,
                                          char *wrong, size_t wrong_bytes)
{
    const int device = shoal_gpu_packer_device(packer);
    if (pointer->error)
        return tell_error(pointer, wrong, wrong_bytes);
    if (pointer->memory == SHOAL_GPU_MEMORY_HOST)
        snprintf(wrong, wrong_bytes,
                 "is in host memory, or was freed: all gradients of a reducer with is_on_device must be on its device, here %d",
                 device);
    else if (pointer->memory == SHOAL_GPU_MEMORY_DEVICE && pointer->device != device)
        snprintf(wrong, wrong_bytes, "is on device %d, but the reducer's stream is of device %d: make one reducer for each",
                 pointer->device, device);
    else if (pointer->memory == SHOAL_GPU_MEMORY_DEVICE && !shoal_gpu_packer_serves(packer, pointer->device, pointer->context))
        snprintf(wrong, wrong_bytes,
                 "is in another context of device %d than the reducer's stream: make both in one, as the CUDA runtime does",
                 device);
    else
        return SHOAL_OK;
    return SHOAL_ERR_ARGUMENT;
}

/* In a callback no driver may be asked, because it may be waiting for this thread. */
enum shoal_status shoal_packer_check(const struct shoal_comm *comm, const struct shoal_gpu_packer *packer, const void *memory,
                                     char *wrong, size_t wrong_bytes)
{
    const bool is_inside = shoal_progress_is_inside(comm->context->progress);
    if (!packer && (is_inside || !comm->devices.ask))
        return SHOAL_OK;
    if (is_inside) {
        snprintf(wrong, wrong_bytes,
                 "is on a device, whose driver must not be called in a callback: mark it in another thread");
        return SHOAL_ERR_STATE;
    }
    if (!memory)
        return SHOAL_OK;
    const struct shoal_gpu_pointer pointer = shoal_gpu_classify(comm->devices.ask, memory);
    return packer ? check_for_device(packer, &pointer, wrong, wrong_bytes)
                  : check_for_host(&pointer, memory, wrong, wrong_bytes);
}
