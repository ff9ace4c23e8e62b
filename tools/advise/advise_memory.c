#include "advise_memory.h"

#include <math.h>

const char *const advise_way_names[ADVISE_WAYS] = {
#define WAY_NAME(name, word, text) word,
    ADVISE_WAY_LIST(WAY_NAME)
#undef WAY_NAME
};
const char *const advise_way_texts[ADVISE_WAYS] = {
#define WAY_TEXT(name, word, text) text,
    ADVISE_WAY_LIST(WAY_TEXT)
#undef WAY_TEXT
};

/* ---- Activations --------------------------------------------------------------------------------------------------------- */

static double value_bytes(const struct advise_setup *setup)
{
    return setup->is_16 ? 2 : 4;
}

static double positions(const struct advise_model *model, const struct advise_setup *setup)
{
    return model->sequence * setup->micro * model->width;
}

/* torch's CPUs compute attention of 16 bits in float32, unless it is fused. */
static double attention_value_bytes(const struct advise_setup *setup)
{
    return setup->has_value_masks && !setup->fuses_attention ? 4 : value_bytes(setup);
}

static double mask_bytes(const struct advise_setup *setup)
{
    return setup->has_value_masks ? value_bytes(setup) : 1;
}

/* With values of e bytes and masks of m bytes, a layer of tensor degree t keeps for each position and column
 *
 *     4 e + 2 m     inputs of both norms, attention and feed-forward; two masks of dropout: on every worker
 *     12 e / t      queries, keys, values, input of the projection; the four times wider inputs of activation and last product
 *     (2 e + m) a s / (h t)    scores of attention: before and after softmax, and the mask of dropout
 *
 * where queries, keys, values and scores have the bytes of attention's values,
 * which is 10 + 24 / t + 5 a s / (h t) of table 2 in the paper for e = 2 and m = 1. */
double advise_layer_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    const double e = value_bytes(setup), mask = mask_bytes(setup), inner = attention_value_bytes(setup);
    const double of_score = setup->fuses_attention ? 0 : 2 * inner + (setup->has_value_masks ? inner : 1);
    const double scores = of_score * model->heads * model->sequence / model->width;
    const double divided = 3 * inner + (9 + model->composed) * e + scores;
    return positions(model, setup) * (4 * e + 2 * mask + divided / setup->tensor);
}

/* Tokens of 8 bytes, and the mask of the embedding's dropout. */
static double embedding_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    return 8 * model->sequence * setup->micro + mask_bytes(setup) * positions(model, setup);
}

/* In float32. Tensor parallelism does not divide them, because the loss gathers them. */
static double logits_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    return 4 * model->sequence * setup->micro * model->vocabulary;
}

/* Inputs of the last norm and of the product, and the logits. */
static double head_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    return 2 * value_bytes(setup) * positions(model, setup) + logits_bytes(model, setup);
}

/* The first stage keeps the most microbatches; the last one keeps one, and has the head. */
static double transformer_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    const double whole = advise_layer_bytes(model, setup), layers = (double)model->layers / setup->stages;
    const double layer = setup->recomputes ? value_bytes(setup) * positions(model, setup) : whole;
    const double again = setup->recomputes ? whole : 0;
    const double in_flight = setup->stages > 1 ? setup->in_flight : 1;
    const double first = in_flight * (layers * layer + embedding_bytes(model, setup)) + again;
    const double last = layers * layer + again + head_bytes(model, setup);
    if (setup->stages > 1)
        return fmax(first, last);
    return last + embedding_bytes(model, setup);
}

static double activation_bytes(const struct advise_model *model, const struct advise_setup *setup)
{
    if (model->layers)
        return transformer_bytes(model, setup);
    const double sample = setup->recomputes && model->recomputed_bytes > 0 ? model->recomputed_bytes : model->sample_bytes;
    const double in_flight = setup->stages > 1 ? setup->in_flight / setup->stages : 1;
    const double half = model->sample_16_bytes > 0 ? model->sample_16_bytes / model->sample_bytes : 0.5;
    return setup->micro * sample * (setup->is_16 ? half : 1) * in_flight;
}

/* ---- The whole ----------------------------------------------------------------------------------------------------------- */

/* Sharded parameters: three units that live, as is usual, and the gradients of two. Tensor parallelism: gradients have no
 * buffer of Shoal's. The backward pass of the loss makes two more values like the logits before it makes gradients. */
