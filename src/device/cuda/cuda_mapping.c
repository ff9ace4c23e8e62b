#include "device/cuda/cuda_mapping.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_gpu.h"

/* ---- Writing ------------------------------------------------------------------------------------------------------------- */

/* Reading from the device returns only after all earlier writes have arrived there. */
static void mapping_write(const struct shoal_device_mapping *base, char *to, const char *from, size_t bytes, bool is_last)
{
    const struct shoal_cuda_mapping *mapping = (const struct shoal_cuda_mapping *)(const void *)base;
    char byte;
    (void)mapping->calls->write(mapping->handle, to, from, bytes); /* refuses only memory that is not mapped */
    if (is_last && mapping->reads_back)
        (void)mapping->calls->read(mapping->handle, &byte, to + bytes - 1, 1);
}

/* ---- Creation and end ---------------------------------------------------------------------------------------------------- */

/* Guards the mappings of all contexts of the process: GDRCopy's library counts its mappings without a lock. */
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;

/* If the kernel module has lost the memory, both calls return an error, and nothing remains to be undone. */
static void mapping_end(struct shoal_cuda_mappings *mappings, size_t index)
{
    struct shoal_cuda_mapping *mapping = mappings->all[index];
    mappings->all[index] = mappings->all[--mappings->count];
    if (mapping->memory) {
        (void)mappings->calls.unmap(mappings->gdr, mapping->handle, mapping->memory, mapping->page_bytes);
        (void)mappings->calls.unpin(mappings->gdr, mapping->handle);
    }
    free(mapping);
}

void shoal_cuda_mappings_fini(struct shoal_cuda_mappings *mappings)
{
    pthread_mutex_lock(&mapping_lock);
    while (mappings->count)
        mapping_end(mappings, 0);
    if (mappings->gdr)
        (void)mappings->calls.close(mappings->gdr);
    pthread_mutex_unlock(&mapping_lock);
}

/* Returns true if GDRCopy is available; searches for it once. */
static bool open_gdr(struct shoal_gpu *gpu)
{
    struct shoal_cuda_mappings *mappings = &gpu->mappings;
    const char *reason;
    if (mappings->is_open)
        return mappings->gdr != NULL;
    mappings->is_open = true;
    mappings->gdr = shoal_gdr_library_open(&mappings->calls, &reason);
    if (!mappings->gdr)
        shoal_log_line(gpu->log, SHOAL_LOG_DEBUG, "gpu", "GDRCopy is not used (%s): small results are copied by the device",
                       reason);
    return mappings->gdr != NULL;
}

/* Returns 0 or the error of the call that *call_out names. */
static int pin_and_map(const struct shoal_cuda_mappings *mappings, struct shoal_cuda_mapping *mapping, const char **call_out)
{
    const struct shoal_gdr_calls *calls = &mappings->calls;
    void *memory = NULL;
    *call_out = "gdr_pin_buffer";
    int error = calls->pin(mappings->gdr, mapping->pages, mapping->page_bytes, 0, 0, &mapping->handle);
    if (error)
        return error;
    *call_out = "gdr_map";
    error = calls->map(mappings->gdr, mapping->handle, &memory, mapping->page_bytes);
    if (error)
        (void)calls->unpin(mappings->gdr, mapping->handle);
    else
        mapping->memory = memory;
    return error;
}

/* Refusals are kept like mappings, so that not every call asks again. A library that pins through dma-bufs requires the
 * memory's context to be current. */
static void mapping_map(struct shoal_gpu *gpu, struct shoal_cuda_mapping *mapping, shoal_cu_context context)
{
    struct shoal_cuda_mappings *mappings = &gpu->mappings;
    struct shoal_cuda_visit visit;
    const char *call;
    mapping->used = mappings->now;
    if (shoal_cuda_visit(gpu, context, &visit) != SHOAL_CU_SUCCESS)
        return;
    const int error = pin_and_map(mappings, mapping, &call);
    shoal_cuda_leave(gpu, &visit);
    if (error && !mappings->has_refused)
        shoal_log_line(gpu->log, SHOAL_LOG_INFO, "gpu",
                       "GDRCopy does not map some memory of a device (%s: %s): small results there are copied by the device",
                       call, strerror(error));
    mappings->has_refused |= error != 0;
}

/* ---- Finding ------------------------------------------------------------------------------------------------------------- */

static bool is_held(const struct shoal_cuda_mapping *mapping)
{
    return atomic_load_explicit(&mapping->base.holders, memory_order_acquire) > 0;
}

static bool is_old(const struct shoal_cuda_mappings *mappings, const struct shoal_cuda_mapping *mapping)
{
    return mappings->now - mapping->used >= SHOAL_CUDA_MAPPING_AGE;
}

/* Checks one mapping, another one at each use, and ends it if its allocation was freed. */
static void end_if_freed(struct shoal_gpu *gpu, const struct shoal_gpu_allocation *in_use)
{
    struct shoal_cuda_mappings *mappings = &gpu->mappings;
    struct shoal_gpu_allocation allocation = {.number = 0};
    if (!mappings->count)
        return;
    mappings->looked_at = (mappings->looked_at + 1) % mappings->count;
    const struct shoal_cuda_mapping *mapping = mappings->all[mappings->looked_at];
    if (mapping->buffer == in_use->number || is_held(mapping))
        return;
    if (!shoal_gpu_find_allocation(gpu, mapping->begin, &allocation) || allocation.number != mapping->buffer)
        mapping_end(mappings, mappings->looked_at);
}

