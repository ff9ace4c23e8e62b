/* Sends and receives, over the transport's packet queues, first in first out per (peer, tag).
 *
 *   small   EAGER with the data; the send is done when the packet is queued
 *   large   ASK (count, tag; with the sender's memory if the receiver can reach it)
 *             -> reachable: the receiver copies and answers TAKEN
 *             -> otherwise: the receiver answers GO when it is ready, the sender streams DATA
 *
 * A rank's messages to itself take the same path, through a queue in its own memory; the data of a large one are copied
 * directly.
 *
 * An operand that is not plain memory may become ready a part at a time (operand/operand.h). A GO grants how far the sender may
 * stream, and more GOs follow. So there is always room for arriving data, and no message blocks those behind it in the queue.
 *
 * An unexpected message is kept until its receive is posted: the data of a small one, the ASK of a large one. Everything runs
 * under the progress engine's lock. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"
#include "engine/p2p.h"

enum packet_kind { EAGER = 1, ASK, GO, DATA, TAKEN };

/* message.phase of a request */
enum phase {
    TO_ANNOUNCE,  /* send: EAGER or ASK not yet queued */
    AWAIT_ANSWER, /* send: ASK queued */
    STREAMING,    /* send: GO received */
    LEAVING,      /* send: all queued; packets still need this process to leave */
    UNMATCHED,    /* receive */
    COPYING,      /* receive: from the sender's memory */
    TO_ANSWER,    /* receive: GO or TAKEN not yet queued */
    FILLING,      /* receive: DATA expected, and perhaps another GO to be queued */
    PLACING,      /* receive: a small message arrived before its output was ready for it */
    TAKING,       /* receive: all is written; by the owner of the output */
    DRAINING,     /* drain: waits until it is the oldest request */
    PHASE_END
};

/* A packet with its data: a message that came before its receive, or one from the rank to itself. */
struct kept {
    struct kept *next;
    int peer;
    struct shoal_packet packet;
    char data[];
};

struct kept_list {
    struct kept *head, *tail;
    unsigned count;
};

#define COPY_BYTES ((size_t)1 << 20) /* copied, or requested from an operand, at once */
#define UNEXPECTED_MAX 4096          /* kept messages; beyond that, the queues fill and the senders wait */
#define TO_ITSELF_MAX 64             /* packets from the rank to itself; beyond that, a send waits */

struct shoal_p2p {
    struct shoal_request *head, *tail; /* all sends and receives under way, in the order posted */
    struct kept_list unexpected;
    struct kept_list to_itself;
    uint64_t next_id;
    bool has_unready; /* during a pass over the list: a small send is not ready */
    bool is_full[];   /* [size], during a pass: the queue to that peer is full */
};

static enum phase phase_of(const struct shoal_request *request)
{
    return (enum phase)request->message.phase;
}

static bool is_send(const struct shoal_request *request)
{
    return request->call.collective == SHOAL_COLLECTIVE_SEND;
}

static bool is_receive(const struct shoal_request *request)
{
    return request->call.collective == SHOAL_COLLECTIVE_RECV;
}

static int peer_of(const struct shoal_request *request)
{
    return request->call.root;
}

/* The type in the form that packets carry. */
static uint32_t tagged_type_of(const struct shoal_call *call)
{
    return (uint32_t)SHOAL_TYPE_TAGGED(call->type, call->type_tag);
}

static bool is_small(const struct shoal_request *request)
{
    return request->bytes <= SHOAL_EAGER_BYTES;
}

/* ---- Bytes of an operand, in whole elements ------------------------------------------------------------------------------ */

static enum shoal_block_operand p2p_operand_of(const struct shoal_request *request)
{
    return is_send(request) ? SHOAL_INPUT : SHOAL_OUTPUT;
}

/* Returns NULL for plain memory. */
static struct shoal_operand *message_operand(const struct shoal_request *request)
{
    return shoal_call_operand(&request->call, p2p_operand_of(request));
}

