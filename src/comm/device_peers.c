#include "comm/device_peers.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "collective/select.h"
#include "comm/comm_world.h"
#include "comm/context.h"
#include "transport/shm/shm_link.h"

/* What each rank sends to the others. */
struct answer {
    uint64_t unit_bytes; /* SHOAL_GPU_UNIT_BYTES, which determines the size of slots */
    char pci[32];        /* its GPU's */
    char why[208];       /* why the rank cannot take part; empty if it can */
};

struct joining {
    struct shoal_comm *comm;
    struct shoal_devices_port *port; /* NULL if this rank cannot take part */
    uint64_t deadline_ns;            /* for the whole agreement */
    struct shoal_device_stage_options stage;
    int ranks[SHOAL_GPU_SOURCES_MAX]; /* of this host */
    struct answer own;
    struct answer *answers; /* of all ranks */
};

/* At least 1: 0 would mean the communicator's default. */
static uint32_t peers_left_ms(const struct joining *joining)
{
    const uint64_t now_ns = shoal_clock_ns();
    return now_ns < joining->deadline_ns ? (uint32_t)((joining->deadline_ns - now_ns) / SHOAL_NS_PER_MS) + 1 : 1;
}

/* ---- What this rank can do ----------------------------------------------------------------------------------------------- */

/* Keeps the first reason: the text that was logged last. */
static void note_why(struct joining *joining, enum shoal_status status)
{
    char text[SHOAL_LOG_TEXT_MAX];
    if (status == SHOAL_OK || joining->own.why[0])
        return;
    (void)shoal_log_last_error(&joining->comm->context->log, text, sizeof text);
    snprintf(joining->own.why, sizeof joining->own.why, "%.*s", (int)sizeof joining->own.why - 1, text);
}

static enum shoal_status peers_make_own(struct joining *joining)
{
    struct shoal_comm *comm = joining->comm;
    struct shoal_context *context = comm->context;
    if (!comm->devices.ask) { /* not an error */
        snprintf(joining->own.why, sizeof joining->own.why, "its process has loaded no driver of GPUs");
        return SHOAL_OK;
    }
    SHOAL_TRY(shoal_drivers_open(context));
    SHOAL_TRY(shoal_devices_make_peers(context, &joining->stage, peers_left_ms(joining) / 2,
                                       &joining->port)); /* at most half of the time, because others wait meanwhile */
    const int device = shoal_gpu_peers_device(joining->port->peers);
    snprintf(joining->own.pci, sizeof joining->own.pci, "%s", shoal_gpu_at(context->drivers.gpu, device)->pci);
    return SHOAL_OK;
}

/* A process may not see the GPUs of others. Then mapping their memory shows whether they are reachable. */
static bool does_reach(const struct shoal_gpu *gpu, int device, const char *pci)
{
    for (int i = 0; i < shoal_gpu_count(gpu); i++) {
        if (i != device && strcmp(shoal_gpu_at(gpu, i)->pci, pci) == 0 &&
            shoal_gpu_reach(gpu, device, i) == SHOAL_GPU_REACH_NONE)
            return false;
    }
    return true;
}

static enum shoal_status check_answers(const struct joining *joining)
{
    struct shoal_context *context = joining->comm->context;
    SHOAL_ASSERT(joining->port); /* all ranks can take part */
    const int device = shoal_gpu_peers_device(joining->port->peers);
    for (int r = 0; r < joining->comm->size; r++) {
        const struct answer *answer = &joining->answers[r];
        if (answer->unit_bytes != joining->own.unit_bytes)
            return shoal_log_fail(&context->log, SHOAL_ERR_STATE, "comm",
                                  "SHOAL_GPU_UNIT_BYTES is %llu, and %llu on rank %d: it must be the same",
                                  (unsigned long long)joining->own.unit_bytes, (unsigned long long)answer->unit_bytes, r);
    }
    for (int i = 0; i < joining->stage.ranks; i++) {
        const char *pci = joining->answers[joining->ranks[i]].pci;
        if (!does_reach(context->drivers.gpu, device, pci))
            return shoal_log_fail(&context->log, SHOAL_ERR_STATE, "comm", "GPU %s does not reach GPU %s, that of rank %d",
                                  joining->own.pci, pci, joining->ranks[i]);
    }
    return SHOAL_OK;
}

/* ---- Exchanging answers -------------------------------------------------------------------------------------------------- */

static enum shoal_status exchange_answers(struct joining *joining)
{
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLGATHER,
                                    .type = SHOAL_UINT8,
                                    .input = &joining->own,
                                    .output = joining->answers,
                                    .count = sizeof joining->own,
                                    .timeout_ms = peers_left_ms(joining)};
    return shoal_comm_run(joining->comm, &call);
}

