/* From the buffers to where results are wanted: one pass that multiplies, copies and sums squares. */
#include <string.h>

#include "fusion/reducer.h"

/* Only the thread that set is_putting_out calls this. */
static void put_part(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part, double factor,
                     double *squared)
{
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    char *view = fusion_view(reducer, parameter) + part->offset * shoal_type_bytes(each->type);
    char *to = part->memory && !reducer->options.results_in_views ? part->memory : view;
    if (to == view && factor == 1)
        to = NULL; /* it is there; the squares may be wanted */
    if (to || squared)
        reducer->kernels->move[each->type](to, view, part->count, factor, false, squared);
    if (to && to != view)
        atomic_fetch_add_explicit(&reducer->copied_bytes, part->count * shoal_type_bytes(each->type), memory_order_relaxed);
}

static bool is_marked(const struct fusion_gradient *gradient)
{
    const int mark = atomic_load_explicit(&gradient->mark, memory_order_relaxed);
    return mark == FUSION_WHOLE || mark == FUSION_IN_PARTS;
}

/* Squares are summed over a whole parameter, however it was marked: every rank gets the same bits. */
static void put_parameter(struct shoal_reducer *reducer, size_t parameter, double factor, bool has_norm)
{
    struct fusion_gradient *gradient = &reducer->gradients[parameter];
    const struct fusion_part all = {0, fusion_parameter(reducer, parameter)->count, NULL, NULL};
    const struct fusion_part *part = is_marked(gradient) ? &gradient->first : &all;
    double *squared = has_norm ? &gradient->squared : NULL;
    if (part->next && squared) {
        reducer->kernels->move[fusion_parameter(reducer, parameter)->type](NULL, fusion_view(reducer, parameter), all.count,
                                                                           factor, false, squared);
        squared = NULL;
    }
    for (; part; part = part->next)
        put_part(reducer, parameter, part, factor, squared);
}

/* With max_norm only squares are summed now. */
static void put_buffer(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        struct fusion_gradient *gradient = &reducer->gradients[parameter];
        gradient->squared = 0;
        if (!gradient->is_used)
            continue;
        if (reducer->options.max_norm > 0)
            reducer->kernels->move[buffer->type](NULL, fusion_view(reducer, parameter),
                                                 fusion_parameter(reducer, parameter)->count, reducer->factor, false,
                                                 &gradient->squared);
        else
            put_parameter(reducer, parameter, reducer->factor, reducer->options.has_norms);
    }
}

static void call_back(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const uint32_t *parameters = reducer->layout->order + buffer->first;
    const uint64_t begin_ns = fusion_now_ns();
    const enum shoal_status status =
        reducer->options.on_buffer(reducer->options.on_buffer_arg, index, parameters, buffer->count);
    reducer->callback_ns += fusion_now_ns() - begin_ns;
    if (status != SHOAL_OK) {
        char first[160], last[160];
        fusion_parameter_text(&reducer->layout->parameters, parameters[0], first, sizeof first);
        fusion_parameter_text(&reducer->layout->parameters, parameters[buffer->count - 1], last, sizeof last);
        (void)fusion_fail(reducer, status, parameters[0], "the callback of buffer %zu (%s to %s) failed with %s", index, first,
                          last, shoal_status_name(status));
    }
}

/* With the lock. A buffer with a parameter that is unused here waits for what the others say, in the tail. */
static bool can_put_out(const struct shoal_reducer *reducer)
{
    if (fusion_failed(reducer) != SHOAL_OK || !reducer->is_armed || !reducer->is_factor_known ||
        reducer->next_out >= reducer->layout->buffer_count)
        return false;
    const struct fusion_slot *slot = &reducer->slots[reducer->next_out];
    return slot->phase == FUSION_DONE && (!slot->has_unused || reducer->is_tail_done);
}

static void learn_used(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        reducer->gradients[parameter].is_used |= reducer->tail_sum[FUSION_TAIL_FIELDS + parameter] > 0;
    }
}

void fusion_put_out(struct shoal_reducer *reducer)
{
    if (reducer->is_putting_out)
        return;
    reducer->is_putting_out = true;
    while (can_put_out(reducer)) {
        const size_t index = reducer->next_out;
        struct fusion_slot *slot = &reducer->slots[index];
        const uint64_t begin_ns = fusion_now_ns();
        fusion_unlock(reducer);
        if (slot->has_unused)
            learn_used(reducer, index);
        put_buffer(reducer, index);
        reducer->out_ns += fusion_now_ns() - begin_ns;
        if (reducer->options.on_buffer)
            call_back(reducer, index);
        fusion_lock(reducer);
        slot->out_ns = fusion_now_ns();
        slot->phase = FUSION_OUT;
        reducer->next_out++;
    }
    reducer->is_putting_out = false;
    pthread_cond_broadcast(&reducer->changed);
}

void fusion_clip(struct shoal_reducer *reducer)
{
    const uint64_t begin_ns = fusion_now_ns();
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        if (reducer->gradients[i].is_used)
            put_parameter(reducer, i, reducer->factor * reducer->clip, false);
    }
    reducer->out_ns += fusion_now_ns() - begin_ns;
}
