/* Ranks as threads of one process, each with its own context, over one mapping, and again as two hosts over a mock of EFA, so
 * that the thread sanitizer sees them. Every result is also checked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <pthread.h>

#include "comm/context.h"
#include "memory_store.h"
#include "operations.h"
#include "reference.h"
#include "thread_checks.h"
#include "thread_device.h"

#define RANKS_MAX 4
#define BYTES ((size_t)600000)

struct rank {
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct memory_store *store;
    int rank;
    int size;
    void (*body)(struct rank *rank);
    char *plain[2];
    char *shared[2];
};

static void pause_us(long us)
{
    const struct timespec moment = {0, us * 1000};
    nanosleep(&moment, NULL);
}

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

/* Even ranks and odd ranks call themselves different hosts, connected by EFA. */
static bool is_over_efa;

static const char *const one_host[] = {"SHOAL_CHUNK_BYTES=16K", NULL};
static const char *const even_host[] = {"SHOAL_CHUNK_BYTES=16K", "SHOAL_LIBFABRIC=" MOCK_FABRIC, "SHOAL_PROVIDER=efa",
                                        "SHOAL_HOST_ID=even", NULL};
static const char *const odd_host[] = {"SHOAL_CHUNK_BYTES=16K", "SHOAL_LIBFABRIC=" MOCK_FABRIC, "SHOAL_PROVIDER=efa",
                                       "SHOAL_HOST_ID=odd", NULL};

static const char *const *settings_of(const struct rank *rank)
{
    if (!is_over_efa)
        return one_host;
    return rank->rank % 2 ? odd_host : even_host;
}

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    const struct shoal_store store = memory_store_callbacks(rank->store);
    options.log = swallow;
    options.settings = settings_of(rank);
    OK(rank, shoal_context_create(&options, &rank->context));
    OK(rank, shoal_comm_create_with(rank->context, &store, rank->rank, rank->size, NULL, &rank->comm));
    for (int i = 0; i < 2; i++) {
        void *memory;
        OK(rank, shoal_mem_alloc(rank->context, BYTES, &memory));
        rank->shared[i] = memory;
        rank->plain[i] = malloc(BYTES);
        CHECK(rank, rank->plain[i], "no memory");
    }
    rank->body(rank);
    shoal_comm_free(rank->comm);
    for (int i = 0; i < 2; i++) {
        free(rank->plain[i]);
        OK(rank, shoal_mem_free(rank->context, rank->shared[i]));
    }
    shoal_context_destroy(rank->context);
    return NULL;
}

