#include "inspect/describe_gpus.h"

#include "device/gpu.h"
#include "topology/links.h"

struct gpus {
    const struct shoal_gpu *gpu;
    const char *sys;
    struct shoal_links links;
    int at[SHOAL_GPU_DEVICES_MAX]; /* index of each device among the links' GPUs, or -1 */
    int pairs, reaching;           /* of devices, and those that reach each other's memory */
};

/* ---- The driver's and sysfs's view, joined ------------------------------------------------------------------------------- */

static void note_reach(struct gpus *gpus, int device, int peer)
{
    const enum shoal_gpu_reach reach = shoal_gpu_reach(gpus->gpu, device, peer);
    const int one = gpus->at[device], other = gpus->at[peer];
    gpus->pairs++;
    gpus->reaching += reach != SHOAL_GPU_REACH_NONE;
    if (reach == SHOAL_GPU_REACH_NVLINK && one >= 0 && other >= 0)
        gpus->links.is_nvlink[one][other] = gpus->links.is_nvlink[other][one] = true;
}

static void join_views(struct gpus *gpus)
{
    const int count = shoal_gpu_count(gpus->gpu);
    for (int device = 0; device < count; device++)
        gpus->at[device] = shoal_links_find_gpu(&gpus->links, shoal_gpu_at(gpus->gpu, device)->pci);
    for (int device = 0; device < count; device++)
        for (int peer = 0; peer < count; peer++)
            if (peer != device)
                note_reach(gpus, device, peer);
}

/* ---- Printing ------------------------------------------------------------------------------------------------------------ */

static void print_node(const struct gpus *gpus, int node, FILE *out)
{
    char cores[128];
    shoal_links_print_cores(gpus->sys, node, cores, sizeof cores);
    if (node < 0)
        fprintf(out, ", NUMA node not known");
    else
        fprintf(out, ", NUMA node %d%s%s%s", node, cores[0] ? " (cores " : "", cores, cores[0] ? ")" : "");
}

static void print_device(const struct gpus *gpus, int device, FILE *out)
{
    const struct shoal_gpu_device *about = shoal_gpu_at(gpus->gpu, device);
    const int at = gpus->at[device], adapter = shoal_links_choose_adapter(&gpus->links, at);
    fprintf(out, "  GPU %-2d              %s at %s", device, about->name, about->pci);
    print_node(gpus, at < 0 ? -1 : gpus->links.gpu[at].node, out);
    if (adapter >= 0)
        fprintf(out, ", adapter %s (%s)", gpus->links.adapter[adapter].name,
                shoal_path_text(shoal_links_to_adapter(&gpus->links, at, adapter)));
    fputc('\n', out);
}

static void print_links(const struct gpus *gpus, FILE *out)
{
    const int count = shoal_gpu_count(gpus->gpu);
    fprintf(out, "  links of GPUs       ");
    for (int peer = 0; peer < count; peer++)
        fprintf(out, "%8d", peer);
    for (int device = 0; device < count; device++) {
        fprintf(out, "\n%22d", device);
        for (int peer = 0; peer < count; peer++)
            fprintf(out, "%8s",
                    peer == device ? "-"
                                   : shoal_path_word(shoal_links_between(&gpus->links, gpus->at[device], gpus->at[peer])));
    }
    fprintf(out, "\n  memory of others    %s (%d of %d pairs)\n",
            gpus->reaching == gpus->pairs ? "is reached"
            : gpus->reaching              ? "is reached by some"
                                          : "is not reached",
            gpus->reaching, gpus->pairs);
}

/* If all GPUs are alike, as usual, a plain yes or no suffices. */
static void print_exports(const struct shoal_gpu *gpu, FILE *out)
{
    const int count = shoal_gpu_count(gpu);
    int exporting = 0;
    for (int device = 0; device < count; device++)
        exporting += shoal_gpu_at(gpu, device)->has_dma_buf;
    fprintf(out,
            "  GPUDirect           the driver exports memory of %d of %d GPUs to adapters; `shoal info --providers` shows "
            "which provider reads it\n",
            exporting, count);
}

static void print_all(struct gpus *gpus, FILE *out)
{
    const int version = shoal_gpu_driver_version(gpus->gpu), count = shoal_gpu_count(gpus->gpu);
    fprintf(out, "GPUs                  %d that this process may use; CUDA driver %d.%d\n", count, version / 1000,
            version % 1000 / 10);
    for (int device = 0; device < count; device++)
        print_device(gpus, device, out);
    if (count > 1)
        print_links(gpus, out);
    print_exports(gpus->gpu, out);
    char gdrcopy[200];
    shoal_gpu_describe_gdrcopy(gdrcopy, sizeof gdrcopy);
    fprintf(out, "  GDRCopy             %s\n", gdrcopy);
}

/* If neither the driver nor sysfs shows a GPU, nothing is missing. */
static void print_none(const struct gpus *gpus, enum shoal_status status, struct shoal_log *log, FILE *out)
{
    char reason[SHOAL_LOG_TEXT_MAX] = "";
    (void)shoal_log_last_error(log, reason, sizeof reason);
    if (status == SHOAL_ERR_UNSUPPORTED && !gpus->links.gpus)
        fputs("GPUs                  none\n", out);
    else
        fprintf(out, "GPUs                  none of %d that this process may use:\n  %s\n", gpus->links.gpus, reason);
}

void shoal_describe_gpus(const char *sys, FILE *out)
{
    struct gpus gpus = {.sys = sys};
    struct shoal_gpu *gpu = NULL;
    struct shoal_log log;
    shoal_log_init_quiet(&log);
    shoal_links_read(sys, &gpus.links);
    const enum shoal_status status = shoal_gpu_open(&log, &gpu);
    gpus.gpu = gpu;
    if (status == SHOAL_OK) {
        join_views(&gpus);
        print_all(&gpus, out);
    } else {
        print_none(&gpus, status, &log, out);
    }
    shoal_gpu_close(gpu);
    shoal_log_fini(&log);
}

/* ---- Sums among GPUs ----------------------------------------------------------------------------------------------------- */

static bool can_all_sum(const struct shoal_gpu *gpu)
{
    const int count = shoal_gpu_count(gpu);
    for (int device = 0; device < count; device++) {
        if (shoal_gpu_peers_can(gpu, device) != SHOAL_OK)
            return false;
        for (int peer = 0; peer < count; peer++)
            if (peer != device && shoal_gpu_reach(gpu, device, peer) == SHOAL_GPU_REACH_NONE)
                return false;
    }
    return true;
}

bool shoal_describe_can_sum(int ranks)
{
    struct shoal_gpu *gpu = NULL;
    struct shoal_log log;
    if (ranks < 2 || ranks > SHOAL_GPU_SOURCES_MAX)
        return false;
    shoal_log_init_quiet(&log);
    const bool can = shoal_gpu_open(&log, &gpu) == SHOAL_OK && can_all_sum(gpu);
    shoal_gpu_close(gpu);
    shoal_log_fini(&log);
    return can;
}
