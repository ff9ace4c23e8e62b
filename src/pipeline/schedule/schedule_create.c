/* Makes a schedule: checks the options, and has it written down or searched. */
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/schedule/schedule.h"

static bool is_number(double value)
{
    return value - value == 0;
}

static bool has_turns(enum shoal_schedule_kind kind)
{
    return kind == SHOAL_SCHEDULE_INTERLEAVED || kind == SHOAL_SCHEDULE_BREADTH_FIRST;
}

static enum shoal_status check_costs(const struct shoal_stage_costs *costs, struct schedule_text text)
{
    const double all[] = {costs->forward, costs->input_gradient, costs->weight_gradient, costs->transfer};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (!(all[i] >= 0 && all[i] <= SCHEDULE_COST_MOST))
            return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "a cost is negative, not finite or above 1e30: %g", all[i]);
    return SHOAL_OK;
}

static bool is_free(const struct shoal_stage_costs *costs)
{
    return costs->forward + costs->input_gradient + costs->weight_gradient <= 0;
}

static enum shoal_status check_schedule_options(const struct shoal_schedule_options *options, struct schedule_text text)
{
    const uint32_t turns = options->stages_per_rank ? options->stages_per_rank : 2;
    if (!shoal_schedule_name(options->kind))
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "there is no kind of schedule %d", (int)options->kind);
    if (options->ranks < 1 || options->microbatches < 1 || options->ranks > SCHEDULE_MOST ||
        options->microbatches > SCHEDULE_MOST)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "%u ranks and %u microbatches: each must be 1 to %u", options->ranks,
                               options->microbatches, SCHEDULE_MOST);
    if (has_turns(options->kind) ? turns < 2 || turns > SCHEDULE_MOST / options->ranks : options->stages_per_rank != 0)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT,
                               "stages_per_rank is %u: it must be 2 or more for interleaved and breadth-first, and 0 otherwise",
                               options->stages_per_rank);
    if ((uint64_t)options->ranks * (has_turns(options->kind) ? turns : 2) * options->microbatches > SCHEDULE_CELLS)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT,
                               "%u ranks and %u microbatches are too many together: stages times microbatches may be %u",
                               options->ranks, options->microbatches, SCHEDULE_CELLS);
    if (options->kind == SHOAL_SCHEDULE_INTERLEAVED && options->microbatches % options->ranks != 0)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT,
                               "interleaved takes turns of %u microbatches, one for each rank, and %u is no multiple of it",
                               options->ranks, options->microbatches);
    if (!is_number(options->activations) || options->activations < 0 || !(options->kept_share >= 0 && options->kept_share <= 1))
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "activations is negative, or kept_share is not in [0, 1]");
    return check_costs(&options->costs, text);
}

/* What a kind keeps by its definition; 0: whatever its order needs. */
static double definition_of(const struct shoal_schedule_options *options)
{
    const uint32_t p = options->ranks;
    switch (options->kind) {
    case SHOAL_SCHEDULE_ZB_H1:
    case SHOAL_SCHEDULE_V_ZB:
        return p;
    case SHOAL_SCHEDULE_ZB_H2:
        return 2.0 * p;
    case SHOAL_SCHEDULE_V_MIN:
        return (p + 4) / 3;
    case SHOAL_SCHEDULE_V_HALF:
        return (p + 2) / 2;
    default:
        return 0;
    }
}

static bool is_searched(enum shoal_schedule_kind kind)
{
    return kind >= SHOAL_SCHEDULE_ZB_H1 && kind <= SHOAL_SCHEDULE_V_ZB;
}

/* Makes a schedule of one kind. *schedule_out stays NULL if its activations do not suffice. */
static enum shoal_status make_kind(const struct shoal_schedule_options *options, struct shoal_schedule **schedule_out)
{
    const double limit = options->activations > 0 ? options->activations : definition_of(options);
    *schedule_out = NULL;
    if (is_searched(options->kind))
        return schedule_search(options, limit, schedule_out);
    SCHEDULE_TRY(schedule_write_down(options, schedule_out));
    if (options->activations > 0 && schedule_activations(*schedule_out, options->kept_share) > options->activations) {
        shoal_schedule_free(*schedule_out);
        *schedule_out = NULL;
    }
    return SHOAL_OK;
}

static enum shoal_status step_of(const struct shoal_schedule *schedule, const struct shoal_schedule_options *options,
                                 double *step_out)
{
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    SCHEDULE_TRY(shoal_schedule_time(schedule, &options->costs, options->kept_share, &times, NULL));
    *step_out = times.step;
    return SHOAL_OK;
}

/* Tries every kind, and keeps the one of the shortest step. ZB_H1, V_MIN and V_HALF search as ZB_H2 and V_ZB do, with fewer
 * activations. */
static enum shoal_status make_best(const struct shoal_schedule_options *options, struct shoal_schedule **best_out)
{
    static const enum shoal_schedule_kind tried[] = {SHOAL_SCHEDULE_GPIPE,       SHOAL_SCHEDULE_1F1B,
                                                     SHOAL_SCHEDULE_INTERLEAVED, SHOAL_SCHEDULE_BREADTH_FIRST,
                                                     SHOAL_SCHEDULE_ZB_H2,       SHOAL_SCHEDULE_V_ZB};
    double best_step = 0, step = 0;
    *best_out = NULL;
    for (size_t i = 0; i < sizeof tried / sizeof tried[0]; i++) {
        struct shoal_schedule_options own = *options;
        struct shoal_schedule *made = NULL;
        own.kind = tried[i];
        if (own.kind == SHOAL_SCHEDULE_INTERLEAVED && own.microbatches % own.ranks != 0)
            continue;
        enum shoal_status status = make_kind(&own, &made);
        if (status == SHOAL_OK && made)
            status = step_of(made, options, &step);
        const bool is_better = status == SHOAL_OK && made && (!*best_out || step < best_step);
        shoal_schedule_free(is_better ? *best_out : made);
        if (is_better) {
            *best_out = made;
            best_step = step;
        }
        if (status != SHOAL_OK) {
            shoal_schedule_free(*best_out);
            *best_out = NULL;
            return status;
        }
    }
    return SHOAL_OK;
}

enum shoal_status shoal_schedule_create(const struct shoal_schedule_options *options, struct shoal_schedule **schedule_out,
                                        char *text, size_t text_bytes)
{
    const struct schedule_text why = {text, text_bytes};
    struct shoal_schedule_options own = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule *made = NULL;
    if (!shoal_struct_bytes(options) || !schedule_out)
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT,
                               "schedule_out is NULL, or options is not set: use "
                               "SHOAL_SCHEDULE_OPTIONS_INIT");
    shoal_struct_copy_in(&own, options, sizeof own);
    SCHEDULE_TRY(check_schedule_options(&own, why));
    if (is_free(&own.costs))
        own.costs = (struct shoal_stage_costs){1, 1, 1, own.costs.transfer, 0, 0, 0};
    own.stages_per_rank = !has_turns(own.kind) || own.stages_per_rank ? own.stages_per_rank : 2;
    const enum shoal_status status = own.kind == SHOAL_SCHEDULE_AUTO ? make_best(&own, &made) : make_kind(&own, &made);
    if (status != SHOAL_OK)
        return schedule_refuse(why, status, "no memory for a schedule of %u ranks and %u microbatches", own.ranks,
                               own.microbatches);
    if (!made)
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT,
                               "%s cannot do with %g activations per rank: give more, or none for what it keeps by its "
                               "definition",
                               shoal_schedule_name(own.kind), own.activations);
    *schedule_out = made;
    return SHOAL_OK;
}
