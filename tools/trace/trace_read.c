/* Reads files of flight recorders into records. */
#include "trace.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "flat_json.h"
#include "tool.h"

int trace_memory_fail(void)
{
    fputs("shoal trace: no memory for that many operations; pass fewer files at once\n", stderr);
    return 1;
}

/* ---- Words: each text is stored once ------------------------------------------------------------------------------------- */

struct trace_words {
    char **slots;
    size_t capacity, count;
};

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/ */
static size_t word_hash(const char *text)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(1099511628211);
    return (size_t)hash;
}

/* Returns the slot of text, or an empty one for it. */
static char **word_slot(const struct trace_words *words, const char *text)
{
    size_t at = word_hash(text) % words->capacity;
    while (words->slots[at] && strcmp(words->slots[at], text) != 0)
        at = (at + 1) % words->capacity;
    return &words->slots[at];
}

static bool words_grow(struct trace_words *words)
{
    struct trace_words larger = {.capacity = words->capacity ? 2 * words->capacity : 64, .count = words->count};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < words->capacity; i++)
        if (words->slots[i])
            *word_slot(&larger, words->slots[i]) = words->slots[i];
    free(words->slots);
    *words = larger;
    return true;
}

/* Returns NULL without memory. */
static const char *word_keep(struct trace_words *words, const char *text)
{
    if (2 * words->count >= words->capacity && !words_grow(words))
        return NULL;
    char **slot = word_slot(words, text);
    if (!*slot) {
        *slot = strdup(text);
        words->count += *slot != NULL;
    }
    return *slot;
}

void trace_fini(struct trace *trace)
{
    for (size_t i = 0; trace->words && i < trace->words->capacity; i++)
        free(trace->words->slots[i]);
    if (trace->words)
        free(trace->words->slots);
    free(trace->words);
    free(trace->records);
    free(trace->comms);
    free(trace->workers);
    free(trace->clocks);
    free(trace->operations);
}

/* ---- Fields of a line ---------------------------------------------------------------------------------------------------- */

enum field_kind { WORD, HEX, COUNT, TICKS, WHOLE, REAL, TYPE, OP };

#define COUNT_MAX UINT64_C(1000000000000000000)
#define UNIX_US_MAX INT64_C(4000000000000000) /* year 2096 */

struct field {
    const char *name;
    enum field_kind kind;
    size_t offset;
    int64_t least, most; /* of WHOLE and REAL; for WORD: bytes, 0: any */
};

#define TO(field) offsetof(struct trace_record, field)
static const struct field fields[] = {
    {"comm", WORD, TO(comm), 0, 31},
    {"comm_id", HEX, TO(comm_id), 0, 0},
    {"rank", WHOLE, TO(rank), 0, SHOAL_RANKS_MAX - 1},
    {"size", WHOLE, TO(size), 1, SHOAL_RANKS_MAX},
    {"world_rank", WHOLE, TO(world_rank), 0, SHOAL_RANKS_MAX - 1},
    {"host", WORD, TO(host), 0, 63},
    {"pid", WHOLE, TO(pid), 1, INT32_MAX},
    {"record", COUNT, TO(record), 0, 0},
    {"sequence", COUNT, TO(sequence), 0, 0},
    {"kind", WORD, TO(kind), 0, 31},
    {"algorithm", WORD, TO(algorithm), 0, 0},
    {"count", COUNT, TO(count), 0, 0},
    {"type", TYPE, TO(type), 0, 0},
    {"op", OP, TO(op), 0, 0},
    {"root", WHOLE, TO(root), -1, SHOAL_RANKS_MAX - 1},
    {"tag", COUNT, TO(tag), 0, 0},
    {"status", WORD, TO(status), 0, 0},
    {"last_rank", WHOLE, TO(last_rank), -1, SHOAL_RANKS_MAX - 1},
    {"late_us", REAL, TO(late_us), -1000000000000, 1000000000000},
    {"step", WHOLE, TO(step), -1, INT32_MAX},
    {"peer", WHOLE, TO(peer), -1, SHOAL_RANKS_MAX - 1},
    {"clock", WORD, TO(clock), 0, 0},
    {"ns_per_tick", REAL, TO(ns_per_tick), 0, 1000000},
    {"posted_ticks", TICKS, TO(posted_ticks), 0, 0},
    {"arrived_ticks", TICKS, TO(arrived_ticks), 0, 0},
    {"done_ticks", TICKS, TO(done_ticks), 0, 0},
    {"unix_us", WHOLE, TO(unix_us), 0, UNIX_US_MAX},
};
enum { FIELDS = sizeof fields / sizeof fields[0] };

