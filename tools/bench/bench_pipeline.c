/* `shoal bench pipeline`: measures how long a step of a pipeline takes here. Options and help. */
#include "bench_pipeline.h"

#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bind.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal bench pipeline [options]\n"
    "\n"
    "Replays the steps of a pipeline of equal stages (shoal/pipeline.h). Each action takes a given time, in which the rank\n"
    "sleeps, as when a GPU computes; messages of a given size travel between the stages. Shows how much longer a step takes\n"
    "than the schedule needs. It starts -n local workers; under shoal run, torchrun, mpirun or srun it uses the ranks that\n"
    "they started. Defaults are in parentheses.\n"
    "\n"
    "    -n N                     workers to start (2)\n"
    "    --schedule KIND          gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, v-min, v-half, v-zb or auto (1f1b)\n"
    "    --read FILE              a schedule in torch's CSV form instead, as shoal sim pipeline --csv writes it\n"
    "    --microbatches N         microbatches of a step (twice the ranks)\n"
    "    --stages-per-rank N      for interleaved and breadth-first (2)\n"
    "    --forward TIME           one microbatch on one rank, such as 18.5ms or 300us (5ms)\n"
    "    --input-grad TIME        its backward pass, as far as the rank before it waits for that (as --forward)\n"
    "    --weight-grad TIME       the rest of it (as --forward)\n"
    "    --transfer TIME          what the schedule is made for, and what the ideal step contains: the time of a message to\n"
    "                             another rank (0)\n"
    "    --activations N          most microbatches whose activations a rank may keep (what the schedule needs)\n"
    "    --recompute              every stage repeats its forward pass before its backward pass\n"
    "    --bytes SIZE             of each message, activations and gradients alike; may be 0 (1M)\n"
    "    --memory shared|plain    shared: messages are in memory that peers on this host read directly; plain: in ordinary\n"
    "                             memory (shared)\n"
    "    --ahead N                a rank receives for this many actions ahead (4)\n"
    "    --steps N                steps to measure, after two that are not measured (10)\n"
    "    --format table|json      json: one object per line, one for each rank, then one for all (table)\n"
    "    --trace FILE             write the last step of all ranks for chrome://tracing or ui.perfetto.dev\n"
    "    --bind slice|core|none   cores of each worker, as in shoal bench --help (slice)\n"
    "    --pin                    instead of --bind: worker r stays on core r modulo their number\n"
    "    --timeout S              a message that takes longer fails (60)\n"
    "\n"
    "All ranks meet in a barrier before each step. The beginning and the end of each message are checked.\n"
    "\n"
    "Figures:\n"
    "    step       from the barrier until the last rank is done: median over the steps\n"
    "    ideal      the time of a step if nothing but the actions, and --transfer, took time: shoal sim pipeline\n"
    "    bubble     share of the step in which a rank does not compute, on average over the ranks\n"
    "    computed   time of a rank's actions; waited: for messages before them; sending: after them, until all messages of\n"
    "               the rank had arrived\n"
    "    cpu        CPU time of a rank in a step, of all its threads\n"
    "\n"
    "Examples:\n"
    "    shoal bench pipeline -n 4 --schedule zb-h1 --forward 18.5ms --weight-grad 9.3ms --bytes 16M\n"
    "    mpirun -n 8 shoal bench pipeline --microbatches 32 --forward 20ms --format json\n"
    "\n"
    "Exit codes: 0 success, 1 a worker failed or a message was wrong, 2 invalid arguments or an invalid schedule.\n";

static const char *const memories[] = {"shared", "plain", NULL};

enum option {
    OPTION_SCHEDULE = 1,
    OPTION_READ,
    OPTION_MICROBATCHES,
    OPTION_PER_RANK,
    OPTION_FORWARD,
    OPTION_INPUT,
    OPTION_WEIGHT,
    OPTION_TRANSFER,
    OPTION_ACTIVATIONS,
    OPTION_RECOMPUTE,
    OPTION_BYTES,
    OPTION_MEMORY,
    OPTION_AHEAD
};

static const struct tool_option options_known[] = {
    {"--schedule", OPTION_SCHEDULE, "KIND"},
    {"--read", OPTION_READ, "FILE"},
    {"--microbatches", OPTION_MICROBATCHES, "N"},
    {"--stages-per-rank", OPTION_PER_RANK, "N"},
    {"--forward", OPTION_FORWARD, "TIME"},
    {"--input-grad", OPTION_INPUT, "TIME"},
    {"--weight-grad", OPTION_WEIGHT, "TIME"},
    {"--transfer", OPTION_TRANSFER, "TIME"},
    {"--activations", OPTION_ACTIVATIONS, "N"},
    {"--recompute", OPTION_RECOMPUTE, NULL},
    {"--bytes", OPTION_BYTES, "SIZE"},
    {"--memory", OPTION_MEMORY, "shared|plain"},
    {"--ahead", OPTION_AHEAD, "N"},
    BENCH_COMMON_OPTIONS,
    {NULL, 0, NULL},
};

