#include "base/clock.h"

/* Both clocks at one moment: of several looks the one that took least, as a thread may be held up between two readings. */
#define LOOKS 8

static uint64_t read_both(uint64_t *ticks_out)
{
    uint64_t ns = 0, least = UINT64_MAX;
    for (int i = 0; i < LOOKS; i++) {
        const uint64_t before = shoal_clock_ticks(), now_ns = shoal_clock_ns(), took = shoal_clock_ticks() - before;
        if (took >= least)
            continue;
        least = took;
        ns = now_ns;
        *ticks_out = before;
    }
    return ns;
}

double shoal_clock_ns_per_tick(void)
{
    uint64_t start_ticks = 0, end_ticks = 0;
    const uint64_t start_ns = read_both(&start_ticks);
    while (shoal_clock_ns() - start_ns < SHOAL_NS_PER_MS)
        continue;
    const uint64_t end_ns = read_both(&end_ticks);
    return end_ticks > start_ticks ? (double)(end_ns - start_ns) / (double)(end_ticks - start_ticks) : 1.0;
}
