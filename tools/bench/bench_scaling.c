/* `shoal bench scaling`: measures how training steps scale on the user's own hosts, next to the simulator's prediction. Options
 * and help. */
#include "bench_scaling.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bind.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal bench scaling --profile MODEL [--backward MS] [options]\n"
    "\n"
    "Measures training steps on 1, 2, 4, ... of the workers that it has, as shoal bench step does, and compares throughput\n"
    "and efficiency with what shoal sim step predicts for this network. Under shoal run, torchrun, mpirun or srun it uses\n"
    "the ranks that they started on all hosts of an allocation; else it starts -n local workers. Workers that a\n"
    "measurement does not need wait. Defaults are in parentheses.\n"
    "\n"
    "    --profile MODEL          resnet50, bert-large, gpt2, or a file, such as shoal.torch.profile writes\n"
    "    --backward MS            length of the backward pass of one worker, by itself, in milliseconds (measured, if\n"
    "                             shoal.torch.profile wrote the file)\n"
    "    --forward MS             length of the forward pass, in which nothing is summed (half of --backward, or measured)\n"
    "    --batch N                samples in these passes: throughput is in samples (measured, if the file has it; else\n"
    "                             throughput is in steps of a worker)\n"
    "    --strong                 strong scaling: --batch is the global batch, which the workers divide; passes shrink with\n"
    "                             the samples of a worker. Without it each worker keeps --batch samples (weak scaling)\n"
    "    --count LIST             numbers of workers: 1,2,4 or a range such as 1-8, whose numbers double. A number above the\n"
    "                             workers of a host stands for whole hosts (1, 2, 4, ... inside a host, then 2, 4, ... hosts,\n"
    "                             and all)\n"
    "    --rounds N               how often all numbers of workers take turns (3)\n"
    "    --steps N                steps to measure in each round, after three that are not measured (10)\n"
    "    -n N                     workers to start (2)\n"
    "    --busy                   the rank computes during the backward pass, as when training on a CPU; without it, it "
    "sleeps\n"
    "    --memory plain|gpu       gradients are in ordinary memory, or in memory of a CUDA device (plain)\n"
    "    --views, --buffer SIZE, --bind HOW, --timeout S\n"
    "                             as in shoal bench step --help\n"
    "    --format table|json      json: one object per number of workers, then one for all (table)\n"
    "    --plot FILE              also draw throughput over workers, as SVG\n"
    "\n"
    "The prediction needs rate and latency of the network and the rate of memory. They are measured first: each host\n"
    "exchanges data with another one, both ways at once; then every rank copies memory. These options replace what is\n"
    "measured, and describe what is not (see shoal sim --help):\n"
    "    --rate RATE, --latency TIME, --copy-rate RATE (bytes that a rank reads and writes), --message-us US, --stack RATE,\n"
    "    --signal-us US, --header SIZE, --frame SIZE, --burst SIZE, --burst-rate RATE, --pause TIME, --cores N, "
    "--one-machine,\n"
    "    --pcie LINK, --pcie-switch LINK, --switch-gpus N, --switch-adapters, --nvlink LINK, --unit SIZE, --ring SIZE,\n"
    "    --copy-us US, --host-memory RATE\n"
    "\n"
    "Figures:\n"
    "    step       forward pass, and what shoal bench step measures: median over the steps of all rounds, of the slowest\n"
    "               worker of each step; and the times below which 10 % and 90 % of them are\n"
    "    efficiency throughput of a worker over that at the smallest number of workers\n"
    "    off        predicted step over measured step, less 1\n"
    "    limit      what would shorten the predicted step most (see shoal sim step --help)\n"
    "\n"
    "Examples:\n"
    "    shoal bench scaling --profile resnet50 --backward 120 --batch 32 -n 2\n"
    "    srun -N 4 --ntasks-per-node=8 shoal bench scaling --profile bert-large --backward 400 --plot scaling.svg\n"
    "    shoal run --hosts 2 --host-index 0 --meet node0:29500 -n 4 shoal bench scaling --profile mine.json --strong\n"
    "\n"
    "Exit codes: 0 success, 1 a worker failed or an average was wrong, 2 invalid arguments or an invalid profile.\n";

static const char *const memories[] = {"plain", "gpu", NULL};

