/* Sums that the devices of each host make among themselves: the counters through which the engine and a device's streams
 * synchronize. Nothing here calls a driver or waits; it only counts, like device/device_ring.h.
 *
 * Each rank has slots in its device's memory, which the devices of the other ranks of its host can access. A sum passes through
 * them in units. A unit is in the same slot on all ranks. A rank does three works on it (five over several hosts), each on its
 * own stream:
 *
 *   bring      the unit of this rank's input    -> this rank's slot
 *   reduce     this rank's slice, in all slots  -> this rank's slot   a kernel
 *   hand out   this rank's slice                -> host memory        the engine sums it with those of other hosts
 *   take back  this rank's slice                <- host memory
 *   gather     each slice, in its rank's slot   -> this rank's output
 *
 *   stream   wait begin >= k, work, ended = k    engine   begin = k; ended >= k: the next step of the plan
 *
 * The poster puts all works on streams with the call. The engine begins each work when its plan reaches that step
 * (collective/peers.c). So ranks wait for each other in the plan, and a stream waits only for the engine of its own process.
 * Unit u is in slot u % slots, as use k = u / slots + 1. `slots` is the largest number of chunks that the engine has under way,
 * so a slot is free when its next use begins.
 *
 * Threads: as in device/device_ring.h. The poster reserves units and puts works on streams, one thread at a time under its own
 * lock. The engine's functions are called under the progress engine's lock. Both may run at once. Helper threads ask for
 * addresses. */
#ifndef SHOAL_DEVICE_DEVICE_STAGE_H
#define SHOAL_DEVICE_DEVICE_STAGE_H

#include "device/device_ring.h"

/* On one host there are only the first three. */
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
    size_t slot_bytes; /* a multiple of a cache line for each rank of all hosts */
    int rank, ranks;   /* rank and number of ranks on this host */
    int hosts;         /* number of hosts, each with as many ranks */
    uint64_t start;    /* start value of all counters */
};

struct shoal_device_stage {
    struct shoal_device_stage_options options;
    unsigned works;
    uint64_t reserved;                                           /* units so far; written by the poster */
    struct shoal_device_ring_counter *begin[SHOAL_DEVICE_WORKS]; /* [slots] written by the engine */
    struct shoal_device_ring_counter *ended[SHOAL_DEVICE_WORKS]; /* [slots] written by streams */
    char *slices;   /* [2 * slots] in host memory: per slot what is handed out, and what is taken back; NULL on one host */
    bool is_let_go; /* under the progress engine's lock */
};

/* A call that passes through a stage. It is freed once the engine has dropped it and the poster has left it. */
struct shoal_device_sum {
    struct shoal_device_stage *stage;
    atomic_int holders;
    atomic_bool is_on_streams;
    size_t element_bytes;
    size_t count; /* elements */
    size_t unit_elements;
    uint64_t first; /* number of its first unit in the stage */
    uint64_t units;
};

/* ---- The stage ----------------------------------------------------------------------------------------------------------- */

/* Returns the bytes of host memory that a stage needs, in whole pages. */
size_t shoal_device_stage_bytes(const struct shoal_device_stage_options *options);
/* Initializes a stage in memory of that size, aligned to a page. */
void shoal_device_stage_init(struct shoal_device_stage *stage, const struct shoal_device_stage_options *options, void *memory);

/* ---- Functions for the poster -------------------------------------------------------------------------------------------- */

/* The engine and the poster hold the sum. Returns NULL if out of memory. */
struct shoal_device_sum *shoal_device_sum_open(struct shoal_device_stage *stage, size_t count, size_t element_bytes);
/* Assigns the next units to the sum, before the engine sees it. Ranks reserve in the order of their calls, so a unit has the
 * same slot on all ranks. Each reserved unit must be put on the streams, unless the communicator has failed or the units are
 * given back. */
void shoal_device_sum_reserve(struct shoal_device_sum *sum);
/* For a call that the engine has not accepted. */
void shoal_device_sum_give_back(struct shoal_device_sum *sum);
/* Call this before the works are put on streams. The caller then checks whether the call has already failed, and if so puts
 * nothing on streams. */
void shoal_device_sum_put_on_streams(struct shoal_device_sum *sum);
/* The poster no longer uses the sum. NULL is allowed. */
void shoal_device_sum_leave(struct shoal_device_sum *sum);

struct shoal_device_stage_unit {
    unsigned slot;
    size_t begin, end; /* elements */
    uint64_t number;   /* number of this use of the slot: k, starting at `start` + 1 */
};
struct shoal_device_stage_unit shoal_device_sum_unit(const struct shoal_device_sum *sum, uint64_t unit);
/* Returns the offset of the slice of a unit that a rank of the host reduces, from the unit's first element. All slices except
 * the last ones have the same length. No two slices share a cache line, nor do a slice's parts for each host. */
size_t shoal_device_sum_slice(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, int rank,
                              size_t *length_out);
/* Returns the address in host memory of element `at` of a unit, which must be in this rank's slice: in what is handed out, or
 * in what is taken back. */
char *shoal_device_sum_address(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, bool is_out,
                               size_t at);

/* ---- Functions for the engine -------------------------------------------------------------------------------------------- */

/* Begins a work on a unit, unless it has begun. Returns true when it has ended. The streams of other ranks have read and
 * written the right bytes only if no rank has failed by then: after a failure a rank releases its streams. */
bool shoal_device_sum_run(struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work);
bool shoal_device_sum_has_ended(const struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work);
/* The call is over. If streams have not done all of it, they are released, for this unit and later ones: the failure must have
 * been published to other ranks before. */
void shoal_device_sum_drop(struct shoal_device_sum *sum);

#endif
