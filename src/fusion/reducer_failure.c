#include "fusion/reducer_failure.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "fusion/compress.h"
#include "fusion/measure.h"
#include "fusion/tally.h"

#define NOTICE_TAG 1
#define NOTICE_SEND_MS 1000
#define NOTICE_TAKE_MS 3000
#define CAUSE_MS 3000
#define CAUSE_IDLE_MS 500 /* where no operation of a step can break the communicator, only another rank's abort */
#define CAUSE_POLL_MS 5

/* Sent by a rank at fault to the others. */
struct notice {
    int32_t status;
    int32_t rank; /* that is to blame; mostly the sender */
    char operation[96];
    char text[408];
};
_Static_assert(sizeof(struct notice) <= SHOAL_EAGER_BYTES, "it leaves without a receive");

struct fusion_fault {
    struct shoal_comm *comm;    /* on which ranks tell each other what failed */
    struct notice sent;         /* over it, by this rank; lock until it was sent */
    atomic_int failed;          /* enum shoal_status */
    bool is_told;               /* lock: `cause` is what all ranks agree on */
    bool is_own_fault;          /* lock: a thread of this rank settles it */
    bool must_tell;             /* lock: and has to tell the others first */
    struct shoal_failure cause; /* lock */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_fault_create(struct shoal_reducer *reducer)
{
    reducer->fault = calloc(1, sizeof *reducer->fault);
    return reducer->fault ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

enum shoal_status fusion_fault_open(struct shoal_reducer *reducer, struct shoal_comm *comm)
{
    return fusion_split(reducer, comm, ".notice", 0, reducer->rank, &reducer->fault->comm);
}

void fusion_fault_destroy(struct shoal_reducer *reducer)
{
    if (reducer->fault)
        shoal_comm_free(reducer->fault->comm);
    free(reducer->fault);
}

enum shoal_status fusion_failed(const struct shoal_reducer *reducer)
{
    return (enum shoal_status)atomic_load_explicit(&reducer->fault->failed, memory_order_acquire);
}

/* ---- The first cause ----------------------------------------------------------------------------------------------------- */

static void keep(char *to, size_t bytes, const char *from)
{
    snprintf(to, bytes, "%s", from);
}

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

/* The first cause stays. With the lock; false: there was one before. */
static bool claim(struct shoal_reducer *reducer, enum shoal_status status)
{
    if (fusion_failed(reducer) != SHOAL_OK)
        return false;
    reducer->fault->cause = (struct shoal_failure)SHOAL_FAILURE_INIT;
    reducer->fault->cause.status = status;
    reducer->fault->cause.sequence = reducer->steps + 1;
    atomic_store_explicit(&reducer->fault->failed, (int)status, memory_order_release);
    pthread_cond_broadcast(&reducer->changed);
    return true;
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

void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    char operation[96];
    describe_buffer(reducer, buffer, operation, sizeof operation);
    fusion_lock(reducer);
    if (claim(reducer, status))
        keep(reducer->fault->cause.operation, sizeof reducer->fault->cause.operation, operation);
    fusion_unlock(reducer);
}

/* ---- Notices ------------------------------------------------------------------------------------------------------------- */

static void fill_notice(struct notice *notice, const struct shoal_failure *failure)
{
    notice->status = (int32_t)failure->status;
    notice->rank = failure->rank;
    keep(notice->operation, sizeof notice->operation, failure->operation);
    snprintf(notice->text, sizeof notice->text, "%.*s", (int)sizeof notice->text - 1, failure->text);
}

static uint64_t sent_until_ns(void)
{
    return fusion_now_ns() + NOTICE_SEND_MS * UINT64_C(1000000);
}

static void send_notice(struct shoal_reducer *reducer, const struct notice *notice, uint64_t until_ns)
{
    struct shoal_request **requests = calloc((size_t)reducer->size, sizeof *requests);
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = NOTICE_SEND_MS;
    for (int peer = 0; requests && peer < reducer->size; peer++) {
        if (peer != reducer->rank && shoal_send_post(reducer->fault->comm, notice, sizeof *notice, SHOAL_UINT8, peer,
                                                     NOTICE_TAG, &options, &requests[peer]) != SHOAL_OK)
            requests[peer] = NULL;
    }
    for (int peer = 0; requests && peer < reducer->size; peer++) {
        const uint64_t now_ns = fusion_now_ns(), left_ns = now_ns < until_ns ? until_ns - now_ns : 0;
        if (requests[peer] && shoal_request_wait(requests[peer], (uint32_t)(left_ns / 1000000)) != SHOAL_OK)
            continue; /* the abort reaches it anyway, with a text that says less */
    }
    for (int peer = 0; requests && peer < reducer->size; peer++)
        shoal_request_free(requests[peer]);
    free(requests);
}

/* Where two ranks are at fault at once, the one whose abort came first is the cause for all. */
static bool take_notice(struct shoal_reducer *reducer, int from, struct notice *notice_out)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.timeout_ms = NOTICE_TAKE_MS;
    if (shoal_recv(reducer->fault->comm, notice_out, sizeof *notice_out, SHOAL_UINT8, from, NOTICE_TAG, &options) != SHOAL_OK)
        return false;
    notice_out->operation[sizeof notice_out->operation - 1] = 0;
    notice_out->text[sizeof notice_out->text - 1] = 0;
    return true;
}

/* A rank that has nothing posted on the communicator is not told of its failure, so it has to ask. */
static void pause_briefly(struct shoal_reducer *reducer)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += CAUSE_POLL_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    fusion_lock(reducer);
    (void)pthread_cond_timedwait(&reducer->changed, &reducer->lock, &until);
    fusion_unlock(reducer);
}

