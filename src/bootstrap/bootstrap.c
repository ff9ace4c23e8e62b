#include "bootstrap/bootstrap.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "bootstrap/sources.h"
#include "link/address.h"
#include "link/auth.h"
#include "link/secret.h"
#include "store/key_table.h"

static void bootstrap_free_bytes(unsigned char **bytes)
{
    free(*bytes);
}

static enum shoal_status bootstrap_check_ranks(const char *what, int rank, int size, struct shoal_log *log)
{
    SHOAL_TRY(shoal_size_check(log, "bootstrap", what, rank, size));
    if (log->rank < 0)
        log->rank = rank;
    return SHOAL_OK;
}

/* ---- sources ---- */

/* A single rank needs no proof. */
enum shoal_status shoal_bootstrap_secret_load(const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                              struct shoal_bootstrap *bootstrap)
{
    static const unsigned char context[SHOAL_SECRET_BYTES] = "shoal job secret, version 1";
    char error[320];
    const enum shoal_status status = shoal_secret_load(settings->secret, settings->secret_file, context, &bootstrap->has_secret,
                                                       bootstrap->size > 1 ? bootstrap->secret : NULL, error, sizeof error);
    return status == SHOAL_OK ? SHOAL_OK : shoal_log_fail(log, status, "bootstrap", "%s", error);
}

enum shoal_status shoal_bootstrap_from_address(const char *address, int rank, int size,
                                               const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                               uint32_t timeout_ms, struct shoal_bootstrap *bootstrap_out)
{
    char host[SHOAL_ADDRESS_HOST_MAX];
    struct shoal_tcp_point point = {.host = host, .what = "the address", .port_count = 1};
    if (!address || !shoal_address_parse(address, host, &point.port))
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "the address is \"%.200s\", but must be \"host:port\" or \"[v6]:port\" with a port of 1 to 65535",
                              address ? address : "(null)");
    SHOAL_TRY(bootstrap_check_ranks("the address's caller", rank, size, log));
    point.job = shoal_hash_bytes(SHOAL_HASH_START, settings->job_id, strlen(settings->job_id));
    point.is_named = settings->job_id[0] != 0;
    struct shoal_bootstrap bootstrap = {
        .rank = rank, .size = size, .launcher = "address", .warn_ms = settings->warn_ms, .phase_begun_ns = shoal_clock_ns()};
    SHOAL_TRY(shoal_bootstrap_secret_load(settings, log, &bootstrap));
    SHOAL_TRY(size == 1 ? shoal_single_store_open(log, &bootstrap)
                        : shoal_tcp_store_open(&point, settings, log, timeout_ms, &bootstrap));
    *bootstrap_out = bootstrap;
    return SHOAL_OK;
}

enum shoal_status shoal_bootstrap_from_store(const struct shoal_store *store, int rank, int size,
                                             const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                             uint32_t timeout_ms, struct shoal_bootstrap *bootstrap_out)
{
    if (!store || !store->set || !store->get || !store->erase)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "the store, or its set, get or erase, is NULL");
    SHOAL_TRY(bootstrap_check_ranks("the store's caller", rank, size, log));
    struct shoal_bootstrap bootstrap = {.rank = rank,
                                        .size = size,
                                        .launcher = "store",
                                        .store = *store,
                                        .warn_ms = settings->warn_ms,
                                        .phase_begun_ns = shoal_clock_ns()};
    SHOAL_TRY(shoal_bootstrap_secret_load(settings, log, &bootstrap));
    SHOAL_TRY(shoal_bootstrap_agree(&bootstrap, settings, log, timeout_ms));
    *bootstrap_out = bootstrap;
    return SHOAL_OK;
}

void shoal_bootstrap_close(struct shoal_bootstrap *bootstrap)
{
    if (bootstrap->close)
        bootstrap->close(bootstrap->state);
    explicit_bzero(bootstrap, sizeof *bootstrap);
}

/* ---- agreement ---- */

/* The record that each rank publishes through a store that has no handshake. */
struct agreement {
    struct shoal_agreed settings;
    char version[16];
    unsigned char nonce[SHOAL_AUTH_NONCE_BYTES];
    unsigned char proof[SHOAL_AUTH_MAC_BYTES]; /* with a secret: proves that it is the same */
    unsigned char offer[SHOAL_SECRET_BYTES];   /* without one: rank 0's offer becomes the secret */
    uint32_t rank;
    uint8_t has_secret;
    uint8_t can_prove;
    uint8_t reserved[2];
};

