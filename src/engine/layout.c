#include "engine/layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/setting.h"
#include "transport/transport.h"

/* ---- Creation ------------------------------------------------------------------------------------------------------------ */

static uint32_t fold(uint64_t hash)
{
    const uint32_t folded = (uint32_t)(hash ^ hash >> 32);
    return folded ? folded : 1;
}

/* Allocates scratch memory if the data are small enough to travel inline. */
static bool make_scratch(struct shoal_layout *layout, enum shoal_collective_type collective, enum shoal_type type, int size)
{
    const struct shoal_shape *shape = &shoal_collective_traits(collective)->shape;
    const size_t bytes = layout->starts[layout->tensor_count] * shoal_type_bytes(type);
    const size_t input_bytes = bytes * (size_t)(shape->is_input_partitioned ? size : 1);
    if (input_bytes > SHOAL_PAYLOAD_MAX)
        return true;
    layout->input_scratch = malloc(input_bytes + 1);
    layout->output_scratch = malloc(bytes * (size_t)(shape->is_output_partitioned ? size : 1) + 1);
    return layout->input_scratch && layout->output_scratch;
}

struct shoal_layout *shoal_layout_of_tensors(enum shoal_collective_type collective, enum shoal_type type, int size,
                                             const struct shoal_tensor *tensors, size_t tensor_count)
{
    struct shoal_layout *layout = calloc(1, sizeof *layout);
    if (!layout)
        return NULL;
    layout->tensors = malloc((tensor_count + 1) * sizeof *layout->tensors);
    layout->starts = malloc((tensor_count + 1) * sizeof *layout->starts);
    layout->tensor_count = tensor_count;
    if (!layout->tensors || !layout->starts) {
        shoal_layout_free(layout);
        return NULL;
    }
    uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, "tensors", 7);
    size_t start = 0;
    for (size_t t = 0; t < tensor_count; t++) {
        layout->tensors[t] = tensors[t];
        layout->starts[t] = start;
        SHOAL_ASSERT(tensors[t].count <= SIZE_MAX - start); /* the arguments have been checked */
        start += tensors[t].count;
        hash = shoal_hash_bytes(hash, &tensors[t].count, sizeof tensors[t].count);
    }
    layout->starts[tensor_count] = start;
    layout->detail = fold(hash);
    if (make_scratch(layout, collective, type, size))
        return layout;
    shoal_layout_free(layout);
    return NULL;
}

/* Copies the counts, and computes where the parts begin. Returns false if out of memory. */
static bool copy_parts(int size, const size_t *counts, const size_t *at, size_t **counts_out, size_t **at_out, size_t **row_out)
{
    const size_t bytes = (size_t)size * sizeof(size_t);
    size_t *row = *row_out = malloc(bytes);
    *counts_out = malloc(bytes);
    *at_out = malloc(bytes);
    if (!row || !*counts_out || !*at_out)
        return false;
    size_t begin = 0;
    for (int i = 0; i < size; i++) {
        SHOAL_ASSERT(counts[i] <= SIZE_MAX - begin); /* the arguments have been checked */
        row[i] = begin;
        begin += counts[i];
    }
    memcpy(*counts_out, counts, bytes);
    memcpy(*at_out, at ? at : row, bytes);
    return true;
}

static bool fill_parts(struct shoal_layout *layout, const size_t *sent, const size_t *sent_at, const size_t *received,
                       const size_t *received_at)
{
    size_t *sent_row = NULL;
    const bool has_sent = !sent || copy_parts(layout->size, sent, sent_at, &layout->sent, &layout->sent_at, &sent_row);
    free(sent_row);
    if (!has_sent)
        return false;
    layout->is_received_in_row = !received_at;
    return !received ||
           copy_parts(layout->size, received, received_at, &layout->received, &layout->received_at, &layout->received_row);
}

static bool layout_fill_peer_counts(struct shoal_layout *layout)
{
    layout->peer_counts = malloc(2 * (size_t)layout->size * sizeof *layout->peer_counts);
    layout->peer_at = calloc((size_t)layout->size, sizeof *layout->peer_at);
    if (!layout->peer_counts || !layout->peer_at)
        return false;
    for (int i = 0; i < layout->size; i++)
        layout->peer_counts[i] = (struct shoal_peer_count){layout->sent[i], layout->sent_at[i]};
    return true;
}

