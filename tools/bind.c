#include "bind.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topology/limits.h"
#include "topology/links.h"

const char *const bind_words[] = {"slice", "core", "none", NULL};

/* ---- The machine --------------------------------------------------------------------------------------------------------- */

/* Reads the first number of a file of /sys/devices/system/cpu/cpuID/topology. */
static int topology_read(const char *sys, int id, const char *name, int otherwise)
{
    char path[512];
    int number = otherwise;
    snprintf(path, sizeof path, "%s/devices/system/cpu/cpu%d/topology/%s", sys, id, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return otherwise;
    if (fscanf(file, "%d", &number) != 1 || number < 0)
        number = otherwise;
    fclose(file);
    return number;
}

/* Finds a CPU's NUMA node: its folder has an entry such as "node0". */
static int node_find(const char *sys, int id)
{
    char path[512];
    int node = 0;
    snprintf(path, sizeof path, "%s/devices/system/cpu/cpu%d", sys, id);
    DIR *folder = opendir(path);
    if (!folder)
        return 0;
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder))
        if (sscanf(entry->d_name, "node%d", &node) == 1)
            break;
    closedir(folder);
    return node;
}

int bind_machine_read(const char *sys, const cpu_set_t *allowed, struct bind_cpu cpus_out[CPU_SETSIZE])
{
    int count = 0;
    for (int id = 0; id < CPU_SETSIZE; id++)
        if (CPU_ISSET((size_t)id, allowed))
            cpus_out[count++] = (struct bind_cpu){.id = id,
                                                  .node = node_find(sys, id),
                                                  .package = topology_read(sys, id, "physical_package_id", 0),
                                                  .core = topology_read(sys, id, "thread_siblings_list", id)};
    return count;
}

/* ---- The shares ---------------------------------------------------------------------------------------------------------- */

static int cpu_compare(const void *left, const void *right)
{
    const struct bind_cpu *a = left, *b = right;
    const int differences[] = {a->node - b->node, a->package - b->package, a->core - b->core, a->id - b->id};
    for (size_t i = 0; i < sizeof differences / sizeof differences[0]; i++)
        if (differences[i])
            return differences[i];
    return 0;
}

/* Finds the begin of each unit, a physical core or a single thread, in the sorted list; one more entry ends the last. */
static int units_find(const struct bind_cpu *cpus, int count, bool has_whole_cores, int *begins_out)
{
    int units = 0;
    for (int i = 0; i < count; i++)
        if (!i || !has_whole_cores || cpus[i].core != cpus[i - 1].core)
            begins_out[units++] = i;
    begins_out[units] = count;
    return units;
}

bool bind_cut(struct bind_cpu *cpus, int count, enum bind_mode mode, int workers, cpu_set_t *masks_out)
{
    int begins[CPU_SETSIZE + 1];
    if (workers < 1 || workers > count)
        return false;
    qsort(cpus, (size_t)count, sizeof *cpus, cpu_compare);
    int units = units_find(cpus, count, true, begins);
    if (workers > units)
        units = units_find(cpus, count, false, begins);
    for (int w = 0; w < workers; w++) {
        const int from = w * units / workers, to = mode == BIND_CORE ? from + 1 : (w + 1) * units / workers;
        CPU_ZERO(&masks_out[w]);
        for (int i = begins[from]; i < begins[to]; i++)
            CPU_SET((size_t)cpus[i].id, &masks_out[w]);
    }
    return true;
}

/* ---- GPUs ---------------------------------------------------------------------------------------------------------------- */

/* Returns the node of a share; a share that spans nodes counts for its first. */
static int share_node(const struct bind_cpu *cpus, int count, const cpu_set_t *mask)
{
    for (int i = 0; i < count; i++)
        if (CPU_ISSET((size_t)cpus[i].id, mask))
            return cpus[i].node;
    return -1;
}

/* Returns the first free share of that node, or (-1) of any node; -1 if there is none. */
static int share_find(const int *share_nodes, const bool *is_given, int workers, int node)
{
    for (int share = 0; share < workers; share++)
        if (!is_given[share] && (node < 0 || share_nodes[share] == node))
            return share;
    return -1;
}

void bind_turn(const struct bind_cpu *cpus, int count, int workers, const int *nodes, cpu_set_t *masks)
{
    cpu_set_t shares[SHOAL_LINKS_GPUS_MAX];
    int share_nodes[SHOAL_LINKS_GPUS_MAX], taken[SHOAL_LINKS_GPUS_MAX];
    bool is_given[SHOAL_LINKS_GPUS_MAX] = {false};
    if (workers > SHOAL_LINKS_GPUS_MAX)
        return;
    for (int w = 0; w < workers; w++) {
        shares[w] = masks[w];
        share_nodes[w] = share_node(cpus, count, &masks[w]);
    }
    for (int w = 0; w < workers; w++) {
        taken[w] = nodes[w] < 0 ? -1 : share_find(share_nodes, is_given, workers, nodes[w]);
        if (taken[w] >= 0)
            is_given[taken[w]] = true;
    }
    for (int w = 0; w < workers; w++) {
        const int share = taken[w] >= 0 ? taken[w] : share_find(share_nodes, is_given, workers, -1);
        is_given[share] = true;
        masks[w] = shares[share];
    }
}

