/* The numbers of workers that `shoal bench scaling` measures, and what the simulator predicts for them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench_scaling.h"
#include "sim/sim_step_cost.h"
#include "tool.h"

/* ---- Numbers of workers -------------------------------------------------------------------------------------------------- */

/* Doubles from 1 up to the workers of a host, then doubles hosts; both lists end with all. */
static void counts_choose(size_t hosts, size_t local, struct sim_values *counts_out)
{
    counts_out->count = 0;
    for (size_t n = 1; n < local; n *= 2)
        counts_out->at[counts_out->count++] = n;
    for (size_t n = 1; n < hosts; n *= 2)
        counts_out->at[counts_out->count++] = n * local;
    counts_out->at[counts_out->count++] = hosts * local;
}

/* The first number is what efficiency refers to, so it must be the smallest. */
static void counts_sort(struct sim_values *counts)
{
    int kept = 0;
    for (int i = 0; i < counts->count; i++) {
        const size_t value = counts->at[i];
        int at = kept;
        while (at > 0 && counts->at[at - 1] > value)
            at--;
        if (at > 0 && counts->at[at - 1] == value)
            continue;
        memmove(&counts->at[at + 1], &counts->at[at], (size_t)(kept - at) * sizeof counts->at[0]);
        counts->at[at] = value;
        kept++;
    }
    counts->count = kept;
}

static bool count_check(size_t count, size_t hosts, size_t local, bool is_talking)
{
    if (count > hosts * local) {
        if (is_talking)
            tool_usage_fail("bench scaling", "--count: %zu workers, but there are %zu; start more with -n, or on more hosts",
                            count, hosts * local);
        return false;
    }
    if (count > local && count % local && is_talking)
        tool_usage_fail("bench scaling", "--count: %zu workers are not whole hosts of %zu", count, local);
    return count <= local || count % local == 0;
}

static bool batch_check(const struct scaling_options *options, size_t count, bool is_talking)
{
    if (!options->is_strong || (size_t)options->batch >= count)
        return true;
    if (is_talking)
        tool_usage_fail("bench scaling", "--batch %d cannot be divided among %zu workers: each needs a sample", options->batch,
                        count);
    return false;
}

/* With --strong the worker with the most samples is the slowest. */
static struct scaling_point point_of(const struct scaling_options *options, size_t count, size_t local)
{
    struct scaling_point point = {
        .workers = count, .hosts = (count + local - 1) / local, .samples = options->batch, .share = 1};
    if (options->is_strong) {
        point.samples = (int)(((size_t)options->batch + count - 1) / count);
        point.share = (double)point.samples / options->batch;
    }
    return point;
}

static int point_add(const struct scaling_options *options, size_t count, struct scaling_result *result)
{
    struct scaling_point *point = &result->points[result->count];
    *point = point_of(options, count, result->local);
    point->step_us = calloc((size_t)options->rounds * (size_t)options->step.common.steps, sizeof *point->step_us);
    if (!point->step_us) {
        fputs("shoal bench: no memory\n", stderr);
        return 1;
    }
    result->count++;
    return 0;
}

int scaling_points_make(const struct scaling_options *options, size_t hosts, size_t local, bool is_talking,
                        struct scaling_result *result_out)
{
    struct sim_values counts = options->counts;
    int code = 0;
    *result_out = (struct scaling_result){.options = options,
                                          .model = options->model,
                                          .rate = options->rate,
                                          .latency = options->latency,
                                          .memory = options->memory,
                                          .local = local};
    if (!counts.count)
        counts_choose(hosts, local, &counts);
    counts_sort(&counts);
    result_out->points = calloc((size_t)counts.count, sizeof *result_out->points);
    result_out->probes = calloc((size_t)options->rounds, sizeof *result_out->probes);
    if (!result_out->points || !result_out->probes) {
        fputs("shoal bench: no memory\n", stderr);
        return 1;
    }
    for (int i = 0; i < counts.count && !code; i++) {
        const bool is_good =
            count_check(counts.at[i], hosts, local, is_talking) && batch_check(options, counts.at[i], is_talking);
        code = is_good ? point_add(options, counts.at[i], result_out) : TOOL_EXIT_USAGE;
    }
    return code;
}

