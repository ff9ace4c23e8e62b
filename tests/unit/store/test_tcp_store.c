/* Shoal's own store: one server, clients of all kinds, good and bad. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "emulated.h"
#include "store/kv_tree.h"

#define SIZE 4
#define CROWD 700
#define LINES_BYTES 65536
#define WAIT_MS 20000 /* the limit for operations that take moments */

/* Every line logged, by the server and by all clients. */
struct lines {
    char text[LINES_BYTES];
};

static void keep_line(void *arg, int level, const char *line)
{
    struct lines *lines = arg;
    const size_t used = strlen(lines->text);
    (void)level;
    snprintf(lines->text + used, sizeof lines->text - used, "%s\n", line);
}

struct fixture {
    struct shoal_log server_log, client_log;
    struct lines server_lines, client_lines;
    struct shoal_address address;
    struct shoal_kv_identity identity;
    struct shoal_kv_server *server;
    struct shoal_kv_client clients[SIZE];
};

static void start(struct fixture *f)
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in *in = (struct sockaddr_in *)(void *)&f->address.socket;
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    f->address.bytes = sizeof *in;
    assert_int_equal(bind(fd, (struct sockaddr *)in, sizeof *in), 0);
    assert_int_equal(listen(fd, 512), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)in, &f->address.bytes), 0);
    assert_int_equal(shoal_kv_server_start(fd, &f->identity, &f->server_log, &f->server), SHOAL_OK);
}

static int set_up_identity(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct shoal_settings settings;
    char error[256];
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&f->server_log, &settings.log, keep_line, &f->server_lines);
    shoal_log_init(&f->client_log, &settings.log, keep_line, &f->client_lines);
    shoal_kv_identity_agree(&f->identity, &settings.bootstrap.agreed);
    f->identity.link.hello.size = SIZE;
    f->identity.link.hello.job = 77;
    f->identity.link.hello.process = (uint32_t)getpid();
    strcpy(f->identity.link.hello.version, "1.2.3");
    strcpy(f->identity.link.hello.host, "here");
    for (int i = 0; i < SIZE; i++)
        shoal_kv_client_init(&f->clients[i], &f->client_log);
    *state = f;
    return 0;
}

static int set_up(void **state)
{
    set_up_identity(state);
    start(*state);
    return 0;
}

static int set_up_secret(void **state)
{
    set_up_identity(state);
    struct fixture *f = *state;
    f->identity.link.hello.has_secret = 1;
    memset(f->identity.link.secret, 5, sizeof f->identity.link.secret);
    start(f);
    return 0;
}

/* Large enough that ranks serve others. */
static int set_up_many(void **state)
{
    set_up_identity(state);
    struct fixture *f = *state;
    f->identity.link.hello.size = 70;
    start(f);
    return 0;
}

static int set_up_crowd(void **state)
{
    set_up_identity(state);
    struct fixture *f = *state;
    f->identity.link.hello.size = CROWD;
    start(f);
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    for (int i = 0; i < SIZE; i++)
        shoal_kv_client_leave(&f->clients[i]);
    const uint64_t before_ns = shoal_clock_ns();
    shoal_kv_server_stop(f->server);
    const bool is_prompt = shoal_clock_ns() - before_ns < SHOAL_KV_FAREWELL_MS_MAX * SHOAL_NS_PER_MS / 2;
    for (int i = 0; i < SIZE; i++)
        shoal_kv_client_fini(&f->clients[i]);
    shoal_log_fini(&f->server_log);
    shoal_log_fini(&f->client_log);
    free(f);
    return is_prompt ? 0 : -1;
}

static enum shoal_kv_join join_as(struct fixture *f, int slot, struct shoal_kv_identity identity, char *reason)
{
    char unused[SHOAL_KV_REASON_MAX];
    const uint64_t deadline_ns = shoal_clock_ns() + WAIT_MS * SHOAL_NS_PER_MS;
    return shoal_kv_client_join(&f->clients[slot], &f->address, &identity, deadline_ns, deadline_ns, reason ? reason : unused);
}

static enum shoal_kv_join join_rank(struct fixture *f, int rank)
{
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.rank = (uint32_t)rank;
    return join_as(f, rank, identity, NULL);
}

static int connect_raw(const struct fixture *f)
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(connect(fd, (const struct sockaddr *)&f->address.socket, f->address.bytes), 0);
    return fd;
}

