/* The GPUs of this machine, as CUDA's driver reports them, for `shoal advise --machine this`. The driver is loaded on request;
 * nothing is linked. Main thread. */
#ifndef SHOAL_TOOLS_ADVISE_GPUS_H
#define SHOAL_TOOLS_ADVISE_GPUS_H

#include <stdbool.h>
#include <stddef.h>

enum { ADVISE_GPU_NAME_BYTES = 128 };

struct advise_gpus {
    size_t count;                     /* those that CUDA_VISIBLE_DEVICES leaves; 0 without a driver */
    char name[ADVISE_GPU_NAME_BYTES]; /* of the first */
    double memory_bytes;              /* the smallest memory of a GPU */
};

struct advise_gpus advise_gpus_find(void);

/* Returns true if a driver's name contains `accelerator` as a whole word: "NVIDIA A100-SXM4-40GB" has "A100", and "NVIDIA A10G"
 * does not have "A10". */
bool advise_gpu_is(const char *name, const char *accelerator);

#endif
