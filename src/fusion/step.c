/* A step: begin, marks, finish, join. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fusion/reducer.h"

#define WAIT_MS 20 /* then a waiting thread looks whether another request is the oldest now */

/* ---- Begin --------------------------------------------------------------------------------------------------------------- */

static void step_free_parts(struct fusion_gradient *gradient)
{
    while (gradient->first.next) {
        struct fusion_part *part = gradient->first.next;
        gradient->first.next = part->next;
        free(part);
    }
}

static void reset_gradients(struct shoal_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        struct fusion_gradient *gradient = &reducer->gradients[i];
        step_free_parts(gradient);
        gradient->first = (struct fusion_part){0, 0, NULL, NULL};
        gradient->is_ready = gradient->is_used = gradient->is_nonfinite = false;
        gradient->claimed = gradient->packed = 0;
        gradient->local_squared = gradient->squared = 0;
        gradient->ready_ns = 0;
        atomic_store_explicit(&gradient->mark, FUSION_UNMARKED, memory_order_relaxed);
    }
}

/* Averages from active ranks alone are known when all have said what they are; it is not waited for here. */
static enum shoal_status post_head(struct shoal_reducer *reducer, int64_t own)
{
    const struct shoal_options options = fusion_options(reducer);
    reducer->head = own;
    const enum shoal_status status = shoal_allreduce_post(reducer->comm, &reducer->head, &reducer->head_sum, 1, SHOAL_INT64,
                                                          SHOAL_SUM, &options, &reducer->head_request);
    if (status != SHOAL_OK)
        fusion_operation_not_posted(reducer, status, -2);
    return status;
}

static void open_step(struct shoal_reducer *reducer, enum shoal_step step)
{
    reset_gradients(reducer);
    fusion_lock(reducer);
    fusion_reset_slots(reducer);
    reducer->step = step;
    reducer->next_post = reducer->next_out = 0;
    reducer->flight_bytes = reducer->flight_buffers = reducer->flight_most = 0;
    reducer->is_tail_posted = reducer->is_tail_done = false;
    reducer->is_armed = step == SHOAL_STEP_REDUCE;
    reducer->is_joined = false;
    reducer->factor = reducer->clip = 1;
    reducer->is_factor_known = !reducer->options.divides_by_active;
    reducer->out_ns = reducer->callback_ns = 0;
    fusion_unlock(reducer);
    atomic_store_explicit(&reducer->ready_count, 0, memory_order_relaxed);
    atomic_store_explicit(&reducer->mark_count, 0, memory_order_relaxed);
    atomic_store_explicit(&reducer->pack_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&reducer->copied_bytes, 0, memory_order_relaxed);
    reducer->begin_wire_bytes = fusion_wire_bytes(reducer);
    reducer->begin_ns = fusion_now_ns();
    atomic_store_explicit(&reducer->is_open, true, memory_order_release);
}

static bool is_open(const struct shoal_reducer *reducer)
{
    return atomic_load_explicit(&reducer->is_open, memory_order_acquire);
}

