#include "transport/shm/shm_settings.h"

#define OF(field) offsetof(struct shoal_shm_settings, field)
static const struct shoal_setting settings_of_shm[] = {
    {.name = "SHOAL_HOST_ID",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(host_id),
     .preset = "",
     .text = "ranks with equal values count as one host, ranks with different values as several"},
};
#undef OF
const struct shoal_setting_table shoal_shm_setting_table = {settings_of_shm, SHOAL_COUNT_OF(settings_of_shm)};
