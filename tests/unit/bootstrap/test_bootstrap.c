/* Ranks find each other: by address and by a caller's store as threads of this process, by the environment as processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../free_port.h"
#include "base/clock.h"
#include "bootstrap/bootstrap.h"
#include "comm/settings.h"
#include "emulated.h"
#include "link/auth.h"
#include "store/key_table.h"

#define RANKS_MAX 8
#define MANY_RANKS 70 /* some serve others */
#define LINES_BYTES 8192
#define LATE_MS 30000 /* for a deadline to pass on a busy machine; SHOAL_BOOTSTRAP_TIMEOUT_MS is 60000 unless it is set */

static void keep_line(void *arg, int level, const char *line)
{
    char *lines = arg;
    const size_t used = strlen(lines);
    (void)level;
    snprintf(lines + used, LINES_BYTES - used, "%s\n", line);
}

static int open_port(uint16_t port, int backlog, uint16_t *port_out)
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    socklen_t bytes = sizeof in;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, (struct sockaddr *)&in, sizeof in) != 0 || (backlog > 0 && listen(fd, backlog) != 0)) {
        close(fd);
        return -1;
    }
    assert_int_equal(getsockname(fd, (struct sockaddr *)&in, &bytes), 0);
    *port_out = ntohs(in.sin_port);
    return fd;
}

/* Returns a port that is free, as are the 16 ports after it. */
static uint16_t find_ports(void)
{
    const int port = free_port();
    assert_true(port > 0);
    return (uint16_t)port;
}

/* ---- ranks as threads ---- */

struct rank {
    int rank, size;
    const char *address; /* NULL: store */
    const struct shoal_store *store;
    const char *overrides[4];
    uint32_t timeout_ms;
    int rounds;
    int first_value; /* the first value that ranks of this job exchange */
    size_t bytes;
    enum shoal_status status;
    struct shoal_bootstrap bootstrap; /* closed, except in the test of the secret */
    unsigned char secret[SHOAL_SECRET_BYTES];
    char lines[LINES_BYTES];
};

static bool exchange_is_right(struct rank *rank, struct shoal_log *log, int round)
{
    char name[32];
    unsigned char *mine = malloc(rank->bytes + 1), *all = malloc(rank->bytes * (size_t)rank->size + 1);
    snprintf(name, sizeof name, "test%d", round);
    memset(mine, rank->first_value + 16 * round + rank->rank, rank->bytes);
    rank->status = shoal_bootstrap_gather(&rank->bootstrap, log, name, mine, all, rank->bytes, rank->timeout_ms);
    bool is_right = rank->status == SHOAL_OK;
    for (size_t i = 0; is_right && i < rank->bytes * (size_t)rank->size; i++)
        is_right = all[i] == (unsigned char)(rank->first_value + 16 * round + (int)(i / rank->bytes));
    if (rank->status == SHOAL_OK && !is_right)
        rank->status = SHOAL_ERR_INTERNAL;
    free(mine);
    free(all);
    return is_right;
}

static enum shoal_status open_rank(struct rank *rank, const struct shoal_settings *settings, struct shoal_log *log)
{
    if (rank->address)
        return shoal_bootstrap_from_address(rank->address, rank->rank, rank->size, &settings->bootstrap, log, rank->timeout_ms,
                                            &rank->bootstrap);
    return shoal_bootstrap_from_store(rank->store, rank->rank, rank->size, &settings->bootstrap, log, rank->timeout_ms,
                                      &rank->bootstrap);
}

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    struct shoal_settings settings;
    struct shoal_log log;
    char error[256];
    rank->status = shoal_settings_load(&settings, rank->overrides, error, sizeof error);
    if (rank->status != SHOAL_OK)
        return NULL;
    shoal_log_init(&log, &settings.log, keep_line, rank->lines);
    rank->status = open_rank(rank, &settings, &log);
    if (rank->status == SHOAL_OK) {
        for (int i = 0; i < rank->rounds && exchange_is_right(rank, &log, i); i++)
            continue;
        memcpy(rank->secret, rank->bootstrap.secret, sizeof rank->secret);
        const bool has_secret = rank->bootstrap.has_secret;
        shoal_bootstrap_close(&rank->bootstrap);
        rank->bootstrap.has_secret = has_secret;
    }
    shoal_log_fini(&log);
    return NULL;
}

