/* The floating-point state of a thread: rounding, subnormal numbers, exceptions. A program may change it for its threads, and
 * threads inherit it (torch.set_flush_denormal, a library built with -ffast-math, fesetround). Results that all ranks must have
 * in the same bits are computed in the state that a program begins with:
 *
 *     static void halve(float *x, size_t count, double factor)
 *     {
 *         SHOAL_DEFAULT_FLOATS;              until the scope ends
 *         SHOAL_FLOATS_PIN(factor);          so that the compiler computes nothing from it before
 *
 * A number that is returned is pinned as well, at the end: otherwise the compiler may compute it afterwards. What is read from
 * memory and written there needs nothing.
 * Costs some 2 ns where the state is the default, as nearly always. Reentrant. */
#ifndef SHOAL_BASE_FLOATS_H
#define SHOAL_BASE_FLOATS_H

#include "base/compiler.h"

#if defined(__x86_64__)
/* MXCSR. Its low six bits only record what has happened. */
typedef uint32_t shoal_floats;
#define SHOAL_FLOATS_DEFAULT ((shoal_floats)0x1f80)
#define SHOAL_FLOATS_CONTROL ((shoal_floats)0xffc0)
#define SHOAL_FLOATS_PIN(number) __asm__ volatile("" : "+x"(number))

static inline shoal_floats shoal_floats_read(void)
{
    shoal_floats state;
    __asm__ volatile("stmxcsr %0" : "=m"(state));
    return state;
}

/* Keeps the compiler from moving later reads of memory before this point. */
static inline void shoal_floats_write(shoal_floats state)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(state) : "memory");
}

#elif defined(__aarch64__)
/* FPCR. Its control bits are traps (8 to 12, 15), flushing (0, 1, 19, 24), rounding (22, 23), and what NaN and halves are (2,
 * 25, 26). */
typedef uint64_t shoal_floats;
#define SHOAL_FLOATS_DEFAULT ((shoal_floats)0)
#define SHOAL_FLOATS_CONTROL ((shoal_floats)0x07c89f07)
#define SHOAL_FLOATS_PIN(number) __asm__ volatile("" : "+w"(number))

static inline shoal_floats shoal_floats_read(void)
{
    shoal_floats state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    return state;
}

static inline void shoal_floats_write(shoal_floats state)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(state) : "memory");
}

#else
#error "how a thread's floating-point state is read and written on this processor"
#endif

/* Returns what shoal_floats_end wants. */
static inline shoal_floats shoal_floats_begin(void)
{
    const shoal_floats before = shoal_floats_read();
    if (SHOAL_UNLIKELY((before & SHOAL_FLOATS_CONTROL) != SHOAL_FLOATS_DEFAULT))
        shoal_floats_write(SHOAL_FLOATS_DEFAULT);
    return before;
}

static inline void shoal_floats_end(const shoal_floats *before)
{
    __asm__ volatile("" : : : "memory");
    if (SHOAL_UNLIKELY((*before & SHOAL_FLOATS_CONTROL) != SHOAL_FLOATS_DEFAULT))
        shoal_floats_write(*before);
}

#define SHOAL_DEFAULT_FLOATS                                                                         \
    __attribute__((unused)) SHOAL_SCOPED(shoal_floats_end) const shoal_floats shoal_floats_before_ = \
        shoal_floats_begin() /* clang calls it unused */

#endif
