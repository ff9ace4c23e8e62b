/* The memory of a worker while it trains, part by part, and the first way of training that fits, for `shoal advise`. Pure
 * functions; reentrant. Bytes are doubles, because models may exceed any machine.
 *
 * A worker holds weights, gradients, states of the optimizer and, with 16 bits, a master of each weight (Rajbhandari et al.
 * 2020, arXiv 1910.02054), and what the forward pass keeps for the backward pass (Korthikanti et al. 2022, arXiv
 * 2205.05198). */
#ifndef SHOAL_TOOLS_ADVISE_MEMORY_H
#define SHOAL_TOOLS_ADVISE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/* What the memory of a model depends on. */
struct advise_model {
    double parameters;
    double largest_tensor; /* parameters of the largest tensor */
    double largest_unit;   /* parameters of the largest layer, which sharded parameters gather together */
    size_t layers;         /* if it is a transformer; else 0 */
    double width, heads, sequence, vocabulary;
    double composed;     /* values for each position and column that an activation keeps if it is made of several operations */
    double sample_bytes; /* if it is not a transformer: activations of a sample in float32; 0: not known */
    double sample_16_bytes;  /* the same in 16 bits; 0: half of it */
    double recomputed_bytes; /* sample_bytes with recomputation; 0: not known */
};

enum advise_shards { ADVISE_WHOLE, ADVISE_OPTIMIZER_SHARDS, ADVISE_PARAMETER_SHARDS };

/* How a model is trained. */
struct advise_setup {
    double micro;         /* samples of a microbatch */
    bool is_16;           /* weights, gradients and activations have 16 bits, with float32 masters */
    bool recomputes;      /* layers are computed again in the backward pass */
    bool has_value_masks; /* masks of dropout have the type of values, as torch's on CPUs have; else a byte */
    bool fuses_attention; /* scores of attention are not kept, as in flash attention */
    enum advise_shards shards;
    double shard_workers;  /* that share states or parameters */
    double tensor, stages; /* degrees; 1: none */
    double in_flight;      /* microbatches that the first stage keeps */
    double states;         /* values that the optimizer keeps of each parameter */
    double constant_bytes; /* that the driver, kernels and the process take */
};

/* Bytes of a worker. */
struct advise_memory {
    double weights, gradients, states, master, activations;
    double buffers; /* a gradient before it is copied into Shoal's buffer, and units that are gathered */
    double constant;
    double total;
};

struct advise_memory advise_memory_of(const struct advise_model *model, const struct advise_setup *setup);

/* Returns the bytes of activations of one layer of a transformer, for a microbatch. */
double advise_layer_bytes(const struct advise_model *model, const struct advise_setup *setup);

/* ---- The ladder ---------------------------------------------------------------------------------------------------------- */

/* Ways of training, in the order in which they are tried: name, word, meaning. */
#define ADVISE_WAY_LIST(X)                                                                          \
    X(DATA, "data parallel", "every worker has the whole model")                                    \
    X(SMALLER, "smaller batch", "a worker computes its samples in several microbatches")            \
    X(HALF, "16 bit", "weights, gradients and activations in 16 bits, with float32 masters")        \
    X(RECOMPUTE, "recomputation", "activations of a layer are computed again when they are needed") \
    X(TOGETHER, "these three together", "smaller batch, 16 bit and recomputation")                  \
    X(OPTIMIZER, "sharded optimizer", "each worker has its share of the optimizer's states")        \
    X(PARAMETERS, "sharded parameters", "each worker has its share of everything but activations")  \
    X(TENSOR, "tensor parallel", "the workers of a machine compute each layer together")            \
    X(PIPELINE, "pipeline", "each worker has a stage of the model")                                 \
    X(BOTH, "tensor and pipeline", "machines are stages, and their workers compute layers together")

enum advise_way_kind {
#define ADVISE_WAY_ENUM(name, word, text) ADVISE_WAY_##name,
    ADVISE_WAY_LIST(ADVISE_WAY_ENUM)
#undef ADVISE_WAY_ENUM
        ADVISE_WAYS
};

extern const char *const advise_way_names[ADVISE_WAYS], *const advise_way_texts[ADVISE_WAYS];

/* Why a way is not the answer. */
enum advise_why {
    ADVISE_FITS,
    ADVISE_TOO_LARGE,    /* even its smallest form needs more memory than there is */
    ADVISE_ONE_WORKER,   /* there is one worker, which cannot share */
    ADVISE_NOT_POSSIBLE, /* the model has no layers of this kind, or no degree divides workers and heads */
    ADVISE_NOT_KNOWN     /* what recomputation saves of this model */
};

struct advise_rung {
    enum advise_way_kind kind;
    enum advise_why why;
    struct advise_setup setup;   /* the one that fits, or the smallest that was tried; undefined from ONE_WORKER on */
    struct advise_memory memory; /* of that setup */
    double per_replica;          /* samples of a replica in a step */
    double microbatches;         /* that a replica computes in a step */
};

struct advise_limits {
    double workers, per_machine; /* per_machine: workers that are close enough for tensor parallelism */
    double batch;                /* samples of a step */
    double usable_bytes;         /* of a worker */
};

/* Tries all ways. wanted has precision, states, recomputation and constant of the program as it is; its microbatch and
 * degrees are ignored. Pipelines run 1F1B, whose first stage keeps as many microbatches as there are stages, or all. Returns
 * the index of the first rung that fits, or ADVISE_WAYS if none does. */
int advise_ladder(const struct advise_model *model, const struct advise_setup *wanted, const struct advise_limits *limits,
                  struct advise_rung rungs_out[ADVISE_WAYS]);

#endif