/* Copies `first` to all ranks, then runs them. */
static void run_ranks(struct rank *ranks, int count, const struct rank *first)
{
    pthread_t threads[MANY_RANKS];
    for (int r = 0; r < count; r++) {
        ranks[r] = *first;
        ranks[r].rank = r;
    }
    for (int r = 0; r < count; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (int r = 0; r < count; r++)
        pthread_join(threads[r], NULL);
}

static void run_given(struct rank *ranks, int count)
{
    pthread_t threads[RANKS_MAX];
    for (int r = 0; r < count; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (int r = 0; r < count; r++)
        pthread_join(threads[r], NULL);
}

static void expect_line(const char *lines, const char *text)
{
    assert_non_null(text);
    if (strstr(lines, text))
        return;
    print_error("\"%s\" was not said, but:\n%s", text, lines);
    fail();
}

static void expect_all(const struct rank *ranks, int count, enum shoal_status status)
{
    for (int r = 0; r < count; r++) {
        if (ranks[r].status != status)
            fail_msg("rank %d: %s, not %s\n%s", r, shoal_status_name(ranks[r].status), shoal_status_name(status),
                     ranks[r].lines);
    }
}

static bool has_ipv6(void)
{
    const struct sockaddr_in6 in = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool has = fd >= 0 && bind(fd, (const struct sockaddr *)&in, sizeof in) == 0;
    if (fd >= 0)
        close(fd);
    return has;
}

static char *address_of(const char *host, char text[64])
{
    snprintf(text, 64, "%s:%d", host, find_ports());
    return text;
}

/* ---- by address ---- */

static void bootstrap_address_joins_ranks(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    const int sizes[] = {1, 2, 3, 8};
    const char *const hosts[] = {"127.0.0.1", "localhost", "[::1]"};
    char address[64];
    for (size_t h = 0; h < SHOAL_COUNT_OF(hosts) - !has_ipv6(); h++) {
        for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++) {
            const struct rank first = {
                .size = sizes[i], .address = address_of(hosts[h], address), .timeout_ms = 10000, .rounds = 2, .bytes = 100};
            run_ranks(ranks, sizes[i], &first);
            expect_all(ranks, sizes[i], SHOAL_OK);
            assert_string_equal(ranks[0].lines, "");
        }
    }
}

static void bootstrap_gather_takes_0_bytes_to_64_kib(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    char address[64];
    const size_t bytes[] = {0, 1, SHOAL_VALUE_BYTES_MAX};
    for (size_t i = 0; i < SHOAL_COUNT_OF(bytes); i++) {
        const struct rank first = {
            .size = 3, .address = address_of("127.0.0.1", address), .timeout_ms = 10000, .rounds = 1, .bytes = bytes[i]};
        run_ranks(ranks, 3, &first);
        expect_all(ranks, 3, SHOAL_OK);
    }
    /* One rank: if there were several, the first refused one might leave before the others have joined. */
    const struct rank first = {.size = 1,
                               .address = address_of("127.0.0.1", address),
                               .timeout_ms = 10000,
                               .rounds = 1,
                               .bytes = SHOAL_VALUE_BYTES_MAX + 1};
    run_ranks(ranks, 1, &first);
    expect_all(ranks, 1, SHOAL_ERR_ARGUMENT);
}

static void bootstrap_address_can_be_used_again_at_once(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    char address[64];
    const struct rank first = {
        .size = 3, .address = address_of("127.0.0.1", address), .timeout_ms = 10000, .rounds = 1, .bytes = 8};
    for (int i = 0; i < 20; i++) {
        run_ranks(ranks, 3, &first);
        expect_all(ranks, 3, SHOAL_OK);
    }
}

static void bootstrap_names_the_ranks_that_did_not_come(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    char address[64];
    struct rank first = {.size = 4, .address = address_of("127.0.0.1", address), .timeout_ms = 2000, .rounds = 1, .bytes = 8};
    const uint64_t before_ns = shoal_clock_ns();
    run_ranks(ranks, 2, &first);
    assert_in_range((shoal_clock_ns() - before_ns) / SHOAL_NS_PER_MS, 1990, LATE_MS);
    expect_all(ranks, 2, SHOAL_ERR_TIMEOUT);
    for (int r = 0; r < 2; r++)
        expect_line(ranks[r].lines, "ranks 2 to 3 of 4 did not come within 2000 ms (SHOAL_BOOTSTRAP_TIMEOUT_MS");
    assert_null(strstr(ranks[0].lines, "loopback")); /* it is meant for one host */
    /* Another spelling of 127.0.0.1 stands for a host's own name that /etc/hosts maps to it. */
    first.address = address_of("2130706433", address);
    run_ranks(ranks, 2, &first);
    expect_line(ranks[0].lines, "call shoal_comm_create?; rank 0 listens at 2130706433, which is 127.0.0.1:");
    expect_line(ranks[0].lines, "a loopback address that no other host reaches");
    first.address = address_of("127.0.0.1", address);
    first.rank = 3;
    first.timeout_ms = 300;
    ranks[0] = first;
    run_given(ranks, 1);
    assert_int_equal(ranks[0].status, SHOAL_ERR_TIMEOUT);
    expect_line(ranks[0].lines, "rank 0 of 4 did not come within 300 ms");
}

static void bootstrap_says_whom_it_waits_for_long_before_the_deadline(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    char address[64];
    struct rank first = {.size = 5, .address = address_of("127.0.0.1", address), .timeout_ms = 1500, .rounds = 1, .bytes = 8};
    first.overrides[0] = "SHOAL_WARN_MS=300";
    for (int r = 0; r < 3; r++)
        ranks[r] = first;
    ranks[1].rank = 2;
    ranks[2].rank = 3;
    run_given(ranks, 3); /* 0, 2 and 3 */
    expect_line(ranks[0].lines, "ms for ranks 1 and 4; did they start, and call shoal_comm_create?");
    expect_line(ranks[1].lines, "ms for rank 0 to report that all have come");
    const char *again = strstr(ranks[0].lines, "joining 5 ranks has waited");
    assert_non_null(again);
    assert_non_null(strstr(again + 1, "joining 5 ranks has waited"));
    ranks[0] = first;
    ranks[0].rank = 3;
    run_given(ranks, 1);
    expect_line(ranks[0].lines, "ms for rank 0 of 5: nothing of this job listens at 127.0.0.1");
}

/* Writes random bytes to a port repeatedly until it is stopped. */
struct flood {
    uint16_t port;
    atomic_bool is_over;
    atomic_int connections;
};

static void *flood_port(void *arg)
{
    struct flood *flood = arg;
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(flood->port)};
    unsigned seed = (unsigned)(uintptr_t)&seed;
    while (!atomic_load(&flood->is_over)) {
        unsigned char bytes[2000];
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (unsigned char)(rand_r(&seed) >> 4);
        if (fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 &&
            send(fd, bytes, 1 + (size_t)rand_r(&seed) % sizeof bytes, MSG_NOSIGNAL) > 0)
            atomic_fetch_add(&flood->connections, 1);
        if (fd >= 0)
            close(fd);
    }
    return NULL;
}

/* The flood lasts while ranks join, while they wait for the last one, and while they exchange. */
static void bootstrap_is_not_disturbed_by_a_flood(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    char address[64];
    pthread_t floods[3], last;
    struct rank first = {
        .size = RANKS_MAX, .address = address_of("127.0.0.1", address), .timeout_ms = 20000, .rounds = 8, .bytes = 20000};
    struct flood flood = {.port = (uint16_t)atoi(strchr(address, ':') + 1)};
    for (size_t i = 0; i < SHOAL_COUNT_OF(floods); i++)
        assert_int_equal(pthread_create(&floods[i], NULL, flood_port, &flood), 0);
    for (int r = 0; r < RANKS_MAX; r++) {
        ranks[r] = first;
        ranks[r].rank = r;
    }
    pthread_t threads[RANKS_MAX];
    for (int r = 0; r < RANKS_MAX - 1; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    usleep(500000);
    for (int ms = 0; ms < LATE_MS && atomic_load(&flood.connections) <= 10; ms++)
        usleep(1000);
    assert_int_equal(pthread_create(&last, NULL, run_rank, &ranks[RANKS_MAX - 1]), 0);
    pthread_join(last, NULL);
    for (int r = 0; r < RANKS_MAX - 1; r++)
        pthread_join(threads[r], NULL);
    atomic_store(&flood.is_over, true);
    for (size_t i = 0; i < SHOAL_COUNT_OF(floods); i++)
        pthread_join(floods[i], NULL);
    assert_true(atomic_load(&flood.connections) > 10);
    expect_all(ranks, RANKS_MAX, SHOAL_OK);
    expect_line(ranks[0].lines, "a program that is not a rank of Shoal writes to rank 0's store");
    for (int r = 1; r < RANKS_MAX; r++)
        assert_string_equal(ranks[r].lines, "");
}

static void bootstrap_joins_ranks_below_others(void **state)
{
    (void)state;
    static struct rank ranks[MANY_RANKS];
    char address[64], ports[64];
    struct rank first = {
        .size = MANY_RANKS, .address = address_of("127.0.0.1", address), .timeout_ms = 20000, .rounds = 3, .bytes = 1000};
    run_ranks(ranks, MANY_RANKS, &first);
    expect_all(ranks, MANY_RANKS, SHOAL_OK);
    const int port = atoi(strrchr(address, ':') + 1); /* those after it are also this program's */
    snprintf(ports, sizeof ports, "SHOAL_PORTS=%d-%d", port + 1, port + 2);
    first.overrides[0] = ports;
    run_ranks(ranks, MANY_RANKS, &first);
    expect_all(ranks, MANY_RANKS, SHOAL_OK);
}

/* Rank 64, the parent of 65 to 69, is missing; rank 0 names it to all others. */
static void bootstrap_names_a_missing_rank_that_others_are_below(void **state)
{
    (void)state;
    static struct rank ranks[MANY_RANKS];
    char address[64];
    const char *const said = "rank 64 of 70 did not come within 4000 ms";
    const struct rank first = {
        .size = MANY_RANKS, .address = address_of("127.0.0.1", address), .timeout_ms = 4000, .rounds = 1, .bytes = 8};
    pthread_t threads[MANY_RANKS];
    for (int r = 0; r < MANY_RANKS; r++) {
        ranks[r] = first;
        ranks[r].rank = r;
        if (r != 64)
            assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < MANY_RANKS; r++) {
        if (r == 64)
            continue;
        pthread_join(threads[r], NULL);
        assert_int_equal(ranks[r].status, SHOAL_ERR_TIMEOUT);
        expect_line(ranks[r].lines, said);
        assert_int_equal(strstr(ranks[r].lines, "rank 0: rank 64") != NULL, r != 0);
    }
}

static void bootstrap_address_in_use_says_so(void **state)
{
    (void)state;
    static struct rank rank;
    char address[64], said[64];
    uint16_t port;
    const int fd = open_port(0, 8, &port);
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    snprintf(said, sizeof said, "port %d in use", port);
    rank = (struct rank){.size = 2, .address = address, .timeout_ms = 300};
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_SYSTEM);
    expect_line(rank.lines, said);
    close(fd);
}

