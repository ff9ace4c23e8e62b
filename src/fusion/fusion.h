/* Shared by all files of the gradient engine. src/fusion uses only the public header. The only other headers of the library
 * that it includes are base/assert.h and base/struct_bytes.h and, for gradients on a device, comm/packers.h and
 * device/gpu_packer.h. No state. */
#ifndef SHOAL_FUSION_FUSION_H
#define SHOAL_FUSION_FUSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/struct_bytes.h"
#include "shoal/gradients.h"

#define FUSION_TRY(call)                               \
    do {                                               \
        enum shoal_status fusion_try_status_ = (call); \
        if (fusion_try_status_ != SHOAL_OK)            \
            return fusion_try_status_;                 \
    } while (0)

#define FUSION_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FUSION_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))

/* Parameters, and each rank's share of a buffer, begin at multiples of this. */
#define FUSION_ALIGNMENT ((size_t)64)

/* Bytes of one line for people, with the terminating zero. */
#define FUSION_TEXT_MAX 512

static inline size_t fusion_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t fusion_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Returns n rounded up to a multiple of unit, which need not be a power of two. */
static inline size_t fusion_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Returns the square root, with the same bits on every machine; x itself if x is negative, NaN or infinite. The library does
 * not link libm. */
double fusion_square_root(double x);

/* Monotonic clock. */
static inline uint64_t fusion_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Returns options of an operation with that deadline. */
static inline struct shoal_options fusion_deadline(uint32_t timeout_ms)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = timeout_ms;
    return options;
}

#endif
