#include "link/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/assert.h"
#include "base/clock.h"

#define CAPACITY_STEP 4096
#define PROBE_S 1 /* between the kernel's keep-alives */

void shoal_link_open(struct shoal_link *link, const struct shoal_link_identity *own, int fd, bool is_client, uint64_t now_ns)
{
    SHOAL_ASSERT(own->service->kind_end > SHOAL_LINK_KIND_END && own->greeting.count <= SHOAL_LINK_GREETING_BYTES_MAX);
    *link = (struct shoal_link){.own = own, .fd = fd, .is_client = is_client};
    link->state = is_client ? SHOAL_LINK_CONNECTING : SHOAL_LINK_EXPECT_HELLO;
    link->deadline_ns = is_client ? 0 : now_ns + SHOAL_LINK_HANDSHAKE_MS * SHOAL_NS_PER_MS;
}

void shoal_link_close(struct shoal_link *link)
{
    free(link->in.bytes);
    free(link->out.bytes);
    link->in = link->out = (struct shoal_link_queue){.bytes = NULL};
}

void shoal_link_end(struct shoal_link *link, int error)
{
    if (!link->error)
        link->error = error;
    link->state = SHOAL_LINK_ENDED;
}

static bool fail(struct shoal_link *link, int error)
{
    shoal_link_end(link, error);
    return false;
}

void shoal_link_watch(int fd, unsigned silent_ms)
{
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){PROBE_S}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){PROBE_S}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &(int){(int)silent_ms / 1000 / PROBE_S}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
}

/* ---- queues ---- */

/* Makes room for `more` bytes at the end: moves the bytes to the front, and grows if that is not enough. */
static bool queue_reserve(struct shoal_link_queue *queue, size_t more)
{
    SHOAL_ASSERT(queue->begin <= queue->end && queue->end <= queue->capacity);
    if (queue->end + more <= queue->capacity)
        return true;
    const size_t count = queue->end - queue->begin;
    if (count > 0)
        memmove(queue->bytes, queue->bytes + queue->begin, count);
    queue->begin = 0;
    queue->end = count;
    if (count + more <= queue->capacity)
        return true;
    const size_t capacity = shoal_max_size(count + more, shoal_min_size(2 * queue->capacity, count + more + CAPACITY_STEP));
    unsigned char *bytes = realloc(queue->bytes, capacity);
    if (!bytes)
        return false;
    queue->bytes = bytes;
    queue->capacity = capacity;
    return true;
}

static void queue_put(struct shoal_link_queue *queue, const void *data, size_t bytes)
{
    SHOAL_ASSERT(queue->end + bytes <= queue->capacity);
    if (bytes > 0)
        memcpy(queue->bytes + queue->end, data, bytes);
    queue->end += bytes;
}

static void queue_drop(struct shoal_link_queue *queue, size_t bytes)
{
    SHOAL_ASSERT(bytes <= queue->end - queue->begin);
    queue->begin += bytes;
    if (queue->begin == queue->end)
        queue->begin = queue->end = 0;
}

/* ---- out ---- */

bool shoal_link_send(struct shoal_link *link, const struct shoal_link_frame *frame)
{
    const size_t bytes = shoal_link_frame_bytes(&frame->head);
    struct shoal_link_head head = frame->head;
    if (link->state == SHOAL_LINK_ENDED)
        return false;
    if (shoal_link_unsent(link) + bytes > link->own->service->out_bytes_max)
        return fail(link, ENOBUFS);
    if (!queue_reserve(&link->out, bytes))
        return fail(link, ENOMEM);
    head.magic = SHOAL_LINK_MAGIC;
    queue_put(&link->out, &head, sizeof head);
    queue_put(&link->out, frame->key, head.key_bytes);
    queue_put(&link->out, frame->value, head.value_bytes);
    link->sent += link->state == SHOAL_LINK_OPEN ? bytes : 0;
    return true;
}

