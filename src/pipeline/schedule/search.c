/* Schedules whose order is found. Two ways make candidates; the best one that keeps few enough activations is taken.
 *
 * Greedy: clocks of all ranks run, and a rank that is free takes the action that its rule prefers among those that are ready.
 * Weight gradients, which nobody waits for, fill the time in which none is. Rules differ in what they prefer, in how far a rank
 * runs ahead of its backward passes, and in how long it waits for an action before it begins a weight gradient. This is the
 * idea of Qi et al., "Zero bubble pipeline parallelism" (2023), section 3.1, with more rules.
 *
 * Patterns, for two stages per rank: one microbatch's six actions are placed on each rank so that no two of them fall on the
 * same time modulo 6; then every microbatch repeats this 6 later. How long its activations live shows at once how many a rank
 * keeps. Qi et al., "Pipeline parallelism with controllable memory" (2024), section 3. */
#include "pipeline/schedule/schedule.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KINDS 3  /* forward, input gradient, weight gradient; see `which` */
#define PERIOD 6 /* actions of a microbatch on a rank with two stages */
#define NEVER -1.0
#define ROUNDING 1e-9
#define TRIED_ACTIONS 2e8

enum which { AHEAD, BACK, WEIGHTS };

static const enum shoal_action_kind kind_of[KINDS] = {SHOAL_FORWARD, SHOAL_INPUT_GRADIENT, SHOAL_WEIGHT_GRADIENT};

/* ---- Greedy -------------------------------------------------------------------------------------------------------------- */

/* Preference of actions that are ready: the lowest goes first. The second stage of a rank is nearer to the loss. */
struct preference {
    int forward[2], back[2];
};

static const struct preference linear_preferences[] = {{{0, 0}, {1, 1}}, {{1, 1}, {0, 0}}};
static const struct preference v_preferences[] = {
    {{2, 0}, {1, 1}}, {{2, 1}, {0, 0}}, {{3, 2}, {1, 0}}, {{1, 0}, {2, 2}}, {{1, 1}, {0, 0}}};
static const double waits[] = {0, 0.25, 0.5, 1};           /* shares of a weight gradient's time */
static const double slopes[] = {1, 1.25, 1.5, 1.75, 2};    /* microbatches ahead, for each rank behind this one */
static const uint32_t extras[] = {0, 1, 2, SCHEDULE_MOST}; /* and beside that */
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Of a rank. */
struct habit {
    double ahead; /* microbatches that its first stage may have begun and not finished */
    double wait;  /* for an action before it begins a weight gradient, as a share of that one's time */
    double tail;  /* in how many last backward passes it waits longer, because nothing makes up for a delay any more */
};

struct rule {
    const struct preference *preference;
    struct habit *habits; /* [ranks] */
};

struct candidate {
    double begin; /* NEVER: none */
    enum which which;
    uint32_t stage;
};

struct clocks {
    const struct shoal_schedule_options *options;
    struct shoal_schedule *schedule;
    struct rule rule;
    double limit;              /* of activations */
    double known;              /* the time of the best schedule so far; INFINITY: none */
    double cost[KINDS];        /* of one stage */
    uint32_t per_rank;         /* stages */
    double *ends[2];           /* [stages * microbatches]: of forward passes and of input gradients; NEVER: not yet */
    uint32_t *done[KINDS];     /* [stages]: microbatches */
    double *free_at;           /* [ranks] */
    double *from;              /* [ranks]: when what counts began: the first action of all, or of the rank; NEVER: not yet */
    double *left;              /* [ranks]: time of the actions that are left */
    struct candidate *choices; /* [leaves]: each rank's next action */
    uint32_t *winners;         /* [leaves]: a tree, from 1 on: of the ranks below a node, the one whose action begins first */
    uint32_t leaves;           /* a power of two, and at least the ranks */
};

static uint32_t search_stage_of(const struct clocks *clocks, uint32_t rank, uint32_t number)
{
    return number == 0 ? rank : clocks->schedule->stages - 1 - rank;
}

static double end_of(const struct clocks *clocks, enum which which, uint32_t stage, uint32_t microbatch)
{
    return clocks->ends[which][(size_t)stage * clocks->schedule->microbatches + microbatch];
}

