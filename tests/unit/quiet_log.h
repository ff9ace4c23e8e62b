/* A log that prints nothing, with the settings of the environment: the set-up and tear-down of a group of tests. One per
 * program. */
#ifndef SHOAL_TESTS_UNIT_QUIET_LOG_H
#define SHOAL_TESTS_UNIT_QUIET_LOG_H

#include "base/log.h"
#include "comm/settings.h"

static struct shoal_log quiet;
static struct shoal_settings settings;

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static int open_log(void **state)
{
    char error[256];
    (void)state;
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        return -1;
    shoal_log_init(&quiet, &settings.log, swallow, NULL);
    return 0;
}

static int close_log(void **state)
{
    (void)state;
    shoal_log_fini(&quiet);
    return 0;
}

#endif
