/* The GPU driver: which one is found, and what is reported if there is none or it is of no use. Over the stand-in of
 * tests/mock/cuda. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "comm/settings.h"
#include "device/cuda/cuda_abi.h"
#include "device/cuda/cuda_host_ops.h"
#include "device/gpu.h"
#include "mock_cuda.h"
#include "quiet_log.h"

static struct {
    bool (*set)(const char *modes);
    void (*set_version)(int version);
    void (*set_devices)(int count);
    void (*hide)(const char *name);
    void (*refuse)(const char *name, int nth, int result);
    void (*reset)(void);
} mock;

/* The tests do not depend on this machine's driver: each case defines the driver's files, including its library. */
static enum { FILES_NONE, FILES_OPEN, FILES_DENIED } driver_files;

int __real_access(const char *path, int mode);
int __wrap_access(const char *path, int mode);
int __wrap_access(const char *path, int mode)
{
    if (strncmp(path, "/dev/nvidia", 11) != 0 && strcmp(path, "/dev/dxg") != 0)
        return __real_access(path, mode);
    errno = driver_files == FILES_DENIED ? EACCES : ENOENT;
    return driver_files == FILES_OPEN || (driver_files == FILES_DENIED && mode == F_OK) ? 0 : -1;
}

void *__real_dlopen(const char *path, int mode);
void *__wrap_dlopen(const char *path, int mode);
void *__wrap_dlopen(const char *path, int mode)
{
    return __real_dlopen(driver_files == FILES_NONE ? "/nowhere/libcuda.so.1" : path, mode);
}

static void find(void *library, const char *name, void *function_out)
{
    void *found = dlsym(library, name);
    assert_non_null(found);
    memcpy(function_out, &found, sizeof found);
}

