/* `shoal sim pipeline`: makes schedules of a pipeline of equal stages, and tells how long a step takes with each. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/pipeline_draw.h"
#include "sim.h"
#include "sim_pipeline_hosts.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal sim pipeline [options]\n"
    "\n"
    "A pipeline cuts a model into stages, which ranks compute one after the other, for several microbatches at a time. The\n"
    "schedule is the order of these computations; the time in which a rank waits is the bubble. This command makes schedules\n"
    "for equal stages, checks them, and tells for each the time of a step, the bubble, and the memory.\n"
    "\n"
    "    --stages N             ranks, each with an equal part of the model (4)\n"
    "    --microbatches N       microbatches of a step (twice the ranks)\n"
    "    --forward TIME         one microbatch on one rank, such as 18.5ms or 300us (1ms)\n"
    "    --input-grad TIME      its backward pass, as far as the rank before it waits for that (as --forward)\n"
    "    --weight-grad TIME     the rest of it (as --forward)\n"
    "    --transfer TIME        of activations to another rank, beside the computation (0)\n"
    "    --bytes SIZE           of these activations, and of their gradients: transfers then take what the model of hosts\n"
    "                           predicts, within a host and between hosts, instead of --transfer\n"
    "    --hosts N              hosts of neighboring ranks, for --bytes (as many as --ranks-per-host needs, or 1)\n"
    "    --ranks-per-host L     ranks on each host (all ranks divided by the hosts)\n"
    "    --rate RATE            and --latency, --message-us, --stack, --header: of messages between hosts, as for shoal sim\n"
    "    --memory RATE          and --signal-us: of messages within a host, as for shoal sim; a message is copied once\n"
    "    --schedule LIST        gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, v-min, v-half, v-zb, auto: the\n"
    "                           shortest step within --activations, or all (all)\n"
    "    --stages-per-rank N    for interleaved and breadth-first (2)\n"
    "    --activations N        most microbatches whose activations a rank may keep (what each schedule needs)\n"
    "    --kept-share X         share of them that is kept until the weight gradient (1)\n"
    "    --replicas LIST        ranks that share the work of each of --stages, each with a part of every microbatch, such as\n"
    "                           2,1,1,2 (1)\n"
    "    --sum-replicas TIME    sum of the gradients of a rank with replicas, beside the computation (0)\n"
    "    --tie                  the first and the last stage share parameters, whose gradients are summed\n"
    "    --sum-tied TIME        that sum, beside the computation (0)\n"
    "    --update TIME          the optimizer's step of a rank's parameters, behind its sums (0)\n"
    "    --recompute            every stage keeps only its inputs, and repeats its forward pass before its backward pass\n"
    "    --shorten step|span    what zb-* and v-* shorten: from the first action of all ranks to the last one, or the longest\n"
    "                           time of one rank. The span counts if the ranks need not wait for each other at the end of a\n"
    "                           step (step)\n"
    "    --read FILE            a schedule in torch's CSV form instead, or - for standard input\n"
    "    --slots N              check that no rank waits for ever if each stage holds N microbatches that have arrived\n"
    "    --csv FILE             write the schedule in that form: torch.distributed.pipelining runs it, unless it has our own\n"
    "                           actions: R repeats a forward pass, S and T begin sums, U updates; x2 is a rank of two "
    "replicas\n"
    "    --plot FILE            draw it, as SVG\n"
    "    --trace FILE           write it for chrome://tracing and Perfetto\n"
    "    --format table|json|csv  json: one object per line (table)\n"
    "\n"
    "Columns: step and span as above; bubble: the share of either in which a rank waits, on average; activations: most\n"
    "microbatches that a rank keeps; slots: fewest microbatches for which each stage needs room.\n"
    "\n"
    "Examples:\n"
    "    shoal sim pipeline --stages 8 --microbatches 24\n"
    "    shoal sim pipeline --stages 8 --microbatches 24 --schedule auto --activations 5 --plot schedule.svg\n"
    "    shoal sim pipeline --stages 8 --microbatches 24 --forward 18.522ms --input-grad 18.086ms --weight-grad 9.337ms \\\n"
    "                       --transfer 0.601ms --schedule zb-h2 --kept-share 0.5 --shorten span\n"
    "    shoal sim pipeline --stages 2 --replicas 3,1 --sum-replicas 5ms --update 1ms --schedule 1f1b --csv schedule.csv\n"
    "    shoal sim pipeline --stages 8 --forward 4ms --bytes 16M --hosts 2 --rate 100gbit --memory 20GB/s\n"
    "    shoal sim pipeline --read torch.csv --slots 2\n"
    "\n"
    "Exit codes: 0 success, 1 failure, as for a schedule with a fault, 2 invalid arguments.\n";

/* A schedule with its times. */
struct sim_pipeline_row {
    const char *name; /* a kind's or a file's */
    struct shoal_schedule *schedule;
    struct shoal_stage_costs costs;        /* in microseconds */
    struct sim_pipeline_hosts hosts;       /* on which its ranks are */
    struct shoal_stage_costs *stage_costs; /* one for each stage, on one replica */
    struct shoal_schedule_times times;
    uint32_t slots;
};

