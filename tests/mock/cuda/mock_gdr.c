/* GDRCopy's library of our own, libgdrapi.so.2, over the stand-in driver (mock_remote.c). It has the same entry points, and a
 * mapping that the processor can access only through them. A program loads it by its path before Shoal asks for it. It works
 * only if the stand-in's mode "gdrcopy" is on. Concurrent calls that the real library does not allow end the program. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/cuda/gdr_library.h"
#include "mock_remote.h"

#define GDR_API __attribute__((visibility("default")))
#define PINS_MAX 64 /* limit of the BAR */
#define CALL_US 100

/* The target of a handle. */
struct pinned {
    shoal_cu_address at;
    size_t bytes;
    uint64_t pin;
    char *memory; /* NULL: not mapped */
};

/* What gdr_open returns. */
struct shoal_gdr_of {
    size_t pinned;
};

static atomic_flag is_busy = ATOMIC_FLAG_INIT;
static size_t pinned_count; /* over all handles */

static void expect(bool is_right, const char *what)
{
    if (is_right)
        return;
    fprintf(stderr, "mock_gdr: %s\n", what);
    abort();
}

/* The real library counts open, pinned and mapped objects in global variables without a lock. Each call here takes a moment,
 * so that concurrent calls meet. */
static void begin_call(void)
{
    expect(!atomic_flag_test_and_set(&is_busy), "two calls at once");
    usleep(CALL_US);
}

static void end_call(void)
{
    atomic_flag_clear(&is_busy);
}

static struct pinned *of(struct shoal_gdr_handle handle)
{
    return (struct pinned *)handle.value;
}

static shoal_cu_address device_address(const struct pinned *pinned, const void *at, size_t bytes)
{
    const char *const here = at;
    expect(pinned->memory && here >= pinned->memory && here + bytes <= pinned->memory + pinned->bytes, "not in the mapping");
    return pinned->at + (shoal_cu_address)(here - pinned->memory);
}

GDR_API void gdr_runtime_get_version(int *major, int *minor);
GDR_API void gdr_runtime_get_version(int *major, int *minor)
{
    *major = 2;
    *minor = 5;
}

GDR_API struct shoal_gdr_of *gdr_open(void);
GDR_API struct shoal_gdr_of *gdr_open(void)
{
    begin_call();
    struct shoal_gdr_of *gdr = mock_remote_is_there() ? calloc(1, sizeof *gdr) : NULL;
    end_call();
    return gdr;
}

GDR_API int gdr_close(struct shoal_gdr_of *gdr);
GDR_API int gdr_close(struct shoal_gdr_of *gdr)
{
    begin_call();
    expect(!gdr->pinned, "gdr_close while something is pinned");
    free(gdr);
    end_call();
    return 0;
}

GDR_API int gdr_driver_get_version(struct shoal_gdr_of *gdr, int *major, int *minor);
GDR_API int gdr_driver_get_version(struct shoal_gdr_of *gdr, int *major, int *minor)
{
    (void)gdr, (void)major, (void)minor;
    expect(false, "gdr_driver_get_version, which asserts that there is a kernel module");
    return 0;
}

static int pin_pages(struct shoal_gdr_of *gdr, shoal_cu_address at, size_t bytes, struct shoal_gdr_handle *handle)
{
    uint64_t pin;
    const int error = mock_remote_pin(at, bytes, &pin);
    struct pinned *pinned = error ? NULL : calloc(1, sizeof *pinned);
    if (error)
        return error;
    expect(pinned != NULL, "no memory");
    *pinned = (struct pinned){at, bytes, pin, NULL};
    handle->value = (unsigned long)pinned;
    gdr->pinned++;
    pinned_count++;
    return 0;
}

GDR_API int gdr_pin_buffer(struct shoal_gdr_of *gdr, unsigned long at, size_t bytes, uint64_t token, uint32_t space,
                           struct shoal_gdr_handle *handle);
GDR_API int gdr_pin_buffer(struct shoal_gdr_of *gdr, unsigned long at, size_t bytes, uint64_t token, uint32_t space,
                           struct shoal_gdr_handle *handle)
{
    begin_call();
    int error = mock_remote_enter("gdr_pin_buffer");
    expect(!token && !space, "gdr_pin_buffer with other arguments");
    expect(bytes && at % SHOAL_GDR_PAGE == 0 && bytes % SHOAL_GDR_PAGE == 0, "gdr_pin_buffer of parts of pages");
    if (!error)
        error = pinned_count < PINS_MAX ? pin_pages(gdr, at, bytes, handle) : ENOMEM;
    end_call();
    return error;
}

GDR_API int gdr_unpin_buffer(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle);
GDR_API int gdr_unpin_buffer(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle)
{
    begin_call();
    const int error = mock_remote_enter("gdr_unpin_buffer");
    expect(!of(handle)->memory, "gdr_unpin_buffer of what is mapped");
    mock_remote_unpin();
    free(of(handle));
    gdr->pinned--;
    pinned_count--;
    end_call();
    return error;
}

static int map_pages(struct pinned *pinned, void **memory)
{
    *memory = mmap(NULL, pinned->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(*memory != MAP_FAILED, "no addresses");
    pinned->memory = *memory;
    return 0;
}

GDR_API int gdr_map(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle, void **memory, size_t bytes);
GDR_API int gdr_map(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle, void **memory, size_t bytes)
{
    begin_call();
    int error = mock_remote_enter("gdr_map");
    expect(gdr->pinned && !of(handle)->memory && bytes == of(handle)->bytes, "gdr_map of something else");
    if (!error)
        error = map_pages(of(handle), memory);
    end_call();
    return error;
}

GDR_API int gdr_unmap(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle, void *memory, size_t bytes);
GDR_API int gdr_unmap(struct shoal_gdr_of *gdr, struct shoal_gdr_handle handle, void *memory, size_t bytes)
{
    begin_call();
    const int error = mock_remote_enter("gdr_unmap");
    expect(gdr->pinned && memory == of(handle)->memory && bytes == of(handle)->bytes, "gdr_unmap of something else");
    munmap(memory, bytes);
    of(handle)->memory = NULL;
    end_call();
    return error;
}

/* May be called by any thread, even one that may not call a driver. */
GDR_API int gdr_copy_to_mapping(struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes);
GDR_API int gdr_copy_to_mapping(struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes)
{
    mock_remote_write(of(handle)->pin, device_address(of(handle), to, bytes), from, bytes);
    return 0;
}

GDR_API int gdr_copy_from_mapping(struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes);
GDR_API int gdr_copy_from_mapping(struct shoal_gdr_handle handle, void *to, const void *from, size_t bytes)
{
    mock_remote_read(of(handle)->pin, device_address(of(handle), from, bytes), to, bytes);
    return 0;
}
