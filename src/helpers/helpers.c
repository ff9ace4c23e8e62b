#include "helpers/helpers.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "helpers/helper_cores.h"
#include "topology/links.h"

/* Jobs that may be posted at once. */
#define SLOTS 64

/* A job. `claims` is published last and changed by compare and swap. So a helper reads `run` and `arg` only of a job that
 * cannot end before the helper has counted its part. */
struct slot {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t claims; /* generation, next part, number of parts: see below */
    _Atomic uint32_t ended;                             /* parts that have ended, or were dropped */
    shoal_helpers_fn run;
    void *arg;
};

/* 32 bits of generation, 16 of the next part, 16 of the number of parts. */
#define CLAIM_ONE (UINT64_C(1) << 16)
#define CLAIM_GENERATION (UINT64_C(1) << 32)

static uint32_t claims_next(uint64_t claims)
{
    return claims >> 16 & 0xffff;
}

static uint32_t claims_parts(uint64_t claims)
{
    return claims & 0xffff;
}

struct helper {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint32_t wake; /* a futex: 0 while it sleeps */
    struct shoal_helpers *helpers;
    int number; /* from 0: it works if the width is at least number + 2 */
    pthread_t thread;
};

struct shoal_helpers {
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t open;   /* bit s: slot s has a part that nobody has claimed */
    _Atomic uint32_t turn;                              /* the slot for the next job, if it is free: slots are used in order */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t used;   /* bit s: slot s has a job that has not ended */
    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t asleep; /* bit h: helper h sleeps, and nobody has undertaken to wake it */
    atomic_int width;                                   /* by the cores, and by the threads that could be made */
    atomic_int limit;                                   /* by a trial */
    atomic_int together, local_ranks;                   /* what the ranks of this host share */
    atomic_int cores;                                   /* this rank's part of them, when they were last counted */
    atomic_bool has_threads;                            /* a post has made them, or is making them */
    atomic_bool must_stop;
    _Atomic uint64_t look_ns; /* when a helper next counts the rank's cores */
    struct shoal_helpers_options options;
    atomic_bool has_warned;
    int made;
    struct slot slots[SLOTS];
    struct helper helper[SHOAL_HELPERS_MAX - 1];
};

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

/* Claims up to `most` parts. Returns how many, and in *before_out the claims before them, which name the first. */
static uint32_t claim_parts(struct shoal_helpers *helpers, unsigned s, uint32_t most, uint64_t *before_out)
{
    struct slot *slot = &helpers->slots[s];
    uint64_t before = atomic_load_explicit(&slot->claims, memory_order_relaxed);
    uint32_t count;
    do {
        const uint32_t left = claims_parts(before) - claims_next(before);
        count = left < most ? left : most;
        if (!count)
            return 0;
        /* acquire: pairs with the release in fill_slot(), so that `run` and `arg` are those of this job. */
    } while (!atomic_compare_exchange_weak_explicit(&slot->claims, &before, before + count * CLAIM_ONE, memory_order_acquire,
                                                    memory_order_relaxed));
    /* Before the parts end, so that the bit is not that of a later job. The owner has set it before it published the parts. */
    if (claims_next(before) + count == claims_parts(before))
        atomic_fetch_and_explicit(&helpers->open, ~(UINT64_C(1) << s), memory_order_relaxed);
    *before_out = before;
    return count;
}

/* Returns true if these were the last parts of their job. The slot may belong to another job afterwards. */
static bool end_parts(struct slot *slot, uint64_t claims, uint32_t count)
{
    /* release: the owner that sees the number sees what the parts wrote; acquire: parts of others come before the last one. */
    return atomic_fetch_add_explicit(&slot->ended, count, memory_order_acq_rel) + count == claims_parts(claims);
}

/* Returns the slot of the job that was posted first among those of `open`, which is not 0. */
static unsigned find_oldest(const struct shoal_helpers *helpers, uint64_t open)
{
    const unsigned turn = atomic_load_explicit(&helpers->turn, memory_order_relaxed) % SLOTS;
    const uint64_t turned = turn ? open >> turn | open << (SLOTS - turn) : open;
    return ((unsigned)__builtin_ctzll(turned) + turn) % SLOTS;
}

/* Runs a claimed part. Returns true if it was the last of its job. */
static bool run_claimed(struct slot *slot, uint64_t claims)
{
    slot->run(slot->arg, claims_next(claims));
    return end_parts(slot, claims, 1);
}

