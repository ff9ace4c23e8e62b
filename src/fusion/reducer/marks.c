#include "fusion/reducer/marks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"

enum mark { UNMARKED, WHOLE, IN_PARTS, UNUSED };

/* One parameter in the current step. Until the buffer is full, fields without "lock" belong to the thread that has claimed the
 * mark. */
struct gradient {
    atomic_int mark;          /* enum mark */
    bool is_ready;            /* all its elements are ready */
    struct fusion_part first; /* the whole parameter, or its first part */
    size_t claimed;           /* lock: elements of claimed parts */
    size_t packed;            /* lock: elements of parts already in the buffer */
    bool is_nonfinite;        /* lock while in parts: a value was NaN or infinity */
    bool has_sum;             /* LOCAL steps have left a sum in the buffer */
    bool is_used;             /* by this rank, later by any rank */
    bool was_used;            /* by any rank, in the last REDUCE step */
    double squared;           /* lock while in parts */
};

struct filling_buffer {
    atomic_uint missing; /* parameters that are not ready */
    bool has_unused;     /* lock: this rank has no gradient for one of its parameters */
};

struct fusion_marks {
    fusion_full_fn *on_full;
    struct gradient *gradients;     /* [parameters] */
    struct filling_buffer *buffers; /* [parameters]: no layout has more buffers */
    atomic_bool is_open;
    atomic_uint ready_count; /* parameters ready in this step */
    atomic_uint mark_count;  /* marks in this step */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_marks_create(struct shoal_reducer *reducer, fusion_full_fn *on_full)
{
    const size_t count = reducer->layout->parameters.count;
    struct fusion_marks *marks = reducer->marks = calloc(1, sizeof *marks);
    if (!marks)
        return SHOAL_ERR_MEMORY;
    marks->on_full = on_full;
    marks->gradients = calloc(count + 1, sizeof *marks->gradients);
    marks->buffers = calloc(count + 1, sizeof *marks->buffers);
    return marks->gradients && marks->buffers ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

static void free_parts(struct gradient *gradient)
{
    while (gradient->first.next) {
        struct fusion_part *part = gradient->first.next;
        gradient->first.next = part->next;
        free(part);
    }
}

void fusion_marks_destroy(struct shoal_reducer *reducer)
{
    struct fusion_marks *marks = reducer->marks;
    if (!marks)
        return;
    for (size_t i = 0; marks->gradients && i < reducer->layout->parameters.count; i++)
        free_parts(&marks->gradients[i]);
    free(marks->gradients);
    free(marks->buffers);
    free(marks);
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

void fusion_marks_reset(struct shoal_reducer *reducer)
{
    struct fusion_marks *marks = reducer->marks;
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        struct gradient *gradient = &marks->gradients[i];
        free_parts(gradient);
        gradient->first = (struct fusion_part){0, 0, NULL, NULL};
        gradient->is_ready = gradient->is_used = gradient->is_nonfinite = false;
        gradient->claimed = gradient->packed = 0;
        gradient->squared = 0;
        atomic_store_explicit(&gradient->mark, UNMARKED, memory_order_relaxed);
    }
    fusion_lock(reducer);
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        marks->buffers[b].has_unused = false;
        atomic_store_explicit(&marks->buffers[b].missing, reducer->layout->buffers[b].count, memory_order_relaxed);
    }
    fusion_unlock(reducer);
    atomic_store_explicit(&marks->ready_count, 0, memory_order_relaxed);
    atomic_store_explicit(&marks->mark_count, 0, memory_order_relaxed);
}

void fusion_marks_drop_sums(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(!reducer->is_armed); /* between steps */
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        reducer->marks->gradients[i].has_sum = false;
}

void fusion_marks_open(struct shoal_reducer *reducer)
{
    atomic_store_explicit(&reducer->marks->is_open, true, memory_order_release);
}

bool fusion_marks_are_open(const struct shoal_reducer *reducer)
{
    return atomic_load_explicit(&reducer->marks->is_open, memory_order_acquire);
}

/* Keeps the facts that callers can query after the step, and the sums that the next one adds to. */
void fusion_marks_close(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_marks_are_open(reducer));
    struct fusion_marks *marks = reducer->marks;
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        struct gradient *gradient = &marks->gradients[i];
        if (reducer->step == SHOAL_STEP_LOCAL) {
            gradient->has_sum |= gradient->is_used;
        } else {
            gradient->has_sum = false;
            gradient->was_used = gradient->is_used;
        }
    }
    atomic_store_explicit(&marks->mark_count, 0, memory_order_relaxed);
    atomic_store_explicit(&marks->is_open, false, memory_order_release);
}

