#include "transport/fabric/network.h"

#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "link/auth.h"
#include "topology/features.h"
#include "topology/links.h"
#include "transport/fabric/fabric_filter.h"
#include "transport/fabric/fork.h"

/* A message that waits to be sent. */
struct waiting {
    struct waiting *next;
    struct shoal_network_load *load;
    size_t bytes;
    char data[];
};

/* A message, without its seal, for a communicator that this rank has not made yet. */
struct unexpected {
    struct unexpected *next;
    size_t bytes;
    char data[];
};

/* The unexpected messages of one peer for one communicator. */
struct shoal_network_unexpected {
    struct shoal_network_unexpected *next;
    uint64_t comm;
    struct unexpected *first, **end;
    size_t bytes;
    enum shoal_status status; /* if not OK, one was lost, and the communicator fails when it is made */
};

#define CLOSED_MAX 256   /* closed communicators that are remembered, so that their late messages are recognized */
#define PARTED_MAX 4096  /* peers whose late messages are dropped without a count: as many as ranks in a world */
#define FULL_MESSAGES 64 /* if this many wait for one peer, callers should retry later */
#define SENDING_MAX 16   /* messages to one peer under way: a peer that accepts none must not delay the others */
#define POLLS_AT_ONCE 16 /* rounds of a poll while there is more to receive */
#define SEAL_EVERY_NS (100 * SHOAL_NS_PER_MS) /* because sealing looks at all descriptors */
#define FALSE_WAKES_MAX 4                     /* in a row: the descriptor is not trusted for a while */
#define COUNTERS_MAX (1u << SHOAL_NETWORK_INDEX_BITS)
#define AGES (1u << SHOAL_NETWORK_AGE_BITS)
#define NAMES 1024 /* places in the table of sessions */

/* Counters that a peer increments by writing. */
struct counters {
    struct shoal_network_channel *channel; /* NULL if unused */
    uint16_t source;
    uint16_t next;  /* index of the channel's next counters; 0 if none */
    uint16_t age;   /* grows with each owner, to recognize immediates for an earlier one */
    uint16_t lanes; /* a bit for each lane that has received such a write */
    bool was_given; /* at any time */
    bool is_probe;  /* they count nothing: an immediate only proves that a lane of `source` reaches one of this rank */
};

struct orphan {
    struct orphan *next;
    struct shoal_network_leftover leftover;
};

struct shoal_network {
    struct shoal_log *log;
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    const struct shoal_fabric_provider *provider;
    struct shoal_fabric_endpoint *endpoint;
    struct shoal_lane_set lanes;
    bool tries_lanes;
    const struct shoal_network_interposer *interposer; /* NULL except in tests */
    void *between;                                     /* the interposer's object for this network */
    struct shoal_memory *memory;                       /* NULL if no sources are registered */
    bool copies_locked_pages;                          /* at fork; otherwise private memory is not registered */
    struct shoal_fabric_sources sources;
    struct shoal_fabric_exports exports;
    struct shoal_fabric_addresses addresses;
    struct shoal_network_peer **peers;
    size_t peer_count, peer_capacity;
    struct shoal_network_peer *parted;    /* kept while messages or writes to them are under way */
    uint64_t parted_sessions[PARTED_MAX]; /* session numbers of recently parted peers */
    unsigned parted_next;
    struct shoal_reachability_checks checks;
    struct shoal_network_channel *channels;
    unsigned turns_wanted;     /* by channels */
    struct counters *counters; /* [COUNTERS_MAX], allocated with the first ones; index 0 is never used */
    uint16_t *free_counters;   /* [free_count] their indexes, in any order */
    uint32_t free_count;
    struct shoal_siphash_key random; /* random draws are derived from it */
    uint64_t draws;
    struct waiting *waiting, **waiting_end;
    uint64_t rounds;          /* of sending */
    bool has_lost_unexpected; /* an unexpected message was lost and its communicator could not be noted */
    struct shoal_rejections rejections;
    struct shoal_network_peer *named[NAMES]; /* peers by the session number of their messages */
    uint64_t closed[CLOSED_MAX];             /* numbers of recently closed communicators */
    unsigned closed_next;
    struct orphan *orphans;
    unsigned orphan_loads;                  /* orphans that have loads */
    struct shoal_network_load *failed;      /* those that count failed writes or messages */
    bool writes;                            /* data are written into peers' staging buffers, not sent in messages */
    bool is_unsealed;                       /* new connections exist: programs that children exec must not keep them (fork.h) */
    uint64_t next_seal_ns;                  /* earliest time of the next seal */
    atomic_bool was_woken;                  /* by the descriptor, since the last poll */
    unsigned false_wakes;                   /* in a row */
    _Atomic uint64_t distrusted_until_ns;   /* the descriptor; written under the progress engine's lock, read without it */
    char message[SHOAL_FABRIC_MESSAGE_MAX]; /* the message being assembled */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void choose_writes(struct shoal_network *network, const struct shoal_fabric_settings *settings)
{
    const char *reason = strcmp(settings->writes, "no") == 0                        ? "SHOAL_WRITES=no"
                         : shoal_fabric_endpoint_emulates_writes(network->endpoint) ? "the adapter only emulates writes"
                                                                                    : NULL;
    network->writes = !reason && network->provider->way == SHOAL_FABRIC_WRITES;
    if (reason && network->provider->way == SHOAL_FABRIC_WRITES)
        shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "provider %s: sends everything as messages, because %s",
                       network->provider->name, reason);
}

static double ms_since(uint64_t begun_ns)
{
    return (double)(shoal_clock_ns() - begun_ns) / (double)SHOAL_NS_PER_MS;
}

static enum shoal_status network_load_library(struct shoal_network *network, const char *wanted)
{
    const uint64_t begun_ns = shoal_clock_ns();
    SHOAL_TRY(shoal_fabric_library_open(wanted, network->log, &network->library));
    shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "libfabric was loaded in %.1f ms", ms_since(begun_ns));
    return SHOAL_OK;
}

static enum shoal_status network_open_endpoint(struct shoal_network *network, const struct shoal_network_options *options)
{
    char reason[1200], names[SHOAL_ADAPTERS_MAX][SHOAL_LINKS_NAME_MAX];
    struct shoal_fabric_share share = options->share;
    uint16_t low, high;
    (void)shoal_setting_parse_ports(options->ports, &low, &high); /* checked when settings were read */
    if (!share.name_count) {
        share.name_count = shoal_links_name_adapters(SHOAL_LINKS_SYS, share.rank, share.ranks, SHOAL_ADAPTERS_MAX, names);
        share.names = (const char(*)[SHOAL_LINKS_NAME_MAX])names;
    }
    const uint64_t begun_ns = shoal_clock_ns();
    shoal_fabric_providers_find_best(&network->library, options->nic, options->settings->provider,
                                     options->settings->gpudirect_bytes > 0, share, network->providers);
    shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "libfabric found its providers in %.1f ms", ms_since(begun_ns));
    network->provider = shoal_fabric_providers_choose(network->providers, options->settings->provider, reason, sizeof reason);
    if (!network->provider)
        return shoal_log_fail(network->log, SHOAL_ERR_UNSUPPORTED, "fabric", "%s", reason);
    shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "libfabric %u.%u (%s), provider %s: %s; it %s",
                   network->library.major, network->library.minor, network->library.path, network->provider->name, reason,
                   network->provider->text);
    SHOAL_TRY(shoal_fabric_endpoint_open(&network->library, network->provider, low, high, network->log, &network->endpoint));
    choose_writes(network, options->settings);
    return SHOAL_OK;
}

