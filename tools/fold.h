/* Folds long lines on a terminal. The commands print lines of up to 128 columns, and a narrower terminal would break them in
 * the middle of words. After fold_begin, text printed to stdout is broken between words, and the rest of a line continues below
 * the column at which its text began. Files and pipes get every line unchanged. Main thread. */
#ifndef SHOAL_TOOLS_FOLD_H
#define SHOAL_TOOLS_FOLD_H

#include <stdio.h>

/* Begins folding. Does nothing if stdout is not a terminal. For commands that print whole lines and do not move the cursor. */
void fold_begin(void);

/* Writes a line of `bytes` bytes, without its end, as lines of at most `width` columns; a longer word stays whole. */
void fold_line(FILE *out, const char *line, size_t bytes, size_t width);

#endif
