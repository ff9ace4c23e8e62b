/* Reduction kernels: they combine k source arrays into m destination arrays, element by element, in one pass with one rounding.
 *
 * Each operator is written once, in portable C over vectors (kernel_body.h), and compiled once per instruction set. A new
 * context chooses the best set that the processor has. No result depends on that choice, or on the caller's floating-point
 * state. Reentrant. Allocates nothing. */
#ifndef SHOAL_KERNELS_KERNELS_H
#define SHOAL_KERNELS_KERNELS_H

#include "base/setting.h"

struct shoal_kernels_settings {
    char kernels[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_kernels_setting_table;

/* How destinations are written. Streaming stores bypass the caches. They suit large staging buffers that another core reads
 * next, if the cores share no cache. */
enum shoal_stores { SHOAL_STORES_CACHED, SHOAL_STORES_STREAMING };

/* dests[j][i] = op over sources[0..k-1][i], in that order, for i < count. k, m >= 1. Pointers need only the element's
 * alignment. A destination may be the same array as a source, and must not overlap one otherwise. After streaming stores the
 * kernel issues the fence that orders them before later stores.
 *
 * argument: for avg the divisor, which is the number of ranks, or for float16 a number up to 1 (shoal_kernels_pass()); for
 * scaled sum the scale, which for integers is a whole number in the range of int64_t. Other operators do not read it. */
typedef void (*shoal_reduce_fn)(void *const *dests, int dest_count, const void *const *sources, int source_count, size_t count,
                                double argument, enum shoal_stores stores);

/* Returns true if a single source is copied unchanged, because there is nothing to divide or multiply. */
static inline bool shoal_kernels_copy_one(enum shoal_op op, double argument)
{
    return (op != SHOAL_AVG && op != SHOAL_SCALED_SUM) || argument == 1;
}

/* Over several hosts a reduction needs several passes, which store their results in the elements' type. FIRST reads inputs,
 * MIDDLE reads what other passes have stored, and LAST completes the result. */
enum shoal_pass { SHOAL_PASS_FIRST, SHOAL_PASS_MIDDLE, SHOAL_PASS_LAST };

struct shoal_reduction {
    enum shoal_op op;
    double argument;
};

/* Returns the operator of a pass. A scaled sum is scaled in the first pass, an average is divided in the last one. An average
 * of float16 is scaled in the first pass by 1 / P, and divided by ranks / P in the last one. P is the smallest power of two
 * that is not below the number of ranks. So with up to 2048 ranks no stored sum exceeds the largest float16. As P is a power of
 * two, only bits below the smallest float16 (2^-24) are lost.
 *
 * Why no sum exceeds it: Let M = 65504, the largest float16, and v(m) the largest stored sum of m inputs, in units of M / P.
 * All operations are monotone, so v(m) is the sum of inputs that are all M. M is 2047 * 2^5. So for m < 2048 a float16 can hold
 * m * M, or the float16 below it is nearer than the one above it: v(m) <= m, and the same is true of sums of stored sums. */
struct shoal_reduction shoal_kernels_pass(enum shoal_type type, struct shoal_reduction whole, enum shoal_pass pass);

/* Copies bytes to m destinations, under the same rules. */
typedef void (*shoal_copy_fn)(void *const *dests, int dest_count, const void *source, size_t bytes, enum shoal_stores stores);

struct shoal_kernels {
    const char *name;                                     /* "avx512", "avx2", "baseline" */
    shoal_reduce_fn reduce[SHOAL_TYPE_END][SHOAL_OP_END]; /* NULL: the type has no such operator (floats: no bitwise ones) */
    shoal_copy_fn copy;
};

/* Returns the kernels of that name, or for "auto" the best that this processor has. Returns NULL if the processor or the build
 * does not have them. */
const struct shoal_kernels *shoal_kernels_find(const char *name);

/* Returns the kernels that this processor can run, best first, for index 0, 1, ...; NULL at the end. */
const struct shoal_kernels *shoal_kernels_at(int index);

#endif
