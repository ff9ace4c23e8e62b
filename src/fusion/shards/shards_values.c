/* Settings of sharded parameters, and their values for checkpoints. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/shards/shards_state.h"

/* ---- Settings ------------------------------------------------------------------------------------------------------------ */

enum shoal_status shoal_shards_set_group(struct shoal_shards *shards, size_t group,
                                         const struct shoal_optimizer_group *settings)
{
    static const char call[] = "shoal_shards_set_group";
    FUSION_TRY(shards_check(shards));
    if (group >= shards->group_count || !fusion_group_is_set(settings))
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT,
                             "%s: group %zu is out of range (there are %zu), or struct_bytes is not set", call, group,
                             shards->group_count);
    const struct shoal_optimizer_group copy = fusion_group_copy(settings);
    const char *fault = fusion_group_fault(shards->rule, &copy);
    if (fault)
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "%s: group %zu: %s", call, group, fault);
    if (fusion_group_rule(shards->rule, &copy) != fusion_group_rule(shards->rule, &shards->groups[group]))
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT,
                             "%s: group %zu: the momentum (beta1) may not become zero, or stop being zero", call, group);
    shards->groups[group] = copy;
    return SHOAL_OK;
}

enum shoal_status shoal_shards_set_gradient_scale(struct shoal_shards *shards, double scale)
{
    FUSION_TRY(shards_check(shards));
    if (!(scale > 0) || scale - scale != 0)
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "shoal_shards_set_gradient_scale: %g is not a positive number", scale);
    if (shards->loss.scale > 0)
        return shards_refuse(
            shards, SHOAL_ERR_STATE,
            "shoal_shards_set_gradient_scale: gradients are divided by the optimizer's loss scale: leave one of "
            "them out");
    shards->scale = scale;
    return SHOAL_OK;
}

double shoal_shards_loss_scale(const struct shoal_shards *shards, uint32_t *finite_steps_out)
{
    if (finite_steps_out)
        *finite_steps_out = shards ? shards->loss.finite_steps : 0;
    return shards ? (double)shards->loss.scale : 0;
}

enum shoal_status shoal_shards_set_loss_scale(struct shoal_shards *shards, double scale, uint32_t finite_steps)
{
    static const char call[] = "shoal_shards_set_loss_scale";
    FUSION_TRY(shards_check_between(shards, call));
    if (shards->loss.scale == 0)
        return shards_refuse(shards, SHOAL_ERR_STATE, "%s: the optimizer has no loss scale (optimizer->loss_scale)", call);
    const char *fault = fusion_loss_scale_set(&shards->loss, scale, finite_steps);
    if (fault)
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "%s: %g after %u finite steps: %s", call, scale, finite_steps, fault);
    shards->scale = fusion_loss_scale_factor(&shards->loss);
    return SHOAL_OK;
}

uint64_t shoal_shards_parameter_steps(const struct shoal_shards *shards, size_t parameter)
{
    return shards && parameter < shards->parameters.count ? shards->steps[parameter] : 0;
}

enum shoal_status shoal_shards_set_parameter_steps(struct shoal_shards *shards, size_t parameter, uint64_t steps)
{
    FUSION_TRY(shards_check_between(shards, "shoal_shards_set_parameter_steps"));
    if (parameter >= shards->parameters.count)
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT,
                             "shoal_shards_set_parameter_steps: parameter %zu is out of range: there are %zu", parameter,
                             shards->parameters.count);
    shards->steps[parameter] = steps;
    return SHOAL_OK;
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_value(const struct shoal_shards *shards, const char *call, size_t parameter,
                                     enum shoal_optimizer_state state, const void *values)
{
    char name[FUSION_TEXT_MAX];
    FUSION_TRY(shards_check_between(shards, call));
    if (parameter >= shards->parameters.count || !values)
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "%s: values is NULL, or parameter %zu is out of range: there are %zu",
                             call, parameter, shards->parameters.count);
    const struct shoal_optimizer_group *group = &shards->groups[shards->group_of[parameter]];
    if ((unsigned)state <= fusion_rule_states(fusion_group_rule(shards->rule, group)))
        return SHOAL_OK;
    return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "%s: %.200s has no state %d", call,
                         fusion_parameter_text(&shards->parameters, parameter, name, sizeof name), (int)state);
}

char *shards_value_at(const struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state, size_t element)
{
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    char *array = unit->states[state] ? unit->states[state] : unit->own;
    SHOAL_ASSERT(unit->states[state] || state == SHOAL_STATE_MASTER);
    return array + shards_offset(shards, parameter, element) * shards_real_bytes(unit->type);
}

void shards_round_master(const struct shoal_shards *shards, size_t parameter, const struct shards_range *range)
{
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    const size_t offset = shards_offset(shards, parameter, range->begin);
    if (!unit->states[SHOAL_STATE_MASTER])
        return;
    const float *master = (const float *)(const void *)unit->states[SHOAL_STATE_MASTER] + offset;
    uint16_t *own = (uint16_t *)(void *)unit->own + offset;
    (unit->type == SHOAL_FLOAT16 ? shards->kernels->to_float16 : shards->kernels->to_bfloat16)(own, master, range->count, 1);
}

enum shoal_status shoal_shards_write(struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state,
                                     const void *values)
{
    FUSION_TRY(check_value(shards, "shoal_shards_write", parameter, state, values));
    const struct shards_range range = shards_range_of(shards, parameter, shards->rank);
    const size_t real = shards_real_bytes(shards->parameters.items[parameter].type);
    FUSION_TRY(shards_forget_slots(shards));
    if (range.count == 0)
        return SHOAL_OK;
    memcpy(shards_value_at(shards, parameter, state, range.begin), (const char *)values + range.begin * real,
           range.count * real);
    if (state == SHOAL_STATE_MASTER)
        shards_round_master(shards, parameter, &range);
    return SHOAL_OK;
}

enum shoal_status shoal_shards_read(struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state,
                                    void *values_out)
{
    FUSION_TRY(check_value(shards, "shoal_shards_read", parameter, state, values_out));
    const enum shoal_type type = shards->parameters.items[parameter].type;
    const enum shoal_type real = type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32;
    const struct shards_range own = shards_range_of(shards, parameter, shards->rank);
    const struct shoal_options options = fusion_deadline(shards->options.timeout_ms);
    const char *from = own.count ? shards_value_at(shards, parameter, state, own.begin) : NULL;
    if (shards_unit_of(shards, parameter)->is_whole) {
        if (own.count)
            memcpy(values_out, from, own.count * shoal_type_bytes(real));
        return SHOAL_OK;
    }
    size_t *counts = calloc((size_t)shards->size, sizeof *counts);
    if (!counts)
        return shards_fail(shards, SHOAL_ERR_MEMORY, shards->unit_of[parameter], "reading a value");
    for (int r = 0; r < shards->size; r++)
        counts[r] = shards_range_of(shards, parameter, r).count;
    const enum shoal_status status = shoal_allgatherv(shards->gathers, from, values_out, counts, NULL, real, &options);
    free(counts);
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, shards->unit_of[parameter], "reading a value");
}
