#include "memory/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "memory/region_table.h"

#define STAGGER_PAGES 61
#define CACHED_MAX 256 /* regions in the buffer cache: each shoal_mem_alloc() scans all of them */

struct shoal_memory {
    struct shoal_log *log;
    const struct shoal_memory_settings *settings;
    struct shoal_guard guard;
    struct shoal_exporter exporter;
    struct shoal_segment_budget budget;
    struct shoal_region_table table;
    struct shoal_region *found; /* result of the last look-up; NULL: it has ended since */
    uint64_t frees;
    uint64_t cached_bytes;
    size_t cached_count;
    atomic_uint allocations;
    atomic_int rank; /* staggers allocations */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void no_lock(void *arg)
{
    (void)arg;
}

enum shoal_status shoal_memory_create(struct shoal_log *log, const struct shoal_memory_settings *settings,
                                      struct shoal_memory **memory_out)
{
    struct shoal_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "memory", "no memory for a context");
    memory->log = log;
    memory->settings = settings;
    memory->guard = (struct shoal_guard){no_lock, no_lock, NULL};
    memory->budget.limit = settings->memory_limit;
    *memory_out = memory;
    return SHOAL_OK;
}

static void free_region(struct shoal_region *region)
{
    free(region->is_exported);
    free(region);
}

void shoal_memory_destroy(struct shoal_memory *memory)
{
    if (!memory)
        return;
    SHOAL_ASSERT(!memory->exporter.revoke);
    for (size_t i = 0; i < memory->table.count; i++) {
        struct shoal_region *region = memory->table.by_begin[i];
        SHOAL_ASSERT(!region->registration);
        if (region->is_of_device) /* it was not freed, because its device has not ended */
            shoal_segment_leave_pinned(region->segment);
        shoal_segment_put(region->segment);
        free_region(region);
    }
    shoal_region_table_fini(&memory->table);
    free(memory);
}

void shoal_memory_set_guard(struct shoal_memory *memory, struct shoal_guard guard)
{
    memory->guard = guard;
}

void shoal_memory_set_exporter(struct shoal_memory *memory, struct shoal_exporter exporter)
{
    memory->exporter = exporter;
}

void shoal_memory_set_stagger(struct shoal_memory *memory, int rank)
{
    atomic_store_explicit(&memory->rank, rank, memory_order_relaxed);
}

void shoal_memory_lock(const struct shoal_memory *memory)
{
    memory->guard.lock(memory->guard.arg);
}

void shoal_memory_unlock(const struct shoal_memory *memory)
{
    memory->guard.unlock(memory->guard.arg);
}

struct shoal_memory_counts shoal_memory_count(const struct shoal_memory *memory)
{
    return (struct shoal_memory_counts){memory->table.count, memory->cached_count, memory->cached_bytes,
                                        atomic_load_explicit(&memory->budget.reserved, memory_order_relaxed)};
}

/* ---- Regions ------------------------------------------------------------------------------------------------------------- */

/* Takes over the segment. Returns ERR_MEMORY, and releases the segment, if out of memory. */
static enum shoal_status add_region(struct shoal_memory *memory, const struct shoal_region *like)
{
    struct shoal_region *region = calloc(1, sizeof *region);
    if (region)
        *region = *like;
    if (region && shoal_region_table_add(&memory->table, region))
        return SHOAL_OK;
    free(region);
    shoal_memory_release(memory, like->segment);
    return shoal_log_fail(memory->log, SHOAL_ERR_MEMORY, "memory", "no memory for the description of a region");
}

/* Afterwards adapters do not use it. */
static void forget_registration(struct shoal_region *region)
{
    struct shoal_registration *registration = region->registration;
    region->registration = NULL;
    if (registration)
        registration->forget(registration);
}

/* Afterwards no peer knows the region by this number. */
static void revoke_exports(struct shoal_memory *memory, struct shoal_region *region)
{
    for (size_t peer = 0; peer < region->export_count; peer++) {
        if (region->is_exported[peer] && memory->exporter.revoke)
            memory->exporter.revoke(memory->exporter.arg, peer, region->number);
        region->is_exported[peer] = false;
    }
    region->known_to = 0;
}

/* Afterwards no look-up returns the region. */
static void forget_found(struct shoal_memory *memory, const struct shoal_region *region)
{
    if (memory->found == region)
        memory->found = NULL;
}

static void end_region(struct shoal_memory *memory, struct shoal_region *region)
{
    forget_found(memory, region);
    forget_registration(region);
    revoke_exports(memory, region);
    shoal_region_table_remove(&memory->table, region);
    shoal_memory_release(memory, region->segment);
    free_region(region);
}

