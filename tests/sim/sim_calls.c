#include "sim_calls.h"
#include "comm/settings.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/packers.h"
#include "engine/engine_state.h"
#include "reference.h"
#include "sim/sim_transport.h"

#define RANKS_MAX 16
#define MEMORIES_MAX 256
#define TICK_NS UINT64_C(100000000)
#define CHECK_NS UINT64_C(10000000)
#define CALM_NS 2000000L       /* of real time without an event, before time is moved */
#define CALM_LONG_NS 10000000L /* after several in a row: a thread of the reducer may be waiting for a core */
#define TICKS_SHORT 20
#define TIMEOUT_MS 30000
#define BUSY_MAX 4 /* times in a row that a transport is full: 1 % each */

/* ---- Objects ------------------------------------------------------------------------------------------------------------- */

/* A communicator, as all its ranks see it. Freed with the world. */
struct group {
    struct group *next;
    struct group *parent; /* NULL: the world */
    unsigned split;
    int color;
    struct shoal_sim *sim;
    int size;
    int world_rank[RANKS_MAX];
    uint16_t host[RANKS_MAX];
    struct shoal_comm *comms[RANKS_MAX]; /* those that are open */
    uint64_t checked_ns;
};

/* A request of a rank, as passed to shoal.h's functions. The engine frees it if nobody asks for it any longer. */
struct posted {
    struct shoal_request request; /* must be first */
    struct shoal_context *context;
};

/* A thread that is blocked until a request is done, or its rank is dead. */
struct waiter {
    struct waiter *next;
    struct posted *posted;
    pthread_cond_t done;
};

struct memory {
    void *at;
    size_t bytes;
    bool is_free;
};

struct shoal_context {
    struct sim_world *world;
    int rank;
    struct shoal_log log;
    bool is_dead;
    long posts_left, posts, failed_posts, idle_waits;
    struct memory memories[MEMORIES_MAX];
    size_t memory_count;
};

/* Tracks keep nothing here; they take memory, of which there may be none. */
struct shoal_track {
    struct shoal_track *next;
};

struct shoal_comm {
    struct shoal_context *context;
    struct group *group;
    struct shoal_track *tracks;
    int rank;
    unsigned splits;
    struct shoal_engine *engine;
};

struct sim_world {
    struct sim_world_options options;
    pthread_mutex_t lock;   /* recursive: a completion posts */
    pthread_cond_t changed; /* for the driver */
    struct waiter *waiters;
    atomic_int wanted; /* threads that want the lock: the driver yields it to them */
    pthread_t driver;
    bool is_ending;
    bool is_dirty;      /* something was posted since engines last made progress */
    bool is_checked;    /* nothing has happened since engines last checked for failures */
    atomic_int running; /* threads of the test that are not blocked */
    long ticks, ticks_in_a_row;
    uint64_t random;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    struct group *groups;
    struct shoal_context contexts[RANKS_MAX];
    struct shoal_comm *comms[RANKS_MAX];
};

static _Thread_local int depth;                    /* of the lock */
static _Thread_local struct sim_world *counted_in; /* the world whose `running` counts this thread */
static _Thread_local long may_allocate = -1;
static _Thread_local int has_failed;

static void must(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "sim_calls: %s\n", what);
    abort();
}

/* ---- Allocations that fail ----------------------------------------------------------------------------------------------- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

/* Tests of the library below cover its own allocation failures. */
static bool allocation_fails(void)
{
    if (depth > 0 || may_allocate < 0 || may_allocate-- > 0)
        return false;
    has_failed = 1;
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t bytes)
{
    return allocation_fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return allocation_fails() ? NULL : __real_calloc(count, bytes);
}

int sim_fail_allocation_after(long allocations)
{
    const int failed = has_failed;
    may_allocate = allocations;
    has_failed = 0;
    return failed;
}

/* ---- The lock ------------------------------------------------------------------------------------------------------------ */

static void lock(struct sim_world *world)
{
    atomic_fetch_add(&world->wanted, 1);
    pthread_mutex_lock(&world->lock);
    atomic_fetch_sub(&world->wanted, 1);
    depth++;
}

static void unlock(struct sim_world *world)
{
    depth--;
    pthread_mutex_unlock(&world->lock);
}

