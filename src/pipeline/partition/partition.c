/* The life of a partition, and its results, which are computed once. */
#include "pipeline/partition/partition.h"

#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"

struct shoal_partition {
    uint32_t stages, ranks;
    struct shoal_stage *stage;        /* [stages] */
    struct shoal_rank_memory *memory; /* [ranks] */
    struct shoal_partition_times times;
    bool fits;                         /* each rank's need is within its limit */
    char (*reasons)[PARTITION_REASON]; /* [stages] */
    struct partition_sums sums;
};

static const char *const methods[] = {
#define SHOAL_PARTITION_WORD(name, number, word, text) [number] = (word),
    SHOAL_PARTITION_LIST(SHOAL_PARTITION_WORD)
#undef SHOAL_PARTITION_WORD
};
#define METHODS (sizeof methods / sizeof methods[0])

const char *shoal_partition_method_name(enum shoal_partition_method method)
{
    return (unsigned)method < METHODS ? methods[method] : NULL;
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

void shoal_partition_free(struct shoal_partition *partition)
{
    if (!partition)
        return;
    free(partition->stage);
    free(partition->memory);
    free(partition->reasons);
    free(partition->sums.tied);
    free(partition);
}

static struct shoal_partition *partition_allocate(const struct problem *problem)
{
    struct shoal_partition *partition = calloc(1, sizeof *partition);
    if (!partition)
        return NULL;
    partition->stages = problem->stages;
    partition->ranks = problem->ranks;
    partition->stage = calloc(problem->stages, sizeof *partition->stage);
    partition->memory = calloc(problem->ranks, sizeof *partition->memory);
    partition->reasons = calloc(problem->stages, sizeof *partition->reasons);
    if (partition->stage && partition->memory && partition->reasons)
        return partition;
    shoal_partition_free(partition);
    return NULL;
}

/* Rounds to a whole number, at most 2^63. */
static uint64_t whole_bytes(double bytes)
{
    return bytes >= 0x1p63 ? UINT64_C(1) << 63 : bytes > 0 ? (uint64_t)(bytes + 0.5) : 0;
}

static void set_stages(struct shoal_partition *partition, struct problem *problem, const uint32_t *division)
{
    problem_costs(problem, division, problem->costs);
    for (uint32_t s = 0; s < problem->stages; s++) {
        const uint32_t from = division[s], to = division[s + 1];
        const struct shoal_stage_costs *costs = &problem->costs[s];
        struct shoal_stage *stage = &partition->stage[s];
        *stage = (struct shoal_stage)SHOAL_STAGE_INIT;
        stage->rank = problem->uses[s].rank;
        stage->first_unit = from;
        stage->unit_count = to - from;
        stage->forward = costs->forward;
        stage->input_gradient = costs->input_gradient;
        stage->weight_gradient = costs->weight_gradient;
        stage->transfer = costs->transfer;
        stage->parameter_bytes = whole_bytes(problem_parameters(problem, from, to));
        const double share = problem->shares[stage->rank];
        stage->kept_bytes = whole_bytes(share * (problem->kept[to] - problem->kept[from]));
        stage->received_bytes = whole_bytes(s > 0 ? share * problem->cut[from] : 0);
        stage->replicas = problem->replicas[stage->rank];
        stage->recomputes = shoal_schedule_recomputes(problem->schedule, s);
    }
}

static void set_memory(struct shoal_partition *partition, const struct problem *problem, const uint32_t *division)
{
    for (uint32_t r = 0; r < problem->ranks; r++) {
        const struct memory_need need = problem_need(problem, division, r);
        struct shoal_rank_memory *memory = &partition->memory[r];
        *memory = (struct shoal_rank_memory)SHOAL_RANK_MEMORY_INIT;
        memory->parameter_bytes = whole_bytes(need.parameters);
        memory->gradient_bytes = whole_bytes(need.gradients);
        memory->state_bytes = whole_bytes(need.states);
        memory->activation_bytes = whole_bytes(need.activations);
        memory->buffer_bytes = whole_bytes(need.buffers);
        memory->total_bytes = whole_bytes(problem_total(&need));
        memory->limit_bytes = whole_bytes(problem->limits[r]);
    }
}

/* The bottleneck: a stage, or a transfer. */
static double bottleneck_of(const struct problem *problem)
{
    double longest = 0;
    for (uint32_t s = 0; s < problem->stages; s++) {
        const struct shoal_stage_costs *costs = &problem->costs[s];
        const double again = shoal_schedule_recomputes(problem->schedule, s) ? costs->forward : 0;
        const double work = costs->forward + again + costs->input_gradient + costs->weight_gradient;
        longest = work > longest ? work : longest;
        longest = costs->transfer > longest ? costs->transfer : longest;
    }
    return longest;
}

static enum shoal_status set_results(struct problem *problem, const uint32_t *division, const struct verdict *verdict,
                                     double bound, bool is_optimal, struct shoal_partition **partition_out)
{
    struct shoal_partition *partition = partition_allocate(problem);
    if (!partition)
        return SHOAL_ERR_MEMORY;
    partition->times = (struct shoal_partition_times)SHOAL_PARTITION_TIMES_INIT;
    enum shoal_status status = reasons_write(problem, division, verdict, partition->reasons);
    set_stages(partition, problem, division);
    set_memory(partition, problem, division);
    if (status == SHOAL_OK)
        status = partition_sums_find(problem, division, partition->stage, &partition->sums);
    if (status == SHOAL_OK)
        status = partition_sums_time(problem, partition->stage, &partition->sums, &partition->times.overlapped);
    if (status != SHOAL_OK) {
        shoal_partition_free(partition);
        return status;
    }
    const bool is_rounded = bound > verdict->step && bound < verdict->step * (1 + 1e-9);
    partition->times.step = verdict->step;
    partition->times.tied = verdict->tied;
    partition->times.replicas = verdict->replicas;
    partition->times.bubble = verdict->bubble;
    partition->times.bottleneck = bottleneck_of(problem);
    partition->times.lower_bound = is_optimal || is_rounded ? verdict->step : bound;
    partition->times.is_optimal = is_optimal;
    partition->fits = verdict->excess <= 0;
    *partition_out = partition;
    return SHOAL_OK;
}

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status find_division(struct problem *problem, const uint32_t *bound_division, uint32_t *division,
                                       struct verdict *verdict_out, bool *is_optimal_out)
{
    if (problem->options.method == SHOAL_PARTITION_SHORTEST)
        return refine(problem, bound_division, division, verdict_out, is_optimal_out);
    if (problem->options.method == SHOAL_PARTITION_TREE)
        PARTITION_TRY(tree_divide(problem, division));
    else
        equal_divide(problem, division);
    if (problem_allows(problem, division))
        return problem_judge(problem, division, verdict_out);
    verdict_out->excess = PARTITION_NEVER;
    return SHOAL_OK;
}

static enum shoal_status make_opened(struct problem *problem, uint32_t *division, uint32_t *bound_division,
                                     struct shoal_partition **partition_out, bool *lacks_out, struct partition_text text)
{
    struct verdict verdict = {0};
    bool is_optimal = false;
    double bound = 0;
    PARTITION_TRY(bound_find(problem, bound_division, &bound));
    PARTITION_TRY(find_division(problem, bound_division, division, &verdict, &is_optimal));
    if (verdict.excess == PARTITION_NEVER)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "method %s found no partition that respects pins and ties",
                                methods[problem->options.method]);
    *lacks_out = verdict.excess > 0;
    if (*lacks_out)
        return advice_refuse(problem, division, text);
    return set_results(problem, division, &verdict, bound, is_optimal, partition_out);
}

