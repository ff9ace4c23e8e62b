/* A rank's presence on its host: one endpoint per context. It holds what all communicators share: a control connection and a
 * pidfd per local peer, the doorbell that others ring to wake this rank, and the memory that peers may map.
 *
 * The ranks publish facts about themselves, which show which of them are on this host (membership/same_host.h). Connecting an
 * abstract Unix socket of random name proves it: the other end must have this process's user ID and know the job secret.
 *
 * Ranks that are threads of one process share mappings instead of mapping twice.
 *
 * Call these functions with the progress engine's lock held, except those for sleeping. shoal_shm_endpoint_connect waits (poll,
 * with a deadline): it belongs to set-up, when no operation is under way. */
#ifndef SHOAL_TRANSPORT_SHM_ENDPOINT_H
#define SHOAL_TRANSPORT_SHM_ENDPOINT_H

#include <sched.h>

#include "base/assert.h"
#include "base/ranks.h"
#include "bootstrap/bootstrap.h"
#include "membership/member_process.h"
#include "memory/memory.h"
#include "transport/shm/shm_settings.h"
#include "transport/transport.h"
#include "transport/waiting.h"

#define SHOAL_SHM_ID_BYTES 16
#define SHOAL_SHM_PEERS_MAX SHOAL_RANKS_MAX

/* One page of each endpoint. The owner sets asleep before it sleeps; the rank that wakes it clears asleep. */
struct shoal_shm_doorbell {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t asleep;
    uint32_t has_membarrier; /* constant: the owner's rare side of a handshake makes all others pass a full fence */
    cpu_set_t cores;         /* constant: the owner's affinity mask at creation; empty if unknown */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t place; /* see shoal_shm_endpoint_meet_on_core; 0 if not published yet */
};

struct shoal_shm_mapped {
    uint64_t id;
    struct shoal_segment *segment;
    bool has_ended; /* the peer has freed it; mapped until no transport is inside (shoal_shm_endpoint_enter) */
};

struct shoal_shm_peer {
    unsigned char id[SHOAL_SHM_ID_BYTES];
    size_t index;  /* among the endpoint's peers */
    unsigned uses; /* worlds in this process that it belongs to */
    struct shoal_transport_peer name;
    int socket;
    struct shoal_membership_process process;
    struct shoal_segment *doorbell_segment;
    struct shoal_shm_doorbell *doorbell;
    struct shoal_shm_mapped *mapped; /* the peer's memory mapped here, by its numbers; of equal ones only the first is in use */
    size_t mapped_count;
    uint64_t *unsaid; /* numbers of regions that ended and that the peer does not know about yet: the link was full */
    size_t unsaid_count;
    uint64_t place; /* what its doorbell last published */
};

/* A peer's segment of a communicator that is being made. */
struct shoal_shm_joining {
    uint64_t comm;
    const struct shoal_shm_peer *peer;
    struct shoal_segment *segment; /* NULL if the peer could not make it */
};

/* A descriptor of a peer's memory on its device, for a communicator. */
struct shoal_shm_device {
    uint64_t comm;
    const struct shoal_shm_peer *peer;
    int descriptor; /* -1 if the peer has none, */
    bool is_lost;   /* or this process could not receive it */
};

struct shoal_shm_endpoint {
    struct shoal_log *log;
    const struct shoal_shm_settings *settings;
    struct shoal_memory *memory; /* the context's; its lock also guards the endpoint */
    unsigned char id[SHOAL_SHM_ID_BYTES];
    struct shoal_segment *doorbell_segment;
    struct shoal_shm_doorbell *doorbell;
    struct shoal_shm_peer **peers; /* [peer_count]; NULL marks a free place */
    size_t peer_count;
    unsigned meetings;  /* under way: no peer is removed before they end */
    uint64_t oom_kills; /* shoal_topology_oom_kills at the start */
    unsigned locates;
    unsigned inside; /* transports between enter and leave */
    bool must_unmap; /* a mapping has ended while a transport was inside */
    struct shoal_shm_joining *joining;
    size_t joining_count;
    struct shoal_shm_device *devices; /* not taken yet */
    size_t device_count;
    _Atomic uint64_t fences; /* how often this process made all others pass a fence; for tests */
};

