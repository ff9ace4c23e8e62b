/* The network between hosts as a context sees it: one endpoint for all its communicators, the processes of other hosts that it
 * has met, the messages queued for them, and the communicator of each received message.
 *
 * Messages arrive whole, once, in any order. A message from a known process for a communicator that this rank has not made yet
 * is kept for it. A message from an unknown process (session.h) changes nothing except a counter. Unless noted, call these
 * functions with the progress engine's lock held; none blocks except open. */
#ifndef SHOAL_TRANSPORT_FABRIC_NETWORK_H
#define SHOAL_TRANSPORT_FABRIC_NETWORK_H

#include <sys/uio.h>

#include "membership/membership.h"
#include "memory/memory.h"
#include "observe/rejections.h"
#include "transport/fabric/fabric_addresses.h"
#include "transport/fabric/fabric_exports.h"
#include "transport/fabric/fabric_settings.h"
#include "transport/fabric/fabric_sources.h"
#include "transport/fabric/network_lanes.h"
#include "transport/fabric/session.h"
#include "transport/transport.h"
#include "transport/waiting.h"

struct shoal_network;

/* The kinds of messages. */
enum shoal_network_kind {
    SHOAL_NETWORK_ANNOUNCE,  /* body: struct shoal_network_announcement, the payload */
    SHOAL_NETWORK_INCREMENT, /* number: which increment of the counter (slot, source) */
    SHOAL_NETWORK_DATA,      /* like INCREMENT, with data of a put; body: struct shoal_network_put_head, bytes */
    SHOAL_NETWORK_PACKET,    /* number: of the packet; body: struct shoal_packet, its data */
    SHOAL_NETWORK_COMPLETED, /* only the head */
    SHOAL_NETWORK_WAITS,     /* number: count of such messages, and (low 32 bits) 1 + the rank it waits for, 0: none */
    SHOAL_NETWORK_LANES,     /* body: struct shoal_network_lane_offer for each of the sender's lanes */
    SHOAL_NETWORK_REACHED,   /* number: the receiver's lane whose probe the sender has received */
    SHOAL_NETWORK_ARRIVED,   /* number: the sender has received all increments of counter (slot, receiver) up to it */
    SHOAL_NETWORK_KIND_END
};

struct shoal_network_head {
    uint64_t comm;
    uint64_t completed; /* the sender has completed all operations up to it */
    uint64_t taken;     /* bytes of packets from the receiver that the sender has taken */
    uint64_t number;
    uint32_t source; /* the sender's rank in the communicator */
    uint16_t kind;
    uint16_t slot;
};

/* An announcement in a message, with the sender's staging buffer. It is the receiver's credit: from now on it may put there. */
struct shoal_network_announcement {
    struct shoal_descriptor descriptor;
    uint64_t staging_base;
    uint64_t staging_key;
    uint32_t counters; /* the immediate of increment 0 of slot 0, for the receiver's counters at the sender */
    uint16_t has_staging;
    uint16_t bytes; /* of payload */
};

struct shoal_network_put_head {
    uint64_t offset;   /* in the staging slot */
    uint64_t messages; /* number of messages in the put */
};

#define SHOAL_NETWORK_BODY_MAX (SHOAL_FABRIC_MESSAGE_MAX - sizeof(struct shoal_seal) - sizeof(struct shoal_network_head))

_Static_assert(sizeof(struct shoal_network_announcement) + SHOAL_PAYLOAD_MAX <= SHOAL_NETWORK_BODY_MAX,
               "an announcement is one message");
_Static_assert(sizeof(struct shoal_packet) + SHOAL_PACKET_BYTES_MAX <= SHOAL_NETWORK_BODY_MAX, "a packet is one message");
_Static_assert(SHOAL_LANES_MAX * sizeof(struct shoal_network_lane_offer) <= SHOAL_NETWORK_BODY_MAX,
               "all lanes fit into one message");

/* The most bytes, headers included, that a rank sends to a peer before that peer has made the communicator: an announcement for
 * each operation that may be active, its lanes, and a full queue of packets. Other messages answer a message of the peer. */
#define SHOAL_NETWORK_UNEXPECTED_MAX                                                   \
    ((SHOAL_ANNOUNCEMENTS + 1) * SHOAL_FABRIC_MESSAGE_MAX + SHOAL_PACKET_QUEUE_BYTES + \
     SHOAL_PACKET_QUEUE_BYTES / sizeof(struct shoal_packet) * sizeof(struct shoal_network_head))