bool shoal_region_expect_peers(struct shoal_region *region, size_t peers)
{
    if (region->export_count >= peers)
        return true;
    bool *is_exported = realloc(region->is_exported, peers * sizeof *is_exported);
    if (!is_exported)
        return false;
    for (size_t peer = region->export_count; peer < peers; peer++)
        is_exported[peer] = false;
    region->is_exported = is_exported;
    region->export_count = peers;
    return true;
}

void shoal_memory_forget_peer(struct shoal_memory *memory, size_t peer)
{
    for (size_t i = 0; i < memory->table.count; i++) {
        struct shoal_region *region = memory->table.by_begin[i];
        if (peer < region->export_count)
            region->is_exported[peer] = false;
    }
}

static bool holds(const struct shoal_region *region, const void *address, size_t bytes)
{
    const size_t offset = (uintptr_t)address - (uintptr_t)region->begin; /* huge if the address is before it */
    return offset <= region->bytes && bytes <= region->bytes - offset;
}

struct shoal_region *shoal_memory_find(struct shoal_memory *memory, const void *address, size_t bytes)
{
    if (memory->found && holds(memory->found, address, bytes))
        return memory->found;
    struct shoal_region *region = shoal_region_table_at(&memory->table, address);
    if (!region || region->freed || !holds(region, address, bytes))
        return NULL;
    memory->found = region;
    return region;
}

struct shoal_region *shoal_memory_at(const struct shoal_memory *memory, shoal_location location)
{
    return shoal_region_table_numbered(&memory->table, shoal_location_segment(location));
}

void shoal_memory_renew(struct shoal_memory *memory, struct shoal_region *region)
{
    if (region->owner != SHOAL_REGION_OWN || region->is_of_device)
        return;
    forget_registration(region);
    SHOAL_ASSERT(region->segment && !region->segment->is_foreign);
    const uint64_t pad = (uint64_t)(region->begin - region->segment->base);
    if (shoal_segment_renew(region->segment, memory->log, pad) != SHOAL_OK)
        return; /* the failure was logged */
    revoke_exports(memory, region);
    shoal_region_table_renumber(&memory->table, region);
}

/* ---- The buffer cache ---------------------------------------------------------------------------------------------------- */

static void count_cached(struct shoal_memory *memory, const struct shoal_region *region, bool is_cached)
{
    const size_t bytes = shoal_region_extent(region);
    SHOAL_ASSERT(is_cached || (memory->cached_count > 0 && memory->cached_bytes >= bytes));
    memory->cached_count = is_cached ? memory->cached_count + 1 : memory->cached_count - 1;
    memory->cached_bytes = is_cached ? memory->cached_bytes + bytes : memory->cached_bytes - bytes;
}

static void end_oldest(struct shoal_memory *memory)
{
    struct shoal_region *oldest = NULL;
    for (size_t i = 0; i < memory->table.count; i++) {
        struct shoal_region *region = memory->table.by_begin[i];
        if (region->freed && (!oldest || region->freed < oldest->freed))
            oldest = region;
    }
    SHOAL_ASSERT(oldest); /* the counts show that there is one */
    count_cached(memory, oldest, false);
    shoal_segment_discard(oldest->segment); /* peers may unmap it later */
    end_region(memory, oldest);
}

static void cache_at_most(struct shoal_memory *memory, uint64_t bytes, size_t count)
{
    while (memory->cached_bytes > bytes || memory->cached_count > count)
        end_oldest(memory);
}

/* Takes the smallest cached region that has at least `bytes` bytes, and at most a quarter and a page more. Returns NULL if
 * there is none. */
static void *take_cached(struct shoal_memory *memory, size_t bytes)
{
    struct shoal_region *best = NULL;
    for (size_t i = 0; memory->cached_count && i < memory->table.count; i++) {
        struct shoal_region *region = memory->table.by_begin[i];
        if (!region->freed)
            continue;
        const size_t extent = shoal_region_extent(region);
        if (extent >= bytes && extent - bytes <= SHOAL_PAGE + bytes / 4 && (!best || extent < shoal_region_extent(best)))
            best = region;
    }
    if (!best)
        return NULL;
    best->freed = 0;
    best->bytes = bytes;
    count_cached(memory, best, false);
    return best->begin;
}

/* ---- Memory of Shoal ----------------------------------------------------------------------------------------------------- */

/* Opens `count` descriptors and closes them again: the kernel offers no other way to find out. */
static bool can_open(int count)
{
    const int descriptor = count > 0 ? eventfd(0, EFD_CLOEXEC) : -1;
    if (count > 0 && descriptor < 0)
        return errno != EMFILE && errno != ENFILE;
    const bool can = count <= 0 || can_open(count - 1);
    if (descriptor >= 0)
        close(descriptor);
    return can;
}