enum { TEXT = 600, KINDS = SHOAL_SCHEDULE_AUTO + 1, ALL = KINDS };

enum option {
    OPTION_HELP = 1,
    OPTION_STAGES,
    OPTION_MICROBATCHES,
    OPTION_FORWARD,
    OPTION_INPUT,
    OPTION_WEIGHT,
    OPTION_TRANSFER,
    OPTION_SCHEDULE,
    OPTION_PER_RANK,
    OPTION_ACTIVATIONS,
    OPTION_SHARE,
    OPTION_RECOMPUTE,
    OPTION_REPLICAS,
    OPTION_SUM_REPLICAS,
    OPTION_TIE,
    OPTION_SUM_TIED,
    OPTION_UPDATE,
    OPTION_SHORTEN,
    OPTION_READ,
    OPTION_SLOTS,
    OPTION_CSV,
    OPTION_PLOT,
    OPTION_TRACE,
    OPTION_FORMAT
};

static const struct tool_option options_known[] = {
    {"--stages", OPTION_STAGES, "N"},
    {"--microbatches", OPTION_MICROBATCHES, "N"},
    {"--forward", OPTION_FORWARD, "TIME"},
    {"--input-grad", OPTION_INPUT, "TIME"},
    {"--weight-grad", OPTION_WEIGHT, "TIME"},
    {"--transfer", OPTION_TRANSFER, "TIME"},
    SIM_PIPELINE_HOSTS_OPTIONS,
    {"--schedule", OPTION_SCHEDULE, "LIST"},
    {"--stages-per-rank", OPTION_PER_RANK, "N"},
    {"--activations", OPTION_ACTIVATIONS, "N"},
    {"--kept-share", OPTION_SHARE, "X"},
    {"--recompute", OPTION_RECOMPUTE, NULL},
    {"--replicas", OPTION_REPLICAS, "LIST"},
    {"--sum-replicas", OPTION_SUM_REPLICAS, "TIME"},
    {"--tie", OPTION_TIE, NULL},
    {"--sum-tied", OPTION_SUM_TIED, "TIME"},
    {"--update", OPTION_UPDATE, "TIME"},
    {"--shorten", OPTION_SHORTEN, "step|span"},
    {"--read", OPTION_READ, "FILE"},
    {"--slots", OPTION_SLOTS, "N"},
    {"--csv", OPTION_CSV, "FILE"},
    {"--plot", OPTION_PLOT, "FILE"},
    {"--trace", OPTION_TRACE, "FILE"},
    {"--format", OPTION_FORMAT, "table|json|csv"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

struct pipeline_options {
    bool help;
    struct shoal_schedule_options question; /* without the kind; times in microseconds, below 0: as the forward pass */
    bool is_wanted[KINDS];
    bool has_activations, has_transfer;
    bool recompute, tie;
    struct sim_pipeline_hosts hosts;
    const char *replicas; /* a list of numbers, or NULL */
    const char *read;
    struct pipeline_drawing drawing;
    int slots; /* 0: not to be checked */
    enum sim_format format;
};

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

static bool count_read(const struct tool_args *args, int least, uint32_t *count_out)
{
    int number = 0;
    const bool is_good = tool_number_read(args, least, 65536, &number);
    *count_out = (uint32_t)number;
    return is_good;
}

static bool amount_read(const struct tool_args *args, double least, double most, const char *takes, double *amount_out)
{
    char *end;
    *amount_out = strtod(args->value, &end);
    return (end != args->value && !*end && *amount_out >= least && *amount_out <= most) || tool_value_fail(args, takes);
}

static bool kinds_read(const struct tool_args *args, bool is_wanted[KINDS])
{
    const char *words[KINDS + 2];
    char text[256], *next = text;
    for (int kind = 0; kind < KINDS; kind++)
        words[kind] = shoal_schedule_name((enum shoal_schedule_kind)kind);
    words[ALL] = "all";
    words[ALL + 1] = NULL;
    if (snprintf(text, sizeof text, "%s", args->value) >= (int)sizeof text)
        return tool_value_fail(args, "a shorter list");
    memset(is_wanted, 0, KINDS * sizeof *is_wanted);
    while (next) {
        struct tool_args word = *args;
        int kind;
        word.value = strsep(&next, ",");
        if (!tool_word_read(&word, words, &kind))
            return false;
        for (int k = 0; k < KINDS; k++)
            is_wanted[k] |= k == kind || (kind == ALL && k != SHOAL_SCHEDULE_AUTO);
    }
    return true;
}

static bool shorten_read(const struct tool_args *args, int *shortens_span_out)
{
    static const char *const words[] = {"step", "span", NULL};
    return tool_word_read(args, words, shortens_span_out);
}

static bool question_apply(int id, const struct tool_args *args, struct pipeline_options *options)
{
    struct shoal_schedule_options *question = &options->question;
    switch (id) {
    case OPTION_STAGES:
        return count_read(args, 1, &question->ranks);
    case OPTION_MICROBATCHES:
        return count_read(args, 1, &question->microbatches);
    case OPTION_FORWARD:
        return tool_time_read(args, &question->costs.forward);
    case OPTION_INPUT:
        return tool_time_read(args, &question->costs.input_gradient);
    case OPTION_WEIGHT:
        return tool_time_read(args, &question->costs.weight_gradient);
    case OPTION_TRANSFER:
        options->has_transfer = true;
        return tool_time_read(args, &question->costs.transfer);
    case OPTION_SUM_REPLICAS:
        return tool_time_read(args, &question->costs.sum_replicas);
    case OPTION_SUM_TIED:
        return tool_time_read(args, &question->costs.sum_tied);
    case OPTION_UPDATE:
        return tool_time_read(args, &question->costs.update);
    case OPTION_PER_RANK:
        return count_read(args, 2, &question->stages_per_rank);
    case OPTION_ACTIVATIONS:
        options->has_activations = true;
        return amount_read(args, 1e-9, 1e9, "a number above 0", &question->activations);
    case OPTION_SHARE:
        return amount_read(args, 0, 1, "a number from 0 to 1", &question->kept_share);
    default:
        return shorten_read(args, &question->shortens_span);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct pipeline_options *options)
{
    switch (id) {
    case OPTION_HELP:
        return options->help = true;
    case OPTION_RECOMPUTE:
        return options->recompute = true;
    case OPTION_TIE:
        return options->tie = true;
    case OPTION_REPLICAS:
        options->replicas = args->value;
        return true;
    case OPTION_SCHEDULE:
        return kinds_read(args, options->is_wanted);
    case OPTION_READ:
        options->read = args->value;
        return true;
    case OPTION_SLOTS:
        return tool_number_read(args, 1, 65536, &options->slots);
    case OPTION_CSV:
        options->drawing.csv = args->value;
        return true;
    case OPTION_PLOT:
        options->drawing.plot = args->value;
        return true;
    case OPTION_TRACE:
        options->drawing.trace = args->value;
        return true;
    case OPTION_FORMAT:
        return sim_format_read(args, &options->format);
    default:
        return id >= SIM_OPTION_RATE ? sim_pipeline_hosts_apply(id, args, &options->hosts) : question_apply(id, args, options);
    }
}

static int wanted_count(const struct pipeline_options *options)
{
    int count = 0;
    for (int kind = 0; kind < KINDS; kind++)
        count += options->is_wanted[kind];
    return count;
}

/* Orders are searched for the longest transfer. */
static double longest_transfer(const struct sim_pipeline_hosts *hosts)
{
    const bool is_one = hosts->hosts == 1 || (!hosts->hosts && !hosts->ranks_per_host);
    const double within = sim_pipeline_within_us(hosts, (double)hosts->bytes);
    const double between = sim_pipeline_between_us(hosts, (double)hosts->bytes);
    if (is_one || (hosts->ranks_per_host != 1 && within > between))
        return within;
    return between;
}

static bool hosts_finish(struct pipeline_options *options)
{
    struct sim_pipeline_hosts *hosts = &options->hosts;
    if (!hosts->bytes && (hosts->hosts || hosts->ranks_per_host || hosts->has_network))
        return !tool_usage_fail("sim pipeline",
                                "--hosts and the model's options are for --bytes, which are sent between stages");
    if (hosts->bytes && options->has_transfer)
        return !tool_usage_fail("sim pipeline", "--transfer and --bytes both set the times of transfers: give one of them");
    if (hosts->bytes)
        options->question.costs.transfer = longest_transfer(hosts);
    return true;
}

static bool options_finish(struct pipeline_options *options)
{
    struct shoal_schedule_options *question = &options->question;
    struct shoal_stage_costs *costs = &question->costs;
    if (!options->read && pipeline_is_drawn(&options->drawing) && wanted_count(options) != 1)
        return !tool_usage_fail("sim pipeline", "--csv, --plot and --trace are for one schedule: choose one with --schedule");
    if (!hosts_finish(options))
        return false;
    if (!question->microbatches)
        question->microbatches = 2 * question->ranks;
    costs->input_gradient = costs->input_gradient < 0 ? costs->forward : costs->input_gradient;
    costs->weight_gradient = costs->weight_gradient < 0 ? costs->forward : costs->weight_gradient;
    return costs->forward + costs->input_gradient + costs->weight_gradient > 0 ||
           !tool_usage_fail("sim pipeline", "a microbatch takes no time: give one of --forward, --input-grad, --weight-grad");
}

static bool options_parse(int argc, char **argv, struct pipeline_options *options)
{
    struct tool_args args = {.command = "sim pipeline", .argc = argc, .argv = argv, .at = 1};
    *options = (struct pipeline_options){.question = SHOAL_SCHEDULE_OPTIONS_INIT, .drawing = {.command = "sim pipeline"}};
    options->hosts.model = (struct shoal_simulation)SHOAL_SIMULATION_INIT;
    options->question.ranks = 4;
    options->question.costs = (struct shoal_stage_costs){1e3, -1, -1, 0, 0, 0, 0};
    for (int kind = 0; kind < SHOAL_SCHEDULE_AUTO; kind++)
        options->is_wanted[kind] = true;
    while (args.at < argc && !options->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_apply(id, &args, options)))
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("sim pipeline", "'%s' is not an option", argv[args.at]);
    }
    return options->help || options_finish(options);
}

/* ---- A schedule ---------------------------------------------------------------------------------------------------------- */

/* Puts a changed copy in the place of a schedule. */
static void schedule_replace(struct shoal_schedule **schedule, struct shoal_schedule *copy)
{
    shoal_schedule_free(*schedule);
    *schedule = copy;
}

/* Reads as many numbers as there are ranks. Returns false if the list is another one. */
static bool replicas_read(const char *list, uint32_t ranks, uint32_t *replicas)
{
    uint32_t read = 0;
    for (char *end; *list && read < ranks; list = *end ? end + 1 : end) {
        const unsigned long number = strtoul(list, &end, 10);
        if (end == list || (*end && *end != ',') || (*end && !end[1]) || number < 1 || number > 65536)
            return false;
        replicas[read++] = (uint32_t)number;
    }
    return read == ranks && !*list;
}

static enum shoal_status schedule_replicate(const struct pipeline_options *options, struct shoal_schedule **schedule,
                                            char *text)
{
    const uint32_t ranks = shoal_schedule_ranks(*schedule);
    struct shoal_schedule *copy = NULL;
    uint32_t *const replicas = calloc(ranks, sizeof *replicas);
    enum shoal_status status = replicas ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK && !replicas_read(options->replicas, ranks, replicas)) {
        snprintf(text, TEXT, "--replicas must be %u numbers from 1 to 65536, not \"%s\"", ranks, options->replicas);
        status = SHOAL_ERR_ARGUMENT;
    }
    if (status == SHOAL_OK)
        status = shoal_schedule_replicate(*schedule, replicas, &copy);
    if (status == SHOAL_OK)
        schedule_replace(schedule, copy);
    free(replicas);
    return status;
}

