#include "transport/fabric/lane.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

/* Writes that have not come back from a poll. Powers of two, because both queues are rings. */
#define WRITES 128u
#define EVENTS 1024u
/* The most events of one turn: each write fails, and the endpoint passes two events for each of its entries. */
#define EVENTS_OF_TURN (WRITES + 64u)
/* A lane is silent if nothing has come for this long. Until then its thread yields between turns. */
#define BUSY_NS UINT64_C(50000)
/* A silent lane sleeps at its endpoint's descriptor. Without a reliable one it sleeps for these times, and longer once it has
 * been silent for REST_NS. */
#define NAP_MIN_NS UINT64_C(50000)
#define NAP_MAX_NS SHOAL_NS_PER_MS
#define NAP_SHARE 16
#define REST_NS (100 * SHOAL_NS_PER_MS)
/* Wakes in a row without an event after which the descriptor is not trusted for a while. Many, because each part of a long
 * write also wakes the thread. */
#define FALSE_WAKES_MAX 1000

/* A probe that the provider refuses for this long has failed. Otherwise it would be tried again for ever if its address is that
 * of another program, or if the provider does not report that a connection failed. */
#define PROBE_NS (5 * SHOAL_NS_PER_S)

struct lane_write {
    struct shoal_fabric_write write;
    struct shoal_fabric_memory to; /* a copy of *write.to, which may end while the write waits */
    void *owner;
    unsigned *under_way; /* as in the write, but counted by the thread that makes progress */
    bool is_probe;
    uint64_t until_ns;       /* a probe has failed then; 0 for others */
    bool is_dropped;         /* written and read with `calls` held */
    struct lane_write *next; /* in `free_writes` or `unbegun` */
};

enum lane_event_kind { LANE_COMPLETED, LANE_FAILED, LANE_WRITTEN, LANE_MESSAGE };

struct lane_event {
    enum lane_event_kind kind;
    uint32_t immediate;
    struct lane_write *write; /* NULL if a receive failed */
    char *text;               /* the reason of a failure, which the reader frees; NULL if out of memory */
};

/* A queue of one writer and one reader, without its places. Both numbers only grow. */
struct lane_queue {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t end;   /* written by the writer */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t begin; /* written by the reader */
};

struct shoal_lane {
    struct lane_queue wanted_queue, events_queue;
    struct lane_write *wanted[WRITES];
    struct lane_event events[EVENTS];
    struct shoal_lane_options options;
    struct shoal_fabric_endpoint *endpoint;
    pthread_t thread;
    bool has_thread;
    int wake_fd;
    pthread_mutex_t calls;                     /* held in each call of the endpoint, and for `unbegun` */
    atomic_uint callers;                       /* other threads that want it: the lane's thread lets them go first */
    struct lane_write *unbegun, **unbegun_end; /* writes that the provider has refused, in order */
    atomic_bool must_stop;
    atomic_bool is_asleep;
    atomic_bool is_resting; /* asleep without a descriptor that wakes it */
    /* Only for the thread that makes progress. */
    struct lane_write writes[WRITES];
    struct lane_write *free_writes;
    uint64_t bytes;
    struct shoal_fabric_addresses addresses;
    /* Only for the lane's thread. */
    bool is_refused; /* `unbegun` has writes */
    bool is_full;    /* too many events wait for a poll: those of the endpoint also wait */
    bool was_woken;  /* by the descriptor, since the last turn */
    unsigned false_wakes;
    uint64_t distrusted_until_ns; /* the descriptor */
};

/* ---- Queues -------------------------------------------------------------------------------------------------------------- */

/* acquire: pairs with lane_publish(), so that the reader sees the place. */
static uint32_t lane_filled(struct lane_queue *queue)
{
    return atomic_load_explicit(&queue->end, memory_order_acquire) - atomic_load_explicit(&queue->begin, memory_order_relaxed);
}

/* For the writer. acquire: pairs with lane_consume(), so that the reader has finished with the places. */
static uint32_t lane_used(struct lane_queue *queue)
{
    return atomic_load_explicit(&queue->end, memory_order_relaxed) - atomic_load_explicit(&queue->begin, memory_order_acquire);
}

