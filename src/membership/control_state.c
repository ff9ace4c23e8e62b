#include "membership/control_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"

bool shoal_control_state_init(struct shoal_control_state *state, int rank, int size)
{
    memset(state, 0, sizeof *state);
    state->rank = rank;
    state->size = size;
    state->ranks = calloc((size_t)size, sizeof *state->ranks);
    state->notices = calloc(SHOAL_CONTROL_NOTICES_MAX, sizeof *state->notices);
    state->changed_size = 2 * (size_t)size;
    state->changed = calloc(state->changed_size, sizeof *state->changed);
    if (state->ranks && state->notices && state->changed)
        return true;
    shoal_control_state_fini(state);
    return false;
}

static void drop_first(struct shoal_control_state *state)
{
    free(state->notices[state->notice_first++ % SHOAL_CONTROL_NOTICES_MAX]);
}

void shoal_control_state_fini(struct shoal_control_state *state)
{
    while (state->notice_first < state->notice_end)
        drop_first(state);
    free(state->notices);
    free(state->ranks);
    free(state->changed);
    state->changed = NULL;
    state->notices = NULL;
    state->ranks = NULL;
}

/* ---- facts ---- */

enum shoal_control_life shoal_control_state_life(const struct shoal_control_state *state, int rank)
{
    /* acquire: pairs with the release in learn, so that a thread that sees a loss and then describes it finds its cause. */
    return atomic_load_explicit(&state->ranks[rank].life, memory_order_acquire);
}

bool shoal_control_state_is_stopped(const struct shoal_control_state *state, int rank)
{
    return state->ranks[rank].pauses & 1;
}

bool shoal_control_state_learn(struct shoal_control_state *state, const struct shoal_control_fact *fact, uint64_t now_ns)
{
    SHOAL_ASSERT(fact->rank < (uint32_t)state->size); /* facts from other ranks have been checked */
    struct shoal_control_rank *rank = &state->ranks[fact->rank];
    const bool ends =
        fact->life != SHOAL_CONTROL_ALIVE && shoal_control_state_life(state, (int)fact->rank) == SHOAL_CONTROL_ALIVE;
    const bool pauses = (int32_t)(fact->pauses - rank->pauses) > 0;
    if (ends) {
        rank->cause = fact->cause;
        atomic_store_explicit(&rank->life, fact->life, memory_order_release); /* pairs with the load in life() */
    }
    if (pauses) {
        rank->pauses = fact->pauses;
        rank->stopped_ns = now_ns - SHOAL_CONTROL_SILENT_MS * SHOAL_NS_PER_MS;
    }
    if (ends || pauses) {
        rank->changed = ++state->changes;
        state->changed[state->changes % state->changed_size] = fact->rank;
    }
    return ends || pauses;
}

static struct shoal_control_fact fact_of(const struct shoal_control_state *state, int rank)
{
    return (struct shoal_control_fact){.rank = (uint32_t)rank,
                                       .life = (uint8_t)shoal_control_state_life(state, rank),
                                       .cause = state->ranks[rank].cause,
                                       .pauses = state->ranks[rank].pauses};
}

bool shoal_control_state_end(struct shoal_control_state *state, int rank, enum shoal_control_life life,
                             enum shoal_control_cause cause)
{
    struct shoal_control_fact fact = fact_of(state, rank);
    fact.life = (uint8_t)life;
    fact.cause = (uint8_t)cause;
    return shoal_control_state_learn(state, &fact, 0);
}

bool shoal_control_state_stop(struct shoal_control_state *state, int rank, bool is_stopped, uint64_t now_ns)
{
    struct shoal_control_fact fact = fact_of(state, rank);
    fact.pauses += shoal_control_state_is_stopped(state, rank) != is_stopped;
    return shoal_control_state_learn(state, &fact, now_ns);
}

/* Scans all ranks: `changed` no longer holds the next change for a neighbor that is so far behind. */
static int find_oldest_after(const struct shoal_control_state *state, uint64_t after)
{
    int oldest = -1;
    for (int r = 0; r < state->size; r++) {
        if (state->ranks[r].changed > after && (oldest < 0 || state->ranks[r].changed < state->ranks[oldest].changed))
            oldest = r;
    }
    return oldest;
}

/* A rank that has changed again since is also found later in the ring. */
static int find_next_after(const struct shoal_control_state *state, uint64_t after)
{
    for (uint64_t change = after + 1; change <= state->changes; change++) {
        const uint32_t rank = state->changed[change % state->changed_size];
        if (state->ranks[rank].changed == change)
            return (int)rank;
    }
    return -1;
}

bool shoal_control_state_next(const struct shoal_control_state *state, uint64_t after, struct shoal_control_fact *fact_out,
                              uint64_t *change_out)
{
    if (after >= state->changes)
        return false;
    const bool is_far_behind = state->changes - after > state->changed_size;
    const int rank = is_far_behind ? find_oldest_after(state, after) : find_next_after(state, after);
    SHOAL_ASSERT(rank >= 0); /* at the latest, the rank of the last change */
    *fact_out = fact_of(state, rank);
    *change_out = state->ranks[rank].changed;
    return true;
}

/* ---- the rule ---- */

static bool is_usable(const struct shoal_control_state *state, int rank, bool stopped_too)
{
    return shoal_control_state_life(state, rank) == SHOAL_CONTROL_ALIVE &&
           (stopped_too || !shoal_control_state_is_stopped(state, rank));
}

static int nearest_above(const struct shoal_control_state *state, int rank, bool stopped_too)
{
    for (int r = rank; r > 0;) {
        r = (r - 1) / 2;
        if (is_usable(state, r, stopped_too))
            return r;
    }
    for (int r = 0; r < rank; r++) {
        if (is_usable(state, r, stopped_too))
            return r;
    }
    return -1;
}

