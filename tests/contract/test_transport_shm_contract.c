/* The transport contract over shared memory. The ranks are endpoints of one process. During a case, one thread calls them in
 * turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>
#include <pthread.h>

#include "comm/settings.h"
#include "memory_store.h"
#include "transport/shm/shm.h"
#include "transport_contract.h"

#define SHARED_MAX 8
#define TIMEOUT_MS 10000
#define STAGING_BYTES ((size_t)1 << 16)

struct shared {
    int rank;
    void *memory;
};

/* A rank while it is created. */
struct maker {
    struct contract_world *world;
    struct memory_store *store;
    int rank;
    enum shoal_status status;
};

struct inner {
    struct shoal_settings settings;
    struct shoal_log logs[CONTRACT_RANKS_MAX];
    struct shoal_memory *memories[CONTRACT_RANKS_MAX];
    struct shoal_shm_endpoint *endpoints[CONTRACT_RANKS_MAX];
    struct shared shared[SHARED_MAX];
    int shared_count;
};

static enum shoal_status connect_endpoint(struct inner *inner, struct maker *maker, struct shoal_shm_peer **peers)
{
    struct shoal_shm_place places[CONTRACT_RANKS_MAX];
    struct shoal_log *log = &inner->logs[maker->rank];
    const struct shoal_store store = memory_store_callbacks(maker->store);
    struct shoal_bootstrap bootstrap;
    SHOAL_TRY(shoal_bootstrap_from_store(&store, maker->rank, maker->world->size, &inner->settings.bootstrap, log, TIMEOUT_MS,
                                         &bootstrap));
    enum shoal_status status = shoal_memory_create(log, &inner->settings.memory, &inner->memories[maker->rank]);
    if (status == SHOAL_OK)
        status =
            shoal_shm_endpoint_create(log, &inner->settings.shm, inner->memories[maker->rank], &inner->endpoints[maker->rank]);
    if (status == SHOAL_OK)
        status = shoal_shm_endpoint_connect(inner->endpoints[maker->rank], &bootstrap, TIMEOUT_MS, places);
    for (int r = 0; r < maker->world->size && status == SHOAL_OK; r++)
        peers[r] = places[r].peer;
    shoal_bootstrap_close(&bootstrap);
    return status;
}

static enum shoal_status make_rank(struct inner *inner, struct maker *maker)
{
    struct contract_world *world = maker->world;
    struct shoal_shm_peer *peers[CONTRACT_RANKS_MAX];
    const struct shoal_shm_options options = {.comm = 77,
                                              .rank = maker->rank,
                                              .size = world->size,
                                              .peers = peers,
                                              .slots = SHOAL_DEPTH_MAX,
                                              .slot_bytes = STAGING_BYTES,
                                              .counter_start = world->counter_start,
                                              .timeout_ms = TIMEOUT_MS};
    SHOAL_TRY(connect_endpoint(inner, maker, peers));
    SHOAL_TRY(shoal_shm_create(inner->endpoints[maker->rank], &options, &world->ranks[maker->rank]));
    enum shoal_status status;
    int socket;
    while ((status = shoal_shm_join(world->ranks[maker->rank], &socket)) == SHOAL_PENDING)
        continue;
    return status;
}

static void *make_in_thread(void *arg)
{
    struct maker *maker = arg;
    maker->status = make_rank(maker->world->inner, maker);
    return NULL;
}

