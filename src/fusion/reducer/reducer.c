/* Creates and frees reducers. */
#include "fusion/reducer/reducer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/layout/agree.h"
#include "fusion/layout/lists.h"
#include "fusion/optimizer/optimizer_group.h"
#include "fusion/reducer/comms.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/measure.h"
#include "fusion/reducer/offload.h"
#include "fusion/reducer/optimizer.h"
#include "fusion/reducer/out.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/reducer_memory.h"
#include "fusion/reducer/relayout.h"
#include "fusion/reducer/reducer_noise.h"
#include "fusion/reducer/stats.h"
#include "fusion/reducer/tally.h"

#define CALL "shoal_reducer_create"
#define BUFFER_BYTES ((size_t)25 << 20)
#define FLIGHT_BUFFERS 4

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_options(const struct shoal_reducer_options *options, const char **wrong)
{
    *wrong = NULL;
    if (options->struct_bytes < offsetof(struct shoal_reducer_options, is_on_device))
        *wrong = "options->struct_bytes is not set: use SHOAL_REDUCER_OPTIONS_INIT";
    else if (options->op != SHOAL_AVG && options->op != SHOAL_SUM)
        *wrong = "options->op is neither SHOAL_AVG nor SHOAL_SUM";
    else if (options->max_norm > 0 && options->on_buffer)
        *wrong = "max_norm needs the norm of all gradients, on_buffer comes before it is known: use one of them";
    else if (!(options->max_norm >= 0))
        *wrong = "options->max_norm is negative or NaN";
    else if (!fusion_noise_can_have(options->noise_window))
        *wrong = "options->noise_window is neither 0 nor a number of steps from 1";
    else if ((unsigned)options->compression > SHOAL_COMPRESS_INT8)
        *wrong = "options->compression is none of enum shoal_compression";
    return *wrong ? SHOAL_ERR_ARGUMENT : SHOAL_OK;
}

static enum shoal_status reducer_check_optimizer(const struct shoal_reducer *reducer, size_t parameter_count, char *text,
                                                 size_t text_bytes)
{
    char room[FUSION_TEXT_MAX];
    enum shoal_status status;
    if (!reducer->options.optimizer)
        return SHOAL_OK;
    const char *wrong = fusion_optimizer_check(&reducer->options, parameter_count, room, sizeof room, &status);
    wrong = wrong ? wrong : fusion_degree_fault(reducer, room, sizeof room);
    wrong = wrong ? wrong : fusion_borders_fault(reducer, room, sizeof room);
    snprintf(text, text_bytes, "%s", wrong ? wrong : "");
    return wrong ? status : SHOAL_OK;
}

/* The callback's work on the stream would delay the backward pass on that stream. */
static enum shoal_status reducer_check_device(const struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    if (!reducer->options.has_thread)
        return fusion_device_check(reducer, text, text_bytes);
    snprintf(text, text_bytes, "has_thread is for gradients in host memory, and is_on_device is set: leave one of them out");
    return SHOAL_ERR_UNSUPPORTED;
}

