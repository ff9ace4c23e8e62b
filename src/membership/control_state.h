/* A rank's knowledge of the world: one fact for each rank, and the last notices. Facts only ever get newer, and notices have
 * numbers, so the order in which they come from several neighbours does not matter. Each change has a number, each notice a
 * place: a sender remembers how far it has told each neighbour. No sockets, no clock; its owner locks, but for is_lost. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_STATE_H
#define SHOAL_MEMBERSHIP_CONTROL_STATE_H

#include <stdatomic.h>

#include "membership/control_wire.h"

struct shoal_control_rank {
    _Atomic uint8_t life; /* enum shoal_control_life */
    uint8_t cause;
    uint32_t pauses;
    uint64_t changed;       /* number of the last change; 0: none */
    uint64_t stopped_ns;    /* about when its last heartbeat came */
    uint64_t last_notice;   /* number of its last notice */
    bool is_loss_handed_on; /* to the handler */
};

struct shoal_control_notice {
    uint64_t number;
    uint64_t via; /* the link it came on; 0: own */
    int origin;
    enum shoal_control_weight weight;
    bool is_delivered; /* to the handler */
    size_t bytes;
    unsigned char data[];
};

struct shoal_control_state {
    int rank, size;
    struct shoal_control_rank *ranks;
    uint64_t changes;
    uint32_t *changed; /* the ranks of the last changes, by their numbers: [change % changed_size] */
    size_t changed_size;
    struct shoal_control_notice **notices; /* a ring of SHOAL_CONTROL_NOTICES_MAX: places [first, end) are in use */
    uint64_t notice_first, notice_end;
};

SHOAL_MUST_USE bool shoal_control_state_init(struct shoal_control_state *state, int rank, int size);
void shoal_control_state_fini(struct shoal_control_state *state);

/* Takes what is news of a fact. False when nothing is. */
bool shoal_control_state_learn(struct shoal_control_state *state, const struct shoal_control_fact *fact, uint64_t now_ns);

/* Facts that this rank has found out itself; nothing changes where they are known. */
bool shoal_control_state_end(struct shoal_control_state *state, int rank, enum shoal_control_life life,
                             enum shoal_control_cause cause);
bool shoal_control_state_stop(struct shoal_control_state *state, int rank, bool is_stopped, uint64_t now_ns);

/* The fact with the least change number above `after`; false when there is none. *change_out is its number. */
bool shoal_control_state_next(const struct shoal_control_state *state, uint64_t after, struct shoal_control_fact *fact_out,
                              uint64_t *change_out);

enum shoal_control_life shoal_control_state_life(const struct shoal_control_state *state, int rank);
bool shoal_control_state_is_stopped(const struct shoal_control_state *state, int rank);

/* The rule of the tree (control.h) for any rank, as far as this one knows; -1: it has none. */
int shoal_control_state_parent(const struct shoal_control_state *state, int rank);
/* The lowest rank that is alive and not stopped; where all are stopped, the lowest that is alive; -1: nobody is left. */
int shoal_control_state_root(const struct shoal_control_state *state);
/* How many of its ancestors are not usable, so that a rank may have to give up each of them before it reaches its parent. */
int shoal_control_state_passed(const struct shoal_control_state *state, int rank);
/* Whether a rank was lost without a word: SHOAL_CONTROL_UNREACHABLE_MS had to pass. Any thread. */
bool shoal_control_state_is_cut_off(const struct shoal_control_state *state, int rank);
/* Whether one of those ancestors was. */
bool shoal_control_state_passed_in_silence(const struct shoal_control_state *state, int rank);

/* Adds a notice unless it is known. A full ring drops the oldest notice of the least weight, and the notices before that one
 * move by a place; some may then be told twice, which does no harm. False: no memory. */
bool shoal_control_state_add(struct shoal_control_state *state, const struct shoal_control_notice_head *head, const void *data,
                             size_t bytes, uint64_t via);
/* The notice at a place in [first, end). */
struct shoal_control_notice *shoal_control_state_notice(const struct shoal_control_state *state, uint64_t place);
/* Forgets what is below `needed`, but for the last SHOAL_CONTROL_NOTICES_KEPT. */
void shoal_control_state_trim(struct shoal_control_state *state, uint64_t needed);

void shoal_control_state_describe(const struct shoal_control_state *state, int rank, uint64_t now_ns, char *text, size_t bytes);

#endif
