/* Rings that the ranks of a host lend each other, over the stand-in driver. Sums of operands on devices need no staging buffer.
 * Ranks may differ in their kinds of memory. A rank may fail while another one borrows from it. The linker replaces
 * shoal_device_lent_address(), which finds the place of each borrowed run, so that a test can count them and delay a rank there. */
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "comm/context.h"
#include "device_bench.h"
#include "exact_cases.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FEW ((size_t)20000) /* floats: one chunk in one unit */

/* ---- Borrowing, watched -------------------------------------------------------------------------------------------------- */

static atomic_size_t borrowed[2]; /* elements of outputs, of inputs, that this rank has found in other ranks' rings */
static void (*_Atomic on_borrow)(bool is_inward);

char *__real_shoal_device_lent_address(const struct shoal_device_lent *lent, int part, size_t at, size_t *run);
char *__wrap_shoal_device_lent_address(const struct shoal_device_lent *lent, int part, size_t at, size_t *run);
char *__wrap_shoal_device_lent_address(const struct shoal_device_lent *lent, int part, size_t at, size_t *run)
{
    void (*const act)(bool is_inward) = atomic_load(&on_borrow);
    char *place = __real_shoal_device_lent_address(lent, part, at, run);
    atomic_fetch_add(&borrowed[lent->is_inward], *run);
    if (act)
        act(lent->is_inward);
    return place;
}

/* ---- One pass less ------------------------------------------------------------------------------------------------------- */

static void expect_algorithm(struct bench *bench, const char *wanted)
{
    struct shoal_operation last = SHOAL_OPERATION_INIT;
    OK(bench->world, shoal_last_operation(bench->comm, &last));
    CHECK(bench->world, strcmp(last.algorithm, wanted) == 0, "a sum went by %s, not %s", last.algorithm, wanted);
}

static void expect_staging(struct bench *bench, bool is_wanted)
{
    struct shoal_memory_usage usage = SHOAL_MEMORY_USAGE_INIT;
    OK(bench->world, shoal_comm_memory(bench->comm, &usage));
    CHECK(bench->world, is_wanted == (usage.staging_bytes > 0), "%zu bytes of staging buffers", usage.staging_bytes);
}

/* Every rank has read its block of the other ranks' inputs in their rings, and written as much there. A block ends at the border
 * of a cache line. */
static void expect_borrowed(const struct bench *bench)
{
    const size_t others = (size_t)bench->world->size - 1, own = bench->count / (size_t)bench->world->size;
    for (int is_inward = 0; is_inward <= 1; is_inward++) {
        const size_t found = atomic_load(&borrowed[is_inward]);
        CHECK(bench->world, found + 5000 >= others * own && found <= others * own + 5000, "%zu elements of %s, but %zu are others'",
              found, is_inward ? "inputs" : "outputs", others * own);
    }
}

/* Each rank reduces its block from the rings of all, into the rings of all. The counts show that this is all that passes
 * there. */
static void sums_read_and_write_rings(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 1000003);
    expect_sum(&bench);
    expect_algorithm(&bench, "owners-lent");
    expect_staging(&bench, false);
    expect_borrowed(&bench);
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

