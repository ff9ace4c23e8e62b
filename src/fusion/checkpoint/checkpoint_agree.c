/* Exchanges between the ranks that save or load a checkpoint. */
#include <stdio.h>
#include <string.h>

#include "fusion/checkpoint/checkpoint_model.h"
#include "fusion/layout/lists.h"

enum shoal_status checkpoint_agree(const struct checkpoint_model *model, uint32_t timeout_ms, enum shoal_status status,
                                   const struct checkpoint_text *text)
{
    const struct shoal_options options = fusion_deadline(timeout_ms);
    struct checkpoint_text all;
    char line[FUSION_TEXT_MAX + 128];
    int rank;
    const enum shoal_status agreed = fusion_ranks_ready(model->comm, &options, status, &rank);
    if (agreed == SHOAL_OK || rank < 0)
        return agreed; /* the library has logged why an exchange failed */
    FUSION_TRY(shoal_broadcast(model->comm, text, &all, sizeof all, SHOAL_UINT8, rank, &options));
    all.line[sizeof all.line - 1] = 0;
    snprintf(line, sizeof line, "%s: %s: rank %d: %s", model->name, model->call, rank, all.line);
    return shoal_report(model->context, agreed, "fusion", line);
}

enum shoal_status checkpoint_refuse(const struct checkpoint_model *model, enum shoal_status status,
                                    const struct checkpoint_text *text)
{
    char line[FUSION_TEXT_MAX + 128];
    if (status == SHOAL_OK)
        return SHOAL_OK;
    snprintf(line, sizeof line, "%s: %s: %s", model->name, model->call, text->line);
    return shoal_report(model->context, status, "fusion", line);
}

enum shoal_status checkpoint_collect(const struct checkpoint_model *model, uint32_t timeout_ms, const void *own, void *all_out,
                                     size_t bytes)
{
    const struct shoal_options options = fusion_deadline(timeout_ms);
    return shoal_allgather(model->comm, own, all_out, bytes, SHOAL_UINT8, &options);
}
