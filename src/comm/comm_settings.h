/* Settings of communicators and contexts. */
#ifndef SHOAL_COMM_COMM_SETTINGS_H
#define SHOAL_COMM_COMM_SETTINGS_H

#include "base/setting.h"

struct shoal_comm_settings {
    uint64_t timeout_ms;
    uint64_t bootstrap_timeout_ms;
};
extern const struct shoal_setting_table shoal_comm_setting_table;

#endif
