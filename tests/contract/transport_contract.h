/* The contract of every transport, as a list of cmocka cases that run over any implementation. A factory makes `size`
 * connected transports in this process. The cases call them in turn from one thread, and poll with the factory's pump until an
 * expected event occurs. */
#ifndef SHOAL_TESTS_TRANSPORT_CONTRACT_H
#define SHOAL_TESTS_TRANSPORT_CONTRACT_H

#include "transport/transport.h"

#define CONTRACT_RANKS_MAX 8

struct contract_factory;

/* The ranks of one case. */
struct contract_world {
    const struct contract_factory *factory;
    int size;
    const uint16_t *host;                              /* host[rank]; NULL: the factory chooses */
    uint64_t counter_start;                            /* first value of counters; sequences begin one above */
    struct shoal_transport *ranks[CONTRACT_RANKS_MAX]; /* filled by make; NULL once a case has destroyed it */
    bool is_idle[CONTRACT_RANKS_MAX];                  /* nobody drives these ranks now */
    void *inner;                                       /* the factory's data */
};

struct contract_factory {
    const char *name;
    const void *arg; /* the factory's data */

    /* Fills ranks and inner. Returns false if it cannot make such a world (ranks on one host, or on several): the case is
     * skipped. */
    bool (*make)(struct contract_world *world);

    /* Lets time pass between two looks. NULL: the ranks need no help. */
    void (*pump)(struct contract_world *world);

    /* Ends a rank without a message. NULL: impossible in this process; the case is skipped. */
    void (*kill)(struct contract_world *world, int rank);

    /* Returns zeroed memory of a rank that peers can reach, or NULL on failure; the world owns it. */
    void *(*share)(struct contract_world *world, int rank, size_t bytes);

    /* Destroys the remaining transports in ranks, then the rest; may check that nothing remains. */
    void (*destroy)(struct contract_world *world);
};

/* Runs the whole list and returns how many cases failed. */
int contract_run(const struct contract_factory *factory);

#endif