static void bootstrap_address_that_makes_no_sense_is_refused(void **state)
{
    (void)state;
    static struct rank rank;
    const char *const bad[] = {"",         "host",     "host:",     ":4000", "host:0",   "host:65536",
                               "host:12x", "::1:4000", "[::1:4000", "[]:1",  "host: 12", "host:-1"};
    for (size_t i = 0; i < SHOAL_COUNT_OF(bad); i++) {
        rank = (struct rank){.size = 2, .address = bad[i], .timeout_ms = 300};
        run_given(&rank, 1);
        assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
        expect_line(rank.lines, bad[i]);
    }
    rank = (struct rank){.size = 2, .address = "192.0.2.1:4000", .timeout_ms = 300}; /* no host has this address */
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
    expect_line(rank.lines, "not an address of this host");
}

static void bootstrap_rank_and_size_must_fit(void **state)
{
    (void)state;
    static struct rank rank;
    const int pairs[][2] = {{-1, 2}, {2, 2}, {0, 0}, {0, -3}, {0, 1 << 20}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(pairs); i++) {
        rank = (struct rank){.rank = pairs[i][0], .size = pairs[i][1], .address = "127.0.0.1:4000", .timeout_ms = 300};
        run_given(&rank, 1);
        assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
    }
    expect_line(rank.lines, "is 1048576, but may be 1 to 4096");
}

/* ---- secrets and settings ---- */

static void write_secret_file(char name[64], const char *text)
{
    strcpy(name, "/tmp/shoal_secret_XXXXXX");
    const int fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void need_sodium(void)
{
    if (!shoal_auth_is_available()) {
        print_message("libsodium is not installed\n");
        skip();
    }
}

static void bootstrap_secret_from_setting_and_file_is_one(void **state)
{
    (void)state;
    need_sodium();
    static struct rank ranks[RANKS_MAX];
    char address[64], name[64], setting[128];
    write_secret_file(name, "open sesame\nmore\n");
    snprintf(setting, sizeof setting, "SHOAL_SECRET_FILE=%s", name);
    for (int r = 0; r < 2; r++)
        ranks[r] = (struct rank){.rank = r, .size = 2, .timeout_ms = 5000, .rounds = 1, .bytes = 8};
    ranks[0].address = ranks[1].address = address_of("127.0.0.1", address);
    ranks[0].overrides[0] = "SHOAL_SECRET=open sesame";
    ranks[1].overrides[0] = setting;
    run_given(ranks, 2);
    unlink(name);
    expect_all(ranks, 2, SHOAL_OK);
    assert_true(ranks[0].bootstrap.has_secret && ranks[1].bootstrap.has_secret);
    assert_memory_equal(ranks[0].secret, ranks[1].secret, SHOAL_SECRET_BYTES);
}

static void bootstrap_secret_file_that_is_no_use_is_named(void **state)
{
    (void)state;
    static struct rank rank;
    char name[64], setting[128];
    rank = (struct rank){.size = 2, .address = "127.0.0.1:4000", .timeout_ms = 300};
    rank.overrides[0] = "SHOAL_SECRET_FILE=/no/such/file";
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
    expect_line(rank.lines, "\"/no/such/file\" cannot be read: No such file or directory");
    write_secret_file(name, "\n");
    snprintf(setting, sizeof setting, "SHOAL_SECRET_FILE=%s", name);
    rank = (struct rank){.size = 2, .address = "127.0.0.1:4000", .timeout_ms = 300, .overrides = {setting}};
    run_given(&rank, 1);
    unlink(name);
    assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
    expect_line(rank.lines, "no secret in its first line");
}

/* Rank 1 has another value than rank 0. It is refused; rank 0 logs that and reports rank 1 missing. */
static void expect_refusal(const char *of_rank_0, const char *of_rank_1, const char *said)
{
    static struct rank ranks[RANKS_MAX];
    char address[64];
    for (int r = 0; r < 2; r++)
        ranks[r] = (struct rank){.rank = r, .size = 2, .timeout_ms = 3000, .rounds = 1, .bytes = 8};
    ranks[0].address = ranks[1].address = address_of("127.0.0.1", address);
    ranks[0].overrides[0] = of_rank_0;
    ranks[1].overrides[0] = of_rank_1;
    run_given(ranks, 2);
    assert_int_equal(ranks[1].status, SHOAL_ERR_AUTH);
    assert_int_equal(ranks[0].status, SHOAL_ERR_TIMEOUT);
    expect_line(ranks[0].lines, said);
    expect_line(ranks[1].lines, said);
}

static void bootstrap_differences_are_refused_on_both_sides(void **state)
{
    (void)state;
    expect_refusal("SHOAL_DEPTH=4", "SHOAL_DEPTH=5", "settings that must agree differ: SHOAL_DEPTH is 5 there, 4 on rank 0");
    need_sodium();
    expect_refusal("SHOAL_SECRET=a", "SHOAL_SECRET=b", "secret is not rank 0's");
    expect_refusal("SHOAL_SECRET=a", "SHOAL_DEPTH=4", "rank 0 has a secret and it has none");
    expect_refusal("SHOAL_DEPTH=4", "SHOAL_SECRET=a", "it has a secret and rank 0 has none");
}

/* ---- a caller's store ---- */

struct shared {
    pthread_mutex_t lock;
    struct shoal_key_table table;
    bool fails;
    int sets, gets;
};

static int shared_set(void *arg, const char *key, const void *value, size_t bytes)
{
    struct shared *shared = arg;
    assert_int_equal(strncmp(key, "shoal/", 6), 0);
    pthread_mutex_lock(&shared->lock);
    shared->sets++;
    const bool is_kept = !shared->fails && shoal_key_table_set(&shared->table, key, strlen(key), value, bytes);
    pthread_mutex_unlock(&shared->lock);
    return is_kept ? 0 : 5;
}

static long shared_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    struct shared *shared = arg;
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    pthread_mutex_lock(&shared->lock);
    shared->gets++;
    pthread_mutex_unlock(&shared->lock);
    do {
        size_t bytes = 0;
        pthread_mutex_lock(&shared->lock);
        const void *found = shoal_key_table_get(&shared->table, key, strlen(key), &bytes);
        if (found)
            memcpy(value, found, shoal_min_size(bytes, capacity));
        pthread_mutex_unlock(&shared->lock);
        if (found)
            return (long)bytes;
        usleep(1000);
    } while (shoal_clock_ns() < deadline_ns);
    return -1;
}

