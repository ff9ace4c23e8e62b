/* Which processes the functions for the workers of a host send signals to, and reap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../tools/run/run_workers.h"
#include "../../../tools/tool.h"

/* ---- not used here: the start of workers, and their output ---- */

int run_worker_spawn(const struct run_options *options, const struct run_inherited *inherited, struct run_spawn *spawn)
{
    (void)options, (void)inherited, (void)spawn;
    return 1;
}

int run_relay_open(struct run_relay *relay)
{
    (void)relay;
    return -1;
}

void run_output_attach(struct run_output *output, int worker, const int fds[2])
{
    (void)output, (void)worker, (void)fds;
}

void run_output_drain(struct run_output *output)
{
    (void)output;
}

const char *tool_memory_text(uint64_t before)
{
    (void)before;
    return "";
}

/* ---- processes ---- */

/* Forks a process in a group of its own. It exits at once, or waits for a signal. */
static pid_t process_start(bool exits)
{
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        while (!exits)
            pause();
        _exit(0);
    }
    assert_int_equal(setpgid(pid, pid), 0);
    return pid;
}

/* Waits until the process is dead, but does not reap it. */
static void death_await(pid_t pid)
{
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
}

/* Kills the process with a signal that is delivered after the others, and returns the one that killed it. */
static int killer_of(pid_t pid)
{
    int status = 0;
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    return WTERMSIG(status);
}

static bool is_reaped(pid_t pid)
{
    siginfo_t info;
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD;
}

/* ---- the cases ---- */

/* Another process may get the number of a reaped worker. */
static void reaped_workers_get_no_signals(void **state)
{
    (void)state;
    struct run_worker at[1] = {{.pid = process_start(true), .is_alive = true}};
    struct run_workers workers = {.at = at, .started = 1, .alive = 1};
    death_await(at[0].pid);
    assert_int_equal(run_workers_look(&workers, false), 1);
    run_workers_reap(&workers);
    assert_true(is_reaped(at[0].pid));
    const pid_t stranger = process_start(false);
    at[0].pid = stranger;
    run_workers_signal(&workers, SIGUSR1);
    run_workers_end(&workers, SIGINT);
    assert_int_equal(killer_of(stranger), SIGTERM);
}

/* Processes that a dead worker has left in its group still get signals, because its number is not free yet. */
static void dead_workers_groups_get_signals(void **state)
{
    (void)state;
    struct run_worker at[1] = {{.pid = process_start(true), .is_alive = true}};
    struct run_workers workers = {.at = at, .started = 1, .alive = 1};
    const pid_t left = process_start(false);
    assert_int_equal(setpgid(left, at[0].pid), 0);
    death_await(at[0].pid);
    assert_int_equal(run_workers_look(&workers, false), 1);
    run_workers_signal(&workers, SIGUSR1);
    assert_int_equal(killer_of(left), SIGUSR1);
    run_workers_reap(&workers);
}

/* A worker that hangs in the kernel keeps its number, so it gets signals. It is reaped when it has died. */
static void worker_left_behind_is_reaped_when_it_dies(void **state)
{
    (void)state;
    struct run_worker at[1] = {{.pid = process_start(false), .is_alive = true}};
    struct run_workers workers = {.at = at, .started = 1, .alive = 1};
    workers.is_reaped = true;
    run_workers_signal(&workers, SIGUSR1);
    death_await(at[0].pid);
    run_workers_reap_left(&workers, at[0].pid);
    assert_true(is_reaped(at[0].pid));
    assert_false(at[0].is_alive);
    assert_int_equal(workers.alive, 0);
}

/* run_workers_look() reports how it ended. */
static void worker_of_this_attempt_is_not_reaped_early(void **state)
{
    (void)state;
    struct run_worker at[1] = {{.pid = process_start(true), .is_alive = true}};
    struct run_workers workers = {.at = at, .started = 1, .alive = 1};
    death_await(at[0].pid);
    run_workers_reap_left(&workers, at[0].pid);
    assert_false(is_reaped(at[0].pid));
    assert_int_equal(run_workers_look(&workers, false), 1);
    run_workers_reap(&workers);
    assert_true(is_reaped(at[0].pid));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reaped_workers_get_no_signals),
        cmocka_unit_test(dead_workers_groups_get_signals),
        cmocka_unit_test(worker_left_behind_is_reaped_when_it_dies),
        cmocka_unit_test(worker_of_this_attempt_is_not_reaped_early),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
