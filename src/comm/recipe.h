/* How this module makes communicators: the functions that creating, splitting and shrinking share. They wait, without the
 * progress engine's lock, unless a comment on one excludes that. */
#ifndef SHOAL_COMM_RECIPE_H
#define SHOAL_COMM_RECIPE_H

#include "comm/comm_world.h"
#include "comm/context.h"

/* What a communicator is made from. */
struct shoal_comm_recipe {
    const char *name;
    const char *launcher; /* the launcher that joined the ranks, for the log */
    int rank;
    int size;
    uint64_t number;
    uint64_t job;
    const struct shoal_member *members; /* copied */
    struct shoal_world *world;
    const struct shoal_comm_options *options;
};

/* What calls of shoal_comm_shrink on one communicator keep (shrink.c): a call whose deadline has passed may be repeated, and
 * continues there. */
struct shoal_shrinking {
    unsigned rounds;                       /* agreements on survivors so far; the same on all survivors */
    struct shoal_survivors_view survivors; /* what the last agreement decided */
    bool is_confirming;                    /* the survivors have not yet confirmed that all have made the new communicator */
    bool is_left_out;                      /* the others have continued without this rank */
    enum shoal_status status;              /* of making the new communicator here */
    struct shoal_comm *made;               /* the new communicator, NULL if it could not be made */
};

/* Collective over the ranks of the recipe. */
SHOAL_MUST_USE enum shoal_status shoal_comm_make(struct shoal_context *context, const struct shoal_comm_recipe *recipe,
                                                 struct shoal_comm **comm_out);

/* Checks the arguments of a call that makes a communicator. Replaces *options by *known, which holds the caller's values of all
 * fields that both sides know. */
SHOAL_MUST_USE enum shoal_status shoal_comm_check_create(struct shoal_context *context,
                                                         const struct shoal_comm_options **options,
                                                         struct shoal_comm_options *known, struct shoal_comm **comm_out,
                                                         const char *call);

/* Returns the deadline of the creation, in milliseconds. */
uint32_t shoal_comm_create_timeout(const struct shoal_context *context, const struct shoal_comm_options *options);

/* Mixes the bits of a number, to derive the numbers of communicators. */
uint64_t shoal_comm_mix(uint64_t x);

/* If the communicator has failed, waits until no peer touches this rank's memory through it, at most a second; memory that a
 * stopped peer may still write moves to fresh pages. Call with the lock held; it is released meanwhile. */
void shoal_comm_settle(struct shoal_comm *comm);

#endif