/* Returns true if the server has ended the connection, even if it sent data before. */
static bool is_ended(int fd)
{
    char bytes[512];
    ssize_t got;
    while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0 || (got < 0 && errno == EINTR)) /* EINTR: after a stop */
        continue;
    return got == 0 || errno == ECONNRESET;
}

static void expect_alive(struct fixture *f, int rank)
{
    char value[8] = "";
    assert_int_equal(shoal_kv_client_set(&f->clients[rank], "alive", "yes", 4), 0);
    assert_int_equal(shoal_kv_client_get(&f->clients[rank], "alive", value, sizeof value, 0), 4);
    assert_string_equal(value, "yes");
}

static void tcp_store_keeps_any_bytes_up_to_64_kib(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
    static unsigned char in[SHOAL_VALUE_BYTES_MAX], out[SHOAL_VALUE_BYTES_MAX];
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (unsigned char)(i * 7 >> 3);
    const size_t sizes[] = {0, 1, 4, 4096, sizeof in};
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++) {
        memset(out, 1, sizeof out);
        assert_int_equal(shoal_kv_client_set(&f->clients[0], "k", in, sizes[i]), 0);
        assert_int_equal(shoal_kv_client_get(&f->clients[1], "k", out, sizeof out, 1000), sizes[i]);
        assert_memory_equal(in, out, sizes[i]);
    }
    unsigned char few[4] = {9, 9, 9, 9};
    assert_int_equal(shoal_kv_client_get(&f->clients[1], "k", few, 2, 1000), sizeof in);
    assert_memory_equal(few, ((unsigned char[]){in[0], in[1], 9, 9}), 4);
}

static void tcp_store_refuses_what_is_too_long(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    static char big[SHOAL_VALUE_BYTES_MAX + 1];
    assert_int_not_equal(shoal_kv_client_set(&f->clients[0], "k", big, sizeof big), 0);
    assert_int_equal(f->clients[0].failure, SHOAL_ERR_ARGUMENT);
    memset(big, 'k', 256);
    big[256] = 0;
    assert_int_not_equal(shoal_kv_client_set(&f->clients[0], big, "", 0), 0);
    big[255] = 0;
    assert_int_equal(shoal_kv_client_set(&f->clients[0], big, "", 0), 0);
    expect_alive(f, 0);
}

struct waiter {
    struct shoal_kv_client *client;
    long got;
    uint64_t took_ns;
    char value[16];
};

static void *wait_for_key(void *arg)
{
    struct waiter *waiter = arg;
    const uint64_t before_ns = shoal_clock_ns();
    waiter->got = shoal_kv_client_get(waiter->client, "late", waiter->value, sizeof waiter->value, WAIT_MS);
    waiter->took_ns = shoal_clock_ns() - before_ns;
    return NULL;
}

static void tcp_store_get_waits_for_the_key(void **state)
{
    struct fixture *f = *state;
    struct waiter waiters[2] = {{.client = &f->clients[1]}, {.client = &f->clients[2]}};
    pthread_t threads[2];
    for (int i = 0; i < 3; i++)
        assert_int_equal(join_rank(f, i), SHOAL_KV_JOIN_DONE);
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, wait_for_key, &waiters[i]);
    usleep(50000);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "late", "here", 5), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(waiters[i].got, 5);
        assert_string_equal(waiters[i].value, "here");
        assert_true(waiters[i].took_ns < WAIT_MS * SHOAL_NS_PER_MS);
    }
}

static void tcp_store_get_ends_at_its_deadline(void **state)
{
    struct fixture *f = *state;
    char value[4];
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    const uint64_t before_ns = shoal_clock_ns();
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "none", value, sizeof value, 100), -1);
    const uint64_t took_ms = (shoal_clock_ns() - before_ns) / SHOAL_NS_PER_MS;
    assert_in_range(took_ms, 99, WAIT_MS);
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "none", value, sizeof value, 0), -1);
    expect_alive(f, 0);
}

static void tcp_store_erase_takes_a_key_away(void **state)
{
    struct fixture *f = *state;
    char value[4];
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "k", "abc", 3), 0);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "k", "de", 2), 0);
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "k", value, sizeof value, 0), 2);
    assert_int_equal(shoal_kv_client_erase(&f->clients[0], "k"), 0);
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "k", value, sizeof value, 0), -1);
    assert_int_equal(shoal_kv_client_erase(&f->clients[0], "k"), 0);
}

