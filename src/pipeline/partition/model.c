/* A problem: the units of a profile, the stages of a schedule, and what a division of the one among the other costs. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

/* ---- Units --------------------------------------------------------------------------------------------------------------- */

/* Sums of the units before each unit. */
static void sum_units(struct problem *problem)
{
    for (uint32_t i = 0; i < problem->units; i++) {
        const struct shoal_unit *unit = &problem->profile->units[i];
        problem->forward[i + 1] = problem->forward[i] + unit->forward;
        problem->input[i + 1] = problem->input[i] + unit->input_gradient;
        problem->weight[i + 1] = problem->weight[i] + unit->weight_gradient;
        problem->parameters[i + 1] = problem->parameters[i] + (double)unit->parameter_bytes;
        problem->kept[i + 1] = problem->kept[i] + (double)unit->kept_bytes;
        problem->pins[i] = unit->stage;
    }
}

/* Bytes that cross the begin of each unit: first differences, then sums. */
static void sum_cuts(struct problem *problem)
{
    const struct shoal_profile *profile = problem->profile;
    for (uint32_t i = 0; i + 1 < problem->units; i++) {
        problem->cut[i + 1] += (double)profile->units[i].output_bytes;
        problem->cut[i + 2] -= (double)profile->units[i].output_bytes;
    }
    for (size_t i = 0; i < profile->output_count; i++) {
        problem->cut[profile->outputs[i].from + 1] += (double)profile->outputs[i].bytes;
        problem->cut[profile->outputs[i].to + 1] -= (double)profile->outputs[i].bytes;
    }
    for (uint32_t i = 0; i < problem->units; i++)
        problem->cut[i + 1] += problem->cut[i];
    for (uint32_t i = 0; i <= problem->units; i++) /* rounding of large sums */
        problem->cut[i] = problem->cut[i] > 0 ? problem->cut[i] : 0;
}

static int by_first(const void *a, const void *b)
{
    const struct shared_pair *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

static size_t count_pairs(const struct shoal_profile *profile)
{
    size_t pairs = 0;
    for (size_t t = 0; t < profile->tie_count; t++)
        pairs += profile->ties[t].count - 1;
    return pairs;
}

static void list_pairs(struct problem *problem)
{
    const struct shoal_profile *profile = problem->profile;
    size_t count = 0;
    for (size_t t = 0; t < profile->tie_count; t++)
        for (uint32_t i = 0; i + 1 < profile->ties[t].count; i++)
            problem->pairs[count++] =
                (struct shared_pair){profile->ties[t].units[i], profile->ties[t].units[i + 1], (double)profile->ties[t].bytes};
    qsort(problem->pairs, count, sizeof *problem->pairs, by_first);
    for (size_t i = 0; i < count; i++)
        problem->pair_at[problem->pairs[i].first + 1]++;
    for (uint32_t i = 0; i < problem->units; i++)
        problem->pair_at[i + 1] += problem->pair_at[i];
}

/* If ties must stay together and each rank has one stage, no stage begins between their units. */
static void glue_ties(struct problem *problem)
{
    const struct shoal_profile *profile = problem->profile;
    if (!problem->options.keeps_ties_together || !problem->is_one_each)
        return;
    for (size_t t = 0; t < profile->tie_count; t++)
        for (uint32_t u = profile->ties[t].units[0] + 1; u <= profile->ties[t].units[profile->ties[t].count - 1]; u++)
            problem->is_glued[u] = true;
}

/* ---- Stages -------------------------------------------------------------------------------------------------------------- */

static bool is_recomputed(const struct problem *problem, uint32_t stage)
{
    return shoal_schedule_recomputes(problem->schedule, stage) != 0;
}

/* Microbatches of a stage now: between their forward and their backward pass, between their input gradient and their weight
 * gradient, and between their recomputation and their backward pass. */
struct use_now {
    double inputs, weights, recomputed;
};

static void use_count(struct stage_use *use, const struct shoal_action *action, double kept_share, struct use_now *now)
{
    const bool is_backward = action->kind == SHOAL_BACKWARD || action->kind == SHOAL_INPUT_GRADIENT;
    now->inputs += (action->kind == SHOAL_FORWARD) - is_backward;
    now->weights += (action->kind == SHOAL_INPUT_GRADIENT) - (action->kind == SHOAL_WEIGHT_GRADIENT);
    now->recomputed += (action->kind == SHOAL_RECOMPUTE) - is_backward;
    const double flying = now->inputs + kept_share * now->weights;
    use->inputs = now->inputs > use->inputs ? now->inputs : use->inputs;
    use->weights = now->weights > use->weights ? now->weights : use->weights;
    use->recomputed = now->recomputed > use->recomputed ? now->recomputed : use->recomputed;
    use->flying = flying > use->flying ? flying : use->flying;
}

static bool use_stages(struct problem *problem)
{
    const struct shoal_schedule *schedule = problem->schedule;
    struct use_now *now = calloc(problem->stages, sizeof *now);
    if (!now)
        return false;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        uint32_t count;
        const struct shoal_action *actions = shoal_schedule_actions(schedule, r, &count);
        problem->actions += count;
        for (uint32_t i = 0; i < count; i++)
            use_count(&problem->uses[actions[i].stage], &actions[i], problem->options.kept_share, &now[actions[i].stage]);
    }
    free(now);
    problem->is_one_each = problem->recomputes_all = true;
    for (uint32_t s = 0; s < problem->stages; s++) {
        problem->recomputes_all &= is_recomputed(problem, s);
        problem->uses[s].rank = shoal_schedule_rank_of(schedule, s);
        problem->is_one_each &= ++problem->rank_stages[problem->uses[s].rank] == 1;
        const bool is_far = s > 0 && problem->uses[s].rank != problem->uses[s - 1].rank;
        problem->uses[s].is_far_ahead = is_far;
        if (s > 0)
            problem->uses[s - 1].is_far_back = is_far;
    }
    return true;
}