/* The driver polls it. */
static void count_running(int change)
{
    if (counted_in)
        atomic_fetch_add(&counted_in->running, change);
}

static struct timespec in_ns(uint64_t ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += (uint64_t)until.tv_nsec;
    until.tv_sec += (time_t)(ns / 1000000000);
    until.tv_nsec = (long)(ns % 1000000000);
    return until;
}

static bool is_over(struct posted *posted)
{
    return shoal_request_status(&posted->request) != SHOAL_PENDING || posted->context->is_dead;
}

static void wake_waiters(struct sim_world *world)
{
    for (struct waiter *waiter = world->waiters; waiter; waiter = waiter->next) {
        if (is_over(waiter->posted))
            pthread_cond_signal(&waiter->done);
    }
}

static void init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Blocks until the request is over, or until the given time. Call it with the lock held once. */
static void wait_until(struct sim_world *world, struct posted *posted, const struct timespec *until)
{
    struct waiter waiter = {.next = world->waiters, .posted = posted}, **link = &world->waiters;
    int error = 0;
    must(depth == 1, "a wait inside a completion");
    init_condition(&waiter.done);
    world->waiters = &waiter;
    while (!is_over(posted) && error != ETIMEDOUT)
        error =
            until ? pthread_cond_timedwait(&waiter.done, &world->lock, until) : pthread_cond_wait(&waiter.done, &world->lock);
    while (*link != &waiter)
        link = &(*link)->next;
    *link = waiter.next;
    pthread_cond_destroy(&waiter.done);
}

void sim_enter(struct sim_world *world)
{
    counted_in = world;
    count_running(1);
}

void sim_leave(struct sim_world *world)
{
    (void)world;
    count_running(-1);
    counted_in = NULL;
}

/* Waits of src/fusion between its own threads also count as blocked. */
int __real_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int __real_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until);
int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until);

int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    count_running(-1);
    const int error = __real_pthread_cond_wait(condition, mutex);
    count_running(1);
    return error;
}

int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    count_running(-1);
    const int error = __real_pthread_cond_timedwait(condition, mutex, until);
    count_running(1);
    return error;
}

/* ---- The driver ---------------------------------------------------------------------------------------------------------- */

static bool progress_group(const struct group *group)
{
    bool did = false;
    for (int r = 0; r < group->size; r++) {
        const struct shoal_comm *comm = group->comms[r];
        if (!comm || comm->context->is_dead)
            continue;
        did |= shoal_engine_progress(comm->engine);
        shoal_engine_flush(comm->engine);
    }
    return did;
}

static void check_group(struct group *group)
{
    group->checked_ns = shoal_sim_now_ns(group->sim);
    for (int r = 0; r < group->size; r++) {
        const struct shoal_comm *comm = group->comms[r];
        if (!comm || comm->context->is_dead)
            continue;
        (void)shoal_engine_check(comm->engine, shoal_engine_now_ns(comm->engine));
        shoal_engine_flush(comm->engine);
    }
}

static bool progress_all(struct sim_world *world)
{
    bool did = false;
    for (struct group *group = world->groups; group; group = group->next)
        did |= progress_group(group);
    return did;
}

/* Delivers one event, in a group that is drawn. */
static bool deliver(struct sim_world *world)
{
    size_t count = 0;
    for (const struct group *group = world->groups; group; group = group->next)
        count++;
    if (!count)
        return false;
    size_t skip = reference_below(&world->random, count);
    struct group *group = world->groups;
    while (skip--)
        group = group->next;
    for (size_t i = 0; i < count; i++, group = group->next ? group->next : world->groups) {
        if (!shoal_sim_advance(group->sim))
            continue;
        if (shoal_sim_now_ns(group->sim) >= group->checked_ns + CHECK_NS)
            check_group(group);
        while (progress_group(group))
            continue;
        return true;
    }
    return false;
}

static void check_all(struct sim_world *world)
{
    for (struct group *group = world->groups; group; group = group->next)
        check_group(group);
    world->is_checked = true;
    while (progress_all(world))
        world->is_checked = false;
    wake_waiters(world);
}

