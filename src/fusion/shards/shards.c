/* A step with sharded parameters: gather, release, gradients, step. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/shards/shards_state.h"

/* ---- Ranges -------------------------------------------------------------------------------------------------------------- */

struct shards_range shards_range_of(const struct shoal_shards *shards, size_t parameter, int rank)
{
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    const struct shoal_parameter *each = &shards->parameters.items[parameter];
    const size_t element = shoal_type_bytes(each->type), offset = shards->offsets[parameter];
    const size_t begin = unit->is_whole ? offset : fusion_max(offset, fusion_border(&unit->borders, rank));
    const size_t own_end = unit->is_whole ? unit->bytes : fusion_border(&unit->borders, rank + 1);
    const size_t end = fusion_min(offset + each->count * element, own_end);
    if (begin >= end)
        return (struct shards_range){0, 0};
    return (struct shards_range){(begin - offset) / element, (end - begin) / element};
}

size_t shards_offset(const struct shoal_shards *shards, size_t parameter, size_t element)
{
    SHOAL_ASSERT(element < shards->parameters.items[parameter].count);
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    const size_t bytes = shoal_type_bytes(unit->type);
    SHOAL_ASSERT(shards->offsets[parameter] + element * bytes >= unit->shard_begin);
    SHOAL_ASSERT(shards->offsets[parameter] + element * bytes < unit->shard_begin + unit->shard_bytes);
    return shards->offsets[parameter] / bytes + element - unit->shard_begin / bytes;
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

enum shoal_status shards_refuse(const struct shoal_shards *shards, enum shoal_status status, const char *format, ...)
{
    char text[FUSION_TEXT_MAX], line[FUSION_TEXT_MAX + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(line, sizeof line, "%s, rank %d: %s", shards->name, shards->rank, text);
    return shoal_report(shards->context, status, "fusion", line);
}

/* Sends the cause to the other ranks, which may wait for this one. */
static void share_cause(const struct shoal_shards *shards)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    cause.status = shards->failed;
    cause.rank = cause.reporter = shards->rank;
    cause.is_given = 1;
    snprintf(cause.text, sizeof cause.text, "%s, rank %d: %.400s", shards->name, shards->rank, shards->failure);
    shoal_comm_fail(shards->gathers, &cause);
    shoal_comm_fail(shards->sums, &cause);
}

enum shoal_status shards_fail(struct shoal_shards *shards, enum shoal_status status, uint32_t unit, const char *what)
{
    SHOAL_ASSERT(status != SHOAL_OK && status != SHOAL_PENDING);
    char name[FUSION_TEXT_MAX];
    shards->failed = status;
    if (unit == SHOAL_SHARDS_NONE) {
        snprintf(shards->failure, sizeof shards->failure, "%s failed: %s", what, shoal_status_name(status));
    } else {
        fusion_parameter_text(&shards->parameters, shards->members[shards->units[unit].first], name, sizeof name);
        snprintf(shards->failure, sizeof shards->failure, "%s of unit %u, which begins with %.200s, failed: %s", what, unit,
                 name, shoal_status_name(status));
    }
    share_cause(shards);
    return shards_refuse(shards, status, "%.400s", shards->failure);
}

enum shoal_status shards_check(const struct shoal_shards *shards)
{
    if (!shards)
        return SHOAL_ERR_ARGUMENT;
    if (shards->failed != SHOAL_OK)
        return shards_refuse(shards, shards->failed, "%.400s; free the shards and make new ones", shards->failure);
    return SHOAL_OK;
}

enum shoal_status shards_check_between(const struct shoal_shards *shards, const char *call)
{
    FUSION_TRY(shards_check(shards));
    for (uint32_t s = 0; s < shards->options.live_units; s++)
        if (shards->slots[s].is_live)
            return shards_refuse(shards, SHOAL_ERR_STATE, "%s: unit %u is live: release it first", call, shards->slots[s].unit);
    for (size_t i = 0; i < shards->parameters.count; i++)
        if (shards->is_ready[i])
            return shards_refuse(shards, SHOAL_ERR_STATE, "%s: gradients are ready: call shoal_shards_step first", call);
    return SHOAL_OK;
}

enum shoal_status shards_wait(struct shoal_request **request)
{
    if (!*request)
        return SHOAL_OK;
    const enum shoal_status status = shoal_request_wait(*request, SHOAL_FOREVER); /* its own deadline ends it */
    shoal_request_free(*request);
    *request = NULL;
    return status;
}

static struct shoal_options shards_options(const struct shoal_shards *shards)
{
    return fusion_deadline(shards->options.timeout_ms);
}

/* ---- Gather and release -------------------------------------------------------------------------------------------------- */

/* Returns the slot that makes room, or SHARDS_NO_SLOT: an empty one, else the one whose unit was used longest ago. All ranks
 * choose alike, because they make the same calls. may_wait: a unit that is being gathered makes room if no other one does. */
static uint32_t find_unit_slot(const struct shoal_shards *shards, bool may_wait)
{
    uint32_t best = SHARDS_NO_SLOT, gathered = SHARDS_NO_SLOT;
    for (uint32_t s = 0; s < shards->options.live_units; s++) {
        const struct shards_slot *slot = &shards->slots[s];
        if (slot->request && may_wait && gathered == SHARDS_NO_SLOT)
            gathered = s;
        if (slot->is_live || slot->request)
            continue;
        if (slot->unit == SHOAL_SHARDS_NONE)
            return s;
        if (best == SHARDS_NO_SLOT || slot->used < shards->slots[best].used)
            best = s;
    }
    return best == SHARDS_NO_SLOT ? gathered : best;
}

static enum shoal_status gather_shards(const struct shoal_shards *shards, const struct shards_unit *unit,
                                       struct shards_slot *slot)
{
    const struct shoal_options options = shards_options(shards);
    const enum shoal_type type = SHOAL_TYPE_TAGGED(unit->type, 1 + (unit - shards->units) % 255); /* ranks compare units */
    if (unit->borders.counts)
        return shoal_allgatherv_post(shards->gathers, unit->own, slot->memory, unit->borders.counts, NULL, type, &options,
                                     &slot->request);
    return shoal_allgather_post(shards->gathers, unit->own, slot->memory, unit->shard_bytes / shoal_type_bytes(unit->type),
                                type, &options, &slot->request);
}

/* Begins to gather a unit that is in no slot. */
static enum shoal_status post_gather_of(struct shoal_shards *shards, uint32_t u, uint32_t s)
{
    struct shards_unit *unit = &shards->units[u];
    struct shards_slot *slot = &shards->slots[s];
    SHOAL_ASSERT(unit->slot == SHARDS_NO_SLOT && !unit->is_whole && !slot->is_live && !slot->request);
    if (slot->unit != SHOAL_SHARDS_NONE)
        shards->units[slot->unit].slot = SHARDS_NO_SLOT;
    slot->unit = u;
    unit->slot = s;
    const enum shoal_status status = gather_shards(shards, unit, slot);
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, u, "the gather");
}

