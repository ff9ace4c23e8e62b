#include "membership/membership.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "membership/agreement.h"
#include "membership/causes.h"
#include "membership/control.h"

/* Limits on leaves of communicators that this rank has not made yet, and on closed ones. */
#define UNCLAIMED_MAX 1024
#define CLOSED_MAX 256
/* After this time shoal_membership_fail() gives up: the control thread does not run, so it cannot report a decision. */
#define AGREE_S 5
/* If the thread did not run for this long, others may have regarded this rank as stopped, and decided. */
#define HELD_UP_MS (2 * SHOAL_CONTROL_HEARTBEAT_MS)

/* Ranks that are cut off receive nothing from a root. They notice this after the first two times, and have a cause within ten
 * seconds. */
_Static_assert(SHOAL_CONTROL_UNREACHABLE_MS + SHOAL_CONTROL_HEARTBEAT_MS + SHOAL_CAUSES_ALONE_MS < 9000, "ten seconds");
_Static_assert(AGREE_S * 1000 > SHOAL_CAUSES_ALONE_MS && SHOAL_CAUSES_ALONE_MS > SHOAL_CAUSES_SETTLE_MS, "in turn");

enum notice_kind { CANDIDATE = 1, DECISION, LEFT, SURVIVORS };

struct notice {
    uint64_t comm;
    uint64_t completed;
    uint32_t kind;
    int32_t rank;

    struct shoal_failure
        failure; /* not part of LEFT, which ends before it; in SURVIVORS a message of survivors.h replaces it */
};

#define LEFT_BYTES offsetof(struct notice, failure)

_Static_assert(sizeof(struct notice) <= SHOAL_CONTROL_NOTICE_MAX, "a failure is one notice");
_Static_assert(LEFT_BYTES + SHOAL_SURVIVORS_BYTES_MAX <= SHOAL_CONTROL_NOTICE_MAX, "a message of survivors is one notice");

struct left {
    uint64_t comm, completed;
    int rank;
};

struct shoal_membership {
    struct shoal_log *log;
    struct shoal_control *control;
    pthread_mutex_t lock;   /* guards the members below; held while the members' functions are called */
    pthread_cond_t decided; /* signaled for each first cause */
    struct shoal_membership_comm *members;
    struct shoal_causes causes;
    bool is_root;
    /* When this rank replaced another root, or resumed as the root; 0: it is not the root, or always was. */
    uint64_t heir_ns;
    uint64_t turned_ns; /* the last turn of the thread; 0: none */
    struct left unclaimed[UNCLAIMED_MAX];
    unsigned unclaimed_count;    /* total so far */
    uint64_t closed[CLOSED_MAX]; /* communicators that this rank has left */
    unsigned closed_count;       /* total so far */
    _Atomic uint64_t lost_ns[];  /* [size] */
};

/* ---- The first cause, under the lock ------------------------------------------------------------------------------------- */

static struct shoal_membership_comm *find_member(const struct shoal_membership *membership, uint64_t comm)
{
    struct shoal_membership_comm *member = membership->members;
    while (member && member->comm != comm)
        member = member->next;
    return member;
}

static void membership_publish(struct shoal_membership *membership, enum notice_kind kind, uint64_t comm,
                               const struct shoal_failure *failure)
{
    const struct notice notice = {.kind = kind, .comm = comm, .failure = *failure};
    const enum shoal_control_weight weight = kind == DECISION ? SHOAL_CONTROL_VERDICT : SHOAL_CONTROL_OPINION;
    (void)shoal_control_publish(membership->control, weight, &notice, sizeof notice);
}

static void write_cause(struct shoal_membership_comm *member, const struct shoal_failure *failure)
{
    shoal_cause_board_write(member->board, failure);
    member->wake(member->arg);
}

/* The decision is final on this host. */
static void take_decision(struct shoal_membership *membership, uint64_t comm, const struct shoal_failure *failure)
{
    struct shoal_membership_comm *member = find_member(membership, comm);
    if (member)
        write_cause(member, failure);
    pthread_cond_broadcast(&membership->decided);
}

/* Returns false if out of memory. The cause is then published on this host at once, without agreement. */
static bool propose(struct shoal_membership *membership, uint64_t comm, const struct shoal_failure *failure, bool is_own)
{
    bool is_news;
    if (!shoal_causes_propose(&membership->causes, comm, failure, is_own, shoal_clock_ns(), &is_news)) {
        take_decision(membership, comm, failure);
        return false;
    }
    if (is_news && is_own)
        membership_publish(membership, CANDIDATE, comm, failure);
    return true;
}

