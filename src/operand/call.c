#include "operand/call.h"

#include <stdlib.h>
#include <string.h>

#include "base/setting.h"
#include "operand/makers.h"
#include "transport/transport.h"

/* ---- Creation ------------------------------------------------------------------------------------------------------------ */

static uint32_t fold(uint64_t hash)
{
    const uint32_t folded = (uint32_t)(hash ^ hash >> 32);
    return folded ? folded : 1;
}

/* Allocates scratch memory for operands with an object, if the input is small enough to travel with an announcement. */
static bool make_scratch(const struct shoal_call *call, int rank, int size)
{
    struct shoal_layout *layout = call->layout;
    const size_t element_bytes = shoal_type_bytes(call->type);
    const size_t bytes[2] = {shoal_call_bytes(call, SHOAL_INPUT, rank, size, element_bytes, rank),
                             shoal_call_bytes(call, SHOAL_OUTPUT, rank, size, element_bytes, rank)};
    bool has_all = true;
    for (int i = 0; i < 2 && bytes[SHOAL_INPUT] <= SHOAL_PAYLOAD_MAX; i++) {
        if (layout->operands[i])
            layout->scratch[i] = malloc(bytes[i] + 1);
        has_all &= !layout->operands[i] || layout->scratch[i];
    }
    return has_all;
}

static uint32_t hash_tensors(const struct shoal_tensor *tensors, size_t count)
{
    uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, "tensors", 7);
    for (size_t t = 0; t < count; t++)
        hash = shoal_hash_bytes(hash, &tensors[t].count, sizeof tensors[t].count);
    return fold(hash);
}

/* Returns NULL if out of memory. */
static struct shoal_layout *make_of_tensors(const struct shoal_call *call)
{
    const struct shoal_call_arrays *arrays = call->arrays;
    struct shoal_layout *layout = calloc(1, sizeof *layout);
    bool has_all = layout != NULL;
    for (int i = 0; i < 2 && has_all; i++) {
        layout->operands[i] = shoal_operand_of_tensors((enum shoal_block_operand)i, shoal_type_bytes(call->type),
                                                       arrays->tensors, arrays->tensor_count);
        has_all = layout->operands[i] != NULL;
    }
    if (has_all) {
        layout->detail = hash_tensors(arrays->tensors, arrays->tensor_count);
        layout->is_received_in_row = true; /* parts of the vector that the tensors make */
        return layout;
    }
    shoal_layout_free(layout);
    return NULL;
}

/* Copies the counts, and computes the offsets of the parts. Returns false if out of memory. */
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

static bool fill_parts(struct shoal_call_parts *parts, const struct shoal_call_arrays *arrays)
{
    size_t *sent_row = NULL;
    const bool has_sent =
        !arrays->sent || copy_parts(parts->size, arrays->sent, arrays->sent_at, &parts->sent, &parts->sent_at, &sent_row);
    free(sent_row);
    return has_sent && (!arrays->received || copy_parts(parts->size, arrays->received, arrays->received_at, &parts->received,
                                                        &parts->received_at, &parts->received_row));
}

static bool fill_peer_counts(struct shoal_call_parts *parts)
{
    parts->peer_counts = malloc(2 * (size_t)parts->size * sizeof *parts->peer_counts);
    parts->peer_at = calloc((size_t)parts->size, sizeof *parts->peer_at);
    if (!parts->peer_counts || !parts->peer_at)
        return false;
    for (int i = 0; i < parts->size; i++)
        parts->peer_counts[i] = (struct shoal_call_part){parts->sent[i], parts->sent_at[i]};
    return true;
}

static void leave_parts(struct shoal_call_parts *parts)
{
    /* acq_rel: what the other holder did with them happens before they are freed. */
    if (!parts || atomic_fetch_sub_explicit(&parts->holders, 1, memory_order_acq_rel) > 1)
        return;
    free(parts->sent);
    free(parts->sent_at);
    free(parts->received);
    free(parts->received_at);
    free(parts->received_row);
    free(parts->peer_at);
    free(parts->peer_counts);
    free(parts);
}

