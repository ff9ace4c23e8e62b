#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"

struct shoal_stall {
    uint64_t progress_ns;   /* when shoal_engine_check() last saw progress; 0: not since the engine became busy */
    uint64_t progress_mark; /* progress_mark() at that time */
    bool has_warned;
    int warned_rank; /* the rank that the warning named */
    uint64_t warned_ns;
    uint64_t warn_next_ns; /* how long progress must have stopped before the next warning */
    uint64_t lost_ns;      /* when a rank we wait for was lost and progress stopped; 0 if none */
    uint64_t lost_mark;
    uint64_t said_ns; /* when this rank last published which rank it waits for */
};

size_t shoal_stall_bytes(void)
{
    return sizeof(struct shoal_stall);
}

struct shoal_stall *shoal_stall_create(void)
{
    return calloc(1, sizeof(struct shoal_stall));
}

void shoal_stall_destroy(struct shoal_stall *stall)
{
    free(stall);
}

/* ---- Calls of ranks that do not exchange --------------------------------------------------------------------------------- */

static bool fail_unmet_in(struct shoal_engine *engine, uint64_t sequence)
{
    for (int r = 0; r < engine->size; r++) {
        const struct shoal_announcement *other =
            shoal_engine_is_local(engine, r) ? NULL : engine->ops->announcement(engine->transport, r, sequence);
        if (other && !shoal_engine_check_past_call(engine, shoal_intake_called(engine, sequence), other))
            return engine->is_broken;
    }
    return false;
}

/* A rank that waits for a remote rank has sent it an announcement. So if ranks wait for each other in different calls, one of
 * them has an announcement from a rank that is not a peer in its own call: that rank called something else. The first such call
 * is reported. */
static bool fail_unmet(struct shoal_engine *engine)
{
    const uint64_t next = shoal_intake_first_queued(engine);
    for (uint64_t sequence = shoal_intake_acknowledged(engine) + 1; engine->hosts > 1 && sequence < next; sequence++) {
        if (fail_unmet_in(engine, sequence))
            return true;
    }
    return false;
}

/* ---- Warning ------------------------------------------------------------------------------------------------------------- */

/* Appends commands that show what the rank that is waited for is doing. */
static void append_hint(struct shoal_engine *engine, int rank, char *text, size_t bytes)
{
    struct shoal_transport_peer name;
    if (rank < 0)
        return;
    engine->ops->peer_name(engine->transport, rank, &name);
    shoal_engine_append(
        text, bytes,
        "; to see where rank %d is, run on %s: py-spy dump --pid %d (Python) or gdb -p %d -batch -ex 'thread apply "
        "all bt'",
        rank, name.host, name.pid, name.pid);
}

#define MINUTE_NS (60 * SHOAL_NS_PER_S)

/* Returns the time of the next warning: after 1, 2 and 5 minutes, then every 5. */
static uint64_t next_warning_ns(uint64_t stalled_ns)
{
    static const unsigned minutes[] = {1, 2, 5};
    for (size_t i = 0; i < SHOAL_COUNT_OF(minutes); i++) {
        if (stalled_ns < minutes[i] * MINUTE_NS)
            return minutes[i] * MINUTE_NS;
    }
    return (stalled_ns / (5 * MINUTE_NS) + 1) * 5 * MINUTE_NS;
}

