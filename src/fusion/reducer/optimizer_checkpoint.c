/* Checkpoints of a reducer with an optimizer: describes this rank's shards, and makes loaded masters the parameters. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/offload.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_failure.h"

/* ---- The description ----------------------------------------------------------------------------------------------------- */

/* Like fusion_state_at(), or the parameter's own memory if there is no separate master. */
static char *piece_values(const struct shoal_reducer *reducer, size_t parameter, size_t state, size_t element)
{
    char *array = fusion_shard_of(reducer, parameter)->states[state];
    if (array)
        return fusion_state_at(reducer, parameter, array, element);
    return fusion_parameter_at(reducer, parameter) + element * shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
}

static void describe_parameter(const struct shoal_reducer *reducer, size_t i, uint32_t *states, struct checkpoint_model *model)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[i]];
    const struct fusion_range range = fusion_range_of(reducer, i, optimizer->place);
    states[i] = (uint32_t)fusion_rule_states(fusion_group_rule(optimizer->rule, group));
    SHOAL_ASSERT(states[i] < FUSION_STATES);
    for (uint32_t s = 0; s <= states[i] && range.count > 0; s++)
        model->pieces[model->piece_count++] =
            (struct checkpoint_piece){.parameter = (uint32_t)i,
                                      .state = s,
                                      .begin = range.begin,
                                      .count = range.count,
                                      .values = piece_values(reducer, i, s, range.begin),
                                      .initial = optimizer->rule == SHOAL_ADAGRAD ? group->initial : 0};
}

/* The first of the ranks with the same shard writes it. */
static bool is_writer(const struct fusion_optimizer *optimizer)
{
    return !optimizer->comms[FUSION_ACROSS] || shoal_comm_rank(optimizer->comms[FUSION_ACROSS]) == 0;
}

/* Returns ERR_MEMORY if there is none. The caller frees the pieces and the states in either case. */
static enum shoal_status describe_shards(struct shoal_reducer *reducer, const char *call, struct checkpoint_model *model)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const size_t count = reducer->layout->parameters.count;
    *model = (struct checkpoint_model){.context = reducer->context,
                                       .comm = reducer->comm,
                                       .name = reducer->name,
                                       .call = call,
                                       .parameters = &reducer->layout->parameters,
                                       .rule = optimizer->rule,
                                       .steps = optimizer->steps,
                                       .pieces = calloc(count * FUSION_STATES + 1, sizeof *model->pieces),
                                       .shard = (uint32_t)optimizer->place,
                                       .shards = (uint32_t)optimizer->degree,
                                       .is_writer = is_writer(optimizer)};
    uint32_t *states = calloc(count + 1, sizeof *states);
    model->states = states;
    if (!model->pieces || !states)
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < count; i++)
        describe_parameter(reducer, i, states, model);
    SHOAL_ASSERT(model->piece_count <= count * FUSION_STATES);
    return SHOAL_OK;
}

static void forget_model(struct checkpoint_model *model)
{
    free(model->pieces);
    free((void *)(uintptr_t)model->states);
}

/* Faults that all ranks have alike. Inside a step, an exchange would meet the sums of buffers on the same communicator. */
static enum shoal_status check_checkpoint_call(struct shoal_reducer *reducer, const char *call)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (!reducer->optimizer)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the reducer has no optimizer (options.optimizer)", call);
    return fusion_marks_check_none(reducer, call);
}

/* An exchange that fails has the same status on all ranks; so has the reducer from then on. */
static enum shoal_status checkpoint_settle(struct shoal_reducer *reducer, enum shoal_status status)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    if (status == SHOAL_OK || shoal_last_failure(reducer->context, reducer->comm, &failure) != SHOAL_OK)
        return status;
    fusion_operation_failed(reducer, status, -1);
    return fusion_failure_status(reducer);
}

/* ---- Saving -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_reducer_save(struct shoal_reducer *reducer, const char *folder,
                                     const struct shoal_save_options *options)
{
    static const char call[] = "shoal_reducer_save";
    struct checkpoint_model model;
    FUSION_TRY(check_checkpoint_call(reducer, call));
    enum shoal_status status = describe_shards(reducer, call, &model);
    status = checkpoint_save(&model, folder, options, status);
    forget_model(&model);
    return checkpoint_settle(reducer, status);
}

/* ---- Loading ------------------------------------------------------------------------------------------------------------- */

/* This rank's part of a parameter becomes its master, rounded. */
static void take_master(const struct shoal_reducer *reducer, size_t parameter, const struct fusion_range *range)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    char *own = fusion_parameter_at(reducer, parameter) + range->begin * shoal_type_bytes(type);
    const char *master = piece_values(reducer, parameter, SHOAL_STATE_MASTER, range->begin);
    if (master == own)
        return;
    if (type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64)
        memcpy(own, master, range->count * shoal_type_bytes(type));
    else
        (type == SHOAL_FLOAT16 ? reducer->kernels->to_float16 : reducer->kernels->to_bfloat16)(
            (uint16_t *)(void *)own, (const float *)(const void *)master, range->count, 1);
}

static enum shoal_status gather_parameter(struct shoal_reducer *reducer, size_t parameter, size_t *counts)
{
    const struct shoal_options options = fusion_options(reducer);
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    char *whole = fusion_parameter_at(reducer, parameter);
    for (int i = 0; i < reducer->optimizer->degree; i++)
        counts[i] = fusion_range_of(reducer, parameter, i).count;
    if (range.count > 0)
        take_master(reducer, parameter, &range);
    return shoal_allgatherv(reducer->optimizer->comms[FUSION_GATHER], whole + range.begin * shoal_type_bytes(type), whole,
                            counts, NULL, type, &options);
}

static enum shoal_status gather_parameters(struct shoal_reducer *reducer)
{
    size_t *counts = calloc((size_t)reducer->optimizer->degree, sizeof *counts);
    enum shoal_status status = SHOAL_OK;
    if (!counts)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for the counts of %d ranks", reducer->optimizer->degree);
    for (size_t i = 0; i < reducer->layout->parameters.count && status == SHOAL_OK; i++)
        if (fusion_parameter(reducer, i)->count > 0)
            status = gather_parameter(reducer, i, counts);
    free(counts);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_operation_failed(reducer, status, -1);
    return fusion_failure_status(reducer);
}

enum shoal_status shoal_reducer_load(struct shoal_reducer *reducer, const char *folder,
                                     const struct shoal_load_options *options, struct shoal_load_result *result_out)
{
    static const char call[] = "shoal_reducer_load";
    struct checkpoint_model model;
    FUSION_TRY(check_checkpoint_call(reducer, call));
    FUSION_TRY(fusion_offload_check(reducer, SHOAL_STEP_REDUCE));
    enum shoal_status status = describe_shards(reducer, call, &model);
    status = checkpoint_load(&model, folder, options, status, result_out);
    forget_model(&model);
    FUSION_TRY(checkpoint_settle(reducer, status));
    FUSION_TRY(gather_parameters(reducer));
    return fusion_offload_store(reducer);
}
