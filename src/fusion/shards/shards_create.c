/* Creates and frees sharded parameters. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/agree.h"
#include "fusion/layout/hash.h"
#include "fusion/layout/lists.h"
#include "fusion/shards/shards_state.h"

#define CALL "shoal_shards_create"
#define LIVE_UNITS 3

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

static const char *check_own_options(const struct shoal_shards_options *options)
{
    const struct shoal_optimizer *optimizer = options->optimizer;
    if (options->struct_bytes < sizeof *options)
        return "options->struct_bytes is not set: use SHOAL_SHARDS_OPTIONS_INIT";
    if (options->op != SHOAL_AVG && options->op != SHOAL_SUM)
        return "options->op is neither SHOAL_AVG nor SHOAL_SUM";
    if (!(options->max_norm >= 0))
        return "options->max_norm is negative or NaN";
    if (!optimizer || !fusion_settings_are_set(optimizer))
        return "options->optimizer is NULL, or its struct_bytes is not set: use SHOAL_OPTIMIZER_INIT";
    if (optimizer->rule < SHOAL_SGD || optimizer->rule > SHOAL_LAMB)
        return "optimizer->rule is none of enum shoal_optimizer_rule";
    if (!optimizer->groups || optimizer->group_count < 1 || optimizer->group_count > SHOAL_OPTIMIZER_GROUPS_MAX)
        return "the optimizer has no groups, or more than SHOAL_OPTIMIZER_GROUPS_MAX";
    if (optimizer->steps_early || optimizer->is_atomic || optimizer->degree)
        return "steps_early, is_atomic and degree of the optimizer are for reducers: leave them 0";
    return fusion_loss_scale_fault(optimizer, options->checks_finite);
}

static enum shoal_status copy_groups(struct shoal_shards *shards, char *text, size_t text_bytes)
{
    const struct shoal_optimizer *optimizer = shards->options.optimizer;
    for (size_t g = 0; g < optimizer->group_count; g++) {
        const char *fault = "struct_bytes is not set: use SHOAL_OPTIMIZER_GROUP_INIT";
        if (fusion_group_is_set(&optimizer->groups[g])) {
            shards->groups[g] = fusion_group_copy(&optimizer->groups[g]);
            fault = fusion_group_fault(optimizer->rule, &shards->groups[g]);
        }
        if (!fault)
            continue;
        snprintf(text, text_bytes, "group %zu of the optimizer: %s", g, fault);
        return SHOAL_ERR_ARGUMENT;
    }
    for (size_t i = 0; i < shards->parameters.count; i++) {
        shards->group_of[i] = optimizer->group_of ? optimizer->group_of[i] : 0;
        if (shards->group_of[i] < optimizer->group_count)
            continue;
        snprintf(text, text_bytes, "optimizer->group_of: parameter %zu is in group %u, but there are %zu groups", i,
                 shards->group_of[i], optimizer->group_count);
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

/* ---- Units --------------------------------------------------------------------------------------------------------------- */

/* Numbers the parameters of each unit, in their order. */
static enum shoal_status list_units(struct shoal_shards *shards, char *text, size_t text_bytes)
{
    const size_t count = shards->parameters.count;
    char name[FUSION_TEXT_MAX];
    for (size_t i = 0; i < count; i++) {
        shards->unit_of[i] = shards->options.unit_of ? shards->options.unit_of[i] : (uint32_t)i;
        if (shards->unit_of[i] >= count) {
            snprintf(text, text_bytes, "options->unit_of: %s is in unit %u, but units are numbered 0, 1, 2 ...",
                     fusion_parameter_text(&shards->parameters, i, name, sizeof name), shards->unit_of[i]);
            return SHOAL_ERR_ARGUMENT;
        }
        shards->units[shards->unit_of[i]].count++;
        if (shards->unit_of[i] >= shards->unit_count)
            shards->unit_count = shards->unit_of[i] + 1;
    }
    uint32_t first = 0;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        shards->units[u].first = first;
        first += shards->units[u].count;
        if (shards->units[u].count > 0)
            continue;
        snprintf(text, text_bytes, "options->unit_of: unit %u of %u has no parameter", u, shards->unit_count);
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

static enum shoal_status place_parameter(struct shoal_shards *shards, size_t i, char *text, size_t text_bytes)
{
    const struct shoal_parameter *parameter = &shards->parameters.items[i];
    struct shards_unit *unit = shards_unit_of(shards, i);
    char name[FUSION_TEXT_MAX];
    if (unit->missing == 0)
        unit->type = parameter->type;
    shards->members[unit->first + unit->missing++] = (uint32_t)i;
    shards->offsets[i] = unit->bytes;
    unit->bytes += fusion_round_up(fusion_parameter_bytes(parameter), FUSION_ALIGNMENT);
    if (unit->type == parameter->type)
        return SHOAL_OK;
    snprintf(text, text_bytes, "options->unit_of: unit %u has parameters of %s, but %s is of %s: give it another unit",
             shards->unit_of[i], fusion_type_name(unit->type), fusion_parameter_text(&shards->parameters, i, name, sizeof name),
             fusion_type_name(parameter->type));
    return SHOAL_ERR_ARGUMENT;
}

static enum shoal_status place_units(struct shoal_shards *shards, char *text, size_t text_bytes)
{
    FUSION_TRY(list_units(shards, text, text_bytes));
    for (size_t i = 0; i < shards->parameters.count; i++)
        FUSION_TRY(place_parameter(shards, i, text, text_bytes));
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        struct shards_unit *unit = &shards->units[u];
        unit->is_whole = unit->bytes < shards->options.whole_bytes;
        SHOAL_ASSERT(unit->missing == unit->count); /* each of its parameters has a place */
        unit->bytes = fusion_round_up(fusion_max(unit->bytes, FUSION_ALIGNMENT), FUSION_ALIGNMENT * (size_t)shards->size);
        unit->shard_bytes = unit->bytes; /* unless it is divided */
        unit->missing = unit->count;
        unit->slot = unit->gradient_slot = SHARDS_NO_SLOT;
        if (!unit->is_whole)
            shards->largest = fusion_max(shards->largest, unit->bytes);
    }
    return SHOAL_OK;
}

