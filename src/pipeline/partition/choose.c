/* A schedule together with a partition for it. */
#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/partition/partition.h"

#define RANKS_FACTOR 4 /* up to how many times the ranks are tried if units do not fit */

struct choice {
    const struct shoal_profile *profile;
    const struct shoal_partition_options *options;
    struct shoal_schedule_options schedule_options; /* with costs */
    struct shoal_schedule *schedule;
    struct shoal_partition *partition;
    double step;
    enum shoal_schedule_kind kind;
};

/* Costs of a rank, as if all had the same share. */
static struct shoal_stage_costs mean_costs(const struct shoal_profile *profile, const struct shoal_partition_options *options,
                                           uint32_t ranks)
{
    struct shoal_stage_costs costs = {0, 0, 0, options->latency_us, 0, 0, 0};
    const bool recomputes_all = options->recomputes == SHOAL_RECOMPUTES_ALL;
    double outputs = 0;
    for (uint32_t i = 0; i < profile->count; i++) {
        costs.forward += profile->units[i].forward / ranks;
        costs.input_gradient += (profile->units[i].input_gradient + (recomputes_all ? profile->units[i].forward : 0)) / ranks;
        costs.weight_gradient += profile->units[i].weight_gradient / ranks;
        outputs += (double)profile->units[i].output_bytes / profile->count;
    }
    if (options->bytes_per_us > 0)
        costs.transfer += outputs / options->bytes_per_us;
    if (costs.forward + costs.input_gradient + costs.weight_gradient <= 0)
        costs.forward = 1; /* any order will do */
    return costs;
}

/* Replaces a schedule by one that recomputes the partition's stages. */
static enum shoal_status adopt_recomputed(struct shoal_schedule **schedule, const struct shoal_partition *partition)
{
    const uint32_t stages = shoal_schedule_stages(*schedule);
    unsigned char *recomputed = calloc(stages, 1);
    struct shoal_schedule *other = NULL;
    if (!recomputed)
        return SHOAL_ERR_MEMORY;
    for (uint32_t s = 0; s < stages; s++) {
        struct shoal_stage stage = SHOAL_STAGE_INIT;
        if (shoal_partition_stage(partition, s, &stage) == SHOAL_OK)
            recomputed[s] = stage.recomputes != 0;
    }
    const enum shoal_status status = shoal_schedule_recompute(*schedule, recomputed, &other);
    free(recomputed);
    if (status != SHOAL_OK)
        return status;
    shoal_schedule_free(*schedule);
    *schedule = other;
    return SHOAL_OK;
}

/* Tries one kind, and keeps it if its step is the shortest so far. */
static enum shoal_status try_kind(struct choice *choice, enum shoal_schedule_kind kind, bool *lacks_out,
                                  struct partition_text text)
{
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *partition = NULL;
    choice->schedule_options.kind = kind;
    *lacks_out = false;
    enum shoal_status status = shoal_schedule_create(&choice->schedule_options, &schedule, text.at, text.bytes);
    if (status == SHOAL_OK)
        status = partition_make(choice->profile, schedule, choice->options, &partition, lacks_out, text);
    if (status == SHOAL_OK)
        status = adopt_recomputed(&schedule, partition);
    if (status == SHOAL_OK)
        status = shoal_partition_step_times(partition, &times);
    const bool is_better = status == SHOAL_OK && (!choice->partition || times.step < choice->step);
    shoal_schedule_free(is_better ? choice->schedule : schedule);
    shoal_partition_free(is_better ? choice->partition : partition);
    if (is_better) {
        choice->schedule = schedule;
        choice->partition = partition;
        choice->step = times.step;
        choice->kind = kind;
    }
    return status;
}

/* Tries all kinds. Kinds that are not possible or do not fit are left out. */
static enum shoal_status try_all(struct choice *choice, bool *lacks_out, struct partition_text text)
{
    const uint32_t stages_per_rank = choice->schedule_options.stages_per_rank;
    choice->schedule_options.stages_per_rank = 0;
    enum shoal_status status = try_kind(choice, SHOAL_SCHEDULE_1F1B, lacks_out, text);
    for (unsigned kind = 0; kind < SHOAL_SCHEDULE_AUTO && status != SHOAL_ERR_MEMORY; kind++) {
        const bool has_turns = kind == SHOAL_SCHEDULE_INTERLEAVED || kind == SHOAL_SCHEDULE_BREADTH_FIRST;
        bool lacks;
        choice->schedule_options.stages_per_rank = has_turns ? stages_per_rank : 0;
        if (kind != SHOAL_SCHEDULE_1F1B &&
            try_kind(choice, (enum shoal_schedule_kind)kind, &lacks, (struct partition_text){NULL, 0}) == SHOAL_ERR_MEMORY)
            status = SHOAL_ERR_MEMORY;
    }
    const bool is_found = choice->partition && status != SHOAL_ERR_MEMORY;
    return is_found ? partition_refuse(text, SHOAL_OK, "%s", "") : status; /* no reason of another kind is left */
}

