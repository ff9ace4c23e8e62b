/* Saves a checkpoint: each rank its shard, rank 0 the rest. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/layout/lists.h"

#define TIMEOUT_MS 600000

/* What a rank intends to save. */
struct intent {
    uint64_t step, save;
    uint64_t steps_hash; /* of the numbers of steps of all parameters */
};

/* What a rank has written; shards without a file have bytes 0. */
struct written {
    uint32_t shard, has_file;
    struct checkpoint_file_record record;
};

/* A save under way on this rank. */
struct saving {
    const struct checkpoint_model *model;
    const char *folder;
    struct shoal_save_options options;
    struct checkpoint_mark mark;
    struct intent *intents;               /* [ranks] */
    struct written *written;              /* [ranks] */
    struct checkpoint_file_record *files; /* [shards] */
    bool is_complete;                     /* on rank 0: other ranks may have returned OK */
    struct checkpoint_text text;          /* what this rank has found wrong */
};

static enum shoal_status saving_agree(struct saving *saving, enum shoal_status status)
{
    return checkpoint_agree(saving->model, saving->options.timeout_ms, status, &saving->text);
}

static bool is_first(const struct saving *saving)
{
    return shoal_comm_rank(saving->model->comm) == 0;
}

/* ---- Before anything is written ------------------------------------------------------------------------------------------ */

static enum shoal_status prepare_saving(struct saving *saving)
{
    const struct checkpoint_model *model = saving->model;
    const size_t ranks = (size_t)shoal_comm_size(model->comm);
    struct checkpoint_path path;
    saving->intents = calloc(ranks, sizeof *saving->intents);
    saving->written = calloc(ranks, sizeof *saving->written);
    saving->files = calloc(model->shards, sizeof *saving->files);
    if (!saving->intents || !saving->written || !saving->files)
        return checkpoint_say(&saving->text, SHOAL_ERR_MEMORY, "no memory for the lists of %zu ranks", ranks);
    if (model->shards > CHECKPOINT_SHARDS_MAX)
        return checkpoint_say(&saving->text, SHOAL_ERR_UNSUPPORTED, "%" PRIu32 " shards are more than %d", model->shards,
                              CHECKPOINT_SHARDS_MAX);
    FUSION_TRY(checkpoint_step_path(saving->folder, saving->options.step, &path, &saving->text));
    return checkpoint_check_save(&saving->options, &saving->text);
}

/* All ranks see the same list, so all find the same difference. */
static enum shoal_status compare_intents(struct saving *saving)
{
    const struct intent *first = &saving->intents[0];
    for (int r = 1; r < shoal_comm_size(saving->model->comm); r++) {
        const struct intent *other = &saving->intents[r];
        if (other->step != first->step)
            return checkpoint_say(&saving->text, SHOAL_ERR_MISMATCH,
                                  "rank 0 saves step %" PRIu64 ", rank %d step %" PRIu64 ": save the same on all ranks",
                                  first->step, r, other->step);
        if (other->steps_hash != first->steps_hash)
            return checkpoint_say(&saving->text, SHOAL_ERR_MISMATCH,
                                  "parameters have made other numbers of steps on rank %d than on rank 0, as after a step "
                                  "that failed: load a checkpoint",
                                  r);
    }
    return SHOAL_OK;
}