static enum shoal_status no_room(const struct shoal_shards *shards, uint32_t unit)
{
    return shards_refuse(shards, SHOAL_ERR_STATE,
                         "shoal_shards_gather: no room for unit %u: %u units are live, such as unit %u: release one, or raise "
                         "live_units",
                         unit, shards->options.live_units, shards->slots[0].unit);
}

/* Waits until a slot has its unit. Does nothing if no gather is under way. */
static enum shoal_status wait_for_gather(struct shoal_shards *shards, uint32_t s)
{
    const enum shoal_status status = shards_wait(&shards->slots[s].request);
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, shards->slots[s].unit, "the gather");
}

static enum shoal_status make_live(struct shoal_shards *shards, uint32_t u)
{
    struct shards_unit *unit = &shards->units[u];
    if (unit->slot == SHARDS_NO_SLOT) {
        const uint32_t s = find_unit_slot(shards, true);
        if (s == SHARDS_NO_SLOT)
            return no_room(shards, u);
        FUSION_TRY(wait_for_gather(shards, s));
        FUSION_TRY(post_gather_of(shards, u, s));
    }
    FUSION_TRY(wait_for_gather(shards, unit->slot));
    struct shards_slot *slot = &shards->slots[unit->slot];
    SHOAL_ASSERT(slot->unit == u && !slot->request);
    slot->is_live = true;
    slot->used = ++shards->uses;
    return SHOAL_OK;
}