static void set_ranks(struct problem *problem)
{
    const struct shoal_partition_options *options = &problem->options;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        problem->limits[r] = (double)(options->rank_memory_bytes ? options->rank_memory_bytes[r] : options->memory_bytes);
        problem->replicas[r] =
            options->rank_replicas ? options->rank_replicas[r] : shoal_schedule_replicas(problem->schedule, r);
        const double replicas = problem->replicas[r];
        problem->shares[r] = 1 / replicas;
        problem->speeds[r] = (options->rank_speeds ? options->rank_speeds[r] : 1) * replicas;
    }
    problem->memory_ratio = 1.0 / options->parameter_shards + options->gradient_ratio / options->gradient_shards +
                            options->state_ratio / options->state_shards;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static bool problem_allocate(struct problem *problem)
{
    const size_t units = problem->units, stages = problem->stages, ranks = problem->ranks;
    double **const sums[] = {&problem->forward,    &problem->input, &problem->weight,
                             &problem->parameters, &problem->kept,  &problem->cut};
    bool is_there = true;
    for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++)
        is_there &= (*sums[i] = calloc(units + 2, sizeof **sums[i])) != NULL;
    is_there &= (problem->pins = calloc(units + 1, sizeof *problem->pins)) != NULL;
    is_there &= (problem->is_glued = calloc(units + 1, sizeof *problem->is_glued)) != NULL;
    is_there &= (problem->uses = calloc(stages, sizeof *problem->uses)) != NULL;
    is_there &= (problem->costs = calloc(stages, sizeof *problem->costs)) != NULL;
    is_there &= (problem->limits = calloc(ranks, sizeof *problem->limits)) != NULL;
    is_there &= (problem->speeds = calloc(ranks, sizeof *problem->speeds)) != NULL;
    is_there &= (problem->shares = calloc(ranks, sizeof *problem->shares)) != NULL;
    is_there &= (problem->replicas = calloc(ranks, sizeof *problem->replicas)) != NULL;
    is_there &= (problem->rank_stages = calloc(ranks, sizeof *problem->rank_stages)) != NULL;
    is_there &= (problem->pair_at = calloc(units + 2, sizeof *problem->pair_at)) != NULL;
    is_there &= (problem->pairs = calloc(count_pairs(problem->profile) + 1, sizeof *problem->pairs)) != NULL;
    return is_there;
}

