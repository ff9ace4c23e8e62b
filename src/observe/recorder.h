/* The flight recorder: the last SHOAL_RECORDS operations of one communicator on this rank, always on. A record is filled in
 * while its operation lives. Costs a few stores per operation; allocates once. Owned by the engine, under its lock.
 * docs/trace.md tells what the printed lines hold; `shoal trace` reads them.
 *
 * The recorders of a context lie in a memfd named SHOAL_FLIGHT_NAME, so that another process can read them while this one
 * lives, whatever this one does (watch.c, `shoal top`). One file serves all communicators, because descriptors are few. It is
 * cut into slots of shoal_flight_stride() bytes; a slot without a recorder is all zeros:
 *
 *     struct shoal_flight     what it is, whose it is, sums since the communicator was made, whom the rank waits for now
 *     struct shoal_record     SHOAL_RECORDS of them
 */
#ifndef SHOAL_OBSERVE_RECORDER_H
#define SHOAL_OBSERVE_RECORDER_H

#include <stdatomic.h>

#include "base/log.h"
#include "observe/rejections.h"

#define SHOAL_RECORDS 1024
#define SHOAL_FLIGHT_NAME "shoal-flight"
#define SHOAL_FLIGHT_MAGIC UINT64_C(0x544c464c414f4853) /* "SHOALFLT" */
#define SHOAL_FLIGHT_LAYOUT 3                           /* one more whenever a reader would misread the structs below */
#define SHOAL_FLIGHT_TEXTS 160

struct shoal_flights;
struct shoal_request;

struct shoal_record {
    struct shoal_request *owner; /* while under way; opaque here */
    uint64_t sequence;           /* 0: no record yet. Sends and receives count by themselves, in their order */
    uint64_t count;
    uint64_t posted;        /* clock ticks */
    uint64_t arrived;       /* 0 while not all ranks have come */
    uint64_t done;          /* 0 while under way */
    const char *collective; /* static texts */
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

/* The owner of these operations, so that the lines of all ranks can be put together. */
struct shoal_recorder_identity {
    uint64_t comm;  /* the communicator's number: the same on all its ranks, another for each communicator */
    int size;       /* its ranks */
    int world_rank; /* this rank's number among all workers */
};

/* A static text that records point to. A reader in another process finds the text by its address here. */
struct shoal_flight_text {
    uint64_t address;
    char text[32];
};

/* The recorder's head. Other processes only read it. Its owner is the only writer, so no store is a read-modify-write, and
 * relaxed stores suffice but where it says otherwise: a reader may see one number a little earlier than another. */
struct shoal_flight {
    _Atomic uint64_t magic; /* released last: whoever sees it sees what follows up to the sums */
    uint32_t layout;
    uint32_t head_bytes;
    uint32_t record_bytes;
    uint32_t records;
    uint32_t text_count;
    int32_t pid; /* as the owner sees itself */
    char version[16];
    char host[64];
    char comm_name[32];
    uint64_t comm;
    uint64_t job; /* the same for all communicators of the job: the number of the first */
    int32_t rank;
    int32_t size;
    int32_t world_rank;
    double ns_per_tick;
    struct shoal_flight_text texts[SHOAL_FLIGHT_TEXTS];

    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t next; /* records ever begun */
    _Atomic uint64_t bytes;                           /* of operations that ended: of their larger operands */
    _Atomic uint64_t came_last;                       /* operations that this rank came last to */
    _Atomic uint64_t late;                            /* ticks, over those operations */
    _Atomic uint64_t waited;                          /* ticks in which threads of the program waited, in all communicators */
    _Atomic uint64_t sent;                            /* bytes that the communicator handed to the network */

    _Alignas(SHOAL_CACHE_PAIR) _Atomic int32_t waits_for; /* 1 + the rank that this one has said it waits for; 0: none */
    _Atomic int32_t status;                               /* of the first failure; 0: none */
    _Atomic uint64_t waits_since;                         /* ticks */
    _Atomic uint64_t rejected;                            /* messages that the rank's endpoint did not take, so far */
};

struct shoal_recorder {
    struct shoal_flight *flight;
    struct shoal_record *records;            /* behind the head */
    struct shoal_recorder_identity identity; /* set by who makes the communicator; all 0 before */
    uint64_t job;
    const struct shoal_rejections *rejections; /* the endpoint's, which outlives this; NULL: there is none */
    int pid;                                   /* of whom the records are; 0: of this process */
    const char *host;                          /* NULL: this one */
    struct shoal_flights *flights;             /* the file; NULL: it is private memory */
    long slot;                                 /* in that file */
};

/* The file. Any thread. NULL: no memory. */
struct shoal_flights *shoal_flights_create(void);
/* After the recorders in it. NULL is allowed. */
void shoal_flights_destroy(struct shoal_flights *flights);
size_t shoal_flight_stride(void);

/* In private memory: a copy, or a recorder that nobody else reads. */
SHOAL_MUST_USE enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder);
/* In the file; where that is NULL or the system gave none (no descriptor was left), in private memory. */
SHOAL_MUST_USE enum shoal_status shoal_recorder_open(struct shoal_recorder *recorder, struct shoal_flights *flights);
void shoal_recorder_fini(struct shoal_recorder *recorder);

