/* The copy engines of the model, and the links that they take: operands on GPUs pass through host memory in units, as
 * src/device/device_ring.h has it.
 *
 *     GPU  --in-->  ring  [ranks and network]  ring  --out-->  GPU
 *           PCIe                                      PCIe
 *
 * A rank has one engine each way. An engine makes one copy at a time, frame by frame; so engines that share a way take turns.
 * Works of GPUs that sum among themselves take the same links, and NVLink. Knows ranks and times, not what ranks do. */
#ifndef SHOAL_INSPECT_PREDICT_COPIERS_H
#define SHOAL_INSPECT_PREDICT_COPIERS_H

#include "inspect/predict.h"
#include "inspect/predict_events.h"

enum shoal_copy_stage { SHOAL_COPY_IN, SHOAL_COPY_OUT, SHOAL_COPY_STAGES };

/* From a GPU to host memory, back, and from its peers' memory. */
enum shoal_copy_link { SHOAL_COPY_UP, SHOAL_COPY_DOWN, SHOAL_COPY_BETWEEN };

struct shoal_copier {
    uint64_t allowed; /* units that may be copied */
    uint64_t done;
    size_t left; /* bytes of the unit under way */
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
    uint64_t *switch_free_ps;     /* [2 * (host * switches + number) + is_up]: all that was asked for will have passed */
    uint64_t *nvlink_free_ps;     /* [rank] */
    uint64_t *memory_free_ps;     /* [host] */
};

/* How many a host of so many ranks has. */
int shoal_copiers_switches(const struct shoal_model *model, int local);
/* The number of the switch above a rank's GPU, over all hosts. */
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

/* The ring has room for, or the rank has written, so many units from the first on. Never fewer than before. */
void shoal_copiers_allow(struct shoal_copiers *copies, int rank, bool is_in, uint64_t units);
/* Units that have come into the ring, or have left it. */
uint64_t shoal_copiers_done(const struct shoal_copiers *copies, int rank, bool is_in);
/* Whether all of a rank's operands have been copied. */
bool shoal_copiers_are_over(const struct shoal_copiers *copies, int rank);

/* When an event of theirs has come. True: a unit of this rank has been copied. */
bool shoal_copiers_run(struct shoal_copiers *copies, int event, int *rank_out);

/* When bytes have passed a link of the rank's GPU, from now on. */
uint64_t shoal_copiers_pass_link(struct shoal_copiers *copies, int rank, enum shoal_copy_link link, uint64_t bytes);
/* When bytes have passed the switch above a rank's GPU, which reach it at from_ps, now or later. */
uint64_t shoal_copiers_pass_switch(struct shoal_copiers *copies, int rank, bool is_up, uint64_t from_ps, uint64_t bytes);
/* When bytes have been read from a host's memory, or written there, from now on. */
uint64_t shoal_copiers_pass_memory(struct shoal_copiers *copies, int host, uint64_t bytes);

#endif
