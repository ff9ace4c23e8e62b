/* Checkpoints of sharded parameters. */
#include <stdlib.h>

#include "base/assert.h"
#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/shards/shards_state.h"

/* A unit that stays whole is written by rank 0, but read by each rank. */
static void describe_values(const struct shoal_shards *shards, size_t i, bool is_saving, uint32_t *states,
                            struct checkpoint_model *model)
{
    const struct shards_unit *unit = shards_unit_of(shards, i);
    const struct shards_range range = shards_range_of(shards, i, shards->rank);
    const struct shoal_optimizer_group *group = &shards->groups[shards->group_of[i]];
    states[i] = (uint32_t)fusion_rule_states(fusion_group_rule(shards->rule, group));
    if (range.count == 0 || (is_saving && unit->is_whole && shards->rank > 0))
        return;
    for (uint32_t s = 0; s <= states[i]; s++)
        model->pieces[model->piece_count++] =
            (struct checkpoint_piece){.parameter = (uint32_t)i,
                                      .state = s,
                                      .begin = range.begin,
                                      .count = range.count,
                                      .values = shards_value_at(shards, i, s, range.begin),
                                      .initial = shards->rule == SHOAL_ADAGRAD ? group->initial : 0};
}

static enum shoal_status open_values(struct shoal_shards *shards, const char *call, bool is_saving,
                                     struct checkpoint_model *model)
{
    const size_t count = shards->parameters.count;
    *model = (struct checkpoint_model){.context = shards->context,
                                       .comm = shards->gathers,
                                       .name = shards->name,
                                       .call = call,
                                       .parameters = &shards->parameters,
                                       .rule = shards->rule,
                                       .steps = shards->steps,
                                       .pieces = calloc(count * SHARDS_STATES + 1, sizeof *model->pieces),
                                       .shard = (uint32_t)shards->rank,
                                       .shards = (uint32_t)shards->size,
                                       .is_writer = true};
    uint32_t *states = calloc(count + 1, sizeof *states);
    model->states = states;
    if (!model->pieces || !states)
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < count; i++)
        describe_values(shards, i, is_saving, states, model);
    SHOAL_ASSERT(model->piece_count <= count * SHARDS_STATES);
    return SHOAL_OK;
}

static void close_values(struct checkpoint_model *model)
{
    free(model->pieces);
    free((void *)(uintptr_t)model->states);
}

enum shoal_status shoal_shards_save(struct shoal_shards *shards, const char *folder, const struct shoal_save_options *options)
{
    static const char call[] = "shoal_shards_save";
    struct checkpoint_model model;
    FUSION_TRY(shards_check_between(shards, call));
    enum shoal_status status = open_values(shards, call, true, &model);
    status = checkpoint_save(&model, folder, options, status);
    close_values(&model);
    return status;
}

enum shoal_status shoal_shards_load(struct shoal_shards *shards, const char *folder, const struct shoal_load_options *options,
                                    struct shoal_load_result *result_out)
{
    static const char call[] = "shoal_shards_load";
    struct checkpoint_model model;
    FUSION_TRY(shards_check_between(shards, call));
    FUSION_TRY(shards_forget_slots(shards)); /* no gather may read values while they are replaced */
    enum shoal_status status = open_values(shards, call, false, &model);
    status = checkpoint_load(&model, folder, options, status, result_out);
    close_values(&model);
    FUSION_TRY(status);
    for (size_t i = 0; i < shards->parameters.count; i++) {
        const struct shards_range range = shards_range_of(shards, i, shards->rank);
        if (range.count > 0)
            shards_round_master(shards, i, &range);
    }
    return SHOAL_OK;
}
