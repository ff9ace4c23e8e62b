/* Makes the n-th allocation of the code under test fail, and counts the allocations that are not freed. The program is linked
 * with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free. One thread; include once per program. */
#ifndef SHOAL_TESTS_UNIT_ALLOC_LIMIT_H
#define SHOAL_TESTS_UNIT_ALLOC_LIMIT_H

#include <limits.h>
#include <stdlib.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void __wrap_free(void *memory);

static long alloc_left = LONG_MAX; /* allocations that still succeed */
static long alloc_live;            /* allocated and not yet freed */

static int alloc_may(void)
{
    if (alloc_left <= 0)
        return 0;
    alloc_left--;
    return 1;
}

static void *alloc_count(void *memory)
{
    alloc_live += memory ? 1 : 0;
    return memory;
}

void *__wrap_malloc(size_t bytes)
{
    return alloc_may() ? alloc_count(__real_malloc(bytes)) : NULL;
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return alloc_may() ? alloc_count(__real_calloc(count, bytes)) : NULL;
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    if (!alloc_may())
        return NULL;
    void *moved = __real_realloc(memory, bytes);
    return memory ? moved : alloc_count(moved);
}

void __wrap_free(void *memory)
{
    alloc_live -= memory ? 1 : 0;
    __real_free(memory);
}

#endif
