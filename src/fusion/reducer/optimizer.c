#include "fusion/reducer/optimizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/layout/hash.h"
#include "fusion/layout/lists.h"
#include "fusion/optimizer/optimizer_group.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"

#define STATES (1 + SHOAL_UPDATE_STATES) /* the master is number 0 */

/* A buffer: the states of this rank's slice, and the gather of its parameters. */
struct slice {
    struct shoal_reducer *reducer; /* for the callback */
    char *states[STATES];          /* one value for each element; NULL if the buffer has no such state */
    struct shoal_request *gather;  /* lock */
    bool is_gathered;              /* lock */
};

struct fusion_optimizer {
    enum shoal_optimizer_rule rule;
    struct shoal_optimizer_group *groups;
    size_t group_count;
    uint32_t *group_of; /* [parameters] */
    uint64_t *steps;    /* [parameters] */
    struct shoal_comm *comm;
    char *parameters; /* of all buffers, laid out as the gradients are */
    char *memory;     /* of all states */
    size_t bytes;     /* of all states */
    double scale;
    struct slice *slices;    /* [buffers] */
    size_t posted, gathered; /* lock: buffers in this step */
};

/* ---- Slices -------------------------------------------------------------------------------------------------------------- */

/* Elements [begin, begin + count) of a parameter. */
struct range {
    size_t begin, count;
};

static size_t own_bytes(const struct shoal_reducer *reducer, size_t buffer)
{
    return reducer->layout->buffers[buffer].bytes / (size_t)reducer->size;
}

/* Returns the elements of a parameter in a rank's slice of its buffer. */
static struct range range_of(const struct shoal_reducer *reducer, size_t parameter, int rank)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    const size_t unit = shoal_type_bytes(each->type), bytes = own_bytes(reducer, place->buffer);
    const size_t slice_begin = bytes * (size_t)rank, slice_end = slice_begin + bytes;
    const size_t begin = fusion_max(slice_begin, place->offset);
    const size_t end = fusion_min(slice_end, place->offset + each->count * unit);
    if (begin >= end)
        return (struct range){0, 0};
    return (struct range){(begin - place->offset) / unit, (end - begin) / unit};
}

static size_t real_bytes(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float);
}

/* A 16-bit parameter is rounded, so its exact value is kept as well. */
static bool has_master(enum shoal_type type)
{
    return type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
}

/* Returns the address of an element of this rank's slice in an array of states. */
static char *state_at(const struct shoal_reducer *reducer, size_t parameter, int state, size_t element)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    char *states = reducer->optimizer->slices[place->buffer].states[state];
    const size_t begin = own_bytes(reducer, place->buffer) * (size_t)reducer->rank / shoal_type_bytes(type);
    return states ? states + (place->offset / shoal_type_bytes(type) + element - begin) * real_bytes(type) : NULL;
}

static char *parameter_at(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    return reducer->optimizer->parameters + reducer->layout->buffers[place->buffer].begin + place->offset;
}

/* ---- Checks -------------------------------------------------------------------------------------------------------------- */

