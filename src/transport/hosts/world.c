#include "transport/hosts/world.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* Of communicators that this rank has not made yet. */
#define EARLY_MAX 64
#define CLOSED_MAX 256

enum notice_kind { FAILURE = 1, LEFT };

struct notice {
    uint64_t comm;
    uint64_t completed;
    uint32_t kind;
    int32_t rank;

    struct shoal_failure failure;
};

_Static_assert(sizeof(struct notice) <= SHOAL_CONTROL_NOTICE_MAX, "a failure is one notice");

struct shoal_world {
    struct shoal_log *log;
    struct shoal_control *control;
    pthread_mutex_t lock; /* of the members; held while their functions are called */
    struct shoal_world_member *members;
    struct notice early[EARLY_MAX];
    unsigned early_count;        /* ever */
    uint64_t closed[CLOSED_MAX]; /* communicators that this rank has left */
    unsigned closed_count;       /* ever */
    _Atomic uint64_t lost_ns[];  /* [size] */
};

/* ---- On the control thread ----------------------------------------------------------------------------------------------- */

static void hand_over(const struct shoal_world_member *member, const struct notice *notice)
{
    if (notice->kind == FAILURE)
        member->take(member->arg, &notice->failure);
    else
        member->left(member->arg, notice->rank, notice->completed);
}

static bool was_closed(const struct shoal_world *world, uint64_t comm)
{
    for (unsigned i = 0; i < CLOSED_MAX; i++) {
        if (world->closed[i] == comm)
            return true;
    }
    return false;
}

static void on_notice(void *arg, int from, const void *data, size_t bytes)
{
    struct shoal_world *world = arg;
    struct notice notice;
    (void)from;
    if (bytes != sizeof notice)
        return;
    memcpy(&notice, data, sizeof notice);
    notice.failure.text[sizeof notice.failure.text - 1] = notice.failure.host[sizeof notice.failure.host - 1] =
        notice.failure.operation[sizeof notice.failure.operation - 1] = 0;
    pthread_mutex_lock(&world->lock);
    struct shoal_world_member *member = world->members;
    while (member && member->comm != notice.comm)
        member = member->next;
    if (member)
        hand_over(member, &notice);
    else if (!was_closed(world, notice.comm))
        world->early[world->early_count++ % EARLY_MAX] = notice;
    pthread_mutex_unlock(&world->lock);
}

static void on_lost(void *arg, int rank)
{
    struct shoal_world *world = arg;
    char how[160];
    atomic_store_explicit(&world->lost_ns[rank], shoal_clock_ns(), memory_order_release);
    shoal_control_describe(world->control, rank, how, sizeof how);
    shoal_log_line(world->log, SHOAL_LOG_INFO, "hosts", "rank %d of the world: %s", rank, how);
}

static void tell_failure(struct shoal_world *world, struct shoal_world_member *member)
{
    struct notice notice = {.kind = FAILURE, .comm = member->comm};
    if (!atomic_load_explicit(&member->must_tell, memory_order_acquire) || !member->give(member->arg, &notice.failure))
        return;
    atomic_store_explicit(&member->must_tell, false, memory_order_relaxed);
    (void)shoal_control_publish(world->control, &notice, sizeof notice);
}

static void on_woken(void *arg)
{
    struct shoal_world *world = arg;
    pthread_mutex_lock(&world->lock);
    for (struct shoal_world_member *member = world->members; member; member = member->next)
        tell_failure(world, member);
    pthread_mutex_unlock(&world->lock);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_world_open(struct shoal_bootstrap *bootstrap, const struct shoal_world_options *options,
                                   struct shoal_world **world_out)
{
    struct shoal_world *world = calloc(1, sizeof *world + (size_t)bootstrap->size * sizeof world->lost_ns[0]);
    if (!world)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a world");
    world->log = options->log;
    pthread_mutex_init(&world->lock, NULL);
    struct shoal_control_options control = {.log = options->log,
                                            .address = options->address,
                                            .address_bytes = options->address_bytes,
                                            .timeout_ms = options->timeout_ms,
                                            .handler = {world, on_notice, on_lost, on_woken}};
    (void)shoal_settings_parse_ports(options->settings->ports, &control.port_low, &control.port_high);
    const enum shoal_status status = shoal_control_open(bootstrap, &control, &world->control);
    if (status != SHOAL_OK) {
        shoal_world_close(world);
        return status;
    }
    *world_out = world;
    return SHOAL_OK;
}

void shoal_world_close(struct shoal_world *world)
{
    if (!world)
        return;
    if (world->control)
        shoal_control_close(world->control, true);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

uint64_t shoal_world_lost_ns(struct shoal_world *world, int rank)
{
    return atomic_load_explicit(&world->lost_ns[rank], memory_order_acquire);
}

struct shoal_control *shoal_world_control(struct shoal_world *world)
{
    return world->control;
}

/* ---- Members ------------------------------------------------------------------------------------------------------------- */

void shoal_world_join(struct shoal_world *world, struct shoal_world_member *member)
{
    pthread_mutex_lock(&world->lock);
    const unsigned kept = world->early_count < EARLY_MAX ? world->early_count : EARLY_MAX;
    member->next = world->members;
    world->members = member;
    for (unsigned i = 0; i < kept; i++) {
        if (world->early[i].comm == member->comm)
            hand_over(member, &world->early[i]);
    }
    pthread_mutex_unlock(&world->lock);
}

void shoal_world_leave(struct shoal_world *world, struct shoal_world_member *member)
{
    pthread_mutex_lock(&world->lock);
    struct shoal_world_member **link = &world->members;
    while (*link && *link != member)
        link = &(*link)->next;
    if (*link)
        *link = member->next;
    world->closed[world->closed_count++ % CLOSED_MAX] = member->comm;
    tell_failure(world, member); /* the control thread may not have come to it */
    pthread_mutex_unlock(&world->lock);
}

void shoal_world_tell(struct shoal_world *world, struct shoal_world_member *member)
{
    /* release: the failure is published before; pairs with the acquire in on_woken. */
    atomic_store_explicit(&member->must_tell, true, memory_order_release);
    shoal_control_wake(world->control);
}

void shoal_world_tell_left(struct shoal_world *world, uint64_t comm, int rank, uint64_t completed)
{
    const struct notice notice = {.comm = comm, .completed = completed, .kind = LEFT, .rank = rank};
    (void)shoal_control_publish(world->control, &notice, sizeof notice);
}