enum shoal_status fusion_marks_check_none(const struct shoal_reducer *reducer, const char *call)
{
    const struct fusion_marks *marks = reducer->marks;
    const unsigned count = atomic_load_explicit(&marks->mark_count, memory_order_relaxed);
    if (!fusion_marks_are_open(reducer) || count == 0)
        return SHOAL_OK;
    return fusion_refuse(reducer, SHOAL_ERR_STATE,
                         "%s: step %llu was not finished: %u of %zu gradients are ready in it, after %u marks; call "
                         "shoal_reducer_finish after each backward pass",
                         call, (unsigned long long)reducer->steps + 1,
                         atomic_load_explicit(&marks->ready_count, memory_order_relaxed), reducer->layout->parameters.count,
                         count);
}

/* ---- Packing ------------------------------------------------------------------------------------------------------------- */

struct squares {
    double sum;
    bool is_nonfinite; /* a value is NaN or infinity */
};

/* Squares of float64 may overflow although the values are finite. */
static bool is_finite(enum shoal_type type, const void *values, size_t count, double squared)
{
    SHOAL_DEFAULT_FLOATS; /* the program may have unmasked exceptions: infinity minus infinity is invalid */
    const double *each = values;
    SHOAL_FLOATS_PIN(squared);
    bool is_all = squared - squared == 0;
    if (is_all || type != SHOAL_FLOAT64)
        return is_all;
    is_all = true;
    for (size_t i = 0; i < count; i++)
        is_all &= each[i] - each[i] == 0;
    return is_all;
}

static bool wants_squares(const struct shoal_reducer *reducer)
{
    return (reducer->options.has_norms || reducer->options.checks_finite) && reducer->step == SHOAL_STEP_REDUCE;
}

/* Packs a gradient and sums squares in one pass. The squares are of the values that are then in the buffer. Gradients on a
 * device are packed when their buffer is full. */
static struct squares pack(struct shoal_reducer *reducer, size_t parameter, const void *memory, size_t offset, size_t count)
{
    const enum shoal_type type = fusion_parameter(reducer, parameter)->type;
    SHOAL_ASSERT(offset + count <= fusion_parameter(reducer, parameter)->count);
    char *view = fusion_view(reducer, parameter) + offset * shoal_type_bytes(type);
    const bool adds = reducer->marks->gradients[parameter].has_sum, is_there = memory == view;
    struct squares squares = {0, false};
    double *wanted = wants_squares(reducer) ? &squares.sum : NULL;
    if ((is_there && !wanted) || reducer->device)
        return squares;
    const uint64_t begin_ns = fusion_now_ns();
    fusion_wide_move(fusion_wide(reducer), type, is_there ? NULL : view, memory, count, 1, adds && !is_there, wanted);
    fusion_stats_packed(reducer, fusion_now_ns() - begin_ns);
    if (!is_there)
        fusion_stats_copied(reducer, count * shoal_type_bytes(type));
    squares.is_nonfinite = wanted && !is_finite(type, view, count, squares.sum);
    return squares;
}

/* The last parameter of a buffer reports that it is full. */
static enum shoal_status complete(struct shoal_reducer *reducer, size_t parameter)
{
    struct gradient *gradient = &reducer->marks->gradients[parameter];
    struct filling_buffer *buffer = &reducer->marks->buffers[reducer->layout->places[parameter].buffer];
    SHOAL_ASSERT(!gradient->is_ready); /* a gradient counts once */
    gradient->is_ready = true;
    if (reducer->step == SHOAL_STEP_LOCAL)
        return SHOAL_OK;
    const unsigned missing = atomic_fetch_sub_explicit(&buffer->missing, 1, memory_order_acq_rel);
    SHOAL_ASSERT(missing > 0);
    if (missing > 1)
        return SHOAL_OK;
    return reducer->marks->on_full(reducer);
}

static enum shoal_status note_ready(struct shoal_reducer *reducer, size_t parameter)
{
    reducer->marks->gradients[parameter].is_used = true;
    fusion_stats_ready(reducer, parameter, atomic_fetch_add_explicit(&reducer->marks->ready_count, 1, memory_order_relaxed));
    return complete(reducer, parameter);
}

