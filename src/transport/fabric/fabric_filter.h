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

/* Takes FI_PROVIDER out of the environment of this process where it leaves nothing, and returns whether it did; a line says
 * so, on rank 0 as a warning. To be called before libfabric is loaded. wanted: as above. */
bool shoal_fabric_filter_undo(const char *wanted, struct shoal_log *log);

#endif
