/* Creates outer steps: the ranks compare arguments and starting values, then each fragment gets its reducer. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/agree.h"
#include "fusion/layout/hash.h"
#include "fusion/layout/lists.h"
#include "fusion/outer/outer_steps.h"

#define CALL "shoal_outer_create"

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

static const char *wrong_option(const struct shoal_outer_options *options)
{
    if (options->struct_bytes < sizeof *options)
        return "options->struct_bytes is not set: use SHOAL_OUTER_OPTIONS_INIT";
    if (options->every < 1)
        return "options->every is 0: say after how many steps an exchange begins";
    if (options->fragments < 1 || options->fragments > SHOAL_OUTER_FRAGMENTS_MAX || options->fragments > options->every)
        return "options->fragments must be 1 to every, and at most 64";
    if (options->delay >= options->every)
        return "options->delay must be below every: a fragment is applied before its next exchange begins";
    if (!(options->lr > 0) || options->lr - options->lr != 0)
        return "options->lr must be above 0, and finite";
    if (!(options->momentum >= 0 && options->momentum < 1))
        return "options->momentum must be at least 0 and below 1";
    if (!(options->mixing >= 0 && options->mixing < 1))
        return "options->mixing must be at least 0 and below 1";
    if ((unsigned)options->compression > SHOAL_COMPRESS_INT8)
        return "options->compression is none of enum shoal_compression";
    return NULL;
}

static enum shoal_status divide(struct shoal_outer *outer, char *text, size_t text_bytes)
{
    const size_t count = outer->parameters.count;
    char name[FUSION_TEXT_MAX];
    outer->fragment_of = calloc(count + 1, sizeof *outer->fragment_of);
    if (!outer->fragment_of) {
        snprintf(text, text_bytes, "no memory for %zu parameters", count);
        return SHOAL_ERR_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        const uint32_t fragment =
            outer->options.fragment_of ? outer->options.fragment_of[i] : (uint32_t)(i % outer->options.fragments);
        outer->fragment_of[i] = fragment;
        if (fragment < outer->options.fragments)
            continue;
        snprintf(text, text_bytes, "options->fragment_of puts %s into fragment %" PRIu32 ", there are %" PRIu32,
                 fusion_parameter_text(&outer->parameters, i, name, sizeof name), fragment, outer->options.fragments);
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

/* Checks all that a rank can check by itself. */
static enum shoal_status outer_prepare(struct shoal_outer *outer, const struct shoal_parameter *parameters, size_t count,
                                       void *const *memory, char *text, size_t text_bytes)
{
    const char *wrong = wrong_option(&outer->options);
    char name[FUSION_TEXT_MAX];
    if (wrong) {
        snprintf(text, text_bytes, "%s", wrong);
        return SHOAL_ERR_ARGUMENT;
    }
    FUSION_TRY(fusion_parameters_copy(parameters, count, &outer->parameters, text, text_bytes));
    for (size_t i = 0; i < count; i++) {
        if (memory && (memory[i] || parameters[i].count == 0))
            continue;
        snprintf(text, text_bytes, "the memory of %s is NULL", fusion_parameter_text(&outer->parameters, i, name, sizeof name));
        return SHOAL_ERR_ARGUMENT;
    }
    return divide(outer, text, text_bytes);
}

/* ---- Agreement ----------------------------------------------------------------------------------------------------------- */

