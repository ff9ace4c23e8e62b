#include "fusion/reducer/tally.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_failure.h"

enum { NONFINITE, SQUARED, INVERSE, USED }; /* fields of a tail; from USED on, one for each parameter */

struct fusion_tally {
    double inverse;         /* 1 / the samples in this rank's batch; 0 if nobody asks for it */
    int64_t head, head_sum; /* each active rank contributes 1; the sum is their number */
    struct shoal_request *head_request;
    double *tail, *tail_sum;
    size_t tail_count;                  /* 0 if steps have no tail */
    bool counts_used;                   /* the tail continues after USED */
    struct shoal_request *tail_request; /* lock, as the following fields */
    bool is_tail_posted, is_tail_done;
    bool is_tail_held; /* its contents are not known yet */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_tally_create(struct shoal_reducer *reducer)
{
    const struct shoal_reducer_options *options = &reducer->options;
    struct fusion_tally *tally = reducer->tally = calloc(1, sizeof *tally);
    if (!tally)
        return SHOAL_ERR_MEMORY;
    tally->counts_used = options->allows_unused || options->is_uneven;
    if (tally->counts_used || options->has_norms || options->checks_finite)
        tally->tail_count = USED + (tally->counts_used ? reducer->layout->parameters.count : 0);
    tally->tail = calloc(tally->tail_count + 1, sizeof *tally->tail);
    tally->tail_sum = calloc(tally->tail_count + 1, sizeof *tally->tail_sum);
    return tally->tail && tally->tail_sum ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void fusion_tally_destroy(struct shoal_reducer *reducer)
{
    struct fusion_tally *tally = reducer->tally;
    if (!tally)
        return;
    shoal_request_free(tally->head_request);
    shoal_request_free(tally->tail_request);
    free(tally->tail);
    free(tally->tail_sum);
    free(tally);
}

/* ---- The head ------------------------------------------------------------------------------------------------------------ */

bool fusion_tally_has_head(const struct shoal_reducer *reducer)
{
    return reducer->tally->head_request != NULL;
}

/* Does not wait: the number of active ranks is known only when all ranks have contributed. */
enum shoal_status fusion_tally_post_head(struct shoal_reducer *reducer, bool is_active)
{
    struct fusion_tally *tally = reducer->tally;
    const struct shoal_options options = fusion_options(reducer);
    if (tally->head_request)
        return SHOAL_OK;
    tally->head = is_active;
    const enum shoal_status status = shoal_allreduce_post(reducer->comm, &tally->head, &tally->head_sum, 1, SHOAL_INT64,
                                                          SHOAL_SUM, &options, &tally->head_request);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_operation_not_posted(reducer, status, -2);
    return fusion_failure_status(reducer);
}

enum shoal_status fusion_tally_take_head(struct shoal_reducer *reducer, int *active_out)
{
    struct fusion_tally *tally = reducer->tally;
    enum shoal_status status = SHOAL_OK;
    if (tally->head_request)
        status = shoal_request_wait(tally->head_request, SHOAL_FOREVER);
    shoal_request_free(tally->head_request);
    tally->head_request = NULL;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -2);
        return fusion_failure_status(reducer);
    }
    *active_out = reducer->options.is_uneven ? (int)tally->head_sum : reducer->size;
    SHOAL_ASSERT(*active_out >= 0 && *active_out <= reducer->size);
    return SHOAL_OK;
}

void fusion_tally_set_samples(struct shoal_reducer *reducer, double samples)
{
    SHOAL_ASSERT(samples > 0);
    SHOAL_DEFAULT_FLOATS;
    double inverse = 1 / samples;
    SHOAL_FLOATS_PIN(inverse);
    reducer->tally->inverse = inverse;
}

/* ---- The tail ------------------------------------------------------------------------------------------------------------ */

void fusion_tally_reset(struct shoal_reducer *reducer, bool holds_tail)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_tally *tally = reducer->tally;
    shoal_request_free(tally->tail_request);
    tally->tail_request = NULL;
    tally->is_tail_posted = tally->is_tail_done = false;
    tally->is_tail_held = holds_tail;
}

void fusion_tally_release_tail(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    reducer->tally->is_tail_held = false;
}

bool fusion_tally_claim_tail(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_tally *tally = reducer->tally;
    if (tally->tail_count == 0 || tally->is_tail_posted || tally->is_tail_held)
        return false;
    tally->is_tail_posted = true;
    return true;
}

static void tail_done(void *arg, enum shoal_status status)
{
    struct shoal_reducer *reducer = arg;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return;
    }
    fusion_lock(reducer);
    SHOAL_ASSERT(reducer->tally->is_tail_posted && !reducer->tally->is_tail_done);
    reducer->tally->is_tail_done = true;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

enum shoal_status fusion_tally_post_tail(struct shoal_reducer *reducer)
{
    struct fusion_tally *tally = reducer->tally;
    const struct shoal_options options = fusion_options(reducer);
    struct shoal_request *request;
    bool is_nonfinite;
    SHOAL_ASSERT(tally->tail_count >= USED);
    tally->tail[SQUARED] = fusion_marks_sum(reducer, &is_nonfinite, tally->counts_used ? tally->tail + USED : NULL);
    tally->tail[NONFINITE] = is_nonfinite;
    tally->tail[INVERSE] = reducer->options.is_uneven && !tally->head ? 0 : tally->inverse;
    FUSION_TRY(shoal_allreduce_post(reducer->comm, tally->tail, tally->tail_sum, tally->tail_count, SHOAL_FLOAT64, SHOAL_SUM,
                                    &options, &request));
    fusion_lock(reducer);
    tally->tail_request = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, tail_done, reducer);
    return SHOAL_OK;
}

struct shoal_request *fusion_tally_request(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct fusion_tally *tally = reducer->tally;
    return tally->is_tail_posted && !tally->is_tail_done ? tally->tail_request : NULL;
}

bool fusion_tally_is_done(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->tally->tail_count == 0 || reducer->tally->is_tail_done;
}

const double *fusion_tally_used(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->tally->counts_used);
    return reducer->tally->tail_sum + USED;
}

bool fusion_tally_is_nonfinite(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->tally->is_tail_done);
    return reducer->tally->tail_sum[NONFINITE] > 0;
}

double fusion_tally_squared(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->tally->is_tail_done);
    return reducer->tally->tail_sum[SQUARED];
}

double fusion_tally_inverse(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(reducer->tally->is_tail_done);
    return reducer->tally->tail_sum[INVERSE];
}
