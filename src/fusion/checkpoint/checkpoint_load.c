/* Loads a checkpoint: each rank its shard, into temporary memory first. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/checkpoint/checkpoint_model.h"

#define TIMEOUT_MS 600000

/* What a rank sees in the folder. */
struct sight {
    uint64_t step, save;
};

/* A load under way on this rank. */
struct loading {
    const struct checkpoint_model *model;
    const char *folder;
    struct shoal_load_options options;
    struct shoal_checkpoint *checkpoint;
    struct sight *sights; /* [ranks] */
    uint32_t *numbers;    /* [parameters]: in the checkpoint */
    bool *is_taken;       /* [parameters in the checkpoint] */
    char *values;         /* of all pieces */
    size_t value_bytes;
    struct checkpoint_text text; /* what this rank has found wrong */
};

static enum shoal_status loading_agree(struct loading *loading, enum shoal_status status)
{
    return checkpoint_agree(loading->model, loading->options.timeout_ms, status, &loading->text);
}

/* ---- Which checkpoint ---------------------------------------------------------------------------------------------------- */

static enum shoal_status prepare_loading(struct loading *loading)
{
    const size_t ranks = (size_t)shoal_comm_size(loading->model->comm);
    struct checkpoint_path path;
    loading->sights = calloc(ranks, sizeof *loading->sights);
    loading->numbers = calloc(loading->model->parameters->count + 1, sizeof *loading->numbers);
    loading->is_taken = calloc(loading->model->parameters->count + 1, sizeof *loading->is_taken);
    if (!loading->sights || !loading->numbers || !loading->is_taken)
        return checkpoint_say(&loading->text, SHOAL_ERR_MEMORY, "no memory for the lists of %zu ranks", ranks);
    return checkpoint_step_path(loading->folder, 0, &path, &loading->text);
}

/* The wanted step of each rank must be the same. Rank 0 then finds the latest one for all. */
static enum shoal_status agree_on_step(struct loading *loading)
{
    const struct checkpoint_model *model = loading->model;
    struct sight own = {.step = loading->options.step};
    enum shoal_status status = SHOAL_OK;
    FUSION_TRY(checkpoint_collect(model, loading->options.timeout_ms, &own, loading->sights, sizeof own));
    for (int r = 1; r < shoal_comm_size(model->comm) && status == SHOAL_OK; r++)
        if (loading->sights[r].step != loading->sights[0].step)
            status = checkpoint_say(&loading->text, SHOAL_ERR_MISMATCH,
                                    "rank %d loads another step than rank 0: load the same on all ranks", r);
    FUSION_TRY(checkpoint_refuse(model, status, &loading->text));
    if (shoal_comm_rank(model->comm) == 0)
        status = checkpoint_find_step(loading->folder, &own.step, &loading->text);
    FUSION_TRY(loading_agree(loading, status));
    FUSION_TRY(checkpoint_collect(model, loading->options.timeout_ms, &own, loading->sights, sizeof own));
    loading->options.step = loading->sights[0].step;
    return SHOAL_OK;
}

static enum shoal_status compare_sights(struct loading *loading)
{
    const struct sight own = {loading->options.step, checkpoint_summary_of(loading->checkpoint)->save};
    FUSION_TRY(checkpoint_collect(loading->model, loading->options.timeout_ms, &own, loading->sights, sizeof own));
    enum shoal_status status = SHOAL_OK;
    for (int r = 1; r < shoal_comm_size(loading->model->comm) && status == SHOAL_OK; r++)
        if (loading->sights[r].save != loading->sights[0].save)
            status = checkpoint_say(&loading->text, SHOAL_ERR_MISMATCH,
                                    "rank %d sees another checkpoint of step %" PRIu64
                                    " than rank 0: all hosts must share the folder",
                                    r, own.step);
    return checkpoint_refuse(loading->model, status, &loading->text);
}

/* ---- Is it of this model? ------------------------------------------------------------------------------------------------ */

/* A name of a checkpoint's parameter, for a search. */
struct known_name {
    const char *name;
    uint32_t number;
};

static int compare_names(const void *one, const void *other)
{
    return strcmp(((const struct known_name *)one)->name, ((const struct known_name *)other)->name);
}

static enum shoal_status compare_parameter(struct loading *loading, size_t i, const struct checkpoint_parameter_record *record)
{
    const struct shoal_parameter *own = &loading->model->parameters->items[i];
    char name[FUSION_TEXT_MAX];
    fusion_parameter_text(loading->model->parameters, i, name, sizeof name);
    if (record->count != own->count || record->type != (uint32_t)own->type)
        return checkpoint_say(
            &loading->text, SHOAL_ERR_ARGUMENT,
            "the checkpoint is of another model: %.160s has %zu elements of %s, in the checkpoint %" PRIu64 " of %s", name,
            own->count, fusion_type_name(own->type), record->count, fusion_type_name((enum shoal_type)record->type));
    if (checkpoint_summary_of(loading->checkpoint)->rule == CHECKPOINT_NO_RULE || record->states == loading->model->states[i])
        return SHOAL_OK;
    return checkpoint_say(&loading->text, SHOAL_ERR_ARGUMENT,
                          "the checkpoint is of another optimizer: %.160s has %" PRIu32 " states, in the checkpoint %" PRIu32,
                          name, loading->model->states[i], record->states);
}

