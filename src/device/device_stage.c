#include "device/device_stage.h"

#include <stdlib.h>

#include "base/assert.h"

/* ---- The stage ----------------------------------------------------------------------------------------------------------- */

static size_t stage_counter_bytes(unsigned slots)
{
    return shoal_round_up(2 * (size_t)SHOAL_DEVICE_WORKS * slots * sizeof(struct shoal_device_ring_counter), SHOAL_PAGE);
}

/* Returns the bytes of the longest slice. */
static size_t slice_bytes(const struct shoal_device_stage_options *options)
{
    return options->hosts > 1 ? options->slot_bytes / (size_t)options->ranks : 0;
}

size_t shoal_device_stage_bytes(const struct shoal_device_stage_options *options)
{
    return stage_counter_bytes(options->slots) + shoal_round_up(2 * options->slots * slice_bytes(options), SHOAL_PAGE);
}

void shoal_device_stage_init(struct shoal_device_stage *stage, const struct shoal_device_stage_options *options, void *memory)
{
    const unsigned slots = options->slots;
    struct shoal_device_ring_counter *const counters = memory;
    SHOAL_ASSERT(options->slot_bytes % ((size_t)options->ranks * (size_t)options->hosts * SHOAL_CACHE_LINE) == 0);
    *stage = (struct shoal_device_stage){.options = *options};
    stage->works = options->hosts > 1 ? SHOAL_DEVICE_WORKS : SHOAL_DEVICE_GATHER + 1;
    stage->slices = options->hosts > 1 ? (char *)memory + stage_counter_bytes(slots) : NULL;
    for (unsigned work = 0; work < SHOAL_DEVICE_WORKS; work++) {
        stage->begin[work] = counters + (size_t)work * slots;
        stage->ended[work] = counters + (size_t)(SHOAL_DEVICE_WORKS + work) * slots;
    }
    for (size_t i = 0; i < 2 * (size_t)SHOAL_DEVICE_WORKS * slots; i++)
        atomic_init(&counters[i].value, options->start);
}

static void stage_let_go(struct shoal_device_stage *stage)
{
    for (unsigned work = 0; work < SHOAL_DEVICE_WORKS && !stage->is_let_go; work++)
        shoal_device_ring_counters_let_go(stage->begin[work], stage->options.slots);
    stage->is_let_go = true;
}

/* ---- Functions for the poster -------------------------------------------------------------------------------------------- */

struct shoal_device_sum *shoal_device_sum_open(struct shoal_device_stage *stage, size_t count, size_t element_bytes)
{
    struct shoal_device_sum *sum = calloc(1, sizeof *sum);
    if (!sum)
        return NULL;
    sum->stage = stage;
    atomic_init(&sum->holders, 2);
    sum->element_bytes = element_bytes;
    sum->count = count;
    sum->unit_elements = stage->options.slot_bytes / element_bytes;
    sum->units = (count + sum->unit_elements - 1) / sum->unit_elements;
    return sum;
}

void shoal_device_sum_reserve(struct shoal_device_sum *sum)
{
    sum->first = sum->stage->reserved;
    sum->stage->reserved += sum->units;
}

void shoal_device_sum_give_back(struct shoal_device_sum *sum)
{
    SHOAL_ASSERT(sum->stage->reserved == sum->first + sum->units);
    sum->stage->reserved = sum->first;
}

/* seq_cst: this precedes the check for a failure, and dropping follows the failure, so one of the two sees the other. */
void shoal_device_sum_put_on_streams(struct shoal_device_sum *sum)
{
    atomic_store_explicit(&sum->is_on_streams, true, memory_order_seq_cst);
}

void shoal_device_sum_leave(struct shoal_device_sum *sum)
{
    /* acq_rel: what the other holder did with the sum happens before it is freed. */
    if (sum && atomic_fetch_sub_explicit(&sum->holders, 1, memory_order_acq_rel) == 1)
        free(sum);
}

struct shoal_device_stage_unit shoal_device_sum_unit(const struct shoal_device_sum *sum, uint64_t unit)
{
    const struct shoal_device_stage_options *options = &sum->stage->options;
    const uint64_t at = sum->first + unit;
    const size_t begin = (size_t)unit * sum->unit_elements;
    return (struct shoal_device_stage_unit){.slot = (unsigned)(at % options->slots),
                                            .begin = begin,
                                            .end = shoal_min_size(begin + sum->unit_elements, sum->count),
                                            .number = options->start + at / options->slots + 1};
}

size_t shoal_device_sum_slice(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, int rank,
                              size_t *length_out)
{
    const size_t hosts = (size_t)sum->stage->options.hosts, parts = (size_t)sum->stage->options.ranks * hosts;
    const size_t count = unit->end - unit->begin;
    const size_t each = hosts * shoal_round_up((count + parts - 1) / parts, SHOAL_CACHE_LINE / sum->element_bytes);
    const size_t begin = shoal_min_size((size_t)rank * each, count);
    *length_out = shoal_min_size(each, count - begin);
    return begin;
}

char *shoal_device_sum_address(const struct shoal_device_sum *sum, const struct shoal_device_stage_unit *unit, bool is_out,
                               size_t at)
{
    const struct shoal_device_stage *stage = sum->stage;
    const size_t number = 2 * (size_t)unit->slot + !is_out;
    size_t length;
    const size_t begin = shoal_device_sum_slice(sum, unit, stage->options.rank, &length);
    SHOAL_ASSERT(stage->slices && at >= begin && at <= begin + length);
    return stage->slices + number * slice_bytes(&stage->options) + (at - begin) * sum->element_bytes;
}

/* ---- Functions for the engine -------------------------------------------------------------------------------------------- */

bool shoal_device_sum_has_ended(const struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work)
{
    const struct shoal_device_stage_unit at = shoal_device_sum_unit(sum, unit);
    return shoal_device_ring_counter_has(&sum->stage->ended[work][at.slot], at.number);
}

/* release: the signals of other ranks that this rank has seen happen before the work. */
bool shoal_device_sum_run(struct shoal_device_sum *sum, uint64_t unit, enum shoal_device_work work)
{
    const struct shoal_device_stage *stage = sum->stage;
    const struct shoal_device_stage_unit at = shoal_device_sum_unit(sum, unit);
    SHOAL_ASSERT(unit < sum->units);
    if (!stage->is_let_go)
        atomic_store_explicit(&stage->begin[work][at.slot].value, at.number, memory_order_release);
    return shoal_device_sum_has_ended(sum, unit, work);
}

/* A stream does its works in order, and this is the last work on a unit. */
void shoal_device_sum_drop(struct shoal_device_sum *sum)
{
    const bool has_ended = !sum->units || shoal_device_sum_has_ended(sum, sum->units - 1, SHOAL_DEVICE_GATHER);
    if (atomic_load_explicit(&sum->is_on_streams, memory_order_seq_cst) && !has_ended)
        stage_let_go(sum->stage);
    shoal_device_sum_leave(sum);
}
