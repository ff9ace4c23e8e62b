#include <stdlib.h>

#include "pipeline/run/pipeline_run.h"

/* ---- Blocks -------------------------------------------------------------------------------------------------------------- */

/* Sizes are rounded up to eighths of the power of two below, at least 4 KiB, so that messages of similar sizes share blocks. */
static size_t capacity_for(size_t bytes)
{
    size_t unit = 4096;
    while (unit <= SIZE_MAX / 16 && unit * 16 <= bytes)
        unit *= 2;
    return bytes > SIZE_MAX - unit ? bytes : (bytes + unit - 1) / unit * unit;
}

/* Takes the smallest free block that is large enough and at most twice as large as needed. Under the lock. */
static struct run_block *find_free(struct shoal_pipeline *pipeline, size_t capacity)
{
    struct run_block **best = NULL;
    for (struct run_block **link = &pipeline->free_blocks; *link; link = &(*link)->next) {
        const size_t own = (*link)->capacity;
        if (own >= capacity && own / 2 <= capacity && (!best || own < (*best)->capacity))
            best = link;
    }
    if (!best)
        return NULL;
    struct run_block *const block = *best;
    *best = block->next;
    return block;
}

enum shoal_status run_block_take(struct shoal_pipeline *pipeline, size_t bytes, struct run_block **block_out)
{
    const size_t capacity = capacity_for(bytes);
    pthread_mutex_lock(&pipeline->lock);
    struct run_block *block = find_free(pipeline, capacity);
    pthread_mutex_unlock(&pipeline->lock);
    if (!block) {
        block = calloc(1, sizeof *block);
        if (!block)
            return SHOAL_ERR_MEMORY;
        const enum shoal_status status = shoal_mem_alloc(pipeline->context, capacity, &block->memory);
        if (status != SHOAL_OK) {
            free(block);
            return status;
        }
        block->capacity = capacity;
    }
    block->next = NULL;
    block->last_step = pipeline->step;
    *block_out = block;
    return SHOAL_OK;
}

void run_block_give_back(struct shoal_pipeline *pipeline, struct run_block *block)
{
    pthread_mutex_lock(&pipeline->lock);
    block->next = pipeline->free_blocks;
    pipeline->free_blocks = block;
    pthread_mutex_unlock(&pipeline->lock);
}

static struct run_block *take_unused_blocks(struct shoal_pipeline *pipeline, bool all)
{
    struct run_block *removed = NULL;
    pthread_mutex_lock(&pipeline->lock);
    for (struct run_block **link = &pipeline->free_blocks; *link;) {
        struct run_block *const block = *link;
        if (!all && block->last_step + 1 >= pipeline->step) {
            link = &block->next;
            continue;
        }
        *link = block->next;
        block->next = removed;
        removed = block;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return removed;
}

void run_blocks_trim(struct shoal_pipeline *pipeline, bool all)
{
    struct run_block *next;
    for (struct run_block *block = take_unused_blocks(pipeline, all); block; block = next) {
        next = block->next;
        const enum shoal_status status = shoal_mem_free(pipeline->context, block->memory);
        (void)status; /* it is memory of shoal_mem_alloc, which nobody uses */
        free(block);
    }
}

/* ---- Holds --------------------------------------------------------------------------------------------------------------- */

struct run_hold *run_hold_make(struct run_block *block, void *owner, struct run_hold *below)
{
    struct run_hold *const hold = calloc(1, sizeof *hold);
    if (!hold)
        return NULL;
    hold->count = 1;
    hold->block = block;
    hold->owner = owner;
    hold->below = below;
    if (below)
        below->count++;
    return hold;
}

void run_hold_drop(struct shoal_pipeline *pipeline, struct run_hold *hold)
{
    while (hold && --hold->count == 0) {
        struct run_hold *const below = hold->below;
        if (hold->block)
            run_block_give_back(pipeline, hold->block);
        if (hold->owner && pipeline->calls.released)
            pipeline->calls.released(pipeline->calls.user, hold->owner);
        free(hold);
        hold = below;
    }
}