static enum shoal_status try_wanted(struct choice *choice, enum shoal_schedule_kind kind, bool *lacks_out,
                                    struct partition_text text)
{
    return kind == SHOAL_SCHEDULE_AUTO ? try_all(choice, lacks_out, text) : try_kind(choice, kind, lacks_out, text);
}

/* Returns true if the units fit on a number of ranks. */
static bool fits_on(const struct choice *choice, const struct shoal_schedule_options *wanted, uint32_t ranks)
{
    struct shoal_schedule_options own = *wanted;
    struct shoal_schedule *schedule = NULL;
    bool fits = false;
    own.ranks = ranks;
    own.costs = mean_costs(choice->profile, choice->options, ranks);
    enum shoal_status status = shoal_schedule_create(&own, &schedule, NULL, 0);
    if (status == SHOAL_OK)
        status = fits_at_all(choice->profile, schedule, choice->options, &fits);
    shoal_schedule_free(schedule);
    return status == SHOAL_OK && fits;
}

/* Looks for more ranks with which the units fit, and adds their number to the text: first in steps of an eighth, then one by
 * one. Orders that have to be found are tried as 1F1B, which keeps about as much. */
static void add_ranks(const struct choice *choice, enum shoal_schedule_kind kind, struct partition_text text)
{
    struct shoal_schedule_options wanted = choice->schedule_options;
    const uint32_t ranks = wanted.ranks, step = (ranks + 7) / 8;
    const uint32_t most = RANKS_FACTOR * ranks < choice->profile->count ? RANKS_FACTOR * ranks : choice->profile->count;
    uint32_t more = ranks + step;
    if (!text.at || choice->options->rank_memory_bytes || choice->options->rank_speeds || choice->options->rank_replicas)
        return;
    wanted.kind = kind >= SHOAL_SCHEDULE_ZB_H1 ? SHOAL_SCHEDULE_1F1B : kind;
    wanted.stages_per_rank = kind >= SHOAL_SCHEDULE_ZB_H1 ? 0 : wanted.stages_per_rank;
    while (more <= most && !fits_on(choice, &wanted, more))
        more += step;
    if (more > most)
        return;
    uint32_t fewest = more - step + 1;
    while (fewest < more && !fits_on(choice, &wanted, fewest))
        fewest++;
    const size_t used = strnlen(text.at, text.bytes);
    snprintf(text.at + used, text.bytes - used, ". With %s it would fit on %u ranks", shoal_schedule_name(wanted.kind), fewest);
}

enum shoal_status shoal_partition_choose(const struct shoal_profile *profile,
                                         const struct shoal_schedule_options *schedule_options,
                                         const struct shoal_partition_options *options, struct shoal_schedule **schedule_out,
                                         struct shoal_partition **partition_out, enum shoal_schedule_kind *kind_out, char *text,
                                         size_t text_bytes)
{
    const struct partition_text why = {text, text_bytes};
    struct shoal_partition_options own = SHOAL_PARTITION_OPTIONS_INIT;
    struct choice choice = {.profile = profile, .options = &own, .schedule_options = SHOAL_SCHEDULE_OPTIONS_INIT};
    bool lacks = false;
    if (!profile || !shoal_struct_bytes(schedule_options) || !shoal_struct_bytes(options) || !schedule_out || !partition_out)
        return partition_refuse(why, SHOAL_ERR_ARGUMENT,
                                "a pointer is NULL, or options are not set: use SHOAL_SCHEDULE_OPTIONS_INIT and "
                                "SHOAL_PARTITION_OPTIONS_INIT");
    shoal_struct_copy_in(&own, options, sizeof own);
    shoal_struct_copy_in(&choice.schedule_options, schedule_options, sizeof choice.schedule_options);
    if (choice.schedule_options.ranks == 0)
        return partition_refuse(why, SHOAL_ERR_ARGUMENT, "0 ranks: there must be one or more");
    const enum shoal_schedule_kind kind = choice.schedule_options.kind;
    choice.schedule_options.costs = mean_costs(profile, &own, choice.schedule_options.ranks);
    const enum shoal_status status = try_wanted(&choice, kind, &lacks, why);
    if (status == SHOAL_OK) {
        *schedule_out = choice.schedule;
        *partition_out = choice.partition;
        if (kind_out)
            *kind_out = choice.kind;
        return SHOAL_OK;
    }
    shoal_schedule_free(choice.schedule);
    shoal_partition_free(choice.partition);
    if (lacks)
        add_ranks(&choice, kind, why);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(why, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}
