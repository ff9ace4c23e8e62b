/* What a transport is: it makes the ranks of one communicator visible to each other. One struct shoal_transport per rank and
 * communicator. It knows no collective and no plan. No call blocks or waits, but for fail. All calls come from the thread that
 * holds the engine's lock, but those marked "any thread".
 *
 * Four things travel:
 *   arrivals   one record per rank and operation: what was called and where its operands are; with up to
 *              SHOAL_PAYLOAD_MAX bytes of data beside it. Records of the last SHOAL_ANNOUNCEMENTS operations are kept.
 *   counters   counter (slot, source) of a rank is raised by source only, one at a time, and never reset. What the source wrote
 *              or put before raising it is visible to who has read the raised value.
 *   packets    a first-in first-out queue per ordered pair of ranks, for sends and receives
 *   bytes      by load and store where a peer's memory is reached; by put elsewhere. */
#ifndef SHOAL_TRANSPORT_TRANSPORT_H
#define SHOAL_TRANSPORT_TRANSPORT_H

#include "base/compiler.h"

#define SHOAL_ANNOUNCEMENTS 32  /* records kept per rank: twice the operations that may be active */
#define SHOAL_ACTIVE_MAX 16     /* operations of one communicator under way at once */
#define SHOAL_PAYLOADS 4        /* payloads kept per rank */
#define SHOAL_PAYLOAD_INLINE 80 /* bytes that fit into the record itself */
#define SHOAL_PAYLOAD_FIRST 32  /* of these, what lies in its first cache line */
#define SHOAL_PAYLOAD_MAX 16384 /* bytes that fit beside it */
#define SHOAL_DEPTH_MAX 16      /* slots */

/* EXCHANGE is internal: every rank gives count bytes beside its announcement and receives those of all. DRAIN is local: done
 * when the sends and receives posted before it are. GROUP is several of these in one request. */
enum shoal_collective_type {
    SHOAL_COLLECTIVE_NONE,
    SHOAL_COLLECTIVE_ALLREDUCE,
    SHOAL_COLLECTIVE_REDUCE,
    SHOAL_COLLECTIVE_REDUCE_SCATTER,
    SHOAL_COLLECTIVE_BROADCAST,
    SHOAL_COLLECTIVE_ALLGATHER,
    SHOAL_COLLECTIVE_GATHER,
    SHOAL_COLLECTIVE_SCATTER,
    SHOAL_COLLECTIVE_ALLTOALL,
    SHOAL_COLLECTIVE_BARRIER,
    SHOAL_COLLECTIVE_EXCHANGE,
    SHOAL_COLLECTIVE_SEND,
    SHOAL_COLLECTIVE_RECV,
    SHOAL_COLLECTIVE_DRAIN,
    SHOAL_COLLECTIVE_GROUP,
    SHOAL_COLLECTIVE_END
};

/* What a rank called; 32 bytes; compared between ranks (but for `hints` and `posted`). */
struct shoal_descriptor {
    uint64_t sequence; /* of the operation; never 0 */
    uint64_t count;    /* of parts of different lengths: of the longest; of several tensors: of all */
    uint32_t detail;   /* a hash of what else must agree: lengths of parts, counts of tensors, scale; 0: none of these */
    uint32_t posted;   /* clock ticks / 256 when it was posted, for blame */
    int16_t root;
    uint8_t kind;
    uint8_t type;
    uint8_t op;
    uint8_t codec;    /* 0: none */
    uint8_t priority; /* 0: none */
    uint8_t hints;    /* SHOAL_HINT_*; local choices that others may follow */
};

/* Set by rank 0 of the communicator, followed by all: how staging buffers are written in this operation. */
#define SHOAL_HINT_STREAMING 1
/* The operation has a plan: the record says where operands are. Of others `input` and `output` mean nothing. */
#define SHOAL_HINT_PLANNED 2

/* Where an operand is: 0 when only its own rank reaches it ("staged"), else a segment of that rank and an offset. */
typedef uint64_t shoal_location;

#define SHOAL_LOCATION_OFFSET_BITS 40

static inline uint64_t shoal_location_segment(shoal_location location)
{
    return location >> SHOAL_LOCATION_OFFSET_BITS;
}

struct shoal_announcement {
    struct shoal_descriptor descriptor;
    unsigned char payload[SHOAL_PAYLOAD_INLINE];
    shoal_location input;
    shoal_location output;
};

