/* The flight recorder: the last SHOAL_RECORDS operations of one communicator on this rank, always on. A record is filled in
 * while its operation lives. Costs a few stores per operation; allocates once. Owned by the engine, under its lock.
 * docs/trace.md tells what the printed lines hold; `shoal trace` reads them. */
#ifndef SHOAL_OBSERVE_RECORDER_H
#define SHOAL_OBSERVE_RECORDER_H

#include "base/log.h"

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

/* Whose operations these are, so that the lines of all ranks can be put together. */
struct shoal_recorder_identity {
    uint64_t comm;  /* the communicator's number: the same on all its ranks, another for each communicator */
    int size;       /* its ranks */
    int world_rank; /* this rank's number among all workers */
};

struct shoal_recorder {
    uint64_t next;                           /* records ever begun */
    struct shoal_recorder_identity identity; /* set by who makes the communicator; all 0 before */
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

/* One JSON object per line, oldest first. */
void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out);

/* A file named by a setting. */
struct shoal_recorder_file {
    struct shoal_log *log;
    const char *setting; /* its name, for the message */
    const char *pattern; /* its value, with %h, %p, %r; "": there is no file */
};

/* Appends the lines to the file, in one write: ranks that share a file do not tear each other's lines (on a local file
 * system). Logs a warning when it cannot. */
void shoal_recorder_append(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick,
                           const struct shoal_recorder_file *file);

#endif
