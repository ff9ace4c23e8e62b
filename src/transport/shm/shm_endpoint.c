#include "transport/shm/shm_endpoint.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "link/auth.h"
#include "topology/limits.h"
#include "transport/shm/shm_link.h"

/* Number of times that memory is located between two looks at what peers have sent. */
#define DRAIN_EVERY 64

#define DOORBELL_BYTES SHOAL_PAGE
_Static_assert(sizeof(struct shoal_shm_doorbell) <= DOORBELL_BYTES, "a doorbell is one page");

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void tell_revoked(void *arg, size_t peer, uint64_t number);

enum shoal_status shoal_shm_endpoint_create(struct shoal_log *log, const struct shoal_shm_settings *settings,
                                            struct shoal_memory *memory, struct shoal_shm_endpoint **endpoint_out)
{
    struct shoal_shm_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "shm", "no memory for a context");
    endpoint->log = log;
    endpoint->settings = settings;
    endpoint->memory = memory;
    endpoint->oom_kills = shoal_topology_oom_kills();
    enum shoal_status status = shoal_auth_random(endpoint->id, sizeof endpoint->id);
    if (status == SHOAL_OK)
        status = shoal_segment_create(log, "shoal-doorbell", DOORBELL_BYTES, &endpoint->doorbell_segment);
    if (status == SHOAL_OK)
        status = shoal_memory_reserve(memory, endpoint->doorbell_segment, 0, DOORBELL_BYTES, "the context");
    if (status != SHOAL_OK) {
        shoal_shm_endpoint_destroy(endpoint);
        return status;
    }
    endpoint->doorbell = (struct shoal_shm_doorbell *)endpoint->doorbell_segment->base;
    endpoint->doorbell->has_membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
    if (sched_getaffinity(0, sizeof endpoint->doorbell->cores, &endpoint->doorbell->cores))
        CPU_ZERO(&endpoint->doorbell->cores);
    shoal_memory_set_exporter(memory, (struct shoal_exporter){tell_revoked, endpoint});
    *endpoint_out = endpoint;
    return SHOAL_OK;
}

int shoal_shm_endpoint_cores(const struct shoal_shm_endpoint *endpoint)
{
    cpu_set_t all = endpoint->doorbell->cores;
    for (size_t i = 0; i < endpoint->peer_count; i++)
        if (endpoint->peers[i] && endpoint->peers[i]->doorbell)
            CPU_OR(&all, &all, &endpoint->peers[i]->doorbell->cores);
    return CPU_COUNT(&all);
}

static void close_if_open(int descriptor)
{
    if (descriptor >= 0)
        close(descriptor);
}

static void destroy_peer(struct shoal_shm_peer *peer)
{
    if (!peer)
        return;
    for (size_t i = 0; i < peer->mapped_count; i++)
        shoal_segment_put(peer->mapped[i].segment);
    free(peer->mapped);
    free(peer->unsaid);
    shoal_segment_put(peer->doorbell_segment);
    if (peer->socket >= 0)
        shutdown(peer->socket, SHUT_RDWR); /* a forked child may hold it open */
    close_if_open(peer->socket);
    close_if_open(peer->process.pidfd);
    free(peer);
}

void shoal_shm_endpoint_destroy(struct shoal_shm_endpoint *endpoint)
{
    if (!endpoint)
        return;
    SHOAL_ASSERT(!endpoint->inside); /* no transport is left */
    shoal_memory_set_exporter(endpoint->memory, (struct shoal_exporter){NULL, NULL});
    shoal_shm_endpoint_drain(endpoint); /* takes over references that peers of this process have passed */
    for (size_t i = 0; i < endpoint->peer_count; i++)
        destroy_peer(endpoint->peers[i]);
    for (size_t i = 0; i < endpoint->joining_count; i++)
        shoal_segment_put(endpoint->joining[i].segment);
    for (size_t i = 0; i < endpoint->device_count; i++)
        close_if_open(endpoint->devices[i].descriptor);
    shoal_memory_release(endpoint->memory, endpoint->doorbell_segment);
    free(endpoint->peers);
    free(endpoint->joining);
    free(endpoint->devices);
    free(endpoint);
}

/* ---- Messages between endpoints ------------------------------------------------------------------------------------------ */