static bool is_message_ready(struct shoal_engine *engine, struct shoal_request *request, size_t offset, size_t bytes)
{
    const size_t element = request->element_bytes;
    return shoal_runner_is_ready(engine, request, p2p_operand_of(request), offset / element, (offset + bytes) / element);
}

static void release(const struct shoal_request *request, size_t offset, size_t bytes)
{
    const size_t element = request->element_bytes;
    shoal_operand_release(message_operand(request), offset / element, (offset + bytes) / element);
}

/* *bytes is reduced to the number of contiguous bytes from there. */
static char *p2p_address_of(const struct shoal_engine *engine, const struct shoal_request *request, size_t offset,
                            size_t *bytes)
{
    const size_t element = request->element_bytes;
    size_t run = *bytes / element;
    char *const at =
        shoal_call_address(&request->call, engine->rank, element, p2p_operand_of(request), 0, offset / element, &run);
    *bytes = run * element;
    return at;
}

/* Returns the next bytes, at most as many as may be requested from an operand at once. */
static size_t part_after(const struct shoal_engine *engine, const struct shoal_request *request, size_t offset)
{
    const size_t most = shoal_min_size(COPY_BYTES, shoal_engine_range_bytes(engine, false));
    return shoal_min_size(request->bytes - offset, most / sizeof(uint64_t) * sizeof(uint64_t));
}

/* ---- The list of requests ------------------------------------------------------------------------------------------------ */

static void p2p_append(struct shoal_p2p *p2p, struct shoal_request *request)
{
    request->next = NULL;
    if (p2p->head)
        p2p->tail->next = request;
    else
        p2p->head = request;
    p2p->tail = request;
}

static void p2p_finish(struct shoal_engine *engine, struct shoal_request *request, enum shoal_status status)
{
    struct shoal_p2p *p2p = engine->p2p;
    struct shoal_request **link = &p2p->head, *before = NULL;
    while (*link != request) {
        before = *link;
        link = &(*link)->next;
    }
    *link = request->next;
    if (p2p->tail == request)
        p2p->tail = before;
    SHOAL_ASSERT(engine->message_count > 0);
    engine->message_count--;
    shoal_request_complete(request, status);
}

static struct shoal_request *find_by_id(struct shoal_p2p *p2p, int peer, uint64_t id, enum phase phase)
{
    for (struct shoal_request *request = p2p->head; request; request = request->next) {
        if (peer_of(request) == peer && request->message.id == id && phase_of(request) == phase)
            return request;
    }
    return NULL;
}

/* Finds the send that an answer belongs to. */
static struct shoal_request *find_asked(struct shoal_p2p *p2p, int peer, uint64_t id)
{
    struct shoal_request *const asked = find_by_id(p2p, peer, id, AWAIT_ANSWER);
    return asked ? asked : find_by_id(p2p, peer, id, STREAMING);
}

static struct shoal_request *find_receive(struct shoal_p2p *p2p, int peer, int tag)
{
    for (struct shoal_request *request = p2p->head; request; request = request->next) {
        if (phase_of(request) == UNMATCHED && peer_of(request) == peer && request->call.tag == tag)
            return request;
    }
    return NULL;
}

/* ---- Kept packets -------------------------------------------------------------------------------------------------------- */

/* Returns false if out of memory. */
static bool keep_packet(struct kept_list *list, int peer, const struct shoal_packet *packet, const void *data)
{
    struct kept *kept = malloc(sizeof *kept + packet->bytes);
    if (!kept)
        return false;
    kept->next = NULL;
    kept->peer = peer;
    kept->packet = *packet;
    if (data)
        memcpy(kept->data, data, packet->bytes);
    if (list->head)
        list->tail->next = kept;
    else
        list->head = kept;
    list->tail = kept;
    list->count++;
    return true;
}