/* ---- Marks --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status check_mark(struct shoal_reducer *reducer, const char *call, size_t parameter)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (parameter >= reducer->layout->parameters.count)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: there is no parameter %zu, as there are %zu", call, parameter,
                             reducer->layout->parameters.count);
    if (!fusion_marks_are_open(reducer)) {
        char text[FUSION_TEXT_MAX];
        return fusion_refuse(reducer, SHOAL_ERR_STATE,
                             "%s of %s outside a step: call shoal_reducer_begin before the backward "
                             "pass",
                             call, fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text));
    }
    return SHOAL_OK;
}

static enum shoal_status check_place(const struct shoal_reducer *reducer, const char *call, size_t parameter,
                                     const void *gradient, size_t count)
{
    char wrong[256], text[FUSION_TEXT_MAX];
    const bool is_there = !count || gradient == fusion_view(reducer, parameter);
    const enum shoal_status status = fusion_device_check_mark(reducer, is_there ? NULL : gradient, wrong, sizeof wrong);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    return fusion_refuse(reducer, status, "%s: the gradient of %s %s", call,
                         fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), wrong);
}

/* Returns false if the parameter has another mark. */
static bool claim_mark(struct shoal_reducer *reducer, size_t parameter, enum mark mark)
{
    int unmarked = UNMARKED;
    return atomic_compare_exchange_strong_explicit(&reducer->marks->gradients[parameter].mark, &unmarked, (int)mark,
                                                   memory_order_acq_rel, memory_order_acquire);
}

static void count_mark(struct shoal_reducer *reducer)
{
    atomic_fetch_add_explicit(&reducer->marks->mark_count, 1, memory_order_relaxed);
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
    struct gradient *own = &reducer->marks->gradients[parameter];
    const size_t expected = fusion_parameter(reducer, parameter)->count;
    char text[FUSION_TEXT_MAX];
    if (count != expected || (!gradient && count))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_ready: %s has %zu elements, its gradient %zu%s",
                             fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), expected, count,
                             gradient ? "" : " at NULL");
    FUSION_TRY(check_place(reducer, "shoal_reducer_ready", parameter, gradient, count));
    count_mark(reducer);
    if (!claim_mark(reducer, parameter, WHOLE))
        return fail_twice(reducer, parameter);
    own->first = (struct fusion_part){0, count, gradient, NULL};
    const struct squares squares = pack(reducer, parameter, gradient, 0, count);
    own->squared = squares.sum;
    own->is_nonfinite = squares.is_nonfinite;
    return note_ready(reducer, parameter);
}

/* Call with the lock held. */
static bool overlaps(const struct gradient *gradient, size_t offset, size_t count)
{
    SHOAL_ASSERT(atomic_load_explicit(&gradient->mark, memory_order_relaxed) == IN_PARTS);
    for (const struct fusion_part *part = &gradient->first; part; part = part->next) {
        if (offset < part->offset + part->count && part->offset < offset + count)
            return true;
    }
    return false;
}

/* Takes over a part, which may be freed. Returns false if any of it was marked before. Call with the lock held. */
static bool claim_part(struct shoal_reducer *reducer, size_t parameter, struct fusion_part *part)
{
    struct gradient *own = &reducer->marks->gradients[parameter];
    SHOAL_ASSERT(fusion_has_lock(reducer));
    if (claim_mark(reducer, parameter, IN_PARTS)) {
        own->first = *part;
        own->claimed = part->count;
        free(part);
        return true;
    }
    if (atomic_load_explicit(&own->mark, memory_order_acquire) != IN_PARTS || overlaps(own, part->offset, part->count))
        return false;
    part->next = own->first.next;
    own->first.next = part;
    own->claimed += part->count;
    SHOAL_ASSERT(own->claimed <= fusion_parameter(reducer, parameter)->count); /* because parts do not overlap */
    return true;
}

static enum shoal_status pack_part(struct shoal_reducer *reducer, size_t parameter, const void *memory, size_t offset,
                                   size_t count)
{
    struct gradient *own = &reducer->marks->gradients[parameter];
    const struct squares squares = pack(reducer, parameter, memory, offset, count);
    fusion_lock(reducer);
    own->squared += squares.sum;
    own->is_nonfinite |= squares.is_nonfinite;
    own->packed += count;
    SHOAL_ASSERT(own->packed <= own->claimed);
    const bool is_whole = own->packed == fusion_parameter(reducer, parameter)->count;
    fusion_unlock(reducer);
    return is_whole ? note_ready(reducer, parameter) : SHOAL_OK;
}

