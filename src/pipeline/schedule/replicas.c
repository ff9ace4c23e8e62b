/* Ranks of a schedule that are several ranks of a communicator. */
#include "pipeline/schedule/schedule.h"

bool schedule_are_replicas(const struct shoal_schedule *schedule, const uint32_t *replicas)
{
    uint64_t size = 0;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        if (replicas[r] < 1 || replicas[r] > SCHEDULE_MOST)
            return false;
        size += replicas[r];
    }
    return size <= SCHEDULE_SIZE;
}

static enum shoal_status copy_lists(const struct shoal_schedule *schedule, struct shoal_schedule *made)
{
    for (uint32_t r = 0; r < schedule->ranks; r++)
        for (uint32_t i = 0; i < schedule->lists[r].count; i++) {
            const struct shoal_action *const action = &schedule->lists[r].actions[i];
            SCHEDULE_TRY(schedule_append(made, r, action->kind, action->stage, action->microbatch));
        }
    return SHOAL_OK;
}

enum shoal_status shoal_schedule_replicate(const struct shoal_schedule *schedule, const uint32_t *replicas,
                                           struct shoal_schedule **schedule_out)
{
    struct shoal_schedule *made = NULL;
    if (!schedule || !schedule_out || (replicas && !schedule_are_replicas(schedule, replicas)))
        return SHOAL_ERR_ARGUMENT;
    SCHEDULE_TRY(schedule_begin_like(schedule, &made));
    for (uint32_t r = 0; r < made->ranks; r++)
        made->replicas[r] = replicas ? replicas[r] : 1;
    const enum shoal_status status = copy_lists(schedule, made);
    if (status == SHOAL_OK)
        *schedule_out = made;
    else
        shoal_schedule_free(made);
    return status;
}

uint32_t shoal_schedule_replicas(const struct shoal_schedule *schedule, uint32_t rank)
{
    return schedule->replicas[rank];
}

uint32_t shoal_schedule_size(const struct shoal_schedule *schedule)
{
    uint32_t size = 0;
    for (uint32_t r = 0; r < schedule->ranks; r++)
        size += schedule->replicas[r];
    return size;
}

enum shoal_status shoal_schedule_place(const struct shoal_schedule *schedule, uint32_t member, uint32_t *rank_out,
                                       uint32_t *replica_out)
{
    uint32_t rank = 0;
    if (!schedule || !rank_out || !replica_out)
        return SHOAL_ERR_ARGUMENT;
    for (; rank < schedule->ranks && member >= schedule->replicas[rank]; rank++)
        member -= schedule->replicas[rank];
    if (rank == schedule->ranks)
        return SHOAL_ERR_ARGUMENT;
    *rank_out = rank;
    *replica_out = member;
    return SHOAL_OK;
}

/* Returns samples * part / of, rounded down, for a part up to `of`. */
static uint64_t part_of(uint64_t samples, uint32_t part, uint32_t of)
{
    return samples / of * part + samples % of * part / of;
}

void shoal_replica_share(uint64_t samples, uint32_t replicas, uint32_t replica, uint64_t *first_out, uint64_t *count_out)
{
    *first_out = part_of(samples, replica, replicas);
    *count_out = part_of(samples, replica + 1, replicas) - *first_out;
}
