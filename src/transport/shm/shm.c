#include "transport/shm/shm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "membership/agreement.h"
#include "membership/membership.h"
#include "transport/shm/shm_layout.h"

#define EXPECT_BYTES ((size_t)8 * SHOAL_CACHE_LINE)

/* This rank's view of one rank's segment. */
struct seat {
    struct shoal_segment *segment;
    struct shoal_shm_head *head;
    struct shoal_survivors_board *survivors;
    struct shoal_shm_announcement *announcements;
    char *payloads;
    struct shoal_shm_counter *counters;
    struct shoal_shm_counter *queue_heads;
    struct shoal_shm_counter *queue_tails;
    char *staging;
    char *queues;
};

struct shm {
    struct shoal_transport transport;
    struct shoal_shm_endpoint *endpoint;
    struct shoal_membership_comm part; /* used if no rank is on another host; its board exists once all have joined */
    unsigned slots;
    size_t staging_stride;
    size_t control_bytes;
    bool has_staging;
    bool is_inside;   /* between enter and leave, as counted by the endpoint */
    bool *has_queue;  /* [size] */
    bool *is_offered; /* [size]: the peer was sent this rank's segment */
    uint64_t comm;
    uint64_t join_deadline_ns;
    size_t slot_bytes;
    uint64_t counter_start;
    bool needs_fence;                       /* towards some peer, see shoal_shm_peer_needs_fence */
    int *numbers;                           /* [size] the ranks' numbers in messages */
    struct seat *seats;                     /* [size] */
    struct shoal_shm_peer **peers;          /* [size], NULL for this rank */
    struct shoal_shm_counter **incremented; /* [size]: the counters that this rank increments in each peer's segment */
    uint64_t *counter_values;               /* [slots * size]: their values; this rank is the only writer */
    struct shoal_agreement *agreement;      /* among survivors; NULL until one is needed */
    uint64_t *versions;                     /* [size * SHOAL_SURVIVORS_BOARD_KINDS] the notes read so far; NULL likewise */
};

static struct shm *shm_of(struct shoal_transport *transport)
{
    return (struct shm *)transport;
}

/* ---- Announcements ------------------------------------------------------------------------------------------------------- */

/* Peers have the line of the next announcement in their caches from its last use. This rank prefetches it now, while it waits
 * for the others' announcements, so that the next operation's store does not wait. */
static void prepare_next(const struct seat *seat, uint64_t sequence, size_t bytes)
{
    const char *announcement = (const char *)&seat->announcements[sequence % SHOAL_ANNOUNCEMENTS];
    const char *payload = seat->payloads + sequence % SHOAL_PAYLOADS * SHOAL_PAYLOAD_MAX;
    shoal_prefetch_for_write(announcement);
    if (bytes > SHOAL_PAYLOAD_FIRST && bytes <= SHOAL_PAYLOAD_INLINE)
        shoal_prefetch_for_write(announcement + SHOAL_CACHE_LINE);
    for (size_t at = 0; bytes > SHOAL_PAYLOAD_INLINE && at < bytes && at < EXPECT_BYTES; at += SHOAL_CACHE_LINE)
        shoal_prefetch_for_write(payload + at);
}

/* Writes only what this announcement needs: a second line that nobody reads stays in this rank's cache. */
static void shm_announce(struct shoal_transport *transport, const struct shoal_announcement *announcement, const void *payload,
                         size_t bytes, const uint8_t *peers)
{
    (void)peers; /* all ranks are on this host */
    const struct seat *seat = &shm_of(transport)->seats[transport->rank];
    const uint64_t sequence = announcement->descriptor.sequence;
    struct shoal_shm_announcement *line = &seat->announcements[sequence % SHOAL_ANNOUNCEMENTS];
    SHOAL_ASSERT(bytes <= SHOAL_PAYLOAD_MAX && (payload || bytes == 0));
    SHOAL_ASSERT(atomic_load_explicit(&line->sequence, memory_order_relaxed) < sequence); /* in order */
    memcpy(line->descriptor, (const char *)announcement + sizeof line->sequence, sizeof line->descriptor);
    if (announcement->descriptor.hints & SHOAL_HINT_PLANNED) {
        line->input = announcement->input;
        line->output = announcement->output;
    }
    if (bytes > SHOAL_PAYLOAD_INLINE)
        memcpy(seat->payloads + sequence % SHOAL_PAYLOADS * SHOAL_PAYLOAD_MAX, payload, bytes);
    else if (bytes)
        memcpy(line->payload, payload, bytes);
    /* release: a rank that reads the sequence also sees the announcement, the payload and the operands. */
    atomic_store_explicit(&line->sequence, sequence, memory_order_release);
    prepare_next(seat, sequence + 1, bytes);
}

