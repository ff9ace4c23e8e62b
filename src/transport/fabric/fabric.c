#include "transport/fabric/fabric.h"

#include "transport/fabric/fabric_providers.h"

static void print_table(const struct shoal_fabric_provider *providers, const struct shoal_fabric_provider *taken, FILE *out)
{
    for (int i = 0; i < SHOAL_FABRIC_PROVIDERS; i++) {
        const struct shoal_fabric_provider *provider = &providers[i];
        fprintf(out, "%c %-14s %s%s\n", provider == taken ? '*' : ' ', provider->name, provider->text,
                provider->way != SHOAL_FABRIC_REJECTED && provider->is_on_request ? "; only on request" : "");
    }
}

static enum shoal_status print_choice(const struct shoal_fabric_library *library, const struct shoal_settings *settings,
                                      const struct shoal_nic *nic, FILE *out)
{
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    char reason[1200];
    shoal_fabric_providers_find(library, nic, providers);
    const struct shoal_fabric_provider *taken =
        shoal_fabric_providers_choose(providers, settings->provider, reason, sizeof reason);
    print_table(providers, taken, out);
    if (taken)
        fprintf(out, "\ntaken: %s, %s\n", taken->name, reason);
    else
        fprintf(out, "\n%s\n", reason);
    shoal_fabric_providers_free(library, providers);
    return taken ? SHOAL_OK : SHOAL_ERR_UNSUPPORTED;
}

/* What is wrong is printed where the table would be. */
static void keep_quiet(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

enum shoal_status shoal_fabric_print_providers(const struct shoal_settings *settings, const struct shoal_nic *nic, FILE *out)
{
    struct shoal_fabric_library library;
    struct shoal_log log;
    char error[SHOAL_LOG_TEXT_MAX];
    shoal_log_init(&log, settings, keep_quiet, NULL);
    enum shoal_status status = shoal_fabric_library_open(settings->libfabric, &log, &library);
    if (status == SHOAL_OK) {
        fprintf(out, "libfabric %u.%u (%s)\n", library.major, library.minor, library.path);
        status = print_choice(&library, settings, nic, out);
        shoal_fabric_library_close(&library);
    } else {
        shoal_log_last_error(&log, error, sizeof error);
        fprintf(out, "%s\n", error);
    }
    shoal_log_fini(&log);
    return status;
}
