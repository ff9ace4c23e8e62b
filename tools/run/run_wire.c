#include "run_wire.h"

#include <shoal/shoal.h>
#include <string.h>

#include "run_place.h"

_Static_assert(sizeof(struct run_cause) <= RUN_VALUE_BYTES_MAX, "the longest value");
_Static_assert(sizeof(struct run_greeting) <= SHOAL_LINK_GREETING_BYTES_MAX, "the greeting");

enum { OUT_BYTES_MAX = 1 << 20 };

const struct shoal_link_service run_link_service = {
    .protocol = RUN_PROTOCOL,
    .kind_end = RUN_KIND_END,
    .verdict_end = 1,
    .value_bytes_max = RUN_VALUE_BYTES_MAX,
    .out_bytes_max = OUT_BYTES_MAX,
};

enum field_type { FIELD_NUMBER, FIELD_TEXT, FIELD_LINES };

struct field {
    enum field_type type;
    uint16_t offset, bytes;
    int32_t least, most; /* limits of a number */
};

enum { CODE_MAX = 255, SIGNAL_MAX = 127, COUNT_MAX = 1000000 };

#define NUMBER(member, least, most)                                                          \
    {                                                                                        \
        FIELD_NUMBER, offsetof(struct run_message, member), sizeof(int32_t), (least), (most) \
    }
#define OF(type, member)                                                                            \
    {                                                                                               \
        type, offsetof(struct run_message, member), sizeof(((struct run_message *)0)->member), 0, 0 \
    }

static const struct field refusal_fields[] = {OF(FIELD_TEXT, refusal.text)};
static const struct field start_fields[] = {
    NUMBER(start.attempt, 0, COUNT_MAX),
    NUMBER(start.restarts, 0, COUNT_MAX),
    NUMBER(start.first_rank, 0, SHOAL_RANKS_MAX - 1),
    NUMBER(start.ranks, 1, SHOAL_RANKS_MAX),
    NUMBER(start.grace_ms, 0, INT32_MAX),
    NUMBER(start.answer_ms, 0, INT32_MAX),
    OF(FIELD_TEXT, start.session),
};
static const struct field event_fields[] = {
    NUMBER(event.cause, 1, RUN_CAUSE_END - 1), NUMBER(event.host, 0, RUN_HOSTS_MAX - 1),
    NUMBER(event.rank, -1, SHOAL_RANKS_MAX),   NUMBER(event.code, 0, CODE_MAX),
    NUMBER(event.signal, 0, SIGNAL_MAX),       NUMBER(event.asked, 0, COUNT_MAX),
    NUMBER(event.attempt, 0, COUNT_MAX),
};
static const struct field ended_fields[] = {
    NUMBER(ended.rank, -1, SHOAL_RANKS_MAX),
    NUMBER(ended.blamed, 0, RUN_BLAMED_TOGETHER),
    NUMBER(ended.other, -1, SHOAL_RANKS_MAX),
    NUMBER(ended.is_clean, 0, 1),
    NUMBER(ended.survived, 0, 1),
    NUMBER(ended.attempt, 0, COUNT_MAX),
};
static const struct field tell_fields[] = {NUMBER(tell.rank, 0, SHOAL_RANKS_MAX)};
static const struct field cause_fields[] = {
    NUMBER(cause.kind, 0, RUN_CAUSE_END - 1),
    NUMBER(cause.host, 0, RUN_HOSTS_MAX - 1),
    NUMBER(cause.rank, -1, SHOAL_RANKS_MAX),
    NUMBER(cause.pid, 0, INT32_MAX),
    NUMBER(cause.code, 0, CODE_MAX),
    NUMBER(cause.signal, 0, SIGNAL_MAX),
    NUMBER(cause.is_clean, 0, 1),
    NUMBER(cause.is_retried, 0, 1),
    NUMBER(cause.attempt, 0, COUNT_MAX),
    OF(FIELD_TEXT, cause.name),
    OF(FIELD_TEXT, cause.words),
    OF(FIELD_LINES, cause.tail),
};

static const struct field stopping_fields[] = {NUMBER(stopping.attempt, 0, COUNT_MAX)};
static const struct field note_fields[] = {OF(FIELD_TEXT, note.text)};

