/* An exchange of one fragment: puts pseudo-gradients into the buffers of its reducer, and takes averages out of them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/lists.h"
#include "fusion/outer/outer_steps.h"

/* ---- Which step ranks are in --------------------------------------------------------------------------------------------- */

static void describe_record(const struct outer_record *record, char *text, size_t text_bytes)
{
    if (record->call == OUTER_FINISH)
        snprintf(text, text_bytes, "called shoal_outer_finish after %" PRIu64 " steps", record->step);
    else
        snprintf(text, text_bytes, "began the exchange of fragment %" PRId32 " in step %" PRIu64, record->fragment,
                 record->step);
}

static bool is_same(const struct outer_record *a, const struct outer_record *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static enum shoal_status compare_records(struct shoal_outer *outer, const struct outer_record *all)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    char there[96], here[96], text[FUSION_TEXT_MAX];
    const int common = fusion_most_common(all, sizeof *all, outer->size);
    for (int r = 0; r < outer->size; r++) {
        if (is_same(&all[r], &all[common]))
            continue;
        describe_record(&all[common], there, sizeof there);
        describe_record(&all[r], here, sizeof here);
        snprintf(text, sizeof text,
                 "ranks are in different steps: rank %d %s, rank %d %s; all ranks must call shoal_outer_step "
                 "equally often",
                 common, there, r, here);
        cause.status = SHOAL_ERR_MISMATCH;
        cause.rank = r;
        return outer_fail(outer, SHOAL_ERR_MISMATCH, -1, &cause, text);
    }
    return SHOAL_OK;
}

/* For a failure of this rank alone, as far as it knows. */
static enum shoal_status own_failed(struct shoal_outer *outer, enum shoal_status status, int fragment)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    char text[FUSION_TEXT_MAX];
    snprintf(text, sizeof text, "rank %d could not post its part: %s", outer->rank, shoal_status_name(status));
    cause.rank = cause.reporter = outer->rank;
    return outer_fail(outer, status, fragment, &cause, text);
}

static enum shoal_status reducer_failed(struct shoal_outer *outer, enum shoal_status status, uint32_t index)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    const bool is_known = shoal_reducer_failure(outer->fragments[index].reducer, &cause) == SHOAL_OK;
    return is_known ? outer_fail(outer, status, (int)index, &cause, cause.text) : own_failed(outer, status, (int)index);
}

static enum shoal_status control_failed(struct shoal_outer *outer, enum shoal_status status, int fragment)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    const bool is_known = shoal_last_failure(outer->context, outer->control, &cause) == SHOAL_OK;
    return is_known ? outer_fail(outer, status, fragment, &cause, cause.text) : own_failed(outer, status, fragment);
}

_Static_assert(sizeof(struct outer_record) == 24, "records are sent and compared as bytes: they have no padding");

enum shoal_status outer_meet(struct shoal_outer *outer)
{
    const struct shoal_options options = outer_operation(outer);
    const struct outer_record own = {outer->step, outer->phase, OUTER_FINISH, -1};
    struct outer_record *all = outer->fragments[0].all; /* no exchange is under way */
    SHOAL_ASSERT(outer_first_due(outer) < 0);
    const enum shoal_status status = shoal_allgather(outer->control, &own, all, sizeof own, SHOAL_UINT8, &options);
    return status == SHOAL_OK ? compare_records(outer, all) : control_failed(outer, status, -1);
}

static enum shoal_status post_record(struct shoal_outer *outer, uint32_t index)
{
    const struct shoal_options options = outer_operation(outer);
    struct outer_fragment *fragment = &outer->fragments[index];
    fragment->own = (struct outer_record){outer->step, outer->phase, OUTER_EXCHANGE, (int32_t)index};
    return shoal_allgather_post(outer->control, &fragment->own, fragment->all, sizeof fragment->own, SHOAL_UINT8, &options,
                                &fragment->request);
}

static enum shoal_status take_record(struct shoal_outer *outer, uint32_t index)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    SHOAL_ASSERT(fragment->request);
    const enum shoal_status status = shoal_request_wait(fragment->request, SHOAL_FOREVER);
    shoal_request_free(fragment->request);
    fragment->request = NULL;
    return status == SHOAL_OK ? compare_records(outer, fragment->all) : control_failed(outer, status, (int)index);
}