static void bind_near_gpus(struct bind *bind, const struct bind_cpu *cpus, int count, int workers)
{
    int nodes[SHOAL_LINKS_GPUS_MAX];
    struct shoal_links *links = malloc(sizeof *links);
    if (!links)
        return; /* being near GPUs is only a preference */
    shoal_links_read(SHOAL_LINKS_SYS, links);
    for (int gpu = 0; gpu < links->gpus; gpu++) {
        nodes[gpu] = links->gpu[gpu].node;
        bind->is_near_gpus |= links->gpus == workers && nodes[gpu] >= 0;
    }
    if (bind->is_near_gpus)
        bind_turn(cpus, count, workers, nodes, bind->masks);
    free(links);
}

/* ---- Words --------------------------------------------------------------------------------------------------------------- */

/* Appends text. Returns false if it does not fit; it then ends in "...". */
static bool text_add(char *text, size_t bytes, const char *more)
{
    const size_t used = strlen(text);
    if (used + strlen(more) + sizeof "..." <= bytes) {
        strcpy(text + used, more);
        return true;
    }
    if (used + sizeof "..." <= bytes)
        strcpy(text + used, "...");
    return false;
}

void bind_mask_print(const cpu_set_t *mask, char *text_out, size_t bytes)
{
    char range[32];
    bool fits = true;
    *text_out = 0;
    for (size_t id = 0; id < CPU_SETSIZE && fits; id++) {
        if (!CPU_ISSET(id, mask))
            continue;
        const size_t first = id;
        while (id + 1 < CPU_SETSIZE && CPU_ISSET(id + 1, mask))
            id++;
        const char *plus = *text_out ? "+" : "";
        if (id == first)
            snprintf(range, sizeof range, "%s%zu", plus, first);
        else
            snprintf(range, sizeof range, "%s%zu-%zu", plus, first, id);
        fits = text_add(text_out, bytes, range);
    }
}

/* Prints "each worker has 4 cores: 0-3, 4-7 (...)"; a long list of workers is cut. */
static void shares_print(struct bind *bind, int workers)
{
    int least = CPU_SETSIZE, most = 0;
    char list[160] = "", mask[64], counts[32];
    for (int w = 0; w < workers; w++) {
        const int count = CPU_COUNT(&bind->masks[w]);
        least = count < least ? count : least;
        most = count > most ? count : most;
    }
    for (int w = 0; w < workers; w++) {
        bind_mask_print(&bind->masks[w], mask, sizeof mask);
        if (!text_add(list, sizeof list, w ? ", " : "") || !text_add(list, sizeof list, mask))
            break;
    }
    if (least == most)
        snprintf(counts, sizeof counts, "%d core%s", least, least == 1 ? "" : "s");
    else
        snprintf(counts, sizeof counts, "%d or %d cores", least, most);
    snprintf(bind->text, sizeof bind->text, "each worker has %s%s: %s (--bind none leaves them unbound)", counts,
             bind->is_near_gpus ? " near its GPU" : "", list);
}

/* ---- This machine -------------------------------------------------------------------------------------------------------- */

static void lack_print(struct bind *bind, int workers, int cores, bool is_quota)
{
    snprintf(bind->text, sizeof bind->text, "%d workers share %d core%s%s: they are not bound", workers, cores,
             cores == 1 ? "" : "s", is_quota ? " (the quota of a container)" : "");
}

void bind_make(struct bind *bind, enum bind_mode mode, int workers)
{
    struct bind_cpu cpus[CPU_SETSIZE];
    cpu_set_t allowed;
    *bind = (struct bind){0};
    if (workers < 2 || mode == BIND_NONE)
        return;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) {
        snprintf(bind->text, sizeof bind->text, "workers are not bound: cannot read the affinity mask: %s", strerror(errno));
        return;
    }
    const int cores = shoal_topology_quota_cores(CPU_COUNT(&allowed));
    bind->masks = workers <= cores ? calloc((size_t)workers, sizeof *bind->masks) : NULL;
    const int count = bind->masks ? bind_machine_read("/sys", &allowed, cpus) : 0;
    if (bind->masks && bind_cut(cpus, count, mode, workers, bind->masks)) {
        bind_near_gpus(bind, cpus, count, workers);
        shares_print(bind, workers);
    } else if (workers > cores)
        lack_print(bind, workers, cores, cores < CPU_COUNT(&allowed));
    else
        snprintf(bind->text, sizeof bind->text, "workers are not bound: no memory");
}

void bind_release(struct bind *bind)
{
    free(bind->masks);
    *bind = (struct bind){0};
}

bool bind_apply(const struct bind *bind, int worker)
{
    return !bind->masks || sched_setaffinity(0, sizeof bind->masks[worker], &bind->masks[worker]) == 0;
}