/* Returns when the result of a stage is on the rank of its neighbor, or NEVER. */
static double arrival(const struct clocks *clocks, enum which which, uint32_t from, uint32_t to, uint32_t microbatch)
{
    const double end = end_of(clocks, which, from, microbatch);
    const bool is_here = clocks->schedule->rank_of[from] == clocks->schedule->rank_of[to];
    return end == NEVER ? NEVER : end + (is_here ? 0 : clocks->options->costs.transfer);
}

/* Returns when the next microbatch of a stage can begin, or NEVER. */
static double ready_at(const struct clocks *clocks, enum which which, uint32_t stage)
{
    const uint32_t microbatch = clocks->done[which][stage];
    if (which == AHEAD)
        return stage == 0 ? 0 : arrival(clocks, AHEAD, stage - 1, stage, microbatch);
    if (microbatch >= clocks->done[AHEAD][stage])
        return NEVER;
    if (stage + 1 == clocks->schedule->stages)
        return end_of(clocks, AHEAD, stage, microbatch);
    return arrival(clocks, BACK, stage + 1, stage, microbatch);
}

/* Activations of a rank now. */
static double kept_now(const struct clocks *clocks, uint32_t rank)
{
    double kept = 0;
    for (uint32_t n = 0; n < clocks->per_rank; n++) {
        const uint32_t s = search_stage_of(clocks, rank, n);
        kept += clocks->done[AHEAD][s] - clocks->done[BACK][s];
        kept += clocks->options->kept_share * (clocks->done[BACK][s] - clocks->done[WEIGHTS][s]);
    }
    return kept / clocks->per_rank;
}

/* Returns true if the rank may begin another forward pass. The first stage of two leaves room for the second one, without which
 * no backward pass comes. */
static bool may_go_ahead(const struct clocks *clocks, uint32_t rank, uint32_t number)
{
    const uint32_t s = search_stage_of(clocks, rank, number);
    const uint32_t flying = clocks->done[AHEAD][s] - clocks->done[BACK][s];
    const double room = (double)(clocks->per_rank - number) / clocks->per_rank;
    return kept_now(clocks, rank) + room <= clocks->limit + ROUNDING &&
           (number > 0 || flying + 0.5 <= clocks->rule.habits[rank].ahead);
}

/* Takes the candidate if it is better, by preference among those that are ready by `by`, then by time. */
static void consider(const struct clocks *clocks, struct candidate *best, int *best_score, struct candidate other,
                     uint32_t number, double by)
{
    const struct preference *preference = clocks->rule.preference;
    const int wish = other.which == AHEAD ? preference->forward[number] : preference->back[number];
    const int score = other.begin <= by ? wish : 100;
    if (best->begin != NEVER && (score > *best_score || (score == *best_score && other.begin >= best->begin)))
        return;
    *best = other;
    *best_score = score;
}

static double wait_share(const struct clocks *clocks, uint32_t rank)
{
    const uint32_t last = search_stage_of(clocks, rank, 0);
    const uint32_t left = clocks->schedule->microbatches - clocks->done[BACK][last];
    return left <= clocks->rule.habits[rank].tail ? 1 : clocks->rule.habits[rank].wait;
}

/* Chooses what a rank does next, as far as that is known. */
static struct candidate choose(const struct clocks *clocks, uint32_t rank)
{
    const double now = clocks->free_at[rank], by = now + wait_share(clocks, rank) * clocks->cost[WEIGHTS];
    struct candidate best = {NEVER, AHEAD, 0}, weights = {NEVER, WEIGHTS, 0};
    int score = 0;
    for (uint32_t n = 0; n < clocks->per_rank; n++) {
        const uint32_t s = search_stage_of(clocks, rank, n);
        for (enum which which = AHEAD; which <= BACK; which++) {
            const bool is_left = clocks->done[which][s] < clocks->schedule->microbatches;
            const double ready = is_left ? ready_at(clocks, which, s) : NEVER;
            if (ready != NEVER && (which == BACK || may_go_ahead(clocks, rank, n)))
                consider(clocks, &best, &score, (struct candidate){ready > now ? ready : now, which, s}, n, by);
        }
        if (clocks->done[WEIGHTS][s] < clocks->done[BACK][s] &&
            (weights.begin == NEVER || clocks->done[WEIGHTS][s] < clocks->done[WEIGHTS][weights.stage]))
            weights = (struct candidate){now, WEIGHTS, s};
    }
    return best.begin != NEVER && (best.begin <= by || weights.begin == NEVER) ? best : weights;
}

