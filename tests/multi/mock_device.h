/* The stand-in driver of tests/mock/cuda as the device of a world: memory, streams and copies for operations.h. One per
 * program; include it after multi_world.h. */
#ifndef SHOAL_TESTS_MOCK_DEVICE_H
#define SHOAL_TESTS_MOCK_DEVICE_H

#include <sys/wait.h>
#include <unistd.h>

#include "mock_client.h"

#define MOCK_DEVICE_STREAMS 64

static shoal_cu_context mock_device_context;
static shoal_cu_stream mock_device_streams[MOCK_DEVICE_STREAMS];
static unsigned mock_device_next;
static int mock_device_ordinal; /* of the device that mock_device_start uses */
static int mock_device_turn;    /* number of real devices that ranks use in turn; 0: as many as are wanted */

/* Returns true if the environment names a real driver instead of the stand-in (make test-gpu). Its modes cannot be set, nor
 * its objects counted. */
static inline bool mock_device_is_real(void)
{
    return getenv("SHOAL_TEST_CUDA") != NULL;
}

static inline void mock_device_must(shoal_cu_result result, const char *call)
{
    if (result == SHOAL_CU_SUCCESS)
        return;
    fprintf(stderr, "mock_device: %s answered %d\n", call, (int)result);
    abort();
}
#define MOCK_DEVICE(call) mock_device_must(cu.call, #call)

static inline char *mock_device_allocate(size_t bytes)
{
    shoal_cu_address at;
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(allocate(&at, bytes ? bytes : 1));
    return (char *)(uintptr_t)at;
}

/* Allocates on device 1, in its primary context. */
static inline char *mock_device_allocate_on_other(size_t bytes)
{
    shoal_cu_context other;
    shoal_cu_device device;
    shoal_cu_address at;
    MOCK_DEVICE(device_get(&device, 1));
    MOCK_DEVICE(primary_retain(&other, device));
    MOCK_DEVICE(context_set(other));
    MOCK_DEVICE(allocate(&at, bytes));
    MOCK_DEVICE(context_set(mock_device_context));
    return (char *)(uintptr_t)at;
}

static inline void mock_device_release(char *there)
{
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(release((shoal_cu_address)(uintptr_t)there));
}

static inline void *mock_device_take_stream(void)
{
    return (void *)mock_device_streams[__atomic_fetch_add(&mock_device_next, 1, __ATOMIC_RELAXED) % MOCK_DEVICE_STREAMS];
}

static inline void mock_device_upload(char *there, const char *here, size_t bytes, void *stream)
{
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(copy_to_device((shoal_cu_address)(uintptr_t)there, here, bytes, (shoal_cu_stream)stream));
}

static inline void mock_device_download(char *here, const char *there, size_t bytes, void *stream)
{
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(copy_to_host(here, (shoal_cu_address)(uintptr_t)there, bytes, (shoal_cu_stream)stream));
}

static inline void mock_device_synchronize(void *stream)
{
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(stream_synchronize((shoal_cu_stream)stream));
}

/* If host memory is not registered, a real driver blocks the caller until the stream reaches the copy. Ranks that post in
 * different orders would then wait for each other. The stand-in blocks only in its mode `pageable`. */
static inline void mock_device_pin(char *here, size_t bytes)
{
    if (!mock_device_is_real())
        return;
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(host_register(here, bytes, 0));
}

static inline void mock_device_unpin(char *here)
{
    if (!mock_device_is_real())
        return;
    MOCK_DEVICE(context_set(mock_device_context));
    MOCK_DEVICE(host_unregister(here));
}

static const struct twin_device mock_device = {.allocate = mock_device_allocate,
                                               .release = mock_device_release,
                                               .pin = mock_device_pin,
                                               .unpin = mock_device_unpin,
                                               .take_stream = mock_device_take_stream,
                                               .upload = mock_device_upload,
                                               .download = mock_device_download,
                                               .synchronize = mock_device_synchronize};

/* ---- The engine calls no driver ------------------------------------------------------------------------------------------ */

/* The linker puts these in place of the engine's functions. While one of them or a callback in it runs, a driver call by
 * the same thread is a fault. */
