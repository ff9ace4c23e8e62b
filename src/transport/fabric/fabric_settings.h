/* Settings of the network between hosts. */
#ifndef SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H
#define SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H

#include "topology/links.h"
#include "topology/nic.h"

#define SHOAL_NETWORK_THREADS_MAX 16
#define SHOAL_ADAPTERS_MAX 16 /* of one rank */

struct shoal_fabric_settings {
    char libfabric[SHOAL_SETTING_TEXT_MAX];
    char provider[SHOAL_SETTING_TEXT_MAX];
    char writes[SHOAL_SETTING_TEXT_MAX];
    uint64_t gpudirect_bytes;
    char network_threads[SHOAL_SETTING_TEXT_MAX];
    char adapters[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_fabric_setting_table;

/* Returns the number of threads that SHOAL_NETWORK_THREADS sets, or 0 if it is auto. */
int shoal_fabric_fixed_threads(const struct shoal_fabric_settings *settings);
/* Returns the number of threads at the network for a rank that may use `cores` cores, on a host with that many ranks: what a
 * fast network needs, up to the number of cores. 1 to SHOAL_NETWORK_THREADS_MAX. */
int shoal_fabric_auto_threads(int cores, int local_ranks);

/* Returns the most adapters of one rank that SHOAL_ADAPTERS sets, or 0 if it is auto. */
int shoal_fabric_fixed_adapters(const struct shoal_fabric_settings *settings);

/* A process's position among the ranks of its host. The ranks divide the adapters of the host, in the order of both, because
 * neighbors are bound to neighboring cores. An adapter belongs to one rank, unless there are fewer adapters than ranks. All
 * zeros selects the first adapter. */
struct shoal_fabric_share {
    int rank, ranks;
    /* Names this rank's adapters by their kernel names instead: "rdmap16s27", "mlx5_0". If the host has a GPU for each of its
     * ranks, they are those near the rank's GPU. A name that the provider does not offer is ignored. */
    const char (*names)[SHOAL_LINKS_NAME_MAX];
    int name_count;
    /* If endpoints have IP addresses: the interfaces that are equal to the one that leads to the others (shoal_nic_equals).
     * NULL if there is only that one. */
    const struct shoal_nics *nics;
    int most; /* adapters of one rank; 0 for any number */
};

#endif
