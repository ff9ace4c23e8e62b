/* Chooses the stages that are recomputed, if the memory does not suffice otherwise. Two choices are compared: all stages, and
 * as few of the first stages as suffice, because the first ones keep their activations longest. From the better one, stages are
 * then removed, the longest first, as long as the rest fits and the step gets shorter. */
#include "pipeline/partition/partition.h"

#include <stdlib.h>
#include <string.h>

struct recomputation {
    const struct shoal_profile *profile;
    const struct shoal_schedule *schedule;
    const struct shoal_partition_options *options;
    uint32_t stages;
    unsigned char *tried, *kept;  /* [stages]: recomputed or not; `kept` belongs to `best` */
    uint32_t *first_units;        /* [stages]: those of `best` */
    struct shoal_partition *best; /* NULL: none yet */
};

static double recompute_step(const struct shoal_partition *partition)
{
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    return shoal_partition_step_times(partition, &times) == SHOAL_OK ? times.step : PARTITION_NEVER;
}

/* Takes over a partition with the tried stages, if it fits and is better than the best one, or frees it. NULL is allowed. */
static bool recompute_offer(struct recomputation *all, struct shoal_partition *made)
{
    if (!made || !partition_fits(made) || (all->best && recompute_step(made) >= recompute_step(all->best))) {
        shoal_partition_free(made);
        return false;
    }
    shoal_partition_free(all->best);
    all->best = made;
    memcpy(all->kept, all->tried, all->stages);
    partition_first_units(made, all->first_units);
    return true;
}

/* Divides the units anew for the tried stages. */
static enum shoal_status try_stages(struct recomputation *all, bool *lacks_out, struct partition_text text)
{
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *made = NULL;
    *lacks_out = false;
    enum shoal_status status = shoal_schedule_recompute(all->schedule, all->tried, &schedule);
    if (status == SHOAL_OK)
        status = partition_make_for(all->profile, schedule, all->options, &made, lacks_out, text);
    shoal_schedule_free(schedule);
    (void)recompute_offer(all, made);
    return status;
}

/* Keeps the division of the best one, for the tried stages. */
static enum shoal_status try_same_division(struct recomputation *all, bool *is_better_out)
{
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *made = NULL;
    enum shoal_status status = shoal_schedule_recompute(all->schedule, all->tried, &schedule);
    if (status == SHOAL_OK)
        status =
            partition_make_at(all->profile, schedule, all->options, all->first_units, &made, (struct partition_text){NULL, 0});
    shoal_schedule_free(schedule);
    *is_better_out = recompute_offer(all, made);
    return status;
}

/* Returns the recomputed stage of the best one that takes longest and was not asked about, or `stages`. */
static uint32_t longest_stage(const struct recomputation *all, const unsigned char *is_asked)
{
    uint32_t longest = all->stages;
    double most = -1;
    for (uint32_t s = 0; s < all->stages; s++) {
        struct shoal_stage stage = SHOAL_STAGE_INIT;
        if (is_asked[s] || !all->kept[s] || shoal_partition_stage(all->best, s, &stage) != SHOAL_OK || stage.forward <= most)
            continue;
        most = stage.forward;
        longest = s;
    }
    return longest;
}

static enum shoal_status leave_out_stages(struct recomputation *all)
{
    unsigned char *is_asked = calloc(all->stages, 1);
    enum shoal_status status = is_asked ? SHOAL_OK : SHOAL_ERR_MEMORY;
    bool has_changed = false, is_better, lacks;
    while (status == SHOAL_OK) {
        const uint32_t stage = longest_stage(all, is_asked);
        if (stage == all->stages)
            break;
        is_asked[stage] = 1;
        memcpy(all->tried, all->kept, all->stages);
        all->tried[stage] = 0;
        status = try_same_division(all, &is_better);
        has_changed |= is_better;
    }
    free(is_asked);
    memcpy(all->tried, all->kept, all->stages);
    if (status == SHOAL_OK && has_changed)
        status = try_stages(all, &lacks, (struct partition_text){NULL, 0});
    return status == SHOAL_ERR_MEMORY ? status : SHOAL_OK; /* the best one stays */
}

/* Finds a time below which no step is, whichever stages are recomputed: that without any, and without limits of memory. */
static enum shoal_status find_bound_of_all(const struct recomputation *all, double *bound_out)
{
    struct shoal_partition_options options = *all->options;
    struct problem problem;
    options.memory_bytes = 0;
    options.rank_memory_bytes = NULL;
    enum shoal_status status = problem_open(&problem, all->profile, all->schedule, &options, (struct partition_text){NULL, 0});
    uint32_t *division = calloc((size_t)problem.stages + 1, sizeof *division);
    if (status == SHOAL_OK)
        status = division ? bound_find(&problem, division, bound_out) : SHOAL_ERR_MEMORY;
    problem_close(&problem);
    free(division);
    return status;
}

static enum shoal_status try_first(struct recomputation *all, uint32_t first_stages)
{
    bool lacks;
    for (uint32_t s = 0; s < all->stages; s++)
        all->tried[s] = s < first_stages;
    const enum shoal_status status = try_stages(all, &lacks, (struct partition_text){NULL, 0});
    return status == SHOAL_ERR_MEMORY ? status : SHOAL_OK; /* the search may overlook a division that fits */
}

