/* Lanes over mocks of a provider over TCP and of EFA with several adapters. Ranks and lanes are threads of one process and so are its wires, so the thread
 * sanitizer sees every access to a source and to a staging buffer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine_state.h"
#include "host_threads.h"

#define FLOATS (((size_t)1 << 19) + 3)
#define TURNS 6

static float *make_floats(struct rank *rank, size_t seed)
{
    float *floats = malloc(FLOATS * sizeof *floats);
    CHECK(rank, floats != NULL, "no memory");
    for (size_t i = 0; i < FLOATS; i++)
        floats[i] = (float)((i * 7 + seed * 13) % 1009);
    return floats;
}

static void sum_and_check(struct rank *rank, struct shoal_comm *comm, size_t seed)
{
    const int size = rank->world->size;
    float *input = make_floats(rank, seed + (size_t)rank->rank), *sum = malloc(FLOATS * sizeof *sum);
    CHECK(rank, sum != NULL, "no memory");
    OK(rank, shoal_allreduce(comm, input, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    for (size_t i = 0; i < FLOATS; i++) {
        float wanted = 0;
        for (int r = 0; r < size; r++)
            wanted += (float)((i * 7 + (seed + (size_t)r) * 13) % 1009);
        CHECK(rank, sum[i] == wanted, "element %zu is %g, not %g", i, (double)sum[i], (double)wanted);
    }
    free(input);
    free(sum);
}

static int count_lanes(const struct rank *rank)
{
    return shoal_network_lane_count(rank->context->network);
}

static void sums_body(struct rank *rank)
{
    CHECK(rank, count_lanes(rank) == 2, "%d lanes", count_lanes(rank));
    for (size_t turn = 0; turn < TURNS; turn++)
        sum_and_check(rank, rank->comm, turn);
}

static void sums_are_exact(void **state)
{
    (void)state;
    run_world_with("SHOAL_NETWORK_THREADS=3", 2, 1, sums_body);
    run_world_with("SHOAL_NETWORK_THREADS=3", 3, 1, sums_body);
    run_world_with("SHOAL_NETWORK_THREADS=3", 4, 2, sums_body);
}

/* ---- Communicators and threads ------------------------------------------------------------------------------------------- */

struct user {
    struct rank *rank;
    struct shoal_comm *comm;
    size_t seed;
};

static void *use_comm(void *arg)
{
    struct user *user = arg;
    for (size_t turn = 0; turn < TURNS; turn++)
        sum_and_check(user->rank, user->comm, user->seed + turn);
    return NULL;
}

static void comms_body(struct rank *rank)
{
    struct user users[3];
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++) {
        users[i] = (struct user){rank, NULL, i * 100};
        OK(rank, shoal_comm_split(rank->comm, 0, rank->rank, NULL, &users[i].comm));
    }
    for (int i = 0; i < 3; i++)
        CHECK(rank, pthread_create(&threads[i], NULL, use_comm, &users[i]) == 0, "no thread");
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        OK(rank, shoal_comm_finalize(users[i].comm));
        shoal_comm_free(users[i].comm);
    }
    sum_and_check(rank, rank->comm, 77);
}

static void communicators_share_lanes(void **state)
{
    (void)state;
    run_world_with("SHOAL_NETWORK_THREADS=2", 3, 1, comms_body);
}

/* ---- A number that is tried ---------------------------------------------------------------------------------------------- */

/* As on a machine with cores that the framework leaves free. */
int __wrap_shoal_fabric_auto_threads(int cores, int local_ranks);
int __wrap_shoal_fabric_auto_threads(int cores, int local_ranks)
{
    (void)cores, (void)local_ranks;
    return 3;
}

static atomic_uint trials, words;

static void look_for_trials(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    if (!strstr(line, "at the network for each rank of this host"))
        return;
    atomic_fetch_add(&trials, 1);
    if (strstr(line, ": 3 threads at the network for each rank of this host: one was not faster") ||
        strstr(line, ": 1 thread at the network for each rank of this host: one was faster than several"))
        atomic_fetch_add(&words, 1);
}

#define TRIED_FLOATS ((size_t)100003)
#define TRIED_TURNS 70

