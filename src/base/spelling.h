/* How near two words are, for "did you mean". Pure functions, any thread. */
#ifndef SHOAL_BASE_SPELLING_H
#define SHOAL_BASE_SPELLING_H

#include "base/compiler.h"

/* How many letters must be put in, left out, changed or swapped with their neighbour to make b of a; 1 where a is b without its
 * last words, such as the unit. SIZE_MAX where that is more than a third of a. */
size_t shoal_spelling_distance(const char *a, const char *b);

#endif
