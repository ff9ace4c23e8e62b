#include "fusion/layout/gradient_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/hash.h"

#define BUFFER_BYTES ((size_t)25 << 20)
#define FIRST_BUFFER_BYTES ((size_t)1 << 20)
#define RANK_BYTES_MAX ((size_t)64 << 10)
#define RANK_BYTES_MIN ((size_t)8 << 10)

/* ---- Shared by all ways of making a layout ------------------------------------------------------------------------------- */

enum shoal_status fusion_layout_open(const struct shoal_parameter *parameters, size_t count, int ranks,
                                     struct shoal_gradient_layout **layout_out, char *error, size_t error_bytes)
{
    if (ranks < 1 || ranks > SHOAL_RANKS_MAX) {
        snprintf(error, error_bytes, "a layout is for 1 to %d ranks, not %d", SHOAL_RANKS_MAX, ranks);
        return SHOAL_ERR_ARGUMENT;
    }
    struct shoal_gradient_layout *layout = calloc(1, sizeof *layout);
    enum shoal_status status = SHOAL_ERR_MEMORY;
    snprintf(error, error_bytes, "no memory for a layout of %zu parameters", count);
    if (layout)
        status = fusion_parameters_copy(parameters, count, &layout->parameters, error, error_bytes);
    if (status == SHOAL_OK) {
        layout->ranks = ranks;
        layout->places = calloc(count + 1, sizeof *layout->places);
        layout->order = calloc(count + 1, sizeof *layout->order);
        layout->buffers = calloc(count + 1, sizeof *layout->buffers);
        if (!layout->places || !layout->order || !layout->buffers)
            status = SHOAL_ERR_MEMORY;
    }
    if (status != SHOAL_OK) {
        if (status == SHOAL_ERR_MEMORY)
            snprintf(error, error_bytes, "no memory for a layout of %zu parameters", count);
        shoal_gradient_layout_free(layout);
        return status;
    }
    *layout_out = layout;
    return SHOAL_OK;
}

static uint64_t hash_of(const struct shoal_gradient_layout *layout)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, (uint64_t)layout->ranks);
    hash = fusion_hash_word(hash, layout->parameters.count);
    for (size_t i = 0; i < layout->parameters.count; i++) {
        hash = fusion_hash_word(hash, layout->parameters.items[i].count);
        hash = fusion_hash_word(hash, (uint64_t)layout->parameters.items[i].type);
        hash = fusion_hash_word(hash, layout->order[i]);
    }
    for (size_t b = 0; b < layout->buffer_count; b++)
        hash = fusion_hash_word(hash, layout->buffers[b].count);
    return hash;
}

static void place_buffer(struct shoal_gradient_layout *layout, uint32_t index)
{
    struct fusion_buffer *buffer = &layout->buffers[index];
    size_t end = 0;
    buffer->used_bytes = 0;
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = layout->order[buffer->first + i];
        const size_t bytes = fusion_parameter_bytes(&layout->parameters.items[parameter]);
        layout->places[parameter] = (struct fusion_place){index, end};
        end = fusion_round_up(end + bytes, FUSION_ALIGNMENT);
        buffer->used_bytes += bytes;
    }
    buffer->begin = layout->bytes;
    buffer->bytes = fusion_round_up(end, FUSION_ALIGNMENT * (size_t)layout->ranks);
    layout->bytes += buffer->bytes;
    SHOAL_ASSERT(buffer->used_bytes <= buffer->bytes && buffer->bytes % (size_t)layout->ranks == 0);
}

void fusion_layout_close(struct shoal_gradient_layout *layout)
{
    uint32_t placed = 0;
    layout->bytes = 0;
    for (uint32_t b = 0; b < layout->buffer_count; b++) {
        SHOAL_ASSERT(layout->buffers[b].first == placed && layout->buffers[b].count > 0);
        place_buffer(layout, b);
        placed += layout->buffers[b].count;
    }
    SHOAL_ASSERT(placed == layout->parameters.count); /* each parameter is in one buffer */
    layout->hash = hash_of(layout);
}

