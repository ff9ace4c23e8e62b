/* Does a division fit into the memory, and how many stages must be recomputed for one? */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

static enum shoal_status fits_as_scheduled(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                           const struct shoal_partition_options *options, bool *fits_out)
{
    struct problem other;
    double value;
    uint32_t *division = calloc((size_t)shoal_schedule_stages(schedule) + 1, sizeof *division);
    enum shoal_status status = problem_open(&other, profile, schedule, options, (struct partition_text){0});
    status = division ? status : SHOAL_ERR_MEMORY;
    for (enum memory_rule rule = MEMORY_HOPE; rule <= MEMORY_SURE && status == SHOAL_OK && !*fits_out; rule++) {
        status = divide(&other, rule, measure_time, NULL, false, division, &value);
        *fits_out = status == SHOAL_OK && value < PARTITION_NEVER && problem_excess(&other, division) == 0;
    }
    problem_close(&other);
    free(division);
    return status;
}

enum shoal_status fits_at_all(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                              const struct shoal_partition_options *options, bool *fits_out)
{
    struct shoal_schedule *recomputed = NULL;
    *fits_out = false;
    if (options->recomputes == SHOAL_RECOMPUTES_AS_SCHEDULED)
        return fits_as_scheduled(profile, schedule, options, fits_out);
    PARTITION_TRY(shoal_schedule_recompute(schedule, NULL, &recomputed));
    const enum shoal_status status = fits_as_scheduled(profile, recomputed, options, fits_out);
    shoal_schedule_free(recomputed);
    return status;
}

/* Returns whether some division fits if the first stages are recomputed. */
static enum shoal_status fits_with(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                   const struct shoal_partition_options *options, uint32_t first_stages, bool *fits_out)
{
    struct shoal_partition_options own = *options;
    struct shoal_schedule *recomputed = NULL;
    unsigned char *stages = calloc(shoal_schedule_stages(schedule), 1);
    own.recomputes = SHOAL_RECOMPUTES_AS_SCHEDULED;
    if (!stages)
        return SHOAL_ERR_MEMORY;
    memset(stages, 1, first_stages);
    enum shoal_status status = shoal_schedule_recompute(schedule, stages, &recomputed);
    if (status == SHOAL_OK)
        status = fits_at_all(profile, recomputed, &own, fits_out);
    shoal_schedule_free(recomputed);
    free(stages);
    return status;
}

/* A last stage that keeps one microbatch needs more memory if it is recomputed, for its input; so all but that one are tried
 * as well. */
enum shoal_status recompute_range(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                  const struct shoal_partition_options *options, uint32_t *fewest_out, uint32_t *most_out)
{
    uint32_t too_few = 0, enough = shoal_schedule_stages(schedule);
    bool fits = false;
    *fewest_out = *most_out = 0;
    PARTITION_TRY(fits_with(profile, schedule, options, enough, &fits));
    if (!fits && --enough > 0)
        PARTITION_TRY(fits_with(profile, schedule, options, enough, &fits));
    if (!fits)
        return SHOAL_OK;
    *most_out = enough;
    while (enough - too_few > 1) {
        const uint32_t middle = too_few + (enough - too_few) / 2;
        PARTITION_TRY(fits_with(profile, schedule, options, middle, &fits));
        if (fits)
            enough = middle;
        else
            too_few = middle;
    }
    *fewest_out = enough;
    return SHOAL_OK;
}
