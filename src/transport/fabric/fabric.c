#include "transport/fabric/fabric.h"

#include <stdio.h>
#include <string.h>

#include "transport/fabric/fabric_filter.h"
#include "transport/fabric/fabric_providers.h"

_Static_assert(SHOAL_FABRIC_PROVIDERS <= SHOAL_FABRIC_ROWS_MAX, "each provider has a row");

static void fill_row(const struct shoal_fabric_provider *provider, bool is_taken, struct shoal_fabric_row *row)
{
    row->name = provider->name;
    row->is_usable = provider->way != SHOAL_FABRIC_REJECTED;
    row->is_on_request = provider->is_on_request;
    row->is_taken = is_taken;
    snprintf(row->text, sizeof row->text, "%s", provider->text);
}

static void survey_fill(const struct shoal_fabric_library *library, const struct shoal_fabric_settings *settings,
                        const struct shoal_nic *nic, const struct shoal_nics *equal, bool is_undone,
                        struct shoal_fabric_survey *survey)
{
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    snprintf(survey->library, sizeof survey->library, "libfabric %u.%u (%s)%s", library->major, library->minor, library->path,
             is_undone ? ", FI_PROVIDER ignored" : "");
    shoal_fabric_providers_find(library, nic, (struct shoal_fabric_share){.nics = equal}, providers);
    const struct shoal_fabric_provider *taken =
        shoal_fabric_providers_choose(providers, settings->provider, survey->reason, sizeof survey->reason);
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++)
        fill_row(&providers[i], &providers[i] == taken, &survey->rows[survey->count++]);
    survey->status = taken ? SHOAL_OK : SHOAL_ERR_UNSUPPORTED;
    shoal_fabric_providers_free(library, providers);
}

void shoal_fabric_survey(const struct shoal_fabric_settings *settings, const struct shoal_nic *nic,
                         const struct shoal_nics *equal, struct shoal_fabric_survey *survey_out)
{
    struct shoal_fabric_library library;
    struct shoal_log log;
    memset(survey_out, 0, sizeof *survey_out);
    shoal_log_init_quiet(&log);
    char *filter = shoal_fabric_filter_hide(settings->provider, &log);
    survey_out->status = shoal_fabric_library_open(settings->libfabric, &log, &library);
    if (survey_out->status == SHOAL_OK) {
        survey_fill(&library, settings, nic, equal, filter != NULL, survey_out);
        shoal_fabric_library_close(&library);
    } else {
        (void)shoal_log_last_error(&log, survey_out->reason, sizeof survey_out->reason);
    }
    shoal_fabric_filter_restore(filter);
    shoal_log_fini(&log);
}