enum shoal_status partition_make_for(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                     const struct shoal_partition_options *options, struct shoal_partition **partition_out,
                                     bool *lacks_out, struct partition_text text)
{
    struct problem problem;
    *lacks_out = false;
    enum shoal_status status = problem_open(&problem, profile, schedule, options, text);
    uint32_t *division = calloc((size_t)problem.stages + 1, sizeof *division);
    uint32_t *bound_division = calloc((size_t)problem.stages + 1, sizeof *bound_division);
    if (status == SHOAL_OK)
        status = division && bound_division ? make_opened(&problem, division, bound_division, partition_out, lacks_out, text)
                                            : SHOAL_ERR_MEMORY;
    problem_close(&problem);
    free(division);
    free(bound_division);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(text, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}

/* ---- A division that is given -------------------------------------------------------------------------------------------- */

static enum shoal_status check_division(const struct problem *problem, const uint32_t *first_units, uint32_t *division,
                                        struct partition_text text)
{
    memcpy(division, first_units, problem->stages * sizeof *division);
    division[problem->stages] = problem->units;
    if (division[0] != 0)
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "first_units[0] is %u: stage 0 must begin with unit 0", division[0]);
    for (uint32_t s = 0; s < problem->stages; s++)
        if (division[s] > division[s + 1])
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "stage %u begins with unit %u, behind %u, the begin of stage %u",
                                    s, division[s], division[s + 1], s + 1);
    if (!problem_allows(problem, division))
        return partition_refuse(text, SHOAL_ERR_ARGUMENT, "first_units contradict a pin, or a tie that must be on one rank");
    return SHOAL_OK;
}