/* Cuts the units that do not stay whole, in their order. spans has room for all parameters. */
static enum shoal_status cut_units_in(struct shoal_shards *shards, struct fusion_divider *divider, struct fusion_span *spans)
{
    const size_t *granules = shards->options.optimizer->granules;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        struct shards_unit *unit = &shards->units[u];
        for (uint32_t i = 0; i < unit->count; i++) {
            const uint32_t parameter = shards->members[unit->first + i];
            spans[i] = (struct fusion_span){shards->offsets[parameter], shards->parameters.items[parameter].count,
                                            fusion_granule(granules, parameter)};
        }
        if (unit->is_whole)
            continue;
        FUSION_TRY(fusion_divider_cut(divider, spans, unit->count, unit->bytes, shoal_type_bytes(unit->type), &unit->borders));
        unit->shard_begin = fusion_border(&unit->borders, shards->rank);
        unit->shard_bytes = fusion_shard_length(&unit->borders, shards->rank);
        SHOAL_ASSERT(unit->shard_begin + unit->shard_bytes <= unit->bytes);
    }
    return SHOAL_OK;
}

static enum shoal_status cut_units(struct shoal_shards *shards, char *text, size_t text_bytes)
{
    struct fusion_span *spans = calloc(shards->parameters.count + 1, sizeof *spans);
    struct fusion_divider *divider = fusion_divider_create(shards->options.optimizer->weights, shards->size);
    const enum shoal_status status = spans && divider ? cut_units_in(shards, divider, spans) : SHOAL_ERR_MEMORY;
    if (status != SHOAL_OK)
        snprintf(text, text_bytes, "no memory for the borders of %u units on %d ranks", shards->unit_count, shards->size);
    fusion_divider_free(divider);
    free(spans);
    return status;
}

static bool allocate_lists(struct shoal_shards *shards)
{
    const size_t count = shards->parameters.count + 1;
    shards->groups = calloc(shards->options.optimizer->group_count, sizeof *shards->groups);
    shards->group_of = calloc(count, sizeof *shards->group_of);
    shards->unit_of = calloc(count, sizeof *shards->unit_of);
    shards->members = calloc(count, sizeof *shards->members);
    shards->offsets = calloc(count, sizeof *shards->offsets);
    shards->steps = calloc(count, sizeof *shards->steps);
    shards->norms = calloc(2 * count * (1 + (size_t)shards->size), sizeof *shards->norms);
    shards->is_ready = calloc(count, sizeof *shards->is_ready);
    shards->is_begun = calloc(count, sizeof *shards->is_begun);
    shards->units = calloc(count, sizeof *shards->units);
    shards->slots = calloc(shards->options.live_units, sizeof *shards->slots);
    return shards->groups && shards->group_of && shards->unit_of && shards->members && shards->offsets && shards->norms &&
           shards->steps && shards->is_ready && shards->is_begun && shards->units && shards->slots;
}

