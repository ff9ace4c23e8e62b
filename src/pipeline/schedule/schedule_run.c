/* Runs a schedule: each rank begins its next action as soon as the inputs are there. The result is its times or, if the ranks
 * come to a stop, the ranks that wait for each other. */
#include <stdlib.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "pipeline/schedule/schedule.h"

#define NEVER -1.0
#define PASSES 2 /* forward and backward */

/* A sum on one of its ranks. A rank's sums run one after the other, alongside its other actions. */
struct run_sum {
    uint32_t index; /* its action's place in the rank's list */
    double posted;  /* when the rank came to the action */
    bool has_come;  /* a tie: the earlier sums of this rank have ended */
};

struct run_tie {
    uint32_t missing; /* ranks that have not come */
    double ready;     /* when the last of those that have come did */
    double cost;
};

struct run {
    const struct shoal_schedule *schedule;
    struct shoal_stage_costs costs;       /* of one stage, if all are equal */
    const struct shoal_stage_costs *each; /* [stages] instead, or NULL */
    uint32_t slots;                       /* room for inputs of a stage, in each pass; 0: without a limit */
    double *ends[PASSES];                 /* [stages * microbatches]: when a result is there; NEVER: not yet */
    uint32_t *sent[PASSES];               /* [stages]: results that came to a stage, and how many of them it has taken */
    uint32_t *taken[PASSES];
    uint32_t *next;                     /* [ranks]: the number of its next action */
    double *free_at;                    /* [ranks] */
    struct run_sum *sums;               /* those of rank 0, then those of rank 1 ... */
    uint32_t *first_sum;                /* [ranks]: the rank's first one in `sums` */
    uint32_t *posted_sums, *ended_sums; /* [ranks] */
    double *sums_at;                    /* [ranks]: when the rank's last sum ended */
    struct run_tie *ties;               /* [ties] */
    uint32_t *sums_left;                /* [stages]: sums that have not ended */
    double *summed_at;                  /* [stages]: when the last one ended */
    double *const *begins_out;
};

/* ---- Room ---------------------------------------------------------------------------------------------------------------- */

/* Lists the sums of a rank, from number `first` on. Returns the number behind the last one. */
static uint32_t list_sums(struct run *run, uint32_t rank, uint32_t first)
{
    const struct schedule_list *const list = &run->schedule->lists[rank];
    run->first_sum[rank] = first;
    for (uint32_t i = 0; list->sums && i < list->count; i++) {
        const struct shoal_action *const action = &list->actions[i];
        if (!schedule_is_sum(action->kind))
            continue;
        run->sums[first++].index = i;
        run->sums_left[action->stage]++;
        if (action->kind == SHOAL_SUM_TIED)
            run->ties[action->microbatch].missing++;
    }
    return first;
}

static bool sums_open(struct run *run)
{
    const struct shoal_schedule *const schedule = run->schedule;
    uint32_t sums = 0;
    for (uint32_t r = 0; r < schedule->ranks; r++)
        sums += schedule->lists[r].sums;
    bool is_there = (run->sums = calloc(sums + 1u, sizeof *run->sums)) != NULL;
    is_there &= (run->first_sum = calloc(schedule->ranks, sizeof *run->first_sum)) != NULL;
    is_there &= (run->posted_sums = calloc(schedule->ranks, sizeof *run->posted_sums)) != NULL;
    is_there &= (run->ended_sums = calloc(schedule->ranks, sizeof *run->ended_sums)) != NULL;
    is_there &= (run->sums_at = calloc(schedule->ranks, sizeof *run->sums_at)) != NULL;
    is_there &= (run->ties = calloc(schedule->ties + 1u, sizeof *run->ties)) != NULL;
    is_there &= (run->sums_left = calloc(schedule->stages, sizeof *run->sums_left)) != NULL;
    is_there &= (run->summed_at = calloc(schedule->stages, sizeof *run->summed_at)) != NULL;
    sums = 0;
    for (uint32_t r = 0; r < schedule->ranks && is_there; r++)
        sums = list_sums(run, r, sums);
    return is_there;
}

