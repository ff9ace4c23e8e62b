/* How the remaining ranks of a communicator agree on who they are, and on the least of a number that each of them proposes.
 * Shrinking a broken communicator begins and ends with this agreement.
 *
 * Each survivor proposes a view: the ranks that it regards as alive, and its number. When all have proposed, one of them, the
 * coordinator, makes them promise to follow it, and decides; the others adopt the decision. It is final when all ranks in it
 * have adopted it:
 *
 *     rank 0, the coordinator     rank 1                  rank 2                    of 4 ranks; rank 3 was lost
 *     PROPOSAL {0 1 2}, 7         PROPOSAL {0 1 2}, 9     PROPOSAL {0 1 2}, 8       each to all
 *     PREPARE  ballot 1   --->    PROMISE                 PROMISE
 *     DECISION {0 1 2}, 7 --->    ADOPTED                 ADOPTED                   each to all: agreed
 *
 * The coordinator is the lowest rank that has proposed and is not gone. A rank is gone for another if it is lost, or if the
 * other has left it out of its own view; nobody waits for a rank that is gone. No decision has two ranks of which one has left
 * out the other. When a coordinator is gone, the next one begins a ballot with a higher number; it learns from the promises
 * which decision was adopted before, and repeats it. This is Paxos in which every survivor is asked. So whatever ranks are lost
 * meanwhile, a survivor and every living rank in its decision return the same decision.
 *
 * A rank in the decision may be lost after it has proposed: the survivors find that out and agree again, under the next epoch.
 * A living rank that is not in the decision learns that it was left out. So does a rank whose decision names another one that
 * has moved on without it: perhaps nobody else has that decision. Ranks that cannot reach each other regard each other
 * as lost, and each side agrees by itself. A caller that must not continue twice requires more than half of the ranks.
 *
 * This is state and rules: it knows no clock, no thread and no connection. Its owner locks, passes messages on, and reports
 * lost ranks. Messages may arrive late and twice; a message of a lost rank may reach all ranks or none. */
#ifndef SHOAL_MEMBERSHIP_SURVIVORS_H
#define SHOAL_MEMBERSHIP_SURVIVORS_H

#include "base/compiler.h"
#include "base/ranks.h"

/* A view: proposed by a rank, or decided. */
struct shoal_survivors_view {
    unsigned char alive[SHOAL_RANKS_MAX / 8]; /* rank r: bit r % 8 of byte r / 8 */
    uint64_t least;                           /* in a decision, the least number that its ranks proposed */
};

static inline bool shoal_survivors_has(const struct shoal_survivors_view *view, int rank)
{
    return view->alive[rank / 8] >> rank % 8 & 1;
}

void shoal_survivors_put(struct shoal_survivors_view *view, int rank, bool is_alive);
int shoal_survivors_count(const struct shoal_survivors_view *view, int size);

enum shoal_survivors_kind {
    SHOAL_SURVIVORS_PROPOSAL = 1,
    SHOAL_SURVIVORS_PREPARE,
    SHOAL_SURVIVORS_PROMISE, /* with the view that the sender had adopted, if any */
    SHOAL_SURVIVORS_DECISION,
    SHOAL_SURVIVORS_ADOPTED,
    SHOAL_SURVIVORS_KIND_END
};

struct shoal_survivors_message {
    enum shoal_survivors_kind kind;
    bool is_repeated; /* the sender lacks something: answer it again */
    uint64_t epoch;
    uint64_t ballot;  /* 0 in a proposal */
    uint64_t adopted; /* in a promise: the ballot of its view; 0: it has none */
    struct shoal_survivors_view view;
};

/* A message in transit, little-endian: head, then the set's bytes. A message without a view is the head alone. */
#define SHOAL_SURVIVORS_HEAD_BYTES 40
#define SHOAL_SURVIVORS_BYTES_MAX (SHOAL_SURVIVORS_HEAD_BYTES + SHOAL_RANKS_MAX / 8)

