/* Prints the results of `shoal bench pipeline`. */
#include "bench_pipeline.h"

#include "bench.h"

static const char *schedule_name(const struct pipeline_result *result)
{
    const struct bench_pipeline_options *options = result->options;
    return options->read ? "read" : shoal_schedule_name((enum shoal_schedule_kind)options->schedule);
}

static double bubble_of(const struct pipeline_result *result, const struct pipeline_report *report)
{
    return 1 - report->computed_us / result->step_us;
}

static double mean_bubble(const struct pipeline_result *result)
{
    double sum = 0;
    for (int r = 0; r < result->ranks; r++)
        sum += bubble_of(result, &result->reports[r]);
    return sum / result->ranks;
}

static double over_ideal(const struct pipeline_result *result)
{
    return result->ideal.step > 0 ? result->step_us / result->ideal.step : 0;
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void rank_object_print(const struct pipeline_result *result, int rank)
{
    const struct pipeline_report *report = &result->reports[rank];
    printf("{\"record\":\"rank\",\"rank\":%d,\"host\":%.0f,\"step_us\":%.1f,\"computed_us\":%.1f,\"waited_us\":%.1f,"
           "\"sending_us\":%.1f,\"bubble\":%.5f,\"bytes_sent\":%.0f,\"bytes_received\":%.0f,\"cpu_s\":%.6f,\"errors\":%.0f}\n",
           rank, report->host, report->step_us, report->computed_us, report->waited_us, report->sending_us,
           bubble_of(result, report), report->sent_bytes, report->received_bytes, report->cpu_s, report->errors);
}

static void step_object_print(const struct pipeline_result *result)
{
    const struct bench_pipeline_options *options = result->options;
    double errors = 0, cpu_s = 0, bytes = 0;
    for (int r = 0; r < result->ranks; r++) {
        errors += result->reports[r].errors;
        cpu_s += result->reports[r].cpu_s;
        bytes += result->reports[r].sent_bytes;
    }
    printf("{\"record\":\"pipeline\",\"schedule\":\"%s\",\"ranks\":%d,\"hosts\":%d,\"stages\":%u,\"microbatches\":%u,"
           "\"steps\":%d,\"forward_us\":%.3f,\"input_gradient_us\":%.3f,\"weight_gradient_us\":%.3f,\"transfer_us\":%.3f,"
           "\"message_bytes\":%zu,\"memory\":\"%s\",\"step_us\":%.1f,\"step_p90_us\":%.1f,\"ideal_us\":%.1f,"
           "\"over_ideal\":%.5f,\"bubble\":%.5f,\"ideal_bubble\":%.5f,\"bytes_sent\":%.0f,\"cpu_s\":%.6f,\"errors\":%.0f}\n",
           schedule_name(result), result->ranks, result->hosts, shoal_schedule_stages(result->schedule),
           shoal_schedule_microbatches(result->schedule), options->common.steps, options->costs.forward,
           options->costs.input_gradient, options->costs.weight_gradient, options->costs.transfer, options->bytes,
           options->is_plain ? "plain" : "shared", result->step_us, result->step_p90_us, result->ideal.step, over_ideal(result),
           mean_bubble(result), result->ideal.bubble, bytes, cpu_s, errors);
}

/* ---- A table ------------------------------------------------------------------------------------------------------------- */

static void header_print(const struct pipeline_result *result)
{
    const struct bench_pipeline_options *options = result->options;
    const struct shoal_stage_costs *costs = &options->costs;
    char size[24];
    printf("# shoal %s, %s: %u stages, %u microbatches, messages of %s in %s memory, %d rank%s on %d host%s\n", shoal_version(),
           schedule_name(result), shoal_schedule_stages(result->schedule), shoal_schedule_microbatches(result->schedule),
           bench_size_print(options->bytes, size), options->is_plain ? "plain" : "shared", result->ranks,
           result->ranks == 1 ? "" : "s", result->hosts, result->hosts == 1 ? "" : "s");
    printf("# a microbatch on a rank: forward %g ms, input gradient %g, weight gradient %g; %d step%s, times in milliseconds\n",
           costs->forward / 1e3, costs->input_gradient / 1e3, costs->weight_gradient / 1e3, options->common.steps,
           options->common.steps == 1 ? "" : "s");
    printf("%5s %5s %10s %10s %10s %10s %9s %11s %11s %9s\n", "rank", "host", "step", "computed", "waited", "sending",
           "bubble %", "sent", "received", "cpu");
}

static void rank_row_print(const struct pipeline_result *result, int rank)
{
    const struct pipeline_report *report = &result->reports[rank];
    char sent[24], received[24];
    printf("%5d %5.0f %10.2f %10.2f %10.2f %10.2f %9.2f %11s %11s %9.2f\n", rank, report->host, report->step_us / 1e3,
           report->computed_us / 1e3, report->waited_us / 1e3, report->sending_us / 1e3, 100 * bubble_of(result, report),
           bench_size_print((size_t)report->sent_bytes, sent), bench_size_print((size_t)report->received_bytes, received),
           report->cpu_s * 1e3);
}

static void sums_print(const struct pipeline_result *result)
{
    printf("\nstep      %.2f ms (90 %% of steps up to %.2f)\n", result->step_us / 1e3, result->step_p90_us / 1e3);
    printf("ideal     %.2f ms: the step took %.4f times as long\n", result->ideal.step / 1e3, over_ideal(result));
    printf("bubble    %.2f %%, ideal %.2f %%\n", 100 * mean_bubble(result), 100 * result->ideal.bubble);
}

void bench_pipeline_print(const struct pipeline_result *result)
{
    const bool is_json = result->options->common.json;
    if (!is_json)
        header_print(result);
    for (int r = 0; r < result->ranks; r++)
        (is_json ? rank_object_print : rank_row_print)(result, r);
    (is_json ? step_object_print : sums_print)(result);
    fflush(stdout);
}
