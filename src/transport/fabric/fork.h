/* The sockets that libfabric opens, in forked children: a child that keeps them open keeps a port in use, and connections up,
 * after this process has ended. They are told by their addresses: one side is an endpoint of this process or of a peer. A child
 * closes them at once; it may not use them. Whoever forks by other means than fork() (clone, vfork) keeps them open. Any
 * thread. */
#ifndef SHOAL_TRANSPORT_FABRIC_FORK_H
#define SHOAL_TRANSPORT_FABRIC_FORK_H

#include "transport/fabric/fabric_node.h"

/* An endpoint whose sockets children close; where it has no internet address nothing happens. owner: for forget, not used. */
void shoal_fabric_fork_note(const void *owner, const struct shoal_fabric_address *address);
void shoal_fabric_fork_forget(const void *owner);

#endif
