/* Which lane of a peer each lane of this rank writes to, if both have several adapters.
 *
 *     this rank's lanes            the peer's lanes
 *     eth1  10.1.0.1/24    ---     10.1.0.2       one network
 *     eth2  10.2.0.1/24    ---     10.2.0.2
 *     eth3  10.3.0.1/24            10.9.0.2       no partner in its network, so perhaps a route leads there
 *
 * Both ends of a pair are in one network if there is such a pair. Others are paired in order, because adapters of one number
 * are often joined by one switch, and because addresses that are not internet addresses name no network. That a pair is
 * connected is proven elsewhere (network_lanes.h). Pure functions. */
#ifndef SHOAL_TRANSPORT_FABRIC_LANE_PARTNERS_H
#define SHOAL_TRANSPORT_FABRIC_LANE_PARTNERS_H

#include "topology/nic.h"
#include "transport/fabric/fabric_endpoint.h"

/* own[0] is the interface of this rank's first endpoint, own[1 + i] that of its lane i; all zeros if endpoints have no internet
 * address. Sets partners_out[i] to the number of the peer's lane, or -1. No two lanes have one partner. */
void shoal_lane_partners_find(const struct shoal_nic own[], int lanes, const struct shoal_fabric_address peers[],
                              int peer_count, int partners_out[]);

#endif
