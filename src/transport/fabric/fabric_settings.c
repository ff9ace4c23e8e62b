#include "transport/fabric/fabric_settings.h"

#include <stdlib.h>
#include <string.h>

static const char *const writes[] = {"auto", "no", NULL};

/* Returns the number, or 0 if it is not one from 1 to `most`. */
static int parse_count(const char *value, int most)
{
    char *end;
    const long count = strtol(value, &end, 10);
    const bool is_number = value[0] >= '0' && value[0] <= '9' && !*end;
    return is_number && count >= 1 && count <= most ? (int)count : 0;
}

_Static_assert(SHOAL_NETWORK_THREADS_MAX == 16 && SHOAL_ADAPTERS_MAX == 16, "the forms below say so");

static bool is_valid_count(const char *value)
{
    return strcmp(value, "auto") == 0 || parse_count(value, 16) > 0;
}

int shoal_fabric_fixed_threads(const struct shoal_fabric_settings *settings)
{
    return parse_count(settings->network_threads, SHOAL_NETWORK_THREADS_MAX);
}

int shoal_fabric_fixed_adapters(const struct shoal_fabric_settings *settings)
{
    return parse_count(settings->adapters, SHOAL_ADAPTERS_MAX);
}

/* About what TCP needs at 100 Gbit/s (docs/threads.md), and what one rank gets of it at most: each thread also has a connection
 * to each peer. */
#define HOST_THREADS 16
#define RANK_THREADS 8

int shoal_fabric_auto_threads(int cores, int local_ranks)
{
    const int share = (HOST_THREADS + local_ranks - 1) / local_ranks, most = share < RANK_THREADS ? share : RANK_THREADS;
    const int threads = cores < most ? cores : most;
    return threads > 1 ? threads : 1;
}

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
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(network_threads),
     .preset = "auto",
     .is_valid = is_valid_count,
     .form = "auto, or a number of threads from 1 to 16",
     .text =
         "how many threads of a rank send and receive over TCP, 1 to 16; auto: up to 8, of the cores that SHOAL_THREADS may "
         "use, if they make operations faster"},
    {.name = "SHOAL_ADAPTERS",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(adapters),
     .preset = "auto",
     .is_valid = is_valid_count,
     .form = "auto, or a number of adapters from 1 to 16",
     .text = "the most network adapters of one rank, 1 to 16; auto: its share of the equal adapters of its host, if they make "
             "operations faster"},
};
#undef OF
const struct shoal_setting_table shoal_fabric_setting_table = {settings_of_fabric, SHOAL_COUNT_OF(settings_of_fabric)};
