/* The life of a schedule, and what its files share. */
#include "pipeline/schedule/schedule.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status schedule_refuse(struct schedule_text text, enum shoal_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (text.at && text.bytes)
        vsnprintf(text.at, text.bytes, format, args);
    va_end(args);
    return status;
}

static const struct {
    const char *word;
} kinds[] = {
#define SHOAL_SCHEDULE_WORD(name, number, word, text) [number] = {word},
    SHOAL_SCHEDULE_LIST(SHOAL_SCHEDULE_WORD)
#undef SHOAL_SCHEDULE_WORD
};
#define KINDS (sizeof kinds / sizeof kinds[0])

const char *shoal_schedule_name(enum shoal_schedule_kind kind)
{
    return (unsigned)kind < KINDS ? kinds[kind].word : NULL;
}

void schedule_name_action(const struct shoal_action *action, char name[40])
{
    static const char letters[] = {'F', 'B', 'I', 'W', 'R', 'S', 'T', 'U'};
    snprintf(name, 40, "%u%c%u", action->stage, letters[action->kind], action->microbatch);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status schedule_begin(uint32_t ranks, uint32_t stages, uint32_t microbatches, bool is_v,
                                 struct shoal_schedule **schedule_out)
{
    struct shoal_schedule *schedule = calloc(1, sizeof *schedule);
    if (!schedule)
        return SHOAL_ERR_MEMORY;
    schedule->ranks = ranks;
    schedule->stages = stages;
    schedule->microbatches = microbatches;
    schedule->rank_of = calloc(stages, sizeof *schedule->rank_of);
    schedule->recomputes = calloc(stages, sizeof *schedule->recomputes);
    schedule->lists = calloc(ranks, sizeof *schedule->lists);
    schedule->replicas = calloc(ranks, sizeof *schedule->replicas);
    if (!schedule->rank_of || !schedule->recomputes || !schedule->lists || !schedule->replicas) {
        shoal_schedule_free(schedule);
        return SHOAL_ERR_MEMORY;
    }
    for (uint32_t r = 0; r < ranks; r++)
        schedule->replicas[r] = 1;
    for (uint32_t s = 0; s < stages; s++)
        schedule->rank_of[s] = is_v && s >= ranks ? stages - 1 - s : s % ranks;
    *schedule_out = schedule;
    return SHOAL_OK;
}

enum shoal_status schedule_begin_like(const struct shoal_schedule *schedule, struct shoal_schedule **schedule_out)
{
    SCHEDULE_TRY(schedule_begin(schedule->ranks, schedule->stages, schedule->microbatches, false, schedule_out));
    memcpy((*schedule_out)->rank_of, schedule->rank_of, schedule->stages * sizeof *schedule->rank_of);
    memcpy((*schedule_out)->replicas, schedule->replicas, schedule->ranks * sizeof *schedule->replicas);
    return SHOAL_OK;
}

void shoal_schedule_free(struct shoal_schedule *schedule)
{
    if (!schedule)
        return;
    for (uint32_t r = 0; schedule->lists && r < schedule->ranks; r++)
        free(schedule->lists[r].actions);
    free(schedule->lists);
    free(schedule->rank_of);
    free(schedule->recomputes);
    free(schedule->replicas);
    free(schedule);
}

enum shoal_status schedule_append(struct shoal_schedule *schedule, uint32_t rank, enum shoal_action_kind kind, uint32_t stage,
                                  uint32_t microbatch)
{
    struct schedule_list *list = &schedule->lists[rank];
    if (list->count == list->room) {
        const uint32_t room = list->room ? 2 * list->room : 64;
        struct shoal_action *more = reallocarray(list->actions, room, sizeof *more);
        if (!more)
            return SHOAL_ERR_MEMORY;
        list->actions = more;
        list->room = room;
    }
    list->actions[list->count++] = (struct shoal_action){kind, stage, microbatch};
    list->sums += schedule_is_sum(kind);
    if (kind == SHOAL_SUM_TIED && microbatch >= schedule->ties)
        schedule->ties = microbatch + 1;
    schedule->recomputes[stage] |= kind == SHOAL_RECOMPUTE;
    return SHOAL_OK;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

uint32_t shoal_schedule_ranks(const struct shoal_schedule *schedule)
{
    return schedule->ranks;
}

uint32_t shoal_schedule_stages(const struct shoal_schedule *schedule)
{
    return schedule->stages;
}

uint32_t shoal_schedule_microbatches(const struct shoal_schedule *schedule)
{
    return schedule->microbatches;
}

uint32_t shoal_schedule_rank_of(const struct shoal_schedule *schedule, uint32_t stage)
{
    return schedule->rank_of[stage];
}

const struct shoal_action *shoal_schedule_actions(const struct shoal_schedule *schedule, uint32_t rank, uint32_t *count_out)
{
    *count_out = schedule->lists[rank].count;
    return schedule->lists[rank].actions;
}