enum option {
    OPTION_HELP = 1,
    OPTION_PROFILE,
    OPTION_BACKWARD,
    OPTION_FORWARD,
    OPTION_BATCH,
    OPTION_STRONG,
    OPTION_COUNT,
    OPTION_ROUNDS,
    OPTION_STEPS,
    OPTION_RANKS,
    OPTION_BUSY,
    OPTION_MEMORY,
    OPTION_COPY_RATE,
    OPTION_VIEWS,
    OPTION_BUFFER,
    OPTION_BIND,
    OPTION_TIMEOUT,
    OPTION_FORMAT,
    OPTION_PLOT
};

/* The first row of a name counts. So --memory is the kind of memory of the gradients, not the simulator's rate. */
static const struct tool_option options_known[] = {
    {"--profile", OPTION_PROFILE, "MODEL"},
    {"--backward", OPTION_BACKWARD, "MS"},
    {"--forward", OPTION_FORWARD, "MS"},
    {"--batch", OPTION_BATCH, "N"},
    {"--strong", OPTION_STRONG, NULL},
    {"--count", OPTION_COUNT, "LIST"},
    {"--rounds", OPTION_ROUNDS, "N"},
    {"--steps", OPTION_STEPS, "N"},
    {"-n", OPTION_RANKS, "N"},
    {"--busy", OPTION_BUSY, NULL},
    {"--memory", OPTION_MEMORY, "plain|gpu"},
    {"--copy-rate", OPTION_COPY_RATE, "RATE"},
    {"--views", OPTION_VIEWS, NULL},
    {"--buffer", OPTION_BUFFER, "SIZE"},
    {"--bind", OPTION_BIND, "slice|core|none"},
    {"--timeout", OPTION_TIMEOUT, "SECONDS"},
    {"--format", OPTION_FORMAT, "table|json"},
    {"--plot", OPTION_PLOT, "FILE"},
    SIM_MODEL_OPTIONS,
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

enum { ROUNDS_USUAL = 3, ROUNDS_MAX = 1000 };
enum { BATCH_MAX = 1 << 30 };
#define PASS_MS_MAX 1e6

static bool pass_read(const struct tool_args *args, double *us_out)
{
    char *end;
    const double ms = strtod(args->value, &end);
    if (!isdigit((unsigned char)args->value[0]) || *end || !(ms <= PASS_MS_MAX))
        return tool_value_fail(args, "a number of milliseconds");
    *us_out = ms * 1e3;
    return true;
}

static bool profile_read(const struct tool_args *args, struct scaling_options *options, int *code_out)
{
    if (options->step.profile.count)
        return !tool_usage_fail(args->command, "one profile at a time: '%s' is one too many", args->value);
    const int code = step_profile_open(&options->step.profile, args->command, args->value);
    *code_out = code ? code : TOOL_EXIT_USAGE;
    return code == 0;
}

static bool buffer_read(const struct tool_args *args, size_t *bytes_out)
{
    return tool_size_read(args, bytes_out) && (*bytes_out > 0 || tool_value_fail(args, "a size above 0"));
}

static bool format_read(const struct tool_args *args, enum sim_format *format_out)
{
    return sim_format_read(args, format_out) && (*format_out != SIM_CSV || tool_value_fail(args, "table or json"));
}

static bool model_apply(int id, const struct tool_args *args, struct scaling_options *options)
{
    if (id == OPTION_COPY_RATE) {
        options->memory = SCALING_GIVEN;
        return sim_memory_read(args, &options->model.memory_gb_s);
    }
    if (id == SIM_OPTION_RATE)
        options->rate = SCALING_GIVEN;
    if (id == SIM_OPTION_LATENCY)
        options->latency = SCALING_GIVEN;
    return sim_model_apply(id, args, &options->model);
}

static bool other_apply(int id, const struct tool_args *args, struct scaling_options *options)
{
    switch (id) {
    case OPTION_BUSY:
        return options->step.is_busy = true;
    case OPTION_MEMORY:
        return tool_word_read(args, memories, &options->step.is_on_gpu);
    case OPTION_VIEWS:
        return options->step.has_views = true;
    case OPTION_BUFFER:
        return buffer_read(args, &options->step.buffer_bytes);
    case OPTION_BIND:
        return tool_word_read(args, bind_words, &options->step.common.bind);
    case OPTION_TIMEOUT:
        return tool_number_read(args, 1, BENCH_SECONDS_MAX, &options->step.common.timeout_s);
    case OPTION_FORMAT:
        return format_read(args, &options->format);
    case OPTION_PLOT:
        options->plot = args->value;
        return true;
    case OPTION_HELP:
        return options->help = true;
    default:
        return model_apply(id, args, options);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct scaling_options *options)
{
    switch (id) {
    case OPTION_BACKWARD:
        return pass_read(args, &options->step.backward_us);
    case OPTION_FORWARD:
        return pass_read(args, &options->forward_us);
    case OPTION_BATCH:
        return tool_number_read(args, 1, BATCH_MAX, &options->batch);
    case OPTION_STRONG:
        return options->is_strong = true;
    case OPTION_COUNT:
        return sim_hosts_read(args, SIM_FACTOR_USUAL, &options->counts);
    case OPTION_ROUNDS:
        return tool_number_read(args, 1, ROUNDS_MAX, &options->rounds);
    case OPTION_STEPS:
        return tool_number_read(args, 1, BENCH_STEPS_MAX, &options->step.common.steps);
    case OPTION_RANKS:
        return tool_number_read(args, 1, BENCH_RANKS_MAX, &options->step.common.ranks);
    default:
        return other_apply(id, args, options);
    }
}

/* The passes and the batch are those of the profile's facts if they are not given. A batch of the facts belongs to the passes
 * of the facts. */
static bool passes_find(struct scaling_options *options)
{
    const struct step_facts *facts = &options->step.profile.facts;
    const bool is_measured = facts->is_there && options->step.backward_us < 0;
    if (options->step.backward_us < 0 && !facts->is_there)
        return !tool_usage_fail("bench scaling", "how long is the backward pass? Such as: --backward 120, in milliseconds");
    if (is_measured)
        options->step.backward_us = 1e3 * facts->backward_ms;
    if (options->forward_us < 0)
        options->forward_us = is_measured ? 1e3 * facts->forward_ms : options->step.backward_us / 2;
    if (!options->batch && is_measured && facts->batch <= BATCH_MAX)
        options->batch = (int)facts->batch;
    if (options->is_strong && !options->batch)
        return !tool_usage_fail("bench scaling", "--strong divides a batch: give --batch, the samples of all workers");
    return true;
}

static bool options_finish(struct scaling_options *options)
{
    if (!options->step.profile.count)
        return !tool_usage_fail("bench scaling", "which model? Such as: --profile resnet50");
    if (options->step.is_on_gpu && options->model.pcie_gb_s <= 0)
        return !tool_usage_fail("bench scaling", "--memory gpu: how are the GPUs joined? Such as: --pcie gen4");
    options->model.shared = options->model.pcie_gb_s <= 0; /* the buffers are in host memory */
    return passes_find(options);
}

bool scaling_options_parse(int argc, char **argv, struct scaling_options *options_out, int *code_out)
{
    struct tool_args args = {.command = "bench scaling", .argc = argc, .argv = argv, .at = 1};
    *options_out = (struct scaling_options){
        .step = {.common = BENCH_COMMON_USUAL, .backward_us = -1},
        .forward_us = -1,
        .rounds = ROUNDS_USUAL,
        .model = SHOAL_SIMULATION_INIT,
    };
    *code_out = TOOL_EXIT_USAGE;
    while (args.at < argc && !options_out->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD)
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("bench scaling", "'%s' is not an option", argv[args.at]);
        if (id == OPTION_PROFILE ? !profile_read(&args, options_out, code_out)
                                 : id > 0 && !option_apply(id, &args, options_out))
            return false;
    }
    return options_out->help || options_finish(options_out);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static int worker_run(const void *arg)
{
    return scaling_worker_run(arg);
}

/* Finds out before any worker starts what -n local workers cannot do. */
static int local_check(const struct scaling_options *options)
{
    struct scaling_result result;
    const size_t ranks = options->step.common.ranks ? (size_t)options->step.common.ranks : BENCH_RANKS_USUAL;
    const int code = scaling_points_make(options, 1, ranks, true, &result);
    scaling_points_free(&result);
    return code;
}

static int options_run(const struct scaling_options *options)
{
    const struct bench_crew crew = {options->step.common.ranks, options->step.common.pin, options->step.common.bind, worker_run,
                                    options};
    if (options->help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    if (tool_is_launched())
        return scaling_worker_run(options);
    if (!bench_file_check(options->plot))
        return 1;
    const int code = local_check(options);
    return code ? code : bench_crew_run(&crew);
}

int bench_scaling_run(int argc, char **argv)
{
    struct scaling_options options;
    int code;
    if (scaling_options_parse(argc, argv, &options, &code))
        code = options_run(&options);
    step_profile_free(&options.step.profile);
    return code;
}
