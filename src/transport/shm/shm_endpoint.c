#include "transport/shm/shm_endpoint.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "bootstrap/auth.h"
#include "topology/limits.h"
#include "transport/shm/shm_link.h"

/* A location is the export's number, 24 bits, and an offset of up to a TiB. */
#define OFFSET_MASK ((UINT64_C(1) << SHOAL_LOCATION_OFFSET_BITS) - 1)
#define EXPORT_MAX ((UINT64_C(1) << (64 - SHOAL_LOCATION_OFFSET_BITS)) - 1)
/* So often memory is located between two looks at what peers have sent. */
#define DRAIN_EVERY 64
/* Addresses that agree in their low 28 bits collide in some processors' caches: memory of different ranks, and memory made one
 * after the other, begins a page apart modulo this many pages. */
#define STAGGER_PAGES 61
#define KEPT_MAX 256 /* pieces of freed memory: all are looked through for each shoal_mem_alloc */

static void no_lock(void *arg)
{
    (void)arg;
}

static void lock(const struct shoal_shm_endpoint *endpoint)
{
    endpoint->guard.lock(endpoint->guard.arg);
}

static void unlock(const struct shoal_shm_endpoint *endpoint)
{
    endpoint->guard.unlock(endpoint->guard.arg);
}

#define DOORBELL_BYTES (SHOAL_PAGE + SHOAL_SURVIVORS_BOARD_BYTES)
_Static_assert(sizeof(struct shoal_shm_doorbell) <= SHOAL_PAGE, "the board begins on a page of its own");

static struct shoal_survivors_board *board_of(const struct shoal_segment *doorbell_segment)
{
    return (struct shoal_survivors_board *)(void *)(doorbell_segment->base + SHOAL_PAGE);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_shm_endpoint_create(struct shoal_log *log, const struct shoal_settings *settings,
                                            struct shoal_shm_endpoint **endpoint_out)
{
    struct shoal_shm_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "shm", "no memory for a context");
    endpoint->log = log;
    endpoint->settings = settings;
    endpoint->guard = (struct shoal_shm_guard){no_lock, no_lock, NULL};
    endpoint->budget.limit = settings->memory_limit;
    endpoint->oom_kills = shoal_topology_oom_kills();
    enum shoal_status status = shoal_auth_random(endpoint->id, sizeof endpoint->id);
    if (status == SHOAL_OK)
        status = shoal_segment_create(log, "shoal-doorbell", DOORBELL_BYTES, &endpoint->doorbell_segment);
    if (status == SHOAL_OK)
        status = shoal_segment_reserve(endpoint->doorbell_segment, log, 0, DOORBELL_BYTES, &endpoint->budget, "the context");
    if (status != SHOAL_OK) {
        shoal_shm_endpoint_destroy(endpoint);
        return status;
    }
    endpoint->doorbell = (struct shoal_shm_doorbell *)endpoint->doorbell_segment->base;
    endpoint->board = board_of(endpoint->doorbell_segment);
    endpoint->doorbell->has_membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
    if (sched_getaffinity(0, sizeof endpoint->doorbell->cores, &endpoint->doorbell->cores))
        CPU_ZERO(&endpoint->doorbell->cores);
    *endpoint_out = endpoint;
    return SHOAL_OK;
}

int shoal_shm_endpoint_cores(const struct shoal_shm_endpoint *endpoint)
{
    cpu_set_t all = endpoint->doorbell->cores;
    for (size_t i = 0; i < endpoint->peer_count; i++)
        if (endpoint->peers[i]->doorbell)
            CPU_OR(&all, &all, &endpoint->peers[i]->doorbell->cores);
    return CPU_COUNT(&all);
}

static void destroy_peer(struct shoal_shm_peer *peer)
{
    for (size_t i = 0; i < peer->mapped_count; i++)
        shoal_segment_put(peer->mapped[i].segment);
    free(peer->mapped);
    free(peer->unsaid);
    shoal_segment_put(peer->doorbell_segment);
    if (peer->socket >= 0)
        close(peer->socket);
    if (peer->process.pidfd >= 0)
        close(peer->process.pidfd);
    free(peer);
}

