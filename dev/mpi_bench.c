/* Times an MPI library's all-reduce exactly as `shoal bench` times Shoal's: float32 sum, one JSON object per line and size.
 *     mpicc -O2 dev/mpi_bench.c -o build/mpi_bench && mpirun -n 2 build/mpi_bench 8 268435456 8 [in-place]
 * Arguments: smallest bytes, largest bytes, factor. Each iteration rewrites the input (untimed), starts at a barrier and counts
 * the slowest rank; three warm-ups, then 500 iterations below 64 KiB, 60 below 8 MiB, 12 above, fewer where they take over 4 s.
 * exchange_ns is a bare cache-line exchange between ranks 0 and 1, timed just before each size while the others sleep. */
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARMUPS = 3, ITERATIONS_MAX = 500, ITERATIONS_MIN = 5, CAP_S = 4, CHUNKS = 10, CHUNK_ROUNDS = 2000, SPINS = 4096 };

struct line {
    _Alignas(128) _Atomic uint64_t value;
};

struct area {
    struct line side[2], done;
};

struct bench {
    int rank, ranks, in_place;
    float *input, *output;
    struct area *area; /* shared by all ranks */
    uint64_t turn, exchanges;
};

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* All ranks map rank 0's part of the window. It lives until MPI_Finalize. */
static struct area *area_open(int rank)
{
    MPI_Comm local;
    MPI_Win window;
    MPI_Aint bytes = rank == 0 ? 4096 : 0;
    int unit;
    char *base;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, local, &base, &window);
    MPI_Win_shared_query(window, 0, &bytes, &unit, &base);
    base += (128 - (uintptr_t)base % 128) % 128;
    if (rank == 0)
        memset(base, 0, sizeof(struct area));
    MPI_Barrier(MPI_COMM_WORLD);
    return (struct area *)(void *)base;
}

static void turn_wait(struct line *line, uint64_t turn)
{
    for (;; sched_yield())
        for (int spin = 0; spin < SPINS; spin++)
            if (atomic_load_explicit(&line->value, memory_order_acquire) >= turn)
                return;
}

static double ping_pong(struct bench *bench)
{
    double took[CHUNKS];
    for (int chunk = -1; chunk < CHUNKS; chunk++) {
        const double start = MPI_Wtime();
        for (int round = 0; round < CHUNK_ROUNDS; round++) {
            atomic_store_explicit(&bench->area->side[bench->rank].value, ++bench->turn, memory_order_release);
            turn_wait(&bench->area->side[!bench->rank], bench->turn);
        }
        if (chunk >= 0)
            took[chunk] = (MPI_Wtime() - start) * 1e9 / CHUNK_ROUNDS;
    }
    qsort(took, CHUNKS, sizeof took[0], by_value);
    return took[CHUNKS / 2];
}

static double exchange_measure(struct bench *bench)
{
    double ns = 0;
    bench->exchanges++;
    if (bench->rank < 2 && bench->ranks > 1)
        ns = ping_pong(bench);
    if (bench->rank == 0)
        atomic_store_explicit(&bench->area->done.value, bench->exchanges, memory_order_release);
    while (bench->rank > 1 && atomic_load_explicit(&bench->area->done.value, memory_order_acquire) < bench->exchanges)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return ns;
}

static double iterate(struct bench *bench, size_t count)
{
    double mine, slowest;
    for (size_t k = 0; k < count; k++)
        bench->input[k] = (float)bench->rank + (float)(k % 7);
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    MPI_Allreduce(bench->in_place ? MPI_IN_PLACE : bench->input, bench->output, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    mine = MPI_Wtime() - start;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

/* Warms up; returns how many iterations fit the cap, the same on every rank. */
static int iterations_choose(struct bench *bench, size_t count)
{
    const size_t bytes = count * sizeof(float);
    const int usual = bytes < 65536 ? 500 : bytes < (8u << 20) ? 60 : 12;
    double slowest;
    const double start = MPI_Wtime();
    for (int i = 0; i < WARMUPS; i++)
        iterate(bench, count);
    const double mine = (MPI_Wtime() - start) / WARMUPS;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const double fit = CAP_S / slowest;
    return fit >= usual ? usual : fit < ITERATIONS_MIN ? ITERATIONS_MIN : (int)fit;
}

static void size_run(struct bench *bench, size_t count)
{
    double took[ITERATIONS_MAX];
    const double exchange_ns = exchange_measure(bench);
    const int iterations = iterations_choose(bench, count);
    for (int i = 0; i < iterations; i++)
        took[i] = iterate(bench, count);
    qsort(took, (size_t)iterations, sizeof took[0], by_value);
    if (bench->rank == 0)
        printf("{\"collective\":\"allreduce\",\"ranks\":%d,\"bytes\":%zu,\"dtype\":\"float32\",\"in_place\":%s,"
               "\"iterations\":%d,\"median_us\":%.3f,\"p99_us\":%.3f,\"exchange_ns\":%.1f}\n",
               bench->ranks, count * sizeof(float), bench->in_place ? "true" : "false", iterations, took[iterations / 2] * 1e6,
               took[iterations * 99 / 100] * 1e6, exchange_ns);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct bench bench = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &bench.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &bench.ranks);
    const size_t least = argc > 1 ? strtoull(argv[1], NULL, 10) : 8, most = argc > 2 ? strtoull(argv[2], NULL, 10) : 1u << 28;
    const size_t factor = argc > 3 ? strtoull(argv[3], NULL, 10) : 8;
    bench.in_place = argc > 4 && !strcmp(argv[4], "in-place");
    bench.area = area_open(bench.rank);
    bench.input = malloc(most);
    bench.output = bench.in_place ? bench.input : malloc(most);
    if (!bench.input || !bench.output || least < sizeof(float) || factor < 2)
        MPI_Abort(MPI_COMM_WORLD, 2);
    memset(bench.input, 0, most);
    memset(bench.output, 0, most);
    for (size_t bytes = least; bytes <= most; bytes *= factor)
        size_run(&bench, bytes / sizeof(float));
    MPI_Finalize();
    return 0;
}
