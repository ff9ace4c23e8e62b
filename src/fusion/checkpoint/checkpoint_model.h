/* Saving and loading the values that the ranks of a communicator hold as shards. A reducer and shards describe their values as
 * a checkpoint_model; this room knows neither of them.
 *
 *     save   all ranks agree -> rank 0 makes the folder -> each writes its shard -> rank 0 writes `complete`
 *     load   rank 0 finds the step -> each opens and compares -> each reads its values -> all put them in place
 *
 * After each arrow all ranks agree that none has failed. */
#ifndef SHOAL_FUSION_CHECKPOINT_MODEL_H
#define SHOAL_FUSION_CHECKPOINT_MODEL_H

#include "fusion/checkpoint/checkpoint_files.h"
#include "fusion/checkpoint/checkpoint_format.h"

/* Elements [begin, begin + count) of a state in this rank's memory: float64 if the parameter's type is, else float32. */
struct checkpoint_piece {
    uint32_t parameter;
    uint32_t state;
    size_t begin, count;
    void *values;
    double initial; /* the value before the first step, for a checkpoint without states */
};

/* What is saved and loaded. The object that describes itself owns all arrays. */
struct checkpoint_model {
    struct shoal_context *context;
    struct shoal_comm *comm;
    const char *name, *call; /* for messages: the object, and the public function */
    const struct fusion_parameters *parameters;
    enum shoal_optimizer_rule rule;
    uint64_t *steps;                 /* [parameters] */
    const uint32_t *states;          /* [parameters]: states in addition to the master */
    struct checkpoint_piece *pieces; /* this rank's shard */
    size_t piece_count;
    uint32_t shard, shards; /* this rank's among all */
    bool is_writer;         /* one of the ranks with the same shard writes it */
};

/* Collective calls. `status` is ERR_MEMORY if this rank could not describe itself; the call is then refused on all ranks.
 * checkpoint_load writes to pieces and steps only if it returns OK. */
SHOAL_MUST_USE enum shoal_status checkpoint_save(const struct checkpoint_model *model, const char *folder,
                                                 const struct shoal_save_options *options, enum shoal_status status);
SHOAL_MUST_USE enum shoal_status checkpoint_load(const struct checkpoint_model *model, const char *folder,
                                                 const struct shoal_load_options *options, enum shoal_status status,
                                                 struct shoal_load_result *result_out);

/* ---- checkpoint_agree.c ---- */

/* A collective call. Returns OK if all ranks passed OK. Otherwise returns the status of the lowest rank that did not, and
 * reports its text on all ranks. */
SHOAL_MUST_USE enum shoal_status checkpoint_agree(const struct checkpoint_model *model, uint32_t timeout_ms,
                                                  enum shoal_status status, const struct checkpoint_text *text);

/* Reports an error that all ranks have found alike. Returns status; does nothing if it is OK. */
SHOAL_MUST_USE enum shoal_status checkpoint_refuse(const struct checkpoint_model *model, enum shoal_status status,
                                                   const struct checkpoint_text *text);

/* A collective call: collects `bytes` bytes of each rank in all_out, in the order of ranks. */
SHOAL_MUST_USE enum shoal_status checkpoint_collect(const struct checkpoint_model *model, uint32_t timeout_ms, const void *own,
                                                    void *all_out, size_t bytes);

/* ---- checkpoint_write.c ---- */

/* What the files of one checkpoint have in common. */
struct checkpoint_mark {
    uint64_t step, save, model;
    uint32_t shards;
};

/* Writes the file of one shard. The extra bytes are part of it if extra_bytes is not 0. */
SHOAL_MUST_USE enum shoal_status checkpoint_write_shard(const char *folder, const struct checkpoint_mark *mark, uint32_t shard,
                                                        const struct fusion_parameters *parameters,
                                                        const struct checkpoint_piece *pieces, size_t piece_count,
                                                        const void *extra, size_t extra_bytes,
                                                        struct checkpoint_file_record *record_out,
                                                        struct checkpoint_text *text);

/* What `complete` records, in addition to the mark. */
struct checkpoint_contents {
    const struct fusion_parameters *parameters;
    const uint64_t *steps;
    const uint32_t *states;
    int rule;
    size_t extra_bytes;
    const struct checkpoint_file_record *files; /* [mark->shards] */
};
SHOAL_MUST_USE enum shoal_status checkpoint_write_complete(const char *folder, const struct checkpoint_mark *mark,
                                                           const struct checkpoint_contents *contents,
                                                           struct checkpoint_text *text);

/* Returns ERR_ARGUMENT if the program has not set struct_bytes. options may be NULL. */
SHOAL_MUST_USE enum shoal_status checkpoint_check_set(const struct shoal_save_options *options, struct checkpoint_text *text);

/* Checks options of a save; ERR_ARGUMENT. */
SHOAL_MUST_USE enum shoal_status checkpoint_check_save(const struct shoal_save_options *options, struct checkpoint_text *text);

/* Returns a random number. */
uint64_t checkpoint_draw(void);

/* ---- checkpoint_read.c ---- */

SHOAL_MUST_USE enum shoal_status checkpoint_open(const char *folder, uint64_t step, struct shoal_checkpoint **checkpoint_out,
                                                 struct checkpoint_text *text);
const struct checkpoint_summary *checkpoint_summary_of(const struct shoal_checkpoint *checkpoint);
const struct checkpoint_parameter_record *checkpoint_records(const struct shoal_checkpoint *checkpoint);

/* Reads elements of a state. The caller has checked that the checkpoint has them. */
SHOAL_MUST_USE enum shoal_status checkpoint_read(struct shoal_checkpoint *checkpoint, uint32_t parameter, uint32_t state,
                                                 size_t begin, size_t count, void *values_out, struct checkpoint_text *text);

/* Replaces SHOAL_CHECKPOINT_LATEST by the last complete step. ERR_ARGUMENT: there is none. */
SHOAL_MUST_USE enum shoal_status checkpoint_find_step(const char *folder, uint64_t *step, struct checkpoint_text *text);

#endif