static const struct shoal_announcement *shm_announcement(struct shoal_transport *transport, int peer, uint64_t sequence)
{
    SHOAL_ASSERT(peer >= 0 && peer < transport->size && sequence != 0);
    const struct shoal_shm_announcement *line = &shm_of(transport)->seats[peer].announcements[sequence % SHOAL_ANNOUNCEMENTS];
    /* acquire: pairs with the release in announce. */
    if (atomic_load_explicit(&line->sequence, memory_order_acquire) != sequence)
        return NULL;
    return (const struct shoal_announcement *)(const void *)line;
}

static const void *shm_payload_of(struct shoal_transport *transport, int peer, uint64_t sequence, size_t bytes)
{
    const struct seat *seat = &shm_of(transport)->seats[peer];
    SHOAL_ASSERT(bytes <= SHOAL_PAYLOAD_MAX);
    if (bytes <= SHOAL_PAYLOAD_INLINE)
        return seat->announcements[sequence % SHOAL_ANNOUNCEMENTS].payload;
    return seat->payloads + sequence % SHOAL_PAYLOADS * SHOAL_PAYLOAD_MAX;
}

/* A payload is written before its announcement. If its first lines are prefetched while the announcement's line is on its way,
 * they arrive together with it. Before that they are in this rank's cache from the last time, and the prefetch costs
 * nothing. */
static void shm_expect(struct shoal_transport *transport, int peer, uint64_t sequence, size_t bytes)
{
    const char *payload = shm_payload_of(transport, peer, sequence, bytes);
    for (size_t at = bytes > SHOAL_PAYLOAD_INLINE ? 0 : SHOAL_PAYLOAD_FIRST; at < bytes && at < EXPECT_BYTES;
         at += SHOAL_CACHE_LINE)
        __builtin_prefetch(payload + at);
}

static uint64_t shm_completed(struct shoal_transport *transport, int peer)
{
    return atomic_load_explicit(&shm_of(transport)->seats[peer].head->completed, memory_order_acquire);
}

