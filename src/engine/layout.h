/* Where the elements of a call's operands lie in memory.
 *
 * Algorithms count the elements of a whole, or of each part, from 0; this file knows where they are. Most calls have operands
 * in a row: no layout is needed then. A struct shoal_layout describes the others: parts of different lengths and offsets,
 * several tensors, which count as one vector (in each part: one after the other), or operands on a device. Constant once made;
 * any thread, but for what device/device.h says of those. */
#ifndef SHOAL_ENGINE_LAYOUT_H
#define SHOAL_ENGINE_LAYOUT_H

#include "base/assert.h"
#include "device/device_stage.h"
#include "plan/collective_type.h"

/* All-to-all with parts of different lengths: the length and place of a peer's part, which travels beside the announcement. */
struct shoal_peer_count {
    uint64_t count;  /* elements for that peer */
    uint64_t offset; /* where they begin in the input, in elements */
};
#define SHOAL_PEER_COUNTS_MAX (SHOAL_PAYLOAD_MAX / sizeof(struct shoal_peer_count))

struct shoal_layout {
    int size; /* ranks */
    /* Several tensors; NULL for one. */
    struct shoal_tensor *tensors;
    size_t *starts; /* [tensor_count + 1]: element of a part where each begins */
    size_t tensor_count;
    /* For several tensors and operands on a device: the input and the output in a row; NULL where these would not fit beside an
     * announcement, or where the operand lies in a row itself. */
    char *input_scratch;
    char *output_scratch;
    struct shoal_device_operand *device[2]; /* the input, the output (enum shoal_operand); NULL: in host memory */
    struct shoal_device_sum *sum; /* the devices of all ranks do the work, and know where operands lie; NULL: they do not */
    /* Parts of different lengths, [size] each; NULL: equal, or the operand is a whole. */
    size_t *sent; /* of the input: elements for each rank, and where they begin */
    size_t *sent_at;
    size_t *received; /* of the output: elements from each rank, and where they begin */
    size_t *received_at;
    size_t *received_row; /* as received_at, were the parts in a row */
    size_t *peer_at;      /* where each peer's part for this rank begins in its input: known when all announcements are there */
    struct shoal_peer_count
        *peer_counts; /* [2 * size]: one for each rank; then room for those of this host's ranks, in a row */
    bool is_received_in_row;
    uint32_t detail;                /* for the descriptor */
    struct shoal_layout *next_held; /* of engine/held.c */
};

struct shoal_call {
    enum shoal_collective_type collective;
    enum shoal_type type; /* without its tag */
    uint8_t type_tag;
    enum shoal_op op;
    int root; /* or the peer of a send or receive */
    int tag;
    const void *input;
    void *output;
    size_t count; /* elements of a whole, or of the longest part */
    double scale;
    uint32_t timeout_ms;
    uint32_t trace_tag;
    struct shoal_layout *layout; /* NULL: in a row. Freed by the engine when the operation is done */
};

/* Make layouts; NULL: no memory. The arrays are copied. Sums of counts must fit into size_t.
 * `sent` and `sent_at` describe the parts of the input, `received` and `received_at` those of the output; each NULL where
 * the operand is a whole; *_at NULL: in a row. has_peer_counts: each rank tells its peers their counts (all-to-all). */
struct shoal_layout *shoal_layout_of_tensors(enum shoal_collective_type collective, enum shoal_type type, int size,
                                             const struct shoal_tensor *tensors, size_t tensor_count);
struct shoal_layout *shoal_layout_of_parts(int size, const size_t *sent, const size_t *sent_at, const size_t *received,
                                           const size_t *received_at, bool has_peer_counts);
/* The call's operands lie on a device: NULL for one that is in host memory, or that the rank does not have. They are dropped
 * with the layout. Several tensors count as one vector there, too: the device knows where they lie, and all that the rank has
 * of both operands must be there. False: no memory; nothing has changed. */
SHOAL_MUST_USE bool shoal_layout_put_on_device(struct shoal_call *call, int rank, int size, struct shoal_device_operand *input,
                                               struct shoal_device_operand *output);
/* The devices of all ranks do the work of the call. The sum is dropped with the layout. False: no memory; nothing has
 * changed. */
SHOAL_MUST_USE bool shoal_layout_put_on_peers(struct shoal_call *call, struct shoal_device_sum *sum);
/* Drops operands on a device, and a sum. NULL is allowed. */
void shoal_layout_free(struct shoal_layout *layout);

/* Whether parts are equally long. */
static inline bool shoal_layout_is_even(const struct shoal_layout *layout)
{
    return !layout->sent && !layout->received;
}

/* An operand of the call on a device; NULL: it is in host memory. */
static inline struct shoal_device_operand *shoal_call_device(const struct shoal_call *call, enum shoal_operand operand)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->device[operand];
}

/* The work that the devices of all ranks do; NULL: the engine does it. */
static inline struct shoal_device_sum *shoal_call_sum(const struct shoal_call *call)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->sum;
}

/* Whether the input stays on its device, where adapters read it. */
static inline bool shoal_call_input_stays(const struct shoal_call *call)
{
    const struct shoal_device_operand *device = shoal_call_device(call, SHOAL_OPERAND_INPUT);
    return SHOAL_UNLIKELY(device != NULL) && device->stays;
}

static inline bool shoal_call_is_on_device(const struct shoal_call *call)
{
    return SHOAL_UNLIKELY(call->layout != NULL) && (call->layout->device[0] || call->layout->device[1] || call->layout->sum);
}

/* Elements of what goes from one rank to another; this rank is one of the two, or lengths are the same on all ranks. */
static inline size_t shoal_call_length(const struct shoal_call *call, int rank, int from, int to)
{
    const struct shoal_layout *layout = call->layout;
    if (SHOAL_LIKELY(!layout) || shoal_layout_is_even(layout))
        return call->count;
    SHOAL_ASSERT(from == rank || to == rank || !layout->sent || !layout->received);
    if (layout->sent && (from == rank || !layout->received))
        return layout->sent[to];
    return layout->received[from];
}

/* Where a part of `owner`'s operand begins, in elements from its start, as seen on `rank`; of several tensors, in
 * the scratch memory where they lie in a row. */
static inline size_t shoal_call_part_at(const struct shoal_call *call, int rank, enum shoal_operand operand, int owner,
                                        int part)
{
    const struct shoal_layout *layout = call->layout;
    if (SHOAL_LIKELY(!layout) || shoal_layout_is_even(layout))
        return (size_t)part * call->count;
    if (operand == SHOAL_OPERAND_INPUT)
        return !layout->sent ? 0 : owner != rank && layout->peer_at ? layout->peer_at[owner] : layout->sent_at[part];
    return !layout->received ? 0 : owner == rank ? layout->received_at[part] : layout->received_row[part];
}

/* The address of element `at` of a part of an own operand; on a device it must be ready, and is the device's where it stays
 * there. *run becomes at most the elements that follow it in a row. */
char *shoal_call_address(const struct shoal_call *call, int rank, size_t element_bytes, enum shoal_operand operand, int part,
                         size_t at, size_t *run);

/* Bytes from the start of an operand to the end of what this rank may touch of it. */
size_t shoal_call_input_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner);
size_t shoal_call_output_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner);

/* Copies between part `part` of an own operand and `bytes` in a row. */
void shoal_call_pack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, char *row);
void shoal_call_unpack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, const char *row);

#endif
