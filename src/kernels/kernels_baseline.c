/* The kernels for the compiler's default target; meson.build sets the flags. */
#define KERNELS_NAME "baseline"
#define KERNELS_SYMBOL shoal_kernels_baseline
#include "kernels/kernel_body.h"
