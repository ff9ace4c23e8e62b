/* The transport contract over the network. The ranks are contexts of one process that call themselves different hosts. They
 * meet over the interfaces of this machine, or over those of a mock: unchanged, delayed and reordered, with sources to
 * register, with data in messages. During a case, one thread calls them in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm_world.h"
#include "comm/context.h"
#include "memory_store.h"
#include "mock/mock_ways.h"
#include "mock/shuffle.h"
#include "topology/features.h"
#include "transport_contract.h"

/* Read by the leak checker: endpoints of libfabric leak some of their descriptions. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so";
}

#define SHARED_MAX 8
#define TIMEOUT_MS 20000
#define SETTINGS_MAX 3
#define STAGING_BYTES ((size_t)1 << 19)
#define MOCK "SHOAL_LIBFABRIC=" MOCK_FABRIC

struct shared {
    struct shoal_context *context;
    void *memory;
};

/* A rank while it is created. */
struct maker {
    struct contract_world *world;
    struct memory_store *store;
    const uint16_t *host;
    int rank;
    enum shoal_status status;
    bool is_absent;        /* it meets the others, but creates no transport */
    uint32_t join_timeout; /* ms; 0: TIMEOUT_MS */
};

struct inner {
    struct shoal_context *contexts[CONTRACT_RANKS_MAX];
    struct shoal_world *worlds[CONTRACT_RANKS_MAX]; /* NULL: it met nobody */
    struct shared shared[SHARED_MAX];
    int shared_count;
};

/* The hosts of the ranks, by the number of ranks, unless the case defines them. */
static const uint16_t apart[CONTRACT_RANKS_MAX + 1][CONTRACT_RANKS_MAX] = {[2] = {0, 1}, [3] = {0, 1, 2}, [4] = {0, 0, 1, 1}};

/* ---- Making a world ---- */

static enum shoal_status make_context(struct maker *maker, struct shoal_context **context_out)
{
    const char *const *settings = maker->world->factory->arg;
    char host[64];
    snprintf(host, sizeof host, "SHOAL_HOST_ID=contract-%d", maker->host[maker->rank]);
    const char *overrides[SETTINGS_MAX + 2] = {host};
    for (int i = 0; settings[i]; i++)
        overrides[1 + i] = settings[i];
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    options.settings = overrides;
    SHOAL_TRY(shoal_context_create(&options, context_out));
    (*context_out)->log.rank = maker->rank;
    return SHOAL_OK;
}

static enum shoal_status meet(const struct maker *maker, struct shoal_context *context, struct shoal_world **world_out)
{
    const struct shoal_store store = memory_store_callbacks(maker->store);
    struct shoal_bootstrap bootstrap;
    SHOAL_TRY(shoal_bootstrap_from_store(&store, maker->rank, maker->world->size, &context->settings.bootstrap, &context->log,
                                         TIMEOUT_MS, &bootstrap));
    const enum shoal_status status = shoal_world_meet(context, &bootstrap, TIMEOUT_MS, world_out);
    shoal_bootstrap_close(&bootstrap);
    return status;
}

static enum shoal_status make_rank(struct maker *maker)
{
    struct contract_world *world = maker->world;
    struct inner *inner = world->inner;
    struct shoal_context **context = &inner->contexts[maker->rank];
    struct shoal_world *met;
    SHOAL_TRY(make_context(maker, context));
    SHOAL_TRY(meet(maker, *context, &met));
    inner->worlds[maker->rank] = met;
    if (maker->is_absent)
        return SHOAL_OK;
    const struct shoal_hosts_options options = {.log = &(*context)->log,
                                                .network = (*context)->network,
                                                .membership = met->membership,
                                                .members = met->members,
                                                .shm = {.comm = 77,
                                                        .rank = maker->rank,
                                                        .size = world->size,
                                                        .slots = SHOAL_DEPTH_MAX,
                                                        .slot_bytes = STAGING_BYTES,
                                                        .counter_start = world->counter_start,
                                                        .timeout_ms = maker->join_timeout ? maker->join_timeout : TIMEOUT_MS}};
    SHOAL_TRY(shoal_hosts_create((*context)->endpoint, &options, &world->ranks[maker->rank]));
    enum shoal_status status;
    int socket;
    while ((status = shoal_hosts_join(world->ranks[maker->rank], &socket)) == SHOAL_PENDING)
        continue;
    return status;
}

static void *make_in_thread(void *arg)
{
    struct maker *maker = arg;
    maker->status = make_rank(maker);
    return NULL;
}

