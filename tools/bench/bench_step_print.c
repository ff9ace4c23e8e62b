/* Prints the results of `shoal bench step`. */
#include "bench_step.h"

#include <math.h>
#include <string.h>

#include "base/json_text.h"
#include "bench.h"

/* Returns the share of a time that the backward pass hides, or 1 if that time is zero. */
static double hidden(double exposed_us, double of_us)
{
    return of_us > 0 ? fmax(0, 1 - exposed_us / of_us) : 1;
}

/* Returns the step's time divided by the bound of any engine, with one buffer's time added to the bound. */
static double over_bound(const struct step_result *result)
{
    const double buffer_us =
        result->ranks > 1
            ? result->wire_us / ((double)result->options->profile.elements * STEP_ELEMENT_BYTES) * result->buffer_bytes
            : 0;
    return result->step_us / (result->bound.us + buffer_us);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void rank_object_print(const struct step_result *result, int rank)
{
    const struct step_report *report = &result->reports[rank];
    printf("{\"record\":\"rank\",\"rank\":%d,\"host\":%.0f,\"step_us\":%.1f,\"backward_us\":%.1f,\"exposed_us\":%.1f,"
           "\"bytes_sent\":%.0f,\"bytes_received\":%.0f,\"bytes_network\":%.0f,\"bytes_wire_sent\":%.0f,"
           "\"bytes_wire_received\":%.0f,\"cpu_s\":%.6f,\"balance\":%.6f,\"pack_us\":%.1f,\"unpack_us\":%.1f,"
           "\"callback_us\":%.1f,\"optimizer_us\":%.1f,\"optimizer_bytes\":%.0f,\"bytes_copied\":%.0f,\"flight_buffers\":%.0f,"
           "\"errors\":%.0f}\n",
           rank, report->host, report->step_us, report->backward_us, report->exposed_us, report->sent_bytes,
           report->received_bytes, report->network_bytes, report->wire_sent_bytes, report->wire_received_bytes, report->cpu_s,
           result->balance, report->pack_us, report->unpack_us, report->callback_us, report->optimizer_us,
           report->optimizer_bytes, report->copied_bytes, report->flight_buffers, report->errors);
}

static double sum_of_errors(const struct step_result *result)
{
    double errors = 0;
    for (int r = 0; r < result->ranks; r++)
        errors += result->reports[r].errors;
    return errors;
}

static double sum_of_cpu(const struct step_result *result)
{
    double cpu_s = 0;
    for (int r = 0; r < result->ranks; r++)
        cpu_s += result->reports[r].cpu_s;
    return cpu_s;
}

/* Returns the longest time of a rank's optimizer, and the most bytes that a rank keeps for it. */
static struct step_report optimizer_most(const struct step_result *result)
{
    struct step_report most = {.optimizer_us = 0};
    for (int r = 0; r < result->ranks; r++) {
        most.optimizer_us = fmax(most.optimizer_us, result->reports[r].optimizer_us);
        most.optimizer_bytes = fmax(most.optimizer_bytes, result->reports[r].optimizer_bytes);
    }
    return most;
}

static void step_object_print(const struct step_result *result)
{
    const struct bench_step_options *options = result->options;
    const struct step_profile *profile = &options->profile;
    const struct step_report optimizer = optimizer_most(result);
    fputs("{\"record\":\"step\",\"profile\":", stdout);
    shoal_json_print_text(stdout, profile->name);
    printf(
        ",\"tensors\":%zu,\"bytes\":%zu,\"buffers\":%zu,\"ranks\":%d,\"hosts\":%d,\"steps\":%d,\"busy\":%s,\"compress\":\"%s\","
        "\"memory\":\"%s\",\"views\":%s,\"optimizer\":\"%s\",\"when\":\"%s\",\"shard\":\"%s\",\"clip\":\"%s\",\"thread\":%s,"
        "\"asked_backward_"
        "us\":%.1f,\"backward_us\":%.1f,"
        "\"step_us\":%.1f,"
        "\"step_p90_us\":%.1f,\"exposed_us\":%.1f,\"alone_us\":%.1f,\"hidden_alone\":%.5f,\"wire_us\":%.1f,\"hidden\":%.5f,"
        "\"bound_us\":%.1f,\"bound_tensor\":",
        profile->count, profile->elements * STEP_ELEMENT_BYTES, shoal_gradient_layout_buffers(result->layout), result->ranks,
        result->hosts, options->common.steps, options->is_busy ? "true" : "false",
        bench_step_compression_name(options->compression), options->is_on_gpu ? "gpu" : "plain",
        options->has_views ? "true" : "false", step_rules[options->optimizing.rule], step_whens[options->optimizing.when],
        step_shard_name(&options->optimizing), step_clips[options->optimizing.clip],
        options->has_no_thread || options->is_on_gpu ? "false" : "true", options->backward_us, result->backward_us,
        result->step_us, result->step_p90_us, result->exposed_us, result->bare_us, hidden(result->exposed_us, result->bare_us),
        result->wire_us, hidden(result->exposed_us, result->wire_us), result->bound.us);
    shoal_json_print_text(stdout, profile->tensors[result->bound.tensor].name);
    printf(",\"bound_ready\":%.6f,\"bound_tail_bytes\":%.0f,\"buffer_bytes\":%.0f,\"buffer_us\":%.1f,\"over_bound\":%.5f,"
           "\"rate_gbit_s\":%g,\"balance\":%.6f,\"cpu_s\":%.6f,\"optimizer_us\":%.1f,\"optimizer_share\":%.5f,"
           "\"optimizer_bytes\":%.0f,\"errors\":%.0f}\n",
           profile->tensors[result->bound.tensor].ready, result->bound.tail_bytes, result->buffer_bytes, result->buffer_us,
           over_bound(result), options->rate_gbit_s, result->balance, sum_of_cpu(result), optimizer.optimizer_us,
           optimizer.optimizer_us / result->step_us, optimizer.optimizer_bytes, sum_of_errors(result));
}

/* ---- A table ------------------------------------------------------------------------------------------------------------- */

static const char *size_text(double bytes, char text_out[24])
{
    return bench_size_print((size_t)bytes, text_out);
}

static void header_print(const struct step_result *result)
{
    const struct bench_step_options *options = result->options;
    const struct step_profile *profile = &options->profile;
    const size_t buffers = shoal_gradient_layout_buffers(result->layout);
    char size[24], largest[24];
    printf("# shoal %s, %s: %zu tensors, %s in %zu buffer%s of up to %s, %d rank%s on %d host%s\n", shoal_version(),
           profile->name, profile->count, size_text((double)(profile->elements * STEP_ELEMENT_BYTES), size), buffers,
           buffers == 1 ? "" : "s", size_text(result->buffer_bytes, largest), result->ranks, result->ranks == 1 ? "" : "s",
           result->hosts, result->hosts == 1 ? "" : "s");
    printf("# backward pass of %g ms asked for, CPU %s, gradients %s%s, compression %s; %d step%s\n",
           options->backward_us / 1e3, options->is_busy ? "busy" : "free",
           options->has_views ? "made in the buffers" : "copied in and out", options->is_on_gpu ? " on a GPU" : "",
           bench_step_compression_name(options->compression), options->common.steps, options->common.steps == 1 ? "" : "s");
    printf("# medians over the steps, times in milliseconds; sent: to other ranks, net: of it to other hosts\n");
    printf("%5s %5s %10s %10s %10s %11s %11s %10s %9s %9s\n", "rank", "host", "step", "backward", "exposed", "sent", "net",
           "cpu", "copy in", "copy out");
}

static void rank_row_print(const struct step_result *result, int rank)
{
    const struct step_report *report = &result->reports[rank];
    char sent[24], network[24];
    printf("%5d %5.0f %10.2f %10.2f %10.2f %11s %11s %10.2f %9.2f %9.2f\n", rank, report->host, report->step_us / 1e3,
           report->backward_us / 1e3, report->exposed_us / 1e3, size_text(report->sent_bytes, sent),
           size_text(report->network_bytes, network), report->cpu_s * 1e3, report->pack_us / 1e3, report->unpack_us / 1e3);
}

/* With hundreds of ranks, shows only the first and the last ones; JSON has all. */
static void rows_print(const struct step_result *result)
{
    enum { ALL = 40, SOME = 16 };
    for (int rank = 0; rank < result->ranks; rank++) {
        if (result->ranks <= ALL || rank < SOME || rank >= result->ranks - SOME)
            rank_row_print(result, rank);
        else if (rank == SOME)
            printf("%5s %5s  (%d ranks between; --format json has all)\n", "...", "", result->ranks - 2 * SOME);
    }
}

static void optimizer_print(const struct step_result *result)
{
    const struct bench_step_options *options = result->options;
    const struct step_report most = optimizer_most(result);
    char size[24];
    if (!options->optimizing.rule)
        return;
    printf("optimizer %s, %s: %.2f ms of a step, and %s of states on a rank\n", step_rules[options->optimizing.rule],
           options->optimizing.is_sharded ? "each rank steps its shard" : "each rank steps everything", most.optimizer_us / 1e3,
           size_text(most.optimizer_bytes, size));
}

static void sums_print(const struct step_result *result)
{
    const struct step_profile *profile = &result->options->profile;
    const struct step_tensor *tensor = &profile->tensors[result->bound.tensor];
    char size[24], buffer[24];
    printf("\nstep      %.2f ms (90 %% of steps up to %.2f), backward pass %.2f, exposed %.2f\n", result->step_us / 1e3,
           result->step_p90_us / 1e3, result->backward_us / 1e3, result->exposed_us / 1e3);
    if (result->ranks == 1) {
        puts("hidden    one rank has nobody to average with");
        return;
    }
    printf("alone     copies and sums take %.2f ms if no backward pass hides them; this one hides %.1f %%\n",
           result->bare_us / 1e3, 100 * hidden(result->exposed_us, result->bare_us));
    printf("hidden    %.1f %% of the %.2f ms that all bytes need on the wire\n",
           100 * hidden(result->exposed_us, result->wire_us), result->wire_us / 1e3);
    printf("bound     %.2f ms for any library: %s is ready after %.0f %% of the backward pass,\n"
           "          and %s must cross the wire from then on\n",
           result->bound.us / 1e3, tensor->name, 100 * tensor->ready, size_text(result->bound.tail_bytes, size));
    printf("buffer    the largest (%s) takes %.2f ms on the wire, as an all-reduce by itself\n",
           size_text(result->buffer_bytes, buffer), result->buffer_us / 1e3);
    optimizer_print(result);
    printf("balance   %.4f: the most bytes that a rank sends or receives%s, over the mean\n", result->balance,
           result->hosts > 1 ? " over the network" : "");
}

void bench_step_result_print(const struct step_result *result)
{
    if (!result->options->common.json)
        header_print(result);
    if (!result->options->common.json)
        rows_print(result);
    for (int rank = 0; result->options->common.json && rank < result->ranks; rank++)
        rank_object_print(result, rank);
    if (result->options->common.json)
        step_object_print(result);
    else
        sums_print(result);
    fflush(stdout);
}