/* Whether a step has operations on the communicator of the reducer while buffers are under way: a tail that waits for norms
 * from the device comes after them. */
static bool is_comm_used(const struct shoal_reducer *reducer)
{
    const bool has_tail = fusion_tally_has_tail(reducer) && !fusion_measure_holds_tail(reducer);
    bool is_used = has_tail || reducer->options.is_uneven;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        is_used |= !fusion_is_compressed(reducer, b);
    return is_used;
}

/* The communicator of the reducer names the first cause. One of the compressor's may break before it, when a rank that knows
 * the cause has freed it already; then the other soon breaks, too. */
static bool find_cause(struct shoal_reducer *reducer, struct shoal_failure *cause_out, bool *must_relay_out)
{
    *must_relay_out = false;
    bool is_known = shoal_last_failure(reducer->context, reducer->comm, cause_out) == SHOAL_OK;
    if (is_known || !fusion_compressor_failure(reducer, cause_out))
        return is_known;
    const int most_ms = is_comm_used(reducer) ? CAUSE_MS : CAUSE_IDLE_MS;
    for (int ms = 0; ms < most_ms && !is_known; ms += CAUSE_POLL_MS) {
        pause_briefly(reducer);
        is_known = shoal_last_failure(reducer->context, reducer->comm, cause_out) == SHOAL_OK;
    }
    *must_relay_out = !is_known;
    return is_known || fusion_compressor_failure(reducer, cause_out);
}

/* The communicator of the reducer had nothing under way that could break it, and ranks that share none of the compressor's
 * with the rank at fault know nothing yet. They learn it as they would of a fault of this rank, which is not the one that is
 * blamed. */
static void relay(struct shoal_reducer *reducer)
{
    fill_notice(&reducer->fault->sent, &reducer->fault->cause);
    send_notice(reducer, &reducer->fault->sent, sent_until_ns());
    shoal_comm_abort(reducer->comm);
    fusion_compressor_abort(reducer);
}

/* Takes the cause from the communicator, and from the notice of the rank at fault where that rank aborted it. Only one thread
 * does this. */
static void settle_failure(struct shoal_reducer *reducer, bool is_own)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT, *own = &reducer->fault->cause;
    struct notice notice;
    char text[sizeof cause.text];
    bool must_relay;
    if (!find_cause(reducer, &cause, &must_relay) ||
        (is_own && cause.rank == reducer->rank && cause.status == SHOAL_ERR_ABORTED))
        return; /* the own text stands */
    const bool is_told = cause.status == SHOAL_ERR_ABORTED && cause.rank >= 0 && cause.rank != reducer->rank &&
                         take_notice(reducer, cause.rank, &notice);
    const char *operation = is_told ? notice.operation : own->operation;
    if (is_told) {
        cause.status = (enum shoal_status)notice.status;
        cause.rank = notice.rank;
    }
    const int length = is_told ? snprintf(text, sizeof text, "%s", notice.text)
                               : snprintf(text, sizeof text, "%s, step %llu, %s: %.350s", reducer->name,
                                          (unsigned long long)reducer->steps + 1, operation, cause.text);
    (void)length;
    fusion_lock(reducer);
    const uint64_t step = own->sequence;
    char kept[sizeof own->operation];
    keep(kept, sizeof kept, operation);
    *own = cause;
    own->sequence = step;
    keep(own->operation, sizeof own->operation, kept);
    keep(own->text, sizeof own->text, text);
    atomic_store_explicit(&reducer->fault->failed, (int)cause.status, memory_order_release);
    fusion_unlock(reducer);
    if (must_relay && !is_own)
        relay(reducer);
}

static enum shoal_status mark_told(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    reducer->fault->is_told = true;
    const enum shoal_status status = reducer->fault->cause.status;
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
    return status;
}

static void publish(struct shoal_reducer *reducer, bool is_own)
{
    settle_failure(reducer, is_own);
    const enum shoal_status status = mark_told(reducer);
    if (shoal_report(reducer->context, status, "fusion", reducer->fault->cause.text) == SHOAL_OK)
        return;
}

