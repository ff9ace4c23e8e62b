/* shoal_comm_abort, from another thread and from a signal handler, and what a forked child must not do. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fault_harness.h"

enum way { BY_THREAD, BY_HANDLER, BEFORE_THE_CALL, BY_A_LATE_RANK, WITH_A_CAUSE };

struct scene {
    enum way way;
    int size;
    int aborter;
    bool is_posted;
};

static struct fault_rank *handled; /* for the signal handler */

static void on_alarm(int signal)
{
    (void)signal;
    fault_act(handled);
    shoal_comm_abort(handled->comm);
}

static void *abort_soon(void *arg)
{
    struct fault_rank *self = arg;
    fault_sleep_ms(100);
    fault_act(self);
    shoal_comm_abort(self->comm);
    return NULL;
}

/* Rank 0 never calls, so all others wait. */
static enum shoal_status wait_in_vain(struct fault_rank *self)
{
    const struct scene *scene = self->parameters;
    struct shoal_request *request = NULL;
    if (!scene->is_posted)
        return shoal_barrier(self->comm, NULL);
    enum shoal_status status = shoal_barrier_post(self->comm, NULL, &request);
    if (status == SHOAL_OK)
        status = shoal_request_wait(request, SHOAL_FOREVER);
    shoal_request_free(request);
    return status;
}

/* The first cause counts. */
static void give_cause(struct fault_rank *self)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    cause.status = SHOAL_ERR_SYSTEM;
    cause.rank = self->rank;
    snprintf(cause.operation, sizeof cause.operation, "step 7");
    snprintf(cause.text, sizeof cause.text, "the loss was not a number");
    shoal_comm_fail(self->comm, &cause);
    cause.status = SHOAL_ERR_MEMORY;
    shoal_comm_fail(self->comm, &cause);
    shoal_comm_fail(self->comm, NULL);
}

static enum shoal_status status_of(enum way way)
{
    return way == WITH_A_CAUSE ? SHOAL_ERR_SYSTEM : SHOAL_ERR_ABORTED;
}

/* *thread_out is to be joined before the communicator is freed: abort must not be under way then. */
static void abort_by(struct fault_rank *self, enum way way, pthread_t *thread_out)
{
    if (way == BY_HANDLER) {
        handled = self;
        signal(SIGALRM, on_alarm);
        ualarm(100000, 0);
    } else if (way == BY_THREAD) {
        fault_check(self, pthread_create(thread_out, NULL, abort_soon, self) == 0, "no thread");
    } else {
        fault_sleep_ms(way == BEFORE_THE_CALL ? 0 : 100);
        fault_act(self);
        if (way == WITH_A_CAUSE)
            give_cause(self);
        else
            shoal_comm_abort(self->comm);
    }
}

