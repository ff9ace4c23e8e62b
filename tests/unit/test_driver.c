/* The driver's lists and its lock, over engines on the simulated transport. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "base/clock.h"
#include "engine/driver.h"
#include "transport/sim/sim.h"

#define PAIRS 50

/* In the place of libc's. */
static atomic_int yields;
int sched_yield(void);
int sched_yield(void)
{
    atomic_fetch_add(&yields, 1);
    return 0;
}

struct world {
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_shm_bell bell;
    struct shoal_shm_node node; /* without peers */
    struct shoal_driver driver;
    struct shoal_sim *sims[PAIRS];
    struct shoal_engine *engines[PAIRS]; /* rank 0 of each pair; the driver's */
    struct shoal_engine *peers[PAIRS];
};

static struct shoal_engine *open_engine(struct world *world, int pair, int rank)
{
    const struct shoal_engine_options options = {.name = "pair",
                                                 .transport = shoal_sim_transport(world->sims[pair], rank),
                                                 .kernels = shoal_kernels_find("auto"),
                                                 .settings = &world->settings,
                                                 .log = &world->log,
                                                 .driver = rank == 0 ? &world->driver : NULL,
                                                 .anchor = &world->driver.anchor,
                                                 .timeout_ms = 60000};
    struct shoal_engine *engine;
    assert_int_equal(shoal_engine_create(&options, &engine), SHOAL_OK);
    return engine;
}

static struct world *open_world(void)
{
    char error[256];
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    assert_int_equal(shoal_settings_load(&world->settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&world->log, &world->settings, NULL, NULL);
    world->node = (struct shoal_shm_node){.log = &world->log, .bell = &world->bell};
    assert_int_equal(shoal_driver_init(&world->driver, &world->log, &world->settings, &world->node), SHOAL_OK);
    for (int i = 0; i < PAIRS; i++) {
        const struct shoal_sim_options options = {.seed = 1, .size = 2, .counter_start = world->settings.counter_start};
        assert_int_equal(shoal_sim_create(&options, &world->sims[i]), SHOAL_OK);
        world->engines[i] = open_engine(world, i, 0);
        world->peers[i] = open_engine(world, i, 1);
        shoal_driver_lock(&world->driver);
        shoal_driver_add(&world->driver, world->engines[i]);
        shoal_driver_unlock(&world->driver);
    }
    return world;
}

static void close_world(struct world *world)
{
    for (int i = 0; i < PAIRS; i++) {
        shoal_driver_lock(&world->driver);
        shoal_driver_remove(&world->driver, world->engines[i]);
        shoal_engine_destroy(world->engines[i]);
        shoal_engine_destroy(world->peers[i]);
        shoal_driver_unlock(&world->driver);
        shoal_sim_destroy(world->sims[i]);
    }
    assert_null(world->driver.busy);
    shoal_driver_fini(&world->driver);
    shoal_log_fini(&world->log);
    free(world);
}

static int count_busy(const struct shoal_driver *driver)
{
    int count = 0;
    for (const struct shoal_engine *engine = driver->busy; engine; engine = engine->busy_next)
        count++;
    return count;
}

static void post_barrier(struct world *world, int pair, struct shoal_request *request)
{
    const struct shoal_call call = {.kind = SHOAL_KIND_BARRIER};
    shoal_driver_lock(&world->driver);
    shoal_engine_post(world->engines[pair], &call, request);
    shoal_driver_note_posted(&world->driver, world->engines[pair]);
    shoal_driver_unlock(&world->driver);
}

static void end_barrier(struct world *world, int pair, struct shoal_request *request)
{
    const struct shoal_call call = {.kind = SHOAL_KIND_BARRIER};
    struct shoal_request other = {.done_fn = NULL};
    shoal_engine_post(world->peers[pair], &call, &other);
    for (int turns = 0; turns < 1000 && shoal_request_status(request) == SHOAL_PENDING; turns++) {
        shoal_engine_progress(world->peers[pair]);
        shoal_sim_advance(world->sims[pair]);
        shoal_driver_poll(&world->driver);
    }
    assert_int_equal(shoal_request_status(request), SHOAL_OK);
    while (shoal_request_status(&other) == SHOAL_PENDING &&
           (shoal_engine_progress(world->peers[pair]) || shoal_sim_advance(world->sims[pair])))
        continue;
}

/* What a turn and the end of each call walk through, however many communicators there are. */
static void driver_lists_only_busy_engines(void **state)
{
    struct world *world = open_world();
    struct shoal_request requests[2] = {{.done_fn = NULL}, {.done_fn = NULL}};
    (void)state;
    post_barrier(world, 7, &requests[0]);
    post_barrier(world, 30, &requests[1]);
    assert_int_equal(count_busy(&world->driver), 2);
    assert_true(atomic_load(&world->driver.is_busy));
    end_barrier(world, 7, &requests[0]);
    assert_int_equal(count_busy(&world->driver), 1);
    end_barrier(world, 30, &requests[1]);
    assert_int_equal(count_busy(&world->driver), 0);
    assert_false(atomic_load(&world->driver.is_busy));
    close_world(world);
}

static struct shoal_packet eager_packet(void)
{
    return (struct shoal_packet){.kind = 1, .type = SHOAL_INT8}; /* EAGER in messages.c, of no bytes */
}

/* Messages of communicators on which this rank does nothing are taken, in turn, while it waits on another. */
static void driver_takes_messages_of_idle_engines(void **state)
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
        shoal_driver_poll(&world->driver);
    for (int i = 1; i < PAIRS; i++)
        assert_null(world->engines[i]->ops->peek(world->engines[i]->transport, 1));
    end_barrier(world, 0, &request);
    close_world(world);
}

static void *poll_once(void *arg)
{
    shoal_driver_poll(arg);
    return NULL;
}

/* A loop of tests must not keep the core from the thread that drives. */
static void driver_yields_to_the_thread_that_drives(void **state)
{
    struct world *world = open_world();
    pthread_t thread;
    (void)state;
    shoal_driver_lock(&world->driver);
    const int before = atomic_load(&yields);
    shoal_driver_poll(&world->driver); /* in a callback: this thread drives itself */
    assert_int_equal(atomic_load(&yields), before);
    assert_int_equal(pthread_create(&thread, NULL, poll_once, &world->driver), 0);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&yields), before + 1);
    shoal_driver_unlock(&world->driver);
    close_world(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(driver_lists_only_busy_engines),
        cmocka_unit_test(driver_takes_messages_of_idle_engines),
        cmocka_unit_test(driver_yields_to_the_thread_that_drives),
    };
    return cmocka_run_group_tests_name("driver", tests, NULL, NULL);
}