/* Ends mappings of earlier allocations at the addresses of this one. */
static void mapping_end_stale(struct shoal_cuda_mappings *mappings, const struct shoal_gpu_allocation *allocation)
{
    for (size_t i = mappings->count; i-- > 0;) {
        const struct shoal_cuda_mapping *mapping = mappings->all[i];
        const bool overlaps = mapping->begin < allocation->begin + allocation->bytes && allocation->begin < mapping->end;
        if (overlaps && mapping->buffer != allocation->number && !is_held(mapping))
            mapping_end(mappings, i);
    }
}

/* Returns false if all mappings are held or were used recently. */
static bool make_room(struct shoal_cuda_mappings *mappings)
{
    size_t oldest = SHOAL_CUDA_MAPPINGS_MAX;
    if (mappings->count < SHOAL_CUDA_MAPPINGS_MAX)
        return true;
    for (size_t i = 0; i < mappings->count; i++) {
        const bool is_older = oldest == SHOAL_CUDA_MAPPINGS_MAX || mappings->all[i]->used < mappings->all[oldest]->used;
        if (!is_held(mappings->all[i]) && is_old(mappings, mappings->all[i]) && is_older)
            oldest = i;
    }
    if (oldest == SHOAL_CUDA_MAPPINGS_MAX)
        return false;
    mapping_end(mappings, oldest);
    return true;
}

static struct shoal_cuda_mapping *mapping_find(const struct shoal_cuda_mappings *mappings,
                                               const struct shoal_gpu_allocation *allocation, shoal_cu_address at, size_t bytes)
{
    for (size_t i = 0; i < mappings->count; i++) {
        struct shoal_cuda_mapping *mapping = mappings->all[i];
        if (mapping->buffer == allocation->number && shoal_cuda_mapping_has(mapping, at, bytes))
            return mapping;
    }
    return NULL;
}

static shoal_cu_address round_down(shoal_cu_address at)
{
    return at & ~(shoal_cu_address)(SHOAL_GDR_PAGE - 1);
}

static struct shoal_cuda_mapping *mapping_add(struct shoal_gpu *gpu, int device, const struct shoal_gpu_allocation *allocation,
                                              shoal_cu_address at, size_t bytes)
{
    struct shoal_cuda_mappings *mappings = &gpu->mappings;
    mapping_end_stale(mappings, allocation);
    struct shoal_cuda_mapping *mapping = make_room(mappings) ? calloc(1, sizeof *mapping) : NULL;
    if (!mapping)
        return NULL;
    const shoal_cu_address until = round_down(at + bytes + SHOAL_GDR_PAGE - 1), end = allocation->begin + allocation->bytes;
    mapping->base.write = mapping_write;
    atomic_init(&mapping->base.holders, 0);
    mapping->calls = &mappings->calls;
    mapping->buffer = allocation->number;
    mapping->reads_back = !gpu->devices[device].can_flush;
    mapping->pages = round_down(at);
    mapping->page_bytes = until - mapping->pages;
    mapping->begin = mapping->pages > allocation->begin ? mapping->pages : allocation->begin;
    mapping->end = until < end ? until : end;
    mapping_map(gpu, mapping, allocation->context);
    mappings->all[mappings->count++] = mapping;
    return mapping;
}

/* Under the lock. The result may be a mapping that was refused, or NULL if there is none. */
static struct shoal_cuda_mapping *find_or_add(struct shoal_gpu *gpu, int device, shoal_cu_address at, size_t bytes)
{
    struct shoal_gpu_allocation allocation = {.number = 0};
    if (!open_gdr(gpu) || !shoal_gpu_find_allocation(gpu, at, &allocation))
        return NULL;
    end_if_freed(gpu, &allocation);
    if (allocation.bytes > SHOAL_CUDA_MAPPED_ALLOCATION_MAX)
        return NULL;
    struct shoal_cuda_mapping *found = mapping_find(&gpu->mappings, &allocation, at, bytes);
    if (!found)
        return mapping_add(gpu, device, &allocation, at, bytes);
    if (!found->memory && is_old(&gpu->mappings, found))
        mapping_map(gpu, found, allocation.context);
    return found;
}

struct shoal_cuda_mapping *shoal_cuda_mapping_hold(struct shoal_gpu *gpu, int device, shoal_cu_address at, size_t bytes)
{
    pthread_mutex_lock(&mapping_lock);
    gpu->mappings.now++;
    struct shoal_cuda_mapping *mapping = find_or_add(gpu, device, at, bytes);
    const bool is_mapped = mapping && mapping->memory;
    if (is_mapped) {
        mapping->used = gpu->mappings.now;
        atomic_fetch_add_explicit(&mapping->base.holders, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&mapping_lock);
    return is_mapped ? mapping : NULL;
}