/* Removes the packet that *link points to, after `before` (NULL if it is the first), from the list. */
static struct kept *take_kept(struct kept_list *list, struct kept **link, struct kept *before)
{
    SHOAL_ASSERT(list->count > 0 && !before == (link == &list->head));
    struct kept *kept = *link;
    *link = kept->next;
    if (list->tail == kept)
        list->tail = before;
    list->count--;
    return kept;
}

static void free_kept(struct kept_list *list)
{
    while (list->head)
        free(take_kept(list, &list->head, NULL));
}

/* ---- Receiving ----------------------------------------------------------------------------------------------------------- */

static void fail_unfit(struct shoal_engine *engine, struct shoal_request *request, const struct shoal_packet *packet)
{
    struct shoal_failure failure;
    struct shoal_transport_peer name;
    char sent[96];
    const struct shoal_descriptor theirs = {.collective = SHOAL_COLLECTIVE_SEND,
                                            .count = packet->count,
                                            .type = (uint8_t)packet->type,
                                            .type_tag = (uint8_t)(packet->type >> 8),
                                            .root = (int16_t)engine->rank};
    shoal_engine_begin_failure(engine, request, SHOAL_ERR_MISMATCH, -1, &failure); /* either rank may be wrong */
    shoal_engine_print_call(&theirs, sent, sizeof sent);
    engine->ops->peer_name(engine->transport, peer_of(request), &name);
    snprintf(failure.text, sizeof failure.text,
             "a message of communicator %s does not fit its receive: rank %d called %s; rank %d (process %d on %s) "
             "called %s, tag %d",
             engine->name, engine->rank, failure.operation, peer_of(request), name.pid, name.host, sent, packet->tag);
    shoal_engine_fail(engine, &failure);
}

/* Returns the memory of a send of the rank to itself, or NULL if it is not plain. */
static const void *find_own_source(struct shoal_p2p *p2p, int rank, uint64_t id)
{
    const struct shoal_request *send = find_asked(p2p, rank, id);
    return send && !message_operand(send) ? send->call.input : NULL;
}

static void take_large(struct shoal_engine *engine, struct shoal_request *request, const struct shoal_packet *packet)
{
    SHOAL_ASSERT(phase_of(request) == UNMATCHED);
    enum shoal_status status = SHOAL_OK;
    request->message.id = packet->id;
    request->message.offset = 0;
    request->message.phase = TO_ANSWER;
    request->message.is_copied = false;
    if (peer_of(request) == engine->rank)
        request->message.source = find_own_source(engine->p2p, engine->rank, packet->id);
    else if (packet->location)
        request->message.source =
            engine->ops->reach(engine->transport, peer_of(request), packet->location, request->bytes, &status);
    if (request->message.source) /* otherwise it is streamed */
        request->message.phase = COPYING;
}

/* Returns PENDING if the next part is not ready, or as shoal_message_copy() does; if a failure was published,
 * shoal_engine_check() handles it. */
static enum shoal_status copy_part(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(request->message.source && request->message.offset < request->bytes);
    const size_t begin = request->message.offset, bytes = part_after(engine, request, begin);
    if (!is_message_ready(engine, request, begin, bytes))
        return SHOAL_PENDING;
    SHOAL_TRY(shoal_message_copy(engine, request, bytes));
    release(request, begin, request->message.offset - begin);
    if (request->message.offset < request->bytes)
        return SHOAL_OK;
    request->message.phase = TO_ANSWER;
    request->message.is_copied = true;
    return SHOAL_OK;
}

static enum shoal_status advance_taking(struct shoal_engine *engine, struct shoal_request *request)
{
    if (!shoal_runner_is_over(engine, request))
        return SHOAL_PENDING;
    p2p_finish(engine, request, SHOAL_OK);
    return SHOAL_OK;
}

/* Called when all data have arrived. */
static void end_receive(struct shoal_engine *engine, struct shoal_request *request)
{
    request->message.phase = TAKING;
    (void)advance_taking(engine, request);
}

