/* Makes a program whose ranks have bad weather (mock/shuffle.h): TEST_SHUFFLE is its seed. */
#include <stdio.h>
#include <stdlib.h>

#include "mock/shuffle.h"

__attribute__((constructor)) static void shuffle_networks(void)
{
    const char *seed = getenv("TEST_SHUFFLE");
    if (!seed || strtoull(seed, NULL, 10) == 0) {
        fputs("TEST_SHUFFLE is the seed of the weather: a number other than 0\n", stderr);
        exit(2);
    }
    shoal_shuffle_networks(strtoull(seed, NULL, 10));
}
