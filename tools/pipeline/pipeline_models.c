/* The built-in models as units of a pipeline. Parameters and FLOP come from the modules of step_models.c. A layer that is
 * applied to T positions costs as many FLOP in its forward pass as for each of its gradients, 2 T for each element of its
 * weight. The products of attention have no weights: their gradients are input gradients, of twice the forward pass. Norms,
 * activations and embeddings do not count.
 *
 * Kept bytes are those of the tensors that PyTorch keeps in float32 without dropout: the input of each layer, norm and
 * activation, each tensor once; queries, keys, values and the softmax of attention; the logarithms of the probabilities. */
#include "pipeline_profile.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step/step_profile.h"
#include "tool.h"

enum { UNITS_MAX = 64, UNIT_NAME = 32, FLOAT_BYTES = 4, INDEX_BYTES = 8 };

/* A module whose name begins with `prefix` belongs to unit `name`, or to that of its first two parts behind `skip`
 * characters. */
struct rule {
    const char *prefix, *name;
    size_t skip;
};

/* Bytes of one sample. */
struct sizes {
    double kept, output;
};

struct model {
    const char *word;
    struct rule rules[5]; /* the first that fits counts; the last has the prefix "" */
    struct sizes (*sizes_of)(const char *unit);
    size_t tied; /* elements that the first and the last unit share */
};

/* ---- Sizes --------------------------------------------------------------------------------------------------------------- */

/* A block of a transformer: inputs of two norms, of the projections of attention (3 d behind one or three), of both linear
 * layers and of the activation between them; and the softmax of each head. */
static double block_kept(double positions, double width, double heads)
{
    return FLOAT_BYTES * positions * (16 * width + heads * positions);
}

static struct sizes gpt2_sizes(const char *unit)
{
    const double positions = 1024, width = 768, words = 50257, output = FLOAT_BYTES * positions * width;
    if (!strcmp(unit, "embeddings"))
        return (struct sizes){INDEX_BYTES * positions, output};
    if (!strcmp(unit, "head")) /* inputs of the norm and of the product, logarithms of probabilities */
        return (struct sizes){FLOAT_BYTES * positions * (2 * width + words), FLOAT_BYTES};
    return (struct sizes){block_kept(positions, width, 12), output};
}

static struct sizes bert_sizes(const char *unit)
{
    const double positions = 512, width = 1024, words = 30522, output = FLOAT_BYTES * positions * width;
    if (!strcmp(unit, "embeddings"))
        return (struct sizes){2 * INDEX_BYTES * positions + output, output};
    if (!strcmp(unit, "head")) /* inputs of layer, activation, norm and product, logarithms of probabilities */
        return (struct sizes){FLOAT_BYTES * positions * (4 * width + words), FLOAT_BYTES};
    return (struct sizes){block_kept(positions, width, 16), output};
}

/* Convolutions keep their inputs, batch norms theirs; activations work in place. Only the last block's activation is kept by
 * the unit behind it. */
static struct sizes resnet50_sizes(const char *unit)
{
    const double image = 3 * 224 * 224, stem = 112 * 112 * 64, pooled = 56 * 56 * 64;
    if (!strcmp(unit, "stem"))
        return (struct sizes){FLOAT_BYTES * (image + 2 * stem) + INDEX_BYTES * pooled, FLOAT_BYTES * pooled};
    if (!strcmp(unit, "fc"))
        return (struct sizes){FLOAT_BYTES * (7 * 7 * 2048 + 2048 + 1000), FLOAT_BYTES};
    const int layer = unit[5] - '1', block = atoi(unit + 7); /* "layer2.0" */
    const double width = 64 << layer, area = (56 >> layer) * (56 >> layer);
    const double before = block == 0 && layer > 0 ? 4 * area : area; /* the first block halves the sides */
    const double inputs = block ? 4 * width : layer ? 2 * width : 64;
    const double own = before * (inputs + 2 * width) + area * (2 * width + 4 * width + (block ? 0 : 4 * width));
    return (struct sizes){FLOAT_BYTES * own, FLOAT_BYTES * area * 4 * width};
}

static const struct model models[] = {
    {"gpt2", {{"w", "embeddings", 0}, {"h.", NULL, 0}, {"", "head", 0}}, gpt2_sizes, (size_t)50257 * 768},
    {"bert-large",
     {{"bert.embeddings.", "embeddings", 0}, {"bert.encoder.layer.", NULL, sizeof "bert.encoder." - 1}, {"", "head", 0}},
     bert_sizes,
     (size_t)30522 * 1024},
    {"resnet50", {{"layer", NULL, 0}, {"fc", "fc", 0}, {"", "stem", 0}}, resnet50_sizes, 0},
};

