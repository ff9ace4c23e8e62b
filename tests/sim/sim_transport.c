#include "sim/sim_transport.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim_queue.h"

#define NEVER UINT64_MAX /* when a lost event arrives */
#define MILLION 1000000U
#define OFFSET_BITS 40
#define PID_FIRST 1000

/* How a rank ended. */
enum fate { FATE_HERE, FATE_KILLED, FATE_FREED, FATE_FINALIZED };

/* A rank's view of a peer, and the arrival times of its messages to that peer. */
struct link {
    struct shoal_sim_event
        *letters[SHOAL_ANNOUNCEMENTS]; /* announcements not yet completed, at sequence % SHOAL_ANNOUNCEMENTS */
    uint64_t counters[SHOAL_DEPTH_MAX];
    uint64_t completed;
    uint64_t heard; /* sequence of the last arrival */
    enum fate fate;
    uint64_t cut_ns;                         /* messages of a killed peer arrive until then */
    uint64_t increment_due[SHOAL_DEPTH_MAX]; /* when the last increment sent arrives */
    uint64_t bytes_due;                      /* when all bytes put until now have arrived */
    uint64_t packet_due;                     /* of the last packet sent */
    struct shoal_sim_event *packets;         /* of the peer, not yet taken, oldest first */
    struct shoal_sim_event **packets_end;
    uint64_t pushed; /* bytes ever pushed to the peer */
    uint64_t taken;  /* how many of them the peer has reported as taken */
    uint64_t popped; /* bytes ever taken from the peer */
    uint64_t waits;  /* the last statement sent about whom the peer waits for */
    bool drop_next;
};

struct segment {
    unsigned char *memory; /* NULL: no longer shared. Its number is not used again. */
    size_t bytes;
};

struct rank {
    struct shoal_transport transport;
    struct shoal_sim *sim;
    struct link *links; /* links[peer], including this rank's own */
    uint64_t arrived;   /* sequence of the last arrival */
    uint64_t said_waits;
    bool failed; /* the first cause is visible here */
    bool stopped;
    enum fate fate;
    atomic_bool abort_asked;
    bool has_given; /* a cause, which stays: written before abort_asked is raised */
    struct shoal_failure given;
    struct shoal_sim_event *held; /* sent while stopped, oldest first */
    struct shoal_sim_event **held_end;
    unsigned char *staging;
    unsigned staging_slots;
    size_t slot_bytes;
    struct segment *segments;
    size_t segment_count;
};

/* Staging buffers exist as long as the sim: peers may still hold addresses in one that has been replaced, or whose rank has
 * left. */
struct region {
    struct region *next;
    unsigned char *memory;
};

struct shoal_sim {
    struct shoal_sim_options options;
    uint16_t *host;
    struct rank *ranks;
    uint64_t now_ns;
    uint64_t random;
    uint64_t hash;
    struct shoal_sim_queue queue;
    struct region *regions;
    bool failure_claimed;
    struct shoal_failure failure;
    atomic_bool abort_asked; /* a rank's flag is set */
    char breach[256];
};

/* ---- Chance and trace ---- */

/* The next number of a splitmix64 sequence, 0 to last. */
static uint64_t sim_draw(struct shoal_sim *sim, uint64_t last)
{
    uint64_t z = sim->random += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (z ^ (z >> 31)) % (last + 1);
}

static bool happens(struct shoal_sim *sim, unsigned per_million)
{
    return per_million > 0 && sim_draw(sim, MILLION - 1) < per_million;
}

static void sim_mix(struct shoal_sim *sim, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++)
        sim->hash = (sim->hash ^ byte[i]) * UINT64_C(0x100000001B3);
}

static void trace(struct shoal_sim *sim, const struct shoal_sim_event *event)
{
    struct shoal_announcement record = event->record;
    record.descriptor.posted = 0;
    const uint64_t words[] = {event->due,  (uint64_t)event->kind, (uint64_t)event->source, (uint64_t)event->dest,
                              event->slot, event->value,          event->offset,           event->bytes};
    sim_mix(sim, words, sizeof(words));
    sim_mix(sim, &record, sizeof(record));
    sim_mix(sim, event->data, event->bytes);
}

SHOAL_PRINTF(2, 3) static void note_breach(struct shoal_sim *sim, const char *format, ...)
{
    if (sim->breach[0])
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(sim->breach, sizeof(sim->breach), format, args);
    va_end(args);
}

/* ---- Sending ---- */

static void sim_push(struct shoal_sim *sim, struct shoal_sim_event *event)
{
    if (shoal_sim_queue_push(&sim->queue, event))
        return;
    note_breach(sim, "no memory for the queue: an event of rank %d is lost", event->source);
    free(event);
}

