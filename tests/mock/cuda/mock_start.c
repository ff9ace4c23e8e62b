/* How the stand-in starts, what it says of its devices, and where its entry points are. */
#include "mock_cuda.h"

#include <stdio.h>
#include <string.h>

#include "device/cuda/cuda_abi.h"

#define API __attribute__((visibility("default")))
#define VERSION 12040
#define DEVICES 2

static struct {
    int version, devices;
    bool is_started;
    const char *hidden;
    const char *failing; /* the entry point whose call number `nth` fails */
    int nth, result;
} mock = {.version = VERSION, .devices = DEVICES};

API void mock_cuda_set_version(int version)
{
    mock.version = version;
}

API void mock_cuda_set_devices(int count)
{
    mock.devices = count;
}

API void mock_cuda_hide(const char *name)
{
    mock.hidden = name;
}

API void mock_cuda_fail(const char *name, int nth, int result)
{
    mock.failing = name;
    mock.nth = nth;
    mock.result = result;
}

API void mock_cuda_reset(void)
{
    memset(&mock, 0, sizeof mock);
    mock.version = VERSION;
    mock.devices = DEVICES;
}

/* Each entry point begins with this. */
static shoal_cu_result mock_enter(const char *name)
{
    const bool is_counted = mock.failing && strcmp(name, mock.failing) == 0;
    if (is_counted && --mock.nth == 0)
        return mock.result;
    if (!mock.is_started && strcmp(name, "cuInit") != 0 && strcmp(name, "cuDriverGetVersion") != 0)
        return SHOAL_CU_NOT_INITIALIZED;
    return SHOAL_CU_SUCCESS;
}

#define ENTER(name)                                        \
    do {                                                   \
        const shoal_cu_result entered_ = mock_enter(name); \
        if (entered_ != SHOAL_CU_SUCCESS)                  \
            return entered_;                               \
    } while (0)

API shoal_cu_result cuDriverGetVersion(int *version);
API shoal_cu_result cuDriverGetVersion(int *version)
{
    ENTER("cuDriverGetVersion");
    *version = mock.version;
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_init(unsigned flags)
{
    ENTER("cuInit");
    mock.is_started = true;
    return flags ? SHOAL_CU_INVALID_VALUE : SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_error_name(shoal_cu_result result, const char **name)
{
    switch (result) {
#define NAMED(word, number)          \
    case number:                     \
        *name = "CUDA_ERROR_" #word; \
        return SHOAL_CU_SUCCESS;
        SHOAL_CU_RESULT_LIST(NAMED)
#undef NAMED
    default:
        *name = NULL;
        return SHOAL_CU_INVALID_VALUE;
    }
}

static shoal_cu_result mock_device_count(int *count)
{
    ENTER("cuDeviceGetCount");
    *count = mock.devices;
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_device_get(shoal_cu_device *device, int ordinal)
{
    ENTER("cuDeviceGet");
    if (ordinal < 0 || ordinal >= mock.devices)
        return SHOAL_CU_INVALID_DEVICE;
    *device = ordinal + 100; /* so that nobody takes one for the other */
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_device_name(char *name, int bytes, shoal_cu_device device)
{
    ENTER("cuDeviceGetName");
    snprintf(name, (size_t)bytes, "Stand-in %d", device - 100);
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_device_pci(char *name, int bytes, shoal_cu_device device)
{
    ENTER("cuDeviceGetPCIBusId");
    snprintf(name, (size_t)bytes, "0000:%02x:00.0", device - 99);
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result mock_device_attribute(int *value, int attribute, shoal_cu_device device)
{
    ENTER("cuDeviceGetAttribute");
    if (device < 100 || device >= 100 + mock.devices)
        return SHOAL_CU_INVALID_DEVICE;
    *value = attribute == SHOAL_CU_DEVICE_MAJOR                                                            ? 8
             : attribute == SHOAL_CU_DEVICE_HOST_REGISTER || attribute == SHOAL_CU_DEVICE_STREAM_MEMORY_64 ? 1
                                                                                                           : 0;
    return SHOAL_CU_SUCCESS;
}

/* The rest of the table is there, as in a real driver, and does nothing yet. */
static shoal_cu_result mock_unsupported(void)
{
    return SHOAL_CU_NOT_SUPPORTED;
}

static void *mock_address(void (*function)(void))
{
    void *address;
    memcpy(&address, &function, sizeof address);
    return address;
}

static const struct {
    const char *name;
    int version; /* since when there is one with this signature */
    void (*function)(void);
} served[] = {
    {"cuInit", 2000, (void (*)(void))mock_init},
    {"cuDriverGetVersion", 2020, (void (*)(void))cuDriverGetVersion},
    {"cuGetErrorName", 6000, (void (*)(void))mock_error_name},
    {"cuDeviceGetCount", 2000, (void (*)(void))mock_device_count},
    {"cuDeviceGet", 2000, (void (*)(void))mock_device_get},
    {"cuDeviceGetName", 2000, (void (*)(void))mock_device_name},
    {"cuDeviceGetPCIBusId", 4010, (void (*)(void))mock_device_pci},
    {"cuDeviceGetAttribute", 2000, (void (*)(void))mock_device_attribute},
};

static const struct {
    const char *name;
    int version;
} known[] = {
#define KNOWN(member, name, version, need, signature) {name, version},
    SHOAL_CUDA_CALL_LIST(KNOWN)
#undef KNOWN
};

API shoal_cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *why);
API shoal_cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *why)
{
    *function = NULL;
    *why = 1; /* no such symbol; the call itself succeeds */
    if (flags != SHOAL_CU_PROC_LEGACY_STREAM)
        return SHOAL_CU_INVALID_VALUE;
    if (mock.hidden && strcmp(name, mock.hidden) == 0)
        return SHOAL_CU_SUCCESS;
    for (size_t i = 0; i < SHOAL_COUNT_OF(known) && !*function; i++) {
        if (strcmp(known[i].name, name) == 0 && known[i].version <= version && version <= mock.version)
            *function = mock_address((void (*)(void))mock_unsupported);
    }
    for (size_t i = 0; i < SHOAL_COUNT_OF(served) && *function; i++) {
        if (strcmp(served[i].name, name) == 0 && served[i].version <= version)
            *function = mock_address(served[i].function);
    }
    *why = *function ? 0 : 1;
    return SHOAL_CU_SUCCESS;
}
