/* Makes a program whose ranks have operands on a device, over the stand-in driver (tests/mock/cuda). A fault that the stand-in
 * sees ends the rank. */
#include "exact_cases.h"
#include "host_rank.h"
#include "mock_device.h"

__attribute__((constructor)) static void start_device(void)
{
    mock_device_start("late=20,torn=2,poison,leaks,seed=1");
    atexit(mock_device_stop);
    host_rank_device = &mock_device;
}