static enum shoal_status check_given(const struct shoal_gradient_layout *layout, const struct fusion_parameters *parameters,
                                     int size, char *text, size_t text_bytes)
{
    char name[FUSION_TEXT_MAX];
    if (layout->ranks != size) {
        snprintf(text, text_bytes, "options->layout is for %d ranks, the communicator has %d", layout->ranks, size);
        return SHOAL_ERR_ARGUMENT;
    }
    if (layout->parameters.count != parameters->count) {
        snprintf(text, text_bytes, "options->layout is of another model: it has %zu parameters, there are %zu",
                 layout->parameters.count, parameters->count);
        return SHOAL_ERR_ARGUMENT;
    }
    for (size_t i = 0; i < parameters->count; i++) {
        const struct shoal_parameter *there = &layout->parameters.items[i], *here = &parameters->items[i];
        if (there->count == here->count && there->type == here->type)
            continue;
        snprintf(text, text_bytes, "options->layout is of another model: %s has %zu elements of %s there, %zu of %s here",
                 fusion_parameter_text(parameters, i, name, sizeof name), there->count, fusion_type_name(there->type),
                 here->count, fusion_type_name(here->type));
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

static enum shoal_status choose_layout(struct shoal_reducer *reducer, const struct fusion_parameters *parameters, char *text,
                                       size_t text_bytes)
{
    const struct shoal_reducer_options *options = &reducer->options;
    const struct shoal_gradient_layout_options wanted = {
        sizeof wanted, reducer->size, options->buffer_bytes, options->first_buffer_bytes, options->rank_bytes, options->order};
    if (!options->layout)
        return shoal_gradient_layout_create(parameters->items, parameters->count, &wanted, &reducer->layout, text, text_bytes);
    FUSION_TRY(check_given(options->layout, parameters, reducer->size, text, text_bytes));
    return fusion_layout_copy(options->layout, &reducer->layout, text, text_bytes);
}

/* Checks all that a rank can check by itself. */
static enum shoal_status prepare(struct shoal_reducer *reducer, const struct shoal_parameter *parameters, size_t count,
                                 struct fusion_parameters *copy, char *text, size_t text_bytes)
{
    const size_t buffer_bytes = reducer->options.buffer_bytes ? reducer->options.buffer_bytes : BUFFER_BYTES;
    const char *wrong;
    const enum shoal_status status = check_options(&reducer->options, &wrong);
    if (status != SHOAL_OK) {
        snprintf(text, text_bytes, "%s", wrong);
        return status;
    }
    FUSION_TRY(reducer_check_optimizer(reducer, count, text, text_bytes));
    if (reducer->device)
        FUSION_TRY(reducer_check_device(reducer, text, text_bytes));
    if (!reducer->options.flight_bytes)
        reducer->options.flight_bytes = FLIGHT_BUFFERS * fusion_min(buffer_bytes, SIZE_MAX / FLIGHT_BUFFERS);
    FUSION_TRY(fusion_parameters_copy(parameters, count, copy, text, text_bytes));
    return choose_layout(reducer, copy, text, text_bytes);
}

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status find_hosts(struct shoal_reducer *reducer)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    FUSION_TRY(shoal_comm_place(reducer->comm, reducer->rank, &place));
    reducer->hosts = place.hosts;
    reducer->local_size = place.local_size;
    return SHOAL_OK;
}

static void init_locks(struct shoal_reducer *reducer)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&reducer->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&reducer->lock, NULL);
}

static void init(struct shoal_reducer *reducer, struct shoal_context *context, struct shoal_comm *comm,
                 const struct shoal_reducer_options *options)
{
    init_locks(reducer);
    reducer->context = context;
    reducer->rank = shoal_comm_rank(comm);
    reducer->size = shoal_comm_size(comm);
    reducer->kernels = shoal_gradient_kernels_at(0);
    if (options)
        memcpy(&reducer->options, options, fusion_min(options->struct_bytes, sizeof *options));
    else
        reducer->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    if (reducer->options.optimizer) {
        reducer->given = fusion_settings_copy(reducer->options.optimizer);
        reducer->options.optimizer = &reducer->given;
    }
    if (reducer->options.noise_window > 0)
        reducer->options.has_norms = 1;
    snprintf(reducer->name, sizeof reducer->name, "%.23s", reducer->options.name ? reducer->options.name : "gradients");
}

static enum shoal_status create_parts(struct shoal_reducer *reducer)
{
    FUSION_TRY(fusion_marks_create(reducer, fusion_post_full));
    FUSION_TRY(fusion_flow_create(reducer));
    FUSION_TRY(fusion_tally_create(reducer));
    FUSION_TRY(fusion_out_create(reducer));
    FUSION_TRY(fusion_stats_create(reducer));
    FUSION_TRY(fusion_measure_create(reducer));
    FUSION_TRY(fusion_noise_create(reducer));
    FUSION_TRY(fusion_optimizer_create(reducer));
    FUSION_TRY(fusion_install(reducer, reducer->layout));
    return fusion_offload_create(reducer);
}

/* Allocates everything that may fail on one rank alone, after all ranks have agreed on the layout. */
static enum shoal_status equip(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    char why[FUSION_TEXT_MAX];
    enum shoal_status status = fusion_device_load(reducer);
    if (status != SHOAL_OK) {
        fusion_tell_why(reducer, status, text, text_bytes);
        return status;
    }
    status = create_parts(reducer);
    if (status != SHOAL_OK) {
        fusion_tell_why(reducer, status, why, sizeof why);
        snprintf(text, text_bytes, "no memory for %zu bytes of gradient buffers%s: %.400s", reducer->layout->bytes,
                 reducer->optimizer ? ", as many of parameters, and the optimizer's states" : "", why);
        return status;
    }
    status = fusion_out_start_thread(reducer);
    if (status == SHOAL_OK)
        status = fusion_compressor_start(reducer);
    if (status != SHOAL_OK)
        snprintf(text, text_bytes, "no thread can be started");
    return status;
}

