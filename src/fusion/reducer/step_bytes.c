#include "fusion/reducer/step_bytes.h"

#include "base/assert.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/optimizer.h"

/* Finds the bytes of a buffer that this rank owns, and those of the rank that owns most. */
static void count_owned(const struct shoal_reducer *reducer, size_t buffer, uint64_t *own_out, uint64_t *most_out)
{
    const uint64_t size = (uint64_t)reducer->size, bytes = reducer->layout->buffers[buffer].bytes;
    if (fusion_optimizer_owned(reducer, buffer, own_out, most_out))
        return;
    *own_out = bytes / size;
    *most_out = (bytes / FUSION_ALIGNMENT + size - 1) / size * FUSION_ALIGNMENT;
}

/* Counts as if owners reduce: a rank sends all of a buffer except its own share to the owners, and its own share to all others.
 * A compressed buffer is reduced in this way inside the host, and then between hosts. */
void fusion_count_bytes(const struct shoal_reducer *reducer, struct shoal_step_stats *stats)
{
    const uint64_t size = (uint64_t)reducer->size, hosts = (uint64_t)reducer->hosts, local = (uint64_t)reducer->local_size;
    uint64_t total = 0, most = 0, owned, longest; /* of all buffers, and of the largest share in each */
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const uint64_t bytes = reducer->layout->buffers[b].bytes;
        const bool is_compressed = fusion_is_compressed(reducer, b);
        count_owned(reducer, b, &owned, &longest);
        SHOAL_ASSERT(owned <= longest && owned <= bytes);
        const uint64_t network_bytes =
            is_compressed ? fusion_compressed_network_bytes(reducer, b) : 2 * (hosts - 1) * (bytes / local / hosts);
        stats->sent_bytes +=
            is_compressed ? 2 * (local - 1) * (bytes / local) + network_bytes : bytes - owned + (size - 1) * owned;
        stats->network_bytes += network_bytes;
        total += bytes;
        most += longest;
    }
    stats->received_bytes = stats->sent_bytes;
    stats->balance = total ? (double)(most * size) / (double)total : 1;
}