/* Adds sums and updates that the options ask for, or that replicas need. */
static enum shoal_status schedule_add_sums(const struct pipeline_options *options, struct shoal_schedule **schedule, char *text)
{
    const uint32_t last = shoal_schedule_stages(*schedule) - 1;
    const struct shoal_tied_stage ends[] = {{0, 0}, {0, last}};
    const bool is_far = shoal_schedule_rank_of(*schedule, 0) != shoal_schedule_rank_of(*schedule, last);
    const bool updates = options->question.costs.update > 0;
    struct shoal_schedule *copy = NULL;
    if (options->tie && last == 0)
        snprintf(text, TEXT, "--tie needs a first and a last stage");
    if (*text)
        return SHOAL_ERR_ARGUMENT;
    if (!options->tie && !updates && shoal_schedule_size(*schedule) == shoal_schedule_ranks(*schedule))
        return SHOAL_OK;
    const enum shoal_status status =
        shoal_schedule_add_sums(*schedule, ends, options->tie && is_far ? 2 : 0, 0, updates, &copy);
    if (status == SHOAL_OK)
        schedule_replace(schedule, copy);
    return status;
}

/* Changes a schedule as the options ask. */
static enum shoal_status schedule_finish(const struct pipeline_options *options, struct shoal_schedule **schedule, char *text)
{
    struct shoal_schedule *copy = NULL;
    enum shoal_status status = SHOAL_OK;
    if (options->recompute) {
        status = shoal_schedule_recompute(*schedule, NULL, &copy);
        if (status == SHOAL_OK)
            schedule_replace(schedule, copy);
    }
    if (status == SHOAL_OK && options->replicas)
        status = schedule_replicate(options, schedule, text);
    return status == SHOAL_OK && !options->read ? schedule_add_sums(options, schedule, text) : status;
}

