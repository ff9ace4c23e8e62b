/* A device for tests: operands in ordinary memory that the engine reaches only in units, through other memory
 * (device/device.h). It copies one unit at a time, any that can be copied now, drawn by seed: so operands become ready late and
 * in any order. What the engine has released, and what has not come yet, is 0xFF there, a NaN in every type.
 *
 * It also watches the engine: the first breach of the contract is kept. One thread, or each function under one lock. */
#ifndef SHOAL_TESTS_SIM_SIM_DEVICE_H
#define SHOAL_TESTS_SIM_SIM_DEVICE_H

#include "engine/layout.h"

/* The device of one rank. */
struct sim_device;

/* What the engine may ask for at once, of a whole and of each part. NULL: no memory. */
struct sim_device *sim_device_open(uint64_t seed, size_t range_bytes, size_t part_range_bytes);
/* All operands must have been dropped. NULL is allowed. */
void sim_device_close(struct sim_device *device);

/* Puts operands of the call on the device: bits 1 << enum shoal_operand, of those that the call has. */
void sim_device_take(struct sim_device *device, struct shoal_call *call, int rank, int size, unsigned operands);

/* Copies one unit. False: there is none to copy now. */
bool sim_device_advance(struct sim_device *device);

/* From now on no unit of these operands (bits) is copied in, made free, or copied out. 0: all goes on. */
void sim_device_stop(struct sim_device *device, unsigned operands);

/* Operands not dropped yet. */
int sim_device_open_count(const struct sim_device *device);
/* The units that were copied into a place that another unit had left. */
size_t sim_device_reuses(const struct sim_device *device);
const char *sim_device_breach(const struct sim_device *device);

#endif
