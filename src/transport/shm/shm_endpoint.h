/* A rank's presence on its host: one endpoint per context. It holds what all communicators share: a control connection and a
 * pidfd per local peer, the doorbell others ring to wake this rank, the memory that peers may map.
 *
 * Which ranks are on this host follows from what they say of themselves (membership/same_host.h). It is proved by connecting an
 * abstract Unix socket of random name, whose other end must have our user id and know the job secret.
 *
 * Ranks that are threads of one process share mappings instead of mapping twice.
 *
 * Calls come under the progress engine's lock, but for those about sleeping. shoal_shm_endpoint_connect waits (poll, with a
 * deadline): it is set-up, before there is any progress to make. */
#ifndef SHOAL_TRANSPORT_SHM_ENDPOINT_H
#define SHOAL_TRANSPORT_SHM_ENDPOINT_H

#include <sched.h>

#include "base/ranks.h"
#include "bootstrap/bootstrap.h"
#include "membership/member_process.h"
#include "memory/memory.h"
#include "transport/shm/shm_settings.h"
#include "transport/transport.h"
#include "transport/waiting.h"

#define SHOAL_SHM_ID_BYTES 16
#define SHOAL_SHM_PEERS_MAX SHOAL_RANKS_MAX

/* One page of each endpoint. asleep is set by the owner before it sleeps and cleared by who wakes it. */
struct shoal_shm_doorbell {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t asleep;
    uint32_t has_membarrier; /* constant: the owner's rare side of a handshake makes all others pass a full fence */
    cpu_set_t cores;         /* constant: the owner's affinity mask when it came; empty where the system did not tell */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t place; /* see shoal_shm_endpoint_meet_on_core; 0: not said yet */
};

struct shoal_shm_mapped {
    uint64_t id;
    struct shoal_segment *segment;
};

struct shoal_shm_peer {
    unsigned char id[SHOAL_SHM_ID_BYTES];
    size_t index;  /* among the endpoint's peers */
    unsigned uses; /* worlds here that it belongs to */
    struct shoal_transport_peer name;
    int socket;
    struct shoal_membership_process process;
    struct shoal_segment *doorbell_segment;
    struct shoal_shm_doorbell *doorbell;
    struct shoal_shm_mapped *mapped; /* the peer's memory that is mapped here, by its numbers */
    size_t mapped_count;
    uint64_t *unsaid; /* numbers of regions that ended: the link was full, so the peer does not know yet */
    size_t unsaid_count;
    uint64_t place; /* what its doorbell said last */
};

/* A peer's segment of a communicator that is being made. */
struct shoal_shm_joining {
    uint64_t comm;
    const struct shoal_shm_peer *peer;
    struct shoal_segment *segment; /* NULL: the peer could not make it */
};

/* A descriptor of a peer's memory on its device, for a communicator. */
struct shoal_shm_device {
    uint64_t comm;
    const struct shoal_shm_peer *peer;
    int descriptor; /* -1: it has none, */
    bool is_lost;   /* or this process could not take it */
};

struct shoal_shm_endpoint {
    struct shoal_log *log;
    const struct shoal_shm_settings *settings;
    struct shoal_memory *memory; /* the context's; its guard is the endpoint's, too */
    unsigned char id[SHOAL_SHM_ID_BYTES];
    struct shoal_segment *doorbell_segment;
    struct shoal_shm_doorbell *doorbell;
    struct shoal_shm_peer **peers; /* [peer_count]; NULL: a place that is free */
    size_t peer_count;
    unsigned meetings;  /* under way: until they have ended, no peer goes */
    uint64_t oom_kills; /* of shoal_topology_oom_kills, at the beginning */
    unsigned locates;
    struct shoal_shm_joining *joining;
    size_t joining_count;
    struct shoal_shm_device *devices; /* that were not taken yet */
    size_t device_count;
    _Atomic uint64_t fences; /* how often all other processes were made to pass a fence; for tests */
};

/* The memory must outlive the endpoint, which exports its regions. */
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_create(struct shoal_log *log, const struct shoal_shm_settings *settings,
                                                           struct shoal_memory *memory,
                                                           struct shoal_shm_endpoint **endpoint_out);
/* Accepts a half-built endpoint and NULL. All transports on it must be gone. */
void shoal_shm_endpoint_destroy(struct shoal_shm_endpoint *endpoint);

/* Where a rank is. */
struct shoal_shm_place {
    struct shoal_shm_peer *peer; /* NULL: the own rank, or on another host */
    struct shoal_transport_peer name;
    uint16_t host; /* numbered in the order of the hosts' lowest ranks */
};

