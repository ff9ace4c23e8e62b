/* Sums that the devices of each host make among themselves: where the engine and the streams of a device meet. Nothing here
 * calls a driver or waits; it counts, as device/device_ring.h does.
 *
 * Each rank has slots in its device's memory, which the devices of the other ranks of its host reach. A sum passes through them
 * in units. A unit lies in the same slot of all ranks. A rank does three works on it, over several hosts five, each on a stream
 * of its own:
 *
 *     bring       the unit of the own input            -> the own slot
 *     reduce      the own slice, in the slots of all   -> the own slot      a kernel
 *     hand out    the own slice                        -> host memory       where the engine sums it with those of other hosts
 *     take back   the own slice                        <- host memory
 *     gather      each slice, in its rank's slot       -> the own output
 *
 *     stream   wait begin >= k, work, ended = k      engine   begin = k; ended >= k: the next step of the plan
 *
 * The poster puts all works on streams with the call. The engine begins each one when its plan comes to that
 * step (collective/peers.c). So ranks wait for each other in the plan, and a stream waits for the engine of its own process
 * only: unit u lies in slot u % slots, as use k = u / slots + 1, and `slots` is the number of chunks that the engine has under
 * way at most, so a slot is free when its next use begins.
 *
 * Threads: as of device/device_ring.h. The poster reserves units and puts works on streams, one thread at a time by a lock of
 * its own; what the engine calls comes under the progress engine's lock; both may run at once. */
#ifndef SHOAL_DEVICE_DEVICE_STAGE_H
#define SHOAL_DEVICE_DEVICE_STAGE_H

#include "device/device_ring.h"

/* On one host the first three are all. */
enum shoal_device_work {
    SHOAL_DEVICE_BRING,
    SHOAL_DEVICE_REDUCE,
    SHOAL_DEVICE_GATHER,
    SHOAL_DEVICE_HAND_OUT,
    SHOAL_DEVICE_TAKE_BACK,
    SHOAL_DEVICE_WORKS
};

struct shoal_device_stage_options {
    unsigned slots;
    size_t slot_bytes; /* of whole cache lines for each rank of all hosts */
    int rank, ranks;   /* of the host */
    int hosts;         /* with as many ranks each */
    uint64_t start;    /* of all counters */
};

struct shoal_device_stage {
    struct shoal_device_stage_options options;
    unsigned works;
    uint64_t reserved;                                           /* units so far; the poster's */
    struct shoal_device_ring_counter *begin[SHOAL_DEVICE_WORKS]; /* [slots] written by the engine */
    struct shoal_device_ring_counter *ended[SHOAL_DEVICE_WORKS]; /* [slots] written by streams */
    char *slices;   /* [2 * slots] in host memory: what is handed out, and what is taken back, of a slot; NULL: on one host */
    bool is_let_go; /* under the progress engine's lock */
};

/* A call on its way through a stage. Freed when both the engine has dropped it and the poster has left it. */
struct shoal_device_sum {
    struct shoal_device_stage *stage;
    atomic_int holders;
    atomic_bool is_on_streams;
    size_t element; /* bytes */
    size_t count;   /* elements */
    size_t unit_elements;
    uint64_t first; /* its first unit's number in the stage */
    uint64_t units;
};

/* ---- The stage ----------------------------------------------------------------------------------------------------------- */

/* Bytes of host memory that it needs, in whole pages. */
size_t shoal_device_stage_bytes(const struct shoal_device_stage_options *options);
/* In memory of that size, aligned to a page. */
void shoal_device_stage_init(struct shoal_device_stage *stage, const struct shoal_device_stage_options *options, void *memory);

/* ---- The poster's -------------------------------------------------------------------------------------------------------- */

/* Held by the engine and the poster. NULL: no memory. */
struct shoal_device_sum *shoal_device_sum_open(struct shoal_device_stage *stage, size_t count, size_t element);
/* Gives it the next units, before the engine sees it. Ranks reserve in the order of their calls, so a unit has the same slot on
 * all. Each reserved unit must be put on the streams, unless the communicator has failed, or the units are given back. */
void shoal_device_sum_reserve(struct shoal_device_sum *sum);
/* The engine has not taken the call. */
void shoal_device_sum_give_back(struct shoal_device_sum *sum);
/* The works go on streams now, unless the caller then finds that the call has failed already. */
void shoal_device_sum_put_on_streams(struct shoal_device_sum *sum);
/* The poster's last word. NULL is allowed. */
void shoal_device_sum_leave(struct shoal_device_sum *sum);

struct shoal_device_stage_unit {
    unsigned slot;
    size_t begin, end; /* elements */
    uint64_t number;   /* of this use of the slot: k, from `start` + 1 on */
};
struct shoal_device_stage_unit shoal_device_sum_unit(const struct shoal_device_sum *sum, uint64_t unit);
/* The slice of a unit that a rank of the host reduces: where it begins, from the unit's first element on. Slices are
 * equally long but for the last ones, and no two have a cache line in common, nor have a slice's parts for each host. */
size_t shoal_device_sum_slice(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, int rank,
                              size_t *length_out);
/* Where element `at` of a unit lies in host memory, which is in the own slice: what is handed out, or what is taken back. */
char *shoal_device_sum_address(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, bool is_out,
                               size_t at);

/* ---- The engine's -------------------------------------------------------------------------------------------------------- */

/* Begins a work on a unit, unless it has begun; true when it has ended. Only if no rank has failed by then have the streams of
 * other ranks read and written the right bytes: after a failure a rank lets its streams go. */
bool shoal_device_sum_run(struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work);
bool shoal_device_sum_has_ended(const struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work);
/* The call is over. If streams have not done all of it, they are let go, now and for later units: other ranks must have been
 * told of the failure before. */
void shoal_device_sum_drop(struct shoal_device_sum *sum);

#endif