/* Once, after the first step. */
static enum shoal_status renew_layout(struct shoal_reducer *reducer)
{
    const bool is_fixed = reducer->options.keeps_layout || reducer->options.layout || reducer->options.order;
    if (is_fixed || reducer->has_renewed || reducer->steps != 1)
        return SHOAL_OK;
    reducer->has_renewed = true;
    const enum shoal_status status = fusion_rebuild(reducer);
    return status == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

static enum shoal_status check_begin(struct shoal_reducer *reducer, const char *call)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    const unsigned marks = atomic_load_explicit(&reducer->mark_count, memory_order_relaxed);
    if (is_open(reducer) && marks > 0)
        return fusion_refuse(reducer, SHOAL_ERR_STATE,
                             "%s: step %llu was not finished: %u of %zu gradients are ready in it, after %u marks; call "
                             "shoal_reducer_finish after each backward pass",
                             call, (unsigned long long)reducer->steps + 1,
                             atomic_load_explicit(&reducer->ready_count, memory_order_relaxed),
                             reducer->layout->parameters.count, marks);
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_begin(struct shoal_reducer *reducer, enum shoal_step step)
{
    FUSION_TRY(check_begin(reducer, "shoal_reducer_begin"));
    if (step != SHOAL_STEP_REDUCE && step != SHOAL_STEP_LOCAL)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_begin: there is no kind of step %d", (int)step);
    FUSION_TRY(renew_layout(reducer));
    const bool has_head = reducer->head_request != NULL; /* begun again */
    open_step(reducer, step);
    if (step == SHOAL_STEP_REDUCE && reducer->options.is_uneven && !has_head && post_head(reducer, 1) != SHOAL_OK)
        return fusion_failure_status(reducer);
    return SHOAL_OK;
}

/* ---- Marks --------------------------------------------------------------------------------------------------------------- */

static bool has_norms(const struct shoal_reducer *reducer)
{
    return reducer->options.has_norms || reducer->options.checks_finite;
}

struct squares {
    double sum;
    bool is_nonfinite; /* a value is */
};

/* Squares of float64 may be too large where the values are not. */
static bool is_finite(enum shoal_type type, const void *values, size_t count, double squared)
{
    const double *each = values;
    bool is_all = squared - squared == 0;
    if (is_all || type != SHOAL_FLOAT64)
        return is_all;
    is_all = true;
    for (size_t i = 0; i < count; i++)
        is_all &= each[i] - each[i] == 0;
    return is_all;
}

/* In, in one pass. The squares are of what then lies in the buffer. */
static struct squares pack(struct shoal_reducer *reducer, size_t parameter, const void *gradient, size_t offset, size_t count)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    char *view = fusion_view(reducer, parameter) + offset * shoal_type_bytes(type);
    const bool adds = reducer->gradients[parameter].has_sum, is_there = gradient == view;
    struct squares squares = {0, false};
    double *wanted = has_norms(reducer) && reducer->step == SHOAL_STEP_REDUCE ? &squares.sum : NULL;
    if (is_there && !wanted)
        return squares;
    const uint64_t begin_ns = fusion_now_ns();
    reducer->kernels->move[type](is_there ? NULL : view, gradient, count, 1, adds && !is_there, wanted);
    atomic_fetch_add_explicit(&reducer->pack_ns, fusion_now_ns() - begin_ns, memory_order_relaxed);
    if (!is_there)
        atomic_fetch_add_explicit(&reducer->copied_bytes, count * shoal_type_bytes(type), memory_order_relaxed);
    squares.is_nonfinite = wanted && !is_finite(type, view, count, squares.sum);
    return squares;
}

/* The last one of its buffer lets it go. */
static enum shoal_status complete(struct shoal_reducer *reducer, size_t parameter)
{
    struct fusion_gradient *gradient = &reducer->gradients[parameter];
    struct fusion_slot *slot = &reducer->slots[reducer->layout->places[parameter].buffer];
    gradient->is_ready = true;
    if (reducer->step == SHOAL_STEP_LOCAL)
        return SHOAL_OK;
    if (atomic_fetch_sub_explicit(&slot->missing, 1, memory_order_acq_rel) > 1)
        return SHOAL_OK;
    fusion_lock(reducer);
    fusion_advance(reducer);
    fusion_unlock(reducer);
    return fusion_failed(reducer) == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

static enum shoal_status note_ready(struct shoal_reducer *reducer, size_t parameter)
{
    struct fusion_gradient *gradient = &reducer->gradients[parameter];
    gradient->is_used = true;
    gradient->ready_ns = fusion_now_ns();
    gradient->ready_number = atomic_fetch_add_explicit(&reducer->ready_count, 1, memory_order_relaxed);
    return complete(reducer, parameter);
}

static enum shoal_status check_mark(struct shoal_reducer *reducer, const char *call, size_t parameter)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (parameter >= reducer->layout->parameters.count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: there is no parameter %zu, as there are %zu", call, parameter,
                             reducer->layout->parameters.count);
    if (!is_open(reducer)) {
        char text[FUSION_TEXT_MAX];
        return fusion_refuse(reducer, SHOAL_ERR_STATE,
                             "%s of %s outside a step: call shoal_reducer_begin before the backward "
                             "pass",
                             call, fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text));
    }
    return SHOAL_OK;
}

