/* Registers inputs on a device with the network adapter (GPUDirect RDMA), so that they can stay there (device/device.h). */
#ifndef SHOAL_COMM_DEVICE_EXPORTS_H
#define SHOAL_COMM_DEVICE_EXPORTS_H

#include <stdatomic.h>

#include "base/compiler.h"

struct shoal_comm;

/* Holds the registration that contains `bytes` bytes at an address of a device, and makes it first if there is none. Returns
 * the counter of its holders, which includes the caller. Returns NULL if the adapter or driver does not support such memory, or
 * a limit is reached. Any thread, without the progress engine's lock. */
atomic_int *shoal_devices_hold_export(struct shoal_comm *comm, unsigned long long at, size_t bytes);

#endif
