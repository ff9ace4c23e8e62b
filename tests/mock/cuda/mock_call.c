/* The checks before each call: errors that a test requested, threads that may not call, contexts that have failed. Also the
 * faults that are reported at the end. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mock_driver.h"

static struct {
    const char *watched; /* the entry point whose calls are counted, and whose call number `nth` fails */
    size_t count;
    size_t nth; /* 0: none */
    shoal_cu_result result;
    unsigned faults;
    char last[256];
} calls;

static _Thread_local unsigned forbidden;

/* ---- Faults -------------------------------------------------------------------------------------------------------------- */

void mock_fault(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(calls.last, sizeof calls.last, format, args);
    va_end(args);
    calls.faults++;
    fprintf(stderr, "mock_cuda: %s\n", calls.last);
}

MOCK_API unsigned mock_cuda_faults(char *text, size_t bytes)
{
    pthread_mutex_lock(&mock.lock);
    const unsigned faults = calls.faults;
    snprintf(text, bytes, "%s", calls.last);
    calls.faults = 0;
    calls.last[0] = 0;
    pthread_mutex_unlock(&mock.lock);
    return faults;
}

/* Primary contexts remain until the end in every program that uses CUDA's runtime. */
static void find_leaks(void)
{
    static const char *const kinds[] = {"streams", "events", "allocations", "registrations", "modules", "operations"};
    for (size_t i = 0; i < SHOAL_COUNT_OF(kinds); i++) {
        const size_t left = mock_cuda_count(kinds[i]);
        if (left)
            mock_fault("%zu %s are left at the end", left, kinds[i]);
    }
}

/* Calls _exit: everything else that ends with the process has ended, or no longer matters. */
__attribute__((destructor)) static void end_calls(void)
{
    if (mock.modes.leaks && !mock.is_forked)
        find_leaks();
    if (calls.faults == 0)
        return;
    fprintf(stderr, "mock_cuda: %u faults, the last one: %s\n", calls.faults, calls.last);
    fflush(NULL);
    _exit(MOCK_CUDA_EXIT_CODE);
}

/* ---- Threads that may not call ------------------------------------------------------------------------------------------- */

MOCK_API void mock_cuda_forbid(bool is_forbidden)
{
    if (is_forbidden)
        forbidden++;
    else if (forbidden)
        forbidden--;
}

void mock_forbid_callbacks(void)
{
    forbidden = 1;
}

/* ---- Entering ------------------------------------------------------------------------------------------------------------ */

MOCK_API void mock_cuda_fail(const char *name, int nth, int result)
{
    pthread_mutex_lock(&mock.lock);
    calls.watched = name;
    calls.count = 0;
    calls.nth = (size_t)nth;
    calls.result = result;
    pthread_mutex_unlock(&mock.lock);
}

size_t mock_count_calls(void)
{
    return calls.count;
}

void mock_calls_reset(void)
{
    memset(&calls, 0, sizeof calls);
}

static shoal_cu_result check_thread(const char *name)
{
    if (mock.is_forked)
        return SHOAL_CU_NOT_INITIALIZED;
    if (!forbidden)
        return SHOAL_CU_SUCCESS;
    mock_fault("%s was called by a thread that drives the engine or runs a callback", name);
    return SHOAL_CU_NOT_PERMITTED;
}

static shoal_cu_result check_context(struct mock_call *call)
{
    bool is_destroyed = false;
    call->context = mock_current(&is_destroyed);
    if (!call->context)
        return is_destroyed ? SHOAL_CU_CONTEXT_IS_DESTROYED : SHOAL_CU_INVALID_CONTEXT;
    while (call->context->is_held && !pthread_equal(call->context->holder, pthread_self())) {
        pthread_cond_wait(&mock.changed, &mock.lock);
        call->context = mock_current(&is_destroyed);
        if (!call->context)
            return SHOAL_CU_CONTEXT_IS_DESTROYED;
    }
    return call->context->sticky;
}

static shoal_cu_result check_all(struct mock_call *call, const char *name, unsigned needs)
{
    if (calls.watched && strcmp(name, calls.watched) == 0 && ++calls.count == calls.nth)
        return calls.result;
    MOCK_TRY(check_thread(name));
    if (!(needs & MOCK_ANYTIME) && !mock.is_started)
        return SHOAL_CU_NOT_INITIALIZED;
    if (needs & MOCK_CURRENT)
        MOCK_TRY(check_context(call));
    if ((needs & MOCK_UNSAFE) && mock_capture_forbids())
        return SHOAL_CU_STREAM_CAPTURE_UNSUPPORTED;
    return SHOAL_CU_SUCCESS;
}

struct mock_call mock_enter(const char *name, unsigned needs)
{
    struct mock_call call = {.is_locked = true};
    pthread_mutex_lock(&mock.lock);
    call.result = check_all(&call, name, needs);
    return call;
}

void mock_leave(const struct mock_call *call)
{
    if (call->is_locked)
        pthread_mutex_unlock(&mock.lock);
}