enum shoal_status outer_agree(struct shoal_outer *outer, const char *call, enum shoal_status status, const char *text)
{
    const struct shoal_outer_options *options = &outer->options;
    const uint64_t division =
        outer->fragment_of ? shoal_bytes_hash(outer->fragment_of, outer->parameters.count * sizeof *outer->fragment_of) : 0;
    const struct fusion_option all[] = {
        fusion_number("every", options->every),
        fusion_number("fragments", options->fragments),
        fusion_number("delay", options->delay),
        fusion_hash_option("the division into fragments", division),
        fusion_real("lr", options->lr),
        fusion_real("momentum", options->momentum),
        fusion_number("nesterov", options->nesterov != 0),
        fusion_real("mixing", options->mixing),
        fusion_number("compression", (uint64_t)options->compression),
        fusion_number("forgets_error", options->forgets_error != 0),
        fusion_number("shares_start", options->shares_start != 0),
        fusion_number("timeout_ms", options->timeout_ms),
    };
    struct fusion_agreement agreement = {.context = outer->context,
                                         .comm = outer->control,
                                         .timeout_ms = options->timeout_ms,
                                         .name = outer->name,
                                         .call = call,
                                         .parameters = &outer->parameters,
                                         .option_count = FUSION_COUNT_OF(all)};
    _Static_assert(FUSION_COUNT_OF(all) <= FUSION_OPTIONS_MAX, "room for all");
    memcpy(agreement.options, all, sizeof all);
    return fusion_agree(&agreement, status, text);
}

/* ---- Starting values ----------------------------------------------------------------------------------------------------- */

static enum shoal_status share_values(struct shoal_outer *outer, void *const *memory)
{
    const struct shoal_options options = outer_operation(outer);
    for (size_t i = 0; i < outer->parameters.count; i++)
        FUSION_TRY(shoal_broadcast(outer->control, memory[i], memory[i], outer->parameters.items[i].count,
                                   outer->parameters.items[i].type, 0, &options));
    return SHOAL_OK;
}

/* Names the first parameter that differs, and the ranks, from each rank's hash of each parameter. `values` has room for one
 * hash of each rank. */
static enum shoal_status name_value(struct shoal_outer *outer, const uint64_t *all, uint64_t *values, char *text,
                                    size_t text_bytes)
{
    const size_t count = outer->parameters.count;
    char name[FUSION_TEXT_MAX], others[128];
    size_t first = count;
    for (int r = 1; r < outer->size; r++) {
        size_t i = 0;
        while (i < first && all[(size_t)r * count + i] == all[i])
            i++;
        first = i;
    }
    for (int r = 0; r < outer->size && first < count; r++)
        values[r] = all[(size_t)r * count + first];
    fusion_list_others(values, outer->size, others, sizeof others);
    snprintf(text, text_bytes, "%s does not have the same values on all ranks: %s; shares_start would copy rank 0's",
             first < count ? fusion_parameter_text(&outer->parameters, first, name, sizeof name) : "a parameter", others);
    return SHOAL_ERR_MISMATCH;
}

/* Exchanges one hash per rank for all parameters. If they differ, exchanges one for each parameter. values has room for one
 * hash of each rank. */
static enum shoal_status compare_hashes(struct shoal_outer *outer, const uint64_t *hashes, uint64_t *values)
{
    const struct shoal_options options = outer_operation(outer);
    const size_t count = outer->parameters.count;
    const uint64_t own = shoal_bytes_hash(hashes, count * sizeof *hashes);
    char text[FUSION_TEXT_MAX] = "no memory for the hashes of parameters";
    FUSION_TRY(shoal_allgather(outer->control, &own, values, 1, SHOAL_INT64, &options));
    bool is_same = true;
    for (int r = 0; r < outer->size; r++)
        is_same &= values[r] == own;
    if (is_same)
        return SHOAL_OK; /* on all ranks, or on none */
    uint64_t *all = calloc((size_t)outer->size * count + 1, sizeof *all);
    enum shoal_status status = outer_agree(outer, CALL, all ? SHOAL_OK : SHOAL_ERR_MEMORY, text);
    if (status == SHOAL_OK)
        status = shoal_allgather(outer->control, hashes, all, count, SHOAL_INT64, &options);
    if (status == SHOAL_OK)
        status = outer_agree(outer, CALL, name_value(outer, all, values, text, sizeof text), text);
    free(all);
    return status;
}

