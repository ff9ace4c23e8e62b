/* The work on a full buffer of gradients on a device, put on the buffer's lane. */
#include "fusion/reducer/device_buffer.h"

#include "base/assert.h"
#include "device/gpu_packer.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/measure.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"

/* Puts the copy of a part into the buffer on the lane. A sum that LOCAL steps have left there stays. */
static enum shoal_status device_copy_in(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part,
                                        char *view, int lane)
{
    struct shoal_gpu_packer *packer = fusion_device_packer(reducer);
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    const size_t bytes = part->count * shoal_type_bytes(type);
    fusion_stats_copied(reducer, bytes);
    return fusion_marks_have_sum(reducer, parameter) ? shoal_gpu_packer_add(packer, lane, type, view, part->memory, part->count)
                                                     : shoal_gpu_packer_copy(packer, lane, view, part->memory, bytes);
}

static enum shoal_status device_copy_out(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part,
                                         char *view, int lane)
{
    const size_t bytes = part->count * shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
    fusion_stats_copied(reducer, bytes);
    return shoal_gpu_packer_copy(fusion_device_packer(reducer), lane, part->memory, view, bytes);
}

enum shoal_status fusion_device_copy_parts(struct shoal_reducer *reducer, size_t index, fusion_copy_fn copy)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        const size_t element = shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
        for (const struct fusion_part *part = fusion_marks_parts(reducer, parameter); part; part = part->next) {
            char *view = fusion_view(reducer, parameter) + part->offset * element;
            if (part->memory != view && part->count)
                FUSION_TRY(copy(reducer, parameter, part, view, fusion_device_lane(index)));
        }
    }
    return SHOAL_OK;
}

static enum shoal_status clear_view(struct shoal_reducer *reducer, size_t parameter)
{
    const int lane = fusion_device_lane(reducer->layout->places[parameter].buffer);
    return shoal_gpu_packer_clear(fusion_device_packer(reducer), lane, fusion_view(reducer, parameter),
                                  fusion_parameter_bytes(fusion_parameter(reducer, parameter)));
}

/* Zeroes parameters without a gradient, because other ranks may have one. */
static enum shoal_status clear_unused(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        if (!fusion_marks_parts(reducer, parameter) && !fusion_marks_have_sum(reducer, parameter))
            FUSION_TRY(clear_view(reducer, parameter));
    }
    return SHOAL_OK;
}

static enum shoal_status reduce_buffer(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    char *memory = fusion_buffer_memory(reducer, index);
    const struct shoal_options options = fusion_buffer_options(reducer, index);
    struct shoal_request *request;
    if (fusion_is_compressed(reducer, index))
        return fusion_compressed_enqueue(reducer, index);
    FUSION_TRY(shoal_allreduce_post(reducer->comm, memory, memory, buffer->bytes / shoal_type_bytes(buffer->type), buffer->type,
                                    reducer->options.op, &options, &request));
    return fusion_device_keep(reducer, index, request);
}

static enum shoal_status put_back(struct shoal_reducer *reducer, size_t index)
{
    return reducer->options.results_in_views ? SHOAL_OK : fusion_device_copy_parts(reducer, index, device_copy_out);
}

static enum shoal_status enqueue_buffer(struct shoal_reducer *reducer, size_t index)
{
    FUSION_TRY(shoal_gpu_packer_begin(fusion_device_packer(reducer), fusion_device_lane(index)));
    FUSION_TRY(fusion_device_copy_parts(reducer, index, device_copy_in));
    FUSION_TRY(clear_unused(reducer, index));
    FUSION_TRY(fusion_measure_own(reducer, index));
    FUSION_TRY(reduce_buffer(reducer, index));
    if (!fusion_scales_late(reducer))
        FUSION_TRY(fusion_measure_averages(reducer, index, 1));
    return fusion_puts_back_late(reducer) ? SHOAL_OK : put_back(reducer, index);
}

enum shoal_status fusion_device_post(struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_computes_on_device(reducer) && fusion_marks_fill(reducer, buffer));
    enum shoal_status status = fusion_device_look(reducer);
    if (status == SHOAL_OK) {
        status = enqueue_buffer(reducer, buffer);
        if (status == SHOAL_OK)
            return SHOAL_OK;
        status = fusion_device_fail(reducer, buffer, status, "posted");
    }
    shoal_gpu_packer_give_back(fusion_device_packer(reducer)); /* the caller may end the step without finish */
    return status;
}

static enum shoal_status collect_buffer(struct shoal_reducer *reducer, size_t buffer)
{
    struct shoal_gpu_packer *packer = fusion_device_packer(reducer);
    FUSION_TRY(shoal_gpu_packer_begin(packer, fusion_device_lane(buffer)));
    FUSION_TRY(fusion_device_copy_parts(reducer, buffer, device_copy_in));
    return shoal_gpu_packer_join(packer, fusion_device_lane(buffer));
}

enum shoal_status fusion_device_collect(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->step == SHOAL_STEP_LOCAL);
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const enum shoal_status status = collect_buffer(reducer, b);
        if (status != SHOAL_OK)
            return fusion_device_fail(reducer, b, status, "filled");
    }
    return SHOAL_OK;
}

enum shoal_status fusion_device_clear(struct shoal_reducer *reducer, size_t parameter)
{
    const enum shoal_status status = clear_view(reducer, parameter);
    return status == SHOAL_OK ? SHOAL_OK
                              : fusion_device_fail(reducer, reducer->layout->places[parameter].buffer, status, "cleared");
}

static enum shoal_status multiply_buffer(struct shoal_reducer *reducer, size_t index, double factor)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    FUSION_TRY(shoal_gpu_packer_scale(fusion_device_packer(reducer), fusion_device_lane(index), buffer->type,
                                      fusion_buffer_memory(reducer, index), buffer->bytes / shoal_type_bytes(buffer->type),
                                      factor));
    return put_back(reducer, index);
}

enum shoal_status fusion_device_join(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    SHOAL_ASSERT(fusion_puts_back_late(reducer) || factor == 1);
    /* Later buffers of the same lane are posted by now, so without callbacks the last one of each lane is enough. */
    const bool is_last = buffer + SHOAL_GPU_LANES >= reducer->layout->buffer_count;
    enum shoal_status status = SHOAL_OK;
    if (fusion_device_look(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (fusion_puts_back_late(reducer))
        status = multiply_buffer(reducer, buffer, factor);
    if (status == SHOAL_OK && (is_last || reducer->options.on_buffer))
        status = shoal_gpu_packer_join(fusion_device_packer(reducer), fusion_device_lane(buffer));
    return status == SHOAL_OK ? SHOAL_OK : fusion_device_fail(reducer, buffer, status, "waited for");
}
