/* Memory of the same kind as the buffers': from shoal_mem_alloc, or on the device that computes. */
#ifndef SHOAL_FUSION_REDUCER_MEMORY_H
#define SHOAL_FUSION_REDUCER_MEMORY_H

#include "fusion/reducer/reducer.h"

/* Allocates zeroed memory. */
SHOAL_MUST_USE enum shoal_status fusion_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out);
/* memory may be NULL. */
void fusion_free_memory(const struct shoal_reducer *reducer, void *memory);

#endif