/* Returns the lowest rank that cannot take part, or -1 if all can. */
static int find_unable(const struct joining *joining)
{
    int rank = 0;
    while (rank < joining->comm->size && !joining->answers[rank].why[0])
        rank++;
    return rank < joining->comm->size ? rank : -1;
}

/* Descriptors of GPU memory on their way between the ranks of a host. A rank without one sends a message that says so; nobody
 * waits for it. */
struct passing {
    int own; /* -1 if none */
    bool has_sent[SHOAL_GPU_SOURCES_MAX];
    bool has_come[SHOAL_GPU_SOURCES_MAX];
    int descriptors[SHOAL_GPU_SOURCES_MAX]; /* -1 if none */
    enum shoal_status status;               /* the first error */
};

/* Returns true if both directions are complete or the peer has ended. Call with the progress engine's lock held. */
static bool pass_with(const struct joining *joining, struct passing *passing, int i)
{
    const struct shoal_comm *comm = joining->comm;
    struct shoal_shm_peer *peer = comm->members[joining->ranks[i]].local;
    SHOAL_ASSERT(peer && i != joining->stage.rank);
    if (!passing->has_sent[i])
        passing->has_sent[i] = shoal_shm_endpoint_offer_device(peer, comm->number, passing->own);
    if (passing->has_sent[i] && passing->has_come[i])
        return true;
    const enum shoal_status status =
        shoal_shm_endpoint_take_device(comm->context->endpoint, peer, comm->number, &passing->descriptors[i]);
    passing->has_come[i] |= status != SHOAL_PENDING;
    passing->has_sent[i] |= status == SHOAL_ERR_PEER_LOST;
    if (status != SHOAL_PENDING && passing->status == SHOAL_OK)
        passing->status = status;
    return passing->has_sent[i] && passing->has_come[i];
}

/* Returns true when all descriptors have been exchanged. */
static bool pass_once(const struct joining *joining, struct passing *passing)
{
    struct shoal_progress *progress = joining->comm->context->progress;
    bool is_over = true;
    shoal_progress_lock(progress);
    for (int i = 0; i < joining->stage.ranks; i++)
        is_over &= i == joining->stage.rank || pass_with(joining, passing, i);
    shoal_progress_unlock(progress);
    return is_over;
}

static enum shoal_status peers_pass_all(const struct joining *joining, struct passing *passing)
{
    while (!pass_once(joining, passing)) {
        if (shoal_clock_ns() > joining->deadline_ns)
            return shoal_log_fail(&joining->comm->context->log, SHOAL_ERR_TIMEOUT, "comm",
                                  "a rank did not pass its GPU memory in time");
        shoal_shm_link_wait(-1, 0, 1);
    }
    return passing->status;
}

/* A rank that has passed no descriptor reports the reason itself. */
static enum shoal_status import_all(const struct joining *joining, const struct passing *passing)
{
    enum shoal_status status = SHOAL_OK;
    for (int i = 0; i < joining->stage.ranks; i++) {
        if (passing->descriptors[i] < 0)
            continue;
        if (status == SHOAL_OK)
            status = shoal_gpu_peers_import(joining->port->peers, i, passing->descriptors[i]);
        close(passing->descriptors[i]);
    }
    return status;
}

/* Exchanges descriptors even if this rank cannot take part, so that the others do not wait. */
static void map_peers(struct joining *joining)
{
    struct passing passing = {.own = -1};
    for (int i = 0; i < SHOAL_GPU_SOURCES_MAX; i++)
        passing.descriptors[i] = -1;
    enum shoal_status status = check_answers(joining);
    if (status == SHOAL_OK)
        status = shoal_gpu_peers_export(joining->port->peers, &passing.own);
    note_why(joining, status);
    note_why(joining, peers_pass_all(joining, &passing));
    note_why(joining, import_all(joining, &passing));
    if (passing.own >= 0)
        close(passing.own);
}

/* ---- Joining ------------------------------------------------------------------------------------------------------------- */

static void say_why_not(struct shoal_comm *comm, const char *why)
{
    if (comm->rank == 0)
        shoal_log_line(&comm->context->log, SHOAL_LOG_WARN, "comm",
                       "communicator %s: GPUs do not sum among themselves, although SHOAL_GPU_PEER_BYTES is set: %s",
                       comm->name, why);
}