struct shoal_layout *shoal_layout_of_parts(int size, const size_t *sent, const size_t *sent_at, const size_t *received,
                                           const size_t *received_at, bool has_peer_counts)
{
    SHOAL_ASSERT((sent || received) && (!has_peer_counts || (sent && received)));
    struct shoal_layout *layout = calloc(1, sizeof *layout);
    if (!layout)
        return NULL;
    layout->size = size;
    if (!fill_parts(layout, sent, sent_at, received, received_at) || (has_peer_counts && !layout_fill_peer_counts(layout))) {
        shoal_layout_free(layout);
        return NULL;
    }
    /* If peers receive the counts, they are compared one by one. */
    uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, "parts", 5);
    if (!has_peer_counts)
        hash = shoal_hash_bytes(hash, sent ? sent : received, (size_t)size * sizeof(size_t));
    layout->detail = fold(hash);
    return layout;
}

/* Like make_scratch(), but for each operand separately. */
static bool make_device_scratch(struct shoal_layout *layout, struct shoal_call call, int rank, int size)
{
    const size_t element = shoal_type_bytes(call.type);
    if (layout->tensors) /* it has scratch memory already */
        return true;
    call.layout = layout;
    const size_t input_bytes = shoal_call_input_bytes(&call, rank, size, element, rank);
    if (input_bytes > SHOAL_PAYLOAD_MAX)
        return true;
    if (layout->device[SHOAL_INPUT])
        layout->input_scratch = malloc(input_bytes + 1);
    if (layout->device[SHOAL_OUTPUT])
        layout->output_scratch = malloc(shoal_call_output_bytes(&call, rank, size, element, rank) + 1);
    return !layout->device[SHOAL_INPUT] == !layout->input_scratch && !layout->device[SHOAL_OUTPUT] == !layout->output_scratch;
}

static void drop_devices(struct shoal_layout *layout)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(layout->device); i++) {
        if (layout->device[i])
            layout->device[i]->ops->drop(layout->device[i]);
    }
    if (layout->sum)
        shoal_device_sum_drop(layout->sum);
}

bool shoal_layout_put_on_device(struct shoal_call *call, int rank, int size, struct shoal_device_operand *input,
                                struct shoal_device_operand *output)
{
    struct shoal_layout *layout = call->layout ? call->layout : calloc(1, sizeof *layout);
    if (!layout)
        return false;
    layout->device[SHOAL_INPUT] = input;
    layout->device[SHOAL_OUTPUT] = output;
    if (make_device_scratch(layout, *call, rank, size)) {
        layout->is_received_in_row |= !call->layout;
        free(layout->tensors); /* the device knows the tensors */
        layout->tensors = NULL;
        call->layout = layout;
        return true;
    }
    free(layout->input_scratch);
    free(layout->output_scratch);
    layout->input_scratch = layout->output_scratch = NULL;
    layout->device[SHOAL_INPUT] = layout->device[SHOAL_OUTPUT] = NULL;
    if (layout != call->layout)
        free(layout);
    return false;
}

bool shoal_layout_put_on_peers(struct shoal_call *call, struct shoal_device_sum *sum)
{
    if (!call->layout)
        call->layout = calloc(1, sizeof *call->layout);
    if (call->layout)
        call->layout->sum = sum;
    return call->layout != NULL;
}

void shoal_layout_free(struct shoal_layout *layout)
{
    if (!layout)
        return;
    drop_devices(layout);
    free(layout->tensors);
    free(layout->starts);
    free(layout->input_scratch);
    free(layout->output_scratch);
    free(layout->sent);
    free(layout->sent_at);
    free(layout->received);
    free(layout->received_at);
    free(layout->received_row);
    free(layout->peer_at);
    free(layout->peer_counts);
    free(layout);
}

/* ---- Looking up ---------------------------------------------------------------------------------------------------------- */

