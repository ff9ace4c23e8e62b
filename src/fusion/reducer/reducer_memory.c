#include "fusion/reducer/reducer_memory.h"

#include <string.h>

#include "fusion/reducer/reducer_device.h"

enum shoal_status fusion_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out)
{
    if (fusion_computes_on_device(reducer))
        return fusion_device_allocate(reducer, bytes, memory_out);
    FUSION_TRY(shoal_mem_alloc(reducer->context, bytes, memory_out));
    memset(*memory_out, 0, bytes);
    return SHOAL_OK;
}

void fusion_free_memory(const struct shoal_reducer *reducer, void *memory)
{
    if (fusion_computes_on_device(reducer))
        fusion_device_release(reducer, memory);
    else if (memory && shoal_mem_free(reducer->context, memory) != SHOAL_OK)
        return; /* it has reported why */
}