/* Returns true if the ranks are on several hosts: on one host the hosts transport is not used. */
static bool is_for_hosts(const uint16_t *host, int size)
{
    for (int rank = 1; rank < size; rank++)
        if (host[rank] != host[0])
            return true;
    return false;
}

/* The caller has filled the makers' fields except the store and the rank. */
static void run_makers(struct contract_world *world, struct maker *makers)
{
    struct memory_store store;
    pthread_t threads[CONTRACT_RANKS_MAX];
    world->inner = calloc(1, sizeof(struct inner));
    assert_non_null(world->inner);
    memory_store_init(&store);
    for (int rank = 0; rank < world->size; rank++) {
        makers[rank].world = world;
        makers[rank].store = &store;
        makers[rank].rank = rank;
        makers[rank].status = SHOAL_PENDING;
        assert_int_equal(pthread_create(&threads[rank], NULL, make_in_thread, &makers[rank]), 0);
    }
    for (int rank = 0; rank < world->size; rank++)
        pthread_join(threads[rank], NULL);
    memory_store_fini(&store);
}

static bool make(struct contract_world *world)
{
    const uint16_t *host = world->host ? world->host : apart[world->size];
    struct maker makers[CONTRACT_RANKS_MAX] = {0};
    if (!is_for_hosts(host, world->size))
        return false;
    for (int rank = 0; rank < world->size; rank++)
        makers[rank].host = host;
    run_makers(world, makers);
    for (int rank = 0; rank < world->size; rank++)
        assert_int_equal(makers[rank].status, SHOAL_OK);
    return true;
}

/* ---- Open worlds ---- */

static void pump(struct contract_world *world)
{
    struct inner *inner = world->inner;
    for (int rank = 0; rank < world->size; rank++)
        if (!world->is_idle[rank])
            shoal_network_poll(inner->contexts[rank]->network);
}

static void *share(struct contract_world *world, int rank, size_t bytes)
{
    struct inner *inner = world->inner;
    void *memory = NULL;
    assert_true(inner->shared_count < SHARED_MAX);
    if (shoal_mem_alloc(inner->contexts[rank], bytes, &memory) != SHOAL_OK)
        return NULL;
    inner->shared[inner->shared_count++] = (struct shared){inner->contexts[rank], memory};
    return memory;
}

/* ---- Its end ---- */

struct ending {
    struct shoal_context *context;
    struct shoal_world *world;
};

static void *end_context(void *arg)
{
    const struct ending *ending = arg;
    if (ending->world)
        shoal_world_leave(ending->world);
    shoal_context_destroy(ending->context);
    return NULL;
}

/* Contexts part in their own threads: each waits for the good-bye of others. */
static void destroy(struct contract_world *world)
{
    struct inner *inner = world->inner;
    pthread_t threads[CONTRACT_RANKS_MAX];
    struct ending endings[CONTRACT_RANKS_MAX];
    for (int rank = 0; rank < world->size; rank++)
        if (world->ranks[rank])
            world->ranks[rank]->ops->destroy(world->ranks[rank], true);
    for (int i = 0; i < inner->shared_count; i++)
        assert_int_equal(shoal_mem_free(inner->shared[i].context, inner->shared[i].memory), SHOAL_OK);
    for (int rank = 0; rank < world->size; rank++) {
        endings[rank] = (struct ending){inner->contexts[rank], inner->worlds[rank]};
        assert_int_equal(pthread_create(&threads[rank], NULL, end_context, &endings[rank]), 0);
    }
    for (int rank = 0; rank < world->size; rank++)
        pthread_join(threads[rank], NULL);
    free(inner);
}

/* ---- Sources of writes, which may have to be registered ---- */

#define SOURCE_BYTES ((size_t)100000)
#define SEGMENTS 100

/* Rank 0 puts to rank 1. While nobody polls, the mock reads no source: a change after the put arrives, unless the source was
 * copied. */
struct sources {
    struct contract_world world;
    struct shoal_context *context; /* rank 0's */
    uint64_t puts;
    unsigned (*count_regions)(const void *at);
    void (*limit_locked)(size_t bytes);
};

static void find_in_mock(const char *name, void *function_out)
{
    void *mock = dlopen(MOCK_FABRIC, RTLD_NOW);
    assert_non_null(mock);
    void *function = dlsym(mock, name);
    assert_non_null(function);
    memcpy(function_out, &function, sizeof function);
    dlclose(mock); /* the contexts still hold it */
}

