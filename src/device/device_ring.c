#include "device/device_ring.h"

#include <stdlib.h>

#include "base/assert.h"

/* ---- The ring ------------------------------------------------------------------------------------------------------------ */

static size_t counter_bytes(unsigned slots)
{
    return shoal_round_up((2 * slots + 1) * sizeof(struct shoal_device_ring_counter), SHOAL_PAGE);
}

size_t shoal_device_ring_bytes(unsigned slots, size_t slot_bytes)
{
    return shoal_round_up(counter_bytes(slots) + slots * slot_bytes, SHOAL_PAGE);
}

void shoal_device_ring_init(struct shoal_device_ring *ring, bool is_inward, unsigned slots, size_t slot_bytes, uint64_t start,
                            void *memory)
{
    *ring = (struct shoal_device_ring){.is_inward = is_inward,
                                       .slots = slots,
                                       .slot_bytes = slot_bytes,
                                       .start = start,
                                       .by_stream = memory,
                                       .by_engine = (struct shoal_device_ring_counter *)memory + slots,
                                       .opening = (struct shoal_device_ring_counter *)memory + (size_t)2 * slots,
                                       .data = (char *)memory + counter_bytes(slots)};
    atomic_init(&ring->opening->value, start);
    for (unsigned slot = 0; slot < slots; slot++) {
        atomic_init(&ring->by_stream[slot].value, start);
        atomic_init(&ring->by_engine[slot].value, start);
    }
}

/* Rows begin at cache lines, unless that leaves no room for a row. */
static size_t row_elements(size_t slot_bytes, int parts, size_t element_bytes)
{
    const size_t row = slot_bytes / (size_t)parts;
    return (row >= SHOAL_CACHE_LINE ? row / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE : row) / element_bytes;
}

/* A range touches one unit more than it fills. */
static size_t units_of_range(size_t slot_bytes, int parts, size_t element_bytes, size_t range_elements)
{
    const size_t unit = row_elements(slot_bytes, parts, element_bytes);
    return (range_elements + unit - 1) / unit + 1;
}

unsigned shoal_device_ring_slots(size_t slot_bytes, size_t range_bytes, int parts, size_t part_range_bytes)
{
    const size_t whole = units_of_range(slot_bytes, 1, 1, range_bytes);
    const size_t cut = units_of_range(slot_bytes, parts, 1, part_range_bytes);
    return (unsigned)shoal_max_size(whole, cut) + 2;
}

/* release: as in release_unit(). No counter is overwritten, because one thread at a time writes them. */
void shoal_device_ring_counters_let_go(struct shoal_device_ring_counter *counters, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        const uint64_t value = atomic_load_explicit(&counters[i].value, memory_order_relaxed);
        atomic_store_explicit(&counters[i].value, value + SHOAL_DEVICE_RING_FAR_AHEAD, memory_order_release);
    }
}

void shoal_device_ring_let_go(struct shoal_device_ring *ring)
{
    if (!ring->is_let_go)
        shoal_device_ring_counters_let_go(ring->by_engine, ring->slots);
    ring->is_let_go = true;
}

/* ---- Functions for the engine -------------------------------------------------------------------------------------------- */

/* The stream's copies happen before. */
static bool has_reached(const struct shoal_device_ring *ring, const struct shoal_device_ring_unit *unit, uint64_t number)
{
    return shoal_device_ring_counter_has(&ring->by_stream[unit->slot], number);
}

bool shoal_device_ring_is_ready(const struct shoal_device_ring_operand *operand, size_t begin, size_t end)
{
    const struct shoal_device_ring *ring = operand->ring;
    end = shoal_min_size(end, operand->count);
    if (operand->writes && !shoal_device_ring_counter_has(operand->opening, operand->opening_value))
        return false;
    for (uint64_t u = begin / operand->unit_elements; u * operand->unit_elements < end; u++) {
        const struct shoal_device_ring_unit unit = shoal_device_ring_unit(operand, u);
        if (!has_reached(ring, &unit, ring->is_inward ? unit.number : unit.number - 1))
            return false;
    }
    return true;
}

