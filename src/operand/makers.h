/* The makers of operands that are not plain memory. Each returns NULL if out of memory. The caller puts the operand into a call
 * (shoal_call_put_operands), or drops it. */
#ifndef SHOAL_OPERAND_MAKERS_H
#define SHOAL_OPERAND_MAKERS_H

#include "operand/operand.h"

struct shoal_device_ring_operand;
struct shoal_device_sum;

/* The input or the output of a call with several tensors, which count as one vector. The list is copied. */
struct shoal_operand *shoal_operand_of_tensors(enum shoal_block_operand which, size_t element_bytes,
                                               const struct shoal_tensor *list, size_t count);
/* An operand on a device that passes through a ring (device/device_ring.h), or stays on the device, where adapters read it.
 * Takes over the engine's hold on `copied`. */
struct shoal_operand *shoal_operand_of_device_copy(struct shoal_device_ring_operand *copied);
/* Both operands of an all-reduce that devices sum among themselves (device/device_stage.h). Takes over the engine's hold on
 * `sum`. */
struct shoal_operand *shoal_operand_of_device_sum(struct shoal_device_sum *sum);

#endif
