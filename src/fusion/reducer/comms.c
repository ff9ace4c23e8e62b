#include "fusion/reducer/comms.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/layout/lists.h"

enum { COMMS_MAX = 8 }; /* more than any reducer adds */

struct added {
    struct shoal_comm *comm;
    int *members; /* for each of its ranks, the rank in the reducer */
};

struct fusion_comms {
    struct added all[COMMS_MAX];
    int count;
    int members[]; /* [COMMS_MAX * ranks of the reducer] */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_comms_create(struct shoal_reducer *reducer)
{
    const size_t size = (size_t)reducer->size;
    struct fusion_comms *comms = reducer->comms = calloc(1, sizeof *comms + COMMS_MAX * size * sizeof *comms->members);
    if (!comms)
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < COMMS_MAX; i++)
        comms->all[i].members = comms->members + i * size;
    return SHOAL_OK;
}

void fusion_comms_destroy(struct shoal_reducer *reducer)
{
    free(reducer->comms);
}

static enum shoal_status comms_split(const struct shoal_reducer *reducer, struct shoal_comm *comm, const char *suffix,
                                     int color, int key, struct shoal_comm **comm_out)
{
    char name[40];
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    snprintf(name, sizeof name, "%s%s", reducer->name, suffix);
    options.name = name;
    options.timeout_ms = options.create_timeout_ms = reducer->options.timeout_ms;
    return shoal_comm_split(comm, color, key, &options, comm_out);
}

enum shoal_status fusion_comms_open(struct shoal_reducer *reducer, struct shoal_comm *callers)
{
    SHOAL_ASSERT(!reducer->comm && reducer->comms); /* the room for added ones is there before */
    return comms_split(reducer, callers, "", 0, reducer->rank, &reducer->comm);
}

enum shoal_status fusion_comms_add(struct shoal_reducer *reducer, const char *suffix, int color, int key,
                                   struct shoal_comm **comm_out)
{
    struct fusion_comms *comms = reducer->comms;
    const struct shoal_options options = fusion_options(reducer);
    const int32_t own = reducer->rank;
    SHOAL_ASSERT(comms->count < COMMS_MAX);
    struct added *added = &comms->all[comms->count];
    FUSION_TRY(comms_split(reducer, reducer->comm, suffix, color, key, &added->comm));
    comms->count++;
    *comm_out = added->comm;
    return shoal_allgather(added->comm, &own, added->members, 1, SHOAL_INT32, &options);
}

void fusion_comms_close(struct shoal_reducer *reducer)
{
    struct fusion_comms *comms = reducer->comms;
    while (comms && comms->count > 0)
        shoal_comm_free(comms->all[--comms->count].comm);
}

enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out)
{
    SHOAL_ASSERT(own != SHOAL_PENDING);
    const struct shoal_options options = fusion_options(reducer);
    return fusion_ranks_ready(reducer->comm, &options, own, rank_out);
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

static void translate_rank(struct shoal_failure *failure, int rank)
{
    SHOAL_ASSERT(rank >= 0 && failure->rank >= 0);
    char text[sizeof failure->text];
    if (failure->rank == rank)
        return;
    memcpy(text, failure->text, sizeof text);
    snprintf(failure->text, sizeof failure->text, "rank %d, there rank %d: %.*s", rank, failure->rank,
             (int)sizeof failure->text - 64, text);
    failure->rank = rank;
}

bool fusion_comms_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure_out)
{
    const struct fusion_comms *comms = reducer->comms;
    for (int i = 0; i < comms->count; i++) {
        const struct added *added = &comms->all[i];
        if (shoal_last_failure(reducer->context, added->comm, failure_out) != SHOAL_OK)
            continue;
        if (!failure_out->is_given && failure_out->rank >= 0 && failure_out->rank < shoal_comm_size(added->comm))
            translate_rank(failure_out, added->members[failure_out->rank]);
        return true;
    }
    return false;
}

void fusion_comms_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    for (int i = 0; i < reducer->comms->count; i++)
        shoal_comm_fail(reducer->comms->all[i].comm, cause);
}

/* ---- Bytes --------------------------------------------------------------------------------------------------------------- */

static uint64_t wire_bytes_of(struct shoal_comm *comm)
{
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    return shoal_comm_traffic(comm, &traffic) == SHOAL_OK ? traffic.sent_bytes : 0;
}

uint64_t fusion_comms_wire_bytes(const struct shoal_reducer *reducer)
{
    uint64_t bytes = wire_bytes_of(reducer->comm);
    for (int i = 0; i < reducer->comms->count; i++)
        bytes += wire_bytes_of(reducer->comms->all[i].comm);
    return bytes;
}

/* members is NULL if the communicator has the reducer's ranks, in their order. */
static enum shoal_status add_sent_to(struct shoal_comm *comm, const int *members, uint64_t *bytes)
{
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    const size_t size = (size_t)shoal_comm_size(comm);
    traffic.sent_to = calloc(size, sizeof *traffic.sent_to);
    if (!traffic.sent_to)
        return SHOAL_ERR_MEMORY;
    const enum shoal_status status = shoal_comm_traffic(comm, &traffic);
    for (size_t r = 0; r < size; r++)
        bytes[members ? (size_t)members[r] : r] += traffic.sent_to[r];
    free(traffic.sent_to);
    return status;
}

enum shoal_status fusion_comms_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes)
{
    FUSION_TRY(add_sent_to(reducer->comm, NULL, bytes));
    for (int i = 0; i < reducer->comms->count; i++)
        FUSION_TRY(add_sent_to(reducer->comms->all[i].comm, reducer->comms->all[i].members, bytes));
    return SHOAL_OK;
}