#define OPTIONS(X)        \
    X(op)                 \
    X(buffer_bytes)       \
    X(first_buffer_bytes) \
    X(rank_bytes)         \
    X(flight_bytes)       \
    X(timeout_ms)         \
    X(keeps_layout)       \
    X(results_in_views)   \
    X(allows_unused)      \
    X(is_uneven)          \
    X(divides_by_active) X(checks_finite) X(has_norms) X(compression) X(forgets_error) X(has_thread) X(is_on_device)

static enum shoal_status reducer_agree(const struct shoal_reducer *reducer, const struct fusion_parameters *parameters,
                                       enum shoal_status status, const char *text)
{
    const struct shoal_reducer_options *options = &reducer->options;
    const bool is_known = status == SHOAL_OK && options->optimizer; /* otherwise they may have other lengths */
    const struct fusion_option all[] = {
#define OPTION(option) fusion_number(#option, (uint64_t)options->option),
        OPTIONS(OPTION)
#undef OPTION
            fusion_real("max_norm", options->max_norm),
        fusion_real("noise_window", options->noise_window),
        fusion_number("the optimizer's rule", options->optimizer ? (uint64_t)options->optimizer->rule : 0),
        fusion_number("the optimizer's steps_early", options->optimizer ? (uint64_t)options->optimizer->steps_early : 0),
        fusion_number("the optimizer's degree", options->optimizer ? (uint64_t)options->optimizer->degree : 0),
        fusion_number("the optimizer's is_atomic", options->optimizer ? (uint64_t)options->optimizer->is_atomic : 0),
        fusion_real("the optimizer's loss_scale", options->optimizer ? options->optimizer->loss_scale : 0),
        fusion_real("the optimizer's scale_growth", options->optimizer ? options->optimizer->scale_growth : 0),
        fusion_real("the optimizer's scale_backoff", options->optimizer ? options->optimizer->scale_backoff : 0),
        fusion_number("the optimizer's scale_interval", options->optimizer ? options->optimizer->scale_interval : 0),
        fusion_number("the optimizer's number of groups", options->optimizer ? options->optimizer->group_count : 0),
        fusion_hash_option("the hash of the optimizer's group_of", fusion_optimizer_hash(options, parameters->count)),
        is_known ? fusion_weights_option(reducer) : fusion_list_option("the optimizer's weight", 0, NULL, 0),
        fusion_hash_option("the hash of the optimizer's granules", is_known ? fusion_granules_hash_of(reducer) : 0),
        fusion_number("a callback", options->on_buffer != NULL),
        fusion_number("a given layout", options->layout != NULL),
        fusion_number("a given order", options->order != NULL),
        fusion_hash_option("the hash of the layout", shoal_gradient_layout_hash(reducer->layout)),
    };
    struct fusion_agreement agreement = {.context = reducer->context,
                                         .comm = reducer->comm,
                                         .timeout_ms = options->timeout_ms,
                                         .name = reducer->name,
                                         .call = CALL,
                                         .parameters = parameters,
                                         .option_count = FUSION_COUNT_OF(all)};
    _Static_assert(FUSION_COUNT_OF(all) <= FUSION_OPTIONS_MAX, "room for all");
    memcpy(agreement.options, all, sizeof all);
    return fusion_agree(&agreement, status, text);
}

static enum shoal_status equip_optimizer(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    *text = 0;
    const enum shoal_status status = fusion_optimizer_agree(reducer, text, text_bytes);
    if (status != SHOAL_OK && *text)
        return fusion_refuse(reducer, status, CALL ": %s", text);
    if (status != SHOAL_OK)
        return status;
    return fusion_optimizer_open(reducer);
}

/* A rank with an error of its own still takes part, so that all ranks learn of it. */
static enum shoal_status agree(struct shoal_reducer *reducer, const struct shoal_parameter *parameters, size_t count)
{
    char text[FUSION_TEXT_MAX] = "";
    struct fusion_parameters copy = {0, NULL, NULL};
    enum shoal_status status = prepare(reducer, parameters, count, &copy, text, sizeof text);
    status = reducer_agree(reducer, &copy, status, text);
    if (status == SHOAL_OK) {
        status = fusion_compressor_open(reducer, text, sizeof text);
        if (status != SHOAL_OK && *text)
            status = fusion_refuse(reducer, status, "%s", text);
    }
    if (status == SHOAL_OK) {
        status = equip(reducer, text, sizeof text);
        status = reducer_agree(reducer, &copy, status, text);
    }
    if (status == SHOAL_OK)
        status = equip_optimizer(reducer, text, sizeof text);
    fusion_parameters_free(&copy);
    return status;
}

