/* The kernels for AVX2; meson.build sets the flags. */
#define KERNELS_NAME "avx2"
#define KERNELS_SYMBOL shoal_kernels_avx2
#include "kernels/kernel_body.h"
