#include "fold.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tool.h"

enum { WIDTH_LEAST = 20, LINE_BYTES = 4096 };

/* The beginning of a line that is not complete yet. A line longer than that is written unfolded. */
static struct {
    FILE *out; /* the terminal */
    size_t width;
    char line[LINE_BYTES];
    size_t length;
} fold;

/* Counts one column for one character of UTF-8. */
static size_t columns_of(const char *text, size_t bytes)
{
    size_t columns = 0;
    for (size_t i = 0; i < bytes; i++)
        columns += ((unsigned char)text[i] & 0xC0) != 0x80;
    return columns;
}

/* Returns the column at which a line continues: below its text. In a table the text begins after the last gap of two blanks in
 * the left half. */
static size_t indent_of(const char *line, size_t bytes, size_t width)
{
    size_t lead = 0, indent;
    while (lead < bytes && line[lead] == ' ')
        lead++;
    indent = lead;
    for (size_t i = lead + 2; i < bytes; i++)
        if (line[i] != ' ' && line[i - 1] == ' ' && line[i - 2] == ' ' && columns_of(line, i) <= width / 2)
            indent = columns_of(line, i);
    return indent <= width / 2 ? indent : 0;
}

/* Returns the end of the first line of at most `columns`: before a blank, after at least one word. */
static size_t break_find(const char *text, size_t bytes, size_t columns)
{
    size_t at = 0, used = 0, word = 0;
    while (word < bytes && text[word] == ' ')
        word++;
    for (size_t i = word; i <= bytes; i++) {
        if (i == bytes || (text[i] == ' ' && i > word && text[i - 1] != ' ')) {
            used = columns_of(text, i);
            if (used > columns)
                return at ? at : i;
            at = i;
        }
    }
    return bytes;
}

void fold_line(FILE *out, const char *line, size_t bytes, size_t width)
{
    const size_t indent = indent_of(line, bytes, width);
    size_t columns = width;
    while (bytes && line[bytes - 1] == ' ')
        bytes--;
    for (;;) {
        const size_t end = break_find(line, bytes, columns);
        fwrite(line, 1, end, out);
        fputc('\n', out);
        line += end;
        bytes -= end;
        for (; bytes && *line == ' '; bytes--)
            line++;
        if (!bytes)
            return;
        fprintf(out, "%*s", (int)indent, "");
        columns = width - indent;
    }
}

static void rest_write(void)
{
    fwrite(fold.line, 1, fold.length, fold.out);
    fold.length = 0;
    fflush(fold.out);
}

static ssize_t fold_write(void *cookie, const char *bytes, size_t count)
{
    (void)cookie;
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] == '\n') {
            fold_line(fold.out, fold.line, fold.length, fold.width);
            fold.length = 0;
        } else {
            if (fold.length == LINE_BYTES)
                rest_write();
            fold.line[fold.length++] = bytes[i];
        }
    }
    return fflush(fold.out) == 0 ? (ssize_t)count : 0;
}

static void end(void)
{
    fflush(stdout);
    rest_write();
}

void fold_begin(void)
{
    int rows, columns;
    if (fold.out || !tool_terminal_read(STDOUT_FILENO, &rows, &columns) || columns < WIDTH_LEAST)
        return;
    FILE *folded = fopencookie(NULL, "w", (cookie_io_functions_t){.write = fold_write});
    if (!folded)
        return;
    setvbuf(folded, NULL, _IOLBF, BUFSIZ);
    fold.out = stdout;
    fold.width = (size_t)columns;
    stdout = folded;
    atexit(end);
}
