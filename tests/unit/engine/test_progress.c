/* The progress engine's lists and its lock, over engines on the simulated transport. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <pthread.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "engine/progress_state.h"
#include "sim/sim_transport.h"
#include "transport/shm/shm_endpoint.h"

#define PAIRS 50

/* Replaces libc's. */
static atomic_int yields;
int sched_yield(void);
int sched_yield(void)
{
    atomic_fetch_add(&yields, 1);
    return 0;
}

/* How the progress engine uses a doorbell that nobody rings, and a wait source. */
struct counts {
    atomic_int checks;
    atomic_int naps; /* at the doorbell */
    atomic_int long_naps;
    atomic_int polls;
    int stops_at;     /* the poll in which the process stops for longer than a request's time; 0: none */
    atomic_int waits; /* at the source */
    atomic_bool has_descriptor;
};

static void doorbell_do_nothing(void *counts)
{
    (void)counts;
}

static void doorbell_sleep_for(void *arg, uint64_t timeout_ns)
{
    struct counts *counts = arg;
    const struct timespec nap = {0, 100000};
    atomic_fetch_add(timeout_ns > SHOAL_NS_PER_MS ? &counts->long_naps : &counts->naps, 1);
    nanosleep(&nap, NULL);
}

static void doorbell_check(void *arg)
{
    struct counts *counts = arg;
    atomic_fetch_add(&counts->checks, 1);
}

static int doorbell_cores(void *counts)
{
    (void)counts;
    return 0;
}

static bool doorbell_meet_on_core(void *counts, int core, cpu_set_t *taken_out)
{
    (void)counts;
    CPU_ZERO(taken_out);
    CPU_SET((size_t)core, taken_out);
    return false;
}

static const struct shoal_doorbell_ops doorbell_ops = {.ring = doorbell_do_nothing,
                                                       .doze = doorbell_do_nothing,
                                                       .doze_briefly = doorbell_do_nothing,
                                                       .sleep_for = doorbell_sleep_for,
                                                       .awake = doorbell_do_nothing,
                                                       .check = doorbell_check,
                                                       .cores = doorbell_cores,
                                                       .meet_on_core = doorbell_meet_on_core};

static bool source_poll(void *arg)
{
    struct counts *counts = arg;
    if (atomic_fetch_add(&counts->polls, 1) + 1 == counts->stops_at)
        nanosleep(&(struct timespec){1, 200000000}, NULL);
    return false;
}

static bool source_has_descriptor(void *arg)
{
    struct counts *counts = arg;
    return atomic_load(&counts->has_descriptor);
}

static bool source_may_wait(void *counts)
{
    (void)counts;
    return true;
}

static void source_wait(void *arg, uint64_t timeout_ns)
{
    struct counts *counts = arg;
    const struct timespec nap = {0, 100000};
    assert_true(timeout_ns <= SHOAL_NS_PER_MS); /* the doorbell does not ring */
    atomic_fetch_add(&counts->waits, 1);
    nanosleep(&nap, NULL);
}

static const struct shoal_wait_source_ops source_ops = {source_poll, source_has_descriptor, source_may_wait, source_wait};

struct world {
    struct shoal_settings settings;
    struct shoal_log log;
    struct counts counts;
    uint32_t is_parent;
    struct shoal_progress *progress;
    struct shoal_sim *sims[PAIRS];
    struct shoal_engine *engines[PAIRS]; /* rank 0 of each pair; the progress engine's */
    struct shoal_engine *peers[PAIRS];
};

static struct shoal_engine *open_engine(struct world *world, int pair, int rank)
{
    const struct shoal_engine_options options = {.name = "pair",
                                                 .transport = shoal_sim_transport(world->sims[pair], rank),
                                                 .kernels = shoal_kernels_find("auto"),
                                                 .settings = &world->settings.engine,
                                                 .warn_ms = world->settings.bootstrap.warn_ms,
                                                 .log = &world->log,
                                                 .progress = world->progress,
                                                 .timeout_ms = 60000};
    struct shoal_engine *engine;
    assert_int_equal(shoal_engine_create(&options, &engine), SHOAL_OK);
    return engine;
}

