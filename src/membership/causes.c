#include "membership/causes.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"

static int weight_of(enum shoal_status status)
{
    switch (status) {
    case SHOAL_ERR_PEER_LOST:
        return 1;
    case SHOAL_ERR_ABORTED:
        return 2;
    case SHOAL_ERR_TIMEOUT:
        return 3;
    default:
        return 0;
    }
}

bool shoal_cause_is_before(const struct shoal_failure *a, const struct shoal_failure *b)
{
    const int weight_a = weight_of(a->status), weight_b = weight_of(b->status);
    if (weight_a != weight_b)
        return weight_a < weight_b;
    if (a->sequence != b->sequence)
        return a->sequence < b->sequence;
    if ((a->rank < 0) != (b->rank < 0))
        return b->rank < 0;
    return a->reporter < b->reporter;
}

struct shoal_cause *shoal_causes_find(const struct shoal_causes *causes, uint64_t comm)
{
    struct shoal_cause *cause = causes->first;
    while (cause && cause->comm != comm)
        cause = cause->next;
    return cause;
}

static void free_from(struct shoal_cause **link)
{
    while (*link) {
        struct shoal_cause *cause = *link;
        *link = cause->next;
        free(cause);
    }
}

void shoal_causes_fini(struct shoal_causes *causes)
{
    free_from(&causes->first);
}

/* If there are too many causes, frees the oldest decided one. The others are decided within seconds. */
static void forget_oldest(struct shoal_causes *causes)
{
    struct shoal_cause **oldest = NULL;
    int count = 0;
    for (struct shoal_cause **link = &causes->first; *link; link = &(*link)->next) {
        if (!(*link)->is_decided || (*link)->is_leaving)
            continue;
        oldest = link;
        count++;
    }
    if (count <= SHOAL_CAUSES_KEPT)
        return;
    struct shoal_cause *cause = *oldest;
    *oldest = cause->next;
    free(cause);
}

static struct shoal_cause *add(struct shoal_causes *causes, uint64_t comm, const struct shoal_failure *failure)
{
    struct shoal_cause *cause = calloc(1, sizeof *cause);
    if (!cause)
        return NULL;
    forget_oldest(causes);
    cause->comm = comm;
    cause->best = *failure;
    cause->next = causes->first;
    causes->first = cause;
    return cause;
}

struct shoal_cause *shoal_causes_propose(struct shoal_causes *causes, uint64_t comm, const struct shoal_failure *failure,
                                         bool is_own, uint64_t now_ns, bool *is_news_out)
{
    struct shoal_cause *cause = shoal_causes_find(causes, comm);
    const bool is_first = !cause;
    if (is_first && !(cause = add(causes, comm, failure)))
        return NULL;
    if (is_first)
        cause->first_ns = now_ns;
    /* The order is total: two candidates cannot each come before the other. */
    SHOAL_ASSERT(!shoal_cause_is_before(failure, &cause->best) || !shoal_cause_is_before(&cause->best, failure));
    *is_news_out = !cause->is_decided && (is_first || shoal_cause_is_before(failure, &cause->best));
    if (*is_news_out) {
        cause->best = *failure;
        cause->is_own = is_own;
    }
    return cause;
}

struct shoal_cause *shoal_causes_decide(struct shoal_causes *causes, uint64_t comm, const struct shoal_failure *failure)
{
    struct shoal_cause *cause = shoal_causes_find(causes, comm);
    if (!cause)
        cause = add(causes, comm, failure);
    if (!cause || cause->is_decided)
        return NULL;
    cause->best = *failure;
    cause->is_decided = true;
    return cause;
}

void shoal_causes_excuse(struct shoal_causes *causes, uint64_t held_up_ns, uint64_t now_ns)
{
    for (struct shoal_cause *cause = causes->first; cause; cause = cause->next) {
        const uint64_t waited_ns = now_ns > cause->first_ns ? now_ns - cause->first_ns : 0;
        cause->first_ns += held_up_ns < waited_ns ? held_up_ns : waited_ns;
    }
}

/* Returns true if the process was already blamed with the same status for another communicator. */
static bool was_blamed(const struct shoal_causes *causes, const struct shoal_failure *failure)
{
    for (const struct shoal_cause *cause = causes->first; cause && failure->pid; cause = cause->next) {
        if (cause->is_decided && cause->best.status == failure->status && cause->best.pid == failure->pid &&
            strncmp(cause->best.host, failure->host, sizeof failure->host) == 0)
            return true;
    }
    return false;
}

uint64_t shoal_cause_due_ns(const struct shoal_causes *causes, const struct shoal_cause *cause, bool is_root, uint64_t heir_ns)
{
    SHOAL_ASSERT(!cause->is_decided); /* a decision is final */
    uint64_t wait_ms = cause->is_own ? SHOAL_CAUSES_SETTLE_MS : SHOAL_CAUSES_ALONE_MS;
    if (is_root) /* wanted at once: a cause that a rank has set itself, and one that blames a process which was blamed before */
        wait_ms = cause->best.is_given || was_blamed(causes, &cause->best) ? 0 : SHOAL_CAUSES_COLLECT_MS;
    const uint64_t due_ns = cause->first_ns + wait_ms * SHOAL_NS_PER_MS;
    const uint64_t collected_ns = is_root && heir_ns ? heir_ns + SHOAL_CAUSES_HEIR_MS * SHOAL_NS_PER_MS : 0;
    return due_ns > collected_ns ? due_ns : collected_ns;
}