static const char *const type_words[] = {
#define TYPE_WORD(name, number, bytes) [number] = #name,
    SHOAL_TYPE_LIST(TYPE_WORD)
#undef TYPE_WORD
};

static const char *const op_words[] = {
#define OP_WORD(name, number) [number] = #name,
    SHOAL_OP_LIST(OP_WORD)
#undef OP_WORD
};

/* A file being read. */
struct reader {
    struct trace *trace;
    const char *name;
    uint32_t file, line;
    char error[256];
    bool has_no_memory;
};

/* Notes what is wrong with the line; returns false. */
__attribute__((format(printf, 2, 3))) static bool wrong(struct reader *reader, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(reader->error, sizeof reader->error, format, args);
    va_end(args);
    return false;
}

static bool unsigned_read(struct reader *reader, const struct json_reader *json, int base, uint64_t most, uint64_t *to)
{
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(json->text, &end, base);
    if (strspn(json->text, base == 16 ? "0123456789abcdef" : "0123456789") != (size_t)(end - json->text) || *end || errno ||
        end == json->text || number > most)
        return wrong(reader, "\"%s\" is %.40s, but may be %s", json->key, json->text,
                     base == 16 ? "16 hexadecimal digits" : "a whole number, not negative");
    *to = number;
    return true;
}

static bool whole_read(struct reader *reader, const struct json_reader *json, const struct field *field, int64_t *to)
{
    char *end;
    errno = 0;
    const long long number = strtoll(json->text, &end, 10);
    if (*end || errno || number < field->least || number > field->most)
        return wrong(reader, "\"%s\" is %.40s, but may be a whole number from %lld to %lld", json->key, json->text,
                     (long long)field->least, (long long)field->most);
    *to = number;
    return true;
}

static bool real_read(struct reader *reader, const struct json_reader *json, const struct field *field, double *to)
{
    const double number = strtod(json->text, NULL);
    if (number < (double)field->least || number > (double)field->most)
        return wrong(reader, "\"%s\" is %.40s, but may be %lld to %lld", json->key, json->text, (long long)field->least,
                     (long long)field->most);
    *to = number;
    return true;
}

static bool choice_read(struct reader *reader, const struct json_reader *json, const char *const *words, size_t count,
                        int64_t *to)
{
    for (size_t i = 0; i < count; i++) {
        if (words[i] && !strcmp(words[i], json->text)) {
            *to = (int64_t)i;
            return true;
        }
    }
    return wrong(reader, "\"%s\" is \"%.40s\", which this version does not know", json->key, json->text);
}

static bool word_read(struct reader *reader, const struct json_reader *json, const struct field *field, const char **to)
{
    if (field->most && strlen(json->text) > (size_t)field->most)
        return wrong(reader, "\"%s\" is longer than %lld bytes", json->key, (long long)field->most);
    for (char *c = json->text; *c; c++)
        *c = (unsigned char)*c < 0x20 || *c == 0x7f ? '?' : *c; /* they would move the cursor */
    *to = word_keep(reader->trace->words, json->text);
    reader->has_no_memory = !*to;
    return *to != NULL;
}

