/* FI_PROVIDER, with which a user or a launcher excludes libfabric's providers, for every library of the process. Some launchers
 * set it for another library, on any machine: SageMaker's set FI_PROVIDER=efa, and on a host without EFA libfabric then offers
 * nothing. Set-up only: libfabric reads the variable when a process first queries it. */
#ifndef SHOAL_TRANSPORT_FABRIC_FILTER_H
#define SHOAL_TRANSPORT_FABRIC_FILTER_H

#include "base/log.h"

#define SHOAL_FABRIC_DEVICES "/sys/class/infiniband"

/* Returns true if the filter (the value of FI_PROVIDER) leaves a provider that could work on this host: one that Shoal knows,
 * and that needs no adapter or has one in `devices`, a folder such as SHOAL_FABRIC_DEVICES. wanted is SHOAL_PROVIDER, empty for
 * any. A filter that excludes ("^tcp") always leaves some. Does not call libfabric. */
bool shoal_fabric_filter_leaves_any(const char *filter, const char *wanted, const char *devices);

/* Hides FI_PROVIDER in the environment of this process if it leaves no provider, logs that, on rank 0 as a warning, and returns
 * its entry. Otherwise returns NULL. Call it before libfabric is loaded, and pass the result to shoal_fabric_filter_restore
 * after libfabric was queried. wanted: as above. */
SHOAL_MUST_USE char *shoal_fabric_filter_hide(const char *wanted, struct shoal_log *log);
/* Restores the entry, for other libraries of the process and for its children. entry may be NULL. */
void shoal_fabric_filter_restore(char *entry);

#endif
