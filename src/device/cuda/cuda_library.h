/* libcuda.so.1, loaded at run time, and its entry points. Set-up only; any thread. */
#ifndef SHOAL_DEVICE_CUDA_LIBRARY_H
#define SHOAL_DEVICE_CUDA_LIBRARY_H

#include "base/log.h"
#include "device/cuda/cuda_abi.h"

/* Loads the driver, checks its version, starts it (cuInit) and finds every entry point. calls_out and version_out are
 * written on success only. Errors as shoal_gpu_open. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_library_open(struct shoal_log *log, struct shoal_cuda_calls *calls_out,
                                                         int *version_out);

/* cuPointerGetAttributes of the driver that the process has loaded; NULL: it has none. may_load: then it is loaded. Starts
 * nothing, says nothing. */
int (*shoal_cuda_library_look(bool may_load))(unsigned count, int *attributes, void **values, shoal_cu_address at);

#endif
