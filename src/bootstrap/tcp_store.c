#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "bootstrap/lookup.h"
#include "bootstrap/sources.h"
#include "store/kv_tree.h"

#define ATTEMPT_MS 1000 /* doubled at each attempt, as thousands may ask one server at once */
#define ATTEMPT_MS_MAX 4000
#define PAUSE_MS_MIN 5
#define PAUSE_MS_MAX 100

struct tcp_store {
    struct shoal_kv_client client;
    struct shoal_kv_server *server; /* on rank 0 */
    struct shoal_kv_tree tree;
};

/* Time that separates the starts of two jobs by hand at one port, as two lines of a script. */
#define SETTLE_MS 500
/* How long the program that holds a port may take to answer, if that is the only port and if there are several. */
#define HOLDER_MS 2000
#define HOLDER_OF_MANY_MS 200

static enum shoal_status fill_identity(const struct shoal_tcp_point *point, const struct shoal_bootstrap_settings *settings,
                                       const struct shoal_bootstrap *bootstrap, struct shoal_log *log,
                                       struct shoal_kv_identity *identity)
{
    struct shoal_link_hello *hello = &identity->link.hello;
    memset(identity, 0, sizeof *identity);
    shoal_kv_identity_agree(identity, &settings->agreed);
    hello->rank = (uint32_t)bootstrap->rank;
    hello->size = (uint32_t)bootstrap->size;
    hello->has_secret = bootstrap->has_secret;
    hello->job = point->job;
    hello->process = (uint32_t)getpid();
    snprintf(hello->version, sizeof hello->version, "%s", shoal_version());
    if (gethostname(hello->host, sizeof hello->host - 1) != 0)
        strcpy(hello->host, "?");
    memcpy(identity->link.secret, bootstrap->secret, sizeof identity->link.secret);
    identity->is_named = point->is_named;
    identity->has_choice = point->port_count > 1;
    if (shoal_auth_random(&hello->tag, sizeof hello->tag) != SHOAL_OK)
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "no random numbers from the system: %s", strerror(errno));
    return SHOAL_OK;
}

/* ---- rank 0 ---- */

static void port_text(const struct shoal_tcp_point *point, char *text, size_t text_bytes)
{
    if (point->port_count == 1)
        snprintf(text, text_bytes, "port %d", point->port);
    else
        snprintf(text, text_bytes, "ports %d to %d", point->port, point->port + point->port_count - 1);
}

static enum shoal_status tcp_store_fail_to_listen(const struct shoal_tcp_point *point, int error, struct shoal_log *log)
{
    char ports[48];
    port_text(point, ports, sizeof ports);
    if (error == EADDRINUSE)
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot listen at %s: %s in use by other programs; %s",
                              point->host, ports,
                              point->port_count > 1 ? "choose another MASTER_PORT, or a free SHOAL_STORE_PORT"
                              : point->is_by_hand
                                  ? "choose another MASTER_PORT, or set SHOAL_JOB_ID or SHOAL_SECRET alike on all ranks: "
                                    "ranks then recognize their own rank 0, and the next 15 ports are also tried"
                                  : "choose another port");
    if (error == EADDRNOTAVAIL)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "%s is \"%s\", which is not an address of this host; it must name the host where rank 0 runs",
                              point->what, point->host);
    return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot listen at %s, %s: %s", point->host, ports,
                          strerror(error));
}

/* Fails because ranks of this job would take the holder's job for theirs. */
static enum shoal_status refuse_holder(struct shoal_kv_client *client, struct shoal_log *log)
{
    shoal_link_text_clean(client->met.host, sizeof client->met.host);
    return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                          "rank 0 cannot listen at %s: another Shoal job, of %u ranks, uses that port (its rank 0 is %s:%u), "
                          "and ranks could not distinguish the two jobs; " SHOAL_KV_MIXED_ADVICE,
                          client->server, client->met.size, client->met.host, client->met.process);
}

/* Tries to join the server at an address in use, because a job that cannot be distinguished from this one must learn of it.
 * Returns OK if the server belongs to another job or another program, PENDING if it is about to leave. */
static enum shoal_status meet_holder(const struct shoal_address *address, const struct shoal_kv_identity *identity,
                                     uint64_t deadline_ns, struct shoal_log *log)
{
    struct shoal_log quiet;
    struct shoal_kv_client client;
    char reason[SHOAL_KV_REASON_MAX];
    const uint64_t now_ns = shoal_clock_ns();
    uint64_t until_ns = now_ns + (identity->has_choice ? HOLDER_OF_MANY_MS : HOLDER_MS) * SHOAL_NS_PER_MS;
    until_ns = until_ns < deadline_ns ? until_ns : deadline_ns;
    shoal_log_init_quiet(&quiet);
    shoal_kv_client_init(&client, &quiet);
    const enum shoal_kv_join join = shoal_kv_client_join(&client, address, identity, until_ns, until_ns, reason);
    enum shoal_status status = client.refusal == SHOAL_LINK_PAST ? SHOAL_PENDING : SHOAL_OK;
    if (join != SHOAL_KV_JOIN_ELSEWHERE)
        status = refuse_holder(&client, log);
    shoal_kv_client_fini(&client);
    shoal_log_fini(&quiet);
    return status;
}

