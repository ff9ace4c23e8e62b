/* Bad weather between an endpoint and the network: delivers late and in random order what the endpoint receives, and refuses
 * some sends. So order, credits and repetition are tested over providers that happen to keep order. Nothing is lost or doubled;
 * failures are delivered at once. A seed produces the same order for the same input.
 *
 * One thread at a time. It has no clock: the caller passes the time. */
#ifndef SHOAL_TESTS_MOCK_SHUFFLE_H
#define SHOAL_TESTS_MOCK_SHUFFLE_H

#include "transport/fabric/network.h"

/* Fewer later events than this overtake an event. A receiver distinguishes 64 increments of a counter, of which a source may
 * have 32 in progress already: the sum stays below 64. */
#define SHOAL_SHUFFLE_SPAN 32
/* An event waits for less than this many turns and this long, and for those that it may not overtake. */
#define SHOAL_SHUFFLE_TURNS 21
#define SHOAL_SHUFFLE_NS UINT64_C(300000)
/* The most that one poll of an endpoint receives. */
#define SHOAL_SHUFFLE_HEARD_MAX 32

struct shoal_shuffle;

/* to: the final receiver. Returns NULL if memory is lacking. */
struct shoal_shuffle *shoal_shuffle_create(uint64_t seed, const struct shoal_fabric_handler *to);
/* Messages still held are never delivered. NULL is allowed. */
void shoal_shuffle_destroy(struct shoal_shuffle *shuffle);

/* Returns the handler for a poll of the endpoint. */
const struct shoal_fabric_handler *shoal_shuffle_handler(const struct shoal_shuffle *shuffle);
/* Returns true if there is room for all that one poll may receive; otherwise the endpoint must not poll yet. */
bool shoal_shuffle_has_room(const struct shoal_shuffle *shuffle);

/* One turn: delivers what is due. Returns true if anything was. */
bool shoal_shuffle_hand_on(struct shoal_shuffle *shuffle, uint64_t now_ns);

/* Returns true if the caller's send or write must return PENDING now. */
bool shoal_shuffle_refuses(struct shoal_shuffle *shuffle);

/* Returns false if something is held, or was refused since the last turn: then only turns make progress. */
bool shoal_shuffle_is_idle(const struct shoal_shuffle *shuffle);

/* Networks opened from now on have such weather, each rank its own; 0: none. The rules of shoal_network_interpose() apply. */
void shoal_shuffle_networks(uint64_t seed);

#endif
