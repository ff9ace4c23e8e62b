/* Small operations over several hosts: data travel with the announcements, as in direct ones, but in rounds between hosts
 * (recursive doubling), so that a rank sends about log2 H announcements instead of one to each remote rank.
 *
 * First the ranks of a host read each other's data, so that each of them holds all data of its host. Let a host have L ranks:
 * its rank l sends to those ranks of another host whose local number modulo L is l, so each rank receives from one. The first P
 * of H hosts take part, where P is the largest power of two up to H. Each other host sends its data to one of these, and
 * receives the result in the end. In round r, hosts at distance 2^r exchange all data that they hold.
 *
 * A rank sends to another at most once, so one announcement of an operation is enough for a pair. Any thread. */
#ifndef SHOAL_COLLECTIVE_ROUNDS_H
#define SHOAL_COLLECTIVE_ROUNDS_H

#include "plan/plan.h"

#define SHOAL_ROUNDS_MAX 14 /* log2 of the ranks, plus two if the number of hosts is not a power of two */
_Static_assert(SHOAL_RANKS_MAX <= 1 << (SHOAL_ROUNDS_MAX - 2), "rounds for every communicator");

struct shoal_ranks {
    const uint16_t *at;
    int count;
};

struct shoal_rounds_step {
    int from;                /* the rank whose announcement to wait for; -1 if none */
    struct shoal_ranks to;   /* before that: the ranks to which this one sends its data */
    struct shoal_ranks held; /* the ranks whose data it holds */
    struct shoal_ranks came; /* the ranks whose data it receives */
    bool is_own_first;       /* order of the two sums, the same on both sides */
    bool is_last_sum;        /* this sum completes the result */
    bool is_result;          /* it receives the result */
};

struct shoal_rounds {
    struct shoal_ranks local; /* the ranks of this host */
    int count;
    struct shoal_rounds_step rounds[SHOAL_ROUNDS_MAX];
    uint16_t *pool; /* ranks */
};

/* Returns the most rounds of a rank. */
int shoal_rounds_count(int hosts);

/* Computes the rounds of one rank. Returns false without memory. */
SHOAL_MUST_USE bool shoal_rounds_init(struct shoal_rounds *rounds, const struct shoal_view *view, int rank);
void shoal_rounds_fini(struct shoal_rounds *rounds);

/* Sets peers[rank] to 1 for the remote ranks that this rank exchanges with. `peers` has view->size entries. */
void shoal_rounds_find_peers(const struct shoal_rounds *rounds, uint8_t *peers);

#endif