static int shared_erase(void *arg, const char *key)
{
    struct shared *shared = arg;
    pthread_mutex_lock(&shared->lock);
    shoal_key_table_erase(&shared->table, key, strlen(key));
    pthread_mutex_unlock(&shared->lock);
    return 0;
}

static struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER};
static const struct shoal_store shared_store = {shared_set, shared_get, shared_erase, &shared};

static int set_up_shared(void **state)
{
    (void)state;
    shared.fails = false;
    shared.sets = shared.gets = 0;
    shoal_key_table_fini(&shared.table);
    return 0;
}

static int tear_down_shared(void **state)
{
    return set_up_shared(state);
}

static void bootstrap_store_joins_ranks_and_hands_out_a_secret(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    const struct rank first = {.size = 3, .store = &shared_store, .timeout_ms = 5000, .rounds = 2, .bytes = 33};
    run_ranks(ranks, 3, &first);
    expect_all(ranks, 3, SHOAL_OK);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(ranks[r].bootstrap.has_secret, shoal_auth_is_available());
        assert_memory_equal(ranks[r].secret, ranks[0].secret, SHOAL_SECRET_BYTES);
    }
    const unsigned char zeros[SHOAL_SECRET_BYTES] = {0};
    if (shoal_auth_is_available())
        assert_memory_not_equal(ranks[0].secret, zeros, sizeof zeros);
}

static void bootstrap_store_names_the_ranks_that_did_not_come(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    for (int r = 0; r < 2; r++)
        ranks[r] = (struct rank){.rank = r ? 3 : 0, .size = 6, .store = &shared_store, .timeout_ms = 1000};
    run_given(ranks, 2);
    expect_all(ranks, 2, SHOAL_ERR_TIMEOUT);
    expect_line(ranks[0].lines, "ranks 1 to 2 and 4 to 5 of 6 did not come within 1000 ms");
}

/* In the first exchange each rank sets its value, and rank 0 also sets the joined values and the verdict. */
static void bootstrap_store_is_asked_little(void **state)
{
    (void)state;
    static struct rank ranks[MANY_RANKS];
    const struct rank first = {.size = MANY_RANKS, .store = &shared_store, .timeout_ms = 20000};
    run_ranks(ranks, MANY_RANKS, &first);
    expect_all(ranks, MANY_RANKS, SHOAL_OK);
    assert_int_equal(shared.sets, MANY_RANKS + 2);
    assert_int_equal(shared.gets, 3 * (MANY_RANKS - 1)); /* by rank 0; each other rank has two */
}

/* Rank 0 names the missing ranks, but not itself. */
static void bootstrap_store_without_rank_0_names_it(void **state)
{
    (void)state;
    static struct rank ranks[RANKS_MAX];
    for (int r = 0; r < 2; r++)
        ranks[r] = (struct rank){.rank = r + 1, .size = 4, .store = &shared_store, .timeout_ms = 1000};
    const uint64_t before_ns = shoal_clock_ns();
    run_given(ranks, 2);
    assert_in_range((shoal_clock_ns() - before_ns) / SHOAL_NS_PER_MS, 990, LATE_MS);
    expect_all(ranks, 2, SHOAL_ERR_TIMEOUT);
    for (int r = 0; r < 2; r++)
        expect_line(ranks[r].lines, "ranks 0 and 3 of 4 did not come within 1000 ms");
}

static void bootstrap_store_of_a_rank_0_that_stands_still_names_it(void **state)
{
    (void)state;
    static struct rank rank;
    char value[1024];
    const struct rank first = {.rank = 1, .size = 2, .store = &shared_store, .timeout_ms = 100};
    rank = first;
    run_given(&rank, 1);
    const long bytes = shared_get(&shared, "shoal/agree/1", value, sizeof value, 0);
    assert_in_range(bytes, 1, sizeof value);
    assert_int_equal(shared_set(&shared, "shoal/agree/0", value, (size_t)bytes), 0);
    rank = first;
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_TIMEOUT);
    expect_line(rank.lines, "rank 0 did not gather the values of all ranks (\"agree\") within 100 ms");
}

static long get_nothing(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    (void)arg, (void)key, (void)value, (void)capacity, (void)timeout_ms;
    return -1;
}

/* Rank 0 has all values, but the parent does not pass them on. */
static void bootstrap_store_above_that_stands_still_is_told(void **state)
{
    (void)state;
    static char lines[LINES_BYTES];
    struct shoal_bootstrap first = {.rank = 0, .size = 2, .store = shared_store};
    struct shoal_bootstrap second = {.rank = 1, .size = 2, .store = shared_store, .above = {.get = get_nothing}};
    struct shoal_settings settings;
    struct shoal_log log;
    char error[256], all[2];
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&log, &settings.log, keep_line, lines);
    assert_int_equal(shared_set(&shared, "shoal/x/1", "b", 1), 0);
    assert_int_equal(shoal_bootstrap_gather(&first, &log, "x", "a", all, 1, 1000), SHOAL_OK);
    assert_memory_equal(all, "ab", 2);
    assert_string_equal(lines, "");
    assert_int_equal(shoal_bootstrap_gather(&second, &log, "x", "b", all, 1, 1000), SHOAL_ERR_TIMEOUT);
    expect_line(lines, "\"shoal/x/all.0\" did not come down within 1000 ms");
    shoal_log_fini(&log);
}