static enum shoal_status compare_values(struct shoal_outer *outer, void *const *memory)
{
    uint64_t *hashes = calloc(outer->parameters.count + 1, sizeof *hashes), *all = calloc((size_t)outer->size, sizeof *all);
    enum shoal_status status =
        outer_agree(outer, CALL, hashes && all ? SHOAL_OK : SHOAL_ERR_MEMORY, "no memory for hashes of parameters");
    for (size_t i = 0; i < outer->parameters.count && status == SHOAL_OK; i++)
        hashes[i] = shoal_bytes_hash(memory[i], fusion_parameter_bytes(&outer->parameters.items[i]));
    if (status == SHOAL_OK)
        status = compare_hashes(outer, hashes, all);
    free(hashes);
    free(all);
    return status;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static size_t bytes_of_all(const struct fusion_parameters *parameters)
{
    size_t bytes = 0;
    for (size_t i = 0; i < parameters->count; i++)
        bytes += fusion_round_up(outer_bytes(&parameters->items[i]), FUSION_ALIGNMENT);
    return bytes;
}

/* Allocates an array of pointers into one block. */
static bool outer_allocate(const struct shoal_outer *outer, void ***each_out, char **memory_out)
{
    void **each = calloc(outer->parameters.count + 1, sizeof *each);
    char *memory = calloc(outer->memory_bytes + 1, 1);
    *each_out = each;
    *memory_out = memory;
    for (size_t i = 0; i < outer->parameters.count && each && memory; i++) {
        each[i] = memory;
        memory += fusion_round_up(outer_bytes(&outer->parameters.items[i]), FUSION_ALIGNMENT);
    }
    SHOAL_ASSERT(!each || !*memory_out || memory == *memory_out + outer->memory_bytes);
    return each && *memory_out;
}

static bool list_members(struct shoal_outer *outer, uint32_t index)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    fragment->members = calloc(outer->parameters.count + 1, sizeof *fragment->members);
    fragment->all = calloc((size_t)outer->size, sizeof *fragment->all);
    for (size_t i = 0; i < outer->parameters.count && fragment->members; i++) {
        if (outer->fragment_of[i] == index)
            fragment->members[fragment->count++] = (uint32_t)i;
    }
    return fragment->members && fragment->all;
}

static enum shoal_status outer_equip(struct shoal_outer *outer, bool has_all, char *text, size_t text_bytes)
{
    outer->memory_bytes = bytes_of_all(&outer->parameters);
    if (outer_has_anchor(&outer->options))
        has_all &= outer_allocate(outer, &outer->anchors, &outer->anchor_memory);
    if (outer->options.momentum > 0)
        has_all &= outer_allocate(outer, &outer->momenta, &outer->momentum_memory);
    for (uint32_t f = 0; f < outer->options.fragments; f++)
        has_all &= list_members(outer, f);
    if (has_all)
        return SHOAL_OK;
    snprintf(text, text_bytes, "no memory for anchors and momentum of %zu bytes each", outer->memory_bytes);
    return SHOAL_ERR_MEMORY;
}

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

/* parameters has room for those of a fragment. */
static enum shoal_status make_reducer(struct shoal_outer *outer, uint32_t index, struct shoal_parameter *parameters)
{
    SHOAL_ASSERT(index < outer->options.fragments && !outer->fragments[index].reducer);
    struct outer_fragment *fragment = &outer->fragments[index];
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    char name[40];
    if (fragment->count == 0)
        return SHOAL_OK;
    for (size_t i = 0; i < fragment->count; i++) {
        const struct shoal_parameter *each = &outer->parameters.items[fragment->members[i]];
        parameters[i] = (struct shoal_parameter){each->count, outer_type(each), each->name};
    }
    snprintf(name, sizeof name, "%s.%" PRIu32, outer->name, index);
    options.name = name;
    options.timeout_ms = outer->options.timeout_ms;
    options.keeps_layout = options.results_in_views = 1;
    options.compression = outer->options.compression;
    options.forgets_error = outer->options.forgets_error;
    return shoal_reducer_create(outer->context, outer->control, parameters, fragment->count, &options, &fragment->reducer);
}

static void fill_anchors(struct shoal_outer *outer, void *const *memory)
{
    for (size_t i = 0; outer->anchors && i < outer->parameters.count; i++) {
        if (outer->parameters.items[i].count)
            outer_difference(outer->kernels, &outer->parameters.items[i], outer->anchors[i], NULL, memory[i]);
    }
}

