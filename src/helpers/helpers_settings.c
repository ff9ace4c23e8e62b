#include "helpers/helpers_settings.h"

#include <stdlib.h>
#include <string.h>

static int parse_threads(const char *value)
{
    char *end;
    const long threads = strtol(value, &end, 10);
    const bool is_number = value[0] >= '0' && value[0] <= '9' && !*end;
    return is_number && threads >= 1 && threads <= SHOAL_HELPERS_MAX ? (int)threads : 0;
}

static bool is_valid_threads(const char *value)
{
    return strcmp(value, "auto") == 0 || parse_threads(value) > 0;
}

int shoal_helpers_fixed_threads(const struct shoal_helpers_settings *settings)
{
    return parse_threads(settings->threads);
}

#define OF(field) offsetof(struct shoal_helpers_settings, field)
static const struct shoal_setting settings_of_helpers[] = {
    {.name = "SHOAL_THREADS",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(threads),
     .preset = "auto",
     .is_valid = is_valid_threads,
     .form = "auto, or a number of threads from 1 to 64",
     .text = "how many threads of a rank sum and copy large operations, 1 to 64; auto: the cores of the rank without those of "
             "the framework (OMP_NUM_THREADS)"},
};
#undef OF
const struct shoal_setting_table shoal_helpers_setting_table = {settings_of_helpers, SHOAL_COUNT_OF(settings_of_helpers)};
