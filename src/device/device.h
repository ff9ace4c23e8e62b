/* Operands on a device. The engine accesses host memory only, so such an operand passes through host memory in pieces: the
 * device copies a piece of an input there, the engine reads and releases it, and the device reuses its place for another piece.
 * An output travels the other way: the engine writes to a free place and releases it, and the device copies the piece away.
 *
 *   device   | copy in |          (done: copy in again)          | copy out |
 *   engine             | ready: read ... release |  | ready: write ... release |            finished
 *
 * The poster of an operation issues all its copies to the device; engine and device then synchronize only through counters. So
 * nothing here waits. If a piece is not ready, the engine asks again in a later turn and continues with others meanwhile. A
 * device rings no doorbell, so if the engine found something not ready, waits sleep 50 us at most.
 *
 * An operand is counted in elements of a whole operand, or of each part (struct shoal_shape): the range [begin, end) of a
 * partitioned operand is that range of every part, as far as the part extends. All functions are called under the progress
 * engine's lock. They neither wait nor call a device's driver, which may take locks that the program holds while it waits for
 * Shoal. */
#ifndef SHOAL_DEVICE_DEVICE_H
#define SHOAL_DEVICE_DEVICE_H

#include "base/compiler.h"

struct shoal_device_operand;

struct shoal_device_ops {
    /* Returns true if the engine may access the range in host memory: the elements of an input have arrived, or the place of an
     * output's elements is free. Once true, it stays true until the range is released. The engine asks for a chunk, or for a
     * whole operand that travels with the announcements: at most shoal_engine_range_bytes() (engine/engine.h), for which there
     * must be room. Ranges become ready in order, so a range may have to wait until earlier ones are released. */
    bool (*is_ready)(const struct shoal_device_operand *, size_t begin, size_t end);

    /* Returns the address of element `at` of a part, in a range that is ready. *run is reduced to the number of contiguous
     * elements from there. */
    char *(*address)(const struct shoal_device_operand *, int part, size_t at, size_t *run);

    /* The engine has read the range of an input, or written that of an output. If the operation succeeds, each element is
     * released once; ranges may come in any order. */
    void (*release)(struct shoal_device_operand *, size_t begin, size_t end);

    /* Returns true if the device has copied all of an output. The engine asks when everything was released. The operation is
     * not done before. */
    bool (*is_finished)(const struct shoal_device_operand *);

    /* Returns the address of the operand's first element in a ring of which struct shoal_device_card describes the place, so
     * that peers that can map the ring find all elements. Returns NULL if it is in no such ring. NULL: none ever is. */
    const char *(*lent_at)(const struct shoal_device_operand *);

    /* The operation is over: the engine no longer accesses or names the operand. Called once. If a range was not released, the
     * operation has failed: the device must then release everything that waits for the range. */
    void (*drop)(struct shoal_device_operand *);
};

/* Each kind of device has its own operand type, which begins with this structure.
 *
 * An input that stays does not pass through host memory: network adapters read it on the device. It is ready when the device
 * has reached the call, and has no `address`. The CPU cannot read it, so only plans whose steps put it can use it. If they also
 * copy from it to the rank's own output, which must be on the device as well, the device does that copy. */
struct shoal_device_operand {
    const struct shoal_device_ops *ops;
    bool stays;
};

#endif