static struct rank *sim_rank_of(struct shoal_transport *transport)
{
    return (struct rank *)transport;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Returns when an event arrives, or NEVER if it is lost. An increment waits for the increments of its counter and for the
 * bytes put before it, and is lost if one of them is. No due time is further ahead than the longest delay, because those times
 * were drawn earlier. */
static uint64_t draw_due(struct shoal_sim *sim, const struct shoal_sim_event *event)
{
    struct link *link = &sim->ranks[event->source].links[event->dest];
    const uint64_t due = sim->now_ns + sim_draw(sim, sim->options.delay_ns_max);
    if (event->kind > SHOAL_SIM_BYTES)
        return due;
    const bool lost = happens(sim, sim->options.drop_per_million) || link->drop_next;
    link->drop_next = false;
    if (event->kind == SHOAL_SIM_BYTES)
        link->bytes_due = max_u64(link->bytes_due, lost ? NEVER : due);
    if (event->kind == SHOAL_SIM_PACKET)
        return link->packet_due = lost ? NEVER : max_u64(due, link->packet_due);
    if (event->kind != SHOAL_SIM_INCREMENT)
        return lost ? NEVER : due;
    uint64_t *increment_due = &link->increment_due[event->slot];
    *increment_due = lost ? NEVER : max_u64(due, max_u64(*increment_due, link->bytes_due));
    return *increment_due;
}

static void schedule(struct shoal_sim *sim, struct shoal_sim_event *event)
{
    event->due = draw_due(sim, event);
    if (event->due == NEVER)
        free(event);
    else
        sim_push(sim, event);
}

static void sim_post(struct shoal_sim *sim, struct shoal_sim_event *event)
{
    struct rank *source = &sim->ranks[event->source];
    if (source->fate == FATE_KILLED) {
        free(event);
    } else if (source->stopped) {
        *source->held_end = event;
        source->held_end = &event->next;
    } else {
        schedule(sim, event);
    }
}

/* data may be NULL: the caller fills it. Returns NULL if memory is lacking; then the event counts as lost, and the sim reports
 * it. */
static struct shoal_sim_event *event_create(struct rank *source, int dest, enum shoal_sim_event_kind kind, const void *data,
                                            size_t bytes)
{
    struct shoal_sim_event *event = calloc(1, sizeof(struct shoal_sim_event) + bytes);
    if (!event) {
        note_breach(source->sim, "no memory: an event of rank %d is lost", source->transport.rank);
        return NULL;
    }
    event->kind = kind;
    event->source = source->transport.rank;
    event->dest = dest;
    event->bytes = bytes;
    if (data)
        memcpy(event->data, data, bytes);
    return event;
}

static void post_to_others(struct rank *source, enum shoal_sim_event_kind kind, uint64_t value)
{
    for (int peer = 0; peer < source->transport.size; peer++) {
        struct shoal_sim_event *event = peer == source->transport.rank ? NULL : event_create(source, peer, kind, NULL, 0);
        if (!event)
            continue;
        event->value = value;
        sim_post(source->sim, event);
    }
}

/* Notifies all others how the rank ended, at least after all that it sent before, whatever its state. */
static void announce_end(struct rank *source, enum fate fate, uint64_t delay_ns)
{
    source->fate = fate;
    for (int peer = 0; peer < source->transport.size; peer++) {
        struct shoal_sim_event *event =
            peer == source->transport.rank ? NULL : event_create(source, peer, SHOAL_SIM_GONE, NULL, 0);
        if (!event)
            continue;
        event->value = (uint64_t)fate;
        event->due = source->sim->now_ns + delay_ns;
        sim_push(source->sim, event);
    }
}

/* ---- Memory ---- */

static bool reaches(const struct shoal_sim *sim, int rank, int peer)
{
    return !sim->host || sim->host[rank] == sim->host[peer];
}

static bool is_inside(size_t offset, size_t bytes, size_t length)
{
    return offset <= length && bytes <= length - offset;
}

/* Returns an address in a rank's staging slot, or NULL if the bytes are not inside it. */
static unsigned char *find_in_staging(const struct rank *owner, unsigned slot, size_t offset, size_t bytes)
{
    if (!owner->staging || slot >= owner->staging_slots || !is_inside(offset, bytes, owner->slot_bytes))
        return NULL;
    return owner->staging + slot * owner->slot_bytes + offset;
}

/* Returns the memory of a rank at a location, or NULL if the bytes are not inside it. */
static unsigned char *resolve(const struct rank *owner, shoal_location location, size_t bytes)
{
    const size_t number = (size_t)(location >> OFFSET_BITS);
    const size_t offset = (size_t)(location & (SHOAL_SIM_SEGMENT_BYTES_MAX - 1));
    if (number == 0 || number > owner->segment_count)
        return NULL;
    const struct segment *segment = &owner->segments[number - 1];
    return segment->memory && is_inside(offset, bytes, segment->bytes) ? segment->memory + offset : NULL;
}

static shoal_location op_locate(struct shoal_transport *transport, const void *address, size_t bytes)
{
    const struct rank *rank = sim_rank_of(transport);
    const uintptr_t first = (uintptr_t)address;
    for (size_t i = 0; i < rank->segment_count; i++) {
        const struct segment *segment = &rank->segments[i];
        const uintptr_t base = (uintptr_t)segment->memory;
        if (!segment->memory || first < base || first - base >= segment->bytes)
            continue;
        if (bytes > segment->bytes - (first - base))
            return 0;
        return (shoal_location)(i + 1) << OFFSET_BITS | (first - base);
    }
    return 0;
}

static void *op_reach(struct shoal_transport *transport, int peer, shoal_location location, size_t bytes,
                      enum shoal_status *error)
{
    const struct shoal_sim *sim = sim_rank_of(transport)->sim;
    if (!reaches(sim, transport->rank, peer)) {
        *error = SHOAL_ERR_UNSUPPORTED;
        return NULL;
    }
    void *memory = resolve(&sim->ranks[peer], location, bytes);
    if (!memory)
        *error = SHOAL_ERR_ARGUMENT;
    return memory;
}

static enum shoal_status op_reserve_staging(struct shoal_transport *transport, unsigned slots, size_t slot_bytes)
{
    struct rank *rank = sim_rank_of(transport);
    if (slots <= rank->staging_slots && slot_bytes <= rank->slot_bytes)
        return SHOAL_OK;
    if (slots > SHOAL_DEPTH_MAX || slot_bytes > SHOAL_SIM_SEGMENT_BYTES_MAX)
        return SHOAL_ERR_ARGUMENT;
    const unsigned all_slots = slots > rank->staging_slots ? slots : rank->staging_slots;
    const size_t each = shoal_round_up(shoal_max_size(slot_bytes, rank->slot_bytes), SHOAL_CACHE_LINE);
    struct region *region = malloc(sizeof(struct region));
    unsigned char *memory = aligned_alloc(SHOAL_PAGE, shoal_round_up(shoal_max_size(all_slots * each, 1), SHOAL_PAGE));
    if (!region || !memory) {
        free(region);
        free(memory);
        return SHOAL_ERR_MEMORY;
    }
    memset(memory, 0xFF, all_slots * each);
    *region = (struct region){rank->sim->regions, memory};
    rank->sim->regions = region;
    rank->staging = memory;
    rank->staging_slots = all_slots;
    rank->slot_bytes = each;
    return SHOAL_OK;
}

static void *op_staging(struct shoal_transport *transport, int peer, unsigned slot)
{
    const struct shoal_sim *sim = sim_rank_of(transport)->sim;
    return reaches(sim, transport->rank, peer) ? find_in_staging(&sim->ranks[peer], slot, 0, 0) : NULL;
}

/* ---- Arrivals ---- */

static void letter_free(struct link *link, size_t place)
{
    free(link->letters[place]);
    link->letters[place] = NULL;
}

static struct shoal_sim_event *letter_find(const struct link *link, uint64_t sequence)
{
    struct shoal_sim_event *letter = link->letters[sequence % SHOAL_ANNOUNCEMENTS];
    return letter && letter->record.descriptor.sequence == sequence ? letter : NULL;
}

static void letter_deliver(struct rank *dest, struct shoal_sim_event *letter)
{
    const uint64_t sequence = letter->record.descriptor.sequence;
    struct link *link = &dest->links[letter->source];
    link->heard = max_u64(link->heard, sequence);
    if (sequence <= dest->links[dest->transport.rank].completed) {
        free(letter);
        return;
    }
    letter_free(link, sequence % SHOAL_ANNOUNCEMENTS);
    link->letters[sequence % SHOAL_ANNOUNCEMENTS] = letter;
}

/* Remote ranks see only operations in which they are peers. */
static bool sees_arrival(const struct rank *rank, int peer, const uint8_t *peers)
{
    return !peers || peers[peer] || reaches(rank->sim, rank->transport.rank, peer);
}

/* Checks the guarantees of an announcement's sender. */
static void check_letter(struct rank *rank, int peer, uint64_t sequence, size_t bytes)
{
    const uint64_t kept = bytes > SHOAL_PAYLOAD_INLINE ? SHOAL_PAYLOADS : SHOAL_ANNOUNCEMENTS;
    if (rank->links[peer].completed + kept < sequence)
        note_breach(rank->sim, "rank %d arrives at operation %llu, but has seen rank %d complete only %llu",
                    rank->transport.rank, (unsigned long long)sequence, peer, (unsigned long long)rank->links[peer].completed);
}

static void check_announcement(struct rank *rank, uint64_t sequence, size_t bytes, const uint8_t *peers)
{
    if (sequence <= rank->arrived)
        note_breach(rank->sim, "rank %d arrives at operation %llu after %llu", rank->transport.rank,
                    (unsigned long long)sequence, (unsigned long long)rank->arrived);
    for (int peer = 0; peer < rank->transport.size; peer++)
        if (sees_arrival(rank, peer, peers))
            check_letter(rank, peer, sequence, bytes);
    rank->arrived = sequence;
}

static void send_letter(struct rank *rank, int peer, const struct shoal_announcement *record, const void *payload, size_t bytes)
{
    const bool beside = bytes > SHOAL_PAYLOAD_INLINE;
    struct shoal_sim_event *letter = event_create(rank, peer, SHOAL_SIM_ANNOUNCEMENT, payload, beside ? bytes : 0);
    if (!letter)
        return;
    letter->record = *record;
    if (!beside && bytes > 0)
        memcpy(letter->record.payload, payload, bytes);
    if (peer == rank->transport.rank)
        letter_deliver(rank, letter);
    else
        sim_post(rank->sim, letter);
}

static void op_announce_to(struct shoal_transport *transport, int peer, const struct shoal_announcement *record,
                           const void *payload, size_t bytes)
{
    struct rank *rank = sim_rank_of(transport);
    const uint64_t sequence = record->descriptor.sequence;
    if (bytes > SHOAL_PAYLOAD_MAX || reaches(rank->sim, transport->rank, peer) || sequence > rank->arrived) {
        note_breach(rank->sim, "rank %d arrives at operation %llu with %zu bytes for rank %d alone", transport->rank,
                    (unsigned long long)sequence, bytes, peer);
        return;
    }
    check_letter(rank, peer, sequence, bytes);
    send_letter(rank, peer, record, payload, bytes);
}

static void op_announce(struct shoal_transport *transport, const struct shoal_announcement *record, const void *payload,
                        size_t bytes, const uint8_t *peers)
{
    struct rank *rank = sim_rank_of(transport);
    if (bytes > SHOAL_PAYLOAD_MAX) {
        note_breach(rank->sim, "rank %d arrives with %zu bytes of payload", transport->rank, bytes);
        return;
    }
    check_announcement(rank, record->descriptor.sequence, bytes, peers);
    for (int peer = 0; peer < transport->size; peer++) {
        if (sees_arrival(rank, peer, peers))
            send_letter(rank, peer, record, payload, bytes);
    }
}

static const struct shoal_announcement *op_announcement(struct shoal_transport *transport, int peer, uint64_t sequence)
{
    const struct shoal_sim_event *letter = letter_find(&sim_rank_of(transport)->links[peer], sequence);
    return letter ? &letter->record : NULL;
}

static const void *op_payload(struct shoal_transport *transport, int peer, uint64_t sequence, size_t bytes)
{
    struct rank *rank = sim_rank_of(transport);
    const struct shoal_sim_event *letter = letter_find(&rank->links[peer], sequence);
    const size_t beside = bytes > SHOAL_PAYLOAD_INLINE ? bytes : 0;
    if (letter && letter->bytes == beside)
        return beside ? letter->data : letter->record.payload;
    note_breach(rank->sim, "rank %d asks for %zu bytes of rank %d's payload of operation %llu, which are not there",
                transport->rank, bytes, peer, (unsigned long long)sequence);
    return NULL;
}

static void op_complete(struct shoal_transport *transport, uint64_t sequence)
{
    struct rank *rank = sim_rank_of(transport);
    uint64_t *completed = &rank->links[transport->rank].completed;
    if (sequence < *completed)
        note_breach(rank->sim, "rank %d completes operation %llu after %llu", transport->rank, (unsigned long long)sequence,
                    (unsigned long long)*completed);
    *completed = max_u64(*completed, sequence);
    for (int peer = 0; peer < transport->size; peer++)
        for (size_t place = 0; place < SHOAL_ANNOUNCEMENTS; place++) {
            const struct shoal_sim_event *letter = rank->links[peer].letters[place];
            if (letter && letter->record.descriptor.sequence <= sequence)
                letter_free(&rank->links[peer], place);
        }
    post_to_others(rank, SHOAL_SIM_COMPLETE, sequence);
}

static uint64_t op_completed(struct shoal_transport *transport, int peer)
{
    return sim_rank_of(transport)->links[peer].completed;
}

/* ---- Counters and puts ---- */

static bool is_slot(struct rank *rank, unsigned slot)
{
    if (slot >= SHOAL_DEPTH_MAX)
        note_breach(rank->sim, "rank %d uses slot %u", rank->transport.rank, slot);
    return slot < SHOAL_DEPTH_MAX;
}

static void op_signal(struct shoal_transport *transport, int peer, unsigned slot)
{
    struct rank *rank = sim_rank_of(transport);
    struct shoal_sim_event *increment = is_slot(rank, slot) ? event_create(rank, peer, SHOAL_SIM_INCREMENT, NULL, 0) : NULL;
    if (!increment)
        return;
    increment->slot = slot;
    sim_post(rank->sim, increment);
}

static uint64_t op_counter(struct shoal_transport *transport, int peer, unsigned slot)
{
    struct rank *rank = sim_rank_of(transport);
    return is_slot(rank, slot) ? rank->links[peer].counters[slot] : 0;
}

static enum shoal_status op_put(struct shoal_transport *transport, int peer, unsigned slot, size_t offset, const void *source,
                                size_t bytes)
{
    struct rank *rank = sim_rank_of(transport);
    struct shoal_sim *sim = rank->sim;
    if (!is_slot(rank, slot))
        return SHOAL_ERR_ARGUMENT;
    if (!find_in_staging(&sim->ranks[peer], slot, offset, bytes)) {
        note_breach(sim, "rank %d puts %zu bytes to rank %d, slot %u, offset %zu: not inside its staging buffer",
                    transport->rank, bytes, peer, slot, offset);
        return SHOAL_ERR_ARGUMENT;
    }
    if (happens(sim, sim->options.busy_per_million))
        return SHOAL_PENDING;
    struct shoal_sim_event *event = event_create(rank, peer, SHOAL_SIM_BYTES, source, bytes);
    if (!event)
        return SHOAL_ERR_MEMORY;
    event->slot = slot;
    event->offset = offset;
    sim_post(sim, event);
    op_signal(transport, peer, slot);
    return SHOAL_OK;
}

/* ---- Packets ---- */

static enum shoal_status op_push(struct shoal_transport *transport, int peer, const struct shoal_packet *packet,
                                 const void *data)
{
    struct rank *rank = sim_rank_of(transport);
    struct link *link = &rank->links[peer];
    const size_t bytes = sizeof(*packet) + packet->bytes;
    if (packet->bytes > SHOAL_PACKET_BYTES_MAX) {
        note_breach(rank->sim, "rank %d pushes a packet of %u bytes", transport->rank, packet->bytes);
        return SHOAL_ERR_ARGUMENT;
    }
    if (link->pushed + bytes - link->taken > SHOAL_PACKET_QUEUE_BYTES)
        return SHOAL_PENDING;
    struct shoal_sim_event *event = event_create(rank, peer, SHOAL_SIM_PACKET, NULL, bytes);
    if (!event)
        return SHOAL_ERR_MEMORY;
    memcpy(event->data, packet, sizeof(*packet));
    if (packet->bytes > 0)
        memcpy(event->data + sizeof(*packet), data, packet->bytes);
    link->pushed += bytes;
    sim_post(rank->sim, event);
    return SHOAL_OK;
}

static const struct shoal_packet *op_peek(struct shoal_transport *transport, int peer)
{
    const struct shoal_sim_event *event = sim_rank_of(transport)->links[peer].packets;
    return event ? (const struct shoal_packet *)(const void *)event->data : NULL;
}

static void op_pop(struct shoal_transport *transport, int peer)
{
    struct rank *rank = sim_rank_of(transport);
    struct link *link = &rank->links[peer];
    struct shoal_sim_event *event = link->packets;
    if (!event) {
        note_breach(rank->sim, "rank %d pops a packet of rank %d, but there is none", transport->rank, peer);
        return;
    }
    link->popped += event->bytes;
    link->packets = event->next;
    if (!link->packets)
        link->packets_end = &link->packets;
    free(event);
    struct shoal_sim_event *room = event_create(rank, peer, SHOAL_SIM_ROOM, NULL, 0);
    if (!room)
        return;
    room->value = link->popped;
    sim_post(rank->sim, room);
}

static void packet_deliver(struct link *link, struct shoal_sim_event *event)
{
    event->next = NULL;
    *link->packets_end = event;
    link->packets_end = &event->next;
}

static void op_flush(struct shoal_transport *transport)
{
    (void)transport; /* nobody sleeps in virtual time */
}

/* ---- Failure ---- */

static void op_peer_name(struct shoal_transport *transport, int peer, struct shoal_transport_peer *name)
{
    const uint16_t *host = transport->host;
    snprintf(name->host, sizeof(name->host), "sim-%u", host ? (unsigned)host[peer] : 0);
    name->pid = PID_FIRST + peer;
}

/* Makes a failure that blames `rank`: "rank 2 (host sim-1, pid 1002) " and what it did. */
static struct shoal_failure sim_blame(struct shoal_transport *reporter, int rank, enum shoal_status status, uint64_t sequence,
                                      const char *deed)
{
    struct shoal_transport_peer name;
    op_peer_name(reporter, rank, &name);
    struct shoal_failure failure = {.struct_bytes = sizeof(failure),
                                    .status = status,
                                    .rank = rank,
                                    .reporter = reporter->rank,
                                    .pid = name.pid,
                                    .sequence = sequence,
                                    .step = -1};
    memcpy(failure.host, name.host, sizeof(failure.host));
    snprintf(failure.text, sizeof(failure.text), "rank %d (host %s, pid %d) %s", rank, name.host, name.pid, deed);
    return failure;
}

static void op_fail(struct shoal_transport *transport, const struct shoal_failure *failure)
{
    struct rank *rank = sim_rank_of(transport);
    if (rank->fate != FATE_HERE || rank->failed)
        return;
    rank->failed = true;
    if (rank->sim->failure_claimed)
        return;
    rank->sim->failure_claimed = true;
    rank->sim->failure = *failure;
    post_to_others(rank, SHOAL_SIM_FAILURE, (uint64_t)failure->status);
}

/* Performs the aborts requested since the last time, because abort itself may only set a flag. */
static void take_aborts(struct shoal_sim *sim)
{
    if (!atomic_load_explicit(&sim->abort_asked, memory_order_acquire) ||
        !atomic_exchange_explicit(&sim->abort_asked, false, memory_order_acq_rel))
        return;
    for (int i = 0; i < sim->options.size; i++) {
        struct rank *rank = &sim->ranks[i];
        if (!atomic_exchange_explicit(&rank->abort_asked, false, memory_order_acq_rel))
            continue;
        op_fail(&rank->transport, &rank->given);
    }
}

static bool op_failed(struct shoal_transport *transport, struct shoal_failure *failure)
{
    const struct rank *rank = sim_rank_of(transport);
    take_aborts(rank->sim);
    if (!rank->failed)
        return false;
    *failure = rank->sim->failure;
    return true;
}

/* The rank's flag is raised before the sim's, so that who takes the sim's finds it. One thread of a rank at a time. */
static void op_abort(struct shoal_transport *transport, const struct shoal_failure *cause)
{
    struct rank *rank = sim_rank_of(transport);
    if (rank->has_given)
        return;
    rank->has_given = true;
    rank->given = sim_blame(transport, transport->rank, SHOAL_ERR_ABORTED, 0, "aborted the communicator");
    if (cause)
        rank->given = *cause;
    rank->given.reporter = transport->rank;
    rank->given.is_given = 1;
    atomic_store_explicit(&rank->abort_asked, true, memory_order_release);
    atomic_store_explicit(&rank->sim->abort_asked, true, memory_order_release);
}

static const char *fate_text(enum fate fate)
{
    static const char *const texts[] = {"running", "was killed", "freed the communicator", "finalized the communicator"};
    return texts[fate];
}

static int op_lost(struct shoal_transport *transport, int first, uint64_t sequence, struct shoal_failure *failure)
{
    const struct rank *rank = sim_rank_of(transport);
    const uint64_t needed = max_u64(sequence, rank->sim->options.counter_start + 1);
    for (int peer = first; peer < transport->size; peer++) {
        const struct link *link = &rank->links[peer];
        if (link->fate == FATE_HERE || link->completed >= needed)
            continue;
        *failure = sim_blame(transport, peer, SHOAL_ERR_PEER_LOST, sequence, fate_text(link->fate));
        return peer;
    }
    return -1;
}

static void op_describe(struct shoal_transport *transport, int peer, char *text, size_t bytes)
{
    const struct rank *rank = sim_rank_of(transport);
    const enum fate fate = rank->links[peer].fate;
    const bool stopped = fate == FATE_HERE && rank->sim->ranks[peer].stopped;
    snprintf(text, bytes, "%s", stopped ? "stopped" : fate_text(fate));
}

static void op_say_waits_for(struct shoal_transport *transport, uint64_t sequence, int peer)
{
    struct rank *rank = sim_rank_of(transport);
    rank->said_waits++;
    for (int dest = 0; dest < transport->size; dest++) {
        const bool may_wait = peer < 0 || reaches(rank->sim, transport->rank, dest) || rank->links[dest].heard >= sequence ||
                              peer == (dest | SHOAL_WAIT_BLOCKED);
        struct shoal_sim_event *event =
            may_wait && dest != transport->rank ? event_create(rank, dest, SHOAL_SIM_WAITS, NULL, 0) : NULL;
        if (!event)
            continue;
        event->value = rank->said_waits << 32 | (uint32_t)(peer + 1);
        sim_post(rank->sim, event);
    }
}

static int op_waits_for(struct shoal_transport *transport, int peer)
{
    return (int)(sim_rank_of(transport)->links[peer].waits & UINT32_MAX) - 1;
}

static void op_memory(struct shoal_transport *transport, struct shoal_memory_usage *usage)
{
    const struct rank *rank = sim_rank_of(transport);
    usage->control_bytes += (size_t)transport->size * sizeof(struct link);
    usage->staging_bytes += rank->staging_slots * rank->slot_bytes;
}

static void events_free(struct shoal_sim_event *event)
{
    while (event) {
        struct shoal_sim_event *const next = event->next;
        free(event);
        event = next;
    }
}

/* Clears its table of operations, so that a use of the transport after destroy fails at once. */
static void rank_close(struct rank *rank)
{
    for (int peer = 0; rank->links && peer < rank->transport.size; peer++) {
        struct link *link = &rank->links[peer];
        for (size_t place = 0; place < SHOAL_ANNOUNCEMENTS; place++)
            letter_free(link, place);
        events_free(link->packets);
        link->packets = NULL;
        link->packets_end = &link->packets;
    }
    events_free(rank->held);
    rank->held = NULL;
    rank->held_end = &rank->held;
    rank->transport.ops = NULL;
}

static void op_destroy(struct shoal_transport *transport, bool finalized)
{
    struct rank *rank = sim_rank_of(transport);
    take_aborts(rank->sim);
    shoal_sim_cont(rank->sim, transport->rank);
    if (rank->fate == FATE_HERE)
        announce_end(rank, finalized ? FATE_FINALIZED : FATE_FREED, rank->sim->options.delay_ns_max);
    rank_close(rank);
}

static const struct shoal_transport_ops sim_ops = {
    .name = "sim",
    .announce = op_announce,
    .announce_to = op_announce_to,
    .announcement = op_announcement,
    .payload = op_payload,
    .complete = op_complete,
    .completed = op_completed,
    .locate = op_locate,
    .reach = op_reach,
    .reserve_staging = op_reserve_staging,
    .staging = op_staging,
    .put = op_put,
    .signal = op_signal,
    .counter = op_counter,
    .push = op_push,
    .peek = op_peek,
    .pop = op_pop,
    .flush = op_flush,
    .lost = op_lost,
    .describe = op_describe,
    .say_waits_for = op_say_waits_for,
    .waits_for = op_waits_for,
    .fail = op_fail,
    .failed = op_failed,
    .abort = op_abort,
    .peer_name = op_peer_name,
    .memory = op_memory,
    .destroy = op_destroy,
};

/* ---- Time ---- */

static void put_bytes(struct rank *dest, const struct shoal_sim_event *event)
{
    unsigned char *target = find_in_staging(dest, event->slot, event->offset, event->bytes);
    if (target && event->bytes > 0)
        memcpy(target, event->data, event->bytes);
}

/* Takes ownership of the event. */
static void sim_deliver(struct shoal_sim *sim, struct shoal_sim_event *event)
{
    struct rank *dest = &sim->ranks[event->dest];
    struct link *link = &dest->links[event->source];
    const bool cut = event->kind <= SHOAL_SIM_BYTES && event->due > link->cut_ns;
    if (cut || !dest->transport.ops) {
        free(event);
        return;
    }
    trace(sim, event);
    if (event->kind == SHOAL_SIM_ANNOUNCEMENT) {
        letter_deliver(dest, event);
        return;
    }
    if (event->kind == SHOAL_SIM_PACKET) {
        packet_deliver(link, event);
        return;
    }
    if (event->kind == SHOAL_SIM_COMPLETE)
        link->completed = max_u64(link->completed, event->value);
    else if (event->kind == SHOAL_SIM_ROOM)
        link->taken = max_u64(link->taken, event->value);
    else if (event->kind == SHOAL_SIM_INCREMENT)
        link->counters[event->slot]++;
    else if (event->kind == SHOAL_SIM_BYTES)
        put_bytes(dest, event);
    else if (event->kind == SHOAL_SIM_WAITS)
        link->waits = max_u64(link->waits, event->value);
    else if (event->kind == SHOAL_SIM_FAILURE)
        dest->failed = true;
    else
        link->fate = (enum fate)event->value;
    free(event);
}

uint64_t shoal_sim_now_ns(const struct shoal_sim *sim)
{
    return sim->now_ns;
}

bool shoal_sim_advance(struct shoal_sim *sim)
{
    take_aborts(sim);
    if (sim->queue.count == 0)
        return false;
    struct shoal_sim_event *event = shoal_sim_queue_pop(&sim->queue);
    sim->now_ns = max_u64(sim->now_ns, event->due);
    sim_deliver(sim, event);
    return true;
}

void shoal_sim_advance_to(struct shoal_sim *sim, uint64_t ns)
{
    take_aborts(sim);
    while (sim->queue.count > 0 && sim->queue.heap[0]->due <= ns)
        shoal_sim_advance(sim);
    sim->now_ns = max_u64(sim->now_ns, ns);
}

/* ---- The owner's side ---- */

static bool are_valid(const struct shoal_sim_options *options)
{
    return options->size >= 1 && options->size <= SHOAL_SIM_RANKS_MAX && options->delay_ns_max <= SHOAL_SIM_DELAY_NS_MAX &&
           options->detect_ns <= SHOAL_SIM_DELAY_NS_MAX && options->drop_per_million <= MILLION &&
           options->busy_per_million < MILLION;
}

static enum shoal_status rank_init(struct shoal_sim *sim, int number)
{
    struct rank *rank = &sim->ranks[number];
    const int size = sim->options.size;
    rank->transport = (struct shoal_transport){&sim_ops, number, size, sim->host, false};
    rank->sim = sim;
    rank->held_end = &rank->held;
    rank->arrived = sim->options.counter_start;
    rank->links = calloc((size_t)size, sizeof(struct link));
    if (!rank->links)
        return SHOAL_ERR_MEMORY;
    for (int peer = 0; peer < size; peer++) {
        struct link *link = &rank->links[peer];
        link->cut_ns = NEVER;
        link->packets_end = &link->packets;
        link->completed = sim->options.counter_start;
        for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++)
            link->counters[slot] = sim->options.counter_start;
    }
    return SHOAL_OK;
}

