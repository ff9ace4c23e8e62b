#include "store/kv_client.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

/* How long a server may take to answer beyond the wait it was asked for. */
#define ANSWER_MS 10000
#define CAUSE_SAID_BYTES 257 /* longest cause that a store sends */

void shoal_kv_client_init(struct shoal_kv_client *client, struct shoal_log *log)
{
    memset(client, 0, sizeof *client);
    pthread_mutex_init(&client->lock, NULL);
    client->log = log;
    client->fd = -1;
}

static void hang_up(struct shoal_kv_client *client)
{
    if (client->fd >= 0)
        close(client->fd);
    client->fd = -1;
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

static int send_all(int fd, const void *data, size_t bytes, int flags, uint64_t deadline_ns)
{
    const char *at = data;
    while (bytes > 0) {
        const ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL | flags);
        if (sent >= 0) {
            at += sent;
            bytes -= (size_t)sent;
            continue;
        }
        const int error = errno == EAGAIN ? wait_for(fd, POLLOUT, deadline_ns) : errno == EINTR ? 0 : errno;
        if (error)
            return error;
    }
    return 0;
}

static int receive_all(int fd, void *data, size_t bytes, uint64_t deadline_ns)
{
    char *at = data;
    while (bytes > 0) {
        const ssize_t got = recv(fd, at, bytes, 0);
        if (got > 0) {
            at += got;
            bytes -= (size_t)got;
            continue;
        }
        const int error = got == 0          ? ECONNRESET
                          : errno == EAGAIN ? wait_for(fd, POLLIN, deadline_ns)
                          : errno == EINTR  ? 0
                                            : errno;
        if (error)
            return error;
    }
    return 0;
}

static int client_send_frame(int fd, struct shoal_kv_head head, const char *key, const void *value, uint64_t deadline_ns)
{
    head.magic = SHOAL_KV_MAGIC;
    int error = send_all(fd, &head, sizeof head, head.key_bytes + head.value_bytes > 0 ? MSG_MORE : 0, deadline_ns);
    if (!error)
        error = send_all(fd, key, head.key_bytes, head.value_bytes > 0 ? MSG_MORE : 0, deadline_ns);
    return error ? error : send_all(fd, value, head.value_bytes, 0, deadline_ns);
}

/* Discards bytes that do not fit. */
static int skip_bytes(int fd, size_t bytes, uint64_t deadline_ns)
{
    char piece[1024];
    int error = 0;
    for (; bytes > 0 && !error; bytes -= shoal_min_size(bytes, sizeof piece))
        error = receive_all(fd, piece, shoal_min_size(bytes, sizeof piece), deadline_ns);
    return error;
}

/* Returns EPROTO if the bytes received are not a frame of this kind. */
static int receive_frame(int fd, enum shoal_kv_kind kind, struct shoal_kv_head *head, void *value, size_t capacity,
                         uint64_t deadline_ns)
{
    const int error = receive_all(fd, head, sizeof *head, deadline_ns);
    if (error)
        return error;
    if (head->magic != SHOAL_KV_MAGIC || head->kind != kind || head->verdict >= SHOAL_KV_VERDICT_END || head->key_bytes != 0 ||
        head->value_bytes > SHOAL_VALUE_BYTES_MAX)
        return EPROTO;
    const size_t kept = shoal_min_size(head->value_bytes, capacity);
    const int value_error = receive_all(fd, value, kept, deadline_ns);
    return value_error ? value_error : skip_bytes(fd, head->value_bytes - kept, deadline_ns);
}

/* ---- joining ---- */

