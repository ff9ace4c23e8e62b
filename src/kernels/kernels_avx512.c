/* The kernels for AVX-512 F, BW and VL; meson.build sets the flags. */
#define KERNELS_NAME "avx512"
#define KERNELS_SYMBOL shoal_kernels_avx512
#include "kernels/kernel_body.h"