static void shm_complete(struct shoal_transport *transport, uint64_t sequence)
{
    SHOAL_ASSERT(shm_completed(transport, transport->rank) <= sequence);
    /* release: this rank's reads of the peers' announcements, payloads and staging buffers come before the store; a peer that
     * reads it may reuse them. */
    atomic_store_explicit(&shm_of(transport)->seats[transport->rank].head->completed, sequence, memory_order_release);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static shoal_location shm_locate(struct shoal_transport *transport, const void *address, size_t bytes)
{
    struct shm *shm = shm_of(transport);
    const struct shoal_shm_group group = {shm->comm, shm->peers, transport->size};
    return shoal_shm_endpoint_locate(shm->endpoint, &group, address, bytes);
}

static void *shm_reach(struct shoal_transport *transport, int peer, shoal_location location, size_t bytes,
                       enum shoal_status *error)
{
    struct shm *shm = shm_of(transport);
    SHOAL_ASSERT(location != 0 && peer >= 0 && peer < transport->size);
    void *address = peer == transport->rank ? shoal_shm_endpoint_own(shm->endpoint, location)
                                            : shoal_shm_endpoint_reach(shm->endpoint, shm->peers[peer], location, bytes);
    if (!address)
        *error = shoal_log_fail(shm->endpoint->log, SHOAL_ERR_MEMORY, "shm", "cannot map %zu bytes of rank %d's shared memory",
                                bytes, shm_of(transport)->numbers[peer]);
    return address;
}

/* Operations use the slots of a staging buffer in turn and so would touch its pages one after the other. A first touch costs as
 * much as copying the page twice. Therefore up to this many ranks map all pages at once. A peer's pages are mapped only if they
 * exist already: reading a missing page would allocate it, near this rank's core and before the peer has checked that memory is
 * left. */
#define MAPPED_RANKS_MAX 4

#if defined(MADV_POPULATE_READ) && defined(MADV_POPULATE_WRITE)
static void map_present(char *begin, size_t bytes)
{
    unsigned char is_there[512];
    const size_t most = sizeof is_there * SHOAL_PAGE;
    size_t pages = sizeof is_there;
    for (size_t at = 0; at < bytes && pages == sizeof is_there; at += most) {
        const size_t count = (shoal_min_size(bytes - at, most) + SHOAL_PAGE - 1) / SHOAL_PAGE;
        if (mincore(begin + at, count * SHOAL_PAGE, is_there) != 0)
            return;
        for (pages = 0; pages < count && is_there[pages] & 1;)
            pages++;
        (void)madvise(begin + at, pages * SHOAL_PAGE, MADV_POPULATE_READ);
    }
}
#endif

static void map_staging(const struct shm *shm)
{
#if defined(MADV_POPULATE_READ) && defined(MADV_POPULATE_WRITE)
    const size_t bytes = shm->slots * shm->staging_stride;
    for (int r = 0; r < shm->transport.size && shm->transport.size <= MAPPED_RANKS_MAX; r++) {
        char *begin = (char *)((uintptr_t)shm->seats[r].staging / SHOAL_PAGE * SHOAL_PAGE);
        if (r == shm->transport.rank)
            (void)madvise(begin, bytes, MADV_POPULATE_WRITE);
        else
            map_present(begin, bytes);
    }
#else
    (void)shm;
#endif
}

static enum shoal_status shm_reserve_staging(struct shoal_transport *transport, unsigned slots, size_t slot_bytes)
{
    struct shm *shm = shm_of(transport);
    struct seat *seat = &shm->seats[transport->rank];
    if (shm->has_staging)
        return SHOAL_OK;
    if (slots > shm->slots || slot_bytes > shm->staging_stride - SHOAL_PAGE)
        return shoal_log_fail(shm->endpoint->log, SHOAL_ERR_INTERNAL, "shm",
                              "a staging buffer of %u x %zu bytes is larger than agreed", slots, slot_bytes);
    SHOAL_ASSERT((uint64_t)(seat->staging - seat->segment->base) + shm->slots * shm->staging_stride <= seat->segment->bytes);
    SHOAL_TRY(shoal_memory_reserve(shm->endpoint->memory, seat->segment, (uint64_t)(seat->staging - seat->segment->base),
                                   shm->slots * shm->staging_stride, "the communicator's staging buffer"));
    shm->has_staging = true;
    map_staging(shm);
    return SHOAL_OK;
}

static void *shm_staging(struct shoal_transport *transport, int rank, unsigned slot)
{
    const struct shm *shm = shm_of(transport);
    SHOAL_ASSERT(slot < shm->slots && rank >= 0 && rank < transport->size);
    return shm->seats[rank].staging + slot * shm->staging_stride;
}

/* All memory here is reached by load and store, so plans do not put. */
static enum shoal_status shm_put(struct shoal_transport *transport, int peer, unsigned slot, size_t offset, const void *source,
                                 size_t bytes)
{
    (void)slot, (void)offset, (void)source, (void)bytes;
    return shoal_log_fail(shm_of(transport)->endpoint->log, SHOAL_ERR_INTERNAL, "shm",
                          "put to rank %d, which load and store reach", shm_of(transport)->numbers[peer]);
}

/* ---- Counters ------------------------------------------------------------------------------------------------------------ */

static void shm_signal_peer(struct shoal_transport *transport, int peer, unsigned slot)
{
    struct shm *shm = shm_of(transport);
    SHOAL_ASSERT(slot < shm->slots);
    SHOAL_ASSERT(shm->incremented[peer]); /* all ranks have joined */
    const size_t index = (size_t)slot * (size_t)transport->size;
    /* release: a rank that reads the value sees everything that this rank wrote before. One writer, so no read-modify-write. */
    atomic_store_explicit(&shm->incremented[peer][index].value, ++shm->counter_values[index + (size_t)peer],
                          memory_order_release);
}

static uint64_t counter(struct shoal_transport *transport, int peer, unsigned slot)
{
    const struct shm *shm = shm_of(transport);
    const size_t index = (size_t)slot * (size_t)transport->size + (size_t)peer;
    SHOAL_ASSERT(slot < shm->slots && peer >= 0 && peer < transport->size);
    return atomic_load_explicit(&shm->seats[transport->rank].counters[index].value, memory_order_acquire);
}

/* ---- Packets: one ring of bytes per ordered pair, in the sender's segment ------------------------------------------------ */

#define QUEUE SHOAL_PACKET_QUEUE_BYTES
#define PACKET_PAD UINT32_MAX /* kind of a filler up to the ring's end */

static size_t shm_packet_space(const struct shoal_packet *packet)
{
    return sizeof *packet + shoal_round_up(packet->bytes, SHOAL_CACHE_LINE);
}

static enum shoal_status reserve_queue(struct shm *shm, const struct seat *own, int peer)
{
    char what[64];
    const char *queue = own->queues + (size_t)peer * QUEUE;
    if (shm->has_queue[peer])
        return SHOAL_OK;
    snprintf(what, sizeof what, "the queue of messages to rank %d", shm->numbers[peer]);
    SHOAL_TRY(shoal_memory_reserve(shm->endpoint->memory, own->segment, (uint64_t)(queue - own->segment->base), QUEUE, what));
    shm->has_queue[peer] = true;
    return SHOAL_OK;
}

static enum shoal_status shm_push(struct shoal_transport *transport, int peer, const struct shoal_packet *packet,
                                  const void *data)
{
    struct shm *shm = shm_of(transport);
    const struct seat *own = &shm->seats[transport->rank];
    SHOAL_ASSERT(packet->bytes <= SHOAL_PACKET_BYTES_MAX && packet->kind != PACKET_PAD);
    SHOAL_TRY(reserve_queue(shm, own, peer));
    char *queue = own->queues + (size_t)peer * QUEUE;
    uint64_t head = atomic_load_explicit(&own->queue_heads[peer].value, memory_order_relaxed); /* this rank is its writer */
    /* acquire: the peer has read the packets that it took; their space may be written again. */
    const uint64_t tail = atomic_load_explicit(&shm->seats[peer].queue_tails[transport->rank].value, memory_order_acquire);
    const size_t space = shm_packet_space(packet), to_end = QUEUE - head % QUEUE, filler = space > to_end ? to_end : 0;
    SHOAL_ASSERT(head % SHOAL_CACHE_LINE == 0); /* so a filler has room for a head */
    if (QUEUE - (head - tail) < space + filler)
        return SHOAL_PENDING;
    if (filler) {
        const struct shoal_packet pad = {.kind = PACKET_PAD, .bytes = (uint32_t)(filler - sizeof pad)};
        memcpy(queue + head % QUEUE, &pad, sizeof pad);
        head += filler;
    }
    memcpy(queue + head % QUEUE, packet, sizeof *packet);
    if (packet->bytes)
        memcpy(queue + head % QUEUE + sizeof *packet, data, packet->bytes);
    /* release: a rank that reads the head sees the packet. */
    atomic_store_explicit(&own->queue_heads[peer].value, head + space, memory_order_release);
    return SHOAL_OK;
}

static const struct shoal_packet *oldest_packet(struct shm *shm, int peer, uint64_t *tail_out)
{
    const struct seat *own = &shm->seats[shm->transport.rank], *other = &shm->seats[peer];
    *tail_out = atomic_load_explicit(&own->queue_tails[peer].value, memory_order_relaxed); /* this rank is its writer */
    if (atomic_load_explicit(&other->queue_heads[shm->transport.rank].value, memory_order_acquire) == *tail_out)
        return NULL;
    const char *queue = other->queues + (size_t)shm->transport.rank * QUEUE;
    return (const struct shoal_packet *)(const void *)(queue + *tail_out % QUEUE);
}

static void shm_pop(struct shoal_transport *transport, int peer)
{
    struct shm *shm = shm_of(transport);
    uint64_t tail;
    const struct shoal_packet *packet = oldest_packet(shm, peer, &tail);
    SHOAL_ASSERT(packet); /* peek has found it */
    /* release: this rank has read the packet. */
    atomic_store_explicit(&shm->seats[transport->rank].queue_tails[peer].value, tail + shm_packet_space(packet),
                          memory_order_release);
}

static const struct shoal_packet *shm_peek(struct shoal_transport *transport, int peer)
{
    uint64_t tail;
    const struct shoal_packet *packet = oldest_packet(shm_of(transport), peer, &tail);
    if (!packet || packet->kind != PACKET_PAD)
        return packet;
    shm_pop(transport, peer);
    return shm_peek(transport, peer);
}

/* ---- Waking -------------------------------------------------------------------------------------------------------------- */

/* The frequent side of a handshake: a full fence or, if all peers' rare sides make this process pass one, only a compiler
 * barrier. */
static void order_store_before_look(const struct shm *shm)
{
    if (shm->needs_fence)
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
}

static void shm_flush(struct shoal_transport *transport)
{
    const struct shm *shm = shm_of(transport);
    /* Publishing comes before the look for sleepers; pairs with shoal_shm_endpoint_doze. */
    order_store_before_look(shm);
    for (int r = 0; r < transport->size; r++) {
        if (shm->peers[r] && shoal_shm_doorbell_is_asleep(shm->peers[r]->doorbell))
            shoal_shm_doorbell_ring(shm->peers[r]->doorbell);
    }
}

/* ---- Failure ------------------------------------------------------------------------------------------------------------- */

static void wake_all(void *arg)
{
    const struct shm *shm = arg;
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < shm->transport.size; r++)
        shoal_shm_doorbell_ring(shm->peers[r] ? shm->peers[r]->doorbell : shm->endpoint->doorbell);
}

