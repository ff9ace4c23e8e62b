/* The contract of every transport, as a list of cmocka cases that run over any implementation. A factory makes `size` connected
 * transports in this process; the cases call them in turn from one thread, and poll with the factory's pump until what they
 * wait for is there. */
#ifndef SHOAL_TESTS_TRANSPORT_CONTRACT_H
#define SHOAL_TESTS_TRANSPORT_CONTRACT_H

#include "transport/transport.h"

#define CONTRACT_RANKS_MAX 8

struct contract_factory;

/* The ranks of one case. */
struct contract_world {
    const struct contract_factory *factory;
    int size;
    const uint16_t *host;                              /* host[rank]; NULL: as the factory likes */
    uint64_t counter_start;                            /* first value of counters; sequences begin one above */
    struct shoal_transport *ranks[CONTRACT_RANKS_MAX]; /* filled by make; NULL once a case has destroyed it */
    bool is_idle[CONTRACT_RANKS_MAX];                  /* nobody drives these ranks now */
    void *inner;                                       /* the factory's own */
};

struct contract_factory {
    const char *name;
    const void *arg; /* the factory's own */

    /* Fills ranks and inner. False when it cannot make such a world (ranks on one host, or on several): the case is skipped. */
    bool (*make)(struct contract_world *world);

    /* Lets time pass: called between two looks. NULL: the ranks need no help. */
    void (*pump)(struct contract_world *world);

    /* Ends a rank without a word. NULL: not possible in this process; the case is skipped. */
    void (*kill)(struct contract_world *world, int rank);

    /* Zeroed memory of a rank that peers can reach, NULL on failure; belongs to the world. */
    void *(*share)(struct contract_world *world, int rank, size_t bytes);

    /* Destroys the transports left in ranks, then the rest; may check that nothing is left behind. */
    void (*destroy)(struct contract_world *world);
};

/* Runs the whole list and returns how many cases failed. */
int contract_run(const struct contract_factory *factory);

#endif
