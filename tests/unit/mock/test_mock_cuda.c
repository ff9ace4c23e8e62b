/* Tests the stand-in driver of tests/mock/cuda itself: it behaves as a driver does, and detects incorrect use. Cases hold the
 * worker and step it if the order matters. A blocked call is recognized because it has not returned before the step that
 * releases it. Mistakes that end a process are made by children: this program with a word as its argument. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#include "mock_cases.h"

#define SURVIVED 3

/* ---- Calls of other threads ---------------------------------------------------------------------------------------------- */

/* A call of another thread that should block until something is released. */
struct blocked {
    pthread_t thread;
    void (*call)(void *arg);
    void *arg;
    atomic_bool has_begun;
    atomic_bool *is_let_go;
    bool was_let_go; /* when the call returned */
};

static void *make_call(void *arg)
{
    struct blocked *blocked = arg;
    OK(cu.context_set(contexts[0]));
    atomic_store(&blocked->has_begun, true);
    blocked->call(blocked->arg);
    blocked->was_let_go = atomic_load(blocked->is_let_go);
    return NULL;
}

static void begin_call(struct blocked *blocked)
{
    assert_int_equal(pthread_create(&blocked->thread, NULL, make_call, blocked), 0);
    while (!atomic_load(&blocked->has_begun))
        sched_yield();
    for (int i = 0; i < 100; i++) /* gives a call that does not block time to return */
        sched_yield();
}

static void end_call(struct blocked *blocked)
{
    assert_int_equal(pthread_join(blocked->thread, NULL), 0);
    assert_true(blocked->was_let_go);
}

/* ---- The driver ---------------------------------------------------------------------------------------------------------- */

static void entry_points_have_versions(void **state)
{
    void *one, *other;
    int why;
    (void)state;
    start("version=13000");
    OK(cu.find("cuCtxGetDevice", &one, 2000, SHOAL_CU_PROC_LEGACY_STREAM, &why));
    OK(cu.find("cuCtxGetDevice", &other, 13000, SHOAL_CU_PROC_LEGACY_STREAM, &why));
    assert_non_null(one);
    assert_ptr_not_equal(one, other);
    OK(cu.find("cuStreamBatchMemOp", &one, 11060, SHOAL_CU_PROC_LEGACY_STREAM, &why));
    assert_null(one);
    OK(cu.find("cuNoSuchThing", &one, 12000, SHOAL_CU_PROC_LEGACY_STREAM, &why));
    assert_null(one);
    /* another CUDA version's function, with our arguments */
    shoal_cu_result (*wrong)(shoal_cu_device * device);
    shoal_cu_device device;
    memcpy(&wrong, &other, sizeof wrong);
    assert_int_not_equal(wrong(&device), SHOAL_CU_SUCCESS);
    expect_fault("signature of another CUDA version");
}

static void nothing_goes_before_the_start(void **state)
{
    int count, attribute = SHOAL_CU_POINTER_MEMORY_TYPE;
    unsigned type;
    void *values[] = {&type};
    shoal_cu_address at;
    (void)state;
    control.reset_of();
    REFUSED(cu.device_count(&count), NOT_INITIALIZED);
    REFUSED(cu.allocate(&at, 1), NOT_INITIALIZED);
    REFUSED(cu.pointer_attributes(1, &attribute, values, (uintptr_t)&count), NOT_INITIALIZED);
    OK(cu.init(0));
    OK(cu.device_count(&count));
    assert_int_equal(count, 2);
    REFUSED(cu.allocate(&at, 1), INVALID_CONTEXT);
}

/* The parent has started the driver, so a child cannot use it. */
static void a_forked_child_cannot_use_the_driver(void **state)
{
    int count, ended;
    (void)state;
    start("");
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(cu.device_count(&count) == SHOAL_CU_NOT_INITIALIZED ? 0 : 1);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    OK(cu.device_count(&count));
}

static void modes_are_words_with_numbers(void **state)
{
    int count;
    (void)state;
    control.reset_of();
    assert_false(control.set_of("devices=3,laet=5"));
    assert_false(control.set_of("torn=0"));
    assert_false(control.set_of("devices=3x"));
    OK(cu.init(0));
    OK(cu.device_count(&count));
    assert_int_equal(count, 2);
    assert_true(control.set_of("devices=3,poison"));
    OK(cu.device_count(&count));
    assert_int_equal(count, 3);
    assert_int_equal(control.count_of("nothing"), SIZE_MAX);
    assert_int_equal(run_child("modes", "devices=1"), 0);
    assert_int_equal(run_child("modes", "devcies=1"), MOCK_CUDA_EXIT_CODE);
}

/* ---- Contexts ------------------------------------------------------------------------------------------------------------ */

static void contexts_are_a_stack(void **state)
{
    shoal_cu_context context;
    shoal_cu_device device, first;
    (void)state;
    start("");
    OK(cu.device_get(&first, 0));
    OK(cu.context_push(contexts[1]));
    OK(cu.context_device(&device));
    assert_int_equal(device, first + 1);
    assert_int_equal(control.count_of("stack"), 2);
    OK(cu.context_pop(&context));
    assert_ptr_equal(context, contexts[1]);
    OK(cu.context_current(&context));
    assert_ptr_equal(context, contexts[0]);
    OK(cu.context_set(NULL));
    REFUSED(cu.context_device(&device), INVALID_CONTEXT);
    REFUSED(cu.context_pop(&context), INVALID_CONTEXT);
    REFUSED(cu.context_push((shoal_cu_context)(uintptr_t)&device), INVALID_CONTEXT);
}

static void a_destroyed_context_is_known_as_such(void **state)
{
    shoal_cu_context made;
    shoal_cu_device device;
    shoal_cu_address at, foreign = 0;
    uint32_t number = 0;
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    OK(cu.device_get(&device, 0));
    OK(cu.context_create(&made, 0, device));
    at = make_memory(BYTES);
    const shoal_cu_stream inner = make_stream();
    const shoal_cu_event event = make_event();
    assert_int_equal(control.count_of("contexts"), 3);
    OK(cu.context_push(made));
    OK(cu.context_push(contexts[0]));
    OK(cu.context_destroy(made));
    REFUSED(cu.copy_to_host(&number, at, 4, stream), INVALID_VALUE);
    REFUSED(cu.stream_query(inner), INVALID_HANDLE);
    REFUSED(cu.event_query(event), INVALID_HANDLE);
    OK(cu.context_pop(NULL));
    REFUSED(cu.allocate(&foreign, 4), CONTEXT_IS_DESTROYED);
    assert_int_equal(control.count_of("contexts"), 2);
    assert_int_equal(control.count_of("allocations"), 0);
}