/* Writes a message of `size` ranks; `to` has room for SHOAL_SURVIVORS_BYTES_MAX. Returns its length in bytes. */
size_t shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to);
/* Returns false if the bytes are not a message; *message_out is then undefined. */
bool shoal_survivors_read(const unsigned char *data, size_t bytes, int size, struct shoal_survivors_message *message_out);

/* This rank's knowledge of another. */
struct shoal_survivors_rank {
    bool has_ended;
    uint64_t proposed; /* the epoch of its view; 0: none */
    struct shoal_survivors_view *view;
    uint64_t adopted_epoch, adopted_ballot; /* the last */
    uint64_t promised;                      /* the ballot that it has promised this rank to follow */
};

/* This rank's promise and adopted view in one agreement. */
struct shoal_survivors_vote {
    uint64_t promised;
    uint64_t adopted; /* the ballot of `decision`; 0: none */
    struct shoal_survivors_view decision;
};

enum shoal_survivors_phase { SHOAL_SURVIVORS_IDLE, SHOAL_SURVIVORS_PREPARING, SHOAL_SURVIVORS_DECIDED };

struct shoal_survivors {
    int rank, size;
    struct shoal_survivors_rank *ranks;   /* [size] */
    uint16_t *accusers;                   /* [size] how many ranks have left a rank out; used while deciding */
    uint64_t epoch;                       /* number of the agreement under way, or of the next one; from 1 */
    bool is_open;                         /* this rank has proposed in it */
    struct shoal_survivors_vote votes[2]; /* by epoch % 2: in it, and in the one before, which others may not have finished */
    uint64_t highest;                     /* ballot received in it */
    enum shoal_survivors_phase phase;     /* as its coordinator */
    uint64_t ballot;                      /* this rank's, as its coordinator */
    uint64_t best;                        /* highest ballot that was adopted according to the promises, and its decision */
    struct shoal_survivors_view best_view;
    unsigned owed, owed_before; /* messages to send, of this agreement and of the one before: bits 1 << kind */
    bool repeats;
};

SHOAL_MUST_USE bool shoal_survivors_init(struct shoal_survivors *survivors, int rank, int size);
void shoal_survivors_fini(struct shoal_survivors *survivors);

/* Opens the agreement, or changes this rank's proposal. This rank counts as alive. Returns false if out of memory. */
SHOAL_MUST_USE bool shoal_survivors_propose(struct shoal_survivors *survivors, const struct shoal_survivors_view *view);
/* Ends it for this rank: the next proposal is for the next epoch. Call it only when it is agreed and nothing is owed. */
void shoal_survivors_finish(struct shoal_survivors *survivors);

/* Takes in a message of another rank. If there is not enough memory for it, it is dropped. */
void shoal_survivors_receive(struct shoal_survivors *survivors, int from, const struct shoal_survivors_message *message);
/* A rank is lost, or has left. This is final. */
void shoal_survivors_end(struct shoal_survivors *survivors, int rank);

/* Begins a ballot, or decides, if that is this rank's turn. Call it after anything has changed, then send what is owed. */
void shoal_survivors_step(struct shoal_survivors *survivors);
/* Stores the next message to all others; returns false if there is none. */
bool shoal_survivors_take(struct shoal_survivors *survivors, struct shoal_survivors_message *message_out);
/* Makes this rank send its messages again, because one seems to be lost. */
void shoal_survivors_repeat(struct shoal_survivors *survivors);

/* Returns the agreed view, or NULL if there is none yet. Valid until the next call of another function. */
const struct shoal_survivors_view *shoal_survivors_agreed(const struct shoal_survivors *survivors);
/* Returns true if the others have finished the agreement under way without this rank, which has not received their decision.
 * Then it decides nothing, even when all others have ended. */
bool shoal_survivors_is_left_out(const struct shoal_survivors *survivors);
/* Returns the next rank, from `first` on, that the agreement under way waits for; -1 if there is none. */
int shoal_survivors_missing(const struct shoal_survivors *survivors, int first);

#endif
