#include "membership/control_wire.h"

#include <string.h>

const struct shoal_link_service shoal_control_service = {
    .protocol = SHOAL_CONTROL_PROTOCOL,
    .kind_end = SHOAL_CONTROL_KIND_END,
    .verdict_end = 1,
    .has_heartbeats = true,
    .key_bytes_max = sizeof(struct shoal_control_notice_head),
    .value_bytes_max = SHOAL_CONTROL_NOTICE_MAX,
    .out_bytes_max = SHOAL_CONTROL_OUT_BYTES,
};
_Static_assert(SHOAL_CONTROL_OUT_BYTES > 2 * (SHOAL_LINK_STRANGER_BYTES_MAX + SHOAL_CONTROL_FRAME_BYTES_MAX),
               "there is room for the handshake and a frame even if nothing has been sent");

static bool take_fact(const struct shoal_link_frame *from, uint32_t ranks, struct shoal_control_fact *fact)
{
    if (from->head.key_bytes != 0 || from->head.value_bytes != sizeof *fact)
        return false;
    memcpy(fact, from->value, sizeof *fact);
    return fact->rank < ranks && fact->life < SHOAL_CONTROL_LIFE_END && fact->cause < SHOAL_CONTROL_CAUSE_END;
}

static bool take_notice(const struct shoal_link_frame *from, uint32_t ranks, struct shoal_control_notice_head *notice)
{
    if (from->head.key_bytes != sizeof *notice)
        return false;
    memcpy(notice, from->key, sizeof *notice);
    return notice->origin < ranks && notice->number > 0 && notice->weight < SHOAL_CONTROL_WEIGHT_END;
}

bool shoal_control_frame_parse(const struct shoal_link_frame *from, int size, struct shoal_control_frame *frame_out)
{
    struct shoal_control_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.kind = from->head.kind;
    bool is_sound = from->head.key_bytes + from->head.value_bytes == 0;
    if (frame.kind == SHOAL_CONTROL_FACT)
        is_sound = take_fact(from, (uint32_t)size, &frame.value.fact);
    else if (frame.kind == SHOAL_CONTROL_NOTICE)
        is_sound = take_notice(from, (uint32_t)size, &frame.value.notice);
    if (frame.kind == SHOAL_CONTROL_NOTICE) {
        frame.data = from->value;
        frame.data_bytes = from->head.value_bytes;
    }
    *frame_out = frame;
    return is_sound;
}

bool shoal_control_frame_send(struct shoal_link *link, const struct shoal_control_frame *frame)
{
    struct shoal_link_frame to = {.head = {.kind = (uint8_t)frame->kind}};
    if (frame->kind == SHOAL_CONTROL_FACT) {
        to.value = &frame->value.fact;
        to.head.value_bytes = sizeof frame->value.fact;
    } else if (frame->kind == SHOAL_CONTROL_NOTICE) {
        to.key = &frame->value.notice;
        to.head.key_bytes = sizeof frame->value.notice;
        to.value = frame->data;
        to.head.value_bytes = (uint32_t)frame->data_bytes;
    }
    return shoal_link_send(link, &to);
}
