/* `shoal bench step`: measures how long a training step takes here. Options and help. */
#include "bench_step.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "bind.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal bench step --profile MODEL --backward MS [options]\n"
    "\n"
    "Replays training steps. Gradients with the sizes of a model's become ready during a backward pass of a given\n"
    "length, while the gradient engine (shoal/gradients.h) averages them over all ranks. Shows how much of the\n"
    "averaging the backward pass hides, and how much no engine could hide. It starts -n local workers; under shoal\n"
    "run, torchrun, mpirun or srun it uses the ranks that they started. Defaults are in parentheses.\n"
    "\n"
    "    --profile MODEL          resnet50, bert-large, gpt2, or a file (see shoal sim step --help for its form)\n"
    "    --backward MS            length of the backward pass by itself, in milliseconds; 0: all gradients are ready at once\n"
    "    -n N                     workers to start (2)\n"
    "    --busy                   the rank computes during the backward pass, as when training on a CPU. Without it, the\n"
    "                             rank sleeps until a gradient is ready, as when a GPU computes\n"
    "    --memory plain|gpu       gradients are in ordinary memory, or in memory of a CUDA device; rank r of a host uses\n"
    "                             device r modulo their number. A step then ends when the device has the averages (plain)\n"
    "    --compress WORD          how gradients travel between hosts: none, fp16, bf16 or int8 (none)\n"
    "    --steps N                steps to measure, after three that are not measured (10)\n"
    "    --format table|json      json: one object per line, one for each rank, then one for all (table)\n"
    "    --trace FILE             write the last step of all ranks for chrome://tracing or ui.perfetto.dev\n"
    "    --timeline FILE          draw the last step of the slowest rank, as SVG\n"
    "    --rate RATE              for the bound: what each host's adapter sends, such as 1gbit. Default: an all-reduce of\n"
    "                             the largest buffer's size is measured by itself\n"
    "    --views                  gradients are made in the engine's buffers: nothing is copied in or out\n"
    "    --optimizer RULE         none, sgd, momentum, adam, adamw, adagrad, lion or lamb: each rank steps all\n"
    "                             parameters (none)\n"
    "    --when after|buffers     after: when the step is over; buffers: the parameters of each buffer as soon as it is\n"
    "                             averaged (after)\n"
    "    --shard all|host|K       the optimizer runs in the reduction: each rank steps its shard, and keeps only its share\n"
    "                             of the states. One copy of them is shared by all ranks, those of a host, or every K\n"
    "    --clip none|late|early   with --shard: the norm of all gradients is known before parameters change. late: they are\n"
    "                             stepped when all buffers are summed; early: as if nothing had to be clipped (none)\n"
    "    --no-thread              averages are copied back after the backward pass, not by a thread during it\n"
    "    --buffer SIZE            largest size of a buffer of gradients (25M)\n"
    "    --first SIZE             largest size of the first buffer (1M)\n"
    "    --rank-bytes SIZE        each rank owns at least this much of a buffer, even if the buffer then grows larger\n"
    "                             (a rank's share of --buffer, from 8K to 64K)\n"
    "    --flight SIZE            most bytes of buffers that are averaged at a time (4 times --buffer)\n"
    "    --bind slice|core|none   cores of each worker, as in shoal bench --help (slice)\n"
    "    --pin                    instead of --bind: worker r stays on core r modulo their number\n"
    "    --timeout S              an operation that takes longer fails (60)\n"
    "\n"
    "All ranks meet in a barrier before each step. Three steps are not measured. They have no backward pass. In the\n"
    "first, every average is compared with the expected one; the third shows how long copies and sums take by themselves\n"
    "(alone).\n"
    "\n"
    "Figures:\n"
    "    step       from the beginning of the backward pass until the last average is in place: the slowest rank of each\n"
    "               step, median over the steps\n"
    "    backward   until the last gradient was ready; with --busy longer than --backward if summing takes the core\n"
    "    exposed    step less backward: what was not hidden\n"
    "    hidden     1 - exposed / wire, where wire is the time in which all bytes cross the wire\n"
    "    alone      a step whose gradients are all ready at once, so that nothing hides copies and sums; and how much of that\n"
    "               time is hidden. The better measure on one host, whose copies take longer than the wire\n"
    "    bound      no gradient can be summed before it is ready, and all that becomes ready after it must cross the wire:\n"
    "               the largest of these sums over all tensors, with the name of the tensor that makes it. No engine is\n"
    "               faster; waiting until a buffer is full costs up to the time of one buffer more\n"
    "    sent       payload from a rank to others in a step; net: what of it leaves the host\n"
    "    balance    most bytes that a rank sends or receives, over the mean of all ranks; on several hosts as the transports\n"
    "               count them\n"
    "    cpu        CPU time of a rank in a step, of all its threads\n"
    "\n"
    "Examples:\n"
    "    shoal bench step --profile resnet50 --backward 120\n"
    "    shoal bench step --profile gpt2 --backward 500 --busy --timeline step.svg\n"
    "    mpirun -n 4 shoal bench step --profile resnet50 --backward 1400 --rate 1gbit --compress bf16 --format json\n"
    "\n"
    "Exit codes: 0 success, 1 a worker failed or an average was wrong, 2 invalid arguments or an invalid profile.\n";

