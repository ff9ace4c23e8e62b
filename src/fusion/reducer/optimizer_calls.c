/* The public functions of an optimizer in the reduction: parameters, settings and states. */
#include <stdlib.h>
#include <string.h>

#include "fusion/reducer/marks.h"
#include "fusion/reducer/offload.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_failure.h"

/* ---- Parameters and settings --------------------------------------------------------------------------------------------- */

static enum shoal_status check_optimizer_call(const struct shoal_reducer *reducer, const char *call)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status((struct shoal_reducer *)(uintptr_t)reducer);
    if (!reducer->optimizer)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the reducer has no optimizer (options.optimizer)", call);
    return fusion_marks_check_none(reducer, call);
}

void *shoal_reducer_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || !reducer->optimizer || parameter >= reducer->layout->parameters.count)
        return NULL;
    return fusion_parameter_at(reducer, parameter);
}

static void load_master(const struct shoal_reducer *reducer, size_t parameter)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    char *array = fusion_shard_of(reducer, parameter)->states[SHOAL_STATE_MASTER];
    if (!array || range.count == 0)
        return;
    float *master = (float *)(void *)fusion_state_at(reducer, parameter, array, range.begin);
    const void *own = fusion_parameter_at(reducer, parameter) + range.begin * shoal_type_bytes(type);
    if (type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64)
        memcpy(master, own, range.count * shoal_type_bytes(type));
    else
        (type == SHOAL_FLOAT16 ? reducer->kernels->from_float16 : reducer->kernels->from_bfloat16)(master, own, range.count, 1);
}

enum shoal_status shoal_reducer_load_parameters(struct shoal_reducer *reducer)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_load_parameters"));
    FUSION_TRY(fusion_offload_load(reducer));
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        load_master(reducer, i);
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_set_group(struct shoal_reducer *reducer, size_t group,
                                          const struct shoal_optimizer_group *settings)
{
    static const char call[] = "shoal_reducer_set_group";
    FUSION_TRY(check_optimizer_call(reducer, call));
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (group >= optimizer->group_count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: group %zu is out of range: there are %zu groups", call, group,
                             optimizer->group_count);
    if (!fusion_group_is_set(settings))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "%s: settings->struct_bytes is not set: use SHOAL_OPTIMIZER_GROUP_INIT", call);
    const struct shoal_optimizer_group copy = fusion_group_copy(settings);
    const char *fault = fusion_group_fault(optimizer->rule, &copy);
    if (fault)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: group %zu: %s", call, group, fault);
    if (fusion_group_rule(optimizer->rule, &copy) != fusion_group_rule(optimizer->rule, &optimizer->groups[group]))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "%s: group %zu: the momentum (beta1) may not become zero, or stop being zero", call, group);
    optimizer->groups[group] = copy;
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_set_gradient_scale(struct shoal_reducer *reducer, double scale)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_set_gradient_scale"));
    if (!(scale > 0) || scale - scale != 0)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_set_gradient_scale: %g is not a positive number",
                             scale);
    if (reducer->optimizer->loss.scale > 0)
        return fusion_refuse(
            reducer, SHOAL_ERR_STATE,
            "shoal_reducer_set_gradient_scale: gradients are divided by the optimizer's loss scale: leave one of "
            "them out");
    reducer->optimizer->scale = scale;
    return SHOAL_OK;
}

double shoal_reducer_loss_scale(const struct shoal_reducer *reducer, uint32_t *finite_steps_out)
{
    const bool has_scale = reducer && reducer->optimizer;
    if (finite_steps_out)
        *finite_steps_out = has_scale ? reducer->optimizer->loss.finite_steps : 0;
    return has_scale ? (double)reducer->optimizer->loss.scale : 0;
}

enum shoal_status shoal_reducer_set_loss_scale(struct shoal_reducer *reducer, double scale, uint32_t finite_steps)
{
    static const char call[] = "shoal_reducer_set_loss_scale";
    FUSION_TRY(check_optimizer_call(reducer, call));
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (optimizer->loss.scale == 0)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the optimizer has no loss scale (optimizer->loss_scale)", call);
    const char *fault = fusion_loss_scale_set(&optimizer->loss, scale, finite_steps);
    if (fault)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: %g after %u finite steps: %s", call, scale, finite_steps, fault);
    optimizer->scale = fusion_loss_scale_factor(&optimizer->loss);
    return SHOAL_OK;
}