static enum shoal_status fail_twice(struct shoal_reducer *reducer, size_t parameter)
{
    char text[FUSION_TEXT_MAX];
    fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text);
    return fusion_fail(reducer, SHOAL_ERR_STATE, (long)parameter,
                       "%s was marked twice: mark each gradient once a step, when all that adds to it has been added", text);
}

enum shoal_status shoal_reducer_ready(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t count)
{
    FUSION_TRY(check_mark(reducer, "shoal_reducer_ready", parameter));
    struct fusion_gradient *own = &reducer->gradients[parameter];
    const size_t expected = fusion_parameter(reducer, parameter)->count;
    char text[FUSION_TEXT_MAX];
    int unmarked = FUSION_UNMARKED;
    if (count != expected || (!gradient && count))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_ready: %s has %zu elements, its gradient %zu%s",
                             fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), expected, count,
                             gradient ? "" : " at NULL");
    atomic_fetch_add_explicit(&reducer->mark_count, 1, memory_order_relaxed);
    if (!atomic_compare_exchange_strong_explicit(&own->mark, &unmarked, FUSION_WHOLE, memory_order_acq_rel,
                                                 memory_order_acquire))
        return fail_twice(reducer, parameter);
    own->first = (struct fusion_part){0, count, gradient, NULL};
    const struct squares squares = pack(reducer, parameter, gradient, 0, count);
    own->local_squared = squares.sum;
    own->is_nonfinite = squares.is_nonfinite;
    return note_ready(reducer, parameter);
}

/* With the lock. */
static bool overlaps(const struct fusion_gradient *gradient, size_t offset, size_t count)
{
    for (const struct fusion_part *part = &gradient->first; part; part = part->next) {
        if (offset < part->offset + part->count && part->offset < offset + count)
            return true;
    }
    return false;
}

/* Notes a part; false: it, or something of it, was marked before. With the lock. */
static bool claim_part(struct fusion_gradient *own, struct fusion_part *part)
{
    int unmarked = FUSION_UNMARKED;
    if (atomic_compare_exchange_strong_explicit(&own->mark, &unmarked, FUSION_IN_PARTS, memory_order_acq_rel,
                                                memory_order_acquire)) {
        own->first = *part;
        own->claimed = part->count;
        free(part);
        return true;
    }
    if (unmarked != FUSION_IN_PARTS || overlaps(own, part->offset, part->count))
        return false;
    part->next = own->first.next;
    own->first.next = part;
    own->claimed += part->count;
    return true;
}

enum shoal_status shoal_reducer_ready_part(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t offset,
                                           size_t count)
{
    FUSION_TRY(check_mark(reducer, "shoal_reducer_ready_part", parameter));
    struct fusion_gradient *own = &reducer->gradients[parameter];
    const size_t expected = fusion_parameter(reducer, parameter)->count;
    char text[FUSION_TEXT_MAX];
    if (offset > expected || count > expected - offset || (!gradient && count))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_ready_part: %s has %zu elements, the part is of %zu from %zu on%s",
                             fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), expected, count,
                             offset, gradient ? "" : ", at NULL");
    if (count == 0 || count == expected)
        return count == expected ? shoal_reducer_ready(reducer, parameter, gradient, count) : SHOAL_OK;
    struct fusion_part *part = calloc(1, sizeof *part);
    if (!part)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, (long)parameter, "no memory for a part of a gradient");
    *part = (struct fusion_part){offset, count, gradient, NULL};
    atomic_fetch_add_explicit(&reducer->mark_count, 1, memory_order_relaxed);
    fusion_lock(reducer);
    const bool is_claimed = claim_part(own, part);
    fusion_unlock(reducer);
    if (!is_claimed) {
        free(part);
        return fail_twice(reducer, parameter);
    }
    const struct squares squares = pack(reducer, parameter, gradient, offset, count);
    fusion_lock(reducer);
    own->local_squared += squares.sum;
    own->is_nonfinite |= squares.is_nonfinite;
    own->packed += count;
    const bool is_whole = own->packed == expected;
    fusion_unlock(reducer);
    return is_whole ? note_ready(reducer, parameter) : SHOAL_OK;
}

