/* The stages of a float32 buffer that is compressed between hosts. There are L ranks on each of H hosts. Rank l of a host owns
 * part l of the buffer there, and exchanges it with the ranks l of the other hosts:
 *
 *     scatter   reduce-scatter inside the host, float32          n -> n / L
 *     across    16 bit: all-reduce of the cast part              n / L
 *               8 bit: all-to-all of quantized pieces of parts   n / L, then summed in float32 by their owner
 *     back      8 bit: all-gather of the quantized sums          n / L / H -> n / L
 *     gather    all-gather inside the host, float32              n / L -> n
 *
 * Each stage has its own communicator, on which buffers follow each other by index. So ranks agree on an order, however the
 * stages of different buffers overlap. The compressor's thread computes between stages.
 *
 * The error of quantizing is added to the same element in the next step: `sent_error` by the sender of a part, `sum_error` by
 * the owner of the sum. Both are zero at the start of each layout. */
#include "fusion/reducer/compress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/reducer/comms.h"
#include "fusion/reducer/compute.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/reducer_memory.h"

enum stage { SCATTER, ACROSS, BACK, GATHER, STAGES };

static const char *const stage_names[STAGES] = {".scatter", ".across", ".back", ".gather"};

/* A buffer; part is 0 if it is not compressed. Its arrays are in the same kind of memory as the gradients. */
struct compressed {
    struct shoal_reducer *reducer; /* for callbacks */
    size_t buffer;
    fusion_done_fn *done;
    struct shoal_request *requests[STAGES]; /* the reducer's lock guards this and the next two */
    int stage;                              /* the stage that is due or under way; STAGES if none */
    bool is_due;                            /* the previous stage is done */
    size_t part;                            /* elements that a rank owns inside its host */
    size_t piece;                           /* 8 bit: elements of a part that a host owns */
    size_t piece_bytes;                     /* including scales */
    uint16_t *halves;                       /* [part] */
    char *sent, *taken;                     /* [hosts * piece_bytes]; `taken` later holds the gathered sums */
    float *sum;                             /* [piece] */
    float *sent_error;                      /* [part], NULL if errors are not kept */
    float *sum_error;                       /* [piece] */
};

/* The buffers of a layout, with all memory that they point to. */
struct compressed_layout {
    void *arrays;
    struct compressed buffers[]; /* [buffers of the layout] */
};

struct fusion_compressor {
    struct shoal_comm *comms[STAGES];
    int local_rank, local_size, host, hosts;
    struct compressed_layout *layout; /* NULL if no buffer is compressed */
    pthread_t thread;
    bool has_thread;
    bool is_ending;      /* the reducer's lock guards this and the next */
    size_t next[STAGES]; /* the buffer whose stage is posted next */
};

/* ---- Making -------------------------------------------------------------------------------------------------------------- */

static bool is_8_bit(const struct shoal_reducer *reducer)
{
    return reducer->options.compression == SHOAL_COMPRESS_INT8;
}

/* All ranks see the same places, so they return the same status. */
static enum shoal_status check_places(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    struct shoal_place first = SHOAL_PLACE_INIT, place = SHOAL_PLACE_INIT;
    FUSION_TRY(shoal_comm_place(reducer->comm, 0, &first));
    for (int r = 1; r < reducer->size; r++) {
        FUSION_TRY(shoal_comm_place(reducer->comm, r, &place));
        if (place.local_size == first.local_size)
            continue;
        snprintf(text, text_bytes, "compression needs as many ranks on each host: %s has %d, %s has %d", first.host_name,
                 first.local_size, place.host_name, place.local_size);
        return SHOAL_ERR_UNSUPPORTED;
    }
    return SHOAL_OK;
}

static enum shoal_status open_stage(struct shoal_reducer *reducer, enum stage stage)
{
    struct fusion_compressor *compressor = reducer->compressor;
    const bool is_inside = stage == SCATTER || stage == GATHER;
    SHOAL_ASSERT(!compressor->comms[stage]);
    const int color = is_inside ? compressor->host : compressor->local_rank;
    const int key = is_inside ? compressor->local_rank : compressor->host;
    return fusion_comms_add(reducer, stage_names[stage], color, key, &compressor->comms[stage]);
}