static void row_free(struct sim_pipeline_row *row)
{
    shoal_schedule_free(row->schedule);
    free(row->stage_costs);
}

/* Finds the times of all stages, and of a step. */
static enum shoal_status row_predict(const struct pipeline_options *options, struct sim_pipeline_row *row, char *text)
{
    row->hosts = options->hosts;
    if (!sim_pipeline_hosts_place(&row->hosts, shoal_schedule_size(row->schedule), text, TEXT))
        return SHOAL_ERR_ARGUMENT;
    row->stage_costs = calloc(shoal_schedule_stages(row->schedule), sizeof *row->stage_costs);
    if (!row->stage_costs)
        return SHOAL_ERR_MEMORY;
    enum shoal_status status = sim_pipeline_stage_costs(&row->hosts, row->schedule, &row->costs, row->stage_costs);
    if (status == SHOAL_OK)
        status = shoal_schedule_time_stages(row->schedule, row->stage_costs, options->question.kept_share, &row->times, NULL);
    return status;
}

static int row_time(const struct pipeline_options *options, struct sim_pipeline_row *row)
{
    char text[TEXT] = "";
    row->times = (struct shoal_schedule_times)SHOAL_SCHEDULE_TIMES_INIT;
    row->costs = options->question.costs;
    enum shoal_status status = schedule_finish(options, &row->schedule, text);
    if (status == SHOAL_OK)
        status = row_predict(options, row, text);
    const bool is_usage = status == SHOAL_ERR_ARGUMENT;
    if (status == SHOAL_OK)
        status = shoal_schedule_slots(row->schedule, &row->slots);
    if (status == SHOAL_OK && options->slots)
        status = shoal_schedule_check(row->schedule, (uint32_t)options->slots, text, sizeof text);
    if (status != SHOAL_OK)
        fprintf(stderr, "shoal sim pipeline: %s: %s\n", row->name, *text ? text : shoal_status_text(status));
    return status == SHOAL_OK ? 0 : is_usage ? TOOL_EXIT_USAGE : 1;
}