#define UNTIL(world, condition)                                            \
    do {                                                                   \
        const uint64_t until_ns_ = shoal_clock_ns() + 10 * SHOAL_NS_PER_S; \
        while (!(condition)) {                                             \
            assert_true(shoal_clock_ns() < until_ns_);                     \
            pump(world);                                                   \
        }                                                                  \
    } while (0)

static void open_sources(struct sources *sources, void **state)
{
    const struct shoal_announcement record = {.descriptor = {.sequence = 1}};
    *sources = (struct sources){.world = {.factory = *state, .size = 2}};
    assert_true(make(&sources->world));
    sources->context = ((struct inner *)sources->world.inner)->contexts[0];
    find_in_mock("mock_count_regions", &sources->count_regions);
    find_in_mock("mock_limit_locked", &sources->limit_locked);
    struct shoal_transport *giver = sources->world.ranks[0], *taker = sources->world.ranks[1];
    assert_int_equal(taker->ops->reserve_staging(taker, SHOAL_DEPTH_MAX, STAGING_BYTES), SHOAL_OK);
    taker->ops->announce(taker, &record, NULL, 0, NULL);
    taker->ops->flush(taker);
    UNTIL(&sources->world, giver->ops->announcement(giver, 1, 1) != NULL);
}

static unsigned char *allocate(struct sources *sources, unsigned char content)
{
    void *memory;
    assert_int_equal(shoal_mem_alloc(sources->context, SOURCE_BYTES, &memory), SHOAL_OK);
    memset(memory, content, SOURCE_BYTES);
    return memory;
}

static void release(struct sources *sources, void *memory)
{
    assert_int_equal(shoal_mem_free(sources->context, memory), SHOAL_OK);
}

static void put_all(struct sources *sources, const void *memory)
{
    struct shoal_transport *giver = sources->world.ranks[0];
    enum shoal_status status;
    UNTIL(&sources->world, (status = giver->ops->put(giver, 1, 0, 0, memory, SOURCE_BYTES)) != SHOAL_PENDING);
    assert_int_equal(status, SHOAL_OK);
    sources->puts++;
}

static void assert_comes(struct sources *sources, unsigned char content)
{
    struct shoal_transport *giver = sources->world.ranks[0], *taker = sources->world.ranks[1];
    UNTIL(&sources->world, taker->ops->counter(taker, 0, 0) == sources->puts && giver->ops->is_locally_complete(giver, 0));
    const unsigned char *came = taker->ops->staging(taker, 1, 0);
    for (size_t i = 0; i < SOURCE_BYTES; i++)
        assert_int_equal(came[i], content);
}

static void sources_in_shared_memory_are_registered_once_and_not_copied(void **state)
{
    static unsigned char private[SOURCE_BYTES];
    struct sources sources;
    open_sources(&sources, state);
    unsigned char *shared = allocate(&sources, 1);
    assert_int_equal(sources.count_regions(shared), 0);
    for (unsigned char turn = 2; turn < 5; turn++) {
        put_all(&sources, shared);
        memset(shared, turn, SOURCE_BYTES);
        assert_comes(&sources, turn);
        assert_int_equal(sources.count_regions(shared), 1);
        assert_int_equal(sources.count_regions(shared + SOURCE_BYTES - 1), 1);
    }
    memset(private, 5, SOURCE_BYTES);
    put_all(&sources, private);
    memset(private, 6, SOURCE_BYTES);
    assert_comes(&sources, 5);
    assert_int_equal(sources.count_regions(private), 0);
    release(&sources, shared);
    destroy(&sources.world);
}

static uint64_t copies_of(const struct sources *sources)
{
    return shoal_network_copies(((struct inner *)sources->world.inner)->contexts[0]->network);
}

/* The adapter reads [range, range + SOURCE_BYTES) in place while it is registered, and a copy of it before and after. */
static void assert_read_where_it_lies(struct sources *sources, unsigned char *range, int fd)
{
    memset(range, 1, SOURCE_BYTES);
    const uint64_t before = copies_of(sources);
    put_all(sources, range);
    memset(range, 2, SOURCE_BYTES);
    assert_comes(sources, 1);
    assert_int_equal(copies_of(sources), before + 1);
    assert_int_equal(shoal_mem_register(sources->context, range, SOURCE_BYTES, fd, 0), SHOAL_OK);
    for (unsigned char turn = 3; turn < 6; turn++) {
        put_all(sources, range);
        memset(range, turn, SOURCE_BYTES);
        assert_comes(sources, turn);
        assert_int_equal(sources->count_regions(range), 1);
        assert_int_equal(sources->count_regions(range + SOURCE_BYTES - 1), 1);
    }
    assert_int_equal(copies_of(sources), before + 1);
    assert_int_equal(shoal_mem_deregister(sources->context, range), SHOAL_OK);
    assert_int_equal(sources->count_regions(range), 0);
    put_all(sources, range);
    memset(range, 6, SOURCE_BYTES);
    assert_comes(sources, 5);
    assert_int_equal(copies_of(sources), before + 2);
}