static bool needs(const struct shoal_reducer *reducer, enum stage stage)
{
    return stage == ACROSS || (stage == BACK ? is_8_bit(reducer) : reducer->compressor->local_size > 1);
}

static enum shoal_status allocate_compressor(struct shoal_reducer *reducer, const struct shoal_place *place)
{
    struct fusion_compressor *compressor = reducer->compressor = calloc(1, sizeof *reducer->compressor);
    if (!compressor)
        return SHOAL_ERR_MEMORY;
    compressor->local_rank = place->local_rank;
    compressor->local_size = place->local_size;
    compressor->host = place->host;
    compressor->hosts = place->hosts;
    SHOAL_ASSERT(place->local_rank < place->local_size && place->host < place->hosts);
    return SHOAL_OK;
}

/* Everything that can fail on one rank alone fails before the first split, so that no other rank waits for it in a split. */
enum shoal_status fusion_compressor_open(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    int rank;
    if (reducer->options.compression == SHOAL_COMPRESS_NONE || reducer->hosts == 1)
        return SHOAL_OK;
    FUSION_TRY(check_places(reducer, text, text_bytes));
    FUSION_TRY(shoal_comm_place(reducer->comm, reducer->rank, &place));
    const enum shoal_status status = fusion_all_ready(reducer, allocate_compressor(reducer, &place), &rank);
    if (rank >= 0)
        snprintf(text, text_bytes, "rank %d: no memory for compression", rank);
    FUSION_TRY(status);
    for (enum stage stage = SCATTER; stage < STAGES; stage++) {
        if (needs(reducer, stage))
            FUSION_TRY(open_stage(reducer, stage));
    }
    return SHOAL_OK;
}

void fusion_compressor_stop(struct shoal_reducer *reducer)
{
    struct fusion_compressor *compressor = reducer->compressor;
    if (!compressor)
        return;
    if (compressor->has_thread) {
        fusion_lock(reducer);
        compressor->is_ending = true;
        pthread_cond_broadcast(&reducer->changed);
        fusion_unlock(reducer);
        pthread_join(compressor->thread, NULL);
    }
}