/* ---- The rank whose action begins first, by a tournament ---- */

static uint32_t earlier(const struct clocks *clocks, uint32_t one, uint32_t other)
{
    const double begin = clocks->choices[one].begin, other_begin = clocks->choices[other].begin;
    return other_begin == NEVER || (begin != NEVER && begin <= other_begin) ? one : other;
}

static uint32_t winner_below(const struct clocks *clocks, uint32_t node)
{
    return node < clocks->leaves ? clocks->winners[node] : node - clocks->leaves;
}

static void play(struct clocks *clocks, uint32_t node)
{
    clocks->winners[node] = earlier(clocks, winner_below(clocks, 2 * node), winner_below(clocks, 2 * node + 1));
}

static void begin_tournament(struct clocks *clocks)
{
    for (uint32_t leaf = 0; leaf < clocks->leaves; leaf++)
        clocks->choices[leaf] = leaf < clocks->schedule->ranks ? choose(clocks, leaf) : (struct candidate){NEVER, AHEAD, 0};
    for (uint32_t node = clocks->leaves - 1; node > 0; node--)
        play(clocks, node);
}

/* Lets a rank choose again. */
static void renew(struct clocks *clocks, uint32_t rank)
{
    clocks->choices[rank] = choose(clocks, rank);
    for (uint32_t node = (clocks->leaves + rank) / 2; node > 0; node /= 2)
        play(clocks, node);
}

/* Returns the rank whose next action begins first, or UINT32_MAX. */
static uint32_t first_rank(const struct clocks *clocks)
{
    const uint32_t rank = winner_below(clocks, 1);
    return clocks->choices[rank].begin == NEVER ? UINT32_MAX : rank;
}

/* ---- A run ---- */

/* Returns true if the rank cannot be done sooner than with the best schedule. */
static bool cannot_win(const struct clocks *clocks, uint32_t rank)
{
    return clocks->free_at[rank] + clocks->left[rank] - clocks->from[rank] >= clocks->known;
}

static enum shoal_status perform(struct clocks *clocks, uint32_t rank)
{
    const struct candidate next = clocks->choices[rank];
    const uint32_t s = next.stage, microbatch = clocks->done[next.which][s]++;
    const double end = next.begin + clocks->cost[next.which];
    clocks->free_at[rank] = end;
    clocks->left[rank] -= clocks->cost[next.which];
    if (clocks->from[rank] == NEVER)
        clocks->from[rank] = clocks->options->shortens_span ? next.begin : 0;
    if (next.which != WEIGHTS)
        clocks->ends[next.which][(size_t)s * clocks->schedule->microbatches + microbatch] = end;
    SCHEDULE_TRY(schedule_append(clocks->schedule, rank, kind_of[next.which], s, microbatch));
    renew(clocks, rank);
    if (next.which == AHEAD && s + 1 < clocks->schedule->stages)
        renew(clocks, clocks->schedule->rank_of[s + 1]);
    if (next.which == BACK && s > 0)
        renew(clocks, clocks->schedule->rank_of[s - 1]);
    return SHOAL_OK;
}

