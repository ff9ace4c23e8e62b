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
 * the fastest rank. Transfers count with their latency only. */
#include <stdlib.h>

#include "pipeline/partition/partition.h"

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
    if (action->kind == SHOAL_FORWARD) {
        if (is_last)
            bound->last_order[rest->forwards] = action->microbatch;
        bound->numbers[(size_t)action->stage * microbatches + action->microbatch] = ++rest->forwards;
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
    const double early = others + rest->early_latency + rest->early_forward * forward + rest->early_input * input +
                         rest->early_weight * weight + back_of(bound, 0, from) / bound->speed;
    const double microbatches = shoal_schedule_microbatches(problem->schedule), begin = problem->forward[from] / bound->speed;
    const double busy = begin + microbatches * (forward + input + weight);
    const double early_busy =
        begin + microbatches * (forward + input) + rest->early_weight * weight + back_of(bound, 0, from) / bound->speed;
    return largest(largest(all, early), largest(busy, early_busy));
}

/* All ranks together cannot do the work of all microbatches faster. */
static double work_bound(const struct problem *problem)
{
    double speeds = 0;
    for (uint32_t r = 0; r < problem->ranks; r++)
        speeds += problem->rank_stages[r] ? problem->speeds[r] : 0;
    return shoal_schedule_microbatches(problem->schedule) * problem_work(problem, 0, problem->units) / speeds;
}

enum shoal_status bound_find(const struct problem *problem, uint32_t *division_out, double *bound_out)
{
    const size_t microbatches = shoal_schedule_microbatches(problem->schedule);
    struct bound bound = {.problem = problem};
    bound.rests = calloc(problem->stages, sizeof *bound.rests);
    bound.numbers = calloc(problem->stages, microbatches * sizeof *bound.numbers);
    bound.last_order = calloc(microbatches, sizeof *bound.last_order);
    bound.last_before = calloc(microbatches, sizeof *bound.last_before);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    if (bound.rests && bound.numbers && bound.last_order && bound.last_before) {
        count_actions(&bound);
        status = divide(problem, MEMORY_HOPE, measure_bound, &bound, false, division_out, bound_out);
    }
    free(bound.rests);
    free(bound.numbers);
    free(bound.last_order);
    free(bound.last_before);
    const double least = work_bound(problem);
    if (status == SHOAL_OK)
        *bound_out = *bound_out<PARTITION_NEVER && * bound_out> least ? *bound_out : least;
    return status;
}
