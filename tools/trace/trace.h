/* Shared by the files of `shoal trace`. A line is read (trace_read.c, with flat_json.h), merged with those of the other ranks
 * (trace_merge.c, with trace_clock.c), then drawn (trace_chrome.c) and summarized (trace_summary.c); the summary is printed for
 * people or as JSON (trace_print.c). Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_TRACE_H
#define SHOAL_TOOLS_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ---- Records ------------------------------------------------------------------------------------------------------------- */

/* One line of a flight recorder: one operation on one rank. Texts are interned: equal texts have equal addresses. */
struct trace_record {
    const char *comm, *host, *clock, *kind, *algorithm, *status;
    uint64_t comm_id, record, sequence, count, tag;
    uint64_t posted_ticks, arrived_ticks, done_ticks; /* 0: not yet */
    double ns_per_tick, late_us;
    int64_t unix_us;
    int64_t rank, size, world_rank, pid, root, last_rank, step, peer;
    int64_t type, op;
    uint32_t file, line; /* position of the line */

    /* Set by merging: indexes into the tables of struct trace, and nanoseconds since the trace began. */
    size_t comm_at, worker_at, clock_at, operation_at;
    int64_t posted, arrived, done; /* -1: not yet */
};

/* The communicator with one number in all files. */
struct trace_comm {
    uint64_t id;
    const char *name;
    char label[64]; /* its name, with #1, #2 ... if several have that name */
    int64_t size;
    int64_t begin, end;
    size_t order; /* 0 for the one that began first */
};

/* A process of the job, or one of its ranks if these are threads. */
struct trace_worker {
    const char *host, *clock;
    int64_t pid, world_rank;
    bool is_absent; /* in no file, but other ranks mention it: only the next two fields are known */
    size_t comm_at;
    int64_t rank;
};

enum trace_alignment { TRACE_NOT_ALIGNED, TRACE_REFERENCE, TRACE_BY_OPERATIONS, TRACE_BY_WALL_CLOCK };

/* The clock of one boot of a machine. */
struct trace_clock {
    const char *name, *host;
    uint64_t base_ticks; /* ticks of its first record */
    double ns_per_tick;  /* common to all its processes, which measured it only to within some millionths */
    int64_t unix_ns;     /* wall clock at base_ticks */
    int64_t offset;      /* of base_ticks in the reference's nanoseconds */
    enum trace_alignment alignment;
    size_t shared;  /* operations used for its alignment */
    size_t seen_at; /* 1 + the operation counted last */
};

/* A collective operation with the records of its ranks, or one message at one rank. */
struct trace_operation {
    size_t first, count; /* in records */
    int64_t begin;       /* when its first rank posted it */
    int64_t late;        /* nanoseconds from the first rank to the last; 0 if none was late, or unknown */
    int64_t last_rank;   /* or -1 */
    int64_t last_posted; /* when the last rank arrived; INT64_MAX if only its lateness is known */
    size_t last_worker;
};

struct trace {
    const char *const *files;
    struct trace_record *records; /* by communicator, operation, rank */
    size_t count, capacity;
    size_t duplicates;
    struct trace_comm *comms;
    size_t comm_count;
    struct trace_worker *workers; /* by world rank; absent ones last */
    size_t worker_count, present_count;
    struct trace_clock *clocks;
    size_t clock_count;
    struct trace_operation *operations;
    size_t operation_count;
    int64_t unix_ns; /* wall clock when it began */
    int64_t end;
    struct trace_words *words;
};

/* Names and bytes by kind of operation. Sends, receives and drains are messages: each rank counts its own. */
bool trace_is_message(const struct trace_record *record);
uint64_t trace_bytes(const struct trace_record *record);

/* Returns true for a span of a pipeline's track, whose count is a stage, tag a microbatch, and sequence a step. Spans are
 * messages as well: no other rank has the same one. */
bool trace_is_span(const struct trace_record *record);
/* Returns the letter that an action has in a schedule, such as 'F', or 0 if it is none. */
char trace_letter(const struct trace_record *record);

/* Prints "all-reduce 1024 float32 sum", or "forward of stage 2, microbatch 5". */
enum { TRACE_NAME_BYTES = 128 };
char *trace_name(const struct trace_record *record, char name_out[TRACE_NAME_BYTES]);
/* Like trace_name, but prints an action as schedules write it: "2F5". */
char *trace_short_name(const struct trace_record *record, char name_out[TRACE_NAME_BYTES]);

