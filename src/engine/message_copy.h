/* Copies a large message from its sender's memory into this rank's, a part at a time, so that other operations advance. Helper
 * threads copy parts of a message in host memory if that is worth a post; whether it is faster is tried (stores.h). */
#ifndef SHOAL_ENGINE_MESSAGE_COPY_H
#define SHOAL_ENGINE_MESSAGE_COPY_H

#include "base/log.h"
#include "engine/stores.h"

struct shoal_engine;
struct shoal_request;

/* A copy by helpers. */
struct shoal_message_copy {
    struct shoal_tried width;
    bool is_narrow; /* one thread copies it */
    uint64_t begun_ticks;
    size_t end, part_bytes; /* they copy bytes [offset, end) of the message, in parts */
    uint8_t posted;         /* their ticket + 1; 0: none */
};

/* Copies the next bytes, at most `most` if this thread copies them, from message.source to the receive's operand. Then
 * message.offset grows. Returns OK if it did something. Returns PENDING if helpers have not ended, or if a failure was
 * published, after which the sender may have freed its memory. */
SHOAL_MUST_USE enum shoal_status shoal_message_copy(struct shoal_engine *engine, struct shoal_request *request, size_t most);

/* Afterwards no helper touches the message. */
void shoal_message_copy_stop(struct shoal_engine *engine, struct shoal_request *request);

#endif
