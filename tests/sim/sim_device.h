/* A device for tests: operands in ordinary memory that the engine reaches only in units, through other memory
 * (operand/operand.h). It copies one unit at a time, chosen by seed among those that can be copied. So operands become ready late
 * and in any order. Units that the engine has released, or that have not arrived, contain 0xFF there, a NaN in every type.
 *
 * It also watches the engine and keeps the first breach of the contract. One thread, or each function under one lock. */
#ifndef SHOAL_TESTS_SIM_SIM_DEVICE_H
#define SHOAL_TESTS_SIM_SIM_DEVICE_H

#include "operand/call.h"

/* The device of one rank. */
struct sim_device;

/* The largest ranges that the engine may ask for at once, of a whole operand and of each part. Returns NULL if memory is
 * lacking. */
struct sim_device *sim_device_open(uint64_t seed, size_t range_bytes, size_t part_range_bytes);
/* All operands must have been dropped. NULL is allowed. */
void sim_device_close(struct sim_device *device);

/* Puts operands of the call on the device: the bits 1 << enum shoal_block_operand, of those that the call has. */
void sim_device_take(struct sim_device *device, struct shoal_call *call, int rank, int size, unsigned operands);

/* Copies one unit. Returns false if no unit can be copied now. */
bool sim_device_advance(struct sim_device *device);

/* From now on no unit of these operands (bits) is copied in, released, or copied out. 0: all continue. */
void sim_device_stop(struct sim_device *device, unsigned operands);

/* Returns the number of operands not dropped yet. */
int sim_device_open_count(const struct sim_device *device);
/* Returns the number of units that were copied into a place that another unit had left. */
size_t sim_device_reuses(const struct sim_device *device);
const char *sim_device_breach(const struct sim_device *device);

#endif
