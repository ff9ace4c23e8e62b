/* A forked child keeps nothing of its parent's endpoints, but every other descriptor. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "transport/fabric/fork.h"
#include "transport/fabric/network.h"
#include "../../free_port.h"

/* Read by the leak checker: endpoints of libfabric leak some of their descriptions. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so";
}

#define PATIENCE_NS (20 * SHOAL_NS_PER_S)
#define DESCRIPTORS 1024

/* Settings, each with a free port. */
static char own_ports[32], peer_ports[32];

/* An endpoint at a port, like a context's. */
struct side {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_network *network;
};

static enum shoal_status open_side(struct side *side, const char *port)
{
    const char *const overrides[] = {port, NULL};
    char error[256];
    assert_int_equal(shoal_settings_load(&side->settings, overrides, error, sizeof error), SHOAL_OK);
    shoal_log_init(&side->log, &side->settings.log, NULL, NULL);
    const struct shoal_network_options options = {
        .log = &side->log, .settings = &side->settings.fabric, .ports = side->settings.bootstrap.ports};
    return shoal_network_open(&options, &side->network);
}

static void close_side(struct side *side)
{
    shoal_network_close(side->network);
    shoal_log_fini(&side->log);
}

/* Sends a message to the endpoint at that address, so that the two are connected. */
static void send_to(struct side *side, const struct shoal_fabric_address *address)
{
    struct shoal_network_peer known = {.address = *address}, *peer;
    const struct shoal_network_head head = {.comm = 7};
    unsigned count = 0, total = 0;
    assert_int_equal(shoal_network_meet(side->network, &known, &peer), SHOAL_OK);
    struct shoal_network_load load = {.peer = peer, .count = &count, .total = &total, .is_messages = true};
    const uint64_t begun_ns = shoal_clock_ns();
    assert_int_equal(shoal_network_send(side->network, &load, &head, NULL, 0), SHOAL_OK);
    while (count > 0) {
        assert_true(shoal_clock_ns() - begun_ns < PATIENCE_NS);
        shoal_network_poll(side->network);
    }
}

/* ---- Other processes ----------------------------------------------------------------------------------------------------- */

/* A child that writes something to a pipe and then waits until the pipe ends. It polls meanwhile if it has an endpoint. */
struct child {
    pid_t pid;
    int from, to;
};

static void wait_for_end(int from, struct side *side)
{
    struct pollfd entry = {from, POLLIN, 0};
    while (poll(&entry, 1, 1) == 0) {
        if (side)
            shoal_network_poll(side->network);
    }
}

/* Returns true in the child. */
static bool start_child(struct child *child)
{
    int up[2], down[2];
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    child->pid = fork();
    assert_true(child->pid >= 0);
    const bool is_child = child->pid == 0;
    child->from = is_child ? down[0] : up[0];
    child->to = is_child ? up[1] : down[1];
    close(is_child ? down[1] : up[1]);
    close(is_child ? up[0] : down[0]);
    return is_child;
}

static void end_child(const struct child *child)
{
    int state;
    close(child->to);
    close(child->from);
    assert_int_equal(waitpid(child->pid, &state, 0), child->pid);
    assert_int_equal(state, 0);
}

/* Starts an endpoint in its own process. Returns false if there is no libfabric. */
static bool start_peer(struct child *child, struct shoal_fabric_address *address_out)
{
    struct side side;
    memset(address_out, 0, sizeof *address_out);
    if (start_child(child)) {
        if (open_side(&side, peer_ports) == SHOAL_OK) {
            *address_out = *shoal_network_address(side.network);
            const bool is_told = write(child->to, address_out, sizeof *address_out) == sizeof *address_out;
            wait_for_end(child->from, &side);
            close_side(&side);
            _exit(!is_told);
        }
        _exit(write(child->to, address_out, sizeof *address_out) != sizeof *address_out);
    }
    assert_int_equal(read(child->from, address_out, sizeof *address_out), sizeof *address_out);
    return address_out->bytes > 0;
}

static int count_sockets(void)
{
    int count = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        struct sockaddr_storage own;
        socklen_t bytes = sizeof own;
        count +=
            getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 && (own.ss_family == AF_INET || own.ss_family == AF_INET6);
    }
    return count;
}

