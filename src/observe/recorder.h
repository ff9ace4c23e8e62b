/* The flight recorder: the last SHOAL_RECORDS operations of one communicator on this rank, always on. A record is filled in
 * during its operation. Costs a few stores per operation; allocates once. Owned by the engine, under its lock. docs/trace.md
 * describes the printed lines; `shoal trace` reads them.
 *
 * The recorders of a context are in a memfd named SHOAL_FLIGHT_NAME, so that another process can read them while this one
 * lives, whatever this one does (watch.c, `shoal top`). One file serves all communicators, because descriptors are scarce. It
 * is divided into slots of shoal_flight_stride() bytes; a slot without a recorder is all zeros:
 *
 *     struct shoal_flight     layout and owner, sums since the communicator was created, the rank that this one waits for
 *     struct shoal_record     SHOAL_RECORDS of them
 */
#ifndef SHOAL_OBSERVE_RECORDER_H
#define SHOAL_OBSERVE_RECORDER_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/log.h"
#include "observe/rejections.h"

#define SHOAL_RECORDS 1024
#define SHOAL_FLIGHT_NAME "shoal-flight"
#define SHOAL_FLIGHT_MAGIC UINT64_C(0x544c464c414f4853) /* "SHOALFLT" */
#define SHOAL_FLIGHT_LAYOUT 4                           /* increases whenever a reader would misread the structs below */
#define SHOAL_FLIGHT_TEXTS 160

struct shoal_flights;
struct shoal_request;

struct shoal_record {
    struct shoal_request *owner; /* during the operation; opaque here */
    uint64_t sequence;           /* 0 if the record is unused; sends and receives have their own count, in their order */
    uint64_t count;              /* if it is a span: its stage */
    uint64_t posted;             /* clock ticks */
    uint64_t arrived;            /* 0 until all ranks have arrived, or a span's work has begun */
    uint64_t done;               /* 0 during the operation */
    const char *collective;      /* static texts */
    const char *algorithm;
    int32_t root;      /* the root, or the peer of a message */
    int32_t last_rank; /* the rank that arrived last; -1 if unknown */
    int64_t late;      /* ticks after the first rank arrived */
    int32_t step;      /* during the operation: the step that it waits in; -1 if none. A span: the stage that it waits for */
    int32_t peer;      /* during the operation: the rank it waits for; -1 if none */
    uint32_t trace_tag;
    uint8_t type;
    uint8_t op;
    uint8_t status;
};

/* The owner of these operations, by which a reader combines the lines of all ranks. */
struct shoal_recorder_identity {
    uint64_t comm;  /* the communicator's number: the same on all its ranks, and unique among communicators */
    int size;       /* number of ranks */
    int world_rank; /* this rank's number among all workers */
};

/* A static text that records point to. A reader in another process finds the text by its address. */
struct shoal_flight_text {
    uint64_t address;
    char text[32];
};

/* The recorder's head. Other processes only read it. Its owner is the only writer, so no store is a read-modify-write, and
 * relaxed stores suffice unless noted otherwise: a reader may see one number slightly earlier than another. */
struct shoal_flight {
    _Atomic uint64_t magic; /* released last: a reader that sees it also sees the fields up to the sums */
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
    int32_t is_track; /* 1: records are spans of a track, not operations (comm/track.c) */
    double ns_per_tick;
    struct shoal_flight_text texts[SHOAL_FLIGHT_TEXTS];

    _Alignas(SHOAL_CACHE_PAIR) _Atomic uint64_t next; /* records ever begun */
    _Atomic uint64_t bytes;                           /* sum over operations that ended, of their larger operands */
    _Atomic uint64_t came_last;                       /* operations in which this rank arrived last */
    _Atomic uint64_t late;                            /* ticks, over those operations */
    _Atomic uint64_t waited;                          /* ticks that threads of the program waited, in all communicators */
    _Atomic uint64_t sent;                            /* bytes that the communicator passed to the network */

    _Alignas(SHOAL_CACHE_PAIR) _Atomic int32_t waits_for; /* 1 + the rank that this one reports waiting for, or 0 */
    _Atomic int32_t status;                               /* status of the first failure; 0 if none */
    _Atomic uint64_t waits_since;                         /* ticks */
    _Atomic uint64_t rejected;                            /* messages that the rank's endpoint has rejected so far */
    _Atomic uint64_t batch, noise_scale, noise_error;     /* doubles that the program publishes; 0: not known */
    _Atomic int32_t threads;                              /* that may do the rank's work at once */
    _Atomic int32_t network_threads;                      /* that may send and receive at once */
};

struct shoal_recorder {
    struct shoal_flight *flight;
    struct shoal_record *records;            /* after the head */
    struct shoal_recorder_identity identity; /* set by the creator of the communicator; all 0 before */
    uint64_t job;
    struct shoal_recorder *track;              /* printed after this one; NULL if none. The communicator owns it */
    pthread_mutex_t *guard;                    /* of a track: its writer holds it instead of the engine's lock */
    const struct shoal_rejections *rejections; /* the endpoint's, which outlives this; NULL if none */
    int pid;                                   /* owner of the records; 0: this process */
    const char *host;                          /* NULL: this host */
    struct shoal_flights *flights;             /* the file; NULL: private memory */
    long slot;                                 /* in that file */
};

