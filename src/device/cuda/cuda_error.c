#include "device/cuda/cuda_error.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "device/gpu.h"

/* Every process reaches the kernel's driver through this file. */
#define CONTROL_FILE "/dev/nvidiactl"

static const struct {
    shoal_cu_result result;
    enum shoal_status status;
    const char *advice;
} answers[] = {
    {SHOAL_CU_INVALID_VALUE, SHOAL_ERR_ARGUMENT, "an argument is wrong: the memory may have been freed"},
    {SHOAL_CU_OUT_OF_MEMORY, SHOAL_ERR_MEMORY, "free device memory, or raise the limit of memory that may be locked"},
    {SHOAL_CU_DEINITIALIZED, SHOAL_ERR_STATE, "the driver is shutting down: finalize before the process exits"},
    {SHOAL_CU_STUB_LIBRARY, SHOAL_ERR_UNSUPPORTED,
     "a toolkit's stub was loaded in place of the driver: take its folder out of LD_LIBRARY_PATH"},
    {SHOAL_CU_DEVICE_UNAVAILABLE, SHOAL_ERR_SYSTEM,
     "another process holds the device exclusively: see the compute mode in nvidia-smi -q"},
    {SHOAL_CU_NO_DEVICE, SHOAL_ERR_UNSUPPORTED, "no device is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi"},
    {SHOAL_CU_INVALID_DEVICE, SHOAL_ERR_ARGUMENT, "there is no such device: see CUDA_VISIBLE_DEVICES"},
    {SHOAL_CU_INVALID_CONTEXT, SHOAL_ERR_ARGUMENT, "there is no such context, or it was destroyed"},
    {SHOAL_CU_NO_BINARY_FOR_GPU, SHOAL_ERR_UNSUPPORTED, "there is no code of it for this device"},
    {SHOAL_CU_JIT_COMPILER_NOT_FOUND, SHOAL_ERR_UNSUPPORTED,
     "the driver's compiler is missing: install libnvidia-ptxjitcompiler.so.1, or give the container all of the driver"},
    {SHOAL_CU_UNSUPPORTED_PTX_VERSION, SHOAL_ERR_UNSUPPORTED, "the driver is too old for this code: install a newer one"},
    {SHOAL_CU_JIT_COMPILATION_DISABLED, SHOAL_ERR_UNSUPPORTED,
     "the driver may not compile: take CUDA_DISABLE_PTX_JIT out of the environment"},
    {SHOAL_CU_OPERATING_SYSTEM, SHOAL_ERR_SYSTEM, "the operating system refused a call of the driver: see dmesg"},
    {SHOAL_CU_NOT_PERMITTED, SHOAL_ERR_SYSTEM, "the driver does not permit it: see the permissions of /dev/nvidia*"},
    {SHOAL_CU_NOT_SUPPORTED, SHOAL_ERR_UNSUPPORTED, "this device or system cannot do it"},
    {SHOAL_CU_SYSTEM_NOT_READY, SHOAL_ERR_SYSTEM, "the system is not ready: start nvidia-fabricmanager, and try again"},
    {SHOAL_CU_SYSTEM_DRIVER_MISMATCH, SHOAL_ERR_SYSTEM,
     "libcuda.so.1 and the kernel's driver have different versions: load the new module, or reboot"},
    {SHOAL_CU_COMPAT_NOT_SUPPORTED_ON_DEVICE, SHOAL_ERR_UNSUPPORTED,
     "the compatibility libcuda.so.1 does not serve this device: take it out of LD_LIBRARY_PATH"},
    {SHOAL_CU_MPS_CONNECTION_FAILED, SHOAL_ERR_SYSTEM,
     "the MPS server does not answer: start it, or unset CUDA_MPS_PIPE_DIRECTORY"},
};

static const char *cuda_own_name(shoal_cu_result result)
{
    switch (result) {
#define RESULT_NAME(name, number) \
    case number:                  \
        return "CUDA_ERROR_" #name;
        SHOAL_CU_RESULT_LIST(RESULT_NAME)
#undef RESULT_NAME
    default:
        return NULL;
    }
}

const char *shoal_gpu_error_name(int error)
{
    const char *name = cuda_own_name((shoal_cu_result)error);
    return name ? name : "an error that has no name here";
}

static const char *cuda_error_name(const struct shoal_cuda_calls *calls, shoal_cu_result result)
{
    const char *name = NULL;
    if (calls && calls->error_name && calls->error_name(result, &name) == SHOAL_CU_SUCCESS && name)
        return name;
    return cuda_own_name(result);
}

/* A driver that may not open its files reports this in several ways, so the file itself is tested. */
static bool lacks_permission(void)
{
    return access(CONTROL_FILE, R_OK | W_OK) != 0 && errno == EACCES;
}

enum shoal_status shoal_cuda_fail(struct shoal_log *log, const struct shoal_cuda_calls *calls, const char *call,
                                  shoal_cu_result result, const char *doing)
{
    const char *name = cuda_error_name(calls, result), *advice = "see dmesg for lines of NVRM";
    enum shoal_status status = SHOAL_ERR_SYSTEM;
    char number[32];
    snprintf(number, sizeof number, "error %d", result);
    for (size_t i = 0; i < SHOAL_COUNT_OF(answers); i++) {
        if (answers[i].result != result)
            continue;
        status = answers[i].status;
        advice = answers[i].advice;
    }
    if (lacks_permission()) {
        status = SHOAL_ERR_SYSTEM;
        advice = "this user may not open " CONTROL_FILE ": join the group that owns it";
    }
    return shoal_log_fail(log, status, "gpu", "%s: %s answered %s; %s", doing, call, name ? name : number, advice);
}
