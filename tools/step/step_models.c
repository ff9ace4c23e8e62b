/* The built-in models, from their structure: modules in the order of their registration, each with the arithmetic of its
 * backward pass. A weight that is applied to T positions costs two products, 4 T FLOP for each of its elements, or half of that
 * if its input needs no gradient. Norms, biases, additions and activations do not count.
 *
 * The backward pass visits modules in reverse, unless `turn` changes that. A module's parameters are ready when its work is
 * done: for a norm the weight before the bias, for other modules the bias first, in the order of PyTorch's autograd. */
#include "step_profile.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MODULES_MAX = 512 };

struct module {
    char name[STEP_NAME_BYTES - 8];
    bool is_norm;
    size_t weight, bias; /* elements, or 0 */
    double work;         /* FLOP of its own backward pass */
    double before;       /* FLOP between the previously visited module and this one: attention, a head with tied weights */
    double turn;         /* modules with larger values are visited earlier */
    size_t index;        /* index of its first parameter */
};

struct model {
    struct module modules[MODULES_MAX];
    size_t count, parameters;
};

__attribute__((format(printf, 3, 4))) static struct module *add(struct model *model, struct module module, const char *format,
                                                                ...)
{
    struct module *added = &model->modules[model->count];
    va_list args;
    module.turn = (double)model->count++;
    module.index = model->parameters;
    model->parameters += (size_t)(module.weight > 0) + (size_t)(module.bias > 0);
    va_start(args, format);
    vsnprintf(module.name, sizeof module.name, format, args);
    va_end(args);
    *added = module;
    return added;
}

static struct module norm(size_t width)
{
    return (struct module){.is_norm = true, .weight = width, .bias = width};
}

/* Also makes a convolution, with the positions of its output and no bias. */
static struct module linear(size_t weight, size_t bias, double positions)
{
    return (struct module){.weight = weight, .bias = bias, .work = 4 * positions * (double)weight};
}

/* Its backward pass only adds rows. */
static struct module embedding(size_t rows, size_t width)
{
    return (struct module){.weight = rows * width};
}

/* ---- ResNet-50, images of 224 x 224 -------------------------------------------------------------------------------------- */

struct stage {
    int blocks;
    size_t inputs, width;
    double side; /* side of its images; the first block's first convolution sees those of the previous stage */
};

static void block_add(struct model *model, const struct stage *stage, int layer, int block)
{
    const size_t p = stage->width, inputs = block ? 4 * p : stage->inputs;
    const double positions = stage->side * stage->side;
    const bool is_halving = block == 0 && layer > 1;
    add(model, linear(inputs * p, 0, is_halving ? 4 * positions : positions), "layer%d.%d.conv1", layer, block);
    add(model, norm(p), "layer%d.%d.bn1", layer, block);
    add(model, linear(9 * p * p, 0, positions), "layer%d.%d.conv2", layer, block);
    add(model, norm(p), "layer%d.%d.bn2", layer, block);
    add(model, linear(4 * p * p, 0, positions), "layer%d.%d.conv3", layer, block);
    add(model, norm(4 * p), "layer%d.%d.bn3", layer, block);
    if (block)
        return;
    add(model, linear(4 * inputs * p, 0, positions), "layer%d.%d.downsample.0", layer, block);
    add(model, norm(4 * p), "layer%d.%d.downsample.1", layer, block);
}

static void resnet50_build(struct model *model)
{
    static const struct stage stages[] = {{3, 64, 64, 56}, {4, 256, 128, 28}, {6, 512, 256, 14}, {3, 1024, 512, 7}};
    add(model, linear((size_t)3 * 64 * 7 * 7, 0, 112 * 112 / 2.0), "conv1"); /* images need no gradient */
    add(model, norm(64), "bn1");
    for (int layer = 1; layer <= 4; layer++)
        for (int block = 0; block < stages[layer - 1].blocks; block++)
            block_add(model, &stages[layer - 1], layer, block);
    add(model, linear((size_t)2048 * 1000, 1000, 1), "fc");
}

/* ---- Transformers -------------------------------------------------------------------------------------------------------- */

/* Two products of s x s x d, twice each in the backward pass. */
static double attention(double positions, double width)
{
    return 8 * positions * positions * width;
}

static void gpt2_block_add(struct model *model, int block)
{
    const size_t d = 768;
    const double positions = 1024;
    add(model, norm(d), "h.%d.ln_1", block);
    add(model, linear(3 * d * d, 3 * d, positions), "h.%d.attn.c_attn", block)->before = attention(positions, (double)d);
    add(model, linear(d * d, d, positions), "h.%d.attn.c_proj", block);
    add(model, norm(d), "h.%d.ln_2", block);
    add(model, linear(4 * d * d, 4 * d, positions), "h.%d.mlp.c_fc", block);
    add(model, linear(4 * d * d, d, positions), "h.%d.mlp.c_proj", block);
}

/* The head's weight is wte. Its product comes first, but its gradient is complete only after the embedding has also been
 * added. */
static void gpt2_build(struct model *model)
{
    const size_t d = 768, words = 50257;
    const double positions = 1024;
    add(model, embedding(words, d), "wte");
    add(model, embedding(1024, d), "wpe");
    for (int block = 0; block < 12; block++)
        gpt2_block_add(model, block);
    add(model, norm(d), "ln_f")->before = linear(words * d, 0, positions).work;
}

