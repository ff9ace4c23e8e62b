/* Texts as JSON. Pure functions; libc only; any thread. */
#ifndef SHOAL_BASE_JSON_TEXT_H
#define SHOAL_BASE_JSON_TEXT_H

#include <stddef.h>
#include <stdio.h>

/* Returns the number of bytes of the UTF-8 character at `text` (RFC 3629), or 0 if it is none: overlong, a surrogate, above
 * U+10FFFF, or cut off. The text ends with 0, which is a character of one byte. */
size_t shoal_json_character_bytes(const char *text);

/* Prints a text as a JSON string, in quotes. Bytes that are not UTF-8 become "?", as names may have been cut inside a
 * character. */
void shoal_json_print_text(FILE *out, const char *text);

/* Like shoal_json_print_text(), but prints only the first `bytes` bytes. */
void shoal_json_print_bytes(FILE *out, const char *text, size_t bytes);

#endif
