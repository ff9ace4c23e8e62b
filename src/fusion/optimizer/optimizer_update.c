/* A step of one range, without a reducer. */
#include <stddef.h>

#include "fusion/codec/gradient_kernels.h"
#include "fusion/optimizer/optimizer_group.h"

static bool has_arrays(const struct shoal_optimizer_range *range, enum shoal_rule rule)
{
    const size_t states = fusion_rule_states(rule);
    const bool needs_master = range->type == SHOAL_BFLOAT16 || range->type == SHOAL_FLOAT16;
    return range->gradient && range->parameter && (range->master || !needs_master) && (range->first || states < 1) &&
           (range->second || states < 2);
}

static bool is_real(enum shoal_type type)
{
    return type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64 || type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
}

enum shoal_status shoal_optimizer_update(enum shoal_optimizer_rule rule, const struct shoal_optimizer_group *group,
                                         uint64_t step, double scale, const struct shoal_optimizer_range *range)
{
    if (rule < SHOAL_SGD || rule > SHOAL_LAMB || !fusion_group_is_set(group) || step == 0)
        return SHOAL_ERR_ARGUMENT;
    const struct shoal_optimizer_group settings = fusion_group_copy(group);
    if (fusion_group_fault(rule, &settings) || !range || range->struct_bytes < sizeof *range || !is_real(range->type))
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_rule own = fusion_group_rule(rule, &settings);
    if (range->count == 0)
        return SHOAL_OK; /* arrays may be NULL */
    if (!has_arrays(range, own))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_update update = fusion_update_of(own, &settings, step, scale);
    void *master = range->master ? range->master : range->parameter;
    const struct shoal_update_memory memory = {.gradient = range->gradient,
                                               .from_master = master,
                                               .from = {range->first, range->second},
                                               .to_master = master,
                                               .to = {range->first, range->second},
                                               .parameter = range->parameter};
    if (own == SHOAL_RULE_LAMB) {
        double squared[2] = {0, 0};
        shoal_gradient_kernels_at(0)->moments[range->type](&update, &memory, range->count, squared);
        fusion_trust(&settings, squared, &update);
    }
    shoal_gradient_kernels_at(0)->update[own][range->type](&update, &memory, range->count);
    return SHOAL_OK;
}