void problem_close(struct problem *problem)
{
    free(problem->forward);
    free(problem->input);
    free(problem->weight);
    free(problem->parameters);
    free(problem->kept);
    free(problem->cut);
    free(problem->pins);
    free(problem->is_glued);
    free(problem->uses);
    free(problem->costs);
    free(problem->limits);
    free(problem->speeds);
    free(problem->shares);
    free(problem->replicas);
    free(problem->rank_stages);
    free(problem->pair_at);
    free(problem->pairs);
}

/* Refuses pins to stages that do not exist, or that contradict the order of the units. */
static enum shoal_status check_pins(const struct problem *problem, struct partition_text text)
{
    uint32_t before = 0;
    for (uint32_t i = 0; i < problem->units; i++) {
        const struct shoal_unit *unit = &problem->profile->units[i], *other = &problem->profile->units[before];
        if (unit->stage == SHOAL_ANY_STAGE)
            continue;
        if ((uint32_t)unit->stage >= problem->stages)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT, "unit %s is pinned to stage %d, but there are %u stages",
                                    unit->name, unit->stage, problem->stages);
        if (other->stage != SHOAL_ANY_STAGE && other->stage > unit->stage)
            return partition_refuse(text, SHOAL_ERR_ARGUMENT,
                                    "unit %s is pinned to stage %d, but unit %s, which runs before it, to stage %d", unit->name,
                                    unit->stage, other->name, other->stage);
        before = i;
    }
    return SHOAL_OK;
}

static enum shoal_status refuse_tie(const struct problem *problem, uint32_t one, uint32_t other, struct partition_text text)
{
    const struct shoal_unit *units = problem->profile->units;
    return partition_refuse(
        text, SHOAL_ERR_ARGUMENT,
        "a tie spans a pin: its units must be on one rank, but unit %s is pinned to stage %d (rank %u) and unit "
        "%s to stage %d (rank %u). Pin both to stages of one rank, or let tied gradients be summed "
        "(keeps_ties_together = 0)",
        units[one].name, units[one].stage, problem->uses[units[one].stage].rank, units[other].name, units[other].stage,
        problem->uses[units[other].stage].rank);
}

/* Refuses two pins to different stages in what must be in one stage. */
static enum shoal_status check_glue(const struct problem *problem, struct partition_text text)
{
    const struct shoal_unit *units = problem->profile->units;
    uint32_t pinned = 0;
    for (uint32_t i = 0; i < problem->units; i++) {
        if (!problem->is_glued[i] || units[pinned].stage == SHOAL_ANY_STAGE)
            pinned = i;
        else if (units[i].stage != SHOAL_ANY_STAGE && units[i].stage != units[pinned].stage)
            return refuse_tie(problem, pinned, i, text);
    }
    return SHOAL_OK;
}

/* Refuses ties that must stay together and are pinned to two ranks. */
static enum shoal_status check_ties(const struct problem *problem, struct partition_text text)
{
    const struct shoal_unit *units = problem->profile->units;
    for (size_t t = 0; problem->options.keeps_ties_together && t < problem->profile->tie_count; t++) {
        const struct profile_tie *tie = &problem->profile->ties[t];
        uint32_t pinned = tie->units[0];
        for (uint32_t i = 1; i < tie->count; i++) {
            const uint32_t unit = tie->units[i];
            if (units[pinned].stage == SHOAL_ANY_STAGE)
                pinned = unit;
            else if (units[unit].stage != SHOAL_ANY_STAGE &&
                     problem->uses[units[unit].stage].rank != problem->uses[units[pinned].stage].rank)
                return refuse_tie(problem, pinned, unit, text);
        }
    }
    return check_glue(problem, text);
}

