/* FI_PROVIDER, by which a user or a launcher has libfabric leave out providers, for every library of the process. Some
 * launchers set it for another library and whatever the machine: SageMaker's set FI_PROVIDER=efa, and on a host without EFA
 * libfabric then offers nothing. Set-up only: libfabric reads the variable at the first question that a process asks it. */
#ifndef SHOAL_TRANSPORT_FABRIC_FILTER_H
#define SHOAL_TRANSPORT_FABRIC_FILTER_H

#include "base/log.h"

#define SHOAL_FABRIC_DEVICES "/sys/class/infiniband"

/* Whether the filter (the value of FI_PROVIDER) leaves a provider that could serve this host: one of those that Shoal knows,
 * and that needs no adapter or has one in `devices`, a folder such as SHOAL_FABRIC_DEVICES. wanted: SHOAL_PROVIDER; empty:
 * any. A filter that excludes ("^tcp") leaves some. Asks nothing of libfabric. */
bool shoal_fabric_filter_leaves_any(const char *filter, const char *wanted, const char *devices);

/* Hides FI_PROVIDER in the environment of this process if it leaves nothing, and returns its entry, or else NULL. A line is
 * logged, on rank 0 as a warning. Call it before libfabric is loaded, and shoal_fabric_filter_restore with
 * the result once libfabric was asked. wanted: as above. */
SHOAL_MUST_USE char *shoal_fabric_filter_hide(const char *wanted, struct shoal_log *log);
/* Puts the entry back, for other libraries of the process and for its children. NULL is allowed. */
void shoal_fabric_filter_restore(char *entry);

#endif
