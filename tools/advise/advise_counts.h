/* The arithmetic of a training job for `shoal advise`: workers, replicas, samples of a worker, iterations, steps. Pure
 * functions; reentrant.
 *
 *     workers    = machines x workers of a machine
 *     replicas   = workers / degree            degree: tensor x pipeline; 1 for data parallelism, sharded or not
 *     per worker = batch / replicas            rounded down or up
 *     iterations = samples / batch             rounded down (drop the last), or up (keep it)
 *     steps      = epochs x iterations         rounded up */
#ifndef SHOAL_TOOLS_ADVISE_COUNTS_H
#define SHOAL_TOOLS_ADVISE_COUNTS_H

#include <stddef.h>

struct advise_job {
    size_t machines, per_machine; /* per_machine: workers of a machine */
    size_t degree;                /* workers that hold one replica of the model together */
    size_t batch;                 /* samples of a step, of all workers */
    size_t samples;               /* that the data set has */
    double epochs;
};

struct advise_counts {
    size_t workers, replicas;
    size_t least, most;   /* samples of a step on the replicas with fewest and most */
    size_t with_most;     /* replicas that have `most`; all of them if the batch divides */
    size_t dropped, kept; /* iterations of an epoch without and with the last, smaller one */
    size_t last;          /* samples of that last one; 0 if the batch divides the samples */
    double steps;         /* of all epochs, with the last iteration of each */
    double samples_seen;  /* of all epochs */
};

enum advise_fault {
    ADVISE_FAULT_NONE,
    ADVISE_FAULT_ZERO,    /* a number is 0, or epochs are not above 0 */
    ADVISE_FAULT_DEGREE,  /* the degree does not divide the workers */
    ADVISE_FAULT_BATCH,   /* the batch has fewer samples than there are replicas */
    ADVISE_FAULT_SAMPLES, /* the batch has more samples than the data set */
    ADVISE_FAULT_HUGE     /* more workers than a size_t can count */
};

/* Finds the numbers of a job. counts_out is defined if the answer is NONE; workers and replicas also if it is BATCH or
 * SAMPLES. */
enum advise_fault advise_counts_find(const struct advise_job *job, struct advise_counts *counts_out);

/* Returns how many times as many samples a job needs at `batch` as at `from`, if `critical` is the critical batch:
 * E = E_min (1 + B / B_crit) (McCandlish et al. 2018, arXiv 1812.06162). Returns 1 if critical is not above 0. */
double advise_samples_factor(double from, double batch, double critical);

#endif