static enum shoal_status make(struct shoal_reducer *reducer, struct shoal_comm *comm, const struct shoal_parameter *parameters,
                              size_t count)
{
    FUSION_TRY(fusion_comms_open(reducer, comm));
    FUSION_TRY(fusion_all_split(reducer->context, comm, reducer->comm, CALL));
    FUSION_TRY(find_hosts(reducer));
    return agree(reducer, parameters, count);
}

/* Forgets the caller's pointers. */
static void forget_arguments(struct shoal_reducer_options *options)
{
    static const struct shoal_gradient_layout given;
    static const uint32_t order;
    static const struct shoal_optimizer optimizer;
    options->name = NULL;
    options->layout = options->layout ? &given : NULL; /* only whether it was NULL matters from now on */
    options->order = options->order ? &order : NULL;
    options->optimizer = options->optimizer ? &optimizer : NULL;
}

enum shoal_status shoal_reducer_create(struct shoal_context *context, struct shoal_comm *comm,
                                       const struct shoal_parameter *parameters, size_t parameter_count,
                                       const struct shoal_reducer_options *options, struct shoal_reducer **reducer_out)
{
    if (!context || !comm || !reducer_out)
        return shoal_report(context, SHOAL_ERR_ARGUMENT, "fusion", CALL ": context, comm or reducer_out is NULL");
    struct shoal_reducer *reducer = calloc(1, sizeof *reducer);
    if (!reducer || fusion_fault_create(reducer) != SHOAL_OK) {
        free(reducer);
        return fusion_decline(context, comm, CALL);
    }
    init(reducer, context, comm, options);
    if (fusion_comms_create(reducer) != SHOAL_OK || fusion_device_open(reducer) != SHOAL_OK) {
        shoal_reducer_free(reducer);
        return fusion_decline(context, comm, CALL);
    }
    const enum shoal_status status = make(reducer, comm, parameters, parameter_count);
    if (status != SHOAL_OK) {
        shoal_reducer_free(reducer);
        return status;
    }
    forget_arguments(&reducer->options);
    reducer->given = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    *reducer_out = reducer;
    return SHOAL_OK;
}

/* Completions post nothing from now on, because communicators are freed one after the other. */
static void stop_posting(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    reducer->is_armed = false;
    while (reducer->flow && (fusion_flow_is_posting(reducer) || fusion_offload_is_working(reducer)))
        pthread_cond_wait(&reducer->changed, &reducer->lock);
    fusion_unlock(reducer);
}

void shoal_reducer_free(struct shoal_reducer *reducer)
{
    if (!reducer)
        return;
    (void)fusion_settle_failure(reducer);
    stop_posting(reducer);
    fusion_out_stop_thread(reducer);
    fusion_compressor_stop(reducer);
    fusion_comms_close(reducer);
    shoal_comm_free(reducer->comm); /* its last completions still use the reducer */
    fusion_comms_destroy(reducer);
    fusion_fault_destroy(reducer);
    fusion_marks_destroy(reducer);
    fusion_tally_destroy(reducer);
    fusion_flow_destroy(reducer);
    fusion_compressor_free(reducer);
    fusion_offload_destroy(reducer);
    fusion_optimizer_destroy(reducer);
    fusion_out_destroy(reducer);
    fusion_stats_destroy(reducer);
    fusion_measure_destroy(reducer);
    fusion_noise_destroy(reducer);
    fusion_free_memory(reducer, reducer->memory);
    fusion_device_close(reducer);
    shoal_gradient_layout_free(reducer->layout);
    pthread_cond_destroy(&reducer->changed);
    pthread_mutex_destroy(&reducer->lock);
    free(reducer);
}

/* ---- Views --------------------------------------------------------------------------------------------------------------- */

void *shoal_reducer_view(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer && parameter < reducer->layout->parameters.count ? fusion_view(reducer, parameter) : NULL;
}

unsigned shoal_reducer_layout_number(const struct shoal_reducer *reducer)
{
    return reducer ? reducer->layout_number : 0;
}

const struct shoal_gradient_layout *shoal_reducer_layout(const struct shoal_reducer *reducer)
{
    return reducer ? reducer->layout : NULL;
}
