/* The GPUs of this host in words, for shoal_print_topology: what their driver says of them, and how they are joined. Loads the
 * driver. Any thread. */
#ifndef SHOAL_INSPECT_DESCRIBE_GPUS_H
#define SHOAL_INSPECT_DESCRIBE_GPUS_H

#include <stdio.h>

/* sys: where sysfs is mounted. */
void shoal_describe_gpus(const char *sys, FILE *out);

#endif
