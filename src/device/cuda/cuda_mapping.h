/* Memory of devices that GDRCopy has mapped into the process, so that the engine writes small outputs there (device_ring.h).
 *
 *     output, 1 KiB at 0x7f..a400     the driver: memory number 17, made in context C
 *     mapping of its page(s) of 64 KiB, kept for the next call with memory number 17
 *
 * Pinning takes a system call and some of the device's BAR, so mappings are kept, at most SHOAL_CUDA_MAPPINGS_MAX. One that was
 * not used in SHOAL_CUDA_MAPPING_AGE uses of others makes room; before, others are copied by the device, which costs less than
 * to map in each call. The driver gives each allocation a number that no later one gets; a mapping whose allocation has
 * another number now is of freed memory, and ends. It is not used meanwhile: whoever frees memory waits for the calls that use
 * it, as with any work on a stream.
 *
 * A mapping may hold the whole allocation in the device after the program has freed it. So only allocations of at most
 * SHOAL_CUDA_MAPPED_ALLOCATION_MAX are mapped, and each use asks the driver for the number of one more mapping's allocation.
 *
 * Any thread, by a lock of the process; not from the engine, which only writes. */
#ifndef SHOAL_DEVICE_CUDA_MAPPING_H
#define SHOAL_DEVICE_CUDA_MAPPING_H

#include "device/cuda/cuda_abi.h"
#include "device/cuda/gdr_library.h"
#include "device/device_ring.h"

#define SHOAL_CUDA_MAPPINGS_MAX 64
#define SHOAL_CUDA_MAPPING_AGE 256                         /* uses */
#define SHOAL_CUDA_MAPPED_ALLOCATION_MAX ((size_t)2 << 20) /* what torch allocates for its small tensors */

struct shoal_gpu;

struct shoal_cuda_mapping {
    struct shoal_device_mapping base; /* first */
    const struct shoal_gdr_calls *calls;
    struct shoal_gdr_handle handle;
    unsigned long long buffer; /* the driver's number of the allocation */
    bool reads_back;           /* streams of the device cannot see to it that what was written has come: reading does */
    shoal_cu_address pages;    /* whole pages, */
    size_t page_bytes;
    shoal_cu_address begin, end; /* and what of them is of the allocation */
    char *memory;                /* where the first page is mapped; NULL: this was refused */
    uint64_t used;               /* when; that which was refused: when GDRCopy was asked */
};

/* Each struct shoal_gpu has one. */
struct shoal_cuda_mappings {
    struct shoal_gdr_calls calls;
    struct shoal_gdr_of *gdr; /* NULL: GDRCopy was not found */
    bool is_open;             /* was looked for */
    bool has_refused;         /* which is logged once */
    uint64_t now;             /* counts uses */
    size_t looked_at;         /* the mapping whose allocation the driver was asked for last */
    struct shoal_cuda_mapping *all[SHOAL_CUDA_MAPPINGS_MAX];
    size_t count;
};

/* None is held. All zero before the first use. */
void shoal_cuda_mappings_fini(struct shoal_cuda_mappings *mappings);

/* The mapping that has so many bytes at an address of a device, made now if need be, and held once more. NULL: there is none:
 * GDRCopy was not found or refuses, all places are in use, or the memory is managed, of a pool, mapped by the program or of a
 * large allocation. */
struct shoal_cuda_mapping *shoal_cuda_mapping_hold(struct shoal_gpu *gpu, int device, shoal_cu_address at, size_t bytes);
/* Whether a held mapping has these bytes, too. */
static inline bool shoal_cuda_mapping_has(const struct shoal_cuda_mapping *mapping, shoal_cu_address at, size_t bytes)
{
    return mapping->begin <= at && at + bytes <= mapping->end;
}
static inline char *shoal_cuda_mapping_at(const struct shoal_cuda_mapping *mapping, shoal_cu_address at)
{
    return mapping->memory + (at - mapping->pages);
}

#endif