/* What LOCAL steps gave stays; where they gave nothing, zeros. */
static enum shoal_status contribute_nothing(struct shoal_reducer *reducer, size_t parameter)
{
    struct fusion_gradient *own = &reducer->gradients[parameter];
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    char *view = fusion_view(reducer, parameter);
    if (reducer->step == SHOAL_STEP_REDUCE && !own->has_sum) {
        memset(view, 0, fusion_parameter_bytes(each));
    } else if (reducer->step == SHOAL_STEP_REDUCE) {
        const struct squares squares = pack(reducer, parameter, view, 0, each->count);
        own->is_used = true;
        own->local_squared = squares.sum;
        own->is_nonfinite = squares.is_nonfinite;
    }
    if (reducer->step == SHOAL_STEP_REDUCE && !own->is_used) {
        fusion_lock(reducer);
        reducer->slots[reducer->layout->places[parameter].buffer].has_unused = true;
        fusion_unlock(reducer);
    }
    return complete(reducer, parameter);
}

enum shoal_status shoal_reducer_unused(struct shoal_reducer *reducer, size_t parameter)
{
    FUSION_TRY(check_mark(reducer, "shoal_reducer_unused", parameter));
    int unmarked = FUSION_UNMARKED;
    if (!reducer->options.allows_unused)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_unused: the reducer was made without allows_unused");
    atomic_fetch_add_explicit(&reducer->mark_count, 1, memory_order_relaxed);
    if (!atomic_compare_exchange_strong_explicit(&reducer->gradients[parameter].mark, &unmarked, FUSION_UNUSED,
                                                 memory_order_acq_rel, memory_order_acquire))
        return fail_twice(reducer, parameter);
    return contribute_nothing(reducer, parameter);
}

/* ---- Finish -------------------------------------------------------------------------------------------------------------- */

/* Names the first few. */
static enum shoal_status fail_missing(struct shoal_reducer *reducer, size_t first, size_t missing)
{
    char names[FUSION_TEXT_MAX] = "", text[FUSION_TEXT_MAX];
    size_t named = 0;
    for (size_t i = first; i < reducer->layout->parameters.count && named < 4; i++) {
        if (reducer->gradients[i].is_ready)
            continue;
        const size_t length = strlen(names);
        fusion_parameter_text(&reducer->layout->parameters, i, text, sizeof text);
        snprintf(names + length, sizeof names - length, "%s%.60s", named ? ", " : "", text);
        named++;
    }
    const bool is_partial = atomic_load_explicit(&reducer->gradients[first].mark, memory_order_acquire) == FUSION_IN_PARTS;
    return fusion_fail(reducer, SHOAL_ERR_STATE, (long)first, "%zu of %zu gradients were not %s when the step ended: %s%s%s",
                       missing, reducer->layout->parameters.count, is_partial ? "marked whole" : "marked", names,
                       missing > named ? " ..." : "",
                       reducer->options.allows_unused ? "" : "; allows_unused is for parameters without a gradient");
}

/* All that were not marked are unused, where that is allowed. */
static enum shoal_status complete_all(struct shoal_reducer *reducer)
{
    size_t missing = 0, first = 0;
    const size_t count = reducer->layout->parameters.count;
    for (size_t i = count; i-- > 0;) {
        const int mark = atomic_load_explicit(&reducer->gradients[i].mark, memory_order_acquire);
        const bool may_be_unused = mark == FUSION_UNMARKED && (reducer->options.allows_unused || reducer->is_joined);
        if (!reducer->gradients[i].is_ready && !may_be_unused) {
            missing++;
            first = i;
        }
    }
    if (missing)
        return fail_missing(reducer, first, missing);
    for (size_t i = 0; i < count; i++) {
        struct fusion_gradient *own = &reducer->gradients[i];
        if (own->is_ready)
            continue;
        atomic_store_explicit(&own->mark, FUSION_UNUSED, memory_order_release);
        (void)contribute_nothing(reducer, i); /* who waits for the step sees the failure */
    }
    return SHOAL_OK;
}

/* The operation of the oldest buffer that is not done, or of the tail. NULL: none is under way, as none is posted yet or the
 * compressor computes between two. With the lock. */
