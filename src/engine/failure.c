/* Everything that goes wrong in a communicator: calls that do not agree, peers that ended, deadlines, failures elsewhere. The
 * first cause is published once and becomes the status of every operation. */
#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"

struct shoal_blame {
    struct shoal_failure failure; /* why the engine broke */
    uint64_t progress_ns;         /* when shoal_engine_check() last saw progress; 0: not since the engine became busy */
    uint64_t progress_mark;       /* progress_mark() at that time */
    bool has_warned;
    int warned_rank; /* the rank that the warning named */
    uint64_t warned_ns;
    uint64_t warn_next_ns; /* how long progress must have stopped before the next warning */
    uint64_t lost_ns;      /* when a rank we wait for was lost and progress stopped; 0 if none */
    uint64_t lost_mark;
    uint64_t said_ns;                             /* when this rank last published which rank it waits for */
    shoal_location exposed[2 * SHOAL_ACTIVE_MAX]; /* operands that peers could reach when the engine broke */
    size_t exposed_count;
    uint16_t nearest[]; /* [size] scratch of failure_find_missing() */
};

size_t shoal_blame_bytes(int size)
{
    return sizeof(struct shoal_blame) + (size_t)size * sizeof(uint16_t);
}

struct shoal_blame *shoal_blame_create(int size)
{
    return calloc(1, shoal_blame_bytes(size));
}

void shoal_blame_destroy(struct shoal_blame *blame)
{
    free(blame);
}

const struct shoal_failure *shoal_engine_failure(const struct shoal_engine *engine)
{
    return engine->is_broken ? &engine->blame->failure : NULL;
}

const shoal_location *shoal_engine_exposed(const struct shoal_engine *engine, size_t *count_out)
{
    *count_out = engine->blame->exposed_count;
    return engine->blame->exposed;
}