/* Several tensors pass through the rings as one vector, which peers borrow like any other. */
static void sums_of_tensors_read_and_write_rings(struct world *world)
{
    static const size_t ends[] = {1, 1, 4099, 300000, 1000003};
    struct bench bench = open_bench(world, NULL, 1000003);
    struct shoal_tensor tensors[COUNT_OF(ends)];
    for (size_t i = 0, begin = 0; i < COUNT_OF(ends); begin = ends[i++])
        tensors[i] = (struct shoal_tensor){bench.input + begin * sizeof(float), bench.output + begin * sizeof(float),
                                           ends[i] - begin};
    OK(world, shoal_allreduce_coalesced(bench.comm, tensors, COUNT_OF(ends), SHOAL_FLOAT32, SHOAL_SUM, &bench.options));
    expect_output(&bench, bench_sum);
    expect_algorithm(&bench, "owners-lent");
    expect_staging(&bench, false);
    expect_borrowed(&bench);
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

/* Each rank sums half of the inputs of its host, and what comes from the other host, and writes it for both. */
static void sums_of_hosts_borrow_inside(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 1000003);
    expect_sum(&bench);
    for (int is_inward = 0; is_inward <= 1; is_inward++) {
        const size_t found = atomic_load(&borrowed[is_inward]);
        CHECK(world, found + 5000 >= bench.count / 2 && found <= bench.count / 2 + 5000, "%zu elements of %s", found,
              is_inward ? "inputs" : "outputs");
    }
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

/* With this limit there is memory for communicators, but not for rings that peers map. */
static void without_memory_for_peers_rings_are_private(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 300000);
    expect_sum(&bench);
    expect_algorithm(&bench, "owners-staged");
    expect_staging(&bench, true);
    CHECK(world, !atomic_load(&borrowed[0]) && !atomic_load(&borrowed[1]), "something was borrowed");
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

/* Rank 0 has ordinary memory, rank 1 shared memory, and the others have memory of their devices. */
static void ranks_with_other_memory(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 300001);
    const size_t bytes = bench.count * sizeof(float);
    void *shared = NULL;
    OK(world, shoal_mem_alloc(world->context, bytes, &shared));
    float *host = world->rank == 0 ? malloc(bytes) : shared;
    for (int turn = 0; turn < 3; turn++) {
        for (size_t i = 0; i < bench.count; i++)
            host[i] = bench_input(world->rank, i);
        if (world->rank > 1) {
            expect_sum(&bench);
        } else {
            OK(world, shoal_allreduce(bench.comm, host, host, bench.count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
            for (size_t i = 0; i < bench.count; i++)
                CHECK(world, host[i] == bench_sum(&bench, i), "element %zu is %g", i, (double)host[i]);
        }
        expect_algorithm(&bench, "owners-mixed");
    }
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0)
        free(host);
    OK(world, shoal_mem_free(world->context, shared));
    close_bench(&bench);
}

/* ---- Failures while a rank borrows --------------------------------------------------------------------------------------- */

enum step { STEP_NONE, STEP_BORROWING, STEP_OVERWRITTEN };

static _Atomic uint64_t *steps; /* on the board, for all ranks */

static void await_step(enum step step)
{
    while (atomic_load(steps) < (uint64_t)step)
        usleep(100);
}

/* Rank 1 looks at rank 0's input only when rank 0 has failed and its stream has put other values there. */
static void wait_until_overwritten(bool is_inward)
{
    if (!is_inward || atomic_load(steps) != STEP_NONE)
        return;
    atomic_store(steps, STEP_BORROWING);
    await_step(STEP_OVERWRITTEN);
}

/* Posts more calls than its ring has room for, then fails: the inputs of later calls overwrite that of the first one. */
static void fail_while_lending(struct bench *bench)
{
    enum { CALLS = 20 };
    struct shoal_request *requests[CALLS];
    for (int i = 0; i < CALLS; i++)
        OK(bench->world, shoal_reduce_post(bench->comm, i ? bench->output : bench->input, NULL, FEW, SHOAL_FLOAT32, SHOAL_SUM,
                                           1, &bench->options, &requests[i]));
    await_step(STEP_BORROWING);
    shoal_comm_abort(bench->comm);
    for (int i = 0; i < CALLS; i++) {
        const enum shoal_status status = shoal_request_wait(requests[i], SHOAL_FOREVER);
        CHECK(bench->world, status == SHOAL_ERR_ABORTED, "sum %d: %s", i, shoal_status_name(status));
        shoal_request_free(requests[i]);
    }
    mock_device_synchronize(bench->stream);
    atomic_store(steps, STEP_OVERWRITTEN);
}

/* Only root reads, in a single step, after which it needs nothing from the rank that has failed. */
static void what_a_failed_rank_lent_does_not_count(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 300000);
    steps = (_Atomic uint64_t *)world->board;
    expect_sum(&bench);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0) {
        fail_while_lending(&bench);
    } else {
        on_borrow = wait_until_overwritten;
        const enum shoal_status status =
            shoal_reduce(bench.comm, bench.input, bench.output, FEW, SHOAL_FLOAT32, SHOAL_SUM, 1, &bench.options);
        on_borrow = NULL;
        CHECK(world, atomic_load(steps) == STEP_OVERWRITTEN, "nothing was borrowed");
        CHECK(world, status == SHOAL_ERR_ABORTED, "%s", shoal_status_name(status));
    }
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

