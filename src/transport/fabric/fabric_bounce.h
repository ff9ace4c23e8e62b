/* Bounce buffers: registered memory for the sources of writes that lie neither in the staging buffer nor in a region that can
 * be registered (fabric_sources.h): a ring of bytes. Room is taken in order, given back in any, and is free again in order. It
 * registers nothing and knows no libfabric. One thread.
 *
 * A cache of registrations of any memory would save the copy, but it has to learn of every munmap of the process (efa's own
 * cache, where it is not offered FI_MR_LOCAL, patches munmap for that), to register what is written once costs more than to
 * copy it, and registered pages are missing in children that fork. */
#ifndef SHOAL_TRANSPORT_FABRIC_BOUNCE_H
#define SHOAL_TRANSPORT_FABRIC_BOUNCE_H

#include "base/compiler.h"

/* The bytes that a network of 400 Gbit/s carries in 80 us: from a copy to its completion it takes the network's own 15 to 30
 * us, and as much again until the next poll. And twice what one put of a plan can have by default: a staging slot, 8 parts of
 * 256 KiB. */
#define SHOAL_FABRIC_BOUNCE_BYTES ((size_t)4 << 20)
#define SHOAL_FABRIC_BOUNCED_MAX 256 /* buffers */

struct shoal_fabric_bounce {
    char *memory; /* NULL: none */
    size_t bytes;
    uint64_t first, next; /* numbers of the oldest buffer and of the next one */
    uint64_t end;         /* where the newest one ends; positions go on rising, a byte is at position % bytes */
    uint64_t begins[SHOAL_FABRIC_BOUNCED_MAX];
    bool is_back[SHOAL_FABRIC_BOUNCED_MAX];
};

/* False: no memory. fini is allowed after that, and of one that is all zero. */
bool shoal_fabric_bounce_init(struct shoal_fabric_bounce *bounce, size_t bytes);
void shoal_fabric_bounce_fini(struct shoal_fabric_bounce *bounce);

/* Room for so many bytes in a row, at most all; its number is for give_back. NULL: not now. */
char *shoal_fabric_bounce_take(struct shoal_fabric_bounce *bounce, size_t bytes, uint64_t *number_out);
void shoal_fabric_bounce_give_back(struct shoal_fabric_bounce *bounce, uint64_t number);

#endif
