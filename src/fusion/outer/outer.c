/* The schedule of outer steps. */
#include "base/assert.h"
#include "fusion/outer/outer_steps.h"
#include "fusion/reducer/reducer_failure.h"

enum shoal_status shoal_outer_stats(const struct shoal_outer *outer, struct shoal_outer_totals *stats_out)
{
    if (!outer || !shoal_struct_bytes(stats_out))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_outer_totals totals = outer->stats;
    totals.steps = outer->step;
    shoal_struct_copy_out(stats_out, &totals, sizeof totals);
    return SHOAL_OK;
}

/* ---- The schedule -------------------------------------------------------------------------------------------------------- */

/* Returns the fragment that begins in a phase, or -1. Their offsets differ, because there are at most as many fragments as
 * steps. */
static int fragment_that_begins(const struct shoal_outer *outer, uint64_t phase)
{
    SHOAL_ASSERT(phase > 0 && outer->options.fragments <= outer->options.every);
    const uint64_t every = outer->options.every, fragments = outer->options.fragments;
    const uint64_t offset = (phase - 1) % every + 1;
    for (uint64_t f = 0; f < fragments; f++) {
        if ((f + 1) * every / fragments == offset)
            return (int)f;
    }
    return -1;
}

/* Returns the fragment that was begun earlier and is to be applied in a phase, or -1. */
static int fragment_that_ends(const struct shoal_outer *outer, uint64_t phase)
{
    const int first = outer_first_due(outer);
    SHOAL_ASSERT(first < 0 || outer->fragments[first].due_at >= phase ||
                 outer->failure.status != SHOAL_OK); /* none is missed */
    return first >= 0 && outer->fragments[first].due_at == phase ? first : -1;
}

int shoal_outer_is_due(const struct shoal_outer *outer)
{
    return outer && (fragment_that_begins(outer, outer->phase + 1) >= 0 || fragment_that_ends(outer, outer->phase + 1) >= 0);
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status report_failure(const struct shoal_outer *outer)
{
    return shoal_report(outer->context, outer->failure.status, NULL, outer->failure.text);
}

static enum shoal_status check_memory(const struct shoal_outer *outer, const char *call, void *const *memory)
{
    char text[FUSION_TEXT_MAX];
    for (size_t i = 0; i < outer->parameters.count; i++) {
        if (memory && (memory[i] || outer->parameters.items[i].count == 0))
            continue;
        return outer_refuse(outer, SHOAL_ERR_ARGUMENT, "%s: the memory of %s is NULL", call,
                            memory ? fusion_parameter_text(&outer->parameters, i, text, sizeof text) : "the parameters");
    }
    return SHOAL_OK;
}

enum shoal_status shoal_outer_step(struct shoal_outer *outer, void *const *memory, struct shoal_outer_result *result_out)
{
    if (!outer)
        return SHOAL_ERR_ARGUMENT;
    if (outer->failure.status != SHOAL_OK)
        return report_failure(outer);
    if (result_out && !shoal_struct_bytes(result_out))
        return outer_refuse(outer, SHOAL_ERR_ARGUMENT,
                            "shoal_outer_step: result_out->struct_bytes is not set: use SHOAL_OUTER_RESULT_INIT");
    if (shoal_outer_is_due(outer))
        FUSION_TRY(check_memory(outer, "shoal_outer_step", memory));
    struct shoal_outer_result result = SHOAL_OUTER_RESULT_INIT;
    result.step = ++outer->step;
    const uint64_t phase = ++outer->phase;
    result.applied = fragment_that_ends(outer, phase);
    if (result.applied >= 0)
        FUSION_TRY(outer_end(outer, (uint32_t)result.applied, memory, outer->options.mixing));
    result.begun = fragment_that_begins(outer, phase);
    if (result.begun >= 0)
        FUSION_TRY(outer_begin(outer, (uint32_t)result.begun, memory));
    if (result.begun >= 0 && outer->options.delay == 0) {
        FUSION_TRY(outer_end(outer, (uint32_t)result.begun, memory, outer->options.mixing));
        result.applied = result.begun;
    }
    shoal_struct_copy_out(result_out, &result, sizeof result);
    return SHOAL_OK;
}

/* Ends fragments in the order in which they were begun. *ended_out has a bit for each of them. */
static enum shoal_status end_all(struct shoal_outer *outer, void *const *memory, uint64_t *ended_out)
{
    *ended_out = 0;
    for (int f = outer_first_due(outer); f >= 0; f = outer_first_due(outer)) {
        FUSION_TRY(outer_end(outer, (uint32_t)f, memory, 0));
        *ended_out |= UINT64_C(1) << f;
    }
    return SHOAL_OK;
}

/* Returns true if all ranks hold the same values of the fragment, because it has just been applied with mixing 0. */
static bool is_equal(const struct shoal_outer *outer, uint32_t fragment, uint64_t ended)
{
    const bool is_new = outer->fragments[fragment].begun_at == outer->phase;
    return (ended >> fragment & 1) || (is_new && (outer->options.mixing == 0 || outer->phase == 0));
}

enum shoal_status shoal_outer_finish(struct shoal_outer *outer, void *const *memory)
{
    uint64_t ended;
    if (!outer)
        return SHOAL_ERR_ARGUMENT;
    if (outer->failure.status != SHOAL_OK)
        return report_failure(outer);
    FUSION_TRY(check_memory(outer, "shoal_outer_finish", memory));
    FUSION_TRY(end_all(outer, memory, &ended));
    FUSION_TRY(outer_meet(outer));
    for (uint32_t f = 0; f < outer->options.fragments; f++) {
        if (!is_equal(outer, f, ended))
            FUSION_TRY(outer_begin(outer, f, memory));
    }
    FUSION_TRY(end_all(outer, memory, &ended));
    for (uint32_t f = 0; f < outer->options.fragments; f++)
        outer->fragments[f].begun_at = 0;
    outer->phase = 0;
    return SHOAL_OK;
}