_Static_assert(SHOAL_FABRIC_MESSAGE_MAX <= SHOAL_SESSION_MESSAGE_MAX, "all that is sent can be sealed");

static void on_message(void *arg, const void *data, size_t bytes);
static void on_written(void *arg, uint32_t immediate);
static void on_locally_complete(void *arg, void *owner);
static void on_failed(void *arg, void *owner, const char *text);
static void on_unreachable(void *arg, struct shoal_reachability *check, const char *text);

/* Reachability is checked only over TCP: other providers have no address to check it from. */
static void open_links(struct shoal_network *network)
{
    network->checks = (struct shoal_reachability_checks){.arg = network, .broken = on_unreachable};
    if (!network->provider->is_over_tcp ||
        !shoal_reachability_read_address(shoal_fabric_endpoint_address(network->endpoint), &network->checks.from))
        network->checks.from.socket.ss_family = AF_UNSPEC;
}

static struct shoal_fabric_handler handler_of(struct shoal_network *network)
{
    return (struct shoal_fabric_handler){network, on_message, on_written, on_locally_complete, on_failed};
}

static const struct shoal_network_interposer *wanted_interposer;

void shoal_network_interpose(const struct shoal_network_interposer *interposer)
{
    wanted_interposer = interposer;
}

static enum shoal_status open_between(struct shoal_network *network)
{
    const struct shoal_fabric_handler handler = handler_of(network);
    if (!wanted_interposer)
        return SHOAL_OK;
    network->between = wanted_interposer->create(network->log->rank, &handler);
    if (!network->between)
        return shoal_log_fail(network->log, SHOAL_ERR_MEMORY, "fabric", "no memory for a test's layer over the network");
    network->interposer = wanted_interposer;
    return SHOAL_OK;
}

static enum shoal_status read_random(struct shoal_network *network)
{
    const enum shoal_status status = shoal_auth_random(&network->random, sizeof network->random);
    return status == SHOAL_OK ? SHOAL_OK
                              : shoal_log_fail(network->log, status, "fabric", "no random bytes from the kernel (%m)");
}

/* Returns why one thread for each adapter is enough, or NULL. Other providers than those over TCP cost the thread a message's
 * time, not its bytes' time. */
static const char *why_one_thread(const struct shoal_network *network)
{
    if (!network->provider->is_over_tcp || shoal_fabric_endpoint_registers_sources(network->endpoint))
        return "the adapter moves the bytes itself";
    return network->writes ? NULL : "data are sent in messages";
}

/* Returns how many lanes to open: one for each further adapter, and more if more threads are wanted. Over TCP a number of
 * threads that is set is the limit. */
static int count_lanes(const struct shoal_network *network, const struct shoal_network_options *options)
{
    const int threads = options->threads - 1, adapters = network->writes ? network->provider->more_count : 0;
    const char *const reason = why_one_thread(network);
    const bool is_limited = options->is_fixed && !reason;
    if (reason && threads > 0)
        shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "one thread at the network%s, not %d: %s",
                       adapters ? " for each adapter" : "", threads + 1, reason);
    if (is_limited && adapters > threads)
        shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric",
                       "this rank leaves %d of its adapters idle, because SHOAL_NETWORK_THREADS is %d", adapters - threads,
                       threads + 1);
    const int wanted = reason ? adapters : is_limited || threads > adapters ? threads : adapters;
    return wanted < SHOAL_LANES_MAX ? wanted : SHOAL_LANES_MAX;
}

/* Returns the adapter of a lane. After the first endpoint and one lane for each further adapter, lanes take this rank's
 * adapters in turns. */
static const struct fi_info *network_adapter_of(const struct shoal_network *network, int lane)
{
    const struct shoal_fabric_provider *provider = network->provider;
    const int has_first = !provider->is_first_others || !provider->more_count, turn = provider->more_count + has_first;
    const int number = (lane + has_first) % turn - has_first;
    return number < 0 ? provider->info : provider->more[number];
}

/* Returns the interface with the adapter's address, or NULL. */
static const struct shoal_nic *nic_of(const struct shoal_network_options *options, const struct fi_info *info)
{
    const struct shoal_nics *nics = options->share.nics;
    for (int i = 0; nics && i < nics->count; i++) {
        if (shoal_fabric_provider_is_on(info, &nics->at[i]))
            return &nics->at[i];
    }
    return options->nic && shoal_fabric_provider_is_on(info, options->nic) ? options->nic : NULL;
}

static enum shoal_status network_open_lane(struct shoal_network *network, const struct shoal_network_options *options)
{
    struct shoal_lane_options lane = {.library = &network->library,
                                      .info = network_adapter_of(network, network->lanes.count),
                                      .log = network->log,
                                      .number = network->lanes.count + 1,
                                      .wake = options->wake,
                                      .wake_arg = options->wake_arg};
    const struct shoal_lane_site site = {nic_of(options, lane.info), lane.info != network->provider->info};
    (void)shoal_setting_parse_ports(options->ports, &lane.port_low, &lane.port_high);
    SHOAL_TRY(shoal_lane_set_add(&network->lanes, &lane, &site));
    shoal_fabric_fork_note(network, shoal_lane_address(network->lanes.rows[lane.number - 1].lane));
    return SHOAL_OK;
}

static void open_lanes(struct shoal_network *network, const struct shoal_network_options *options)
{
    const int wanted = count_lanes(network, options);
    const struct shoal_nic *nic = nic_of(options, network->provider->info);
    network->tries_lanes = !options->is_fixed && options->share.most <= 1 && network->writes;
    network->lanes.log = network->log;
    network->lanes.is_over_tcp = network->provider->is_over_tcp;
    network->lanes.is_first_others = network->provider->is_first_others;
    network->lanes.is_registering = shoal_fabric_endpoint_registers_sources(network->endpoint);
    if (nic)
        network->lanes.nic = *nic;
    while (network->lanes.count < wanted && network_open_lane(network, options) == SHOAL_OK)
        ;
    if (network->lanes.count < wanted)
        shoal_log_line(network->log, SHOAL_LOG_WARN, "fabric",
                       "this rank sends and receives with %d of %d threads (see above); or set SHOAL_NETWORK_THREADS, or "
                       "SHOAL_ADAPTERS, to %d",
                       network->lanes.count + 1, wanted + 1, network->lanes.count + 1);
}