static enum shoal_status sim_init(struct shoal_sim *sim, const struct shoal_sim_options *options)
{
    const size_t size = (size_t)options->size;
    sim->options = *options;
    sim->random = options->seed;
    sim->hash = UINT64_C(0xCBF29CE484222325);
    sim->ranks = calloc(size, sizeof(struct rank));
    sim->host = options->host ? malloc(size * sizeof(uint16_t)) : NULL;
    if (!sim->ranks || (options->host && !sim->host))
        return SHOAL_ERR_MEMORY;
    if (options->host)
        memcpy(sim->host, options->host, size * sizeof(uint16_t));
    for (int rank = 0; rank < options->size; rank++)
        SHOAL_TRY(rank_init(sim, rank));
    return SHOAL_OK;
}

enum shoal_status shoal_sim_create(const struct shoal_sim_options *options, struct shoal_sim **sim_out)
{
    if (!are_valid(options))
        return SHOAL_ERR_ARGUMENT;
    struct shoal_sim *sim = calloc(1, sizeof(struct shoal_sim));
    if (!sim)
        return SHOAL_ERR_MEMORY;
    const enum shoal_status status = sim_init(sim, options);
    if (status != SHOAL_OK) {
        shoal_sim_destroy(sim);
        return status;
    }
    *sim_out = sim;
    return SHOAL_OK;
}