/* Some stages must be recomputed. */
static enum shoal_status choose_stages(struct recomputation *all, bool *lacks_out, struct partition_text text)
{
    uint32_t fewest, most;
    double bound;
    PARTITION_TRY(recompute_range(all->profile, all->schedule, all->options, &fewest, &most));
    if (fewest > 0)
        PARTITION_TRY(try_first(all, fewest));
    if (most > fewest)
        PARTITION_TRY(try_first(all, most));
    if (!all->best) {
        memset(all->tried, 1, all->stages);
        PARTITION_TRY(try_stages(all, lacks_out, text));
    }
    PARTITION_TRY(leave_out_stages(all));
    PARTITION_TRY(find_bound_of_all(all, &bound));
    partition_set_bound(all->best, bound);
    *lacks_out = false;
    return partition_refuse(text, SHOAL_OK, "%s", ""); /* no reason of another try is left */
}

static enum shoal_status recompute_if_short(struct recomputation *all, bool *lacks_out, struct partition_text text)
{
    memset(all->tried, 0, all->stages);
    const enum shoal_status status = try_stages(all, lacks_out, text);
    return status == SHOAL_OK || !*lacks_out ? status : choose_stages(all, lacks_out, text);
}

static bool recomputation_open(struct recomputation *all)
{
    all->stages = shoal_schedule_stages(all->schedule);
    all->tried = calloc(all->stages, 1);
    all->kept = calloc(all->stages, 1);
    all->first_units = calloc(all->stages, sizeof *all->first_units);
    return all->tried && all->kept && all->first_units;
}

static void recomputation_close(struct recomputation *all)
{
    free(all->tried);
    free(all->kept);
    free(all->first_units);
}

enum shoal_status partition_recompute(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                      const struct shoal_partition_options *options, struct shoal_partition **partition_out,
                                      bool *lacks_out, struct partition_text text)
{
    struct recomputation all = {.profile = profile, .schedule = schedule, .options = options};
    if (options->recomputes == SHOAL_RECOMPUTES_AS_SCHEDULED)
        return partition_make_for(profile, schedule, options, partition_out, lacks_out, text);
    enum shoal_status status = recomputation_open(&all) ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK && options->recomputes == SHOAL_RECOMPUTES_ALL) {
        memset(all.tried, 1, all.stages);
        status = try_stages(&all, lacks_out, text);
    } else if (status == SHOAL_OK) {
        status = recompute_if_short(&all, lacks_out, text);
    }
    recomputation_close(&all);
    if (status == SHOAL_OK)
        *partition_out = all.best;
    else
        shoal_partition_free(all.best);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(text, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}

/* Leaves out stages of a division that is given, if it fits with all of them recomputed. If it does not, all are. */
static enum shoal_status recompute_given(struct recomputation *all, struct shoal_partition **partition_out)
{
    bool is_better;
    struct shoal_schedule *schedule = NULL;
    memset(all->tried, 0, all->stages);
    PARTITION_TRY(try_same_division(all, &is_better));
    memset(all->tried, 1, all->stages);
    if (!is_better)
        PARTITION_TRY(try_same_division(all, &is_better));
    if (all->best) {
        for (uint32_t s = 0; s < all->stages; s++) {
            memcpy(all->tried, all->kept, all->stages);
            all->tried[s] = 0;
            if (all->kept[s])
                PARTITION_TRY(try_same_division(all, &is_better));
        }
        *partition_out = all->best;
        return SHOAL_OK;
    }
    PARTITION_TRY(shoal_schedule_recompute(all->schedule, NULL, &schedule));
    const enum shoal_status status = partition_make_at(all->profile, schedule, all->options, all->first_units, partition_out,
                                                       (struct partition_text){NULL, 0});
    shoal_schedule_free(schedule);
    return status;
}

enum shoal_status partition_recompute_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                         const struct shoal_partition_options *options, const uint32_t *first_units,
                                         struct shoal_partition **partition_out, struct partition_text text)
{
    struct recomputation all = {.profile = profile, .schedule = schedule, .options = options};
    struct shoal_schedule *recomputed = NULL;
    if (options->recomputes == SHOAL_RECOMPUTES_AS_SCHEDULED)
        return partition_make_at(profile, schedule, options, first_units, partition_out, text);
    enum shoal_status status = shoal_schedule_recompute(schedule, NULL, &recomputed);
    if (status == SHOAL_OK) /* also checks first_units, with reasons */
        status = partition_make_at(profile, recomputed, options, first_units, partition_out, text);
    shoal_schedule_free(recomputed);
    if (status != SHOAL_OK || options->recomputes == SHOAL_RECOMPUTES_ALL)
        return status;
    shoal_partition_free(*partition_out);
    *partition_out = NULL;
    status = recomputation_open(&all) ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK) {
        memcpy(all.first_units, first_units, all.stages * sizeof *first_units);
        status = recompute_given(&all, partition_out);
    }
    recomputation_close(&all);
    if (status != SHOAL_OK)
        shoal_partition_free(all.best);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(text, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}