/* On OK all ranks know whether all can take part. Otherwise the communicator is broken. */
static enum shoal_status join_all(struct joining *joining)
{
    note_why(joining, peers_make_own(joining));
    SHOAL_TRY(exchange_answers(joining));
    if (find_unable(joining) >= 0)
        return SHOAL_OK;
    map_peers(joining);
    return exchange_answers(joining);
}

/* Call if all ranks can take part. */
static void use_peers(const struct joining *joining)
{
    struct shoal_comm *comm = joining->comm;
    SHOAL_ASSERT(joining->port && joining->port->peers && !comm->devices.peers);
    comm->devices.peers = joining->port;
    shoal_log_line(&comm->context->log, SHOAL_LOG_INFO, "comm",
                   "communicator %s: GPUs sum all-reduces of %llu bytes and more among themselves (this rank's is %s)",
                   comm->name, (unsigned long long)comm->context->settings.gpu.peer_bytes, joining->own.pci);
}

static enum shoal_status join_or_decline(struct joining *joining)
{
    char why[256];
    const enum shoal_status status = join_all(joining);
    const int unable = status == SHOAL_OK ? find_unable(joining) : -1;
    if (status == SHOAL_OK && unable < 0) {
        use_peers(joining);
        return SHOAL_OK;
    }
    if (joining->port)
        shoal_devices_retire(joining->comm->context, joining->port);
    if (unable >= 0) {
        snprintf(why, sizeof why, "rank %d: %s", unable, joining->answers[unable].why);
        say_why_not(joining->comm, why);
    }
    return status;
}

/* All ranks come to the same answer. Returns NULL if nothing prevents it. */
static const char *find_obstacle(const struct shoal_comm *comm)
{
    const int ranks = shoal_members_count_local(comm->members, comm->size, comm->rank);
    for (int r = 0; r < comm->size; r++) {
        if (shoal_members_count_local(comm->members, comm->size, r) != ranks)
            return "its hosts have different numbers of ranks";
    }
    return ranks == 1                      ? "each rank is alone on its host"
           : ranks > SHOAL_GPU_SOURCES_MAX ? "a host has more than 8 of its ranks"
                                           : NULL;
}

static void describe_host(struct joining *joining)
{
    const struct shoal_comm *comm = joining->comm;
    const struct shoal_settings *settings = &comm->context->settings;
    const int hosts = shoal_members_count_hosts(comm->members, comm->size);
    joining->stage = (struct shoal_device_stage_options){
        .slots = (unsigned)settings->engine.depth, .hosts = hosts, .start = settings->engine.counter_start};
    joining->stage.slot_bytes =
        shoal_select_device_chunk_bytes(shoal_gpu_unit_bytes(&settings->gpu), settings->engine.chunk_bytes, comm->size, hosts);
    for (int r = 0; r < comm->size; r++) {
        if (comm->members[r].host != comm->members[comm->rank].host)
            continue;
        if (r == comm->rank)
            joining->stage.rank = joining->stage.ranks;
        SHOAL_ASSERT(joining->stage.ranks < SHOAL_GPU_SOURCES_MAX); /* find_obstacle() has checked it */
        joining->ranks[joining->stage.ranks++] = r;
    }
    SHOAL_ASSERT(joining->stage.ranks > 1 && joining->ranks[joining->stage.rank] == comm->rank);
}

static enum shoal_status peers_join_with(struct joining *joining)
{
    struct shoal_log *log = &joining->comm->context->log;
    char last[SHOAL_LOG_TEXT_MAX] = "";
    describe_host(joining);
    joining->answers = calloc((size_t)joining->comm->size, sizeof *joining->answers);
    if (!joining->answers)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "comm", "no memory for the ranks' descriptions of their GPUs");
    const enum shoal_status before = shoal_log_last_error(log, last, sizeof last);
    const enum shoal_status status = join_or_decline(joining);
    if (status == SHOAL_OK) /* a rank that cannot take part does not make the call fail */
        shoal_log_restore(log, before, last);
    free(joining->answers);
    return status;
}

enum shoal_status shoal_devices_join_peers(struct shoal_comm *comm, uint32_t timeout_ms)
{
    const struct shoal_settings *settings = &comm->context->settings;
    struct joining joining = {.comm = comm,
                              .deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS,
                              .own = {.unit_bytes = settings->gpu.unit_bytes}};
    if (!settings->gpu.peer_bytes || comm->size == 1)
        return SHOAL_OK;
    const char *obstacle = find_obstacle(comm);
    if (!obstacle)
        return peers_join_with(&joining);
    say_why_not(comm, obstacle);
    return SHOAL_OK;
}
