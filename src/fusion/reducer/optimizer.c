#include "fusion/reducer/optimizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/layout/hash.h"
#include "fusion/layout/lists.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/reducer_memory.h"
#include "fusion/reducer/stats.h"

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

static const char *check_groups(const struct shoal_optimizer *optimizer, char *text, size_t text_bytes)
{
    for (size_t g = 0; g < optimizer->group_count; g++) {
        if (!fusion_group_is_set(&optimizer->groups[g])) {
            snprintf(text, text_bytes, "group %zu of the optimizer: struct_bytes is not set: use SHOAL_OPTIMIZER_GROUP_INIT",
                     g);
            return text;
        }
        const struct shoal_optimizer_group group = fusion_group_copy(&optimizer->groups[g]);
        const char *fault = fusion_group_fault(optimizer->rule, &group);
        if (!fault)
            continue;
        snprintf(text, text_bytes, "group %zu of the optimizer: %s", g, fault);
        return text;
    }
    return NULL;
}

static const char *check_optimizer(const struct shoal_reducer_options *options, size_t parameter_count, char *text,
                                   size_t text_bytes)
{
    const struct shoal_optimizer *optimizer = options->optimizer;
    if (!fusion_settings_are_set(optimizer))
        return "optimizer->struct_bytes is not set: use SHOAL_OPTIMIZER_INIT";
    if (optimizer->rule < SHOAL_SGD || optimizer->rule > SHOAL_LAMB)
        return "optimizer->rule is none of enum shoal_optimizer_rule";
    if (!optimizer->groups || optimizer->group_count < 1 || optimizer->group_count > SHOAL_OPTIMIZER_GROUPS_MAX)
        return "the optimizer has no groups, or more than SHOAL_OPTIMIZER_GROUPS_MAX";
    for (size_t i = 0; optimizer->group_of && i < parameter_count; i++) {
        if (optimizer->group_of[i] < optimizer->group_count)
            continue;
        snprintf(text, text_bytes, "optimizer->group_of: parameter %zu is in group %u, but there are %zu groups", i,
                 optimizer->group_of[i], optimizer->group_count);
        return text;
    }
    if (optimizer->rule == SHOAL_LAMB && optimizer->steps_early)
        return "LAMB needs the norms of whole parameters, and steps_early is set: leave it out";
    const char *fault = fusion_loss_scale_fault(optimizer, options->checks_finite);
    return fault ? fault : check_groups(optimizer, text, text_bytes);
}

const char *fusion_optimizer_check(const struct shoal_reducer_options *options, size_t parameter_count, char *text,
                                   size_t text_bytes, enum shoal_status *status_out)
{
    *status_out = SHOAL_ERR_UNSUPPORTED;
    if (options->compression != SHOAL_COMPRESS_NONE)
        return "an optimizer in the reduction receives sums in full precision: leave compression out";
    *status_out = SHOAL_ERR_ARGUMENT;
    if (options->on_buffer)
        return "on_buffer has no averages to see if the reducer steps the parameters: leave it or the optimizer out";
    return check_optimizer(options, parameter_count, text, text_bytes);
}

uint64_t fusion_optimizer_hash(const struct shoal_reducer_options *options, size_t parameter_count)
{
    const struct shoal_optimizer *optimizer = options->optimizer;
    if (!optimizer)
        return 0;
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, optimizer->group_count);
    for (size_t i = 0; i < parameter_count; i++)
        hash = fusion_hash_word(hash, optimizer->group_of ? optimizer->group_of[i] : 0);
    return hash;
}

/* ---- Do all ranks have the same settings? -------------------------------------------------------------------------------- */

static size_t settings_count(const struct fusion_optimizer *optimizer)
{
    return optimizer->group_count * FUSION_GROUP_SETTINGS;
}

