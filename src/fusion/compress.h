/* Buffers of float32 that travel compressed between hosts. Each goes through stages instead of one all-reduce (compress.c draws
 * them); the stages of all buffers go in index order. The compressor has a thread, which computes between stages; on a device a
 * stream keeps the order instead.
 * Where the reducer has no compressor no buffer is compressed, and all functions here do nothing. */
#ifndef SHOAL_FUSION_COMPRESS_H
#define SHOAL_FUSION_COMPRESS_H

#include "fusion/reducer.h"

/* Collective, where buffers are compressed between hosts; else nothing. *text says what a rank finds wrong. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_open(struct shoal_reducer *reducer, char *text, size_t text_bytes);
SHOAL_MUST_USE enum shoal_status fusion_compressor_start(struct shoal_reducer *reducer);

/* Ends its thread and frees its communicators: nothing is called back any more. */
void fusion_compressor_stop(struct shoal_reducer *reducer);
void fusion_compressor_free(struct shoal_reducer *reducer);

/* Memory for the buffers of a layout, with errors of nothing; NULL: none is compressed. fusion_compressor_take takes it over
 * and frees what there was before. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_prepare(const struct shoal_reducer *reducer,
                                                           const struct shoal_gradient_layout *layout, void **memory_out);
void fusion_compressor_take(struct shoal_reducer *reducer, void *memory);

bool fusion_is_compressed(const struct shoal_reducer *reducer, size_t buffer);

/* A step begins: frees the requests of the last one. With the lock. */
void fusion_compressor_reset(struct shoal_reducer *reducer);

/* Begins what a compressed buffer goes through. Without the lock; at the end it calls fusion_buffer_done. */
SHOAL_MUST_USE enum shoal_status fusion_compressed_post(struct shoal_reducer *reducer, size_t buffer);

/* The same on a device: all of it is put on the buffer's lane at once. */
SHOAL_MUST_USE enum shoal_status fusion_compressed_enqueue(struct shoal_reducer *reducer, size_t buffer);

/* The operation of a compressed buffer that is under way; NULL while something is computed between two. With the lock. */
struct shoal_request *fusion_compressed_request(const struct shoal_reducer *reducer, size_t buffer);

/* The failure of one of its communicators, with rank as the reducer counts; false: there is none. */
bool fusion_compressor_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure);
/* Fails its communicators with a cause, whose rank is the reducer's. */
void fusion_compressor_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause);

/* Bytes that it has sent to other hosts: in all, and added to an entry for each rank. */
uint64_t fusion_compressor_wire_bytes(const struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_compressor_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes);

/* Payload of a compressed buffer that this rank sends to other hosts. */
uint64_t fusion_compressed_network_bytes(const struct shoal_reducer *reducer, size_t buffer);

/* The errors of quantizing a buffer, for a checkpoint. sent NULL: none are kept. */
struct fusion_residuals {
    float *sent, *sum;
    size_t sent_count, sum_count; /* elements */
};
struct fusion_residuals fusion_compressed_residuals(const struct shoal_reducer *reducer, size_t buffer);

/* This rank's host and its rank there, as the compressor has them. Leaves both as they are where nothing is compressed. */
void fusion_compressor_position(const struct shoal_reducer *reducer, int32_t *host_out, int32_t *local_rank_out);

#endif