/* Starts a child that reports how many internet sockets it has. */
static void start_counter(struct child *child, int *count_out)
{
    if (start_child(child)) {
        const int count = count_sockets();
        const bool is_told = write(child->to, &count, sizeof count) == sizeof count;
        wait_for_end(child->from, NULL);
        _exit(!is_told);
    }
    assert_int_equal(read(child->from, count_out, sizeof *count_out), sizeof *count_out);
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void fork_child_keeps_no_socket_of_an_endpoint(void **state)
{
    struct shoal_fabric_address address;
    struct child peer, counter;
    struct side side;
    int count;
    (void)state;
    if (!start_peer(&peer, &address)) {
        end_child(&peer);
        skip();
    }
    assert_int_equal(open_side(&side, own_ports), SHOAL_OK);
    send_to(&side, &address);
    const int of_others = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(count_sockets() >= 3); /* that one, a listening one, a connected one */
    start_counter(&counter, &count);
    assert_int_equal(count, 1);
    send_to(&side, &address); /* in the parent all continues */
    close(of_others);
    close_side(&side);
    assert_int_equal(open_side(&side, own_ports), SHOAL_OK); /* its port is free although the child lives */
    close_side(&side);
    end_child(&counter);
    end_child(&peer);
}

/* A descriptor number that an endpoint used before, now another socket's. */
static void fork_child_keeps_what_is_not_the_endpoints(void **state)
{
    struct sockaddr_in own;
    struct child counter;
    struct side side;
    int count;
    (void)state;
    const enum shoal_status status = open_side(&side, own_ports);
    if (status == SHOAL_ERR_UNSUPPORTED) { /* no libfabric */
        shoal_log_fini(&side.log);
        skip();
    }
    assert_int_equal(status, SHOAL_OK);
    memcpy(&own, shoal_network_address(side.network)->at, sizeof own);
    close_side(&side);
    const int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(other, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    assert_int_equal(bind(other, (const struct sockaddr *)&own, sizeof own), 0);
    start_counter(&counter, &count);
    assert_int_equal(count, 1);
    end_child(&counter);
    close(other);
}

/* posix_spawn runs no fork handlers. It starts this program again, which counts the sockets that it inherited. */
static void spawned_program_keeps_no_socket_of_an_endpoint(void **state)
{
    char program[] = "/proc/self/exe", count_word[] = "count";
    char *const words[] = {program, count_word, NULL};
    struct shoal_fabric_address address;
    struct child peer;
    struct side side;
    pid_t pid;
    int ended;
    (void)state;
    if (!start_peer(&peer, &address)) {
        end_child(&peer);
        skip();
    }
    assert_int_equal(open_side(&side, own_ports), SHOAL_OK);
    const int of_others = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(posix_spawn(&pid, program, NULL, NULL, words, environ), 0); /* the endpoint listens */
    assert_int_equal(waitpid(pid, &ended, 0), pid);
    assert_int_equal(WEXITSTATUS(ended), 1);
    send_to(&side, &address);
    assert_int_equal(posix_spawn(&pid, program, NULL, NULL, words, environ), 0); /* and is also connected */
    assert_int_equal(waitpid(pid, &ended, 0), pid);
    assert_int_equal(WEXITSTATUS(ended), 1);
    send_to(&side, &address);
    close(of_others);
    close_side(&side);
    end_child(&peer);
}

/* ---- Cost ---------------------------------------------------------------------------------------------------------------- */

#define PEERS_MANY 16384
#define SOCKETS_MANY 800
#define SEALS 20

static struct sockaddr_in address_of(uint32_t number)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)(1024 + number % 50000)),
                                .sin_addr.s_addr = htonl(0x0a000000 + number * 2654435761u % 0x00ffffff)};
}

static double cpu_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static const char owner;

static void note_peers(uint32_t first, uint32_t end)
{
    for (uint32_t i = first; i < end; i++) {
        const struct sockaddr_in in = address_of(i);
        struct shoal_fabric_address address = {.bytes = sizeof in};
        memcpy(address.at, &in, sizeof in);
        shoal_fabric_fork_note(&owner, &address);
    }
}

static double time_seals(void)
{
    const double before = cpu_ms();
    for (int i = 0; i < SEALS; i++)
        shoal_fabric_fork_seal();
    return cpu_ms() - before;
}

/* Each descriptor is not compared with every peer. */
static void seal_takes_no_longer_with_many_peers(void **state)
{
    const struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int sockets[SOCKETS_MANY];
    (void)state;
    for (int i = 0; i < SOCKETS_MANY; i++) {
        sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
        assert_true(sockets[i] >= 0);
        assert_int_equal(bind(sockets[i], (const struct sockaddr *)&loopback, sizeof loopback), 0);
    }
    note_peers(0, 1);
    const double with_one = time_seals();
    note_peers(1, PEERS_MANY);
    assert_true(time_seals() < 4 * with_one + 10);
    for (int i = 0; i < SOCKETS_MANY; i++) {
        assert_int_equal(fcntl(sockets[i], F_GETFD), 0); /* not an endpoint's */
        close(sockets[i]);
    }
    shoal_fabric_fork_forget(&owner);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return strcmp(argv[1], "count") == 0 ? count_sockets() : 99;
    const int port = free_port(); /* this process's until it ends, as are those after it */
    snprintf(own_ports, sizeof own_ports, "SHOAL_PORTS=%d", port);
    snprintf(peer_ports, sizeof peer_ports, "SHOAL_PORTS=%d", port + 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fork_child_keeps_no_socket_of_an_endpoint),
        cmocka_unit_test(fork_child_keeps_what_is_not_the_endpoints),
        cmocka_unit_test(spawned_program_keeps_no_socket_of_an_endpoint),
        cmocka_unit_test(seal_takes_no_longer_with_many_peers),
    };
    return cmocka_run_group_tests_name("fabric_fork", tests, NULL, NULL);
}