static struct shoal_request *oldest(const struct shoal_reducer *reducer)
{
    for (size_t b = reducer->next_out; b < reducer->layout->buffer_count; b++) {
        const struct fusion_slot *slot = &reducer->slots[b];
        if (slot->phase == FUSION_POSTED)
            return slot->compressed ? fusion_compressed_request(slot) : slot->requests[0];
    }
    return reducer->is_tail_posted && !reducer->is_tail_done ? reducer->tail_request : NULL;
}

/* Makes progress from this thread for a moment, or waits until something has changed. With the lock, which it lets go of. */
static void wait_a_little(struct shoal_reducer *reducer)
{
    struct shoal_request *request = oldest(reducer);
    struct timespec until;
    if (request) {
        fusion_unlock(reducer);
        const enum shoal_status status = shoal_request_wait(request, WAIT_MS);
        fusion_lock(reducer);
        if (status == SHOAL_PENDING || fusion_failed(reducer) != SHOAL_OK || oldest(reducer) != request)
            return;
    } /* where it is done, the thread that was told so is about to note it */
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += WAIT_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(&reducer->changed, &reducer->lock, &until);
}

static bool is_all_out(const struct shoal_reducer *reducer)
{
    return reducer->next_out == reducer->layout->buffer_count && !reducer->is_putting_out &&
           (reducer->tail_count == 0 || reducer->is_tail_done);
}

