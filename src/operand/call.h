/* A call, and where the elements of its operands are.
 *
 * Algorithms count the elements of a whole operand, or of each part, from 0; this file converts these numbers to addresses. The
 * operands of most calls are plain memory in equal parts and need no layout. A struct shoal_layout describes the others: parts
 * of different lengths and offsets, of which peers also compute addresses; and operands that are not plain memory
 * (operand/operand.h). A layout is constant once made. Any thread, except for the functions of operand/operand.h. */
#ifndef SHOAL_OPERAND_CALL_H
#define SHOAL_OPERAND_CALL_H

#include <stdatomic.h>

#include "base/assert.h"
#include "operand/operand.h"
#include "transport/transport.h"

/* For an all-to-all with parts of different lengths: the length and offset of a peer's part, which travel with the
 * announcement. */
struct shoal_call_part {
    uint64_t count;  /* elements for that peer */
    uint64_t offset; /* offset in the input, in elements */
};
#define SHOAL_CALL_PARTS_MAX (SHOAL_PAYLOAD_MAX / sizeof(struct shoal_call_part))

/* Parts of different lengths. If an owner copies operands, two layouts share them: the call's, and the one that it had
 * before. */
struct shoal_call_parts {
    atomic_int holders; /* layouts */
    int size;           /* number of ranks */
    /* [size] each; NULL if equal or if the operand is not partitioned. */
    size_t *sent; /* input: elements for each rank, and their offsets */
    size_t *sent_at;
    size_t *received; /* output: elements from each rank, and their offsets */
    size_t *received_at;
    size_t *received_row; /* like received_at, but as if the parts were contiguous */
    /* Only the engine uses these. */
    size_t *peer_at;                     /* after all announcements: offset of each peer's part for this rank in its input */
    struct shoal_call_part *peer_counts; /* [2 * size]: one for each rank; then room for those of this host's ranks, packed */
};

struct shoal_layout {
    /* The input and the output (enum shoal_block_operand). NULL: plain memory, or the rank does not have it. */
    struct shoal_operand *operands[2];
    /* For operands with an object: memory for a contiguous copy of each. NULL if the input would not fit into an announcement's
     * payload. */
    char *scratch[2];
    struct shoal_call_parts *parts; /* NULL if all have the same length */
    bool is_received_in_row;
    uint32_t detail; /* for the descriptor */
};

/* The arrays of the user that describe a call's operands: lengths and offsets of parts, or several tensors. */
struct shoal_call_arrays {
    const size_t *sent, *sent_at;         /* the input's parts; sent_at is NULL if they are contiguous */
    const size_t *received, *received_at; /* the output's parts */
    const struct shoal_tensor *tensors;
    size_t tensor_count;
    bool has_tensors;
};

/* The only description of a call, from the public function to its end. */
struct shoal_call {
    const char *name; /* the public function's name, for messages; NULL for internal calls */
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
    void *stream;                           /* the caller's, for operands on a device */
    const struct shoal_call_arrays *arrays; /* NULL if none; valid until the call is posted */
    struct shoal_layout *layout;            /* NULL: plain memory in equal parts. The engine frees it when the call is done */
};

/* Makes the operands that the call's arrays describe, for a rank of `size`. Sums of counts must fit into size_t. A single
 * tensor becomes plain memory. Returns false if out of memory; then nothing has changed. */
SHOAL_MUST_USE bool shoal_call_lay_out(struct shoal_call *call, int rank, int size);
/* Replaces the call's operands, by a layout with these; NULL keeps what there is. One object may be both. They are dropped with
 * the layout. *former_out becomes the caller's: the layout that the call had, with the operands that were replaced, or NULL.
 * Returns false if out of memory; then nothing has changed. */
SHOAL_MUST_USE bool shoal_call_put_operands(struct shoal_call *call, int rank, int size, struct shoal_operand *input,
                                            struct shoal_operand *output, struct shoal_layout **former_out);
/* Also drops the operands. NULL is allowed. */
void shoal_layout_free(struct shoal_layout *layout);
/* Frees the layouts of calls that are not posted; returns status. */
enum shoal_status shoal_call_drop(const struct shoal_call *calls, size_t count, enum shoal_status status);

/* Returns the call's parts, or NULL if all have the same length. */
static inline struct shoal_call_parts *shoal_call_parts(const struct shoal_call *call)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->parts;
}

/* Returns true for an all-to-all with parts of different lengths: ranks send their peers the counts. */
static inline bool shoal_call_has_peer_counts(const struct shoal_call *call)
{
    return shoal_call_parts(call) && call->layout->parts->peer_counts;
}

/* Returns true for a send or a receive: the call's root is its peer. */
static inline bool shoal_call_has_peer(enum shoal_collective_type collective)
{
    return collective == SHOAL_COLLECTIVE_SEND || collective == SHOAL_COLLECTIVE_RECV;
}