bool shoal_link_flush(struct shoal_link *link)
{
    while (shoal_link_unsent(link) > 0) {
        const ssize_t sent =
            send(link->fd, link->out.bytes + link->out.begin, shoal_link_unsent(link), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK;
        queue_drop(&link->out, (size_t)sent);
    }
    return true;
}

bool shoal_link_beat(struct shoal_link *link)
{
    SHOAL_ASSERT(link->own->service->has_heartbeats && link->state == SHOAL_LINK_OPEN);
    const struct shoal_link_frame frame = {.head = {.kind = SHOAL_LINK_HEARTBEAT, .value_bytes = sizeof link->received},
                                           .value = &link->received};
    link->reported = link->received;
    return shoal_link_send(link, &frame);
}

/* ---- in ---- */

static size_t frame_bytes_max(const struct shoal_link *link)
{
    const struct shoal_link_service *service = link->own->service;
    if (link->state != SHOAL_LINK_OPEN)
        return sizeof(struct shoal_link_head) + SHOAL_LINK_STRANGER_BYTES_MAX;
    return sizeof(struct shoal_link_head) + service->key_bytes_max + service->value_bytes_max;
}

static size_t in_count(const struct shoal_link *link)
{
    return link->in.end - link->in.begin;
}

/* Returns how many bytes the frame under way needs at least, as far as its head shows that. */
static size_t frame_bytes_wanted(const struct shoal_link *link)
{
    struct shoal_link_head head;
    if (in_count(link) < sizeof head)
        return sizeof head;
    memcpy(&head, link->in.bytes + link->in.begin, sizeof head);
    return shoal_link_frame_bytes(&head);
}

/* Returns how many bytes to receive. A frame that is under way is received as a whole, if the socket has it. */
static size_t room(const struct shoal_link *link)
{
    const size_t wanted = shoal_min_size(shoal_max_size(frame_bytes_wanted(link), CAPACITY_STEP), frame_bytes_max(link));
    return wanted > in_count(link) ? wanted - in_count(link) : 0;
}

long shoal_link_receive(struct shoal_link *link)
{
    const size_t bytes = room(link);
    if (link->error || link->state == SHOAL_LINK_ENDED)
        return -1;
    if (bytes == 0)
        return 0;
    if (!queue_reserve(&link->in, bytes)) {
        link->error = ENOMEM;
        return -1;
    }
    const ssize_t got = recv(link->fd, link->in.bytes + link->in.end, bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (got <= 0) {
        link->error = got < 0 ? errno : ECONNRESET;
        return -1;
    }
    link->in.end += (size_t)got;
    return (long)got;
}

bool shoal_link_feed(struct shoal_link *link, const void *data, size_t bytes)
{
    if (in_count(link) + bytes > frame_bytes_max(link) || !queue_reserve(&link->in, bytes))
        return false;
    queue_put(&link->in, data, bytes);
    return true;
}

/* ---- the handshake ---- */

static struct shoal_link_meeting meeting_of(const struct shoal_link *link)
{
    return (struct shoal_link_meeting){
        .client = &link->client,
        .server = &link->server,
        .client_greeting = link->is_client ? &link->own->greeting : &link->greeting,
        .server_greeting = link->is_client ? &link->greeting : &link->own->greeting,
    };
}

/* Sends a message of the handshake with a value in up to three parts. */
static bool handshake_send(struct shoal_link *link, enum shoal_link_kind kind, enum shoal_link_verdict verdict,
                           const void *value, size_t value_bytes)
{
    const struct shoal_link_head head = {
        .kind = (uint8_t)kind, .verdict = (uint8_t)verdict, .value_bytes = (uint32_t)value_bytes};
    return shoal_link_send(link, &(struct shoal_link_frame){.head = head, .value = value});
}

static enum shoal_link_event refuse(struct shoal_link *link, enum shoal_link_verdict verdict, uint64_t now_ns)
{
    SHOAL_ASSERT(verdict != SHOAL_LINK_OK && verdict < SHOAL_LINK_VERDICT_END);
    link->verdict = verdict;
    link->state = SHOAL_LINK_CLOSING;
    link->deadline_ns = now_ns + SHOAL_LINK_CLOSING_MS * SHOAL_NS_PER_MS;
    return SHOAL_LINK_REFUSED;
}

static enum shoal_link_event broken(struct shoal_link *link, int error)
{
    shoal_link_end(link, error);
    return SHOAL_LINK_BROKEN;
}

static enum shoal_link_event opened(struct shoal_link *link)
{
    link->state = SHOAL_LINK_OPEN;
    link->deadline_ns = 0;
    return SHOAL_LINK_OPENED;
}

static enum shoal_link_verdict link_judge(const struct shoal_link *link)
{
    const struct shoal_link_identity *own = link->own;
    const enum shoal_link_verdict verdict = shoal_link_hello_judge(shoal_link_other(link), &own->hello);
    return verdict == SHOAL_LINK_OK && own->judge ? own->judge(own->arg, link) : verdict;
}

static bool greeting_take(struct shoal_link *link, const struct shoal_link_frame *frame, size_t before)
{
    if (frame->head.value_bytes < before || frame->head.value_bytes - before > sizeof link->greeting.bytes)
        return false;
    link->greeting.count = frame->head.value_bytes - before;
    memcpy(link->greeting.bytes, (const char *)frame->value + before, link->greeting.count);
    return true;
}

bool shoal_link_greet(struct shoal_link *link)
{
    struct {
        struct shoal_link_hello hello;
        unsigned char greeting[SHOAL_LINK_GREETING_BYTES_MAX];
    } value;
    SHOAL_ASSERT(link->is_client && link->state == SHOAL_LINK_CONNECTING);
    link->client = link->own->hello;
    if (shoal_auth_random(link->client.nonce, sizeof link->client.nonce) != SHOAL_OK)
        return fail(link, ENOSYS);
    value.hello = link->client;
    memcpy(value.greeting, link->own->greeting.bytes, link->own->greeting.count);
    link->state = SHOAL_LINK_EXPECT_CHALLENGE;
    return handshake_send(link, SHOAL_LINK_HELLO, SHOAL_LINK_OK, &value, sizeof value.hello + link->own->greeting.count);
}

/* This side proves itself only to clients that send its job's number, so that strangers get no sample of the secret's use. The
 * number itself is left out for others. */
static enum shoal_link_event challenge(struct shoal_link *link, enum shoal_link_verdict verdict, uint64_t now_ns)
{
    struct {
        struct shoal_link_challenge challenge;
        unsigned char greeting[SHOAL_LINK_GREETING_BYTES_MAX];
    } value = {.challenge = {.server = link->server}};
    const struct shoal_link_meeting meeting = meeting_of(link);
    if (verdict == SHOAL_LINK_NOT_OURS)
        value.challenge.server.job = 0;
    else if (!shoal_link_proof_build(link->own->secret, true, &meeting, value.challenge.proof))
        return broken(link, ENOSYS);
    memcpy(value.greeting, link->own->greeting.bytes, link->own->greeting.count);
    if (!handshake_send(link, SHOAL_LINK_CHALLENGE, verdict, &value, sizeof value.challenge + link->own->greeting.count))
        return SHOAL_LINK_BROKEN;
    if (verdict != SHOAL_LINK_OK)
        return refuse(link, verdict, now_ns);
    link->state = SHOAL_LINK_EXPECT_PROOF;
    return SHOAL_LINK_SHAKEN;
}

static enum shoal_link_event do_hello(struct shoal_link *link, const struct shoal_link_frame *frame, uint64_t now_ns)
{
    if (!greeting_take(link, frame, sizeof link->client))
        return broken(link, EPROTO);
    memcpy(&link->client, frame->value, sizeof link->client);
    link->server = link->own->hello;
    if (shoal_auth_random(link->server.nonce, sizeof link->server.nonce) != SHOAL_OK)
        return broken(link, ENOSYS);
    return challenge(link, link_judge(link), now_ns);
}

/* The listening side has proved itself. Only then does this side show that it knows the secret. A side that is refused sends
 * nothing more; a side that refuses sends its verdict, without a proof. */
static enum shoal_link_event do_challenge(struct shoal_link *link, const struct shoal_link_frame *frame, uint64_t now_ns)
{
    struct shoal_link_challenge value;
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
    enum shoal_link_verdict verdict = frame->head.verdict;
    if (!greeting_take(link, frame, sizeof value))
        return broken(link, EPROTO);
    memcpy(&value, frame->value, sizeof value);
    link->server = value.server;
    const struct shoal_link_meeting meeting = meeting_of(link);
    const bool is_good = shoal_link_proof_check(link->own->secret, true, &meeting, value.proof);
    link->is_other_proved = is_good && link->own->hello.has_secret && link->server.has_secret;
    link->is_refused_there = verdict != SHOAL_LINK_OK;
    if (verdict != SHOAL_LINK_OK)
        return refuse(link, verdict, now_ns);
    verdict = link_judge(link);
    if (verdict == SHOAL_LINK_OK && (!is_good || !shoal_link_proof_build(link->own->secret, false, &meeting, proof)))
        verdict = SHOAL_LINK_SECRET_WRONG;
    if (!handshake_send(link, SHOAL_LINK_PROOF, verdict, proof, verdict == SHOAL_LINK_OK ? sizeof proof : 0))
        return SHOAL_LINK_BROKEN;
    if (verdict != SHOAL_LINK_OK)
        return refuse(link, verdict, now_ns);
    link->state = SHOAL_LINK_EXPECT_WELCOME;
    return SHOAL_LINK_SHAKEN;
}

/* Judges once more, because another process may have come as this one since the hello. */
static enum shoal_link_event do_proof(struct shoal_link *link, const struct shoal_link_frame *frame, uint64_t now_ns)
{
    const struct shoal_link_meeting meeting = meeting_of(link);
    enum shoal_link_verdict verdict = frame->head.verdict;
    link->is_refused_there = verdict != SHOAL_LINK_OK;
    if (verdict == SHOAL_LINK_OK && (frame->head.value_bytes != SHOAL_AUTH_MAC_BYTES ||
                                     !shoal_link_proof_check(link->own->secret, false, &meeting, frame->value)))
        verdict = SHOAL_LINK_SECRET_WRONG;
    link->is_other_proved = verdict == SHOAL_LINK_OK && link->own->hello.has_secret;
    if (verdict == SHOAL_LINK_OK)
        verdict = link_judge(link);
    if (!handshake_send(link, SHOAL_LINK_WELCOME, verdict, NULL, 0))
        return SHOAL_LINK_BROKEN;
    return verdict == SHOAL_LINK_OK ? opened(link) : refuse(link, verdict, now_ns);
}

static enum shoal_link_event do_handshake(struct shoal_link *link, const struct shoal_link_frame *frame, uint64_t now_ns)
{
    switch (link->state) {
    case SHOAL_LINK_EXPECT_HELLO:
        return do_hello(link, frame, now_ns);
    case SHOAL_LINK_EXPECT_CHALLENGE:
        return do_challenge(link, frame, now_ns);
    case SHOAL_LINK_EXPECT_PROOF:
        return do_proof(link, frame, now_ns);
    default:
        SHOAL_ASSERT(link->state == SHOAL_LINK_EXPECT_WELCOME);
        link->is_refused_there = frame->head.verdict != SHOAL_LINK_OK;
        return frame->head.verdict == SHOAL_LINK_OK ? opened(link) : refuse(link, frame->head.verdict, now_ns);
    }
}

/* ---- frames ---- */

static enum shoal_link_event do_heartbeat(struct shoal_link *link, const struct shoal_link_frame *frame)
{
    uint64_t received;
    memcpy(&received, frame->value, sizeof received);
    if (received < link->confirmed || received > link->sent)
        return broken(link, EPROTO);
    link->confirmed = received;
    return SHOAL_LINK_BEAT;
}

static bool is_service_head_sound(const struct shoal_link_service *service, const struct shoal_link_head *head)
{
    if (head->kind == SHOAL_LINK_HEARTBEAT)
        return service->has_heartbeats && head->key_bytes == 0 && head->value_bytes == sizeof(uint64_t);
    return head->kind >= SHOAL_LINK_KIND_END && head->kind < service->kind_end && head->verdict < service->verdict_end &&
           head->key_bytes <= service->key_bytes_max && head->value_bytes <= service->value_bytes_max;
}

/* Only the message that is due is sound. */
static bool is_link_head_sound(const struct shoal_link *link, const struct shoal_link_head *head)
{
    static const enum shoal_link_kind due[] = {[SHOAL_LINK_EXPECT_CHALLENGE] = SHOAL_LINK_CHALLENGE,
                                               [SHOAL_LINK_EXPECT_WELCOME] = SHOAL_LINK_WELCOME,
                                               [SHOAL_LINK_EXPECT_HELLO] = SHOAL_LINK_HELLO,
                                               [SHOAL_LINK_EXPECT_PROOF] = SHOAL_LINK_PROOF};
    if (head->magic != SHOAL_LINK_MAGIC)
        return false;
    if (link->state == SHOAL_LINK_OPEN)
        return is_service_head_sound(link->own->service, head);
    return head->kind == due[link->state] && head->verdict < SHOAL_LINK_VERDICT_END && head->key_bytes == 0 &&
           head->value_bytes <= SHOAL_LINK_STRANGER_BYTES_MAX;
}

/* The queue drops the frame at once, but its bytes stay in their place until more are received. */
enum shoal_link_event shoal_link_next(struct shoal_link *link, uint64_t now_ns, struct shoal_link_frame *frame_out)
{
    struct shoal_link_frame frame;
    if (link->state == SHOAL_LINK_ENDED)
        return SHOAL_LINK_BROKEN;
    if (link->state == SHOAL_LINK_CONNECTING || link->state == SHOAL_LINK_CLOSING)
        return SHOAL_LINK_NOTHING;
    const size_t bytes = frame_bytes_wanted(link);
    if (in_count(link) >= sizeof frame.head) {
        memcpy(&frame.head, link->in.bytes + link->in.begin, sizeof frame.head);
        if (!is_link_head_sound(link, &frame.head))
            return broken(link, EPROTO);
    }
    if (in_count(link) < bytes)
        return link->error ? broken(link, link->error) : SHOAL_LINK_NOTHING;
    frame.key = link->in.bytes + link->in.begin + sizeof frame.head;
    frame.value = (const unsigned char *)frame.key + frame.head.key_bytes;
    queue_drop(&link->in, bytes);
    if (link->state != SHOAL_LINK_OPEN)
        return do_handshake(link, &frame, now_ns);
    link->received += bytes;
    *frame_out = frame;
    return frame.head.kind == SHOAL_LINK_HEARTBEAT ? do_heartbeat(link, &frame) : SHOAL_LINK_FRAME;
}