static void decide(struct shoal_membership *membership, uint64_t comm, const struct shoal_failure *failure)
{
    if (shoal_causes_decide(&membership->causes, comm, failure))
        take_decision(membership, comm, failure);
}

static void note_root(struct shoal_membership *membership, uint64_t now_ns)
{
    const bool is_root = shoal_control_is_root(membership->control);
    const bool was_held_up = membership->turned_ns && now_ns - membership->turned_ns > HELD_UP_MS * SHOAL_NS_PER_MS;
    if (is_root != membership->is_root || was_held_up)
        membership->heir_ns = is_root ? now_ns : 0;
    membership->is_root = is_root;
}

/* The thread turns at least with each heartbeat. If it turns later, it did not run in the time between. */
static void note_turn(struct shoal_membership *membership, uint64_t now_ns)
{
    const uint64_t due_ns = membership->turned_ns + SHOAL_CONTROL_HEARTBEAT_MS * SHOAL_NS_PER_MS;
    if (membership->turned_ns && now_ns > due_ns)
        shoal_causes_excuse(&membership->causes, now_ns - due_ns, now_ns);
    membership->turned_ns = now_ns;
}

/* A rank that reads the decision may exit at once, and its host's control tree with it. So a decision for all hosts is sent
 * first, and ranks of this host can read it only from the next turn on. Returns when to look again. */
static uint64_t decide_one(struct shoal_membership *membership, struct shoal_cause *cause, uint64_t now_ns)
{
    const uint64_t due_ns =
        cause->is_decided ? now_ns : shoal_cause_due_ns(&membership->causes, cause, membership->is_root, membership->heir_ns);
    const bool was_leaving = cause->is_leaving;
    if (due_ns > now_ns)
        return due_ns;
    cause->is_leaving = !cause->is_decided && (membership->is_root || cause->is_own);
    if (cause->is_leaving)
        membership_publish(membership, DECISION, cause->comm, &cause->best);
    else if (!cause->is_decided || was_leaving)
        take_decision(membership, cause->comm, &cause->best);
    cause->is_decided = true;
    return cause->is_leaving ? now_ns : UINT64_MAX;
}

/* Returns when the next decision is due; 0 if none is. */
static uint64_t decide_due(struct shoal_membership *membership, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    note_root(membership, now_ns);
    note_turn(membership, now_ns);
    for (struct shoal_cause *cause = membership->causes.first; cause; cause = cause->next) {
        const uint64_t look_ns = decide_one(membership, cause, now_ns);
        next_ns = look_ns < next_ns ? look_ns : next_ns;
    }
    return next_ns == UINT64_MAX ? 0 : next_ns;
}

/* ---- Survivors, under the lock ------------------------------------------------------------------------------------------- */

static void send_to_survivors(void *arg, const struct shoal_survivors_message *message)
{
    const struct shoal_membership_comm *member = arg;
    unsigned char data[LEFT_BYTES + SHOAL_SURVIVORS_BYTES_MAX];
    const struct notice head = {.comm = member->comm, .kind = SURVIVORS, .rank = member->rank};
    memcpy(data, &head, LEFT_BYTES);
    const size_t bytes = shoal_survivors_write(message, member->size, data + LEFT_BYTES);
    const bool is_final = message->kind == SHOAL_SURVIVORS_DECISION || message->kind == SHOAL_SURVIVORS_ADOPTED;
    (void)shoal_control_publish(member->membership->control, is_final ? SHOAL_CONTROL_VERDICT : SHOAL_CONTROL_OPINION, data,
                                LEFT_BYTES + bytes);
}

static bool has_survivor_ended(void *arg, int rank)
{
    const struct shoal_membership_comm *member = arg;
    return shoal_control_has_ended(member->membership->control, member->world_ranks[rank]);
}

static struct shoal_agreement *find_agreement(struct shoal_membership_comm *member)
{
    const struct shoal_agreement_path path = {member, send_to_survivors, has_survivor_ended};
    if (!member->agreement)
        member->agreement = shoal_agreement_create(member->rank, member->size, &path);
    return member->agreement;
}

