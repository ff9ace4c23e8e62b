/* Prints the results of `shoal bench scaling`. */
#include "bench_scaling.h"

#include <math.h>
#include <string.h>

static const char *const sources[] = {
    [SCALING_ASSUMED] = "assumed", [SCALING_MEASURED] = "measured", [SCALING_GIVEN] = "given"};

static const char *unit_of(const struct scaling_options *options)
{
    return options->batch ? "samples" : "steps";
}

static double off_of(const struct scaling_point *point)
{
    return point->predicted_us / point->median_us - 1;
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void point_object_print(const struct scaling_result *result, const struct scaling_point *point)
{
    printf("{\"record\":\"point\",\"workers\":%zu,\"hosts\":%zu,\"samples\":%d,\"step_us\":%.1f,\"step_p10_us\":%.1f,"
           "\"step_p90_us\":%.1f,\"throughput\":%.6g,\"efficiency\":%.5f,\"predicted_us\":%.1f,\"predicted_throughput\":%.6g,"
           "\"predicted_efficiency\":%.5f,\"off\":%.5f,\"limit\":\"%s\"}\n",
           point->workers, point->hosts, point->samples, point->median_us, point->low_us, point->high_us,
           scaling_throughput(result, point, point->median_us), scaling_efficiency(result, point, false), point->predicted_us,
           scaling_throughput(result, point, point->predicted_us), scaling_efficiency(result, point, true), off_of(point),
           point->limit);
}

static void scaling_object_print(const struct scaling_result *result)
{
    const struct scaling_options *options = result->options;
    struct sim_field fields[] = {
        {"record", "scaling", 0},
        {"profile", options->step.profile.name, 0},
        {"scaling", options->is_strong ? "strong" : "weak", 0},
        {"unit", unit_of(options), 0},
        {"batch", NULL, options->batch},
        {"forward_us", NULL, options->forward_us},
        {"backward_us", NULL, options->step.backward_us},
        {"busy", NULL, options->step.is_busy},
        {"rounds", NULL, options->rounds},
        {"steps", NULL, options->step.common.steps},
        {"ranks_per_host", NULL, (double)result->local},
        {"rate_from", sources[result->rate], 0},
        {"latency_from", sources[result->latency], 0},
        {"memory_from", sources[result->memory], 0},
    };
    enum { OWN = sizeof fields / sizeof fields[0] };
    struct sim_field all[OWN + SIM_MODEL_FIELDS_MAX];
    memcpy(all, fields, sizeof fields);
    sim_fields_print(all, OWN + sim_model_fields(&result->model, result->points[result->count - 1].hosts, all + OWN), true);
}

/* ---- A table ------------------------------------------------------------------------------------------------------------- */

static void header_print(const struct scaling_result *result)
{
    const struct scaling_options *options = result->options;
    printf("# shoal %s, %s: %s scaling, ", shoal_version(), options->step.profile.name, options->is_strong ? "strong" : "weak");
    if (options->batch)
        printf("%d sample%s %s, ", options->batch, options->batch == 1 ? "" : "s",
               options->is_strong ? "divided among all workers" : "for each worker");
    printf("forward pass %g ms, backward pass %g ms, CPU %s\n", options->forward_us / 1e3, options->step.backward_us / 1e3,
           options->step.is_busy ? "busy" : "free");
    printf("# %zu worker%s on a host; %d round%s of %d steps; 10 %% and 90 %%: of the steps of all rounds\n", result->local,
           result->local == 1 ? "" : "s", options->rounds, options->rounds == 1 ? "" : "s", options->step.common.steps);
    if (result->points[result->count - 1].hosts > 1)
        printf("# network %.3g Gbit/s each way (%s), latency %.3g us (%s), ", result->model.rate_gbit_s, sources[result->rate],
               result->model.latency_us, sources[result->latency]);
    else
        printf("# ");
    printf("memory %.3g GB/s of a worker (%s)\n", result->model.memory_gb_s, sources[result->memory]);
    printf("%7s %5s  %-32s %11s %10s   %9s %10s %8s\n", "", "", "measured", "", "", "predicted", "", "");
    printf("%7s %5s  %-32s %9s/s %10s   %9s %10s %8s  %s\n", "workers", "hosts", "step/ms (10 % .. 90 %)", unit_of(options),
           "efficiency", "step/ms", "efficiency", "off", "limit");
}

static void row_print(const struct scaling_result *result, const struct scaling_point *point)
{
    char spread[40];
    snprintf(spread, sizeof spread, "%.2f (%.2f .. %.2f)", point->median_us / 1e3, point->low_us / 1e3, point->high_us / 1e3);
    printf("%7zu %5zu  %-32s %11.4g %9.1f%%   %9.2f %9.1f%% %+7.1f%%  %s\n", point->workers, point->hosts, spread,
           scaling_throughput(result, point, point->median_us), 100 * scaling_efficiency(result, point, false),
           point->predicted_us / 1e3, 100 * scaling_efficiency(result, point, true), 100 * off_of(point), point->limit);
}

/* Names the largest loss of efficiency from one number of workers to the next, the knee of the curve, if it is half a point. */
static void loss_print(const struct scaling_result *result)
{
    int knee = 0;
    double most = 0.005;
    for (int i = 1; i < result->count; i++) {
        const double loss =
            scaling_efficiency(result, &result->points[i - 1], false) - scaling_efficiency(result, &result->points[i], false);
        if (loss > most) {
            most = loss;
            knee = i;
        }
    }
    if (knee)
        printf("\nThe step from %zu to %zu workers loses most: %.1f points of efficiency. The model limits it by: %s.\n",
               result->points[knee - 1].workers, result->points[knee].workers, 100 * most, result->points[knee].limit);
}

void scaling_print(const struct scaling_result *result)
{
    const bool is_json = result->options->format == SIM_JSON;
    if (!is_json)
        header_print(result);
    for (int i = 0; i < result->count; i++)
        (is_json ? point_object_print : row_print)(result, &result->points[i]);
    if (is_json)
        scaling_object_print(result);
    else
        loss_print(result);
    fflush(stdout);
}
