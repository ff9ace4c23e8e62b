/* What a rank knows of the world: one fact for each rank, and the latest notices. Facts are only replaced by newer ones, and
 * notices have numbers, so the order in which they arrive from several neighbors does not matter. Each change has a number,
 * each notice a place: a sender remembers how much it has sent to each neighbor. No sockets, no clock. The owner locks, except
 * for is_lost. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_STATE_H
#define SHOAL_MEMBERSHIP_CONTROL_STATE_H

#include <stdatomic.h>

#include "membership/control_wire.h"

struct shoal_control_rank {
    _Atomic uint8_t life; /* enum shoal_control_life */
    uint8_t cause;
    uint32_t pauses;
    uint64_t changed;       /* number of the last change; 0: none */
    uint64_t stopped_ns;    /* approximate time of its last heartbeat */
    uint64_t last_notice;   /* number of its last notice */
    bool is_loss_handed_on; /* the handler was called */
};

struct shoal_control_notice {
    uint64_t number;
    uint64_t via; /* the link on which it came; 0: it is this rank's */
    int origin;
    enum shoal_control_weight weight;
    bool is_delivered; /* passed to the handler */
    size_t bytes;
    unsigned char data[];
};

struct shoal_control_state {
    int rank, size;
    struct shoal_control_rank *ranks;
    uint64_t changes;
    uint32_t *changed; /* the ranks of the latest changes, by number: [change % changed_size] */
    size_t changed_size;
    struct shoal_control_notice **notices; /* a ring of SHOAL_CONTROL_NOTICES_MAX: places [first, end) are in use */
    uint64_t notice_first, notice_end;
};

SHOAL_MUST_USE bool shoal_control_state_init(struct shoal_control_state *state, int rank, int size);
void shoal_control_state_fini(struct shoal_control_state *state);

/* Stores whatever is new in a fact. Returns false if nothing is. */
bool shoal_control_state_learn(struct shoal_control_state *state, const struct shoal_control_fact *fact, uint64_t now_ns);

/* Facts that this rank has found itself. Known facts change nothing. */
bool shoal_control_state_end(struct shoal_control_state *state, int rank, enum shoal_control_life life,
                             enum shoal_control_cause cause);
bool shoal_control_state_stop(struct shoal_control_state *state, int rank, bool is_stopped, uint64_t now_ns);

/* Finds the fact with the lowest change number above `after`, which is stored in *change_out. Returns false if there is
 * none. */
bool shoal_control_state_next(const struct shoal_control_state *state, uint64_t after, struct shoal_control_fact *fact_out,
                              uint64_t *change_out);

enum shoal_control_life shoal_control_state_life(const struct shoal_control_state *state, int rank);
bool shoal_control_state_is_stopped(const struct shoal_control_state *state, int rank);

/* Applies the rule of the tree (control.h) to any rank, with what this rank knows. Returns -1 if the rank has no parent. */
int shoal_control_state_parent(const struct shoal_control_state *state, int rank);
/* Returns the lowest rank that is alive and not stopped; if all are stopped, the lowest that is alive; -1 if none is left. */
int shoal_control_state_root(const struct shoal_control_state *state);
/* Returns how many of a rank's ancestors are not usable: the rank may have to give up each of them before it reaches its
 * parent. */
int shoal_control_state_passed(const struct shoal_control_state *state, int rank);
/* Returns true if a rank was lost silently: SHOAL_CONTROL_UNREACHABLE_MS had to pass. Any thread. */
bool shoal_control_state_is_cut_off(const struct shoal_control_state *state, int rank);
/* Returns true if one of those ancestors was lost silently. */
bool shoal_control_state_passed_in_silence(const struct shoal_control_state *state, int rank);

/* Adds a notice unless it is known. A full ring drops the oldest notice of the least weight, and the notices before it move by
 * one place. Some may then be sent twice, which does no harm. Returns false if out of memory. */
bool shoal_control_state_add(struct shoal_control_state *state, const struct shoal_control_notice_head *head, const void *data,
                             size_t bytes, uint64_t via);
/* Returns the notice at a place in [first, end). */
struct shoal_control_notice *shoal_control_state_notice(const struct shoal_control_state *state, uint64_t place);
/* Frees the notices below `needed`, except the last SHOAL_CONTROL_NOTICES_KEPT. */
void shoal_control_state_trim(struct shoal_control_state *state, uint64_t needed);

void shoal_control_state_describe(const struct shoal_control_state *state, int rank, uint64_t now_ns, char *text, size_t bytes);

#endif
