/* Errors of quantizing, in a checkpoint: a header that identifies rank and layout, then the errors of each buffer, as
 * compress.c returns them. Numbers are in the machine's byte order, which the header records. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "fusion/reducer/comms.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/compute.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_failure.h"

#define EXPORT "shoal_reducer_export_residuals"
#define IMPORT "shoal_reducer_import_residuals"
#define VERSION 1
#define BYTE_ORDER_MARK UINT32_C(0x01020304)

static const char magic[8] = {'s', 'h', 'o', 'a', 'l', 'r', 'e', 's'};

struct header {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
    uint64_t layout; /* hash */
    int32_t rank, size;
    int32_t hosts, local_size;
    int32_t host, local_rank;
    uint64_t body_bytes;
    uint64_t body_hash;
};

_Static_assert(sizeof(struct header) == 64, "a saved header has no padding, and stays as it is");

static size_t body_bytes(const struct shoal_reducer *reducer)
{
    size_t bytes = 0;
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const struct fusion_residuals each = fusion_compressed_residuals(reducer, b);
        bytes += (each.sent_count + each.sum_count) * sizeof(float);
    }
    return bytes;
}

size_t shoal_reducer_residual_bytes(const struct shoal_reducer *reducer)
{
    const size_t bytes = reducer ? body_bytes(reducer) : 0;
    return bytes ? sizeof(struct header) + bytes : 0;
}

/* A step reads and writes residuals; on a device it may still fail after it was finished. */
static enum shoal_status check_between(struct shoal_reducer *reducer, const char *call)
{
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (fusion_marks_are_open(reducer))
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: inside a step: call it after shoal_reducer_finish", call);
    return shoal_reducer_wait(reducer, SHOAL_FOREVER);
}

/* Waits so that the caller may free its memory. Also waits if one copy was refused, because others may be under way. */
static enum shoal_status residuals_settle(const struct shoal_reducer *reducer, enum shoal_status status)
{
    const enum shoal_status settled = fusion_settle(reducer);
    return status == SHOAL_OK ? settled : status;
}

/* ---- Export -------------------------------------------------------------------------------------------------------------- */

static struct header describe(const struct shoal_reducer *reducer)
{
    struct header header = {.version = VERSION,
                            .byte_order = BYTE_ORDER_MARK,
                            .layout = reducer->layout->hash,
                            .rank = reducer->rank,
                            .size = reducer->size,
                            .hosts = reducer->hosts,
                            .local_size = reducer->local_size,
                            .body_bytes = body_bytes(reducer)};
    memcpy(header.magic, magic, sizeof magic);
    fusion_compressor_position(reducer, &header.host, &header.local_rank);
    return header;
}

static enum shoal_status save_all(const struct shoal_reducer *reducer, char *at)
{
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const struct fusion_residuals each = fusion_compressed_residuals(reducer, b);
        if (!each.sent)
            continue;
        FUSION_TRY(fusion_save(reducer, b, at, each.sent, each.sent_count));
        at += each.sent_count * sizeof *each.sent;
        FUSION_TRY(fusion_save(reducer, b, at, each.sum, each.sum_count));
        at += each.sum_count * sizeof *each.sum;
    }
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_export_residuals(struct shoal_reducer *reducer, void *state, size_t bytes)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    const size_t needed = shoal_reducer_residual_bytes(reducer);
    FUSION_TRY(check_between(reducer, EXPORT));
    if (bytes < needed || (!state && needed))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, EXPORT ": the residuals have %zu bytes, there is room for %zu",
                             needed, state ? bytes : 0);
    if (!needed)
        return SHOAL_OK;
    struct header header = describe(reducer);
    char *body = (char *)state + sizeof header;
    FUSION_TRY(residuals_settle(reducer, save_all(reducer, body)));
    header.body_hash = shoal_bytes_hash(body, header.body_bytes);
    memcpy(state, &header, sizeof header);
    return SHOAL_OK;
}

/* ---- Import -------------------------------------------------------------------------------------------------------------- */