/* Creates the file. Any thread. Returns NULL if out of memory. */
struct shoal_flights *shoal_flights_create(void);
/* Call after closing the recorders in the file. `flights` may be NULL. */
void shoal_flights_destroy(struct shoal_flights *flights);
size_t shoal_flight_stride(void);

/* Creates a recorder in private memory: for a copy, or if no other process reads it. */
SHOAL_MUST_USE enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder);
/* Creates a recorder in the file, or in private memory if `flights` is NULL or the file has no slot left (for example, if no
 * descriptor was free). */
SHOAL_MUST_USE enum shoal_status shoal_recorder_open(struct shoal_recorder *recorder, struct shoal_flights *flights);
void shoal_recorder_fini(struct shoal_recorder *recorder);

/* Registers a text that records will point to; further calls with one text do nothing. Other processes see "?" for a text that
 * is not registered. */
void shoal_recorder_name(struct shoal_recorder *recorder, const char *text);

/* Sets the owner, and lets other processes read the recorder from now on. */
void shoal_recorder_identify(struct shoal_recorder *recorder, const struct shoal_recorder_identity *identity, uint64_t job,
                             const char *comm, int rank, double ns_per_tick);

/* Adds without a read-modify-write, because there is only one writer. */
static inline void shoal_flight_add(_Atomic uint64_t *sum, uint64_t more)
{
    atomic_store_explicit(sum, atomic_load_explicit(sum, memory_order_relaxed) + more, memory_order_relaxed);
}

/* Returns the record for the next operation, overwriting the oldest. The caller sets every field and, if the record has an
 * owner, finds that owner another record. */
static inline struct shoal_record *shoal_recorder_next(struct shoal_recorder *recorder)
{
    const uint64_t next = atomic_load_explicit(&recorder->flight->next, memory_order_relaxed);
    atomic_store_explicit(&recorder->flight->next, next + 1, memory_order_relaxed);
    return &recorder->records[next % SHOAL_RECORDS];
}

/* Counts an operation that has ended, and this rank's lateness if it arrived last (was_last is 0 or 1). */
static inline void shoal_recorder_count(struct shoal_recorder *recorder, uint64_t bytes, uint64_t was_last, int64_t late)
{
    struct shoal_flight *flight = recorder->flight;
    shoal_flight_add(&flight->bytes, bytes);
    shoal_flight_add(&flight->came_last, was_last);
    shoal_flight_add(&flight->late, (uint64_t)late & (0 - was_last));
}

/* These two store sums that other modules keep. */
static inline void shoal_recorder_note_waited(struct shoal_recorder *recorder, uint64_t ticks)
{
    atomic_store_explicit(&recorder->flight->waited, ticks, memory_order_relaxed);
}

static inline void shoal_recorder_note_sent(struct shoal_recorder *recorder, uint64_t bytes)
{
    atomic_store_explicit(&recorder->flight->sent, bytes, memory_order_relaxed);
}

static inline void shoal_recorder_note_number(_Atomic uint64_t *to, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    atomic_store_explicit(to, bits, memory_order_relaxed);
}

static inline double shoal_recorder_number(const _Atomic uint64_t *from)
{
    const uint64_t bits = atomic_load_explicit(from, memory_order_relaxed);
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Stores which rank this one waits for (-1: none) and since when, in ticks. */
void shoal_recorder_note_wait(struct shoal_recorder *recorder, int rank, uint64_t since);

/* Stores how many threads may do the rank's work at once, and how many may send and receive. */
void shoal_recorder_note_threads(struct shoal_recorder *recorder, int threads, int network_threads);
/* Stores how many messages were rejected so far. Needs an endpoint, and the lock under which it counts. */
void shoal_recorder_note_rejected(struct shoal_recorder *recorder);

/* Copies into an initialized recorder. */
void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy);

/* Prints one JSON object per line, oldest first. Tracks are not printed. */
void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out);

#define SHOAL_RECORDER_NAME_MAX 512

/* A file that a setting names. */
struct shoal_recorder_file {
    struct shoal_log *log;
    const char *setting; /* its name, for messages */
    const char *pattern; /* its value, with %h, %p, %r; "" if there is no file */
    bool is_private;     /* a new file is readable by the user alone */
};

/* Appends the lines of the recorder and of its tracks to the file in one write, so that ranks that share a file do not tear
 * each other's lines (on a local file system). Stores the file's name in name_out, which may be NULL. Returns false if there
 * is no file, or if it cannot be written, which is logged as a warning. */
bool shoal_recorder_append(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick,
                           const struct shoal_recorder_file *file, char name_out[SHOAL_RECORDER_NAME_MAX]);

/* Finds a pattern, as above, for a file in the temporary folder, and a shell pattern for all ranks' files. Makes the folder,
 * readable by the user alone, and removes files in it, except those of this job and the newest SHOAL_RECORDERS_KEPT others.
 * Returns false with errno set if the folder cannot be used. Defined in recorder_keep.c. */
#define SHOAL_RECORDERS_KEPT 32
SHOAL_MUST_USE bool shoal_recorder_find_path(const struct shoal_recorder *recorder, char *pattern, size_t pattern_bytes,
                                             char *all, size_t all_bytes);

#endif
