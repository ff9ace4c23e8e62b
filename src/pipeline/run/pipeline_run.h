/* Running a schedule on a communicator: what the files of this module share. See include/shoal/pipeline.h, section 6.
 *
 *     pipeline_create.c      makes and frees pipelines; ranks compare what they run
 *     pipeline_blocks.c      memory: blocks that are reused, and holds, which count who still needs memory
 *     pipeline_messages.c    hands messages over: credit, envelope, body
 *     pipeline_step.c        runs the actions of a step
 *
 * A message between two ranks takes three operations:
 *
 *     receiver    credit ->             "I have room": a few actions before it needs the message
 *     sender               <- envelope  its size and note
 *     sender               <- body      its bytes, if it has any
 *
 * A sender posts everything and never waits before the end of a step, and a rank gives credit in the order of its own actions.
 * So no message waits behind one that is needed later, and unexpected messages never pile up at a receiver.
 *
 * Messages advance in callbacks of requests, which run on any thread under a lock of Shoal. So no function of Shoal may be
 * called under the pipeline's lock. */
#ifndef SHOAL_PIPELINE_RUN_H
#define SHOAL_PIPELINE_RUN_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "shoal/pipeline.h"

#define RUN_TRY(expression)                                 \
    do {                                                    \
        const enum shoal_status try_status_ = (expression); \
        if (try_status_ != SHOAL_OK)                        \
            return try_status_;                             \
    } while (0)

#define RUN_TEXT_MAX 512 /* bytes of a text for people, with the final zero */

/* ---- pipeline_blocks.c --------------------------------------------------------------------------------------------------- */

/* Memory of shoal_mem_alloc. */
struct run_block {
    struct run_block *next; /* in a list */
    void *memory;
    size_t capacity;
    uint64_t last_step; /* that used it */
};

/* Counts who still needs an output or an input. The last one that drops it gives back the block, releases the owner, and drops
 * the hold below it. Only the thread that runs the step touches holds. */
struct run_hold {
    unsigned count;
    struct run_block *block; /* NULL: memory of the program */
    void *owner;             /* NULL: nobody is called */
    struct run_hold *below;  /* the hold whose memory this one is a part of; NULL: none */
    struct run_hold *next;   /* in the list of memory from shoal_pipeline_alloc */
};

/* Returns a free block or a new one. Any thread, also in a callback. */
SHOAL_MUST_USE enum shoal_status run_block_take(struct shoal_pipeline *pipeline, size_t bytes, struct run_block **block_out);
void run_block_give_back(struct shoal_pipeline *pipeline, struct run_block *block);
/* Frees free blocks that this step and the one before it did not use; all: every free block. */
void run_blocks_trim(struct shoal_pipeline *pipeline, bool all);

/* Returns a hold with a count of 1, or NULL if out of memory: then nothing has changed. Keeps `below`. */
struct run_hold *run_hold_make(struct run_block *block, void *owner, struct run_hold *below);
/* NULL is allowed. */
void run_hold_drop(struct shoal_pipeline *pipeline, struct run_hold *hold);

/* ---- pipeline_messages.c ------------------------------------------------------------------------------------------------- */

/* What travels before the body. */
struct run_envelope {
    uint64_t step;
    uint64_t bytes;
    uint32_t is_forward_only;
    uint32_t note_bytes;
    char note[SHOAL_NOTE_BYTES];
};

enum run_part_name { RUN_CREDIT, RUN_ENVELOPE, RUN_BODY, RUN_PARTS };

struct run_part {
    struct run_message *message;
    enum run_part_name name;
    struct shoal_request *request; /* lock */
    bool is_waited_for;            /* lock: the step's thread has waited for the request, and now waits for its callback */
    bool is_done;                  /* lock */
};

