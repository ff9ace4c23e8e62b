/* Lanes: writes that arrive whole through several threads, and what the system, the ports or the provider refuse. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "transport/fabric/network.h"

/* Read by the leak checker: endpoints of libfabric leak some of their descriptions. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so";
}

#define PATIENCE_NS (60 * SHOAL_NS_PER_S)
#define WRITES 200
#define WRITE_BYTES ((size_t)70001)

/* ---- Threads that the system refuses ------------------------------------------------------------------------------------- */

static _Thread_local int threads_left = -1; /* -1: any number */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    if (threads_left == 0)
        return EAGAIN;
    threads_left -= threads_left > 0;
    return __real_pthread_create(thread, attr, run, arg);
}

/* ---- Descriptors that wake for nothing ----------------------------------------------------------------------------------- */

static atomic_bool wakes_in_vain; /* lanes that wait for events of the network wake at once */
static atomic_uint vain_wakes, waits_without;

int __real_ppoll(struct pollfd *entries, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
int __wrap_ppoll(struct pollfd *entries, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
/* A lane polls two descriptors: that of other threads, and that of its endpoint. */
int __wrap_ppoll(struct pollfd *entries, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    if (!atomic_load(&wakes_in_vain) || count != 2)
        return __real_ppoll(entries, count, timeout, mask);
    if (entries[1].fd < 0) {
        atomic_fetch_add(&waits_without, 1);
        return __real_ppoll(entries, count, timeout, mask);
    }
    atomic_fetch_add(&vain_wakes, 1);
    entries[0].revents = 0;
    entries[1].revents = POLLIN;
    return 1;
}

/* ---- Sides --------------------------------------------------------------------------------------------------------------- */

static char logged[4096];

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s\n", line);
}

static atomic_uint wakes;

static void count_wake(void *arg)
{
    (void)arg;
    atomic_fetch_add_explicit(&wakes, 1, memory_order_relaxed);
}

struct side {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_network *network;
};

/* Returns false if no libfabric is found. */
static bool open_side(struct side *side, int threads, const char *const *overrides)
{
    char error[256];
    logged[0] = 0;
    assert_int_equal(shoal_settings_load(&side->settings, overrides, error, sizeof error), SHOAL_OK);
    strcpy(side->settings.log.log, "info");
    shoal_log_init(&side->log, &side->settings.log, keep_line, NULL);
    const struct shoal_network_options options = {.log = &side->log,
                                                  .settings = &side->settings.fabric,
                                                  .ports = side->settings.bootstrap.ports,
                                                  .threads = threads,
                                                  .wake = count_wake};
    if (shoal_network_open(&options, &side->network) == SHOAL_OK)
        return true;
    shoal_log_fini(&side->log);
    return false;
}

static void close_side(struct side *side)
{
    shoal_network_close(side->network);
    shoal_log_fini(&side->log);
}

static void expect_line(const char *words)
{
    if (!strstr(logged, words))
        fail_msg("the log lacks \"%s\":\n%s", words, logged);
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------------ */

static void the_system_refuses_threads(void **state)
{
    struct side side;
    (void)state;
    threads_left = 2;
    const bool is_open = open_side(&side, 5, NULL);
    threads_left = -1;
    if (!is_open)
        skip();
    assert_int_equal(shoal_network_lane_count(side.network), 2);
    expect_line("cannot make a thread for the network");
    expect_line("sends and receives with 3 of 5 threads");
    close_side(&side);
}

/* Returns a port that was free a moment ago, and so most likely are those after it. */
static unsigned find_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t bytes = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
    close(fd);
    return ntohs(address.sin_port);
}

static void ports_run_out(void **state)
{
    struct side side;
    char ports[64];
    (void)state;
    const unsigned port = find_port();
    if (port > 65000)
        skip();
    snprintf(ports, sizeof ports, "SHOAL_PORTS=%u-%u", port, port + 2);
    if (!open_side(&side, 16, (const char *const[]){ports, NULL}))
        skip();
    assert_in_range(shoal_network_lane_count(side.network), 0, 2);
    expect_line("(SHOAL_PORTS) is in use on this host");
    expect_line("of 16 threads");
    close_side(&side);
}

static void an_adapter_needs_no_lanes(void **state)
{
    struct side side;
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    assert_true(open_side(&side, 4, (const char *const[]){"SHOAL_LIBFABRIC=" MOCK_FABRIC, "SHOAL_PROVIDER=efa", NULL}));
    assert_int_equal(shoal_network_lane_count(side.network), 0);
    expect_line("one thread at the network, not 4: the adapter moves the bytes itself");
    close_side(&side);
}

static void messages_need_no_lanes(void **state)
{
    struct side side;
    (void)state;
    if (!open_side(&side, 4, (const char *const[]){"SHOAL_WRITES=no", NULL}))
        skip();
    assert_int_equal(shoal_network_lane_count(side.network), 0);
    expect_line("one thread at the network, not 4: data are sent in messages");
    close_side(&side);
}

/* ---- Writes -------------------------------------------------------------------------------------------------------------- */

/* Receives writes: the immediate's slot and increment number a write. Receives probes: of which lanes. */
struct target {
    unsigned reached;

    unsigned received[64];
    unsigned count;
};

static bool note_written(void *arg, int source, unsigned slot, unsigned increment)
{
    struct target *target = arg;
    (void)slot;
    target->received[increment]++;
    target->count++;
    return source == 3;
}

static void note_reached(void *arg, int source, unsigned lane)
{
    struct target *target = arg;
    assert_int_equal(source, 3);
    target->reached |= 1u << lane;
}

struct pair {
    struct side from, to;
    struct shoal_network_channel channel;
    struct target target;
    char *memory, *source;
    struct shoal_fabric_memory registered;
    struct shoal_network_lane_memory lane_memory;
    struct shoal_network_peer *peer;
    struct shoal_network_lanes lanes;
    uint32_t immediate;
};

static void fill(char *at, unsigned number)
{
    for (size_t i = 0; i < WRITE_BYTES; i++)
        at[i] = (char)(number * 31 + i * 7);
}

static int count_open(const struct shoal_network_lanes *lanes)
{
    int count = 0;
    for (int i = 0; i < lanes->count; i++)
        count += lanes->lane[i].is_open;
    return count;
}

/* Meets, but not the lanes: writes their offers. */
static int open_pair_apart(struct pair *pair, int from_threads, int to_threads,
                           struct shoal_network_lane_offer offers_out[SHOAL_LANES_MAX])
{
    memset(pair, 0, sizeof *pair);
    if (!open_side(&pair->from, from_threads, NULL) || !open_side(&pair->to, to_threads, NULL))
        return -1;
    pair->memory = calloc(WRITES, WRITE_BYTES);
    pair->source = malloc(WRITES * WRITE_BYTES);
    assert_non_null(pair->memory);
    assert_non_null(pair->source);
    pair->channel =
        (struct shoal_network_channel){.comm = 7, .arg = &pair->target, .written = note_written, .reached = note_reached};
    shoal_network_channel_open(pair->to.network, &pair->channel);
    pair->immediate = shoal_network_give_counters(pair->to.network, &pair->channel, 3);
    assert_int_equal(shoal_network_register(pair->to.network, pair->memory, WRITES * WRITE_BYTES, &pair->registered), SHOAL_OK);
    assert_int_equal(shoal_network_register_lanes(pair->to.network, pair->memory, WRITES * WRITE_BYTES, &pair->lane_memory),
                     SHOAL_OK);
    const int count = shoal_network_offer_lanes(pair->to.network, &pair->channel, 3, &pair->lane_memory, offers_out);
    assert_int_equal(count, to_threads - 1);
    struct shoal_network_peer known = {.address = *shoal_network_address(pair->to.network)};
    assert_int_equal(shoal_network_meet(pair->from.network, &known, &pair->peer), SHOAL_OK);
    return count;
}

/* Returns false if no libfabric is found. */
static bool open_pair(struct pair *pair, int from_threads, int to_threads)
{
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    const int count = open_pair_apart(pair, from_threads, to_threads, offers);
    if (count < 0)
        return false;
    assert_int_equal(shoal_network_meet_lanes(pair->from.network, offers, count, &pair->lanes), SHOAL_OK);
    assert_int_equal(count_open(&pair->lanes), from_threads < to_threads ? from_threads - 1 : to_threads - 1);
    return true;
}

static void close_pair(struct pair *pair)
{
    shoal_network_part_lanes(pair->from.network, &pair->lanes);
    shoal_network_channel_close(pair->to.network, &pair->channel);
    shoal_network_unregister(pair->to.network, &pair->registered);
    shoal_network_unregister_lanes(pair->to.network, &pair->lane_memory);
    close_side(&pair->from);
    close_side(&pair->to);
    free(pair->memory);
    free(pair->source);
}

static void poll_both(struct pair *pair, uint64_t begun_ns)
{
    if (shoal_clock_ns() - begun_ns >= PATIENCE_NS)
        fail_msg("what is waited for does not come; the log:\n%s", logged);
    shoal_network_poll(pair->from.network);
    shoal_network_poll(pair->to.network);
}

/* Sends writes of odd sizes, large and small, as fast as the network accepts them. */
static void write_all(struct pair *pair)
{
    unsigned count = 0, total = 0;
    struct shoal_network_load load = {.peer = pair->peer, .count = &count, .total = &total};
    const uint64_t begun_ns = shoal_clock_ns();
    for (unsigned i = 0; i < WRITES; i++) {
        char *const source = pair->source + i * WRITE_BYTES;
        fill(source, i);
        const struct shoal_network_write write = {.load = &load,
                                                  .to = &pair->registered,
                                                  .offset = i * WRITE_BYTES,
                                                  .source = source,
                                                  .bytes = i % 5   ? WRITE_BYTES - i
                                                           : i % 2 ? 0
                                                                   : 1 + i,
                                                  .immediate = pair->immediate | i % 64,
                                                  .lanes = &pair->lanes};
        while (shoal_network_put(pair->from.network, &write) == SHOAL_PENDING)
            poll_both(pair, begun_ns);
    }
    while (count > 0 || pair->target.count < WRITES)
        poll_both(pair, begun_ns);
    assert_int_equal(total, 0);
    assert_int_equal(pair->target.count, WRITES);
}

static void check_all(const struct pair *pair)
{
    for (unsigned i = 0; i < WRITES; i++) {
        const size_t bytes = i % 5 ? WRITE_BYTES - i : i % 2 ? 0 : 1 + i;
        assert_memory_equal(pair->memory + i * WRITE_BYTES, pair->source + i * WRITE_BYTES, bytes);
        for (size_t at = bytes; at < WRITE_BYTES; at++)
            assert_int_equal(pair->memory[i * WRITE_BYTES + at], 0);
    }
    for (unsigned i = 0; i < 64; i++)
        assert_int_equal(pair->target.received[i], WRITES / 64 + (i < WRITES % 64));
}

static void writes_arrive_through_all_lanes(void **state)
{
    static const int threads[][2] = {{2, 2}, {4, 4}, {3, 5}, {5, 3}, {1, 3}, {3, 1}, {16, 16}};
    struct pair pair;
    (void)state;
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        if (!open_pair(&pair, threads[i][0], threads[i][1]))
            skip();
        const unsigned before = atomic_load_explicit(&wakes, memory_order_relaxed);
        write_all(&pair);
        check_all(&pair);
        if (count_open(&pair.lanes)) /* otherwise only the endpoints of this thread were used */
            assert_true(atomic_load_explicit(&wakes, memory_order_relaxed) > before);
        close_pair(&pair);
    }
}

