/* A libfabric that answers fi_getinfo like the machine named in SHOAL_MOCK_FABRIC, and opens endpoints that reach each other
 * in one process. It tests Shoal's use of EFA and InfiniBand on machines without either. SHOAL_LIBFABRIC loads it. Its answers
 * follow the documents and sources of libfabric 1.17 to 2.6; they were never compared with hardware. */
#include "mock_fabric.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define WRITES (FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE)
#define READS_DEVICES (WRITES | FI_HMEM)
#define EFA_MODES (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

struct device {
    const char *machine, *provider, *fabric, *domain, *address; /* address NULL: not an IP address */
    enum fi_ep_type type;
    uint64_t caps;
    uint64_t modes;
    size_t data_bytes;
    size_t message_bytes; /* the stated maximum of a message; 0: none */
};

static const struct device devices[] = {
    {"aws", "efa", "efa-direct", "rdmap0s6-direct", NULL, FI_EP_RDM, WRITES, EFA_MODES, 4, 1 << 30},
    {"aws", "efa", "efa", "rdmap0s6-rdm", NULL, FI_EP_RDM, WRITES, EFA_MODES, 4, 0},
    {"aws-first", "efa", "efa", "efa_0-rdm", NULL, FI_EP_RDM, WRITES, EFA_MODES, 4, 0},
    {"aws", "efa", "efa", "rdmap0s6-dgrm", NULL, FI_EP_DGRAM, FI_MSG, EFA_MODES, 4, 8 << 10},
    {"p4d", "efa", "efa", "rdmap16s27-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"p4d", "efa", "efa", "rdmap32s27-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"p4d", "efa", "efa", "rdmap16s27-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"p4d", "efa", "efa", "rdmap144s27-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"p4d", "efa", "efa", "rdmap160s27-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"gpudirect", "efa", "efa", "rdmap0s6-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"gpudirect-by-calls", "efa", "efa", "calls-rdm", NULL, FI_EP_RDM, READS_DEVICES, EFA_MODES, 4, 0},
    {"gpudirect-tcp", "tcp", NULL, "eth0", "10.0.0.5", FI_EP_RDM, READS_DEVICES, 0, 8, 0},
    {"p4d", "tcp", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"rails", "tcp", NULL, "docker0", "172.17.0.1", FI_EP_RDM, WRITES, 0, 8, 0},
    {"rails", "tcp", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"rails", "tcp", NULL, "eth1", "10.1.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"rails", "tcp", NULL, "eth2", "10.2.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"short", "net", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 8, 8 << 10},
    {"aws", "tcp", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"infiniband", "verbs;ofi_rxm", NULL, "mlx5_0", "10.1.0.5", FI_EP_RDM, WRITES, EFA_MODES, 4, 0},
    {"infiniband", "tcp;ofi_rxm", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, FI_MR_LOCAL, 8, 0},
    {"infiniband", "net", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 8, 0},
    {"old", "tcp", NULL, "eth0", "10.0.0.5", FI_EP_MSG, WRITES, 0, 8, 0},
    {"old", "udp;ofi_rxd", NULL, "eth0", "10.0.0.5", FI_EP_RDM, FI_MSG, 0, 8, 0},
    {"messages", "udp;ofi_rxd", NULL, "eth0", NULL, FI_EP_RDM, FI_MSG, 0, 8, 0},
    {"ethernet", "tcp", NULL, "eth0", NULL, FI_EP_RDM, WRITES, 0, 8, 0},
    {"short-writes", "tcp", NULL, "eth0", NULL, FI_EP_RDM, WRITES, FI_MR_LOCAL, 8, 64 << 10},
    {"no-immediate", "net", NULL, "eth0", "10.0.0.5", FI_EP_RDM, WRITES, 0, 0, 0},
    {"tagged-only", "net", NULL, "eth0", "10.0.0.5", FI_EP_RDM, FI_TAGGED, 0, 8, 0},
};

static const char *const built_in[] = {"efa", "verbs", "tcp", "net", "ofi_rxm", "udp"};

static struct fi_info *make_info(void)
{
    struct fi_info *info = calloc(1, sizeof *info);
    info->tx_attr = calloc(1, sizeof *info->tx_attr);
    info->rx_attr = calloc(1, sizeof *info->rx_attr);
    info->ep_attr = calloc(1, sizeof *info->ep_attr);
    info->domain_attr = calloc(1, sizeof *info->domain_attr);
    info->fabric_attr = calloc(1, sizeof *info->fabric_attr);
    return info;
}

static char *copy_text(const char *text)
{
    return text ? strdup(text) : NULL;
}

EXPORT void fi_freeinfo(struct fi_info *info);
EXPORT void fi_freeinfo(struct fi_info *info)
{
    while (info) {
        struct fi_info *next = info->next;
        free(info->src_addr);
        free(info->domain_attr->name);
        free(info->fabric_attr->prov_name);
        free(info->fabric_attr->name);
        free(info->tx_attr);
        free(info->rx_attr);
        free(info->ep_attr);
        free(info->domain_attr);
        free(info->fabric_attr);
        free(info);
        info = next;
    }
}