enum shoal_status shoal_network_open(const struct shoal_network_options *options, struct shoal_network **network_out)
{
    struct shoal_network *network = calloc(1, sizeof *network);
    if (!network)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "fabric", "no memory for the network");
    network->log = options->log;
    network->waiting_end = &network->waiting;
    enum shoal_status status = read_random(network);
    char *filter = shoal_fabric_filter_hide(options->settings->provider, network->log);
    if (status == SHOAL_OK)
        status = network_load_library(network, options->settings->libfabric);
    if (status == SHOAL_OK)
        status = network_open_endpoint(network, options);
    shoal_fabric_filter_restore(filter);
    shoal_fabric_sources_init(&network->sources, network->endpoint, &network->lanes, network->log);
    network->exports = (struct shoal_fabric_exports){.endpoint = network->endpoint, .log = network->log};
    network->addresses.endpoint = network->endpoint;
    network->memory = options->memory;
    network->copies_locked_pages = shoal_topology_copies_locked_pages();
    if (status == SHOAL_OK) {
        open_lanes(network, options);
        shoal_fabric_fork_note(network, shoal_network_address(network));
        shoal_fabric_fork_seal();
        open_links(network);
    }
    if (status == SHOAL_OK)
        status = open_between(network);
    if (status != SHOAL_OK) {
        shoal_network_close(network);
        return status;
    }
    *network_out = network;
    return SHOAL_OK;
}

static void free_lists(struct shoal_network *network)
{
    while (network->waiting) {
        struct waiting *waiting = network->waiting;
        network->waiting = waiting->next;
        free(waiting);
    }
}

static void free_unexpected(struct shoal_network_unexpected *kept)
{
    while (kept->first) {
        struct unexpected *unexpected = kept->first;
        kept->first = unexpected->next;
        free(unexpected);
    }
    free(kept);
}

static void free_all_unexpected(struct shoal_network_peer *peer)
{
    while (peer->unexpected) {
        struct shoal_network_unexpected *kept = peer->unexpected;
        peer->unexpected = kept->next;
        free_unexpected(kept);
    }
}

static void free_peer(struct shoal_network_peer *peer)
{
    free_all_unexpected(peer);
    explicit_bzero(&peer->session, sizeof peer->session);
    free(peer);
}

static void free_parted(struct shoal_network *network)
{
    while (network->parted) {
        struct shoal_network_peer *peer = network->parted;
        network->parted = peer->next_named;
        free_peer(peer);
    }
}

/* Call when the endpoint is closed, so that no peer or adapter uses them. */
static void free_orphans(struct shoal_network *network)
{
    while (network->orphans) {
        struct orphan *orphan = network->orphans;
        network->orphans = orphan->next;
        shoal_fabric_endpoint_unregister(network->endpoint, &orphan->leftover.memory);
        shoal_network_unregister_lanes(network, &orphan->leftover.lane_memory);
        free(orphan->leftover.loads);
        if (orphan->leftover.release)
            orphan->leftover.release(orphan->leftover.arg);
        free(orphan);
    }
}

void shoal_network_close(struct shoal_network *network)
{
    if (!network)
        return;
    shoal_lane_set_stop(&network->lanes);
    if (network->endpoint)
        shoal_fabric_endpoint_stop(network->endpoint);
    free_orphans(network);
    shoal_fabric_sources_close(&network->sources);
    shoal_fabric_exports_close(&network->exports);
    shoal_lane_set_close(&network->lanes);
    shoal_fabric_endpoint_close(network->endpoint);
    shoal_fabric_fork_forget(network);
    shoal_reachability_close_all(&network->checks);
    if (network->interposer)
        network->interposer->destroy(network->between);
    free_lists(network);
    for (size_t i = 0; i < network->peer_count; i++)
        free_peer(network->peers[i]);
    free_parted(network);
    shoal_fabric_addresses_close(&network->addresses);
    free(network->peers);
    free(network->counters);
    free(network->free_counters);
    if (network->library.handle) {
        shoal_fabric_providers_free(&network->library, network->providers);
        shoal_fabric_library_close(&network->library);
    }
    free(network);
}

const char *shoal_network_provider(const struct shoal_network *network)
{
    return network->provider->name;
}

const struct shoal_fabric_address *shoal_network_address(const struct shoal_network *network)
{
    return shoal_fabric_endpoint_address(network->endpoint);
}

void shoal_network_print_address(const struct shoal_network *network, const struct shoal_fabric_address *address, char *text,
                                 size_t bytes)
{
    shoal_fabric_endpoint_print_address(network->endpoint, address, text, bytes);
}

/* ---- Peers --------------------------------------------------------------------------------------------------------------- */

static struct shoal_network_peer **network_place_of(struct shoal_network *network, uint64_t session)
{
    return &network->named[session % NAMES]; /* session numbers are random */
}

static struct shoal_network_peer *network_find_peer(struct shoal_network *network, uint64_t session)
{
    struct shoal_network_peer *peer = *network_place_of(network, session);
    while (peer && peer->session.from.session != session)
        peer = peer->next_named;
    return peer;
}

static bool make_room_for_peer(struct shoal_network *network)
{
    if (network->peer_count < network->peer_capacity)
        return true;
    const size_t capacity = network->peer_capacity ? 2 * network->peer_capacity : 16;
    struct shoal_network_peer **peers = reallocarray(network->peers, capacity, sizeof *peers);
    if (!peers)
        return false;
    network->peers = peers;
    network->peer_capacity = capacity;
    return true;
}

enum shoal_status shoal_network_meet(struct shoal_network *network, const struct shoal_network_peer *known,
                                     struct shoal_network_peer **peer_out)
{
    struct shoal_network_peer *peer = make_room_for_peer(network) ? malloc(sizeof *peer) : NULL;
    if (!peer)
        return shoal_log_fail(network->log, SHOAL_ERR_MEMORY, "fabric", "no memory for a process on %s", known->name.host);
    bool is_new;
    *peer = *known;
    const enum shoal_status status =
        shoal_fabric_addresses_meet(&network->addresses, &peer->address, network->log, &peer->met, &is_new);
    if (status != SHOAL_OK) {
        free_peer(peer);
        return status;
    }
    peer->at = peer->met->at;
    struct shoal_network_peer **place = network_place_of(network, peer->session.from.session);
    peer->next_named = *place;
    *place = peer;
    network->peers[network->peer_count++] = peer;
    if (is_new)
        shoal_fabric_fork_note(network, &peer->address);
    *peer_out = peer;
    return SHOAL_OK;
}

static void forget_peer(struct shoal_network *network, struct shoal_network_peer *peer)
{
    struct shoal_network_peer **link = network_place_of(network, peer->session.from.session);
    while (*link && *link != peer)
        link = &(*link)->next_named;
    SHOAL_ASSERT(*link == peer); /* shoal_network_meet() has put it there */
    *link = peer->next_named;
    for (size_t i = 0; i < network->peer_count; i++) {
        if (network->peers[i] == peer)
            network->peers[i] = network->peers[--network->peer_count];
    }
}

