/* The schedule of outer steps, and their failures. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fusion/outer/outer_steps.h"
#include "fusion/reducer/reducer_failure.h"

struct shoal_options outer_operation(const struct shoal_outer *outer)
{
    return fusion_deadline(outer->options.timeout_ms);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

enum shoal_status outer_refuse(const struct shoal_outer *outer, enum shoal_status status, const char *format, ...)
{
    char text[FUSION_TEXT_MAX], line[FUSION_TEXT_MAX + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(line, sizeof line, "%s, rank %d: %s", outer->name, outer->rank, text);
    return shoal_report(outer->context, status, "fusion", line);
}

/* "fragment 1 of 4: parameter 1 (layer1) to parameter 21 (layer21)" */
static void describe_fragment(const struct shoal_outer *outer, int index, char *text, size_t text_bytes)
{
    char first[FUSION_TEXT_MAX], last[FUSION_TEXT_MAX];
    const struct outer_fragment *fragment = &outer->fragments[index];
    const int length = snprintf(text, text_bytes, "fragment %d of %u", index, (unsigned)outer->options.fragments);
    if (length < 0 || (size_t)length >= text_bytes || fragment->count == 0)
        return;
    fusion_parameter_text(&outer->parameters, fragment->members[0], first, sizeof first);
    fusion_parameter_text(&outer->parameters, fragment->members[fragment->count - 1], last, sizeof last);
    snprintf(text + length, text_bytes - (size_t)length, fragment->count > 1 ? ": %.32s to %.32s" : ": %.32s", first, last);
}

/* Returns the part of the text for people: a reducer's text begins with its own name and operation, numbered its own way. */
static const char *cause_of(const struct shoal_failure *cause, const char *text)
{
    const char *operation = *cause->operation ? strstr(text, cause->operation) : NULL;
    const char *rest = operation ? operation + strlen(cause->operation) : text;
    return operation && strncmp(rest, ": ", 2) == 0 ? rest + 2 : text;
}

static void describe_failure(struct shoal_outer *outer, int fragment, const struct shoal_failure *cause, const char *text)
{
    struct shoal_failure *failure = &outer->failure;
    *failure->operation = 0;
    if (fragment >= 0)
        describe_fragment(outer, fragment, failure->operation, sizeof failure->operation);
    snprintf(failure->text, sizeof failure->text, "%s, step %" PRIu64 "%s%s: %.350s", outer->name, outer->step,
             fragment >= 0 ? ", " : "", failure->operation, cause_of(cause, text));
}

/* Returns true if a rank has given this cause for outer steps: then it begins as all failures of struct shoal_outer do. */
static bool is_outers(const struct shoal_outer *outer, const char *text)
{
    const size_t length = strlen(outer->name);
    return strncmp(text, outer->name, length) == 0 && strncmp(text + length, ", step ", 7) == 0;
}

/* Fails every fragment on all ranks, because another rank may wait in a fragment that lacks only this rank's part. Then takes
 * over the cause that all ranks have agreed on. */
static void give_cause(struct shoal_outer *outer)
{
    struct shoal_failure *failure = &outer->failure, first = SHOAL_FAILURE_INIT;
    for (size_t f = 0; f < SHOAL_OUTER_FRAGMENTS_MAX; f++) {
        if (outer->fragments[f].reducer)
            fusion_give_cause(outer->fragments[f].reducer, failure);
    }
    shoal_comm_fail(outer->control, failure);
    if (shoal_last_failure(outer->context, outer->control, &first) != SHOAL_OK || !is_outers(outer, first.text))
        return;
    *failure = first;
    failure->sequence = outer->step;
}

enum shoal_status outer_fail(struct shoal_outer *outer, enum shoal_status status, int fragment,
                             const struct shoal_failure *cause, const char *text)
{
    struct shoal_failure *failure = &outer->failure;
    if (failure->status != SHOAL_OK)
        return failure->status;
    *failure = *cause;
    failure->status = status;
    failure->sequence = outer->step;
    if (!is_outers(outer, text))
        describe_failure(outer, fragment, cause, text);
    give_cause(outer);
    return shoal_report(outer->context, failure->status, "fusion", failure->text);
}

enum shoal_status shoal_outer_failure(const struct shoal_outer *outer, struct shoal_failure *failure_out)
{
    if (!outer || !shoal_struct_bytes(failure_out))
        return SHOAL_ERR_ARGUMENT;
    if (outer->failure.status == SHOAL_OK)
        return SHOAL_PENDING;
    shoal_struct_copy_out(failure_out, &outer->failure, sizeof outer->failure);
    return SHOAL_OK;
}

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
