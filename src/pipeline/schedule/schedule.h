/* Schedules of pipelines: what the files of this module share. See include/shoal/pipeline.h.
 *
 *     schedule_create.c  checks options, and has one of the next two make the schedule
 *     orders.c    GPipe, 1F1B, interleaved, breadth-first: orders that are written down
 *     search.c    the others: orders that are found, by trying rules and keeping the shortest step
 *     schedule_run.c   runs a schedule on clocks: for its times, its memory, and circles of waiting
 *     recompute.c actions that repeat a forward pass
 *     replicas.c  ranks that are several ranks of a communicator
 *     sums.c      actions behind a stage's last gradient
 *     text.c      torch's form */
#ifndef SHOAL_PIPELINE_SCHEDULE_H
#define SHOAL_PIPELINE_SCHEDULE_H

#include <stdbool.h>
#include <stdio.h>

#include "shoal/pipeline.h"

#define SCHEDULE_TRY(expression)                            \
    do {                                                    \
        const enum shoal_status try_status_ = (expression); \
        if (try_status_ != SHOAL_OK)                        \
            return try_status_;                             \
    } while (0)

#define SCHEDULE_COST_MOST 1e30   /* so that sums stay finite */
#define SCHEDULE_MOST 65536u      /* ranks, stages and microbatches, each */
#define SCHEDULE_CELLS (1u << 24) /* stages times microbatches: what a program can hold and search */
#define SCHEDULE_SIZE (1u << 24)  /* replicas of all ranks */

struct schedule_list {
    struct shoal_action *actions;
    uint32_t count, room;
    uint32_t sums; /* SUM_REPLICAS and SUM_TIED among them */
};

struct shoal_schedule {
    uint32_t ranks, stages, microbatches;
    uint32_t *rank_of;           /* [stages] */
    bool *recomputes;            /* [stages]: it has a RECOMPUTE action */
    uint32_t *replicas;          /* [ranks] */
    uint32_t ties;               /* above the number of each tie */
    struct schedule_list *lists; /* [ranks] */
};

/* The text of a failure; `at` may be NULL. */
struct schedule_text {
    char *at;
    size_t bytes;
};

/* Writes the reason and returns the status. */
SHOAL_MUST_USE enum shoal_status schedule_refuse(struct schedule_text text, enum shoal_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- schedule.c ---- */

/* Makes a schedule with empty lists. is_v: each rank has two stages, forth and back. */
SHOAL_MUST_USE enum shoal_status schedule_begin(uint32_t ranks, uint32_t stages, uint32_t microbatches, bool is_v,
                                                struct shoal_schedule **schedule_out);
/* Makes a schedule with empty lists, and with the stages, ranks and replicas of another one. */
SHOAL_MUST_USE enum shoal_status schedule_begin_like(const struct shoal_schedule *schedule,
                                                     struct shoal_schedule **schedule_out);
SHOAL_MUST_USE enum shoal_status schedule_append(struct shoal_schedule *schedule, uint32_t rank, enum shoal_action_kind kind,
                                                 uint32_t stage, uint32_t microbatch);
/* "2F3" */
void schedule_name_action(const struct shoal_action *action, char name[40]);

static inline bool schedule_is_sum(enum shoal_action_kind kind)
{
    return kind == SHOAL_SUM_REPLICAS || kind == SHOAL_SUM_TIED;
}

/* Returns true for a kind that is of a stage, and not of a microbatch. */
static inline bool schedule_is_of_stage(enum shoal_action_kind kind)
{
    return schedule_is_sum(kind) || kind == SHOAL_UPDATE;
}

/* ---- orders.c, search.c: options are possible, and the kind is the file's ---- */

SHOAL_MUST_USE enum shoal_status schedule_write_down(const struct shoal_schedule_options *options,
                                                     struct shoal_schedule **schedule_out);
SHOAL_MUST_USE enum shoal_status schedule_search(const struct shoal_schedule_options *options, double activations,
                                                 struct shoal_schedule **schedule_out);

/* ---- replicas.c ---- */

/* Returns true if these numbers of replicas, one for each rank, are possible. */
bool schedule_are_replicas(const struct shoal_schedule *schedule, const uint32_t *replicas);

/* ---- sums.c ---- */

/* Looks for a fault of sums and updates; circles of waiting are found elsewhere. All other actions are right. */
SHOAL_MUST_USE enum shoal_status schedule_check_sums(const struct shoal_schedule *schedule, struct schedule_text text);

/* ---- schedule_run.c ---- */

/* Most activations that a rank keeps at a time, of stages that are equal. */
double schedule_activations(const struct shoal_schedule *schedule, double kept_share);

#endif
