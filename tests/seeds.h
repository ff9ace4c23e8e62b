#ifndef SHOAL_TESTS_SEEDS_H
#define SHOAL_TESTS_SEEDS_H

/* The seeds of random cases. The plain build runs all of a case. The other builds run a part each, with seeds that no other
 * build runs: some take many times as long, and in each of them another seed finds no more than in the plain build. A part is
 * a range of seeds without gaps: if a case draws a value from `seed % n`, a part longer than n has every value of it. */
#include <stdint.h>

struct seeds {
    uint64_t first, end;
};

#if defined(__SANITIZE_ADDRESS__)
#define SEEDS_PART 8
#define SEEDS_FROM 1000
#elif !defined(__x86_64__) /* usually under qemu */
#define SEEDS_PART 16
#define SEEDS_FROM 2000
#else
#define SEEDS_PART 1
#define SEEDS_FROM 0
#endif

/* Returns how many of `count` seeds are run here: at least `least`. */
static inline uint64_t seeds_count(uint64_t count, uint64_t least)
{
    const uint64_t part = count / SEEDS_PART < least ? least : count / SEEDS_PART;
    return part < count ? part : count;
}

/* In the plain build, returns 1 to `count`. */
static inline struct seeds seeds_of(uint64_t count, uint64_t least)
{
    return (struct seeds){SEEDS_FROM + 1, SEEDS_FROM + 1 + seeds_count(count, least)};
}

#endif
