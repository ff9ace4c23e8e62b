/* How many threads a rank works with. */
#ifndef SHOAL_HELPERS_HELPERS_SETTINGS_H
#define SHOAL_HELPERS_HELPERS_SETTINGS_H

#include "base/setting.h"

#define SHOAL_HELPERS_MAX 64 /* threads of a rank, with the one that makes progress */

struct shoal_helpers_settings {
    char threads[SHOAL_SETTING_TEXT_MAX]; /* "auto", or a number from 1 to SHOAL_HELPERS_MAX */
};
extern const struct shoal_setting_table shoal_helpers_setting_table;

/* Returns the number that SHOAL_THREADS fixes, or 0 for auto. */
int shoal_helpers_fixed_threads(const struct shoal_helpers_settings *settings);

#endif