/* Grows an array by one element. Returns NULL, with the array unchanged, if out of memory. */
static void *shm_endpoint_grow(void *array, size_t count, size_t element_bytes)
{
    return reallocarray(array, count + 1, element_bytes);
}

/* Returns how many of the peer's mappings have lower numbers. */
static size_t mapped_below(const struct shoal_shm_peer *peer, uint64_t id)
{
    size_t low = 0, high = peer->mapped_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (peer->mapped[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns NULL if the peer has not sent it, or has freed it. */
static struct shoal_shm_mapped *find_mapped(const struct shoal_shm_peer *peer, uint64_t id)
{
    const size_t at = mapped_below(peer, id);
    return at < peer->mapped_count && peer->mapped[at].id == id && !peer->mapped[at].has_ended ? &peer->mapped[at] : NULL;
}

/* Afterwards no look-up finds the mapping. It stays until nothing can be accessing it. */
static void forget_mapped(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t id)
{
    struct shoal_shm_mapped *mapped = find_mapped(peer, id);
    if (!mapped)
        return;
    if (endpoint->inside) {
        mapped->has_ended = endpoint->must_unmap = true;
        return;
    }
    shoal_segment_put(mapped->segment);
    const size_t after = (size_t)(&peer->mapped[--peer->mapped_count] - mapped);
    memmove(mapped, mapped + 1, after * sizeof *mapped);
}

static void keep_mapped(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t id,
                        struct shoal_segment *segment)
{
    forget_mapped(endpoint, peer, id); /* a reused number */
    struct shoal_shm_mapped *mapped = shm_endpoint_grow(peer->mapped, peer->mapped_count, sizeof *mapped);
    if (!mapped) {
        shoal_segment_put(segment);
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm", "no memory to keep a segment of process %d", peer->name.pid);
        return;
    }
    peer->mapped = mapped;
    const size_t at = mapped_below(peer, id); /* before those of this number that have ended */
    memmove(mapped + at + 1, mapped + at, (peer->mapped_count++ - at) * sizeof *mapped);
    mapped[at] = (struct shoal_shm_mapped){.id = id, .segment = segment};
    SHOAL_ASSERT(at == 0 || mapped[at - 1].id < id);
    SHOAL_ASSERT(at + 1 == peer->mapped_count || id < mapped[at + 1].id || mapped[at + 1].has_ended);
}

static void unmap_ended_of(struct shoal_shm_peer *peer)
{
    size_t kept = 0;
    for (size_t i = 0; i < peer->mapped_count; i++) {
        if (peer->mapped[i].has_ended)
            shoal_segment_put(peer->mapped[i].segment);
        else
            peer->mapped[kept++] = peer->mapped[i];
    }
    peer->mapped_count = kept;
}

void shoal_shm_endpoint_unmap_ended(struct shoal_shm_endpoint *endpoint)
{
    SHOAL_ASSERT(!endpoint->inside);
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        if (endpoint->peers[i])
            unmap_ended_of(endpoint->peers[i]);
    }
    endpoint->must_unmap = false;
}

static void keep_joining(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t comm,
                         struct shoal_segment *segment)
{
    struct shoal_shm_joining *joining = shm_endpoint_grow(endpoint->joining, endpoint->joining_count, sizeof *joining);
    if (!joining) {
        shoal_segment_put(segment);
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm", "no memory to keep a communicator of process %d", peer->name.pid);
        return;
    }
    endpoint->joining = joining;
    endpoint->joining[endpoint->joining_count++] = (struct shoal_shm_joining){comm, peer, segment};
}

/* Keeps an entry even if there is no descriptor: the peer has none, or this process cannot open more. */
static void keep_device(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_peer *peer,
                        const struct shoal_shm_link_message *message, int descriptor)
{
    struct shoal_shm_device *devices = shm_endpoint_grow(endpoint->devices, endpoint->device_count, sizeof *devices);
    if (!devices) {
        close_if_open(descriptor);
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm", "no memory to keep GPU memory of process %d", peer->name.pid);
        return;
    }
    endpoint->devices = devices;
    endpoint->devices[endpoint->device_count++] =
        (struct shoal_shm_device){message->key, peer, descriptor, message->bytes && descriptor < 0};
}

static void shm_endpoint_take_message(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer,
                                      const struct shoal_shm_link_message *message, int fd)
{
    struct shoal_segment *segment = NULL;
    if (message->type == SHOAL_SHM_LINK_GONE) {
        forget_mapped(endpoint, peer, message->key);
        return;
    }
    if (message->type == SHOAL_SHM_LINK_REFUSED) {
        keep_joining(endpoint, peer, message->key, NULL);
        return;
    }
    if (message->type == SHOAL_SHM_LINK_DEVICE) {
        keep_device(endpoint, peer, message, fd);
        return;
    }
    if (message->type != SHOAL_SHM_LINK_MEMORY && message->type != SHOAL_SHM_LINK_COMM)
        return;
    if (peer->process.is_own)
        segment = (struct shoal_segment *)(uintptr_t)message->pointer;
    else if (fd < 0)
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm",
                       "no descriptor left to take memory of process %d: raise `ulimit -n`", peer->name.pid);
    else if (shoal_segment_map(endpoint->log, fd, message->bytes, message->offset, &segment) != SHOAL_OK)
        segment = NULL;
    if (message->type == SHOAL_SHM_LINK_COMM)
        keep_joining(endpoint, peer, message->key, segment);
    else if (segment)
        keep_mapped(endpoint, peer, message->key, segment);
}

static void drain_peer(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer)
{
    struct shoal_shm_link_message message;
    int fd;
    while (peer->socket >= 0 && shoal_shm_link_has_message(peer->socket)) {
        shoal_memory_spare_descriptors(endpoint->memory, 1); /* the kernel drops one that this process cannot hold */
        if (shoal_shm_link_receive(peer->socket, &message, &fd))
            shm_endpoint_take_message(endpoint, peer, &message, fd);
    }
}

static bool say_gone(const struct shoal_shm_peer *peer, uint64_t id)
{
    const struct shoal_shm_link_message gone = {.type = SHOAL_SHM_LINK_GONE, .key = id};
    return shoal_shm_link_send(peer->socket, &gone, -1);
}

/* Notifies the peer of the regions that ended while the link was full, the newest first. The order in which peers unmap memory
 * does not matter. */
static bool say_unsaid(struct shoal_shm_peer *peer)
{
    while (peer->unsaid_count && say_gone(peer, peer->unsaid[peer->unsaid_count - 1]))
        peer->unsaid_count--;
    return peer->unsaid_count == 0;
}

static void tell_gone(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t id)
{
    if (say_unsaid(peer) && say_gone(peer, id))
        return;
    uint64_t *unsaid = shm_endpoint_grow(peer->unsaid, peer->unsaid_count, sizeof *unsaid);
    if (!unsaid) {
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm",
                       "no memory to notify process %d of freed memory later: it keeps that memory mapped", peer->name.pid);
        return;
    }
    peer->unsaid = unsaid;
    peer->unsaid[peer->unsaid_count++] = id;
}

