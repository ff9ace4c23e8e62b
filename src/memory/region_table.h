/* The regions of a context, sorted by where they begin and by number, so that both look-ups take O(log n). Regions do not
 * overlap, so the region of an address is the last one that begins at or below it. Only memory.c uses this; calls come under
 * its guard. */
#ifndef SHOAL_MEMORY_REGION_TABLE_H
#define SHOAL_MEMORY_REGION_TABLE_H

#include "memory/memory.h"

struct shoal_region_table {
    struct shoal_region **by_begin;
    struct shoal_region **by_number;
    size_t count;
    uint64_t last_number; /* that was given */
};

/* Gives the region a number and takes it in. False: no memory; nothing has changed. */
SHOAL_MUST_USE bool shoal_region_table_add(struct shoal_region_table *table, struct shoal_region *region);
/* Takes the region out; it still belongs to the caller. */
void shoal_region_table_remove(struct shoal_region_table *table, struct shoal_region *region);
/* Gives the region another number: nobody finds it by the old one. */
void shoal_region_table_renumber(struct shoal_region_table *table, struct shoal_region *region);
/* Frees the table. Its regions belong to the caller. */
void shoal_region_table_fini(struct shoal_region_table *table);

/* The last region that begins at or below the address; NULL: there is none. The address may lie behind the region's end. */
struct shoal_region *shoal_region_table_at(const struct shoal_region_table *table, const char *address);
/* A region of which some byte lies in [begin, begin + bytes), bytes > 0; NULL: there is none. */
struct shoal_region *shoal_region_table_overlap(const struct shoal_region_table *table, const char *begin, size_t bytes);
struct shoal_region *shoal_region_table_numbered(const struct shoal_region_table *table, uint64_t number);

#endif
