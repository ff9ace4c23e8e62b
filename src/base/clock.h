/* Time. Ticks are cheap (about 10 ns), the same on all cores and for all processes of a host, so that they may be stored in
 * shared memory and compared there: the processor's counter where the kernel keeps its own time by it, else nanoseconds of
 * CLOCK_MONOTONIC. Only measuring relies on them. Deadlines are CLOCK_MONOTONIC's: a counter may jump, as where a virtual
 * machine is moved. Any thread. */
#ifndef SHOAL_BASE_CLOCK_H
#define SHOAL_BASE_CLOCK_H

#include <stdbool.h>
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
extern bool shoal_clock_has_counter; /* set once, by the first shoal_clock_ns_per_tick */

static inline uint64_t shoal_clock_ticks(void)
{
    return __builtin_expect(shoal_clock_has_counter, true) ? __builtin_ia32_rdtsc() : shoal_clock_ns();
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

/* Whether the counter of an x86 processor may be relied on, by the kernel's file that names its clock source: "tsc". Where
 * there is no such file, whether the processor says that the counter is invariant. */
bool shoal_clock_trusts_counter(const char *source_file);

/* Nanoseconds per tick, measured against CLOCK_MONOTONIC. Takes about a millisecond: call it once and keep the result. The
 * first call in a process decides what ticks are. */
double shoal_clock_ns_per_tick(void);

/* Where ticks stood at a moment. */
struct shoal_clock_anchor {
    uint64_t ticks, ns;
    double ns_per_tick;
};

/* Sets the anchor to now. Returns how far what the old one says of now is off, either way. */
uint64_t shoal_clock_anchor_move(struct shoal_clock_anchor *anchor);

/* The time of CLOCK_MONOTONIC when ticks stood so: the nearer to the anchor, the better. */
static inline uint64_t shoal_clock_anchor_time_ns(const struct shoal_clock_anchor *anchor, uint64_t ticks)
{
    return anchor->ns + (uint64_t)(int64_t)((double)(int64_t)(ticks - anchor->ticks) * anchor->ns_per_tick);
}

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
