/* The layout of a rank's segment of a communicator. Every item has one writer.
 *
 *     pad            rank pages, so that equal places of different ranks differ in their low address bits
 *     head           one page: what this rank has completed, whether it left, which rank it waits for, the first cause (in
 *                    rank 0's segment only)
 *     survivors      one page: its messages to other survivors                          written by the owner
 *     announcements       SHOAL_ANNOUNCEMENTS announcements, each alone on two cache lines   written by the owner
 *     payloads       SHOAL_PAYLOADS of 16 KiB                                           written by the owner
 *     counters       slots x size, each alone on a pair of cache lines                  [slot][source] written by source
 *     queue heads    size counters: bytes ever appended to the queue to each rank       written by the owner
 *     queue tails    size counters: bytes ever read from the queue of each rank         written by the owner
 *     staging        slots of slot_bytes, a page apart; reserved when first used        written by the owner
 *     queues         size of SHOAL_PACKET_QUEUE_BYTES; each reserved when first used    written by the owner
 */
#ifndef SHOAL_TRANSPORT_SHM_LAYOUT_H
#define SHOAL_TRANSPORT_SHM_LAYOUT_H

#include <stdatomic.h>

#include "membership/cause_board.h"
#include "membership/survivors_board.h"
#include "transport/transport.h"

struct shoal_shm_counter {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t value;
};

struct shoal_shm_announcement {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t sequence; /* the first 8 bytes of a struct shoal_announcement, written last */
    unsigned char descriptor[sizeof(struct shoal_descriptor) - sizeof(uint64_t)];
    unsigned char payload[SHOAL_PAYLOAD_INLINE];
    shoal_location input;
    shoal_location output;
};

enum shoal_shm_left { SHOAL_SHM_PRESENT, SHOAL_SHM_FINALIZED, SHOAL_SHM_FREED };

struct shoal_shm_head {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t completed;
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t left;
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t is_inside; /* the owner may be accessing operands of others now */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic int waited_for;     /* 1 + the rank that the owner waits for; 0 if none */
    _Alignas(SHOAL_CACHE_PAIR) struct shoal_cause_board cause;
};

_Static_assert(sizeof(struct shoal_shm_head) <= SHOAL_PAGE, "the head is one page");
_Static_assert(sizeof(struct shoal_survivors_board) <= SHOAL_PAGE, "a board is one page");
_Static_assert(sizeof(struct shoal_shm_announcement) == SHOAL_CACHE_PAIR, "an announcement has its pair of lines alone");
_Static_assert(offsetof(struct shoal_shm_announcement, payload) == offsetof(struct shoal_announcement, payload) &&
                   offsetof(struct shoal_shm_announcement, input) == offsetof(struct shoal_announcement, input),
               "read as a struct shoal_announcement");

struct shoal_shm_layout {
    size_t head, survivors, announcements, payloads, counters, queue_heads, queue_tails, staging, queues;
    size_t staging_stride; /* from slot to slot */
    size_t control_bytes;  /* up to the staging buffer */
    size_t total_bytes;
};

static inline size_t shoal_shm_layout_stride(size_t slot_bytes)
{
    return shoal_round_up(slot_bytes, SHOAL_PAGE) + SHOAL_PAGE;
}

static inline struct shoal_shm_layout shoal_shm_layout_of(int rank, int size, unsigned slots, size_t slot_bytes)
{
    struct shoal_shm_layout layout;
    layout.head = (size_t)(rank % 61) * SHOAL_PAGE;
    layout.survivors = layout.head + SHOAL_PAGE;
    layout.announcements = layout.survivors + SHOAL_PAGE;
    layout.payloads = layout.announcements + SHOAL_ANNOUNCEMENTS * sizeof(struct shoal_shm_announcement);
    layout.counters = layout.payloads + SHOAL_PAYLOADS * (size_t)SHOAL_PAYLOAD_MAX;
    layout.queue_heads = layout.counters + slots * (size_t)size * sizeof(struct shoal_shm_counter);
    layout.queue_tails = layout.queue_heads + (size_t)size * sizeof(struct shoal_shm_counter);
    layout.control_bytes = shoal_round_up(layout.queue_tails + (size_t)size * sizeof(struct shoal_shm_counter), SHOAL_PAGE);
    layout.staging = layout.control_bytes;
    layout.staging_stride = shoal_shm_layout_stride(slot_bytes);
    layout.queues = layout.staging + slots * layout.staging_stride;
    layout.total_bytes = layout.queues + (size_t)size * SHOAL_PACKET_QUEUE_BYTES;
    return layout;
}

#endif