static void load_mock(void)
{
    driver_files = FILES_OPEN;
    void *library = dlopen(MOCK_CUDA, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    find(library, "mock_cuda_set", &mock.set);
    find(library, "mock_cuda_set_version", &mock.set_version);
    find(library, "mock_cuda_set_devices", &mock.set_devices);
    find(library, "mock_cuda_hide", &mock.hide);
    find(library, "mock_cuda_fail", &mock.refuse);
    find(library, "mock_cuda_reset", &mock.reset);
    mock.reset();
}

static void expect_failure(enum shoal_status wanted, const char *first, const char *second)
{
    struct shoal_gpu *gpu = NULL;
    char text[SHOAL_LOG_TEXT_MAX] = "";
    assert_int_equal(shoal_gpu_open(&quiet, &gpu), wanted);
    assert_null(gpu);
    assert_int_equal(shoal_log_last_error(&quiet, text, sizeof text), wanted);
    if (!strstr(text, first) || !strstr(text, second))
        fail_msg("'%s' and '%s' are not both in: %s", first, second, text);
}

static void without_a_driver_it_is_said_what_to_install(void **state)
{
    (void)state;
    driver_files = FILES_NONE;
    expect_failure(SHOAL_ERR_UNSUPPORTED, "no CUDA driver", "install NVIDIA's driver");
}

static void devices_are_found(void **state)
{
    struct shoal_gpu *gpu = NULL;
    (void)state;
    load_mock();
    assert_int_equal(shoal_gpu_open(&quiet, &gpu), SHOAL_OK);
    assert_int_equal(shoal_gpu_count(gpu), 2);
    assert_int_equal(shoal_gpu_driver_version(gpu), 12040);
    const struct shoal_gpu_device *second = shoal_gpu_at(gpu, 1);
    assert_string_equal(second->name, "Stand-in 1");
    assert_string_equal(second->pci, "0000:02:00.0");
    assert_int_equal(second->major, 8);
    assert_true(second->can_register && second->has_value_waits);
    assert_false(second->has_dma_buf || second->is_prohibited);
    shoal_gpu_close(gpu);
}

/* The stand-in connects neighbors by NVLink; the others reach each other over PCIe. */
static void reach_is_what_the_driver_says(void **state)
{
    struct shoal_gpu *gpu = NULL;
    (void)state;
    load_mock();
    assert_true(mock.set("devices=4,nvlink=2"));
    assert_int_equal(shoal_gpu_open(&quiet, &gpu), SHOAL_OK);
    assert_int_equal(shoal_gpu_reach(gpu, 0, 0), SHOAL_GPU_REACH_NONE);
    assert_int_equal(shoal_gpu_reach(gpu, 0, 1), SHOAL_GPU_REACH_NVLINK);
    assert_int_equal(shoal_gpu_reach(gpu, 1, 2), SHOAL_GPU_REACH_PCIE);
    mock.refuse("cuDeviceGetP2PAttribute", 1, SHOAL_CU_INVALID_VALUE);
    assert_int_equal(shoal_gpu_reach(gpu, 0, 1), SHOAL_GPU_REACH_PCIE);
    mock.refuse("cuDeviceCanAccessPeer", 1, SHOAL_CU_INVALID_DEVICE);
    assert_int_equal(shoal_gpu_reach(gpu, 0, 1), SHOAL_GPU_REACH_NONE);
    assert_true(mock.set("peers=0"));
    assert_int_equal(shoal_gpu_reach(gpu, 0, 1), SHOAL_GPU_REACH_NONE);
    shoal_gpu_close(gpu);
}

/* A driver that refused the host function never runs it, so its record is free again. */
static void a_refused_host_function_is_used_again(void **state)
{
    struct shoal_cuda_host_calls calls = {NULL, NULL};
    struct shoal_device_ring_counter counter = {.value = 0};
    const struct shoal_cuda_op op = {&counter, 1, false, false};
    (void)state;
    struct shoal_cuda_host_call *const refused = shoal_cuda_host_take(&calls, &op, 1);
    assert_ptr_not_equal(shoal_cuda_host_take(&calls, &op, 1), refused); /* the driver may still have it */
    shoal_cuda_host_drop(refused);
    assert_ptr_equal(shoal_cuda_host_take(&calls, &op, 1), refused);
    shoal_cuda_host_free(&calls);
}

static void an_old_driver_is_refused(void **state)
{
    (void)state;
    load_mock();
    mock.set_version(11060);
    expect_failure(SHOAL_ERR_UNSUPPORTED, "it serves CUDA 11.6", "install driver 515 or newer");
    mock.set_version(11070);
    struct shoal_gpu *gpu = NULL;
    assert_int_equal(shoal_gpu_open(&quiet, &gpu), SHOAL_OK);
    shoal_gpu_close(gpu);
}

/* Each entry point is hidden in turn. A missing one is named if it is needed, otherwise all works without it. */
static void a_missing_entry_point_is_named(void **state)
{
    static const struct {
        const char *name;
        bool is_needed;
    } rows[] = {
#define ROW(member, name, version, need, signature) {name, SHOAL_CUDA_##need},
        SHOAL_CUDA_CALL_LIST(ROW)
#undef ROW
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        struct shoal_gpu *gpu = NULL;
        char text[128];
        load_mock();
        mock.hide(rows[i].name);
        snprintf(text, sizeof text, "has no %s as of", rows[i].name);
        if (rows[i].is_needed) {
            expect_failure(SHOAL_ERR_UNSUPPORTED, text, "install the driver again");
            continue;
        }
        assert_int_equal(shoal_gpu_open(&quiet, &gpu), SHOAL_OK);
        assert_int_equal(shoal_gpu_at(gpu, 0)->has_value_waits, strcmp(rows[i].name, "cuStreamBatchMemOp") != 0);
        shoal_gpu_close(gpu);
    }
}

static void a_refusal_has_the_name_of_the_driver_and_advice(void **state)
{
    static const struct {
        int result;
        enum shoal_status status;
        const char *name, *advice;
    } rows[] = {
        {SHOAL_CU_NO_DEVICE, SHOAL_ERR_UNSUPPORTED, "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"},
        {SHOAL_CU_NOT_PERMITTED, SHOAL_ERR_SYSTEM, "CUDA_ERROR_NOT_PERMITTED", "permissions of /dev/nvidia*"},
        {SHOAL_CU_STUB_LIBRARY, SHOAL_ERR_UNSUPPORTED, "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"},
        {SHOAL_CU_SYSTEM_DRIVER_MISMATCH, SHOAL_ERR_SYSTEM, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"},
        {SHOAL_CU_SYSTEM_NOT_READY, SHOAL_ERR_SYSTEM, "CUDA_ERROR_SYSTEM_NOT_READY", "fabricmanager"},
        {SHOAL_CU_OUT_OF_MEMORY, SHOAL_ERR_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "free device memory"},
        {12345, SHOAL_ERR_SYSTEM, "error 12345", "dmesg"},
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        load_mock();
        mock.refuse("cuInit", 1, rows[i].result);
        expect_failure(rows[i].status, rows[i].name, rows[i].advice);
    }
}

static void without_permission_it_is_said_which_file(void **state)
{
    static const int results[] = {SHOAL_CU_NO_DEVICE, SHOAL_CU_NOT_PERMITTED, SHOAL_CU_UNKNOWN};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(results); i++) {
        load_mock();
        driver_files = FILES_DENIED;
        mock.refuse("cuInit", 1, results[i]);
        expect_failure(SHOAL_ERR_SYSTEM, "CUDA_ERROR_", "this user may not open /dev/nvidiactl: join the group that owns it");
    }
}

static void a_device_that_fails_is_named(void **state)
{
    (void)state;
    load_mock();
    mock.refuse("cuDeviceGetPCIBusId", 2, SHOAL_CU_ECC_UNCORRECTABLE);
    expect_failure(SHOAL_ERR_SYSTEM, "looking at device 1: cuDeviceGetPCIBusId", "CUDA_ERROR_ECC_UNCORRECTABLE");
}

static void no_device_and_too_many_are_refused(void **state)
{
    (void)state;
    load_mock();
    mock.set_devices(0);
    expect_failure(SHOAL_ERR_UNSUPPORTED, "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES");
    mock.set_devices(SHOAL_GPU_DEVICES_MAX + 1);
    expect_failure(SHOAL_ERR_UNSUPPORTED, "shows 65 devices", "at most 64");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_driver_it_is_said_what_to_install),
        cmocka_unit_test(devices_are_found),
        cmocka_unit_test(reach_is_what_the_driver_says),
        cmocka_unit_test(a_refused_host_function_is_used_again),
        cmocka_unit_test(an_old_driver_is_refused),
        cmocka_unit_test(a_missing_entry_point_is_named),
        cmocka_unit_test(a_refusal_has_the_name_of_the_driver_and_advice),
        cmocka_unit_test(without_permission_it_is_said_which_file),
        cmocka_unit_test(a_device_that_fails_is_named),
        cmocka_unit_test(no_device_and_too_many_are_refused),
    };
    return cmocka_run_group_tests_name("gpu", tests, open_log, close_log);
}
