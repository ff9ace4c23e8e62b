/* The transport contract over the simulated transport: in order, and with delays under several seeds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "seeds.h"
#include "sim/sim_transport.h"
#include "transport_contract.h"

#define SHARED_MAX 8

struct inner {
    struct shoal_sim *sim;
    void *shared[SHARED_MAX];
    int shared_count;
};

static bool make(struct contract_world *world)
{
    struct inner *inner = calloc(1, sizeof(struct inner));
    assert_non_null(inner);
    struct shoal_sim_options options = *(const struct shoal_sim_options *)world->factory->arg;
    options.size = world->size;
    options.host = world->host;
    options.counter_start = world->counter_start;
    assert_int_equal(shoal_sim_create(&options, &inner->sim), SHOAL_OK);
    for (int rank = 0; rank < world->size; rank++)
        world->ranks[rank] = shoal_sim_transport(inner->sim, rank);
    world->inner = inner;
    return true;
}

static void pump(struct contract_world *world)
{
    shoal_sim_advance(((struct inner *)world->inner)->sim);
}

static void kill_rank(struct contract_world *world, int rank)
{
    shoal_sim_kill(((struct inner *)world->inner)->sim, rank);
}

static void *share(struct contract_world *world, int rank, size_t bytes)
{
    struct inner *inner = world->inner;
    assert_true(inner->shared_count < SHARED_MAX);
    void *memory = calloc(1, bytes);
    assert_non_null(memory);
    inner->shared[inner->shared_count++] = memory;
    assert_int_equal(shoal_sim_share(inner->sim, rank, memory, bytes), SHOAL_OK);
    return memory;
}

static void destroy(struct contract_world *world)
{
    struct inner *inner = world->inner;
    const char *breach = shoal_sim_breach(inner->sim);
    if (breach)
        fail_msg("%s", breach);
    for (int rank = 0; rank < world->size; rank++)
        if (world->ranks[rank])
            world->ranks[rank]->ops->destroy(world->ranks[rank], true);
    while (shoal_sim_advance(inner->sim))
        continue;
    shoal_sim_destroy(inner->sim);
    for (int i = 0; i < inner->shared_count; i++)
        free(inner->shared[i]);
    free(inner);
}

int main(void)
{
    struct shoal_sim_options weather = {.delay_ns_max = 0};
    struct contract_factory factory = {"transport_sim_in_order", &weather, make, pump, kill_rank, share, destroy};
    int failed = contract_run(&factory);
    factory.name = "transport_sim_delayed";
    const struct seeds seeds = seeds_of(10, 3);
    for (weather.seed = seeds.first; weather.seed < seeds.end; weather.seed++) {
        weather.delay_ns_max = 1000000;
        weather.busy_per_million = 300000;
        failed += contract_run(&factory);
    }
    return failed > 0;
}
