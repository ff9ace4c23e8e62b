/* Schedules whose order is written down. */
#include "pipeline/schedule/schedule.h"

#include <stdlib.h>

static uint32_t least(uint32_t one, uint32_t other)
{
    return one < other ? one : other;
}

static enum shoal_status order_gpipe(struct shoal_schedule *schedule, uint32_t rank)
{
    for (uint32_t m = 0; m < schedule->microbatches; m++)
        SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_FORWARD, rank, m));
    for (uint32_t m = 0; m < schedule->microbatches; m++)
        SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_BACKWARD, rank, m));
    return SHOAL_OK;
}

static enum shoal_status order_1f1b(struct shoal_schedule *schedule, uint32_t rank)
{
    const uint32_t all = schedule->microbatches, ahead = least(all, schedule->ranks - 1 - rank);
    for (uint32_t m = 0; m < ahead; m++)
        SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_FORWARD, rank, m));
    for (uint32_t m = 0; m < all; m++) {
        if (ahead + m < all)
            SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_FORWARD, rank, ahead + m));
        SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_BACKWARD, rank, m));
    }
    return SHOAL_OK;
}

/* The k-th forward or backward pass of a rank: turns of `ranks` microbatches through the rank's stages. */
static enum shoal_status append_turn(struct shoal_schedule *schedule, uint32_t rank, enum shoal_action_kind kind, uint32_t k)
{
    const uint32_t ranks = schedule->ranks, turns = schedule->stages / ranks;
    const uint32_t turn = k % (ranks * turns) / ranks, microbatch = k / (ranks * turns) * ranks + k % ranks;
    const uint32_t own = kind == SHOAL_FORWARD ? turn : turns - 1 - turn;
    return schedule_append(schedule, rank, kind, own * ranks + rank, microbatch);
}

static enum shoal_status order_interleaved(struct shoal_schedule *schedule, uint32_t rank)
{
    const uint32_t ranks = schedule->ranks, turns = schedule->stages / ranks, all = schedule->microbatches * turns;
    const uint32_t ahead = least(all, 2 * (ranks - 1 - rank) + (turns - 1) * ranks);
    for (uint32_t k = 0; k < ahead; k++)
        SCHEDULE_TRY(append_turn(schedule, rank, SHOAL_FORWARD, k));
    for (uint32_t k = 0; k < all; k++) {
        if (ahead + k < all)
            SCHEDULE_TRY(append_turn(schedule, rank, SHOAL_FORWARD, ahead + k));
        SCHEDULE_TRY(append_turn(schedule, rank, SHOAL_BACKWARD, k));
    }
    return SHOAL_OK;
}

static enum shoal_status order_breadth_first(struct shoal_schedule *schedule, uint32_t rank)
{
    for (uint32_t s = rank; s < schedule->stages; s += schedule->ranks)
        for (uint32_t m = 0; m < schedule->microbatches; m++)
            SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_FORWARD, s, m));
    for (uint32_t s = schedule->stages - schedule->ranks + rank + 1; s-- > 0;) {
        if (s % schedule->ranks != rank)
            continue;
        for (uint32_t m = 0; m < schedule->microbatches; m++)
            SCHEDULE_TRY(schedule_append(schedule, rank, SHOAL_BACKWARD, s, m));
    }
    return SHOAL_OK;
}

static enum shoal_status write_rank(struct shoal_schedule *schedule, enum shoal_schedule_kind kind, uint32_t rank)
{
    switch (kind) {
    case SHOAL_SCHEDULE_GPIPE:
        return order_gpipe(schedule, rank);
    case SHOAL_SCHEDULE_1F1B:
        return order_1f1b(schedule, rank);
    case SHOAL_SCHEDULE_INTERLEAVED:
        return order_interleaved(schedule, rank);
    default:
        return order_breadth_first(schedule, rank);
    }
}

enum shoal_status schedule_write_down(const struct shoal_schedule_options *options, struct shoal_schedule **schedule_out)
{
    const bool has_turns = options->kind == SHOAL_SCHEDULE_INTERLEAVED || options->kind == SHOAL_SCHEDULE_BREADTH_FIRST;
    const uint32_t turns = !has_turns ? 1 : options->stages_per_rank ? options->stages_per_rank : 2;
    struct shoal_schedule *schedule = NULL;
    enum shoal_status status = schedule_begin(options->ranks, turns * options->ranks, options->microbatches, false, &schedule);
    for (uint32_t r = 0; r < options->ranks && status == SHOAL_OK; r++)
        status = write_rank(schedule, options->kind, r);
    if (status != SHOAL_OK) {
        shoal_schedule_free(schedule);
        schedule = NULL;
    }
    *schedule_out = schedule;
    return status;
}
