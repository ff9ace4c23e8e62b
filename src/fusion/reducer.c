/* Making and freeing a reducer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/reducer.h"

#define BUFFER_BYTES ((size_t)25 << 20)
#define FLIGHT_BUFFERS 4

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static void free_memory(const struct shoal_reducer *reducer, void *memory)
{
    if (memory && shoal_mem_free(reducer->context, memory) != SHOAL_OK)
        return; /* it has told why */
}

static void free_slots(struct shoal_reducer *reducer)
{
    for (size_t b = 0; reducer->slots && b < shoal_gradient_layout_buffers(reducer->layout); b++) {
        for (size_t i = 0; i < FUSION_STAGES_MAX; i++)
            shoal_request_free(reducer->slots[b].requests[i]);
    }
    free(reducer->slots);
    free(reducer->times);
    reducer->slots = NULL;
    reducer->times = NULL;
    free_memory(reducer, reducer->memory);
    free_memory(reducer, reducer->scratch);
    reducer->memory = NULL;
    reducer->scratch = NULL;
}

static size_t bytes_of(const struct shoal_gradient_layout *layout)
{
    size_t bytes = 0;
    for (size_t b = 0; b < layout->buffer_count; b++)
        bytes += layout->buffers[b].bytes;
    return bytes;
}

/* Padding is zero, and stays so, as sums of zeros are. */
static void place_slots(struct shoal_reducer *reducer, struct fusion_slot *slots, const struct shoal_gradient_layout *layout,
                        char *memory)
{
    for (size_t b = 0; b < layout->buffer_count; b++) {
        slots[b].reducer = reducer;
        slots[b].memory = memory;
        slots[b].elements = layout->buffers[b].bytes / shoal_type_bytes(layout->buffers[b].type);
        memory += layout->buffers[b].bytes;
    }
}

enum shoal_status fusion_install(struct shoal_reducer *reducer, struct shoal_gradient_layout *layout)
{
    const size_t bytes = bytes_of(layout);
    struct fusion_slot *slots = calloc(layout->buffer_count + 1, sizeof *slots);
    struct shoal_buffer_times *times = calloc(layout->buffer_count + 1, sizeof *times);
    void *memory = NULL, *scratch = NULL;
    enum shoal_status status =
        slots && times ? shoal_mem_alloc(reducer->context, bytes + FUSION_ALIGNMENT, &memory) : SHOAL_ERR_MEMORY;
    if (status == SHOAL_OK)
        status = fusion_compressor_prepare(reducer, layout, slots, &scratch);
    if (status != SHOAL_OK) {
        free_memory(reducer, memory);
        free(slots);
        free(times);
        return status;
    }
    memset(memory, 0, bytes);
    place_slots(reducer, slots, layout, memory);
    free_slots(reducer);
    if (reducer->layout != layout)
        shoal_gradient_layout_free(reducer->layout);
    reducer->layout = layout;
    reducer->slots = slots;
    reducer->times = times;
    reducer->memory = memory;
    reducer->scratch = scratch;
    reducer->layout_number++;
    return SHOAL_OK;
}

static enum shoal_status allocate(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count;
    const bool needs_used = reducer->options.allows_unused || reducer->options.is_uneven;
    reducer->gradients = calloc(count + 1, sizeof *reducer->gradients);
    reducer->ready_us = calloc(count + 1, sizeof *reducer->ready_us);
    reducer->ready_order = calloc(count + 1, sizeof *reducer->ready_order);
    reducer->was_used = calloc(count + 1, sizeof *reducer->was_used);
    if (needs_used || reducer->options.has_norms || reducer->options.checks_finite)
        reducer->tail_count = FUSION_TAIL_FIELDS + (needs_used ? count : 0);
    reducer->tail = calloc(reducer->tail_count + 1, sizeof *reducer->tail);
    reducer->tail_sum = calloc(reducer->tail_count + 1, sizeof *reducer->tail_sum);
    if (!reducer->gradients || !reducer->ready_us || !reducer->ready_order || !reducer->was_used || !reducer->tail ||
        !reducer->tail_sum)
        return SHOAL_ERR_MEMORY;
    return fusion_install(reducer, reducer->layout);
}

