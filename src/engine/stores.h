/* How staging buffers and outputs are written: through the caches, or past them (streaming). Which is faster depends on whether
 * the cores share a cache, which on virtual machines changes within minutes, so rank 0 tries both now and then and all follow
 * its choice (a hint in its announcement). Results do not depend on it.
 *
 * A trial is a row of pairs of blocks, four operations each way. Only the last of a block counts: the ones before it find what
 * the other way left in caches, and early steps of other ranks follow the choice of the operation before. A machine that is
 * slow for longer slows both blocks of a pair. The way that wins most pairs is chosen; streaming wins a pair where it is faster
 * by a sixteenth, and a pair that one way wins by a quarter counts twice. */
#ifndef SHOAL_ENGINE_STORES_H
#define SHOAL_ENGINE_STORES_H

#include "device/kernels.h"

struct shoal_engine;
struct shoal_request;

/* The trial of one size and kind of operands, in rank 0's memory; begins as zeros. */
struct shoal_trial {
    uint32_t uses;     /* operations so far */
    uint32_t begin;    /* of these, the first of the trial at hand or the next one */
    float first_ticks; /* of the pair at hand */
    int8_t balance;    /* pairs that streaming won less those that it lost, by their weights */
    uint8_t pairs;           /* that were timed */
    uint8_t streaming_first; /* of each pair a bit, the first pair's the lowest: whether its first block is streaming */
    uint8_t agreed; /* trials in a row that chose the same: the more, the longer until the next one */
    bool is_streaming;
};

/* How the next operation is written; *use_out numbers it. */
enum shoal_stores shoal_trial_next(struct shoal_trial *trial, uint32_t *use_out);

/* How long it took. Operations may overlap: others may have been numbered since. */
void shoal_trial_note(struct shoal_trial *trial, uint32_t use, float ticks);

/* The hint that rank 0 announces for an operation; others' hints are not read. */
uint8_t shoal_trial_hint(struct shoal_engine *engine, struct shoal_request *request);

/* Rank 0: takes the time of a finished operation into account. */
void shoal_trial_learn(const struct shoal_request *request);

#endif
