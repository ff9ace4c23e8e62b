#include "transport/hosts/hosts.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

/* At most INCREMENTS_UNDER_WAY increments of a counter may be under way when another is posted, because an immediate
 * distinguishes only INCREMENTS of them. An increment that has completed locally arrives before later ones; one that has not
 * may be overtaken. */
#define INCREMENTS (1u << SHOAL_NETWORK_INCREMENT_BITS)
#define INCREMENTS_UNDER_WAY (INCREMENTS / 2)
/* Lanes overtake each other, so an increment that has completed locally may arrive after later ones. If both ranks have lanes,
 * the peer therefore reports which increments have arrived, after ARRIVED_EVERY of a counter, and at most INCREMENTS may be
 * posted beyond the last one that it has reported. */
#define ARRIVED_EVERY (INCREMENTS / 4)
/* Acknowledge at least every ACKNOWLEDGE_EVERY operations, so that a peer never stalls waiting for an acknowledgement. */
#define ACKNOWLEDGE_EVERY (SHOAL_PAYLOADS / 2)

/* Acknowledge at least every ACKNOWLEDGE_TAKEN bytes of packets that the engine took from a queue. */
#define ACKNOWLEDGE_TAKEN (SHOAL_PACKET_QUEUE_BYTES / 4)
/* A queue holds at most PACKETS_MAX packets, if they have no data. */
#define PACKETS_MAX (SHOAL_PACKET_QUEUE_BYTES / sizeof(struct shoal_packet))
/* A put that cannot be a write is sent in messages of at most this many bytes. */
#define MESSAGE_BYTES ((size_t)16 << 10)
/* Blames the network only after this time, because the control tree soon learns a more exact reason why a peer does not
 * answer. */
#define BLAME_NETWORK_NS (2 * SHOAL_NS_PER_S)

/* Two counters of a slot: the remote rank's, which this rank increments, and this rank's, which the remote rank increments.
 * Increments are numbered from 1 on. */
struct counter {
    uint64_t incremented;       /* the remote rank's: number of the last increment that was posted */
    uint64_t completed_locally; /* all increments up to this number have completed locally */
    uint64_t arrived;           /* the peer has reported that it has received all increments up to this number */
    uint64_t received;          /* this rank's: all increments up to this number were received */
    uint64_t reported;          /* this rank has reported to the peer that it has received all increments up to this number */
    uint64_t ahead;             /* bit i: increment received + 1 + i was also received */
    unsigned owed;              /* held-back signals to the remote rank; counted as under way */
};

/* How many messages of a put were received; [number of the put's increment]. */
struct messages {
    uint32_t received[INCREMENTS];
};

struct packet {
    struct packet *next;
    uint64_t number;
    struct shoal_packet head; /* followed by its data */
    char data[];
};

/* The data received with an announcement; the buffer is as large as the largest so far. */
struct payload {
    char *at;
    size_t bytes;
};

struct remote {
    struct shoal_network_peer *peer;          /* NULL for a rank of this host */
    struct shoal_announcement *announcements; /* [SHOAL_ANNOUNCEMENTS] received; NULL until the first */
    struct payload payloads[SHOAL_PAYLOADS];
    uint64_t completed;     /* the peer has acknowledged all operations up to it */
    uint64_t acknowledged;  /* this rank has acknowledged all operations up to it to the peer */
    uint64_t sent_bytes;    /* to the peer, over the network */
    uint64_t last_sent;     /* highest sequence of an announcement sent to the peer */
    uint64_t last_received; /* highest sequence of an announcement that the peer has sent */
    uint64_t waits;         /* number of the last WAITS message that the peer has sent */
    int sent_waits;         /* 1 + the rank that this rank waits for, as last sent to the peer; 0 if none */
    bool is_unacknowledged; /* listed in hosts->unacknowledged */
    struct remote *next_unacknowledged;
    bool has_staging;
    struct shoal_fabric_memory staging; /* the peer's staging buffer */
    uint32_t increments;                /* immediate of increment 0 of the peer's counters */
    uint32_t counters_given;            /* immediate of increment 0 of this rank's counters, for the peer; 0 if not given yet */
    struct shoal_network_lanes *lanes;  /* the peer's; NULL if it or this rank has none, or they are not known yet */
    bool has_offered_lanes;             /* this rank has sent its own */
    struct counter *counters;           /* [slots] */
    struct shoal_network_load *loads;   /* [slots] of writes; [slots] of messages that increment; then of other messages */
    unsigned *under_way;                /* [slots] increments under way; then other messages */
    struct messages *messages;          /* [slots], allocated when the first message of a put is received */
    uint64_t pushed, pushed_bytes, taken_bytes;        /* packets sent to the peer, and bytes of them that it has taken */
    uint64_t popped, popped_bytes, acknowledged_bytes; /* packets that the engine took, and bytes of them acknowledged */
    size_t held_bytes;                                 /* of packets received and not yet taken */
    struct packet *packets;                            /* the received packets, by number */
    atomic_bool has_freed;                             /* the control tree has reported that the peer freed the communicator */
    _Atomic uint64_t freed_completed;                  /* at that time all operations up to this one were completed */
};

struct hosts {
    struct shoal_transport transport;
    struct shoal_log *log;
    struct shoal_network *network;
    struct shoal_membership *membership;
    struct shoal_network_channel channel;
    struct shoal_membership_comm membership_comm; /* the communicator, as the membership knows it */
    uint64_t sent_bytes, sent_messages;           /* over the network */
    bool is_joined;                /* this rank has mapped the lowest local rank's segment, which holds the failure */
    struct shoal_transport *local; /* shared memory, among the ranks of this host */
    struct shoal_member *members;  /* [size] */
    int *local_of;                 /* [size] number on this host, -1 for a remote rank */
    int *rank_of;                  /* [local->size] */
    uint16_t *host;                /* [size] numbered from 0, in the order of lowest ranks */
    int *world_ranks;              /* [size] */
    struct remote *remotes;        /* [size] */
    struct counter *counters;      /* [size * slots] */
    unsigned slots;
    size_t slot_bytes;
    uint64_t completed;
    struct remote *unacknowledged; /* peers whose announcements are newer than the last acknowledgement to them */
    uint64_t said_waits;           /* number of WAITS messages that this rank has sent */
    bool has_staging;
    struct shoal_fabric_memory staging;
    struct shoal_network_lane_memory lane_staging;
    bool offers_lanes;       /* `lane_staging` is registered, so peers may use this rank's lanes */
    bool is_limited;         /* lanes make no puts now */
    bool has_dropped;        /* the communicator broke: lanes have dropped the puts that they had not begun, and get none */
    unsigned *under_way;     /* [slots] increments under way to all ranks; then all other messages */
    unsigned owed;           /* signals held back, to all ranks */
    unsigned char *loads;    /* holds all loads and their counts */
    enum shoal_status error; /* an error, on any thread, that could not be returned at once */
    char error_text[SHOAL_LOG_TEXT_MAX];
};

static struct hosts *hosts_of(struct shoal_transport *transport)
{
    return (struct hosts *)transport;
}

static struct remote *remote_of(struct hosts *hosts, int rank)
{
    SHOAL_ASSERT(rank >= 0 && rank < hosts->transport.size);
    return &hosts->remotes[rank];
}

static bool is_local(const struct hosts *hosts, int rank)
{
    SHOAL_ASSERT(rank >= 0 && rank < hosts->transport.size);
    return hosts->local_of[rank] >= 0;
}

/* ---- Sending ------------------------------------------------------------------------------------------------------------- */

static void note_sent(struct hosts *hosts, int peer, size_t bytes)
{
    remote_of(hosts, peer)->sent_bytes += bytes;
    hosts->sent_bytes += bytes;
    hosts->sent_messages++;
}

/* Every message carries the acknowledgements for the peer, so few messages are sent only to acknowledge. */
static enum shoal_status send_message(struct hosts *hosts, int peer, struct shoal_network_head head, const struct iovec *body,
                                      size_t body_count)
{
    struct remote *remote = remote_of(hosts, peer);
    head.comm = hosts->channel.comm;
    head.source = (uint32_t)hosts->transport.rank;
    head.completed = remote->acknowledged = hosts->completed;
    head.taken = remote->acknowledged_bytes = remote->popped_bytes;
    const bool is_increment = head.kind == SHOAL_NETWORK_INCREMENT || head.kind == SHOAL_NETWORK_DATA;
    SHOAL_ASSERT(!is_local(hosts, peer) && head.kind < SHOAL_NETWORK_KIND_END && (!is_increment || head.slot < hosts->slots));
    struct shoal_network_load *load = &remote->loads[is_increment ? hosts->slots + head.slot : 2 * hosts->slots];
    size_t bytes = sizeof head;
    for (size_t i = 0; i < body_count; i++)
        bytes += body[i].iov_len;
    note_sent(hosts, peer, bytes);
    return shoal_network_send(hosts->network, load, &head, body, body_count);
}

