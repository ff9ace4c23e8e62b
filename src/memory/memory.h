/* Every region of bytes that a context knows: memory of shoal_mem_alloc, which peers can map, and memory that the user
 * registered. One struct shoal_memory per context.
 *
 *     address  --shoal_memory_find--> +--------+ --> segment: the pages, for peers to map (segment.h)
 *                                     | region | --> exports: which peers have its descriptor
 *     location --shoal_memory_at----> +--------+ --> registration: what a network adapter keeps of it
 *
 * Both look-ups take O(log n). Regions never overlap. Freed regions of Shoal's own stay mapped in the buffer cache, here and in
 * peers, for the next allocation.
 *
 * Ownership: the memory owns its regions. A pointer to a region is valid while the caller holds the guard, and as long as
 * nobody has freed or deregistered the region. Code that exports or registers a region is told before the region ends or moves.
 *
 * Threads: all calls come under the guard, which is the progress engine's lock. Exceptions: shoal_memory_alloc and
 * shoal_memory_reserve take the guard themselves, since getting pages may take long; call them with or without it (it is
 * recursive). create, destroy and the two set functions come before or after all others. Nothing here blocks or waits. */
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

/* A network adapter's part of a region. The one who registers a region embeds this in a struct of its own and points the region
 * to it. */
struct shoal_registration {
    /* Whether an operation under way still reads the region's memory through the adapter. Called under the guard. */
    bool (*is_busy)(const struct shoal_registration *registration);
    /* The region's memory ends, or moves: use the registration for no further operation. Called under the guard; the region
     * no longer points here then. */
    void (*forget)(struct shoal_registration *registration);
};

/* Others read all fields, and write only `registration` and `is_exported`, `known_to`. */
struct shoal_region {
    uint64_t number; /* names it to peers; from 1 on, unique among the regions that exist */
    enum shoal_region_kind kind;
    enum shoal_region_owner owner;
    char *begin;                             /* as the user sees it */
    size_t bytes;                            /* likewise; 0 is possible for owner OWN */
    struct shoal_segment *segment;           /* NULL: kind HOST */
    struct shoal_registration *registration; /* NULL: no adapter knows it */
    bool *is_exported;                       /* [export_count], by the peer's index: who has its descriptor */
    size_t export_count;
    uint64_t known_to; /* the communicator whose ranks all have its descriptor, as far as was asked last; 0: none */
    uint64_t freed;    /* 0: in use; else it is in the buffer cache, and the least was freed first */
};

/* The bytes from the region's beginning that nothing else may lie in: up to the segment's end where Shoal made it. */
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
    /* The peer has the descriptor of the region of that number, which it must use no more. Called under the guard. */
    void (*revoke)(void *arg, size_t peer, uint64_t number);
    void *arg;
};

struct shoal_memory;

/* The log and the settings (memory_limit, memory_kept) must outlive it. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_memory_create(struct shoal_log *log, const struct shoal_memory_settings *settings,
                                                     struct shoal_memory **memory_out);
/* Ends all regions. Nobody is told: exporter and adapters must be gone. NULL is allowed. */
void shoal_memory_destroy(struct shoal_memory *memory);

/* Until it is set, one thread calls. */
void shoal_memory_set_guard(struct shoal_memory *memory, struct shoal_guard guard);
/* revoke NULL: nobody exports, or nobody does any more. */
void shoal_memory_set_exporter(struct shoal_memory *memory, struct shoal_exporter exporter);
/* Addresses that agree in their low 28 bits collide in some processors' caches. So ranks allocate with different offsets, by
 * this number. Any thread. */
void shoal_memory_set_stagger(struct shoal_memory *memory, int rank);

/* The guard, for who keeps tables of its own under it. */
void shoal_memory_lock(const struct shoal_memory *memory);
void shoal_memory_unlock(const struct shoal_memory *memory);

/* Gives up the buffer cache, which holds a descriptor for each buffer, if the process could not open `count` descriptors more.
 * Takes the guard itself. */
void shoal_memory_spare_descriptors(struct shoal_memory *memory, int count);

/* Gets pages for [begin, begin + bytes) of a segment and counts them against the memory's budget; what is in the buffer cache
 * is given up for it. `what` names the use in messages. ERR_MEMORY: the limit or the machine leaves too little; nothing has
 * changed. Takes the guard itself. */