void shoal_sim_destroy(struct shoal_sim *sim)
{
    if (!sim)
        return;
    for (int i = 0; sim->ranks && i < sim->options.size; i++) {
        rank_close(&sim->ranks[i]);
        free(sim->ranks[i].links);
        free(sim->ranks[i].segments);
    }
    shoal_sim_queue_fini(&sim->queue);
    while (sim->regions) {
        struct region *const region = sim->regions;
        sim->regions = region->next;
        free(region->memory);
        free(region);
    }
    free(sim->ranks);
    free(sim->host);
    free(sim);
}

struct shoal_transport *shoal_sim_transport(struct shoal_sim *sim, int rank)
{
    struct shoal_transport *transport = &sim->ranks[rank].transport;
    return transport->ops ? transport : NULL;
}

void shoal_sim_kill(struct shoal_sim *sim, int rank)
{
    struct rank *victim = &sim->ranks[rank];
    if (victim->fate != FATE_HERE)
        return;
    for (int peer = 0; peer < sim->options.size; peer++)
        sim->ranks[peer].links[rank].cut_ns = sim->now_ns + sim_draw(sim, sim->options.delay_ns_max);
    announce_end(victim, FATE_KILLED, max_u64(sim->options.detect_ns, sim->options.delay_ns_max));
}

