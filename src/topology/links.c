#include "topology/links.h"

#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define VENDOR_NVIDIA 0x10de
#define CLASS_DISPLAY 0x03 /* both graphics (0x0300) and compute-only (0x0302) */

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

static bool links_read_line(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    const bool is_read = fgets(text, (int)bytes, file) != NULL;
    fclose(file);
    if (is_read)
        text[strcspn(text, "\n")] = 0;
    return is_read;
}

static long links_read_number(const char *folder, const char *name, long otherwise)
{
    char path[PATH_MAX], text[64], *end;
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length >= (int)sizeof path || !links_read_line(path, text, sizeof text))
        return otherwise;
    const long number = strtol(text, &end, 0);
    return end == text ? otherwise : number;
}

/* ---- One device ---------------------------------------------------------------------------------------------------------- */

/* "0000:10:1c.0" */
static bool is_pci_id(const char *text, size_t length)
{
    unsigned domain, bus, device, function;
    int used = 0;
    return sscanf(text, "%x:%x:%x.%x%n", &domain, &bus, &device, &function, &used) == 4 && (size_t)used == length;
}

/* Returns the NUMA node of the nearest enclosing device that states one: a virtio device, for example, states none, but the PCI
 * device that carries it does. Truncates `real` to that device's path. */
static int find_node(char *real)
{
    for (char *slash = real + strlen(real); slash && slash > real; slash = strrchr(real, '/')) {
        *slash = 0;
        const long node = links_read_number(real, "numa_node", -2);
        if (node > -2)
            return (int)node;
    }
    return -1;
}

/* Finds the last component of a path that is a PCI id. */
static void find_pci(const char *path, char pci_out[24])
{
    *pci_out = 0;
    for (const char *at = path; *at; at += strspn(at, "/")) {
        const size_t length = strcspn(at, "/");
        if (is_pci_id(at, length) && length < 24)
            snprintf(pci_out, 24, "%.*s", (int)length, at);
        at += length;
    }
}

/* Follows a link of sysfs to a device. Returns false if the link leads nowhere, or to a device that is not on a bus. */
static bool find_device(const char *sys, const char *link, struct shoal_links_device *device_out)
{
    char root[PATH_MAX], real[PATH_MAX];
    if (!realpath(sys, root) || !realpath(link, real))
        return false;
    const size_t length = strlen(root);
    if (strncmp(real, root, length) != 0 || strncmp(real + length, "/devices/", 9) != 0)
        return false;
    const char *path = real + length + 9;
    *device_out = (struct shoal_links_device){.node = -1};
    if (strlen(path) < sizeof device_out->path)
        strcpy(device_out->path, path);
    find_pci(path, device_out->pci);
    device_out->node = find_node(real);
    return device_out->pci[0] != 0;
}

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

static bool links_join(char path[PATH_MAX], const char *sys, const char *folder, const char *name, const char *last)
{
    return snprintf(path, PATH_MAX, "%s/%s/%s%s", sys, folder, name, last) < PATH_MAX;
}

static bool is_gpu(const char *device)
{
    return links_read_number(device, "vendor", 0) == VENDOR_NVIDIA &&
           links_read_number(device, "class", 0) >> 16 == CLASS_DISPLAY;
}

static int compare_gpus(const void *left, const void *right)
{
    const struct shoal_links_device *a = left, *b = right;
    return strcmp(a->pci, b->pci);
}

static int compare_adapters(const void *left, const void *right)
{
    const struct shoal_links_adapter *a = left, *b = right;
    const int by_pci = strcmp(a->device.pci, b->device.pci);
    return by_pci ? by_pci : strcmp(a->name, b->name);
}

static void read_gpus(const char *sys, struct shoal_links *links)
{
    char path[PATH_MAX];
    DIR *folder = links_join(path, sys, "bus/pci", "devices", "") ? opendir(path) : NULL;
    for (const struct dirent *entry; folder && links->gpus < SHOAL_LINKS_GPUS_MAX && (entry = readdir(folder));) {
        if (links_join(path, sys, "bus/pci/devices", entry->d_name, "") && is_gpu(path))
            links->gpus += find_device(sys, path, &links->gpu[links->gpus]);
    }
    if (folder)
        closedir(folder);
    qsort(links->gpu, (size_t)links->gpus, sizeof links->gpu[0], compare_gpus);
}