static void sources_that_the_user_registered_are_not_copied(void **state)
{
    static unsigned char private[3 * SOURCE_BYTES];
    struct sources sources;
    open_sources(&sources, state);
    const int fd = memfd_create("test", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, SOURCE_BYTES), 0);
    unsigned char *shared = mmap(NULL, SOURCE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(shared, MAP_FAILED);
    assert_read_where_it_lies(&sources, shared, fd);
    if (shoal_topology_copies_locked_pages())
        assert_read_where_it_lies(&sources, private + SOURCE_BYTES, -1);
    munmap(shared, SOURCE_BYTES);
    close(fd);
    destroy(&sources.world);
}

static void hinder_taker(struct sources *sources, enum mock_way way);

/* As after a failure. The pages belong to the user, who would unmap them. */
static void sources_that_are_deregistered_too_early_are_waited_for(void **state)
{
    static unsigned char private[SOURCE_BYTES];
    struct sources sources;
    open_sources(&sources, state);
    if (!shoal_topology_copies_locked_pages()) {
        destroy(&sources.world);
        skip();
    }
    assert_int_equal(shoal_mem_register(sources.context, private, SOURCE_BYTES, -1, 0), SHOAL_OK);
    put_all(&sources, private);
    assert_int_equal(shoal_mem_deregister(sources.context, private), SHOAL_OK); /* it makes progress itself */
    assert_int_equal(sources.count_regions(private), 0);
    assert_comes(&sources, 0);
    assert_int_equal(shoal_mem_register(sources.context, private, SOURCE_BYTES, -1, 0), SHOAL_OK);
    hinder_taker(&sources, MOCK_STALLED);
    put_all(&sources, private);
    assert_int_equal(shoal_mem_deregister(sources.context, private), SHOAL_ERR_STATE);
    assert_int_equal(sources.count_regions(private), 1);
    hinder_taker(&sources, MOCK_OPEN);
    assert_comes(&sources, 0);
    assert_int_equal(shoal_mem_deregister(sources.context, private), SHOAL_OK);
    assert_int_equal(sources.count_regions(private), 0);
    destroy(&sources.world);
}

/* New memory gets the addresses of freed memory, but belongs to another region. */
static void sources_that_are_freed_are_unregistered_before(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    for (unsigned char turn = 1; turn <= 20; turn++) {
        unsigned char *shared = allocate(&sources, turn);
        assert_int_equal(sources.count_regions(shared), 0);
        put_all(&sources, shared);
        assert_comes(&sources, turn);
        assert_int_equal(sources.count_regions(shared), 1);
        release(&sources, shared);
        assert_int_equal(sources.count_regions(shared), 0);
    }
    destroy(&sources.world);
}

/* As after a failure, when the caller cannot know. */
static void sources_that_are_freed_too_early_stay_until_all_is_complete(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    unsigned char *shared = allocate(&sources, 1);
    put_all(&sources, shared);
    release(&sources, shared);
    assert_int_equal(sources.count_regions(shared), 1);
    assert_comes(&sources, 1);
    pump(&sources.world);
    assert_int_equal(sources.count_regions(shared), 0);
    unsigned char *left = allocate(&sources, 2);
    put_all(&sources, left);
    release(&sources, left); /* and the endpoint closes */
    destroy(&sources.world);
}

/* A source that is not kept loses its pages at once, except those that an adapter still reads. */
static void sources_that_are_freed_too_early_keep_their_pages_so_long(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    sources.context->settings.memory.memory_kept = 0;
    unsigned char *shared = allocate(&sources, 1);
    put_all(&sources, shared);
    release(&sources, shared);
    assert_int_equal(sources.count_regions(shared), 1);
    assert_comes(&sources, 1);
    destroy(&sources.world);
}