/* A network that closes while its lanes send, and peers that never receive. */
static void a_network_closes_while_lanes_send(void **state)
{
    struct pair pair;
    unsigned count = 0, total = 0;
    (void)state;
    if (!open_pair(&pair, 3, 3))
        skip();
    struct shoal_network_load load = {.peer = pair.peer, .count = &count, .total = &total};
    for (unsigned i = 0; i < WRITES; i++) {
        const struct shoal_network_write write = {.load = &load,
                                                  .to = &pair.registered,
                                                  .offset = i * WRITE_BYTES,
                                                  .source = pair.source + i * WRITE_BYTES,
                                                  .bytes = WRITE_BYTES,
                                                  .immediate = pair.immediate | i % 64,
                                                  .lanes = &pair.lanes};
        const enum shoal_status status = shoal_network_put(pair.from.network, &write);
        assert_true(status == SHOAL_OK || status == SHOAL_PENDING);
    }
    assert_true(count > 0);
    close_pair(&pair);
}

/* Writes that no lane has begun are given back when they are dropped; the others arrive. */
static void dropped_writes_come_back(void **state)
{
    struct pair pair;
    unsigned counts[2] = {0}, total = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    struct shoal_network_load loads[2];
    const uint64_t begun_ns = shoal_clock_ns();
    for (int i = 0; i < 2; i++)
        loads[i] = (struct shoal_network_load){.peer = pair.peer, .count = &counts[i], .total = &total};
    for (unsigned i = 0; i < 60; i++) {
        const struct shoal_network_write write = {.load = &loads[i % 2],
                                                  .to = &pair.registered,
                                                  .offset = i * WRITE_BYTES,
                                                  .source = pair.source + i * WRITE_BYTES,
                                                  .bytes = WRITE_BYTES,
                                                  .immediate = pair.immediate | i,
                                                  .lanes = &pair.lanes};
        while (shoal_network_put(pair.from.network, &write) == SHOAL_PENDING)
            poll_both(&pair, begun_ns);
    }
    shoal_network_drop_lanes(pair.from.network, &loads[0], &loads[1]);
    while (total > 0)
        poll_both(&pair, begun_ns);
    for (unsigned i = 1; i < 60; i += 2) {
        while (!pair.target.received[i])
            poll_both(&pair, begun_ns);
    }
    close_pair(&pair);
}