void shoal_gradient_layout_free(struct shoal_gradient_layout *layout)
{
    if (!layout)
        return;
    fusion_parameters_free(&layout->parameters);
    free(layout->places);
    free(layout->order);
    free(layout->buffers);
    free(layout);
}

enum shoal_status fusion_layout_copy(const struct shoal_gradient_layout *layout, struct shoal_gradient_layout **copy_out,
                                     char *error, size_t error_bytes)
{
    struct shoal_gradient_layout *copy;
    const size_t count = layout->parameters.count;
    FUSION_TRY(fusion_layout_open(layout->parameters.items, count, layout->ranks, &copy, error, error_bytes));
    memcpy(copy->order, layout->order, count * sizeof *copy->order);
    memcpy(copy->buffers, layout->buffers, layout->buffer_count * sizeof *copy->buffers);
    copy->buffer_count = layout->buffer_count;
    fusion_layout_close(copy);
    *copy_out = copy;
    return SHOAL_OK;
}

/* ---- Filling buffers in the order of readiness --------------------------------------------------------------------------- */

struct limits {
    size_t bytes;
    size_t first_bytes;
    size_t least_bytes; /* no buffer is closed below this size */
};

/* A buffer that is being filled. */
struct filling {
    enum shoal_type type;
    size_t bytes;
    size_t last; /* position of its last parameter in the order of readiness */
};

struct filler {
    struct limits limits;
    struct filling *fillings;      /* [count] */
    size_t *filling_of;            /* [parameters]: by position in the order of readiness */
    size_t open[SHOAL_TYPE_END];   /* 1 + the number of the open filling; 0 if none yet */
    bool is_later[SHOAL_TYPE_END]; /* the open filling is not the type's first */
    size_t count;
};

static bool fits(const struct filler *filler, const struct shoal_parameter *parameter)
{
    if (!filler->open[parameter->type])
        return false;
    const size_t held = filler->fillings[filler->open[parameter->type] - 1].bytes;
    const size_t limit = filler->is_later[parameter->type] ? filler->limits.bytes : filler->limits.first_bytes;
    return held < filler->limits.least_bytes || held + fusion_parameter_bytes(parameter) <= limit;
}

static void fill_in(struct filler *filler, const struct shoal_parameter *parameter, size_t position)
{
    const enum shoal_type type = parameter->type;
    if (!fits(filler, parameter)) {
        filler->is_later[type] = filler->open[type] > 0;
        filler->fillings[filler->count++] = (struct filling){type, 0, 0};
        filler->open[type] = filler->count;
    }
    struct filling *filling = &filler->fillings[filler->open[type] - 1];
    filling->bytes = fusion_round_up(filling->bytes + fusion_parameter_bytes(parameter), FUSION_ALIGNMENT);
    filling->last = position;
    filler->filling_of[position] = filler->open[type] - 1;
}

/* Returns the position at which the last filling's tail begins. The tail is the filling's last parameters that together fit
 * into a first buffer, or at least the very last one. Parameters of other types are in other buffers. */
static size_t find_tail(const struct filler *filler, const struct shoal_gradient_layout *layout, const uint32_t *order,
                        size_t *bytes_out)
{
    const size_t count = layout->parameters.count, last = filler->filling_of[count - 1];
    size_t begin = count, bytes = 0;
    for (size_t i = count; i-- > 0;) {
        if (filler->filling_of[i] != last)
            continue;
        const size_t more = fusion_round_up(fusion_parameter_bytes(&layout->parameters.items[order[i]]), FUSION_ALIGNMENT);
        if (begin < count && bytes + more > filler->limits.first_bytes)
            break;
        begin = i;
        bytes += more;
    }
    *bytes_out = bytes;
    return begin;
}

/* The backward pass cannot hide the gradients that become ready last. So the last buffer is divided if most of it is ready
 * before its end: that part then does not wait for the tail. It pays if that part is as long as a first buffer, and if no
 * buffer becomes too short. */
