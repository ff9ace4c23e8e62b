/* Times an MPI library's collectives exactly as `shoal bench` times Shoal's: float32, sums, root 0, one JSON object per line
 * and size.
 *     mpicc -O2 bench/mpi_bench.c -o build/mpi_bench && mpirun -n 2 build/mpi_bench allgather 8 268435456 8 out-of-place 4
 * Arguments: collective, smallest bytes, largest bytes, factor, in-place or out-of-place, seconds. Bytes are those of the
 * larger operand: of all parts if it has one part per rank. Each iteration rewrites the input (untimed) and starts at a
 * barrier; the slowest rank's time counts. Each size runs one operation whose result is compared element by element, three
 * warm-ups, then iterations: for a quarter of a second below 64 KiB (at least 500, at most 20,000), 60 below 8 MiB, 12 above.
 * There are fewer iterations if they take longer than the given seconds, but at least 5. exchange_ns is a bare cache-line
 * exchange between ranks 0 and 1, timed just before each size while the others sleep; null if ranks are on several hosts.
 * cpu_us is the CPU time of all ranks together per operation, over operations in a row. */
#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARMUPS = 3, ITERATIONS_MAX = 20000, ITERATIONS_MIN = 5, CHUNKS = 10, CHUNK_ROUNDS = 2000, SPINS = 4096 };
enum { PERIOD = 7, LEAD = 8, BLOCK = PERIOD * 32 };
enum operand { VECTOR, PARTS };

struct line {
    _Alignas(128) _Atomic uint64_t value;
};

struct area {
    struct line side[2], done;
};

struct bench {
    const struct row *row;
    int rank, ranks, in_place, seconds;
    int count; /* elements of a vector or of one part */
    float *input, *output, *buffers[2];
    struct area *area; /* shared by all ranks; NULL if they are on several hosts */
    uint64_t turn, exchanges;
    uint64_t fresh; /* inputs written so far; each has another pattern */
};

/* How a collective uses its operands, and its call. */
struct row {
    const char *name;
    enum operand input, output;
    int input_at_root, output_at_root; /* the other ranks have none */
    int reduces;
    void (*call)(const struct bench *bench);
};

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* All ranks map rank 0's part of the window. It lives until MPI_Finalize. */
static struct area *area_open(int rank, int ranks)
{
    MPI_Comm local;
    MPI_Win window;
    MPI_Aint bytes = rank == 0 ? 4096 : 0;
    int unit, neighbours;
    char *base;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    MPI_Comm_size(local, &neighbours);
    if (neighbours < ranks)
        return NULL;
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
    if (!bench->area)
        return -1;
    bench->exchanges++;
    if (bench->rank < 2 && bench->ranks > 1)
        ns = ping_pong(bench);
    if (bench->rank == 0)
        atomic_store_explicit(&bench->area->done.value, bench->exchanges, memory_order_release);
    while (bench->rank > 1 && atomic_load_explicit(&bench->area->done.value, memory_order_acquire) < bench->exchanges)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return ns;
}

/* ---- Collectives --------------------------------------------------------------------------------------------------------- */

/* MPI marks an operand in place in the call: on all ranks, or on root alone. */
static void *or_in_place(const struct bench *bench, void *buffer)
{
    return bench->in_place ? MPI_IN_PLACE : buffer;
}

static void *or_in_place_at_root(const struct bench *bench, void *buffer)
{
    return bench->rank ? buffer : or_in_place(bench, buffer);
}

