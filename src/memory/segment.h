/* Segments: pieces of memory that other processes can map. A segment is a memfd, passed to peers by descriptor: nothing is
 * named in /dev/shm, and nothing is left behind. Memory is reserved before it is accessed, and refused with a clear message if
 * the container's limit leaves too little, so that no access ends in SIGBUS.
 *
 * Segments are reference counted, because contexts of one process share one mapping: the last shoal_segment_put() unmaps.
 * Reference counts are atomic; everything else belongs to the owner. */
#ifndef SHOAL_MEMORY_SEGMENT_H
#define SHOAL_MEMORY_SEGMENT_H

#include <stdatomic.h>

#include "base/log.h"

/* The bytes that one context may reserve, and has reserved. */
struct shoal_segment_budget {
    uint64_t limit; /* SHOAL_MEMORY_LIMIT; 0: as much as the machine has left */
    _Atomic uint64_t reserved;
};

struct shoal_segment {
    atomic_int references;
    int fd;
    uint64_t bytes;  /* size of the mapping */
    uint64_t offset; /* offset of the mapping in the file */
    char *base;
    uint64_t reserved; /* bytes that count against the owner's budget */
    unsigned pins;     /* number of devices that have its pages registered */
    bool must_discard; /* discard it when the last pin is gone */
    bool is_foreign;   /* Shoal must not unmap it: the caller's mapping (shoal_mem_register()), or left to a device */
};

/* Maps `bytes` of a new memfd, not yet reserved (shoal_segment_reserve()). The name is only for /proc. */
SHOAL_MUST_USE enum shoal_status shoal_segment_create(struct shoal_log *log, const char *name, uint64_t bytes,
                                                      struct shoal_segment **segment_out);

/* Wraps memory that the caller has mapped from fd at offset; duplicates fd. */
SHOAL_MUST_USE enum shoal_status shoal_segment_wrap(struct shoal_log *log, void *base, uint64_t bytes, int fd, uint64_t offset,
                                                    struct shoal_segment **segment_out);

/* Maps a peer's segment. Takes ownership of fd. */
SHOAL_MUST_USE enum shoal_status shoal_segment_map(struct shoal_log *log, int fd, uint64_t bytes, uint64_t offset,
                                                   struct shoal_segment **segment_out);

/* Returns how many bytes can be reserved now. Reads the machine's counters, which takes some microseconds. */
uint64_t shoal_segment_room(const struct shoal_segment_budget *budget);

/* Allocates memory for [begin, begin + bytes) of a created segment. `what` is for the message. Returns ERR_MEMORY on
 * failure. */
SHOAL_MUST_USE enum shoal_status shoal_segment_reserve(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin,
                                                       uint64_t bytes, struct shoal_segment_budget *budget, const char *what);
/* Frees the segment's pages at once, even if others have it mapped: reads then return zero, and writes allocate pages again. If
 * the segment is pinned, this happens when it no longer is. */
void shoal_segment_discard(struct shoal_segment *segment);
/* For a created segment that is passed to no process from now on: frees the pages of [begin, begin + bytes) and closes the
 * descriptor. The addresses stay mapped, for a late write. */
void shoal_segment_strip(struct shoal_segment *segment, uint64_t begin, uint64_t bytes);
/* A device (a network adapter, a GPU) uses the pages by their physical addresses, so a pinned segment keeps its pages. Each pin
 * holds a reference. Call both functions under the owner's lock. */
struct shoal_segment *shoal_segment_pin(struct shoal_segment *segment);
void shoal_segment_unpin(struct shoal_segment *segment);
/* Like shoal_segment_unpin(), for a device that may use the pages until the process ends: they stay mapped until then. */
void shoal_segment_leave_pinned(struct shoal_segment *segment);
/* Call this when the owner drops the segment (and puts it): its memory no longer counts. NULL is allowed. */
void shoal_segment_release(struct shoal_segment *segment, struct shoal_segment_budget *budget);

/* Moves a created segment to fresh pages from `begin` on, with the same contents at the same address. Processes that have it
 * mapped keep the old pages. Returns ERR_STATE if it is pinned. */
SHOAL_MUST_USE enum shoal_status shoal_segment_renew(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin);

struct shoal_segment *shoal_segment_get(struct shoal_segment *segment);
void shoal_segment_put(struct shoal_segment *segment);

#endif
