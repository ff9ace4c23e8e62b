#include "advise_model.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "step/step_rule.h"

/* Backward passes cost twice as much as forward passes: two products instead of one. */
static const double forward_share = 1.0 / 3;

/* Each of ResNet-50's 53 convolutions is followed by a batch norm. Its output is kept for the norm and, after the activation
 * in place, for the next convolution. The four that make a block's input fit its output are only added, and kept once.
 * Values at 224 x 224: 11,113,984 in all outputs, 1,505,280 of them in these four; an image has 150,528, and the pooling
 * keeps 200,704 with indices of 8 bytes. With recomputation of blocks: the inputs of all 16 blocks (5,619,712), what comes
 * before them, and the largest block (layer1.0: outputs of 1,204,224 twice, 802,816 once). A forward pass costs 4.09e9
 * multiplications and as many additions. */
static struct advise_facts resnet50_facts(void)
{
    const double pooled = 12 * 200704.0, image = 4 * 150528.0;
    return (struct advise_facts){
        .model = {.sample_bytes = 8 * (11113984.0 - 1505280) + 4 * 1505280.0 + pooled + image,
                  .recomputed_bytes = 4 * 5619712.0 + 8 * 802816.0 + pooled + image + 8 * 1204224.0 + 4 * 802816.0,
                  .largest_unit = 6039552}, /* layer4.0 */
        .sample_flop = 3 * 2 * 4.09e9,
        .use_16 = 0.2,
        .use_32 = 0.5,
        .batch_norms = 53,
        .optimizer = STEP_RULE_MOMENTUM,
    };
}

double advise_transformer_flop(const struct advise_model *model)
{
    const double layers = (double)model->layers, s = model->sequence, h = model->width;
    return 72 * layers * s * h * h * (1 + s / (6 * h) + model->vocabulary / (12 * h * layers));
}

static struct advise_facts transformer_facts(size_t layers, double width, double heads, double sequence, double vocabulary)
{
    struct advise_facts facts = {
        .model = {.layers = layers,
                  .width = width,
                  .heads = heads,
                  .sequence = sequence,
                  .vocabulary = vocabulary,
                  .largest_unit = 12 * width * width + 13 * width},
        .use_16 = 0.4,
        .use_32 = 0.5,
        .optimizer = STEP_RULE_ADAMW,
    };
    facts.sample_flop = advise_transformer_flop(&facts.model);
    return facts;
}

/* Returns the length of the name of a tensor's unit: the member of a list ("blocks.3" of "blocks.3.feed.0.weight"), or else the
 * module or layer that has the tensor. */
static size_t unit_length(const char *name)
{
    size_t owner = 0;
    for (const char *at = name; *at; at += *at != 0) {
        const size_t length = strcspn(at, "./"), digits = strspn(at, "0123456789");
        if (length && length == digits)
            return (size_t)(at - name) + length;
        owner = at[length] ? (size_t)(at - name) + length : owner;
        at += length;
    }
    return owner;
}

/* Sums tensors of one unit, which become ready one after the other. */
static double largest_unit_of(const struct step_profile *profile)
{
    double most = 0, sum = 0;
    for (size_t i = 0; i < profile->count; i++) {
        const struct step_tensor *tensor = &profile->tensors[i], *before = &profile->tensors[i ? i - 1 : 0];
        const size_t length = unit_length(tensor->name);
        const bool is_same =
            i > 0 && length > 0 && length == unit_length(before->name) && !strncmp(tensor->name, before->name, length);
        sum = (is_same ? sum : 0) + (double)tensor->elements;
        most = fmax(most, sum);
    }
    return most;
}

struct advise_facts advise_facts_of(const struct step_profile *profile)
{
    struct advise_facts facts = {.batch_norms = -1, .optimizer = STEP_RULE_ADAMW};
    const char *name = profile->is_built_in ? profile->name : "";
    if (!strcmp(name, "resnet50"))
        facts = resnet50_facts();
    if (!strcmp(name, "bert-large"))
        facts = transformer_facts(24, 1024, 16, 512, 30522);
    if (!strcmp(name, "gpt2")) {
        facts = transformer_facts(12, 768, 12, 1024, 50257);
        facts.model.composed = 12; /* three values of each of 4 h: transformers makes its GELU of several operations */
    }
    if (profile->facts.is_there) {
        facts.model.sample_bytes = profile->facts.activation_bytes;
        facts.model.sample_16_bytes = profile->facts.activation_16_bytes;
        facts.model.recomputed_bytes = profile->facts.recomputed_bytes;
        facts.batch_norms = (int)fmin((double)profile->facts.batch_norms, INT_MAX);
    }
    facts.forward_share = forward_share;
    facts.model.parameters = (double)profile->elements;
    for (size_t i = 0; i < profile->count; i++)
        facts.model.largest_tensor = fmax(facts.model.largest_tensor, (double)profile->tensors[i].elements);
    facts.model.largest_unit = fmax(facts.model.largest_unit, largest_unit_of(profile));
    return facts;
}
