/* How similar two words are, for "did you mean". Pure functions, any thread. */
#ifndef SHOAL_BASE_SPELLING_H
#define SHOAL_BASE_SPELLING_H

#include "base/compiler.h"

/* Returns how many letters must be inserted, removed, changed or swapped with their neighbor to turn a into b (the distance of
 * Damerau and Levenshtein), or SIZE_MAX if one of them has more than 48 letters. */
size_t shoal_spelling_changes(const char *a, const char *b);

/* Returns how similar the name of a setting is to one that exists: 1 if a is b without its last words, such as the unit;
 * otherwise the number of changes, or SIZE_MAX if that is more than a third of a. */
size_t shoal_spelling_distance(const char *a, const char *b);

#endif