void shoal_engine_append(char *text, size_t bytes, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

/* Adds the name of a type or operator in small letters: SCALED_SUM becomes "scaled sum". */
static void append_word(char *text, size_t bytes, const char *name)
{
    size_t used = strlen(text);
    for (; *name && used + 1 < bytes; name++)
        text[used++] = *name == '_' ? ' ' : (char)tolower((unsigned char)*name);
    text[used] = 0;
}

static const char *failure_type_name(unsigned type)
{
    static const char *const names[] = {
#define TYPE_NAME(name, number, bytes) [number] = #name,
        SHOAL_TYPE_LIST(TYPE_NAME)
#undef TYPE_NAME
    };
    return type < SHOAL_COUNT_OF(names) ? names[type] : "elements of an unknown type";
}

static const char *failure_op_name(unsigned op)
{
    static const char *const names[] = {
#define OP_NAME(name, number) [number] = #name,
        SHOAL_OP_LIST(OP_NAME)
#undef OP_NAME
    };
    return op < SHOAL_COUNT_OF(names) ? names[op] : "unknown operator";
}

static bool failure_is_message(unsigned collective)
{
    return collective == SHOAL_COLLECTIVE_SEND || collective == SHOAL_COLLECTIVE_RECV;
}

void shoal_engine_print_call(const struct shoal_descriptor *d, char *text, size_t bytes)
{
    const struct shoal_collective_traits *traits = shoal_collective_traits((enum shoal_collective_type)d->collective);
    const struct shoal_shape *shape = &traits->shape;
    if (d->collective == SHOAL_COLLECTIVE_SPLIT) {
        snprintf(text, bytes, "shoal_comm_split");
        return;
    }
    snprintf(text, bytes, "%s", traits->name);
    if (shape->is_empty)
        return;
    shoal_engine_append(text, bytes, " of %s%llu ", d->collective == SHOAL_COLLECTIVE_ALLTOALL && d->detail ? "up to " : "",
                        (unsigned long long)d->count);
    append_word(text, bytes, failure_type_name(d->type));
    if (d->type_tag)
        shoal_engine_append(text, bytes, " tagged %d", d->type_tag);
    if (shape->is_input_partitioned || shape->is_output_partitioned)
        shoal_engine_append(text, bytes, " per rank");
    if (shape->is_reduced) {
        shoal_engine_append(text, bytes, ", ");
        append_word(text, bytes, failure_op_name(d->op));
    }
    if (d->way == SHOAL_WAY_DEVICES)
        shoal_engine_append(text, bytes, ", summed by GPUs");
    if (shape->root_contributes || shape->root_receives || failure_is_message(d->collective))
        shoal_engine_append(text, bytes, ", %s %d", failure_is_message(d->collective) ? "peer" : "root", d->root);
}

static struct shoal_descriptor describe_call(const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    return (struct shoal_descriptor){.sequence = request->sequence,
                                     .count = call->count,
                                     .detail = call->layout ? call->layout->detail : 0,
                                     .root = (int16_t)call->root,
                                     .collective = (uint8_t)call->collective,
                                     .type = (uint8_t)call->type,
                                     .op = (uint8_t)call->op,
                                     .type_tag = call->type_tag,
                                     .way = shoal_call_sum(call) ? SHOAL_WAY_DEVICES : SHOAL_WAY_HOST};
}

/* With the tag of a message. The tag is not compared between ranks and is not in a descriptor. */
static void print_request(const struct shoal_request *request, char *text, size_t bytes)
{
    const struct shoal_descriptor call = describe_call(request);
    shoal_engine_print_call(&call, text, bytes);
    if (failure_is_message(request->call.collective))
        shoal_engine_append(text, bytes, ", tag %d", request->call.tag);
}

/* ---- Composing ----------------------------------------------------------------------------------------------------------- */

static uint64_t waited_ms(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const uint64_t timeout_ms = request->call.timeout_ms ? request->call.timeout_ms : engine->timeout_ms;
    const uint64_t posted_ns = request->deadline_ns - timeout_ms * SHOAL_NS_PER_MS;
    return (shoal_engine_now_ns(engine) - posted_ns) / SHOAL_NS_PER_MS;
}

void shoal_engine_begin_failure(struct shoal_engine *engine, const struct shoal_request *request, enum shoal_status status,
                                int rank, struct shoal_failure *failure)
{
    memset(failure, 0, sizeof *failure);
    failure->struct_bytes = sizeof *failure;
    failure->status = status;
    failure->rank = rank;
    failure->reporter = engine->rank;
    failure->step = -1;
    if (rank >= 0) {
        struct shoal_transport_peer name;
        engine->ops->peer_name(engine->transport, rank, &name);
        failure->pid = name.pid;
        snprintf(failure->host, sizeof failure->host, "%s", name.host);
    }
    if (request) {
        int peer;
        print_request(request, failure->operation, sizeof failure->operation);
        shoal_runner_find_step(engine, request, &failure->step, &peer);
        failure->sequence = request->sequence;
        failure->waited_ms = waited_ms(engine, request);
        if (request->record) {
            request->record->step = failure->step;
            request->record->peer = peer;
        }
    }
}

/* ---- Breaking ------------------------------------------------------------------------------------------------------------ */

static double ns_per_tick(const struct shoal_engine *engine)
{
    return engine->anchor ? engine->anchor->ns_per_tick : 1;
}

#define TOLD_TOGETHER_NS (UINT64_C(5) * 1000 * 1000 * 1000)

/* On each host the lowest rank that was not lost logs where the recorders are. It does so once when several communicators of a
 * job break at one time, and again for those that the program makes afterwards. */
static bool is_teller(const struct shoal_engine *engine)
{
    static _Atomic uint64_t told, told_ns; /* the job that this process last logged this for, and when */
    const uint64_t now_ns = shoal_clock_ns();
    int teller = engine->leader;
    if (engine->blame->failure.status == SHOAL_ERR_PEER_LOST && engine->blame->failure.rank == teller)
        teller++;
    while (teller < engine->size && !shoal_engine_is_local(engine, teller))
        teller++;
    /* relaxed: no other memory depends on this number */
    if (engine->rank != teller)
        return false;
    const bool is_late = now_ns - atomic_exchange_explicit(&told_ns, now_ns, memory_order_relaxed) > TOLD_TOGETHER_NS;
    return atomic_exchange_explicit(&told, engine->recorder.job, memory_order_relaxed) != engine->recorder.job || is_late;
}

/* Writes to the temporary folder, because the user has named no file. */
static void keep_recorder(struct shoal_engine *engine)
{
    char pattern[SHOAL_RECORDER_NAME_MAX], all[SHOAL_RECORDER_NAME_MAX];
    const struct shoal_recorder_file file = {engine->log, "the flight recorder to", pattern, true};
    if (!shoal_recorder_find_path(&engine->recorder, pattern, sizeof pattern, all, sizeof all)) {
        shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine",
                       "cannot write the flight recorder to %s: %m; set SHOAL_RECORDER_FILE to another file, or to no", all);
        return;
    }
    if (shoal_recorder_append(&engine->recorder, engine->name, engine->rank, ns_per_tick(engine), &file, NULL) &&
        is_teller(engine))
        shoal_log_line(
            engine->log, SHOAL_LOG_WARN, "engine",
            "flight recorder: `shoal trace %s` shows what the ranks of this host did; docs/errors.md explains what to do", all);
}