struct listening {
    int fd;    /* -1 if none */
    int error; /* most informative errno among the ports that were not free */
    bool comes_free;
    struct shoal_address bound;
};

static enum shoal_status try_to_listen(const struct shoal_address *address, const struct shoal_kv_identity *identity,
                                       uint64_t deadline_ns, struct shoal_log *log, struct listening *listening)
{
    const int fd = shoal_kv_server_listen(address);
    if (fd >= 0) {
        listening->fd = fd;
        listening->bound = *address;
        return SHOAL_OK;
    }
    if (listening->error != EADDRINUSE)
        listening->error = -fd;
    const enum shoal_status status = fd == -EADDRINUSE ? meet_holder(address, identity, deadline_ns, log) : SHOAL_OK;
    listening->comes_free |= status == SHOAL_PENDING;
    return status == SHOAL_PENDING ? SHOAL_OK : status;
}

/* Finds the first free port, at the first of the host's addresses that belongs to this machine. */
static enum shoal_status store_find_port(const struct shoal_tcp_point *point, const struct shoal_address_list *list,
                                         const struct shoal_kv_identity *identity, uint64_t deadline_ns, struct shoal_log *log,
                                         struct listening *listening)
{
    *listening = (struct listening){.fd = -1};
    for (int p = 0; p < point->port_count; p++) {
        for (int i = 0; i < list->count && listening->fd < 0; i++) {
            struct shoal_address address = list->at[i];
            shoal_address_port_put(&address, (uint16_t)(point->port + p));
            SHOAL_TRY(try_to_listen(&address, identity, deadline_ns, log, listening));
        }
    }
    return SHOAL_OK;
}

/* Waits for a port that is about to be free. */
static enum shoal_status tcp_store_open_listener(const struct shoal_tcp_point *point, const struct shoal_address_list *list,
                                                 const struct shoal_kv_identity *identity, uint64_t deadline_ns,
                                                 struct shoal_log *log, struct listening *listening)
{
    SHOAL_TRY(store_find_port(point, list, identity, deadline_ns, log, listening));
    while (listening->fd < 0 && listening->comes_free && shoal_clock_ns() < deadline_ns) {
        poll(NULL, 0, PAUSE_MS_MAX);
        SHOAL_TRY(store_find_port(point, list, identity, deadline_ns, log, listening));
    }
    return listening->fd >= 0 ? SHOAL_OK : tcp_store_fail_to_listen(point, listening->error, log);
}

static void warn_without_secret(const struct shoal_tcp_point *point, const struct shoal_bootstrap *bootstrap,
                                const struct shoal_address *bound, struct shoal_log *log)
{
    if (bootstrap->has_secret || point->is_one_host || shoal_address_is_loopback(bound))
        return;
    shoal_log_line(log, SHOAL_LOG_WARN, "bootstrap",
                   "rank 0 listens at %s without a secret: anyone who reaches it can join this job; set SHOAL_SECRET or "
                   "SHOAL_SECRET_FILE alike on all ranks%s",
                   point->host,
                   getenv("SLURM_JOB_ID") ? " (in Slurm's job, before srun: export SHOAL_SECRET=$(openssl rand -hex 32))" : "");
}

static bool is_meant_for_one_host(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0;
}

/* As when /etc/hosts has this host's own name at 127.0.1.1. */
static void note_loopback(const struct shoal_tcp_point *point, const struct shoal_address *bound,
                          struct shoal_bootstrap *bootstrap)
{
    char text[SHOAL_ADDRESS_TEXT_MAX];
    if (point->is_one_host || is_meant_for_one_host(point->host) || !shoal_address_is_loopback(bound))
        return;
    shoal_address_print(bound, text);
    snprintf(
        bootstrap->why_alone, sizeof bootstrap->why_alone,
        "; rank 0 listens at %.60s, which is %.80s here, a loopback address that no other host reaches: take the name off that "
        "line of /etc/hosts, or use the host's address",
        point->host, text);
}

