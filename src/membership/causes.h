/* How the ranks of a world agree on one first cause for each communicator that fails, whichever host finds what first.
 *
 * Each rank that knows of a failure proposes a candidate, which floods to every rank of the world. The root of the control tree
 * collects candidates for a moment, chooses the best of them, and floods this decision, which is final. A root that does not
 * answer is replaced when the tree reconnects around it. If that does not happen in time, the rank that proposed the best
 * candidate decides, and the others decide a little later.
 *
 * This module keeps the candidates and computes when to decide. It knows no clock, no thread and no connection: membership.c
 * does. */
#ifndef SHOAL_MEMBERSHIP_CAUSES_H
#define SHOAL_MEMBERSHIP_CAUSES_H

#include "base/compiler.h"
#include "shoal/shoal.h"

#define SHOAL_CAUSES_COLLECT_MS 100 /* how long the root collects candidates: at a deadline, all hosts find theirs at once */
#define SHOAL_CAUSES_HEIR_MS 300    /* how long a new root lets others connect: its predecessor may have decided */
#define SHOAL_CAUSES_SETTLE_MS 2000 /* how long the rank with the best candidate waits for a root that does not answer */
#define SHOAL_CAUSES_ALONE_MS 2300  /* how long all other ranks wait */
#define SHOAL_CAUSES_KEPT 64        /* number of decided causes that are kept, for communicators that are made later */

struct shoal_cause {
    struct shoal_cause *next;
    uint64_t comm;
    uint64_t first_ns; /* when this rank learned of the first candidate */
    bool is_decided;
    bool is_leaving; /* decided here and being sent: other hosts must have it before this host's ranks read it */
    bool is_own;     /* this rank proposed the best candidate */
    struct shoal_failure best;
};

struct shoal_causes {
    struct shoal_cause *first; /* the newest */
};

void shoal_causes_fini(struct shoal_causes *causes);

/* Orders the candidates for one communicator totally: returns true if a comes before b. Errors in a rank's own calls or memory
 * come first, then a lost rank, then an abort, then a timeout, because each may cause those after it. Among equals the lower
 * sequence comes first, then a candidate that names a rank, then the lower reporter. */
bool shoal_cause_is_before(const struct shoal_failure *a, const struct shoal_failure *b);

/* Returns NULL if nothing is known about the communicator. */
struct shoal_cause *shoal_causes_find(const struct shoal_causes *causes, uint64_t comm);

/* Adds a candidate, from this rank (is_own) or another. Returns the communicator's cause, or NULL if out of memory.
 * *is_news_out is set if the candidate is the best so far, and nothing is decided. */
struct shoal_cause *shoal_causes_propose(struct shoal_causes *causes, uint64_t comm, const struct shoal_failure *failure,
                                         bool is_own, uint64_t now_ns, bool *is_news_out);

/* Stores a decision. Returns NULL if there already was one, or if out of memory. */
struct shoal_cause *shoal_causes_decide(struct shoal_causes *causes, uint64_t comm, const struct shoal_failure *failure);

/* Call this when the deciding thread did not run, and received nothing, for held_up_ns until now_ns: that time does not count
 * as waiting. If it did, all hosts of a machine that was suspended would decide as soon as it resumes, each with only what it
 * knows. */
void shoal_causes_excuse(struct shoal_causes *causes, uint64_t held_up_ns, uint64_t now_ns);

/* Returns when this rank has to decide for the best candidate, if no other rank has by then. heir_ns: when it replaced another
 * root, or 0 if it has been the root from the beginning. A root waits for candidates once for each process that is blamed: if
 * many communicators fail because of it, the root decides at once for all but the first. */
uint64_t shoal_cause_due_ns(const struct shoal_causes *causes, const struct shoal_cause *cause, bool is_root, uint64_t heir_ns);

#endif