/* Makes a schedule of one kind. If the kind is impossible with these numbers, *is_there_out is false; that is an error only if
 * no other kind is wanted. */
static int row_make(const struct pipeline_options *options, enum shoal_schedule_kind kind, struct sim_pipeline_row *row,
                    bool *is_there_out)
{
    struct shoal_schedule_options question = options->question;
    char text[TEXT] = "";
    question.kind = kind;
    if (kind != SHOAL_SCHEDULE_INTERLEAVED && kind != SHOAL_SCHEDULE_BREADTH_FIRST && kind != SHOAL_SCHEDULE_AUTO)
        question.stages_per_rank = 0;
    *row = (struct sim_pipeline_row){.name = shoal_schedule_name(kind)};
    /* The order is chosen for backward passes that take that much longer. */
    question.costs.input_gradient += options->recompute ? question.costs.forward : 0;
    const enum shoal_status status = shoal_schedule_create(&question, &row->schedule, text, sizeof text);
    *is_there_out = status == SHOAL_OK;
    if (status == SHOAL_OK)
        return row_time(options, row);
    fprintf(stderr, "shoal sim pipeline: %s%s: %s\n", wanted_count(options) > 1 ? "without " : "", row->name, text);
    return wanted_count(options) > 1 && status == SHOAL_ERR_ARGUMENT ? 0 : TOOL_EXIT_USAGE;
}

