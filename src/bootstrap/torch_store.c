#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/errand.h"
#include "bootstrap/auth.h"
#include "bootstrap/sources.h"

/* As much of torch's TCPStore as hands out a secret. The protocol is that of torch/csrc/distributed/c10d/TCPStoreBackend.hpp
 * (torch 1.8 to 2.13 and later, either backend): numbers as they lie in memory, texts behind their length in 64 bits. A
 * connection begins with VALIDATE and a number. COMPARE_SET of a key, what is expected and what is wanted sets the key where it
 * is not there and nothing is expected, and answers with what it then holds: so all ranks get what the first one brought. */
enum { QUERY_VALIDATE = 0, QUERY_COMPARE_SET = 2 };
#define VALIDATION_NUMBER UINT32_C(0x3C85F7CE)
#define ANSWER_MS 5000
#define KEY_BYTES 160

struct sharing {
    char host[SHOAL_ADDRESS_HOST_MAX];
    uint16_t port;
    char key[KEY_BYTES];
    unsigned char secret[SHOAL_SECRET_BYTES]; /* the offer, then what the store holds */
    int error;
};

static size_t put(unsigned char *at, const void *data, size_t bytes)
{
    memcpy(at, data, bytes);
    return bytes;
}

static size_t put_text(unsigned char *at, const void *text, uint64_t bytes)
{
    const size_t used = put(at, &bytes, sizeof bytes);
    return used + put(at + used, text, bytes);
}

static size_t build_request(const struct sharing *sharing, unsigned char *at)
{
    const uint32_t number = VALIDATION_NUMBER;
    size_t used = put(at, &(uint8_t){QUERY_VALIDATE}, 1);
    used += put(at + used, &number, sizeof number);
    used += put(at + used, &(uint8_t){QUERY_COMPARE_SET}, 1);
    used += put_text(at + used, sharing->key, strlen(sharing->key));
    used += put_text(at + used, "", 0);
    return used + put_text(at + used, sharing->secret, sizeof sharing->secret);
}

static int receive(int fd, void *data, size_t bytes)
{
    const ssize_t got = recv(fd, data, bytes, MSG_WAITALL);
    return got == (ssize_t)bytes ? 0 : got < 0 ? errno : ECONNRESET;
}

/* 0 or an errno. */
static int ask(int fd, struct sharing *sharing)
{
    unsigned char request[KEY_BYTES + SHOAL_SECRET_BYTES + 64];
    uint64_t bytes = 0;
    const size_t length = build_request(sharing, request);
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length)
        return errno;
    const int error = receive(fd, &bytes, sizeof bytes);
    if (!error && bytes != sizeof sharing->secret)
        return EPROTO;
    return error ? error : receive(fd, sharing->secret, sizeof sharing->secret);
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
    const int error = is_there ? ask(fd, sharing) : errno;
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
    if (shoal_address_list_find(sharing->host, "MASTER_ADDR", 0, &log, &list) == SHOAL_OK) {
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
    const struct shoal_auth_part part = {sharing->secret, sizeof sharing->secret};
    return shoal_auth_mac(context, &part, 1, secret);
}

void shoal_torch_secret_load(const struct shoal_torch_place *place, struct shoal_log *log, uint32_t timeout_ms,
                             struct shoal_bootstrap *bootstrap)
{
    struct sharing sharing = {.port = place->port};
    snprintf(sharing.host, sizeof sharing.host, "%s", place->host);
    snprintf(sharing.key, sizeof sharing.key, "/shoal/secret/%s", place->name);
    if (!shoal_auth_is_available() || shoal_auth_random(sharing.secret, sizeof sharing.secret) != SHOAL_OK)
        return;
    if (shoal_errand_run(share, &sharing, sizeof sharing, timeout_ms < ANSWER_MS ? timeout_ms : ANSWER_MS) != SHOAL_OK)
        sharing.error = ETIMEDOUT;
    if (sharing.error)
        shoal_log_line(log, SHOAL_LOG_INFO, "bootstrap", "no secret from torchrun's store at %s, port %u: %s", place->host,
                       place->port, strerror(sharing.error));
    else
        bootstrap->has_secret = hash_secret(&sharing, bootstrap->secret);
    explicit_bzero(&sharing, sizeof sharing);
}
