/* A stand-in for CUDA's driver that has devices and nothing else, for `shoal advise --machine this`. MOCK_DEVICES has the memory of
 * each in MiB, then the name of the first: "40960,40000 NVIDIA A100-SXM4-40GB". */
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
enum { FIRST = 100, NO_DEVICE = 100, INVALID = 101 };

int PUBLIC cuInit(unsigned flags);
int PUBLIC cuDeviceGetCount(int *count);
int PUBLIC cuDeviceGet(int *device, int number);
int PUBLIC cuDeviceGetName(char *name, int bytes, int device);
int PUBLIC cuDeviceTotalMem_v2(size_t *bytes, int device);

/* Returns where the memory of a device is written, or NULL. */
static const char *device_text(int number)
{
    const char *at = getenv("MOCK_DEVICES");
    for (int i = 0; at && i < number; i++)
        at = at[strcspn(at, ", ")] == ',' ? at + strcspn(at, ",") + 1 : NULL;
    return at && *at ? at : NULL;
}

int cuInit(unsigned flags)
{
    return flags ? INVALID : device_text(0) ? 0 : NO_DEVICE;
}

int cuDeviceGetCount(int *count)
{
    for (*count = 0; device_text(*count);)
        ++*count;
    return 0;
}

int cuDeviceGet(int *device, int number)
{
    *device = FIRST + number;
    return number >= 0 && device_text(number) ? 0 : INVALID;
}

int cuDeviceGetName(char *name, int bytes, int device)
{
    const char *text = strchr(device_text(0), ' ');
    if (device < FIRST || !text || !device_text(device - FIRST))
        return INVALID;
    strncpy(name, text + 1, (size_t)bytes - 1);
    name[bytes - 1] = 0;
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    const char *text = device < FIRST ? NULL : device_text(device - FIRST);
    if (!text)
        return INVALID;
    *bytes = (size_t)strtoull(text, NULL, 10) << 20;
    return 0;
}