/* All threads are blocked and nothing is in progress: only deadlines remain. */
static void tick(struct sim_world *world)
{
    world->ticks++;
    world->ticks_in_a_row++;
    for (struct group *group = world->groups; group; group = group->next)
        shoal_sim_advance_to(group->sim, shoal_sim_now_ns(group->sim) + TICK_NS);
    check_all(world);
}

static bool is_idle(const struct sim_world *world)
{
    for (const struct group *group = world->groups; group; group = group->next) {
        for (int r = 0; r < group->size; r++) {
            if (group->comms[r] && shoal_engine_is_busy(group->comms[r]->engine) && !group->comms[r]->context->is_dead)
                return false;
        }
    }
    return true;
}

/* Does what can happen at this time, or delivers one event. Returns false if nothing can happen. */
static bool move(struct sim_world *world)
{
    bool did = world->is_dirty;
    world->is_dirty = false;
    while (did && progress_all(world))
        continue;
    did |= deliver(world);
    for (int i = 0; i < BUSY_MAX && !did; i++)
        did = progress_all(world); /* a refused put is retried */
    return did;
}

/* Rests for a moment of real time, or until something is posted. Returns true if nothing was posted and all threads were
 * blocked throughout. */
static bool rest(struct sim_world *world)
{
    const struct timespec until = in_ns(world->ticks_in_a_row < TICKS_SHORT ? CALM_NS : CALM_LONG_NS);
    int error = 0;
    while (atomic_load(&world->running) == 0 && !world->is_dirty && !world->is_ending && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&world->changed, &world->lock, &until);
    if (error == ETIMEDOUT || world->is_dirty || world->is_ending)
        return error == ETIMEDOUT && !world->is_dirty;
    pthread_cond_timedwait(&world->changed, &world->lock, &until);
    return false;
}

static void *drive(void *arg)
{
    struct sim_world *world = arg;
    lock(world);
    while (!world->is_ending) {
        if (move(world)) {
            world->is_checked = false;
            wake_waiters(world);
            unlock(world);
            while (atomic_load(&world->wanted) > 0)
                sched_yield();
            lock(world);
        } else if (!world->is_checked) {
            check_all(world);
        } else if (rest(world) && !is_idle(world)) {
            tick(world);
        }
    }
    unlock(world);
    return NULL;
}

/* ---- Groups -------------------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void *arg)
{
    return shoal_sim_now_ns(arg);
}

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static struct group *make_group(struct sim_world *world, struct group *parent, unsigned split, int color, int size,
                                const int *world_rank)
{
    struct group *group = calloc(1, sizeof *group);
    const int local = world->options.size / world->options.hosts;
    must(group && size <= RANKS_MAX, "no memory for a group");
    group->parent = parent;
    group->split = split;
    group->color = color;
    group->size = size;
    int hosts = 0;
    for (int r = 0; r < size; r++) {
        int first = 0;
        group->world_rank[r] = world_rank[r];
        while (world_rank[first] / local != world_rank[r] / local)
            first++;
        group->host[r] = first == r ? (uint16_t)hosts++ : group->host[first]; /* counted from 0 in each group */
    }
    const struct shoal_sim_options options = {.seed = reference_random(&world->random),
                                              .size = size,
                                              .delay_ns_max = world->options.delay_ns_max,
                                              .detect_ns = world->options.delay_ns_max,
                                              .counter_start = world->settings.engine.counter_start,
                                              .busy_per_million = 10000,
                                              .host = hosts > 1 ? group->host : NULL};
    must(shoal_sim_create(&options, &group->sim) == SHOAL_OK, "no memory for a simulation");
    group->next = world->groups;
    world->groups = group;
    return group;
}