/* Finds the parameter's number in the checkpoint: the same number if the name there is equal, else by a search. */
static const struct checkpoint_parameter_record *find_record(const struct loading *loading, size_t i,
                                                             const struct known_name *names, size_t count)
{
    const struct checkpoint_parameter_record *records = checkpoint_records(loading->checkpoint);
    const struct known_name wanted = {loading->model->parameters->items[i].name, 0};
    if (strcmp(records[i].name, wanted.name) == 0)
        return &records[i];
    const struct known_name *known = *wanted.name ? bsearch(&wanted, names, count, sizeof *names, compare_names) : NULL;
    return known ? &records[known->number] : NULL;
}

static enum shoal_status compare_parameters(struct loading *loading, struct known_name *names)
{
    const struct fusion_parameters *own = loading->model->parameters;
    const struct checkpoint_parameter_record *records = checkpoint_records(loading->checkpoint);
    char name[FUSION_TEXT_MAX];
    for (size_t i = 0; i < own->count; i++)
        names[i] = (struct known_name){records[i].name, (uint32_t)i};
    qsort(names, own->count, sizeof *names, compare_names);
    for (size_t i = 0; i < own->count; i++) {
        const struct checkpoint_parameter_record *record = find_record(loading, i, names, own->count);
        if (!record || loading->is_taken[record - records])
            return checkpoint_say(&loading->text, SHOAL_ERR_ARGUMENT,
                                  "the checkpoint is of another model: it does not have %.200s",
                                  fusion_parameter_text(own, i, name, sizeof name));
        FUSION_TRY(compare_parameter(loading, i, record));
        loading->numbers[i] = (uint32_t)(record - records);
        loading->is_taken[record - records] = true;
    }
    return SHOAL_OK;
}

static const char *rule_name(int rule)
{
    static const char *const names[] = {[SHOAL_SGD] = "SGD",         [SHOAL_ADAM] = "ADAM", [SHOAL_ADAMW] = "ADAMW",
                                        [SHOAL_ADAGRAD] = "ADAGRAD", [SHOAL_LION] = "LION", [SHOAL_LAMB] = "LAMB"};
    return names[rule];
}

/* Returns a number that is equal for rules whose states have the same meaning. */
static int kind_of_states(int rule)
{
    return rule == SHOAL_ADAMW || rule == SHOAL_LAMB ? SHOAL_ADAM : rule;
}

static enum shoal_status compare_model(struct loading *loading)
{
    const struct checkpoint_summary *summary = checkpoint_summary_of(loading->checkpoint);
    const size_t count = loading->model->parameters->count;
    if (summary->parameters != count)
        return checkpoint_say(&loading->text, SHOAL_ERR_ARGUMENT,
                              "the checkpoint is of another model: it has %" PRIu64 " parameters, this one %zu",
                              summary->parameters, count);
    if (summary->rule != CHECKPOINT_NO_RULE && kind_of_states(summary->rule) != kind_of_states((int)loading->model->rule))
        return checkpoint_say(&loading->text, SHOAL_ERR_ARGUMENT,
                              "the checkpoint is of another optimizer: its rule is SHOAL_%s, this one's SHOAL_%s",
                              rule_name(summary->rule), rule_name((int)loading->model->rule));
    struct known_name *names = calloc(count + 1, sizeof *names);
    if (!names)
        return checkpoint_say(&loading->text, SHOAL_ERR_MEMORY, "no memory for %zu names", count);
    const enum shoal_status status = compare_parameters(loading, names);
    free(names);
    return status;
}

static enum shoal_status open_for_model(struct loading *loading)
{
    const struct shoal_load_options *options = &loading->options;
    FUSION_TRY(checkpoint_open(loading->folder, options->step, &loading->checkpoint, &loading->text));
    const uint64_t extra = checkpoint_summary_of(loading->checkpoint)->extra_bytes;
    if (options->extra && options->extra_room < extra)
        return checkpoint_say(&loading->text, SHOAL_ERR_ARGUMENT, "extra has %" PRIu64 " bytes, there is room for %zu", extra,
                              options->extra_room);
    return compare_model(loading);
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static size_t element_bytes(const struct loading *loading, const struct checkpoint_piece *piece)
{
    return loading->model->parameters->items[piece->parameter].type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float);
}

static void fill_initial(const struct loading *loading, const struct checkpoint_piece *piece, char *to)
{
    const bool is_wide = element_bytes(loading, piece) == sizeof(double);
    for (size_t i = 0; i < piece->count; i++) {
        if (is_wide)
            ((double *)(void *)to)[i] = piece->initial;
        else
            ((float *)(void *)to)[i] = (float)piece->initial;
    }
}

