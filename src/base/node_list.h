/* Lists of hosts as Slurm writes them. Pure functions; libc only; any thread. */
#ifndef SHOAL_BASE_NODE_LIST_H
#define SHOAL_BASE_NODE_LIST_H

#include <stdbool.h>
#include <stddef.h>

/* Finds the first host of a list: "n[07-09,12]-a,gpu1" begins with "n07-a". Returns false if the list has none, or if the name
 * does not fit. */
bool shoal_node_list_first(const char *list, char *node_out, size_t bytes);

#endif
