/* All memory regions that a context knows: memory from shoal_mem_alloc(), which peers can map, and memory that the user
 * registered. There is one struct shoal_memory per context.
 *
 *   address  --shoal_memory_find--> +--------+ --> segment: the pages, for peers to map (segment.h)
 *                                   | region | --> exports: which peers have its descriptor
 *   location --shoal_memory_at----> +--------+ --> registration: a network adapter's data about it
 *
 * Both look-ups take O(log n). Regions never overlap. Freed regions of Shoal's own stay mapped in the buffer cache, here and in
 * peers, for the next allocation.
 *
 * Ownership: struct shoal_memory owns its regions. A pointer to a region is valid while the caller holds the guard, and as long
 * as the region has not been freed or deregistered. Code that exports or registers a region is notified before the region ends
 * or moves.
 *
 * Threads: call everything under the guard, which is the progress engine's lock. Exceptions: shoal_memory_alloc and
 * shoal_memory_reserve acquire the guard themselves, since allocating pages may take long; call them with or without it (it is
 * recursive). Call create, destroy and the two set functions before or after all others. Nothing here blocks or waits. */
#ifndef SHOAL_MEMORY_MEMORY_H
#define SHOAL_MEMORY_MEMORY_H

#include "memory/location.h"
#include "memory/memory_settings.h"
#include "memory/segment.h"

enum shoal_region_kind {
    SHOAL_REGION_HOST,  /* memory of this process; peers cannot map it */
    SHOAL_REGION_SHARED /* in a segment: peers of this host can map it */
};

enum shoal_region_owner {
    SHOAL_REGION_OWN, /* from shoal_memory_alloc; always shared */
    SHOAL_REGION_USER /* from shoal_memory_register */
};

/* A network adapter's data about a region. The code that registers a region embeds this in its own struct, and sets the
 * region's pointer to it. */
struct shoal_registration {
    /* Returns true while an operation under way may still read the region's memory through the adapter. Called under the
     * guard. */
    bool (*is_busy)(const struct shoal_registration *registration);
    /* The region's memory ends or moves: use the registration for no further operation. Called under the guard, when the region
     * no longer points to the registration. */
    void (*forget)(struct shoal_registration *registration);
};

/* Other modules read all fields, and write only `registration`, `is_exported` and `known_to`. */
struct shoal_region {
    uint64_t number; /* names it to peers; from 1 on, unique among existing regions */
    enum shoal_region_kind kind;
    enum shoal_region_owner owner;
    char *begin;                             /* the user's address */
    size_t bytes;                            /* the user's size; 0 is possible for owner OWN */
    struct shoal_segment *segment;           /* NULL for kind HOST */
    bool is_of_device;                       /* a device may write to it at any time: adapters must not read it (decision 41) */
    struct shoal_registration *registration; /* NULL if no adapter knows it */
    bool *is_exported;                       /* [export_count], by the peer's index: the peer has its descriptor */
    size_t export_count;
    uint64_t known_to; /* the communicator whose ranks all have its descriptor, at the last check; 0: none */
    uint64_t freed;    /* 0: in use. Otherwise it is in the buffer cache, and the lowest was freed first */
};

/* Returns the bytes from the region's beginning that nothing else may use: up to the segment's end if Shoal made it. */
static inline size_t shoal_region_extent(const struct shoal_region *region)
{
    return region->owner == SHOAL_REGION_OWN ? region->segment->bytes - (size_t)(region->begin - region->segment->base)
                                             : region->bytes;
}

/* The lock under which the context's tables change. Recursive. */
struct shoal_guard {
    void (*lock)(void *arg);
    void (*unlock)(void *arg);
    void *arg;
};

/* Passes regions to peers. */
struct shoal_exporter {
    /* The peer has the descriptor of the region with that number, and must not use it any longer. Called under the guard. */
    void (*revoke)(void *arg, size_t peer, uint64_t number);
    void *arg;
};

struct shoal_memory;

/* The log and the settings (memory_limit, memory_kept) must outlive it. Returns ERR_MEMORY if out of memory. */
SHOAL_MUST_USE enum shoal_status shoal_memory_create(struct shoal_log *log, const struct shoal_memory_settings *settings,
                                                     struct shoal_memory **memory_out);
/* Ends all regions without notification: exporter and adapters must be gone. NULL is allowed. */
void shoal_memory_destroy(struct shoal_memory *memory);

/* Until the guard is set, only one thread may call. */
void shoal_memory_set_guard(struct shoal_memory *memory, struct shoal_guard guard);
/* revoke may be NULL: then no module exports regions. */
void shoal_memory_set_exporter(struct shoal_memory *memory, struct shoal_exporter exporter);
/* Addresses that agree in their low 28 bits collide in the caches of some processors. So ranks allocate at different offsets,
 * which depend on this number. Any thread. */
void shoal_memory_set_stagger(struct shoal_memory *memory, int rank);

/* The guard, for callers that keep related tables under it. */
void shoal_memory_lock(const struct shoal_memory *memory);
void shoal_memory_unlock(const struct shoal_memory *memory);

/* Empties the buffer cache, which holds a descriptor for each buffer, if the process could not open `count` more descriptors.
 * Acquires the guard itself. */
void shoal_memory_spare_descriptors(struct shoal_memory *memory, int count);

