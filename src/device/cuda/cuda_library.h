/* libcuda.so.1, loaded at run time, and its entry points. Set-up only; any thread. */
#ifndef SHOAL_DEVICE_CUDA_LIBRARY_H
#define SHOAL_DEVICE_CUDA_LIBRARY_H

#include "base/log.h"
#include "device/cuda/cuda_abi.h"

/* Loads the driver, checks its version, initializes it (cuInit) and finds every entry point. calls_out and version_out are
 * written only on success. Errors are those of shoal_gpu_open(). */
SHOAL_MUST_USE enum shoal_status shoal_cuda_library_open(struct shoal_log *log, struct shoal_cuda_calls *calls_out,
                                                         int *version_out);

/* Returns cuPointerGetAttributes of the driver that the process has loaded, or NULL if it has loaded none. may_load: loads the
 * driver. Initializes nothing and logs nothing. */
int (*shoal_cuda_library_look(bool may_load))(unsigned count, int *attributes, void **values, shoal_cu_address at);

#endif
