/* Ranks that called different operations under one number. The rank that finds a difference does not report it at once: it
 * waits briefly for the announcements of the other ranks, groups all ranks by what they called, and names the rank outside the
 * majority. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"

/* How long to wait for the announcements of the other ranks. A rank that cannot name the odd rank waits twice as long, so that
 * a rank that knows more reports first. */
#define SETTLE_NS (500 * SHOAL_NS_PER_MS)
#define GROUPS_MAX 6
#define GROUPS_PRINTED 3
#define RANKS_PRINTED 8

struct shoal_dispute {
    uint64_t sequence; /* the operation whose calls differ; 0 if none */
    uint64_t since_ns;
};

struct shoal_dispute *shoal_dispute_create(void)
{
    return calloc(1, sizeof(struct shoal_dispute));
}

void shoal_dispute_destroy(struct shoal_dispute *dispute)
{
    free(dispute);
}

/* In an all-to-all with parts of different lengths, the longest part differs between ranks. */
static bool may_count_differ(const struct shoal_descriptor *call)
{
    return call->collective == SHOAL_COLLECTIVE_ALLTOALL && call->detail;
}

static bool is_same_call(const struct shoal_descriptor *a, const struct shoal_descriptor *b)
{
    return (a->count == b->count || may_count_differ(a)) && a->detail == b->detail && a->root == b->root &&
           a->collective == b->collective && a->type == b->type && a->type_tag == b->type_tag && a->op == b->op &&
           a->way == b->way;
}

/* Names the difference between two calls that print alike. */
static const char *hint_at_detail(const struct shoal_descriptor *a, const struct shoal_descriptor *b)
{
    if (a->way != b->way)
        return "; if GPUs sum, all ranks must pass memory of the GPU that was current when the communicator was made";
    if (a->count != b->count || a->root != b->root || a->collective != b->collective || a->type != b->type ||
        a->type_tag != b->type_tag || a->op != b->op || a->detail == b->detail)
        return "";
    return "; they differ in the lengths of parts, the counts of tensors, or the scale";
}

/* ---- Grouping ranks by call ---------------------------------------------------------------------------------------------- */

/* Ranks that made the same call. */
struct group {
    const struct shoal_descriptor *call;
    int first; /* its lowest rank */
    int count;
};

struct view {
    struct group groups[GROUPS_MAX]; /* largest first; groups of equal size by their lowest rank */
    int count;
    int known;   /* ranks whose call is known */
    int missing; /* ranks whose announcement has not arrived */
    int named;   /* the lowest rank outside the majority; -1: there is no majority */
};

static const struct shoal_descriptor *call_of(const struct shoal_engine *engine, int rank, uint64_t sequence)
{
    if (rank == engine->rank)
        return shoal_intake_called(engine, sequence);
    const struct shoal_announcement *announcement = engine->ops->announcement(engine->transport, rank, sequence);
    return announcement ? &announcement->descriptor : NULL;
}

static void add_to_group(struct view *view, const struct shoal_descriptor *call, int rank)
{
    int g = 0;
    while (g < view->count && !is_same_call(view->groups[g].call, call))
        g++;
    if (g == GROUPS_MAX)
        return;
    if (g == view->count)
        view->groups[view->count++] = (struct group){call, rank, 0};
    view->groups[g].count++;
}

/* Sorts by size. There are few groups, and they are already in the order of their lowest ranks. */
static void sort_groups(struct view *view)
{
    for (int i = 1; i < view->count; i++) {
        for (int j = i; j > 0 && view->groups[j].count > view->groups[j - 1].count; j--) {
            const struct group group = view->groups[j];
            view->groups[j] = view->groups[j - 1];
            view->groups[j - 1] = group;
        }
    }
}

static int lowest_other(const struct view *view)
{
    int lowest = view->groups[1].first;
    for (int g = 2; g < view->count; g++)
        lowest = view->groups[g].first < lowest ? view->groups[g].first : lowest;
    return lowest;
}