static void bootstrap_phases_are_told(void **state)
{
    (void)state;
    struct shoal_bootstrap bootstrap = {.phase_begun_ns = shoal_clock_ns() - 20 * SHOAL_NS_PER_MS};
    char text[128], few[12];
    int total, first, second;
    shoal_bootstrap_end_phase(&bootstrap, "one");
    usleep(30000);
    shoal_bootstrap_end_phase(&bootstrap, "two");
    shoal_bootstrap_print_phases(&bootstrap, text, sizeof text);
    assert_int_equal(sscanf(text, "%d.%*d ms: one %d.%*d, two %d.%*d", &total, &first, &second), 3);
    assert_in_range(first, 20, LATE_MS);
    assert_in_range(second, 30, LATE_MS);
    assert_in_range(total, first + second, first + second + 1);
    shoal_bootstrap_print_phases(&bootstrap, few, sizeof few);
    assert_memory_equal(few, text, sizeof few - 1);
    for (int i = 0; i < 2 * SHOAL_BOOTSTRAP_PHASES_MAX; i++)
        shoal_bootstrap_end_phase(&bootstrap, "more");
    assert_int_equal(bootstrap.phase_count, SHOAL_BOOTSTRAP_PHASES_MAX);
}

static void bootstrap_store_differences_are_refused_on_both_sides(void **state)
{
    static const char *const cases[][3] = {{"SHOAL_DEPTH=4", "SHOAL_DEPTH=5", "'s: SHOAL_DEPTH is "},
                                           {"SHOAL_SECRET=a", "SHOAL_SECRET=b", "another secret"},
                                           {"SHOAL_SECRET=a", "SHOAL_DEPTH=4", "has a secret and"}};
    static struct rank ranks[RANKS_MAX];
    for (size_t i = 0; i < (shoal_auth_is_available() ? SHOAL_COUNT_OF(cases) : 1); i++) {
        set_up_shared(state);
        for (int r = 0; r < 2; r++) {
            ranks[r] = (struct rank){.rank = r, .size = 2, .store = &shared_store, .timeout_ms = 2000};
            ranks[r].overrides[0] = cases[i][r];
        }
        run_given(ranks, 2);
        expect_all(ranks, 2, SHOAL_ERR_AUTH);
        expect_line(ranks[0].lines, cases[i][2]);
        expect_line(ranks[1].lines, cases[i][2]);
    }
}

static void bootstrap_store_that_fails_is_an_error(void **state)
{
    (void)state;
    static struct rank rank;
    shared.fails = true;
    rank = (struct rank){.size = 2, .store = &shared_store, .timeout_ms = 100};
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_SYSTEM);
    expect_line(rank.lines, "set(\"shoal/agree/0\") failed (it returned 5)");
    const struct shoal_store holes[] = {
        {NULL, shared_get, shared_erase, NULL}, {shared_set, NULL, shared_erase, NULL}, {shared_set, shared_get, NULL, NULL}};
    for (size_t i = 0; i <= SHOAL_COUNT_OF(holes); i++) {
        rank = (struct rank){.size = 2, .store = i < SHOAL_COUNT_OF(holes) ? &holes[i] : NULL, .timeout_ms = 100};
        run_given(&rank, 1);
        assert_int_equal(rank.status, SHOAL_ERR_ARGUMENT);
    }
}

static void bootstrap_store_value_of_another_length_is_a_mismatch(void **state)
{
    (void)state;
    static struct rank rank;
    assert_int_equal(shared_set(&shared, "shoal/agree/1", "abc", 3), 0);
    rank = (struct rank){.size = 2, .store = &shared_store, .timeout_ms = 100};
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_MISMATCH);
    expect_line(rank.lines, "rank 1 put 3 bytes");
    rank = (struct rank){.rank = 1, .size = 2, .store = &shared_store, .timeout_ms = 100};
    run_given(&rank, 1);
    assert_int_equal(rank.status, SHOAL_ERR_MISMATCH);
    expect_line(rank.lines, "rank 0: rank 1 put 3 bytes");
}

/* ---- by the environment: each rank is a process ---- */

/* A child's report. Its status is its exit code. */
struct child {
    pid_t process;
    int lines_fd;
};

/* "A=1 B=2" */
static void put_variables(const char *text)
{
    char *rest = strdup(text), *at;
    while ((at = strsep(&rest, " ")))
        putenv(at);
}

static uint32_t child_timeout_ms = 20000;

/* Only the given variables are set. with_few_files: libraries can no longer be loaded. */
static void be_child(const char *const *variables, bool with_few_files, int lines_fd)
{
    static struct shoal_settings settings;
    static struct rank rank = {.bytes = 8};
    struct shoal_log log;
    char error[256];
    rank.timeout_ms = child_timeout_ms;
    clearenv();
    for (int i = 0; variables[i]; i++)
        put_variables(variables[i]);
    if (with_few_files)
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, 0});
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        _exit(99);
    shoal_log_init(&log, &settings.log, keep_line, rank.lines);
    enum shoal_status status = shoal_bootstrap_from_environment(&settings.bootstrap, &log, rank.timeout_ms, &rank.bootstrap);
    if (status == SHOAL_OK && !getenv("TEST_ONLY_OPEN")) {
        rank.rank = rank.bootstrap.rank;
        rank.size = rank.bootstrap.size;
        rank.first_value = getenv("TEST_FIRST_VALUE") ? atoi(getenv("TEST_FIRST_VALUE")) : 0;
        keep_line(rank.lines, 0, rank.bootstrap.launcher);
        exchange_is_right(&rank, &log, 0);
        status = rank.status;
    }
    if (status == SHOAL_OK)
        shoal_bootstrap_close(&rank.bootstrap);
    if (write(lines_fd, rank.lines, strlen(rank.lines)) < 0)
        _exit(98);
    _exit((int)status);
}

static struct child start_child(const char *const *variables, bool with_few_files)
{
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    const pid_t process = fork();
    assert_true(process >= 0);
    if (process == 0)
        be_child(variables, with_few_files, pipes[1]);
    close(pipes[1]);
    return (struct child){process, pipes[0]};
}

static enum shoal_status finish_child(const struct child *child, char lines[LINES_BYTES])
{
    size_t used = 0;
    ssize_t got;
    while ((got = read(child->lines_fd, lines + used, LINES_BYTES - 1 - used)) > 0)
        used += (size_t)got;
    lines[used] = 0;
    close(child->lines_fd);
    int how;
    assert_int_equal(waitpid(child->process, &how, 0), child->process);
    assert_true(WIFEXITED(how));
    return (enum shoal_status)WEXITSTATUS(how);
}

static enum shoal_status run_child(const char *const *variables, char lines[LINES_BYTES])
{
    const struct child child = start_child(variables, false);
    return finish_child(&child, lines);
}

/* Runs a job of `size` ranks whose MASTER_PORT is port; each must end with OK. */
static void run_job(uint16_t port, int size, const char *extra)
{
    struct child children[RANKS_MAX];
    char texts[4][64], lines[LINES_BYTES];
    snprintf(texts[0], sizeof texts[0], "WORLD_SIZE=%d", size);
    snprintf(texts[1], sizeof texts[1], "MASTER_PORT=%d", port);
    for (int r = 0; r < size; r++) {
        snprintf(texts[2], sizeof texts[2], "RANK=%d", r);
        const char *const variables[] = {texts[0], texts[1], texts[2], "MASTER_ADDR=localhost", extra, NULL};
        children[r] = start_child(variables, false);
    }
    for (int r = 0; r < size; r++) {
        const enum shoal_status status = finish_child(&children[r], lines);
        if (status != SHOAL_OK)
            fail_msg("rank %d: %s\n%s", r, shoal_status_name(status), lines);
        assert_string_equal(lines, "torchrun or shoal run\n");
    }
}