static void sources_may_be_many_segments(void **state)
{
    struct sources sources;
    unsigned char *segments[SEGMENTS];
    open_sources(&sources, state);
    for (int i = 0; i < SEGMENTS; i++)
        segments[i] = allocate(&sources, (unsigned char)(i + 1));
    for (int i = 0; i < 2 * SEGMENTS; i++) {
        const int which = i * 37 % SEGMENTS;
        put_all(&sources, segments[which]);
        assert_comes(&sources, (unsigned char)(which + 1));
    }
    for (int i = 0; i < SEGMENTS; i += 2)
        release(&sources, segments[i]);
    for (int i = 0; i < SEGMENTS; i++)
        assert_int_equal(sources.count_regions(segments[i]), i % 2);
    for (int i = 1; i < SEGMENTS; i += 2) {
        put_all(&sources, segments[i]);
        assert_comes(&sources, (unsigned char)(i + 1));
        release(&sources, segments[i]);
    }
    destroy(&sources.world);
}

static void sources_that_cannot_be_locked_are_copied(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    unsigned char *shared = allocate(&sources, 1);
    sources.limit_locked(0);
    put_all(&sources, shared);
    sources.limit_locked(SIZE_MAX);
    memset(shared, 2, SOURCE_BYTES);
    assert_comes(&sources, 1);
    put_all(&sources, shared); /* it is not retried */
    memset(shared, 3, SOURCE_BYTES);
    assert_comes(&sources, 2);
    assert_int_equal(sources.count_regions(shared), 0);
    release(&sources, shared);
    destroy(&sources.world);
}

/* A child does not inherit the parent's shared memory, so that its pages remain the registered ones. */
static void sources_stay_registered_when_the_process_forks(void **state)
{
    struct sources sources;
    int ended;
    open_sources(&sources, state);
    unsigned char *shared = allocate(&sources, 1), pages[SOURCE_BYTES / SHOAL_PAGE + 1];
    put_all(&sources, shared);
    const pid_t child = fork();
    if (child == 0)
        _exit(mincore(shared, SOURCE_BYTES, pages) == 0 || shoal_mem_free(sources.context, shared) != SHOAL_ERR_STATE);
    assert_true(child > 0);
    memset(shared, 2, SOURCE_BYTES);
    assert_comes(&sources, 2);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    put_all(&sources, shared);
    memset(shared, 3, SOURCE_BYTES);
    assert_comes(&sources, 3);
    assert_int_equal(sources.count_regions(shared), 1);
    release(&sources, shared);
    destroy(&sources.world);
}

/* ---- Increments that overtake each other --------------------------------------------------------------------------------- */

#define INCREMENTS_MANY 300
#define PUMPS 500

static void hinder_taker(struct sources *sources, enum mock_way way)
{
    void (*hinder)(uint64_t number, enum mock_way way);
    uint64_t number;
    const struct inner *inner = sources->world.inner;
    memcpy(&number, shoal_network_address(inner->contexts[1]->network)->at, sizeof number);
    find_in_mock("mock_hinder", &hinder);
    hinder(number, way);
}

/* Puts bytes until a put is refused, from number `first` on. Returns the number of the next byte. */
static int put_while_taken(struct sources *sources, const unsigned char *bytes, int first)
{
    struct shoal_transport *giver = sources->world.ranks[0];
    for (int idle = 0; first < INCREMENTS_MANY && idle < PUMPS; idle++) {
        const enum shoal_status status = giver->ops->put(giver, 1, 0, (size_t)first, &bytes[first], 1);
        pump(&sources->world);
        if (status == SHOAL_PENDING)
            continue;
        assert_int_equal(status, SHOAL_OK);
        idle = 0;
        first++;
    }
    return first;
}

/* The first write is still on its way when all others could have arrived: none of them is mistaken for it. */
static void a_write_that_is_late_is_not_taken_for_another(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    struct shoal_transport *taker = sources.world.ranks[1];
    unsigned char *bytes = allocate(&sources, 0);
    for (int i = 0; i < INCREMENTS_MANY; i++)
        bytes[i] = (unsigned char)(i % 255 + 1);
    hinder_taker(&sources, MOCK_HELD);
    const int put = put_while_taken(&sources, bytes, 0);
    assert_int_equal(taker->ops->counter(taker, 0, 0), 0);
    hinder_taker(&sources, MOCK_OPEN);
    assert_int_equal(put_while_taken(&sources, bytes, put), INCREMENTS_MANY);
    UNTIL(&sources.world, taker->ops->counter(taker, 0, 0) == INCREMENTS_MANY);
    assert_memory_equal(taker->ops->staging(taker, 1, 0), bytes, INCREMENTS_MANY);
    release(&sources, bytes);
    destroy(&sources.world);
}

