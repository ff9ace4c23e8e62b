/* A peer is described as the process that its pidfd names, whatever id it sent. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "membership/member_process.h"

static pid_t start(void)
{
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    assert_true(child > 0);
    return child;
}

static void end(pid_t child)
{
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void stop(pid_t child)
{
    int status;
    kill(child, SIGSTOP);
    assert_int_equal(waitpid(child, &status, WUNTRACED), child);
    assert_true(WIFSTOPPED(status));
}

static int open_pidfd(pid_t child)
{
    return (int)syscall(SYS_pidfd_open, child, 0);
}

static void assert_described(const struct shoal_membership_process *peer, const char *wanted)
{
    char text[200];
    shoal_membership_process_describe(peer, text, sizeof text);
    assert_string_equal(text, wanted);
}

/* The id that the peer sent may belong to another process here: the peer has its own PID namespace, or the id was used again.
 */
static void a_peer_is_who_its_pidfd_names(void **state)
{
    char wanted[200];
    const pid_t peer_pid = start(), stranger = start();
    struct shoal_membership_process peer = {.pid = stranger, .socket = -1, .pidfd = open_pidfd(peer_pid)};
    (void)state;
    if (peer.pidfd < 0) {
        end(peer_pid);
        end(stranger);
        skip();
    }
    stop(peer_pid);
    snprintf(wanted, sizeof wanted, "process %d here, stopped by a signal; `kill -CONT` continues it", peer_pid);
    assert_described(&peer, wanted);
    peer.pid = peer_pid;
    assert_described(&peer, "stopped by a signal; `kill -CONT` continues it");
    kill(peer_pid, SIGCONT);
    stop(stranger);
    peer.pid = stranger;
    snprintf(wanted, sizeof wanted, "process %d here, alive", peer_pid);
    assert_described(&peer, wanted);
    end(peer_pid);
    assert_described(&peer, "not visible from here: it is in another PID namespace, or has ended");
    end(stranger);
    close(peer.pidfd);
}

/* An older kernel has no pidfds, but reports who opened the socket. */
static void a_peer_without_a_pidfd_is_who_opened_its_socket(void **state)
{
    int pair[2];
    const pid_t stranger = start();
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    stop(stranger);
    struct shoal_membership_process peer = {.pid = stranger, .socket = pair[0], .pidfd = -1};
    char text[200];
    shoal_membership_process_describe(&peer, text, sizeof text);
    assert_non_null(strstr(text, " here, alive")); /* this process */
    close(pair[0]);
    close(pair[1]);
    end(stranger);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_is_who_its_pidfd_names),
        cmocka_unit_test(a_peer_without_a_pidfd_is_who_opened_its_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
