/* The limits of this machine and its container for the process. Reads files of the kernel: for set-up, not for each call. Any
 * thread. */
#ifndef SHOAL_TOPOLOGY_LIMITS_H
#define SHOAL_TOPOLOGY_LIMITS_H

#include "base/compiler.h"

/* Where the two below come from. */
struct shoal_core_limits {
    int online;  /* of the machine */
    int allowed; /* by the affinity mask */
    int quota;   /* of the container, in whole cores; 0: none */
};
struct shoal_core_limits shoal_topology_core_limits(void);

struct shoal_topology_limits {
    uint64_t machine, container; /* bytes left; UINT64_MAX: no limit */
};
struct shoal_topology_limits shoal_topology_memory_limits(void);

/* Cores that this process may use, by its affinity mask and its container's quota; at least 1. */
int shoal_topology_cores(void);

/* The number of these cores that the container's quota leaves. */
int shoal_topology_quota_cores(int cores);

/* How many processes of this container the kernel has killed for lack of memory; of the machine, where there is no container.
 * It only grows: compared before and after, it tells such a kill from any other SIGKILL. 0 where the kernel does not count. */
uint64_t shoal_topology_oom_kills(void);

/* How many bytes the container and the machine leave to this process; UINT64_MAX when nothing limits it. */
uint64_t shoal_topology_memory_left(void);

#endif
