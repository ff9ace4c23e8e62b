/* Registered host memory. Its device address always differs from the host's, and the CPU cannot use it. */
#include <string.h>
#include <sys/mman.h>

#include "mock_driver.h"

#define KNOWN_FLAGS (SHOAL_CU_REGISTER_PORTABLE | SHOAL_CU_REGISTER_DEVICEMAP)

static struct mock_ranges pages; /* by the host's addresses, in whole pages, because whole pages are locked */

static uint64_t page_begin(uint64_t at)
{
    return at - at % SHOAL_PAGE;
}

static size_t page_bytes(uint64_t at, size_t bytes)
{
    return shoal_round_up(at % SHOAL_PAGE + bytes, SHOAL_PAGE);
}

/* ---- Look-ups ------------------------------------------------------------------------------------------------------------ */

struct mock_region *mock_host_find(uint64_t at)
{
    struct mock_region *region = mock_ranges_find(&pages, at);
    const uint64_t begin = region ? (uintptr_t)region->alias : 0;
    return region && at >= begin && at < begin + region->bytes ? region : NULL;
}

/* Returns true if a registered byte overlaps, not only its page. */
bool mock_host_overlaps(uint64_t begin, size_t bytes)
{
    if (bytes == 0)
        return false;
    if (mock_host_find(begin) || mock_host_find(begin + bytes - 1))
        return true;
    for (uint64_t at = page_begin(begin); at < begin + bytes; at += SHOAL_PAGE) {
        const struct mock_region *region = mock_ranges_find(&pages, at);
        const uint64_t first = region ? (uintptr_t)region->alias : 0;
        if (region && first >= begin && first < begin + bytes)
            return true;
    }
    return false;
}

static bool is_mapped(uint64_t at, size_t bytes)
{
    return msync((void *)(uintptr_t)page_begin(at), page_bytes(at, bytes), MS_ASYNC) == 0;
}

/* ---- Registering --------------------------------------------------------------------------------------------------------- */

static shoal_cu_result check_range(uint64_t at, size_t bytes, unsigned flags)
{
    if (!at || !bytes || at + bytes < at || (flags & ~(unsigned)KNOWN_FLAGS))
        return SHOAL_CU_INVALID_VALUE;
    if (mock_ranges_overlap(&pages, page_begin(at), page_bytes(at, bytes)))
        return SHOAL_CU_HOST_MEMORY_ALREADY_REGISTERED;
    return !mock_is_reserved(at) && !mock_region_find(at) && is_mapped(at, bytes) ? SHOAL_CU_SUCCESS : SHOAL_CU_INVALID_VALUE;
}

shoal_cu_result mock_host_register(void *at, size_t bytes, unsigned flags)
{
    ENTER("cuMemHostRegister", MOCK_CURRENT | MOCK_UNSAFE);
    const uint64_t begin = (uintptr_t)at;
    MOCK_TRY(check_range(begin, bytes, flags));
    const shoal_cu_address reserved = mock_reserve(page_bytes(begin, bytes));
    if (!reserved)
        return SHOAL_CU_OUT_OF_MEMORY;
    struct mock_region *region = mock_region_add(MOCK_HOST_MEMORY, reserved + begin % SHOAL_PAGE, bytes, at);
    region->context = call.context;
    region->device = call.context->device;
    region->flags = flags;
    mock_ranges_add(&pages, page_begin(begin), page_bytes(begin, bytes), region);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_host_address(shoal_cu_address *address, void *at, unsigned flags)
{
    ENTER("cuMemHostGetDevicePointer", MOCK_CURRENT);
    const struct mock_region *region = mock_host_find((uintptr_t)at);
    if (!region || flags || region->is_dying || !(region->flags & SHOAL_CU_REGISTER_DEVICEMAP))
        return SHOAL_CU_INVALID_VALUE;
    if (!(region->flags & SHOAL_CU_REGISTER_PORTABLE) && region->context != call.context)
        return SHOAL_CU_INVALID_VALUE;
    *address = region->at + ((uintptr_t)at - (uintptr_t)region->alias);
    return SHOAL_CU_SUCCESS;
}

/* ---- Unregistering ------------------------------------------------------------------------------------------------------- */

void mock_host_forget(struct mock_region *region)
{
    const uint64_t begin = (uintptr_t)region->alias;
    mock_ranges_remove(&pages, page_begin(begin));
    mock_unreserve(page_begin(region->at), page_bytes(begin, region->bytes));
    mock_region_drop(region);
}

/* After this call a real driver would either let the device write to pages that it no longer owns, or wait. */
shoal_cu_result mock_host_unregister(void *at)
{
    ENTER("cuMemHostUnregister", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_region *region = mock_host_find((uintptr_t)at);
    if (!region || region->alias != (char *)at || region->is_dying)
        return SHOAL_CU_HOST_MEMORY_NOT_REGISTERED;
    if (region->uses)
        mock_fault("host memory was unregistered while %u operations on streams use it", region->uses);
    region->is_dying = true;
    mock_wait_idle(&call);
    mock_wait_unused(region);
    mock_host_forget(region);
    return call.context->sticky;
}

void mock_host_reset(void)
{
    mock_ranges_clear(&pages);
}