/* A rank that computes for a long time: its lanes receive, until too many events wait. The rest waits in the network, nothing
 * is lost, and the lane's thread sleeps meanwhile. */
#define MANY_WRITES 3000
#define SMALL_BYTES ((size_t)16 << 10)

static void events_that_nobody_polls_hold_up_the_peer(void **state)
{
    struct pair pair;
    unsigned count = 0, total = 0, sent = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    struct shoal_network_load load = {.peer = pair.peer, .count = &count, .total = &total};
    const uint64_t begun_ns = shoal_clock_ns();
    uint64_t moved_ns = begun_ns;
    fill(pair.source, 5);
    while (sent < MANY_WRITES) {
        const struct shoal_network_write write = {.load = &load,
                                                  .to = &pair.registered,
                                                  .offset = sent % WRITES * WRITE_BYTES,
                                                  .source = pair.source,
                                                  .bytes = SMALL_BYTES,
                                                  .immediate = pair.immediate | sent % 64,
                                                  .lanes = &pair.lanes};
        const uint64_t now_ns = shoal_clock_ns();
        if (shoal_network_put(pair.from.network, &write) == SHOAL_OK) {
            sent++;
            moved_ns = now_ns;
        } else if (now_ns - moved_ns > 300 * SHOAL_NS_PER_MS) {
            poll_both(&pair, begun_ns);
        } else {
            shoal_network_poll(pair.from.network);
        }
    }
    while (count > 0 || pair.target.count < MANY_WRITES)
        poll_both(&pair, begun_ns);
    assert_int_equal(pair.target.count, MANY_WRITES);
    for (unsigned i = 0; i < WRITES; i++)
        assert_memory_equal(pair.memory + i * WRITE_BYTES, pair.source, SMALL_BYTES);
    close_pair(&pair);
}