/* The immediate of a write names the counter that it increments, and which increment it is. Its 32 bits are too few for an
 * authentication code. A write needs the key of the staging buffer that it writes into, and the counter's name (index and age,
 * 22 bits) is drawn at random: with n names given and s slots in use, a random immediate hits a counter with a probability of n
 * * s / 2^26. */
#define SHOAL_NETWORK_INCREMENT_BITS 6
#define SHOAL_NETWORK_SLOT_BITS 4
#define SHOAL_NETWORK_AGE_BITS 6
#define SHOAL_NETWORK_INDEX_BITS 16

struct shoal_network_peer;

/* Counts the writes, or the messages, under way to one peer: in *count and in *total. Each is subtracted when it has completed
 * locally. A write or message that failed stays counted until the peer has ended, so that the communicator does not consider it
 * sent. */
struct shoal_network_load {
    struct shoal_network_peer *peer;
    unsigned *count;
    unsigned *total;
    bool is_messages;
    uint16_t lanes;  /* a bit for each lane through which one has completed */
    unsigned failed; /* of those counted, how many have failed */
    struct shoal_network_load *next_failed;
};

struct shoal_network_unexpected;

/* A process on another host. */
struct shoal_network_peer {
    struct shoal_transport_peer name;
    struct shoal_session session;
    struct shoal_fabric_address address;
    struct shoal_fabric_met *met;
    shoal_fabric_peer at;
    struct shoal_membership *membership; /* of the world in which it was met; NULL if nothing reports its loss */
    int world_rank;                      /* its rank in that world */
    bool is_parted;                      /* its world has ended here: nothing is sent to it or received from it */
    uint64_t broken_ns;                  /* when the network first failed to reach it; 0 if it has not failed */
    char broken[256];                    /* how, and the likely cause */
    struct shoal_reachability reachability;
    unsigned waiting;                            /* queued messages to it */
    unsigned sending;                            /* messages to it that have not completed locally */
    uint64_t refused;                            /* the round of sending in which the provider last accepted no more for it */
    struct shoal_network_unexpected *unexpected; /* its messages for communicators that this rank has not made yet */
    struct shoal_network_peer *next_named;       /* the next one in its bucket of `named`, or in the list of parted peers */
};

/* The receiver of messages for one communicator. */
struct shoal_network_channel {
    uint64_t comm;
    void *arg;
    /* Receives a message whose seal proves that `from` sent it. Returns false if `from` is not the rank that head->source
     * names. */
    bool (*message)(void *arg, const struct shoal_network_peer *from, const struct shoal_network_head *head, const void *body,
                    size_t bytes);
    /* A write of `source` into this rank's staging buffer has incremented a counter; `increment` has the low bits of its
     * number. Returns false if no such increment is expected. */
    bool (*written)(void *arg, int source, unsigned slot, unsigned increment);
    /* The probe of `source`'s lane with this number has arrived: it can reach this rank's lane. Only called with lanes. */
    void (*reached)(void *arg, int source, unsigned lane);
    /* Messages for the communicator were lost before it was made, so it cannot work. Called in shoal_network_channel_open. */
    void (*failed)(void *arg, enum shoal_status status, const char *text);
    void (*turn)(void *arg); /* called after each poll while it wants turns */
    bool wants_turns;
    uint16_t counters; /* index of the counters given to this channel last; 0 if none */
    struct shoal_network_channel *next;
};

struct shoal_network_options {
    struct shoal_log *log;
    const struct shoal_fabric_settings *settings;
    const char *ports;               /* SHOAL_PORTS */
    struct shoal_memory *memory;     /* contains the sources; it must outlive the network. NULL if none are registered */
    const struct shoal_nic *nic;     /* NULL for the provider's choice */
    struct shoal_fabric_share share; /* which of several adapters */
    int threads;                     /* that send and receive, with the one that makes progress: 1 to SHOAL_LANES_MAX + 1 */
    bool is_fixed;                /* the number was set, not chosen from the cores: the limit for adapters over TCP as well */
    void (*wake)(void *wake_arg); /* as in struct shoal_lane_options; not used with one thread */
    void *wake_arg;
};

/* Sits between a network and its endpoint in a test. It receives the endpoint's events and passes them on at a time of its
 * choice, and it may refuse sends. All calls except create and destroy come with the progress engine's lock held. */