static int open_connection(struct shoal_kv_client *client, const struct shoal_address *address, uint64_t attempt_ns)
{
    client->fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (client->fd < 0)
        return errno;
    setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (connect(client->fd, (const struct sockaddr *)&address->socket, address->bytes) == 0)
        return 0;
    if (errno != EINPROGRESS && errno != EINTR)
        return errno;
    int error = wait_for(client->fd, POLLOUT, attempt_ns);
    if (!error)
        getsockopt(client->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
    return error;
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
static bool is_of_another_job(enum shoal_kv_verdict verdict, const struct shoal_kv_identity *identity,
                              const struct shoal_kv_side *mine, const struct shoal_kv_challenge *challenge)
{
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES];
    if (verdict == SHOAL_KV_NOT_OURS || verdict == SHOAL_KV_PAST)
        return true;
    if (identity->is_named || !identity->has_choice || !mine->hello.has_secret)
        return false;
    return !challenge->server.has_secret ||
           !shoal_kv_proof_build(identity->secret, true, &mine->hello, &challenge->server, wanted) ||
           !shoal_auth_equal(wanted, challenge->proof, sizeof wanted);
}

static enum shoal_kv_join refused(struct shoal_kv_client *client, const struct shoal_kv_identity *identity,
                                  enum shoal_kv_verdict verdict, const struct shoal_kv_side *mine,
                                  const struct shoal_kv_challenge *challenge, char reason[SHOAL_KV_REASON_MAX])
{
    const struct shoal_kv_side server = {challenge->server, challenge->agreed};
    char text[512];
    shoal_kv_refusal_print(verdict, &identity->agreed, mine, &server, text, sizeof text);
    hang_up(client);
    snprintf(reason, SHOAL_KV_REASON_MAX, "%s: %s", client->server, text);
    client->refusal = verdict;
    client->met = challenge->server;
    if (is_of_another_job(verdict, identity, mine, challenge))
        return SHOAL_KV_JOIN_ELSEWHERE;
    client->failure = shoal_log_fail(client->log, shoal_kv_verdict_status(verdict), "bootstrap", "rank %d's store at %s: %s",
                                     client->owner, client->server, text);
    return SHOAL_KV_JOIN_REFUSED;
}

/* The server proves itself first. Only then does this rank show the server that it knows the secret. */
static enum shoal_kv_join prove(struct shoal_kv_client *client, const struct shoal_kv_identity *identity,
                                const struct shoal_kv_side *mine, const struct shoal_kv_challenge *challenge,
                                uint64_t deadline_ns, char reason[SHOAL_KV_REASON_MAX])
{
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES], proof[SHOAL_AUTH_MAC_BYTES];
    const bool is_made = shoal_kv_proof_build(identity->secret, true, &mine->hello, &challenge->server, wanted) &&
                         shoal_kv_proof_build(identity->secret, false, &mine->hello, &challenge->server, proof);
    const bool is_known = is_made && (!mine->hello.has_secret || shoal_auth_equal(wanted, challenge->proof, sizeof wanted));
    struct shoal_kv_head head = {.kind = SHOAL_KV_PROOF, .verdict = is_known ? SHOAL_KV_OK : SHOAL_KV_SECRET_WRONG};
    head.value_bytes = is_known ? sizeof proof : 0;
    int error = client_send_frame(client->fd, head, NULL, proof, deadline_ns);
    if (!is_known)
        return refused(client, identity, SHOAL_KV_SECRET_WRONG, mine, challenge, reason);
    if (!error)
        error = receive_frame(client->fd, SHOAL_KV_WELCOME, &head, NULL, 0, deadline_ns);
    if (error == ETIMEDOUT) /* a slow server may still accept this rank, and must not take its leaving for a loss */
        (void)client_send_frame(client->fd, (struct shoal_kv_head){.kind = SHOAL_KV_BYE}, NULL, NULL, deadline_ns);
    if (error)
        return elsewhere(client, error, reason);
    if (head.verdict != SHOAL_KV_OK)
        return refused(client, identity, (enum shoal_kv_verdict)head.verdict, mine, challenge, reason);
    return SHOAL_KV_JOIN_DONE;
}

