/* A step: begin, finish, join. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/floats.h"
#include "device/gpu_packer.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/device_buffer.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/measure.h"
#include "fusion/reducer/offload.h"
#include "fusion/reducer/optimizer.h"
#include "fusion/reducer/out.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/relayout.h"
#include "fusion/reducer/reducer_noise.h"
#include "fusion/reducer/stats.h"
#include "fusion/reducer/step_bytes.h"
#include "fusion/reducer/tally.h"

#define WAIT_MS 20       /* then a waiting thread checks again which request is the oldest */
#define DEVICE_MS 600000 /* deadline of gradients from a device, if options.timeout_ms is 0 */
#define DEVICE_NS 50000L /* then it asks a device again: it cannot wake a thread */

/* ---- Begin --------------------------------------------------------------------------------------------------------------- */

static void open_step(struct shoal_reducer *reducer, enum shoal_step step)
{
    fusion_marks_reset(reducer);
    fusion_lock(reducer);
    fusion_flow_reset(reducer);
    fusion_compressor_reset(reducer);
    fusion_optimizer_reset(reducer);
    fusion_offload_reset(reducer);
    fusion_tally_reset(reducer, fusion_measure_has_own(reducer));
    fusion_out_reset(reducer);
    reducer->step = step;
    reducer->is_armed = step == SHOAL_STEP_REDUCE;
    fusion_unlock(reducer);
    fusion_stats_begin(reducer);
    fusion_marks_open(reducer);
}

static void close_step(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    reducer->is_armed = false;
    fusion_unlock(reducer);
    fusion_marks_close(reducer);
}

static enum shoal_status check_begin(struct shoal_reducer *reducer, const char *call)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    return fusion_marks_check_none(reducer, call);
}

enum shoal_status shoal_reducer_begin(struct shoal_reducer *reducer, enum shoal_step step)
{
    FUSION_TRY(check_begin(reducer, "shoal_reducer_begin"));
    if (step != SHOAL_STEP_REDUCE && step != SHOAL_STEP_LOCAL)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_begin: there is no kind of step %d", (int)step);
    FUSION_TRY(fusion_offload_check(reducer, step));
    if (reducer->device)
        FUSION_TRY(fusion_device_begin(reducer, step));
    FUSION_TRY(fusion_renew_layout(reducer));
    open_step(reducer, step);
    return step == SHOAL_STEP_REDUCE && reducer->options.is_uneven ? fusion_tally_post_head(reducer, true) : SHOAL_OK;
}

/* ---- Finish -------------------------------------------------------------------------------------------------------------- */

/* Waits until a field changes, but at most for this time. Call with the lock held; it is released meanwhile. */
static void wait_for_change(struct shoal_reducer *reducer, long most_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += most_ns;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(&reducer->changed, &reducer->lock, &until);
}

/* Makes progress from this thread for a moment, or waits until a field changes. Call with the lock held; it is released
 * meanwhile. */
static void wait_a_little(struct shoal_reducer *reducer)
{
    struct shoal_request *request = fusion_flow_oldest(reducer);
    if (fusion_offload_awaits_device(reducer)) {
        wait_for_change(reducer, DEVICE_NS);
        return;
    }
    if (request) {
        fusion_unlock(reducer);
        const enum shoal_status status = shoal_request_wait(request, WAIT_MS);
        fusion_lock(reducer);
        if (status == SHOAL_PENDING || fusion_failed(reducer) != SHOAL_OK || fusion_flow_oldest(reducer) != request)
            return;
    } /* if it is done, the thread that received the completion is about to note it */
    wait_for_change(reducer, WAIT_MS * 1000000L);
}

static bool is_all_done(const struct shoal_reducer *reducer)
{
    return fusion_out_is_complete(reducer) && fusion_tally_is_done(reducer) && fusion_optimizer_is_done(reducer);
}

