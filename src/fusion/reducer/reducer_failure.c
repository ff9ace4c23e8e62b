#include "fusion/reducer/reducer_failure.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/reducer/comms.h"

struct fusion_fault {
    atomic_int failed;          /* enum shoal_status */
    bool is_settled;            /* lock: all ranks have agreed on `cause` */
    struct shoal_failure cause; /* lock */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_fault_create(struct shoal_reducer *reducer)
{
    reducer->fault = calloc(1, sizeof *reducer->fault);
    return reducer->fault ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void fusion_fault_destroy(struct shoal_reducer *reducer)
{
    free(reducer->fault);
}

enum shoal_status fusion_failed(const struct shoal_reducer *reducer)
{
    return (enum shoal_status)atomic_load_explicit(&reducer->fault->failed, memory_order_acquire);
}

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_refuse(const struct shoal_reducer *reducer, enum shoal_status status, const char *format, ...)
{
    char text[FUSION_TEXT_MAX], line[FUSION_TEXT_MAX + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(line, sizeof line, "%s, rank %d: %s", reducer->name, reducer->rank, text);
    return shoal_report(reducer->context, status, "fusion", line);
}

void fusion_tell_why(const struct shoal_reducer *reducer, enum shoal_status status, char *text, size_t text_bytes)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const bool is_told = shoal_last_failure(reducer->context, NULL, &failure) == SHOAL_OK && failure.status == status;
    snprintf(text, text_bytes, "%s", is_told ? failure.text : shoal_status_name(status));
}

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

/* ---- The first cause ----------------------------------------------------------------------------------------------------- */

/* Records this rank's cause, until the cause is settled. Returns false if there was one before. */
static bool claim(struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    struct fusion_fault *fault = reducer->fault;
    fusion_lock(reducer);
    const bool is_first = fusion_failed(reducer) == SHOAL_OK;
    if (is_first) {
        fault->cause = *cause;
        fault->cause.sequence = reducer->steps + 1;
        atomic_store_explicit(&fault->failed, (int)cause->status, memory_order_release);
        pthread_cond_broadcast(&reducer->changed);
    }
    fusion_unlock(reducer);
    return is_first;
}

/* The reducer's own communicator comes first, because settling asks that one. */
void fusion_give_cause(const struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    shoal_comm_fail(reducer->comm, cause);
    fusion_comms_fail(reducer, cause);
}

/* For a fault of this rank. */
static void claim_fault(struct shoal_reducer *reducer, enum shoal_status status, const char *operation, const char *text)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    cause.status = status;
    cause.rank = cause.reporter = reducer->rank;
    cause.is_given = 1;
    snprintf(cause.operation, sizeof cause.operation, "%s", operation);
    snprintf(cause.text, sizeof cause.text, "%s, step %llu, rank %d: %.400s", reducer->name,
             (unsigned long long)reducer->steps + 1, reducer->rank, text);
    if (claim(reducer, &cause))
        fusion_give_cause(reducer, &cause);
}

enum shoal_status fusion_fail(struct shoal_reducer *reducer, enum shoal_status status, long parameter, const char *format, ...)
{
    char text[FUSION_TEXT_MAX], operation[sizeof reducer->fault->cause.operation] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (status == SHOAL_OK || status == SHOAL_PENDING) /* from a caller or its callback */
        status = SHOAL_ERR_ABORTED;
    if (parameter >= 0)
        fusion_parameter_text(&reducer->layout->parameters, (size_t)parameter, operation, sizeof operation);
    claim_fault(reducer, status, operation, text);
    return fusion_failure_status(reducer);
}

void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    cause.status = status;
    describe_buffer(reducer, buffer, cause.operation, sizeof cause.operation);
    snprintf(cause.text, sizeof cause.text, "%s", shoal_status_name(status));
    (void)claim(reducer, &cause);
}

void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    char operation[96], text[FUSION_TEXT_MAX];
    describe_buffer(reducer, buffer, operation, sizeof operation);
    snprintf(text, sizeof text, "%s could not be posted: %s", operation, shoal_status_name(status));
    claim_fault(reducer, status, operation, text);
}

/* A cause given by a rank keeps its text. Any other gets the reducer's name, the step and this rank's operation. */
static void describe_cause(const struct shoal_reducer *reducer, const struct shoal_failure *own, struct shoal_failure *cause)
{
    char text[sizeof cause->text];
    cause->sequence = own->sequence;
    if (cause->is_given)
        return;
    memcpy(text, cause->text, sizeof text);
    memcpy(cause->operation, own->operation, sizeof cause->operation);
    snprintf(cause->text, sizeof cause->text, "%s, step %llu, %s: %.350s", reducer->name, (unsigned long long)own->sequence,
             own->operation, text);
}

/* Returns the first cause of the reducer's own communicator, which is the same on all ranks. If only another
 * communicator of the reducer or this rank has failed, the others get the cause from this rank. */
static struct shoal_failure find_cause(const struct shoal_reducer *reducer, const struct shoal_failure *own)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    const bool is_known = shoal_last_failure(reducer->context, reducer->comm, &cause) == SHOAL_OK;
    if (!is_known && !fusion_comms_failure(reducer, &cause))
        cause = *own;
    describe_cause(reducer, own, &cause);
    if (is_known)
        return cause;
    fusion_give_cause(reducer, &cause);
    if (shoal_last_failure(reducer->context, reducer->comm, &cause) == SHOAL_OK) /* otherwise a rank died in writing it */
        describe_cause(reducer, own, &cause);
    return cause;
}

bool fusion_settle_failure(struct shoal_reducer *reducer)
{
    struct fusion_fault *fault = reducer->fault;
    fusion_lock(reducer);
    const struct shoal_failure own = fault->cause;
    bool is_first = fusion_failed(reducer) != SHOAL_OK && !fault->is_settled;
    fusion_unlock(reducer);
    if (!is_first)
        return false;
    const struct shoal_failure cause = find_cause(reducer, &own);
    fusion_comms_fail(reducer, &cause);
    fusion_lock(reducer);
    is_first = !fault->is_settled; /* concurrent threads find the same cause */
    if (is_first) {
        fault->is_settled = true;
        fault->cause = cause;
        atomic_store_explicit(&fault->failed, (int)cause.status, memory_order_release);
    }
    fusion_unlock(reducer);
    return is_first;
}

enum shoal_status fusion_failure_status(struct shoal_reducer *reducer)
{
    const bool is_news = fusion_settle_failure(reducer);
    return shoal_report(reducer->context, fusion_failed(reducer), is_news ? "fusion" : NULL, reducer->fault->cause.text);
}

void shoal_reducer_fail(struct shoal_reducer *reducer, enum shoal_status status, const char *text)
{
    if (reducer)
        (void)fusion_fail(reducer, status, -1, "%.400s", text ? text : "the caller gave up");
}

enum shoal_status shoal_reducer_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out)
{
    if (!reducer || !shoal_struct_bytes(failure_out))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_reducer *own = (struct shoal_reducer *)(uintptr_t)reducer;
    if (fusion_failed(reducer) == SHOAL_OK)
        return SHOAL_PENDING;
    (void)fusion_failure_status(own);
    fusion_lock(own);
    shoal_struct_copy_out(failure_out, &reducer->fault->cause, sizeof reducer->fault->cause);
    fusion_unlock(own);
    return SHOAL_OK;
}
