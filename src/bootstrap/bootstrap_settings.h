/* The settings for how ranks meet. */
#ifndef SHOAL_BOOTSTRAP_BOOTSTRAP_SETTINGS_H
#define SHOAL_BOOTSTRAP_BOOTSTRAP_SETTINGS_H

#include "base/setting.h"

struct shoal_bootstrap_settings {
    uint64_t warn_ms;
    uint64_t port;
    char ports[SHOAL_SETTING_TEXT_MAX];
    char job_id[SHOAL_SETTING_TEXT_MAX];
    char secret[SHOAL_SETTING_TEXT_MAX];
    char secret_file[SHOAL_SETTING_TEXT_MAX];
    struct shoal_agreed_own agreed; /* the settings of all modules that must agree; filled in by the loader of the settings */
};
extern const struct shoal_setting_table shoal_bootstrap_setting_table;

#endif