/* A device that does nothing keeps nobody waiting for ever. Call with the lock held; it is released meanwhile. */
static void serve_device(struct shoal_reducer *reducer, uint64_t begin_ns)
{
    const uint32_t most_ms = reducer->options.timeout_ms ? reducer->options.timeout_ms : DEVICE_MS;
    const bool is_late = fusion_offload_awaits_device(reducer) && fusion_now_ns() - begin_ns > most_ms * UINT64_C(1000000);
    enum shoal_status status;
    fusion_unlock(reducer);
    if (is_late)
        status = fusion_fail(reducer, SHOAL_ERR_TIMEOUT, -1,
                             "gradients have not come from the device %u ms after finish: does a kernel on the stream hang?",
                             most_ms);
    else
        status = fusion_offload_advance(reducer);
    (void)status; /* the caller asks whether the reducer has failed */
    fusion_lock(reducer);
}

static enum shoal_status wait_for_all(struct shoal_reducer *reducer)
{
    const uint64_t begin_ns = fusion_now_ns();
    fusion_lock(reducer);
    fusion_advance(reducer);
    while (fusion_failed(reducer) == SHOAL_OK && !is_all_done(reducer)) {
        if (reducer->offload)
            serve_device(reducer, begin_ns);
        if (!reducer->options.has_thread)
            fusion_put_out(reducer);
        if (fusion_failed(reducer) == SHOAL_OK && !is_all_done(reducer))
            wait_a_little(reducer);
    }
    fusion_unlock(reducer);
    return fusion_failed(reducer) == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

/* Finds the first such parameter of the lowest rank. All ranks call this, because all have seen in the tail that there is
 * one. */
static enum shoal_status name_nonfinite(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    const struct shoal_options options = fusion_options(reducer);
    const int64_t own = fusion_marks_first_nonfinite(reducer);
    int64_t *all = calloc((size_t)reducer->size, sizeof *all);
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

/* Steps all parameters now that the whole gradient is known, or none if it is not finite. A sum of finite values may be
 * infinite, which the squares show. Parameters that were stepped early are stepped again if they have to be clipped. */
static enum shoal_status step_or_skip(struct shoal_reducer *reducer, struct shoal_step_result *result)
{
    const bool is_finite = result->nonfinite_parameter < 0 && result->squared - result->squared == 0;
    result->is_skipped = reducer->options.checks_finite && !is_finite;
    if (result->is_skipped && fusion_steps_early(reducer))
        FUSION_TRY(fusion_out_undo(reducer));
    else if (!result->is_skipped && (fusion_steps_late(reducer) || result->clip != 1))
        FUSION_TRY(fusion_out_clip(reducer, result->clip));
    return wait_for_all(reducer);
}

/* Computes the result of the whole step, when all averages are in place. */
static enum shoal_status conclude(struct shoal_reducer *reducer, int active, struct shoal_step_result *result)
{
    SHOAL_DEFAULT_FLOATS;
    SHOAL_ASSERT(active > 0);
    result->step = reducer->steps + 1;
    result->active = active;
    result->squared = fusion_out_squared(reducer);
    if (reducer->optimizer && (reducer->options.has_norms || fusion_optimizer_awaits_verdict(reducer)))
        FUSION_TRY(fusion_optimizer_sum_squares(reducer, &result->squared));
    if (reducer->options.has_norms)
        result->local_squared = fusion_tally_squared(reducer) / active * fusion_optimizer_square_scale(reducer);
    if (reducer->options.checks_finite && fusion_tally_is_nonfinite(reducer))
        FUSION_TRY(name_nonfinite(reducer, result));
    if (reducer->options.max_norm > 0) {
        const double clip = reducer->options.max_norm / (fusion_square_root(result->squared) + 1e-6);
        result->clip = clip < 1 ? clip : 1; /* NaN: 1, because clipping cannot help */
        if (!reducer->optimizer)
            return fusion_out_clip(reducer, result->clip);
    }
    return fusion_optimizer_awaits_verdict(reducer) ? step_or_skip(reducer, result) : SHOAL_OK;
}

/* The factor of an average over all ranks if those that have joined do not count. */
static double factor_of(const struct shoal_reducer *reducer, int active)
{
    SHOAL_DEFAULT_FLOATS; /* the quotient is rounded, on each rank alike */
    double ranks = reducer->size;
    SHOAL_FLOATS_PIN(ranks);
    double factor = fusion_scales_late(reducer) ? ranks / active : 1;
    SHOAL_FLOATS_PIN(factor);
    return factor;
}

/* Gets the norms that a device has computed. */
static enum shoal_status take_measures(struct shoal_reducer *reducer, double factor)
{
    if (!reducer->measure)
        return SHOAL_OK;
    FUSION_TRY(fusion_measure_wait(reducer, factor));
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        struct fusion_measured measured;
        if (fusion_measure_own_of(reducer, i, &measured))
            fusion_marks_take_squares(reducer, i, measured.squared, measured.is_nonfinite);
        if (fusion_measure_average_of(reducer, i, &measured))
            fusion_out_take_squares(reducer, i, measured.squared);
    }
    fusion_lock(reducer);
    fusion_tally_release_tail(reducer);
    fusion_unlock(reducer);
    return SHOAL_OK;
}

static enum shoal_status end_step(struct shoal_reducer *reducer, bool may_be_unused, struct shoal_step_result *result_out)
{
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    struct shoal_step_stats counted = SHOAL_STEP_STATS_INIT;
    int active;
    FUSION_TRY(fusion_marks_complete(reducer, may_be_unused));
    FUSION_TRY(fusion_tally_take_head(reducer, &active));
    fusion_lock(reducer);
    fusion_out_set_factor(reducer, factor_of(reducer, active));
    fusion_unlock(reducer);
    FUSION_TRY(take_measures(reducer, factor_of(reducer, active)));
    FUSION_TRY(wait_for_all(reducer));
    FUSION_TRY(conclude(reducer, active, &result));
    fusion_noise_take(reducer, &result);
    FUSION_TRY(fusion_optimizer_rescale(reducer, &result));
    if (reducer->optimizer && !result.is_skipped)
        fusion_optimizer_commit(reducer);
    FUSION_TRY(fusion_offload_finish(reducer, result.is_skipped));
    reducer->steps++;
    fusion_count_bytes(reducer, &counted);
    fusion_stats_keep(reducer, &counted);
    close_step(reducer);
    shoal_struct_copy_out(result_out, &result, sizeof result);
    return SHOAL_OK;
}

static enum shoal_status end_local_step(struct shoal_reducer *reducer)
{
    if (reducer->device)
        FUSION_TRY(fusion_device_collect(reducer));
    close_step(reducer);
    return SHOAL_OK;
}

static enum shoal_status check_result(const struct shoal_reducer *reducer, const char *call,
                                      const struct shoal_step_result *result_out)
{
    if (result_out && !shoal_struct_bytes(result_out))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: result_out->struct_bytes is not set: use SHOAL_STEP_RESULT_INIT",
                             call);
    return SHOAL_OK;
}