void scaling_points_free(struct scaling_result *result)
{
    for (int i = 0; i < result->count; i++)
        free(result->points[i].step_us);
    free(result->points);
    free(result->probes);
    result->points = NULL;
    result->probes = NULL;
    result->count = 0;
}

/* ---- Figures ------------------------------------------------------------------------------------------------------------- */

/* Without a batch, each worker's step counts as one with weak scaling. */
double scaling_throughput(const struct scaling_result *result, const struct scaling_point *point, double step_us)
{
    const struct scaling_options *options = result->options;
    const double samples = options->is_strong ? options->batch : (options->batch ? options->batch : 1) * (double)point->workers;
    return samples / (step_us * 1e-6);
}

double scaling_efficiency(const struct scaling_result *result, const struct scaling_point *point, bool is_predicted)
{
    const struct scaling_point *first = &result->points[0];
    const double one = scaling_throughput(result, first, is_predicted ? first->predicted_us : first->median_us);
    const double all = scaling_throughput(result, point, is_predicted ? point->predicted_us : point->median_us);
    return all / (double)point->workers / (one / (double)first->workers);
}

/* ---- The prediction ------------------------------------------------------------------------------------------------------ */

/* Returns the median over the rounds of a number at an offset in struct scaling_probe, or 0 without memory. */
static double probes_median(const struct scaling_result *result, size_t offset)
{
    const size_t count = (size_t)result->options->rounds;
    double *values = calloc(count, sizeof *values);
    if (!values)
        return 0;
    for (size_t i = 0; i < count; i++)
        memcpy(&values[i], (const char *)&result->probes[i] + offset, sizeof values[i]);
    const double median = scaling_quantile(values, count, 0.5);
    free(values);
    return median;
}

/* Half a round trip has the CPU time of a message on both sides, which the model counts by itself. */
void scaling_model_adopt(struct scaling_result *result)
{
    enum { LATENCY_LEAST_US = 1 };
    const double gb_s = probes_median(result, offsetof(struct scaling_probe, memory_gb_s));
    const double gbit_s = probes_median(result, offsetof(struct scaling_probe, rate_gbit_s));
    const double ping_us = probes_median(result, offsetof(struct scaling_probe, ping_us));
    if (result->memory != SCALING_GIVEN && gb_s > 0) {
        result->model.memory_gb_s = gb_s;
        result->memory = SCALING_MEASURED;
    }
    if (result->rate != SCALING_GIVEN && gbit_s > 0) {
        result->model.rate_gbit_s = gbit_s;
        result->rate = SCALING_MEASURED;
    }
    if (result->latency != SCALING_GIVEN && ping_us > 0) {
        result->model.latency_us = fmax(LATENCY_LEAST_US, ping_us - 2 * result->model.message_us);
        result->latency = SCALING_MEASURED;
    }
}

enum { BUFFER_BYTES = 25 << 20, FLIGHT_BUFFERS = 4 }; /* the defaults of the engine, as for `shoal sim step` */

static struct sim_step_options question_of(const struct scaling_result *result, const struct scaling_point *point)
{
    const struct scaling_options *options = result->options;
    struct sim_step_options question = {
        .question = result->model,
        .profiles = {options->step.profile},
        .backward_us = {point->share * options->step.backward_us},
        .forward_us = {point->share * options->forward_us},
        .profile_count = 1,
        .buffer_bytes = options->step.buffer_bytes,
        .has_views = options->step.has_views,
    };
    question.question.ranks_per_host = point->workers < result->local ? point->workers : result->local;
    question.flight_bytes = FLIGHT_BUFFERS * (question.buffer_bytes ? question.buffer_bytes : BUFFER_BYTES);
    return question;
}

/* Answers cannot be kept from one point to the next: they depend on the ranks of a host. */
int scaling_predict(struct scaling_result *result)
{
    for (int i = 0; i < result->count; i++) {
        struct scaling_point *point = &result->points[i];
        const struct sim_step_options question = question_of(result, point);
        struct sim_step_answers answers = {.count = 0};
        struct sim_step_row row = {.hosts = point->hosts};
        const int code = sim_step_row_ask(&question, &answers, &row);
        sim_step_answers_free(&answers);
        if (code)
            return code;
        point->predicted_us = question.forward_us[0] + row.step_us;
        point->limit = sim_step_limit_name(row.limit);
    }
    return 0;
}