void shoal_shm_endpoint_destroy(struct shoal_shm_endpoint *endpoint)
{
    if (!endpoint)
        return;
    shoal_shm_endpoint_drain(endpoint); /* takes over references that peers of this process have passed */
    for (size_t i = 0; i < endpoint->peer_count; i++)
        destroy_peer(endpoint->peers[i]);
    for (size_t i = 0; i < endpoint->export_count; i++) {
        shoal_segment_put(endpoint->exports[i]->segment);
        free(endpoint->exports[i]->is_told);
        free(endpoint->exports[i]);
    }
    for (size_t i = 0; i < endpoint->joining_count; i++)
        shoal_segment_put(endpoint->joining[i].segment);
    shoal_segment_put(endpoint->doorbell_segment);
    free(endpoint->peers);
    free(endpoint->exports);
    free(endpoint->numbered);
    free(endpoint->joining);
    free(endpoint);
}

/* ---- Messages between endpoints ------------------------------------------------------------------------------------------ */

/* Grows an array by one element; NULL and the array untouched when there is no memory. */
static void *shm_endpoint_grow(void *array, size_t count, size_t element_bytes)
{
    return reallocarray(array, count + 1, element_bytes);
}

/* How many of the peer's have lower numbers. */
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

/* NULL: it has not sent it. */
static struct shoal_shm_mapped *find_mapped(const struct shoal_shm_peer *peer, uint64_t id)
{
    const size_t at = mapped_below(peer, id);
    return at < peer->mapped_count && peer->mapped[at].id == id ? &peer->mapped[at] : NULL;
}

static void forget_mapped(struct shoal_shm_peer *peer, uint64_t id)
{
    struct shoal_shm_mapped *mapped = find_mapped(peer, id);
    if (!mapped)
        return;
    shoal_segment_put(mapped->segment);
    const size_t after = (size_t)(&peer->mapped[--peer->mapped_count] - mapped);
    memmove(mapped, mapped + 1, after * sizeof *mapped);
}

static void keep_mapped(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, uint64_t id,
                        struct shoal_segment *segment)
{
    forget_mapped(peer, id); /* a number that is used again */
    struct shoal_shm_mapped *mapped = shm_endpoint_grow(peer->mapped, peer->mapped_count, sizeof *mapped);
    if (!mapped) {
        shoal_segment_put(segment);
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "shm", "no memory to keep a segment of process %d", peer->name.pid);
        return;
    }
    peer->mapped = mapped;
    const size_t at = mapped_below(peer, id);
    memmove(mapped + at + 1, mapped + at, (peer->mapped_count++ - at) * sizeof *mapped);
    mapped[at] = (struct shoal_shm_mapped){id, segment};
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

static void shm_endpoint_take_message(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer,
                                      const struct shoal_shm_link_message *message, int fd)
{
    struct shoal_segment *segment = NULL;
    if (message->type == SHOAL_SHM_LINK_GONE) {
        forget_mapped(peer, message->key);
        return;
    }
    if (message->type == SHOAL_SHM_LINK_REFUSED) {
        keep_joining(endpoint, peer, message->key, NULL);
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
    while (peer->socket >= 0 && shoal_shm_link_receive(peer->socket, &message, &fd))
        shm_endpoint_take_message(endpoint, peer, &message, fd);
}

static bool say_gone(const struct shoal_shm_peer *peer, uint64_t id)
{
    const struct shoal_shm_link_message gone = {.type = SHOAL_SHM_LINK_GONE, .key = id};
    return shoal_shm_link_send(peer->socket, &gone, -1);
}

/* Sends the notices that did not fit before, the newest first. The order in which peers unmap memory does not matter. */
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
                       "no memory to tell process %d later that memory is gone: it keeps it", peer->name.pid);
        return;
    }
    peer->unsaid = unsaid;
    peer->unsaid[peer->unsaid_count++] = id;
}

void shoal_shm_endpoint_drain(struct shoal_shm_endpoint *endpoint)
{
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        drain_peer(endpoint, endpoint->peers[i]);
        (void)say_unsaid(endpoint->peers[i]); /* or next time */
    }
}

