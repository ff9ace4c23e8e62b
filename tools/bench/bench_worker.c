#include "bench.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench_common.h"
#include "bench_gpu.h"

/* Iterations: for small sizes, and limits for others, which make fewer iterations if these would take longer than --seconds. */
enum { ITERATIONS_SMALL = 500, ITERATIONS_MOST = 20000, ITERATIONS_MIN = 5, PAGE_BYTES = 4096 };

struct worker {
    const struct bench_options *options;
    struct bench_area *area;
    struct shoal_context *context;
    struct shoal_comm *comm;
    int rank, ranks, hosts;
    void *memory; /* holds both buffers */
    size_t memory_bytes;
    char *input, *output;  /* each has room for the larger operand */
    struct bench_gpu *gpu; /* NULL if unused; otherwise the contents of `memory` are copied to the same offset on the device */
    char *there;           /* on the device */
    double *took_s;        /* of each iteration; with --late the time of its end */
    double *late_s;        /* with --late, on the last rank: the time of its arrival; elsewhere 0 */
    uint64_t exchanges;
    uint64_t turn; /* iterations so far; shifts the pattern */
    uint64_t errors;
};

/* An operand of this rank: `parts` times the task's count; 0 and NULL if the rank has none. */
struct operand {
    char *at;
    size_t parts;
};

/* The current measurement. */
struct task {
    enum bench_collective collective;
    size_t count; /* elements of a vector or of one part */
    size_t bytes; /* of the larger operand */
    struct operand input, output;
};

static enum shoal_status complain(const struct worker *worker, const char *text)
{
    fprintf(stderr, "shoal bench: rank %d: %s\n", worker->rank, text);
    return SHOAL_ERR_SYSTEM;
}

/* ---- Buffers ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status memory_map(struct worker *worker)
{
    worker->memory = mmap(NULL, worker->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (worker->memory != MAP_FAILED)
        return SHOAL_OK;
    worker->memory = NULL;
    char size[24], text[96];
    snprintf(text, sizeof text, "no memory for buffers of %s; choose a smaller --max or --gap",
             bench_size_print(worker->memory_bytes, size));
    return complain(worker, text);
}

static enum shoal_status device_open(struct worker *worker)
{
    if (!bench_gpu_allocate(worker->gpu, worker->memory_bytes, &worker->there))
        return SHOAL_ERR_SYSTEM;
    bench_gpu_register(worker->gpu, worker->memory, worker->memory_bytes);
    return SHOAL_OK;
}

/* The address to pass for an operand; NULL if the rank has none. */
static char *called_at(const struct worker *worker, char *at)
{
    return worker->gpu && at ? worker->there + (at - (char *)worker->memory) : at;
}

static bool upload(const struct worker *worker, char *at, size_t bytes)
{
    return !worker->gpu || !at || bench_gpu_upload(worker->gpu, called_at(worker, at), at, bytes);
}

static bool download(const struct worker *worker, char *at, size_t bytes)
{
    return !worker->gpu || !at || bench_gpu_download(worker->gpu, at, called_at(worker, at), bytes);
}

/* Returns how many parts the larger operand has. */
static size_t parts_of(const struct worker *worker, const struct bench_kind *kind)
{
    return kind->input == BENCH_PARTS || kind->output == BENCH_PARTS ? (size_t)worker->ranks : 1;
}

/* Returns the elements of a vector or of one part if the larger operand has `bytes` bytes: rounded down, but at least one
 * unless bytes is 0. */
static size_t count_of(const struct worker *worker, const struct bench_kind *kind, size_t bytes)
{
    const size_t count = bytes / (parts_of(worker, kind) * shoal_type_bytes(worker->options->type));
    return !count && bytes ? 1 : count;
}

/* Input and output are in one allocation. Without --gap their distance is a page more than their length: buffers that agree
 * modulo a large power of two are slow on some processors, and that is measured only on request. */