/* Keeps an error of a call that cannot fail; the next call that can fail returns it. */
static void hosts_note(struct hosts *hosts, enum shoal_status status)
{
    if (status == SHOAL_OK || hosts->error != SHOAL_OK)
        return;
    hosts->error = status;
    (void)shoal_log_last_error(hosts->log, hosts->error_text, sizeof hosts->error_text);
}

/* ---- Announcements ------------------------------------------------------------------------------------------------------- */

/* A peer that may put into this rank's staging buffer needs to know its lanes, once. */
static void offer_lanes(struct hosts *hosts, int peer)
{
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct remote *remote = remote_of(hosts, peer);
    shoal_network_expect_lanes(hosts->network);
    if (remote->has_offered_lanes)
        return;
    const int count = shoal_network_offer_lanes(hosts->network, &hosts->channel, peer, &hosts->lane_staging, offers);
    const struct iovec body = {offers, (size_t)count * sizeof offers[0]};
    remote->has_offered_lanes = true;
    hosts_note(hosts, send_message(hosts, peer, (struct shoal_network_head){.kind = SHOAL_NETWORK_LANES}, &body, 1));
}

static void send_announcement(struct hosts *hosts, int peer, const struct shoal_announcement *announcement, const void *payload,
                              size_t bytes)
{
    struct remote *remote = remote_of(hosts, peer);
    struct shoal_network_announcement message = {.descriptor = announcement->descriptor, .bytes = (uint16_t)bytes};
    SHOAL_ASSERT(bytes <= SHOAL_PAYLOAD_MAX && announcement->descriptor.sequence != 0);
    if (hosts->has_staging) {
        if (!remote->counters_given)
            remote->counters_given = shoal_network_give_counters(hosts->network, &hosts->channel, peer);
        message.has_staging = remote->counters_given != 0;
        message.staging_base = hosts->staging.base;
        message.staging_key = hosts->staging.key;
        message.counters = remote->counters_given;
        if (SHOAL_UNLIKELY(hosts->offers_lanes))
            offer_lanes(hosts, peer);
    }
    const struct iovec body[] = {{&message, sizeof message}, {(void *)(uintptr_t)payload, bytes}};
    if (announcement->descriptor.sequence > remote->last_sent) /* operations in rounds send theirs after later ones */
        remote->last_sent = announcement->descriptor.sequence;
    hosts_note(hosts, send_message(hosts, peer, (struct shoal_network_head){.kind = SHOAL_NETWORK_ANNOUNCE}, body, 2));
}

/* Begins with the next rank, so that not all ranks send to the same one first. */
static void hosts_announce(struct shoal_transport *transport, const struct shoal_announcement *announcement,
                           const void *payload, size_t bytes, const uint8_t *peers)
{
    struct hosts *hosts = hosts_of(transport);
    for (int i = 1; i < transport->size && peers != shoal_no_ranks; i++) {
        const int peer = (transport->rank + i) % transport->size;
        if (!is_local(hosts, peer) && (!peers || peers[peer]))
            send_announcement(hosts, peer, announcement, payload, bytes);
    }
    hosts->local->ops->announce(hosts->local, announcement, payload, bytes, NULL);
}

static void announce_to(struct shoal_transport *transport, int peer, const struct shoal_announcement *announcement,
                        const void *payload, size_t bytes)
{
    send_announcement(hosts_of(transport), peer, announcement, payload, bytes);
}

static const struct shoal_announcement *hosts_announcement(struct shoal_transport *transport, int peer, uint64_t sequence)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->announcement(hosts->local, hosts->local_of[peer], sequence);
    const struct shoal_announcement *all = remote_of(hosts, peer)->announcements;
    const struct shoal_announcement *announcement = all ? &all[sequence % SHOAL_ANNOUNCEMENTS] : NULL;
    return announcement && announcement->descriptor.sequence == sequence ? announcement : NULL;
}

static void hosts_expect(struct shoal_transport *transport, int peer, uint64_t sequence, size_t bytes)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        hosts->local->ops->expect(hosts->local, hosts->local_of[peer], sequence, bytes);
}

/* Replaces a payload that a peer failed to send, against the protocol. */
static const unsigned char nothing[SHOAL_PAYLOAD_MAX];

static const void *hosts_payload_of(struct shoal_transport *transport, int peer, uint64_t sequence, size_t bytes)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->payload(hosts->local, hosts->local_of[peer], sequence, bytes);
    const struct remote *remote = remote_of(hosts, peer);
    SHOAL_ASSERT(bytes <= SHOAL_PAYLOAD_MAX && remote->announcements); /* its announcement has come */
    if (bytes <= SHOAL_PAYLOAD_INLINE)
        return remote->announcements[sequence % SHOAL_ANNOUNCEMENTS].payload;
    const struct payload *payload = &remote->payloads[sequence % SHOAL_PAYLOADS];
    if (payload->bytes < bytes) {
        hosts_note(hosts, shoal_log_fail(hosts->log, SHOAL_ERR_INTERNAL, "hosts",
                                         "rank %d sent operation %llu without its payload of %zu bytes", peer,
                                         (unsigned long long)sequence, bytes));
        return nothing;
    }
    return payload->at;
}

static void acknowledge_if_due(struct hosts *hosts, int peer)
{
    const struct remote *remote = remote_of(hosts, peer);
    SHOAL_ASSERT(remote->acknowledged <= hosts->completed);
    if (remote->last_received > remote->acknowledged && hosts->completed - remote->acknowledged >= ACKNOWLEDGE_EVERY)
        hosts_note(hosts, send_message(hosts, peer, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED}, NULL, 0));
}

static void list_if_unacknowledged(struct hosts *hosts, struct remote *remote)
{
    if (remote->is_unacknowledged || remote->last_received <= remote->acknowledged)
        return;
    remote->is_unacknowledged = true;
    remote->next_unacknowledged = hosts->unacknowledged;
    hosts->unacknowledged = remote;
}

static void hosts_complete(struct shoal_transport *transport, uint64_t sequence)
{
    struct hosts *hosts = hosts_of(transport);
    struct remote *next = hosts->unacknowledged;
    SHOAL_ASSERT(hosts->completed <= sequence);
    hosts->completed = sequence;
    hosts->local->ops->complete(hosts->local, sequence);
    hosts->unacknowledged = NULL;
    while (next) {
        struct remote *remote = next;
        next = remote->next_unacknowledged;
        remote->is_unacknowledged = false;
        acknowledge_if_due(hosts, (int)(remote - hosts->remotes));
        list_if_unacknowledged(hosts, remote);
    }
}

static uint64_t hosts_completed(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->completed(hosts->local, hosts->local_of[peer]);
    const struct remote *remote = remote_of(hosts, peer);
    /* A peer that has used everything it was sent needs no further acknowledgement. */
    return remote->completed >= remote->last_sent ? hosts->completed : remote->completed;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static shoal_location hosts_locate(struct shoal_transport *transport, const void *address, size_t bytes)
{
    struct hosts *hosts = hosts_of(transport);
    return hosts->local->ops->locate(hosts->local, address, bytes);
}

static void *hosts_reach(struct shoal_transport *transport, int peer, shoal_location location, size_t bytes,
                         enum shoal_status *error)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->reach(hosts->local, hosts->local_of[peer], location, bytes, error);
    *error = shoal_log_fail(hosts->log, SHOAL_ERR_INTERNAL, "hosts", "rank %d's memory is on another host", peer);
    return NULL;
}

static size_t staging_stride(const struct hosts *hosts)
{
    return shoal_shm_staging_stride(hosts->slot_bytes);
}