void shoal_shm_endpoint_drain(struct shoal_shm_endpoint *endpoint)
{
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        if (!endpoint->peers[i])
            continue;
        drain_peer(endpoint, endpoint->peers[i]);
        (void)say_unsaid(endpoint->peers[i]); /* or next time */
    }
}

/* Passes a segment; within a process by pointer, with a reference for the receiver. Returns false if the link is full now.
 * Notices of memory that is gone are sent first, because this segment may reuse one of their numbers. */
static bool pass_segment(struct shoal_shm_peer *peer, uint32_t type, uint64_t key, struct shoal_segment *segment)
{
    SHOAL_ASSERT(type == SHOAL_SHM_LINK_MEMORY || type == SHOAL_SHM_LINK_COMM);
    if (!say_unsaid(peer))
        return false;
    if (!segment) {
        const struct shoal_shm_link_message refused = {.type = SHOAL_SHM_LINK_REFUSED, .key = key};
        return shoal_shm_link_send(peer->socket, &refused, -1);
    }
    struct shoal_shm_link_message message = {.type = type, .key = key, .bytes = segment->bytes, .offset = segment->offset};
    if (!peer->process.is_own)
        return shoal_shm_link_send(peer->socket, &message, segment->fd);
    message.pointer = (uintptr_t)shoal_segment_get(segment);
    if (shoal_shm_link_send(peer->socket, &message, -1))
        return true;
    shoal_segment_put(segment);
    return false;
}

