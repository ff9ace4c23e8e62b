/* Sends and receives on real processes: which sends need no receive, and how messages that no rank receives are reported. */
#include <stdlib.h>
#include <string.h>

#include "fault_harness.h"

#define EAGER_FLOATS ((size_t)SHOAL_EAGER_BYTES / sizeof(float))
#define LARGE ((size_t)100000)

static bool is_ok(struct fault_rank *self, enum shoal_status status, const char *what)
{
    return fault_check(self, status == SHOAL_OK, "%s: %s", what, shoal_status_name(status));
}

static struct shoal_comm *split(struct fault_rank *self)
{
    struct shoal_comm *comm = NULL;
    return is_ok(self, shoal_comm_split(self->comm, 0, self->rank, NULL, &comm), "shoal_comm_split") ? comm : NULL;
}

/* ---- Small sends --------------------------------------------------------------------------------------------------------- */

#define EARLY 40 /* more than a queue between two ranks holds */
#define OTHERS 3

/* Rank 0 sends on each of several communicators, then all ranks use another one, then rank 1 receives. */
static void send_unexpected(struct fault_rank *self)
{
    float *buffer = fault_floats(self, false, EAGER_FLOATS);
    struct shoal_comm *comms[OTHERS];
    for (int i = 0; i < OTHERS; i++)
        comms[i] = split(self);
    for (size_t i = 0; i < EAGER_FLOATS; i++)
        buffer[i] = 7;
    for (int i = 0; i < OTHERS * EARLY && self->rank == 0; i++)
        is_ok(self, shoal_send(comms[i % OTHERS], buffer, EAGER_FLOATS, SHOAL_FLOAT32, 1, 5, NULL), "an unexpected send");
    float one = 1;
    is_ok(self, shoal_allreduce(self->comm, &one, &one, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL), "the all-reduce");
    for (int i = 0; i < OTHERS * EARLY && self->rank == 1; i++) {
        buffer[EAGER_FLOATS - 1] = 0;
        is_ok(self, shoal_recv(comms[i % OTHERS], buffer, EAGER_FLOATS, SHOAL_FLOAT32, 0, 5, NULL), "its receive");
        fault_check(self, buffer[EAGER_FLOATS - 1] == 7, "received %g", (double)buffer[EAGER_FLOATS - 1]);
    }
    for (int i = 0; i < OTHERS; i++)
        shoal_comm_free(comms[i]);
    free(buffer);
}

static void small_sends(struct fault_test *test)
{
    static const char *const settings[] = {"SHOAL_TIMEOUT_MS=5000", NULL};
    const struct fault_job job = {.size = 2, .body = send_unexpected, .settings = settings};
    (void)fault_run(test, &job);
}

/* ---- Messages of a rank to itself ---------------------------------------------------------------------------------------- */

#define HUGE_FLOATS ((size_t)3000000)

static void send_and_receive(struct fault_rank *self, float *buffer, size_t count, bool is_send_first)
{
    struct shoal_request *requests[2] = {NULL, NULL};
    float *received = calloc(count + 1, sizeof *received);
    for (int i = 0; i < 2; i++) {
        const bool is_send = (i == 0) == is_send_first;
        is_ok(self,
              is_send ? shoal_send_post(self->comm, buffer, count, SHOAL_FLOAT32, self->rank, 5, NULL, &requests[i])
                      : shoal_recv_post(self->comm, received, count, SHOAL_FLOAT32, self->rank, 5, NULL, &requests[i]),
              "a post");
    }
    for (int i = 0; i < 2; i++) {
        is_ok(self, shoal_request_wait(requests[i], SHOAL_FOREVER), is_send_first ? "send first" : "receive first");
        shoal_request_free(requests[i]);
    }
    fault_check(self, memcmp(received, buffer, count * sizeof *buffer) == 0, "%zu elements are wrong", count);
    free(received);
}

/* Every size, in both orders; small ones by blocking calls, and many of them before their receives, in their order. */
static void talk_to_itself(struct fault_rank *self)
{
    static const size_t counts[] = {0, 1, 100, EAGER_FLOATS, EAGER_FLOATS + 1, HUGE_FLOATS};
    float *buffer = fault_floats(self, self->rank == 1, HUGE_FLOATS), one = 0;
    for (size_t i = 0; i < HUGE_FLOATS; i++)
        buffer[i] = (float)i + (float)self->rank;
    for (size_t i = 0; i < FAULT_COUNT_OF(counts); i++) {
        send_and_receive(self, buffer, counts[i], true);
        send_and_receive(self, buffer, counts[i], false);
    }
    for (int i = 0; i < 200; i++)
        is_ok(self, shoal_send(self->comm, &buffer[i], 1, SHOAL_FLOAT32, self->rank, i % 2, NULL), "a blocking send");
    for (int i = 0; i < 200; i++) {
        const int wanted = i < 100 ? 2 * i + 1 : 2 * (i - 100);
        is_ok(self, shoal_recv(self->comm, &one, 1, SHOAL_FLOAT32, self->rank, i < 100, NULL), "its receive");
        fault_check(self, one == buffer[wanted], "message %d was %g", i, (double)one);
    }
    if (self->rank != 1)
        free(buffer);
}