/* ---- Begin --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status mark_all(struct shoal_outer *outer, const struct outer_fragment *fragment, void *const *memory)
{
    FUSION_TRY(shoal_reducer_begin(fragment->reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < fragment->count; i++) {
        const uint32_t parameter = fragment->members[i];
        const struct shoal_parameter *each = &outer->parameters.items[parameter];
        void *view = shoal_reducer_view(fragment->reducer, i);
        if (each->count)
            outer_difference(outer->kernels, each, view, outer->anchors ? outer->anchors[parameter] : NULL, memory[parameter]);
        FUSION_TRY(shoal_reducer_ready(fragment->reducer, i, view, each->count));
    }
    return SHOAL_OK;
}

enum shoal_status outer_begin(struct shoal_outer *outer, uint32_t index, void *const *memory)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    SHOAL_ASSERT(!fragment->is_under_way && !fragment->is_averaged && !fragment->request);
    const uint64_t begin_ns = fusion_now_ns();
    fragment->begun_at = outer->phase;
    fragment->due_at = outer->phase + outer->options.delay;
    enum shoal_status status = fragment->reducer ? mark_all(outer, fragment, memory) : SHOAL_OK;
    if (status != SHOAL_OK)
        return reducer_failed(outer, status, index);
    status = post_record(outer, index);
    if (status != SHOAL_OK)
        return control_failed(outer, status, (int)index);
    fragment->is_under_way = true;
    outer->stats.computed_us += (double)(fusion_now_ns() - begin_ns) / 1e3;
    return SHOAL_OK;
}

/* ---- End ----------------------------------------------------------------------------------------------------------------- */

int outer_first_due(const struct shoal_outer *outer)
{
    int first = -1;
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        if (outer->fragments[f].is_under_way && (first < 0 || outer->fragments[f].due_at < outer->fragments[first].due_at))
            first = (int)f;
    }
    return first;
}

static void exchange_count_bytes(struct shoal_outer *outer, const struct outer_fragment *fragment)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    if (shoal_reducer_stats(fragment->reducer, &stats) != SHOAL_OK)
        return;
    outer->stats.sent_bytes += stats.sent_bytes;
    outer->stats.network_bytes += stats.network_bytes;
}

enum shoal_status outer_await(struct shoal_outer *outer, uint32_t index)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    SHOAL_ASSERT(fragment->is_under_way);
    if (fragment->is_averaged)
        return SHOAL_OK;
    const uint64_t begin_ns = fusion_now_ns();
    FUSION_TRY(take_record(outer, index));
    const enum shoal_status status = fragment->reducer ? shoal_reducer_finish(fragment->reducer, NULL) : SHOAL_OK;
    outer->stats.waited_us += (double)(fusion_now_ns() - begin_ns) / 1e3;
    if (status != SHOAL_OK)
        return reducer_failed(outer, status, index);
    if (fragment->reducer)
        exchange_count_bytes(outer, fragment);
    fragment->is_averaged = true;
    return SHOAL_OK;
}

enum shoal_status outer_end(struct shoal_outer *outer, uint32_t index, void *const *memory, double mixing)
{
    struct outer_fragment *fragment = &outer->fragments[index];
    const struct shoal_outer_options *options = &outer->options;
    const struct outer_update update = {options->lr, options->momentum, mixing, options->nesterov != 0};
    FUSION_TRY(outer_await(outer, index));
    const uint64_t begin_ns = fusion_now_ns();
    for (size_t i = 0; i < fragment->count; i++) {
        const uint32_t parameter = fragment->members[i];
        const struct shoal_parameter *each = &outer->parameters.items[parameter];
        if (each->count)
            outer_apply(outer->kernels, each, &update, shoal_reducer_view(fragment->reducer, i),
                        outer->anchors ? outer->anchors[parameter] : NULL, outer->momenta ? outer->momenta[parameter] : NULL,
                        memory[parameter]);
    }
    outer->stats.computed_us += (double)(fusion_now_ns() - begin_ns) / 1e3;
    outer->stats.exchanges++;
    fragment->is_under_way = fragment->is_averaged = false;
    return SHOAL_OK;
}