/* A message that arrives before this rank has the communicator, or without memory, is dropped: its sender repeats it. */
static void receive_survivors(struct shoal_membership *membership, int from, const struct notice *head, const void *data,
                              size_t bytes)
{
    struct shoal_membership_comm *member = find_member(membership, head->comm);
    struct shoal_survivors_message message;
    if (!member || head->rank < 0 || head->rank >= member->size || member->world_ranks[head->rank] != from ||
        !shoal_survivors_read(data, bytes, member->size, &message) || !find_agreement(member))
        return;
    shoal_agreement_look(member->agreement);
    shoal_agreement_receive(member->agreement, head->rank, &message);
    (void)shoal_agreement_turn(member->agreement, shoal_clock_ns());
}

/* Returns when the next turn is due; 0 if none is. */
static uint64_t turn_survivors(struct shoal_membership *membership, uint64_t now_ns)
{
    uint64_t next_ns = 0;
    for (struct shoal_membership_comm *member = membership->members; member; member = member->next) {
        if (!member->agreement)
            continue;
        shoal_agreement_look(member->agreement);
        const uint64_t due_ns = shoal_agreement_turn(member->agreement, now_ns);
        next_ns = due_ns && (!next_ns || due_ns < next_ns) ? due_ns : next_ns;
    }
    return next_ns;
}

/* ---- On the control thread ----------------------------------------------------------------------------------------------- */

static bool was_closed(const struct shoal_membership *membership, uint64_t comm)
{
    for (unsigned i = 0; i < CLOSED_MAX; i++) {
        if (membership->closed[i] == comm)
            return true;
    }
    return false;
}

static void receive_left(struct shoal_membership *membership, const struct left *left)
{
    struct shoal_membership_comm *member = find_member(membership, left->comm);
    if (member)
        member->left(member->arg, left->rank, left->completed);
    else if (!was_closed(membership, left->comm))
        membership->unclaimed[membership->unclaimed_count++ % UNCLAIMED_MAX] = *left;
}

static void on_notice(void *arg, int from, const void *data, size_t bytes)
{
    struct shoal_membership *membership = arg;
    struct notice notice = {0};
    if (bytes < LEFT_BYTES)
        return;
    memcpy(&notice, data, LEFT_BYTES);
    if (notice.kind == SURVIVORS) {
        pthread_mutex_lock(&membership->lock);
        receive_survivors(membership, from, &notice, (const char *)data + LEFT_BYTES, bytes - LEFT_BYTES);
        pthread_mutex_unlock(&membership->lock);
        return;
    }
    if (bytes != (notice.kind == LEFT ? LEFT_BYTES : sizeof notice))
        return;
    memcpy(&notice, data, bytes);
    notice.failure.text[sizeof notice.failure.text - 1] = notice.failure.host[sizeof notice.failure.host - 1] =
        notice.failure.operation[sizeof notice.failure.operation - 1] = 0;
    pthread_mutex_lock(&membership->lock);
    if (notice.kind == CANDIDATE)
        (void)propose(membership, notice.comm, &notice.failure, false);
    else if (notice.kind == DECISION)
        decide(membership, notice.comm, &notice.failure);
    else if (notice.kind == LEFT)
        receive_left(membership, &(struct left){notice.comm, notice.completed, notice.rank});
    pthread_mutex_unlock(&membership->lock);
}

static void on_lost(void *arg, int rank)
{
    struct shoal_membership *membership = arg;
    char how[160];
    atomic_store_explicit(&membership->lost_ns[rank], shoal_clock_ns(), memory_order_release);
    shoal_control_describe(membership->control, rank, how, sizeof how);
    shoal_log_line(membership->log, SHOAL_LOG_INFO, "hosts", "rank %d of the world: %s", rank, how);
}

static void propose_abort(struct shoal_membership *membership, struct shoal_membership_comm *member)
{
    /* acquire: pairs with the release in shoal_membership_abort. */
    if (atomic_exchange_explicit(&member->is_aborted, false, memory_order_acquire))
        (void)propose(membership, member->comm, &member->given, true);
}