void shoal_memory_spare_descriptors(struct shoal_memory *memory, int count)
{
    shoal_memory_lock(memory);
    if (memory->cached_count && !can_open(count))
        cache_at_most(memory, 0, 0);
    shoal_memory_unlock(memory);
}

enum shoal_status shoal_memory_reserve(struct shoal_memory *memory, struct shoal_segment *segment, uint64_t begin,
                                       uint64_t bytes, const char *what)
{
    shoal_memory_lock(memory);
    if (memory->cached_count && bytes > shoal_segment_room(&memory->budget))
        cache_at_most(memory, 0, 0);
    shoal_memory_unlock(memory);
    return shoal_segment_reserve(segment, memory->log, begin, bytes, &memory->budget, what);
}

void shoal_memory_release(struct shoal_memory *memory, struct shoal_segment *segment)
{
    shoal_segment_release(segment, &memory->budget);
}

void shoal_memory_end_stale(struct shoal_memory *memory, const void *address, size_t bytes)
{
    struct shoal_region *stale;
    while ((stale = shoal_region_table_overlap(&memory->table, address, bytes))) {
        SHOAL_ASSERT(stale->owner == SHOAL_REGION_USER);
        shoal_log_line(memory->log, SHOAL_LOG_WARN, "memory",
                       "%zu bytes at %p were unmapped while they were registered: their registration ends; call "
                       "shoal_mem_deregister before unmapping",
                       stale->bytes, (void *)stale->begin);
        end_region(memory, stale);
    }
}

/* Adds a region of Shoal's own, with the fields that `like` sets. */
static enum shoal_status make_own(struct shoal_memory *memory, const struct shoal_region *like, size_t pad, const char *what,
                                  void **address_out)
{
    const size_t total = shoal_round_up(shoal_max_size(like->bytes, 1), SHOAL_PAGE) + pad;
    struct shoal_segment *segment;
    shoal_memory_spare_descriptors(memory, 1);
    SHOAL_TRY(shoal_segment_create(memory->log, "shoal-memory", total, &segment));
    enum shoal_status status = shoal_memory_reserve(memory, segment, pad, total - pad, what);
    if (status != SHOAL_OK) {
        shoal_segment_put(segment);
        return status;
    }
    struct shoal_region own = *like;
    own.kind = SHOAL_REGION_SHARED;
    own.owner = SHOAL_REGION_OWN;
    own.begin = segment->base + pad;
    own.segment = segment;
    shoal_memory_lock(memory);
    shoal_memory_end_stale(memory, segment->base, segment->bytes);
    status = add_region(memory, &own);
    if (status == SHOAL_OK && own.is_of_device)
        (void)shoal_segment_pin(segment);
    shoal_memory_unlock(memory);
    if (status == SHOAL_OK)
        *address_out = own.begin;
    return status;
}

enum shoal_status shoal_memory_alloc(struct shoal_memory *memory, size_t bytes, void **address_out)
{
    const size_t turn = atomic_fetch_add_explicit(&memory->allocations, 1, memory_order_relaxed);
    const size_t rank = (size_t)atomic_load_explicit(&memory->rank, memory_order_relaxed);
    const size_t pad = (rank * 7 + turn) % STAGGER_PAGES * SHOAL_PAGE;
    if (bytes > SHOAL_LOCATION_OFFSET_MAX - pad - SHOAL_PAGE)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory",
                              "shoal_mem_alloc of %zu bytes: at most a TiB in one piece", bytes);
    shoal_memory_lock(memory);
    void *cached = take_cached(memory, bytes);
    shoal_memory_unlock(memory);
    if (cached) {
        *address_out = cached;
        return SHOAL_OK;
    }
    char what[64];
    snprintf(what, sizeof what, "shoal_mem_alloc of %zu bytes", bytes);
    return make_own(memory, &(struct shoal_region){.bytes = bytes}, pad, what, address_out);
}

enum shoal_status shoal_memory_alloc_for_device(struct shoal_memory *memory, size_t bytes, const char *what, void **address_out)
{
    if (bytes > SHOAL_LOCATION_OFFSET_MAX - SHOAL_PAGE)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory", "%s of %zu bytes: at most a TiB in one piece", what,
                              bytes);
    return make_own(memory, &(struct shoal_region){.bytes = bytes, .is_of_device = true}, 0, what, address_out);
}

/* Returns the region in use that begins there and has that owner, or NULL. */
static struct shoal_region *find_begin(struct shoal_memory *memory, const void *address, enum shoal_region_owner owner)
{
    struct shoal_region *region = shoal_region_table_at(&memory->table, address);
    return region && region->begin == address && region->owner == owner && !region->freed ? region : NULL;
}