static enum shoal_status buffers_open(struct worker *worker)
{
    const struct bench_options *options = worker->options;
    const struct bench_kind *kind = bench_kind((enum bench_collective)options->collective);
    const size_t count = count_of(worker, kind, options->bytes_max);
    const size_t bytes = count * parts_of(worker, kind) * shoal_type_bytes(options->type);
    const size_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES;
    if (options->gap_bytes && options->gap_bytes < bytes)
        return complain(worker, "--gap does not hold one element for each rank; choose a larger one");
    const size_t apart = options->in_place ? 0 : options->gap_bytes ? options->gap_bytes : (pages + 1) * PAGE_BYTES;
    worker->memory_bytes = options->offset_bytes + apart + pages * PAGE_BYTES;
    if (options->memory == BENCH_SHARED)
        BENCH_TRY(shoal_mem_alloc(worker->context, worker->memory_bytes, &worker->memory));
    else
        BENCH_TRY(memory_map(worker));
    worker->input = (char *)worker->memory + options->offset_bytes;
    worker->output = worker->input + apart;
    memset(worker->input, 0, bytes);
    memset(worker->output, 0, bytes);
    return worker->gpu ? device_open(worker) : SHOAL_OK;
}

/* Destroying the context has freed shared memory. */
static void buffers_close(struct worker *worker)
{
    if (worker->memory && worker->options->memory != BENCH_SHARED)
        munmap(worker->memory, worker->memory_bytes);
}

/* ---- One operation ------------------------------------------------------------------------------------------------------- */

static struct operand operand_make(const struct worker *worker, enum bench_operand operand, bool at_root, char *at)
{
    if (operand == BENCH_NONE || (at_root && worker->rank != BENCH_ROOT))
        return (struct operand){NULL, 0};
    return (struct operand){at, operand == BENCH_PARTS ? (size_t)worker->ranks : 1};
}

/* In place, if one operand is in parts, the other is this rank's part of it. */
static struct task task_make(const struct worker *worker, enum bench_collective collective, size_t bytes)
{
    const struct bench_kind *kind = bench_kind(collective);
    const size_t count = count_of(worker, kind, bytes), part_bytes = count * shoal_type_bytes(worker->options->type);
    struct task task = {.collective = collective, .count = count, .bytes = part_bytes * parts_of(worker, kind)};
    task.input = operand_make(worker, kind->input, kind->input_at_root, worker->input);
    task.output = operand_make(worker, kind->output, kind->output_at_root, worker->output);
    if (worker->options->in_place && task.input.parts == 1 && task.output.parts > 1)
        task.input.at += (size_t)worker->rank * part_bytes;
    if (worker->options->in_place && task.output.parts == 1 && task.input.parts > 1)
        task.output.at += (size_t)worker->rank * part_bytes;
    return task;
}

static enum shoal_status operate(struct worker *worker, const struct task *task)
{
    static const struct shoal_options scaled = {.struct_bytes = sizeof scaled, .scale = BENCH_SCALE};
    const enum shoal_type type = worker->options->type;
    const enum shoal_op op = (enum shoal_op)worker->options->op;
    const struct shoal_options *options = op == SHOAL_SCALED_SUM ? &scaled : NULL;
    struct shoal_comm *comm = worker->comm;
    const void *input = called_at(worker, task->input.at);
    void *output = called_at(worker, task->output.at);
    switch (task->collective) {
    case BENCH_ALLREDUCE:
        return shoal_allreduce(comm, input, output, task->count, type, op, options);
    case BENCH_REDUCE:
        return shoal_reduce(comm, input, output, task->count, type, op, BENCH_ROOT, options);
    case BENCH_REDUCESCATTER:
        return shoal_reduce_scatter(comm, input, output, task->count, type, op, options);
    case BENCH_BROADCAST:
        return shoal_broadcast(comm, input, output, task->count, type, BENCH_ROOT, NULL);
    case BENCH_ALLGATHER:
        return shoal_allgather(comm, input, output, task->count, type, NULL);
    case BENCH_GATHER:
        return shoal_gather(comm, input, output, task->count, type, BENCH_ROOT, NULL);
    case BENCH_SCATTER:
        return shoal_scatter(comm, input, output, task->count, type, BENCH_ROOT, NULL);
    case BENCH_ALLTOALL:
        return shoal_alltoall(comm, input, output, task->count, type, NULL);
    case BENCH_BARRIER:
        return shoal_barrier(comm, NULL);
    case BENCH_PROBE:
        if (!worker->gpu)
            bench_memory_touch(task->input.at, task->bytes);
        return download(worker, task->input.at, task->bytes) && upload(worker, task->input.at, task->bytes) ? SHOAL_OK
                                                                                                            : SHOAL_ERR_SYSTEM;
    case BENCH_COLLECTIVES:
        break;
    }
    return SHOAL_ERR_ARGUMENT;
}

