#include "transport/fabric/fabric_filter.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define VARIABLE "FI_PROVIDER"
#define VENDOR_AMAZON "0x1d0f" /* PCI vendor; its only RDMA devices are EFA's */

enum filter_needs { NEEDS_NOTHING, NEEDS_EFA, NEEDS_VERBS };

/* The providers below those that Shoal uses (fabric_providers.c): libfabric filters the layered "verbs;ofi_rxm" by its first
 * half. */
static const struct {
    const char *name;
    enum filter_needs needs;
    bool is_on_request;
} filter_known[] = {
    {"efa", NEEDS_EFA, false},     {"verbs", NEEDS_VERBS, false}, {"tcp", NEEDS_NOTHING, false},
    {"net", NEEDS_NOTHING, false}, {"udp", NEEDS_NOTHING, true},
};

/* ---- The adapters of this host ------------------------------------------------------------------------------------------- */

static bool is_amazons(const char *devices, const char *name)
{
    char path[512], vendor[32] = "";
    snprintf(path, sizeof path, "%s/%s/device/vendor", devices, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return false; /* a software adapter has no bus */
    const bool is_read = fgets(vendor, sizeof vendor, file) != NULL;
    fclose(file);
    return is_read && strncmp(vendor, VENDOR_AMAZON, strlen(VENDOR_AMAZON)) == 0;
}

static bool has_adapter(enum filter_needs needs, const char *devices)
{
    DIR *folder = opendir(devices);
    bool found = false;
    if (!folder)
        return false;
    for (const struct dirent *entry; !found && (entry = readdir(folder));)
        found = entry->d_name[0] != '.' && is_amazons(devices, entry->d_name) == (needs == NEEDS_EFA);
    closedir(folder);
    return found;
}

/* ---- The filter ---------------------------------------------------------------------------------------------------------- */

static bool is_name(const char *text, size_t bytes, const char *name)
{
    return bytes == strlen(name) && strncasecmp(text, name, bytes) == 0;
}

/* Returns true if the filter contains the name. Commas separate names; a layered one may be written in full
 * ("verbs;ofi_rxm"). */
static bool filter_names(const char *filter, const char *name)
{
    const char *at = filter;
    while (*at) {
        const size_t bytes = strcspn(at, ",;");
        if (is_name(at, bytes, name))
            return true;
        at += bytes + (at[bytes] != 0);
    }
    return false;
}

bool shoal_fabric_filter_leaves_any(const char *filter, const char *wanted, const char *devices)
{
    if (filter[0] == '^')
        return true;
    for (size_t i = 0; i < SHOAL_COUNT_OF(filter_known); i++) {
        const char *name = filter_known[i].name;
        const bool is_meant = wanted[0] ? is_name(wanted, strcspn(wanted, ";"), name) : !filter_known[i].is_on_request;
        if (is_meant && filter_names(filter, name) &&
            (filter_known[i].needs == NEEDS_NOTHING || has_adapter(filter_known[i].needs, devices)))
            return true;
    }
    return false;
}

/* The text that replaces the entry. */
static char hidden[] = "_" VARIABLE "=hidden by Shoal for a moment";

/* Replaces the entry that begins with a text, and returns it, or NULL if there is none. Only a pointer changes, so another
 * thread's getenv finds one text or the other; setenv might move the whole environment during that thread's search. */
static char *entry_replace(const char *beginning, char *with)
{
    for (char **at = environ; at && *at; at++) {
        char *entry = *at;
        if (strncmp(entry, beginning, strlen(beginning)) != 0)
            continue;
        *at = with;
        return entry;
    }
    return NULL;
}

char *shoal_fabric_filter_hide(const char *wanted, struct shoal_log *log)
{
    const char *filter = shoal_setting_from_environment(VARIABLE);
    if (!filter || shoal_fabric_filter_leaves_any(filter, wanted, SHOAL_FABRIC_DEVICES))
        return NULL;
    shoal_log_line(log, log->rank > 0 ? SHOAL_LOG_INFO : SHOAL_LOG_WARN, "fabric",
                   "%s=%.60s is ignored: it leaves libfabric no provider that %s; use SHOAL_PROVIDER to choose one only for "
                   "Shoal",
                   VARIABLE, filter, wanted[0] ? "SHOAL_PROVIDER names" : "can serve this host");
    return entry_replace(VARIABLE "=", hidden);
}

void shoal_fabric_filter_restore(char *entry)
{
    if (entry)
        (void)entry_replace(hidden, entry);
}