/* ---- The thread ---------------------------------------------------------------------------------------------------------- */

static void *run_thread(void *arg)
{
    struct shoal_reducer *reducer = arg;
    fusion_lock(reducer);
    while (!reducer->is_ending) {
        fusion_put_out(reducer);
        fusion_tell_late(reducer);
        if (!reducer->is_ending)
            pthread_cond_wait(&reducer->changed, &reducer->lock);
    }
    fusion_unlock(reducer);
    return NULL;
}

static enum shoal_status start_thread(struct shoal_reducer *reducer)
{
    if (!reducer->options.has_thread)
        return SHOAL_OK;
    if (pthread_create(&reducer->thread, NULL, run_thread, reducer) != 0)
        return SHOAL_ERR_SYSTEM;
    reducer->has_thread = true;
    return SHOAL_OK;
}

static void stop_thread(struct shoal_reducer *reducer)
{
    if (!reducer->has_thread)
        return;
    fusion_lock(reducer);
    reducer->is_ending = true;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
    pthread_join(reducer->thread, NULL);
}

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_options(const struct shoal_reducer_options *options, const char **wrong)
{
    *wrong = NULL;
    if (options->struct_bytes < sizeof *options)
        *wrong = "options->struct_bytes is not set: use SHOAL_REDUCER_OPTIONS_INIT";
    else if (options->op != SHOAL_AVG && options->op != SHOAL_SUM)
        *wrong = "options->op is neither SHOAL_AVG nor SHOAL_SUM";
    else if (options->max_norm > 0 && options->on_buffer)
        *wrong = "max_norm needs the norm of all gradients, on_buffer comes before it is known: use one of them";
    else if (!(options->max_norm >= 0))
        *wrong = "options->max_norm is negative or NaN";
    else if ((unsigned)options->compression > SHOAL_COMPRESS_INT8)
        *wrong = "options->compression is none of enum shoal_compression";
    return *wrong ? SHOAL_ERR_ARGUMENT : SHOAL_OK;
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

/* All that a rank can find out by itself. */
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
    if (!reducer->options.flight_bytes)
        reducer->options.flight_bytes = FLIGHT_BUFFERS * fusion_min(buffer_bytes, SIZE_MAX / FLIGHT_BUFFERS);
    FUSION_TRY(fusion_parameters_copy(parameters, count, copy, text, text_bytes));
    return choose_layout(reducer, copy, text, text_bytes);
}

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status split(const struct shoal_reducer *reducer, struct shoal_comm *comm, const char *suffix,
                               struct shoal_comm **comm_out)
{
    char name[32];
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    snprintf(name, sizeof name, "%s%s", reducer->name, suffix);
    options.name = name;
    options.timeout_ms = options.create_timeout_ms = reducer->options.timeout_ms;
    return shoal_comm_split(comm, 0, reducer->rank, &options, comm_out);
}

/* A rank without memory for a reducer takes part in the first split with no color, so that the others miss it. */
static enum shoal_status check_all_split(const struct shoal_reducer *reducer, const struct shoal_comm *comm)
{
    const int there = shoal_comm_size(reducer->comm), wanted = shoal_comm_size(comm);
    if (there == wanted)
        return SHOAL_OK;
    return fusion_refuse(reducer, SHOAL_ERR_MEMORY, "shoal_reducer_create: %d of %d ranks had no memory for a reducer",
                         wanted - there, wanted);
}

static enum shoal_status decline(struct shoal_context *context, struct shoal_comm *comm)
{
    struct shoal_comm *none;
    const enum shoal_status status = shoal_comm_split(comm, -1, 0, NULL, &none);
    return shoal_report(context, SHOAL_ERR_MEMORY, "fusion",
                        status == SHOAL_OK ? "shoal_reducer_create: no memory for a reducer"
                                           : "shoal_reducer_create: no memory for a reducer, nor could other ranks be told");
}

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
    snprintf(reducer->name, sizeof reducer->name, "%.23s", reducer->options.name ? reducer->options.name : "gradients");
}

