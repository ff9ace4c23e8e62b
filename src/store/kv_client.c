#include "store/kv_client.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

/* How long a server may take to answer beyond the wait it was asked for. */
#define ANSWER_MS 10000
#define CAUSE_SAID_BYTES 257 /* longest cause that a store sends */

void shoal_kv_client_init(struct shoal_kv_client *client, struct shoal_log *log)
{
    memset(client, 0, sizeof *client);
    pthread_mutex_init(&client->lock, NULL);
    client->log = log;
    client->link.fd = -1;
}

static void hang_up(struct shoal_kv_client *client)
{
    if (client->link.fd >= 0)
        close(client->link.fd);
    client->link.fd = -1;
    shoal_link_close(&client->link);
}

void shoal_kv_client_fini(struct shoal_kv_client *client)
{
    hang_up(client);
    pthread_mutex_destroy(&client->lock);
}

static uint64_t earliest(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns < b_ns ? a_ns : b_ns;
}

/* Returns 0 or an errno: ETIMEDOUT at the deadline. */
static int wait_for(int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        const uint64_t now_ns = shoal_clock_ns();
        if (now_ns >= deadline_ns)
            return ETIMEDOUT;
        const uint64_t ms = (deadline_ns - now_ns + SHOAL_NS_PER_MS - 1) / SHOAL_NS_PER_MS;
        struct pollfd polled = {.fd = fd, .events = events};
        const int ready = poll(&polled, 1, (int)(ms < 1000000 ? ms : 1000000));
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return errno;
    }
}

/* Sends and receives until something happens on the link. Returns 0 or an errno: ETIMEDOUT at the deadline, with the link as it
 * was. If the connection cannot be written to, receiving reports why, after what the server has sent before. */
static int await_event(struct shoal_link *link, uint64_t deadline_ns, enum shoal_link_event *event_out,
                       struct shoal_link_frame *frame_out)
{
    for (;;) {
        *event_out = shoal_link_next(link, shoal_clock_ns(), frame_out);
        (void)shoal_link_flush(link);
        if (*event_out == SHOAL_LINK_BROKEN)
            return link->error;
        if (*event_out != SHOAL_LINK_NOTHING)
            return 0;
        const int error = wait_for(link->fd, shoal_link_unsent(link) > 0 ? POLLIN | POLLOUT : POLLIN, deadline_ns);
        if (error)
            return error;
        if (shoal_link_receive(link) < 0)
            return link->error;
    }
}

/* ---- joining ---- */

static int open_connection(struct shoal_kv_client *client, const struct shoal_address *address, uint64_t attempt_ns)
{
    const int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    shoal_link_open(&client->link, &client->own, fd, true, 0);
    if (fd < 0)
        return errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    int error = shoal_address_connect(fd, address);
    if (error == EINPROGRESS)
        error = wait_for(fd, POLLOUT, attempt_ns);
    return error ? error : shoal_address_error(fd);
}

static enum shoal_kv_join elsewhere(struct shoal_kv_client *client, int error, char reason[SHOAL_KV_REASON_MAX])
{
    hang_up(client);
    snprintf(reason, SHOAL_KV_REASON_MAX, "%s: %s", client->server,
             error == EPROTO      ? "something that is not Shoal answers there"
             : error == ETIMEDOUT ? "no answer in time"
                                  : strerror(error));
    return SHOAL_KV_JOIN_ELSEWHERE;
}

/* A job without its own name can recognize its rank 0 only by the secret. */
static bool is_of_another_job(const struct shoal_link *link, const struct shoal_kv_identity *identity)
{
    if (link->verdict == SHOAL_LINK_NOT_OURS || link->verdict == SHOAL_LINK_PAST)
        return true;
    if (identity->is_named || !identity->has_choice || !link->client.has_secret)
        return false;
    return !link->is_other_proved;
}

static enum shoal_kv_join refused(struct shoal_kv_client *client, const struct shoal_kv_identity *identity,
                                  char reason[SHOAL_KV_REASON_MAX])
{
    const struct shoal_link *link = &client->link;
    char text[512];
    shoal_kv_refusal_print(link, &identity->agreed, text, sizeof text);
    snprintf(reason, SHOAL_KV_REASON_MAX, "%s: %s", client->server, text);
    client->refusal = link->verdict;
    client->met = link->server;
    hang_up(client);
    if (is_of_another_job(link, identity))
        return SHOAL_KV_JOIN_ELSEWHERE;
    client->failure = shoal_log_fail(client->log, shoal_link_verdict_status(client->refusal), "bootstrap",
                                     "rank %d's store at %s: %s", client->owner, client->server, text);
    return SHOAL_KV_JOIN_REFUSED;
}

