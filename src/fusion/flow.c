/* Posts the operations of a step. They go out in one order on every rank: the count of active ranks, the buffers by number, the
 * tail. A buffer waits for those before it and until bytes in flight allow it. */
#include <stdio.h>
#include <time.h>

#include "fusion/reducer.h"

uint64_t fusion_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

struct shoal_options fusion_options(const struct shoal_reducer *reducer)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = reducer->options.timeout_ms;
    return options;
}

/* ---- Completions --------------------------------------------------------------------------------------------------------- */

static void describe_buffer(const struct shoal_reducer *reducer, long buffer, char *text, size_t text_bytes)
{
    char first[160], last[160];
    if (buffer < 0 || (size_t)buffer >= reducer->layout->buffer_count) {
        snprintf(text, text_bytes, "the exchange at the %s of a step", buffer < -1 ? "begin" : "end");
        return;
    }
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    const struct fusion_parameters *parameters = &reducer->layout->parameters;
    fusion_parameter_text(parameters, reducer->layout->order[found->first], first, sizeof first);
    fusion_parameter_text(parameters, reducer->layout->order[found->first + found->count - 1], last, sizeof last);
    snprintf(text, text_bytes, "buffer %ld: %.30s to %.30s", buffer, first, last);
}

void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    char operation[96];
    describe_buffer(reducer, buffer, operation, sizeof operation);
    fusion_lock(reducer);
    fusion_note(reducer, status, operation);
    fusion_unlock(reducer);
}

void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    char operation[96];
    describe_buffer(reducer, buffer, operation, sizeof operation);
    fusion_post_failed(reducer, status, operation);
}

void fusion_buffer_done(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status)
{
    struct fusion_slot *slot = &reducer->slots[buffer];
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, (long)buffer);
        return;
    }
    fusion_lock(reducer);
    slot->done_ns = fusion_now_ns();
    slot->phase = FUSION_DONE;
    reducer->flight_bytes -= reducer->layout->buffers[buffer].bytes;
    reducer->flight_buffers--;
    fusion_advance(reducer);
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

static void tail_done(void *arg, enum shoal_status status)
{
    struct shoal_reducer *reducer = arg;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return;
    }
    fusion_lock(reducer);
    reducer->is_tail_done = true;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

static void plain_done(void *arg, enum shoal_status status)
{
    struct fusion_slot *slot = arg;
    fusion_buffer_done(slot->reducer, (size_t)(slot - slot->reducer->slots), status);
}

/* ---- Posting ------------------------------------------------------------------------------------------------------------- */

/* With divides_by_active the sum is divided on its way out. */
static enum shoal_op operator_of(const struct shoal_reducer *reducer)
{
    return reducer->options.is_uneven && reducer->options.divides_by_active ? SHOAL_SUM : reducer->options.op;
}

static enum shoal_status post_buffer(struct shoal_reducer *reducer, size_t index)
{
    struct fusion_slot *slot = &reducer->slots[index];
    const struct shoal_options options = fusion_options(reducer);
    struct shoal_request *request;
    if (slot->compressed)
        return fusion_compressed_post(reducer, index);
    FUSION_TRY(shoal_allreduce_post(reducer->comm, slot->memory, slot->memory, slot->elements,
                                    reducer->layout->buffers[index].type, operator_of(reducer), &options, &request));
    fusion_lock(reducer);
    slot->requests[0] = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, plain_done, slot);
    return SHOAL_OK;
}

static void fill_tail(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count;
    double *tail = reducer->tail, squared = 0;
    bool is_nonfinite = false;
    for (size_t i = 0; i < count; i++) {
        const struct fusion_gradient *gradient = &reducer->gradients[i];
        squared += gradient->local_squared;
        is_nonfinite |= gradient->is_nonfinite;
        if (reducer->options.allows_unused || reducer->options.is_uneven)
            tail[FUSION_TAIL_FIELDS + i] = gradient->is_used;
    }
    tail[FUSION_TAIL_NONFINITE] = is_nonfinite;
    tail[FUSION_TAIL_SQUARED] = squared;
}

static enum shoal_status post_tail(struct shoal_reducer *reducer)
{
    const struct shoal_options options = fusion_options(reducer);
    struct shoal_request *request;
    fill_tail(reducer);
    FUSION_TRY(shoal_allreduce_post(reducer->comm, reducer->tail, reducer->tail_sum, reducer->tail_count, SHOAL_FLOAT64,
                                    SHOAL_SUM, &options, &request));
    fusion_lock(reducer);
    reducer->tail_request = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, tail_done, reducer);
    return SHOAL_OK;
}

/* With the lock. */
static bool can_post_buffer(const struct shoal_reducer *reducer)
{
    if (reducer->next_post >= reducer->layout->buffer_count)
        return false;
    const size_t bytes = reducer->layout->buffers[reducer->next_post].bytes;
    return atomic_load_explicit(&reducer->slots[reducer->next_post].missing, memory_order_acquire) == 0 &&
           (reducer->flight_buffers == 0 || reducer->flight_bytes + bytes <= reducer->options.flight_bytes);
}

static bool can_post_tail(const struct shoal_reducer *reducer)
{
    return reducer->next_post == reducer->layout->buffer_count && reducer->tail_count > 0 && !reducer->is_tail_posted;
}

/* With the lock, which it lets go of. False: there is nothing to post. */
static bool post_next(struct shoal_reducer *reducer)
{
    enum shoal_status status;
    long which = -1;
    if (fusion_failed(reducer) != SHOAL_OK || !reducer->is_armed)
        return false;
    if (can_post_buffer(reducer)) {
        const size_t index = reducer->next_post++;
        which = (long)index;
        reducer->flight_bytes += reducer->layout->buffers[index].bytes;
        reducer->flight_buffers++;
        if (reducer->flight_buffers > reducer->flight_most)
            reducer->flight_most = reducer->flight_buffers;
        reducer->slots[index].posted_ns = fusion_now_ns();
        reducer->slots[index].phase = FUSION_POSTED;
        fusion_unlock(reducer);
        status = post_buffer(reducer, index);
    } else if (can_post_tail(reducer)) {
        reducer->is_tail_posted = true;
        fusion_unlock(reducer);
        status = post_tail(reducer);
    } else {
        return false;
    }
    if (status != SHOAL_OK)
        fusion_operation_not_posted(reducer, status, which);
    fusion_lock(reducer);
    return true;
}

void fusion_advance(struct shoal_reducer *reducer)
{
    if (reducer->is_posting)
        return; /* who posts looks again, with the lock */
    reducer->is_posting = true;
    while (post_next(reducer))
        continue;
    reducer->is_posting = false;
    pthread_cond_broadcast(&reducer->changed);
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_wait(struct shoal_reducer *reducer, struct shoal_request **request)
{
    (void)reducer;
    const enum shoal_status status = shoal_request_wait(*request, SHOAL_FOREVER);
    shoal_request_free(*request);
    *request = NULL;
    return status;
}

void fusion_reset_slots(struct shoal_reducer *reducer)
{
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        struct fusion_slot *slot = &reducer->slots[b];
        for (size_t i = 0; i < FUSION_STAGES_MAX; i++) {
            shoal_request_free(slot->requests[i]);
            slot->requests[i] = NULL;
        }
        slot->phase = FUSION_FILLING;
        slot->has_unused = false;
        atomic_store_explicit(&slot->missing, reducer->layout->buffers[b].count, memory_order_relaxed);
    }
    fusion_compressor_begin_step(reducer);
    shoal_request_free(reducer->tail_request);
    reducer->tail_request = NULL;
}