static enum shoal_status advance_placing(struct shoal_engine *engine, struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    if (!is_message_ready(engine, request, 0, request->bytes))
        return SHOAL_PENDING;
    shoal_call_unpack(call, engine->rank, request->element_bytes, 0, call->count, shoal_call_contiguous(call, SHOAL_OUTPUT));
    release(request, 0, request->bytes);
    end_receive(engine, request);
    return SHOAL_OK;
}

static void take_small(struct shoal_engine *engine, struct shoal_request *request, const void *data)
{
    const bool is_plain = !message_operand(request);
    if (request->bytes)
        memcpy(shoal_call_contiguous(&request->call, SHOAL_OUTPUT), data, request->bytes);
    request->message.phase = is_plain ? TAKING : PLACING;
    (void)(is_plain ? advance_taking : advance_placing)(engine, request);
}

/* Called when a message meets its receive. */
static void match(struct shoal_engine *engine, struct shoal_request *request, const struct shoal_packet *packet,
                  const void *data)
{
    request->record->arrived = shoal_clock_ticks();
    /* The packet's sender may not be trusted. */
    const bool is_whole = packet->kind == ASK ? !is_small(request) : packet->bytes == request->bytes;
    if (packet->count != request->call.count || packet->type != tagged_type_of(&request->call) || !is_whole) {
        fail_unfit(engine, request, packet);
        return;
    }
    if (packet->kind == ASK) {
        take_large(engine, request, packet);
        return;
    }
    take_small(engine, request, data);
}

static bool has_tables(struct shoal_engine *engine)
{
    if (!engine->p2p)
        engine->p2p = calloc(1, sizeof *engine->p2p + (size_t)engine->size * sizeof(bool));
    return engine->p2p != NULL;
}

/* Returns false if no more messages can be kept: the packet stays in its queue. */
static bool p2p_take_message(struct shoal_engine *engine, int peer, const struct shoal_packet *packet)
{
    if (!has_tables(engine)) /* it came before this rank's first send or receive */
        return false;
    struct kept_list *unexpected = &engine->p2p->unexpected;
    struct shoal_request *receive = find_receive(engine->p2p, peer, packet->tag);
    if (!receive)
        return unexpected->count < UNEXPECTED_MAX && keep_packet(unexpected, peer, packet, packet + 1);
    match(engine, receive, packet, packet + 1);
    return true;
}

/* A GO has granted these data, so there is room for them. */
static void take_data(struct shoal_engine *engine, int peer, const struct shoal_packet *packet)
{
    struct shoal_request *receive = find_by_id(engine->p2p, peer, packet->id, FILLING);
    const size_t granted = receive ? receive->message.granted : 0, end = packet->offset + packet->bytes;
    if (!receive || packet->offset > granted || packet->bytes > granted - packet->offset ||
        (packet->offset | packet->bytes) % receive->element_bytes)
        return;
    for (size_t at = packet->offset, bytes; at < end; at += bytes) {
        bytes = end - at;
        char *const to = p2p_address_of(engine, receive, at, &bytes);
        memcpy(to, (const char *)(packet + 1) + (at - packet->offset), bytes);
    }
    release(receive, packet->offset, packet->bytes);
    receive->message.offset += packet->bytes;
    if (receive->message.offset == receive->bytes)
        end_receive(engine, receive);
}

static void p2p_take_answer(struct shoal_engine *engine, int peer, const struct shoal_packet *packet)
{
    struct shoal_request *send = find_asked(engine->p2p, peer, packet->id);
    if (!send)
        return;
    if (phase_of(send) == AWAIT_ANSWER)
        send->record->arrived = shoal_clock_ticks();
    if (packet->kind == TAKEN) {
        p2p_finish(engine, send, SHOAL_OK);
        return;
    }
    const size_t granted = shoal_min_size(packet->offset, send->bytes) / send->element_bytes * send->element_bytes;
    send->message.phase = STREAMING;
    send->message.granted = shoal_max_size(send->message.granted, granted);
}

