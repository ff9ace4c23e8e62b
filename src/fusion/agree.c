/* Compares the ranks' arguments when a reducer is made, and agrees on one layout after the first step. All collective. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/lists.h"
#include "fusion/reducer_failure.h"

/* ---- What a rank tells of itself ----------------------------------------------------------------------------------------- */

#define OPTIONS(X)                                                                                                      \
    X(op)                                                                                                               \
    X(buffer_bytes)                                                                                                     \
    X(first_buffer_bytes)                                                                                               \
    X(rank_bytes)                                                                                                       \
    X(flight_bytes)                                                                                                     \
    X(timeout_ms)                                                                                                       \
    X(keeps_layout)                                                                                                     \
    X(results_in_views) X(allows_unused) X(is_uneven) X(divides_by_active) X(checks_finite) X(has_norms) X(compression) \
        X(forgets_error) X(has_thread) X(is_on_device)

static const char *const option_names[] = {
#define NAME(option) #option,
    OPTIONS(NAME)
#undef NAME
        "max_norm",
    "a callback", "a given layout", "a given order"};

#define OPTION_COUNT FUSION_COUNT_OF(option_names)

#define TEXT_SHOWN 480 /* of a rank's text, behind its number */

struct agreement {
    int32_t status; /* of its own arguments */
    int32_t padding;
    uint64_t parameter_count;
    uint64_t parameters_hash;
    uint64_t layout_hash;
    uint64_t options[OPTION_COUNT];
    char text[FUSION_TEXT_MAX]; /* where status is not OK */
};

static void fill_options(const struct shoal_reducer_options *options, uint64_t *words)
{
    size_t i = 0;
#define WORD(option) words[i++] = (uint64_t)options->option;
    OPTIONS(WORD)
#undef WORD
    memcpy(&words[i++], &options->max_norm, sizeof options->max_norm);
    words[i++] = options->on_buffer != NULL;
    words[i++] = options->layout != NULL;
    words[i] = options->order != NULL;
}

enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out)
{
    const struct shoal_options options = fusion_options(reducer);
    return fusion_ranks_ready(reducer->comm, &options, own, rank_out);
}

/* ---- Agreement ----------------------------------------------------------------------------------------------------------- */

static void print_option(char *text, size_t text_bytes, size_t index, uint64_t word)
{
    double number;
    memcpy(&number, &word, sizeof number);
    if (strcmp(option_names[index], "max_norm") == 0)
        snprintf(text, text_bytes, "%g", number);
    else
        snprintf(text, text_bytes, "%" PRIu64, word);
}

/* False: they differ, text says where. */
static bool same_options(const struct agreement *all, int size, char *text, size_t text_bytes)
{
    char first[32], other[32];
    for (int r = 1; r < size; r++) {
        for (size_t i = 0; i < OPTION_COUNT; i++) {
            if (all[r].options[i] == all[0].options[i])
                continue;
            print_option(first, sizeof first, i, all[0].options[i]);
            print_option(other, sizeof other, i, all[r].options[i]);
            snprintf(text, text_bytes, "options differ: %s is %s on rank 0, %s on rank %d", option_names[i], first, other, r);
            return false;
        }
    }
    return true;
}

static bool same_layouts(const struct agreement *all, int size, char *text, size_t text_bytes)
{
    for (int r = 1; r < size; r++) {
        if (all[r].layout_hash == all[0].layout_hash)
            continue;
        snprintf(text, text_bytes, "layouts differ: that of rank 0 has hash %016" PRIx64 ", that of rank %d %016" PRIx64,
                 all[0].layout_hash, r, all[r].layout_hash);
        return false;
    }
    return true;
}

static enum shoal_status judge(struct shoal_reducer *reducer, const struct fusion_parameters *parameters,
                               const struct agreement *all, char *text, size_t text_bytes)
{
    for (int r = 0; r < reducer->size; r++) {
        if (all[r].status == SHOAL_OK)
            continue;
        snprintf(text, text_bytes, "rank %d: %.*s", r, TEXT_SHOWN, all[r].text);
        return (enum shoal_status)all[r].status;
    }
    for (int r = 1; r < reducer->size; r++) {
        if (all[r].parameters_hash == all[0].parameters_hash)
            continue;
        const struct shoal_options options = fusion_options(reducer);
        const enum shoal_status status =
            fusion_lists_compare(reducer->comm, &options, parameters, all[0].parameter_count, text, text_bytes);
        return status == SHOAL_OK ? SHOAL_ERR_MISMATCH : status;
    }
    return same_options(all, reducer->size, text, text_bytes) && same_layouts(all, reducer->size, text, text_bytes)
               ? SHOAL_OK
               : SHOAL_ERR_MISMATCH;
}

