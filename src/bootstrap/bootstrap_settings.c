#include "bootstrap/bootstrap_settings.h"

static bool is_ports(const char *value)
{
    uint16_t low, high;
    return shoal_setting_parse_ports(value, &low, &high);
}

#define OF(field) offsetof(struct shoal_bootstrap_settings, field)
static const struct shoal_setting settings_of_bootstrap[] = {
    {.name = "SHOAL_WARN_MS",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(warn_ms),
     .preset = "10000",
     .least = 1,
     .most = UINT32_MAX,
     .text = "an operation or a start that has waited this long logs which ranks are missing"},
    {.name = "SHOAL_STORE_PORT",
     .type = SHOAL_SETTING_NUMBER,
     .offset = OF(port),
     .preset = "0",
     .least = 0,
     .most = UINT16_MAX,
     .text = "port where rank 0 listens at the start; 0: the first free one of the 16 after MASTER_PORT"},
    {.name = "SHOAL_PORTS",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(ports),
     .preset = "",
     .is_valid = is_ports,
     .form = "a port or two with a dash, such as 20000-20099",
     .text = "ports to listen at for other hosts, such as 20000-20099, for firewalls"},
    {.name = "SHOAL_JOB_ID",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(job_id),
     .preset = "",
     .text = "name of this job, the same on all its ranks; it distinguishes jobs that use one MASTER_PORT"},
    {.name = "SHOAL_SECRET",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(secret),
     .preset = "",
     .is_secret = true,
     .text = "the job's secret; ranks prove to each other that they know it"},
    {.name = "SHOAL_SECRET_FILE",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(secret_file),
     .preset = "",
     .text = "file whose first line is the secret"},
};
#undef OF
const struct shoal_setting_table shoal_bootstrap_setting_table = {settings_of_bootstrap, SHOAL_COUNT_OF(settings_of_bootstrap)};
