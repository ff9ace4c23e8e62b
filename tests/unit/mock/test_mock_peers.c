/* Tests the stand-in driver of tests/mock/cuda: kernels, the memory of other devices and other processes, and memory in two
 * halves. The other process is this program with words as its arguments. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>

#include "mock_cases.h"

#define GRANULE ((size_t)2 << 20)
#define FAILED 1

/* ---- Kernels ------------------------------------------------------------------------------------------------------------- */

struct sum {
    shoal_cu_address to, from;
    uint32_t add;
};

/* Each block adds to its share of the numbers. */
static void run_sum(const struct mock_cuda_block *block, void *const *arguments)
{
    const struct sum *sum = arguments[0];
    const uint32_t count = *(const uint32_t *)arguments[1];
    uint32_t *to = control.look_up_of(block, sum->to, count * sizeof *to);
    const uint32_t *from = control.look_up_of(block, sum->from, count * sizeof *from);
    for (uint32_t i = block->index[0]; to && from && i < count; i += block->grid[0])
        to[i] = from[i] + sum->add;
}

/* Records which block of 2 x 3 x 2 ran when. */
static void run_order(const struct mock_cuda_block *block, void *const *arguments)
{
    const unsigned number = block->index[0] + 2 * (block->index[1] + 3 * block->index[2]);
    unsigned *at = control.look_up_of(block, *(const shoal_cu_address *)arguments[0], 13 * sizeof *at);
    unsigned *shared = block->shared;
    at[1 + number] = ++at[0] + 100 * shared[7]; /* a block's shared memory does not keep values of the previous block */
    shared[7] = 1;
}

static const struct mock_cuda_kernel kernels[] = {
    {"sum", run_sum, 2, {sizeof(struct sum), sizeof(uint32_t)}},
    {"order", run_order, 1, {sizeof(shoal_cu_address)}},
    {"unlisted", run_order, 1, {sizeof(shoal_cu_address)}},
};

static shoal_cu_function load(const char *image, const char *name)
{
    shoal_cu_module module;
    shoal_cu_function function;
    control.set_kernels_of(kernels, SHOAL_COUNT_OF(kernels));
    OK(cu.module_load(&module, image));
    OK(cu.module_function(&function, module, name));
    return function;
}

static shoal_cu_result launch_sum(shoal_cu_function function, shoal_cu_address to, shoal_cu_address from,
                                  shoal_cu_stream stream)
{
    struct sum sum = {.to = to, .from = from, .add = 5};
    uint32_t count = COUNT;
    void *arguments[] = {&sum, &count};
    const shoal_cu_result result = cu.launch(function, 8, 1, 1, 512, 1, 1, 0, stream, arguments, NULL);
    memset(&sum, 0, sizeof sum); /* the driver has its copy */
    return result;
}

static void kernels_run_by_their_names(void **state)
{
    uint32_t from[COUNT], to[COUNT];
    int registers = 0;
    (void)state;
    start("late=20");
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "other\nsum\n", "sum");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address source = make_memory(BYTES), dest = make_memory(BYTES);
    fill(from, 1);
    OK(cu.copy_to_device(source, from, BYTES, stream));
    OK(launch_sum(function, dest, source, stream));
    OK(cu.copy_to_host(to, dest, BYTES, stream));
    OK(cu.stream_synchronize(stream));
    check(to, 6);
    assert_int_equal(control.count_of("blocks"), 8);
    OK(cu.function_attribute(&registers, 4, function));
    assert_in_range(registers, 1, 255);
}

static void a_kernel_uses_memory_that_is_freed_behind_it(void **state)
{
    uint32_t from[COUNT], to[COUNT];
    shoal_cu_address source;
    (void)state;
    start("late=20");
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "sum\n", "sum");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address dest = make_memory(BYTES);
    fill(from, 1);
    OK(cu.allocate_async(&source, BYTES, stream));
    OK(cu.copy_to_device(source, from, BYTES, stream));
    control.hold_of(true);
    OK(launch_sum(function, dest, source, stream));
    OK(cu.release_async(source, stream));
    control.hold_of(false);
    OK(cu.copy_to_host(to, dest, BYTES, stream));
    OK(cu.stream_synchronize(stream));
    check(to, 6);
}