/* Runs a part of that job. Returns false if none is left. */
static bool run_part_of(struct shoal_helpers *helpers, unsigned s)
{
    uint64_t claims;
    if (!claim_parts(helpers, s, 1, &claims))
        return false;
    (void)run_claimed(&helpers->slots[s], claims);
    return true;
}

/* Claims a part of the oldest job that has one. Returns its slot, or NULL. */
static struct slot *claim_oldest(struct shoal_helpers *helpers, uint64_t *claims_out)
{
    uint64_t open = atomic_load_explicit(&helpers->open, memory_order_seq_cst);
    while (open) {
        const unsigned s = find_oldest(helpers, open);
        if (claim_parts(helpers, s, 1, claims_out))
            return &helpers->slots[s];
        open &= ~(UINT64_C(1) << s);
    }
    return NULL;
}

/* ---- Sleeping and waking ------------------------------------------------------------------------------------------------- */

static void helper_futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    (void)syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static int find_width(const struct shoal_helpers *helpers)
{
    const int width = atomic_load_explicit(&helpers->width, memory_order_relaxed);
    const int limit = atomic_load_explicit(&helpers->limit, memory_order_relaxed);
    return width < limit ? width : limit;
}

static void wake_helper(struct helper *helper)
{
    atomic_store_explicit(&helper->wake, 1, memory_order_release);
    helper_futex(&helper->wake, FUTEX_WAKE, 1);
}

/* Wakes a sleeping helper that may work. Comes after a part was opened: either this look finds the helper asleep, or the helper
 * finds the part before it sleeps (both are seq_cst). */
static void wake_one(struct shoal_helpers *helpers)
{
    const uint64_t allowed = (UINT64_C(1) << (find_width(helpers) - 1)) - 1;
    uint64_t asleep = atomic_load_explicit(&helpers->asleep, memory_order_seq_cst) & allowed;
    while (asleep) {
        const unsigned h = (unsigned)__builtin_ctzll(asleep);
        const uint64_t bit = UINT64_C(1) << h;
        if (atomic_fetch_and_explicit(&helpers->asleep, ~bit, memory_order_seq_cst) & bit) {
            wake_helper(&helpers->helper[h]);
            return;
        }
        asleep &= ~bit;
    }
}

static bool may_work(const struct helper *helper)
{
    return helper->number + 2 <= find_width(helper->helpers);
}

static bool has_work(const struct helper *helper)
{
    return (atomic_load_explicit(&helper->helpers->open, memory_order_seq_cst) && may_work(helper)) ||
           atomic_load_explicit(&helper->helpers->must_stop, memory_order_seq_cst);
}

/* A helper that may not work never finds work, and sleeps until the width grows or the helpers end. */
static void sleep_until_woken(struct helper *helper)
{
    struct shoal_helpers *helpers = helper->helpers;
    const uint64_t bit = UINT64_C(1) << helper->number;
    atomic_store_explicit(&helper->wake, 0, memory_order_relaxed);
    atomic_fetch_or_explicit(&helpers->asleep, bit, memory_order_seq_cst);
    /* acquire: pairs with the release of wake_helper(). */
    while (!has_work(helper) && !atomic_load_explicit(&helper->wake, memory_order_acquire))
        helper_futex(&helper->wake, FUTEX_WAIT, 0);
    atomic_fetch_and_explicit(&helpers->asleep, ~bit, memory_order_relaxed);
}

/* Polls between two looks at the clock. */
#define SPIN_POLLS 64

static void spin_for_work(const struct helper *helper)
{
    const bool has_core = find_width(helper->helpers) <= atomic_load_explicit(&helper->helpers->cores, memory_order_relaxed);
    const uint64_t spin_ns = has_core ? helper->helpers->options.spin_ns : 0, begin_ns = spin_ns ? shoal_clock_ns() : 0;
    while (spin_ns && !has_work(helper) && shoal_clock_ns() - begin_ns < spin_ns) {
        for (int i = 0; i < SPIN_POLLS && !has_work(helper); i++)
            shoal_clock_relax();
    }
}

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

