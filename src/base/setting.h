/* How settings are declared, read and printed. Each module with settings has a struct for their values and a table with a row
 * for each: its name, type, default, limits and meaning. src/comm/settings.c collects the tables; this file names no setting.
 * Settings are read once, when a context is created, and are constant afterwards. */
#ifndef SHOAL_BASE_SETTING_H
#define SHOAL_BASE_SETTING_H

#include "base/compiler.h"

#define SHOAL_SETTING_TEXT_MAX 256
#define SHOAL_SETTING_NAME_MAX 100

/* The type of a value: uint64_t (a BYTES may also be written as 256K), or char[SHOAL_SETTING_TEXT_MAX]. */
enum shoal_setting_type { SHOAL_SETTING_NUMBER, SHOAL_SETTING_BYTES, SHOAL_SETTING_TEXT };

struct shoal_setting {
    const char *name; /* "SHOAL_DEPTH" */
    enum shoal_setting_type type;
    size_t offset; /* of its value in the module's struct */
    const char *preset;
    uint64_t least, most;                /* range of a number; most 0: the whole range of the type */
    const char *const *words;            /* the first word of a text is one of these; NULL: any text */
    const char *const *more;             /* and each further word, after commas, one of these; NULL: no further words */
    bool (*is_valid)(const char *value); /* further check of a text; NULL: none */
    const char *form;                    /* what is_valid requires, in words */
    bool is_secret;                      /* its value is not printed */
    bool is_for_tests;                   /* lists of settings leave it out */
    bool is_agreed;                      /* ranks compare it when they meet */
    size_t agreed_offset;                /* for a text: offset of the number that ranks compare, which its reader sets */
    const char *disagreement;            /* the message if texts differ */
    const char *text;                    /* its meaning, for people */
};

/* The settings of one module, in the order in which they are printed. */
struct shoal_setting_table {
    const struct shoal_setting *settings;
    size_t count;
};

/* Writes a value into the module's struct. On ERR_ARGUMENT, `error` (at least 256 bytes) describes what is wrong with the value
 * and what is allowed. */
SHOAL_MUST_USE enum shoal_status shoal_setting_assign(const struct shoal_setting *setting, void *values, const char *value,
                                                      char *error, size_t error_bytes);

/* Returns the value of an environment variable, or NULL if it is not set or empty. */
const char *shoal_setting_from_environment(const char *name);

/* Prints two lines: name, value and default; then the meaning. */
void shoal_setting_print(const struct shoal_setting *setting, const void *values, FILE *out);

/* Returns true if a text of `bytes` bytes is among the words, an array that ends with NULL. */
bool shoal_setting_is_one_of(const char *const *words, const char *text, size_t bytes);

/* ---- Settings that ranks must agree on ----------------------------------------------------------------------------------- */

#define SHOAL_AGREED_MAX 8

/* The values, as sent to other ranks. Unused ones are 0. */
struct shoal_agreed {
    uint64_t values[SHOAL_AGREED_MAX];
};

/* This process's values, and the setting behind each. */
struct shoal_agreed_own {
    struct shoal_agreed agreed;
    const struct shoal_setting *settings[SHOAL_AGREED_MAX];
    size_t count;
};

/* Adds the value of a setting that ranks must agree on. */
void shoal_agreed_add(struct shoal_agreed_own *own, const struct shoal_setting *setting, const void *values);
bool shoal_agreed_is_same(const struct shoal_agreed *a, const struct shoal_agreed *b);
/* A hash of the values, for the handshake. */
uint64_t shoal_agreed_hash(const struct shoal_agreed *agreed);
/* Prints "SHOAL_DEPTH is 5 there, 4 on rank 0" if `where` is "on rank 0", or "" if the values agree. `own` names the
 * settings. */
void shoal_agreed_print_difference(const struct shoal_agreed_own *own, const struct shoal_agreed *there,
                                   const struct shoal_agreed *here, const char *where, char *text, size_t bytes);

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/: adds bytes to a hash that began as SHOAL_HASH_START. */
#define SHOAL_HASH_START UINT64_C(14695981039346656037)
uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes);

/* Parses "20000-20099", or one port. If the text is empty, both become 0. Returns false if it is invalid. */
bool shoal_setting_parse_ports(const char *text, uint16_t *low_out, uint16_t *high_out);

/* Parses sizes: "256K" becomes 262144. K, M, G are powers of 1024; "iB" or "B" may follow. Returns false if the text is
 * invalid. */
bool shoal_setting_parse_bytes(const char *text, uint64_t *bytes_out);

/* Returns the folder for files without a name from the user: TMPDIR, or /tmp. */
const char *shoal_setting_temporary_folder(void);

#endif