static bool allocate_clocks(struct clocks *clocks)
{
    const size_t stages = clocks->schedule->stages, ranks = clocks->schedule->ranks;
    const size_t cells = stages * clocks->schedule->microbatches;
    bool is_there = (clocks->free_at = calloc(ranks, sizeof *clocks->free_at)) != NULL;
    is_there &= (clocks->from = calloc(ranks, sizeof *clocks->from)) != NULL;
    is_there &= (clocks->left = calloc(ranks, sizeof *clocks->left)) != NULL;
    for (clocks->leaves = 1; clocks->leaves < ranks; clocks->leaves *= 2)
        continue;
    is_there &= (clocks->choices = calloc(clocks->leaves, sizeof *clocks->choices)) != NULL;
    is_there &= (clocks->winners = calloc(clocks->leaves, sizeof *clocks->winners)) != NULL;
    for (int w = 0; w < KINDS; w++)
        is_there &= (clocks->done[w] = calloc(stages, sizeof *clocks->done[w])) != NULL;
    for (int w = 0; w < 2; w++) {
        is_there &= (clocks->ends[w] = malloc(cells * sizeof *clocks->ends[w])) != NULL;
        for (size_t i = 0; clocks->ends[w] && i < cells; i++)
            clocks->ends[w][i] = NEVER;
    }
    return is_there;
}

static void free_clocks(struct clocks *clocks)
{
    free(clocks->free_at);
    free(clocks->from);
    free(clocks->left);
    free(clocks->choices);
    free(clocks->winners);
    for (int w = 0; w < KINDS; w++)
        free(clocks->done[w]);
    for (int w = 0; w < 2; w++)
        free(clocks->ends[w]);
}

/* Runs the clocks. *is_whole_out is false if the rule has led to ranks that wait for each other, or to a longer schedule than
 * the best one. */
static enum shoal_status run_clocks(struct clocks *clocks, bool *is_whole_out)
{
    const size_t all = (size_t)KINDS * clocks->schedule->stages * clocks->schedule->microbatches;
    const double work = clocks->cost[AHEAD] + clocks->cost[BACK] + clocks->cost[WEIGHTS];
    size_t done = 0;
    begin_tournament(clocks);
    for (uint32_t r = 0; r < clocks->schedule->ranks; r++) {
        clocks->from[r] = NEVER;
        clocks->left[r] = work * clocks->per_rank * clocks->schedule->microbatches;
    }
    for (; done < all; done++) {
        const uint32_t rank = first_rank(clocks);
        if (rank == UINT32_MAX)
            break;
        SCHEDULE_TRY(perform(clocks, rank));
        if (cannot_win(clocks, rank))
            break;
    }
    *is_whole_out = done == all;
    return SHOAL_OK;
}

/* *schedule_out is NULL if the rule leads nowhere. */
static enum shoal_status make_greedy(const struct shoal_schedule_options *options, double limit, double known, bool is_v,
                                     struct rule rule, struct shoal_schedule **schedule_out)
{
    const uint32_t per_rank = is_v ? 2 : 1;
    const struct shoal_stage_costs *costs = &options->costs;
    struct clocks clocks = {.options = options, .rule = rule, .limit = limit, .known = known, .per_rank = per_rank};
    bool is_whole = false;
    *schedule_out = NULL;
    clocks.cost[AHEAD] = costs->forward / per_rank;
    clocks.cost[BACK] = costs->input_gradient / per_rank;
    clocks.cost[WEIGHTS] = costs->weight_gradient / per_rank;
    SCHEDULE_TRY(schedule_begin(options->ranks, per_rank * options->ranks, options->microbatches, is_v, &clocks.schedule));
    enum shoal_status status = allocate_clocks(&clocks) ? run_clocks(&clocks, &is_whole) : SHOAL_ERR_MEMORY;
    free_clocks(&clocks);
    if (is_whole)
        *schedule_out = clocks.schedule;
    else
        shoal_schedule_free(clocks.schedule);
    return status;
}

/* ---- Patterns ------------------------------------------------------------------------------------------------------------ */

/* How a microbatch moves: time from one rank to the next one, in each of the four passes, and the pauses between them. */
struct pattern {
    uint32_t steps[4], pauses[3];
};

/* Times of the actions of microbatch 0 on a rank, in this order: forward of both stages, input gradient of the second and of
 * the first stage, and their weight gradients. */
struct block {
    uint32_t times[PERIOD];
};

/* Returns the first time from `from` on that has this place in the period. */
static uint32_t next_at(uint32_t from, uint32_t place)
{
    return from + (place + PERIOD - from % PERIOD) % PERIOD;
}