/* A recorder that names no job belongs to a test of the engine alone, and is written only if the test names a file. */
static void write_recorder(struct shoal_engine *engine)
{
    const char *name = engine->settings->recorder_file;
    const struct shoal_recorder_file file = {engine->log, "SHOAL_RECORDER_FILE", name, false};
    char written[SHOAL_RECORDER_NAME_MAX];
    if (!strcmp(name, "no") || (!strcmp(name, "auto") && !engine->recorder.job))
        return;
    if (!strcmp(name, "auto"))
        keep_recorder(engine);
    else if (shoal_recorder_append(&engine->recorder, engine->name, engine->rank, ns_per_tick(engine), &file, written) &&
             is_teller(engine))
        shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine",
                       "flight recorder: %s; `shoal trace`, with the files of all ranks, shows what they did; docs/errors.md "
                       "explains what to do",
                       written);
}

/* Completes a list of collectives. */
static void complete_list(struct shoal_request *list, enum shoal_status status)
{
    while (list) {
        struct shoal_request *request = list;
        list = list->next;
        if (request->cached)
            shoal_engine_release_plan(request);
        shoal_request_complete(request, status);
    }
}

/* Peers that stopped in the middle may later resume writing there: shoal_comm_free() handles this. */
static void note_exposed(struct shoal_engine *engine)
{
    for (const struct shoal_request *request = shoal_intake_first_announced(engine); request; request = request->next) {
        if (request->state == SHOAL_REQUEST_QUEUED || request->is_direct)
            continue;
        SHOAL_ASSERT(engine->blame->exposed_count + 2 <= SHOAL_COUNT_OF(engine->blame->exposed));
        if (request->announcement.output)
            engine->blame->exposed[engine->blame->exposed_count++] = request->announcement.output;
        if (request->announcement.input && request->announcement.input != request->announcement.output)
            engine->blame->exposed[engine->blame->exposed_count++] = request->announcement.input;
    }
}

/* On the rank that others waited for, the line says that they waited for this rank, not for rank N. `shoal run` reads the rank
 * to blame from this line: the text begins with that rank, or " by" names it. */
static void log_broken(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    char before[96] = "", blamed[64] = "", by[80] = "";
    snprintf(blamed, sizeof blamed, "rank %d (process %d", failure->rank, failure->pid);
    if (failure->rank >= 0 && failure->pid && strncmp(failure->text, blamed, strlen(blamed)) != 0)
        snprintf(by, sizeof by, " by %s)", blamed);
    if (failure->status == SHOAL_ERR_TIMEOUT && !failure->is_given && failure->rank == engine->rank &&
        failure->reporter != engine->rank)
        snprintf(before, sizeof before, "rank %d waited %llu ms for this rank: ", failure->reporter,
                 (unsigned long long)failure->waited_ms);
    shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine", "communicator %s is broken%s: %s%s", engine->name, by, before,
                   failure->text);
}

