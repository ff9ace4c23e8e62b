/* GPUs through their vendor's driver, which is loaded at run time: the library is built and runs without one. Other modules see
 * this header only and no vendor's type; a second vendor is a second table of entry points behind it. Implemented over the CUDA
 * driver API (cuda/cuda_abi.h). Set-up only; any thread, each object by one thread at a time. Never call it from the engine or
 * with its lock held: a driver takes locks that the program may hold while it waits for us. */
#ifndef SHOAL_DEVICE_GPU_H
#define SHOAL_DEVICE_GPU_H

#include "base/log.h"

#define SHOAL_GPU_DEVICES_MAX 64

struct shoal_gpu_device {
    int handle; /* the driver's */
    char name[64];
    char pci[32];         /* "0000:3b:00.0" */
    int major, minor;     /* compute capability */
    bool can_register;    /* host memory, so that the device copies from and to it directly */
    bool has_value_waits; /* streams wait for and write 64-bit values in memory */
    bool has_dma_buf;     /* its memory can be passed to network adapters as a dma-buf */
    bool is_prohibited;   /* the administrator allows nobody to compute on it */
};

struct shoal_gpu; /* a loaded driver and its devices */

/* Loads the driver and looks at its devices. No device is touched: contexts are made later. ERR_UNSUPPORTED (no driver, one
 * older than CUDA 11.7, one that lacks an entry point, no device), ERR_SYSTEM (no permission, the driver refuses),
 * ERR_MEMORY; each with the driver's name for the error and what to do. The driver stays loaded for the life of the process:
 * it has threads. */
SHOAL_MUST_USE enum shoal_status shoal_gpu_open(struct shoal_log *log, struct shoal_gpu **gpu_out);
/* NULL is allowed. */
void shoal_gpu_close(struct shoal_gpu *gpu);

int shoal_gpu_count(const struct shoal_gpu *gpu);
/* index < shoal_gpu_count. Valid as long as gpu. */
const struct shoal_gpu_device *shoal_gpu_at(const struct shoal_gpu *gpu, int index);
/* As CUDA counts: 12040 is 12.4. */
int shoal_gpu_driver_version(const struct shoal_gpu *gpu);

#endif
