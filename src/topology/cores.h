/* The core that a thread runs on, and how it gets off it. Any thread; all is about the calling one. */
#ifndef SHOAL_TOPOLOGY_CORES_H
#define SHOAL_TOPOLOGY_CORES_H

#include <sched.h>

#include "base/compiler.h"

/* Moves the thread to one of the cores that it may use and that is not `taken`. Afterwards its mask has the cores that it had
 * before. But it is the thread's own from then on: cores that its cpuset (its container) gets later are not added, and a mask
 * that another process sets just meanwhile is lost. False: there is no such core, it may use none of the taken ones, or the
 * kernel refuses; then nothing has changed. */
bool shoal_topology_leave_core(const cpu_set_t *taken);

#endif
