/* The transport of a communicator whose ranks are on several hosts. Ranks of this host are reached through shared memory,
 * remote ranks over the network. The transport adds what the network lacks:
 *
 *   order      The network delivers in any order. A source numbers the increments of a counter; the receiver's counter is the
 *              number up to which all increments were received. Packets are also numbered.
 *   credit     An announcement tells a peer where this rank's staging buffer is and which of its counters it may increment by
 *              writing. Counters that a plan waits for show when a staging buffer may be written again. So no rank writes or
 *              sends more than the receiver can hold: announcements and payloads are kept as long as the engine promises, and
 *              packets are counted.
 *   liveness   comes from the control tree, see membership/membership.h.
 *
 * If the provider can write into memory, a put is one write into the peer's staging buffer. Its immediate names the counter and
 * the low bits of the increment's number. Otherwise a put is sent in messages, which name their target. */
#ifndef SHOAL_TRANSPORT_HOSTS_HOSTS_H
#define SHOAL_TRANSPORT_HOSTS_HOSTS_H

#include "membership/membership.h"
#include "transport/fabric/network.h"
#include "transport/shm/shm.h"

/* A rank of a communicator, as other ranks know it. This rank's own entry has neither peer. */
struct shoal_member {
    uint16_t host;                     /* equal for ranks of one host; any numbers */
    struct shoal_shm_peer *local;      /* for a rank of this host, otherwise NULL */
    struct shoal_network_peer *remote; /* for a remote rank, otherwise NULL */
    int world_rank;                    /* its number in the world */
};

struct shoal_hosts_options {
    struct shoal_log *log;
    struct shoal_network *network;
    struct shoal_membership *membership;
    const struct shoal_member *members; /* [size]; copied */
    struct shoal_shm_options shm;       /* for the whole communicator: rank, size, slots, bytes of a slot ...; peers unused */
};

/* First half of a collective call of all ranks, like shoal_shm_create. */
SHOAL_MUST_USE enum shoal_status shoal_hosts_create(struct shoal_shm_endpoint *endpoint,
                                                    const struct shoal_hosts_options *options,
                                                    struct shoal_transport **transport_out);
/* Second half, like shoal_shm_join. */
SHOAL_MUST_USE enum shoal_status shoal_hosts_join(struct shoal_transport *transport, int *socket_out);

#endif
