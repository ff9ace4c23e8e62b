/* The kernels of gradient_kernels.h and update_kernels.h on all threads of a rank (shoal_context_run). A long range is cut at
 * multiples of SHOAL_GRADIENT_SQUARED_CHUNK elements, and sums of squares are added in the order of the chunks, so every
 * function has the same result, bit by bit, as its kernel on one thread. Any thread; several at once. */
#ifndef SHOAL_FUSION_WIDE_KERNELS_H
#define SHOAL_FUSION_WIDE_KERNELS_H

#include "fusion/codec/gradient_kernels.h"

struct fusion_wide {
    struct shoal_context *context;
    const struct shoal_gradient_kernels *kernels;
};

/* See shoal_gradient_move_fn. */
void fusion_wide_move(struct fusion_wide wide, enum shoal_type type, void *dest, const void *source, size_t count,
                      double factor, bool adds, double *squared);
/* See shoal_gradient_narrow_fn and shoal_gradient_widen_fn. */
void fusion_wide_narrow(struct fusion_wide wide, bool is_float16, uint16_t *dest, const float *source, size_t count,
                        float factor);
void fusion_wide_widen(struct fusion_wide wide, bool is_float16, float *dest, const uint16_t *source, size_t count,
                       float factor);
/* See shoal_gradient_quantize_fn and shoal_gradient_dequantize_fn. */
void fusion_wide_quantize(struct fusion_wide wide, int8_t *values, float *scales, const float *source, float *error,
                          size_t count);
void fusion_wide_dequantize(struct fusion_wide wide, float *dest, const int8_t *values, const float *scales, size_t count,
                            float factor, bool adds);
/* See shoal_update_fn. */
void fusion_wide_update(struct fusion_wide wide, enum shoal_rule rule, enum shoal_type type, const struct shoal_update *update,
                        const struct shoal_update_memory *memory, size_t count);
/* See shoal_moments_fn. */
void fusion_wide_moments(struct fusion_wide wide, enum shoal_type type, const struct shoal_update *update,
                         const struct shoal_update_memory *memory, size_t count, double squared[2]);

#endif
