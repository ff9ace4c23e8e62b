/* Ranks that call different operations: every rank gets ERR_MISMATCH, both calls are logged on both sides, and no byte has
 * moved. */
#include <stdlib.h>
#include <string.h>

#include "fault_harness.h"

/* How the odd rank's call differs from an all-reduce of count float32, sum. */
enum odd { KIND, BARRIER, COUNT, TYPE, OPERATOR };

/* DURING: behind large ones that agree and are still under way. */
enum when { BEFORE, BETWEEN, DURING };

struct scene {
    enum odd odd;
    enum when when;
    int size;
    int odd_rank;
    size_t count;
    bool is_shared;
};

#define AHEAD 3
#define AHEAD_COUNT ((size_t)4 << 20)
#define MARK -7.5f

static enum shoal_status call(struct fault_rank *self, float *buffer, struct shoal_request **request_out)
{
    const struct scene *scene = self->parameters;
    float *output = buffer + scene->count + 8;
    enum odd odd = scene->odd;
    if (self->rank != scene->odd_rank)
        return shoal_allreduce_post(self->comm, buffer, output, scene->count, SHOAL_FLOAT32, SHOAL_SUM, NULL, request_out);
    if (odd == KIND)
        return shoal_broadcast_post(self->comm, buffer, output, scene->count, SHOAL_FLOAT32, 0, NULL, request_out);
    if (odd == BARRIER)
        return shoal_barrier_post(self->comm, NULL, request_out);
    return shoal_allreduce_post(self->comm, buffer, output, scene->count + (odd == COUNT),
                                odd == TYPE ? SHOAL_BFLOAT16 : SHOAL_FLOAT32, odd == OPERATOR ? SHOAL_MAX : SHOAL_SUM, NULL,
                                request_out);
}

static const char *odd_text(const struct scene *scene, char *text, size_t bytes)
{
    const size_t count = scene->count + (scene->odd == COUNT);
    switch (scene->odd) {
    case KIND:
        snprintf(text, bytes, "broadcast of %zu float32, root 0", count);
        break;
    case BARRIER:
        snprintf(text, bytes, "barrier");
        break;
    case TYPE:
        snprintf(text, bytes, "all-reduce of %zu bfloat16, sum", count);
        break;
    default:
        snprintf(text, bytes, "all-reduce of %zu float32, %s", count, scene->odd == OPERATOR ? "max" : "sum");
    }
    return text;
}

static void go_ahead(struct fault_rank *self, struct shoal_request *ahead[AHEAD], float *large)
{
    for (int i = 0; i < AHEAD; i++) {
        const enum shoal_status status =
            shoal_allreduce_post(self->comm, large + (size_t)i * AHEAD_COUNT, large + (size_t)i * AHEAD_COUNT, AHEAD_COUNT,
                                 SHOAL_FLOAT32, SHOAL_SUM, NULL, &ahead[i]);
        if (!fault_check(self, status == SHOAL_OK, "post %d: %s", i, shoal_status_name(status)))
            return;
    }
}

static void body(struct fault_rank *self)
{
    const struct scene *scene = self->parameters;
    struct shoal_request *ahead[AHEAD] = {NULL}, *request = NULL;
    const size_t elements = 2 * scene->count + 16;
    float *buffer = fault_floats(self, scene->is_shared, elements);
    float *large = scene->when == DURING ? calloc(AHEAD * AHEAD_COUNT, sizeof(float)) : NULL;
    if (!buffer || !fault_check(self, large || scene->when != DURING, "no memory"))
        return;
    for (int i = 0; i < 3 && scene->when == BETWEEN; i++)
        fault_allreduce_once(self, self->comm, buffer, 100 < elements ? 100 : elements);
    for (size_t i = 0; i < elements; i++)
        buffer[i] = MARK;
    if (large)
        go_ahead(self, ahead, large);
    enum shoal_status status = call(self, buffer, &request);
    fault_check(self, status == SHOAL_OK, "the post: %s", shoal_status_name(status));
    if (request)
        fault_note(self, shoal_request_wait(request, SHOAL_FOREVER));
    for (int i = 0; i < AHEAD && large; i++) {
        status = shoal_request_wait(ahead[i], 0);
        fault_check(self, status == SHOAL_OK || status == SHOAL_ERR_MISMATCH, "request %d: %s", i, shoal_status_name(status));
        shoal_request_free(ahead[i]);
    }
    shoal_request_free(request);
    for (size_t i = 0; i < elements; i++)
        fault_check(self, buffer[i] == MARK, "element %zu was written: %g", i, (double)buffer[i]);
    status = shoal_barrier(self->comm, NULL);
    fault_check(self, status == SHOAL_ERR_MISMATCH, "the next call: %s", shoal_status_name(status));
    if (!scene->is_shared)
        free(buffer);
    free(large);
}

