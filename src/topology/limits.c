#include "topology/limits.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

/* The processor quota of the container in whole cores, rounded down but at least 1; 0 when there is none. */
static int quota_cores(void)
{
    static const char *const paths[] = {"/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"};
    long quota = -1, period = 100000;
    FILE *file = fopen(paths[0], "re");
    if (file) {
        if (fscanf(file, "%ld %ld", &quota, &period) != 2)
            quota = -1;
        fclose(file);
    } else if ((file = fopen(paths[1], "re"))) {
        if (fscanf(file, "%ld", &quota) != 1)
            quota = -1;
        fclose(file);
    }
    if (quota <= 0 || period <= 0)
        return 0;
    return quota >= period ? (int)(quota / period) : 1;
}

struct shoal_core_limits shoal_topology_core_limits(void)
{
    cpu_set_t mask;
    return (struct shoal_core_limits){.online = (int)sysconf(_SC_NPROCESSORS_ONLN),
                                      .allowed = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1,
                                      .quota = quota_cores()};
}

int shoal_topology_cores(void)
{
    const struct shoal_core_limits limits = shoal_topology_core_limits();
    return limits.quota && limits.quota < limits.allowed ? limits.quota : limits.allowed;
}

/* ---- How much memory is left --------------------------------------------------------------------------------------------- */

static bool read_number(const char *path, uint64_t *value_out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    unsigned long long value;
    const bool found = fscanf(file, "%llu", &value) == 1; /* "max" is no number: no limit */
    fclose(file);
    if (found)
        *value_out = value;
    return found;
}

/* The value of `key` in a file of lines "key value". */
static bool read_key(const char *path, const char *key, uint64_t *value_out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) {
        const size_t length = strlen(key);
        unsigned long long value;
        if (strncmp(line, key, length) == 0 && sscanf(line + length, " %llu", &value) == 1) {
            *value_out = value;
            found = true;
        }
    }
    fclose(file);
    return found;
}

/* The directory of this process's memory cgroup: version 2 ("0::/path") or the memory controller of version 1. */
static bool find_cgroup(char *directory, size_t bytes, bool *is_v2_out)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return false;
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        const bool is_v2 = strncmp(line, "0", 1) == 0 && controllers[1] == 0;
        const bool is_memory = strstr(controllers + 1, "memory") != NULL;
        if (!is_v2 && !is_memory)
            continue;
        snprintf(directory, bytes, "/sys/fs/cgroup%s%s", is_v2 ? "" : "/memory", strcmp(path, "/") ? path : "");
        char probe[1200];
        snprintf(probe, sizeof probe, "%s/%s", directory, is_v2 ? "memory.current" : "memory.usage_in_bytes");
        found = access(probe, R_OK) == 0;
        if (!found) { /* inside a container the path of the host does not exist: the root is the container's */
            snprintf(directory, bytes, "/sys/fs/cgroup%s", is_v2 ? "" : "/memory");
            snprintf(probe, sizeof probe, "%s/%s", directory, is_v2 ? "memory.current" : "memory.usage_in_bytes");
            found = access(probe, R_OK) == 0;
        }
        *is_v2_out = is_v2;
    }
    fclose(file);
    return found;
}

/* What one group's own limit leaves. */
static uint64_t group_left(const char *directory, bool is_v2)
{
    char path[1200];
    uint64_t limit, used, cache = 0;
    snprintf(path, sizeof path, "%s/%s", directory, is_v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!read_number(path, &limit))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", directory, is_v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!read_number(path, &used))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    read_key(path, is_v2 ? "inactive_file" : "total_inactive_file", &cache); /* the kernel gives these pages back first */
    used -= used < cache ? used : cache;
    return limit > used ? limit - used : 0;
}

/* The least of the group and those it lies in: a limit may be set at any of them. */
static uint64_t cgroup_left(void)
{
    char directory[1100];
    bool is_v2;
    if (!find_cgroup(directory, sizeof directory, &is_v2))
        return UINT64_MAX;
    const size_t root = strlen(is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    uint64_t least = group_left(directory, is_v2);
    while (strlen(directory) > root) {
        *strrchr(directory, '/') = 0;
        const uint64_t left = group_left(directory, is_v2);
        least = left < least ? left : least;
    }
    return least;
}

struct shoal_memory_limits shoal_topology_memory_limits(void)
{
    uint64_t kib;
    return (struct shoal_memory_limits){.machine = read_key("/proc/meminfo", "MemAvailable:", &kib) ? kib * 1024 : UINT64_MAX,
                                        .container = cgroup_left()};
}

uint64_t shoal_topology_memory_left(void)
{
    const struct shoal_memory_limits limits = shoal_topology_memory_limits();
    return limits.machine < limits.container ? limits.machine : limits.container;
}
