/* The providers of libfabric, and the choice of the one for Shoal's traffic: an endpoint for unconnected, reliable datagrams of
 * any size. If the provider can write into a peer's memory and deliver an immediate with the write, Shoal uses that; otherwise
 * it sends messages. Set-up only. */
#ifndef SHOAL_TRANSPORT_FABRIC_PROVIDERS_H
#define SHOAL_TRANSPORT_FABRIC_PROVIDERS_H

#include "topology/nic.h"
#include "transport/fabric/fabric_library.h"
#include "transport/fabric/fabric_settings.h"

enum shoal_fabric_way { SHOAL_FABRIC_REJECTED, SHOAL_FABRIC_SENDS, SHOAL_FABRIC_WRITES };

struct shoal_fabric_provider {
    const char *name; /* libfabric's name; static storage */
    enum shoal_fabric_way way;
    bool is_on_request;   /* chosen only if SHOAL_PROVIDER names it */
    bool is_over_tcp;     /* its endpoint listens for TCP connections at its address */
    bool reads_devices;   /* it sends from memory of GPUs that is registered as a dma-buf; set only if that was queried */
    int adapters;         /* number of adapters with the same offer */
    char text[320];       /* what it offers, or why it was rejected */
    struct fi_info *info; /* describes the first endpoint; NULL if rejected; shoal_fabric_providers_free frees it */
    struct fi_info *more[SHOAL_ADAPTERS_MAX]; /* [more_count] this rank's other adapters; freed likewise */
    int more_count;
    bool has_more_on_host; /* a rank of this host has another adapter than its first endpoint's */
    bool is_first_others;  /* the first endpoint's adapter belongs to another rank, and this rank has others */
};

#define SHOAL_FABRIC_PROVIDERS 6

/* Queries each provider that Shoal knows, best first, also for memory of GPUs, for a rank with that share. nic is the interface
 * that leads to the others, and of the first endpoint, because all ranks can reach each other there; the share decides about
 * other adapters. Providers that count interfaces differently (efa) are not bound to nic. */
void shoal_fabric_providers_find(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                 struct shoal_fabric_share share,
                                 struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS]);
/* Like shoal_fabric_providers_find(), but queries only until it finds the provider that
 * shoal_fabric_providers_choose will return, and for memory of GPUs only if that is wanted. */
void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, bool wants_devices, struct shoal_fabric_share share,
                                      struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS]);
void shoal_fabric_providers_free(const struct shoal_fabric_library *library,
                                 struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS]);

/* Returns libfabric's name of the offer's adapter. */
const char *shoal_fabric_provider_adapter(const struct fi_info *info);
/* Returns true if the offer has the interface's IP address. */
bool shoal_fabric_provider_is_on(const struct fi_info *info, const struct shoal_nic *nic);

/* Returns the best one, or the wanted one (SHOAL_PROVIDER, empty for any). Returns NULL, with the reason, if there is none. */
const struct shoal_fabric_provider *
shoal_fabric_providers_choose(const struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS], const char *wanted,
                              char *reason, size_t reason_bytes);

#endif