static bool run_open(struct run *run)
{
    const size_t stages = run->schedule->stages, cells = stages * run->schedule->microbatches;
    bool is_there = sums_open(run);
    is_there &= (run->next = calloc(run->schedule->ranks, sizeof *run->next)) != NULL;
    is_there &= (run->free_at = calloc(run->schedule->ranks, sizeof *run->free_at)) != NULL;
    for (int pass = 0; pass < PASSES; pass++) {
        is_there &= (run->sent[pass] = calloc(stages, sizeof *run->sent[pass])) != NULL;
        is_there &= (run->taken[pass] = calloc(stages, sizeof *run->taken[pass])) != NULL;
        is_there &= (run->ends[pass] = malloc(cells * sizeof *run->ends[pass])) != NULL;
        for (size_t i = 0; run->ends[pass] && i < cells; i++)
            run->ends[pass][i] = NEVER;
    }
    return is_there;
}

static void run_close(struct run *run)
{
    free(run->sums);
    free(run->first_sum);
    free(run->posted_sums);
    free(run->ended_sums);
    free(run->sums_at);
    free(run->ties);
    free(run->sums_left);
    free(run->summed_at);
    free(run->next);
    free(run->free_at);
    for (int pass = 0; pass < PASSES; pass++) {
        free(run->sent[pass]);
        free(run->taken[pass]);
        free(run->ends[pass]);
    }
}

/* ---- An action ----------------------------------------------------------------------------------------------------------- */

static size_t run_cell(const struct run *run, uint32_t stage, uint32_t microbatch)
{
    return (size_t)stage * run->schedule->microbatches + microbatch;
}

/* The pass in which an action needs something from another stage and hands something on; -1: neither. */
static int pass_of(enum shoal_action_kind kind)
{
    const bool is_backward = kind == SHOAL_BACKWARD || kind == SHOAL_INPUT_GRADIENT;
    return kind == SHOAL_FORWARD ? 0 : is_backward ? 1 : -1;
}

/* Finds the stage from which an action gets its input. Returns false if it needs none. */
static bool stage_before(const struct run *run, const struct shoal_action *action, uint32_t *before_out)
{
    const int pass = pass_of(action->kind);
    *before_out = pass == 0 ? action->stage - 1 : action->stage + 1;
    return pass == 0 ? action->stage > 0 : pass == 1 && action->stage + 1 < run->schedule->stages;
}

static bool stage_after(const struct run *run, const struct shoal_action *action, uint32_t *after_out)
{
    const int pass = pass_of(action->kind);
    *after_out = pass == 0 ? action->stage + 1 : action->stage - 1;
    return pass == 0 ? action->stage + 1 < run->schedule->stages : pass == 1 && action->stage > 0;
}

static bool is_other_rank(const struct run *run, uint32_t one, uint32_t other)
{
    return run->schedule->rank_of[one] != run->schedule->rank_of[other];
}

static const struct shoal_stage_costs *costs_at(const struct run *run, uint32_t stage)
{
    return run->each ? &run->each[stage] : &run->costs;
}

/* Returns the time from a stage to its neighbor. The transfer of a stage is that to and from the next one. */
static double transfer_between(const struct run *run, uint32_t one, uint32_t other)
{
    return is_other_rank(run, one, other) ? costs_at(run, one < other ? one : other)->transfer : 0;
}

/* Returns when the input is there, or NEVER. */
static double input_at(const struct run *run, const struct shoal_action *action)
{
    uint32_t before;
    if (!stage_before(run, action, &before))
        return 0;
    const double end = run->ends[pass_of(action->kind)][run_cell(run, before, action->microbatch)];
    return end == NEVER ? NEVER : end + transfer_between(run, before, action->stage);
}

/* Returns true if the next stage has a slot for the result. A stage on the same rank takes it where it is. */
static bool has_slot(const struct run *run, const struct shoal_action *action)
{
    uint32_t after;
    const int pass = pass_of(action->kind);
    if (run->slots == 0 || !stage_after(run, action, &after) || !is_other_rank(run, action->stage, after))
        return true;
    return run->sent[pass][after] - run->taken[pass][after] < run->slots;
}

double shoal_schedule_action_cost(const struct shoal_action *action, const struct shoal_stage_costs *costs)
{
    switch (action->kind) {
    case SHOAL_FORWARD:
    case SHOAL_RECOMPUTE:
        return costs->forward;
    case SHOAL_BACKWARD:
        return costs->input_gradient + costs->weight_gradient;
    case SHOAL_INPUT_GRADIENT:
        return costs->input_gradient;
    case SHOAL_WEIGHT_GRADIENT:
        return costs->weight_gradient;
    case SHOAL_SUM_REPLICAS:
        return costs->sum_replicas;
    case SHOAL_SUM_TIED:
        return costs->sum_tied;
    case SHOAL_UPDATE:
        return costs->update;
    }
    return 0; /* an unknown kind */
}

