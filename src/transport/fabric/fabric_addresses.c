#include "transport/fabric/fabric_addresses.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* FNV-1a (Fowler, Noll, Vo). */
static struct shoal_fabric_met **addresses_place_of(struct shoal_fabric_addresses *addresses,
                                                    const struct shoal_fabric_address *address)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < address->bytes && i < sizeof address->at; i++)
        hash = (hash ^ address->at[i]) * UINT64_C(0x100000001b3);
    return &addresses->places[(hash ^ hash >> 32) % SHOAL_FABRIC_ADDRESSES_PLACES];
}

static bool addresses_is_same(const struct shoal_fabric_address *a, const struct shoal_fabric_address *b)
{
    return a->bytes == b->bytes && memcmp(a->at, b->at, a->bytes) == 0;
}

static struct shoal_fabric_met *addresses_find(struct shoal_fabric_addresses *addresses,
                                               const struct shoal_fabric_address *address)
{
    struct shoal_fabric_met *met = *addresses_place_of(addresses, address);
    while (met && !addresses_is_same(&met->address, address))
        met = met->next;
    return met;
}

enum shoal_status shoal_fabric_addresses_meet(struct shoal_fabric_addresses *addresses,
                                              const struct shoal_fabric_address *address, struct shoal_log *log,
                                              struct shoal_fabric_met **met_out, bool *is_new_out)
{
    struct shoal_fabric_met *met = addresses_find(addresses, address);
    *is_new_out = !met;
    if (met) {
        SHOAL_ASSERT(met->uses > 0 || addresses->unused > 0);
        addresses->unused -= met->uses++ == 0;
        *met_out = met;
        return SHOAL_OK;
    }
    met = calloc(1, sizeof *met);
    if (!met)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "fabric", "no memory for the address of a process");
    const enum shoal_status status = shoal_fabric_endpoint_meet(addresses->endpoint, address, &met->at);
    if (status != SHOAL_OK) {
        free(met);
        return status;
    }
    struct shoal_fabric_met **place = addresses_place_of(addresses, address);
    met->address = *address;
    met->uses = 1;
    met->next = *place;
    *place = met;
    addresses->count++;
    *met_out = met;
    return SHOAL_OK;
}

static void remove_oldest(struct shoal_fabric_addresses *addresses)
{
    struct shoal_fabric_met **oldest = NULL;
    for (size_t i = 0; i < SHOAL_FABRIC_ADDRESSES_PLACES; i++) {
        for (struct shoal_fabric_met **link = &addresses->places[i]; *link; link = &(*link)->next)
            oldest = (*link)->uses == 0 && (!oldest || (*link)->left < (*oldest)->left) ? link : oldest;
    }
    SHOAL_ASSERT(oldest && addresses->count > 0); /* because addresses->unused is not 0 */
    struct shoal_fabric_met *met = *oldest;
    *oldest = met->next;
    shoal_fabric_endpoint_part(addresses->endpoint, met->at);
    free(met);
    addresses->count--;
    addresses->unused--;
}

void shoal_fabric_addresses_part(struct shoal_fabric_addresses *addresses, struct shoal_fabric_met *met)
{
    SHOAL_ASSERT(met->uses > 0);
    if (--met->uses > 0)
        return;
    met->left = ++addresses->leaves;
    if (++addresses->unused > SHOAL_FABRIC_ADDRESSES_UNUSED_MAX)
        remove_oldest(addresses);
    SHOAL_ASSERT(addresses->unused <= addresses->count && addresses->unused <= SHOAL_FABRIC_ADDRESSES_UNUSED_MAX);
}

void shoal_fabric_addresses_close(struct shoal_fabric_addresses *addresses)
{
    for (size_t i = 0; i < SHOAL_FABRIC_ADDRESSES_PLACES; i++) {
        while (addresses->places[i]) {
            struct shoal_fabric_met *met = addresses->places[i];
            addresses->places[i] = met->next;
            free(met);
        }
    }
}
