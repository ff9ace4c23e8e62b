/* Actions behind a stage's last gradient: sums over replicas and over ties, and updates. */
#include <stdlib.h>

#include "pipeline/schedule/schedule.h"

/* ---- Adding -------------------------------------------------------------------------------------------------------------- */

/* What is added to a schedule. */
struct adding {
    const struct shoal_schedule *schedule;
    struct shoal_schedule *made;
    const struct shoal_tied_stage *tied; /* in the order of ties */
    size_t tied_count;
    bool sums_replicas, updates;
    uint32_t *left; /* [stages]: gradients that are still to come */
    size_t next;    /* the first tied stage whose tie this rank has not begun */
};

static int by_tie(const void *a, const void *b)
{
    const struct shoal_tied_stage *x = a, *y = b;
    if (x->tie != y->tie)
        return x->tie < y->tie ? -1 : 1;
    return (x->stage > y->stage) - (x->stage < y->stage);
}

/* Moves on to a stage of this rank whose tie the rank has to begin next. Returns false if there is none. If several stages of
 * the rank have that tie, it is the last one in `tied`. *is_ready_out: all of them have their gradients. */
static bool find_tie(struct adding *all, uint32_t rank, struct shoal_tied_stage *tied_out, size_t *after_out,
                     bool *is_ready_out)
{
    const uint32_t *const rank_of = all->schedule->rank_of;
    while (all->next < all->tied_count && rank_of[all->tied[all->next].stage] != rank)
        all->next++;
    if (all->next == all->tied_count)
        return false;
    *is_ready_out = true;
    *tied_out = all->tied[all->next];
    for (*after_out = all->next; *after_out < all->tied_count && all->tied[*after_out].tie == tied_out->tie; ++*after_out)
        if (rank_of[all->tied[*after_out].stage] == rank) {
            *tied_out = all->tied[*after_out];
            *is_ready_out &= all->left[tied_out->stage] == 0;
        }
    return true;
}

static enum shoal_status append_ties(struct adding *all, uint32_t rank)
{
    struct shoal_tied_stage tied;
    size_t after;
    bool is_ready;
    while (find_tie(all, rank, &tied, &after, &is_ready) && is_ready) {
        SCHEDULE_TRY(schedule_append(all->made, rank, SHOAL_SUM_TIED, tied.stage, tied.tie));
        all->next = after;
    }
    return SHOAL_OK;
}

/* Appends an action of the schedule, and the sums that can begin behind it. */
static enum shoal_status append_with_sums(struct adding *all, uint32_t rank, const struct shoal_action *action)
{
    if (schedule_is_of_stage(action->kind))
        return SHOAL_OK;
    SCHEDULE_TRY(schedule_append(all->made, rank, action->kind, action->stage, action->microbatch));
    const bool is_gradient = action->kind == SHOAL_BACKWARD || action->kind == SHOAL_WEIGHT_GRADIENT;
    if (!is_gradient || --all->left[action->stage] > 0)
        return SHOAL_OK;
    if (all->sums_replicas)
        SCHEDULE_TRY(schedule_append(all->made, rank, SHOAL_SUM_REPLICAS, action->stage, 0));
    return append_ties(all, rank);
}

static bool is_tied(const struct adding *all, uint32_t stage)
{
    for (size_t i = 0; i < all->tied_count; i++)
        if (all->tied[i].stage == stage)
            return true;
    return false;
}

/* Updates of stages without ties follow in the order in which these got their last gradients, as their sums did. Then come
 * tied stages, the last one first: it has begun the sum, so its update waits, and those behind it need not. */
static enum shoal_status append_updates(struct adding *all, uint32_t rank)
{
    const struct schedule_list *const list = &all->schedule->lists[rank];
    for (uint32_t s = 0; s < all->schedule->stages; s++)
        if (all->schedule->rank_of[s] == rank)
            all->left[s] = all->schedule->microbatches;
    for (uint32_t i = 0; i < list->count; i++) {
        const struct shoal_action *const action = &list->actions[i];
        const bool is_gradient = action->kind == SHOAL_BACKWARD || action->kind == SHOAL_WEIGHT_GRADIENT;
        if (is_gradient && --all->left[action->stage] == 0 && !is_tied(all, action->stage))
            SCHEDULE_TRY(schedule_append(all->made, rank, SHOAL_UPDATE, action->stage, 0));
    }
    for (uint32_t s = all->schedule->stages; s-- > 0;)
        if (all->schedule->rank_of[s] == rank && is_tied(all, s))
            SCHEDULE_TRY(schedule_append(all->made, rank, SHOAL_UPDATE, s, 0));
    return SHOAL_OK;
}