enum { COUNT_MAX = 65536, AHEAD_MAX = 256 };
#define FORWARD_USUAL_US 5e3

static bool activations_read(const struct tool_args *args, double *activations_out)
{
    char *end;
    *activations_out = strtod(args->value, &end);
    return (end != args->value && !*end && *activations_out > 0 && *activations_out <= 1e9) ||
           tool_value_fail(args, "a number above 0");
}

static bool kind_read(const struct tool_args *args, int *kind_out)
{
    const char *words[SHOAL_SCHEDULE_AUTO + 2] = {NULL};
    for (int kind = 0; kind <= SHOAL_SCHEDULE_AUTO; kind++)
        words[kind] = shoal_schedule_name((enum shoal_schedule_kind)kind);
    return tool_word_read(args, words, kind_out);
}

static bool plain_read(const struct tool_args *args, bool *is_plain_out)
{
    int memory = 0;
    const bool is_good = tool_word_read(args, memories, &memory);
    *is_plain_out = memory == 1;
    return is_good;
}

static bool schedule_apply(int id, const struct tool_args *args, struct bench_pipeline_options *options)
{
    switch (id) {
    case OPTION_SCHEDULE:
        return kind_read(args, &options->schedule);
    case OPTION_RECOMPUTE:
        return options->recompute = true;
    case OPTION_READ:
        options->read = args->value;
        return true;
    case OPTION_MICROBATCHES:
        return tool_number_read(args, 1, COUNT_MAX, &options->microbatches);
    case OPTION_PER_RANK:
        return tool_number_read(args, 2, COUNT_MAX, &options->stages_per_rank);
    case OPTION_FORWARD:
        return tool_time_read(args, &options->costs.forward);
    case OPTION_INPUT:
        return tool_time_read(args, &options->costs.input_gradient);
    case OPTION_WEIGHT:
        return tool_time_read(args, &options->costs.weight_gradient);
    case OPTION_TRANSFER:
        return tool_time_read(args, &options->costs.transfer);
    case OPTION_ACTIVATIONS:
        return activations_read(args, &options->activations);
    default:
        return bench_common_apply(id, args, &options->common);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct bench_pipeline_options *options)
{
    switch (id) {
    case OPTION_BYTES:
        return tool_size_read(args, &options->bytes);
    case OPTION_MEMORY:
        return plain_read(args, &options->is_plain);
    case OPTION_AHEAD:
        return tool_number_read(args, 1, AHEAD_MAX, &options->ahead);
    default:
        return schedule_apply(id, args, options);
    }
}

static bool options_parse(int argc, char **argv, struct bench_pipeline_options *options)
{
    struct tool_args args = {.command = "bench pipeline", .argc = argc, .argv = argv, .at = 1};
    struct shoal_stage_costs *const costs = &options->costs;
    *options = (struct bench_pipeline_options){.common = BENCH_COMMON_USUAL,
                                               .schedule = SHOAL_SCHEDULE_1F1B,
                                               .costs = {FORWARD_USUAL_US, -1, -1, 0},
                                               .bytes = 1 << 20};
    while (args.at < argc && !options->common.help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_apply(id, &args, options)))
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("bench pipeline", "'%s' is not an option", argv[args.at]);
    }
    costs->input_gradient = costs->input_gradient < 0 ? costs->forward : costs->input_gradient;
    costs->weight_gradient = costs->weight_gradient < 0 ? costs->forward : costs->weight_gradient;
    return options->common.help || costs->forward + costs->input_gradient + costs->weight_gradient > 0 ||
           !tool_usage_fail("bench pipeline", "a microbatch takes no time: give one of --forward, --input-grad, --weight-grad");
}

static int worker_run(const void *arg)
{
    return bench_pipeline_worker_run(arg);
}

int bench_pipeline_run(int argc, char **argv)
{
    struct bench_pipeline_options options;
    if (!options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.common.help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    const struct bench_crew crew = {options.common.ranks, options.common.pin, options.common.bind, worker_run, &options};
    return tool_is_launched() ? bench_pipeline_worker_run(&options) : bench_crew_run(&crew);
}
