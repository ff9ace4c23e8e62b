/* Ranks that are threads of one process, with helpers and with operands on the stand-in for CUDA, so that the thread sanitizer
 * sees helpers read and write the rings that ranks lend each other. The linker replaces shoal_lent_address(), which every
 * thread calls that borrows, so tests know that helpers did, and can hold one there. It also replaces shoal_extent_reduce(),
 * around it, which names the rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include "comm/context.h"
#include "engine/engine_state.h"
#include "engine/reduce_step.h"
#include "memory_store.h"
#include "mock/cuda/mock_client.h"
#include "operand/lent.h"
#include "thread_checks.h"

#define RANKS_MAX 4
#define COUNT ((size_t)300007) /* floats: several chunks, of which helpers do parts */

struct rank;

struct world {
    struct memory_store store;
    int size, hosts, threads;
    void (*body)(struct rank *rank);
};

struct rank {
    struct world *world;
    struct shoal_context *context;
    struct shoal_comm *parent, *comm;
    int rank;
    float *values; /* COUNT */
    shoal_cu_address input, output;
    struct shoal_options options; /* with the stream */
};

static shoal_cu_context device_context;

/* ---- Borrowing, watched -------------------------------------------------------------------------------------------------- */

static atomic_uint helped;             /* runs that helpers have borrowed */
static atomic_bool must_helpers_come;  /* other threads wait until a helper has borrowed */
static atomic_bool must_hold_a_helper; /* the next one stays inside until an abort begins */
static atomic_bool is_held, has_abort_begun, has_left;
static atomic_int held_rank;           /* whose helper is held */
static _Thread_local int rank_at_work; /* for which this thread reduces */

static void await(atomic_bool *flag)
{
    while (!atomic_load(flag))
        usleep(100);
}

static bool am_i_helper(void)
{
    char name[16] = "";
    (void)pthread_getname_np(pthread_self(), name, sizeof name);
    return strncmp(name, "shoal-help-", strlen("shoal-help-")) == 0;
}

/* Long enough for the abort to find the helper at work. */
static void stay_until_abort(void)
{
    atomic_store(&held_rank, rank_at_work);
    atomic_store(&is_held, true);
    await(&has_abort_begun);
    usleep(50000);
    atomic_store(&has_left, true);
}

void __real_shoal_extent_reduce(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                                const struct shoal_step *step, size_t begin, size_t end,
                                const struct shoal_extent_scratch *scratch);
void __wrap_shoal_extent_reduce(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                                const struct shoal_step *step, size_t begin, size_t end,
                                const struct shoal_extent_scratch *scratch);
void __wrap_shoal_extent_reduce(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                                const struct shoal_step *step, size_t begin, size_t end,
                                const struct shoal_extent_scratch *scratch)
{
    rank_at_work = engine->rank;
    __real_shoal_extent_reduce(engine, chunk, slot, step, begin, end, scratch);
}

char *__real_shoal_lent_address(const struct shoal_lent *lent, int part, size_t at, size_t *run);
char *__wrap_shoal_lent_address(const struct shoal_lent *lent, int part, size_t at, size_t *run);
char *__wrap_shoal_lent_address(const struct shoal_lent *lent, int part, size_t at, size_t *run)
{
    if (am_i_helper()) {
        atomic_fetch_add(&helped, 1);
        if (atomic_exchange(&must_hold_a_helper, false))
            stay_until_abort();
    }
    while (atomic_load(&must_helpers_come) && !atomic_load(&helped))
        usleep(100);
    return __real_shoal_lent_address(lent, part, at, run);
}

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static void cuda(const struct rank *rank, shoal_cu_result result)
{
    CHECK(rank, result == SHOAL_CU_SUCCESS, "the driver answered %d", (int)result);
}