/* An empty verdict: the library has told why. */
static enum shoal_status report_verdict(const struct shoal_reducer *reducer, enum shoal_status status, const char *verdict)
{
    char line[FUSION_TEXT_MAX + 64];
    if (status == SHOAL_OK || !*verdict)
        return status;
    snprintf(line, sizeof line, "%s: shoal_reducer_create: %s", reducer->name, verdict);
    return shoal_report(reducer->context, status, "fusion", line);
}

enum shoal_status fusion_agree(struct shoal_reducer *reducer, const struct fusion_parameters *parameters,
                               enum shoal_status status, const char *text)
{
    const struct shoal_options options = fusion_options(reducer);
    struct agreement *all = calloc((size_t)reducer->size + 1, sizeof *all), *own = all ? &all[reducer->size] : NULL;
    char verdict[FUSION_TEXT_MAX] = "";
    const enum shoal_status met = fusion_ranks_have_memory(reducer->comm, &options, all, verdict, sizeof verdict);
    if (met != SHOAL_OK || !all) {
        free(all);
        return report_verdict(reducer, met, verdict);
    }
    own->status = (int32_t)status;
    own->parameter_count = parameters->count;
    own->parameters_hash = fusion_parameters_hash(parameters);
    own->layout_hash = shoal_gradient_layout_hash(reducer->layout);
    fill_options(&reducer->options, own->options);
    snprintf(own->text, sizeof own->text, "%s", text);
    const enum shoal_status gathered = shoal_allgather(reducer->comm, own, all, sizeof *own, SHOAL_UINT8, &options);
    const enum shoal_status judged = gathered == SHOAL_OK ? judge(reducer, parameters, all, verdict, sizeof verdict) : gathered;
    free(all);
    return report_verdict(reducer, judged, verdict);
}

/* ---- The layout after the first step ------------------------------------------------------------------------------------- */

/* The order is rank 0's, in memory of its own: shoal_reducer_order goes on to give what this rank saw. */
static enum shoal_status rebuild_in(struct shoal_reducer *reducer, uint32_t *order)
{
    const struct shoal_options options = fusion_options(reducer);
    const size_t count = reducer->layout->parameters.count;
    const struct shoal_gradient_layout_options wanted = {sizeof wanted,
                                                         reducer->size,
                                                         reducer->options.buffer_bytes,
                                                         reducer->options.first_buffer_bytes,
                                                         reducer->options.rank_bytes,
                                                         order};
    struct shoal_gradient_layout *layout = NULL;
    char error[FUSION_TEXT_MAX];
    FUSION_TRY(shoal_reducer_order(reducer, order));
    enum shoal_status status = shoal_broadcast(reducer->comm, order, order, count, SHOAL_INT32, 0, &options);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -2);
        return status;
    }
    status = shoal_gradient_layout_create(reducer->layout->parameters.items, count, &wanted, &layout, error, sizeof error);
    if (status != SHOAL_OK)
        return fusion_fail(reducer, status, -1, "the layout in the order of readiness: %s", error);
    if (layout->hash == reducer->layout->hash) {
        shoal_gradient_layout_free(layout); /* as on all ranks: views stay */
        return SHOAL_OK;
    }
    status = fusion_install(reducer, layout);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_tell_why(reducer, status, error, sizeof error);
    shoal_gradient_layout_free(layout);
    return fusion_fail(reducer, status, -1, "the buffers of the layout in the order of readiness: %.400s", error);
}

enum shoal_status fusion_rebuild(struct shoal_reducer *reducer)
{
    uint32_t *order = calloc(reducer->layout->parameters.count + 1, sizeof *order);
    if (!order)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for the order of readiness");
    const enum shoal_status status = rebuild_in(reducer, order);
    free(order);
    return status;
}