/* Places the weight gradients so that activations live as short as possible. Returns how long they live. */
static uint32_t place_weights(struct block *block, const uint32_t free_places[2])
{
    uint32_t *times = block->times, best = UINT32_MAX;
    for (int swap = 0; swap < 2; swap++) {
        const uint32_t second = next_at(times[2] + 1, free_places[swap]), first = next_at(times[3] + 1, free_places[!swap]);
        const uint32_t life = second - times[1] + first - times[0];
        if (life >= best)
            continue;
        best = life;
        times[4] = second;
        times[5] = first;
    }
    return best;
}

/* Returns how long the activations of a microbatch live on a rank, or 0 if two actions have the same place in the period. */
static uint32_t place_rank(const struct pattern *pattern, uint32_t ranks, uint32_t rank, struct block *block)
{
    const uint32_t last = ranks - 1, *steps = pattern->steps, *pauses = pattern->pauses;
    const uint32_t second = last * steps[0] + pauses[0];        /* of forward passes, on the last rank */
    const uint32_t back = second + last * steps[1] + pauses[1]; /* on the first rank */
    const uint32_t first = back + last * steps[2] + pauses[2];  /* on the last rank */
    uint32_t free_places[2], taken = 0, count = 0;
    block->times[0] = rank * steps[0];
    block->times[1] = second + (last - rank) * steps[1];
    block->times[2] = back + rank * steps[2];
    block->times[3] = first + (last - rank) * steps[3];
    for (int i = 0; i < 4; i++) {
        const uint32_t bit = 1u << block->times[i] % PERIOD;
        if (taken & bit)
            return 0;
        taken |= bit;
    }
    for (uint32_t place = 0; place < PERIOD; place++)
        if (!(taken >> place & 1))
            free_places[count++] = place;
    return place_weights(block, free_places);
}

/* Returns the longest life on any rank, or 0 if the pattern is impossible. */
static uint32_t life_of(const struct pattern *pattern, uint32_t ranks)
{
    uint32_t most = 0;
    struct block block;
    for (uint32_t r = 0; r < ranks; r++) {
        const uint32_t life = place_rank(pattern, ranks, r, &block);
        if (life == 0)
            return 0;
        most = life > most ? life : most;
    }
    return most;
}

/* The time from the first to the last action of a microbatch. */
static uint32_t pattern_length(const struct pattern *pattern, uint32_t ranks)
{
    struct block block = {{0}};
    (void)place_rank(pattern, ranks, 0, &block);
    return block.times[5];
}

/* Every microbatch repeats the block, so a rank's order is that of the times. */
static enum shoal_status write_pattern(const struct pattern *pattern, struct shoal_schedule *schedule, uint32_t rank)
{
    static const enum shoal_action_kind kinds[PERIOD] = {SHOAL_FORWARD,        SHOAL_FORWARD,         SHOAL_INPUT_GRADIENT,
                                                         SHOAL_INPUT_GRADIENT, SHOAL_WEIGHT_GRADIENT, SHOAL_WEIGHT_GRADIENT};
    static const bool is_second[PERIOD] = {false, true, true, false, true, false};
    uint32_t by_place[PERIOD] = {0}, last = 0;
    struct block block = {{0}};
    (void)place_rank(pattern, schedule->ranks, rank, &block);
    for (uint32_t i = 0; i < PERIOD; i++) {
        by_place[block.times[i] % PERIOD] = i;
        last = block.times[i] > last ? block.times[i] : last;
    }
    for (uint32_t time = 0; time <= last + PERIOD * (schedule->microbatches - 1); time++) {
        const uint32_t i = by_place[time % PERIOD];
        const uint32_t microbatch = time < block.times[i] ? UINT32_MAX : (time - block.times[i]) / PERIOD;
        if (microbatch < schedule->microbatches)
            SCHEDULE_TRY(
                schedule_append(schedule, rank, kinds[i], is_second[i] ? schedule->stages - 1 - rank : rank, microbatch));
    }
    return SHOAL_OK;
}

