/* Reads JSON (RFC 8259) from the front, value by value. Strict: no trailing commas, comments or other numbers than JSON has.
 * Text must be UTF-8 as far as a name needs it: bytes from 0x80 on are passed through. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

#define DEPTH_MAX 64
#define NUMBER_MAX 64 /* characters */

static bool json_fail(struct json *json, const char *error)
{
    if (!json->error)
        json->error = error;
    return false;
}

void json_open(struct json *json, const char *bytes, size_t count)
{
    *json = (struct json){.at = bytes, .end = bytes + count, .line = 1};
}

static void skip_space(struct json *json)
{
    for (; json->at < json->end && (*json->at == ' ' || *json->at == '\t' || *json->at == '\r' || *json->at == '\n');
         json->at++)
        json->line += *json->at == '\n';
}

/* Returns the next character that is not space, 0 at the end. */
static char peek(struct json *json)
{
    skip_space(json);
    return json->at < json->end ? *json->at : '\0';
}

/* ---- Texts --------------------------------------------------------------------------------------------------------------- */

/* Reads the four digits of an escape. Returns UINT32_MAX if they are wrong. */
static uint32_t read_digits(struct json *json)
{
    uint32_t code = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        const char c = json->at < json->end ? *json->at : '\0';
        const bool is_digit = c >= '0' && c <= '9', is_small = c >= 'a' && c <= 'f', is_large = c >= 'A' && c <= 'F';
        if (!is_digit && !is_small && !is_large)
            return UINT32_MAX;
        code = 16 * code + (uint32_t)(c - (is_digit ? '0' : is_small ? 'a' - 10 : 'A' - 10));
    }
    return code;
}

/* Writes a character as UTF-8. Returns its bytes. */
static size_t write_code(uint32_t code, char to[4])
{
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    const size_t bytes = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    const uint32_t mark = bytes == 2 ? 0xc0 : bytes == 3 ? 0xe0 : 0xf0;
    for (size_t i = bytes - 1; i > 0; i--, code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(mark | code);
    return bytes;
}

/* Behind "\u". Returns the bytes written, 0 if the escape is wrong. */
static size_t read_code(struct json *json, char to[4])
{
    const uint32_t high = read_digits(json);
    if (high == UINT32_MAX || high == 0 || (high >= 0xdc00 && high < 0xe000))
        return 0;
    if (high < 0xd800 || high >= 0xe000)
        return write_code(high, to);
    if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u')
        return 0;
    json->at += 2;
    const uint32_t low = read_digits(json);
    return low >= 0xdc00 && low < 0xe000 ? write_code(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00), to) : 0;
}

/* Reads a character of a text, which may be an escape. Returns the bytes written, 0 if it is wrong. */
static size_t read_character(struct json *json, char to[4])
{
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char c = *json->at++;
    to[0] = c;
    if (c != '\\')
        return (unsigned char)c >= 0x20;
    if (json->at == json->end)
        return 0;
    const char letter = *json->at++;
    if (letter == 'u')
        return read_code(json, to);
    const char *found = letter ? strchr(letters, letter) : NULL;
    to[0] = found ? meant[found - letters] : '\0';
    return found != NULL;
}

/* Reads a text into room for PROFILE_NAME_MAX + 1 bytes. */
static bool read_text(struct json *json, char *text)
{
    size_t used = 0;
    for (json->at++; json->at < json->end && *json->at != '"';) {
        char character[4];
        const size_t bytes = read_character(json, character);
        if (bytes == 0)
            return json_fail(json, "a text has a control character, or an escape that makes no sense");
        if (used + bytes > PROFILE_NAME_MAX)
            return json_fail(json, "a text is longer than 255 bytes");
        memcpy(text + used, character, bytes);
        used += bytes;
    }
    if (json->at == json->end)
        return json_fail(json, "a text has no end");
    json->at++;
    text[used] = '\0';
    return true;
}

/* ---- Numbers and words --------------------------------------------------------------------------------------------------- */

static size_t count_digits(const char *at, const char *end)
{
    size_t digits = 0;
    while (at + digits < end && at[digits] >= '0' && at[digits] <= '9')
        digits++;
    return digits;
}