static void tcp_store_survives_garbage(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    const char web[] = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
    unsigned seed = 1;
    for (int i = 0; i < 20; i++) {
        unsigned char bytes[300];
        for (size_t b = 0; b < sizeof bytes; b++)
            bytes[b] = (unsigned char)(rand_r(&seed) >> 4);
        const int fd = connect_raw(f);
        assert_true(send(fd, i == 0 ? web : (const char *)bytes, i == 0 ? sizeof web : sizeof bytes, MSG_NOSIGNAL) > 0);
        assert_true(is_ended(fd));
        close(fd);
    }
    expect_alive(f, 0);
}

static void send_head(int fd, unsigned kind, size_t key_bytes, size_t value_bytes)
{
    const struct shoal_link_head head = {.magic = SHOAL_LINK_MAGIC,
                                         .kind = (uint8_t)kind,
                                         .key_bytes = (uint16_t)key_bytes,
                                         .value_bytes = (uint32_t)value_bytes};
    assert_int_equal(send(fd, &head, sizeof head, MSG_NOSIGNAL), sizeof head);
}

static void tcp_store_ends_frames_out_of_turn_or_size(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    const struct {
        unsigned kind;
        size_t key_bytes, value_bytes;
    } heads[] = {{SHOAL_KV_SET, 0, 0},     {SHOAL_KV_BYE, 0, 0},       {SHOAL_LINK_HELLO, 0, SHOAL_LINK_STRANGER_BYTES_MAX + 1},
                 {SHOAL_LINK_HELLO, 0, 0}, {SHOAL_KV_SET, 256, 0},     {SHOAL_KV_SET, 3, UINT32_MAX},
                 {SHOAL_LINK_PROOF, 0, 0}, {SHOAL_LINK_WELCOME, 0, 0}, {SHOAL_KV_KIND_END, 0, 0}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(heads); i++) {
        const int fd = connect_raw(f);
        send_head(fd, heads[i].kind, heads[i].key_bytes, heads[i].value_bytes);
        assert_true(is_ended(fd));
        close(fd);
    }
    send_head(f->clients[0].link.fd, SHOAL_KV_SET, 3, SHOAL_VALUE_BYTES_MAX + 1); /* a member may not either */
    char byte;
    usleep(50000);
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "k", &byte, 1, 0), -2);
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
    expect_alive(f, 1);
}

static void tcp_store_is_not_held_up_by_silent_connections(void **state)
{
    struct fixture *f = *state;
    int fds[SHOAL_KV_STRANGERS_MAX * 2];
    const uint64_t before_ns = shoal_clock_ns();
    for (size_t i = 0; i < SHOAL_COUNT_OF(fds); i++) {
        fds[i] = connect_raw(f);
        if (i % 3 == 0)
            send_head(fds[i], SHOAL_LINK_HELLO, 0, sizeof(struct shoal_link_hello)); /* and nothing more */
    }
    for (int i = 0; i < SIZE; i++)
        assert_int_equal(join_rank(f, i), SHOAL_KV_JOIN_DONE);
    expect_alive(f, 3);
    assert_true(is_ended(fds[0])); /* the oldest had to make room, all before its timeout */
    assert_true(shoal_clock_ns() - before_ns < (SHOAL_LINK_HANDSHAKE_MS - 1) * SHOAL_NS_PER_MS);
    for (size_t i = 0; i < SHOAL_COUNT_OF(fds); i++)
        close(fds[i]);
    expect_alive(f, 0);
}

struct challenge {
    struct shoal_link_head head;
    struct shoal_link_challenge value;
    struct shoal_agreed agreed;
};

static int send_hello(const struct fixture *f, const struct shoal_link_hello *hello)
{
    const int fd = connect_raw(f);
    send_head(fd, SHOAL_LINK_HELLO, 0, sizeof *hello);
    assert_int_equal(send(fd, hello, sizeof *hello, MSG_NOSIGNAL), sizeof *hello);
    return fd;
}

static void hear_challenge(int fd, struct challenge *challenge)
{
    assert_int_equal(recv(fd, challenge, sizeof *challenge, MSG_WAITALL), sizeof *challenge);
    assert_int_equal(challenge->head.verdict, SHOAL_LINK_OK);
}

static int say_hello(const struct fixture *f, const struct shoal_link_hello *hello, struct challenge *challenge)
{
    const int fd = send_hello(f, hello);
    hear_challenge(fd, challenge);
    return fd;
}