/* Names a text that records will point to, once each. Other processes see "?" for a text that has no name here. */
void shoal_recorder_name(struct shoal_recorder *recorder, const char *text);

/* Says whose it is. Other processes read the recorder from now on. */
void shoal_recorder_identify(struct shoal_recorder *recorder, const struct shoal_recorder_identity *identity, uint64_t job,
                             const char *comm, int rank, double ns_per_tick);

/* Adds without a read-modify-write: there is one writer. */
static inline void shoal_flight_add(_Atomic uint64_t *sum, uint64_t more)
{
    atomic_store_explicit(sum, atomic_load_explicit(sum, memory_order_relaxed) + more, memory_order_relaxed);
}

/* The place for the next operation; the oldest record is overwritten. The caller sets every field, and finds the former owner
 * another place when there is one. */
static inline struct shoal_record *shoal_recorder_next(struct shoal_recorder *recorder)
{
    const uint64_t next = atomic_load_explicit(&recorder->flight->next, memory_order_relaxed);
    atomic_store_explicit(&recorder->flight->next, next + 1, memory_order_relaxed);
    return &recorder->records[next % SHOAL_RECORDS];
}

/* Counts an operation that has ended, and this rank's lateness where it came last (was_last is 0 or 1). */
static inline void shoal_recorder_count(struct shoal_recorder *recorder, uint64_t bytes, uint64_t was_last, int64_t late)
{
    struct shoal_flight *flight = recorder->flight;
    shoal_flight_add(&flight->bytes, bytes);
    shoal_flight_add(&flight->came_last, was_last);
    shoal_flight_add(&flight->late, (uint64_t)late & (0 - was_last));
}

/* Store sums that other modules keep. */
static inline void shoal_recorder_note_waited(struct shoal_recorder *recorder, uint64_t ticks)
{
    atomic_store_explicit(&recorder->flight->waited, ticks, memory_order_relaxed);
}

static inline void shoal_recorder_note_sent(struct shoal_recorder *recorder, uint64_t bytes)
{
    atomic_store_explicit(&recorder->flight->sent, bytes, memory_order_relaxed);
}

/* Says which rank this one waits for (-1: none) and since when, in ticks. */
void shoal_recorder_note_wait(struct shoal_recorder *recorder, int rank, uint64_t since);

/* Stores how many messages were rejected so far. There must be an endpoint; under the lock that its counts are written
 * under. */
void shoal_recorder_note_rejected(struct shoal_recorder *recorder);

/* Into a recorder that was initialized. */
void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy);

/* One JSON object per line, oldest first. */
void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out);

#define SHOAL_RECORDER_NAME_MAX 512

/* A file named by a setting. */
struct shoal_recorder_file {
    struct shoal_log *log;
    const char *setting; /* its name, for the message */
    const char *pattern; /* its value, with %h, %p, %r; "": there is no file */
    bool is_private;     /* nobody else may read a file that is made */
};

/* Appends the lines to the file, in one write: ranks that share a file do not tear each other's lines (on a local file
 * system). Its name is then in name_out, which may be NULL. False: there is no file, or a warning was logged why it cannot be
 * written. */
bool shoal_recorder_append(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick,
                           const struct shoal_recorder_file *file, char name_out[SHOAL_RECORDER_NAME_MAX]);

/* The same for all recorders of a process, read as watch.c does. */
bool shoal_recorder_append_process(int pid, const struct shoal_recorder_file *file, char name_out[SHOAL_RECORDER_NAME_MAX]);

/* recorder_keep.c: gives a pattern, as above, of a file in the temporary folder, and, for a shell, one of all ranks' files.
 * Makes the folder, readable by the user alone, and removes files there but for those of this job and the newest
 * SHOAL_RECORDERS_KEPT others. False with errno set: there is no such folder. */
#define SHOAL_RECORDERS_KEPT 32
SHOAL_MUST_USE bool shoal_recorder_find_path(const struct shoal_recorder *recorder, char *pattern, size_t pattern_bytes,
                                             char *all, size_t all_bytes);

#endif
