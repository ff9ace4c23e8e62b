/* The addresses of other processes in libfabric's table: each once, however many worlds meet the process.
 *
 * An address that no world uses stays for a while, because the provider may have a connection to it. Removing it would make the
 * provider close that connection, and data that the other process is sending over it would be lost. Only the network uses this;
 * call it with the progress engine's lock held. */
#ifndef SHOAL_TRANSPORT_FABRIC_ADDRESSES_H
#define SHOAL_TRANSPORT_FABRIC_ADDRESSES_H

#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_FABRIC_ADDRESSES_UNUSED_MAX 1024 /* addresses that no world uses; beyond this number the oldest one is removed */
#define SHOAL_FABRIC_ADDRESSES_PLACES 1024     /* places of the table */

struct shoal_fabric_met {
    struct shoal_fabric_met *next; /* in the same place of the table */
    struct shoal_fabric_address address;
    shoal_fabric_peer at;
    unsigned uses;
    uint64_t left; /* orders the unused ones: the smallest was left first */
};

/* Must be zero at the start, except the endpoint. */
struct shoal_fabric_addresses {
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_fabric_met *places[SHOAL_FABRIC_ADDRESSES_PLACES];
    size_t count, unused;
    uint64_t leaves;
};

/* Adds one use. *is_new_out is true if the address was not in the table. ERR_MEMORY, and the errors of
 * shoal_fabric_endpoint_meet. */
SHOAL_MUST_USE enum shoal_status shoal_fabric_addresses_meet(struct shoal_fabric_addresses *addresses,
                                                             const struct shoal_fabric_address *address, struct shoal_log *log,
                                                             struct shoal_fabric_met **met_out, bool *is_new_out);
/* Ends one use. */
void shoal_fabric_addresses_part(struct shoal_fabric_addresses *addresses, struct shoal_fabric_met *met);
/* Frees the table; libfabric's own table is freed with the endpoint. */
void shoal_fabric_addresses_close(struct shoal_fabric_addresses *addresses);

#endif
