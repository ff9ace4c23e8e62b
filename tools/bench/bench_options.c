#include "bench.h"

#include <stddef.h>
#include <string.h>

#include "bind.h"
#include "elements.h"
#include "tool.h"

static const char *const memories[] = {"plain", "shared", "gpu", NULL};
static const char *const inputs[] = {"fresh", "warm", NULL};
static const char *const formats[] = {"table", "json", NULL};
static const char *const probes[] = {"none", "memory", NULL};
static const char *const ops[] = {"sum", "avg", "max", "min", "prod", "bitand", "bitor", "bitxor", "scaled-sum", NULL};

/* name, input, output, only root has the input, the output, reduces, trips over the bus, of the others' shares */
static const struct bench_kind kinds[BENCH_COLLECTIVES] = {
    [BENCH_ALLREDUCE] = {"allreduce", BENCH_VECTOR, BENCH_VECTOR, false, false, true, 2, true},
    [BENCH_REDUCE] = {"reduce", BENCH_VECTOR, BENCH_VECTOR, false, true, true, 1, false},
    [BENCH_REDUCESCATTER] = {"reducescatter", BENCH_PARTS, BENCH_VECTOR, false, false, true, 1, true},
    [BENCH_BROADCAST] = {"broadcast", BENCH_VECTOR, BENCH_VECTOR, true, false, false, 1, false},
    [BENCH_ALLGATHER] = {"allgather", BENCH_VECTOR, BENCH_PARTS, false, false, false, 1, true},
    [BENCH_GATHER] = {"gather", BENCH_VECTOR, BENCH_PARTS, false, true, false, 1, true},
    [BENCH_SCATTER] = {"scatter", BENCH_PARTS, BENCH_VECTOR, true, false, false, 1, true},
    [BENCH_ALLTOALL] = {"alltoall", BENCH_PARTS, BENCH_PARTS, false, false, false, 1, true},
    [BENCH_BARRIER] = {"barrier", BENCH_NONE, BENCH_NONE, false, false, false, 1, false},
    [BENCH_PROBE] = {"probe", BENCH_VECTOR, BENCH_NONE, false, false, false, 2, false},
};
#define NAMES "allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier"

enum { NAME_MAX_BYTES = 32, SECONDS_MAX = 86400, LATE_MS_MAX = 10000, FACTOR_MAX = 1 << 20 };
#define SIZE_MOST (SIZE_MAX / 8)

/* Each is an index into rows. */
enum {
    RANKS = 1,
    MIN,
    MAX,
    FACTOR,
    MEMORY,
    IN_PLACE,
    INPUTS,
    ELEMENT,
    OP,
    CHECK,
    FORMAT,
    PROBE,
    WIDE,
    ITERATIONS,
    SECONDS,
    OFFSET,
    GAP,
    LATE,
    TIMEOUT,
    PIN,
    BIND,
    HELP
};

static const struct tool_option options_known[] = {
    {"-n", RANKS, "N"},
    {"--min", MIN, "SIZE"},
    {"--max", MAX, "SIZE"},
    {"--factor", FACTOR, "N"},
    {"--memory", MEMORY, "plain|shared|gpu"},
    {"--in-place", IN_PLACE, NULL},
    {"--inputs", INPUTS, "fresh|warm"},
    {"--type", ELEMENT, "TYPE"},
    {"--dtype", ELEMENT, "TYPE"}, /* alias, as in other tools */
    {"--op", OP, "OPERATOR"},
    {"--check", CHECK, NULL},
    {"--format", FORMAT, "table|json"},
    {"--probe", PROBE, "memory"},
    {"--wide", WIDE, NULL},
    {"--iterations", ITERATIONS, "N"},
    {"--seconds", SECONDS, "S"},
    {"--offset", OFFSET, "SIZE"},
    {"--gap", GAP, "SIZE"},
    {"--late", LATE, "MS"},
    {"--timeout", TIMEOUT, "SECONDS"},
    {"--pin", PIN, NULL},
    {"--bind", BIND, "slice|core|none"},
    {"--help", HELP, NULL},
    {"-h", HELP, NULL},
    {NULL, 0, NULL},
};

/* The offset of an option's value, and its valid range. */
struct row {
    enum { FLAG, SIZE, NUMBER, WORD, TYPE } kind;
    size_t offset;
    const char *const *words;
    int least, most;
};

#define TO(field) offsetof(struct bench_options, field)
static const struct row rows[] = {
    [RANKS] = {NUMBER, TO(ranks), NULL, 1, BENCH_RANKS_MAX},
    [MIN] = {SIZE, TO(bytes_min), NULL, 0, 0},
    [MAX] = {SIZE, TO(bytes_max), NULL, 0, 0},
    [FACTOR] = {NUMBER, TO(factor), NULL, 2, FACTOR_MAX},
    [MEMORY] = {WORD, TO(memory), memories, 0, 0},
    [IN_PLACE] = {FLAG, TO(in_place), NULL, 0, 0},
    [INPUTS] = {WORD, TO(warm), inputs, 0, 0},
    [ELEMENT] = {TYPE, TO(type), NULL, 0, 0},
    [OP] = {WORD, TO(op), ops, 0, 0},
    [CHECK] = {FLAG, TO(check), NULL, 0, 0},
    [FORMAT] = {WORD, TO(json), formats, 0, 0},
    [PROBE] = {WORD, TO(probe), probes, 0, 0},
    [WIDE] = {FLAG, TO(wide), NULL, 0, 0},
    [ITERATIONS] = {NUMBER, TO(iterations), NULL, 1, BENCH_ITERATIONS_MAX},
    [SECONDS] = {NUMBER, TO(seconds), NULL, 1, SECONDS_MAX},
    [OFFSET] = {SIZE, TO(offset_bytes), NULL, 0, 0},
    [GAP] = {SIZE, TO(gap_bytes), NULL, 0, 0},
    [LATE] = {NUMBER, TO(late_ms), NULL, 1, LATE_MS_MAX},
    [TIMEOUT] = {NUMBER, TO(timeout_s), NULL, 1, SECONDS_MAX},
    [PIN] = {FLAG, TO(pin), NULL, 0, 0},
    [BIND] = {WORD, TO(bind), bind_words, 0, 0},
    [HELP] = {FLAG, TO(help), NULL, 0, 0},
};

