#include "engine/progress_state.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "topology/cores.h"
#include "topology/limits.h"

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void ring(struct shoal_progress *progress)
{
    progress->doorbell.ops->ring(progress->doorbell.arg);
}

static bool make_locks(struct shoal_progress *progress)
{
    const bool has_lock = pthread_mutex_init(&progress->lock, NULL) == 0;
    const bool has_thread_lock = has_lock && pthread_mutex_init(&progress->thread_lock, NULL) == 0;
    if (has_thread_lock && pthread_cond_init(&progress->thread_wake, NULL) == 0)
        return true;
    if (has_thread_lock)
        pthread_mutex_destroy(&progress->thread_lock);
    if (has_lock)
        pthread_mutex_destroy(&progress->lock);
    return false;
}

enum shoal_status shoal_progress_create(struct shoal_log *log, const struct shoal_engine_settings *settings,
                                        struct shoal_doorbell doorbell, const volatile uint32_t *is_parent,
                                        struct shoal_progress **progress_out)
{
    struct shoal_progress *progress = calloc(1, sizeof *progress);
    if (!progress)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "engine", "no memory for a context");
    progress->log = log;
    progress->settings = settings;
    progress->is_parent = is_parent;
    progress->doorbell = doorbell;
    for (int seat = 0; seat < SHOAL_PROGRESS_SEATS; seat++)
        atomic_store_explicit(&progress->wake_fds[seat], -1, memory_order_relaxed);
    progress->anchor.ns_per_tick = shoal_clock_ns_per_tick();
    (void)shoal_clock_anchor_move(&progress->anchor);
    progress->yield_ns = settings->yield_us * 1000;
    if (!make_locks(progress)) {
        free(progress);
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "engine", "cannot make a lock");
    }
    shoal_progress_note_ranks(progress, 1);
    *progress_out = progress;
    return SHOAL_OK;
}

/* Returns the number of cores that all ranks of this host may use together. A rank that its launcher has bound sees only its
 * own share of them. */
static int cores_of_ranks(const struct shoal_progress *progress)
{
    const int cores = progress->doorbell.ops->cores(progress->doorbell.arg);
    return cores ? shoal_topology_quota_cores(cores) : shoal_topology_cores();
}

void shoal_progress_note_ranks(struct shoal_progress *progress, int local_ranks)
{
    shoal_progress_lock(progress);
    progress->local_ranks = local_ranks > progress->local_ranks ? local_ranks : progress->local_ranks;
    const bool has_cores = progress->local_ranks <= cores_of_ranks(progress);
    progress->spin_ns = has_cores ? progress->settings->spin_us * 1000 : 0;
    const bool may_move = has_cores && progress->local_ranks > 1 && strcmp(progress->settings->move, "no") != 0;
    progress->next_core_ns = may_move ? 0 : UINT64_MAX;
    shoal_progress_unlock(progress);
}

void shoal_progress_stop_thread(struct shoal_progress *progress)
{
    if (!progress->has_thread)
        return;
    pthread_mutex_lock(&progress->thread_lock);
    progress->must_stop = true;
    pthread_cond_signal(&progress->thread_wake);
    pthread_mutex_unlock(&progress->thread_lock);
    ring(progress);
    pthread_join(progress->thread, NULL);
    progress->has_thread = false;
}

void shoal_progress_destroy(struct shoal_progress *progress)
{
    if (!progress)
        return;
    SHOAL_ASSERT(!progress->engines && !progress->busy);
    shoal_progress_stop_thread(progress);
    for (int seat = 0; seat < SHOAL_PROGRESS_SEATS; seat++) {
        const int fd = atomic_load_explicit(&progress->wake_fds[seat], memory_order_relaxed);
        if (fd >= 0)
            close(fd);
    }
    pthread_cond_destroy(&progress->thread_wake);
    pthread_mutex_destroy(&progress->thread_lock);
    pthread_mutex_destroy(&progress->lock);
    free(progress);
}

/* ---- The lock ------------------------------------------------------------------------------------------------------------ */

