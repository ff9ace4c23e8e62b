/* The computations on gradients on their way into a buffer and out of it. Each passes over memory once.
 *
 * They are written once (cpu/gradient_kernel_body.h) and compiled for each instruction set. Results do not depend on the
 * instruction set or on the caller's floating-point state. Reentrant. */
#ifndef SHOAL_FUSION_GRADIENT_KERNELS_H
#define SHOAL_FUSION_GRADIENT_KERNELS_H

#include "fusion/codec/update_kernels.h"

#define SHOAL_GRADIENT_SQUARED_CHUNK ((size_t)4096) /* elements */

/* dest[i] = source[i] * factor, or dest[i] + source[i] * factor if `adds`. 16-bit values are computed in float32 and rounded
 * once, to nearest even. If squared is not NULL, *squared grows by the squares of the values then in dest: in double, by chunks
 * of 4,096 elements, each in 16 partial sums of every 16th element that are added in a fixed order. dest may be source;
 * otherwise they must not overlap. With dest NULL nothing is written. Pointers need only the element's alignment. */
typedef void (*shoal_gradient_move_fn)(void *dest, const void *source, size_t count, double factor, bool adds, double *squared);

/* Casts source * factor between float32 and a 16-bit type. A NaN stays a NaN. */
typedef void (*shoal_gradient_narrow_fn)(uint16_t *dest, const float *source, size_t count, float factor);
typedef void (*shoal_gradient_widen_fn)(float *dest, const uint16_t *source, size_t count, float factor);

/* For each block of SHOAL_GRADIENT_BLOCK values (the last one may be shorter): u = source + error (NULL: none), scale = the
 * largest |u| / 127, values = u / scale to nearest even and, if error is not NULL, error = u - values * scale. NaN or infinity
 * in a block makes its scale NaN and its error zero. */
#define SHOAL_GRADIENT_BLOCK ((size_t)256)
typedef void (*shoal_gradient_quantize_fn)(int8_t *values, float *scales, const float *source, float *error, size_t count);

/* dest = values * scale * factor, or dest + values * scale * factor if `adds`. */
typedef void (*shoal_gradient_dequantize_fn)(float *dest, const int8_t *values, const float *scales, size_t count, float factor,
                                             bool adds);

struct shoal_gradient_kernels {
    const char *name;                            /* "avx512", "avx2", "baseline" */
    shoal_gradient_move_fn move[SHOAL_TYPE_END]; /* NULL for integers */
    shoal_gradient_narrow_fn to_float16, to_bfloat16;
    shoal_gradient_widen_fn from_float16, from_bfloat16;
    shoal_gradient_quantize_fn quantize;
    shoal_gradient_dequantize_fn dequantize;
    shoal_update_fn update[SHOAL_RULE_END][SHOAL_TYPE_END]; /* NULL for integers */
    shoal_moments_fn moments[SHOAL_TYPE_END];
};

/* Returns the kernels that this processor can run, best first: 0, 1, ... until NULL. 0 is never NULL. */
const struct shoal_gradient_kernels *shoal_gradient_kernels_at(int index);

#endif