static enum shoal_status make_pattern(const struct shoal_schedule_options *options, const struct pattern *pattern,
                                      struct shoal_schedule **schedule_out)
{
    struct shoal_schedule *schedule = NULL;
    enum shoal_status status = schedule_begin(options->ranks, 2 * options->ranks, options->microbatches, true, &schedule);
    for (uint32_t r = 0; r < options->ranks && status == SHOAL_OK; r++)
        status = write_pattern(pattern, schedule, r);
    if (status != SHOAL_OK) {
        shoal_schedule_free(schedule);
        schedule = NULL;
    }
    *schedule_out = schedule;
    return status;
}

/* ---- The search ---------------------------------------------------------------------------------------------------------- */

struct search {
    const struct shoal_schedule_options *options;
    double limit;
    bool is_v;
    double left; /* actions that may still be simulated */
    struct shoal_schedule *best;
    double best_time, best_activations;
    struct rule tried, kept; /* the last one, and that of `best`; each has room of its own */
};

/* Returns true if it is shorter than the best one, or as short and keeps fewer activations. Rounding is no gain. */
static bool is_better(const struct search *search, double time, double activations)
{
    const double known = search->best_time, rounding = ROUNDING * known;
    return !search->best || time < known - rounding ||
           (time <= known + rounding && activations < search->best_activations - ROUNDING);
}

/* Takes over the schedule, if it is better and keeps few enough activations, or frees it. made may be NULL. */
static enum shoal_status search_offer(struct search *search, struct shoal_schedule *made, bool *is_better_out)
{
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    *is_better_out = false;
    if (!made)
        return SHOAL_OK;
    const enum shoal_status status =
        shoal_schedule_time(made, &search->options->costs, search->options->kept_share, &times, NULL);
    const double time = search->options->shortens_span ? times.span : times.step;
    if (status != SHOAL_OK || times.activations > search->limit + ROUNDING || !is_better(search, time, times.activations)) {
        shoal_schedule_free(made);
        return status;
    }
    shoal_schedule_free(search->best);
    search->best = made;
    search->best_time = time;
    search->best_activations = times.activations;
    *is_better_out = true;
    return SHOAL_OK;
}

static void copy_rule(const struct search *search, struct rule *to, const struct rule *from)
{
    to->preference = from->preference;
    memcpy(to->habits, from->habits, search->options->ranks * sizeof *to->habits);
}

static enum shoal_status try_rule(struct search *search, bool *is_better_out)
{
    struct shoal_schedule *made;
    search->left -= 3.0 * (search->is_v ? 2 : 1) * search->options->ranks * search->options->microbatches;
    const double known = search->best ? search->best_time * (1 + 2 * ROUNDING) : INFINITY;
    SCHEDULE_TRY(make_greedy(search->options, search->limit, known, search->is_v, search->tried, &made));
    SCHEDULE_TRY(search_offer(search, made, is_better_out));
    if (*is_better_out)
        copy_rule(search, &search->kept, &search->tried);
    return SHOAL_OK;
}

/* Tries end after a number of actions that takes a few seconds, if there is a schedule by then. */
static bool may_go_on(const struct search *search)
{
    return search->left > 0 || !search->best;
}

static enum shoal_status try_slopes(struct search *search, double wait)
{
    const uint32_t ranks = search->options->ranks;
    bool has_helped;
    for (size_t s = 0; s < COUNT_OF(slopes); s++)
        for (size_t e = 0; e < COUNT_OF(extras) && may_go_on(search); e++) {
            for (uint32_t r = 0; r < ranks; r++)
                search->tried.habits[r] = (struct habit){slopes[s] * (ranks - 1 - r) + 1 + extras[e], wait, 1};
            SCHEDULE_TRY(try_rule(search, &has_helped));
        }
    return SHOAL_OK;
}

static enum shoal_status try_rules(struct search *search)
{
    const struct preference *preferences = search->is_v ? v_preferences : linear_preferences;
    const size_t count = search->is_v ? COUNT_OF(v_preferences) : COUNT_OF(linear_preferences);
    for (size_t p = 0; p < count; p++)
        for (size_t w = 0; w < COUNT_OF(waits); w++) {
            search->tried.preference = &preferences[p];
            SCHEDULE_TRY(try_slopes(search, waits[w]));
        }
    return SHOAL_OK;
}

