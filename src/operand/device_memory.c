#include "operand/device_memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "memory/memory.h"

#define CARD_BYTES SHOAL_PAGE
_Static_assert(sizeof(struct shoal_device_card) <= CARD_BYTES, "a card is one page");

enum shoal_status shoal_operand_memory_map(struct shoal_log *log, struct shoal_memory *memory, size_t bytes,
                                           struct shoal_operand_memory *memory_out)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "gpu",
                              "cannot get %zu bytes of host memory for operands on a device (%s); a smaller "
                              "SHOAL_GPU_UNIT_BYTES or SHOAL_CHUNK_BYTES needs less",
                              bytes, strerror(errno));
    *memory_out = (struct shoal_operand_memory){at, bytes, NULL};
    shoal_memory_lock(memory);
    shoal_memory_end_stale(memory, at, bytes);
    shoal_memory_unlock(memory);
    return SHOAL_OK;
}

/* A refusal is not an error: there is another way. */
static enum shoal_status try_to_share(struct shoal_memory *memory, size_t bytes, struct shoal_operand_memory *memory_out)
{
    void *at;
    shoal_log_hush(true);
    const enum shoal_status status = shoal_memory_alloc_for_device(memory, bytes, "host memory for operands on a device", &at);
    shoal_log_hush(false);
    if (status == SHOAL_OK)
        *memory_out = (struct shoal_operand_memory){at, bytes, memory};
    return status;
}

enum shoal_status shoal_operand_memory_share(struct shoal_log *log, struct shoal_memory *memory, size_t bytes,
                                             struct shoal_operand_memory *memory_out)
{
    if (try_to_share(memory, CARD_BYTES + bytes, memory_out) == SHOAL_OK)
        return SHOAL_OK;
    shoal_log_line(log, SHOAL_LOG_INFO, "gpu",
                   "the ranks of this host cannot map the %zu bytes through which operands on a device pass: sums copy them "
                   "once more",
                   bytes);
    return shoal_operand_memory_map(log, memory, CARD_BYTES + bytes, memory_out);
}

void *shoal_operand_memory_rings(const struct shoal_operand_memory *memory)
{
    return (char *)memory->at + CARD_BYTES;
}

void shoal_operand_memory_describe(const struct shoal_operand_memory *memory, struct shoal_gpu_port *port)
{
    for (int is_inward = 0; is_inward <= 1; is_inward++)
        shoal_device_card_describe(memory->at, shoal_gpu_port_ring(port, is_inward));
}

void shoal_operand_memory_unmap(struct shoal_operand_memory *memory)
{
    SHOAL_ASSERT(memory->at);
    if (memory->shared_by)
        shoal_memory_free_for_device(memory->shared_by, memory->at);
    else
        munmap(memory->at, memory->bytes);
    memory->at = NULL;
}