static void shm_fail(struct shoal_transport *transport, const struct shoal_failure *failure)
{
    shoal_membership_fail(&shm_of(transport)->part, failure);
}

static bool shm_failed(struct shoal_transport *transport, struct shoal_failure *failure)
{
    return shoal_membership_failed(&shm_of(transport)->part, failure);
}

static void shm_leave(struct shoal_transport *transport)
{
    struct shm *shm = shm_of(transport);
    /* release: a rank that sees this rank outside knows that its accesses to operands are over. */
    atomic_store_explicit(&shm->seats[transport->rank].head->is_inside, 0, memory_order_release);
    if (shm->is_inside)
        shoal_shm_endpoint_leave(shm->endpoint);
    shm->is_inside = false;
}

static bool shm_enter(struct shoal_transport *transport)
{
    struct shm *shm = shm_of(transport);
    atomic_store_explicit(&shm->seats[transport->rank].head->is_inside, 1, memory_order_relaxed);
    /* "Inside" comes before the look at the failure. Pairs with is_quiet: either this rank sees the failure, or its owner sees
     * this rank inside. */
    order_store_before_look(shm);
    if (SHOAL_UNLIKELY(shoal_cause_board_is_written(shm->part.board))) {
        shm_leave(transport);
        return false;
    }
    if (!shm->is_inside)
        shoal_shm_endpoint_enter(shm->endpoint);
    shm->is_inside = true;
    return true;
}