/* Names the first setting that differs from rank 0's, on all ranks alike. */
static enum shoal_status compare_settings(const struct shoal_reducer *reducer, const double *all, char *text, size_t text_bytes)
{
    const size_t count = settings_count(reducer->optimizer);
    struct fusion_setting names[FUSION_GROUP_SETTINGS];
    fusion_group_list(&reducer->optimizer->groups[0], names);
    for (int r = 1; r < reducer->size; r++) {
        const double *there = all + (size_t)r * count;
        for (size_t i = 0; i < count; i++) {
            if (there[i] == all[i])
                continue;
            snprintf(text, text_bytes, "the optimizer's settings differ: %s of group %zu is %.9g on rank 0, %.9g on rank %d",
                     names[i % FUSION_GROUP_SETTINGS].name, i / FUSION_GROUP_SETTINGS, all[i], there[i], r);
            return SHOAL_ERR_MISMATCH;
        }
    }
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_agree(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return SHOAL_OK;
    const struct shoal_options options = fusion_options(reducer);
    const size_t count = settings_count(optimizer);
    double *all = calloc(count * (size_t)reducer->size, sizeof *all);
    enum shoal_status status = fusion_ranks_have_memory(reducer->comm, &options, all, text, text_bytes);
    if (status == SHOAL_OK && all) {
        double *own = all + count * (size_t)reducer->rank;
        for (size_t g = 0; g < optimizer->group_count; g++) {
            struct fusion_setting settings[FUSION_GROUP_SETTINGS];
            fusion_group_list(&optimizer->groups[g], settings);
            for (size_t i = 0; i < FUSION_GROUP_SETTINGS; i++)
                own[g * FUSION_GROUP_SETTINGS + i] = settings[i].value;
        }
        status = shoal_allgather(reducer->comm, own, all, count, SHOAL_FLOAT64, &options);
        if (status == SHOAL_OK)
            status = compare_settings(reducer, all, text, text_bytes);
    }
    free(all);
    return status;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static bool copy_settings(struct fusion_optimizer *optimizer, const struct shoal_optimizer *given, size_t parameter_count)
{
    optimizer->rule = given->rule;
    optimizer->steps_early = given->steps_early;
    optimizer->is_atomic = given->is_atomic;
    optimizer->group_count = given->group_count;
    optimizer->loss = fusion_loss_scale_begin(given);
    optimizer->scale = optimizer->loss.scale > 0 ? fusion_loss_scale_factor(&optimizer->loss) : 1;
    optimizer->groups = calloc(given->group_count, sizeof *optimizer->groups);
    optimizer->group_of = calloc(parameter_count + 1, sizeof *optimizer->group_of);
    optimizer->steps = calloc(parameter_count + 1, sizeof *optimizer->steps);
    if (!optimizer->groups || !optimizer->group_of || !optimizer->steps)
        return false;
    for (size_t g = 0; g < given->group_count; g++)
        optimizer->groups[g] = fusion_group_copy(&given->groups[g]);
    if (given->group_of && parameter_count > 0)
        memcpy(optimizer->group_of, given->group_of, parameter_count * sizeof *optimizer->group_of);
    return true;
}

/* Returns the states that a buffer needs besides masters: the most of any of its parameters. */
static size_t states_of(const struct shoal_reducer *reducer, size_t buffer)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    size_t states = 0;
    for (uint32_t i = 0; i < found->count; i++) {
        const uint32_t group = optimizer->group_of[reducer->layout->order[found->first + i]];
        states = fusion_max(states, fusion_rule_states(fusion_group_rule(optimizer->rule, &optimizer->groups[group])));
    }
    return states;
}

/* Hands out memory, or only counts it if there is none yet. */
static char *take_memory(char *memory, size_t bytes, size_t *used)
{
    char *at = memory ? memory + *used : NULL;
    *used += fusion_round_up(bytes, FUSION_ALIGNMENT);
    return at;
}

/* Returns the bytes of all shards. */
static size_t place_shards(struct shoal_reducer *reducer, char *memory)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const bool has_next = optimizer->steps_early || optimizer->is_atomic;
    size_t used = 0;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        struct fusion_shard *shard = &optimizer->shards[b];
        const enum shoal_type type = reducer->layout->buffers[b].type;
        const size_t bytes = fusion_shard_bytes(reducer, b), states = states_of(reducer, b);
        SHOAL_ASSERT(states <= SHOAL_UPDATE_STATES);
        for (size_t s = fusion_has_master(optimizer, type) ? 0 : 1; s <= states; s++) {
            const size_t all = bytes / shoal_type_bytes(type) * fusion_real_bytes(type);
            shard->states[s] = take_memory(memory, all, &used);
            shard->next[s] = has_next ? take_memory(memory, all, &used) : NULL;
        }
        shard->kept = optimizer->steps_early ? take_memory(memory, bytes, &used) : NULL;
    }
    return used;
}