static bool holds_lock(struct shoal_progress *progress)
{
    return atomic_load_explicit(&progress->owner, memory_order_relaxed) == (uintptr_t)pthread_self();
}

static void became_owner(struct shoal_progress *progress)
{
    atomic_store_explicit(&progress->owner, (uintptr_t)pthread_self(), memory_order_relaxed);
}

/* Removes engines whose operations are done from the busy list, so that progress need not visit every communicator. */
static void note_busy(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress) && progress->depth == 0);
    struct shoal_engine **link = &progress->busy;
    unsigned silent = 0;
    while (*link) {
        struct shoal_engine *engine = *link;
        if (shoal_engine_is_busy(engine)) {
            silent |= (engine->hosts > 1 ? SILENT_NETWORK : 0u) | (engine->awaits_operand ? SILENT_OWNER : 0u);
            link = &engine->busy_next;
        } else {
            engine->is_listed = false;
            *link = engine->busy_next;
        }
    }
    atomic_store_explicit(&progress->is_busy, progress->busy != NULL, memory_order_relaxed);
    atomic_store_explicit(&progress->silent, silent, memory_order_relaxed);
}

void shoal_progress_lock(struct shoal_progress *progress)
{
    if (!holds_lock(progress)) {
        pthread_mutex_lock(&progress->lock);
        became_owner(progress);
    }
    progress->depth++;
}

static bool try_lock(struct shoal_progress *progress)
{
    if (holds_lock(progress) || pthread_mutex_trylock(&progress->lock) != 0)
        return false;
    became_owner(progress);
    progress->depth = 1;
    return true;
}

void shoal_progress_unlock(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress) && progress->depth > 0);
    if (--progress->depth)
        return;
    note_busy(progress);
    atomic_store_explicit(&progress->owner, 0, memory_order_relaxed);
    pthread_mutex_unlock(&progress->lock);
}

bool shoal_progress_is_inside(struct shoal_progress *progress)
{
    return holds_lock(progress);
}

void shoal_progress_check_by(struct shoal_progress *progress, uint64_t when_ns)
{
    SHOAL_ASSERT(holds_lock(progress));
    if (when_ns < progress->next_check_ns)
        progress->next_check_ns = when_ns;
}

void shoal_progress_add_source(struct shoal_progress *progress, struct shoal_wait_source source)
{
    const unsigned count = atomic_load_explicit(&progress->source_count, memory_order_relaxed);
    SHOAL_ASSERT(holds_lock(progress) && count < SHOAL_PROGRESS_SOURCES_MAX);
    progress->sources[count] = source;
    /* release: threads that wait without the lock see the source that was stored before. */
    atomic_store_explicit(&progress->source_count, count + 1, memory_order_release);
}

void shoal_progress_add(struct shoal_progress *progress, struct shoal_engine *engine)
{
    SHOAL_ASSERT(holds_lock(progress));
    engine->next = progress->engines;
    progress->engines = engine;
}

void shoal_progress_remove(struct shoal_progress *progress, struct shoal_engine *engine)
{
    struct shoal_engine **link = &progress->engines, **busy_link = &progress->busy;
    SHOAL_ASSERT(holds_lock(progress));
    while (*link && *link != engine)
        link = &(*link)->next;
    if (*link)
        *link = engine->next;
    while (*busy_link && *busy_link != engine)
        busy_link = &(*busy_link)->busy_next;
    if (*busy_link)
        *busy_link = engine->busy_next;
    engine->is_listed = false;
    engine->is_closing = true;
    if (progress->drain_next == engine)
        progress->drain_next = engine->next;
}

const struct shoal_clock_anchor *shoal_progress_anchor(const struct shoal_progress *progress)
{
    return &progress->anchor;
}

struct shoal_engine *const *shoal_progress_engines(const struct shoal_progress *progress)
{
    return &progress->engines;
}

struct shoal_waited *shoal_progress_waited(struct shoal_progress *progress)
{
    return &progress->waited;
}

bool shoal_progress_is_parent(const struct shoal_progress *progress)
{
    return *progress->is_parent;
}

