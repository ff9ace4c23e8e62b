#include "transport/fabric/fabric_providers.h"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/fabric/fabric_endpoint.h"

/* The immediate names a counter of the receiver and its generation. efa and verbs have room for no more. */
#define IMMEDIATE_BYTES 4

/* Best first. The last one has no advantage but differs from the others: for tests that name it. */
static const struct {
    const char *name;
    bool is_on_request, is_over_tcp;
} known[SHOAL_FABRIC_PROVIDERS] = {
    {"efa", false, false}, {"verbs;ofi_rxm", false, false}, {"tcp", false, true},
    {"net", false, true},  {"tcp;ofi_rxm", false, true},    {"udp;ofi_rxd", true, false},
};

static struct shoal_fabric_provider row_of(int i)
{
    return (struct shoal_fabric_provider){
        .name = known[i].name, .is_on_request = known[i].is_on_request, .is_over_tcp = known[i].is_over_tcp};
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

/* The first version that registers dma-bufs, and with which memory of devices can be requested. */
#define DMA_BUF_VERSION FI_VERSION(1, 20)

static bool knows_dma_bufs(const struct shoal_fabric_library *library)
{
    return FI_VERSION(library->major, library->minor) >= DMA_BUF_VERSION;
}

static uint32_t api_version(const struct shoal_fabric_library *library, uint64_t caps)
{
    const uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), ours = caps & FI_HMEM ? DMA_BUF_VERSION : headers,
                   theirs = FI_VERSION(library->major, library->minor);
    return ours < theirs ? ours : theirs;
}

/* efa opens its own shared memory for peers of this host, and then has no descriptor to wait on, unless FI_REMOTE_COMM alone is
 * requested. With that, other providers would exclude loopback. */
static uint64_t more_caps(const char *name)
{
    return strcmp(name, "efa") == 0 ? FI_REMOTE_COMM : 0;
}

/* Returns the request to providers, or NULL if out of memory. It accepts any kind of memory registration. */
static struct fi_info *make_hints(const struct shoal_fabric_library *library, const char *name, enum fi_ep_type type,
                                  uint64_t caps)
{
    struct fi_info *hints = library->dupinfo(NULL);
    if (!hints)
        return NULL;
    hints->caps = caps | more_caps(name);
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = type;
    hints->ep_attr->max_msg_size = caps & FI_MSG ? SHOAL_FABRIC_MESSAGE_MAX : 0;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->mr_mode |= caps & FI_HMEM ? FI_MR_HMEM : 0;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED; /* see COMPLETIONS in fabric_endpoint.c */
    hints->fabric_attr->prov_name = strdup(name);
    if (hints->fabric_attr->prov_name)
        return hints;
    library->freeinfo(hints);
    return NULL;
}

/* Some providers answer a request as a part of a layered one, which is another row. And from 2.1 on efa offers its bare device
 * first, which accepts only messages of 8 KiB although it reports up to 1 GiB (for writes). */
static const struct fi_info *provider_find_named(const struct fi_info *list, const char *name)
{
    for (; list; list = list->next) {
        const struct fi_fabric_attr *fabric = list->fabric_attr;
        if (strcmp(fabric->prov_name, name) == 0 && !(fabric->name && strcmp(fabric->name, "efa-direct") == 0))
            break;
    }
    return list;
}

/* Returns a list that contains such a provider; or NULL, with libfabric's *error_out, if none fits. */
static struct fi_info *provider_ask(const struct shoal_fabric_library *library, const char *name, enum fi_ep_type type,
                                    uint64_t caps, int *error_out)
{
    struct fi_info *hints = make_hints(library, name, type, caps), *found = NULL;
    *error_out = -FI_ENOMEM;
    if (!hints)
        return NULL;
    *error_out = library->getinfo(api_version(library, caps), NULL, NULL, 0, hints, &found);
    library->freeinfo(hints);
    if (*error_out == 0 && provider_find_named(found, name))
        return found;
    if (*error_out == 0)
        library->freeinfo(found);
    *error_out = *error_out ? *error_out : -FI_ENODATA;
    return NULL;
}

/* Returns true if libfabric knows the provider, even if the provider finds no device. Layered ones count by their first
 * half. */
static bool is_built_in(const struct shoal_fabric_library *library, const char *name)
{
    struct fi_info *all = NULL;
    bool found = false;
    const size_t length = strcspn(name, ";");
    if (library->getinfo(api_version(library, 0), NULL, NULL, FI_PROV_ATTR_ONLY, NULL, &all) != 0)
        return true; /* unknown */
    for (const struct fi_info *one = all; one && !found; one = one->next) {
        const char *other = one->fabric_attr->prov_name;
        found = other && strncmp(other, name, length) == 0 && (other[length] == 0 || other[length] == ';');
    }
    library->freeinfo(all);
    return found;
}

