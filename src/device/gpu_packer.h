/* Work in the memory of a device between calls: what lies in many places is copied into buffers and back, and computed on, by
 * the device itself. A packer has lanes, streams of its own, each for every fourth buffer: so a buffer is filled while the call
 * of the one before is under way.
 *
 *     caller's stream   | backward ... | begun |   more kernels ...                         | joined: waits for the lanes |
 *                                         |                                                    ^
 *     lane b % 4                          | copies into buffer b | call | copies back ... ended |
 *
 * All of it is put on streams when it is asked for. A stream holds about 1,000 operations: a thread that puts more on it waits
 * until the device has run some of them, which may need other ranks.
 * Besides, only open, close, load, allocate, release and settle wait for the device.
 * One thread at a time, never in a callback nor with the progress engine's lock. Functions that fail log why, with the driver's
 * name of the error: ERR_SYSTEM, ERR_MEMORY or ERR_ARGUMENT, as it refuses. */
#ifndef SHOAL_DEVICE_GPU_PACKER_H
#define SHOAL_DEVICE_GPU_PACKER_H

#include <stdbool.h>
#include <stddef.h>

#include "shoal/shoal.h"

#define SHOAL_GPU_LANES 4

struct shoal_gpu;
struct shoal_gpu_packer;

/* Opens a packer that works in the context of the caller's stream. NULL: the legacy stream, of the thread's current context or
 * else of the first device. ERR_ARGUMENT: the stream of each thread. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_open(struct shoal_gpu *gpu, void *stream,
                                                       struct shoal_gpu_packer **packer_out);
/* All its memory was released. NULL is allowed. */
void shoal_gpu_packer_close(struct shoal_gpu_packer *packer);

/* Loads the kernels, once: add, scale and the casts need them. Errors are those of shoal_gpu_kernels_open. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_load(struct shoal_gpu_packer *packer);

bool shoal_gpu_packer_has_kernels(const struct shoal_gpu_packer *packer);

int shoal_gpu_packer_device(const struct shoal_gpu_packer *packer);

/* Whether memory of the packer's device can be used: a context of its own may lie elsewhere. */
bool shoal_gpu_packer_serves(const struct shoal_gpu_packer *packer, int device, const void *context);

/* Memory of zeros, for all lanes and the caller's stream from then on. release waits for the lanes. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_allocate(struct shoal_gpu_packer *packer, size_t bytes, void **memory_out);
void shoal_gpu_packer_release(struct shoal_gpu_packer *packer, void *memory);

/* Whether work can be put on the caller's stream. ERR_UNSUPPORTED: it is being captured into a graph. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_check(struct shoal_gpu_packer *packer);

/* The stream of a lane, for options.stream. */
void *shoal_gpu_packer_lane(const struct shoal_gpu_packer *packer, int lane);

/* Work that is put on the lane comes after all that is on the caller's stream now. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_begin(struct shoal_gpu_packer *packer, int lane);

/* Work that is put on the caller's stream comes after all that is on the lane now. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_join(struct shoal_gpu_packer *packer, int lane);

/* A failed step: the same for all lanes. Where the driver refuses this thread waits for the lane, which nothing holds up any
 * more. */
void shoal_gpu_packer_give_back(struct shoal_gpu_packer *packer);

SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_copy(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                       const void *source, size_t bytes);

/* Writes zeros. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_clear(struct shoal_gpu_packer *packer, int lane, void *dest, size_t bytes);

/* To host memory, and from there, which stay until the lanes are settled. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_fetch(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                        const void *source, size_t bytes);
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_store(struct shoal_gpu_packer *packer, int lane, void *dest,
                                                        const void *source, size_t bytes);

/* Waits until the lanes have run all that was put on them. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_settle(struct shoal_gpu_packer *packer);

/* dest[i] += source[i]; needs the kernels, as what follows. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_add(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                      void *dest, const void *source, size_t count);

/* values[i] *= factor, which is rounded to the type, or to float32 for one of 16 bits. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_packer_scale(struct shoal_gpu_packer *packer, int lane, enum shoal_type type,
                                                        void *values, size_t count, double factor);

/* Those of device/gpu.h. */
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