static const char *check_groups(const struct shoal_optimizer *optimizer, char *text, size_t text_bytes)
{
    for (size_t g = 0; g < optimizer->group_count; g++) {
        if (optimizer->groups[g].struct_bytes < offsetof(struct shoal_optimizer_group, is_nesterov)) {
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

static const char *check_optimizer(const struct shoal_optimizer *optimizer, size_t parameter_count, char *text,
                                   size_t text_bytes)
{
    if (optimizer->struct_bytes < sizeof *optimizer)
        return "optimizer->struct_bytes is not set: use SHOAL_OPTIMIZER_INIT";
    if (optimizer->rule < SHOAL_SGD || optimizer->rule > SHOAL_LION)
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
    return check_groups(optimizer, text, text_bytes);
}

const char *fusion_optimizer_check(const struct shoal_reducer_options *options, size_t parameter_count, char *text,
                                   size_t text_bytes, enum shoal_status *status_out)
{
    *status_out = SHOAL_ERR_UNSUPPORTED;
    if (options->is_on_device)
        return "an optimizer in the reduction steps parameters in host memory, and is_on_device is set: leave one of them out";
    if (options->compression != SHOAL_COMPRESS_NONE)
        return "an optimizer in the reduction receives sums in full precision: leave compression out";
    *status_out = SHOAL_ERR_ARGUMENT;
    if (options->on_buffer)
        return "on_buffer has no averages to see if the reducer steps the parameters: leave it or the optimizer out";
    return check_optimizer(options->optimizer, parameter_count, text, text_bytes);
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
    optimizer->group_count = given->group_count;
    optimizer->scale = 1;
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

/* Places the states of all slices in memory, or only counts their bytes if memory is NULL. */
static size_t place_states(struct shoal_reducer *reducer, char *memory)
{
    size_t used = 0;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const enum shoal_type type = reducer->layout->buffers[b].type;
        const size_t bytes = own_bytes(reducer, b) / shoal_type_bytes(type) * real_bytes(type);
        const size_t states = states_of(reducer, b);
        for (size_t s = 0; s < STATES; s++) {
            if (s == 0 ? !has_master(type) : s > states)
                continue;
            reducer->optimizer->slices[b].states[s] = memory ? memory + used : NULL;
            used += bytes; /* a multiple of 64, because slices are */
        }
    }
    return used;
}

static void set_initial(struct shoal_reducer *reducer, size_t parameter)
{
    const struct range range = range_of(reducer, parameter, reducer->rank);
    const double initial = reducer->optimizer->groups[reducer->optimizer->group_of[parameter]].initial;
    const bool is_wide = fusion_parameter(reducer, parameter)->type == SHOAL_FLOAT64;
    for (size_t i = 0; i < range.count; i++) {
        void *at = state_at(reducer, parameter, SHOAL_STATE_FIRST, range.begin + i);
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
    optimizer->bytes = place_states(reducer, NULL);
    FUSION_TRY(fusion_allocate(reducer, reducer->layout->bytes + FUSION_ALIGNMENT, &parameters));
    optimizer->parameters = parameters;
    optimizer->memory = aligned_alloc(FUSION_ALIGNMENT, optimizer->bytes + FUSION_ALIGNMENT);
    if (!optimizer->memory)
        return SHOAL_ERR_MEMORY;
    memset(optimizer->memory, 0, optimizer->bytes);
    (void)place_states(reducer, optimizer->memory);
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
    optimizer->slices = calloc(layout->buffer_count + 1, sizeof *optimizer->slices);
    if (!optimizer->slices || !copy_settings(optimizer, reducer->options.optimizer, layout->parameters.count))
        return SHOAL_ERR_MEMORY;
    for (size_t b = 0; b < layout->buffer_count; b++)
        optimizer->slices[b].reducer = reducer;
    return allocate_memory(reducer);
}

enum shoal_status fusion_optimizer_open(struct shoal_reducer *reducer)
{
    if (!reducer->optimizer)
        return SHOAL_OK;
    return fusion_split(reducer, reducer->comm, ".parameters", 0, reducer->rank, &reducer->optimizer->comm);
}

void fusion_optimizer_stop(struct shoal_reducer *reducer)
{
    if (reducer->optimizer)
        shoal_comm_free(reducer->optimizer->comm);
}

void fusion_optimizer_destroy(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return;
    if (optimizer->slices)
        fusion_optimizer_reset(reducer);
    fusion_free_memory(reducer, optimizer->parameters);
    free(optimizer->memory);
    free(optimizer->slices);
    free(optimizer->groups);
    free(optimizer->group_of);
    free(optimizer->steps);
    free(optimizer);
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

bool fusion_steps_late(const struct shoal_reducer *reducer)
{
    return reducer->optimizer && (reducer->options.max_norm > 0 || reducer->options.checks_finite);
}

void fusion_optimizer_reset(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        shoal_request_free(optimizer->slices[b].gather);
        optimizer->slices[b].gather = NULL;
        optimizer->slices[b].is_gathered = false;
    }
    optimizer->posted = optimizer->gathered = 0;
}

double fusion_optimizer_squares(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    double squared = 0;
    for (uint32_t i = 0; i < found->count; i++) {
        const uint32_t parameter = reducer->layout->order[found->first + i];
        const struct range range = range_of(reducer, parameter, reducer->rank);
        const char *gradient = fusion_view(reducer, parameter) + range.begin * shoal_type_bytes(found->type);
        if (range.count > 0 && fusion_marks_use(reducer, parameter))
            reducer->kernels->move[found->type](NULL, gradient, range.count, factor * reducer->optimizer->scale, false,
                                                &squared);
    }
    return squared;
}

/* Adds in the order of ranks, so that all ranks get the same bits. */
enum shoal_status fusion_optimizer_sum_squares(struct shoal_reducer *reducer, double *squared)
{
    const struct shoal_options options = fusion_options(reducer);
    double *all = calloc((size_t)reducer->size, sizeof *all);
    if (!all)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for the norms of %d ranks", reducer->size);
    const enum shoal_status status = shoal_allgather(reducer->comm, squared, all, 1, SHOAL_FLOAT64, &options);
    *squared = 0;
    for (int r = 0; r < reducer->size; r++)
        *squared += all[r];
    free(all);
    if (status != SHOAL_OK)
        fusion_operation_failed(reducer, status, -1);
    return status == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

static void step_parameter(struct shoal_reducer *reducer, size_t parameter, double factor)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[parameter]];
    const enum shoal_rule rule = fusion_group_rule(optimizer->rule, group);
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    const struct range range = range_of(reducer, parameter, reducer->rank);
    const struct shoal_update update = fusion_update_of(rule, group, ++optimizer->steps[parameter], factor * optimizer->scale);
    if (range.count == 0)
        return;
    char *own = parameter_at(reducer, parameter) + range.begin * shoal_type_bytes(type);
    char *master = has_master(type) ? state_at(reducer, parameter, SHOAL_STATE_MASTER, range.begin) : own;
    char *first = state_at(reducer, parameter, SHOAL_STATE_FIRST, range.begin);
    char *second = state_at(reducer, parameter, SHOAL_STATE_SECOND, range.begin);
    const struct shoal_update_memory memory = {fusion_view(reducer, parameter) + range.begin * shoal_type_bytes(type),
                                               master,
                                               {first, second},
                                               master,
                                               {first, second},
                                               own};
    reducer->kernels->update[rule][type](&update, &memory, range.count);
}

static void gather_done(void *arg, enum shoal_status status)
{
    struct slice *slice = arg;
    struct shoal_reducer *reducer = slice->reducer;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, slice - reducer->optimizer->slices);
        return;
    }
    fusion_lock(reducer);
    slice->is_gathered = true;
    reducer->optimizer->gathered++;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

static enum shoal_status post_gather(struct shoal_reducer *reducer, size_t buffer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    struct slice *slice = &optimizer->slices[buffer];
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    const struct shoal_options options = fusion_options(reducer);
    char *parameters = optimizer->parameters + found->begin;
    const size_t bytes = own_bytes(reducer, buffer);
    struct shoal_request *request;
    fusion_lock(reducer);
    optimizer->posted++;
    fusion_unlock(reducer);
    const enum shoal_status status =
        shoal_allgather_post(optimizer->comm, parameters + bytes * (size_t)reducer->rank, parameters,
                             bytes / shoal_type_bytes(found->type), found->type, &options, &request);
    if (status != SHOAL_OK) {
        fusion_operation_not_posted(reducer, status, (long)buffer);
        return status;
    }
    fusion_lock(reducer);
    slice->gather = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, gather_done, slice);
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_step(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    for (uint32_t i = 0; i < found->count; i++) {
        const uint32_t parameter = reducer->layout->order[found->first + i];
        if (fusion_marks_use(reducer, parameter))
            step_parameter(reducer, parameter, factor);
    }
    return post_gather(reducer, buffer);
}

bool fusion_optimizer_is_done(const struct shoal_reducer *reducer)
{
    return !reducer->optimizer || reducer->optimizer->gathered == reducer->optimizer->posted;
}

struct shoal_request *fusion_optimizer_request(const struct shoal_reducer *reducer)
{
    for (size_t b = 0; reducer->optimizer && b < reducer->layout->buffer_count; b++) {
        const struct slice *slice = &reducer->optimizer->slices[b];
        if (slice->gather && !slice->is_gathered)
            return slice->gather;
    }
    return NULL;
}

/* ---- The communicator of the gathers ------------------------------------------------------------------------------------- */

void fusion_optimizer_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    if (reducer->optimizer && reducer->optimizer->comm)
        shoal_comm_fail(reducer->optimizer->comm, cause);
}

bool fusion_optimizer_failure(const struct shoal_reducer *reducer, struct shoal_failure *cause_out)
{
    return reducer->optimizer && reducer->optimizer->comm &&
           shoal_last_failure(reducer->context, reducer->optimizer->comm, cause_out) == SHOAL_OK;
}

uint64_t fusion_optimizer_wire_bytes(const struct shoal_reducer *reducer)
{
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    if (!reducer->optimizer || shoal_comm_traffic(reducer->optimizer->comm, &traffic) != SHOAL_OK)
        return 0;
    return traffic.sent_bytes;
}

enum shoal_status fusion_optimizer_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes)
{
    return reducer->optimizer ? fusion_add_sent_to(reducer->optimizer->comm, NULL, bytes) : SHOAL_OK;
}