static void break_with(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    SHOAL_ASSERT(!engine->is_broken); /* there is one first cause */
    note_exposed(engine);
    struct shoal_request *const all = shoal_intake_drop(engine);
    engine->blame->failure = *failure;
    engine->is_broken = true;
    shoal_engine_drop_chunks(engine);
    log_broken(engine, failure);
    shoal_engine_hold_inputs(engine, all);
    complete_list(all, failure->status);
    shoal_p2p_fail(engine, failure->status);
    atomic_store_explicit(&engine->recorder.flight->status, (int32_t)failure->status, memory_order_relaxed);
    write_recorder(engine);
}

void shoal_engine_fail(struct shoal_engine *engine, const struct shoal_failure *failure)
{
    struct shoal_failure first;
    if (engine->is_broken)
        return;
    engine->ops->fail(engine->transport, failure);
    break_with(engine, engine->ops->failed(engine->transport, &first) ? &first : failure);
}

bool shoal_engine_heed_failure(struct shoal_engine *engine)
{
    struct shoal_failure first;
    if (engine->is_broken || !engine->ops->failed(engine->transport, &first))
        return false;
    break_with(engine, &first);
    return true;
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

/* ---- Finding ranks that a request waits for ------------------------------------------------------------------------------ */

static struct shoal_request *failure_earlier(struct shoal_request *a, struct shoal_request *b)
{
    if (!a || !b)
        return a ? a : b;
    return b->deadline_ns < a->deadline_ns ? b : a;
}

static struct shoal_request *failure_oldest(struct shoal_engine *engine)
{
    return failure_earlier(shoal_intake_first(engine), shoal_p2p_oldest(engine));
}

/* Returns the request with the earliest deadline. Each operation has its own, even if it waits behind others. */
static struct shoal_request *most_urgent(struct shoal_engine *engine)
{
    struct shoal_request *urgent = shoal_p2p_oldest(engine);
    for (struct shoal_request *request = shoal_intake_first(engine); request; request = shoal_intake_next(engine, request))
        urgent = failure_earlier(urgent, request);
    return urgent;
}

bool shoal_engine_is_stopped(struct shoal_engine *engine, int peer)
{
    char state[96];
    engine->ops->describe(engine->transport, peer, state, sizeof state);
    return strncmp(state, "stopped", strlen("stopped")) == 0;
}

/* Returns the rank to blame for a step that waits for peer. A running peer may itself wait for a stopped rank. */
static int find_stopped(struct shoal_engine *engine, int peer)
{
    for (int i = 0; i < engine->size; i++) {
        const int r = (peer + i) % engine->size;
        if (r != engine->rank && shoal_engine_is_stopped(engine, r))
            return r;
    }
    return peer;
}

static int waited_for_by(struct shoal_engine *engine, int rank)
{
    const int said = engine->ops->waits_for(engine->transport, rank);
    return said < 0 ? -1 : said & ~SHOAL_WAIT_BLOCKED;
}

/* Follows the chain of published waits: the peer may have published that it waits for another rank, and so on, or that it waits
 * for itself (for its device). What a rank published before it was stopped is out of date. */
static int end_of_chain(struct shoal_engine *engine, int peer)
{
    int end = peer;
    for (int i = 0; i < engine->size; i++) {
        const int next = waited_for_by(engine, end);
        if (next < 0 || next == end || next == engine->rank || shoal_engine_is_stopped(engine, end))
            return end;
        end = next;
    }
    return peer; /* they wait for each other */
}

/* Some ranks run ahead of others. A rank is behind if it has not reached the first operation that is not complete on all ranks.
 * A rank that waits for all ranks waits for a rank behind, or for a rank that waits for one. Only ranks of this host count,
 * because the completions of others arrive late. */
static uint64_t first_open(const struct shoal_engine *engine)
{
    uint64_t least = shoal_intake_done(engine);
    for (int r = 0; r < engine->size; r++) {
        const bool is_asked = r != engine->rank && shoal_engine_is_local(engine, r);
        const uint64_t done = is_asked ? engine->ops->completed(engine->transport, r) : least;
        least = done < least ? done : least;
    }
    return least + 1;
}

static bool is_behind(const struct shoal_engine *engine, uint64_t first, int peer)
{
    return peer != engine->rank && shoal_engine_is_local(engine, peer) &&
           !engine->ops->announcement(engine->transport, peer, first);
}

static bool is_any_behind(const struct shoal_engine *engine, uint64_t first)
{
    for (int r = 0; r < engine->size; r++) {
        if (is_behind(engine, first, r))
            return true;
    }
    return false;
}

struct shoal_engine_wait shoal_engine_look(const struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_engine_wait wait = {.request = request, .first_open = first_open(engine)};
    int step;
    wait.is_any_behind = is_any_behind(engine, wait.first_open);
    wait.is_for_device = shoal_runner_find_unready(engine, request) >= 0;
    shoal_runner_find_step(engine, request, &step, &wait.peer);
    if (failure_is_message(request->call.collective))
        wait.peer = shoal_p2p_is_helped(request) ? -1 : request->call.root;
    return wait;
}

static bool waits_for_one(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return request->state == SHOAL_REQUEST_ANNOUNCED && request->needed != SHOAL_NEEDED_ALL && request->needed != engine->rank;
}

/* The rank that this one needs may itself be waiting to reuse its older announcements. */
static bool may_be_held_back(const struct shoal_engine *engine, const struct shoal_engine_wait *wait)
{
    const size_t bytes = shoal_engine_payload_bytes(engine, wait->request, wait->request->needed);
    const uint64_t kept = bytes > SHOAL_PAYLOAD_INLINE ? SHOAL_PAYLOADS : SHOAL_ANNOUNCEMENTS;
    return wait->request->sequence >= wait->first_open + kept;
}

/* If ranks of this host have not reached the first open operation, the request waits for them before all others. */
static bool is_behind_or_absent(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int peer)
{
    if (wait->is_any_behind && shoal_engine_is_local(engine, peer))
        return is_behind(engine, wait->first_open, peer);
    return !engine->ops->announcement(engine->transport, peer, wait->request->sequence);
}

static bool is_met_by(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int peer)
{
    if (waits_for_one(engine, wait->request) && !may_be_held_back(engine, wait))
        return peer == wait->request->needed;
    return is_behind_or_absent(engine, wait, peer);
}

static bool is_next_of_rounds(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int peer)
{
    (void)engine;
    return peer == wait->request->next_missing;
}

/* The request is queued until older announcements may be reused. */
static bool holds_back(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int peer)
{
    const struct shoal_request *request = wait->request;
    const uint64_t kept = request->payload_bytes > SHOAL_PAYLOAD_INLINE ? SHOAL_PAYLOADS : SHOAL_ANNOUNCEMENTS;
    if (wait->is_any_behind)
        return is_behind(engine, wait->first_open, peer);
    return engine->ops->completed(engine->transport, peer) + kept < request->sequence;
}

/* Returns true if the request cannot continue because of a peer. */
static bool is_waited_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int peer)
{
    static bool (*const in_phase[SHOAL_PHASE_END])(struct shoal_engine *, const struct shoal_engine_wait *, int) = {
        [SHOAL_PHASE_QUEUED] = holds_back,           [SHOAL_PHASE_MEETING] = is_met_by,
        [SHOAL_PHASE_IN_ROUNDS] = is_next_of_rounds, [SHOAL_PHASE_RUNNING] = is_behind_or_absent,
        [SHOAL_PHASE_LEAVING] = is_behind_or_absent,
    };
    if (peer == engine->rank || !shoal_peer_set_has(wait->request->peer_set, peer))
        return false;
    return in_phase[shoal_request_phase(wait->request)](engine, wait, peer);
}

