/* Buffers of float32 that are compressed between hosts. Each passes through stages instead of one all-reduce (compress.c draws
 * them); the stages of all buffers are posted in index order. The compressor has a thread, which computes between stages; on a
 * device a stream keeps the order instead. If the reducer has no compressor, no buffer is compressed and all functions here do
 * nothing. */
#ifndef SHOAL_FUSION_COMPRESS_H
#define SHOAL_FUSION_COMPRESS_H

#include "fusion/reducer/reducer.h"

/* A collective call if buffers are compressed between hosts; otherwise does nothing. *text receives this rank's error. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_open(struct shoal_reducer *reducer, char *text, size_t text_bytes);
SHOAL_MUST_USE enum shoal_status fusion_compressor_start(struct shoal_reducer *reducer);

/* Ends the compressor's thread. Free the rest when nothing can complete on its communicators. */
void fusion_compressor_stop(struct shoal_reducer *reducer);
void fusion_compressor_free(struct shoal_reducer *reducer);

/* Allocates memory for the buffers of a layout, with all errors zero; NULL if none is compressed. fusion_compressor_take takes
 * ownership and frees the previous memory. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_prepare(const struct shoal_reducer *reducer,
                                                           const struct shoal_gradient_layout *layout, void **memory_out);
void fusion_compressor_take(struct shoal_reducer *reducer, void *memory);

bool fusion_is_compressed(const struct shoal_reducer *reducer, size_t buffer);

/* Call when a step begins: frees the requests of the last one. Call with the lock held. */
void fusion_compressor_reset(struct shoal_reducer *reducer);

/* Starts the stages of a compressed buffer; calls done at the end. Call without the lock. */
SHOAL_MUST_USE enum shoal_status fusion_compressed_post(struct shoal_reducer *reducer, size_t buffer, fusion_done_fn *done);

/* Like fusion_compressed_post(), but on a device: puts all stages on the buffer's lane at once. */
SHOAL_MUST_USE enum shoal_status fusion_compressed_enqueue(struct shoal_reducer *reducer, size_t buffer);

/* Returns the operation of a compressed buffer that is under way, or NULL while the compressor computes between two stages.
 * Call with the lock held. */
struct shoal_request *fusion_compressed_request(const struct shoal_reducer *reducer, size_t buffer);

/* Payload of a compressed buffer that this rank sends to other hosts. */
uint64_t fusion_compressed_network_bytes(const struct shoal_reducer *reducer, size_t buffer);

/* The errors of quantizing a buffer, for a checkpoint. `sent` is NULL if none are kept. */
struct fusion_residuals {
    float *sent, *sum;
    size_t sent_count, sum_count; /* elements */
};
struct fusion_residuals fusion_compressed_residuals(const struct shoal_reducer *reducer, size_t buffer);

/* Gets this rank's host and its rank there, as numbered by the compressor. Leaves both unchanged if nothing is compressed. */
void fusion_compressor_position(const struct shoal_reducer *reducer, int32_t *host_out, int32_t *local_rank_out);

#endif