/* Passes a segment; within a process by pointer, with a reference for the receiver. False when the link is full now. Notices of
 * memory that is gone go first, because this segment may use one of their numbers again. */
static bool pass_segment(struct shoal_shm_peer *peer, uint32_t type, uint64_t key, struct shoal_segment *segment)
{
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

static struct shoal_shm_peer *shm_endpoint_find_peer(struct shoal_shm_endpoint *endpoint, const unsigned char *id)
{
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        if (memcmp(endpoint->peers[i]->id, id, SHOAL_SHM_ID_BYTES) == 0)
            return endpoint->peers[i];
    }
    return NULL;
}

static enum shoal_status add_peer(struct shoal_shm_endpoint *endpoint, const struct shoal_address_blob *blob,
                                  struct shoal_shm_link_contact *contact, struct shoal_shm_peer **peer_out)
{
    struct shoal_shm_peer **peers = endpoint->peer_count < SHOAL_SHM_PEERS_MAX
                                        ? shm_endpoint_grow(endpoint->peers, endpoint->peer_count, sizeof *peers)
                                        : NULL;
    struct shoal_shm_peer *peer = peers ? calloc(1, sizeof *peer) : NULL;
    if (peers)
        endpoint->peers = peers;
    if (!peer)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no room for one more peer (%zu met, at most %d)",
                              endpoint->peer_count, SHOAL_SHM_PEERS_MAX);
    memcpy(peer->id, blob->id, sizeof peer->id);
    memcpy(peer->name.host, blob->host, sizeof peer->name.host);
    peer->name.pid = blob->pid;
    peer->index = endpoint->peer_count;
    peer->socket = contact->socket;
    peer->process = (struct shoal_membership_process){.pid = blob->pid,
                                                      .pidfd = contact->pidfd,
                                                      .socket = contact->socket,
                                                      .is_own = contact->is_same_process,
                                                      .oom_kills = endpoint->oom_kills};
    contact->socket = contact->pidfd = -1;
    endpoint->peers[endpoint->peer_count++] = peer;
    if (peer->process.is_own) {
        peer->doorbell_segment = (struct shoal_segment *)(uintptr_t)contact->doorbell_pointer;
    } else {
        const int fd = contact->doorbell;
        contact->doorbell = -1;
        SHOAL_TRY(shoal_segment_map(endpoint->log, fd, DOORBELL_BYTES, 0, &peer->doorbell_segment));
    }
    peer->doorbell = (struct shoal_shm_doorbell *)peer->doorbell_segment->base;
    peer->board = board_of(peer->doorbell_segment);
    *peer_out = peer;
    return SHOAL_OK;
}

/* Says of the first rank of each other host why it counts as one. */
static void tell_host(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_link_meeting *meeting, int rank)
{
    const struct shoal_address_blob *own = &meeting->blobs[meeting->bootstrap->rank], *blob = &meeting->blobs[rank];
    char difference[256];
    shoal_address_blob_print_difference(blob, own, difference, sizeof difference);
    shoal_log_line(endpoint->log, SHOAL_LOG_INFO, "shm", "rank %d (process %d on %s) is on another host than this rank: %s",
                   rank, blob->pid, blob->host, difference);
}

static void shm_endpoint_number_hosts(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_link_meeting *meeting,
                                      struct shoal_shm_place *places)
{
    const int own = meeting->bootstrap->rank;
    uint16_t hosts = 0;
    for (int r = 0; r < meeting->bootstrap->size; r++) {
        const struct shoal_address_blob *blob = &meeting->blobs[r];
        int first = 0;
        while (!shoal_address_blob_same_host(&meeting->blobs[first], blob))
            first++;
        places[r].host = first < r ? places[first].host : hosts++;
        memcpy(places[r].name.host, blob->host, sizeof places[r].name.host);
        places[r].name.pid = blob->pid;
        memcpy(&places[r].meeting, meeting->blobs[0].name, sizeof places[r].meeting); /* is random */
        places[r].meeting |= 1;
        if (first == r && !shoal_address_blob_same_host(&meeting->blobs[own], blob))
            tell_host(endpoint, meeting, r);
    }
}

