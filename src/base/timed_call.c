#include "base/timed_call.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

struct shoal_timed_call {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    void (*work)(void *data);
    size_t bytes;
    bool is_done, is_given_up; /* the side that comes second frees it */
    _Alignas(64) unsigned char data[];
};

static void timed_call_destroy(struct shoal_timed_call *call)
{
    pthread_cond_destroy(&call->ended);
    pthread_mutex_destroy(&call->lock);
    free(call);
}

static void *thread_main(void *arg)
{
    struct shoal_timed_call *call = arg;
    call->work(call->data);
    pthread_mutex_lock(&call->lock);
    const bool is_given_up = call->is_given_up;
    call->is_done = true;
    pthread_cond_signal(&call->ended);
    pthread_mutex_unlock(&call->lock);
    if (is_given_up)
        timed_call_destroy(call);
    return NULL;
}

static struct shoal_timed_call *timed_call_make(void (*work)(void *data), const void *data, size_t bytes)
{
    pthread_condattr_t attributes;
    struct shoal_timed_call *call = aligned_alloc(64, shoal_round_up(sizeof *call + bytes, 64));
    if (!call)
        return NULL;
    memset(call, 0, sizeof *call);
    call->work = work;
    call->bytes = bytes;
    memcpy(call->data, data, bytes);
    pthread_mutex_init(&call->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&call->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    return call;
}

/* Starts the thread with all signals blocked, because the program's signals are for its own threads. */
static bool timed_call_start(struct shoal_timed_call *call)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool has_started = pthread_create(&thread, NULL, thread_main, call) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (has_started)
        pthread_detach(thread);
    return has_started;
}

struct shoal_timed_call *shoal_timed_call_begin(void (*work)(void *data), const void *data, size_t bytes)
{
    struct shoal_timed_call *call = timed_call_make(work, data, bytes);
    if (!call || timed_call_start(call))
        return call;
    timed_call_destroy(call);
    return NULL;
}

bool shoal_timed_call_wait(struct shoal_timed_call *call, uint32_t timeout_ms, void *data)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    const struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / SHOAL_NS_PER_S),
                                      .tv_nsec = (long)(deadline_ns % SHOAL_NS_PER_S)};
    int error = 0;
    pthread_mutex_lock(&call->lock);
    while (!call->is_done && error == 0)
        error = pthread_cond_timedwait(&call->ended, &call->lock, &deadline);
    const bool is_done = call->is_done;
    pthread_mutex_unlock(&call->lock);
    if (is_done)
        memcpy(data, call->data, call->bytes);
    return is_done;
}

void shoal_timed_call_close(struct shoal_timed_call *call)
{
    if (!call)
        return;
    pthread_mutex_lock(&call->lock);
    const bool is_done = call->is_done;
    call->is_given_up = true;
    pthread_mutex_unlock(&call->lock);
    if (is_done)
        timed_call_destroy(call);
}

enum shoal_status shoal_timed_call(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms)
{
    struct shoal_timed_call *call = shoal_timed_call_begin(work, data, bytes);
    if (!call)
        return SHOAL_ERR_MEMORY;
    const bool is_done = shoal_timed_call_wait(call, timeout_ms, data);
    shoal_timed_call_close(call);
    return is_done ? SHOAL_OK : SHOAL_ERR_TIMEOUT;
}
