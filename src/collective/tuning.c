#include "collective/tuning.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "collective/select.h"

#define OF(field) offsetof(struct shoal_tuning_settings, field)
static const struct shoal_setting settings_of_tuning[] = {
    {.name = "SHOAL_ALGORITHMS",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(algorithms),
     .preset = "",
     .is_agreed = true,
     .agreed_offset = OF(hash),
     .disagreement = "the tuning overrides of SHOAL_ALGORITHMS differ: `shoal info --algorithms` lists them",
     .text = "tuning overrides, such as reduce=owners,all-gather=direct@0-4K, or the name of a CSV file"},
};
#undef OF
const struct shoal_setting_table shoal_tuning_setting_table = {settings_of_tuning, SHOAL_COUNT_OF(settings_of_tuning)};

#define HEADER "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks"
#define LINE_MAX_BYTES 512
#define FIELDS 6

/* The position while reading a tuning override, for messages. */
struct reader {
    struct shoal_tuning *tuning;
    const char *unit; /* "line" or "tuning override" */
    int line;
    char *error;
    size_t error_bytes;
};

SHOAL_PRINTF(2, 3) static enum shoal_status refuse(const struct reader *reader, const char *format, ...)
{
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(reader->error, reader->error_bytes, "%.120s, %s %d: %s", reader->tuning->source, reader->unit, reader->line, what);
    return SHOAL_ERR_ARGUMENT;
}

/* ---- One tuning override ------------------------------------------------------------------------------------------------- */

static void list_kinds(char *text, size_t bytes)
{
    text[0] = 0;
    for (int i = 0; shoal_select_entry(i); i++) {
        const struct shoal_algorithm *entry = shoal_select_entry(i);
        const size_t used = strlen(text);
        const bool is_new = i == 0 || shoal_select_entry(i - 1)->collective != entry->collective;
        if (is_new && entry->collective != SHOAL_COLLECTIVE_SPLIT)
            snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", shoal_collective_traits(entry->collective)->name);
    }
}

static void list_names(enum shoal_collective_type collective, char *text, size_t bytes)
{
    text[0] = 0;
    for (int i = 0; shoal_select_entry(i); i++) {
        const size_t used = strlen(text);
        if (shoal_select_entry(i)->collective == collective)
            snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", shoal_select_entry(i)->name);
    }
}

static enum shoal_status parse_names(const struct reader *reader, const char *collective, const char *name,
                                     struct shoal_tuning_override *override)
{
    char allowed[200];
    override->collective = shoal_collective_find(collective);
    if (override->collective == SHOAL_COLLECTIVE_NONE) {
        list_kinds(allowed, sizeof allowed);
        return refuse(reader, "there is no collective \"%.40s\"; there are %s", collective, allowed);
    }
    if (!shoal_select_find(override->collective, name)) {
        list_names(override->collective, allowed, sizeof allowed);
        return refuse(reader, "%s has no algorithm \"%.40s\"; it has %s", shoal_collective_traits(override->collective)->name,
                      name, allowed);
    }
    snprintf(override->name, sizeof override->name, "%s", name);
    return SHOAL_OK;
}

static enum shoal_status parse_bytes(const struct reader *reader, const char *text, uint64_t *bytes)
{
    if (*text && !shoal_setting_parse_bytes(text, bytes))
        return refuse(reader, "\"%.40s\" is not a number of bytes, such as 4096, 256K or 1M", text);
    return SHOAL_OK;
}

static enum shoal_status parse_ranks(const struct reader *reader, const char *text, int *ranks)
{
    char *end;
    if (!*text)
        return SHOAL_OK;
    const long value = strtol(text, &end, 10);
    if (*end || value < 1 || value > SHOAL_PLAN_RANKS_MAX)
        return refuse(reader, "\"%.40s\" is not a number of ranks from 1 to %d", text, SHOAL_PLAN_RANKS_MAX);
    *ranks = (int)value;
    return SHOAL_OK;
}

static uint64_t hash_override(uint64_t hash, const struct shoal_tuning_override *override)
{
    char text[128];
    const int length = snprintf(text, sizeof text, "%d %s %llu %llu %d %d;", (int) override->collective, override->name,
                                (unsigned long long) override->min_bytes, (unsigned long long) override->max_bytes,
                                override->min_ranks, override->max_ranks);
    return shoal_hash_bytes(hash, text, (size_t)length);
}

static enum shoal_status tuning_add(const struct reader *reader, const struct shoal_tuning_override *override)
{
    struct shoal_tuning *tuning = reader->tuning;
    if (override->min_bytes > override->max_bytes || override->min_ranks > override->max_ranks)
        return refuse(reader, "a minimum is larger than its maximum, so the tuning override is never used");
    struct shoal_tuning_override *moved = realloc(tuning->list, (tuning->count + 1) * sizeof *moved);
    if (!moved) {
        snprintf(reader->error, reader->error_bytes, "no memory for the tuning overrides of %.120s", tuning->source);
        return SHOAL_ERR_MEMORY;
    }
    tuning->list = moved;
    tuning->list[tuning->count++] = *override;
    tuning->hash = hash_override(tuning->hash ? tuning->hash : SHOAL_HASH_START, override);
    return SHOAL_OK;
}

static struct shoal_tuning_override empty_override(const struct reader *reader)
{
    return (struct shoal_tuning_override){.max_bytes = UINT64_MAX, .min_ranks = 1, .max_ranks = INT_MAX, .line = reader->line};
}