struct shoal_network_interposer {
    void *(*create)(int rank, const struct shoal_fabric_handler *to); /* returns NULL if out of memory */
    void (*destroy)(void *between);
    bool (*poll)(void *between, struct shoal_fabric_endpoint *endpoint); /* instead of shoal_fabric_endpoint_poll */
    bool (*refuses)(void *between);                                      /* returns true if a send or a write is PENDING now */
    bool (*is_idle)(const void *between);                                /* returns false if it holds events */
};

/* Applies to networks that are opened from now on; NULL for none. Call it only while no other thread opens one. */
void shoal_network_interpose(const struct shoal_network_interposer *interposer);

/* Returns ERR_UNSUPPORTED if there is no libfabric or no provider, and logs what was looked for and why it was rejected. */
SHOAL_MUST_USE enum shoal_status shoal_network_open(const struct shoal_network_options *options,
                                                    struct shoal_network **network_out);
/* All channels must be closed. network may be NULL. */
void shoal_network_close(struct shoal_network *network);

const char *shoal_network_provider(const struct shoal_network *network);
const struct shoal_fabric_address *shoal_network_address(const struct shoal_network *network);
void shoal_network_print_address(const struct shoal_network *network, const struct shoal_fabric_address *address, char *text,
                                 size_t bytes);

/* Adds a process of another host; `known` has its name, address, session and world. From now on its messages are accepted, so
 * it must be met before it may send. A process that is met in several worlds is a peer of each. */
SHOAL_MUST_USE enum shoal_status shoal_network_meet(struct shoal_network *network, const struct shoal_network_peer *known,
                                                    struct shoal_network_peer **peer_out);
/* Call when the peer's world has ended here and all channels to it are closed: its messages are dropped from now on. The peer
 * is freed at once, or when nothing sent to it is under way. */
void shoal_network_part(struct shoal_network *network, struct shoal_network_peer *peer);

/* Returns how many messages and immediates this endpoint has rejected, by reason. The counts are written with the progress
 * engine's lock held. */
const struct shoal_rejections *shoal_network_rejections(const struct shoal_network *network);

/* Opens the channel and passes it messages that came for its communicator earlier. */
void shoal_network_channel_open(struct shoal_network *network, struct shoal_network_channel *channel);
/* Closes the channel and drops its messages that wait to be sent. */
void shoal_network_channel_close(struct shoal_network *network, struct shoal_network_channel *channel);

/* Sets whether the channel's `turn` is called after each poll, because something may have completed locally. */
void shoal_network_want_turns(struct shoal_network *network, struct shoal_network_channel *channel, bool wants);

/* Assigns counters of the channel that `source` may increment by writes. Returns the immediate for them, or 0 if there are none
 * left. */
uint32_t shoal_network_give_counters(struct shoal_network *network, struct shoal_network_channel *channel, int source);

/* Sends a message, or queues it. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_network_send(struct shoal_network *network, struct shoal_network_load *load,
                                                    const struct shoal_network_head *head, const struct iovec *body,
                                                    size_t body_count);
/* Returns true if many messages wait for the peer, so that the caller should send more only later. */
bool shoal_network_is_full(const struct shoal_network_peer *peer);

/* Returns true if the provider can write that many bytes at once into peers' memory, from source_memory or (NULL) from memory
 * that is not registered. Otherwise messages carry the data. */
bool shoal_network_writes(const struct shoal_network *network, const struct shoal_fabric_memory *source_memory, size_t bytes);
/* Returns true if a message costs the processor little: providers that drive the adapter themselves want sources registered;
 * others make a system call for each message. */
bool shoal_network_sends_cheaply(const struct shoal_network *network);
SHOAL_MUST_USE enum shoal_status shoal_network_register(struct shoal_network *network, void *memory, size_t bytes,
                                                        struct shoal_fabric_memory *memory_out);
void shoal_network_unregister(struct shoal_network *network, struct shoal_fabric_memory *memory);

/* ---- Lanes: other threads that send and receive (network_lanes.h) -------------------------------------------------------- */

/* Returns how many lanes this rank has. 0 if one thread sends and receives, because that is the setting, the provider and the
 * adapters need only one, or the system has refused others. */
int shoal_network_lane_count(const struct shoal_network *network);
/* Returns true if a rank of this host may have lanes, and no number of threads or adapters was set. */
bool shoal_network_tries_lanes(const struct shoal_network *network);
/* Registers memory that peers may write to through lanes. On failure, which is logged, no lane has registered it. */
SHOAL_MUST_USE enum shoal_status shoal_network_register_lanes(struct shoal_network *network, void *memory, size_t bytes,
                                                              struct shoal_network_lane_memory *memory_out);
