/* Sharded checkpoints: saves and loads the parameters, masters and optimizer states that the ranks hold as shards. This header
 * is its manual; it builds on gradients.h (section 10) and shards.h. It is new and may still change.
 *
 *     FOLDER/step-000000000042/shard-00000-of-00003.shoal     each rank writes its own shard
 *                              shard-00001-of-00003.shoal
 *                              shard-00002-of-00003.shoal
 *                              complete                       written last: without it the checkpoint does not count
 *
 * Each rank writes and reads only its own values, so no rank needs memory for the whole model. Values are stored by the name
 * of their parameter and by element. So any number of ranks can load what others have saved, with other buffers or another
 * degree, and shards can load what a reducer has saved, and the reverse.
 *
 * Every file is written under a temporary name, synchronized with the disk and then renamed; `complete` follows when all other
 * files are on the disk. A crash at any point leaves all earlier checkpoints as they were, and the new one is either complete
 * or does not count. Checksums find a file that is cut short or changed.
 *
 * The folder must be on a file system that all hosts share. docs/checkpoints.md has examples and the format of the files.
 *
 * The rules of shoal.h also hold here: statuses, outputs named *_out, struct_bytes and *_INIT. */
#ifndef SHOAL_CHECKPOINTS_H
#define SHOAL_CHECKPOINTS_H

#include <shoal/gradients.h>
#include <shoal/shards.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Saving ----------------------------------------------------------------------------------------------------------- */

#define SHOAL_CHECKPOINT_EXTRA_MAX 67108864         /* most bytes of the program's own in a checkpoint */
#define SHOAL_CHECKPOINT_LATEST 9223372036854775807 /* as a step: the complete checkpoint with the highest step */

/* Begins as SHOAL_SAVE_OPTIONS_INIT. */
struct shoal_save_options {
    size_t struct_bytes;
    uint64_t step;       /* the number of the checkpoint, below SHOAL_CHECKPOINT_LATEST; the same on all ranks */
    const void *extra;   /* read on rank 0: bytes of the program's own, such as its random state; loading returns them */
    size_t extra_bytes;  /* at most SHOAL_CHECKPOINT_EXTRA_MAX */
    uint32_t keep;       /* read on rank 0: how many complete checkpoints stay, this one and those before it; 0: all */
    uint32_t timeout_ms; /* deadline for the other ranks to write their files; 0: ten minutes */
};
#define SHOAL_SAVE_OPTIONS_INIT                          \
    {                                                    \
        sizeof(struct shoal_save_options), 0, 0, 0, 0, 0 \
    }

/* Save a checkpoint, in which each rank writes its shard; a collective call between steps. They write all masters and states,
 * and how often each parameter was stepped. With teams of ranks, one team writes. `folder` is made if it does not exist; the
 * folder above it must exist. When the call returns OK on any rank, the checkpoint is complete and on the disk. Only then are
 * checkpoints removed that `keep` does not keep. Those are complete ones of earlier steps, and what an earlier step has left
 * incomplete.
 *
 * Errors are the same on every rank, and the message names the rank and its file. Earlier checkpoints are as before, and the
 * files of this one are removed. ERR_ARGUMENT: no folder, or options out of range. ERR_STATE: the folder has a complete
 * checkpoint of this step, which is never overwritten. ERR_MISMATCH: ranks save different steps, or after a failed step their
 * parameters have made different numbers of steps. ERR_SYSTEM: the operating system refused a call, as on a full disk.
 * Otherwise ERR_MEMORY, or the errors of an operation such as ERR_PEER_LOST; if a rank was lost at the very end, the checkpoint
 * may be complete. A rank that calls inside a step, or whose reducer has no optimizer, gets ERR_STATE at once, without the
 * others. */
SHOAL_CALL shoal_reducer_save(struct shoal_reducer *reducer, const char *folder, const struct shoal_save_options *options);
SHOAL_CALL shoal_shards_save(struct shoal_shards *shards, const char *folder, const struct shoal_save_options *options);