static struct shoal_comm *open_comm(struct sim_world *world, struct group *group, int rank, const char *name,
                                    uint32_t timeout_ms)
{
    struct shoal_context *context = &world->contexts[group->world_rank[rank]];
    struct shoal_comm *comm = calloc(1, sizeof *comm);
    must(comm, "no memory for a communicator");
    comm->context = context;
    comm->group = group;
    comm->rank = rank;
    const struct shoal_engine_options options = {.name = name,
                                                 .transport = shoal_sim_transport(group->sim, rank),
                                                 .kernels = shoal_kernels_find("auto"),
                                                 .settings = &world->settings.engine,
                                                 .warn_ms = world->settings.bootstrap.warn_ms,
                                                 .tuning = &world->tuning,
                                                 .log = &context->log,
                                                 .now_ns = now_ns,
                                                 .now_arg = group->sim,
                                                 .timeout_ms = timeout_ms ? timeout_ms : TIMEOUT_MS};
    must(shoal_engine_create(&options, &comm->engine) == SHOAL_OK, "no memory for an engine");
    for (size_t i = 0; i < context->memory_count && world->options.shares_memory; i++)
        must(shoal_sim_share(group->sim, rank, context->memories[i].at, context->memories[i].bytes) == SHOAL_OK, "sharing");
    group->comms[rank] = comm;
    if (context->is_dead)
        shoal_sim_kill(group->sim, rank);
    return comm;
}

/* ---- The world ----------------------------------------------------------------------------------------------------------- */

static void init_lock(struct sim_world *world)
{
    pthread_mutexattr_t mutex;
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_settype(&mutex, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&world->lock, &mutex);
    pthread_mutexattr_destroy(&mutex);
    init_condition(&world->changed);
}

struct sim_world *sim_world_open(const struct sim_world_options *options)
{
    static const char *const overrides[] = {"SHOAL_CHUNK_BYTES=16K", NULL};
    struct sim_world *world = calloc(1, sizeof *world);
    char error[256];
    int all[RANKS_MAX];
    must(world && options->size <= RANKS_MAX && options->size % options->hosts == 0, "such a world cannot be");
    world->options = *options;
    world->random = options->seed;
    init_lock(world);
    must(shoal_settings_load(&world->settings, overrides, error, sizeof error) == SHOAL_OK, error);
    must(shoal_tuning_load(&world->tuning, world->settings.tuning.algorithms, error, sizeof error) == SHOAL_OK, error);
    for (int r = 0; r < options->size; r++) {
        world->contexts[r].world = world;
        world->contexts[r].rank = all[r] = r;
        world->contexts[r].posts_left = -1;
        shoal_log_init(&world->contexts[r].log, &world->settings.log, swallow, NULL);
    }
    struct group *group = make_group(world, NULL, 0, 0, options->size, all);
    for (int r = 0; r < options->size; r++)
        world->comms[r] = open_comm(world, group, r, "world", 0);
    must(pthread_create(&world->driver, NULL, drive, world) == 0, "no thread");
    return world;
}