static double buffer_bytes(const struct advise_model *model, const struct advise_setup *setup, double gradients)
{
    const double e = value_bytes(setup), largest = e * model->largest_tensor / setup->tensor;
    if (setup->shards == ADVISE_PARAMETER_SHARDS)
        return (3 + 2) * e * model->largest_unit / setup->tensor;
    return setup->tensor > 1 && setup->stages <= 1 ? fmax(largest, 2 * logits_bytes(model, setup) - gradients) : largest;
}

struct advise_memory advise_memory_of(const struct advise_model *model, const struct advise_setup *setup)
{
    const double cut = setup->tensor * setup->stages, mine = model->parameters / cut, e = value_bytes(setup);
    const double of_states = setup->shards != ADVISE_WHOLE ? setup->shard_workers : 1;
    const double of_weights = setup->shards == ADVISE_PARAMETER_SHARDS ? setup->shard_workers : 1;
    struct advise_memory memory = {.constant = setup->constant_bytes};
    memory.weights = e * mine / of_weights;
    memory.gradients = e * mine / of_weights;
    memory.states = 4 * setup->states * mine / of_states;
    memory.master = setup->is_16 ? 4 * mine / of_states : 0;
    memory.activations = activation_bytes(model, setup);
    memory.buffers = buffer_bytes(model, setup, memory.gradients);
    memory.total = memory.weights + memory.gradients + memory.states + memory.master + memory.activations + memory.buffers +
                   memory.constant;
    return memory;
}

/* ---- The ladder ---------------------------------------------------------------------------------------------------------- */

struct climb {
    const struct advise_model *model;
    const struct advise_setup *wanted;
    const struct advise_limits *limits;
};

static double per_replica(const struct climb *climb, const struct advise_setup *setup)
{
    return ceil(climb->limits->batch * setup->tensor * setup->stages / climb->limits->workers);
}

/* Measures a setup. Returns true if it fits. */
static bool rung_try(const struct climb *climb, struct advise_rung *rung)
{
    struct advise_setup *setup = &rung->setup;
    rung->per_replica = per_replica(climb, setup);
    rung->microbatches = ceil(rung->per_replica / setup->micro);
    setup->in_flight = setup->stages > 1 ? fmin(setup->stages, rung->microbatches) : 1;
    rung->memory = advise_memory_of(climb->model, setup);
    rung->why = rung->memory.total <= climb->limits->usable_bytes ? ADVISE_FITS : ADVISE_TOO_LARGE;
    return rung->why == ADVISE_FITS;
}

/* Tries microbatches from `most` samples down to one, each half of the one before. */
static bool micro_try(const struct climb *climb, struct advise_rung *rung, double most)
{
    for (double micro = most;; micro = ceil(micro / 2)) {
        rung->setup.micro = micro;
        if (rung_try(climb, rung) || micro <= 1)
            return rung->why == ADVISE_FITS;
    }
}

static bool can_recompute(const struct advise_model *model)
{
    return model->layers || model->recomputed_bytes > 0;
}

/* Tries the program as it is, then with 16 bits, then also with recomputation. */
static bool forms_try(const struct climb *climb, struct advise_rung *rung, double most)
{
    rung->setup.is_16 = climb->wanted->is_16;
    rung->setup.recomputes = climb->wanted->recomputes;
    if (micro_try(climb, rung, most))
        return true;
    rung->setup.is_16 = true;
    if (micro_try(climb, rung, most) || !can_recompute(climb->model))
        return rung->why == ADVISE_FITS;
    rung->setup.recomputes = true;
    return micro_try(climb, rung, most);
}

/* The ways in which every worker has the whole model. */
static void whole_climb(const struct climb *climb, struct advise_rung *rung)
{
    const double most = per_replica(climb, &rung->setup);
    const bool is_together = rung->kind == ADVISE_WAY_TOGETHER;
    rung->setup.micro = most;
    rung->setup.is_16 |= rung->kind == ADVISE_WAY_HALF || is_together;
    rung->setup.recomputes |= rung->kind == ADVISE_WAY_RECOMPUTE || (is_together && can_recompute(climb->model));
    if (rung->kind == ADVISE_WAY_RECOMPUTE && !can_recompute(climb->model))
        rung->why = ADVISE_NOT_KNOWN;
    else if (rung->kind == ADVISE_WAY_SMALLER || is_together)
        micro_try(climb, rung, most);
    else
        rung_try(climb, rung);
}