static enum shoal_status finish(struct shoal_reducer *reducer, struct shoal_step_result *result_out)
{
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    FUSION_TRY(check_result(reducer, "shoal_reducer_finish", result_out));
    if (!fusion_marks_are_open(reducer))
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_finish: no step has begun");
    if (reducer->step == SHOAL_STEP_LOCAL)
        return end_local_step(reducer);
    fusion_stats_finish(reducer);
    return end_step(reducer, reducer->options.allows_unused, result_out);
}

/* Call with the lock held. */
static bool is_posting(const struct shoal_reducer *reducer)
{
    return fusion_flow_is_posting(reducer) || fusion_offload_is_working(reducer);
}

/* Work that is put on the caller's stream from now on runs after all lane work on its gradients. Another thread's mark may be
 * putting a buffer on its lane; that must also end first. */
static enum shoal_status step_give_up(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    while (is_posting(reducer))
        pthread_cond_wait(&reducer->changed, &reducer->lock);
    fusion_unlock(reducer);
    (void)fusion_failure_status(reducer); /* the operations have ended, or are about to */
    shoal_gpu_packer_give_back(fusion_device_packer(reducer));
    return fusion_failure_status(reducer);
}

/* Both finish and join return through this function, whatever the status. The caller may free its gradients afterwards, so no
 * thread of the reducer may still post, copy averages back or be in on_buffer. On a device the caller's stream waits for the
 * lanes of a failed step. */