/* ---- 2. Loading ---------------------------------------------------------------------------------------------------------- */

/* Begins as SHOAL_LOAD_OPTIONS_INIT. */
struct shoal_load_options {
    size_t struct_bytes;
    uint64_t step;       /* the same on all ranks */
    void *extra;         /* receives the program's own bytes; NULL: they are not read */
    size_t extra_room;   /* bytes at `extra` */
    uint32_t timeout_ms; /* deadline for the other ranks to read their files; 0: ten minutes */
};
#define SHOAL_LOAD_OPTIONS_INIT                                             \
    {                                                                       \
        sizeof(struct shoal_load_options), SHOAL_CHECKPOINT_LATEST, 0, 0, 0 \
    }

/* What was loaded; the same on all ranks, except read_bytes. Begins as SHOAL_LOAD_RESULT_INIT. */
struct shoal_load_result {
    size_t struct_bytes;
    uint64_t step;
    size_t extra_bytes;
    size_t read_bytes; /* values that this rank has read: those of its shard */
};
#define SHOAL_LOAD_RESULT_INIT                    \
    {                                             \
        sizeof(struct shoal_load_result), 0, 0, 0 \
    }

/* Load a checkpoint; a collective call between steps. Each rank reads its own shard into temporary memory. When all ranks have
 * read theirs, values, states and numbers of steps replace the present ones; a reducer then gathers its parameters. So after
 * an error in reading or checking, nothing has changed on any rank. options may be NULL for the latest checkpoint, and so may
 * result_out.
 *
 * The parameters must be those of the checkpoint, in any order: the same names, counts and types. Parameters without a name
 * are compared by number. The optimizer must keep states of the same kind: a momentum (SGD), moments (ADAM, ADAMW, LAMB), sums
 * (ADAGRAD), or LION's. The settings of groups are the program's own. A checkpoint of values only (shoal_checkpoint_write) sets
 * the states to their beginning.
 *
 * Errors are the same on every rank, and the message names the rank and the file or parameter. ERR_ARGUMENT: there is no
 * checkpoint, or none of that step; it is of another model, or has other states; a file is missing, was cut short or changed,
 * or belongs to another step or checkpoint; extra_room is too small. ERR_MISMATCH: ranks load different steps, or see different
 * checkpoints. Otherwise ERR_STATE as above, ERR_SYSTEM, ERR_MEMORY,
 * or the errors of an operation. */
SHOAL_CALL shoal_reducer_load(struct shoal_reducer *reducer, const char *folder, const struct shoal_load_options *options,
                              struct shoal_load_result *result_out);
SHOAL_CALL shoal_shards_load(struct shoal_shards *shards, const char *folder, const struct shoal_load_options *options,
                             struct shoal_load_result *result_out);

/* ---- 3. Reading without ranks -------------------------------------------------------------------------------------------- */

/* An open checkpoint of one process, which needs no context or communicator. One thread at a time uses it. In this section
 * `error` receives one line about an error; it may be NULL. */
struct shoal_checkpoint;

/* Opens a checkpoint and checks that each of its files is there, belongs to it and has all of its bytes. Statuses are those of
 * shoal_reducer_load. */
SHOAL_CALL shoal_checkpoint_open(const char *folder, uint64_t step, struct shoal_checkpoint **checkpoint_out, char *error,
                                 size_t error_bytes);

/* NULL is allowed. */
SHOAL_API void shoal_checkpoint_close(struct shoal_checkpoint *checkpoint);

/* Writes the steps of the complete checkpoints in a folder, in ascending order, at most `room` of them. *count_out is the
 * number of all. ERR_SYSTEM: the folder cannot be read. */
SHOAL_CALL shoal_checkpoint_steps(const char *folder, uint64_t *steps_out, size_t room, size_t *count_out, char *error,
                                  size_t error_bytes);