void fusion_compressor_free(struct shoal_reducer *reducer)
{
    fusion_compressor_take(reducer, NULL);
    free(reducer->compressor);
    reducer->compressor = NULL;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static size_t blocks_of(size_t count)
{
    return (count + SHOAL_GRADIENT_BLOCK - 1) / SHOAL_GRADIENT_BLOCK;
}

/* Hands out consecutive ranges of memory; with memory NULL it only counts. */
struct carver {
    char *memory;
    size_t used;
};

static void *carve(struct carver *carver, size_t bytes)
{
    SHOAL_ASSERT(carver->used % FUSION_ALIGNMENT == 0);
    char *at = carver->memory ? carver->memory + carver->used : NULL;
    carver->used += fusion_round_up(bytes, FUSION_ALIGNMENT);
    return at;
}

/* Scales precede values, so that both are aligned. */
static void carve_8_bit(const struct shoal_reducer *reducer, struct compressed *compressed, struct carver *carver)
{
    const size_t hosts = (size_t)reducer->compressor->hosts;
    compressed->piece = compressed->part / hosts;
    SHOAL_ASSERT(compressed->piece * hosts == compressed->part);
    compressed->piece_bytes = blocks_of(compressed->piece) * sizeof(float) + compressed->piece;
    compressed->sent = carve(carver, hosts * compressed->piece_bytes);
    compressed->taken = carve(carver, hosts * compressed->piece_bytes);
    compressed->sum = carve(carver, compressed->piece * sizeof(float));
    if (reducer->options.forgets_error)
        return;
    compressed->sent_error = carve(carver, compressed->part * sizeof(float));
    compressed->sum_error = carve(carver, compressed->piece * sizeof(float));
}

static void carve_buffer(const struct shoal_reducer *reducer, size_t bytes, struct compressed *compressed,
                         struct carver *carver)
{
    const size_t local_size = (size_t)reducer->compressor->local_size;
    compressed->part = bytes / sizeof(float) / local_size;
    SHOAL_ASSERT(compressed->part * local_size * sizeof(float) == bytes); /* because the layout pads buffers */
    if (is_8_bit(reducer))
        carve_8_bit(reducer, compressed, carver);
    else
        compressed->halves = carve(carver, compressed->part * sizeof(uint16_t));
}

/* Places all buffers in the carver's memory, or counts the bytes that they need. */
static void carve_layout(const struct shoal_reducer *reducer, const struct shoal_gradient_layout *layout,
                         struct compressed *buffers, struct carver *carver)
{
    for (size_t b = 0; b < layout->buffer_count; b++)
        if (layout->buffers[b].type == SHOAL_FLOAT32)
            carve_buffer(reducer, layout->buffers[b].bytes, &buffers[b], carver);
}

enum shoal_status fusion_compressor_prepare(const struct shoal_reducer *reducer, const struct shoal_gradient_layout *layout,
                                            void **memory_out)
{
    struct carver count = {NULL, 0}, carver = {NULL, 0};
    struct compressed_layout *compressed;
    *memory_out = NULL;
    if (!reducer->compressor)
        return SHOAL_OK;
    compressed = calloc(1, sizeof *compressed + layout->buffer_count * sizeof compressed->buffers[0]);
    if (!compressed)
        return SHOAL_ERR_MEMORY;
    carve_layout(reducer, layout, compressed->buffers, &count);
    const enum shoal_status status = fusion_allocate(reducer, count.used + FUSION_ALIGNMENT, &compressed->arrays);
    if (status != SHOAL_OK) {
        free(compressed);
        return status;
    }
    carver.memory = compressed->arrays;
    carve_layout(reducer, layout, compressed->buffers, &carver);
    SHOAL_ASSERT(carver.used == count.used);
    *memory_out = compressed;
    return SHOAL_OK;
}

static struct compressed *compressed_at(const struct shoal_reducer *reducer, size_t buffer)
{
    return &reducer->compressor->layout->buffers[buffer];
}

static void drop_requests(struct shoal_reducer *reducer)
{
    for (size_t b = 0; reducer->compressor->layout && b < reducer->layout->buffer_count; b++) {
        for (enum stage stage = SCATTER; stage < STAGES; stage++) {
            shoal_request_free(compressed_at(reducer, b)->requests[stage]);
            compressed_at(reducer, b)->requests[stage] = NULL;
        }
    }
}

void fusion_compressor_take(struct shoal_reducer *reducer, void *memory)
{
    if (!reducer->compressor)
        return;
    drop_requests(reducer);
    if (reducer->compressor->layout)
        fusion_free_memory(reducer, reducer->compressor->layout->arrays);
    free(reducer->compressor->layout);
    reducer->compressor->layout = memory;
}

bool fusion_is_compressed(const struct shoal_reducer *reducer, size_t buffer)
{
    return reducer->compressor && reducer->compressor->layout && compressed_at(reducer, buffer)->part > 0;
}

/* ---- Computations between stages ----------------------------------------------------------------------------------------- */

static float *whole(const struct compressed *compressed)
{
    return (float *)(void *)fusion_buffer_memory(compressed->reducer, compressed->buffer);
}

static float *own_part(const struct compressed *compressed)
{
    return whole(compressed) + compressed->part * (size_t)compressed->reducer->compressor->local_rank;
}

static float *scales_of(const struct compressed *compressed, char *packed, size_t host)
{
    return (float *)(void *)(packed + host * compressed->piece_bytes);
}

static int8_t *values_of(const struct compressed *compressed, char *packed, size_t host)
{
    return (int8_t *)(scales_of(compressed, packed, host) + blocks_of(compressed->piece));
}

/* Returns 1 / ranks if this file divides the sum, otherwise 1. */
static float divisor_of(const struct shoal_reducer *reducer)
{
    SHOAL_DEFAULT_FLOATS;
    float ranks = reducer->options.op == SHOAL_AVG ? (float)reducer->size : 1.0f;
    SHOAL_FLOATS_PIN(ranks);
    float divisor = 1.0f / ranks;
    SHOAL_FLOATS_PIN(divisor);
    return divisor;
}

/* Divides before the sum, because float16 overflows early. */
static enum shoal_status cast_part(struct shoal_reducer *reducer, const struct compressed *compressed)
{
    return fusion_narrow(reducer, compressed->buffer, compressed->halves, own_part(compressed), compressed->part,
                         divisor_of(reducer));
}

static enum shoal_status widen_part(struct shoal_reducer *reducer, const struct compressed *compressed)
{
    return fusion_widen(reducer, compressed->buffer, own_part(compressed), compressed->halves, compressed->part);
}

static enum shoal_status quantize_part(struct shoal_reducer *reducer, const struct compressed *compressed)
{
    const float *part = own_part(compressed);
    for (size_t h = 0; h < (size_t)reducer->compressor->hosts; h++) {
        const size_t at = h * compressed->piece;
        FUSION_TRY(fusion_quantize(reducer, compressed->buffer, values_of(compressed, compressed->sent, h),
                                   scales_of(compressed, compressed->sent, h), part + at,
                                   compressed->sent_error ? compressed->sent_error + at : NULL, compressed->piece));
    }
    return SHOAL_OK;
}

/* Sums in the order of hosts, then quantizes the sum into this host's place in the gathered data. */
static enum shoal_status sum_pieces(struct shoal_reducer *reducer, const struct compressed *compressed)
{
    const size_t own = (size_t)reducer->compressor->host;
    for (size_t h = 0; h < (size_t)reducer->compressor->hosts; h++)
        FUSION_TRY(fusion_dequantize(reducer, compressed->buffer, compressed->sum, values_of(compressed, compressed->taken, h),
                                     scales_of(compressed, compressed->taken, h), compressed->piece, 1, h > 0));
    return fusion_quantize(reducer, compressed->buffer, values_of(compressed, compressed->taken, own),
                           scales_of(compressed, compressed->taken, own), compressed->sum, compressed->sum_error,
                           compressed->piece);
}

static enum shoal_status dequantize_part(struct shoal_reducer *reducer, const struct compressed *compressed)
{
    float *part = own_part(compressed);
    for (size_t h = 0; h < (size_t)reducer->compressor->hosts; h++)
        FUSION_TRY(fusion_dequantize(reducer, compressed->buffer, part + h * compressed->piece,
                                     values_of(compressed, compressed->taken, h), scales_of(compressed, compressed->taken, h),
                                     compressed->piece, divisor_of(reducer), false));
    return SHOAL_OK;
}

static enum shoal_status compute(struct shoal_reducer *reducer, const struct compressed *compressed, enum stage stage)
{
    if (stage == ACROSS)
        return is_8_bit(reducer) ? quantize_part(reducer, compressed) : cast_part(reducer, compressed);
    if (stage == BACK && is_8_bit(reducer))
        return sum_pieces(reducer, compressed);
    if (stage == GATHER)
        return is_8_bit(reducer) ? dequantize_part(reducer, compressed) : widen_part(reducer, compressed);
    return SHOAL_OK;
}

/* ---- Stages -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status post_stage(struct shoal_reducer *reducer, const struct compressed *compressed, enum stage stage,
                                    struct shoal_request **request_out)
{
    struct shoal_comm *comm = reducer->compressor->comms[stage];
    SHOAL_ASSERT(comm);
    const struct shoal_options options = fusion_buffer_options(reducer, compressed->buffer);
    const enum shoal_type half = reducer->options.compression == SHOAL_COMPRESS_FLOAT16 ? SHOAL_FLOAT16 : SHOAL_BFLOAT16;
    char *own = compressed->taken ? compressed->taken + compressed->piece_bytes * (size_t)reducer->compressor->host : NULL;
    if (stage == SCATTER)
        return shoal_reduce_scatter_post(comm, whole(compressed), own_part(compressed), compressed->part, SHOAL_FLOAT32,
                                         SHOAL_SUM, &options, request_out);
    if (stage == GATHER)
        return shoal_allgather_post(comm, own_part(compressed), whole(compressed), compressed->part, SHOAL_FLOAT32, &options,
                                    request_out);
    if (stage == BACK)
        return shoal_allgather_post(comm, own, compressed->taken, compressed->piece_bytes, SHOAL_UINT8, &options, request_out);
    if (is_8_bit(reducer))
        return shoal_alltoall_post(comm, compressed->sent, compressed->taken, compressed->piece_bytes, SHOAL_UINT8, &options,
                                   request_out);
    return shoal_allreduce_post(comm, compressed->halves, compressed->halves, compressed->part, half, SHOAL_SUM, &options,
                                request_out);
}

/* Ends the current stage. Call with the lock held. */
static void pass_stage(struct compressed *compressed)
{
    SHOAL_ASSERT(fusion_has_lock(compressed->reducer));
    SHOAL_ASSERT(compressed->stage < STAGES && !compressed->is_due);
    compressed->stage++;
    compressed->is_due = true;
    pthread_cond_broadcast(&compressed->reducer->changed);
}

static void stage_done(void *arg, enum shoal_status status)
{
    struct compressed *compressed = arg;
    struct shoal_reducer *reducer = compressed->reducer;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, (long)compressed->buffer);
        return;
    }
    fusion_lock(reducer);
    pass_stage(compressed);
    const bool is_last = compressed->stage == STAGES;
    fusion_unlock(reducer);
    if (is_last)
        compressed->done(reducer, compressed->buffer, SHOAL_OK);
}