static void begin_next(struct shoal_shards *shards, uint32_t u, enum shoal_status *status)
{
    const bool is_needed = shards->units[u].slot == SHARDS_NO_SLOT && !shards->units[u].is_whole;
    const uint32_t s = is_needed ? find_unit_slot(shards, false) : SHARDS_NO_SLOT;
    if (s != SHARDS_NO_SLOT) /* otherwise it is here already, or has to wait for room */
        *status = post_gather_of(shards, u, s);
}

enum shoal_status shoal_shards_gather(struct shoal_shards *shards, uint32_t unit, uint32_t next)
{
    FUSION_TRY(shards_check(shards));
    if (unit >= shards->unit_count || (next != SHOAL_SHARDS_NONE && next >= shards->unit_count))
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT, "shoal_shards_gather: unit %u or %u is out of range: there are %u",
                             unit, next, shards->unit_count);
    enum shoal_status status = shards->units[unit].is_whole ? SHOAL_OK : make_live(shards, unit);
    if (status == SHOAL_OK && next != SHOAL_SHARDS_NONE)
        begin_next(shards, next, &status);
    return status;
}

static bool is_live(const struct shoal_shards *shards, const struct shards_unit *unit)
{
    return unit->slot != SHARDS_NO_SLOT && shards->slots[unit->slot].is_live;
}

const void *shoal_shards_parameter(const struct shoal_shards *shards, size_t parameter)
{
    if (!shards || parameter >= shards->parameters.count)
        return NULL;
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    if (unit->is_whole)
        return unit->own + shards->offsets[parameter];
    return is_live(shards, unit) ? shards->slots[unit->slot].memory + shards->offsets[parameter] : NULL;
}

enum shoal_status shoal_shards_release(struct shoal_shards *shards, uint32_t unit)
{
    FUSION_TRY(shards_check(shards));
    if (unit >= shards->unit_count || (!shards->units[unit].is_whole && !is_live(shards, &shards->units[unit])))
        return shards_refuse(shards, SHOAL_ERR_STATE, "shoal_shards_release: unit %u is not live", unit);
    if (!shards->units[unit].is_whole)
        shards->slots[shards->units[unit].slot].is_live = false;
    return SHOAL_OK;
}

enum shoal_status shards_forget_slots(struct shoal_shards *shards)
{
    for (uint32_t s = 0; s < shards->options.live_units; s++) {
        struct shards_slot *slot = &shards->slots[s];
        FUSION_TRY(wait_for_gather(shards, s));
        if (slot->unit != SHOAL_SHARDS_NONE)
            shards->units[slot->unit].slot = SHARDS_NO_SLOT;
        slot->unit = SHOAL_SHARDS_NONE;
    }
    return SHOAL_OK;
}

/* ---- Gradients ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status wait_for_sum(struct shoal_shards *shards, uint32_t u)
{
    const enum shoal_status status = shards_wait(&shards->units[u].sum);
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, u, "the sum");
}

enum shoal_status shards_wait_for_sums(struct shoal_shards *shards)
{
    for (uint32_t u = 0; u < shards->unit_count; u++)
        FUSION_TRY(wait_for_sum(shards, u));
    for (size_t g = 0; g < SHARDS_GRADIENTS; g++)
        shards->gradients[g].busy = SHOAL_SHARDS_NONE;
    return SHOAL_OK;
}

/* Returns memory that waits for no gradients, or SHARDS_GRADIENTS. Memory that no sum reads comes first. */
static uint32_t find_gradients(const struct shoal_shards *shards)
{
    uint32_t found = SHARDS_GRADIENTS;
    for (uint32_t g = 0; g < SHARDS_GRADIENTS; g++) {
        if (shards->gradients[g].unit != SHOAL_SHARDS_NONE)
            continue;
        if (shards->gradients[g].busy == SHOAL_SHARDS_NONE)
            return g;
        if (found == SHARDS_GRADIENTS || shards->gradients[g].posted < shards->gradients[found].posted)
            found = g;
    }
    return found;
}