static void divide_last(struct filler *filler, const struct shoal_gradient_layout *layout, const uint32_t *order)
{
    const size_t count = layout->parameters.count;
    if (count == 0)
        return;
    struct filling *whole = &filler->fillings[filler->filling_of[count - 1]];
    size_t bytes;
    const size_t begin = find_tail(filler, layout, order, &bytes), rest = whole->bytes - bytes;
    if (rest < fusion_max(filler->limits.first_bytes, filler->limits.least_bytes) || rest == 0)
        return;
    const size_t last = filler->filling_of[count - 1], tail = filler->count++;
    filler->fillings[tail] = (struct filling){whole->type, bytes, count - 1};
    whole->bytes = rest;
    for (size_t i = 0; i < count; i++) {
        if (filler->filling_of[i] == last && i >= begin)
            filler->filling_of[i] = tail;
        else if (filler->filling_of[i] == last)
            whole->last = i;
    }
}

/* Numbers buffers in the order in which they become full: a filling's number is stored at the position of its last
 * parameter. */
static void number_buffers(struct shoal_gradient_layout *layout, const struct filler *filler, const uint32_t *order,
                           uint32_t *number_of)
{
    const size_t count = layout->parameters.count;
    uint32_t first = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t which = filler->filling_of[i];
        if (filler->fillings[which].last == i)
            number_of[which] = (uint32_t)layout->buffer_count++;
    }
    for (size_t i = 0; i < count; i++)
        layout->buffers[number_of[filler->filling_of[i]]].count++;
    for (size_t b = 0; b < layout->buffer_count; b++) {
        layout->buffers[b].first = first;
        first += layout->buffers[b].count;
        layout->buffers[b].count = 0;
    }
    for (size_t i = 0; i < count; i++) {
        struct fusion_buffer *buffer = &layout->buffers[number_of[filler->filling_of[i]]];
        buffer->type = filler->fillings[filler->filling_of[i]].type;
        layout->order[buffer->first + buffer->count++] = order[i];
    }
}

static enum shoal_status fill(struct shoal_gradient_layout *layout, const struct limits *limits, const uint32_t *order,
                              char *error, size_t error_bytes)
{
    const size_t count = layout->parameters.count;
    struct filler filler = {.limits = *limits,
                            .fillings = calloc(count + 1, sizeof *filler.fillings),
                            .filling_of = calloc(count + 1, sizeof *filler.filling_of)};
    uint32_t *number_of = calloc(count + 1, sizeof *number_of);
    enum shoal_status status = SHOAL_OK;
    if (filler.fillings && filler.filling_of && number_of) {
        for (size_t i = 0; i < count; i++)
            fill_in(&filler, &layout->parameters.items[order[i]], i);
        divide_last(&filler, layout, order);
        number_buffers(layout, &filler, order, number_of);
        fusion_layout_close(layout);
    } else {
        snprintf(error, error_bytes, "no memory for a layout of %zu parameters", count);
        status = SHOAL_ERR_MEMORY;
    }
    free(filler.fillings);
    free(filler.filling_of);
    free(number_of);
    return status;
}

/* Returns the requested order, with each parameter once; the caller frees it. Returns NULL on an error, with the reason in
 * error. */
static uint32_t *take_order(const uint32_t *given, size_t count, enum shoal_status *status_out, char *error, size_t error_bytes)
{
    uint32_t *order = calloc(count + 1, sizeof *order);
    bool *is_taken = calloc(count + 1, sizeof *is_taken);
    *status_out = order && is_taken ? SHOAL_OK : SHOAL_ERR_MEMORY;
    if (*status_out != SHOAL_OK)
        snprintf(error, error_bytes, "no memory for an order of %zu parameters", count);
    for (size_t i = 0; i < count && *status_out == SHOAL_OK; i++) {
        order[i] = given ? given[i] : (uint32_t)(count - 1 - i);
        if (order[i] < count && !is_taken[order[i]]) {
            is_taken[order[i]] = true;
            continue;
        }
        snprintf(error, error_bytes, "entry %zu of order names parameter %u, %s", i, order[i],
                 order[i] < count ? "which it names before" : "which there is not");
        *status_out = SHOAL_ERR_ARGUMENT;
    }
    free(is_taken);
    if (*status_out == SHOAL_OK)
        return order;
    free(order);
    return NULL;
}

static size_t or_default(size_t value, size_t otherwise)
{
    return value ? value : otherwise;
}

