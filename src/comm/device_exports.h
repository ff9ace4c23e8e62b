/* Registers inputs on a device with the network adapter (GPUDirect RDMA), so that they can stay there (device/device.h). */
#ifndef SHOAL_COMM_DEVICE_EXPORTS_H
#define SHOAL_COMM_DEVICE_EXPORTS_H

#include <stdatomic.h>

#include "base/compiler.h"

struct shoal_comm;

/* Holds the registration in which so many bytes at an address of a device lie, made now where there is none: the counter of
 * those who hold it, with the caller. NULL: adapter or driver does not serve such memory, or a limit is reached. Any thread,
 * without the progress engine's lock. */
atomic_int *shoal_devices_hold_export(struct shoal_comm *comm, unsigned long long at, size_t bytes);

#endif
