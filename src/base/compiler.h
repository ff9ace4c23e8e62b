/* Macros and helpers for every file: status propagation, scoped cleanup, the cache line. No state. */
#ifndef SHOAL_BASE_COMPILER_H
#define SHOAL_BASE_COMPILER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shoal/shoal.h"

/* Returns a failure to the caller, silently: the first function that detects a failure logs it. */
#define SHOAL_TRY(call)                               \
    do {                                              \
        enum shoal_status shoal_try_status_ = (call); \
        if (shoal_try_status_ != SHOAL_OK)            \
            return shoal_try_status_;                 \
    } while (0)

/* SHOAL_SCOPED(close_fd) int fd = ...; calls close_fd(&fd) at the end of the scope. */
#define SHOAL_SCOPED(cleanup_fn) __attribute__((cleanup(cleanup_fn)))

#define SHOAL_LIKELY(x) __builtin_expect(!!(x), 1)
#define SHOAL_UNLIKELY(x) __builtin_expect(!!(x), 0)
/* For a function that small operations rarely call. If it were inlined, its caller would save registers each time. */
#define SHOAL_NOINLINE __attribute__((noinline))
#define SHOAL_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))

#define SHOAL_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Data that one process writes and another polls are this far apart: two lines, because processors fetch lines in pairs. */
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

/* Rounds n up to a multiple of unit, a power of two. */
static inline size_t shoal_round_up(size_t n, size_t unit)
{
    return (n + unit - 1) & ~(unit - 1);
}

/* Prefetches a cache line for writing, so that this core owns it by then. */
static inline void shoal_prefetch_for_write(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw (%0)" : : "r"(line)); /* a no-op on processors without it */
#else
    __builtin_prefetch(line, 1);
#endif
}

#endif
