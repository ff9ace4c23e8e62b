/* The source of random numbers: splitmix64, so a seed produces the same numbers on every machine. The caller owns the state. */
#ifndef RANDOM_SOURCE_H
#define RANDOM_SOURCE_H

#include <stdint.h>

static inline uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Returns a number uniform in [0, 1), with the 24 bits that a float holds. */
static inline float random_uniform(uint64_t *state)
{
    return (float)(random_next(state) >> 40) * 0x1p-24f;
}

#endif