static void open_device(struct rank *rank)
{
    shoal_cu_stream stream;
    rank->options = (struct shoal_options)SHOAL_OPTIONS_INIT;
    rank->values = malloc(COUNT * sizeof(float));
    CHECK(rank, rank->values, "no memory");
    cuda(rank, cu.context_set(device_context));
    cuda(rank, cu.stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    cuda(rank, cu.allocate(&rank->input, COUNT * sizeof(float)));
    cuda(rank, cu.allocate(&rank->output, COUNT * sizeof(float)));
    rank->options.stream = stream;
}

static void close_device(struct rank *rank)
{
    cuda(rank, cu.stream_synchronize(rank->options.stream));
    cuda(rank, cu.release(rank->input));
    cuda(rank, cu.release(rank->output));
    cuda(rank, cu.stream_destroy(rank->options.stream));
    free(rank->values);
}

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    const struct world *world = rank->world;
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    const struct shoal_store store = memory_store_callbacks(&rank->world->store);
    char host[32], threads[32];
    snprintf(host, sizeof host, "SHOAL_HOST_ID=host-%d", rank->rank * world->hosts / world->size);
    snprintf(threads, sizeof threads, "SHOAL_THREADS=%d", world->threads);
    const char *const settings[] = {host, threads, "SHOAL_LIBFABRIC=" MOCK_FABRIC, "SHOAL_PROVIDER=efa", NULL};
    options.log = swallow;
    options.settings = settings;
    open_device(rank);
    OK(rank, shoal_context_create(&options, &rank->context));
    OK(rank, shoal_comm_create_with(rank->context, &store, rank->rank, world->size, NULL, &rank->parent));
    OK(rank, shoal_comm_split(rank->parent, 0, rank->rank, NULL, &rank->comm));
    world->body(rank);
    shoal_comm_free(rank->comm);
    shoal_comm_free(rank->parent);
    shoal_context_destroy(rank->context);
    close_device(rank);
    return NULL;
}

