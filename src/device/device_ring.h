/* A ring of units between a device's stream and the engine: how an operand on a device passes through host memory that both
 * reach. Nothing here calls a driver or waits; it counts. A ring is inward (to the engine: inputs) or outward (outputs).
 *
 *     slot        0        1        2        3        0 ...
 *     unit        0        1        2        3        4          unit u lies in slot u % slots, as use k = u / slots + 1
 *
 *     inward      stream: wait done >= k-1, copy in, ready = k      engine: ready >= k: read; done = k
 *     outward     engine: taken >= k-1: write; done = k             stream: wait done >= k, copy out, taken = k
 *
 * A unit is a range of elements of a whole, or of each part: then it has a row for each part. `ready` and `taken` are written
 * by the stream, `done` by the engine; they start at a number of the caller's choice and are compared signed, as a GPU does
 * (a wait for v is over when (int64_t)(counter - v) >= 0). So a ring is let go by counters that are 2^62 ahead.
 *
 * A small output may be written by the engine, where the processor has a mapping of the device's memory. It passes through its
 * slot all the same: the engine copies it from there when it releases it, and the stream copies nothing. The device's memory is
 * the program's until the caller's stream has come to the call, which a counter says before the output is ready:
 *
 *     written     stream: write opening                   engine: opening, taken >= k-1: write, copy out; done = k
 *                 stream: wait done >= k, taken = k
 *
 * An input that stays on the device (device/device.h) is one unit of a ring of its own kind, whose slots hold no bytes:
 *
 *     stays       stream: wait done >= k-1, ready = k         engine: ready >= k: put; done = k when all puts have completed
 *                 stream, at the end of the call: wait done >= k
 *
 * Threads: a poster reserves units and puts the stream's work on the stream, one thread at a time by a lock of its own; the
 * functions of struct shoal_device_ops come under the progress engine's lock; both may run at once. */
#ifndef SHOAL_DEVICE_DEVICE_RING_H
#define SHOAL_DEVICE_DEVICE_RING_H

#include <stdatomic.h>

#include "device/device.h"

#define SHOAL_DEVICE_RING_FAR_AHEAD (UINT64_C(1) << 62)

/* A counter, alone in its lines: one writer. */
struct shoal_device_ring_counter {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t value;
};

/* Compared as a GPU does. acquire: what the writer did before comes before. */
static inline bool shoal_device_ring_counter_has(const struct shoal_device_ring_counter *counter, uint64_t number)
{
    return (int64_t)(atomic_load_explicit(&counter->value, memory_order_acquire) - number) >= 0;
}

/* Sets counters far ahead, so that no stream waits for one, now or later. The caller alone writes them. */
void shoal_device_ring_counters_let_go(struct shoal_device_ring_counter *counters, unsigned count);

/* Memory of a device that the processor may write. */
struct shoal_device_mapping {
    /* Writes so many bytes. Calls no driver. is_last: a stream that is told after the return finds there all that was written,
     * for which the call may wait a round trip of the bus. */
    void (*write)(const struct shoal_device_mapping *, char *to, const char *from, size_t bytes, bool is_last);
    atomic_int holders; /* operands that are written through it, which stays meanwhile */
};

/* A run of an output that the engine writes to the device. */
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
    uint64_t start;                              /* of all counters */
    uint64_t reserved;                           /* units so far; the poster's */
    struct shoal_device_ring_counter *by_stream; /* [slots] ready, or taken */
    struct shoal_device_ring_counter *by_engine; /* [slots] done */
    struct shoal_device_ring_counter *opening;   /* outward, by the inward stream: the caller's has come to these units */
    char *data;                                  /* [slots][slot_bytes] */
    bool is_let_go;                              /* under the progress engine's lock */
};

/* An operand on its way through a ring; its first member is what the engine sees. Freed when both the engine has dropped it and
 * the poster has let it go. */
