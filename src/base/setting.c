#include "base/setting.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

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

bool shoal_setting_parse_bytes(const char *text, uint64_t *bytes_out)
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

static bool is_in_range(const struct shoal_setting *setting, uint64_t value, char *error, size_t error_bytes)
{
    if (!setting->most || (value >= setting->least && value <= setting->most))
        return true;
    snprintf(error, error_bytes, "%s is %llu, but may be %llu to %llu", setting->name, (unsigned long long)value,
             (unsigned long long)setting->least, (unsigned long long)setting->most);
    return false;
}

bool shoal_setting_is_one_of(const char *const *words, const char *text, size_t bytes)
{
    for (; *words; words++) {
        if (strlen(*words) == bytes && strncmp(*words, text, bytes) == 0)
            return true;
    }
    return false;
}

static bool is_chosen(const struct shoal_setting *setting, const char *value)
{
    size_t bytes = setting->more ? strcspn(value, ",") : strlen(value);
    bool is_known = shoal_setting_is_one_of(setting->words, value, bytes);
    while (is_known && value[bytes] == ',') {
        value += bytes + 1;
        bytes = strcspn(value, ",");
        is_known = shoal_setting_is_one_of(setting->more, value, bytes);
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

static bool is_choice(const struct shoal_setting *setting, const char *value, char *error, size_t error_bytes)
{
    if (!setting->words || is_chosen(setting, value))
        return true;
    snprintf(error, error_bytes, "%s is \"%.60s\"", setting->name, value);
    append_words(error, error_bytes, ", but may be ", setting->words);
    append_words(error, error_bytes, "; then, after commas, ", setting->more);
    return false;
}

static bool setting_parse_port(const char *text, char **end_out, uint16_t *port_out)
{
    if (!isdigit((unsigned char)text[0]))
        return false;
    const unsigned long port = strtoul(text, end_out, 10);
    *port_out = (uint16_t)port;
    return port >= 1 && port <= UINT16_MAX;
}

bool shoal_setting_parse_ports(const char *text, uint16_t *low_out, uint16_t *high_out)
{
    char *end;
    *low_out = *high_out = 0;
    if (!*text)
        return true;
    if (!setting_parse_port(text, &end, low_out))
        return false;
    *high_out = *low_out;
    if (*end == '-' && !setting_parse_port(end + 1, &end, high_out))
        return false;
    return *end == 0 && *low_out <= *high_out;
}

static enum shoal_status assign_text(const struct shoal_setting *setting, char *field, const char *value, char *error,
                                     size_t error_bytes)
{
    if (strlen(value) >= SHOAL_SETTING_TEXT_MAX) {
        snprintf(error, error_bytes, "%s is longer than %d bytes", setting->name, SHOAL_SETTING_TEXT_MAX - 1);
        return SHOAL_ERR_ARGUMENT;
    }
    if (!is_choice(setting, value, error, error_bytes))
        return SHOAL_ERR_ARGUMENT;
    if (setting->is_valid && !setting->is_valid(value)) {
        snprintf(error, error_bytes, "%s is \"%.60s\", but must be %s", setting->name, value, setting->form);
        return SHOAL_ERR_ARGUMENT;
    }
    strcpy(field, value);
    return SHOAL_OK;
}

enum shoal_status shoal_setting_assign(const struct shoal_setting *setting, void *values, const char *value, char *error,
                                       size_t error_bytes)
{
    char *field = (char *)values + setting->offset;
    if (setting->type == SHOAL_SETTING_TEXT)
        return assign_text(setting, field, value, error, error_bytes);
    uint64_t number;
    const bool is_number = setting->type == SHOAL_SETTING_NUMBER;
    if (!(is_number ? parse_number(value, &number) : shoal_setting_parse_bytes(value, &number))) {
        snprintf(error, error_bytes, "%s is \"%.60s\", but must be %s", setting->name, value,
                 is_number ? "a whole number" : "a size such as 4096, 256K or 1M");
        return SHOAL_ERR_ARGUMENT;
    }
    if (!is_in_range(setting, number, error, error_bytes))
        return SHOAL_ERR_ARGUMENT;
    memcpy(field, &number, sizeof number);
    return SHOAL_OK;
}

const char *shoal_setting_from_environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

const char *shoal_setting_temporary_folder(void)
{
    const char *folder = getenv("TMPDIR");
    return folder && folder[0] == '/' ? folder : "/tmp";
}

/* ---- Printing ------------------------------------------------------------------------------------------------------------ */

static uint64_t number_at(const void *values, size_t offset)
{
    uint64_t number;
    memcpy(&number, (const char *)values + offset, sizeof number);
    return number;
}

void shoal_setting_print(const struct shoal_setting *setting, const void *values, FILE *out)
{
    const char *text = (const char *)values + setting->offset;
    char number[32] = "";
    if (setting->type == SHOAL_SETTING_TEXT)
        text = setting->is_secret && *text ? "(set)" : *text ? text : "-";
    else
        snprintf(number, sizeof number, "%llu", (unsigned long long)number_at(values, setting->offset));
    fprintf(out, "%-28s %-12s (default %s%s)\n    %s\n", setting->name, setting->type == SHOAL_SETTING_TEXT ? text : number,
            *setting->preset ? setting->preset : "-",
            setting->is_agreed && setting->type != SHOAL_SETTING_TEXT ? ", the same on every rank" : "", setting->text);
}

/* ---- Settings that ranks must agree on ----------------------------------------------------------------------------------- */

uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(1099511628211);
    return hash;
}

void shoal_agreed_add(struct shoal_agreed_own *own, const struct shoal_setting *setting, const void *values)
{
    SHOAL_ASSERT(own->count < SHOAL_AGREED_MAX);
    own->agreed.values[own->count] =
        number_at(values, setting->type == SHOAL_SETTING_TEXT ? setting->agreed_offset : setting->offset);
    own->settings[own->count++] = setting;
}

bool shoal_agreed_is_same(const struct shoal_agreed *a, const struct shoal_agreed *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

uint64_t shoal_agreed_hash(const struct shoal_agreed *agreed)
{
    return shoal_hash_bytes(SHOAL_HASH_START, agreed, sizeof *agreed);
}

void shoal_agreed_print_difference(const struct shoal_agreed_own *own, const struct shoal_agreed *there,
                                   const struct shoal_agreed *here, const char *where, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < own->count && used < bytes; i++) {
        const struct shoal_setting *setting = own->settings[i];
        const char *between = used ? "; " : "";
        if (there->values[i] == here->values[i])
            continue;
        used += (size_t)(setting->disagreement
                             ? snprintf(text + used, bytes - used, "%s%s", between, setting->disagreement)
                             : snprintf(text + used, bytes - used, "%s%s is %llu there, %llu %s", between, setting->name,
                                        (unsigned long long)there->values[i], (unsigned long long)here->values[i], where));
    }
}
