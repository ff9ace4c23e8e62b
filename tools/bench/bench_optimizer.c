/* `shoal bench optimizer`: how fast one core steps parameters, compared with memory. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <shoal/gradients.h>

#include "bench.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal bench optimizer [options]\n"
    "\n"
    "Measures on one core how fast each optimizer of the gradient engine steps parameters (shoal_optimizer_update), compared\n"
    "with a bare loop that reads and writes the same arrays, and with memcpy. The arrays fit in no cache.\n"
    "\n"
    "    --size SIZE              bytes of the parameters in float32 (64M)\n"
    "    --type TYPE              float32, bfloat16 or float16, which have a float32 master (float32)\n"
    "    --rounds N               measured, after one that is not; the fastest counts (7)\n"
    "    --format table|json      json: an object for each optimizer (table)\n"
    "\n"
    "Figures:\n"
    "    time       of one pass over all parameters\n"
    "    GB/s       bytes that the pass reads and writes, in a second\n"
    "    of bare    its share of what the bare loop reaches: 1 is the speed of memory\n"
    "\n"
    "Examples:\n"
    "    shoal bench optimizer\n"
    "    shoal bench optimizer --type bfloat16\n"
    "\n"
    "Exit codes: 0 success, 1 no memory, 2 the arguments make no sense.\n";

static const struct {
    const char *name;
    enum shoal_optimizer_rule rule;
    double beta1;
    int states;
} rules[] = {{"sgd", SHOAL_SGD, 0, 0},       {"momentum", SHOAL_SGD, 0.9, 1},    {"adam", SHOAL_ADAM, 0.9, 2},
             {"adamw", SHOAL_ADAMW, 0.9, 2}, {"adagrad", SHOAL_ADAGRAD, 0.9, 1}, {"lion", SHOAL_LION, 0.9, 1}};
enum { RULES = sizeof rules / sizeof *rules, STATES_MAX = 2 };

static const char *const types[] = {"float32", "bfloat16", "float16", NULL};
static const enum shoal_type type_of[] = {SHOAL_FLOAT32, SHOAL_BFLOAT16, SHOAL_FLOAT16};
static const char *const formats[] = {"table", "json", NULL};

enum option { OPTION_HELP = 1, OPTION_SIZE, OPTION_TYPE, OPTION_ROUNDS, OPTION_FORMAT };

static const struct tool_option options_known[] = {
    {"--size", OPTION_SIZE, "SIZE"},
    {"--type", OPTION_TYPE, "float32|bfloat16|float16"},
    {"--rounds", OPTION_ROUNDS, "N"},
    {"--format", OPTION_FORMAT, "table|json"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

enum { ROUNDS_USUAL = 7, ROUNDS_MAX = 1000 };
#define BYTES_USUAL ((size_t)64 << 20)
#define BYTES_MIN ((size_t)4096)

struct optimizer_bench {
    bool help;
    size_t bytes;
    int type, rounds, json;
    size_t count;
    void *gradient, *parameter; /* of the type; the parameter is the master if that is float32 */
    float *master, *states[STATES_MAX];
};

static bool option_apply(int id, const struct tool_args *args, struct optimizer_bench *bench)
{
    switch (id) {
    case OPTION_SIZE:
        return tool_size_read(args, &bench->bytes) && (bench->bytes >= BYTES_MIN || tool_value_fail(args, "at least 4K"));
    case OPTION_TYPE:
        return tool_word_read(args, types, &bench->type);
    case OPTION_ROUNDS:
        return tool_number_read(args, 1, ROUNDS_MAX, &bench->rounds);
    case OPTION_FORMAT:
        return tool_word_read(args, formats, &bench->json);
    default:
        return bench->help = true;
    }
}

static bool options_parse(int argc, char **argv, struct optimizer_bench *bench)
{
    struct tool_args args = {.command = "bench optimizer", .argc = argc, .argv = argv, .at = 1};
    while (args.at < argc && !bench->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD)
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("bench optimizer", "'%s' is not an option", argv[args.at]);
        if (id > 0 && !option_apply(id, &args, bench))
            return false;
    }
    return true;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static size_t type_bytes(const struct optimizer_bench *bench)
{
    return bench->type ? sizeof(uint16_t) : sizeof(float);
}

static void *array_map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memset(memory, 0, bytes);
}

static bool memory_map(struct optimizer_bench *bench)
{
    bench->count = bench->bytes / sizeof(float);
    bench->gradient = array_map(bench->count * type_bytes(bench));
    bench->parameter = array_map(bench->count * type_bytes(bench));
    bench->master = bench->type ? array_map(bench->bytes) : bench->parameter;
    for (int s = 0; s < STATES_MAX; s++)
        bench->states[s] = array_map(bench->bytes);
    return bench->gradient && bench->parameter && bench->master && bench->states[0] && bench->states[1];
}

/* ---- Measuring ----------------------------------------------------------------------------------------------------------- */