/* The memory must outlive the endpoint, which exports its regions. */
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_create(struct shoal_log *log, const struct shoal_shm_settings *settings,
                                                           struct shoal_memory *memory,
                                                           struct shoal_shm_endpoint **endpoint_out);
/* endpoint may be half-built or NULL. All transports on it must be destroyed before. */
void shoal_shm_endpoint_destroy(struct shoal_shm_endpoint *endpoint);

/* The location of a rank. */
struct shoal_shm_place {
    struct shoal_shm_peer *peer; /* NULL for this rank and for ranks on other hosts */
    struct shoal_transport_peer name;
    uint16_t host; /* numbered in the order of the hosts' lowest ranks */
};

/* Finds out on which host each rank of the bootstrap is, and connects to those of this host; fills places_out[rank]. Each peer
 * in places_out gets one more use, which the caller ends with shoal_shm_endpoint_part. ERR_AUTH, ERR_TIMEOUT (named),
 * ERR_SYSTEM. ERR_STATE, on all ranks: two ranks have one endpoint, such as threads of a process that share a context. */
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_connect(struct shoal_shm_endpoint *endpoint,
                                                            struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                                            struct shoal_shm_place *places_out);

/* Ends one use of a peer. The last one ends the connection to it and unmaps its memory; a later meeting connects again. */
void shoal_shm_endpoint_part(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer);

/* For making a communicator. offer passes this rank's segment of communicator `comm` (a number new between the ranks) to a
 * peer; NULL means that this rank has none. It returns false if the link is full now. take receives the peer's segment: OK with
 * a reference for the caller, PENDING while it has not come, ERR_PEER_LOST if the peer has none. */
bool shoal_shm_endpoint_offer(struct shoal_shm_peer *peer, uint64_t comm, struct shoal_segment *own);
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_take(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer,
                                                         uint64_t comm, struct shoal_segment **segment_out);
/* Drops the segments that peers have offered for a communicator, because this rank does not make it. */
void shoal_shm_endpoint_decline(struct shoal_shm_endpoint *endpoint, uint64_t comm);

/* Like shoal_shm_endpoint_offer() and its take function, for a descriptor of memory on a device. The caller keeps `descriptor`;
 * -1 means that it has none. take passes *descriptor_out to the caller; ERR_PEER_LOST: the peer's process has ended, so none
 * will come. */
bool shoal_shm_endpoint_offer_device(struct shoal_shm_peer *peer, uint64_t comm, int descriptor);
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_take_device(struct shoal_shm_endpoint *endpoint,
                                                                struct shoal_shm_peer *peer, uint64_t comm,
                                                                int *descriptor_out);

/* Reads the peers' notices of new and freed memory. Then notifies them of this rank's regions that ended while the link was
 * full. */
void shoal_shm_endpoint_drain(struct shoal_shm_endpoint *endpoint);

/* The ranks of a communicator that must be able to reach memory. peers[rank] is NULL for this rank. */
struct shoal_shm_group {
    uint64_t comm;
    struct shoal_shm_peer **peers;
    int size;
};

/* Returns the location of [address, address + bytes) for a group, 0 if one of its ranks cannot map it (yet). */
shoal_location shoal_shm_endpoint_locate(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_group *group,
                                         const void *address, size_t bytes);
/* Returns the peer's memory as an address here, or NULL if the peer has not sent it. */
void *shoal_shm_endpoint_reach(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, shoal_location location,
                               size_t bytes);