static double cost_of(const struct run *run, const struct shoal_action *action)
{
    return shoal_schedule_action_cost(action, costs_at(run, action->stage));
}

/* ---- Sums ---------------------------------------------------------------------------------------------------------------- */

/* Returns the first sum of a rank that has not ended, or NULL. */
static struct run_sum *sum_at_front(const struct run *run, uint32_t rank)
{
    const uint32_t ended = run->ended_sums[rank];
    return ended < run->schedule->lists[rank].sums ? &run->sums[run->first_sum[rank] + ended] : NULL;
}

static const struct shoal_action *action_of_sum(const struct run *run, uint32_t rank, const struct run_sum *sum)
{
    return &run->schedule->lists[rank].actions[sum->index];
}

/* The rank does not wait for the sum. */
static void run_post_sum(struct run *run, uint32_t rank)
{
    run->sums[run->first_sum[rank] + run->posted_sums[rank]++].posted = run->free_at[rank];
    run->next[rank]++;
}

static void end_sum(struct run *run, uint32_t rank, const struct run_sum *sum, double begin, double cost)
{
    const uint32_t stage = action_of_sum(run, rank, sum)->stage;
    const double end = run->sums_at[rank] = begin + cost;
    if (run->begins_out)
        run->begins_out[rank][sum->index] = begin;
    run->summed_at[stage] = end > run->summed_at[stage] ? end : run->summed_at[stage];
    run->sums_left[stage]--;
    run->ended_sums[rank]++;
}

/* Comes to the sum of a tie, and ends it if all its ranks have come. Returns true if something has changed. */
static bool run_tied_sum(struct run *run, uint32_t rank, struct run_sum *sum, double ready)
{
    const struct shoal_action *const action = action_of_sum(run, rank, sum);
    struct run_tie *const tie = &run->ties[action->microbatch];
    const double cost = cost_of(run, action);
    const bool comes = !sum->has_come;
    if (comes) {
        sum->has_come = true;
        tie->missing--;
        tie->ready = ready > tie->ready ? ready : tie->ready;
        tie->cost = cost > tie->cost ? cost : tie->cost;
    }
    if (tie->missing > 0)
        return comes;
    end_sum(run, rank, sum, tie->ready, tie->cost);
    return true;
}

/* Performs a rank's next sum as far as it can. Returns true if something has changed. */
static bool run_next_sum(struct run *run, uint32_t rank)
{
    struct run_sum *const sum = sum_at_front(run, rank);
    if (!sum || run->ended_sums[rank] == run->posted_sums[rank])
        return false;
    const double ready = sum->posted > run->sums_at[rank] ? sum->posted : run->sums_at[rank];
    const struct shoal_action *const action = action_of_sum(run, rank, sum);
    if (action->kind == SHOAL_SUM_TIED)
        return run_tied_sum(run, rank, sum, ready);
    end_sum(run, rank, sum, ready, cost_of(run, action));
    return true;
}

/* ---- Ranks --------------------------------------------------------------------------------------------------------------- */

/* Performs a rank's next action if it can begin. */
static bool run_next(struct run *run, uint32_t rank)
{
    const struct schedule_list *list = &run->schedule->lists[rank];
    uint32_t other;
    if (run->next[rank] == list->count)
        return false;
    const struct shoal_action *action = &list->actions[run->next[rank]];
    if (schedule_is_sum(action->kind)) {
        run_post_sum(run, rank);
        return true;
    }
    const bool is_update = action->kind == SHOAL_UPDATE;
    const double input = is_update ? run->summed_at[action->stage] : input_at(run, action);
    if (input == NEVER || !has_slot(run, action) || (is_update && run->sums_left[action->stage] > 0))
        return false;
    const double begin = input > run->free_at[rank] ? input : run->free_at[rank];
    const int pass = pass_of(action->kind);
    if (run->begins_out)
        run->begins_out[rank][run->next[rank]] = begin;
    run->free_at[rank] = begin + cost_of(run, action);
    run->next[rank]++;
    if (pass < 0)
        return true;
    run->ends[pass][run_cell(run, action->stage, action->microbatch)] = run->free_at[rank];
    run->taken[pass][action->stage] += stage_before(run, action, &other) && is_other_rank(run, other, action->stage);
    if (stage_after(run, action, &other))
        run->sent[pass][other] += is_other_rank(run, action->stage, other);
    return true;
}