static void run_world(int size, void (*body)(struct rank *rank))
{
    struct memory_store store;
    struct rank ranks[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    memory_store_init(&store);
    for (int r = 0; r < size; r++) {
        ranks[r] = (struct rank){.store = &store, .rank = r, .size = size, .body = body};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < size; r++)
        pthread_join(threads[r], NULL);
    memory_store_fini(&store);
}

/* ---- Collectives --------------------------------------------------------------------------------------------------------- */

static char *choose(struct rank *rank, int memory, int which)
{
    const bool is_shared = memory == 1 || (memory == 2 && (rank->rank + which) % 2);
    return is_shared ? rank->shared[which] : rank->plain[which];
}

static void check_result(struct rank *rank, const struct reference *wanted, const char *output, size_t count)
{
    const long wrong = reference_compare(wanted, output, count);
    CHECK(rank, wrong < 0, "%zu elements, wrong from %ld on", count, wrong);
}

static struct team team_of(struct shoal_comm *comm)
{
    return (struct team){shoal_comm_size(comm), shoal_comm_rank(comm), NULL};
}

static struct areas areas_of(struct rank *rank)
{
    return (struct areas){
        .bytes = BYTES, .plain = {rank->plain[0], rank->plain[1]}, .shared = {rank->shared[0], rank->shared[1]}};
}

/* Blocks until the request is done. NULL: returns at once. */
static void end_request(struct rank *rank, struct shoal_request *request)
{
    if (request)
        OK(rank, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
}

static void run_operation(struct rank *rank, struct shoal_comm *comm, const struct operation *operation, size_t begin,
                          bool is_posted)
{
    const struct team team = team_of(comm);
    const struct areas areas = areas_of(rank);
    const struct operation_side side = operation_prepare(operation, &team, &areas, begin);
    struct shoal_request *request = NULL;
    char text[512];
    OK(rank, operation_call(&side, comm, is_posted ? &request : NULL));
    end_request(rank, request);
    CHECK(rank, operation_check(&side, text, sizeof text), "%s", text);
}

static void run_exchange(struct rank *rank, struct shoal_comm *comm, const struct exchange *exchange, size_t begin,
                         bool is_posted)
{
    const struct team team = team_of(comm);
    const struct areas areas = areas_of(rank);
    const struct exchange_side side = exchange_prepare(exchange, &team, &areas, begin);
    struct shoal_message messages[EXCHANGE_MESSAGES_MAX];
    const size_t count = exchange_list(&side, messages);
    struct shoal_request *request = NULL;
    char text[512];
    OK(rank,
       is_posted ? shoal_exchange_post(comm, messages, count, NULL, &request) : shoal_exchange(comm, messages, count, NULL));
    end_request(rank, request);
    CHECK(rank, exchange_check(&side, text, sizeof text), "%s", text);
}

/* Calls and sizes are given; everything else alternates. */
static void run_in_turn(struct rank *rank, enum operation_kind kind, enum operation_form form, size_t bytes, unsigned turn)
{
    const struct operation_row *entry = operation_row(kind);
    const enum shoal_type type = (enum shoal_type)(turn % SHOAL_TYPE_END);
    const size_t parts = (entry->is_input_partitioned || entry->is_output_partitioned) && bytes > 16 ? (size_t)rank->size : 1;
    struct operation operation = {.kind = kind,
                                  .form = form,
                                  .type = type,
                                  .op = (enum shoal_op)(turn % SHOAL_OP_END),
                                  .scale = 3,
                                  .root = (int)(turn % (unsigned)rank->size),
                                  .count = bytes / shoal_type_bytes(type) / parts,
                                  .tensors = 5,
                                  .lengths = (enum operation_lengths)(turn % LENGTHS_END),
                                  .order = (enum operation_order)(turn / 2 % ORDER_END),
                                  .place = (enum operation_place)(turn % PLACE_END),
                                  .memory = (enum operation_memory)(turn / 3 % MEMORY_END),
                                  .is_offset = turn % 5 == 0,
                                  .salt = turn};
    if (!entry->is_reduced || !operation_is_legal(type, operation.op))
        operation.op = SHOAL_SUM;
    while (operation_room(&operation, rank->size) > BYTES)
        operation.count /= 2;
    run_operation(rank, rank->comm, &operation, 0, turn % 2);
}

static void collectives_body(struct rank *rank)
{
    static const size_t bytes[] = {0, 16, 17, 4096, 4097, 80000, 400000};
    unsigned turn = 0;
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++) {
        for (int call = 0; call < OPERATION_KIND_END * FORM_END; call++) {
            const enum operation_kind kind = (enum operation_kind)(call / FORM_END);
            const enum operation_form form = (enum operation_form)(call % FORM_END);
            if (operation_row(kind)->has_form[form])
                run_in_turn(rank, kind, form, bytes[i], turn++);
        }
    }
}

static void threads_collectives(void **state)
{
    (void)state;
    for (int size = 2; size <= RANKS_MAX; size++)
        run_world(size, collectives_body);
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

static void messages_body(struct rank *rank)
{
    static const size_t counts[] = {0, 1, 1024, 1025, 40000};
    const int next = (rank->rank + 1) % rank->size, last = (rank->rank + rank->size - 1) % rank->size;
    for (int round = 0; round < 30; round++) {
        const size_t count = counts[round % 5];
        struct shoal_request *request;
        const struct reference given = reference_input(SHOAL_INT64, rank->rank, (uint64_t)round);
        const struct reference wanted = reference_input(SHOAL_INT64, last, (uint64_t)round);
        char *out = choose(rank, round % 3, 0), *in = choose(rank, round % 2, 1);
        reference_fill(&given, out, count);
        OK(rank, shoal_send_post(rank->comm, out, count, SHOAL_INT64, next, round, NULL, &request));
        OK(rank, shoal_recv(rank->comm, in, count, SHOAL_INT64, last, round, NULL));
        check_result(rank, &wanted, in, count);
        OK(rank, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
    }
}

static void threads_messages(void **state)
{
    (void)state;
    run_world(2, messages_body);
    run_world(4, messages_body);
}

/* ---- Asynchronous -------------------------------------------------------------------------------------------------------- */

#define POSTED 40
#define MOST 3000 /* elements of each */

static void post_one(struct rank *rank, struct shoal_comm *comm, int i, struct shoal_request **request_out)
{
    const size_t count = (size_t)(i * 977 % MOST);
    char *memory = choose(rank, i % 3, 0) + (size_t)i * MOST * 4;
    const struct reference given = reference_input(SHOAL_FLOAT32, shoal_comm_rank(comm), (uint64_t)i);
    reference_fill(&given, memory, count);
    OK(rank, shoal_allreduce_post(comm, memory, memory, count, SHOAL_FLOAT32, SHOAL_SUM, NULL, request_out));
}

static void check_one(struct rank *rank, struct shoal_comm *comm, int i)
{
    const struct reference wanted = reference_result(SHOAL_FLOAT32, SHOAL_SUM, shoal_comm_size(comm), (uint64_t)i);
    check_result(rank, &wanted, choose(rank, i % 3, 0) + (size_t)i * MOST * 4, (size_t)(i * 977 % MOST));
}

static void async_body(struct rank *rank)
{
    struct shoal_request *requests[POSTED];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < POSTED; i++)
            post_one(rank, rank->comm, i, &requests[i]);
        pause_us(rank->rank * 300); /* the progress thread makes progress meanwhile */
        for (int n = 0; n < POSTED; n++) {
            const int i = (n * 7 + rank->rank * 3) % POSTED;
            enum shoal_status status;
            while ((status = shoal_request_wait(requests[i], (uint32_t)(n % 2))) == SHOAL_PENDING)
                continue; /* a wait that times out loses nothing */
            OK(rank, status);
            check_one(rank, rank->comm, i);
            shoal_request_free(requests[i]);
        }
    }
    for (int i = 0; i < POSTED; i++) { /* nobody waits for these */
        post_one(rank, rank->comm, i, &requests[i]);
        shoal_request_free(requests[i]);
    }
    OK(rank, shoal_barrier(rank->comm, NULL));
    for (int i = 0; i < POSTED; i++)
        check_one(rank, rank->comm, i);
}

static void threads_async(void **state)
{
    (void)state;
    run_world(2, async_body);
    run_world(3, async_body);
}

struct chain {
    struct rank *rank;
    struct shoal_request *requests[POSTED];
    int posted;
    atomic_int done;
};

static void go_on(void *arg, enum shoal_status status)
{
    struct chain *chain = arg;
    OK(chain->rank, status);
    if (chain->posted < POSTED) {
        const int i = chain->posted++;
        post_one(chain->rank, chain->rank->comm, i, &chain->requests[i]);
        shoal_request_on_done(chain->requests[i], go_on, chain);
    }
    atomic_fetch_add(&chain->done, 1);
}

static void callbacks_body(struct rank *rank)
{
    struct chain chain = {.rank = rank, .posted = 1};
    post_one(rank, rank->comm, 0, &chain.requests[0]);
    shoal_request_on_done(chain.requests[0], go_on, &chain);
    while (atomic_load(&chain.done) < POSTED)
        pause_us(200);
    for (int i = 0; i < POSTED; i++) {
        OK(rank, shoal_request_wait(chain.requests[i], SHOAL_FOREVER));
        shoal_request_free(chain.requests[i]);
        check_one(rank, rank->comm, i);
    }
}

static void threads_callbacks_that_post(void **state)
{
    (void)state;
    run_world(2, callbacks_body);
    run_world(3, callbacks_body);
}

/* ---- Operands on devices ------------------------------------------------------------------------------------------------- */

static const enum shoal_collective_type device_kinds[] = {SHOAL_COLLECTIVE_ALLREDUCE, SHOAL_COLLECTIVE_ALLGATHER,
                                                          SHOAL_COLLECTIVE_REDUCE_SCATTER, SHOAL_COLLECTIVE_BROADCAST};

/* One call in progress, with operands on devices that are threads. */
struct device_call {
    enum shoal_collective_type collective;
    size_t count;
    int given_parts, taken_parts;
    float *input, *output;
    struct thread_device *devices[2]; /* NULL: in host memory, or no operand */
    struct shoal_request *request;
};

/* Returns rank r's element i of its part for rank `part`. */
static float device_value(int r, int part, size_t i)
{
    return (float)(i % 11 + (size_t)(7 * r + 3 * part));
}

static float device_wanted(const struct rank *rank, const struct device_call *call, int part, size_t i)
{
    float sum = 0;
    for (int r = 0; r < rank->size; r++)
        sum += device_value(r, call->given_parts > 1 ? rank->rank : 0, i);
    return shoal_collective_traits(call->collective)->shape.is_reduced ? sum
                                                                       : device_value(call->taken_parts > 1 ? part : 0, 0, i);
}

/* bits: whether input and output are on a device. */
static void begin_device_call(struct rank *rank, struct device_call *call, unsigned bits, unsigned pause_us)
{
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    const bool gives = shoal_shape_contributes(shape, rank->rank, 0);
    call->given_parts = shape->is_input_partitioned ? rank->size : 1;
    call->taken_parts = shape->is_output_partitioned ? rank->size : 1;
    call->input = malloc(call->count * (size_t)call->given_parts * sizeof(float));
    call->output = malloc(call->count * (size_t)call->taken_parts * sizeof(float));
    CHECK(rank, call->input && call->output, "no memory");
    for (size_t i = 0; i < call->count * (size_t)call->given_parts; i++)
        call->input[i] = device_value(rank->rank, (int)(i / call->count), i % call->count);
    struct shoal_call asked = {.collective = call->collective, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = call->count};
    call->devices[0] =
        gives && bits & 1 ? thread_device_open(call->input, false, call->given_parts, call->count, pause_us) : NULL;
    call->devices[1] = bits & 2 ? thread_device_open(call->output, true, call->taken_parts, call->count, pause_us) : NULL;
    asked.input = gives && !call->devices[0] ? call->input : NULL;
    asked.output = call->devices[1] ? NULL : call->output;
    struct shoal_layout *former;
    CHECK(rank,
          shoal_call_put_operands(&asked, rank->rank, rank->size,
                                  call->devices[0] ? thread_device_operand(call->devices[0]) : NULL,
                                  call->devices[1] ? thread_device_operand(call->devices[1]) : NULL, &former) &&
              !former,
          "no memory");
    OK(rank, shoal_engine_start(rank->comm->engine, &asked, 1, 0, &call->request));
}

static void end_device_call(struct rank *rank, struct device_call *call)
{
    OK(rank, shoal_request_wait(call->request, SHOAL_FOREVER));
    shoal_request_free(call->request);
    for (size_t i = 0; i < call->count * (size_t)call->taken_parts; i++) {
        const float wanted = device_wanted(rank, call, (int)(i / call->count), i % call->count);
        CHECK(rank, call->output[i] == wanted, "element %zu of collective %d is %g, not %g", i, (int)call->collective,
              (double)call->output[i], (double)wanted);
    }
    for (int i = 0; i < 2; i++)
        thread_device_close(call->devices[i]);
    free(call->input);
    free(call->output);
}

/* Runs two at a time, of all sizes. */
static void devices_body(struct rank *rank)
{
    static const size_t counts[] = {5, 1000, 40000, 200000};
    for (unsigned turn = 0; turn < 16; turn++) {
        struct device_call calls[2];
        for (unsigned i = 0; i < 2; i++) {
            calls[i] = (struct device_call){.collective = device_kinds[(turn + i) % 4], .count = counts[turn / 4]};
            begin_device_call(rank, &calls[i], (turn + i + (unsigned)rank->rank) % 4 ? 3 : turn % 4,
                              (turn * 37 + i * 11) % 300);
        }
        for (unsigned i = 0; i < 2; i++)
            end_device_call(rank, &calls[turn % 2 ? i : 1 - i]);
    }
}

static void threads_operands_on_devices(void **state)
{
    (void)state;
    run_world(2, devices_body);
    run_world(3, devices_body);
}

struct destroyer {
    struct rank *rank;
    atomic_bool is_done;
};

/* Refused, because the thread that makes progress is inside a call. */
static void destroy_context(void *arg, enum shoal_status status)
{
    struct destroyer *destroyer = arg;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    OK(destroyer->rank, status);
    shoal_context_destroy(destroyer->rank->context);
    OK(destroyer->rank, shoal_last_failure(destroyer->rank->context, NULL, &failure));
    CHECK(destroyer->rank, failure.status == SHOAL_ERR_STATE && strstr(failure.text, "shoal_context_destroy"), "told \"%s\"",
          failure.text);
    atomic_store(&destroyer->is_done, true);
}

static atomic_bool may_come;

static void destroy_body(struct rank *rank)
{
    struct destroyer destroyer = {.rank = rank};
    struct shoal_request *request;
    while (rank->rank == 1 && !atomic_load(&may_come)) /* so that rank 0's request is not done before its callback is set */
        pause_us(200);
    OK(rank, shoal_barrier_post(rank->comm, NULL, &request));
    if (rank->rank == 0)
        shoal_request_on_done(request, destroy_context, &destroyer);
    atomic_store(&may_come, true);
    while (rank->rank == 0 && !atomic_load(&destroyer.is_done))
        pause_us(200);
    end_request(rank, request);
}

static void threads_context_is_not_destroyed_in_a_callback(void **state)
{
    (void)state;
    atomic_store(&may_come, false);
    run_world(2, destroy_body);
}

static struct memory_store other_store;

static void left_request_body(struct rank *rank)
{
    const struct shoal_store store = memory_store_callbacks(&other_store);
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_request *request;
    int64_t value;
    options.log = swallow;
    options.settings = settings_of(rank);
    OK(rank, shoal_context_create(&options, &context));
    OK(rank, shoal_comm_create_with(context, &store, rank->rank, rank->size, NULL, &comm));
    OK(rank, shoal_recv_post(comm, &value, 1, SHOAL_INT64, 1 - rank->rank, 0, NULL, &request));
    CHECK(rank, shoal_request_test(request) == SHOAL_PENDING, "nobody sends");
    OK(rank, shoal_barrier(rank->comm, NULL)); /* otherwise the end of the other rank could end this request */
    shoal_context_destroy(context);
    CHECK(rank, shoal_request_test(request) != SHOAL_PENDING, "the request is not done");
    shoal_request_free(request);
}

/* A context frees everything it holds, except requests, which belong to the caller. */
static void threads_requests_outlive_their_context(void **state)
{
    (void)state;
    memory_store_init(&other_store);
    run_world(2, left_request_body);
    memory_store_fini(&other_store);
}

/* Waits for a late peer time out repeatedly; then all is well. */
static void late_body(struct rank *rank)
{
    struct shoal_request *request;
    int turns = 0;
    enum shoal_status status;
    if (rank->rank == 1)
        pause_us(200000);
    post_one(rank, rank->comm, 1, &request);
    while ((status = shoal_request_wait(request, 10)) == SHOAL_PENDING)
        turns++;
    OK(rank, status);
    CHECK(rank, rank->rank == 1 || turns >= 3, "only %d turns", turns);
    check_one(rank, rank->comm, 1);
    shoal_request_free(request);
}

static void threads_wait_that_runs_out_loses_nothing(void **state)
{
    (void)state;
    run_world(2, late_body);
}

static void note_done(void *is_done, enum shoal_status status)
{
    atomic_store((atomic_bool *)is_done, status == SHOAL_OK);
}

/* A post that waits is done when it returns. If a peer is late, it returns nevertheless, and the progress thread continues. */
static void waiting_post_body(struct rank *rank)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    struct shoal_request *request;
    int64_t value = 1, sum = 0;
    options.wait_ms = 10000;
    OK(rank, shoal_allreduce_post(rank->comm, &value, &sum, 1, SHOAL_INT64, SHOAL_SUM, &options, &request));
    CHECK(rank, sum == 2, "the sum is %lld before any wait", (long long)sum);
    OK(rank, shoal_request_wait(request, 0));
    shoal_request_free(request);

    options.wait_ms = 20;
    if (rank->rank == 1)
        pause_us(200000);
    OK(rank, shoal_allreduce_post(rank->comm, &value, &sum, 1, SHOAL_INT64, SHOAL_SUM, &options, &request));
    if (rank->rank == 0) {
        CHECK(rank, shoal_request_wait(request, 0) == SHOAL_PENDING, "done before the other rank has come");
        atomic_bool is_done = false;
        shoal_request_on_done(request, note_done, &is_done);
        for (int ms = 0; ms < 5000 && !is_done; ms++) /* nobody waits or tests */
            pause_us(1000);
        CHECK(rank, is_done, "left to the progress thread, it was not done");
    }
    OK(rank, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
}

static void threads_post_that_waits(void **state)
{
    (void)state;
    run_world(2, waiting_post_body);
}

/* ---- Several communicators and threads per rank -------------------------------------------------------------------------- */

#define USERS 3

struct user {
    struct rank *rank;
    struct shoal_comm *comm;
    int number;
};

#define ROOM (BYTES / USERS / 64 * 64) /* of each user's operands */

/* Each thread of a rank has a communicator; their order is arbitrary. Some calls block, some are posted. */
static void *use_comm(void *arg)
{
    struct user *user = arg;
    const int size = shoal_comm_size(user->comm);
    const size_t begin = (size_t)user->number * ROOM;
    uint64_t random = (uint64_t)user->number + 1; /* the same on all ranks */
    for (int round = 0; round < 60; round++) {
        const struct operation operation = operation_draw(&random, size, ROOM);
        run_operation(user->rank, user->comm, &operation, begin, round % 2);
        if (round % 4)
            continue;
        const struct exchange exchange = exchange_draw(&random, size, ROOM);
        run_exchange(user->rank, user->comm, &exchange, begin, round % 8);
    }
    return NULL;
}

/* Several calls of any kind are in progress on each communicator, and end in another order than they began. */
#define HELD 4

static void *hold_several(void *arg)
{
    struct user *user = arg;
    struct rank *rank = user->rank;
    const struct team team = team_of(user->comm);
    const struct areas areas = areas_of(rank);
    uint64_t random = (uint64_t)user->number + 100;
    for (int round = 0; round < 15; round++) {
        struct operation_side sides[HELD];
        struct shoal_request *requests[HELD];
        char text[512];
        for (size_t i = 0; i < HELD; i++) {
            const struct operation operation = operation_draw(&random, team.size, ROOM / HELD / 64 * 64);
            sides[i] = operation_prepare(&operation, &team, &areas, (size_t)user->number * ROOM + i * (ROOM / HELD / 64 * 64));
            OK(rank, operation_call(&sides[i], user->comm, &requests[i]));
        }
        for (size_t n = 0; n < HELD; n++) {
            const size_t i = (n * 3 + (size_t)rank->rank) % HELD;
            end_request(rank, requests[i]);
            CHECK(rank, operation_check(&sides[i], text, sizeof text), "%s", text);
        }
    }
    return NULL;
}

static void users_body(struct rank *rank)
{
    void *(*const ways[])(void *) = {use_comm, hold_several};
    struct user users[USERS];
    pthread_t threads[USERS];
    for (int i = 0; i < USERS; i++) {
        users[i] = (struct user){rank, NULL, i};
        OK(rank, shoal_comm_split(rank->comm, i == 2 ? rank->rank % 2 : 0, i == 1 ? -rank->rank : 0, NULL, &users[i].comm));
    }
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < USERS; i++)
            CHECK(rank, pthread_create(&threads[i], NULL, ways[way], &users[(i + rank->rank) % USERS]) == 0, "no thread");
        for (int i = 0; i < USERS; i++)
            pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < USERS; i++) {
        OK(rank, shoal_comm_finalize(users[i].comm));
        shoal_comm_free(users[i].comm);
    }
}

