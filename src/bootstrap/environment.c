#include <stdlib.h>
#include <string.h>

#include "bootstrap/sources.h"

#define PORTS_AFTER_MASTER 16

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

const char *shoal_bootstrap_master(void)
{
    return variable("MASTER_ADDR");
}

enum shoal_status shoal_environment_number(const char *name, long least, long most, struct shoal_log *log, bool *found_out,
                                           long *value_out)
{
    const char *text = variable(name);
    *found_out = text != NULL;
    if (!text)
        return SHOAL_OK;
    const bool is_number = strspn(text, "0123456789") == strlen(text) && strlen(text) <= 9;
    const long value = is_number ? strtol(text, NULL, 10) : -1;
    if (value < least || value > most)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "%s is \"%.60s\", but must be a whole number from %ld to %ld", name, text, least, most);
    *value_out = value;
    return SHOAL_OK;
}

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/; the 0 at the end keeps neighbours apart. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (size_t i = 0; i <= strlen(text); i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(1099511628211);
    return hash;
}

/* What tells this job from one on neighbouring ports. Not the size and not the secret: where these differ, people want to read
 * that. */
static uint64_t hash_job(void)
{
    static const char *const names[] = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"};
    uint64_t hash = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < SHOAL_COUNT_OF(names); i++)
        hash = hash_text(hash, variable(names[i]) ? variable(names[i]) : "");
    return hash;
}

enum shoal_status shoal_environment_ports(const struct shoal_settings *settings, int master_port, struct shoal_log *log,
                                          int *first_out, int *count_out)
{
    if (settings->port == 0 && master_port == 65535)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "MASTER_PORT is 65535, and no port comes after it; choose a lower one, or set SHOAL_PORT");
    *first_out = settings->port ? (int)settings->port : master_port + 1;
    *count_out = settings->port ? 1 : 65535 - master_port < PORTS_AFTER_MASTER ? 65535 - master_port : PORTS_AFTER_MASTER;
    return SHOAL_OK;
}

static enum shoal_status find_ports(const struct shoal_settings *settings, struct shoal_log *log, struct shoal_tcp_place *place)
{
    long master_port = 0;
    int first = 0, count = 0;
    bool is_set;
    SHOAL_TRY(shoal_environment_number("MASTER_PORT", 1, 65535, log, &is_set, &master_port));
    if (settings->port == 0 && !is_set)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "RANK and WORLD_SIZE are set, but MASTER_PORT is not; set it to the same free port on all ranks");
    SHOAL_TRY(shoal_environment_ports(settings, (int)master_port, log, &first, &count));
    place->port = (uint16_t)first;
    place->port_count = (uint16_t)count;
    return SHOAL_OK;
}

static enum shoal_status open_tcp(const struct shoal_settings *settings, struct shoal_log *log, uint32_t timeout_ms,
                                  struct shoal_bootstrap *bootstrap)
{
    struct shoal_tcp_place place = {.host = variable("MASTER_ADDR"), .what = "MASTER_ADDR", .job = hash_job()};
    if (!place.host)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it to the host of rank 0 on all ranks");
    SHOAL_TRY(find_ports(settings, log, &place));
    bool is_set;
    long local_size = 0;
    SHOAL_TRY(shoal_environment_number("LOCAL_WORLD_SIZE", 1, SHOAL_BOOTSTRAP_SIZE_MAX, log, &is_set, &local_size));
    place.is_one_host = local_size == bootstrap->size;
    return shoal_tcp_store_open(&place, settings, log, timeout_ms, bootstrap);
}

static enum shoal_status open_variables(const struct shoal_settings *settings, struct shoal_log *log, uint32_t timeout_ms,
                                        struct shoal_bootstrap *bootstrap)
{
    long rank = 0, size = 1;
    bool is_set;
    bootstrap->launcher = "torchrun or shoal run";
    SHOAL_TRY(shoal_environment_number("WORLD_SIZE", 1, SHOAL_BOOTSTRAP_SIZE_MAX, log, &is_set, &size));
    SHOAL_TRY(shoal_environment_number("RANK", 0, SHOAL_BOOTSTRAP_SIZE_MAX - 1, log, &is_set, &rank));
    if (rank >= size)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "RANK is %ld, but with WORLD_SIZE %ld may be 0 to %ld",
                              rank, size, size - 1);
    bootstrap->rank = (int)rank;
    bootstrap->size = (int)size;
    if (log->rank < 0)
        log->rank = bootstrap->rank;
    SHOAL_TRY(shoal_secret_load(settings, log, bootstrap));
    return size == 1 ? shoal_single_store_open(log, bootstrap) : open_tcp(settings, log, timeout_ms, bootstrap);
}

/* PMIx and PMI-1 know rank and size only once they are open, and have no handshake. */
static enum shoal_status finish_private(const struct shoal_settings *settings, struct shoal_log *log, uint32_t timeout_ms,
                                        struct shoal_bootstrap *bootstrap)
{
    if (log->rank < 0)
        log->rank = bootstrap->rank;
    enum shoal_status status = shoal_secret_load(settings, log, bootstrap);
    if (status == SHOAL_OK)
        status = shoal_bootstrap_agree(bootstrap, settings, log, timeout_ms);
    if (status != SHOAL_OK)
        shoal_bootstrap_close(bootstrap);
    return status;
}

static enum shoal_status open_any(const struct shoal_settings *settings, struct shoal_log *log, uint32_t timeout_ms,
                                  struct shoal_bootstrap *bootstrap)
{
    const bool has_rank = variable("RANK") != NULL, has_size = variable("WORLD_SIZE") != NULL;
    if (has_rank && has_size)
        return open_variables(settings, log, timeout_ms, bootstrap);
    if (shoal_pmix_is_present()) {
        bootstrap->launcher = "PMIx";
        SHOAL_TRY(shoal_pmix_store_open(log, timeout_ms, bootstrap));
        return finish_private(settings, log, timeout_ms, bootstrap);
    }
    if (shoal_pmi1_is_present()) {
        bootstrap->launcher = "PMI-1";
        SHOAL_TRY(shoal_pmi1_store_open(log, timeout_ms, bootstrap));
        return finish_private(settings, log, timeout_ms, bootstrap);
    }
    if (has_rank || has_size)
        return shoal_log_fail(
            log, SHOAL_ERR_ARGUMENT, "bootstrap",
            "%s is set, but %s is not; set both, or start the program with `shoal run -n N`, torchrun or mpirun",
            has_rank ? "RANK" : "WORLD_SIZE", has_rank ? "WORLD_SIZE" : "RANK");
    bootstrap->launcher = "single";
    bootstrap->size = 1;
    if (log->rank < 0)
        log->rank = 0;
    return shoal_single_store_open(log, bootstrap);
}

enum shoal_status shoal_bootstrap_from_environment(const struct shoal_settings *settings, struct shoal_log *log,
                                                   uint32_t timeout_ms, struct shoal_bootstrap *bootstrap_out)
{
    struct shoal_bootstrap bootstrap = {.rank = 0};
    SHOAL_TRY(open_any(settings, log, timeout_ms, &bootstrap));
    *bootstrap_out = bootstrap;
    return SHOAL_OK;
}