/* Explains why no provider fits: names the first thing that is missing. */
static void explain_rejection(const struct shoal_fabric_library *library, int error, struct shoal_fabric_provider *provider)
{
    int ignored;
    const char *filter = shoal_setting_from_environment("FI_PROVIDER");
    struct fi_info *any = provider_ask(library, provider->name, FI_EP_UNSPEC, 0, &ignored);
    struct fi_info *datagrams = any ? provider_ask(library, provider->name, FI_EP_RDM, 0, &ignored) : NULL;
    if (error != -FI_ENODATA)
        snprintf(provider->text, sizeof provider->text, "libfabric says: %s", library->error_text(-error));
    else if (!is_built_in(library, provider->name))
        snprintf(provider->text, sizeof provider->text, "is not part of this libfabric%s%.60s",
                 filter ? ", or is left out by FI_PROVIDER=" : "", filter ? filter : "");
    else if (!any)
        snprintf(provider->text, sizeof provider->text, "finds no device here");
    else if (!datagrams)
        snprintf(provider->text, sizeof provider->text, "has no reliable unconnected endpoint (FI_EP_RDM)");
    else
        snprintf(provider->text, sizeof provider->text, "cannot send and receive messages (FI_MSG) of %zu bytes",
                 SHOAL_FABRIC_MESSAGE_MAX);
    if (datagrams)
        library->freeinfo(datagrams);
    if (any)
        library->freeinfo(any);
}

/* ---- One interface ------------------------------------------------------------------------------------------------------- */

static bool has_ip_address(const struct fi_info *info)
{
    return info->src_addr &&
           (info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6);
}

static bool is_on(const struct fi_info *info, const struct shoal_nic *nic)
{
    return !has_ip_address(info) || shoal_nic_has_address(nic, info->src_addr);
}

static const struct fi_info *find_usable(const struct fi_info *list, const char *name, const struct shoal_nic *nic)
{
    const struct fi_info *one = provider_find_named(list, name);
    while (one && nic && !is_on(one, nic))
        one = provider_find_named(one->next, name);
    return one;
}

/* ---- Several adapters ---------------------------------------------------------------------------------------------------- */

/* libfabric calls an adapter a domain. It may list one several times, best form first. */
static bool is_same_adapter(const struct fi_info *a, const struct fi_info *b)
{
    const char *one = a->domain_attr->name, *other = b->domain_attr->name;
    return one == other || (one && other && strcmp(one, other) == 0);
}

static bool is_listed_before(const struct fi_info *first, const struct fi_info *one, const char *name,
                             const struct shoal_nic *nic)
{
    const struct fi_info *other = first;
    while (other != one && !is_same_adapter(other, one))
        other = find_usable(other->next, name, nic);
    return other != one;
}

/* Returns the best form of adapter number `number`, or of the last adapter; NULL if there are none. *count_out is the number of
 * adapters. */
static const struct fi_info *find_adapter(const struct fi_info *list, const char *name, const struct shoal_nic *nic, int number,
                                          int *count_out)
{
    const struct fi_info *first = find_usable(list, name, nic), *found = NULL;
    *count_out = 0;
    for (const struct fi_info *one = first; one; one = find_usable(one->next, name, nic)) {
        if (is_listed_before(first, one, name, nic))
            continue;
        found = *count_out <= number ? one : found;
        ++*count_out;
    }
    return found;
}

/* Returns the best form of the adapter with this kernel name: a domain has that name, with or without an ending such as
 * "-rdm". */
static const struct fi_info *find_named_adapter(const struct fi_info *list, const char *name, const struct shoal_nic *nic,
                                                const char *adapter)
{
    const size_t length = strlen(adapter);
    const struct fi_info *one = find_usable(list, name, nic);
    for (; one; one = find_usable(one->next, name, nic)) {
        const char *domain = one->domain_attr->name;
        if (domain && strncmp(domain, adapter, length) == 0 && (domain[length] == 0 || domain[length] == '-'))
            break;
    }
    return one;
}

/* Takes this rank's adapter of that name on that interface out of the list, and frees the others. */
static struct fi_info *keep_one(const struct shoal_fabric_library *library, struct fi_info *list, const char *name,
                                const struct shoal_nic *nic, struct shoal_fabric_share share, int *adapters_out)
{
    const struct fi_info *one = find_adapter(list, name, nic, 0, adapters_out);
    if (share.ranks > 1)
        one = find_adapter(list, name, nic, share.rank * *adapters_out / share.ranks, adapters_out);
    const struct fi_info *named = share.adapter ? find_named_adapter(list, name, nic, share.adapter) : NULL;
    one = named ? named : one;
    struct fi_info *kept = one ? library->dupinfo(one) : NULL;
    library->freeinfo(list);
    return kept;
}

/* ---- What a provider offers ---------------------------------------------------------------------------------------------- */

static bool can_write(const struct fi_info *info)
{
    return (info->caps & FI_RMA) && (info->caps & FI_WRITE) && (info->caps & FI_REMOTE_WRITE) &&
           info->domain_attr->cq_data_size >= IMMEDIATE_BYTES;
}

