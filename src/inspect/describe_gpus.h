/* Describes the GPUs of this host for shoal_print_topology(): what their driver reports, and how they are connected. Loads the
 * driver. Any thread. */
#ifndef SHOAL_INSPECT_DESCRIBE_GPUS_H
#define SHOAL_INSPECT_DESCRIBE_GPUS_H

#include <stdbool.h>
#include <stdio.h>

/* sys: the mount point of sysfs. */
void shoal_describe_gpus(const char *sys, FILE *out);

/* Returns true if the GPUs of `ranks` ranks on this host can sum among themselves: all GPUs that this process may use can, and
 * they reach each other. Loads the driver. */
bool shoal_describe_can_sum(int ranks);

#endif
