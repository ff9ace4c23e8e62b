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

bool shoal_fabric_provider_is_on(const struct fi_info *info, const struct shoal_nic *nic)
{
    return has_ip_address(info) && shoal_nic_has_address(nic, info->src_addr);
}

static const struct fi_info *find_usable(const struct fi_info *list, const char *name, const struct shoal_nic *nic)
{
    const struct fi_info *one = provider_find_named(list, name);
    while (one && nic && has_ip_address(one) && !shoal_fabric_provider_is_on(one, nic))
        one = provider_find_named(one->next, name);
    return one;
}

/* ---- Several adapters ---------------------------------------------------------------------------------------------------- */

/* The best form of each adapter of this host, in the order in which ranks divide them. */
struct adapters {
    const struct fi_info *at[SHOAL_NICS_MAX];
    int count;
};

/* libfabric calls an adapter a domain. It may list one several times, best form first. */
static int find_adapter(const struct adapters *adapters, const struct fi_info *one)
{
    for (int i = 0; i < adapters->count; i++) {
        const char *name = one->domain_attr->name, *other = adapters->at[i]->domain_attr->name;
        if (name == other || (name && other && strcmp(name, other) == 0))
            return i;
    }
    return -1;
}

static void add_adapter(struct adapters *adapters, const struct fi_info *one)
{
    if (one && adapters->count < SHOAL_NICS_MAX && find_adapter(adapters, one) < 0)
        adapters->at[adapters->count++] = one;
}

/* An adapter with an IP address counts if its interface is one of the share's: others may lead to the same wire, or nowhere. */
static void list_adapters(const struct fi_info *list, const char *name, const struct shoal_nic *nic,
                          const struct shoal_nics *equal, struct adapters *adapters_out)
{
    const struct fi_info *first = find_usable(list, name, nic);
    const bool has_address = first && has_ip_address(first);
    adapters_out->count = 0;
    for (int i = 0; has_address && equal && i < equal->count; i++)
        add_adapter(adapters_out, find_usable(list, name, &equal->at[i]));
    for (const struct fi_info *one = first; one && !(has_address && equal); one = find_usable(one->next, name, nic))
        add_adapter(adapters_out, one);
    add_adapter(adapters_out, first);
}

/* A domain has the adapter's kernel name, with or without an ending such as "-rdm". */
static bool provider_has_name(const struct fi_info *one, const char *adapter)
{
    const size_t length = strlen(adapter);
    const char *domain = one->domain_attr->name;
    return domain && strncmp(domain, adapter, length) == 0 && (domain[length] == 0 || domain[length] == '-');
}

/* Replaces the host's adapters by those that the share names, if there are any. */
static bool keep_named(struct adapters *adapters, struct shoal_fabric_share share)
{
    struct adapters named = {.count = 0};
    for (int n = 0; n < share.name_count; n++) {
        for (int i = 0; i < adapters->count; i++) {
            if (provider_has_name(adapters->at[i], share.names[n]))
                add_adapter(&named, adapters->at[i]);
        }
    }
    if (named.count)
        *adapters = named;
    return named.count > 0;
}

static int most_of(struct shoal_fabric_share share)
{
    const int wanted = share.ranks ? share.most : 1;
    return wanted && wanted < SHOAL_ADAPTERS_MAX ? wanted : SHOAL_ADAPTERS_MAX;
}

static void put_first(struct adapters *adapters, const struct fi_info *first)
{
    const int at = find_adapter(adapters, first);
    if (at <= 0)
        return;
    memmove(adapters->at + 1, adapters->at, (size_t)at * sizeof adapters->at[0]);
    adapters->at[0] = first;
}

/* Replaces the host's adapters by those of this rank: at least one. `leading` is not left out if it is one of them; NULL for
 * any. */
static void keep_share(struct adapters *adapters, const struct fi_info *leading, struct shoal_fabric_share share)
{
    if (!keep_named(adapters, share)) {
        const int ranks = share.ranks ? share.ranks : 1, first = share.rank * adapters->count / ranks;
        const int end = (share.rank + 1) * adapters->count / ranks;
        memmove(adapters->at, adapters->at + first, (size_t)(adapters->count - first) * sizeof adapters->at[0]);
        adapters->count = end > first ? end - first : 1;
    }
    const int most = most_of(share);
    if (leading && adapters->count > most)
        put_first(adapters, leading);
    adapters->count = adapters->count < most ? adapters->count : most;
}

