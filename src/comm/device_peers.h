/* Lets the ranks of a communicator agree whether their GPUs sum among themselves inside their hosts (device/device_stage.h).
 * They must agree before the first call: the work that a call puts on streams is fixed when it is posted, and no peer is known
 * at that time. */
#ifndef SHOAL_COMM_DEVICE_PEERS_H
#define SHOAL_COMM_DEVICE_PEERS_H

#include "base/compiler.h"

struct shoal_comm;

/* Call when a communicator was made and SHOAL_GPU_PEER_BYTES asks for sums among GPUs. A collective call. Either all ranks take
 * part or none does. If none does, the log says why, operands on devices pass through host memory, and the call returns OK. Any
 * other status means that the communicator has broken because a rank was lost or did not arrive in time. Waits; call without
 * the progress engine's lock. */
SHOAL_MUST_USE enum shoal_status shoal_devices_join_peers(struct shoal_comm *comm, uint32_t timeout_ms);

#endif