uint64_t shoal_progress_spin_ns(struct shoal_progress *progress)
{
    return progress->spin_ns;
}

bool shoal_progress_has_broken(const struct shoal_progress *progress)
{
    const struct shoal_engine *engine = progress->engines;
    while (engine && !engine->is_broken)
        engine = engine->next;
    return engine != NULL;
}

bool shoal_progress_uses(const struct shoal_progress *progress, shoal_location location)
{
    const struct shoal_engine *engine = progress->engines;
    while (engine && !shoal_engine_uses(engine, location))
        engine = engine->next;
    return engine != NULL;
}

/* ---- Making progress ----------------------------------------------------------------------------------------------------- */

static void wake_at_sources(struct shoal_progress *progress)
{
    /* acquire: pairs with sleep_at_descriptor(), whose thread has made the descriptor of its seat. */
    unsigned asleep = atomic_load_explicit(&progress->asleep, memory_order_acquire);
    for (; asleep; asleep &= asleep - 1) {
        const int fd = atomic_load_explicit(&progress->wake_fds[__builtin_ctz(asleep)], memory_order_relaxed);
        if (fd >= 0)
            (void)eventfd_write(fd, 1);
    }
}

void shoal_progress_wake(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress));
    if (!atomic_load_explicit(&progress->waiters, memory_order_relaxed))
        return;
    /* Full fence: completions are visible before this thread looks for sleepers. Pairs with the increments before a sleep. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&progress->sleepers, memory_order_relaxed))
        ring(progress);
    wake_at_sources(progress);
}

void shoal_progress_wake_outside(struct shoal_progress *progress)
{
    /* Full fence: what the caller has done comes before its look for sleepers. Pairs with the increments before a sleep. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&progress->sleepers, memory_order_relaxed))
        ring(progress);
    wake_at_sources(progress);
}

/* A rank that waits accepts messages of all its communicators, so that a small send needs no receive. */
static bool progress_drain(struct shoal_engine *engine)
{
    if (!shoal_p2p_drain(engine))
        return false;
    shoal_engine_flush(engine);
    return true;
}

/* Drains one engine at a time, so that a turn costs the same with many communicators. */
static bool drain_next(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress));
    struct shoal_engine *engine = progress->drain_next ? progress->drain_next : progress->engines;
    progress->drain_next = engine ? engine->next : NULL;
    return engine && progress_drain(engine);
}

/* Turns without movement between two looks at messages that no operation waits for. */
#define DRAIN_EVERY 16

/* The caller holds the lock. */
static bool poll_sources(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress));
    const unsigned count = atomic_load_explicit(&progress->source_count, memory_order_relaxed);
    bool did = false;
    for (unsigned i = 0; i < count; i++)
        did |= progress->sources[i].ops->poll(progress->sources[i].arg);
    return did;
}

/* The caller holds the lock. */
static bool progress_all(struct shoal_progress *progress)
{
    bool did = poll_sources(progress);
    for (struct shoal_engine *engine = progress->busy; engine; engine = engine->busy_next) {
        did |= shoal_engine_progress(engine);
        shoal_engine_flush(engine);
    }
    if (!did && ++progress->idle_turns % DRAIN_EVERY == 0)
        did = drain_next(progress);
    if (did)
        shoal_progress_wake(progress);
    return did;
}

/* A waiting rank looks at least every 100 ms. After a longer gap it was stopped, or had nothing to wait for. */
#define AWAY_NS SHOAL_NS_PER_S
/* Ticks have jumped if they are off by more than this, and by more than a hundredth of the time since the last look. */
#define JUMP_NS (10 * SHOAL_NS_PER_MS)
#define JUMP_SHARE 100

/* Ranks that were all stopped, for example with their machine, are late together: none is to blame. After a jump of the ticks,
 * the age of what was posted before it is unknown. A counter that is also off at the next look excuses nothing: otherwise one
 * that is never right would keep all deadlines from passing. */
