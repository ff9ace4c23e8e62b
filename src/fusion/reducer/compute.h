/* The computations of compression, and copies of the arrays that they keep. In host memory the processor's kernels do them at
 * once (fusion/gradient_kernels.h). On a device they are put on a buffer's lane, with bitwise equal results. They fail only on
 * a device, if its driver refuses. */
#ifndef SHOAL_FUSION_COMPUTE_H
#define SHOAL_FUSION_COMPUTE_H

#include "fusion/reducer/reducer.h"

/* Casts to the 16-bit type of options.compression, and from it. */
SHOAL_MUST_USE enum shoal_status fusion_narrow(const struct shoal_reducer *reducer, size_t buffer, uint16_t *dest,
                                               const float *source, size_t count, float factor);
SHOAL_MUST_USE enum shoal_status fusion_widen(const struct shoal_reducer *reducer, size_t buffer, float *dest,
                                              const uint16_t *source, size_t count);

SHOAL_MUST_USE enum shoal_status fusion_quantize(const struct shoal_reducer *reducer, size_t buffer, int8_t *values,
                                                 float *scales, const float *source, float *error, size_t count);
SHOAL_MUST_USE enum shoal_status fusion_dequantize(const struct shoal_reducer *reducer, size_t buffer, float *dest,
                                                   const int8_t *values, const float *scales, size_t count, float factor,
                                                   bool adds);

/* Copies to host memory, or from it. The caller keeps both sides valid until fusion_settle, which waits for the device. */
SHOAL_MUST_USE enum shoal_status fusion_save(const struct shoal_reducer *reducer, size_t buffer, char *to, const float *from,
                                             size_t count);
SHOAL_MUST_USE enum shoal_status fusion_restore(const struct shoal_reducer *reducer, size_t buffer, float *to, const char *from,
                                                size_t count);
SHOAL_MUST_USE enum shoal_status fusion_settle(const struct shoal_reducer *reducer);

#endif
