/* Device addresses, and the memory at them. A device address is in a reserved range that neither the CPU nor system calls can
 * access; the bytes are stored elsewhere. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "mock_driver.h"

static struct mock_ranges reserved; /* includes freed memory's */
static struct mock_ranges memory;   /* by device address */
static uint64_t next_buffer = 1;

/* Freed addresses, for the mode "reuse". */
static struct hole {
    struct hole *next;
    shoal_cu_address at;
    size_t bytes;
} * holes;

/* ---- Addresses ----------------------------------------------------------------------------------------------------------- */

static size_t room_for(size_t bytes)
{
    return shoal_round_up(bytes, SHOAL_PAGE) + SHOAL_PAGE; /* the last page is never used */
}

static shoal_cu_address take_hole(size_t bytes)
{
    struct hole **link = &holes;
    while (*link && (*link)->bytes != bytes)
        link = &(*link)->next;
    struct hole *hole = *link;
    if (!hole)
        return 0;
    const shoal_cu_address at = hole->at;
    *link = hole->next;
    free(hole);
    return at;
}

shoal_cu_address mock_reserve(size_t bytes)
{
    const size_t room = room_for(bytes);
    const shoal_cu_address again = mock.modes.reuse ? take_hole(room) : 0;
    if (again)
        return again;
    void *at = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return 0;
    mock_ranges_add(&reserved, (uintptr_t)at, room, NULL);
    return (uintptr_t)at;
}

/* The addresses remain reserved, so that uses of freed memory are detected. */
void mock_unreserve(shoal_cu_address at, size_t bytes)
{
    struct hole *hole = mock_allocate_zeroed(sizeof *hole);
    hole->next = holes;
    hole->at = at;
    hole->bytes = room_for(bytes);
    holes = hole;
}

bool mock_is_reserved(uint64_t at)
{
    return mock_ranges_overlap(&reserved, at, 1);
}

/* ---- Regions ------------------------------------------------------------------------------------------------------------- */

struct mock_region *mock_region_add(enum mock_region_kind kind, shoal_cu_address at, size_t bytes, char *alias)
{
    struct mock_region *region = mock_allocate_zeroed(sizeof *region);
    region->kind = kind;
    region->at = at;
    region->bytes = bytes;
    region->alias = alias;
    region->buffer = next_buffer++;
    region->slot = -1;
    mock_ranges_add(&memory, at, bytes, region);
    return region;
}

void mock_region_drop(struct mock_region *region)
{
    mock_ranges_remove(&memory, region->at);
    free(region);
}

struct mock_region *mock_region_find(shoal_cu_address at)
{
    return mock_ranges_find(&memory, at);
}

struct mock_region *mock_region_next(const struct mock_region *region)
{
    size_t i = 0;
    while (region && memory.items[i].region != region)
        i++;
    i += region != NULL;
    return i < memory.count ? memory.items[i].region : NULL;
}

/* Nobody knows what a kernel uses, so this waits for all kernels. */
void mock_wait_unused(const struct mock_region *region)
{
    while (region->uses || mock_has_launches())
        pthread_cond_wait(&mock.changed, &mock.lock);
}

/* ---- Parts of memory ----------------------------------------------------------------------------------------------------- */

static bool is_usable(const struct mock_region *region)
{
    return region && !region->is_dying && (!region->reservation || region->readers);
}

/* Mapped memory is contiguous across several mappings. */
static bool is_all_there(const struct mock_region *region, shoal_cu_address at, size_t bytes)
{
    const shoal_cu_address end = at + bytes;
    while (is_usable(region) && region->at + region->bytes < end) {
        const struct mock_region *next = mock_region_find(region->at + region->bytes);
        region = region->reservation && next && next->reservation == region->reservation ? next : NULL;
    }
    return is_usable(region);
}

shoal_cu_result mock_find_device_span(shoal_cu_address at, size_t bytes, struct mock_span *span)
{
    struct mock_region *region = mock_region_find(at);
    if (!region || !is_all_there(region, at, bytes))
        return SHOAL_CU_INVALID_VALUE;
    span->holder = region->reservation ? region->reservation : region;
    span->bytes = span->holder->alias + (at - span->holder->at);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_find_host_span(const void *at, size_t bytes, struct mock_span *span)
{
    const uint64_t begin = (uintptr_t)at;
    struct mock_region *managed = mock_region_find(begin);
    struct mock_region *region = managed ? managed : mock_host_find(begin);
    const bool is_managed = managed && managed->kind == MOCK_MANAGED_MEMORY;
    if (!at || (!is_managed && mock_is_reserved(begin)))
        return SHOAL_CU_INVALID_VALUE;
    span->bytes = (char *)(uintptr_t)begin;
    span->holder = region;
    if (!region)
        return mock_host_overlaps(begin, bytes) ? SHOAL_CU_INVALID_VALUE : SHOAL_CU_SUCCESS;
    const uint64_t end = (uintptr_t)region->alias + region->bytes;
    return begin + bytes <= end && !region->is_dying ? SHOAL_CU_SUCCESS : SHOAL_CU_INVALID_VALUE;
}

shoal_cu_result mock_find_span(shoal_cu_address at, size_t bytes, struct mock_span *span)
{
    if (mock_region_find(at))
        return mock_find_device_span(at, bytes, span);
    return mock_find_host_span((const void *)(uintptr_t)at, bytes, span);
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

/* Requires that no region is left. */
void mock_regions_reset(void)
{
    while (holes) {
        struct hole *hole = holes;
        holes = hole->next;
        free(hole);
    }
    for (size_t i = 0; i < reserved.count; i++)
        munmap((void *)(uintptr_t)reserved.items[i].begin, reserved.items[i].end - reserved.items[i].begin);
    mock_ranges_clear(&reserved);
    mock_ranges_clear(&memory);
}

MOCK_API bool mock_cuda_peek(shoal_cu_address at, void *to, size_t bytes)
{
    struct mock_span span;
    pthread_mutex_lock(&mock.lock);
    const bool is_there = mock_find_device_span(at, bytes, &span) == SHOAL_CU_SUCCESS;
    if (is_there)
        memcpy(to, span.bytes, bytes);
    pthread_mutex_unlock(&mock.lock);
    return is_there;
}
