#include "comm/comm_world.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "helpers/helper_cores.h"
#include "link/auth.h"
#include "topology/limits.h"
#include "topology/nic.h"

/* The addresses of a rank's interfaces, best first, which every rank receives. */
#define REACH_MAX 8
struct reach {
    uint16_t count;
    uint16_t families[REACH_MAX];
    unsigned char addresses[REACH_MAX][16];
};

/* The rank's endpoint, with these addresses. */
struct endpoint_address {
    struct shoal_fabric_address address;
    char provider[32];
    unsigned char nonce[SHOAL_SESSION_NONCE_BYTES];
    unsigned char key[SHOAL_SESSION_KEY_BYTES]; /* rank 0's is the job's key if no secret is set */
};

static void members_free_bytes(void *bytes)
{
    free(*(void **)bytes);
}

int shoal_members_count_local(const struct shoal_member *members, int size, int rank)
{
    int count = 0;
    for (int r = 0; r < size; r++)
        count += members[r].host == members[rank].host;
    return count;
}

int shoal_members_count_hosts(const struct shoal_member *members, int size)
{
    int count = 0;
    for (int r = 0; r < size; r++) {
        int first = 0;
        while (members[first].host != members[r].host)
            first++;
        count += first == r;
    }
    return count;
}

/* ---- The interface that leads to the others ------------------------------------------------------------------------------ */

static bool members_is_link_local(const struct shoal_nic *nic)
{
    return nic->address.ss_family == AF_INET6 &&
           IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)&nic->address)->sin6_addr);
}

/* Loopback comes last: other machines cannot reach it, but tests that treat one machine as several hosts can. */
static void fill_reach(const struct shoal_nics *nics, struct reach *reach)
{
    memset(reach, 0, sizeof *reach);
    for (int loopback = 0; loopback < 2; loopback++) {
        for (int i = 0; i < nics->count && reach->count < REACH_MAX; i++) {
            const struct shoal_nic *nic = &nics->at[i];
            if (!nic->is_up || nic->is_loopback != loopback || members_is_link_local(nic))
                continue;
            const bool is_v4 = nic->address.ss_family == AF_INET;
            SHOAL_ASSERT(is_v4 || nic->address.ss_family == AF_INET6);
            reach->families[reach->count] = (uint16_t)nic->address.ss_family;
            memcpy(reach->addresses[reach->count++],
                   is_v4 ? (const void *)&((const struct sockaddr_in *)(const void *)&nic->address)->sin_addr
                         : (const void *)&((const struct sockaddr_in6 *)(const void *)&nic->address)->sin6_addr,
                   is_v4 ? 4 : 16);
        }
    }
}

static socklen_t read_reach(const struct reach *reach, int i, struct sockaddr_storage *address_out)
{
    memset(address_out, 0, sizeof *address_out);
    address_out->ss_family = reach->families[i];
    if (reach->families[i] == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)address_out;
        memcpy(&v4->sin_addr, reach->addresses[i], 4);
        v4->sin_port = htons(9); /* any port: this only asks the kernel for a route and sends nothing */
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)address_out;
    memcpy(&v6->sin6_addr, reach->addresses[i], 16);
    v6->sin6_port = htons(9);
    return sizeof *v6;
}

/* Finds this rank's address from which the kernel sends to a rank. */
static bool members_find_source(const struct reach *reach, struct sockaddr_storage *source_out)
{
    for (int i = 0; i < reach->count && i < REACH_MAX; i++) {
        struct sockaddr_storage there;
        const socklen_t bytes = read_reach(reach, i, &there);
        if (shoal_nic_route((const struct sockaddr *)&there, bytes, source_out))
            return true;
    }
    return false;
}

static int first_remote(const struct shoal_member *members, int own)
{
    int rank = 0;
    SHOAL_ASSERT(members[0].host == 0); /* hosts are numbered in the order of their lowest ranks */
    while (members[rank].host == members[own].host)
        rank++;
    return rank;
}

