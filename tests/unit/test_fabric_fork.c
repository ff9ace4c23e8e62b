/* What a forked child keeps of its parent's endpoints: nothing of theirs, all of others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/fabric/network.h"

/* Read by the leak checker: endpoints of libfabric leave some of their descriptions behind. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so";
}

#define PATIENCE_NS (20 * SHOAL_NS_PER_S)
#define DESCRIPTORS 1024

/* An endpoint at a port, as a context has it. */
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
    shoal_log_init(&side->log, &side->settings, NULL, NULL);
    const struct shoal_network_options options = {.log = &side->log, .settings = &side->settings};
    return shoal_network_open(&options, &side->network);
}

static void close_side(struct side *side)
{
    shoal_network_close(side->network);
    shoal_log_fini(&side->log);
}

/* A message from one to the other, so that they are connected. */
static void connect_sides(struct side *from, struct side *to)
{
    struct shoal_network_peer known = {.address = *shoal_network_address(to->network)}, *peer;
    const struct shoal_network_head head = {.comm = 7};
    unsigned count = 0, total = 0;
    assert_int_equal(shoal_network_meet(from->network, &known, &peer), SHOAL_OK);
    struct shoal_network_load load = {peer, &count, &total, true};
    const uint64_t begun_ns = shoal_clock_ns();
    assert_int_equal(shoal_network_send(from->network, &load, &head, NULL, 0), SHOAL_OK);
    while (count > 0) {
        assert_true(shoal_clock_ns() - begun_ns < PATIENCE_NS);
        shoal_network_poll(from->network);
        shoal_network_poll(to->network);
    }
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

/* A child that says how many internet sockets it has, and then stays until the pipe ends. */
static pid_t fork_counter(int *pipe_out, int *count_out)
{
    int up[2], down[2];
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const int count = count_sockets();
        char byte;
        close(down[1]);
        _exit(write(up[1], &count, sizeof count) != sizeof count || read(down[0], &byte, 1) != 0);
    }
    assert_int_equal(read(up[0], count_out, sizeof *count_out), sizeof *count_out);
    close(up[0]);
    close(up[1]);
    close(down[0]);
    *pipe_out = down[1];
    return child;
}

static void end_counter(pid_t child, int pipe)
{
    int state;
    close(pipe);
    assert_int_equal(waitpid(child, &state, 0), child);
    assert_int_equal(state, 0);
}

static void fork_child_keeps_no_socket_of_an_endpoint(void **state)
{
    struct side first, second;
    int pipe, count;
    (void)state;
    const enum shoal_status status = open_side(&first, "SHOAL_PORTS=23481");
    if (status == SHOAL_ERR_UNSUPPORTED) { /* no libfabric */
        shoal_log_fini(&first.log);
        skip();
    }
    assert_int_equal(status, SHOAL_OK);
    assert_int_equal(open_side(&second, "SHOAL_PORTS=23482"), SHOAL_OK);
    connect_sides(&first, &second);
    const int of_others = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(count_sockets() >= 5); /* two listen, two are connected */
    const pid_t child = fork_counter(&pipe, &count);
    assert_int_equal(count, 1);
    connect_sides(&first, &second); /* here all goes on */
    close(of_others);
    close_side(&first);
    close_side(&second);
    assert_int_equal(open_side(&first, "SHOAL_PORTS=23481"), SHOAL_OK); /* its port is free though the child lives */
    close_side(&first);
    end_counter(child, pipe);
}

static void fork_child_keeps_what_was_closed_before(void **state)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(23481)};
    struct side side;
    int pipe, count;
    (void)state;
    const enum shoal_status status = open_side(&side, "SHOAL_PORTS=23481");
    if (status == SHOAL_ERR_UNSUPPORTED) {
        shoal_log_fini(&side.log);
        skip();
    }
    assert_int_equal(status, SHOAL_OK);
    memcpy(&own, shoal_network_address(side.network)->at, sizeof own);
    close_side(&side);
    const int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* another's, where the endpoint was */
    setsockopt(other, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    assert_int_equal(bind(other, (const struct sockaddr *)&own, sizeof own), 0);
    const pid_t child = fork_counter(&pipe, &count);
    assert_int_equal(count, 1);
    end_counter(child, pipe);
    close(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fork_child_keeps_no_socket_of_an_endpoint),
        cmocka_unit_test(fork_child_keeps_what_was_closed_before),
    };
    return cmocka_run_group_tests_name("fabric_fork", tests, NULL, NULL);
}
