/* The addresses of other processes in libfabric's table: each once, however many worlds meet the process.
 *
 * An address that no world uses stays for a while, because the provider may have a connection to it. If it were removed, the
 * provider would close that connection, and what the other process sends over it at that moment would be lost. Only the
 * network uses this; calls come under the progress engine's lock. */
#ifndef SHOAL_TRANSPORT_FABRIC_ADDRESSES_H
#define SHOAL_TRANSPORT_FABRIC_ADDRESSES_H

#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_FABRIC_ADDRESSES_UNUSED_MAX 1024 /* of processes that no world uses; then the oldest one goes */
#define SHOAL_FABRIC_ADDRESSES_PLACES 1024     /* of the table */

struct shoal_fabric_met {
    struct shoal_fabric_met *next; /* in its place of the table */
    struct shoal_fabric_address address;
    shoal_fabric_peer at;
    unsigned uses;
    uint64_t left; /* orders the unused ones: the least was left first */
};

/* All zero except the endpoint to begin with. */
struct shoal_fabric_addresses {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_fabric_met *places[SHOAL_FABRIC_ADDRESSES_PLACES];
    size_t count, unused;
    uint64_t leaves;
};

/* Adds one use. *is_new_out: the address was not in the table. ERR_MEMORY, and the errors of shoal_fabric_endpoint_meet. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_addresses_meet(struct shoal_fabric_addresses *addresses,
                                                             const struct shoal_fabric_address *address, struct shoal_log *log,
                                                             struct shoal_fabric_met **met_out, bool *is_new_out);
/* Ends one use. */
void shoal_fabric_addresses_part(struct shoal_fabric_addresses *addresses, struct shoal_fabric_met *met);
/* Frees the table; libfabric's goes with the endpoint. */
void shoal_fabric_addresses_close(struct shoal_fabric_addresses *addresses);

#endif