/* Sends BYE to a server that has not answered the proof in time: it may still accept this rank, and must not take its leaving
 * for a loss. */
static void leave_slow_server(struct shoal_link *link)
{
    const struct shoal_link_frame bye = {.head = {.kind = SHOAL_KV_BYE}};
    if (link->state == SHOAL_LINK_EXPECT_WELCOME && shoal_link_send(link, &bye))
        (void)shoal_link_flush(link);
}

/* Until the server has proved itself, it may be the wrong one. */
static int shake_hands(struct shoal_kv_client *client, uint64_t attempt_ns, uint64_t deadline_ns)
{
    struct shoal_link *link = &client->link;
    struct shoal_link_frame frame;
    enum shoal_link_event event;
    int error = shoal_link_greet(link) ? 0 : link->error;
    do {
        if (!error)
            error = await_event(link, link->state == SHOAL_LINK_EXPECT_WELCOME ? deadline_ns : attempt_ns, &event, &frame);
        if (error == ETIMEDOUT)
            leave_slow_server(link);
    } while (!error && event == SHOAL_LINK_SHAKEN);
    SHOAL_ASSERT(error || link->state == SHOAL_LINK_OPEN || link->state == SHOAL_LINK_CLOSING);
    return error;
}

enum shoal_kv_join shoal_kv_client_join(struct shoal_kv_client *client, const struct shoal_address *address,
                                        const struct shoal_kv_identity *identity, uint64_t attempt_ns, uint64_t deadline_ns,
                                        char reason[SHOAL_KV_REASON_MAX])
{
    shoal_address_print(address, client->server);
    attempt_ns = earliest(attempt_ns, deadline_ns);
    client->refusal = SHOAL_LINK_OK;
    client->own = identity->link;
    int error = open_connection(client, address, attempt_ns);
    if (!error)
        error = shake_hands(client, attempt_ns, deadline_ns);
    explicit_bzero(client->own.secret, sizeof client->own.secret);
    if (error)
        return elsewhere(client, error, reason);
    return client->link.state == SHOAL_LINK_OPEN ? SHOAL_KV_JOIN_DONE : refused(client, identity, reason);
}

/* ---- requests ---- */

static int client_fail(struct shoal_kv_client *client, int error, const char *what, const char *key)
{
    const enum shoal_status status = error == ETIMEDOUT ? SHOAL_ERR_TIMEOUT : SHOAL_ERR_PEER_LOST;
    client->failure = shoal_log_fail(
        client->log, status, "bootstrap", "rank %d's store at %s %s (%s of \"%s\": %s)", client->owner, client->server,
        status == SHOAL_ERR_TIMEOUT ? "does not answer" : "is gone: that rank ended or left", what, key, strerror(error));
    hang_up(client);
    return -1;
}

static int client_exchange(struct shoal_kv_client *client, const struct shoal_link_frame *request, uint64_t deadline_ns,
                           struct shoal_link_frame *reply_out)
{
    enum shoal_link_event event;
    if (client->link.fd < 0)
        return ENOTCONN;
    if (!shoal_link_send(&client->link, request))
        return client->link.error;
    const int error = await_event(&client->link, deadline_ns, &event, reply_out);
    return error || reply_out->head.kind == SHOAL_KV_REPLY ? error : EPROTO;
}

/* Sends one request and receives its reply, which is valid until the next request. Returns 0, or -1 after a failure that was
 * logged. */
static int client_ask(struct shoal_kv_client *client, struct shoal_link_head head, const char *key, const void *value,
                      const char *what, struct shoal_link_frame *reply_out)
{
    const uint64_t deadline_ns = shoal_clock_ns() + (head.number + (uint64_t)ANSWER_MS) * SHOAL_NS_PER_MS;
    const struct shoal_link_frame request = {.head = head, .key = key, .value = value};
    const int error = client_exchange(client, &request, deadline_ns, reply_out);
    return error ? client_fail(client, error, what, key) : 0;
}