/* The sum and the norm also read what is between parameters. */
static void zero_padding(const struct shoal_shards *shards, const struct shards_unit *unit, char *memory)
{
    for (uint32_t m = unit->first; m < unit->first + unit->count; m++) {
        const size_t i = shards->members[m];
        const size_t begin = shards->offsets[i] + fusion_parameter_bytes(&shards->parameters.items[i]);
        const bool is_last = m + 1 == unit->first + unit->count;
        memset(memory + begin, 0, (is_last ? unit->bytes : shards->offsets[shards->members[m + 1]]) - begin);
    }
}

static enum shoal_status open_gradients(struct shoal_shards *shards, uint32_t u)
{
    struct shards_unit *unit = &shards->units[u];
    const uint32_t g = find_gradients(shards);
    if (g == SHARDS_GRADIENTS)
        return shards_refuse(shards, SHOAL_ERR_STATE, "unit %u cannot wait for gradients: units %u and %u do already", u,
                             shards->gradients[0].unit, shards->gradients[1].unit);
    struct shards_gradients *gradients = &shards->gradients[g];
    if (gradients->busy != SHOAL_SHARDS_NONE)
        FUSION_TRY(wait_for_sum(shards, gradients->busy));
    gradients->busy = SHOAL_SHARDS_NONE;
    SHOAL_ASSERT(gradients->unit == SHOAL_SHARDS_NONE);
    gradients->unit = u;
    unit->gradient_slot = g;
    zero_padding(shards, unit, gradients->memory);
    return SHOAL_OK;
}

/* Returns the memory of a unit's gradients. */
static enum shoal_status gradients_of(struct shoal_shards *shards, uint32_t u, char **memory_out)
{
    struct shards_unit *unit = &shards->units[u];
    if (unit->is_whole && unit->missing == unit->count && unit->gradient_slot == SHARDS_NO_SLOT) {
        zero_padding(shards, unit, unit->gradient);
        unit->gradient_slot = 0; /* opened; it needs no memory of the two */
    }
    if (!unit->is_whole && unit->gradient_slot == SHARDS_NO_SLOT)
        FUSION_TRY(open_gradients(shards, u));
    *memory_out = unit->is_whole ? unit->gradient : shards->gradients[unit->gradient_slot].memory;
    return SHOAL_OK;
}

void *shoal_shards_gradient(struct shoal_shards *shards, size_t parameter)
{
    char *memory;
    if (shards_check(shards) != SHOAL_OK || parameter >= shards->parameters.count)
        return NULL;
    if (shards_unit_of(shards, parameter)->is_summed || gradients_of(shards, shards->unit_of[parameter], &memory) != SHOAL_OK)
        return NULL;
    if (!shards->is_begun[parameter]) {
        memset(memory + shards->offsets[parameter], 0, fusion_parameter_bytes(&shards->parameters.items[parameter]));
        shards->is_begun[parameter] = true;
    }
    return memory + shards->offsets[parameter];
}

/* The sum of a whole unit is on every rank, that of another one is divided into shards. gradients is NULL if it is whole. */
static enum shoal_status sum_unit(const struct shoal_shards *shards, struct shards_unit *unit, const char *gradients)
{
    const struct shoal_options options = shards_options(shards);
    const size_t count = unit->shard_bytes / shoal_type_bytes(unit->type);
    if (unit->is_whole)
        return shoal_allreduce_post(shards->sums, unit->gradient, unit->gradient, count, unit->type, shards->options.op,
                                    &options, &unit->sum);
    if (unit->borders.counts)
        return shoal_reduce_scatterv_post(shards->sums, gradients, unit->gradient, unit->borders.counts, unit->type,
                                          shards->options.op, &options, &unit->sum);
    return shoal_reduce_scatter_post(shards->sums, gradients, unit->gradient, count, unit->type, shards->options.op, &options,
                                     &unit->sum);
}