/* ---- Meeting ------------------------------------------------------------------------------------------------------------- */

/* Returns false if the peer has closed the connection, because its last world with this rank has ended. Then this rank meets it
 * again. */
static bool shm_endpoint_is_up(const struct shoal_shm_peer *peer)
{
    struct pollfd entry = {peer->socket, POLLIN, 0};
    return peer->socket >= 0 && poll(&entry, 1, 0) >= 0 && !(entry.revents & (POLLHUP | POLLERR));
}

static struct shoal_shm_peer *shm_endpoint_find_peer(struct shoal_shm_endpoint *endpoint, const unsigned char *id)
{
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        struct shoal_shm_peer *peer = endpoint->peers[i];
        if (peer && peer->doorbell && memcmp(peer->id, id, SHOAL_SHM_ID_BYTES) == 0 && shm_endpoint_is_up(peer))
            return peer;
    }
    return NULL;
}

/* Finds or makes a place for one more peer. Returns false if out of places or memory. */
static bool find_place(struct shoal_shm_endpoint *endpoint, size_t *index_out)
{
    size_t index = 0;
    while (index < endpoint->peer_count && endpoint->peers[index])
        index++;
    if (index == endpoint->peer_count) {
        struct shoal_shm_peer **peers =
            index < SHOAL_SHM_PEERS_MAX ? shm_endpoint_grow(endpoint->peers, index, sizeof *peers) : NULL;
        if (!peers)
            return false;
        endpoint->peers = peers;
        endpoint->peers[endpoint->peer_count++] = NULL;
    }
    *index_out = index;
    return true;
}

static enum shoal_status add_peer(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_address_blob *blob,
                                  struct shoal_shm_link_contact *contact, struct shoal_shm_peer **peer_out)
{
    size_t index;
    struct shoal_shm_peer *peer = find_place(endpoint, &index) ? calloc(1, sizeof *peer) : NULL;
    if (!peer)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no room for one more peer (at most %d)",
                              SHOAL_SHM_PEERS_MAX);
    memcpy(peer->id, blob->id, sizeof peer->id);
    memcpy(peer->name.host, blob->who.host, sizeof peer->name.host);
    peer->name.pid = blob->who.pid;
    peer->index = index;
    peer->socket = contact->socket;
    peer->process = (struct shoal_membership_process){.pid = blob->who.pid,
                                                      .pidfd = contact->pidfd,
                                                      .socket = contact->socket,
                                                      .is_own = contact->is_same_process,
                                                      .oom_kills = endpoint->oom_kills};
    contact->socket = contact->pidfd = -1;
    SHOAL_ASSERT(index < SHOAL_SHM_PEERS_MAX && !endpoint->peers[index]);
    endpoint->peers[index] = peer;
    if (peer->process.is_own) {
        peer->doorbell_segment = (struct shoal_segment *)(uintptr_t)contact->doorbell_pointer;
    } else {
        const int fd = contact->doorbell;
        contact->doorbell = -1;
        SHOAL_TRY(shoal_segment_map(endpoint->log, fd, DOORBELL_BYTES, 0, &peer->doorbell_segment));
    }
    peer->doorbell = (struct shoal_shm_doorbell *)peer->doorbell_segment->base;
    peer->uses = 1;
    *peer_out = peer;
    return SHOAL_OK;
}

/* Drops everything that the peer has sent and nobody has taken. */
static void forget_untaken(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_peer *peer)
{
    for (size_t i = endpoint->joining_count; i-- > 0;) {
        if (endpoint->joining[i].peer != peer)
            continue;
        shoal_segment_put(endpoint->joining[i].segment);
        endpoint->joining[i] = endpoint->joining[--endpoint->joining_count];
    }
    for (size_t i = endpoint->device_count; i-- > 0;) {
        if (endpoint->devices[i].peer != peer)
            continue;
        close_if_open(endpoint->devices[i].descriptor);
        endpoint->devices[i] = endpoint->devices[--endpoint->device_count];
    }
}

/* A peer in this process passes references to segments. After the shutdown of the socket no more arrive; those that have
 * arrived are taken over here, so that none leaks. */