static void read_adapters(const char *sys, const char *kind, struct shoal_links *links)
{
    char path[PATH_MAX];
    DIR *folder = links_join(path, sys, "class", kind, "") ? opendir(path) : NULL;
    for (const struct dirent *entry; folder && links->adapters < SHOAL_LINKS_ADAPTERS_MAX && (entry = readdir(folder));) {
        struct shoal_links_adapter *adapter = &links->adapter[links->adapters];
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof adapter->name)
            continue;
        strcpy(adapter->name, entry->d_name);
        char device[SHOAL_LINKS_NAME_MAX + 16];
        snprintf(device, sizeof device, "%s/%s", kind, adapter->name);
        links->adapters += links_join(path, sys, "class", device, "/device") && find_device(sys, path, &adapter->device);
    }
    if (folder)
        closedir(folder);
    qsort(links->adapter, (size_t)links->adapters, sizeof links->adapter[0], compare_adapters);
}

void shoal_links_read(const char *sys, struct shoal_links *links_out)
{
    memset(links_out, 0, sizeof *links_out);
    read_gpus(sys, links_out);
    read_adapters(sys, "infiniband", links_out);
    if (!links_out->adapters)
        read_adapters(sys, "net", links_out);
}

int shoal_links_find_gpu(const struct shoal_links *links, const char *pci)
{
    char small[24];
    size_t length = 0;
    for (; pci[length] && length < sizeof small - 1; length++)
        small[length] = (char)tolower((unsigned char)pci[length]);
    small[length] = 0;
    for (int i = 0; i < links->gpus; i++)
        if (strcmp(links->gpu[i].pci, small) == 0)
            return i;
    return -1;
}

/* ---- Classes ------------------------------------------------------------------------------------------------------------- */

/* The common beginning of the two paths ends in a bridge, in a root complex ("pci0000:10"), or above both. */
static enum shoal_path links_of_paths(const char *one, const char *other)
{
    enum shoal_path link = SHOAL_PATH_UNKNOWN;
    while (*one) {
        const size_t length = strcspn(one, "/");
        if (strncmp(one, other, length) != 0 || (other[length] != '/' && other[length] != 0))
            break;
        if (is_pci_id(one, length))
            link = SHOAL_PATH_SWITCH;
        else if (strncmp(one, "pci", 3) == 0 && link == SHOAL_PATH_UNKNOWN)
            link = SHOAL_PATH_ROOT;
        one += length + (one[length] == '/');
        other += length + (other[length] == '/');
    }
    return link;
}

static enum shoal_path link_of(const struct shoal_links_device *one, const struct shoal_links_device *other)
{
    if (!one->path[0] || !other->path[0])
        return SHOAL_PATH_UNKNOWN;
    if (one->node >= 0 && other->node >= 0 && one->node != other->node)
        return SHOAL_PATH_SOCKETS;
    const enum shoal_path link = links_of_paths(one->path, other->path);
    return link != SHOAL_PATH_UNKNOWN || one->node != other->node ? link : SHOAL_PATH_NODE;
}

enum shoal_path shoal_links_between(const struct shoal_links *links, int gpu, int peer)
{
    SHOAL_ASSERT(gpu < links->gpus && peer < links->gpus);
    if (gpu < 0 || peer < 0)
        return SHOAL_PATH_UNKNOWN;
    if (gpu == peer)
        return SHOAL_PATH_SELF;
    return links->is_nvlink[gpu][peer] ? SHOAL_PATH_NVLINK : link_of(&links->gpu[gpu], &links->gpu[peer]);
}

enum shoal_path shoal_links_to_adapter(const struct shoal_links *links, int gpu, int adapter)
{
    SHOAL_ASSERT(gpu < links->gpus && adapter < links->adapters);
    return gpu < 0 || adapter < 0 ? SHOAL_PATH_UNKNOWN : link_of(&links->gpu[gpu], &links->adapter[adapter].device);
}

/* ---- The nearest adapter ------------------------------------------------------------------------------------------------- */

