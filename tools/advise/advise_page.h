/* Writes the page of `shoal advise` as text or as HTML. Main thread. */
#ifndef SHOAL_TOOLS_ADVISE_PAGE_H
#define SHOAL_TOOLS_ADVISE_PAGE_H

#include <stdbool.h>
#include <stdio.h>

enum { ADVISE_CELL_BYTES = 64, ADVISE_COLUMNS_MAX = 12 };

struct advise_page {
    FILE *out;
    bool is_html;
};

/* A table's row. In text, the first column is as wide as `first`, the others as `width`, right-aligned. */
struct advise_row {
    char cells[ADVISE_COLUMNS_MAX][ADVISE_CELL_BYTES];
    int count;
};

void advise_page_begin(const struct advise_page *page, const char *title);
void advise_page_end(const struct advise_page *page);
void advise_page_heading(const struct advise_page *page, const char *text);

/* Writes a paragraph; in text its lines are at most 100 columns wide. */
void advise_page_text(const struct advise_page *page, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes lines as they are, without a change of their breaks. */
void advise_page_code(const struct advise_page *page, const char *text);

void advise_page_table_begin(const struct advise_page *page);
void advise_page_row(const struct advise_page *page, const struct advise_row *row, int first, int width, bool is_header);
void advise_page_table_end(const struct advise_page *page);

/* Adds a cell. */
void advise_row_add(struct advise_row *row, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes text with the characters escaped that HTML reserves. */
void advise_escaped_write(FILE *out, const char *text);

#endif