static void remove_peer(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer)
{
    if (peer->socket >= 0)
        shutdown(peer->socket, SHUT_RD);
    drain_peer(endpoint, peer);
    forget_untaken(endpoint, peer);
    SHOAL_ASSERT(!peer->uses && !endpoint->meetings && endpoint->peers[peer->index] == peer);
    shoal_memory_forget_peer(endpoint->memory, peer->index);
    endpoint->peers[peer->index] = NULL;
    destroy_peer(peer);
}

/* Call with the lock held. Two ranks that meet must agree on whether they know each other (choose_wanted). So no peer is
 * removed from the time when this rank publishes its identity until it has read the identities of the others. */
static void remove_unused(struct shoal_shm_endpoint *endpoint)
{
    for (size_t i = 0; i < endpoint->peer_count && !endpoint->meetings; i++) {
        if (endpoint->peers[i] && !endpoint->peers[i]->uses)
            remove_peer(endpoint, endpoint->peers[i]);
    }
}

void shoal_shm_endpoint_part(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer)
{
    SHOAL_ASSERT(peer->uses > 0);
    peer->uses--;
    remove_unused(endpoint);
}

static void begin_meeting(struct shoal_shm_endpoint *endpoint)
{
    shoal_memory_lock(endpoint->memory);
    endpoint->meetings++;
    shoal_memory_unlock(endpoint->memory);
}

static void end_meeting(struct shoal_shm_endpoint *endpoint)
{
    shoal_memory_lock(endpoint->memory);
    SHOAL_ASSERT(endpoint->meetings > 0);
    endpoint->meetings--;
    remove_unused(endpoint);
    shoal_memory_unlock(endpoint->memory);
}

static void free_order(int **order)
{
    free(*order);
}

static int by_endpoint(const void *a, const void *b, void *blobs)
{
    const struct shoal_shm_address_blob *all = blobs;
    const int x = *(const int *)a, y = *(const int *)b;
    const int order = memcmp(all[x].id, all[y].id, sizeof all[x].id);
    return order ? order : (x > y) - (x < y);
}

/* Returns ERR_STATE on all ranks alike. */
static enum shoal_status check_endpoints(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_link_meeting *meeting)
{
    const int size = meeting->bootstrap->size;
    SHOAL_SCOPED(free_order) int *order = calloc((size_t)size, sizeof *order);
    if (!order)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no memory to meet %d ranks", size);
    for (int r = 0; r < size; r++)
        order[r] = r;
    qsort_r(order, (size_t)size, sizeof *order, by_endpoint, meeting->blobs);
    for (int i = 1; i < size; i++) {
        const struct shoal_shm_address_blob *blob = &meeting->blobs[order[i]];
        if (memcmp(blob->id, meeting->blobs[order[i - 1]].id, sizeof blob->id) == 0)
            return shoal_log_fail(
                endpoint->log, SHOAL_ERR_STATE, "shm",
                "ranks %d and %d share one context (process %d on %s): a context is for one rank; make one for each "
                "with shoal_context_create, even if ranks are threads of one process",
                order[i - 1], order[i], blob->who.pid, blob->who.host);
    }
    return SHOAL_OK;
}

static enum shoal_status place_all(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_link_meeting *meeting,
                                   struct shoal_shm_place *places)
{
    const int size = meeting->bootstrap->size;
    const struct shoal_membership_identities identities = {&meeting->blobs[0].who, sizeof meeting->blobs[0], size};
    uint16_t *hosts = calloc((size_t)size, sizeof *hosts);
    if (!hosts)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no memory to meet %d ranks", size);
    shoal_membership_number_hosts(&identities, meeting->bootstrap->rank, endpoint->log, hosts);
    for (int r = 0; r < size; r++) {
        const struct shoal_membership_identity *who = &meeting->blobs[r].who;
        places[r].host = hosts[r];
        memcpy(places[r].name.host, who->host, sizeof places[r].name.host);
        places[r].name.pid = who->pid;
    }
    free(hosts);
    return SHOAL_OK;
}

