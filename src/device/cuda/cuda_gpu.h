/* A loaded CUDA driver, for the files of this folder. See device/gpu.h. */
#ifndef SHOAL_DEVICE_CUDA_GPU_H
#define SHOAL_DEVICE_CUDA_GPU_H

#include "device/cuda/cuda_abi.h"
#include "device/cuda/cuda_error.h"
#include "device/cuda/cuda_mapping.h"
#include "device/gpu.h"

struct shoal_gpu {
    struct shoal_log *log;
    struct shoal_cuda_calls calls;
    int version;
    int count;
    struct shoal_gpu_device devices[SHOAL_GPU_DEVICES_MAX];
    shoal_cu_context primary[SHOAL_GPU_DEVICES_MAX]; /* retained; NULL: not requested yet */
    bool has_said_host_functions;
    bool has_refused_export;
    struct shoal_cuda_mappings mappings;
};

/* Finds the number of a context's device. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_find_device(struct shoal_gpu *gpu, shoal_cu_context context, int *device_out);

/* While a thread of the program captures a graph, a driver refuses calls that may wait, and the capture fails with them. It
 * allows such calls by a thread in this mode. */
struct shoal_cuda_visit {
    int mode; /* the thread's previous mode */
    bool is_relaxed;
};

/* Enters a context in that mode, for calls that create and destroy objects. If it succeeds, the caller must call
 * shoal_cuda_leave(). */
shoal_cu_result shoal_cuda_visit(const struct shoal_gpu *gpu, shoal_cu_context context, struct shoal_cuda_visit *visit);
void shoal_cuda_leave(const struct shoal_gpu *gpu, struct shoal_cuda_visit *visit);

/* Checks whether work can be put on the stream. Call it in the stream's context. Returns ERR_UNSUPPORTED if the stream is being
 * captured into a graph. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_check_capture(const struct shoal_gpu *gpu, int device, shoal_cu_stream stream);

/* Returns the stream that a caller means: never 0, whose meaning depends on how the caller was compiled. */
static inline shoal_cu_stream shoal_cuda_stream(void *stream)
{
    return stream ? (shoal_cu_stream)stream : SHOAL_CU_STREAM_LEGACY;
}

#endif