static bool field_read(struct reader *reader, const struct json_reader *json, const struct field *field,
                       struct trace_record *record)
{
    void *to = (char *)record + field->offset;
    const bool is_text = field->kind == WORD || field->kind == HEX || field->kind == TYPE || field->kind == OP;
    if (field->kind == TICKS && json->kind == JSON_NULL)
        return true; /* not yet: it stays 0 */
    if (json->kind != (is_text ? JSON_TEXT : JSON_NUMBER))
        return wrong(reader, "\"%s\" is not a %s", json->key, is_text ? "text" : "number");
    switch (field->kind) {
    case WORD:
        return word_read(reader, json, field, to);
    case HEX:
        return unsigned_read(reader, json, 16, UINT64_MAX, to);
    case COUNT:
        return unsigned_read(reader, json, 10, COUNT_MAX, to);
    case TICKS:
        return unsigned_read(reader, json, 10, UINT64_MAX, to);
    case WHOLE:
        return whole_read(reader, json, field, to);
    case REAL:
        return real_read(reader, json, field, to);
    case TYPE:
        return choice_read(reader, json, type_words, sizeof type_words / sizeof type_words[0], to);
    default:
        return choice_read(reader, json, op_words, sizeof op_words / sizeof op_words[0], to);
    }
}

/* ---- Lines --------------------------------------------------------------------------------------------------------------- */

/* Sets the bits of the fields found in *given. Ignores other members, which newer versions may write, except "error", which is
 * the recorder's own. */
static bool members_read(struct reader *reader, char *text, struct trace_record *record, uint64_t *given)
{
    struct json_reader json;
    enum json_step step;
    json_open(&json, text);
    while ((step = json_next(&json)) == JSON_MEMBER) {
        size_t i = 0;
        while (i < FIELDS && strcmp(fields[i].name, json.key) != 0)
            i++;
        if (i == FIELDS && !strcmp(json.key, "error") && json.kind == JSON_TEXT)
            return wrong(reader, "the recorder itself failed: %.120s", json.text);
        if (i == FIELDS)
            continue;
        if (*given & UINT64_C(1) << i)
            return wrong(reader, "\"%s\" is there twice", json.key);
        *given |= UINT64_C(1) << i;
        if (!field_read(reader, &json, &fields[i], record))
            return false;
    }
    return step == JSON_END || wrong(reader, "column %zu: %s", (size_t)(json.at - json.begin) + 1, json.error);
}

static bool record_check(struct reader *reader, const struct trace_record *record, uint64_t given)
{
    for (size_t i = 0; i < FIELDS; i++)
        if (!(given & UINT64_C(1) << i))
            return wrong(reader, "there is no \"%s\": this is not a line of this version's flight recorder", fields[i].name);
    if (record->rank >= record->size || record->last_rank >= record->size)
        return wrong(reader, "rank %lld is out of range: there are %lld ranks",
                     (long long)(record->rank >= record->size ? record->rank : record->last_rank), (long long)record->size);
    if (!record->posted_ticks || record->ns_per_tick <= 0)
        return wrong(reader, "\"%s\" is %s, so it has no time", record->posted_ticks ? "ns_per_tick" : "posted_ticks",
                     record->posted_ticks ? "0" : "null or 0");
    return true;
}

static bool record_read(struct reader *reader, char *text, struct trace_record *record_out)
{
    struct trace_record record;
    uint64_t given = 0;
    memset(&record, 0, sizeof record);
    if (!members_read(reader, text, &record, &given) || !record_check(reader, &record, given))
        return false;
    record.file = reader->file;
    record.line = reader->line;
    *record_out = record;
    return true;
}

