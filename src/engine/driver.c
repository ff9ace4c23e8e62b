#include "engine/driver.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "topology/cores.h"
#include "topology/limits.h"

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void lock_for_endpoint(void *driver)
{
    shoal_driver_lock(driver);
}

static void unlock_for_endpoint(void *driver)
{
    shoal_driver_unlock(driver);
}

enum shoal_status shoal_driver_init(struct shoal_driver *driver, struct shoal_log *log, const struct shoal_settings *settings,
                                    struct shoal_shm_endpoint *endpoint)
{
    memset(driver, 0, sizeof *driver);
    driver->log = log;
    driver->settings = settings;
    driver->endpoint = endpoint;
    driver->anchor.ns_per_tick = shoal_clock_ns_per_tick();
    (void)shoal_clock_anchor_move(&driver->anchor);
    driver->yield_ns = settings->yield_us * 1000;
    endpoint->guard = (struct shoal_shm_guard){lock_for_endpoint, unlock_for_endpoint, driver};
    if (pthread_mutex_init(&driver->lock, NULL) || pthread_mutex_init(&driver->thread_lock, NULL) ||
        pthread_cond_init(&driver->thread_wake, NULL))
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "engine", "cannot make a lock");
    shoal_driver_note_ranks(driver, 1);
    return SHOAL_OK;
}

/* The cores that all ranks of this host may use together. A rank that its launcher has bound sees only its own share of
 * them. */
static int cores_of_ranks(const struct shoal_driver *driver)
{
    const int cores = shoal_shm_endpoint_cores(driver->endpoint);
    return cores ? shoal_topology_quota_cores(cores) : shoal_topology_cores();
}

void shoal_driver_note_ranks(struct shoal_driver *driver, int local_ranks)
{
    shoal_driver_lock(driver);
    driver->local_ranks = local_ranks > driver->local_ranks ? local_ranks : driver->local_ranks;
    const bool has_cores = driver->local_ranks <= cores_of_ranks(driver);
    driver->spin_ns = has_cores ? driver->settings->spin_us * 1000 : 0;
    const bool may_move = has_cores && driver->local_ranks > 1 && strcmp(driver->settings->move, "no") != 0;
    driver->next_core_ns = may_move ? 0 : UINT64_MAX;
    shoal_driver_unlock(driver);
}

void shoal_driver_set_network(struct shoal_driver *driver, struct shoal_network *network)
{
    driver->network = network;
}

void shoal_driver_stop_thread(struct shoal_driver *driver)
{
    if (!driver->has_thread)
        return;
    pthread_mutex_lock(&driver->thread_lock);
    driver->must_stop = true;
    pthread_cond_signal(&driver->thread_wake);
    pthread_mutex_unlock(&driver->thread_lock);
    shoal_shm_bell_ring(driver->endpoint->bell);
    pthread_join(driver->thread, NULL);
    driver->has_thread = false;
}

void shoal_driver_fini(struct shoal_driver *driver)
{
    shoal_driver_stop_thread(driver);
    pthread_cond_destroy(&driver->thread_wake);
    pthread_mutex_destroy(&driver->thread_lock);
    pthread_mutex_destroy(&driver->lock);
}

/* ---- The lock ------------------------------------------------------------------------------------------------------------ */

static bool holds_lock(struct shoal_driver *driver)
{
    return atomic_load_explicit(&driver->owner, memory_order_relaxed) == (uintptr_t)pthread_self();
}

static void became_owner(struct shoal_driver *driver)
{
    atomic_store_explicit(&driver->owner, (uintptr_t)pthread_self(), memory_order_relaxed);
}

/* Takes engines whose operations are done off the list, so that nobody walks through all communicators. */
static void note_busy(struct shoal_driver *driver)
{
    struct shoal_engine **link = &driver->busy;
    bool is_apart = false;
    while (*link) {
        struct shoal_engine *engine = *link;
        if (shoal_engine_is_busy(engine)) {
            is_apart |= engine->hosts > 1;
            link = &engine->busy_next;
        } else {
            engine->is_listed = false;
            *link = engine->busy_next;
        }
    }
    atomic_store_explicit(&driver->is_busy, driver->busy != NULL, memory_order_relaxed);
    atomic_store_explicit(&driver->is_apart_busy, is_apart, memory_order_relaxed);
}

void shoal_driver_lock(struct shoal_driver *driver)
{
    if (!holds_lock(driver)) {
        pthread_mutex_lock(&driver->lock);
        became_owner(driver);
    }
    driver->depth++;
}