/* The message of an edge and microbatch in one direction, on one of its ranks. */
struct run_message {
    struct shoal_pipeline *pipeline;
    uint32_t edge; /* index in the pipeline's list */
    uint32_t microbatch;
    bool is_gradient;
    int peer; /* the other rank; this rank itself: the message is handed over */
    struct run_part parts[RUN_PARTS];
    unsigned pending;              /* lock: parts that were begun and are not done */
    enum shoal_status status;      /* lock */
    char credit;                   /* received here */
    struct run_block *block;       /* where a body is received; set in a callback, read when no part is pending */
    struct run_envelope *envelope; /* NULL: the message was not begun in this step */
    void *data;
    struct run_hold *hold;
    bool is_listed;                /* lock */
    struct run_message *next_sent; /* lock: in the list of sent messages */
};

/* Begins to receive: sends credit. Later errors are returned by run_message_wait. */
SHOAL_MUST_USE enum shoal_status run_message_receive(struct run_message *message);
/* Begins to send the message, whose envelope, data and hold are set. */
void run_message_send(struct run_message *message);
/* Returns false if all of a message's parts are done. */
bool run_message_is_under_way(struct run_message *message);
/* Waits until all of a message's parts are done, and returns its status. */
SHOAL_MUST_USE enum shoal_status run_message_wait(struct run_message *message);
/* Ends the use of a message here. It must not be under way. */
void run_message_end(struct run_message *message);
/* Ends all messages that were sent since the last call. */
void run_end_sent(struct shoal_pipeline *pipeline);
/* "the gradient of microbatch 3 from stage 2 (rank 1) to stage 1 (rank 0)" */
void run_message_name(const struct run_message *message, char name[RUN_TEXT_MAX]);

/* ---- The state ----------------------------------------------------------------------------------------------------------- */

/* An edge from or to this rank, as far as it leads to one replica of the other stage. */
struct run_edge {
    uint32_t number; /* in the options */
    uint32_t from;
    uint32_t to;
    int from_rank; /* ranks of the communicator */
    int to_rank;
    uint32_t from_replica;
    uint32_t to_replica;
    uint32_t from_replicas; /* how many there are */
    uint32_t to_replicas;
    struct run_message *messages; /* [2 * microbatches]: activation, gradient, activation ... */
};

/* A stage of this rank, or an empty one of another rank. */
struct run_stage {
    uint32_t *edges; /* [in_count + out_count]: indexes of edges to the stage, then of those from it */
    uint32_t in_count;
    uint32_t out_count;
    uint32_t last_gradient; /* index of the last action that computes gradients of weights */
    bool is_recomputed;
};

struct shoal_pipeline {
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct shoal_track *track; /* spans: this rank's actions, and its waits at a step's end; freed with comm */
    char name[24];
    int rank; /* in the communicator; the next three are about the schedule */
    uint32_t schedule_rank;
    uint32_t replica;
    uint32_t replicas;
    uint32_t stage_count;
    uint32_t microbatches;
    uint32_t ahead;
    uint32_t timeout_ms;

    struct shoal_action *actions; /* of this rank */
    uint32_t action_count;
    struct run_edge *edges;
    uint32_t edge_count;
    struct run_stage *stages; /* [stage_count] */
    struct run_message *messages;
    size_t message_count;
    struct shoal_parcel *inputs;  /* those of the current action */
    struct shoal_parcel *outputs; /* as many as any action has */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct run_block *free_blocks; /* lock */
    struct run_message *sent;      /* lock: all their parts are done */

    uint64_t step;
    bool is_forward_only;
    bool is_computing;
    uint32_t next_receive;               /* the actions before it have begun to receive */
    uint32_t receiving;                  /* actions that have begun to receive and have not begun to compute */
    struct run_hold *taken;              /* from shoal_pipeline_alloc, in the current call of compute */
    const struct run_message *waits_for; /* when the step failed; NULL: none */
    struct shoal_pipeline_calls calls;
    enum shoal_status failed;
    struct shoal_failure failure;
    struct shoal_pipeline_times times;
    struct shoal_action_times *action_times;
};

static inline uint64_t run_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static inline struct run_message *run_message_of(const struct run_edge *edge, uint32_t microbatch, bool is_gradient)
{
    return &edge->messages[2 * (size_t)microbatch + is_gradient];
}

/* Makes the pipeline fail on all ranks. Any thread, also in a callback. */
void run_share_cause(struct shoal_pipeline *pipeline, enum shoal_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
