/* A ring of units between a device's stream and the engine: an operand on a device passes through host memory that both can
 * access. Nothing here calls a driver or waits; it only counts. A ring is inward (to the engine: inputs) or outward (outputs).
 *
 *   slot     0  1  2  3  0 ...
 *   unit     0  1  2  3  4         unit u is in slot u % slots, as use k = u / slots + 1
 *
 *   inward   stream: wait done >= k-1, copy in, ready = k      engine: ready >= k: read; done = k
 *   outward  engine: taken >= k-1: write; done = k             stream: wait done >= k, copy out, taken = k
 *
 * A unit is a range of elements of a whole operand, or of each part: then it has a row for each part. The stream writes `ready`
 * and `taken`; the engine writes `done`. They start at a number that the caller chooses, and are compared as signed numbers, as
 * a GPU does (a wait for v ends when (int64_t)(counter - v) >= 0). So a ring is released for good by counters that are 2^62
 * ahead.
 *
 * The engine may write a small output itself if the CPU has a mapping of the device's memory. The output still passes through
 * its slot: the engine copies it from there when it releases it, and the stream copies nothing. The device's memory belongs to
 * the program until the caller's stream has reached the call. A counter publishes this before the output is ready:
 *
 *   written  stream: write opening                             engine: opening, taken >= k-1: write, copy out; done = k
 *            stream: wait done >= k, taken = k
 *
 * An input that stays on the device, where adapters read it, is one unit of another kind of ring, whose slots hold no bytes:
 *
 *   stays    stream: wait done >= k-1, ready = k               engine: ready >= k: put; done = k when all puts have completed
 *            stream, at the end of the call: wait done >= k
 *
 * Peers may reach a ring, if its memory is shared. They neither wait nor count: a rank that lends a range to them (plan/plan.h)
 * has found it ready, and releases it when they have returned it. A card, next to the rings, describes their slots.
 *
 * Threads: a poster reserves units and puts the stream's work on the stream, one thread at a time under its own lock. The
 * functions for the engine are called under the progress engine's lock, except those that return addresses: helper threads call
 * them. Both may run at once. */
#ifndef SHOAL_DEVICE_DEVICE_RING_H
#define SHOAL_DEVICE_DEVICE_RING_H

#include <stdatomic.h>

#include "base/compiler.h"

#define SHOAL_DEVICE_RING_FAR_AHEAD (UINT64_C(1) << 62)

/* A counter, alone in its cache lines. It has one writer. */
struct shoal_device_ring_counter {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t value;
};

/* Compares as a GPU does. acquire: what the writer did earlier happens before. */
static inline bool shoal_device_ring_counter_has(const struct shoal_device_ring_counter *counter, uint64_t number)
{
    return (int64_t)(atomic_load_explicit(&counter->value, memory_order_acquire) - number) >= 0;
}

/* Sets counters far ahead, so that no stream waits for them, now or later. Only the caller may write them. */
void shoal_device_ring_counters_let_go(struct shoal_device_ring_counter *counters, unsigned count);

/* Device memory to which the CPU may write. */
struct shoal_device_mapping {
    /* Writes `bytes` bytes. Calls no driver. is_last: a stream that is notified after the return sees everything that was
     * written; the call may wait a round trip of the bus for this. */
    void (*write)(const struct shoal_device_mapping *, char *to, const char *from, size_t bytes, bool is_last);
    atomic_int holders; /* operands that are written through the mapping, which stays while there are any */
};

/* A contiguous run of an output that the engine writes to the device. */
struct shoal_device_ring_write {
    struct shoal_device_mapping *mapping;
    char *to;
    const char *from; /* in the ring */
    size_t bytes;
};

struct shoal_device_ring {
    bool is_inward;
    unsigned slots;
    size_t slot_bytes;
    uint64_t start;                              /* start value of all counters */
    uint64_t reserved;                           /* units so far; written by the poster */
    struct shoal_device_ring_counter *by_stream; /* [slots] ready, or taken */
    struct shoal_device_ring_counter *by_engine; /* [slots] done */
    struct shoal_device_ring_counter *opening;   /* outward; written by the inward stream: the caller's is at these units */
    char *data;                                  /* [slots][slot_bytes] */
    bool is_let_go;                              /* under the progress engine's lock */
};

/* An operand that passes through a ring. It is freed once the engine has dropped it and the poster has left it. */
struct shoal_device_ring_operand {
    struct shoal_device_ring *ring;
    bool stays; /* an input that stays on the device */
    atomic_int holders;
    int parts;
    size_t element_bytes;
    size_t count;         /* elements of the longest part */
    size_t unit_elements; /* elements of each part in a unit */
    size_t row_bytes;     /* bytes from part to part in a slot */
    uint64_t first;       /* number of its first unit in the ring */
    uint64_t units;
    uint64_t units_released;
    struct shoal_device_ring_write *writes; /* runs that the engine writes; NULL: the stream copies */
    size_t write_count;
    atomic_int *registration; /* for an input that stays: number of operands that hold the adapters' registration */
    const struct shoal_device_ring_counter *opening; /* with writes: the engine may write once this has reached opening_value */
    uint64_t opening_value;
    size_t released[]; /* [ring->slots] released elements of the unit in each slot */
};

/* ---- The ring ------------------------------------------------------------------------------------------------------------ */