/* Who of this host is new? The others are met already. */
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
    shm_endpoint_number_hosts(endpoint, meeting, places);
    lock(endpoint);
    choose_wanted(endpoint, meeting, places);
    unlock(endpoint);
    SHOAL_TRY(shoal_shm_link_meet(meeting)); /* waits: without the lock */
    lock(endpoint);
    const enum shoal_status status = add_met(endpoint, meeting, places);
    unlock(endpoint);
    return status;
}

enum shoal_status shoal_shm_endpoint_connect(struct shoal_shm_endpoint *endpoint, struct shoal_bootstrap *bootstrap,
                                             uint32_t timeout_ms, struct shoal_shm_place *places_out)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct shoal_shm_link_meeting meeting;
    endpoint->rank = bootstrap->rank;
    places_out[0] = (struct shoal_shm_place){.host = 0, .meeting = 1};
    if (bootstrap->size == 1)
        return SHOAL_OK;
    SHOAL_TRY(shoal_shm_link_meeting_init(&meeting, endpoint->log, bootstrap, endpoint->id, endpoint->doorbell_segment,
                                          endpoint->settings->host_id));
    enum shoal_status status = shoal_bootstrap_exchange(bootstrap, endpoint->log, "blobs", &meeting.blobs[bootstrap->rank],
                                                        meeting.blobs, sizeof meeting.blobs[0], timeout_ms);
    meeting.deadline_ns = deadline_ns;
    if (status == SHOAL_OK)
        status = meet_all(endpoint, &meeting, places_out);
    shoal_shm_link_meeting_fini(&meeting);
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

/* ---- Memory for peers ---------------------------------------------------------------------------------------------------- */

typedef uint64_t (*key_fn)(const struct shoal_shm_export *export);

static uint64_t begin_of(const struct shoal_shm_export *export)
{
    return (uintptr_t) export->begin;
}

static uint64_t id_of(const struct shoal_shm_export *export)
{
    return export->id;
}

/* How many of those sorted by a key have it at most so high. */
static size_t count_up_to(struct shoal_shm_export *const *sorted, size_t count, key_fn key_of, uint64_t key)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (key_of(sorted[middle]) <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void put_in(struct shoal_shm_export **sorted, size_t count, key_fn key_of, struct shoal_shm_export *export)
{
    const size_t at = count_up_to(sorted, count, key_of, key_of(export));
    memmove(sorted + at + 1, sorted + at, (count - at) * sizeof(struct shoal_shm_export *));
    sorted[at] = export;
}

static void take_out(struct shoal_shm_export **sorted, size_t count, key_fn key_of, const struct shoal_shm_export *export)
{
    size_t after = count_up_to(sorted, count, key_of, key_of(export));
    while (sorted[after - 1] != export) /* another begins there: memory that was unmapped and is still registered */
        after--;
    memmove(sorted + after - 1, sorted + after, (count - after) * sizeof(struct shoal_shm_export *));
}

static struct shoal_shm_export *find_number(const struct shoal_shm_endpoint *endpoint, uint64_t id)
{
    const size_t after = count_up_to(endpoint->numbered, endpoint->export_count, id_of, id);
    return after && endpoint->numbered[after - 1]->id == id ? endpoint->numbered[after - 1] : NULL;
}

static uint64_t next_number(struct shoal_shm_endpoint *endpoint)
{
    do
        endpoint->next_export = endpoint->next_export < EXPORT_MAX ? endpoint->next_export + 1 : 1;
    while (find_number(endpoint, endpoint->next_export));
    return endpoint->next_export;
}

static enum shoal_status add_export(struct shoal_shm_endpoint *endpoint, struct shoal_segment *segment, char *begin,
                                    size_t bytes)
{
    struct shoal_shm_export *export = calloc(1, sizeof *export);
    struct shoal_shm_export **exports = shm_endpoint_grow(endpoint->exports, endpoint->export_count, sizeof *exports);
    endpoint->exports = exports ? exports : endpoint->exports;
    struct shoal_shm_export **numbered = shm_endpoint_grow(endpoint->numbered, endpoint->export_count, sizeof *numbered);
    endpoint->numbered = numbered ? numbered : endpoint->numbered;
    if (!export || !exports || !numbered) {
        free(export);
        shoal_segment_put(segment);
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "shm", "no memory for the description of a segment");
    }
    *export = (struct shoal_shm_export){.id = next_number(endpoint), .segment = segment, .begin = begin, .bytes = bytes};
    put_in(exports, endpoint->export_count, begin_of, export);
    put_in(numbered, endpoint->export_count++, id_of, export);
    return SHOAL_OK;
}

