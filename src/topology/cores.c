#include "topology/cores.h"

bool shoal_topology_leave_core(const cpu_set_t *taken)
{
    cpu_set_t allowed, shared, wanted;
    /* Fails where the machine has more cores than a cpu_set_t holds: there threads stay. */
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return false;
    CPU_AND(&shared, &allowed, taken);
    CPU_XOR(&wanted, &allowed, &shared);
    if (CPU_COUNT(&wanted) == 0 || CPU_COUNT(&shared) == 0 || sched_setaffinity(0, sizeof wanted, &wanted) != 0)
        return false;
    /* It moved at once. The old mask can be refused only if none of its cores is left, and then the kernel has set another. */
    (void)sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}
