/* Links that are tested over the loopback interface: answered, refused, and unanswered ones. The test sets the time; the
 * kernel's answers are real. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/fabric/reachability.h"

#define BEGIN_NS (1000 * SHOAL_NS_PER_S)
#define PATIENCE_MS 5000

/* A check from 127.0.0.2 to a socket of ours, and its reports. */
struct trial {
    struct shoal_reachability_checks checks;
    struct shoal_reachability check;
    int socket;
    struct shoal_fabric_address to;
    uint64_t now_ns;
    unsigned told;
    char text[SHOAL_REACHABILITY_TEXT_MAX];
};

static void on_broken(void *arg, struct shoal_reachability *check, const char *text)
{
    struct trial *trial = arg;
    assert_ptr_equal(check, &trial->check);
    assert_int_equal(check->state, SHOAL_REACHABILITY_SETTLED);
    trial->told++;
    snprintf(trial->text, sizeof trial->text, "%s", text);
}

static struct shoal_fabric_address address_of(const char *text, uint16_t port)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct shoal_fabric_address address = {.bytes = sizeof in};
    assert_int_equal(inet_pton(AF_INET, text, &in.sin_addr), 1);
    memcpy(address.at, &in, sizeof in);
    return address;
}

/* Opens a trial whose socket is bound to a port, which refuses connections until it listens. */
static struct trial open_trial(void)
{
    struct trial trial = {.now_ns = BEGIN_NS, .socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
    const struct shoal_fabric_address from = address_of("127.0.0.2", 1), any = address_of("127.0.0.1", 0);
    struct sockaddr_in bound;
    socklen_t bytes = sizeof bound;
    assert_true(shoal_reachability_read_address(&from, &trial.checks.from));
    assert_int_equal(bind(trial.socket, (const struct sockaddr *)(const void *)any.at, any.bytes), 0);
    assert_int_equal(getsockname(trial.socket, (struct sockaddr *)&bound, &bytes), 0);
    trial.to = address_of("127.0.0.1", ntohs(bound.sin_port));
    return trial;
}

/* Call it once the trial has its final address in memory. */
static void begin(struct trial *trial)
{
    trial->checks.arg = trial;
    trial->checks.broken = on_broken;
    shoal_reachability_try(&trial->checks, &trial->check, &trial->to, trial->now_ns);
}

static void close_trial(struct trial *trial)
{
    shoal_reachability_close_all(&trial->checks);
    close(trial->socket);
}

static void look_after(struct trial *trial, uint64_t pause_ms)
{
    trial->now_ns += pause_ms * SHOAL_NS_PER_MS;
    shoal_reachability_look_all(&trial->checks, trial->now_ns);
}

/* Waits until the kernel has answered. The trial's time advances by only 5 ms a look. */
static void await(struct trial *trial)
{
    for (int i = 0; i < PATIENCE_MS && trial->check.state == SHOAL_REACHABILITY_ASKED; i++) {
        poll(NULL, 0, 1);
        look_after(trial, 5);
        assert_true(trial->now_ns < BEGIN_NS + 4 * SHOAL_NS_PER_S);
    }
}

/* Returns true if somebody has connected, and from which address. */
static bool is_asked(struct trial *trial, char from[INET_ADDRSTRLEN])
{
    struct sockaddr_in peer;
    socklen_t bytes = sizeof peer;
    const int fd = accept(trial->socket, (struct sockaddr *)&peer, &bytes);
    if (fd < 0)
        return false;
    close(fd);
    inet_ntop(AF_INET, &peer.sin_addr, from, INET_ADDRSTRLEN);
    return true;
}

/* ---- Working links ------------------------------------------------------------------------------------------------------- */

static void check_that_leaves_in_time_is_not_asked(void **state)
{
    struct trial trial = open_trial();
    char from[INET_ADDRSTRLEN];
    (void)state;
    assert_int_equal(listen(trial.socket, 4), 0);
    begin(&trial);
    look_after(&trial, 1990);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_TRIED);
    shoal_reachability_settle(&trial.checks, &trial.check);
    look_after(&trial, 60000);
    assert_null(trial.checks.open);
    assert_false(is_asked(&trial, from));
    assert_int_equal(trial.told, 0);
    close_trial(&trial);
}

/* The process does not accept, because it is busy. */
static void check_to_a_busy_process_is_there(void **state)
{
    struct trial trial = open_trial();
    char from[INET_ADDRSTRLEN];
    (void)state;
    assert_int_equal(listen(trial.socket, 4), 0);
    begin(&trial);
    look_after(&trial, 2001);
    await(&trial);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_SETTLED);
    assert_null(trial.checks.open);
    assert_int_equal(trial.told, 0);
    assert_true(is_asked(&trial, from));
    assert_string_equal(from, "127.0.0.2"); /* the endpoint's address */
    close_trial(&trial);
}

