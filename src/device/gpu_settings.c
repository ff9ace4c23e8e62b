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
     .text = "communicators whose streams and registered memory are made early: at the first call with an operand on a device, "
             "or when the communicator is made later; others wait for their own call"},
    {.name = "SHOAL_GDRCOPY_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(gdrcopy_bytes),
     .preset = "8K",
     .least = 0,
     .most = 64 << 10,
     .text = "if GDRCopy is installed, the processor writes results of at most this many bytes to a device, instead of a copy "
             "by the device; 0: it never does"},
    {.name = "SHOAL_GPU_PEER_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(peer_bytes),
     .preset = "0",
     .is_agreed = true,
     .text = "GPUs of a host that reach each other's memory sum all-reduces of at least this many bytes among themselves; on "
             "several hosts, only slices then leave them; 0: never"},
};
#undef OF
const struct shoal_setting_table shoal_gpu_setting_table = {settings_of_gpu, SHOAL_COUNT_OF(settings_of_gpu)};
