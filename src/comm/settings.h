/* The settings of all modules: collects their tables in one place. Parsing, printing and the comparison between ranks use these
 * tables. Settings are read once, when a context is made, and are constant afterwards. */
#ifndef SHOAL_COMM_SETTINGS_H
#define SHOAL_COMM_SETTINGS_H

#include "base/log.h"
#include "bootstrap/bootstrap_settings.h"
#include "collective/tuning.h"
#include "comm/comm_settings.h"
#include "device/gpu_settings.h"
#include "engine/engine_settings.h"
#include "helpers/helpers_settings.h"
#include "kernels/kernels.h"
#include "memory/memory_settings.h"
#include "topology/nic.h"
#include "transport/fabric/fabric_settings.h"
#include "transport/shm/shm_settings.h"

struct shoal_settings {
    struct shoal_log_settings log;
    struct shoal_comm_settings comm;
    struct shoal_engine_settings engine;
    struct shoal_helpers_settings helpers;
    struct shoal_tuning_settings tuning;
    struct shoal_kernels_settings kernels;
    struct shoal_gpu_settings gpu;
    struct shoal_bootstrap_settings bootstrap;
    struct shoal_memory_settings memory;
    struct shoal_shm_settings shm;
    struct shoal_nic_settings nic;
    struct shoal_fabric_settings fabric;
};

/* Fills *settings_out from the defaults, then the environment (SHOAL_<NAME>), then overrides (a
 * NULL-terminated list of "SHOAL_NAME=value", or NULL). On ERR_ARGUMENT, error (of at least 256 bytes) says which value is
 * wrong and what is allowed. */
SHOAL_MUST_USE enum shoal_status shoal_settings_load(struct shoal_settings *settings_out, const char *const *overrides,
                                                     char *error, size_t error_bytes);

/* Like shoal_settings_load() without overrides, but calls `tell` for each wrong variable and keeps its default. */
void shoal_settings_load_right(struct shoal_settings *settings_out, void (*tell)(void *arg, const char *error), void *arg);

/* Collects the values that ranks must agree on. Call it after one changes; loading calls it itself. */
void shoal_settings_update_agreed(struct shoal_settings *settings);

/* Finds the next variable of the environment that begins with SHOAL_ but is neither a setting nor set by Shoal's programs.
 * Returns false at the end. *at begins as 0. *nearest_out is the setting that it may be meant for, or NULL. */
bool shoal_settings_find_unknown(size_t *at, char name[SHOAL_SETTING_NAME_MAX], const char **nearest_out);

/* Prints the tables, without settings for tests. */
void shoal_settings_print(const struct shoal_settings *settings, FILE *out);

#endif