/* Returns the bytes of a full buffer that each rank owns, within limits. With many ranks the shares become shorter, instead of
 * the buffers fewer and longer, because the backward pass hides less of longer buffers (decision 24). */
static size_t rank_bytes_of(const struct shoal_gradient_layout_options *options)
{
    const int ranks = options->ranks > 0 ? options->ranks : 1;
    const size_t share = or_default(options->buffer_bytes, BUFFER_BYTES) / (size_t)ranks;
    if (options->rank_bytes)
        return fusion_min(options->rank_bytes, SIZE_MAX / SHOAL_RANKS_MAX);
    return share < RANK_BYTES_MIN ? RANK_BYTES_MIN : fusion_min(share, RANK_BYTES_MAX);
}

enum shoal_status shoal_gradient_layout_create(const struct shoal_parameter *parameters, size_t parameter_count,
                                               const struct shoal_gradient_layout_options *options,
                                               struct shoal_gradient_layout **layout_out, char *error, size_t error_bytes)
{
    const struct shoal_gradient_layout_options defaults = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    char unread[FUSION_TEXT_MAX];
    struct shoal_gradient_layout *layout;
    if (!error) {
        error = unread;
        error_bytes = sizeof unread;
    }
    if (!layout_out || (options && options->struct_bytes < sizeof *options)) {
        snprintf(error, error_bytes, "%s",
                 layout_out ? "options->struct_bytes is not set: use SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT"
                            : "layout_out is NULL");
        return SHOAL_ERR_ARGUMENT;
    }
    if (!options)
        options = &defaults;
    const struct limits limits = {or_default(options->buffer_bytes, BUFFER_BYTES),
                                  fusion_min(or_default(options->first_buffer_bytes, FIRST_BUFFER_BYTES),
                                             or_default(options->buffer_bytes, BUFFER_BYTES)),
                                  rank_bytes_of(options) * (size_t)(unsigned)options->ranks};
    FUSION_TRY(fusion_layout_open(parameters, parameter_count, options->ranks, &layout, error, error_bytes));
    enum shoal_status status;
    uint32_t *order = take_order(options->order, parameter_count, &status, error, error_bytes);
    if (status == SHOAL_OK)
        status = fill(layout, &limits, order, error, error_bytes);
    free(order);
    if (status != SHOAL_OK) {
        shoal_gradient_layout_free(layout);
        return status;
    }
    *layout_out = layout;
    return SHOAL_OK;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

uint64_t shoal_gradient_layout_hash(const struct shoal_gradient_layout *layout)
{
    return layout ? layout->hash : 0;
}

size_t shoal_gradient_layout_parameters(const struct shoal_gradient_layout *layout)
{
    return layout ? layout->parameters.count : 0;
}

size_t shoal_gradient_layout_buffers(const struct shoal_gradient_layout *layout)
{
    return layout ? layout->buffer_count : 0;
}

int shoal_gradient_layout_ranks(const struct shoal_gradient_layout *layout)
{
    return layout ? layout->ranks : 0;
}

enum shoal_status shoal_gradient_layout_buffer(const struct shoal_gradient_layout *layout, size_t buffer,
                                               struct shoal_gradient_buffer *buffer_out)
{
    if (!layout || buffer >= layout->buffer_count || !shoal_struct_bytes(buffer_out))
        return SHOAL_ERR_ARGUMENT;
    const struct fusion_buffer *found = &layout->buffers[buffer];
    const struct shoal_gradient_buffer result = {
        sizeof result, found->type, found->bytes, found->used_bytes, layout->order + found->first, found->count};
    shoal_struct_copy_out(buffer_out, &result, sizeof result);
    return SHOAL_OK;
}

enum shoal_status shoal_gradient_layout_place(const struct shoal_gradient_layout *layout, size_t parameter, size_t *buffer_out,
                                              size_t *offset_out)
{
    if (!layout || parameter >= layout->parameters.count || !buffer_out || !offset_out)
        return SHOAL_ERR_ARGUMENT;
    *buffer_out = layout->places[parameter].buffer;
    *offset_out = layout->places[parameter].offset;
    return SHOAL_OK;
}
