/* The search for the division with the shortest predicted step. If the effort allows for it, all divisions are compared.
 * Otherwise the search begins with several divisions and improves the best two: it moves the begins of one or more stages that
 * follow each other by one unit as long as this helps. Then it does so from places around the best one. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

#define STARTS 2 /* that are improved */
#define KICKS 8  /* of the best one, each improved again */

struct start {
    uint32_t *division;
    struct verdict verdict;
    bool is_set;
};

struct search {
    struct problem *problem;
    uint32_t *trial;
    uint64_t effort; /* actions that may have been simulated in all */
    struct start best[STARTS];
};

static size_t division_bytes(const struct problem *problem)
{
    return ((size_t)problem->stages + 1) * sizeof(uint32_t);
}

/* Returns true if some rank computes longer than a step that is known; then timing is not worth while. */
static bool is_too_slow(const struct problem *problem, const uint32_t *division, double step)
{
    const uint32_t microbatches = shoal_schedule_microbatches(problem->schedule);
    for (uint32_t s = 0; s < problem->stages; s++) {
        const double work = problem_work(problem, division[s], division[s + 1]);
        if (work / problem->speeds[problem->uses[s].rank] * microbatches > step)
            return true;
    }
    return false;
}

/* ---- All divisions ------------------------------------------------------------------------------------------------------- */

/* Returns how many divisions there are: multisets of stages - 1 begins among units + 1. */
static double count_divisions(const struct problem *problem)
{
    double count = 1;
    for (uint32_t i = 1; i < problem->stages && count < 1e18; i++)
        count = count * (problem->units + i) / i;
    return count;
}

/* Moves to the next list of begins. Returns false behind the last one. */
static bool next_division(const struct problem *problem, uint32_t *division)
{
    uint32_t s = problem->stages;
    while (s > 1 && division[s - 1] == problem->units)
        s--;
    if (s == 1)
        return false;
    const uint32_t begin = division[s - 1] + 1;
    for (uint32_t i = s - 1; i < problem->stages; i++)
        division[i] = begin;
    return true;
}

static enum shoal_status compare_all(struct search *search, uint32_t *division_out, struct verdict *verdict_out)
{
    struct problem *problem = search->problem;
    struct verdict verdict;
    bool is_set = false;
    memset(search->trial, 0, division_bytes(problem));
    search->trial[problem->stages] = problem->units;
    do {
        if (!problem_allows(problem, search->trial))
            continue;
        if (is_set && verdict_out->excess == 0 && is_too_slow(problem, search->trial, verdict_out->step))
            continue;
        PARTITION_TRY(problem_judge(problem, search->trial, &verdict));
        if (is_set && !verdict_is_better(&verdict, verdict_out))
            continue;
        *verdict_out = verdict;
        memcpy(division_out, search->trial, division_bytes(problem));
        is_set = true;
    } while (next_division(problem, search->trial));
    return SHOAL_OK;
}

/* ---- Starts -------------------------------------------------------------------------------------------------------------- */

/* Keeps the trial if it is among the best ones and not there yet. */
static enum shoal_status refine_offer(struct search *search)
{
    struct problem *problem = search->problem;
    struct verdict verdict;
    if (!problem_allows(problem, search->trial))
        return SHOAL_OK;
    for (size_t i = 0; i < STARTS; i++)
        if (search->best[i].is_set && memcmp(search->best[i].division, search->trial, division_bytes(problem)) == 0)
            return SHOAL_OK;
    PARTITION_TRY(problem_judge(problem, search->trial, &verdict));
    for (size_t i = 0; i < STARTS; i++) {
        struct start *start = &search->best[i];
        if (start->is_set && !verdict_is_better(&verdict, &start->verdict))
            continue;
        uint32_t *const last = search->best[STARTS - 1].division;
        memmove(start + 1, start, (STARTS - 1 - i) * sizeof *start);
        memcpy(last, search->trial, division_bytes(problem));
        *start = (struct start){last, verdict, true};
        break;
    }
    return SHOAL_OK;
}

