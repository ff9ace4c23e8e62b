#include "predict/predict_copiers.h"

#include <stdlib.h>

int shoal_copiers_switches(const struct shoal_model *model, int local)
{
    const int below = model->switch_ranks && model->switch_ranks < local ? model->switch_ranks : local;
    return (local + below - 1) / below;
}

enum shoal_status shoal_copiers_init(struct shoal_copiers *copies, const struct shoal_model *model, int ranks, int local,
                                     struct shoal_events *events, int first_event)
{
    const size_t size = (size_t)ranks, hosts = size / (size_t)local;
    *copies = (struct shoal_copiers){.model = model, .events = events, .first_event = first_event, .ranks = ranks};
    copies->local = local;
    copies->switches = shoal_copiers_switches(model, local);
    copies->copiers = calloc(size * SHOAL_COPY_STAGES, sizeof *copies->copiers);
    copies->bytes = calloc(2 * size, sizeof *copies->bytes);
    copies->switch_free_ps = calloc(2 * hosts * (size_t)copies->switches, sizeof *copies->switch_free_ps);
    copies->nvlink_free_ps = calloc(size, sizeof *copies->nvlink_free_ps);
    copies->memory_free_ps = calloc(hosts, sizeof *copies->memory_free_ps);
    const bool has_memory = copies->copiers && copies->bytes && copies->switch_free_ps && copies->nvlink_free_ps;
    return has_memory && copies->memory_free_ps ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void shoal_copiers_fini(struct shoal_copiers *copies)
{
    free(copies->copiers);
    free(copies->bytes);
    free(copies->switch_free_ps);
    free(copies->nvlink_free_ps);
    free(copies->memory_free_ps);
}

/* ---- Shared links -------------------------------------------------------------------------------------------------------- */

static uint64_t copies_later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* First come, first served. A link does not wait for bytes that are still on their way to it: it is occupied from now on. */
static uint64_t pass_way(const struct shoal_copiers *copies, uint64_t *free_ps, uint64_t from_ps, uint64_t bytes,
                         double byte_ps)
{
    const uint64_t way_ps = shoal_bytes_ps(bytes, byte_ps);
    *free_ps = copies_later(*free_ps, copies->events->now_ps) + way_ps;
    return copies_later(*free_ps, from_ps + way_ps);
}

int shoal_copiers_switch_of(const struct shoal_copiers *copies, int rank)
{
    const int host = rank / copies->local, below = (copies->local + copies->switches - 1) / copies->switches;
    return host * copies->switches + rank % copies->local / below;
}

uint64_t shoal_copiers_pass_switch(struct shoal_copiers *copies, int rank, bool is_up, uint64_t from_ps, uint64_t bytes)
{
    const int number = shoal_copiers_switch_of(copies, rank);
    return pass_way(copies, &copies->switch_free_ps[2 * number + is_up], from_ps, bytes, copies->model->switch_ps);
}

uint64_t shoal_copiers_pass_memory(struct shoal_copiers *copies, int host, uint64_t bytes)
{
    return pass_way(copies, &copies->memory_free_ps[host], copies->events->now_ps, bytes, copies->model->host_ps);
}

static uint64_t pass_pcie(struct shoal_copiers *copies, int rank, bool is_up, uint64_t bytes)
{
    const uint64_t now_ps = copies->events->now_ps, link_at = now_ps + shoal_bytes_ps(bytes, copies->model->pcie_ps);
    const uint64_t switch_at = shoal_copiers_pass_switch(copies, rank, is_up, now_ps, bytes);
    const uint64_t memory_at = shoal_copiers_pass_memory(copies, rank / copies->local, bytes);
    return copies_later(link_at, copies_later(switch_at, memory_at));
}

/* While a GPU reads its peers' memory, they read its memory. */
uint64_t shoal_copiers_pass_link(struct shoal_copiers *copies, int rank, enum shoal_copy_link link, uint64_t bytes)
{
    if (link != SHOAL_COPY_BETWEEN)
        return pass_pcie(copies, rank, link == SHOAL_COPY_UP, bytes);
    return pass_way(copies, &copies->nvlink_free_ps[rank], copies->events->now_ps, bytes, copies->model->nvlink_ps);
}

/* ---- Copies -------------------------------------------------------------------------------------------------------------- */

static struct shoal_copier *copier_of(const struct shoal_copiers *copies, int rank, enum shoal_copy_stage stage)
{
    return &copies->copiers[rank * SHOAL_COPY_STAGES + (int)stage];
}

static uint64_t copies_bytes_of(const struct shoal_copiers *copies, int rank, enum shoal_copy_stage stage)
{
    return copies->bytes[2 * rank + (stage == SHOAL_COPY_IN)];
}

static void note_frame(struct shoal_copiers *copies, int rank, enum shoal_copy_stage stage, uint64_t at_ps)
{
    shoal_events_push(copies->events, at_ps, (uint32_t)(copies->first_event + rank * SHOAL_COPY_STAGES + (int)stage));
}

static void copy_frame(struct shoal_copiers *copies, int rank, enum shoal_copy_stage stage)
{
    struct shoal_copier *copier = copier_of(copies, rank, stage);
    const size_t frame = shoal_min_size(copier->left, copies->model->frame_bytes);
    copier->left -= frame;
    note_frame(copies, rank, stage, pass_pcie(copies, rank, stage == SHOAL_COPY_IN, frame));
}

/* Starts the next unit, if the engine is idle and there is one. */
static void copy_next(struct shoal_copiers *copies, int rank, enum shoal_copy_stage stage)
{
    struct shoal_copier *copier = copier_of(copies, rank, stage);
    const uint64_t begin = copier->done * copies->model->unit_bytes, bytes = copies_bytes_of(copies, rank, stage);
    if (copier->is_busy || copier->done >= copier->allowed || begin >= bytes)
        return;
    copier->is_busy = true;
    copier->left = shoal_min_size(copies->model->unit_bytes, bytes - begin);
    note_frame(copies, rank, stage, copies->events->now_ps + copies->model->copy_ps);
}

void shoal_copiers_allow(struct shoal_copiers *copies, int rank, bool is_in, uint64_t units)
{
    const enum shoal_copy_stage stage = is_in ? SHOAL_COPY_IN : SHOAL_COPY_OUT;
    struct shoal_copier *copier = copier_of(copies, rank, stage);
    copier->allowed = copies_later(copier->allowed, units);
    copy_next(copies, rank, stage);
}

uint64_t shoal_copiers_done(const struct shoal_copiers *copies, int rank, bool is_in)
{
    return copier_of(copies, rank, is_in ? SHOAL_COPY_IN : SHOAL_COPY_OUT)->done;
}

bool shoal_copiers_are_over(const struct shoal_copiers *copies, int rank)
{
    return shoal_copiers_done(copies, rank, true) == shoal_copiers_units(copies, copies->bytes[2 * rank + 1]) &&
           shoal_copiers_done(copies, rank, false) == shoal_copiers_units(copies, copies->bytes[2 * rank]);
}

bool shoal_copiers_run(struct shoal_copiers *copies, int event, int *rank_out)
{
    const int rank = (event - copies->first_event) / SHOAL_COPY_STAGES;
    const enum shoal_copy_stage stage = (enum shoal_copy_stage)((event - copies->first_event) % SHOAL_COPY_STAGES);
    struct shoal_copier *copier = copier_of(copies, rank, stage);
    *rank_out = rank;
    if (copier->left) {
        copy_frame(copies, rank, stage);
        return false;
    }
    copier->is_busy = false;
    copier->done++;
    copy_next(copies, rank, stage);
    return true;
}