static void to_itself(struct fault_test *test)
{
    static const char *const settings[] = {"SHOAL_TIMEOUT_MS=10000", NULL};
    for (int size = 1; size <= 2; size++) {
        const struct fault_job job = {.size = size, .body = talk_to_itself, .settings = settings};
        (void)fault_run(test, &job);
    }
}

/* What rank 1 does meanwhile: it waits longer than rank 0. */
static enum shoal_status wait_for_rank_0(struct fault_rank *self)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    float one = 1;
    options.timeout_ms = 20000;
    return shoal_allreduce(self->comm, &one, &one, 1, SHOAL_FLOAT32, SHOAL_SUM, &options);
}

/* A large message to itself, which nothing receives. */
static void send_without_receive(struct fault_rank *self)
{
    float *buffer = fault_floats(self, false, LARGE);
    memset(buffer, 0, LARGE * sizeof *buffer);
    fault_act(self);
    fault_note(self,
               self->rank == 0 ? shoal_send(self->comm, buffer, LARGE, SHOAL_FLOAT32, 0, 5, NULL) : wait_for_rank_0(self));
    free(buffer);
}

/* What was sent is shorter than its receive. */
static void receive_more(struct fault_rank *self)
{
    float buffer[5] = {0};
    fault_act(self);
    if (self->rank == 0)
        is_ok(self, shoal_send(self->comm, buffer, 4, SHOAL_FLOAT32, 0, 5, NULL), "the send");
    fault_note(self, self->rank == 0 ? shoal_recv(self->comm, buffer, 5, SHOAL_FLOAT32, 0, 5, NULL) : wait_for_rank_0(self));
}

static void expect_failure(struct fault_test *test, fault_body_fn body, enum shoal_status status, const char *words)
{
    static const char *const settings[] = {"SHOAL_TIMEOUT_MS=2000", NULL};
    const struct fault_job job = {.size = 2, .body = body, .settings = settings};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == status, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, strstr(result->failure.text, words) != NULL, "rank %d: %s", r, result->failure.text);
    }
}

static void unmet_to_itself(struct fault_test *test)
{
    expect_failure(test, send_without_receive, SHOAL_ERR_TIMEOUT, "has not called the other side of its message to itself");
    expect_failure(test, receive_more, SHOAL_ERR_MISMATCH, "does not fit its receive");
}

/* ---- Deadlocks ----------------------------------------------------------------------------------------------------------- */

/* Two communicators, which two ranks use in opposite orders. */
static void cross_orders(struct fault_rank *self)
{
    struct shoal_comm *comms[2] = {self->comm, split(self)};
    float one = 1;
    fault_act(self);
    const enum shoal_status status = shoal_allreduce(comms[self->rank], &one, &one, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    self->mine->failed_ns = fault_now_ns();
    self->mine->status = status;
    self->mine->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    self->mine->has_failure = shoal_last_failure(self->context, comms[self->rank], &self->mine->failure) == SHOAL_OK;
    fault_reach(self, 1);
    fault_await(self, 1, -1); /* otherwise the other rank would learn that this rank freed its communicator */
    shoal_comm_free(comms[1]);
}

/* Each rank sends first, and the messages are too large to be kept. */
static void send_to_each_other(struct fault_rank *self)
{
    float *buffer = fault_floats(self, self->rank == 0, LARGE);
    memset(buffer, 0, LARGE * sizeof *buffer);
    fault_act(self);
    fault_note(self, shoal_send(self->comm, buffer, LARGE, SHOAL_FLOAT32, 1 - self->rank, 5, NULL));
    if (self->rank != 0)
        free(buffer);
}

static void play_deadlock(struct fault_test *test, fault_body_fn body, const char *operation, bool is_crossed)
{
    static const char *const settings[] = {"SHOAL_WARN_MS=1200", "SHOAL_TIMEOUT_MS=3000", NULL};
    const struct fault_job job = {.size = 2, .body = body, .settings = settings};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        char warned[160];
        snprintf(warned, sizeof warned, "deadlock: rank %d (process %d) waits for rank %d (process %d), rank %d", r,
                 (int)result->pid, 1 - r, (int)test->shared->results[1 - r].pid, 1 - r);
        fault_expect(test, strstr(result->log, warned) != NULL, "rank %d has not logged \"%s\"", r, warned);
        fault_expect(test, result->status == SHOAL_ERR_TIMEOUT, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, strstr(result->failure.text, "deadlock: "), "rank %d: %s", r, result->failure.text);
        fault_expect(test, strstr(result->failure.operation, operation), "rank %d was in %s", r, result->failure.operation);
        fault_expect(test, !is_crossed || strstr(result->failure.text, " on communicator "), "rank %d: %s", r,
                     result->failure.text);
        fault_expect(test, result->failure.rank == -1, "rank %d is named", result->failure.rank);
    }
}

static void crossed(struct fault_test *test)
{
    play_deadlock(test, cross_orders, "all-reduce of 1 float32", true);
}

static void two_sends(struct fault_test *test)
{
    play_deadlock(test, send_to_each_other, "tag 5", false);
}

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"small_sends_need_no_receive_though_the_peer_waits_elsewhere", small_sends, NULL},
        {"a_rank_sends_to_itself", to_itself, NULL},
        {"messages_to_itself_that_do_not_meet_are_told", unmet_to_itself, NULL},
        {"orders_crossed_over_two_communicators_are_a_deadlock", crossed, NULL},
        {"two_large_sends_to_each_other_are_a_deadlock", two_sends, NULL},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