static bool shm_is_failing(struct shoal_transport *transport)
{
    /* acquire: the look comes after the caller saw what a failed rank may have done since it published. */
    atomic_thread_fence(memory_order_acquire);
    const struct shoal_cause_board *board = shm_of(transport)->part.board;
    return shoal_cause_board_is_written(board) || shoal_cause_board_is_drafted(board);
}

static bool shm_is_quiet(struct shoal_transport *transport, int *rank_out)
{
    struct shm *shm = shm_of(transport);
    shoal_shm_endpoint_fence_all(shm->endpoint);
    for (int r = 0; r < transport->size; r++) {
        if (!shm->peers[r] || !atomic_load_explicit(&shm->seats[r].head->is_inside, memory_order_acquire) ||
            shoal_membership_process_has_ended(&shm->peers[r]->process))
            continue;
        *rank_out = r;
        return false;
    }
    return true;
}

static void shm_abort_all(struct shoal_transport *transport, const struct shoal_failure *cause)
{
    shoal_membership_abort(&shm_of(transport)->part, cause);
}

static const char *shm_how_left(struct shm *shm, int peer)
{
    /* acquire: after this, the peer's last `completed` is visible. */
    switch (atomic_load_explicit(&shm->seats[peer].head->left, memory_order_acquire)) {
    case SHOAL_SHM_FREED:
        return "freed the communicator";
    case SHOAL_SHM_FINALIZED:
        return "finalized the communicator";
    default:
        return shoal_membership_process_has_ended(&shm->peers[peer]->process) ? shm->peers[peer]->process.ended : NULL;
    }
}

static bool shm_has_died(struct shm *shm, int peer, uint64_t sequence)
{
    struct shoal_shm_peer *other = shm->peers[peer];
    return other && atomic_load_explicit(&shm->seats[peer].head->left, memory_order_acquire) == SHOAL_SHM_PRESENT &&
           shoal_membership_process_has_ended(&other->process) && shm_completed(&shm->transport, peer) < sequence;
}

/* Returns the peer to name when `peer` is lost. A rank that learns of a death frees its communicators, perhaps before this rank
 * learns of either. So a peer that died is named rather than one that left. */
static int shm_first_lost(struct shm *shm, int peer, uint64_t sequence)
{
    if (shm_has_died(shm, peer, sequence))
        return peer;
    for (int r = 0; r < shm->transport.size; r++) {
        if (shm_has_died(shm, r, sequence))
            return r;
    }
    return peer;
}

static int shm_lost(struct shoal_transport *transport, int first, uint64_t sequence, struct shoal_failure *failure)
{
    struct shm *shm = shm_of(transport);
    for (int r = first; r < transport->size; r++) {
        if (!shm->peers[r] || !shm_how_left(shm, r) || shm_completed(transport, r) >= sequence)
            continue;
        const int named = shm_first_lost(shm, r, sequence);
        failure->status = SHOAL_ERR_PEER_LOST;
        failure->rank = shm->numbers[named];
        failure->pid = shm->peers[named]->name.pid;
        snprintf(failure->host, sizeof failure->host, "%s", shm->peers[named]->name.host);
        snprintf(failure->text, sizeof failure->text, "rank %d (process %d on %s) %s", failure->rank, failure->pid,
                 failure->host, shm_how_left(shm, named));
        return r;
    }
    return -1;
}

/* ---- Survivors ----------------------------------------------------------------------------------------------------------- */

static void post_to_survivors(void *arg, const struct shoal_survivors_message *message)
{
    const struct shm *shm = arg;
    shoal_survivors_board_put(shm->seats[shm->transport.rank].survivors, shm->transport.size, message);
}

static bool shm_survivor_has_ended(void *arg, int rank)
{
    return shm_how_left(arg, rank) != NULL;
}

static bool make_agreement(struct shm *shm)
{
    const struct shoal_agreement_path path = {shm, post_to_survivors, shm_survivor_has_ended};
    if (!shm->versions)
        shm->versions = calloc((size_t)shm->transport.size * SHOAL_SURVIVORS_BOARD_KINDS, sizeof *shm->versions);
    if (shm->versions && !shm->agreement)
        shm->agreement = shoal_agreement_create(shm->transport.rank, shm->transport.size, &path);
    return shm->agreement != NULL;
}

