/* A transport connects the ranks of one communicator. There is one struct shoal_transport per rank and communicator. It does
 * not know collectives or plans. No call blocks or waits, except fail. All calls come from the thread that holds the progress
 * engine's lock, except those marked "any thread".
 *
 * Four things travel:
 *   announcements   one per rank and operation: what was called, where the operands are, and up to SHOAL_PAYLOAD_MAX bytes of
 *              data. Each rank's last SHOAL_ANNOUNCEMENTS are kept.
 *   counters   only the source increments counter (slot, source) of a rank, by one at a time; nobody resets it. A rank that
 *              reads the new value sees everything that the source wrote or put before the increment.
 *   packets    a first-in first-out queue per ordered pair of ranks, for sends and receives
 *   bytes      by load and store to local ranks; by put to remote ranks
 */
#ifndef SHOAL_TRANSPORT_TRANSPORT_H
#define SHOAL_TRANSPORT_TRANSPORT_H

#include "base/compiler.h"
#include "memory/location.h"

#define SHOAL_ANNOUNCEMENTS 32  /* announcements kept per rank: twice the operations that may be active */
#define SHOAL_ACTIVE_MAX 16     /* operations of one communicator under way at once */
#define SHOAL_PAYLOADS 4        /* payloads kept per rank */
#define SHOAL_PAYLOAD_INLINE 80 /* bytes that fit into the announcement itself */
#define SHOAL_PAYLOAD_FIRST 32  /* the part in its first cache line */
#define SHOAL_PAYLOAD_MAX 16384 /* bytes that fit next to it */
#define SHOAL_DEPTH_MAX 16      /* slots */

/* Who does the steps of an operation: the engines of its ranks alone, or also the owners of their operands (operand/operand.h).
 * This is not the algorithm `owners`, in which a rank owns a block. */
enum shoal_way { SHOAL_WAY_ENGINES, SHOAL_WAY_OWNERS };

/* A rank's call; 32 bytes. Ranks compare all fields except `hints` and `posted`. */
struct shoal_descriptor {
    uint64_t sequence; /* of the operation; never 0 */
    uint64_t count;    /* elements; with parts of different lengths, of the longest part; with several tensors, of all */
    uint32_t detail;   /* a hash of what else must agree: lengths of parts, counts of tensors, scale; 0 if none */
    uint32_t posted;   /* clock ticks / 256 when it was posted, to find the last rank */
    int16_t root;
    uint8_t collective; /* enum shoal_collective_type */
    uint8_t type;
    uint8_t op;
    uint8_t way;      /* enum shoal_way */
    uint8_t hints;    /* SHOAL_HINT_*; local choices that others may follow */
    uint8_t type_tag; /* the caller's meaning of elements (SHOAL_TYPE_TAGGED) */
};

/* Rank 0 sets this hint and all ranks follow it: how staging buffers are written in this operation. */
#define SHOAL_HINT_STREAMING 1
/* The operation has a plan, so the announcement says where its operands are. Without a plan `input` and `output` mean
 * nothing. */
#define SHOAL_HINT_PLANNED 2
/* Rank 0 sets this hint and all ranks of its host follow it: helper threads do not work on this operation. */
#define SHOAL_HINT_NARROW 4
/* The rank lends that operand (plan/plan.h). Each rank sets these hints for itself; they mean nothing to remote ranks. */
#define SHOAL_HINT_LENT_INPUT 8
#define SHOAL_HINT_LENT_OUTPUT 16
/* Rank 0 sets this hint and all ranks of its host follow it: only the thread that makes progress sends (`limit_lanes`). */
#define SHOAL_HINT_ONE_LANE 32

struct shoal_announcement {
    struct shoal_descriptor descriptor;
    unsigned char payload[SHOAL_PAYLOAD_INLINE];
    shoal_location input;
    shoal_location output;
};

_Static_assert(sizeof(struct shoal_descriptor) == 32, "the descriptor is half a cache line");
_Static_assert(offsetof(struct shoal_announcement, payload) + SHOAL_PAYLOAD_FIRST == SHOAL_CACHE_LINE, "the first line's end");
_Static_assert(sizeof(struct shoal_announcement) == SHOAL_CACHE_PAIR, "an announcement is a pair of cache lines");

/* Sends and receives travel as packets, each followed by `bytes` of data. The engine defines the kinds (p2p.c). */
#define SHOAL_PACKET_BYTES_MAX 8192
#define SHOAL_PACKET_QUEUE_BYTES ((size_t)64 << 10) /* capacity of a queue, packets and data */

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

/* Added to the rank in waits_for: a thread has been blocked in that wait for a long time. */
#define SHOAL_WAIT_BLOCKED (1 << 30)

/* Names a peer in messages. */
struct shoal_transport_peer {
    char host[64];
    int pid;
};

struct shoal_survivors_view;
struct shoal_transport;