enum shoal_status problem_open(struct problem *problem, const struct shoal_profile *profile,
                               const struct shoal_schedule *schedule, const struct shoal_partition_options *options,
                               struct partition_text text)
{
    *problem = (struct problem){.profile = profile, .schedule = schedule, .options = *options};
    problem->units = profile->count;
    problem->stages = shoal_schedule_stages(schedule);
    problem->ranks = shoal_schedule_ranks(schedule);
    enum shoal_status status = problem_allocate(problem) ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK && problem->options.slots == 0)
        status = shoal_schedule_slots(schedule, &problem->options.slots);
    if (status == SHOAL_OK && !use_stages(problem))
        status = SHOAL_ERR_MEMORY;
    if (status != SHOAL_OK)
        return partition_refuse(text, status, "no memory for a partition of %u units", profile->count);
    sum_units(problem);
    sum_cuts(problem);
    list_pairs(problem);
    set_ranks(problem);
    glue_ties(problem);
    PARTITION_TRY(check_pins(problem, text));
    return check_ties(problem, text);
}

/* ---- One stage ----------------------------------------------------------------------------------------------------------- */

/* The share of a microbatch that the replicas of a stage's rank have each. */
static double replica_share(const struct problem *problem, uint32_t stage)
{
    return problem->shares[problem->uses[stage].rank];
}

double problem_transfer(const struct problem *problem, uint32_t stage, uint32_t unit)
{
    const double rate = problem->options.bytes_per_us, from = replica_share(problem, stage - 1),
                 to = replica_share(problem, stage);
    const double bytes = problem->cut[unit] * (from > to ? from : to);
    return problem->options.latency_us + (rate > 0 ? bytes / rate : 0);
}

double problem_parameters(const struct problem *problem, uint32_t from, uint32_t to)
{
    double bytes = problem->parameters[to] - problem->parameters[from];
    for (uint32_t i = problem->pair_at[from]; i < problem->pair_at[to]; i++)
        bytes -= problem->pairs[i].second < to ? problem->pairs[i].bytes : 0;
    return bytes;
}

double problem_lack(const struct problem *problem, enum memory_rule rule, uint32_t stage, uint32_t from, uint32_t to,
                    double parameters, double *grows_out)
{
    const struct stage_use *use = &problem->uses[stage];
    const double part = replica_share(problem, stage), limit = problem->limits[use->rank];
    const double kept = part * (problem->kept[to] - problem->kept[from]);
    const double share = rule == MEMORY_SURE ? limit / problem->rank_stages[use->rank] : limit;
    double activations = kept * use->flying, grows = activations;
    if (is_recomputed(problem, stage)) {
        const double waiting = rule == MEMORY_SURE ? use->weights * problem->options.kept_share * kept : 0;
        const double again = rule == MEMORY_SURE ? use->recomputed * kept : kept;
        activations = (from < to ? use->inputs * part * problem->cut[from] : 0) + waiting + again;
        grows = again + waiting;
    }
    const double buffers = problem->options.slots * part *
                           ((use->is_far_ahead ? problem->cut[from] : 0) + (use->is_far_back ? problem->cut[to] : 0));
    const double fixed = parameters * problem->memory_ratio - share;
    const bool is_limited = limit > 0 && rule != MEMORY_ANY;
    if (grows_out)
        *grows_out = is_limited ? fixed + grows : 0;
    const double lack = fixed + activations + buffers;
    return is_limited && lack > 0 ? lack : 0;
}

/* ---- A division ---------------------------------------------------------------------------------------------------------- */

void problem_costs(const struct problem *problem, const uint32_t *division, struct shoal_stage_costs *costs_out)
{
    for (uint32_t s = 0; s < problem->stages; s++) {
        const uint32_t from = division[s], to = division[s + 1];
        const double speed = problem->speeds[problem->uses[s].rank];
        costs_out[s] = (struct shoal_stage_costs){(problem->forward[to] - problem->forward[from]) / speed,
                                                  (problem->input[to] - problem->input[from]) / speed,
                                                  (problem->weight[to] - problem->weight[from]) / speed,
                                                  problem->uses[s].is_far_back ? problem_transfer(problem, s + 1, to) : 0,
                                                  0,
                                                  0,
                                                  0};
    }
}