static void primary_contexts_are_counted(void **state)
{
    shoal_cu_device device;
    shoal_cu_context again;
    (void)state;
    start("");
    OK(cu.device_get(&device, 1));
    OK(cu.primary_retain(&again, device));
    assert_ptr_equal(again, contexts[1]);
    OK(cu.primary_release(device));
    OK(cu.context_push(again));
    OK(cu.primary_release(device));
    REFUSED(cu.context_device(&device), CONTEXT_IS_DESTROYED);
    OK(cu.device_get(&device, 1));
    REFUSED(cu.primary_release(device), INVALID_CONTEXT);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static void device_memory_is_copied(void **state)
{
    uint32_t from[COUNT], to[COUNT] = {0};
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address one = make_memory(BYTES);
    OK(cu.context_push(contexts[1]));
    const shoal_cu_address other = make_memory(BYTES);
    OK(cu.context_pop(NULL));
    fill(from, 5);
    OK(cu.copy_to_device(one, from, BYTES, stream));
    OK(cu.copy(other, one, BYTES, stream));
    OK(cu.copy_to_host(to, other, BYTES, stream));
    OK(cu.stream_synchronize(stream));
    check(to, 5);
    fill(from, 9);
    OK(cu.copy_to_device_now(one, from, BYTES));
    OK(cu.copy_to_host_now(to, one, BYTES));
    check(to, 9);
    OK(cu.release(one));
    OK(cu.release(other));
    assert_int_equal(control.count_of("allocations"), 0);
}

/* Copies rows of 100 numbers out of rows of 250. */
static void rows_are_copied(void **state)
{
    uint32_t from[COUNT], to[4][100] = {{0}};
    (void)state;
    start("torn=3,poison");
    const shoal_cu_address at = make_memory(BYTES);
    fill(from, 0);
    OK(cu.copy_to_device_now(at, from, BYTES));
    struct shoal_cu_copy_2d copy = {
        .source_type = SHOAL_CU_MEMORY_DEVICE,
        .source_device = at,
        .source_pitch = 1000,
        .source_x = 40,
        .dest_type = SHOAL_CU_MEMORY_HOST,
        .dest_host = to,
        .dest_pitch = 400,
        .row_bytes = 400,
        .rows = 4,
    };
    OK(cu.copy_2d(&copy, SHOAL_CU_STREAM_LEGACY));
    OK(cu.stream_synchronize(SHOAL_CU_STREAM_LEGACY));
    for (uint32_t row = 0; row < 4; row++)
        for (uint32_t i = 0; i < 100; i++)
            assert_int_equal(to[row][i], row * 250 + 10 + i);
    copy.source_y = 1;
    REFUSED(cu.copy_2d(&copy, SHOAL_CU_STREAM_LEGACY), INVALID_VALUE);
    copy.source_y = 0;
    copy.dest_pitch = 399;
    REFUSED(cu.copy_2d(&copy, SHOAL_CU_STREAM_LEGACY), INVALID_VALUE);
}

/* Neither a load nor a system call reaches device memory. */
static void the_cpu_cannot_touch_it(void **state)
{
    uint32_t host[COUNT];
    int ends[2];
    (void)state;
    start("");
    const shoal_cu_address at = make_memory(BYTES), registered = register_memory(host, BYTES);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], (void *)(uintptr_t)at, 4), -1);
    assert_int_equal(errno, EFAULT);
    assert_int_equal(write(ends[1], (void *)(uintptr_t)registered, 4), -1);
    assert_int_equal(errno, EFAULT);
    close(ends[0]);
    close(ends[1]);
    assert_int_not_equal(run_child("touch", "memory"), SURVIVED);
    assert_int_not_equal(run_child("touch", "registered"), SURVIVED);
    assert_int_equal(run_child("touch", "nothing"), SURVIVED);
}