static void threads_several_communicators(void **state)
{
    (void)state;
    run_world(2, users_body);
    run_world(4, users_body);
}

/* Splits while other communicators are busy, and while shared memory is allocated and freed. */
static void *split_again(void *arg)
{
    struct user *user = arg;
    struct rank *rank = user->rank;
    for (int i = 0; i < 10; i++) {
        struct shoal_comm *child;
        void *memory;
        int64_t values[3000];
        OK(rank, shoal_comm_split(user->comm, rank->rank % (1 + i % 2), 0, NULL, &child));
        OK(rank, shoal_mem_alloc(rank->context, sizeof values, &memory));
        int64_t *shared = memory;
        for (int n = 0; n < 3000; n++)
            values[n] = shared[n] = n;
        OK(rank, shoal_allreduce(child, shared, values, 3000, SHOAL_INT64, SHOAL_SUM, NULL));
        for (int n = 0; n < 3000; n++)
            CHECK(rank, values[n] == (int64_t)n * shoal_comm_size(child), "element %d", n);
        shoal_comm_free(child);
        OK(rank, shoal_mem_free(rank->context, memory));
    }
    return NULL;
}

static void split_body(struct rank *rank)
{
    struct user users[2] = {{rank, NULL, 0}, {rank, NULL, 1}};
    pthread_t thread;
    for (int i = 0; i < 2; i++)
        OK(rank, shoal_comm_split(rank->comm, 0, 0, NULL, &users[i].comm));
    CHECK(rank, pthread_create(&thread, NULL, split_again, &users[0]) == 0, "no thread");
    use_comm(&users[1]);
    pthread_join(thread, NULL);
    shoal_comm_free(users[0].comm);
    shoal_comm_free(users[1].comm);
}