static uint64_t on_turn(void *arg, uint64_t now_ns)
{
    struct shoal_membership *membership = arg;
    pthread_mutex_lock(&membership->lock);
    for (struct shoal_membership_comm *member = membership->members; member; member = member->next)
        propose_abort(membership, member);
    const uint64_t cause_ns = decide_due(membership, now_ns), survivors_ns = turn_survivors(membership, now_ns);
    pthread_mutex_unlock(&membership->lock);
    return !cause_ns || (survivors_ns && survivors_ns < cause_ns) ? survivors_ns : cause_ns;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Uses the clock that a change of the date does not affect. */
static void init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static enum shoal_status connect_ranks(struct shoal_membership *membership, struct shoal_bootstrap *bootstrap,
                                       const struct shoal_membership_options *options)
{
    struct shoal_control_options control = {.log = options->log,
                                            .address = options->address,
                                            .address_bytes = options->address_bytes,
                                            .timeout_ms = options->timeout_ms,
                                            .handler = {membership, on_notice, on_lost, NULL, on_turn}};
    (void)shoal_setting_parse_ports(options->ports, &control.port_low, &control.port_high);
    return shoal_control_open(bootstrap, &control, &membership->control);
}

enum shoal_status shoal_membership_open(struct shoal_bootstrap *bootstrap, const struct shoal_membership_options *options,
                                        struct shoal_membership **membership_out)
{
    const size_t size = (size_t)bootstrap->size;
    struct shoal_membership *membership = calloc(1, sizeof *membership + size * sizeof membership->lost_ns[0]);
    if (!membership)
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "hosts", "no memory for a world");
    membership->log = options->log;
    membership->is_root = bootstrap->rank == 0;
    pthread_mutex_init(&membership->lock, NULL);
    init_condition(&membership->decided);
    const enum shoal_status status = connect_ranks(membership, bootstrap, options);
    if (status != SHOAL_OK) {
        shoal_membership_close(membership);
        return status;
    }
    *membership_out = membership;
    return SHOAL_OK;
}

void shoal_membership_close(struct shoal_membership *membership)
{
    if (!membership)
        return;
    shoal_control_close(membership->control, true);
    shoal_causes_fini(&membership->causes);
    pthread_cond_destroy(&membership->decided);
    pthread_mutex_destroy(&membership->lock);
    free(membership);
}

uint64_t shoal_membership_lost_ns(struct shoal_membership *membership, int rank)
{
    return atomic_load_explicit(&membership->lost_ns[rank], memory_order_acquire);
}

void shoal_membership_watch(struct shoal_membership *membership, int rank, int pidfd)
{
    shoal_control_watch(membership->control, rank, pidfd);
}

bool shoal_membership_has_ended(struct shoal_membership *membership, int rank)
{
    return shoal_control_has_ended(membership->control, rank);
}

bool shoal_membership_is_cut_off(const struct shoal_membership *membership, int rank)
{
    return shoal_control_is_cut_off(membership->control, rank);
}

void shoal_membership_describe(struct shoal_membership *membership, int rank, char *text, size_t bytes)
{
    shoal_control_describe(membership->control, rank, text, bytes);
}

/* ---- Members ------------------------------------------------------------------------------------------------------------- */

void shoal_membership_join(struct shoal_membership *membership, struct shoal_membership_comm *member)
{
    pthread_mutex_lock(&membership->lock);
    const unsigned kept = membership->unclaimed_count < UNCLAIMED_MAX ? membership->unclaimed_count : UNCLAIMED_MAX;
    member->membership = membership;
    member->next = membership->members;
    membership->members = member;
    for (unsigned i = 0; i < kept; i++) {
        if (membership->unclaimed[i].comm == member->comm)
            member->left(member->arg, membership->unclaimed[i].rank, membership->unclaimed[i].completed);
    }
    const struct shoal_cause *cause = shoal_causes_find(&membership->causes, member->comm);
    if (cause && cause->is_decided && !cause->is_leaving)
        write_cause(member, &cause->best);
    pthread_mutex_unlock(&membership->lock);
}

void shoal_membership_leave(struct shoal_membership *membership, struct shoal_membership_comm *member)
{
    pthread_mutex_lock(&membership->lock);
    struct shoal_membership_comm **link = &membership->members;
    while (*link && *link != member)
        link = &(*link)->next;
    if (*link)
        *link = member->next;
    membership->closed[membership->closed_count++ % CLOSED_MAX] = member->comm;
    propose_abort(membership, member); /* the control thread may not have handled it */
    shoal_agreement_destroy(member->agreement);
    member->agreement = NULL;
    pthread_mutex_unlock(&membership->lock);
}

/* Under the lock. Returns false if nothing was decided within a second. */
static bool await_decision(struct shoal_membership *membership)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    return pthread_cond_timedwait(&membership->decided, &membership->lock, &until) == 0;
}

