/* How staging buffers and outputs are written: through the caches, or past them (streaming). Which is faster depends on whether
 * the cores share a cache, and on virtual machines this changes within minutes. So rank 0 tries both from time to time, and all
 * ranks follow its choice (a hint in its announcement). Results do not depend on it.
 *
 * A trial is a sequence of pairs of blocks: four operations each way. Only the last operation of a block is timed: those before
 * it find what the other way left in caches, and early steps of other ranks follow the previous operation's choice. A machine
 * that is slow for longer slows both blocks of a pair. The way that wins most pairs is chosen. Streaming wins a pair if it is
 * faster by a sixteenth. A pair that one way wins by a quarter counts twice. */
#ifndef SHOAL_ENGINE_STORES_H
#define SHOAL_ENGINE_STORES_H

#include "device/kernels.h"

struct shoal_engine;
struct shoal_request;

/* The trial of one size and kind of operands, in rank 0's memory. It begins as zeros. */
struct shoal_trial {
    uint32_t uses;     /* operations so far */
    uint32_t begin;    /* the first operation of the current trial, or of the next one */
    float first_ticks; /* how long the current pair's first block took */
    int8_t balance;    /* weighted pairs that streaming won minus those that it lost */
    uint8_t pairs;           /* number of pairs that were timed */
    uint8_t streaming_first; /* one bit per pair, the first pair's the lowest: whether its first block is streaming */
    uint8_t agreed; /* consecutive trials with the same choice: the more, the longer until the next one */
    bool is_streaming;
};

/* Returns how the next operation is written. *use_out is its number. */
enum shoal_stores shoal_trial_next(struct shoal_trial *trial, uint32_t *use_out);

/* Records how long operation `use` took. Operations may overlap: others may have been numbered since. */
void shoal_trial_note(struct shoal_trial *trial, uint32_t use, float ticks);

/* Returns the hint that rank 0 announces for an operation. Hints of other ranks are not read. */
uint8_t shoal_trial_hint(struct shoal_engine *engine, struct shoal_request *request);

/* Rank 0: takes the time of a finished operation into account. */
void shoal_trial_learn(const struct shoal_request *request);

#endif
