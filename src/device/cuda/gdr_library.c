#include "device/cuda/gdr_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "device/gpu.h"

#define LIBRARY "libgdrapi.so.2"
#define MAJOR 2

/* Bytes that a processor has written to a device must arrive before a counter that it writes to memory afterwards. On x86, the
 * library's fence and PCIe's ordering guarantee this. */
#if defined(__x86_64__)
#define IS_ORDERED true
#else
#define IS_ORDERED false
#endif

static const struct gdr_entry {
    const char *name;
    size_t offset; /* of the member */
} gdr_entries[] = {
#define ENTRY(member, name, result, signature) {name, offsetof(struct shoal_gdr_calls, member)},
    SHOAL_GDR_CALL_LIST(ENTRY)
#undef ENTRY
};

static bool gdr_bind(void *library, struct shoal_gdr_calls *calls)
{
    bool has_all = true;
    for (size_t i = 0; i < SHOAL_COUNT_OF(gdr_entries); i++) {
        void *const found = dlsym(library, gdr_entries[i].name);
        has_all &= found != NULL;
        memcpy((char *)calls + gdr_entries[i].offset, &found, sizeof found);
    }
    return has_all;
}

/* It stays loaded: the address of `write` is used until the end. */
struct shoal_gdr_of *shoal_gdr_library_open(struct shoal_gdr_calls *calls_out, const char **reason_out)
{
    int major = 0, minor = 0;
    void *const library = IS_ORDERED ? dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) : NULL;
    *reason_out = IS_ORDERED ? "no " LIBRARY : "it is used on x86-64 only";
    if (!library)
        return NULL;
    *reason_out = LIBRARY " is of another version than 2";
    if (!gdr_bind(library, calls_out))
        return NULL;
    calls_out->version(&major, &minor);
    if (major != MAJOR)
        return NULL;
    *reason_out = LIBRARY " finds no kernel module: /dev/gdrdrv is not there, not allowed, or of another version";
    return calls_out->open();
}

void shoal_gpu_describe_gdrcopy(char *text, size_t bytes)
{
    struct shoal_gdr_calls calls;
    const char *reason;
    int major, minor;
    struct shoal_gdr_of *gdr = shoal_gdr_library_open(&calls, &reason);
    if (!gdr) {
        snprintf(text, bytes, "none (%s)", reason);
        return;
    }
    calls.version(&major, &minor);
    snprintf(text, bytes, "%d.%d", major, minor);
    (void)calls.close(gdr);
}