_Static_assert(sizeof(struct shoal_descriptor) == 32, "the descriptor is half a cache line");
_Static_assert(offsetof(struct shoal_announcement, payload) + SHOAL_PAYLOAD_FIRST == SHOAL_CACHE_LINE, "the first line's end");
_Static_assert(sizeof(struct shoal_announcement) == SHOAL_CACHE_PAIR, "an arrival is a pair of cache lines");

/* Sends and receives travel as packets; `bytes` of data follow each. What the kinds mean is the engine's (messages.c). */
#define SHOAL_PACKET_BYTES_MAX 8192
#define SHOAL_PACKET_QUEUE_BYTES ((size_t)64 << 10) /* what a queue holds, packets and data */

struct shoal_packet {
    uint32_t kind;
    uint32_t bytes;
    int32_t tag;
    uint32_t type;
    uint64_t count;
    uint64_t id;
    uint64_t offset;
    shoal_location location;
    uint64_t spare[2];
};

_Static_assert(sizeof(struct shoal_packet) == SHOAL_CACHE_LINE, "a packet's head is one cache line");

/* Added to the rank that is waited for: a thread has been inside that wait for long, and does nothing else. */
#define SHOAL_WAIT_BLOCKED (1 << 30)

/* Who a peer is, for messages. */
struct shoal_peer_name {
    char host[64];
    int pid;
};

struct shoal_transport;

struct shoal_transport_ops {
    const char *name;

    /* Publishes this rank's record (and bytes <= SHOAL_PAYLOAD_MAX of payload; up to SHOAL_PAYLOAD_INLINE go into the record).
     * Ranks of this host always see it; of those elsewhere the ones with peers[rank] != 0 get it (NULL: all). The caller
     * guarantees that every rank that sees it has completed the operation SHOAL_ANNOUNCEMENTS before this one (with a payload
     * beside the record: the one SHOAL_PAYLOADS before), see `completed`. */
    void (*arrive)(struct shoal_transport *, const struct shoal_announcement *record, const void *payload, size_t bytes,
                   const uint8_t *peers);

    /* Sends this rank's record to one rank elsewhere that `peers` left out, with data of its own; once for each peer. The
     * same holds as for arrive. NULL where all are on one host. */
    void (*arrive_at)(struct shoal_transport *, int peer, const struct shoal_announcement *record, const void *payload,
                      size_t bytes);

    /* The peer's record of that operation, NULL while it has not come. Valid until this rank completes the operation. Of a rank
     * elsewhere `posted` is when the record was heard. */
    const struct shoal_announcement *(*arrival)(struct shoal_transport *, int peer, uint64_t sequence);

    /* Says that the peer's record is looked for, and that bytes of payload will be with it: they may be asked for early. May be
     * NULL. */
    void (*expect)(struct shoal_transport *, int peer, uint64_t sequence, size_t bytes);

    /* The payload that came with the peer's record; call after `arrival` gave the record. bytes as in arrive. */
    const void *(*payload)(struct shoal_transport *, int peer, uint64_t sequence, size_t bytes);

    /* Tells all that this rank has completed all operations up to sequence; asks what a peer has told, or more where it needs
     * no record of this rank any more. Ranks elsewhere learn it late, but before they need it: some operations after, or with
     * what this rank sends them anyway. */
    void (*complete)(struct shoal_transport *, uint64_t sequence);
    uint64_t (*completed)(struct shoal_transport *, int peer);

    /* The location of own memory [address, address + bytes), 0 when peers cannot reach all of it. */
    shoal_location (*locate)(struct shoal_transport *, const void *address, size_t bytes);

    /* A peer's (or the own) memory at a location other than 0, as an address here. NULL with *error set on failure. */
    void *(*reach)(struct shoal_transport *, int peer, shoal_location location, size_t bytes, enum shoal_status *error);

    /* Own staging buffer of at least slots * slot_bytes; called when all ranks have arrived at the first operation that uses
     * it; where ranks are elsewhere, before this rank's record of that operation. */
    enum shoal_status (*reserve_staging)(struct shoal_transport *, unsigned slots, size_t slot_bytes);

    /* The staging slot of a rank that is reached by load and store (or the own), NULL when it is not. */
    void *(*staging)(struct shoal_transport *, int rank, unsigned slot);

