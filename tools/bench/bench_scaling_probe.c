#include "bench_scaling_probe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double scaling_quantile(double *values, size_t count, double share)
{
    qsort(values, count, sizeof *values, by_value);
    return values[(size_t)((double)(count - 1) * share + 0.5)];
}

/* VOLUME_S: how long data flow at least, so that a token bucket of the network is empty for most of the time. */
enum {
    BLOCK_BYTES = 16 << 20,
    COPY_BYTES = 64 << 20,
    COPIES = 5,
    PINGS = 200,
    WARM_PINGS = 20,
    BLOCKS_LEAST = 4,
    BLOCKS_MOST = 4096
};
#define VOLUME_S 0.5

/* Two ranks of neighboring hosts. With an odd number of hosts, the ranks of the last one have no pair. */
struct pair {
    struct shoal_comm *world, *comm; /* comm: NULL without a partner */
    void *memory;                    /* BLOCK_BYTES */
    bool is_first_of_host;
};

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* Every rank copies at the same time, as when all ranks of a host copy their gradients. The slowest counts. */
static enum shoal_status memory_measure(struct shoal_comm *comm, double *gb_s_out)
{
    char *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    enum shoal_status status = from && to ? SHOAL_OK : SHOAL_ERR_MEMORY;
    double took_s[COPIES];
    if (!status) {
        memset(from, 1, COPY_BYTES);
        memset(to, 0, COPY_BYTES);
        status = shoal_barrier(comm, NULL);
    }
    for (int i = 0; !status && i < COPIES; i++) {
        const double begin_s = bench_now();
        memcpy(to, from, COPY_BYTES);
        __asm__ volatile("" ::"r"(to) : "memory");
        took_s[i] = bench_now() - begin_s;
    }
    free(from);
    free(to);
    if (status)
        return status;
    *gb_s_out = 2e-9 * COPY_BYTES / scaling_quantile(took_s, COPIES, 0.5);
    return shoal_allreduce(comm, gb_s_out, gb_s_out, 1, SHOAL_FLOAT64, SHOAL_MIN, NULL);
}

/* ---- The network --------------------------------------------------------------------------------------------------------- */

/* An all-reduce of two ranks sends as many bytes as it has, each way: it moves data as steps do. */
static enum shoal_status blocks_exchange(const struct pair *pair, int blocks)
{
    for (int i = 0; i < blocks; i++)
        BENCH_TRY(shoal_allreduce(pair->comm, pair->memory, pair->memory, BLOCK_BYTES / sizeof(float), SHOAL_FLOAT32, SHOAL_SUM,
                                  NULL));
    return SHOAL_OK;
}

/* Returns the Gbit/s that this rank sent while all pairs exchanged data; infinity without a partner. Both ranks of a pair must
 * exchange equally many blocks, so that number comes from the slowest rank of the job. */
static enum shoal_status rate_measure(const struct pair *pair, double *gbit_s_out)
{
    double once_s = 0;
    *gbit_s_out = INFINITY;
    BENCH_TRY(shoal_barrier(pair->world, NULL));
    const double begun_s = bench_now();
    if (pair->comm)
        BENCH_TRY(blocks_exchange(pair, BLOCKS_LEAST));
    if (pair->comm)
        once_s = (bench_now() - begun_s) / BLOCKS_LEAST;
    BENCH_TRY(shoal_allreduce(pair->world, &once_s, &once_s, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    const int blocks = (int)fmin(BLOCKS_MOST, fmax(BLOCKS_LEAST, ceil(VOLUME_S / once_s)));
    const double again_s = bench_now();
    if (!pair->comm)
        return SHOAL_OK;
    BENCH_TRY(blocks_exchange(pair, blocks));
    *gbit_s_out = 8e-9 * BLOCK_BYTES * blocks / (bench_now() - again_s);
    return SHOAL_OK;
}

static enum shoal_status ping(const struct pair *pair)
{
    const int rank = shoal_comm_rank(pair->comm);
    if (rank == 0)
        BENCH_TRY(shoal_send(pair->comm, pair->memory, 8, SHOAL_INT8, 1, 1, NULL));
    BENCH_TRY(shoal_recv(pair->comm, pair->memory, 8, SHOAL_INT8, 1 - rank, 1, NULL));
    if (rank == 1)
        BENCH_TRY(shoal_send(pair->comm, pair->memory, 8, SHOAL_INT8, 0, 1, NULL));
    return SHOAL_OK;
}

/* Returns the median of half a round trip between the first ranks of two hosts, while no other rank sends; 0 on other ranks. */
static enum shoal_status ping_measure(const struct pair *pair, double *us_out)
{
    double took_us[PINGS];
    *us_out = 0;
    BENCH_TRY(shoal_barrier(pair->world, NULL));
    if (!pair->comm || !pair->is_first_of_host)
        return SHOAL_OK;
    for (int i = -WARM_PINGS; i < PINGS; i++) {
        const double begin_s = bench_now();
        BENCH_TRY(ping(pair));
        took_us[i < 0 ? 0 : i] = (bench_now() - begin_s) * 1e6 / 2;
    }
    *us_out = scaling_quantile(took_us, PINGS, 0.5);
    return SHOAL_OK;
}

/* The ranks of a host share its adapter, so their rates add up. Each is taken to be that of the slowest rank. */
static enum shoal_status network_measure(const struct pair *pair, size_t local, struct scaling_probe *probe)
{
    double gbit_s, half_us;
    BENCH_TRY(rate_measure(pair, &gbit_s));
    BENCH_TRY(ping_measure(pair, &half_us));
    BENCH_TRY(shoal_allreduce(pair->world, &gbit_s, &gbit_s, 1, SHOAL_FLOAT64, SHOAL_MIN, NULL));
    BENCH_TRY(shoal_allreduce(pair->world, &half_us, &half_us, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    probe->rate_gbit_s = gbit_s * (double)local;
    probe->ping_us = half_us;
    return SHOAL_OK;
}

static enum shoal_status pairs_measure(struct shoal_context *context, struct shoal_comm *comm, int local,
                                       struct scaling_probe *probe)
{
    const int rank = shoal_comm_rank(comm), host = rank / local, hosts = shoal_comm_size(comm) / local;
    struct pair pair = {.world = comm, .is_first_of_host = rank % local == 0};
    BENCH_TRY(shoal_comm_split(comm, (host ^ 1) < hosts ? host / 2 * local + rank % local : -1, 0, NULL, &pair.comm));
    BENCH_TRY(shoal_mem_alloc(context, BLOCK_BYTES, &pair.memory));
    memset(pair.memory, 0, BLOCK_BYTES);
    const enum shoal_status status = network_measure(&pair, (size_t)local, probe);
    shoal_comm_free(pair.comm);
    return status ? status : shoal_mem_free(context, pair.memory);
}

enum shoal_status scaling_probe_measure(struct shoal_context *context, struct shoal_comm *comm, size_t local,
                                        struct scaling_probe *probe_out)
{
    *probe_out = (struct scaling_probe){.rate_gbit_s = 0};
    BENCH_TRY(memory_measure(comm, &probe_out->memory_gb_s));
    return (size_t)shoal_comm_size(comm) > local ? pairs_measure(context, comm, (int)local, probe_out) : SHOAL_OK;
}