/* Returns false if the state belongs to another rank or world; text then names that rank or world. */
static bool is_same_place(const struct header *there, const struct header *here, char *text, size_t text_bytes)
{
    if (there->size != here->size || there->hosts != here->hosts || there->local_size != here->local_size)
        snprintf(text, text_bytes,
                 "the residuals are of a world of %" PRId32 " ranks on %" PRId32 " hosts, this one has %" PRId32
                 " ranks on %" PRId32 ": leave them out, they then begin at zero",
                 there->size, there->hosts, here->size, here->hosts);
    else if (there->rank != here->rank)
        snprintf(text, text_bytes, "the residuals are those of rank %" PRId32 ": each rank takes its own", there->rank);
    else if (there->host != here->host || there->local_rank != here->local_rank)
        snprintf(text, text_bytes,
                 "the residuals are of rank %" PRId32 " as rank %" PRId32 " of host %" PRId32 ", it now is rank %" PRId32
                 " of host %" PRId32 ": start ranks on hosts in the same order",
                 there->rank, there->local_rank, there->host, here->local_rank, here->host);
    else
        return true;
    return false;
}

/* Leaves text empty if the residuals are this reducer's; otherwise writes the reason. */
static void find_wrong(const struct shoal_reducer *reducer, const char *state, size_t bytes, char *text, size_t text_bytes)
{
    const struct header here = describe(reducer);
    struct header there;
    if (!here.body_bytes) {
        if (bytes)
            snprintf(text, text_bytes,
                     "there are residuals, but this reducer keeps none: it does not compress with int8 between hosts, or "
                     "forgets_error is set");
        return;
    }
    if (!state || bytes < sizeof there) {
        snprintf(text, text_bytes, "the residuals are cut short, or none: %zu bytes", state ? bytes : 0);
        return;
    }
    memcpy(&there, state, sizeof there);
    if (memcmp(there.magic, magic, sizeof magic) != 0)
        snprintf(text, text_bytes, "these are no residuals of a reducer");
    else if (there.version != VERSION || there.byte_order != BYTE_ORDER_MARK)
        snprintf(text, text_bytes, "the residuals are of another version, or of a machine with another byte order");
    else if (!is_same_place(&there, &here, text, text_bytes))
        return;
    else if (there.layout != here.layout)
        snprintf(text, text_bytes,
                 "the residuals are of another layout: theirs has hash %016" PRIx64 ", this reducer's %016" PRIx64
                 ": make it with the layout that was saved beside them",
                 there.layout, here.layout);
    else if (there.body_bytes != here.body_bytes || bytes != sizeof there + there.body_bytes)
        snprintf(text, text_bytes, "the residuals are cut short, or longer than they say");
    else if (there.body_hash != shoal_bytes_hash(state + sizeof there, there.body_bytes))
        snprintf(text, text_bytes, "the residuals are damaged");
}

static enum shoal_status restore_all(struct shoal_reducer *reducer, const char *at)
{
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const struct fusion_residuals each = fusion_compressed_residuals(reducer, b);
        if (!each.sent)
            continue;
        FUSION_TRY(fusion_restore(reducer, b, each.sent, at, each.sent_count));
        at += each.sent_count * sizeof *each.sent;
        FUSION_TRY(fusion_restore(reducer, b, each.sum, at, each.sum_count));
        at += each.sum_count * sizeof *each.sum;
    }
    return SHOAL_OK;
}

/* After a failure, only some of the residuals come from the given state. */
static enum shoal_status read_residuals(struct shoal_reducer *reducer, const char *at)
{
    char why[FUSION_TEXT_MAX];
    const enum shoal_status status = residuals_settle(reducer, restore_all(reducer, at));
    if (status == SHOAL_OK)
        return SHOAL_OK;
    fusion_tell_why(reducer, status, why, sizeof why);
    return fusion_fail(reducer, status, -1, IMPORT ": %.400s", why);
}

enum shoal_status shoal_reducer_import_residuals(struct shoal_reducer *reducer, const void *state, size_t bytes)
{
    char text[FUSION_TEXT_MAX] = "";
    int rank;
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    FUSION_TRY(check_between(reducer, IMPORT));
    find_wrong(reducer, state, bytes, text, sizeof text);
    const enum shoal_status status = fusion_all_ready(reducer, *text ? SHOAL_ERR_ARGUMENT : SHOAL_OK, &rank);
    if (*text)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, IMPORT ": %s", text);
    if (rank >= 0)
        return fusion_refuse(reducer, status, IMPORT ": rank %d was given none that it can take; its message says why", rank);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -2);
        return fusion_failure_status(reducer);
    }
    return bytes ? read_residuals(reducer, (const char *)state + sizeof(struct header)) : SHOAL_OK;
}
