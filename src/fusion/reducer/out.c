#include "fusion/reducer/out.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/device_buffer.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/optimizer.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"
#include "fusion/reducer/tally.h"

struct fusion_out {
    size_t next;          /* lock: the buffers before it are in place */
    bool is_busy;         /* lock: a thread is copying averages out */
    double factor;        /* for averages on their way out: 1, or ranks / active */
    bool is_factor_known; /* lock */
    double *squared;      /* [parameters]: squared norms of the averages */
    double shards;        /* with an optimizer: the squares of this rank's shards */
    pthread_t thread;
    bool has_thread;
    bool is_ending; /* lock: asks the thread to end */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_out_create(struct shoal_reducer *reducer)
{
    struct fusion_out *out = reducer->out = calloc(1, sizeof *out);
    if (!out)
        return SHOAL_ERR_MEMORY;
    out->squared = calloc(reducer->layout->parameters.count + 1, sizeof *out->squared);
    return out->squared ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void fusion_out_destroy(struct shoal_reducer *reducer)
{
    if (!reducer->out)
        return;
    free(reducer->out->squared);
    free(reducer->out);
}

static void *run_out_thread(void *arg)
{
    struct shoal_reducer *reducer = arg;
    fusion_lock(reducer);
    while (!reducer->out->is_ending) {
        fusion_put_out(reducer);
        if (!reducer->out->is_ending)
            pthread_cond_wait(&reducer->changed, &reducer->lock);
    }
    fusion_unlock(reducer);
    return NULL;
}

enum shoal_status fusion_out_start_thread(struct shoal_reducer *reducer)
{
    if (!reducer->options.has_thread)
        return SHOAL_OK;
    if (pthread_create(&reducer->out->thread, NULL, run_out_thread, reducer) != 0)
        return SHOAL_ERR_SYSTEM;
    reducer->out->has_thread = true;
    return SHOAL_OK;
}

void fusion_out_stop_thread(struct shoal_reducer *reducer)
{
    if (!reducer->out || !reducer->out->has_thread)
        return;
    fusion_lock(reducer);
    reducer->out->is_ending = true;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
    pthread_join(reducer->out->thread, NULL);
}

void fusion_out_reset(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    SHOAL_ASSERT(!reducer->out->is_busy);
    reducer->out->next = 0;
    reducer->out->factor = 1;
    reducer->out->shards = 0;
    reducer->out->is_factor_known = !reducer->options.divides_by_active;
}

void fusion_out_set_factor(struct shoal_reducer *reducer, double factor)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    SHOAL_ASSERT(factor >= 1);          /* ranks / active */
    if (!reducer->out->is_factor_known) /* otherwise the thread may be reading it */
        reducer->out->factor = factor;
    reducer->out->is_factor_known = true;
}

/* ---- A buffer ------------------------------------------------------------------------------------------------------------ */

/* Only the thread that set is_busy calls this. */
static void put_part(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part, double factor,
                     double *squared)
{
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    char *view = fusion_view(reducer, parameter) + part->offset * shoal_type_bytes(each->type);
    char *to = part->memory && !reducer->options.results_in_views ? part->memory : view;
    if (to == view && factor == 1)
        to = NULL; /* already in place; only the squares may be wanted */
    if (to || squared)
        fusion_wide_move(fusion_wide(reducer), each->type, to, view, part->count, factor, false, squared);
    if (to && to != view)
        fusion_stats_copied(reducer, part->count * shoal_type_bytes(each->type));
}

/* Sums squares over a whole parameter, in whatever parts it was marked, and before it is rounded once more: every rank gets the
 * same bits. */
static void sum_squares(struct shoal_reducer *reducer, size_t parameter, double factor)
{
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    fusion_wide_move(fusion_wide(reducer), each->type, NULL, fusion_view(reducer, parameter), each->count, factor, false,
                     &reducer->out->squared[parameter]);
}

static void put_parameter(struct shoal_reducer *reducer, size_t parameter, double factor, bool has_norm)
{
    const struct fusion_part all = {0, fusion_parameter(reducer, parameter)->count, NULL, NULL};
    const struct fusion_part *part = fusion_marks_parts(reducer, parameter);
    if (!part)
        part = &all;
    double *squared = has_norm ? &reducer->out->squared[parameter] : NULL;
    if ((part->next || factor != 1) && squared) {
        sum_squares(reducer, parameter, factor);
        squared = NULL;
    }
    for (; part; part = part->next)
        put_part(reducer, parameter, part, factor, squared);
}

/* Quantizing adds the error of the previous step, so an average can be nonzero although no rank had a gradient. This clears it.
 * Returns false if the reducer has failed. */
static bool out_clear_unused(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const bool has_residuals = fusion_compressed_residuals(reducer, index).sent != NULL;
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        if (fusion_marks_use(reducer, parameter))
            continue;
        reducer->out->squared[parameter] = 0;
        if (has_residuals && reducer->device && fusion_device_clear(reducer, parameter) != SHOAL_OK)
            return false;
        if (has_residuals && !reducer->device)
            memset(fusion_view(reducer, parameter), 0, fusion_parameter_bytes(fusion_parameter(reducer, parameter)));
    }
    return true;
}

/* Steps the parameters of a buffer, unless all gradients have to be seen before. Returns false if the reducer has failed. */
static bool step_buffer(struct shoal_reducer *reducer, size_t index)
{
    SHOAL_ASSERT(!reducer->options.on_buffer); /* it would see no averages */
    if (fusion_steps_early(reducer))
        fusion_optimizer_keep(reducer, index);
    if (reducer->options.has_norms || fusion_optimizer_awaits_verdict(reducer))
        reducer->out->shards += fusion_optimizer_squares(reducer, index, reducer->out->factor);
    return fusion_steps_late(reducer) || fusion_optimizer_step(reducer, index, reducer->out->factor) == SHOAL_OK;
}

