/* For cmocka programs whose cases use the stand-in directly: starts it with two devices, and makes the objects that cases
 * need. Include it after cmocka's headers. One per program. */
#ifndef SHOAL_TESTS_MOCK_CASES_H
#define SHOAL_TESTS_MOCK_CASES_H

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mock_client.h"

#define OK(expression) assert_int_equal((expression), SHOAL_CU_SUCCESS)
#define REFUSED(expression, name) assert_int_equal((expression), SHOAL_CU_##name)
#define COUNT 1000
#define BYTES (COUNT * sizeof(uint32_t))

extern char **environ;

static shoal_cu_context contexts[2]; /* primary ones; the first is current */

static inline void start(const char *modes)
{
    shoal_cu_device device;
    control.reset_of();
    assert_true(control.set_of(modes));
    OK(cu.init(0));
    for (int i = 1; i >= 0; i--) {
        OK(cu.device_get(&device, i));
        OK(cu.primary_retain(&contexts[i], device));
        OK(cu.context_set(contexts[i]));
    }
}

static inline shoal_cu_stream make_stream(void)
{
    shoal_cu_stream stream;
    OK(cu.stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

static inline shoal_cu_event make_event(void)
{
    shoal_cu_event event;
    OK(cu.event_create(&event, SHOAL_CU_EVENT_NO_TIMING));
    return event;
}

static inline shoal_cu_address make_memory(size_t bytes)
{
    shoal_cu_address at;
    OK(cu.allocate(&at, bytes));
    return at;
}

static inline shoal_cu_address register_memory(void *at, size_t bytes)
{
    shoal_cu_address address;
    OK(cu.host_register(at, bytes, SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP));
    OK(cu.host_address(&address, at, 0));
    return address;
}

static inline void fill(uint32_t *numbers, uint32_t from)
{
    for (uint32_t i = 0; i < COUNT; i++)
        numbers[i] = from + i;
}

static inline void check(const uint32_t *numbers, uint32_t from)
{
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(numbers[i], from + i);
}

/* Expects exactly one fault since the last check, with that word in its text. */
static inline void expect_fault(const char *word)
{
    char text[256];
    assert_int_equal(control.faults_of(text, sizeof text), 1);
    if (!strstr(text, word))
        fail_msg("'%s' is not in: %s", word, text);
}

/* Starts a child that runs this program with these arguments. */
static inline pid_t begin_child(const char *what, const char *argument)
{
    char *arguments[] = {(char *)(uintptr_t) "child", (char *)(uintptr_t)what, (char *)(uintptr_t)argument, NULL};
    pid_t child;
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
    return child;
}

/* Returns the child's exit status. */
static inline int end_child(pid_t child)
{
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    return WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
}

static inline int run_child(const char *what, const char *argument)
{
    return end_child(begin_child(what, argument));
}

#endif