/* Call without the lock. */
static enum shoal_status run_stage(struct shoal_reducer *reducer, struct compressed *compressed, enum stage stage)
{
    struct shoal_request *request;
    FUSION_TRY(compute(reducer, compressed, stage));
    if (!needs(reducer, stage)) {
        stage_done(compressed, SHOAL_OK);
        return SHOAL_OK;
    }
    FUSION_TRY(post_stage(reducer, compressed, stage, &request));
    fusion_lock(reducer);
    SHOAL_ASSERT(!compressed->requests[stage]); /* a stage runs once a step */
    compressed->requests[stage] = request;
    pthread_cond_broadcast(&reducer->changed); /* the thread that waits for the step can make progress on it */
    fusion_unlock(reducer);
    shoal_request_on_done(request, stage_done, compressed);
    return SHOAL_OK;
}

enum shoal_status fusion_compressed_post(struct shoal_reducer *reducer, size_t buffer, fusion_done_fn *done)
{
    struct compressed *compressed = compressed_at(reducer, buffer);
    SHOAL_ASSERT(compressed->part > 0 && !reducer->device && done);
    compressed->reducer = reducer;
    compressed->buffer = buffer;
    compressed->done = done;
    fusion_lock(reducer);
    compressed->stage = SCATTER;
    compressed->is_due = false;
    fusion_unlock(reducer);
    return run_stage(reducer, compressed, SCATTER);
}

