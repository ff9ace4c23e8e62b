/* The GPUs of this host in words, for shoal_print_topology: what their driver says of them, and how they are joined. Loads the
 * driver. Any thread. */
#ifndef SHOAL_INSPECT_DESCRIBE_GPUS_H
#define SHOAL_INSPECT_DESCRIBE_GPUS_H

#include <stdbool.h>
#include <stdio.h>

/* sys: where sysfs is mounted. */
void shoal_describe_gpus(const char *sys, FILE *out);

/* Whether the GPUs of so many ranks on this host can sum among themselves: all GPUs that this process may use can, and reach
 * each other. Loads the driver. */
bool shoal_describe_can_sum(int ranks);

#endif