void sim_world_close(struct sim_world *world)
{
    lock(world);
    world->is_ending = true;
    pthread_cond_signal(&world->changed);
    unlock(world);
    pthread_join(world->driver, NULL);
    for (int r = 0; r < world->options.size; r++)
        shoal_comm_free(world->comms[r]);
    while (world->groups) {
        struct group *group = world->groups;
        const char *breach = shoal_sim_breach(group->sim);
        must(!breach, breach ? breach : "");
        world->groups = group->next;
        shoal_sim_destroy(group->sim);
        free(group);
    }
    for (int r = 0; r < world->options.size; r++) {
        struct shoal_context *context = &world->contexts[r];
        for (size_t i = 0; i < context->memory_count; i++) {
            must(context->memories[i].is_free, "memory of shoal_mem_alloc was not freed");
            free(context->memories[i].at);
        }
        shoal_log_fini(&context->log);
    }
    shoal_tuning_fini(&world->tuning);
    pthread_cond_destroy(&world->changed);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

struct shoal_context *sim_context(struct sim_world *world, int rank)
{
    return &world->contexts[rank];
}

struct shoal_comm *sim_comm(struct sim_world *world, int rank)
{
    return world->comms[rank];
}

void sim_die(struct shoal_context *context)
{
    struct sim_world *world = context->world;
    lock(world);
    context->is_dead = true;
    for (struct group *group = world->groups; group; group = group->next) {
        for (int r = 0; r < group->size; r++) {
            if (group->world_rank[r] == context->rank)
                shoal_sim_kill(group->sim, r);
        }
    }
    wake_waiters(world);
    unlock(world);
}

void sim_fail_posts_after(struct shoal_context *context, long posts)
{
    lock(context->world);
    context->posts_left = posts;
    context->posts = context->failed_posts = 0;
    unlock(context->world);
}

static long read_count(const struct shoal_context *context, const long *count)
{
    lock(context->world);
    const long value = *count;
    unlock(context->world);
    return value;
}

long sim_posts(const struct shoal_context *context)
{
    return read_count(context, &context->posts);
}

long sim_failed_posts(const struct shoal_context *context)
{
    return read_count(context, &context->failed_posts);
}

long sim_idle_waits(const struct shoal_context *context)
{
    return read_count(context, &context->idle_waits);
}

long sim_ticks(const struct sim_world *world)
{
    return read_count(&world->contexts[0], &world->ticks);
}

/* ---- Posts and waits ----------------------------------------------------------------------------------------------------- */

static struct shoal_call call_of(enum shoal_collective_type collective, const void *input, void *output, size_t count,
                                 enum shoal_type type, const struct shoal_options *options)
{
    return (struct shoal_call){.collective = collective,
                               .type = type,
                               .input = input,
                               .output = output,
                               .count = count,
                               .scale = options ? options->scale : 1,
                               .timeout_ms = options ? options->timeout_ms : 0};
}

static bool post_fails(struct shoal_context *context)
{
    context->posts++;
    if (context->posts_left > 0)
        context->posts_left--;
    else if (context->posts_left == 0)
        context->failed_posts++;
    return context->failed_posts > 0;
}

/* Call it with the lock held. */
static struct posted *hand_over(struct shoal_comm *comm, const struct shoal_call *call)
{
    comm->context->world->ticks_in_a_row = 0;
    struct posted *posted = calloc(1, sizeof *posted);
    must(posted, "no memory for a request");
    posted->context = comm->context;
    shoal_engine_post(comm->engine, call, &posted->request);
    comm->context->world->is_dirty = true;
    pthread_cond_signal(&comm->context->world->changed);
    return posted;
}

static enum shoal_status post(struct shoal_comm *comm, const struct shoal_call *call, struct shoal_request **request_out)
{
    struct sim_world *world = comm->context->world;
    enum shoal_status status = SHOAL_OK;
    lock(world);
    if (comm->context->is_dead)
        status = SHOAL_ERR_ABORTED;
    else if (post_fails(comm->context))
        status = SHOAL_ERR_MEMORY;
    else
        *request_out = &hand_over(comm, call)->request;
    unlock(world);
    return status;
}

static enum shoal_status run(struct shoal_comm *comm, const struct shoal_call *call)
{
    struct sim_world *world = comm->context->world;
    struct shoal_request *request = NULL;
    lock(world);
    if (!comm->context->is_dead)
        request = &hand_over(comm, call)->request;
    unlock(world);
    const enum shoal_status status = request ? shoal_request_wait(request, SHOAL_FOREVER) : SHOAL_ERR_ABORTED;
    shoal_request_free(request);
    return status;
}

enum shoal_status shoal_request_wait(struct shoal_request *request, uint32_t timeout_ms)
{
    struct posted *posted = (struct posted *)request;
    struct sim_world *world = posted->context->world;
    const struct timespec until = in_ns(timeout_ms * UINT64_C(1000000));
    lock(world);
    posted->context->idle_waits += is_over(posted);
    if (!is_over(posted))
        wait_until(world, posted, timeout_ms == SHOAL_FOREVER ? NULL : &until);
    const enum shoal_status status = shoal_request_status(request);
    const bool is_dead = posted->context->is_dead;
    unlock(world);
    return status == SHOAL_PENDING && is_dead ? SHOAL_ERR_ABORTED : status;
}

void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg)
{
    struct sim_world *world = ((struct posted *)request)->context->world;
    lock(world);
    const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
    if (is_pending) {
        request->done_fn = fn;
        request->done_arg = arg;
    }
    unlock(world);
    if (!is_pending)
        fn(arg, shoal_request_status(request));
}

void shoal_request_free(struct shoal_request *request)
{
    if (!request)
        return;
    struct sim_world *world = ((struct posted *)request)->context->world;
    lock(world);
    const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
    request->is_detached = is_pending;
    unlock(world);
    if (!is_pending)
        free(request);
}