/* ---- Public: parameters and settings ------------------------------------------------------------------------------------- */

static enum shoal_status check_optimizer_call(const struct shoal_reducer *reducer, const char *call)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status((struct shoal_reducer *)(uintptr_t)reducer);
    if (!reducer->optimizer)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the reducer has no optimizer (options.optimizer)", call);
    if (fusion_marks_are_open(reducer))
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: a step is open: call it before begin or after finish", call);
    return SHOAL_OK;
}

void *shoal_reducer_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || !reducer->optimizer || parameter >= reducer->layout->parameters.count)
        return NULL;
    return parameter_at(reducer, parameter);
}

enum shoal_status shoal_reducer_load_parameters(struct shoal_reducer *reducer)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_load_parameters"));
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        const enum shoal_type type = fusion_parameter(reducer, i)->type;
        const struct range range = range_of(reducer, i, reducer->rank);
        if (!has_master(type) || range.count == 0)
            continue;
        float *master = (float *)(void *)state_at(reducer, i, SHOAL_STATE_MASTER, range.begin);
        const uint16_t *own = (const uint16_t *)(const void *)parameter_at(reducer, i) + range.begin;
        (type == SHOAL_FLOAT16 ? reducer->kernels->from_float16 : reducer->kernels->from_bfloat16)(master, own, range.count, 1);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_set_group(struct shoal_reducer *reducer, size_t group,
                                          const struct shoal_optimizer_group *settings)
{
    static const char call[] = "shoal_reducer_set_group";
    FUSION_TRY(check_optimizer_call(reducer, call));
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (group >= optimizer->group_count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: group %zu is out of range: there are %zu groups", call, group,
                             optimizer->group_count);
    if (!settings || settings->struct_bytes < offsetof(struct shoal_optimizer_group, is_nesterov))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "%s: settings->struct_bytes is not set: use SHOAL_OPTIMIZER_GROUP_INIT", call);
    const struct shoal_optimizer_group copy = fusion_group_copy(settings);
    const char *fault = fusion_group_fault(optimizer->rule, &copy);
    if (fault)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: group %zu: %s", call, group, fault);
    if (fusion_group_rule(optimizer->rule, &copy) != fusion_group_rule(optimizer->rule, &optimizer->groups[group]))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "%s: group %zu: the momentum (beta1) may not become zero, or stop being zero", call, group);
    optimizer->groups[group] = copy;
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_set_gradient_scale(struct shoal_reducer *reducer, double scale)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_set_gradient_scale"));
    if (!(scale > 0) || scale - scale != 0)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_set_gradient_scale: %g is not a positive number",
                             scale);
    reducer->optimizer->scale = scale;
    return SHOAL_OK;
}

