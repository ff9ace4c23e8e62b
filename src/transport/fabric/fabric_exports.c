#include "transport/fabric/fabric_exports.h"

#include <stdlib.h>

#include "base/assert.h"

#define REFUSED_USES 256 /* uses after which a refusal is forgotten: others may have unlocked memory */

static void exports_end(struct shoal_fabric_exports *exports, size_t index)
{
    struct shoal_fabric_exported *exported = exports->all[index];
    SHOAL_ASSERT(index < exports->count);
    exports->all[index] = exports->all[--exports->count];
    shoal_fabric_endpoint_unregister(exports->endpoint, &exported->memory);
    free(exported);
}

static bool exports_is_busy(const struct shoal_fabric_exported *exported)
{
    return exported->under_way || atomic_load_explicit(&exported->holders, memory_order_acquire) > 0;
}

struct shoal_fabric_exported *shoal_fabric_exports_use(struct shoal_fabric_exports *exports, uint64_t number)
{
    exports->now++;
    for (size_t i = 0; i < exports->count; i++) {
        if (exports->all[i]->number != number)
            continue;
        exports->all[i]->used = exports->now;
        if (exports->all[i]->memory.region || exports->now - exports->all[i]->made < REFUSED_USES)
            return exports->all[i];
        exports_end(exports, i);
        return NULL;
    }
    return NULL;
}

static void end_overlapping(struct shoal_fabric_exports *exports, const struct shoal_fabric_export *export)
{
    for (size_t i = exports->count; i-- > 0;) {
        const struct shoal_fabric_exported *exported = exports->all[i];
        const bool overlaps =
            exported->begin < export->begin + export->bytes && export->begin < exported->begin + exported->bytes;
        if (overlaps && !exports_is_busy(exported))
            exports_end(exports, i);
    }
}

/* Returns false if all are busy. */
static bool exports_make_room(struct shoal_fabric_exports *exports)
{
    size_t oldest = SHOAL_FABRIC_EXPORTS_MAX;
    if (exports->count < SHOAL_FABRIC_EXPORTS_MAX)
        return true;
    for (size_t i = 0; i < exports->count; i++) {
        const bool is_older = oldest == SHOAL_FABRIC_EXPORTS_MAX || exports->all[i]->used < exports->all[oldest]->used;
        if (is_older && !exports_is_busy(exports->all[i]))
            oldest = i;
    }
    if (oldest < SHOAL_FABRIC_EXPORTS_MAX)
        exports_end(exports, oldest);
    return oldest < SHOAL_FABRIC_EXPORTS_MAX;
}

static void log_refused_export(struct shoal_fabric_exports *exports, const struct shoal_fabric_export *export,
                               const char *reason)
{
    if (!exports->has_refused)
        shoal_log_line(
            exports->log, SHOAL_LOG_WARN, "fabric",
            "%zu bytes of a GPU's memory could not be registered with the adapter (%s): inputs there pass through host "
            "memory",
            export->bytes, reason);
    exports->has_refused = true;
}

struct shoal_fabric_exported *shoal_fabric_exports_refuse(struct shoal_fabric_exports *exports,
                                                          const struct shoal_fabric_export *export)
{
    end_overlapping(exports, export);
    struct shoal_fabric_exported *exported = exports_make_room(exports) ? calloc(1, sizeof *exported) : NULL;
    if (!exported)
        return NULL;
    exported->number = export->number;
    exported->begin = export->begin;
    exported->bytes = export->bytes;
    exported->used = exported->made = exports->now;
    atomic_init(&exported->holders, 0);
    SHOAL_ASSERT(exports->count < SHOAL_FABRIC_EXPORTS_MAX);
    exports->all[exports->count++] = exported;
    return exported;
}

struct shoal_fabric_exported *shoal_fabric_exports_add(struct shoal_fabric_exports *exports,
                                                       const struct shoal_fabric_export *export)
{
    struct shoal_fabric_exported *exported = shoal_fabric_exports_refuse(exports, export);
    const char *refusal = exported ? shoal_fabric_endpoint_register_export(exports->endpoint, export, &exported->memory) : NULL;
    if (refusal)
        log_refused_export(exports, export, refusal);
    return exported;
}

const struct shoal_fabric_exported *shoal_fabric_exports_next(struct shoal_fabric_exports *exports)
{
    if (!exports->count)
        return NULL;
    exports->looked_at = (exports->looked_at + 1) % exports->count;
    return exports->all[exports->looked_at];
}

void shoal_fabric_exports_forget(struct shoal_fabric_exports *exports, uint64_t number)
{
    for (size_t i = exports->count; i-- > 0;) {
        if (exports->all[i]->number == number && !exports_is_busy(exports->all[i]))
            exports_end(exports, i);
    }
}

struct shoal_fabric_exported *shoal_fabric_exports_find(const struct shoal_fabric_exports *exports, const void *at,
                                                        size_t bytes)
{
    const uint64_t first = (uintptr_t)at;
    struct shoal_fabric_exported *newest = NULL;
    for (size_t i = 0; i < exports->count; i++) {
        struct shoal_fabric_exported *exported = exports->all[i];
        const uint64_t offset = first - exported->begin;
        const bool has_all = offset <= exported->bytes && bytes <= exported->bytes - offset;
        const bool is_held = exported->memory.region && atomic_load_explicit(&exported->holders, memory_order_relaxed) > 0;
        if (has_all && is_held && (!newest || exported->number > newest->number))
            newest = exported;
    }
    return newest;
}

void shoal_fabric_exports_close(struct shoal_fabric_exports *exports)
{
    while (exports->count)
        exports_end(exports, 0);
}
