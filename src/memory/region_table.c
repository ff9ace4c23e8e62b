#include "memory/region_table.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "memory/location.h"

typedef uint64_t (*key_fn)(const struct shoal_region *region);

static uint64_t begin_of(const struct shoal_region *region)
{
    return (uintptr_t)region->begin;
}

static uint64_t region_number_of(const struct shoal_region *region)
{
    return region->number;
}

/* Returns how many of the sorted regions have a key of at most `key`. */
static size_t count_up_to(struct shoal_region *const *sorted, size_t count, key_fn key_of, uint64_t key)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (key_of(sorted[middle]) <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void put_in(struct shoal_region **sorted, size_t count, key_fn key_of, struct shoal_region *region)
{
    const size_t at = count_up_to(sorted, count, key_of, key_of(region));
    SHOAL_ASSERT(!at || key_of(sorted[at - 1]) != key_of(region)); /* keys are unique */
    memmove(sorted + at + 1, sorted + at, (count - at) * sizeof(struct shoal_region *));
    sorted[at] = region;
}

static void take_out(struct shoal_region **sorted, size_t count, key_fn key_of, const struct shoal_region *region)
{
    const size_t after = count_up_to(sorted, count, key_of, key_of(region));
    SHOAL_ASSERT(after && sorted[after - 1] == region); /* keys are unique */
    memmove(sorted + after - 1, sorted + after, (count - after) * sizeof(struct shoal_region *));
}

/* Makes room for one more region. Returns NULL, and leaves the array unchanged, if out of memory. */
static struct shoal_region **grow(struct shoal_region ***array, size_t count)
{
    struct shoal_region **larger = realloc(*array, (count + 1) * sizeof(struct shoal_region *));
    if (larger)
        *array = larger;
    return larger;
}

static uint64_t next_number(struct shoal_region_table *table)
{
    do
        table->last_number = table->last_number < SHOAL_LOCATION_SEGMENT_MAX ? table->last_number + 1 : 1;
    while (shoal_region_table_numbered(table, table->last_number));
    return table->last_number;
}

bool shoal_region_table_add(struct shoal_region_table *table, struct shoal_region *region)
{
    SHOAL_ASSERT(!shoal_region_table_overlap(table, region->begin, shoal_region_extent(region)));
    if (!grow(&table->by_begin, table->count) || !grow(&table->by_number, table->count))
        return false;
    region->number = next_number(table);
    put_in(table->by_begin, table->count, begin_of, region);
    put_in(table->by_number, table->count++, region_number_of, region);
    return true;
}

void shoal_region_table_remove(struct shoal_region_table *table, struct shoal_region *region)
{
    take_out(table->by_begin, table->count, begin_of, region);
    take_out(table->by_number, table->count--, region_number_of, region);
}

void shoal_region_table_renumber(struct shoal_region_table *table, struct shoal_region *region)
{
    const uint64_t fresh = next_number(table); /* chosen while the old number is still taken */
    take_out(table->by_number, table->count, region_number_of, region);
    region->number = fresh;
    put_in(table->by_number, table->count - 1, region_number_of, region);
}

void shoal_region_table_fini(struct shoal_region_table *table)
{
    free(table->by_begin);
    free(table->by_number);
    *table = (struct shoal_region_table){NULL, NULL, 0, 0};
}

struct shoal_region *shoal_region_table_at(const struct shoal_region_table *table, const char *address)
{
    const size_t after = count_up_to(table->by_begin, table->count, begin_of, (uintptr_t)address);
    SHOAL_ASSERT(after == table->count || table->by_begin[after]->begin > address);
    return after ? table->by_begin[after - 1] : NULL;
}

/* Regions do not overlap, so only the last one that begins before the end can extend into these bytes. */
struct shoal_region *shoal_region_table_overlap(const struct shoal_region_table *table, const char *begin, size_t bytes)
{
    struct shoal_region *region = shoal_region_table_at(table, begin + bytes - 1);
    return region && region->begin + shoal_region_extent(region) > begin ? region : NULL;
}

struct shoal_region *shoal_region_table_numbered(const struct shoal_region_table *table, uint64_t number)
{
    const size_t after = count_up_to(table->by_number, table->count, region_number_of, number);
    return after && table->by_number[after - 1]->number == number ? table->by_number[after - 1] : NULL;
}
