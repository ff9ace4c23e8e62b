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
     .text = "for so many communicators, streams and registered memory for operands on a device are made at the first such "
             "call, or at creation after it; for others at their own first call"},
    {.name = "SHOAL_GDRCOPY_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(gdrcopy_bytes),
     .preset = "8K",
     .least = 0,
     .most = 64 << 10,
     .text = "where GDRCopy is found, results on a device of at most so many bytes are written there by the processor, and not "
             "copied by the device; 0: none are"},
    {.name = "SHOAL_GPU_PEER_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(peer_bytes),
     .preset = "0",
     .is_agreed = true,
     .text = "GPUs of a host that reach each other's memory sum all-reduces of so many bytes and more among themselves, and of "
             "several hosts only slices leave them; 0: never"},
};
#undef OF
const struct shoal_setting_table shoal_gpu_setting_table = {settings_of_gpu, SHOAL_COUNT_OF(settings_of_gpu)};