/* Reads a whole stream. Returns NULL after printing one line. */
static char *stream_read(FILE *in, const char *name, size_t *bytes_out)
{
    char *bytes = NULL;
    size_t used = 0, room = 0, got = 1;
    while (got > 0) {
        if (room - used < 4096) {
            char *more = realloc(bytes, room += room / 2 + 65536);
            if (!more)
                break;
            bytes = more;
        }
        got = fread(bytes + used, 1, room - used, in);
        used += got;
    }
    *bytes_out = used;
    if (got == 0 && !ferror(in))
        return bytes;
    fprintf(stderr, "shoal sim pipeline: cannot read %s: %s\n", name, got ? "no memory" : strerror(errno));
    free(bytes);
    return NULL;
}

static int row_read(const struct pipeline_options *options, struct sim_pipeline_row *row)
{
    const bool is_stdin = !strcmp(options->read, "-");
    FILE *in = is_stdin ? stdin : fopen(options->read, "re");
    char text[TEXT] = "";
    size_t count = 0;
    *row = (struct sim_pipeline_row){.name = is_stdin ? "standard input" : options->read};
    if (!in) {
        fprintf(stderr, "shoal sim pipeline: cannot read %s: %s\n", row->name, strerror(errno));
        return 1;
    }
    char *bytes = stream_read(in, row->name, &count);
    if (!is_stdin)
        fclose(in);
    if (!bytes)
        return 1;
    const enum shoal_status status = shoal_schedule_read(bytes, count, &row->schedule, text, sizeof text);
    free(bytes);
    if (status == SHOAL_OK)
        return row_time(options, row);
    fprintf(stderr, "shoal sim pipeline: %s: %s\n", row->name, text);
    return 1;
}

/* ---- Output -------------------------------------------------------------------------------------------------------------- */

static void hosts_print(const struct sim_pipeline_row *row)
{
    const struct sim_pipeline_hosts *hosts = &row->hosts;
    char size[24];
    if (hosts->bytes)
        printf("# %zu host%s of %zu rank%s; ms for %s: %g within a host, %g between hosts\n", hosts->hosts,
               hosts->hosts == 1 ? "" : "s", hosts->ranks_per_host, hosts->ranks_per_host == 1 ? "" : "s",
               sim_size_print((double)hosts->bytes, size), sim_pipeline_within_us(hosts, (double)hosts->bytes) / 1e3,
               sim_pipeline_between_us(hosts, (double)hosts->bytes) / 1e3);
}