static void allreduce(const struct bench *bench)
{
    MPI_Allreduce(or_in_place(bench, bench->input), bench->output, bench->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void reduce(const struct bench *bench)
{
    MPI_Reduce(or_in_place_at_root(bench, bench->input), bench->output, bench->count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
}

static void reduce_scatter(const struct bench *bench)
{
    MPI_Reduce_scatter_block(or_in_place(bench, bench->input), bench->output, bench->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* MPI_Bcast has one buffer, so it is always in place. */
static void broadcast(const struct bench *bench)
{
    MPI_Bcast(bench->output, bench->count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void allgather(const struct bench *bench)
{
    MPI_Allgather(or_in_place(bench, bench->input), bench->count, MPI_FLOAT, bench->output, bench->count, MPI_FLOAT,
                  MPI_COMM_WORLD);
}

static void gather(const struct bench *bench)
{
    MPI_Gather(or_in_place_at_root(bench, bench->input), bench->count, MPI_FLOAT, bench->output, bench->count, MPI_FLOAT, 0,
               MPI_COMM_WORLD);
}

static void scatter(const struct bench *bench)
{
    MPI_Scatter(bench->input, bench->count, MPI_FLOAT, or_in_place_at_root(bench, bench->output), bench->count, MPI_FLOAT, 0,
                MPI_COMM_WORLD);
}

static void alltoall(const struct bench *bench)
{
    MPI_Alltoall(or_in_place(bench, bench->input), bench->count, MPI_FLOAT, bench->output, bench->count, MPI_FLOAT,
                 MPI_COMM_WORLD);
}

/* name, input, output, only root has the input, the output, reduces, call */
static const struct row rows[] = {
    {"allreduce", VECTOR, VECTOR, 0, 0, 1, allreduce},
    {"reduce", VECTOR, VECTOR, 0, 1, 1, reduce},
    {"reducescatter", PARTS, VECTOR, 0, 0, 1, reduce_scatter},
    {"broadcast", VECTOR, VECTOR, 1, 0, 0, broadcast},
    {"allgather", VECTOR, PARTS, 0, 0, 0, allgather},
    {"gather", VECTOR, PARTS, 0, 1, 0, gather},
    {"scatter", PARTS, VECTOR, 1, 0, 0, scatter},
    {"alltoall", PARTS, PARTS, 0, 0, 0, alltoall},
};

static const struct row *row_find(const char *name)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (!strcmp(rows[i].name, name))
            return &rows[i];
    return NULL;
}

static size_t parts_of(const struct bench *bench, enum operand operand)
{
    return operand == PARTS ? (size_t)bench->ranks : 1;
}

static size_t parts_most(const struct bench *bench)
{
    return parts_of(bench, bench->row->input == PARTS ? PARTS : bench->row->output);
}

/* Returns the elements of a vector or of one part: rounded down, but at least one. */
static size_t count_of(const struct bench *bench, size_t bytes)
{
    const size_t count = bytes / (parts_most(bench) * sizeof(float));
    return count ? count : 1;
}

/* In place, the input of an all-gather is this rank's part of the output. Other operands in place begin at the same address. */
static void operands_set(struct bench *bench, size_t count)
{
    const int in_parts = bench->in_place && bench->row->call == allgather;
    bench->count = (int)count;
    bench->output = bench->buffers[1];
    bench->input = in_parts ? bench->output + (size_t)bench->rank * count : bench->buffers[0];
}

/* ---- Inputs and results -------------------------------------------------------------------------------------------------- */

/* An element is factor * ((k + turn) % 7) + lead. Sums are exact in any order, and a stale result never looks right. */
struct formula {
    size_t factor, lead;
    uint64_t turn;
};

/* Writes at most `count` elements: if ranks share a core, a rank that rewrites its input delays another's timed operation. */
static void block_build(float *block, size_t count, const struct formula *formula)
{
    for (uint64_t k = 0; k < BLOCK && k < count; k++)
        block[k] = (float)(formula->factor * ((k + formula->turn) % PERIOD) + formula->lead);
}

static void pattern_write(float *at, size_t count, const struct formula *formula)
{
    float block[BLOCK];
    block_build(block, count, formula);
    for (; count >= BLOCK; count -= BLOCK, at += BLOCK)
        memcpy(at, block, sizeof block);
    memcpy(at, block, count * sizeof at[0]);
}

static int pattern_is(const float *at, size_t count, const struct formula *formula)
{
    float block[BLOCK];
    block_build(block, count, formula);
    for (; count >= BLOCK; count -= BLOCK, at += BLOCK)
        if (memcmp(at, block, sizeof block))
            return 0;
    return !memcmp(at, block, count * sizeof at[0]);
}

/* Part i has a turn greater by i, so that a swapped part is noticed. */
static void input_rewrite(struct bench *bench)
{
    struct formula formula = {1, (size_t)bench->rank % LEAD, ++bench->fresh};
    const size_t parts = bench->row->input_at_root && bench->rank ? 0 : parts_of(bench, bench->row->input);
    for (size_t part = 0; part < parts; part++, formula.turn++)
        pattern_write(bench->input + part * (size_t)bench->count, (size_t)bench->count, &formula);
}

/* If the input has parts, this rank receives its own part. Part i of an output comes from rank i, a vector from all ranks or
 * from root. */
static int output_is_right(const struct bench *bench)
{
    struct formula formula = {1, 0, bench->fresh + (bench->row->input == PARTS ? (uint64_t)bench->rank : 0)};
    const size_t parts = bench->row->output_at_root && bench->rank ? 0 : parts_of(bench, bench->row->output);
    int right = 1;
    for (int rank = 1; bench->row->reduces && rank < bench->ranks; rank++, formula.factor++)
        formula.lead += (size_t)rank % LEAD;
    for (size_t part = 0; part < parts; part++) {
        formula.lead = bench->row->reduces ? formula.lead : part % LEAD;
        right &= pattern_is(bench->output + part * (size_t)bench->count, (size_t)bench->count, &formula);
    }
    return right;
}

static void result_check(struct bench *bench)
{
    input_rewrite(bench);
    bench->row->call(bench);
    if (output_is_right(bench))
        return;
    fprintf(stderr, "mpi_bench: rank %d: a result of %s of %d elements is wrong\n", bench->rank, bench->row->name,
            bench->count);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- One size ------------------------------------------------------------------------------------------------------------ */

static double iterate(struct bench *bench)
{
    input_rewrite(bench);
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    bench->row->call(bench);
    return MPI_Wtime() - start;
}

/* Small operations run for a quarter of a second, because processes that share cores are moved about every 100 ms. */
static double iterations_usual(size_t bytes, double took_s)
{
    const double quarter = 0.25 / took_s;
    if (bytes >= 65536)
        return bytes < (8u << 20) ? 60 : 12;
    return quarter < 500 ? 500 : quarter > ITERATIONS_MAX ? ITERATIONS_MAX : quarter;
}

/* Warms up, then returns how many iterations fit the seconds, the same on every rank. */
static int iterations_choose(struct bench *bench, size_t bytes)
{
    double slowest;
    const double start = MPI_Wtime();
    for (int i = 0; i < WARMUPS; i++)
        iterate(bench);
    const double mine = (MPI_Wtime() - start) / WARMUPS;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const double fit = bench->seconds / slowest, usual = iterations_usual(bytes, slowest);
    return (int)(fit >= usual ? usual : fit < ITERATIONS_MIN ? ITERATIONS_MIN : fit);
}

struct result {
    size_t bytes;
    int iterations;
    double median_us, p99_us, exchange_ns, loop_us, cpu_us;
};

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Measures many operations in a row. Per operation: microseconds of the slowest rank, and CPU time of all ranks together. */
static void loop_measure(struct bench *bench, struct result *result)
{
    const int rounds = result->iterations / 4 + 1;
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime(), cpu_start = cpu_s();
    for (int i = 0; i < rounds; i++)
        bench->row->call(bench);
    const double cpu = (cpu_s() - cpu_start) * 1e6 / rounds, mine = (MPI_Wtime() - start) * 1e6 / rounds;
    MPI_Allreduce(&mine, &result->loop_us, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    MPI_Allreduce(&cpu, &result->cpu_us, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

static void result_print(const struct bench *bench, const struct result *result)
{
    char exchange[32] = "null";
    if (result->exchange_ns >= 0)
        snprintf(exchange, sizeof exchange, "%.1f", result->exchange_ns);
    printf("{\"collective\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"dtype\":\"float32\",\"in_place\":%s,\"iterations\":%d,"
           "\"median_us\":%.3f,\"p99_us\":%.3f,\"exchange_ns\":%s,\"loop_us\":%.3f,\"cpu_us\":%.3f}\n",
           bench->row->name, bench->ranks, result->bytes, bench->in_place ? "true" : "false", result->iterations,
           result->median_us, result->p99_us, exchange, result->loop_us, result->cpu_us);
    fflush(stdout);
}

static void size_run(struct bench *bench, size_t asked)
{
    static double took[ITERATIONS_MAX], slowest[ITERATIONS_MAX];
    struct result result;
    operands_set(bench, count_of(bench, asked));
    result.bytes = (size_t)bench->count * parts_most(bench) * sizeof(float);
    result.exchange_ns = exchange_measure(bench);
    result_check(bench);
    const int iterations = result.iterations = iterations_choose(bench, result.bytes);
    for (int i = 0; i < iterations; i++)
        took[i] = iterate(bench);
    MPI_Reduce(took, slowest, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    loop_measure(bench, &result);
    qsort(slowest, (size_t)iterations, sizeof slowest[0], by_value);
    result.median_us = slowest[iterations / 2] * 1e6;
    result.p99_us = slowest[iterations * 99 / 100] * 1e6;
    if (bench->rank == 0)
        result_print(bench, &result);
}

/* Ends the job if the arguments are invalid or memory is lacking. */
static void refuse(const struct bench *bench, const char *why)
{
    if (bench->rank == 0)
        fprintf(stderr, "mpi_bench: %s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

/* Allocates both buffers, each with room for the larger operand. */
static void buffers_open(struct bench *bench, size_t most)
{
    const size_t bytes = count_of(bench, most) * parts_most(bench) * sizeof(float);
    if (bytes / sizeof(float) > INT_MAX)
        refuse(bench, "MPI counts up to 2147483647 elements: choose fewer bytes");
    bench->buffers[0] = malloc(bytes);
    bench->buffers[1] = bench->in_place ? bench->buffers[0] : malloc(bytes);
    if (!bench->buffers[0] || !bench->buffers[1])
        refuse(bench, "no memory for the buffers: choose fewer bytes");
    memset(bench->buffers[0], 0, bytes);
    memset(bench->buffers[1], 0, bytes);
}

int main(int argc, char **argv)
{
    struct bench bench = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &bench.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &bench.ranks);
    if (argc != 7)
        refuse(&bench, "wants: collective, smallest bytes, largest bytes, factor, in-place or out-of-place, seconds");
    const size_t least = strtoull(argv[2], NULL, 10), most = strtoull(argv[3], NULL, 10), factor = strtoull(argv[4], NULL, 10);
    bench.row = row_find(argv[1]);
    bench.seconds = atoi(argv[6]);
    if (!bench.row || least < sizeof(float) || most < least || factor < 2 || bench.seconds < 1)
        refuse(&bench, "no such collective, or a number that makes no sense");
    bench.in_place = bench.row->call == broadcast || !strcmp(argv[5], "in-place");
    bench.area = area_open(bench.rank, bench.ranks);
    buffers_open(&bench, most);
    for (size_t bytes = least; bytes <= most; bytes *= factor)
        size_run(&bench, bytes);
    MPI_Finalize();
    return 0;
}
