/* Words every file uses: status propagation, scoped cleanup, the cache line. No function, no state. */
#ifndef SHOAL_BASE_COMPILER_H
#define SHOAL_BASE_COMPILER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shoal/shoal.h"

/* Passes a failure on to the caller. The first function that knows of a failure logs it; this one stays silent. */
#define SHOAL_TRY(call)                               \
    do {                                              \
        enum shoal_status shoal_try_status_ = (call); \
        if (shoal_try_status_ != SHOAL_OK)            \
            return shoal_try_status_;                 \
    } while (0)

/* SHOAL_SCOPED(close_fd) int fd = ...; calls close_fd(&fd) when the scope ends. */
#define SHOAL_SCOPED(cleanup_fn) __attribute__((cleanup(cleanup_fn)))

#define SHOAL_LIKELY(x) __builtin_expect(!!(x), 1)
#define SHOAL_UNLIKELY(x) __builtin_expect(!!(x), 0)
/* For a function that small operations seldom call: inline, it would make its caller save registers each time. */
#define SHOAL_NOINLINE __attribute__((noinline))
#define SHOAL_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))

#define SHOAL_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Data written by one process and polled by another is kept this far apart: two lines, because processors fetch lines in
 * pairs. */
#define SHOAL_CACHE_LINE 64
#define SHOAL_CACHE_PAIR 128
#define SHOAL_PAGE ((size_t)4096)

static inline size_t shoal_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t shoal_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* n rounded up to a multiple of unit, a power of two. */
static inline size_t shoal_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) & ~(unit - 1);
}

/* Asks for a cache line that will be written, so that it is this core's by then. */
static inline void shoal_prefetch_for_write(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw (%0)" : : "r"(line)); /* processors that do not know it do nothing */
#else
    __builtin_prefetch(line, 1);
#endif
}

#endif
