/* The start of the stand-in, the properties of its devices, and its table of entry points. */
#include <stdio.h>
#include <string.h>

#include "mock_driver.h"

struct mock_driver mock = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static const char *hidden;

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* A child has the driver's memory, but neither its threads nor the lock's owner. */
static void mock_forked(void)
{
    pthread_mutex_init(&mock.lock, NULL);
    pthread_cond_init(&mock.changed, NULL);
    mock_schedule_forked();
    mock_callback_forked();
    mock.is_forked |= mock.is_started;
}

__attribute__((constructor)) static void mock_begin(void)
{
    mock_modes_reset();
    pthread_atfork(NULL, NULL, mock_forked);
}

MOCK_API void mock_cuda_reset(void)
{
    pthread_mutex_lock(&mock.lock);
    mock_schedule_reset();
    mock_contexts_reset();
    mock_modules_reset();
    mock_memory_reset();
    mock_remote_reset();
    mock_calls_reset();
    mock_modes_reset();
    hidden = NULL;
    mock.is_started = mock.is_forked = false;
    mock.epoch++;
    pthread_mutex_unlock(&mock.lock);
}

MOCK_API void mock_cuda_hide(const char *name)
{
    pthread_mutex_lock(&mock.lock);
    hidden = name;
    pthread_mutex_unlock(&mock.lock);
}

/* ---- The driver and its devices ------------------------------------------------------------------------------------------ */

MOCK_API shoal_cu_result cuDriverGetVersion(int *version);
MOCK_API shoal_cu_result cuDriverGetVersion(int *version)
{
    return mock_driver_version(version);
}

shoal_cu_result mock_driver_version(int *version)
{
    ENTER("cuDriverGetVersion", MOCK_ANYTIME);
    *version = mock.modes.version;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_init(unsigned flags)
{
    ENTER("cuInit", MOCK_ANYTIME);
    if (flags)
        return SHOAL_CU_INVALID_VALUE;
    mock.is_started = true;
    return SHOAL_CU_SUCCESS;
}

/* May be called anywhere. */
shoal_cu_result mock_error_name(shoal_cu_result result, const char **name)
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

shoal_cu_result mock_device_count(int *count)
{
    ENTER("cuDeviceGetCount", 0);
    *count = mock.modes.devices;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_device_get(shoal_cu_device *device, int ordinal)
{
    ENTER("cuDeviceGet", 0);
    if (ordinal < 0 || ordinal >= mock.modes.devices)
        return SHOAL_CU_INVALID_DEVICE;
    *device = MOCK_FIRST_DEVICE + ordinal;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_device_name(char *name, int bytes, shoal_cu_device device)
{
    ENTER("cuDeviceGetName", 0);
    const int number = mock_device_number(device);
    if (number < 0)
        return SHOAL_CU_INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "Stand-in %d", number);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_device_pci(char *name, int bytes, shoal_cu_device device)
{
    ENTER("cuDeviceGetPCIBusId", 0);
    const int number = mock_device_number(device);
    if (number < 0)
        return SHOAL_CU_INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "0000:%02x:00.0", number + 1);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_device_attribute(int *value, int attribute, shoal_cu_device device)
{
    ENTER("cuDeviceGetAttribute", 0);
    if (mock_device_number(device) < 0)
        return SHOAL_CU_INVALID_DEVICE;
    switch (attribute) {
    case SHOAL_CU_DEVICE_MAJOR:
        *value = 8;
        break;
    case SHOAL_CU_DEVICE_HOST_REGISTER:
        *value = 1;
        break;
    case SHOAL_CU_DEVICE_STREAM_MEMORY_64:
        *value = mock.modes.values;
        break;
    case SHOAL_CU_DEVICE_DMA_BUF:
        *value = mock.modes.dmabuf;
        break;
    case SHOAL_CU_DEVICE_FLUSH:
        *value = mock.modes.flush;
        break;
    default:
        *value = 0;
        break;
    }
    return SHOAL_CU_SUCCESS;
}

/* ---- Entry points -------------------------------------------------------------------------------------------------------- */

/* The newest CUDA's entry point under a base name, if its signature differs from ours: a program that gets it has asked for
 * the wrong version. */
static shoal_cu_result mock_other_signature(void)
{
    mock_fault("an entry point was called with the signature of another CUDA version");
    return SHOAL_CU_INVALID_VALUE;
}

static const struct entry {
    const char *name;
    int version; /* the first version with this signature */
    void (*function)(void);
} entries[] = {
#define ENTRY(member, name, version, need, signature) {name, version, (void (*)(void))mock_##member},
    SHOAL_CUDA_CALL_LIST(ENTRY) MOCK_CUDA_EXTRA_LIST(ENTRY)
#undef ENTRY
        {"cuCtxGetDevice", 13000, (void (*)(void))mock_other_signature},
    {"cuStreamGetCtx", 12050, (void (*)(void))mock_other_signature},
    {"cuCtxCreate", 11040, (void (*)(void))mock_other_signature},
};

/* Finds the newest entry of that name up to a version. */
static const struct entry *find_entry(const char *name, int version)
{
    const struct entry *found = NULL;
    for (size_t i = 0; i < SHOAL_COUNT_OF(entries); i++) {
        const bool fits = strcmp(entries[i].name, name) == 0 && entries[i].version <= version;
        if (fits && (!found || entries[i].version > found->version))
            found = &entries[i];
    }
    return found;
}

/* Succeeds for an unknown name, and returns NULL. */
MOCK_API shoal_cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *why);
MOCK_API shoal_cu_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *why)
{
    ENTER("cuGetProcAddress", MOCK_ANYTIME);
    const bool is_hidden = (hidden && strcmp(name, hidden) == 0) || version > mock.modes.version;
    const struct entry *entry = is_hidden ? NULL : find_entry(name, version);
    *function = NULL;
    if (why)
        *why = entry ? 0 : 1;
    if (flags != SHOAL_CU_PROC_LEGACY_STREAM)
        return SHOAL_CU_INVALID_VALUE;
    if (entry)
        memcpy(function, &entry->function, sizeof *function);
    return SHOAL_CU_SUCCESS;
}
