/* Settings that control how operations run and how a rank waits. */
#ifndef SHOAL_ENGINE_ENGINE_SETTINGS_H
#define SHOAL_ENGINE_ENGINE_SETTINGS_H

#include "base/setting.h"

struct shoal_engine_settings {
    uint64_t chunk_bytes;
    uint64_t depth;
    uint64_t inline_bytes;
    uint64_t counter_start;
    char stores[SHOAL_SETTING_TEXT_MAX];
    uint64_t spin_us;
    uint64_t yield_us;
    char move[SHOAL_SETTING_TEXT_MAX];
    char trace_file[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_engine_setting_table;

#endif