/* Allocates pages for [begin, begin + bytes) of a segment and counts them against the memory's budget. Frees cached buffers
 * if that is needed. `what` names the use in messages. Returns ERR_MEMORY if the limit or the machine leaves too little; then
 * nothing has changed. Acquires the guard itself. */
SHOAL_MUST_USE enum shoal_status shoal_memory_reserve(struct shoal_memory *memory, struct shoal_segment *segment,
                                                      uint64_t begin, uint64_t bytes, const char *what);
/* Drops the caller's reference to a segment, and no longer counts its pages. The segment may be NULL. */
void shoal_memory_release(struct shoal_memory *memory, struct shoal_segment *segment);

/* Allocates a region for peers; see shoal_mem_alloc() in the public header. Returns ERR_ARGUMENT (more than a TiB), ERR_MEMORY
 * or ERR_SYSTEM. Acquires the guard itself. If the new memory is at addresses of a registered range, the user has unmapped that
 * range: its registration ends, with a warning. */
SHOAL_MUST_USE enum shoal_status shoal_memory_alloc(struct shoal_memory *memory, size_t bytes, void **address_out);
/* Frees a region, by the address that shoal_memory_alloc() returned. Returns ERR_ARGUMENT if no such region is in use. */
SHOAL_MUST_USE enum shoal_status shoal_memory_free(struct shoal_memory *memory, void *address);
/* Like shoal_memory_free(), but keeps the region in the buffer cache as far as SHOAL_MEMORY_KEPT allows: allocating it again
 * costs more than most operations on it. Peers that have it mapped keep the mapping, so call this only if no peer can still
 * write to it. */
SHOAL_MUST_USE enum shoal_status shoal_memory_keep(struct shoal_memory *memory, void *address);

/* Allocates a region that a device reads and writes, and that peers can map. It begins at its segment's first byte and is
 * zeroed. It stays on its pages, and they stay mapped, until it is freed; if it never is, until the process ends. `what` names
 * it in messages. Returns ERR_ARGUMENT, ERR_MEMORY or ERR_SYSTEM. Acquires the guard itself. */
SHOAL_MUST_USE enum shoal_status shoal_memory_alloc_for_device(struct shoal_memory *memory, size_t bytes, const char *what,
                                                               void **address_out);
/* Frees such a region. Call it when no device can use it. Acquires the guard itself. */
void shoal_memory_free_for_device(struct shoal_memory *memory, void *address);

/* Registers a range of the user's, bytes > 0. fd >= 0: the range is a shared mapping of that descriptor from offset on; the
 * region is SHARED and keeps a duplicate of fd. fd < 0: the region is HOST. The user must keep the range mapped until it is
 * deregistered. Returns ERR_ARGUMENT (it overlaps a region, or fd does not contain it), ERR_MEMORY or ERR_SYSTEM. */
SHOAL_MUST_USE enum shoal_status shoal_memory_register(struct shoal_memory *memory, void *address, size_t bytes, int fd,
                                                       uint64_t offset);
/* Returns true if a registered range begins there that an adapter still reads. */
bool shoal_memory_is_busy(struct shoal_memory *memory, const void *address);
/* Returns ERR_ARGUMENT if no registered range begins there. Returns ERR_STATE if an adapter still reads from it; then nothing
 * has changed. Its pages are the user's, so Shoal cannot keep them. */
SHOAL_MUST_USE enum shoal_status shoal_memory_deregister(struct shoal_memory *memory, void *address);

/* Call this after Shoal has mapped memory there: the user can have nothing mapped at these addresses. Registrations of ranges
 * that overlap it end, with a warning. */
void shoal_memory_end_stale(struct shoal_memory *memory, const void *address, size_t bytes);

/* Returns the region in use that contains all of [address, address + bytes), or NULL. O(log n), and faster for the region that
 * was found last. */
struct shoal_region *shoal_memory_find(struct shoal_memory *memory, const void *address, size_t bytes);
/* Returns the region of a location, in use or not, or NULL if its number names none. O(log n). */
struct shoal_region *shoal_memory_at(const struct shoal_memory *memory, shoal_location location);
/* Returns the location of an address in a SHARED region. */
static inline shoal_location shoal_region_locate(const struct shoal_region *region, const void *address)
{
    return shoal_location_of(region->number, (uint64_t)((const char *)address - region->segment->base));
}

/* Makes is_exported large enough for `peers` peers. Returns false if out of memory. */
SHOAL_MUST_USE bool shoal_region_expect_peers(struct shoal_region *region, size_t peers);

/* Call this when the exporter has removed the peer of that index: another peer may have the index later. Forgets which regions
 * the peer had. */
void shoal_memory_forget_peer(struct shoal_memory *memory, size_t peer);

/* Moves a region from shoal_memory_alloc() to fresh pages at the same addresses, under a new number. Peers keep the old pages
 * until they learn that the old number is revoked. If no pages are left, or if an operation under way still reads the region
 * through a network adapter, the region stays, which is logged. Regions of the user and of devices always stay. */
void shoal_memory_renew(struct shoal_memory *memory, struct shoal_region *region);

struct shoal_memory_counts {
    size_t regions; /* including those in the buffer cache */
    size_t cached;
    uint64_t cached_bytes;
    uint64_t reserved_bytes; /* counted against the budget */
};
struct shoal_memory_counts shoal_memory_count(const struct shoal_memory *memory);

#endif
