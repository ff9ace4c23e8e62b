/* What the agents of `shoal run` do with messages at the end of a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../../tools/run/run_agents_state.h"
#include "../../../tools/run/run_events.h"

enum { HOSTS = 2, POLLS_MAX = 64 };

/* The lines for people are not looked at. */
void run_output_say(struct run_output *output, const char *format, ...)
{
    (void)output, (void)format;
}

void run_error_print(const char *format, ...)
{
    (void)format;
}

static struct run_agents *agents_open(struct run_options *options, int index)
{
    *options = (struct run_options){.workers = 1, .meet_ms = 60000, .place = {.hosts = HOSTS, .index = index}};
    unsetenv("SHOAL_SECRET");
    unsetenv("SHOAL_SECRET_FILE");
    struct run_agents *agents = run_agents_open(options, NULL);
    assert_non_null(agents);
    agents->accept_at = NEVER;
    return agents;
}

/* Joins the agents with the other host, which the test plays. Returns its end of the connection. */
static int other_join(struct run_agents *agents, int host)
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    run_link_open(&agents->links[0], &agents->own, fds[0], host < 0, 0);
    run_link_until(&agents->links[0], NEVER);
    agents->links[0].link.state = SHOAL_LINK_OPEN;
    agents->links[0].host = host;
    return fds[1];
}

static void other_send(int fd, const struct run_message *message)
{
    struct {
        struct shoal_link_head head;
        unsigned char value[RUN_VALUE_BYTES_MAX];
    } frame = {.head = {.magic = SHOAL_LINK_MAGIC, .kind = (uint8_t)message->kind}};
    frame.head.value_bytes = (uint32_t)run_value_build(message, frame.value);
    assert_int_equal(write(fd, &frame, shoal_link_frame_bytes(&frame.head)), shoal_link_frame_bytes(&frame.head));
}

/* Closes the other end, so that the next message to it stays queued, and acts on what poll() reports. */
static void other_leave(struct run_agents *agents, int fd)
{
    const struct run_message note = {.kind = RUN_NOTE};
    struct pollfd polls[POLLS_MAX];
    close(fd);
    run_link_say(&agents->links[0], &note);
    assert_true(shoal_link_unsent(&agents->links[0].link) > 0);
    assert_true(run_agents_polls(agents) <= POLLS_MAX);
    run_agents_fill(agents, polls);
    assert_true(poll(polls, run_agents_polls(agents), 0) > 0);
    run_agents_serve(agents, polls);
}

static void host_0_reads_last_words(void **state)
{
    (void)state;
    struct run_options options;
    char text[RUN_REFUSAL_MAX];
    struct run_agents *agents = agents_open(&options, 0);
    const struct run_host host = {.index = 1, .workers = 1};
    const int other = other_join(agents, 1);
    assert_true(run_hub_join(&agents->hub, &host, text));
    const struct run_message trouble = {.kind = RUN_TROUBLE, .event = {.cause = RUN_CAUSE_WORKER, .rank = 1, .code = 7}};
    other_send(other, &trouble);
    other_leave(agents, other);
    assert_int_equal(agents->hub.first.cause, RUN_CAUSE_WORKER);
    assert_int_equal(agents->hub.first.code, 7);
    run_agents_close(agents);
}

static void other_hosts_read_last_words_of_host_0(void **state)
{
    (void)state;
    struct run_options options;
    struct run_message found;
    struct run_agents *agents = agents_open(&options, 1);
    const int other = other_join(agents, -1);
    const struct run_message start = {.kind = RUN_START, .start = {.ranks = HOSTS, .first_rank = 1}};
    const struct run_message verdict = {.kind = RUN_VERDICT, .cause = {.kind = RUN_CAUSE_WORKER, .rank = 1, .code = 7}};
    other_send(other, &start);
    other_send(other, &verdict);
    other_leave(agents, other);
    assert_true(run_agents_next(agents, &found));
    assert_int_equal(found.kind, RUN_START);
    assert_true(run_agents_next(agents, &found));
    assert_int_equal(found.kind, RUN_VERDICT);
    assert_int_equal(found.cause.code, 7);
    run_agents_close(agents);
}

/* The other host has 1 MiB of messages to read, and one more ends its link. */
static void host_that_does_not_read_is_lost(void **state)
{
    (void)state;
    struct run_options options;
    char text[RUN_REFUSAL_MAX];
    struct run_message note = {.kind = RUN_NOTE};
    struct pollfd polls[POLLS_MAX];
    struct run_agents *agents = agents_open(&options, 0);
    const struct run_host host = {.index = 1, .workers = 1};
    const int other = other_join(agents, 1);
    assert_true(run_hub_join(&agents->hub, &host, text));
    memset(note.note.text, 'x', sizeof note.note.text - 1);
    for (int i = 0; i < 1000000 && !agents->links[0].link.error; i++)
        run_link_say(&agents->links[0], &note);
    assert_int_equal(agents->links[0].link.error, ENOBUFS);
    run_agents_fill(agents, polls);
    assert_true(poll(polls, run_agents_polls(agents), 0) > 0);
    run_agents_serve(agents, polls);
    assert_false(run_link_is_open(&agents->links[0]));
    assert_int_equal(agents->hub.first.cause, RUN_CAUSE_LOST);
    assert_int_equal(agents->hub.first.host, 1);
    close(other);
    run_agents_close(agents);
}

/* A worker fails, then somebody asks twice to end, before run.c reads anything. */
static void stop_for_a_signal_replaces_no_other(void **state)
{
    (void)state;
    struct run_options options;
    struct run_message found, stop = {.kind = RUN_STOP, .event = {.cause = RUN_CAUSE_WORKER, .code = 7}};
    struct run_agents *agents = agents_open(&options, 0);
    run_agents_own(agents, &stop);
    stop.event = (struct run_event){.cause = RUN_CAUSE_SIGNAL, .asked = 1};
    run_agents_own(agents, &stop);
    stop.event.asked = 2;
    run_agents_own(agents, &stop);
    assert_true(run_agents_next(agents, &found));
    assert_int_equal(found.event.cause, RUN_CAUSE_WORKER);
    assert_int_equal(found.event.code, 7);
    assert_true(run_agents_next(agents, &found));
    assert_int_equal(found.event.cause, RUN_CAUSE_SIGNAL);
    assert_int_equal(found.event.asked, 2);
    assert_false(run_agents_next(agents, &found));
    run_agents_close(agents);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_0_reads_last_words),
        cmocka_unit_test(other_hosts_read_last_words_of_host_0),
        cmocka_unit_test(host_that_does_not_read_is_lost),
        cmocka_unit_test(stop_for_a_signal_replaces_no_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