/* Lets the thread sleep. Returns the CPU time of this process, in percent. */
static unsigned rest(uint64_t sleep_ns)
{
    struct timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep((useconds_t)(sleep_ns / 1000));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const uint64_t used_ns =
        (uint64_t)(after.tv_sec - before.tv_sec) * SHOAL_NS_PER_S + (uint64_t)after.tv_nsec - (uint64_t)before.tv_nsec;
    return (unsigned)(used_ns * 100 / sleep_ns);
}

/* Its thread also sleeps if this rank has posted a write that can only begin after a poll. */
static void a_write_waits_for_a_poll(void **state)
{
    struct pair pair;
    struct shoal_network_lanes back;
    struct shoal_network_lane_memory memory = {0};
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_peer *from;
    unsigned counts[2] = {0}, total = 0, sent = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    const struct shoal_network_peer known = {.address = *shoal_network_address(pair.from.network)};
    struct shoal_network_write write = {
        .to = &pair.registered, .source = pair.source, .bytes = SMALL_BYTES, .lanes = &pair.lanes};
    struct shoal_network_load loads[2];
    assert_int_equal(shoal_network_meet(pair.to.network, &known, &from), SHOAL_OK);
    for (int i = 0; i < 2; i++)
        loads[i] = (struct shoal_network_load){.peer = i ? from : pair.peer, .count = &counts[i], .total = &total};
    assert_int_equal(shoal_network_register_lanes(pair.from.network, pair.source, SMALL_BYTES, &memory), SHOAL_OK);
    struct shoal_network_channel channel = {.comm = 8};
    assert_int_equal(shoal_network_offer_lanes(pair.from.network, &channel, 0, &memory, offers), 1);
    assert_int_equal(shoal_network_meet_lanes(pair.to.network, offers, 1, &back), SHOAL_OK);
    const uint64_t begun_ns = shoal_clock_ns();
    for (uint64_t moved_ns = begun_ns; shoal_clock_ns() - moved_ns < 300 * SHOAL_NS_PER_MS;) {
        write.load = &loads[0];
        write.immediate = pair.immediate | sent % 64;
        if (shoal_network_put(pair.from.network, &write) == SHOAL_OK) {
            sent++;
            moved_ns = shoal_clock_ns();
        }
        shoal_network_poll(pair.from.network);
    }
    write.load = &loads[1];
    write.source = pair.memory;
    write.lanes = &back;
    assert_int_equal(shoal_network_put(pair.to.network, &write), SHOAL_OK);
    assert_in_range(rest(500 * SHOAL_NS_PER_MS), 0, 25);
    while (total > 0 || pair.target.count < sent)
        poll_both(&pair, begun_ns);
    shoal_network_part_lanes(pair.to.network, &back);
    shoal_network_unregister_lanes(pair.from.network, &memory);
    shoal_network_channel_close(pair.from.network, &channel);
    close_pair(&pair);
}

/* A stranger that knows a lane's address may send messages there. They are counted, whatever their length, and the lane
 * works on. */
