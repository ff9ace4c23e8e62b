/* Reduction kernels: k source arrays into m destination arrays, element by element, in one pass with one rounding.
 *
 * Each operator is written once, in portable C over vectors (cpu/kernel_body.h), and compiled once per instruction set;
 * the best one the processor has is chosen when a context is made. No result depends on that choice, nor on the caller's
 * floating-point state. Reentrant, allocates nothing. */
#ifndef SHOAL_DEVICE_KERNELS_H
#define SHOAL_DEVICE_KERNELS_H

#include "base/setting.h"

struct shoal_kernels_settings {
    char kernels[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_kernels_setting_table;

/* How destinations are written. Streaming stores bypass the caches: right for large staging buffers that another core reads
 * next when the cores share no cache. */
enum shoal_stores { SHOAL_STORES_CACHED, SHOAL_STORES_STREAMING };

/* dests[j][i] = op over sources[0..k-1][i], in that order, for i < count. k, m >= 1. Pointers need the element's alignment
 * only. A destination may be the same array as a source, never overlap one otherwise. After streaming stores the kernel issues
 * the fence that orders them before later stores.
 *
 * argument is of avg the divisor: the number of ranks, or, of float16, a number up to 1 (shoal_kernels_pass). Of scaled sum it
 * is the scale, for integers a whole number in the range of int64_t. Others do not read it. */
typedef void (*shoal_reduce_fn)(void *const *dests, int dest_count, const void *const *sources, int source_count, size_t count,
                                double argument, enum shoal_stores stores);

/* Whether one source alone is copied as it is: there is nothing to divide or multiply. */
static inline bool shoal_kernels_copy_one(enum shoal_op op, double argument)
{
    return (op != SHOAL_AVG && op != SHOAL_SCALED_SUM) || argument == 1;
}

/* Over several hosts a reduction takes several passes, which store their results in the elements' type: FIRST reads inputs,
 * MIDDLE reads what other passes have stored, LAST completes the result. */
enum shoal_pass { SHOAL_PASS_FIRST, SHOAL_PASS_MIDDLE, SHOAL_PASS_LAST };

struct shoal_reduction {
    enum shoal_op op;
    double argument;
};

/* The operator of a pass. A scaled sum is scaled in the first pass, an average is divided in the last one. An average of
 * float16 is scaled in the first pass by 1 / P, P being the smallest power of two that is not below the number of ranks, and
 * divided by ranks / P in the last one. So with up to 2048 ranks no stored sum exceeds the largest float16; and as P is a power
 * of two, only bits below the smallest float16 (2^-24) are lost.
 *
 * Why none exceeds it. Let M = 65504, the largest float16, and v(m) the largest stored sum of m inputs, in units of M / P. All
 * operations are monotone, so v(m) is the sum of inputs that are all M. M is 2047 * 2^5. So for m < 2048 a float16 can hold
 * m * M, or the float16 below it is nearer than the one above it: v(m) <= m, and the same is true of sums of stored sums. */
struct shoal_reduction shoal_kernels_pass(enum shoal_type type, struct shoal_reduction whole, enum shoal_pass pass);

/* Copies bytes to m destinations; same rules. */
typedef void (*shoal_copy_fn)(void *const *dests, int dest_count, const void *source, size_t bytes, enum shoal_stores stores);

struct shoal_kernels {
    const char *name;                                     /* "avx512", "avx2", "baseline" */
    shoal_reduce_fn reduce[SHOAL_TYPE_END][SHOAL_OP_END]; /* NULL: the type has no such operator (floats: the bitwise ones) */
    shoal_copy_fn copy;
};

/* The kernels of that name, or with "auto" the best this processor has. NULL when the processor (or the build) has no such. */
const struct shoal_kernels *shoal_kernels_find(const char *name);

/* Those that this processor can run, best first: 0, 1, ... until NULL. */
const struct shoal_kernels *shoal_kernels_at(int index);

#endif
