#include <string.h>

#include "base/assert.h"
#include "engine/call_sizes.h"
#include "engine/engine_state.h"

bool shoal_engine_is_stopped(struct shoal_engine *engine, int peer)
{
    char state[96];
    engine->ops->describe(engine->transport, peer, state, sizeof state);
    return strncmp(state, "stopped", strlen("stopped")) == 0;
}

/* Returns the rank to blame for a step that waits for peer. A running peer may itself wait for a stopped rank. */
static int find_stopped(struct shoal_engine *engine, int peer)
{
    SHOAL_ASSERT(peer >= 0 && peer < engine->size);
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
 * for itself (for the owner of its operand). What a rank published before it was stopped is out of date. */
static int end_of_chain(struct shoal_engine *engine, int peer)
{
    SHOAL_ASSERT(peer >= 0 && peer < engine->size);
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

static bool is_leaving(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return !shoal_request_is_message(request) && shoal_runner_is_leaving(engine, request);
}

/* Returns true if helper threads copy the message: it waits for them, or for its other side, which does. */
static bool is_copied_by_helpers(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_request *other = shoal_p2p_other_side(engine, request);
    return shoal_p2p_is_helped(request) || (other && shoal_p2p_is_helped(other));
}

/* Returns true if the request waits for the owner of an operand of this rank, which may be that of its other side. */
static bool awaits_owner(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const struct shoal_request *other = shoal_p2p_other_side(engine, request);
    return shoal_runner_is_unready(engine, request) || (other && shoal_runner_is_unready(engine, other));
}

struct shoal_engine_wait shoal_engine_find_wait(const struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(request->engine == engine);
    struct shoal_engine_wait wait = {.request = request, .first_open = first_open(engine)};
    int step;
    wait.is_any_behind = is_any_behind(engine, wait.first_open);
    wait.is_for_owner = awaits_owner(engine, request);
    shoal_runner_find_step(engine, request, &step, &wait.peer);
    if (shoal_call_has_peer(request->call.collective))
        wait.peer = is_copied_by_helpers(engine, request) ? -1 : request->call.root;
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
    SHOAL_ASSERT(wait->request->in_rounds);
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

bool shoal_engine_wait_is_for(struct shoal_engine *engine, const struct shoal_engine_wait *wait, int rank)
{
    if (wait->is_for_owner)
        return rank == engine->rank;
    if (wait->peer >= 0 || shoal_request_is_message(wait->request))
        return rank == wait->peer;
    if (is_leaving(engine, wait->request))
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

/* Sets nearest[r] to 0 if no chain ends at r. Otherwise to 1 + the first rank of that chain: one that waits for r, directly or
 * through others, or r itself. */
int shoal_blame_find(struct shoal_engine *engine, struct shoal_request *request)
{
    uint16_t *const nearest = engine->nearest;
    const struct shoal_engine_wait wait = shoal_engine_find_wait(engine, request);
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
static void blame_append_rank(struct shoal_engine *engine, int rank, int nearest, bool is_for_owner, char *text, size_t bytes)
{
    struct shoal_transport_peer name;
    char state[96];
    engine->ops->peer_name(engine->transport, rank, &name);
    engine->ops->describe(engine->transport, rank, state, sizeof state);
    shoal_engine_append(text, bytes, "rank %d (process %d on %s, %s", rank, name.pid, name.host, state);
    if (rank == engine->rank && !is_for_owner)
        shoal_engine_append(text, bytes, "; it has not called the other side of its message to itself");
    else if (rank == engine->rank || waited_for_by(engine, rank) == rank)
        shoal_engine_append(text, bytes, "; its own operand is not ready on its device");
    if (nearest != rank)
        shoal_engine_append(text, bytes, "; rank %d waits for it", nearest);
    shoal_engine_append(text, bytes, ")");
}

int shoal_blame_name(struct shoal_engine *engine, struct shoal_request *request, char *text, size_t bytes)
{
    const uint16_t *const nearest = engine->nearest;
    const int first = shoal_blame_find(engine, request);
    const bool is_for_owner = shoal_engine_find_wait(engine, request).is_for_owner;
    int named = 0;
    snprintf(text, bytes, "%s", is_leaving(engine, request) ? "its data to leave for " : "");
    for (int r = 0; r < engine->size; r++) {
        if (!nearest[r] || ++named > 8)
            continue;
        shoal_engine_append(text, bytes, "%s", named > 1 ? ", " : "");
        blame_append_rank(engine, r, nearest[r] - 1, is_for_owner, text, bytes);
    }
    if (named > 8)
        shoal_engine_append(text, bytes, " and %d more", named - 8);
    if (named == 0)
        snprintf(text, bytes, "%s",
                 is_leaving(engine, request) ? "its data to leave"
                 : shoal_runner_is_helped(engine, request) || is_copied_by_helpers(engine, request)
                     ? "its own helper threads, which get no core (SHOAL_THREADS)"
                     : "the operations before it");
    return first;
}