static enum shoal_status judge_given(struct problem *problem, const uint32_t *first_units, uint32_t *division,
                                     struct shoal_partition **partition_out, struct partition_text text)
{
    struct verdict verdict;
    double bound;
    PARTITION_TRY(bound_find(problem, division, &bound));
    PARTITION_TRY(check_division(problem, first_units, division, text));
    PARTITION_TRY(problem_judge(problem, division, &verdict));
    return set_results(problem, division, &verdict, bound, false, partition_out);
}

enum shoal_status partition_make_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                    const struct shoal_partition_options *options, const uint32_t *first_units,
                                    struct shoal_partition **partition_out, struct partition_text text)
{
    struct problem problem;
    enum shoal_status status = problem_open(&problem, profile, schedule, options, text);
    uint32_t *division = calloc((size_t)problem.stages + 1, sizeof *division);
    if (status == SHOAL_OK)
        status = division ? judge_given(&problem, first_units, division, partition_out, text) : SHOAL_ERR_MEMORY;
    problem_close(&problem);
    free(division);
    return status == SHOAL_ERR_MEMORY ? partition_refuse(text, status, "no memory for a partition of %u units", profile->count)
                                      : status;
}

void partition_set_bound(struct shoal_partition *partition, double bound)
{
    const double step = partition->times.step;
    partition->times.lower_bound = bound < step ? bound : step;
    partition->times.is_optimal = 0;
}

void partition_first_units(const struct shoal_partition *partition, uint32_t *first_units_out)
{
    for (uint32_t s = 0; s < partition->stages; s++)
        first_units_out[s] = partition->stage[s].first_unit;
}

bool partition_fits(const struct shoal_partition *partition)
{
    return partition->fits;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

uint32_t shoal_partition_stages(const struct shoal_partition *partition)
{
    return partition->stages;
}

enum shoal_status shoal_partition_stage(const struct shoal_partition *partition, uint32_t stage, struct shoal_stage *stage_out)
{
    if (!partition || stage >= partition->stages || !shoal_struct_bytes(stage_out))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_out(stage_out, &partition->stage[stage], sizeof *stage_out);
    return SHOAL_OK;
}

enum shoal_status shoal_partition_memory(const struct shoal_partition *partition, uint32_t rank,
                                         struct shoal_rank_memory *memory_out)
{
    if (!partition || rank >= partition->ranks || !shoal_struct_bytes(memory_out))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_out(memory_out, &partition->memory[rank], sizeof *memory_out);
    return SHOAL_OK;
}

enum shoal_status shoal_partition_step_times(const struct shoal_partition *partition, struct shoal_partition_times *times_out)
{
    if (!partition || !shoal_struct_bytes(times_out))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_out(times_out, &partition->times, sizeof *times_out);
    return SHOAL_OK;
}

enum shoal_status shoal_partition_add_sums(const struct shoal_partition *partition, const struct shoal_schedule *schedule,
                                           int updates, struct shoal_schedule **schedule_out)
{
    if (!partition || !schedule || shoal_schedule_stages(schedule) != partition->stages)
        return SHOAL_ERR_ARGUMENT;
    return shoal_schedule_add_sums(schedule, partition->sums.tied, partition->sums.tied_count, 0, updates, schedule_out);
}

const char *shoal_partition_reason(const struct shoal_partition *partition, uint32_t stage)
{
    return partition->reasons[stage];
}