static void play(struct fault_test *test)
{
    const struct scene *scene = test->parameters;
    const struct fault_job job = {.size = scene->size, .body = body, .parameters = scene};
    char usual[96], odd[96];
    if (!fault_run(test, &job))
        return;
    snprintf(usual, sizeof usual, "all-reduce of %zu float32, sum", scene->count);
    odd_text(scene, odd, sizeof odd);
    for (int r = 0; r < scene->size; r++) {
        const struct fault_result *result = &test->shared->results[r];
        const char *text = result->failure.text;
        fault_expect(test, result->status == SHOAL_ERR_MISMATCH, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, result->has_failure && strstr(text, usual) && strstr(text, odd) && strstr(text, "process"),
                     "rank %d's text does not tell \"%s\" and \"%s\": %s", r, usual, odd, text);
        fault_expect(test, strstr(result->log, usual) && strstr(result->log, odd), "rank %d has not logged both calls", r);
        fault_expect(test, result->failure.rank >= 0 && result->failure.pid == test->shared->results[result->failure.rank].pid,
                     "rank %d names rank %d, process %d", r, result->failure.rank, result->failure.pid);
    }
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

struct message_scene {
    size_t sent;
    size_t wanted;
    bool is_early; /* the message comes before its receive */
};

static void send_other(struct fault_rank *self)
{
    const struct message_scene *scene = self->parameters;
    const size_t most = scene->sent > scene->wanted ? scene->sent : scene->wanted;
    float *buffer = fault_floats(self, false, most);
    if (!buffer)
        return;
    memset(buffer, 0, most * sizeof *buffer);
    if (self->rank == !scene->is_early)
        fault_sleep_ms(50);
    if (self->rank == 0) {
        const enum shoal_status status = shoal_send(self->comm, buffer, scene->sent, SHOAL_FLOAT32, 1, 5, NULL);
        /* A small one is done at once; what follows it fails. */
        fault_note(self, status == SHOAL_OK ? shoal_barrier(self->comm, NULL) : status);
    } else {
        fault_note(self, shoal_recv(self->comm, buffer, scene->wanted, SHOAL_FLOAT32, 0, 5, NULL));
    }
    free(buffer);
}

static void play_message(struct fault_test *test)
{
    const struct message_scene *scene = test->parameters;
    const struct fault_job job = {.size = 2, .body = send_other, .parameters = scene};
    char sent[64], wanted[64];
    if (!fault_run(test, &job))
        return;
    snprintf(sent, sizeof sent, "of %zu float32", scene->sent);
    snprintf(wanted, sizeof wanted, "of %zu float32", scene->wanted);
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == SHOAL_ERR_MISMATCH, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, strstr(result->log, sent) && strstr(result->log, wanted), "rank %d has not logged both calls", r);
    }
}

#define SCENE(...)        \
    &(const struct scene) \
    {                     \
        __VA_ARGS__       \
    }
#define MESSAGE(...)              \
    &(const struct message_scene) \
    {                             \
        __VA_ARGS__               \
    }
#define LARGE ((size_t)1 << 20)

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"mismatched_kind_before_2_ranks", play, SCENE(KIND, BEFORE, 2, 1, 4, false)},
        {"mismatched_kind_before_4_ranks_large", play, SCENE(KIND, BEFORE, 4, 0, LARGE, true)},
        {"mismatched_kind_during_3_ranks", play, SCENE(BARRIER, DURING, 3, 2, LARGE, false)},
        {"mismatched_kind_between_3_ranks", play, SCENE(BARRIER, BETWEEN, 3, 1, 100, false)},
        {"mismatched_count_before_3_ranks", play, SCENE(COUNT, BEFORE, 3, 0, 4, false)},
        {"mismatched_count_between_2_ranks_large", play, SCENE(COUNT, BETWEEN, 2, 0, LARGE, true)},
        {"mismatched_count_during_2_ranks", play, SCENE(COUNT, DURING, 2, 1, LARGE, false)},
        {"mismatched_type_before_2_ranks_large", play, SCENE(TYPE, BEFORE, 2, 1, LARGE, false)},
        {"mismatched_type_between_4_ranks", play, SCENE(TYPE, BETWEEN, 4, 3, 4, false)},
        {"mismatched_type_during_4_ranks", play, SCENE(TYPE, DURING, 4, 2, LARGE, false)},
        {"mismatched_operator_between_2_ranks", play, SCENE(OPERATOR, BETWEEN, 2, 1, 2000, true)},
        {"mismatched_message_small_early", play_message, MESSAGE(10, 11, true)},
        {"mismatched_message_small_late", play_message, MESSAGE(11, 10, false)},
        {"mismatched_message_large", play_message, MESSAGE(100000, 100001, true)},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
