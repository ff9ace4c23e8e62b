/* Calls with operands on a device. The driver reports which memory is on a device. Elements of such operands pass through a
 * port (device/gpu.h); a communicator has one for each context of the driver in which its operands are used.
 *
 * Any thread, without the progress engine's lock: a driver takes locks that the program may hold while it waits for Shoal.
 * Calls with such operands are posted one at a time, so that they reach the engine and the rings in one order. */
#ifndef SHOAL_COMM_DEVICES_H
#define SHOAL_COMM_DEVICES_H

#include "comm/device_ports.h"
#include "engine/engine.h"

/* Returns true if the processor can read this byte. */
bool shoal_devices_is_readable(const char *at);

/* Sets *is_found_out to true if an operand is on a device. Call it only if the communicator has a driver to ask. ERR_ARGUMENT:
 * an operand is neither in memory of this process nor on a device. ERR_STATE: an operand is not in host memory, and this is a
 * callback, which must not ask a driver. */
SHOAL_MUST_USE enum shoal_status shoal_devices_look(struct shoal_comm *comm, struct shoal_call *calls, size_t count,
                                                    bool *is_found_out);

/* Posts calls with operands on a device, whose arguments have been checked; not in a callback. Takes over their layouts. Errors
 * as in the public header. On OK the caller owns *request_out. *driver_context_out is the context in which the operands are
 * used. */
SHOAL_MUST_USE enum shoal_status shoal_devices_post(struct shoal_comm *comm, struct shoal_call *calls, size_t count,
                                                    void **driver_context_out, struct shoal_request **request_out);

/* Waits for a request of shoal_devices_post. If a device's context has failed, its copies never finish, and the engine would
 * wait until the deadline. So this thread meanwhile asks the driver whether the call's context still works; if not, the
 * communicator fails with the driver's error. */
enum shoal_status shoal_devices_wait(struct shoal_comm *comm, const void *driver_context, struct shoal_request *request);

#endif