/* Allocates everything that may fail on one rank alone, after all ranks have agreed on the layout. */
static enum shoal_status equip(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    enum shoal_status status = allocate(reducer);
    if (status != SHOAL_OK) {
        snprintf(text, text_bytes, "no memory for %zu bytes of gradient buffers", bytes_of(reducer->layout));
        return status;
    }
    status = start_thread(reducer);
    if (status == SHOAL_OK)
        status = fusion_compressor_start(reducer);
    if (status != SHOAL_OK)
        snprintf(text, text_bytes, "no thread can be started");
    return status;
}

/* Where this rank alone is wrong it still meets the others, so that all learn of it. */
static enum shoal_status agree(struct shoal_reducer *reducer, const struct shoal_parameter *parameters, size_t count)
{
    char text[FUSION_TEXT_MAX] = "";
    struct fusion_parameters copy = {0, NULL, NULL};
    enum shoal_status status = prepare(reducer, parameters, count, &copy, text, sizeof text);
    status = fusion_agree(reducer, &copy, status, text);
    if (status == SHOAL_OK) {
        status = fusion_compressor_open(reducer, text, sizeof text);
        if (status != SHOAL_OK && *text)
            status = fusion_refuse(reducer, status, "%s", text);
    }
    if (status == SHOAL_OK) {
        status = equip(reducer, text, sizeof text);
        status = fusion_agree(reducer, &copy, status, text);
    }
    fusion_parameters_free(&copy);
    return status;
}

static enum shoal_status make(struct shoal_reducer *reducer, struct shoal_comm *comm, const struct shoal_parameter *parameters,
                              size_t count)
{
    FUSION_TRY(split(reducer, comm, "", &reducer->comm));
    FUSION_TRY(check_all_split(reducer, comm));
    FUSION_TRY(split(reducer, comm, ".notice", &reducer->notice));
    FUSION_TRY(find_hosts(reducer));
    return agree(reducer, parameters, count);
}

/* The caller's pointers are not kept. */
static void forget_arguments(struct shoal_reducer_options *options)
{
    static const struct shoal_gradient_layout given;
    static const uint32_t order;
    options->name = NULL;
    options->layout = options->layout ? &given : NULL; /* only whether there was one is asked for */
    options->order = options->order ? &order : NULL;
}

enum shoal_status shoal_reducer_create(struct shoal_context *context, struct shoal_comm *comm,
                                       const struct shoal_parameter *parameters, size_t parameter_count,
                                       const struct shoal_reducer_options *options, struct shoal_reducer **reducer_out)
{
    if (!context || !comm || !reducer_out)
        return shoal_report(context, SHOAL_ERR_ARGUMENT, "fusion",
                            "shoal_reducer_create: context, comm or reducer_out is NULL");
    struct shoal_reducer *reducer = calloc(1, sizeof *reducer);
    if (!reducer)
        return decline(context, comm);
    init(reducer, context, comm, options);
    const enum shoal_status status = make(reducer, comm, parameters, parameter_count);
    if (status != SHOAL_OK) {
        shoal_reducer_free(reducer);
        return status;
    }
    forget_arguments(&reducer->options);
    *reducer_out = reducer;
    return SHOAL_OK;
}

static void free_parts(struct shoal_reducer *reducer)
{
    for (size_t i = 0; reducer->gradients && i < reducer->layout->parameters.count; i++) {
        struct fusion_part *part = reducer->gradients[i].first.next;
        while (part) {
            struct fusion_part *next = part->next;
            free(part);
            part = next;
        }
    }
}

void shoal_reducer_free(struct shoal_reducer *reducer)
{
    if (!reducer)
        return;
    stop_thread(reducer);
    fusion_compressor_stop(reducer);
    shoal_comm_free(reducer->comm); /* completions that it still calls see the reducer */
    shoal_comm_free(reducer->notice);
    free_parts(reducer);
    shoal_request_free(reducer->head_request);
    shoal_request_free(reducer->tail_request);
    free_slots(reducer);
    shoal_gradient_layout_free(reducer->layout);
    fusion_compressor_free(reducer);
    free(reducer->gradients);
    free(reducer->ready_us);
    free(reducer->ready_order);
    free(reducer->was_used);
    free(reducer->tail);
    free(reducer->tail_sum);
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