static void modules_list_their_kernels(void **state)
{
    static const char ptx[] = ".version 7.0\n.target sm_70\n.visible .entry sum_of(\n)\n.visible .entry order(.param .u64 a)\n";
    shoal_cu_module module;
    shoal_cu_function function;
    (void)state;
    start("");
    control.set_kernels_of(kernels, SHOAL_COUNT_OF(kernels));
    assert_int_not_equal(cu.module_load(&module, "neither of both"), SHOAL_CU_SUCCESS);
    OK(cu.module_load(&module, ptx));
    OK(cu.module_function(&function, module, "order"));
    REFUSED(cu.module_function(&function, module, "sum"), NOT_FOUND);
    REFUSED(cu.module_function(&function, module, "unlisted"), NOT_FOUND);
    REFUSED(cu.module_function(&function, module, "sum_of"), NOT_FOUND); /* no module defines it */
    OK(cu.module_unload(module));
    REFUSED(cu.module_unload(module), INVALID_HANDLE);
    REFUSED(launch_sum(function, 0, 0, SHOAL_CU_STREAM_LEGACY), INVALID_HANDLE);
    assert_int_equal(control.count_of("modules"), 0);
}

/* Returns when each of 12 blocks ran, from 1 on, as one number. */
static uint64_t order_of_blocks(const char *modes)
{
    unsigned times[13] = {0}, seen = 0;
    uint64_t order = 0;
    start(modes);
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "order", "order");
    shoal_cu_address at = make_memory(sizeof times);
    void *arguments[] = {&at};
    OK(cu.copy_to_device_now(at, times, sizeof times));
    OK(cu.launch(function, 2, 3, 2, 1, 1, 1, 100, SHOAL_CU_STREAM_LEGACY, arguments, NULL));
    OK(cu.copy_to_host_now(times, at, sizeof times));
    for (int i = 1; i <= 12; i++) {
        assert_in_range(times[i], 1, 12);
        seen |= 1u << times[i];
        order = order * 13 + times[i];
    }
    assert_int_equal(seen, 0x1ffe);
    return order;
}

static void blocks_run_in_any_order(void **state)
{
    uint64_t first = 0;
    int others = 0;
    (void)state;
    for (int seed = 1; seed <= 8; seed++) {
        char modes[32];
        snprintf(modes, sizeof modes, "seed=%d", seed);
        const uint64_t order = order_of_blocks(modes);
        others += seed > 1 && order != first;
        first = seed == 1 ? order : first;
    }
    assert_int_not_equal(others, 0);
}

static void bad_launches_are_refused(void **state)
{
    shoal_cu_address at = 0;
    void *arguments[] = {&at};
    (void)state;
    start("");
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "order", "order");
    REFUSED(cu.launch(function, 0, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL), INVALID_VALUE);
    REFUSED(cu.launch(function, 1, 1, 1, 1025, 1, 1, 0, NULL, arguments, NULL), INVALID_VALUE);
    REFUSED(cu.launch(function, 1, 1, 1, 32, 1, 1, 49153, NULL, arguments, NULL), INVALID_VALUE);
    REFUSED(cu.launch(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), INVALID_VALUE);
    OK(cu.context_push(contexts[1]));
    const shoal_cu_stream other = make_stream();
    OK(cu.context_pop(NULL));
    REFUSED(cu.launch(function, 1, 1, 1, 32, 1, 1, 0, other, arguments, NULL), INVALID_HANDLE);
    assert_int_equal(control.count_of("operations"), 0);
}

/* ---- Other devices ------------------------------------------------------------------------------------------------------- */