static void set_initial(struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    const double initial = reducer->optimizer->groups[reducer->optimizer->group_of[parameter]].initial;
    const bool is_wide = fusion_parameter(reducer, parameter)->type == SHOAL_FLOAT64;
    char *first = fusion_shard_of(reducer, parameter)->states[SHOAL_STATE_FIRST];
    for (size_t i = 0; i < range.count; i++) {
        void *at = fusion_state_at(reducer, parameter, first, range.begin + i);
        if (is_wide)
            *(double *)at = initial;
        else
            *(float *)at = (float)initial;
    }
}

static enum shoal_status allocate_memory(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    void *parameters;
    optimizer->bytes = place_shards(reducer, NULL);
    FUSION_TRY(fusion_allocate(reducer, reducer->layout->bytes + FUSION_ALIGNMENT, &parameters));
    optimizer->parameters = parameters;
    optimizer->memory = aligned_alloc(FUSION_ALIGNMENT, optimizer->bytes + FUSION_ALIGNMENT);
    if (!optimizer->memory)
        return SHOAL_ERR_MEMORY;
    memset(optimizer->memory, 0, optimizer->bytes);
    const size_t placed = place_shards(reducer, optimizer->memory);
    SHOAL_ASSERT(placed == optimizer->bytes);
    for (size_t i = 0; optimizer->rule == SHOAL_ADAGRAD && i < reducer->layout->parameters.count; i++)
        set_initial(reducer, i);
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_create(struct shoal_reducer *reducer)
{
    const struct shoal_gradient_layout *layout = reducer->layout;
    if (!reducer->options.optimizer)
        return SHOAL_OK;
    struct fusion_optimizer *optimizer = reducer->optimizer = calloc(1, sizeof *optimizer);
    if (!optimizer)
        return SHOAL_ERR_MEMORY;
    optimizer->shards = calloc(layout->buffer_count + 1, sizeof *optimizer->shards);
    if (!optimizer->shards || !copy_settings(optimizer, reducer->options.optimizer, layout->parameters.count))
        return SHOAL_ERR_MEMORY;
    optimizer->steps_early &= fusion_optimizer_awaits_verdict(reducer);
    optimizer->degree = fusion_optimizer_degree(reducer);
    optimizer->place = fusion_optimizer_place(reducer);
    SHOAL_ASSERT(optimizer->degree > 0 && reducer->size % optimizer->degree == 0);
    SHOAL_ASSERT(optimizer->place >= 0 && optimizer->place < optimizer->degree);
    if (optimizer->rule == SHOAL_LAMB) {
        const size_t ranks = 1 + (size_t)optimizer->degree;
        optimizer->norms = calloc(2 * ranks * (layout->parameters.count + 1), sizeof *optimizer->norms);
        if (!optimizer->norms)
            return SHOAL_ERR_MEMORY;
    }
    for (size_t b = 0; b < layout->buffer_count; b++)
        optimizer->shards[b].reducer = reducer;
    FUSION_TRY(fusion_optimizer_cut(reducer));
    return allocate_memory(reducer);
}

void fusion_optimizer_destroy(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return;
    if (optimizer->shards) {
        fusion_optimizer_reset(reducer);
        fusion_optimizer_forget_borders(reducer);
    }
    fusion_free_memory(reducer, optimizer->parameters);
    free(optimizer->memory);
    free(optimizer->shards);
    free(optimizer->groups);
    free(optimizer->group_of);
    free(optimizer->steps);
    free(optimizer->norms);
    free(optimizer);
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

bool fusion_optimizer_awaits_verdict(const struct shoal_reducer *reducer)
{
    return reducer->optimizer &&
           (reducer->options.max_norm > 0 || reducer->options.checks_finite || reducer->optimizer->rule == SHOAL_LAMB);
}

bool fusion_steps_late(const struct shoal_reducer *reducer)
{
    return fusion_optimizer_awaits_verdict(reducer) && !reducer->optimizer->steps_early;
}

bool fusion_steps_early(const struct shoal_reducer *reducer)
{
    return fusion_optimizer_awaits_verdict(reducer) && reducer->optimizer->steps_early;
}

void fusion_optimizer_reset(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        struct fusion_shard *shard = &optimizer->shards[b];
        shoal_request_free(shard->scatter);
        shoal_request_free(shard->across);
        shoal_request_free(shard->gather);
        shard->scatter = shard->across = shard->gather = NULL;
        shard->is_scattered = shard->is_gathered = false;
    }
    optimizer->posted = optimizer->gathered = optimizer->next_across = 0;
}

double fusion_optimizer_squares(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    double squared = 0;
    for (uint32_t i = 0; i < found->count; i++) {
        const uint32_t parameter = reducer->layout->order[found->first + i];
        const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
        const char *gradient = fusion_view(reducer, parameter) + range.begin * shoal_type_bytes(found->type);
        if (range.count > 0 && fusion_marks_use(reducer, parameter))
            fusion_wide_move(fusion_wide(reducer), found->type, NULL, gradient, range.count, factor * reducer->optimizer->scale,
                             false, &squared);
    }
    return squared;
}

double fusion_optimizer_square_scale(const struct shoal_reducer *reducer)
{
    return reducer->optimizer ? reducer->optimizer->scale * reducer->optimizer->scale : 1;
}

/* Adds the shards of this rank's team in their order, so that all ranks get the same bits. */
enum shoal_status fusion_optimizer_sum_squares(struct shoal_reducer *reducer, double *squared)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_options options = fusion_options(reducer);
    double *all = calloc((size_t)optimizer->degree, sizeof *all);
    if (!all)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for the norms of %d ranks", optimizer->degree);
    const enum shoal_status status =
        shoal_allgather(optimizer->comms[FUSION_SCATTER], squared, all, 1, SHOAL_FLOAT64, &options);
    *squared = 0;
    for (int i = 0; i < optimizer->degree; i++)
        *squared += all[i];
    free(all);
    if (status != SHOAL_OK)
        fusion_operation_failed(reducer, status, -1);
    return status == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

/* Returns the memory that a step of this rank's part of a parameter reads and writes. */
static struct shoal_update_memory memory_of(const struct shoal_reducer *reducer, size_t parameter,
                                            const struct fusion_range *range)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct fusion_shard *shard = fusion_shard_of(reducer, parameter);
    const size_t unit = shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
    SHOAL_ASSERT(range->begin + range->count <= fusion_parameter(reducer, parameter)->count);
    char *view = fusion_view(reducer, parameter) + range->begin * unit;
    char *own = fusion_parameter_at(reducer, parameter) + range->begin * unit;
    struct shoal_update_memory memory = {.gradient = view, .parameter = optimizer->is_atomic ? view : own};
    char *from[FUSION_STATES], *to[FUSION_STATES];
    for (size_t s = 0; s < FUSION_STATES; s++) {
        from[s] = fusion_state_at(reducer, parameter, shard->states[s], range->begin);
        to[s] = shard->next[s] ? fusion_state_at(reducer, parameter, shard->next[s], range->begin) : from[s];
    }
    if (shard->kept)
        memory.gradient = shard->kept + fusion_shard_offset(reducer, parameter, range->begin) * unit;
    memory.from_master = from[0] ? from[0] : own;
    memory.to_master = to[0] ? to[0] : own;
    for (size_t s = 0; s < SHOAL_UPDATE_STATES; s++) {
        memory.from[s] = from[s + 1];
        memory.to[s] = to[s + 1];
    }
    return memory;
}