/* ---- A list: kind=algorithm@least-most,... ------------------------------------------------------------------------------- */

static enum shoal_status parse_item(const struct reader *reader, char *item)
{
    struct shoal_tuning_override override = empty_override(reader);
    char *name = strchr(item, '=');
    if (!name)
        return refuse(reader, "\"%.60s\" is not collective=algorithm, or collective=algorithm@least-most", item);
    *name++ = 0;
    char *range = strchr(name, '@');
    if (range)
        *range++ = 0;
    SHOAL_TRY(parse_names(reader, item, name, &override));
    if (range) {
        char *most = strchr(range, '-');
        if (!most)
            return refuse(reader, "\"%.40s\" is not a range of bytes, such as 4K-1M, -64K or 1M-", range);
        *most++ = 0;
        SHOAL_TRY(parse_bytes(reader, range, &override.min_bytes));
        SHOAL_TRY(parse_bytes(reader, most, &override.max_bytes));
    }
    return tuning_add(reader, &override);
}

static enum shoal_status parse_list(struct reader *reader, const char *text)
{
    char copy[SHOAL_SETTING_TEXT_MAX];
    char *rest = copy, *item;
    snprintf(copy, sizeof copy, "%s", text);
    while ((item = strsep(&rest, ",")) != NULL) {
        reader->line++;
        SHOAL_TRY(parse_item(reader, item));
    }
    return SHOAL_OK;
}

/* ---- A file -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status parse_line(const struct reader *reader, char *line)
{
    struct shoal_tuning_override override = empty_override(reader);
    char *fields[FIELDS];
    int count = 0;
    char *rest = line;
    while (rest && count < FIELDS)
        fields[count++] = strsep(&rest, ",");
    if (rest || count < FIELDS)
        return refuse(reader, "a line has %d fields, " HEADER ", of which the last four may be empty", FIELDS);
    SHOAL_TRY(parse_names(reader, fields[0], fields[1], &override));
    SHOAL_TRY(parse_bytes(reader, fields[2], &override.min_bytes));
    SHOAL_TRY(parse_bytes(reader, fields[3], &override.max_bytes));
    SHOAL_TRY(parse_ranks(reader, fields[4], &override.min_ranks));
    SHOAL_TRY(parse_ranks(reader, fields[5], &override.max_ranks));
    return tuning_add(reader, &override);
}

static enum shoal_status parse_file(struct reader *reader, FILE *file)
{
    char line[LINE_MAX_BYTES];
    bool has_header = false;
    while (fgets(line, sizeof line, file)) {
        reader->line++;
        const size_t length = strcspn(line, "\r\n");
        if (!line[length] && !feof(file))
            return refuse(reader, "the line is longer than %d bytes", LINE_MAX_BYTES - 2);
        line[length] = 0;
        if (!line[0] || line[0] == '#')
            continue;
        if (has_header) {
            SHOAL_TRY(parse_line(reader, line));
            continue;
        }
        if (strcmp(line, HEADER) != 0)
            return refuse(reader, "the first line must be \"" HEADER "\"");
        has_header = true;
    }
    if (ferror(file) || !has_header) {
        snprintf(reader->error, reader->error_bytes, "%.120s %s", reader->tuning->source,
                 ferror(file) ? "cannot be read" : "is empty; its first line must be \"" HEADER "\"");
        return SHOAL_ERR_ARGUMENT;
    }
    return SHOAL_OK;
}

/* ---- Entry --------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_tuning_load(struct shoal_tuning *tuning_out, const char *text, char *error, size_t error_bytes)
{
    struct reader reader = {tuning_out, "tuning override", 0, error, error_bytes};
    memset(tuning_out, 0, sizeof *tuning_out);
    if (!*text)
        return SHOAL_OK;
    if (strchr(text, '=')) {
        snprintf(tuning_out->source, sizeof tuning_out->source, "SHOAL_ALGORITHMS");
        return parse_list(&reader, text);
    }
    reader.unit = "line";
    snprintf(tuning_out->source, sizeof tuning_out->source, "%s", text);
    FILE *file = fopen(text, "re");
    if (!file) {
        snprintf(error, error_bytes, "SHOAL_ALGORITHMS: cannot open the file \"%.120s\": %s", text, strerror(errno));
        return SHOAL_ERR_ARGUMENT;
    }
    const enum shoal_status status = parse_file(&reader, file);
    fclose(file);
    return status;
}

void shoal_tuning_fini(struct shoal_tuning *tuning)
{
    free(tuning->list);
    memset(tuning, 0, sizeof *tuning);
}

void shoal_tuning_print(const struct shoal_tuning *tuning, FILE *out)
{
    for (size_t i = 0; i < tuning->count; i++) {
        const struct shoal_tuning_override *override = &tuning->list[i];
        char most[32] = "-", ranks[32] = "-";
        if (override->max_bytes != UINT64_MAX)
            snprintf(most, sizeof most, "%llu", (unsigned long long) override->max_bytes);
        if (override->max_ranks != INT_MAX)
            snprintf(ranks, sizeof ranks, "%d", override->max_ranks);
        fprintf(out, "%-14s %-13s %14llu %14s %6d %6s   %s:%d\n", shoal_collective_traits(override->collective)->name,
                override->name, (unsigned long long) override->min_bytes, most, override->min_ranks, ranks, tuning->source,
                override->line);
    }
}
