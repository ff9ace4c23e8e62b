/* The regions of a context, sorted by address and by number, so that both look-ups take O(log n). Regions do not overlap, so
 * the region of an address is the last one that begins at or below it. Only memory.c uses this; it calls under its guard. */
#ifndef SHOAL_MEMORY_REGION_TABLE_H
#define SHOAL_MEMORY_REGION_TABLE_H

#include "memory/memory.h"

struct shoal_region_table {
    struct shoal_region **by_begin;
    struct shoal_region **by_number;
    size_t count;
    uint64_t last_number; /* the latest number assigned */
};

/* Adds the region and assigns it a number. Returns false if out of memory; then nothing has changed. */
SHOAL_MUST_USE bool shoal_region_table_add(struct shoal_region_table *table, struct shoal_region *region);
/* Removes the region; it still belongs to the caller. */
void shoal_region_table_remove(struct shoal_region_table *table, struct shoal_region *region);
/* Assigns the region another number: a look-up by the old number does not find it. */
void shoal_region_table_renumber(struct shoal_region_table *table, struct shoal_region *region);
/* Frees the table. Its regions belong to the caller. */
void shoal_region_table_fini(struct shoal_region_table *table);

/* Returns the last region that begins at or below the address, or NULL. The address may be after the region's end. */
struct shoal_region *shoal_region_table_at(const struct shoal_region_table *table, const char *address);
/* Returns a region that contains some byte of [begin, begin + bytes), bytes > 0, or NULL. */
struct shoal_region *shoal_region_table_overlap(const struct shoal_region_table *table, const char *begin, size_t bytes);
struct shoal_region *shoal_region_table_numbered(const struct shoal_region_table *table, uint64_t number);

#endif
