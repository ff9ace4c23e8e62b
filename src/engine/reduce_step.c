/* See reduce_step.h. */
#include "engine/reduce_step.h"

#include "base/assert.h"
#include "engine/engine_state.h"
#include "operand/lent.h"

/* ---- Blocks -------------------------------------------------------------------------------------------------------------- */

/* The distance between bins is the length of the chunk's longest block, which is the same on all ranks. */
static void run_find_bin(const struct shoal_chunk *chunk, struct shoal_block block, unsigned of, struct shoal_extent *extent)
{
    const struct shoal_request *request = chunk->request;
    const size_t count = shoal_min_size(request->call.count - chunk->first, request->chunk_elements);
    const size_t stride = shoal_bin_stride(count, SHOAL_CACHE_LINE / request->element_bytes, of);
    extent->staging_at = (block.bin - 1u) * stride * request->element_bytes;
    if (block.run)
        extent->elements = block.run * stride;
}

struct shoal_extent shoal_extent_find(const struct shoal_engine *engine, const struct shoal_chunk *chunk,
                                      struct shoal_block block)
{
    const struct shoal_request *request = chunk->request;
    const size_t element = request->element_bytes;
    const int parts = shoal_shape_parts(request->shape, block, engine->size), of = block.of / parts;
    int from, to;
    struct shoal_extent extent = {.part = block.index / of};
    shoal_shape_route(request->shape, block, engine->size, &from, &to);
    const size_t length = shoal_call_length(&request->call, engine->rank, from, to);
    const size_t left = length > chunk->first ? shoal_min_size(length - chunk->first, request->chunk_elements) : 0;
    const size_t begin =
        shoal_block_span(left, SHOAL_CACHE_LINE / element, (unsigned)(block.index % of), (unsigned)of, &extent.elements);
    extent.begin = chunk->first + begin;
    extent.staging_at =
        block.part * engine->part_bytes + ((parts > 1 ? (size_t)extent.part * request->part_stride : 0) + begin) * element;
    if (block.run)
        extent.elements = shoal_block_span(left, SHOAL_CACHE_LINE / element, (unsigned)(block.index % of) + block.run,
                                           (unsigned)of, &(size_t){0}) -
                          begin;
    if (block.bin)
        run_find_bin(chunk, block, (unsigned)of, &extent);
    return extent;
}

size_t shoal_chunk_number(const struct shoal_chunk *chunk)
{
    return chunk->first / chunk->request->chunk_elements;
}

/* Returns an address in a block that is neither in an operand nor in a staging buffer, but in memory of the input's owner. */
static char *find_at_owner(const struct shoal_chunk *chunk, struct shoal_block block, size_t element)
{
    const struct shoal_operand *input = shoal_call_operand(&chunk->request->call, SHOAL_INPUT);
    return input->ops->block_address(input, block, shoal_chunk_number(chunk), element - chunk->first);
}

/* Returns the address of element `at` of a part in a peer's operand that is lent, and has that card. */
static char *find_lent(const struct shoal_engine *engine, const struct shoal_request *request, struct shoal_block block,
                       const void *card, int part, size_t at, size_t *run)
{
    const enum shoal_block_operand operand = (enum shoal_block_operand)block.operand;
    const bool is_any_partitioned = request->shape->is_input_partitioned || request->shape->is_output_partitioned;
    const struct shoal_lent lent = {.card = card,
                                    .first = request->memory[operand][block.rank],
                                    .operand = operand,
                                    .most_parts = is_any_partitioned ? engine->size : 1,
                                    .element_bytes = request->element_bytes};
    return shoal_lent_address(&lent, part, at, run);
}

char *shoal_extent_address(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                           struct shoal_block block, const struct shoal_extent *extent, size_t at, size_t *run)
{
    const struct shoal_request *request = chunk->request;
    const size_t element = request->element_bytes;
    const enum shoal_block_operand operand = (enum shoal_block_operand)block.operand;
    if (operand == SHOAL_STAGING)
        return (char *)engine->ops->staging(engine->transport, block.rank, slot) + chunk->shift + extent->staging_at +
               at * element;
    if (operand > SHOAL_OUTPUT)
        return find_at_owner(chunk, block, extent->begin + at);
    if (block.rank == engine->rank)
        return shoal_call_address(&request->call, engine->rank, element, operand, extent->part, extent->begin + at, run);
    const void *card = request->cards[operand][block.rank];
    if (SHOAL_UNLIKELY(card != NULL))
        return find_lent(engine, request, block, card, extent->part, extent->begin + at, run);
    const size_t part_at = shoal_call_part_at(&request->call, engine->rank, operand, block.rank, extent->part);
    return (char *)request->memory[operand][block.rank] + (part_at + extent->begin + at) * element;
}

