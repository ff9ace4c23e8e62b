/* Chooses the number of ranks of a schedule, and the replicas of each rank. For each number of ranks, the search begins with
 * replicas as equal as possible. It then moves one replica from a rank to another as long as this helps. Partitions of these
 * trials are made with little effort, and that of the best trial with all of it. */
#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/partition/partition.h"

#define RANKS_MOST 1024u
#define TRIAL_EFFORT 20000u
#define MOVES_FAR 8u      /* with more ranks, replicas move to neighbors only */
#define TRIALS_MOST 2000u /* for one number of ranks, divided by it */
#define HOPELESS 1.5      /* times as long as the best step: replicas are not moved then */

struct replication {
    const struct shoal_profile *profile;
    struct shoal_partition_options options; /* of a trial */
    struct shoal_schedule_options wanted;
    struct shoal_schedule *schedule; /* for the number of ranks that is tried */
    uint32_t all;                    /* ranks of the machine */
    uint32_t ranks;                  /* ranks of that schedule */
    uint32_t *tried;                 /* [all]: replicas of each rank; the first `ranks` are used */
    uint32_t *best;                  /* [all]: `tried` at the shortest step so far */
    uint32_t best_ranks;             /* 0: none fits so far */
    double best_step;
    uint32_t trials;
};

/* Returns the step of the tried replicas, or PARTITION_NEVER if nothing fits. */
static enum shoal_status replicate_try(struct replication *all, double *step_out)
{
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    struct shoal_partition *partition = NULL;
    bool lacks;
    all->trials++;
    *step_out = PARTITION_NEVER;
    all->options.rank_replicas = all->tried;
    const enum shoal_status status =
        partition_make(all->profile, all->schedule, &all->options, &partition, &lacks, (struct partition_text){NULL, 0});
    if (status == SHOAL_OK && shoal_partition_step_times(partition, &times) == SHOAL_OK)
        *step_out = times.step;
    shoal_partition_free(partition);
    if (*step_out < all->best_step) {
        all->best_step = *step_out;
        all->best_ranks = all->ranks;
        memcpy(all->best, all->tried, all->ranks * sizeof *all->best);
    }
    return status == SHOAL_ERR_MEMORY ? status : SHOAL_OK;
}

static bool may_try(const struct replication *all)
{
    return all->trials * all->ranks < TRIALS_MOST;
}

/* Makes the move of one replica that helps most, if one helps. *helps_out is false if none does. */
static enum shoal_status move_one(struct replication *all, double *step, bool *helps_out)
{
    uint32_t best_from = 0, best_to = 0;
    double least = *step;
    for (uint32_t from = 0; from < all->ranks; from++)
        for (uint32_t to = 0; to < all->ranks && may_try(all); to++) {
            const uint32_t distance = from > to ? from - to : to - from;
            double other;
            if (distance == 0 || all->tried[from] == 1 || (all->ranks > MOVES_FAR && distance > 1))
                continue;
            all->tried[from]--;
            all->tried[to]++;
            PARTITION_TRY(replicate_try(all, &other));
            all->tried[from]++;
            all->tried[to]--;
            if (other >= least)
                continue;
            least = other;
            best_from = from;
            best_to = to;
        }
    *helps_out = least < *step;
    if (*helps_out) {
        all->tried[best_from]--;
        all->tried[best_to]++;
    }
    *step = least;
    return SHOAL_OK;
}

static enum shoal_status climb(struct replication *all)
{
    bool helps;
    double step;
    for (uint32_t r = 0; r < all->ranks; r++)
        all->tried[r] = all->all / all->ranks + (r < all->all % all->ranks);
    PARTITION_TRY(replicate_try(all, &step));
    helps = step < HOPELESS * all->best_step || step >= PARTITION_NEVER;
    while (helps && may_try(all))
        PARTITION_TRY(move_one(all, &step, &helps));
    return SHOAL_OK;
}