/* ---- Calls --------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_allreduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, input, output, count, type, options);
    call.op = op;
    return post(comm, &call, request_out);
}

enum shoal_status shoal_allreduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, input, output, count, type, options);
    call.op = op;
    return run(comm, &call);
}

enum shoal_status shoal_reduce_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                            enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                            struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_REDUCE_SCATTER, input, output, count, type, options);
    call.op = op;
    return post(comm, &call, request_out);
}

enum shoal_status shoal_allgather_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    const struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, count, type, options);
    return post(comm, &call, request_out);
}

enum shoal_status shoal_allgather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  const struct shoal_options *options)
{
    const struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, count, type, options);
    return run(comm, &call);
}

/* Gives a call parts of different lengths. */
static void set_parts(const struct shoal_comm *comm, const size_t *sent, const size_t *received, struct shoal_call *call)
{
    const size_t *counts = sent ? sent : received;
    for (int r = 0; r < comm->group->size; r++)
        call->count = counts[r] > call->count ? counts[r] : call->count;
    lock(comm->context->world); /* the library's own allocation */
    call->arrays = &(struct shoal_call_arrays){.sent = sent, .received = received};
    const bool is_laid_out = shoal_call_lay_out(call, comm->rank, comm->group->size);
    unlock(comm->context->world);
    must(is_laid_out, "no memory for the layout of a call");
}

static enum shoal_status post_parts(struct shoal_comm *comm, const struct shoal_call *call, struct shoal_request **request_out)
{
    const enum shoal_status status = post(comm, call, request_out);
    if (status != SHOAL_OK)
        shoal_layout_free(call->layout);
    return status;
}

enum shoal_status shoal_reduce_scatterv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                             enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                             struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_REDUCE_SCATTER, input, output, 0, type, options);
    call.op = op;
    set_parts(comm, counts, NULL, &call);
    return post_parts(comm, &call, request_out);
}

enum shoal_status shoal_allgatherv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                        const size_t *offsets, enum shoal_type type, const struct shoal_options *options,
                                        struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, 0, type, options);
    must(!offsets, "parts of an all-gather follow each other here");
    set_parts(comm, NULL, counts, &call);
    return post_parts(comm, &call, request_out);
}

enum shoal_status shoal_allgatherv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                   const size_t *offsets, enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, 0, type, options);
    must(!offsets, "parts of an all-gather follow each other here");
    set_parts(comm, NULL, counts, &call);
    return run(comm, &call);
}

enum shoal_status shoal_send_post(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer,
                                  int tag, const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_SEND, buffer, NULL, count, type, options);
    call.root = peer;
    call.tag = tag;
    return post(comm, &call, request_out);
}

enum shoal_status shoal_recv_post(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                                  const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_RECV, NULL, buffer, count, type, options);
    call.root = peer;
    call.tag = tag;
    return post(comm, &call, request_out);
}

enum shoal_status shoal_alltoall_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                      enum shoal_type type, const struct shoal_options *options,
                                      struct shoal_request **request_out)
{
    const struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLTOALL, input, output, count, type, options);
    return post(comm, &call, request_out);
}

enum shoal_status shoal_broadcast(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  int root, const struct shoal_options *options)
{
    struct shoal_call call =
        call_of(SHOAL_COLLECTIVE_BROADCAST, comm->rank == root ? input : NULL, output, count, type, options);
    call.root = root;
    return run(comm, &call);
}

/* ---- Communicators ------------------------------------------------------------------------------------------------------- */

struct choice {
    int32_t color, key;
};

/* Lists members by key, then by rank. */
static int list_members(const struct group *parent, const struct choice *choices, int color, int *members)
{
    int count = 0;
    for (int r = 0; r < parent->size; r++) {
        if (choices[r].color != color)
            continue;
        int at = count++;
        for (; at > 0 && choices[members[at - 1]].key > choices[r].key; at--)
            members[at] = members[at - 1];
        members[at] = r;
    }
    for (int i = 0; i < count; i++)
        members[i] = parent->world_rank[members[i]];
    return count;
}