static void send_proof(int fd, const unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    send_head(fd, SHOAL_LINK_PROOF, 0, SHOAL_AUTH_MAC_BYTES);
    assert_int_equal(send(fd, proof, SHOAL_AUTH_MAC_BYTES, MSG_NOSIGNAL), SHOAL_AUTH_MAC_BYTES);
}

static uint8_t hear_welcome(int fd)
{
    struct shoal_link_head head;
    assert_int_equal(recv(fd, &head, sizeof head, MSG_WAITALL), sizeof head);
    return head.verdict;
}

static uint8_t prove(int fd, const unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    send_proof(fd, proof);
    return hear_welcome(fd);
}

/* All have sent hello before the first one proves itself. A silent connection makes room first. */
static void tcp_store_takes_all_ranks_at_once(void **state)
{
    struct fixture *f = *state;
    static int fds[CROWD], silent[SHOAL_KV_STRANGERS_MAX * 2];
    const unsigned char none[SHOAL_AUTH_MAC_BYTES] = {0};
    struct rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    const struct rlimit enough = {before.rlim_max, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &enough);
    for (int i = 0; i < CROWD; i++) {
        struct shoal_link_hello hello = f->identity.link.hello;
        hello.rank = (uint32_t)i;
        fds[i] = send_hello(f, &hello);
    }
    struct challenge challenge;
    for (int i = 0; i < CROWD; i++)
        hear_challenge(fds[i], &challenge);
    for (size_t i = 0; i < SHOAL_COUNT_OF(silent); i++)
        silent[i] = connect_raw(f);
    for (int i = 0; i < CROWD; i++)
        send_proof(fds[i], none);
    for (int i = 0; i < CROWD; i++)
        assert_int_equal(hear_welcome(fds[i]), SHOAL_LINK_OK);
    for (size_t i = 0; i < SHOAL_COUNT_OF(silent); i++)
        close(silent[i]);
    for (int i = 0; i < CROWD; i++)
        close(fds[i]);
    setrlimit(RLIMIT_NOFILE, &before);
}

static void tcp_store_ends_a_handshake_that_takes_too_long(void **state)
{
    struct fixture *f = *state;
    const uint64_t before_ns = shoal_clock_ns();
    const int fd = connect_raw(f);
    assert_true(is_ended(fd)); /* within the seconds that connect_raw() sets, instead of never */
    assert_true((shoal_clock_ns() - before_ns) / SHOAL_NS_PER_MS >= SHOAL_LINK_HANDSHAKE_MS);
    close(fd);
}

static void expect_said(struct shoal_log *log, const struct lines *lines, const char *text)
{
    pthread_mutex_lock(&log->lock); /* the server's thread may be writing */
    const bool is_said = strstr(lines->text, text) != NULL;
    pthread_mutex_unlock(&log->lock);
    if (!is_said)
        fail_msg("\"%s\" was not said, but:\n%s", text, lines->text);
}

static bool has_said(struct fixture *f, const char *text)
{
    pthread_mutex_lock(&f->server_log.lock);
    const bool has = strstr(f->server_lines.text, text) != NULL;
    pthread_mutex_unlock(&f->server_log.lock);
    return has;
}

static void expect_both_say(struct fixture *f, const char *text)
{
    for (int ms = 0; ms < WAIT_MS && !has_said(f, text); ms++)
        usleep(1000);
    expect_said(&f->client_log, &f->client_lines, text);
    expect_said(&f->server_log, &f->server_lines, text);
}