/* A kernel on the first device reads memory of the second. */
static shoal_cu_result read_peer(const char *modes, bool is_enabled)
{
    uint32_t from[COUNT], to[COUNT];
    start(modes);
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "sum", "sum");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address dest = make_memory(BYTES);
    OK(cu.context_push(contexts[1]));
    const shoal_cu_address source = make_memory(BYTES);
    fill(from, 20);
    OK(cu.copy_to_device_now(source, from, BYTES));
    OK(cu.context_pop(NULL));
    if (is_enabled)
        OK(cu.peer_enable(contexts[1], 0));
    OK(launch_sum(function, dest, source, stream));
    const shoal_cu_result result = cu.stream_synchronize(stream);
    if (result != SHOAL_CU_SUCCESS)
        return result;
    OK(cu.copy_to_host_now(to, dest, BYTES));
    check(to, 25);
    return result;
}

static void a_kernel_reaches_peers_that_are_enabled(void **state)
{
    (void)state;
    REFUSED(read_peer("", false), ILLEGAL_ADDRESS);
    OK(read_peer("", true));
}

static void peers_are_enabled_once(void **state)
{
    shoal_cu_device devices[2];
    int can;
    (void)state;
    start("");
    OK(cu.device_get(&devices[0], 0));
    OK(cu.device_get(&devices[1], 1));
    OK(cu.peer_can_access(&can, devices[0], devices[1]));
    assert_int_equal(can, 1);
    OK(cu.peer_can_access(&can, devices[0], devices[0]));
    assert_int_equal(can, 0);
    REFUSED(cu.peer_enable(contexts[0], 0), INVALID_VALUE);
    OK(cu.peer_enable(contexts[1], 0));
    REFUSED(cu.peer_enable(contexts[1], 0), PEER_ACCESS_ALREADY_ENABLED);
    start("peers=0");
    OK(cu.peer_can_access(&can, devices[0], devices[1]));
    assert_int_equal(can, 0);
    REFUSED(cu.peer_enable(contexts[1], 0), PEER_ACCESS_UNSUPPORTED);
}

/* A kernel's mistake is reported once the kernel has run, and ends only its context. */
static void an_illegal_address_ends_the_context(void **state)
{
    uint32_t host[COUNT];
    shoal_cu_address at;
    (void)state;
    start("");
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "sum", "sum");
    const shoal_cu_stream stream = make_stream();
    const shoal_cu_address small = make_memory(BYTES - 1), dest = make_memory(BYTES);
    OK(launch_sum(function, dest, small, stream));
    REFUSED(cu.stream_synchronize(stream), ILLEGAL_ADDRESS);
    REFUSED(cu.copy_to_host(host, dest, BYTES, stream), ILLEGAL_ADDRESS);
    REFUSED(cu.allocate(&at, 4), ILLEGAL_ADDRESS);
    OK(cu.context_set(contexts[1]));
    OK(cu.allocate(&at, 4));
}

/* ---- Other processes ----------------------------------------------------------------------------------------------------- */

#define HANDLE_TEXT (2 * sizeof(struct shoal_cu_ipc_handle) + 1)

static void write_handle(char *text, const struct shoal_cu_ipc_handle *handle)
{
    for (size_t i = 0; i < sizeof *handle; i++)
        snprintf(text + 2 * i, 3, "%02x", (unsigned char)handle->bytes[i]);
}

static struct shoal_cu_ipc_handle read_handle(const char *text)
{
    struct shoal_cu_ipc_handle handle;
    for (size_t i = 0; i < sizeof handle; i++) {
        const char byte[3] = {text[2 * i], text[2 * i + 1], 0};
        handle.bytes[i] = (char)strtoul(byte, NULL, 16);
    }
    return handle;
}

static struct shoal_cu_ipc_handle export_memory(shoal_cu_address at)
{
    struct shoal_cu_ipc_handle handle;
    OK(cu.ipc_export(&handle, at));
    return handle;
}

