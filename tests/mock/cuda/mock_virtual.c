/* Memory in two halves: allocations without an address, and reserved addresses to map them at. Each allocation has its own
 * file, whose descriptor other processes import; a trailer after its bytes names the owner. Reserved addresses have an alias
 * of the same length, so that copies cross several mappings. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mock_driver.h"

#define GRANULARITY ((size_t)2 << 20)
#define MAGIC UINT64_C(0x766d6d20636f6d6b)

/* The end of an allocation's file. */
struct trailer {
    uint64_t magic, bytes;
    int device, handle_types;
};

struct mock_allocation {
    shoal_cu_allocation handle; /* 0: released */
    unsigned handles;           /* the number of releases still needed */
    unsigned mappings;
    int fd;
    struct trailer trailer;
    struct mock_allocation *next;
};

static struct mock_allocation *allocations;
static struct mock_ranges reservations;

/* ---- Allocations --------------------------------------------------------------------------------------------------------- */

static shoal_cu_result check_properties(const struct shoal_cu_allocation_properties *properties)
{
    if (!properties || properties->type != SHOAL_CU_ALLOCATION_PINNED || properties->location.type != SHOAL_CU_LOCATION_DEVICE)
        return SHOAL_CU_INVALID_VALUE;
    if (properties->handle_types & ~SHOAL_CU_HANDLE_POSIX)
        return SHOAL_CU_NOT_SUPPORTED;
    const int device = properties->location.id; /* a number, not a handle */
    return device >= 0 && device < mock.modes.devices ? SHOAL_CU_SUCCESS : SHOAL_CU_INVALID_DEVICE;
}

shoal_cu_result mock_address_granularity(size_t *bytes, const struct shoal_cu_allocation_properties *properties, int option)
{
    ENTER("cuMemGetAllocationGranularity", 0);
    if (option != 0 && option != 1)
        return SHOAL_CU_INVALID_VALUE;
    MOCK_TRY(check_properties(properties));
    *bytes = GRANULARITY;
    return SHOAL_CU_SUCCESS;
}

static struct mock_allocation *add_allocation(int fd, const struct trailer *trailer)
{
    struct mock_allocation *allocation = mock_allocate_zeroed(sizeof *allocation);
    allocation->fd = fd;
    allocation->trailer = *trailer;
    allocation->next = allocations;
    allocations = allocation;
    return allocation;
}

static shoal_cu_allocation give_handle(struct mock_allocation *allocation)
{
    if (allocation->handles++ == 0)
        allocation->handle = (shoal_cu_allocation)mock_handle_make(MOCK_ALLOCATION, allocation);
    return allocation->handle;
}

static void end_if_unused(struct mock_allocation *allocation)
{
    struct mock_allocation **link = &allocations;
    if (allocation->handles || allocation->mappings)
        return;
    while (*link != allocation)
        link = &(*link)->next;
    *link = allocation->next;
    close(allocation->fd);
    free(allocation);
}

static int make_file(const struct trailer *trailer)
{
    const int fd = memfd_create("mock_cuda allocation", MFD_CLOEXEC);
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)trailer->bytes) == 0 &&
        pwrite(fd, trailer, sizeof *trailer, (off_t)trailer->bytes) == (ssize_t)sizeof *trailer)
        return fd;
    close(fd);
    return -1;
}

shoal_cu_result mock_allocation_create(shoal_cu_allocation *handle, size_t bytes,
                                       const struct shoal_cu_allocation_properties *properties, unsigned long long flags)
{
    ENTER("cuMemCreate", 0);
    MOCK_TRY(check_properties(properties));
    if (!bytes || bytes % GRANULARITY || flags)
        return SHOAL_CU_INVALID_VALUE;
    const struct trailer trailer = {
        .magic = MAGIC, .bytes = bytes, .device = properties->location.id, .handle_types = properties->handle_types};
    const int fd = make_file(&trailer);
    if (fd < 0)
        return SHOAL_CU_OUT_OF_MEMORY;
    *handle = give_handle(add_allocation(fd, &trailer));
    return SHOAL_CU_SUCCESS;
}

static struct mock_allocation *find_allocation(shoal_cu_allocation handle)
{
    return mock_handle_find(MOCK_ALLOCATION, (uintptr_t)handle);
}