static struct view look_at_calls(const struct shoal_engine *engine, uint64_t sequence)
{
    const struct shoal_peer_set *peer_set = shoal_intake_met(engine, sequence);
    struct view view = {.named = -1};
    for (int r = 0; r < engine->size; r++) {
        const struct shoal_descriptor *call = call_of(engine, r, sequence);
        view.known += call != NULL;
        view.missing += !call && shoal_peer_set_is_source(peer_set, r);
        if (call)
            add_to_group(&view, call, r);
    }
    SHOAL_ASSERT(view.count > 0); /* this rank's call is known */
    sort_groups(&view);
    if (view.count > 1 && 2 * view.groups[0].count > view.known)
        view.named = lowest_other(&view);
    return view;
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

/* " (0, 1, 4)" */
static void append_ranks(const struct shoal_engine *engine, uint64_t sequence, const struct group *group, char *text,
                         size_t bytes)
{
    int printed = 0;
    for (int r = 0; r < engine->size && printed <= RANKS_PRINTED; r++) {
        const struct shoal_descriptor *call = call_of(engine, r, sequence);
        if (!call || !is_same_call(call, group->call))
            continue;
        if (++printed > RANKS_PRINTED)
            shoal_engine_append(text, bytes, ", ...");
        else
            shoal_engine_append(text, bytes, "%s%d", printed == 1 ? " (" : ", ", r);
    }
    shoal_engine_append(text, bytes, ")");
}

/* "rank 3 (process 17 on h2) called ..."; "7 of 8 ranks called ..." */
static void append_group(struct shoal_engine *engine, uint64_t sequence, const struct view *view, int g, char *text,
                         size_t bytes)
{
    const struct group *group = &view->groups[g];
    char call[96];
    shoal_engine_append(text, bytes, "%s", g ? "; " : "");
    if (group->count == 1) {
        struct shoal_transport_peer name;
        engine->ops->peer_name(engine->transport, group->first, &name);
        shoal_engine_append(text, bytes, "rank %d (process %d on %s)", group->first, name.pid, name.host);
    } else {
        shoal_engine_append(text, bytes, "%d of %d ranks", group->count, engine->size);
        if (g || view->named < 0)
            append_ranks(engine, sequence, group, text, bytes);
    }
    shoal_engine_print_call(group->call, call, sizeof call);
    shoal_engine_append(text, bytes, " called %s", call);
}

static const struct shoal_request *find_request(const struct shoal_engine *engine, uint64_t sequence)
{
    const struct shoal_request *request = shoal_intake_first_announced(engine);
    while (request && request->sequence != sequence)
        request = request->next;
    return request;
}

static void fail_different(struct shoal_engine *engine, uint64_t sequence, const struct view *view)
{
    SHOAL_ASSERT(view->count > 1);
    struct shoal_failure failure;
    char *const text = failure.text;
    shoal_engine_begin_failure(engine, find_request(engine, sequence), SHOAL_ERR_MISMATCH, view->named, &failure);
    failure.sequence = sequence;
    shoal_engine_print_call(view->groups[0].call, failure.operation, sizeof failure.operation);
    snprintf(text, sizeof failure.text,
             "ranks called different operations as number %llu of communicator %s: ", (unsigned long long)sequence,
             engine->name);
    for (int g = 0; g < view->count && g < GROUPS_PRINTED; g++)
        append_group(engine, sequence, view, g, text, sizeof failure.text);
    if (view->count > GROUPS_PRINTED)
        shoal_engine_append(text, sizeof failure.text, "; others called something else");
    shoal_engine_append(text, sizeof failure.text, "%s", hint_at_detail(view->groups[0].call, view->groups[1].call));
    if (view->known < engine->size)
        shoal_engine_append(text, sizeof failure.text, "; rank %d does not know what the other %d called", engine->rank,
                            engine->size - view->known);
    shoal_engine_fail(engine, &failure);
}

/* ---- Parts of different lengths in an all-to-all ------------------------------------------------------------------------- */

/* Returns the length and offset of the peer's part for this rank, from the peer's announcement. */
static struct shoal_call_part peer_count_of(struct shoal_engine *engine, uint64_t sequence, int peer)
{
    int index;
    const size_t bytes = shoal_engine_peer_counts_bytes(engine, peer, &index);
    const struct shoal_call_part *peer_counts = engine->ops->payload(engine->transport, peer, sequence, bytes);
    return peer_counts[index];
}

/* Stores where the peer's part is. Returns false if its length is not what this rank expects. */
static SHOAL_NOINLINE bool heed_peer_count(struct shoal_engine *engine, struct shoal_request *request, int peer)
{
    struct shoal_call_parts *parts = shoal_call_parts(&request->call);
    if (!shoal_call_has_peer_counts(&request->call))
        return true;
    const struct shoal_call_part theirs = peer_count_of(engine, request->sequence, peer);
    parts->peer_at[peer] = theirs.count ? (size_t)theirs.offset : 0;
    return theirs.count == parts->received[peer];
}

/* Only a pair of ranks knows that a length differs. A rank that differs from most others is the odd one. */
struct lengths {
    int first;   /* the lowest peer whose part does not have the length that this rank expects; -1 if none */
    int others;  /* number of such peers */
    int missing; /* ranks whose announcement has not arrived */
};

static struct lengths look_at_lengths(struct shoal_engine *engine, const struct shoal_request *request)
{
    struct lengths lengths = {.first = -1};
    for (int r = 0; r < engine->size; r++) {
        if (r == engine->rank || !shoal_peer_set_is_source(request->peer_set, r))
            continue;
        if (!engine->ops->announcement(engine->transport, r, request->sequence)) {
            lengths.missing++;
        } else if (peer_count_of(engine, request->sequence, r).count != request->call.layout->parts->received[r]) {
            lengths.first = lengths.first < 0 ? r : lengths.first;
            lengths.others++;
        }
    }
    return lengths;
}

static bool is_odd(const struct shoal_engine *engine, const struct lengths *lengths)
{
    return lengths->others > 1 && 2 * lengths->others > engine->size - 1;
}

static void fail_lengths(struct shoal_engine *engine, const struct shoal_request *request, const struct lengths *lengths)
{
    SHOAL_ASSERT(lengths->first >= 0 && lengths->others > 0);
    const int peer = lengths->first;
    struct shoal_failure failure;
    struct shoal_transport_peer name;
    engine->ops->peer_name(engine->transport, peer, &name);
    shoal_engine_begin_failure(engine, request, SHOAL_ERR_MISMATCH, is_odd(engine, lengths) ? engine->rank : -1, &failure);
    snprintf(failure.text, sizeof failure.text,
             "lengths of parts differ in operation %llu of communicator %s, %s: rank %d (process %d on %s) sends %llu elements "
             "to rank %d, which expects %zu",
             (unsigned long long)request->sequence, engine->name, failure.operation, peer, name.pid, name.host,
             (unsigned long long)peer_count_of(engine, request->sequence, peer).count, engine->rank,
             request->call.layout->parts->received[peer]);
    if (lengths->others > 1)
        shoal_engine_append(failure.text, sizeof failure.text, "; so do %d of %d ranks that send to rank %d", lengths->others,
                            engine->size - 1, engine->rank);
    shoal_engine_fail(engine, &failure);
}

/* ---- Waiting for other announcements ------------------------------------------------------------------------------------- */

/* How long to wait for a rank that knows more. 0 if everything is known, or if the announcements that this rank receives
 * already name a rank. */
static uint64_t patience_ns(const struct shoal_engine *engine, int known, int missing, int named)
{
    if (known == engine->size || (!missing && named >= 0))
        return 0;
    return named >= 0 ? SETTLE_NS : 2 * SETTLE_NS;
}

bool shoal_engine_settle(struct shoal_engine *engine, bool is_urgent)
{
    const uint64_t sequence = engine->dispute->sequence;
    if (SHOAL_LIKELY(!sequence) || engine->is_broken)
        return false;
    const uint64_t since_ns = shoal_engine_now_ns(engine) - engine->dispute->since_ns;
    const struct view view = look_at_calls(engine, sequence);
    if (view.count > 1) {
        if (!is_urgent && since_ns < patience_ns(engine, view.known, view.missing, view.named))
            return false;
        fail_different(engine, sequence, &view);
        return true;
    }
    const struct shoal_request *request = find_request(engine, sequence);
    if (!request || !shoal_call_has_peer_counts(&request->call))
        return false;
    const struct lengths lengths = look_at_lengths(engine, request);
    const int named = is_odd(engine, &lengths) ? engine->rank : -1;
    if (!is_urgent && since_ns < patience_ns(engine, engine->size > 2 ? 0 : engine->size, lengths.missing, named))
        return false;
    fail_lengths(engine, request, &lengths);
    return true;
}

/* Returns false, for its callers. */
static SHOAL_NOINLINE bool open_dispute(struct shoal_engine *engine, uint64_t sequence)
{
    if (!engine->dispute->sequence || sequence < engine->dispute->sequence) {
        engine->dispute->sequence = sequence;
        engine->dispute->since_ns = shoal_engine_now_ns(engine);
    }
    (void)shoal_engine_settle(engine, false);
    return false;
}

bool shoal_engine_check_call(struct shoal_engine *engine, struct shoal_request *request, int peer,
                             const struct shoal_announcement *other)
{
    SHOAL_ASSERT(other->descriptor.sequence == request->sequence);
    if (SHOAL_UNLIKELY(!is_same_call(&request->announcement.descriptor, &other->descriptor)))
        return open_dispute(engine, request->sequence);
    return SHOAL_LIKELY(!request->call.layout) || heed_peer_count(engine, request, peer) ||
           open_dispute(engine, request->sequence);
}

bool shoal_engine_check_past_call(struct shoal_engine *engine, const struct shoal_descriptor *own,
                                  const struct shoal_announcement *other)
{
    SHOAL_ASSERT(other->descriptor.sequence == own->sequence);
    return SHOAL_LIKELY(is_same_call(own, &other->descriptor)) || open_dispute(engine, own->sequence);
}
