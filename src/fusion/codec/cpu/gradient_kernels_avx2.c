/* The gradient kernels for AVX2; meson.build sets the flags. */
#define KERNELS_NAME "avx2"
#define KERNELS_SYMBOL shoal_gradient_kernels_avx2
#include "fusion/codec/cpu/gradient_kernel_body.h"
