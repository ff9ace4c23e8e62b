#include "comm/comm_settings.h"

#define OF(field) offsetof(struct shoal_comm_settings, field)
static const struct shoal_setting settings_of_comm[] = {
    {.name = "SHOAL_TIMEOUT_MS",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(timeout_ms),
     .preset = "600000",
     .least = 1,
     .most = UINT32_MAX,
     .text = "deadline of an operation, counted from posting"},
    {.name = "SHOAL_BOOTSTRAP_TIMEOUT_MS",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(bootstrap_timeout_ms),
     .preset = "60000",
     .least = 1,
     .most = UINT32_MAX,
     .text = "how long ranks wait for each other at the start"},
};
#undef OF
const struct shoal_setting_table shoal_comm_setting_table = {settings_of_comm, SHOAL_COUNT_OF(settings_of_comm)};
