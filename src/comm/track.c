/* Tracks: flight recorders for the work of libraries built on Shoal. See shoal_track_create in shoal.h. A track's recorder is
 * linked to that of its communicator, and the two are written together. A track needs its own lock for two reasons: the lock of
 * the context may be held for as long as a message is copied, and a failure may write the recorder on another thread. */
#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "comm/context.h"
#include "engine/engine.h"
#include "engine/progress.h"
#include "observe/recorder.h"

struct shoal_track {
    struct shoal_recorder recorder;
    pthread_mutex_t lock;
    struct shoal_record *span; /* under way; NULL: none */
    struct shoal_track *next;  /* the one made before it */
};

static const char no_algorithm[] = "";

/* Like the communicator's number, the same on all its ranks and unique: the n-th track adds n times the golden ratio, by
 * which neighbors are far apart (Knuth, volume 3, section 6.4). */
static uint64_t number_of_next(const struct shoal_comm *comm)
{
    uint64_t number = comm->number + UINT64_C(0x9e3779b97f4a7c15);
    for (const struct shoal_track *track = comm->tracks; track; track = track->next)
        number += UINT64_C(0x9e3779b97f4a7c15);
    return number;
}

/* Needs the context's lock. */
static void add_track(struct shoal_comm *comm, struct shoal_track *track, const char *name)
{
    struct shoal_recorder *const first = shoal_engine_recorder(comm->engine);
    const struct shoal_recorder_identity identity = {number_of_next(comm), comm->size, comm->context->log.rank};
    track->recorder.flight->is_track = 1;
    shoal_recorder_name(&track->recorder, no_algorithm);
    shoal_recorder_identify(&track->recorder, &identity, comm->job, name, comm->rank,
                            shoal_progress_anchor(comm->context->progress)->ns_per_tick);
    track->recorder.track = first->track;
    first->track = &track->recorder;
    track->next = comm->tracks;
    comm->tracks = track;
}

enum shoal_status shoal_track_create(struct shoal_comm *comm, const char *name, struct shoal_track **track_out)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_track_create"));
    struct shoal_context *const context = comm->context;
    if (!name || !track_out)
        return shoal_log_fail(&context->log, SHOAL_ERR_ARGUMENT, "comm", "shoal_track_create: name or track_out is NULL");
    struct shoal_track *track = calloc(1, sizeof *track);
    if (!track || shoal_recorder_open(&track->recorder, context->flights) != SHOAL_OK) {
        free(track);
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "shoal_track_create: no memory for a flight recorder");
    }
    pthread_mutex_init(&track->lock, NULL);
    track->recorder.guard = &track->lock;
    shoal_progress_lock(context->progress);
    add_track(comm, track, name);
    shoal_progress_unlock(context->progress);
    *track_out = track;
    return SHOAL_OK;
}

void shoal_tracks_free(struct shoal_comm *comm)
{
    shoal_engine_recorder(comm->engine)->track = NULL;
    while (comm->tracks) {
        struct shoal_track *const track = comm->tracks;
        comm->tracks = track->next;
        shoal_recorder_fini(&track->recorder);
        pthread_mutex_destroy(&track->lock);
        free(track);
    }
}

/* ---- Spans --------------------------------------------------------------------------------------------------------------- */

/* Needs the lock. */
static void end_span(struct shoal_track *track, enum shoal_status status)
{
    track->span->done = shoal_clock_ticks();
    track->span->status = (uint8_t)status;
    track->span = NULL;
}

void shoal_track_begin(struct shoal_track *track, const struct shoal_span *span)
{
    pthread_mutex_lock(&track->lock);
    if (track->span)
        end_span(track, SHOAL_OK);
    shoal_recorder_name(&track->recorder, span->kind);
    track->span = shoal_recorder_next(&track->recorder);
    *track->span = (struct shoal_record){
        .sequence = span->sequence,
        .count = span->stage,
        .posted = shoal_clock_ticks(),
        .collective = span->kind,
        .algorithm = no_algorithm,
        .root = -1,
        .last_rank = -1,
        .step = -1,
        .peer = -1,
        .trace_tag = span->microbatch,
        .type = SHOAL_UINT8,
        .op = SHOAL_SUM,
        .status = SHOAL_PENDING,
    };
    pthread_mutex_unlock(&track->lock);
}

void shoal_track_wait(struct shoal_track *track, int rank, int stage)
{
    pthread_mutex_lock(&track->lock);
    if (track->span) {
        track->span->peer = rank;
        track->span->step = stage;
    }
    pthread_mutex_unlock(&track->lock);
}

/* Ended spans keep what they waited for, so that a trace can show it. */
void shoal_track_start(struct shoal_track *track)
{
    pthread_mutex_lock(&track->lock);
    if (track->span)
        track->span->arrived = shoal_clock_ticks();
    pthread_mutex_unlock(&track->lock);
}

void shoal_track_end(struct shoal_track *track, enum shoal_status status)
{
    pthread_mutex_lock(&track->lock);
    if (track->span)
        end_span(track, status);
    pthread_mutex_unlock(&track->lock);
}