/* Nobody knows it any more by this number. */
static void forget_told(struct shoal_shm_endpoint *endpoint, struct shoal_shm_export *export)
{
    for (size_t p = 0; p < export->told_count; p++) {
        if (export->is_told[p])
            tell_gone(endpoint, endpoint->peers[p], export->id);
        export->is_told[p] = false;
    }
    export->known_to = 0;
}

static void end_export(struct shoal_shm_endpoint *endpoint, struct shoal_shm_export *export)
{
    forget_told(endpoint, export);
    shoal_segment_release(export->segment, &endpoint->budget);
    take_out(endpoint->exports, endpoint->export_count, begin_of, export);
    take_out(endpoint->numbered, endpoint->export_count--, id_of, export);
    free(export->is_told);
    free(export);
}

/* The bytes from where the user's begin to the segment's end. */
static size_t room_of(const struct shoal_shm_export *export)
{
    return export->segment->bytes - (size_t)(export->begin - export->segment->base);
}

static void count_kept(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_export *export, bool is_kept)
{
    SHOAL_ASSERT(is_kept || (endpoint->kept_count > 0 && endpoint->kept_bytes >= room_of(export)));
    endpoint->kept_count = is_kept ? endpoint->kept_count + 1 : endpoint->kept_count - 1;
    endpoint->kept_bytes = is_kept ? endpoint->kept_bytes + room_of(export) : endpoint->kept_bytes - room_of(export);
}

static void end_oldest(struct shoal_shm_endpoint *endpoint)
{
    struct shoal_shm_export *oldest = NULL;
    for (size_t i = 0; i < endpoint->export_count; i++) {
        struct shoal_shm_export *export = endpoint->exports[i];
        if (export->freed && (!oldest || export->freed < oldest->freed))
            oldest = export;
    }
    SHOAL_ASSERT(oldest); /* the counts say that there is one */
    count_kept(endpoint, oldest, false);
    shoal_segment_discard(oldest->segment); /* peers may unmap it later */
    end_export(endpoint, oldest);
}

static void keep_at_most(struct shoal_shm_endpoint *endpoint, uint64_t bytes, size_t count)
{
    while (endpoint->kept_bytes > bytes || endpoint->kept_count > count)
        end_oldest(endpoint);
}

/* The smallest that is kept and holds so many bytes, of which it may waste a quarter as many. */
static void *take_kept(struct shoal_shm_endpoint *endpoint, size_t bytes)
{
    struct shoal_shm_export *best = NULL;
    for (size_t i = 0; i < endpoint->export_count; i++) {
        struct shoal_shm_export *export = endpoint->exports[i];
        if (export->freed && room_of(export) >= bytes && room_of(export) - bytes <= SHOAL_PAGE + bytes / 4 &&
            (!best || room_of(export) < room_of(best)))
            best = export;
    }
    if (!best)
        return NULL;
    best->freed = 0;
    best->bytes = bytes;
    count_kept(endpoint, best, false);
    return best->begin;
}

enum shoal_status shoal_shm_endpoint_reserve(struct shoal_shm_endpoint *endpoint, struct shoal_segment *segment, uint64_t begin,
                                             uint64_t bytes, const char *what)
{
    lock(endpoint);
    if (endpoint->kept_count && bytes > shoal_segment_room(&endpoint->budget))
        keep_at_most(endpoint, 0, 0);
    unlock(endpoint);
    return shoal_segment_reserve(segment, endpoint->log, begin, bytes, &endpoint->budget, what);
}