enum shoal_status shoal_reducer_ready_part(struct shoal_reducer *reducer, size_t parameter, void *gradient, size_t offset,
                                           size_t count)
{
    FUSION_TRY(check_mark(reducer, "shoal_reducer_ready_part", parameter));
    const size_t expected = fusion_parameter(reducer, parameter)->count;
    char text[FUSION_TEXT_MAX];
    if (offset > expected || count > expected - offset || (!gradient && count))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_ready_part: %s has %zu elements, the part is of %zu from %zu on%s",
                             fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), expected, count,
                             offset, gradient ? "" : ", at NULL");
    if (count == 0 || count == expected)
        return count == expected ? shoal_reducer_ready(reducer, parameter, gradient, count) : SHOAL_OK;
    FUSION_TRY(check_place(reducer, "shoal_reducer_ready_part", parameter, gradient, count));
    struct fusion_part *part = calloc(1, sizeof *part);
    if (!part)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, (long)parameter, "no memory for a part of a gradient");
    *part = (struct fusion_part){offset, count, gradient, NULL};
    count_mark(reducer);
    fusion_lock(reducer);
    const bool is_claimed = claim_part(reducer, parameter, part);
    fusion_unlock(reducer);
    if (is_claimed)
        return pack_part(reducer, parameter, gradient, offset, count);
    free(part);
    return fail_twice(reducer, parameter);
}

/* A sum of LOCAL steps stays. Without one, the contribution is zeros; a device writes them when the buffer is full. */
static enum shoal_status contribute_nothing(struct shoal_reducer *reducer, size_t parameter)
{
    SHOAL_ASSERT(atomic_load_explicit(&reducer->marks->gradients[parameter].mark, memory_order_relaxed) == UNUSED);
    struct gradient *own = &reducer->marks->gradients[parameter];
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    char *view = fusion_view(reducer, parameter);
    if (reducer->step == SHOAL_STEP_REDUCE && !own->has_sum) {
        if (!reducer->device)
            memset(view, 0, fusion_parameter_bytes(each));
        fusion_lock(reducer);
        reducer->marks->buffers[reducer->layout->places[parameter].buffer].has_unused = true;
        fusion_unlock(reducer);
    } else if (reducer->step == SHOAL_STEP_REDUCE) {
        const struct squares squares = pack(reducer, parameter, view, 0, each->count);
        own->is_used = true;
        own->squared = squares.sum;
        own->is_nonfinite = squares.is_nonfinite;
    }
    return complete(reducer, parameter);
}

enum shoal_status shoal_reducer_unused(struct shoal_reducer *reducer, size_t parameter)
{
    FUSION_TRY(check_mark(reducer, "shoal_reducer_unused", parameter));
    if (!reducer->options.allows_unused)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_unused: the reducer was made without allows_unused");
    count_mark(reducer);
    return claim_mark(reducer, parameter, UNUSED) ? contribute_nothing(reducer, parameter) : fail_twice(reducer, parameter);
}

void fusion_marks_take_buffer(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    SHOAL_ASSERT(reducer->offload && fusion_marks_fill(reducer, index));
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
        struct gradient *own = &reducer->marks->gradients[parameter];
        char *view = fusion_view(reducer, parameter);
        if (!fusion_marks_parts(reducer, parameter)) {
            memset(view, 0, fusion_parameter_bytes(each));
        } else if (wants_squares(reducer)) {
            fusion_wide_move(fusion_wide(reducer), each->type, NULL, view, each->count, 1, false, &own->squared);
            own->is_nonfinite = !is_finite(each->type, view, each->count, own->squared);
        }
    }
}

/* ---- The end of a step --------------------------------------------------------------------------------------------------- */