static enum shoal_status open_server(struct tcp_store *store, const struct shoal_tcp_point *point,
                                     const struct shoal_address_list *list, const struct shoal_kv_identity *identity,
                                     const struct shoal_bootstrap *bootstrap, uint64_t deadline_ns,
                                     struct shoal_address *bound_out)
{
    struct listening listening;
    SHOAL_TRY(tcp_store_open_listener(point, list, identity, deadline_ns, store->client.log, &listening));
    *bound_out = listening.bound;
    warn_without_secret(point, bootstrap, bound_out, store->client.log);
    const enum shoal_status status = shoal_kv_server_start(listening.fd, identity, store->client.log, &store->server);
    if (status != SHOAL_OK)
        close(listening.fd);
    return status;
}

/* ---- every rank ---- */

struct search {
    struct shoal_kv_client *client;
    const struct shoal_tcp_point *point;
    const struct shoal_address_list *list;
    const struct shoal_kv_identity *identity;
    uint64_t deadline_ns;
    char reason[SHOAL_KV_REASON_MAX]; /* why the most informative attempt failed */
    int weight;                       /* how informative that is */
    bool met_secret;                  /* met a job with another secret */
    uint64_t begun_ns, warn_ns;       /* when to log what it waits for; 0: never */
};

/* An answer from a Shoal job is worth more than silence, and silence more than a refused connection. */
static void note_reason(struct search *search, const char reason[SHOAL_KV_REASON_MAX])
{
    const enum shoal_link_verdict refusal = search->client->refusal;
    const int weight = refusal != SHOAL_LINK_OK ? 3 : strstr(reason, strerror(ECONNREFUSED)) ? 1 : 2;
    if (weight < search->weight)
        return;
    search->weight = weight;
    search->met_secret |= refusal == SHOAL_LINK_SECRET_WRONG || refusal == SHOAL_LINK_SECRET_ONE_SIDED;
    memcpy(search->reason, reason, sizeof search->reason);
}

/* Tries every port at every address once. */
static enum shoal_kv_join search_once(struct search *search, uint32_t attempt_ms)
{
    for (int p = 0; p < search->point->port_count; p++) {
        for (int i = 0; i < search->list->count; i++) {
            struct shoal_address address = search->list->at[i];
            shoal_address_port_put(&address, (uint16_t)(search->point->port + p));
            const uint64_t attempt_ns = shoal_clock_ns() + attempt_ms * SHOAL_NS_PER_MS;
            char reason[SHOAL_KV_REASON_MAX];
            const enum shoal_kv_join join =
                shoal_kv_client_join(search->client, &address, search->identity, attempt_ns, search->deadline_ns, reason);
            if (join != SHOAL_KV_JOIN_ELSEWHERE)
                return join;
            note_reason(search, reason);
        }
    }
    return SHOAL_KV_JOIN_ELSEWHERE;
}

static void warn_that_it_waits(struct search *search)
{
    char ports[48];
    const uint64_t now_ns = shoal_clock_ns();
    if (search->warn_ns == 0 || now_ns < search->warn_ns)
        return;
    port_text(search->point, ports, sizeof ports);
    shoal_log_line(search->client->log, SHOAL_LOG_WARN, "bootstrap",
                   "has waited %llu ms for rank 0 of %u: nothing of this job listens at %s, %s (%s); did it start?",
                   (unsigned long long)((now_ns - search->begun_ns) / SHOAL_NS_PER_MS), search->identity->link.hello.size,
                   search->point->host, ports, search->reason);
    search->warn_ns += now_ns - search->begun_ns;
}

static enum shoal_status tcp_store_join(struct search *search, uint32_t timeout_ms)
{
    int pause_ms = PAUSE_MS_MIN;
    uint32_t attempt_ms = ATTEMPT_MS;
    for (;;) {
        const enum shoal_kv_join join = search_once(search, attempt_ms);
        attempt_ms = attempt_ms * 2 < ATTEMPT_MS_MAX ? attempt_ms * 2 : ATTEMPT_MS_MAX;
        if (join == SHOAL_KV_JOIN_DONE)
            return SHOAL_OK;
        if (join == SHOAL_KV_JOIN_REFUSED)
            return search->client->failure;
        if (shoal_clock_ns() >= search->deadline_ns)
            break;
        warn_that_it_waits(search);
        poll(NULL, 0, pause_ms);
        pause_ms = pause_ms * 2 < PAUSE_MS_MAX ? pause_ms * 2 : PAUSE_MS_MAX;
    }
    char ports[48];
    port_text(search->point, ports, sizeof ports);
    return shoal_log_fail(
        search->client->log, search->met_secret ? SHOAL_ERR_AUTH : SHOAL_ERR_TIMEOUT, "bootstrap",
        "rank 0 of %u did not come within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms): nothing of "
        "this job listens at %s, %s (%s)",
        search->identity->link.hello.size, timeout_ms, search->point->host, ports, search->reason);
}

static int tcp_store_set(void *arg, const char *key, const void *value, size_t bytes)
{
    return shoal_kv_client_set(&((struct tcp_store *)arg)->client, key, value, bytes);
}