static enum shoal_status agree_on_intent(struct saving *saving)
{
    const struct checkpoint_model *model = saving->model;
    const struct intent own = {saving->options.step, checkpoint_draw(),
                               shoal_bytes_hash(model->steps, model->parameters->count * sizeof *model->steps)};
    FUSION_TRY(checkpoint_collect(model, saving->options.timeout_ms, &own, saving->intents, sizeof own));
    FUSION_TRY(checkpoint_refuse(model, compare_intents(saving), &saving->text));
    saving->mark =
        (struct checkpoint_mark){own.step, saving->intents[0].save, fusion_parameters_hash(model->parameters), model->shards};
    return SHOAL_OK;
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status write_own(struct saving *saving, struct written *own)
{
    const struct checkpoint_model *model = saving->model;
    *own = (struct written){.shard = model->shard, .has_file = model->is_writer};
    if (!model->is_writer)
        return SHOAL_OK;
    return checkpoint_write_shard(saving->folder, &saving->mark, model->shard, model->parameters, model->pieces,
                                  model->piece_count, saving->options.extra, is_first(saving) ? saving->options.extra_bytes : 0,
                                  &own->record, &saving->text);
}

/* Returns true if rank 0 sees this file. Another job that saves the same step may have replaced it. */
static bool sees_file(struct saving *saving, const struct checkpoint_name *name, const struct checkpoint_file_record *record)
{
    struct checkpoint_head head = {.hash = 0};
    uint64_t bytes;
    int fd;
    if (checkpoint_open_file(saving->folder, saving->mark.step, name->name, &fd, &bytes, &saving->text) != SHOAL_OK)
        return false;
    const enum shoal_status status = checkpoint_read_bytes(fd, name->name, &head, sizeof head, 0, &saving->text);
    close(fd);
    return status == SHOAL_OK && bytes == record->bytes && head.hash == record->head_hash;
}

/* Rank 0 must see the file that each rank has written. */
static enum shoal_status check_written(struct saving *saving, int rank)
{
    const struct written *written = &saving->written[rank];
    const struct checkpoint_name name = checkpoint_shard_name(written->shard, saving->mark.shards);
    if (!written->has_file)
        return SHOAL_OK;
    if (!sees_file(saving, &name, &written->record))
        return checkpoint_say(&saving->text, SHOAL_ERR_SYSTEM,
                              "%s, which rank %d has written, is not in %.200s here: all hosts must share the folder",
                              name.name, rank, saving->folder);
    saving->files[written->shard] = written->record;
    return SHOAL_OK;
}

/* The new checkpoint is complete, so an error here is only reported. */
static void remove_earlier(struct saving *saving)
{
    const enum shoal_status status =
        checkpoint_remove_earlier(saving->folder, saving->mark.step, saving->options.keep, &saving->text);
    if (status != SHOAL_OK)
        (void)shoal_report(saving->model->context, status, "fusion", saving->text.line);
}

static enum shoal_status complete_saving(struct saving *saving)
{
    const struct checkpoint_model *model = saving->model;
    const struct checkpoint_contents contents = {model->parameters,           model->steps, model->states, (int)model->rule,
                                                 saving->options.extra_bytes, saving->files};
    if (!is_first(saving))
        return SHOAL_OK;
    for (int r = 0; r < shoal_comm_size(model->comm); r++)
        FUSION_TRY(check_written(saving, r));
    FUSION_TRY(checkpoint_write_complete(saving->folder, &saving->mark, &contents, &saving->text));
    saving->is_complete = true;
    remove_earlier(saving);
    return SHOAL_OK;
}

static enum shoal_status write_all(struct saving *saving)
{
    struct written own;
    FUSION_TRY(saving_agree(saving, write_own(saving, &own)));
    FUSION_TRY(checkpoint_collect(saving->model, saving->options.timeout_ms, &own, saving->written, sizeof own));
    return saving_agree(saving, complete_saving(saving));
}

/* After an error, rank 0 removes what has been written, which on a full disk makes room. */
static void remove_failed(const struct saving *saving)
{
    struct checkpoint_text ignored;
    if (is_first(saving) && !saving->is_complete)
        (void)!checkpoint_remove_step(saving->folder, saving->mark.step, &ignored);
}

/* ---- All of it ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status run_saving(struct saving *saving, enum shoal_status status)
{
    if (status == SHOAL_OK)
        status = prepare_saving(saving);
    FUSION_TRY(saving_agree(saving, status));
    FUSION_TRY(agree_on_intent(saving));
    status = is_first(saving) ? checkpoint_make_step(saving->folder, saving->mark.step, &saving->text) : SHOAL_OK;
    FUSION_TRY(saving_agree(saving, status));
    status = write_all(saving);
    if (status != SHOAL_OK)
        remove_failed(saving);
    return status;
}

enum shoal_status checkpoint_save(const struct checkpoint_model *model, const char *folder,
                                  const struct shoal_save_options *options, enum shoal_status status)
{
    struct saving saving = {.model = model, .folder = folder, .options = SHOAL_SAVE_OPTIONS_INIT};
    shoal_struct_copy_in(&saving.options, options, sizeof saving.options);
    if (!saving.options.timeout_ms)
        saving.options.timeout_ms = TIMEOUT_MS;
    if (status != SHOAL_OK)
        (void)checkpoint_say(&saving.text, status, "no memory to describe the shards");
    else
        status = checkpoint_check_set(options, &saving.text);
    status = run_saving(&saving, status);
    free(saving.intents);
    free(saving.written);
    free(saving.files);
    return status;
}
