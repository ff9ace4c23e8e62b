/* The computations of compression, where gradients lie, and copies of what they keep: by the kernels of the processor
 * (fusion/gradient_kernels.h), at once, or by those of the device, put on the lane of a buffer, with the same bits. They fail
 * on a device alone, as its driver refuses. */
#ifndef SHOAL_FUSION_COMPUTE_H
#define SHOAL_FUSION_COMPUTE_H

#include "fusion/reducer.h"

/* Casts to the 16 bits of options.compression, and from them. */
SHOAL_MUST_USE enum shoal_status fusion_narrow(const struct shoal_reducer *reducer, size_t buffer, uint16_t *dest,
                                               const float *source, size_t count, float factor);
SHOAL_MUST_USE enum shoal_status fusion_widen(const struct shoal_reducer *reducer, size_t buffer, float *dest,
                                              const uint16_t *source, size_t count);

SHOAL_MUST_USE enum shoal_status fusion_quantize(const struct shoal_reducer *reducer, size_t buffer, int8_t *values,
                                                 float *scales, const float *source, float *error, size_t count);
SHOAL_MUST_USE enum shoal_status fusion_dequantize(const struct shoal_reducer *reducer, size_t buffer, float *dest,
                                                   const int8_t *values, const float *scales, size_t count, float factor,
                                                   bool adds);

/* Copies to memory of the host, or from there. Both sides stay until fusion_settle, which waits for the device. */
SHOAL_MUST_USE enum shoal_status fusion_save(const struct shoal_reducer *reducer, size_t buffer, char *to, const float *from,
                                             size_t count);
SHOAL_MUST_USE enum shoal_status fusion_restore(const struct shoal_reducer *reducer, size_t buffer, float *to, const char *from,
                                                size_t count);
SHOAL_MUST_USE enum shoal_status fusion_settle(const struct shoal_reducer *reducer);

#endif
