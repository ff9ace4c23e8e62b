/* Ranks that are killed, exit early or free their communicator: every other rank learns who, where and how, within 2 s. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault_matrix.h"

/* ---- A child of the victim outlives it and holds its sockets open -------------------------------------------------------- */

static void leave_a_child(struct fault_rank *self)
{
    float buffer[64];
    fault_allreduce_once(self, self->comm, buffer, 64);
    if (self->rank != 1) {
        fault_note(self, shoal_barrier(self->comm, NULL));
        fault_reach(self, 1);
        return;
    }
    if (fork() == 0) { /* the child ends when the survivors know */
        fault_await(self, 1, 1);
        _exit(0);
    }
    fault_act(self);
    kill(getpid(), SIGKILL);
}

static void killed_parent_of_a_living_child(struct fault_test *test)
{
    struct fault_job job = {.size = 3, .body = leave_a_child, .killed_by = {0, SIGKILL, 0}};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 3; r += 2) {
        const struct fault_result *result = &test->shared->results[r];
        const uint64_t took_ms = (result->failed_ns - test->shared->results[1].action_ns) / FAULT_MS;
        fault_expect(test, result->status == SHOAL_ERR_PEER_LOST, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, took_ms <= FAULT_KNOWN_MS * FAULT_SLOW, "rank %d knew after %llu ms", r, (unsigned long long)took_ms);
        fault_expect(test, strstr(result->failure.text, "killed by signal 9") != NULL, "rank %d: %s", r, result->failure.text);
    }
}

/* ---- The dead rank is found whatever else is in progress ----------------------------------------------------------------- */

