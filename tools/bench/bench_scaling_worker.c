/* One rank of `shoal bench scaling`. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "bench_scaling_probe.h"
#include "tool.h"

/* The world of all ranks, as this rank sees it. */
struct worker {
    const struct scaling_options *options;
    struct shoal_context *context;
    struct shoal_comm *comm;
    int rank, ranks;
    struct scaling_result result;
    int code; /* for invalid arguments, which only a job that has started can find */
};

/* Every host must have as many ranks as the others, numbered host by host: then the first ranks are the ranks of the first
 * hosts. Every rank comes to the same answer. */
static bool hosts_check(struct worker *worker, size_t *hosts_out, size_t *local_out)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    bool is_even = shoal_comm_place(worker->comm, 0, &place) == SHOAL_OK;
    const int hosts = place.hosts, local = place.local_size;
    for (int r = 0; is_even && r < worker->ranks; r++)
        is_even = shoal_comm_place(worker->comm, r, &place) == SHOAL_OK && place.host == r / local && place.local_size == local;
    *hosts_out = (size_t)hosts;
    *local_out = (size_t)local;
    if (!is_even && worker->rank == 0)
        fprintf(stderr, "shoal bench: %d workers on %d hosts: every host needs equally many, numbered host by host\n",
                worker->ranks, hosts);
    return is_even;
}

static enum shoal_status worker_open(struct worker *worker)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    size_t hosts, local;
    options.timeout_ms = (uint32_t)worker->options->step.common.timeout_s * 1000;
    BENCH_TRY(shoal_context_create(NULL, &worker->context));
    BENCH_TRY(shoal_comm_create(worker->context, &options, &worker->comm));
    worker->rank = shoal_comm_rank(worker->comm);
    worker->ranks = shoal_comm_size(worker->comm);
    if (worker->rank == 0)
        bench_ranks_note(worker->options->step.common.ranks, worker->ranks);
    if (!hosts_check(worker, &hosts, &local))
        worker->code = TOOL_EXIT_USAGE;
    else
        worker->code = scaling_points_make(worker->options, hosts, local, worker->rank == 0, &worker->result);
    return SHOAL_OK;
}

static void progress_print(const struct worker *worker, int round, const struct scaling_point *point)
{
    if (worker->rank || !isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[Kshoal bench: round %d of %d, %zu worker%s", round + 1, worker->options->rounds, point->workers,
            point->workers == 1 ? "" : "s");
    fflush(stderr);
}

/* Ranks without work wait in a barrier, which sleeps. It has no deadline of its own: a failure among the ranks that measure
 * ends it. */
static enum shoal_status point_measure(struct worker *worker, int round, const struct scaling_point *point)
{
    const bool is_in = (size_t)worker->rank < point->workers;
    struct bench_step_options step = worker->options->step;
    struct shoal_options forever = SHOAL_OPTIONS_INIT;
    struct shoal_comm *comm = NULL;
    enum shoal_status status = SHOAL_OK;
    step.backward_us *= point->share;
    step.common.ranks = 0;
    forever.timeout_ms = SHOAL_FOREVER;
    progress_print(worker, round, point);
    BENCH_TRY(shoal_comm_split(worker->comm, is_in ? 0 : -1, 0, NULL, &comm));
    if (is_in)
        status = bench_step_measure(&step, worker->context, comm, point->step_us + (size_t)round * (size_t)step.common.steps);
    shoal_comm_free(comm);
    return status ? status : shoal_barrier(worker->comm, &forever);
}

static enum shoal_status points_measure(struct worker *worker)
{
    for (int round = 0; round < worker->options->rounds; round++) {
        BENCH_TRY(scaling_probe_measure(worker->context, worker->comm, worker->result.local, &worker->result.probes[round]));
        for (int i = 0; i < worker->result.count; i++)
            BENCH_TRY(point_measure(worker, round, &worker->result.points[i]));
    }
    if (worker->rank == 0 && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
    return SHOAL_OK;
}

/* The replay begins with the backward pass: adds the forward pass, during which nothing is summed. */
static void points_finish(struct scaling_result *result)
{
    const struct scaling_options *options = result->options;
    const size_t count = (size_t)options->rounds * (size_t)options->step.common.steps;
    for (int i = 0; i < result->count; i++) {
        struct scaling_point *point = &result->points[i];
        const double forward_us = point->share * options->forward_us;
        point->median_us = forward_us + scaling_quantile(point->step_us, count, 0.5);
        point->low_us = forward_us + scaling_quantile(point->step_us, count, 0.1);
        point->high_us = forward_us + scaling_quantile(point->step_us, count, 0.9);
    }
}

static enum shoal_status worker_run(struct worker *worker)
{
    BENCH_TRY(worker_open(worker));
    if (!worker->code)
        BENCH_TRY(points_measure(worker));
    return shoal_comm_finalize(worker->comm);
}

/* Rank 0 predicts when the job is over, because predictions for many hosts take long. */
static int result_show(struct scaling_result *result)
{
    points_finish(result);
    scaling_model_adopt(result);
    const int code = scaling_predict(result);
    if (code)
        return code;
    scaling_print(result);
    return !result->options->plot || scaling_plot_write(result) ? 0 : 1;
}

int scaling_worker_run(const struct scaling_options *options)
{
    struct worker worker = {.options = options, .rank = -1};
    const enum shoal_status status = worker_run(&worker);
    if (status)
        bench_failure_print(worker.context, worker.comm ? worker.rank : -1, status, NULL);
    shoal_comm_free(worker.comm);
    shoal_context_destroy(worker.context);
    int code = status ? 1 : worker.code;
    if (!code && worker.rank == 0)
        code = result_show(&worker.result);
    scaling_points_free(&worker.result);
    return code;
}
