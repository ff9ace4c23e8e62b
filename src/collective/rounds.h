/* Small operations over several hosts: data travel beside the announcements, as in direct ones, but in rounds between hosts
 * (recursive doubling), so that a rank sends some log2 H records rather than one to each remote rank.
 *
 * First the ranks of a host see each other's data. From then on each of them holds what its host holds; rank l of a host sends
 * it to those ranks of another whose local number, modulo the ranks of its own host, is l: so each rank hears one. Of H hosts
 * the first P take part, the largest power of two; each of the others hands what it holds to one of these, and gets the result
 * in the end. In round r hosts at distance 2^r exchange all they hold.
 *
 * A rank sends to another at most once: one record of an operation is enough for a pair. Any thread. */
#ifndef SHOAL_COLLECTIVE_ROUNDS_H
#define SHOAL_COLLECTIVE_ROUNDS_H

#include "plan/plan.h"

#define SHOAL_ROUNDS_MAX 14 /* log2 of the ranks, and two where hosts are no power of two */
_Static_assert(SHOAL_RANKS_MAX <= 1 << (SHOAL_ROUNDS_MAX - 2), "rounds for every communicator");

struct shoal_ranks {
    const uint16_t *at;
    int count;
};

struct shoal_rounds_step {
    int from;                /* the rank whose record is waited for; -1: none */
    struct shoal_ranks to;   /* who is sent what is held so far, before that */
    struct shoal_ranks held; /* whose parts that is */
    struct shoal_ranks came; /* and whose parts come */
    bool is_own_first;       /* of two sums: both sides add in the same order */
    bool is_last_sum;        /* what is added makes the result whole */
    bool is_result;          /* what comes is the result */
};

struct shoal_rounds {
    struct shoal_ranks local; /* the ranks of the own host */
    int count;
    struct shoal_rounds_step rounds[SHOAL_ROUNDS_MAX];
    uint16_t *pool; /* of ranks */
};

/* How many rounds a rank takes at most. */
int shoal_rounds_count(int hosts);

/* Makes the rounds of one rank. False: no memory. */
SHOAL_MUST_USE bool shoal_rounds_init(struct shoal_rounds *rounds, const struct shoal_view *view, int rank);
void shoal_rounds_fini(struct shoal_rounds *rounds);

/* Marks the remote ranks that a rank exchanges with: peers[view->size]. */
void shoal_rounds_find_peers(const struct shoal_rounds *rounds, uint8_t *peers);

#endif
