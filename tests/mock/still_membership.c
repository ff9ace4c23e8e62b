/* A control tree in which nothing happens, which replaces membership.c: no rank is lost, and only a failure of this rank is
 * known. */
#include <stdio.h>

#include "membership/membership.h"

void shoal_membership_join(struct shoal_membership *membership, struct shoal_membership_comm *comm)
{
    (void)membership, (void)comm;
}

void shoal_membership_leave(struct shoal_membership *membership, struct shoal_membership_comm *comm)
{
    (void)membership, (void)comm;
}

uint64_t shoal_membership_lost_ns(struct shoal_membership *membership, int rank)
{
    (void)membership, (void)rank;
    return 0;
}

bool shoal_membership_has_ended(struct shoal_membership *membership, int rank)
{
    (void)membership, (void)rank;
    return false;
}

bool shoal_membership_is_cut_off(const struct shoal_membership *membership, int rank)
{
    (void)membership, (void)rank;
    return false;
}

void shoal_membership_describe(struct shoal_membership *membership, int rank, char *text, size_t bytes)
{
    (void)membership, (void)rank;
    snprintf(text, bytes, "alive");
}

void shoal_membership_fail(struct shoal_membership_comm *comm, const struct shoal_failure *failure)
{
    shoal_cause_board_write(comm->board, failure);
    comm->wake(comm->arg);
}

void shoal_membership_abort(struct shoal_membership_comm *comm, const struct shoal_failure *cause)
{
    (void)comm, (void)cause;
}

bool shoal_membership_heed_abort(struct shoal_membership_comm *comm, struct shoal_failure *failure_out)
{
    return shoal_cause_board_read(comm->board, failure_out);
}

enum shoal_status shoal_membership_agree(struct shoal_membership_comm *comm, const struct shoal_survivors_view *proposal,
                                         struct shoal_survivors_view *agreed_out)
{
    (void)comm, (void)proposal, (void)agreed_out;
    return SHOAL_PENDING;
}

int shoal_membership_unagreed(struct shoal_membership_comm *comm, int first)
{
    (void)comm, (void)first;
    return -1;
}

void shoal_membership_tell_left(struct shoal_membership *membership, uint64_t comm, int rank, uint64_t completed)
{
    (void)membership, (void)comm, (void)rank, (void)completed;
}