/* ---- States -------------------------------------------------------------------------------------------------------------- */

size_t shoal_reducer_optimizer_bytes(const struct shoal_reducer *reducer)
{
    return reducer && reducer->optimizer ? reducer->optimizer->bytes : 0;
}

static enum shoal_status check_state(const struct shoal_reducer *reducer, const char *call, size_t parameter,
                                     enum shoal_optimizer_state state, const void *values)
{
    char name[FUSION_TEXT_MAX];
    FUSION_TRY(check_optimizer_call(reducer, call));
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    if (parameter >= reducer->layout->parameters.count || !values)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: values is NULL, or parameter %zu is out of range: there are %zu",
                             call, parameter, reducer->layout->parameters.count);
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[parameter]];
    const size_t states = fusion_rule_states(fusion_group_rule(optimizer->rule, group));
    if ((unsigned)state <= states)
        return SHOAL_OK;
    fusion_parameter_text(&reducer->layout->parameters, parameter, name, sizeof name);
    return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: %.200s has no state %d: it has 0 (the master) to %zu", call, name,
                         (int)state, states);
}

/* Returns the memory of this rank's range: in the states, or for a master that does not exist, in the parameter. */
static char *values_at(const struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                       const struct fusion_range *range)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    char *array = fusion_shard_of(reducer, parameter)->states[state];
    if (state == SHOAL_STATE_MASTER && !array)
        return fusion_parameter_at(reducer, parameter) + range->begin * shoal_type_bytes(type);
    return fusion_state_at(reducer, parameter, array, range->begin);
}

/* All ranks' ranges, which follow each other. */
static enum shoal_status gather_values(struct shoal_reducer *reducer, size_t parameter, const char *own, char *values)
{
    const struct shoal_options options = fusion_options(reducer);
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    const int degree = reducer->optimizer->degree;
    size_t *counts = calloc((size_t)degree, sizeof *counts);
    if (!counts)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, (long)parameter, "no memory for the counts of %d ranks", degree);
    for (int i = 0; i < degree; i++)
        counts[i] = fusion_range_of(reducer, parameter, i).count;
    const enum shoal_status status = shoal_allgatherv(reducer->optimizer->comms[FUSION_GATHER], own, values, counts, NULL,
                                                      type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32, &options);
    free(counts);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_operation_failed(reducer, status, (long)reducer->layout->places[parameter].buffer);
    return fusion_failure_status(reducer);
}

enum shoal_status shoal_reducer_read_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                           void *values_out)
{
    FUSION_TRY(check_state(reducer, "shoal_reducer_read_state", parameter, state, values_out));
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    return gather_values(reducer, parameter, range.count ? values_at(reducer, parameter, state, &range) : NULL, values_out);
}

enum shoal_status shoal_reducer_write_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                            const void *values)
{
    FUSION_TRY(check_state(reducer, "shoal_reducer_write_state", parameter, state, values));
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    const size_t unit = fusion_real_bytes(fusion_parameter(reducer, parameter)->type);
    if (range.count > 0)
        memcpy(values_at(reducer, parameter, state, &range), (const char *)values + range.begin * unit, range.count * unit);
    return SHOAL_OK;
}

uint64_t shoal_reducer_parameter_steps(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || !reducer->optimizer || parameter >= reducer->layout->parameters.count)
        return 0;
    return reducer->optimizer->steps[parameter];
}

enum shoal_status shoal_reducer_set_parameter_steps(struct shoal_reducer *reducer, size_t parameter, uint64_t steps)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_set_parameter_steps"));
    if (parameter >= reducer->layout->parameters.count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_set_parameter_steps: parameter %zu is out of range: there are %zu", parameter,
                             reducer->layout->parameters.count);
    reducer->optimizer->steps[parameter] = steps;
    return SHOAL_OK;
}