/* Like the case before, with signals, which cannot be refused; a put arrives after the signals before it. */
static void a_signal_that_is_late_is_not_lost(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    struct shoal_transport *giver = sources.world.ranks[0], *taker = sources.world.ranks[1];
    unsigned char *byte = allocate(&sources, 7);
    hinder_taker(&sources, MOCK_HELD);
    for (int i = 0; i < INCREMENTS_MANY; i++)
        giver->ops->signal(giver, 1, 0);
    for (int i = 0; i < PUMPS; i++)
        pump(&sources.world);
    assert_int_equal(taker->ops->counter(taker, 0, 0), 0);
    assert_false(giver->ops->is_flushed(giver));
    assert_int_equal(giver->ops->put(giver, 1, 0, 0, byte, 1), SHOAL_PENDING);
    hinder_taker(&sources, MOCK_OPEN);
    UNTIL(&sources.world, giver->ops->put(giver, 1, 0, 0, byte, 1) == SHOAL_OK);
    UNTIL(&sources.world, taker->ops->counter(taker, 0, 0) == INCREMENTS_MANY + 1);
    assert_int_equal(*(unsigned char *)taker->ops->staging(taker, 1, 0), 7);
    UNTIL(&sources.world, giver->ops->is_flushed(giver));
    release(&sources, byte);
    destroy(&sources.world);
}

/* While the receiver computes, peers write more than its completion queue holds, as two all-to-alls of 1,024 ranks do. */
#define WRITES_MANY 6000

static void more_writes_than_the_queue_holds_come(void **state)
{
    struct sources sources;
    open_sources(&sources, state);
    struct shoal_transport *giver = sources.world.ranks[0], *taker = sources.world.ranks[1];
    unsigned char *byte = allocate(&sources, 7);
    unsigned written = 0;
    uint64_t heard = 0;
    sources.world.is_idle[1] = true;
    for (int idle = 0; written < WRITES_MANY && idle < PUMPS; idle++) {
        const unsigned slot = written % SHOAL_DEPTH_MAX;
        pump(&sources.world);
        if (giver->ops->put(giver, 1, slot, 0, byte, 1) != SHOAL_OK)
            continue;
        idle = 0;
        written++;
    }
    assert_true(written > 4096);
    sources.world.is_idle[1] = false;
    const uint64_t until_ns = shoal_clock_ns() + 10 * SHOAL_NS_PER_S;
    while (heard < written && shoal_clock_ns() < until_ns) {
        pump(&sources.world);
        heard = 0;
        for (unsigned slot = 0; slot < SHOAL_DEPTH_MAX; slot++)
            heard += taker->ops->counter(taker, 0, slot);
    }
    assert_int_equal(heard, written);
    release(&sources, byte);
    destroy(&sources.world);
}

static int run_sources(struct contract_factory *factory)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(sources_in_shared_memory_are_registered_once_and_not_copied, factory),
        cmocka_unit_test_prestate(sources_that_the_user_registered_are_not_copied, factory),
        cmocka_unit_test_prestate(sources_that_are_deregistered_too_early_are_waited_for, factory),
        cmocka_unit_test_prestate(sources_that_are_freed_are_unregistered_before, factory),
        cmocka_unit_test_prestate(sources_that_are_freed_too_early_stay_until_all_is_complete, factory),
        cmocka_unit_test_prestate(sources_that_are_freed_too_early_keep_their_pages_so_long, factory),
        cmocka_unit_test_prestate(sources_may_be_many_segments, factory),
        cmocka_unit_test_prestate(sources_that_cannot_be_locked_are_copied, factory),
        cmocka_unit_test_prestate(sources_stay_registered_when_the_process_forks, factory),
        cmocka_unit_test_prestate(a_write_that_is_late_is_not_taken_for_another, factory),
        cmocka_unit_test_prestate(a_signal_that_is_late_is_not_lost, factory),
        cmocka_unit_test_prestate(more_writes_than_the_queue_holds_come, factory),
    };
    return cmocka_run_group_tests_name(factory->name, tests, NULL, NULL);
}

/* ---- Failures ---- */

