/* The host memory through which operands on a device pass: the rings of a port (device/gpu.h) are in it. If possible the ranks
 * of the host can map it, so that sums read inputs and write outputs in the rings (decision 71, operand/lent.h). Otherwise it
 * is private, and data pass through staging buffers.
 *
 *     card (a page)   outward ring   inward ring   ring of inputs that stay
 *
 * Any thread, without the progress engine's lock. */
#ifndef SHOAL_OPERAND_DEVICE_MEMORY_H
#define SHOAL_OPERAND_DEVICE_MEMORY_H

#include "device/gpu.h"

struct shoal_memory;

struct shoal_operand_memory {
    void *at;
    size_t bytes;
    struct shoal_memory *shared_by; /* of which it is a region; NULL: no other process can map it */
};

/* Maps zeroed memory that no network adapter reads: after a failure a stream may write there while an adapter still reads
 * (decision 41). Forked children do not get copies of it, because the device writes to these pages. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_operand_memory_map(struct shoal_log *log, struct shoal_memory *memory, size_t bytes,
                                                          struct shoal_operand_memory *memory_out);
/* Like that, but with room for a card before `bytes` bytes for the rings of a port. Peers can map it if there is enough memory
 * for them (SHOAL_MEMORY_LIMIT). */
SHOAL_MUST_USE enum shoal_status shoal_operand_memory_share(struct shoal_log *log, struct shoal_memory *memory, size_t bytes,
                                                            struct shoal_operand_memory *memory_out);
/* Returns the address at which the rings of the port begin. */
void *shoal_operand_memory_rings(const struct shoal_operand_memory *memory);
/* Fills in the card. Call it when the port has its rings. */
void shoal_operand_memory_describe(const struct shoal_operand_memory *memory, struct shoal_gpu_port *port);
/* Call it when no device can write to it. */
void shoal_operand_memory_unmap(struct shoal_operand_memory *memory);

#endif
