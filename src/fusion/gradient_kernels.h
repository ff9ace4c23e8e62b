/* The computations on gradients on their way into a buffer and out of it: one pass over memory each.
 *
 * Written once (cpu/gradient_kernel_body.h) and compiled for each instruction set; no result depends on which one runs, nor on
 * the caller's floating-point state. Reentrant. */
#ifndef SHOAL_FUSION_GRADIENT_KERNELS_H
#define SHOAL_FUSION_GRADIENT_KERNELS_H

#include "fusion/fusion.h"

#define SHOAL_GRADIENT_SQUARED_CHUNK ((size_t)4096) /* elements */

/* dest[i] = source[i] * factor, or dest[i] + source[i] * factor where `adds`. 16-bit values are computed in float32 and rounded
 * once, to nearest even. *squared, where it is not NULL, grows by the squares of what dest then holds: in double, chunk by
 * chunk of 4,096 elements, each in 16 partial sums of every 16th element that are added in a fixed order. dest may be source;
 * otherwise they may not overlap. With dest NULL nothing is written. Pointers need the element's alignment only. */
typedef void (*shoal_gradient_move_fn)(void *dest, const void *source, size_t count, double factor, bool adds, double *squared);

/* Casts between float32 and a 16-bit type, of source * factor. A NaN stays a NaN. */
typedef void (*shoal_gradient_narrow_fn)(uint16_t *dest, const float *source, size_t count, float factor);
typedef void (*shoal_gradient_widen_fn)(float *dest, const uint16_t *source, size_t count, float factor);

/* For each block of SHOAL_GRADIENT_BLOCK values (the last one may be shorter): u = source + error (NULL: none), scale = the
 * largest |u| / 127, values = u / scale to nearest even, and, where error is given, error = u - values * scale. NaN or infinity
 * in a block makes its scale NaN, its error zero. */
#define SHOAL_GRADIENT_BLOCK ((size_t)256)
typedef void (*shoal_gradient_quantize_fn)(int8_t *values, float *scales, const float *source, float *error, size_t count);

/* dest = values * scale * factor, or dest + that where `adds`. */
typedef void (*shoal_gradient_dequantize_fn)(float *dest, const int8_t *values, const float *scales, size_t count, float factor,
                                             bool adds);

struct shoal_gradient_kernels {
    const char *name;                            /* "avx512", "avx2", "baseline" */
    shoal_gradient_move_fn move[SHOAL_TYPE_END]; /* NULL for integers */
    shoal_gradient_narrow_fn to_float16, to_bfloat16;
    shoal_gradient_widen_fn from_float16, from_bfloat16;
    shoal_gradient_quantize_fn quantize;
    shoal_gradient_dequantize_fn dequantize;
};

/* Those that this processor can run, best first: 0, 1, ... until NULL. 0 is never NULL. */
const struct shoal_gradient_kernels *shoal_gradient_kernels_at(int index);

#endif