/* The interface that leads to the other hosts, and those that are equal to it. */
struct interfaces {
    struct shoal_nic nic;
    struct shoal_nics equal;
};

static void log_equal(struct shoal_context *context, const struct shoal_nics *equal)
{
    char names[SHOAL_NIC_TEXT_MAX * 8], one[SHOAL_NIC_TEXT_MAX];
    size_t used = 0;
    for (int i = 0; i < equal->count && used < sizeof names; i++) {
        shoal_nic_print(&equal->at[i], one);
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", one);
    }
    shoal_log_line(&context->log, SHOAL_LOG_INFO, "hosts", "%d equal interfaces, which the ranks of this host divide: %s",
                   equal->count, names);
}

static enum shoal_status choose_nic(struct shoal_context *context, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                    const struct shoal_member *members, struct interfaces *interfaces_out)
{
    struct shoal_nics nics;
    struct reach own;
    char reason[400], text[SHOAL_NIC_TEXT_MAX];
    if (!shoal_nics_find(&nics))
        return shoal_log_fail(&context->log, SHOAL_ERR_SYSTEM, "hosts", "cannot list the network interfaces: %s",
                              strerror(errno));
    SHOAL_SCOPED(members_free_bytes) struct reach *all = calloc((size_t)bootstrap->size, sizeof *all);
    if (!all)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "hosts", "no memory for %d ranks", bootstrap->size);
    fill_reach(&nics, &own);
    SHOAL_TRY(shoal_bootstrap_gather(bootstrap, &context->log, "reach", &own, all, sizeof own, timeout_ms));
    const int other = first_remote(members, bootstrap->rank);
    struct sockaddr_storage source;
    const bool has_route = members_find_source(&all[other], &source);
    const struct shoal_nic *nic = shoal_nic_choose(&nics, context->settings.nic.nic,
                                                   has_route ? (const struct sockaddr *)&source : NULL, reason, sizeof reason);
    if (!nic)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "hosts", "no interface leads to rank %d on another host: %s",
                              other, reason);
    shoal_nic_print(nic, text);
    shoal_log_line(&context->log, SHOAL_LOG_INFO, "hosts", "interface %s: %s (towards rank %d)", text, reason, other);
    interfaces_out->nic = *nic;
    if (shoal_nic_equals(&nics, nic, context->settings.nic.nic, &interfaces_out->equal) > 1)
        log_equal(context, &interfaces_out->equal);
    return SHOAL_OK;
}

/* ---- Meeting ------------------------------------------------------------------------------------------------------------- */

static struct shoal_fabric_share share_of(const struct shoal_context *context, const struct shoal_member *members, int size,
                                          int rank, const struct interfaces *interfaces)
{
    struct shoal_fabric_share share = {.ranks = shoal_members_count_local(members, size, rank),
                                       .nics = &interfaces->equal,
                                       .most = shoal_fabric_fixed_adapters(&context->settings.fabric)};
    for (int r = 0; r < rank; r++)
        share.rank += members[r].host == members[rank].host;
    SHOAL_ASSERT(share.rank < share.ranks);
    return share;
}

/* Helpers and threads at the network share the cores that the framework leaves: the one or the other wait. A range of ports may
 * be just large enough for one port of each rank, so only a number that is set adds ports there. */
static int count_network_threads(struct shoal_context *context, int local_ranks)
{
    const int fixed = shoal_fabric_fixed_threads(&context->settings.fabric), width = shoal_helpers_width(context->helpers);
    shoal_progress_lock(context->progress);
    const int together = shoal_shm_endpoint_cores(context->endpoint);
    shoal_progress_unlock(context->progress);
    const struct shoal_helper_share share = {
        shoal_helper_cores_count(shoal_topology_cores(), together, local_ranks),
        shoal_helper_cores_of_framework(shoal_setting_from_environment("OMP_NUM_THREADS"), SHOAL_HELPER_GPU_FILE)};
    const int left = context->settings.bootstrap.ports[0] ? 1 : shoal_helper_cores_width(share);
    return fixed ? fixed : shoal_fabric_auto_threads(width < left ? width : left, local_ranks);
}