/* Logs a warning if the next one is due, or if the request now waits for another rank than the last warning named. */
static void warn_slow(struct shoal_engine *engine, struct shoal_request *request, uint64_t now_ns)
{
    SHOAL_ASSERT(engine->stall->progress_ns && now_ns >= engine->stall->progress_ns);
    char missing[400], cycle[300], call_text[96], after[700] = "";
    const uint64_t stalled_ns = now_ns - engine->stall->progress_ns;
    const int rank = shoal_blame_name(engine, request, missing, sizeof missing);
    engine->stall->warned_ns = now_ns;
    if (engine->stall->has_warned && rank == engine->stall->warned_rank && stalled_ns < engine->stall->warn_next_ns)
        return;
    engine->stall->has_warned = true;
    engine->stall->warned_rank = rank;
    engine->stall->warn_next_ns = next_warning_ns(stalled_ns);
    shoal_engine_print_request(request, call_text, sizeof call_text);
    shoal_p2p_append_unexpected(engine, request, after, sizeof after);
    if (shoal_engine_find_deadlock(engine, cycle, sizeof cycle))
        shoal_engine_append(after, sizeof after, "; %s", cycle);
    append_hint(engine, rank, after, sizeof after);
    shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine", "%s (number %llu of communicator %s) has waited %llu ms for %s%s",
                   call_text, (unsigned long long)request->sequence, engine->name,
                   (unsigned long long)shoal_engine_waited_ms(engine, request), missing, after);
}

/* ---- Publishing what this rank waits for --------------------------------------------------------------------------------- */

/* How often a waiting rank publishes which rank it waits for. */
#define SAY_AGAIN_NS (500 * SHOAL_NS_PER_MS)

/* Returns the lowest rank that the request itself waits for, or -1. */
static int find_waited_for(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_engine_wait wait = shoal_engine_find_wait(engine, request);
    for (int r = 0; r < engine->size; r++) {
        if (r != engine->rank && shoal_engine_wait_is_for(engine, &wait, r))
            return r;
    }
    return -1;
}

/* After half of SHOAL_WARN_MS, a blocked rank publishes which rank it waits for directly. For a message, only the peer and this
 * host receive it, because pipelines wait often. Returns the rank waited for, or -1 if this rank is not blocked. */
static int say_blocked(struct shoal_engine *engine, uint64_t stalled_ns)
{
    const uint64_t half_ns = engine->warn_ms * SHOAL_NS_PER_MS / 2;
    struct shoal_request *request = stalled_ns >= half_ns ? shoal_engine_awaited(engine) : NULL;
    const int rank = request ? find_waited_for(engine, request) : -1;
    if (rank < 0)
        return -1;
    engine->ops->say_waits_for(engine->transport, shoal_request_is_message(request) ? UINT64_MAX : request->sequence,
                               rank | SHOAL_WAIT_BLOCKED);
    return rank;
}

/* Publishes the wait, so that ranks that wait for this one do not blame it. Messages that no thread waits for are left out: the
 * program may do other work meanwhile. */
static void say_wait(struct shoal_engine *engine, uint64_t now_ns)
{
    struct shoal_request *request = shoal_intake_first(engine);
    const uint64_t stalled_ns = now_ns - engine->stall->progress_ns;
    if (stalled_ns < SAY_AGAIN_NS || now_ns - engine->stall->said_ns < SAY_AGAIN_NS)
        return;
    int rank = say_blocked(engine, stalled_ns);
    if (rank < 0) {
        if (!request)
            return;
        rank = shoal_blame_find(engine, request);
        engine->ops->say_waits_for(engine->transport, request->sequence, rank);
    }
    shoal_recorder_note_wait(&engine->recorder, rank,
                             shoal_clock_ticks() - (uint64_t)((double)stalled_ns / shoal_engine_ns_per_tick(engine)));
    engine->stall->said_ns = now_ns;
    engine->is_wait_said = true;
}

/* ---- Deadlines ----------------------------------------------------------------------------------------------------------- */

static struct shoal_request *stall_earlier(struct shoal_request *a, struct shoal_request *b)
{
    if (!a || !b)
        return a ? a : b;
    return b->deadline_ns < a->deadline_ns ? b : a;
}

static struct shoal_request *oldest(struct shoal_engine *engine)
{
    return stall_earlier(shoal_intake_first(engine), shoal_p2p_oldest(engine));
}

