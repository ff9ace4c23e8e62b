/* The core that a thread runs on, and how it gets off it. Any thread; all is about the calling one. */
#ifndef SHOAL_TOPOLOGY_CORES_H
#define SHOAL_TOPOLOGY_CORES_H

#include <sched.h>

#include "base/compiler.h"

/* Moves the thread to one of the cores that it may use and that is not `taken`; its mask is as it was afterwards. False: there
 * is none, it may use none of the taken ones, or the kernel refuses; then nothing has changed. */
bool shoal_topology_leave_core(const cpu_set_t *taken);

#endif