static bool is_key_short(struct shoal_kv_client *client, const char *key, size_t bytes)
{
    if (strlen(key) <= SHOAL_KEY_BYTES_MAX && bytes <= SHOAL_VALUE_BYTES_MAX)
        return true;
    client->failure = shoal_log_fail(client->log, SHOAL_ERR_ARGUMENT, "bootstrap",
                                     "key \"%.40s...\" with %zu bytes is too long for the store (%d and %d bytes at most)", key,
                                     bytes, SHOAL_KEY_BYTES_MAX, SHOAL_VALUE_BYTES_MAX);
    return false;
}

static int set_locked(struct shoal_kv_client *client, const char *key, const void *value, size_t bytes)
{
    struct shoal_link_frame reply;
    if (!is_key_short(client, key, bytes))
        return -1;
    const struct shoal_link_head head = {
        .kind = SHOAL_KV_SET, .key_bytes = (uint16_t)strlen(key), .value_bytes = (uint32_t)bytes};
    if (client_ask(client, head, key, value, "set", &reply))
        return -1;
    if (reply.head.verdict == SHOAL_LINK_OK)
        return 0;
    client->failure = shoal_log_fail(client->log, SHOAL_ERR_MEMORY, "bootstrap", "rank %d's store at %s has no room for \"%s\"",
                                     client->owner, client->server, key);
    return -1;
}

int shoal_kv_client_set(struct shoal_kv_client *client, const char *key, const void *value, size_t bytes)
{
    pthread_mutex_lock(&client->lock);
    const int result = set_locked(client, key, value, bytes);
    pthread_mutex_unlock(&client->lock);
    return result;
}

/* The reply names a lost rank, or two processes with one rank. */
static void fail_to_get(struct shoal_kv_client *client, const char *key, const struct shoal_link_frame *reply)
{
    char cause[CAUSE_SAID_BYTES];
    const size_t bytes = shoal_min_size(reply->head.value_bytes, sizeof cause - 1);
    memcpy(cause, reply->value, bytes);
    cause[bytes] = 0;
    shoal_link_text_clean(cause, sizeof cause);
    client->failure =
        reply->head.verdict == SHOAL_LINK_MIXED
            ? shoal_log_fail(client->log, shoal_link_verdict_status(SHOAL_LINK_MIXED), "bootstrap",
                             "%s, so ranks of two jobs meet at %s and nothing distinguishes the jobs; " SHOAL_KV_MIXED_ADVICE,
                             cause, client->server)
            : shoal_log_fail(client->log, SHOAL_ERR_PEER_LOST, "bootstrap", "%s ended while ranks were joining (at \"%s\")",
                             cause, key);
}

static long get_locked(struct shoal_kv_client *client, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    struct shoal_link_frame reply;
    if (!is_key_short(client, key, 0))
        return -2;
    const struct shoal_link_head head = {.kind = SHOAL_KV_GET, .key_bytes = (uint16_t)strlen(key), .number = timeout_ms};
    if (client_ask(client, head, key, NULL, "get", &reply))
        return -2;
    if (reply.head.verdict == SHOAL_KV_ABSENT)
        return -1;
    if (reply.head.verdict == SHOAL_LINK_OK) {
        memcpy(value, reply.value, shoal_min_size(reply.head.value_bytes, capacity));
        return (long)reply.head.value_bytes;
    }
    fail_to_get(client, key, &reply);
    return -2;
}

long shoal_kv_client_get(struct shoal_kv_client *client, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    pthread_mutex_lock(&client->lock);
    const long result = get_locked(client, key, value, capacity, timeout_ms);
    pthread_mutex_unlock(&client->lock);
    return result;
}

int shoal_kv_client_erase(struct shoal_kv_client *client, const char *key)
{
    pthread_mutex_lock(&client->lock);
    const struct shoal_link_head head = {.kind = SHOAL_KV_ERASE, .key_bytes = (uint16_t)strlen(key)};
    struct shoal_link_frame reply;
    const int result = is_key_short(client, key, 0) ? client_ask(client, head, key, NULL, "erase", &reply) : -1;
    pthread_mutex_unlock(&client->lock);
    return result;
}

void shoal_kv_client_leave(struct shoal_kv_client *client)
{
    pthread_mutex_lock(&client->lock);
    const struct shoal_link_frame bye = {.head = {.kind = SHOAL_KV_BYE}};
    struct shoal_link_frame reply;
    (void)client_exchange(client, &bye, shoal_clock_ns() + SHOAL_NS_PER_S, &reply);
    hang_up(client);
    pthread_mutex_unlock(&client->lock);
}