/* Returns the bytes of memory that a ring needs, in whole pages. */
size_t shoal_device_ring_bytes(unsigned slots, size_t slot_bytes);
/* Initializes a ring in memory of that size, aligned to a page. slot_bytes must be a multiple of SHOAL_CACHE_PAIR. */
void shoal_device_ring_init(struct shoal_device_ring *ring, bool is_inward, unsigned slots, size_t slot_bytes, uint64_t start,
                            void *memory);

/* Returns the slots that a ring needs to hold, at once, a range of range_bytes of a whole operand, or one of part_range_bytes
 * in each of `parts` parts, wherever they begin in a unit, plus two more units that arrive meanwhile. */
unsigned shoal_device_ring_slots(size_t slot_bytes, size_t range_bytes, int parts, size_t part_range_bytes);

/* Releases every stream that waits for the engine, now or later: no unit is read or written afterwards. Under the lock. */
void shoal_device_ring_let_go(struct shoal_device_ring *ring);

/* ---- Operands ------------------------------------------------------------------------------------------------------------ */

/* Opens an operand. Both operands of a call have units of the same number of elements, so that neither needs more units than
 * the other's ring has slots for: most_parts is the larger number of parts of the two. count is the elements of the longest
 * part. The engine and the poster hold the operand. Returns NULL if out of memory. */
struct shoal_device_ring_operand *shoal_device_ring_open(struct shoal_device_ring *ring, int parts, int most_parts,
                                                         size_t count, size_t element_bytes);
/* Opens an input that stays on the device, in a ring whose slots hold no bytes. It takes over the caller's hold on the
 * registration, and releases it at its end. Returns NULL if out of memory; then the caller still has the hold. */
struct shoal_device_ring_operand *shoal_device_ring_open_stay(struct shoal_device_ring *ring, size_t count,
                                                              atomic_int *registration);
/* Assigns the next units to the operand. Called by the poster before the engine sees the operand. Each reserved unit must then
 * be put on the stream, unless the ring is released or the units are given back. */
void shoal_device_ring_reserve(struct shoal_device_ring_operand *operand);
/* For a call that the engine has not accepted; the operand is yet to be dropped, and earlier calls still pass through the ring.
 * Operands give units back in the opposite order of reserving. */
void shoal_device_ring_give_back(struct shoal_device_ring_operand *operand);
/* Makes the engine, instead of the stream, write an output of one unit. `writes` are all its runs, which hold their mappings,
 * in memory from malloc. input: the input of the same call, which may be in the same memory; NULL if none. Called by the
 * poster, after it has reserved the operand and before the engine sees it. */
void shoal_device_ring_write_out(struct shoal_device_ring_operand *operand, const struct shoal_device_ring_operand *input,
                                 struct shoal_device_ring_write *writes, size_t count);
/* The poster no longer uses the operand. NULL is allowed. */
void shoal_device_ring_leave(struct shoal_device_ring_operand *operand);

/* ---- Functions for the engine, as in operand/operand.h ------------------------------------------------------------------- */

bool shoal_device_ring_is_ready(const struct shoal_device_ring_operand *operand, size_t begin, size_t end);
char *shoal_device_ring_address(const struct shoal_device_ring_operand *operand, int part, size_t at, size_t *run);
void shoal_device_ring_release(struct shoal_device_ring_operand *operand, size_t begin, size_t end);
bool shoal_device_ring_is_finished(const struct shoal_device_ring_operand *operand);
/* If a range was not released, also releases the ring for good. */
void shoal_device_ring_drop(struct shoal_device_ring_operand *operand);
/* Returns the address of the first element, from which peers that have mapped the ring find all others; NULL if it has none. */
const char *shoal_device_ring_lent_at(const struct shoal_device_ring_operand *operand);

/* ---- Rings that peers reach ---------------------------------------------------------------------------------------------- */

/* Describes the two rings of a port to peers that have mapped them. Constant once filled in. */
struct shoal_device_card {
    struct {
        uint64_t data; /* slot 0, in bytes from the card */
        uint64_t slots;
        uint64_t slot_bytes;
    } rings[2]; /* by whether the ring is inward */
};

/* Fills in the half of the card, in the same shared memory, that describes the ring. */
void shoal_device_card_describe(struct shoal_device_card *card, const struct shoal_device_ring *ring);
/* A peer's operand, as this process has mapped its ring. */
struct shoal_device_lent {
    const struct shoal_device_card *card;
    bool is_inward;
    const char *first; /* as its rank's `lent_at` returned it */
    int most_parts;    /* as in shoal_device_ring_open() */
    size_t element_bytes;
};
/* Returns the address of element `at` of a part. *run is reduced to the number of contiguous elements from there. */
char *shoal_device_lent_address(const struct shoal_device_lent *lent, int part, size_t at, size_t *run);

/* ---- Queries of the poster about unit 0, 1, ... of an operand ------------------------------------------------------------ */

struct shoal_device_ring_unit {
    unsigned slot;
    size_t begin, end; /* elements of each part */
    uint64_t number;   /* number of this use of the slot: k, starting at `start` + 1 */
    bool is_first_use; /* there is no earlier use to wait for */
};
struct shoal_device_ring_unit shoal_device_ring_unit(const struct shoal_device_ring_operand *operand, uint64_t unit);
/* Returns the address of element `at` of a part, in a unit that contains it. */
char *shoal_device_ring_at(const struct shoal_device_ring_operand *operand, int part, size_t at);

#endif
