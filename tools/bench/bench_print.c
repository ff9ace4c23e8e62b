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

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

/* A row fits 100 columns, the algorithm's name included, unless --wide asks for all columns. */
enum { SIZE, MEDIAN, P99, ALGBW, BUSBW, EXCHANGE, LOOP, CPU, RUNS, ERRORS, PROBE, OF_PROBE, COLUMNS };
static const struct column {
    const char *head;
    int width;
    enum { ALWAYS, WITH_WIDE, WITHOUT_PROBE, WITH_PROBE } shown;
} columns[COLUMNS] = {
    [SIZE] = {"size", 10, ALWAYS},       [MEDIAN] = {"median us", 11, ALWAYS},   [P99] = {"p99 us", 11, ALWAYS},
    [ALGBW] = {"algbw", 8, ALWAYS},      [BUSBW] = {"busbw", 8, WITHOUT_PROBE},  [EXCHANGE] = {"exchange ns", 12, WITH_WIDE},
    [LOOP] = {"loop us", 11, WITH_WIDE}, [CPU] = {"cpu us", 11, WITHOUT_PROBE},  [RUNS] = {"runs", 6, WITH_WIDE},
    [ERRORS] = {"errors", 7, ALWAYS},    [PROBE] = {"probe us", 11, WITH_PROBE}, [OF_PROBE] = {"of probe", 9, WITH_PROBE},
};

static bool is_shown(const struct bench_options *options, int column)
{
    switch (columns[column].shown) {
    case WITH_WIDE:
        return options->wide;
    case WITHOUT_PROBE:
        return options->wide || !options->probe;
    case WITH_PROBE:
        return options->probe;
    case ALWAYS:
        break;
    }
    return true;
}

/* Prints a text for each column that is shown. */
static void columns_print(const struct bench_options *options, const char *const texts[COLUMNS], const char *algorithm)
{
    for (int i = 0; i < COLUMNS; i++)
        if (is_shown(options, i))
            printf("%*s ", columns[i].width, texts[i]);
    printf(" %s\n", algorithm);
}

static void heads_print(const struct bench_options *options)
{
    const char *heads[COLUMNS];
    for (int i = 0; i < COLUMNS; i++)
        heads[i] = columns[i].head;
    columns_print(options, heads, "algorithm");
}

void bench_header_print(const struct bench_options *options, int ranks, int hosts, double exchange_ns)
{
    const struct bench_kind *kind = bench_kind((enum bench_collective)options->collective);
    if (options->json)
        return;
    printf("# shoal %s, %s, %d rank%s on %d host%s\n", shoal_version(), kind->name, ranks, ranks == 1 ? "" : "s", hosts,
           hosts == 1 ? "" : "s");
    if (kind->output != BENCH_NONE)
        printf("# %s%s%s, %s memory, %s, inputs %s\n", tool_type_name(options->type), kind->reduces ? " " : "",
               kind->reduces ? bench_op_name(options->op) : "", bench_memory_name(options->memory),
               options->in_place ? "in place" : "out of place", options->warm ? "warm" : "rewritten before each operation");
    if (exchange_ns >= 0)
        printf("# exchange at the start %.0f ns (%s)\n", exchange_ns, state_text(exchange_ns));
    else
        puts("# exchange not measured (it needs two ranks that this command itself started)");
    if (options->late_ms)
        printf("# rank %d comes %d ms late; times count from its arrival to the last rank's end\n", ranks - 1,
               options->late_ms);
    printf("# times are the slowest rank's, per operation; %sGB = 10^9\n",
           options->wide || !options->probe ? "cpu: all ranks together; " : "");
    if (options->wide)
        puts("# loop: operations in a row, without barriers between");
    heads_print(options);
    fflush(stdout);
}

static void row_print(const struct bench_options *options, const struct bench_result *result, const struct bench_result *probe)
{
    enum { TEXT_BYTES = 32 };
    char texts[COLUMNS][TEXT_BYTES] = {{0}};
    const char *pointers[COLUMNS];
    for (int i = 0; i < COLUMNS; i++)
        pointers[i] = texts[i];
    bench_size_print(result->bytes, texts[SIZE]);
    snprintf(texts[MEDIAN], TEXT_BYTES, "%.2f", result->median_us);
    snprintf(texts[P99], TEXT_BYTES, "%.2f", result->p99_us);
    snprintf(texts[ALGBW], TEXT_BYTES, "%.2f", bench_algbw_gb_s(result));
    snprintf(texts[BUSBW], TEXT_BYTES, "%.2f", bench_busbw_gb_s(result));
    snprintf(texts[EXCHANGE], TEXT_BYTES, result->exchange_ns >= 0 ? "%.0f" : "-", result->exchange_ns);
    snprintf(texts[LOOP], TEXT_BYTES, "%.2f", result->loop_us);
    snprintf(texts[CPU], TEXT_BYTES, "%.2f", result->cpu_us);
    snprintf(texts[RUNS], TEXT_BYTES, "%zu", result->iterations);
    snprintf(texts[ERRORS], TEXT_BYTES, "%llu", (unsigned long long)result->errors);
    if (probe) {
        snprintf(texts[PROBE], TEXT_BYTES, "%.2f", probe->median_us);
        snprintf(texts[OF_PROBE], TEXT_BYTES, "%.2fx", result->median_us / probe->median_us);
    }
    columns_print(options, pointers, result->algorithm);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

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
        row_print(options, result, probe);
    } else {
        if (probe)
            object_print(options, probe);
        object_print(options, result);
    }
    fflush(stdout);
}