int shoal_control_state_parent(const struct shoal_control_state *state, int rank)
{
    const int parent = nearest_above(state, rank, false);
    return parent >= 0 ? parent : nearest_above(state, rank, true);
}

int shoal_control_state_root(const struct shoal_control_state *state)
{
    for (int stopped_too = 0; stopped_too < 2; stopped_too++) {
        for (int r = 0; r < state->size; r++) {
            if (is_usable(state, r, stopped_too))
                return r;
        }
    }
    return -1;
}

int shoal_control_state_passed(const struct shoal_control_state *state, int rank)
{
    int count = 0;
    while (rank > 0) {
        rank = (rank - 1) / 2;
        count += !is_usable(state, rank, false);
    }
    return count;
}

bool shoal_control_state_is_cut_off(const struct shoal_control_state *state, int rank)
{
    if (shoal_control_state_life(state, rank) != SHOAL_CONTROL_LOST)
        return false;
    const enum shoal_control_cause cause = state->ranks[rank].cause;
    return cause == SHOAL_CONTROL_UNREACHABLE || cause == SHOAL_CONTROL_UNANSWERED || cause == SHOAL_CONTROL_ABSENT;
}

bool shoal_control_state_passed_in_silence(const struct shoal_control_state *state, int rank)
{
    bool is_found = false;
    while (rank > 0 && !is_found) {
        rank = (rank - 1) / 2;
        is_found = shoal_control_state_is_cut_off(state, rank);
    }
    return is_found;
}

/* ---- notices ---- */

/* Drops one notice when the ring is full. */
static void drop_one(struct shoal_control_state *state)
{
    SHOAL_ASSERT(state->notice_end - state->notice_first == SHOAL_CONTROL_NOTICES_MAX);
    uint64_t place = state->notice_first;
    for (uint64_t other = place; other < state->notice_end; other++) {
        if (shoal_control_state_notice(state, other)->weight < shoal_control_state_notice(state, place)->weight)
            place = other;
    }
    struct shoal_control_notice **notices = state->notices, *dropped = notices[place % SHOAL_CONTROL_NOTICES_MAX];
    for (; place > state->notice_first; place--)
        notices[place % SHOAL_CONTROL_NOTICES_MAX] = notices[(place - 1) % SHOAL_CONTROL_NOTICES_MAX];
    state->notice_first++;
    free(dropped);
}

bool shoal_control_state_add(struct shoal_control_state *state, const struct shoal_control_notice_head *head, const void *data,
                             size_t bytes, uint64_t via)
{
    SHOAL_ASSERT(head->origin < (uint32_t)state->size); /* notices from other ranks have been checked */
    uint64_t *last_notice = &state->ranks[head->origin].last_notice;
    if (head->number <= *last_notice)
        return true;
    struct shoal_control_notice *notice = malloc(sizeof *notice + bytes);
    if (!notice)
        return false;
    notice->number = *last_notice = head->number;
    notice->origin = (int)head->origin;
    notice->via = via;
    notice->weight = (enum shoal_control_weight)head->weight;
    notice->is_delivered = false;
    notice->bytes = bytes;
    if (bytes > 0)
        memcpy(notice->data, data, bytes);
    if (state->notice_end - state->notice_first == SHOAL_CONTROL_NOTICES_MAX)
        drop_one(state);
    state->notices[state->notice_end++ % SHOAL_CONTROL_NOTICES_MAX] = notice;
    return true;
}

struct shoal_control_notice *shoal_control_state_notice(const struct shoal_control_state *state, uint64_t place)
{
    SHOAL_ASSERT(place >= state->notice_first && place < state->notice_end);
    return state->notices[place % SHOAL_CONTROL_NOTICES_MAX];
}

void shoal_control_state_trim(struct shoal_control_state *state, uint64_t needed)
{
    while (state->notice_first < needed && state->notice_end - state->notice_first > SHOAL_CONTROL_NOTICES_KEPT)
        drop_first(state);
}

/* ---- words ---- */

static const char *cause_text(enum shoal_control_cause cause)
{
    switch (cause) {
    case SHOAL_CONTROL_CLOSED:
        return "ended (the connection to it closed)";
    case SHOAL_CONTROL_UNREACHABLE:
        return "lost: host unreachable for 5 s";
    case SHOAL_CONTROL_ENDED:
        return "ended (its process no longer exists)";
    case SHOAL_CONTROL_REFUSED:
        return "ended, or cut off (it refused a new connection)";
    case SHOAL_CONTROL_UNANSWERED:
        return "lost: no answer to a new connection for 5 s";
    case SHOAL_CONTROL_NONSENSE:
        return "lost: it sent bytes that mean nothing";
    case SHOAL_CONTROL_ABSENT:
        return "lost with its neighbors (it did not reconnect)";
    default:
        return "lost";
    }
}
_Static_assert(SHOAL_CONTROL_UNREACHABLE_MS == 5000, "the words above");

void shoal_control_state_describe(const struct shoal_control_state *state, int rank, uint64_t now_ns, char *text, size_t bytes)
{
    const struct shoal_control_rank *of = &state->ranks[rank];
    const enum shoal_control_life life = shoal_control_state_life(state, rank);
    if (life == SHOAL_CONTROL_LOST)
        snprintf(text, bytes, "%s", cause_text(of->cause));
    else if (life == SHOAL_CONTROL_GONE)
        snprintf(text, bytes, "left");
    else if (shoal_control_state_is_stopped(state, rank))
        snprintf(text, bytes, "stopped or starved (no heartbeat for %u s)",
                 (unsigned)((now_ns - of->stopped_ns) / SHOAL_NS_PER_S));
    else
        snprintf(text, bytes, "alive");
}