void shoal_network_part(struct shoal_network *network, struct shoal_network_peer *peer)
{
    SHOAL_ASSERT(!peer->waiting && !peer->is_parted); /* the channels that queued messages are closed */
    forget_peer(network, peer);
    network->parted_sessions[network->parted_next++ % PARTED_MAX] = peer->session.from.session;
    shoal_reachability_settle(&network->checks, &peer->reachability);
    shoal_fabric_addresses_part(&network->addresses, peer->met);
    free_all_unexpected(peer);
    explicit_bzero(&peer->session, sizeof peer->session);
    peer->is_parted = true;
    peer->membership = NULL;
    peer->next_named = network->parted;
    network->parted = peer;
    if (!network->orphan_loads)
        free_parted(network);
}

static bool has_parted(const struct shoal_network *network, uint64_t session)
{
    for (unsigned i = 0; i < PARTED_MAX && i < network->parted_next; i++) {
        if (network->parted_sessions[i] == session)
            return true;
    }
    return false;
}

/* ---- Channels ------------------------------------------------------------------------------------------------------------ */

static struct shoal_network_channel *find_channel(const struct shoal_network *network, uint64_t comm)
{
    struct shoal_network_channel *channel = network->channels;
    while (channel && channel->comm != comm)
        channel = channel->next;
    return channel;
}

/* Returns true for the 1st, 2nd, 4th, ... rejection of each kind, so that a flood does not fill the log. */
static bool is_worth_a_line(uint64_t count)
{
    return (count & (count - 1)) == 0;
}

static void reject(struct shoal_network *network, enum shoal_rejection why, const struct shoal_network_peer *from)
{
    char sender[160] = "the provider does not report the sender", own[128];
    const uint64_t count = ++network->rejections.counts[why];
    if (!is_worth_a_line(count))
        return;
    if (from)
        snprintf(sender, sizeof sender, "in the name of process %d on %.63s", from->name.pid, from->name.host);
    shoal_network_print_address(network, shoal_network_address(network), own, sizeof own);
    shoal_log_line(network->log, SHOAL_LOG_WARN, "fabric", "rejected at %.100s, %llu so far: %s (%s); %s", own,
                   (unsigned long long)count, shoal_rejection_text(why), sender,
                   why == SHOAL_REJECTED_UNEXPECTED || why == SHOAL_REJECTED_FOREIGN
                       ? "do all hosts have the same build of Shoal?"
                       : "it changes nothing but this counter. If a program that is not of this job reaches the endpoint, "
                         "give each job its own ports (SHOAL_PORTS), and keep others out by a firewall");
}

const struct shoal_rejections *shoal_network_rejections(const struct shoal_network *network)
{
    return &network->rejections;
}

static void hand_over(struct shoal_network *network, struct shoal_network_channel *channel,
                      const struct shoal_network_peer *from, const void *data, size_t bytes)
{
    struct shoal_network_head head;
    SHOAL_ASSERT(bytes >= sizeof head); /* authenticate() has checked it */
    memcpy(&head, data, sizeof head);
    if (!channel->message(channel->arg, from, &head, (const char *)data + sizeof head, bytes - sizeof head))
        reject(network, SHOAL_REJECTED_FOREIGN, from);
}

static void tell_lost(struct shoal_network_channel *channel, enum shoal_status status, const struct shoal_network_peer *from)
{
    char who[100] = "other hosts", text[300];
    if (from)
        snprintf(who, sizeof who, "process %d on %.63s", from->name.pid, from->name.host);
    if (status == SHOAL_ERR_MEMORY)
        snprintf(text, sizeof text, "no memory for messages that %s sent before this rank had made the communicator", who);
    else
        snprintf(text, sizeof text,
                 "%s sent more than %zu bytes before this rank had made the communicator, which is not allowed; do all hosts "
                 "have "
                 "the same build of Shoal?",
                 who, (size_t)SHOAL_NETWORK_UNEXPECTED_MAX);
    channel->failed(channel->arg, status, text);
}

static struct shoal_network_unexpected **find_unexpected(struct shoal_network_peer *peer, uint64_t comm)
{
    struct shoal_network_unexpected **link = &peer->unexpected;
    while (*link && (*link)->comm != comm)
        link = &(*link)->next;
    return link;
}

static void hand_over_unexpected(struct shoal_network *network, struct shoal_network_channel *channel,
                                 struct shoal_network_peer *peer)
{
    struct shoal_network_unexpected **link = find_unexpected(peer, channel->comm), *kept = *link;
    if (!kept)
        return;
    *link = kept->next;
    for (const struct unexpected *unexpected = kept->first; unexpected; unexpected = unexpected->next)
        hand_over(network, channel, peer, unexpected->data, unexpected->bytes);
    if (kept->status != SHOAL_OK)
        tell_lost(channel, kept->status, peer);
    free_unexpected(kept);
}

void shoal_network_channel_open(struct shoal_network *network, struct shoal_network_channel *channel)
{
    SHOAL_ASSERT(!find_channel(network, channel->comm) && !channel->counters);
    channel->next = network->channels;
    network->channels = channel;
    for (size_t i = 0; i < network->peer_count; i++)
        hand_over_unexpected(network, channel, network->peers[i]);
    if (network->has_lost_unexpected)
        tell_lost(channel, SHOAL_ERR_MEMORY, NULL);
}

static void end_waiting(struct shoal_network *network, struct waiting **link);
static void give_back_counters(struct shoal_network *network, struct shoal_network_channel *channel);

static void drop_waiting(struct shoal_network *network, uint64_t comm)
{
    struct waiting **link = &network->waiting;
    while (*link) {
        struct waiting *waiting = *link;
        struct shoal_network_head head;
        memcpy(&head, waiting->data + sizeof(struct shoal_seal), sizeof head);
        if (head.comm == comm)
            end_waiting(network, link);
        else
            link = &waiting->next;
    }
}

void shoal_network_want_turns(struct shoal_network *network, struct shoal_network_channel *channel, bool wants)
{
    if (channel->wants_turns == wants)
        return;
    SHOAL_ASSERT(wants || network->turns_wanted > 0);
    channel->wants_turns = wants;
    network->turns_wanted += wants ? 1 : -1u;
}

static void take_turns(struct shoal_network *network)
{
    for (struct shoal_network_channel *channel = network->channels; channel; channel = channel->next) {
        if (channel->wants_turns)
            channel->turn(channel->arg);
    }
}

void shoal_network_channel_close(struct shoal_network *network, struct shoal_network_channel *channel)
{
    shoal_network_want_turns(network, channel, false);
    struct shoal_network_channel **link = &network->channels;
    while (*link && *link != channel)
        link = &(*link)->next;
    if (*link)
        *link = channel->next;
    give_back_counters(network, channel);
    network->closed[network->closed_next++ % CLOSED_MAX] = channel->comm;
    drop_waiting(network, channel->comm);
}

/* ---- Counters that writes increment -------------------------------------------------------------------------------------- */

/* Names are drawn at random, so that a stranger can only guess them: one of 65,535 indexes, and the age of the first owner.
 * Each later owner of the same counters has the next age. */
static uint32_t network_draw(struct shoal_network *network, uint32_t limit)
{
    const uint64_t number = network->draws++;
    return (uint32_t)(shoal_siphash(&network->random, &number, sizeof number) % limit);
}