/* The child's side: opens the memory, expects numbers from 1 on, and leaves numbers from 50 on. */
static int exchange(const char *text)
{
    uint32_t numbers[COUNT];
    shoal_cu_address at, again;
    shoal_cu_device device;
    start("");
    OK(cu.ipc_open(&at, read_handle(text), SHOAL_CU_IPC_LAZY_PEER_ACCESS));
    OK(cu.ipc_open(&again, read_handle(text), SHOAL_CU_IPC_LAZY_PEER_ACCESS));
    OK(cu.copy_to_host_now(numbers, at, BYTES));
    for (uint32_t i = 0; i < COUNT; i++)
        if (numbers[i] != 1 + i)
            return FAILED;
    fill(numbers, 50);
    OK(cu.copy_to_device_now(at, numbers, BYTES));
    OK(cu.ipc_close(at));
    OK(cu.copy_to_host_now(numbers, again, 4)); /* opened twice, so closed twice */
    OK(cu.ipc_close(again));
    OK(cu.device_get(&device, 0));
    return at == again && cu.ipc_close(at) == SHOAL_CU_INVALID_VALUE ? 0 : FAILED;
}

static int open_only(const char *text)
{
    shoal_cu_address at;
    start("");
    return cu.ipc_open(&at, read_handle(text), SHOAL_CU_IPC_LAZY_PEER_ACCESS) == SHOAL_CU_SUCCESS ? 0 : FAILED;
}

static void processes_share_memory(void **state)
{
    char text[HANDLE_TEXT];
    uint32_t numbers[COUNT];
    shoal_cu_address opened;
    (void)state;
    start("");
    make_memory(BYTES); /* so that the next one is not the first */
    const shoal_cu_address at = make_memory(BYTES);
    fill(numbers, 1);
    OK(cu.copy_to_device_now(at, numbers, BYTES));
    const struct shoal_cu_ipc_handle handle = export_memory(at);
    write_handle(text, &handle);
    REFUSED(cu.ipc_open(&opened, handle, SHOAL_CU_IPC_LAZY_PEER_ACCESS), INVALID_CONTEXT); /* the same process */
    assert_int_equal(run_child("exchange", text), 0);
    OK(cu.copy_to_host_now(numbers, at, BYTES));
    check(numbers, 50);
    OK(cu.release(at)); /* no process has it open */
    assert_int_equal(run_child("open", text), FAILED);
}

static void only_plain_memory_is_exported(void **state)
{
    shoal_cu_address managed, pool;
    struct shoal_cu_ipc_handle handle;
    uint32_t host[COUNT];
    (void)state;
    start("");
    OK(cu.allocate_managed(&managed, BYTES, 1));
    OK(cu.allocate_async(&pool, BYTES, SHOAL_CU_STREAM_LEGACY));
    REFUSED(cu.ipc_export(&handle, managed), INVALID_VALUE);
    REFUSED(cu.ipc_export(&handle, pool), INVALID_VALUE);
    REFUSED(cu.ipc_export(&handle, register_memory(host, BYTES)), INVALID_VALUE);
    memset(&handle, 7, sizeof handle);
    REFUSED(cu.ipc_open(&pool, handle, SHOAL_CU_IPC_LAZY_PEER_ACCESS), INVALID_HANDLE);
}

/* The child's side: reports that it has opened the memory, and then waits until it is killed. */
static int keep_open(const char *text)
{
    if (open_only(text) != 0 || write(STDOUT_FILENO, "", 1) != 1)
        return FAILED;
    for (;;)
        pause();
}

/* Starts a child whose standard output is a pipe. The child has written a byte when this returns. */
static pid_t begin_keeper(const char *text)
{
    char *arguments[] = {(char *)(uintptr_t) "child", (char *)(uintptr_t) "keep", (char *)(uintptr_t)text, NULL};
    int ends[2];
    char byte;
    pid_t child;
    posix_spawn_file_actions_t actions;
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 1);
    close(ends[0]);
    return child;
}