static bool make(struct contract_world *world)
{
    for (int rank = 0; world->host && rank < world->size; rank++)
        if (world->host[rank] != world->host[0])
            return false;
    char error[256];
    struct memory_store store;
    struct maker makers[CONTRACT_RANKS_MAX];
    pthread_t threads[CONTRACT_RANKS_MAX];
    struct inner *inner = calloc(1, sizeof(struct inner));
    assert_non_null(inner);
    world->inner = inner;
    assert_int_equal(shoal_settings_load(&inner->settings, NULL, error, sizeof(error)), SHOAL_OK);
    memory_store_init(&store);
    for (int rank = 0; rank < world->size; rank++) {
        shoal_log_init(&inner->logs[rank], &inner->settings.log, NULL, NULL);
        makers[rank] = (struct maker){world, &store, rank, SHOAL_PENDING};
        assert_int_equal(pthread_create(&threads[rank], NULL, make_in_thread, &makers[rank]), 0);
    }
    for (int rank = 0; rank < world->size; rank++)
        pthread_join(threads[rank], NULL);
    memory_store_fini(&store);
    for (int rank = 0; rank < world->size; rank++)
        assert_int_equal(makers[rank].status, SHOAL_OK);
    return true;
}

static void *share(struct contract_world *world, int rank, size_t bytes)
{
    struct inner *inner = world->inner;
    void *memory = NULL;
    assert_true(inner->shared_count < SHARED_MAX);
    if (shoal_memory_alloc(inner->memories[rank], bytes, &memory) != SHOAL_OK)
        return NULL;
    inner->shared[inner->shared_count++] = (struct shared){rank, memory};
    return memory;
}

static void destroy(struct contract_world *world)
{
    struct inner *inner = world->inner;
    for (int rank = 0; rank < world->size; rank++)
        if (world->ranks[rank])
            world->ranks[rank]->ops->destroy(world->ranks[rank], true);
    for (int i = 0; i < inner->shared_count; i++)
        assert_int_equal(shoal_memory_free(inner->memories[inner->shared[i].rank], inner->shared[i].memory), SHOAL_OK);
    for (int rank = 0; rank < world->size; rank++) {
        shoal_shm_endpoint_destroy(inner->endpoints[rank]);
        shoal_memory_destroy(inner->memories[rank]);
        shoal_log_fini(&inner->logs[rank]);
    }
    free(inner);
}

/* ---- Pages of staging buffers ---- */

static bool has_pages(struct contract_world *world, int rank)
{
    unsigned char pages[STAGING_BYTES / SHOAL_PAGE];
    struct shoal_transport *transport = world->ranks[rank];
    bool has = false;
    assert_int_equal(mincore(transport->ops->staging(transport, rank, 0), STAGING_BYTES, pages), 0);
    for (size_t i = 0; i < sizeof pages; i++)
        has |= pages[i] & 1;
    return has;
}

/* The peer checks by itself whether there is memory for its own buffer. */
static void a_staging_buffer_gets_its_pages_from_its_rank_alone(void **state)
{
    struct contract_world world = {.factory = *state, .size = 2};
    assert_true(make(&world));
    struct shoal_transport *first = world.ranks[0], *second = world.ranks[1];
    assert_int_equal(first->ops->reserve_staging(first, SHOAL_DEPTH_MAX, STAGING_BYTES), SHOAL_OK);
    assert_false(has_pages(&world, 1));
    assert_int_equal(second->ops->reserve_staging(second, SHOAL_DEPTH_MAX, STAGING_BYTES), SHOAL_OK);
    memset(second->ops->staging(second, 1, 0), 1, 1);
    assert_true(has_pages(&world, 1));
    destroy(&world);
}

/* ---- Memory that a peer frees ---- */

struct freed {
    struct contract_world world;
    struct shoal_transport *reader;      /* rank 0 */
    struct shoal_shm_endpoint *endpoint; /* rank 0's */
    struct shoal_segment *segment;       /* rank 1's, with a reference for the test */
    void *memory;                        /* rank 1's */
};

