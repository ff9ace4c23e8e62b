#include "base/settings.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/spelling.h"

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

/* The limits of a value, beyond its kind. */
static const struct {
    const char *name;
    uint64_t least, most;
} ranges[] = {
    {"SHOAL_DEPTH", 1, 16},
    {"SHOAL_DIRECT_BYTES", 0, 16384},
    {"SHOAL_CHUNK_BYTES", 4096, UINT64_C(64) << 20},
    {"SHOAL_PORT", 0, 65535},
    {"SHOAL_TIMEOUT_MS", 1, UINT32_MAX},
    {"SHOAL_WARN_MS", 1, UINT32_MAX},
    {"SHOAL_BOOTSTRAP_TIMEOUT_MS", 1, UINT32_MAX},
};

static const char *const levels[] = {"warn", "info", "debug", NULL};
static const char *const modules[] = {"bootstrap", "comm", "engine", "fabric", "hosts", "observe", "shm", NULL}; /* that log */
static const char *const stores[] = {"auto", "cached", "streaming", NULL};
static const char *const writes[] = {"auto", "no", NULL};
static const char *const moves[] = {"auto", "no", NULL};
static const char *const dump_signals[] = {"no", "USR1", "USR2", NULL};
static const char *const kernels[] = {"auto", "baseline", "avx2", "avx512", NULL};

/* The texts that are allowed: one of `words`, then, after commas, any of `more`. */
static const struct choice {
    const char *name;
    const char *const *words, *const *more;
} choices[] = {
    {"SHOAL_LOG", levels, modules},
    {"SHOAL_STORES", stores, NULL},
    {"SHOAL_KERNELS", kernels, NULL},
    {"SHOAL_WRITES", writes, NULL},
    {"SHOAL_MOVE", moves, NULL},
    {"SHOAL_DUMP_SIGNAL", dump_signals, NULL},
};

/* Settings that were renamed: the former name still works, where the present one is not set. */
static const struct {
    const char *former, *present;
} renamed[] = {
    {"SHOAL_PIECE_BYTES", "SHOAL_CHUNK_BYTES"},
};

/* Variables that are no settings: what `shoal run` tells its workers, what the Python package reads. */
static const char *const others[] = {"SHOAL_RUN_TERMINAL", "SHOAL_LIBRARY", "SHOAL_TORCH_SHIM", "SHOAL_TORCH_CACHE", NULL};

_Static_assert(SHOAL_COUNT_OF(renamed) <= 64, "a bit of former_names for each");

#define PREFIX "SHOAL_"

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

static bool is_one_of(const char *const *words, const char *text, size_t bytes)
{
    for (; *words; words++) {
        if (strlen(*words) == bytes && strncmp(*words, text, bytes) == 0)
            return true;
    }
    return false;
}

static bool is_chosen(const struct choice *choice, const char *value)
{
    size_t bytes = choice->more ? strcspn(value, ",") : strlen(value);
    bool is_known = is_one_of(choice->words, value, bytes);
    while (is_known && value[bytes] == ',') {
        value += bytes + 1;
        bytes = strcspn(value, ",");
        is_known = is_one_of(choice->more, value, bytes);
    }
    return is_known;
}

static void append_words(char *text, size_t bytes, const char *before, const char *const *words)
{
    size_t used = strlen(text);
    for (; words && *words && used < bytes; words++) {
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", before, *words);
        before = ", ";
    }
}

static bool is_choice(const struct row *row, const char *value, char *error, size_t error_bytes)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(choices); i++) {
        if (strcmp(choices[i].name, row->name) != 0 || is_chosen(&choices[i], value))
            continue;
        snprintf(error, error_bytes, "%s is \"%.60s\"", row->name, value);
        append_words(error, error_bytes, ", but may be ", choices[i].words);
        append_words(error, error_bytes, "; then, after commas, ", choices[i].more);
        return false;
    }
    return true;
}

static bool settings_parse_port(const char *text, char **end_out, uint16_t *port_out)
{
    if (!isdigit((unsigned char)text[0]))
        return false;
    const unsigned long port = strtoul(text, end_out, 10);
    *port_out = (uint16_t)port;
    return port >= 1 && port <= UINT16_MAX;
}

bool shoal_settings_parse_ports(const char *text, uint16_t *low_out, uint16_t *high_out)
{
    char *end;
    *low_out = *high_out = 0;
    if (!*text)
        return true;
    if (!settings_parse_port(text, &end, low_out))
        return false;
    *high_out = *low_out;
    if (*end == '-' && !settings_parse_port(end + 1, &end, high_out))
        return false;
    return *end == 0 && *low_out <= *high_out;
}

static bool is_ports(const struct row *row, const char *value, char *error, size_t error_bytes)
{
    uint16_t low, high;
    if (strcmp(row->name, "SHOAL_PORTS") != 0 || shoal_settings_parse_ports(value, &low, &high))
        return true;
    snprintf(error, error_bytes, "SHOAL_PORTS is \"%.60s\", but must be a port or two with a dash, such as 40000-40099", value);
    return false;
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
        if (!is_choice(row, value, error, error_bytes) || !is_ports(row, value, error, error_bytes))
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

/* The setting that `name` may be meant for, NULL when it reads like none. */
static const char *find_nearest(const char *name)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return NULL;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const size_t distance = shoal_spelling_distance(name + strlen(PREFIX), rows[i].name + strlen(PREFIX));
        if (distance < least) {
            least = distance;
            nearest = rows[i].name;
        }
    }
    return nearest;
}

/* The place of a former name in `renamed`; -1: it is none. */
static int find_former(const char *name)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(renamed); i++) {
        if (strcmp(renamed[i].former, name) == 0)
            return (int)i;
    }
    return -1;
}

