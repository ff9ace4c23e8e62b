/* How outer steps fail: on every rank, with one first cause. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/outer/outer_steps.h"
#include "fusion/reducer/reducer_failure.h"

struct shoal_options outer_operation(const struct shoal_outer *outer)
{
    return fusion_deadline(outer->options.timeout_ms);
}

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
    SHOAL_ASSERT(status != SHOAL_OK && status != SHOAL_PENDING);
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