static bool is_at_end(const struct run *run, uint32_t rank)
{
    return run->next[rank] == run->schedule->lists[rank].count && !sum_at_front(run, rank);
}

/* Returns true if all ranks have come to their ends. */
static bool run_to_ends(struct run *run)
{
    bool is_moving = true, is_done = true;
    while (is_moving) {
        is_moving = false;
        for (uint32_t r = 0; r < run->schedule->ranks; r++)
            while (run_next(run, r) || run_next_sum(run, r))
                is_moving = true;
    }
    for (uint32_t r = 0; r < run->schedule->ranks; r++)
        is_done &= is_at_end(run, r);
    return is_done;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static double list_activations(const struct shoal_schedule *schedule, uint32_t rank, double kept_share)
{
    const struct schedule_list *list = &schedule->lists[rank];
    double kept = 0, most = 0;
    uint32_t stages = 0;
    for (uint32_t s = 0; s < schedule->stages; s++)
        stages += schedule->rank_of[s] == rank;
    for (uint32_t i = 0; i < list->count; i++) {
        const enum shoal_action_kind kind = list->actions[i].kind;
        const bool is_recomputed = schedule->recomputes[list->actions[i].stage];
        kept += kind == SHOAL_FORWARD           ? !is_recomputed
                : kind == SHOAL_RECOMPUTE       ? 1
                : kind == SHOAL_INPUT_GRADIENT  ? kept_share - 1
                : kind == SHOAL_BACKWARD        ? -1
                : kind == SHOAL_WEIGHT_GRADIENT ? -kept_share
                                                : 0;
        most = kept > most ? kept : most;
    }
    return stages ? most / stages : 0;
}

double schedule_activations(const struct shoal_schedule *schedule, double kept_share)
{
    double most = 0;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        const double own = list_activations(schedule, r, kept_share);
        most = own > most ? own : most;
    }
    return most;
}

/* ---- Times --------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_schedule_stage_costs(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs,
                                             struct shoal_stage_costs *each_out)
{
    if (!schedule || !costs || !each_out)
        return SHOAL_ERR_ARGUMENT;
    const double stages = (double)schedule->stages / schedule->ranks;
    for (uint32_t s = 0; s < schedule->stages; s++) {
        const uint32_t next = s + 1 < schedule->stages ? s + 1 : s;
        const double own = schedule->replicas[schedule->rank_of[s]], other = schedule->replicas[schedule->rank_of[next]];
        each_out[s] = (struct shoal_stage_costs){.forward = costs->forward / stages / own,
                                                 .input_gradient = costs->input_gradient / stages / own,
                                                 .weight_gradient = costs->weight_gradient / stages / own,
                                                 .transfer = costs->transfer / (own < other ? own : other),
                                                 .sum_replicas = own > 1 ? costs->sum_replicas / stages : 0,
                                                 .sum_tied = costs->sum_tied,
                                                 .update = costs->update / stages};
    }
    return SHOAL_OK;
}

static void sum_times(const struct run *run, double *const *begins, struct shoal_schedule_times *times)
{
    const struct shoal_schedule *schedule = run->schedule;
    double busy = 0;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        const struct schedule_list *list = &schedule->lists[r];
        const double end = run->sums_at[r] > run->free_at[r] ? run->sums_at[r] : run->free_at[r];
        const double span = list->count ? end - begins[r][0] : 0;
        for (uint32_t i = 0; i < list->count; i++)
            busy += schedule_is_sum(list->actions[i].kind) ? 0 : cost_of(run, &list->actions[i]);
        times->step = end > times->step ? end : times->step;
        times->span = span > times->span ? span : times->span;
    }
    busy /= schedule->ranks;
    times->bubble = times->step > 0 ? 1 - busy / times->step : 0;
    times->span_bubble = times->span > 0 ? 1 - busy / times->span : 0;
}

static enum shoal_status try_slots(const struct shoal_schedule *schedule, uint32_t slots, bool *suffice_out)
{
    struct run run = {.schedule = schedule, .costs = {1, 1, 1, 0, 0, 0, 0}, .slots = slots};
    const bool is_open = run_open(&run);
    *suffice_out = is_open && run_to_ends(&run);
    run_close(&run);
    return is_open ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

/* The fewest slots with which the ranks come to their ends: more of them never make a rank wait. */
static enum shoal_status find_slots(const struct shoal_schedule *schedule, uint32_t *slots_out)
{
    uint32_t too_few = 0, enough = schedule->microbatches;
    while (enough - too_few > 1) {
        const uint32_t middle = too_few + (enough - too_few) / 2;
        bool suffice;
        SCHEDULE_TRY(try_slots(schedule, middle, &suffice));
        if (suffice)
            enough = middle;
        else
            too_few = middle;
    }
    *slots_out = enough;
    return SHOAL_OK;
}