/* Addresses that agree in their low 28 bits compete for the same place in the first-level cache of some processors, which
 * predict a line's place from these bits. Reading one and writing the other in one loop is then several times slower. */
static bool collide(const void *a, const void *b)
{
    const uintptr_t low_bits = ((uintptr_t)1 << 28) - 1;
    return a != b && (((uintptr_t)a ^ (uintptr_t)b) & low_bits) < SHOAL_CACHE_LINE;
}

static bool any_collide(const struct shoal_extent_scratch *scratch, const struct shoal_step *step)
{
    for (unsigned d = 0; d < step->dest_count; d++) {
        for (unsigned s = 0; s < step->source_count; s++) {
            if (collide(scratch->dests[d], scratch->sources[s]))
                return true;
        }
    }
    return false;
}

/* Returns true if the source of a reduce is a rank's input or an unmodified copy of it; any other source was stored by a pass.
 * Over several hosts, a reduce that reads another rank's staging buffer reads only unmodified copies of inputs there (the plan
 * checker proves this). */
static bool is_raw(const struct shoal_engine *engine, struct shoal_block source)
{
    return source.operand == SHOAL_INPUT || (source.operand == SHOAL_STAGING && source.rank != engine->rank);
}

static unsigned count_raw(const struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_step *step)
{
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    unsigned count = 0;
    for (unsigned i = 0; i < step->source_count; i++)
        count += is_raw(engine, blocks[i]);
    return count;
}

/* Returns the operator of a reduce whose sources are alike: all raw, none raw, or not to be scaled. */
static struct shoal_reduction run_operation_of(const struct shoal_engine *engine, const struct shoal_request *request,
                                               const struct shoal_step *step)
{
    const enum shoal_pass later = step->is_partial ? SHOAL_PASS_MIDDLE : SHOAL_PASS_LAST;
    if (engine->hosts == 1)
        return shoal_engine_operation(engine, &request->call);
    const bool is_first = count_raw(engine, request, step) == step->source_count;
    return shoal_engine_pass(engine, &request->call, is_first ? SHOAL_PASS_FIRST : later);
}

/* Some sources are raw, others are scaled already: the raw ones are scaled into buffers that stay in the cache. */
static void reduce_scaling(const struct shoal_engine *engine, const struct shoal_request *request,
                           const struct shoal_step *step, size_t elements, enum shoal_stores stores,
                           const struct shoal_extent_scratch *scratch)
{
    _Alignas(SHOAL_PAGE) char buffer[16 * SHOAL_PAGE]; /* at least one line for each rank of a host */
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    const shoal_reduce_fn *reduce = engine->kernels->reduce[request->call.type];
    const struct shoal_reduction first = shoal_engine_pass(engine, &request->call, SHOAL_PASS_FIRST),
                                 then = shoal_engine_pass(engine, &request->call,
                                                          step->is_partial ? SHOAL_PASS_MIDDLE : SHOAL_PASS_LAST);
    const size_t element = request->element_bytes, raw = count_raw(engine, request, step);
    const size_t each = sizeof buffer / raw / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE, chunk = each / element;
    const void **const sources = scratch->scaled;
    for (size_t at = 0; at < elements; at += chunk) {
        const size_t count = shoal_min_size(chunk, elements - at);
        char *next = buffer;
        for (unsigned s = 0; s < step->source_count; s++) {
            sources[s] = (const char *)scratch->sources[s] + at * element;
            if (!is_raw(engine, blocks[s]))
                continue;
            void *const scaled = next;
            reduce[first.op](&scaled, 1, &sources[s], 1, count, first.argument, SHOAL_STORES_CACHED);
            sources[s] = scaled;
            next += each;
        }
        reduce[then.op](scratch->dests, step->dest_count, sources, step->source_count, count, then.argument, stores);
        for (unsigned d = 0; d < step->dest_count; d++)
            scratch->dests[d] = (char *)scratch->dests[d] + count * element;
    }
}