/* Checks all that a rank can check by itself. */
static enum shoal_status shards_prepare(struct shoal_shards *shards, const struct shoal_parameter *parameters, size_t count,
                                        char *text, size_t text_bytes)
{
    char room[FUSION_TEXT_MAX];
    const char *wrong = check_own_options(&shards->options);
    if (!wrong)
        wrong = fusion_weights_fault(shards->options.optimizer->weights, shards->size, room, sizeof room);
    if (wrong) {
        snprintf(text, text_bytes, "%s", wrong);
        return SHOAL_ERR_ARGUMENT;
    }
    if (!shards->options.live_units)
        shards->options.live_units = LIVE_UNITS;
    FUSION_TRY(fusion_parameters_copy(parameters, count, &shards->parameters, text, text_bytes));
    if (!allocate_lists(shards)) {
        snprintf(text, text_bytes, "no memory for the lists of %zu parameters and %u live units", count,
                 shards->options.live_units);
        return SHOAL_ERR_MEMORY;
    }
    shards->rule = shards->options.optimizer->rule;
    shards->group_count = shards->options.optimizer->group_count;
    shards->loss = fusion_loss_scale_begin(shards->options.optimizer);
    shards->scale = shards->loss.scale > 0 ? fusion_loss_scale_factor(&shards->loss) : 1;
    FUSION_TRY(copy_groups(shards, text, text_bytes));
    FUSION_TRY(place_units(shards, text, text_bytes));
    return cut_units(shards, text, text_bytes);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static bool has_master(enum shoal_type type)
{
    return type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
}

static size_t states_of_unit(const struct shoal_shards *shards, const struct shards_unit *unit)
{
    size_t states = 0;
    for (uint32_t i = 0; i < unit->count; i++) {
        const struct shoal_optimizer_group *group = &shards->groups[shards->group_of[shards->members[unit->first + i]]];
        states = fusion_max(states, fusion_rule_states(fusion_group_rule(shards->rule, group)));
    }
    return states;
}

static char *take_range(char *memory, size_t bytes, size_t *used)
{
    char *at = memory ? memory + *used : NULL;
    *used += fusion_round_up(bytes, FUSION_ALIGNMENT);
    return at;
}

/* Memory that operations read and write. Only counts if there is none yet. */
static size_t place_shared(struct shoal_shards *shards, char *memory)
{
    size_t used = 0;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        shards->units[u].own = take_range(memory, shards->units[u].shard_bytes, &used);
        shards->units[u].gradient = take_range(memory, shards->units[u].shard_bytes, &used);
    }
    for (uint32_t s = 0; s < shards->options.live_units; s++)
        shards->slots[s].memory = take_range(memory, shards->largest, &used);
    for (size_t g = 0; g < SHARDS_GRADIENTS; g++)
        shards->gradients[g].memory = take_range(memory, shards->largest, &used);
    return used;
}

static size_t place_states(struct shoal_shards *shards, char *memory)
{
    size_t used = 0;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        struct shards_unit *unit = &shards->units[u];
        const size_t bytes = unit->shard_bytes / shoal_type_bytes(unit->type) * shards_real_bytes(unit->type);
        const size_t states = states_of_unit(shards, unit);
        for (size_t s = has_master(unit->type) ? 0 : 1; s <= states; s++)
            unit->states[s] = take_range(memory, bytes, &used);
    }
    return used;
}

static void set_initial_state(struct shoal_shards *shards, size_t parameter)
{
    const struct shards_unit *unit = shards_unit_of(shards, parameter);
    const struct shards_range range = shards_range_of(shards, parameter, shards->rank);
    const double initial = shards->groups[shards->group_of[parameter]].initial;
    const size_t begin = range.count ? shards_offset(shards, parameter, range.begin) : 0;
    for (size_t i = begin; i < begin + range.count; i++) {
        if (unit->type == SHOAL_FLOAT64)
            ((double *)(void *)unit->states[SHOAL_STATE_FIRST])[i] = initial;
        else
            ((float *)(void *)unit->states[SHOAL_STATE_FIRST])[i] = (float)initial;
    }
}

