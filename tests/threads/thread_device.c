#include "thread_device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLOTS 6
#define UNIT ((size_t)24 << 10) /* elements: a range of the engine is in at most three units, in each part */
#define LET_GO (UINT64_C(1) << 62)

struct thread_device {
    struct shoal_operand base; /* must be first */
    float *memory;
    float *ring;
    bool is_output;
    int parts;
    size_t count, unit_count;
    unsigned pause_us;
    size_t released[SLOTS]; /* elements of the unit in the slot */
    size_t units_released;
    _Atomic uint64_t by_thread[SLOTS]; /* ready; taken */
    _Atomic uint64_t by_engine[SLOTS]; /* done */
    atomic_bool is_dropped;
    pthread_t thread;
};

static void device_must(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "thread_device: %s\n", what);
    abort();
}

static struct thread_device *device_of(const struct shoal_operand *base)
{
    return (struct thread_device *)(uintptr_t)base;
}

static size_t units_length(const struct thread_device *device, size_t unit)
{
    return shoal_min_size(UNIT, device->count - unit * UNIT);
}

static float *ring_at(const struct thread_device *device, size_t unit, int part)
{
    return device->ring + (unit % SLOTS * (size_t)device->parts + (size_t)part) * UNIT;
}

/* ---- The thread ---------------------------------------------------------------------------------------------------------- */

static void pause_for(unsigned us)
{
    const struct timespec moment = {0, (long)us * 1000};
    nanosleep(&moment, NULL);
}

static void *copy_units(void *arg)
{
    struct thread_device *device = arg;
    for (size_t unit = 0; unit < device->unit_count; unit++) {
        const uint64_t k = unit / SLOTS + 1;
        uint64_t done;
        /* acquire: the engine's writes and reads come before. */
        while ((done = atomic_load_explicit(&device->by_engine[unit % SLOTS], memory_order_acquire)) <
               (device->is_output ? k : k - 1))
            pause_for(20);
        if (done >= LET_GO)
            break;
        pause_for(device->pause_us * (unsigned)(unit % 3));
        for (int part = 0; part < device->parts; part++) {
            float *there = device->memory + (size_t)part * device->count + unit * UNIT, *here = ring_at(device, unit, part);
            const size_t bytes = units_length(device, unit) * sizeof(float);
            memcpy(device->is_output ? there : here, device->is_output ? here : there, bytes);
        }
        atomic_store_explicit(&device->by_thread[unit % SLOTS], k, memory_order_release);
    }
    return NULL;
}

/* ---- The engine's side --------------------------------------------------------------------------------------------------- */

static bool is_unit_ready(const struct thread_device *device, size_t unit)
{
    const uint64_t k = unit / SLOTS + (device->is_output ? 0 : 1);
    return atomic_load_explicit(&device->by_thread[unit % SLOTS], memory_order_acquire) >= k;
}

static bool thread_is_ready(const struct shoal_operand *base, size_t begin, size_t end)
{
    const struct thread_device *device = device_of(base);
    end = shoal_min_size(end, device->count);
    for (size_t unit = begin / UNIT; unit * UNIT < end; unit++) {
        if (!is_unit_ready(device, unit))
            return false;
    }
    return true;
}

static char *thread_address(const struct shoal_operand *base, int part, size_t at, size_t *run)
{
    const struct thread_device *device = device_of(base);
    device_must(is_unit_ready(device, at / UNIT), "the engine touched what is not ready");
    *run = shoal_min_size(*run, UNIT - at % UNIT);
    return (char *)(ring_at(device, at / UNIT, part) + at % UNIT);
}

static void thread_release(struct shoal_operand *base, size_t begin, size_t end)
{
    struct thread_device *device = device_of(base);
    for (size_t at = begin, until; at < end; at = until) {
        const size_t unit = at / UNIT, slot = unit % SLOTS;
        until = shoal_min_size(end, (unit + 1) * UNIT);
        device->released[slot] += until - at;
        if (device->released[slot] < units_length(device, unit))
            continue;
        device->released[slot] = 0;
        device->units_released++;
        atomic_store_explicit(&device->by_engine[slot], unit / SLOTS + 1, memory_order_release);
    }
}

static bool thread_is_finished(const struct shoal_operand *base)
{
    const struct thread_device *device = device_of(base);
    const size_t last = device->unit_count - 1;
    return atomic_load_explicit(&device->by_thread[last % SLOTS], memory_order_acquire) >= last / SLOTS + 1;
}

static void thread_drop(struct shoal_operand *base)
{
    struct thread_device *device = device_of(base);
    for (unsigned slot = 0; slot < SLOTS && device->units_released < device->unit_count; slot++)
        atomic_store_explicit(&device->by_engine[slot], LET_GO, memory_order_release);
    device_must(!atomic_exchange(&device->is_dropped, true), "dropped twice");
}

static const struct shoal_operand_ops thread_ops = {.is_ready = thread_is_ready,
                                                    .address = thread_address,
                                                    .release = thread_release,
                                                    .is_finished = thread_is_finished,
                                                    .drop = thread_drop};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

struct thread_device *thread_device_open(float *memory, bool is_output, int parts, size_t count, unsigned pause_us)
{
    struct thread_device *device = calloc(1, sizeof *device);
    device_must(device && count, "no memory");
    device->base.ops = &thread_ops;
    device->memory = memory;
    device->is_output = is_output;
    device->parts = parts;
    device->count = count;
    device->unit_count = (count + UNIT - 1) / UNIT;
    device->pause_us = pause_us;
    device->ring = malloc(SLOTS * UNIT * (size_t)parts * sizeof(float));
    device_must(device->ring, "no memory");
    device_must(pthread_create(&device->thread, NULL, copy_units, device) == 0, "no thread");
    return device;
}

struct shoal_operand *thread_device_operand(struct thread_device *device)
{
    return &device->base;
}

void thread_device_close(struct thread_device *device)
{
    if (!device)
        return;
    device_must(atomic_load(&device->is_dropped), "not dropped");
    pthread_join(device->thread, NULL);
    free(device->ring);
    free(device);
}
