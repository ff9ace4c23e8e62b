/* A time below which no predicted step is, for this schedule.
 *
 * Let stage s begin its first backward pass, of microbatch m, on its rank. Before that, m went forward through all stages and
 * back through those behind s. In the order of the last stage, some forward passes come before it goes back; the last of these
 * is the k-th forward pass of stage s. So before, there are the forward passes of the stages before s, k of its own, one of
 * each stage behind it, and one backward pass of each of those. From then on, the order of the rank has the rest of the actions
 * of s. And behind the last of its input gradients, the stages before s compute theirs.
 *
 * Also, whatever the order, s does not begin before the first microbatch has gone through the stages before it, and then has
 * all its actions.
 *
 * Both hold for each stage, so the least maximum over all divisions is a bound. Times of units that are not in s are those on
 * the fastest rank. Transfers count with their latency only, except in transfer_bound(). */
#include <stdlib.h>

#include "pipeline/partition/partition.h"

#define TRANSFER_LIMITS 8 /* of the path: each takes a division */
#define LARGE 16384       /* stages * units from which half of the limits will do */
#define TIES_MAX 8        /* that the bound looks at: each takes a division */

/* Actions of a stage from its first backward pass on: all, and up to its last input gradient. */
struct stage_rest {
    double ahead; /* k */
    double forward, input, weight;
    double early_forward, early_input, early_weight;
    double latency, early_latency;
    uint32_t forwards, microbatch; /* forward passes so far; the microbatch of the first backward pass */
    bool is_back;
};

struct bound {
    const struct problem *problem;
    struct stage_rest *rests; /* [stages] */
    double speed;             /* the highest */
    bool is_split;            /* some backward passes are in two actions, so input gradients travel alone */
    uint32_t *numbers;        /* [stages * microbatches]: the number of a forward pass on its stage, from 1 */
    uint32_t *last_order;     /* [microbatches]: the microbatches in the order of the last stage */
    uint32_t *last_before;    /* [microbatches]: forward passes of the last stage before its backward pass */
};

static void rest_count(struct bound *bound, const struct shoal_action *action)
{
    const struct problem *problem = bound->problem;
    const uint32_t microbatches = shoal_schedule_microbatches(problem->schedule);
    const bool is_last = action->stage + 1 == problem->stages;
    struct stage_rest *rest = &bound->rests[action->stage];
    if (action->kind >= SHOAL_SUM_REPLICAS) /* their times are added to that of the schedule */
        return;
    if (action->kind == SHOAL_FORWARD) {
        if (is_last)
            bound->last_order[rest->forwards] = action->microbatch;
        bound->numbers[(size_t)action->stage * microbatches + action->microbatch] = ++rest->forwards;
        rest->forward += rest->is_back;
        return;
    }
    if (action->kind == SHOAL_RECOMPUTE) {
        rest->forward += rest->is_back;
        return;
    }
    if (!rest->is_back)
        rest->microbatch = action->microbatch;
    rest->is_back = true;
    rest->weight += action->kind != SHOAL_INPUT_GRADIENT;
    if (action->kind == SHOAL_WEIGHT_GRADIENT)
        return;
    if (is_last)
        bound->last_before[action->microbatch] = rest->forwards;
    bound->is_split |= action->kind == SHOAL_INPUT_GRADIENT;
    rest->input++;
    rest->early_forward = rest->forward;
    rest->early_input = rest->input;
    rest->early_weight = rest->weight;
}

static void count_ahead(struct bound *bound, uint32_t stage)
{
    const uint32_t microbatches = shoal_schedule_microbatches(bound->problem->schedule);
    struct stage_rest *rest = &bound->rests[stage];
    for (uint32_t i = 0; i < bound->last_before[rest->microbatch]; i++) {
        const uint32_t number = bound->numbers[(size_t)stage * microbatches + bound->last_order[i]];
        rest->ahead = number > rest->ahead ? number : rest->ahead;
    }
}

static void count_latencies(struct bound *bound)
{
    const struct problem *problem = bound->problem;
    double all = 0, before = 0;
    for (uint32_t s = 0; s < problem->stages; s++)
        all += problem->uses[s].is_far_ahead ? problem->options.latency_us : 0;
    for (uint32_t s = 0; s < problem->stages; s++) {
        before += problem->uses[s].is_far_ahead ? problem->options.latency_us : 0;
        bound->rests[s].latency = all + (all - before);
        bound->rests[s].early_latency = 2 * all;
    }
}

