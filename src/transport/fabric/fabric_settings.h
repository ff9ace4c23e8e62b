/* Settings of the network between hosts. */
#ifndef SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H
#define SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H

#include "base/setting.h"

struct shoal_fabric_settings {
    char libfabric[SHOAL_SETTING_TEXT_MAX];
    char provider[SHOAL_SETTING_TEXT_MAX];
    char writes[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_fabric_setting_table;

#endif