/* ---- Public: states ------------------------------------------------------------------------------------------------------ */

size_t shoal_reducer_optimizer_bytes(const struct shoal_reducer *reducer)
{
    return reducer && reducer->optimizer ? reducer->optimizer->bytes : 0;
}

static enum shoal_status check_state(const struct shoal_reducer *reducer, const char *call, size_t parameter,
                                     enum shoal_optimizer_state state, const void *values)
{
    char name[FUSION_TEXT_MAX];
    FUSION_TRY(check_optimizer_call(reducer, call));
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    if (parameter >= reducer->layout->parameters.count || !values)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: values is NULL, or parameter %zu is out of range: there are %zu",
                             call, parameter, reducer->layout->parameters.count);
    const struct shoal_optimizer_group *group = &optimizer->groups[optimizer->group_of[parameter]];
    const size_t states = fusion_rule_states(fusion_group_rule(optimizer->rule, group));
    if ((unsigned)state <= states)
        return SHOAL_OK;
    fusion_parameter_text(&reducer->layout->parameters, parameter, name, sizeof name);
    return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: %.200s has no state %d: it has 0 (the master) to %zu", call, name,
                         (int)state, states);
}

/* Returns the memory of this rank's range: in the states, or for a master that does not exist, in the parameter. */
static char *values_at(const struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                       const struct range *range)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    if (state == SHOAL_STATE_MASTER && !has_master(type))
        return parameter_at(reducer, parameter) + range->begin * shoal_type_bytes(type);
    return state_at(reducer, parameter, (int)state, range->begin);
}

