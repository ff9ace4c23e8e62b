/* Exports a device's memory as a dma-buf, which network adapters can read. */
#include "device/cuda/cuda_gpu.h"

bool shoal_gpu_find_allocation(const struct shoal_gpu *gpu, unsigned long long at, struct shoal_gpu_allocation *allocation_out)
{
    int attributes[] = {SHOAL_CU_POINTER_BUFFER_ID, SHOAL_CU_POINTER_RANGE_START, SHOAL_CU_POINTER_RANGE_BYTES,
                        SHOAL_CU_POINTER_CONTEXT, SHOAL_CU_POINTER_IS_MANAGED};
    unsigned is_managed = 0;
    void *values[] = {&allocation_out->number, &allocation_out->begin, &allocation_out->bytes, &allocation_out->context,
                      &is_managed};
    return gpu->calls.pointer_attributes(SHOAL_COUNT_OF(attributes), attributes, values, at) == SHOAL_CU_SUCCESS &&
           allocation_out->context && !is_managed;
}

/* Returns false, and logs the reason once: small allocations may share a page, and drivers differ in what they export. */
static bool refuse_export(struct shoal_gpu *gpu, shoal_cu_result result)
{
    if (!gpu->has_refused_export)
        shoal_log_line(gpu->log, SHOAL_LOG_INFO, "gpu",
                       "the driver does not export some memory of a device as a dma-buf (%s): inputs there pass through host "
                       "memory",
                       shoal_gpu_error_name(result));
    gpu->has_refused_export = true;
    return false;
}

bool shoal_gpu_export(struct shoal_gpu *gpu, const struct shoal_gpu_allocation *allocation, struct shoal_gpu_export *export_out)
{
    const unsigned long long end = shoal_round_up(allocation->begin + allocation->bytes, SHOAL_PAGE);
    struct shoal_cuda_visit visit;
    int device;
    if (shoal_cuda_find_device(gpu, allocation->context, &device) != SHOAL_OK)
        return false;
    if (!gpu->devices[device].has_dma_buf)
        return refuse_export(gpu, SHOAL_CU_NOT_SUPPORTED);
    if (shoal_cuda_visit(gpu, allocation->context, &visit) != SHOAL_CU_SUCCESS)
        return false;
    export_out->device = gpu->devices[device].handle;
    export_out->begin = allocation->begin & ~(unsigned long long)(SHOAL_PAGE - 1);
    export_out->bytes = (size_t)(end - export_out->begin);
    const shoal_cu_result result =
        gpu->calls.range_export(&export_out->descriptor, export_out->begin, export_out->bytes, SHOAL_CU_RANGE_DMA_BUF, 0);
    shoal_cuda_leave(gpu, &visit);
    return result == SHOAL_CU_SUCCESS || refuse_export(gpu, result);
}
