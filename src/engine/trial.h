/* A trial of two ways of doing operations of one kind. Only the time shows which is faster, and minutes later it may be the
 * other one. It is a sequence of pairs of blocks: four operations each way. Only the last operation of a block is timed: those
 * before it find what the other way left in caches, and early steps of other ranks follow the previous operation's way. A
 * machine that is slow for longer slows both blocks of a pair. The way that wins most pairs is chosen, until the next trial.
 * The second way wins a pair if it is faster by a sixteenth. A pair that one way wins by a quarter counts twice. */
#ifndef SHOAL_ENGINE_TRIAL_H
#define SHOAL_ENGINE_TRIAL_H

#include "base/compiler.h"

/* It begins as zeros, with the first way. */
struct shoal_trial {
    uint32_t uses;        /* operations so far */
    uint32_t begin;       /* the first operation of the current trial, or of the next one */
    float first_ticks;    /* how long the current pair's first block took */
    int8_t balance;       /* weighted pairs that the second way won minus those that it lost */
    uint8_t pairs;        /* number of pairs that were timed */
    uint8_t second_leads; /* one bit per pair, the first pair's the lowest: its first block is done the second way */
    uint8_t agreed;       /* consecutive trials with the same choice: the more, the longer until the next one */
    bool is_second;       /* the choice */
};

/* Returns true if the next operation is done the second way. *use_out is its number. */
bool shoal_trial_next(struct shoal_trial *trial, uint32_t *use_out);

/* Returns true if the next operation belongs to a trial, and false if the last choice holds. */
bool shoal_trial_is_under_way(const struct shoal_trial *trial);

/* Records how long operation `use` took. Operations may overlap: others may have been numbered since. Returns true if this
 * ended a trial. */
bool shoal_trial_note(struct shoal_trial *trial, uint32_t use, float ticks);

#endif
