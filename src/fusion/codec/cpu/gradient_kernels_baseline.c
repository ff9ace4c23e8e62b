/* The gradient kernels for the compiler's default target; meson.build sets the flags. */
#define KERNELS_NAME "baseline"
#define KERNELS_SYMBOL shoal_gradient_kernels_baseline
#include "fusion/codec/cpu/gradient_kernel_body.h"
