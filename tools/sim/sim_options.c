/* The options of `shoal sim`. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#include "tool.h"

enum option {
    OPTION_HELP = 1,
    OPTION_HOSTS,
    OPTION_LOCAL,
    OPTION_BYTES,
    OPTION_FACTOR,
    OPTION_TYPE,
    OPTION_OPERANDS,
    OPTION_ALGORITHM,
    OPTION_EVERY_CHUNK,
    OPTION_FORMAT,
    OPTION_EXPLAIN
};

static const struct tool_option options_known[] = {
    {"--hosts", OPTION_HOSTS, "LIST"},
    {"--ranks-per-host", OPTION_LOCAL, "L"},
    {"--bytes", OPTION_BYTES, "LIST"},
    {"--factor", OPTION_FACTOR, "N"},
    {"--type", OPTION_TYPE, "TYPE"},
    {"--dtype", OPTION_TYPE, "TYPE"}, /* alias, as in other tools */
    {"--operands", OPTION_OPERANDS, "plain|shared"},
    {"--algorithm", OPTION_ALGORITHM, "NAME"},
    {"--every-chunk", OPTION_EVERY_CHUNK, NULL},
    {"--every-piece", OPTION_EVERY_CHUNK, NULL}, /* its former name */
    SIM_MODEL_OPTIONS,
    {"--format", OPTION_FORMAT, "table|json|csv"},
    {"--explain-model", OPTION_EXPLAIN, NULL},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

/* ---- Quantities ---------------------------------------------------------------------------------------------------------- */

static const struct tool_unit memory_units[] = {{"mb/s", 1e-3}, {"gb/s", 1}, {"mb", 1e-3}, {"gb", 1}, {NULL, 0}};
static const struct tool_unit time_units[] = {{"", 1}, {"ns", 1e-3}, {"us", 1}, {"ms", 1e3}, {"s", 1e6}, {NULL, 0}};

static bool memory_read(const struct tool_args *args, double *gb_s_out)
{
    return tool_quantity_read(args, memory_units, "bytes per second, such as 5GB/s or 800MB/s", gb_s_out);
}

static bool time_read(const struct tool_args *args, double *us_out)
{
    return tool_quantity_read(args, time_units, "a time such as 30us, 1.5ms or 0.2, which is microseconds", us_out);
}

/* Rate of one GPU's link in each direction, by the link's generation. Sources: docs/figures/predictions.md. */
struct link {
    const char *name;
    double gb_s;
};
static const struct link pcie_links[] = {{"gen3", 12}, {"gen4", 24}, {"gen5", 55}, {NULL, 0}};
static const struct link nvlink_links[] = {{"gen2", 120}, {"gen3", 160}, {"gen4", 320}, {NULL, 0}};

/* Reads the name of a link, or a rate. */
static bool link_read(const struct tool_args *args, const struct link *links, const char *takes, double *gb_s_out)
{
    for (; links->name; links++) {
        if (!strcmp(args->value, links->name)) {
            *gb_s_out = links->gb_s;
            return true;
        }
    }
    return tool_quantity_read(args, memory_units, takes, gb_s_out) && (*gb_s_out > 0 || tool_value_fail(args, takes));
}

static bool pcie_read(const struct tool_args *args, double *gb_s_out)
{
    return link_read(args, pcie_links, "gen3, gen4 or gen5 (of 16 lanes), or bytes per second above 0, such as 24GB/s",
                     gb_s_out);
}

static bool nvlink_read(const struct tool_args *args, double *gb_s_out)
{
    return link_read(args, nvlink_links, "gen2, gen3 or gen4 (V100, A100, H100), or bytes per second above 0, such as 160GB/s",
                     gb_s_out);
}

bool sim_memory_read(const struct tool_args *args, double *gb_s_out)
{
    return memory_read(args, gb_s_out) && (*gb_s_out > 0 || tool_value_fail(args, "bytes per second above 0"));
}

/* 0 means no CPU time at all. */
static bool stack_read(const struct tool_args *args, double *gb_s_out)
{
    *gb_s_out = 0;
    return !strcmp(args->value, "0") || memory_read(args, gb_s_out);
}

/* ---- Lists --------------------------------------------------------------------------------------------------------------- */

typedef bool (*value_read_fn)(const struct tool_args *args, size_t *value_out);

static bool host_count_read(const struct tool_args *args, size_t *hosts_out)
{
    int hosts;
    if (!tool_number_read(args, 1, SHOAL_RANKS_MAX, &hosts))
        return false;
    *hosts_out = (size_t)hosts;
    return true;
}

static bool value_add(const struct tool_args *args, struct sim_values *values, size_t value)
{
    if (values->count == SIM_VALUES_MAX) {
        tool_usage_fail(args->command, "%s takes %d values at most", args->name, SIM_VALUES_MAX);
        return false;
    }
    values->at[values->count++] = value;
    return true;
}