/* Runs a step of two tasks, on the first host of the list; each must end with OK. */
static void run_step(const char *nodes, const char *hosts)
{
    struct child children[2];
    char texts[2][64], lines[LINES_BYTES];
    snprintf(texts[0], sizeof texts[0], "SLURM_JOB_ID=%d", (int)getpid());
    for (int r = 0; r < 2; r++) {
        snprintf(texts[1], sizeof texts[1], "SLURM_PROCID=%d", r);
        const char *const variables[] = {texts[0], "SLURM_STEP_NUM_TASKS=2", texts[1], nodes, hosts, NULL};
        children[r] = start_child(variables, false);
    }
    for (int r = 0; r < 2; r++) {
        const enum shoal_status status = finish_child(&children[r], lines);
        if (status != SHOAL_OK)
            fail_msg("%s, rank %d: %s\n%s", nodes, r, shoal_status_name(status), lines);
        assert_string_equal(lines, "srun\n");
    }
}

/* Must run first: the library must not be loaded yet in this process. */
static void bootstrap_without_libsodium_refuses_a_secret(void **state)
{
    (void)state;
    const char *const variables[] = {"RANK=0",           "WORLD_SIZE=2",   "MASTER_ADDR=localhost",
                                     "MASTER_PORT=4000", "SHOAL_SECRET=x", NULL};
    char lines[LINES_BYTES];
    const struct child child = start_child(variables, true);
    assert_int_equal(finish_child(&child, lines), SHOAL_ERR_AUTH);
    expect_line(lines, "install libsodium23 or unset it");
    const char *const alone[] = {"RANK=0", "WORLD_SIZE=1", "SHOAL_SECRET=x", NULL};
    const struct child single = start_child(alone, true);
    assert_int_equal(finish_child(&single, lines), SHOAL_OK);
}

static void bootstrap_environment_joins_processes(void **state)
{
    (void)state;
    const uint16_t port = find_ports();
    char setting[64];
    run_job(port, 1, NULL);
    run_job(port, 3, NULL);
    if (shoal_auth_is_available())
        run_job(port, 2, "SHOAL_SECRET=x");
    snprintf(setting, sizeof setting, "SHOAL_STORE_PORT=%d", port); /* not tried unless it is set */
    run_job(port, 2, setting);
}

static void bootstrap_environment_joins_tasks_of_srun(void **state)
{
    (void)state;
    run_step("SLURM_STEP_NODELIST=127.0.0.1,n2", "SLURM_STEP_NUM_NODES=2");
    run_step("SLURM_STEP_NODELIST=127.0.0.[1-3,7],n2", "SLURM_STEP_NUM_NODES=2");
    run_step("SLURM_STEP_NODELIST=127.[0,4-5].0.[1]", "SLURM_STEP_NUM_NODES=2");
    run_step("SLURM_STEP_NODELIST=no.such.host.invalid", "SLURM_STEP_NUM_NODES=1");
    run_step("SLURM_STEP_NODELIST=no.such.host.invalid", "MASTER_ADDR=127.0.0.1");
}

static void bootstrap_environment_without_variables_is_a_job_of_one(void **state)
{
    (void)state;
    const char *const none[] = {NULL};
    const char *const batch_script[] = {"SLURM_PROCID=0", "SLURM_NTASKS=3", "SLURM_JOB_NODELIST=n[1-3]", NULL};
    char lines[LINES_BYTES];
    assert_int_equal(run_child(none, lines), SHOAL_OK);
    assert_string_equal(lines, "single\n");
    assert_int_equal(run_child(batch_script, lines), SHOAL_OK);
    assert_string_equal(lines, "single\n");
}

static void bootstrap_environment_that_makes_no_sense_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *variables[6];
        const char *said;
    } cases[] = {
        {{"RANK=2", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=4000"},
         "RANK is 2, but with WORLD_SIZE 2 may be 0 to 1"},
        {{"RANK=-1", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=4000"}, "RANK is \"-1\""},
        {{"RANK=0x1", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=4000"}, "RANK is \"0x1\""},
        {{"RANK=0", "WORLD_SIZE=0", "MASTER_ADDR=localhost", "MASTER_PORT=4000"}, "WORLD_SIZE is \"0\""},
        {{"RANK=0", "WORLD_SIZE=two", "MASTER_ADDR=localhost", "MASTER_PORT=4000"}, "WORLD_SIZE is \"two\""},
        {{"RANK=0", "WORLD_SIZE=99999999999999999999"}, "WORLD_SIZE is \"99999999999999999999\""},
        {{"RANK=0", "WORLD_SIZE=2", "MASTER_PORT=4000"}, "MASTER_ADDR is not"},
        {{"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost"}, "MASTER_PORT is not"},
        {{"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=70000"}, "MASTER_PORT is \"70000\""},
        {{"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=65535"}, "MASTER_PORT is 65535"},
        {{"RANK=0"}, "RANK is set, but WORLD_SIZE is not"},
        {{"WORLD_SIZE=2", "RANK="}, "WORLD_SIZE is set, but RANK is not"},
        {{"SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=2"}, "SLURM_PROCID is 2, but with SLURM_STEP_NUM_TASKS 2 may be 0 to 1"},
        {{"SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=2"}, "SLURM_STEP_NODELIST is \"\", which does not begin with a host"},
        {{"SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NODELIST=192.0.2.[7-9],n1"},
         "SLURM_STEP_NODELIST (MASTER_ADDR overrules it) is \"192.0.2.7\", which is not an address of this host"},
    };
    char lines[LINES_BYTES];
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        assert_int_equal(run_child(cases[i].variables, lines), SHOAL_ERR_ARGUMENT);
        expect_line(lines, cases[i].said);
    }
    char too_long[300] = "SLURM_STEP_NODELIST=";
    memset(too_long + strlen(too_long), 'n', sizeof too_long - 1 - strlen(too_long));
    const char *const variables[] = {"SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=2", too_long, NULL};
    assert_int_equal(run_child(variables, lines), SHOAL_ERR_ARGUMENT);
    expect_line(lines, "which does not begin with a host");
}

static void bootstrap_environment_passes_other_servers_by(void **state)
{
    (void)state;
    SKIP_IF_EMULATED(FORKS_BESIDE_THREADS);
    const uint16_t port = find_ports();
    uint16_t silent_port;
    /* The next port belongs to a Shoal job of another kind, the one after to a program that accepts and sends nothing. */
    char address[64], error[256];
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_bootstrap other;
    snprintf(address, sizeof address, "127.0.0.1:%d", port + 1);
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&log, &settings.log, NULL, NULL);
    assert_int_equal(shoal_bootstrap_from_address(address, 0, 2, &settings.bootstrap, &log, 1000, &other), SHOAL_OK);
    const int silent = open_port((uint16_t)(port + 2), 8, &silent_port);
    assert_true(silent >= 0);
    run_job(port, 2, "SHOAL_JOB_ID=this");
    close(silent);
    shoal_bootstrap_close(&other);
    shoal_log_fini(&log);
}