static bool build_proof(const struct shoal_bootstrap *bootstrap, const struct agreement *of,
                        unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    static const char label[24] = "shoal agreement";
    const struct shoal_auth_span spans[] = {{label, sizeof label}, {of->nonce, sizeof of->nonce}, {&of->rank, sizeof of->rank}};
    return shoal_auth_mac(bootstrap->secret, spans, SHOAL_COUNT_OF(spans), proof);
}

static enum shoal_status build_agreement(const struct shoal_bootstrap *bootstrap,
                                         const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                         struct agreement *mine)
{
    memset(mine, 0, sizeof *mine);
    mine->settings = settings->agreed.agreed;
    snprintf(mine->version, sizeof mine->version, "%s", shoal_version());
    mine->rank = (uint32_t)bootstrap->rank;
    mine->has_secret = bootstrap->has_secret;
    mine->can_prove = shoal_auth_is_available();
    const bool offers = !mine->has_secret && mine->rank == 0;
    if (shoal_auth_random(mine->nonce, sizeof mine->nonce) != SHOAL_OK ||
        (offers && shoal_auth_random(mine->offer, sizeof mine->offer) != SHOAL_OK) ||
        (mine->has_secret && !build_proof(bootstrap, mine, mine->proof)))
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "no random bytes from the kernel (%m)");
    return SHOAL_OK;
}

static enum shoal_status bootstrap_compare(const struct shoal_bootstrap *bootstrap, const struct shoal_agreed_own *agreed,
                                           struct shoal_log *log, const struct agreement *mine, const struct agreement *theirs,
                                           int rank)
{
    if (memcmp(mine->version, theirs->version, sizeof mine->version) != 0)
        return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap",
                              "rank %d runs Shoal %.15s and this rank %s; install one version everywhere", rank,
                              theirs->version, mine->version);
    if (!shoal_agreed_is_same(&mine->settings, &theirs->settings)) {
        char difference[320];
        shoal_agreed_print_difference(agreed, &theirs->settings, &mine->settings, "here", difference, sizeof difference);
        return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap", "settings that must agree differ from rank %d's: %s", rank,
                              difference);
    }
    if (mine->has_secret != theirs->has_secret)
        return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap",
                              "%s has a secret and %s none; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks (rank %d)",
                              mine->has_secret ? "this rank" : "the other", mine->has_secret ? "the other" : "this rank", rank);
    unsigned char wanted[SHOAL_AUTH_MAC_BYTES];
    if (mine->has_secret && (theirs->rank != (uint32_t)rank || !build_proof(bootstrap, theirs, wanted) ||
                             !shoal_auth_equal(wanted, theirs->proof, sizeof wanted)))
        return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap",
                              "rank %d has another secret; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks", rank);
    return SHOAL_OK;
}

static void take_offer(struct shoal_bootstrap *bootstrap, const struct agreement *all)
{
    for (int r = 0; r < bootstrap->size; r++) {
        if (!all[r].can_prove)
            return; /* a rank without libsodium could not use the secret */
    }
    memcpy(bootstrap->secret, all[0].offer, sizeof bootstrap->secret);
    bootstrap->has_secret = true;
}

enum shoal_status shoal_bootstrap_agree(struct shoal_bootstrap *bootstrap, const struct shoal_bootstrap_settings *settings,
                                        struct shoal_log *log, uint32_t timeout_ms)
{
    if (bootstrap->size == 1)
        return SHOAL_OK;
    struct agreement mine;
    SHOAL_TRY(build_agreement(bootstrap, settings, log, &mine));
    SHOAL_SCOPED(bootstrap_free_bytes) unsigned char *bytes = calloc((size_t)bootstrap->size, sizeof mine);
    struct agreement *all = (struct agreement *)(void *)bytes;
    if (!all)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for the values of %d ranks", bootstrap->size);
    SHOAL_TRY(shoal_bootstrap_gather(bootstrap, log, "agree", &mine, all, sizeof mine, timeout_ms));
    for (int r = 0; r < bootstrap->size; r++) {
        if (r != bootstrap->rank)
            SHOAL_TRY(bootstrap_compare(bootstrap, &settings->agreed, log, &mine, &all[r], r));
    }
    if (!bootstrap->has_secret)
        take_offer(bootstrap, all);
    return SHOAL_OK;
}
