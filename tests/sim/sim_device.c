#include "sim/sim_device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device_ring.h"
#include "reference.h"

enum stage { ABSENT, READY, WRITTEN, GONE };

struct unit {
    enum stage stage;
    size_t released; /* elements of it */
};

struct operand {
    struct shoal_operand base; /* must be first */
    struct sim_device *device;
    struct operand *next;
    struct shoal_call host; /* the call as if all operands were in host memory; the input owns its layout */
    enum shoal_block_operand which;
    int rank;
    int parts;
    bool is_in_parts;
    size_t element;
    size_t count; /* elements of the longest part */
    size_t unit_elements;
    size_t unit_count, slot_count; /* unit u is in slot u % slot_count */
    size_t first;                  /* all units before it are gone */
    size_t movable;                /* how many units can move */
    struct unit *units;
    int rows; /* of unit_elements elements in a slot: as many as either operand of the call has parts */
    struct memory *memory;
    char *ring;
};

/* The ring of an operand. It remains until the device closes: a rank that has not heard of a failure may still look. */
struct memory {
    struct memory *next;
    struct shoal_device_card card;
    _Alignas(SHOAL_CACHE_LINE) char ring[];
};

#define UNITS_MOST 100 /* about: units move one by one, and a step of the simulation looks at each */

struct sim_device {
    uint64_t random;
    size_t range_bytes, part_range_bytes;
    size_t reuses;
    unsigned stopped;
    struct operand *operands;
    struct memory *memories;
    struct shoal_sim *lender; /* NULL: nothing is lent */
    int lender_rank;
    char breach[200];
};

SHOAL_PRINTF(2, 3) static void device_breach(struct sim_device *device, const char *format, ...)
{
    va_list args;
    if (device->breach[0])
        return;
    va_start(args, format);
    vsnprintf(device->breach, sizeof device->breach, format, args);
    va_end(args);
}

/* ---- Units --------------------------------------------------------------------------------------------------------------- */

static size_t part_length(const struct operand *operand, int part)
{
    const bool is_input = operand->which == SHOAL_INPUT;
    return shoal_call_length(&operand->host, operand->rank, is_input ? operand->rank : part, is_input ? part : operand->rank);
}

static size_t unit_end(const struct operand *operand, size_t unit)
{
    return shoal_min_size((unit + 1) * operand->unit_elements, operand->count);
}

static char *unit_row(const struct operand *operand, size_t unit, int part)
{
    const size_t row = unit % operand->slot_count * (size_t)operand->rows + (size_t)part;
    return operand->ring + row * operand->unit_elements * operand->element;
}

static void wipe(struct operand *operand, size_t unit)
{
    memset(unit_row(operand, unit, 0), 0xFF, (size_t)operand->parts * operand->unit_elements * operand->element);
}

static void copy_unit(struct operand *operand, size_t unit)
{
    const size_t begin = unit * operand->unit_elements;
    for (int part = 0; part < operand->parts; part++) {
        const size_t end = shoal_min_size(unit_end(operand, unit), part_length(operand, part));
        for (size_t at = begin, run; at < end; at += run) {
            run = end - at;
            char *there = shoal_call_address(&operand->host, operand->rank, operand->element, operand->which, part, at, &run);
            char *here = unit_row(operand, unit, part) + (at - begin) * operand->element;
            if (operand->which == SHOAL_INPUT)
                memcpy(here, there, run * operand->element);
            else
                memcpy(there, here, run * operand->element);
        }
    }
}

static bool is_place_free(const struct operand *operand, size_t unit)
{
    return unit < operand->slot_count || operand->units[unit - operand->slot_count].stage == GONE;
}

static bool can_move(const struct operand *operand, size_t unit)
{
    const enum stage stage = operand->units[unit].stage;
    return (stage == ABSENT && is_place_free(operand, unit)) || stage == WRITTEN;
}

