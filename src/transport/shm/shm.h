/* The transport of one host: all ranks reach each other's memory by load and store. */
#ifndef SHOAL_TRANSPORT_SHM_SHM_H
#define SHOAL_TRANSPORT_SHM_SHM_H

#include "transport/shm/shm_endpoint.h"

struct shoal_shm_options {
    uint64_t comm; /* the communicator's number, the same on all its ranks, new between them */
    int rank;
    int size;
    struct shoal_shm_peer **peers; /* [size], NULL for the own rank; copied */
    const int *numbers;            /* [size] how messages call the ranks; NULL: as they are. Copied */
    unsigned slots;
    size_t slot_bytes; /* of the staging buffer, for each slot */
    uint64_t counter_start;
    uint32_t timeout_ms; /* to meet the others */
};

/* First half of a collective call of all ranks of the communicator: makes the own segment. The endpoint must outlive the
 * transport. */
SHOAL_MUST_USE enum shoal_status shoal_shm_create(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_options *options,
                                                  struct shoal_transport **transport_out);

/* Second half, to be called until it does not return PENDING; in between, wait (without the lock) until *socket_out can be
 * read. Only then is the transport of use. On an error the caller destroys it. */
SHOAL_MUST_USE enum shoal_status shoal_shm_join(struct shoal_transport *transport, int *socket_out);

/* After shoal_shm_join, for a communicator that has ranks on other hosts, too: where the first cause becomes known to its ranks
 * of this host, and what wakes them. wake is async-signal-safe. */
struct shoal_cause_board *shoal_shm_cause_board(struct shoal_transport *transport);
void shoal_shm_wake(struct shoal_transport *transport);

/* For a communicator that broke and ends: this rank's segment, with a reference for the caller. Late writes may still come into
 * its staging buffer. Its descriptor is closed; with gives_back_pages the pages there are given back. */
struct shoal_segment *shoal_shm_leave_segment(struct shoal_transport *transport, bool gives_back_pages);

/* Bytes from one slot of a staging buffer to the next. */
size_t shoal_shm_staging_stride(size_t slot_bytes);

#endif
