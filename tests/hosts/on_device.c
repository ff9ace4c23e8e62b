/* Makes a program whose ranks have operands on a device, over the stand-in driver (tests/mock/cuda). A fault that the stand-in
 * reports ends the rank. With SHOAL_GPU_PEER_BYTES the devices of a host sum among themselves: each rank has its own device. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "exact_cases.h"
#include "host_rank.h"
#include "mock_device.h"

/* Only sums among devices launch kernels, in at most 8 blocks. */
static void stop_device(void)
{
    mock_device_stop();
    const size_t blocks = control.count_of("blocks");
    if (getenv("SHOAL_GPU_PEER_BYTES") ? blocks >= 1 && blocks <= 8 : blocks == 0)
        return;
    fprintf(stderr, "on_device: the largest launch had %zu blocks\n", blocks);
    _exit(1);
}

__attribute__((constructor)) static void start_device(void)
{
    const char *const local_rank = getenv("LOCAL_RANK");
    mock_device_ordinal = local_rank ? atoi(local_rank) : 0;
    mock_device_start("devices=4,late=20,torn=2,poison,leaks,seed=1");
    atexit(stop_device);
    host_rank_device = &mock_device;
}