/* Chooses the ranks of this host that have not been met yet. */
static void choose_wanted(struct shoal_shm_endpoint *endpoint, struct shoal_shm_link_meeting *meeting,
                          struct shoal_shm_place *places)
{
    const int own = meeting->bootstrap->rank;
    for (int r = 0; r < meeting->bootstrap->size; r++) {
        places[r].peer = NULL;
        if (r == own || places[r].host != places[own].host)
            continue;
        places[r].peer = shm_endpoint_find_peer(endpoint, meeting->blobs[r].id);
        meeting->is_wanted[r] = !places[r].peer;
        if (places[r].peer)
            places[r].peer->uses++;
    }
}

static enum shoal_status add_met(struct shoal_shm_endpoint *endpoint, struct shoal_shm_link_meeting *meeting,
                                 struct shoal_shm_place *places)
{
    for (int r = 0; r < meeting->bootstrap->size; r++) {
        if (meeting->is_wanted[r])
            SHOAL_TRY(add_peer(endpoint, &meeting->blobs[r], &meeting->contacts[r], &places[r].peer));
    }
    return SHOAL_OK;
}

static enum shoal_status meet_all(struct shoal_shm_endpoint *endpoint, struct shoal_shm_link_meeting *meeting,
                                  struct shoal_shm_place *places)
{
    SHOAL_TRY(check_endpoints(endpoint, meeting));
    SHOAL_TRY(place_all(endpoint, meeting, places));
    shoal_memory_lock(endpoint->memory);
    choose_wanted(endpoint, meeting, places);
    shoal_memory_unlock(endpoint->memory);
    SHOAL_TRY(shoal_shm_link_meet(meeting)); /* waits: without the lock */
    shoal_memory_lock(endpoint->memory);
    const enum shoal_status status = add_met(endpoint, meeting, places);
    shoal_memory_unlock(endpoint->memory);
    return status;
}

static void part_from_all(struct shoal_shm_endpoint *endpoint, struct shoal_shm_place *places, int size)
{
    shoal_memory_lock(endpoint->memory);
    for (int r = 0; r < size; r++) {
        if (places[r].peer)
            shoal_shm_endpoint_part(endpoint, places[r].peer);
        places[r].peer = NULL;
    }
    shoal_memory_unlock(endpoint->memory);
}

enum shoal_status shoal_shm_endpoint_connect(struct shoal_shm_endpoint *endpoint, struct shoal_bootstrap *bootstrap,
                                             uint32_t timeout_ms, struct shoal_shm_place *places_out)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct shoal_shm_link_meeting meeting;
    shoal_memory_set_stagger(endpoint->memory, bootstrap->rank);
    places_out[0] = (struct shoal_shm_place){.host = 0};
    if (bootstrap->size == 1)
        return SHOAL_OK;
    SHOAL_TRY(shoal_shm_link_meeting_init(&meeting, endpoint->log, bootstrap, endpoint->id, endpoint->doorbell_segment,
                                          endpoint->settings->host_id));
    begin_meeting(endpoint);
    enum shoal_status status = shoal_bootstrap_gather(bootstrap, endpoint->log, "blobs", &meeting.blobs[bootstrap->rank],
                                                      meeting.blobs, sizeof meeting.blobs[0], timeout_ms);
    meeting.deadline_ns = deadline_ns;
    if (status == SHOAL_OK)
        status = meet_all(endpoint, &meeting, places_out);
    shoal_shm_link_meeting_fini(&meeting);
    if (status != SHOAL_OK)
        part_from_all(endpoint, places_out, bootstrap->size);
    end_meeting(endpoint);
    return status;
}

/* ---- The segments of a communicator -------------------------------------------------------------------------------------- */

bool shoal_shm_endpoint_offer(struct shoal_shm_peer *peer, uint64_t comm, struct shoal_segment *own)
{
    return pass_segment(peer, SHOAL_SHM_LINK_COMM, comm, own);
}

enum shoal_status shoal_shm_endpoint_take(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t comm,
                                          struct shoal_segment **segment_out)
{
    drain_peer(endpoint, peer);
    for (size_t i = 0; i < endpoint->joining_count; i++) {
        if (endpoint->joining[i].comm != comm || endpoint->joining[i].peer != peer)
            continue;
        struct shoal_segment *segment = endpoint->joining[i].segment;
        endpoint->joining[i] = endpoint->joining[--endpoint->joining_count];
        if (!segment)
            return shoal_log_fail(endpoint->log, SHOAL_ERR_PEER_LOST, "shm",
                                  "process %d on %s could not make its part of a communicator: see its log", peer->name.pid,
                                  peer->name.host);
        *segment_out = segment;
        return SHOAL_OK;
    }
    return SHOAL_PENDING;
}