SHOAL_MUST_USE enum shoal_status shoal_memory_reserve(struct shoal_memory *memory, struct shoal_segment *segment,
                                                      uint64_t begin, uint64_t bytes, const char *what);
/* Takes back the caller's reference to a segment, and counts its pages no longer. NULL for the segment is allowed. */
void shoal_memory_release(struct shoal_memory *memory, struct shoal_segment *segment);

/* Allocates a region for peers; see shoal_mem_alloc in the public header. ERR_ARGUMENT (more than a TiB), ERR_MEMORY,
 * ERR_SYSTEM. Takes the guard itself. A registered range where the new memory lies was unmapped by the user: the registration
 * ends, with a warning. */
SHOAL_MUST_USE enum shoal_status shoal_memory_alloc(struct shoal_memory *memory, size_t bytes, void **address_out);
/* Frees a region of alloc, by the address that alloc returned. ERR_ARGUMENT: there is no such region in use. */
SHOAL_MUST_USE enum shoal_status shoal_memory_free(struct shoal_memory *memory, void *address);
/* The same, but keeps the region in the buffer cache as far as SHOAL_MEMORY_KEPT allows: making it anew costs more than most
 * operations on it. Peers that have it mapped keep it, so call this only where no peer can still write to it. */
SHOAL_MUST_USE enum shoal_status shoal_memory_keep(struct shoal_memory *memory, void *address);

/* Registers a range of the user's, bytes > 0. fd >= 0: a shared mapping of that descriptor from offset on, of which a
 * duplicate is kept; the region is SHARED. fd < 0: the region is HOST. The user keeps the range mapped until deregister.
 * ERR_ARGUMENT (it overlaps a region, fd does not hold it), ERR_MEMORY, ERR_SYSTEM. */
SHOAL_MUST_USE enum shoal_status shoal_memory_register(struct shoal_memory *memory, void *address, size_t bytes, int fd,
                                                       uint64_t offset);
/* Whether a registered range begins there that an adapter still reads. */
bool shoal_memory_is_busy(struct shoal_memory *memory, const void *address);
/* ERR_ARGUMENT: no registered range begins there. ERR_STATE: an adapter still reads from it, and nothing has changed: its pages
 * are the user's, so they cannot be kept. */
SHOAL_MUST_USE enum shoal_status shoal_memory_deregister(struct shoal_memory *memory, void *address);

/* Shoal has mapped memory there: nothing of the user's can be mapped any more. Registrations of ranges that overlap it end,
 * with a warning. */
void shoal_memory_end_stale(struct shoal_memory *memory, const void *address, size_t bytes);

/* The region in use in which all of [address, address + bytes) lie; NULL: there is none. O(log n), and less for the region
 * that was found last. */
struct shoal_region *shoal_memory_find(struct shoal_memory *memory, const void *address, size_t bytes);
/* The region of a location, in use or not; NULL: its number names none. O(log n). */
struct shoal_region *shoal_memory_at(const struct shoal_memory *memory, shoal_location location);
/* The location of an address in a SHARED region. */
static inline shoal_location shoal_region_locate(const struct shoal_region *region, const void *address)
{
    return shoal_location_of(region->number, (uint64_t)((const char *)address - region->segment->base));
}

/* Makes is_exported reach so many peers. False: no memory. */
SHOAL_MUST_USE bool shoal_region_expect_peers(struct shoal_region *region, size_t peers);

/* The exporter has removed the peer of that index, and another may have the index later: forgets what it knew. */
void shoal_memory_forget_peer(struct shoal_memory *memory, size_t peer);

/* Moves a region of alloc to fresh pages at the same addresses, under a new number; peers keep the old pages until they have
 * learned that the old number is revoked. A region stays where it is, which is logged, when no pages are left or an operation
 * under way still reads it through a network adapter; regions of the user always stay. */
void shoal_memory_renew(struct shoal_memory *memory, struct shoal_region *region);

struct shoal_memory_counts {
    size_t regions; /* those in the buffer cache included */
    size_t cached;
    uint64_t cached_bytes;
    uint64_t reserved_bytes; /* of the budget */
};
struct shoal_memory_counts shoal_memory_count(const struct shoal_memory *memory);

#endif
