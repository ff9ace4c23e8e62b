#include "comm/settings.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/spelling.h"

#define PREFIX "SHOAL_"

/* In the order of printing. */
static const struct {
    const struct shoal_setting_table *table;
    size_t offset; /* of the module's struct */
} modules[] = {
    {&shoal_comm_setting_table, offsetof(struct shoal_settings, comm)},
    {&shoal_log_setting_table, offsetof(struct shoal_settings, log)},
    {&shoal_bootstrap_setting_table, offsetof(struct shoal_settings, bootstrap)},
    {&shoal_nic_setting_table, offsetof(struct shoal_settings, nic)},
    {&shoal_fabric_setting_table, offsetof(struct shoal_settings, fabric)},
    {&shoal_memory_setting_table, offsetof(struct shoal_settings, memory)},
    {&shoal_shm_setting_table, offsetof(struct shoal_settings, shm)},
    {&shoal_engine_setting_table, offsetof(struct shoal_settings, engine)},
    {&shoal_helpers_setting_table, offsetof(struct shoal_settings, helpers)},
    {&shoal_tuning_setting_table, offsetof(struct shoal_settings, tuning)},
    {&shoal_kernels_setting_table, offsetof(struct shoal_settings, kernels)},
    {&shoal_gpu_setting_table, offsetof(struct shoal_settings, gpu)},
};

/* Variables that are not settings: `shoal run` sets some for its workers, the Python package reads others. */
static const char *const others[] = {"SHOAL_RUN_TERMINAL", "SHOAL_RESTART",     "SHOAL_LIBRARY",
                                     "SHOAL_TORCH_SHIM",   "SHOAL_TORCH_CACHE", NULL};

/* A setting, and the offset of its module's values in a struct shoal_settings. */
struct found {
    const struct shoal_setting *setting; /* NULL if not found */
    size_t offset;
};

/* Returns setting number i of all modules, from 0. */
static struct found setting_at(size_t i)
{
    for (size_t m = 0; m < SHOAL_COUNT_OF(modules); m++) {
        if (i < modules[m].table->count)
            return (struct found){&modules[m].table->settings[i], modules[m].offset};
        i -= modules[m].table->count;
    }
    return (struct found){NULL, 0};
}

static void *settings_values_of(struct shoal_settings *settings, struct found found)
{
    return (char *)settings + found.offset;
}

static struct found settings_find_name(const char *name)
{
    struct found found;
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        if (strcmp(found.setting->name, name) == 0)
            break;
    }
    return found;
}

/* Returns the setting that `name` may be meant for, or NULL if it is not similar to any. */
static const char *settings_find_nearest(const char *name)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    struct found found;
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return NULL;
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        const size_t distance = shoal_spelling_distance(name + strlen(PREFIX), found.setting->name + strlen(PREFIX));
        if (distance < least) {
            least = distance;
            nearest = found.setting->name;
        }
    }
    return nearest;
}

/* ---- Loading ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status assign_override(struct shoal_settings *settings, const char *text, char *error, size_t error_bytes)
{
    char name[SHOAL_SETTING_NAME_MAX];
    const char *equals = strchr(text, '=');
    snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - text) : 0, text);
    const struct found found = settings_find_name(name);
    if (found.setting)
        return shoal_setting_assign(found.setting, settings_values_of(settings, found), equals + 1, error, error_bytes);
    const char *nearest = settings_find_nearest(name);
    snprintf(error, error_bytes, "\"%.100s\" is not a setting (SHOAL_NAME=value; `shoal info --settings` lists them)%s%s%s",
             text, nearest ? "; did you mean " : "", nearest ? nearest : "", nearest ? "?" : "");
    return SHOAL_ERR_ARGUMENT;
}

void shoal_settings_update_agreed(struct shoal_settings *settings)
{
    struct found found;
    memset(&settings->bootstrap.agreed, 0, sizeof settings->bootstrap.agreed);
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        if (found.setting->is_agreed)
            shoal_agreed_add(&settings->bootstrap.agreed, found.setting, settings_values_of(settings, found));
    }
}

enum shoal_status shoal_settings_load(struct shoal_settings *settings_out, const char *const *overrides, char *error,
                                      size_t error_bytes)
{
    struct shoal_settings settings;
    struct found found;
    memset(&settings, 0, sizeof settings);
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        const char *value = shoal_setting_from_environment(found.setting->name);
        void *values = settings_values_of(&settings, found);
        SHOAL_TRY(shoal_setting_assign(found.setting, values, found.setting->preset, error, error_bytes));
        if (value)
            SHOAL_TRY(shoal_setting_assign(found.setting, values, value, error, error_bytes));
    }
    for (size_t i = 0; overrides && overrides[i]; i++)
        SHOAL_TRY(assign_override(&settings, overrides[i], error, error_bytes));
    shoal_settings_update_agreed(&settings);
    *settings_out = settings;
    return SHOAL_OK;
}

void shoal_settings_load_right(struct shoal_settings *settings_out, void (*tell)(void *arg, const char *error), void *arg)
{
    char error[256];
    struct found found;
    memset(settings_out, 0, sizeof *settings_out);
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        const char *value = shoal_setting_from_environment(found.setting->name);
        void *values = settings_values_of(settings_out, found);
        if (shoal_setting_assign(found.setting, values, found.setting->preset, error, sizeof error) != SHOAL_OK ||
            (value && shoal_setting_assign(found.setting, values, value, error, sizeof error) != SHOAL_OK))
            tell(arg, error);
    }
    shoal_settings_update_agreed(settings_out);
}

/* ---- Names --------------------------------------------------------------------------------------------------------------- */

bool shoal_settings_find_unknown(size_t *at, char name[SHOAL_SETTING_NAME_MAX], const char **nearest_out)
{
    for (; environ && environ[*at]; ++*at) {
        const char *text = environ[*at];
        if (strncmp(text, PREFIX, strlen(PREFIX)) != 0)
            continue;
        snprintf(name, SHOAL_SETTING_NAME_MAX, "%.*s", (int)strcspn(text, "="), text);
        if (settings_find_name(name).setting || shoal_setting_is_one_of(others, name, strlen(name)))
            continue;
        *nearest_out = settings_find_nearest(name);
        ++*at;
        return true;
    }
    return false;
}

void shoal_settings_print(const struct shoal_settings *settings, FILE *out)
{
    struct found found;
    for (size_t i = 0; (found = setting_at(i)).setting; i++) {
        if (!found.setting->is_for_tests)
            shoal_setting_print(found.setting, (const char *)settings + found.offset, out);
    }
}