static void wake_for_lanes(void *progress)
{
    shoal_progress_wake_outside(progress);
}

/* One endpoint serves all worlds of a context. */
static enum shoal_status open_network(struct shoal_context *context, const struct shoal_nic *nic,
                                      struct shoal_fabric_share share)
{
    const struct shoal_network_options options = {.log = &context->log,
                                                  .settings = &context->settings.fabric,
                                                  .ports = context->settings.bootstrap.ports,
                                                  .memory = context->memory,
                                                  .nic = nic,
                                                  .share = share,
                                                  .threads = count_network_threads(context, share.ranks),
                                                  .is_fixed = shoal_fabric_fixed_threads(&context->settings.fabric) != 0,
                                                  .wake = wake_for_lanes,
                                                  .wake_arg = context->progress};
    struct shoal_network *network;
    enum shoal_status status = SHOAL_OK;
    pthread_mutex_lock(&context->opening);
    if (!context->network && (status = shoal_network_open(&options, &network)) == SHOAL_OK) {
        shoal_progress_lock(context->progress);
        context->network = network;
        shoal_progress_add_source(context->progress, shoal_network_wait_source(network));
        shoal_progress_unlock(context->progress);
    }
    SHOAL_ASSERT(status != SHOAL_OK || context->network);
    pthread_mutex_unlock(&context->opening);
    return status;
}

static enum shoal_status gather_addresses(struct shoal_context *context, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                          struct endpoint_address *addresses)
{
    struct endpoint_address own = {.address = *shoal_network_address(context->network)};
    snprintf(own.provider, sizeof own.provider, "%s", shoal_network_provider(context->network));
    if (shoal_auth_random(own.nonce, sizeof own.nonce) != SHOAL_OK ||
        (!bootstrap->has_secret && bootstrap->rank == 0 && shoal_auth_random(own.key, sizeof own.key) != SHOAL_OK))
        return shoal_log_fail(&context->log, SHOAL_ERR_SYSTEM, "hosts", "no random bytes from the kernel (%m)");
    const enum shoal_status status =
        shoal_bootstrap_gather(bootstrap, &context->log, "endpoints", &own, addresses, sizeof own, timeout_ms);
    explicit_bzero(own.key, sizeof own.key);
    SHOAL_TRY(status);
    for (int r = 0; r < bootstrap->size; r++) {
        addresses[r].provider[sizeof addresses[r].provider - 1] = 0;
        if (strcmp(addresses[r].provider, own.provider) != 0)
            return shoal_log_fail(&context->log, SHOAL_ERR_UNSUPPORTED, "hosts",
                                  "rank %d uses libfabric's provider %s, this rank %s: set SHOAL_PROVIDER alike on all hosts "
                                  "(`shoal info --providers` shows why each is chosen or not)",
                                  r, addresses[r].provider, own.provider);
    }
    return SHOAL_OK;
}

/* Finds the key from which the sessions of a world derive their keys. It comes from the secret. Without a secret it comes from
 * rank 0 through the store, so anyone who can read the store knows it. */
static enum shoal_status find_job_key(struct shoal_context *context, const struct shoal_bootstrap *bootstrap,
                                      const struct endpoint_address *addresses, struct shoal_siphash_key *key_out)
{
    static const char label[] = "shoal data plane, version 1";
    const struct shoal_auth_span span = {label, sizeof label};
    unsigned char mac[SHOAL_AUTH_MAC_BYTES];
    if (bootstrap->has_secret && !shoal_auth_mac(bootstrap->secret, &span, 1, mac))
        return shoal_log_fail(&context->log, SHOAL_ERR_AUTH, "hosts", "libsodium, which the secret needs, is gone");
    *key_out = shoal_siphash_key_read(bootstrap->has_secret ? mac : addresses[0].key);
    return SHOAL_OK;
}