static const char *const memories[] = {"plain", "gpu", NULL};

enum option {
    OPTION_PROFILE = 1,
    OPTION_BACKWARD,
    OPTION_BUSY,
    OPTION_COMPRESS,
    OPTION_MEMORY,
    OPTION_VIEWS,
    OPTION_OPTIMIZER,
    OPTION_WHEN,
    OPTION_SHARD,
    OPTION_CLIP,
    OPTION_NO_THREAD,
    OPTION_BUFFER,
    OPTION_FIRST,
    OPTION_RANK_BYTES,
    OPTION_FLIGHT,
    OPTION_RATE,
    OPTION_TIMELINE
};

static const struct tool_option options_known[] = {
    {"--profile", OPTION_PROFILE, "MODEL"},
    {"--backward", OPTION_BACKWARD, "MS"},
    {"--busy", OPTION_BUSY, NULL},
    {"--compress", OPTION_COMPRESS, "none|fp16|bf16|int8"},
    {"--memory", OPTION_MEMORY, "plain|gpu"},
    {"--views", OPTION_VIEWS, NULL},
    {"--optimizer", OPTION_OPTIMIZER, STEP_RULE_WORDS},
    {"--when", OPTION_WHEN, STEP_WHEN_WORDS},
    {"--shard", OPTION_SHARD, STEP_SHARD_WORDS},
    {"--clip", OPTION_CLIP, STEP_CLIP_WORDS},
    {"--no-thread", OPTION_NO_THREAD, NULL},
    {"--buffer", OPTION_BUFFER, "SIZE"},
    {"--first", OPTION_FIRST, "SIZE"},
    {"--rank-bytes", OPTION_RANK_BYTES, "SIZE"},
    {"--flight", OPTION_FLIGHT, "SIZE"},
    {"--rate", OPTION_RATE, "RATE"},
    {"--timeline", OPTION_TIMELINE, "FILE"},
    BENCH_COMMON_OPTIONS,
    {NULL, 0, NULL},
};

#define BACKWARD_MS_MAX 1e6

static bool backward_read(const struct tool_args *args, double *us_out)
{
    char *end;
    const double ms = strtod(args->value, &end);
    if (!isdigit((unsigned char)args->value[0]) || *end || !(ms <= BACKWARD_MS_MAX))
        return tool_value_fail(args, "a number of milliseconds");
    *us_out = ms * 1e3;
    return true;
}

static bool rate_read(const struct tool_args *args, double *gbit_s_out)
{
    return tool_rate_read(args, gbit_s_out) && (*gbit_s_out > 0 || tool_value_fail(args, "a rate above 0"));
}

static bool size_read(const struct tool_args *args, size_t *bytes_out)
{
    return tool_size_read(args, bytes_out) && (*bytes_out > 0 || tool_value_fail(args, "a size above 0"));
}

