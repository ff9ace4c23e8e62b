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
};
#undef OF
const struct shoal_setting_table shoal_gpu_setting_table = {settings_of_gpu, SHOAL_COUNT_OF(settings_of_gpu)};
