/* Assertions: one that fails prints its condition and place and ends the process; one that holds does nothing. */
#undef SHOAL_ASSERTS
#define SHOAL_ASSERTS 1

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"

static void assert_that_holds_is_evaluated_once(void **state)
{
    (void)state;
    int count = 0;
    SHOAL_ASSERT(++count == 1);
    assert_int_equal(count, 1);
}

static void assert_that_fails_ends_the_process_with_its_condition(void **state)
{
    (void)state;
    int fds[2], status;
    char text[300] = "";
    assert_int_equal(pipe(fds), 0);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGTRAP, SIG_DFL);
        dup2(fds[1], STDERR_FILENO);
        SHOAL_ASSERT(fds[0] == -7);
        _exit(0);
    }
    close(fds[1]);
    for (size_t used = 0; used < sizeof text - 1;) {
        const ssize_t got = read(fds[0], text + used, sizeof text - 1 - used);
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    close(fds[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_non_null(strstr(text, "a fault in Shoal itself"));
    assert_non_null(strstr(text, "test_assert.c:"));
    assert_non_null(strstr(text, "fds[0] == -7 does not hold"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(assert_that_holds_is_evaluated_once),
        cmocka_unit_test(assert_that_fails_ends_the_process_with_its_condition),
    };
    return cmocka_run_group_tests_name("assert", tests, NULL, NULL);
}
