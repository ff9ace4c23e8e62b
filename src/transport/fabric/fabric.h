/* The network between hosts, through libfabric: what the rest of the library sees of it. Built without libfabric's headers, it
 * says so. */
#ifndef SHOAL_TRANSPORT_FABRIC_H
#define SHOAL_TRANSPORT_FABRIC_H

#include <stdio.h>

#include "base/settings.h"
#include "topology/nic.h"

/* Prints which libfabric is used, what each of its providers offers on that interface or why it was rejected, and which one is
 * taken. nic NULL: there is none to speak of. ERR_UNSUPPORTED, told on out too, when none can be taken. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_print_providers(const struct shoal_settings *settings,
                                                              const struct shoal_nic *nic, FILE *out);

#endif
