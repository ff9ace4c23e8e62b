#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "bootstrap/sources.h"
#include "bootstrap/tcp_tree.h"

#define ATTEMPT_MS 1000
#define PAUSE_MS_MIN 5
#define PAUSE_MS_MAX 100

struct tcp_store {
    struct shoal_tcp_client client;
    struct shoal_tcp_server *server; /* rank 0 */
    struct shoal_tcp_tree tree;
};

static void fill_identity(const struct shoal_tcp_place *place, const struct shoal_settings *settings,
                          const struct shoal_bootstrap *bootstrap, struct shoal_tcp_identity *identity)
{
    memset(identity, 0, sizeof *identity);
    identity->side.hello.protocol = SHOAL_TCP_PROTOCOL;
    identity->side.hello.rank = (uint32_t)bootstrap->rank;
    identity->side.hello.size = (uint32_t)bootstrap->size;
    identity->side.hello.has_secret = bootstrap->has_secret;
    identity->side.hello.job = place->job;
    identity->side.hello.settings = shoal_settings_hash(settings);
    identity->side.agreed = shoal_settings_agreed(settings);
    identity->side.hello.process = (uint32_t)getpid();
    snprintf(identity->side.hello.version, sizeof identity->side.hello.version, "%s", shoal_version());
    if (gethostname(identity->side.hello.host, sizeof identity->side.hello.host - 1) != 0)
        strcpy(identity->side.hello.host, "?");
    memcpy(identity->secret, bootstrap->secret, sizeof identity->secret);
}

/* ---- rank 0 ---- */

static void port_text(const struct shoal_tcp_place *place, char *text, size_t text_bytes)
{
    if (place->port_count == 1)
        snprintf(text, text_bytes, "port %d", place->port);
    else
        snprintf(text, text_bytes, "ports %d to %d", place->port, place->port + place->port_count - 1);
}

static enum shoal_status fail_to_listen(const struct shoal_tcp_place *place, int error, struct shoal_log *log)
{
    char ports[48];
    port_text(place, ports, sizeof ports);
    if (error == EADDRINUSE)
        return shoal_log_fail(
            log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot listen at %s: %s in use by other programs; %s", place->host,
            ports, place->port_count == 1 ? "choose another port" : "choose another MASTER_PORT, or a free SHOAL_PORT");
    if (error == EADDRNOTAVAIL)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "%s is \"%s\", which is no address of this host; it must name the host where rank 0 runs",
                              place->what, place->host);
    return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot listen at %s, %s: %s", place->host, ports,
                          strerror(error));
}

/* The first free port, at the first of the host's addresses that is one of ours. */
static enum shoal_status open_listener(const struct shoal_tcp_place *place, const struct shoal_address_list *list,
                                       struct shoal_log *log, int *fd_out, struct shoal_address *bound_out)
{
    int error = 0;
    for (int p = 0; p < place->port_count; p++) {
        for (int i = 0; i < list->count; i++) {
            struct shoal_address address = list->at[i];
            shoal_address_port_put(&address, (uint16_t)(place->port + p));
            const int fd = shoal_tcp_server_listen(&address);
            if (fd >= 0) {
                *fd_out = fd;
                *bound_out = address;
                return SHOAL_OK;
            }
            if (error != EADDRINUSE)
                error = -fd;
        }
    }
    return fail_to_listen(place, error, log);
}

static void warn_without_secret(const struct shoal_tcp_place *place, const struct shoal_bootstrap *bootstrap,
                                const struct shoal_address *bound, struct shoal_log *log)
{
    if (bootstrap->has_secret || place->is_one_host || shoal_address_is_loopback(bound))
        return;
    shoal_log_line(log, SHOAL_LOG_WARN, "bootstrap",
                   "rank 0 listens at %s without a secret: anyone who reaches it can join this job; set SHOAL_SECRET or "
                   "SHOAL_SECRET_FILE alike on all ranks",
                   place->host);
}

static enum shoal_status open_server(struct tcp_store *store, const struct shoal_tcp_place *place,
                                     const struct shoal_address_list *list, const struct shoal_tcp_identity *identity,
                                     const struct shoal_bootstrap *bootstrap, struct shoal_address *bound_out)
{
    int listener = -1;
    SHOAL_TRY(open_listener(place, list, store->client.log, &listener, bound_out));
    warn_without_secret(place, bootstrap, bound_out, store->client.log);
    const enum shoal_status status = shoal_tcp_server_start(listener, identity, store->client.log, &store->server);
    if (status != SHOAL_OK)
        close(listener);
    return status;
}

/* ---- every rank ---- */

struct search {
    struct shoal_tcp_client *client;
    const struct shoal_tcp_place *place;
    const struct shoal_address_list *list;
    const struct shoal_tcp_identity *identity;
    uint64_t deadline_ns;
    char reason[SHOAL_TCP_REASON_MAX]; /* why the most telling attempt failed */
};

