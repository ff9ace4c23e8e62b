/* Schedules with stages that are recomputed: copies with RECOMPUTE actions. */
#include "pipeline/schedule/schedule.h"

/* Appends an action of another schedule, and RECOMPUTE before a backward pass. There it costs the least memory, and still
 * begins as soon as its rank is free: a rank that waits for a gradient has recomputed by then. */
static enum shoal_status append_action(struct shoal_schedule *schedule, uint32_t rank, const struct shoal_action *action,
                                       bool is_recomputed)
{
    const bool is_backward = action->kind == SHOAL_BACKWARD || action->kind == SHOAL_INPUT_GRADIENT;
    if (action->kind == SHOAL_RECOMPUTE)
        return SHOAL_OK;
    if (is_backward && is_recomputed)
        SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_RECOMPUTE, action->stage, action->microbatch));
    return schedule_append(schedule, rank, action->kind, action->stage, action->microbatch);
}

enum shoal_status shoal_schedule_recompute(const struct shoal_schedule *schedule, const unsigned char *stages,
                                           struct shoal_schedule **schedule_out)
{
    struct shoal_schedule *made = NULL;
    if (!schedule || !schedule_out)
        return SHOAL_ERR_ARGUMENT;
    SCHEDULE_TRY(schedule_begin_like(schedule, &made));
    enum shoal_status status = SHOAL_OK;
    for (uint32_t r = 0; r < schedule->ranks; r++)
        for (uint32_t i = 0; i < schedule->lists[r].count && status == SHOAL_OK; i++) {
            const struct shoal_action *const action = &schedule->lists[r].actions[i];
            status = append_action(made, r, action, !stages || stages[action->stage]);
        }
    if (status == SHOAL_OK)
        *schedule_out = made;
    else
        shoal_schedule_free(made);
    return status;
}

int shoal_schedule_recomputes(const struct shoal_schedule *schedule, uint32_t stage)
{
    return schedule->recomputes[stage];
}