static void excuse_absence(struct shoal_progress *progress)
{
    const uint64_t before_ns = progress->anchor.ns, off_ns = shoal_clock_anchor_move(&progress->anchor);
    const uint64_t away_ns = progress->anchor.ns - before_ns;
    const bool is_off = off_ns > JUMP_NS + away_ns / JUMP_SHARE, has_jumped = is_off && !progress->was_off;
    progress->was_off = is_off;
    if (away_ns < AWAY_NS && !is_off)
        return;
    if (is_off) /* a machine to which this one was migrated has a counter with another rate */
        progress->anchor.ns_per_tick = shoal_clock_ns_per_tick();
    if (has_jumped)
        shoal_log_line(progress->log, SHOAL_LOG_WARN, "engine",
                       "the processor's counter jumped by %.3f s (was this machine moved?): operations under way get their "
                       "full timeout again",
                       (double)off_ns / 1e9);
    for (struct shoal_engine *engine = progress->engines; engine; engine = engine->next)
        shoal_engine_excuse(engine, has_jumped ? UINT64_MAX : away_ns < AWAY_NS ? 0 : away_ns);
}

/* The caller holds the lock. Returns how long until the next check is due. */
static uint64_t check_all(struct shoal_progress *progress)
{
    SHOAL_ASSERT(holds_lock(progress));
    uint64_t again_ns = 100 * SHOAL_NS_PER_MS;
    excuse_absence(progress);
    poll_sources(progress);
    for (struct shoal_engine *engine = progress->busy; engine; engine = engine->busy_next) {
        const uint64_t wanted_ns = shoal_engine_check(engine, progress->anchor.ns);
        shoal_engine_flush(engine);
        again_ns = wanted_ns < again_ns ? wanted_ns : again_ns;
    }
    progress->doorbell.ops->check(progress->doorbell.arg);
    shoal_progress_wake(progress);
    return again_ns;
}

void shoal_progress_poll(struct shoal_progress *progress)
{
    if (!try_lock(progress)) {
        if (!holds_lock(progress)) /* the thread that makes progress may wait for this core */
            sched_yield();
        return;
    }
    progress_all(progress);
    const uint64_t now_ns = shoal_clock_ns();
    if (now_ns >= progress->next_check_ns)
        progress->next_check_ns = now_ns + check_all(progress);
    shoal_progress_unlock(progress);
    if (!progress->spin_ns) /* a loop of polls would keep the core from those it waits for */
        sched_yield();
}

/* ---- Waiting: the only place where Shoal waits --------------------------------------------------------------------------- */

static bool is_done(struct shoal_request *request)
{
    return shoal_request_status(request) != SHOAL_PENDING;
}

/* Returns true when the request is done, or (for the progress thread) when no engine is busy. */
static bool is_over(struct shoal_progress *progress, struct shoal_request *request)
{
    if (request)
        return is_done(request);
    return atomic_load_explicit(&progress->waiters, memory_order_relaxed) ||
           !atomic_load_explicit(&progress->is_busy, memory_order_relaxed);
}

enum turn { IDLE, MOVED, LOCKED };

/* Takes a turn under the lock if it is free. Returns LOCKED if another thread has it; that thread may or may not make
 * progress. */
static enum turn take_turn(struct shoal_progress *progress)
{
    if (!try_lock(progress))
        return LOCKED;
    const bool did = progress_all(progress);
    shoal_progress_unlock(progress);
    return did ? MOVED : IDLE;
}

/* Polls for which the lock is kept; about two microseconds when nothing arrives. */
#define SPIN_POLLS 100
/* Like SPIN_POLLS, but for polls that look at the network, which takes a system call. */
#define HOSTS_POLLS 2
/* Prompt answers arrive within this many polls; a relaxed poll takes longer than an exchange. */
#define SHORT_POLLS 20

/* An engine that was removed is not listed again: callbacks may post while it closes. */
static void list_engine(struct shoal_progress *progress, struct shoal_engine *engine)
{
    SHOAL_ASSERT(holds_lock(progress));
    if (engine->is_listed || engine->is_closing)
        return;
    engine->is_listed = true;
    engine->is_fresh = true; /* progress of earlier operations does not count for this one */
    engine->busy_next = progress->busy;
    progress->busy = engine;
}