/* Claims the failure for this rank and writes the notice of it. With the lock; false: there was a cause before. */
static bool claim_fault(struct shoal_reducer *reducer, enum shoal_status status, const char *operation, const char *text)
{
    struct shoal_failure *failure = &reducer->fault->cause;
    if (!claim(reducer, status))
        return false;
    failure->rank = failure->reporter = reducer->rank;
    keep(failure->operation, sizeof failure->operation, operation);
    snprintf(failure->text, sizeof failure->text, "%s, step %llu, rank %d: %.400s", reducer->name,
             (unsigned long long)reducer->steps + 1, reducer->rank, text);
    fill_notice(&reducer->fault->sent, failure); /* for good: a send may end after the call that sends it */
    return true;
}

static enum shoal_status tell_others(struct shoal_reducer *reducer)
{
    send_notice(reducer, &reducer->fault->sent, sent_until_ns());
    shoal_comm_abort(reducer->comm);
    fusion_compressor_abort(reducer);
    publish(reducer, true);
    return fusion_failed(reducer);
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
    fusion_lock(reducer);
    const bool is_first = claim_fault(reducer, status, operation, text);
    reducer->fault->is_own_fault |= is_first; /* nobody else settles it */
    fusion_unlock(reducer);
    return is_first ? tell_others(reducer) : fusion_failure_status(reducer);
}

/* A failure that a completion has noted and nobody has settled is claimed, too: the reducer may be freed before anybody settles
 * it, and no rank would be told. */
static bool claim_cause(struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    fusion_lock(reducer);
    const bool is_first = claim(reducer, cause->status) ||
                          (!reducer->fault->is_told && !reducer->fault->is_own_fault && !reducer->fault->must_tell);
    if (is_first) {
        const uint64_t step = reducer->fault->cause.sequence;
        reducer->fault->cause = *cause;
        reducer->fault->cause.sequence = step;
        atomic_store_explicit(&reducer->fault->failed, (int)cause->status, memory_order_release);
        reducer->fault->is_own_fault = true;
        fill_notice(&reducer->fault->sent, &reducer->fault->cause);
    }
    fusion_unlock(reducer);
    return is_first;
}

void fusion_pass_on(struct shoal_reducer *const *reducers, size_t count, const struct shoal_failure *cause)
{
    const uint64_t until_ns = sent_until_ns();
    uint64_t claimed = 0;
    SHOAL_ASSERT(count <= 64);
    for (size_t i = 0; i < count; i++) {
        if (reducers[i] && claim_cause(reducers[i], cause)) {
            claimed |= UINT64_C(1) << i;
            send_notice(reducers[i], &reducers[i]->fault->sent, until_ns);
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (!reducers[i])
            continue;
        if (claimed >> i & 1) {
            shoal_comm_abort(reducers[i]->comm);
            fusion_compressor_abort(reducers[i]);
            (void)mark_told(reducers[i]); /* not settled: the cause's notice may be read already, and there is no second one */
            continue;
        }
        fusion_lock(reducers[i]);
        fusion_tell_late(reducers[i]); /* one that could not post in a completion has told nobody yet */
        fusion_unlock(reducers[i]);
    }
}

bool fusion_take_cause(struct shoal_reducer *reducer, int from, struct shoal_failure *cause)
{
    struct notice notice;
    if (fusion_failed(reducer) != SHOAL_OK)
        return shoal_reducer_failure(reducer, cause) == SHOAL_OK;
    if (!take_notice(reducer, from, &notice))
        return false;
    cause->status = (enum shoal_status)notice.status;
    cause->rank = notice.rank;
    keep(cause->operation, sizeof cause->operation, notice.operation);
    keep(cause->text, sizeof cause->text, notice.text);
    return true;
}

void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer)
{
    char operation[96], text[FUSION_TEXT_MAX];
    describe_buffer(reducer, buffer, operation, sizeof operation);
    snprintf(text, sizeof text, "%s could not be posted: %s", operation, shoal_status_name(status));
    fusion_lock(reducer);
    reducer->fault->must_tell |= claim_fault(reducer, status, operation, text);
    fusion_unlock(reducer);
}

void fusion_tell_late(struct shoal_reducer *reducer)
{
    if (!reducer->fault->must_tell || reducer->fault->is_own_fault)
        return;
    fusion_unlock(reducer);
    (void)fusion_failure_status(reducer);
    fusion_lock(reducer);
}

enum shoal_status fusion_failure_status(struct shoal_reducer *reducer)
{
    fusion_lock(reducer);
    const bool is_mine = !reducer->fault->is_told && !reducer->fault->is_own_fault,
               must_tell = is_mine && reducer->fault->must_tell;
    reducer->fault->is_own_fault |= is_mine; /* so that one thread does it */
    while (!is_mine && !reducer->fault->is_told)
        pthread_cond_wait(&reducer->changed, &reducer->lock);
    fusion_unlock(reducer);
    if (must_tell)
        return tell_others(reducer);
    if (!is_mine)
        return shoal_report(reducer->context, fusion_failed(reducer), NULL, reducer->fault->cause.text);
    publish(reducer, false);
    return fusion_failed(reducer);
}

void shoal_reducer_fail(struct shoal_reducer *reducer, enum shoal_status status, const char *text)
{
    if (!reducer)
        return;
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