/* Bytes that a stage lacks, without buffers. */
static double measure_lack(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to)
{
    double grows;
    (void)arg;
    (void)problem_lack(problem, MEMORY_SURE, stage, from, to, problem_parameters(problem, from, to), &grows);
    return grows;
}

static enum shoal_status offer_divided(struct search *search, enum memory_rule rule, stage_measure measure)
{
    double value;
    PARTITION_TRY(divide(search->problem, rule, measure, NULL, measure == measure_time, search->trial, &value));
    return value < PARTITION_NEVER ? refine_offer(search) : SHOAL_OK;
}

/* With transfers that are long, fewer stages may be better: the last ones stay empty. */
static enum shoal_status offer_fewer(struct search *search)
{
    struct problem *problem = search->problem;
    const uint32_t stages = problem->stages;
    enum shoal_status status = SHOAL_OK;
    for (uint32_t used = stages - 1; used > 0 && status == SHOAL_OK; used = used > 16 ? used / 2 : used - 1) {
        double value;
        problem->stages = used;
        status = divide(problem, MEMORY_HOPE, measure_time, NULL, false, search->trial, &value);
        problem->stages = stages;
        for (uint32_t s = used; s <= stages; s++)
            search->trial[s] = problem->units;
        if (status == SHOAL_OK && value < PARTITION_NEVER)
            status = refine_offer(search);
    }
    return status;
}

/* Longer stages allow for cuts over which fewer bytes go. */
static enum shoal_status offer_cheap(struct search *search)
{
    static const double factors[] = {1, 1.02, 1.05, 1.1, 1.2, 1.4, 1.8, 2.6};
    struct problem *problem = search->problem;
    double least, value;
    PARTITION_TRY(divide(problem, MEMORY_HOPE, measure_time, NULL, false, search->trial, &least));
    for (size_t i = 0; i < sizeof factors / sizeof factors[0] && problem->options.bytes_per_us > 0; i++) {
        PARTITION_TRY(divide_cheaply(problem, measure_time, NULL, least * factors[i], search->trial, &value));
        if (value < PARTITION_NEVER)
            PARTITION_TRY(refine_offer(search));
    }
    return SHOAL_OK;
}

/* Pins the units of ties before the widest gap between them to one stage, the others to another one. */
static void pin_ties(struct problem *problem, uint32_t one, uint32_t other)
{
    const struct shoal_profile *profile = problem->profile;
    for (size_t t = 0; t < profile->tie_count; t++) {
        const struct profile_tie *tie = &profile->ties[t];
        uint32_t widest = 1;
        for (uint32_t i = 1; i < tie->count; i++)
            if (tie->units[i] - tie->units[i - 1] > tie->units[widest] - tie->units[widest - 1])
                widest = i;
        for (uint32_t i = 0; i < tie->count; i++)
            problem->pins[tie->units[i]] = (int32_t)(i < widest ? one : other);
    }
}

/* Offers divisions with tied units on one rank which has several stages: for each pair of stages of a rank. */
static enum shoal_status offer_tied(struct search *search)
{
    struct problem *problem = search->problem;
    int32_t *const pins = problem->pins, *const trial = calloc((size_t)problem->units + 1, sizeof *trial);
    enum shoal_status status = trial ? SHOAL_OK : SHOAL_ERR_MEMORY;
    for (uint32_t a = 0; a < problem->stages; a++)
        for (uint32_t b = a; b < problem->stages && status == SHOAL_OK; b++) {
            if (problem->uses[a].rank != problem->uses[b].rank)
                continue;
            memcpy(trial, pins, problem->units * sizeof *trial);
            problem->pins = trial;
            pin_ties(problem, a, b);
            status = offer_divided(search, MEMORY_HOPE, measure_time);
            problem->pins = pins;
        }
    free(trial);
    return status;
}