static void shards_climb(const struct climb *climb, struct advise_rung *rung)
{
    rung->setup.shards = rung->kind == ADVISE_WAY_OPTIMIZER ? ADVISE_OPTIMIZER_SHARDS : ADVISE_PARAMETER_SHARDS;
    rung->setup.shard_workers = climb->limits->workers;
    if (climb->limits->workers > 1)
        forms_try(climb, rung, per_replica(climb, &rung->setup));
    else
        rung->why = ADVISE_ONE_WORKER;
}

static bool divides(double part, double whole)
{
    return fmod(whole, part) == 0;
}

/* A replica of several workers needs a sample at least, so more of them never need a larger batch. */
static void tensor_climb(const struct climb *climb, struct advise_rung *rung)
{
    rung->why = climb->limits->workers > 1 ? ADVISE_NOT_POSSIBLE : ADVISE_ONE_WORKER;
    for (double degree = 2; climb->model->layers && degree <= climb->limits->per_machine; degree++) {
        if (!divides(degree, climb->limits->per_machine) || !divides(degree, climb->model->heads))
            continue;
        rung->setup.tensor = degree;
        if (forms_try(climb, rung, per_replica(climb, &rung->setup)))
            return;
    }
}

/* Four microbatches for each stage, if the batch has as many samples: fewer leave stages idle. */
static double pipeline_micro(double samples, double stages)
{
    return fmax(1, floor(samples / (4 * stages)));
}

static double layers_of(const struct advise_model *model)
{
    return model->layers ? (double)model->layers : floor(model->parameters / fmax(model->largest_unit, 1));
}

static void pipeline_climb(const struct climb *climb, struct advise_rung *rung)
{
    const double groups = climb->limits->workers / rung->setup.tensor;
    rung->why = climb->limits->workers > 1 ? ADVISE_NOT_POSSIBLE : ADVISE_ONE_WORKER;
    for (double stages = 2; stages <= groups && stages <= layers_of(climb->model); stages++) {
        if (!divides(stages, groups))
            continue;
        rung->setup.stages = stages;
        if (forms_try(climb, rung, pipeline_micro(per_replica(climb, &rung->setup), stages)))
            return;
    }
}

/* Takes as many workers of a machine for tensor parallelism as heads allow. */
static void both_climb(const struct climb *climb, struct advise_rung *rung)
{
    double degree = climb->limits->per_machine;
    while (degree > 1 && !(divides(degree, climb->limits->per_machine) && divides(degree, climb->model->heads)))
        degree--;
    rung->why = climb->limits->workers > 1 ? ADVISE_NOT_POSSIBLE : ADVISE_ONE_WORKER;
    if (!climb->model->layers || degree <= 1)
        return;
    rung->setup.tensor = degree;
    pipeline_climb(climb, rung);
}

static void rung_climb(const struct climb *climb, struct advise_rung *rung)
{
    switch (rung->kind) {
    case ADVISE_WAY_OPTIMIZER:
    case ADVISE_WAY_PARAMETERS:
        shards_climb(climb, rung);
        return;
    case ADVISE_WAY_TENSOR:
        tensor_climb(climb, rung);
        return;
    case ADVISE_WAY_PIPELINE:
        pipeline_climb(climb, rung);
        return;
    case ADVISE_WAY_BOTH:
        both_climb(climb, rung);
        return;
    default:
        whole_climb(climb, rung);
    }
}

int advise_ladder(const struct advise_model *model, const struct advise_setup *wanted, const struct advise_limits *limits,
                  struct advise_rung rungs_out[ADVISE_WAYS])
{
    const struct climb climb = {model, wanted, limits};
    int first = ADVISE_WAYS;
    for (int kind = 0; kind < ADVISE_WAYS; kind++) {
        struct advise_rung *rung = &rungs_out[kind];
        *rung = (struct advise_rung){.kind = (enum advise_way_kind)kind, .setup = *wanted};
        rung->setup.shards = ADVISE_WHOLE;
        rung->setup.shard_workers = rung->setup.tensor = rung->setup.stages = rung->setup.micro = 1;
        rung_climb(&climb, rung);
        if (rung->why == ADVISE_FITS && first == ADVISE_WAYS)
            first = kind;
    }
    return first;
}