static struct group *find_group(const struct sim_world *world, const struct group *parent, unsigned split, int color)
{
    struct group *group = world->groups;
    while (group && !(group->parent == parent && group->split == split && group->color == color))
        group = group->next;
    return group;
}

/* The first rank to join creates what the others find. */
static void join_group(struct shoal_comm *comm, const struct choice *choices, const struct shoal_comm_options *options,
                       struct shoal_comm **comm_out)
{
    struct sim_world *world = comm->context->world;
    const int color = choices[comm->rank].color;
    int members[RANKS_MAX], rank = 0;
    lock(world);
    struct group *group = find_group(world, comm->group, comm->splits, color);
    if (!group) {
        const int size = list_members(comm->group, choices, color, members);
        group = make_group(world, comm->group, comm->splits, color, size, members);
    }
    while (group->world_rank[rank] != comm->context->rank)
        rank++;
    *comm_out =
        open_comm(world, group, rank, options && options->name ? options->name : "split", options ? options->timeout_ms : 0);
    unlock(world);
}

enum shoal_status shoal_comm_split(struct shoal_comm *comm, int color, int key, const struct shoal_comm_options *options,
                                   struct shoal_comm **comm_out)
{
    const struct choice own = {color, key};
    struct choice choices[RANKS_MAX];
    const struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_SPLIT, .input = &own, .output = choices, .count = sizeof own};
    *comm_out = NULL;
    const enum shoal_status status = run(comm, &call);
    if (status != SHOAL_OK)
        return status;
    comm->splits++;
    if (color >= 0)
        join_group(comm, choices, options, comm_out);
    return SHOAL_OK;
}

void shoal_comm_free(struct shoal_comm *comm)
{
    int rank;
    if (!comm)
        return;
    struct sim_world *world = comm->context->world;
    lock(world);
    comm->group->comms[comm->rank] = NULL;
    shoal_engine_close(comm->engine);
    must(shoal_engine_is_quiet(comm->engine, &rank), "a peer is inside an operand, though one thread moves all");
    shoal_engine_destroy(comm->engine);
    world->is_dirty = true;
    wake_waiters(world);
    pthread_cond_signal(&world->changed);
    unlock(world);
    while (comm->tracks) {
        struct shoal_track *const track = comm->tracks;
        comm->tracks = track->next;
        free(track);
    }
    free(comm);
}

void shoal_comm_fail(struct shoal_comm *comm, const struct shoal_failure *cause)
{
    if (!comm)
        return;
    struct sim_world *world = comm->context->world;
    lock(world);
    if (!comm->context->is_dead)
        comm->engine->ops->abort(comm->engine->transport, cause);
    world->is_dirty = true;
    pthread_cond_signal(&world->changed);
    unlock(world);
}

int shoal_comm_rank(const struct shoal_comm *comm)
{
    return comm->rank;
}

int shoal_comm_size(const struct shoal_comm *comm)
{
    return comm->group->size;
}

enum shoal_status shoal_comm_place(const struct shoal_comm *comm, int rank, struct shoal_place *place_out)
{
    const struct group *group = comm->group;
    place_out->hosts = place_out->local_size = place_out->local_rank = 0;
    for (int r = 0; r < group->size; r++) {
        bool is_first = true;
        for (int earlier = 0; earlier < r; earlier++)
            is_first &= group->host[earlier] != group->host[r];
        if (is_first && group->host[r] == group->host[rank])
            place_out->host = place_out->hosts;
        place_out->hosts += is_first;
        place_out->local_rank += group->host[r] == group->host[rank] && r < rank;
        place_out->local_size += group->host[r] == group->host[rank];
    }
    snprintf(place_out->host_name, sizeof place_out->host_name, "sim-%d", (int)group->host[rank]);
    return SHOAL_OK;
}

enum shoal_status shoal_last_failure(const struct shoal_context *context, const struct shoal_comm *comm,
                                     struct shoal_failure *failure_out)
{
    struct sim_world *world = context->world;
    if (!comm) {
        failure_out->status =
            shoal_log_last_error((struct shoal_log *)(uintptr_t)&context->log, failure_out->text, sizeof failure_out->text);
        return failure_out->status == SHOAL_OK ? SHOAL_PENDING : SHOAL_OK;
    }
    lock(world);
    const struct shoal_failure *found =
        context->is_dead ? shoal_engine_failure(comm->engine) : shoal_engine_look_for_failure(comm->engine);
    if (found)
        *failure_out = *found;
    wake_waiters(world);
    unlock(world);
    return found ? SHOAL_OK : SHOAL_PENDING;
}