static void threads_split_beside_others(void **state)
{
    (void)state;
    run_world(3, split_body);
}

/* ---- Ends ---------------------------------------------------------------------------------------------------------------- */

static void *abort_soon(void *arg)
{
    pause_us(50000);
    shoal_comm_abort(arg);
    return NULL;
}

/* Rank 0 never calls; another thread of rank 1 aborts; all waiting ranks return. */
static void abort_body(struct rank *rank)
{
    pthread_t thread;
    struct shoal_failure failure = {.struct_bytes = sizeof failure};
    if (rank->rank == 1)
        CHECK(rank, pthread_create(&thread, NULL, abort_soon, rank->comm) == 0, "no thread");
    if (rank->rank == 0)
        pause_us(300000);
    EXPECT(rank, SHOAL_ERR_ABORTED, shoal_barrier(rank->comm, NULL));
    EXPECT(rank, SHOAL_ERR_ABORTED, shoal_barrier(rank->comm, NULL));
    OK(rank, shoal_last_failure(NULL, rank->comm, &failure));
    CHECK(rank, failure.status == SHOAL_ERR_ABORTED && failure.rank == 1, "blames rank %d", failure.rank);
    if (rank->rank == 1)
        pthread_join(thread, NULL);
}

static void threads_abort_from_another_thread(void **state)
{
    (void)state;
    run_world(3, abort_body);
}

