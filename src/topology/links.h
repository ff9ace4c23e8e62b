/* How the GPUs of a host are joined to each other, to its network adapters and to its NUMA nodes. The tree of PCI devices is
 * read from sysfs; NVLink is not in it, so the caller says which GPUs it joins, as their driver knows. Set-up only; any thread.
 *
 *     NUMA node 0                               NUMA node 1
 *     root complex pci0000:10   pci0000:20      pci0000:90
 *        switch                    GPU 2           GPU 4            GPU 0 and 1: by one switch
 *         +- GPU 0                                                  GPU 0 and 2: in one NUMA node
 *         +- GPU 1                                                  GPU 0 and 4: across sockets
 *         +- rdmap16s27
 *
 * Virtual machines often hide switches. What looks like one root complex may then be one switch, and a stated NUMA node is
 * believed before the tree. */
#ifndef SHOAL_TOPOLOGY_LINKS_H
#define SHOAL_TOPOLOGY_LINKS_H

#include "base/compiler.h"

#define SHOAL_LINKS_GPUS_MAX 64
#define SHOAL_LINKS_ADAPTERS_MAX 64
#define SHOAL_LINKS_NAME_MAX 64
#define SHOAL_LINKS_SYS "/sys"

/* From the nearest on. */
enum shoal_link {
    SHOAL_LINK_SELF,
    SHOAL_LINK_NVLINK,
    SHOAL_LINK_SWITCH,  /* below one bridge: what passes between the two need not pass the root complex */
    SHOAL_LINK_ROOT,    /* of one root complex */
    SHOAL_LINK_NODE,    /* of several root complexes of one NUMA node */
    SHOAL_LINK_SOCKETS, /* of several NUMA nodes */
    SHOAL_LINK_UNKNOWN, /* sysfs does not show one of the two */
    SHOAL_LINKS
};

struct shoal_link_device {
    char pci[24];   /* "0000:10:1c.0"; empty: on no bus */
    char path[256]; /* in the tree: "pci0000:10/0000:10:1c.0"; empty: not shown */
    int node;       /* NUMA; -1: not known */
};

struct shoal_link_adapter {
    char name[SHOAL_LINKS_NAME_MAX]; /* "rdmap16s27", "mlx5_0", "eth0" */
    struct shoal_link_device device;
};

struct shoal_links {
    int gpus, adapters;
    struct shoal_link_device gpu[SHOAL_LINKS_GPUS_MAX];          /* by PCI id */
    struct shoal_link_adapter adapter[SHOAL_LINKS_ADAPTERS_MAX]; /* by PCI id, then by name */
    bool is_nvlink[SHOAL_LINKS_GPUS_MAX][SHOAL_LINKS_GPUS_MAX];  /* the caller's, both ways round */
};

/* Reads what sysfs, mounted at `sys`, shows: NVIDIA's GPUs, also those that a process may not use, and the adapters, which are
 * RDMA devices, or where there are none the network interfaces that are devices. Devices that sysfs does not show are left
 * out. */
void shoal_links_read(const char *sys, struct shoal_links *links_out);

/* The number of a GPU, by the PCI id that its driver tells, in capitals or not; -1: sysfs does not show it. */
int shoal_links_find_gpu(const struct shoal_links *links, const char *pci);

/* -1 stands for a GPU or adapter that sysfs does not show. */
enum shoal_link shoal_links_between(const struct shoal_links *links, int gpu, int peer);
enum shoal_link shoal_links_to_adapter(const struct shoal_links *links, int gpu, int adapter);

/* The adapter that a GPU's traffic should take: one of those nearest to it. GPUs that have the same nearest ones divide them,
 * neighbours together. So each rank finds its own alone, whatever GPUs it may use, and all adapters that are nearest to some
 * GPU are used as far as GPUs go round. -1: there is none. */
int shoal_links_choose_adapter(const struct shoal_links *links, int gpu);

/* The name of that for rank number `rank` of a host that has a GPU for each of its `ranks` ranks: it is taken to use the GPU of
 * its number by PCI id, as shoal run and frameworks have it. False: there are more GPUs or fewer, or no adapter. */
SHOAL_MUST_USE bool shoal_links_name_adapter(const char *sys, int rank, int ranks, char name_out[SHOAL_LINKS_NAME_MAX]);

/* "0-23,48-71", the cores of a NUMA node; empty: not known. */
void shoal_links_print_cores(const char *sys, int node, char *text, size_t bytes);

/* "one PCIe switch", and one word for tables: "switch". */
const char *shoal_link_text(enum shoal_link link);
const char *shoal_link_word(enum shoal_link link);

#endif