static bool profile_read(const struct tool_args *args, struct bench_step_options *options, int *code_out)
{
    if (options->profile.count)
        return !tool_usage_fail(args->command, "one profile at a time: '%s' is one too many", args->value);
    const int code = step_profile_open(&options->profile, args->command, args->value);
    *code_out = code ? code : TOOL_EXIT_USAGE;
    return code == 0;
}

static bool option_apply(int id, const struct tool_args *args, struct bench_step_options *options)
{
    switch (id) {
    case OPTION_BACKWARD:
        return backward_read(args, &options->backward_us);
    case OPTION_BUSY:
        return options->is_busy = true;
    case OPTION_COMPRESS:
        return tool_word_read(args, bench_step_compressions, &options->compression);
    case OPTION_MEMORY:
        return tool_word_read(args, memories, &options->is_on_gpu);
    case OPTION_VIEWS:
        return options->has_views = true;
    case OPTION_OPTIMIZER:
        return tool_word_read(args, step_rules, &options->optimizing.rule);
    case OPTION_WHEN:
        options->optimizing.has_when = true;
        return tool_word_read(args, step_whens, &options->optimizing.when);
    case OPTION_SHARD:
        return step_shard_read(args, &options->optimizing);
    case OPTION_CLIP:
        return tool_word_read(args, step_clips, &options->optimizing.clip);
    case OPTION_NO_THREAD:
        return options->has_no_thread = true;
    case OPTION_BUFFER:
        return size_read(args, &options->buffer_bytes);
    case OPTION_FIRST:
        return size_read(args, &options->first_bytes);
    case OPTION_RANK_BYTES:
        return size_read(args, &options->rank_bytes);
    case OPTION_FLIGHT:
        return size_read(args, &options->flight_bytes);
    case OPTION_RATE:
        return rate_read(args, &options->rate_gbit_s);
    case OPTION_TIMELINE:
        options->timeline = args->value;
        return true;
    default:
        return bench_common_apply(id, args, &options->common);
    }
}

static bool options_finish(const struct bench_step_options *options)
{
    if (!options->profile.count)
        return !tool_usage_fail("bench step", "which model? Such as: --profile resnet50");
    if (options->backward_us < 0)
        return !tool_usage_fail("bench step", "how long is the backward pass? Such as: --backward 120, in milliseconds");
    if (options->is_on_gpu && options->optimizing.rule && !options->optimizing.is_sharded)
        return !tool_usage_fail("bench step", "--optimizer runs on the CPU: with --memory gpu it needs --shard");
    if (options->is_on_gpu && options->optimizing.rule && options->has_views)
        return !tool_usage_fail("bench step", "with --shard no buffer is in the GPU's memory: leave --views out");
    if (options->optimizing.is_sharded && options->compression)
        return !tool_usage_fail("bench step", "--shard sums in full precision: leave it or --compress out");
    return step_optimizing_check(&options->optimizing, "bench step");
}

/* Returns false, with *code_out set, after printing one line. */
static bool options_parse(int argc, char **argv, struct bench_step_options *options, int *code_out)
{
    struct tool_args args = {.command = "bench step", .argc = argc, .argv = argv, .at = 1};
    *options = (struct bench_step_options){.common = BENCH_COMMON_USUAL, .backward_us = -1};
    *code_out = TOOL_EXIT_USAGE;
    while (args.at < argc && !options->common.help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD)
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("bench step", "'%s' is not an option", argv[args.at]);
        if (id == OPTION_PROFILE ? !profile_read(&args, options, code_out) : id > 0 && !option_apply(id, &args, options))
            return false;
    }
    return options->common.help || options_finish(options);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static int worker_run(const void *arg)
{
    return bench_step_worker_run(arg);
}

static int options_run(const struct bench_step_options *options)
{
    const struct bench_crew crew = {options->common.ranks, options->common.pin, options->common.bind, worker_run, options};
    if (options->common.help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    if (tool_is_launched())
        return bench_step_worker_run(options);
    return bench_file_check(options->common.trace) && bench_file_check(options->timeline) ? bench_crew_run(&crew) : 1;
}

int bench_step_run(int argc, char **argv)
{
    struct bench_step_options options;
    int code;
    if (options_parse(argc, argv, &options, &code))
        code = options_run(&options);
    step_profile_free(&options.profile);
    return code;
}
