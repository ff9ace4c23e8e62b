/* For the gradient engine, which sees only the public header: opens packers (device/gpu_packer.h) of a context and checks which
 * memory they can use. Any thread, without the library's locks. */
#ifndef SHOAL_COMM_PACKERS_H
#define SHOAL_COMM_PACKERS_H

#include "device/gpu_packer.h"

/* Also loads the driver. ERR_UNSUPPORTED as for a call with operands on a device, and the errors of shoal_gpu_packer_open. */
SHOAL_MUST_USE enum shoal_status shoal_packer_open(struct shoal_context *context, void *stream,
                                                   struct shoal_gpu_packer **packer_out);

/* Returns OK if the packer can copy the memory at a pointer or, with packer NULL, if the processor can. Otherwise `wrong` gets
 * the reason, as text to follow the memory's name: "lies on device 1 ...". ERR_ARGUMENT: the memory is elsewhere; ERR_SYSTEM:
 * the driver does not say where it is; ERR_STATE: this is a callback, and there is a packer. With memory NULL only ERR_STATE is
 * checked. comm was made after the packer; without a packer, comm knows of no device if the process had no driver when comm was
 * made. */
SHOAL_MUST_USE enum shoal_status shoal_packer_check(const struct shoal_comm *comm, const struct shoal_gpu_packer *packer,
                                                    const void *memory, char *wrong, size_t wrong_bytes);

#endif