/* The value of a setting in the environment: under its present name, else under a former one, which is noted; NULL: it is not
 * set. */
static const char *find_value(struct shoal_settings *settings, const char *name)
{
    const char *value = getenv(name);
    for (size_t i = 0; !(value && *value) && i < SHOAL_COUNT_OF(renamed); i++) {
        if (strcmp(renamed[i].present, name) != 0)
            continue;
        value = getenv(renamed[i].former);
        if (value && *value)
            settings->former_names |= UINT64_C(1) << i;
    }
    return value && *value ? value : NULL;
}

static const struct row *settings_find_row(const char *name)
{
    const int former = find_former(name);
    name = former >= 0 ? renamed[former].present : name;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    }
    return NULL;
}

static enum shoal_status assign_override(struct shoal_settings *settings, const char *text, char *error, size_t error_bytes)
{
    char name[SHOAL_SETTING_NAME_MAX];
    const char *equals = strchr(text, '=');
    snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - text) : 0, text);
    const struct row *row = settings_find_row(name);
    const int former = find_former(name);
    if (former >= 0)
        settings->former_names |= UINT64_C(1) << former;
    if (row)
        return assign(settings, row, equals + 1, error, error_bytes);
    const char *nearest = find_nearest(name);
    snprintf(error, error_bytes, "\"%.100s\" is not a setting (SHOAL_NAME=value; `shoal info --settings` lists them)%s%s%s",
             text, nearest ? "; did you mean " : "", nearest ? nearest : "", nearest ? "?" : "");
    return SHOAL_ERR_ARGUMENT;
}

bool shoal_settings_find_unknown(size_t *at, char name[SHOAL_SETTING_NAME_MAX], const char **nearest_out)
{
    for (; environ && environ[*at]; ++*at) {
        const char *text = environ[*at];
        if (strncmp(text, PREFIX, strlen(PREFIX)) != 0)
            continue;
        snprintf(name, SHOAL_SETTING_NAME_MAX, "%.*s", (int)strcspn(text, "="), text);
        if (settings_find_row(name) || is_one_of(others, name, strlen(name)))
            continue;
        *nearest_out = find_nearest(name);
        ++*at;
        return true;
    }
    return false;
}

bool shoal_settings_find_former(const struct shoal_settings *settings, size_t *at, const char **former_out,
                                const char **present_out)
{
    while (*at < SHOAL_COUNT_OF(renamed) && !(settings->former_names >> *at & 1))
        ++*at;
    if (*at == SHOAL_COUNT_OF(renamed))
        return false;
    *former_out = renamed[*at].former;
    *present_out = renamed[*at].present;
    ++*at;
    return true;
}

enum shoal_status shoal_settings_load(struct shoal_settings *settings_out, const char *const *overrides, char *error,
                                      size_t error_bytes)
{
    struct shoal_settings settings;
    memset(&settings, 0, sizeof settings);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const char *value = find_value(&settings, rows[i].name);
        SHOAL_TRY(assign(&settings, &rows[i], rows[i].preset, error, error_bytes));
        if (value)
            SHOAL_TRY(assign(&settings, &rows[i], value, error, error_bytes));
    }
    for (size_t i = 0; overrides && overrides[i]; i++)
        SHOAL_TRY(assign_override(&settings, overrides[i], error, error_bytes));
    *settings_out = settings;
    return SHOAL_OK;
}

void shoal_settings_load_right(struct shoal_settings *settings_out, void (*tell)(void *arg, const char *error), void *arg)
{
    char error[256];
    memset(settings_out, 0, sizeof *settings_out);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        const char *value = find_value(settings_out, rows[i].name);
        (void)assign(settings_out, &rows[i], rows[i].preset, error, sizeof error);
        if (value && assign(settings_out, &rows[i], value, error, sizeof error) != SHOAL_OK)
            tell(arg, error);
    }
}

uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(1099511628211);
    return hash;
}

struct shoal_agreed shoal_settings_agreed(const struct shoal_settings *settings)
{
    struct shoal_agreed agreed = {{0}};
    size_t used = 0;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (rows[i].agreed)
            memcpy(&agreed.values[used++], (const char *)settings + rows[i].offset, sizeof agreed.values[0]);
    }
    agreed.values[used] = settings->tuning_hash;
    return agreed;
}

uint64_t shoal_settings_hash(const struct shoal_settings *settings)
{
    const struct shoal_agreed agreed = shoal_settings_agreed(settings);
    return shoal_hash_bytes(SHOAL_HASH_START, &agreed, sizeof agreed);
}

bool shoal_agreed_is_same(const struct shoal_agreed *a, const struct shoal_agreed *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

void shoal_agreed_print_difference(const struct shoal_agreed *there, const struct shoal_agreed *here, const char *where,
                                   char *text, size_t bytes)
{
    const uint64_t *a = there->values, *b = here->values;
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        if (!rows[i].agreed)
            continue;
        if (*a != *b && used < bytes)
            used += (size_t)snprintf(text + used, bytes - used, "%s%s is %llu there, %llu %s", used ? "; " : "", rows[i].name,
                                     (unsigned long long)*a, (unsigned long long)*b, where);
        a++;
        b++;
    }
    if (*a != *b && used < bytes)
        snprintf(text + used, bytes - used,
                 "%sthe tuning overrides of SHOAL_ALGORITHMS differ: `shoal info --algorithms` lists them", used ? "; " : "");
}

const char *shoal_settings_temporary_folder(void)
{
    const char *folder = getenv("TMPDIR");
    return folder && folder[0] == '/' ? folder : "/tmp";
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
