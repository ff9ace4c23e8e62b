/* Settings of the network between hosts. */
#ifndef SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H
#define SHOAL_TRANSPORT_FABRIC_FABRIC_SETTINGS_H

#include "base/setting.h"

struct shoal_fabric_settings {
    char libfabric[SHOAL_SETTING_TEXT_MAX];
    char provider[SHOAL_SETTING_TEXT_MAX];
    char writes[SHOAL_SETTING_TEXT_MAX];
    uint64_t gpudirect_bytes;
};
extern const struct shoal_setting_table shoal_fabric_setting_table;

/* Which of the ranks of its host a process is: several adapters are divided among them, neighbours together, as they are bound
 * to neighbouring cores. All zeros: it takes the first one. Another can be named instead, as the kernel calls it:
 * "rdmap16s27", "mlx5_0". Where the host has a GPU for each of its ranks, that is the one near the rank's GPU. */
struct shoal_fabric_share {
    int rank, ranks;
    const char *adapter; /* NULL, or not offered by the provider: none is named */
};

#endif