/* Part i has a turn that is i later, so that confused parts are detected. */
static enum shoal_status input_rewrite(struct worker *worker, const struct task *task)
{
    const size_t part_bytes = task->count * shoal_type_bytes(worker->options->type);
    struct bench_pattern pattern = {worker->options->type, (enum shoal_op)worker->options->op, worker->rank, 1, worker->turn};
    for (size_t part = 0; part < task->input.parts; part++, pattern.turn++)
        bench_pattern_write(task->input.at + part * part_bytes, task->count, &pattern);
    return upload(worker, task->input.at, task->input.parts * part_bytes) ? SHOAL_OK : SHOAL_ERR_SYSTEM;
}

/* If the input is in parts, this rank gets its own part. Part i of an output comes from rank i; a vector comes from all ranks
 * or from root. */
static enum shoal_status output_verify(struct worker *worker, const struct task *task)
{
    const struct bench_kind *kind = bench_kind(task->collective);
    const size_t part_bytes = task->count * shoal_type_bytes(worker->options->type);
    struct bench_pattern pattern = {worker->options->type, (enum shoal_op)worker->options->op, BENCH_ROOT, 1, worker->turn};
    if (!download(worker, task->output.at, task->output.parts * part_bytes))
        return SHOAL_ERR_SYSTEM;
    if (kind->input == BENCH_PARTS)
        pattern.turn += (uint64_t)worker->rank;
    if (kind->reduces)
        pattern.ranks = worker->ranks;
    for (size_t part = 0; part < task->output.parts; part++, pattern.first++)
        worker->errors += bench_pattern_verify(task->output.at + part * part_bytes, task->count, &pattern);
    return SHOAL_OK;
}

/* Runs one untimed operation and compares its result element by element. */
static enum shoal_status result_check(struct worker *worker, const struct task *task)
{
    worker->turn++;
    BENCH_TRY(input_rewrite(worker, task));
    BENCH_TRY(operate(worker, task));
    return output_verify(worker, task);
}

static bool is_late(const struct worker *worker)
{
    return worker->options->late_ms && worker->rank == worker->ranks - 1;
}