static void count_actions(struct bound *bound)
{
    const struct problem *problem = bound->problem;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        uint32_t count;
        const struct shoal_action *actions = shoal_schedule_actions(problem->schedule, r, &count);
        for (uint32_t i = 0; i < count; i++)
            rest_count(bound, &actions[i]);
        bound->speed = problem->speeds[r] > bound->speed ? problem->speeds[r] : bound->speed;
    }
    for (uint32_t s = 0; s < problem->stages; s++)
        count_ahead(bound, s);
    count_latencies(bound);
}

static double largest(double one, double other)
{
    return one > other ? one : other;
}

/* The time of a backward pass that others wait for. */
static double back_of(const struct bound *bound, uint32_t from, uint32_t to)
{
    const struct problem *problem = bound->problem;
    return problem->input[to] - problem->input[from] + (bound->is_split ? 0 : problem->weight[to] - problem->weight[from]);
}

/* The path up to the last input gradient, which passes over each begin of a stage twice; without transfers. */
static double measure_path(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to)
{
    const struct bound *bound = arg;
    const struct stage_rest *rest = &bound->rests[stage];
    const double own = problem->speeds[problem->uses[stage].rank];
    const double forward = (problem->forward[to] - problem->forward[from]) / own;
    const double input = (problem->input[to] - problem->input[from]) / own;
    const double weight = (problem->weight[to] - problem->weight[from]) / own;
    const double ahead = problem->forward[problem->units] - problem->forward[to] + problem->forward[from];
    const double others = ahead + back_of(bound, to, problem->units) + back_of(bound, 0, from);
    return others / bound->speed + (rest->ahead + rest->early_forward) * forward + rest->early_input * input +
           rest->early_weight * weight;
}

static double measure_bound(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to)
{
    const struct bound *bound = arg;
    const struct stage_rest *rest = &bound->rests[stage];
    const double own = problem->speeds[problem->uses[stage].rank];
    const double forward = (problem->forward[to] - problem->forward[from]) / own;
    const double input = (problem->input[to] - problem->input[from]) / own;
    const double weight = (problem->weight[to] - problem->weight[from]) / own;
    const double others = (problem->forward[problem->units] - problem->forward[to] + problem->forward[from]) / bound->speed +
                          back_of(bound, to, problem->units) / bound->speed + rest->ahead * forward;
    const double all = others + rest->latency + rest->forward * forward + rest->input * input + rest->weight * weight;
    const double early = measure_path(problem, arg, stage, from, to) + rest->early_latency;
    const double microbatches = shoal_schedule_microbatches(problem->schedule), begin = problem->forward[from] / bound->speed;
    const double again = shoal_schedule_recomputes(problem->schedule, stage) ? forward : 0;
    const double busy = begin + microbatches * (forward + again + input + weight);
    const double early_busy =
        begin + microbatches * (forward + again + input) + rest->early_weight * weight + back_of(bound, 0, from) / bound->speed;
    return largest(largest(all, early), largest(busy, early_busy));
}

static int by_falling_work(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* All ranks together cannot do the work of all microbatches faster. Also, units cannot be divided: of the (k - 1) p + 1 longest
 * units, some of the p ranks has k. */
static enum shoal_status work_bound(const struct problem *problem, double speed, double *bound_out)
{
    double *works = calloc(problem->units, sizeof *works), speeds = 0, most = 0;
    uint32_t ranks = 0;
    if (!works)
        return SHOAL_ERR_MEMORY;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        speeds += problem->rank_stages[r] ? problem->speeds[r] : 0;
        ranks += problem->rank_stages[r] > 0;
    }
    for (uint32_t i = 0; i < problem->units; i++)
        works[i] = problem_work(problem, i, i + 1);
    qsort(works, problem->units, sizeof *works, by_falling_work);
    for (uint64_t k = 1, count = 1; count <= problem->units; k++, count += ranks) {
        double least = 0;
        for (uint64_t i = 1; i <= k; i++)
            least += works[count - i];
        most = largest(most, least / speed);
    }
    free(works);
    most = largest(most, problem_work(problem, 0, problem->units) / speeds);
    *bound_out = shoal_schedule_microbatches(problem->schedule) * most;
    return SHOAL_OK;
}

/* The bound with the bytes of transfers: the longest path, and twice all transfers. Between two limits of the path, the
 * transfers are at least those that the higher limit allows. The limits go from the shortest path, of some division, up to that
 * division's path and transfers together; beyond, a path alone is longer. */
