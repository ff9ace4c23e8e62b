#include "memory/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "topology/features.h"
#include "topology/limits.h"

#define HUGE_PAGE ((uint64_t)2 << 20)

/* ---- Segments ------------------------------------------------------------------------------------------------------------ */

static struct shoal_segment *new_segment(int fd, uint64_t bytes, uint64_t offset)
{
    struct shoal_segment *segment = calloc(1, sizeof *segment);
    if (!segment)
        return NULL;
    atomic_init(&segment->references, 1);
    segment->fd = fd;
    segment->bytes = bytes;
    segment->offset = offset;
    segment->base = MAP_FAILED;
    return segment;
}

/* Control pages are not inherited: a forked child that accessed them would disturb its parent's peers. */
static enum shoal_status map_pages(struct shoal_segment *segment, struct shoal_log *log)
{
    segment->base = mmap(NULL, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, (off_t)segment->offset);
    if (segment->base == MAP_FAILED)
        return shoal_log_fail(log, errno == ENOMEM ? SHOAL_ERR_MEMORY : SHOAL_ERR_SYSTEM, "memory",
                              "cannot map %llu bytes of shared memory: %s", (unsigned long long)segment->bytes,
                              strerror(errno));
    madvise(segment->base, segment->bytes, MADV_DONTFORK);
    if (segment->bytes >= HUGE_PAGE)
        madvise(segment->base, segment->bytes, MADV_HUGEPAGE);
    return SHOAL_OK;
}

static enum shoal_status segment_finish(struct shoal_segment *segment, struct shoal_log *log,
                                        struct shoal_segment **segment_out)
{
    const enum shoal_status status = map_pages(segment, log);
    if (status != SHOAL_OK) {
        shoal_segment_put(segment);
        return status;
    }
    *segment_out = segment;
    return SHOAL_OK;
}

static enum shoal_status no_segment(struct shoal_log *log, int fd)
{
    if (fd >= 0)
        close(fd);
    return shoal_log_fail(log, SHOAL_ERR_MEMORY, "memory", "no memory for the description of a segment");
}

static enum shoal_status no_memfd(struct shoal_log *log, int error)
{
    const char *advice =
        error == EMFILE || error == ENFILE ? "raise `ulimit -n`"
        : error == EPERM || error == EACCES || error == ENOSYS
            ? "ranks of a host share memory through it, so allow it in the container's seccomp profile; `shoal "
              "doctor` tries it"
            : "`shoal doctor` shows what this kernel has";
    return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "memory", "memfd_create failed: %s; %s", strerror(error), advice);
}

enum shoal_status shoal_segment_create(struct shoal_log *log, const char *name, uint64_t bytes,
                                       struct shoal_segment **segment_out)
{
    const int fd = shoal_topology_memfd(name);
    if (fd < 0)
        return no_memfd(log, errno);
    if (ftruncate(fd, (off_t)bytes) != 0) {
        const int reason = errno;
        close(fd);
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "memory", "cannot size a segment to %llu bytes: %s",
                              (unsigned long long)bytes, strerror(reason));
    }
    /* The size is sealed: shrinking it would cause SIGBUS in peers. */
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    struct shoal_segment *segment = new_segment(fd, bytes, 0);
    return segment ? segment_finish(segment, log, segment_out) : no_segment(log, fd);
}

enum shoal_status shoal_segment_wrap(struct shoal_log *log, void *base, uint64_t bytes, int fd, uint64_t offset,
                                     struct shoal_segment **segment_out)
{
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "memory", "cannot duplicate descriptor %d: %s", fd, strerror(errno));
    struct shoal_segment *segment = new_segment(own, bytes, offset);
    if (!segment)
        return no_segment(log, own);
    segment->base = base;
    segment->is_foreign = true;
    *segment_out = segment;
    return SHOAL_OK;
}

enum shoal_status shoal_segment_map(struct shoal_log *log, int fd, uint64_t bytes, uint64_t offset,
                                    struct shoal_segment **segment_out)
{
    struct shoal_segment *segment = new_segment(fd, bytes, offset);
    if (!segment)
        return no_segment(log, fd);
    SHOAL_TRY(segment_finish(segment, log, segment_out));
    close(fd); /* the mapping keeps the pages; descriptors are scarce */
    segment->fd = -1;
    return SHOAL_OK;
}

static uint64_t allowed_by(const struct shoal_segment_budget *budget)
{
    const uint64_t reserved = atomic_load_explicit(&budget->reserved, memory_order_relaxed);
    return !budget->limit ? UINT64_MAX : reserved < budget->limit ? budget->limit - reserved : 0;
}

uint64_t shoal_segment_room(const struct shoal_segment_budget *budget)
{
    const uint64_t left = shoal_topology_memory_left(), allowed = allowed_by(budget);
    return left < allowed ? left : allowed;
}

/* `done` of the bytes have been reserved already. */
static enum shoal_status check_room(struct shoal_log *log, uint64_t bytes, uint64_t done,
                                    const struct shoal_segment_budget *budget, const char *what)
{
    const struct shoal_topology_limits limits = shoal_topology_memory_limits();
    const bool is_container = limits.container < limits.machine;
    const uint64_t left = is_container ? limits.container : limits.machine, allowed = allowed_by(budget);
    if (bytes > allowed)
        return shoal_log_fail(
            log, SHOAL_ERR_MEMORY, "memory",
            "%s needs %llu bytes of shared memory, but of the %llu of SHOAL_MEMORY_LIMIT only %llu are left; use less, "
            "or raise it",
            what, (unsigned long long)bytes, (unsigned long long)budget->limit, (unsigned long long)allowed);
    if (bytes - done > left)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "memory",
                              "%s needs %llu bytes of shared memory, but the %s leaves only %llu; use less, or %s", what,
                              (unsigned long long)bytes, is_container ? "container's limit" : "machine",
                              (unsigned long long)(left + done),
                              is_container ? "give the container more" : "end what else runs here");
    return SHOAL_OK;
}