static void lane_publish(struct lane_queue *queue)
{
    const uint32_t end = atomic_load_explicit(&queue->end, memory_order_relaxed);
    atomic_store_explicit(&queue->end, end + 1, memory_order_release);
}

static void lane_consume(struct lane_queue *queue)
{
    const uint32_t begin = atomic_load_explicit(&queue->begin, memory_order_relaxed);
    SHOAL_ASSERT(lane_filled(queue) > 0);
    atomic_store_explicit(&queue->begin, begin + 1, memory_order_release);
}

static void push_event(struct shoal_lane *lane, struct lane_event event)
{
    SHOAL_ASSERT(lane_used(&lane->events_queue) < EVENTS); /* a turn begins only with room for all of its events */
    lane->events[atomic_load_explicit(&lane->events_queue.end, memory_order_relaxed) % EVENTS] = event;
    lane_publish(&lane->events_queue);
}

/* ---- The endpoint's calls ------------------------------------------------------------------------------------------------ */

static void lane_lock(struct shoal_lane *lane)
{
    atomic_fetch_add_explicit(&lane->callers, 1, memory_order_relaxed);
    pthread_mutex_lock(&lane->calls);
    atomic_fetch_sub_explicit(&lane->callers, 1, memory_order_relaxed);
}

static void lane_lock_last(struct shoal_lane *lane)
{
    while (atomic_load_explicit(&lane->callers, memory_order_relaxed))
        sched_yield();
    pthread_mutex_lock(&lane->calls);
}

static void lane_unlock(struct shoal_lane *lane)
{
    pthread_mutex_unlock(&lane->calls);
}

/* ---- The lane's thread --------------------------------------------------------------------------------------------------- */

static void lane_on_message(void *arg, const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    push_event(arg, (struct lane_event){.kind = LANE_MESSAGE});
}

static void lane_on_written(void *arg, uint32_t immediate)
{
    push_event(arg, (struct lane_event){.kind = LANE_WRITTEN, .immediate = immediate});
}

static void lane_on_completed(void *arg, void *owner)
{
    push_event(arg, (struct lane_event){.kind = LANE_COMPLETED, .write = owner});
}

static void lane_on_failed(void *arg, void *owner, const char *text)
{
    push_event(arg, (struct lane_event){.kind = LANE_FAILED, .write = owner, .text = strdup(text)});
}

static bool is_given_up(const struct lane_write *write)
{
    return write->is_probe && shoal_clock_ns() >= write->until_ns;
}

/* Returns false if the provider is busy. */
static bool start_write(struct shoal_lane *lane, struct lane_write *write)
{
    const enum shoal_status status = write->is_dropped ? SHOAL_OK : shoal_fabric_endpoint_write(lane->endpoint, &write->write);
    if (status == SHOAL_PENDING && !is_given_up(write))
        return false;
    if (write->is_dropped)
        lane_on_completed(lane, write);
    else if (status == SHOAL_PENDING)
        lane_on_failed(lane, write, "no connection");
    else if (status != SHOAL_OK)
        lane_on_failed(lane, write, "cannot write (see above)");
    return true;
}

static void take_wanted(struct shoal_lane *lane)
{
    for (; lane_filled(&lane->wanted_queue); lane_consume(&lane->wanted_queue)) {
        struct lane_write *const write =
            lane->wanted[atomic_load_explicit(&lane->wanted_queue.begin, memory_order_relaxed) % WRITES];
        write->next = NULL;
        *lane->unbegun_end = write;
        lane->unbegun_end = &write->next;
    }
}

/* Returns true if an earlier write to the same peer was refused. */
static bool has_refused_peer(const struct shoal_lane *lane, const struct lane_write *write)
{
    const struct lane_write *earlier = lane->unbegun;
    while (earlier != write && earlier->write.peer != write->write.peer)
        earlier = earlier->next;
    return earlier != write;
}