/* A transport calls enter before this rank accesses peers' memory and leave after it, once each. In between, helper threads may
 * access that memory without the lock, and a peer that failed may free it. So while any transport is inside, each address that
 * shoal_shm_endpoint_reach() has returned stays mapped, even if the peer uses the memory's number for other memory. Look-ups no
 * longer find memory that was freed; the last leave unmaps it. A transport's peers must stay in use
 * (shoal_shm_endpoint_part) until it is destroyed. */
static inline void shoal_shm_endpoint_enter(struct shoal_shm_endpoint *endpoint)
{
    endpoint->inside++;
}
void shoal_shm_endpoint_unmap_ended(struct shoal_shm_endpoint *endpoint); /* only for leave */
static inline void shoal_shm_endpoint_leave(struct shoal_shm_endpoint *endpoint)
{
    SHOAL_ASSERT(endpoint->inside > 0);
    if (--endpoint->inside == 0 && SHOAL_UNLIKELY(endpoint->must_unmap))
        shoal_shm_endpoint_unmap_ended(endpoint);
}

/* Returns this rank's memory at a location, or NULL if it has none there. */
void *shoal_shm_endpoint_own(const struct shoal_shm_endpoint *endpoint, shoal_location location);

/* For sleeping. shoal_shm_endpoint_doze announces a sleep: a ring after it ends the sleep. The caller then looks once more for
 * work and, if there is none, sleeps. Any thread. */
void shoal_shm_endpoint_doze(struct shoal_shm_endpoint *endpoint);
/* Like shoal_shm_endpoint_doze(), for a sleep of at most a millisecond: a peer that rings at this very moment may be missed
 * until the sleep ends. It does not interrupt the other processes. */
void shoal_shm_endpoint_doze_briefly(struct shoal_shm_endpoint *endpoint);
void shoal_shm_endpoint_sleep(struct shoal_shm_endpoint *endpoint, uint64_t timeout_ns);
void shoal_shm_endpoint_awake(struct shoal_shm_endpoint *endpoint);

/* Returns a table of functions for the progress engine: those for sleeping, shoal_shm_endpoint_drain(), and the two about
 * cores. The table is valid as long as the endpoint. */
struct shoal_doorbell shoal_shm_endpoint_doorbell(struct shoal_shm_endpoint *endpoint);

/* Handshakes of the form "store mine, look at yours" need a full fence on both sides. If both processes have the kernel's
 * membarrier, the rare side (going to sleep, taking memory back) makes all others pass a fence, and the frequent side needs
 * none. */
void shoal_shm_endpoint_fence_all(struct shoal_shm_endpoint *endpoint);
/* Returns true if the frequent side needs its own fence towards that peer. */
static inline bool shoal_shm_peer_needs_fence(const struct shoal_shm_endpoint *endpoint, const struct shoal_shm_peer *peer)
{
    return !endpoint->doorbell->has_membarrier || !peer->doorbell->has_membarrier;
}

/* Wakes the sleeper at the doorbell. Async-signal-safe, any thread. The woken thread sees everything that the caller wrote
 * before a full fence. */
static inline bool shoal_shm_doorbell_is_asleep(struct shoal_shm_doorbell *doorbell)
{
    /* relaxed: the caller's fence orders this load after the caller's stores. */
    return atomic_load_explicit(&doorbell->asleep, memory_order_relaxed) != 0;
}
void shoal_shm_doorbell_ring(struct shoal_shm_doorbell *doorbell);

/* Call it with the lock held, from a wait that finds nothing. Publishes that this rank is on `core`. *taken_out receives that
 * core and the cores of all peers that have published theirs since the last call: these peers also wait, and are awake. Returns
 * true if a peer is on this core and this rank has the greater ID, so that this rank must leave. */
bool shoal_shm_endpoint_meet_on_core(struct shoal_shm_endpoint *endpoint, int core, cpu_set_t *taken_out);

/* Returns how many cores this rank and its peers here may use together, by their affinity masks; a launcher that binds ranks
 * leaves each of them some of these cores. Returns 0 if the system did not report masks. */
int shoal_shm_endpoint_cores(const struct shoal_shm_endpoint *endpoint);

#endif