/* With max_norm only squares are summed now. Returns false if the reducer has failed. */
static bool put_buffer(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    if (reducer->optimizer)
        return step_buffer(reducer, index);
    if (!out_clear_unused(reducer, index))
        return false;
    if (reducer->device)
        return reducer->options.max_norm > 0 || fusion_device_join(reducer, index, reducer->out->factor) == SHOAL_OK;
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        if (!fusion_marks_use(reducer, parameter))
            continue;
        reducer->out->squared[parameter] = 0;
        if (reducer->options.max_norm > 0)
            sum_squares(reducer, parameter, reducer->out->factor);
        else
            put_parameter(reducer, parameter, reducer->out->factor, reducer->options.has_norms);
    }
    return true;
}

static void call_back(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const uint32_t *parameters = reducer->layout->order + buffer->first;
    const uint64_t begin_ns = fusion_now_ns();
    const enum shoal_status status =
        reducer->options.on_buffer(reducer->options.on_buffer_arg, index, parameters, buffer->count);
    fusion_stats_called_back(reducer, begin_ns);
    if (status != SHOAL_OK) {
        char first[160], last[160];
        fusion_parameter_text(&reducer->layout->parameters, parameters[0], first, sizeof first);
        fusion_parameter_text(&reducer->layout->parameters, parameters[buffer->count - 1], last, sizeof last);
        (void)fusion_fail(reducer, status, parameters[0], "the callback of buffer %zu (%s to %s) failed with %s", index, first,
                          last, shoal_status_name(status));
    }
}

/* ---- In order ------------------------------------------------------------------------------------------------------------ */

/* Call with the lock held. A buffer with a parameter that is unused here waits for the tail, which shows whether other ranks
 * use it. */
static bool can_put_out(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct fusion_out *out = reducer->out;
    if (fusion_failed(reducer) != SHOAL_OK || !reducer->is_armed || !out->is_factor_known ||
        out->next >= reducer->layout->buffer_count)
        return false;
    return fusion_flow_is_done(reducer, out->next) &&
           (!fusion_marks_have_unused(reducer, out->next) || fusion_tally_is_done(reducer));
}

void fusion_put_out(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_out *out = reducer->out;
    if (out->is_busy)
        return;
    out->is_busy = true;
    while (can_put_out(reducer)) {
        const size_t index = out->next;
        const bool has_unused = fusion_marks_have_unused(reducer, index);
        const uint64_t begin_ns = fusion_now_ns();
        fusion_unlock(reducer);
        if (has_unused)
            fusion_marks_learn_used(reducer, index, fusion_tally_used(reducer));
        const bool is_there = put_buffer(reducer, index);
        fusion_stats_put_out(reducer, begin_ns);
        if (is_there && reducer->options.on_buffer)
            call_back(reducer, index);
        fusion_lock(reducer);
        fusion_stats_is_out(reducer, index);
        SHOAL_ASSERT(out->next == index);
        out->next++;
    }
    out->is_busy = false;
    pthread_cond_broadcast(&reducer->changed);
}

bool fusion_out_is_busy(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->out->is_busy;
}

bool fusion_out_is_complete(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->out->next == reducer->layout->buffer_count && !reducer->out->is_busy;
}

/* ---- All buffers --------------------------------------------------------------------------------------------------------- */

void fusion_out_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared)
{
    SHOAL_ASSERT(!(squared < 0)); /* it may be NaN */
    reducer->out->squared[parameter] = squared;
}

double fusion_out_squared(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->out->next == reducer->layout->buffer_count); /* all buffers are out */
    double squared = reducer->out->shards;
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        squared += reducer->out->squared[i];
    return squared;
}

static enum shoal_status clip_on_device(struct shoal_reducer *reducer, double factor)
{
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        FUSION_TRY(fusion_device_join(reducer, b, factor));
    return SHOAL_OK;
}

static enum shoal_status step_all(struct shoal_reducer *reducer, double factor)
{
    const uint64_t begin_ns = fusion_now_ns();
    FUSION_TRY(fusion_optimizer_measure(reducer, factor));
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        if (fusion_optimizer_step(reducer, b, factor) != SHOAL_OK)
            return fusion_failure_status(reducer);
    fusion_stats_put_out(reducer, begin_ns);
    return SHOAL_OK;
}

enum shoal_status fusion_out_undo(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->out->next == reducer->layout->buffer_count); /* all buffers are out */
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        if (fusion_optimizer_undo(reducer, b) != SHOAL_OK)
            return fusion_failure_status(reducer);
    return SHOAL_OK;
}

enum shoal_status fusion_out_clip(struct shoal_reducer *reducer, double clip)
{
    SHOAL_ASSERT(reducer->out->next == reducer->layout->buffer_count); /* all buffers are out */
    const uint64_t begin_ns = fusion_now_ns();
    const double factor = reducer->out->factor * clip;
    if (reducer->optimizer)
        return step_all(reducer, factor);
    if (reducer->device)
        return clip_on_device(reducer, factor);
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        if (fusion_marks_use(reducer, i))
            put_parameter(reducer, i, factor, false);
    }
    fusion_stats_put_out(reducer, begin_ns);
    return SHOAL_OK;
}
