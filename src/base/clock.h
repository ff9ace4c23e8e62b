/* Time. Ticks are the processor's counter: cheap (about 10 ns), the same on all cores and for all processes of a host, so that
 * they may be stored in shared memory and compared there. Nanoseconds are CLOCK_MONOTONIC. Any thread. */
#ifndef SHOAL_BASE_CLOCK_H
#define SHOAL_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define SHOAL_NS_PER_MS UINT64_C(1000000)
#define SHOAL_NS_PER_S UINT64_C(1000000000)

static inline uint64_t shoal_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SHOAL_NS_PER_S + (uint64_t)now.tv_nsec;
}

#if defined(__x86_64__)
static inline uint64_t shoal_clock_ticks(void)
{
    return __builtin_ia32_rdtsc();
}
#elif defined(__aarch64__)
static inline uint64_t shoal_clock_ticks(void)
{
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
}
#else
static inline uint64_t shoal_clock_ticks(void)
{
    return shoal_clock_ns();
}
#endif

/* Nanoseconds per tick, measured against CLOCK_MONOTONIC. Takes about a millisecond: call it once and keep the result. */
double shoal_clock_ns_per_tick(void);

/* One polite step of a spin loop. */
static inline void shoal_clock_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

#endif