/* Rank 0 has reached memory of rank 1. */
static void open_freed(struct freed *freed, void **state)
{
    enum shoal_status error = SHOAL_OK;
    *freed = (struct freed){.world = {.factory = *state, .size = 2}};
    assert_true(make(&freed->world));
    struct inner *inner = freed->world.inner;
    struct shoal_transport *owner = freed->world.ranks[1];
    freed->reader = freed->world.ranks[0];
    freed->endpoint = inner->endpoints[0];
    assert_int_equal(shoal_memory_alloc(inner->memories[1], SHOAL_PAGE, &freed->memory), SHOAL_OK);
    const shoal_location location = owner->ops->locate(owner, freed->memory, SHOAL_PAGE);
    assert_ptr_equal(freed->reader->ops->reach(freed->reader, 1, location, SHOAL_PAGE, &error), freed->memory);
    assert_int_equal(freed->endpoint->peers[0]->mapped_count, 1);
    freed->segment = shoal_segment_get(freed->endpoint->peers[0]->mapped[0].segment);
}

static void free_and_notice(struct freed *freed)
{
    struct inner *inner = freed->world.inner;
    assert_int_equal(shoal_memory_free(inner->memories[1], freed->memory), SHOAL_OK);
    shoal_shm_endpoint_drain(freed->endpoint);
}

static bool reader_has_it(const struct freed *freed)
{
    return atomic_load(&freed->segment->references) == 2;
}

static void close_freed(struct freed *freed)
{
    shoal_segment_put(freed->segment);
    destroy(&freed->world);
}

static void memory_freed_while_a_rank_is_inside_stays_until_it_leaves(void **state)
{
    struct freed freed;
    open_freed(&freed, state);
    const struct shoal_transport_ops *reader_ops = freed.reader->ops;
    assert_true(reader_ops->enter(freed.reader));
    free_and_notice(&freed);
    assert_true(reader_has_it(&freed));
    reader_ops->leave(freed.reader);
    assert_false(reader_has_it(&freed));
    reader_ops->leave(freed.reader); /* is outside already */
    assert_true(reader_ops->enter(freed.reader));
    reader_ops->leave(freed.reader);
    assert_int_equal(freed.endpoint->inside, 0);
    close_freed(&freed);
}

/* A rank that stays inside learns of the failure at its next attempt to enter, and is outside then. */
static void memory_freed_after_a_failure_goes_when_a_rank_cannot_enter(void **state)
{
    struct freed freed;
    const struct shoal_failure failure = {.struct_bytes = sizeof failure, .status = SHOAL_ERR_MEMORY, .rank = 1};
    open_freed(&freed, state);
    struct shoal_transport *owner = freed.world.ranks[1];
    assert_true(freed.reader->ops->enter(freed.reader));
    (owner->ops->fail)(owner, &failure);
    free_and_notice(&freed);
    assert_true(reader_has_it(&freed));
    assert_false(freed.reader->ops->enter(freed.reader));
    assert_false(reader_has_it(&freed));
    close_freed(&freed);
}

static void a_transport_destroyed_inside_leaves(void **state)
{
    struct freed freed;
    open_freed(&freed, state);
    assert_true(freed.reader->ops->enter(freed.reader));
    free_and_notice(&freed);
    assert_true(reader_has_it(&freed));
    freed.reader->ops->destroy(freed.reader, false);
    freed.world.ranks[0] = NULL;
    assert_false(reader_has_it(&freed));
    close_freed(&freed);
}

int main(void)
{
    struct contract_factory factory = {"transport_shm", NULL, make, NULL, NULL, share, destroy};
    const struct CMUnitTest pages[] = {
        cmocka_unit_test_prestate(a_staging_buffer_gets_its_pages_from_its_rank_alone, &factory),
    };
    const struct CMUnitTest freed[] = {
        cmocka_unit_test_prestate(memory_freed_while_a_rank_is_inside_stays_until_it_leaves, &factory),
        cmocka_unit_test_prestate(memory_freed_after_a_failure_goes_when_a_rank_cannot_enter, &factory),
        cmocka_unit_test_prestate(a_transport_destroyed_inside_leaves, &factory),
    };
    const int failures = contract_run(&factory) + cmocka_run_group_tests_name("transport_shm, pages", pages, NULL, NULL) +
                         cmocka_run_group_tests_name("transport_shm, freed memory", freed, NULL, NULL);
    return failures > 0;
}