/* The lowest rank of a host keeps that host's failure. Its segment is missing when the host's other ranks give up. */
static void a_communicator_whose_lowest_local_rank_is_missing_is_refused(void **state)
{
    static const uint16_t hosts[] = {0, 0, 0, 1};
    struct contract_world world = {.factory = *state, .size = 4};
    struct maker makers[CONTRACT_RANKS_MAX] = {0};
    struct shoal_failure failure = {0};
    for (int rank = 0; rank < world.size; rank++)
        makers[rank] = (struct maker){.host = hosts, .is_absent = rank == 0, .join_timeout = 500};
    run_makers(&world, makers);
    assert_int_equal(makers[0].status, SHOAL_OK);
    for (int rank = 1; rank < 3; rank++) {
        assert_int_equal(makers[rank].status, SHOAL_ERR_TIMEOUT);
        world.ranks[rank]->ops->destroy(world.ranks[rank], false);
        world.ranks[rank] = NULL;
    }
    assert_int_equal(makers[3].status, SHOAL_OK);
    struct shoal_transport *elsewhere = world.ranks[3];
    UNTIL(&world, elsewhere->ops->lost(elsewhere, 0, 1, &failure) == 1 && elsewhere->ops->lost(elsewhere, 2, 1, &failure) == 2);
    assert_non_null(strstr(failure.text, "freed the communicator"));
    destroy(&world);
}

/* An operation in rounds sends its record after that of a later operation, whose payload the peer may still need. */
static void a_late_record_of_an_earlier_operation_frees_no_payload(void **state)
{
    static const unsigned char payload[1000];
    struct contract_world world = {.factory = *state, .size = 2};
    assert_true(make(&world));
    struct shoal_transport *giver = world.ranks[0], *taker = world.ranks[1];
    struct shoal_announcement record = {.descriptor = {.sequence = 2}};
    giver->ops->announce(giver, &record, payload, sizeof payload, NULL);
    record.descriptor.sequence = 1;
    giver->ops->announce_to(giver, 1, &record, NULL, 0);
    UNTIL(&world, taker->ops->announcement(taker, 0, 1) && taker->ops->announcement(taker, 0, 2));
    taker->ops->complete(taker, 1);
    taker->ops->announce(taker, &record, NULL, 0, NULL); /* sends it */
    UNTIL(&world, giver->ops->announcement(giver, 1, 1));
    giver->ops->complete(giver, 2);
    assert_int_equal(giver->ops->completed(giver, 1), 1);
    destroy(&world);
}

static int run_faults(struct contract_factory *factory)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(a_communicator_whose_lowest_local_rank_is_missing_is_refused, factory),
        cmocka_unit_test_prestate(a_late_record_of_an_earlier_operation_frees_no_payload, factory),
    };
    return cmocka_run_group_tests_name(factory->name, tests, NULL, NULL);
}

/* ---- Strangers ---- */

#define STRANGE 60

/* Another endpoint, whose session rank 1 does not know. */
struct stranger {
    struct shoal_network *network;
    struct shoal_network_peer *victim;
    struct shoal_network_load load; /* of all that is sent, because sends may have to wait */
    unsigned count, total;
};

static void open_stranger(struct stranger *stranger, struct shoal_context *like, const struct shoal_context *victim)
{
    static const struct shoal_siphash_key guessed = {{0, 0}};
    const struct shoal_network_options options = {
        .log = &like->log, .settings = &like->settings.fabric, .ports = like->settings.bootstrap.ports};
    const struct shoal_session_side own = {.rank = 0}, side = {.rank = 1};
    struct shoal_network_peer known = {.name = {.host = "victim"}, .address = *shoal_network_address(victim->network)};
    *stranger = (struct stranger){.network = NULL};
    shoal_session_open(&known.session, &guessed, &own, &side);
    assert_int_equal(shoal_network_open(&options, &stranger->network), SHOAL_OK);
    assert_int_equal(shoal_network_meet(stranger->network, &known, &stranger->victim), SHOAL_OK);
    stranger->load = (struct shoal_network_load){
        .peer = stranger->victim, .count = &stranger->count, .total = &stranger->total, .is_messages = true};
}

/* Sends everything that rank 0 could send, with the communicator's number. */
static void speak_for_rank_0(struct stranger *stranger, unsigned turn)
{
    static const char body[600];
    const struct shoal_network_head head = {.comm = 77,
                                            .completed = turn,
                                            .taken = turn,
                                            .number = 1 + turn / SHOAL_NETWORK_KIND_END,
                                            .kind = (uint16_t)(turn % SHOAL_NETWORK_KIND_END)};
    const struct iovec part = {(char *)(uintptr_t)body, turn * 10};
    assert_int_equal(shoal_network_send(stranger->network, &stranger->load, &head, &part, 1), SHOAL_OK);
}