enum shoal_status shoal_shm_endpoint_alloc(struct shoal_shm_endpoint *endpoint, size_t bytes, void **memory_out)
{
    struct shoal_segment *segment;
    const size_t turn = atomic_fetch_add_explicit(&endpoint->staggers, 1, memory_order_relaxed);
    const size_t pad = ((size_t)endpoint->rank * 7 + turn) % STAGGER_PAGES * SHOAL_PAGE;
    if (bytes > OFFSET_MASK - pad - SHOAL_PAGE)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm",
                              "shoal_mem_alloc of %zu bytes: at most a TiB in one piece", bytes);
    lock(endpoint);
    void *kept = take_kept(endpoint, bytes);
    unlock(endpoint);
    if (kept) {
        *memory_out = kept;
        return SHOAL_OK;
    }
    const size_t total = shoal_round_up(shoal_max_size(bytes, 1), SHOAL_PAGE) + pad;
    char what[64];
    snprintf(what, sizeof what, "shoal_mem_alloc of %zu bytes", bytes);
    SHOAL_TRY(shoal_segment_create(endpoint->log, "shoal-memory", total, &segment));
    enum shoal_status status = shoal_shm_endpoint_reserve(endpoint, segment, pad, total - pad, what);
    if (status != SHOAL_OK) {
        shoal_segment_put(segment);
        return status;
    }
    char *begin = segment->base + pad;
    lock(endpoint);
    status = add_export(endpoint, segment, begin, bytes);
    unlock(endpoint);
    if (status == SHOAL_OK)
        *memory_out = begin;
    return status;
}

/* What is known before the end of these bytes ends before they begin. */
static bool overlaps_none(const struct shoal_shm_endpoint *endpoint, const char *begin, size_t bytes)
{
    const size_t before_end = count_up_to(endpoint->exports, endpoint->export_count, begin_of, (uintptr_t)begin + bytes - 1);
    return !before_end || endpoint->exports[before_end - 1]->begin + endpoint->exports[before_end - 1]->bytes <= begin;
}

enum shoal_status shoal_shm_endpoint_register(struct shoal_shm_endpoint *endpoint, void *memory, size_t bytes, int fd,
                                              uint64_t offset)
{
    const size_t within = (uintptr_t)memory % SHOAL_PAGE;
    struct shoal_segment *segment;
    struct stat file;
    if (!overlaps_none(endpoint, memory, bytes))
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm", "shoal_mem_register: %p overlaps memory already known",
                              memory);
    if (fd < 0) /* remembered, so that deregister finds it; peers cannot map it */
        return add_export(endpoint, NULL, memory, bytes);
    if (fstat(fd, &file) != 0 || (uint64_t)file.st_size < offset || (uint64_t)file.st_size - offset < bytes)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm",
                              "shoal_mem_register: descriptor %d does not hold %zu bytes from %llu", fd, bytes,
                              (unsigned long long)offset);
    if (offset % SHOAL_PAGE != within)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm",
                              "shoal_mem_register: address %p cannot map offset %llu (they differ within a page)", memory,
                              (unsigned long long)offset);
    if (bytes > OFFSET_MASK - SHOAL_PAGE)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm",
                              "shoal_mem_register of %zu bytes: at most a TiB in one piece", bytes);
    SHOAL_TRY(shoal_segment_wrap(endpoint->log, (char *)memory - within, bytes + within, fd, offset - within, &segment));
    return add_export(endpoint, segment, memory, bytes);
}

/* The one in use that begins there; NULL: there is none. */
static struct shoal_shm_export *find_begin(struct shoal_shm_endpoint *endpoint, const void *memory, bool is_registered)
{
    size_t after = count_up_to(endpoint->exports, endpoint->export_count, begin_of, (uintptr_t)memory);
    for (; after && endpoint->exports[after - 1]->begin == memory; after--) {
        struct shoal_shm_export *export = endpoint->exports[after - 1];
        if (!export->freed && (!export->segment || export->segment->is_foreign) == is_registered)
            return export;
    }
    return NULL;
}

static enum shoal_status end_found(struct shoal_shm_endpoint *endpoint, void *memory, bool is_registered)
{
    struct shoal_shm_export *export = find_begin(endpoint, memory, is_registered);
    if (!export)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_ARGUMENT, "shm", "%p is not memory of %s", memory,
                              is_registered ? "shoal_mem_register" : "shoal_mem_alloc");
    end_export(endpoint, export);
    shoal_shm_endpoint_drain(endpoint);
    return SHOAL_OK;
}

