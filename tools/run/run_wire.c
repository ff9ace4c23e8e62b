#include "run_wire.h"

#include <shoal/shoal.h>
#include <string.h>

#include "run_place.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they lie in memory");
_Static_assert(sizeof(struct run_cause) + RUN_HEAD_BYTES <= RUN_FRAME_BYTES_MAX, "the longest frame");

static const unsigned char magic[4] = {'S', 'H', 'R', 'N'};

enum field_type { FIELD_NUMBER, FIELD_BYTES, FIELD_TEXT, FIELD_LINES };

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

static const struct field hello_fields[] = {
    NUMBER(hello.protocol, 0, INT32_MAX),
    NUMBER(hello.hosts, 1, RUN_HOSTS_MAX),
    NUMBER(hello.index, 0, RUN_HOSTS_MAX - 1),
    NUMBER(hello.workers, 1, SHOAL_RANKS_MAX),
    NUMBER(hello.has_secret, 0, 1),
    OF(FIELD_BYTES, hello.job),
    OF(FIELD_BYTES, hello.nonce),
    OF(FIELD_TEXT, hello.name),
    NUMBER(hello.grace_ms, 0, INT32_MAX),
};
/* The number of fields at the beginning of HELLO that all versions have. */
enum { HELLO_COMMON_FIELDS = 8 };
static const struct field challenge_fields[] = {
    NUMBER(challenge.has_secret, 0, 1),
    OF(FIELD_BYTES, challenge.nonce),
    OF(FIELD_BYTES, challenge.proof),
};
static const struct field proof_fields[] = {OF(FIELD_BYTES, proof)};
static const struct field refusal_fields[] = {NUMBER(refusal.is_final, 0, 1), OF(FIELD_TEXT, refusal.text)};
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
    NUMBER(ended.rank, -1, SHOAL_RANKS_MAX),  NUMBER(ended.blamed, 0, RUN_BLAMED_TOGETHER),
    NUMBER(ended.other, -1, SHOAL_RANKS_MAX), NUMBER(ended.is_clean, 0, 1),
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

#define BODY(fields, is_for_strangers)                                      \
    {                                                                       \
        (fields), sizeof(fields) / sizeof(struct field), (is_for_strangers) \
    }
static const struct body {
    const struct field *fields;
    size_t count;
    bool is_for_strangers;
} bodies[RUN_KIND_END] = {
    [RUN_HELLO] = BODY(hello_fields, true),    [RUN_CHALLENGE] = BODY(challenge_fields, true),
    [RUN_PROOF] = BODY(proof_fields, true),    [RUN_REFUSED] = BODY(refusal_fields, true),
    [RUN_START] = BODY(start_fields, false),   [RUN_TROUBLE] = BODY(event_fields, false),
    [RUN_STOP] = BODY(event_fields, false),    [RUN_ENDED] = BODY(ended_fields, false),
    [RUN_TELL] = BODY(tell_fields, false),     [RUN_TOLD] = BODY(cause_fields, false),
    [RUN_VERDICT] = BODY(cause_fields, false), [RUN_STOPPING] = BODY(stopping_fields, false),
    [RUN_NOTE] = BODY(note_fields, false),
};

static bool is_text(const struct field *field)
{
    return field->type == FIELD_TEXT || field->type == FIELD_LINES;
}

size_t run_frame_build(const struct run_message *message, unsigned char frame[RUN_FRAME_BYTES_MAX])
{
    const struct body *body = &bodies[message->kind];
    const uint16_t kind[2] = {(uint16_t)message->kind, 0};
    size_t used = RUN_HEAD_BYTES;
    for (size_t i = 0; i < body->count; i++) {
        const struct field *field = &body->fields[i];
        const char *value = (const char *)message + field->offset;
        const uint16_t bytes = is_text(field) ? (uint16_t)strnlen(value, field->bytes - 1u) : field->bytes;
        if (is_text(field)) {
            memcpy(frame + used, &bytes, sizeof bytes);
            used += sizeof bytes;
        }
        memcpy(frame + used, value, bytes);
        used += bytes;
    }
    const uint32_t body_bytes = (uint32_t)(used - RUN_HEAD_BYTES);
    memcpy(frame, magic, sizeof magic);
    memcpy(frame + 4, kind, sizeof kind);
    memcpy(frame + 8, &body_bytes, sizeof body_bytes);
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

static bool body_read(const struct body *body, const unsigned char *at, size_t left, struct run_message *message)
{
    for (size_t i = 0; i < body->count; i++) {
        if (i == HELLO_COMMON_FIELDS && message->kind == RUN_HELLO && message->hello.protocol != RUN_PROTOCOL)
            return true;
        const size_t bytes = field_read(&body->fields[i], at, left, (char *)message + body->fields[i].offset);
        if (!bytes)
            return false;
        at += bytes;
        left -= bytes;
    }
    return left == 0;
}

enum run_parsed run_frame_parse(const unsigned char *bytes, size_t count, bool before_member, struct run_message *message_out,
                                size_t *used_out)
{
    uint16_t kind[2];
    uint32_t body_bytes;
    if (memcmp(bytes, magic, count < sizeof magic ? count : sizeof magic) != 0)
        return RUN_PARSED_BAD;
    if (count < RUN_HEAD_BYTES)
        return RUN_PARSED_MORE;
    memcpy(kind, bytes + 4, sizeof kind);
    memcpy(&body_bytes, bytes + 8, sizeof body_bytes);
    if (kind[0] == 0 || kind[0] >= RUN_KIND_END || kind[1] != 0 || body_bytes > RUN_FRAME_BYTES_MAX - RUN_HEAD_BYTES)
        return RUN_PARSED_BAD;
    const struct body *body = &bodies[kind[0]];
    if (before_member && (!body->is_for_strangers || body_bytes > sizeof(struct run_refusal)))
        return RUN_PARSED_BAD;
    if (count < RUN_HEAD_BYTES + body_bytes)
        return RUN_PARSED_MORE;
    memset(message_out, 0, sizeof *message_out);
    message_out->kind = (enum run_kind)kind[0];
    *used_out = RUN_HEAD_BYTES + body_bytes;
    return body_read(body, bytes + RUN_HEAD_BYTES, body_bytes, message_out) ? RUN_PARSED_FRAME : RUN_PARSED_BAD;
}
