#include "step_rule.h"

#include <stdio.h>
#include <string.h>

const char *const step_rules[] = {"none", "sgd", "momentum", "adam", "adamw", "adagrad", "lion", "lamb", NULL};
const char *const step_whens[] = {"after", "buffers", NULL};

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

size_t step_rule_bytes_kept(int rule, enum shoal_type type)
{
    const size_t masters = rule != STEP_RULE_NONE && type != SHOAL_FLOAT32;
    return (masters + rules[rule].states) * sizeof(float);
}

/* Gradient, states, master, and the parameter if that is not the master (src/fusion/codec/update_kernels.h). */
size_t step_rule_bytes_stepped(int rule, enum shoal_type type)
{
    const size_t unit = type_bytes(type), rounded = type == SHOAL_FLOAT32 ? 0 : unit;
    return rule == STEP_RULE_NONE ? 0 : unit + rounded + 2 * (1 + rules[rule].states) * sizeof(float);
}

/* LAMB reads gradient, master and states, and writes the states. */
size_t step_rule_bytes_measured(int rule, enum shoal_type type)
{
    return rule == STEP_RULE_LAMB ? type_bytes(type) + (1 + 2 * rules[rule].states) * sizeof(float) : 0;
}