static struct world *open_world_on(const uint16_t *host)
{
    char error[256];
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    assert_int_equal(shoal_settings_load(&world->settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&world->log, &world->settings.log, NULL, NULL);
    const struct shoal_doorbell doorbell = {&doorbell_ops, &world->counts};
    assert_int_equal(shoal_progress_create(&world->log, &world->settings.engine, doorbell, &world->is_parent, &world->progress),
                     SHOAL_OK);
    for (int i = 0; i < PAIRS; i++) {
        const struct shoal_sim_options options = {
            .seed = 1, .size = 2, .counter_start = world->settings.engine.counter_start, .host = host};
        assert_int_equal(shoal_sim_create(&options, &world->sims[i]), SHOAL_OK);
        world->engines[i] = open_engine(world, i, 0);
        world->peers[i] = open_engine(world, i, 1);
        shoal_progress_lock(world->progress);
        shoal_progress_add(world->progress, world->engines[i]);
        shoal_progress_unlock(world->progress);
    }
    return world;
}

static struct world *open_world(void)
{
    return open_world_on(NULL);
}

static void close_world(struct world *world)
{
    for (int i = 0; i < PAIRS; i++) {
        shoal_progress_lock(world->progress);
        shoal_progress_remove(world->progress, world->engines[i]);
        shoal_engine_destroy(world->engines[i]);
        shoal_engine_destroy(world->peers[i]);
        shoal_progress_unlock(world->progress);
        shoal_sim_destroy(world->sims[i]);
    }
    assert_null(world->progress->busy);
    shoal_progress_destroy(world->progress);
    shoal_log_fini(&world->log);
    free(world);
}

static int count_busy(const struct shoal_progress *progress)
{
    int count = 0;
    for (const struct shoal_engine *engine = progress->busy; engine; engine = engine->busy_next)
        count++;
    return count;
}

static void post_barrier(struct world *world, int pair, struct shoal_request *request)
{
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER};
    shoal_progress_lock(world->progress);
    shoal_engine_post(world->engines[pair], &call, request);
    shoal_progress_begin(world->progress, world->engines[pair]);
    shoal_progress_unlock(world->progress);
}

static void end_barrier(struct world *world, int pair, struct shoal_request *request)
{
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER};
    struct shoal_request other = {.done_fn = NULL};
    shoal_engine_post(world->peers[pair], &call, &other);
    for (int turns = 0; turns < 1000 && shoal_request_status(request) == SHOAL_PENDING; turns++) {
        shoal_engine_progress(world->peers[pair]);
        shoal_sim_advance(world->sims[pair]);
        shoal_progress_poll(world->progress);
    }
    assert_int_equal(shoal_request_status(request), SHOAL_OK);
    while (shoal_request_status(&other) == SHOAL_PENDING &&
           (shoal_engine_progress(world->peers[pair]) || shoal_sim_advance(world->sims[pair])))
        continue;
}

/* A turn, and the end of each call, walk through few engines, however many communicators exist. */
static void progress_lists_only_busy_engines(void **state)
{
    struct world *world = open_world();
    struct shoal_request requests[2] = {{.done_fn = NULL}, {.done_fn = NULL}};
    (void)state;
    post_barrier(world, 7, &requests[0]);
    post_barrier(world, 30, &requests[1]);
    assert_int_equal(count_busy(world->progress), 2);
    assert_true(atomic_load(&world->progress->is_busy));
    end_barrier(world, 7, &requests[0]);
    assert_int_equal(count_busy(world->progress), 1);
    end_barrier(world, 30, &requests[1]);
    assert_int_equal(count_busy(world->progress), 0);
    assert_false(atomic_load(&world->progress->is_busy));
    close_world(world);
}

static struct shoal_packet eager_packet(void)
{
    return (struct shoal_packet){.kind = 1, .type = SHOAL_INT8}; /* EAGER in p2p.c, of no bytes */
}

/* While this rank waits on one communicator, it receives messages of idle communicators in turn. */
static void progress_takes_messages_of_idle_engines(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = NULL};
    const struct shoal_packet packet = eager_packet();
    (void)state;
    post_barrier(world, 0, &request);
    for (int i = 1; i < PAIRS; i++) {
        struct shoal_engine *peer = world->peers[i];
        assert_int_equal(peer->ops->push(peer->transport, 0, &packet, NULL), SHOAL_OK);
        while (shoal_sim_advance(world->sims[i]))
            continue;
    }
    for (int turns = 0; turns < 16 * (PAIRS + 1); turns++)
        shoal_progress_poll(world->progress);
    for (int i = 1; i < PAIRS; i++)
        assert_null(world->engines[i]->ops->peek(world->engines[i]->transport, 1));
    end_barrier(world, 0, &request);
    close_world(world);
}