uint32_t division_stage(const struct problem *problem, const uint32_t *division, uint32_t unit)
{
    uint32_t low = 0, high = problem->stages - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        if (division[middle] <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Bytes of parameters that a rank would count more than once. */
static double shared_on(const struct problem *problem, const uint32_t *division, uint32_t rank)
{
    double shared = 0;
    for (size_t t = 0; t < problem->profile->tie_count; t++) {
        const struct profile_tie *tie = &problem->profile->ties[t];
        uint32_t here = 0;
        for (uint32_t i = 0; i < tie->count; i++)
            here += problem->uses[division_stage(problem, division, tie->units[i])].rank == rank;
        shared += here > 1 ? (double)tie->bytes * (here - 1) : 0;
    }
    return shared;
}

/* Most bytes of activations that a rank keeps at a time, following its actions. */
static double activations_of(const struct problem *problem, const uint32_t *division, uint32_t rank)
{
    const double share = problem->options.kept_share;
    double now = 0, most = 0;
    uint32_t count;
    const struct shoal_action *actions = shoal_schedule_actions(problem->schedule, rank, &count);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t from = division[actions[i].stage], to = division[actions[i].stage + 1];
        const double kept = problem->kept[to] - problem->kept[from];
        const double input = is_recomputed(problem, actions[i].stage) && from < to ? problem->cut[from] : 0;
        const double held = is_recomputed(problem, actions[i].stage) ? input : kept;
        now += actions[i].kind == SHOAL_FORWARD           ? held
               : actions[i].kind == SHOAL_RECOMPUTE       ? kept
               : actions[i].kind == SHOAL_INPUT_GRADIENT  ? share * kept - kept - input
               : actions[i].kind == SHOAL_BACKWARD        ? -kept - input
               : actions[i].kind == SHOAL_WEIGHT_GRADIENT ? -share * kept
                                                          : 0;
        most = now > most ? now : most;
    }
    return most * problem->shares[rank];
}

/* Bytes of parameters of a rank, without shards. */
static double problem_rank_parameters(const struct problem *problem, const uint32_t *division, uint32_t rank)
{
    double parameters = -shared_on(problem, division, rank);
    for (uint32_t s = 0; s < problem->stages; s++)
        if (problem->uses[s].rank == rank)
            parameters += problem->parameters[division[s + 1]] - problem->parameters[division[s]];
    return parameters;
}

struct memory_need problem_need(const struct problem *problem, const uint32_t *division, uint32_t rank)
{
    const struct shoal_partition_options *options = &problem->options;
    double parameters = -shared_on(problem, division, rank), buffers = 0;
    for (uint32_t s = 0; s < problem->stages; s++) {
        const struct stage_use *use = &problem->uses[s];
        if (use->rank != rank)
            continue;
        parameters += problem->parameters[division[s + 1]] - problem->parameters[division[s]];
        buffers += use->is_far_ahead ? problem->cut[division[s]] : 0;
        buffers += use->is_far_back ? problem->cut[division[s + 1]] : 0;
    }
    return (struct memory_need){parameters / options->parameter_shards,
                                parameters * options->gradient_ratio / options->gradient_shards,
                                parameters * options->state_ratio / options->state_shards,
                                activations_of(problem, division, rank), buffers * problem->shares[rank] * options->slots};
}

double problem_total(const struct memory_need *need)
{
    return need->parameters + need->gradients + need->states + need->activations + need->buffers;
}

uint32_t problem_neediest(const struct problem *problem, const uint32_t *division, double *lack_out)
{
    uint32_t worst = 0;
    *lack_out = 0;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        if (problem->limits[r] <= 0)
            continue;
        const struct memory_need need = problem_need(problem, division, r);
        const double lack = problem_total(&need) - problem->limits[r];
        if (lack > *lack_out) {
            *lack_out = lack;
            worst = r;
        }
    }
    return worst;
}

