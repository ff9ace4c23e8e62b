#include "base/clock.h"

double shoal_clock_ns_per_tick(void)
{
    const uint64_t start_ns = shoal_clock_ns();
    const uint64_t start_ticks = shoal_clock_ticks();
    uint64_t now_ns = start_ns;
    while (now_ns - start_ns < SHOAL_NS_PER_MS)
        now_ns = shoal_clock_ns();
    const uint64_t ticks = shoal_clock_ticks() - start_ticks;
    return ticks ? (double)(now_ns - start_ns) / (double)ticks : 1.0;
}