static void strangers_change_nothing(void **state)
{
    static unsigned char bytes[SOURCE_BYTES];
    struct sources sources;
    struct stranger stranger;
    open_sources(&sources, state);
    const struct inner *inner = sources.world.inner;
    const struct shoal_rejections *rejections = shoal_network_rejections(inner->contexts[1]->network);
    struct shoal_transport *taker = sources.world.ranks[1];
    open_stranger(&stranger, inner->contexts[0], inner->contexts[1]);
    for (unsigned turn = 0; turn < STRANGE; turn++)
        speak_for_rank_0(&stranger, turn);
    UNTIL(&sources.world, (shoal_network_poll(stranger.network), rejections->counts[SHOAL_REJECTED_UNKNOWN] == STRANGE));
    assert_int_equal(taker->ops->counter(taker, 0, 0), 0);
    assert_null(taker->ops->peek(taker, 0));
    assert_null(taker->ops->announcement(taker, 0, 0));
    assert_int_equal(taker->ops->waits_for(taker, 0), -1);
    assert_int_equal(taker->ops->completed(taker, 0), 0);
    memset(bytes, 9, sizeof bytes);
    put_all(&sources, bytes);
    assert_comes(&sources, 9);
    assert_true(shoal_rejections_total(rejections) == STRANGE);
    shoal_network_close(stranger.network);
    destroy(&sources.world);
}

static int run_strangers(struct contract_factory *factory)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_prestate(strangers_change_nothing, factory)};
    return cmocka_run_group_tests_name(factory->name, tests, NULL, NULL);
}

/* ---- Main ---- */

/* Returns false, and prints the reason, if this machine has no libfabric. */
static bool has_libfabric(void)
{
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_fabric_library library;
    char error[256];
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        return false;
    shoal_log_init(&log, &settings.log, NULL, NULL);
    const bool has = shoal_fabric_library_open(settings.fabric.libfabric, &log, &library) == SHOAL_OK;
    if (has)
        shoal_fabric_library_close(&library);
    else
        printf("1..0 # SKIP %s\n", log.last_error);
    shoal_log_fini(&log);
    return has;
}

/* Arguments: only worlds whose names contain one of them. */
int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        const char *const settings[SETTINGS_MAX + 1];
        const char *machine; /* for the mock; NULL: this machine */
        uint64_t shuffle;    /* seed of bad weather; 0: none */
    } weathers[] = {
        {"transport_hosts", {NULL}, NULL, 0},
        {"transport_hosts_shuffled", {NULL}, NULL, 1},
        {"transport_hosts_rxm", {"SHOAL_PROVIDER=tcp;ofi_rxm", NULL}, NULL, 0},
        {"transport_hosts_rxm_shuffled", {"SHOAL_PROVIDER=tcp;ofi_rxm", NULL}, NULL, 2},
        {"transport_hosts_lanes", {"SHOAL_NETWORK_THREADS=3", NULL}, NULL, 0},
        {"transport_hosts_lanes_shuffled", {"SHOAL_NETWORK_THREADS=3", NULL}, NULL, 8},
        {"transport_hosts_lanes_rxm", {"SHOAL_NETWORK_THREADS=2", "SHOAL_PROVIDER=tcp;ofi_rxm", NULL}, NULL, 9},
        {"transport_hosts_efa", {MOCK, "SHOAL_PROVIDER=efa", NULL}, "aws", 0},
        {"transport_hosts_efa_shuffled", {MOCK, "SHOAL_PROVIDER=efa", NULL}, "aws", 3},
        {"transport_hosts_efa_that_cannot_write", {MOCK, "SHOAL_PROVIDER=efa", NULL}, "aws-first", 6},
        {"transport_hosts_without_writes", {"SHOAL_WRITES=no", NULL}, NULL, 7},
        {"transport_hosts_large_by_messages", {MOCK, "SHOAL_PROVIDER=tcp", NULL}, "short-writes", 5},
        {"transport_hosts_by_messages", {MOCK, "SHOAL_PROVIDER=udp;ofi_rxd", NULL}, "messages", 4},
    };
    int failed = 0;
    if (!has_libfabric())
        return 77;
    for (size_t i = 0; i < SHOAL_COUNT_OF(weathers); i++) {
        struct contract_factory factory = {weathers[i].name, weathers[i].settings, make, pump, NULL, share, destroy};
        shoal_shuffle_networks(weathers[i].shuffle);
        if (weathers[i].machine)
            setenv("SHOAL_MOCK_FABRIC", weathers[i].machine, 1);
        if (argc >= 2 && strcmp(weathers[i].name, argv[1]) != 0)
            continue;
        failed += contract_run(&factory);
        failed += run_strangers(&factory);
        if (strcmp(weathers[i].name, "transport_hosts_efa") == 0)
            failed += run_sources(&factory);
        if (strcmp(weathers[i].name, "transport_hosts") == 0)
            failed += run_faults(&factory);
    }
    return failed > 0;
}
