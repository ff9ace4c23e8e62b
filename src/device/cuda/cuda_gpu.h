/* A loaded CUDA driver, for the files of this folder. See device/gpu.h. */
#ifndef SHOAL_DEVICE_CUDA_GPU_H
#define SHOAL_DEVICE_CUDA_GPU_H

#include "device/cuda/cuda_abi.h"
#include "device/cuda/cuda_error.h"
#include "device/gpu.h"

struct shoal_gpu {
    struct shoal_log *log;
    struct shoal_cuda_calls calls;
    int version;
    int count;
    struct shoal_gpu_device devices[SHOAL_GPU_DEVICES_MAX];
    shoal_cu_context primary[SHOAL_GPU_DEVICES_MAX]; /* retained; NULL: not asked for */
    bool has_said_host_functions;
};

/* The number of a context's device. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_find_device(struct shoal_gpu *gpu, shoal_cu_context context, int *device_out);

/* The stream that a caller means: never 0, whose meaning depends on how the caller was compiled. */
static inline shoal_cu_stream shoal_cuda_stream(void *stream)
{
    return stream ? (shoal_cu_stream)stream : SHOAL_CU_STREAM_LEGACY;
}

#endif
