/* The options of `shoal sim step`. */
#include "sim_step.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

enum option {
    OPTION_HELP = 1,
    OPTION_PROFILE,
    OPTION_BACKWARD,
    OPTION_FORWARD,
    OPTION_HOSTS,
    OPTION_FACTOR,
    OPTION_LOCAL,
    OPTION_BUFFER,
    OPTION_FIRST,
    OPTION_RANK_BYTES,
    OPTION_FLIGHT,
    OPTION_VIEWS,
    OPTION_TYPE,
    OPTION_OPTIMIZER,
    OPTION_WHEN,
    OPTION_SHARD,
    OPTION_CLIP,
    OPTION_UPDATE,
    OPTION_FORMAT,
    OPTION_PRINT
};

static const struct tool_option options_known[] = {
    {"--profile", OPTION_PROFILE, "LIST"},
    {"--backward", OPTION_BACKWARD, "LIST"},
    {"--forward", OPTION_FORWARD, "LIST"},
    {"--hosts", OPTION_HOSTS, "LIST"},
    {"--factor", OPTION_FACTOR, "N"},
    {"--ranks-per-host", OPTION_LOCAL, "L"},
    {"--buffer", OPTION_BUFFER, "SIZE"},
    {"--first", OPTION_FIRST, "SIZE"},
    {"--rank-bytes", OPTION_RANK_BYTES, "SIZE"},
    {"--flight", OPTION_FLIGHT, "SIZE"},
    {"--views", OPTION_VIEWS, NULL},
    {"--type", OPTION_TYPE, "TYPE"},
    {"--dtype", OPTION_TYPE, "TYPE"}, /* alias, as in other tools */
    {"--optimizer", OPTION_OPTIMIZER, STEP_RULE_WORDS},
    {"--when", OPTION_WHEN, STEP_WHEN_WORDS},
    {"--shard", OPTION_SHARD, STEP_SHARD_WORDS},
    {"--clip", OPTION_CLIP, STEP_CLIP_WORDS},
    {"--update", OPTION_UPDATE, "RATE"},
    SIM_MODEL_OPTIONS,
    {"--format", OPTION_FORMAT, "table|json|csv"},
    {"--print-profile", OPTION_PRINT, NULL},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

/* Lists as given, because other options that they depend on may come after them. */
struct lists {
    struct tool_args profile, backward, forward, hosts;
    int factor;
};

static bool size_read(const struct tool_args *args, size_t *bytes_out)
{
    return tool_size_read(args, bytes_out) && (*bytes_out > 0 || tool_value_fail(args, "a size above 0"));
}

static bool type_read(const struct tool_args *args, enum shoal_type *type_out)
{
    return tool_type_read(args, type_out) &&
           (*type_out == SHOAL_FLOAT32 || *type_out == SHOAL_BFLOAT16 || *type_out == SHOAL_FLOAT16 ||
            tool_value_fail(args, "float32, bfloat16 or float16"));
}

static bool optimizer_apply(int id, const struct tool_args *args, struct sim_step_options *options)
{
    switch (id) {
    case OPTION_TYPE:
        return type_read(args, &options->question.type);
    case OPTION_OPTIMIZER:
        return tool_word_read(args, step_rules, &options->optimizing.rule);
    case OPTION_WHEN:
        options->optimizing.has_when = true;
        return tool_word_read(args, step_whens, &options->optimizing.when);
    case OPTION_SHARD:
        return step_shard_read(args, &options->optimizing);
    case OPTION_CLIP:
        return tool_word_read(args, step_clips, &options->optimizing.clip);
    case OPTION_UPDATE:
        return sim_memory_read(args, &options->update_gb_s);
    default:
        return sim_model_apply(id, args, &options->question);
    }
}

static bool option_apply(int id, const struct tool_args *args, struct sim_step_options *options, struct lists *lists)
{
    switch (id) {
    case OPTION_PROFILE:
        lists->profile = *args;
        return true;
    case OPTION_BACKWARD:
        lists->backward = *args;
        return true;
    case OPTION_FORWARD:
        lists->forward = *args;
        return true;
    case OPTION_HOSTS:
        lists->hosts = *args;
        return true;
    case OPTION_FACTOR:
        return tool_number_read(args, 2, SIM_FACTOR_MAX, &lists->factor);
    case OPTION_LOCAL:
        return sim_count_read(args, 1, &options->question.ranks_per_host);
    case OPTION_BUFFER:
        return size_read(args, &options->buffer_bytes);
    case OPTION_FIRST:
        return size_read(args, &options->first_bytes);
    case OPTION_RANK_BYTES:
        return size_read(args, &options->rank_bytes);
    case OPTION_FLIGHT:
        return size_read(args, &options->flight_bytes);
    case OPTION_VIEWS:
        return options->has_views = true;
    case OPTION_FORMAT:
        return sim_format_read(args, &options->format);
    case OPTION_PRINT:
        return options->prints_profiles = true;
    case OPTION_HELP:
        return options->help = true;
    default:
        return optimizer_apply(id, args, options);
    }
}

/* ---- Lists --------------------------------------------------------------------------------------------------------------- */

/* Reads milliseconds, one number or one for each profile, as microseconds. */
static bool times_read(const struct tool_args *args, double least, int profiles, double *us_out)
{
    static const char takes[] = "milliseconds above 0, as 120 or 120,400.5: one number, or one for each profile";
    const char *at = args->value;
    int count = 0;
    bool is_more = true;
    for (; is_more && count < profiles; count++) {
        char *end;
        const double ms = strtod(at, &end);
        if (!isdigit((unsigned char)*at) || (*end && *end != ',') || !(ms >= least && ms <= 1e7))
            return tool_value_fail(args, takes);
        us_out[count] = ms * 1e3;
        is_more = *end == ',';
        at = end + is_more;
    }
    if (is_more || (count != 1 && count != profiles))
        return tool_value_fail(args, takes);
    for (; count < profiles; count++)
        us_out[count] = us_out[0];
    return true;
}

static bool profiles_read(const struct tool_args *args, struct sim_step_options *options, int *code_out)
{
    char text[4096], *next = text;
    if (strlen(args->value) >= sizeof text)
        return tool_value_fail(args, "a shorter list");
    strcpy(text, args->value);
    while (next) {
        const char *word = strsep(&next, ",");
        if (options->profile_count == SIM_STEP_PROFILES_MAX)
            return !tool_usage_fail("sim step", "%s takes %d profiles at most", args->name, SIM_STEP_PROFILES_MAX);
        const int code = step_profile_open(&options->profiles[options->profile_count], "sim step", word);
        if (code) {
            *code_out = code;
            return false;
        }
        options->profiles[options->profile_count].element_bytes = options->question.type == SHOAL_FLOAT32 ? 4 : 2;
        options->profile_count++;
    }
    return true;
}

/* Without --backward, the passes are those that were measured with the profiles. */
static bool passes_read(const struct lists *lists, struct sim_step_options *options)
{
    for (int p = 0; !lists->backward.value && p < options->profile_count; p++) {
        const struct step_facts *facts = &options->profiles[p].facts;
        if (!facts->is_there)
            return !tool_usage_fail("sim step", "how long is the backward pass? Such as: --backward 120, in milliseconds");
        options->backward_us[p] = 1e3 * facts->backward_ms;
        options->forward_us[p] = 1e3 * facts->forward_ms;
    }
    if (!lists->backward.value)
        return true;
    if (!times_read(&lists->backward, 1e-3, options->profile_count, options->backward_us))
        return false;
    for (int p = 0; p < options->profile_count; p++)
        options->forward_us[p] = options->backward_us[p] / 2;
    return true;
}

/* The defaults of the engine. */
enum { BUFFER_BYTES = 25 << 20, FLIGHT_BUFFERS = 4 };

static bool options_finish(struct sim_step_options *options, const struct lists *lists, int *code_out)
{
    struct tool_args all_hosts = {.command = "sim step", .name = "--hosts", .value = "1-256"};
    if (!lists->profile.value)
        return !tool_usage_fail("sim step", "which model? Such as: --profile resnet50");
    if (!step_optimizing_check(&options->optimizing, "sim step"))
        return false;
    if (options->optimizing.rule && options->question.pcie_gb_s > 0)
        return !tool_usage_fail("sim step", "--optimizer runs on the CPU: leave it or --pcie out");
    if (!profiles_read(&lists->profile, options, code_out))
        return false;
    if (options->prints_profiles)
        return true;
    if (!passes_read(lists, options))
        return false;
    if (lists->forward.value && !times_read(&lists->forward, 0, options->profile_count, options->forward_us))
        return false;
    options->question.shared = options->question.pcie_gb_s <= 0; /* the buffers are in host memory */
    if (!options->flight_bytes)
        options->flight_bytes = FLIGHT_BUFFERS * (options->buffer_bytes ? options->buffer_bytes : BUFFER_BYTES);
    return sim_hosts_read(lists->hosts.value ? &lists->hosts : &all_hosts, lists->factor, &options->hosts);
}

bool sim_step_options_parse(int argc, char **argv, struct sim_step_options *options_out, int *code_out)
{
    struct tool_args args = {.command = "sim step", .argc = argc, .argv = argv, .at = 1};
    struct lists lists = {.factor = SIM_FACTOR_USUAL};
    *options_out = (struct sim_step_options){.question = SHOAL_SIMULATION_INIT};
    options_out->question.ranks_per_host = 8;
    while (args.at < argc && !options_out->help) {
        const int id = tool_option_next(&args, options_known);
        if (id == TOOL_OPTION_BAD || (id > 0 && !option_apply(id, &args, options_out, &lists)))
            return false;
        if (id == TOOL_OPTION_END && args.at < argc)
            return !tool_usage_fail("sim step", "'%s' is not an option", argv[args.at]);
    }
    return options_out->help || options_finish(options_out, &lists, code_out);
}
