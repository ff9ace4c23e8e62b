/* The gradient kernels for AVX-512 F, BW, VL and DQ; meson.build sets the flags. */
#define KERNELS_NAME "avx512"
#define KERNELS_SYMBOL shoal_gradient_kernels_avx512
#include "fusion/codec/cpu/gradient_kernel_body.h"
