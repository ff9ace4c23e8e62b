/* The sockets that libfabric opens, in children: a child that keeps them open keeps a port in use, and connections up,
 * after this process has ended. They are told by their addresses: one side is an endpoint of this process or of a peer. A
 * child of fork() closes them at once; it may not use them. For who starts programs by other means (posix_spawn, vfork and
 * exec) they are sealed: closed on exec. libfabric opens them at times of its own, so a program that is started before the
 * next seal keeps what was opened since the last one. Any thread. */
#ifndef SHOAL_TRANSPORT_FABRIC_FORK_H
#define SHOAL_TRANSPORT_FABRIC_FORK_H

#include "transport/fabric/fabric_endpoint.h"

/* An endpoint whose sockets children close; where it has no internet address nothing happens. owner: for forget, not used. */
void shoal_fabric_fork_note(const void *owner, const struct shoal_fabric_address *address);
void shoal_fabric_fork_forget(const void *owner);

/* Seals all sockets of noted endpoints that are open now. Looks at each descriptor of the process. */
void shoal_fabric_fork_seal(void);

#endif
