#include "topology/cores.h"

bool shoal_topology_leave_core(const cpu_set_t *taken)
{
    cpu_set_t allowed, shared, wanted;
    /* Fails if the machine has more cores than a cpu_set_t holds. Threads then stay on their cores. */
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return false;
    CPU_AND(&shared, &allowed, taken);
    CPU_XOR(&wanted, &allowed, &shared);
    if (CPU_COUNT(&wanted) == 0 || CPU_COUNT(&shared) == 0 || sched_setaffinity(0, sizeof wanted, &wanted) != 0)
        return false;
    /* The thread has already moved. The kernel refuses the old mask only if none of its cores is left, and then the kernel
     * itself has set another mask. */
    (void)sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}
