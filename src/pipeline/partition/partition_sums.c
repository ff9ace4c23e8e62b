/* How long sums of gradients take if they run in actions of the schedule, alongside its computation. */
#include <stdlib.h>

#include "pipeline/partition/partition.h"

/* Appends the stages of a tie that ranks sum together, each once: units rise, and so do their stages. */
static void append_tie(const struct problem *problem, const uint32_t *division, uint32_t tie, struct shoal_stage *stages,
                       struct partition_sums *sums)
{
    const struct profile_tie *const members = &problem->profile->ties[tie];
    const uint32_t ranks = problem_members(problem, division, members);
    const double time = problem_sum_time(problem, members, ranks);
    uint32_t last = UINT32_MAX;
    for (uint32_t i = 0; i < members->count && ranks > 1; i++) {
        const uint32_t stage = division_stage(problem, division, members->units[i]);
        if (stage == last)
            continue;
        last = stage;
        sums->tied[sums->tied_count++] = (struct shoal_tied_stage){tie, stage};
        stages[stage].sum_tied = time > stages[stage].sum_tied ? time : stages[stage].sum_tied;
    }
}

enum shoal_status partition_sums_find(const struct problem *problem, const uint32_t *division, struct shoal_stage *stages,
                                      struct partition_sums *sums_out)
{
    size_t most = 0;
    for (size_t t = 0; t < problem->profile->tie_count; t++)
        most += problem->profile->ties[t].count;
    *sums_out = (struct partition_sums){.tied = calloc(most + 1, sizeof *sums_out->tied)};
    if (!sums_out->tied)
        return SHOAL_ERR_MEMORY;
    for (size_t t = 0; t < problem->profile->tie_count; t++)
        append_tie(problem, division, (uint32_t)t, stages, sums_out);
    for (uint32_t s = 0; s < problem->stages; s++)
        if (stages[s].replicas > 1)
            stages[s].sum_replicas =
                problem_replica_time(problem, stages[s].rank, problem_parameters(problem, division[s], division[s + 1]));
    return SHOAL_OK;
}

static enum shoal_status time_summed(const struct shoal_schedule *schedule, const struct shoal_stage *stages, double *step_out)
{
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    const uint32_t count = shoal_schedule_stages(schedule);
    struct shoal_stage_costs *const costs = calloc(count, sizeof *costs);
    if (!costs)
        return SHOAL_ERR_MEMORY;
    for (uint32_t s = 0; s < count; s++)
        costs[s] = (struct shoal_stage_costs){stages[s].forward,
                                              stages[s].input_gradient,
                                              stages[s].weight_gradient,
                                              stages[s].transfer,
                                              stages[s].sum_replicas,
                                              stages[s].sum_tied,
                                              0};
    const enum shoal_status status = shoal_schedule_time_stages(schedule, costs, 1, &times, NULL);
    *step_out = times.step;
    free(costs);
    return status;
}

enum shoal_status partition_sums_time(const struct problem *problem, const struct shoal_stage *stages,
                                      const struct partition_sums *sums, double *step_out)
{
    struct shoal_schedule *replicated = NULL, *summed = NULL;
    enum shoal_status status = shoal_schedule_replicate(problem->schedule, problem->replicas, &replicated);
    if (status == SHOAL_OK)
        status = shoal_schedule_add_sums(replicated, sums->tied, sums->tied_count, 0, 0, &summed);
    if (status == SHOAL_OK)
        status = time_summed(summed, stages, step_out);
    shoal_schedule_free(replicated);
    shoal_schedule_free(summed);
    return status;
}