/* Returns true if two ranks' records of one operation describe the same call. */
bool trace_is_same_call(const struct trace_record *a, const struct trace_record *b);

/* Returns how long this rank waited for the one that arrived last. */
int64_t trace_waited(const struct trace *trace, const struct trace_record *record);

bool trace_is_ok(const struct trace_record *record);

/* ---- Steps. Each returns 0, or the exit code after printing one line to stderr ------------------------------------------- */

int trace_read(struct trace *trace, const char *const *files, size_t file_count);
int trace_merge(struct trace *trace);
int trace_align(struct trace *trace);
int trace_chrome_print(const struct trace *trace, FILE *out);
void trace_fini(struct trace *trace);

/* Prints "shoal trace: no memory..." and returns the exit code. */
int trace_memory_fail(void);

/* ---- Summary ------------------------------------------------------------------------------------------------------------- */

/* How late a worker was, over the operations in which it arrived last. */
struct trace_blame {
    size_t worker_at;
    size_t operations, last_in;
    bool is_partial; /* it arrived last in operations of which it has no record, so the number of its operations is unknown */
    int64_t median, p99, worst;
    int64_t others_waited; /* in total; a rank that waits in several operations at once counts once */
};

struct trace_kind_sum {
    size_t comm_at;
    const char *kind;
    bool is_message; /* it does not wait for other ranks when it begins */
    uint64_t operations, bytes;
    int64_t median, p99;
    int64_t waited, took; /* over all ranks */
};

/* Ranks of a communicator that are in no file. */
struct trace_absence {
    size_t comm_at;
    int64_t first_rank, last_rank;
};

/* A rank whose oldest or newest operations are not in the files. */
struct trace_cut {
    size_t comm_at;
    int64_t rank;
    uint64_t gone, all; /* up to its last record */
    uint64_t later;     /* operations after that in which others saw it arrive last */
};

/* One delay of a rank, with all operations that waited for it at that time. */
struct trace_incident {
    const struct trace_operation *operation; /* the one that waited longest */
    size_t operations;
    int64_t end;
};

/* What a rank of a pipeline did in a step, in nanoseconds. */
struct trace_pipeline_rank {
    int64_t computed;
    int64_t waited;                     /* for other stages, before its actions */
    const struct trace_record *longest; /* the action that waited longest; NULL: none */
    int64_t longest_wait;
};

/* A pipeline, from its track. Whole steps are those with forward and backward passes of which the files have all ranks'
 * actions. The figures are of the one whose length is the median. */
struct trace_pipeline {
    size_t comm_at; /* its track */
    int64_t rank_count;
    struct trace_pipeline_rank *ranks;
    size_t steps; /* whole ones; 0: all figures are 0 */
    uint64_t step;
    uint32_t stages, microbatches;
    int64_t took;                               /* from its first action to its last one */
    double bubble;                              /* share of it in which a rank did not compute, on average over the ranks */
    double predicted_step_us, predicted_bubble; /* the schedule's, if each stage took its mean times and messages none */
};

enum { TRACE_WORST = 5 };

struct trace_summary {
    const struct trace *trace;
    struct trace_blame *blames; /* worst first */
    struct trace_kind_sum *kinds;
    size_t kind_count;
    struct trace_absence *absences;
    size_t absence_count;
    struct trace_cut *cuts;
    size_t cut_count;
    const struct trace_operation **failed; /* or under way; by time */
    size_t failed_count;
    struct trace_incident worst[TRACE_WORST]; /* latest first */
    size_t worst_count;
    struct trace_pipeline *pipelines;
    size_t pipeline_count;
};

int trace_summarize(const struct trace *trace, struct trace_summary *summary_out);
/* Finds the pipelines. Returns false without memory. */
bool trace_pipelines_find(struct trace_summary *summary);
void trace_pipelines_free(struct trace_summary *summary);
void trace_summary_fini(struct trace_summary *summary);
void trace_summary_print(const struct trace_summary *summary, const char *output, FILE *out);
void trace_summary_print_json(const struct trace_summary *summary, const char *output, FILE *out);

#endif