static void stop_while_writing(bool is_inward)
{
    if (is_inward || atomic_load(steps) != STEP_NONE)
        return;
    atomic_store(steps, STEP_BORROWING);
    raise(SIGSTOP);
}

static bool is_spare(const struct world *world, const struct shoal_devices_port *port)
{
    const struct shoal_devices_port *spare = world->context->drivers.spare;
    while (spare && spare != port)
        spare = spare->next;
    return spare != NULL;
}

/* Rank 0 aborts while rank 1 is stopped, and frees the communicator, for which it waits a second. */
static void give_up_on_stopped(struct bench *bench)
{
    struct shoal_devices_port *const port = bench->comm->devices.ports;
    CHECK(bench->world, port && port->memory.shared_by, "the rings are private");
    await_step(STEP_BORROWING);
    shoal_comm_abort(bench->comm);
    mock_device_synchronize(bench->stream);
    shoal_comm_free(bench->comm);
    CHECK(bench->world, !is_spare(bench->world, port), "rings are spare though a stopped rank may write there");
    kill((pid_t)bench->world->board[1], SIGCONT);
}

/* Rank 1 is stopped just before it writes into the rings of others. When they have given up and freed the communicator, it may
 * continue at any time: so no other communicator gets these rings, and it does no harm. */
static void a_rank_that_is_stopped_while_it_writes(struct world *world)
{
    struct bench bench = open_bench(world, NULL, 300000);
    struct shoal_request *request;
    steps = (_Atomic uint64_t *)world->board;
    expect_sum(&bench);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 1) {
        world->board[1] = (uint64_t)getpid();
        on_borrow = stop_while_writing;
    }
    OK(world, shoal_allreduce_post(bench.comm, bench.input, bench.output, bench.count, SHOAL_FLOAT32, SHOAL_SUM, &bench.options,
                                   &request));
    if (world->rank == 0)
        give_up_on_stopped(&bench);
    const enum shoal_status status = shoal_request_wait(request, SHOAL_FOREVER);
    CHECK(world, status == SHOAL_ERR_ABORTED, "%s", shoal_status_name(status));
    on_borrow = NULL;
    shoal_request_free(request);
    if (world->rank == 1)
        shoal_comm_free(bench.comm);
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &bench.comm));
    expect_sum(&bench);
    OK(world, shoal_barrier(world->comm, NULL));
    close_bench(&bench);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static void run(const char *name, int size, world_body_fn body, const char *const *settings)
{
    char whole[160];
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    snprintf(whole, sizeof whole, "%s, %d ranks", name, size);
    world_run(&(struct world_options){whole, size, settings, body, NULL});
}

int main(int argument_count, char **arguments)
{
    static const char *const limited[] = {"SHOAL_MEMORY_LIMIT=8M", NULL}, *const helped[] = {"SHOAL_THREADS=3", NULL};
    static const char *const usual[] = {NULL};
    world_choose(argument_count, arguments);
    for (int size = 2; size <= 8; size += 3)
        run("sums read and write the rings of all", size, sums_read_and_write_rings, usual);
    for (int size = 2; size <= 5; size += 3)
        run("sums of tensors read and write the rings of all", size, sums_of_tensors_read_and_write_rings, usual);
    run("sums read and write the rings of all, with helpers", 2, sums_read_and_write_rings, helped);
    run("without memory for peers rings are private", 2, without_memory_for_peers_rings_are_private, limited);
    for (int size = 3; size <= 5; size += 2)
        run("ranks that have other memory", size, ranks_with_other_memory, usual);
    world_divide(2);
    run("sums of hosts borrow inside them", 4, sums_of_hosts_borrow_inside, usual);
    world_divide(0);
    run("what a failed rank has lent does not count", 2, what_a_failed_rank_lent_does_not_count, usual);
    run("a rank that is stopped while it writes does no harm", 2, a_rank_that_is_stopped_while_it_writes, usual);
    return world_finish();
}