/* Returns the request with the earliest deadline. Each operation has its own, even if it waits behind others. */
static struct shoal_request *most_urgent(struct shoal_engine *engine)
{
    struct shoal_request *urgent = shoal_p2p_oldest(engine);
    for (struct shoal_request *request = shoal_intake_first(engine); request; request = shoal_intake_next(engine, request))
        urgent = stall_earlier(urgent, request);
    return urgent;
}

static void fail_late(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_failure failure;
    char what[300];
    if (shoal_engine_settle(engine, true))
        return;
    /* Calls run in order, so the first one names the ranks that all of them wait for. */
    struct shoal_request *const first = shoal_request_is_message(request) ? request : shoal_intake_first(engine);
    int rank = shoal_blame_name(engine, first, what, sizeof what);
    const bool is_deadlock = shoal_engine_find_deadlock(engine, what, sizeof what);
    rank = is_deadlock ? -1 : rank;
    shoal_engine_begin_failure(engine, request, SHOAL_ERR_TIMEOUT, rank, &failure);
    snprintf(failure.text, sizeof failure.text, "%s (number %llu of communicator %s) passed its deadline after %llu ms%s%s",
             failure.operation, (unsigned long long)request->sequence, engine->name, (unsigned long long)failure.waited_ms,
             is_deadlock ? "; " : ", waiting for ", what);
    shoal_p2p_append_unexpected(engine, request, failure.text, sizeof failure.text);
    shoal_engine_fail(engine, &failure);
}

/* ---- Lost ranks ---------------------------------------------------------------------------------------------------------- */

static bool may_hold_back(const struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    (void)engine, (void)call, (void)peer;
    return true;
}

static bool is_needed_and_absent(const struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    return (call->needed == SHOAL_NEEDED_ALL || call->needed == peer) &&
           !engine->ops->announcement(engine->transport, peer, call->sequence);
}

static bool is_next_in_rounds(const struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    (void)engine;
    return peer == call->next_missing;
}

static bool holds_up_nothing(const struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    (void)engine, (void)call, (void)peer;
    return false;
}

/* Returns true if the call waits for a lost rank. A remote rank may have done its part and left, as its completions arrive
 * late. Then a rank that waits for it publishes that, and others learn of it. */
static bool is_held_up_by(struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    static bool (*const in_phase[SHOAL_PHASE_END])(const struct shoal_engine *, const struct shoal_request *, int) = {
        [SHOAL_PHASE_QUEUED] = may_hold_back,        [SHOAL_PHASE_MEETING] = is_needed_and_absent,
        [SHOAL_PHASE_IN_ROUNDS] = is_next_in_rounds, [SHOAL_PHASE_RUNNING] = shoal_runner_is_step_for,
        [SHOAL_PHASE_LEAVING] = holds_up_nothing,
    };
    if (shoal_engine_is_local(engine, peer))
        return true;
    if (shoal_runner_is_leaving(engine, call) && engine->ops->is_sending && engine->ops->is_sending(engine->transport, peer))
        return true;
    return shoal_peer_set_has(call->peer_set, peer) && in_phase[shoal_request_phase(call)](engine, call, peer);
}

/* Returns true if a lost rank of the call was cut off, or this rank was: the ranks that the call waits for may then also be out
 * of reach, which takes longer to notice. */
static bool is_out_of_reach(struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    const struct shoal_transport_ops *ops = engine->ops;
    return ops->is_cut_off && shoal_peer_set_has(call->peer_set, peer) && ops->is_cut_off(engine->transport, peer);
}

static int stall_first_lost(struct shoal_engine *engine, const struct shoal_request *call, struct shoal_failure *found,
                            bool (*is_blocking)(struct shoal_engine *, const struct shoal_request *, int))
{
    int rank = engine->ops->lost(engine->transport, 0, call->sequence, found);
    while (rank >= 0 && !is_blocking(engine, call, rank))
        rank = engine->ops->lost(engine->transport, rank + 1, call->sequence, found);
    return rank;
}