/* Several adapters lock the staging buffer several times. If the system refuses that, the first endpoint alone is used. */
static void register_with_lanes(struct hosts *hosts, void *staging, size_t bytes)
{
    const int lanes = shoal_network_lane_count(hosts->network);
    if (!lanes)
        return;
    hosts->offers_lanes =
        shoal_network_register_lanes(hosts->network, staging, bytes, &hosts->lane_staging) == SHOAL_OK;
    if (!hosts->offers_lanes)
        shoal_log_line(hosts->log, SHOAL_LOG_WARN, "hosts",
                       "%zu bytes of staging memory could not be registered %d times (see above), so data of this communicator "
                       "use one endpoint of this rank; raise the limit of locked memory (ulimit -l), or set SHOAL_ADAPTERS=1",
                       bytes, 1 + lanes);
}

static enum shoal_status hosts_reserve_staging(struct shoal_transport *transport, unsigned slots, size_t slot_bytes)
{
    struct hosts *hosts = hosts_of(transport);
    if (hosts->has_staging)
        return SHOAL_OK;
    SHOAL_TRY(hosts->local->ops->reserve_staging(hosts->local, slots, slot_bytes));
    void *const staging = hosts->local->ops->staging(hosts->local, hosts->local->rank, 0);
    const size_t bytes = hosts->slots * staging_stride(hosts);
    SHOAL_TRY(shoal_network_register(hosts->network, staging, bytes, &hosts->staging));
    hosts->has_staging = true;
    register_with_lanes(hosts, staging, bytes);
    return SHOAL_OK;
}

static void *hosts_staging(struct shoal_transport *transport, int rank, unsigned slot)
{
    struct hosts *hosts = hosts_of(transport);
    return is_local(hosts, rank) ? hosts->local->ops->staging(hosts->local, hosts->local_of[rank], slot) : NULL;
}

/* ---- Counters and puts --------------------------------------------------------------------------------------------------- */

static bool has_space(const struct hosts *hosts, unsigned slot, uint64_t offset, size_t bytes)
{
    return slot < hosts->slots && offset <= hosts->slot_bytes && bytes <= hosts->slot_bytes - offset;
}

static bool is_in_staging(const struct hosts *hosts, const void *source, size_t bytes)
{
    if (!hosts->has_staging)
        return false;
    const uintptr_t first = (uintptr_t)hosts->local->ops->staging(hosts->local, hosts->local->rank, 0);
    const size_t length = hosts->slots * staging_stride(hosts);
    const uintptr_t at = (uintptr_t)source - first;
    return at <= length && bytes <= length - at;
}

static void put_segment(void *segment)
{
    shoal_segment_put(segment);
}

/* The source of a put: its memory, its registration, and the counter of writes from there. */
struct origin {
    const void *at;
    size_t bytes;
    const struct shoal_fabric_memory *memory;            /* NULL if not registered */
    const struct shoal_network_lane_memory *lane_memory; /* likewise with lanes */
    unsigned *under_way;
};

static struct origin find_origin(struct hosts *hosts, const void *source, size_t bytes)
{
    struct origin origin = {.at = source, .bytes = bytes, .memory = &hosts->staging, .lane_memory = &hosts->lane_staging};
    if (is_in_staging(hosts, source, bytes))
        return origin;
    struct shoal_fabric_exported *exported = shoal_network_find_export(hosts->network, source, bytes);
    struct shoal_fabric_source *known = exported ? NULL : shoal_network_find_source(hosts->network, source, bytes);
    const bool is_known = known && known->memory.region;
    origin.memory = exported ? &exported->memory : is_known ? &known->memory : NULL;
    origin.lane_memory = is_known ? &known->lane_memory : NULL;
    origin.under_way = exported ? &exported->under_way : is_known ? &known->under_way : NULL;
    return origin;
}

/* Otherwise the peer could confuse an increment under way with a later one. */
static bool may_increment(struct remote *remote, unsigned slot)
{
    struct counter *counter = &remote->counters[slot];
    SHOAL_ASSERT(remote->under_way[slot] >= counter->owed && counter->completed_locally <= counter->incremented);
    if (SHOAL_UNLIKELY(remote->lanes && remote->has_offered_lanes))
        return counter->incremented - counter->arrived < INCREMENTS;
    if (remote->under_way[slot] == counter->owed)
        counter->completed_locally = counter->incremented;
    return counter->incremented - counter->completed_locally < INCREMENTS_UNDER_WAY;
}

static enum shoal_status write_to(struct hosts *hosts, int peer, unsigned slot, size_t offset, const struct origin *origin)
{
    struct remote *remote = remote_of(hosts, peer);
    struct counter *counter = &remote->counters[slot];
    const uint32_t increment = (uint32_t)(counter->incremented + 1) % INCREMENTS;
    const bool may_use_lanes = remote->has_offered_lanes && !hosts->is_limited && !hosts->has_dropped;
    const struct shoal_network_write write = {.load = &remote->loads[slot],
                                              .to = &remote->staging,
                                              .offset = slot * staging_stride(hosts) + offset,
                                              .source = origin->at,
                                              .source_memory = origin->memory,
                                              .lane_memory = origin->lane_memory,
                                              .under_way = origin->under_way,
                                              .bytes = origin->bytes,
                                              .lanes = may_use_lanes ? remote->lanes : NULL,
                                              .immediate = remote->increments | (uint32_t)slot << SHOAL_NETWORK_INCREMENT_BITS |
                                                           increment};
    SHOAL_ASSERT(may_increment(remote, slot)); /* the immediate's few bits distinguish them */
    SHOAL_TRY(shoal_network_put(hosts->network, &write));
    note_sent(hosts, peer, origin->bytes);
    counter->incremented++;
    return SHOAL_OK;
}

static enum shoal_status send_messages(struct hosts *hosts, int peer, unsigned slot, size_t offset, const struct origin *origin)
{
    struct shoal_network_put_head put = {offset, (origin->bytes + MESSAGE_BYTES - 1) / MESSAGE_BYTES};
    if (shoal_network_is_full(remote_of(hosts, peer)->peer))
        return SHOAL_PENDING;
    put.messages = put.messages ? put.messages : 1;
    const struct shoal_network_head head = {
        .kind = SHOAL_NETWORK_DATA, .slot = (uint16_t)slot, .number = ++remote_of(hosts, peer)->counters[slot].incremented};
    size_t at = 0;
    do {
        const size_t bytes = shoal_min_size(origin->bytes - at, MESSAGE_BYTES);
        const struct iovec body[] = {{&put, sizeof put}, {(char *)(uintptr_t)origin->at + at, bytes}};
        put.offset = offset + at;
        SHOAL_TRY(send_message(hosts, peer, head, body, 2));
        at += bytes;
    } while (at < origin->bytes);
    return SHOAL_OK;
}

static enum shoal_status hosts_put(struct shoal_transport *transport, int peer, unsigned slot, size_t offset,
                                   const void *source, size_t bytes)
{
    struct hosts *hosts = hosts_of(transport);
    if (hosts->error != SHOAL_OK)
        return shoal_log_repeat(hosts->log, hosts->error, hosts->error_text);
    if (is_local(hosts, peer) || !has_space(hosts, slot, offset, bytes))
        return shoal_log_fail(hosts->log, SHOAL_ERR_INTERNAL, "hosts",
                              "a put of %zu bytes to rank %d, slot %u, offset %zu, is not inside its staging buffer", bytes,
                              peer, slot, offset);
    if (remote_of(hosts, peer)->counters[slot].owed || !may_increment(remote_of(hosts, peer), slot))
        return SHOAL_PENDING;
    const struct origin origin = find_origin(hosts, source, bytes);
    if (remote_of(hosts, peer)->has_staging && shoal_network_writes(hosts->network, origin.memory, bytes))
        return write_to(hosts, peer, slot, offset, &origin);
    return send_messages(hosts, peer, slot, offset, &origin);
}

static int hosts_lanes(const struct shoal_transport *transport)
{
    return shoal_network_lane_count(((const struct hosts *)transport)->network);
}

static bool hosts_tries_lanes(const struct shoal_transport *transport)
{
    return shoal_network_tries_lanes(((const struct hosts *)transport)->network);
}

static void hosts_limit_lanes(struct shoal_transport *transport, bool is_limited)
{
    hosts_of(transport)->is_limited = is_limited;
}

static bool hosts_reads_registered_for(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    return !is_local(hosts, peer) && shoal_network_exports(hosts->network) && hosts->has_staging &&
           remote_of(hosts, peer)->has_staging && shoal_network_writes(hosts->network, &hosts->staging, hosts->slot_bytes);
}