/* A rank that computes does not look for a long time, and then the check seems to have taken too long. */
static void check_that_is_looked_at_late_is_there(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    assert_int_equal(listen(trial.socket, 4), 0);
    begin(&trial);
    look_after(&trial, 60000);
    assert_int_equal(poll(&(struct pollfd){trial.socket, POLLIN, 0}, 1, PATIENCE_MS), 1);
    poll(NULL, 0, 20);
    look_after(&trial, 60000);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_SETTLED);
    assert_int_equal(trial.told, 0);
    close_trial(&trial);
}

/* ---- Links that are broken ----------------------------------------------------------------------------------------------- */

static void check_that_is_refused_is_told(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    begin(&trial);
    look_after(&trial, 2001);
    await(&trial);
    assert_int_equal(trial.told, 1);
    assert_non_null(strstr(trial.text, "refused"));
    assert_non_null(strstr(trial.text, "SHOAL_PORTS"));
    assert_null(trial.checks.open);
    close_trial(&trial);
}

/* The queue of connections is full and nobody accepts: the kernel drops more, as a firewall does. */
static void check_without_an_answer_is_told(void **state)
{
    struct trial trial = open_trial();
    int others[2];
    char port[16];
    (void)state;
    assert_int_equal(listen(trial.socket, 0), 0);
    begin(&trial);
    for (int i = 0; i < 2; i++) {
        others[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)connect(others[i], (const struct sockaddr *)&trial.check.to.socket, trial.check.to.bytes);
        poll(&(struct pollfd){others[i], POLLOUT, 0}, 1, 100);
    }
    look_after(&trial, 9000); /* late, which does not shorten the time to answer */
    look_after(&trial, 2900);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_ASKED);
    assert_int_equal(trial.told, 0);
    look_after(&trial, 101);
    assert_int_equal(trial.told, 1);
    snprintf(port, sizeof port, "port %u", ntohs(((const struct sockaddr_in *)(const void *)&trial.check.to.socket)->sin_port));
    assert_non_null(strstr(trial.text, port));
    assert_non_null(strstr(trial.text, "no answer"));
    assert_non_null(strstr(trial.text, "a firewall drops"));
    close(others[0]);
    close(others[1]);
    close_trial(&trial);
}

static void check_without_a_route_is_told(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    trial.to = address_of("255.255.255.255", 4000); /* broadcast: TCP cannot connect to it */
    begin(&trial);
    look_after(&trial, 2001);
    assert_int_equal(trial.told, 1);
    assert_non_null(strstr(trial.text, "no route from here"));
    assert_non_null(strstr(trial.text, "SHOAL_NIC"));
    close_trial(&trial);
}

static void check_is_asked_at_once_when_the_provider_fails(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    begin(&trial);
    look_after(&trial, 1);
    shoal_reachability_hurry(&trial.checks, &trial.check);
    look_after(&trial, 1);
    await(&trial);
    assert_int_equal(trial.told, 1);
    assert_true(trial.now_ns < BEGIN_NS + SHOAL_NS_PER_S);
    close_trial(&trial);
}

/* ---- The rest ------------------------------------------------------------------------------------------------------------ */

static void check_of_other_addresses_is_left_alone(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    trial.to = (struct shoal_fabric_address){.bytes = 32, .at = {0xfe, 0x80}}; /* an address like efa's */
    begin(&trial);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_SETTLED);
    assert_null(trial.checks.open);
    trial.to = address_of("127.0.0.1", 1);
    trial.checks.from.socket.ss_family = AF_INET6;
    begin(&trial);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_SETTLED);
    assert_null(trial.checks.open);
    close_trial(&trial);
}

static void check_leaves_no_descriptor(void **state)
{
    struct trial trial = open_trial();
    (void)state;
    const int next = dup(trial.socket);
    close(next);
    assert_int_equal(listen(trial.socket, 4), 0);
    begin(&trial);
    look_after(&trial, 2001);
    assert_int_equal(trial.check.state, SHOAL_REACHABILITY_ASKED);
    assert_int_equal(trial.check.fd, next);
    shoal_reachability_close_all(&trial.checks);
    assert_int_equal(fcntl(next, F_GETFD), -1);
    assert_int_equal(errno, EBADF);
    close_trial(&trial);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_that_leaves_in_time_is_not_asked),
        cmocka_unit_test(check_to_a_busy_process_is_there),
        cmocka_unit_test(check_that_is_looked_at_late_is_there),
        cmocka_unit_test(check_that_is_refused_is_told),
        cmocka_unit_test(check_without_an_answer_is_told),
        cmocka_unit_test(check_without_a_route_is_told),
        cmocka_unit_test(check_is_asked_at_once_when_the_provider_fails),
        cmocka_unit_test(check_of_other_addresses_is_left_alone),
        cmocka_unit_test(check_leaves_no_descriptor),
    };
    return cmocka_run_group_tests_name("reachability", tests, NULL, NULL);
}