static bool try_lock(struct shoal_driver *driver)
{
    if (holds_lock(driver) || pthread_mutex_trylock(&driver->lock) != 0)
        return false;
    became_owner(driver);
    driver->depth = 1;
    return true;
}

void shoal_driver_unlock(struct shoal_driver *driver)
{
    if (--driver->depth)
        return;
    note_busy(driver);
    atomic_store_explicit(&driver->owner, 0, memory_order_relaxed);
    pthread_mutex_unlock(&driver->lock);
}

bool shoal_driver_is_inside(struct shoal_driver *driver)
{
    return holds_lock(driver);
}

void shoal_driver_check_by(struct shoal_driver *driver, uint64_t when_ns)
{
    if (when_ns < driver->next_check_ns)
        driver->next_check_ns = when_ns;
}

void shoal_driver_add(struct shoal_driver *driver, struct shoal_engine *engine)
{
    engine->next = driver->engines;
    driver->engines = engine;
}

void shoal_driver_remove(struct shoal_driver *driver, struct shoal_engine *engine)
{
    struct shoal_engine **link = &driver->engines, **busy_link = &driver->busy;
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
    if (driver->drain_next == engine)
        driver->drain_next = engine->next;
}

/* ---- Driving ------------------------------------------------------------------------------------------------------------- */

