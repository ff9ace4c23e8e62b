/* The transport of one host: all ranks reach each other's memory by load and store. */
#ifndef SHOAL_TRANSPORT_SHM_SHM_H
#define SHOAL_TRANSPORT_SHM_SHM_H

#include "transport/shm/shm_endpoint.h"

struct shoal_shm_options {
    uint64_t comm; /* the communicator's number, the same on all its ranks and never used between them before */
    int rank;
    int size;
    struct shoal_shm_peer **peers; /* [size], NULL for this rank; copied */
    const int *numbers;            /* [size] the ranks' numbers in messages; NULL if unchanged. Copied */
    unsigned slots;
    size_t slot_bytes; /* of the staging buffer, for each slot */
    uint64_t counter_start;
    uint32_t timeout_ms; /* to meet the others */
};

/* First half of a collective call of all ranks of the communicator: makes this rank's segment. The endpoint must outlive the
 * transport. */
SHOAL_MUST_USE enum shoal_status shoal_shm_create(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_options *options,
                                                  struct shoal_transport **transport_out);

/* Second half. Call it until it does not return PENDING; in between, wait (without the lock) until *socket_out can be read. The
 * transport can be used only afterwards. On an error the caller destroys it. */
SHOAL_MUST_USE enum shoal_status shoal_shm_join(struct shoal_transport *transport, int *socket_out);

/* For a communicator that also has ranks on other hosts, after shoal_shm_join: returns the board on which its ranks of this
 * host learn the first cause. wake, which wakes them, is async-signal-safe. */
struct shoal_cause_board *shoal_shm_cause_board(struct shoal_transport *transport);
void shoal_shm_wake(struct shoal_transport *transport);

/* For a communicator that broke and ends: returns this rank's segment, with a reference for the caller. Late writes may still
 * arrive in its staging buffer. Its descriptor is closed; with gives_back_pages its pages are returned to the system. */
struct shoal_segment *shoal_shm_leave_segment(struct shoal_transport *transport, bool gives_back_pages);

/* Returns the bytes from one slot of a staging buffer to the next. */
size_t shoal_shm_staging_stride(size_t slot_bytes);

#endif