static struct shoal_update update_of(const struct shoal_reducer *reducer, size_t parameter, double factor)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[parameter]];
    return fusion_update_of(fusion_group_rule(optimizer->rule, group), group, optimizer->steps[parameter] + 1,
                            factor * optimizer->scale);
}

static void step_parameter(struct shoal_reducer *reducer, size_t parameter, double factor)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[parameter]];
    const struct fusion_range range = fusion_range_of(reducer, parameter, optimizer->place);
    if (range.count == 0)
        return;
    struct shoal_update update = update_of(reducer, parameter, factor);
    struct shoal_update_memory memory = memory_of(reducer, parameter, &range);
    if (optimizer->norms)
        fusion_trust(group, &optimizer->norms[2 * parameter], &update);
    for (size_t s = 0; optimizer->norms && s < SHOAL_UPDATE_STATES; s++)
        memory.from[s] = memory.to[s]; /* the first pass has written them */
    fusion_wide_update(fusion_wide(reducer), fusion_group_rule(optimizer->rule, group),
                       fusion_parameter(reducer, parameter)->type, &update, &memory, range.count);
}

/* Adds up the parts of all ranks of the team in their order, so that all teams get the same bits. */
static enum shoal_status exchange_norms(struct shoal_reducer *reducer, double *all)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_options options = fusion_options(reducer);
    const size_t count = 2 * reducer->layout->parameters.count;
    const enum shoal_status status =
        shoal_allgather(optimizer->comms[FUSION_SCATTER], optimizer->norms, all, count, SHOAL_FLOAT64, &options);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return fusion_failure_status(reducer);
    }
    SHOAL_DEFAULT_FLOATS;
    memset(optimizer->norms, 0, count * sizeof *optimizer->norms);
    for (size_t r = 0; r < (size_t)optimizer->degree; r++)
        for (size_t i = 0; i < count; i++)
            optimizer->norms[i] += all[r * count + i];
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_measure(struct shoal_reducer *reducer, double factor)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    const size_t count = reducer->layout->parameters.count;
    if (!optimizer->norms)
        return SHOAL_OK;
    memset(optimizer->norms, 0, 2 * count * sizeof *optimizer->norms);
    for (size_t i = 0; i < count; i++) {
        const struct fusion_range range = fusion_range_of(reducer, i, optimizer->place);
        if (range.count == 0 || !fusion_marks_use(reducer, i))
            continue;
        const struct shoal_update update = update_of(reducer, i, factor);
        const struct shoal_update_memory memory = memory_of(reducer, i, &range);
        fusion_wide_moments(fusion_wide(reducer), fusion_parameter(reducer, i)->type, &update, &memory, range.count,
                            &optimizer->norms[2 * i]);
    }
    return exchange_norms(reducer, optimizer->norms + 2 * count);
}

