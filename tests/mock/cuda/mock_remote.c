/* The processor's writes to device memory past the driver, for the stand-in of GDRCopy (mock_gdr.c). Such writes are on their
 * way until a stream's flushing wait or a read of the device makes them arrive. Or they arrive at once, by a random number,
 * whatever the device still does with the memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mock_driver.h"
#include "mock_remote.h"

struct remote {
    struct remote *next;
    shoal_cu_address at;
    size_t bytes;
    char data[];
};

static struct remote *oldest, *newest; /* writes on their way, in order */
static size_t writes, pins;
static uint64_t newest_buffer; /* of all that is or was pinned */

/* ---- Arrival ------------------------------------------------------------------------------------------------------------- */

/* Memory that is being freed still exists. */
static char *find_bytes(shoal_cu_address at, size_t bytes)
{
    const struct mock_region *region = mock_region_find(at);
    return region && at + bytes <= region->at + region->bytes ? region->alias + (at - region->at) : NULL;
}

void mock_remote_flush(void)
{
    while (oldest) {
        struct remote *remote = oldest;
        char *to = find_bytes(remote->at, remote->bytes);
        if (to)
            memcpy(to, remote->data, remote->bytes);
        oldest = remote->next;
        free(remote);
    }
    newest = NULL;
}

size_t mock_count_remote_writes(void)
{
    return writes;
}

size_t mock_count_pins(void)
{
    return pins;
}

void mock_remote_reset(void)
{
    while (oldest) {
        struct remote *remote = oldest;
        oldest = remote->next;
        free(remote);
    }
    newest = NULL;
    writes = pins = 0;
}

/* ---- For GDRCopy --------------------------------------------------------------------------------------------------------- */

bool mock_remote_is_there(void)
{
    return mock.modes.gdrcopy != 0;
}

int mock_remote_enter(const char *name)
{
    ENTER(name, MOCK_ANYTIME);
    return 0;
}

/* Returns true if a page contains device memory that can be mapped. A dma-buf is made in its context. */
static bool has_memory(shoal_cu_address at, size_t bytes)
{
    bool is_destroyed;
    const struct mock_context *current = mock_current(&is_destroyed);
    const struct mock_region *region = NULL;
    while ((region = mock_region_next(region)))
        if (region->kind == MOCK_PLAIN_MEMORY && region->at < at + bytes && at < region->at + region->bytes)
            return region->context == current;
    return false;
}

int mock_remote_pin(shoal_cu_address at, size_t bytes, uint64_t *pin_out)
{
    pthread_mutex_lock(&mock.lock);
    const struct mock_region *region = NULL;
    const bool is_there = has_memory(at, bytes);
    while ((region = mock_region_next(region)))
        newest_buffer = region->buffer > newest_buffer ? region->buffer : newest_buffer;
    *pin_out = newest_buffer;
    pins += is_there;
    pthread_mutex_unlock(&mock.lock);
    return is_there ? 0 : EINVAL;
}

void mock_remote_unpin(void)
{
    pthread_mutex_lock(&mock.lock);
    pins--;
    pthread_mutex_unlock(&mock.lock);
}

static bool check_mapped(uint64_t pin, shoal_cu_address at, size_t bytes, const char *doing)
{
    const struct mock_region *region = mock_region_find(at);
    if (find_bytes(at, bytes) && region->kind == MOCK_PLAIN_MEMORY && region->buffer <= pin)
        return true;
    mock_fault("the processor %s %zu bytes of a device through a mapping of memory that was freed", doing, bytes);
    return false;
}

void mock_remote_write(uint64_t pin, shoal_cu_address at, const void *from, size_t bytes)
{
    pthread_mutex_lock(&mock.lock);
    if (check_mapped(pin, at, bytes, "writes")) {
        struct remote *remote = mock_allocate_zeroed(sizeof *remote + bytes);
        remote->at = at;
        remote->bytes = bytes;
        memcpy(remote->data, from, bytes);
        *(newest ? &newest->next : &oldest) = remote;
        newest = remote;
        writes++;
        if (mock_draw(2))
            mock_remote_flush();
    }
    pthread_mutex_unlock(&mock.lock);
}

void mock_remote_read(uint64_t pin, shoal_cu_address at, void *to, size_t bytes)
{
    pthread_mutex_lock(&mock.lock);
    mock_remote_flush();
    if (check_mapped(pin, at, bytes, "reads"))
        memcpy(to, find_bytes(at, bytes), bytes);
    pthread_mutex_unlock(&mock.lock);
}
