/* The CUDA driver for programs that measure without Shoal or alongside it. The table `cu` of tests/mock/cuda/mock_client.h also
 * opens a real driver. Programs use it on their main thread and with one device; an error of the driver ends them. */
#ifndef SHOAL_BENCH_GPU_DRIVER_H
#define SHOAL_BENCH_GPU_DRIVER_H

#include <time.h>

#include "mock_client.h"

static inline void gpu_must(shoal_cu_result result, const char *call)
{
    const char *name = "an error";
    if (result == SHOAL_CU_SUCCESS)
        return;
    (void)cu.error_name(result, &name);
    fprintf(stderr, "%s answered %s (%d)\n", call, name, result);
    exit(1);
}
#define CUDA(call) gpu_must(cu.call, #call)

/* Makes a device's primary context current. Device numbers wrap around. */
static inline shoal_cu_device gpu_open(int number)
{
    shoal_cu_device device;
    shoal_cu_context context;
    int count = 0;
    mock_client_open("libcuda.so.1", true);
    CUDA(init(0));
    CUDA(device_count(&count));
    if (!count) {
        fprintf(stderr, "the driver shows no device\n");
        exit(1);
    }
    CUDA(device_get(&device, number % count));
    CUDA(primary_retain(&context, device));
    CUDA(context_set(context));
    return device;
}

static inline double gpu_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#endif
