/* What is short if units do not fit, and what would fit. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

#define SHARDS_MAX 4096u

struct size_text {
    char at[32];
};

/* "1.5 GiB" */
static struct size_text size_text(double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    struct size_text text;
    size_t unit = 0;
    for (; bytes >= 1024 && unit + 1 < sizeof units / sizeof units[0]; unit++)
        bytes /= 1024;
    snprintf(text.at, sizeof text.at, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

static size_t write_lack(const struct problem *problem, const uint32_t *division, char *line, size_t room)
{
    double lack;
    const uint32_t rank = problem_neediest(problem, division, &lack);
    const struct memory_need need = problem_need(problem, division, rank);
    const double total = problem_total(&need), limit = problem->limits[rank];
    const bool is_best = problem->options.method == SHOAL_PARTITION_SHORTEST;
    const int used = snprintf(line, room,
                              "%s: in %s, rank %u needs %s and has %s, so %s are short "
                              "(parameters %s, gradients %s, optimizer states %s, activations %s, buffers %s)",
                              is_best ? "no partition was found that fits" : "the partition of this method does not fit",
                              is_best ? "the best one" : "it", rank, size_text(total).at, size_text(limit).at,
                              size_text(lack).at, size_text(need.parameters).at, size_text(need.gradients).at,
                              size_text(need.states).at, size_text(need.activations).at, size_text(need.buffers).at);
    return used > 0 && (size_t)used < room ? (size_t)used : room - 1;
}

/* Finds the fewest shards of states and gradients, of powers of two, with which a division fits; 0: none. */
static enum shoal_status find_shards(const struct problem *problem, bool recomputes, uint32_t *shards_out)
{
    struct shoal_partition_options options = problem->options;
    bool fits = false;
    options.recomputes = recomputes;
    *shards_out = 0;
    for (uint32_t shards = 2; shards <= SHARDS_MAX && !fits; shards *= 2) {
        options.state_shards = shards > options.state_shards ? shards : options.state_shards;
        options.gradient_shards = shards > options.gradient_shards ? shards : options.gradient_shards;
        PARTITION_TRY(fits_at_all(problem->profile, problem->schedule, &options, &fits));
        *shards_out = fits ? shards : 0;
    }
    return SHOAL_OK;
}

/* " of stages 0 to 2": the fewest first stages that must be recomputed. Nothing for all of them. *fits_out is false if none
 * suffice. */
static enum shoal_status write_stages(const struct problem *problem, char *line, size_t room, bool *fits_out)
{
    uint32_t fewest, most;
    PARTITION_TRY(recompute_range(problem->profile, problem->schedule, &problem->options, &fewest, &most));
    *fits_out = fewest > 0;
    if (fewest == 1 && problem->stages > 1)
        snprintf(line, room, " of stage 0");
    else if (fewest > 0 && fewest < problem->stages)
        snprintf(line, room, " of stages 0 to %u", fewest - 1);
    return SHOAL_OK;
}

/* "It would fit if activations are recomputed; ..." */
static enum shoal_status write_help(const struct problem *problem, char *line, size_t room)
{
    struct shoal_partition_options options = problem->options;
    bool recomputed = false, fits = false;
    uint32_t shards, both = 0;
    char stages[40] = "";
    if (options.method != SHOAL_PARTITION_SHORTEST)
        PARTITION_TRY(fits_at_all(problem->profile, problem->schedule, &options, &fits));
    if (fits) {
        snprintf(line, room, ". The method \"shortest\" has one that fits");
        return SHOAL_OK;
    }
    if (!problem->recomputes_all)
        PARTITION_TRY(write_stages(problem, stages, sizeof stages, &recomputed));
    PARTITION_TRY(find_shards(problem, problem->recomputes_all, &shards));
    if (!recomputed && !shards && !problem->recomputes_all)
        PARTITION_TRY(find_shards(problem, true, &both));
    if (recomputed && shards)
        snprintf(line, room, ". It would fit if activations%s are recomputed, or with gradients and states in %u shards",
                 stages, shards);
    else if (recomputed)
        snprintf(line, room, ". It would fit if activations%s are recomputed", stages);
    else if (shards)
        snprintf(line, room, ". It would fit with gradients and states in %u shards", shards);
    else if (both)
        snprintf(line, room, ". It would fit if activations are recomputed, with gradients and states in %u shards", both);
    else
        snprintf(line, room,
                 ". Neither recomputation nor shards of gradients and states suffice: use more stages, parameter shards "
                 "or smaller microbatches");
    return SHOAL_OK;
}

enum shoal_status advice_refuse(const struct problem *problem, const uint32_t *division, struct partition_text text)
{
    char line[900] = "";
    const size_t used = write_lack(problem, division, line, sizeof line);
    PARTITION_TRY(write_help(problem, line + used, sizeof line - used));
    return partition_refuse(text, SHOAL_ERR_ARGUMENT, "%s", line);
}