static void set_stage(struct operand *operand, size_t unit, enum stage stage)
{
    operand->movable -= can_move(operand, unit);
    operand->units[unit].stage = stage;
    operand->movable += can_move(operand, unit);
    if (stage == GONE && unit + operand->slot_count < operand->unit_count)
        operand->movable += can_move(operand, unit + operand->slot_count);
}

static void move(struct operand *operand, size_t unit)
{
    if (operand->units[unit].stage == WRITTEN) {
        copy_unit(operand, unit);
        wipe(operand, unit);
        set_stage(operand, unit, GONE);
        return;
    }
    if (operand->which == SHOAL_INPUT)
        copy_unit(operand, unit);
    operand->device->reuses += unit >= operand->slot_count;
    set_stage(operand, unit, READY);
}

static size_t movable_of(const struct sim_device *device, const struct operand *operand)
{
    return device->stopped & 1u << operand->which ? 0 : operand->movable;
}

/* Moves the n-th of an operand's units that can move. */
static void move_nth(struct operand *operand, size_t nth)
{
    size_t unit = operand->first;
    while (operand->units[unit].stage == GONE)
        unit++;
    operand->first = unit;
    while (!can_move(operand, unit) || nth--)
        unit++;
    move(operand, unit);
}

/* Moves one of the units that can move, each with the same probability. Each operand counts its own: there are many units, and
 * one at a time moves. */
bool sim_device_advance(struct sim_device *device)
{
    size_t count = 0;
    for (const struct operand *operand = device->operands; operand; operand = operand->next)
        count += movable_of(device, operand);
    if (!count)
        return false;
    struct operand *operand = device->operands;
    size_t nth = reference_below(&device->random, count);
    for (; nth >= movable_of(device, operand); operand = operand->next)
        nth -= movable_of(device, operand);
    move_nth(operand, nth);
    return true;
}

/* ---- Operations for the engine ------------------------------------------------------------------------------------------- */

static struct operand *operand_of(const struct shoal_operand *base)
{
    return (struct operand *)(uintptr_t)base;
}

static size_t range_of(const struct operand *operand)
{
    return operand->is_in_parts ? operand->device->part_range_bytes : operand->device->range_bytes;
}

static bool operand_is_ready(const struct shoal_operand *base, size_t begin, size_t end)
{
    struct operand *operand = operand_of(base);
    if ((end - begin) * operand->element > range_of(operand))
        device_breach(operand->device, "asked for %zu elements of %zu bytes at once", end - begin, operand->element);
    end = shoal_min_size(end, operand->count);
    for (size_t unit = begin / operand->unit_elements; begin < end && unit * operand->unit_elements < end; unit++) {
        if (operand->units[unit].stage > READY)
            device_breach(operand->device, "asked for elements %zu to %zu when they were released", begin, end);
        if (operand->units[unit].stage != READY)
            return false;
    }
    return true;
}

static char *operand_address(const struct shoal_operand *base, int part, size_t at, size_t *run)
{
    struct operand *operand = operand_of(base);
    const size_t unit = at / operand->unit_elements, begin = unit * operand->unit_elements;
    if (operand->units[unit].stage != READY || part >= operand->parts)
        device_breach(operand->device, "touched element %zu of part %d, which is not ready", at, part);
    *run = shoal_min_size(*run, unit_end(operand, unit) - at);
    return unit_row(operand, unit, part) + (at - begin) * operand->element;
}

static void release_unit(struct operand *operand, size_t unit, size_t elements)
{
    struct unit *at = &operand->units[unit];
    const size_t length = unit_end(operand, unit) - unit * operand->unit_elements;
    at->released += elements;
    if (at->stage != READY || at->released > length)
        device_breach(operand->device, "released %zu of %zu elements of unit %zu at stage %d", at->released, length, unit,
                      (int)at->stage);
    if (at->released < length)
        return;
    set_stage(operand, unit, operand->which == SHOAL_INPUT ? GONE : WRITTEN);
    if (at->stage == GONE)
        wipe(operand, unit);
}

