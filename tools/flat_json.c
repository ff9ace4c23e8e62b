/* Reads JSON as the flight recorder writes it: one flat object per line. Rejects any other text, including nested values. */
#include "flat_json.h"

#include <string.h>

#include "base/json_text.h"

static enum json_step bad(struct json_reader *json, const char *error)
{
    json->error = error;
    return JSON_BAD;
}

static void space_skip(struct json_reader *json)
{
    json->at += strspn(json->at, " \t\r\n");
}

/* ---- Texts --------------------------------------------------------------------------------------------------------------- */

static size_t code_write(unsigned code, char *to)
{
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    const size_t bytes = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char marks[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes - 1; i > 0; i--, code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(marks[bytes] | code);
    return bytes;
}

/* Reads "00e9" after \u. Returns -1 if it is invalid. */
static int unit_read(const char *at)
{
    static const char digits[] = "0123456789abcdef";
    int unit = 0;
    for (int i = 0; i < 4; i++) {
        const char c = at[i] >= 'A' && at[i] <= 'F' ? (char)(at[i] + 'a' - 'A') : at[i];
        const char *digit = c ? strchr(digits, c) : NULL;
        if (!digit)
            return -1;
        unit = unit * 16 + (int)(digit - digits);
    }
    return unit;
}

/* Called at the u of an escape. Returns the bytes written, or 0 if the escape is invalid. */
static size_t unicode_read(struct json_reader *json, char *to)
{
    const int high = unit_read(json->at + 1);
    json->at += 5;
    if (high <= 0 || (high >= 0xdc00 && high < 0xe000))
        return 0;
    if (high < 0xd800 || high >= 0xe000)
        return code_write((unsigned)high, to);
    const int low = json->at[0] == '\\' && json->at[1] == 'u' ? unit_read(json->at + 2) : -1;
    if (low < 0xdc00 || low >= 0xe000)
        return 0;
    json->at += 6;
    return code_write(0x10000 + (((unsigned)high - 0xd800) << 10) + ((unsigned)low - 0xdc00), to);
}

/* Called at a backslash. Returns the bytes written, or 0 if the escape is invalid. The output is never longer than the
 * input. */
static size_t escape_read(struct json_reader *json, char *to)
{
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    json->at++;
    if (*json->at == 'u')
        return strnlen(json->at, 5) == 5 ? unicode_read(json, to) : 0;
    const char *letter = *json->at ? strchr(letters, *json->at) : NULL;
    if (!letter)
        return 0;
    json->at++;
    *to = meant[letter - letters];
    return 1;
}

/* Reads one character, which may be an escape. Returns the bytes written, or 0 with `error` set. */
static size_t character_read(struct json_reader *json, char *to)
{
    const unsigned char first = (unsigned char)*json->at;
    const size_t bytes = first == '\\' ? escape_read(json, to) : shoal_json_character_bytes(json->at);
    if (!first)
        json->error = "a text has no end";
    else if (first < 0x20)
        json->error = "a text holds a control character";
    else if (!bytes)
        json->error = first == '\\' ? "an escape in a text makes no sense" : "a text is not UTF-8";
    if (json->error)
        return 0;
    if (first != '\\') {
        memmove(to, json->at, bytes);
        json->at += bytes;
    }
    return bytes;
}

/* Called at a quote. Decodes in place. Returns NULL with `error` set if the text is invalid. */
static char *text_read(struct json_reader *json)
{
    char *const text = ++json->at, *to = text;
    while (*json->at != '"') {
        const size_t bytes = character_read(json, to);
        if (!bytes)
            return NULL;
        to += bytes;
    }
    json->at++;
    *to = 0;
    return text;
}

/* ---- Other values -------------------------------------------------------------------------------------------------------- */

/* Returns how many bytes of text are a number in JSON, or 0. */
static size_t number_bytes(const char *text)
{
    static const char digits[] = "0123456789";
    const char *at = text + (*text == '-');
    const size_t whole = strspn(at, digits);
    if (!whole || (whole > 1 && *at == '0'))
        return 0;
    at += whole;
    if (*at == '.') {
        const size_t part = strspn(at + 1, digits);
        if (!part)
            return 0;
        at += 1 + part;
    }
    if (*at == 'e' || *at == 'E') {
        at += 1 + (at[1] == '+' || at[1] == '-');
        const size_t power = strspn(at, digits);
        if (!power)
            return 0;
        at += power;
    }
    return (size_t)(at - text);
}

static enum json_step number_read(struct json_reader *json)
{
    const size_t bytes = number_bytes(json->at);
    if (!bytes)
        return bad(json, "a value is not a text, a number or null");
    if (bytes >= sizeof json->number)
        return bad(json, "a number is too long");
    memcpy(json->number, json->at, bytes);
    json->number[bytes] = 0;
    json->text = json->number;
    json->kind = JSON_NUMBER;
    json->at += bytes;
    return JSON_MEMBER;
}

static enum json_step word_read(struct json_reader *json)
{
    static const struct {
        const char *word;
        enum json_value kind;
    } words[] = {{"null", JSON_NULL}, {"true", JSON_BOOLEAN}, {"false", JSON_BOOLEAN}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        const size_t bytes = strlen(words[i].word);
        if (strncmp(json->at, words[i].word, bytes) != 0)
            continue;
        json->kind = words[i].kind;
        json->at += bytes;
        return JSON_MEMBER;
    }
    return number_read(json);
}

static enum json_step value_read(struct json_reader *json)
{
    if (*json->at == '{' || *json->at == '[')
        return bad(json, "a value holds other values, but objects are flat here");
    if (*json->at != '"')
        return word_read(json);
    json->kind = JSON_TEXT;
    json->text = text_read(json);
    return json->text ? JSON_MEMBER : JSON_BAD;
}

/* ---- The object ---------------------------------------------------------------------------------------------------------- */

void json_open(struct json_reader *json, char *text)
{
    memset(json, 0, sizeof *json);
    json->begin = json->at = text;
}

static enum json_step end_read(struct json_reader *json)
{
    json->at++;
    space_skip(json);
    return *json->at && !json->is_part ? bad(json, "more follows after the object's end") : JSON_END;
}

static enum json_step member_read(struct json_reader *json)
{
    if (*json->at != '"')
        return bad(json, "a name in quotes is missing");
    json->key = text_read(json);
    if (!json->key)
        return JSON_BAD;
    space_skip(json);
    if (*json->at != ':')
        return bad(json, "a ':' is missing after a name");
    json->at++;
    space_skip(json);
    return value_read(json);
}

enum json_step json_next(struct json_reader *json)
{
    space_skip(json);
    if (!json->is_begun && *json->at != '{')
        return bad(json, "this is not a line of a flight recorder: those begin with '{'");
    if (json->is_begun && *json->at == '}')
        return end_read(json);
    if (json->is_begun && *json->at != ',')
        return bad(json, "a ',' or '}' is missing after a value");
    json->at++;
    space_skip(json);
    if (!json->is_begun && *json->at == '}')
        return end_read(json);
    json->is_begun = true;
    return member_read(json);
}
