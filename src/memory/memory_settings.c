#include "memory/memory_settings.h"

#define OF(field) offsetof(struct shoal_memory_settings, field)
static const struct shoal_setting settings_of_memory[] = {
    {.name = "SHOAL_MEMORY_LIMIT",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(memory_limit),
     .preset = "0",
     .text = "limit of the shared memory that this process may reserve; 0: what the container leaves"},
    {.name = "SHOAL_MEMORY_KEPT",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(memory_kept),
     .preset = "256M",
     .text = "limit of the buffer cache, which keeps freed shared memory for the next use; 0: none"},
};
#undef OF
const struct shoal_setting_table shoal_memory_setting_table = {settings_of_memory, SHOAL_COUNT_OF(settings_of_memory)};