/* The next states of a parameter that this step leaves alone. */
static void carry_states(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_shard *shard = fusion_shard_of(reducer, parameter);
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    const size_t bytes = range.count * fusion_real_bytes(fusion_parameter(reducer, parameter)->type);
    for (size_t s = 0; s < FUSION_STATES && range.count > 0; s++) {
        if (shard->next[s])
            memcpy(fusion_state_at(reducer, parameter, shard->next[s], range.begin),
                   fusion_state_at(reducer, parameter, shard->states[s], range.begin), bytes);
    }
}

static void gather_done(void *arg, enum shoal_status status)
{
    struct fusion_shard *shard = arg;
    struct shoal_reducer *reducer = shard->reducer;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, shard - reducer->optimizer->shards);
        return;
    }
    fusion_lock(reducer);
    shard->is_gathered = true;
    reducer->optimizer->gathered++;
    SHOAL_ASSERT(reducer->optimizer->gathered <= reducer->optimizer->posted);
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

static enum shoal_status post_gather(struct shoal_reducer *reducer, size_t buffer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    struct fusion_shard *shard = &optimizer->shards[buffer];
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    char *parameters = optimizer->is_atomic ? fusion_buffer_memory(reducer, buffer) : optimizer->parameters + found->begin;
    struct shoal_request *request;
    fusion_lock(reducer);
    optimizer->posted++;
    SHOAL_ASSERT(!shard->gather || shard->is_gathered);
    shoal_request_free(shard->gather); /* of a first attempt, which is done */
    shard->gather = NULL;
    shard->is_gathered = false;
    fusion_unlock(reducer);
    const enum shoal_status status = fusion_shard_gather(reducer, buffer, parameters, &request);
    if (status != SHOAL_OK) {
        fusion_operation_not_posted(reducer, status, (long)buffer);
        return status;
    }
    fusion_lock(reducer);
    shard->gather = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, gather_done, shard);
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_step(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    for (uint32_t i = 0; i < found->count; i++) {
        const uint32_t parameter = reducer->layout->order[found->first + i];
        if (fusion_marks_use(reducer, parameter))
            step_parameter(reducer, parameter, factor);
        else
            carry_states(reducer, parameter);
    }
    return post_gather(reducer, buffer);
}

