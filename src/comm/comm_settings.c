#include "comm/comm_settings.h"

static const char *const dump_signals[] = {"no", "USR1", "USR2", NULL};

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
    {.name = "SHOAL_TRACE_FILE",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(trace_file),
     .preset = "",
     .text = "file that receives the flight recorder when a communicator is finalized or freed; %h, %p, %r as in "
             "SHOAL_RECORDER_FILE"},
    {.name = "SHOAL_DUMP_SIGNAL",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(dump_signal),
     .preset = "no",
     .words = dump_signals,
     .text = "USR1 or USR2: this signal writes the flight recorder at once, to SHOAL_RECORDER_FILE or the temporary folder"},
};
#undef OF
const struct shoal_setting_table shoal_comm_setting_table = {settings_of_comm, SHOAL_COUNT_OF(settings_of_comm)};
