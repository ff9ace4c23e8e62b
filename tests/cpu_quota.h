/* A quota of processor time for this process, set by the kernel: a control group of its own, of version 1 or 2 (cgroups(7)).
 * Needs the rights of root. Threads and children of the process are in the group too. */
#ifndef SHOAL_TESTS_CPU_QUOTA_H
#define SHOAL_TESTS_CPU_QUOTA_H

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CPU_QUOTA_PERIOD_US 100000

struct cpu_quota {
    char before[300], group[340]; /* directories: the group in which the process was, and its own */
    bool is_v2;
    char reason[800]; /* for which a group cannot be made */
};

static inline bool cpu_quota_write(const char *directory, const char *file, const char *text)
{
    char path[400];
    snprintf(path, sizeof path, "%s/%s", directory, file);
    FILE *to = fopen(path, "we");
    if (!to)
        return false;
    const bool is_written = fputs(text, to) >= 0;
    return fclose(to) == 0 && is_written; /* the kernel refuses a value when it is flushed */
}

/* Version 2: returns true if groups inside the directory have the controller. */
static inline bool cpu_quota_hands_down(const char *directory)
{
    char path[400], line[256] = " ";
    snprintf(path, sizeof path, "%s/cgroup.subtree_control", directory);
    FILE *from = fopen(path, "re");
    const bool is_read = from && fgets(line + 1, (int)sizeof line - 1, from);
    if (from)
        fclose(from);
    line[strcspn(line, "\n")] = ' ';
    return is_read && strstr(line, " cpu ");
}

/* Finds the process's group and the directory for a group next to it or inside it. */
static inline bool cpu_quota_find(struct cpu_quota *quota, char *parent_out, size_t bytes)
{
    char line[256], controllers[64], path[200];
    bool is_found = false;
    FILE *from = fopen("/proc/self/cgroup", "re");
    while (!is_found && from && fgets(line, sizeof line, from)) {
        controllers[0] = 0;
        if (sscanf(line, "0::%199s", path) == 1) {
            quota->is_v2 = true;
            snprintf(quota->before, sizeof quota->before, "/sys/fs/cgroup%s", path);
        } else if (sscanf(line, "%*d:%63[^:]:%199s", controllers, path) == 2 &&
                   (strcmp(controllers, "cpu") == 0 || strncmp(controllers, "cpu,", 4) == 0)) {
            quota->is_v2 = false;
            snprintf(quota->before, sizeof quota->before, "/sys/fs/cgroup/cpu%s", path);
        } else {
            continue;
        }
        snprintf(parent_out, bytes, "%s", quota->before);
        while (quota->is_v2 && !cpu_quota_hands_down(parent_out) && strlen(parent_out) > strlen("/sys/fs/cgroup"))
            *strrchr(parent_out, '/') = 0;
        is_found = !quota->is_v2 || cpu_quota_hands_down(parent_out);
    }
    if (from)
        fclose(from);
    return is_found;
}

/* Limits the group to that many hundredths of a core; 0: no limit. Returns false if the kernel refuses. */
static inline bool cpu_quota_set(const struct cpu_quota *quota, long hundredths)
{
    char text[64];
    const long us = hundredths * (CPU_QUOTA_PERIOD_US / 100);
    if (!quota->is_v2)
        snprintf(text, sizeof text, "%ld", us ? us : -1);
    else if (us)
        snprintf(text, sizeof text, "%ld %d", us, CPU_QUOTA_PERIOD_US);
    else
        snprintf(text, sizeof text, "max");
    return cpu_quota_write(quota->group, quota->is_v2 ? "cpu.max" : "cpu.cfs_quota_us", text);
}

/* Moves the process back, and removes the group. Children must have ended. */
static inline void cpu_quota_leave(const struct cpu_quota *quota)
{
    (void)cpu_quota_write(quota->before, "cgroup.procs", "0");
    for (int turn = 0; rmdir(quota->group) != 0 && errno == EBUSY && turn < 1000; turn++)
        usleep(1000); /* a child that has just ended may still count */
}

/* Makes a group with a limit and moves the process into it. Returns false, with the reason, if that is not possible here. */
static inline bool cpu_quota_enter(struct cpu_quota *quota, long hundredths)
{
    char parent[300];
    if (!cpu_quota_find(quota, parent, sizeof parent)) {
        snprintf(quota->reason, sizeof quota->reason, "no control group here has the controller \"cpu\"");
        return false;
    }
    snprintf(quota->group, sizeof quota->group, "%s/shoal-test-%d", parent, (int)getpid());
    if (mkdir(quota->group, 0755) != 0) {
        snprintf(quota->reason, sizeof quota->reason, "cannot make the control group %s: %s", quota->group, strerror(errno));
        return false;
    }
    if (cpu_quota_set(quota, hundredths) && cpu_quota_write(quota->group, "cgroup.procs", "0"))
        return true;
    snprintf(quota->reason, sizeof quota->reason, "cannot use the control group %s: %s", quota->group, strerror(errno));
    (void)rmdir(quota->group);
    return false;
}

#endif