void fusion_optimizer_keep(struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_steps_early(reducer) && reducer->optimizer->shards[buffer].kept);
    const char *own = fusion_buffer_memory(reducer, buffer) + fusion_shard_begin(reducer, buffer);
    memcpy(reducer->optimizer->shards[buffer].kept, own, fusion_shard_bytes(reducer, buffer));
}

/* The parameter's own part as before the step, from its master. */
static void undo_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    const struct fusion_range range = fusion_range_of(reducer, parameter, reducer->optimizer->place);
    if (range.count == 0)
        return;
    char *own = fusion_parameter_at(reducer, parameter) + range.begin * shoal_type_bytes(type);
    const char *master =
        fusion_state_at(reducer, parameter, fusion_shard_of(reducer, parameter)->states[SHOAL_STATE_MASTER], range.begin);
    SHOAL_ASSERT(master); /* what may be undone has one */
    if (type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64)
        memcpy(own, master, range.count * shoal_type_bytes(type));
    else
        (type == SHOAL_FLOAT16 ? reducer->kernels->to_float16 : reducer->kernels->to_bfloat16)(
            (uint16_t *)(void *)own, (const float *)(const void *)master, range.count, 1);
}

enum shoal_status fusion_optimizer_undo(struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_steps_early(reducer));
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    if (reducer->optimizer->is_atomic)
        return SHOAL_OK; /* no parameter has changed */
    for (uint32_t i = 0; i < found->count; i++)
        undo_parameter(reducer, reducer->layout->order[found->first + i]);
    return post_gather(reducer, buffer);
}

static void exchange_states(struct fusion_shard *shard)
{
    for (size_t s = 0; s < FUSION_STATES; s++) {
        char *before = shard->states[s];
        if (!shard->next[s])
            continue;
        SHOAL_ASSERT(before);
        shard->states[s] = shard->next[s];
        shard->next[s] = before;
    }
}

void fusion_optimizer_commit(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    SHOAL_ASSERT(optimizer->gathered == optimizer->posted);
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        const size_t bytes = fusion_parameter_bytes(fusion_parameter(reducer, i));
        if (!fusion_marks_use(reducer, i))
            continue;
        optimizer->steps[i]++;
        if (optimizer->is_atomic && bytes > 0)
            memcpy(fusion_parameter_at(reducer, i), fusion_view(reducer, i), bytes);
    }
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        exchange_states(&optimizer->shards[b]);
}

enum shoal_status fusion_optimizer_rescale(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer || optimizer->loss.scale == 0)
        return SHOAL_OK;
    if (!fusion_loss_scale_end(&optimizer->loss, !result->is_skipped))
        return fusion_fail(reducer, SHOAL_ERR_STATE, result->nonfinite_parameter,
                           "the loss scale would become 0 after %g: gradients are not finite with any scale, so look for the "
                           "cause in the model or its data",
                           (double)optimizer->loss.scale);
    SHOAL_ASSERT(optimizer->loss.scale > 0);
    optimizer->scale = fusion_loss_scale_factor(&optimizer->loss);
    result->loss_scale = (double)optimizer->loss.scale;
    return SHOAL_OK;
}

bool fusion_optimizer_is_done(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return !reducer->optimizer || reducer->optimizer->gathered == reducer->optimizer->posted;
}

struct shoal_request *fusion_optimizer_request(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    for (size_t b = 0; reducer->optimizer && b < reducer->layout->buffer_count; b++) {
        const struct fusion_shard *shard = &reducer->optimizer->shards[b];
        if (shard->gather && !shard->is_gathered)
            return shard->gather;
    }
    return NULL;
}