/* Returns false if the packet cannot be accepted now. One that belongs to no message of this rank is dropped. */
static bool take_packet(struct shoal_engine *engine, int peer, const struct shoal_packet *packet)
{
    if (!engine->p2p && packet->kind != EAGER && packet->kind != ASK)
        return true;
    switch (packet->kind) {
    case EAGER:
    case ASK:
        return p2p_take_message(engine, peer, packet);
    case DATA:
        take_data(engine, peer, packet);
        return true;
    case GO:
    case TAKEN:
        p2p_take_answer(engine, peer, packet);
        return true;
    default:
        return true;
    }
}

/* Returns the oldest packet from a peer, or from the rank itself, or NULL if there is none. */
static const struct shoal_packet *p2p_peek(struct shoal_engine *engine, int peer)
{
    if (peer != engine->rank)
        return engine->ops->peek(engine->transport, peer);
    return engine->p2p && engine->p2p->to_itself.head ? &engine->p2p->to_itself.head->packet : NULL;
}

static void p2p_pop(struct shoal_engine *engine, int peer)
{
    if (peer != engine->rank)
        engine->ops->pop(engine->transport, peer);
    else
        free(take_kept(&engine->p2p->to_itself, &engine->p2p->to_itself.head, NULL));
}

static bool p2p_drain(struct shoal_engine *engine)
{
    bool did = false;
    for (int peer = 0; peer < engine->size; peer++) {
        const struct shoal_packet *packet;
        while (!engine->is_broken && (packet = p2p_peek(engine, peer)) && take_packet(engine, peer, packet)) {
            if (engine->is_broken)
                return true;
            p2p_pop(engine, peer);
            engine->must_flush = did = true;
        }
    }
    return did;
}

bool shoal_p2p_drain(struct shoal_engine *engine)
{
    if (engine->is_broken || engine->is_in_progress)
        return false;
    engine->is_in_progress = true;
    const bool did = p2p_drain(engine);
    engine->is_in_progress = false;
    return did;
}

/* ---- Sending ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status p2p_push(struct shoal_engine *engine, const struct shoal_request *request, struct shoal_packet packet,
                                  const void *data)
{
    packet.tag = request->call.tag;
    packet.type = tagged_type_of(&request->call);
    packet.count = request->call.count;
    packet.id = request->message.id;
    engine->must_flush = true;
    if (peer_of(request) != engine->rank)
        return engine->ops->push(engine->transport, peer_of(request), &packet, data);
    struct kept_list *to_itself = &engine->p2p->to_itself;
    return to_itself->count < TO_ITSELF_MAX && keep_packet(to_itself, engine->rank, &packet, data) ? SHOAL_OK : SHOAL_PENDING;
}

/* Returns the data of a small send. Data that are not in plain memory are first packed. */
static const void *find_small(struct shoal_engine *engine, const struct shoal_request *request)
{
    return message_operand(request) ? shoal_runner_pack(engine, request) : request->call.input;
}

static enum shoal_status p2p_announce(struct shoal_engine *engine, struct shoal_request *request)
{
    if (is_small(request))
        return p2p_push(engine, request, (struct shoal_packet){.kind = EAGER, .bytes = (uint32_t)request->bytes},
                        find_small(engine, request));
    const bool is_private = message_operand(request) || peer_of(request) == engine->rank;
    const shoal_location location =
        is_private ? 0 : engine->ops->locate(engine->transport, request->call.input, request->bytes);
    return p2p_push(engine, request, (struct shoal_packet){.kind = ASK, .location = location}, NULL);
}

