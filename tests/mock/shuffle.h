/* Bad weather: stands between an endpoint and the network, and hands on late and in random order what the endpoint hears; it
 * refuses to send now and then. So order, credits and repetition are tested over providers that
 * happen to keep order. Nothing is lost or doubled, failures are handed on at once. A seed gives the same order for the same
 * input.
 *
 * One thread at a time. It knows no clock: it is told the time. */
#ifndef SHOAL_TESTS_MOCK_SHUFFLE_H
#define SHOAL_TESTS_MOCK_SHUFFLE_H

#include "transport/fabric/network.h"

/* An event is overtaken by fewer later ones. A receiver tells 64 increments of a counter apart, of which a source may have 32
 * under way before this: together they stay below. */
#define SHOAL_SHUFFLE_SPAN 32
/* How long an event waits: for less than so many turns and so long, and for those that it may not overtake. */
#define SHOAL_SHUFFLE_TURNS 21
#define SHOAL_SHUFFLE_NS UINT64_C(300000)
/* The most that one poll of an endpoint hears. */
#define SHOAL_SHUFFLE_HEARD_MAX 32

struct shoal_shuffle;

/* to: who hears in the end. NULL: no memory. */
struct shoal_shuffle *shoal_shuffle_create(uint64_t seed, const struct shoal_fabric_handler *to);
/* Messages still held are never handed on. NULL is allowed. */
void shoal_shuffle_destroy(struct shoal_shuffle *shuffle);

/* For a poll of the endpoint. */
const struct shoal_fabric_handler *shoal_shuffle_handler(const struct shoal_shuffle *shuffle);
/* Whether all that one poll may hear can be held; else the endpoint must wait with it. */
bool shoal_shuffle_has_room(const struct shoal_shuffle *shuffle);

/* One turn: hands on what is due. True when anything was. */
bool shoal_shuffle_hand_on(struct shoal_shuffle *shuffle, uint64_t now_ns);

/* Whether to say PENDING to who wants to send or write now. */
bool shoal_shuffle_refuses(struct shoal_shuffle *shuffle);

/* False: something is held, or was refused since the last turn, and only turns move it. */
bool shoal_shuffle_is_idle(const struct shoal_shuffle *shuffle);

/* Networks that are opened from now on have such weather, each rank its own; 0: none has. As shoal_network_interpose. */
void shoal_shuffle_networks(uint64_t seed);

#endif