static void tcp_store_refuses_another_version(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.rank = 2;
    strcpy(identity.link.hello.version, "1.2.4");
    assert_int_equal(join_as(f, 2, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    assert_int_equal(f->clients[2].failure, SHOAL_ERR_AUTH);
    expect_both_say(f, "rank 2 (here:");
    expect_both_say(f, "1.2.3");
    expect_both_say(f, "1.2.4");
    strcpy(identity.link.hello.version, "1.2.3");
    identity.link.hello.protocol = 9;
    assert_int_equal(join_as(f, 2, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    expect_both_say(f, "protocol 9");
}

static void have_other(struct shoal_kv_identity *identity, const char *setting, uint64_t value)
{
    for (size_t i = 0; i < identity->agreed.count; i++) {
        if (strcmp(identity->agreed.settings[i]->name, setting) == 0)
            memcpy(identity->link.greeting.bytes + i * sizeof value, &value, sizeof value);
    }
}

static void tcp_store_refuses_other_settings(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.settings = 0x99;
    have_other(&identity, "SHOAL_DEPTH", 7);
    have_other(&identity, "SHOAL_ALGORITHMS", 1);
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    assert_int_equal(f->clients[0].failure, SHOAL_ERR_AUTH);
    expect_both_say(f, "SHOAL_DEPTH is 7 there, 4 on rank 0; the tuning overrides of SHOAL_ALGORITHMS differ");
}

static void tcp_store_refuses_wrong_ranks_and_sizes(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.size = 3;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    assert_int_equal(f->clients[0].failure, SHOAL_ERR_ARGUMENT);
    expect_both_say(f, "it counts 3 ranks, and rank 0 counts 4");
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
    identity.link.hello.size = SIZE;
    identity.link.hello.rank = 1;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    expect_both_say(f, "two processes claim to be this rank");
    identity.link.hello.rank = SIZE;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    expect_both_say(f, "only ranks 0 to 3");
    expect_alive(f, 1);
}

/* A server that accepts hello and proof and then stops. The last message it received is the client's. */
struct standing {
    int listener;
    struct shoal_link_hello hello;
    struct shoal_link_head last;
};

static void *stand_still(void *arg)
{
    struct standing *standing = arg;
    struct challenge challenge = {
        {.magic = SHOAL_LINK_MAGIC, .kind = SHOAL_LINK_CHALLENGE}, {.server = standing->hello}, {{0}}};
    char value[SHOAL_LINK_STRANGER_BYTES_MAX];
    struct shoal_link_head head;
    const int fd = accept(standing->listener, NULL, NULL);
    challenge.head.value_bytes = sizeof challenge.value + sizeof challenge.agreed;
    while (recv(fd, &head, sizeof head, MSG_WAITALL) == sizeof head) {
        standing->last = head;
        if (head.value_bytes > 0 && recv(fd, value, head.value_bytes, MSG_WAITALL) <= 0)
            break;
        if (head.kind == SHOAL_LINK_HELLO && send(fd, &challenge, sizeof challenge, MSG_NOSIGNAL) < 0)
            break;
    }
    close(fd);
    return NULL;
}

static void tcp_store_client_that_gives_up_says_bye(void **state)
{
    struct fixture *f = *state;
    struct standing standing = {.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), .hello = f->identity.link.hello};
    struct shoal_address at = f->address;
    char reason[SHOAL_KV_REASON_MAX];
    pthread_t thread;
    shoal_address_port_put(&at, 0);
    assert_int_equal(bind(standing.listener, (const struct sockaddr *)&at.socket, at.bytes), 0);
    assert_int_equal(listen(standing.listener, 1), 0);
    assert_int_equal(getsockname(standing.listener, (struct sockaddr *)&at.socket, &at.bytes), 0);
    pthread_create(&thread, NULL, stand_still, &standing);
    const uint64_t deadline_ns = shoal_clock_ns() + 2 * SHOAL_NS_PER_S;
    assert_int_equal(shoal_kv_client_join(&f->clients[0], &at, &f->identity, deadline_ns, deadline_ns, reason),
                     SHOAL_KV_JOIN_ELSEWHERE);
    pthread_join(thread, NULL);
    close(standing.listener);
    assert_int_equal(standing.last.kind, SHOAL_KV_BYE);
}

static void tcp_store_of_another_job_is_passed_by(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_identity identity = f->identity;
    char reason[SHOAL_KV_REASON_MAX];
    identity.link.hello.job = 78;
    assert_int_equal(join_as(f, 0, identity, reason), SHOAL_KV_JOIN_ELSEWHERE);
    assert_non_null(strstr(reason, "another Shoal job"));
    assert_string_equal(f->client_lines.text, "");
}

static void tcp_store_wants_the_secret(void **state)
{
    struct fixture *f = *state;
    if (!shoal_auth_is_available()) {
        print_message("libsodium is not installed\n");
        skip();
    }
    struct shoal_kv_identity identity = f->identity;
    identity.link.secret[7] ^= 1;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    assert_int_equal(f->clients[0].failure, SHOAL_ERR_AUTH);
    expect_both_say(f, "its secret is not rank 0's");
    identity.link.hello.has_secret = 0;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    assert_int_equal(f->clients[0].failure, SHOAL_ERR_AUTH);
    expect_both_say(f, "rank 0 has a secret and it has none");
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    expect_alive(f, 0);
}

static void tcp_store_without_secret_refuses_one(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.has_secret = 1;
    assert_int_equal(join_as(f, 0, identity, NULL), SHOAL_KV_JOIN_REFUSED);
    expect_both_say(f, "it has a secret and rank 0 has none");
}

static void tcp_store_refuses_a_recorded_proof(void **state)
{
    struct fixture *f = *state;
    if (!shoal_auth_is_available()) {
        print_message("libsodium is not installed\n");
        skip();
    }
    struct challenge first, second;
    unsigned char proof[SHOAL_AUTH_MAC_BYTES];
    const int a = say_hello(f, &f->identity.link.hello, &first);
    const int b = say_hello(f, &f->identity.link.hello, &second);
    assert_memory_not_equal(first.value.server.nonce, second.value.server.nonce, sizeof first.value.server.nonce);
    const struct shoal_link_greeting none = {.count = 0};
    const struct shoal_link_meeting meeting = {&f->identity.link.hello, &first.value.server, &none, &f->identity.link.greeting};
    assert_true(shoal_link_proof_build(f->identity.link.secret, false, &meeting, proof));
    assert_int_equal(prove(b, proof), SHOAL_LINK_SECRET_WRONG);
    const int c = say_hello(f, &f->identity.link.hello, &second);
    assert_int_equal(prove(c, second.value.proof), SHOAL_LINK_SECRET_WRONG); /* the server's own proof, reflected */
    assert_int_equal(prove(a, proof), SHOAL_LINK_OK);
    close(a);
    close(b);
    close(c);
}

static void tcp_store_tells_who_waits_that_a_rank_ended(void **state)
{
    struct fixture *f = *state;
    struct waiter waiter = {.client = &f->clients[1]};
    pthread_t thread;
    char value[4];
    for (int i = 0; i < 3; i++)
        assert_int_equal(join_rank(f, i), SHOAL_KV_JOIN_DONE);
    assert_int_equal(shoal_kv_client_set(&f->clients[2], "kept", "abc", 3), 0);
    pthread_create(&thread, NULL, wait_for_key, &waiter);
    usleep(20000);
    shoal_kv_client_fini(&f->clients[2]); /* no bye */
    shoal_kv_client_init(&f->clients[2], &f->client_log);
    pthread_join(thread, NULL);
    assert_true(waiter.took_ns < WAIT_MS * SHOAL_NS_PER_MS);
    assert_int_equal(waiter.got, -2);
    assert_int_equal(f->clients[1].failure, SHOAL_ERR_PEER_LOST);
    assert_non_null(strstr(f->client_lines.text, "rank 2 (here:"));
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "kept", value, sizeof value, 100), 3);
}

static void tcp_store_without_descriptors_says_so(void **state)
{
    struct fixture *f = *state;
    struct rlimit before;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    const int next = dup(0); /* the descriptor for the test's connection; the server then has none */
    close(next);
    getrlimit(RLIMIT_NOFILE, &before);
    const struct rlimit none = {(rlim_t)next + 1, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    const int fd = connect_raw(f);
    for (int ms = 0; ms < WAIT_MS && !has_said(f, "ulimit"); ms++)
        usleep(1000);
    setrlimit(RLIMIT_NOFILE, &before);
    close(fd);
    assert_true(has_said(f, "rank 0's store has 1 of 4 ranks and cannot take more for now: Too many open files"));
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
}

static void tcp_store_rank_that_left_waits_for_the_next_server(void **state)
{
    struct fixture *f = *state;
    char value[4];
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
    shoal_kv_client_leave(&f->clients[1]);
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_ELSEWHERE);
    assert_int_equal(shoal_kv_client_get(&f->clients[0], "none", value, sizeof value, 20), -1); /* no rank was lost */
}

struct asker {
    struct shoal_kv_client *client;
    int good;
};

static void *ask_for_a_while(void *arg)
{
    struct asker *asker = arg;
    for (int i = 0; i < 6; i++) {
        asker->good += shoal_kv_client_set(asker->client, "key", "value", 5) == 0;
        usleep(300000);
    }
    shoal_kv_client_leave(asker->client);
    return NULL;
}

/* Longer than one farewell in total. */
static void tcp_store_stays_while_a_rank_still_asks(void **state)
{
    struct fixture *f = *state;
    struct asker asker = {.client = &f->clients[1]};
    pthread_t thread;
    assert_int_equal(join_rank(f, 1), SHOAL_KV_JOIN_DONE);
    pthread_create(&thread, NULL, ask_for_a_while, &asker);
    shoal_kv_server_stop(f->server);
    pthread_join(thread, NULL);
    assert_int_equal(asker.good, 6);
    shoal_address_port_put(&f->address, 0);
    start(f);
}

/* ---- the tree ---- */

/* Joins the root's store in a slot, and takes its place in the tree. */
static void open_tree(struct fixture *f, int slot, int rank, bool may_serve, struct shoal_kv_tree *tree)
{
    struct shoal_kv_identity identity = f->identity;
    identity.link.hello.rank = (uint32_t)rank;
    memset(tree, 0, sizeof *tree);
    assert_int_equal(join_as(f, slot, identity, NULL), SHOAL_KV_JOIN_DONE);
    shoal_kv_tree_open(tree, &f->clients[slot], &identity, may_serve);
}

/* Returns the value of "k" that reaches a rank; uses slot 1. */
static char get_letter(struct fixture *f, int rank)
{
    struct shoal_kv_tree tree;
    char letter = 0;
    open_tree(f, 1, rank, true, &tree);
    assert_int_equal(shoal_kv_tree_get_above(&tree, "k", &letter, 1, 100), 1);
    shoal_kv_client_leave(&f->clients[1]);
    shoal_kv_tree_close(&tree);
    return letter;
}

static void tcp_tree_sets_the_last_digit_to_0(void **state)
{
    (void)state;
    static const int pairs[][2] = {{1, 0},       {31, 0},        {32, 0},      {33, 32},      {63, 32},     {64, 0},
                                   {992, 0},     {1024, 0},      {1025, 1024}, {1056, 1024},  {1057, 1056}, {2047, 2016},
                                   {2016, 1024}, {16383, 16352}, {32768, 0},   {32800, 32768}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(pairs); i++)
        assert_int_equal(shoal_kv_tree_parent(pairs[i][0]), pairs[i][1]);
}

static void tcp_tree_brings_values_down_by_the_rank_above(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_tree near;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "k", "0", 1), 0);
    open_tree(f, 2, 32, true, &near);
    assert_int_equal(shoal_kv_tree_set_below(&near, "k", "n", 1), 0);
    assert_int_equal(get_letter(f, 33), 'n');
    assert_int_equal(get_letter(f, 63), 'n');
    assert_int_equal(get_letter(f, 31), '0');
    assert_int_equal(get_letter(f, 64), '0');
    assert_int_equal(get_letter(f, 65), '0'); /* 64 no longer serves */
    shoal_kv_tree_close(&near);
}

