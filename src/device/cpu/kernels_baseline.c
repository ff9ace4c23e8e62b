/* The kernels for whatever the compiler's default target has; meson.build gives the flags. */
#define KERNELS_NAME "baseline"
#define KERNELS_SYMBOL shoal_kernels_baseline
#include "device/cpu/kernel_body.h"