static bool record_keep(struct trace *trace, const struct trace_record *record)
{
    if (trace->count == trace->capacity) {
        const size_t capacity = trace->capacity ? 2 * trace->capacity : 1024;
        struct trace_record *larger = reallocarray(trace->records, capacity, sizeof *larger);
        if (!larger)
            return false;
        trace->records = larger;
        trace->capacity = capacity;
    }
    trace->records[trace->count++] = *record;
    return true;
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

enum { LINE_BYTES = 16384 };
enum line_end { LINE_WHOLE, LINE_CUT, LINE_TOO_LONG, LINE_NONE };

/* Reads one line without its end. LINE_CUT: the file ended first. */
static enum line_end line_read(FILE *file, char text_out[LINE_BYTES], size_t *bytes_out)
{
    size_t bytes = 0;
    int c;
    while ((c = getc_unlocked(file)) != EOF && c != '\n') {
        if (bytes + 1 == LINE_BYTES)
            return LINE_TOO_LONG;
        text_out[bytes++] = (char)c;
    }
    text_out[bytes] = 0;
    *bytes_out = bytes;
    return c == '\n' ? LINE_WHOLE : bytes ? LINE_CUT : LINE_NONE;
}

static int line_fail(const struct reader *reader)
{
    if (reader->has_no_memory)
        return trace_memory_fail();
    return tool_file_fail("trace", "%s:%u: %s", reader->name, reader->line, reader->error);
}

static int line_take(struct reader *reader, enum line_end end, char *text, size_t bytes)
{
    struct trace_record record;
    bool is_good = end != LINE_TOO_LONG || wrong(reader, "a line is longer than %d bytes", LINE_BYTES - 1);
    if (is_good && strlen(text) != bytes)
        is_good = wrong(reader, "column %zu: a zero byte", strlen(text) + 1);
    else if (is_good && !text[strspn(text, " \t\r")])
        return 0;
    is_good = is_good && record_read(reader, text, &record);
    if (is_good)
        return record_keep(reader->trace, &record) ? 0 : trace_memory_fail();
    if (end != LINE_CUT || reader->has_no_memory)
        return line_fail(reader);
    fprintf(stderr, "shoal trace: %s:%u: the last line is cut off and left out; was its process killed while it wrote?\n",
            reader->name, reader->line);
    return 0;
}

static int lines_read(struct reader *reader, FILE *file)
{
    static char text[LINE_BYTES];
    enum line_end end;
    size_t bytes = 0;
    errno = 0;
    while ((end = line_read(file, text, &bytes)) != LINE_NONE && !ferror(file)) {
        reader->line++;
        const int code = line_take(reader, end, text, bytes);
        if (code)
            return code;
    }
    return ferror(file) ? tool_file_fail("trace", "cannot read %s: %s", reader->name, strerror(errno)) : 0;
}

static int file_read(struct trace *trace, uint32_t at)
{
    const bool is_stdin = !strcmp(trace->files[at], "-");
    struct reader reader = {.trace = trace, .name = is_stdin ? "stdin" : trace->files[at], .file = at};
    struct stat status;
    FILE *file = is_stdin ? stdin : fopen(reader.name, "re");
    if (!file)
        return tool_file_fail("trace", "cannot open %s: %s", reader.name, strerror(errno));
    const bool is_folder = fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode);
    const int code = is_folder
                         ? tool_file_fail("trace", "%s is a folder; name the files in it, as %s/*", reader.name, reader.name)
                         : lines_read(&reader, file);
    if (!is_stdin)
        fclose(file);
    return code;
}

/* A rank that failed before its first operation leaves an empty file. That is reported, but is not an error. */
static int files_check(const struct trace *trace, size_t file_count, size_t *records_of)
{
    if (!trace->count)
        return tool_file_fail("trace", "there is no operation in %s%s", trace->files[0],
                              file_count > 1 ? " and the others" : "");
    for (size_t i = 0; i < trace->count; i++)
        records_of[trace->records[i].file]++;
    for (size_t i = 0; i < file_count; i++)
        if (!records_of[i])
            fprintf(stderr, "shoal trace: there is no operation in %s\n", trace->files[i]);
    return 0;
}

int trace_read(struct trace *trace, const char *const *files, size_t file_count)
{
    size_t *records_of = calloc(file_count, sizeof *records_of);
    int code = 0;
    trace->files = files;
    trace->words = calloc(1, sizeof *trace->words);
    if (!trace->words || !records_of)
        code = trace_memory_fail();
    for (size_t i = 0; i < file_count && !code; i++)
        code = file_read(trace, (uint32_t)i);
    if (!code)
        code = files_check(trace, file_count, records_of);
    free(records_of);
    return code;
}
