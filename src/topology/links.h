/* How the GPUs of a host connect to each other, to its network adapters and to its NUMA nodes. The tree of PCI devices comes
 * from sysfs. NVLink does not appear there, so the caller fills in which GPUs it joins, as their driver reports. Set-up only;
 * any thread.
 *
 *     NUMA node 0                               NUMA node 1
 *     root complex pci0000:10   pci0000:20      pci0000:90
 *        switch                    GPU 2           GPU 4            GPU 0 and 1: through one switch
 *         +- GPU 0                                                  GPU 0 and 2: in one NUMA node
 *         +- GPU 1                                                  GPU 0 and 4: across sockets
 *         +- rdmap16s27
 *
 * Virtual machines often hide switches: what looks like one root complex may be one switch. If the devices state different NUMA
 * nodes, that takes precedence over the tree. */
#ifndef SHOAL_TOPOLOGY_LINKS_H
#define SHOAL_TOPOLOGY_LINKS_H

#include "base/compiler.h"

#define SHOAL_LINKS_GPUS_MAX 64
#define SHOAL_LINKS_ADAPTERS_MAX 64
#define SHOAL_LINKS_NAME_MAX 64
#define SHOAL_LINKS_SYS "/sys"

/* How two devices are joined, nearest first. NCCL calls these path types. */
enum shoal_path {
    SHOAL_PATH_SELF,
    SHOAL_PATH_NVLINK,
    SHOAL_PATH_SWITCH,  /* below one bridge: traffic between the two need not pass through the root complex */
    SHOAL_PATH_ROOT,    /* in one root complex */
    SHOAL_PATH_NODE,    /* in several root complexes of one NUMA node */
    SHOAL_PATH_SOCKETS, /* in different NUMA nodes */
    SHOAL_PATH_UNKNOWN, /* at least one of the two is not in sysfs */
    SHOAL_PATHS
};

struct shoal_links_device {
    char pci[24];   /* "0000:10:1c.0"; empty if it is not on a bus */
    char path[256]; /* in the tree: "pci0000:10/0000:10:1c.0"; empty if not shown */
    int node;       /* NUMA node; -1 if unknown */
};

struct shoal_links_adapter {
    char name[SHOAL_LINKS_NAME_MAX]; /* "rdmap16s27", "mlx5_0", "eth0" */
    struct shoal_links_device device;
};

struct shoal_links {
    int gpus, adapters;
    struct shoal_links_device gpu[SHOAL_LINKS_GPUS_MAX];          /* ordered by PCI id */
    struct shoal_links_adapter adapter[SHOAL_LINKS_ADAPTERS_MAX]; /* ordered by PCI id, then by name */
    bool is_nvlink[SHOAL_LINKS_GPUS_MAX][SHOAL_LINKS_GPUS_MAX];   /* filled in by the caller, symmetric */
};

/* Reads the devices that sysfs, mounted at `sys`, shows: NVIDIA's GPUs, including those that the process may not use, and the
 * adapters. Adapters are the RDMA devices or, if there are none, the network interfaces that are devices. */
void shoal_links_read(const char *sys, struct shoal_links *links_out);

/* Returns the index of a GPU by the PCI id that its driver reports, in upper or lower case, or -1 if sysfs does not show it. */
int shoal_links_find_gpu(const struct shoal_links *links, const char *pci);

/* Pass -1 for a GPU or adapter that sysfs does not show. */
enum shoal_path shoal_links_between(const struct shoal_links *links, int gpu, int peer);
enum shoal_path shoal_links_to_adapter(const struct shoal_links *links, int gpu, int adapter);

/* Finds the adapters that a GPU's traffic should use: those nearest to the GPU. GPUs with the same nearest adapters divide
 * them, neighbors together, and share one if there are fewer adapters than GPUs. So each rank finds its adapters alone,
 * whichever GPUs it may use, and all nearest adapters are used. Returns how many there are: at most `most`, and 0 if there are
 * no adapters. */
int shoal_links_choose_adapters(const struct shoal_links *links, int gpu, int most, int adapters_out[]);
/* Returns the first of them, or -1. */
int shoal_links_choose_adapter(const struct shoal_links *links, int gpu);

/* Copies the names of the adapters for rank number `rank` of a host with one GPU per rank. The rank is assumed to use the GPU
 * with its number in the order of PCI ids, as shoal run and frameworks arrange it. Returns how many there are: at most `most`,
 * and 0 if the numbers of GPUs and ranks differ, or if there are no adapters. */
int shoal_links_name_adapters(const char *sys, int rank, int ranks, int most, char names_out[][SHOAL_LINKS_NAME_MAX]);

/* Prints the cores of a NUMA node, such as "0-23,48-71". The text is empty if they are unknown. */
void shoal_links_print_cores(const char *sys, int node, char *text, size_t bytes);

/* Returns "one PCIe switch", or one word for tables: "switch". */
const char *shoal_path_text(enum shoal_path link);
const char *shoal_path_word(enum shoal_path link);

#endif