void shoal_shm_endpoint_decline(struct shoal_shm_endpoint *endpoint, uint64_t comm)
{
    shoal_shm_endpoint_drain(endpoint);
    for (size_t i = endpoint->joining_count; i-- > 0;) {
        if (endpoint->joining[i].comm != comm)
            continue;
        shoal_segment_put(endpoint->joining[i].segment);
        endpoint->joining[i] = endpoint->joining[--endpoint->joining_count];
    }
}

bool shoal_shm_endpoint_offer_device(struct shoal_shm_peer *peer, uint64_t comm, int descriptor)
{
    const struct shoal_shm_link_message message = {.type = SHOAL_SHM_LINK_DEVICE, .key = comm, .bytes = descriptor >= 0};
    return shoal_shm_link_send(peer->socket, &message, descriptor);
}

enum shoal_status shoal_shm_endpoint_take_device(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer,
                                                 uint64_t comm, int *descriptor_out)
{
    drain_peer(endpoint, peer);
    for (size_t i = 0; i < endpoint->device_count; i++) {
        const struct shoal_shm_device device = endpoint->devices[i];
        if (device.comm != comm || device.peer != peer)
            continue;
        endpoint->devices[i] = endpoint->devices[--endpoint->device_count];
        *descriptor_out = device.descriptor;
        return device.is_lost
                   ? shoal_log_fail(endpoint->log, SHOAL_ERR_SYSTEM, "shm",
                                    "no descriptor left to take GPU memory of process %d: raise `ulimit -n`", peer->name.pid)
                   : SHOAL_OK;
    }
    if (shoal_membership_process_has_ended(&peer->process))
        return shoal_log_fail(endpoint->log, SHOAL_ERR_PEER_LOST, "shm", "process %d on %s %s before it passed GPU memory",
                              peer->name.pid, peer->name.host, peer->process.ended);
    return SHOAL_PENDING;
}

/* ---- Memory for peers ---------------------------------------------------------------------------------------------------- */

static void tell_revoked(void *arg, size_t peer, uint64_t number)
{
    struct shoal_shm_endpoint *endpoint = arg;
    SHOAL_ASSERT(peer < endpoint->peer_count && endpoint->peers[peer]); /* its descriptor was sent there */
    tell_gone(endpoint, endpoint->peers[peer], number);
}

/* Peers learn of memory when it is first used with them. Returns true when all ranks of the group know it. A rank that has
 * ended does not count. */
static bool shm_endpoint_announce(struct shoal_shm_endpoint *endpoint, struct shoal_region *region,
                                  const struct shoal_shm_group *group)
{
    if (region->known_to == group->comm)
        return true;
    if (!shoal_region_expect_peers(region, endpoint->peer_count))
        return false;
    bool is_known = true;
    for (int r = 0; r < group->size; r++) {
        struct shoal_shm_peer *peer = group->peers[r];
        if (!peer || region->is_exported[peer->index])
            continue;
        SHOAL_ASSERT(peer->uses > 0 && endpoint->peers[peer->index] == peer);
        region->is_exported[peer->index] = pass_segment(peer, SHOAL_SHM_LINK_MEMORY, region->number, region->segment);
        is_known &= region->is_exported[peer->index] || shoal_membership_process_has_ended(&peer->process);
    }
    region->known_to = is_known ? group->comm : 0;
    return is_known;
}

shoal_location shoal_shm_endpoint_locate(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_group *group,
                                         const void *address, size_t bytes)
{
    if (++endpoint->locates % DRAIN_EVERY == 0) /* from time to time this unmaps memory that peers have freed */
        shoal_shm_endpoint_drain(endpoint);
    struct shoal_region *region = shoal_memory_find(endpoint->memory, address, bytes);
    SHOAL_ASSERT(!region || region->kind != SHOAL_REGION_SHARED || region->segment);
    if (!region || region->kind != SHOAL_REGION_SHARED || !shm_endpoint_announce(endpoint, region, group))
        return 0;
    return shoal_region_locate(region, address);
}