static enum shoal_status leave_step(struct shoal_reducer *reducer, enum shoal_status status)
{
    if (!reducer)
        return status;
    fusion_lock(reducer);
    while (fusion_out_is_busy(reducer) || is_posting(reducer))
        pthread_cond_wait(&reducer->changed, &reducer->lock);
    fusion_unlock(reducer);
    return reducer->device && fusion_failed(reducer) != SHOAL_OK ? step_give_up(reducer) : status;
}

enum shoal_status shoal_reducer_finish(struct shoal_reducer *reducer, struct shoal_step_result *result_out)
{
    return leave_step(reducer, reducer ? finish(reducer, result_out) : SHOAL_ERR_ARGUMENT);
}

/* ---- Join ---------------------------------------------------------------------------------------------------------------- */

static enum shoal_status join(struct shoal_reducer *reducer, int *more_out, struct shoal_step_result *result_out)
{
    int active;
    FUSION_TRY(check_begin(reducer, "shoal_reducer_join"));
    FUSION_TRY(check_result(reducer, "shoal_reducer_join", result_out));
    if (!more_out || !reducer->options.is_uneven || fusion_tally_has_head(reducer))
        return fusion_refuse(reducer, more_out ? SHOAL_ERR_STATE : SHOAL_ERR_ARGUMENT, "shoal_reducer_join: %s",
                             !more_out                     ? "more_out is NULL"
                             : !reducer->options.is_uneven ? "the reducer was made without is_uneven"
                                                           : "a step has begun: finish it before");
    FUSION_TRY(fusion_offload_check(reducer, SHOAL_STEP_REDUCE));
    if (reducer->device)
        FUSION_TRY(fusion_device_begin(reducer, SHOAL_STEP_REDUCE));
    FUSION_TRY(fusion_renew_layout(reducer));
    fusion_marks_drop_sums(reducer); /* this rank does not count as active */
    FUSION_TRY(fusion_tally_post_head(reducer, false));
    FUSION_TRY(fusion_tally_take_head(reducer, &active));
    *more_out = active > 0;
    if (!*more_out)
        return SHOAL_OK;
    open_step(reducer, SHOAL_STEP_REDUCE);
    fusion_stats_finish(reducer);
    return end_step(reducer, true, result_out);
}

enum shoal_status shoal_reducer_join(struct shoal_reducer *reducer, int *more_out, struct shoal_step_result *result_out)
{
    return leave_step(reducer, join(reducer, more_out, result_out));
}

/* ---- Between steps ------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_reducer_wait(struct shoal_reducer *reducer, uint32_t timeout_ms)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_status status =
        reducer->device && fusion_failed(reducer) == SHOAL_OK ? fusion_device_wait(reducer, timeout_ms) : SHOAL_OK;
    if (fusion_failed(reducer) == SHOAL_OK)
        return status;
    return reducer->device ? step_give_up(reducer) : fusion_failure_status(reducer);
}

enum shoal_status shoal_reducer_order(const struct shoal_reducer *reducer, uint32_t *order_out)
{
    if (!reducer || !order_out)
        return SHOAL_ERR_ARGUMENT;
    if (reducer->steps == 0)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_order: no step has been finished");
    if (reducer->device) /* finish has not waited */
        FUSION_TRY(shoal_reducer_wait((struct shoal_reducer *)(uintptr_t)reducer, SHOAL_FOREVER));
    fusion_stats_order(reducer, order_out);
    return SHOAL_OK;
}
