/* Whether the GPUs of a communicator sum among themselves inside their hosts (device/device_stage.h), which all of its ranks
 * must agree on before the first call: what a call puts on streams is fixed when it is posted, and then no peer is known. */
#ifndef SHOAL_COMM_DEVICE_PEERS_H
#define SHOAL_COMM_DEVICE_PEERS_H

#include "base/compiler.h"

struct shoal_comm;

/* A communicator was made; a collective call of its ranks, where SHOAL_GPU_PEER_BYTES says that they want it. All of them
 * can, or none does, and the log says why: then operands on devices pass through host memory, and the call is OK. Another
 * status: the communicator has broken meanwhile, as a rank was lost or did not come in time. Waits; without the progress
 * engine's lock. */
SHOAL_MUST_USE enum shoal_status shoal_devices_join_peers(struct shoal_comm *comm, uint32_t timeout_ms);

#endif