/* The memory is freed while another process has it open, or after that process was killed. */
static void freeing_memory_that_others_have_open_is_a_fault(void **state)
{
    char text[HANDLE_TEXT], fault[256];
    (void)state;
    start("");
    const shoal_cu_address one = make_memory(BYTES), other = make_memory(BYTES);
    struct shoal_cu_ipc_handle handle = export_memory(one);
    write_handle(text, &handle);
    pid_t child = begin_keeper(text);
    OK(cu.release(one));
    expect_fault("has it open");
    kill(child, SIGKILL);
    assert_int_equal(end_child(child), 128 + SIGKILL);
    handle = export_memory(other);
    write_handle(text, &handle);
    child = begin_keeper(text);
    kill(child, SIGKILL);
    assert_int_equal(end_child(child), 128 + SIGKILL);
    OK(cu.release(other));
    assert_int_equal(control.faults_of(fault, sizeof fault), 0);
}

/* ---- Memory in two halves ------------------------------------------------------------------------------------------------ */

static const struct shoal_cu_allocation_properties properties = {
    .type = SHOAL_CU_ALLOCATION_PINNED, .handle_types = SHOAL_CU_HANDLE_POSIX, .location = {SHOAL_CU_LOCATION_DEVICE, 0}};
static const struct shoal_cu_access access_of_first = {{SHOAL_CU_LOCATION_DEVICE, 0}, SHOAL_CU_ACCESS_READ_WRITE};

/* Two adjacent allocations form one range; without access they cannot be used. */
static void mappings_are_contiguous(void **state)
{
    uint32_t from[COUNT], to[COUNT] = {0};
    shoal_cu_allocation halves[2], retained;
    shoal_cu_address at;
    size_t granule;
    (void)state;
    start("torn=3");
    OK(cu.address_granularity(&granule, &properties, 0));
    assert_int_equal(granule, GRANULE);
    REFUSED(cu.allocation_create(&halves[0], granule / 2, &properties, 0), INVALID_VALUE);
    OK(cu.address_reserve(&at, 2 * granule, 0, 0, 0));
    for (size_t i = 0; i < 2; i++) {
        OK(cu.allocation_create(&halves[i], granule, &properties, 0));
        OK(cu.address_map(at + i * granule, granule, 0, halves[i], 0));
    }
    REFUSED(cu.address_map(at, granule, 0, halves[0], 0), INVALID_VALUE); /* something is mapped there */
    const shoal_cu_address across = at + granule - BYTES / 2;
    fill(from, 9);
    REFUSED(cu.copy_to_device_now(across, from, BYTES), INVALID_VALUE);
    OK(cu.address_access(at, 2 * granule, &access_of_first, 1));
    OK(cu.copy_to_device_now(across, from, BYTES));
    OK(cu.copy_to_host_now(to, across, BYTES));
    check(to, 9);
    OK(cu.allocation_retain(&retained, (void *)(uintptr_t)(at + granule)));
    assert_int_equal(retained, halves[1]);
    OK(cu.allocation_release(retained));
    REFUSED(cu.address_free(at, 2 * granule), INVALID_VALUE);
    OK(cu.address_unmap(at, 2 * granule));
    REFUSED(cu.copy_to_host_now(to, across, 4), INVALID_VALUE);
    OK(cu.address_free(at, 2 * granule));
    assert_int_equal(control.count_of("allocations"), 2);
    for (size_t i = 0; i < 2; i++)
        OK(cu.allocation_release(halves[i]));
    REFUSED(cu.allocation_release(halves[0]), INVALID_VALUE);
    assert_int_equal(control.count_of("allocations"), 0);
}

/* Maps an allocation at its own address, for the first device. */
static shoal_cu_address map_at_new(shoal_cu_allocation allocation)
{
    shoal_cu_address at;
    OK(cu.address_reserve(&at, GRANULE, 0, 0, 0));
    OK(cu.address_map(at, GRANULE, 0, allocation, 0));
    OK(cu.address_access(at, GRANULE, &access_of_first, 1));
    return at;
}

/* The child's side: imports an inherited descriptor. */
static int import(const char *text)
{
    uint32_t number = 0;
    shoal_cu_allocation allocation;
    start("");
    OK(cu.allocation_import(&allocation, (void *)(uintptr_t)strtoul(text, NULL, 10), SHOAL_CU_HANDLE_POSIX));
    const shoal_cu_address at = map_at_new(allocation);
    OK(cu.allocation_release(allocation)); /* the mapping keeps the memory */
    OK(cu.copy_to_host_now(&number, at + 8, sizeof number));
    if (number != 4711)
        return FAILED;
    number++;
    OK(cu.copy_to_device_now(at + 8, &number, sizeof number));
    return 0;
}