/* Proposes the failure, and waits until all have agreed on a cause, which is then on the board. It stays there, however many
 * other communicators fail meanwhile. Seconds are counted one by one: if the machine is suspended during one of them, the wait
 * does not end before the thread has received what the others sent. */
static void membership_agree(struct shoal_membership_comm *member, const struct shoal_failure *failure)
{
    struct shoal_membership *membership = member->membership;
    struct shoal_failure first;
    int waited_s = 0;
    pthread_mutex_lock(&membership->lock);
    const bool is_kept = !shoal_cause_board_read(member->board, &first) && propose(membership, member->comm, failure, true);
    shoal_control_wake(membership->control);
    while (is_kept && !shoal_cause_board_read(member->board, &first) && waited_s < AGREE_S)
        waited_s += await_decision(membership) ? 0 : 1;
    pthread_mutex_unlock(&membership->lock);
}

void shoal_membership_fail(struct shoal_membership_comm *member, const struct shoal_failure *failure)
{
    if (member->membership)
        membership_agree(member, failure);
    write_cause(member, failure); /* has effect only if nothing was agreed on */
}

/* Process and host are this rank's, if it blames itself. */
static void fill_given(const struct shoal_membership_comm *member, const struct shoal_failure *cause,
                       struct shoal_failure *failure_out)
{
    shoal_cause_fill_abort(failure_out, member->rank, member->host);
    if (!cause)
        return;
    const struct shoal_failure own = *failure_out;
    *failure_out = *cause;
    failure_out->reporter = own.reporter;
    failure_out->is_given = 1;
    if (cause->rank != own.rank || cause->pid)
        return;
    failure_out->pid = own.pid;
    memcpy(failure_out->host, own.host, sizeof own.host);
}

void shoal_membership_abort(struct shoal_membership_comm *member, const struct shoal_failure *cause)
{
    if (!member->membership) {
        struct shoal_failure failure;
        fill_given(member, cause, &failure);
        shoal_cause_board_write(member->board, &failure);
        member->wake(member->arg);
        return;
    }
    if (atomic_exchange_explicit(&member->has_given, true, memory_order_relaxed))
        return;
    fill_given(member, cause, &member->given);
    atomic_store_explicit(&member->has_aborted, true, memory_order_release); /* pairs with the exchange in heed_abort */
    atomic_store_explicit(&member->is_aborted, true, memory_order_release);  /* pairs with the exchange in propose_abort */
    shoal_control_wake(member->membership->control);
}

bool shoal_membership_heed_abort(struct shoal_membership_comm *member, struct shoal_failure *failure_out)
{
    if (atomic_exchange_explicit(&member->has_aborted, false, memory_order_acquire))
        shoal_membership_fail(member, &member->given);
    return shoal_cause_board_read(member->board, failure_out);
}

enum shoal_status shoal_membership_agree(struct shoal_membership_comm *member, const struct shoal_survivors_view *proposal,
                                         struct shoal_survivors_view *agreed_out)
{
    struct shoal_membership *membership = member->membership;
    enum shoal_status status = SHOAL_ERR_MEMORY;
    pthread_mutex_lock(&membership->lock);
    if (find_agreement(member) && (!proposal || shoal_agreement_propose(member->agreement, proposal))) {
        shoal_agreement_look(member->agreement);
        (void)shoal_agreement_turn(member->agreement, shoal_clock_ns());
        status = shoal_agreement_result(member->agreement, agreed_out);
    }
    pthread_mutex_unlock(&membership->lock);
    const bool is_given_up = shoal_control_is_lost(membership->control, member->world_ranks[member->rank]);
    return status == SHOAL_PENDING && is_given_up ? SHOAL_ERR_PEER_LOST : status;
}

int shoal_membership_unagreed(struct shoal_membership_comm *member, int first)
{
    pthread_mutex_lock(&member->membership->lock);
    const int rank = member->agreement ? shoal_agreement_missing(member->agreement, first) : -1;
    pthread_mutex_unlock(&member->membership->lock);
    return rank;
}

void shoal_membership_tell_left(struct shoal_membership *membership, uint64_t comm, int rank, uint64_t completed)
{
    const struct notice notice = {.comm = comm, .completed = completed, .kind = LEFT, .rank = rank};
    (void)shoal_control_publish(membership->control, SHOAL_CONTROL_NEWS, &notice, LEFT_BYTES);
}