/* True if the rank has not announced the operation, has not received what was sent, or is the peer of the request's step. */
bool shoal_engine_wait_is_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int rank)
{
    if (wait->is_for_device)
        return rank == engine->rank;
    if (wait->peer >= 0 || shoal_request_is_message(wait->request))
        return rank == wait->peer;
    if (shoal_runner_is_leaving(engine, wait->request))
        return engine->ops->is_sending && engine->ops->is_sending(engine->transport, rank);
    return is_waited_for(engine, wait, rank);
}

struct shoal_request *shoal_engine_awaited(struct shoal_engine *engine)
{
    for (struct shoal_request *request = shoal_intake_first(engine); request; request = shoal_intake_next(engine, request)) {
        if (shoal_request_is_awaited(request))
            return shoal_intake_first(engine);
    }
    return shoal_p2p_awaited(engine);
}

/* Finds the ranks at the ends of the request's chains of waits. nearest[r] is 0 if no chain ends at r. Otherwise it is 1 + the
 * first rank of that chain: one that waits for r, directly or through others, or r itself. Returns the lowest such r, or -1. */
static int failure_find_missing(struct shoal_engine *engine, struct shoal_request *request, uint16_t *nearest)
{
    const struct shoal_engine_wait wait = shoal_engine_look(engine, request);
    int first = 0;
    memset(nearest, 0, (size_t)engine->size * sizeof *nearest);
    for (int r = 0; r < engine->size; r++) {
        if (!shoal_engine_wait_is_for(engine, &wait, r))
            continue;
        const int end = end_of_chain(engine, r), named = wait.peer >= 0 ? find_stopped(engine, end) : end;
        SHOAL_ASSERT(named >= 0 && named < engine->size);
        nearest[named] = (uint16_t)(1 + (named == end ? r : named));
    }
    while (first < engine->size && !nearest[first])
        first++;
    return first < engine->size ? first : -1;
}