#define FIELDS(fields)                                  \
    {                                                   \
        (fields), sizeof(fields) / sizeof(struct field) \
    }
static const struct layout {
    const struct field *fields;
    size_t count;
} layouts[RUN_KIND_END] = {
    [RUN_REFUSED] = FIELDS(refusal_fields), [RUN_START] = FIELDS(start_fields),   [RUN_TROUBLE] = FIELDS(event_fields),
    [RUN_STOP] = FIELDS(event_fields),      [RUN_ENDED] = FIELDS(ended_fields),   [RUN_TELL] = FIELDS(tell_fields),
    [RUN_TOLD] = FIELDS(cause_fields),      [RUN_VERDICT] = FIELDS(cause_fields), [RUN_STOPPING] = FIELDS(stopping_fields),
    [RUN_NOTE] = FIELDS(note_fields),
};

static bool is_text(const struct field *field)
{
    return field->type == FIELD_TEXT || field->type == FIELD_LINES;
}

size_t run_value_build(const struct run_message *message, unsigned char value[RUN_VALUE_BYTES_MAX])
{
    const struct layout *layout = &layouts[message->kind];
    size_t used = 0;
    for (size_t i = 0; i < layout->count; i++) {
        const struct field *field = &layout->fields[i];
        const char *at = (const char *)message + field->offset;
        const uint16_t bytes = is_text(field) ? (uint16_t)strnlen(at, field->bytes - 1u) : field->bytes;
        if (is_text(field)) {
            memcpy(value + used, &bytes, sizeof bytes);
            used += sizeof bytes;
        }
        memcpy(value + used, at, bytes);
        used += bytes;
    }
    return used;
}

/* Replaces control characters by question marks. */
static void text_clean(char *text, size_t bytes, bool has_lines)
{
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        const bool is_good = (c >= ' ' && c != 0x7f) || (has_lines && (c == '\n' || c == '\t'));
        if (!is_good)
            text[i] = '?';
    }
    text[bytes] = 0;
}

/* Returns the bytes of the field, or 0 if it is bad. */
static size_t field_read(const struct field *field, const unsigned char *at, size_t left, char *value)
{
    uint16_t bytes = field->bytes;
    size_t before = 0;
    if (is_text(field)) {
        if (left < sizeof bytes)
            return 0;
        memcpy(&bytes, at, sizeof bytes);
        before = sizeof bytes;
    }
    if (left - before < bytes || (is_text(field) && bytes >= field->bytes))
        return 0;
    memcpy(value, at + before, bytes);
    if (is_text(field))
        text_clean(value, bytes, field->type == FIELD_LINES);
    if (field->type == FIELD_NUMBER) {
        int32_t number;
        memcpy(&number, value, sizeof number);
        if (number < field->least || number > field->most)
            return 0;
    }
    return before + bytes;
}

bool run_value_parse(enum run_kind kind, const unsigned char *value, size_t bytes, struct run_message *message_out)
{
    const struct layout *layout = &layouts[kind];
    memset(message_out, 0, sizeof *message_out);
    message_out->kind = kind;
    for (size_t i = 0; i < layout->count; i++) {
        const size_t used = field_read(&layout->fields[i], value, bytes, (char *)message_out + layout->fields[i].offset);
        if (!used)
            return false;
        value += used;
        bytes -= used;
    }
    return bytes == 0;
}

bool run_host_read(const struct shoal_link *link, struct run_host *host_out)
{
    const struct shoal_link_hello *hello = shoal_link_other(link);
    struct run_greeting greeting;
    if (link->greeting.count != sizeof greeting)
        return false;
    memcpy(&greeting, link->greeting.bytes, sizeof greeting);
    *host_out = (struct run_host){.index = (int32_t)hello->rank, .workers = greeting.workers, .grace_ms = greeting.grace_ms};
    memcpy(host_out->name, hello->host, sizeof host_out->name);
    shoal_link_text_clean(host_out->name, sizeof host_out->name);
    return greeting.workers >= 1 && greeting.workers <= SHOAL_RANKS_MAX && greeting.grace_ms >= 0;
}