void shoal_progress_begin(struct shoal_progress *progress, struct shoal_engine *engine)
{
    list_engine(progress, engine);
    shoal_engine_progress(engine);
    shoal_engine_flush(engine);
}

void shoal_progress_spin(struct shoal_progress *progress, struct shoal_engine *engine, struct shoal_request *request)
{
    const bool is_on_hosts = engine->hosts > 1;
    const unsigned polls = !progress->spin_ns ? 1 : is_on_hosts ? HOSTS_POLLS : SPIN_POLLS;
    unsigned idle = 0;
    list_engine(progress, engine);
    for (unsigned i = 0; i < polls && !is_done(request); i++) {
        if (SHOAL_UNLIKELY(is_on_hosts) && i > 0) /* send first: others wait for it, and it carries acknowledgements */
            poll_sources(progress);
        if (shoal_engine_progress(engine)) {
            shoal_engine_flush(engine);
            idle = 0;
        } else if (++idle > SHORT_POLLS) {
            shoal_clock_relax();
        }
    }
    shoal_engine_flush(engine);
}

static uint64_t check_if_due(struct shoal_progress *progress, uint64_t now_ns)
{
    uint64_t left_ns = 10 * SHOAL_NS_PER_MS; /* if another thread makes progress, that thread checks */
    if (!try_lock(progress))
        return left_ns;
    if (now_ns >= progress->next_check_ns)
        progress->next_check_ns = now_ns + check_all(progress);
    left_ns = progress->next_check_ns > now_ns ? progress->next_check_ns - now_ns : 1;
    shoal_progress_unlock(progress);
    return left_ns;
}

/* If data may come from the network, a sleep is short: 50 us at first, then in proportion to how long nothing has come. Peers
 * of this host ring a doorbell that does not wake a sleeper at the network's descriptor, and some providers have no
 * descriptor. Threads of this rank wake such a sleeper by its seat's eventfd. */
#define BACKOFF_MIN_NS UINT64_C(50000)
#define BACKOFF_MAX_NS SHOAL_NS_PER_MS
#define BACKOFF_SHARE 16      /* sleeping at the network's descriptor */
#define DEAF_BACKOFF_SHARE 64 /* sleeping at the doorbell */

static bool waits_for_silent(const struct shoal_progress *progress, unsigned what)
{
    return (atomic_load_explicit(&progress->silent, memory_order_relaxed) & what) != 0;
}

/* The owner of an operand wakes no thread when a range is ready. Its copies take some ten microseconds each. */
#define OWNER_BACKOFF_NS UINT64_C(50000)

static uint64_t sleep_length(const struct shoal_progress *progress, uint64_t left_ns)
{
    const bool is_brief = waits_for_silent(progress, SILENT_OWNER);
    return is_brief && left_ns > OWNER_BACKOFF_NS ? OWNER_BACKOFF_NS : left_ns;
}

static uint64_t backoff_length(uint64_t waited_ns, uint64_t share, uint64_t left_ns)
{
    uint64_t backoff_ns = waited_ns / share > BACKOFF_MIN_NS ? waited_ns / share : BACKOFF_MIN_NS;
    backoff_ns = backoff_ns < BACKOFF_MAX_NS ? backoff_ns : BACKOFF_MAX_NS;
    return backoff_ns < left_ns ? backoff_ns : left_ns;
}

static void back_off_at(struct shoal_progress *progress, const struct shoal_wait_source *source, int wake_fd,
                        uint64_t waited_ns, uint64_t left_ns)
{
    if (!try_lock(progress))
        return;
    const bool may_wait = source->ops->may_wait(source->arg);
    shoal_progress_unlock(progress);
    const uint64_t sleep_ns = sleep_length(progress, backoff_length(waited_ns, BACKOFF_SHARE, left_ns));
    eventfd_t rings;
    if (may_wait && source->ops->wait(source->arg, wake_fd, sleep_ns))
        (void)eventfd_read(wake_fd, &rings);
}

