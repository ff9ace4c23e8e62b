/* Operands that lie on a device. The engine touches host memory only, so such an operand passes through it in pieces: the
 * device copies a piece of an input there, the engine reads it and releases it, and the device fills its place with another
 * one. An output goes the other way: its place is free, the engine writes and releases, the device takes it away.
 *
 *     device   | copy in |  (done: copy in again)        | copy out |
 *     engine             | ready: read ... release |  | ready: write ... release |   finished
 *
 * The poster of an operation has issued all copies to the device before; afterwards engine and device meet in counters alone.
 * So nothing here waits. A piece that is not ready yet is asked for again in a later turn, and the engine goes on with others
 * meanwhile. A device rings no doorbell: while the engine found something not ready, waits sleep 50 us at most.
 *
 * An operand is counted in elements of a whole, or of each part (struct shoal_shape): the range [begin, end) of an operand in
 * parts is that range of every part, as far as the part goes. All functions are called under the progress engine's lock. They
 * neither wait nor call a device's driver, which may take locks that the program holds while it waits for us. */
#ifndef SHOAL_DEVICE_DEVICE_H
#define SHOAL_DEVICE_DEVICE_H

#include "base/compiler.h"

struct shoal_device_operand;

struct shoal_device_ops {
    /* Whether the engine may touch the range in host memory: the elements of an input have come, the place of an output's is
     * free. Once true it stays true until the range is released. The engine asks for a chunk, or for all of an operand that
     * travels beside the announcements: at most shoal_engine_range_bytes (engine/engine.h), for which there must be a place.
     * Ranges are ready in order, so a range may have to wait until earlier ones were released. */
    bool (*is_ready)(const struct shoal_device_operand *, size_t begin, size_t end);

    /* The address of element `at` of a part, in a range that is ready. *run becomes at most the elements from there on that
     * lie in a row. */
    char *(*address)(const struct shoal_device_operand *, int part, size_t at, size_t *run);

    /* The engine has read the range of an input, or written that of an output. If the operation ends well, each element
     * is released once; ranges come in any order. */
    void (*release)(struct shoal_device_operand *, size_t begin, size_t end);

    /* Whether the device has taken away all of an output; asked when all was released. The operation is not done before. */
    bool (*is_finished)(const struct shoal_device_operand *);

    /* The operation is over: the engine does not touch the operand, nor name it, any more. Called once. Where a range was not
     * released the operation has failed: the device must let go whatever waits for a release. */
    void (*drop)(struct shoal_device_operand *);
};

/* Each kind of device has its own operands, which begin with this.
 *
 * An input that stays does not pass through host memory: network adapters read it where it lies. It is ready when the device
 * has come to the call, and has no `address`. The processor cannot read it, so it is for plans alone whose steps put it; what
 * they copy from it to the rank's own output, which is on the device, too, the device copies. */
struct shoal_device_operand {
    const struct shoal_device_ops *ops;
    bool stays;
};

#endif