static bool hosts_is_locally_complete(struct shoal_transport *transport, unsigned slot)
{
    SHOAL_ASSERT(slot < hosts_of(transport)->slots);
    return hosts_of(transport)->under_way[slot] == 0;
}

static bool is_flushed(struct shoal_transport *transport)
{
    const struct hosts *hosts = hosts_of(transport);
    return hosts->under_way[hosts->slots] == 0;
}

static bool is_sending(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    const struct remote *remote = remote_of(hosts, peer);
    unsigned count = 0;
    for (unsigned i = 0; !is_local(hosts, peer) && i <= hosts->slots; i++)
        count += remote->under_way[i];
    return count > 0;
}

static void send_increment(struct hosts *hosts, int peer, unsigned slot)
{
    const struct shoal_network_head head = {.kind = SHOAL_NETWORK_INCREMENT,
                                            .slot = (uint16_t)slot,
                                            .number = ++remote_of(hosts, peer)->counters[slot].incremented};
    hosts_note(hosts, send_message(hosts, peer, head, NULL, 0));
}

/* Adds one signal held back, or (-1) removes one. Like a message that waits to be sent, it is not flushed. */
static void hosts_owe(struct hosts *hosts, int peer, unsigned slot, int change)
{
    struct remote *remote = remote_of(hosts, peer);
    SHOAL_ASSERT(change == 1 || (change == -1 && remote->counters[slot].owed > 0 && hosts->owed > 0));
    remote->counters[slot].owed += (unsigned)change;
    remote->under_way[slot] += (unsigned)change;
    hosts->under_way[hosts->slots] += (unsigned)change;
    hosts->owed += (unsigned)change;
    shoal_network_want_turns(hosts->network, &hosts->channel, hosts->owed > 0);
}

static void hosts_signal_peer(struct shoal_transport *transport, int peer, unsigned slot)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer)) {
        hosts->local->ops->signal(hosts->local, hosts->local_of[peer], slot);
        return;
    }
    struct counter *counter = &remote_of(hosts, peer)->counters[slot];
    if (!counter->owed && may_increment(remote_of(hosts, peer), slot))
        send_increment(hosts, peer, slot);
    else
        hosts_owe(hosts, peer, slot, 1);
}

static void pay_owed(struct hosts *hosts, int peer, unsigned slot)
{
    struct remote *remote = remote_of(hosts, peer);
    while (remote->counters[slot].owed && may_increment(remote, slot)) {
        hosts_owe(hosts, peer, slot, -1);
        send_increment(hosts, peer, slot);
    }
}

/* Called rarely: a plan signals one rank many times only if one host has far fewer ranks than another. */
static void pay_all_owed(void *arg)
{
    struct hosts *hosts = arg;
    for (int r = 0; r < hosts->transport.size && hosts->owed; r++) {
        for (unsigned slot = 0; slot < hosts->slots; slot++)
            pay_owed(hosts, r, slot);
    }
}

static uint64_t counter_value(struct shoal_transport *transport, int peer, unsigned slot)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->counter(hosts->local, hosts->local_of[peer], slot);
    return remote_of(hosts, peer)->counters[slot].received;
}

/* Returns false if the increment was received before, or the sender breaks the protocol. */
static bool hosts_is_expected(const struct counter *counter, uint64_t number)
{
    return number - counter->received - 1 < INCREMENTS;
}

/* An increment that overtook others is kept as a bit until those before it are received. Returns false if it was received
 * before. */
static bool receive_increment(struct counter *counter, uint64_t number)
{
    const uint64_t bit = UINT64_C(1) << (number - counter->received - 1) % INCREMENTS;
    if (!hosts_is_expected(counter, number) || (counter->ahead & bit))
        return false;
    SHOAL_ASSERT(!(counter->ahead & 1)); /* the next increment in order is counted at once, so it is never in `ahead` */
    counter->ahead |= bit;
    SHOAL_ASSERT(counter->ahead != 0);
    while (counter->ahead & 1) {
        counter->ahead >>= 1;
        counter->received++;
    }
    return true;
}

static void report_arrived_if_due(struct hosts *hosts, int peer, unsigned slot)
{
    const struct remote *remote = remote_of(hosts, peer);
    struct counter *counter = &remote->counters[slot];
    if (SHOAL_LIKELY(!remote->lanes) || counter->received - counter->reported < ARRIVED_EVERY)
        return;
    const struct shoal_network_head head = {.kind = SHOAL_NETWORK_ARRIVED, .slot = (uint16_t)slot, .number = counter->received};
    counter->reported = counter->received;
    hosts_note(hosts, send_message(hosts, peer, head, NULL, 0));
}

/* Messages arrive in any order, so the number may be older than one received before. */
static void receive_arrived(struct counter *counter, uint64_t number)
{
    if (number - counter->arrived <= counter->incremented - counter->arrived)
        counter->arrived = number;
}

/* ---- Packets ------------------------------------------------------------------------------------------------------------- */

static size_t hosts_packet_space(const struct shoal_packet *packet)
{
    return sizeof *packet + packet->bytes;
}

static enum shoal_status hosts_push(struct shoal_transport *transport, int peer, const struct shoal_packet *packet,
                                    const void *data)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->push(hosts->local, hosts->local_of[peer], packet, data);
    struct remote *remote = remote_of(hosts, peer);
    SHOAL_ASSERT(packet->bytes <= SHOAL_PACKET_BYTES_MAX);
    if (hosts->error != SHOAL_OK)
        return shoal_log_repeat(hosts->log, hosts->error, hosts->error_text);
    if (remote->pushed_bytes - remote->taken_bytes + hosts_packet_space(packet) > SHOAL_PACKET_QUEUE_BYTES ||
        shoal_network_is_full(remote->peer))
        return SHOAL_PENDING;
    const struct iovec body[] = {{(void *)(uintptr_t)packet, sizeof *packet}, {(void *)(uintptr_t)data, packet->bytes}};
    const struct shoal_network_head head = {.kind = SHOAL_NETWORK_PACKET, .number = remote->pushed};
    SHOAL_TRY(send_message(hosts, peer, head, body, 2));
    remote->pushed++;
    remote->pushed_bytes += hosts_packet_space(packet);
    return SHOAL_OK;
}

static const struct shoal_packet *hosts_peek(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->peek(hosts->local, hosts->local_of[peer]);
    const struct remote *remote = remote_of(hosts, peer);
    return remote->packets && remote->packets->number == remote->popped ? &remote->packets->head : NULL;
}

static void hosts_pop(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer)) {
        hosts->local->ops->pop(hosts->local, hosts->local_of[peer]);
        return;
    }
    struct remote *remote = remote_of(hosts, peer);
    struct packet *packet = remote->packets;
    SHOAL_ASSERT(packet && packet->number == remote->popped); /* peek has found it */
    SHOAL_ASSERT(remote->held_bytes >= hosts_packet_space(&packet->head));
    remote->packets = packet->next;
    remote->popped++;
    remote->popped_bytes += hosts_packet_space(&packet->head);
    remote->held_bytes -= hosts_packet_space(&packet->head);
    free(packet);
    if (remote->popped_bytes - remote->acknowledged_bytes >= ACKNOWLEDGE_TAKEN)
        hosts_note(hosts, send_message(hosts, peer, (struct shoal_network_head){.kind = SHOAL_NETWORK_COMPLETED}, NULL, 0));
}

/* ---- Receiving ----------------------------------------------------------------------------------------------------------- */

static bool hosts_grow(struct payload *payload, size_t bytes)
{
    if (payload->bytes >= bytes)
        return true;
    char *at = realloc(payload->at, bytes);
    if (!at)
        return false;
    *payload = (struct payload){at, bytes};
    return true;
}