enum shoal_status shoal_comm_traffic(struct shoal_comm *comm, struct shoal_traffic *traffic_out)
{
    (void)comm, (void)traffic_out; /* a simulation counts no traffic */
    return SHOAL_OK;
}

enum shoal_status shoal_comm_publish(struct shoal_comm *comm, const struct shoal_training *training)
{
    (void)comm, (void)training; /* nobody watches a simulation */
    return SHOAL_OK;
}

enum shoal_status shoal_track_create(struct shoal_comm *comm, const char *name, struct shoal_track **track_out)
{
    (void)name;
    *track_out = calloc(1, sizeof **track_out);
    if (!*track_out)
        return SHOAL_ERR_MEMORY;
    (*track_out)->next = comm->tracks;
    comm->tracks = *track_out;
    return SHOAL_OK;
}

void shoal_track_begin(struct shoal_track *track, const struct shoal_span *span)
{
    (void)track, (void)span;
}

void shoal_track_wait(struct shoal_track *track, int rank, int stage)
{
    (void)track, (void)rank, (void)stage;
}

void shoal_track_start(struct shoal_track *track)
{
    (void)track;
}

void shoal_track_end(struct shoal_track *track, enum shoal_status status)
{
    (void)track, (void)status;
}

enum shoal_status shoal_report(struct shoal_context *context, enum shoal_status status, const char *module, const char *text)
{
    if (status == SHOAL_OK)
        return status;
    return module ? shoal_log_fail(&context->log, status, module, "%s", text) : shoal_log_repeat(&context->log, status, text);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

int shoal_context_threads(const struct shoal_context *context)
{
    (void)context;
    return 3;
}

/* In another order than one thread would take. */
enum shoal_status shoal_context_run(struct shoal_context *context, shoal_part_fn fn, void *arg, size_t parts)
{
    (void)context;
    for (size_t part = parts; part > 0; part--)
        fn(arg, part - 1);
    return SHOAL_OK;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* Memory is freed with the world: until then a peer that is behind may read it, like a mapping. */
enum shoal_status shoal_mem_alloc(struct shoal_context *context, size_t bytes, void **memory_out)
{
    struct sim_world *world = context->world;
    void *memory = allocation_fails() ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!memory)
        return SHOAL_ERR_MEMORY;
    lock(world);
    must(context->memory_count < MEMORIES_MAX, "too many allocations");
    context->memories[context->memory_count++] = (struct memory){memory, bytes, false};
    for (struct group *group = world->groups; group && world->options.shares_memory; group = group->next) {
        for (int r = 0; r < group->size; r++) {
            if (group->comms[r] && group->world_rank[r] == context->rank)
                must(shoal_sim_share(group->sim, r, memory, bytes) == SHOAL_OK, "sharing");
        }
    }
    unlock(world);
    *memory_out = memory;
    return SHOAL_OK;
}

enum shoal_status shoal_mem_free(struct shoal_context *context, void *memory)
{
    lock(context->world);
    for (size_t i = 0; i < context->memory_count; i++)
        context->memories[i].is_free |= context->memories[i].at == memory;
    unlock(context->world);
    return SHOAL_OK;
}

/* The simulation has no devices. */
enum shoal_status shoal_packer_open(struct shoal_context *context, void *stream, struct shoal_gpu_packer **packer_out)
{
    (void)context, (void)stream, (void)packer_out;
    return SHOAL_ERR_UNSUPPORTED;
}

enum shoal_status shoal_packer_check(const struct shoal_comm *comm, const struct shoal_gpu_packer *packer, const void *memory,
                                     char *wrong, size_t wrong_bytes)
{
    (void)comm, (void)packer, (void)memory, (void)wrong, (void)wrong_bytes;
    return SHOAL_OK;
}

enum shoal_status shoal_request_test(struct shoal_request *request)
{
    return shoal_request_wait(request, 0);
}
