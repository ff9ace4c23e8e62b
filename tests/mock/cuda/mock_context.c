/* Contexts, each thread's stack of them, and access to the memory of other devices. */
#include <stdlib.h>
#include <string.h>

#include "mock_driver.h"

static struct mock_context *primary[MOCK_DEVICES_MAX]; /* NULL: not retained */
static struct mock_context *dead;                      /* destroyed; a thread may still wait with one */

/* Handles instead of pointers, because a pushed context may be destroyed. */
static _Thread_local struct {
    uint64_t epoch;
    size_t depth;
    shoal_cu_context handles[MOCK_STACK_MAX];
} stack;

static struct mock_context *find_context(shoal_cu_context handle)
{
    return mock_handle_find(MOCK_CONTEXT, (uintptr_t)handle);
}

int mock_device_number(shoal_cu_device device)
{
    const int number = device - MOCK_FIRST_DEVICE;
    return number >= 0 && number < mock.modes.devices ? number : -1;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static struct mock_context *make_context(int device, bool is_primary)
{
    struct mock_context *context = mock_allocate_zeroed(sizeof *context);
    context->handle = (shoal_cu_context)mock_handle_make(MOCK_CONTEXT, context);
    context->device = device;
    context->is_primary = is_primary;
    context->peers = UINT64_C(1) << (device % 64);
    return context;
}

/* Ends everything in the context; threads whose current context it is find out at their next call. */
static void end_context(struct mock_context *context)
{
    mock_break_context(context, SHOAL_CU_CONTEXT_IS_DESTROYED);
    mock_streams_forget(context);
    mock_events_forget(context);
    mock_modules_forget(context);
    mock_memory_forget(context);
    if (context->is_primary)
        primary[context->device] = NULL;
    mock_handle_drop((uintptr_t)context->handle);
    context->next_dead = dead;
    dead = context;
    pthread_cond_broadcast(&mock.changed);
}

void mock_contexts_reset(void)
{
    size_t at = 0;
    struct mock_context *context;
    while ((context = mock_handle_next(MOCK_CONTEXT, &at)))
        end_context(context);
    mock_streams_forget(NULL);
    while ((context = dead)) {
        dead = context->next_dead;
        free(context);
    }
}

shoal_cu_result mock_primary_retain(shoal_cu_context *context, shoal_cu_device device)
{
    ENTER("cuDevicePrimaryCtxRetain", 0);
    const int number = mock_device_number(device);
    if (number < 0)
        return SHOAL_CU_INVALID_DEVICE;
    if (!primary[number])
        primary[number] = make_context(number, true);
    primary[number]->retained++;
    *context = primary[number]->handle;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_primary_release(shoal_cu_device device)
{
    ENTER("cuDevicePrimaryCtxRelease", 0);
    const int number = mock_device_number(device);
    if (number < 0)
        return SHOAL_CU_INVALID_DEVICE;
    if (!primary[number])
        return SHOAL_CU_INVALID_CONTEXT;
    if (--primary[number]->retained == 0)
        end_context(primary[number]);
    return SHOAL_CU_SUCCESS;
}

static void push(shoal_cu_context handle)
{
    stack.handles[stack.depth++] = handle;
}

/* Contexts that were pushed before a reset are no longer there. */
static void refresh_stack(void)
{
    if (stack.epoch != mock.epoch)
        stack.depth = 0;
    stack.epoch = mock.epoch;
}

shoal_cu_result mock_context_create(shoal_cu_context *context, unsigned flags, shoal_cu_device device)
{
    ENTER("cuCtxCreate", 0);
    const int number = mock_device_number(device);
    refresh_stack();
    if (number < 0)
        return SHOAL_CU_INVALID_DEVICE;
    if (flags || stack.depth == MOCK_STACK_MAX)
        return SHOAL_CU_INVALID_VALUE;
    *context = make_context(number, false)->handle;
    push(*context);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_context_destroy(shoal_cu_context handle)
{
    ENTER("cuCtxDestroy", 0);
    struct mock_context *context = find_context(handle);
    refresh_stack();
    if (!context || context->is_primary)
        return SHOAL_CU_INVALID_CONTEXT;
    if (stack.depth && stack.handles[stack.depth - 1] == handle)
        stack.depth--;
    end_context(context);
    return SHOAL_CU_SUCCESS;
}

/* ---- The current context ------------------------------------------------------------------------------------------------- */

struct mock_context *mock_current(bool *is_destroyed_out)
{
    refresh_stack();
    const bool has_any = stack.depth && stack.handles[stack.depth - 1];
    struct mock_context *context = has_any ? find_context(stack.handles[stack.depth - 1]) : NULL;
    *is_destroyed_out = has_any && !context;
    return context;
}

size_t mock_stack_depth(void)
{
    refresh_stack();
    return stack.depth;
}

shoal_cu_result mock_context_current(shoal_cu_context *context)
{
    ENTER("cuCtxGetCurrent", 0);
    refresh_stack();
    *context = stack.depth ? stack.handles[stack.depth - 1] : NULL;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_context_push(shoal_cu_context context)
{
    ENTER("cuCtxPushCurrent", 0);
    refresh_stack();
    if (!find_context(context))
        return SHOAL_CU_INVALID_CONTEXT;
    if (stack.depth == MOCK_STACK_MAX) {
        mock_fault("a thread has pushed %d contexts and popped none", MOCK_STACK_MAX);
        return SHOAL_CU_INVALID_VALUE;
    }
    push(context);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_context_pop(shoal_cu_context *context)
{
    ENTER("cuCtxPopCurrent", 0);
    refresh_stack();
    if (stack.depth == 0)
        return SHOAL_CU_INVALID_CONTEXT;
    stack.depth--;
    if (context)
        *context = stack.handles[stack.depth];
    return SHOAL_CU_SUCCESS;
}

/* NULL: no context is current. */
shoal_cu_result mock_context_set(shoal_cu_context context)
{
    ENTER("cuCtxSetCurrent", 0);
    refresh_stack();
    if (context && !find_context(context))
        return SHOAL_CU_INVALID_CONTEXT;
    if (stack.depth)
        stack.depth--;
    if (context)
        push(context);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_context_device(shoal_cu_device *device)
{
    ENTER("cuCtxGetDevice", 0);
    bool is_destroyed;
    const struct mock_context *context = mock_current(&is_destroyed);
    if (!context)
        return is_destroyed ? SHOAL_CU_CONTEXT_IS_DESTROYED : SHOAL_CU_INVALID_CONTEXT;
    *device = MOCK_FIRST_DEVICE + context->device;
    return SHOAL_CU_SUCCESS;
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------- */

bool mock_hold(struct mock_context *context)
{
    if (context->is_held)
        return false;
    context->is_held = true;
    context->holder = pthread_self();
    return true;
}

void mock_let_go(struct mock_context *context, bool is_ours)
{
    if (!is_ours)
        return;
    context->is_held = false;
    pthread_cond_broadcast(&mock.changed);
}

shoal_cu_result mock_context_synchronize(void)
{
    ENTER("cuCtxSynchronize", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_stream *stream = NULL;
    while ((stream = mock_stream_next(stream))) {
        if (stream->context == call.context && stream->pending) {
            pthread_cond_wait(&mock.changed, &mock.lock);
            stream = NULL; /* from the beginning, because the stream may be gone */
        }
        if (call.context->sticky)
            break;
    }
    return call.context->sticky;
}

/* ---- Other devices' memory ----------------------------------------------------------------------------------------------- */

shoal_cu_result mock_peer_can_access(int *can, shoal_cu_device device, shoal_cu_device peer)
{
    ENTER("cuDeviceCanAccessPeer", 0);
    if (mock_device_number(device) < 0 || mock_device_number(peer) < 0)
        return SHOAL_CU_INVALID_DEVICE;
    *can = mock.modes.peers && device != peer;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_peer_attribute(int *value, int attribute, shoal_cu_device device, shoal_cu_device peer)
{
    ENTER("cuDeviceGetP2PAttribute", 0);
    const int one = mock_device_number(device), other = mock_device_number(peer), joined = mock.modes.nvlink;
    if (one < 0 || other < 0 || one == other)
        return SHOAL_CU_INVALID_DEVICE;
    *value = attribute == SHOAL_CU_PEER_NATIVE_ATOMICS && mock.modes.peers && joined && one / joined == other / joined;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_peer_enable(shoal_cu_context peer, unsigned flags)
{
    ENTER("cuCtxEnablePeerAccess", MOCK_CURRENT);
    const struct mock_context *other = find_context(peer);
    if (!other)
        return SHOAL_CU_INVALID_CONTEXT;
    if (flags || other == call.context)
        return SHOAL_CU_INVALID_VALUE;
    if (!mock.modes.peers || other->device == call.context->device)
        return SHOAL_CU_PEER_ACCESS_UNSUPPORTED;
    const uint64_t bit = UINT64_C(1) << (other->device % 64);
    if (call.context->peers & bit)
        return SHOAL_CU_PEER_ACCESS_ALREADY_ENABLED;
    call.context->peers |= bit;
    return SHOAL_CU_SUCCESS;
}
