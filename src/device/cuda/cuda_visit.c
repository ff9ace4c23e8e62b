/* Visits of a context: for calls that a driver refuses while a thread captures a graph. */
#include "device/cuda/cuda_gpu.h"

shoal_cu_result shoal_cuda_visit(const struct shoal_gpu *gpu, shoal_cu_context context, struct shoal_cuda_visit *visit)
{
    const shoal_cu_result result = gpu->calls.context_push(context);
    visit->mode = SHOAL_CU_CAPTURE_MODE_RELAXED;
    visit->is_relaxed = result == SHOAL_CU_SUCCESS && gpu->calls.capture_mode(&visit->mode) == SHOAL_CU_SUCCESS;
    return result;
}

void shoal_cuda_leave(const struct shoal_gpu *gpu, struct shoal_cuda_visit *visit)
{
    shoal_cu_context popped;
    if (visit->is_relaxed)
        (void)gpu->calls.capture_mode(&visit->mode);
    (void)gpu->calls.context_pop(&popped);
}