void shoal_memory_free_for_device(struct shoal_memory *memory, void *address)
{
    shoal_memory_lock(memory);
    struct shoal_region *region = find_begin(memory, address, SHOAL_REGION_OWN);
    SHOAL_ASSERT(region && region->is_of_device);
    shoal_segment_unpin(region->segment);
    end_region(memory, region);
    shoal_memory_unlock(memory);
}

static enum shoal_status end_found(struct shoal_memory *memory, void *address, enum shoal_region_owner owner)
{
    struct shoal_region *region = find_begin(memory, address, owner);
    if (!region)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory", "%p is not memory of %s", address,
                              owner == SHOAL_REGION_USER ? "shoal_mem_register" : "shoal_mem_alloc");
    end_region(memory, region);
    return SHOAL_OK;
}

enum shoal_status shoal_memory_free(struct shoal_memory *memory, void *address)
{
    return end_found(memory, address, SHOAL_REGION_OWN);
}

enum shoal_status shoal_memory_keep(struct shoal_memory *memory, void *address)
{
    const uint64_t most = memory->settings->memory_kept;
    struct shoal_region *region = find_begin(memory, address, SHOAL_REGION_OWN);
    if (!region)
        return shoal_memory_free(memory, address);
    forget_found(memory, region);
    forget_registration(region);
    if (shoal_region_extent(region) > most) {
        shoal_segment_discard(region->segment); /* idle peers unmap it much later */
        return shoal_memory_free(memory, address);
    }
    cache_at_most(memory, most - shoal_region_extent(region), CACHED_MAX - 1);
    region->freed = ++memory->frees;
    count_cached(memory, region, true);
    return SHOAL_OK;
}

/* ---- Memory of the user -------------------------------------------------------------------------------------------------- */

static enum shoal_status wrap_range(struct shoal_memory *memory, void *address, size_t bytes, int fd, uint64_t offset,
                                    struct shoal_segment **segment_out)
{
    const size_t within = (uintptr_t)address % SHOAL_PAGE;
    struct stat file;
    if (fstat(fd, &file) != 0 || (uint64_t)file.st_size < offset || (uint64_t)file.st_size - offset < bytes)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory",
                              "shoal_mem_register: descriptor %d does not hold %zu bytes from %llu", fd, bytes,
                              (unsigned long long)offset);
    if (offset % SHOAL_PAGE != within)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory",
                              "shoal_mem_register: address %p cannot map offset %llu (they differ within a page)", address,
                              (unsigned long long)offset);
    if (bytes > SHOAL_LOCATION_OFFSET_MAX - SHOAL_PAGE)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory",
                              "shoal_mem_register of %zu bytes: at most a TiB in one piece", bytes);
    return shoal_segment_wrap(memory->log, (char *)address - within, bytes + within, fd, offset - within, segment_out);
}

enum shoal_status shoal_memory_register(struct shoal_memory *memory, void *address, size_t bytes, int fd, uint64_t offset)
{
    struct shoal_region range = {.owner = SHOAL_REGION_USER, .begin = address, .bytes = bytes};
    if (bytes > UINTPTR_MAX - (uintptr_t)address)
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory",
                              "shoal_mem_register: %zu bytes from %p on do not fit the address space", bytes, address);
    if (shoal_region_table_overlap(&memory->table, address, bytes))
        return shoal_log_fail(memory->log, SHOAL_ERR_ARGUMENT, "memory", "shoal_mem_register: %p overlaps memory already known",
                              address);
    if (fd >= 0)
        shoal_memory_spare_descriptors(memory, 1);
    if (fd >= 0)
        SHOAL_TRY(wrap_range(memory, address, bytes, fd, offset, &range.segment));
    range.kind = fd >= 0 ? SHOAL_REGION_SHARED : SHOAL_REGION_HOST;
    return add_region(memory, &range);
}

bool shoal_memory_is_busy(struct shoal_memory *memory, const void *address)
{
    const struct shoal_region *region = find_begin(memory, address, SHOAL_REGION_USER);
    return region && region->registration && region->registration->is_busy(region->registration);
}

enum shoal_status shoal_memory_deregister(struct shoal_memory *memory, void *address)
{
    if (shoal_memory_is_busy(memory, address))
        return shoal_log_fail(memory->log, SHOAL_ERR_STATE, "memory",
                              "shoal_mem_deregister: the network still reads from %p for an operation that failed; keep it "
                              "mapped, and deregister it later or destroy the context first",
                              address);
    return end_found(memory, address, SHOAL_REGION_USER);
}