/* Finds out on which host each rank of the bootstrap is, and connects to those of this host; places_out[rank]. Each peer in
 * places_out has one use more, which the caller ends with shoal_shm_endpoint_part. ERR_AUTH, ERR_TIMEOUT (named), ERR_SYSTEM.
 * ERR_STATE, on all ranks: two ranks have one endpoint, as threads of a process have that share a context. */
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_connect(struct shoal_shm_endpoint *endpoint,
                                                            struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                                            struct shoal_shm_place *places_out);

/* Ends one use of a peer. With the last one the connection to it and all that is mapped of it go; a later meeting connects
 * anew. */
void shoal_shm_endpoint_part(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer);

/* Making a communicator. offer passes this rank's segment of communicator `comm` (a number new between the ranks) to a peer;
 * NULL says that there is none; false when the link is full now. take receives the peer's segment: OK with a reference for the
 * caller, PENDING while it has not come, ERR_PEER_LOST when the peer has none. */
bool shoal_shm_endpoint_offer(struct shoal_shm_peer *peer, uint64_t comm, struct shoal_segment *own);
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_take(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer,
                                                         uint64_t comm, struct shoal_segment **segment_out);

/* The same for a descriptor of memory on a device, which stays the caller's; -1 says that there is none. take:
 * *descriptor_out is the caller's; ERR_PEER_LOST: the peer's process has ended, and none comes any more. */
bool shoal_shm_endpoint_offer_device(struct shoal_shm_peer *peer, uint64_t comm, int descriptor);
SHOAL_MUST_USE enum shoal_status shoal_shm_endpoint_take_device(struct shoal_shm_endpoint *endpoint,
                                                                struct shoal_shm_peer *peer, uint64_t comm,
                                                                int *descriptor_out);

/* Reads what peers have sent about their memory, new and gone. Then tells them of own regions that ended while the link was
 * full. */
void shoal_shm_endpoint_drain(struct shoal_shm_endpoint *endpoint);

/* The ranks of a communicator that shall reach memory. peers[rank] is NULL for the own rank. */
struct shoal_shm_group {
    uint64_t comm;
    struct shoal_shm_peer **peers;
    int size;
};

/* Where [address, address + bytes) is for a group, 0 when some of it cannot map it (yet). */
shoal_location shoal_shm_endpoint_locate(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_group *group,
                                         const void *address, size_t bytes);
/* The peer's memory as an address here; NULL when it has not sent it. */
void *shoal_shm_endpoint_reach(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, shoal_location location,
                               size_t bytes);
/* The own memory at a location; NULL: there is none. */
void *shoal_shm_endpoint_own(const struct shoal_shm_endpoint *endpoint, shoal_location location);

/* Sleeping. shoal_shm_endpoint_doze says "about to sleep": a ring after it ends the sleep. The caller then looks once more for
 * work and, if there is none, sleeps. Any thread. */
void shoal_shm_endpoint_doze(struct shoal_shm_endpoint *endpoint);
/* The same before a sleep of a millisecond at most: a peer that rings at this very moment may be missed until its end. It does
 * not interrupt the other processes. */
void shoal_shm_endpoint_doze_briefly(struct shoal_shm_endpoint *endpoint);
void shoal_shm_endpoint_sleep(struct shoal_shm_endpoint *endpoint, uint64_t timeout_ns);
void shoal_shm_endpoint_awake(struct shoal_shm_endpoint *endpoint);

/* All of these, shoal_shm_endpoint_drain and the two about cores, for the progress engine. Valid as long as the endpoint. */
struct shoal_doorbell shoal_shm_endpoint_doorbell(struct shoal_shm_endpoint *endpoint);

/* Handshakes of the form "store mine, look at yours" need a full fence on both sides. Where both processes have the kernel's
 * membarrier, the rare side (going to sleep, taking memory back) makes all others pass a fence, and the frequent side needs
 * none. */
void shoal_shm_endpoint_fence_all(struct shoal_shm_endpoint *endpoint);
/* Whether the frequent side needs its own fence towards that peer. */
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

/* Call it under the lock, from a wait that finds nothing. Publishes that this rank is on `core`. *taken_out receives that core
 * and the cores of all peers that have published theirs since the last call: these peers wait, too, and are awake. Returns true
 * when a peer is on this core and this rank has the greater id, so that this rank must leave. */
bool shoal_shm_endpoint_meet_on_core(struct shoal_shm_endpoint *endpoint, int core, cpu_set_t *taken_out);

/* How many cores this rank and its peers here may use together, by their affinity masks: a launcher that binds each rank leaves
 * each a part of them. 0: the system did not tell. */
int shoal_shm_endpoint_cores(const struct shoal_shm_endpoint *endpoint);

#endif