static void free_begins(double **begins, uint32_t ranks)
{
    for (uint32_t r = 0; begins && r < ranks; r++)
        free(begins[r]);
    free(begins);
}

static double **allocate_begins(const struct shoal_schedule *schedule)
{
    double **begins = calloc(schedule->ranks, sizeof *begins);
    for (uint32_t r = 0; begins && r < schedule->ranks; r++) {
        begins[r] = calloc(schedule->lists[r].count + 1, sizeof **begins);
        if (!begins[r]) {
            free_begins(begins, r);
            return NULL;
        }
    }
    return begins;
}

static bool is_share(double value)
{
    return value >= 0 && value <= 1;
}

static bool are_costs(const struct shoal_stage_costs *costs)
{
    const double all[] = {costs->forward,      costs->input_gradient, costs->weight_gradient, costs->transfer,
                          costs->sum_replicas, costs->sum_tied,       costs->update};
    bool is_good = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        is_good &= all[i] >= 0 && all[i] <= SCHEDULE_COST_MOST;
    return is_good;
}

/* Runs the schedule once. The run has its costs. */
static enum shoal_status time_run(struct run *run, double kept_share, struct shoal_schedule_times *times_out,
                                  double *const *begins_out)
{
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    double **begins = begins_out ? NULL : allocate_begins(run->schedule);
    run->begins_out = begins_out ? begins_out : begins;
    const bool is_open = run->begins_out && run_open(run), is_done = is_open && run_to_ends(run);
    const enum shoal_status status = is_open ? is_done ? SHOAL_OK : SHOAL_ERR_ARGUMENT : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK) {
        sum_times(run, run->begins_out, &times);
        times.activations = schedule_activations(run->schedule, kept_share);
        shoal_struct_copy_out(times_out, &times, sizeof times);
    }
    run_close(run);
    free_begins(begins, run->schedule->ranks);
    return status;
}

enum shoal_status shoal_schedule_time(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs,
                                      double kept_share, struct shoal_schedule_times *times_out, double *const *begins_out)
{
    if (!schedule || !costs || !times_out || !shoal_struct_bytes(times_out) || !are_costs(costs) || !is_share(kept_share))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_stage_costs *const each = calloc(schedule->stages, sizeof *each);
    if (!each)
        return SHOAL_ERR_MEMORY;
    enum shoal_status status = shoal_schedule_stage_costs(schedule, costs, each);
    struct run run = {.schedule = schedule, .each = each};
    if (status == SHOAL_OK)
        status = time_run(&run, kept_share, times_out, begins_out);
    free(each);
    return status;
}

enum shoal_status shoal_schedule_time_stages(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs,
                                             double kept_share, struct shoal_schedule_times *times_out,
                                             double *const *begins_out)
{
    if (!schedule || !costs || !times_out || !shoal_struct_bytes(times_out) || !is_share(kept_share))
        return SHOAL_ERR_ARGUMENT;
    for (uint32_t s = 0; s < schedule->stages; s++)
        if (!are_costs(&costs[s]))
            return SHOAL_ERR_ARGUMENT;
    struct run run = {.schedule = schedule, .each = costs};
    return time_run(&run, kept_share, times_out, begins_out);
}

enum shoal_status shoal_schedule_slots(const struct shoal_schedule *schedule, uint32_t *slots_out)
{
    return schedule && slots_out ? find_slots(schedule, slots_out) : SHOAL_ERR_ARGUMENT;
}

/* ---- Faults -------------------------------------------------------------------------------------------------------------- */

/* What has been seen of a stage's microbatch on its rank, in order. */
enum seen { FORWARD_SEEN = 1, INPUT_SEEN = 2, WEIGHT_SEEN = 4, RECOMPUTE_SEEN = 8 };

