#include "step_rule.h"

#include <stdio.h>
#include <string.h>

const char *const step_rules[] = {"none", "sgd", "momentum", "adam", "adamw", "adagrad", "lion", "lamb", NULL};
const char *const step_whens[] = {"after", "buffers", NULL};
const char *const step_clips[] = {"none", "late", "early", NULL};

/* By enum step_rule. */
static const struct {
    enum shoal_optimizer_rule rule;
    size_t states;
} rules[] = {
    [STEP_RULE_NONE] = {SHOAL_SGD, 0},  [STEP_RULE_SGD] = {SHOAL_SGD, 0},     [STEP_RULE_MOMENTUM] = {SHOAL_SGD, 1},
    [STEP_RULE_ADAM] = {SHOAL_ADAM, 2}, [STEP_RULE_ADAMW] = {SHOAL_ADAMW, 2}, [STEP_RULE_ADAGRAD] = {SHOAL_ADAGRAD, 1},
    [STEP_RULE_LION] = {SHOAL_LION, 1}, [STEP_RULE_LAMB] = {SHOAL_LAMB, 2},
};

bool step_shard_read(const struct tool_args *args, struct step_optimizing *optimizing)
{
    optimizing->is_sharded = true;
    optimizing->degree = !strcmp(args->value, "host") ? SHOAL_DEGREE_HOST : 0;
    if (!strcmp(args->value, "host") || !strcmp(args->value, "all"))
        return true;
    return tool_number_read(args, 1, SHOAL_RANKS_MAX, &optimizing->degree);
}

bool step_optimizing_check(const struct step_optimizing *optimizing, const char *command)
{
    if ((optimizing->is_sharded || optimizing->has_when) && !optimizing->rule)
        return !tool_usage_fail(command, "which optimizer? Such as: --optimizer adamw --shard all");
    if (optimizing->is_sharded && optimizing->has_when)
        return !tool_usage_fail(command, "--when is for ranks that step all parameters: leave it or --shard out");
    if (optimizing->clip && !optimizing->is_sharded)
        return !tool_usage_fail(command, "--clip is for an optimizer in the reduction: add --shard all");
    if (optimizing->clip == STEP_CLIP_EARLY && optimizing->rule == STEP_RULE_LAMB)
        return !tool_usage_fail(command, "LAMB steps when all buffers are summed: use --clip late");
    return true;
}

const char *step_shard_name(const struct step_optimizing *optimizing)
{
    static char number[16];
    if (!optimizing->is_sharded)
        return "none";
    if (optimizing->degree <= 0)
        return optimizing->degree == SHOAL_DEGREE_HOST ? "host" : "all";
    snprintf(number, sizeof number, "%d", optimizing->degree);
    return number;
}

enum shoal_optimizer_rule step_rule_of(int rule)
{
    return rules[rule].rule;
}

size_t step_rule_states(int rule)
{
    return rules[rule].states;
}

static size_t type_bytes(enum shoal_type type)
{
    return type == SHOAL_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

size_t step_bytes_kept(const struct step_optimizing *optimizing, enum shoal_type type)
{
    const size_t states = rules[optimizing->rule].states;
    if (optimizing->rule == STEP_RULE_NONE)
        return 0;
    if (optimizing->clip == STEP_CLIP_EARLY)
        return type_bytes(type) + 2 * (1 + states) * sizeof(float);
    return ((type != SHOAL_FLOAT32) + states) * sizeof(float);
}

/* Gradient, states, master, and the parameter if that is not the master (src/fusion/codec/update_kernels.h). */
size_t step_bytes_stepped(const struct step_optimizing *optimizing, enum shoal_type type)
{
    const size_t unit = type_bytes(type);
    const bool has_master = type != SHOAL_FLOAT32 || optimizing->clip == STEP_CLIP_EARLY;
    if (optimizing->rule == STEP_RULE_NONE)
        return 0;
    return unit + (has_master ? unit : 0) + 2 * (1 + rules[optimizing->rule].states) * sizeof(float);
}

/* LAMB reads gradient, master and states, and writes the states. */
size_t step_bytes_measured(const struct step_optimizing *optimizing, enum shoal_type type)
{
    const size_t states = rules[optimizing->rule].states;
    return optimizing->rule == STEP_RULE_LAMB ? type_bytes(type) + (1 + 2 * states) * sizeof(float) : 0;
}

/* The squares of the gradient, and a copy of it for a second attempt. */
size_t step_bytes_summed(const struct step_optimizing *optimizing, enum shoal_type type)
{
    static const size_t passes[] = {[STEP_CLIP_NONE] = 0, [STEP_CLIP_LATE] = 1, [STEP_CLIP_EARLY] = 3};
    return passes[optimizing->clip] * type_bytes(type);
}