/* Reads the messages that others have written since the last call. */
static void read_survivors(struct shm *shm)
{
    struct shoal_survivors_message message;
    for (int r = 0; r < shm->transport.size; r++) {
        uint64_t *versions = &shm->versions[(size_t)r * SHOAL_SURVIVORS_BOARD_KINDS];
        for (int i = 0; shm->peers[r] && i < SHOAL_SURVIVORS_BOARD_KINDS; i++) {
            const enum shoal_survivors_kind kind = (enum shoal_survivors_kind)(i + 1);
            if (shoal_survivors_board_get(shm->seats[r].survivors, kind, shm->transport.size, &versions[i], &message))
                shoal_agreement_receive(shm->agreement, r, &message);
        }
    }
}

static enum shoal_status shm_agree(struct shoal_transport *transport, const struct shoal_survivors_view *proposal,
                                   struct shoal_survivors_view *agreed_out)
{
    struct shm *shm = shm_of(transport);
    if (!make_agreement(shm) || (proposal && !shoal_agreement_propose(shm->agreement, proposal)))
        return SHOAL_ERR_MEMORY;
    shoal_agreement_look(shm->agreement);
    read_survivors(shm);
    (void)shoal_agreement_turn(shm->agreement, shoal_clock_ns());
    return shoal_agreement_result(shm->agreement, agreed_out);
}

static int shm_unagreed(struct shoal_transport *transport, int first)
{
    const struct shm *shm = shm_of(transport);
    return shm->agreement ? shoal_agreement_missing(shm->agreement, first) : -1;
}

static void shm_describe(struct shoal_transport *transport, int peer, char *text, size_t bytes)
{
    const struct shoal_shm_peer *other = shm_of(transport)->peers[peer];
    if (other)
        shoal_membership_process_describe(&other->process, text, bytes);
    else
        snprintf(text, bytes, "this rank");
}

static void shm_peer_name(struct shoal_transport *transport, int peer, struct shoal_transport_peer *name)
{
    const struct shm *shm = shm_of(transport);
    if (shm->peers[peer]) {
        *name = shm->peers[peer]->name;
        return;
    }
    memcpy(name->host, shm->endpoint->log->host, sizeof name->host);
    name->pid = (int)getpid();
}

static void shm_memory(struct shoal_transport *transport, struct shoal_memory_usage *usage)
{
    const struct shm *shm = shm_of(transport);
    usage->control_bytes += shm->control_bytes;
    usage->staging_bytes += shm->has_staging ? shm->slots * shm->staging_stride : 0;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void shm_destroy(struct shoal_transport *transport, bool finalized)
{
    struct shm *shm = shm_of(transport);
    struct seat *own = shm->seats ? &shm->seats[transport->rank] : NULL;
    if (own && own->head) {
        shm_leave(transport); /* no helper works for it any longer */
        /* release: a rank that sees that this rank left also sees its completed operations. */
        atomic_store_explicit(&own->head->left, finalized ? SHOAL_SHM_FINALIZED : SHOAL_SHM_FREED, memory_order_release);
        wake_all(shm);
    }
    for (int r = 0; shm->seats && r < transport->size; r++) {
        if (r == transport->rank)
            shoal_memory_release(shm->endpoint->memory, shm->seats[r].segment);
        else
            shoal_segment_put(shm->seats[r].segment);
    }
    free(shm->seats);
    free(shm->peers);
    free(shm->numbers);
    free(shm->incremented);
    free(shm->counter_values);
    free(shm->has_queue);
    free(shm->is_offered);
    shoal_agreement_destroy(shm->agreement);
    free(shm->versions);
    free(shm);
}

/* relaxed: these values serve only messages about slow ranks, and publish nothing. */
static void shm_say_waits_for(struct shoal_transport *transport, uint64_t sequence, int rank)
{
    (void)sequence;
    SHOAL_ASSERT(rank >= -1);
    atomic_store_explicit(&shm_of(transport)->seats[transport->rank].head->waited_for, rank + 1, memory_order_relaxed);
}

static int shm_waits_for(struct shoal_transport *transport, int peer)
{
    return atomic_load_explicit(&shm_of(transport)->seats[peer].head->waited_for, memory_order_relaxed) - 1;
}

static const struct shoal_transport_ops ops = {
    .name = "shm",
    .announce = shm_announce,
    .announcement = shm_announcement,
    .expect = shm_expect,
    .payload = shm_payload_of,
    .complete = shm_complete,
    .completed = shm_completed,
    .locate = shm_locate,
    .reach = shm_reach,
    .reserve_staging = shm_reserve_staging,
    .staging = shm_staging,
    .put = shm_put,
    .signal = shm_signal_peer,
    .counter = counter,
    .push = shm_push,
    .peek = shm_peek,
    .pop = shm_pop,
    .flush = shm_flush,
    .lost = shm_lost,
    .describe = shm_describe,
    .say_waits_for = shm_say_waits_for,
    .waits_for = shm_waits_for,
    .enter = shm_enter,
    .leave = shm_leave,
    .is_failing = shm_is_failing,
    .is_quiet = shm_is_quiet,
    .fail = shm_fail,
    .failed = shm_failed,
    .abort = shm_abort_all,
    .agree = shm_agree,
    .unagreed = shm_unagreed,
    .peer_name = shm_peer_name,
    .memory = shm_memory,
    .destroy = shm_destroy,
};

static void seat_at(struct seat *seat, struct shoal_segment *segment, const struct shoal_shm_layout *layout)
{
    SHOAL_ASSERT(layout->total_bytes <= segment->bytes);
    seat->segment = segment;
    seat->head = (struct shoal_shm_head *)(void *)(segment->base + layout->head);
    seat->survivors = (struct shoal_survivors_board *)(void *)(segment->base + layout->survivors);
    seat->announcements = (struct shoal_shm_announcement *)(void *)(segment->base + layout->announcements);
    seat->payloads = segment->base + layout->payloads;
    seat->counters = (struct shoal_shm_counter *)(void *)(segment->base + layout->counters);
    seat->queue_heads = (struct shoal_shm_counter *)(void *)(segment->base + layout->queue_heads);
    seat->queue_tails = (struct shoal_shm_counter *)(void *)(segment->base + layout->queue_tails);
    seat->staging = segment->base + layout->staging;
    seat->queues = segment->base + layout->queues;
}

/* Must run before others see the segment. New memory is zero. */
static void start_counters(const struct shm *shm, struct seat *seat)
{
    for (size_t i = 0; i < (size_t)shm->slots * (size_t)shm->transport.size; i++)
        atomic_store_explicit(&seat->counters[i].value, shm->counter_start, memory_order_relaxed);
    atomic_store_explicit(&seat->head->completed, shm->counter_start, memory_order_relaxed);
}

static enum shoal_status shm_allocate(struct shm *shm, struct shoal_shm_endpoint *endpoint,
                                      const struct shoal_shm_options *options)
{
    const size_t size = (size_t)options->size;
    shm->seats = calloc(size, sizeof *shm->seats);
    shm->peers = calloc(size, sizeof(struct shoal_shm_peer *));
    shm->numbers = calloc(size, sizeof *shm->numbers);
    shm->incremented = calloc(size, sizeof *shm->incremented);
    shm->counter_values = calloc(size * options->slots, sizeof *shm->counter_values);
    shm->has_queue = calloc(size, sizeof *shm->has_queue);
    shm->is_offered = calloc(size, sizeof *shm->is_offered);
    if (!shm->seats || !shm->peers || !shm->numbers || !shm->incremented || !shm->counter_values || !shm->has_queue ||
        !shm->is_offered)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no memory for a communicator of %d ranks",
                              options->size);
    memcpy(shm->peers, options->peers, size * sizeof *shm->peers);
    for (size_t r = 0; r < size; r++)
        shm->numbers[r] = options->numbers ? options->numbers[r] : (int)r;
    for (size_t i = 0; i < size * options->slots; i++)
        shm->counter_values[i] = options->counter_start;
    return SHOAL_OK;
}

