/* One rank of `shoal bench step`. */
#include "bench_step.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "bench_gpu.h"
#include "bench_step_optimizer.h"

#define NEVER_CLIPPED 1e30 /* a norm that no gradients here have */

enum { WARMUPS = 3, PROBES = 3, STREAM_BYTES = 16384, ALIGNMENT = 64, LINE_S = 30 };

struct stepper {
    const struct bench_step_options *options;
    const struct step_profile *profile;
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_reducer *reducer;
    int rank, ranks, hosts;
    struct shoal_parameter *parameters; /* by their numbers, like the next two */
    size_t *offsets;                    /* in elements; each begins at a cache line */
    size_t elements;                    /* including gaps */
    float *gradients;                   /* NULL: gradients are made in the buffers. On a GPU: host copies of the gradients */
    struct bench_gpu *gpu;              /* NULL: gradients are in host memory */
    float *there;                       /* gradients on the GPU, or room for a buffer */
    float *parameters_there;            /* NULL: parameters are in host memory, or there are none */
    struct step_optimizer optimizer;
    double optimizer_us;     /* of each step, summed up; with --when buffers the reducer counts */
    double work_per_us;      /* rounds of compute() */
    double begun_s, ready_s; /* times of the current step: its beginning, and when the last gradient was ready */
    double *step_us, *backward_us, *exposed_us; /* of each step */
    double buffer_bytes, buffer_us;
    double bare_us; /* time of a step whose gradients are all ready at once: only copies and sums */
    struct step_report report;
    double *times; /* times of the last step: tensors, then buffers */
    double *all_times;
    struct step_report *reports;
    uint64_t *wire_bytes; /* sent to each rank, then received from each */
    bool is_verified;     /* gradients are such that averages are known */
    double told_s;        /* time of the last progress line */
};

static enum shoal_status memory_fail(const struct stepper *stepper, size_t bytes)
{
    char size[24];
    fprintf(stderr, "shoal bench: rank %d: no memory for %s; start fewer ranks, or use --views\n", stepper->rank,
            bench_size_print(bytes, size));
    return SHOAL_ERR_MEMORY;
}

/* Returns the CPU time of all threads of the rank. */
static double cpu_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- The backward pass --------------------------------------------------------------------------------------------------- */

/* Multiplies and adds in the nearest cache, the same amount in each round. */
static void compute(double rounds)
{
    static float row[STREAM_BYTES / sizeof(float)];
    for (double round = 0; round < rounds; round++) {
        for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)
            row[i] = row[i] * 0.999f + 1.0f;
        __asm__ volatile("" ::"r"(row) : "memory");
    }
}

/* Measures how many rounds of compute() fit into a microsecond. Tries are so short that the best of them avoids other work of
 * the core. */
static void work_measure(struct stepper *stepper)
{
    enum { TRIES = 300, ROUNDS = 100 };
    for (int i = 0; i < TRIES; i++) {
        const double begin = bench_now();
        compute(ROUNDS);
        const double took_us = (bench_now() - begin) * 1e6;
        if (took_us > 0)
            stepper->work_per_us = fmax(stepper->work_per_us, ROUNDS / took_us);
    }
}

static void sleep_until(double when_s)
{
    const struct timespec when = {(time_t)when_s, (long)((when_s - floor(when_s)) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) != 0)
        continue;
}

/* A busy rank computes a fixed amount, however long that takes. Otherwise a device is assumed to compute, and only time
 * passes. */
static void pass_until(const struct stepper *stepper, double backward_us, double from, double to)
{
    if (stepper->options->is_busy)
        compute((to - from) * backward_us * stepper->work_per_us);
    else if (stepper->begun_s + to * backward_us * 1e-6 > bench_now())
        sleep_until(stepper->begun_s + to * backward_us * 1e-6);
}

/* The gradient as the engine sees it. */
static float *gradient_of(const struct stepper *stepper, size_t parameter)
{
    float *gradients = stepper->gpu ? stepper->there : stepper->gradients;
    return stepper->options->has_views ? shoal_reducer_view(stepper->reducer, parameter)
                                       : gradients + stepper->offsets[parameter];
}

/* The gradient as the processor reads and writes it. */
static float *gradient_here(const struct stepper *stepper, size_t parameter)
{
    return stepper->gpu ? stepper->gradients + stepper->offsets[parameter] : gradient_of(stepper, parameter);
}