static void body(struct fault_rank *self)
{
    const struct scene *scene = self->parameters;
    float buffer[16];
    pthread_t thread = 0;
    fault_allreduce_once(self, self->comm, buffer, 16);
    if (self->rank == scene->aborter)
        abort_by(self, scene->way, &thread);
    if (scene->way == BEFORE_THE_CALL) {
        fault_reach(self, 1);
        fault_await(self, 1, -1);
        fault_note(self, shoal_allreduce(self->comm, buffer, buffer, 16, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    } else if (self->rank == 0) {
        fault_await(self, 1, 0);
        fault_note(self, shoal_barrier(self->comm, NULL));
    } else {
        fault_note(self, wait_in_vain(self));
    }
    fault_reach(self, 1);
    const enum shoal_status again = shoal_barrier(self->comm, NULL);
    fault_check(self, again == status_of(scene->way), "the next call: %s", shoal_status_name(again));
    if (thread)
        pthread_join(thread, NULL);
}

static void play(struct fault_test *test)
{
    const struct scene *scene = test->parameters;
    const struct fault_job job = {.size = scene->size, .body = body, .parameters = scene};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < scene->size; r++) {
        const struct fault_result *result = &test->shared->results[r];
        const int64_t took_ms =
            ((int64_t)result->failed_ns - (int64_t)test->shared->results[scene->aborter].action_ns) / (int64_t)FAULT_MS;
        fault_expect(test, result->status == status_of(scene->way), "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, result->has_failure && result->failure.rank == scene->aborter, "rank %d: rank %d is named: %s", r,
                     result->failure.rank, result->failure.text);
        fault_expect(test, result->failure.is_given && result->failure.pid && result->failure.host[0], "rank %d: no process",
                     r);
        fault_expect(test,
                     scene->way != WITH_A_CAUSE || (!strcmp(result->failure.text, "the loss was not a number") &&
                                                    !strcmp(result->failure.operation, "step 7")),
                     "rank %d: %s", r, result->failure.text);
        fault_expect(test, took_ms <= FAULT_KNOWN_MS * FAULT_SLOW, "rank %d knew after %lld ms", r, (long long)took_ms);
    }
}

/* ---- A forked child ------------------------------------------------------------------------------------------------------ */

#define REFUSED(call) fault_check(self, (call) == SHOAL_ERR_STATE, "in the child, %s was not refused", #call)

static void use_what_the_parent_made(struct fault_rank *self, struct shoal_request *request)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure};
    struct shoal_comm *comm = NULL;
    struct shoal_request *other = NULL;
    void *memory = NULL;
    float x = 1;
    REFUSED(shoal_allreduce(self->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    REFUSED(shoal_barrier_post(self->comm, NULL, &other));
    REFUSED(shoal_send(self->comm, &x, 1, SHOAL_FLOAT32, 1 - self->rank, 0, NULL));
    REFUSED(shoal_comm_split(self->comm, 0, 0, NULL, &comm));
    REFUSED(shoal_comm_create(self->context, NULL, &comm));
    REFUSED(shoal_mem_alloc(self->context, 4096, &memory));
    REFUSED(shoal_comm_finalize(self->comm));
    REFUSED(shoal_last_failure(self->context, NULL, &failure));
    REFUSED(shoal_request_wait(request, 0));
    REFUSED(shoal_request_test(request));
    shoal_request_free(request);
    shoal_comm_abort(self->comm);
    shoal_comm_free(self->comm);
    shoal_context_destroy(self->context);
}

static void fork_while_busy(struct fault_rank *self)
{
    float buffer[64];
    struct shoal_request *request = NULL;
    int end = -1;
    fault_allreduce_once(self, self->comm, buffer, 64);
    enum shoal_status status = SHOAL_OK;
    if (self->rank == 0)
        status = shoal_barrier_post(self->comm, NULL, &request); /* in progress while the child lives */
    fault_check(self, status == SHOAL_OK, "shoal_barrier_post: %s", shoal_status_name(status));
    if (self->rank == 0) {
        const pid_t child = fork();
        if (child == 0) {
            use_what_the_parent_made(self, request);
            _exit(0);
        }
        const bool has_ended = waitpid(child, &end, 0) == child;
        fault_check(self, has_ended && end == 0, "the child ended with wait status %#x", (unsigned)end);
        fault_reach(self, 1);
    } else {
        while (atomic_load(&self->shared->results[0].stage) < 1)
            fault_sleep_ms(1);
    }
    status = request ? shoal_request_wait(request, SHOAL_FOREVER) : shoal_barrier(self->comm, NULL);
    fault_check(self, status == SHOAL_OK, "the parent's barrier: %s", shoal_status_name(status));
    shoal_request_free(request);
    for (int i = 0; i < 100; i++)
        fault_allreduce_once(self, self->comm, buffer, 64);
    status = shoal_comm_finalize(self->comm);
    fault_check(self, status == SHOAL_OK, "shoal_comm_finalize: %s", shoal_status_name(status));
}

static void forked_child(struct fault_test *test)
{
    const struct fault_job job = {.size = 2, .body = fork_while_busy};
    fault_run(test, &job);
}

/* ---- A deadline per call ------------------------------------------------------------------------------------------------- */

#define HASTY_MOST_MS 10000 /* on a busy machine; the first one's deadline is minutes */

/* The first operation has a long deadline, the second one, after it, a short one. */
static void post_two(struct fault_rank *self)
{
    struct shoal_request *patient = NULL, *hasty = NULL;
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    float buffer[8] = {0};
    if (self->rank == 1) {
        fault_await(self, 1, 1);
        fault_note(self, shoal_barrier(self->comm, NULL));
        return;
    }
    fault_act(self);
    options.timeout_ms = 500 * FAULT_SLOW;
    fault_check(self, shoal_barrier_post(self->comm, NULL, &patient) == SHOAL_OK, "the first post");
    fault_check(self,
                shoal_allreduce_post(self->comm, buffer, buffer, 8, SHOAL_FLOAT32, SHOAL_SUM, &options, &hasty) == SHOAL_OK,
                "the second post");
    fault_check(self, shoal_request_wait(hasty, 50) == SHOAL_PENDING, "a wait that runs out is not pending");
    fault_note(self, shoal_request_wait(hasty, HASTY_MOST_MS));
    fault_check(self, shoal_request_wait(patient, 100) == SHOAL_ERR_TIMEOUT, "the first one");
    shoal_request_free(patient);
    shoal_request_free(hasty);
    fault_reach(self, 1);
}

static void own_deadline(struct fault_test *test)
{
    const struct fault_job job = {.size = 2, .body = post_two};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == SHOAL_ERR_TIMEOUT && result->failure.rank == 1,
                     "rank %d got %s, named rank %d: %s", r, shoal_status_name(result->status), result->failure.rank,
                     result->failure.text);
    }
    const uint64_t took_ms = (test->shared->results[0].failed_ns - test->shared->results[0].action_ns) / FAULT_MS;
    fault_expect(test, took_ms >= 450 * FAULT_SLOW && took_ms <= HASTY_MOST_MS, "it took %llu ms", (unsigned long long)took_ms);
}

#define SCENE(...)        \
    &(const struct scene) \
    {                     \
        __VA_ARGS__       \
    }

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"abort_by_thread_2_ranks", play, SCENE(BY_THREAD, 2, 1, false)},
        {"abort_by_thread_4_ranks_posted", play, SCENE(BY_THREAD, 4, 2, true)},
        {"abort_by_handler_2_ranks", play, SCENE(BY_HANDLER, 2, 1, false)},
        {"abort_by_handler_3_ranks_posted", play, SCENE(BY_HANDLER, 3, 2, true)},
        {"abort_by_rank_0_that_never_calls", play, SCENE(BY_A_LATE_RANK, 3, 0, false)},
        {"abort_before_the_call", play, SCENE(BEFORE_THE_CALL, 2, 1, false)},
        {"fail_with_a_cause_3_ranks_posted", play, SCENE(WITH_A_CAUSE, 3, 1, true)},
        {"forked_child_is_refused", forked_child, NULL},
        {"operation_keeps_its_own_deadline", own_deadline, NULL},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