static struct shoal_session_side side_of(const struct endpoint_address *addresses, int rank)
{
    struct shoal_session_side side = {.rank = (uint32_t)rank};
    memcpy(side.nonce, addresses[rank].nonce, sizeof side.nonce);
    return side;
}

/* Must finish before any peer may send. It does, because no rank leaves the next gather, the control tree's, before all ranks
 * have reached it. */
static enum shoal_status meet_remote(struct shoal_world *world, const struct shoal_bootstrap *bootstrap,
                                     const struct shoal_shm_place *places, const struct endpoint_address *addresses)
{
    struct shoal_context *context = world->context;
    struct shoal_member *members = world->members;
    const struct shoal_session_side own = side_of(addresses, bootstrap->rank);
    struct shoal_siphash_key job;
    SHOAL_TRY(find_job_key(context, bootstrap, addresses, &job));
    enum shoal_status status = SHOAL_OK;
    shoal_progress_lock(context->progress);
    for (int r = 0; r < world->size && status == SHOAL_OK; r++) {
        if (members[r].host == members[world->rank].host)
            continue;
        SHOAL_ASSERT(!members[r].remote && !members[r].local);
        const struct shoal_session_side side = side_of(addresses, r);
        struct shoal_network_peer known = {.name = places[r].name, .address = addresses[r].address, .world_rank = r};
        shoal_session_open(&known.session, &job, &own, &side);
        status = shoal_network_meet(context->network, &known, &members[r].remote);
    }
    shoal_progress_unlock(context->progress);
    explicit_bzero(&job, sizeof job);
    return status;
}

/* Rank 0's endpoint address may hold the job's key, so all copies of it in memory are erased. */
static enum shoal_status meet_at_addresses(struct shoal_world *world, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                           const struct shoal_shm_place *places)
{
    struct endpoint_address *addresses = calloc((size_t)world->size, sizeof *addresses);
    if (!addresses)
        return shoal_log_fail(&world->context->log, SHOAL_ERR_MEMORY, "hosts", "no memory for %d ranks", world->size);
    enum shoal_status status = gather_addresses(world->context, bootstrap, timeout_ms, addresses);
    if (status == SHOAL_OK)
        status = meet_remote(world, bootstrap, places, addresses);
    explicit_bzero(addresses, (size_t)world->size * sizeof *addresses);
    free(addresses);
    return status;
}

/* From now on the network asks the membership which processes have ended, and the membership watches the processes of this
 * host. */
static void introduce_membership(struct shoal_world *world)
{
    shoal_progress_lock(world->context->progress);
    for (int r = 0; r < world->size; r++) {
        const struct shoal_member *member = &world->members[r];
        SHOAL_ASSERT((member->remote || member->local) == (r != world->rank) && (!member->remote || !member->local));
        if (member->remote)
            member->remote->membership = world->membership;
        if (member->local && member->local->process.pidfd >= 0 && !member->local->process.is_own)
            shoal_membership_watch(world->membership, r, member->local->process.pidfd);
    }
    shoal_progress_unlock(world->context->progress);
}

static enum shoal_status join_hosts(struct shoal_world *world, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                    const struct shoal_shm_place *places)
{
    struct shoal_context *context = world->context;
    struct interfaces interfaces;
    SHOAL_TRY(choose_nic(context, bootstrap, timeout_ms, world->members, &interfaces));
    const struct shoal_nic *const nic = &interfaces.nic;
    SHOAL_TRY(open_network(context, nic, share_of(context, world->members, world->size, world->rank, &interfaces)));
    shoal_bootstrap_end_phase(bootstrap, "network");
    SHOAL_TRY(meet_at_addresses(world, bootstrap, timeout_ms, places));
    const struct shoal_membership_options options = {
        .log = &context->log,
        .ports = context->settings.bootstrap.ports,
        .address = (const struct sockaddr *)&nic->address,
        .address_bytes = nic->address.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6),
        .timeout_ms = timeout_ms};
    SHOAL_TRY(shoal_membership_open(bootstrap, &options, &world->membership));
    shoal_bootstrap_end_phase(bootstrap, "control tree");
    introduce_membership(world);
    return SHOAL_OK;
}