static enum shoal_status wait_for_all(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    fusion_advance(reducer);
    while (fusion_failed(reducer) == SHOAL_OK && !is_all_out(reducer)) {
        if (!reducer->has_thread)
            fusion_put_out(reducer);
        if (fusion_failed(reducer) == SHOAL_OK && !is_all_out(reducer))
            wait_a_little(reducer);
    }
    while (reducer->is_putting_out || reducer->is_posting) /* in a failed step another thread may be in it */
        pthread_cond_wait(&reducer->changed, &reducer->lock);
    fusion_unlock(reducer);
    return fusion_failed(reducer) == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

/* Finds the first such parameter of the lowest rank. All ranks call this, because all have seen in the tail that there is
 * one. */
static enum shoal_status name_nonfinite(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    const struct shoal_options options = fusion_options(reducer);
    int64_t own = -1, *all = calloc((size_t)reducer->size, sizeof *all);
    for (size_t i = reducer->layout->parameters.count; i-- > 0;) {
        if (reducer->gradients[i].is_nonfinite)
            own = (int64_t)i;
    }
    if (!all)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for %d ranks", reducer->size);
    const enum shoal_status status = shoal_allgather(reducer->comm, &own, all, 1, SHOAL_INT64, &options);
    for (int r = reducer->size; status == SHOAL_OK && r-- > 0;) {
        if (all[r] < 0)
            continue;
        result->nonfinite_rank = r;
        result->nonfinite_parameter = all[r];
    }
    free(all);
    if (status != SHOAL_OK)
        fusion_operation_failed(reducer, status, -1);
    return status == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

static enum shoal_status take_head(struct shoal_reducer *reducer)
{
    if (!reducer->head_request)
        return SHOAL_OK;
    const enum shoal_status status = fusion_wait(reducer, &reducer->head_request);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_operation_failed(reducer, status, -2);
    return fusion_failure_status(reducer);
}

static void sum_norms(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    const size_t count = reducer->layout->parameters.count;
    for (size_t i = 0; i < count; i++)
        result->squared += reducer->gradients[i].squared;
    if (reducer->tail_count && reducer->options.has_norms)
        result->local_squared = reducer->tail_sum[FUSION_TAIL_SQUARED] / result->active;
}

/* Newton's method, as the library links to no libm; the same bits on every machine. */
static double square_root(double x)
{
    uint64_t word;
    double y;
    if (!(x > 0) || x - x != 0)
        return x;
    memcpy(&word, &x, sizeof word);
    word = (word >> 1) + (UINT64_C(1023) << 51); /* half the exponent: within 7 % */
    memcpy(&y, &word, sizeof y);
    for (int i = 0; i < 6; i++)
        y = 0.5 * (y + x / y);
    return y;
}

/* The result of the whole step, when all buffers are in. */
static enum shoal_status conclude(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    result->step = reducer->steps + 1;
    result->active = reducer->options.is_uneven ? (int)reducer->head_sum : reducer->size;
    sum_norms(reducer, result);
    if (reducer->options.checks_finite && reducer->tail_sum[FUSION_TAIL_NONFINITE] > 0)
        FUSION_TRY(name_nonfinite(reducer, result));
    if (reducer->options.max_norm > 0) {
        const double clip = reducer->options.max_norm / (square_root(result->squared) + 1e-6);
        reducer->clip = result->clip = clip < 1 ? clip : 1; /* NaN: 1, as there is nothing to save */
        fusion_clip(reducer);
    }
    return SHOAL_OK;
}

/* Keeps what is asked for after the step. */
static void close_step(struct shoal_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        reducer->gradients[i].has_sum = false;
    reducer->steps++;
    fusion_keep_stats(reducer);
    fusion_lock(reducer);
    reducer->is_armed = false;
    fusion_unlock(reducer);
    atomic_store_explicit(&reducer->mark_count, 0, memory_order_relaxed);
    atomic_store_explicit(&reducer->is_open, false, memory_order_release);
}

static void close_local(struct shoal_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        reducer->gradients[i].has_sum |= reducer->gradients[i].is_used;
    atomic_store_explicit(&reducer->mark_count, 0, memory_order_relaxed);
    atomic_store_explicit(&reducer->is_open, false, memory_order_release);
}

static bool divides(const struct shoal_reducer *reducer)
{
    return reducer->options.is_uneven && reducer->options.divides_by_active && reducer->options.op == SHOAL_AVG;
}

static enum shoal_status end_step(struct shoal_reducer *reducer, struct shoal_step_result *result_out)
{
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    FUSION_TRY(complete_all(reducer));
    FUSION_TRY(take_head(reducer));
    fusion_lock(reducer);
    if (!reducer->is_factor_known) /* else the thread may be reading it */
        reducer->factor = divides(reducer) ? 1.0 / (double)reducer->head_sum : 1;
    reducer->is_factor_known = true;
    fusion_unlock(reducer);
    FUSION_TRY(wait_for_all(reducer));
    FUSION_TRY(conclude(reducer, &result));
    close_step(reducer);
    if (result_out)
        *result_out = result;
    return SHOAL_OK;
}

static enum shoal_status check_result(const struct shoal_reducer *reducer, const char *call,
                                      const struct shoal_step_result *result_out)
{
    if (result_out && result_out->struct_bytes < sizeof *result_out)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: result_out->struct_bytes is not set: use SHOAL_STEP_RESULT_INIT",
                             call);
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_finish(struct shoal_reducer *reducer, struct shoal_step_result *result_out)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    FUSION_TRY(check_result(reducer, "shoal_reducer_finish", result_out));
    if (!is_open(reducer))
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_finish: no step has begun");
    if (reducer->step == SHOAL_STEP_LOCAL) {
        close_local(reducer);
        return SHOAL_OK;
    }
    reducer->finish_ns = fusion_now_ns();
    return end_step(reducer, result_out);
}

/* ---- Join ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_reducer_join(struct shoal_reducer *reducer, int *more_out, struct shoal_step_result *result_out)
{
    FUSION_TRY(check_begin(reducer, "shoal_reducer_join"));
    FUSION_TRY(check_result(reducer, "shoal_reducer_join", result_out));
    if (!more_out || !reducer->options.is_uneven || reducer->head_request)
        return fusion_refuse(reducer, more_out ? SHOAL_ERR_STATE : SHOAL_ERR_ARGUMENT, "shoal_reducer_join: %s",
                             !more_out                     ? "more_out is NULL"
                             : !reducer->options.is_uneven ? "the reducer was made without is_uneven"
                                                           : "a step has begun: finish it before");
    FUSION_TRY(renew_layout(reducer));
    if (post_head(reducer, 0) != SHOAL_OK)
        return fusion_failure_status(reducer);
    FUSION_TRY(take_head(reducer));
    *more_out = reducer->head_sum > 0;
    if (!*more_out)
        return SHOAL_OK;
    open_step(reducer, SHOAL_STEP_REDUCE);
    reducer->is_joined = true;
    reducer->finish_ns = fusion_now_ns();
    return end_step(reducer, result_out);
}
