/* Device memory: parts of an unnamed file (memfd) for each device. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mock_driver.h"

#define MEBIBYTE ((size_t)1 << 20)
#define FIRST_OFFSET ((uint64_t)1 << 20) /* in a device's file, after the ledger */
#define POISONED_WHOLE (16 * MEBIBYTE)   /* larger memory is poisoned only at its ends */
#define MANAGED_FLAGS_MAX 4

static struct mock_arena arenas[MOCK_DEVICES_MAX];

/* ---- Allocating ---------------------------------------------------------------------------------------------------------- */

struct mock_arena *mock_arena_of(int device)
{
    struct mock_arena *arena = &arenas[device];
    if (arena->is_open)
        return arena;
    arena->fd = memfd_create("mock_cuda", MFD_CLOEXEC);
    if (arena->fd < 0)
        return NULL;
    arena->is_open = true;
    arena->end = FIRST_OFFSET;
    return arena;
}

/* Returns bytes of a device's file that were never used. */
static char *take_bytes(struct mock_arena *arena, size_t room)
{
    if (ftruncate(arena->fd, (off_t)(arena->end + room)) != 0)
        return NULL;
    void *alias = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd, (off_t)arena->end);
    return alias == MAP_FAILED ? NULL : alias;
}

static void poison_new(char *alias, size_t bytes)
{
    const size_t end = bytes <= POISONED_WHOLE ? bytes : MEBIBYTE;
    memset(alias, MOCK_CUDA_POISON, end);
    memset(alias + bytes - end, MOCK_CUDA_POISON, end);
}

static shoal_cu_result make_plain(struct mock_context *context, enum mock_region_kind kind, size_t bytes,
                                  shoal_cu_address *address_out)
{
    const size_t room = shoal_round_up(bytes, SHOAL_PAGE);
    struct mock_arena *arena = mock_arena_of(context->device);
    if (!bytes)
        return SHOAL_CU_INVALID_VALUE;
    if (!arena || arena->used + room > (size_t)mock.modes.memory * MEBIBYTE)
        return SHOAL_CU_OUT_OF_MEMORY;
    char *alias = take_bytes(arena, room);
    const shoal_cu_address at = alias ? mock_reserve(bytes) : 0;
    if (!at) {
        if (alias)
            munmap(alias, room);
        return SHOAL_CU_OUT_OF_MEMORY;
    }
    struct mock_region *region = mock_region_add(kind, at, bytes, alias);
    region->room = room;
    region->context = kind == MOCK_POOL_MEMORY ? NULL : context;
    region->device = context->device;
    region->offset = arena->end;
    arena->end += room;
    arena->used += room;
    poison_new(alias, bytes);
    *address_out = at;
    return SHOAL_CU_SUCCESS;
}

static shoal_cu_result make_managed(struct mock_context *context, size_t bytes, shoal_cu_address *address_out)
{
    const size_t room = shoal_round_up(bytes, SHOAL_PAGE);
    void *at = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return SHOAL_CU_OUT_OF_MEMORY;
    struct mock_region *region = mock_region_add(MOCK_MANAGED_MEMORY, (uintptr_t)at, bytes, at);
    region->room = room;
    region->context = context;
    region->device = context->device;
    *address_out = (uintptr_t)at;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_allocate(shoal_cu_address *address, size_t bytes)
{
    ENTER("cuMemAlloc", MOCK_CURRENT | MOCK_UNSAFE);
    return make_plain(call.context, MOCK_PLAIN_MEMORY, bytes, address);
}

shoal_cu_result mock_allocate_managed(shoal_cu_address *address, size_t bytes, unsigned flags)
{
    ENTER("cuMemAllocManaged", MOCK_CURRENT | MOCK_UNSAFE);
    if (!bytes || !flags || flags > MANAGED_FLAGS_MAX)
        return SHOAL_CU_INVALID_VALUE;
    return make_managed(call.context, bytes, address);
}

/* Allocates at once instead of on the stream: programs cannot notice the difference. */
shoal_cu_result mock_allocate_async(shoal_cu_address *address, size_t bytes, shoal_cu_stream handle)
{
    ENTER("cuMemAllocAsync", MOCK_CURRENT);
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(&call, handle, &stream));
    return make_plain(stream->context, MOCK_POOL_MEMORY, bytes, address);
}