static enum shoal_status make_own_segment(struct shm *shm)
{
    const int rank = shm->transport.rank;
    const struct shoal_shm_layout layout = shoal_shm_layout_of(rank, shm->transport.size, shm->slots, shm->slot_bytes);
    struct shoal_segment *own;
    shoal_memory_spare_descriptors(shm->endpoint->memory, 1);
    SHOAL_TRY(shoal_segment_create(shm->endpoint->log, "shoal-communicator", layout.total_bytes, &own));
    const enum shoal_status status =
        shoal_memory_reserve(shm->endpoint->memory, own, layout.head, layout.control_bytes - layout.head, "the communicator");
    if (status != SHOAL_OK) {
        shoal_segment_put(own);
        return status;
    }
    seat_at(&shm->seats[rank], own, &layout);
    start_counters(shm, &shm->seats[rank]);
    shm->control_bytes = layout.control_bytes - layout.head;
    shm->staging_stride = layout.staging_stride;
    return SHOAL_OK;
}

enum shoal_status shoal_shm_create(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_options *options,
                                   struct shoal_transport **transport_out)
{
    struct shm *shm = options->size <= SHOAL_SHM_PEERS_MAX ? calloc(1, sizeof *shm) : NULL;
    if (!shm)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm",
                              "no room for a communicator of %d ranks (at most %d on a host)", options->size,
                              SHOAL_SHM_PEERS_MAX);
    SHOAL_ASSERT(options->rank >= 0 && options->rank < options->size && options->slots > 0);
    shm->transport = (struct shoal_transport){.ops = &ops, .rank = options->rank, .size = options->size};
    shm->endpoint = endpoint;
    shm->slots = options->slots;
    shm->comm = options->comm;
    shm->slot_bytes = options->slot_bytes;
    shm->counter_start = options->counter_start;
    shm->part =
        (struct shoal_membership_comm){.comm = options->comm, .host = endpoint->log->host, .arg = shm, .wake = wake_all};
    shm->join_deadline_ns = shoal_clock_ns() + options->timeout_ms * SHOAL_NS_PER_MS;
    enum shoal_status status = shm_allocate(shm, endpoint, options);
    if (status == SHOAL_OK)
        status = make_own_segment(shm);
    if (status != SHOAL_OK) {
        for (int r = 0; r < options->size; r++) { /* so that the others need not wait for it */
            if (options->peers[r])
                (void)shoal_shm_endpoint_offer(options->peers[r], options->comm, NULL);
        }
        shm_destroy(&shm->transport, false);
        return status;
    }
    *transport_out = &shm->transport;
    return SHOAL_OK;
}

