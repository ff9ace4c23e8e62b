/* A context of the driver in which Shoal's streams work: entering and leaving it, and the calls to the driver inside it. For
 * the files of this folder. Any thread. */
#ifndef SHOAL_DEVICE_CUDA_SCOPE_H
#define SHOAL_DEVICE_CUDA_SCOPE_H

#include "device/cuda/cuda_gpu.h"

struct shoal_cuda_scope {
    struct shoal_gpu *gpu;
    shoal_cu_context context;
    int device; /* its number */
};

/* Logs the driver's error and the device. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_fail(const struct shoal_cuda_scope *scope, const char *call,
                                                       shoal_cu_result result, const char *doing);

/* Returns from the calling function if the driver refuses. */
#define SHOAL_CUDA_SCOPE_CALL(scope, member, name, doing, ...)                         \
    do {                                                                               \
        const shoal_cu_result scope_result_ = (scope)->gpu->calls.member(__VA_ARGS__); \
        if (scope_result_ != SHOAL_CU_SUCCESS)                                         \
            return shoal_cuda_scope_fail(scope, name, scope_result_, doing);           \
    } while (0)

SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_enter(const struct shoal_cuda_scope *scope);
void shoal_cuda_scope_exit(const struct shoal_cuda_scope *scope);

SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_fail_entering(const struct shoal_cuda_scope *scope, shoal_cu_result result);

/* Returns true if the result of entering means that the program has destroyed the context, and with it everything in it. */
bool shoal_cuda_scope_is_gone(shoal_cu_result entered);

/* Registers host memory and finds its address on the device. *is_registered_out is also set if only the latter fails. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_register(const struct shoal_cuda_scope *scope, void *memory, size_t bytes,
                                                           bool *is_registered_out, shoal_cu_address *address_out);

/* Returns success if all streams have run everything that was put on them, NOT_READY if one has not. Any other result: the
 * context has failed. Call it inside the context. */
shoal_cu_result shoal_cuda_scope_query(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count);
/* Returns true if one of the streams has work left. Does not wait. Call it from outside the context. */
bool shoal_cuda_scope_is_at_work(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, int count);
/* Returns ERR_* if the context has failed: nothing runs on the streams then, and the log has the driver's name for the
 * error. */
SHOAL_MUST_USE enum shoal_status shoal_cuda_scope_look(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams,
                                                       int count);
/* Makes the caller's stream wait for everything on our streams, after the driver has refused more: the caller's stream may
 * otherwise free or reuse the memory of copies that have been posted. If the driver refuses again, there is no remedy. Call it
 * inside the context. */
void shoal_cuda_scope_join(const struct shoal_cuda_scope *scope, const shoal_cu_stream *streams, const shoal_cu_event *events,
                           int count, shoal_cu_stream stream);

#endif