static void run_world(int size, int hosts, int threads, void (*body)(struct rank *rank))
{
    struct world world = {.size = size, .hosts = hosts, .threads = threads, .body = body};
    struct rank ranks[RANKS_MAX];
    pthread_t running[RANKS_MAX];
    memory_store_init(&world.store);
    atomic_store(&helped, 0);
    for (int r = 0; r < size; r++) {
        ranks[r] = (struct rank){.world = &world, .rank = r};
        assert_int_equal(pthread_create(&running[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < size; r++)
        pthread_join(running[r], NULL);
    memory_store_fini(&world.store);
    assert_true(atomic_load(&helped) > 0);
}

/* ---- Sums ---------------------------------------------------------------------------------------------------------------- */

static float value_of(int rank, size_t i, int turn)
{
    return (float)(rank + 1) + (float)((i + (size_t)turn) % 61);
}

static void put_input(struct rank *rank, int turn)
{
    for (size_t i = 0; i < COUNT; i++)
        rank->values[i] = value_of(rank->rank, i, turn);
    cuda(rank, cu.copy_to_device_now(rank->input, rank->values, COUNT * sizeof(float)));
}

static void expect_sum(struct rank *rank, int turn)
{
    cuda(rank, cu.stream_synchronize(rank->options.stream));
    cuda(rank, cu.copy_to_host_now(rank->values, rank->output, COUNT * sizeof(float)));
    for (size_t i = 0; i < COUNT; i++) {
        float wanted = 0;
        for (int r = 0; r < rank->world->size; r++)
            wanted += value_of(r, i, turn);
        CHECK(rank, rank->values[i] == wanted, "element %zu is %g, not %g", i, (double)rank->values[i], (double)wanted);
    }
}

static void post_sum(struct rank *rank, struct shoal_request **request_out)
{
    OK(rank, shoal_allreduce_post(rank->comm, (const void *)(uintptr_t)rank->input, (void *)(uintptr_t)rank->output, COUNT,
                                  SHOAL_FLOAT32, SHOAL_SUM, &rank->options, request_out));
}

static void sum_exactly(struct rank *rank, int turn)
{
    struct shoal_request *request;
    put_input(rank, turn);
    post_sum(rank, &request);
    OK(rank, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
    expect_sum(rank, turn);
}

/* Posted in a row, so that the rings run full while helpers are in them. */
static void sums_body(struct rank *rank)
{
    enum { POSTED = 4 };
    struct shoal_request *requests[POSTED];
    for (int turn = 0; turn < 3; turn++)
        sum_exactly(rank, turn);
    put_input(rank, 3);
    for (int i = 0; i < POSTED; i++)
        post_sum(rank, &requests[i]);
    for (int i = 0; i < POSTED; i++) {
        OK(rank, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
    }
    expect_sum(rank, 3);
    OK(rank, shoal_barrier(rank->comm, NULL));
}

static void helpers_sum_in_lent_rings(void **state)
{
    (void)state;
    atomic_store(&must_helpers_come, true);
    for (int threads = 2; threads <= 3; threads++) {
        run_world(2, 1, threads, sums_body);
        run_world(3, 1, threads, sums_body);
    }
    run_world(4, 2, 2, sums_body); /* two hosts: they borrow inside each, and exchange through staging buffers */
    atomic_store(&must_helpers_come, false);
}

/* ---- An abort ------------------------------------------------------------------------------------------------------------ */

static void *abort_while_held(void *arg)
{
    await(&is_held);
    atomic_store(&has_abort_begun, true);
    shoal_comm_abort(arg);
    return NULL;
}

/* The last rank does not come to the second sum, so that one cannot succeed. The first one may, if this machine is so busy that
 * the abort is late. */
static void abort_body(struct rank *rank)
{
    const bool comes_twice = rank->rank < rank->world->size - 1;
    struct shoal_request *first, *second = NULL;
    pthread_t aborting;
    if (rank->rank == 0)
        CHECK(rank, pthread_create(&aborting, NULL, abort_while_held, rank->comm) == 0, "no thread");
    put_input(rank, 0);
    post_sum(rank, &first);
    if (comes_twice)
        post_sum(rank, &second);
    const enum shoal_status status = shoal_request_wait(first, SHOAL_FOREVER);
    CHECK(rank, status == SHOAL_ERR_ABORTED || status == SHOAL_OK, "%s", shoal_status_name(status));
    if (rank->rank == atomic_load(&held_rank))
        CHECK(rank, atomic_load(&has_left), "the sum has ended while a helper is in its operands");
    if (comes_twice)
        EXPECT(rank, SHOAL_ERR_ABORTED, shoal_request_wait(second, SHOAL_FOREVER));
    if (rank->rank == 0)
        pthread_join(aborting, NULL);
    shoal_request_free(first);
    shoal_request_free(second);
    EXPECT(rank, SHOAL_ERR_ABORTED, shoal_barrier(rank->comm, NULL));
    shoal_comm_free(rank->comm);
    OK(rank, shoal_comm_split(rank->parent, 0, rank->rank, NULL, &rank->comm));
    sum_exactly(rank, 1);
    OK(rank, shoal_barrier(rank->comm, NULL));
}

/* Afterwards no helper touches a ring: the next communicator uses it again. */
static void an_abort_finds_helpers_at_work(void **state)
{
    (void)state;
    for (int turn = 0; turn < 6; turn++) {
        atomic_store(&is_held, false);
        atomic_store(&has_abort_begun, false);
        atomic_store(&has_left, false);
        atomic_store(&must_hold_a_helper, true);
        atomic_store(&must_helpers_come, true);
        run_world(2 + turn % 2, 1, 2 + turn / 2 % 2, abort_body);
        assert_true(atomic_load(&is_held));
    }
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(helpers_sum_in_lent_rings),
        cmocka_unit_test(an_abort_finds_helpers_at_work),
    };
    shoal_cu_device device;
    setenv("SHOAL_MOCK_FABRIC", "aws", 1);
    /* Here, because the sanitizer does not know the loader's lock. */
    mock_client_must(dlopen(MOCK_FABRIC, RTLD_NOW) != NULL, MOCK_FABRIC);
    mock_client_open(MOCK_CUDA, false);
    mock_client_must(cu.init(0) == SHOAL_CU_SUCCESS && cu.device_get(&device, 0) == SHOAL_CU_SUCCESS &&
                         cu.primary_retain(&device_context, device) == SHOAL_CU_SUCCESS,
                     "the device");
    return cmocka_run_group_tests_name("helpers_in_threads", tests, NULL, NULL);
}