static void receive_announcement(struct hosts *hosts, struct remote *remote, const char *body, size_t bytes)
{
    struct shoal_network_announcement message;
    if (bytes < sizeof message)
        return;
    memcpy(&message, body, sizeof message);
    if (message.bytes != bytes - sizeof message || message.bytes > SHOAL_PAYLOAD_MAX)
        return;
    if (message.has_staging && !remote->has_staging) {
        remote->staging = (struct shoal_fabric_memory){.base = message.staging_base, .key = message.staging_key};
        remote->increments = message.counters;
        remote->has_staging = true;
    }
    if (!remote->announcements)
        remote->announcements = calloc(SHOAL_ANNOUNCEMENTS, sizeof *remote->announcements);
    const uint64_t sequence = message.descriptor.sequence;
    if (sequence > remote->last_received)
        remote->last_received = sequence;
    list_if_unacknowledged(hosts, remote);
    if (remote->announcements && sequence <= hosts->completed)
        return; /* nobody needs it any longer, and a later announcement may be in its place */
    const bool is_beside = message.bytes > SHOAL_PAYLOAD_INLINE;
    struct payload *payload = &remote->payloads[sequence % SHOAL_PAYLOADS];
    if (!remote->announcements || (is_beside && !hosts_grow(payload, message.bytes))) {
        hosts_note(hosts,
                   shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for the announcements of other hosts"));
        return;
    }
    struct shoal_announcement *announcement = &remote->announcements[sequence % SHOAL_ANNOUNCEMENTS];
    memcpy(is_beside ? payload->at : (char *)announcement->payload, body + sizeof message, message.bytes);
    announcement->descriptor = message.descriptor;
    announcement->descriptor.posted = (uint32_t)(shoal_clock_ticks() >> 8); /* clocks of hosts differ */
    announcement->input = announcement->output = 0;
}

static void receive_data(struct hosts *hosts, struct remote *remote, const struct shoal_network_head *head, const char *body,
                         size_t bytes)
{
    struct shoal_network_put_head put;
    if (bytes < sizeof put || !hosts->has_staging)
        return;
    memcpy(&put, body, sizeof put);
    bytes -= sizeof put;
    if (!has_space(hosts, head->slot, put.offset, bytes) || !hosts_is_expected(&remote->counters[head->slot], head->number))
        return;
    if (!remote->messages)
        remote->messages = calloc(hosts->slots, sizeof *remote->messages);
    if (!remote->messages) {
        hosts_note(hosts, shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for puts of other hosts"));
        return;
    }
    memcpy((char *)hosts->local->ops->staging(hosts->local, hosts->local->rank, head->slot) + put.offset, body + sizeof put,
           bytes);
    uint32_t *received = &remote->messages[head->slot].received[head->number % INCREMENTS];
    if (++*received < put.messages)
        return;
    *received = 0;
    (void)receive_increment(&remote->counters[head->slot], head->number);
}

/* A peer that keeps the protocol never sends more than the queue holds. */
static bool fits_queue(const struct remote *remote, const struct shoal_packet *packet, uint64_t number)
{
    return packet->bytes <= SHOAL_PACKET_BYTES_MAX && number - remote->popped < PACKETS_MAX &&
           remote->held_bytes + hosts_packet_space(packet) <= SHOAL_PACKET_QUEUE_BYTES;
}

static void receive_packet(struct hosts *hosts, struct remote *remote, uint64_t number, const char *body, size_t bytes)
{
    struct packet **link = &remote->packets;
    struct shoal_packet head;
    if (bytes < sizeof head)
        return;
    memcpy(&head, body, sizeof head);
    if (head.bytes != bytes - sizeof head || !fits_queue(remote, &head, number))
        return;
    while (*link && (*link)->number < number)
        link = &(*link)->next;
    if (*link && (*link)->number == number)
        return;
    struct packet *packet = malloc(sizeof *packet + head.bytes);
    if (!packet) {
        hosts_note(hosts, shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a message of another host"));
        return;
    }
    packet->number = number;
    memcpy(&packet->head, body, bytes);
    packet->head.location = 0; /* load and store do not reach a remote rank's memory */
    remote->held_bytes += hosts_packet_space(&packet->head);
    packet->next = *link;
    *link = packet;
}

/* Messages arrive in any order; the one sent last counts. */
static void receive_waits(const struct hosts *hosts, struct remote *remote, uint64_t number)
{
    const uint64_t rank = number & UINT32_MAX & ~(uint64_t)SHOAL_WAIT_BLOCKED; /* and the added 1 */
    if (rank <= (uint64_t)hosts->transport.size && number >> 32 > remote->waits >> 32)
        remote->waits = number;
}

/* From now on puts to the peer may use lanes, and it may use them for puts to this rank. */
static void receive_lanes(struct hosts *hosts, int peer, const void *body, size_t bytes)
{
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct remote *remote = remote_of(hosts, peer);
    const int count = (int)(shoal_min_size(bytes, sizeof offers) / sizeof offers[0]);
    if (remote->lanes || count == 0 || shoal_network_lane_count(hosts->network) == 0)
        return;
    memcpy(offers, body, (size_t)count * sizeof offers[0]);
    for (int i = 0; i < count; i++) {
        if (offers[i].address.bytes > SHOAL_FABRIC_ADDRESS_MAX)
            return;
    }
    struct shoal_network_lanes *lanes = calloc(1, sizeof *lanes);
    const enum shoal_status status =
        lanes ? shoal_network_meet_lanes(hosts->network, offers, count, lanes)
              : shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for the lanes of rank %d", peer);
    if (status != SHOAL_OK) {
        free(lanes);
        hosts_note(hosts, status);
        return;
    }
    remote->lanes = lanes;
    for (unsigned slot = 0; slot < hosts->slots; slot++)
        report_arrived_if_due(hosts, peer, slot);
}

/* The peer has received the probe of lane `number`. */
static void receive_reached(struct hosts *hosts, struct remote *remote, uint64_t number)
{
    if (remote->lanes)
        shoal_network_lane_reached(hosts->network, remote->lanes, number);
}

/* Nothing in a message from the network is trusted before it is checked. */
static bool hosts_receive(void *arg, const struct shoal_network_peer *from, const struct shoal_network_head *head,
                          const void *body, size_t bytes)
{
    struct hosts *hosts = arg;
    if (head->source >= (uint32_t)hosts->transport.size || remote_of(hosts, (int)head->source)->peer != from ||
        head->slot >= hosts->slots)
        return false;
    struct remote *remote = remote_of(hosts, (int)head->source);
    remote->completed = head->completed > remote->completed ? head->completed : remote->completed;
    if (head->taken > remote->taken_bytes && head->taken <= remote->pushed_bytes)
        remote->taken_bytes = head->taken;
    switch ((enum shoal_network_kind)head->kind) {
    case SHOAL_NETWORK_ANNOUNCE:
        receive_announcement(hosts, remote, body, bytes);
        acknowledge_if_due(hosts, (int)head->source); /* the operation may be completed: not every rank waits for all */
        break;
    case SHOAL_NETWORK_INCREMENT:
        (void)receive_increment(&remote->counters[head->slot], head->number);
        report_arrived_if_due(hosts, (int)head->source, head->slot);
        break;
    case SHOAL_NETWORK_DATA:
        receive_data(hosts, remote, head, body, bytes);
        report_arrived_if_due(hosts, (int)head->source, head->slot);
        break;
    case SHOAL_NETWORK_PACKET:
        receive_packet(hosts, remote, head->number, body, bytes);
        break;
    case SHOAL_NETWORK_WAITS:
        receive_waits(hosts, remote, head->number);
        break;
    case SHOAL_NETWORK_LANES:
        receive_lanes(hosts, (int)head->source, body, bytes);
        break;
    case SHOAL_NETWORK_REACHED:
        receive_reached(hosts, remote, head->number);
        break;
    case SHOAL_NETWORK_ARRIVED:
        receive_arrived(&remote->counters[head->slot], head->number);
        break;
    default:
        break;
    }
    return true;
}

static bool receive_write(void *arg, int source, unsigned slot, unsigned increment)
{
    struct hosts *hosts = arg;
    if (slot >= hosts->slots)
        return false;
    struct counter *counter = &remote_of(hosts, source)->counters[slot];
    const uint64_t next = counter->received + 1;
    const bool is_expected = receive_increment(counter, next + (increment - next) % INCREMENTS);
    report_arrived_if_due(hosts, source, slot);
    return is_expected;
}

/* A lane of `source` reaches one of this rank's, so puts may use it. */
static void answer_probe(void *arg, int source, unsigned lane)
{
    struct hosts *hosts = arg;
    const struct shoal_network_head head = {.kind = SHOAL_NETWORK_REACHED, .number = lane};
    hosts_note(hosts, send_message(hosts, source, head, NULL, 0));
}

/* Unexpected messages came before this rank made the communicator, and could not be kept. */
static void note_messages_lost(void *arg, enum shoal_status status, const char *text)
{
    struct hosts *hosts = arg;
    hosts_note(hosts, shoal_log_fail(hosts->log, status, "hosts", "%s", text));
}

static void hosts_flush(struct shoal_transport *transport)
{
    struct hosts *hosts = hosts_of(transport);
    hosts->local->ops->flush(hosts->local);
}

/* ---- Failure ------------------------------------------------------------------------------------------------------------- */

static void hosts_fail(struct shoal_transport *transport, const struct shoal_failure *failure)
{
    shoal_membership_fail(&hosts_of(transport)->membership_comm, failure);
}

/* Reports an error that could not be returned at once. */
static void fail_noted(struct hosts *hosts)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure,
                                    .status = hosts->error,
                                    .rank = hosts->transport.rank,
                                    .reporter = hosts->transport.rank,
                                    .pid = (int)getpid(),
                                    .step = -1};
    snprintf(failure.host, sizeof failure.host, "%.63s", hosts->log->host);
    snprintf(failure.text, sizeof failure.text, "%.*s", (int)sizeof failure.text - 1, hosts->error_text);
    hosts->error = SHOAL_OK;
    hosts_fail(&hosts->transport, &failure);
}

/* Callers may free the sources of puts when their requests have ended, so no lane begins to send from there. */
static void drop_puts(struct hosts *hosts)
{
    const size_t loads = (size_t)hosts->transport.size * (2 * hosts->slots + 1);
    if (hosts->has_dropped)
        return;
    hosts->has_dropped = true;
    shoal_network_drop_lanes(hosts->network, hosts->loads, hosts->loads + loads * sizeof(struct shoal_network_load));
}

static bool hosts_failed(struct shoal_transport *transport, struct shoal_failure *failure)
{
    struct hosts *hosts = hosts_of(transport);
    if (SHOAL_UNLIKELY(hosts->error != SHOAL_OK))
        fail_noted(hosts);
    if (SHOAL_LIKELY(!shoal_membership_failed(&hosts->membership_comm, failure)))
        return false;
    drop_puts(hosts);
    return true;
}

static void hosts_abort_all(struct shoal_transport *transport, const struct shoal_failure *cause)
{
    shoal_membership_abort(&hosts_of(transport)->membership_comm, cause);
}

static enum shoal_status hosts_agree(struct shoal_transport *transport, const struct shoal_survivors_view *proposal,
                                     struct shoal_survivors_view *agreed_out)
{
    return shoal_membership_agree(&hosts_of(transport)->membership_comm, proposal, agreed_out);
}

static int hosts_unagreed(struct shoal_transport *transport, int first)
{
    return shoal_membership_unagreed(&hosts_of(transport)->membership_comm, first);
}

static void wake_local(void *arg)
{
    const struct hosts *hosts = arg;
    shoal_shm_wake(hosts->local);
}

/* The control tree calls this with the membership's lock held. */
static void hosts_note_freed(void *arg, int rank, uint64_t sequence)
{
    struct hosts *hosts = arg;
    if (rank < 0 || rank >= hosts->transport.size)
        return;
    struct remote *remote = remote_of(hosts, rank);
    atomic_store_explicit(&remote->freed_completed, sequence, memory_order_release);
    atomic_store_explicit(&remote->has_freed, true, memory_order_release);
}

static bool hosts_enter(struct shoal_transport *transport)
{
    struct hosts *hosts = hosts_of(transport);
    return hosts->local->ops->enter(hosts->local);
}

static void hosts_leave(struct shoal_transport *transport)
{
    struct hosts *hosts = hosts_of(transport);
    hosts->local->ops->leave(hosts->local);
}

static bool hosts_is_failing(struct shoal_transport *transport)
{
    struct hosts *hosts = hosts_of(transport);
    return hosts->local->ops->is_failing(hosts->local);
}

static bool hosts_is_quiet(struct shoal_transport *transport, int *rank_out)
{
    struct hosts *hosts = hosts_of(transport);
    int local = 0;
    const bool quiet = hosts->local->ops->is_quiet(hosts->local, &local);
    if (!quiet)
        *rank_out = hosts->rank_of[local];
    return quiet;
}

static bool hosts_is_out_of_reach(const struct hosts *hosts, const struct shoal_network_peer *peer, char *text, size_t bytes)
{
    if (!peer->broken_ns || shoal_clock_ns() - peer->broken_ns < BLAME_NETWORK_NS)
        return false;
    char own[128], other[128];
    shoal_network_print_address(hosts->network, shoal_network_address(hosts->network), own, sizeof own);
    shoal_network_print_address(hosts->network, &peer->address, other, sizeof other);
    snprintf(text, bytes, "cannot be reached at %.60s from %.63s (%.60s), although it is alive: %.200s", other,
             hosts->log->host, own, peer->broken);
    return true;
}

/* Writes into text how a remote rank was lost; returns false while it is not lost. */
static bool is_gone(const struct hosts *hosts, const struct remote *remote, char *text, size_t bytes)
{
    const struct shoal_network_peer *peer = remote->peer;
    if (atomic_load_explicit(&remote->has_freed, memory_order_acquire)) {
        snprintf(text, bytes, "freed the communicator");
        return true;
    }
    if (shoal_membership_lost_ns(hosts->membership, peer->world_rank)) {
        shoal_membership_describe(peer->membership, peer->world_rank, text, bytes);
        return true;
    }
    return hosts_is_out_of_reach(hosts, peer, text, bytes);
}

static bool has_completed(const struct remote *remote, uint64_t sequence)
{
    return remote->completed >= sequence || atomic_load_explicit(&remote->freed_completed, memory_order_acquire) >= sequence;
}

/* A rank that learns of a failure ends and is then also lost, perhaps before this rank learns of the failure. If several ranks
 * are lost within this time, the first is named. */
#define CASCADE_NS (3 * SHOAL_NS_PER_S)

/* Returns the rank to name when `rank` is lost. One that freed the communicator may have done so because another was lost. */
static int find_first_lost(struct hosts *hosts, int rank, uint64_t sequence)
{
    const uint64_t lost_ns = shoal_membership_lost_ns(hosts->membership, remote_of(hosts, rank)->peer->world_rank);
    const bool has_freed = atomic_load_explicit(&remote_of(hosts, rank)->has_freed, memory_order_acquire);
    uint64_t first_ns = lost_ns ? lost_ns : UINT64_MAX;
    int first = rank;
    for (int r = 0; (lost_ns || has_freed) && r < hosts->transport.size; r++) {
        const uint64_t ns =
            is_local(hosts, r) ? 0 : shoal_membership_lost_ns(hosts->membership, remote_of(hosts, r)->peer->world_rank);
        if (!ns || ns >= first_ns || (lost_ns && lost_ns - ns > CASCADE_NS) || has_completed(remote_of(hosts, r), sequence))
            continue;
        first = r;
        first_ns = ns;
    }
    return first;
}

/* A peer that has completed the operation still delays it if a message to it can never complete locally. */
static bool holds_up(struct hosts *hosts, int rank, uint64_t sequence, char *how, size_t bytes)
{
    const struct remote *remote = remote_of(hosts, rank);
    if (has_completed(remote, sequence))
        return is_sending(&hosts->transport, rank) && hosts_is_out_of_reach(hosts, remote->peer, how, bytes);
    return is_gone(hosts, remote, how, bytes);
}

static bool is_remote_lost(struct hosts *hosts, int rank, uint64_t sequence, struct shoal_failure *failure)
{
    char how[480];
    if (!holds_up(hosts, rank, sequence, how, sizeof how))
        return false;
    const int first = find_first_lost(hosts, rank, sequence);
    const struct shoal_network_peer *peer = remote_of(hosts, first)->peer;
    if (first != rank)
        (void)is_gone(hosts, remote_of(hosts, first), how, sizeof how);
    failure->status = SHOAL_ERR_PEER_LOST;
    failure->rank = first;
    failure->pid = peer->name.pid;
    snprintf(failure->host, sizeof failure->host, "%s", peer->name.host);
    snprintf(failure->text, sizeof failure->text, "rank %d (process %d on %s) %.390s", first, failure->pid, failure->host, how);
    return true;
}

/* Returns the next lost rank of this host, from `first` on; size if there is none. */
static int next_local_lost(struct hosts *hosts, int first, uint64_t sequence, struct shoal_failure *failure)
{
    int local = 0;
    while (local < hosts->local->size && hosts->rank_of[local] < first)
        local++;
    const int lost = local < hosts->local->size ? hosts->local->ops->lost(hosts->local, local, sequence, failure) : -1;
    return lost < 0 ? hosts->transport.size : hosts->rank_of[lost];
}

static int hosts_lost(struct shoal_transport *transport, int first, uint64_t sequence, struct shoal_failure *failure)
{
    struct hosts *hosts = hosts_of(transport);
    const int local = next_local_lost(hosts, first, sequence, failure);
    for (int r = first; r < local && r < transport->size; r++) {
        if (!is_local(hosts, r) && is_remote_lost(hosts, r, sequence, failure))
            return r;
    }
    return local < transport->size ? local : -1;
}

static bool is_cut_off(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    const struct shoal_network_peer *other = is_local(hosts, peer) ? NULL : remote_of(hosts, peer)->peer;
    return other && shoal_membership_is_cut_off(other->membership, other->world_rank);
}

static void hosts_describe(struct shoal_transport *transport, int peer, char *text, size_t bytes)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer)) {
        hosts->local->ops->describe(hosts->local, hosts->local_of[peer], text, bytes);
        return;
    }
    const struct shoal_network_peer *other = remote_of(hosts, peer)->peer;
    shoal_membership_describe(other->membership, other->world_rank, text, bytes);
}

