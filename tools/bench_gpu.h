/* Buffers of `shoal bench` in memory of a CUDA device, and copies between them and host memory. The driver is loaded when it is
 * asked for; nothing is linked. One device per process; on its main thread. */
#ifndef SHOAL_TOOLS_BENCH_GPU_H
#define SHOAL_TOOLS_BENCH_GPU_H

#include <stdbool.h>
#include <stddef.h>

struct bench_gpu;

/* Loads the driver: before the communicator is made, which looks for it then. NULL: what is wrong is on stderr. */
struct bench_gpu *bench_gpu_open(void);
/* Takes device number local_rank, counted round, and memory of it. False: what is wrong is on stderr. */
bool bench_gpu_allocate(struct bench_gpu *gpu, int local_rank, size_t bytes, char **memory_out);
/* Copies and waits. False: what is wrong is on stderr. */
bool bench_gpu_upload(const struct bench_gpu *gpu, char *there, const char *here, size_t bytes);
bool bench_gpu_download(const struct bench_gpu *gpu, char *here, const char *there, size_t bytes);
/* Until the device has run all that was put on its streams. False: what is wrong is on stderr. */
bool bench_gpu_wait(const struct bench_gpu *gpu);
/* Memory of the host that the device copies from and to directly; else copies of the bench's own would be slow. Optional. */
void bench_gpu_register(struct bench_gpu *gpu, void *here, size_t bytes);
/* Frees its memory. NULL is allowed. */
void bench_gpu_close(struct bench_gpu *gpu);

#endif