    /* Copies bytes into a peer's staging slot, from offset on, where it is not reached by load and store; then raises its
     * counter. ERR_* on failure; PENDING when it cannot be taken now: try again. The source may be overwritten when has_left
     * says so of the slot. */
    enum shoal_status (*put)(struct shoal_transport *, int peer, unsigned slot, size_t offset, const void *source,
                             size_t bytes);

    /* Whether all sources of the slot's puts may be overwritten. NULL: always. */
    bool (*has_left)(struct shoal_transport *, unsigned slot);

    /* Whether all that this rank has published goes on its way without its help. NULL: always. */
    bool (*is_flushed)(struct shoal_transport *);

    /* Whether something for the peer, published or put, still needs this rank's help. A send is done when nothing does. NULL:
     * never. */
    bool (*is_sending)(struct shoal_transport *, int peer);

    /* Raises the peer's counter (slot, this rank). */
    void (*signal)(struct shoal_transport *, int peer, unsigned slot);

    /* How often the peer has raised this rank's counter (slot, peer). */
    uint64_t (*counter)(struct shoal_transport *, int peer, unsigned slot);

    /* Appends a packet to the queue to peer; PENDING when it is full now, ERR_MEMORY. */
    enum shoal_status (*push)(struct shoal_transport *, int peer, const struct shoal_packet *packet, const void *data);
    /* The oldest packet from peer, its data right behind it; NULL when there is none. pop removes it. */
    const struct shoal_packet *(*peek)(struct shoal_transport *, int peer);
    void (*pop)(struct shoal_transport *, int peer);

    /* Wakes peers that sleep and may wait for what was published since the last call. */
    void (*flush)(struct shoal_transport *);

    /* The next peer, from rank `first` on, that ended or left before completing operation `sequence` (0: before anything): its
     * rank, with what is known in *failure; -1 when all are there. Makes system calls: not for each turn of a loop. */
    int (*lost)(struct shoal_transport *, int first, uint64_t sequence, struct shoal_failure *failure);
    /* Whether a lost peer is out of reach, dead or not: then it is not the only one. NULL: none ever is. */
    bool (*is_cut_off)(struct shoal_transport *, int peer);

    /* One line on how a peer looks from here, such as "alive"; it begins with "stopped" when a signal stopped the peer. */
    void (*describe)(struct shoal_transport *, int peer, char *text, size_t bytes);

    /* Tells whom this rank waits for: to ranks of this host, and to those elsewhere whose record of operation `sequence` or a
     * later one has come. -1: for nobody, which all hear who were told of somebody. With SHOAL_WAIT_BLOCKED added to the rank,
     * that rank is told too. */
    void (*say_waits_for)(struct shoal_transport *, uint64_t sequence, int rank);
    /* Whom the peer waits for, as it has said it; -1: for nobody. */
    int (*waits_for)(struct shoal_transport *, int peer);

    /* Around steps that touch the operands of others. enter is false once a failure was published: then they must not be
     * touched any more. is_quiet: after a failure was published, whether no peer that lives is between enter and leave; on
     * false *rank_out is one that is. May be NULL where peers' memory is not written by load and store. */
    bool (*enter)(struct shoal_transport *);
    void (*leave)(struct shoal_transport *);
    bool (*is_quiet)(struct shoal_transport *, int *rank_out);

    /* Publishes the first cause of failure and wakes all; only the first one counts. Over several hosts it waits until all have
     * agreed on one, some tenths of a second: the one call that waits. */
    void (*fail)(struct shoal_transport *, const struct shoal_failure *failure);
    /* True when a failure was published, by whomever; then *failure is the first cause. Cheap while there is none. */
    bool (*failed)(struct shoal_transport *, struct shoal_failure *failure);
    /* Any thread, async-signal-safe: publishes ERR_ABORTED and wakes all. Over several hosts that takes some milliseconds, and
     * this rank's next `failed` waits for it. */
    void (*abort)(struct shoal_transport *);

    void (*peer_name)(struct shoal_transport *, int peer, struct shoal_peer_name *name);
    void (*memory)(struct shoal_transport *, struct shoal_memory_usage *usage);

    /* Leaves in good order (finalized) or not, and frees. */
    void (*destroy)(struct shoal_transport *, bool finalized);
};

/* Each implementation begins with this. */
struct shoal_transport {
    const struct shoal_transport_ops *ops;
    int rank;
    int size;
    const uint16_t *host; /* host[rank], for the view: equal numbers reach each other by load and store. NULL: all do */
    bool sends_cheaply;   /* a record to a rank elsewhere costs the processor far less than the way there */
};

#endif
