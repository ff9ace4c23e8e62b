#include "topology/limits.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

/* ---- Control groups ------------------------------------------------------------------------------------------------------ */

#define CGROUPS "/sys/fs/cgroup"

/* A control group that contains this process. The group itself or any group that encloses it may set a limit. */
struct cgroup {
    char directory[1100];
    size_t root_length; /* length of the directory at which the tree of groups begins */
    bool is_v2;
};

/* A controller, and a file that each of its groups has in versions 1 and 2. */
struct controller {
    const char *name, *file_v1, *file_v2;
};
static const struct controller of_cores = {"cpu", "cpu.cfs_quota_us", "cpu.stat"};
static const struct controller of_memory = {"memory", "memory.usage_in_bytes", "memory.current"};

static bool is_listed(const char *name, const char *list)
{
    const size_t length = strlen(name);
    while (*list) {
        const size_t word = strcspn(list, ",");
        if (word == length && strncmp(list, name, length) == 0)
            return true;
        list += word + (list[word] == ',');
    }
    return false;
}

static bool is_there(const struct cgroup *group, const struct controller *controller)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", group->directory, group->is_v2 ? controller->file_v2 : controller->file_v1);
    return access(path, R_OK) == 0;
}

/* Moves to the enclosing group. Returns false if the group is the outermost. */
static bool go_up(struct cgroup *group)
{
    if (strlen(group->directory) <= group->root_length)
        return false;
    *strrchr(group->directory, '/') = 0;
    return true;
}

/* Reads a line of /proc/self/cgroup: "0::/path" in version 2, "7:cpu,cpuacct:/path" in version 1 (cgroups(7)). */
static bool read_cgroup(char *line, const struct controller *controller, struct cgroup *group)
{
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path)
        return false;
    *path++ = 0;
    group->is_v2 = strncmp(line, "0:", 2) == 0 && !controllers[1];
    if (!group->is_v2 && !is_listed(controller->name, controllers + 1))
        return false;
    group->root_length = (size_t)snprintf(group->directory, sizeof group->directory, CGROUPS "%s%s", group->is_v2 ? "" : "/",
                                          group->is_v2 ? "" : controller->name);
    if (strcmp(path, "/"))
        snprintf(group->directory + group->root_length, sizeof group->directory - group->root_length, "%s", path);
    /* A group may leave a controller to an enclosing group. Inside a container, the host's path does not exist, but the root
     * does and is the container's own group. */
    while (!is_there(group, controller) && go_up(group))
        continue;
    return is_there(group, controller);
}

static bool find_cgroup(const struct controller *controller, struct cgroup *group_out)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return false;
    char line[1024];
    bool found = false;
    while (!found && fgets(line, sizeof line, file))
        found = read_cgroup(line, controller, group_out);
    fclose(file);
    return found;
}

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

/* Returns the whole cores that a group may use, rounded down but at least 1, or 0 if it has no limit ("max" does not parse as a
 * number). */
static int group_cores(const struct cgroup *group)
{
    char path[1200];
    long quota = -1, period = 100000; /* microseconds; the kernel's default period */
    snprintf(path, sizeof path, "%s/%s", group->directory, group->is_v2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    const int read = fscanf(file, "%ld %ld", &quota, &period);
    fclose(file);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", group->directory);
    if (!group->is_v2 && (file = fopen(path, "re"))) {
        period = fscanf(file, "%ld", &period) == 1 ? period : 0;
        fclose(file);
    }
    if (read < 1 || quota <= 0 || period <= 0)
        return 0;
    return quota >= period ? (int)(quota / period) : 1;
}

static int quota_cores(void)
{
    struct cgroup group;
    int least = 0;
    bool is_in_one = find_cgroup(&of_cores, &group);
    while (is_in_one) {
        const int cores = group_cores(&group);
        least = cores && (!least || cores < least) ? cores : least;
        is_in_one = go_up(&group);
    }
    return least;
}

static int allowed_cores(void)
{
    cpu_set_t mask;
    return sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
}

struct shoal_core_limits shoal_topology_core_limits(void)
{
    return (struct shoal_core_limits){
        .online = (int)sysconf(_SC_NPROCESSORS_ONLN), .allowed = allowed_cores(), .quota = quota_cores()};
}

int shoal_topology_quota_cores(int cores)
{
    const int quota = quota_cores();
    SHOAL_ASSERT(cores > 0 && quota >= 0);
    return quota && quota < cores ? quota : cores;
}

int shoal_topology_cores(void)
{
    return shoal_topology_quota_cores(allowed_cores());
}

/* ---- Available memory ---------------------------------------------------------------------------------------------------- */

static bool limits_read_number(const char *path, uint64_t *value_out)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    unsigned long long value;
    const bool found = fscanf(file, "%llu", &value) == 1; /* "max" does not parse as a number: no limit */
    fclose(file);
    if (found)
        *value_out = value;
    return found;
}

/* Reads the value of `key` from a file of lines "key value". */
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

/* Returns the bytes that one group's own limit leaves. */
static uint64_t group_left(const struct cgroup *group)
{
    char path[1200];
    uint64_t limit, used, cache = 0;
    snprintf(path, sizeof path, "%s/%s", group->directory, group->is_v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!limits_read_number(path, &limit))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", group->directory, group->is_v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!limits_read_number(path, &used))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", group->directory);
    read_key(path, group->is_v2 ? "inactive_file" : "total_inactive_file", &cache); /* the kernel reclaims these pages first */
    used -= used < cache ? used : cache;
    return limit > used ? limit - used : 0;
}

static uint64_t cgroup_left(void)
{
    struct cgroup group;
    uint64_t least = UINT64_MAX;
    bool is_in_one = find_cgroup(&of_memory, &group);
    while (is_in_one) {
        const uint64_t left = group_left(&group);
        least = left < least ? left : least;
        is_in_one = go_up(&group);
    }
    return least;
}

struct shoal_topology_limits shoal_topology_memory_limits(void)
{
    uint64_t kib;
    return (struct shoal_topology_limits){.machine = read_key("/proc/meminfo", "MemAvailable:", &kib) ? kib * 1024 : UINT64_MAX,
                                          .container = cgroup_left()};
}

uint64_t shoal_topology_memory_left(void)
{
    const struct shoal_topology_limits limits = shoal_topology_memory_limits();
    return limits.machine < limits.container ? limits.machine : limits.container;
}

uint64_t shoal_topology_oom_kills(void)
{
    struct cgroup group;
    char path[1200];
    uint64_t kills = 0;
    if (find_cgroup(&of_memory, &group)) {
        snprintf(path, sizeof path, "%s/%s", group.directory, group.is_v2 ? "memory.events" : "memory.oom_control");
        if (read_key(path, "oom_kill", &kills))
            return kills;
    }
    return read_key("/proc/vmstat", "oom_kill", &kills) ? kills : 0;
}