/* Streams as far as the receiver has granted. */
static enum shoal_status stream(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_p2p_state *message = &request->message;
    while (message->offset < message->granted) {
        SHOAL_ASSERT(message->granted <= request->bytes);
        size_t bytes = shoal_min_size(message->granted - message->offset, SHOAL_PACKET_BYTES_MAX);
        if (!is_message_ready(engine, request, message->offset, bytes))
            return SHOAL_PENDING;
        const char *from = p2p_address_of(engine, request, message->offset, &bytes);
        const struct shoal_packet packet = {.kind = DATA, .bytes = (uint32_t)bytes, .offset = message->offset};
        SHOAL_TRY(p2p_push(engine, request, packet, from));
        release(request, message->offset, bytes);
        message->offset += bytes;
    }
    return message->offset < request->bytes ? SHOAL_PENDING : SHOAL_OK;
}

/* ---- Advancing requests -------------------------------------------------------------------------------------------------- */

/* A send is done when it no longer needs this process: no thread may make progress afterwards. */
static enum shoal_status advance_leaving(struct shoal_engine *engine, struct shoal_request *request)
{
    if (peer_of(request) != engine->rank && !shoal_engine_is_flushed_to(engine, peer_of(request)))
        return SHOAL_PENDING;
    p2p_finish(engine, request, SHOAL_OK);
    return SHOAL_OK;
}

static void p2p_leave(struct shoal_engine *engine, struct shoal_request *request)
{
    request->message.phase = LEAVING;
    (void)advance_leaving(engine, request);
}

/* A full queue delays all later messages to that peer; data that are not ready delay those with the same tag. */
static enum shoal_status advance_announcement(struct shoal_engine *engine, struct shoal_request *request)
{
    if (is_small(request) && !is_message_ready(engine, request, 0, request->bytes)) {
        engine->p2p->has_unready = true;
        return SHOAL_PENDING;
    }
    const enum shoal_status status = p2p_announce(engine, request);
    engine->p2p->is_full[peer_of(request)] = status == SHOAL_PENDING;
    SHOAL_TRY(status);
    request->message.phase = AWAIT_ANSWER;
    if (!is_small(request))
        return SHOAL_OK;
    release(request, 0, request->bytes);
    p2p_leave(engine, request);
    return SHOAL_OK;
}

static enum shoal_status advance_stream(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_TRY(stream(engine, request));
    p2p_leave(engine, request);
    return SHOAL_OK;
}

/* Grants the next part of an operand that becomes ready part by part. In plain memory there is room for all of it. */
static enum shoal_status grant(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_p2p_state *message = &request->message;
    const size_t bytes =
        message_operand(request) ? part_after(engine, request, message->granted) : request->bytes - message->granted;
    if (!is_message_ready(engine, request, message->granted, bytes)) {
        if (message->offset < message->granted) /* what was granted before comes first, from the peer */
            request->unready.operand = 0;
        return SHOAL_PENDING;
    }
    SHOAL_TRY(p2p_push(engine, request, (struct shoal_packet){.kind = GO, .offset = message->granted + bytes}, NULL));
    SHOAL_ASSERT(message->granted + bytes <= request->bytes);
    message->granted += bytes;
    return SHOAL_OK;
}

static enum shoal_status advance_filling(struct shoal_engine *engine, struct shoal_request *request)
{
    return request->message.granted < request->bytes ? grant(engine, request) : SHOAL_PENDING;
}

static enum shoal_status advance_answer(struct shoal_engine *engine, struct shoal_request *request)
{
    if (request->message.is_copied) {
        SHOAL_TRY(p2p_push(engine, request, (struct shoal_packet){.kind = TAKEN}, NULL));
        end_receive(engine, request);
        return SHOAL_OK;
    }
    SHOAL_TRY(grant(engine, request));
    request->message.phase = FILLING;
    return SHOAL_OK;
}

static enum shoal_status advance_drain(struct shoal_engine *engine, struct shoal_request *request)
{
    if (engine->p2p->head != request)
        return SHOAL_PENDING;
    p2p_finish(engine, request, SHOAL_OK);
    return SHOAL_OK;
}