static struct shoal_call_parts *hold_parts(struct shoal_call_parts *parts)
{
    if (parts)
        atomic_fetch_add_explicit(&parts->holders, 1, memory_order_relaxed);
    return parts;
}

/* Returns NULL if out of memory. */
static struct shoal_call_parts *make_call_parts(const struct shoal_call_arrays *arrays, int size, bool has_peer_counts)
{
    struct shoal_call_parts *parts = calloc(1, sizeof *parts);
    if (!parts)
        return NULL;
    atomic_init(&parts->holders, 1);
    parts->size = size;
    if (fill_parts(parts, arrays) && (!has_peer_counts || fill_peer_counts(parts)))
        return parts;
    leave_parts(parts);
    return NULL;
}

/* Returns NULL if out of memory. */
static struct shoal_layout *make_of_parts(const struct shoal_call_arrays *arrays, int size)
{
    const bool has_peer_counts = arrays->sent && arrays->received; /* each rank sends its peers their counts */
    SHOAL_ASSERT(arrays->sent || arrays->received);
    struct shoal_layout *layout = calloc(1, sizeof *layout);
    if (layout)
        layout->parts = make_call_parts(arrays, size, has_peer_counts);
    if (!layout || !layout->parts) {
        shoal_layout_free(layout);
        return NULL;
    }
    layout->is_received_in_row = !arrays->received_at;
    /* If peers receive the counts, they are compared one by one. */
    uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, "parts", 5);
    if (!has_peer_counts)
        hash = shoal_hash_bytes(hash, arrays->sent ? arrays->sent : arrays->received, (size_t)size * sizeof(size_t));
    layout->detail = fold(hash);
    return layout;
}

bool shoal_call_lay_out(struct shoal_call *call, int rank, int size)
{
    const struct shoal_call_arrays *arrays = call->arrays;
    SHOAL_ASSERT(!call->layout);
    if (arrays->tensor_count == 1) { /* peers may access all memory that they can reach of a single tensor */
        call->input = arrays->tensors[0].input;
        call->output = arrays->tensors[0].output;
        return true;
    }
    call->layout = arrays->has_tensors ? make_of_tensors(call) : make_of_parts(arrays, size);
    if (call->layout && make_scratch(call, rank, size))
        return true;
    shoal_layout_free(call->layout);
    call->layout = NULL;
    return false;
}

/* Moves the operands that `put` does not replace. */
static void move_kept(struct shoal_layout *from, struct shoal_layout *to, struct shoal_operand *const *put)
{
    for (int i = 0; i < 2; i++) {
        if (put[i])
            continue;
        to->operands[i] = from->operands[i];
        from->operands[i] = NULL;
    }
}

bool shoal_call_put_operands(struct shoal_call *call, int rank, int size, struct shoal_operand *input,
                             struct shoal_operand *output, struct shoal_layout **former_out)
{
    struct shoal_operand *const operands[2] = {input, output};
    struct shoal_layout *const former = call->layout, *const layout = calloc(1, sizeof *layout);
    if (!layout)
        return false;
    *layout = (struct shoal_layout){.operands = {input, output}, .is_received_in_row = true};
    if (former) {
        layout->parts = hold_parts(former->parts);
        layout->is_received_in_row = former->is_received_in_row;
        layout->detail = former->detail;
        move_kept(former, layout, operands);
    }
    call->layout = layout;
    if (make_scratch(call, rank, size)) {
        *former_out = former;
        return true;
    }
    if (former)
        move_kept(layout, former, operands);
    layout->operands[SHOAL_INPUT] = layout->operands[SHOAL_OUTPUT] = NULL; /* still the caller's */
    shoal_layout_free(layout);
    call->layout = former;
    return false;
}

void shoal_layout_free(struct shoal_layout *layout)
{
    if (!layout)
        return;
    shoal_operand_drop(layout->operands[SHOAL_INPUT]);
    if (layout->operands[SHOAL_OUTPUT] != layout->operands[SHOAL_INPUT]) /* one object may be both */
        shoal_operand_drop(layout->operands[SHOAL_OUTPUT]);
    free(layout->scratch[SHOAL_INPUT]);
    free(layout->scratch[SHOAL_OUTPUT]);
    leave_parts(layout->parts);
    free(layout);
}

