/* The flight recorder: the last SHOAL_RECORDS operations of one communicator on this rank, always on. A record is filled in
 * while its operation lives. Costs a few stores per operation; allocates once. Owned by the engine, under its lock. */
#ifndef SHOAL_OBSERVE_RECORDER_H
#define SHOAL_OBSERVE_RECORDER_H

#include "base/compiler.h"

#define SHOAL_RECORDS 1024

struct shoal_request;

struct shoal_record {
    struct shoal_request *owner; /* while under way; opaque here */
    uint64_t sequence;           /* 0: no record yet. Sends and receives have the number of their kind's order */
    uint64_t count;
    uint64_t posted;  /* clock ticks */
    uint64_t arrived; /* 0 while not all ranks have come */
    uint64_t done;    /* 0 while under way */
    const char *kind; /* static texts */
    const char *algorithm;
    int32_t root;      /* or peer */
    int32_t last_rank; /* who came last, -1 not known */
    int64_t late;      /* ticks after the first to come */
    int32_t step;      /* while under way: the step it waits in; -1 none */
    int32_t peer;      /* ... and for whom */
    uint32_t trace_tag;
    uint8_t type;
    uint8_t op;
    uint8_t status;
};

struct shoal_recorder {
    uint64_t next; /* records ever begun */
    struct shoal_record *records;
};

SHOAL_MUST_USE enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder);
void shoal_recorder_fini(struct shoal_recorder *recorder);

/* The place for the next operation; the oldest record is overwritten. The caller sets every field, and finds the former owner
 * another place when there is one. */
static inline struct shoal_record *shoal_recorder_next(struct shoal_recorder *recorder)
{
    return &recorder->records[recorder->next++ % SHOAL_RECORDS];
}

/* Into a recorder that was initialized. */
void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy);

/* One JSON object per line, oldest first. Times are in microseconds since the oldest record was posted. */
void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out);

#endif