double problem_excess(const struct problem *problem, const uint32_t *division)
{
    double lack;
    (void)problem_neediest(problem, division, &lack);
    return lack > 0.5 ? lack : 0; /* half a byte is rounding */
}

/* Ranks that sum a tie's gradients, with their replicas: those that have units of it. 1 if that is one rank of the schedule,
 * whose replicas sum these gradients with their others. */
uint32_t problem_members(const struct problem *problem, const uint32_t *division, const struct profile_tie *tie)
{
    uint32_t ranks = 0, members = 0, last = UINT32_MAX;
    for (uint32_t i = 0; i < tie->count; i++) {
        const uint32_t stage = division_stage(problem, division, tie->units[i]), rank = problem->uses[stage].rank;
        bool is_new = stage != last; /* units rise, and so do their stages */
        for (uint32_t j = 0; j < i && is_new; j++)
            is_new = problem->uses[division_stage(problem, division, tie->units[j])].rank != rank;
        ranks += is_new;
        members += is_new ? problem->replicas[rank] : 0;
        last = stage;
    }
    return ranks > 1 ? members : 1;
}

double problem_sum_time(const struct problem *problem, const struct profile_tie *tie, uint32_t ranks)
{
    const double rate = problem->options.bytes_per_us, share = (double)tie->bytes / ranks;
    return 2 * (ranks - 1.0) * (problem->options.latency_us + (rate > 0 ? share / rate : 0));
}

/* Sums of tied gradients, one after the other. */
static double time_of_ties(const struct problem *problem, const uint32_t *division)
{
    double time = 0;
    for (size_t t = 0; t < problem->profile->tie_count; t++) {
        const struct profile_tie *tie = &problem->profile->ties[t];
        time += problem_sum_time(problem, tie, problem_members(problem, division, tie));
    }
    return time;
}

double problem_replica_time(const struct problem *problem, uint32_t rank, double parameters)
{
    const double rate = problem->options.bytes_per_us, share = problem->shares[rank];
    const double bytes = parameters * problem->options.gradient_ratio * share;
    return 2 * (1 / share - 1) * (problem->options.latency_us + (rate > 0 ? bytes / rate : 0));
}

/* Sums of gradients among the replicas of a rank, for all ranks at once. */
static double time_of_replicas(const struct problem *problem, const uint32_t *division)
{
    double longest = 0;
    for (uint32_t r = 0; r < problem->ranks; r++) {
        if (problem->replicas[r] == 1)
            continue;
        const double time = problem_replica_time(problem, r, problem_rank_parameters(problem, division, r));
        longest = time > longest ? time : longest;
    }
    return longest;
}

bool problem_allows(const struct problem *problem, const uint32_t *division)
{
    for (uint32_t s = 0; s < problem->stages; s++)
        for (uint32_t u = division[s]; u < division[s + 1]; u++)
            if (problem->pins[u] != SHOAL_ANY_STAGE && (uint32_t)problem->pins[u] != s)
                return false;
    for (size_t t = 0; problem->options.keeps_ties_together && t < problem->profile->tie_count; t++)
        if (problem_members(problem, division, &problem->profile->ties[t]) > 1)
            return false;
    return true;
}

bool verdict_is_better(const struct verdict *one, const struct verdict *other)
{
    return one->excess != other->excess ? one->excess < other->excess : one->step < other->step * (1 - 1e-12);
}

enum shoal_status problem_judge(struct problem *problem, const uint32_t *division, struct verdict *verdict_out)
{
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    problem_costs(problem, division, problem->costs);
    PARTITION_TRY(shoal_schedule_time_stages(problem->schedule, problem->costs, problem->options.kept_share, &times, NULL));
    problem->spent += problem->actions;
    verdict_out->excess = problem_excess(problem, division);
    verdict_out->tied = time_of_ties(problem, division);
    verdict_out->replicas = time_of_replicas(problem, division);
    verdict_out->step = times.step + verdict_out->tied + verdict_out->replicas;
    verdict_out->bubble = times.bubble;
    return SHOAL_OK;
}