/* Returns the bytes that a pass reads and writes: gradient, master and states, and the parameter if it is not the master. */
static double bytes_moved(const struct optimizer_bench *bench, int states)
{
    const double values = (double)bench->count;
    return values * (double)(type_bytes(bench) * (bench->type ? 2 : 1)) + values * (double)sizeof(float) * 2 * (1 + states);
}

static void rule_pass(const struct optimizer_bench *bench, int rule)
{
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    struct shoal_optimizer_range range = SHOAL_OPTIMIZER_RANGE_INIT;
    group.beta1 = rules[rule].beta1;
    group.decay = 0.01;
    range.type = type_of[bench->type];
    range.count = bench->count;
    range.gradient = bench->gradient;
    range.parameter = bench->parameter;
    range.master = bench->type ? bench->master : NULL;
    range.first = bench->states[0];
    range.second = bench->states[1];
    if (shoal_optimizer_update(rules[rule].rule, &group, 2, 1, &range) != SHOAL_OK)
        abort(); /* the settings above are possible */
}

/* Loops that only read and write. The arrays are arguments, so that compilers know that they do not overlap. */
#define DEFINE_BARE(NAME, TYPE)                                                                                              \
    static void NAME(const TYPE *restrict gradient, TYPE *restrict parameter, float *restrict master, float *restrict first, \
                     float *restrict second, size_t count, int states)                                                       \
    {                                                                                                                        \
        for (size_t i = 0; i < count; i++) {                                                                                 \
            const float g = (float)gradient[i];                                                                              \
            master[i] += g;                                                                                                  \
            if (states > 0)                                                                                                  \
                first[i] += g;                                                                                               \
            if (states > 1)                                                                                                  \
                second[i] += g;                                                                                              \
            if (parameter)                                                                                                   \
                parameter[i] = (TYPE)(int)master[i];                                                                         \
        }                                                                                                                    \
    }

DEFINE_BARE(bare_float32, float)
DEFINE_BARE(bare_half, uint16_t)

static void bare_pass(const struct optimizer_bench *bench, int rule)
{
    const int states = rules[rule].states;
    float *first = bench->states[0], *second = bench->states[1];
    if (bench->type)
        bare_half(bench->gradient, bench->parameter, bench->master, first, second, bench->count, states);
    else
        bare_float32(bench->gradient, NULL, bench->master, first, second, bench->count, states);
}

static void copy_pass(const struct optimizer_bench *bench, int rule)
{
    (void)rule;
    memcpy(bench->states[0], bench->states[1], bench->bytes);
}

/* Returns the shortest time of a pass, in seconds. */
static double fastest(const struct optimizer_bench *bench, int rule, void (*pass)(const struct optimizer_bench *, int))
{
    double best = 0;
    for (int round = -1; round < bench->rounds; round++) {
        const double begin = bench_now();
        pass(bench, rule);
        const double took = bench_now() - begin;
        if (round == 0 || (round > 0 && took < best))
            best = took;
    }
    return best;
}

static void rule_print(const struct optimizer_bench *bench, int rule)
{
    const double took = fastest(bench, rule, rule_pass), bare = fastest(bench, rule, bare_pass);
    const double bytes = bytes_moved(bench, rules[rule].states);
    printf(bench->json
               ? "{\"optimizer\":\"%s\",\"type\":\"%s\",\"us\":%.1f,\"gb_s\":%.3f,\"bare_gb_s\":%.3f,\"of_bare\":%.4f}\n"
               : "%-10s %-9s %10.1f %10.2f %10.2f %9.2f\n",
           rules[rule].name, types[bench->type], took * 1e6, bytes / took * 1e-9, bytes / bare * 1e-9, bare / took);
    fflush(stdout);
}

static void all_print(const struct optimizer_bench *bench)
{
    char size[24];
    const double copy = 2 * (double)bench->bytes / fastest(bench, 0, copy_pass) * 1e-9;
    if (!bench->json) {
        printf("# shoal %s: one core steps %s of parameters; memcpy %.2f GB/s\n", shoal_version(),
               bench_size_print(bench->count * type_bytes(bench), size), copy);
        printf("%-10s %-9s %10s %10s %10s %9s\n", "optimizer", "type", "time us", "GB/s", "bare GB/s", "of bare");
    }
    for (int rule = 0; rule < RULES; rule++)
        rule_print(bench, rule);
    if (bench->json)
        printf("{\"optimizer\":\"memcpy\",\"type\":\"float32\",\"gb_s\":%.3f}\n", copy);
}

int bench_optimizer_run(int argc, char **argv)
{
    struct optimizer_bench bench = {.bytes = BYTES_USUAL, .rounds = ROUNDS_USUAL};
    if (!options_parse(argc, argv, &bench))
        return TOOL_EXIT_USAGE;
    if (bench.help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    if (!memory_map(&bench)) {
        fprintf(stderr, "shoal bench: no memory for arrays of %zu bytes each: pass a smaller --size\n", bench.bytes);
        return 1;
    }
    all_print(&bench);
    return tool_output_finish("bench", 0);
}
