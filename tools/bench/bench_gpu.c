#include "bench_gpu.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long device_address;

enum { LEGACY_STREAM = 1 }; /* for entry points in which no stream means the legacy stream */

/* member, name, first CUDA version with this signature, signature */
#define CALLS(X)                                                                            \
    X(init, "cuInit", 2000, (unsigned flags))                                               \
    X(error_name, "cuGetErrorName", 6000, (int result, const char **name))                  \
    X(device_count, "cuDeviceGetCount", 2000, (int *count))                                 \
    X(device_get, "cuDeviceGet", 2000, (int *device, int number))                           \
    X(context_retain, "cuDevicePrimaryCtxRetain", 7000, (void **context, int device))       \
    X(context_release, "cuDevicePrimaryCtxRelease", 11000, (int device))                    \
    X(context_set, "cuCtxSetCurrent", 4000, (void *context))                                \
    X(context_wait, "cuCtxSynchronize", 2000, (void))                                       \
    X(allocate, "cuMemAlloc", 3020, (device_address * at, size_t bytes))                    \
    X(release, "cuMemFree", 3020, (device_address at))                                      \
    X(upload, "cuMemcpyHtoD", 3020, (device_address there, const void *here, size_t bytes)) \
    X(download, "cuMemcpyDtoH", 3020, (void *here, device_address there, size_t bytes))     \
    X(host_register, "cuMemHostRegister", 6050, (void *here, size_t bytes, unsigned flags)) \
    X(host_unregister, "cuMemHostUnregister", 4000, (void *here))

struct bench_gpu {
#define MEMBER(member, name, version, signature) int(*member) signature;
    CALLS(MEMBER)
#undef MEMBER
    int device;
    bool is_retained;
    device_address memory;
    void *registered;
};

static bool refuse(const struct bench_gpu *gpu, const char *call, int result)
{
    const char *name = NULL;
    if (!result)
        return true;
    if (gpu->error_name(result, &name) || !name)
        name = "an error";
    fprintf(stderr, "shoal bench: --memory gpu: %s answered %s (%d)\n", call, name, result);
    return false;
}
#define MUST(gpu, member, ...) refuse(gpu, #member, (gpu)->member(__VA_ARGS__))

/* Asks for each function by its own version, because one name may have several signatures. */
static bool find_calls(struct bench_gpu *gpu, void *driver)
{
    int (*find)(const char *name, void **function, int version, uint64_t flags, int *why);
    void *finder = dlsym(driver, "cuGetProcAddress_v2"), *found;
    int why;
    if (!finder) {
        fprintf(stderr, "shoal bench: --memory gpu needs a driver of CUDA 12 or newer\n");
        return false;
    }
    memcpy(&find, &finder, sizeof find);
#define FIND(member, name, version, signature)                                      \
    found = NULL;                                                                   \
    if (find(name, &found, version, LEGACY_STREAM, &why) || !found) {               \
        fprintf(stderr, "shoal bench: --memory gpu: the driver has no %s\n", name); \
        return false;                                                               \
    }                                                                               \
    memcpy(&gpu->member, &found, sizeof found);
    CALLS(FIND)
#undef FIND
    return true;
}

/* Returns this process's number on its host. The communicator also knows it, but is created later. */
static int local_rank(void)
{
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "RANK"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (value)
            return atoi(value);
    }
    return 0;
}

static bool take_context(struct bench_gpu *gpu)
{
    void *context;
    int count = 0;
    if (!MUST(gpu, init, 0) || !MUST(gpu, device_count, &count))
        return false;
    if (!count) {
        fprintf(stderr, "shoal bench: --memory gpu: the driver shows no device\n");
        return false;
    }
    if (!MUST(gpu, device_get, &gpu->device, local_rank() % count) || !MUST(gpu, context_retain, &context, gpu->device))
        return false;
    gpu->is_retained = true;
    return MUST(gpu, context_set, context);
}

struct bench_gpu *bench_gpu_open(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "shoal bench: --memory gpu: no CUDA driver: %s\n", dlerror());
        return NULL;
    }
    struct bench_gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu && find_calls(gpu, driver) && take_context(gpu))
        return gpu;
    bench_gpu_close(gpu);
    return NULL;
}

bool bench_gpu_allocate(struct bench_gpu *gpu, size_t bytes, char **memory_out)
{
    if (!MUST(gpu, allocate, &gpu->memory, bytes))
        return false;
    *memory_out = (char *)(uintptr_t)gpu->memory;
    return true;
}

bool bench_gpu_upload(const struct bench_gpu *gpu, char *there, const char *here, size_t bytes)
{
    return !bytes || MUST(gpu, upload, (device_address)(uintptr_t)there, here, bytes);
}

bool bench_gpu_download(const struct bench_gpu *gpu, char *here, const char *there, size_t bytes)
{
    return !bytes || MUST(gpu, download, here, (device_address)(uintptr_t)there, bytes);
}

bool bench_gpu_wait(const struct bench_gpu *gpu)
{
    return MUST(gpu, context_wait);
}

void bench_gpu_register(struct bench_gpu *gpu, void *here, size_t bytes)
{
    if (gpu->host_register(here, bytes, 0) == 0)
        gpu->registered = here;
}

/* Ignores errors of the driver: nothing can be done about them at the end. */
void bench_gpu_close(struct bench_gpu *gpu)
{
    if (!gpu)
        return;
    if (gpu->registered)
        (void)gpu->host_unregister(gpu->registered);
    if (gpu->memory)
        (void)gpu->release(gpu->memory);
    if (gpu->is_retained)
        (void)gpu->context_release(gpu->device);
    free(gpu);
}