static void *poll_once(void *arg)
{
    shoal_progress_poll(arg);
    return NULL;
}

/* A test loop must not keep the core from the thread that makes progress. */
static void progress_yields_to_the_thread_that_drives(void **state)
{
    struct world *world = open_world();
    pthread_t thread;
    (void)state;
    shoal_progress_lock(world->progress);
    const int before = atomic_load(&yields);
    shoal_progress_poll(world->progress); /* in a callback: this thread makes progress itself */
    assert_int_equal(atomic_load(&yields), before);
    assert_int_equal(pthread_create(&thread, NULL, poll_once, world->progress), 0);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&yields), before + 1);
    shoal_progress_unlock(world->progress);
    close_world(world);
}

struct waiting {
    struct shoal_progress *progress;
    struct shoal_request *request;
};

static void *wait_for_request(void *arg)
{
    struct waiting *waiting = arg;
    return shoal_progress_wait(waiting->progress, waiting->request, UINT64_MAX) == SHOAL_ERR_PEER_LOST ? arg : NULL;
}

/* A wait leaves the core to the thread that has the lock: always if it does not spin, else when it would sleep. */
static void progress_waits_yield_to_the_thread_that_has_the_lock(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = NULL};
    struct waiting waiting = {world->progress, &request};
    pthread_t thread;
    void *was_lost;
    (void)state;
    world->progress->spin_ns = 0;
    world->progress->yield_ns = 0;
    post_barrier(world, 0, &request);
    shoal_progress_lock(world->progress);
    const int before = atomic_load(&yields);
    const uint64_t start_ns = shoal_clock_ns();
    assert_int_equal(pthread_create(&thread, NULL, wait_for_request, &waiting), 0);
    while (atomic_load(&yields) == before && shoal_clock_ns() - start_ns < 30 * SHOAL_NS_PER_S)
        nanosleep(&(struct timespec){0, 100000}, NULL);
    assert_true(atomic_load(&yields) > before);
    shoal_progress_remove(world->progress, world->engines[0]);
    shoal_engine_close(world->engines[0]); /* ends the wait */
    shoal_progress_unlock(world->progress);
    pthread_join(thread, &was_lost);
    assert_non_null(was_lost);
    close_world(world);
}

static void post_again(void *arg, enum shoal_status status)
{
    struct world *world = arg;
    static struct shoal_request again; /* complete at once */
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER};
    assert_int_equal(status, SHOAL_ERR_PEER_LOST);
    shoal_engine_post(world->engines[3], &call, &again);
    shoal_progress_begin(world->progress, world->engines[3]);
}

/* The list must not contain an engine that is freed next. */
static void progress_does_not_list_an_engine_that_closes(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = post_again, .done_arg = world};
    (void)state;
    post_barrier(world, 3, &request);
    shoal_progress_lock(world->progress);
    shoal_progress_remove(world->progress, world->engines[3]);
    shoal_engine_close(world->engines[3]);
    assert_int_equal(shoal_request_status(&request), SHOAL_ERR_PEER_LOST);
    assert_null(world->progress->busy);
    shoal_progress_unlock(world->progress);
    close_world(world);
}

static void post_barrier_for(struct world *world, int pair, uint32_t timeout_ms, struct shoal_request *request)
{
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER, .timeout_ms = timeout_ms};
    shoal_progress_lock(world->progress);
    shoal_engine_post(world->engines[pair], &call, request);
    shoal_progress_begin(world->progress, world->engines[pair]);
    shoal_progress_unlock(world->progress);
}