/* Reduces through a buffer that stays in the first-level cache, so that no loop reads and writes colliding addresses. */
static void reduce_apart(const struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_step *step,
                         size_t elements, enum shoal_stores stores, const struct shoal_extent_scratch *scratch)
{
    _Alignas(SHOAL_PAGE) char buffer[SHOAL_PAGE];
    void *const into = buffer;
    const struct shoal_reduction operation = run_operation_of(engine, request, step);
    const size_t element = request->element_bytes, chunk = sizeof buffer / element;
    for (size_t at = 0; at < elements; at += chunk) {
        const size_t count = shoal_min_size(chunk, elements - at);
        engine->kernels->reduce[request->call.type][operation.op](&into, 1, scratch->sources, step->source_count, count,
                                                                  operation.argument, SHOAL_STORES_CACHED);
        engine->kernels->copy(scratch->dests, step->dest_count, buffer, count * element, stores);
        for (unsigned s = 0; s < step->source_count; s++)
            scratch->sources[s] = (const char *)scratch->sources[s] + count * element;
        for (unsigned d = 0; d < step->dest_count; d++)
            scratch->dests[d] = (char *)scratch->dests[d] + count * element;
    }
}

/* In place, the source is also a destination: it is not written, because peers may be reading it. */
static void reduce_copy_run(const struct shoal_engine *engine, const struct shoal_step *step, size_t bytes,
                            enum shoal_stores stores, const struct shoal_extent_scratch *scratch)
{
    int dests = 0;
    for (unsigned d = 0; d < step->dest_count; d++) {
        if (scratch->dests[d] != scratch->sources[0])
            scratch->dests[dests++] = scratch->dests[d];
    }
    if (dests > 0)
        engine->kernels->copy(scratch->dests, dests, scratch->sources[0], bytes, stores);
}

/* Returns true if some sources have to be scaled, but not all. */
static bool is_mixed(const struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_step *step)
{
    const unsigned raw = count_raw(engine, request, step);
    return raw && raw < step->source_count && shoal_engine_scales_inputs(engine, &request->call);
}

/* Sources and destinations are set. */
static void reduce_run(const struct shoal_engine *engine, const struct shoal_request *request, const struct shoal_step *step,
                       size_t elements, const struct shoal_extent_scratch *scratch)
{
    const enum shoal_stores stores =
        request->announcement.descriptor.hints & SHOAL_HINT_STREAMING ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
    if (step->source_count == 1) {
        reduce_copy_run(engine, step, elements * request->element_bytes, stores, scratch);
    } else if (engine->hosts > 1 && is_mixed(engine, request, step)) {
        reduce_scaling(engine, request, step, elements, stores, scratch);
    } else if (any_collide(scratch, step)) {
        reduce_apart(engine, request, step, elements, stores, scratch);
    } else {
        const struct shoal_reduction operation = run_operation_of(engine, request, step);
        engine->kernels->reduce[request->call.type][operation.op](scratch->dests, step->dest_count, scratch->sources,
                                                                  step->source_count, elements, operation.argument, stores);
    }
}

/* If operands are several tensors, works from border to border. */
void shoal_extent_reduce(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                         const struct shoal_step *step, size_t begin, size_t end, const struct shoal_extent_scratch *scratch)
{
    const struct shoal_request *request = chunk->request;
    const struct shoal_block *blocks = &request->cached->plan.blocks[step->first_block];
    for (size_t at = begin, run; at < end; at += run) {
        run = end - at;
        for (unsigned i = 0; i < step->source_count; i++) {
            const struct shoal_extent extent = shoal_extent_find(engine, chunk, blocks[i]);
            scratch->sources[i] = shoal_extent_address(engine, chunk, slot, blocks[i], &extent, at, &run);
        }
        for (unsigned i = 0; i < step->dest_count; i++) {
            const struct shoal_block block = blocks[step->source_count + i];
            const struct shoal_extent extent = shoal_extent_find(engine, chunk, block);
            scratch->dests[i] = shoal_extent_address(engine, chunk, slot, block, &extent, at, &run);
        }
        reduce_run(engine, request, step, run, scratch);
    }
}