/* Returns the last tensor that begins at or before the element and is not empty there. */
static size_t find_tensor(const struct shoal_layout *layout, size_t at)
{
    size_t low = 0, high = layout->tensor_count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (layout->starts[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    SHOAL_ASSERT(layout->starts[low] <= at && at <= layout->starts[low + 1]);
    return low;
}

/* After the last element the device may have no address. */
static char *device_address(const struct shoal_device_operand *device, int part, size_t at, size_t *run)
{
    static char nothing;
    return *run ? device->ops->address(device, part, at, run) : &nothing;
}

/* Returns the address of a byte of an operand. A rank that has no element of an operand may pass NULL. C does not define NULL
 * plus a number, so this adds integers. */
static char *address_in(const void *operand, size_t bytes)
{
    return (char *)((uintptr_t)operand + bytes);
}

char *shoal_call_address(const struct shoal_call *call, int rank, size_t element_bytes, enum shoal_block_operand operand,
                         int part, size_t at, size_t *run)
{
    const struct shoal_layout *layout = call->layout;
    const bool is_input = operand == SHOAL_INPUT;
    const void *const whole = is_input ? call->input : call->output;
    if (SHOAL_LIKELY(!layout))
        return address_in(whole, ((size_t)part * call->count + at) * element_bytes);
    if (layout->device[operand] && !layout->device[operand]->stays)
        return device_address(layout->device[operand], part, at, run);
    if (!layout->tensors)
        return address_in(whole, (shoal_call_part_at(call, rank, operand, rank, part) + at) * element_bytes);
    const size_t t = find_tensor(layout, at);
    const struct shoal_tensor *tensor = &layout->tensors[t];
    *run = shoal_min_size(*run, layout->starts[t + 1] - at);
    return address_in(is_input ? tensor->input : tensor->output,
                      ((size_t)part * tensor->count + at - layout->starts[t]) * element_bytes);
}

static size_t end_of_parts(const size_t *counts, const size_t *at, int size)
{
    size_t end = 0;
    for (int i = 0; i < size; i++)
        end = counts[i] ? shoal_max_size(end, at[i] + counts[i]) : end;
    return end;
}

size_t shoal_call_input_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner)
{
    const struct shoal_layout *layout = call->layout;
    if (!layout || (shoal_layout_is_even(layout) && !layout->tensors))
        return call->count * (size_t)(shoal_collective_traits(call->collective)->shape.is_input_partitioned ? size : 1) *
               element_bytes;
    if (layout->tensors)
        return 0;
    if (!layout->sent)
        return layout->received[owner] * element_bytes;
    if (owner != rank && layout->peer_at)
        return layout->received[owner] ? (layout->peer_at[owner] + layout->received[owner]) * element_bytes : 0;
    return end_of_parts(layout->sent, layout->sent_at, size) * element_bytes;
}

size_t shoal_call_output_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner)
{
    const struct shoal_layout *layout = call->layout;
    if (!layout || (shoal_layout_is_even(layout) && !layout->tensors))
        return call->count * (size_t)(shoal_collective_traits(call->collective)->shape.is_output_partitioned ? size : 1) *
               element_bytes;
    if (layout->tensors)
        return 0;
    if (!layout->received)
        return layout->sent[owner] * element_bytes;
    return end_of_parts(layout->received, owner == rank ? layout->received_at : layout->received_row, size) * element_bytes;
}

/* ---- Copying ------------------------------------------------------------------------------------------------------------- */

void shoal_call_pack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, char *row)
{
    for (size_t at = 0, run; at < count; at += run) {
        run = count - at;
        const char *from = shoal_call_address(call, rank, element_bytes, SHOAL_INPUT, part, at, &run);
        memcpy(row + at * element_bytes, from, run * element_bytes);
    }
}

void shoal_call_unpack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, const char *row)
{
    for (size_t at = 0, run; at < count; at += run) {
        run = count - at;
        char *to = shoal_call_address(call, rank, element_bytes, SHOAL_OUTPUT, part, at, &run);
        if (to != row + at * element_bytes) /* in place otherwise */
            memcpy(to, row + at * element_bytes, run * element_bytes);
    }
}
