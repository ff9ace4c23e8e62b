/* Ranks that call different operations: every rank gets ERR_MISMATCH, and both sides report both calls and the difference. A
 * rank that gets the error moves no byte. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "fault_calls.h"

/* How the odd rank's call differs from that of the others. */
enum odd { KIND, BARRIER, COUNT, TYPE, OPERATOR, ROOT, SCALE, LENGTHS, NUMBER, TENSORS, TAG, ODD_END };

static const char *const odd_names[ODD_END] = {"kind",  "barrier", "count",  "type",    "operator", "root",
                                               "scale", "lengths", "number", "tensors", "tag"};

/* DURING: behind large ones that agree and are still under way. */
enum when { BEFORE, BETWEEN, DURING, WHEN_END };

struct scene {
    enum fault_call_id call;
    enum odd odd;
    enum when when;
    int size;
    int odd_rank;
    bool is_large;
    bool is_shared;
};

#define AHEAD 3
#define AHEAD_COUNT ((size_t)1 << 20)
#define LARGE ((size_t)300000)
#define SMALL ((size_t)1024) /* as DIRECT: one more is too many for most calls */
#define DIRECT "SHOAL_INLINE_BYTES=4096"

/* ---- The calls ----------------------------------------------------------------------------------------------------------- */

static bool can_differ_in(enum odd odd, enum fault_call_id id)
{
    const struct fault_call *call = &fault_calls[id];
    const struct operation_row *row = operation_row(call->kind);
    switch (odd) {
    case OPERATOR:
    case SCALE:
        return row->is_reduced;
    case ROOT:
        return row->root_contributes || row->root_receives;
    case LENGTHS:
        return call->form == FORM_PARTS;
    case NUMBER:
    case TENSORS:
        return call->form == FORM_TENSORS;
    default:
        return true;
    }
}

/* The fourth tensor is empty; the longest of two or more lengths stays the same when the salt changes. */
static struct operation usual_operation(const struct scene *scene)
{
    const size_t elements = scene->is_large ? LARGE : SMALL;
    const struct fault_call *call = &fault_calls[scene->call];
    const struct fault_load load = {call, 0, fault_count_for(call, scene->size, elements), scene->is_shared, false};
    struct operation operation = fault_operation(&load);
    operation.op = scene->odd == SCALE ? SHOAL_SCALED_SUM : SHOAL_SUM;
    operation.scale = 2;
    operation.lengths = LENGTHS_ZEROS;
    operation.tensors = 3;
    return operation;
}

static struct operation odd_operation(const struct scene *scene)
{
    struct operation operation = usual_operation(scene);
    switch (scene->odd) {
    case KIND:
        operation.kind = operation.kind == OPERATION_BROADCAST ? OPERATION_ALLREDUCE : OPERATION_BROADCAST;
        operation.form = FORM_PLAIN;
        break;
    case BARRIER:
        operation = (struct operation){.kind = OPERATION_BARRIER};
        break;
    case COUNT:
        operation.count++;
        break;
    case TYPE:
        operation.type = SHOAL_BFLOAT16;
        break;
    case TAG:
        operation.type = SHOAL_TYPE_TAGGED(operation.type, 200);
        break;
    case OPERATOR:
        operation.op = SHOAL_MAX;
        break;
    case ROOT:
        operation.root = scene->odd_rank ? scene->odd_rank : 1;
        break;
    case SCALE:
        operation.scale = 3;
        break;
    case NUMBER:
        operation.tensors++;
        break;
    default:
        operation.salt++;
    }
    return operation;
}

/* ---- The calls in messages ----------------------------------------------------------------------------------------------- */

static void append_word(char *text, size_t bytes, const char *name)
{
    size_t used = strlen(text);
    for (; *name && used + 1 < bytes; name++)
        text[used++] = *name == '_' ? ' ' : (char)tolower((unsigned char)*name);
    text[used] = 0;
}

static const char *const types[] = {
#define NAME(name, number, bytes) [SHOAL_##name] = #name,
    SHOAL_TYPE_LIST(NAME)
#undef NAME
};

static const char *const ops[] = {
#define NAME(name, number) [SHOAL_##name] = #name,
    SHOAL_OP_LIST(NAME)
#undef NAME
};

static size_t find_most(const size_t *counts, int size, size_t most)
{
    for (int i = 0; counts && i < size; i++)
        most = counts[i] > most ? counts[i] : most;
    return most;
}

