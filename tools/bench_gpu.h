/* Buffers of `shoal bench` in memory of a CUDA device, and copies between them and host memory. The driver is loaded when it is
 * asked for; nothing is linked. One device per process; on its main thread. */
#ifndef SHOAL_TOOLS_BENCH_GPU_H
#define SHOAL_TOOLS_BENCH_GPU_H

#include <stdbool.h>
#include <stddef.h>

struct bench_gpu;

/* Loads the driver, and makes the context of this process's device current: device number LOCAL_RANK, counted round, or
 * what other launchers than `shoal run` call so. Call it before the communicator is made: GPUs sum among themselves only
 * in one that is made while their contexts are current. NULL: what is wrong is on stderr. */
struct bench_gpu *bench_gpu_open(void);
/* Takes memory of the device. False: what is wrong is on stderr. */
bool bench_gpu_allocate(struct bench_gpu *gpu, size_t bytes, char **memory_out);
/* Copies and waits. False: what is wrong is on stderr. */
bool bench_gpu_upload(const struct bench_gpu *gpu, char *there, const char *here, size_t bytes);
bool bench_gpu_download(const struct bench_gpu *gpu, char *here, const char *there, size_t bytes);
/* Until the device has run all that was put on its streams. False: what is wrong is on stderr. */
bool bench_gpu_wait(const struct bench_gpu *gpu);
/* Memory of the host that the device copies from and to directly; else copies of the bench's own would be slow. Optional. */
void bench_gpu_register(struct bench_gpu *gpu, void *here, size_t bytes);
/* Frees its memory and ends its context; Shoal's context must have been destroyed before. NULL is allowed. */
void bench_gpu_close(struct bench_gpu *gpu);

#endif