enum shoal_kv_join shoal_kv_client_join(struct shoal_kv_client *client, const struct shoal_address *address,
                                        const struct shoal_kv_identity *identity, uint64_t attempt_ns, uint64_t deadline_ns,
                                        char reason[SHOAL_KV_REASON_MAX])
{
    shoal_address_print(address, client->server);
    attempt_ns = earliest(attempt_ns, deadline_ns);
    client->refusal = SHOAL_KV_OK;
    struct shoal_kv_side mine = identity->side;
    if (shoal_auth_random(mine.hello.nonce, sizeof mine.hello.nonce) != SHOAL_OK)
        return elsewhere(client, ENOSYS, reason);
    struct shoal_kv_challenge challenge = {.agreed = {{0}}};
    struct shoal_kv_head head = {.kind = SHOAL_KV_HELLO, .value_bytes = sizeof mine};
    int error = open_connection(client, address, attempt_ns);
    if (!error)
        error = client_send_frame(client->fd, head, NULL, &mine, attempt_ns);
    if (!error)
        error = receive_frame(client->fd, SHOAL_KV_CHALLENGE, &head, &challenge, sizeof challenge, attempt_ns);
    if (!error && head.value_bytes < offsetof(struct shoal_kv_challenge, agreed)) /* another version may end there */
        error = EPROTO;
    if (error)
        return elsewhere(client, error, reason);
    /* Judge the hello here as well, because a server of another build may check less. */
    enum shoal_kv_verdict verdict = (enum shoal_kv_verdict)head.verdict;
    if (verdict == SHOAL_KV_OK)
        verdict = shoal_kv_hello_judge(&mine.hello, &challenge.server);
    if (verdict != SHOAL_KV_OK)
        return refused(client, identity, verdict, &mine, &challenge, reason);
    return prove(client, identity, &mine, &challenge, deadline_ns, reason);
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

/* Sends one request and receives its reply. Returns 0, or -1 after a failure that was logged. */
static int client_ask(struct shoal_kv_client *client, struct shoal_kv_head *head, const char *key, const void *value,
                      void *answer, size_t capacity, const char *what)
{
    const uint64_t deadline_ns = shoal_clock_ns() + (head->number + (uint64_t)ANSWER_MS) * SHOAL_NS_PER_MS;
    if (client->fd < 0)
        return client_fail(client, ENOTCONN, what, key);
    int error = client_send_frame(client->fd, *head, key, value, deadline_ns);
    if (!error)
        error = receive_frame(client->fd, SHOAL_KV_REPLY, head, answer, capacity, deadline_ns);
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
    if (!is_key_short(client, key, bytes))
        return -1;
    struct shoal_kv_head head = {.kind = SHOAL_KV_SET, .key_bytes = (uint16_t)strlen(key), .value_bytes = (uint32_t)bytes};
    if (client_ask(client, &head, key, value, NULL, 0, "set"))
        return -1;
    if (head.verdict == SHOAL_KV_OK)
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

/* A reply that names a lost rank may be longer than the value asked for, so it first goes into its own buffer. */
static long get_locked(struct shoal_kv_client *client, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    if (!is_key_short(client, key, 0))
        return -2;
    struct shoal_kv_head head = {.kind = SHOAL_KV_GET, .key_bytes = (uint16_t)strlen(key), .number = timeout_ms};
    unsigned char answer[SHOAL_VALUE_BYTES_MAX];
    if (client_ask(client, &head, key, NULL, answer, sizeof answer, "get"))
        return -2;
    if (head.verdict == SHOAL_KV_ABSENT)
        return -1;
    if (head.verdict == SHOAL_KV_OK) {
        memcpy(value, answer, shoal_min_size(head.value_bytes, capacity));
        return (long)head.value_bytes;
    }
    char *cause = (char *)answer;
    cause[shoal_min_size(head.value_bytes, CAUSE_SAID_BYTES - 1)] = 0;
    shoal_kv_text_clean(cause, CAUSE_SAID_BYTES);
    client->failure =
        head.verdict == SHOAL_KV_MIXED
            ? shoal_log_fail(client->log, shoal_kv_verdict_status(SHOAL_KV_MIXED), "bootstrap",
                             "%s, so ranks of two jobs meet at %s and nothing distinguishes the jobs; " SHOAL_KV_MIXED_ADVICE,
                             cause, client->server)
            : shoal_log_fail(client->log, SHOAL_ERR_PEER_LOST, "bootstrap", "%s ended while ranks were joining (at \"%s\")",
                             cause, key);
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
    struct shoal_kv_head head = {.kind = SHOAL_KV_ERASE, .key_bytes = (uint16_t)strlen(key)};
    const int result = is_key_short(client, key, 0) ? client_ask(client, &head, key, NULL, NULL, 0, "erase") : -1;
    pthread_mutex_unlock(&client->lock);
    return result;
}

void shoal_kv_client_leave(struct shoal_kv_client *client)
{
    pthread_mutex_lock(&client->lock);
    const uint64_t deadline_ns = shoal_clock_ns() + SHOAL_NS_PER_S;
    struct shoal_kv_head head = {.kind = SHOAL_KV_BYE};
    if (client->fd >= 0 && client_send_frame(client->fd, head, NULL, NULL, deadline_ns) == 0)
        (void)receive_frame(client->fd, SHOAL_KV_REPLY, &head, NULL, 0, deadline_ns);
    hang_up(client);
    pthread_mutex_unlock(&client->lock);
}