/* Returns the count in the message: the longest part, or all elements of the tensors. */
static size_t told_count(const struct operation *operation, const struct team *team)
{
    char nothing; /* only its address is used */
    const struct operation_side side = {.operation = *operation, .team = *team, .input = &nothing, .output = &nothing};
    size_t count = operation->form == FORM_PLAIN ? operation->count : 0;
    struct operation_arguments arguments = operation_open_arguments(&side);
    for (int t = 0; t < operation->tensors && operation->form == FORM_TENSORS; t++)
        count += arguments.tensors[t].count;
    count = find_most(arguments.taken, team->size, find_most(arguments.given, team->size, count));
    operation_close_arguments(&arguments);
    return count;
}

/* Prints an operation, for example "reduce-scatter of 100 float32 per rank, sum". */
static void print_operation(const struct operation *operation, const struct team *team, char *text, size_t bytes)
{
    const struct operation_row *row = operation_row(operation->kind);
    const bool is_free = operation->kind == OPERATION_ALLTOALL && operation->form == FORM_PARTS;
    snprintf(text, bytes, "%s", row->name);
    if (operation->kind == OPERATION_BARRIER)
        return;
    snprintf(text, bytes, "%s of %s%zu ", row->name, is_free ? "up to " : "", told_count(operation, team));
    append_word(text, bytes, types[operation->type & 0xff]);
    append_word(text, bytes, operation->type >> 8 ? " tagged 200" : "");
    append_word(text, bytes, row->is_input_partitioned || row->is_output_partitioned ? " per rank" : "");
    append_word(text, bytes, row->is_reduced ? ", " : "");
    append_word(text, bytes, row->is_reduced ? ops[operation->op] : "");
    const size_t used = strlen(text);
    if (row->root_contributes || row->root_receives)
        snprintf(text + used, bytes - used, ", root %d", operation->root);
}

/* ---- The ranks ----------------------------------------------------------------------------------------------------------- */

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

static void end_ahead(struct fault_rank *self, struct shoal_request *ahead[AHEAD])
{
    for (int i = 0; i < AHEAD; i++) {
        const enum shoal_status status = shoal_request_wait(ahead[i], 0);
        fault_check(self, status == SHOAL_OK || status == SHOAL_ERR_MISMATCH, "request %d: %s", i, shoal_status_name(status));
        shoal_request_free(ahead[i]);
    }
}

/* Small calls may have returned on ranks that compare with no other rank, or that received what they wanted: the next call
 * fails. */
static enum shoal_status call_and_look(struct fault_rank *self, struct fault_operands *operands)
{
    const struct scene *scene = self->parameters;
    struct shoal_request *request = NULL;
    fault_operands_mark(operands);
    enum shoal_status status = fault_operands_call(operands, self->comm, &request);
    if (!fault_check(self, status == SHOAL_OK, "the post: %s", shoal_status_name(status)))
        return status;
    status = shoal_request_wait(request, SHOAL_FOREVER);
    shoal_request_free(request);
    const struct operation_row *row = operation_row(fault_calls[scene->call].kind);
    const bool may_return = !scene->is_large && (row->root_contributes || row->root_receives);
    fault_check(self, status == SHOAL_ERR_MISMATCH || (status == SHOAL_OK && may_return), "the call: %s",
                shoal_status_name(status));
    if (status != SHOAL_OK)
        fault_check(self, fault_operands_are_marked(operands), "an operand was written");
    return status == SHOAL_OK ? shoal_barrier(self->comm, NULL) : status;
}

static void body(struct fault_rank *self)
{
    const struct scene *scene = self->parameters;
    const struct operation operation = self->rank == scene->odd_rank ? odd_operation(scene) : usual_operation(scene);
    struct shoal_request *ahead[AHEAD] = {NULL};
    struct fault_operands operands;
    float few[100], *large = scene->when == DURING ? calloc(AHEAD * AHEAD_COUNT, sizeof(float)) : NULL;
    if (!fault_operands_make_as(self, &operation, &operands) || !fault_check(self, large || scene->when != DURING, "no memory"))
        return;
    for (int i = 0; i < 3 && scene->when == BETWEEN; i++)
        fault_allreduce_once(self, self->comm, few, FAULT_COUNT_OF(few));
    if (large)
        go_ahead(self, ahead, large);
    fault_note(self, call_and_look(self, &operands));
    if (large)
        end_ahead(self, ahead);
    const enum shoal_status status = shoal_barrier(self->comm, NULL);
    fault_check(self, status == SHOAL_ERR_MISMATCH, "the next call: %s", shoal_status_name(status));
    fault_operands_free(&operands);
    free(large);
}

