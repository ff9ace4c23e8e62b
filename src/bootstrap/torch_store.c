#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/timed_call.h"
#include "bootstrap/lookup.h"
#include "bootstrap/sources.h"
#include "link/auth.h"

/* The part of torch's TCPStore protocol that hands out a secret. The source is torch/csrc/distributed/c10d/TCPStoreBackend.hpp
 * (torch 1.8 to 2.13 and later, either backend). Numbers are sent as stored in memory, and texts follow their length in 64
 * bits. A connection begins with VALIDATE and a number. COMPARE_SET sends a key, an expected and a desired value: if the key is
 * absent and nothing is expected, it sets the key. It answers with the value that the key then has, so all ranks get the value
 * that the first one set. A rank that could not use a secret sets the word NONE. */
enum { QUERY_VALIDATE = 0, QUERY_COMPARE_SET = 2 };
#define VALIDATION_NUMBER UINT32_C(0x3C85F7CE)
#define ANSWER_MS 30000 /* thousands of ranks may ask at once */
#define KEY_BYTES 160
#define NONE "none"
#define NONE_BYTES (sizeof NONE - 1)

struct sharing {
    char host[SHOAL_ADDRESS_HOST_MAX];
    uint16_t port;
    char key[KEY_BYTES];
    unsigned char secret[SHOAL_SECRET_BYTES]; /* the offer, then the value in the store */
    size_t bytes;                             /* of the value in the store */
    int error;
};

static size_t torch_put(unsigned char *at, const void *data, size_t bytes)
{
    memcpy(at, data, bytes);
    return bytes;
}

static size_t torch_put_text(unsigned char *at, const void *text, uint64_t bytes)
{
    const size_t used = torch_put(at, &bytes, sizeof bytes);
    return used + torch_put(at + used, text, bytes);
}

static size_t build_request(const struct sharing *sharing, unsigned char *at)
{
    const uint32_t number = VALIDATION_NUMBER;
    size_t used = torch_put(at, &(uint8_t){QUERY_VALIDATE}, 1);
    used += torch_put(at + used, &number, sizeof number);
    used += torch_put(at + used, &(uint8_t){QUERY_COMPARE_SET}, 1);
    used += torch_put_text(at + used, sharing->key, strlen(sharing->key));
    used += torch_put_text(at + used, "", 0);
    return used + torch_put_text(at + used, sharing->secret, sharing->bytes);
}

static int torch_receive(int fd, void *data, size_t bytes)
{
    ssize_t got;
    do
        got = recv(fd, data, bytes, MSG_WAITALL);
    while (got < 0 && errno == EINTR); /* a signal interrupts a wait that has a limit */
    return got == (ssize_t)bytes ? 0 : got < 0 ? errno : ECONNRESET;
}

/* Returns 0 or an errno. */
static int torch_ask(int fd, struct sharing *sharing)
{
    unsigned char request[KEY_BYTES + SHOAL_SECRET_BYTES + 64];
    uint64_t bytes = 0;
    const size_t length = build_request(sharing, request);
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length)
        return errno;
    const int error = torch_receive(fd, &bytes, sizeof bytes);
    if (!error && bytes != sizeof sharing->secret && bytes != NONE_BYTES)
        return EPROTO;
    sharing->bytes = error ? 0 : (size_t)bytes;
    return error ? error : torch_receive(fd, sharing->secret, sharing->bytes);
}

static int ask_at(const struct shoal_address *address, struct sharing *sharing)
{
    const struct timeval limit = {.tv_sec = ANSWER_MS / 1000};
    const int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    const bool is_there = connect(fd, (const struct sockaddr *)&address->socket, address->bytes) == 0;
    const int error = is_there ? torch_ask(fd, sharing) : errno;
    close(fd);
    return error;
}

static void share(void *data)
{
    struct sharing *sharing = data;
    struct shoal_address_list list;
    struct shoal_log log;
    shoal_log_init_quiet(&log);
    sharing->error = EHOSTUNREACH;
    if (shoal_lookup_find(sharing->host, "MASTER_ADDR", 0, &log, &list) == SHOAL_OK) {
        for (int i = 0; i < list.count && sharing->error; i++) {
            shoal_address_port_put(&list.at[i], sharing->port);
            sharing->error = ask_at(&list.at[i], sharing);
        }
    }
    shoal_log_fini(&log);
}

static bool hash_secret(const struct sharing *sharing, unsigned char secret[SHOAL_SECRET_BYTES])
{
    static const unsigned char context[SHOAL_SECRET_BYTES] = "shoal secret of torch's store";
    const struct shoal_auth_span span = {sharing->secret, sizeof sharing->secret};
    return shoal_auth_mac(context, &span, 1, secret);
}

static enum shoal_status make_offer(struct sharing *sharing, struct shoal_log *log)
{
    sharing->bytes = shoal_auth_is_available() ? sizeof sharing->secret : NONE_BYTES;
    memcpy(sharing->secret, NONE, NONE_BYTES);
    if (!shoal_auth_is_available() || shoal_auth_random(sharing->secret, sizeof sharing->secret) == SHOAL_OK)
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "no random bytes from the kernel (%s)", strerror(errno));
}

/* Returns true for errors that all ranks see alike: nothing listens there, or the listener speaks another protocol. After any
 * other error some ranks may have a secret, with which this rank could not prove itself. */
static bool is_alike(int error)
{
    return error == ECONNREFUSED || error == ECONNRESET || error == EPROTO;
}

static enum shoal_status torch_take_answer(const struct sharing *sharing, struct shoal_log *log,
                                           struct shoal_bootstrap *bootstrap)
{
    if (sharing->error && !is_alike(sharing->error))
        return shoal_log_fail(log, SHOAL_ERR_TIMEOUT, "bootstrap",
                              "torchrun's store at %s, port %u, from which the ranks get their secret, did not answer: %s; "
                              "check whether it is overloaded or a firewall is between, or set SHOAL_SECRET alike on all ranks",
                              sharing->host, sharing->port, strerror(sharing->error));
    if (sharing->error || sharing->bytes == NONE_BYTES) {
        shoal_log_line(log, SHOAL_LOG_INFO, "bootstrap", "no secret from torchrun's store at %s, port %u: %s", sharing->host,
                       sharing->port, sharing->error ? strerror(sharing->error) : "a rank has no libsodium");
        return SHOAL_OK;
    }
    bootstrap->has_secret = hash_secret(sharing, bootstrap->secret);
    if (bootstrap->has_secret)
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap",
                          "another rank has put a secret into torchrun's store, but libsodium, which proves it, is not "
                          "installed here; install libsodium23 on this host");
}

enum shoal_status shoal_torch_secret_load(const struct shoal_torch_point *point, struct shoal_log *log, uint32_t timeout_ms,
                                          struct shoal_bootstrap *bootstrap)
{
    struct sharing sharing = {.port = point->port};
    snprintf(sharing.host, sizeof sharing.host, "%s", point->host);
    snprintf(sharing.key, sizeof sharing.key, "/shoal/secret/%s", point->name);
    SHOAL_TRY(make_offer(&sharing, log));
    if (shoal_timed_call(share, &sharing, sizeof sharing, timeout_ms < ANSWER_MS ? timeout_ms : ANSWER_MS) != SHOAL_OK)
        sharing.error = ETIMEDOUT;
    const enum shoal_status status = torch_take_answer(&sharing, log, bootstrap);
    explicit_bzero(&sharing, sizeof sharing);
    return status;
}
