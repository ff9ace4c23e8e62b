/* How the ranks of a world that are left agree on who they are, and on the last operation of each communicator that all of them
 * completed. Shrinking a broken communicator begins with this agreement.
 *
 * Each survivor proposes a view: the ranks that it holds alive, and what it has completed. When all have proposed, one of them,
 * the coordinator, has them promise to follow it, decides, and the others adopt the decision. It stands when all ranks that are
 * in it have adopted it:
 *
 *     rank 0, the coordinator     rank 1                  rank 2                    of 4 ranks; rank 3 was lost
 *     PROPOSAL {0 1 2}, 7         PROPOSAL {0 1 2}, 9     PROPOSAL {0 1 2}, 8       each to all
 *     PREPARE  ballot 1   --->    PROMISE                 PROMISE
 *     DECISION {0 1 2}, 7 --->    ADOPTED                 ADOPTED                   each to all: agreed
 *
 * The coordinator is the lowest rank that has proposed, is not lost and not given up. Nobody waits for a rank that is lost, or
 * given up: more than half of those that are left do not hold it alive. Where two ranks do not hold each other alive, one of
 * them is left out. When a coordinator is lost, the next one begins a ballot with a higher number; it learns from the promises
 * which decision was adopted before, and repeats it. This is Paxos in which every survivor is asked, so whatever ranks are lost
 * meanwhile, any two survivors return the same, or sets that have no rank in common.
 *
 * A rank of the decision that is lost after it had proposed may be in it: the survivors find that out and agree again, under
 * the next epoch. Ranks that cannot reach each other hold each other lost, and each side agrees by itself: a caller that must
 * not go on twice asks for more than half of the ranks.
 *
 * This is state and rules: it knows no clock, no thread and no connection. Its owner locks, passes messages on, and says who is
 * lost. Messages may come late and twice; what a lost rank said may come to all or to nobody. */
#ifndef SHOAL_MEMBERSHIP_SURVIVORS_H
#define SHOAL_MEMBERSHIP_SURVIVORS_H

#include "base/compiler.h"
#include "base/ranks.h"

#define SHOAL_SURVIVORS_COMMS_MAX 64

/* The last operation that a rank has completed on a communicator. */
struct shoal_survivors_comm {
    uint64_t comm;
    uint64_t completed;
};

/* A view: proposed by a rank, or decided. A communicator that nobody names is in no decision. */
struct shoal_survivors_view {
    unsigned char alive[SHOAL_RANKS_MAX / 8]; /* rank r: bit r % 8 of byte r / 8 */
    uint32_t comm_count;
    bool has_too_many; /* of a decision: the survivors named more communicators than fit, and some are missing */
    struct shoal_survivors_comm comms[SHOAL_SURVIVORS_COMMS_MAX];
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
    bool is_repeated; /* the sender lacks something: it is to be answered again */
    uint64_t epoch;
    uint64_t ballot;  /* not of a proposal */
    uint64_t adopted; /* of a promise: the ballot of its view; 0: it has none */
    struct shoal_survivors_view view;
};

/* As it travels, little-endian: head | the set's bytes | the communicators. Without a view the head alone. */
#define SHOAL_SURVIVORS_HEAD_BYTES 32
#define SHOAL_SURVIVORS_BYTES_MAX \
    (SHOAL_SURVIVORS_HEAD_BYTES + SHOAL_RANKS_MAX / 8 + SHOAL_SURVIVORS_COMMS_MAX * sizeof(struct shoal_survivors_comm))

/* Writes a message of a world of `size` ranks; `to` has room for SHOAL_SURVIVORS_BYTES_MAX. Returns its bytes. */
size_t shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to);
/* False when the bytes are no message; then *message_out means nothing. */
bool shoal_survivors_read(const unsigned char *data, size_t bytes, int size, struct shoal_survivors_message *message_out);

/* This rank's knowledge of another. */
struct shoal_survivors_rank {
    bool has_ended;
    uint64_t proposed; /* the epoch of its view; 0: none */
    struct shoal_survivors_view *view;
    uint64_t adopted_epoch, adopted_ballot; /* the last */
    uint64_t promised;                      /* to this rank: the ballot */
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
    uint16_t *accusers;                   /* [size] how many hold a rank not alive; used while deciding */
    uint64_t epoch;                       /* of the agreement under way, or of the next one; from 1 */
    bool is_open;                         /* this rank has proposed in it */
    struct shoal_survivors_vote votes[2]; /* by epoch % 2: in it, and in the one before, which others may not have finished */
    uint64_t highest;                     /* ballot received in it */
    enum shoal_survivors_phase phase;     /* as its coordinator */
    uint64_t ballot;                      /* the same */
    uint64_t best;                        /* of what others say they have adopted: the highest ballot, and what it decided */
    struct shoal_survivors_view best_view;
    unsigned owed, owed_before; /* messages to be sent, of it and of the one before: bits 1 << kind */
    bool repeats;
};

SHOAL_MUST_USE bool shoal_survivors_init(struct shoal_survivors *survivors, int rank, int size);
void shoal_survivors_fini(struct shoal_survivors *survivors);

/* Opens the agreement, or changes this rank's proposal as long as it has adopted nothing; the own rank is alive. False without
 * memory. */
SHOAL_MUST_USE bool shoal_survivors_propose(struct shoal_survivors *survivors, const struct shoal_survivors_view *view);
/* Ends it for this rank: the next proposal is for the next epoch. Only when it is agreed, and nothing is owed. */
void shoal_survivors_finish(struct shoal_survivors *survivors);

/* A message of another rank. A message for which there is no memory is dropped. */
void shoal_survivors_receive(struct shoal_survivors *survivors, int from, const struct shoal_survivors_message *message);
/* A rank is lost, or has left. Final. */
void shoal_survivors_end(struct shoal_survivors *survivors, int rank);

/* Begins a ballot, or decides, where that is this rank's turn. Call it after anything has changed, then send what is owed. */
void shoal_survivors_step(struct shoal_survivors *survivors);
/* The next message to all others; false: there is none. */
bool shoal_survivors_take(struct shoal_survivors *survivors, struct shoal_survivors_message *message_out);
/* Makes this rank send its messages again, because one seems to be lost. */
void shoal_survivors_repeat(struct shoal_survivors *survivors);

/* The agreed view; NULL: none yet. Until the next call but these two. */
const struct shoal_survivors_view *shoal_survivors_agreed(const struct shoal_survivors *survivors);
/* The next rank from `first` on that the agreement under way waits for; -1: none. */
int shoal_survivors_missing(const struct shoal_survivors *survivors, int first);

#endif
