#include "membership/survivors.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* A ballot names the coordinator that issued it, so no two coordinators issue the same one. */
static uint64_t next_ballot(uint64_t highest, int rank)
{
    return (highest / SHOAL_RANKS_MAX + 1) * SHOAL_RANKS_MAX + (uint64_t)rank;
}

/* No agreement takes that many ballots. A higher one, which only a broken rank sends, has no next one. */
#define BALLOT_MAX (UINT64_MAX / 2)

static int issuer_of(uint64_t ballot)
{
    return (int)(ballot % SHOAL_RANKS_MAX);
}

/* ---- Views --------------------------------------------------------------------------------------------------------------- */

void shoal_survivors_put(struct shoal_survivors_view *view, int rank, bool is_alive)
{
    const unsigned char bit = (unsigned char)(1u << rank % 8);
    if (is_alive)
        view->alive[rank / 8] |= bit;
    else
        view->alive[rank / 8] &= (unsigned char)~bit;
}

int shoal_survivors_count(const struct shoal_survivors_view *view, int size)
{
    int count = 0;
    for (int r = 0; r < size; r++)
        count += shoal_survivors_has(view, r);
    return count;
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

struct head {
    uint8_t kind;
    uint8_t is_repeated;
    uint8_t spare[6];
    uint64_t epoch;
    uint64_t ballot;
    uint64_t adopted;
    uint64_t least;
};
_Static_assert(sizeof(struct head) == SHOAL_SURVIVORS_HEAD_BYTES, "the head in transit");

static bool has_view(uint8_t kind, uint64_t adopted)
{
    return kind == SHOAL_SURVIVORS_PROPOSAL || kind == SHOAL_SURVIVORS_DECISION || (kind == SHOAL_SURVIVORS_PROMISE && adopted);
}

static size_t set_bytes(int size)
{
    return ((size_t)size + 7) / 8;
}

size_t shoal_survivors_write(const struct shoal_survivors_message *message, int size, unsigned char *to)
{
    const bool with_view = has_view((uint8_t)message->kind, message->adopted);
    const struct head head = {.kind = (uint8_t)message->kind,
                              .is_repeated = message->is_repeated,
                              .epoch = message->epoch,
                              .ballot = message->ballot,
                              .adopted = message->adopted,
                              .least = with_view ? message->view.least : 0};
    memcpy(to, &head, sizeof head);
    if (!with_view)
        return sizeof head;
    memcpy(to + sizeof head, message->view.alive, set_bytes(size));
    return sizeof head + set_bytes(size);
}

/* Returns true if the set has ranks that do not exist. */
static bool has_strangers(const struct shoal_survivors_view *view, int size)
{
    for (int r = size; r < (int)set_bytes(size) * 8; r++) {
        if (shoal_survivors_has(view, r))
            return true;
    }
    return false;
}

static bool survivors_is_head_sound(const struct head *head, int size)
{
    static const uint8_t zero[sizeof head->spare];
    const bool has_ballot = head->kind != SHOAL_SURVIVORS_PROPOSAL;
    return head->kind >= SHOAL_SURVIVORS_PROPOSAL && head->kind < SHOAL_SURVIVORS_KIND_END && head->epoch > 0 &&
           head->is_repeated <= 1 && memcmp(head->spare, zero, sizeof zero) == 0 && has_ballot == (head->ballot > 0) &&
           head->ballot <= BALLOT_MAX && issuer_of(head->ballot) < size &&
           (head->kind == SHOAL_SURVIVORS_PROMISE ? head->adopted < head->ballot : !head->adopted) &&
           (has_view(head->kind, head->adopted) || !head->least);
}

bool shoal_survivors_read(const unsigned char *data, size_t bytes, int size, struct shoal_survivors_message *message_out)
{
    struct head head;
    if (bytes < sizeof head)
        return false;
    memcpy(&head, data, sizeof head);
    if (!survivors_is_head_sound(&head, size))
        return false;
    const bool with_view = has_view(head.kind, head.adopted);
    if (bytes != sizeof head + (with_view ? set_bytes(size) : 0))
        return false;
    *message_out = (struct shoal_survivors_message){.kind = (enum shoal_survivors_kind)head.kind,
                                                    .is_repeated = head.is_repeated,
                                                    .epoch = head.epoch,
                                                    .ballot = head.ballot,
                                                    .adopted = head.adopted,
                                                    .view.least = head.least};
    if (with_view)
        memcpy(message_out->view.alive, data + sizeof head, set_bytes(size));
    return !has_strangers(&message_out->view, size);
}

/* ---- Who is waited for --------------------------------------------------------------------------------------------------- */

/* Only the votes of the agreement under way and of the one before it are kept. */
static struct shoal_survivors_vote *vote_of(struct shoal_survivors *survivors, uint64_t epoch)
{
    SHOAL_ASSERT(epoch == survivors->epoch || epoch + 1 == survivors->epoch);
    return &survivors->votes[epoch % 2];
}

static const struct shoal_survivors_vote *current(const struct shoal_survivors *survivors)
{
    return &survivors->votes[survivors->epoch % 2];
}

static bool has_proposed(const struct shoal_survivors *survivors, int rank)
{
    return survivors->ranks[rank].proposed == survivors->epoch;
}

/* Returns true if this rank has left another out of its own view: it ignores that rank. */
static bool is_excluded(const struct shoal_survivors *survivors, int rank)
{
    return survivors->is_open && !shoal_survivors_has(survivors->ranks[survivors->rank].view, rank);
}

static bool survivors_is_gone(const struct shoal_survivors *survivors, int rank)
{
    return survivors->ranks[rank].has_ended || is_excluded(survivors, rank);
}

/* Returns true if the rank counts for the agreement under way. */
static bool is_voter(const struct shoal_survivors *survivors, int rank)
{
    return !survivors_is_gone(survivors, rank) && has_proposed(survivors, rank);
}

static int next_silent(const struct shoal_survivors *survivors, int first)
{
    for (int r = first; r < survivors->size; r++) {
        if (!survivors_is_gone(survivors, r) && !has_proposed(survivors, r))
            return r;
    }
    return -1;
}

static int next_unpromised(const struct shoal_survivors *survivors, int first)
{
    for (int r = first; r < survivors->size; r++) {
        if (is_voter(survivors, r) && survivors->ranks[r].promised != survivors->ballot)
            return r;
    }
    return -1;
}

static bool has_moved_on(const struct shoal_survivors *survivors, int rank)
{
    const struct shoal_survivors_rank *of = &survivors->ranks[rank];
    return of->adopted_epoch > survivors->epoch || of->proposed > survivors->epoch;
}

/* Returns true if the rank has moved on without this rank: it has adopted a decision in a later agreement, in which this rank
 * has not proposed, or has left this rank out of its view. */
static bool survivors_has_left(const struct shoal_survivors *survivors, int rank)
{
    const struct shoal_survivors_rank *of = &survivors->ranks[rank];
    return of->adopted_epoch > survivors->epoch ||
           (of->proposed > survivors->epoch && !shoal_survivors_has(of->view, survivors->rank));
}

static bool has_followed(const struct shoal_survivors *survivors, int rank)
{
    const struct shoal_survivors_rank *of = &survivors->ranks[rank];
    return of->adopted_epoch == survivors->epoch && of->adopted_ballot == current(survivors)->adopted;
}

/* A rank that has moved on together with this rank had finished this agreement. One that has left it may have adopted another
 * decision. */
static bool has_adopted(const struct shoal_survivors *survivors, int rank)
{
    return has_followed(survivors, rank) || (has_moved_on(survivors, rank) && !survivors_has_left(survivors, rank));
}

/* Returns true if a rank in the decision has left this rank, even if it has ended since. Perhaps nobody else has this
 * decision. */
static bool is_left_behind(const struct shoal_survivors *survivors)
{
    for (int r = 0; r < survivors->size && current(survivors)->adopted; r++) {
        if (shoal_survivors_has(&current(survivors)->decision, r) && !is_excluded(survivors, r) &&
            survivors_has_left(survivors, r) && !has_followed(survivors, r))
            return true;
    }
    return false;
}

static int next_undecided(const struct shoal_survivors *survivors, int first)
{
    for (int r = first; r < survivors->size; r++) {
        if (!survivors_is_gone(survivors, r) && shoal_survivors_has(&current(survivors)->decision, r) &&
            !has_adopted(survivors, r))
            return r;
    }
    return -1;
}

static int find_coordinator(const struct shoal_survivors *survivors)
{
    for (int r = 0; r < survivors->size; r++) {
        if (is_voter(survivors, r))
            return r;
    }
    return -1;
}

int shoal_survivors_missing(const struct shoal_survivors *survivors, int first)
{
    if (current(survivors)->adopted)
        return next_undecided(survivors, first);
    if (next_silent(survivors, 0) >= 0)
        return next_silent(survivors, first);
    if (survivors->phase == SHOAL_SURVIVORS_PREPARING)
        return next_unpromised(survivors, first);
    const int coordinator = find_coordinator(survivors);
    return coordinator >= first ? coordinator : -1;
}

const struct shoal_survivors_view *shoal_survivors_agreed(const struct shoal_survivors *survivors)
{
    const struct shoal_survivors_vote *vote = current(survivors);
    const bool is_agreed = survivors->is_open && vote->adopted && next_undecided(survivors, 0) < 0;
    return is_agreed && !is_left_behind(survivors) ? &vote->decision : NULL;
}

/* A rank moves on only after all living ranks of the decision have adopted it. A coordinator decides only after all ranks that
 * it regards as alive have promised to follow it. */
bool shoal_survivors_is_left_out(const struct shoal_survivors *survivors)
{
    bool have_others_moved_on = false, have_others_adopted = false;
    for (int r = 0; r < survivors->size; r++) {
        have_others_moved_on |= has_moved_on(survivors, r);
        have_others_adopted |= survivors->ranks[r].adopted_epoch == survivors->epoch;
    }
    return (have_others_moved_on && !current(survivors)->adopted) || (have_others_adopted && !current(survivors)->promised) ||
           is_left_behind(survivors);
}

/* ---- Deciding ------------------------------------------------------------------------------------------------------------ */

static void count_accusers(struct shoal_survivors *survivors)
{
    memset(survivors->accusers, 0, (size_t)survivors->size * sizeof *survivors->accusers);
    for (int by = 0; by < survivors->size; by++) {
        for (int r = 0; r < survivors->size && is_voter(survivors, by); r++)
            survivors->accusers[r] = (uint16_t)(survivors->accusers[r] + !shoal_survivors_has(survivors->ranks[by].view, r));
    }
}

/* A rank can be in the decision if it follows this one, regards all ranks in it as alive, and they regard it as alive. */
static bool may_join(const struct shoal_survivors *survivors, const struct shoal_survivors_view *chosen, int rank)
{
    if (!is_voter(survivors, rank) || survivors->ranks[rank].promised != survivors->ballot)
        return false;
    for (int r = 0; r < survivors->size; r++) {
        if (shoal_survivors_has(chosen, r) &&
            (!shoal_survivors_has(survivors->ranks[r].view, rank) || !shoal_survivors_has(survivors->ranks[rank].view, r)))
            return false;
    }
    return true;
}

/* Begins with the ranks that the fewest others have left out, so that a rank that most others leave out does not keep them
 * out. */
static void survivors_choose(struct shoal_survivors *survivors, struct shoal_survivors_view *chosen)
{
    *chosen = (struct shoal_survivors_view){.least = UINT64_MAX};
    count_accusers(survivors);
    for (int accusers = 0; accusers < survivors->size; accusers++) {
        for (int r = 0; r < survivors->size; r++) {
            if (survivors->accusers[r] != accusers || !may_join(survivors, chosen, r))
                continue;
            const uint64_t number = survivors->ranks[r].view->least;
            shoal_survivors_put(chosen, r, true);
            chosen->least = number < chosen->least ? number : chosen->least;
        }
    }
}

static void owe(struct shoal_survivors *survivors, uint64_t epoch, enum shoal_survivors_kind kind)
{
    if (epoch == survivors->epoch)
        survivors->owed |= 1u << kind;
    else
        survivors->owed_before |= 1u << kind;
}

static void note_adopted(struct shoal_survivors *survivors, int rank, uint64_t epoch, uint64_t ballot)
{
    struct shoal_survivors_rank *of = &survivors->ranks[rank];
    if (epoch < of->adopted_epoch || (epoch == of->adopted_epoch && ballot <= of->adopted_ballot))
        return;
    of->adopted_epoch = epoch;
    of->adopted_ballot = ballot;
}

static void adopt(struct shoal_survivors *survivors, uint64_t epoch, uint64_t ballot, const struct shoal_survivors_view *view)
{
    struct shoal_survivors_vote *vote = vote_of(survivors, epoch);
    SHOAL_ASSERT(ballot == vote->promised && ballot > vote->adopted); /* only what this rank has promised to follow */
    vote->adopted = ballot;
    vote->decision = *view;
    if (epoch == survivors->epoch)
        note_adopted(survivors, survivors->rank, epoch, ballot);
}

static void note_promise(struct shoal_survivors *survivors, int rank, uint64_t adopted, const struct shoal_survivors_view *view)
{
    survivors->ranks[rank].promised = survivors->ballot;
    if (adopted <= survivors->best)
        return;
    survivors->best = adopted;
    survivors->best_view = *view;
}

static void begin_ballot(struct shoal_survivors *survivors)
{
    struct shoal_survivors_vote *vote = vote_of(survivors, survivors->epoch);
    SHOAL_ASSERT(survivors->highest >= vote->promised); /* so the new ballot is above all that this rank has promised */
    survivors->ballot = survivors->highest = vote->promised = next_ballot(survivors->highest, survivors->rank);
    SHOAL_ASSERT(issuer_of(survivors->ballot) == survivors->rank);
    survivors->phase = SHOAL_SURVIVORS_PREPARING;
    survivors->best = 0;
    for (int r = 0; r < survivors->size; r++)
        survivors->ranks[r].promised = 0;
    note_promise(survivors, survivors->rank, vote->adopted, &vote->decision);
    survivors->owed &= ~(1u << SHOAL_SURVIVORS_DECISION);
    owe(survivors, survivors->epoch, SHOAL_SURVIVORS_PREPARE);
}

static void survivors_decide(struct shoal_survivors *survivors)
{
    struct shoal_survivors_view chosen = survivors->best_view;
    if (!survivors->best)
        survivors_choose(survivors, &chosen);
    survivors->phase = SHOAL_SURVIVORS_DECIDED;
    adopt(survivors, survivors->epoch, survivors->ballot, &chosen);
    survivors->owed &= ~(1u << SHOAL_SURVIVORS_PREPARE);
    owe(survivors, survivors->epoch, SHOAL_SURVIVORS_DECISION);
}

static bool may_coordinate(const struct shoal_survivors *survivors)
{
    return survivors->is_open && next_silent(survivors, 0) < 0 && find_coordinator(survivors) == survivors->rank &&
           !shoal_survivors_agreed(survivors);
}

/* Returns true if no other rank can finish the highest ballot. A rank that this one has left out may: this rank then begins one
 * ballot at once, and the next ones when it repeats its messages, so that two coordinators do not outbid each other. */
static bool survivors_is_free(const struct shoal_survivors *survivors)
{
    const int issuer = issuer_of(survivors->highest);
    return !survivors->highest || survivors->ranks[issuer].has_ended ||
           (is_excluded(survivors, issuer) && survivors->phase == SHOAL_SURVIVORS_IDLE);
}

void shoal_survivors_step(struct shoal_survivors *survivors)
{
    if (!survivors->is_open || shoal_survivors_is_left_out(survivors))
        return;
    if (survivors_is_free(survivors) && may_coordinate(survivors))
        begin_ballot(survivors);
    if (survivors->phase == SHOAL_SURVIVORS_PREPARING && survivors->ballot == survivors->highest &&
        next_unpromised(survivors, 0) < 0)
        survivors_decide(survivors);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

bool shoal_survivors_init(struct shoal_survivors *survivors, int rank, int size)
{
    memset(survivors, 0, sizeof *survivors);
    survivors->rank = rank;
    survivors->size = size;
    survivors->epoch = 1;
    survivors->ranks = calloc((size_t)size, sizeof *survivors->ranks);
    survivors->accusers = calloc((size_t)size, sizeof *survivors->accusers);
    if (survivors->ranks && survivors->accusers)
        return true;
    shoal_survivors_fini(survivors);
    return false;
}

void shoal_survivors_fini(struct shoal_survivors *survivors)
{
    for (int r = 0; survivors->ranks && r < survivors->size; r++)
        free(survivors->ranks[r].view);
    free(survivors->ranks);
    free(survivors->accusers);
    survivors->ranks = NULL;
    survivors->accusers = NULL;
}

static bool keep_view(struct shoal_survivors *survivors, int rank, uint64_t epoch, const struct shoal_survivors_view *view)
{
    struct shoal_survivors_rank *of = &survivors->ranks[rank];
    if (!of->view)
        of->view = malloc(sizeof *of->view);
    if (!of->view)
        return false;
    *of->view = *view;
    of->proposed = epoch;
    return true;
}

bool shoal_survivors_propose(struct shoal_survivors *survivors, const struct shoal_survivors_view *view)
{
    if (!keep_view(survivors, survivors->rank, survivors->epoch, view))
        return false;
    shoal_survivors_put(survivors->ranks[survivors->rank].view, survivors->rank, true);
    survivors->is_open = true;
    owe(survivors, survivors->epoch, SHOAL_SURVIVORS_PROPOSAL);
    return true;
}

void shoal_survivors_finish(struct shoal_survivors *survivors)
{
    SHOAL_ASSERT(shoal_survivors_agreed(survivors) && !survivors->owed && !survivors->owed_before);
    survivors->epoch++;
    survivors->is_open = false;
    memset(vote_of(survivors, survivors->epoch), 0, sizeof survivors->votes[0]);
    survivors->highest = survivors->ballot = 0;
    survivors->phase = SHOAL_SURVIVORS_IDLE;
    survivors->owed = survivors->owed_before = 0;
}

void shoal_survivors_end(struct shoal_survivors *survivors, int rank)
{
    survivors->ranks[rank].has_ended = true;
}

/* ---- Receiving and sending ----------------------------------------------------------------------------------------------- */

static void receive_prepare(struct shoal_survivors *survivors, const struct shoal_survivors_message *message)
{
    struct shoal_survivors_vote *vote = vote_of(survivors, message->epoch);
    if (message->ballot > vote->promised || (message->ballot == vote->promised && message->is_repeated))
        owe(survivors, message->epoch, SHOAL_SURVIVORS_PROMISE);
    if (message->ballot > vote->promised)
        vote->promised = message->ballot;
}

/* Only what this rank has promised to follow. */
static void receive_decision(struct shoal_survivors *survivors, const struct shoal_survivors_message *message)
{
    const struct shoal_survivors_vote *vote = vote_of(survivors, message->epoch);
    if (message->ballot != vote->promised)
        return;
    if (message->ballot != vote->adopted || message->is_repeated)
        owe(survivors, message->epoch, SHOAL_SURVIVORS_ADOPTED);
    if (message->ballot != vote->adopted)
        adopt(survivors, message->epoch, message->ballot, &message->view);
}

static void receive_promise(struct shoal_survivors *survivors, int from, const struct shoal_survivors_message *message)
{
    if (message->epoch == survivors->epoch && survivors->phase == SHOAL_SURVIVORS_PREPARING &&
        message->ballot == survivors->ballot)
        note_promise(survivors, from, message->adopted, &message->view);
}

/* A rank that repeats its ADOPTED may lack this rank's ADOPTED, even when this rank lacks nothing. */
static void receive_adopted(struct shoal_survivors *survivors, int from, const struct shoal_survivors_message *message,
                            bool is_known)
{
    note_adopted(survivors, from, message->epoch, message->ballot);
    if (is_known && message->is_repeated && vote_of(survivors, message->epoch)->adopted)
        owe(survivors, message->epoch, SHOAL_SURVIVORS_ADOPTED);
}

void shoal_survivors_receive(struct shoal_survivors *survivors, int from, const struct shoal_survivors_message *message)
{
    const bool is_known = message->epoch == survivors->epoch || message->epoch + 1 == survivors->epoch;
    if (from == survivors->rank || is_excluded(survivors, from))
        return;
    if (message->epoch == survivors->epoch && message->ballot > survivors->highest)
        survivors->highest = message->ballot;
    if (message->kind == SHOAL_SURVIVORS_PROPOSAL && message->epoch >= survivors->ranks[from].proposed)
        (void)keep_view(survivors, from, message->epoch, &message->view);
    else if (message->kind == SHOAL_SURVIVORS_PREPARE && is_known && issuer_of(message->ballot) == from)
        receive_prepare(survivors, message);
    else if (message->kind == SHOAL_SURVIVORS_DECISION && is_known && issuer_of(message->ballot) == from)
        receive_decision(survivors, message);
    else if (message->kind == SHOAL_SURVIVORS_PROMISE)
        receive_promise(survivors, from, message);
    if (message->kind == SHOAL_SURVIVORS_ADOPTED || message->kind == SHOAL_SURVIVORS_DECISION)
        receive_adopted(survivors, from, message, is_known);
}

/* Returns the lowest kind that is owed, 0 if none. */
static enum shoal_survivors_kind take_owed(unsigned *owed)
{
    for (unsigned kind = SHOAL_SURVIVORS_PROPOSAL; kind < SHOAL_SURVIVORS_KIND_END; kind++) {
        if (!(*owed >> kind & 1))
            continue;
        *owed &= ~(1u << kind);
        return (enum shoal_survivors_kind)kind;
    }
    return (enum shoal_survivors_kind)0;
}

static void survivors_fill(const struct shoal_survivors *survivors, const struct shoal_survivors_vote *vote,
                           struct shoal_survivors_message *message)
{
    switch (message->kind) {
    case SHOAL_SURVIVORS_PROPOSAL:
        message->view = *survivors->ranks[survivors->rank].view;
        break;
    case SHOAL_SURVIVORS_PREPARE:
        message->ballot = survivors->ballot;
        break;
    case SHOAL_SURVIVORS_PROMISE:
        message->ballot = vote->promised;
        message->adopted = vote->adopted < vote->promised ? vote->adopted : 0;
        message->view = vote->decision;
        break;
    default:
        message->ballot = vote->adopted;
        message->view = vote->decision;
        break;
    }
}

bool shoal_survivors_take(struct shoal_survivors *survivors, struct shoal_survivors_message *message_out)
{
    *message_out = (struct shoal_survivors_message){.kind = take_owed(&survivors->owed_before), .epoch = survivors->epoch - 1};
    if (message_out->kind) {
        survivors_fill(survivors, vote_of(survivors, survivors->epoch - 1), message_out);
        return message_out->ballot > 0;
    }
    message_out->kind = take_owed(&survivors->owed);
    message_out->epoch = survivors->epoch;
    message_out->is_repeated = survivors->repeats;
    survivors->repeats &= survivors->owed > 0;
    if (message_out->kind)
        survivors_fill(survivors, current(survivors), message_out);
    return message_out->kind != 0;
}

void shoal_survivors_repeat(struct shoal_survivors *survivors)
{
    const struct shoal_survivors_vote *vote = current(survivors);
    if (!survivors->is_open || shoal_survivors_agreed(survivors))
        return;
    if (!vote->adopted)
        owe(survivors, survivors->epoch, SHOAL_SURVIVORS_PROPOSAL);
    else
        owe(survivors, survivors->epoch, SHOAL_SURVIVORS_ADOPTED);
    if (vote->promised > vote->adopted && issuer_of(vote->promised) != survivors->rank)
        owe(survivors, survivors->epoch, SHOAL_SURVIVORS_PROMISE);
    if (survivors->phase == SHOAL_SURVIVORS_PREPARING)
        owe(survivors, survivors->epoch, SHOAL_SURVIVORS_PREPARE);
    else if (survivors->phase == SHOAL_SURVIVORS_DECIDED)
        owe(survivors, survivors->epoch, SHOAL_SURVIVORS_DECISION);
    if (survivors->ballot != survivors->highest && may_coordinate(survivors) && !shoal_survivors_is_left_out(survivors))
        begin_ballot(survivors);
    survivors->repeats = survivors->owed > 0;
}