static void messages_to_a_lane_are_rejected(void **state)
{
    static char body[3000];
    struct pair pair;
    struct shoal_network_peer *lane;
    unsigned count = 0, total = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    shoal_network_offer_lanes(pair.to.network, &pair.channel, 3, &pair.lane_memory, offers);
    const struct shoal_network_peer known = {.address = offers[0].address};
    assert_int_equal(shoal_network_meet(pair.from.network, &known, &lane), SHOAL_OK);
    struct shoal_network_load load = {.peer = lane, .count = &count, .total = &total, .is_messages = true};
    const struct shoal_network_head head = {.comm = 7};
    const uint64_t begun_ns = shoal_clock_ns();
    for (size_t i = 0; i < 20; i++) {
        const struct iovec part = {body, i * 150};
        assert_int_equal(shoal_network_send(pair.from.network, &load, &head, &part, 1), SHOAL_OK);
    }
    while (count > 0 || shoal_network_rejections(pair.to.network)->counts[SHOAL_REJECTED_SHORT] < 20)
        poll_both(&pair, begun_ns);
    write_all(&pair);
    check_all(&pair);
    close_pair(&pair);
}

static void ignore_address(void *arg, const struct shoal_fabric_address *address)
{
    (void)arg, (void)address;
}

/* Makes the address one that refuses connections: its port is bound, but nothing listens there. Returns the descriptor. */
static int open_refusing(struct shoal_fabric_address *at)
{
    struct sockaddr_in address;
    socklen_t bytes = sizeof address;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    memcpy(&address, at->at, sizeof address);
    if (address.sin_family != AF_INET)
        skip();
    address.sin_port = 0;
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
    memcpy(at->at, &address, sizeof address);
    return fd;
}

/* Listens, but never answers, like the process of a peer that is stopped. Returns the descriptor. */
static int open_silent(struct shoal_network_lane_offer *offer)
{
    const int fd = open_refusing(&offer->address);
    assert_int_equal(listen(fd, 8), 0);
    return fd;
}

/* A peer that does not answer delays no writes to others. Its own are given back when they are dropped. */
static void a_silent_peer_delays_no_other(void **state)
{
    struct pair pair;
    struct shoal_network_lanes silent;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    unsigned count = 0, total = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    assert_int_equal(shoal_network_offer_lanes(pair.to.network, &pair.channel, 3, &pair.lane_memory, offers), 1);
    const int fd = open_silent(&offers[0]);
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &silent), SHOAL_OK);
    struct shoal_network_load load = {.peer = pair.peer, .count = &count, .total = &total};
    const struct shoal_network_write write = {.load = &load,
                                              .to = &pair.registered,
                                              .source = pair.source,
                                              .bytes = WRITE_BYTES,
                                              .immediate = pair.immediate,
                                              .lanes = &silent};
    assert_int_equal(shoal_network_put(pair.from.network, &write), SHOAL_OK);
    write_all(&pair);
    check_all(&pair);
    assert_int_equal(count, 1);
    const uint64_t begun_ns = shoal_clock_ns();
    shoal_network_drop_lanes(pair.from.network, &load, &load + 1);
    while (count > 0)
        poll_both(&pair, begun_ns);
    shoal_network_part_lanes(pair.from.network, &silent);
    close_pair(&pair);
    close(fd);
}

/* A probe that no peer answers does not keep the lane's thread awake for ever. The address is one of another program. */
static void a_probe_that_nobody_accepts_ends(void **state)
{
    struct pair pair;
    struct shoal_network_lanes silent;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    unsigned count = 0, total = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    assert_int_equal(shoal_network_offer_lanes(pair.to.network, &pair.channel, 3, &pair.lane_memory, offers), 1);
    offers[0].is_apart = 1;
    const int fd = open_silent(&offers[0]);
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &silent), SHOAL_OK);
    struct shoal_network_load load = {.peer = pair.peer, .count = &count, .total = &total};
    const struct shoal_network_write write = {.load = &load,
                                              .to = &pair.registered,
                                              .source = pair.source,
                                              .bytes = WRITE_BYTES,
                                              .immediate = pair.immediate,
                                              .lanes = &silent};
    const uint64_t begun_ns = shoal_clock_ns();
    pair.from.log.level = SHOAL_LOG_DEBUG;
    logged[0] = 0;
    while (shoal_network_put(pair.from.network, &write) == SHOAL_PENDING)
        poll_both(&pair, begun_ns);
    while (count > 0 || !strstr(logged, "a lane does not reach a peer"))
        poll_both(&pair, begun_ns);
    assert_int_equal(count_open(&silent), 0);
    shoal_network_part_lanes(pair.from.network, &silent);
    close_pair(&pair);
    close(fd);
}

