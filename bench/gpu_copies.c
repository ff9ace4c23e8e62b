/* Measures the copy engines of a GPU and the cost of streams, without Shoal. Prints one JSON object per line. The first is the
 * device. Then, for each unit: GB/s (of 10^9 bytes) from the device, to it, and in both directions at once, together. Last, for
 * one write of a value and the wait for it, as a ring's unit has (src/device/cuda/cuda_port.c): microseconds on the stream and
 * of the caller.
 *     build/bench/gpu_copies [DEVICE] */
#include <sys/mman.h>

#include "gpu_driver.h"

#define AREA ((size_t)64 << 20)
#define UNIT_MIN ((size_t)256 << 10)
#define UNIT_MAX ((size_t)16 << 20)
#define ROUNDS 5   /* the fastest counts */
#define PAIRS 1000 /* within the capacity of a stream */

enum way { FROM_DEVICE, TO_DEVICE, WAYS };

struct probe {
    char *host[WAYS];
    shoal_cu_address device[WAYS], host_there; /* the device's address of host[0] */
    shoal_cu_stream streams[WAYS];
};

static struct probe open_probe(void)
{
    struct probe probe;
    for (int way = 0; way < WAYS; way++) {
        probe.host[way] = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (probe.host[way] == MAP_FAILED) {
            perror("mmap");
            exit(1);
        }
        memset(probe.host[way], 0, AREA);
        CUDA(host_register(probe.host[way], AREA, SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP));
        CUDA(allocate(&probe.device[way], AREA));
        CUDA(stream_create(&probe.streams[way], SHOAL_CU_STREAM_NON_BLOCKING, 0));
    }
    CUDA(host_address(&probe.host_there, probe.host[0], 0));
    return probe;
}

static void close_probe(struct probe *probe)
{
    for (int way = 0; way < WAYS; way++) {
        CUDA(stream_destroy(probe->streams[way]));
        CUDA(release(probe->device[way]));
        CUDA(host_unregister(probe->host[way]));
        munmap(probe->host[way], AREA);
    }
}

static void wait_for_both(const struct probe *probe)
{
    for (int way = 0; way < WAYS; way++)
        CUDA(stream_synchronize(probe->streams[way]));
}

/* Returns the seconds to copy the areas in units, in the directions whose bits are set. */
static double copy_areas(const struct probe *probe, size_t unit, unsigned ways)
{
    wait_for_both(probe);
    const double start = gpu_now();
    for (size_t at = 0; at < AREA; at += unit) {
        if (ways & 1u << FROM_DEVICE)
            CUDA(copy_to_host(probe->host[0] + at, probe->device[0] + at, unit, probe->streams[0]));
        if (ways & 1u << TO_DEVICE)
            CUDA(copy_to_device(probe->device[1] + at, probe->host[1] + at, unit, probe->streams[1]));
    }
    wait_for_both(probe);
    return gpu_now() - start;
}

static double fastest(const struct probe *probe, size_t unit, unsigned ways)
{
    double least = copy_areas(probe, unit, ways);
    for (int round = 1; round < ROUNDS; round++) {
        const double took = copy_areas(probe, unit, ways);
        least = took < least ? took : least;
    }
    return least;
}

static void print_unit(const struct probe *probe, size_t unit)
{
    const double bytes = (double)AREA * 1e-9, from = fastest(probe, unit, 1u << FROM_DEVICE),
                 to = fastest(probe, unit, 1u << TO_DEVICE), both = fastest(probe, unit, 1u << FROM_DEVICE | 1u << TO_DEVICE);
    printf("{\"unit_bytes\":%zu,\"from_gb_s\":%.3f,\"to_gb_s\":%.3f,\"both_gb_s\":%.3f}\n", unit, bytes / from, bytes / to,
           2 * bytes / both);
}

static union shoal_cu_memory_op value_op(const struct probe *probe, unsigned operation, uint64_t value)
{
    union shoal_cu_memory_op op = {.bytes = {0}};
    op.value.operation = operation;
    op.value.address = probe->host_there;
    op.value.value = value;
    op.value.flags = operation == SHOAL_CU_OP_WAIT_64 ? SHOAL_CU_WAIT_GEQ : 0;
    return op;
}

static void print_values(const struct probe *probe)
{
    double least = 1e9, least_posting = 1e9;
    if (!cu.memory_ops)
        return;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        const double start = gpu_now();
        for (uint64_t i = 1; i <= PAIRS; i++) {
            union shoal_cu_memory_op ops[] = {value_op(probe, SHOAL_CU_OP_WRITE_64, round * PAIRS + i),
                                              value_op(probe, SHOAL_CU_OP_WAIT_64, round * PAIRS + i)};
            CUDA(memory_ops(probe->streams[0], 2, ops, 0));
        }
        const double posted = gpu_now() - start;
        wait_for_both(probe);
        const double took = gpu_now() - start;
        least = took < least ? took : least;
        least_posting = posted < least_posting ? posted : least_posting;
    }
    printf("{\"pair_us\":%.3f,\"call_us\":%.3f}\n", least * 1e6 / PAIRS, least_posting * 1e6 / PAIRS);
}

int main(int count, char **words)
{
    const shoal_cu_device device = gpu_open(count > 1 ? atoi(words[1]) : 0);
    char name[128];
    int version, devices;
    CUDA(device_name(name, sizeof name, device));
    CUDA(driver_version(&version));
    CUDA(device_count(&devices));
    printf("{\"device\":\"%s\",\"devices\":%d,\"driver\":%d}\n", name, devices, version);
    struct probe probe = open_probe();
    for (size_t unit = UNIT_MIN; unit <= UNIT_MAX; unit *= 4)
        print_unit(&probe, unit);
    print_values(&probe);
    close_probe(&probe);
    return 0;
}
