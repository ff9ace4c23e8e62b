#include "bench.h"

#include "tool.h"

double bench_algbw_gb_s(const struct bench_result *result)
{
    return result->median_us > 0 ? (double)result->bytes / result->median_us * 1e-3 : 0;
}

double bench_busbw_gb_s(const struct bench_result *result)
{
    const struct bench_kind *kind = bench_kind(result->collective);
    const double share = kind->bus_others ? (double)(result->ranks - 1) / result->ranks : 1;
    return bench_algbw_gb_s(result) * kind->bus_trips * share;
}

char *bench_size_print(size_t bytes, char text_out[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 3; unit++)
        value /= 1024;
    const bool whole = bytes % (UINT64_C(1) << 10 * unit) == 0;
    snprintf(text_out, 24, whole ? "%.0f %s" : "%.2f %s", value, units[unit]);
    return text_out;
}

/* The limits fit the machines on which the project is measured. If both ranks share a core, each exchange costs a context
 * switch. */
static const char *state_text(double exchange_ns)
{
    if (exchange_ns < 100)
        return "near: ranks 0 and 1 run on cores that share a cache";
    return exchange_ns < 1000 ? "far: ranks 0 and 1 run on cores that share no cache"
                              : "crowded: ranks 0 and 1 share one core, or others use it too";
}

void bench_header_print(const struct bench_options *options, int ranks, int hosts, double exchange_ns)
{
    const struct bench_kind *kind = bench_kind((enum bench_collective)options->collective);
    if (options->json)
        return;
    printf("# shoal %s, %s, %d rank%s on %d host%s", shoal_version(), kind->name, ranks, ranks == 1 ? "" : "s", hosts,
           hosts == 1 ? "" : "s");
    if (kind->output != BENCH_NONE)
        printf(", %s%s%s, %s memory, %s, inputs %s", tool_type_name(options->type), kind->reduces ? " " : "",
               kind->reduces ? bench_op_name(options->op) : "", bench_memory_name(options->memory),
               options->in_place ? "in place" : "out of place", options->warm ? "warm" : "rewritten before each operation");
    if (exchange_ns >= 0)
        printf("\n# exchange at the start %.0f ns (%s)", exchange_ns, state_text(exchange_ns));
    else
        printf("\n# exchange not measured (it needs two ranks that this command itself started)");
    if (options->late_ms)
        printf("\n# rank %d comes %d ms late; times count from its arrival to the last rank's end", ranks - 1,
               options->late_ms);
    printf("\n# times are the slowest rank's, per operation; loop: without barriers between; cpu: all ranks together; GB = "
           "10^9\n");
    printf("%10s %12s %12s %8s %8s %11s %12s %12s %6s %8s", "size", "median us", "p99 us", "algbw", "busbw", "exchange ns",
           "loop us", "cpu us", "runs", "errors");
    if (options->probe)
        printf(" %12s %9s", "probe us", "of probe");
    printf("  algorithm\n");
    fflush(stdout);
}

static void row_print(const struct bench_result *result, const struct bench_result *probe)
{
    char size[24], exchange[24] = "-";
    if (result->exchange_ns >= 0)
        snprintf(exchange, sizeof exchange, "%.0f", result->exchange_ns);
    printf("%10s %12.2f %12.2f %8.2f %8.2f %11s ", bench_size_print(result->bytes, size), result->median_us, result->p99_us,
           bench_algbw_gb_s(result), bench_busbw_gb_s(result), exchange);
    printf("%12.2f %12.2f %6zu %8llu", result->loop_us, result->cpu_us, result->iterations, (unsigned long long)result->errors);
    if (probe)
        printf(" %12.2f %8.2fx", probe->median_us, result->median_us / probe->median_us);
    printf("  %s\n", result->algorithm);
}

static void object_print(const struct bench_options *options, const struct bench_result *result)
{
    char exchange[24] = "null", op[24] = "null";
    if (result->exchange_ns >= 0)
        snprintf(exchange, sizeof exchange, "%.1f", result->exchange_ns);
    if (bench_kind(result->collective)->reduces)
        snprintf(op, sizeof op, "\"%s\"", bench_op_name(options->op));
    printf("{\"collective\":\"%s\",\"ranks\":%d,\"hosts\":%d,\"bytes\":%zu,\"dtype\":\"%s\",\"memory\":\"%s\",\"in_place\":%s,"
           "\"inputs\":\"%s\",\"algorithm\":\"%s\",\"iterations\":%zu,\"median_us\":%.3f,\"p99_us\":%.3f,\"algbw_gb_s\":%.4f,"
           "\"busbw_gb_s\":%.4f,\"exchange_ns\":%s,\"cpu_us\":%.3f,\"errors\":%llu,\"op\":%s,\"loop_us\":%.3f}\n",
           bench_kind(result->collective)->name, result->ranks, result->hosts, result->bytes, tool_type_name(options->type),
           bench_memory_name(options->memory), options->in_place || result->collective == BENCH_PROBE ? "true" : "false",
           options->warm ? "warm" : "fresh", result->algorithm, result->iterations, result->median_us, result->p99_us,
           bench_algbw_gb_s(result), bench_busbw_gb_s(result), exchange, result->cpu_us, (unsigned long long)result->errors, op,
           result->loop_us);
}

void bench_result_print(const struct bench_options *options, const struct bench_result *result,
                        const struct bench_result *probe)
{
    if (!options->json) {
        row_print(result, probe);
    } else {
        if (probe)
            object_print(options, probe);
        object_print(options, result);
    }
    fflush(stdout);
}