/* Returns true if the operand has a part for each rank. */
static inline bool shoal_call_is_partitioned(const struct shoal_call *call, enum shoal_block_operand operand)
{
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    return operand == SHOAL_INPUT ? shape->is_input_partitioned : shape->is_output_partitioned;
}

/* Returns true if several tensors are one vector. A single tensor is plain memory. */
static inline bool shoal_call_has_tensors(const struct shoal_call *call)
{
    return call->arrays && call->arrays->has_tensors && call->arrays->tensor_count != 1;
}

/* Returns the object of an operand, or NULL if it is plain memory. */
static inline struct shoal_operand *shoal_call_operand(const struct shoal_call *call, enum shoal_block_operand operand)
{
    return SHOAL_LIKELY(!call->layout) ? NULL : call->layout->operands[operand];
}

/* Returns true if an owner works on an operand while the call is under way. */
static inline bool shoal_call_is_asynchronous(const struct shoal_call *call)
{
    return SHOAL_UNLIKELY(call->layout != NULL) && (shoal_operand_is_late(call->layout->operands[SHOAL_INPUT]) ||
                                                    shoal_operand_is_late(call->layout->operands[SHOAL_OUTPUT]) ||
                                                    shoal_operand_runs(call->layout->operands[SHOAL_INPUT]));
}

/* Returns who does the steps of the plan. Ranks compare it. */
static inline enum shoal_way shoal_call_way(const struct shoal_call *call)
{
    return shoal_operand_runs(shoal_call_operand(call, SHOAL_INPUT)) ? SHOAL_WAY_OWNERS : SHOAL_WAY_ENGINES;
}

/* Returns the elements that one rank sends to another. This rank must be one of the two, unless lengths are the same on all
 * ranks. */
static inline size_t shoal_call_length(const struct shoal_call *call, int rank, int from, int to)
{
    const struct shoal_call_parts *parts = shoal_call_parts(call);
    if (SHOAL_LIKELY(!parts))
        return call->count;
    SHOAL_ASSERT(from == rank || to == rank || !parts->sent || !parts->received);
    if (parts->sent && (from == rank || !parts->received))
        return parts->sent[to];
    return parts->received[from];
}

/* Returns the offset of a part of `owner`'s operand, in elements from its start, as seen on `rank`. For several tensors it is
 * the offset in the contiguous scratch memory. */
static inline size_t shoal_call_part_at(const struct shoal_call *call, int rank, enum shoal_block_operand operand, int owner,
                                        int part)
{
    const struct shoal_call_parts *parts = shoal_call_parts(call);
    if (SHOAL_LIKELY(!parts))
        return (size_t)part * call->count;
    if (operand == SHOAL_INPUT)
        return !parts->sent ? 0 : owner != rank && parts->peer_at ? parts->peer_at[owner] : parts->sent_at[part];
    return !parts->received ? 0 : owner == rank ? parts->received_at[part] : parts->received_row[part];
}

/* Returns the address of element `at` of a part of this rank's operand, in a range that is ready. *run is reduced to the number
 * of contiguous elements from there. */
char *shoal_call_address(const struct shoal_call *call, int rank, size_t element_bytes, enum shoal_block_operand operand,
                         int part, size_t at, size_t *run);

/* Returns the bytes from the start of `owner`'s operand to the last one that this rank may access. */
size_t shoal_call_bytes(const struct shoal_call *call, enum shoal_block_operand operand, int rank, int size,
                        size_t element_bytes, int owner);

/* Memory of an operand that peers can reach; `at` is NULL if they cannot. */
struct shoal_call_memory {
    const void *at;
    size_t bytes;
    bool is_lent; /* `at` is its first element, in a ring */
};
/* Returns where peers can reach an operand of this rank, if algorithms use that. An operand that is only lent is returned for
 * calls that borrow: reductions. A peer touches only operands that its plan names, and this rank's plan ends after that. */
struct shoal_call_memory shoal_call_locate(const struct shoal_call *call, enum shoal_block_operand operand, int rank, int size,
                                           size_t element_bytes);

/* Returns memory of a small operand in which its elements are contiguous: its own, or the scratch memory. */
static inline char *shoal_call_contiguous(const struct shoal_call *call, enum shoal_block_operand operand)
{
    if (SHOAL_UNLIKELY(call->layout != NULL) && call->layout->scratch[operand])
        return call->layout->scratch[operand];
    return (char *)(uintptr_t)(operand == SHOAL_INPUT ? call->input : call->output);
}

/* Copy between part `part` of this rank's operand and contiguous memory. */
void shoal_call_pack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, char *row);
void shoal_call_unpack(const struct shoal_call *call, int rank, size_t element_bytes, int part, size_t count, const char *row);

#endif