/* As after a move to a machine with a faster processor. */
static void deadlines_pass_with_a_counter_of_another_rate(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = NULL};
    (void)state;
    shoal_progress_lock(world->progress);
    const double right = world->progress->anchor.ns_per_tick;
    world->progress->anchor.ns_per_tick *= 1.5;
    shoal_progress_unlock(world->progress);
    post_barrier_for(world, 0, 400, &request);
    const uint64_t start_ns = shoal_clock_ns();
    while (shoal_request_status(&request) == SHOAL_PENDING && shoal_clock_ns() - start_ns < 10 * SHOAL_NS_PER_S)
        shoal_progress_poll(world->progress);
    assert_int_equal(shoal_request_status(&request), SHOAL_ERR_TIMEOUT);
    const double off = world->progress->anchor.ns_per_tick / right - 1;
    assert_true(off > -0.01 && off < 0.01);
    close_world(world);
}

/* A deadline is extended only a few times for this rank's absences, because another rank may be at fault. */
static void absences_are_not_excused_for_ever(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = NULL};
    (void)state;
    post_barrier_for(world, 0, 1000, &request);
    shoal_progress_lock(world->progress);
    for (int i = 0; i < 8; i++) {
        const uint64_t before_ns = request.deadline_ns;
        while (shoal_clock_ns() < before_ns - 999 * SHOAL_NS_PER_MS)
            continue;
        shoal_engine_excuse(world->engines[0], UINT64_MAX);
        assert_true(request.deadline_ns > before_ns); /* a jump, or a stop of an hour */
    }
    const uint64_t last_ns = request.deadline_ns;
    while (shoal_clock_ns() < last_ns - 990 * SHOAL_NS_PER_MS)
        continue;
    shoal_engine_excuse(world->engines[0], UINT64_MAX);
    shoal_engine_excuse(world->engines[0], 1000);
    assert_true(request.deadline_ns == last_ns);
    request.deadline_ns = UINT64_MAX; /* as with ticks of a wrong rate */
    shoal_engine_excuse(world->engines[0], 0);
    assert_true(request.deadline_ns <= shoal_clock_ns() + SHOAL_NS_PER_S);
    shoal_progress_unlock(world->progress);
    close_world(world);
}

static void add_source(struct world *world, bool has_descriptor)
{
    atomic_store(&world->counts.has_descriptor, has_descriptor);
    shoal_progress_lock(world->progress);
    shoal_progress_add_source(world->progress, (struct shoal_wait_source){&source_ops, &world->counts});
    shoal_progress_unlock(world->progress);
}

/* The second poll of a turn is between the excuse for absences and the check of deadlines. */
static void a_stop_after_the_excuse_is_excused_by_the_next(void **state)
{
    struct world *world = open_world();
    struct shoal_request request = {.done_fn = NULL};
    (void)state;
    world->counts.stops_at = 2;
    add_source(world, false);
    post_barrier_for(world, 0, 900, &request);
    shoal_progress_poll(world->progress);
    assert_int_equal(atomic_load(&world->counts.polls), 2);
    assert_int_equal(shoal_request_status(&request), SHOAL_PENDING);
    shoal_progress_poll(world->progress);
    assert_int_equal(shoal_request_status(&request), SHOAL_PENDING);
    const uint64_t start_ns = shoal_clock_ns();
    while (shoal_request_status(&request) == SHOAL_PENDING && shoal_clock_ns() - start_ns < 60 * SHOAL_NS_PER_S)
        shoal_progress_poll(world->progress);
    assert_int_equal(shoal_request_status(&request), SHOAL_ERR_TIMEOUT);
    close_world(world);
}

static void wait_sources_are_polled_in_each_turn(void **state)
{
    struct world *world = open_world();
    (void)state;
    add_source(world, false);
    shoal_progress_poll(world->progress);
    assert_true(atomic_load(&world->counts.checks) > 0); /* the first turn also checks deadlines */
    for (int turn = 0; turn < 3; turn++) {
        const int before = atomic_load(&world->counts.polls);
        shoal_progress_poll(world->progress);
        assert_true(atomic_load(&world->counts.polls) > before);
    }
    close_world(world);
}

/* Waits for a request that receives nothing, until something was counted. */
static void wait_until_counted(struct world *world, struct shoal_request *request, atomic_int *count, atomic_int *or_count)
{
    const uint64_t start_ns = shoal_clock_ns();
    const int before = atomic_load(count) + atomic_load(or_count);
    while (atomic_load(count) + atomic_load(or_count) == before && shoal_clock_ns() - start_ns < 30 * SHOAL_NS_PER_S)
        assert_int_equal(shoal_progress_wait(world->progress, request, shoal_clock_ns() + 10 * SHOAL_NS_PER_MS), SHOAL_PENDING);
    assert_true(atomic_load(count) + atomic_load(or_count) > before);
}

