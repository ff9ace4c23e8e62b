/* Making outer steps: the ranks compare arguments and starting values, then each fragment gets its reducer. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/hash.h"
#include "fusion/lists.h"
#include "fusion/outer_steps.h"

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

/* All that a rank can find out by itself. */
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

static const char *const option_names[] = {"every",       "fragments",     "delay",        "the division into fragments",
                                           "lr",          "momentum",      "nesterov",     "mixing",
                                           "compression", "forgets_error", "shares_start", "timeout_ms"};
enum { FIRST_REAL = 4, OPTION_COUNT = 12 };
_Static_assert(FUSION_COUNT_OF(option_names) == OPTION_COUNT, "a name each");

static bool is_real(size_t option)
{
    return option == FIRST_REAL || option == FIRST_REAL + 1 || option == FIRST_REAL + 3;
}

struct agreement {
    int32_t status; /* of its own arguments */
    int32_t padding;
    uint64_t parameter_count;
    uint64_t parameters_hash;
    uint64_t options[OPTION_COUNT];
    char text[FUSION_TEXT_MAX]; /* where status is not OK */
};

static uint64_t word_of(double value)
{
    uint64_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

static void outer_fill_options(const struct shoal_outer *outer, uint64_t *words)
{
    const struct shoal_outer_options *options = &outer->options;
    const uint64_t division =
        outer->fragment_of ? shoal_bytes_hash(outer->fragment_of, outer->parameters.count * sizeof *outer->fragment_of) : 0;
    const uint64_t all[OPTION_COUNT] = {options->every,
                                        options->fragments,
                                        options->delay,
                                        division,
                                        word_of(options->lr),
                                        word_of(options->momentum),
                                        options->nesterov != 0,
                                        word_of(options->mixing),
                                        (uint64_t)options->compression,
                                        options->forgets_error != 0,
                                        options->shares_start != 0,
                                        options->timeout_ms};
    memcpy(words, all, sizeof all);
}

static void outer_print_option(char *text, size_t text_bytes, size_t option, uint64_t word)
{
    double value;
    memcpy(&value, &word, sizeof value);
    if (is_real(option))
        snprintf(text, text_bytes, "%.9g", value);
    else
        snprintf(text, text_bytes, option == FIRST_REAL - 1 ? "%016" PRIx64 : "%" PRIu64, word);
}

static bool outer_same_options(const struct agreement *all, int size, char *text, size_t text_bytes)
{
    char first[32], other[32];
    for (int r = 1; r < size; r++) {
        for (size_t i = 0; i < OPTION_COUNT; i++) {
            if (all[r].options[i] == all[0].options[i])
                continue;
            outer_print_option(first, sizeof first, i, all[0].options[i]);
            outer_print_option(other, sizeof other, i, all[r].options[i]);
            snprintf(text, text_bytes, "options differ: %s is %s on rank 0, %s on rank %d", option_names[i], first, other, r);
            return false;
        }
    }
    return true;
}

static enum shoal_status outer_judge(struct shoal_outer *outer, const struct agreement *all, char *text, size_t text_bytes)
{
    const struct shoal_options options = outer_operation(outer);
    for (int r = 0; r < outer->size; r++) {
        if (all[r].status == SHOAL_OK)
            continue;
        snprintf(text, text_bytes, "rank %d: %.480s", r, all[r].text);
        return (enum shoal_status)all[r].status;
    }
    for (int r = 1; r < outer->size; r++) {
        if (all[r].parameters_hash == all[0].parameters_hash)
            continue;
        const enum shoal_status status =
            fusion_lists_compare(outer->control, &options, &outer->parameters, all[0].parameter_count, text, text_bytes);
        return status == SHOAL_OK ? SHOAL_ERR_MISMATCH : status;
    }
    return outer_same_options(all, outer->size, text, text_bytes) ? SHOAL_OK : SHOAL_ERR_MISMATCH;
}

enum shoal_status outer_agree(struct shoal_outer *outer, const char *call, enum shoal_status status, const char *text)
{
    const struct shoal_options options = outer_operation(outer);
    struct agreement *all = calloc((size_t)outer->size + 1, sizeof *all), *own = all ? &all[outer->size] : NULL;
    char verdict[FUSION_TEXT_MAX] = "", line[FUSION_TEXT_MAX + 64];
    if (!all)
        return outer_refuse(outer, SHOAL_ERR_MEMORY, "%s: no memory for %d ranks", call, outer->size);
    own->status = (int32_t)status;
    own->parameter_count = outer->parameters.count;
    own->parameters_hash = fusion_parameters_hash(&outer->parameters);
    outer_fill_options(outer, own->options);
    snprintf(own->text, sizeof own->text, "%s", text);
    const enum shoal_status met = shoal_allgather(outer->control, own, all, sizeof *own, SHOAL_UINT8, &options);
    const enum shoal_status judged = met == SHOAL_OK ? outer_judge(outer, all, verdict, sizeof verdict) : met;
    free(all);
    if (met != SHOAL_OK || judged == SHOAL_OK)
        return judged; /* the library has told why */
    snprintf(line, sizeof line, "%s: %s: %s", outer->name, call, verdict);
    return shoal_report(outer->context, judged, "fusion", line);
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

/* Each rank's hash of each parameter: where the first one differs, and on which ranks. */
static enum shoal_status name_value(struct shoal_outer *outer, const uint64_t *all, char *text, size_t text_bytes)
{
    const size_t count = outer->parameters.count;
    uint64_t *values = calloc((size_t)outer->size, sizeof *values);
    char name[FUSION_TEXT_MAX], others[128];
    size_t first = count;
    if (!values)
        return SHOAL_ERR_MEMORY;
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
    free(values);
    return SHOAL_ERR_MISMATCH;
}

static enum shoal_status compare_each(struct shoal_outer *outer, const uint64_t *hashes, char *text, size_t text_bytes)
{
    const struct shoal_options options = outer_operation(outer);
    const size_t count = outer->parameters.count;
    uint64_t *all = calloc((size_t)outer->size * count + 1, sizeof *all);
    enum shoal_status status = all ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = shoal_allgather(outer->control, hashes, all, count, SHOAL_INT64, &options);
    if (status == SHOAL_OK)
        status = name_value(outer, all, text, text_bytes);
    free(all);
    return status;
}

/* One hash of each rank for all parameters. Where these differ, one for each parameter. */
static enum shoal_status compare_hashes(struct shoal_outer *outer, const uint64_t *hashes, uint64_t *all)
{
    const struct shoal_options options = outer_operation(outer);
    const uint64_t own = shoal_bytes_hash(hashes, outer->parameters.count * sizeof *hashes);
    char text[FUSION_TEXT_MAX] = "no memory for the hashes of parameters";
    bool is_same = true;
    FUSION_TRY(shoal_allgather(outer->control, &own, all, 1, SHOAL_INT64, &options));
    for (int r = 0; r < outer->size; r++)
        is_same &= all[r] == own;
    if (is_same)
        return SHOAL_OK; /* on all ranks, or on none */
    const enum shoal_status status = compare_each(outer, hashes, text, sizeof text);
    return outer_agree(outer, CALL, status, text);
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

/* An array of pointers into one block. */
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

static enum shoal_status outer_equip(struct shoal_outer *outer, char *text, size_t text_bytes)
{
    bool has_all = true;
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

static enum shoal_status make_reducer(struct shoal_outer *outer, uint32_t index)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_parameter *parameters = calloc(fragment->count + 1, sizeof *parameters);
    char name[40];
    if (fragment->count == 0 || !parameters) {
        free(parameters);
        return parameters ? SHOAL_OK : SHOAL_ERR_MEMORY;
    }
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
    const enum shoal_status status =
        shoal_reducer_create(outer->context, outer->control, parameters, fragment->count, &options, &fragment->reducer);
    free(parameters);
    return status;
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

static enum shoal_status outer_make(struct shoal_outer *outer, struct shoal_comm *comm,
                                    const struct shoal_parameter *parameters, size_t count, void *const *memory)
{
    char text[FUSION_TEXT_MAX] = "";
    FUSION_TRY(outer_split(outer, comm));
    enum shoal_status status = outer_prepare(outer, parameters, count, memory, text, sizeof text);
    FUSION_TRY(outer_agree(outer, CALL, status, text));
    status = outer_equip(outer, text, sizeof text);
    FUSION_TRY(outer_agree(outer, CALL, status, text));
    FUSION_TRY(outer->options.shares_start ? share_values(outer, memory) : compare_values(outer, memory));
    for (uint32_t f = 0; f < outer->options.fragments; f++)
        FUSION_TRY(make_reducer(outer, f));
    fill_anchors(outer, memory);
    return SHOAL_OK;
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
        return shoal_report(context, SHOAL_ERR_MEMORY, "fusion", CALL ": no memory");
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