EXPORT struct fi_info *fi_dupinfo(const struct fi_info *info);
EXPORT struct fi_info *fi_dupinfo(const struct fi_info *info)
{
    struct fi_info *copy = make_info();
    if (!info)
        return copy;
    copy->caps = info->caps;
    copy->mode = info->mode;
    copy->addr_format = info->addr_format;
    *copy->ep_attr = *info->ep_attr;
    *copy->domain_attr = *info->domain_attr;
    copy->domain_attr->name = copy_text(info->domain_attr->name);
    copy->fabric_attr->name = copy_text(info->fabric_attr->name);
    copy->fabric_attr->prov_name = copy_text(info->fabric_attr->prov_name);
    if (info->src_addr) {
        copy->src_addr = malloc(sizeof(struct sockaddr_in));
        memcpy(copy->src_addr, info->src_addr, sizeof(struct sockaddr_in));
        copy->src_addrlen = info->src_addrlen;
    }
    return copy;
}

/* Support for device memory is offered only if the caller asks for it. */
static struct fi_info *info_of(const struct device *device, bool reads_devices)
{
    struct fi_info *info = make_info();
    info->caps = reads_devices ? device->caps : device->caps & ~FI_HMEM;
    info->ep_attr->type = device->type;
    info->ep_attr->max_msg_size = device->message_bytes ? device->message_bytes : SIZE_MAX;
    info->domain_attr->name = strdup(device->domain);
    info->domain_attr->mr_mode = (int)device->modes | (reads_devices ? FI_MR_HMEM : 0);
    info->domain_attr->cq_data_size = device->data_bytes;
    info->domain_attr->data_progress = device->modes ? FI_PROGRESS_MANUAL : FI_PROGRESS_AUTO;
    info->domain_attr->mr_key_size = 8;
    info->fabric_attr->name = copy_text(device->fabric);
    info->fabric_attr->prov_name = strdup(device->provider);
    info->addr_format = FI_ADDR_EFA;
    if (device->address) {
        struct sockaddr_in *address = calloc(1, sizeof *address);
        address->sin_family = AF_INET;
        inet_pton(AF_INET, device->address, &address->sin_addr);
        info->addr_format = FI_SOCKADDR_IN;
        info->src_addr = address;
        info->src_addrlen = sizeof *address;
    }
    return info;
}

static struct fi_info *list_built_in(void)
{
    struct fi_info *first = NULL;
    for (size_t i = 0; i < sizeof built_in / sizeof built_in[0]; i++) {
        struct fi_info *info = make_info();
        info->fabric_attr->prov_name = strdup(built_in[i]);
        info->next = first;
        first = info;
    }
    return first;
}

static int is_asked_for(const struct device *device, const struct fi_info *hints)
{
    const char *machine = getenv("SHOAL_MOCK_FABRIC");
    return machine && !strcmp(machine, device->machine) && !strcmp(hints->fabric_attr->prov_name, device->provider) &&
           (hints->ep_attr->type == FI_EP_UNSPEC || hints->ep_attr->type == device->type) &&
           (hints->caps & (device->caps | FI_REMOTE_COMM)) == hints->caps &&
           (!device->message_bytes || hints->ep_attr->max_msg_size <= device->message_bytes) &&
           (device->modes & (uint64_t)hints->domain_attr->mr_mode) == device->modes;
}

EXPORT int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                      struct fi_info **info);
EXPORT int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                      struct fi_info **info)
{
    (void)version, (void)node, (void)service;
    struct fi_info **end = info;
    const char *machine = getenv("SHOAL_MOCK_FABRIC");
    if (machine && !strcmp(machine, "hangs"))
        sleep(60);
    *info = NULL;
    if (flags & FI_PROV_ATTR_ONLY) {
        *info = list_built_in();
        return 0;
    }
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        if (!is_asked_for(&devices[i], hints))
            continue;
        *end = info_of(&devices[i], hints->caps & FI_HMEM);
        (*end)->domain_attr->resource_mgmt = hints->domain_attr->resource_mgmt;
        end = &(*end)->next;
    }
    return *info ? 0 : -FI_ENODATA;
}

EXPORT int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
EXPORT int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
    (void)attr, (void)context;
    return mock_open_fabric(fabric);
}

EXPORT const char *fi_strerror(int error);
EXPORT const char *fi_strerror(int error)
{
    return error == FI_ENODATA ? "No data available" : error == FI_EINVAL ? "Invalid argument" : strerror(error);
}

EXPORT uint32_t fi_version(void);
EXPORT uint32_t fi_version(void)
{
    return getenv("SHOAL_MOCK_VERSION") ? (uint32_t)strtoul(getenv("SHOAL_MOCK_VERSION"), NULL, 0) : FI_VERSION(1, 99);
}