/* Changes the best rule on one rank after the other, as long as this helps. */
static enum shoal_status improve_rule(struct search *search)
{
    static const struct habit changes[] = {{-1, 0, 0},   {1, 0, 0}, {-2, 0, 0}, {2, 0, 0}, {0, -0.25, 0},
                                           {0, 0.25, 0}, {0, 0, 1}, {0, 0, -1}, {0, 0, 4}};
    bool goes_on = search->best != NULL;
    while (goes_on) {
        goes_on = false;
        for (uint32_t r = 0; r < search->options->ranks && search->left > 0; r++)
            for (size_t c = 0; c < COUNT_OF(changes) && search->left > 0; c++) {
                bool has_helped;
                copy_rule(search, &search->tried, &search->kept);
                search->tried.habits[r].ahead += changes[c].ahead;
                search->tried.habits[r].wait += changes[c].wait;
                search->tried.habits[r].tail += changes[c].tail;
                SCHEDULE_TRY(try_rule(search, &has_helped));
                goes_on |= has_helped;
            }
    }
    return SHOAL_OK;
}

/* The n-th pattern: a number with a digit for each step and pause. */
static struct pattern pattern_at(uint32_t n)
{
    struct pattern pattern;
    for (int i = 0; i < 4; i++, n /= 4)
        pattern.steps[i] = 1 + n % 4;
    for (int i = 0; i < 3; i++, n /= PERIOD)
        pattern.pauses[i] = 1 + n % PERIOD;
    return pattern;
}

/* Finds the shortest pattern for each life; UINT32_MAX: there is none. */
static void find_patterns(uint32_t ranks, uint32_t *shortest, uint32_t lives)
{
    const uint32_t all = 4 * 4 * 4 * 4 * PERIOD * PERIOD * PERIOD;
    memset(shortest, 0xff, lives * sizeof *shortest);
    for (uint32_t n = 0; n < all; n++) {
        const struct pattern pattern = pattern_at(n);
        const uint32_t life = life_of(&pattern, ranks);
        if (life == 0 || life >= lives)
            continue;
        const uint32_t before = shortest[life];
        const struct pattern known = pattern_at(before == UINT32_MAX ? 0 : before);
        if (before == UINT32_MAX || pattern_length(&pattern, ranks) < pattern_length(&known, ranks))
            shortest[life] = n;
    }
}

static enum shoal_status try_patterns(struct search *search)
{
    const double most = search->limit < search->options->microbatches ? search->limit : search->options->microbatches;
    const uint32_t lives = (uint32_t)(2 * PERIOD * most) + 1;
    uint32_t *shortest = malloc(lives * sizeof *shortest);
    enum shoal_status status = shortest ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (shortest)
        find_patterns(search->options->ranks, shortest, lives);
    for (uint32_t life = 0; life < lives && status == SHOAL_OK; life++) {
        struct shoal_schedule *made = NULL;
        bool has_helped;
        if (shortest[life] == UINT32_MAX)
            continue;
        const struct pattern pattern = pattern_at(shortest[life]);
        status = make_pattern(search->options, &pattern, &made);
        if (status == SHOAL_OK)
            status = search_offer(search, made, &has_helped);
    }
    free(shortest);
    return status;
}

enum shoal_status schedule_search(const struct shoal_schedule_options *options, double activations,
                                  struct shoal_schedule **schedule_out)
{
    struct search search = {
        .options = options, .limit = activations, .is_v = options->kind >= SHOAL_SCHEDULE_V_MIN, .left = TRIED_ACTIONS};
    search.tried.habits = calloc(options->ranks, sizeof *search.tried.habits);
    search.kept.habits = calloc(options->ranks, sizeof *search.kept.habits);
    enum shoal_status status = search.tried.habits && search.kept.habits ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = try_rules(&search);
    if (status == SHOAL_OK)
        status = improve_rule(&search);
    if (status == SHOAL_OK && search.is_v)
        status = try_patterns(&search);
    free(search.tried.habits);
    free(search.kept.habits);
    if (status != SHOAL_OK) {
        shoal_schedule_free(search.best);
        search.best = NULL;
    }
    *schedule_out = search.best;
    return status;
}