static void tried_body(struct rank *rank)
{
    float *values = malloc(TRIED_FLOATS * sizeof *values);
    CHECK(rank, values != NULL, "no memory");
    CHECK(rank, count_lanes(rank) == 2, "%d lanes", count_lanes(rank));
    for (int turn = 0; turn < TRIED_TURNS; turn++) {
        for (size_t i = 0; i < TRIED_FLOATS; i++)
            values[i] = (float)(i % 1009 + (size_t)turn);
        OK(rank, shoal_allreduce(rank->comm, values, values, TRIED_FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
        for (size_t i = 0; i < TRIED_FLOATS; i++)
            CHECK(rank, values[i] == (float)((i % 1009 + (size_t)turn) * (size_t)rank->world->size), "element %zu", i);
    }
    free(values);
}

/* Each host tries by itself; a number that is set is not tried. */
static void a_chosen_number_is_tried(void **state)
{
    (void)state;
    setenv("SHOAL_LOG", "info", 1);
    log_to = look_for_trials;
    run_world_with("SHOAL_NETWORK_THREADS=3", 2, 1, tried_body);
    assert_int_equal(atomic_load(&trials), 0);
    run_world_with("SHOAL_NETWORK_THREADS=auto", 2, 1, tried_body);
    assert_int_equal(atomic_load(&trials), 2);
    assert_int_equal(atomic_load(&words), 2);
    log_to = NULL;
    unsetenv("SHOAL_LOG");
}

/* ---- A late rank --------------------------------------------------------------------------------------------------------- */

#define LATE_TURNS 12

static _Atomic uint64_t root_called_ns;
static uint64_t took_ns[2]; /* from the root's calls to the receiver's ends: if the root was soon there, if it was late */

static void late_body(struct rank *rank)
{
    float *values = make_floats(rank, 1);
    for (useconds_t turn = 0; turn < LATE_TURNS; turn++) {
        if (rank->rank == 1) {
            usleep(turn % 2 ? 250000 + 8500 * turn : 20000);
            atomic_store(&root_called_ns, shoal_clock_ns());
        }
        OK(rank, shoal_broadcast(rank->comm, values, values, FLOATS, SHOAL_FLOAT32, 1, NULL));
        if (rank->rank == 0)
            took_ns[turn % 2] += shoal_clock_ns() - atomic_load(&root_called_ns);
        pthread_barrier_wait(&rank->world->meeting);
    }
    free(values);
}

/* The mock has no descriptor, so its lanes look rarely after a while without events, but not while a rank waits. */
static void lanes_look_while_a_rank_waits(void **state)
{
    (void)state;
    run_world_with("SHOAL_NETWORK_THREADS=3", 2, 1, late_body);
    const double ms = ((double)took_ns[1] - (double)took_ns[0]) / (LATE_TURNS / 2) / 1e6;
    if (ms > 25)
        fail_msg("the broadcast of a late root took %.1f ms longer", ms);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

static void *abort_soon(void *comm)
{
    usleep(20000);
    shoal_comm_abort(comm);
    return NULL;
}

/* Sums until the communicator breaks. Then its sources are freed, so the sanitizer finds a lane that begins to send from
 * them. */
static void abort_body(struct rank *rank)
{
    enum shoal_status status = SHOAL_OK;
    pthread_t thread;
    if (rank->rank == 0)
        CHECK(rank, pthread_create(&thread, NULL, abort_soon, rank->comm) == 0, "no thread");
    while (status == SHOAL_OK) {
        float *input = make_floats(rank, 1), *sum = make_floats(rank, 2);
        status = shoal_allreduce(rank->comm, input, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL);
        free(input);
        free(sum);
    }
    CHECK(rank, status == SHOAL_ERR_ABORTED, "ended with %s", shoal_status_name(status));
    if (rank->rank == 0)
        pthread_join(thread, NULL);
}

static void an_abort_ends_sums(void **state)
{
    (void)state;
    for (int turn = 0; turn < 5; turn++)
        run_world_with("SHOAL_NETWORK_THREADS=3", 3, 1, abort_body);
}

static uint64_t count_sent_by_lanes(struct rank *rank)
{
    const struct shoal_network_lane_memory memory = {0};
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_channel channel = {.comm = UINT64_MAX}; /* of nobody: only to see the addresses */
    uint64_t sent = 0;
    const int count = shoal_network_offer_lanes(rank->context->network, &channel, 0, &memory, offers);
    shoal_network_channel_close(rank->context->network, &channel);
    for (int i = 0; i < count; i++) {
        uint64_t number;
        char adapter[64];
        memcpy(&number, offers[i].address.at, sizeof number);
        sent += count_sent(number, adapter, sizeof adapter);
    }
    return sent;
}

/* The engine may learn of a failure in a step, and put once more in the same turn. No lane begins that put, because nothing
 * drops it later. */
static void broken_body(struct rank *rank)
{
    static const char source[1 << 17];
    struct shoal_failure failure;
    sum_and_check(rank, rank->comm, 3);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0) {
        struct shoal_transport *transport = rank->comm->engine->transport;
        shoal_comm_abort(rank->comm);
        shoal_progress_lock(rank->context->progress);
        while (!transport->ops->failed(transport, &failure))
            usleep(1000);
        const uint64_t before = count_sent_by_lanes(rank);
        CHECK(rank, before > 0, "lanes have sent nothing");
        OK(rank, transport->ops->put(transport, 1, 0, 0, source, sizeof source));
        usleep(50000);
        CHECK(rank, count_sent_by_lanes(rank) == before, "a lane has begun to send");
        shoal_progress_unlock(rank->context->progress);
    }
    pthread_barrier_wait(&rank->world->meeting);
}

static void lanes_begin_nothing_after_a_failure(void **state)
{
    (void)state;
    run_world_with("SHOAL_NETWORK_THREADS=3", 2, 1, broken_body);
}

/* The rank's own endpoint fails for all others, while lanes work: it is reported once, as one cause. */
static void cut_body(struct rank *rank)
{
    enum shoal_status status = SHOAL_OK;
    sum_and_check(rank, rank->comm, 5);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        hinder(endpoints[1], MOCK_CUT);
    for (int turn = 0; turn < TURNS && status == SHOAL_OK; turn++) {
        float *input = make_floats(rank, 1), *sum = make_floats(rank, 2);
        status = shoal_allreduce(rank->comm, input, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL);
        free(input);
        free(sum);
    }
    CHECK(rank, status == SHOAL_ERR_PEER_LOST, "ended with %s", shoal_status_name(status));
    OK(rank, shoal_last_failure(rank->context, rank->comm, &rank->failure));
}

static void a_peer_that_is_cut_off_is_one_failure(void **state)
{
    (void)state;
    run_world_with("SHOAL_NETWORK_THREADS=3", 3, 1, cut_body);
    for (int r = 1; r < 3; r++)
        assert_string_equal(ranks[r].failure.text, ranks[0].failure.text);
    assert_int_equal(ranks[0].failure.rank, 1);
}

/* ---- Several adapters ---------------------------------------------------------------------------------------------------- */

#define ADAPTERS_MAX 4

/* Looks at this rank's lanes: how many there are, and how many of them have sent megabytes, each at an adapter of its own. */
static int count_busy_adapters(struct rank *rank)
{
    const struct shoal_network_lane_memory memory = {0};
    struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
    struct shoal_network_channel channel = {.comm = UINT64_MAX};
    char adapters[ADAPTERS_MAX][64];
    int busy = 0;
    shoal_progress_lock(rank->context->progress);
    const int count = shoal_network_offer_lanes(rank->context->network, &channel, 0, &memory, offers);
    shoal_network_channel_close(rank->context->network, &channel);
    shoal_progress_unlock(rank->context->progress);
    for (int i = 0; i < count && i < ADAPTERS_MAX; i++) {
        uint64_t number;
        memcpy(&number, offers[i].address.at, sizeof number);
        busy += count_sent(number, adapters[i], sizeof adapters[i]) > 1 << 20;
        for (int other = 0; other < i; other++)
            CHECK(rank, strcmp(adapters[i], adapters[other]) != 0, "two lanes at %s", adapters[i]);
    }
    return busy;
}

/* Sums from memory that is registered with each adapter. Each time, the region ends while adapters may still read it. */
static void sum_shared(struct rank *rank, size_t seed)
{
    const float size = (float)rank->world->size;
    void *values;
    OK(rank, shoal_mem_alloc(rank->context, FLOATS * sizeof(float), &values));
    float *at = values;
    for (size_t i = 0; i < FLOATS; i++)
        at[i] = (float)((i + seed) % 1009);
    OK(rank, shoal_allreduce(rank->comm, at, at, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    for (size_t i = 0; i < FLOATS; i++)
        CHECK(rank, at[i] == size * (float)((i + seed) % 1009), "element %zu is %g", i, (double)at[i]);
    for (size_t i = 0; i < FLOATS; i++)
        at[i] = (float)((i + seed) % 1009);
    OK(rank, shoal_broadcast(rank->comm, at, at, FLOATS, SHOAL_FLOAT32, 0, NULL));
    CHECK(rank, at[FLOATS - 1] == (float)((FLOATS - 1 + seed) % 1009), "the last element is %g", (double)at[FLOATS - 1]);
    OK(rank, shoal_mem_free(rank->context, values));
}

static void sum_shared_body(struct rank *rank)
{
    for (size_t turn = 0; turn < 2 * TURNS; turn++)
        sum_shared(rank, turn);
}

static int wanted_lanes[4]; /* of each rank */

static void adapters_body(struct rank *rank)
{
    const int wanted = wanted_lanes[rank->rank];
    CHECK(rank, count_lanes(rank) == wanted, "%d lanes, not %d", count_lanes(rank), wanted);
    for (size_t turn = 0; turn < 2 * TURNS; turn++) {
        sum_and_check(rank, rank->comm, turn);
        sum_shared(rank, turn);
    }
    const int busy = count_busy_adapters(rank);
    CHECK(rank, busy == wanted, "%d adapters sent, besides the first, not %d", busy, wanted);
    pthread_barrier_wait(&rank->world->meeting);
}

static void set_wanted(int a, int b, int c, int d)
{
    const int wanted[] = {a, b, c, d};
    memcpy(wanted_lanes, wanted, sizeof wanted);
}

/* Hosts with four adapters that move the bytes themselves, and want sources registered. */
static void all_adapters_send(void **state)
{
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    provider = "SHOAL_PROVIDER=efa";
    set_wanted(3, 3, 0, 0);
    run_world_with("SHOAL_ADAPTERS=16", 2, 1, adapters_body);
    run_world_with("SHOAL_ADAPTERS=auto", 2, 1, sum_shared_body);
    set_wanted(1, 1, 0, 0);
    run_world_with("SHOAL_ADAPTERS=2", 2, 1, adapters_body);
    set_wanted(0, 0, 0, 0);
    run_world_with("SHOAL_ADAPTERS=1", 2, 1, adapters_body);
    set_wanted(1, 1, 1, 1);
    run_world_with("SHOAL_ADAPTERS=16", 4, 2, adapters_body);
    for (int turn = 0; turn < 3; turn++)
        run_world_with("SHOAL_ADAPTERS=16", 3, 1, abort_body);
    provider = "SHOAL_PROVIDER=tcp";
    setenv("SHOAL_MOCK_FABRIC", "ethernet", 1);
}

/* ---- A lane that fails --------------------------------------------------------------------------------------------------- */

static uint64_t last_lane; /* of rank 1 */

static void adapter_fails_body(struct rank *rank)
{
    enum shoal_status status = SHOAL_OK;
    sum_and_check(rank, rank->comm, 5);
    if (rank->rank == 1) {
        const struct shoal_network_lane_memory memory = {0};
        struct shoal_network_lane_offer offers[SHOAL_LANES_MAX];
        struct shoal_network_channel channel = {.comm = UINT64_MAX};
        shoal_progress_lock(rank->context->progress);
        const int count = shoal_network_offer_lanes(rank->context->network, &channel, 0, &memory, offers);
        shoal_network_channel_close(rank->context->network, &channel);
        shoal_progress_unlock(rank->context->progress);
        CHECK(rank, count == 3, "%d lanes", count);
        memcpy(&last_lane, offers[2].address.at, sizeof last_lane);
    }
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        hinder(last_lane, MOCK_CUT);
    for (int turn = 0; turn < 10 * TURNS && status == SHOAL_OK; turn++) {
        float *input = make_floats(rank, 1), *sum = make_floats(rank, 2);
        status = shoal_allreduce(rank->comm, input, sum, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL);
        free(input);
        free(sum);
    }
    CHECK(rank, status == SHOAL_ERR_PEER_LOST, "ended with %s", shoal_status_name(status));
    OK(rank, shoal_last_failure(rank->context, rank->comm, &rank->failure));
}

/* The cause names the adapter, because all others work. */
static void the_adapter_that_fails_is_named(void **state)
{
    (void)state;
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    provider = "SHOAL_PROVIDER=efa";
    run_world_with("SHOAL_ADAPTERS=16", 2, 1, adapter_fails_body);
    provider = "SHOAL_PROVIDER=tcp";
    setenv("SHOAL_MOCK_FABRIC", "ethernet", 1);
    assert_non_null(strstr(ranks[0].failure.text, "through adapter rdmap160s27-rdm"));
    assert_string_equal(ranks[0].failure.text, ranks[1].failure.text);
}

/* ---- A limit of locked memory -------------------------------------------------------------------------------------------- */

static void (*limit_locked)(size_t bytes);
static size_t (*count_locked)(void);

static void reserve(struct rank *rank)
{
    struct shoal_engine *engine = rank->comm->engine;
    shoal_progress_lock(rank->context->progress);
    OK(rank, engine->ops->reserve_staging(engine->transport, engine->depth, engine->slot_bytes));
    shoal_progress_unlock(rank->context->progress);
}

/* Rank 1 may register its staging buffer `refused_at` times less one: with the first endpoint, and with some lanes. */
static size_t refused_at;

static void limited_body(struct rank *rank)
{
    const size_t before = count_locked();
    const size_t times = 1 + (size_t)count_lanes(rank);
    CHECK(rank, times == 4, "%zu endpoints", times);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 0)
        reserve(rank);
    pthread_barrier_wait(&rank->world->meeting);
    if (rank->rank == 1) {
        const size_t staging = (count_locked() - before) / times, full = count_locked();
        CHECK(rank, staging > 0, "nothing is registered");
        limit_locked(full + refused_at * staging - 1);
        reserve(rank);
        limit_locked(SIZE_MAX);
        CHECK(rank, count_locked() == full + staging, "%zu bytes stay registered, not %zu", count_locked() - full, staging);
    }
    pthread_barrier_wait(&rank->world->meeting);
    for (size_t turn = 0; turn < TURNS; turn++) {
        sum_and_check(rank, rank->comm, turn);
        sum_shared(rank, turn);
    }
    const int busy = count_busy_adapters(rank);
    CHECK(rank, busy == 0, "%d adapters sent, besides the first", busy);
    pthread_barrier_wait(&rank->world->meeting);
}

/* The first endpoint then carries everything, in both directions. */
static void staging_is_registered_with_all_lanes_or_none(void **state)
{
    void *mock = dlopen(MOCK_FABRIC, RTLD_NOW);
    (void)state;
    assert_non_null(mock);
    find_in_mock(mock, "mock_limit_locked", &limit_locked);
    find_in_mock(mock, "mock_count_locked", &count_locked);
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    provider = "SHOAL_PROVIDER=efa";
    for (refused_at = 2; refused_at <= 4; refused_at++)
        run_world_with("SHOAL_ADAPTERS=16", 2, 1, limited_body);
    provider = "SHOAL_PROVIDER=tcp";
    setenv("SHOAL_MOCK_FABRIC", "ethernet", 1);
    dlclose(mock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_exact),
        cmocka_unit_test(communicators_share_lanes),
        cmocka_unit_test(a_chosen_number_is_tried),
        cmocka_unit_test(lanes_look_while_a_rank_waits),
        cmocka_unit_test(all_adapters_send),
        cmocka_unit_test(the_adapter_that_fails_is_named),
        cmocka_unit_test(staging_is_registered_with_all_lanes_or_none),
        cmocka_unit_test(an_abort_ends_sums),
        cmocka_unit_test(lanes_begin_nothing_after_a_failure),
        cmocka_unit_test(a_peer_that_is_cut_off_is_one_failure),
    };
    setenv("SHOAL_MOCK_FABRIC", "ethernet", 1);
    provider = "SHOAL_PROVIDER=tcp";
    (void)open_mock_fabric(MOCK_FABRIC);
    return cmocka_run_group_tests_name("lanes_in_threads", tests, NULL, NULL);
}