/* A lane of a provider over TCP, or of another one that has internet addresses, sends a probe to itself. Returns the state of
 * the check. */
static enum shoal_reachability_state check_of_probe(bool is_over_tcp)
{
    struct side side = {.network = NULL};
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    struct shoal_network_lane_memory memory = {0};
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_lanes lanes;
    char reason[1200];
    static char bytes[WRITE_BYTES];
    assert_int_equal(shoal_settings_load(&side.settings, NULL, reason, sizeof reason), SHOAL_OK);
    shoal_log_init(&side.log, &side.settings.log, keep_line, NULL);
    if (shoal_fabric_library_open("", &side.log, &library) != SHOAL_OK)
        skip();
    shoal_fabric_providers_find_best(&library, NULL, "", false, (struct shoal_fabric_share){0}, providers);
    const struct shoal_fabric_provider *provider = shoal_fabric_providers_choose(providers, "", reason, sizeof reason);
    if (!provider || !provider->is_over_tcp)
        skip();
    struct shoal_lane_set set = {.log = &side.log, .is_over_tcp = is_over_tcp};
    const struct shoal_lane_options options = {
        .library = &library, .info = provider->info, .log = &side.log, .number = 1, .wake = count_wake};
    assert_int_equal(shoal_lane_set_add(&set, &options, &(struct shoal_lane_site){NULL, true}), SHOAL_OK);
    assert_int_equal(shoal_lane_set_offer(&set, &memory, 1u << 10, offers), 1);
    assert_int_equal(shoal_lane_set_meet(&set, offers, 1, &lanes, ignore_address, NULL), SHOAL_OK);
    const struct shoal_fabric_write write = {.source = bytes, .bytes = sizeof bytes};
    assert_int_equal(shoal_lane_set_put(&set, &lanes, &write, NULL, 0), SHOAL_PENDING);
    const enum shoal_reachability_state found = lanes.lane[0].reachability.state;
    shoal_lane_set_part(&set, &lanes);
    shoal_lane_set_stop(&set);
    shoal_lane_set_close(&set);
    shoal_fabric_providers_free(&library, providers);
    shoal_fabric_library_close(&library);
    shoal_log_fini(&side.log);
    return found;
}

/* The port of a provider that is not over TCP refuses connections of TCP, which would look like a firewall. */
static void only_lanes_over_tcp_are_checked_by_tcp(void **state)
{
    (void)state;
    assert_int_equal(check_of_probe(true), SHOAL_REACHABILITY_TRIED);
    assert_int_equal(check_of_probe(false), SHOAL_REACHABILITY_SETTLED);
}

/* A write that was dropped has reached nobody: that the peer cannot be reached is still found out. */
static void a_dropped_write_shows_no_peer_reachable(void **state)
{
    struct pair pair;
    struct shoal_network_lanes silent;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_peer *peer;
    unsigned count = 0, total = 0;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    assert_int_equal(shoal_network_offer_lanes(pair.to.network, &pair.channel, 3, &pair.lane_memory, offers), 1);
    struct shoal_network_peer known = {.address = *shoal_network_address(pair.to.network)};
    const int lane_fd = open_silent(&offers[0]), fd = open_refusing(&known.address);
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &silent), SHOAL_OK);
    assert_int_equal(shoal_network_meet(pair.from.network, &known, &peer), SHOAL_OK);
    struct shoal_network_load load = {.peer = peer, .count = &count, .total = &total};
    const struct shoal_network_write write = {.load = &load,
                                              .to = &pair.registered,
                                              .source = pair.source,
                                              .bytes = WRITE_BYTES,
                                              .immediate = pair.immediate,
                                              .lanes = &silent};
    const uint64_t begun_ns = shoal_clock_ns();
    assert_int_equal(shoal_network_put(pair.from.network, &write), SHOAL_OK);
    shoal_network_drop_lanes(pair.from.network, &load, &load + 1);
    while (count > 0)
        poll_both(&pair, begun_ns);
    while (!peer->broken_ns)
        poll_both(&pair, begun_ns);
    assert_non_null(strstr(peer->broken, "refused"));
    shoal_network_part_lanes(pair.from.network, &silent);
    close_pair(&pair);
    close(lane_fd);
    close(fd);
}

/* After many wakes for nothing the lane's thread looks only from time to time. It tries the descriptor again later, and the
 * lane works in between. */
