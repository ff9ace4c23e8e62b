#include "advise_gpus.h"

#include <ctype.h>
#include <dlfcn.h>
#include <math.h>
#include <string.h>

/* The driver's functions, whose exported names keep their signatures. */
struct driver {
    int (*init)(unsigned flags);
    int (*count)(int *count);
    int (*get)(int *device, int number);
    int (*name)(char *name, int bytes, int device);
    int (*memory)(size_t *bytes, int device);
};

static bool function_find(void *library, const char *name, void *function_out)
{
    void *found = dlsym(library, name);
    memcpy(function_out, &found, sizeof found);
    return found != NULL;
}

static bool driver_load(struct driver *driver)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library && function_find(library, "cuInit", &driver->init) &&
           function_find(library, "cuDeviceGetCount", &driver->count) && function_find(library, "cuDeviceGet", &driver->get) &&
           function_find(library, "cuDeviceGetName", &driver->name) &&
           function_find(library, "cuDeviceTotalMem_v2", &driver->memory);
}

struct advise_gpus advise_gpus_find(void)
{
    const struct advise_gpus none = {.count = 0};
    struct advise_gpus gpus = {.memory_bytes = INFINITY};
    struct driver driver;
    int count = 0;
    if (!driver_load(&driver) || driver.init(0) || driver.count(&count))
        return none;
    for (int i = 0; i < count; i++) {
        int device;
        size_t bytes;
        if (driver.get(&device, i) || driver.memory(&bytes, device))
            return none;
        if (i == 0 && driver.name(gpus.name, sizeof gpus.name, device))
            return none;
        gpus.memory_bytes = fmin(gpus.memory_bytes, (double)bytes);
    }
    gpus.count = (size_t)count;
    return count ? gpus : none;
}

bool advise_gpu_is(const char *name, const char *accelerator)
{
    const size_t length = strlen(accelerator);
    for (const char *at = name; (at = strstr(at, accelerator)); at++)
        if ((at == name || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[length]))
            return true;
    return false;
}