static void header_print(const struct pipeline_options *options, const struct sim_pipeline_row *row)
{
    const struct shoal_stage_costs *costs = &row->costs;
    if (options->format == SIM_CSV)
        puts(
            "schedule,ranks,stages,microbatches,forward_us,input_gradient_us,weight_gradient_us,transfer_us,kept_share,step_us,"
            "bubble,span_us,span_bubble,peak_activations,slots,bytes,hosts,ranks_per_host,within_host_us,between_hosts_us");
    if (options->format != SIM_TABLE)
        return;
    printf("# %u ranks, %u microbatches\n", shoal_schedule_ranks(row->schedule), shoal_schedule_microbatches(row->schedule));
    printf("# ms of one on a rank: forward %g, input gradient %g, weight gradient %g", costs->forward / 1e3,
           costs->input_gradient / 1e3, costs->weight_gradient / 1e3);
    if (row->hosts.bytes)
        putchar('\n');
    else
        printf("; transfer %g\n", costs->transfer / 1e3);
    hosts_print(row);
    printf("%-14s %6s %10s %8s %10s %8s %12s %6s\n", "schedule", "stages", "step/ms", "bubble", "span/ms", "bubble",
           "activations", "slots");
}

static void row_print(const struct pipeline_options *options, const struct sim_pipeline_row *row)
{
    const struct shoal_schedule *schedule = row->schedule;
    const double bytes = (double)row->hosts.bytes;
    const struct sim_field fields[] = {
        {"schedule", row->name, 0},
        {"ranks", NULL, shoal_schedule_ranks(schedule)},
        {"stages", NULL, shoal_schedule_stages(schedule)},
        {"microbatches", NULL, shoal_schedule_microbatches(schedule)},
        {"forward_us", NULL, row->costs.forward},
        {"input_gradient_us", NULL, row->costs.input_gradient},
        {"weight_gradient_us", NULL, row->costs.weight_gradient},
        {"transfer_us", NULL, row->costs.transfer},
        {"kept_share", NULL, options->question.kept_share},
        {"step_us", NULL, row->times.step},
        {"bubble", NULL, row->times.bubble},
        {"span_us", NULL, row->times.span},
        {"span_bubble", NULL, row->times.span_bubble},
        {"peak_activations", NULL, row->times.activations},
        {"slots", NULL, row->slots},
        {"bytes", NULL, bytes},
        {"hosts", NULL, (double)row->hosts.hosts},
        {"ranks_per_host", NULL, (double)row->hosts.ranks_per_host},
        {"within_host_us", NULL, bytes > 0 ? sim_pipeline_within_us(&row->hosts, bytes) : row->costs.transfer},
        {"between_hosts_us", NULL, bytes > 0 ? sim_pipeline_between_us(&row->hosts, bytes) : row->costs.transfer},
    };
    if (options->format == SIM_TABLE)
        printf("%-14s %6u %10.3f %7.2f%% %10.3f %7.2f%% %12.4g %6u\n", row->name, shoal_schedule_stages(schedule),
               row->times.step / 1e3, 100 * row->times.bubble, row->times.span / 1e3, 100 * row->times.span_bubble,
               row->times.activations, row->slots);
    else
        sim_fields_print(fields, sizeof fields / sizeof fields[0], options->format == SIM_JSON);
    fflush(stdout);
}

static int files_write(const struct pipeline_options *options, const struct sim_pipeline_row *row)
{
    return pipeline_draw(&options->drawing, row->name, row->schedule, row->stage_costs) ? 0 : 1;
}

static int file_show(const struct pipeline_options *options)
{
    struct sim_pipeline_row row;
    int code = row_read(options, &row);
    if (code == 0) {
        header_print(options, &row);
        row_print(options, &row);
        code = files_write(options, &row);
    }
    row_free(&row);
    return code;
}

static int kinds_show(const struct pipeline_options *options)
{
    int code = 0;
    bool has_header = false;
    for (int kind = 0; kind < KINDS && code == 0; kind++) {
        struct sim_pipeline_row row;
        bool is_there;
        if (!options->is_wanted[kind])
            continue;
        code = row_make(options, (enum shoal_schedule_kind)kind, &row, &is_there);
        if (code == 0 && is_there) {
            if (!has_header)
                header_print(options, &row);
            has_header = true;
            row_print(options, &row);
            code = files_write(options, &row);
        }
        row_free(&row);
    }
    return code;
}

int sim_pipeline_run(int argc, char **argv)
{
    struct pipeline_options options;
    if (!options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.help) {
        fputs(help_text, stdout);
        return tool_output_finish("sim pipeline", 0);
    }
    return tool_output_finish("sim pipeline", options.read ? file_show(&options) : kinds_show(&options));
}