struct shoal_transport_ops {
    const char *name;

    /* Publishes this rank's announcement with bytes <= SHOAL_PAYLOAD_MAX of payload; up to SHOAL_PAYLOAD_INLINE are inline.
     * Ranks of this host always see it. Remote ranks with peers[rank] != 0 receive it (peers NULL: all; shoal_no_ranks: none).
     * The caller guarantees that every rank that sees it has completed the operation SHOAL_ANNOUNCEMENTS before this one and,
     * if the payload is not inline, the operation SHOAL_PAYLOADS before. See `completed`. */
    void (*announce)(struct shoal_transport *, const struct shoal_announcement *announcement, const void *payload, size_t bytes,
                     const uint8_t *peers);

    /* Sends this rank's announcement to one remote rank that `peers` left out, with a payload of its own; once for each peer.
     * Otherwise like announce. NULL if all ranks are on one host. */
    void (*announce_to)(struct shoal_transport *, int peer, const struct shoal_announcement *announcement, const void *payload,
                        size_t bytes);

    /* Returns the peer's announcement of that operation, or NULL while it has not come. Valid until this rank completes the
     * operation. For a remote rank `posted` is the time when the announcement was received. */
    const struct shoal_announcement *(*announcement)(struct shoal_transport *, int peer, uint64_t sequence);

    /* Notes that this rank waits for the peer's announcement with bytes of payload, so that a transport may prefetch it. May be
     * NULL. */
    void (*expect)(struct shoal_transport *, int peer, uint64_t sequence, size_t bytes);

    /* Returns the payload of the peer's announcement; call it after `announcement` returned it. bytes as in announce. */
    const void *(*payload)(struct shoal_transport *, int peer, uint64_t sequence, size_t bytes);

    /* complete acknowledges all operations up to sequence to all ranks. completed returns what a peer has acknowledged, or more
     * if the peer no longer needs announcements of this rank. Remote ranks learn it late, but before they need it: some
     * operations later, or with other messages of this rank. */
    void (*complete)(struct shoal_transport *, uint64_t sequence);
    uint64_t (*completed)(struct shoal_transport *, int peer);

    /* Returns the location of this rank's memory [address, address + bytes); 0 if peers cannot reach all of it. */
    shoal_location (*locate)(struct shoal_transport *, const void *address, size_t bytes);

    /* Returns a peer's or this rank's memory at a location other than 0, as an address of this process. NULL with *error on
     * failure. */
    void *(*reach)(struct shoal_transport *, int peer, shoal_location location, size_t bytes, enum shoal_status *error);

    /* Reserves this rank's staging buffer, at least slots * slot_bytes. Called when all ranks have announced the first
     * operation that uses it; with remote ranks, before this rank announces that operation. */
    enum shoal_status (*reserve_staging)(struct shoal_transport *, unsigned slots, size_t slot_bytes);

    /* Returns the staging slot of a rank that load and store reach, or of this rank; NULL for others. */
    void *(*staging)(struct shoal_transport *, int rank, unsigned slot);

    /* Copies bytes into the staging slot of a remote peer, at offset; then increments the peer's counter. ERR_* on failure;
     * PENDING if the transport is full: try again. The source may be overwritten when is_locally_complete is true for the
     * slot. */
    enum shoal_status (*put)(struct shoal_transport *, int peer, unsigned slot, size_t offset, const void *source,
                             size_t bytes);

    /* Returns true if an adapter makes the puts to that peer and reads registered memory that the CPU may be unable to read:
     * then the source of a put may be such memory, while an operand holds its registration. It stays true. NULL: never. */
    bool (*reads_registered_for)(struct shoal_transport *, int peer);

    /* Returns how many other threads of this rank may make puts. It stays. NULL: none. */
    int (*lanes)(const struct shoal_transport *);
    /* Returns true if the ranks of this host should try whether such threads are faster: some rank may have them, and their
     * number was not set. NULL: false. */
    bool (*tries_lanes)(const struct shoal_transport *);
    /* Sets whether the next puts are left to the calling thread. NULL: they always are. */
    void (*limit_lanes)(struct shoal_transport *, bool is_limited);

    /* Returns true if all puts of the slot have completed locally, so that their sources may be overwritten. NULL: always. */
    bool (*is_locally_complete)(struct shoal_transport *, unsigned slot);

    /* Returns true if everything this rank has published arrives without further progress on this rank. NULL: always. */
    bool (*is_flushed)(struct shoal_transport *);

    /* Returns true if something for the peer, published or put, still needs progress on this rank. A send is done when nothing
     * does. NULL: never. */
    bool (*is_sending)(struct shoal_transport *, int peer);

    /* Increments the peer's counter (slot, this rank). */
    void (*signal)(struct shoal_transport *, int peer, unsigned slot);

