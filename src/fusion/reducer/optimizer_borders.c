/* The borders of the optimizer's shards, and the two operations whose parts they are. Shards of equal lengths use the plain
 * operations, which are faster for small buffers. */
#include <stdlib.h>

#include "base/assert.h"
#include "fusion/layout/hash.h"
#include "fusion/reducer/optimizer_shards.h"

/* ---- Settings ------------------------------------------------------------------------------------------------------------ */

const char *fusion_borders_fault(const struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    return fusion_weights_fault(reducer->options.optimizer->weights, fusion_optimizer_degree(reducer), text, text_bytes);
}

struct fusion_option fusion_weights_option(const struct shoal_reducer *reducer)
{
    return fusion_weights_list(reducer->options.optimizer->weights, fusion_optimizer_degree(reducer));
}

uint64_t fusion_granules_hash_of(const struct shoal_reducer *reducer)
{
    return fusion_granules_hash(reducer->options.optimizer->granules, &reducer->layout->parameters);
}

/* ---- Borders ------------------------------------------------------------------------------------------------------------- */

/* Cuts the buffers in their order. spans has room for all parameters. */
static enum shoal_status cut_buffers(struct shoal_reducer *reducer, struct fusion_divider *divider, struct fusion_span *spans)
{
    const struct shoal_gradient_layout *layout = reducer->layout;
    const size_t *granules = reducer->options.optimizer->granules;
    for (size_t b = 0; b < layout->buffer_count; b++) {
        const struct fusion_buffer *buffer = &layout->buffers[b];
        for (uint32_t i = 0; i < buffer->count; i++) {
            const uint32_t parameter = layout->order[buffer->first + i];
            spans[i] = (struct fusion_span){layout->places[parameter].offset, layout->parameters.items[parameter].count,
                                            fusion_granule(granules, parameter)};
        }
        FUSION_TRY(fusion_divider_cut(divider, spans, buffer->count, buffer->bytes, shoal_type_bytes(buffer->type),
                                      &reducer->optimizer->shards[b].borders));
    }
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_cut(struct shoal_reducer *reducer)
{
    struct fusion_span *spans = calloc(reducer->layout->parameters.count + 1, sizeof *spans);
    struct fusion_divider *divider =
        fusion_divider_create(reducer->options.optimizer->weights, fusion_optimizer_degree(reducer));
    const enum shoal_status status = spans && divider ? cut_buffers(reducer, divider, spans) : SHOAL_ERR_MEMORY;
    fusion_divider_free(divider);
    free(spans);
    return status;
}

void fusion_optimizer_forget_borders(struct shoal_reducer *reducer)
{
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        fusion_borders_free(&reducer->optimizer->shards[b].borders);
}

bool fusion_optimizer_owned(const struct shoal_reducer *reducer, size_t buffer, uint64_t *own_out, uint64_t *longest_out)
{
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer || optimizer->degree < reducer->size)
        return false;
    const struct fusion_borders *borders = &optimizer->shards[buffer].borders;
    *own_out = fusion_shard_bytes(reducer, buffer);
    *longest_out = borders->each;
    for (int i = 0; borders->begins && i < optimizer->degree; i++)
        *longest_out = fusion_max(*longest_out, fusion_shard_length(borders, i));
    SHOAL_ASSERT(*own_out <= *longest_out);
    return true;
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_shard_scatter(const struct shoal_reducer *reducer, size_t buffer, struct shoal_request **request_out)
{
    const enum shoal_type type = reducer->layout->buffers[buffer].type;
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct fusion_borders *borders = &optimizer->shards[buffer].borders;
    const struct shoal_options options = fusion_options(reducer);
    struct shoal_comm *comm = optimizer->comms[FUSION_SCATTER];
    char *all = fusion_buffer_memory(reducer, buffer), *own = all + fusion_shard_begin(reducer, buffer);
    SHOAL_ASSERT(borders->counts || borders->each * (size_t)optimizer->degree == reducer->layout->buffers[buffer].bytes);
    if (borders->counts)
        return shoal_reduce_scatterv_post(comm, all, own, borders->counts, type, reducer->options.op, &options, request_out);
    return shoal_reduce_scatter_post(comm, all, own, borders->each / shoal_type_bytes(type), type, reducer->options.op,
                                     &options, request_out);
}

enum shoal_status fusion_shard_gather(const struct shoal_reducer *reducer, size_t buffer, char *memory,
                                      struct shoal_request **request_out)
{
    const enum shoal_type type = reducer->layout->buffers[buffer].type;
    const struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct fusion_borders *borders = &optimizer->shards[buffer].borders;
    const struct shoal_options options = fusion_options(reducer);
    struct shoal_comm *comm = optimizer->comms[FUSION_GATHER];
    const char *own = memory + fusion_shard_begin(reducer, buffer);
    if (borders->counts)
        return shoal_allgatherv_post(comm, own, memory, borders->counts, NULL, type, &options, request_out);
    return shoal_allgather_post(comm, own, memory, borders->each / shoal_type_bytes(type), type, &options, request_out);
}