static void bert_layer_add(struct model *model, int layer)
{
    const size_t d = 1024;
    const double positions = 512;
    add(model, linear(d * d, d, positions), "bert.encoder.layer.%d.attention.self.query", layer);
    add(model, linear(d * d, d, positions), "bert.encoder.layer.%d.attention.self.key", layer);
    add(model, linear(d * d, d, positions), "bert.encoder.layer.%d.attention.self.value", layer)->before =
        attention(positions, (double)d);
    add(model, linear(d * d, d, positions), "bert.encoder.layer.%d.attention.output.dense", layer);
    add(model, norm(d), "bert.encoder.layer.%d.attention.output.LayerNorm", layer);
    add(model, linear(4 * d * d, 4 * d, positions), "bert.encoder.layer.%d.intermediate.dense", layer);
    add(model, linear(4 * d * d, d, positions), "bert.encoder.layer.%d.output.dense", layer);
    add(model, norm(d), "bert.encoder.layer.%d.output.LayerNorm", layer);
}

/* Autograd visits the position embedding before the type embedding, and the decoder, whose weight is word_embeddings, before
 * the modules that feed it. */
static void bert_build(struct model *model)
{
    const size_t d = 1024, words = 30522;
    const double positions = 512;
    add(model, embedding(words, d), "bert.embeddings.word_embeddings");
    add(model, embedding(512, d), "bert.embeddings.position_embeddings")->turn += 1.5;
    add(model, embedding(2, d), "bert.embeddings.token_type_embeddings");
    add(model, norm(d), "bert.embeddings.LayerNorm");
    for (int layer = 0; layer < 24; layer++)
        bert_layer_add(model, layer);
    add(model, linear(d * d, d, 1), "bert.pooler.dense");
    struct module *decoder = add(model, (struct module){.bias = words}, "cls.predictions");
    decoder->before = linear(words * d, 0, positions).work;
    add(model, linear(d * d, d, positions), "cls.predictions.transform.dense");
    decoder->turn = add(model, norm(d), "cls.predictions.transform.LayerNorm")->turn + 0.5;
    add(model, linear(2 * d, 2, 1), "cls.seq_relationship");
}

/* ---- The profile --------------------------------------------------------------------------------------------------------- */

static int by_turn(const void *a, const void *b)
{
    const struct module *x = a, *y = b;
    return (x->turn < y->turn) - (x->turn > y->turn);
}

static void tensor_add(struct step_profile *profile, const struct module *module, bool is_weight, double done)
{
    struct step_tensor *tensor = &profile->tensors[profile->count];
    const size_t elements = is_weight ? module->weight : module->bias;
    if (!elements)
        return;
    snprintf(tensor->name, sizeof tensor->name, "%s.%s", module->name, is_weight ? "weight" : "bias");
    tensor->elements = elements;
    tensor->index = module->index + (!is_weight && module->weight > 0);
    tensor->ready = done;
    profile->elements += elements;
    profile->count++;
}

static void profile_fill(struct step_profile *profile, struct model *model)
{
    double all = 0, done = 0;
    qsort(model->modules, model->count, sizeof model->modules[0], by_turn);
    for (size_t i = 0; i < model->count; i++)
        all += model->modules[i].before + model->modules[i].work;
    for (size_t i = 0; i < model->count; i++) {
        const struct module *module = &model->modules[i];
        done += module->before + module->work;
        tensor_add(profile, module, module->is_norm, done / all);
        tensor_add(profile, module, !module->is_norm, done / all);
    }
}

struct known_model {
    const char *name;
    void (*build)(struct model *model);
};

/* Returns NULL if the word is not a built-in model. */
static const struct known_model *model_find(const char *word)
{
    static const struct known_model models[] = {{"resnet50", resnet50_build}, {"bert-large", bert_build}, {"gpt2", gpt2_build}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (!strcmp(models[i].name, word))
            return &models[i];
    return NULL;
}

int step_model_open(struct step_profile *profile_out, const char *command, const char *word)
{
    const struct known_model *known = model_find(word);
    if (!known)
        return -1;
    struct model *model = calloc(1, sizeof *model);
    struct step_tensor *tensors = calloc(2 * MODULES_MAX, sizeof *tensors);
    if (model && tensors) {
        *profile_out = (struct step_profile){.tensors = tensors, .is_built_in = true};
        snprintf(profile_out->name, sizeof profile_out->name, "%s", word);
        known->build(model);
        profile_fill(profile_out, model);
    } else {
        fprintf(stderr, "shoal %s: no memory\n", command);
        free(tensors);
    }
    const int code = model && tensors ? 0 : 1;
    free(model);
    return code;
}

int step_model_visit(const char *word, step_visit_fn visit, void *arg)
{
    const struct known_model *known = model_find(word);
    struct model *model = known ? calloc(1, sizeof *model) : NULL;
    if (!known)
        return -1;
    if (!model)
        return 1;
    known->build(model);
    for (size_t i = 0; i < model->count; i++) {
        const struct module *module = &model->modules[i];
        const struct step_module seen = {module->name, module->weight + module->bias, module->work, module->before};
        visit(&seen, arg);
    }
    free(model);
    return 0;
}
