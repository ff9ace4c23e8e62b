/* Which streams of a GPU delay each other? In turn, each of N streams waits for a value in host memory, and the others write
 * one meanwhile. A stream that cannot write shares a hardware queue with the one that waits. Prints one JSON object: the number
 * of ordered pairs that share a queue, with the environment's CUDA_DEVICE_MAX_CONNECTIONS.
 *     build/bench/gpu_queues [N]     40 streams by default */
#include <sys/mman.h>

#include "gpu_driver.h"

#define MOST 256
#define PATIENCE_S 0.01 /* for undelayed writes, which take microseconds */

struct line {
    _Alignas(64) volatile uint64_t value;
};

struct probe {
    int count;
    shoal_cu_stream streams[MOST];
    struct line *lines; /* each stream's last value; the last line is waited for */
    shoal_cu_address there;
};

static shoal_cu_address address_of(const struct probe *probe, int line)
{
    return probe->there + (uint64_t)line * sizeof(struct line);
}

static struct probe open_probe(int count)
{
    struct probe probe = {.count = count};
    const size_t bytes = sizeof(struct line) * (MOST + 1);
    probe.lines = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (probe.lines == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    CUDA(host_register(probe.lines, bytes, SHOAL_CU_REGISTER_DEVICEMAP));
    CUDA(host_address(&probe.there, probe.lines, 0));
    for (int i = 0; i < count; i++)
        CUDA(stream_create(&probe.streams[i], SHOAL_CU_STREAM_NON_BLOCKING, 0));
    return probe;
}

/* Counts the streams that cannot write while this one waits. */
static int count_held_up(struct probe *probe, int waits, uint64_t turn)
{
    int held_up = 0;
    CUDA(wait_value(probe->streams[waits], address_of(probe, MOST), turn, SHOAL_CU_WAIT_GEQ));
    for (int i = 0; i < probe->count; i++) {
        if (i != waits)
            CUDA(write_value(probe->streams[i], address_of(probe, i), turn, 0));
    }
    for (const double begin = gpu_now(); gpu_now() - begin < PATIENCE_S;)
        ;
    for (int i = 0; i < probe->count; i++)
        held_up += i != waits && probe->lines[i].value != turn;
    probe->lines[MOST].value = turn;
    for (int i = 0; i < probe->count; i++)
        CUDA(stream_synchronize(probe->streams[i]));
    return held_up;
}

int main(int argument_count, char **arguments)
{
    const int count = argument_count > 1 ? atoi(arguments[1]) : 40;
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int held_up = 0;
    if (count < 2 || count > MOST) {
        fprintf(stderr, "gpu_queues: %d streams; 2 to %d\n", count, MOST);
        return 2;
    }
    (void)gpu_open(0);
    struct probe probe = open_probe(count);
    for (int i = 0; i < count; i++)
        held_up += count_held_up(&probe, i, (uint64_t)i + 1);
    printf("{\"streams\": %d, \"connections\": \"%s\", \"pairs\": %d, \"held_up\": %d}\n", count, connections ? connections : "",
           count * (count - 1), held_up);
    return 0;
}
