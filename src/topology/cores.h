/* Moves the calling thread off the core that it runs on. Any thread. */
#ifndef SHOAL_TOPOLOGY_CORES_H
#define SHOAL_TOPOLOGY_CORES_H

#include <sched.h>

#include "base/compiler.h"

/* Moves the calling thread to one of the cores that it may use and that is not in `taken`, then restores its affinity mask. The
 * mask belongs to the thread from then on: the thread does not get cores that its cpuset (its container) gains later, and a
 * mask that another process sets during the call is lost. Returns false, and changes nothing, if every core that the thread may
 * use is taken, if it may use none of the taken ones, or if the kernel refuses. */
bool shoal_topology_leave_core(const cpu_set_t *taken);

#endif