static enum shoal_status post_unit_sum(struct shoal_shards *shards, uint32_t u)
{
    struct shards_unit *unit = &shards->units[u];
    SHOAL_ASSERT(!unit->missing && !unit->is_summed && !unit->sum);
    struct shards_gradients *gradients = unit->is_whole ? NULL : &shards->gradients[unit->gradient_slot];
    const enum shoal_status status = sum_unit(shards, unit, gradients ? gradients->memory : NULL);
    if (gradients) {
        gradients->busy = u;
        gradients->posted = ++shards->uses;
        gradients->unit = SHOAL_SHARDS_NONE;
    }
    unit->gradient_slot = SHARDS_NO_SLOT;
    unit->is_summed = true;
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, u, "the sum");
}

enum shoal_status shoal_shards_ready(struct shoal_shards *shards, size_t parameter, const void *gradient, size_t count)
{
    char name[FUSION_TEXT_MAX], *memory;
    FUSION_TRY(shards_check(shards));
    if (parameter >= shards->parameters.count || count != shards->parameters.items[parameter].count || (count && !gradient))
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT,
                             "shoal_shards_ready: parameter %zu with %zu elements: it is out of range, has another length, or "
                             "gradient is NULL",
                             parameter, count);
    struct shards_unit *unit = shards_unit_of(shards, parameter);
    if (shards->is_ready[parameter])
        return shards_refuse(shards, SHOAL_ERR_STATE, "shoal_shards_ready: %s was ready in this step already",
                             fusion_parameter_text(&shards->parameters, parameter, name, sizeof name));
    FUSION_TRY(gradients_of(shards, shards->unit_of[parameter], &memory));
    char *own = memory + shards->offsets[parameter];
    if (count && gradient != own)
        memcpy(own, gradient, count * shoal_type_bytes(unit->type));
    shards->is_ready[parameter] = shards->is_begun[parameter] = true;
    SHOAL_ASSERT(unit->missing > 0);
    return --unit->missing == 0 ? post_unit_sum(shards, shards->unit_of[parameter]) : SHOAL_OK;
}

/* ---- Step ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_gradients(const struct shoal_shards *shards)
{
    char name[FUSION_TEXT_MAX];
    for (size_t i = 0; i < shards->parameters.count; i++) {
        const struct shards_unit *unit = shards_unit_of(shards, i);
        if (unit->missing == 0 || unit->missing == unit->count || shards->is_ready[i])
            continue;
        return shards_refuse(shards, SHOAL_ERR_STATE, "shoal_shards_step: %s has no gradient, but others of unit %u have one",
                             fusion_parameter_text(&shards->parameters, i, name, sizeof name), shards->unit_of[i]);
    }
    return SHOAL_OK;
}

static enum shoal_status check_step(const struct shoal_shards *shards, const struct shoal_shards_result *result_out)
{
    FUSION_TRY(shards_check(shards));
    if (result_out && !shoal_struct_bytes(result_out))
        return shards_refuse(shards, SHOAL_ERR_ARGUMENT,
                             "shoal_shards_step: result_out->struct_bytes is not set: use SHOAL_SHARDS_RESULT_INIT");
    for (uint32_t s = 0; s < shards->options.live_units; s++)
        if (shards->slots[s].is_live)
            return shards_refuse(shards, SHOAL_ERR_STATE, "shoal_shards_step: unit %u is live: release it first",
                                 shards->slots[s].unit);
    return check_gradients(shards);
}

/* Adds the squares of this rank's shards. A unit that is whole counts on rank 0 only. */
static double own_squares(const struct shoal_shards *shards)
{
    double squared = 0;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        const struct shards_unit *unit = &shards->units[u];
        if (unit->is_summed && (!unit->is_whole || shards->rank == 0))
            fusion_wide_move((struct fusion_wide){shards->context, shards->kernels}, unit->type, NULL, unit->gradient,
                             unit->shard_bytes / shoal_type_bytes(unit->type), shards->scale, false, &squared);
    }
    return squared;
}

