#include "fusion/reducer/relayout.h"

#include <stdlib.h>

#include "base/assert.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/reducer_memory.h"
#include "fusion/reducer/stats.h"

/* Padding is zero and stays zero, because sums of zeros are zero. */
enum shoal_status fusion_install(struct shoal_reducer *reducer, struct shoal_gradient_layout *layout)
{
    SHOAL_ASSERT(!reducer->is_armed && layout->ranks == reducer->size);
    void *memory, *compressed;
    FUSION_TRY(fusion_allocate(reducer, layout->bytes + FUSION_ALIGNMENT, &memory));
    const enum shoal_status status = fusion_compressor_prepare(reducer, layout, &compressed);
    if (status != SHOAL_OK) {
        fusion_free_memory(reducer, memory);
        return status;
    }
    fusion_flow_reset(reducer);
    fusion_compressor_take(reducer, compressed);
    fusion_stats_forget_buffers(reducer);
    fusion_free_memory(reducer, reducer->memory);
    if (reducer->layout != layout)
        shoal_gradient_layout_free(reducer->layout);
    reducer->memory = memory;
    reducer->layout = layout;
    reducer->layout_number++;
    return SHOAL_OK;
}

/* Installs rank 0's order in a layout; shoal_reducer_order still returns this rank's order. */
static enum shoal_status rebuild_in(struct shoal_reducer *reducer, uint32_t *order)
{
    const struct shoal_options options = fusion_options(reducer);
    const size_t count = reducer->layout->parameters.count;
    const struct shoal_gradient_layout_options wanted = {sizeof wanted,
                                                         reducer->size,
                                                         reducer->options.buffer_bytes,
                                                         reducer->options.first_buffer_bytes,
                                                         reducer->options.rank_bytes,
                                                         order};
    struct shoal_gradient_layout *layout = NULL;
    char error[FUSION_TEXT_MAX];
    fusion_stats_order(reducer, order);
    enum shoal_status status = shoal_broadcast(reducer->comm, order, order, count, SHOAL_INT32, 0, &options);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -2);
        return status;
    }
    status = shoal_gradient_layout_create(reducer->layout->parameters.items, count, &wanted, &layout, error, sizeof error);
    if (status != SHOAL_OK)
        return fusion_fail(reducer, status, -1, "the layout in the order of readiness: %s", error);
    if (layout->hash == reducer->layout->hash) {
        shoal_gradient_layout_free(layout); /* on all ranks alike: the layout and the views stay */
        return SHOAL_OK;
    }
    status = fusion_install(reducer, layout);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_tell_why(reducer, status, error, sizeof error);
    shoal_gradient_layout_free(layout);
    return fusion_fail(reducer, status, -1, "the buffers of the layout in the order of readiness: %.400s", error);
}

static enum shoal_status rebuild(struct shoal_reducer *reducer)
{
    uint32_t *order = calloc(reducer->layout->parameters.count + 1, sizeof *order);
    if (!order)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for the order of readiness");
    const enum shoal_status status = rebuild_in(reducer, order);
    free(order);
    return status;
}

enum shoal_status fusion_renew_layout(struct shoal_reducer *reducer)
{
    const bool is_fixed =
        reducer->options.keeps_layout || reducer->options.layout || reducer->options.order || reducer->optimizer;
    if (is_fixed || reducer->has_renewed || reducer->steps != 1)
        return SHOAL_OK;
    reducer->has_renewed = true;
    if (reducer->device)
        FUSION_TRY(fusion_device_leave_views(reducer));
    const enum shoal_status status = rebuild(reducer);
    return status == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}