enum shoal_status fusion_compressed_enqueue(struct shoal_reducer *reducer, size_t buffer)
{
    struct compressed *compressed = compressed_at(reducer, buffer);
    SHOAL_ASSERT(compressed->part > 0 && reducer->device);
    compressed->reducer = reducer;
    compressed->buffer = buffer;
    for (enum stage stage = SCATTER; stage < STAGES; stage++) {
        struct shoal_request *request;
        FUSION_TRY(compute(reducer, compressed, stage));
        if (!needs(reducer, stage))
            continue;
        FUSION_TRY(post_stage(reducer, compressed, stage, &request));
        FUSION_TRY(fusion_device_keep(reducer, buffer, request));
    }
    return SHOAL_OK;
}

struct shoal_request *fusion_compressed_request(const struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct compressed *compressed = compressed_at(reducer, buffer);
    return compressed->stage < STAGES ? compressed->requests[compressed->stage] : NULL; /* a stage that is due has none yet */
}

void fusion_compressor_reset(struct shoal_reducer *reducer)
{
    struct fusion_compressor *compressor = reducer->compressor;
    if (!compressor)
        return;
    drop_requests(reducer);
    for (enum stage stage = SCATTER; stage < STAGES; stage++)
        compressor->next[stage] = 0;
    for (size_t b = 0; compressor->layout && b < reducer->layout->buffer_count; b++)
        compressed_at(reducer, b)->is_due = false;
}

