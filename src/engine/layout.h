/* Where the elements of a call's operands are in memory.
 *
 * Algorithms count the elements of a whole operand, or of each part, from 0; this file converts these numbers to addresses. The
 * operands of most calls are contiguous and need no layout. A struct shoal_layout describes the others: parts of different
 * lengths and offsets; several tensors, which count as one vector (in each part, one after the other); operands on a device. A
 * layout is constant once made. Any thread, except as device/device.h restricts operands on a device. */
#ifndef SHOAL_ENGINE_LAYOUT_H
#define SHOAL_ENGINE_LAYOUT_H

#include "base/assert.h"
#include "device/device_stage.h"
#include "plan/collective_type.h"

/* For an all-to-all with parts of different lengths: the length and offset of a peer's part, which travel with the
 * announcement. */
struct shoal_peer_count {
    uint64_t count;  /* elements for that peer */
    uint64_t offset; /* offset in the input, in elements */
};
#define SHOAL_PEER_COUNTS_MAX (SHOAL_PAYLOAD_MAX / sizeof(struct shoal_peer_count))

struct shoal_layout {
    int size; /* number of ranks */
    /* Several tensors; NULL for one. */
    struct shoal_tensor *tensors;
    size_t *starts; /* [tensor_count + 1]: first element of each tensor in a part */
    size_t tensor_count;
    /* For several tensors and operands on a device: contiguous copies of the input and the output. NULL if they would not fit
     * into an announcement's payload, or if the operand itself is contiguous. */
    char *input_scratch;
    char *output_scratch;
    struct shoal_device_operand *device[2]; /* the input, the output (enum shoal_block_operand); NULL: in host memory */
    struct shoal_device_sum *sum; /* work that the devices of all ranks do, with operands that they know; NULL: none */
    /* Parts of different lengths, [size] each; NULL if equal or if the operand is not partitioned. */
    size_t *sent; /* input: elements for each rank, and where they begin */
    size_t *sent_at;
    size_t *received; /* output: elements from each rank, and where they begin */
    size_t *received_at;
    size_t *received_row;                 /* like received_at, but as if the parts were contiguous */
    size_t *peer_at;                      /* after all announcements: offset of each peer's part for this rank in its input */
    struct shoal_peer_count *peer_counts; /* [2 * size]: one for each rank; then room for those of this host's ranks, packed */
    bool is_received_in_row;
    uint32_t detail;                /* for the descriptor */
    struct shoal_layout *next_held; /* used by engine/held.c */
};

struct shoal_call {
    enum shoal_collective_type collective;
    enum shoal_type type; /* without its tag */
    uint8_t type_tag;
    enum shoal_op op;
    int root; /* the root, or the peer of a send or receive */
    int tag;
    const void *input;
    void *output;
    size_t count; /* elements of a whole operand, or of the longest part */
    double scale;
    uint32_t timeout_ms;
    uint32_t trace_tag;
    struct shoal_layout *layout; /* NULL: contiguous operands. The engine frees it when the operation is done */
};

/* Create layouts. Return NULL if out of memory. The arrays are copied. Sums of counts must fit into size_t. `sent` and
 * `sent_at` describe the parts of the input, `received` and `received_at` those of the output. Each is NULL if the operand is
 * not partitioned; *_at is NULL if its parts are contiguous. has_peer_counts: each rank sends its peers their counts
 * (all-to-all). */
struct shoal_layout *shoal_layout_of_tensors(enum shoal_collective_type collective, enum shoal_type type, int size,
                                             const struct shoal_tensor *tensors, size_t tensor_count);
struct shoal_layout *shoal_layout_of_parts(int size, const size_t *sent, const size_t *sent_at, const size_t *received,
                                           const size_t *received_at, bool has_peer_counts);
/* Puts the call's operands on a device. NULL for an operand that is in host memory or that the rank does not have. The operands
 * are dropped with the layout. Several tensors also count as one vector there: the device knows where they are, and everything
 * that the rank has of both operands must be on it. Returns false if out of memory; then nothing has changed. */
SHOAL_MUST_USE bool shoal_layout_put_on_device(struct shoal_call *call, int rank, int size, struct shoal_device_operand *input,
                                               struct shoal_device_operand *output);
/* Lets the devices of all ranks do the work of the call. The sum is dropped with the layout. Returns false if out of memory;
 * then nothing has changed. */
SHOAL_MUST_USE bool shoal_layout_put_on_peers(struct shoal_call *call, struct shoal_device_sum *sum);
/* Also drops the layout's operands on a device, and its sum. NULL is allowed. */
void shoal_layout_free(struct shoal_layout *layout);

/* Returns true if all parts have the same length. */
static inline bool shoal_layout_is_even(const struct shoal_layout *layout)
{
    return !layout->sent && !layout->received;
}

/* Returns an operand of the call on a device, or NULL if it is in host memory. */
static inline struct shoal_device_operand *shoal_call_device(const struct shoal_call *call, enum shoal_block_operand operand)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->device[operand];
}

/* Returns the work that the devices of all ranks do, or NULL if the engine does it. */
static inline struct shoal_device_sum *shoal_call_sum(const struct shoal_call *call)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->sum;
}

/* Returns true if the input stays on its device, where adapters read it. */
static inline bool shoal_call_input_stays(const struct shoal_call *call)
{
    const struct shoal_device_operand *device = shoal_call_device(call, SHOAL_INPUT);
    return SHOAL_UNLIKELY(device != NULL) && device->stays;
}

static inline bool shoal_call_is_on_device(const struct shoal_call *call)
{
    return SHOAL_UNLIKELY(call->layout != NULL) && (call->layout->device[0] || call->layout->device[1] || call->layout->sum);
}

/* Returns the elements that one rank sends to another. This rank must be one of the two, unless lengths are the same on all
 * ranks. */
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

/* Returns the offset of a part of `owner`'s operand, in elements from its start, as seen on `rank`. For several tensors it is
 * the offset in the contiguous scratch memory. */
static inline size_t shoal_call_part_at(const struct shoal_call *call, int rank, enum shoal_block_operand operand, int owner,
                                        int part)
{
    const struct shoal_layout *layout = call->layout;
    if (SHOAL_LIKELY(!layout) || shoal_layout_is_even(layout))
        return (size_t)part * call->count;
    if (operand == SHOAL_INPUT)
        return !layout->sent ? 0 : owner != rank && layout->peer_at ? layout->peer_at[owner] : layout->sent_at[part];
    return !layout->received ? 0 : owner == rank ? layout->received_at[part] : layout->received_row[part];
}

/* Returns the address of element `at` of a part of this rank's operand. An operand on a device must be ready; if it stays
 * there, the address is the device's. *run is reduced to the number of contiguous elements from there. */
char *shoal_call_address(const struct shoal_call *call, int rank, size_t element_bytes, enum shoal_block_operand operand,
                         int part, size_t at, size_t *run);

/* Bytes from the start of an operand to the end of what this rank may access of it. */
size_t shoal_call_input_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner);
size_t shoal_call_output_bytes(const struct shoal_call *call, int rank, int size, size_t element_bytes, int owner);

/* Copy between part `part` of this rank's operand and contiguous memory. */
void shoal_call_pack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, char *row);
void shoal_call_unpack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, const char *row);

#endif
