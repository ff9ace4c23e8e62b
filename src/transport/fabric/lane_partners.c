#include "transport/fabric/lane_partners.h"

#include "base/assert.h"
#include "transport/fabric/reachability.h"

static bool partners_is_in_network(const struct shoal_nic *own, const struct shoal_fabric_address *peer)
{
    struct shoal_address address;
    return shoal_reachability_read_address(peer, &address) &&
           shoal_nic_reaches(own, (const struct sockaddr *)(const void *)&address.socket);
}

static bool is_in_any_network(const struct shoal_nic own[], int count, const struct shoal_fabric_address *peer)
{
    int i = 0;
    while (i < count && !partners_is_in_network(&own[i], peer))
        i++;
    return i < count;
}

/* Returns how many lanes before number `lane` are in its network. */
static int count_before(const struct shoal_nic own[], int lane)
{
    const struct shoal_nic *nic = &own[1 + lane];
    int count = 0;
    for (int i = 0; i < lane; i++)
        count += shoal_nic_reaches(&own[1 + i], (const struct sockaddr *)(const void *)&nic->address);
    return count;
}

/* Returns the peer's lane number `number` in the lane's network, or -1. *count_out is how many are there. */
static int find_in_network(const struct shoal_nic *nic, const struct shoal_fabric_address peers[], int peer_count, int number,
                           int *count_out)
{
    int found = -1;
    *count_out = 0;
    for (int p = 0; p < peer_count; p++) {
        if (partners_is_in_network(nic, &peers[p]) && (*count_out)++ == number)
            found = p;
    }
    return found;
}

/* Returns the peer's lane number `number` of those in none of this rank's networks, or -1. */
static int find_behind_route(const struct shoal_nic own[], int count, const struct shoal_fabric_address peers[], int peer_count,
                             int number)
{
    for (int p = 0; p < peer_count; p++) {
        if (!is_in_any_network(own, count, &peers[p]) && number-- == 0)
            return p;
    }
    return -1;
}

void shoal_lane_partners_find(const struct shoal_nic own[], int lanes, const struct shoal_fabric_address peers[],
                              int peer_count, int partners_out[])
{
    int routed = 0;
    for (int i = 0; i < lanes; i++) {
        int in_network;
        partners_out[i] = find_in_network(&own[1 + i], peers, peer_count, count_before(own, i), &in_network);
        if (!in_network)
            partners_out[i] = find_behind_route(own, 1 + lanes, peers, peer_count, routed++);
        SHOAL_ASSERT(partners_out[i] < peer_count);
    }
}
