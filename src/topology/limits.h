/* The limits that this machine and its container set for the process. The functions read kernel files, so they are for set-up,
 * not for every call. Any thread. */
#ifndef SHOAL_TOPOLOGY_LIMITS_H
#define SHOAL_TOPOLOGY_LIMITS_H

#include "base/compiler.h"

/* The numbers behind shoal_topology_cores() and shoal_topology_quota_cores(). */
struct shoal_core_limits {
    int online;  /* on the machine */
    int allowed; /* by the affinity mask */
    int quota;   /* container's quota, in whole cores; 0 without a quota */
};
struct shoal_core_limits shoal_topology_core_limits(void);

struct shoal_topology_limits {
    uint64_t machine, container; /* bytes left; UINT64_MAX without a limit */
};
struct shoal_topology_limits shoal_topology_memory_limits(void);

/* Returns the number of cores that this process may use, by its affinity mask and its container's quota. At least 1. */
int shoal_topology_cores(void);

/* Returns how many of `cores` cores the container's quota allows. */
int shoal_topology_quota_cores(int cores);

/* Returns how many processes in this container (on the machine, outside a container) the kernel has killed for lack of memory.
 * Returns 0 if the kernel does not count them. The number only grows: compare it before and after to distinguish such a kill
 * from another SIGKILL. */
uint64_t shoal_topology_oom_kills(void);

/* Returns how many bytes the container and the machine leave to this process, or UINT64_MAX if nothing limits it. */
uint64_t shoal_topology_memory_left(void);

#endif
