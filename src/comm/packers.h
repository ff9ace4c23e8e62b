/* For the gradient engine, which sees the public header alone: packers (device/gpu_packer.h) of a context, and where memory
 * lies. Any thread, without locks of the library. */
#ifndef SHOAL_COMM_PACKERS_H
#define SHOAL_COMM_PACKERS_H

#include "device/gpu_packer.h"

/* Loads the driver, too. ERR_UNSUPPORTED, as for a call with operands on a device; and those of shoal_gpu_packer_open. */
SHOAL_MUST_USE enum shoal_status shoal_packer_open(struct shoal_context *context, void *stream,
                                                   struct shoal_gpu_packer **packer_out);

/* Whether a packer can copy the memory at a pointer, or, with packer NULL, the processor can. Where it cannot, wrong tells why:
 * "lies on device 1 ...", to be put behind the name of what lies there. ERR_ARGUMENT: it lies elsewhere; ERR_SYSTEM: the driver
 * does not say where; ERR_STATE: this is a callback, and there is a packer. memory NULL: that alone is asked. comm was made
 * after the packer; without one it knows of no device if the process had no driver then. */
SHOAL_MUST_USE enum shoal_status shoal_packer_check(const struct shoal_comm *comm, const struct shoal_gpu_packer *packer,
                                                    const void *memory, char *wrong, size_t wrong_bytes);

#endif