/* With --late, the last rank arrives late, and the others wait for it inside the operation. */
static void late_sleep(const struct worker *worker)
{
    const int ms = worker->options->late_ms;
    if (is_late(worker))
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static enum shoal_status iterate(struct worker *worker, const struct task *task, size_t index)
{
    worker->turn++;
    if (!worker->options->warm)
        BENCH_TRY(input_rewrite(worker, task));
    BENCH_TRY(shoal_barrier(worker->comm, NULL));
    late_sleep(worker);
    const double start = bench_now();
    BENCH_TRY(operate(worker, task));
    const double end = bench_now();
    worker->took_s[index] = worker->options->late_ms ? end : end - start;
    worker->late_s[index] = is_late(worker) ? start : 0;
    return worker->options->check ? output_verify(worker, task) : SHOAL_OK;
}

/* ---- One size ------------------------------------------------------------------------------------------------------------ */

/* Small sizes run for a quarter of a second, because processes that share cores move about every 100 ms. */
static double iterations_usual(size_t bytes, double took_s)
{
    const double quarter = 0.25 / took_s;
    if (bytes >= 65536)
        return bytes < (8u << 20) ? 60 : 12;
    return quarter < ITERATIONS_SMALL ? ITERATIONS_SMALL : quarter > ITERATIONS_MOST ? ITERATIONS_MOST : quarter;
}

/* Runs operations until the trial of ways of writing is over: the benchmark measures the steady state of a size, not its first
 * operations. */
static enum shoal_status trial_pass(struct worker *worker, const struct task *task)
{
    for (size_t i = BENCH_WARMUPS; i < BENCH_TRIAL; i++)
        BENCH_TRY(iterate(worker, task, i));
    return SHOAL_OK;
}

/* Warms up and computes how many iterations fit the time limit. The slowest rank's time decides, so the number is equal on
 * every rank. */
static enum shoal_status warm_up(struct worker *worker, const struct task *task, size_t *iterations_out)
{
    double took_s, slowest_s;
    if (worker->options->warm)
        BENCH_TRY(input_rewrite(worker, task));
    const double start = bench_now();
    for (int i = 0; i < BENCH_WARMUPS; i++)
        BENCH_TRY(iterate(worker, task, (size_t)i));
    took_s = (bench_now() - start) / BENCH_WARMUPS;
    BENCH_TRY(shoal_allreduce(worker->comm, &took_s, &slowest_s, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    const double fit = worker->options->seconds / slowest_s, usual = iterations_usual(task->bytes, slowest_s);
    if (!worker->options->iterations && BENCH_TRIAL + usual <= fit)
        BENCH_TRY(trial_pass(worker, task));
    const size_t capped = (size_t)(fit >= usual ? usual : fit < ITERATIONS_MIN ? ITERATIONS_MIN : fit);
    *iterations_out = worker->options->iterations ? (size_t)worker->options->iterations : capped;
    return SHOAL_OK;
}

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Measures operations in a row, which one rank may begin while another is still in the previous one, and this rank's CPU time.
 * Reading the CPU clock is a system call, which would disturb operations that are timed one by one. */
static enum shoal_status loop_measure(struct worker *worker, const struct task *task, size_t iterations,
                                      struct bench_result *result)
{
    const size_t rounds = iterations / 4 + 1;
    BENCH_TRY(shoal_barrier(worker->comm, NULL));
    const double start = bench_now(), cpu_start = cpu_s();
    for (size_t i = 0; i < rounds; i++)
        BENCH_TRY(operate(worker, task));
    result->cpu_us = (cpu_s() - cpu_start) * 1e6 / (double)rounds;
    result->loop_us = (bench_now() - start) * 1e6 / (double)rounds;
    return SHOAL_OK;
}

static enum shoal_status exchange_measure(struct worker *worker, double *ns_out)
{
    *ns_out = -1;
    if (!worker->area || worker->ranks < 2)
        return SHOAL_OK;
    if (bench_exchange_measure(worker->area, worker->rank, ++worker->exchanges, (double)worker->options->timeout_s, ns_out))
        return SHOAL_OK;
    return complain(worker, "another rank did not come to the exchange measured before each size");
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Combines the ranks' measurements: the slowest time of each iteration, the sums of CPU time and errors. */
static enum shoal_status result_join(struct worker *worker, size_t iterations, struct bench_result *result)
{
    double sums[2] = {result->cpu_us, (double)worker->errors};
    BENCH_TRY(shoal_allreduce(worker->comm, worker->took_s, worker->took_s, iterations, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    BENCH_TRY(shoal_allreduce(worker->comm, worker->late_s, worker->late_s, iterations, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    BENCH_TRY(shoal_allreduce(worker->comm, sums, sums, 2, SHOAL_FLOAT64, SHOAL_SUM, NULL));
    BENCH_TRY(shoal_allreduce(worker->comm, &result->loop_us, &result->loop_us, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    for (size_t i = 0; i < iterations; i++)
        worker->took_s[i] -= worker->late_s[i];
    qsort(worker->took_s, iterations, sizeof worker->took_s[0], by_value);
    result->iterations = iterations;
    result->median_us = worker->took_s[iterations / 2] * 1e6;
    result->p99_us = worker->took_s[iterations * 99 / 100] * 1e6;
    result->cpu_us = sums[0];
    result->errors = (uint64_t)sums[1];
    return SHOAL_OK;
}

static enum shoal_status algorithm_ask(struct worker *worker, const struct task *task, const char **name_out)
{
    struct shoal_operation operation = SHOAL_OPERATION_INIT;
    *name_out = "read-write";
    if (task->collective == BENCH_PROBE)
        return SHOAL_OK;
    BENCH_TRY(shoal_last_operation(worker->comm, &operation));
    *name_out = operation.algorithm;
    return SHOAL_OK;
}

static enum shoal_status measure(struct worker *worker, const struct task *task, struct bench_result *result_out)
{
    struct bench_result result = {
        .collective = task->collective, .ranks = worker->ranks, .hosts = worker->hosts, .bytes = task->bytes};
    size_t iterations;
    worker->errors = 0;
    BENCH_TRY(exchange_measure(worker, &result.exchange_ns));
    BENCH_TRY(result_check(worker, task));
    BENCH_TRY(warm_up(worker, task, &iterations));
    for (size_t i = 0; i < iterations; i++)
        BENCH_TRY(iterate(worker, task, i));
    BENCH_TRY(algorithm_ask(worker, task, &result.algorithm));
    BENCH_TRY(loop_measure(worker, task, iterations, &result));
    BENCH_TRY(result_join(worker, iterations, &result));
    *result_out = result;
    return SHOAL_OK;
}

/* ---- All sizes ----------------------------------------------------------------------------------------------------------- */

/* Shows one line on a terminal until the size is done. Called only between sizes, when nothing is timed. */
static void progress_print(const struct worker *worker, size_t bytes, bool done)
{
    char size[24];
    if (worker->rank || !isatty(STDERR_FILENO))
        return;
    if (done)
        fputs("\r\033[K", stderr);
    else
        fprintf(stderr, "\rmeasuring %s ...\033[K", bench_size_print(bytes, size));
    fflush(stderr);
}

static enum shoal_status size_run(struct worker *worker, size_t bytes, uint64_t *errors)
{
    const struct task task = task_make(worker, (enum bench_collective)worker->options->collective, bytes);
    const struct task touch = task_make(worker, BENCH_PROBE, task.bytes);
    struct bench_result result, probe;
    progress_print(worker, task.bytes, false);
    if (worker->options->probe)
        BENCH_TRY(measure(worker, &touch, &probe));
    BENCH_TRY(measure(worker, &task, &result));
    progress_print(worker, task.bytes, true);
    if (worker->rank == 0)
        bench_result_print(worker->options, &result, worker->options->probe ? &probe : NULL);
    *errors += result.errors;
    return SHOAL_OK;
}

static enum shoal_status sizes_run(struct worker *worker, uint64_t *errors)
{
    const struct bench_options *options = worker->options;
    double exchange_ns;
    BENCH_TRY(exchange_measure(worker, &exchange_ns));
    if (worker->rank == 0)
        bench_header_print(options, worker->ranks, worker->hosts, exchange_ns);
    if (options->collective == BENCH_BARRIER)
        return size_run(worker, 0, errors);
    for (size_t bytes = options->bytes_min; bytes <= options->bytes_max; bytes *= (size_t)options->factor) {
        BENCH_TRY(size_run(worker, bytes, errors));
        if (bytes > options->bytes_max / (size_t)options->factor)
            break;
    }
    return SHOAL_OK;
}

/* ---- One rank ------------------------------------------------------------------------------------------------------------ */

static enum shoal_status worker_open(struct worker *worker)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    struct shoal_place place = SHOAL_PLACE_INIT;
    options.timeout_ms = (uint32_t)worker->options->timeout_s * 1000;
    worker->gpu = worker->options->memory == BENCH_GPU ? bench_gpu_open() : NULL;
    if (worker->options->memory == BENCH_GPU && !worker->gpu)
        return SHOAL_ERR_UNSUPPORTED;
    BENCH_TRY(shoal_context_create(NULL, &worker->context));
    BENCH_TRY(shoal_comm_create(worker->context, &options, &worker->comm));
    worker->rank = shoal_comm_rank(worker->comm);
    worker->ranks = shoal_comm_size(worker->comm);
    BENCH_TRY(shoal_comm_place(worker->comm, 0, &place));
    worker->hosts = place.hosts;
    worker->took_s = calloc(BENCH_ITERATIONS_MAX, sizeof worker->took_s[0]);
    worker->late_s = calloc(BENCH_ITERATIONS_MAX, sizeof worker->late_s[0]);
    if (!worker->took_s || !worker->late_s)
        return complain(worker, "no memory");
    return buffers_open(worker);
}

static void worker_close(struct worker *worker)
{
    shoal_comm_free(worker->comm);
    shoal_context_destroy(worker->context);
    bench_gpu_close(worker->gpu);
    buffers_close(worker);
    free(worker->took_s);
    free(worker->late_s);
}

static enum shoal_status worker_run(struct worker *worker, uint64_t *errors)
{
    BENCH_TRY(worker_open(worker));
    if (worker->rank == 0)
        bench_ranks_note(worker->options->ranks, worker->ranks);
    BENCH_TRY(sizes_run(worker, errors));
    return shoal_comm_finalize(worker->comm);
}

int bench_worker_run(const struct bench_options *options, struct bench_area *area)
{
    struct worker worker = {.options = options, .area = area, .rank = -1};
    uint64_t errors = 0;
    const enum shoal_status status = worker_run(&worker, &errors);
    if (status)
        bench_failure_print(worker.context, worker.comm ? worker.rank : -1, status, NULL);
    if (errors && worker.rank == 0)
        fprintf(stderr, "shoal bench: %llu elements were wrong\n", (unsigned long long)errors);
    worker_close(&worker);
    return status || errors ? 1 : 0;
}