static enum shoal_status transfer_bound(const struct problem *problem, const struct bound *bound, uint32_t *trial,
                                        double *bound_out)
{
    double low, transfers;
    PARTITION_TRY(divide(problem, MEMORY_HOPE, measure_path, bound, false, trial, &low));
    *bound_out = 0;
    if (low >= PARTITION_NEVER)
        return SHOAL_OK;
    PARTITION_TRY(divide_cheaply(problem, measure_path, bound, low * (1 + 1e-9), NULL, &transfers));
    const double high = low + 2 * transfers;
    const int limits = (uint64_t)problem->stages * problem->units > LARGE ? TRANSFER_LIMITS / 2 : TRANSFER_LIMITS;
    *bound_out = high;
    for (int i = 0; i < limits; i++) {
        const double from = low + (high - low) * i * i / (limits * limits);
        const double to = low + (high - low) * (i + 1) * (i + 1) / (limits * limits);
        PARTITION_TRY(divide_cheaply(problem, measure_path, bound, to * (1 + 1e-9), NULL, &transfers));
        *bound_out = from + 2 * transfers < *bound_out ? from + 2 * transfers : *bound_out;
    }
    return SHOAL_OK;
}

/* Ties: either no tie has all its units on one rank, and all sums are paid; or some tie has, which is the case of a stage that
 * has all its units, if each rank has one stage. *bound_io is the bound without ties. */
static enum shoal_status tie_bound(struct problem *problem, const struct bound *bound, uint32_t *trial, double *bound_io)
{
    const struct shoal_profile *profile = problem->profile;
    bool *const glued = problem->is_glued, *const own = calloc((size_t)problem->units + 1, sizeof *own);
    double paid = *bound_io, together = PARTITION_NEVER;
    enum shoal_status status = own ? SHOAL_OK : SHOAL_ERR_MEMORY;
    for (size_t t = 0; t < profile->tie_count && status == SHOAL_OK; t++) {
        const struct profile_tie *tie = &profile->ties[t];
        double value = PARTITION_NEVER;
        for (uint32_t u = 0; u <= problem->units; u++)
            own[u] = u > tie->units[0] && u <= tie->units[tie->count - 1];
        problem->is_glued = own;
        status = divide(problem, MEMORY_HOPE, measure_bound, bound, false, trial, &value);
        problem->is_glued = glued;
        together = value < together ? value : together;
        paid += problem_sum_time(problem, tie, 2);
    }
    free(own);
    *bound_io = paid < together ? paid : together;
    return status;
}

static enum shoal_status find_bound(struct problem *problem, struct bound *bound, uint32_t *division_out, double *bound_out)
{
    uint32_t *trial = calloc((size_t)problem->stages + 1, sizeof *trial);
    double least = 0, transfers = 0;
    count_actions(bound);
    enum shoal_status status = trial ? work_bound(problem, bound->speed, &least) : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = divide(problem, MEMORY_HOPE, measure_bound, bound, false, division_out, bound_out);
    const bool is_found = status == SHOAL_OK && *bound_out < PARTITION_NEVER;
    const bool has_ties = problem->profile->tie_count > 0 && problem->profile->tie_count <= TIES_MAX;
    if (is_found && problem->options.bytes_per_us > 0)
        status = transfer_bound(problem, bound, trial, &transfers);
    *bound_out = is_found ? largest(*bound_out, transfers) : least;
    double tied = *bound_out;
    if (status == SHOAL_OK && is_found && has_ties && problem->is_one_each && !problem->options.keeps_ties_together)
        status = tie_bound(problem, bound, trial, &tied);
    *bound_out = largest(largest(*bound_out, tied), least);
    free(trial);
    return status;
}

enum shoal_status bound_find(struct problem *problem, uint32_t *division_out, double *bound_out)
{
    const size_t microbatches = shoal_schedule_microbatches(problem->schedule);
    struct bound bound = {.problem = problem};
    bound.rests = calloc(problem->stages, sizeof *bound.rests);
    bound.numbers = calloc(problem->stages, microbatches * sizeof *bound.numbers);
    bound.last_order = calloc(microbatches, sizeof *bound.last_order);
    bound.last_before = calloc(microbatches, sizeof *bound.last_before);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (bound.rests && bound.numbers && bound.last_order && bound.last_before)
        status = find_bound(problem, &bound, division_out, bound_out);
    free(bound.rests);
    free(bound.numbers);
    free(bound.last_order);
    free(bound.last_before);
    return status;
}
