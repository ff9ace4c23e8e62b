/* The modes, which define how hostile the stand-in is, and its random numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mock_driver.h"

#define VARIABLE "MOCK_CUDA"

static const struct mock_modes defaults = {
    .devices = 2,
    .version = 12040,
    .memory = 16384,
    .peers = 1,
    .values = 1,
    .flush = 1,
    .seed = 1,
    .torn = 1,
    .depth = 1024,
};

static const struct mode {
    const char *word;
    size_t offset;
    int least, most;
} modes[] = {
#define MODE(word, least, most)                               \
    {                                                         \
#word, offsetof(struct mock_modes, word), least, most \
    }
    MODE(devices, 0, MOCK_DEVICES_MAX),
    MODE(version, 0, 99990),
    MODE(memory, 1, 1 << 20),
    MODE(peers, 0, 1),
    MODE(nvlink, 0, MOCK_DEVICES_MAX),
    MODE(values, 0, 1),
    MODE(flush, 0, 1),
    MODE(gdrcopy, 0, 1),
    MODE(dmabuf, 0, 1),
    MODE(seed, 0, 1 << 30),
    MODE(late, 0, 1000000),
    MODE(torn, 1, 64),
    MODE(poison, 0, 1),
    MODE(queues, 0, 32),
    MODE(depth, 1, 1 << 20),
    MODE(idle, 0, 1),
    MODE(pageable, 0, 1),
    MODE(reuse, 0, 1),
    MODE(leaks, 0, 1),
#undef MODE
};

/* ---- Random numbers and time --------------------------------------------------------------------------------------------- */

/* splitmix64, https://prng.di.unimi.it/splitmix64.c */
uint64_t mock_draw(uint64_t limit)
{
    uint64_t z = mock.random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % limit;
}

uint64_t mock_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

/* Sets "word" or "word=number", a text of `bytes` bytes. */
static bool set_mode(struct mock_modes *into, const char *text, size_t bytes)
{
    const char *equals = memchr(text, '=', bytes);
    const size_t word_bytes = equals ? (size_t)(equals - text) : bytes;
    char *end = NULL;
    const long number = equals ? strtol(equals + 1, &end, 10) : 1;
    if (equals && (end == equals + 1 || end != text + bytes))
        return false;
    for (size_t i = 0; i < SHOAL_COUNT_OF(modes); i++) {
        if (strlen(modes[i].word) != word_bytes || memcmp(modes[i].word, text, word_bytes) != 0)
            continue;
        const int value = (int)number;
        if (number < modes[i].least || number > modes[i].most)
            return false;
        memcpy((char *)into + modes[i].offset, &value, sizeof value);
        return true;
    }
    return false;
}

static bool set_modes(struct mock_modes *into, const char *text)
{
    while (*text) {
        const size_t bytes = strcspn(text, ",");
        if (!set_mode(into, text, bytes))
            return false;
        text += bytes;
        text += *text == ',';
    }
    return true;
}

static void use_modes(const struct mock_modes *used)
{
    if (used->seed != mock.modes.seed)
        mock.random = (uint64_t)used->seed;
    mock.modes = *used;
}

MOCK_API bool mock_cuda_set(const char *text)
{
    pthread_mutex_lock(&mock.lock);
    struct mock_modes changed = mock.modes;
    const bool is_known = set_modes(&changed, text);
    if (is_known)
        use_modes(&changed);
    pthread_mutex_unlock(&mock.lock);
    return is_known;
}

MOCK_API void mock_cuda_set_version(int version)
{
    pthread_mutex_lock(&mock.lock);
    mock.modes.version = version;
    pthread_mutex_unlock(&mock.lock);
}

MOCK_API void mock_cuda_set_devices(int count)
{
    pthread_mutex_lock(&mock.lock);
    mock.modes.devices = count < MOCK_DEVICES_MAX ? count : MOCK_DEVICES_MAX;
    pthread_mutex_unlock(&mock.lock);
}

/* An invalid word in the environment ends the process: a test without the modes that it requested would prove nothing. */
void mock_modes_reset(void)
{
    const char *text = getenv(VARIABLE);
    mock.modes = defaults;
    mock.random = (uint64_t)defaults.seed;
    struct mock_modes changed = defaults;
    if (text && !set_modes(&changed, text)) {
        fprintf(stderr, "mock_cuda: " VARIABLE "=%s has an unknown word, or a number out of range (mock_cuda.h lists them)\n",
                text);
        _Exit(MOCK_CUDA_EXIT_CODE);
    }
    use_modes(&changed);
}