static enum shoal_status allocate_values(struct shoal_shards *shards, char *text, size_t text_bytes)
{
    const size_t shared_bytes = place_shared(shards, NULL), local_bytes = place_states(shards, NULL);
    void *shared = NULL;
    shards->local = aligned_alloc(FUSION_ALIGNMENT, local_bytes + FUSION_ALIGNMENT);
    const enum shoal_status status = shoal_mem_alloc(shards->context, shared_bytes + FUSION_ALIGNMENT, &shared);
    shards->shared = shared;
    if (status != SHOAL_OK || !shards->local) {
        snprintf(text, text_bytes, "no memory for %zu bytes of shards and live units, and %zu of states", shared_bytes,
                 local_bytes);
        return status == SHOAL_OK ? SHOAL_ERR_MEMORY : status;
    }
    memset(shards->shared, 0, shared_bytes);
    memset(shards->local, 0, local_bytes);
    const size_t placed_shared = place_shared(shards, shards->shared);
    const size_t placed_local = place_states(shards, shards->local);
    SHOAL_ASSERT(placed_shared == shared_bytes && placed_local == local_bytes);
    for (uint32_t s = 0; s < shards->options.live_units; s++)
        shards->slots[s].unit = SHOAL_SHARDS_NONE;
    for (size_t g = 0; g < SHARDS_GRADIENTS; g++)
        shards->gradients[g].unit = shards->gradients[g].busy = SHOAL_SHARDS_NONE;
    for (size_t i = 0; shards->rule == SHOAL_ADAGRAD && i < shards->parameters.count; i++)
        set_initial_state(shards, i);
    return SHOAL_OK;
}

/* ---- Agreement ----------------------------------------------------------------------------------------------------------- */

/* Every number that decides how values are computed or where they are. */
static uint64_t hash_settings(const struct shoal_shards *shards)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, shards->group_count);
    for (size_t g = 0; g < shards->group_count; g++) {
        struct fusion_setting settings[FUSION_GROUP_SETTINGS];
        fusion_group_list(&shards->groups[g], settings);
        for (size_t i = 0; i < FUSION_GROUP_SETTINGS; i++) {
            uint64_t word;
            memcpy(&word, &settings[i].value, sizeof word);
            hash = fusion_hash_word(hash, word);
        }
    }
    for (size_t i = 0; i < shards->parameters.count; i++)
        hash = fusion_hash_word(hash, shards->group_of[i]);
    return hash;
}

static uint64_t hash_units(const struct shoal_shards *shards)
{
    uint64_t hash = FUSION_HASH_BEGIN;
    for (size_t i = 0; i < shards->parameters.count; i++)
        hash = fusion_hash_word(hash, shards->unit_of[i]);
    return hash;
}