/* Returns the buffer whose stage is due next, or NULL. Call with the lock held. */
static struct compressed *find_due(struct shoal_reducer *reducer, enum stage stage)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_compressor *compressor = reducer->compressor;
    size_t *next = &compressor->next[stage];
    while (*next < reducer->layout->buffer_count && !fusion_is_compressed(reducer, *next))
        ++*next;
    struct compressed *compressed = *next < reducer->layout->buffer_count ? compressed_at(reducer, *next) : NULL;
    return compressed && compressed->is_due && compressed->stage == (int)stage ? compressed : NULL;
}

/* Runs a stage that is due. Later stages come first, because their buffers are nearest to their end. Call with the lock held;
 * it is released meanwhile. Returns false if no stage is due. */
static bool run_one(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    for (enum stage stage = GATHER; stage > SCATTER; stage--) {
        struct compressed *compressed = find_due(reducer, stage);
        if (!compressed)
            continue;
        reducer->compressor->next[stage]++;
        compressed->is_due = false;
        fusion_unlock(reducer);
        const enum shoal_status status = run_stage(reducer, compressed, stage);
        if (status != SHOAL_OK)
            fusion_operation_not_posted(reducer, status, (long)compressed->buffer);
        fusion_lock(reducer);
        return true;
    }
    return false;
}

static void *compress_run_thread(void *arg)
{
    struct shoal_reducer *reducer = arg;
    fusion_lock(reducer);
    while (!reducer->compressor->is_ending) {
        if (fusion_failed(reducer) == SHOAL_OK && reducer->is_armed && run_one(reducer))
            continue;
        if (!reducer->compressor->is_ending)
            pthread_cond_wait(&reducer->changed, &reducer->lock);
    }
    fusion_unlock(reducer);
    return NULL;
}

enum shoal_status fusion_compressor_start(struct shoal_reducer *reducer)
{
    if (!reducer->compressor || reducer->device)
        return SHOAL_OK;
    if (pthread_create(&reducer->compressor->thread, NULL, compress_run_thread, reducer) != 0)
        return SHOAL_ERR_SYSTEM;
    reducer->compressor->has_thread = true;
    return SHOAL_OK;
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

struct fusion_residuals fusion_compressed_residuals(const struct shoal_reducer *reducer, size_t buffer)
{
    if (!fusion_is_compressed(reducer, buffer) || !compressed_at(reducer, buffer)->sent_error)
        return (struct fusion_residuals){NULL, NULL, 0, 0};
    const struct compressed *compressed = compressed_at(reducer, buffer);
    SHOAL_ASSERT(compressed->sum_error); /* both errors are kept, or none */
    return (struct fusion_residuals){compressed->sent_error, compressed->sum_error, compressed->part, compressed->piece};
}

void fusion_compressor_position(const struct shoal_reducer *reducer, int32_t *host_out, int32_t *local_rank_out)
{
    if (!reducer->compressor)
        return;
    *host_out = reducer->compressor->host;
    *local_rank_out = reducer->compressor->local_rank;
}

uint64_t fusion_compressed_network_bytes(const struct shoal_reducer *reducer, size_t buffer)
{
    const struct compressed *compressed = compressed_at(reducer, buffer);
    SHOAL_ASSERT(compressed->part > 0);
    const uint64_t others = (uint64_t)reducer->compressor->hosts - 1;
    return is_8_bit(reducer) ? 2 * others * compressed->piece_bytes
                             : 2 * others * (compressed->part / (others + 1)) * sizeof(uint16_t);
}
