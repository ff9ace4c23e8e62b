/* Device memory that GDRCopy has mapped into the process, so that the engine can write small outputs there (device_ring.h).
 *
 *   output, 1 KiB at 0x7f..a400      the driver: memory number 17, made in context C
 *   mapping of its page(s) of 64 KiB, kept for the next call with memory number 17
 *
 * Pinning needs a system call and part of the device's BAR, so mappings are kept, at most SHOAL_CUDA_MAPPINGS_MAX. A mapping
 * may be evicted after SHOAL_CUDA_MAPPING_AGE uses of others. Until then no new one fits, and the device copies instead, which
 * costs less than a new mapping in each call. The driver gives each allocation a number that no later one gets. If a mapping's
 * addresses now belong to another number, its memory was freed, and the mapping ends. It is not in use at that time: a program
 * that frees memory first waits for the calls that use it, as for any work on a stream.
 *
 * A mapping may keep the whole allocation on the device after the program has freed it. So only allocations of at most
 * SHOAL_CUDA_MAPPED_ALLOCATION_MAX are mapped, and each use checks the allocation number of one more mapping.
 *
 * Any thread: a lock of the process protects it. The engine does not call it; it only writes. */
#ifndef SHOAL_DEVICE_CUDA_MAPPING_H
#define SHOAL_DEVICE_CUDA_MAPPING_H

#include "device/cuda/cuda_abi.h"
#include "device/cuda/gdr_library.h"
#include "device/device_ring.h"

#define SHOAL_CUDA_MAPPINGS_MAX 64
#define SHOAL_CUDA_MAPPING_AGE 256                         /* uses */
#define SHOAL_CUDA_MAPPED_ALLOCATION_MAX ((size_t)2 << 20) /* torch allocates blocks of this size for small tensors */

struct shoal_gpu;

struct shoal_cuda_mapping {
    struct shoal_device_mapping base; /* first */
    const struct shoal_gdr_calls *calls;
    struct shoal_gdr_handle handle;
    unsigned long long buffer; /* the driver's number of the allocation */
    bool reads_back;           /* streams of the device cannot flush what was written; a read does */
    shoal_cu_address pages;    /* first of the whole pages */
    size_t page_bytes;
    shoal_cu_address begin, end; /* the range of these pages that belongs to the allocation */
    char *memory;                /* address of the first page; NULL: the mapping was refused */
    uint64_t used;               /* number of its last use; if it was refused, of the request to GDRCopy */
};

/* Each struct shoal_gpu contains one. */
struct shoal_cuda_mappings {
    struct shoal_gdr_calls calls;
    struct shoal_gdr_of *gdr; /* NULL: GDRCopy was not found */
    bool is_open;             /* GDRCopy was searched for */
    bool has_refused;         /* a refusal was logged; it is logged once */
    uint64_t now;             /* counts uses */
    size_t looked_at;         /* the mapping whose allocation was checked last */
    struct shoal_cuda_mapping *all[SHOAL_CUDA_MAPPINGS_MAX];
    size_t count;
};

/* No mapping may be held. Accepts a structure that is all zero. */
void shoal_cuda_mappings_fini(struct shoal_cuda_mappings *mappings);

/* Returns the mapping that has `bytes` bytes at an address of a device, and holds it once more. Creates it if necessary.
 * Returns NULL if GDRCopy was not found or refuses, if no mapping can be evicted, or if the memory is managed, from a pool,
 * mapped by the program or part of a large allocation. */
struct shoal_cuda_mapping *shoal_cuda_mapping_hold(struct shoal_gpu *gpu, int device, shoal_cu_address at, size_t bytes);
/* Returns true if a held mapping also contains these bytes. */
static inline bool shoal_cuda_mapping_has(const struct shoal_cuda_mapping *mapping, shoal_cu_address at, size_t bytes)
{
    return mapping->begin <= at && at + bytes <= mapping->end;
}
static inline char *shoal_cuda_mapping_at(const struct shoal_cuda_mapping *mapping, shoal_cu_address at)
{
    return mapping->memory + (at - mapping->pages);
}

#endif