static bool make_counters(struct shoal_network *network)
{
    if (network->counters)
        return true;
    network->counters = calloc(COUNTERS_MAX, sizeof *network->counters);
    network->free_counters = malloc((COUNTERS_MAX - 1) * sizeof *network->free_counters);
    if (!network->counters || !network->free_counters) {
        free(network->counters);
        free(network->free_counters);
        network->counters = NULL;
        network->free_counters = NULL;
        return false;
    }
    for (uint32_t index = 1; index < COUNTERS_MAX; index++)
        network->free_counters[network->free_count++] = (uint16_t)index;
    return true;
}

/* Removes one of the free counters, each with equal probability; the last one fills its place. Returns 0 if none is free. */
static uint32_t take_free_counters(struct shoal_network *network)
{
    if (!make_counters(network) || !network->free_count)
        return 0;
    uint16_t *taken = &network->free_counters[network_draw(network, network->free_count)];
    const uint32_t index = *taken;
    *taken = network->free_counters[--network->free_count];
    return index;
}

static uint32_t give_name(struct shoal_network *network, struct shoal_network_channel *channel, int source, bool is_probe)
{
    const uint32_t index = take_free_counters(network);
    if (!index)
        return 0;
    struct counters *counters = &network->counters[index];
    SHOAL_ASSERT(!counters->channel && source >= 0 && source <= UINT16_MAX);
    const uint32_t age = counters->was_given ? counters->age + 1u : network_draw(network, AGES);
    *counters = (struct counters){channel, (uint16_t)source, channel->counters, (uint16_t)(age % AGES), 0, true, is_probe};
    channel->counters = (uint16_t)index;
    return (index << SHOAL_NETWORK_AGE_BITS | counters->age) << (SHOAL_NETWORK_SLOT_BITS + SHOAL_NETWORK_INCREMENT_BITS);
}

uint32_t shoal_network_give_counters(struct shoal_network *network, struct shoal_network_channel *channel, int source)
{
    return give_name(network, channel, source, false);
}

static void give_back_counters(struct shoal_network *network, struct shoal_network_channel *channel)
{
    for (uint16_t index = channel->counters; index; index = network->counters[index].next) {
        SHOAL_ASSERT(network->counters[index].channel == channel);
        SHOAL_ASSERT(network->free_count < COUNTERS_MAX - 1);
        network->counters[index].channel = NULL;
        network->free_counters[network->free_count++] = index;
    }
    channel->counters = 0;
}

_Static_assert(SHOAL_LANES_MAX <= 16, "each lane has a bit");

/* Call with the lanes that one peer has used. The first use of a lane shows that it has a connection, which is not sealed. */
static void note_lane(struct shoal_network *network, uint16_t *lanes)
{
    network->is_unsealed |= (network->lanes.passing & ~*lanes) != 0;
    *lanes |= network->lanes.passing;
}

/* Late writes for a closed communicator are not an error. */
static void on_written(void *arg, uint32_t immediate)
{
    struct counters none = {.channel = NULL};
    struct shoal_network *network = arg;
    const unsigned increment = immediate % (1u << SHOAL_NETWORK_INCREMENT_BITS);
    const unsigned slot = (immediate >> SHOAL_NETWORK_INCREMENT_BITS) % (1u << SHOAL_NETWORK_SLOT_BITS);
    const uint32_t name = immediate >> (SHOAL_NETWORK_INCREMENT_BITS + SHOAL_NETWORK_SLOT_BITS);
    struct counters *counters = network->counters ? &network->counters[name >> SHOAL_NETWORK_AGE_BITS] : &none;
    note_lane(network, &counters->lanes);
    if (counters->is_probe && counters->age == name % AGES && slot == 0) {
        if (counters->channel)
            counters->channel->reached(counters->channel->arg, counters->source, increment);
        return;
    }
    if (!counters->was_given || counters->is_probe || counters->age != name % AGES ||
        (counters->channel && !counters->channel->written(counters->channel->arg, counters->source, slot, increment)))
        reject(network, SHOAL_REJECTED_IMMEDIATE, NULL);
}

/* ---- Receiving ----------------------------------------------------------------------------------------------------------- */

static bool network_was_closed(const struct shoal_network *network, uint64_t comm)
{
    for (unsigned i = 0; i < CLOSED_MAX; i++) {
        if (network->closed[i] == comm)
            return true;
    }
    return false;
}

/* The communicator fails when it is made, because the message is not sent again. */
static void lose_unexpected(struct shoal_network *network, struct shoal_network_unexpected *kept, enum shoal_status status)
{
    if (!kept)
        network->has_lost_unexpected = true;
    else if (kept->status == SHOAL_OK)
        kept->status = status;
    if (status == SHOAL_ERR_MEMORY)
        shoal_log_line(network->log, SHOAL_LOG_WARN, "fabric", "no memory for an unexpected message");
}

static struct shoal_network_unexpected *open_unexpected(struct shoal_network_peer *from, uint64_t comm)
{
    struct shoal_network_unexpected **link = find_unexpected(from, comm);
    if (!*link && (*link = calloc(1, sizeof **link))) {
        (*link)->comm = comm;
        (*link)->end = &(*link)->first;
    }
    return *link;
}

/* The total is not limited: processes of this job send no more than they may, and an all-to-all-v of 1,024 ranks that this rank
 * enters last is 16 MiB. */
static void network_keep_unexpected(struct shoal_network *network, struct shoal_network_peer *from, uint64_t comm,
                                    const void *data, size_t bytes)
{
    struct shoal_network_unexpected *kept = open_unexpected(from, comm);
    if (kept && kept->bytes + bytes > SHOAL_NETWORK_UNEXPECTED_MAX) {
        lose_unexpected(network, kept, SHOAL_ERR_INTERNAL);
        reject(network, SHOAL_REJECTED_UNEXPECTED, from);
        return;
    }
    struct unexpected *unexpected = kept ? malloc(sizeof *unexpected + bytes) : NULL;
    if (!unexpected) {
        lose_unexpected(network, kept, SHOAL_ERR_MEMORY);
        return;
    }
    SHOAL_ASSERT(!*kept->end);
    unexpected->next = NULL;
    unexpected->bytes = bytes;
    memcpy(unexpected->data, data, bytes);
    *kept->end = unexpected;
    kept->end = &unexpected->next;
    kept->bytes += bytes;
}

/* Returns the sender of a message, or NULL if the message does not prove it; such messages are counted. No other part of the
 * message is read before. */
static struct shoal_network_peer *authenticate(struct shoal_network *network, const void *data, size_t bytes)
{
    struct shoal_seal seal;
    if (bytes < sizeof seal + sizeof(struct shoal_network_head)) {
        reject(network, SHOAL_REJECTED_SHORT, NULL);
        return NULL;
    }
    memcpy(&seal, data, sizeof seal);
    struct shoal_network_peer *peer = network_find_peer(network, seal.session);
    if (SHOAL_UNLIKELY(!peer) && has_parted(network, seal.session)) /* the sender may not know yet that this rank has left */
        return NULL;
    const enum shoal_session_verdict verdict = peer ? shoal_session_check(&peer->session, data, bytes) : SHOAL_SESSION_FORGED;
    if (SHOAL_LIKELY(verdict == SHOAL_SESSION_GOOD))
        return peer;
    reject(network,
           !peer                             ? SHOAL_REJECTED_UNKNOWN
           : verdict == SHOAL_SESSION_FORGED ? SHOAL_REJECTED_FORGED
                                             : SHOAL_REJECTED_REPLAYED,
           peer);
    return NULL;
}