/* A peer that accepts no writes does not delay those to others. */
static bool start_wanted(struct shoal_lane *lane)
{
    struct lane_write **link = &lane->unbegun;
    bool did = false;
    take_wanted(lane);
    while (*link) {
        struct lane_write *const write = *link, *const next = write->next;
        if (!write->is_dropped && has_refused_peer(lane, write)) {
            link = &write->next;
        } else if (start_write(lane, write)) { /* its entry may be in use again */
            *link = next;
            did = true;
        } else {
            link = &write->next;
        }
    }
    lane->unbegun_end = link;
    lane->is_refused = lane->unbegun != NULL;
    return did;
}

static void judge_lane_wake(struct shoal_lane *lane, bool was_true)
{
    if (lane->was_woken)
        lane->false_wakes = was_true ? 0 : lane->false_wakes + 1;
    lane->was_woken = false;
    if (lane->false_wakes < FALSE_WAKES_MAX)
        return;
    lane->false_wakes = 0;
    lane->distrusted_until_ns = shoal_clock_ns() + SHOAL_FABRIC_DISTRUST_NS;
}

/* Starts writes and receives events. Returns true if it did any of them. */
static bool take_lane_turn(struct shoal_lane *lane)
{
    const struct shoal_fabric_handler handler = {lane, lane_on_message, lane_on_written, lane_on_completed, lane_on_failed};
    const uint32_t before = atomic_load_explicit(&lane->events_queue.end, memory_order_relaxed);
    lane->is_full = EVENTS - lane_used(&lane->events_queue) < EVENTS_OF_TURN;
    if (lane->is_full)
        return false;
    lane_lock_last(lane);
    bool did = start_wanted(lane);
    did |= shoal_fabric_endpoint_poll(lane->endpoint, &handler);
    lane_unlock(lane);
    judge_lane_wake(lane, did);
    if (atomic_load_explicit(&lane->events_queue.end, memory_order_relaxed) != before)
        lane->options.wake(lane->options.wake_arg);
    return did;
}

static bool has_descriptor(const struct shoal_lane *lane)
{
    return shoal_fabric_endpoint_wait_fd(lane->endpoint) >= 0 && shoal_clock_ns() >= lane->distrusted_until_ns;
}

/* Returns true if the next turn has something to do. */
static bool has_new_work(const struct shoal_lane *lane)
{
    const uint32_t end = atomic_load_explicit(&lane->wanted_queue.end, memory_order_acquire);
    const uint32_t begin = atomic_load_explicit(&lane->wanted_queue.begin, memory_order_relaxed);
    return (begin != end && !lane->is_full) || atomic_load_explicit(&lane->must_stop, memory_order_relaxed);
}

/* Returns true if the descriptor wakes the thread when something comes. */
static bool may_wait_at_descriptor(struct shoal_lane *lane)
{
    if (lane->is_full || !has_descriptor(lane))
        return false;
    lane_lock_last(lane);
    const bool may_wait = shoal_fabric_endpoint_may_wait(lane->endpoint);
    lane_unlock(lane);
    return may_wait;
}

static uint64_t nap_length(const struct shoal_lane *lane, bool at_descriptor, uint64_t silent_ns)
{
    const uint64_t nap_ns = silent_ns / NAP_SHARE < NAP_MAX_NS ? silent_ns / NAP_SHARE : NAP_MAX_NS;
    const bool is_held_up = lane->is_refused || lane->is_full, has_wake = has_descriptor(lane);
    if (!is_held_up && (at_descriptor || (!has_wake && silent_ns >= REST_NS)))
        return REST_NS;
    return nap_ns > NAP_MIN_NS ? nap_ns : NAP_MIN_NS;
}

/* Returns true if another thread has woken this one. */
static bool nap(struct shoal_lane *lane, bool at_descriptor, uint64_t silent_ns)
{
    const uint64_t nap_ns = nap_length(lane, at_descriptor, silent_ns);
    const struct timespec timeout = {0, (long)nap_ns};
    struct pollfd entries[] = {{lane->wake_fd, POLLIN, 0},
                               {at_descriptor ? shoal_fabric_endpoint_wait_fd(lane->endpoint) : -1, POLLIN, 0}};
    eventfd_t wakes = 0;
    atomic_store_explicit(&lane->is_resting, !at_descriptor && nap_ns == REST_NS, memory_order_relaxed);
    if (ppoll(entries, SHOAL_COUNT_OF(entries), &timeout, NULL) > 0) {
        lane->was_woken = entries[1].revents != 0;
        if (entries[0].revents)
            (void)eventfd_read(lane->wake_fd, &wakes);
    }
    atomic_store_explicit(&lane->is_resting, false, memory_order_relaxed);
    return wakes > 0;
}