static void a_descriptor_that_wakes_for_nothing_is_tried_again(void **state)
{
    struct pair pair;
    (void)state;
    if (!open_pair(&pair, 2, 2))
        skip();
    atomic_store(&wakes_in_vain, true);
    const uint64_t begun_ns = shoal_clock_ns();
    while (!atomic_load(&waits_without)) { /* not polled: a poll wakes the thread */
        assert_true(shoal_clock_ns() - begun_ns < PATIENCE_NS);
        usleep(10000);
    }
    const unsigned before = atomic_load(&vain_wakes);
    assert_true(before >= 100);
    write_all(&pair);
    check_all(&pair);
    while (atomic_load(&vain_wakes) < before + 5000) { /* more than both lanes have at once */
        assert_true(shoal_clock_ns() - begun_ns < PATIENCE_NS);
        usleep(10000);
    }
    atomic_store(&wakes_in_vain, false);
    close_pair(&pair);
}

/* ---- Connections --------------------------------------------------------------------------------------------------------- */

#define DESCRIPTORS 1024

struct connections {
    unsigned count, open_on_exec;
};

static ino_t old[DESCRIPTORS]; /* sockets that are not counted: libfabric keeps some of endpoints that are closed */

/* Returns the number of a socket that has a peer, or 0. */
static ino_t socket_of(int fd)
{
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    struct stat about;
    if (getpeername(fd, (struct sockaddr *)&peer, &bytes) != 0 || peer.ss_family == AF_UNIX || fstat(fd, &about) != 0)
        return 0;
    return about.st_ino;
}

static void forget_connections(void)
{
    for (int fd = 3; fd < DESCRIPTORS; fd++)
        old[fd] = socket_of(fd);
}

static struct connections count_connections(void)
{
    struct connections found = {0};
    for (int fd = 3; fd < DESCRIPTORS; fd++) {
        const ino_t number = socket_of(fd);
        if (!number || number == old[fd])
            continue;
        found.count++;
        found.open_on_exec += !(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    }
    return found;
}

/* Fails if a connection stays open in programs that children exec. */
static struct connections wait_for_seals(struct pair *pair)
{
    const uint64_t begun_ns = shoal_clock_ns();
    while (count_connections().open_on_exec)
        poll_both(pair, begun_ns);
    return count_connections();
}

/* Writes that come one by one go through the first lane. The other lanes connect when several are under way. */
static void connections_of_all_lanes_are_sealed(void **state)
{
    struct pair pair;
    unsigned count = 0, total = 0;
    (void)state;
    forget_connections();
    if (!open_pair(&pair, 4, 4))
        skip();
    struct shoal_network_load load = {.peer = pair.peer, .count = &count, .total = &total};
    const struct shoal_network_write write = {.load = &load,
                                              .to = &pair.registered,
                                              .source = pair.source,
                                              .bytes = WRITE_BYTES,
                                              .immediate = pair.immediate,
                                              .lanes = &pair.lanes};
    const uint64_t begun_ns = shoal_clock_ns();
    assert_int_equal(shoal_network_put(pair.from.network, &write), SHOAL_OK);
    while (count > 0 || pair.target.count == 0)
        poll_both(&pair, begun_ns);
    const struct connections first = wait_for_seals(&pair);
    assert_int_equal(first.count, 2); /* both ends */
    memset(&pair.target, 0, sizeof pair.target);
    write_all(&pair);
    const struct connections all = wait_for_seals(&pair);
    assert_int_equal(all.count, 2 * 4); /* of three lanes, and of the endpoint */
    close_pair(&pair);
}

/* ---- Lanes at other adapters --------------------------------------------------------------------------------------------- */

/* They are closed until the peer reports their probes. Reports that nobody asked for open nothing. */
static void a_lane_elsewhere_proves_itself(void **state)
{
    struct pair pair;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    (void)state;
    if (open_pair_apart(&pair, 3, 3, offers) < 0)
        skip();
    offers[0].is_apart = offers[1].is_apart = 1;
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 2, &pair.lanes), SHOAL_OK);
    for (uint64_t number = 0; number < 20; number++)
        shoal_network_lane_reached(pair.from.network, &pair.lanes, number);
    shoal_network_lane_reached(pair.from.network, &pair.lanes, UINT64_MAX);
    assert_int_equal(count_open(&pair.lanes), 0);
    write_all(&pair);
    check_all(&pair);
    const uint64_t begun_ns = shoal_clock_ns();
    while (pair.target.reached != 3)
        poll_both(&pair, begun_ns);
    assert_int_equal(count_open(&pair.lanes), 0);
    assert_int_equal(pair.lanes.lane[0].bytes + pair.lanes.lane[1].bytes, 0);
    shoal_network_lane_reached(pair.from.network, &pair.lanes, 1);
    shoal_network_lane_reached(pair.from.network, &pair.lanes, 0);
    assert_int_equal(count_open(&pair.lanes), 2);
    memset(&pair.target, 0, sizeof pair.target);
    write_all(&pair);
    check_all(&pair);
    assert_true(pair.lanes.lane[0].bytes > 0 && pair.lanes.lane[1].bytes > 0);
    assert_int_equal(pair.target.reached, 0);
    close_pair(&pair);
}