static void on_message(void *arg, const void *data, size_t bytes)
{
    struct shoal_network *network = arg;
    struct shoal_network_peer *from = authenticate(network, data, bytes);
    uint64_t comm;
    if (!from)
        return;
    data = (const char *)data + sizeof(struct shoal_seal);
    bytes -= sizeof(struct shoal_seal);
    memcpy(&comm, data, sizeof comm);
    struct shoal_network_channel *channel = find_channel(network, comm);
    if (channel)
        hand_over(network, channel, from, data, bytes);
    else if (!network_was_closed(network, comm))
        network_keep_unexpected(network, from, comm, data, bytes);
}

static void count_locally_complete(struct shoal_network_load *load)
{
    SHOAL_ASSERT(*load->count > load->failed && *load->total > load->failed);
    SHOAL_ASSERT(!load->is_messages || load->peer->sending > 0);
    --*load->count;
    --*load->total;
    load->peer->sending -= load->is_messages;
}

/* Returns true if a rank is lost or said goodbye: its communicators fail by themselves, or have ended. */
static bool has_ended(const struct shoal_network_peer *peer)
{
    if (peer->is_parted)
        return true;
    return peer->membership && shoal_membership_has_ended(peer->membership, peer->world_rank);
}

static void count_failed(struct shoal_network *network, struct shoal_network_load *load)
{
    SHOAL_ASSERT(load->failed < *load->count);
    SHOAL_ASSERT(!load->is_messages || load->peer->sending > 0);
    if (load->failed++ == 0) {
        load->next_failed = network->failed;
        network->failed = load;
    }
    load->peer->sending -= load->is_messages;
}

/* Stops counting failed messages and writes to peers that have ended. The provider often detects the end before the control
 * tree does. */
static void forgive_ended(struct shoal_network *network)
{
    struct shoal_network_load **link = &network->failed;
    while (*link) {
        struct shoal_network_load *load = *link;
        if (!has_ended(load->peer)) {
            link = &load->next_failed;
            continue;
        }
        SHOAL_ASSERT(load->failed > 0 && *load->count >= load->failed && *load->total >= load->failed);
        *load->count -= load->failed;
        *load->total -= load->failed;
        load->failed = 0;
        *link = load->next_failed;
    }
}

/* Only what the endpoint has sent shows that the peer's endpoint is reachable: a lane has other ports, and a write that it has
 * dropped was never sent. */
static void on_locally_complete(void *arg, void *owner)
{
    struct shoal_network *network = arg;
    struct shoal_network_load *load = owner;
    count_locally_complete(load);
    note_lane(network, &load->lanes);
    if (SHOAL_LIKELY(load->peer->reachability.state == SHOAL_REACHABILITY_SETTLED) || network->lanes.passing)
        return;
    shoal_reachability_settle(&network->checks, &load->peer->reachability);
    network->is_unsealed |= !network->checks.open; /* seals once, when all connections under way are made */
}

static void break_peer(struct shoal_network *network, struct shoal_network_peer *peer, const char *text)
{
    if (!peer->broken_ns)
        peer->broken_ns = shoal_clock_ns();
    snprintf(peer->broken, sizeof peer->broken, "%s", text);
    shoal_log_line(network->log, SHOAL_LOG_INFO, "fabric", "process %d on %s: %s", peer->name.pid, peer->name.host, text);
}

/* The check's text is more exact than the provider's. */
static void on_unreachable(void *arg, struct shoal_reachability *check, const char *text)
{
    break_peer(arg, (void *)((char *)check - offsetof(struct shoal_network_peer, reachability)), text);
}

static void on_failed(void *arg, void *owner, const char *text)
{
    struct shoal_network *network = arg;
    struct shoal_network_load *load = owner;
    char how[256];
    if (!load) {
        const uint64_t count = ++network->rejections.counts[SHOAL_REJECTED_BROKEN];
        if (is_worth_a_line(count))
            shoal_log_line(network->log, SHOAL_LOG_WARN, "fabric",
                           "%s, %llu so far: %s; the message was too long to be from this job, or its sender ended",
                           shoal_rejection_text(SHOAL_REJECTED_BROKEN), (unsigned long long)count, text);
        return;
    }
    count_failed(network, load);
    if (load->peer->broken_ns)
        return;
    const char *adapter = shoal_lane_set_passing_adapter(&network->lanes);
    snprintf(how, sizeof how,
             "%s%.40s%s%.120s; perhaps a firewall closes ports (SHOAL_PORTS), or the interface is the wrong one (SHOAL_NIC)",
             adapter ? "through adapter " : "", adapter ? adapter : "", adapter ? ": " : "", text);
    break_peer(network, load->peer, how);
    shoal_reachability_hurry(&network->checks, &load->peer->reachability);
}

/* ---- Sending ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status queue(struct shoal_network *network, struct shoal_network_load *load, const void *data, size_t bytes)
{
    struct waiting *waiting = malloc(sizeof *waiting + bytes);
    if (!waiting)
        return shoal_log_fail(network->log, SHOAL_ERR_MEMORY, "fabric", "no memory for a message of %zu bytes", bytes);
    SHOAL_ASSERT(!*network->waiting_end);
    waiting->next = NULL;
    waiting->load = load;
    waiting->bytes = bytes;
    memcpy(waiting->data, data, bytes);
    *network->waiting_end = waiting;
    network->waiting_end = &waiting->next;
    load->peer->waiting++;
    ++*load->count;
    ++*load->total;
    return SHOAL_OK;
}

/* Ends a waiting message, whether it was sent or not. */
static void end_waiting(struct shoal_network *network, struct waiting **link)
{
    struct waiting *waiting = *link;
    SHOAL_ASSERT(waiting->load->peer->waiting > 0 && *waiting->load->count > 0 && *waiting->load->total > 0);
    *link = waiting->next;
    if (network->waiting_end == &waiting->next)
        network->waiting_end = link;
    waiting->load->peer->waiting--;
    --*waiting->load->count;
    --*waiting->load->total;
    free(waiting);
}

static bool is_refused(struct shoal_network *network)
{
    return network->interposer && network->interposer->refuses(network->between);
}

/* The first message to a peer starts the check of its link. */
static void try_link(struct shoal_network *network, struct shoal_network_peer *peer)
{
    if (SHOAL_UNLIKELY(peer->reachability.state == SHOAL_REACHABILITY_NEW))
        shoal_reachability_try(&network->checks, &peer->reachability, &peer->address, shoal_clock_ns());
}

