#include "advise_page.h"

#include <stdarg.h>
#include <string.h>

enum { COLUMNS = 100, TEXT_BYTES = 2048 };

void advise_escaped_write(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '>')
            fputs("&gt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '"')
            fputs("&quot;", out);
        else
            fputc(*text, out);
    }
}

static void element_write(const struct advise_page *page, const char *name, const char *text)
{
    fprintf(page->out, "<%s>", name);
    advise_escaped_write(page->out, text);
    fprintf(page->out, "</%s>\n", name);
}

void advise_page_begin(const struct advise_page *page, const char *title)
{
    if (!page->is_html) {
        fprintf(page->out, "%s\n", title);
        return;
    }
    fputs("<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>", page->out);
    advise_escaped_write(page->out, title);
    fputs("</title>\n<style>body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
          "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
          "td:first-child,th:first-child{text-align:left}pre{background:#f4f4f4;padding:.7em;overflow-x:auto}</style>\n",
          page->out);
    element_write(page, "h1", title);
}

void advise_page_end(const struct advise_page *page)
{
    if (page->is_html)
        fputs("</html>\n", page->out);
}

void advise_page_heading(const struct advise_page *page, const char *text)
{
    if (page->is_html)
        element_write(page, "h2", text);
    else
        fprintf(page->out, "\n== %s\n", text);
}

/* Breaks lines at spaces. */
static void wrapped_write(FILE *out, const char *text)
{
    size_t column = 0;
    while (*text) {
        const size_t length = strcspn(text, " ");
        if (column && column + 1 + length > COLUMNS) {
            fputc('\n', out);
            column = 0;
        }
        fprintf(out, "%s%.*s", column ? " " : "", (int)length, text);
        column += length + (column > 0);
        text += length;
        text += *text == ' ';
    }
    fputc('\n', out);
}

void advise_page_text(const struct advise_page *page, const char *format, ...)
{
    char text[TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (page->is_html)
        element_write(page, "p", text);
    else
        wrapped_write(page->out, text);
}

void advise_page_code(const struct advise_page *page, const char *text)
{
    if (page->is_html)
        element_write(page, "pre", text);
    else
        fputs(text, page->out);
}

void advise_page_table_begin(const struct advise_page *page)
{
    if (page->is_html)
        fputs("<table>\n", page->out);
}

void advise_page_row(const struct advise_page *page, const struct advise_row *row, int first, int width, bool is_header)
{
    if (page->is_html)
        fputs("<tr>", page->out);
    for (int i = 0; i < row->count; i++) {
        if (page->is_html)
            element_write(page, is_header ? "th" : "td", row->cells[i]);
        else
            fprintf(page->out, i ? " %*s" : "%-*s", i ? width : first, row->cells[i]);
    }
    fputs(page->is_html ? "</tr>\n" : "\n", page->out);
}

void advise_page_table_end(const struct advise_page *page)
{
    if (page->is_html)
        fputs("</table>\n", page->out);
}

void advise_row_add(struct advise_row *row, const char *format, ...)
{
    va_list args;
    if (row->count == ADVISE_COLUMNS_MAX)
        return;
    va_start(args, format);
    vsnprintf(row->cells[row->count++], ADVISE_CELL_BYTES, format, args);
    va_end(args);
}
