/* The gradient kernels for whatever the compiler's default target has; meson.build gives the flags. */
#define KERNELS_NAME "baseline"
#define KERNELS_SYMBOL shoal_gradient_kernels_baseline
#include "fusion/cpu/gradient_kernel_body.h"
