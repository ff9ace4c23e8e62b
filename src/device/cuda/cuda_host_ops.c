#include "device/cuda/cuda_host_ops.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "base/assert.h"

#define YIELDS_MAX 100u
#define BACKOFF_NS 50000

enum host_call_state { CALL_TAKEN, CALL_RUNNING, CALL_OVER };

struct shoal_cuda_host_call {
    struct shoal_cuda_host_call *next;
    atomic_int state;
    unsigned count;
    struct shoal_cuda_op ops[SHOAL_CUDA_OPS_MAX];
};

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* acquire: what the engine has read or written happens before. */
static bool host_op_is_due(const struct shoal_cuda_op *op)
{
    const uint64_t is = atomic_load_explicit(&op->counter->value, memory_order_acquire);
    return (int64_t)(is - op->value) >= 0;
}

/* Returns at the engine's release, or when the ring is released for good. */
static void host_op_wait(const struct shoal_cuda_op *op)
{
    const struct timespec backoff = {0, BACKOFF_NS};
    for (unsigned turns = 0; !host_op_is_due(op); turns++) {
        if (turns < YIELDS_MAX)
            sched_yield();
        else
            nanosleep(&backoff, NULL);
    }
}

void shoal_cuda_host_run(void *arg)
{
    struct shoal_cuda_host_call *call = arg;
    atomic_store_explicit(&call->state, CALL_RUNNING, memory_order_relaxed);
    for (unsigned i = 0; i < call->count; i++) {
        const struct shoal_cuda_op *op = &call->ops[i];
        if (op->is_wait)
            host_op_wait(op);
        else /* release: what the stream has copied happens before */
            atomic_store_explicit(&op->counter->value, op->value, memory_order_release);
    }
    atomic_store_explicit(&call->state, CALL_OVER, memory_order_release); /* the poster owns the call again */
}

/* ---- Allocation ---------------------------------------------------------------------------------------------------------- */

/* acquire: pairs with the end of shoal_cuda_host_run(). */
static int state_of(const struct shoal_cuda_host_call *call)
{
    return atomic_load_explicit(&call->state, memory_order_acquire);
}

/* Reuses the oldest call if it is over; otherwise allocates a new one. */
static struct shoal_cuda_host_call *reuse_or_make(struct shoal_cuda_host_calls *calls)
{
    struct shoal_cuda_host_call *oldest = calls->oldest;
    if (!oldest || state_of(oldest) != CALL_OVER)
        return malloc(sizeof *oldest);
    calls->oldest = oldest->next;
    if (!calls->oldest)
        calls->newest = NULL;
    return oldest;
}

struct shoal_cuda_host_call *shoal_cuda_host_take(struct shoal_cuda_host_calls *calls, const struct shoal_cuda_op *ops,
                                                  unsigned count)
{
    SHOAL_ASSERT(count <= SHOAL_CUDA_OPS_MAX);
    struct shoal_cuda_host_call *call = reuse_or_make(calls);
    if (!call)
        return NULL;
    call->next = NULL;
    atomic_init(&call->state, CALL_TAKEN);
    call->count = count;
    for (unsigned i = 0; i < count; i++)
        call->ops[i] = ops[i];
    *(calls->newest ? &calls->newest->next : &calls->oldest) = call;
    calls->newest = call;
    return call;
}

void shoal_cuda_host_drop(struct shoal_cuda_host_call *call)
{
    atomic_store_explicit(&call->state, CALL_OVER, memory_order_relaxed); /* relaxed: no other thread has seen it */
}

bool shoal_cuda_host_is_running(const struct shoal_cuda_host_calls *calls)
{
    const struct shoal_cuda_host_call *call = calls->oldest;
    while (call && state_of(call) != CALL_RUNNING)
        call = call->next;
    return call != NULL;
}

void shoal_cuda_host_free(struct shoal_cuda_host_calls *calls)
{
    struct shoal_cuda_host_call *call = calls->oldest;
    while (call) {
        struct shoal_cuda_host_call *next = call->next;
        free(call);
        call = next;
    }
    *calls = (struct shoal_cuda_host_calls){NULL, NULL};
}
