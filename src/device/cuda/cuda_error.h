/* Reports errors of the CUDA driver: its own name for the error, and what to do about it. Any thread. */
#ifndef SHOAL_DEVICE_CUDA_ERROR_H
#define SHOAL_DEVICE_CUDA_ERROR_H

#include "base/log.h"
#include "device/cuda/cuda_abi.h"

/* Logs "<doing>: <call> answered CUDA_ERROR_...; <what to do>" and returns the matching status. calls may be NULL, and so may
 * any of its members: then the name comes from Shoal's own list. result must be an error. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_fail(struct shoal_log *log, const struct shoal_cuda_calls *calls, const char *call,
                                                 shoal_cu_result result, const char *doing);

#endif
