/* The names of the kinds of operations, and how many bytes they carry. */
#include "trace.h"

#include <ctype.h>
#include <string.h>

#include "tool.h"

enum unit { NOTHING, BYTES, ELEMENTS, STAGE };

struct kind {
    const char *name;
    bool is_message; /* not matched with an operation of all ranks */
    enum unit unit;  /* of count */
    bool has_op;
    const char *root; /* the word before root's number; NULL if it has no root */
    char letter;      /* that schedules use for the action; 0 if it is none */
};

static const struct kind kinds[] = {
    {"all-reduce", false, ELEMENTS, true, NULL, 0},
    {"reduce", false, ELEMENTS, true, "to", 0},
    {"reduce-scatter", false, ELEMENTS, true, NULL, 0},
    {"broadcast", false, ELEMENTS, false, "from", 0},
    {"all-gather", false, ELEMENTS, false, NULL, 0},
    {"gather", false, ELEMENTS, false, "to", 0},
    {"scatter", false, ELEMENTS, false, "from", 0},
    {"all-to-all", false, ELEMENTS, false, NULL, 0},
    {"barrier", false, NOTHING, false, NULL, 0},
    {"split", false, BYTES, false, NULL, 0},
    {"send", true, ELEMENTS, false, "to", 0},
    {"receive", true, ELEMENTS, false, "from", 0},
    {"drain", true, NOTHING, false, NULL, 0},
    /* Spans of a pipeline's track. */
    {"forward", true, STAGE, false, NULL, 'F'},
    {"backward", true, STAGE, false, NULL, 'B'},
    {"input gradient", true, STAGE, false, NULL, 'I'},
    {"weight gradient", true, STAGE, false, NULL, 'W'},
    {"recompute", true, STAGE, false, NULL, 'R'},
    {"replica sum", true, STAGE, false, NULL, 'S'},
    {"tied sum", true, STAGE, false, NULL, 'T'},
    {"update", true, STAGE, false, NULL, 'U'},
    {"hand over", true, STAGE, false, NULL, 0},
};

static const struct kind *kind_of(const struct trace_record *record)
{
    static const struct kind unknown = {"", false, ELEMENTS, false, NULL, 0};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (!strcmp(kinds[i].name, record->kind))
            return &kinds[i];
    return &unknown;
}

static const char *const type_names[] = {
#define TYPE_NAME(name, number, bytes) [number] = #name,
    SHOAL_TYPE_LIST(TYPE_NAME)
#undef TYPE_NAME
};

static const char *const op_names[] = {
#define OP_NAME(name, number) [number] = #name,
    SHOAL_OP_LIST(OP_NAME)
#undef OP_NAME
};

/* "FLOAT32" -> " float32", "SCALED_SUM" -> " scaled sum" */
static void word_append(char name[TRACE_NAME_BYTES], const char *word)
{
    size_t used = strlen(name);
    if (used + 2 + strlen(word) > TRACE_NAME_BYTES)
        return;
    name[used++] = ' ';
    for (; *word; word++)
        name[used++] = *word == '_' ? ' ' : (char)tolower((unsigned char)*word);
    name[used] = 0;
}

char *trace_name(const struct trace_record *record, char name_out[TRACE_NAME_BYTES])
{
    const struct kind *kind = kind_of(record);
    char number[32];
    snprintf(name_out, TRACE_NAME_BYTES, "%s", record->kind);
    snprintf(number, sizeof number, "%llu", (unsigned long long)record->count);
    if (kind->unit == STAGE) {
        const char *const what = !kind->letter || !strchr("STU", kind->letter) ? ", microbatch"
                                 : kind->letter == 'T'                         ? ", tie"
                                                                               : "";
        const int used = snprintf(name_out, TRACE_NAME_BYTES, "%s of stage %s%s", record->kind, number, what);
        if (*what)
            snprintf(name_out + used, TRACE_NAME_BYTES - (size_t)used, " %llu", (unsigned long long)record->tag);
        return name_out;
    }
    if (kind->unit != NOTHING)
        word_append(name_out, number);
    if (kind->unit != NOTHING)
        word_append(name_out, kind->unit == BYTES ? "bytes" : type_names[record->type]);
    if (kind->has_op)
        word_append(name_out, op_names[record->op]);
    if (kind->root) {
        snprintf(number, sizeof number, "%s %lld", kind->root, (long long)record->root);
        word_append(name_out, number);
    }
    return name_out;
}

/* In an all-to-all, ranks may exchange parts of different lengths, so counts are not compared. */
bool trace_is_same_call(const struct trace_record *a, const struct trace_record *b)
{
    return a->kind == b->kind && a->type == b->type && a->op == b->op && a->root == b->root &&
           (a->count == b->count || !strcmp(a->kind, "all-to-all"));
}

bool trace_is_message(const struct trace_record *record)
{
    return kind_of(record)->is_message;
}

char *trace_short_name(const struct trace_record *record, char name_out[TRACE_NAME_BYTES])
{
    const char letter = kind_of(record)->letter;
    if (!letter)
        return trace_name(record, name_out);
    snprintf(name_out, TRACE_NAME_BYTES, "%llu%c%llu", (unsigned long long)record->count, letter,
             (unsigned long long)record->tag);
    return name_out;
}

bool trace_is_span(const struct trace_record *record)
{
    return kind_of(record)->unit == STAGE;
}

char trace_letter(const struct trace_record *record)
{
    return kind_of(record)->letter;
}

uint64_t trace_bytes(const struct trace_record *record)
{
    const enum unit unit = kind_of(record)->unit;
    return unit == NOTHING || unit == STAGE
               ? 0
               : record->count * (unit == BYTES ? 1 : shoal_type_bytes((enum shoal_type)record->type));
}

bool trace_is_ok(const struct trace_record *record)
{
    return !strcmp(record->status, shoal_status_name(SHOAL_OK));
}