void *shoal_shm_endpoint_reach(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, shoal_location location,
                               size_t bytes)
{
    const uint64_t offset = shoal_location_offset(location);
    const struct shoal_shm_mapped *mapped = find_mapped(peer, shoal_location_segment(location));
    if (!mapped) {
        drain_peer(endpoint, peer);
        mapped = find_mapped(peer, shoal_location_segment(location));
    }
    if (!mapped || offset > mapped->segment->bytes || bytes > mapped->segment->bytes - offset)
        return NULL;
    return mapped->segment->base + offset;
}

void *shoal_shm_endpoint_own(const struct shoal_shm_endpoint *endpoint, shoal_location location)
{
    const struct shoal_region *region = shoal_memory_at(endpoint->memory, location);
    return region ? region->segment->base + shoal_location_offset(location) : NULL;
}

/* ---- Sleeping and waking ------------------------------------------------------------------------------------------------- */

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void shoal_shm_endpoint_doze(struct shoal_shm_endpoint *endpoint)
{
    /* seq_cst: this store comes before the sleeper's last look for work. With the fence between a waker's publishing and its
     * look at `asleep`, one of the two sees the other. */
    atomic_store_explicit(&endpoint->doorbell->asleep, 1, memory_order_seq_cst);
    shoal_shm_endpoint_fence_all(endpoint);
}

/* Without the others' fence, a waker may look at `asleep` before its work is visible here, and then does not ring the
 * doorbell. */
void shoal_shm_endpoint_doze_briefly(struct shoal_shm_endpoint *endpoint)
{
    atomic_store_explicit(&endpoint->doorbell->asleep, 1, memory_order_seq_cst);
}

void shoal_shm_endpoint_fence_all(struct shoal_shm_endpoint *endpoint)
{
    atomic_fetch_add_explicit(&endpoint->fences, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (endpoint->doorbell->has_membarrier)
        syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
}

void shoal_shm_endpoint_sleep(struct shoal_shm_endpoint *endpoint, uint64_t timeout_ns)
{
    const struct timespec timeout = {(time_t)(timeout_ns / SHOAL_NS_PER_S), (long)(timeout_ns % SHOAL_NS_PER_S)};
    futex(&endpoint->doorbell->asleep, FUTEX_WAIT, 1, &timeout); /* returns at once if the doorbell was rung since _doze */
}

void shoal_shm_endpoint_awake(struct shoal_shm_endpoint *endpoint)
{
    shoal_shm_doorbell_ring(endpoint->doorbell); /* not a plain store: another thread may have gone to sleep since */
}

void shoal_shm_doorbell_ring(struct shoal_shm_doorbell *doorbell)
{
    if (atomic_exchange_explicit(&doorbell->asleep, 0, memory_order_seq_cst))
        futex(&doorbell->asleep, FUTEX_WAKE, INT32_MAX, NULL);
}

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

/* A place is the number of the look and the core. relaxed throughout: a place publishes nothing else. */
#define PLACE_CORE_BITS 16
#define PLACE_CORE_MASK ((UINT64_C(1) << PLACE_CORE_BITS) - 1)

bool shoal_shm_endpoint_meet_on_core(struct shoal_shm_endpoint *endpoint, int core, cpu_set_t *taken_out)
{
    const uint64_t look = (atomic_load_explicit(&endpoint->doorbell->place, memory_order_relaxed) >> PLACE_CORE_BITS) + 1;
    bool must_leave = false;
    SHOAL_ASSERT(core >= 0 && core < CPU_SETSIZE);
    CPU_ZERO(taken_out);
    CPU_SET((size_t)core, taken_out);
    atomic_store_explicit(&endpoint->doorbell->place, look << PLACE_CORE_BITS | (uint64_t)core, memory_order_relaxed);
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        struct shoal_shm_peer *peer = endpoint->peers[i];
        if (!peer || !peer->doorbell) /* its meeting failed */
            continue;
        const uint64_t place = atomic_load_explicit(&peer->doorbell->place, memory_order_relaxed);
        if (place == peer->place)
            continue;
        peer->place = place;
        CPU_SET((size_t)(place & PLACE_CORE_MASK), taken_out);
        must_leave |= (place & PLACE_CORE_MASK) == (uint64_t)core && memcmp(endpoint->id, peer->id, sizeof endpoint->id) > 0;
    }
    return must_leave;
}