/* Adds values from low to high, each multiplied by the factor. Always includes high, even if the factor steps over it. */
static bool range_add(const struct tool_args *args, struct sim_values *values, const size_t ends[2], int factor)
{
    if (!ends[0] || ends[0] > ends[1]) {
        tool_usage_fail(args->command, "%s goes from a smaller number above 0 to a larger one, not %s", args->name,
                        args->value);
        return false;
    }
    for (size_t value = ends[0]; value < ends[1]; value *= (size_t)factor) {
        if (!value_add(args, values, value))
            return false;
        if (value > ends[1] / (size_t)factor)
            break;
    }
    return value_add(args, values, ends[1]);
}

/* Reads one value, or two with a dash between them. */
static bool item_read(const struct tool_args *args, char *item, value_read_fn read, int factor, struct sim_values *values)
{
    struct tool_args one = *args;
    size_t ends[2];
    char *dash = strchr(item, '-');
    if (dash)
        *dash = 0;
    one.value = item;
    if (!read(&one, &ends[0]))
        return false;
    if (!dash)
        return value_add(args, values, ends[0]);
    one.value = dash + 1;
    return read(&one, &ends[1]) && range_add(args, values, ends, factor);
}

static bool list_read(const struct tool_args *args, value_read_fn read, int factor, struct sim_values *values)
{
    char text[512], *next = text;
    values->count = 0;
    if (strlen(args->value) >= sizeof text)
        return tool_value_fail(args, "a shorter list");
    strcpy(text, args->value);
    while (next) {
        char *const item = strsep(&next, ",");
        if (!item_read(args, item, read, factor, values))
            return false;
    }
    return true;
}

bool sim_hosts_read(const struct tool_args *args, int factor, struct sim_values *values)
{
    return list_read(args, host_count_read, factor, values);
}

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

/* Lists as given, because the factor may come after them. */
struct lists {
    struct tool_args hosts;
    struct tool_args bytes;
    int factor;
};

bool sim_count_read(const struct tool_args *args, int least, size_t *count_out)
{
    int number;
    if (!tool_number_read(args, least, SHOAL_RANKS_MAX, &number))
        return false;
    *count_out = (size_t)number;
    return true;
}

static bool operands_read(const struct tool_args *args, int *shared_out)
{
    *shared_out = !strcmp(args->value, "shared");
    return *shared_out || !strcmp(args->value, "plain") || tool_value_fail(args, "plain or shared");
}

bool sim_format_read(const struct tool_args *args, enum sim_format *format_out)
{
    static const char *const names[] = {"table", "json", "csv"};
    for (int i = SIM_TABLE; i <= SIM_CSV; i++) {
        if (!strcmp(args->value, names[i])) {
            *format_out = (enum sim_format)i;
            return true;
        }
    }
    return tool_value_fail(args, "table, json or csv");
}

static bool gpu_model_apply(int id, const struct tool_args *args, struct shoal_simulation *question)
{
    switch (id) {
    case SIM_OPTION_PCIE:
        return pcie_read(args, &question->pcie_gb_s);
    case SIM_OPTION_SWITCH:
        return pcie_read(args, &question->switch_gb_s);
    case SIM_OPTION_SWITCH_GPUS:
        return sim_count_read(args, 1, &question->switch_gpus);
    case SIM_OPTION_SWITCH_ADAPTERS:
        question->switch_adapters = 1;
        return true;
    case SIM_OPTION_NVLINK:
        return nvlink_read(args, &question->nvlink_gb_s);
    case SIM_OPTION_UNIT:
        return tool_size_read(args, &question->unit_bytes);
    case SIM_OPTION_RING:
        return tool_size_read(args, &question->ring_bytes);
    case SIM_OPTION_COPY:
        return time_read(args, &question->copy_us);
    case SIM_OPTION_HOST_MEMORY:
        return sim_memory_read(args, &question->host_memory_gb_s);
    default:
        return true;
    }
}