static void tcp_tree_has_rank_0_stand_in_for_one_that_is_not_reached(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_tree silent;
    struct shoal_address closed = f->address;
    f->client_log.level = SHOAL_LOG_INFO;
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "k", "0", 1), 0);
    open_tree(f, 2, 32, false, &silent);
    assert_null(silent.server);
    assert_int_equal(get_letter(f, 33), '0');
    assert_null(strstr(f->client_lines.text, "not reached"));
    shoal_address_port_put(&closed, 1);
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "shoal/store/32", &closed, sizeof closed), 0);
    assert_int_equal(get_letter(f, 34), '0');
    assert_non_null(
        strstr(f->client_lines.text, "rank 32's store cannot be reached, so rank 0's is used instead: 127.0.0.1:1"));
    closed.bytes = sizeof closed.socket + 1;
    assert_int_equal(shoal_kv_client_set(&f->clients[0], "shoal/store/32", &closed, sizeof closed), 0);
    assert_int_equal(get_letter(f, 35), '0');
    shoal_kv_tree_close(&silent);
}

static void tcp_tree_says_that_the_rank_above_is_gone(void **state)
{
    struct fixture *f = *state;
    struct shoal_kv_tree near, far;
    char letter;
    open_tree(f, 2, 32, true, &near);
    open_tree(f, 1, 33, true, &far);
    assert_int_equal(shoal_kv_tree_set_below(&near, "k", "n", 1), 0);
    assert_int_equal(shoal_kv_tree_get_above(&far, "k", &letter, 1, 100), 1);
    shoal_kv_tree_close(&near);
    assert_int_equal(shoal_kv_tree_get_above(&far, "k", &letter, 1, 100), -2);
    assert_int_equal(f->clients[1].failure, SHOAL_ERR_PEER_LOST);
    assert_non_null(strstr(f->client_lines.text, "rank 32's store at 127.0.0.1:"));
    shoal_kv_tree_close(&far);
}

