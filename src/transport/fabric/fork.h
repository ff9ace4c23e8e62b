/* The sockets that libfabric opens, in children. A child that keeps them open keeps a port in use, and connections up, after
 * this process has ended. Such sockets are recognized by their addresses: one side is an endpoint of this process or of a peer.
 * A child of fork() closes them at once; it may not use them. For programs started by other means (posix_spawn, vfork and exec)
 * they are sealed: closed on exec. libfabric opens sockets at any time, so a program started before the next seal keeps those
 * opened since the last one. Any thread. */
#ifndef SHOAL_TRANSPORT_FABRIC_FORK_H
#define SHOAL_TRANSPORT_FABRIC_FORK_H

#include "transport/fabric/fabric_endpoint.h"

/* Notes an endpoint whose sockets children close. Does nothing if it does not have an internet address. owner identifies the
 * entry for forget and is not otherwise used. */
void shoal_fabric_fork_note(const void *owner, const struct shoal_fabric_address *address);
void shoal_fabric_fork_forget(const void *owner);

/* Seals all sockets of noted endpoints that are open now. Looks at each descriptor of the process. */
void shoal_fabric_fork_seal(void);

#endif
