/* Time, as ticks and as deadlines. Ticks are cheap (about 10 ns) and the same on all cores and in all processes of a host, so
 * they may be stored in shared memory and compared there. They are the processor's counter if the kernel uses it for its own
 * clock, else nanoseconds of CLOCK_MONOTONIC. Only measurements rely on ticks. Deadlines use CLOCK_MONOTONIC, because a counter
 * may jump, for example when a virtual machine moves. Any thread. */
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
extern bool shoal_clock_has_counter; /* set once, by the first shoal_clock_ns_per_tick() */

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

/* Returns true if the counter of an x86 processor is reliable, that is, if the file in which the kernel names its clock source
 * contains "tsc". Without that file, returns true if the processor reports an invariant counter. */
bool shoal_clock_trusts_counter(const char *source_file);

/* Returns nanoseconds per tick, measured against CLOCK_MONOTONIC. Takes about a millisecond, so call it once and keep the
 * result. The first call in a process decides what ticks are. */
double shoal_clock_ns_per_tick(void);

/* The ticks at one moment of CLOCK_MONOTONIC. */
struct shoal_clock_anchor {
    uint64_t ticks, ns;
    double ns_per_tick;
};

/* Sets the anchor to now. Returns by how many nanoseconds the old anchor's estimate of now was off, in either direction. */
uint64_t shoal_clock_anchor_move(struct shoal_clock_anchor *anchor);

/* Returns the time of CLOCK_MONOTONIC at `ticks`. The nearer to the anchor, the more precise. */
static inline uint64_t shoal_clock_anchor_time_ns(const struct shoal_clock_anchor *anchor, uint64_t ticks)
{
    return anchor->ns + (uint64_t)(int64_t)((double)(int64_t)(ticks - anchor->ticks) * anchor->ns_per_tick);
}

/* Pauses for a moment within a spin loop. */
static inline void shoal_clock_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

#endif