static void leave_body(struct rank *rank)
{
    OK(rank, shoal_barrier(rank->comm, NULL));
    if (rank->rank == 0)
        return; /* frees immediately */
    const enum shoal_status status = shoal_barrier(rank->comm, NULL);
    CHECK(rank, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
}

static void threads_rank_that_left_is_named(void **state)
{
    (void)state;
    run_world(3, leave_body);
}

/* ---- Several worlds ------------------------------------------------------------------------------------------------------ */

#define WORLDS 3

static struct memory_store stores[WORLDS];
static struct shoal_context *common;

static struct shoal_comm *make_world(struct rank *rank, struct shoal_context *context, int which)
{
    const struct shoal_store store = memory_store_callbacks(&stores[which]);
    struct shoal_comm *comm;
    OK(rank, shoal_comm_create_with(context, &store, rank->rank, rank->size, NULL, &comm));
    return comm;
}

static void use_shared(struct rank *rank, struct shoal_comm *comm)
{
    float *x = (float *)(void *)rank->shared[0];
    const size_t count = BYTES / sizeof *x;
    for (size_t i = 0; i < count; i++)
        x[i] = 1;
    OK(rank, shoal_allreduce(comm, x, x, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(rank, x[0] == (float)rank->size && x[count - 1] == (float)rank->size, "the sum is %g", (double)x[0]);
}

static void run_world_with_stores(int size, void (*body)(struct rank *rank))
{
    for (int i = 0; i < WORLDS; i++)
        memory_store_init(&stores[i]);
    run_world(size, body);
    for (int i = 0; i < WORLDS; i++)
        memory_store_fini(&stores[i]);
}

/* Beside the first world at first, then without it. */
static void meet_again_body(struct rank *rank)
{
    for (int i = 0; i < WORLDS; i++) {
        struct shoal_comm *comm = make_world(rank, rank->context, i);
        use_shared(rank, comm);
        OK(rank, shoal_comm_finalize(comm));
        shoal_comm_free(comm);
        if (rank->comm)
            use_shared(rank, rank->comm);
        if (rank->comm)
            OK(rank, shoal_comm_finalize(rank->comm));
        shoal_comm_free(rank->comm);
        rank->comm = NULL;
    }
}

static void threads_meet_in_several_worlds(void **state)
{
    (void)state;
    run_world_with_stores(4, meet_again_body);
}

static void free_other(void *comm, enum shoal_status status)
{
    (void)status;
    shoal_comm_free(comm);
}

/* A callback cannot wait for the others: its world ends with the next one that is made, or with the context. */
static void end_in_callback_body(struct rank *rank)
{
    for (int i = 0; i < WORLDS; i++) {
        struct shoal_request *request;
        struct shoal_comm *comm = make_world(rank, rank->context, i);
        use_shared(rank, comm);
        OK(rank, shoal_comm_finalize(comm));
        OK(rank, shoal_barrier_post(rank->comm, NULL, &request));
        shoal_request_on_done(request, free_other, comm);
        OK(rank, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
    }
}

static void threads_world_ends_in_a_callback(void **state)
{
    (void)state;
    run_world_with_stores(3, end_in_callback_body);
}

/* Ranks 0 and 1. Rank 2 has a context of its own, and learns it as soon. */
static void common_context_body(struct rank *rank)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct shoal_comm *comm;
    const struct shoal_store store = memory_store_callbacks(&stores[0]);
    if (rank->rank == 0)
        common = rank->context;
    OK(rank, shoal_barrier(rank->comm, NULL));
    struct shoal_context *context = rank->rank < 2 ? common : rank->context;
    const enum shoal_status status = shoal_comm_create_with(context, &store, rank->rank, rank->size, NULL, &comm);
    CHECK(rank, status == SHOAL_ERR_STATE, "%s", shoal_status_name(status));
    OK(rank, shoal_last_failure(context, NULL, &failure));
    CHECK(rank, strstr(failure.text, "ranks 0 and 1 share one context"), "%s", failure.text);
    OK(rank, shoal_barrier(rank->comm, NULL)); /* nobody's context ends before */
}

static void threads_that_share_a_context_are_refused(void **state)
{
    (void)state;
    run_world_with_stores(3, common_context_body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_collectives),
        cmocka_unit_test(threads_messages),
        cmocka_unit_test(threads_async),
        cmocka_unit_test(threads_callbacks_that_post),
        cmocka_unit_test(threads_operands_on_devices),
        cmocka_unit_test(threads_context_is_not_destroyed_in_a_callback),
        cmocka_unit_test(threads_requests_outlive_their_context),
        cmocka_unit_test(threads_wait_that_runs_out_loses_nothing),
        cmocka_unit_test(threads_post_that_waits),
        cmocka_unit_test(threads_several_communicators),
        cmocka_unit_test(threads_split_beside_others),
        cmocka_unit_test(threads_abort_from_another_thread),
        cmocka_unit_test(threads_rank_that_left_is_named),
        cmocka_unit_test(threads_meet_in_several_worlds),
        cmocka_unit_test(threads_world_ends_in_a_callback),
        cmocka_unit_test(threads_that_share_a_context_are_refused),
    };
    const int failed = cmocka_run_group_tests_name("threads", tests, NULL, NULL);
    assert_non_null(dlopen(MOCK_FABRIC, RTLD_NOW)); /* here: the sanitizer does not know the loader's lock */
    is_over_efa = true;
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    return failed + cmocka_run_group_tests_name("threads_over_efa", tests, NULL, NULL);
}