/* Tries every port at every address once. */
static enum shoal_tcp_join search_once(struct search *search)
{
    for (int p = 0; p < search->place->port_count; p++) {
        for (int i = 0; i < search->list->count; i++) {
            struct shoal_address address = search->list->at[i];
            shoal_address_port_put(&address, (uint16_t)(search->place->port + p));
            const uint64_t attempt_ns = shoal_clock_ns() + ATTEMPT_MS * SHOAL_NS_PER_MS;
            char reason[SHOAL_TCP_REASON_MAX];
            const enum shoal_tcp_join join =
                shoal_tcp_client_join(search->client, &address, search->identity, attempt_ns, search->deadline_ns, reason);
            if (join != SHOAL_TCP_JOIN_ELSEWHERE)
                return join;
            if (!search->reason[0] || !strstr(reason, strerror(ECONNREFUSED)))
                memcpy(search->reason, reason, sizeof reason);
        }
    }
    return SHOAL_TCP_JOIN_ELSEWHERE;
}

static enum shoal_status join(struct search *search, uint32_t timeout_ms)
{
    int pause_ms = PAUSE_MS_MIN;
    for (;;) {
        const enum shoal_tcp_join join = search_once(search);
        if (join == SHOAL_TCP_JOIN_DONE)
            return SHOAL_OK;
        if (join == SHOAL_TCP_JOIN_REFUSED)
            return search->client->failure;
        if (shoal_clock_ns() >= search->deadline_ns)
            break;
        poll(NULL, 0, pause_ms);
        pause_ms = pause_ms * 2 < PAUSE_MS_MAX ? pause_ms * 2 : PAUSE_MS_MAX;
    }
    char ports[48];
    port_text(search->place, ports, sizeof ports);
    return shoal_log_fail(
        search->client->log, SHOAL_ERR_TIMEOUT, "bootstrap",
        "rank 0 of %u did not come within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms): nothing of "
        "this job listens at %s, %s (last: %s)",
        search->identity->side.hello.size, timeout_ms, search->place->host, ports, search->reason);
}

static int store_set(void *arg, const char *key, const void *value, size_t bytes)
{
    return shoal_tcp_client_set(&((struct tcp_store *)arg)->client, key, value, bytes);
}

static long store_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    return shoal_tcp_client_get(&((struct tcp_store *)arg)->client, key, value, capacity, timeout_ms);
}

static int store_erase(void *arg, const char *key)
{
    return shoal_tcp_client_erase(&((struct tcp_store *)arg)->client, key);
}

static long get_above(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    return shoal_tcp_tree_get_above(&((struct tcp_store *)arg)->tree, key, value, capacity, timeout_ms);
}

static int set_below(void *arg, const char *key, const void *value, size_t bytes)
{
    return shoal_tcp_tree_set_below(&((struct tcp_store *)arg)->tree, key, value, bytes);
}

static enum shoal_status store_failure(const void *state)
{
    return ((const struct tcp_store *)state)->client.failure;
}

static void store_close(void *state)
{
    struct tcp_store *store = state;
    shoal_tcp_client_leave(&store->client);
    shoal_tcp_tree_close(&store->tree);
    if (store->server)
        shoal_tcp_server_stop(store->server);
    shoal_tcp_client_fini(&store->client);
    free(store);
}

static enum shoal_status open_parts(struct tcp_store *store, const struct shoal_tcp_place *place,
                                    const struct shoal_tcp_identity *identity, const struct shoal_bootstrap *bootstrap,
                                    uint32_t timeout_ms)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct shoal_address_list list;
    SHOAL_TRY(shoal_address_list_find(place->host, place->what, deadline_ns, store->client.log, &list));
    struct search search = {
        .client = &store->client, .place = place, .list = &list, .identity = identity, .deadline_ns = deadline_ns};
    if (bootstrap->rank != 0)
        return join(&search, timeout_ms);
    struct shoal_address bound;
    SHOAL_TRY(open_server(store, place, &list, identity, bootstrap, &bound));
    if (shoal_tcp_client_join(&store->client, &bound, identity, deadline_ns, deadline_ns, search.reason) == SHOAL_TCP_JOIN_DONE)
        return SHOAL_OK;
    return shoal_log_fail(store->client.log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot reach its own store: %s",
                          search.reason);
}

enum shoal_status shoal_tcp_store_open(const struct shoal_tcp_place *place, const struct shoal_settings *settings,
                                       struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    struct tcp_store *store = calloc(1, sizeof *store);
    if (!store)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for the connection to rank 0");
    shoal_tcp_client_init(&store->client, log);
    struct shoal_tcp_identity identity;
    fill_identity(place, settings, bootstrap, &identity);
    const enum shoal_status status = open_parts(store, place, &identity, bootstrap, timeout_ms);
    /* Where a firewall leaves only some ports, those are for what has to listen. */
    shoal_tcp_tree_open(&store->tree, &store->client, &identity, status == SHOAL_OK && !settings->ports[0]);
    explicit_bzero(&identity, sizeof identity);
    if (status != SHOAL_OK) {
        store_close(store);
        return status;
    }
    bootstrap->store = (struct shoal_store){store_set, store_get, store_erase, store};
    bootstrap->above = (struct shoal_store){.get = get_above, .arg = store};
    if (store->tree.below.fd >= 0)
        bootstrap->below = (struct shoal_store){.set = set_below, .arg = store};
    bootstrap->state = store;
    bootstrap->close = store_close;
    bootstrap->failure = store_failure;
    shoal_bootstrap_end_phase(bootstrap, "store");
    return SHOAL_OK;
}
