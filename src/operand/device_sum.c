/* Both operands of an all-reduce that devices sum among themselves (device/device_stage.h). A plan names the slots through
 * which they do that (collective/peers.c), so each reduce step that names a slot is a work of this rank's device. */
#include <stdlib.h>

#include "base/assert.h"
#include "device/device_stage.h"
#include "operand/makers.h"

struct device_sum {
    struct shoal_operand base;
    struct shoal_device_sum *sum;
};

static struct device_sum *device_sum_of(const struct shoal_operand *operand)
{
    return (struct device_sum *)(uintptr_t)operand;
}

/* Returns the work that a step is, or SHOAL_DEVICE_WORKS if it names no slot. */
static enum shoal_device_work work_of(struct shoal_block from, struct shoal_block to)
{
    if (!shoal_block_is_slot(from) && !shoal_block_is_slot(to))
        return SHOAL_DEVICE_WORKS;
    if (!shoal_block_is_slot(from))
        return from.operand == SHOAL_INPUT ? SHOAL_DEVICE_BRING : SHOAL_DEVICE_TAKE_BACK;
    return shoal_block_is_slot(to)      ? SHOAL_DEVICE_REDUCE
           : to.operand == SHOAL_OUTPUT ? SHOAL_DEVICE_GATHER
                                        : SHOAL_DEVICE_HAND_OUT;
}

static enum shoal_operand_does sum_run(struct shoal_operand *operand, struct shoal_block from, struct shoal_block to,
                                       size_t chunk)
{
    const enum shoal_device_work work = work_of(from, to);
    if (work == SHOAL_DEVICE_WORKS)
        return SHOAL_OPERAND_DOES_NOTHING;
    return shoal_device_sum_run(device_sum_of(operand)->sum, chunk, work) ? SHOAL_OPERAND_HAS_DONE : SHOAL_OPERAND_IS_AT_WORK;
}

/* A slice in host memory: one that the device has handed out, or one that it takes back. */
static char *sum_block_address(const struct shoal_operand *operand, struct shoal_block block, size_t chunk, size_t at)
{
    const struct shoal_device_sum *sum = device_sum_of(operand)->sum;
    const struct shoal_device_stage_unit unit = shoal_device_sum_unit(sum, chunk);
    SHOAL_ASSERT(block.operand == SHOAL_ON_DEVICE && block.part != SHOAL_ON_DEVICE_SLOT);
    return shoal_device_sum_address(sum, &unit, block.part == SHOAL_ON_DEVICE_OUT, at);
}

static void sum_drop(struct shoal_operand *operand)
{
    shoal_device_sum_drop(device_sum_of(operand)->sum);
    free(operand);
}

static const struct shoal_operand_ops sum_ops = {.run = sum_run, .block_address = sum_block_address, .drop = sum_drop};

struct shoal_operand *shoal_operand_of_device_sum(struct shoal_device_sum *sum)
{
    struct device_sum *operand = calloc(1, sizeof *operand);
    if (!operand)
        return NULL;
    operand->base = (struct shoal_operand){.ops = &sum_ops, .chunk_elements = sum->unit_elements};
    operand->sum = sum;
    return &operand->base;
}
