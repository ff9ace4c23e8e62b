/* One communicator's agreement of survivors (survivors.h), with its clock and the path of its messages. A rank takes turns
 * until there is a result. Between two agreements the messages of ranks that have not finished the last one are still
 * answered.
 *
 * On one host messages are on boards in shared memory, and only a rank inside a call takes turns. Over several hosts they are
 * notices of the control tree, and its thread also takes turns. The owner locks. */
#ifndef SHOAL_MEMBERSHIP_AGREEMENT_H
#define SHOAL_MEMBERSHIP_AGREEMENT_H

#include "membership/survivors.h"

struct shoal_agreement;

/* How an agreement reaches the other ranks of its communicator. */
struct shoal_agreement_path {
    void *arg;
    void (*send)(void *arg, const struct shoal_survivors_message *message); /* to all others */
    /* Returns true if the rank is lost, or has left: it is not waited for. Not called for this rank. */
    bool (*has_ended)(void *arg, int rank);
};

/* Returns NULL if out of memory. `path` is copied. */
struct shoal_agreement *shoal_agreement_create(int rank, int size, const struct shoal_agreement_path *path);
/* NULL is allowed. */
void shoal_agreement_destroy(struct shoal_agreement *agreement);

/* Opens the agreement, or changes this rank's proposal. Returns false if out of memory. */
SHOAL_MUST_USE bool shoal_agreement_propose(struct shoal_agreement *agreement, const struct shoal_survivors_view *view);

/* Looks for ranks that have ended. Call it before messages are received: a rank may leave its last message and then end. */
void shoal_agreement_look(struct shoal_agreement *agreement);
void shoal_agreement_receive(struct shoal_agreement *agreement, int from, const struct shoal_survivors_message *message);
/* Sends what is due. Returns when the next turn is due without a message; 0: none is. */
uint64_t shoal_agreement_turn(struct shoal_agreement *agreement, uint64_t now_ns);

/* Ends the agreement for this rank and stores its result: OK; ERR_PEER_LOST: the other ranks have continued without this rank.
 * PENDING: not agreed yet. */
SHOAL_MUST_USE enum shoal_status shoal_agreement_result(struct shoal_agreement *agreement,
                                                        struct shoal_survivors_view *agreed_out);
/* Returns the next rank, from `first` on, that it waits for; -1 if there is none. */
int shoal_agreement_missing(const struct shoal_agreement *agreement, int first);

#endif