static enum shoal_status meet(struct shoal_world *world, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms)
{
    SHOAL_SCOPED(members_free_bytes) struct shoal_shm_place *places = calloc((size_t)world->size, sizeof *places);
    if (!places)
        return shoal_log_fail(&world->context->log, SHOAL_ERR_MEMORY, "comm", "no memory for %d ranks", world->size);
    SHOAL_TRY(shoal_shm_endpoint_connect(world->context->endpoint, bootstrap, timeout_ms, places));
    shoal_bootstrap_end_phase(bootstrap, "own host");
    for (int r = 0; r < world->size; r++)
        world->members[r] = (struct shoal_member){places[r].host, places[r].peer, NULL, r};
    if (shoal_members_count_hosts(world->members, world->size) == 1)
        return SHOAL_OK;
    return join_hosts(world, bootstrap, timeout_ms, places);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Ends the network first, because it asks the membership, and the connections of this host last, because the membership watches
 * their processes. */
static void end_world(struct shoal_world *world)
{
    struct shoal_context *context = world->context;
    shoal_progress_lock(context->progress);
    for (int r = 0; r < world->size; r++) {
        if (world->members[r].remote)
            shoal_network_part(context->network, world->members[r].remote);
    }
    shoal_progress_unlock(context->progress);
    shoal_membership_close(world->membership);
    shoal_progress_lock(context->progress);
    for (int r = 0; r < world->size; r++) {
        if (world->members[r].local)
            shoal_shm_endpoint_part(context->endpoint, world->members[r].local);
    }
    shoal_progress_unlock(context->progress);
    free(world->members);
    free(world);
}

/* Descriptors that a rank needs at once to meet a few others. Each further rank needs two more. */
#define DESCRIPTORS 16

enum shoal_status shoal_world_meet(struct shoal_context *context, struct shoal_bootstrap *bootstrap, uint32_t timeout_ms,
                                   struct shoal_world **world_out)
{
    struct shoal_world *world = calloc(1, sizeof *world);
    struct shoal_member *members = calloc((size_t)bootstrap->size, sizeof *members);
    shoal_world_end_left(context);
    shoal_memory_spare_descriptors(context->memory, DESCRIPTORS);
    if (!world || !members) {
        free(world);
        free(members);
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for %d ranks", bootstrap->size);
    }
    *world = (struct shoal_world){
        .context = context, .uses = 1, .rank = bootstrap->rank, .size = bootstrap->size, .members = members};
    const enum shoal_status status = meet(world, bootstrap, timeout_ms);
    if (status == SHOAL_OK)
        *world_out = world;
    else
        end_world(world);
    return status;
}

void shoal_world_use(struct shoal_world *world)
{
    SHOAL_ASSERT(world->uses > 0);
    world->uses++;
}

void shoal_world_leave(struct shoal_world *world)
{
    struct shoal_context *context = world->context;
    shoal_progress_lock(context->progress);
    SHOAL_ASSERT(world->uses > 0);
    if (--world->uses == 0) {
        world->next = context->left_worlds;
        context->left_worlds = world;
    }
    shoal_progress_unlock(context->progress);
    shoal_world_end_left(context);
}

void shoal_world_end_left(struct shoal_context *context)
{
    if (shoal_progress_is_inside(context->progress))
        return;
    shoal_progress_lock(context->progress);
    struct shoal_world *world = context->left_worlds;
    context->left_worlds = NULL;
    shoal_progress_unlock(context->progress);
    while (world) {
        struct shoal_world *next = world->next;
        end_world(world);
        world = next;
    }
}
