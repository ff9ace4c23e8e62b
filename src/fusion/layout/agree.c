#include "fusion/layout/agree.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "fusion/layout/lists.h"

#define TEXT_SHOWN 480 /* of a rank's text, shown after its number */

/* A rank's verdict on its arguments. */
struct opinion {
    int32_t status; /* of its own arguments */
    int32_t padding;
    uint64_t parameter_count;
    uint64_t parameters_hash;
    uint64_t options[FUSION_OPTIONS_MAX];
    char text[FUSION_TEXT_MAX]; /* the reason if status is not OK */
};

static void print_option(char *text, size_t text_bytes, const struct fusion_option *option, uint64_t word)
{
    double real;
    memcpy(&real, &word, sizeof real);
    if (option->kind == FUSION_REAL)
        snprintf(text, text_bytes, "%.9g", real);
    else
        snprintf(text, text_bytes, option->kind == FUSION_HASH ? "%016" PRIx64 : "%" PRIu64, word);
}

static void print_difference(const struct fusion_option *option, size_t ranks, const double *all, char *text, size_t text_bytes)
{
    for (size_t r = 1; r < ranks; r++) {
        const double *there = all + r * option->count;
        for (size_t i = 0; i < option->count; i++) {
            if (there[i] == all[i])
                continue;
            snprintf(text, text_bytes, "options differ: %s %zu is %.9g on rank 0, %.9g on rank %zu", option->name, i, all[i],
                     there[i], r);
            return;
        }
    }
}

/* A collective call, because all ranks know that the lists differ. */
static enum shoal_status compare_lists(const struct fusion_agreement *agreement, const struct shoal_options *options,
                                       const struct fusion_option *option, char *text, size_t text_bytes)
{
    const size_t size = (size_t)shoal_comm_size(agreement->comm), count = option->count;
    double *all = calloc((size + 1) * count + 1, sizeof *all);
    enum shoal_status status = fusion_ranks_have_memory(agreement->comm, options, all, text, text_bytes);
    if (status == SHOAL_OK && all) {
        double *own = all + size * count;
        for (size_t i = 0; i < count; i++)
            own[i] = option->list ? option->list[i] : 1;
        status = shoal_allgather(agreement->comm, own, all, count, SHOAL_FLOAT64, options);
        if (status == SHOAL_OK)
            print_difference(option, size, all, text, text_bytes);
    }
    free(all);
    return status == SHOAL_OK ? SHOAL_ERR_MISMATCH : status;
}

static enum shoal_status compare_options(const struct fusion_agreement *agreement, const struct shoal_options *options,
                                         const struct opinion *all, char *text, size_t text_bytes)
{
    char first[32], other[32];
    for (int r = 1; r < shoal_comm_size(agreement->comm); r++) {
        for (size_t i = 0; i < agreement->option_count; i++) {
            const struct fusion_option *option = &agreement->options[i];
            if (all[r].options[i] == all[0].options[i])
                continue;
            if (option->kind == FUSION_LIST)
                return compare_lists(agreement, options, option, text, text_bytes);
            print_option(first, sizeof first, option, all[0].options[i]);
            print_option(other, sizeof other, option, all[r].options[i]);
            snprintf(text, text_bytes, "options differ: %s is %s on rank 0, %s on rank %d", option->name, first, other, r);
            return SHOAL_ERR_MISMATCH;
        }
    }
    return SHOAL_OK;
}

static enum shoal_status judge(const struct fusion_agreement *agreement, const struct shoal_options *options,
                               const struct opinion *all, char *text, size_t text_bytes)
{
    const int size = shoal_comm_size(agreement->comm);
    for (int r = 0; r < size; r++) {
        if (all[r].status == SHOAL_OK)
            continue;
        snprintf(text, text_bytes, "rank %d: %.*s", r, TEXT_SHOWN, all[r].text);
        return (enum shoal_status)all[r].status;
    }
    for (int r = 1; r < size; r++) {
        if (all[r].parameters_hash == all[0].parameters_hash)
            continue;
        const enum shoal_status status =
            fusion_lists_compare(agreement->comm, options, agreement->parameters, all[0].parameter_count, text, text_bytes);
        return status == SHOAL_OK ? SHOAL_ERR_MISMATCH : status;
    }
    return compare_options(agreement, options, all, text, text_bytes);
}

static void fill_opinion(const struct fusion_agreement *agreement, enum shoal_status status, const char *text,
                         struct opinion *own)
{
    SHOAL_ASSERT(agreement->option_count <= FUSION_OPTIONS_MAX);
    own->status = (int32_t)status;
    own->parameter_count = agreement->parameters->count;
    own->parameters_hash = fusion_parameters_hash(agreement->parameters);
    for (size_t i = 0; i < agreement->option_count; i++)
        own->options[i] = agreement->options[i].word;
    snprintf(own->text, sizeof own->text, "%s", text);
}

enum shoal_status fusion_agree(const struct fusion_agreement *agreement, enum shoal_status status, const char *text)
{
    const struct shoal_options options = fusion_deadline(agreement->timeout_ms);
    const size_t size = (size_t)shoal_comm_size(agreement->comm);
    struct opinion *all = calloc(size + 1, sizeof *all);
    char verdict[FUSION_TEXT_MAX] = "", line[FUSION_TEXT_MAX + 128];
    enum shoal_status judged = fusion_ranks_have_memory(agreement->comm, &options, all, verdict, sizeof verdict);
    if (judged == SHOAL_OK && all) {
        fill_opinion(agreement, status, text, &all[size]);
        judged = shoal_allgather(agreement->comm, &all[size], all, sizeof *all, SHOAL_UINT8, &options);
        if (judged == SHOAL_OK)
            judged = judge(agreement, &options, all, verdict, sizeof verdict);
    }
    free(all);
    if (judged == SHOAL_OK || !*verdict)
        return judged; /* the library has logged why an exchange failed */
    snprintf(line, sizeof line, "%s: %s: %s", agreement->name, agreement->call, verdict);
    return shoal_report(agreement->context, judged, "fusion", line);
}

enum shoal_status fusion_decline(struct shoal_context *context, struct shoal_comm *comm, const char *call)
{
    struct shoal_comm *none;
    char line[128];
    const enum shoal_status status = shoal_comm_split(comm, -1, 0, NULL, &none);
    snprintf(line, sizeof line, "%s: no memory%s", call, status == SHOAL_OK ? "" : ", nor could other ranks be told");
    return shoal_report(context, SHOAL_ERR_MEMORY, "fusion", line);
}

enum shoal_status fusion_all_split(struct shoal_context *context, const struct shoal_comm *comm, const struct shoal_comm *split,
                                   const char *call)
{
    const int there = shoal_comm_size(split), wanted = shoal_comm_size(comm);
    char line[128];
    if (there == wanted)
        return SHOAL_OK;
    snprintf(line, sizeof line, "%s: %d of %d ranks had no memory to begin with", call, wanted - there, wanted);
    return shoal_report(context, SHOAL_ERR_MEMORY, "fusion", line);
}
