#include "device/gpu_settings.h"

#define OF(field) offsetof(struct shoal_gpu_settings, field)
static const struct shoal_setting settings_of_gpu[] = {
    {.name = "SHOAL_GPU_UNIT_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(unit_bytes),
     .preset = "1M",
     .least = 4096,
     .most = UINT64_C(64) << 20,
     .text = "size of a copy between a device and host memory; a smaller one begins sooner and needs less registered memory, a "
             "larger one needs fewer calls of the driver"},
    {.name = "SHOAL_GPU_EARLY",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(early),
     .preset = "8",
     .least = 0,
     .most = SHOAL_GPU_EARLY_MAX,
     .text =
         "for how many communicators the streams and registered memory that operands on a device pass through are made early: "
         "at the first call with such an operand, and when a communicator is made after it. Others get theirs at their own "
         "first call, which may wait until the device has nothing to do"},
};
#undef OF
const struct shoal_setting_table shoal_gpu_setting_table = {settings_of_gpu, SHOAL_COUNT_OF(settings_of_gpu)};