static enum shoal_status offer_starts(struct search *search, const uint32_t *bound_division)
{
    struct problem *problem = search->problem;
    PARTITION_TRY(offer_divided(search, MEMORY_HOPE, measure_time));
    PARTITION_TRY(offer_fewer(search));
    PARTITION_TRY(offer_cheap(search));
    memcpy(search->trial, bound_division, division_bytes(problem));
    if (search->trial[problem->stages] == problem->units)
        PARTITION_TRY(refine_offer(search));
    equal_divide(problem, search->trial);
    PARTITION_TRY(refine_offer(search));
    PARTITION_TRY(tree_divide(problem, search->trial));
    PARTITION_TRY(refine_offer(search));
    if (problem->options.keeps_ties_together && problem->profile->tie_count && !problem->is_one_each)
        PARTITION_TRY(offer_tied(search));
    if (search->best[0].is_set && search->best[0].verdict.excess == 0)
        return SHOAL_OK;
    PARTITION_TRY(offer_divided(search, MEMORY_SURE, measure_time));
    PARTITION_TRY(offer_divided(search, MEMORY_ANY, measure_lack));
    return offer_divided(search, MEMORY_ANY, measure_time);
}

/* ---- Moves --------------------------------------------------------------------------------------------------------------- */

/* Moves the begins of `count` stages from `first` on by one unit. Returns false if that is no division. */
static bool move_begins(uint32_t *division, uint32_t first, uint32_t count, bool is_up)
{
    const uint32_t last = first + count - 1;
    if (is_up ? division[last] == division[last + 1] : division[first] == division[first - 1])
        return false;
    for (uint32_t s = first; s <= last; s++)
        division[s] += is_up ? 1u : -1u;
    return true;
}

/* Takes the trial if it is better. */
static enum shoal_status take_better(struct search *search, struct start *start, bool *is_better_out)
{
    struct problem *problem = search->problem;
    struct verdict verdict;
    *is_better_out = false;
    if (!problem_allows(problem, search->trial))
        return SHOAL_OK;
    if (start->verdict.excess == 0 && is_too_slow(problem, search->trial, start->verdict.step))
        return SHOAL_OK;
    PARTITION_TRY(problem_judge(problem, search->trial, &verdict));
    *is_better_out = verdict_is_better(&verdict, &start->verdict);
    if (*is_better_out) {
        start->verdict = verdict;
        memcpy(start->division, search->trial, division_bytes(problem));
    }
    return SHOAL_OK;
}

static enum shoal_status try_move(struct search *search, struct start *start, uint32_t first, uint32_t count, bool is_up,
                                  bool *is_better_out)
{
    memcpy(search->trial, start->division, division_bytes(search->problem));
    *is_better_out = false;
    return move_begins(search->trial, first, count, is_up) ? take_better(search, start, is_better_out) : SHOAL_OK;
}

/* Tries all moves of `count` begins once. */
static enum shoal_status try_moves(struct search *search, struct start *start, uint32_t count, uint64_t effort, bool *helps_out)
{
    bool is_better;
    *helps_out = false;
    for (uint32_t first = 1; first + count <= search->problem->stages; first++)
        for (int is_up = 0; is_up < 2; is_up++)
            do {
                if (search->problem->spent >= effort)
                    return SHOAL_OK;
                PARTITION_TRY(try_move(search, start, first, count, is_up, &is_better));
                *helps_out |= is_better;
            } while (is_better);
    return SHOAL_OK;
}

/* Tries all places of each begin between its neighbors. */
static enum shoal_status try_places(struct search *search, struct start *start, uint64_t effort, bool *helps_out)
{
    struct problem *problem = search->problem;
    bool is_better;
    *helps_out = false;
    for (uint32_t s = 1; s < problem->stages; s++)
        for (uint32_t begin = start->division[s - 1]; begin <= start->division[s + 1]; begin++) {
            if (problem->spent >= effort)
                return SHOAL_OK;
            memcpy(search->trial, start->division, division_bytes(problem));
            search->trial[s] = begin;
            PARTITION_TRY(take_better(search, start, &is_better));
            *helps_out |= is_better;
        }
    return SHOAL_OK;
}

