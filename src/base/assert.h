/* Runtime assertions: conditions that hold unless Shoal itself is wrong. They state invariants at the place where these hold;
 * they do not check arguments or peers. Builds with sanitizers or -Dasserts=true evaluate them; other builds compile them but
 * do not execute them. Any thread. */
#ifndef SHOAL_BASE_ASSERT_H
#define SHOAL_BASE_ASSERT_H

#include "base/compiler.h"

/* Writes one line to stderr and ends the process with a trap, so that a debugger or a core file shows the place. */
__attribute__((noreturn, cold)) void shoal_assert_failed(const char *condition, const char *file, int line);

#if SHOAL_ASSERTS
#define SHOAL_ASSERT(condition) (SHOAL_LIKELY(condition) ? (void)0 : shoal_assert_failed(#condition, __FILE__, __LINE__))
#else
#define SHOAL_ASSERT(condition) ((void)sizeof((condition) ? 1 : 0))
#endif

#endif
