/* Settings of the network between hosts. */
#ifndef SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H
#define SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H

#include "base/setting.h"

#define SHOAL_NETWORK_THREADS_MAX 16

struct shoal_fabric_settings {
    char libfabric[SHOAL_SETTING_TEXT_MAX];
    char provider[SHOAL_SETTING_TEXT_MAX];
    char writes[SHOAL_SETTING_TEXT_MAX];
    uint64_t gpudirect_bytes;
    char network_threads[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_fabric_setting_table;

/* Returns the number of threads that SHOAL_NETWORK_THREADS sets, or 0 if it is auto. */
int shoal_fabric_fixed_threads(const struct shoal_fabric_settings *settings);
/* Returns the number of threads at the network for a rank that may use `cores` cores, on a host with that many ranks: what a
 * fast network needs, up to the number of cores. 1 to SHOAL_NETWORK_THREADS_MAX. */
int shoal_fabric_auto_threads(int cores, int local_ranks);

/* A process's position among the ranks of its host. Several adapters are divided among the ranks; neighbors share one, because
 * they are bound to neighboring cores. All zeros selects the first adapter. `adapter` can name another one by its kernel name:
 * "rdmap16s27", "mlx5_0". If the host has a GPU for each of its ranks, that is the adapter near the rank's GPU. */
struct shoal_fabric_share {
    int rank, ranks;
    const char *adapter; /* NULL if none is named; ignored if the provider does not offer it */
};

#endif
