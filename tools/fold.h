/* Long lines on a terminal: the commands print lines of up to 128 columns, and a narrower terminal would break them in the
 * middle of words. From fold_begin on, what is printed to stdout is broken between words; the rest of a line goes on below the
 * column where its text began. Files and pipes get every line as it is. Main thread. */
#ifndef SHOAL_TOOLS_FOLD_H
#define SHOAL_TOOLS_FOLD_H

#include <stdio.h>

/* Does nothing where stdout is no terminal. For commands that print whole lines and move no cursor. */
void fold_begin(void);

/* Writes a line of so many bytes, without its end, in lines of at most `width` columns; a longer word stays whole. */
void fold_line(FILE *out, const char *line, size_t bytes, size_t width);

#endif