/* ---- The parent ---------------------------------------------------------------------------------------------------------- */

/* In an all-to-all with parts of different lengths only a pair of ranks knows that they differ. */
static bool is_told_by_pair(const struct scene *scene)
{
    return scene->call == FAULT_ALLTOALLV && (scene->odd == COUNT || scene->odd == LENGTHS);
}

__attribute__((nonnull)) static void check_text(struct fault_test *test, const struct scene *scene, const char *text,
                                                const char *where)
{
    const struct operation usual = usual_operation(scene), odd = odd_operation(scene);
    const struct team usual_team = {scene->size, scene->odd_rank == 0, NULL}, odd_team = {scene->size, scene->odd_rank, NULL};
    char usual_text[96], odd_text[96];
    print_operation(&usual, &usual_team, usual_text, sizeof usual_text);
    print_operation(&odd, &odd_team, odd_text, sizeof odd_text);
    if (is_told_by_pair(scene)) {
        fault_expect(test, strstr(text, "lengths of parts differ") && strstr(text, "elements to rank"), "%s: %s", where, text);
        return;
    }
    fault_expect(test, strstr(text, usual_text) && strstr(text, odd_text), "%s does not tell \"%s\" and \"%s\": %s", where,
                 usual_text, odd_text, text);
    const bool reads_same = strcmp(usual_text, odd_text) == 0;
    fault_expect(test, !reads_same || strstr(text, "lengths of parts, the counts of tensors, or the scale"),
                 "%s does not tell what differs: %s", where, text);
    fault_expect(test, reads_same == (scene->odd == SCALE || scene->odd == LENGTHS || scene->odd == NUMBER),
                 "\"%s\" and \"%s\"", usual_text, odd_text);
}

/* Among three or more ranks the odd one is named, whichever rank notices it; between two ranks neither is. If only one pair of
 * ranks knows a length, no rank is named. */
static void check_named(struct fault_test *test, const struct scene *scene, const struct shoal_failure *failure)
{
    const int odd = scene->size > 2 ? scene->odd_rank : -1;
    const bool is_right = failure->rank == odd || (is_told_by_pair(scene) && failure->rank == -1);
    fault_expect(test, is_right, "rank %d is named, not %d: %s", failure->rank, odd, failure->text);
    fault_expect(test, failure->pid == (failure->rank < 0 ? 0 : test->shared->results[failure->rank].pid),
                 "rank %d is named, but process %d", failure->rank, failure->pid);
    fault_expect(test, strcmp(failure->text, test->shared->results[0].failure.text) == 0,
                 "ranks tell different things: \"%s\", \"%s\"", failure->text, test->shared->results[0].failure.text);
}

static void play(struct fault_test *test)
{
    static const char *const settings[] = {DIRECT, NULL};
    const struct scene *scene = test->parameters;
    const struct fault_job job = {.size = scene->size, .body = body, .parameters = scene, .settings = settings};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < scene->size; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == SHOAL_ERR_MISMATCH, "rank %d got %s", r, shoal_status_name(result->status));
        if (!fault_expect(test, result->has_failure, "rank %d has no failure record", r))
            continue;
        check_text(test, scene, result->failure.text, "the text");
        check_text(test, scene, result->log, "the log");
        fault_expect(test, strstr(result->failure.text, "process") != NULL, "rank %d: %s", r, result->failure.text);
        check_named(test, scene, &result->failure);
    }
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

struct message_scene {
    size_t sent;
    size_t wanted;
    bool is_early;    /* the message comes before its receive */
    bool is_exchange; /* one of several */
    int tag;          /* of the type that is wanted */
};