struct shoal_device_ring_operand {
    struct shoal_device_operand base;
    struct shoal_device_ring *ring;
    atomic_int holders;
    int parts;
    size_t element;       /* bytes */
    size_t count;         /* elements of the longest part */
    size_t unit_elements; /* of each part, in a unit */
    size_t row_bytes;     /* from part to part in a slot */
    uint64_t first;       /* its first unit's number in the ring */
    uint64_t units;
    uint64_t units_released;
    struct shoal_device_ring_write *writes; /* by the engine; NULL: the stream copies */
    size_t write_count;
    atomic_int *registration; /* of an input that stays: how many operands hold what adapters read it by */
    const struct shoal_device_ring_counter *opening; /* with writes: it is the engine's when this has come to opening_value */
    uint64_t opening_value;
    size_t released[]; /* [ring->slots] elements of the unit that lies there */
};

/* ---- The ring ------------------------------------------------------------------------------------------------------------ */

/* Bytes of memory that a ring needs, in whole pages. */
size_t shoal_device_ring_bytes(unsigned slots, size_t slot_bytes);
/* In memory of that size, aligned to a page. slot_bytes is a multiple of SHOAL_CACHE_PAIR. */
void shoal_device_ring_init(struct shoal_device_ring *ring, bool is_inward, unsigned slots, size_t slot_bytes, uint64_t start,
                            void *memory);

/* The slots that a ring needs so that a range of range_bytes of a whole, and one of part_range_bytes in each of `parts` parts,
 * have their places at once, wherever they begin in a unit, and two units more come meanwhile. */
unsigned shoal_device_ring_slots(size_t slot_bytes, size_t range_bytes, int parts, size_t part_range_bytes);

/* Lets every stream go that waits for the engine, now or later: no unit is read or written any more. Under the lock. */
void shoal_device_ring_let_go(struct shoal_device_ring *ring);

/* ---- Operands ------------------------------------------------------------------------------------------------------------ */

/* The two operands of a call have units of the same elements, so that neither needs more units than the ring of the other has
 * slots for: most_parts is the larger number of parts. count is that of the longest part. Held by the engine and the poster.
 * NULL: no memory. */
struct shoal_device_ring_operand *shoal_device_ring_open(struct shoal_device_ring *ring, int parts, int most_parts,
                                                         size_t count, size_t element);
/* An input that stays on the device, in a ring whose slots hold no bytes. It holds the registration in the caller's stead, and
 * lets it go at its end. NULL: no memory, and the caller holds it still. */
struct shoal_device_ring_operand *shoal_device_ring_open_stay(struct shoal_device_ring *ring, size_t count,
                                                              atomic_int *registration);
/* Gives it the next units. The poster's, before the engine sees the operand; each reserved unit must be put on the stream, or
 * the ring let go, or the units given back. */
void shoal_device_ring_reserve(struct shoal_device_ring_operand *operand);
/* The engine has not taken the call, and is yet to drop the operand: calls before it still pass through the ring. Operands give
 * back in the opposite order of reserving. */
void shoal_device_ring_give_back(struct shoal_device_ring_operand *operand);
/* Instead of a copy by the stream, the engine writes an output of one unit: with all runs of it, which hold their mappings, in
 * memory of malloc. input: that of its call, whose memory it may lie in; NULL: none. The poster's, after it was reserved and
 * before the engine sees it. */
void shoal_device_ring_write_out(struct shoal_device_ring_operand *operand, const struct shoal_device_ring_operand *input,
                                 struct shoal_device_ring_write *writes, size_t count);
/* The poster's last word. NULL is allowed. */
void shoal_device_ring_leave(struct shoal_device_ring_operand *operand);

/* ---- What the poster asks of unit 0, 1, ... of an operand ---------------------------------------------------------------- */

struct shoal_device_ring_unit {
    unsigned slot;
    size_t begin, end; /* elements of each part */
    uint64_t number;   /* of this use of the slot: k, from `start` + 1 on */
    bool is_first_use; /* there is no earlier use to wait for */
};
struct shoal_device_ring_unit shoal_device_ring_unit(const struct shoal_device_ring_operand *operand, uint64_t unit);
/* Where element `at` of a part lies, in a unit that has it. */
char *shoal_device_ring_at(const struct shoal_device_ring_operand *operand, int part, size_t at);

#endif