char *shoal_device_ring_address(const struct shoal_device_ring_operand *operand, int part, size_t at, size_t *run)
{
    *run = shoal_min_size(*run, operand->unit_elements - at % operand->unit_elements);
    return shoal_device_ring_at(operand, part, at);
}

static void write_to_device(const struct shoal_device_ring_operand *operand)
{
    for (size_t i = 0; i < operand->write_count; i++) {
        const struct shoal_device_ring_write *run = &operand->writes[i];
        run->mapping->write(run->mapping, run->to, run->from, run->bytes, i + 1 == operand->write_count);
    }
}

/* A ring that was released blocks no stream, and later work may already reuse the memory. release: what the engine has written,
 * and its reads, happen before. */
static void ring_hand_over(const struct shoal_device_ring_operand *operand, const struct shoal_device_ring_unit *unit)
{
    if (operand->ring->is_let_go)
        return;
    write_to_device(operand);
    atomic_store_explicit(&operand->ring->by_engine[unit->slot].value, unit->number, memory_order_release);
}

static void release_unit(struct shoal_device_ring_operand *operand, uint64_t number, size_t elements)
{
    const struct shoal_device_ring_unit unit = shoal_device_ring_unit(operand, number);
    size_t *released = &operand->released[unit.slot];
    *released += elements;
    SHOAL_ASSERT(*released <= unit.end - unit.begin);
    if (*released < unit.end - unit.begin)
        return;
    *released = 0;
    operand->units_released++;
    ring_hand_over(operand, &unit);
}

void shoal_device_ring_release(struct shoal_device_ring_operand *operand, size_t begin, size_t end)
{
    end = shoal_min_size(end, operand->count);
    for (size_t at = begin, until; at < end; at = until) {
        const uint64_t unit = at / operand->unit_elements;
        until = shoal_min_size(end, (size_t)(unit + 1) * operand->unit_elements);
        release_unit(operand, unit, until - at);
    }
}

/* A stream processes units in order. */
bool shoal_device_ring_is_finished(const struct shoal_device_ring_operand *operand)
{
    if (!operand->units)
        return true;
    const struct shoal_device_ring_unit last = shoal_device_ring_unit(operand, operand->units - 1);
    return has_reached(operand->ring, &last, last.number);
}

const char *shoal_device_ring_lent_at(const struct shoal_device_ring_operand *operand)
{
    return operand->units && !operand->stays ? shoal_device_ring_at(operand, 0, 0) : NULL;
}

void shoal_device_ring_drop(struct shoal_device_ring_operand *operand)
{
    if (operand->units_released < operand->units)
        shoal_device_ring_let_go(operand->ring);
    shoal_device_ring_leave(operand);
}

/* ---- Operands ------------------------------------------------------------------------------------------------------------ */

struct shoal_device_ring_operand *shoal_device_ring_open(struct shoal_device_ring *ring, int parts, int most_parts,
                                                         size_t count, size_t element_bytes)
{
    struct shoal_device_ring_operand *operand = calloc(1, sizeof *operand + ring->slots * sizeof operand->released[0]);
    if (!operand)
        return NULL;
    operand->ring = ring;
    atomic_init(&operand->holders, 2);
    operand->parts = parts;
    operand->element_bytes = element_bytes;
    operand->count = count;
    operand->unit_elements = row_elements(ring->slot_bytes, most_parts, element_bytes);
    operand->row_bytes = operand->unit_elements * element_bytes;
    return operand;
}

struct shoal_device_ring_operand *shoal_device_ring_open_stay(struct shoal_device_ring *ring, size_t count,
                                                              atomic_int *registration)
{
    struct shoal_device_ring_operand *operand = calloc(1, sizeof *operand + ring->slots * sizeof operand->released[0]);
    if (!operand)
        return NULL;
    operand->stays = true;
    operand->ring = ring;
    atomic_init(&operand->holders, 2);
    operand->count = count;
    operand->unit_elements = shoal_max_size(count, 1);
    operand->registration = registration;
    return operand;
}

void shoal_device_ring_reserve(struct shoal_device_ring_operand *operand)
{
    operand->first = operand->ring->reserved;
    operand->units = (operand->count + operand->unit_elements - 1) / operand->unit_elements;
    operand->ring->reserved += operand->units;
}