/* Adds in the order of ranks, so that all ranks get the same bits. */
static enum shoal_status sum_squares_of_ranks(struct shoal_shards *shards, double *squared)
{
    const struct shoal_options options = shards_options(shards);
    double *all = calloc((size_t)shards->size, sizeof *all);
    if (!all)
        return shards_fail(shards, SHOAL_ERR_MEMORY, SHOAL_SHARDS_NONE, "allocating the norms of all ranks");
    const double own = own_squares(shards);
    const enum shoal_status status = shoal_allgather(shards->sums, &own, all, 1, SHOAL_FLOAT64, &options);
    SHOAL_DEFAULT_FLOATS;
    *squared = 0;
    for (int r = 0; r < shards->size; r++)
        *squared += all[r];
    free(all);
    return status == SHOAL_OK ? SHOAL_OK : shards_fail(shards, status, SHOAL_SHARDS_NONE, "the exchange of norms");
}

/* Decides by what gradients are multiplied, and whether the step is skipped. */
static void judge_step(const struct shoal_shards *shards, struct shoal_shards_result *result)
{
    SHOAL_DEFAULT_FLOATS;
    const double most = shards->options.max_norm;
    const double clip = most > 0 ? most / (fusion_square_root(result->squared) + 1e-6) : 1;
    result->clip = clip < 1 ? clip : 1; /* NaN: 1, because clipping cannot help */
    result->is_skipped = shards->options.checks_finite && result->squared - result->squared != 0;
}

/* Finds the memory for a step of this rank's part of a parameter. Returns false if this rank has none. */
static bool find_memory(const struct shoal_shards *shards, size_t parameter, struct shoal_update_memory *memory, size_t *count)
{
    SHOAL_ASSERT(shards_unit_of(shards, parameter)->is_summed);
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    const struct shards_range range = shards_range_of(shards, parameter, shards->rank);
    *count = range.count;
    if (range.count == 0)
        return false;
    const size_t offset = shards_offset(shards, parameter, range.begin), real = shards_real_bytes(unit->type);
    char *own = unit->own + offset * shoal_type_bytes(unit->type);
    *memory =
        (struct shoal_update_memory){.gradient = unit->gradient + offset * shoal_type_bytes(unit->type), .parameter = own};
    memory->to_master = unit->states[0] ? unit->states[0] + offset * real : own;
    memory->from_master = memory->to_master;
    for (size_t s = 0; s < SHOAL_UPDATE_STATES; s++) {
        memory->to[s] = unit->states[s + 1] ? unit->states[s + 1] + offset * real : NULL;
        memory->from[s] = memory->to[s];
    }
    return true;
}

static struct shoal_update shards_update(const struct shoal_shards *shards, size_t parameter, double factor)
{
    const struct shoal_optimizer_group *group = &shards->groups[shards->group_of[parameter]];
    return fusion_update_of(fusion_group_rule(shards->rule, group), group, shards->steps[parameter] + 1, factor);
}

static void step_range(struct shoal_shards *shards, size_t parameter, double factor)
{
    const enum shoal_type type = shards_unit_of(shards, parameter)->type;
    const struct shoal_optimizer_group *group = &shards->groups[shards->group_of[parameter]];
    struct shoal_update update = shards_update(shards, parameter, factor);
    struct shoal_update_memory memory;
    size_t count;
    if (shards->rule == SHOAL_LAMB)
        fusion_trust(group, &shards->norms[2 * parameter], &update);
    if (find_memory(shards, parameter, &memory, &count))
        fusion_wide_update((struct fusion_wide){shards->context, shards->kernels}, fusion_group_rule(shards->rule, group), type,
                           &update, &memory, count);
    shards->steps[parameter]++;
}

