/* A context of the driver in which streams of ours do their work: entering and leaving it, and what is asked of the driver
 * there. For the files of this folder; any thread. */
#ifndef SHOAL_DEVICE_CUDA_SCOPE_H
#define SHOAL_DEVICE_CUDA_SCOPE_H

#include "device/cuda/cuda_gpu.h"

struct shoal_cuda_scope {
    struct shoal_gpu *gpu;
    shoal_cu_context context;
    int device; /* its number */
};

/* Logs what the driver answered, with the device. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_fail(const struct shoal_cuda_scope *scope, const char *call,
                                                       shoal_cu_result result, const char *doing);

/* Returns from the function that names the call when the driver refuses. */
#define SHOAL_CUDA_SCOPE_CALL(scope, member, name, doing, ...)                         \
    do {                                                                               \
        const shoal_cu_result scope_result_ = (scope)->gpu->calls.member(__VA_ARGS__); \
        if (scope_result_ != SHOAL_CU_SUCCESS)                                         \
            return shoal_cuda_scope_fail(scope, name, scope_result_, doing);           \
    } while (0)

SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_enter(const struct shoal_cuda_scope *scope);
void shoal_cuda_scope_exit(const struct shoal_cuda_scope *scope);

SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_fail_entering(const struct shoal_cuda_scope *scope, shoal_cu_result result);

/* Whether entering has said that the program has destroyed the context, and with it all that was made there. */
bool shoal_cuda_scope_is_gone(shoal_cu_result entered);

/* Registers host memory, and asks for its address on the device. *is_registered_out is set also where the latter fails. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_register(const struct shoal_cuda_scope *scope, void *memory, size_t bytes,
                                                           bool *is_registered_out, shoal_cu_address *address_out);

/* Success: all streams have run what was put on them; NOT_READY: one has not; else the context has failed. Inside. */
shoal_cu_result shoal_cuda_scope_query(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count);
/* Whether one of the streams has something to run. Does not wait; from outside. */
bool shoal_cuda_scope_is_at_work(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count);
/* ERR_*: the context has failed, so nothing runs on the streams any more; the log has the driver's name for the error. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_look(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams,
                                                       int count);
/* Makes the caller's stream wait for all that our streams have, where more was refused: the memory of copies that have been
 * posted may be freed on the caller's stream, or used anew. Where a driver refuses again, nothing can be done. Inside. */
void shoal_cuda_scope_join(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, const shoal_cu_event *events,
                           int count, shoal_cu_stream stream);

#endif
