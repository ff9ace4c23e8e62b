/* How settings are declared, read and printed. Each module that reads settings has a struct with their values and a table with
 * a row for each: its name, type, default, limits and meaning. src/comm/settings.c collects the tables; this file names no
 * setting. Settings are read once, when a context is made, and are constant afterwards. */
#ifndef SHOAL_BASE_SETTING_H
#define SHOAL_BASE_SETTING_H

#include "base/compiler.h"

#define SHOAL_SETTING_TEXT_MAX 256
#define SHOAL_SETTING_NAME_MAX 100

/* The type of a value: uint64_t (a BYTES is written as 256K, too), or char[SHOAL_SETTING_TEXT_MAX]. */
enum shoal_setting_type { SHOAL_SETTING_NUMBER, SHOAL_SETTING_BYTES, SHOAL_SETTING_TEXT };

struct shoal_setting {
    const char *name;   /* "SHOAL_DEPTH" */
    const char *former; /* the name it had before, which still works; NULL: none */
    enum shoal_setting_type type;
    size_t offset; /* of its value in the module's struct */
    const char *preset;
    uint64_t least, most;                /* of a number; most 0: what fits */
    const char *const *words;            /* a text is one of these; NULL: any */
    const char *const *more;             /* and then, after commas, any of these; NULL: none */
    bool (*is_valid)(const char *value); /* and is this; NULL: any is */
    const char *form;                    /* what is_valid wants, in words */
    bool is_secret;                      /* its value is not printed */
    bool is_agreed;                      /* ranks compare it when they meet */
    size_t agreed_offset;                /* of what they compare for a text: a number that whoever reads the text puts there */
    const char *disagreement;            /* what is said where texts differ */
    const char *text;                    /* what it means, for people */
};

/* The settings of one module, in the order in which they are printed. */
struct shoal_setting_table {
    const struct shoal_setting *settings;
    size_t count;
};

/* Writes a value into the module's struct. On ERR_ARGUMENT, error (of at least 256 bytes) says what is wrong with the value and
 * what is allowed. */
SHOAL_MUST_USE enum shoal_status shoal_setting_assign(const struct shoal_setting *setting, void *values, const char *value,
                                                      char *error, size_t error_bytes);

/* The value of a variable of the environment; NULL when it is not set, or empty. */
const char *shoal_setting_from_environment(const char *name);

/* Two lines: name, value and default; what it means. */
void shoal_setting_print(const struct shoal_setting *setting, const void *values, FILE *out);

/* Whether a text of `bytes` bytes is among the words, which NULL ends. */
bool shoal_setting_is_one_of(const char *const *words, const char *text, size_t bytes);

/* ---- What ranks must agree on -------------------------------------------------------------------------------------------- */

#define SHOAL_AGREED_MAX 8

/* As it travels; those that are not in use are 0. */
struct shoal_agreed {
    uint64_t values[SHOAL_AGREED_MAX];
};

/* This process's, and what the values are of. */
struct shoal_agreed_own {
    struct shoal_agreed agreed;
    const struct shoal_setting *settings[SHOAL_AGREED_MAX];
    size_t count;
};

/* Adds the value of a setting that ranks must agree on. */
void shoal_agreed_add(struct shoal_agreed_own *own, const struct shoal_setting *setting, const void *values);
bool shoal_agreed_is_same(const struct shoal_agreed *a, const struct shoal_agreed *b);
/* For the handshake. */
uint64_t shoal_agreed_hash(const struct shoal_agreed *agreed);
/* "SHOAL_DEPTH is 5 there, 4 on rank 0", where `where` is "on rank 0"; "" when they are the same. `own` says what the values
 * are of. */
void shoal_agreed_print_difference(const struct shoal_agreed_own *own, const struct shoal_agreed *there,
                                   const struct shoal_agreed *here, const char *where, char *text, size_t bytes);

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/: adds bytes to a hash that began as SHOAL_HASH_START. */
#define SHOAL_HASH_START UINT64_C(14695981039346656037)
uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes);

/* "40000-40099", or one port; empty: both become 0. False when it is no such text. */
bool shoal_setting_parse_ports(const char *text, uint16_t *low_out, uint16_t *high_out);

/* "256K" -> 262144. K, M, G are powers of 1024, an optional "iB" or "B" may follow. False when it is no such text. */
bool shoal_setting_parse_bytes(const char *text, uint64_t *bytes_out);

/* The folder for files that nobody has named: TMPDIR, or /tmp. */
const char *shoal_setting_temporary_folder(void);

#endif