/* LAMB's first pass. A unit that is whole counts on rank 0 only. */
static enum shoal_status measure_norms(struct shoal_shards *shards, double factor)
{
    const struct shoal_options options = shards_options(shards);
    const size_t numbers = 2 * shards->parameters.count;
    double *all = shards->norms + numbers;
    memset(shards->norms, 0, numbers * sizeof *all);
    for (size_t i = 0; i < shards->parameters.count; i++) {
        const struct shards_unit *unit = shards_unit_of(shards, i);
        const struct shoal_update update = shards_update(shards, i, factor);
        struct shoal_update_memory memory;
        double squared[2] = {0, 0};
        size_t count;
        if (!unit->is_summed || !find_memory(shards, i, &memory, &count))
            continue;
        fusion_wide_moments((struct fusion_wide){shards->context, shards->kernels}, unit->type, &update, &memory, count,
                            squared);
        memcpy(&shards->norms[2 * i], squared, unit->is_whole && shards->rank > 0 ? 0 : sizeof squared);
    }
    const enum shoal_status status = shoal_allgather(shards->sums, shards->norms, all, numbers, SHOAL_FLOAT64, &options);
    if (status != SHOAL_OK)
        return shards_fail(shards, status, SHOAL_SHARDS_NONE, "the exchange of LAMB's norms");
    SHOAL_DEFAULT_FLOATS;
    memset(shards->norms, 0, numbers * sizeof *all);
    for (size_t r = 0; r < (size_t)shards->size; r++)
        for (size_t i = 0; i < numbers; i++)
            shards->norms[i] += all[r * numbers + i];
    return SHOAL_OK;
}

static void close_gradients(struct shoal_shards *shards)
{
    for (uint32_t u = 0; u < shards->unit_count; u++)
        SHOAL_ASSERT(!shards->units[u].sum); /* all sums have ended */
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        shards->units[u].missing = shards->units[u].count;
        shards->units[u].is_summed = false;
        shards->units[u].gradient_slot = SHARDS_NO_SLOT;
    }
    for (size_t g = 0; g < SHARDS_GRADIENTS; g++)
        shards->gradients[g].unit = SHOAL_SHARDS_NONE;
    memset(shards->is_ready, 0, shards->parameters.count * sizeof *shards->is_ready);
    memset(shards->is_begun, 0, shards->parameters.count * sizeof *shards->is_begun);
}

/* Writes the loss scale of the next step to the result. */
static enum shoal_status end_scale(struct shoal_shards *shards, struct shoal_shards_result *result)
{
    if (!fusion_loss_scale_end(&shards->loss, !result->is_skipped))
        return shards_fail(shards, SHOAL_ERR_STATE, SHOAL_SHARDS_NONE,
                           "reducing the loss scale, which would become 0 because gradients are not finite with any scale,");
    if (shards->loss.scale > 0)
        shards->scale = fusion_loss_scale_factor(&shards->loss);
    result->loss_scale = (double)shards->loss.scale;
    return SHOAL_OK;
}

enum shoal_status shoal_shards_step(struct shoal_shards *shards, struct shoal_shards_result *result_out)
{
    struct shoal_shards_result result = SHOAL_SHARDS_RESULT_INIT;
    FUSION_TRY(check_step(shards, result_out));
    FUSION_TRY(shards_wait_for_sums(shards));
    FUSION_TRY(shards_forget_slots(shards)); /* the shards change */
    FUSION_TRY(sum_squares_of_ranks(shards, &result.squared));
    judge_step(shards, &result);
    if (shards->rule == SHOAL_LAMB && !result.is_skipped)
        FUSION_TRY(measure_norms(shards, shards->scale * result.clip));
    for (size_t i = 0; !result.is_skipped && i < shards->parameters.count; i++)
        if (shards_unit_of(shards, i)->is_summed)
            step_range(shards, i, shards->scale * result.clip);
    close_gradients(shards);
    FUSION_TRY(end_scale(shards, &result));
    result.step = ++shards->step;
    shoal_struct_copy_out(result_out, &result, sizeof result);
    return SHOAL_OK;
}

enum shoal_status shoal_shards_drop(struct shoal_shards *shards)
{
    FUSION_TRY(shards_check(shards));
    FUSION_TRY(shards_wait_for_sums(shards));
    close_gradients(shards);
    return SHOAL_OK;
}
