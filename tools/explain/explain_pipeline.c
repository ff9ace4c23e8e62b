/* `shoal explain pipeline`: how a model would be cut into stages, why, and how long its step would take. */
#include "explain_pipeline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

static const char command[] = "explain pipeline";

enum option {
    OPTION_HELP = 1,
    OPTION_PROFILE,
    OPTION_RANKS,
    OPTION_MICROBATCHES,
    OPTION_SCHEDULE,
    OPTION_STAGES,
    OPTION_ACTIVATIONS,
    OPTION_MEMORY,
    OPTION_SPEEDS,
    OPTION_BATCH,
    OPTION_FLOPS,
    OPTION_RATE,
    OPTION_LATENCY,
    OPTION_OPTIMIZER,
    OPTION_SHARDS,
    OPTION_PARAMETER_SHARDS,
    OPTION_RECOMPUTE,
    OPTION_REPLICATE,
    OPTION_TIES,
    OPTION_METHOD,
    OPTION_CUTS,
    OPTION_WEIGHT,
    OPTION_KEPT,
    OPTION_PRINT,
    OPTION_CSV,
    OPTION_PLOT,
    OPTION_TRACE,
    OPTION_FORMAT
};

static const struct tool_option options[] = {
    {"--profile", OPTION_PROFILE, "NAME|FILE"},
    {"--ranks", OPTION_RANKS, "N"},
    {"-n", OPTION_RANKS, "N"},
    {"--microbatches", OPTION_MICROBATCHES, "M"},
    {"--schedule", OPTION_SCHEDULE, "KIND"},
    {"--stages-per-rank", OPTION_STAGES, "V"},
    {"--activations", OPTION_ACTIVATIONS, "A"},
    {"--memory", OPTION_MEMORY, "SIZES"},
    {"--speeds", OPTION_SPEEDS, "LIST"},
    {"--batch", OPTION_BATCH, "SAMPLES"},
    {"--flops", OPTION_FLOPS, "RATE"},
    {"--rate", OPTION_RATE, "RATE"},
    {"--latency", OPTION_LATENCY, "TIME"},
    {"--optimizer", OPTION_OPTIMIZER, "adam|momentum|sgd"},
    {"--shards", OPTION_SHARDS, "S"},
    {"--parameter-shards", OPTION_PARAMETER_SHARDS, "S"},
    {"--recompute", OPTION_RECOMPUTE, "all|auto|none"},
    {"--replicate", OPTION_REPLICATE, NULL},
    {"--keep-ties-together", OPTION_TIES, NULL},
    {"--method", OPTION_METHOD, "shortest|tree|equal"},
    {"--cuts", OPTION_CUTS, "NAMES"},
    {"--memory-weight", OPTION_WEIGHT, "SHARE"},
    {"--kept-share", OPTION_KEPT, "SHARE"},
    {"--print-profile", OPTION_PRINT, NULL},
    {"--csv", OPTION_CSV, "FILE"},
    {"--plot", OPTION_PLOT, "FILE"},
    {"--trace", OPTION_TRACE, "FILE"},
    {"--format", OPTION_FORMAT, "text|json"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage: shoal explain pipeline [options]\n"
    "\n"
    "Cuts a model into stages, one or more for each rank, so that the predicted training step is as short as possible and\n"
    "fits into memory. Shows the stages, why each begins where it does, the memory of each rank, and a bound: the time that\n"
    "no other partition can be below.\n"
    "\n"
    "A model is a list of units, such as layers, which run one after the other. A batch is divided into microbatches, which\n"
    "go through the stages one behind the other. The schedule says which rank computes what in which order; how many\n"
    "microbatches a rank keeps at a time follows from it, and so does the memory.\n"
    "\n"
    "    --profile NAME|FILE      gpt2 (the default), bert-large, resnet50, or a file of JSON (see --print-profile)\n"
    "    --ranks N, -n N          number of ranks (default 4)\n"
    "    --microbatches M         microbatches of a step (default: 4 for each rank)\n"
    "    --schedule KIND          gpipe, 1f1b (the default), interleaved, breadth-first, zb-h1, zb-h2, v-min, v-half, v-zb,\n"
    "                             or auto: the one with the shortest step that fits\n"
    "    --stages-per-rank V      for interleaved and breadth-first (default 2)\n"
    "    --activations A          most microbatches that a rank may keep (default: what the schedule keeps by itself)\n"
    "    --memory SIZES           memory of each rank, such as 16G, or a list with one size for each: 16G,16G,8G,8G\n"
    "    --speeds LIST            how fast each rank is: 1,1,2,2 if two are twice as fast\n"
    "    --rate RATE              network between two ranks, each way (default 25gbit)\n"
    "    --latency TIME           of a transfer (default 30us)\n"
    "    --optimizer NAME         adam (the default: states of twice the parameters' size), momentum (once), sgd (none)\n"
    "    --shards S               replicas that share gradients and states (default 1)\n"
    "    --parameter-shards S     replicas that share parameters (default 1)\n"
    "    --recompute all|auto|none  all: keep only the input of each stage, and repeat its forward pass before its backward\n"
    "                             pass; auto: only stages for which the memory is short; none (the default)\n"
    "    --replicate              a stage may be on several of the ranks, each with a share of every microbatch. Their number\n"
    "                             is chosen with the stages\n"
    "    --keep-ties-together     units that share parameters must be on one rank (default: their gradients are summed)\n"
    "    --kept-share SHARE       share of the activations that weight gradients need, 0 to 1 (default 1)\n"
    "    --method METHOD          shortest (the default), tree (by the tree of modules), or equal (numbers of units)\n"
    "    --cuts NAMES             your own partition: the first unit of each stage but the first, such as h.4,h.8,head;\n"
    "                             \"end\" leaves the last stages empty. It is timed even if it does not fit\n"
    "    --memory-weight SHARE    for tree: memory against time, 0 to 1 (default 0.8)\n"
    "    --csv FILE               also write the schedule in torch's form\n"
    "    --plot FILE              also draw the step, as SVG\n"
    "    --trace FILE             also write it for chrome://tracing and Perfetto\n"
    "    --format text|json       text for people (the default), or one JSON object; times are in microseconds there\n"
    "\n"
    "For the built-in models, which are computed from the shapes of their layers:\n"
    "    --batch SAMPLES          samples of a microbatch (default 1)\n"
    "    --flops RATE             what a rank computes, such as 50tflop/s (the default); only products are counted\n"
    "    --print-profile          print the profile as JSON and end: the form of a FILE\n"
    "\n"
    "Examples:\n"
    "    shoal explain pipeline --profile gpt2 --ranks 4\n"
    "    shoal explain pipeline --profile bert-large -n 8 --schedule auto --memory 4G --batch 4\n"
    "    shoal explain pipeline --profile gpt2 -n 4 --memory 1900M --recompute auto\n"
    "    shoal explain pipeline --profile resnet50 -n 8 --batch 32 --replicate\n"
    "    shoal explain pipeline --profile resnet50 -n 4 --speeds 1,1,2,2 --batch 32\n"
    "    shoal explain pipeline --profile gpt2 --print-profile > my.json\n"
    "\n"
    "Exit codes: 0 success, 2 invalid arguments, or nothing fits into the memory.\n";

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

static bool kind_read(const struct tool_args *args, enum shoal_schedule_kind *kind_out)
{
    const char *words[SHOAL_SCHEDULE_AUTO + 2] = {NULL};
    for (int kind = 0; kind <= SHOAL_SCHEDULE_AUTO; kind++) {
        words[kind] = shoal_schedule_name((enum shoal_schedule_kind)kind);
        if (!strcmp(words[kind], args->value)) {
            *kind_out = (enum shoal_schedule_kind)kind;
            return true;
        }
    }
    const char *nearest = tool_word_nearest(args->value, words);
    if (nearest)
        tool_usage_fail(command, "there is no schedule '%s'; did you mean %s?", args->value, nearest);
    else
        tool_usage_fail(command, "there is no schedule '%s'", args->value);
    return false;
}

static bool method_read(const struct tool_args *args, enum shoal_partition_method *method_out)
{
    static const char *const words[] = {"shortest", "tree", "equal", NULL};
    int index;
    if (!tool_word_read(args, words, &index))
        return false;
    *method_out = (enum shoal_partition_method)index;
    return true;
}

static bool optimizer_read(const struct tool_args *args, double *ratio_out)
{
    static const char *const words[] = {"sgd", "momentum", "adam", NULL};
    int index;
    if (!tool_word_read(args, words, &index))
        return false;
    *ratio_out = index; /* states of the parameters' type */
    return true;
}

static bool recompute_read(const struct tool_args *args, int *recomputes_out)
{
    static const char *const words[] = {
        [SHOAL_RECOMPUTES_AS_SCHEDULED] = "none", [SHOAL_RECOMPUTES_ALL] = "all", [SHOAL_RECOMPUTES_IF_SHORT] = "auto", NULL};
    return tool_word_read(args, words, recomputes_out);
}

static bool share_read(const struct tool_args *args, double *share_out)
{
    static const struct tool_unit units[] = {{"", 1}, {NULL, 0}};
    return tool_quantity_read(args, units, "a number from 0 to 1", share_out) &&
           (*share_out <= 1 || tool_value_fail(args, "a number from 0 to 1"));
}

static bool above_zero_read(const struct tool_args *args, const struct tool_unit *units, const char *takes, double *value_out)
{
    return tool_quantity_read(args, units, takes, value_out) &&
           ((*value_out > 0 && *value_out < 1e12) || tool_value_fail(args, takes));
}

static bool speed_read(const struct tool_args *args, double *speed_out)
{
    static const struct tool_unit units[] = {{"", 1}, {NULL, 0}};
    return above_zero_read(args, units, "numbers above 0, such as 1,1,2,2", speed_out);
}

static bool flops_read(const struct tool_args *args, double *tflop_s_out)
{
    static const struct tool_unit units[] = {{"gflop/s", 1e-3}, {"tflop/s", 1},  {"pflop/s", 1e3}, {"gflops", 1e-3},
                                             {"tflops", 1},     {"pflops", 1e3}, {NULL, 0}};
    return above_zero_read(args, units, "FLOP per second, such as 50tflop/s or 800gflop/s", tflop_s_out);
}

static bool latency_read(const struct tool_args *args, double *us_out)
{
    static const struct tool_unit units[] = {{"", 1}, {"ns", 1e-3}, {"us", 1}, {"ms", 1e3}, {"s", 1e6}, {NULL, 0}};
    return tool_quantity_read(args, units, "a time such as 30us or 1.5ms", us_out);
}

static bool count_read(const struct tool_args *args, int most, uint32_t *count_out)
{
    int number;
    if (!tool_number_read(args, 1, most, &number))
        return false;
    *count_out = (uint32_t)number;
    return true;
}

static bool shards_read(const struct tool_args *args, struct shoal_partition_options *own)
{
    if (!count_read(args, 65536, &own->state_shards))
        return false;
    own->gradient_shards = own->state_shards;
    return true;
}

static bool format_read_word(const struct tool_args *args, bool *is_json_out)
{
    static const char *const words[] = {"text", "json", NULL};
    int index;
    if (!tool_word_read(args, words, &index))
        return false;
    *is_json_out = index == 1;
    return true;
}

/* Options of the partition. */
static bool partition_option_apply(int id, const struct tool_args *args, struct explain_pipeline *explain)
{
    struct shoal_partition_options *own = &explain->options;
    switch (id) {
    case OPTION_LATENCY:
        return latency_read(args, &own->latency_us);
    case OPTION_OPTIMIZER:
        return optimizer_read(args, &own->state_ratio);
    case OPTION_SHARDS:
        return shards_read(args, own);
    case OPTION_PARAMETER_SHARDS:
        return count_read(args, 65536, &own->parameter_shards);
    case OPTION_METHOD:
        return method_read(args, &own->method);
    case OPTION_CUTS:
        explain->cut_list = args->value;
        return true;
    case OPTION_WEIGHT:
        return share_read(args, &own->memory_weight);
    case OPTION_KEPT:
        return share_read(args, &own->kept_share);
    case OPTION_RECOMPUTE:
        return recompute_read(args, &own->recomputes);
    case OPTION_REPLICATE:
        return explain->replicates = true;
    case OPTION_TIES:
        own->keeps_ties_together = 1;
        return true;
    case OPTION_CSV:
        explain->drawing.csv = args->value;
        return true;
    case OPTION_PLOT:
        explain->drawing.plot = args->value;
        return true;
    default:
        explain->drawing.trace = args->value;
        return true;
    }
}

static bool pipeline_option_apply(int id, const struct tool_args *args, struct explain_pipeline *explain)
{
    static const struct tool_unit units[] = {{"", 1}, {NULL, 0}};
    struct shoal_schedule_options *schedule = &explain->schedule_options;
    switch (id) {
    case OPTION_PROFILE:
        explain->profile_word = args->value;
        return true;
    case OPTION_RANKS:
        return count_read(args, SHOAL_RANKS_MAX, &schedule->ranks);
    case OPTION_MICROBATCHES:
        return count_read(args, 65536, &schedule->microbatches);
    case OPTION_SCHEDULE:
        return kind_read(args, &schedule->kind);
    case OPTION_STAGES:
        return count_read(args, 256, &schedule->stages_per_rank);
    case OPTION_ACTIVATIONS:
        return above_zero_read(args, units, "a number of microbatches above 0", &schedule->activations);
    case OPTION_MEMORY:
        explain->memory_list = args->value;
        return true;
    case OPTION_SPEEDS:
        explain->speed_list = args->value;
        return true;
    case OPTION_BATCH:
        return tool_number_read(args, 1, 1 << 20, &explain->model.samples);
    case OPTION_FLOPS:
        return flops_read(args, &explain->model.tflop_s);
    case OPTION_RATE:
        return tool_rate_read(args, &explain->rate_gbit_s);
    case OPTION_PRINT:
        explain->prints_profile = true;
        return true;
    case OPTION_FORMAT:
        return format_read_word(args, &explain->is_json);
    default:
        return partition_option_apply(id, args, explain);
    }
}

/* ---- Lists --------------------------------------------------------------------------------------------------------------- */

typedef bool (*item_read_fn)(const struct tool_args *args, void *item_out);

static bool speed_item_read(const struct tool_args *args, void *item_out)
{
    return speed_read(args, item_out);
}

static bool memory_item_read(const struct tool_args *args, void *item_out)
{
    size_t bytes;
    if (!tool_size_read(args, &bytes))
        return false;
    if (bytes == 0)
        return tool_value_fail(args, "sizes above 0");
    *(uint64_t *)item_out = bytes;
    return true;
}

/* Reads a list with one item for all ranks, or one for each. Items have eight bytes. Returns 0, or the exit code after printing
 * one line. */
static int list_read(const char *name, const char *list, uint32_t ranks, item_read_fn read, void *items_out)
{
    char *copy = strdup(list), *rest = copy, *word;
    uint32_t count = 0;
    int code = 0;
    while (!code && copy && (word = strsep(&rest, ",")) != NULL) {
        const struct tool_args args = {.command = command, .name = name, .value = word};
        if (count == ranks)
            code = tool_usage_fail(command, "%s has more than %u values, one for each rank", name, ranks);
        else if (!read(&args, (char *)items_out + 8 * (size_t)count++))
            code = TOOL_EXIT_USAGE;
    }
    free(copy);
    for (uint32_t r = 1; !code && count == 1 && r < ranks; r++)
        memcpy((char *)items_out + 8 * (size_t)r, items_out, 8);
    if (!code && count != 1 && count != ranks)
        code = tool_usage_fail(command, "%s has %u values: give one, or %u, one for each rank", name, count, ranks);
    return code;
}

static int lists_apply(struct explain_pipeline *explain)
{
    const uint32_t ranks = explain->schedule_options.ranks;
    explain->memory = calloc(ranks, sizeof *explain->memory);
    explain->speeds = calloc(ranks, sizeof *explain->speeds);
    explain->replicas = calloc(ranks, sizeof *explain->replicas);
    if (!explain->memory || !explain->speeds || !explain->replicas) {
        fprintf(stderr, "shoal %s: no memory\n", command);
        return 1;
    }
    int code = 0;
    if (explain->memory_list) {
        code = list_read("--memory", explain->memory_list, ranks, memory_item_read, explain->memory);
        explain->options.memory_bytes = explain->memory[0];
        if (strchr(explain->memory_list, ','))
            explain->options.rank_memory_bytes = explain->memory;
    }
    if (!code && explain->speed_list) {
        code = list_read("--speeds", explain->speed_list, ranks, speed_item_read, explain->speeds);
        explain->options.rank_speeds = explain->speeds;
    }
    return code;
}

/* ---- The answer ---------------------------------------------------------------------------------------------------------- */

/* The steps of the other methods, on the same schedule. */
static void others_time(struct explain_pipeline *explain)
{
    for (unsigned method = SHOAL_PARTITION_TREE; method <= SHOAL_PARTITION_EQUAL; method++) {
        struct shoal_partition_options other = explain->options;
        struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
        struct shoal_partition *partition = NULL;
        other.method = (enum shoal_partition_method)method;
        other.effort = 1; /* its reasons are not printed */
        if (shoal_partition_create(explain->profile, explain->schedule, &other, &partition, NULL, 0) == SHOAL_OK &&
            shoal_partition_step_times(partition, &times) == SHOAL_OK)
            explain->other_steps[method - SHOAL_PARTITION_TREE] = times.step;
        shoal_partition_free(partition);
    }
}

/* Reads names of units into the begins of the stages. Returns 0, or the exit code after printing one line. */
static int cuts_read(const struct explain_pipeline *explain, uint32_t *first_units)
{
    const uint32_t stages = shoal_schedule_stages(explain->schedule), units = shoal_profile_units(explain->profile);
    char *copy = strdup(explain->cut_list), *rest = copy, *word;
    uint32_t count = 1;
    int code = 0;
    while (!code && copy && (word = strsep(&rest, ",")) != NULL) {
        const uint32_t found = shoal_profile_find(explain->profile, word);
        if (count == stages)
            code = tool_usage_fail(command, "--cuts has more than %u names: there are %u stages", stages - 1, stages);
        else if (found < units || !strcmp(word, "end"))
            first_units[count++] = found < units ? found : units;
        else
            code = tool_usage_fail(command, "--cuts: there is no unit '%s' (--print-profile lists them)", word);
    }
    free(copy);
    if (!code && count != stages)
        code = tool_usage_fail(command, "--cuts has %u names, and %u stages have %u begins behind the first", count - 1, stages,
                               stages - 1);
    return code;
}

/* Replaces the partition by the one that the user has cut. */
static int cuts_apply(struct explain_pipeline *explain)
{
    char why[1200] = "";
    struct shoal_partition *own = NULL;
    uint32_t *first_units = calloc(shoal_schedule_stages(explain->schedule), sizeof *first_units);
    int code = first_units ? cuts_read(explain, first_units) : 1;
    if (!code && shoal_partition_create_at(explain->profile, explain->schedule, &explain->options, first_units, &own, why,
                                           sizeof why) != SHOAL_OK)
        code = tool_usage_fail(command, "--cuts: %s", why);
    free(first_units);
    if (code)
        return code;
    shoal_partition_free(explain->partition);
    explain->partition = own;
    return 0;
}

/* Notes the replicas of each rank of the schedule, for other partitions of it. */
static void replicas_take(struct explain_pipeline *explain)
{
    for (uint32_t s = 0; s < shoal_partition_stages(explain->partition); s++) {
        struct shoal_stage stage = SHOAL_STAGE_INIT;
        if (shoal_partition_stage(explain->partition, s, &stage) == SHOAL_OK)
            explain->replicas[stage.rank] = stage.replicas;
    }
    explain->options.rank_replicas = explain->replicas;
}

/* Makes the schedule and the partition. With the user's cuts, only the schedule counts, and memory does not limit it. */
static enum shoal_status pipeline_choose(struct explain_pipeline *explain, char *why, size_t why_bytes)
{
    enum shoal_schedule_kind kind = SHOAL_SCHEDULE_1F1B;
    struct shoal_partition_options wanted = explain->options;
    if (explain->cut_list) {
        wanted.memory_bytes = 0;
        wanted.rank_memory_bytes = NULL;
        wanted.effort = 1;
    }
    const enum shoal_status status = (explain->replicates ? shoal_partition_replicate : shoal_partition_choose)(
        explain->profile, &explain->schedule_options, &wanted, &explain->schedule, &explain->partition, &kind, why, why_bytes);
    if (status == SHOAL_OK && explain->replicates)
        replicas_take(explain);
    explain->schedule_word = shoal_schedule_name(kind);
    explain->options.recomputes = SHOAL_RECOMPUTES_AS_SCHEDULED; /* what follows is for this schedule */
    return status;
}

static int pipeline_draw_stages(const struct explain_pipeline *explain)
{
    const uint32_t stages = shoal_schedule_stages(explain->schedule);
    struct shoal_stage_costs *costs = calloc(stages, sizeof *costs);
    if (!costs) {
        fprintf(stderr, "shoal %s: no memory\n", command);
        return 1;
    }
    for (uint32_t s = 0; s < stages; s++) {
        struct shoal_stage stage = SHOAL_STAGE_INIT;
        if (shoal_partition_stage(explain->partition, s, &stage) == SHOAL_OK)
            costs[s] = (struct shoal_stage_costs){stage.forward,
                                                  stage.input_gradient,
                                                  stage.weight_gradient,
                                                  stage.transfer,
                                                  stage.sum_replicas,
                                                  stage.sum_tied,
                                                  0};
    }
    struct shoal_schedule *summed = NULL;
    const enum shoal_status status = shoal_partition_add_sums(explain->partition, explain->schedule, 0, &summed);
    const bool is_drawn = status == SHOAL_OK && pipeline_draw(&explain->drawing, explain->schedule_word, summed, costs);
    shoal_schedule_free(summed);
    free(costs);
    return is_drawn ? 0 : 1;
}

static int pipeline_answer(struct explain_pipeline *explain)
{
    char why[1200] = "";
    const enum shoal_status status = pipeline_choose(explain, why, sizeof why);
    if (status != SHOAL_OK) {
        fprintf(stderr, "shoal %s: %s\n", command, *why ? why : shoal_status_text(status));
        return status == SHOAL_ERR_ARGUMENT ? TOOL_EXIT_USAGE : 1;
    }
    const int code = explain->cut_list ? cuts_apply(explain) : 0;
    if (code)
        return code;
    others_time(explain);
    if (explain->is_json)
        explain_pipeline_print_json(explain);
    else
        explain_pipeline_print_text(explain);
    return tool_output_finish(command, pipeline_draw_stages(explain));
}

static int pipeline_ask(struct explain_pipeline *explain)
{
    int is_built_in = 0;
    int code = pipeline_profile_open(command, explain->profile_word, &explain->model, &explain->profile, &is_built_in);
    explain->is_built_in = is_built_in != 0;
    if (code)
        return code;
    if (explain->prints_profile) {
        const enum shoal_status status = shoal_profile_print(explain->profile, stdout);
        return tool_output_finish(command, status == SHOAL_ERR_MEMORY ? 1 : 0);
    }
    if (explain->replicates &&
        (explain->cut_list || explain->speed_list || (explain->memory_list && strchr(explain->memory_list, ','))))
        return tool_usage_fail(
            command, "--replicate chooses which ranks have a stage: leave out --cuts, --speeds and lists of --memory");
    code = lists_apply(explain);
    return code ? code : pipeline_answer(explain);
}

static void pipeline_close(struct explain_pipeline *explain)
{
    shoal_partition_free(explain->partition);
    shoal_schedule_free(explain->schedule);
    shoal_profile_free(explain->profile);
    free(explain->memory);
    free(explain->speeds);
    free(explain->replicas);
}

int explain_pipeline_run(int argc, char **argv)
{
    struct explain_pipeline explain = {.profile_word = "gpt2",
                                       .model = {1, 50},
                                       .schedule_options = SHOAL_SCHEDULE_OPTIONS_INIT,
                                       .options = SHOAL_PARTITION_OPTIONS_INIT,
                                       .rate_gbit_s = 25,
                                       .drawing = {.command = command}};
    struct tool_args args = {.command = command, .argc = argc, .argv = argv, .at = 1};
    int id;
    explain.schedule_options.ranks = 4;
    explain.options.latency_us = 30;
    while ((id = tool_option_next(&args, options)) > 0) {
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish(command, 0);
        }
        if (!pipeline_option_apply(id, &args, &explain))
            return TOOL_EXIT_USAGE;
    }
    if (id == TOOL_OPTION_BAD)
        return TOOL_EXIT_USAGE;
    if (args.at < argc)
        return tool_usage_fail(command, "'%s' is not an option", argv[args.at]);
    if (!explain.schedule_options.microbatches)
        explain.schedule_options.microbatches = 4 * explain.schedule_options.ranks;
    explain.options.bytes_per_us = explain.rate_gbit_s * 1e3 / 8;
    explain.schedule_options.kept_share = explain.options.kept_share;
    const int code = pipeline_ask(&explain);
    pipeline_close(&explain);
    return code;
}