/* Returns the length of the number that begins here, 0 if there is none. */
static size_t number_length(const char *begin, const char *end)
{
    const char *at = begin + (begin < end && *begin == '-');
    const size_t whole = count_digits(at, end);
    if (whole == 0 || (whole > 1 && *at == '0'))
        return 0;
    at += whole;
    if (at < end && *at == '.') {
        const size_t digits = count_digits(at + 1, end);
        if (digits == 0)
            return 0;
        at += 1 + digits;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        at += at < end && (*at == '+' || *at == '-');
        const size_t digits = count_digits(at, end);
        if (digits == 0)
            return 0;
        at += digits;
    }
    return (size_t)(at - begin);
}

static bool json_number(struct json *json, double *number_out)
{
    char text[NUMBER_MAX + 1];
    const size_t length = number_length(json->at, json->end);
    if (length == 0 || length > NUMBER_MAX)
        return json_fail(json, length ? "a number has more than 64 characters" : "not a value of JSON");
    memcpy(text, json->at, length);
    text[length] = '\0';
    *number_out = strtod(text, NULL);
    json->at += length;
    return true;
}

/* Reads true, false or null. */
static bool json_word(struct json *json)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < 3; i++) {
        const size_t length = strlen(words[i]);
        if ((size_t)(json->end - json->at) >= length && memcmp(json->at, words[i], length) == 0) {
            json->at += length;
            return true;
        }
    }
    return json_fail(json, "not a value of JSON");
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static enum json_kind open_nested(struct json *json, enum json_kind kind)
{
    json->at++;
    if (++json->depth <= DEPTH_MAX)
        return kind;
    (void)json_fail(json, "too deep: more than 64 objects and arrays within each other");
    return JSON_BAD;
}

enum json_kind json_value(struct json *json, struct json_value *value_out)
{
    const char c = peek(json);
    if (c == '{' || c == '[')
        value_out->kind = open_nested(json, c == '{' ? JSON_OBJECT : JSON_ARRAY);
    else if (c == '"')
        value_out->kind = read_text(json, value_out->text) ? JSON_TEXT : JSON_BAD;
    else if (c == '-' || (c >= '0' && c <= '9'))
        value_out->kind = json_number(json, &value_out->number) ? JSON_NUMBER : JSON_BAD;
    else if (c == '\0' && json->at == json->end)
        value_out->kind = json_fail(json, "the text ends before a value") ? JSON_WORD : JSON_BAD;
    else
        value_out->kind = json_word(json) ? JSON_WORD : JSON_BAD;
    return value_out->kind;
}

/* Moves behind a comma, or behind the end. */
static bool next_in(struct json *json, bool first, char end)
{
    const char c = peek(json);
    if (c == end) {
        json->at++;
        json->depth--;
        return false;
    }
    if (first)
        return true;
    if (c != ',')
        return json_fail(json, end == '}' ? "a ',' or '}' is missing" : "a ',' or ']' is missing");
    json->at++;
    return peek(json) != end || json_fail(json, "a ',' has nothing behind it");
}

bool json_element(struct json *json, bool first)
{
    return !json->error && next_in(json, first, ']');
}

bool json_member(struct json *json, bool first, char *key)
{
    if (json->error || !next_in(json, first, '}'))
        return false;
    if (peek(json) != '"')
        return json_fail(json, "a member's name in quotes is missing");
    if (!read_text(json, key))
        return false;
    if (peek(json) != ':')
        return json_fail(json, "a ':' is missing behind a member's name");
    json->at++;
    return true;
}

bool json_skip(struct json *json)
{
    struct json_value value;
    char key[PROFILE_NAME_MAX + 1];
    const enum json_kind kind = json_value(json, &value);
    bool first = true, is_good = kind != JSON_BAD;
    while (is_good && (kind == JSON_OBJECT  ? json_member(json, first, key)
                       : kind == JSON_ARRAY ? json_element(json, first)
                                            : false)) {
        is_good = json_skip(json);
        first = false;
    }
    return is_good && !json->error;
}

bool json_ends(struct json *json)
{
    skip_space(json);
    return !json->error && json->at == json->end;
}