void shoal_device_ring_give_back(struct shoal_device_ring_operand *operand)
{
    SHOAL_ASSERT(operand->ring->reserved == operand->first + operand->units);
    operand->ring->reserved = operand->first;
    operand->units = 0;
}

/* The memory that is written now may also be the input. The input's ready counter shows that its stream has copied from it and
 * has reached the call. */
void shoal_device_ring_write_out(struct shoal_device_ring_operand *operand, const struct shoal_device_ring_operand *input,
                                 struct shoal_device_ring_write *writes, size_t count)
{
    SHOAL_ASSERT(operand->units == 1 && (!input || input->units <= 1));
    operand->writes = writes;
    operand->write_count = count;
    operand->opening = operand->ring->opening;
    operand->opening_value = operand->ring->start + operand->first + 1;
    if (!input || !input->units)
        return;
    const struct shoal_device_ring_unit unit = shoal_device_ring_unit(input, 0);
    operand->opening = &input->ring->by_stream[unit.slot];
    operand->opening_value = unit.number;
}

static void ring_operand_free(struct shoal_device_ring_operand *operand)
{
    /* release: what was written through a mapping happens before its end. */
    for (size_t i = 0; i < operand->write_count; i++)
        atomic_fetch_sub_explicit(&operand->writes[i].mapping->holders, 1, memory_order_release);
    if (operand->registration)
        atomic_fetch_sub_explicit(operand->registration, 1, memory_order_release);
    free(operand->writes);
    free(operand);
}

void shoal_device_ring_leave(struct shoal_device_ring_operand *operand)
{
    /* acq_rel: what the other holder did with the operand happens before it is freed. */
    if (operand && atomic_fetch_sub_explicit(&operand->holders, 1, memory_order_acq_rel) == 1)
        ring_operand_free(operand);
}

struct shoal_device_ring_unit shoal_device_ring_unit(const struct shoal_device_ring_operand *operand, uint64_t unit)
{
    const struct shoal_device_ring *ring = operand->ring;
    const uint64_t at = operand->first + unit;
    const size_t begin = (size_t)unit * operand->unit_elements;
    return (struct shoal_device_ring_unit){.slot = (unsigned)(at % ring->slots),
                                           .begin = begin,
                                           .end = shoal_min_size(begin + operand->unit_elements, operand->count),
                                           .number = ring->start + at / ring->slots + 1,
                                           .is_first_use = at < ring->slots};
}

char *shoal_device_ring_at(const struct shoal_device_ring_operand *operand, int part, size_t at)
{
    const struct shoal_device_ring *ring = operand->ring;
    const size_t slot = (operand->first + at / operand->unit_elements) % ring->slots;
    return ring->data + slot * ring->slot_bytes + (size_t)part * operand->row_bytes +
           at % operand->unit_elements * operand->element_bytes;
}

/* ---- Rings that peers reach ---------------------------------------------------------------------------------------------- */

void shoal_device_card_describe(struct shoal_device_card *card, const struct shoal_device_ring *ring)
{
    card->rings[ring->is_inward].data = (uint64_t)(ring->data - (const char *)card);
    card->rings[ring->is_inward].slots = ring->slots;
    card->rings[ring->is_inward].slot_bytes = ring->slot_bytes;
}

char *shoal_device_lent_address(const struct shoal_device_lent *lent, int part, size_t at, size_t *run)
{
    const size_t slots = (size_t)lent->card->rings[lent->is_inward].slots;
    const size_t slot_bytes = (size_t)lent->card->rings[lent->is_inward].slot_bytes;
    char *const data = (char *)(uintptr_t)lent->card + lent->card->rings[lent->is_inward].data;
    const size_t unit = row_elements(slot_bytes, lent->most_parts, lent->element_bytes);
    const size_t slot = ((size_t)(lent->first - data) / slot_bytes + at / unit) % slots;
    *run = shoal_min_size(*run, unit - at % unit);
    return data + slot * slot_bytes + ((size_t)part * unit + at % unit) * lent->element_bytes;
}