/* "rank 3 (process 17 on h2, alive; rank 2 waits for it)" */
static void failure_append_rank(struct shoal_engine *engine, int rank, int nearest, bool is_for_device, char *text,
                                size_t bytes)
{
    struct shoal_transport_peer name;
    char state[96];
    engine->ops->peer_name(engine->transport, rank, &name);
    engine->ops->describe(engine->transport, rank, state, sizeof state);
    shoal_engine_append(text, bytes, "rank %d (process %d on %s, %s", rank, name.pid, name.host, state);
    if (rank == engine->rank && !is_for_device)
        shoal_engine_append(text, bytes, "; it has not called the other side of its message to itself");
    else if (rank == engine->rank || waited_for_by(engine, rank) == rank)
        shoal_engine_append(text, bytes, "; its own operand is not ready on its device");
    if (nearest != rank)
        shoal_engine_append(text, bytes, "; rank %d waits for it", nearest);
    shoal_engine_append(text, bytes, ")");
}

/* Writes what the request waits for, naming at most eight ranks. Returns the first rank. */
static int name_missing(struct shoal_engine *engine, struct shoal_request *request, char *text, size_t bytes)
{
    uint16_t *const nearest = engine->blame->nearest;
    const int first = failure_find_missing(engine, request, nearest);
    const bool is_for_device = shoal_engine_look(engine, request).is_for_device;
    int named = 0;
    snprintf(text, bytes, "%s", shoal_runner_is_leaving(engine, request) ? "its data to leave for " : "");
    for (int r = 0; r < engine->size; r++) {
        if (!nearest[r] || ++named > 8)
            continue;
        shoal_engine_append(text, bytes, "%s", named > 1 ? ", " : "");
        failure_append_rank(engine, r, nearest[r] - 1, is_for_device, text, bytes);
    }
    if (named > 8)
        shoal_engine_append(text, bytes, " and %d more", named - 8);
    if (named == 0)
        snprintf(text, bytes, "%s",
                 shoal_runner_is_leaving(engine, request) ? "its data to leave"
                 : shoal_runner_is_helped(engine, request) || shoal_p2p_is_helped(request)
                     ? "its own helper threads, which get no core (SHOAL_THREADS)"
                     : "the operations before it");
    return first;
}

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
    char missing[400], cycle[300], call_text[96], after[700] = "";
    const uint64_t stalled_ns = now_ns - engine->blame->progress_ns;
    const int rank = name_missing(engine, request, missing, sizeof missing);
    engine->blame->warned_ns = now_ns;
    if (engine->blame->has_warned && rank == engine->blame->warned_rank && stalled_ns < engine->blame->warn_next_ns)
        return;
    engine->blame->has_warned = true;
    engine->blame->warned_rank = rank;
    engine->blame->warn_next_ns = next_warning_ns(stalled_ns);
    print_request(request, call_text, sizeof call_text);
    shoal_p2p_append_unexpected(engine, request, after, sizeof after);
    if (shoal_engine_find_deadlock(engine, cycle, sizeof cycle))
        shoal_engine_append(after, sizeof after, "; %s", cycle);
    append_hint(engine, rank, after, sizeof after);
    shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine", "%s (number %llu of communicator %s) has waited %llu ms for %s%s",
                   call_text, (unsigned long long)request->sequence, engine->name,
                   (unsigned long long)waited_ms(engine, request), missing, after);
}