static void operand_release(struct shoal_operand *base, size_t begin, size_t end)
{
    struct operand *operand = operand_of(base);
    end = shoal_min_size(end, operand->count);
    for (size_t at = begin, until; at < end; at = until) {
        until = shoal_min_size(end, (at / operand->unit_elements + 1) * operand->unit_elements);
        release_unit(operand, at / operand->unit_elements, until - at);
    }
}

static bool operand_is_finished(const struct shoal_operand *base)
{
    const struct operand *operand = operand_of(base);
    for (size_t unit = operand->first; unit < operand->unit_count; unit++) {
        if (operand->units[unit].stage < WRITTEN)
            device_breach(operand->device, "asked for the end before all was released");
        if (operand->units[unit].stage != GONE)
            return false;
    }
    return true;
}

static const char *operand_lent_at(const struct shoal_operand *base)
{
    const struct operand *operand = operand_of(base);
    return operand->device->lender && operand->unit_count ? operand->ring : NULL;
}

static void operand_drop(struct shoal_operand *base)
{
    struct operand *operand = operand_of(base), **link = &operand->device->operands;
    while (*link != operand)
        link = &(*link)->next;
    *link = operand->next;
    for (size_t unit = 0; unit < operand->slot_count; unit++)
        wipe(operand, unit);
    shoal_layout_free(operand->host.layout);
    free(operand->units);
    free(operand);
}

static const struct shoal_operand_ops operand_ops = {.is_ready = operand_is_ready,
                                                     .address = operand_address,
                                                     .release = operand_release,
                                                     .is_finished = operand_is_finished,
                                                     .lent_at = operand_lent_at,
                                                     .drop = operand_drop};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

struct sim_device *sim_device_open(uint64_t seed, size_t range_bytes, size_t part_range_bytes)
{
    struct sim_device *device = calloc(1, sizeof *device);
    if (device)
        *device = (struct sim_device){.random = seed, .range_bytes = range_bytes, .part_range_bytes = part_range_bytes};
    return device;
}

void sim_device_lend(struct sim_device *device, struct shoal_sim *sim, int rank)
{
    device->lender = sim;
    device->lender_rank = rank;
}

void sim_device_close(struct sim_device *device)
{
    while (device && device->operands)
        operand_drop(&device->operands->base);
    while (device && device->memories) {
        struct memory *memory = device->memories;
        device->memories = memory->next;
        free(memory);
    }
    free(device);
}

/* Peers find rows by the size of slots, so a row that does not fit into a cache line consists of whole ones. */
static size_t round_row(size_t elements, size_t element)
{
    return elements * element < SHOAL_CACHE_LINE ? elements : shoal_round_up(elements, SHOAL_CACHE_LINE / element);
}

/* The slots hold the longest range that the engine may ask for, wherever in a unit it begins. */
static void draw_units(struct operand *operand)
{
    uint64_t *random = &operand->device->random;
    const size_t range = range_of(operand) / operand->element;
    operand->unit_elements = 1 + reference_below(random, reference_below(random, 2) ? 300 : 3000);
    operand->unit_elements = shoal_max_size(operand->unit_elements, operand->count / UNITS_MOST);
    if (operand->device->lender)
        operand->unit_elements = round_row(operand->unit_elements, operand->element);
    operand->unit_count = (operand->count + operand->unit_elements - 1) / operand->unit_elements;
    operand->slot_count = range / operand->unit_elements + 2 + reference_below(random, 3);
    if (operand->slot_count > operand->unit_count)
        operand->slot_count = operand->unit_count ? operand->unit_count : 1;
}