/* A receive from a live rank is the oldest operation; an all-reduce after it waits for the dead rank. */
static void wait_behind_a_receive(struct fault_rank *self)
{
    float buffer[64], message[4];
    struct shoal_request *receive = NULL;
    fault_allreduce_once(self, self->comm, buffer, 64);
    if (self->rank == 2) {
        fault_act(self);
        kill(getpid(), SIGKILL);
    }
    enum shoal_status status = shoal_recv_post(self->comm, message, 4, SHOAL_FLOAT32, 1 - self->rank, 7, NULL, &receive);
    fault_check(self, status == SHOAL_OK, "shoal_recv_post: %s", shoal_status_name(status));
    fault_note(self, shoal_allreduce(self->comm, buffer, buffer, 64, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    if (receive) {
        status = shoal_request_wait(receive, 1000);
        fault_check(self, status == SHOAL_ERR_PEER_LOST, "the receive: %s", shoal_status_name(status));
    }
    shoal_request_free(receive);
}

/* Rank 1 waits for a message from rank 2, which dies after rank 0 has. */
static void receive_from_the_second_dead(struct fault_rank *self)
{
    float buffer[64];
    fault_allreduce_once(self, self->comm, buffer, 64);
    if (self->rank != 1) {
        fault_sleep_ms(self->rank == 2 ? 300 : 0);
        fault_act(self);
        kill(getpid(), SIGKILL);
    }
    fault_note(self, shoal_recv(self->comm, buffer, 64, SHOAL_FLOAT32, 2, 0, NULL));
}

static const struct shoal_comm_options busy_options = {sizeof(struct shoal_comm_options), "busy", 0, 0};

struct busy {
    struct shoal_comm *comm;
    struct fault_rank *self;
    atomic_bool must_stop;
};

/* Loops until either rank wants to stop: the maximum of the two wishes ends both loops after the same call. */
static void *keep_busy(void *arg)
{
    struct busy *busy = arg;
    int64_t wish = 0;
    enum shoal_status status = SHOAL_OK;
    while (wish < 2 && status == SHOAL_OK) {
        wish = atomic_load(&busy->must_stop);
        status = shoal_allreduce(busy->comm, &wish, &wish, 1, SHOAL_INT64, SHOAL_SUM, NULL);
    }
    fault_check(busy->self, status == SHOAL_OK, "the other communicator: %s", shoal_status_name(status));
    return NULL;
}

static void wait_while_another_is_busy(struct fault_rank *self)
{
    struct busy busy = {.self = self};
    pthread_t thread;
    float buffer[64];
    const enum shoal_status status = shoal_comm_split(self->comm, self->rank < 2 ? 0 : -1, 0, &busy_options, &busy.comm);
    if (!fault_check(self, status == SHOAL_OK, "shoal_comm_split: %s", shoal_status_name(status)))
        return;
    if (self->rank == 2) {
        fault_sleep_ms(200);
        fault_act(self);
        kill(getpid(), SIGKILL);
    }
    if (!fault_check(self, pthread_create(&thread, NULL, keep_busy, &busy) == 0, "no thread"))
        return;
    fault_note(self, shoal_allreduce(self->comm, buffer, buffer, 64, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    atomic_store(&busy.must_stop, true);
    pthread_join(thread, NULL);
    shoal_comm_free(busy.comm);
}

/* Rank 0 learns of the death of rank 1 in another communicator, and frees this one before rank 2 looks. */
static void look_when_another_has_left(struct fault_rank *self)
{
    struct shoal_comm *pair = NULL;
    float buffer[64];
    const enum shoal_status status = shoal_comm_split(self->comm, self->rank < 2 ? 0 : -1, 0, NULL, &pair);
    fault_allreduce_once(self, self->comm, buffer, 64);
    if (!fault_check(self, status == SHOAL_OK, "shoal_comm_split: %s", shoal_status_name(status)))
        return;
    if (self->rank == 1) {
        fault_reach(self, 1);
        fault_act(self);
        kill(getpid(), SIGKILL);
    }
    if (self->rank == 2) {
        fault_await(self, 1, 2);
        fault_note(self, shoal_allreduce(self->comm, buffer, buffer, 64, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        return;
    }
    self->mine->status = shoal_allreduce(pair, buffer, buffer, 64, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    self->mine->failure.rank = 1;
    self->mine->failed_ns = fault_now_ns();
    shoal_comm_free(pair);
    shoal_comm_free(self->comm);
    self->comm = NULL;
    fault_reach(self, 1);
}

/* The victim ends at a random moment while communicators are created: in the exchange, or while the ranks pass their segments.
 */
static void *end_soon(void *arg)
{
    struct fault_rank *self = arg;
    fault_sleep_ms((unsigned)fault_now_ns() / 1000 % 20);
    fault_act(self);
    kill(getpid(), SIGKILL);
    return NULL;
}

static void split_until_it_fails(struct fault_rank *self)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure};
    enum shoal_status status = SHOAL_OK;
    pthread_t thread;
    if (self->rank == 2)
        fault_check(self, pthread_create(&thread, NULL, end_soon, self) == 0, "no thread");
    for (int i = 0; i < 100000 && status == SHOAL_OK; i++) {
        struct shoal_comm *group = NULL;
        status = shoal_comm_split(self->comm, 0, 0, NULL, &group);
        fault_check(self, (status == SHOAL_OK) == (group != NULL), "%s, but the output is %p", shoal_status_name(status),
                    (void *)group);
        shoal_comm_free(group);
    }
    /* If the new communicator failed, not the old one, the context's last failure contains the cause. */
    fault_note(self, status);
    if (!self->mine->has_failure && shoal_last_failure(self->context, NULL, &failure) == SHOAL_OK)
        fault_check(self, strstr(failure.text, "rank 2") && strstr(failure.text, "killed by signal 9"), "the text: %s",
                    failure.text);
    self->mine->failure.rank = self->mine->has_failure ? self->mine->failure.rank : 2;
    fault_reach(self, 1);
    fault_await(self, 1, 2); /* the old communicator is freed when all know */
}

struct special {
    fault_body_fn body;
    int victims[2];
    int named;
};

static void special(struct fault_test *test)
{
    const struct special *special = test->parameters;
    struct fault_job job = {.size = 3, .body = special->body};
    for (int i = 0; i < 2; i++)
        job.killed_by[special->victims[i]] = SIGKILL;
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 3; r++) {
        const struct fault_result *result = &test->shared->results[r];
        if (job.killed_by[r])
            continue;
        const uint64_t took_ms = (result->failed_ns - test->shared->results[special->named].action_ns) / FAULT_MS;
        fault_expect(test, result->status == SHOAL_ERR_PEER_LOST && result->failure.rank == special->named,
                     "rank %d got %s, rank %d is named", r, shoal_status_name(result->status), result->failure.rank);
        fault_expect(test, took_ms <= FAULT_KNOWN_MS * FAULT_SLOW, "rank %d knew after %llu ms", r, (unsigned long long)took_ms);
    }
}

static const struct special behind_a_receive = {wait_behind_a_receive, {2, 2}, 2};
static const struct special second_dead = {receive_from_the_second_dead, {0, 2}, 2};
static const struct special in_split = {split_until_it_fails, {2, 2}, 2};
static const struct special another_left = {look_when_another_has_left, {1, 1}, 1};
static const struct special another_busy = {wait_while_another_is_busy, {2, 2}, 2};

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"killed_before_2_ranks", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_BEFORE, 2, 1, false, false, 0)},
        {"killed_before_4_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_BEFORE, 4, 0, true, true, 0)},
        {"killed_between_2_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_BETWEEN, 2, 0, true, false, 0)},
        {"killed_between_3_ranks", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_BETWEEN, 3, 1, false, true, 0)},
        {"exited_before_3_ranks", fault_play, FAULT_SCENE(FAULT_EXIT, FAULT_BEFORE, 3, 2, false, false, 0)},
        {"exited_between_2_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_EXIT, FAULT_BETWEEN, 2, 0, false, true, 0)},
        {"exited_during_2_ranks", fault_play, FAULT_SCENE(FAULT_EXIT, FAULT_DURING, 2, 1, false, true, 2)},
        {"exited_during_4_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_EXIT, FAULT_DURING, 4, 0, true, false, 2)},
        {"freed_before_2_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_FREE, FAULT_BEFORE, 2, 0, false, false, 0)},
        {"freed_between_4_ranks", fault_play, FAULT_SCENE(FAULT_FREE, FAULT_BETWEEN, 4, 3, true, true, 0)},
        {"freed_during_2_ranks", fault_play, FAULT_SCENE(FAULT_FREE, FAULT_DURING, 2, 1, true, false, 2)},
        {"freed_during_4_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_FREE, FAULT_DURING, 4, 0, false, false, 2)},
        {"killed_parent_of_a_living_child", killed_parent_of_a_living_child, NULL},
        {"killed_while_a_receive_is_older", special, &behind_a_receive},
        {"killed_after_another_was_killed", special, &second_dead},
        {"killed_during_split_1", special, &in_split},
        {"killed_during_split_2", special, &in_split},
        {"killed_during_split_3", special, &in_split},
        {"killed_and_another_has_left", special, &another_left},
        {"killed_while_another_communicator_is_busy", special, &another_busy},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
