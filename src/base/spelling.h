/* How similar two words are, for "did you mean". Pure functions, any thread. */
#ifndef SHOAL_BASE_SPELLING_H
#define SHOAL_BASE_SPELLING_H

#include "base/compiler.h"

/* Returns how many letters must be inserted, removed, changed or swapped with their neighbor to turn a into b; 1 if a is b
 * without its last words, such as the unit; SIZE_MAX if that is more than a third of a. */
size_t shoal_spelling_distance(const char *a, const char *b);

#endif