    /* Returns this rank's counter (slot, peer): how often the peer has incremented it. */
    uint64_t (*counter)(struct shoal_transport *, int peer, unsigned slot);

    /* Appends a packet to the queue to peer. PENDING if the queue is full now, ERR_MEMORY. */
    enum shoal_status (*push)(struct shoal_transport *, int peer, const struct shoal_packet *packet, const void *data);
    /* Returns the oldest packet from peer, directly followed by its data, or NULL. pop removes it. */
    const struct shoal_packet *(*peek)(struct shoal_transport *, int peer);
    void (*pop)(struct shoal_transport *, int peer);

    /* Wakes sleeping peers that may wait for what was published since the last call. */
    void (*flush)(struct shoal_transport *);

    /* Returns the first peer, from rank `first` on, that ended or left before it completed operation `sequence` (0: any
     * operation), and what is known in *failure; -1 if all are present. Makes system calls: do not call it in each turn of a
     * loop. */
    int (*lost)(struct shoal_transport *, int first, uint64_t sequence, struct shoal_failure *failure);
    /* Returns true if a lost peer is cut off by the network, so that others may also be. NULL: never. */
    bool (*is_cut_off)(struct shoal_transport *, int peer);

    /* Writes one line on a peer's state, such as "alive"; it begins with "stopped" if a signal has stopped the peer. */
    void (*describe)(struct shoal_transport *, int peer, char *text, size_t bytes);

    /* Publishes which rank this rank waits for, -1 if none. Ranks of this host see it, as do remote ranks whose announcement of
     * operation `sequence` or a later one has come. -1 is sent to every rank that was notified of a wait. With
     * SHOAL_WAIT_BLOCKED added, the rank that is waited for is also notified. */
    void (*say_waits_for)(struct shoal_transport *, uint64_t sequence, int rank);
    /* Returns the rank for which the peer has published that it waits, or -1. */
    int (*waits_for)(struct shoal_transport *, int peer);

    /* enter and leave surround steps that touch other ranks' operands. enter returns false once a failure was published: the
     * operands must not be touched afterwards. Until leave, other threads may also touch them, and what reach has returned
     * stays mapped even if the peer frees it. is_failing, between the two or outside, returns true if a rank of this host has
     * begun to publish a failure, which `failed` may not be able to read yet. is_quiet returns true if, after a failure, no
     * living peer is between enter and leave; otherwise *rank_out is such a peer. All four may be NULL if peers' memory is not
     * written by load and store. */
    bool (*enter)(struct shoal_transport *);
    void (*leave)(struct shoal_transport *);
    bool (*is_failing)(struct shoal_transport *);
    bool (*is_quiet)(struct shoal_transport *, int *rank_out);

    /* Publishes the cause of a failure and wakes all ranks; only the first cause counts. Over several hosts the call waits some
     * tenths of a second, until the hosts have agreed on one cause. No other call waits. */
    void (*fail)(struct shoal_transport *, const struct shoal_failure *failure);
    /* Returns true if any rank has published a failure; *failure is then the first cause. Cheap while there is none. */
    bool (*failed)(struct shoal_transport *, struct shoal_failure *failure);
    /* Any thread, async-signal-safe: publishes this rank's cause and wakes all; NULL means shoal_comm_abort. Over several hosts
     * that takes some milliseconds, and this rank's next `failed` waits for it. */
    void (*abort)(struct shoal_transport *, const struct shoal_failure *cause);

    /* One turn of an agreement of survivors (membership/survivors.h). With a proposal, this rank opens the agreement or changes
     * its proposal. Returns PENDING until all have agreed; OK with the agreed view; ERR_PEER_LOST if the others have continued
     * without this rank; ERR_MEMORY. Logs nothing. NULL: not supported. */
    enum shoal_status (*agree)(struct shoal_transport *, const struct shoal_survivors_view *proposal,
                               struct shoal_survivors_view *agreed_out);
    /* Returns the next rank, from `first` on, that the agreement waits for; -1 if there is none. */
    int (*unagreed)(struct shoal_transport *, int first);

    void (*peer_name)(struct shoal_transport *, int peer, struct shoal_transport_peer *name);
    void (*memory)(struct shoal_transport *, struct shoal_memory_usage *usage);

    /* Adds what was sent to the network so far, in all and to each rank. NULL: nothing ever is. */
    void (*traffic)(const struct shoal_transport *, struct shoal_traffic *traffic);

    /* Leaves the communicator, in good order if finalized, and frees the transport. */
    void (*destroy)(struct shoal_transport *, bool finalized);
};

/* Each implementation begins with this. */
struct shoal_transport {
    const struct shoal_transport_ops *ops;
    int rank;
    int size;
    const uint16_t *host; /* host[rank]: ranks with equal numbers reach each other by load and store. NULL: all do */
    bool sends_cheaply;   /* an announcement to a remote rank costs the processor far less than the network's latency */
};

#endif
