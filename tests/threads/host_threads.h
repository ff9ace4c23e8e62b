/* Ranks that are threads of one process and call themselves different hosts, over a mock of EFA. Its endpoints can be stalled
 * or cut off one by one, and count the bytes they send. Include it after cmocka's headers. One per program. */
#ifndef SHOAL_TESTS_THREADS_HOST_THREADS_H
#define SHOAL_TESTS_THREADS_HOST_THREADS_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm/context.h"
#include "memory_store.h"
#include "mock/mock_ways.h"
#include "thread_checks.h"

#define RANKS_MAX 16
#define COUNT ((size_t)20000)
#define TIMEOUT_MS 20000

struct rank;

struct world {
    struct memory_store store;
    pthread_barrier_t meeting; /* of the ranks, without Shoal */
    int size;
    void (*body)(struct rank *rank);
    int ranks_per_host;
    const char *setting; /* an additional setting; NULL: none */
};

struct rank {
    struct world *world;
    struct shoal_context *context;
    struct shoal_comm *comm;
    int rank;
    struct shoal_failure failure; /* its failure in the end */
    float values[COUNT];
};

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static const char *provider = "SHOAL_PROVIDER=efa";
static shoal_log_fn log_to; /* NULL: lines are dropped */
static void (*hinder)(uint64_t number, enum mock_way way);
static uint64_t (*count_sent)(uint64_t number, char *adapter, size_t room);
static uint64_t endpoints[RANKS_MAX];

static inline void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static inline void *run_rank(void *arg)
{
    struct rank *rank = arg;
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    const struct shoal_store store = memory_store_callbacks(&rank->world->store);
    char host[32], timeout[32];
    snprintf(host, sizeof host, "SHOAL_HOST_ID=host-%d", rank->rank / rank->world->ranks_per_host);
    snprintf(timeout, sizeof timeout, "SHOAL_TIMEOUT_MS=%d", TIMEOUT_MS);
    const char *const settings[] = {host, "SHOAL_LIBFABRIC=" MOCK_FABRIC, provider, timeout, rank->world->setting, NULL};
    options.log = log_to ? log_to : swallow;
    options.settings = settings;
    OK(rank, shoal_context_create(&options, &rank->context));
    OK(rank, shoal_comm_create_with(rank->context, &store, rank->rank, rank->world->size, NULL, &rank->comm));
    memcpy(&endpoints[rank->rank], shoal_network_address(rank->context->network)->at, sizeof endpoints[0]);
    OK(rank, shoal_barrier(rank->comm, NULL));
    pthread_barrier_wait(&rank->world->meeting);
    rank->world->body(rank);
    pthread_barrier_wait(&rank->world->meeting);
    shoal_comm_free(rank->comm);
    shoal_context_destroy(rank->context);
    return NULL;
}

static struct rank ranks[RANKS_MAX];

static inline void run_world_with(const char *setting, int size, int ranks_per_host, void (*body)(struct rank *rank))
{
    struct world world = {.size = size, .body = body, .ranks_per_host = ranks_per_host, .setting = setting};
    pthread_t threads[RANKS_MAX];
    memory_store_init(&world.store);
    pthread_barrier_init(&world.meeting, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) {
        ranks[r] = (struct rank){.world = &world, .rank = r, .failure = SHOAL_FAILURE_INIT};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < size; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&world.meeting);
    memory_store_fini(&world.store);
}

static inline void run_world(int size, int ranks_per_host, void (*body)(struct rank *rank))
{
    run_world_with(NULL, size, ranks_per_host, body);
}

static inline void find_in_mock(void *mock, const char *name, void *function_out)
{
    void *function = dlsym(mock, name);
    assert_non_null(function);
    memcpy(function_out, &function, sizeof function);
}

/* Opened here because the sanitizer does not know the loader's lock. */
static inline void *open_mock_fabric(const char *path)
{
    void *mock = dlopen(path, RTLD_NOW);
    assert_non_null(mock);
    find_in_mock(mock, "mock_hinder", &hinder);
    find_in_mock(mock, "mock_count_sent", &count_sent);
    return mock;
}

#endif