/* Names the first few missing parameters. */
static enum shoal_status fail_missing(struct shoal_reducer *reducer, size_t first, size_t missing)
{
    const struct gradient *gradients = reducer->marks->gradients;
    char names[FUSION_TEXT_MAX] = "", text[FUSION_TEXT_MAX];
    size_t named = 0;
    for (size_t i = first; i < reducer->layout->parameters.count && named < 4; i++) {
        if (gradients[i].is_ready)
            continue;
        const size_t length = strlen(names);
        fusion_parameter_text(&reducer->layout->parameters, i, text, sizeof text);
        snprintf(names + length, sizeof names - length, "%s%.60s", named ? ", " : "", text);
        named++;
    }
    const bool is_partial = atomic_load_explicit(&gradients[first].mark, memory_order_acquire) == IN_PARTS;
    return fusion_fail(reducer, SHOAL_ERR_STATE, (long)first, "%zu of %zu gradients were not %s when the step ended: %s%s%s",
                       missing, reducer->layout->parameters.count, is_partial ? "marked whole" : "marked", names,
                       missing > named ? " ..." : "",
                       reducer->options.allows_unused ? "" : "; allows_unused is for parameters without a gradient");
}

enum shoal_status fusion_marks_complete(struct shoal_reducer *reducer, bool may_be_unused)
{
    struct gradient *gradients = reducer->marks->gradients;
    const size_t count = reducer->layout->parameters.count;
    size_t missing = 0, first = 0;
    for (size_t i = count; i-- > 0;) {
        const int mark = atomic_load_explicit(&gradients[i].mark, memory_order_acquire);
        if (!gradients[i].is_ready && !(mark == UNMARKED && may_be_unused)) {
            missing++;
            first = i;
        }
    }
    if (missing)
        return fail_missing(reducer, first, missing);
    for (size_t i = 0; i < count; i++) {
        if (gradients[i].is_ready)
            continue;
        if (!claim_mark(reducer, i, UNUSED))
            return fail_missing(reducer, i, 1); /* another thread is marking it while the step ends */
        (void)contribute_nothing(reducer, i);   /* the thread that waits for the step sees the failure */
    }
    return SHOAL_OK;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

bool fusion_marks_fill(const struct shoal_reducer *reducer, size_t buffer)
{
    return atomic_load_explicit(&reducer->marks->buffers[buffer].missing, memory_order_acquire) == 0;
}

bool fusion_marks_have_unused(const struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->marks->buffers[buffer].has_unused;
}

void fusion_marks_learn_used(struct shoal_reducer *reducer, size_t buffer, const double *counts)
{
    const struct fusion_buffer *each = &reducer->layout->buffers[buffer];
    SHOAL_ASSERT(fusion_marks_fill(reducer, buffer)); /* a mark of this rank would come too late */
    for (uint32_t i = 0; i < each->count; i++) {
        const uint32_t parameter = reducer->layout->order[each->first + i];
        reducer->marks->gradients[parameter].is_used |= counts[parameter] > 0;
    }
}

bool fusion_marks_use(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer->marks->gradients[parameter].is_used;
}

const struct fusion_part *fusion_marks_parts(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct gradient *gradient = &reducer->marks->gradients[parameter];
    const int mark = atomic_load_explicit(&gradient->mark, memory_order_relaxed);
    return mark == WHOLE || mark == IN_PARTS ? &gradient->first : NULL;
}

bool fusion_marks_have_sum(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer->marks->gradients[parameter].has_sum;
}

void fusion_marks_take_squares(struct shoal_reducer *reducer, size_t parameter, double squared, bool is_nonfinite)
{
    reducer->marks->gradients[parameter].squared = squared;
    reducer->marks->gradients[parameter].is_nonfinite = is_nonfinite;
}

double fusion_marks_sum(const struct shoal_reducer *reducer, bool *is_nonfinite_out, double *used)
{
    SHOAL_DEFAULT_FLOATS;
    double squared = 0;
    *is_nonfinite_out = false;
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        const struct gradient *gradient = &reducer->marks->gradients[i];
        squared += gradient->squared;
        *is_nonfinite_out |= gradient->is_nonfinite;
        if (used)
            used[i] = gradient->is_used;
    }
    SHOAL_FLOATS_PIN(squared);
    return squared;
}

int64_t fusion_marks_first_nonfinite(const struct shoal_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        if (reducer->marks->gradients[i].is_nonfinite)
            return (int64_t)i;
    }
    return -1;
}

/* During a step, in which a callback may ask, returns what is known so far; otherwise what the last step found. */
int shoal_reducer_is_used(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || parameter >= reducer->layout->parameters.count)
        return 0;
    const struct gradient *gradient = &reducer->marks->gradients[parameter];
    return fusion_marks_are_open(reducer) ? gradient->is_used : gradient->was_used;
}