/* Reads all pieces, one after the other, each at a multiple of the alignment. */
static enum shoal_status read_pieces(struct loading *loading)
{
    const struct checkpoint_model *model = loading->model;
    const bool has_states = checkpoint_summary_of(loading->checkpoint)->rule != CHECKPOINT_NO_RULE;
    char *to = loading->values;
    for (size_t i = 0; i < model->piece_count; i++) {
        const struct checkpoint_piece *piece = &model->pieces[i];
        const size_t bytes = piece->count * element_bytes(loading, piece);
        if (has_states || piece->state == SHOAL_STATE_MASTER)
            FUSION_TRY(checkpoint_read(loading->checkpoint, loading->numbers[piece->parameter], piece->state, piece->begin,
                                       piece->count, to, &loading->text));
        else
            fill_initial(loading, piece, to);
        to += fusion_round_up(bytes, CHECKPOINT_ALIGNMENT);
    }
    return SHOAL_OK;
}

static enum shoal_status read_values(struct loading *loading)
{
    const struct checkpoint_model *model = loading->model;
    const uint64_t extra = checkpoint_summary_of(loading->checkpoint)->extra_bytes;
    size_t room = 0;
    for (size_t i = 0; i < model->piece_count; i++) {
        const size_t bytes = model->pieces[i].count * element_bytes(loading, &model->pieces[i]);
        room += fusion_round_up(bytes, CHECKPOINT_ALIGNMENT);
        loading->value_bytes += bytes;
    }
    loading->values = malloc(room + 1);
    if (!loading->values)
        return checkpoint_say(&loading->text, SHOAL_ERR_MEMORY, "no memory for the %zu bytes of this rank's shard", room);
    if (loading->options.extra)
        FUSION_TRY(checkpoint_read(loading->checkpoint, CHECKPOINT_EXTRA, 0, 0, (size_t)extra, loading->options.extra,
                                   &loading->text));
    return read_pieces(loading);
}

static void put_in_place(const struct loading *loading)
{
    const struct checkpoint_model *model = loading->model;
    const struct checkpoint_parameter_record *records = checkpoint_records(loading->checkpoint);
    const char *from = loading->values;
    for (size_t i = 0; i < model->piece_count; i++) {
        const size_t bytes = model->pieces[i].count * element_bytes(loading, &model->pieces[i]);
        memcpy(model->pieces[i].values, from, bytes);
        from += fusion_round_up(bytes, CHECKPOINT_ALIGNMENT);
    }
    const bool has_states = checkpoint_summary_of(loading->checkpoint)->rule != CHECKPOINT_NO_RULE;
    for (size_t i = 0; i < model->parameters->count; i++)
        model->steps[i] = has_states ? records[loading->numbers[i]].steps : 0;
}

/* ---- All of it ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status run_loading(struct loading *loading, enum shoal_status status)
{
    if (status == SHOAL_OK)
        status = prepare_loading(loading);
    FUSION_TRY(loading_agree(loading, status));
    FUSION_TRY(agree_on_step(loading));
    FUSION_TRY(loading_agree(loading, open_for_model(loading)));
    FUSION_TRY(compare_sights(loading));
    FUSION_TRY(loading_agree(loading, read_values(loading)));
    put_in_place(loading);
    return SHOAL_OK;
}

static void put_result(const struct loading *loading, struct shoal_load_result *result_out)
{
    struct shoal_load_result result = SHOAL_LOAD_RESULT_INIT;
    result.step = loading->options.step;
    result.extra_bytes = (size_t)checkpoint_summary_of(loading->checkpoint)->extra_bytes;
    result.read_bytes = loading->value_bytes;
    if (shoal_struct_bytes(result_out))
        shoal_struct_copy_out(result_out, &result, sizeof result);
}

enum shoal_status checkpoint_load(const struct checkpoint_model *model, const char *folder,
                                  const struct shoal_load_options *options, enum shoal_status status,
                                  struct shoal_load_result *result_out)
{
    struct loading loading = {.model = model, .folder = folder, .options = SHOAL_LOAD_OPTIONS_INIT};
    shoal_struct_copy_in(&loading.options, options, sizeof loading.options);
    if (!loading.options.timeout_ms)
        loading.options.timeout_ms = TIMEOUT_MS;
    if (status != SHOAL_OK)
        (void)checkpoint_say(&loading.text, status, "no memory to describe the shards");
    else if (options && !shoal_struct_bytes(options))
        status =
            checkpoint_say(&loading.text, SHOAL_ERR_ARGUMENT, "options->struct_bytes is not set: use SHOAL_LOAD_OPTIONS_INIT");
    status = run_loading(&loading, status);
    if (status == SHOAL_OK)
        put_result(&loading, result_out);
    shoal_checkpoint_close(loading.checkpoint);
    free(loading.sights);
    free(loading.numbers);
    free(loading.is_taken);
    free(loading.values);
    return status;
}
