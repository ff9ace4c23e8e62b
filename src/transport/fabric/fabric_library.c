#include "transport/fabric/fabric_library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "base/bundled.h"

/* The parts of fi_version. RDM endpoints with RMA and data in completions are much older than this version. */
#define MAJOR(version) ((version) >> 16)
#define MINOR(version) ((version)&0xffff)
#define OLDEST_MINOR 10

/* On the machine: the vendors' folders, and the loader's own search. */
static const char *const places[] = {
    "/opt/amazon/efa/lib64/libfabric.so.1",
    "/opt/amazon/efa/lib/libfabric.so.1",
    "/usr/local/lib/libfabric.so.1",
    "libfabric.so.1",
};

/* Structures changed with these versions of the symbols; third_party/libfabric declares these versions. */
static void *find_function(void *handle, const char *name, const char *version)
{
    return dlvsym(handle, name, version);
}

static uint32_t version_of(void *handle)
{
    uint32_t (*version)(void);
    void *found = find_function(handle, "fi_version", "FABRIC_1.0");
    if (!found)
        return 0;
    memcpy(&version, &found, sizeof version);
    return version();
}

static bool bind(struct shoal_fabric_library *library)
{
    const struct {
        const char *name, *version;
        void *function;
    } functions[] = {
        {"fi_getinfo", "FABRIC_1.3", &library->getinfo},     {"fi_freeinfo", "FABRIC_1.3", &library->freeinfo},
        {"fi_dupinfo", "FABRIC_1.3", &library->dupinfo},     {"fi_fabric", "FABRIC_1.1", &library->fabric},
        {"fi_strerror", "FABRIC_1.0", &library->error_text},
    };
    for (size_t i = 0; i < SHOAL_COUNT_OF(functions); i++) {
        void *found = find_function(library->handle, functions[i].name, functions[i].version);
        if (!found)
            return false;
        memcpy(functions[i].function, &found, sizeof found);
    }
    return true;
}

/* Returns false if that place has no usable library. A library stays loaded, because its providers have threads and keep data
 * for the next use. */
static bool open_at(const char *place, struct shoal_fabric_library *library_out)
{
    struct link_map *map;
    *library_out = (struct shoal_fabric_library){.handle = dlopen(place, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)};
    if (!library_out->handle)
        return false;
    const uint32_t version = version_of(library_out->handle);
    library_out->major = MAJOR(version);
    library_out->minor = MINOR(version);
    if (dlinfo(library_out->handle, RTLD_DI_LINKMAP, &map) == 0)
        snprintf(library_out->path, sizeof library_out->path, "%s", map->l_name);
    const bool is_new_enough = library_out->major > 1 || library_out->minor >= OLDEST_MINOR;
    if (version && is_new_enough && bind(library_out))
        return true;
    shoal_fabric_library_close(library_out);
    return false;
}

static bool is_newer(const struct shoal_fabric_library *a, const struct shoal_fabric_library *b)
{
    return a->major != b->major ? a->major > b->major : a->minor > b->minor;
}

static enum shoal_status open_named(const char *wanted, struct shoal_log *log, struct shoal_fabric_library *library_out)
{
    if (open_at(wanted, library_out))
        return SHOAL_OK;
    void *handle = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "fabric", "SHOAL_LIBFABRIC cannot be loaded: %s", dlerror());
    dlclose(handle);
    return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "fabric", "SHOAL_LIBFABRIC=%s is not libfabric 1.%d or newer", wanted,
                          OLDEST_MINOR);
}

enum shoal_status shoal_fabric_library_open(const char *wanted, struct shoal_log *log, struct shoal_fabric_library *library_out)
{
    struct shoal_fabric_library best = {.handle = NULL}, other;
    char bundled[PATH_MAX];
    if (wanted[0])
        return open_named(wanted, log, library_out);
    for (size_t i = 0; i < SHOAL_COUNT_OF(places); i++) {
        if (!open_at(places[i], &other))
            continue;
        if (!best.handle || is_newer(&other, &best)) {
            shoal_fabric_library_close(&best);
            best = other;
        } else {
            shoal_fabric_library_close(&other);
        }
    }
    /* The bundled one may be newer, but the machine's knows its network cards. */
    if (!best.handle && shoal_bundled_find("libfabric.so.1", bundled))
        (void)open_at(bundled, &best);
    *library_out = best;
    if (best.handle)
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_UNSUPPORTED, "fabric",
                          "several hosts need libfabric 1.%d or newer, and none can be loaded (libfabric.so.1, and in "
                          "/opt/amazon/efa, /usr/local/lib, next to libshoal); install libfabric1, or name the file in "
                          "SHOAL_LIBFABRIC",
                          OLDEST_MINOR);
}

void shoal_fabric_library_close(struct shoal_fabric_library *library)
{
    if (library->handle)
        dlclose(library->handle);
    library->handle = NULL;
}
