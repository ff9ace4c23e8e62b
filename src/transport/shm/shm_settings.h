/* Settings for finding the ranks of one host. */
#ifndef SHOAL_TRANSPORT_SHM_SHM_SETTINGS_H
#define SHOAL_TRANSPORT_SHM_SHM_SETTINGS_H

#include "base/setting.h"

struct shoal_shm_settings {
    char host_id[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_shm_setting_table;

#endif