static void hosts_say_waits_for(struct shoal_transport *transport, uint64_t sequence, int rank)
{
    struct hosts *hosts = hosts_of(transport);
    const struct shoal_network_head head = {.kind = SHOAL_NETWORK_WAITS,
                                            .number = ++hosts->said_waits << 32 | (uint32_t)(rank + 1)};
    hosts->local->ops->say_waits_for(hosts->local, sequence, rank);
    for (int r = 0; r < transport->size; r++) {
        struct remote *remote = remote_of(hosts, r);
        const bool is_concerned = rank < 0 || remote->last_received >= sequence || rank == (r | SHOAL_WAIT_BLOCKED);
        if (is_local(hosts, r) || remote->sent_waits == rank + 1 || !is_concerned)
            continue;
        remote->sent_waits = rank + 1;
        hosts_note(hosts, send_message(hosts, r, head, NULL, 0));
    }
}

static int hosts_waits_for(struct shoal_transport *transport, int peer)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        return hosts->local->ops->waits_for(hosts->local, hosts->local_of[peer]);
    return (int)(remote_of(hosts, peer)->waits & UINT32_MAX) - 1;
}

static void hosts_peer_name(struct shoal_transport *transport, int peer, struct shoal_transport_peer *name)
{
    struct hosts *hosts = hosts_of(transport);
    if (is_local(hosts, peer))
        hosts->local->ops->peer_name(hosts->local, hosts->local_of[peer], name);
    else
        *name = remote_of(hosts, peer)->peer->name;
}

