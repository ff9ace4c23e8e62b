/* Calls with operands on a device. Which memory lies on one is asked of its driver; their elements pass through a port
 * (device/gpu.h), of which a communicator has one for each context of the driver that its operands are used in.
 *
 * Any thread, without the progress engine's lock: a driver takes locks that the program may hold while it waits for us. Calls
 * with such operands are posted one at a time, so that they come to the engine and to the rings in one order. */
#ifndef SHOAL_COMM_DEVICES_H
#define SHOAL_COMM_DEVICES_H

#include "comm/device_ports.h"
#include "engine/engine.h"

struct shoal_extra;

/* Calls whose arguments have been checked, with their layouts, which are taken. */
struct shoal_posting {
    const char *name; /* of the public function, for messages */
    struct shoal_call *calls;
    size_t count;
    bool is_group;                   /* of messages */
    const struct shoal_extra *extra; /* that the layout of a single call was made from; NULL: none */
    void *stream;
};

/* Frees the layouts of calls that are not posted; returns status. */
enum shoal_status shoal_posting_drop(const struct shoal_posting *posting, enum shoal_status status);

/* Whether the processor may read a byte. */
bool shoal_devices_is_readable(const char *at);

/* Whether an operand lies on a device; to be asked where the communicator has a driver to ask. ERR_ARGUMENT: an operand lies
 * neither in memory of this process nor on a device. ERR_STATE: one is not in host memory, and this is a callback, where no
 * driver is asked. */
SHOAL_MUST_USE enum shoal_status shoal_devices_look(const struct shoal_comm *comm, const struct shoal_posting *posting,
                                                    bool *is_found_out);

/* Posts calls with operands on a device; not in a callback. Errors as the public header says; without one *request_out is the
 * caller's. *driver_context_out: where the operands are used. */
SHOAL_MUST_USE enum shoal_status shoal_devices_post(struct shoal_comm *comm, const struct shoal_posting *posting,
                                                    void **driver_context_out, struct shoal_request **request_out);

/* Waits for a request of shoal_devices_post. A device whose context has failed runs no copy any more, and the engine would wait
 * until the deadline; so the driver is asked meanwhile, by this thread, whether the call's context works, and the communicator
 * fails with its answer. */
enum shoal_status shoal_devices_wait(struct shoal_comm *comm, const void *driver_context, struct shoal_request *request);

#endif