static void allocations_are_passed_on(void **state)
{
    char text[16];
    uint32_t number = 4711;
    int fd;
    shoal_cu_allocation allocation, closed;
    struct shoal_cu_allocation_properties unshared = properties;
    (void)state;
    start("");
    unshared.handle_types = 0;
    OK(cu.allocation_create(&closed, GRANULE, &unshared, 0));
    REFUSED(cu.allocation_export(&fd, closed, SHOAL_CU_HANDLE_POSIX, 0), INVALID_VALUE);
    OK(cu.allocation_create(&allocation, GRANULE, &properties, 0));
    const shoal_cu_address at = map_at_new(allocation);
    OK(cu.copy_to_device_now(at + 8, &number, sizeof number));
    OK(cu.allocation_export(&fd, allocation, SHOAL_CU_HANDLE_POSIX, 0));
    assert_int_equal(fcntl(fd, F_SETFD, 0), 0); /* so that the child inherits it */
    snprintf(text, sizeof text, "%d", fd);
    assert_int_equal(run_child("import", text), 0);
    close(fd);
    OK(cu.copy_to_host_now(&number, at + 8, sizeof number));
    assert_int_equal(number, 4712);
    fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    REFUSED(cu.allocation_import(&allocation, (void *)(uintptr_t)(unsigned)fd, SHOAL_CU_HANDLE_POSIX), INVALID_VALUE);
    close(fd);
}

/* Kernels fail on a device that has no access; copies work if any device has access. */
static void access_is_by_device(void **state)
{
    shoal_cu_allocation allocation;
    (void)state;
    start("");
    OK(cu.allocation_create(&allocation, GRANULE, &properties, 0));
    const shoal_cu_address at = map_at_new(allocation);
    OK(cu.context_set(contexts[1]));
    const shoal_cu_function function = load(MOCK_CUDA_IMAGE "sum", "sum");
    const shoal_cu_address dest = make_memory(BYTES);
    OK(launch_sum(function, dest, at, SHOAL_CU_STREAM_LEGACY));
    REFUSED(cu.stream_synchronize(SHOAL_CU_STREAM_LEGACY), ILLEGAL_ADDRESS);
}

/* ---- Main ---------------------------------------------------------------------------------------------------------------- */

static int be_child(const char *what, const char *argument)
{
    if (strcmp(what, "exchange") == 0)
        return exchange(argument);
    if (strcmp(what, "open") == 0)
        return open_only(argument);
    if (strcmp(what, "keep") == 0)
        return keep_open(argument);
    if (strcmp(what, "import") == 0)
        return import(argument);
    return FAILED;
}

int main(int count, char **arguments)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_run_by_their_names),
        cmocka_unit_test(a_kernel_uses_memory_that_is_freed_behind_it),
        cmocka_unit_test(modules_list_their_kernels),
        cmocka_unit_test(blocks_run_in_any_order),
        cmocka_unit_test(bad_launches_are_refused),
        cmocka_unit_test(a_kernel_reaches_peers_that_are_enabled),
        cmocka_unit_test(peers_are_enabled_once),
        cmocka_unit_test(an_illegal_address_ends_the_context),
        cmocka_unit_test(processes_share_memory),
        cmocka_unit_test(only_plain_memory_is_exported),
        cmocka_unit_test(freeing_memory_that_others_have_open_is_a_fault),
        cmocka_unit_test(mappings_are_contiguous),
        cmocka_unit_test(allocations_are_passed_on),
        cmocka_unit_test(access_is_by_device),
    };
    mock_client_open(MOCK_CUDA, false);
    if (count > 2)
        return be_child(arguments[1], arguments[2]);
    return cmocka_run_group_tests_name("mock_peers", tests, NULL, NULL);
}