/* Messages that came before the doorbell was armed wake no thread. If the network is polled, a backoff is short, and the next
 * engine's turn comes soon. */
static bool drain_before_sleep(struct shoal_progress *progress, bool is_backoff)
{
    bool did = false;
    if (!try_lock(progress))
        return false;
    if (is_backoff)
        did = drain_next(progress);
    for (struct shoal_engine *engine = is_backoff ? NULL : progress->engines; engine; engine = engine->next)
        did |= progress_drain(engine);
    shoal_progress_unlock(progress);
    return did;
}

/* Returns the wait source at whose descriptor to sleep while operations with remote ranks are under way, or NULL. Neither this
 * host's doorbell nor the other sources wake such a sleeper. */
static const struct shoal_wait_source *find_descriptor(const struct shoal_progress *progress)
{
    if (!waits_for_silent(progress, SILENT_NETWORK))
        return NULL;
    /* acquire: pairs with shoal_progress_add_source. */
    const unsigned count = atomic_load_explicit(&progress->source_count, memory_order_acquire);
    for (unsigned i = 0; i < count; i++) {
        if (progress->sources[i].ops->has_descriptor(progress->sources[i].arg))
            return &progress->sources[i];
    }
    return NULL;
}

/* Backoffs use no fence in other processes: it would interrupt every core of the host over a thousand times a second. */
static void sleep_at_doorbell(struct shoal_progress *progress, struct shoal_request *request, uint64_t waited_ns,
                              uint64_t left_ns)
{
    const struct shoal_doorbell *doorbell = &progress->doorbell;
    const bool is_backoff = waits_for_silent(progress, SILENT_NETWORK | SILENT_OWNER);
    if (is_backoff)
        doorbell->ops->doze_briefly(doorbell->arg);
    else
        doorbell->ops->doze(doorbell->arg);
    /* The last look: anything that is published after it rings the doorbell. */
    if (take_turn(progress) != IDLE || drain_before_sleep(progress, is_backoff) || is_over(progress, request))
        return;
    const bool must_back_off = is_backoff || waits_for_silent(progress, SILENT_NETWORK);
    const uint64_t sleep_ns = must_back_off ? backoff_length(waited_ns, DEAF_BACKOFF_SHARE, left_ns) : left_ns;
    doorbell->ops->sleep_for(doorbell->arg, sleep_length(progress, sleep_ns));
}

/* Returns the bit of a seat for this thread, or 0 if all are taken. */
static unsigned progress_take_seat(struct shoal_progress *progress, int *wake_fd_out)
{
    unsigned taken = atomic_load_explicit(&progress->seats, memory_order_relaxed), seat;
    do {
        seat = (unsigned)__builtin_ctz(~taken);
        *wake_fd_out = -1;
        if (seat >= SHOAL_PROGRESS_SEATS)
            return 0;
        /* acquire: pairs with the release of the thread that had the seat before. */
    } while (!atomic_compare_exchange_weak_explicit(&progress->seats, &taken, taken | 1u << seat, memory_order_acquire,
                                                    memory_order_relaxed));
    *wake_fd_out = atomic_load_explicit(&progress->wake_fds[seat], memory_order_relaxed);
    if (*wake_fd_out < 0) { /* if this fails, sleeps are short anyway */
        *wake_fd_out = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        atomic_store_explicit(&progress->wake_fds[seat], *wake_fd_out, memory_order_relaxed);
    }
    return 1u << seat;
}

static void sleep_at_descriptor(struct shoal_progress *progress, struct shoal_request *request,
                                const struct shoal_wait_source *source, uint64_t waited_ns, uint64_t left_ns)
{
    int wake_fd;
    const unsigned seat = progress_take_seat(progress, &wake_fd);
    atomic_fetch_or_explicit(&progress->asleep, seat, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst); /* the last look comes after it */
    if (take_turn(progress) == IDLE && !drain_before_sleep(progress, true) && !is_over(progress, request))
        back_off_at(progress, source, wake_fd, waited_ns, left_ns);
    atomic_fetch_and_explicit(&progress->asleep, ~seat, memory_order_relaxed);
    atomic_fetch_and_explicit(&progress->seats, ~seat, memory_order_release);
}

