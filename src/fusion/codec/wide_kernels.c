#include "fusion/codec/wide_kernels.h"

#include "base/floats.h"

#define CHUNK SHOAL_GRADIENT_SQUARED_CHUNK
/* One thread does 64 KiB of float32 in some microseconds: a smaller part is not worth a claim, nor four of them a post. */
#define PART_CHUNKS ((size_t)4)
#define PART (PART_CHUNKS * CHUNK)
#define LEAST (4 * PART)
/* Parts whose sums of squares fit on the stack. */
#define BATCH_PARTS ((size_t)256)

static bool is_wide(struct fusion_wide wide, size_t count)
{
    return count >= LEAST && shoal_context_threads(wide.context) > 1;
}

static size_t count_wide_parts(size_t count)
{
    return (count + PART - 1) / PART;
}

static void run_parts(struct fusion_wide wide, shoal_part_fn run, void *arg, size_t count)
{
    if (shoal_context_run(wide.context, run, arg, count_wide_parts(count)) != SHOAL_OK) { /* in a forked child */
        for (size_t part = 0; part < count_wide_parts(count); part++)
            run(arg, part);
    }
}

static size_t elements_of(size_t part, size_t count)
{
    return fusion_min(PART, count - part * PART);
}

/* ---- Moves --------------------------------------------------------------------------------------------------------------- */

struct move {
    shoal_gradient_move_fn move;
    char *dest;
    const char *source;
    size_t element, count;
    double factor;
    bool adds;
    double *sums; /* [chunks]; NULL: not wanted */
};

static void move_range(const struct move *move, size_t at, size_t count, double *squared)
{
    move->move(move->dest ? move->dest + at * move->element : NULL, move->source + at * move->element, count, move->factor,
               move->adds, squared);
}

static void move_part(void *arg, size_t part)
{
    const struct move *move = arg;
    const size_t begin = part * PART, end = begin + elements_of(part, move->count);
    if (!move->sums) {
        move_range(move, begin, end - begin, NULL);
        return;
    }
    for (size_t at = begin; at < end; at += CHUNK) {
        move->sums[at / CHUNK] = 0;
        move_range(move, at, fusion_min(CHUNK, end - at), &move->sums[at / CHUNK]);
    }
}

/* The kernel also adds the sum of each chunk to those before it. */
static void move_and_sum(struct fusion_wide wide, struct move move, size_t count, double *squared)
{
    double sums[BATCH_PARTS * PART_CHUNKS];
    move.sums = sums;
    for (size_t at = 0; at < count; at += move.count) {
        move.count = fusion_min(BATCH_PARTS * PART, count - at);
        run_parts(wide, move_part, &move, move.count);
        SHOAL_DEFAULT_FLOATS;
        for (size_t chunk = 0; chunk * CHUNK < move.count; chunk++)
            *squared += sums[chunk];
        move.dest = move.dest ? move.dest + move.count * move.element : NULL;
        move.source += move.count * move.element;
    }
}

void fusion_wide_move(struct fusion_wide wide, enum shoal_type type, void *dest, const void *source, size_t count,
                      double factor, bool adds, double *squared)
{
    struct move move = {wide.kernels->move[type], dest, source, shoal_type_bytes(type), count, factor, adds, NULL};
    if (!is_wide(wide, count))
        move.move(dest, source, count, factor, adds, squared);
    else if (squared)
        move_and_sum(wide, move, count, squared);
    else
        run_parts(wide, move_part, &move, count);
}

/* ---- Casts --------------------------------------------------------------------------------------------------------------- */

struct cast {
    shoal_gradient_narrow_fn narrow; /* either this or widen */
    shoal_gradient_widen_fn widen;
    float *wide;
    uint16_t *half;
    size_t count;
    float factor;
};

static void cast_wide_part(void *arg, size_t part)
{
    const struct cast *cast = arg;
    const size_t at = part * PART, count = elements_of(part, cast->count);
    if (cast->narrow)
        cast->narrow(cast->half + at, cast->wide + at, count, cast->factor);
    else
        cast->widen(cast->wide + at, cast->half + at, count, cast->factor);
}

void fusion_wide_narrow(struct fusion_wide wide, bool is_float16, uint16_t *dest, const float *source, size_t count,
                        float factor)
{
    struct cast cast = {.narrow = is_float16 ? wide.kernels->to_float16 : wide.kernels->to_bfloat16,
                        .wide = (float *)(uintptr_t)source, /* which is only read */
                        .half = dest,
                        .count = count,
                        .factor = factor};
    if (is_wide(wide, count))
        run_parts(wide, cast_wide_part, &cast, count);
    else
        cast.narrow(dest, source, count, factor);
}

void fusion_wide_widen(struct fusion_wide wide, bool is_float16, float *dest, const uint16_t *source, size_t count,
                       float factor)
{
    struct cast cast = {.widen = is_float16 ? wide.kernels->from_float16 : wide.kernels->from_bfloat16,
                        .wide = dest,
                        .half = (uint16_t *)(uintptr_t)source, /* which is only read */
                        .count = count,
                        .factor = factor};
    if (is_wide(wide, count))
        run_parts(wide, cast_wide_part, &cast, count);
    else
        cast.widen(dest, source, count, factor);
}

/* ---- 8 bits -------------------------------------------------------------------------------------------------------------- */

struct quantized {
    const struct shoal_gradient_kernels *kernels;
    int8_t *values;
    float *scales;
    const float *source;
    float *error, *dest;
    size_t count;
    float factor;
    bool adds;
};