enum shoal_status shoal_shm_endpoint_free(struct shoal_shm_endpoint *endpoint, void *memory)
{
    return end_found(endpoint, memory, false);
}

enum shoal_status shoal_shm_endpoint_deregister(struct shoal_shm_endpoint *endpoint, void *memory)
{
    return end_found(endpoint, memory, true);
}

enum shoal_status shoal_shm_endpoint_keep(struct shoal_shm_endpoint *endpoint, void *memory)
{
    const uint64_t most = endpoint->settings->memory_kept;
    struct shoal_shm_export *export = find_begin(endpoint, memory, false);
    if (export && room_of(export) > most)
        shoal_segment_discard(export->segment); /* peers that do nothing now unmap it much later */
    if (!export || room_of(export) > most)
        return shoal_shm_endpoint_free(endpoint, memory);
    keep_at_most(endpoint, most - room_of(export), KEPT_MAX - 1);
    export->freed = ++endpoint->frees;
    count_kept(endpoint, export, true);
    shoal_shm_endpoint_drain(endpoint);
    return SHOAL_OK;
}

static void renew(struct shoal_shm_endpoint *endpoint, struct shoal_shm_export *export)
{
    const uint64_t pad = (uint64_t)(export->begin - export->segment->base);
    enum shoal_status status = shoal_segment_renew(export->segment, endpoint->log, pad);
    if (status != SHOAL_OK)
        return; /* said; the memory stays where it is */
    forget_told(endpoint, export);
    take_out(endpoint->numbered, endpoint->export_count, id_of, export);
    export->id = next_number(endpoint);
    put_in(endpoint->numbered, endpoint->export_count - 1, id_of, export);
}

void shoal_shm_endpoint_renew(struct shoal_shm_endpoint *endpoint, shoal_location location)
{
    struct shoal_shm_export *export = find_number(endpoint, shoal_location_segment(location));
    if (export && export->segment && !export->segment->is_foreign)
        renew(endpoint, export);
}

static bool is_room_for_told(struct shoal_shm_endpoint *endpoint, struct shoal_shm_export *export)
{
    if (export->told_count == endpoint->peer_count)
        return true;
    bool *is_told = realloc(export->is_told, endpoint->peer_count * sizeof *is_told);
    if (!is_told)
        return false;
    for (size_t p = export->told_count; p < endpoint->peer_count; p++)
        is_told[p] = false;
    export->is_told = is_told;
    export->told_count = endpoint->peer_count;
    return true;
}

/* Peers learn of memory when it is first used with them; true when all of the group know it. One that has ended does not
 * count. */
static bool shm_endpoint_announce(struct shoal_shm_endpoint *endpoint, struct shoal_shm_export *export,
                                  const struct shoal_shm_group *group)
{
    if (export->known_to == group->comm)
        return true;
    if (!is_room_for_told(endpoint, export))
        return false;
    bool is_known = true;
    for (int r = 0; r < group->size; r++) {
        struct shoal_shm_peer *peer = group->peers[r];
        if (!peer || export->is_told[peer->index])
            continue;
        export->is_told[peer->index] = pass_segment(peer, SHOAL_SHM_LINK_MEMORY, export->id, export->segment);
        is_known &= export->is_told[peer->index] || shoal_membership_process_has_ended(&peer->process);
    }
    export->known_to = is_known ? group->comm : 0;
    return is_known;
}

/* The one in use in which all these bytes lie; NULL: there is none. */
static struct shoal_shm_export *find_holder(const struct shoal_shm_endpoint *endpoint, const char *address, size_t bytes)
{
    const size_t after = count_up_to(endpoint->exports, endpoint->export_count, begin_of, (uintptr_t)address);
    struct shoal_shm_export *export = after ? endpoint->exports[after - 1] : NULL;
    const bool holds = export && !export->freed && bytes <= export->bytes && address <= export->begin + (export->bytes - bytes);
    return holds ? export : NULL;
}

