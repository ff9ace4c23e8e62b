/* The copy engines of the model, and the links that they use: operands on GPUs pass through host memory in units, as in
 * src/device/device_ring.h.
 *
 *     GPU  --in-->  ring  [ranks and network]  ring  --out-->  GPU
 *           PCIe                                      PCIe
 *
 * A rank has one engine in each direction. An engine makes one copy at a time, frame by frame, so engines that share a link
 * take turns. GPUs that sum among themselves use the same links, and NVLink. This module knows ranks and times, not what ranks
 * do. */
#ifndef SHOAL_PREDICT_PREDICT_COPIERS_H
#define SHOAL_PREDICT_PREDICT_COPIERS_H

#include "predict/predict.h"
#include "predict/predict_events.h"

enum shoal_copy_stage { SHOAL_COPY_IN, SHOAL_COPY_OUT, SHOAL_COPY_STAGES };

/* From a GPU to host memory, back, and from its peers' memory. */
enum shoal_copy_link { SHOAL_COPY_UP, SHOAL_COPY_DOWN, SHOAL_COPY_BETWEEN };

struct shoal_copier {
    uint64_t allowed; /* units that may be copied */
    uint64_t done;
    size_t left; /* bytes of the current unit */
    bool is_busy;
};

struct shoal_copiers {
    const struct shoal_model *model;
    struct shoal_events *events;
    int first_event; /* that of the first stage of rank 0; those of its other stages follow */
    int ranks;
    int local;                    /* ranks of a host */
    int switches;                 /* of a host */
    struct shoal_copier *copiers; /* [rank * SHOAL_COPY_STAGES + stage] */
    uint64_t *bytes;              /* [2 * rank + is_in] of the operands */
    uint64_t *switch_free_ps;     /* [2 * (host * switches + number) + is_up]: end of all requests so far */
    uint64_t *nvlink_free_ps;     /* [rank] */
    uint64_t *memory_free_ps;     /* [host] */
};

/* Returns how many switches a host with `local` ranks has. */
int shoal_copiers_switches(const struct shoal_model *model, int local);
/* Returns the number of the switch above a rank's GPU, counted over all hosts. */
int shoal_copiers_switch_of(const struct shoal_copiers *copies, int rank);

SHOAL_MUST_USE enum shoal_status shoal_copiers_init(struct shoal_copiers *copies, const struct shoal_model *model, int ranks,
                                                    int local, struct shoal_events *events, int first_event);
void shoal_copiers_fini(struct shoal_copiers *copies);

static inline uint64_t shoal_copiers_units(const struct shoal_copiers *copies, uint64_t bytes)
{
    return (bytes + copies->model->unit_bytes - 1) / copies->model->unit_bytes;
}

static inline uint64_t *shoal_copiers_bytes(struct shoal_copiers *copies, int rank, bool is_in)
{
    return &copies->bytes[2 * rank + is_in];
}

/* Allows the engine to copy `units` units in all: the ring has room for them, or the rank has written them. Never decreases. */
void shoal_copiers_allow(struct shoal_copiers *copies, int rank, bool is_in, uint64_t units);
/* Returns how many units have arrived in the ring, or have left it. */
uint64_t shoal_copiers_done(const struct shoal_copiers *copies, int rank, bool is_in);
/* Returns true if all of a rank's operands have been copied. */
bool shoal_copiers_are_over(const struct shoal_copiers *copies, int rank);

/* Handles an event of the engines. Returns true if a unit of *rank_out has been copied. */
bool shoal_copiers_run(struct shoal_copiers *copies, int event, int *rank_out);

/* Returns when bytes that start now will have passed a link of the rank's GPU. */
uint64_t shoal_copiers_pass_link(struct shoal_copiers *copies, int rank, enum shoal_copy_link link, uint64_t bytes);
/* Returns when bytes that reach the switch above a rank's GPU at from_ps, now or later, will have passed it. */
uint64_t shoal_copiers_pass_switch(struct shoal_copiers *copies, int rank, bool is_up, uint64_t from_ps, uint64_t bytes);
/* Returns when bytes will have been read from a host's memory, or written there, starting now. */
uint64_t shoal_copiers_pass_memory(struct shoal_copiers *copies, int host, uint64_t bytes);

#endif
