/* The communicators of operations, and their failures. */
#include "world.h"

#include <pthread.h>
#include <stdio.h>

static struct world worlds[WORLD_MAX];
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER; /* prefers readers: a thread that is in a world may enter one */

bool shoal_tensorflow_set_world(int number, struct shoal_context *context, struct shoal_comm *comm, uint32_t timeout_ms)
{
    if (number < 0 || number >= WORLD_MAX)
        return false;
    pthread_rwlock_wrlock(&lock);
    worlds[number] = (struct world){comm ? context : NULL, comm, shoal_comm_rank(comm), shoal_comm_size(comm), timeout_ms};
    pthread_rwlock_unlock(&lock);
    return true;
}

const struct world *world_enter(int64_t number)
{
    if (number < 0 || number >= WORLD_MAX)
        return NULL;
    pthread_rwlock_rdlock(&lock);
    if (worlds[number].comm)
        return &worlds[number];
    pthread_rwlock_unlock(&lock);
    return NULL;
}

void world_leave(void)
{
    pthread_rwlock_unlock(&lock);
}

int world_code(enum shoal_status status)
{
    switch (status) {
    case SHOAL_OK:
        return TF_OK;
    case SHOAL_ERR_ARGUMENT:
        return TF_INVALID_ARGUMENT;
    case SHOAL_ERR_MEMORY:
        return TF_RESOURCE_EXHAUSTED;
    case SHOAL_ERR_UNSUPPORTED:
        return TF_UNIMPLEMENTED;
    case SHOAL_ERR_TIMEOUT:
        return TF_DEADLINE_EXCEEDED;
    case SHOAL_ERR_PEER_LOST:
    case SHOAL_ERR_ABORTED:
        return TF_ABORTED;
    case SHOAL_ERR_MISMATCH:
    case SHOAL_ERR_STATE:
        return TF_FAILED_PRECONDITION;
    case SHOAL_ERR_AUTH:
        return TF_PERMISSION_DENIED;
    default:
        return TF_INTERNAL;
    }
}

void world_failure_text(int64_t number, enum shoal_status status, char *text, size_t bytes)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const struct world *world = world_enter(number);
    const bool is_known = world && shoal_last_failure(world->context, world->comm, &failure) == SHOAL_OK && failure.text[0];
    const bool is_told = is_known || (world && shoal_last_failure(world->context, NULL, &failure) == SHOAL_OK &&
                                      failure.text[0] && failure.status == status);
    snprintf(text, bytes, "%s", is_told ? failure.text : shoal_status_text(status));
    if (world)
        world_leave();
}