static enum shoal_status try_send(struct shoal_network *network, struct shoal_network_load *load, const void *data,
                                  size_t bytes)
{
    struct shoal_network_peer *peer = load->peer;
    if (SHOAL_UNLIKELY(has_ended(peer)))
        return SHOAL_OK;
    if (SHOAL_UNLIKELY(peer->broken_ns)) /* stays forever: operations that need it fail, see is_gone in hosts.c */
        return SHOAL_PENDING;
    try_link(network, peer);
    if (peer->sending >= SENDING_MAX || is_refused(network))
        return SHOAL_PENDING;
    const enum shoal_status status = shoal_fabric_endpoint_send(network->endpoint, peer->at, data, bytes, load);
    if (status == SHOAL_PENDING)
        return SHOAL_PENDING;
    peer->sending++;
    ++*load->count;
    ++*load->total;
    if (status != SHOAL_OK)
        on_failed(network, load, "cannot send (see above)");
    return SHOAL_OK;
}

enum shoal_status shoal_network_send(struct shoal_network *network, struct shoal_network_load *load,
                                     const struct shoal_network_head *head, const struct iovec *body, size_t body_count)
{
    size_t bytes = sizeof(struct shoal_seal) + sizeof *head;
    memcpy(network->message + sizeof(struct shoal_seal), head, sizeof *head);
    for (size_t i = 0; i < body_count; i++) {
        if (body[i].iov_len)
            memcpy(network->message + bytes, body[i].iov_base, body[i].iov_len);
        bytes += body[i].iov_len;
        SHOAL_ASSERT(bytes <= SHOAL_FABRIC_MESSAGE_MAX);
    }
    SHOAL_ASSERT(!load->peer->is_parted && load->is_messages);
    shoal_session_seal(&load->peer->session, network->message, bytes);
    if (!load->peer->waiting && try_send(network, load, network->message, bytes) == SHOAL_OK)
        return SHOAL_OK;
    return queue(network, load, network->message, bytes);
}

/* Sends in order for each peer; a busy peer does not delay the others. */
static bool send_waiting(struct shoal_network *network)
{
    bool did = false;
    struct waiting **link = &network->waiting;
    network->rounds++;
    while (*link) {
        struct waiting *waiting = *link;
        struct shoal_network_peer *peer = waiting->load->peer;
        if (peer->refused == network->rounds ||
            try_send(network, waiting->load, waiting->data, waiting->bytes) == SHOAL_PENDING) {
            peer->refused = network->rounds;
            link = &waiting->next;
            continue;
        }
        end_waiting(network, link);
        did = true;
    }
    return did;
}

bool shoal_network_is_full(const struct shoal_network_peer *peer)
{
    return peer->waiting >= FULL_MESSAGES;
}

bool shoal_network_writes(const struct shoal_network *network, const struct shoal_fabric_memory *source_memory, size_t bytes)
{
    return network->writes && bytes <= shoal_fabric_endpoint_write_max(network->endpoint, source_memory);
}

bool shoal_network_sends_cheaply(const struct shoal_network *network)
{
    return shoal_fabric_endpoint_registers_sources(network->endpoint);
}

enum shoal_status shoal_network_register(struct shoal_network *network, void *memory, size_t bytes,
                                         struct shoal_fabric_memory *memory_out)
{
    return shoal_fabric_endpoint_register(network->endpoint, memory, bytes, memory_out);
}

void shoal_network_unregister(struct shoal_network *network, struct shoal_fabric_memory *memory)
{
    shoal_fabric_endpoint_unregister(network->endpoint, memory);
}

struct shoal_fabric_source *shoal_network_find_source(struct shoal_network *network, const void *at, size_t bytes)
{
    if (!network->memory || !shoal_fabric_endpoint_registers_sources(network->endpoint))
        return NULL;
    struct shoal_region *region = shoal_memory_find(network->memory, at, bytes);
    const bool may_register =
        region && !region->is_of_device && (region->kind == SHOAL_REGION_SHARED || network->copies_locked_pages);
    return may_register ? shoal_fabric_sources_of(&network->sources, region) : NULL;
}

struct shoal_fabric_exports *shoal_network_exports(struct shoal_network *network)
{
    return network->writes && shoal_fabric_endpoint_reads_devices(network->endpoint) ? &network->exports : NULL;
}

struct shoal_fabric_exported *shoal_network_find_export(const struct shoal_network *network, const void *at, size_t bytes)
{
    return shoal_fabric_exports_find(&network->exports, at, bytes);
}

uint64_t shoal_network_copies(const struct shoal_network *network)
{
    return shoal_fabric_endpoint_copies(network->endpoint);
}

/* ---- Lanes --------------------------------------------------------------------------------------------------------------- */

int shoal_network_lane_count(const struct shoal_network *network)
{
    return network->lanes.count;
}

bool shoal_network_tries_lanes(const struct shoal_network *network)
{
    return network->tries_lanes && (network->lanes.count || network->provider->has_more_on_host);
}

enum shoal_status shoal_network_register_lanes(struct shoal_network *network, void *memory, size_t bytes,
                                               struct shoal_network_lane_memory *memory_out)
{
    return shoal_lane_set_register(&network->lanes, memory, bytes, memory_out);
}

void shoal_network_unregister_lanes(struct shoal_network *network, struct shoal_network_lane_memory *memory)
{
    shoal_lane_set_unregister(&network->lanes, memory);
}

int shoal_network_offer_lanes(struct shoal_network *network, struct shoal_network_channel *channel, int to,
                              const struct shoal_network_lane_memory *memory,
                              struct shoal_network_lane_offer offers_out[SHOAL_LANES_MAX])
{
    const uint32_t probe = network->lanes.count ? give_name(network, channel, to, true) : 0;
    return shoal_lane_set_offer(&network->lanes, memory, probe, offers_out);
}

static void note_address(void *network, const struct shoal_fabric_address *address)
{
    shoal_fabric_fork_note(network, address);
}

enum shoal_status shoal_network_meet_lanes(struct shoal_network *network, const struct shoal_network_lane_offer *offers,
                                           int count, struct shoal_network_lanes *lanes_out)
{
    return shoal_lane_set_meet(&network->lanes, offers, count, lanes_out, note_address, network);
}

void shoal_network_part_lanes(struct shoal_network *network, struct shoal_network_lanes *lanes)
{
    shoal_lane_set_part(&network->lanes, lanes);
}

void shoal_network_lane_reached(struct shoal_network *network, struct shoal_network_lanes *lanes, uint64_t number)
{
    shoal_lane_set_reached(&network->lanes, lanes, number);
    network->is_unsealed = true; /* the probe's connection */
}

void shoal_network_expect_lanes(struct shoal_network *network)
{
    shoal_lane_set_expect(&network->lanes);
}

void shoal_network_drop_lanes(struct shoal_network *network, const void *begin, const void *end)
{
    shoal_lane_set_drop(&network->lanes, begin, end);
}

/* Returns true if there were events. */
static bool poll_lanes(struct shoal_network *network)
{
    const struct shoal_fabric_handler handler = handler_of(network);
    return shoal_lane_set_poll(&network->lanes, &handler);
}

