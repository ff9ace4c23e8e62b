/* Inputs for fuzzers that run without libFuzzer. */
#ifndef SHOAL_TESTS_MUTATE_H
#define SHOAL_TESTS_MUTATE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Changes up to five bytes of an input, and returns its new length: each fourth input is cut. */
static inline size_t mutate(uint8_t *input, size_t bytes, unsigned *random)
{
    const int changes = rand_r(random) % 6;
    for (int i = 0; i < changes; i++)
        input[(size_t)rand_r(random) % bytes] = (uint8_t)(rand_r(random) >> 5);
    return rand_r(random) % 4 == 0 ? (size_t)rand_r(random) % bytes + 1 : bytes;
}

#endif