static enum shoal_status backward(struct stepper *stepper, double backward_us)
{
    double reached = 0;
    for (size_t i = 0; i < stepper->profile->count; i++) {
        const struct step_tensor *tensor = &stepper->profile->tensors[i];
        pass_until(stepper, backward_us, reached, tensor->ready);
        reached = tensor->ready;
        stepper->ready_s = bench_now();
        BENCH_TRY(shoal_reducer_ready(stepper->reducer, tensor->index, gradient_of(stepper, tensor->index), tensor->elements));
    }
    if (reached < 1) {
        pass_until(stepper, backward_us, reached, 1);
        stepper->ready_s = bench_now();
    }
    return SHOAL_OK;
}

/* ---- The optimizer ------------------------------------------------------------------------------------------------------- */

static enum shoal_status buffer_step(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count)
{
    const struct stepper *stepper = arg;
    (void)buffer;
    for (size_t i = 0; i < parameter_count; i++)
        step_optimizer_run(&stepper->optimizer, parameters[i], gradient_of(stepper, parameters[i]));
    return SHOAL_OK;
}

static void optimizer_run(struct stepper *stepper)
{
    const struct bench_step_options *options = stepper->options;
    const double begin = bench_now();
    if (options->optimizing.rule == STEP_RULE_NONE || options->optimizing.is_sharded ||
        options->optimizing.when != STEP_WHEN_AFTER)
        return;
    for (size_t i = 0; i < stepper->profile->count; i++)
        step_optimizer_run(&stepper->optimizer, i, gradient_of(stepper, i));
    stepper->optimizer_us += (bench_now() - begin) * 1e6;
}

/* ---- Checking the averages ----------------------------------------------------------------------------------------------- */

static float gradient_value(size_t parameter, size_t element, double mean_of_ranks)
{
    return (float)(1 + (double)((parameter + element) % 7) + mean_of_ranks);
}

static enum shoal_status gradients_fill(const struct stepper *stepper)
{
    for (size_t p = 0; p < stepper->profile->count; p++) {
        const size_t count = stepper->parameters[p].count;
        float *gradient = gradient_here(stepper, p);
        for (size_t i = 0; i < count; i++)
            gradient[i] = gradient_value(p, i, stepper->rank % 8);
        if (stepper->gpu &&
            !bench_gpu_upload(stepper->gpu, (char *)gradient_of(stepper, p), (const char *)gradient, count * sizeof *gradient))
            return SHOAL_ERR_SYSTEM;
    }
    return SHOAL_OK;
}

/* Returns the largest error that rounding can cause. int8: the largest value of a block is 15 at most; each rank's part and the
 * sum are rounded once, by half of a 127th, and so are their scales. */
static double error_most(const struct bench_step_options *options, double value)
{
    switch (options->compression) {
    case SHOAL_COMPRESS_NONE:
        return 1e-6 * value;
    case SHOAL_COMPRESS_INT8:
        return 1.25 * 15 / 127;
    default:
        return value / 100;
    }
}

/* Returns a parameter of the device in host memory, in place of its gradient; NULL after a failure. */
static const float *parameter_download(const struct stepper *stepper, size_t parameter)
{
    const size_t offset = stepper->offsets[parameter], bytes = stepper->parameters[parameter].count * sizeof(float);
    float *here = stepper->gradients + offset;
    const float *there = stepper->parameters_there + offset;
    return bench_gpu_download(stepper->gpu, (char *)here, (const char *)there, bytes) ? here : NULL;
}

/* With --shard no rank has all averages: compares the parameters after the first step. */
static enum shoal_status parameters_check(struct stepper *stepper)
{
    enum { CHUNK = 1024 };
    double sum = 0;
    for (int r = 0; r < stepper->ranks; r++)
        sum += r % 8;
    stepper->optimizer.steps = 1;
    for (size_t p = 0; p < stepper->profile->count; p++) {
        const float *weights = shoal_reducer_parameter(stepper->reducer, p);
        if (stepper->gpu && !(weights = parameter_download(stepper, p)))
            return SHOAL_ERR_SYSTEM;
        for (size_t begin = 0; begin < stepper->parameters[p].count; begin += CHUNK) {
            float average[CHUNK];
            const size_t left = stepper->parameters[p].count - begin, length = left < CHUNK ? left : CHUNK;
            for (size_t i = 0; i < length; i++)
                average[i] = gradient_value(p, begin + i, sum / stepper->ranks);
            stepper->report.errors += step_optimizer_errors(&stepper->optimizer, weights + begin, average, length);
        }
    }
    stepper->optimizer.steps = 2;
    return SHOAL_OK;
}