/* ---- Putting ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_network_put(struct shoal_network *network, const struct shoal_network_write *write)
{
    struct shoal_network_load *load = write->load;
    SHOAL_ASSERT(!load->is_messages);
    if (SHOAL_UNLIKELY(has_ended(load->peer)))
        return SHOAL_OK;
    try_link(network, load->peer);
    if (load->peer->broken_ns || is_refused(network))
        return SHOAL_PENDING;
    const struct shoal_fabric_write there = {.peer = load->peer->at,
                                             .to = write->to,
                                             .offset = write->offset,
                                             .source = write->source,
                                             .source_memory = write->source_memory,
                                             .under_way = write->under_way,
                                             .bytes = write->bytes,
                                             .immediate = write->immediate,
                                             .owner = load};
    enum shoal_status status = SHOAL_PENDING;
    if (write->lanes)
        status = shoal_lane_set_put(&network->lanes, write->lanes, &there, write->lane_memory,
                                    shoal_fabric_endpoint_bytes(network->endpoint));
    if (status == SHOAL_PENDING)
        status = shoal_fabric_endpoint_write(network->endpoint, &there);
    if (status == SHOAL_OK) {
        ++*load->count;
        ++*load->total;
    }
    return status;
}

void shoal_network_leave(struct shoal_network *network, const struct shoal_network_leftover *leftover)
{
    SHOAL_ASSERT(leftover->loads || leftover->under_way_count == 0);
    struct orphan *orphan = malloc(sizeof *orphan);
    if (!orphan) /* its loads stay forever, and so do the peers that they name */
        network->orphan_loads += leftover->loads != NULL;
    if (!orphan)
        return; /* leaked rather than freed too early */
    *orphan = (struct orphan){network->orphans, *leftover};
    network->orphans = orphan;
    network->orphan_loads += leftover->loads != NULL;
}

static bool is_under_way(const struct shoal_network_leftover *leftover)
{
    for (unsigned i = 0; i < leftover->under_way_count; i++) {
        if (leftover->under_way[i])
            return true;
    }
    return false;
}

/* Frees loads of ended communicators when everything that they count has completed and, with the last ones, the peers that they
 * were for. */
static void tidy_orphans(struct shoal_network *network)
{
    struct orphan **link = &network->orphans;
    while (*link) {
        struct orphan *orphan = *link;
        if (orphan->leftover.loads && !is_under_way(&orphan->leftover)) {
            SHOAL_ASSERT(network->orphan_loads > 0);
            free(orphan->leftover.loads);
            orphan->leftover.loads = NULL;
            orphan->leftover.under_way_count = 0;
            network->orphan_loads--;
        }
        if (orphan->leftover.loads || orphan->leftover.memory.region || orphan->leftover.release) {
            link = &orphan->next;
            continue;
        }
        *link = orphan->next;
        free(orphan);
    }
    if (!network->orphan_loads)
        free_parted(network);
}

/* ---- Polling ------------------------------------------------------------------------------------------------------------- */

static void judge_wake(struct shoal_network *network, bool was_true)
{
    if (!atomic_exchange_explicit(&network->was_woken, false, memory_order_relaxed))
        return;
    network->false_wakes = was_true ? 0 : network->false_wakes + 1;
    if (network->false_wakes < FALSE_WAKES_MAX)
        return;
    network->false_wakes = 0;
    if (!atomic_load_explicit(&network->distrusted_until_ns, memory_order_relaxed)) /* the first time */
        shoal_log_line(network->log, SHOAL_LOG_DEBUG, "fabric",
                       "provider %s: its descriptor wakes for no reason, so waits poll with backoff for a while",
                       network->provider->name);
    atomic_store_explicit(&network->distrusted_until_ns, shoal_clock_ns() + SHOAL_FABRIC_DISTRUST_NS, memory_order_relaxed);
}

static bool poll_once(struct shoal_network *network)
{
    const struct shoal_fabric_handler handler = handler_of(network);
    return network->interposer ? network->interposer->poll(network->between, network->endpoint)
                               : shoal_fabric_endpoint_poll(network->endpoint, &handler);
}

static void seal_when_due(struct shoal_network *network)
{
    const uint64_t now_ns = shoal_clock_ns();
    if (now_ns < network->next_seal_ns)
        return;
    network->is_unsealed = false;
    network->next_seal_ns = now_ns + SEAL_EVERY_NS;
    shoal_fabric_fork_seal();
}

bool shoal_network_poll(struct shoal_network *network)
{
    bool did = false;
    for (int i = 0; i < POLLS_AT_ONCE && poll_once(network); i++)
        did = true;
    if (SHOAL_UNLIKELY(network->lanes.count))
        did |= poll_lanes(network);
    judge_wake(network, did);
    if (SHOAL_UNLIKELY(network->checks.open))
        shoal_reachability_look_all(&network->checks, shoal_clock_ns());
    if (SHOAL_UNLIKELY(network->is_unsealed))
        seal_when_due(network);
    if (SHOAL_UNLIKELY(network->sources.forgotten != NULL))
        shoal_fabric_sources_tidy(&network->sources);
    if (SHOAL_UNLIKELY(network->failed != NULL))
        forgive_ended(network);
    if (SHOAL_UNLIKELY(network->orphan_loads))
        tidy_orphans(network);
    if (SHOAL_UNLIKELY(network->turns_wanted))
        take_turns(network);
    return send_waiting(network) || did;
}

bool shoal_network_has_descriptor(const struct shoal_network *network)
{
    return shoal_fabric_endpoint_wait_fd(network->endpoint) >= 0 &&
           shoal_clock_ns() >= atomic_load_explicit(&network->distrusted_until_ns, memory_order_relaxed);
}

bool shoal_network_may_wait(struct shoal_network *network)
{
    return (!network->interposer || network->interposer->is_idle(network->between)) &&
           shoal_fabric_endpoint_may_wait(network->endpoint);
}

bool shoal_network_wait(struct shoal_network *network, int wake, uint64_t timeout_ns)
{
    struct pollfd entries[] = {{shoal_fabric_endpoint_wait_fd(network->endpoint), POLLIN, 0}, {wake, POLLIN, 0}};
    const struct timespec timeout = {(time_t)(timeout_ns / SHOAL_NS_PER_S), (long)(timeout_ns % SHOAL_NS_PER_S)};
    if (ppoll(entries, SHOAL_COUNT_OF(entries), &timeout, NULL) <= 0)
        return false;
    if (entries[0].revents)
        atomic_store_explicit(&network->was_woken, true, memory_order_relaxed);
    return entries[1].revents & POLLIN;
}

static bool source_poll(void *network)
{
    return shoal_network_poll(network);
}

static bool source_has_descriptor(void *network)
{
    return shoal_network_has_descriptor(network);
}

static bool source_may_wait(void *network)
{
    return shoal_network_may_wait(network);
}

static bool source_wait(void *network, int wake, uint64_t timeout_ns)
{
    return shoal_network_wait(network, wake, timeout_ns);
}

struct shoal_wait_source shoal_network_wait_source(struct shoal_network *network)
{
    static const struct shoal_wait_source_ops ops = {source_poll, source_has_descriptor, source_may_wait, source_wait};
    return (struct shoal_wait_source){&ops, network};
}
