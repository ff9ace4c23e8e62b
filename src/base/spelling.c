#include "base/spelling.h"

#include <string.h>

#define LETTERS_MAX 48

static size_t least_of(size_t a, size_t b, size_t c)
{
    return shoal_min_size(shoal_min_size(a, b), c);
}

/* Computes row by row. A row ends with the distance from the first letters of a to all of b. */
size_t shoal_spelling_changes(const char *a, const char *b)
{
    const size_t a_length = strlen(a), b_length = strlen(b);
    size_t rows[3][LETTERS_MAX + 1] = {{0}};
    size_t *before = rows[0], *above = rows[1], *row = rows[2];
    if (a_length > LETTERS_MAX || b_length > LETTERS_MAX)
        return SIZE_MAX;
    for (size_t j = 0; j <= b_length; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t *const spare = before;
        before = above;
        above = row;
        row = spare;
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            row[j] = least_of(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = shoal_min_size(row[j], before[j - 2] + 1);
        }
    }
    return row[b_length];
}

size_t shoal_spelling_distance(const char *a, const char *b)
{
    const size_t a_length = strlen(a);
    if (a_length <= LETTERS_MAX && strncmp(a, b, a_length) == 0 && b[a_length] == '_')
        return 1;
    const size_t changes = shoal_spelling_changes(a, b);
    return changes <= a_length / 3 ? changes : SIZE_MAX;
}