static long tcp_store_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    return shoal_kv_client_get(&((struct tcp_store *)arg)->client, key, value, capacity, timeout_ms);
}

static int tcp_store_erase(void *arg, const char *key)
{
    return shoal_kv_client_erase(&((struct tcp_store *)arg)->client, key);
}

static long get_above(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    return shoal_kv_tree_get_above(&((struct tcp_store *)arg)->tree, key, value, capacity, timeout_ms);
}

static int set_below(void *arg, const char *key, const void *value, size_t bytes)
{
    return shoal_kv_tree_set_below(&((struct tcp_store *)arg)->tree, key, value, bytes);
}

static enum shoal_status tcp_store_failure(const void *state)
{
    return ((const struct tcp_store *)state)->client.failure;
}

static void tcp_store_close(void *state)
{
    struct tcp_store *store = state;
    shoal_kv_client_leave(&store->client);
    shoal_kv_tree_close(&store->tree);
    if (store->server)
        shoal_kv_server_stop(store->server);
    shoal_kv_client_fini(&store->client);
    free(store);
}

static enum shoal_status tcp_store_open_parts(struct tcp_store *store, const struct shoal_tcp_point *point,
                                              const struct shoal_kv_identity *identity, struct shoal_bootstrap *bootstrap,
                                              uint32_t timeout_ms)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct shoal_address_list list;
    SHOAL_TRY(shoal_lookup_list(point->host, point->what, deadline_ns, store->client.log, &list));
    const uint64_t begun_ns = shoal_clock_ns();
    struct search search = {.client = &store->client,
                            .point = point,
                            .list = &list,
                            .identity = identity,
                            .deadline_ns = deadline_ns,
                            .begun_ns = begun_ns,
                            .warn_ns = bootstrap->warn_ms ? begun_ns + bootstrap->warn_ms * SHOAL_NS_PER_MS : 0};
    if (bootstrap->rank != 0)
        return tcp_store_join(&search, timeout_ms);
    struct shoal_address bound;
    SHOAL_TRY(open_server(store, point, &list, identity, bootstrap, deadline_ns, &bound));
    note_loopback(point, &bound, bootstrap);
    if (shoal_kv_client_join(&store->client, &bound, identity, deadline_ns, deadline_ns, search.reason) == SHOAL_KV_JOIN_DONE)
        return SHOAL_OK;
    return shoal_log_fail(store->client.log, SHOAL_ERR_SYSTEM, "bootstrap", "rank 0 cannot reach its own store: %s",
                          search.reason);
}

/* Without a name and a secret, ranks of another job may have taken the places of this job's ranks. When this job's ranks then
 * come, their places are taken, and the server reports that to every rank that waits. */
static enum shoal_status tcp_store_confirm(void *state)
{
    struct tcp_store *store = state;
    char nothing;
    return shoal_kv_client_get(&store->client, "shoal/settled", &nothing, sizeof nothing, SETTLE_MS) < -1
               ? store->client.failure
               : SHOAL_OK;
}

enum shoal_status shoal_tcp_store_open(const struct shoal_tcp_point *found, const struct shoal_bootstrap_settings *settings,
                                       struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    struct shoal_tcp_point point = *found;
    const bool is_untold = !point.is_named && !bootstrap->has_secret;
    if (is_untold) /* its ranks could not recognize theirs among several servers */
        point.port_count = 1;
    struct tcp_store *store = calloc(1, sizeof *store);
    if (!store)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for the connection to rank 0");
    shoal_kv_client_init(&store->client, log);
    struct shoal_kv_identity identity;
    enum shoal_status status = fill_identity(&point, settings, bootstrap, log, &identity);
    if (status == SHOAL_OK)
        status = tcp_store_open_parts(store, &point, &identity, bootstrap, timeout_ms);
    /* If a firewall leaves only some ports, keep them for the endpoints that must listen. */
    shoal_kv_tree_open(&store->tree, &store->client, &identity, status == SHOAL_OK && !settings->ports[0]);
    explicit_bzero(&identity, sizeof identity);
    if (status != SHOAL_OK) {
        tcp_store_close(store);
        return status;
    }
    bootstrap->store = (struct shoal_store){tcp_store_set, tcp_store_get, tcp_store_erase, store};
    bootstrap->above = (struct shoal_store){.get = get_above, .arg = store};
    if (store->tree.below.link.fd >= 0)
        bootstrap->below = (struct shoal_store){.set = set_below, .arg = store};
    bootstrap->state = store;
    bootstrap->close = tcp_store_close;
    bootstrap->failure = tcp_store_failure;
    bootstrap->confirm = is_untold && point.is_by_hand ? tcp_store_confirm : NULL;
    shoal_bootstrap_end_phase(bootstrap, "store");
    return SHOAL_OK;
}