void shoal_driver_wake(struct shoal_driver *driver)
{
    if (!atomic_load_explicit(&driver->waiters, memory_order_relaxed))
        return;
    /* Full fence: what was completed comes before the look at who sleeps; pairs with the increment in sleep_once. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&driver->sleepers, memory_order_relaxed))
        shoal_shm_bell_ring(driver->endpoint->bell);
}

/* A rank that waits takes messages of all its communicators, so that a small send needs no receive. */
static bool drain(struct shoal_engine *engine)
{
    if (!shoal_messages_drain(engine))
        return false;
    shoal_engine_flush(engine);
    return true;
}

/* One engine at a time, so that a turn costs the same with many communicators. */
static bool drain_next(struct shoal_driver *driver)
{
    struct shoal_engine *engine = driver->drain_next ? driver->drain_next : driver->engines;
    driver->drain_next = engine ? engine->next : NULL;
    return engine && drain(engine);
}

/* Turns that moved nothing between two looks at messages that no operation waits for. */
#define DRAIN_EVERY 16

/* Under the lock. */
static bool progress_all(struct shoal_driver *driver)
{
    bool did = driver->network && shoal_network_poll(driver->network);
    for (struct shoal_engine *engine = driver->busy; engine; engine = engine->busy_next) {
        did |= shoal_engine_progress(engine);
        shoal_engine_flush(engine);
    }
    if (!did && ++driver->idle_turns % DRAIN_EVERY == 0)
        did = drain_next(driver);
    if (did)
        shoal_driver_wake(driver);
    return did;
}

/* A rank that waits looks at least every 100 ms. After a longer gap it was stopped, or had nothing to wait for. */
#define AWAY_NS SHOAL_NS_PER_S
/* Ticks that are off by more, and by more than a hundredth of the time since the last look, have jumped. */
#define JUMP_NS (10 * SHOAL_NS_PER_MS)
#define JUMP_SHARE 100

/* Ranks that were all stopped, as with their machine, are late together: nobody is to blame. And of what was posted since a
 * jump of the ticks nobody knows when. A counter that is off at the next look, too, excuses nothing: else one that is never
 * right would keep all deadlines from passing. */
static void excuse_absence(struct shoal_driver *driver)
{
    const uint64_t before_ns = driver->anchor.ns, off_ns = shoal_clock_anchor_move(&driver->anchor);
    const uint64_t away_ns = driver->anchor.ns - before_ns;
    const bool is_off = off_ns > JUMP_NS + away_ns / JUMP_SHARE, has_jumped = is_off && !driver->was_off;
    driver->was_off = is_off;
    if (away_ns < AWAY_NS && !is_off)
        return;
    if (is_off) /* a machine that this one was moved to has a counter of another rate */
        driver->anchor.ns_per_tick = shoal_clock_ns_per_tick();
    if (has_jumped)
        shoal_log_line(driver->log, SHOAL_LOG_WARN, "engine",
                       "the processor's counter jumped by %.3f s (was this machine moved?): what is under way gets its whole "
                       "time again",
                       (double)off_ns / 1e9);
    for (struct shoal_engine *engine = driver->engines; engine; engine = engine->next)
        shoal_engine_excuse(engine, has_jumped ? UINT64_MAX : away_ns < AWAY_NS ? 0 : away_ns);
}

/* Under the lock. Returns how long all engines can do without another look. */
static uint64_t check_all(struct shoal_driver *driver)
{
    uint64_t again_ns = 100 * SHOAL_NS_PER_MS;
    excuse_absence(driver);
    if (driver->network)
        shoal_network_poll(driver->network);
    for (struct shoal_engine *engine = driver->busy; engine; engine = engine->busy_next) {
        const uint64_t wanted_ns = shoal_engine_check(engine);
        shoal_engine_flush(engine);
        again_ns = wanted_ns < again_ns ? wanted_ns : again_ns;
    }
    shoal_shm_endpoint_drain(driver->endpoint);
    shoal_driver_wake(driver);
    return again_ns;
}

void shoal_driver_poll(struct shoal_driver *driver)
{
    if (!try_lock(driver)) {
        if (!holds_lock(driver)) /* the thread that drives may wait for this core */
            sched_yield();
        return;
    }
    progress_all(driver);
    const uint64_t now_ns = shoal_clock_ns();
    if (now_ns >= driver->next_check_ns)
        driver->next_check_ns = now_ns + check_all(driver);
    shoal_driver_unlock(driver);
    if (!driver->spin_ns) /* a loop of polls would keep the core from those it waits for */
        sched_yield();
}

/* ---- Waiting: the only place where Shoal waits --------------------------------------------------------------------------- */

static bool is_done(struct shoal_request *request)
{
    return shoal_request_status(request) != SHOAL_PENDING;
}

/* What a wait waits for: a request, or (the progress thread) that nothing is left to drive. */
static bool is_over(struct shoal_driver *driver, struct shoal_request *request)
{
    if (request)
        return is_done(request);
    return atomic_load_explicit(&driver->waiters, memory_order_relaxed) ||
           !atomic_load_explicit(&driver->is_busy, memory_order_relaxed);
}

enum turn { IDLE, MOVED, LOCKED };

/* A turn under the lock, if it is free. LOCKED: another thread has it, and may or may not drive. */
static enum turn drive_once(struct shoal_driver *driver)
{
    if (!try_lock(driver))
        return LOCKED;
    const bool did = progress_all(driver);
    shoal_driver_unlock(driver);
    return did ? MOVED : IDLE;
}

/* Polls in which the lock is kept; about two microseconds when nothing comes. */
#define SPIN_POLLS 100
/* The same where each poll looks at the network, which takes a system call. */
#define APART_POLLS 2
/* What comes at once comes within so many polls; a relaxed one takes longer than an exchange. */
#define SHORT_POLLS 20

void shoal_driver_spin(struct shoal_driver *driver, struct shoal_engine *engine, struct shoal_request *request)
{
    const bool is_apart = engine->hosts > 1;
    const unsigned polls = !driver->spin_ns ? 1 : is_apart ? APART_POLLS : SPIN_POLLS;
    unsigned idle = 0;
    for (unsigned i = 0; i < polls && !is_done(request); i++) {
        if (SHOAL_UNLIKELY(is_apart) && i > 0) /* what can be sent goes first: others wait for it, and it acknowledges */
            shoal_network_poll(driver->network);
        if (shoal_engine_progress(engine)) {
            shoal_engine_flush(engine);
            idle = 0;
        } else if (++idle > SHORT_POLLS) {
            shoal_clock_relax();
        }
    }
    shoal_engine_flush(engine);
}

static uint64_t check_if_due(struct shoal_driver *driver, uint64_t now_ns)
{
    uint64_t left_ns = 10 * SHOAL_NS_PER_MS; /* when another thread drives, it checks */
    if (!try_lock(driver))
        return left_ns;
    if (now_ns >= driver->next_check_ns)
        driver->next_check_ns = now_ns + check_all(driver);
    left_ns = driver->next_check_ns > now_ns ? driver->next_check_ns - now_ns : 1;
    shoal_driver_unlock(driver);
    return left_ns;
}

/* Where something may come from the network a sleep is short, 50 us at first, and in proportion to how long nothing has come:
 * peers of this host ring a bell that does not wake from the network's descriptor, and some providers have none. */
#define NAP_MIN_NS UINT64_C(50000)
#define NAP_MAX_NS SHOAL_NS_PER_MS
#define NAP_SHARE 16      /* woken by the network only */
#define DEAF_NAP_SHARE 64 /* by the bell only */

static uint64_t nap_length(uint64_t waited_ns, uint64_t share, uint64_t left_ns)
{
    uint64_t nap_ns = waited_ns / share > NAP_MIN_NS ? waited_ns / share : NAP_MIN_NS;
    nap_ns = nap_ns < NAP_MAX_NS ? nap_ns : NAP_MAX_NS;
    return nap_ns < left_ns ? nap_ns : left_ns;
}

static void nap_at_network(struct shoal_driver *driver, uint64_t waited_ns, uint64_t left_ns)
{
    if (!try_lock(driver))
        return;
    const bool may_wait = shoal_network_may_wait(driver->network);
    shoal_driver_unlock(driver);
    if (may_wait)
        shoal_network_wait(driver->network, nap_length(waited_ns, NAP_SHARE, left_ns));
}

/* Messages that came before the bell was armed wake nobody. Where the network is polled a nap is short, and the next engine has
 * its turn soon. */
static bool drain_before_sleep(struct shoal_driver *driver, bool is_nap)
{
    bool did = false;
    if (!try_lock(driver))
        return false;
    if (is_nap)
        did = drain_next(driver);
    for (struct shoal_engine *engine = is_nap ? NULL : driver->engines; engine; engine = engine->next)
        did |= drain(engine);
    shoal_driver_unlock(driver);
    return did;
}

/* A sleeper at the network's descriptor does not hear the bell of this host. */
static bool naps_at_network(const struct shoal_driver *driver)
{
    return atomic_load_explicit(&driver->is_apart_busy, memory_order_relaxed) && shoal_network_has_descriptor(driver->network);
}

/* A fence in all other processes at each nap would interrupt every core of the host over a thousand times a second. */
static void sleep_at_bell(struct shoal_driver *driver, struct shoal_request *request, uint64_t waited_ns, uint64_t left_ns)
{
    const bool is_nap = atomic_load_explicit(&driver->is_apart_busy, memory_order_relaxed);
    if (is_nap)
        shoal_shm_endpoint_doze_briefly(driver->endpoint);
    else
        shoal_shm_endpoint_doze(driver->endpoint);
    /* The last look: whatever is published after it rings the bell. */
    if (drive_once(driver) != IDLE || drain_before_sleep(driver, is_nap) || is_over(driver, request))
        return;
    const bool must_nap = is_nap || atomic_load_explicit(&driver->is_apart_busy, memory_order_relaxed);
    shoal_shm_endpoint_sleep(driver->endpoint, must_nap ? nap_length(waited_ns, DEAF_NAP_SHARE, left_ns) : left_ns);
}

static void sleep_once(struct shoal_driver *driver, struct shoal_request *request, uint64_t idle_since_ns, uint64_t now_ns,
                       uint64_t until_ns)
{
    const uint64_t check_ns = check_if_due(driver, now_ns);
    const uint64_t left_ns = until_ns - now_ns < check_ns ? until_ns - now_ns : check_ns;
    if (naps_at_network(driver)) {
        if (drive_once(driver) == IDLE && !drain_before_sleep(driver, true) && !is_over(driver, request))
            nap_at_network(driver, now_ns - idle_since_ns, left_ns);
        return;
    }
    atomic_fetch_add_explicit(&driver->sleepers, 1, memory_order_seq_cst);
    sleep_at_bell(driver, request, now_ns - idle_since_ns, left_ns);
    if (atomic_fetch_sub_explicit(&driver->sleepers, 1, memory_order_seq_cst) == 1)
        shoal_shm_endpoint_awake(driver->endpoint);
}

/* The kernel may put ranks that wake each other on one core, and leaves them there while other processes keep the other
 * cores busy. An idle wait looks every CORE_LOOK_NS; after CORE_MEETINGS meetings in a row the rank leaves the core, and
 * the next look comes after CORE_SETTLE_NS: from a core whose process never waits, the kernel itself moves the rank within
 * milliseconds. */
#define CORE_LOOK_NS SHOAL_NS_PER_MS
#define CORE_MEETINGS 3
#define CORE_SETTLE_NS (50 * SHOAL_NS_PER_MS)

static void leave_core(struct shoal_driver *driver, int core, const cpu_set_t *taken)
{
    if (!shoal_topology_leave_core(taken))
        return;
    if (atomic_fetch_add_explicit(&driver->core_moves, 1, memory_order_relaxed) == 0)
        shoal_log_line(driver->log, SHOAL_LOG_INFO, "engine",
                       "this rank left core %d, on which it met another rank (SHOAL_MOVE=no lets it stay)", core);
}

static void look_at_core(struct shoal_driver *driver, uint64_t now_ns)
{
    cpu_set_t taken;
    const int core = sched_getcpu();
    if (core < 0 || !try_lock(driver))
        return;
    if (driver->next_core_ns == UINT64_MAX) { /* forbidden since the caller looked */
        shoal_driver_unlock(driver);
        return;
    }
    const bool has_met = shoal_shm_endpoint_meet_on_core(driver->endpoint, core, &taken);
    driver->core_meetings = has_met ? driver->core_meetings + 1 : 0;
    const bool must_leave = driver->core_meetings == CORE_MEETINGS;
    driver->core_meetings %= CORE_MEETINGS;
    driver->next_core_ns = now_ns + (must_leave ? CORE_SETTLE_NS : CORE_LOOK_NS);
    shoal_driver_unlock(driver);
    if (must_leave)
        leave_core(driver, core, &taken);
}

/* Turns that moved something between two looks at the clock: a few milliseconds. */
#define CHECK_MOVES 64

/* Polls between two yields while a wait spins, about two microseconds. Without yields, whom we wait for could not run if a
 * wake-up had put it on this very core. */
#define SPIN_BURST 64

static void wait_until_over(struct shoal_driver *driver, struct shoal_request *request, uint64_t until_ns)
{
    const unsigned first_burst = !driver->spin_ns ? 1 : driver->network ? APART_POLLS : SPIN_BURST;
    uint64_t idle_since_ns = 0;
    unsigned turns = 0, moves = 0, burst = first_burst;
    while (!is_over(driver, request)) {
        if (drive_once(driver) == MOVED) {
            idle_since_ns = 0;
            burst = first_burst;
            if (++moves % CHECK_MOVES)
                continue;
            const uint64_t busy_ns = shoal_clock_ns();
            if (busy_ns >= until_ns)
                return;
            check_if_due(driver, busy_ns); /* one communicator may be busy while another has lost a peer */
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
        if (now_ns >= driver->next_core_ns)
            look_at_core(driver, now_ns);
        const uint64_t waited_ns = now_ns - idle_since_ns;
        burst = waited_ns < driver->spin_ns ? first_burst : 1;
        if (waited_ns < driver->spin_ns + driver->yield_ns)
            sched_yield();
        else
            sleep_once(driver, request, idle_since_ns, now_ns, until_ns);
    }
}

enum shoal_status shoal_driver_wait(struct shoal_driver *driver, struct shoal_request *request, uint64_t until_ns)
{
    if (is_done(request))
        return shoal_request_status(request);
    atomic_fetch_add_explicit(&driver->waiters, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&request->awaited, 1, memory_order_relaxed);
    wait_until_over(driver, request, until_ns);
    if (!is_done(request)) /* else nobody reads it any more */
        atomic_fetch_sub_explicit(&request->awaited, 1, memory_order_relaxed);
    const bool is_last = atomic_fetch_sub_explicit(&driver->waiters, 1, memory_order_seq_cst) == 1;
    if (is_last && driver->has_thread && atomic_load_explicit(&driver->is_busy, memory_order_relaxed)) {
        pthread_mutex_lock(&driver->thread_lock);
        pthread_cond_signal(&driver->thread_wake);
        pthread_mutex_unlock(&driver->thread_lock);
    }
    return shoal_request_status(request);
}

/* ---- The progress thread ------------------------------------------------------------------------------------------------- */

static void *drive(void *arg)
{
    struct shoal_driver *driver = arg;
    pthread_mutex_lock(&driver->thread_lock);
    while (!driver->must_stop) {
        if (is_over(driver, NULL)) {
            pthread_cond_wait(&driver->thread_wake, &driver->thread_lock);
            continue;
        }
        pthread_mutex_unlock(&driver->thread_lock);
        wait_until_over(driver, NULL, UINT64_MAX);
        pthread_mutex_lock(&driver->thread_lock);
    }
    pthread_mutex_unlock(&driver->thread_lock);
    return NULL;
}

enum shoal_status shoal_driver_start_thread(struct shoal_driver *driver)
{
    if (driver->has_thread)
        return SHOAL_OK;
    pthread_mutex_lock(&driver->thread_lock);
    int result = 0;
    if (!driver->has_thread) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before); /* signals belong to the program's threads */
        result = pthread_create(&driver->thread, NULL, drive, driver);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        driver->has_thread = result == 0;
    }
    pthread_mutex_unlock(&driver->thread_lock);
    if (result == 0)
        return SHOAL_OK;
    return shoal_log_fail(driver->log, SHOAL_ERR_SYSTEM, "engine", "cannot start the progress thread: %s", strerror(result));
}

void shoal_driver_wake_thread(struct shoal_driver *driver)
{
    if (!driver->has_thread || holds_lock(driver)) /* in a callback: who drives now goes on driving */
        return;
    pthread_mutex_lock(&driver->thread_lock);
    pthread_cond_signal(&driver->thread_wake);
    pthread_mutex_unlock(&driver->thread_lock);
}
