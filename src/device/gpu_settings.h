/* Settings that concern operands on a device. */
#ifndef SHOAL_DEVICE_GPU_SETTINGS_H
#define SHOAL_DEVICE_GPU_SETTINGS_H

#include "base/setting.h"

#define SHOAL_GPU_EARLY_MAX 64

struct shoal_gpu_settings {
    uint64_t unit_bytes;
    uint64_t early;
    uint64_t gdrcopy_bytes;
    uint64_t peer_bytes;
};
extern const struct shoal_setting_table shoal_gpu_setting_table;

/* Returns the size of a unit, in whole pages. */
static inline size_t shoal_gpu_unit_bytes(const struct shoal_gpu_settings *settings)
{
    return shoal_round_up((size_t)settings->unit_bytes, SHOAL_PAGE);
}

#endif