/* How often a waiting rank publishes which rank it waits for. */
#define SAY_AGAIN_NS (500 * SHOAL_NS_PER_MS)

/* Returns the lowest rank that the request itself waits for, or -1. */
static int find_waited_for(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_engine_wait wait = shoal_engine_look(engine, request);
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
    engine->ops->say_waits_for(engine->transport, failure_is_message(request->call.collective) ? UINT64_MAX : request->sequence,
                               rank | SHOAL_WAIT_BLOCKED);
    return rank;
}

/* Publishes the wait, so that ranks that wait for this one do not blame it. Messages that no thread waits for are left out: the
 * program may do other work meanwhile. */
static void say_wait(struct shoal_engine *engine, uint64_t now_ns)
{
    struct shoal_request *request = shoal_intake_first(engine);
    const uint64_t stalled_ns = now_ns - engine->blame->progress_ns;
    if (stalled_ns < SAY_AGAIN_NS || now_ns - engine->blame->said_ns < SAY_AGAIN_NS)
        return;
    int rank = say_blocked(engine, stalled_ns);
    if (rank < 0) {
        if (!request)
            return;
        rank = failure_find_missing(engine, request, engine->blame->nearest);
        engine->ops->say_waits_for(engine->transport, request->sequence, rank);
    }
    shoal_recorder_note_wait(&engine->recorder, rank,
                             shoal_clock_ticks() - (uint64_t)((double)stalled_ns / ns_per_tick(engine)));
    engine->blame->said_ns = now_ns;
    engine->is_wait_said = true;
}

void shoal_engine_go_on(struct shoal_engine *engine)
{
    if (!engine->is_wait_said || engine->is_broken)
        return;
    engine->ops->say_waits_for(engine->transport, shoal_intake_done(engine) + 1, -1);
    shoal_recorder_note_wait(&engine->recorder, -1, 0);
    engine->is_wait_said = false;
}

static void fail_late(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_failure failure;
    char what[300];
    if (shoal_engine_settle(engine, true))
        return;
    /* Calls run in order, so the first one names the ranks that all of them wait for. */
    struct shoal_request *const first = failure_is_message(request->call.collective) ? request : shoal_intake_first(engine);
    int rank = name_missing(engine, first, what, sizeof what);
    const bool is_deadlock = shoal_engine_find_deadlock(engine, what, sizeof what);
    rank = is_deadlock ? -1 : rank;
    shoal_engine_begin_failure(engine, request, SHOAL_ERR_TIMEOUT, rank, &failure);
    snprintf(failure.text, sizeof failure.text, "%s (number %llu of communicator %s) passed its deadline after %llu ms%s%s",
             failure.operation, (unsigned long long)request->sequence, engine->name, (unsigned long long)failure.waited_ms,
             is_deadlock ? "; " : ", waiting for ", what);
    shoal_p2p_append_unexpected(engine, request, failure.text, sizeof failure.text);
    shoal_engine_fail(engine, &failure);
}

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
static bool failure_is_out_of_reach(struct shoal_engine *engine, const struct shoal_request *call, int peer)
{
    const struct shoal_transport_ops *ops = engine->ops;
    return ops->is_cut_off && shoal_peer_set_has(call->peer_set, peer) && ops->is_cut_off(engine->transport, peer);
}

static int failure_first_lost(struct shoal_engine *engine, const struct shoal_request *call, struct shoal_failure *found,
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
    int rank = call ? failure_first_lost(engine, call, found, is_held_up_by) : -1;
    if (call && rank < 0)
        rank = failure_first_lost(engine, call, found, failure_is_out_of_reach);
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
    const bool is_blocked = request != shoal_intake_first(engine) || is_held_up_by(engine, request, rank);
    const uint64_t now_ns = shoal_engine_now_ns(engine), mark = progress_mark(engine);
    if (shoal_engine_is_local(engine, rank))
        return false;
    if (!engine->blame->lost_ns || engine->blame->lost_mark != mark)
        engine->blame->lost_ns = now_ns;
    engine->blame->lost_mark = mark;
    return now_ns - engine->blame->lost_ns < (is_blocked ? UNDER_WAY_NS : OUT_OF_REACH_NS);
}

