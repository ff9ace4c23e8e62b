/* Finds the blocks of a step, and does the work of a reduce step. That work reads and writes operands and staging buffers and
 * nothing else, so several threads may do different ranges of one step at once. Nothing that it reads changes while the step is
 * under way. */
#ifndef SHOAL_ENGINE_REDUCE_STEP_H
#define SHOAL_ENGINE_REDUCE_STEP_H

#include "plan/plan.h"
#include "transport/transport.h"

struct shoal_chunk;
struct shoal_engine;

/* A block in the current chunk: elements [begin, begin + elements) of a part of its operand. */
struct shoal_extent {
    int part;
    size_t begin;
    size_t elements;
    size_t staging_at; /* for staging buffers: bytes from the start of the staging slot */
};
struct shoal_extent shoal_extent_find(const struct shoal_engine *engine, const struct shoal_chunk *chunk,
                                      struct shoal_block block);
/* Returns the address of element `at` of the extent. *run is reduced to the number of contiguous elements from there. */
char *shoal_extent_address(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                           struct shoal_block block, const struct shoal_extent *extent, size_t at, size_t *run);

/* Memory that a thread needs for a step: an entry for each source or destination. */
struct shoal_extent_scratch {
    const void **sources;
    void **dests;
    const void **scaled; /* the sources, after some had to be scaled */
};
/* Does elements [begin, end) of a reduce step: any thread, but only one for each element. */
void shoal_extent_reduce(struct shoal_engine *engine, const struct shoal_chunk *chunk, unsigned slot,
                         const struct shoal_step *step, size_t begin, size_t end, const struct shoal_extent_scratch *scratch);

/* Returns the number of the chunk in its operation. */
size_t shoal_chunk_number(const struct shoal_chunk *chunk);

#endif