/* All ranks' ranges, which follow each other. */
static enum shoal_status gather_values(struct shoal_reducer *reducer, size_t parameter, const char *own, char *values)
{
    const struct shoal_options options = fusion_options(reducer);
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    size_t *counts = calloc((size_t)reducer->size, sizeof *counts);
    if (!counts)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, (long)parameter, "no memory for the counts of %d ranks", reducer->size);
    for (int r = 0; r < reducer->size; r++)
        counts[r] = range_of(reducer, parameter, r).count;
    const enum shoal_status status = shoal_allgatherv(reducer->optimizer->comm, own, values, counts, NULL,
                                                      type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32, &options);
    free(counts);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_operation_failed(reducer, status, (long)reducer->layout->places[parameter].buffer);
    return fusion_failure_status(reducer);
}

enum shoal_status shoal_reducer_read_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                           void *values_out)
{
    FUSION_TRY(check_state(reducer, "shoal_reducer_read_state", parameter, state, values_out));
    const struct range range = range_of(reducer, parameter, reducer->rank);
    return gather_values(reducer, parameter, range.count ? values_at(reducer, parameter, state, &range) : NULL, values_out);
}

enum shoal_status shoal_reducer_write_state(struct shoal_reducer *reducer, size_t parameter, enum shoal_optimizer_state state,
                                            const void *values)
{
    FUSION_TRY(check_state(reducer, "shoal_reducer_write_state", parameter, state, values));
    const struct range range = range_of(reducer, parameter, reducer->rank);
    const size_t unit = real_bytes(fusion_parameter(reducer, parameter)->type);
    if (range.count > 0)
        memcpy(values_at(reducer, parameter, state, &range), (const char *)values + range.begin * unit, range.count * unit);
    return SHOAL_OK;
}

uint64_t shoal_reducer_parameter_steps(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || !reducer->optimizer || parameter >= reducer->layout->parameters.count)
        return 0;
    return reducer->optimizer->steps[parameter];
}

enum shoal_status shoal_reducer_set_parameter_steps(struct shoal_reducer *reducer, size_t parameter, uint64_t steps)
{
    FUSION_TRY(check_optimizer_call(reducer, "shoal_reducer_set_parameter_steps"));
    if (parameter >= reducer->layout->parameters.count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_set_parameter_steps: parameter %zu is out of range: there are %zu", parameter,
                             reducer->layout->parameters.count);
    reducer->optimizer->steps[parameter] = steps;
    return SHOAL_OK;
}