/* Finds a request that can never end because a peer is lost: a call, which needs all ranks, or a message to or from that peer.
 * *rank_out is that peer. `found` may name another rank, which was lost before it. */
static struct shoal_request *find_blocked(struct shoal_engine *engine, struct shoal_failure *found, int *rank_out)
{
    const struct shoal_transport_ops *ops = engine->ops;
    struct shoal_request *call = shoal_intake_first(engine);
    int rank = call ? stall_first_lost(engine, call, found, is_held_up_by) : -1;
    if (call && rank < 0)
        rank = stall_first_lost(engine, call, found, is_out_of_reach);
    *rank_out = rank;
    if (rank >= 0)
        return call;
    rank = engine->message_count ? ops->lost(engine->transport, 0, UINT64_MAX, found) : -1;
    while (rank >= 0) {
        struct shoal_request *message = shoal_p2p_with(engine, rank);
        *rank_out = rank;
        if (message)
            return message;
        rank = ops->lost(engine->transport, rank + 1, UINT64_MAX, found);
    }
    return NULL;
}

/* Returns a hash that changes whenever anything moves. */
static uint64_t progress_mark(const struct shoal_engine *engine)
{
    uint64_t mark = shoal_runner_mark(engine, shoal_intake_done(engine));
    const struct shoal_request *first = shoal_intake_first_announced(engine);
    if (first)
        mark = (mark * 31 + (uint64_t)first->next_missing) * 31 + (uint64_t)first->round;
    return mark * 31 + shoal_p2p_mark(engine);
}

/* After a remote rank is lost, messages that it sent before may still arrive, and so may the first cause from another rank. */
#define UNDER_WAY_NS (500 * SHOAL_NS_PER_MS)
/* A call that does not itself wait for the lost rank may still end. */
#define OUT_OF_REACH_NS (2 * SHOAL_NS_PER_S)

static bool is_perhaps_under_way(struct shoal_engine *engine, const struct shoal_request *request, int rank)
{
    SHOAL_ASSERT(rank >= 0 && rank < engine->size);
    const bool is_blocked = request != shoal_intake_first(engine) || is_held_up_by(engine, request, rank);
    const uint64_t now_ns = shoal_engine_now_ns(engine), mark = progress_mark(engine);
    if (shoal_engine_is_local(engine, rank))
        return false;
    if (!engine->stall->lost_ns || engine->stall->lost_mark != mark)
        engine->stall->lost_ns = now_ns;
    engine->stall->lost_mark = mark;
    return now_ns - engine->stall->lost_ns < (is_blocked ? UNDER_WAY_NS : OUT_OF_REACH_NS);
}

static bool fail_lost(struct shoal_engine *engine)
{
    struct shoal_failure failure, found = {0};
    int rank;
    struct shoal_request *request = find_blocked(engine, &found, &rank);
    if (!request || is_perhaps_under_way(engine, request, rank)) {
        engine->stall->lost_ns = request ? engine->stall->lost_ns : 0;
        return false;
    }
    if (shoal_engine_progress(engine) || shoal_engine_settle(engine, true) || engine->is_broken)
        return engine->is_broken; /* messages from before the loss may complete the request, or show a mismatch */
    shoal_engine_begin_failure(engine, request, SHOAL_ERR_PEER_LOST, found.rank, &failure);
    failure.pid = found.pid;
    snprintf(failure.host, sizeof failure.host, "%s", found.host);
    snprintf(failure.text, sizeof failure.text, "%.300s, before it had done its part of %s (number %llu of communicator %s)",
             found.text, failure.operation, (unsigned long long)request->sequence, engine->name);
    shoal_engine_fail(engine, &failure);
    return true;
}

/* ---- Excuses ------------------------------------------------------------------------------------------------------------- */

/* A request is excused at least this often, however long each absence was. */
#define EXCUSES 8