static void lower_width(struct shoal_helpers *helpers, int width)
{
    int before = atomic_load_explicit(&helpers->width, memory_order_relaxed);
    while (width < before &&
           !atomic_compare_exchange_weak_explicit(&helpers->width, &before, width, memory_order_relaxed, memory_order_relaxed))
        continue;
}

/* Adapts the width to the cores of the calling thread. */
static void heed_cores(struct shoal_helpers *helpers)
{
    const struct shoal_helpers_options *options = &helpers->options;
    cpu_set_t mask;
    const int allowed = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
    const int cores = shoal_helper_cores_count(allowed, atomic_load_explicit(&helpers->together, memory_order_relaxed),
                                               atomic_load_explicit(&helpers->local_ranks, memory_order_relaxed));
    atomic_store_explicit(&helpers->cores, cores, memory_order_relaxed);
    if (!options->threads) {
        lower_width(helpers, shoal_helper_cores_width((struct shoal_helper_share){cores, options->framework_threads}));
    } else if (options->threads > cores && !atomic_exchange_explicit(&helpers->has_warned, true, memory_order_relaxed)) {
        shoal_log_line(options->log, SHOAL_LOG_WARN, "helpers",
                       "SHOAL_THREADS is %d, but this rank has %d core%s: threads take turns, which is slower; set at most %d, "
                       "or auto",
                       options->threads, cores, cores == 1 ? "" : "s", cores);
    }
}