/* Begins as SHOAL_CHECKPOINT_ABOUT_INIT. */
struct shoal_checkpoint_about {
    size_t struct_bytes;
    uint64_t step;
    uint64_t saved_at; /* seconds since 1970 */
    int rule;          /* enum shoal_optimizer_rule; -1: values only */
    uint32_t shards;   /* files with values */
    size_t parameters;
    uint64_t file_bytes; /* all files with values together */
    size_t extra_bytes;
};
#define SHOAL_CHECKPOINT_ABOUT_INIT                                 \
    {                                                               \
        sizeof(struct shoal_checkpoint_about), 0, 0, -1, 0, 0, 0, 0 \
    }
SHOAL_CALL shoal_checkpoint_describe(const struct shoal_checkpoint *checkpoint, struct shoal_checkpoint_about *about_out);

/* One parameter of a checkpoint. Begins as SHOAL_CHECKPOINT_PARAMETER_INIT. */
struct shoal_checkpoint_parameter {
    size_t struct_bytes;
    const char *name; /* "" if it has none; belongs to the checkpoint */
    enum shoal_type type;
    size_t count;    /* elements */
    uint64_t steps;  /* how often it was stepped */
    uint32_t states; /* states that it has in addition to the master: 0 to 2 */
};
#define SHOAL_CHECKPOINT_PARAMETER_INIT                                      \
    {                                                                        \
        sizeof(struct shoal_checkpoint_parameter), 0, SHOAL_FLOAT32, 0, 0, 0 \
    }

/* ERR_ARGUMENT: the parameter is out of range. */
SHOAL_CALL shoal_checkpoint_entry(const struct shoal_checkpoint *checkpoint, size_t parameter,
                                  struct shoal_checkpoint_parameter *entry_out);

/* Reads elements [begin, begin + count) of a state: float64 if the parameter's type is, otherwise float32. SHOAL_STATE_MASTER
 * is the exact value of the parameter. Reads only the files that have these elements, and compares checksums.
 * ERR_ARGUMENT: no such parameter, state or elements, or the file was changed. ERR_SYSTEM as above. */
SHOAL_CALL shoal_checkpoint_read(struct shoal_checkpoint *checkpoint, size_t parameter, enum shoal_optimizer_state state,
                                 size_t begin, size_t count, void *values_out, char *error, size_t error_bytes);

/* Reads the program's own bytes, all extra_bytes of them. Errors as for shoal_checkpoint_read. */
SHOAL_CALL shoal_checkpoint_extra(struct shoal_checkpoint *checkpoint, void *extra_out, char *error, size_t error_bytes);

/* ---- 4. Writing without ranks -------------------------------------------------------------------------------------------- */

/* A whole parameter for shoal_checkpoint_write. Begins as SHOAL_CHECKPOINT_VALUES_INIT. */
struct shoal_checkpoint_values {
    size_t struct_bytes; /* the same in all entries */
    struct shoal_parameter parameter;
    uint64_t steps;
    const void *states[3]; /* by enum shoal_optimizer_state, in the types of shoal_checkpoint_read; the master must be there */
};
#define SHOAL_CHECKPOINT_VALUES_INIT                                      \
    {                                                                     \
        sizeof(struct shoal_checkpoint_values), {0, SHOAL_FLOAT32, 0}, 0, \
        {                                                                 \
            0, 0, 0                                                       \
        }                                                                 \
    }

/* Writes a checkpoint of one file from whole parameters, which any number of ranks can load; a local call. `rule` is the
 * optimizer's, or -1 for values only. `options` is as for shoal_reducer_save. All parameters must have exactly the states that
 * the rule keeps; with SHOAL_SGD each has a momentum or none. Errors as for shoal_reducer_save. With OK, `error` is empty, or
 * names an earlier checkpoint that could not be removed. */
SHOAL_CALL shoal_checkpoint_write(const char *folder, const struct shoal_save_options *options, int rule,
                                  const struct shoal_checkpoint_values *values, size_t count, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