/* Ranks that reserve at the same time see each other's reservations between two chunks. */
#define RESERVE_CHUNK ((uint64_t)32 << 20)

static enum shoal_status get_pages(const struct shoal_segment *segment, struct shoal_log *log, uint64_t begin, uint64_t bytes,
                                   const char *what)
{
    int result;
    do
        result = fallocate(segment->fd, 0, (off_t)begin, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    if (result == 0)
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_MEMORY, "memory", "%s cannot get %llu bytes of shared memory: %s", what,
                          (unsigned long long)bytes, strerror(errno));
}

enum shoal_status shoal_segment_reserve(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin, uint64_t bytes,
                                        struct shoal_segment_budget *budget, const char *what)
{
    SHOAL_ASSERT(begin <= segment->bytes && bytes <= segment->bytes - begin && !segment->is_foreign);
    uint64_t done = 0;
    enum shoal_status status = SHOAL_OK;
    while (done < bytes && status == SHOAL_OK) {
        const uint64_t chunk = bytes - done < RESERVE_CHUNK ? bytes - done : RESERVE_CHUNK;
        status = check_room(log, bytes, done, budget, what);
        if (status == SHOAL_OK)
            status = get_pages(segment, log, begin + done, chunk, what);
        done += status == SHOAL_OK ? chunk : 0;
    }
    if (status != SHOAL_OK) {
        fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin, (off_t)bytes);
        return status;
    }
    segment->reserved += bytes;
    atomic_fetch_add_explicit(&budget->reserved, bytes, memory_order_relaxed);
    return SHOAL_OK;
}

void shoal_segment_discard(struct shoal_segment *segment)
{
    segment->must_discard = segment->pins > 0;
    if (!segment->pins)
        fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)segment->bytes);
}

void shoal_segment_strip(struct shoal_segment *segment, uint64_t begin, uint64_t bytes)
{
    SHOAL_ASSERT(!segment->is_foreign && begin <= segment->bytes && bytes <= segment->bytes - begin);
    if (bytes)
        fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin, (off_t)bytes);
    close(segment->fd);
    segment->fd = -1;
}

struct shoal_segment *shoal_segment_pin(struct shoal_segment *segment)
{
    segment->pins++;
    return shoal_segment_get(segment);
}

void shoal_segment_leave_pinned(struct shoal_segment *segment)
{
    SHOAL_ASSERT(segment->pins > 0 && !segment->must_discard);
    segment->is_foreign = true;
    shoal_segment_unpin(segment);
}

void shoal_segment_unpin(struct shoal_segment *segment)
{
    SHOAL_ASSERT(segment->pins > 0);
    if (--segment->pins == 0 && segment->must_discard)
        shoal_segment_discard(segment);
    shoal_segment_put(segment);
}

void shoal_segment_release(struct shoal_segment *segment, struct shoal_segment_budget *budget)
{
    if (!segment)
        return;
    const uint64_t before = atomic_fetch_sub_explicit(&budget->reserved, segment->reserved, memory_order_relaxed);
    SHOAL_ASSERT(before >= segment->reserved); /* it was reserved from this budget */
    (void)before;
    segment->reserved = 0;
    shoal_segment_put(segment);
}

enum shoal_status shoal_segment_renew(struct shoal_segment *segment, struct shoal_log *log, uint64_t begin)
{
    struct shoal_segment *fresh;
    struct shoal_segment_budget unlimited = {0}; /* the old pages were counted, and are freed */
    if (segment->pins)
        return shoal_log_fail(log, SHOAL_ERR_STATE, "memory",
                              "shared memory at %p stays on its pages, because the network still reads them; a rank that is "
                              "stopped may write to it when it continues",
                              (void *)segment->base);
    SHOAL_TRY(shoal_segment_create(log, "shoal-memory", segment->bytes, &fresh));
    enum shoal_status status =
        shoal_segment_reserve(fresh, log, begin, segment->bytes - begin, &unlimited, "moving shared memory");
    if (status == SHOAL_OK) {
        memcpy(fresh->base + begin, segment->base + begin, segment->bytes - begin);
        /* mremap replaces the old mapping in one step: the address always has memory. */
        if (mremap(fresh->base, segment->bytes, segment->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, segment->base) == MAP_FAILED)
            status = shoal_log_fail(log, SHOAL_ERR_SYSTEM, "memory", "cannot move shared memory: %s", strerror(errno));
    }
    if (status == SHOAL_OK) {
        const int old = segment->fd;
        segment->fd = fresh->fd;
        fresh->fd = old;
        fresh->base = MAP_FAILED;
    }
    shoal_segment_put(fresh);
    return status;
}

struct shoal_segment *shoal_segment_get(struct shoal_segment *segment)
{
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
    return segment;
}

void shoal_segment_put(struct shoal_segment *segment)
{
    /* acq_rel: what other holders did to the pages happens before they are unmapped here. */
    if (!segment || atomic_fetch_sub_explicit(&segment->references, 1, memory_order_acq_rel) != 1)
        return;
    SHOAL_ASSERT(!segment->pins); /* each pin holds a reference */
    if (segment->base != MAP_FAILED && !segment->is_foreign)
        munmap(segment->base, segment->bytes);
    if (segment->fd >= 0)
        close(segment->fd);
    free(segment);
}
