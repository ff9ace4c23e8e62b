/* One rank of `shoal bench pipeline`. */
#include "bench_pipeline.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "bench.h"
#include "tool.h"

enum { WARMUPS = 2, TEXT = 600 };

struct stager {
    const struct bench_pipeline_options *options;
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_schedule *schedule;
    struct shoal_pipeline *pipeline;
    int rank, ranks, hosts;
    struct shoal_stage_costs *costs; /* [stages], of one replica */
    uint64_t step;
    char *plain;     /* with --memory plain: the memory of all outputs, which nobody changes */
    double *step_us; /* of each step */
    struct pipeline_report report;
    struct pipeline_report *reports;
    size_t span_count;           /* most actions of a rank */
    struct pipeline_span *spans; /* the last step: this rank has its own first, then rank 0 has those of all ranks */
    bool is_told;                /* results were written */
    bool is_usage;               /* the arguments are to blame, and a line is printed */
};

static double cpu_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- Actions ------------------------------------------------------------------------------------------------------------- */

/* Returns the bytes of a message: what this replica and another one share of all. */
static size_t bytes_shared(const struct stager *stager, const struct shoal_work *work, const struct shoal_parcel *parcel)
{
    const uint32_t others = shoal_schedule_replicas(stager->schedule, shoal_schedule_rank_of(stager->schedule, parcel->stage));
    uint64_t first, count, begin, length;
    shoal_replica_share(stager->options->bytes, work->replicas, work->replica, &first, &count);
    shoal_replica_share(stager->options->bytes, others, parcel->replica, &begin, &length);
    const uint64_t low = first > begin ? first : begin;
    const uint64_t high = first + count < begin + length ? first + count : begin + length;
    return high > low ? high - low : 0;
}

static void sleep_until(double when_s)
{
    const struct timespec when = {(time_t)when_s, (long)((when_s - floor(when_s)) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) != 0)
        continue;
}

/* What the first and the last bytes of a message are. Plain memory is the same for all messages. */
static uint64_t stamp_of(const struct stager *stager, uint32_t stage, uint32_t microbatch, bool is_gradient)
{
    if (stager->plain)
        return 0;
    return ((stager->step * 65536 + stage) * 65536 + microbatch) * 2 + is_gradient;
}

static void check_input(struct stager *stager, const struct shoal_work *work, const struct shoal_parcel *input)
{
    const bool is_gradient = work->action.kind != SHOAL_FORWARD && work->action.kind != SHOAL_RECOMPUTE;
    const uint32_t source = is_gradient ? work->action.stage + 1 : work->action.stage - 1;
    const uint64_t wanted = stamp_of(stager, source, work->action.microbatch, is_gradient);
    uint64_t first, last;
    stager->report.errors += input->bytes != bytes_shared(stager, work, input) || input->stage != source;
    if (input->bytes < 2 * sizeof wanted)
        return;
    memcpy(&first, input->data, sizeof first);
    memcpy(&last, (const char *)input->data + input->bytes - sizeof last, sizeof last);
    stager->report.errors += first != wanted || last != wanted;
}

static enum shoal_status make_output(struct stager *stager, const struct shoal_work *work, struct shoal_parcel *output)
{
    const uint64_t stamp = stamp_of(stager, work->action.stage, work->action.microbatch, work->action.kind != SHOAL_FORWARD);
    output->bytes = bytes_shared(stager, work, output);
    output->data = stager->plain;
    if (!output->bytes || stager->plain)
        return SHOAL_OK;
    BENCH_TRY(shoal_pipeline_alloc(stager->pipeline, output->bytes, &output->data));
    if (output->bytes < 2 * sizeof stamp)
        return SHOAL_OK;
    memcpy(output->data, &stamp, sizeof stamp);
    memcpy((char *)output->data + output->bytes - sizeof stamp, &stamp, sizeof stamp);
    return SHOAL_OK;
}

/* A device is assumed to compute, and only time passes. */
static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct stager *stager = user;
    const struct shoal_stage_costs *costs = &stager->costs[work->action.stage];
    const double end_s =
        bench_now() + shoal_schedule_action_cost(&work->action, costs) * 1e-6; /* no option sets those of sums */
    enum shoal_status status = SHOAL_OK;
    for (uint32_t i = 0; i < work->input_count; i++)
        check_input(stager, work, &work->inputs[i]);
    for (uint32_t i = 0; i < work->output_count && status == SHOAL_OK; i++)
        status = make_output(stager, work, &work->outputs[i]);
    if (status != SHOAL_OK)
        snprintf(text, text_bytes, "no memory for a message of %zu bytes", stager->options->bytes);
    if (end_s > bench_now())
        sleep_until(end_s);
    return status;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status step_run(struct stager *stager)
{
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    calls.compute = compute;
    calls.user = stager;
    stager->step++;
    BENCH_TRY(shoal_barrier(stager->comm, NULL));
    return shoal_pipeline_step(stager->pipeline, &calls);
}

