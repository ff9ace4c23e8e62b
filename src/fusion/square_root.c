#include <string.h>

#include "fusion/fusion.h"

/* Newton's method. */
double fusion_square_root(double x)
{
    uint64_t word;
    double y;
    if (!(x > 0) || x - x != 0)
        return x;
    memcpy(&word, &x, sizeof word);
    word = (word >> 1) + (UINT64_C(1023) << 51); /* halves the exponent: within 7 % */
    memcpy(&y, &word, sizeof y);
    for (int i = 0; i < 6; i++)
        y = 0.5 * (y + x / y);
    return y;
}