void shoal_sim_stop(struct shoal_sim *sim, int rank)
{
    sim->ranks[rank].stopped = true;
}

void shoal_sim_cont(struct shoal_sim *sim, int rank)
{
    struct rank *stopped = &sim->ranks[rank];
    struct shoal_sim_event *event = stopped->held;
    stopped->stopped = false;
    stopped->held = NULL;
    stopped->held_end = &stopped->held;
    while (event) {
        struct shoal_sim_event *const next = event->next;
        event->next = NULL;
        sim_post(sim, event);
        event = next;
    }
}

void shoal_sim_drop_next(struct shoal_sim *sim, int source, int dest)
{
    sim->ranks[source].links[dest].drop_next = true;
}

enum shoal_status shoal_sim_share(struct shoal_sim *sim, int rank, void *memory, size_t bytes)
{
    struct rank *owner = &sim->ranks[rank];
    if (!memory || bytes == 0 || bytes > SHOAL_SIM_SEGMENT_BYTES_MAX || owner->segment_count == SHOAL_SIM_SEGMENTS_MAX)
        return SHOAL_ERR_ARGUMENT;
    struct segment *segments = realloc(owner->segments, (owner->segment_count + 1) * sizeof(struct segment));
    if (!segments)
        return SHOAL_ERR_MEMORY;
    segments[owner->segment_count++] = (struct segment){memory, bytes};
    owner->segments = segments;
    return SHOAL_OK;
}

void shoal_sim_unshare(struct shoal_sim *sim, int rank, const void *memory)
{
    struct rank *owner = &sim->ranks[rank];
    for (size_t i = 0; i < owner->segment_count; i++)
        if (owner->segments[i].memory == memory)
            owner->segments[i].memory = NULL;
}

uint64_t shoal_sim_trace_hash(const struct shoal_sim *sim)
{
    return sim->hash;
}

const char *shoal_sim_breach(const struct shoal_sim *sim)
{
    return sim->breach[0] ? sim->breach : NULL;
}