const char *bench_memory_name(int memory)
{
    return memories[memory];
}

const char *bench_op_name(int op)
{
    return ops[op];
}

const struct bench_kind *bench_kind(enum bench_collective collective)
{
    return &kinds[collective];
}

static bool option_read(const struct tool_args *args, const struct row *row, struct bench_options *options)
{
    void *field = (char *)options + row->offset;
    switch (row->kind) {
    case FLAG:
        return *(bool *)field = true;
    case SIZE:
        return tool_size_read(args, field);
    case NUMBER:
        return tool_number_read(args, row->least, row->most, field);
    case WORD:
        return tool_word_read(args, row->words, field);
    case TYPE:
        return tool_type_read(args, field);
    }
    return false;
}

/* The name without its dashes: reduce-scatter becomes reducescatter, all-to-all becomes alltoall. */
static void dashes_drop(const char *text, char name_out[NAME_MAX_BYTES])
{
    size_t length = 0;
    for (; *text && length + 1 < NAME_MAX_BYTES; text++)
        if (*text != '-')
            name_out[length++] = *text;
    name_out[length] = 0;
}

static bool collective_read(const char *text, struct bench_options *options)
{
    const char *names[BENCH_PROBE + 1] = {NULL};
    char name[NAME_MAX_BYTES];
    if (options->collective >= 0)
        return !tool_usage_fail("bench", "one collective at a time: '%s' is one too many", text);
    for (int i = 0; i < BENCH_PROBE; i++)
        names[i] = kinds[i].name;
    dashes_drop(text, name);
    if (tool_word_find(names, name, &options->collective))
        return true;
    const char *nearest = tool_word_nearest(name, names);
    if (nearest)
        return !tool_usage_fail("bench", "there is no collective '%s'; did you mean %s?", text, nearest);
    return !tool_usage_fail("bench", "it measures " NAMES ", not '%s'", text);
}

static bool is_integer(enum shoal_type type)
{
    return type == SHOAL_INT64 || type == SHOAL_INT32 || type == SHOAL_INT8 || type == SHOAL_UINT8;
}

static bool operator_agrees(const struct bench_options *options)
{
    const struct bench_kind *kind = &kinds[options->collective];
    if (options->op != SHOAL_SUM && !kind->reduces)
        return !tool_usage_fail("bench", "--op %s makes no sense: %s reduces nothing", ops[options->op], kind->name);
    if (element_is_bitwise((enum shoal_op)options->op) && !is_integer(options->type))
        return !tool_usage_fail("bench", "--op %s takes integers, not %s", ops[options->op], tool_type_name(options->type));
    return true;
}

/* Checks that involve several options. */
static bool options_agree(const struct bench_options *options)
{
    const size_t element = shoal_type_bytes(options->type);
    const char *type = tool_type_name(options->type);
    if (options->collective < 0)
        return !tool_usage_fail("bench", "say what to measure: " NAMES);
    if (options->bytes_min < element)
        return !tool_usage_fail("bench", "--min %zu is less than one %s", options->bytes_min, type);
    if (options->bytes_max < options->bytes_min)
        return !tool_usage_fail("bench", "--max %zu is less than --min %zu", options->bytes_max, options->bytes_min);
    if (options->bytes_max > SIZE_MOST || options->gap_bytes > SIZE_MOST || options->offset_bytes > SIZE_MOST)
        return !tool_usage_fail("bench", "no memory has more than %zu bytes", SIZE_MOST);
    if (options->offset_bytes % element)
        return !tool_usage_fail("bench", "--offset must be a multiple of %zu bytes, one %s", element, type);
    if (options->gap_bytes && options->in_place)
        return !tool_usage_fail("bench", "--gap is between input and output, so it cannot be used with --in-place");
    if (options->gap_bytes && (options->gap_bytes < options->bytes_max || options->gap_bytes % element))
        return !tool_usage_fail("bench", "--gap must hold --max %zu bytes, in whole elements", options->bytes_max);
    if (options->check && options->warm)
        return !tool_usage_fail("bench", "--check needs --inputs fresh, so that a stale result is seen");
    return operator_agrees(options);
}

/* Options and the collective may come in any order. */
static bool arguments_read(struct tool_args *args, struct bench_options *options)
{
    while (args->at < args->argc && !options->help) {
        const int id = tool_option_next(args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_read(args, &rows[id], options)))
            return false;
        if (id == TOOL_OPTION_END && args->at < args->argc && !collective_read(args->argv[args->at++], options))
            return false;
    }
    return true;
}

bool bench_options_parse(int argc, char **argv, struct bench_options *options_out)
{
    struct tool_args args = {.command = "bench", .argc = argc, .argv = argv, .at = 1};
    struct bench_options options = {
        .collective = -1, .bytes_min = 8, .bytes_max = 256u << 20, .factor = 8, .seconds = 4, .timeout_s = 60};
    if (!arguments_read(&args, &options) || (!options.help && !options_agree(&options)))
        return false;
    *options_out = options;
    return true;
}
