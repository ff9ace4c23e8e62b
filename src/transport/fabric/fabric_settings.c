#include "transport/fabric/fabric_settings.h"

static const char *const writes[] = {"auto", "no", NULL};

#define OF(field) offsetof(struct shoal_fabric_settings, field)
static const struct shoal_setting settings_of_fabric[] = {
    {.name = "SHOAL_LIBFABRIC",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(libfabric),
     .preset = "",
     .text = "path of libfabric, instead of the newest one found"},
    {.name = "SHOAL_PROVIDER",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(provider),
     .preset = "",
     .text = "libfabric's provider instead of the best one, see `shoal info --providers`"},
    {.name = "SHOAL_WRITES",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(writes),
     .preset = "auto",
     .words = writes,
     .text = "auto: libfabric writes into remote staging buffers if the adapter can; no: all data go in messages"},
    {.name = "SHOAL_GPUDIRECT_BYTES",
     .type = SHOAL_SETTING_BYTES,
     .offset = OF(gpudirect_bytes),
     .preset = "0",
     .text = "network adapters read inputs of at least this many bytes directly from a GPU, if the plan only sends them and "
             "provider and driver can; 0: never"},
    {.name = "SHOAL_NETWORK_THREADS",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(network_threads),
     .preset = "1",
     .least = 1,
     .most = SHOAL_NETWORK_THREADS_MAX,
     .text = "how many threads of a rank send and receive over TCP, 1 to 16; other networks need one"},
};
#undef OF
const struct shoal_setting_table shoal_fabric_setting_table = {settings_of_fabric, SHOAL_COUNT_OF(settings_of_fabric)};