static void bootstrap_environment_with_all_ports_in_use_says_so(void **state)
{
    (void)state;
    const uint16_t port = find_ports();
    int fds[16];
    uint16_t unused;
    char master[64], exact[64], said[128], lines[LINES_BYTES];
    for (unsigned i = 0; i < 16; i++)
        assert_true((fds[i] = open_port((uint16_t)(port + 1 + i), 1, &unused)) >= 0);
    snprintf(master, sizeof master, "MASTER_PORT=%d", port);
    snprintf(exact, sizeof exact, "SHOAL_STORE_PORT=%d", port + 3);
    const char *const untold[] = {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", master, NULL};
    assert_int_equal(run_child(untold, lines), SHOAL_ERR_SYSTEM);
    snprintf(said, sizeof said, "port %d in use by other programs; choose another MASTER_PORT, or set SHOAL_JOB_ID", port + 1);
    expect_line(lines, said);
    const char *const variables[] = {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", master, "SHOAL_JOB_ID=x", NULL};
    assert_int_equal(run_child(variables, lines), SHOAL_ERR_SYSTEM);
    snprintf(said, sizeof said, "ports %d to %d in use", port + 1, port + 16);
    expect_line(lines, said);
    const char *const with_exact[] = {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", master, exact, NULL};
    assert_int_equal(run_child(with_exact, lines), SHOAL_ERR_SYSTEM);
    snprintf(said, sizeof said, "port %d in use", port + 3);
    expect_line(lines, said);
    for (unsigned i = 0; i < 16; i++)
        close(fds[i]);
}

static void bootstrap_environment_with_too_many_ranks_names_the_limit(void **state)
{
    (void)state;
    static const char *const environments[][5] = {
        {"RANK=0", "WORLD_SIZE=4097", "MASTER_ADDR=localhost", "MASTER_PORT=4000"},
        {"RANK=16384", "WORLD_SIZE=16385", "MASTER_ADDR=localhost", "MASTER_PORT=4000"},
        {"PMI_FD=999", "PMI_RANK=1", "PMI_SIZE=16385"},
        {"SLURM_PROCID=4096", "SLURM_STEP_NUM_TASKS=4097", "SLURM_STEP_NODELIST=localhost"},
    };
    char lines[LINES_BYTES];
    for (size_t i = 0; i < SHOAL_COUNT_OF(environments); i++) {
        assert_int_equal(run_child(environments[i], lines), SHOAL_ERR_ARGUMENT);
        expect_line(lines, "but may be 1 to 4096 (the limit of this build, SHOAL_RANKS_MAX)");
    }
}

/* ---- two jobs at one port ---- */

#define JOBS 2

/* Runs two jobs of two ranks, all started at once; how[job] tells the jobs apart. Returns how many ranks ended well. Ranks of
 * a job receive the values of their own job, or an error. */
static int run_two_jobs(uint16_t port, const char *const how[JOBS], char lines[JOBS * 2][LINES_BYTES])
{
    struct child children[JOBS * 2];
    char texts[4][64];
    int good = 0;
    snprintf(texts[0], sizeof texts[0], "MASTER_PORT=%d", port);
    for (int c = 0; c < JOBS * 2; c++) {
        snprintf(texts[1], sizeof texts[1], "RANK=%d", c % 2);
        snprintf(texts[2], sizeof texts[2], "TEST_FIRST_VALUE=%d", 100 * (c / 2));
        snprintf(texts[3], sizeof texts[3], "SLURM_PROCID=%d", c % 2); /* as srun sets it; alone it has no effect */
        const char *const variables[] = {
            "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", texts[0], texts[1], texts[2], texts[3], how[c / 2], NULL};
        children[c] = start_child(variables, false);
    }
    for (int c = 0; c < JOBS * 2; c++) {
        const enum shoal_status status = finish_child(&children[c], lines[c]);
        if (status == SHOAL_ERR_INTERNAL)
            fail_msg("job %d, rank %d has what another job's ranks gave", c / 2, c % 2);
        good += status == SHOAL_OK;
    }
    return good;
}

static bool has_any(char lines[JOBS * 2][LINES_BYTES], const char *text)
{
    bool has = false;
    for (int c = 0; c < JOBS * 2; c++)
        has |= strstr(lines[c], text) != NULL;
    return has;
}

static void bootstrap_two_jobs_that_nothing_tells_apart_do_not_mix(void **state)
{
    (void)state;
    static char lines[JOBS * 2][LINES_BYTES];
    const uint16_t port = find_ports();
    /* The second time, inside one task of a step with as many tasks. */
    static const char *const inside = "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1";
    child_timeout_ms = 4000; /* in most rounds a rank waits in vain */
    for (int round = 0; round < 24; round++) {
        const char *const none[JOBS] = {round < 12 ? NULL : inside, round < 12 ? NULL : inside};
        if (run_two_jobs(port, none, lines) < 4)
            assert_true(has_any(lines, "give each job its own MASTER_PORT, or its own SHOAL_JOB_ID or SHOAL_SECRET"));
    }
    child_timeout_ms = 20000;
    if (!shoal_auth_is_available())
        return;
    for (int round = 0; round < 6; round++) {
        const char *const one[JOBS] = {"SHOAL_SECRET=one", NULL};
        assert_true(run_two_jobs(port, one, lines) >= 2);
    }
}

static void bootstrap_two_jobs_that_are_told_apart_both_run(void **state)
{
    (void)state;
    static char lines[JOBS * 2][LINES_BYTES];
    static const char *const apart[][JOBS] = {
        {"SHOAL_JOB_ID=a", "SHOAL_JOB_ID=b"},
        {"TORCHELASTIC_RUN_ID=a", "TORCHELASTIC_RUN_ID=b"},
        {"SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=a", "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=b"},
        {"SHOAL_JOB_ID=a", "SHOAL_SECRET=y"},
        {"SHOAL_SECRET=x", "SHOAL_SECRET=y"}};
    const uint16_t port = find_ports();
    for (size_t i = 0; i < SHOAL_COUNT_OF(apart) - (shoal_auth_is_available() ? 0 : 2); i++) {
        for (int round = 0; round < 8; round++) {
            if (run_two_jobs(port, apart[i], lines) != JOBS * 2)
                fail_msg("%s and %s: %s%s%s%s", apart[i][0], apart[i][1], lines[0], lines[1], lines[2], lines[3]);
        }
    }
}

/* Waits until a process on this host listens at an IPv4 port. */
static void await_listener(uint16_t port)
{
    char line[256];
    for (bool is_there = false; !is_there;) {
        FILE *sockets = fopen("/proc/net/tcp", "r");
        assert_non_null(sockets);
        while (!is_there && fgets(line, sizeof line, sockets)) {
            unsigned at, state;
            is_there = sscanf(line, " %*d: %*x:%x %*x:%*x %x", &at, &state) == 2 && at == port && state == TCP_LISTEN;
        }
        fclose(sockets);
        usleep(1000);
    }
}

/* A second rank 0 joins while the first waits for the other ranks. */
static void bootstrap_a_second_rank_0_ends_both_jobs(void **state)
{
    (void)state;
    static char lines[2][LINES_BYTES];
    struct child first;
    char port[64], said[96];
    const uint16_t master = find_ports();
    snprintf(port, sizeof port, "MASTER_PORT=%d", master);
    const char *const variables[] = {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port, NULL};
    first = start_child(variables, false);
    await_listener((uint16_t)(master + 1));
    assert_int_equal(run_child(variables, lines[1]), SHOAL_ERR_ARGUMENT);
    assert_int_equal(finish_child(&first, lines[0]), SHOAL_ERR_ARGUMENT);
    snprintf(said, sizeof said, "rank 0 cannot listen at 127.0.0.1:%d: another Shoal job, of 2 ranks, uses that port",
             master + 1);
    expect_line(lines[1], said);
    expect_line(lines[0], "says that it is rank 0, so ranks of two jobs meet at");
}

/* Finds an IPv4 address of this host that is not 127.x. */
static bool find_outer_address(char text[INET_ADDRSTRLEN])
{
    struct ifaddrs *list;
    bool is_found = false;
    if (getifaddrs(&list) != 0)
        return false;
    for (const struct ifaddrs *at = list; at && !is_found; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || (at->ifa_flags & IFF_LOOPBACK) || !(at->ifa_flags & IFF_UP))
            continue;
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)at->ifa_addr;
        is_found = inet_ntop(AF_INET, &in->sin_addr, text, INET_ADDRSTRLEN) != NULL;
    }
    freeifaddrs(list);
    return is_found;
}

static void bootstrap_environment_warns_where_others_could_reach_it(void **state)
{
    (void)state;
    SKIP_IF_EMULATED(FORKS_BESIDE_THREADS);
    char outer[INET_ADDRSTRLEN], master[64], port[64], lines[LINES_BYTES];
    if (!find_outer_address(outer)) {
        print_message("this host has no address but its loopback\n");
        skip();
    }
    snprintf(master, sizeof master, "MASTER_ADDR=%s", outer);
    snprintf(port, sizeof port, "MASTER_PORT=%d", find_ports());
    const char *variables[] = {"RANK=0", "WORLD_SIZE=2", "TEST_ONLY_OPEN=1", master, port, NULL, NULL};
    assert_int_equal(run_child(variables, lines), SHOAL_OK);
    expect_line(lines, "set SHOAL_SECRET");
    variables[5] = "LOCAL_WORLD_SIZE=2";
    assert_int_equal(run_child(variables, lines), SHOAL_OK);
    assert_string_equal(lines, "");
}

static void bootstrap_environment_pmi_that_is_gone_is_an_error(void **state)
{
    (void)state;
    char lines[LINES_BYTES];
    const char *const variables[] = {"PMI_FD=999", "PMI_RANK=0", "PMI_SIZE=2", NULL};
    assert_int_equal(run_child(variables, lines), SHOAL_ERR_SYSTEM);
    expect_line(lines, "PMI_FD=999");
}

int main(void)
{
#define STORE_CASE(name) cmocka_unit_test_setup_teardown(name, set_up_shared, tear_down_shared)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bootstrap_without_libsodium_refuses_a_secret),
        cmocka_unit_test(bootstrap_address_joins_ranks),
        cmocka_unit_test(bootstrap_gather_takes_0_bytes_to_64_kib),
        cmocka_unit_test(bootstrap_address_can_be_used_again_at_once),
        cmocka_unit_test(bootstrap_names_the_ranks_that_did_not_come),
        cmocka_unit_test(bootstrap_says_whom_it_waits_for_long_before_the_deadline),
        cmocka_unit_test(bootstrap_is_not_disturbed_by_a_flood),
        cmocka_unit_test(bootstrap_joins_ranks_below_others),
        cmocka_unit_test(bootstrap_names_a_missing_rank_that_others_are_below),
        cmocka_unit_test(bootstrap_address_in_use_says_so),
        cmocka_unit_test(bootstrap_address_that_makes_no_sense_is_refused),
        cmocka_unit_test(bootstrap_rank_and_size_must_fit),
        cmocka_unit_test(bootstrap_secret_from_setting_and_file_is_one),
        cmocka_unit_test(bootstrap_secret_file_that_is_no_use_is_named),
        cmocka_unit_test(bootstrap_differences_are_refused_on_both_sides),
        STORE_CASE(bootstrap_store_joins_ranks_and_hands_out_a_secret),
        STORE_CASE(bootstrap_store_names_the_ranks_that_did_not_come),
        STORE_CASE(bootstrap_store_is_asked_little),
        STORE_CASE(bootstrap_store_without_rank_0_names_it),
        STORE_CASE(bootstrap_store_of_a_rank_0_that_stands_still_names_it),
        STORE_CASE(bootstrap_store_above_that_stands_still_is_told),
        cmocka_unit_test(bootstrap_phases_are_told),
        STORE_CASE(bootstrap_store_differences_are_refused_on_both_sides),
        STORE_CASE(bootstrap_store_that_fails_is_an_error),
        STORE_CASE(bootstrap_store_value_of_another_length_is_a_mismatch),
        cmocka_unit_test(bootstrap_environment_joins_processes),
        cmocka_unit_test(bootstrap_environment_joins_tasks_of_srun),
        cmocka_unit_test(bootstrap_environment_without_variables_is_a_job_of_one),
        cmocka_unit_test(bootstrap_environment_that_makes_no_sense_is_named),
        cmocka_unit_test(bootstrap_environment_with_too_many_ranks_names_the_limit),
        cmocka_unit_test(bootstrap_environment_passes_other_servers_by),
        cmocka_unit_test(bootstrap_environment_with_all_ports_in_use_says_so),
        cmocka_unit_test(bootstrap_two_jobs_that_nothing_tells_apart_do_not_mix),
        cmocka_unit_test(bootstrap_two_jobs_that_are_told_apart_both_run),
        cmocka_unit_test(bootstrap_a_second_rank_0_ends_both_jobs),
        cmocka_unit_test(bootstrap_environment_warns_where_others_could_reach_it),
        cmocka_unit_test(bootstrap_environment_pmi_that_is_gone_is_an_error),
    };
    return cmocka_run_group_tests_name("bootstrap", tests, NULL, NULL);
}