/* Advances a request in its phase, as far as the queue to the peer allows. Returns PENDING if the queue is full. May finish the
 * request. NULL: a packet ends the phase. */
typedef enum shoal_status (*advance_fn)(struct shoal_engine *engine, struct shoal_request *request);
static const advance_fn advances[PHASE_END] = {[TO_ANNOUNCE] = advance_announcement,
                                               [STREAMING] = advance_stream,
                                               [LEAVING] = advance_leaving,
                                               [COPYING] = copy_part,
                                               [TO_ANSWER] = advance_answer,
                                               [FILLING] = advance_filling,
                                               [PLACING] = advance_placing,
                                               [TAKING] = advance_taking,
                                               [DRAINING] = advance_drain};

static enum shoal_status advance(struct shoal_engine *engine, struct shoal_request *request)
{
    const advance_fn fn = advances[phase_of(request)];
    return fn ? fn(engine, request) : SHOAL_PENDING;
}

/* Returns true if an earlier small send with the same peer and tag is not ready. */
static bool follows_unready(const struct shoal_p2p *p2p, const struct shoal_request *request)
{
    const struct shoal_request *earlier = p2p->head;
    while (earlier != request &&
           (phase_of(earlier) != TO_ANNOUNCE || peer_of(earlier) != peer_of(request) || earlier->call.tag != request->call.tag))
        earlier = earlier->next;
    return earlier != request;
}

static bool is_kept_back(const struct shoal_p2p *p2p, const struct shoal_request *request)
{
    return phase_of(request) == TO_ANNOUNCE &&
           (p2p->is_full[peer_of(request)] || (p2p->has_unready && follows_unready(p2p, request)));
}

static void begin_pass(struct shoal_engine *engine)
{
    if (!engine->p2p)
        return;
    memset(engine->p2p->is_full, 0, (size_t)engine->size * sizeof *engine->p2p->is_full);
    engine->p2p->has_unready = false;
}

/* Advances requests in the order posted. */
bool shoal_p2p_progress(struct shoal_engine *engine)
{
    bool did = p2p_drain(engine);
    struct shoal_request *next;
    begin_pass(engine);
    for (struct shoal_request *request = engine->is_broken || !engine->p2p ? NULL : engine->p2p->head; request;
         request = next) {
        next = request->next;
        if (is_kept_back(engine->p2p, request))
            continue;
        const size_t offset = request->message.offset;
        const enum shoal_status status = advance(engine, request);
        if (engine->is_broken)
            return true; /* a callback may have broken the engine: the list is gone */
        did |= status == SHOAL_OK || (status == SHOAL_PENDING && request->message.offset != offset);
        if (status != SHOAL_OK && status != SHOAL_PENDING) {
            shoal_engine_fail_by_last_error(engine, request, status, engine->rank);
            return true;
        }
    }
    return did;
}

/* ---- Entry --------------------------------------------------------------------------------------------------------------- */

static void match_unexpected(struct shoal_engine *engine, struct shoal_request *request)
{
    struct kept_list *list = &engine->p2p->unexpected;
    struct kept **link = &list->head, *before = NULL;
    while (*link && ((*link)->peer != peer_of(request) || (*link)->packet.tag != request->call.tag)) {
        before = *link;
        link = &(*link)->next;
    }
    if (!*link)
        return;
    struct kept *kept = take_kept(list, link, before);
    match(engine, request, &kept->packet, kept->data);
    free(kept);
}

enum shoal_status shoal_p2p_post(struct shoal_engine *engine, struct shoal_request *request)
{
    SHOAL_ASSERT(shoal_request_is_message(request));
    if (!has_tables(engine))
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for messages");
    request->record->algorithm = is_small(request) ? shoal_engine_eager : shoal_engine_asked;
    request->sequence = request->record->sequence = ++engine->p2p->next_id;
    request->message = (struct shoal_p2p_state){
        .id = is_send(request) ? request->sequence : 0,
        .phase = is_send(request)      ? TO_ANNOUNCE
                 : is_receive(request) ? UNMATCHED
                                       : DRAINING,
    };
    p2p_append(engine->p2p, request);
    engine->message_count++;
    if (is_receive(request))
        match_unexpected(engine, request);
    return SHOAL_OK;
}