static void make_ring(struct operand *operand)
{
    struct sim_device *device = operand->device;
    const size_t slot_bytes = (size_t)operand->rows * operand->unit_elements * operand->element;
    const size_t bytes = offsetof(struct memory, ring) + operand->slot_count * slot_bytes;
    struct memory *memory = aligned_alloc(SHOAL_CACHE_LINE, shoal_round_up(bytes, SHOAL_CACHE_LINE));
    if (!memory)
        abort();
    const struct shoal_device_ring ring = {.is_inward = operand->which == SHOAL_INPUT,
                                           .slots = (unsigned)operand->slot_count,
                                           .slot_bytes = slot_bytes,
                                           .data = memory->ring};
    memset(memory, 0xFF, bytes);
    memory->next = device->memories;
    device->memories = operand->memory = memory;
    operand->ring = memory->ring;
    shoal_device_card_describe(&memory->card, &ring);
    if (device->lender &&
        shoal_sim_share(device->lender, device->lender_rank, &memory->card, bytes - offsetof(struct memory, card)) != SHOAL_OK)
        device->lender = NULL; /* it has shared as much as it can */
}

static struct shoal_operand *open_operand(struct sim_device *device, const struct shoal_call *call, int rank, int size,
                                          enum shoal_block_operand which, struct shoal_layout *layout)
{
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    struct operand *operand = calloc(1, sizeof *operand);
    if (!operand)
        abort();
    *operand = (struct operand){.base = {.ops = &operand_ops},
                                .device = device,
                                .next = device->operands,
                                .host = *call,
                                .which = which,
                                .rank = rank,
                                .parts = 1,
                                .element = shoal_type_bytes(call->type)};
    operand->host.layout = layout;
    operand->is_in_parts = which == SHOAL_INPUT ? shape->is_input_partitioned : shape->is_output_partitioned;
    operand->parts = operand->is_in_parts ? size : 1;
    for (int part = 0; part < operand->parts; part++)
        operand->count = shoal_max_size(operand->count, part_length(operand, part));
    operand->rows = shape->is_input_partitioned || shape->is_output_partitioned ? size : 1;
    draw_units(operand);
    operand->units = calloc(operand->unit_count + 1, sizeof *operand->units);
    if (!operand->units)
        abort();
    make_ring(operand);
    operand->movable = shoal_min_size(operand->slot_count, operand->unit_count);
    device->operands = operand;
    return &operand->base;
}

/* Lays out the call once more, so that each operand has its own layout. */
static struct shoal_layout *copy_layout(const struct shoal_call *call, int rank, int size)
{
    struct shoal_call copy = *call;
    copy.layout = NULL;
    if (call->layout && !shoal_call_lay_out(&copy, rank, size))
        abort();
    return copy.layout;
}

void sim_device_take(struct sim_device *device, struct shoal_call *call, int rank, int size, unsigned operands)
{
    struct shoal_operand *taken[2] = {NULL, NULL};
    struct shoal_layout *former;
    for (unsigned which = SHOAL_INPUT; which <= SHOAL_OUTPUT; which++) {
        if (operands & 1u << which)
            taken[which] =
                open_operand(device, call, rank, size, (enum shoal_block_operand)which, copy_layout(call, rank, size));
    }
    if (!taken[0] && !taken[1])
        return;
    if (taken[0])
        call->input = NULL;
    if (taken[1])
        call->output = NULL;
    if (!shoal_call_put_operands(call, rank, size, taken[0], taken[1], &former))
        abort();
    shoal_layout_free(former);
}

void sim_device_stop(struct sim_device *device, unsigned operands)
{
    device->stopped = operands;
}

int sim_device_open_count(const struct sim_device *device)
{
    int count = 0;
    for (const struct operand *operand = device->operands; operand; operand = operand->next)
        count++;
    return count;
}

size_t sim_device_reuses(const struct sim_device *device)
{
    return device->reuses;
}

const char *sim_device_breach(const struct sim_device *device)
{
    return device->breach[0] ? device->breach : NULL;
}