static unsigned char seen_by(enum shoal_action_kind kind)
{
    static const unsigned char adds[] = {
        [SHOAL_FORWARD] = FORWARD_SEEN,        [SHOAL_BACKWARD] = INPUT_SEEN | WEIGHT_SEEN, [SHOAL_INPUT_GRADIENT] = INPUT_SEEN,
        [SHOAL_WEIGHT_GRADIENT] = WEIGHT_SEEN, [SHOAL_RECOMPUTE] = RECOMPUTE_SEEN,
    };
    return adds[kind];
}

static enum shoal_status check_order(const struct shoal_schedule *schedule, uint32_t rank, const struct shoal_action *action,
                                     unsigned char seen, struct schedule_text text)
{
    const enum shoal_action_kind kind = action->kind;
    const bool is_backward = kind == SHOAL_BACKWARD || kind == SHOAL_INPUT_GRADIENT;
    const char *before = NULL;
    char name[40];
    schedule_name_action(action, name);
    if (seen & seen_by(kind))
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u: %s comes twice, or beside B of the same microbatch", rank,
                               name);
    if (kind == SHOAL_RECOMPUTE && seen & INPUT_SEEN)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u: %s comes behind the backward pass that needs it", rank,
                               name);
    if (kind != SHOAL_FORWARD && !(seen & FORWARD_SEEN))
        before = "F";
    else if (is_backward && schedule->recomputes[action->stage] && !(seen & RECOMPUTE_SEEN))
        before = "R";
    else if (kind == SHOAL_WEIGHT_GRADIENT && !(seen & INPUT_SEEN))
        before = "I";
    if (before)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u: %s comes before %u%s%u", rank, name, action->stage, before,
                               action->microbatch);
    return SHOAL_OK;
}

static enum shoal_status check_action(const struct shoal_schedule *schedule, uint32_t rank, const struct shoal_action *action,
                                      unsigned char *seen, struct schedule_text text)
{
    char name[40];
    schedule_name_action(action, name);
    const bool is_of_stage = schedule_is_of_stage(action->kind);
    if (action->stage >= schedule->stages || (!is_of_stage && action->microbatch >= schedule->microbatches))
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u: %s is out of range: %u stages, %u microbatches", rank, name,
                               schedule->stages, schedule->microbatches);
    if (schedule->rank_of[action->stage] != rank)
        return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "rank %u: %s, but stage %u is on rank %u", rank, name, action->stage,
                               schedule->rank_of[action->stage]);
    if (is_of_stage)
        return SHOAL_OK;
    unsigned char *own = &seen[(size_t)action->stage * schedule->microbatches + action->microbatch];
    SCHEDULE_TRY(check_order(schedule, rank, action, *own, text));
    *own |= seen_by(action->kind);
    return SHOAL_OK;
}

static enum shoal_status check_lists(const struct shoal_schedule *schedule, unsigned char *seen, struct schedule_text text)
{
    for (uint32_t r = 0; r < schedule->ranks; r++)
        for (uint32_t i = 0; i < schedule->lists[r].count; i++)
            SCHEDULE_TRY(check_action(schedule, r, &schedule->lists[r].actions[i], seen, text));
    for (uint32_t s = 0; s < schedule->stages; s++)
        for (uint32_t m = 0; m < schedule->microbatches; m++) {
            const unsigned char own = seen[(size_t)s * schedule->microbatches + m];
            if ((own & ~RECOMPUTE_SEEN) != (FORWARD_SEEN | INPUT_SEEN | WEIGHT_SEEN))
                return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "%u%s%u is missing on rank %u", s,
                                       !(own & FORWARD_SEEN) ? "F"
                                       : !(own & INPUT_SEEN) ? "B"
                                                             : "W",
                                       m, schedule->rank_of[s]);
        }
    return schedule_check_sums(schedule, text);
}

/* Returns the sum for which a rank that has stopped waits, or NULL if it waits for another stage. */
static const struct run_sum *sum_waited_for(const struct run *run, uint32_t rank)
{
    const struct schedule_list *const list = &run->schedule->lists[rank];
    const bool is_over = run->next[rank] == list->count;
    return is_over || list->actions[run->next[rank]].kind == SHOAL_UPDATE ? sum_at_front(run, rank) : NULL;
}