static void sleep_once(struct shoal_progress *progress, struct shoal_request *request, uint64_t idle_since_ns, uint64_t now_ns,
                       uint64_t until_ns)
{
    SHOAL_ASSERT(!holds_lock(progress));
    const uint64_t check_ns = check_if_due(progress, now_ns);
    const uint64_t left_ns = until_ns - now_ns < check_ns ? until_ns - now_ns : check_ns;
    const struct shoal_wait_source *source = find_descriptor(progress);
    if (source) {
        sleep_at_descriptor(progress, request, source, now_ns - idle_since_ns, left_ns);
        return;
    }
    atomic_fetch_add_explicit(&progress->sleepers, 1, memory_order_seq_cst);
    sleep_at_doorbell(progress, request, now_ns - idle_since_ns, left_ns);
    if (atomic_fetch_sub_explicit(&progress->sleepers, 1, memory_order_seq_cst) == 1)
        progress->doorbell.ops->awake(progress->doorbell.arg);
}

/* The kernel may put ranks that wake each other on one core, and leaves them there while other processes keep the other cores
 * busy. An idle wait checks every CORE_LOOK_NS. After CORE_MEETINGS meetings in a row the rank leaves the core, and the next
 * check comes after CORE_SETTLE_NS: the kernel itself moves the rank within milliseconds from a core whose process never
 * waits. */
#define CORE_LOOK_NS SHOAL_NS_PER_MS
#define CORE_MEETINGS 3
#define CORE_SETTLE_NS (5 * SHOAL_NS_PER_MS)

static void leave_core(struct shoal_progress *progress, int core, const cpu_set_t *taken)
{
    if (!shoal_topology_leave_core(taken))
        return;
    if (atomic_fetch_add_explicit(&progress->core_moves, 1, memory_order_relaxed) == 0)
        shoal_log_line(progress->log, SHOAL_LOG_INFO, "engine",
                       "this rank left core %d, on which it met another rank (SHOAL_MOVE=no lets it stay)", core);
}

static void look_at_core(struct shoal_progress *progress, uint64_t now_ns)
{
    cpu_set_t taken;
    const int core = sched_getcpu();
    if (core < 0 || !try_lock(progress))
        return;
    if (progress->next_core_ns == UINT64_MAX) { /* moving was forbidden since the caller looked */
        shoal_progress_unlock(progress);
        return;
    }
    const bool has_met = progress->doorbell.ops->meet_on_core(progress->doorbell.arg, core, &taken);
    progress->core_meetings = has_met ? progress->core_meetings + 1 : 0;
    const bool must_leave = progress->core_meetings == CORE_MEETINGS;
    progress->core_meetings %= CORE_MEETINGS;
    progress->next_core_ns = now_ns + (must_leave ? CORE_SETTLE_NS : CORE_LOOK_NS);
    shoal_progress_unlock(progress);
    if (must_leave)
        leave_core(progress, core, &taken);
}

/* Turns with movement between two looks at the clock: a few milliseconds. */
#define CHECK_MOVES 64

/* Polls between two yields while a wait spins; about two microseconds. Without yields, the process that this one waits for
 * could not run if a wake-up had put it on this very core. */
#define SPIN_BURST 64

