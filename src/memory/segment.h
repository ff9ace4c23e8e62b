/* Segments: pieces of memory that other processes can map. A segment is a memfd (nothing is named in /dev/shm, nothing is left
 * behind), passed to peers by descriptor. Memory is reserved before it is touched, and refused with a clear text where the
 * container's limit does not leave it, so that no touch ends in SIGBUS.
 *
 * Reference counted, because contexts of one process share one mapping: the last shoal_segment_put unmaps. Reference counts are
 * atomic; all else belongs to the owner. */
#ifndef SHOAL_MEMORY_SEGMENT_H
#define SHOAL_MEMORY_SEGMENT_H

#include <stdatomic.h>

#include "base/log.h"

/* The bytes that one context may reserve, and has reserved. */
struct shoal_segment_budget {
    uint64_t limit; /* SHOAL_MEMORY_LIMIT; 0: what the machine leaves */
    _Atomic uint64_t reserved;
};

struct shoal_segment {
    atomic_int references;
    int fd;
    uint64_t bytes;  /* of the mapping */
    uint64_t offset; /* where the mapping begins in the file */
    char *base;
    uint64_t reserved; /* what counts against the owner's budget */
    unsigned pins;     /* who has its pages registered with a device */
    bool must_discard; /* when the last pin has gone */
    bool is_foreign;   /* the caller's mapping (shoal_mem_register): not ours to unmap */
};

/* Maps `bytes` of a new memfd, not yet reserved (shoal_segment_reserve), named for /proc only. */
SHOAL_MUST_USE enum shoal_status shoal_segment_create(struct shoal_log *log, const char *name, uint64_t bytes,
                                                      struct shoal_segment **segment_out);

/* Wraps memory that the caller has mapped from fd at offset; duplicates fd. */
SHOAL_MUST_USE enum shoal_status shoal_segment_wrap(struct shoal_log *log, void *base, uint64_t bytes, int fd, uint64_t offset,
                                                    struct shoal_segment **segment_out);

/* Maps a peer's segment. Takes fd. */
SHOAL_MUST_USE enum shoal_status shoal_segment_map(struct shoal_log *log, int fd, uint64_t bytes, uint64_t offset,
                                                   struct shoal_segment **segment_out);

/* How many bytes can be reserved now. Reads the machine's counters: some microseconds. */
uint64_t shoal_segment_room(const struct shoal_segment_budget *budget);

/* Gets memory for [begin, begin + bytes) of a created segment. `what` is for the message. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_segment_reserve(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin,
                                                       uint64_t bytes, struct shoal_segment_budget *budget, const char *what);
/* Gives its pages back at once, whoever has it mapped: what is read there is zero, what is written has pages again. Where it is
 * pinned, this happens when it no longer is. */
void shoal_segment_discard(struct shoal_segment *segment);
/* For a created segment that is passed to nobody from now on: gives back the pages of [begin, begin + bytes) and closes the
 * descriptor. The addresses stay mapped, for a late write. */
void shoal_segment_strip(struct shoal_segment *segment, uint64_t begin, uint64_t bytes);
/* A device (a network adapter, a GPU) uses the pages by their physical addresses, so a pinned segment keeps its pages. Pinning
 * takes a reference. Call both functions under the owner's lock. */
struct shoal_segment *shoal_segment_pin(struct shoal_segment *segment);
void shoal_segment_unpin(struct shoal_segment *segment);
/* The owner gives the segment up (and puts it): its memory no longer counts. NULL is allowed. */
void shoal_segment_release(struct shoal_segment *segment, struct shoal_segment_budget *budget);

/* Gives a created segment fresh pages from `begin` on, with the same contents at the same address; who has mapped it keeps the
 * old ones. ERR_STATE: it is pinned. */
SHOAL_MUST_USE enum shoal_status shoal_segment_renew(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin);

struct shoal_segment *shoal_segment_get(struct shoal_segment *segment);
void shoal_segment_put(struct shoal_segment *segment);

#endif
