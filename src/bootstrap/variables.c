/* Variables of launchers. */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/sources.h"

const char *shoal_environment_text(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

enum shoal_status shoal_environment_number(const char *name, long least, long most, struct shoal_log *log, bool *found_out,
                                           long *value_out)
{
    const char *text = shoal_environment_text(name);
    *found_out = text != NULL;
    if (!text)
        return SHOAL_OK;
    const bool is_number = strspn(text, "0123456789") == strlen(text) && strlen(text) <= 9;
    const long value = is_number ? strtol(text, NULL, 10) : -1;
    if (value < least || value > most)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "%s is \"%.60s\", but must be a whole number from %ld to %ld", name, text, least, most);
    *value_out = value;
    return SHOAL_OK;
}
