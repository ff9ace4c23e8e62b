/* The transport of a communicator whose ranks are on several hosts: to ranks of this host it hands everything on to shared
 * memory, ranks elsewhere are reached over the network. It adds what the network lacks:
 *
 *   order      What is heard comes in any order. Raises of a counter are numbered by their source; the receiver's counter is
 *              the number up to which all have been heard. Packets are numbered too.
 *   credit     An announcement tells a partner where this rank's staging buffer is and which counters it raises there by
 * writing;
 *              counters that a plan waits for tell when a staging buffer may be written again. So nobody can write, or send,
 * more than
 *              the receiver has room for: records and payloads are kept as long as the engine promises, packets are counted.
 *   liveness   is the control tree's, see membership/membership.h.
 *
 * Where the provider writes into memory, what is put is written straight into the peer's staging buffer, with an immediate that
 * names the counter and which of its raises this is (its low bits). Elsewhere it travels in messages, which name their
 * place. */
#ifndef SHOAL_TRANSPORT_HOSTS_HOSTS_H
#define SHOAL_TRANSPORT_HOSTS_HOSTS_H

#include "membership/membership.h"
#include "transport/fabric/network.h"
#include "transport/shm/shm.h"

/* A rank of a communicator, as its others know it. The own rank has neither. */
struct shoal_member {
    uint16_t host;                     /* equal for ranks of one host; any numbers */
    struct shoal_shm_peer *local;      /* of this host */
    struct shoal_network_peer *remote; /* elsewhere */
};

struct shoal_hosts_options {
    struct shoal_log *log;
    struct shoal_network *network;
    struct shoal_membership *membership;
    const struct shoal_member *members; /* [size]; copied */
    struct shoal_shm_options shm;       /* of the whole communicator: rank, size, slots, bytes of a slot, ... ; peers unused */
};

/* First half of a collective call of all ranks, as shoal_shm_create; endpoint is that of shared memory. */
SHOAL_MUST_USE enum shoal_status shoal_hosts_create(struct shoal_shm_endpoint *endpoint,
                                                    const struct shoal_hosts_options *options,
                                                    struct shoal_transport **transport_out);
/* Second half, as shoal_shm_join. */
SHOAL_MUST_USE enum shoal_status shoal_hosts_join(struct shoal_transport *transport, int *socket_out);

#endif