/* ---- Units --------------------------------------------------------------------------------------------------------------- */

/* FLOP of one sample. */
struct unit {
    char name[UNIT_NAME];
    size_t elements;
    double forward, input, weight;
};

struct units {
    const struct model *model;
    struct unit at[UNITS_MAX];
    size_t count;
};

/* Writes the name of a module's unit. */
static void name_unit(const struct model *model, const char *module, char name[UNIT_NAME])
{
    const struct rule *rule = model->rules;
    while (strncmp(module, rule->prefix, strlen(rule->prefix)) != 0)
        rule++;
    snprintf(name, UNIT_NAME, "%s", rule->name ? rule->name : module + rule->skip);
    char *dot = rule->name ? NULL : strchr(name, '.');
    dot = dot ? strchr(dot + 1, '.') : NULL;
    if (dot)
        *dot = '\0';
}

static struct unit *find_unit_of(struct units *units, const char *module)
{
    char name[UNIT_NAME];
    name_unit(units->model, module, name);
    for (size_t i = 0; i < units->count; i++)
        if (!strcmp(units->at[i].name, name))
            return &units->at[i];
    struct unit *added = &units->at[units->count++];
    memcpy(added->name, name, sizeof name);
    return added;
}

static void add_module(const struct step_module *module, void *arg)
{
    struct units *units = arg;
    struct unit *unit = find_unit_of(units, module->name);
    const bool is_head = !strcmp(unit->name, "head"), is_first = !strcmp(module->name, "conv1");
    unit->elements += module->elements;
    unit->forward += is_first ? module->work : module->work / 2; /* images need no gradient */
    unit->input += is_first ? 0 : module->work / 2;
    unit->weight += is_first ? module->work : module->work / 2;
    unit->forward += module->before / 2;
    unit->input += is_head ? module->before / 2 : module->before;
    unit->weight += is_head ? module->before / 2 : 0; /* with the weights of the embedding */
}

static enum shoal_status add_unit_to(struct shoal_profile *profile, const struct units *units, size_t i,
                                     const struct pipeline_model *how)
{
    const struct unit *unit = &units->at[i];
    const struct sizes sizes = units->model->sizes_of(unit->name);
    const double us = how->samples / (how->tflop_s * 1e6);
    const bool is_last = i + 1 == units->count;
    struct shoal_unit added = SHOAL_UNIT_INIT;
    added.name = unit->name;
    added.forward = unit->forward * us;
    added.input_gradient = unit->input * us;
    added.weight_gradient = unit->weight * us;
    added.parameter_bytes = FLOAT_BYTES * (unit->elements + (is_last ? units->model->tied : 0));
    added.kept_bytes = (uint64_t)(sizes.kept * how->samples);
    added.output_bytes = (uint64_t)(sizes.output * how->samples);
    return shoal_profile_add_unit(profile, &added, NULL, 0);
}

static enum shoal_status fill_profile(struct shoal_profile *profile, const struct units *units,
                                      const struct pipeline_model *how)
{
    const uint32_t ends[] = {0, (uint32_t)units->count - 1};
    enum shoal_status status = SHOAL_OK;
    for (size_t i = 0; i < units->count && status == SHOAL_OK; i++)
        status = add_unit_to(profile, units, i, how);
    if (status == SHOAL_OK && units->model->tied)
        status = shoal_profile_add_tie(profile, ends, 2, FLOAT_BYTES * units->model->tied, NULL, 0);
    return status;
}

int pipeline_model_open(const char *command, const char *word, const struct pipeline_model *how,
                        struct shoal_profile **profile_out)
{
    struct units units = {.count = 0};
    struct shoal_profile *profile = NULL;
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (!strcmp(models[i].word, word))
            units.model = &models[i];
    if (!units.model)
        return -1;
    if (step_model_visit(word, add_module, &units) == 0 && shoal_profile_create(word, &profile) == SHOAL_OK &&
        fill_profile(profile, &units, how) == SHOAL_OK) {
        *profile_out = profile;
        return 0;
    }
    shoal_profile_free(profile);
    fprintf(stderr, "shoal %s: no memory\n", command);
    return 1;
}