struct nearest {
    enum shoal_path link;
    uint64_t adapters; /* one bit for each adapter at this distance */
};
_Static_assert(SHOAL_LINKS_ADAPTERS_MAX <= 64, "a bit each");

static struct nearest find_nearest(const struct shoal_links *links, int gpu)
{
    struct nearest nearest = {SHOAL_PATH_UNKNOWN, 0};
    for (int i = 0; i < links->adapters; i++) {
        const enum shoal_path link = shoal_links_to_adapter(links, gpu, i);
        if (link < nearest.link)
            nearest = (struct nearest){link, 0};
        if (link == nearest.link)
            nearest.adapters |= UINT64_C(1) << i;
    }
    return nearest;
}

static int links_pick(uint64_t adapters, int number)
{
    SHOAL_ASSERT(!adapters || number < __builtin_popcountll(adapters));
    while (number-- > 0)
        adapters &= adapters - 1;
    return adapters ? __builtin_ctzll(adapters) : -1;
}

int shoal_links_choose_adapters(const struct shoal_links *links, int gpu, int most, int adapters_out[])
{
    const struct nearest own = find_nearest(links, gpu);
    const int nearest = __builtin_popcountll(own.adapters);
    int sharers = 0, before = 0, count = 0;
    for (int peer = 0; peer < links->gpus; peer++) {
        const struct nearest other = find_nearest(links, peer);
        const bool is_sharer = other.link == own.link && other.adapters == own.adapters;
        before += is_sharer && peer < gpu;
        sharers += is_sharer;
    }
    SHOAL_ASSERT(!sharers || before < sharers); /* a GPU shares its adapters with itself */
    const int first = sharers ? before * nearest / sharers : 0, end = sharers ? (before + 1) * nearest / sharers : nearest;
    for (int i = first; i < nearest && count < most && (i == first || i < end); i++)
        adapters_out[count++] = links_pick(own.adapters, i);
    return count;
}

int shoal_links_choose_adapter(const struct shoal_links *links, int gpu)
{
    int adapter;
    return shoal_links_choose_adapters(links, gpu, 1, &adapter) ? adapter : -1;
}

int shoal_links_name_adapters(const char *sys, int rank, int ranks, int most, char names_out[][SHOAL_LINKS_NAME_MAX])
{
    int adapters[SHOAL_LINKS_ADAPTERS_MAX];
    struct shoal_links *links = malloc(sizeof *links);
    if (!links)
        return 0; /* choosing the nearest adapters is only an optimization */
    SHOAL_ASSERT(most <= SHOAL_LINKS_ADAPTERS_MAX);
    shoal_links_read(sys, links);
    const int count = links->gpus == ranks && ranks > 0 ? shoal_links_choose_adapters(links, rank, most, adapters) : 0;
    for (int i = 0; i < count; i++)
        strcpy(names_out[i], links->adapter[adapters[i]].name);
    free(links);
    return count;
}

/* ---- Texts --------------------------------------------------------------------------------------------------------------- */

void shoal_links_print_cores(const char *sys, int node, char *text, size_t bytes)
{
    char path[PATH_MAX];
    *text = 0;
    if (node >= 0 && snprintf(path, sizeof path, "%s/devices/system/node/node%d/cpulist", sys, node) < (int)sizeof path &&
        !links_read_line(path, text, bytes))
        *text = 0;
}

static const char *const link_texts[SHOAL_PATHS][2] = {
    [SHOAL_PATH_SELF] = {"itself", "-"},
    [SHOAL_PATH_NVLINK] = {"NVLink", "nvlink"},
    [SHOAL_PATH_SWITCH] = {"one PCIe switch", "switch"},
    [SHOAL_PATH_ROOT] = {"one root complex", "root"},
    [SHOAL_PATH_NODE] = {"one NUMA node", "node"},
    [SHOAL_PATH_SOCKETS] = {"across sockets", "sockets"},
    [SHOAL_PATH_UNKNOWN] = {"unknown", "?"},
};

const char *shoal_path_text(enum shoal_path link)
{
    return link_texts[link][0];
}

const char *shoal_path_word(enum shoal_path link)
{
    return link_texts[link][1];
}