/* Sleeps, unless there is work, or the provider wants to be polled again soon. Either this look finds a new write, or its
 * writer finds the thread asleep: both sides have a full fence in between. Returns true if another thread has woken this
 * one. */
static bool lane_sleep(struct shoal_lane *lane, uint64_t silent_ns)
{
    bool was_woken = false;
    atomic_store_explicit(&lane->is_asleep, true, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (!has_new_work(lane)) {
        const bool at_descriptor = may_wait_at_descriptor(lane);
        if (!at_descriptor && !lane->is_full && has_descriptor(lane) && silent_ns < REST_NS)
            sched_yield();
        else
            was_woken = nap(lane, at_descriptor, silent_ns);
    }
    atomic_store_explicit(&lane->is_asleep, false, memory_order_relaxed);
    return was_woken;
}

static void *run_lane(void *arg)
{
    struct shoal_lane *lane = arg;
    uint64_t silent_since_ns = shoal_clock_ns();
    while (!atomic_load_explicit(&lane->must_stop, memory_order_relaxed)) {
        const bool did = take_lane_turn(lane);
        const uint64_t now_ns = shoal_clock_ns();
        silent_since_ns = did ? now_ns : silent_since_ns;
        if (now_ns - silent_since_ns < BUSY_NS)
            sched_yield();
        else if (lane_sleep(lane, now_ns - silent_since_ns))
            silent_since_ns = shoal_clock_ns();
    }
    return NULL;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void wake_lane(struct shoal_lane *lane)
{
    (void)eventfd_write(lane->wake_fd, 1);
}

static enum shoal_status start_lane_thread(struct shoal_lane *lane)
{
    char name[16]; /* the kernel keeps 15 bytes */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals belong to the program's threads */
    const int error = pthread_create(&lane->thread, NULL, run_lane, lane);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return shoal_log_fail(lane->options.log, SHOAL_ERR_SYSTEM, "fabric", "cannot make a thread for the network: %s",
                              strerror(error));
    lane->has_thread = true;
    snprintf(name, sizeof name, "shoal-net-%u", (unsigned)lane->options.number % 100);
    (void)pthread_setname_np(lane->thread, name);
    return SHOAL_OK;
}

static enum shoal_status open_lane(struct shoal_lane *lane)
{
    const struct shoal_lane_options *options = &lane->options;
    for (unsigned i = 0; i < WRITES; i++) {
        lane->writes[i].next = lane->free_writes;
        lane->free_writes = &lane->writes[i];
    }
    if (lane->wake_fd < 0)
        return shoal_log_fail(options->log, SHOAL_ERR_SYSTEM, "fabric", "cannot make an eventfd: %s", strerror(errno));
    SHOAL_TRY(shoal_fabric_endpoint_open_lane(options->library, options->info, options->port_low, options->port_high,
                                              options->log, &lane->endpoint));
    lane->addresses.endpoint = lane->endpoint;
    return start_lane_thread(lane);
}

enum shoal_status shoal_lane_open(const struct shoal_lane_options *options, struct shoal_lane **lane_out)
{
    SHOAL_ASSERT(options->wake && options->number >= 1 && options->number <= SHOAL_LANES_MAX);
    struct shoal_lane *lane = aligned_alloc(SHOAL_CACHE_PAIR, sizeof *lane);
    if (!lane)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "fabric", "no memory for a thread of the network");
    memset(lane, 0, sizeof *lane);
    lane->options = *options;
    lane->unbegun_end = &lane->unbegun;
    pthread_mutex_init(&lane->calls, NULL);
    lane->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const enum shoal_status status = open_lane(lane);
    if (status == SHOAL_OK)
        *lane_out = lane;
    else
        shoal_lane_close(lane);
    return status;
}

void shoal_lane_stop(struct shoal_lane *lane)
{
    if (lane->has_thread) {
        atomic_store_explicit(&lane->must_stop, true, memory_order_relaxed);
        wake_lane(lane);
        pthread_join(lane->thread, NULL);
        lane->has_thread = false;
    }
    if (lane->endpoint)
        shoal_fabric_endpoint_stop(lane->endpoint);
}

void shoal_lane_close(struct shoal_lane *lane)
{
    if (!lane)
        return;
    SHOAL_ASSERT(!lane->has_thread);
    for (; lane_filled(&lane->events_queue); lane_consume(&lane->events_queue))
        free(lane->events[atomic_load_explicit(&lane->events_queue.begin, memory_order_relaxed) % EVENTS].text);
    shoal_fabric_endpoint_close(lane->endpoint);
    shoal_fabric_addresses_close(&lane->addresses);
    if (lane->wake_fd >= 0)
        close(lane->wake_fd);
    pthread_mutex_destroy(&lane->calls);
    free(lane);
}

const struct shoal_fabric_address *shoal_lane_address(const struct shoal_lane *lane)
{
    return shoal_fabric_endpoint_address(lane->endpoint);
}

const char *shoal_lane_adapter(const struct shoal_lane *lane)
{
    return shoal_fabric_provider_adapter(lane->options.info);
}

/* ---- Peers and memory ---------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_lane_meet(struct shoal_lane *lane, const struct shoal_fabric_address *address,
                                  struct shoal_fabric_met **met_out, bool *is_new_out)
{
    SHOAL_ASSERT(lane->has_thread);
    lane_lock(lane);
    const enum shoal_status status =
        shoal_fabric_addresses_meet(&lane->addresses, address, lane->options.log, met_out, is_new_out);
    lane_unlock(lane);
    return status;
}

void shoal_lane_part(struct shoal_lane *lane, struct shoal_fabric_met *met)
{
    lane_lock(lane);
    shoal_fabric_addresses_part(&lane->addresses, met);
    lane_unlock(lane);
}

enum shoal_status shoal_lane_register(struct shoal_lane *lane, void *memory, size_t bytes,
                                      struct shoal_fabric_memory *memory_out)
{
    SHOAL_ASSERT(lane->has_thread && memory && bytes > 0);
    lane_lock(lane);
    const enum shoal_status status = shoal_fabric_endpoint_register(lane->endpoint, memory, bytes, memory_out);
    lane_unlock(lane);
    return status;
}

const char *shoal_lane_register_source(struct shoal_lane *lane, void *memory, size_t bytes,
                                       struct shoal_fabric_memory *memory_out)
{
    lane_lock(lane);
    const char *refusal = shoal_fabric_endpoint_register_source(lane->endpoint, memory, bytes, memory_out);
    lane_unlock(lane);
    return refusal;
}

void shoal_lane_unregister(struct shoal_lane *lane, struct shoal_fabric_memory *memory)
{
    lane_lock(lane);
    shoal_fabric_endpoint_unregister(lane->endpoint, memory);
    lane_unlock(lane);
}

/* ---- Writes and events --------------------------------------------------------------------------------------------------- */

static enum shoal_status begin_lane_write(struct shoal_lane *lane, const struct shoal_fabric_write *write, bool is_probe)
{
    struct lane_write *entry = lane->free_writes;
    SHOAL_ASSERT(lane->has_thread && write->to);
    if (!entry)
        return SHOAL_PENDING;
    SHOAL_ASSERT(lane_used(&lane->wanted_queue) < WRITES); /* each entry has a place */
    lane->free_writes = entry->next;
    *entry = (struct lane_write){
        .write = *write, .to = *write->to, .owner = write->owner, .under_way = write->under_way, .is_probe = is_probe};
    entry->until_ns = is_probe ? shoal_clock_ns() + PROBE_NS : 0;
    entry->write.to = &entry->to;
    entry->write.owner = entry;
    entry->write.under_way = NULL;
    if (entry->under_way)
        ++*entry->under_way;
    lane->bytes += write->bytes;
    lane->wanted[atomic_load_explicit(&lane->wanted_queue.end, memory_order_relaxed) % WRITES] = entry;
    lane_publish(&lane->wanted_queue);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with lane_sleep() */
    if (atomic_load_explicit(&lane->is_asleep, memory_order_relaxed))
        wake_lane(lane);
    return SHOAL_OK;
}

enum shoal_status shoal_lane_write(struct shoal_lane *lane, const struct shoal_fabric_write *write)
{
    return begin_lane_write(lane, write, false);
}

enum shoal_status shoal_lane_probe(struct shoal_lane *lane, const struct shoal_fabric_met *met,
                                   const struct shoal_fabric_memory *to, uint32_t immediate, void *owner)
{
    const struct shoal_fabric_write write = {
        .peer = met->at, .to = to, .source = &lane->options, .immediate = immediate, .owner = owner};
    return begin_lane_write(lane, &write, true);
}

uint64_t shoal_lane_bytes(const struct shoal_lane *lane)
{
    return lane->bytes;
}

static void drop_if_owned(struct lane_write *write, const void *begin, const void *end)
{
    if ((uintptr_t)write->owner >= (uintptr_t)begin && (uintptr_t)write->owner < (uintptr_t)end)
        write->is_dropped = true;
}

void shoal_lane_drop(struct shoal_lane *lane, const void *begin, const void *end)
{
    lane_lock(lane);
    for (struct lane_write *write = lane->unbegun; write; write = write->next)
        drop_if_owned(write, begin, end);
    for (uint32_t at = atomic_load_explicit(&lane->wanted_queue.begin, memory_order_relaxed);
         at != atomic_load_explicit(&lane->wanted_queue.end, memory_order_relaxed); at++)
        drop_if_owned(lane->wanted[at % WRITES], begin, end);
    lane_unlock(lane);
}

/* The entry is free again before the handler learns of it, which may write. */
static void *end_lane_write(struct shoal_lane *lane, struct lane_write *write)
{
    SHOAL_ASSERT(lane->bytes >= write->write.bytes);
    lane->bytes -= write->write.bytes;
    if (write->under_way)
        --*write->under_way;
    write->next = lane->free_writes;
    lane->free_writes = write;
    return write->owner;
}

/* Its owner may have ended. The peer's answer, or none, says whether the lane reaches it. */
static void end_probe(struct shoal_lane *lane, const struct lane_event *event)
{
    (void)end_lane_write(lane, event->write);
    if (event->kind == LANE_FAILED)
        shoal_log_line(lane->options.log, SHOAL_LOG_DEBUG, "fabric", "a lane does not reach a peer: %s",
                       event->text ? event->text : "no memory for the provider's text");
    free(event->text);
}

static void pass_event(struct shoal_lane *lane, const struct lane_event *event, const struct shoal_fabric_handler *handler)
{
    if (event->write && event->write->is_probe) {
        end_probe(lane, event);
        return;
    }
    void *const owner = event->write ? end_lane_write(lane, event->write) : NULL;
    switch (event->kind) {
    case LANE_COMPLETED:
        handler->completed(handler->arg, owner);
        break;
    case LANE_FAILED:
        handler->failed(handler->arg, owner, event->text ? event->text : "no memory for the provider's text");
        free(event->text);
        break;
    case LANE_WRITTEN:
        handler->written(handler->arg, event->immediate);
        break;
    case LANE_MESSAGE:
        handler->message(handler->arg, NULL, 0);
        break;
    }
}

void shoal_lane_expect(struct shoal_lane *lane)
{
    if (SHOAL_UNLIKELY(atomic_load_explicit(&lane->is_resting, memory_order_relaxed)))
        wake_lane(lane);
}

bool shoal_lane_poll(struct shoal_lane *lane, const struct shoal_fabric_handler *handler)
{
    bool did = false;
    shoal_lane_expect(lane); /* a thread that polls waits for something */
    while (lane_filled(&lane->events_queue)) {
        const uint32_t begin = atomic_load_explicit(&lane->events_queue.begin, memory_order_relaxed);
        const struct lane_event event = lane->events[begin % EVENTS];
        lane_consume(&lane->events_queue);
        pass_event(lane, &event, handler);
        did = true;
    }
    return did;
}