static enum shoal_status steps_run(struct stager *stager)
{
    const int steps = stager->options->common.steps;
    struct pipeline_report *report = &stager->report;
    for (int i = 0; i < WARMUPS; i++)
        BENCH_TRY(step_run(stager));
    for (int i = 0; i < steps; i++) {
        struct shoal_pipeline_times times = SHOAL_PIPELINE_TIMES_INIT;
        const double cpu_begun_s = cpu_now_s();
        BENCH_TRY(step_run(stager));
        BENCH_TRY(shoal_pipeline_step_times(stager->pipeline, &times));
        report->cpu_s += (cpu_now_s() - cpu_begun_s) / steps;
        stager->step_us[i] = times.step_us;
        report->step_us += times.step_us / steps;
        report->computed_us += times.computed_us / steps;
        report->waited_us += times.waited_us / steps;
        report->sending_us += times.sending_us / steps;
        report->sent_bytes = (double)times.sent_bytes;
        report->received_bytes = (double)times.received_bytes;
        for (uint32_t k = 0; k < times.action_count; k++)
            stager->spans[k] =
                (struct pipeline_span){times.actions[k].waited_us, times.actions[k].begin_us, times.actions[k].end_us};
    }
    return SHOAL_OK;
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static enum shoal_status results_tell(struct stager *stager)
{
    const size_t steps = (size_t)stager->options->common.steps;
    struct pipeline_result result = {.options = stager->options, .schedule = stager->schedule, .ranks = stager->ranks};
    BENCH_TRY(shoal_allreduce(stager->comm, stager->step_us, stager->step_us, steps, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    BENCH_TRY(shoal_gather(stager->comm, &stager->report, stager->reports, PIPELINE_REPORT_NUMBERS, SHOAL_FLOAT64, 0, NULL));
    BENCH_TRY(shoal_gather(stager->comm, stager->spans, stager->spans + stager->span_count,
                           PIPELINE_SPAN_NUMBERS * stager->span_count, SHOAL_FLOAT64, 0, NULL));
    if (stager->rank)
        return SHOAL_OK;
    qsort(stager->step_us, steps, sizeof *stager->step_us, by_value);
    result.hosts = stager->hosts;
    result.reports = stager->reports;
    result.spans = stager->spans + stager->span_count;
    result.span_count = stager->span_count;
    result.step_us = stager->step_us[steps / 2];
    result.step_p90_us = stager->step_us[(size_t)((double)(steps - 1) * 0.9 + 0.5)];
    result.ideal = (struct shoal_schedule_times)SHOAL_SCHEDULE_TIMES_INIT;
    BENCH_TRY(shoal_schedule_time(stager->schedule, &stager->options->costs, 1, &result.ideal, NULL));
    bench_pipeline_print(&result);
    stager->is_told = !stager->options->common.trace || bench_pipeline_trace_write(&result, stager->options->common.trace);
    return SHOAL_OK;
}

/* ---- One rank ------------------------------------------------------------------------------------------------------------ */

static enum shoal_status usage_fail(struct stager *stager, const char *what, const char *text)
{
    stager->is_usage = true;
    if (stager->rank == 0)
        tool_file_fail("bench pipeline", "%s: %s", what, text);
    return SHOAL_ERR_ARGUMENT;
}

/* Every rank reads the file; they compare schedules when the pipeline is made. */
static enum shoal_status schedule_read(struct stager *stager)
{
    enum { FILE_MAX = 1 << 26 };
    char text[TEXT] = "";
    FILE *file = fopen(stager->options->read, "re");
    if (!file)
        return usage_fail(stager, stager->options->read, strerror(errno));
    char *bytes = malloc(FILE_MAX);
    const size_t count = bytes ? fread(bytes, 1, FILE_MAX, file) : 0;
    const bool is_read = bytes && !ferror(file);
    fclose(file);
    const enum shoal_status status =
        is_read ? shoal_schedule_read(bytes, count, &stager->schedule, text, sizeof text) : SHOAL_ERR_SYSTEM;
    free(bytes);
    if (status == SHOAL_ERR_ARGUMENT)
        return usage_fail(stager, stager->options->read, text);
    return is_read ? status : usage_fail(stager, stager->options->read, "cannot be read");
}

/* Recomputes all stages, if that is wanted. */
static enum shoal_status schedule_recompute(struct stager *stager)
{
    struct shoal_schedule *recomputed = NULL;
    if (!stager->options->recompute)
        return SHOAL_OK;
    BENCH_TRY(shoal_schedule_recompute(stager->schedule, NULL, &recomputed));
    shoal_schedule_free(stager->schedule);
    stager->schedule = recomputed;
    return SHOAL_OK;
}

static enum shoal_status schedule_make(struct stager *stager)
{
    const struct bench_pipeline_options *options = stager->options;
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    char text[TEXT] = "";
    if (options->read)
        return schedule_read(stager);
    wanted.kind = (enum shoal_schedule_kind)options->schedule;
    wanted.ranks = (uint32_t)stager->ranks;
    wanted.microbatches = options->microbatches ? (uint32_t)options->microbatches : 2 * wanted.ranks;
    wanted.stages_per_rank = (uint32_t)options->stages_per_rank;
    wanted.costs = options->costs;
    wanted.costs.input_gradient += options->recompute ? options->costs.forward : 0; /* its order is for longer passes */
    wanted.activations = options->activations;
    const enum shoal_status status = shoal_schedule_create(&wanted, &stager->schedule, text, sizeof text);
    return status == SHOAL_ERR_ARGUMENT ? usage_fail(stager, shoal_schedule_name(wanted.kind), text) : status;
}

static enum shoal_status memory_open(struct stager *stager)
{
    const struct bench_pipeline_options *options = stager->options;
    stager->step_us = calloc((size_t)options->common.steps, sizeof *stager->step_us);
    stager->reports = calloc((size_t)stager->ranks, sizeof *stager->reports);
    stager->plain = options->is_plain ? calloc(1, options->bytes + 1) : NULL;
    return stager->step_us && stager->reports && (stager->plain || !options->is_plain) ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static enum shoal_status spans_open(struct stager *stager)
{
    uint32_t count;
    for (uint32_t r = 0; r < shoal_schedule_ranks(stager->schedule); r++) {
        (void)shoal_schedule_actions(stager->schedule, r, &count);
        stager->span_count = count > stager->span_count ? count : stager->span_count;
    }
    stager->spans = calloc(stager->span_count * (size_t)(1 + stager->ranks), sizeof *stager->spans);
    return stager->spans ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static enum shoal_status costs_open(struct stager *stager)
{
    stager->costs = calloc(shoal_schedule_stages(stager->schedule), sizeof *stager->costs);
    return stager->costs ? shoal_schedule_stage_costs(stager->schedule, &stager->options->costs, stager->costs)
                         : SHOAL_ERR_MEMORY;
}

static enum shoal_status stager_open(struct stager *stager)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    struct shoal_pipeline_options wanted = SHOAL_PIPELINE_OPTIONS_INIT;
    struct shoal_place place = SHOAL_PLACE_INIT;
    options.timeout_ms = wanted.timeout_ms = (uint32_t)stager->options->common.timeout_s * 1000;
    wanted.ahead = (uint32_t)stager->options->ahead;
    BENCH_TRY(shoal_context_create(NULL, &stager->context));
    BENCH_TRY(shoal_comm_create(stager->context, &options, &stager->comm));
    stager->rank = shoal_comm_rank(stager->comm);
    stager->ranks = shoal_comm_size(stager->comm);
    BENCH_TRY(shoal_comm_place(stager->comm, stager->rank, &place));
    stager->hosts = place.hosts;
    stager->report.host = place.host;
    if (stager->rank == 0)
        bench_ranks_note(stager->options->common.ranks, stager->ranks);
    BENCH_TRY(memory_open(stager));
    BENCH_TRY(schedule_make(stager));
    BENCH_TRY(schedule_recompute(stager));
    BENCH_TRY(spans_open(stager));
    BENCH_TRY(costs_open(stager));
    const enum shoal_status status =
        shoal_pipeline_create(stager->context, stager->comm, stager->schedule, &wanted, &stager->pipeline);
    if (status == SHOAL_ERR_ARGUMENT) { /* the schedule of a file */
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        const enum shoal_status found = shoal_last_failure(stager->context, NULL, &failure);
        return usage_fail(stager, stager->options->read ? stager->options->read : "schedule",
                          found == SHOAL_OK ? failure.text : shoal_status_text(status));
    }
    return status;
}

static void stager_close(struct stager *stager)
{
    shoal_pipeline_free(stager->pipeline);
    shoal_schedule_free(stager->schedule);
    shoal_comm_free(stager->comm);
    shoal_context_destroy(stager->context);
    free(stager->costs);
    free(stager->plain);
    free(stager->step_us);
    free(stager->reports);
    free(stager->spans);
}

static enum shoal_status stager_run(struct stager *stager)
{
    BENCH_TRY(stager_open(stager));
    prctl(PR_SET_TIMERSLACK, 1); /* wakes when an action's time is over, not up to 50 us later */
    BENCH_TRY(steps_run(stager));
    BENCH_TRY(results_tell(stager));
    return shoal_comm_finalize(stager->comm);
}

static void pipeline_report_failure(const struct stager *stager, enum shoal_status status)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const bool is_pipelines = stager->pipeline && shoal_pipeline_failure(stager->pipeline, &failure) == SHOAL_OK;
    bench_failure_print(stager->context, stager->comm ? stager->rank : -1, status, is_pipelines ? failure.text : NULL);
}

int bench_pipeline_worker_run(const struct bench_pipeline_options *options)
{
    struct stager stager = {.options = options, .rank = -1, .is_told = true};
    const enum shoal_status status = stager_run(&stager);
    const double errors = stager.report.errors;
    if (status && !stager.is_usage)
        pipeline_report_failure(&stager, status);
    if (errors > 0)
        fprintf(stderr, "shoal bench: rank %d: %.0f messages were wrong\n", stager.rank, errors);
    stager_close(&stager);
    if (status && stager.is_usage)
        return TOOL_EXIT_USAGE;
    return status || errors > 0 || !stager.is_told ? 1 : 0;
}
