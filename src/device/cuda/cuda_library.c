#include "device/cuda/cuda_library.h"

#include <dlfcn.h>
#include <string.h>

#include "device/cuda/cuda_error.h"

#define LIBRARY "libcuda.so.1"
#define MAJOR(version) ((version) / 1000)
#define MINOR(version) ((version) % 1000 / 10)

/* cuGetProcAddress as of CUDA 12.0, and as of 11.3. */
typedef shoal_cu_result (*find_new_fn)(const char *name, void **function, int version, uint64_t flags, int *why);
typedef shoal_cu_result (*find_old_fn)(const char *name, void **function, int version, uint64_t flags);

struct finder {
    find_new_fn find_new;
    find_old_fn find_old;
};

/* The table of entry points as data. */
static const struct entry {
    const char *name;
    size_t offset; /* of the member */
    int version;
    bool is_needed;
} entries[] = {
#define ENTRY(member, name, version, need, signature) \
    {name, offsetof(struct shoal_cuda_calls, member), version, SHOAL_CUDA_##need},
    SHOAL_CUDA_CALL_LIST(ENTRY)
#undef ENTRY
};

/* Stores a function's address. ISO C has no conversion from void * to a function pointer. */
static bool cuda_symbol(void *library, const char *name, void *function_out)
{
    void *found = dlsym(library, name);
    memcpy(function_out, &found, sizeof found);
    return found != NULL;
}

/* For a name that it does not know, the driver returns success and NULL. */
static void *cuda_find(const struct finder *finder, const struct entry *entry)
{
    void *found = NULL;
    int why = 0;
    const shoal_cu_result result =
        finder->find_new ? finder->find_new(entry->name, &found, entry->version, SHOAL_CU_PROC_LEGACY_STREAM, &why)
                         : finder->find_old(entry->name, &found, entry->version, SHOAL_CU_PROC_LEGACY_STREAM);
    return result == SHOAL_CU_SUCCESS ? found : NULL;
}

static enum shoal_status cuda_bind(struct shoal_log *log, const struct finder *finder, int version,
                                   struct shoal_cuda_calls *calls)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(entries); i++) {
        void *found = cuda_find(finder, &entries[i]);
        if (!found && entries[i].is_needed)
            return shoal_log_fail(
                log, SHOAL_ERR_UNSUPPORTED, "gpu",
                "the CUDA driver " LIBRARY " says it is version %d.%d and has no %s as of %d.%d: its installation "
                "is broken; install the driver again",
                MAJOR(version), MINOR(version), entries[i].name, MAJOR(entries[i].version), MINOR(entries[i].version));
        memcpy((char *)calls + entries[i].offset, &found, sizeof found);
    }
    return SHOAL_OK;
}

/* Every driver reports its version, even before it is initialized. */
static enum shoal_status cuda_check_version(struct shoal_log *log, void *library, int *version_out)
{
    shoal_cu_result (*driver_version)(int *version);
    if (!cuda_symbol(library, "cuDriverGetVersion", &driver_version))
        return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "gpu",
                              LIBRARY " is not a CUDA driver: it has no cuDriverGetVersion; see LD_LIBRARY_PATH");
    const shoal_cu_result result = driver_version(version_out);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(log, NULL, "cuDriverGetVersion", result, "asking the CUDA driver for its version");
    if (*version_out < SHOAL_CUDA_OLDEST)
        return shoal_log_fail(
            log, SHOAL_ERR_UNSUPPORTED, "gpu",
            "the CUDA driver is too old: it serves CUDA %d.%d, and 11.7 is the oldest that can be used; install "
            "driver 515 or newer",
            MAJOR(*version_out), MINOR(*version_out));
    return SHOAL_OK;
}

static enum shoal_status cuda_find_finder(struct shoal_log *log, void *library, struct finder *finder)
{
    if (cuda_symbol(library, "cuGetProcAddress_v2", &finder->find_new) ||
        cuda_symbol(library, "cuGetProcAddress", &finder->find_old))
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "gpu",
                          "the CUDA driver " LIBRARY
                          " has no cuGetProcAddress: its installation is broken; install the driver again");
}

enum shoal_status shoal_cuda_library_open(struct shoal_log *log, struct shoal_cuda_calls *calls_out, int *version_out)
{
    struct finder finder = {NULL, NULL};
    struct shoal_cuda_calls calls;
    int version = 0;
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library)
        return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "gpu",
                              "no CUDA driver (%s); install NVIDIA's driver, or start the container with the GPUs", dlerror());
    SHOAL_TRY(cuda_check_version(log, library, &version));
    SHOAL_TRY(cuda_find_finder(log, library, &finder));
    SHOAL_TRY(cuda_bind(log, &finder, version, &calls));
    const shoal_cu_result result = calls.init(0);
    if (result != SHOAL_CU_SUCCESS)
        return shoal_cuda_fail(log, &calls, "cuInit", result, "starting the CUDA driver");
    *calls_out = calls;
    *version_out = version;
    return SHOAL_OK;
}

int (*shoal_cuda_library_look(bool may_load))(unsigned, int *, void **, shoal_cu_address)
{
    struct shoal_cuda_calls calls = {.pointer_attributes = NULL};
    struct finder finder = {NULL, NULL};
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | (may_load ? 0 : RTLD_NOLOAD));
    const bool has_finder = library && (cuda_symbol(library, "cuGetProcAddress_v2", &finder.find_new) ||
                                        cuda_symbol(library, "cuGetProcAddress", &finder.find_old));
    for (size_t i = 0; has_finder && i < SHOAL_COUNT_OF(entries); i++) {
        void *const found =
            entries[i].offset == offsetof(struct shoal_cuda_calls, pointer_attributes) ? cuda_find(&finder, &entries[i]) : NULL;
        if (found)
            memcpy(&calls.pointer_attributes, &found, sizeof found);
    }
    return calls.pointer_attributes;
}
