#include "membership/control_wire.h"

#include <string.h>

/* The size of each kind's value, without a notice's data. */
static const size_t value_bytes[SHOAL_CONTROL_KIND_END] = {
    [SHOAL_CONTROL_HELLO] = sizeof(struct shoal_kv_hello),
    [SHOAL_CONTROL_CHALLENGE] = sizeof(struct shoal_control_challenge),
    [SHOAL_CONTROL_PROOF] = SHOAL_AUTH_MAC_BYTES,
    [SHOAL_CONTROL_HEARTBEAT] = sizeof(struct shoal_control_heartbeat),
    [SHOAL_CONTROL_FACT] = sizeof(struct shoal_control_fact),
    [SHOAL_CONTROL_NOTICE] = sizeof(struct shoal_control_notice_head),
};

static bool is_head_sound(const struct shoal_control_head *head, bool is_member)
{
    if (head->magic != SHOAL_CONTROL_MAGIC || head->kind < SHOAL_CONTROL_HELLO || head->kind >= SHOAL_CONTROL_KIND_END ||
        head->verdict >= SHOAL_KV_VERDICT_END || is_member != (head->kind > SHOAL_CONTROL_WELCOME))
        return false;
    const size_t least = value_bytes[head->kind];
    const size_t most = least + (head->kind == SHOAL_CONTROL_NOTICE ? SHOAL_CONTROL_NOTICE_MAX : 0);
    return head->value_bytes >= least && head->value_bytes <= most;
}

static bool is_value_sound(const struct shoal_control_frame *frame, int size)
{
    const uint32_t ranks = (uint32_t)size;
    const struct shoal_control_fact *fact = &frame->value.fact;
    const struct shoal_control_notice_head *notice = &frame->value.notice;
    if (frame->kind == SHOAL_CONTROL_FACT)
        return fact->rank < ranks && fact->life < SHOAL_CONTROL_LIFE_END && fact->cause < SHOAL_CONTROL_CAUSE_END;
    return frame->kind != SHOAL_CONTROL_NOTICE ||
           (notice->origin < ranks && notice->number > 0 && notice->weight < SHOAL_CONTROL_WEIGHT_END);
}

enum shoal_control_parsed shoal_control_frame_parse(const unsigned char *data, size_t bytes, int size, bool is_member,
                                                    struct shoal_control_frame *frame_out)
{
    struct shoal_control_head head;
    struct shoal_control_frame frame;
    if (bytes < sizeof head)
        return SHOAL_CONTROL_PARSED_MORE;
    memcpy(&head, data, sizeof head);
    if (!is_head_sound(&head, is_member))
        return SHOAL_CONTROL_PARSED_BAD;
    memset(&frame, 0, sizeof frame);
    frame.kind = head.kind;
    frame.verdict = head.verdict;
    frame.bytes = sizeof head + head.value_bytes;
    if (bytes < frame.bytes)
        return SHOAL_CONTROL_PARSED_MORE;
    const size_t least = value_bytes[head.kind];
    memcpy(&frame.value, data + sizeof head, least);
    frame.data = data + sizeof head + least;
    frame.data_bytes = head.value_bytes - least;
    if (!is_value_sound(&frame, size))
        return SHOAL_CONTROL_PARSED_BAD;
    *frame_out = frame;
    return SHOAL_CONTROL_PARSED_FRAME;
}

size_t shoal_control_frame_build(const struct shoal_control_frame *frame, unsigned char *to)
{
    const size_t least = value_bytes[frame->kind];
    const struct shoal_control_head head = {.magic = SHOAL_CONTROL_MAGIC,
                                            .kind = (uint8_t)frame->kind,
                                            .verdict = (uint8_t)frame->verdict,
                                            .value_bytes = (uint16_t)(least + frame->data_bytes)};
    memcpy(to, &head, sizeof head);
    memcpy(to + sizeof head, &frame->value, least);
    if (frame->data_bytes > 0)
        memcpy(to + sizeof head + least, frame->data, frame->data_bytes);
    return sizeof head + least + frame->data_bytes;
}

void shoal_control_refusal_print(enum shoal_kv_verdict verdict, const struct shoal_kv_hello *there,
                                 const struct shoal_kv_hello *here, char *text, size_t bytes)
{
    char version[SHOAL_KV_VERSION_BYTES];
    memcpy(version, there->version, sizeof version);
    shoal_kv_text_clean(version, sizeof version);
    switch (verdict) {
    case SHOAL_KV_VERSION:
        snprintf(text, bytes, "Shoal %s runs there (protocol %#x) and %s here (%#x); install one version everywhere", version,
                 there->protocol, here->version, here->protocol);
        return;
    case SHOAL_KV_SIZE:
        snprintf(text, bytes, "%u ranks are expected there and %u here", there->size, here->size);
        return;
    case SHOAL_KV_RANK:
        snprintf(text, bytes, "it is not the rank it should be");
        return;
    case SHOAL_KV_TAKEN:
        snprintf(text, bytes, "two processes claim to be this rank");
        return;
    case SHOAL_KV_SECRET_ONE_SIDED:
    case SHOAL_KV_SECRET_WRONG:
        snprintf(text, bytes, "its secret is another; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks");
        return;
    default:
        snprintf(text, bytes, "it is not of this job");
        return;
    }
}