struct shoal_request *shoal_p2p_first(const struct shoal_engine *engine)
{
    return engine->p2p ? engine->p2p->head : NULL;
}

struct shoal_request *shoal_p2p_oldest(struct shoal_engine *engine)
{
    struct shoal_request *oldest = NULL;
    for (struct shoal_request *request = shoal_p2p_first(engine); request; request = request->next) {
        if (!oldest || request->deadline_ns < oldest->deadline_ns)
            oldest = request;
    }
    return oldest;
}

struct shoal_request *shoal_p2p_awaited(struct shoal_engine *engine)
{
    struct shoal_request *request = engine->p2p ? engine->p2p->head : NULL;
    while (request && (request->call.collective == SHOAL_COLLECTIVE_DRAIN || !shoal_request_is_awaited(request)))
        request = request->next;
    return request;
}

bool shoal_p2p_is_helped(const struct shoal_request *request)
{
    return shoal_request_is_message(request) && request->message.copy.posted;
}

struct shoal_request *shoal_p2p_other_side(const struct shoal_engine *engine, const struct shoal_request *request)
{
    const uint64_t id = shoal_request_is_message(request) && peer_of(request) == engine->rank ? request->message.id : 0;
    struct shoal_request *other = id ? engine->p2p->head : NULL; /* a receive has no number before it meets its send */
    while (other && (other == request || peer_of(other) != engine->rank || other->message.id != id))
        other = other->next;
    return other;
}

uint64_t shoal_p2p_mark(const struct shoal_engine *engine)
{
    uint64_t mark = engine->message_count;
    for (const struct shoal_request *r = engine->p2p ? engine->p2p->head : NULL; r; r = r->next)
        mark = mark * 31 + r->message.offset + r->message.granted + (uint64_t)r->message.phase;
    return mark;
}

void shoal_p2p_append_unexpected(const struct shoal_engine *engine, const struct shoal_request *request, char *text,
                                 size_t bytes)
{
    const struct kept *unexpected = is_receive(request) && phase_of(request) == UNMATCHED ? engine->p2p->unexpected.head : NULL;
    while (unexpected && unexpected->peer != peer_of(request))
        unexpected = unexpected->next;
    if (unexpected)
        shoal_engine_append(text, bytes, "; a message with tag %d has come from rank %d, and no receive asks for it",
                            unexpected->packet.tag, unexpected->peer);
}

struct shoal_request *shoal_p2p_with(struct shoal_engine *engine, int peer)
{
    struct shoal_request *request = shoal_p2p_first(engine);
    while (request && peer_of(request) != peer)
        request = request->next;
    return request;
}

void shoal_p2p_stop_copies(struct shoal_engine *engine)
{
    for (struct shoal_request *request = shoal_p2p_first(engine); request; request = request->next)
        shoal_message_copy_stop(engine, request);
}

void shoal_p2p_fail(struct shoal_engine *engine, enum shoal_status status)
{
    while (engine->p2p && engine->p2p->head) {
        SHOAL_ASSERT(!shoal_p2p_is_helped(engine->p2p->head));
        p2p_finish(engine, engine->p2p->head, status);
    }
}

void shoal_p2p_destroy(struct shoal_engine *engine)
{
    if (engine->p2p) {
        SHOAL_ASSERT(!engine->p2p->head && !engine->message_count);
        free_kept(&engine->p2p->unexpected);
        free_kept(&engine->p2p->to_itself);
    }
    free(engine->p2p);
    engine->p2p = NULL;
}