static enum shoal_status add_all(struct adding *all)
{
    const struct shoal_schedule *const schedule = all->schedule;
    for (uint32_t s = 0; s < schedule->stages; s++)
        all->left[s] = schedule->microbatches;
    for (uint32_t r = 0; r < schedule->ranks; r++)
        all->sums_replicas |= schedule->replicas[r] > 1;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        all->next = 0;
        for (uint32_t i = 0; i < schedule->lists[r].count; i++)
            SCHEDULE_TRY(append_with_sums(all, r, &schedule->lists[r].actions[i]));
        if (all->updates)
            SCHEDULE_TRY(append_updates(all, r));
    }
    return SHOAL_OK;
}

/* Returns true if stages exist, and each tie has stages on two ranks. */
static bool are_ties(const struct adding *all)
{
    const struct shoal_schedule *const schedule = all->schedule;
    for (size_t first = 0, end; first < all->tied_count; first = end) {
        bool is_far = false;
        for (end = first; end < all->tied_count && all->tied[end].tie == all->tied[first].tie; end++) {
            const uint32_t stage = all->tied[end].stage;
            if (stage >= schedule->stages || (end > first && stage == all->tied[end - 1].stage))
                return false;
            is_far |= schedule->rank_of[stage] != schedule->rank_of[all->tied[first].stage];
        }
        if (!is_far || all->tied[first].tie >= SCHEDULE_MOST)
            return false;
    }
    return true;
}

enum shoal_status shoal_schedule_add_sums(const struct shoal_schedule *schedule, const struct shoal_tied_stage *tied,
                                          size_t tied_count, int sums_replicas, int updates,
                                          struct shoal_schedule **schedule_out)
{
    if (!schedule || !schedule_out || (!tied && tied_count))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_tied_stage *const own = calloc(tied_count + 1, sizeof *own);
    uint32_t *const left = calloc(schedule->stages, sizeof *left);
    struct adding all = {.schedule = schedule,
                         .tied = own,
                         .tied_count = tied_count,
                         .sums_replicas = sums_replicas != 0,
                         .updates = updates != 0,
                         .left = left};
    enum shoal_status status = own && left ? SHOAL_OK : SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < tied_count && own; i++)
        own[i] = tied[i];
    if (status == SHOAL_OK && tied_count) {
        qsort(own, tied_count, sizeof *own, by_tie);
        status = are_ties(&all) ? SHOAL_OK : SHOAL_ERR_ARGUMENT;
    }
    if (status == SHOAL_OK)
        status = schedule_begin_like(schedule, &all.made);
    if (status == SHOAL_OK)
        status = add_all(&all);
    free(own);
    free(left);
    if (status == SHOAL_OK)
        *schedule_out = all.made;
    else
        shoal_schedule_free(all.made);
    return status;
}

enum shoal_status shoal_schedule_plain(const struct shoal_schedule *schedule, struct shoal_schedule **schedule_out)
{
    struct shoal_schedule *made = NULL;
    if (!schedule || !schedule_out)
        return SHOAL_ERR_ARGUMENT;
    SCHEDULE_TRY(schedule_begin_like(schedule, &made));
    enum shoal_status status = SHOAL_OK;
    for (uint32_t r = 0; r < schedule->ranks; r++) {
        made->replicas[r] = 1;
        for (uint32_t i = 0; i < schedule->lists[r].count && status == SHOAL_OK; i++) {
            const struct shoal_action *const action = &schedule->lists[r].actions[i];
            if (action->kind != SHOAL_RECOMPUTE && !schedule_is_of_stage(action->kind))
                status = schedule_append(made, r, action->kind, action->stage, action->microbatch);
        }
    }
    if (status == SHOAL_OK)
        *schedule_out = made;
    else
        shoal_schedule_free(made);
    return status;
}

/* ---- Faults -------------------------------------------------------------------------------------------------------------- */

/* What has been seen of a stage, and of a tie. */
struct stage_seen {
    uint32_t gradients;
    bool is_summed, is_updated;
};

struct tie_seen {
    uint32_t ranks;
    uint32_t rank, stage; /* the last one */
};