static void hosts_traffic(const struct shoal_transport *transport, struct shoal_traffic *traffic)
{
    const struct hosts *hosts = (const struct hosts *)transport;
    traffic->sent_bytes += hosts->sent_bytes;
    traffic->sent_messages += hosts->sent_messages;
    for (int r = 0; traffic->sent_to && r < transport->size; r++)
        traffic->sent_to[r] += hosts->remotes[r].sent_bytes;
}

static void hosts_memory(struct shoal_transport *transport, struct shoal_memory_usage *usage)
{
    struct hosts *hosts = hosts_of(transport);
    hosts->local->ops->memory(hosts->local, usage);
    usage->control_bytes += sizeof *hosts;
    for (int r = 0; r < transport->size; r++) {
        const struct remote *remote = remote_of(hosts, r);
        usage->control_bytes += sizeof *remote;
        usage->control_bytes +=
            remote->lanes ? sizeof *remote->lanes + (size_t)remote->lanes->count * sizeof remote->lanes->lane[0] : 0;
        usage->control_bytes += remote->announcements ? SHOAL_ANNOUNCEMENTS * sizeof *remote->announcements : 0;
        for (int i = 0; i < SHOAL_PAYLOADS; i++)
            usage->control_bytes += remote->payloads[i].bytes;
    }
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void free_remote(struct hosts *hosts, struct remote *remote)
{
    if (remote->lanes)
        shoal_network_part_lanes(hosts->network, remote->lanes);
    free(remote->lanes);
    free(remote->announcements);
    for (int i = 0; i < SHOAL_PAYLOADS; i++)
        free(remote->payloads[i].at);
    free(remote->messages);
    while (remote->packets) {
        struct packet *packet = remote->packets;
        remote->packets = packet->next;
        free(packet);
    }
}

static bool is_writing(const struct hosts *hosts)
{
    for (unsigned i = 0; hosts->under_way && i <= hosts->slots; i++) {
        if (hosts->under_way[i])
            return true;
    }
    return false;
}

/* After a failure, a rank of this host that entered before may still read the pages, and this rank's own puts may still be sent
 * from them. The cause is on the board, so a rank that enters later reads none. */
static bool may_free_pages(struct hosts *hosts)
{
    int rank;
    return !shoal_network_sends_cheaply(hosts->network) && !is_writing(hosts) &&
           hosts->local->ops->is_quiet(hosts->local, &rank);
}

static void unregister_staging(struct hosts *hosts)
{
    shoal_network_unregister(hosts->network, &hosts->staging);
    shoal_network_unregister_lanes(hosts->network, &hosts->lane_staging);
}

/* Memory that peers may still write to until they learn of a failure, and the counters of writes under way, remain after the
 * communicator ends. If an adapter writes there, the pages must stay, otherwise only the addresses. */
static void leave_network(struct hosts *hosts, bool is_broken)
{
    struct shoal_network_leftover leftover = {.memory = {.region = NULL}};
    if (is_broken && hosts->has_staging)
        leftover = (struct shoal_network_leftover){.memory = hosts->staging,
                                                   .lane_memory = hosts->lane_staging,
                                                   .release = put_segment,
                                                   .arg = shoal_shm_leave_segment(hosts->local, may_free_pages(hosts))};
    else if (hosts->has_staging)
        unregister_staging(hosts);
    if (is_writing(hosts)) {
        leftover.loads = hosts->loads;
        leftover.under_way = hosts->under_way;
        leftover.under_way_count = hosts->slots + 1;
    } else {
        free(hosts->loads);
    }
    if (leftover.arg || leftover.loads)
        shoal_network_leave(hosts->network, &leftover);
}

static void hosts_destroy(struct shoal_transport *transport, bool finalized)
{
    struct hosts *hosts = hosts_of(transport);
    struct shoal_failure failure;
    const bool is_broken = hosts->is_joined && hosts_failed(transport, &failure);
    if (!finalized && !is_broken) /* otherwise the others learn of the failure */
        shoal_membership_tell_left(hosts->membership, hosts->channel.comm, transport->rank, hosts->completed);
    shoal_membership_leave(hosts->membership, &hosts->membership_comm);
    shoal_network_channel_close(hosts->network, &hosts->channel);
    if (hosts->owed) /* nobody sends them from now on */
        hosts->under_way[hosts->slots] -= hosts->owed;
    leave_network(hosts, is_broken);
    if (hosts->local)
        hosts->local->ops->destroy(hosts->local, finalized);
    for (int r = 0; hosts->remotes && r < transport->size; r++)
        free_remote(hosts, &hosts->remotes[r]);
    free(hosts->counters);
    free(hosts->remotes);
    free(hosts->members);
    free(hosts->local_of);
    free(hosts->rank_of);
    free(hosts->world_ranks);
    free(hosts->host);
    free(hosts);
}

static const struct shoal_transport_ops ops = {
    .name = "hosts",
    .announce = hosts_announce,
    .announce_to = announce_to,
    .announcement = hosts_announcement,
    .expect = hosts_expect,
    .payload = hosts_payload_of,
    .complete = hosts_complete,
    .completed = hosts_completed,
    .locate = hosts_locate,
    .reach = hosts_reach,
    .reserve_staging = hosts_reserve_staging,
    .staging = hosts_staging,
    .put = hosts_put,
    .reads_registered_for = hosts_reads_registered_for,
    .lanes = hosts_lanes,
    .tries_lanes = hosts_tries_lanes,
    .limit_lanes = hosts_limit_lanes,
    .is_locally_complete = hosts_is_locally_complete,
    .is_flushed = is_flushed,
    .is_sending = is_sending,
    .signal = hosts_signal_peer,
    .counter = counter_value,
    .push = hosts_push,
    .peek = hosts_peek,
    .pop = hosts_pop,
    .flush = hosts_flush,
    .lost = hosts_lost,
    .is_cut_off = is_cut_off,
    .describe = hosts_describe,
    .say_waits_for = hosts_say_waits_for,
    .waits_for = hosts_waits_for,
    .enter = hosts_enter,
    .leave = hosts_leave,
    .is_failing = hosts_is_failing,
    .is_quiet = hosts_is_quiet,
    .fail = hosts_fail,
    .failed = hosts_failed,
    .abort = hosts_abort_all,
    .agree = hosts_agree,
    .unagreed = hosts_unagreed,
    .peer_name = hosts_peer_name,
    .memory = hosts_memory,
    .traffic = hosts_traffic,
    .destroy = hosts_destroy,
};

/* Allocates loads of all remote ranks, and their counts, in one block. It outlives the transport if anything is still under
 * way. */
static bool make_loads(struct hosts *hosts)
{
    const size_t size = (size_t)hosts->transport.size, slots = hosts->slots;
    const size_t kinds = 2 * slots + 1, counted = slots + 1; /* see struct remote */
    const size_t bytes = kinds * sizeof(struct shoal_network_load) + counted * sizeof(unsigned);
    hosts->loads = calloc(size + 1, bytes);
    if (!hosts->loads)
        return false;
    struct shoal_network_load *loads = (struct shoal_network_load *)(void *)hosts->loads;
    unsigned *counts = (unsigned *)(void *)(loads + size * kinds);
    hosts->under_way = counts + size * counted;
    for (size_t r = 0; r < size; r++) {
        struct remote *remote = &hosts->remotes[r];
        remote->peer = hosts->members[r].remote;
        remote->counters = hosts->counters + r * slots;
        remote->loads = loads + r * kinds;
        remote->under_way = counts + r * counted;
        for (size_t i = 0; i < kinds; i++) {
            remote->loads[i] = (struct shoal_network_load){.peer = remote->peer,
                                                           .count = &remote->under_way[i < slots ? i : i - slots],
                                                           .total = &hosts->under_way[i < slots ? i : slots],
                                                           .is_messages = i >= slots};
        }
    }
    return true;
}

static enum shoal_status hosts_allocate(struct hosts *hosts, const struct shoal_hosts_options *options)
{
    const size_t size = (size_t)options->shm.size;
    hosts->members = calloc(size, sizeof *hosts->members);
    hosts->local_of = calloc(size, sizeof *hosts->local_of);
    hosts->rank_of = calloc(size, sizeof *hosts->rank_of);
    hosts->host = calloc(size, sizeof *hosts->host);
    hosts->world_ranks = calloc(size, sizeof *hosts->world_ranks);
    hosts->remotes = calloc(size, sizeof *hosts->remotes);
    hosts->counters = calloc(size * hosts->slots, sizeof *hosts->counters);
    if (!hosts->members || !hosts->local_of || !hosts->rank_of || !hosts->host || !hosts->world_ranks || !hosts->remotes ||
        !hosts->counters)
        return shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a communicator of %zu ranks", size);
    memcpy(hosts->members, options->members, size * sizeof *hosts->members);
    for (size_t r = 0; r < size; r++)
        hosts->world_ranks[r] = options->members[r].world_rank;
    hosts->membership_comm.world_ranks = hosts->world_ranks;
    if (!make_loads(hosts))
        return shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a communicator of %zu ranks", size);
    for (size_t r = 0; r < size; r++) {
        for (unsigned i = 0; i < hosts->slots; i++)
            hosts->remotes[r].counters[i].incremented = hosts->remotes[r].counters[i].completed_locally =
                hosts->remotes[r].counters[i].arrived = hosts->remotes[r].counters[i].received =
                    hosts->remotes[r].counters[i].reported = options->shm.counter_start;
        hosts->remotes[r].completed = hosts->remotes[r].acknowledged = options->shm.counter_start;
        hosts->remotes[r].last_sent = options->shm.counter_start;
        atomic_store_explicit(&hosts->remotes[r].freed_completed, options->shm.counter_start, memory_order_relaxed);
    }
    return SHOAL_OK;
}

/* Numbers hosts in the order of their lowest ranks, and this host's ranks in order. Returns the number of ranks on this
 * host. */
static int hosts_number_all(struct hosts *hosts)
{
    const struct shoal_member *members = hosts->members;
    const int size = hosts->transport.size, own = hosts->transport.rank;
    uint16_t next = 0;
    int local = 0;
    for (int r = 0; r < size; r++) {
        int same = 0;
        while (members[same].host != members[r].host)
            same++;
        hosts->host[r] = same < r ? hosts->host[same] : next++;
        hosts->local_of[r] = members[r].host == members[own].host ? local : -1;
        if (hosts->local_of[r] >= 0)
            hosts->rank_of[local++] = r;
    }
    return local;
}

static enum shoal_status make_local(struct hosts *hosts, struct shoal_shm_endpoint *endpoint,
                                    const struct shoal_hosts_options *options)
{
    struct shoal_shm_options shm = options->shm;
    shm.size = hosts_number_all(hosts);
    shm.rank = hosts->local_of[options->shm.rank];
    shm.numbers = hosts->rank_of;
    shm.peers = calloc((size_t)shm.size, sizeof(struct shoal_shm_peer *));
    if (!shm.peers)
        return shoal_log_fail(hosts->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a communicator of %d ranks", shm.size);
    for (int i = 0; i < shm.size; i++)
        shm.peers[i] = hosts->members[hosts->rank_of[i]].local;
    const enum shoal_status status = shoal_shm_create(endpoint, &shm, &hosts->local);
    free(shm.peers);
    return status;
}

enum shoal_status shoal_hosts_create(struct shoal_shm_endpoint *endpoint, const struct shoal_hosts_options *options,
                                     struct shoal_transport **transport_out)
{
    struct hosts *hosts = calloc(1, sizeof *hosts);
    if (!hosts)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a communicator");
    hosts->log = options->log;
    hosts->network = options->network;
    hosts->membership = options->membership;
    hosts->slots = options->shm.slots;
    hosts->slot_bytes = options->shm.slot_bytes;
    hosts->transport = (struct shoal_transport){.ops = &ops, .rank = options->shm.rank, .size = options->shm.size};
    /* Before anything can fail: destroy notifies the other hosts, which would otherwise wait for this rank. */
    hosts->channel = (struct shoal_network_channel){.comm = options->shm.comm,
                                                    .arg = hosts,
                                                    .message = hosts_receive,
                                                    .written = receive_write,
                                                    .reached = answer_probe,
                                                    .failed = note_messages_lost,
                                                    .turn = pay_all_owed};
    hosts->membership_comm = (struct shoal_membership_comm){.comm = options->shm.comm,
                                                            .rank = options->shm.rank,
                                                            .size = options->shm.size,
                                                            .host = hosts->log->host,
                                                            .arg = hosts,
                                                            .wake = wake_local,
                                                            .left = hosts_note_freed};
    hosts->completed = options->shm.counter_start;
    enum shoal_status status = hosts_allocate(hosts, options);
    if (status == SHOAL_OK)
        status = make_local(hosts, endpoint, options);
    if (status != SHOAL_OK) {
        hosts_destroy(&hosts->transport, false);
        return status;
    }
    hosts->transport.host = hosts->host;
    hosts->transport.sends_cheaply = shoal_network_sends_cheaply(hosts->network);
    *transport_out = &hosts->transport;
    return SHOAL_OK;
}

/* From then on failures of other hosts are published in shared memory, so every local segment must be mapped. */
enum shoal_status shoal_hosts_join(struct shoal_transport *transport, int *socket_out)
{
    struct hosts *hosts = hosts_of(transport);
    SHOAL_TRY(shoal_shm_join(hosts->local, socket_out));
    hosts->membership_comm.board = shoal_shm_cause_board(hosts->local);
    hosts->is_joined = true;
    shoal_network_channel_open(hosts->network, &hosts->channel);
    shoal_membership_join(hosts->membership, &hosts->membership_comm);
    return SHOAL_OK;
}