/* When the descriptor is no longer reliable, the wait continues at the doorbell, for short times, because nobody rings it
 * then. */
static void waits_for_remote_ranks_sleep_at_a_descriptor(void **state)
{
    static const uint16_t host[] = {0, 1};
    struct world *world = open_world_on(host);
    struct counts *counts = &world->counts;
    struct shoal_request request = {.done_fn = NULL};
    (void)state;
    add_source(world, true);
    post_barrier(world, 0, &request);
    wait_until_counted(world, &request, &counts->waits, &counts->waits);
    assert_int_equal(atomic_load(&counts->naps) + atomic_load(&counts->long_naps), 0);
    atomic_store(&counts->has_descriptor, false);
    const int waits = atomic_load(&counts->waits);
    wait_until_counted(world, &request, &counts->naps, &counts->long_naps);
    assert_int_equal(atomic_load(&counts->long_naps), 0);
    assert_int_equal(atomic_load(&counts->waits), waits);
    end_barrier(world, 0, &request);
    close_world(world);
}

static void waits_for_local_ranks_sleep_at_the_doorbell(void **state)
{
    struct world *world = open_world();
    struct counts *counts = &world->counts;
    struct shoal_request request = {.done_fn = NULL};
    (void)state;
    add_source(world, true);
    post_barrier(world, 0, &request);
    wait_until_counted(world, &request, &counts->naps, &counts->long_naps);
    assert_int_equal(atomic_load(&counts->waits), 0);
    end_barrier(world, 0, &request);
    close_world(world);
}

/* A peer remains on the list if its doorbell could not be mapped. */
static void a_peer_without_a_doorbell_is_on_no_core(void **state)
{
    struct shoal_shm_doorbell doorbell = {.asleep = 0};
    struct shoal_shm_peer peer = {.doorbell = NULL}, *peers[] = {&peer};
    struct shoal_shm_endpoint endpoint = {.doorbell = &doorbell, .peers = peers, .peer_count = 1};
    cpu_set_t taken;
    (void)state;
    assert_false(shoal_shm_endpoint_meet_on_core(&endpoint, 1, &taken));
    assert_true(CPU_COUNT(&taken) == 1 && CPU_ISSET(1, &taken));
}

/* Rejected messages are recorded in memory that another process reads. */
static void rejected_messages_are_recorded_at_a_check(void **state)
{
    struct world *world = open_world();
    struct shoal_recorder *recorder = &world->engines[0]->recorder;
    struct shoal_rejections rejections = {.counts = {0}};
    (void)state;
    recorder->rejections = &rejections;
    rejections.counts[SHOAL_REJECTED_FORGED] = 4;
    rejections.counts[SHOAL_REJECTED_UNEXPECTED] = 1;
    (void)shoal_engine_check(world->engines[0], shoal_clock_ns());
    assert_int_equal(atomic_load(&recorder->flight->rejected), 5);
    close_world(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(progress_lists_only_busy_engines),
        cmocka_unit_test(progress_takes_messages_of_idle_engines),
        cmocka_unit_test(progress_yields_to_the_thread_that_drives),
        cmocka_unit_test(progress_waits_yield_to_the_thread_that_has_the_lock),
        cmocka_unit_test(progress_does_not_list_an_engine_that_closes),
        cmocka_unit_test(deadlines_pass_with_a_counter_of_another_rate),
        cmocka_unit_test(absences_are_not_excused_for_ever),
        cmocka_unit_test(a_stop_after_the_excuse_is_excused_by_the_next),
        cmocka_unit_test(wait_sources_are_polled_in_each_turn),
        cmocka_unit_test(waits_for_remote_ranks_sleep_at_a_descriptor),
        cmocka_unit_test(waits_for_local_ranks_sleep_at_the_doorbell),
        cmocka_unit_test(a_peer_without_a_doorbell_is_on_no_core),
        cmocka_unit_test(rejected_messages_are_recorded_at_a_check),
    };
    return cmocka_run_group_tests_name("progress", tests, NULL, NULL);
}