struct check {
    const struct shoal_schedule *schedule;
    struct stage_seen *stages;
    struct tie_seen *ties;
    struct schedule_text text;
};

static enum shoal_status sums_refuse(const struct check *check, uint32_t rank, const struct shoal_action *action,
                                     const char *why)
{
    char name[40];
    schedule_name_action(action, name);
    return schedule_refuse(check->text, SHOAL_ERR_ARGUMENT, "rank %u: %s %s", rank, name, why);
}

static enum shoal_status sums_check_tie(const struct check *check, uint32_t rank, const struct shoal_action *action)
{
    struct tie_seen *const tie = &check->ties[action->microbatch];
    if (tie->ranks && tie->rank == rank)
        return sums_refuse(check, rank, action, "comes twice: a rank sums the gradients of a tie once");
    *tie = (struct tie_seen){tie->ranks + 1, rank, action->stage};
    return SHOAL_OK;
}

static enum shoal_status check_one(const struct check *check, uint32_t rank, const struct shoal_action *action)
{
    struct stage_seen *const seen = &check->stages[action->stage];
    const bool is_update = action->kind == SHOAL_UPDATE, is_replicas = action->kind == SHOAL_SUM_REPLICAS;
    seen->gradients += action->kind == SHOAL_BACKWARD || action->kind == SHOAL_WEIGHT_GRADIENT;
    if (!schedule_is_of_stage(action->kind))
        return SHOAL_OK;
    if (action->kind != SHOAL_SUM_TIED && action->microbatch != 0)
        return sums_refuse(check, rank, action, "has another number than 0");
    if (seen->gradients < check->schedule->microbatches)
        return sums_refuse(check, rank, action, "comes before the last gradient of its stage");
    if ((is_update && seen->is_updated) || (is_replicas && seen->is_summed))
        return sums_refuse(check, rank, action, "comes twice");
    if (!is_update && seen->is_updated)
        return sums_refuse(check, rank, action, "comes behind the update of its stage");
    seen->is_updated |= is_update;
    seen->is_summed |= is_replicas;
    return action->kind == SHOAL_SUM_TIED ? sums_check_tie(check, rank, action) : SHOAL_OK;
}

/* Sums over replicas are there for all stages or for none, and so are updates. An update needs the sum over its replicas. */
static enum shoal_status check_missing(const struct check *check)
{
    const struct shoal_schedule *const schedule = check->schedule;
    bool sums = false, updates = false, has_replicas = false;
    for (uint32_t s = 0; s < schedule->stages; s++) {
        sums |= check->stages[s].is_summed;
        updates |= check->stages[s].is_updated;
        has_replicas |= schedule->replicas[schedule->rank_of[s]] > 1;
    }
    for (uint32_t s = 0; s < schedule->stages; s++) {
        const bool lacks_sum = !check->stages[s].is_summed && (sums || (updates && has_replicas));
        if (lacks_sum || (updates && !check->stages[s].is_updated))
            return schedule_refuse(check->text, SHOAL_ERR_ARGUMENT, "%u%s0 is missing on rank %u", s, lacks_sum ? "S" : "U",
                                   schedule->rank_of[s]);
    }
    for (uint32_t t = 0; t < schedule->ties; t++)
        if (check->ties[t].ranks == 1)
            return schedule_refuse(check->text, SHOAL_ERR_ARGUMENT,
                                   "T%u is missing: only rank %u sums the gradients of this tie (%uT%u)", t,
                                   check->ties[t].rank, check->ties[t].stage, t);
    return SHOAL_OK;
}

enum shoal_status schedule_check_sums(const struct shoal_schedule *schedule, struct schedule_text text)
{
    struct check check = {.schedule = schedule, .text = text};
    check.stages = calloc(schedule->stages, sizeof *check.stages);
    check.ties = calloc(schedule->ties + 1u, sizeof *check.ties);
    enum shoal_status status = check.stages && check.ties ? SHOAL_OK : SHOAL_ERR_MEMORY;
    for (uint32_t r = 0; r < schedule->ranks; r++)
        for (uint32_t i = 0; i < schedule->lists[r].count && status == SHOAL_OK; i++)
            status = check_one(&check, r, &schedule->lists[r].actions[i]);
    if (status == SHOAL_OK)
        status = check_missing(&check);
    free(check.stages);
    free(check.ties);
    return status;
}