static enum shoal_status shards_agree(const struct shoal_shards *shards, enum shoal_status status, const char *text)
{
    const struct shoal_shards_options *options = &shards->options;
    const bool is_known = status == SHOAL_OK; /* otherwise the lists may be missing */
    const struct fusion_option all[] = {
        fusion_number("op", (uint64_t)options->op),
        fusion_number("live_units", options->live_units),
        fusion_number("whole_bytes", options->whole_bytes),
        fusion_real("max_norm", options->max_norm),
        fusion_number("checks_finite", (uint64_t)options->checks_finite),
        fusion_number("timeout_ms", options->timeout_ms),
        fusion_number("the optimizer's rule", (uint64_t)shards->rule),
        fusion_hash_option("the hash of unit_of", is_known ? hash_units(shards) : 0),
        fusion_hash_option("the hash of the optimizer's groups", is_known ? hash_settings(shards) : 0),
        fusion_real("the optimizer's loss_scale", shards->given.loss_scale),
        fusion_real("the optimizer's scale_growth", shards->given.scale_growth),
        fusion_real("the optimizer's scale_backoff", shards->given.scale_backoff),
        fusion_number("the optimizer's scale_interval", shards->given.scale_interval),
        fusion_weights_list(is_known ? shards->given.weights : NULL, shards->size),
        fusion_hash_option("the hash of the optimizer's granules",
                           is_known ? fusion_granules_hash(shards->given.granules, &shards->parameters) : 0),
    };
    struct fusion_agreement agreement = {.context = shards->context,
                                         .comm = shards->gathers,
                                         .timeout_ms = options->timeout_ms,
                                         .name = shards->name,
                                         .call = CALL,
                                         .parameters = &shards->parameters,
                                         .option_count = FUSION_COUNT_OF(all)};
    _Static_assert(FUSION_COUNT_OF(all) <= FUSION_OPTIONS_MAX, "room for all");
    memcpy(agreement.options, all, sizeof all);
    return fusion_agree(&agreement, status, text);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status split(const struct shoal_shards *shards, struct shoal_comm *comm, const char *suffix,
                               struct shoal_comm **comm_out)
{
    char name[40];
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    snprintf(name, sizeof name, "%s%s", shards->name, suffix);
    options.name = name;
    options.timeout_ms = options.create_timeout_ms = shards->options.timeout_ms;
    return shoal_comm_split(comm, 0, shards->rank, &options, comm_out);
}

static enum shoal_status shards_make(struct shoal_shards *shards, struct shoal_comm *comm,
                                     const struct shoal_parameter *parameters, size_t count)
{
    char text[FUSION_TEXT_MAX] = "";
    FUSION_TRY(split(shards, comm, "", &shards->gathers));
    FUSION_TRY(fusion_all_split(shards->context, comm, shards->gathers, CALL));
    enum shoal_status status = shards_prepare(shards, parameters, count, text, sizeof text);
    FUSION_TRY(shards_agree(shards, status, text));
    status = allocate_values(shards, text, sizeof text);
    FUSION_TRY(shards_agree(shards, status, text));
    return split(shards, shards->gathers, ".sums", &shards->sums);
}

enum shoal_status shoal_shards_create(struct shoal_context *context, struct shoal_comm *comm,
                                      const struct shoal_parameter *parameters, size_t parameter_count,
                                      const struct shoal_shards_options *options, struct shoal_shards **shards_out)
{
    static const struct shoal_shards_options usual = SHOAL_SHARDS_OPTIONS_INIT;
    if (!context || !comm || !shards_out)
        return shoal_report(context, SHOAL_ERR_ARGUMENT, "fusion", CALL ": context, comm or shards_out is NULL");
    struct shoal_shards *shards = calloc(1, sizeof *shards);
    if (!shards)
        return fusion_decline(context, comm, CALL);
    shards->context = context;
    shards->rank = shoal_comm_rank(comm);
    shards->size = shoal_comm_size(comm);
    shards->kernels = shoal_gradient_kernels_at(0);
    memcpy(&shards->options, options ? options : &usual,
           options ? fusion_min(options->struct_bytes, sizeof *options) : sizeof usual);
    if (shards->options.optimizer) {
        shards->given = fusion_settings_copy(shards->options.optimizer);
        shards->options.optimizer = &shards->given;
    }
    snprintf(shards->name, sizeof shards->name, "%.23s", shards->options.name ? shards->options.name : "shards");
    const enum shoal_status status = shards_make(shards, comm, parameters, parameter_count);
    if (status != SHOAL_OK) {
        shoal_shards_free(shards);
        return status;
    }
    shards->options.name = NULL;
    shards->options.unit_of = NULL;
    shards->options.optimizer = NULL;
    shards->given = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    *shards_out = shards;
    return SHOAL_OK;
}

static void free_requests(struct shoal_shards *shards)
{
    for (uint32_t u = 0; shards->units && u < shards->unit_count; u++)
        shoal_request_free(shards->units[u].sum);
    for (uint32_t s = 0; shards->slots && s < shards->options.live_units; s++)
        shoal_request_free(shards->slots[s].request);
}

void shoal_shards_free(struct shoal_shards *shards)
{
    if (!shards)
        return;
    shoal_comm_free(shards->sums);
    shoal_comm_free(shards->gathers); /* no operation uses the memory from here on */
    free_requests(shards);
    if (shards->shared && shoal_mem_free(shards->context, shards->shared) != SHOAL_OK)
        shards->shared = NULL; /* it has reported why */
    free(shards->local);
    for (uint32_t u = 0; shards->units && u < shards->unit_count; u++)
        fusion_borders_free(&shards->units[u].borders);
    fusion_parameters_free(&shards->parameters);
    free(shards->groups);
    free(shards->group_of);
    free(shards->unit_of);
    free(shards->members);
    free(shards->offsets);
    free(shards->steps);
    free(shards->norms);
    free(shards->is_ready);
    free(shards->is_begun);
    free(shards->units);
    free(shards->slots);
    free(shards);
}

enum shoal_status shoal_shards_memory(const struct shoal_shards *shards, struct shoal_shards_bytes *memory_out)
{
    struct shoal_shards_bytes memory = SHOAL_SHARDS_BYTES_INIT;
    if (!shards || !shoal_struct_bytes(memory_out))
        return SHOAL_ERR_ARGUMENT;
    for (uint32_t u = 0; u < shards->unit_count; u++) {
        const struct shards_unit *unit = &shards->units[u];
        size_t *bytes = unit->is_whole ? &memory.whole_bytes : &memory.shard_bytes;
        *bytes += 2 * unit->shard_bytes;
        for (size_t s = 0; s < SHARDS_STATES; s++)
            *bytes += unit->states[s] ? unit->shard_bytes / shoal_type_bytes(unit->type) * shards_real_bytes(unit->type) : 0;
    }
    memory.live_bytes = shards->options.live_units * shards->largest;
    memory.gradient_bytes = SHARDS_GRADIENTS * shards->largest;
    shoal_struct_copy_out(memory_out, &memory, sizeof memory);
    return SHOAL_OK;
}
