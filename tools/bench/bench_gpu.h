/* Buffers of `shoal bench` in memory of a CUDA device, and copies between them and host memory. The driver is loaded on
 * request; nothing is linked. One device per process, on its main thread. */
#ifndef SHOAL_TOOLS_BENCH_GPU_H
#define SHOAL_TOOLS_BENCH_GPU_H

#include <stdbool.h>
#include <stddef.h>

struct bench_gpu;

/* Loads the driver, and makes the context of this process's device current. The device's number is LOCAL_RANK (or the
 * equivalent of launchers other than `shoal run`) modulo the number of devices. Call this before creating the communicator:
 * GPUs sum among themselves only if their contexts were current at that time. Returns NULL after printing the reason to
 * stderr. */
struct bench_gpu *bench_gpu_open(void);
/* Allocates memory of the device. Returns false after printing the reason to stderr. */
bool bench_gpu_allocate(struct bench_gpu *gpu, size_t bytes, char **memory_out);
/* Copies and waits. Returns false after printing the reason to stderr. */
bool bench_gpu_upload(const struct bench_gpu *gpu, char *there, const char *here, size_t bytes);
bool bench_gpu_download(const struct bench_gpu *gpu, char *here, const char *there, size_t bytes);
/* Waits until the device has run all work on its streams. Returns false after printing the reason to stderr. */
bool bench_gpu_wait(const struct bench_gpu *gpu);
/* Lets the device copy directly from and to this memory of the host. Optional, but without it the bench's own copies are
 * slow. */
void bench_gpu_register(struct bench_gpu *gpu, void *here, size_t bytes);
/* Frees the device's memory and destroys its context. Destroy Shoal's context before. NULL is allowed. */
void bench_gpu_close(struct bench_gpu *gpu);

#endif
