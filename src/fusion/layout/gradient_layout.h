/* The buffer and offset of each parameter. See the public header. Constant once made; any thread.
 *
 *     buffer 0   | p7      | p6  | padding |     p5 of another type opens buffer 1
 *                0         64n   64m       a multiple of 64 * ranks
 */
#ifndef SHOAL_FUSION_GRADIENT_LAYOUT_H
#define SHOAL_FUSION_GRADIENT_LAYOUT_H

#include "fusion/layout/parameters.h"

struct fusion_place {
    uint32_t buffer;
    size_t offset; /* bytes */
};

struct fusion_buffer {
    enum shoal_type type;
    size_t begin; /* sum of the bytes of earlier buffers */
    size_t bytes;
    size_t used_bytes;
    uint32_t first; /* index into `order` */
    uint32_t count;
};

struct shoal_gradient_layout {
    int ranks;
    struct fusion_parameters parameters;
    struct fusion_place *places;   /* [parameters.count] */
    uint32_t *order;               /* [parameters.count]: the parameters of buffer 0, then of buffer 1 ... */
    struct fusion_buffer *buffers; /* [buffer_count] */
    size_t buffer_count;
    size_t bytes; /* of all buffers */
    uint64_t hash;
};

/* Returns a layout with copied parameters, empty order and buffers, and room for one buffer per parameter. */
SHOAL_MUST_USE enum shoal_status fusion_layout_open(const struct shoal_parameter *parameters, size_t count, int ranks,
                                                    struct shoal_gradient_layout **layout_out, char *error, size_t error_bytes);

/* Computes places, begins, bytes and hash from buffers (type, first, count) and order, which contains each parameter once. */
void fusion_layout_close(struct shoal_gradient_layout *layout);

SHOAL_MUST_USE enum shoal_status fusion_layout_copy(const struct shoal_gradient_layout *layout,
                                                    struct shoal_gradient_layout **copy_out, char *error, size_t error_bytes);

#endif