static void provider_describe(struct shoal_fabric_provider *provider)
{
    const struct fi_info *info = provider->info;
    const uint64_t modes = (uint64_t)info->domain_attr->mr_mode;
    const char *domain = info->domain_attr->name;
    char others[48] = "";
    if (provider->adapters > 1)
        snprintf(others, sizeof others, ", one of %d that ranks divide", provider->adapters);
    snprintf(provider->text, sizeof provider->text, "%s%s%.80s%s%s%s%s; progress is %s",
             provider->way == SHOAL_FABRIC_WRITES ? "writes into peers' memory" : "sends", domain ? " on " : "",
             domain ? domain : "", others, modes & FI_MR_LOCAL ? "; what it sends must be registered" : "",
             provider->reads_devices ? "; it reads memory of GPUs" : "", modes & FI_MR_PROV_KEY ? "; it chooses keys" : "",
             info->domain_attr->data_progress == FI_PROGRESS_AUTO ? "automatic" : "made by polling");
}

/* Returns a list of offers that send from memory of GPUs, or NULL. Excludes providers that do not drive the adapter themselves:
 * there the processor would copy the memory, with calls of the GPU's driver. */
static struct fi_info *ask_for_devices(const struct shoal_fabric_library *library, const char *name)
{
    int error;
    struct fi_info *list =
        knows_dma_bufs(library) ? provider_ask(library, name, FI_EP_RDM, FI_MSG | FI_RMA | FI_HMEM, &error) : NULL;
    const struct fi_info *found = list ? provider_find_named(list, name) : NULL;
    if (!found || (can_write(found) && (found->domain_attr->mr_mode & FI_MR_LOCAL)))
        return list;
    library->freeinfo(list);
    return NULL;
}

static void find_one(const struct shoal_fabric_library *library, const struct shoal_nic *nic, bool wants_devices,
                     struct shoal_fabric_share share, struct shoal_fabric_provider *provider)
{
    int error;
    char name[SHOAL_NIC_TEXT_MAX];
    struct fi_info *list = wants_devices ? ask_for_devices(library, provider->name) : NULL;
    provider->reads_devices = list != NULL;
    if (!list)
        list = provider_ask(library, provider->name, FI_EP_RDM, FI_MSG | FI_RMA, &error);
    if (!list)
        list = provider_ask(library, provider->name, FI_EP_RDM, FI_MSG, &error);
    if (!list) {
        explain_rejection(library, error, provider);
        return;
    }
    provider->info = keep_one(library, list, provider->name, nic, share, &provider->adapters);
    if (!provider->info) {
        shoal_nic_print(nic, name);
        snprintf(provider->text, sizeof provider->text, "has no endpoint on %s", name);
        return;
    }
    provider->way = can_write(provider->info) ? SHOAL_FABRIC_WRITES : SHOAL_FABRIC_SENDS;
    provider_describe(provider);
}

void shoal_fabric_providers_find(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                 struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        providers_out[i] = row_of(i);
        find_one(library, nic, true, (struct shoal_fabric_share){0}, &providers_out[i]);
    }
}

void shoal_fabric_providers_find_best(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                      const char *wanted, bool wants_devices, struct shoal_fabric_share share,
                                      struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    bool is_found = false;
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        struct shoal_fabric_provider *provider = &providers_out[i];
        *provider = row_of(i);
        const bool is_meant = wanted[0] ? strcmp(wanted, provider->name) == 0 : !provider->is_on_request;
        if (!is_meant || is_found)
            continue;
        find_one(library, nic, wants_devices, share, provider);
        is_found = provider->way != SHOAL_FABRIC_REJECTED;
    }
}

void shoal_fabric_providers_free(const struct shoal_fabric_library *library,
                                 struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS])
{
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        if (providers[i].info)
            library->freeinfo(providers[i].info);
        providers[i].info = NULL;
    }
}

/* ---- Choosing a provider ------------------------------------------------------------------------------------------------- */

const struct shoal_fabric_provider *
shoal_fabric_providers_choose(const struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS], const char *wanted,
                              char *reason, size_t reason_bytes)
{
    size_t used = (size_t)snprintf(reason, reason_bytes, "no provider of libfabric can be used:");
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        const struct shoal_fabric_provider *provider = &providers[i];
        const bool is_meant = wanted[0] ? strcmp(wanted, provider->name) == 0 : !provider->is_on_request;
        if (is_meant && provider->way != SHOAL_FABRIC_REJECTED) {
            snprintf(reason, reason_bytes, "%s", wanted[0] ? "SHOAL_PROVIDER names it" : "the best one here");
            return provider;
        }
        if (is_meant && wanted[0]) {
            snprintf(reason, reason_bytes, "SHOAL_PROVIDER=%s: it %s", wanted, provider->text);
            return NULL;
        }
        if (is_meant && used < reason_bytes)
            used +=
                (size_t)snprintf(reason + used, reason_bytes - used, "%s %s %s", i ? ";" : "", provider->name, provider->text);
    }
    if (wanted[0])
        snprintf(reason, reason_bytes,
                 "SHOAL_PROVIDER is \"%s\", but may be efa, verbs;ofi_rxm, tcp, net, tcp;ofi_rxm or udp;ofi_rxd", wanted);
    return NULL;
}
