/* An operand on a device, which a stream copies through host memory unit by unit (device/device_ring.h). */
#include <stdlib.h>

#include "device/device_ring.h"
#include "operand/makers.h"

struct device_copy {
    struct shoal_operand base;
    struct shoal_device_ring_operand *copied;
};

static struct device_copy *device_copy_of(const struct shoal_operand *operand)
{
    return (struct device_copy *)(uintptr_t)operand;
}

static char *copy_address(const struct shoal_operand *operand, int part, size_t at, size_t *run)
{
    return shoal_device_ring_address(device_copy_of(operand)->copied, part, at, run);
}

static bool copy_is_ready(const struct shoal_operand *operand, size_t begin, size_t end)
{
    return shoal_device_ring_is_ready(device_copy_of(operand)->copied, begin, end);
}

static void copy_release(struct shoal_operand *operand, size_t begin, size_t end)
{
    shoal_device_ring_release(device_copy_of(operand)->copied, begin, end);
}

static bool copy_is_finished(const struct shoal_operand *operand)
{
    return shoal_device_ring_is_finished(device_copy_of(operand)->copied);
}

static void copy_drop(struct shoal_operand *operand)
{
    shoal_device_ring_drop(device_copy_of(operand)->copied);
    free(device_copy_of(operand));
}

static const struct shoal_operand_ops copy_ops = {.address = copy_address,
                                                  .is_ready = copy_is_ready,
                                                  .release = copy_release,
                                                  .is_finished = copy_is_finished,
                                                  .drop = copy_drop};

/* The adapter reads the elements on the device, at the call's addresses. */
static const struct shoal_operand_ops stay_ops = {
    .is_ready = copy_is_ready, .release = copy_release, .is_finished = copy_is_finished, .drop = copy_drop};

struct shoal_operand *shoal_operand_of_device_copy(struct shoal_device_ring_operand *copied)
{
    struct device_copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return NULL;
    copy->base = (struct shoal_operand){.ops = copied->stays ? &stay_ops : &copy_ops, .is_only_put = copied->stays};
    copy->copied = copied;
    return &copy->base;
}