/* Numbers of ranks for which the kind is not possible are left out. */
static enum shoal_status try_numbers(struct replication *all)
{
    const uint32_t most = all->all < all->profile->count ? all->all : all->profile->count;
    struct shoal_schedule_options own = all->wanted;
    if (own.kind >= SHOAL_SCHEDULE_ZB_H1) {
        own.kind = SHOAL_SCHEDULE_1F1B;
        own.stages_per_rank = 0;
    }
    for (all->ranks = 1; all->ranks <= most; all->ranks++) {
        own.ranks = all->ranks;
        enum shoal_status status = shoal_schedule_create(&own, &all->schedule, NULL, 0);
        if (status == SHOAL_ERR_ARGUMENT)
            continue;
        all->trials = 0;
        if (status == SHOAL_OK)
            status = climb(all);
        shoal_schedule_free(all->schedule);
        all->schedule = NULL;
        PARTITION_TRY(status);
    }
    return SHOAL_OK;
}

static enum shoal_status check_replicate(const struct replication *all, struct partition_text text)
{
    const struct shoal_partition_options *options = &all->options;
    if (options->rank_memory_bytes || options->rank_speeds || options->rank_replicas)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT,
                                "rank_memory_bytes, rank_speeds and rank_replicas are of a schedule's ranks, whose number is "
                                "chosen here: leave them out");
    if (all->all < 1 || all->all > RANKS_MOST)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "%u ranks: there must be 1 to %u", all->all, RANKS_MOST);
    return SHOAL_OK;
}

/* Makes the partition for the replicas in the options, and the schedule with these. */
static enum shoal_status choose_replicated(const struct shoal_profile *profile, const struct shoal_schedule_options *wanted,
                                           const struct shoal_partition_options *options, struct shoal_schedule **schedule_out,
                                           struct shoal_partition **partition_out, enum shoal_schedule_kind *kind_out,
                                           struct partition_text text)
{
    struct shoal_schedule *plain = NULL;
    struct shoal_partition *partition = NULL;
    if (!schedule_out || !partition_out)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "schedule_out or partition_out is NULL");
    PARTITION_TRY(shoal_partition_choose(profile, wanted, options, &plain, &partition, kind_out, text.at, text.bytes));
    const enum shoal_status status = shoal_schedule_replicate(plain, options->rank_replicas, schedule_out);
    shoal_schedule_free(plain);
    if (status == SHOAL_OK)
        *partition_out = partition;
    else
        shoal_partition_free(partition);
    return status;
}

enum shoal_status shoal_partition_replicate(const struct shoal_profile *profile,
                                            const struct shoal_schedule_options *schedule_options,
                                            const struct shoal_partition_options *options, struct shoal_schedule **schedule_out,
                                            struct shoal_partition **partition_out, enum shoal_schedule_kind *kind_out,
                                            char *text, size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    struct replication all = {.profile = profile,
                              .best_step = PARTITION_NEVER,
                              .options = SHOAL_PARTITION_OPTIONS_INIT,
                              .wanted = SHOAL_SCHEDULE_OPTIONS_INIT};
    if (!profile || !shoal_struct_bytes(schedule_options) || !shoal_struct_bytes(options))
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "profile is NULL, or options are not set: use their INIT");
    shoal_struct_copy_in(&all.options, options, sizeof all.options);
    shoal_struct_copy_in(&all.wanted, schedule_options, sizeof all.wanted);
    all.all = all.wanted.ranks;
    PARTITION_TRY(check_replicate(&all, why));
    struct shoal_partition_options chosen = all.options;
    all.options.effort = TRIAL_EFFORT;
    all.tried = calloc(all.all, sizeof *all.tried);
    all.best = calloc(all.all, sizeof *all.best);
    enum shoal_status status = all.tried && all.best ? try_numbers(&all) : SHOAL_ERR_MEMORY;
    all.wanted.ranks = all.best_ranks ? all.best_ranks : all.all;
    chosen.rank_replicas = all.best_ranks ? all.best : NULL;
    if (status == SHOAL_OK) /* if nothing fits: for the reason */
        status = choose_replicated(profile, &all.wanted, &chosen, schedule_out, partition_out, kind_out, why);
    free(all.tried);
    free(all.best);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(why, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}
