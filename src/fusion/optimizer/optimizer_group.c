#include "fusion/optimizer/optimizer_group.h"

#include <string.h>

#include "base/floats.h"

bool fusion_settings_are_set(const struct shoal_optimizer *optimizer)
{
    return optimizer->struct_bytes >= offsetof(struct shoal_optimizer, weights);
}

struct shoal_optimizer fusion_settings_copy(const struct shoal_optimizer *optimizer)
{
    struct shoal_optimizer copy = SHOAL_OPTIMIZER_INIT;
    if (fusion_settings_are_set(optimizer))
        memcpy(&copy, optimizer, fusion_min(optimizer->struct_bytes, sizeof copy));
    copy.struct_bytes = optimizer->struct_bytes;
    return copy;
}

bool fusion_group_is_set(const struct shoal_optimizer_group *group)
{
    return group && group->struct_bytes >= offsetof(struct shoal_optimizer_group, is_nesterov);
}

struct shoal_optimizer_group fusion_group_copy(const struct shoal_optimizer_group *group)
{
    struct shoal_optimizer_group copy = SHOAL_OPTIMIZER_GROUP_INIT;
    memcpy(&copy, group, fusion_min(group->struct_bytes, sizeof copy));
    copy.struct_bytes = sizeof copy;
    return copy;
}

/* ---- What is possible ---------------------------------------------------------------------------------------------------- */

/* Also false for NaN and infinity. */
static bool is_from_0(double x)
{
    return x >= 0 && x - x == 0;
}

static bool is_below_1(double x)
{
    return x >= 0 && x < 1;
}

static bool has_moments(enum shoal_optimizer_rule rule)
{
    return rule == SHOAL_ADAM || rule == SHOAL_ADAMW || rule == SHOAL_LION || rule == SHOAL_LAMB;
}

static const char *check_sgd(const struct shoal_optimizer_group *group)
{
    if (group->is_nesterov && (group->beta1 == 0 || group->dampening != 0))
        return "is_nesterov needs a momentum (beta1) and no dampening";
    return is_from_0(group->beta1) ? NULL : "the momentum (beta1) is negative or not finite";
}

const char *fusion_group_fault(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group)
{
    if (!is_from_0(group->rate))
        return "rate is negative or not finite";
    if (!is_from_0(group->decay))
        return "decay is negative or not finite";
    if (!is_from_0(group->epsilon))
        return "epsilon is negative or not finite";
    if (!is_from_0(group->rate_decay) || !is_from_0(group->initial))
        return "rate_decay or initial is negative or not finite";
    if (group->dampening - group->dampening != 0)
        return "dampening is not finite";
    if (has_moments(rule) && (!is_below_1(group->beta1) || !is_below_1(group->beta2)))
        return "beta1 or beta2 is not in [0, 1)";
    return rule == SHOAL_SGD ? check_sgd(group) : NULL;
}

/* ---- Rules --------------------------------------------------------------------------------------------------------------- */

enum shoal_rule fusion_group_rule(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group)
{
    switch (rule) {
    case SHOAL_ADAM:
        return SHOAL_RULE_ADAM;
    case SHOAL_ADAMW:
        return SHOAL_RULE_ADAMW;
    case SHOAL_ADAGRAD:
        return SHOAL_RULE_ADAGRAD;
    case SHOAL_LION:
        return SHOAL_RULE_LION;
    case SHOAL_LAMB:
        return SHOAL_RULE_LAMB;
    case SHOAL_SGD:
    default:
        return group->beta1 == 0 ? SHOAL_RULE_SGD : SHOAL_RULE_MOMENTUM;
    }
}

size_t fusion_rule_states(enum shoal_rule rule)
{
    static const size_t states[SHOAL_RULE_END] = {[SHOAL_RULE_MOMENTUM] = 1, [SHOAL_RULE_ADAM] = 2, [SHOAL_RULE_ADAMW] = 2,
                                                  [SHOAL_RULE_ADAGRAD] = 1,  [SHOAL_RULE_LION] = 1, [SHOAL_RULE_LAMB] = 2};
    return states[rule];
}

/* ---- The numbers of a step ----------------------------------------------------------------------------------------------- */

/* By squaring: the library does not link libm. */
static double power(double base, uint64_t exponent)
{
    double result = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1)
            result *= base;
    return result;
}

/* Kingma and Ba, 2015, algorithm 1: both moments begin at zero, so the first steps divide by 1 - beta^t. */
static void correct_bias(const struct shoal_optimizer_group *group, uint64_t steps, struct shoal_update *update)
{
    update->unbias = 1 / (1 - power(group->beta1, steps));
    update->rate = group->rate * update->unbias;
    update->root = 1 / fusion_square_root(1 - power(group->beta2, steps));
}

/* As PyTorch does, the first step sets the momentum to the gradient, without dampening. */
static void begin_momentum(uint64_t steps, struct shoal_update *update)
{
    if (steps > 1)
        return;
    update->keep1 = 0;
    update->add1 = 1;
}

struct shoal_update fusion_update_of(enum shoal_rule rule, const struct shoal_optimizer_group *group, uint64_t steps,
                                     double factor)
{
    SHOAL_DEFAULT_FLOATS;
    struct shoal_update update = {.factor = group->maximizes ? -factor : factor,
                                  .decay = group->decay,
                                  .shrink = 1 - group->rate * group->decay,
                                  .keep1 = group->beta1,
                                  .add1 = 1 - (rule == SHOAL_RULE_MOMENTUM ? group->dampening : group->beta1),
                                  .keep2 = group->beta2,
                                  .add2 = 1 - group->beta2,
                                  .beta1 = group->beta1,
                                  .rate = group->rate,
                                  .root = 1,
                                  .epsilon = group->epsilon,
                                  .is_nesterov = group->is_nesterov};
    if (rule == SHOAL_RULE_ADAM || rule == SHOAL_RULE_ADAMW || rule == SHOAL_RULE_LAMB)
        correct_bias(group, steps, &update);
    else if (rule == SHOAL_RULE_MOMENTUM)
        begin_momentum(steps, &update);
    else if (rule == SHOAL_RULE_ADAGRAD)
        update.rate = group->rate / (1 + (double)(steps - 1) * group->rate_decay);
    return update;
}

/* You et al., 2020 (arXiv 1904.00962), algorithm 2, with the identity for phi. A norm of zero counts as 1 / 1. */
void fusion_trust(const struct shoal_optimizer_group *group, const double squared[2], struct shoal_update *update)
{
    SHOAL_DEFAULT_FLOATS;
    double ratio = 1;
    if (squared[0] > 0 && squared[1] > 0)
        ratio = fusion_square_root(squared[0]) / fusion_square_root(squared[1]);
    update->rate = group->rate * ratio;
}

void fusion_group_list(const struct shoal_optimizer_group *group, struct fusion_setting settings[FUSION_GROUP_SETTINGS])
{
    const struct fusion_setting all[FUSION_GROUP_SETTINGS] = {
        {"rate", group->rate},
        {"decay", group->decay},
        {"beta1", group->beta1},
        {"beta2", group->beta2},
        {"epsilon", group->epsilon},
        {"dampening", group->dampening},
        {"rate_decay", group->rate_decay},
        {"initial", group->initial},
        {"is_nesterov", group->is_nesterov},
        {"maximizes", group->maximizes},
    };
    memcpy(settings, all, sizeof all);
}