/* Copies this rank's adapters out of the list. If endpoints have IP addresses, the first one is at the interface that leads to
 * the others, whichever rank has that adapter. */
static void keep_own(const struct shoal_fabric_library *library, const struct fi_info *list, const struct shoal_nic *nic,
                     struct shoal_fabric_share share, struct shoal_fabric_provider *provider)
{
    struct adapters adapters;
    const struct fi_info *first = find_usable(list, provider->name, nic);
    list_adapters(list, provider->name, nic, share.nics, &adapters);
    provider->adapters = adapters.count;
    if (!first)
        return;
    provider->has_more_on_host =
        most_of(share) > 1 && (has_ip_address(first) ? adapters.count > 1 : adapters.count > share.ranks);
    keep_share(&adapters, has_ip_address(first) ? first : NULL, share);
    first = has_ip_address(first) ? first : adapters.at[0];
    const bool is_only_one = most_of(share) == 1;
    provider->info = library->dupinfo(first);
    provider->is_first_others = !is_only_one && find_adapter(&adapters, first) < 0;
    for (int i = 0; i < adapters.count && !is_only_one; i++) {
        if (i != find_adapter(&adapters, first) && (provider->more[provider->more_count] = library->dupinfo(adapters.at[i])))
            provider->more_count++;
    }
}

/* ---- What a provider offers ---------------------------------------------------------------------------------------------- */

static bool can_write(const struct fi_info *info)
{
    return (info->caps & FI_RMA) && (info->caps & FI_WRITE) && (info->caps & FI_REMOTE_WRITE) &&
           info->domain_attr->cq_data_size >= IMMEDIATE_BYTES;
}

const char *shoal_fabric_provider_adapter(const struct fi_info *info)
{
    return info->domain_attr->name ? info->domain_attr->name : "an adapter without a name";
}

/* Prints the names of this rank's adapters, as many as fit: "rdmap16s27-rdm, rdmap32s27-rdm". */
static void print_adapters(const struct shoal_fabric_provider *provider, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "%.60s%s", shoal_fabric_provider_adapter(provider->info),
                                   provider->is_first_others ? " (messages only)" : "");
    for (int i = 0; i < provider->more_count && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, ", %.60s", shoal_fabric_provider_adapter(provider->more[i]));
}

static void provider_describe(struct shoal_fabric_provider *provider)
{
    const struct fi_info *info = provider->info;
    const uint64_t modes = (uint64_t)info->domain_attr->mr_mode;
    const int own = provider->more_count + !provider->is_first_others;
    char names[110], others[48] = "";
    print_adapters(provider, names, sizeof names);
    if (provider->adapters > 1 && own == 1)
        snprintf(others, sizeof others, ", one of %d that ranks divide", provider->adapters);
    else if (provider->adapters > 1)
        snprintf(others, sizeof others, ", %d of %d that ranks divide", own, provider->adapters);
    snprintf(provider->text, sizeof provider->text, "%s on %s%s%s%s%s; progress is %s",
             provider->way == SHOAL_FABRIC_WRITES ? "writes into peers' memory" : "sends", names, others,
             modes & FI_MR_LOCAL ? "; what it sends must be registered" : "",
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
    keep_own(library, list, nic, share, provider);
    library->freeinfo(list);
    if (!provider->info) {
        shoal_nic_print(nic, name);
        snprintf(provider->text, sizeof provider->text, "has no endpoint on %s", name);
        return;
    }
    provider->way = can_write(provider->info) ? SHOAL_FABRIC_WRITES : SHOAL_FABRIC_SENDS;
    provider_describe(provider);
}

void shoal_fabric_providers_find(const struct shoal_fabric_library *library, const struct shoal_nic *nic,
                                 struct shoal_fabric_share share,
                                 struct shoal_fabric_provider providers_out[SHOAL_FABRIC_PROVIDERS])
{
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        providers_out[i] = row_of(i);
        find_one(library, nic, true, share, &providers_out[i]);
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
        while (providers[i].more_count > 0)
            library->freeinfo(providers[i].more[--providers[i].more_count]);
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