/* Without an immediate for probes, a lane stays closed. */
static void a_lane_elsewhere_without_a_probe_is_not_used(void **state)
{
    struct pair pair;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    (void)state;
    if (open_pair_apart(&pair, 2, 2, offers) < 0)
        skip();
    offers[0].is_apart = 1;
    offers[0].probe = 0;
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &pair.lanes), SHOAL_OK);
    write_all(&pair);
    check_all(&pair);
    shoal_network_lane_reached(pair.from.network, &pair.lanes, 0);
    assert_int_equal(pair.target.reached, 0);
    assert_int_equal(pair.lanes.lane[0].bytes, 0);
    close_pair(&pair);
}

/* Nobody listens at the lane's address: data go through the first endpoint, and one line names the cause. */
static void a_lane_that_leads_nowhere_is_not_used(void **state)
{
    struct pair pair;
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_lanes again;
    (void)state;
    if (open_pair_apart(&pair, 2, 2, offers) < 0)
        skip();
    const int fd = open_refusing(&offers[0].address); /* nobody else can listen there meanwhile */
    offers[0].is_apart = 1;
    logged[0] = 0;
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &pair.lanes), SHOAL_OK);
    assert_int_equal(shoal_network_meet_lanes(pair.from.network, offers, 1, &again), SHOAL_OK);
    const uint64_t begun_ns = shoal_clock_ns();
    write_all(&pair);
    check_all(&pair);
    while (!strstr(logged, "so data for there use other adapters: port"))
        poll_both(&pair, begun_ns);
    expect_line("refused");
    shoal_network_part_lanes(pair.from.network, &pair.lanes);
    pair.lanes = again;
    memset(&pair.target, 0, sizeof pair.target);
    memset(pair.memory, 0, WRITES * WRITE_BYTES);
    write_all(&pair);
    check_all(&pair);
    assert_int_equal(count_open(&pair.lanes), 0);
    close_pair(&pair); /* while a probe is under way */
    close(fd);
}

/* A lane for each further adapter, whatever the number of threads over TCP. */
static void lanes_at_all_adapters(void **state)
{
    static const struct {
        int threads, most, lanes;
    } cases[] = {{1, 0, 3}, {4, 0, 3}, {1, 2, 1}, {9, 1, 0}};
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct side side = {0};
        char error[256];
        const char *const overrides[] = {"SHOAL_LIBFABRIC=" MOCK_FABRIC, "SHOAL_PROVIDER=efa", NULL};
        assert_int_equal(shoal_settings_load(&side.settings, overrides, error, sizeof error), SHOAL_OK);
        shoal_log_init(&side.log, &side.settings.log, keep_line, NULL);
        const struct shoal_network_options options = {.log = &side.log,
                                                      .settings = &side.settings.fabric,
                                                      .ports = side.settings.bootstrap.ports,
                                                      .share = {.ranks = 1, .most = cases[i].most},
                                                      .threads = cases[i].threads,
                                                      .wake = count_wake};
        assert_int_equal(shoal_network_open(&options, &side.network), SHOAL_OK);
        assert_int_equal(shoal_network_lane_count(side.network), cases[i].lanes);
        assert_int_equal(shoal_network_tries_lanes(side.network), cases[i].most == 0);
        close_side(&side);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_system_refuses_threads),
        cmocka_unit_test(ports_run_out),
        cmocka_unit_test(a_write_waits_for_a_poll),
        cmocka_unit_test(an_adapter_needs_no_lanes),
        cmocka_unit_test(messages_need_no_lanes),
        cmocka_unit_test(writes_arrive_through_all_lanes),
        cmocka_unit_test(a_network_closes_while_lanes_send),
        cmocka_unit_test(dropped_writes_come_back),
        cmocka_unit_test(messages_to_a_lane_are_rejected),
        cmocka_unit_test(a_silent_peer_delays_no_other),
        cmocka_unit_test(a_probe_that_nobody_accepts_ends),
        cmocka_unit_test(only_lanes_over_tcp_are_checked_by_tcp),
        cmocka_unit_test(a_dropped_write_shows_no_peer_reachable),
        cmocka_unit_test(a_descriptor_that_wakes_for_nothing_is_tried_again),
        cmocka_unit_test(connections_of_all_lanes_are_sealed),
        cmocka_unit_test(events_that_nobody_polls_hold_up_the_peer),
        cmocka_unit_test(a_lane_elsewhere_proves_itself),
        cmocka_unit_test(a_lane_elsewhere_without_a_probe_is_not_used),
        cmocka_unit_test(a_lane_that_leads_nowhere_is_not_used),
        cmocka_unit_test(lanes_at_all_adapters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
