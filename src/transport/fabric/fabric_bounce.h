/* Bounce buffers: a ring of registered memory. The sources of writes are copied there if they are neither in the staging buffer
 * nor in a region that can be registered (fabric_sources.h). Room is taken in order, given back in any order, and becomes free
 * in order. This file registers nothing and does not use libfabric. One thread.
 *
 * A cache of registrations of any memory would save the copy, but has three drawbacks. It must learn of every munmap of the
 * process: efa's own cache, used if it is not offered FI_MR_LOCAL, patches munmap for that. Registering data that are written
 * once costs more than copying them. And registered pages are missing in forked children. */
#ifndef SHOAL_TRANSPORT_FABRIC_BOUNCE_H
#define SHOAL_TRANSPORT_FABRIC_BOUNCE_H

#include "base/compiler.h"

/* The bytes that a network of 400 Gbit/s carries in 80 us: a copy completes after the network's own 15 to 30 us, and after as
 * long again until the next poll. Also twice the largest default put of a plan: a staging slot, 8 parts of 256 KiB. */
#define SHOAL_FABRIC_BOUNCE_BYTES ((size_t)4 << 20)
#define SHOAL_FABRIC_BOUNCED_MAX 256 /* buffers */

struct shoal_fabric_bounce {
    char *memory; /* NULL if there is none */
    size_t bytes;
    uint64_t first, next; /* numbers of the oldest buffer and of the next one */
    uint64_t end;         /* where the newest buffer ends; positions only rise, and a byte is at position % bytes */
    uint64_t begins[SHOAL_FABRIC_BOUNCED_MAX];
    bool is_back[SHOAL_FABRIC_BOUNCED_MAX];
};

/* Returns false if out of memory. fini may be called after that, and on a struct that is all zero. */
bool shoal_fabric_bounce_init(struct shoal_fabric_bounce *bounce, size_t bytes);
void shoal_fabric_bounce_fini(struct shoal_fabric_bounce *bounce);

/* Returns room for that many contiguous bytes, at most the whole ring; *number_out is for give_back. Returns NULL if there is
 * no room now. */
char *shoal_fabric_bounce_take(struct shoal_fabric_bounce *bounce, size_t bytes, uint64_t *number_out);
void shoal_fabric_bounce_give_back(struct shoal_fabric_bounce *bounce, uint64_t number);

#endif