static enum shoal_status send_or_receive(struct fault_rank *self, float *buffer)
{
    const struct message_scene *scene = self->parameters;
    const bool is_send = self->rank == 0;
    const size_t count = is_send ? scene->sent : scene->wanted;
    const enum shoal_type type = SHOAL_TYPE_TAGGED(SHOAL_FLOAT32, is_send ? 0 : scene->tag);
    const struct shoal_message messages[] = {{is_send, buffer, count, type, 1 - self->rank, 5},
                                             {is_send, buffer, 0, SHOAL_FLOAT32, 1 - self->rank, 6}};
    if (scene->is_exchange)
        return shoal_exchange(self->comm, messages, FAULT_COUNT_OF(messages), NULL);
    return is_send ? shoal_send(self->comm, buffer, count, type, 1, 5, NULL)
                   : shoal_recv(self->comm, buffer, count, type, 0, 5, NULL);
}

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
    const enum shoal_status status = send_or_receive(self, buffer);
    /* A small send is done at once; the next operation fails. */
    fault_check(self, status == SHOAL_ERR_MISMATCH || self->rank == 0, "the receive: %s", shoal_status_name(status));
    fault_note(self, status == SHOAL_OK ? shoal_barrier(self->comm, NULL) : status);
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
    snprintf(wanted, sizeof wanted, scene->tag ? "of %zu float32 tagged %d, " : "of %zu float32, ", scene->wanted, scene->tag);
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == SHOAL_ERR_MISMATCH, "rank %d got %s", r, shoal_status_name(result->status));
        fault_expect(test, strstr(result->log, sent) && strstr(result->log, wanted), "rank %d has not logged both calls", r);
        fault_expect(test, result->failure.rank == -1, "rank %d is named for what two ranks differ in", result->failure.rank);
    }
}

#define MESSAGE(...)              \
    &(const struct message_scene) \
    {                             \
        __VA_ARGS__               \
    }

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

#define ROWS_MAX ((size_t)FAULT_CALLS * ODD_END)

/* Small calls in which each rank gives, or wants what its own root gives: none of them needs the others' records. */
static const struct scene self_contained[] = {
    {FAULT_BROADCAST, ROOT, BEFORE, 3, 2, false, false}, {FAULT_BROADCAST, ROOT, BETWEEN, 2, 1, false, true},
    {FAULT_SCATTER, ROOT, BEFORE, 2, 1, false, false},   {FAULT_REDUCE, KIND, BEFORE, 2, 0, false, false},
    {FAULT_GATHER, KIND, BETWEEN, 2, 0, false, false},
};

static void name_scene(const struct scene *scene, char name[96])
{
    static const char *const places[] = {"before", "between", "during"};
    snprintf(name, 96, "mismatched_%s_%s_%s_%d_ranks_rank_%d%s", odd_names[scene->odd], fault_calls[scene->call].name,
             places[scene->when], scene->size, scene->odd_rank, scene->is_large ? "_large" : "");
}

/* Each call with each of its fields; places, ranks, sizes and memory alternate. */
static size_t compose(struct scene scenes[ROWS_MAX], char names[ROWS_MAX][96])
{
    size_t rows = 0;
    for (int odd = 0; odd < ODD_END; odd++) {
        for (int call = 0; call < FAULT_EXCHANGE; call++) {
            const int turn = odd + call, size = 2 + turn % 3;
            if (!can_differ_in((enum odd)odd, (enum fault_call_id)call))
                continue;
            scenes[rows] = (struct scene){(enum fault_call_id)call,
                                          (enum odd)odd,
                                          (enum when)(turn / 2 % WHEN_END),
                                          size,
                                          (turn / 3 + 1) % size,
                                          turn % 2,
                                          turn / 2 % 2};
            rows++;
        }
    }
    memcpy(scenes + rows, self_contained, sizeof self_contained);
    rows += FAULT_COUNT_OF(self_contained);
    for (size_t i = 0; i < rows; i++)
        name_scene(&scenes[i], names[i]);
    return rows;
}

int main(int argc, char **argv)
{
    const struct fault_case messages[] = {
        {"mismatched_message_small_early", play_message, MESSAGE(10, 11, true, false, 0)},
        {"mismatched_message_small_late", play_message, MESSAGE(11, 10, false, false, 0)},
        {"mismatched_message_large", play_message, MESSAGE(100000, 100001, true, false, 0)},
        {"mismatched_message_of_other_tag", play_message, MESSAGE(10, 10, true, false, 9)},
        {"mismatched_exchange_large_of_other_tag", play_message, MESSAGE(100000, 100000, false, true, 200)},
        {"mismatched_exchange_small", play_message, MESSAGE(10, 11, false, true, 0)},
        {"mismatched_exchange_large", play_message, MESSAGE(100001, 100000, true, true, 0)},
    };
    static struct scene scenes[ROWS_MAX];
    static char names[ROWS_MAX][96];
    struct fault_case cases[ROWS_MAX + FAULT_COUNT_OF(messages)];
    const size_t rows = compose(scenes, names);
    for (size_t i = 0; i < rows; i++)
        cases[i] = (struct fault_case){names[i], play, &scenes[i]};
    memcpy(cases + rows, messages, sizeof messages);
    return fault_main(argc, argv, cases, rows + FAULT_COUNT_OF(messages));
}
