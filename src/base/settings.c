#include "base/settings.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum kind { NUMBER, BYTES, TEXT };

struct row {
    const char *name;
    size_t offset;
    enum kind kind;
    const char *preset;
    bool agreed;
    const char *text;
};

static const struct row rows[] = {
#define ROW(name, field, kind, preset, agreed, text) \
    {"SHOAL_" #name, offsetof(struct shoal_settings, field), kind, preset, agreed, text},
    SHOAL_SETTINGS_LIST(ROW)
#undef ROW
};

/* What a value may be beyond its kind. */
static const struct {
    const char *name;
    uint64_t least, most;
} ranges[] = {
    {"SHOAL_DEPTH", 1, 16},
    {"SHOAL_DIRECT_BYTES", 0, 16384},
    {"SHOAL_PIECE_BYTES", 4096, UINT64_C(64) << 20},
    {"SHOAL_PORT", 0, 65535},
    {"SHOAL_TIMEOUT_MS", 1, UINT32_MAX},
    {"SHOAL_WARN_MS", 1, UINT32_MAX},
    {"SHOAL_BOOTSTRAP_TIMEOUT_MS", 1, UINT32_MAX},
};

static const struct {
    const char *name;
    const char *words[4];
} choices[] = {
    {"SHOAL_STORES", {"auto", "cached", "streaming"}},
    {"SHOAL_KERNELS", {"auto", "baseline", "avx2", "avx512"}},
};

static bool parse_number(const char *text, uint64_t *value_out)
{
    char *end;
    if (!isdigit((unsigned char)text[0]))
        return false;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end)
        return false;
    *value_out = value;
    return true;
}

bool shoal_settings_parse_bytes(const char *text, uint64_t *bytes_out)
{
    char *end;
    if (!isdigit((unsigned char)text[0]))
        return false;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno)
        return false;
    unsigned shift = 0;
    if (*end && strchr("kKmMgG", *end)) {
        shift = *end == 'k' || *end == 'K' ? 10 : *end == 'm' || *end == 'M' ? 20 : 30;
        end++;
        if (*end == 'i')
            end++;
    }
    if (*end == 'B')
        end++;
    if (*end || value > UINT64_MAX >> shift)
        return false;
    *bytes_out = (uint64_t)value << shift;
    return true;
}

static bool in_range(const struct row *row, uint64_t value, char *error, size_t error_bytes)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(ranges); i++) {
        if (strcmp(ranges[i].name, row->name) == 0 && (value < ranges[i].least || value > ranges[i].most)) {
            snprintf(error, error_bytes, "%s is %llu, but may be %llu to %llu", row->name, (unsigned long long)value,
                     (unsigned long long)ranges[i].least, (unsigned long long)ranges[i].most);
            return false;
        }
    }
    return true;
}

static bool is_choice(const struct row *row, const char *value, char *error, size_t error_bytes)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(choices); i++) {
        if (strcmp(choices[i].name, row->name) != 0)
            continue;
        for (size_t w = 0; w < SHOAL_COUNT_OF(choices[i].words) && choices[i].words[w]; w++) {
            if (strcmp(choices[i].words[w], value) == 0)
                return true;
        }
        snprintf(error, error_bytes, "%s is \"%.60s\", but may be %s, %s, %s%s%s", row->name, value, choices[i].words[0],
                 choices[i].words[1], choices[i].words[2], choices[i].words[3] ? ", " : "",
                 choices[i].words[3] ? choices[i].words[3] : "");
        return false;
    }
    return true;
}

static enum shoal_status assign(struct shoal_settings *settings, const struct row *row, const char *value, char *error,
                                size_t error_bytes)
{
    char *field = (char *)settings + row->offset;
    if (row->kind == TEXT) {
        if (strlen(value) >= SHOAL_SETTING_TEXT_MAX) {
            snprintf(error, error_bytes, "%s is longer than %d bytes", row->name, SHOAL_SETTING_TEXT_MAX - 1);
            return SHOAL_ERR_ARGUMENT;
        }
        if (!is_choice(row, value, error, error_bytes))
            return SHOAL_ERR_ARGUMENT;
        strcpy(field, value);
        return SHOAL_OK;
    }
    uint64_t number;
    const bool fits = row->kind == NUMBER ? parse_number(value, &number) : shoal_settings_parse_bytes(value, &number);
    if (!fits) {
        snprintf(error, error_bytes, "%s is \"%.60s\", but must be %s", row->name, value,
                 row->kind == NUMBER ? "a whole number" : "a size such as 4096, 256K or 1M");
        return SHOAL_ERR_ARGUMENT;
    }
    if (!in_range(row, number, error, error_bytes))
        return SHOAL_ERR_ARGUMENT;
    memcpy(field, &number, sizeof number);
    return SHOAL_OK;
}

static enum shoal_status assign_override(struct shoal_settings *settings, const char *text, char *error, size_t error_bytes)
{
    const char *equals = strchr(text, '=');
    for (size_t i = 0; equals && i < SHOAL_COUNT_OF(rows); i++) {
        if (strlen(rows[i].name) == (size_t)(equals - text) && strncmp(rows[i].name, text, (size_t)(equals - text)) == 0)
            return assign(settings, &rows[i], equals + 1, error, error_bytes);
    }
    snprintf(error, error_bytes, "\"%.100s\" is not a setting (SHOAL_NAME=value; `shoal info --settings` lists them)", text);
    return SHOAL_ERR_ARGUMENT;
}

enum shoal_status shoal_settings_load(struct shoal_settings *settings_out, const char *const *overrides, char *error,
                                      size_t error_bytes)
{
    struct shoal_settings settings;
    memset(&settings, 0, sizeof settings);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const char *value = getenv(rows[i].name);
        SHOAL_TRY(assign(&settings, &rows[i], rows[i].preset, error, error_bytes));
        if (value && *value)
            SHOAL_TRY(assign(&settings, &rows[i], value, error, error_bytes));
    }
    for (size_t i = 0; overrides && overrides[i]; i++)
        SHOAL_TRY(assign_override(&settings, overrides[i], error, error_bytes));
    *settings_out = settings;
    return SHOAL_OK;
}

uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(1099511628211);
    return hash;
}

uint64_t shoal_settings_hash(const struct shoal_settings *settings)
{
    uint64_t hash = shoal_hash_bytes(SHOAL_HASH_START, &settings->rules_hash, sizeof settings->rules_hash);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const char *field = (const char *)settings + rows[i].offset;
        if (rows[i].agreed)
            hash = shoal_hash_bytes(hash, field, rows[i].kind == TEXT ? strlen(field) : sizeof(uint64_t));
    }
    return hash;
}

void shoal_settings_print(const struct shoal_settings *settings, FILE *out)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const char *field = (const char *)settings + rows[i].offset;
        const bool is_secret = strcmp(rows[i].name, "SHOAL_SECRET") == 0;
        char number[32];
        if (rows[i].kind != TEXT) {
            uint64_t value;
            memcpy(&value, field, sizeof value);
            snprintf(number, sizeof number, "%llu", (unsigned long long)value);
        }
        const char *value = rows[i].kind != TEXT ? number : is_secret && *field ? "(set)" : *field ? field : "-";
        fprintf(out, "%-28s %-12s (default %s%s)\n    %s\n", rows[i].name, value, *rows[i].preset ? rows[i].preset : "-",
                rows[i].agreed ? ", the same on every rank" : "", rows[i].text);
    }
}