static void new_memory_is_poisoned(void **state)
{
    unsigned char bytes[100];
    (void)state;
    start("");
    const shoal_cu_address at = make_memory(sizeof bytes);
    assert_true(control.peek_of(at, bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++)
        assert_int_equal(bytes[i], MOCK_CUDA_POISON);
    assert_false(control.peek_of(at, bytes, sizeof bytes + 1));
}

static void freed_memory_is_unknown(void **state)
{
    uint32_t number = 0;
    int attribute = SHOAL_CU_POINTER_MEMORY_TYPE;
    unsigned type = 77;
    void *values[] = {&type};
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address at = make_memory(BYTES);
    REFUSED(cu.copy_to_host(&number, at + BYTES - 2, 4, stream), INVALID_VALUE);
    REFUSED(cu.release(at + 4), INVALID_VALUE);
    OK(cu.release(at));
    REFUSED(cu.release(at), INVALID_VALUE);
    REFUSED(cu.copy_to_host(&number, at, 4, stream), INVALID_VALUE);
    REFUSED(cu.copy(at, (uintptr_t)&number, 4, stream), INVALID_VALUE);
    OK(cu.pointer_attributes(1, &attribute, values, at));
    assert_int_equal(type, 0);
    for (int i = 0; i < 20; i++)
        assert_int_not_equal(make_memory(BYTES), at);
}

static void addresses_come_again_where_that_is_wanted(void **state)
{
    (void)state;
    start("reuse");
    const shoal_cu_address at = make_memory(BYTES);
    OK(cu.release(at));
    assert_int_equal(make_memory(BYTES), at);
}

static void memory_is_bounded(void **state)
{
    shoal_cu_address at, other;
    (void)state;
    start("memory=1");
    OK(cu.allocate(&at, 1 << 19));
    REFUSED(cu.allocate(&other, (1 << 19) + 1), OUT_OF_MEMORY);
    REFUSED(cu.allocate(&other, 0), INVALID_VALUE);
    OK(cu.release(at));
    OK(cu.allocate(&at, 1 << 20));
}

/* Memory freed on a stream is free at once for later work, and later for earlier work. */
static void pools_free_on_streams(void **state)
{
    shoal_cu_address at;
    uint32_t from[COUNT], to[COUNT];
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    fill(from, 3);
    control.hold_of(true);
    OK(cu.allocate_async(&at, BYTES, stream));
    OK(cu.copy_to_device(at, from, BYTES, stream));
    OK(cu.copy_to_host(to, at, BYTES, stream));
    OK(cu.release_async(at, stream));
    REFUSED(cu.copy_to_host(to, at, BYTES, stream), INVALID_VALUE);
    control.hold_of(false);
    OK(cu.stream_synchronize(stream));
    check(to, 3);
    assert_int_equal(control.count_of("allocations"), 0);
    /* another stream's copy is not ordered with the free */
    const shoal_cu_stream other = make_stream();
    control.hold_of(true);
    OK(cu.allocate_async(&at, BYTES, stream));
    OK(cu.memory_ops(other, 0, NULL, 0));
    const shoal_cu_address flag = register_memory(from, BYTES);
    from[0] = from[1] = 0;
    OK(cu.wait_value(other, flag, 1, SHOAL_CU_WAIT_GEQ));
    OK(cu.copy_to_host(to, at, BYTES, other));
    OK(cu.release_async(at, stream));
    assert_int_equal(control.step_of(1), 1);
    expect_fault("another stream's work uses it");
    from[0] = 1;
    control.hold_of(false);
    OK(cu.stream_synchronize(other));
}

struct looked_up {
    void *context;
    unsigned type;
    unsigned char is_managed, is_ipc;
    int device;
    uint64_t buffer, bytes, types;
    shoal_cu_address begin;
};

static struct looked_up look(shoal_cu_address at)
{
    struct looked_up up;
    int attributes[] = {SHOAL_CU_POINTER_CONTEXT,     SHOAL_CU_POINTER_MEMORY_TYPE,  SHOAL_CU_POINTER_IS_MANAGED,
                        SHOAL_CU_POINTER_LEGACY_IPC,  SHOAL_CU_POINTER_DEVICE,       SHOAL_CU_POINTER_BUFFER_ID,
                        SHOAL_CU_POINTER_RANGE_BYTES, SHOAL_CU_POINTER_HANDLE_TYPES, SHOAL_CU_POINTER_RANGE_START};
    void *values[] = {&up.context, &up.type,  &up.is_managed, &up.is_ipc, &up.device,
                      &up.buffer,  &up.bytes, &up.types,      &up.begin};
    memset(&up, 0x77, sizeof up);
    OK(cu.pointer_attributes(SHOAL_COUNT_OF(attributes), attributes, values, at));
    return up;
}

static void pointers_are_told_apart(void **state)
{
    uint32_t host[COUNT];
    shoal_cu_address managed, pool;
    (void)state;
    start("");
    OK(cu.context_set(contexts[1]));
    const shoal_cu_address at = make_memory(BYTES);
    struct looked_up up = look(at + 8);
    assert_ptr_equal(up.context, contexts[1]);
    assert_true(up.type == SHOAL_CU_MEMORY_DEVICE && !up.is_managed && up.is_ipc && up.device == 1);
    assert_true(up.bytes == BYTES && up.begin == at && up.types == 0);
    const uint64_t buffer = up.buffer;
    OK(cu.release(at));
    assert_int_not_equal(look(make_memory(BYTES)).buffer, buffer);
    OK(cu.allocate_managed(&managed, BYTES, 1));
    up = look(managed);
    assert_true(up.type == SHOAL_CU_MEMORY_DEVICE && up.is_managed && !up.is_ipc);
    *(uint32_t *)(uintptr_t)managed = 1; /* the CPU may access it */
    OK(cu.allocate_async(&pool, BYTES, SHOAL_CU_STREAM_LEGACY));
    up = look(pool);
    assert_true(up.type == SHOAL_CU_MEMORY_DEVICE && !up.context && !up.is_ipc && up.device == 1);
    up = look((uintptr_t)host);
    assert_true(!up.context && !up.type && !up.is_managed && up.device < 0 && !up.buffer);
    const shoal_cu_address registered = register_memory(host, BYTES);
    up = look((uintptr_t)&host[5]);
    assert_true(up.type == SHOAL_CU_MEMORY_HOST && up.context == (void *)contexts[1]);
    assert_true(look(registered).type == SHOAL_CU_MEMORY_HOST);
    OK(cu.host_unregister(host));
    assert_int_equal(look((uintptr_t)host).type, 0);
}

/* ---- Registered host memory ---------------------------------------------------------------------------------------------- */

static void host_memory_is_registered(void **state)
{
    _Alignas(4096) static char host[5 * 4096];
    const unsigned flags = SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP;
    shoal_cu_address one, other;
    char byte;
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address memory = make_memory(sizeof host);
    REFUSED(cu.host_register(host, 0, flags), INVALID_VALUE);
    REFUSED(cu.host_register(NULL, 1, flags), INVALID_VALUE);
    REFUSED(cu.host_register(host, 1, 64), INVALID_VALUE);
    REFUSED(cu.host_register((void *)(uintptr_t)memory, 4096, flags), INVALID_VALUE);
    OK(cu.host_register(host + 4096, 4096, flags));
    REFUSED(cu.host_register(host, sizeof host, flags), HOST_MEMORY_ALREADY_REGISTERED);
    REFUSED(cu.host_register(host + 8000, 1000, flags), HOST_MEMORY_ALREADY_REGISTERED);
    OK(cu.host_register(host + 8192, 100, flags));
    REFUSED(cu.host_register(host + 8192 + 100, 10, flags), HOST_MEMORY_ALREADY_REGISTERED); /* its page is locked */
    OK(cu.host_address(&one, host + 4096, 0));
    OK(cu.host_address(&other, host + 5000, 0));
    assert_int_equal(other - one, 5000 - 4096);
    assert_int_not_equal(one, (uintptr_t)host + 4096);
    REFUSED(cu.host_address(&one, host, 0), INVALID_VALUE);
    /* partly registered */
    REFUSED(cu.copy_to_host(host, memory, 4097, stream), INVALID_VALUE);
    REFUSED(cu.copy_to_host(host + 4096, memory, 4097, stream), INVALID_VALUE);
    OK(cu.copy_to_host(host, memory, 4096, stream));
    OK(cu.stream_synchronize(stream));
    REFUSED(cu.host_unregister(host + 4097), HOST_MEMORY_NOT_REGISTERED);
    assert_int_equal(control.count_of("registrations"), 2);
    OK(cu.host_unregister(host + 4096));
    OK(cu.host_unregister(host + 8192));
    REFUSED(cu.host_unregister(host + 8192), HOST_MEMORY_NOT_REGISTERED);
    REFUSED(cu.copy_to_host(&byte, one, 1, stream), INVALID_VALUE); /* its device address is also gone */
    assert_int_equal(control.count_of("registrations"), 0);
}

static void memory_that_is_not_there_is_not_registered(void **state)
{
    (void)state;
    start("");
    char *pages = mmap(NULL, 2 * SHOAL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(pages != MAP_FAILED);
    munmap(pages + SHOAL_PAGE, SHOAL_PAGE);
    REFUSED(cu.host_register(pages, 2 * SHOAL_PAGE, SHOAL_CU_REGISTER_PORTABLE), INVALID_VALUE);
    OK(cu.host_register(pages, SHOAL_PAGE, SHOAL_CU_REGISTER_PORTABLE));
    shoal_cu_address address;
    REFUSED(cu.host_address(&address, pages, 0), INVALID_VALUE); /* not DEVICEMAP */
    OK(cu.host_unregister(pages));
    munmap(pages, SHOAL_PAGE);
}

static void unregister(void *arg)
{
    OK(cu.host_unregister(arg));
}

static void memory_in_use_is_not_unregistered(void **state)
{
    uint32_t host[COUNT];
    atomic_bool is_let_go = false;
    struct blocked blocked = {.call = unregister, .arg = host, .is_let_go = &is_let_go};
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address memory = make_memory(BYTES);
    register_memory(host, BYTES);
    control.hold_of(true);
    OK(cu.copy_to_host(host, memory, BYTES, stream));
    begin_call(&blocked);
    atomic_store(&is_let_go, true);
    control.hold_of(false);
    end_call(&blocked);
    expect_fault("was unregistered while 1 operations");
}

/* ---- Streams and events -------------------------------------------------------------------------------------------------- */

static void destroyed_handles_are_known_as_such(void **state)
{
    (void)state;
    start("");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_event event = make_event();
    uint32_t numbers[COUNT];
    const shoal_cu_address memory = make_memory(BYTES);
    control.hold_of(true);
    OK(cu.copy_to_host(numbers, memory, BYTES, stream));
    REFUSED(cu.stream_query(stream), NOT_READY);
    OK(cu.stream_destroy(stream)); /* its work continues */
    OK(cu.event_destroy(event));
    make_stream();
    make_event();
    REFUSED(cu.stream_query(stream), INVALID_HANDLE);
    REFUSED(cu.stream_destroy(stream), INVALID_HANDLE);
    REFUSED(cu.event_query(event), INVALID_HANDLE);
    REFUSED(cu.event_destroy(event), INVALID_HANDLE);
    REFUSED(cu.stream_query((shoal_cu_stream)(uintptr_t)&stream), INVALID_HANDLE);
    assert_int_equal(control.step_of(9), 1);
    assert_int_equal(control.count_of("operations"), 0);
}

static void a_stream_and_an_event_have_a_context(void **state)
{
    shoal_cu_context context;
    (void)state;
    start("");
    const shoal_cu_event event = make_event();
    OK(cu.context_push(contexts[1]));
    const shoal_cu_stream stream = make_stream();
    OK(cu.stream_context(stream, &context));
    assert_ptr_equal(context, contexts[1]);
    REFUSED(cu.event_record(event, stream), INVALID_HANDLE);
    OK(cu.stream_wait_event(stream, event, 0)); /* a stream can wait for events of other contexts */
    OK(cu.stream_context(SHOAL_CU_STREAM_LEGACY, &context));
    assert_ptr_equal(context, contexts[1]);
}

static void a_wait_binds_the_record_before_it(void **state)
{
    uint64_t flags[2] = {0, 0};
    (void)state;
    start("");
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream first = make_stream(), second = make_stream(), waiting = make_stream();
    const shoal_cu_event event = make_event();
    OK(cu.event_query(event)); /* never recorded */
    control.hold_of(true);
    OK(cu.wait_value(first, address, 1, SHOAL_CU_WAIT_GEQ));
    OK(cu.event_record(event, first));
    OK(cu.stream_wait_event(waiting, event, 0));
    OK(cu.write_value(waiting, address + 8, 7, 0));
    OK(cu.event_record(event, second)); /* the event is recorded anew, the wait is not */
    REFUSED(cu.event_query(event), NOT_READY);
    assert_int_equal(control.step_of(9), 1);
    OK(cu.event_query(event));
    OK(cu.event_destroy(event));
    assert_int_equal(flags[1], 0);
    flags[0] = 1;
    assert_int_equal(control.step_of(9), 4);
    assert_int_equal(flags[1], 7);
}

static void synchronize_event(void *arg)
{
    OK(cu.event_synchronize(arg));
}

static void synchronize_stream(void *arg)
{
    OK(cu.stream_synchronize(arg));
}

static void synchronize_context(void *arg)
{
    (void)arg;
    OK(cu.context_synchronize());
}

/* Threads wait for the event's position in its stream, while later work still waits; or for all of the stream. */
static void threads_wait_for_work(void **state)
{
    _Alignas(8) uint64_t flags[2] = {0, 0};
    atomic_bool is_let_go = false, is_all_let_go = false;
    (void)state;
    start("");
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_event event = make_event();
    struct blocked for_event = {.call = synchronize_event, .arg = event, .is_let_go = &is_let_go};
    struct blocked for_stream = {.call = synchronize_stream, .arg = stream, .is_let_go = &is_all_let_go};
    struct blocked for_context = {.call = synchronize_context, .is_let_go = &is_all_let_go};
    OK(cu.event_synchronize(event)); /* never recorded */
    OK(cu.wait_value(stream, address, 1, SHOAL_CU_WAIT_GEQ));
    OK(cu.event_record(event, stream));
    OK(cu.wait_value(stream, address + 8, 1, SHOAL_CU_WAIT_GEQ));
    begin_call(&for_event);
    begin_call(&for_stream);
    begin_call(&for_context);
    REFUSED(cu.event_query(event), NOT_READY);
    atomic_store(&is_let_go, true);
    __atomic_store_n(&flags[0], 1, __ATOMIC_RELEASE);
    end_call(&for_event);
    OK(cu.event_query(event));
    REFUSED(cu.stream_query(stream), NOT_READY);
    atomic_store(&is_all_let_go, true);
    __atomic_store_n(&flags[1], 1, __ATOMIC_RELEASE);
    end_call(&for_stream);
    end_call(&for_context);
    OK(cu.stream_query(stream));
}

/* Blocking streams and the legacy stream wait for each other; other streams do not. The per-thread stream is a blocking one. */
static void the_legacy_stream_is_ordered(void **state)
{
    uint64_t flags[4] = {0};
    shoal_cu_stream blocking;
    (void)state;
    start("");
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream other = make_stream();
    OK(cu.stream_create(&blocking, SHOAL_CU_STREAM_DEFAULT, 0));
    control.hold_of(true);
    OK(cu.wait_value(blocking, address, 1, SHOAL_CU_WAIT_GEQ));
    OK(cu.write_value(NULL, address + 8, 1, 0)); /* NULL is the legacy stream */
    OK(cu.write_value(SHOAL_CU_STREAM_PER_THREAD, address + 16, 1, 0));
    OK(cu.write_value(other, address + 24, 1, 0));
    assert_int_equal(control.step_of(9), 1);
    assert_true(flags[1] == 0 && flags[2] == 0 && flags[3] == 1);
    flags[0] = 1;
    assert_int_equal(control.step_of(2), 2);
    assert_true(flags[1] == 1 && flags[2] == 0);
    assert_int_equal(control.step_of(9), 1);
    assert_int_equal(flags[2], 1);
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static bool is_over(uint64_t *flag, uint64_t is, shoal_cu_stream stream)
{
    *flag = is;
    control.step_of(9);
    return cu.stream_query(stream) == SHOAL_CU_SUCCESS;
}

static void values_are_compared_as_signed_numbers(void **state)
{
    _Alignas(8) uint64_t flag = 0;
    const uint64_t big = UINT64_C(1) << 63;
    (void)state;
    start("");
    const shoal_cu_address address = register_memory(&flag, sizeof flag);
    const shoal_cu_stream stream = make_stream();
    control.hold_of(true);
    OK(cu.wait_value(stream, address, 5, SHOAL_CU_WAIT_GEQ));
    assert_false(is_over(&flag, 4, stream));
    assert_false(is_over(&flag, UINT64_MAX, stream)); /* a stream cannot be released by this value */
    assert_true(is_over(&flag, 5 + (UINT64_C(1) << 62), stream));
    OK(cu.wait_value(stream, address, big + 3, SHOAL_CU_WAIT_GEQ)); /* beyond the range of signed numbers */
    assert_false(is_over(&flag, big - 2, stream));
    assert_false(is_over(&flag, big + 2, stream));
    assert_true(is_over(&flag, big + 3, stream));
    OK(cu.wait_value(stream, address, 7, SHOAL_CU_WAIT_EQ));
    assert_false(is_over(&flag, 8, stream));
    assert_true(is_over(&flag, 7, stream));
}

static void values_are_waited_for_and_written(void **state)
{
    _Alignas(8) uint64_t flags[2] = {0, 0};
    union shoal_cu_memory_op ops[2] = {{.bytes = {0}}, {.bytes = {0}}};
    shoal_cu_address managed;
    (void)state;
    start("");
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream stream = make_stream();
    ops[0].value.operation = SHOAL_CU_OP_WAIT_32;
    ops[0].value.address = address;
    ops[0].value.value = 1;
    ops[1].value.operation = SHOAL_CU_OP_WRITE_64;
    ops[1].value.address = address + 8;
    ops[1].value.value = 42;
    OK(cu.memory_ops(stream, 2, ops, 0));
    REFUSED(cu.stream_query(stream), NOT_READY);
    __atomic_store_n(&flags[0], 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&flags[1], __ATOMIC_ACQUIRE) != 42)
        sched_yield();
    OK(cu.stream_synchronize(stream));
    ops[1].value.address = address + 4;
    REFUSED(cu.memory_ops(stream, 2, ops, 0), INVALID_VALUE);
    ops[1].value.address = (uintptr_t)&flags[1]; /* the host's address */
    REFUSED(cu.memory_ops(stream, 2, ops, 0), INVALID_VALUE);
    OK(cu.allocate_managed(&managed, 8, 1));
    ops[1].value.address = managed;
    REFUSED(cu.memory_ops(stream, 2, ops, 0), INVALID_VALUE);
    assert_int_equal(control.count_of("operations"), 0); /* no operation of an invalid batch is posted */
    REFUSED(cu.memory_ops(stream, 256, ops, 0), INVALID_VALUE);
    assert_true(control.set_of("values=0"));
    REFUSED(cu.write_value(stream, address, 1, 0), NOT_SUPPORTED);
}

/* Data copied before a value is written have arrived when the value has, while everything runs at random. */
static void a_value_comes_after_the_copies_before_it(void **state)
{
    static struct {
        uint64_t flags[2];
        uint32_t host[COUNT];
    } shared;
    uint32_t from[COUNT];
    (void)state;
    start("torn=5,poison,late=50");
    const shoal_cu_address address = register_memory(&shared, sizeof shared), memory = make_memory(BYTES);
    const shoal_cu_stream in = make_stream(), out = make_stream();
    for (uint64_t turn = 1; turn <= 20; turn++) {
        fill(from, (uint32_t)turn * 7);
        OK(cu.copy_to_device(memory, from, BYTES, out));
        OK(cu.write_value(out, address + 8, turn, 0));
        OK(cu.wait_value(in, address + 8, turn, SHOAL_CU_WAIT_GEQ));
        OK(cu.copy_to_host(shared.host, memory, BYTES, in));
        OK(cu.write_value(in, address, turn, 0));
        while (__atomic_load_n(&shared.flags[0], __ATOMIC_ACQUIRE) < turn)
            sched_yield();
        check(shared.host, (uint32_t)turn * 7);
    }
}

/* ---- Deliberate mistakes ------------------------------------------------------------------------------------------------- */

/* The program reads before the value: it sees poison first, then some parts of the data. */
static void who_reads_too_early_reads_poison(void **state)
{
    static struct {
        uint64_t flag;
        uint32_t host[COUNT];
    } shared;
    const uint32_t poison = MOCK_CUDA_POISON * UINT32_C(0x01010101);
    uint32_t from[COUNT], fresh = 0;
    (void)state;
    start("torn=4,poison");
    const shoal_cu_address memory = make_memory(BYTES), address = register_memory(&shared, sizeof shared);
    const shoal_cu_stream stream = make_stream();
    fill(from, 1);
    OK(cu.copy_to_device_now(memory, from, BYTES));
    fill(shared.host, 500000);
    shared.flag = 0;
    control.hold_of(true);
    OK(cu.copy_to_host(shared.host, memory, BYTES, stream));
    OK(cu.write_value(stream, address, 1, 0));
    check(shared.host, 500000); /* before its turn the source is unchanged */
    assert_int_equal(control.step_of(1), 1);
    for (int i = 0; i < COUNT; i++)
        assert_int_equal(shared.host[i], poison);
    assert_int_equal(control.step_of(2), 2);
    for (uint32_t i = 0; i < COUNT; i++)
        fresh += shared.host[i] == i + 1;
    assert_int_equal(fresh, COUNT / 2); /* two parts of four */
    assert_int_equal(shared.flag, 0);
    assert_int_equal(control.step_of(9), 3);
    assert_int_equal(shared.flag, 1);
    check(shared.host, 1);
}

/* The same for an output: the program computes with it before the stream's turn. */
static void an_output_is_poison_until_its_copy(void **state)
{
    uint32_t from[COUNT], number = 0;
    (void)state;
    start("poison");
    const shoal_cu_address memory = make_memory(BYTES);
    const shoal_cu_stream stream = make_stream();
    fill(from, 1);
    OK(cu.copy_to_device_now(memory, from, BYTES));
    control.hold_of(true);
    OK(cu.copy_to_device(memory, from, BYTES, stream));
    assert_true(control.peek_of(memory, &number, sizeof number));
    assert_int_equal(number, 1);
    control.step_of(1);
    assert_true(control.peek_of(memory, &number, sizeof number));
    assert_int_equal(number, MOCK_CUDA_POISON * UINT32_C(0x01010101));
    control.step_of(1);
    assert_true(control.peek_of(memory, &number, sizeof number));
    assert_int_equal(number, 1);
}

/* In mode late, the source is read after everything that could run before it. */
static void who_reuses_a_source_too_early_sends_the_new(void **state)
{
    uint32_t from[COUNT], to[COUNT], overwrites[COUNT];
    (void)state;
    start("late=100000");
    const shoal_cu_address memory = make_memory(BYTES), other = make_memory(BYTES);
    const shoal_cu_stream stream = make_stream(), second = make_stream();
    const shoal_cu_event event = make_event();
    fill(from, 1);
    fill(overwrites, 70);
    OK(cu.copy_to_device_now(memory, from, BYTES));
    control.hold_of(true);
    OK(cu.copy(other, memory, BYTES, stream));
    for (int i = 0; i < 5; i++)
        OK(cu.event_record(event, second)); /* runs first, each time */
    assert_int_equal(control.step_of(5), 5);
    OK(cu.event_query(event));
    OK(cu.copy_to_device(other, overwrites, BYTES, stream)); /* ordered: harmless */
    fill(overwrites, 90);                                    /* the source again, before its copy has run: a mistake */
    OK(cu.copy_to_host(to, other, BYTES, stream));
    control.step_of(9);
    check(to, 90);
}

static void overlapping_copies_are_told(void **state)
{
    (void)state;
    start("");
    const shoal_cu_address memory = make_memory(BYTES);
    OK(cu.copy(memory, memory + 4, BYTES - 4, SHOAL_CU_STREAM_LEGACY));
    OK(cu.stream_synchronize(SHOAL_CU_STREAM_LEGACY));
    expect_fault("overlap");
}

/* ---- The order of work --------------------------------------------------------------------------------------------------- */

/* Returns the order in which ten streams write, as a number. */
static uint64_t order_of(const char *modes)
{
    static uint64_t counter[16];
    uint64_t order = 0;
    start(modes);
    memset(counter, 0, sizeof counter);
    const shoal_cu_address address = register_memory(counter, sizeof counter);
    control.hold_of(true);
    for (unsigned i = 0; i < 10; i++)
        OK(cu.write_value(make_stream(), address + 8 * i, 1, 0));
    for (int step = 0; step < 10; step++) {
        assert_int_equal(control.step_of(1), 1);
        for (uint64_t i = 0; i < 10; i++) {
            if (counter[i] != 1)
                continue;
            counter[i] = 2;
            order = order * 10 + i;
        }
    }
    return order;
}

static void the_seed_decides_the_order(void **state)
{
    (void)state;
    const uint64_t first = order_of("seed=5");
    assert_true(order_of("seed=5") == first);
    assert_true(order_of("seed=6") != first || order_of("seed=7") != first);
}

/* An output's wait is posted before the input that it depends on. With a queue for each stream this works; with one shared
 * queue it deadlocks. */
static bool goes_on(const char *modes, bool is_input_first)
{
    static uint64_t flags[2];
    start(modes);
    flags[0] = flags[1] = 0;
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream in = make_stream(), out = make_stream();
    control.hold_of(true);
    if (is_input_first)
        OK(cu.write_value(in, address, 1, 0));
    OK(cu.wait_value(out, address + 8, 1, SHOAL_CU_WAIT_GEQ));
    if (!is_input_first)
        OK(cu.write_value(in, address, 1, 0));
    control.step_of(9);
    flags[1] = flags[0]; /* the engine answers what it has received */
    control.step_of(9);
    return control.count_of("operations") == 0;
}

static void streams_share_queues(void **state)
{
    (void)state;
    assert_true(goes_on("", false));
    assert_true(goes_on("", true));
    assert_true(goes_on("queues=1", true));
    assert_false(goes_on("queues=1", false));
}

static void post_one(void *arg)
{
    OK(cu.event_record(arg, SHOAL_CU_STREAM_LEGACY));
}

static void make_one(void *arg)
{
    (void)arg;
    make_event();
}

/* A full stream blocks the thread that posts, and then all others that need the context. */
static void a_full_stream_blocks_the_context(void **state)
{
    atomic_bool is_let_go = false;
    (void)state;
    start("depth=16");
    struct blocked posting = {.call = post_one, .arg = make_event(), .is_let_go = &is_let_go};
    struct blocked making = {.call = make_one, .is_let_go = &is_let_go};
    control.hold_of(true);
    for (int i = 0; i < 16; i++)
        post_one(posting.arg);
    begin_call(&posting);
    while (control.count_of("operations") < 17)
        sched_yield();
    begin_call(&making);
    OK(cu.context_push(contexts[1]));
    make_event(); /* another context is free */
    OK(cu.context_pop(NULL));
    atomic_store(&is_let_go, true);
    assert_int_equal(control.step_of(1), 1);
    end_call(&posting);
    end_call(&making);
    control.hold_of(false);
    OK(cu.context_synchronize());
}

static void post_on_second(void *arg)
{
    OK(cu.context_push(contexts[1]));
    post_one(arg);
    OK(cu.context_pop(NULL));
}

/* Two threads that wait for room, in different contexts, do not keep waking each other: they use no processor time. */
static void who_waits_for_room_sleeps(void **state)
{
    static uint64_t flag;
    atomic_bool is_let_go = false;
    struct blocked posting[2] = {{.call = post_one, .is_let_go = &is_let_go},
                                 {.call = post_on_second, .is_let_go = &is_let_go}};
    (void)state;
    start("depth=1");
    flag = 0;
    const shoal_cu_address address = register_memory(&flag, sizeof flag);
    control.hold_of(true);
    for (int i = 0; i < 2; i++) {
        OK(cu.context_push(contexts[i]));
        posting[i].arg = make_event();
        OK(cu.wait_value(SHOAL_CU_STREAM_LEGACY, address, 1, SHOAL_CU_WAIT_GEQ));
        OK(cu.event_record(make_event(), make_stream()));
        OK(cu.context_pop(NULL));
        begin_call(&posting[i]);
    }
    while (control.count_of("operations") < 6)
        sched_yield();
    assert_int_equal(control.step_of(9), 2); /* this wakes both, for nothing */
    const clock_t before = clock();
    usleep(50000); /* a thread that spins would use all of it */
    assert_in_range(clock() - before, 0, CLOCKS_PER_SEC / 50);
    flag = 1;
    atomic_store(&is_let_go, true);
    control.hold_of(false);
    for (int i = 0; i < 2; i++)
        end_call(&posting[i]);
}

static void free_one(void *arg)
{
    OK(cu.release(*(shoal_cu_address *)arg));
}

static void create_one(void *arg)
{
    (void)arg;
    make_stream();
}

/* Each of these calls waits for unrelated work. */
static void some_calls_wait_until_the_device_is_idle(void **state)
{
    static uint32_t host[COUNT];
    (void)state;
    start("idle");
    shoal_cu_address memory = make_memory(BYTES);
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_event event = make_event();
    const struct {
        void (*call)(void *arg);
        void *arg;
    } rows[] = {{free_one, &memory}, {create_one, NULL}, {unregister, host}};
    register_memory(host, BYTES);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        atomic_bool is_let_go = false;
        struct blocked blocked = {.call = rows[i].call, .arg = rows[i].arg, .is_let_go = &is_let_go};
        struct blocked making = {.call = make_one, .is_let_go = &is_let_go};
        control.hold_of(true);
        OK(cu.event_record(event, stream));
        begin_call(&blocked);
        begin_call(&making); /* possibly before the other call holds the context: then this check proves nothing */
        atomic_store(&is_let_go, true);
        control.hold_of(false);
        end_call(&blocked);
        assert_int_equal(pthread_join(making.thread, NULL), 0);
    }
}

static void copy_pageable(void *arg)
{
    static uint32_t host[COUNT];
    OK(cu.copy_to_host(host, *(shoal_cu_address *)arg, BYTES, SHOAL_CU_STREAM_PER_THREAD));
}

static void copies_of_pageable_memory_may_wait(void **state)
{
    atomic_bool is_let_go = false;
    (void)state;
    start("pageable");
    shoal_cu_address memory = make_memory(BYTES);
    struct blocked blocked = {.call = copy_pageable, .arg = &memory, .is_let_go = &is_let_go};
    control.hold_of(true);
    begin_call(&blocked);
    atomic_store(&is_let_go, true);
    control.hold_of(false);
    end_call(&blocked);
}

/* ---- What goes wrong ----------------------------------------------------------------------------------------------------- */

static void a_call_fails_where_a_test_says_so(void **state)
{
    shoal_cu_event event;
    (void)state;
    start("");
    control.fail_of("cuEventCreate", 3, SHOAL_CU_OUT_OF_MEMORY);
    OK(cu.event_create(&event, 0));
    make_stream();
    OK(cu.event_create(&event, 0));
    REFUSED(cu.event_create(&event, 0), OUT_OF_MEMORY);
    OK(cu.event_create(&event, 0));
    assert_int_equal(control.count_of("events"), 3); /* the failed call created nothing */
    assert_int_equal(control.count_of("calls"), 4);
    control.fail_of("cuEventCreate", 0, SHOAL_CU_OUT_OF_MEMORY);
    OK(cu.event_create(&event, 0));
    assert_int_equal(control.count_of("calls"), 1);
}

static void add_one(void *arg)
{
    atomic_fetch_add((atomic_int *)arg, 1);
}

/* From the second operation on, no work of one context runs any longer. */
static void a_context_fails_in_mid_stream(void **state)
{
    static uint64_t flags[2];
    atomic_int calls = 0;
    shoal_cu_address at;
    (void)state;
    start("");
    flags[0] = flags[1] = 0;
    const shoal_cu_address address = register_memory(flags, sizeof flags);
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_event event = make_event();
    OK(cu.context_push(contexts[1]));
    const shoal_cu_stream other = make_stream();
    OK(cu.stream_wait_event(other, event, 0));
    OK(cu.context_pop(NULL));
    control.hold_of(true);
    control.break_of(2, SHOAL_CU_ILLEGAL_ADDRESS);
    OK(cu.write_value(stream, address, 1, 0));
    OK(cu.write_value(stream, address + 8, 1, 0));
    OK(cu.launch_host(stream, add_one, &calls));
    OK(cu.event_record(event, stream));
    assert_int_equal(control.step_of(2), 2);
    assert_true(flags[0] == 1 && flags[1] == 0);
    REFUSED(cu.stream_query(stream), ILLEGAL_ADDRESS);
    REFUSED(cu.event_query(event), ILLEGAL_ADDRESS);
    REFUSED(cu.allocate(&at, 4), ILLEGAL_ADDRESS);
    REFUSED(cu.host_unregister(flags), ILLEGAL_ADDRESS);
    control.hold_of(false);
    assert_int_equal(control.count_of("operations"), 0);
    assert_int_equal(atomic_load(&calls), 0);
    OK(cu.context_set(contexts[1]));
    OK(cu.stream_query(other));
    OK(cu.allocate(&at, 4));
}

static void all_contexts_fail_at_once(void **state)
{
    shoal_cu_address at;
    (void)state;
    start("");
    static uint64_t flag;
    const shoal_cu_address address = register_memory(&flag, sizeof flag);
    const shoal_cu_stream stream = make_stream();
    OK(cu.wait_value(stream, address, 1, SHOAL_CU_WAIT_GEQ));
    control.break_of(0, SHOAL_CU_ECC_UNCORRECTABLE);
    REFUSED(cu.stream_synchronize(stream), ECC_UNCORRECTABLE);
    OK(cu.context_set(contexts[1]));
    REFUSED(cu.allocate(&at, 4), ECC_UNCORRECTABLE);
}

static void call_the_driver(void *arg)
{
    *(shoal_cu_result *)arg = cu.stream_query(SHOAL_CU_STREAM_LEGACY);
}

static void some_threads_may_not_call(void **state)
{
    shoal_cu_result result = SHOAL_CU_SUCCESS;
    int count;
    (void)state;
    start("");
    control.forbid_of(true);
    control.forbid_of(true);
    REFUSED(cu.device_count(&count), NOT_PERMITTED);
    expect_fault("cuDeviceGetCount was called by a thread that drives the engine");
    control.forbid_of(false);
    REFUSED(cu.device_count(&count), NOT_PERMITTED);
    expect_fault("cuDeviceGetCount");
    control.forbid_of(false);
    OK(cu.device_count(&count));
    OK(cu.launch_host(SHOAL_CU_STREAM_LEGACY, call_the_driver, &result));
    OK(cu.stream_synchronize(SHOAL_CU_STREAM_LEGACY));
    assert_int_equal(result, SHOAL_CU_NOT_PERMITTED);
    expect_fault("cuStreamQuery");
}

/* A host function that waits for another stream's work: that work continues. But host functions run one at a time. */
static void wait_for_flag(void *arg)
{
    while (!__atomic_load_n((uint64_t *)arg, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void host_functions_block_their_stream_only(void **state)
{
    static uint64_t flag;
    atomic_int calls = 0;
    (void)state;
    start("");
    flag = 0;
    const shoal_cu_address address = register_memory(&flag, sizeof flag);
    const shoal_cu_stream first = make_stream(), second = make_stream();
    OK(cu.launch_host(first, wait_for_flag, &flag));
    OK(cu.launch_host(first, add_one, &calls));
    OK(cu.write_value(second, address, 1, 0));
    OK(cu.stream_synchronize(first));
    assert_int_equal(atomic_load(&calls), 1);
    REFUSED(cu.launch_host(first, NULL, NULL), INVALID_VALUE);
}

static void capturing_forbids_much(void **state)
{
    int status, mode = SHOAL_CU_CAPTURE_MODE_RELAXED;
    shoal_cu_stream captured;
    shoal_cu_address at;
    (void)state;
    start("");
    OK(cu.stream_create(&captured, SHOAL_CU_STREAM_DEFAULT, 0));
    const shoal_cu_stream other = make_stream();
    const shoal_cu_event event = make_event();
    control.capture_of(captured, SHOAL_CU_CAPTURE_ACTIVE);
    OK(cu.stream_is_capturing(captured, &status));
    assert_int_equal(status, SHOAL_CU_CAPTURE_ACTIVE);
    REFUSED(cu.stream_is_capturing(SHOAL_CU_STREAM_LEGACY, &status), STREAM_CAPTURE_IMPLICIT);
    REFUSED(cu.event_record(event, SHOAL_CU_STREAM_LEGACY), STREAM_CAPTURE_IMPLICIT);
    OK(cu.event_record(event, other));
    REFUSED(cu.event_record(event, captured), STREAM_CAPTURE_UNSUPPORTED);
    expect_fault("being captured");
    OK(cu.capture_mode(&mode));
    OK(cu.allocate(&at, 4)); /* in relaxed mode */
    OK(cu.stream_is_capturing(captured, &status));
    assert_int_equal(status, SHOAL_CU_CAPTURE_ACTIVE);
    OK(cu.capture_mode(&mode));
    assert_int_equal(mode, SHOAL_CU_CAPTURE_MODE_RELAXED);
    REFUSED(cu.allocate(&at, 4), STREAM_CAPTURE_UNSUPPORTED); /* which invalidates the capture */
    OK(cu.stream_is_capturing(captured, &status));
    assert_int_equal(status, SHOAL_CU_CAPTURE_INVALIDATED);
    control.capture_of(captured, SHOAL_CU_CAPTURE_NONE);
    OK(cu.stream_query(captured));
}

/* A process whose objects leak, or that causes an unrequested fault, ends with an exit code. */
static void leaks_and_faults_end_a_process(void **state)
{
    (void)state;
    assert_int_equal(run_child("leave", "nothing"), 0);
    assert_int_equal(run_child("leave", "stream"), MOCK_CUDA_EXIT_CODE);
    assert_int_equal(run_child("leave", "memory"), MOCK_CUDA_EXIT_CODE);
    assert_int_equal(run_child("leave", "registration"), MOCK_CUDA_EXIT_CODE);
    assert_int_equal(run_child("leave", "work"), MOCK_CUDA_EXIT_CODE);
    assert_int_equal(run_child("leave", "fault"), MOCK_CUDA_EXIT_CODE);
}

/* ---- Main ---------------------------------------------------------------------------------------------------------------- */

/* A child that accesses memory that only the device may access. */
static int touch(const char *what)
{
    static uint32_t host[COUNT];
    start("");
    const shoal_cu_address memory = make_memory(BYTES), registered = register_memory(host, BYTES);
    volatile const uint32_t *at = host;
    if (strcmp(what, "memory") == 0)
        at = (volatile const uint32_t *)(uintptr_t)memory;
    if (strcmp(what, "registered") == 0)
        at = (volatile const uint32_t *)(uintptr_t)registered;
    return *at == 77 ? 1 : SURVIVED;
}

static int use_modes(const char *modes)
{
    int devices = 0;
    setenv("MOCK_CUDA", modes, 1);
    control.reset_of();
    return cu.init(0) == SHOAL_CU_SUCCESS && cu.device_count(&devices) == SHOAL_CU_SUCCESS && devices == 1 ? 0 : 1;
}

static int leave(const char *what)
{
    static uint64_t flag;
    int count;
    start("leaks");
    if (strcmp(what, "stream") == 0)
        make_stream();
    if (strcmp(what, "memory") == 0)
        make_memory(1);
    if (strcmp(what, "registration") == 0)
        register_memory(&flag, sizeof flag);
    if (strcmp(what, "work") == 0)
        OK(cu.wait_value(SHOAL_CU_STREAM_LEGACY, register_memory(&flag, sizeof flag), 1, SHOAL_CU_WAIT_GEQ));
    if (strcmp(what, "fault") == 0)
        control.forbid_of(true);
    if (strcmp(what, "fault") == 0)
        (void)cu.device_count(&count);
    control.forbid_of(false);
    return 0;
}

static int be_child(const char *what, const char *argument)
{
    if (strcmp(what, "touch") == 0)
        return touch(argument);
    if (strcmp(what, "modes") == 0)
        return use_modes(argument);
    if (strcmp(what, "leave") == 0)
        return leave(argument);
    return 1;
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(entry_points_have_versions),
    cmocka_unit_test(nothing_goes_before_the_start),
    cmocka_unit_test(a_forked_child_cannot_use_the_driver),
    cmocka_unit_test(modes_are_words_with_numbers),
    cmocka_unit_test(contexts_are_a_stack),
    cmocka_unit_test(a_destroyed_context_is_known_as_such),
    cmocka_unit_test(primary_contexts_are_counted),
    cmocka_unit_test(device_memory_is_copied),
    cmocka_unit_test(rows_are_copied),
    cmocka_unit_test(the_cpu_cannot_touch_it),
    cmocka_unit_test(new_memory_is_poisoned),
    cmocka_unit_test(freed_memory_is_unknown),
    cmocka_unit_test(addresses_come_again_where_that_is_wanted),
    cmocka_unit_test(memory_is_bounded),
    cmocka_unit_test(pools_free_on_streams),
    cmocka_unit_test(pointers_are_told_apart),
    cmocka_unit_test(host_memory_is_registered),
    cmocka_unit_test(memory_that_is_not_there_is_not_registered),
    cmocka_unit_test(memory_in_use_is_not_unregistered),
    cmocka_unit_test(destroyed_handles_are_known_as_such),
    cmocka_unit_test(a_stream_and_an_event_have_a_context),
    cmocka_unit_test(a_wait_binds_the_record_before_it),
    cmocka_unit_test(threads_wait_for_work),
    cmocka_unit_test(the_legacy_stream_is_ordered),
    cmocka_unit_test(values_are_compared_as_signed_numbers),
    cmocka_unit_test(values_are_waited_for_and_written),
    cmocka_unit_test(a_value_comes_after_the_copies_before_it),
    cmocka_unit_test(who_reads_too_early_reads_poison),
    cmocka_unit_test(an_output_is_poison_until_its_copy),
    cmocka_unit_test(who_reuses_a_source_too_early_sends_the_new),
    cmocka_unit_test(overlapping_copies_are_told),
    cmocka_unit_test(the_seed_decides_the_order),
    cmocka_unit_test(streams_share_queues),
    cmocka_unit_test(a_full_stream_blocks_the_context),
    cmocka_unit_test(who_waits_for_room_sleeps),
    cmocka_unit_test(some_calls_wait_until_the_device_is_idle),
    cmocka_unit_test(copies_of_pageable_memory_may_wait),
    cmocka_unit_test(a_call_fails_where_a_test_says_so),
    cmocka_unit_test(a_context_fails_in_mid_stream),
    cmocka_unit_test(all_contexts_fail_at_once),
    cmocka_unit_test(some_threads_may_not_call),
    cmocka_unit_test(host_functions_block_their_stream_only),
    cmocka_unit_test(capturing_forbids_much),
    cmocka_unit_test(leaks_and_faults_end_a_process),
};

int main(int count, char **arguments)
{
    mock_client_open(MOCK_CUDA, false);
    if (count > 2)
        return be_child(arguments[1], arguments[2]);
    return cmocka_run_group_tests_name("mock_cuda", tests, NULL, NULL);
}