shoal_cu_result mock_allocation_release(shoal_cu_allocation handle)
{
    ENTER("cuMemRelease", 0);
    struct mock_allocation *allocation = find_allocation(handle);
    if (!allocation)
        return SHOAL_CU_INVALID_VALUE;
    if (--allocation->handles == 0) {
        mock_handle_drop((uintptr_t)handle);
        allocation->handle = 0;
    }
    end_if_unused(allocation);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_allocation_retain(shoal_cu_allocation *handle, void *at)
{
    ENTER("cuMemRetainAllocationHandle", 0);
    const struct mock_region *region = mock_region_find((uintptr_t)at);
    if (!region || !region->allocation)
        return SHOAL_CU_INVALID_VALUE;
    *handle = give_handle(region->allocation);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_allocation_export(void *handle_out, shoal_cu_allocation handle, int type, unsigned long long flags)
{
    ENTER("cuMemExportToShareableHandle", 0);
    const struct mock_allocation *allocation = find_allocation(handle);
    if (!allocation || flags || type != SHOAL_CU_HANDLE_POSIX || !(allocation->trailer.handle_types & type))
        return SHOAL_CU_INVALID_VALUE;
    const int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return SHOAL_CU_OPERATING_SYSTEM;
    memcpy(handle_out, &fd, sizeof fd);
    return SHOAL_CU_SUCCESS;
}

static bool read_trailer(int fd, struct trailer *trailer)
{
    const off_t end = lseek(fd, 0, SEEK_END) - (off_t)sizeof *trailer;
    return end >= 0 && pread(fd, trailer, sizeof *trailer, end) == (ssize_t)sizeof *trailer && trailer->magic == MAGIC &&
           trailer->bytes == (uint64_t)end;
}

/* The caller keeps the descriptor. */
shoal_cu_result mock_allocation_import(shoal_cu_allocation *handle, void *descriptor, int type)
{
    ENTER("cuMemImportFromShareableHandle", 0);
    struct trailer trailer;
    if (type != SHOAL_CU_HANDLE_POSIX || !read_trailer((int)(uintptr_t)descriptor, &trailer))
        return SHOAL_CU_INVALID_VALUE;
    if (trailer.device >= mock.modes.devices)
        return SHOAL_CU_INVALID_DEVICE;
    const int fd = fcntl((int)(uintptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return SHOAL_CU_OPERATING_SYSTEM;
    *handle = give_handle(add_allocation(fd, &trailer));
    return SHOAL_CU_SUCCESS;
}

/* ---- Addresses ----------------------------------------------------------------------------------------------------------- */

static struct mock_region *make_reservation(size_t bytes)
{
    const shoal_cu_address from = mock_reserve(bytes + GRANULARITY);
    void *alias = from ? mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    if (alias == MAP_FAILED)
        return NULL;
    struct mock_region *reservation = mock_allocate_zeroed(sizeof *reservation);
    reservation->kind = MOCK_RESERVATION;
    reservation->at = shoal_round_up((size_t)from, GRANULARITY);
    reservation->bytes = bytes;
    reservation->alias = alias;
    mock_ranges_add(&reservations, reservation->at, bytes, reservation);
    return reservation;
}

shoal_cu_result mock_address_reserve(shoal_cu_address *address, size_t bytes, size_t alignment, shoal_cu_address hint,
                                     unsigned long long flags)
{
    ENTER("cuMemAddressReserve", 0);
    (void)hint;
    if (!bytes || bytes % GRANULARITY || alignment > GRANULARITY || (alignment & (alignment - 1)) || flags)
        return SHOAL_CU_INVALID_VALUE;
    const struct mock_region *reservation = make_reservation(bytes);
    if (!reservation)
        return SHOAL_CU_OUT_OF_MEMORY;
    *address = reservation->at;
    return SHOAL_CU_SUCCESS;
}

/* Returns the mapping at or after an address of the reservation, or NULL. */
static struct mock_region *mapping_from(const struct mock_region *reservation, shoal_cu_address at)
{
    struct mock_region *region = NULL;
    while ((region = mock_region_next(region)))
        if (region->reservation == reservation && region->at >= at)
            return region;
    return NULL;
}

static void end_reservation(struct mock_region *reservation)
{
    mock_ranges_remove(&reservations, reservation->at);
    munmap(reservation->alias, reservation->bytes);
    free(reservation);
}

shoal_cu_result mock_address_free(shoal_cu_address address, size_t bytes)
{
    ENTER("cuMemAddressFree", 0);
    struct mock_region *reservation = mock_ranges_find(&reservations, address);
    if (!reservation || reservation->at != address || reservation->bytes != bytes || mapping_from(reservation, address))
        return SHOAL_CU_INVALID_VALUE;
    end_reservation(reservation);
    return SHOAL_CU_SUCCESS;
}

/* ---- Mapping ------------------------------------------------------------------------------------------------------------- */

static bool is_free_part(const struct mock_region *reservation, shoal_cu_address address, size_t bytes)
{
    if (!reservation || address % GRANULARITY || address + bytes > reservation->at + reservation->bytes)
        return false;
    for (shoal_cu_address at = address; at < address + bytes; at += GRANULARITY)
        if (mock_region_find(at))
            return false;
    return true;
}

shoal_cu_result mock_address_map(shoal_cu_address address, size_t bytes, size_t offset, shoal_cu_allocation handle,
                                 unsigned long long flags)
{
    ENTER("cuMemMap", 0);
    struct mock_region *reservation = mock_ranges_find(&reservations, address);
    struct mock_allocation *allocation = find_allocation(handle);
    if (!allocation || offset || flags || bytes != allocation->trailer.bytes || !is_free_part(reservation, address, bytes))
        return SHOAL_CU_INVALID_VALUE;
    char *alias = reservation->alias + (address - reservation->at);
    if (mmap(alias, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED)
        return SHOAL_CU_OUT_OF_MEMORY;
    struct mock_region *region = mock_region_add(MOCK_MAPPED_MEMORY, address, bytes, alias);
    region->device = allocation->trailer.device;
    region->handle_types = allocation->trailer.handle_types;
    region->reservation = reservation;
    region->allocation = allocation;
    allocation->mappings++;
    return SHOAL_CU_SUCCESS;
}

static void end_mapping(struct mock_region *region)
{
    struct mock_allocation *allocation = region->allocation;
    (void)mmap(region->alias, region->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mock_region_drop(region);
    allocation->mappings--;
    end_if_unused(allocation);
}

/* Finds whole mappings: returns the first one if they fill the range. */
static struct mock_region *find_mappings(shoal_cu_address address, size_t bytes)
{
    struct mock_region *first = mock_region_find(address), *region = first;
    if (!first || !first->reservation || first->at != address)
        return NULL;
    while (region && region->reservation == first->reservation && region->at + region->bytes < address + bytes)
        region = mock_region_find(region->at + region->bytes);
    return region && region->reservation == first->reservation && region->at + region->bytes == address + bytes ? first : NULL;
}

shoal_cu_result mock_address_unmap(shoal_cu_address address, size_t bytes)
{
    ENTER("cuMemUnmap", 0);
    struct mock_region *first = find_mappings(address, bytes);
    if (!first)
        return SHOAL_CU_INVALID_VALUE;
    struct mock_region *reservation = first->reservation;
    mock_wait_unused(reservation);
    struct mock_region *region;
    while ((region = mapping_from(reservation, address)) && region->at < address + bytes)
        end_mapping(region);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_address_access(shoal_cu_address address, size_t bytes, const struct shoal_cu_access *access, size_t count)
{
    ENTER("cuMemSetAccess", 0);
    struct mock_region *region = find_mappings(address, bytes);
    if (!region)
        return SHOAL_CU_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != SHOAL_CU_LOCATION_DEVICE || access[i].location.id < 0 ||
            access[i].location.id >= mock.modes.devices)
            return SHOAL_CU_INVALID_DEVICE;
    for (; region && region->at < address + bytes; region = mapping_from(region->reservation, region->at + 1)) {
        for (size_t i = 0; i < count; i++) {
            const uint64_t bit = UINT64_C(1) << (access[i].location.id % 64);
            if (access[i].flags == SHOAL_CU_ACCESS_READ_WRITE)
                region->readers |= bit;
            else
                region->readers &= ~bit;
        }
    }
    return SHOAL_CU_SUCCESS;
}

/* ---- Export -------------------------------------------------------------------------------------------------------------- */

/* A real dma-buf is made by a kernel driver. Here it is a separate file, whose position is the beginning of the memory in it.
 */
static int open_range(const struct mock_region *region, shoal_cu_address address)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", mock_arena_of(region->device)->fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0)
        (void)lseek(fd, (off_t)(region->offset + (address - region->at)), SEEK_SET);
    return fd;
}

/* The last page belongs wholly to the allocation. */
shoal_cu_result mock_range_export(void *handle, shoal_cu_address address, size_t bytes, int type, unsigned long long flags)
{
    ENTER("cuMemGetHandleForAddressRange", MOCK_CURRENT);
    const struct mock_region *region = mock_region_find(address);
    if (!mock.modes.dmabuf)
        return SHOAL_CU_NOT_SUPPORTED;
    if (!region || region->kind != MOCK_PLAIN_MEMORY || region->is_dying || type != SHOAL_CU_RANGE_DMA_BUF || flags ||
        (address | bytes) % SHOAL_PAGE || address + bytes > region->at + region->room)
        return SHOAL_CU_INVALID_VALUE;
    *(int *)handle = open_range(region, address);
    return *(int *)handle < 0 ? SHOAL_CU_OPERATING_SYSTEM : SHOAL_CU_SUCCESS;
}

void mock_virtual_reset(void)
{
    while (reservations.count) {
        struct mock_region *reservation = reservations.items[0].region, *region;
        while ((region = mapping_from(reservation, 0)))
            end_mapping(region);
        end_reservation(reservation);
    }
    mock_ranges_clear(&reservations);
    while (allocations) {
        allocations->handles = 0;
        mock_handle_drop((uintptr_t)allocations->handle);
        end_if_unused(allocations);
    }
}
