/* Regions by their addresses. */
#include <stdlib.h>
#include <string.h>

#include "mock_driver.h"

/* Returns the first item that ends after the address. */
static size_t first_behind(const struct mock_ranges *ranges, uint64_t at)
{
    size_t low = 0, high = ranges->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (ranges->items[middle].end <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool mock_ranges_overlap(const struct mock_ranges *ranges, uint64_t begin, size_t bytes)
{
    const size_t i = first_behind(ranges, begin);
    return i < ranges->count && ranges->items[i].begin < begin + bytes;
}

struct mock_region *mock_ranges_find(const struct mock_ranges *ranges, uint64_t at)
{
    const size_t i = first_behind(ranges, at);
    return i < ranges->count && ranges->items[i].begin <= at ? ranges->items[i].region : NULL;
}

bool mock_ranges_add(struct mock_ranges *ranges, uint64_t begin, size_t bytes, struct mock_region *region)
{
    if (mock_ranges_overlap(ranges, begin, bytes))
        return false;
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room ? 2 * ranges->room : 64;
        ranges->items = realloc(ranges->items, ranges->room * sizeof *ranges->items);
        if (!ranges->items)
            abort();
    }
    const size_t i = first_behind(ranges, begin);
    memmove(&ranges->items[i + 1], &ranges->items[i], (ranges->count - i) * sizeof *ranges->items);
    ranges->items[i].begin = begin;
    ranges->items[i].end = begin + bytes;
    ranges->items[i].region = region;
    ranges->count++;
    return true;
}

void mock_ranges_remove(struct mock_ranges *ranges, uint64_t begin)
{
    const size_t i = first_behind(ranges, begin);
    if (i == ranges->count || ranges->items[i].begin != begin)
        return;
    ranges->count--;
    memmove(&ranges->items[i], &ranges->items[i + 1], (ranges->count - i) * sizeof *ranges->items);
}

void mock_ranges_clear(struct mock_ranges *ranges)
{
    free(ranges->items);
    memset(ranges, 0, sizeof *ranges);
}
