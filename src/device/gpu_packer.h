/* Work in device memory between calls: the device itself copies scattered data into buffers and back, and computes on them. A
 * packer has lanes, which are streams of its own, each for every fourth buffer. So a buffer is filled while the call of the
 * previous one is under way.
 *
 *   caller's stream   | backward ... | begun |   more kernels ...                 | joined: waits for the lanes |
 *                                       |                                             ^
 *   lane b % 4                          | copies into buffer b | call | copies back ... ended |
 *
 * All of it is put on streams when it is requested. A stream holds about 1,000 operations: a thread that puts more on it waits
 * until the device has run some of them, which may need other ranks. Apart from that, only open, close, load, allocate, release
 * and settle wait for the device. One thread at a time, never in a callback or with the progress engine's lock. Functions that
 * fail log the driver's name for the error, and return ERR_SYSTEM, ERR_MEMORY or ERR_ARGUMENT accordingly. */
#ifndef SHOAL_DEVICE_GPU_PACKER_H
#define SHOAL_DEVICE_GPU_PACKER_H

#include <stdbool.h>
#include <stddef.h>

#include "shoal/shoal.h"

#define SHOAL_GPU_LANES 4

struct shoal_gpu;
struct shoal_gpu_packer;

/* Opens a packer that works in the context of the caller's stream. NULL is the legacy stream of the thread's current context,
 * or else of the first device. Returns ERR_ARGUMENT for the per-thread stream. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_open(struct shoal_gpu *gpu, void *stream,
                                                       struct shoal_gpu_packer **packer_out);
/* All its memory must have been released. NULL is allowed. */
void shoal_gpu_packer_close(struct shoal_gpu_packer *packer);

/* Loads the kernels, once: add, scale and the casts need them. Errors are those of shoal_gpu_kernels_open(). */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_load(struct shoal_gpu_packer *packer);

bool shoal_gpu_packer_has_kernels(const struct shoal_gpu_packer *packer);

int shoal_gpu_packer_device(const struct shoal_gpu_packer *packer);

/* Returns true if memory of the packer's device can be used: the packer may be in another context. */
bool shoal_gpu_packer_serves(const struct shoal_gpu_packer *packer, int device, const void *context);

/* Allocates memory that is zero for all lanes, and for the caller's stream from then on. release waits for the lanes. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_allocate(struct shoal_gpu_packer *packer, size_t bytes, void **memory_out);
void shoal_gpu_packer_release(struct shoal_gpu_packer *packer, void *memory);

/* Checks whether work can be put on the caller's stream. Returns ERR_UNSUPPORTED if it is being captured into a graph. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_check(struct shoal_gpu_packer *packer);

/* Returns the stream of a lane, for options.stream. */
void *shoal_gpu_packer_lane(const struct shoal_gpu_packer *packer, int lane);

/* Work that is put on the lane later runs after everything that is on the caller's stream now. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_begin(struct shoal_gpu_packer *packer, int lane);

/* Work that is put on the caller's stream later runs after everything that is on the lane now. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_join(struct shoal_gpu_packer *packer, int lane);

/* For a failed step: like shoal_gpu_packer_join() for all lanes. If the driver refuses, this thread waits for the lane, which
 * nothing blocks then. */
void shoal_gpu_packer_give_back(struct shoal_gpu_packer *packer);

SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_copy(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                       const void *source, size_t bytes);

/* Writes zeros. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_clear(struct shoal_gpu_packer *packer, int lane, void *dest, size_t bytes);

/* Makes the device copy from and to host memory directly. Without it, a copy may keep its thread waiting for the lane. Register
 * memory before the first copy, and unregister it before it is freed: that waits for the lanes. Errors: ERR_MEMORY,
 * ERR_SYSTEM. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_register(struct shoal_gpu_packer *packer, void *memory, size_t bytes);
void shoal_gpu_packer_unregister(struct shoal_gpu_packer *packer, void *memory);

/* A point of a lane, after everything that is on the lane now. *point is made if it is NULL, otherwise used again; release it
 * with shoal_gpu_packer_forget(). look returns OK if the lane has passed the point, and PENDING if not. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_mark(struct shoal_gpu_packer *packer, int lane, void **point);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_look(struct shoal_gpu_packer *packer, void *point);
void shoal_gpu_packer_forget(struct shoal_gpu_packer *packer, void *point);

/* Copy to host memory, and from it. The host memory must stay until the lanes are settled. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_fetch(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                        const void *source, size_t bytes);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_store(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                        const void *source, size_t bytes);

/* Waits until the lanes have run all that was put on them. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_settle(struct shoal_gpu_packer *packer);

/* dest[i] += source[i]. This and the functions below need the kernels. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_add(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                      void *dest, const void *source, size_t count);

/* values[i] *= factor. The factor is rounded to the type, or to float32 for a 16-bit type. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_scale(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                        void *values, size_t count, double factor);

/* See the functions of device/gpu.h. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_narrow(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                         void *dest, const float *source, size_t count, float factor);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_widen(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                        float *dest, const void *source, size_t count, float factor);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_quantize(struct shoal_gpu_packer *packer, int lane, int8_t *values,
                                                           float *scales, const float *source, float *error, size_t count);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_dequantize(struct shoal_gpu_packer *packer, int lane, float *dest,
                                                             const int8_t *values, const float *scales, size_t count,
                                                             float factor, bool adds);

SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_square(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                         double *sums, const void *source, size_t count, double factor);

#endif