/* The cores of a running rank change: its container gets another set or another quota. */
static void look_at_cores(struct shoal_helpers *helpers)
{
    const uint64_t now_ns = shoal_clock_ns();
    uint64_t look_ns = atomic_load_explicit(&helpers->look_ns, memory_order_relaxed);
    if (now_ns >= look_ns && atomic_compare_exchange_strong_explicit(&helpers->look_ns, &look_ns, now_ns + SHOAL_NS_PER_S,
                                                                     memory_order_relaxed, memory_order_relaxed))
        heed_cores(helpers);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

/* A part may take long, so the next helper is woken before this one runs its own. */
static void run_and_tell(struct shoal_helpers *helpers, struct slot *slot, uint64_t claims)
{
    if (atomic_load_explicit(&helpers->open, memory_order_relaxed))
        wake_one(helpers);
    if (run_claimed(slot, claims) && helpers->options.wake)
        helpers->options.wake(helpers->options.wake_arg);
}

static void *run_helper(void *arg)
{
    struct helper *helper = arg;
    struct shoal_helpers *helpers = helper->helpers;
    while (!atomic_load_explicit(&helpers->must_stop, memory_order_acquire)) {
        uint64_t claims = 0;
        struct slot *slot = may_work(helper) ? claim_oldest(helpers, &claims) : NULL;
        if (slot) {
            run_and_tell(helpers, slot, claims);
        } else if (has_work(helper)) {
            sched_yield(); /* a post is about to publish its parts, or a claim to close its slot */
        } else {
            spin_for_work(helper);
            sleep_until_woken(helper);
        }
        look_at_cores(helpers);
    }
    return NULL;
}

static void place_thread(const struct helper *helper, const cpu_set_t *cores)
{
    char name[16]; /* the kernel keeps 15 bytes */
    snprintf(name, sizeof name, "shoal-help-%u", (unsigned)(helper->number + 1) % 100);
    (void)pthread_setname_np(helper->thread, name);
    if (CPU_COUNT(cores)) /* with a mask that the kernel no longer allows, the thread keeps that of its maker */
        (void)pthread_setaffinity_np(helper->thread, sizeof *cores, cores);
}

static int make_thread(struct shoal_helpers *helpers, const cpu_set_t *cores)
{
    struct helper *helper = &helpers->helper[helpers->made];
    helper->helpers = helpers;
    helper->number = helpers->made;
    const int error = pthread_create(&helper->thread, NULL, run_helper, helper);
    if (error)
        return error;
    place_thread(helper, cores);
    helpers->made++;
    return 0;
}

/* The first post makes the threads. */
static SHOAL_NOINLINE void make_threads(struct shoal_helpers *helpers)
{
    const int wanted = atomic_load_explicit(&helpers->width, memory_order_relaxed) - 1;
    cpu_set_t cores = helpers->options.cores;
    sigset_t all, before;
    int error = 0;
    if (atomic_exchange_explicit(&helpers->has_threads, true, memory_order_relaxed))
        return;
    shoal_helper_cores_stay_near(SHOAL_LINKS_SYS, atomic_load_explicit(&helpers->cores, memory_order_relaxed), &cores);
    /* Until it is placed, a helper has the cores of its maker, which may be fewer. So it does not count them yet. */
    atomic_store_explicit(&helpers->look_ns, shoal_clock_ns() + SHOAL_NS_PER_S, memory_order_relaxed);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals belong to the program's threads */
    while (helpers->made < wanted && !error)
        error = make_thread(helpers, &cores);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        return;
    lower_width(helpers, helpers->made + 1);
    shoal_log_line(helpers->options.log, SHOAL_LOG_WARN, "helpers",
                   "only %d of %d helper threads could be made (%s): this rank works with %d; raise `ulimit -u` or the "
                   "container's limit of processes, or set SHOAL_THREADS=%d",
                   helpers->made, wanted, strerror(error), helpers->made + 1, helpers->made + 1);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_helpers_create(const struct shoal_helpers_options *options, struct shoal_helpers **helpers_out)
{
    struct shoal_helpers *helpers = aligned_alloc(SHOAL_CACHE_PAIR, sizeof *helpers);
    SHOAL_ASSERT(options->threads >= 0 && options->threads <= SHOAL_HELPERS_MAX);
    if (!helpers)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "helpers", "no memory for helper threads");
    memset(helpers, 0, sizeof *helpers);
    helpers->options = *options;
    atomic_store_explicit(&helpers->width, options->threads ? options->threads : SHOAL_HELPERS_MAX, memory_order_relaxed);
    atomic_store_explicit(&helpers->limit, SHOAL_HELPERS_MAX, memory_order_relaxed);
    atomic_store_explicit(&helpers->local_ranks, 1, memory_order_relaxed);
    atomic_store_explicit(&helpers->look_ns, shoal_clock_ns() + SHOAL_NS_PER_S, memory_order_relaxed);
    heed_cores(helpers);
    *helpers_out = helpers;
    return SHOAL_OK;
}

void shoal_helpers_destroy(struct shoal_helpers *helpers)
{
    if (!helpers)
        return;
    SHOAL_ASSERT(!atomic_load_explicit(&helpers->used, memory_order_relaxed));
    atomic_store_explicit(&helpers->must_stop, true, memory_order_seq_cst);
    for (int h = 0; h < helpers->made; h++)
        wake_helper(&helpers->helper[h]);
    for (int h = 0; h < helpers->made; h++)
        pthread_join(helpers->helper[h].thread, NULL);
    free(helpers);
}

void shoal_helpers_note_ranks(struct shoal_helpers *helpers, int cores, int local_ranks)
{
    if (local_ranks <= atomic_load_explicit(&helpers->local_ranks, memory_order_relaxed))
        return;
    atomic_store_explicit(&helpers->together, cores, memory_order_relaxed);
    atomic_store_explicit(&helpers->local_ranks, local_ranks, memory_order_relaxed);
    atomic_store_explicit(&helpers->look_ns, shoal_clock_ns() + SHOAL_NS_PER_S, memory_order_relaxed);
    heed_cores(helpers);
}

int shoal_helpers_width(const struct shoal_helpers *helpers)
{
    return find_width(helpers);
}

bool shoal_helpers_is_fixed(const struct shoal_helpers *helpers)
{
    return helpers->options.threads != 0;
}

void shoal_helpers_limit(struct shoal_helpers *helpers, int most)
{
    SHOAL_ASSERT(most >= 1);
    atomic_store_explicit(&helpers->limit, most, memory_order_relaxed);
}

/* ---- Jobs ---------------------------------------------------------------------------------------------------------------- */

/* Returns a free slot, or SLOTS if there is none. */
static unsigned helpers_take_slot(struct shoal_helpers *helpers)
{
    const unsigned turn = atomic_fetch_add_explicit(&helpers->turn, 1, memory_order_relaxed);
    for (unsigned i = 0; i < SLOTS; i++) {
        const unsigned s = (turn + i) % SLOTS;
        const uint64_t bit = UINT64_C(1) << s;
        /* acquire: pairs with the release in free_slot(), in case another thread has used the slot before. */
        if (!(atomic_load_explicit(&helpers->used, memory_order_relaxed) & bit) &&
            !(atomic_fetch_or_explicit(&helpers->used, bit, memory_order_acquire) & bit))
            return s;
    }
    return SLOTS;
}

static void free_slot(struct shoal_helpers *helpers, int ticket)
{
    atomic_fetch_and_explicit(&helpers->used, ~(UINT64_C(1) << ticket), memory_order_release);
}

static void fill_slot(struct slot *slot, shoal_helpers_fn run, void *arg, uint32_t parts)
{
    const uint64_t before = atomic_load_explicit(&slot->claims, memory_order_relaxed);
    const uint64_t generation = (before / CLAIM_GENERATION + 1) * CLAIM_GENERATION;
    slot->run = run;
    slot->arg = arg;
    atomic_store_explicit(&slot->ended, 0, memory_order_relaxed);
    /* release: pairs with claim_parts(). */
    atomic_store_explicit(&slot->claims, generation | parts, memory_order_release);
}

int shoal_helpers_post(struct shoal_helpers *helpers, shoal_helpers_fn run, void *arg, uint32_t parts)
{
    SHOAL_ASSERT(parts >= 1 && parts <= SHOAL_HELPERS_PARTS_MAX);
    if (find_width(helpers) == 1)
        return -1;
    if (SHOAL_UNLIKELY(!atomic_load_explicit(&helpers->has_threads, memory_order_relaxed)))
        make_threads(helpers);
    const unsigned s = helpers_take_slot(helpers);
    if (s == SLOTS)
        return -1;
    /* The bit comes first: whoever claims the last part clears it. */
    atomic_fetch_or_explicit(&helpers->open, UINT64_C(1) << s, memory_order_seq_cst);
    fill_slot(&helpers->slots[s], run, arg, parts);
    wake_one(helpers);
    return (int)s;
}

bool shoal_helpers_help(struct shoal_helpers *helpers, int ticket)
{
    SHOAL_ASSERT(ticket >= 0 && ticket < SLOTS);
    return run_part_of(helpers, (unsigned)ticket);
}

static bool have_all_ended(const struct slot *slot)
{
    const uint64_t claims = atomic_load_explicit(&slot->claims, memory_order_relaxed); /* the owner wrote the parts */
    /* acquire: pairs with the release of end_parts(). */
    return atomic_load_explicit(&slot->ended, memory_order_acquire) == claims_parts(claims);
}

bool shoal_helpers_has_ended(struct shoal_helpers *helpers, int ticket)
{
    SHOAL_ASSERT(ticket >= 0 && ticket < SLOTS);
    if (!have_all_ended(&helpers->slots[ticket]))
        return false;
    free_slot(helpers, ticket);
    return true;
}

/* Polls before a wait for a helper yields, and yields before it sleeps. A part takes some ten microseconds, unless its thread
 * is not running. */
#define WAIT_POLLS 2000
#define WAIT_YIELDS 200
#define WAIT_SLEEP_NS 50000

static void wait_for_parts(const struct slot *slot)
{
    for (unsigned turns = 0; !have_all_ended(slot); turns++) {
        if (turns < WAIT_POLLS)
            shoal_clock_relax();
        else if (turns < WAIT_POLLS + WAIT_YIELDS)
            sched_yield();
        else
            (void)nanosleep(&(struct timespec){.tv_nsec = WAIT_SLEEP_NS}, NULL);
    }
}

bool shoal_helpers_stop(struct shoal_helpers *helpers, int ticket)
{
    struct slot *slot = &helpers->slots[ticket];
    uint64_t claims;
    const uint32_t dropped = claim_parts(helpers, (unsigned)ticket, SHOAL_HELPERS_PARTS_MAX, &claims);
    SHOAL_ASSERT(ticket >= 0 && ticket < SLOTS);
    if (dropped)
        end_parts(slot, claims, dropped);
    wait_for_parts(slot);
    free_slot(helpers, ticket);
    return !dropped;
}

void shoal_helpers_run(struct shoal_helpers *helpers, shoal_helpers_fn run, void *arg, uint32_t parts)
{
    const int ticket = parts > 1 ? shoal_helpers_post(helpers, run, arg, parts) : -1;
    if (ticket < 0) {
        for (uint32_t part = 0; part < parts; part++)
            run(arg, part);
        return;
    }
    while (run_part_of(helpers, (unsigned)ticket))
        continue;
    wait_for_parts(&helpers->slots[ticket]);
    free_slot(helpers, ticket);
}