/* Returns true if the deadline was moved. Excuses are limited: a rank that always looks late, for example because its callbacks
 * are slow, would otherwise never end an operation that another rank holds up. */
static bool stall_excuse(const struct shoal_engine *engine, struct shoal_request *request, uint64_t away_ns)
{
    const uint64_t timeout_ns = (request->call.timeout_ms ? request->call.timeout_ms : engine->timeout_ms) * SHOAL_NS_PER_MS;
    const uint64_t most_ns = shoal_engine_now_ns(engine) + timeout_ns;
    const uint64_t given_ns = request->excused_ns < timeout_ns ? away_ns : 0;
    request->excused_ns += given_ns < timeout_ns / EXCUSES ? given_ns : timeout_ns / EXCUSES;
    if (request->deadline_ns < most_ns && given_ns < most_ns - request->deadline_ns)
        request->deadline_ns += given_ns;
    else
        request->deadline_ns = most_ns;
    SHOAL_ASSERT(request->deadline_ns <= most_ns);
    return given_ns > 0;
}

void shoal_engine_excuse(struct shoal_engine *engine, uint64_t away_ns)
{
    bool is_given = false;
    for (struct shoal_request *request = shoal_intake_first(engine); request; request = shoal_intake_next(engine, request))
        is_given |= stall_excuse(engine, request, away_ns);
    for (struct shoal_request *request = shoal_p2p_first(engine); request; request = request->next)
        is_given |= stall_excuse(engine, request, away_ns);
    if (is_given)
        engine->stall->progress_ns = 0; /* no rank counts as slow yet */
}

/* ---- Checking ------------------------------------------------------------------------------------------------------------ */

/* Time between two looks at which rank a slow operation waits for. */
#define WARN_AGAIN_NS SHOAL_NS_PER_S

void shoal_engine_note_threads(struct shoal_engine *engine)
{
    const int lanes = engine->ops->lanes ? engine->ops->lanes(engine->transport) : 0;
    shoal_recorder_note_threads(&engine->recorder, engine->helpers ? shoal_helpers_width(engine->helpers) : 1, 1 + lanes);
}

uint64_t shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns)
{
    SHOAL_ASSERT(!engine->is_in_progress); /* it may break the engine */
    struct shoal_stall *stall = engine->stall;
    const uint64_t every_ns = 100 * SHOAL_NS_PER_MS;
    if (engine->helpers)
        shoal_engine_note_threads(engine);
    if (engine->recorder.rejections)
        shoal_recorder_note_rejected(&engine->recorder);
    if (engine->is_fresh || engine->is_broken || !shoal_engine_is_busy(engine))
        stall->progress_ns = 0;
    engine->is_fresh = false;
    if (engine->is_broken || !shoal_engine_is_busy(engine))
        return UINT64_MAX;
    if (shoal_engine_heed_failure(engine) || shoal_engine_settle(engine, false) || fail_unmet(engine) || fail_lost(engine))
        return UINT64_MAX;
    struct shoal_request *request = oldest(engine);
    if (!request)
        return every_ns;
    const uint64_t mark = progress_mark(engine);
    struct shoal_request *urgent = most_urgent(engine);
    if (now_ns >= urgent->deadline_ns) {
        fail_late(engine, urgent);
        return UINT64_MAX;
    }
    if (!stall->progress_ns || mark != stall->progress_mark) {
        stall->progress_ns = now_ns;
        stall->progress_mark = mark;
        stall->has_warned = false;
        shoal_engine_withdraw_wait(engine);
    } else if (now_ns - stall->progress_ns >= engine->warn_ms * SHOAL_NS_PER_MS &&
               (!stall->has_warned || now_ns - stall->warned_ns >= WARN_AGAIN_NS)) {
        warn_slow(engine, request, now_ns);
    }
    say_wait(engine, now_ns);
    const uint64_t left_ns = urgent->deadline_ns - now_ns;
    return left_ns < every_ns ? left_ns : every_ns;
}