static void quantize_wide_part(void *arg, size_t part)
{
    const struct quantized *to = arg;
    const size_t at = part * PART;
    to->kernels->quantize(to->values + at, to->scales + at / SHOAL_GRADIENT_BLOCK, to->source + at,
                          to->error ? to->error + at : NULL, elements_of(part, to->count));
}

static void dequantize_wide_part(void *arg, size_t part)
{
    const struct quantized *from = arg;
    const size_t at = part * PART;
    from->kernels->dequantize(from->dest + at, from->values + at, from->scales + at / SHOAL_GRADIENT_BLOCK,
                              elements_of(part, from->count), from->factor, from->adds);
}

void fusion_wide_quantize(struct fusion_wide wide, int8_t *values, float *scales, const float *source, float *error,
                          size_t count)
{
    struct quantized to = {
        .kernels = wide.kernels, .values = values, .scales = scales, .source = source, .error = error, .count = count};
    if (is_wide(wide, count))
        run_parts(wide, quantize_wide_part, &to, count);
    else
        wide.kernels->quantize(values, scales, source, error, count);
}

void fusion_wide_dequantize(struct fusion_wide wide, float *dest, const int8_t *values, const float *scales, size_t count,
                            float factor, bool adds)
{
    struct quantized from = {.kernels = wide.kernels,
                             .values = (int8_t *)(uintptr_t)values, /* which are only read, like the scales */
                             .scales = (float *)(uintptr_t)scales,
                             .dest = dest,
                             .count = count,
                             .factor = factor,
                             .adds = adds};
    if (is_wide(wide, count))
        run_parts(wide, dequantize_wide_part, &from, count);
    else
        wide.kernels->dequantize(dest, values, scales, count, factor, adds);
}

/* ---- Updates ------------------------------------------------------------------------------------------------------------- */

/* Bytes of an element of the gradient, and of masters and states. */
struct element_bytes {
    size_t gradient, master;
};

static struct element_bytes bytes_of(enum shoal_type type)
{
    return (struct element_bytes){shoal_type_bytes(type), type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float)};
}

static void *at_bytes(const void *memory, size_t bytes)
{
    return memory ? (char *)(uintptr_t)memory + bytes : NULL;
}

/* Returns the memory from element `at` of the range. */
static struct shoal_update_memory memory_from(const struct shoal_update_memory *memory, struct element_bytes bytes, size_t at)
{
    const size_t element_at = at * bytes.gradient, master_at = at * bytes.master;
    struct shoal_update_memory from = {.gradient = at_bytes(memory->gradient, element_at),
                                       .parameter = at_bytes(memory->parameter, element_at),
                                       .from_master = at_bytes(memory->from_master, master_at),
                                       .to_master = at_bytes(memory->to_master, master_at)};
    for (size_t s = 0; s < SHOAL_UPDATE_STATES; s++) {
        from.from[s] = at_bytes(memory->from[s], master_at);
        from.to[s] = at_bytes(memory->to[s], master_at);
    }
    return from;
}

struct updated {
    shoal_update_fn update;
    const struct shoal_update *by;
    const struct shoal_update_memory *memory;
    struct element_bytes bytes;
    size_t count;
};

static void update_part(void *arg, size_t part)
{
    const struct updated *updated = arg;
    const struct shoal_update_memory memory = memory_from(updated->memory, updated->bytes, part * PART);
    updated->update(updated->by, &memory, elements_of(part, updated->count));
}

void fusion_wide_update(struct fusion_wide wide, enum shoal_rule rule, enum shoal_type type, const struct shoal_update *update,
                        const struct shoal_update_memory *memory, size_t count)
{
    struct updated updated = {
        .update = wide.kernels->update[rule][type], .by = update, .memory = memory, .bytes = bytes_of(type), .count = count};
    if (is_wide(wide, count))
        run_parts(wide, update_part, &updated, count);
    else
        updated.update(update, memory, count);
}

struct measured {
    shoal_moments_fn moments;
    const struct shoal_update *by;
    struct shoal_update_memory memory;
    struct element_bytes bytes;
    size_t count;
    double (*sums)[2]; /* [chunks] */
};

static void measure_part(void *arg, size_t part)
{
    const struct measured *measured = arg;
    const size_t begin = part * PART, end = begin + elements_of(part, measured->count);
    for (size_t at = begin; at < end; at += CHUNK) {
        const struct shoal_update_memory memory = memory_from(&measured->memory, measured->bytes, at);
        double *sums = measured->sums[at / CHUNK];
        sums[0] = sums[1] = 0;
        measured->moments(measured->by, &memory, fusion_min(CHUNK, end - at), sums);
    }
}

void fusion_wide_moments(struct fusion_wide wide, enum shoal_type type, const struct shoal_update *update,
                         const struct shoal_update_memory *memory, size_t count, double squared[2])
{
    double sums[BATCH_PARTS * PART_CHUNKS][2];
    struct measured measured = {wide.kernels->moments[type], update, *memory, bytes_of(type), 0, sums};
    if (!is_wide(wide, count)) {
        measured.moments(update, memory, count, squared);
        return;
    }
    for (size_t at = 0; at < count; at += measured.count) {
        measured.memory = memory_from(memory, measured.bytes, at);
        measured.count = fusion_min(BATCH_PARTS * PART, count - at);
        run_parts(wide, measure_part, &measured, measured.count);
        SHOAL_DEFAULT_FLOATS;
        for (size_t chunk = 0; chunk * CHUNK < measured.count; chunk++) {
            squared[0] += sums[chunk][0];
            squared[1] += sums[chunk][1];
        }
    }
}