static enum shoal_status improve(struct search *search, struct start *start, uint64_t effort)
{
    uint32_t count = 1;
    while (count < search->problem->stages && search->problem->spent < effort) {
        bool helps;
        PARTITION_TRY(try_moves(search, start, count, effort, &helps));
        if (!helps && count == 1)
            PARTITION_TRY(try_places(search, start, effort, &helps));
        count = helps ? 1 : count + 1;
    }
    return SHOAL_OK;
}

static uint32_t random_below(uint64_t *random, uint32_t limit)
{
    *random = *random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(((*random >> 32) * limit) >> 32);
}

/* Moves some begins to other places between their neighbors, at random, but always the same. */
static void kick(const struct problem *problem, uint32_t *division, uint64_t *random)
{
    for (uint32_t i = 0; i <= problem->stages / 8 + 1; i++) {
        const uint32_t s = 1 + random_below(random, problem->stages - 1);
        division[s] = division[s - 1] + random_below(random, division[s + 1] - division[s - 1] + 1);
    }
}

/* Looks around the best division for a better one. */
static enum shoal_status kick_best(struct search *search, struct start *best, struct start *other)
{
    struct problem *problem = search->problem;
    uint64_t random = problem->units;
    for (int i = 0; i < KICKS && problem->stages > 1 && problem->spent < search->effort; i++) {
        memcpy(other->division, best->division, division_bytes(problem));
        kick(problem, other->division, &random);
        if (!problem_allows(problem, other->division))
            continue;
        PARTITION_TRY(problem_judge(problem, other->division, &other->verdict));
        PARTITION_TRY(improve(search, other, search->effort));
        if (!verdict_is_better(&other->verdict, &best->verdict))
            continue;
        best->verdict = other->verdict;
        memcpy(best->division, other->division, division_bytes(problem));
    }
    return SHOAL_OK;
}

static enum shoal_status improve_starts(struct search *search, uint32_t *division_out, struct verdict *verdict_out)
{
    struct problem *problem = search->problem;
    uint32_t best = 0;
    for (uint32_t i = 0; i < STARTS && search->best[i].is_set; i++) {
        const uint64_t left = search->effort > problem->spent ? search->effort - problem->spent : 0;
        PARTITION_TRY(improve(search, &search->best[i], problem->spent + left / (STARTS - i)));
        best = verdict_is_better(&search->best[i].verdict, &search->best[best].verdict) ? i : best;
    }
    PARTITION_TRY(kick_best(search, &search->best[best], &search->best[1 - best]));
    *verdict_out = search->best[best].verdict;
    memcpy(division_out, search->best[best].division, division_bytes(problem));
    return SHOAL_OK;
}

/* ---- Both ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status search_some(struct search *search, const uint32_t *bound_division, uint32_t *division_out,
                                     struct verdict *verdict_out)
{
    enum shoal_status status = SHOAL_OK;
    for (size_t i = 0; i < STARTS; i++)
        if (!(search->best[i].division = malloc(division_bytes(search->problem))))
            status = SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = offer_starts(search, bound_division);
    if (status == SHOAL_OK && search->best[0].is_set)
        status = improve_starts(search, division_out, verdict_out);
    else
        verdict_out->excess = PARTITION_NEVER;
    for (size_t i = 0; i < STARTS; i++)
        free(search->best[i].division);
    return status;
}

enum shoal_status refine(struct problem *problem, const uint32_t *bound_division, uint32_t *division_out,
                         struct verdict *verdict_out, bool *is_optimal_out)
{
    struct search search = {.problem = problem, .effort = problem->spent + problem->options.effort};
    search.trial = malloc(division_bytes(problem));
    if (!search.trial)
        return SHOAL_ERR_MEMORY;
    *verdict_out = (struct verdict){.excess = PARTITION_NEVER};
    *is_optimal_out = count_divisions(problem) * problem->actions <= (double)problem->options.effort;
    const enum shoal_status status = *is_optimal_out ? compare_all(&search, division_out, verdict_out)
                                                     : search_some(&search, bound_division, division_out, verdict_out);
    free(search.trial);
    return status;
}
