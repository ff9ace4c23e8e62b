/* Settings that concern memory shared by the ranks of a host. */
#ifndef SHOAL_MEMORY_MEMORY_SETTINGS_H
#define SHOAL_MEMORY_MEMORY_SETTINGS_H

#include "base/setting.h"

struct shoal_memory_settings {
    uint64_t memory_limit;
    uint64_t memory_kept;
};
extern const struct shoal_setting_table shoal_memory_setting_table;

#endif
