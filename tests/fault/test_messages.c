/* Sends and receives on real processes: which sends need no receive, and how messages that nobody receives are told. */
#include <stdlib.h>
#include <string.h>

#include "fault_harness.h"

#define EAGER_FLOATS ((size_t)SHOAL_EAGER_BYTES / sizeof(float))

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

/* Rank 0 sends on each of several communicators, then all do something on another, then rank 1 receives. */
static void send_early(struct fault_rank *self)
{
    float *buffer = fault_floats(self, false, EAGER_FLOATS);
    struct shoal_comm *comms[OTHERS];
    for (int i = 0; i < OTHERS; i++)
        comms[i] = split(self);
    for (size_t i = 0; i < EAGER_FLOATS; i++)
        buffer[i] = 7;
    for (int i = 0; i < OTHERS * EARLY && self->rank == 0; i++)
        is_ok(self, shoal_send(comms[i % OTHERS], buffer, EAGER_FLOATS, SHOAL_FLOAT32, 1, 5, NULL), "an early send");
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
    const struct fault_job job = {.size = 2, .body = send_early, .settings = settings};
    (void)fault_run(test, &job);
}

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"small_sends_need_no_receive_though_the_peer_waits_elsewhere", small_sends, NULL},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
