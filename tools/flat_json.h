/* Reads JSON of one level: the flat objects in which the flight recorder, profiles and reports of other ranks are written. A
 * reader walks over the members of one object in place, and rejects any other text, also nested values. base/json_text.h writes
 * texts. */
#ifndef SHOAL_TOOLS_FLAT_JSON_H
#define SHOAL_TOOLS_FLAT_JSON_H

#include <stdbool.h>

enum json_value { JSON_TEXT, JSON_NUMBER, JSON_NULL, JSON_BOOLEAN };

/* A walk over one flat object. It modifies the text, which then contains the members' decoded texts. */
struct json_reader {
    char *begin, *at;
    const char *error;
    const char *key;
    enum json_value kind;
    char *text; /* a text, decoded, or a number as it is written */
    char number[64];
    bool is_begun;
    bool is_part; /* set after opening if text may follow the object's end; `at` then points there */
};

enum json_step { JSON_MEMBER, JSON_END, JSON_BAD };

/* Returns the next member, or JSON_BAD with `error` set and `at` at the fault. text ends with a zero byte. */
void json_open(struct json_reader *json, char *text);
enum json_step json_next(struct json_reader *json);

#endif
