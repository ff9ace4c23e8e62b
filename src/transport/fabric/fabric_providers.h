/* The providers of libfabric, and which of them carries Shoal's traffic: an endpoint for unconnected, reliable datagrams of any
 * size. Those that write into a peer's memory and hand an immediate to it with that are used so; others send. Set-up only. */
#ifndef SHOAL_TRANSPORT_FABRIC_PROVIDERS_H
#define SHOAL_TRANSPORT_FABRIC_PROVIDERS_H

#include "topology/nic.h"
#include "transport/fabric/fabric_library.h"
#include "transport/fabric/fabric_settings.h"

enum shoal_fabric_way { SHOAL_FABRIC_REJECTED, SHOAL_FABRIC_SENDS, SHOAL_FABRIC_WRITES };

struct shoal_fabric_provider {
    const char *name; /* as libfabric calls it; static storage */
    enum shoal_fabric_way way;
    bool is_on_request;   /* taken only when SHOAL_PROVIDER names it */
    bool is_over_tcp;     /* its endpoint listens for TCP connections at its address */
    bool reads_devices;   /* it sends from memory of GPUs that is registered as a dma-buf; known where that was asked for */
    int adapters;         /* through which it offers the same */
    char text[240];       /* what it offers, or why it was rejected */
    struct fi_info *info; /* NULL where rejected; the caller frees it with the library's freeinfo */
};

#define SHOAL_FABRIC_PROVIDERS 6

/* Asks each provider that Shoal knows, best first, for memory of GPUs, too. nic: the interface that leads to the others;
 * providers that count interfaces otherwise (efa) are not bound to it. */
void shoal_fabric_providers_find(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                 struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS]);
/* The same for a rank of several, but asks only until the one that shoal_fabric_providers_choose will take is found, and for
 * memory of GPUs only where that is wanted. */
void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, bool wants_devices, struct shoal_fabric_share share,
                                      struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS]);
void shoal_fabric_providers_free(const struct shoal_fabric_library *library,
                                 struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS]);

/* The best one, or the one that is wanted (SHOAL_PROVIDER; empty: no wish). NULL, with the reason, when there is none. */
const struct shoal_fabric_provider *
shoal_fabric_providers_choose(const struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS], const char *wanted,
                              char *reason, size_t reason_bytes);

#endif
