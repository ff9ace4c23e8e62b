#include "base/assert.h"

#include <stdio.h>

void shoal_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "shoal: a fault in Shoal itself, please report it: %s:%d: %s does not hold\n", file, line, condition);
    __builtin_trap();
}