enum shoal_status shoal_call_drop(const struct shoal_call *calls, size_t count, enum shoal_status status)
{
    for (size_t i = 0; i < count; i++)
        shoal_layout_free(calls[i].layout);
    return status;
}

/* ---- Looking up ---------------------------------------------------------------------------------------------------------- */

/* Returns the address of a byte of an operand. A rank that has no element of an operand may pass NULL. C does not define NULL
 * plus a number, so this adds integers. */
static char *address_in(const void *operand, size_t bytes)
{
    return (char *)((uintptr_t)operand + bytes);
}

char *shoal_call_address(const struct shoal_call *call, int rank, size_t element_bytes, enum shoal_block_operand operand,
                         int part, size_t at, size_t *run)
{
    static char nothing; /* after its last element an operand may have no address */
    const struct shoal_operand *const object = shoal_call_operand(call, operand);
    const void *const whole = operand == SHOAL_INPUT ? call->input : call->output;
    if (SHOAL_UNLIKELY(object != NULL) && object->ops->address)
        return *run ? object->ops->address(object, part, at, run) : &nothing;
    return address_in(whole, (shoal_call_part_at(call, rank, operand, rank, part) + at) * element_bytes);
}

static size_t end_of_parts(const size_t *counts, const size_t *at, int size)
{
    size_t end = 0;
    for (int i = 0; i < size; i++)
        end = counts[i] ? shoal_max_size(end, at[i] + counts[i]) : end;
    return end;
}

size_t shoal_call_bytes(const struct shoal_call *call, enum shoal_block_operand operand, int rank, int size,
                        size_t element_bytes, int owner)
{
    const struct shoal_call_parts *parts = shoal_call_parts(call);
    const bool is_input = operand == SHOAL_INPUT;
    if (!parts)
        return call->count * (size_t)(shoal_call_is_partitioned(call, operand) ? size : 1) * element_bytes;
    const size_t *counts = is_input ? parts->sent : parts->received;
    if (!counts)
        return (is_input ? parts->received : parts->sent)[owner] * element_bytes;
    if (is_input && owner != rank && parts->peer_at)
        return parts->received[owner] ? (parts->peer_at[owner] + parts->received[owner]) * element_bytes : 0;
    const size_t *at = is_input ? parts->sent_at : owner == rank ? parts->received_at : parts->received_row;
    return end_of_parts(counts, at, size) * element_bytes;
}

/* Peers know the offsets of an output's parts only if the parts follow each other. An all-to-all in place overwrites what peers
 * would read. */
static bool can_reach(const struct shoal_call *call, enum shoal_block_operand operand, int rank)
{
    const struct shoal_collective_traits *traits = shoal_collective_traits(call->collective);
    const bool is_overwritten =
        call->input == call->output && traits->shape.is_input_partitioned && traits->shape.is_output_partitioned;
    if (operand == SHOAL_INPUT)
        return traits->is_input_reached && !is_overwritten && shoal_shape_contributes(&traits->shape, rank, call->root);
    return traits->is_output_reached && (!call->layout || call->layout->is_received_in_row) &&
           shoal_shape_receives(&traits->shape, rank, call->root);
}

struct shoal_call_memory shoal_call_locate(const struct shoal_call *call, enum shoal_block_operand operand, int rank, int size,
                                           size_t element_bytes)
{
    const struct shoal_operand *object = shoal_call_operand(call, operand);
    const bool is_borrowed = shoal_collective_traits(call->collective)->shape.is_reduced;
    if (!can_reach(call, operand, rank) || (object && !(is_borrowed && object->ops->lent_at)))
        return (struct shoal_call_memory){.at = NULL};
    if (object)
        return (struct shoal_call_memory){.at = object->ops->lent_at(object), .bytes = 1, .is_lent = true};
    return (struct shoal_call_memory){.at = operand == SHOAL_INPUT ? call->input : call->output,
                                      .bytes = shoal_call_bytes(call, operand, rank, size, element_bytes, rank)};
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
