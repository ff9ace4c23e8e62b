#include "base/json_text.h"

#include <string.h>

#include "base/compiler.h"

size_t shoal_json_character_bytes(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    const size_t bytes = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : at[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    }
    const bool is_overlong = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90);
    const bool is_no_code = (at[0] == 0xed && at[1] >= 0xa0) || (at[0] == 0xf4 && at[1] >= 0x90);
    return is_overlong || is_no_code ? 0 : bytes;
}

/* Prints one character, and returns its bytes. */
static size_t print_character(FILE *out, const char *at, size_t left)
{
    const size_t bytes = shoal_json_character_bytes(at);
    if (*at == '"' || *at == '\\')
        fprintf(out, "\\%c", *at);
    else if ((unsigned char)*at < 0x20)
        fprintf(out, "\\u%04x", (unsigned)*at);
    else if (bytes > 0 && bytes <= left)
        fwrite(at, 1, bytes, out);
    else
        fputc('?', out);
    return bytes > 0 && bytes <= left ? bytes : 1;
}

void shoal_json_print_bytes(FILE *out, const char *text, size_t bytes)
{
    fputc('"', out);
    for (size_t at = 0; at < bytes;)
        at += print_character(out, text + at, bytes - at);
    fputc('"', out);
}

void shoal_json_print_text(FILE *out, const char *text)
{
    shoal_json_print_bytes(out, text, strlen(text));
}
