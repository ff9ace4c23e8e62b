#include "comm/device_exports.h"

#include <unistd.h>

#include "base/assert.h"
#include "comm/context.h"

/* Ends one registration of freed memory, if the next one to check is stale. Asks the driver without the engine's lock. */
static void end_stale(struct shoal_context *context, struct shoal_fabric_exports *exports, uint64_t in_use)
{
    struct shoal_gpu_allocation allocation = {.number = 0};
    shoal_progress_lock(context->progress);
    const struct shoal_fabric_exported *next = shoal_fabric_exports_next(exports);
    const uint64_t number = next ? next->number : in_use, at = next ? next->begin : 0;
    shoal_progress_unlock(context->progress);
    if (number == in_use || (shoal_gpu_find_allocation(context->drivers.gpu, at, &allocation) && allocation.number == number))
        return;
    shoal_progress_lock(context->progress);
    shoal_fabric_exports_forget(exports, number);
    shoal_progress_unlock(context->progress);
}

/* Remembers that the driver does not export this memory, so that later calls do not ask again. */
static struct shoal_fabric_exported *remember_refusal(struct shoal_context *context, struct shoal_fabric_exports *exports,
                                                      const struct shoal_gpu_allocation *allocation)
{
    const struct shoal_fabric_export export = {
        .number = allocation->number, .begin = allocation->begin, .bytes = allocation->bytes};
    shoal_progress_lock(context->progress);
    struct shoal_fabric_exported *refused = shoal_fabric_exports_refuse(exports, &export);
    shoal_progress_unlock(context->progress);
    return refused;
}

static struct shoal_fabric_exported *add_export(struct shoal_context *context, struct shoal_fabric_exports *exports,
                                                const struct shoal_gpu_allocation *allocation)
{
    struct shoal_gpu_export pages;
    if (!shoal_gpu_export(context->drivers.gpu, allocation, &pages))
        return remember_refusal(context, exports, allocation);
    const struct shoal_fabric_export export = {.number = allocation->number,
                                               .begin = pages.begin,
                                               .bytes = pages.bytes,
                                               .descriptor = pages.descriptor,
                                               .device = pages.device};
    shoal_progress_lock(context->progress);
    struct shoal_fabric_exported *exported = shoal_fabric_exports_add(exports, &export);
    shoal_progress_unlock(context->progress);
    close(pages.descriptor);
    return exported;
}

/* Call with the driver's lock held, without which no registration is made or ended. May return an entry that was refused. The
 * driver can place several small allocations in one page. One that does not begin on a page shares its page with another, and
 * their registrations would also share it, so it is not exported. */
static struct shoal_fabric_exported *find_or_export(struct shoal_context *context, struct shoal_fabric_exports *exports,
                                                    unsigned long long at, size_t bytes)
{
    struct shoal_gpu_allocation allocation = {.number = 0};
    if (!shoal_gpu_find_allocation(context->drivers.gpu, at, &allocation) || at + bytes > allocation.begin + allocation.bytes ||
        allocation.begin % SHOAL_PAGE)
        return NULL;
    end_stale(context, exports, allocation.number);
    shoal_progress_lock(context->progress);
    struct shoal_fabric_exported *known = shoal_fabric_exports_use(exports, allocation.number);
    shoal_progress_unlock(context->progress);
    return known ? known : add_export(context, exports, &allocation);
}

atomic_int *shoal_devices_hold_export(struct shoal_comm *comm, unsigned long long at, size_t bytes)
{
    struct shoal_context *context = comm->context;
    struct shoal_fabric_exports *exports = shoal_network_exports(context->network);
    if (!exports)
        return NULL;
    pthread_mutex_lock(&context->drivers.lock);
    struct shoal_fabric_exported *exported = find_or_export(context, exports, at, bytes);
    const bool is_registered = exported && exported->memory.region;
    SHOAL_ASSERT(!is_registered || (exported->begin <= at && at + bytes <= exported->begin + exported->bytes));
    if (is_registered)
        atomic_fetch_add_explicit(&exported->holders, 1, memory_order_relaxed);
    pthread_mutex_unlock(&context->drivers.lock);
    return is_registered ? &exported->holders : NULL;
}