void shoal_network_unregister_lanes(struct shoal_network *network, struct shoal_network_lane_memory *memory);
/* Writes offers for all lanes of this rank, to a rank of the channel. Returns how many. */
int shoal_network_offer_lanes(struct shoal_network *network, struct shoal_network_channel *channel, int to,
                              const struct shoal_network_lane_memory *memory,
                              struct shoal_network_lane_offer offers_out[SHOAL_LANES_MAX]);
/* Meets a peer's lanes. */
SHOAL_MUST_USE enum shoal_status shoal_network_meet_lanes(struct shoal_network *network,
                                                          const struct shoal_network_lane_offer *offers, int count,
                                                          struct shoal_network_lanes *lanes_out);
void shoal_network_part_lanes(struct shoal_network *network, struct shoal_network_lanes *lanes);
/* Call when the peer reports (REACHED) that it has received the probe of lane `number`. */
void shoal_network_lane_reached(struct shoal_network *network, struct shoal_network_lanes *lanes, uint64_t number);
/* Call when an operation begins that may use lanes. */
void shoal_network_expect_lanes(struct shoal_network *network);
/* Writes of loads in [begin, end) that no lane has begun are never begun; the next poll counts them as complete. Call it when a
 * communicator breaks: callers may then free what it was writing from. */
void shoal_network_drop_lanes(struct shoal_network *network, const void *begin, const void *end);

/* Returns the registration of the region that contains all these bytes, if the provider wants sources registered; the first
 * call makes it. Returns NULL if the provider does not want that, no region that can be registered contains them, or memory is
 * lacking. See fabric_sources.h. */
struct shoal_fabric_source *shoal_network_find_source(struct shoal_network *network, const void *at, size_t bytes);
/* Returns the registrations of memory of devices, or NULL if the adapter does not read such memory. */
struct shoal_fabric_exports *shoal_network_exports(struct shoal_network *network);
/* Returns the registration of device memory that contains all these bytes, for an operand that holds it. Returns NULL for host
 * memory. */
struct shoal_fabric_exported *shoal_network_find_export(const struct shoal_network *network, const void *at, size_t bytes);
/* Returns how many writes have had their source copied into a bounce buffer. */
uint64_t shoal_network_copies(const struct shoal_network *network);

struct shoal_network_write {
    struct shoal_network_load *load;
    const struct shoal_fabric_memory *to; /* the peer's */
    uint64_t offset;
    const void *source;
    const struct shoal_fabric_memory *source_memory;     /* contains the source; NULL if that is not registered */
    const struct shoal_network_lane_memory *lane_memory; /* likewise with lanes; NULL if not registered there */
    unsigned *under_way;                                 /* counts the writes under way from that memory; may be NULL */
    size_t bytes;
    uint32_t immediate;
    struct shoal_network_lanes *lanes; /* the peer's; NULL if this thread must write itself */
};
SHOAL_MUST_USE enum shoal_status shoal_network_put(struct shoal_network *network, const struct shoal_network_write *write);

/* Memory that operations under way may still use when its communicator ends. Each field may be NULL. The loads are this
 * process's: they are kept until everything that they count has completed. `memory` is memory that peers may still write to: it
 * is kept until the network has ended, because no provider reports a peer's last write. */
struct shoal_network_leftover {
    void *loads;               /* freed then */
    const unsigned *under_way; /* [under_way_count] the counts of these loads, in the same memory */
    unsigned under_way_count;
    struct shoal_fabric_memory memory;            /* unregistered then */
    struct shoal_network_lane_memory lane_memory; /* likewise */
    void (*release)(void *arg);                   /* called last */
    void *arg;
};
void shoal_network_leave(struct shoal_network *network, const struct shoal_network_leftover *leftover);

/* Sends queued messages and passes on received ones. Returns true if it received any. */
bool shoal_network_poll(struct shoal_network *network);
/* Returns true if this provider allows sleeping until something comes. */
bool shoal_network_has_descriptor(const struct shoal_network *network);
/* Returns false if something has come, or may have: poll. */
bool shoal_network_may_wait(struct shoal_network *network);
/* Sleeps until something may have come or the descriptor `wake` is readable (-1: none), at most timeout_ns. Call it after
 * shoal_network_may_wait returned true. Returns true if `wake` is readable. Any thread, without the lock. */
bool shoal_network_wait(struct shoal_network *network, int wake, uint64_t timeout_ns);
/* Returns the functions above as a wait source for the progress engine. Valid as long as the network. */
struct shoal_wait_source shoal_network_wait_source(struct shoal_network *network);

#endif