static enum shoal_status take_seat(struct shm *shm, int rank, struct shoal_segment *segment)
{
    const struct shoal_shm_layout layout = shoal_shm_layout_of(rank, shm->transport.size, shm->slots, shm->slot_bytes);
    if (segment->bytes < layout.total_bytes) {
        const unsigned long long bytes = segment->bytes;
        shoal_segment_put(segment);
        return shoal_log_fail(shm->endpoint->log, SHOAL_ERR_INTERNAL, "shm",
                              "rank %d sent a segment of %llu bytes, %zu are needed", shm->numbers[rank], bytes,
                              layout.total_bytes);
    }
    seat_at(&shm->seats[rank], segment, &layout);
    shm->needs_fence |= shoal_shm_peer_needs_fence(shm->endpoint, shm->peers[rank]);
    shm->incremented[rank] = &shm->seats[rank].counters[shm->transport.rank];
    return SHOAL_OK;
}

/* Returns OK when the peer has this rank's segment and this rank has the peer's. */
static enum shoal_status join_with(struct shm *shm, int rank)
{
    struct shoal_shm_peer *peer = shm->peers[rank];
    if (!shm->is_offered[rank])
        shm->is_offered[rank] = shoal_shm_endpoint_offer(peer, shm->comm, shm->seats[shm->transport.rank].segment);
    if (!shm->seats[rank].segment) {
        struct shoal_segment *segment;
        const enum shoal_status status = shoal_shm_endpoint_take(shm->endpoint, peer, shm->comm, &segment);
        if (status == SHOAL_OK)
            SHOAL_TRY(take_seat(shm, rank, segment));
        else if (status != SHOAL_PENDING)
            return status;
    }
    if (shm->is_offered[rank] && shm->seats[rank].segment)
        return SHOAL_OK;
    if (shoal_membership_process_has_ended(&peer->process))
        return shoal_log_fail(shm->endpoint->log, SHOAL_ERR_PEER_LOST, "shm",
                              "rank %d (process %d on %s) %s while a communicator was made", shm->numbers[rank], peer->name.pid,
                              peer->name.host, peer->process.ended);
    if (shoal_clock_ns() > shm->join_deadline_ns)
        return shoal_log_fail(shm->endpoint->log, SHOAL_ERR_TIMEOUT, "shm",
                              "rank %d (process %d on %s) did not come in time while a communicator was made",
                              shm->numbers[rank], peer->name.pid, peer->name.host);
    return SHOAL_PENDING;
}

enum shoal_status shoal_shm_join(struct shoal_transport *transport, int *socket_out)
{
    struct shm *shm = shm_of(transport);
    enum shoal_status joined = SHOAL_OK, failed = SHOAL_OK;
    for (int i = 1; i < transport->size; i++) {
        const int r = (transport->rank + i) % transport->size;
        const enum shoal_status status = join_with(shm, r);
        if (status == SHOAL_PENDING) {
            joined = SHOAL_PENDING;
            *socket_out = shm->peers[r]->socket;
        } else if (status != SHOAL_OK && failed == SHOAL_OK) {
            failed = status; /* the others still get this rank's segment: without it they would wait until their deadline */
        }
    }
    if (failed != SHOAL_OK)
        return failed;
    shm->incremented[transport->rank] = &shm->seats[transport->rank].counters[transport->rank];
    if (joined == SHOAL_OK) {
        shm->part.rank = shm->numbers[transport->rank];
        shm->part.board = &shm->seats[0].head->cause;
    }
    return joined;
}

struct shoal_cause_board *shoal_shm_cause_board(struct shoal_transport *transport)
{
    return shm_of(transport)->part.board;
}

void shoal_shm_wake(struct shoal_transport *transport)
{
    wake_all(shm_of(transport));
}

struct shoal_segment *shoal_shm_leave_segment(struct shoal_transport *transport, bool gives_back_pages)
{
    const struct shm *shm = shm_of(transport);
    const struct seat *own = &shm->seats[transport->rank];
    const uint64_t bytes = gives_back_pages ? shm->slots * shm->staging_stride : 0;
    shoal_segment_strip(own->segment, (uint64_t)(own->staging - own->segment->base), bytes);
    return shoal_segment_get(own->segment);
}

size_t shoal_shm_staging_stride(size_t slot_bytes)
{
    return shoal_shm_layout_stride(slot_bytes);
}
