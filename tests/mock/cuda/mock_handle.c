/* Handles: numbers that are not valid pointers, so that a program that dereferences one crashes. They are never reused, so a
 * destroyed object is recognized. */
#include <stdlib.h>
#include <string.h>

#include "mock_driver.h"

#define TAG UINT64_C(0x4d00000000000000) /* not an address of any process */
#define INDEX_BITS 24

static struct {
    struct slot {
        void *object; /* NULL: free */
        enum mock_kind kind;
        uint64_t generation;
        size_t next_free; /* + 1 */
    } * slots;
    size_t count, room;
    size_t first_free; /* + 1 */
    size_t live[MOCK_KINDS];
} table;

void *mock_allocate_zeroed(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (!memory)
        abort();
    return memory;
}

static size_t take_slot(void)
{
    if (table.first_free) {
        const size_t index = table.first_free - 1;
        table.first_free = table.slots[index].next_free;
        return index;
    }
    if (table.count == table.room) {
        table.room = table.room ? 2 * table.room : 64;
        table.slots = realloc(table.slots, table.room * sizeof *table.slots);
        if (!table.slots)
            abort();
    }
    memset(&table.slots[table.count], 0, sizeof *table.slots);
    return table.count++;
}

static uint64_t handle_of(size_t index)
{
    const struct slot *slot = &table.slots[index];
    return TAG | (uint64_t)slot->kind << 48 | (slot->generation & 0xffffff) << INDEX_BITS | index;
}

uintptr_t mock_handle_make(enum mock_kind kind, void *object)
{
    const size_t index = take_slot();
    struct slot *slot = &table.slots[index];
    slot->object = object;
    slot->kind = kind;
    slot->generation++;
    table.live[kind]++;
    return (uintptr_t)handle_of(index);
}

static struct slot *find_slot(uintptr_t handle)
{
    const size_t index = (size_t)handle & (((size_t)1 << INDEX_BITS) - 1);
    if (index >= table.count || !table.slots[index].object || handle_of(index) != handle)
        return NULL;
    return &table.slots[index];
}

void *mock_handle_find(enum mock_kind kind, uintptr_t handle)
{
    const struct slot *slot = find_slot(handle);
    return slot && slot->kind == kind ? slot->object : NULL;
}

void mock_handle_drop(uintptr_t handle)
{
    struct slot *slot = find_slot(handle);
    if (!slot)
        return;
    slot->object = NULL;
    table.live[slot->kind]--;
    slot->next_free = table.first_free;
    table.first_free = (size_t)(slot - table.slots) + 1;
}

void *mock_handle_next(enum mock_kind kind, size_t *at)
{
    while (*at < table.count) {
        const struct slot *slot = &table.slots[(*at)++];
        if (slot->object && slot->kind == kind)
            return slot->object;
    }
    return NULL;
}

size_t mock_handle_count(enum mock_kind kind)
{
    return table.live[kind];
}