static void wait_until_over(struct shoal_progress *progress, struct shoal_request *request, uint64_t until_ns)
{
    const bool has_sources = atomic_load_explicit(&progress->source_count, memory_order_relaxed) > 0;
    const unsigned first_burst = !progress->spin_ns ? 1 : has_sources ? HOSTS_POLLS : SPIN_BURST;
    uint64_t idle_since_ns = 0;
    unsigned turns = 0, moves = 0, burst = first_burst;
    while (!is_over(progress, request)) {
        const enum turn turn = take_turn(progress);
        if (turn == MOVED) {
            idle_since_ns = 0;
            burst = first_burst;
            if (++moves % CHECK_MOVES)
                continue;
            const uint64_t busy_ns = shoal_clock_ns();
            if (busy_ns >= until_ns)
                return;
            check_if_due(progress, busy_ns); /* one communicator may be busy while another has lost a peer */
            continue;
        }
        if (++turns % burst) {
            shoal_clock_relax();
            continue;
        }
        const uint64_t now_ns = shoal_clock_ns();
        idle_since_ns = idle_since_ns ? idle_since_ns : now_ns;
        if (now_ns >= until_ns)
            return;
        if (now_ns >= progress->next_core_ns)
            look_at_core(progress, now_ns);
        const uint64_t waited_ns = now_ns - idle_since_ns;
        burst = waited_ns < progress->spin_ns ? first_burst : 1;
        if (turn == LOCKED || waited_ns < progress->spin_ns + progress->yield_ns)
            sched_yield(); /* no thread sleeps with the lock, but the thread that has it may wait for this core */
        else
            sleep_once(progress, request, idle_since_ns, now_ns, until_ns);
    }
}

static SHOAL_NOINLINE enum shoal_status wait_for_request(struct shoal_progress *progress, struct shoal_request *request,
                                                         uint64_t until_ns)
{
    SHOAL_ASSERT(!holds_lock(progress)); /* others make progress while this thread sleeps */
    atomic_fetch_add_explicit(&progress->waiters, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&request->awaited, 1, memory_order_relaxed);
    wait_until_over(progress, request, until_ns);
    if (!is_done(request)) /* otherwise the waiting time is no longer read */
        atomic_fetch_sub_explicit(&request->awaited, 1, memory_order_relaxed);
    const bool is_last = atomic_fetch_sub_explicit(&progress->waiters, 1, memory_order_seq_cst) == 1;
    if (is_last && progress->has_thread && atomic_load_explicit(&progress->is_busy, memory_order_relaxed)) {
        pthread_mutex_lock(&progress->thread_lock);
        pthread_cond_signal(&progress->thread_wake);
        pthread_mutex_unlock(&progress->thread_lock);
    }
    return shoal_request_status(request);
}

enum shoal_status shoal_progress_wait(struct shoal_progress *progress, struct shoal_request *request, uint64_t until_ns)
{
    const enum shoal_status status = shoal_request_status(request);
    return status != SHOAL_PENDING ? status : wait_for_request(progress, request, until_ns);
}

/* ---- The progress thread ------------------------------------------------------------------------------------------------- */

static void *run_progress_thread(void *arg)
{
    struct shoal_progress *progress = arg;
    pthread_mutex_lock(&progress->thread_lock);
    while (!progress->must_stop) {
        if (is_over(progress, NULL)) {
            pthread_cond_wait(&progress->thread_wake, &progress->thread_lock);
            continue;
        }
        pthread_mutex_unlock(&progress->thread_lock);
        wait_until_over(progress, NULL, UINT64_MAX);
        pthread_mutex_lock(&progress->thread_lock);
    }
    pthread_mutex_unlock(&progress->thread_lock);
    return NULL;
}

enum shoal_status shoal_progress_start_thread(struct shoal_progress *progress)
{
    if (progress->has_thread)
        return SHOAL_OK;
    pthread_mutex_lock(&progress->thread_lock);
    int result = 0;
    if (!progress->has_thread) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before); /* signals belong to the program's threads */
        result = pthread_create(&progress->thread, NULL, run_progress_thread, progress);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        progress->has_thread = result == 0;
    }
    pthread_mutex_unlock(&progress->thread_lock);
    if (result == 0)
        return SHOAL_OK;
    return shoal_log_fail(progress->log, SHOAL_ERR_SYSTEM, "engine", "cannot start the progress thread: %s", strerror(result));
}

void shoal_progress_wake_thread(struct shoal_progress *progress)
{
    if (!progress->has_thread || holds_lock(progress)) /* in a callback, the caller already makes progress and continues to */
        return;
    pthread_mutex_lock(&progress->thread_lock);
    pthread_cond_signal(&progress->thread_wake);
    pthread_mutex_unlock(&progress->thread_lock);
}
