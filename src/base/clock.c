#include "base/clock.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

#define SOURCE_FILE "/sys/devices/system/clocksource/clocksource0/current_clocksource"

bool shoal_clock_has_counter = true;

/* CPUID 80000007H, EDX bit 8: the counter runs at one rate in all states of the processor. */
static bool is_invariant(void)
{
    unsigned a, b, c, d = 0;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1);
}

/* The kernel chooses another source if it has seen the counters of two cores differ, or their rate change. */
bool shoal_clock_trusts_counter(const char *source_file)
{
    char source[32] = "";
    FILE *file = fopen(source_file, "re");
    if (!file)
        return is_invariant();
    const bool is_read = fgets(source, sizeof source, file) != NULL;
    fclose(file);
    source[strcspn(source, "\n")] = 0;
    return is_read && strcmp(source, "tsc") == 0;
}

static void clock_choose(void)
{
    shoal_clock_has_counter = shoal_clock_trusts_counter(SOURCE_FILE);
}
#else
/* By the architecture, the generic timer of aarch64 is the same on all cores, as is CLOCK_MONOTONIC. */
bool shoal_clock_trusts_counter(const char *source_file)
{
    (void)source_file;
    return true;
}

static void clock_choose(void)
{
}
#endif

/* To read both clocks at one moment, keep the fastest of several readings, as a thread may be delayed between the two. */
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
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint64_t start_ticks = 0, end_ticks = 0;
    pthread_once(&once, clock_choose);
    const uint64_t start_ns = read_both(&start_ticks);
    while (shoal_clock_ns() - start_ns < SHOAL_NS_PER_MS)
        continue;
    const uint64_t end_ns = read_both(&end_ticks);
    return end_ticks > start_ticks ? (double)(end_ns - start_ns) / (double)(end_ticks - start_ticks) : 1.0;
}

uint64_t shoal_clock_anchor_move(struct shoal_clock_anchor *anchor)
{
    uint64_t ticks = 0;
    const uint64_t ns = read_both(&ticks);
    const int64_t off_ns = (int64_t)(ns - shoal_clock_anchor_time_ns(anchor, ticks)); /* the expected time may be negative */
    anchor->ticks = ticks;
    anchor->ns = ns;
    return (uint64_t)(off_ns < 0 ? -off_ns : off_ns);
}