static enum shoal_status outer_split(struct shoal_outer *outer, struct shoal_comm *comm)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.name = outer->name;
    options.timeout_ms = outer->options.timeout_ms;
    return shoal_comm_split(comm, 0, outer->rank, &options, &outer->control);
}

/* Call when all ranks have agreed on their arguments. listed has room for all parameters, or is NULL if out of memory. */
static enum shoal_status make_parts(struct shoal_outer *outer, void *const *memory, struct shoal_parameter *listed)
{
    char text[FUSION_TEXT_MAX] = "";
    const enum shoal_status status = outer_equip(outer, listed != NULL, text, sizeof text);
    FUSION_TRY(outer_agree(outer, CALL, status, text));
    FUSION_TRY(outer->options.shares_start ? share_values(outer, memory) : compare_values(outer, memory));
    for (uint32_t f = 0; f < outer->options.fragments; f++)
        FUSION_TRY(make_reducer(outer, f, listed));
    fill_anchors(outer, memory);
    return SHOAL_OK;
}

static enum shoal_status outer_make(struct shoal_outer *outer, struct shoal_comm *comm,
                                    const struct shoal_parameter *parameters, size_t count, void *const *memory)
{
    char text[FUSION_TEXT_MAX] = "";
    FUSION_TRY(outer_split(outer, comm));
    FUSION_TRY(fusion_all_split(outer->context, comm, outer->control, CALL));
    enum shoal_status status = outer_prepare(outer, parameters, count, memory, text, sizeof text);
    FUSION_TRY(outer_agree(outer, CALL, status, text));
    struct shoal_parameter *listed = calloc(count + 1, sizeof *listed);
    status = make_parts(outer, memory, listed);
    free(listed);
    return status;
}

enum shoal_status shoal_outer_create(struct shoal_context *context, struct shoal_comm *comm,
                                     const struct shoal_parameter *parameters, size_t parameter_count, void *const *memory,
                                     const struct shoal_outer_options *options, struct shoal_outer **outer_out)
{
    if (!context || !comm || !options || !outer_out)
        return shoal_report(context, SHOAL_ERR_ARGUMENT, "fusion",
                            CALL ": context, comm, options or outer_out is NULL (options->every has no default)");
    struct shoal_outer *outer = calloc(1, sizeof *outer);
    if (!outer)
        return fusion_decline(context, comm, CALL);
    outer->context = context;
    outer->rank = shoal_comm_rank(comm);
    outer->size = shoal_comm_size(comm);
    outer->kernels = shoal_gradient_kernels_at(0);
    outer->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    outer->stats = (struct shoal_outer_totals)SHOAL_OUTER_TOTALS_INIT;
    memcpy(&outer->options, options, fusion_min(options->struct_bytes, sizeof *options));
    snprintf(outer->name, sizeof outer->name, "%.19s", outer->options.name ? outer->options.name : "outer");
    const enum shoal_status status = outer_make(outer, comm, parameters, parameter_count, memory);
    outer->options.name = NULL; /* the caller's pointers are not kept */
    outer->options.fragment_of = NULL;
    if (status != SHOAL_OK) {
        shoal_outer_free(outer);
        return status;
    }
    *outer_out = outer;
    return SHOAL_OK;
}

void shoal_outer_free(struct shoal_outer *outer)
{
    if (!outer)
        return;
    for (size_t f = 0; f < SHOAL_OUTER_FRAGMENTS_MAX; f++)
        shoal_reducer_free(outer->fragments[f].reducer);
    shoal_comm_free(outer->control);
    for (size_t f = 0; f < SHOAL_OUTER_FRAGMENTS_MAX; f++) {
        shoal_request_free(outer->fragments[f].request);
        free(outer->fragments[f].members);
        free(outer->fragments[f].all);
    }
    fusion_parameters_free(&outer->parameters);
    free(outer->fragment_of);
    free(outer->anchors);
    free(outer->momenta);
    free(outer->anchor_memory);
    free(outer->momentum_memory);
    free(outer);
}