/* Reads a line of the server thread's status: "voluntary_ctxt_switches:", "SigBlk:". */
static bool read_thread_status(const char *name, char *value, size_t value_bytes)
{
    DIR *tasks = opendir("/proc/self/task");
    bool is_found = false;
    for (struct dirent *task; (task = readdir(tasks)) && !is_found;) {
        char path[300], line[200];
        snprintf(path, sizeof path, "/proc/self/task/%.100s/status", task->d_name);
        FILE *file = fopen(path, "r");
        bool is_ours = false;
        while (file && fgets(line, sizeof line, file)) {
            is_ours = is_ours || strcmp(line, "Name:\tshoal-store\n") == 0;
            if (is_ours && strncmp(line, name, strlen(name)) == 0) {
                snprintf(value, value_bytes, "%.60s", line + strlen(name));
                is_found = true;
            }
        }
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return is_found;
}

static void tcp_store_server_sleeps_when_idle_and_takes_no_signals(void **state)
{
    SKIP_IF_EMULATED("qemu leaves signals open for itself, and /proc shows its mask");
    struct fixture *f = *state;
    char before[64] = "", after[64] = "?", blocked[64];
    assert_int_equal(join_rank(f, 0), SHOAL_KV_JOIN_DONE);
    for (int i = 0; i < 30 && strcmp(before, after) != 0; i++) { /* it may be busy with the rank at first */
        assert_true(read_thread_status("voluntary_ctxt_switches:", before, sizeof before));
        usleep(300000);
        assert_true(read_thread_status("voluntary_ctxt_switches:", after, sizeof after));
    }
    assert_string_equal(before, after);
    assert_true(read_thread_status("SigBlk:", blocked, sizeof blocked));
    const unsigned long long mask = strtoull(blocked, NULL, 16);
    for (int signal = 1; signal < 32; signal++)
        assert_true(signal == 9 || signal == 19 || (mask >> (signal - 1) & 1));
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define SECRET_CASE(name) cmocka_unit_test_setup_teardown(name, set_up_secret, tear_down)
#define CROWD_CASE(name) cmocka_unit_test_setup_teardown(name, set_up_crowd, tear_down)
#define MANY_CASE(name) cmocka_unit_test_setup_teardown(name, set_up_many, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(tcp_store_keeps_any_bytes_up_to_64_kib),
        CASE(tcp_store_refuses_what_is_too_long),
        CASE(tcp_store_get_waits_for_the_key),
        CASE(tcp_store_get_ends_at_its_deadline),
        CASE(tcp_store_erase_takes_a_key_away),
        CASE(tcp_store_survives_garbage),
        CASE(tcp_store_ends_frames_out_of_turn_or_size),
        CASE(tcp_store_is_not_held_up_by_silent_connections),
        CROWD_CASE(tcp_store_takes_all_ranks_at_once),
        CASE(tcp_store_ends_a_handshake_that_takes_too_long),
        CASE(tcp_store_refuses_another_version),
        CASE(tcp_store_refuses_other_settings),
        CASE(tcp_store_refuses_wrong_ranks_and_sizes),
        CASE(tcp_store_client_that_gives_up_says_bye),
        CASE(tcp_store_of_another_job_is_passed_by),
        SECRET_CASE(tcp_store_wants_the_secret),
        CASE(tcp_store_without_secret_refuses_one),
        SECRET_CASE(tcp_store_refuses_a_recorded_proof),
        CASE(tcp_store_tells_who_waits_that_a_rank_ended),
        CASE(tcp_store_without_descriptors_says_so),
        CASE(tcp_store_rank_that_left_waits_for_the_next_server),
        CASE(tcp_store_stays_while_a_rank_still_asks),
        cmocka_unit_test(tcp_tree_sets_the_last_digit_to_0),
        MANY_CASE(tcp_tree_brings_values_down_by_the_rank_above),
        MANY_CASE(tcp_tree_has_rank_0_stand_in_for_one_that_is_not_reached),
        MANY_CASE(tcp_tree_says_that_the_rank_above_is_gone),
        CASE(tcp_store_server_sleeps_when_idle_and_takes_no_signals),
    };
    return cmocka_run_group_tests_name("tcp_store", tests, NULL, NULL);
}