bool sim_model_apply(int id, const struct tool_args *args, struct shoal_simulation *question)
{
    switch (id) {
    case SIM_OPTION_RATE:
        return tool_rate_read(args, &question->rate_gbit_s);
    case SIM_OPTION_LATENCY:
        return time_read(args, &question->latency_us);
    case SIM_OPTION_MESSAGE:
        return time_read(args, &question->message_us);
    case SIM_OPTION_STACK:
        return stack_read(args, &question->stack_gb_s);
    case SIM_OPTION_MEMORY:
        return memory_read(args, &question->memory_gb_s);
    case SIM_OPTION_SIGNAL:
        return time_read(args, &question->signal_us);
    case SIM_OPTION_HEADER:
        return tool_size_read(args, &question->header_bytes);
    case SIM_OPTION_FRAME:
        return tool_size_read(args, &question->frame_bytes);
    case SIM_OPTION_BURST:
        return tool_size_read(args, &question->burst_bytes);
    case SIM_OPTION_BURST_RATE:
        return tool_rate_read(args, &question->burst_gbit_s);
    case SIM_OPTION_PAUSE:
        return time_read(args, &question->pause_us);
    case SIM_OPTION_CORES:
        return sim_count_read(args, 1, &question->cores);
    case SIM_OPTION_THREADS:
        return sim_count_read(args, 1, &question->threads);
    case SIM_OPTION_NETWORK_THREADS:
        return sim_count_read(args, 1, &question->network_threads);
    case SIM_OPTION_ONE_MACHINE:
        question->one_machine = 1;
        return true;
    default:
        return gpu_model_apply(id, args, question);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct sim_options *options, struct lists *lists)
{
    switch (id) {
    case OPTION_HOSTS:
        lists->hosts = *args;
        return true;
    case OPTION_BYTES:
        lists->bytes = *args;
        return true;
    case OPTION_FACTOR:
        return tool_number_read(args, 2, SIM_FACTOR_MAX, &lists->factor);
    case OPTION_LOCAL:
        return sim_count_read(args, 1, &options->question.ranks_per_host);
    case OPTION_TYPE:
        return tool_type_read(args, &options->question.type);
    case OPTION_OPERANDS:
        return operands_read(args, &options->question.shared);
    case OPTION_ALGORITHM:
        snprintf(options->algorithm, sizeof options->algorithm, "%s", args->value);
        return true;
    case OPTION_FORMAT:
        return sim_format_read(args, &options->format);
    case OPTION_EVERY_CHUNK:
        options->question.every_chunk = 1;
        return true;
    case OPTION_EXPLAIN:
        return options->explains_model = true;
    case OPTION_HELP:
        return options->help = true;
    default:
        return sim_model_apply(id, args, &options->question);
    }
}

enum { ALGORITHMS_MAX = 32, ALGORITHM_BYTES = 32 };

struct algorithms {
    char names[ALGORITHMS_MAX][ALGORITHM_BYTES];
    const char *list[ALGORITHMS_MAX + 1]; /* ends with NULL */
    int count;
};

/* Finds the algorithms of a collective in the table that `shoal info --algorithms` prints: its rows begin "all-reduce
 * ring". */
static void algorithms_find(const char *collective, struct algorithms *found)
{
    char *text = NULL, row[ALGORITHM_BYTES];
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    const bool is_printed = out && shoal_print_algorithms(out) == SHOAL_OK;
    *found = (struct algorithms){.count = 0};
    if (out)
        fclose(out);
    for (char *line = text; is_printed && line && *line && found->count < ALGORITHMS_MAX; line += *line == '\n') {
        char *name = found->names[found->count];
        if (sscanf(line, "%31s %31s", row, name) == 2 && tool_is_same_word(row, collective))
            found->list[found->count++] = name;
        line += strcspn(line, "\n");
    }
    free(text);
}

/* Checks here, because the library's error would name the setting that the option becomes. */
static bool algorithm_check(const char *algorithm, const char *collective)
{
    struct algorithms known;
    char names[256] = "";
    algorithms_find(collective, &known);
    for (int i = 0; i < known.count; i++) {
        if (!strcmp(algorithm, known.list[i]))
            return true;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", known.list[i]);
    }
    const char *nearest = tool_word_nearest(algorithm, known.list);
    if (!known.count)
        return true; /* without the table, leave the error to the library */
    return !tool_usage_fail("sim", "--algorithm: %s has no '%s'%s%s%s %s", collective, algorithm,
                            nearest ? "; did you mean " : "", nearest ? nearest : "", nearest ? "? It has" : "; it has", names);
}

/* Applies settings that depend on several options. A barrier has no size. */
static bool options_finish(struct sim_options *options, const struct lists *lists)
{
    char override[sizeof options->algorithm];
    if (!options->question.collective && !options->explains_model)
        return !tool_usage_fail("sim", "which collective? Such as: shoal sim allreduce --hosts 4 --bytes 64M");
    if (lists->hosts.value && !sim_hosts_read(&lists->hosts, lists->factor, &options->hosts))
        return false;
    if (lists->bytes.value && !list_read(&lists->bytes, tool_size_read, lists->factor, &options->bytes))
        return false;
    if (options->question.collective && !strcmp(options->question.collective, "barrier"))
        options->bytes = (struct sim_values){{0}, 1};
    if (!*options->algorithm || !options->question.collective)
        return true;
    if (!algorithm_check(options->algorithm, options->question.collective))
        return false;
    const int length =
        snprintf(override, sizeof override, "SHOAL_ALGORITHMS=%s=%.64s", options->question.collective, options->algorithm);
    memcpy(options->algorithm, override, (size_t)length + 1);
    return true;
}

bool sim_options_parse(int argc, char **argv, struct sim_options *options_out)
{
    struct tool_args args = {.command = "sim", .argc = argc, .argv = argv, .at = 1};
    struct lists lists = {.factor = SIM_FACTOR_USUAL};
    *options_out = (struct sim_options){.question = SHOAL_SIMULATION_INIT, .hosts = {{2}, 1}, .bytes = {{1 << 20}, 1}};
    while (args.at < argc && !options_out->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_apply(id, &args, options_out, &lists)))
            return false;
        if (id == TOOL_OPTION_END && args.at < argc &&
            !tool_collective_read("sim", argv[args.at++], &options_out->question.collective))
            return false;
    }
    return options_out->help || options_finish(options_out, &lists);
}