/* Returns true if the rank has a part in a tie and has not come to it. */
static bool lacks_tie(const struct run *run, uint32_t rank, uint32_t tie)
{
    for (uint32_t i = run->ended_sums[rank]; i < run->schedule->lists[rank].sums; i++) {
        const struct run_sum *const sum = &run->sums[run->first_sum[rank] + i];
        const struct shoal_action *const action = action_of_sum(run, rank, sum);
        if (action->kind == SHOAL_SUM_TIED && action->microbatch == tie && !sum->has_come)
            return true;
    }
    return false;
}

/* The stage for which a rank that has stopped waits: the one that makes its input, or that has to free a slot. */
static uint32_t waits_for(const struct run *run, uint32_t rank)
{
    const struct shoal_action *action = &run->schedule->lists[rank].actions[run->next[rank]];
    uint32_t other = action->stage;
    if (input_at(run, action) == NEVER)
        (void)stage_before(run, action, &other);
    else
        (void)stage_after(run, action, &other);
    return other;
}

/* Returns the rank for which a rank that has stopped waits. */
static uint32_t rank_waited_for(const struct run *run, uint32_t rank)
{
    const struct run_sum *const sum = sum_waited_for(run, rank);
    uint32_t other = 0;
    if (!sum)
        return run->schedule->rank_of[waits_for(run, rank)];
    while (!lacks_tie(run, other, action_of_sum(run, rank, sum)->microbatch))
        other++;
    return other;
}

/* Adds to a line of `room` bytes what a rank waits for. */
static void tell_wait(const struct run *run, uint32_t rank, char *line, size_t room)
{
    const struct run_sum *const sum = sum_waited_for(run, rank);
    if (sum) {
        const struct shoal_action *const tied = action_of_sum(run, rank, sum);
        snprintf(line, room, "rank %u waits with %uT%u for T%u of rank %u", rank, tied->stage, tied->microbatch,
                 tied->microbatch, rank_waited_for(run, rank));
        return;
    }
    const struct shoal_action *action = &run->schedule->lists[rank].actions[run->next[rank]];
    const uint32_t stage = waits_for(run, rank), other = run->schedule->rank_of[stage];
    char name[40];
    schedule_name_action(action, name);
    if (input_at(run, action) == NEVER)
        snprintf(line, room, "rank %u waits with %s for %u%c%u of rank %u", rank, name, stage,
                 action->kind == SHOAL_FORWARD ? 'F' : 'B', action->microbatch, other);
    else
        snprintf(line, room, "rank %u waits with %s for a free slot of stage %u on rank %u", rank, name, stage, other);
}

/* Follows who waits for whom, from the first rank that has stopped, until a rank comes again. */
static enum shoal_status tell_circle(const struct run *run, struct schedule_text text)
{
    char line[400] = "";
    uint32_t rank = 0;
    while (is_at_end(run, rank))
        rank++;
    for (uint32_t i = 0; i < run->schedule->ranks; i++) /* then it is in the circle */
        rank = rank_waited_for(run, rank);
    const uint32_t first = rank;
    do {
        const size_t used = strlen(line), gap = used ? 2 : 0;
        if (used + gap + 1 < sizeof line) {
            memcpy(line + used, ", ", gap);
            tell_wait(run, rank, line + used + gap, sizeof line - used - gap);
        }
        rank = rank_waited_for(run, rank);
    } while (rank != first);
    return schedule_refuse(text, SHOAL_ERR_ARGUMENT, "ranks wait for each other for ever: %s", line);
}

enum shoal_status shoal_schedule_check(const struct shoal_schedule *schedule, uint32_t slots, char *text, size_t text_bytes)
{
    const struct schedule_text why = {text, text_bytes};
    if (!schedule)
        return schedule_refuse(why, SHOAL_ERR_ARGUMENT, "schedule is NULL");
    unsigned char *seen = calloc((size_t)schedule->stages * schedule->microbatches, 1);
    struct run run = {.schedule = schedule, .costs = {1, 1, 1, 0, 0, 0, 0}, .slots = slots};
    enum shoal_status status = seen && run_open(&run) ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = check_lists(schedule, seen, why);
    if (status == SHOAL_OK && !run_to_ends(&run))
        status = tell_circle(&run, why);
    run_close(&run);
    free(seen);
    return status == SHOAL_ERR_MEMORY ? schedule_refuse(why, status, "no memory to check the schedule") : status;
}