/* ---- Freeing ------------------------------------------------------------------------------------------------------------- */

/* No operation may use the region. */
void mock_free_region(struct mock_region *region)
{
    munmap(region->alias, region->room);
    if (region->kind != MOCK_MANAGED_MEMORY && !mock.is_forked) { /* the parent's memory remains */
        mock_ledger_close(region);
        struct mock_arena *arena = &arenas[region->device];
        (void)fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)region->offset, (off_t)region->room);
        arena->used -= region->room;
        mock_unreserve(region->at, region->bytes);
    }
    mock_region_drop(region);
}

static bool can_be_freed(const struct mock_region *region, shoal_cu_address address)
{
    const bool is_kind = region && (region->kind == MOCK_PLAIN_MEMORY || region->kind == MOCK_MANAGED_MEMORY ||
                                    region->kind == MOCK_POOL_MEMORY);
    return is_kind && region->at == address && !region->is_dying;
}

/* Like a real driver, waits for work in progress, at least for work on this memory. */
shoal_cu_result mock_release(shoal_cu_address address)
{
    ENTER("cuMemFree", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_region *region = mock_region_find(address);
    if (!can_be_freed(region, address))
        return SHOAL_CU_INVALID_VALUE;
    region->is_dying = true;
    if (region->kind != MOCK_POOL_MEMORY)
        mock_wait_idle(&call);
    mock_wait_unused(region);
    mock_free_region(region);
    return call.context->sticky;
}

shoal_cu_result mock_release_async(shoal_cu_address address, shoal_cu_stream handle)
{
    ENTER("cuMemFreeAsync", MOCK_CURRENT);
    struct mock_region *region = mock_region_find(address);
    struct mock_stream *stream;
    if (!can_be_freed(region, address))
        return SHOAL_CU_INVALID_VALUE;
    MOCK_TRY(mock_stream_for_work(&call, handle, &stream));
    region->is_dying = true;
    struct mock_op *op = mock_op_make(MOCK_FREE_MEMORY, NULL, NULL);
    op->region = region;
    mock_post(stream, op);
    return SHOAL_CU_SUCCESS;
}

/* ---- All memory ---------------------------------------------------------------------------------------------------------- */

size_t mock_memory_count(bool is_host)
{
    size_t count = 0;
    struct mock_region *region = NULL;
    while ((region = mock_region_next(region)))
        count += (region->kind == MOCK_HOST_MEMORY) == is_host && region->kind != MOCK_MAPPED_MEMORY;
    return count;
}

static void forget_region(struct mock_region *region)
{
    if (region->kind == MOCK_HOST_MEMORY)
        mock_host_forget(region);
    else if (region->kind == MOCK_IMPORTED_MEMORY)
        mock_import_forget(region);
    else
        mock_free_region(region);
}

/* Memory of pools and mapped memory belong to no context. */
static struct mock_region *find_of(const struct mock_context *context)
{
    struct mock_region *region = NULL;
    while ((region = mock_region_next(region)) && region->context != context)
        continue;
    return region;
}

/* Streams of other contexts may also use it. */
void mock_memory_forget(const struct mock_context *context)
{
    struct mock_region *region;
    while ((region = find_of(context))) {
        region->is_dying = true;
        mock_wait_unused(region);
        forget_region(region);
    }
}

static void close_arena(struct mock_arena *arena)
{
    mock_ledger_unmap(arena->ledger);
    if (arena->is_open)
        close(arena->fd);
    memset(arena, 0, sizeof *arena);
}

void mock_memory_reset(void)
{
    mock_virtual_reset();
    struct mock_region *region;
    while ((region = mock_region_next(NULL)))
        forget_region(region);
    mock_regions_reset();
    for (int i = 0; i < MOCK_DEVICES_MAX; i++)
        close_arena(&arenas[i]);
    mock_host_reset();
}
