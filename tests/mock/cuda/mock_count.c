/* Counts of live objects. */
#include <string.h>

#include "mock_driver.h"

static size_t count_streams(void)
{
    return mock_handle_count(MOCK_STREAM);
}

static size_t count_contexts(void)
{
    return mock_handle_count(MOCK_CONTEXT);
}

static size_t count_events(void)
{
    return mock_handle_count(MOCK_EVENT);
}

static size_t count_modules(void)
{
    return mock_handle_count(MOCK_MODULE);
}

static size_t count_allocations(void)
{
    return mock_memory_count(false) + mock_handle_count(MOCK_ALLOCATION);
}

static size_t count_registrations(void)
{
    return mock_memory_count(true);
}

static const struct {
    const char *what;
    size_t (*count)(void);
} counts[] = {
    {"contexts", count_contexts},
    {"streams", count_streams},
    {"events", count_events},
    {"modules", count_modules},
    {"allocations", count_allocations},
    {"registrations", count_registrations},
    {"operations", mock_count_operations},
    {"stack", mock_stack_depth},
    {"blocks", mock_most_blocks},
    {"calls", mock_count_calls},
    {"pins", mock_count_pins},
    {"remote writes", mock_count_remote_writes},
};

MOCK_API size_t mock_cuda_count(const char *what)
{
    size_t count = SIZE_MAX;
    pthread_mutex_lock(&mock.lock);
    for (size_t i = 0; i < SHOAL_COUNT_OF(counts); i++)
        if (strcmp(counts[i].what, what) == 0)
            count = counts[i].count();
    pthread_mutex_unlock(&mock.lock);
    return count;
}