static enum shoal_status averages_check(struct stepper *stepper)
{
    double sum = 0;
    for (int r = 0; r < stepper->ranks; r++)
        sum += r % 8;
    for (size_t p = 0; p < stepper->profile->count; p++) {
        const size_t count = stepper->parameters[p].count;
        float *gradient = gradient_here(stepper, p);
        if (stepper->gpu && !bench_gpu_download(stepper->gpu, (char *)gradient, (const char *)gradient_of(stepper, p),
                                                count * sizeof *gradient))
            return SHOAL_ERR_SYSTEM;
        for (size_t i = 0; i < count; i++) {
            const double wanted = gradient_value(p, i, sum / stepper->ranks);
            stepper->report.errors += !(fabs((double)gradient[i] - wanted) <= error_most(stepper->options, wanted));
        }
    }
    return SHOAL_OK;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* Waits until the device has the averages. */
static enum shoal_status device_wait(const struct stepper *stepper)
{
    BENCH_TRY(shoal_reducer_wait(stepper->reducer, SHOAL_FOREVER));
    return bench_gpu_wait(stepper->gpu) ? SHOAL_OK : SHOAL_ERR_SYSTEM;
}

static enum shoal_status step_run(struct stepper *stepper, double backward_us)
{
    BENCH_TRY(shoal_barrier(stepper->comm, NULL));
    stepper->begun_s = bench_now();
    BENCH_TRY(shoal_reducer_begin(stepper->reducer, SHOAL_STEP_REDUCE));
    if (stepper->is_verified)
        BENCH_TRY(gradients_fill(stepper)); /* from here on, views may be written */
    BENCH_TRY(backward(stepper, backward_us));
    BENCH_TRY(shoal_reducer_finish(stepper->reducer, NULL));
    if (stepper->gpu)
        BENCH_TRY(device_wait(stepper));
    optimizer_run(stepper);
    stepper->optimizer.steps++;
    return SHOAL_OK;
}

/* The first step compares averages. The beginning of the second step adapts the layout to the order in which gradients become
 * ready. */
static enum shoal_status warm_up(struct stepper *stepper)
{
    stepper->is_verified = true;
    BENCH_TRY(step_run(stepper, 0));
    BENCH_TRY(stepper->options->optimizing.is_sharded ? parameters_check(stepper) : averages_check(stepper));
    stepper->is_verified = false;
    for (int i = 1; i < WARMUPS; i++)
        BENCH_TRY(step_run(stepper, 0));
    stepper->bare_us = (bench_now() - stepper->begun_s) * 1e6;
    return shoal_allreduce(stepper->comm, &stepper->bare_us, &stepper->bare_us, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL);
}

/* Updates a line on a terminal; elsewhere prints a line after half a minute and then each minute. */
static void progress_print(struct stepper *stepper, double start_s, int step)
{
    const int steps = stepper->options->common.steps;
    const bool is_terminal = isatty(STDERR_FILENO);
    const double now_s = bench_now(), left_s = step ? (now_s - start_s) / step * (steps - step) : 0;
    if (stepper->rank || now_s - stepper->told_s < (is_terminal ? 0.2 : LINE_S))
        return;
    stepper->told_s = now_s;
    fprintf(stderr, "%sshoal bench: step %d of %d, about %.0f s left%s", is_terminal ? "\r" : "", step + 1, steps, left_s,
            is_terminal ? "\033[K" : "\n");
    fflush(stderr);
}

static void progress_end(const struct stepper *stepper)
{
    if (stepper->rank == 0 && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* Adds the bytes that have crossed the network so far to the report, or subtracts them if sign is -1. Senders report to each
 * rank what it received. */
static enum shoal_status wire_count(struct stepper *stepper, int sign)
{
    const size_t ranks = (size_t)stepper->ranks;
    const double share = (double)sign / stepper->options->common.steps;
    BENCH_TRY(shoal_reducer_sent_to(stepper->reducer, stepper->wire_bytes));
    BENCH_TRY(shoal_alltoall(stepper->comm, stepper->wire_bytes, stepper->wire_bytes + ranks, 1, SHOAL_INT64, NULL));
    for (size_t r = 0; r < ranks; r++) {
        stepper->report.wire_sent_bytes += share * (double)stepper->wire_bytes[r];
        stepper->report.wire_received_bytes += share * (double)stepper->wire_bytes[ranks + r];
    }
    return SHOAL_OK;
}

static enum shoal_status steps_run(struct stepper *stepper)
{
    const double start_s = bench_now();
    double cpu_s = 0;
    stepper->told_s = start_s;
    BENCH_TRY(wire_count(stepper, -1));
    stepper->optimizer_us = 0;
    for (int i = 0; i < stepper->options->common.steps; i++) {
        progress_print(stepper, start_s, i);
        const double cpu_begun_s = cpu_now_s();
        BENCH_TRY(step_run(stepper, stepper->options->backward_us));
        stepper->step_us[i] = (bench_now() - stepper->begun_s) * 1e6;
        stepper->backward_us[i] = (stepper->ready_s - stepper->begun_s) * 1e6;
        stepper->exposed_us[i] = stepper->step_us[i] - stepper->backward_us[i];
        cpu_s += cpu_now_s() - cpu_begun_s;
    }
    progress_end(stepper);
    stepper->report.cpu_s = cpu_s / stepper->options->common.steps;
    return wire_count(stepper, 1);
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns a quantile of `values`, one per step. Does not reorder them. */
static double quantile(const struct stepper *stepper, const double *values, double share)
{
    const size_t count = (size_t)stepper->options->common.steps;
    double *sorted = malloc(count * sizeof *sorted);
    if (!sorted)
        return NAN;
    memcpy(sorted, values, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_value);
    const double value = sorted[(size_t)((double)(count - 1) * share + 0.5)];
    free(sorted);
    return value;
}

static enum shoal_status report_fill(struct stepper *stepper)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_place place = SHOAL_PLACE_INIT;
    struct step_report *report = &stepper->report;
    const struct bench_step_options *options = stepper->options;
    BENCH_TRY(shoal_reducer_stats(stepper->reducer, &stats));
    BENCH_TRY(shoal_comm_place(stepper->comm, stepper->rank, &place));
    report->step_us = quantile(stepper, stepper->step_us, 0.5);
    report->backward_us = quantile(stepper, stepper->backward_us, 0.5);
    report->exposed_us = quantile(stepper, stepper->exposed_us, 0.5);
    report->pack_us = stats.pack_us;
    report->unpack_us = stats.unpack_us;
    report->callback_us = stats.callback_us;
    report->optimizer_us = options->optimizing.is_sharded                  ? stats.unpack_us
                           : options->optimizing.when == STEP_WHEN_BUFFERS ? stats.callback_us
                                                                           : stepper->optimizer_us / options->common.steps;
    report->optimizer_bytes = (double)step_optimizer_bytes(&stepper->optimizer, stepper->reducer);
    report->sent_bytes = (double)stats.sent_bytes;
    report->received_bytes = (double)stats.received_bytes;
    report->network_bytes = (double)stats.network_bytes;
    report->copied_bytes = (double)stats.copied_bytes;
    report->flight_buffers = (double)stats.flight_buffers;
    report->host = place.host;
    return SHOAL_OK;
}

static size_t times_count(const struct stepper *stepper)
{
    const struct shoal_gradient_layout *layout = shoal_reducer_layout(stepper->reducer);
    return stepper->profile->count + STEP_BUFFER_TIMES * shoal_gradient_layout_buffers(layout);
}

static enum shoal_status times_fill(struct stepper *stepper)
{
    const size_t tensors = stepper->profile->count;
    const size_t buffers = shoal_gradient_layout_buffers(shoal_reducer_layout(stepper->reducer));
    for (size_t i = 0; i < tensors; i++)
        stepper->times[i] = shoal_reducer_ready_us(stepper->reducer, stepper->profile->tensors[i].index);
    for (size_t b = 0; b < buffers; b++) {
        struct shoal_buffer_times times = SHOAL_BUFFER_TIMES_INIT;
        BENCH_TRY(shoal_reducer_buffer_times(stepper->reducer, b, &times));
        const double row[STEP_BUFFER_TIMES] = {times.first_us, times.full_us, times.posted_us, times.done_us, times.out_us};
        memcpy(stepper->times + tensors + STEP_BUFFER_TIMES * b, row, sizeof row);
    }
    return SHOAL_OK;
}

/* Rank 0 gets the reports and times of all ranks. Every rank gets the slowest time of each step. */
static enum shoal_status results_gather(struct stepper *stepper)
{
    const size_t steps = (size_t)stepper->options->common.steps, numbers = times_count(stepper), ranks = (size_t)stepper->ranks;
    stepper->times = calloc(numbers, sizeof(double));
    if (stepper->rank == 0) {
        stepper->all_times = calloc(numbers * ranks, sizeof(double));
        stepper->reports = calloc(ranks, sizeof *stepper->reports);
    }
    if (!stepper->times || (stepper->rank == 0 && (!stepper->all_times || !stepper->reports)))
        return memory_fail(stepper, numbers * ranks * sizeof(double));
    BENCH_TRY(report_fill(stepper));
    BENCH_TRY(times_fill(stepper));
    BENCH_TRY(shoal_gather(stepper->comm, &stepper->report, stepper->reports, STEP_REPORT_NUMBERS, SHOAL_FLOAT64, 0, NULL));
    BENCH_TRY(shoal_gather(stepper->comm, stepper->times, stepper->all_times, numbers, SHOAL_FLOAT64, 0, NULL));
    BENCH_TRY(shoal_allreduce(stepper->comm, stepper->step_us, stepper->step_us, steps, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    return shoal_allreduce(stepper->comm, stepper->exposed_us, stepper->exposed_us, steps, SHOAL_FLOAT64, SHOAL_MAX, NULL);
}

static double balance_of(const struct stepper *stepper)
{
    double most_sent = 0, most_received = 0, sent = 0, received = 0;
    for (int r = 0; r < stepper->ranks; r++) {
        const struct step_report *report = &stepper->reports[r];
        const bool is_counted = stepper->hosts > 1;
        const double own_sent = is_counted ? report->wire_sent_bytes : report->sent_bytes;
        const double own_received = is_counted ? report->wire_received_bytes : report->received_bytes;
        most_sent = fmax(most_sent, own_sent);
        most_received = fmax(most_received, own_received);
        sent += own_sent;
        received += own_received;
    }
    return sent > 0 && received > 0 ? stepper->ranks * fmax(most_sent / sent, most_received / received) : 1;
}

/* Uses the formula if the rate is known, else the time of a single buffer. */
static double wire_us_per_byte(const struct stepper *stepper)
{
    const struct bench_step_options *options = stepper->options;
    if (stepper->ranks == 1)
        return 0;
    if (options->rate_gbit_s > 0 && stepper->hosts > 1)
        return step_wire_us_per_byte(stepper->hosts, options->rate_gbit_s) /
               bench_step_wire_ratio(options->compression, stepper->hosts);
    return stepper->buffer_us / stepper->buffer_bytes;
}

static double slowest_backward_us(const struct stepper *stepper)
{
    double us = 0;
    for (int r = 0; r < stepper->ranks; r++)
        us = fmax(us, stepper->reports[r].backward_us);
    return us;
}

static bool result_tell(const struct stepper *stepper)
{
    const struct bench_step_options *options = stepper->options;
    const double wire_us = wire_us_per_byte(stepper), backward_us = slowest_backward_us(stepper);
    const struct step_result result = {
        .options = options,
        .layout = shoal_reducer_layout(stepper->reducer),
        .ranks = stepper->ranks,
        .hosts = stepper->hosts,
        .reports = stepper->reports,
        .times = stepper->all_times,
        .step_us = quantile(stepper, stepper->step_us, 0.5),
        .step_p90_us = quantile(stepper, stepper->step_us, 0.9),
        .backward_us = backward_us,
        .exposed_us = quantile(stepper, stepper->exposed_us, 0.5),
        .balance = balance_of(stepper),
        .buffer_bytes = stepper->buffer_bytes,
        .buffer_us = stepper->buffer_us,
        .bare_us = stepper->bare_us,
        .wire_us = wire_us * (double)(stepper->profile->elements * STEP_ELEMENT_BYTES),
        .bound = step_bound_find(stepper->profile, backward_us, wire_us),
    };
    bench_step_result_print(&result);
    const bool is_traced = !options->common.trace || bench_step_trace_write(&result, options->common.trace);
    return (!options->timeline || bench_step_timeline_write(&result, options->timeline)) && is_traced;
}

/* ---- A single buffer ----------------------------------------------------------------------------------------------------- */

static size_t largest_buffer(const struct stepper *stepper)
{
    const struct shoal_gradient_layout *layout = shoal_reducer_layout(stepper->reducer);
    size_t most = 0;
    for (size_t b = 0; b < shoal_gradient_layout_buffers(layout); b++) {
        struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
        if (shoal_gradient_layout_buffer(layout, b, &buffer) == SHOAL_OK && buffer.bytes > most)
            most = buffer.bytes;
    }
    return most;
}

static enum shoal_status buffer_allocate(const struct stepper *stepper, size_t bytes, void **memory_out)
{
    *memory_out = stepper->there;
    if (stepper->gpu)
        return SHOAL_OK;
    BENCH_TRY(shoal_mem_alloc(stepper->context, bytes, memory_out));
    memset(*memory_out, 0, bytes);
    return SHOAL_OK;
}

/* Measures an all-reduce of as many bytes as cross the wire for the largest buffer: the median of several. */
static enum shoal_status buffer_measure(struct stepper *stepper)
{
    const size_t bytes = largest_buffer(stepper);
    const double ratio = bench_step_wire_ratio(stepper->options->compression, stepper->hosts);
    const size_t count = (size_t)((double)bytes / ratio) / STEP_ELEMENT_BYTES;
    double took_us[PROBES];
    void *memory;
    BENCH_TRY(buffer_allocate(stepper, count * STEP_ELEMENT_BYTES, &memory));
    for (int i = -1; i < PROBES; i++) {
        BENCH_TRY(shoal_barrier(stepper->comm, NULL));
        const double begin = bench_now();
        BENCH_TRY(shoal_allreduce(stepper->comm, memory, memory, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        took_us[i < 0 ? 0 : i] = (bench_now() - begin) * 1e6;
    }
    if (!stepper->gpu)
        BENCH_TRY(shoal_mem_free(stepper->context, memory));
    BENCH_TRY(shoal_allreduce(stepper->comm, took_us, took_us, PROBES, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    qsort(took_us, PROBES, sizeof took_us[0], by_value);
    stepper->buffer_bytes = (double)bytes;
    stepper->buffer_us = took_us[PROBES / 2];
    return SHOAL_OK;
}

/* ---- One rank ------------------------------------------------------------------------------------------------------------ */

static enum shoal_status memory_map(const struct stepper *stepper, float **memory_out)
{
    const size_t bytes = stepper->elements * sizeof(float);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return memory_fail(stepper, bytes);
    memset(memory, 0, bytes);
    *memory_out = memory;
    return SHOAL_OK;
}

/* Allocates memory that fits the gradients, or one buffer of all of them with its padding; and with --shard the parameters,
 * which begin as zeros. */
static enum shoal_status device_open(struct stepper *stepper)
{
    const size_t elements = stepper->elements, bytes = elements * sizeof(float) + (size_t)stepper->ranks * ALIGNMENT;
    char *there;
    if (!bench_gpu_allocate(stepper->gpu, bytes, &there))
        return SHOAL_ERR_MEMORY;
    stepper->there = (float *)(void *)there;
    if (!stepper->options->optimizing.is_sharded)
        return SHOAL_OK;
    if (!bench_gpu_allocate(stepper->gpu, bytes, &there))
        return SHOAL_ERR_MEMORY;
    stepper->parameters_there = (float *)(void *)there;
    return bench_gpu_upload(stepper->gpu, there, (const char *)stepper->gradients, elements * sizeof(float)) ? SHOAL_OK
                                                                                                             : SHOAL_ERR_SYSTEM;
}

static enum shoal_status memory_open(struct stepper *stepper)
{
    const struct bench_step_options *options = stepper->options;
    const size_t count = stepper->profile->count, per_line = ALIGNMENT / sizeof(float);
    stepper->parameters = calloc(count, sizeof *stepper->parameters);
    stepper->offsets = calloc(count, sizeof *stepper->offsets);
    stepper->wire_bytes = calloc(2 * (size_t)stepper->ranks, sizeof *stepper->wire_bytes);
    stepper->step_us = calloc((size_t)options->common.steps, sizeof(double));
    stepper->backward_us = calloc((size_t)options->common.steps, sizeof(double));
    stepper->exposed_us = calloc((size_t)options->common.steps, sizeof(double));
    if (!stepper->parameters || !stepper->offsets || !stepper->wire_bytes || !stepper->step_us || !stepper->backward_us ||
        !stepper->exposed_us)
        return memory_fail(stepper, count * sizeof *stepper->parameters);
    for (size_t i = 0; i < count; i++) {
        const struct step_tensor *tensor = &stepper->profile->tensors[i];
        stepper->parameters[tensor->index] = (struct shoal_parameter){tensor->elements, SHOAL_FLOAT32, tensor->name};
    }
    for (size_t p = 0; p < count; p++) {
        stepper->offsets[p] = stepper->elements;
        stepper->elements += (stepper->parameters[p].count + per_line - 1) / per_line * per_line;
    }
    if (!options->has_views || options->is_on_gpu)
        BENCH_TRY(memory_map(stepper, &stepper->gradients));
    if (options->is_on_gpu)
        BENCH_TRY(device_open(stepper));
    const bool has_optimizer =
        step_optimizer_open(&stepper->optimizer, options, stepper->parameters, stepper->offsets, stepper->elements);
    return has_optimizer ? SHOAL_OK : memory_fail(stepper, 3 * stepper->elements * sizeof(float));
}

static enum shoal_status reducer_open(struct stepper *stepper)
{
    const struct bench_step_options *options = stepper->options;
    struct shoal_reducer_options wanted = SHOAL_REDUCER_OPTIONS_INIT;
    wanted.name = "step";
    wanted.buffer_bytes = options->buffer_bytes;
    wanted.first_buffer_bytes = options->first_bytes;
    wanted.rank_bytes = options->rank_bytes;
    wanted.flight_bytes = options->flight_bytes;
    wanted.timeout_ms = (uint32_t)options->common.timeout_s * 1000;
    wanted.results_in_views = options->has_views;
    wanted.compression = (enum shoal_compression)options->compression;
    wanted.is_on_device = options->is_on_gpu;
    wanted.has_thread = !options->has_no_thread && !options->is_on_gpu;
    wanted.max_norm = options->optimizing.clip ? NEVER_CLIPPED : 0;
    wanted.optimizer = options->optimizing.is_sharded ? &stepper->optimizer.in_reduction : NULL;
    if (options->optimizing.rule && !options->optimizing.is_sharded && options->optimizing.when == STEP_WHEN_BUFFERS) {
        wanted.on_buffer = buffer_step;
        wanted.on_buffer_arg = stepper;
    }
    BENCH_TRY(shoal_reducer_create(stepper->context, stepper->comm, stepper->parameters, stepper->profile->count, &wanted,
                                   &stepper->reducer));
    if (!stepper->parameters_there)
        return SHOAL_OK;
    for (size_t p = 0; p < stepper->profile->count; p++)
        BENCH_TRY(shoal_reducer_use_parameter(stepper->reducer, p, stepper->parameters_there + stepper->offsets[p]));
    return shoal_reducer_load_parameters(stepper->reducer);
}

/* Opens what needs the communicator. */
static enum shoal_status parts_open(struct stepper *stepper)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    stepper->rank = shoal_comm_rank(stepper->comm);
    stepper->ranks = shoal_comm_size(stepper->comm);
    BENCH_TRY(shoal_comm_place(stepper->comm, 0, &place));
    stepper->hosts = place.hosts;
    BENCH_TRY(memory_open(stepper));
    return reducer_open(stepper);
}

static enum shoal_status stepper_open(struct stepper *stepper)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.timeout_ms = (uint32_t)stepper->options->common.timeout_s * 1000;
    if (stepper->options->is_on_gpu && !(stepper->gpu = bench_gpu_open()))
        return SHOAL_ERR_UNSUPPORTED;
    BENCH_TRY(shoal_context_create(NULL, &stepper->context));
    BENCH_TRY(shoal_comm_create(stepper->context, &options, &stepper->comm));
    const int ranks = shoal_comm_size(stepper->comm);
    if (shoal_comm_rank(stepper->comm) == 0)
        bench_ranks_note(stepper->options->common.ranks, ranks);
    return parts_open(stepper);
}

/* Closes what parts_open() opened. */
static void parts_close(struct stepper *stepper)
{
    const size_t bytes = stepper->elements * sizeof(float);
    if (stepper->gradients)
        munmap(stepper->gradients, bytes);
    step_optimizer_close(&stepper->optimizer);
    free(stepper->parameters);
    free(stepper->offsets);
    free(stepper->wire_bytes);
    free(stepper->step_us);
    free(stepper->backward_us);
    free(stepper->exposed_us);
    free(stepper->times);
    free(stepper->all_times);
    free(stepper->reports);
}

static void stepper_close(struct stepper *stepper)
{
    shoal_reducer_free(stepper->reducer);
    shoal_comm_free(stepper->comm);
    shoal_context_destroy(stepper->context);
    bench_gpu_close(stepper->gpu);
    parts_close(stepper);
}

static enum shoal_status stepper_run(struct stepper *stepper, bool *is_told)
{
    BENCH_TRY(stepper_open(stepper));
    if (stepper->options->is_busy)
        work_measure(stepper);
    BENCH_TRY(warm_up(stepper));
    BENCH_TRY(buffer_measure(stepper));
    BENCH_TRY(steps_run(stepper));
    BENCH_TRY(results_gather(stepper));
    if (stepper->rank == 0)
        *is_told = result_tell(stepper);
    return shoal_comm_finalize(stepper->comm);
}

static void report_failure(const struct stepper *stepper, enum shoal_status status)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const bool is_reducers = stepper->reducer && shoal_reducer_failure(stepper->reducer, &failure) == SHOAL_OK;
    bench_failure_print(stepper->context, stepper->comm ? stepper->rank : -1, status, is_reducers ? failure.text : NULL);
}

int bench_step_worker_run(const struct bench_step_options *options)
{
    struct stepper stepper = {.options = options, .profile = &options->profile, .rank = -1};
    bool is_told = true;
    const enum shoal_status status = stepper_run(&stepper, &is_told);
    const double errors = stepper.report.errors;
    if (status)
        report_failure(&stepper, status);
    if (errors > 0)
        fprintf(stderr, "shoal bench: rank %d: %.0f elements of the averages were wrong\n", stepper.rank, errors);
    stepper_close(&stepper);
    return status || errors > 0 || !is_told ? 1 : 0;
}

static enum shoal_status steps_measure(struct stepper *stepper)
{
    const size_t steps = (size_t)stepper->options->common.steps;
    if (stepper->options->is_on_gpu && !(stepper->gpu = bench_gpu_open()))
        return SHOAL_ERR_UNSUPPORTED;
    BENCH_TRY(parts_open(stepper));
    if (stepper->options->is_busy)
        work_measure(stepper);
    BENCH_TRY(warm_up(stepper));
    BENCH_TRY(steps_run(stepper));
    BENCH_TRY(shoal_allreduce(stepper->comm, stepper->step_us, stepper->step_us, steps, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    return shoal_allreduce(stepper->comm, &stepper->report.errors, &stepper->report.errors, 1, SHOAL_FLOAT64, SHOAL_SUM, NULL);
}

enum shoal_status bench_step_measure(const struct bench_step_options *options, struct shoal_context *context,
                                     struct shoal_comm *comm, double *step_us_out)
{
    struct stepper stepper = {
        .options = options, .profile = &options->profile, .context = context, .comm = comm, .rank = shoal_comm_rank(comm)};
    enum shoal_status status = steps_measure(&stepper);
    if (status)
        report_failure(&stepper, status);
    else
        memcpy(step_us_out, stepper.step_us, (size_t)options->common.steps * sizeof(double));
    if (stepper.report.errors > 0 && stepper.rank == 0)
        fprintf(stderr, "shoal bench: %.0f elements of the averages were wrong\n", stepper.report.errors);
    if (!status && stepper.report.errors > 0)
        status = SHOAL_ERR_INTERNAL;
    shoal_reducer_free(stepper.reducer);
    bench_gpu_close(stepper.gpu);
    parts_close(&stepper);
    return status;
}