struct shoal_engine;
bool __real_shoal_engine_progress(struct shoal_engine *engine);
bool __wrap_shoal_engine_progress(struct shoal_engine *engine);
uint64_t __real_shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns);
uint64_t __wrap_shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns);

static inline void mock_device_forbid(bool is_forbidden)
{
    if (control.forbid_of)
        control.forbid_of(is_forbidden);
}

bool __wrap_shoal_engine_progress(struct shoal_engine *engine)
{
    mock_device_forbid(true);
    const bool did = __real_shoal_engine_progress(engine);
    mock_device_forbid(false);
    return did;
}

uint64_t __wrap_shoal_engine_check(struct shoal_engine *engine, uint64_t now_ns)
{
    mock_device_forbid(true);
    const uint64_t again_ns = __real_shoal_engine_check(engine, now_ns);
    mock_device_forbid(false);
    return again_ns;
}

/* A thread sanitizer's build is slow; it needs several threads and little data. */
#ifdef __SANITIZE_THREAD__
#define MOCK_DEVICE_IS_RACED true
#else
#define MOCK_DEVICE_IS_RACED false
#endif

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static inline int mock_device_count_real(void)
{
    shoal_cu_device devices[2];
    int count = 0, can[2] = {0, 0};
    mock_client_open(getenv("SHOAL_TEST_CUDA"), true);
    if (cu.init(0) != SHOAL_CU_SUCCESS || cu.device_count(&count) != SHOAL_CU_SUCCESS)
        return 0;
    if (count < 2)
        return count;
    for (int i = 0; i < 2; i++)
        MOCK_DEVICE(device_get(&devices[i], i));
    for (int i = 0; i < 2; i++)
        MOCK_DEVICE(peer_can_access(&can[i], devices[i], devices[1 - i]));
    return can[0] && can[1] ? 2 : 1;
}

/* Finds the real devices that ranks use in turn when devices sum among themselves: two that reach each other, or one that
 * all ranks share. A child process looks, because a driver that has started does not survive a fork. */
static inline void mock_device_find(void)
{
    int state = 0;
    const pid_t child = mock_device_is_real() ? fork() : -1;
    if (child == 0)
        _exit(mock_device_count_real());
    if (child < 0)
        return;
    if (waitpid(child, &state, 0) == child && WIFEXITED(state))
        mock_device_turn = WEXITSTATUS(state);
    printf("# ranks take %d GPU%s in turn\n", mock_device_turn, mock_device_turn == 1 ? "" : "s");
    fflush(stdout);
}

/* Returns the device of a rank. Each rank has its own, as far as there are enough. */
static inline int mock_device_of(int rank)
{
    return mock_device_turn ? rank % mock_device_turn : rank;
}

/* Loads the driver in this process with these modes. Communicators created later find it. */
static inline void mock_device_start(const char *modes)
{
    shoal_cu_device device;
    mock_client_open(mock_device_is_real() ? getenv("SHOAL_TEST_CUDA") : MOCK_CUDA, mock_device_is_real());
    if (!mock_device_is_real() && !control.set_of(modes)) {
        fprintf(stderr, "mock_device: no such modes: %s\n", modes);
        abort();
    }
#ifdef MOCK_GDR
    if (!mock_device_is_real())
        mock_client_must(dlopen(MOCK_GDR, RTLD_NOW | RTLD_LOCAL) != NULL, MOCK_GDR);
#endif
    MOCK_DEVICE(init(0));
    MOCK_DEVICE(device_get(&device, mock_device_ordinal));
    MOCK_DEVICE(primary_retain(&mock_device_context, device));
    MOCK_DEVICE(context_set(mock_device_context));
    for (int i = 0; i < MOCK_DEVICE_STREAMS; i++)
        MOCK_DEVICE(stream_create(&mock_device_streams[i], SHOAL_CU_STREAM_NON_BLOCKING, 0));
}

/* Destroys the streams. Everything of Shoal's and of the test's must have been freed before. */
static inline void mock_device_stop(void)
{
    for (int i = 0; i < MOCK_DEVICE_STREAMS; i++) {
        MOCK_DEVICE(stream_synchronize(mock_device_streams[i]));
        MOCK_DEVICE(stream_destroy(mock_device_streams[i]));
    }
}

#endif