shoal_location shoal_shm_endpoint_locate(struct shoal_shm_endpoint *endpoint, const struct shoal_shm_group *group,
                                         const void *address, size_t bytes)
{
    if (++endpoint->locates % DRAIN_EVERY == 0) /* memory that peers have freed is unmapped here now and then */
        shoal_shm_endpoint_drain(endpoint);
    struct shoal_shm_export *export = find_holder(endpoint, address, bytes);
    if (!export || !export->segment || !shm_endpoint_announce(endpoint, export, group))
        return 0;
    return export->id << SHOAL_LOCATION_OFFSET_BITS | (uint64_t)((const char *)address - export->segment->base);
}

const struct shoal_shm_export *shoal_shm_endpoint_find(const struct shoal_shm_endpoint *endpoint, const void *address,
                                                       size_t bytes)
{
    const struct shoal_shm_export *export = find_holder(endpoint, address, bytes);
    return export && export->segment && !export->segment->is_foreign ? export : NULL;
}

void *shoal_shm_endpoint_reach(struct shoal_shm_endpoint *endpoint, struct shoal_shm_peer *peer, shoal_location location,
                               size_t bytes)
{
    const uint64_t offset = location & OFFSET_MASK;
    const struct shoal_shm_mapped *mapped = find_mapped(peer, shoal_location_segment(location));
    if (!mapped) {
        drain_peer(endpoint, peer);
        mapped = find_mapped(peer, shoal_location_segment(location));
    }
    if (!mapped || offset > mapped->segment->bytes || bytes > mapped->segment->bytes - offset)
        return NULL;
    return mapped->segment->base + offset;
}

void *shoal_shm_endpoint_own(struct shoal_shm_endpoint *endpoint, shoal_location location)
{
    const struct shoal_shm_export *export = find_number(endpoint, shoal_location_segment(location));
    return export ? export->segment->base + (location & OFFSET_MASK) : NULL;
}

/* ---- Sleeping and waking ------------------------------------------------------------------------------------------------- */

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void shoal_shm_endpoint_doze(struct shoal_shm_endpoint *endpoint)
{
    /* seq_cst: this store comes before the sleeper's last look for work; with the fence between a waker's work and its look at
     * `asleep`, one of the two sees the other. */
    atomic_store_explicit(&endpoint->doorbell->asleep, 1, memory_order_seq_cst);
    shoal_shm_endpoint_fence_all(endpoint);
}

/* Without the others' fence a waker may look at `asleep` before its work is seen here: then it rings no doorbell. */
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
    futex(&endpoint->doorbell->asleep, FUTEX_WAIT, 1, &timeout); /* returns at once when the doorbell was rung since _doze */
}

void shoal_shm_endpoint_awake(struct shoal_shm_endpoint *endpoint)
{
    shoal_shm_doorbell_ring(endpoint->doorbell); /* not a bare store: another thread may have gone to sleep since */
}

void shoal_shm_doorbell_ring(struct shoal_shm_doorbell *doorbell)
{
    if (atomic_exchange_explicit(&doorbell->asleep, 0, memory_order_seq_cst))
        futex(&doorbell->asleep, FUTEX_WAKE, INT32_MAX, NULL);
}

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

/* A place is the number of the look, and the core. relaxed throughout: a place publishes nothing else. */
#define PLACE_CORE_BITS 16
#define PLACE_CORE_MASK ((UINT64_C(1) << PLACE_CORE_BITS) - 1)

bool shoal_shm_endpoint_meet_on_core(struct shoal_shm_endpoint *endpoint, int core, cpu_set_t *taken_out)
{
    const uint64_t look = (atomic_load_explicit(&endpoint->doorbell->place, memory_order_relaxed) >> PLACE_CORE_BITS) + 1;
    bool must_leave = false;
    CPU_ZERO(taken_out);
    CPU_SET((size_t)core, taken_out);
    atomic_store_explicit(&endpoint->doorbell->place, look << PLACE_CORE_BITS | (uint64_t)core, memory_order_relaxed);
    for (size_t i = 0; i < endpoint->peer_count; i++) {
        struct shoal_shm_peer *peer = endpoint->peers[i];
        if (!peer->doorbell) /* its meeting failed */
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