static bool fail_lost(struct shoal_engine *engine)
{
    struct shoal_failure failure, found = {0};
    int rank;
    struct shoal_request *request = find_blocked(engine, &found, &rank);
    if (!request || is_perhaps_under_way(engine, request, rank)) {
        engine->blame->lost_ns = request ? engine->blame->lost_ns : 0;
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

/* A request is excused at least this often, however long each absence was. */
#define EXCUSES 8

/* Returns true if the deadline was moved. Excuses are limited: a rank that always looks late, for example because its callbacks
 * are slow, would otherwise never end an operation that another rank holds up. */
static bool failure_excuse(const struct shoal_engine *engine, struct shoal_request *request, uint64_t away_ns)
{
    const uint64_t timeout_ns = (request->call.timeout_ms ? request->call.timeout_ms : engine->timeout_ms) * SHOAL_NS_PER_MS;
    const uint64_t most_ns = shoal_engine_now_ns(engine) + timeout_ns;
    const uint64_t given_ns = request->excused_ns < timeout_ns ? away_ns : 0;
    request->excused_ns += given_ns < timeout_ns / EXCUSES ? given_ns : timeout_ns / EXCUSES;
    if (request->deadline_ns < most_ns && given_ns < most_ns - request->deadline_ns)
        request->deadline_ns += given_ns;
    else
        request->deadline_ns = most_ns;
    return given_ns > 0;
}

void shoal_engine_excuse(struct shoal_engine *engine, uint64_t away_ns)
{
    bool is_given = false;
    for (struct shoal_request *request = shoal_intake_first(engine); request; request = shoal_intake_next(engine, request))
        is_given |= failure_excuse(engine, request, away_ns);
    for (struct shoal_request *request = shoal_p2p_first(engine); request; request = request->next)
        is_given |= failure_excuse(engine, request, away_ns);
    if (is_given)
        engine->blame->progress_ns = 0; /* no rank counts as slow yet */
}

/* Time between two looks at which rank a slow operation waits for. */
#define WARN_AGAIN_NS SHOAL_NS_PER_S

uint64_t shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns)
{
    struct shoal_blame *blame = engine->blame;
    const uint64_t every_ns = 100 * SHOAL_NS_PER_MS;
    if (engine->helpers)
        shoal_recorder_note_threads(&engine->recorder, shoal_helpers_width(engine->helpers));
    if (engine->recorder.rejections)
        shoal_recorder_note_rejected(&engine->recorder);
    if (engine->is_fresh || engine->is_broken || !shoal_engine_is_busy(engine))
        blame->progress_ns = 0;
    engine->is_fresh = false;
    if (engine->is_broken || !shoal_engine_is_busy(engine))
        return UINT64_MAX;
    if (shoal_engine_heed_failure(engine) || shoal_engine_settle(engine, false) || fail_unmet(engine) || fail_lost(engine))
        return UINT64_MAX;
    struct shoal_request *request = failure_oldest(engine);
    if (!request)
        return every_ns;
    const uint64_t mark = progress_mark(engine);
    struct shoal_request *urgent = most_urgent(engine);
    if (now_ns >= urgent->deadline_ns) {
        fail_late(engine, urgent);
        return UINT64_MAX;
    }
    if (!blame->progress_ns || mark != blame->progress_mark) {
        blame->progress_ns = now_ns;
        blame->progress_mark = mark;
        blame->has_warned = false;
        shoal_engine_go_on(engine);
    } else if (now_ns - blame->progress_ns >= engine->warn_ms * SHOAL_NS_PER_MS &&
               (!blame->has_warned || now_ns - blame->warned_ns >= WARN_AGAIN_NS)) {
        warn_slow(engine, request, now_ns);
    }
    say_wait(engine, now_ns);
    const uint64_t left_ns = urgent->deadline_ns - now_ns;
    return left_ns < every_ns ? left_ns : every_ns;
}
