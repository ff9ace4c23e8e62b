#include "bench_step_optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static float *array_map(size_t elements)
{
    void *memory = mmap(NULL, elements * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    memset(memory, 0, elements * sizeof(float));
    return memory;
}

bool step_optimizer_open(struct step_optimizer *optimizer, const struct bench_step_options *options,
                         const struct shoal_parameter *parameters, const size_t *offsets, size_t elements)
{
    *optimizer = (struct step_optimizer){
        .options = options, .parameters = parameters, .offsets = offsets, .elements = elements, .steps = 1};
    optimizer->group = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    optimizer->group.decay = 0.01;
    if (options->optimizing.rule == STEP_RULE_SGD)
        optimizer->group.beta1 = 0;
    optimizer->in_reduction = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    optimizer->in_reduction.rule = step_rule_of(options->optimizing.rule);
    optimizer->in_reduction.groups = &optimizer->group;
    optimizer->in_reduction.group_count = 1;
    optimizer->in_reduction.degree = options->optimizing.degree;
    optimizer->in_reduction.steps_early = options->optimizing.clip == STEP_CLIP_EARLY;
    if (options->optimizing.rule == STEP_RULE_NONE || options->optimizing.is_sharded)
        return true;
    optimizer->weights = array_map(elements);
    bool is_there = optimizer->weights;
    for (size_t s = 0; s < step_rule_states(options->optimizing.rule); s++)
        is_there &= (optimizer->states[s] = array_map(elements)) != NULL;
    return is_there;
}

void step_optimizer_close(struct step_optimizer *optimizer)
{
    float *const arrays[] = {optimizer->weights, optimizer->states[0], optimizer->states[1]};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (arrays[i])
            munmap(arrays[i], optimizer->elements * sizeof(float));
}

static void range_step(const struct step_optimizer *optimizer, size_t count, const float *gradient, float *weights,
                       float *const states[2])
{
    struct shoal_optimizer_range range = SHOAL_OPTIMIZER_RANGE_INIT;
    range.count = count;
    range.gradient = gradient;
    range.parameter = weights;
    range.first = states[0];
    range.second = states[1];
    if (shoal_optimizer_update(step_rule_of(optimizer->options->optimizing.rule), &optimizer->group, optimizer->steps, 1,
                               &range) != SHOAL_OK)
        abort(); /* the settings above are possible */
}

void step_optimizer_run(const struct step_optimizer *optimizer, size_t parameter, const float *gradient)
{
    const size_t offset = optimizer->offsets[parameter];
    float *const states[] = {optimizer->states[0] ? optimizer->states[0] + offset : NULL,
                             optimizer->states[1] ? optimizer->states[1] + offset : NULL};
    range_step(optimizer, optimizer->parameters[parameter].count, gradient, optimizer->weights + offset, states);
}

size_t step_optimizer_bytes(const struct step_optimizer *optimizer, const struct shoal_reducer *reducer)
{
    if (optimizer->options->optimizing.is_sharded)
        return shoal_reducer_optimizer_bytes(reducer);
    return step_rule_states(optimizer->options->optimizing.rule) * optimizer->elements * sizeof(float);
}

double step_optimizer_errors(const struct step_optimizer *optimizer, const float *weights, const float *average, size_t count)
{
    enum { CHUNK = 1024 };
    double errors = 0;
    for (size_t begin = 0; begin < count; begin += CHUNK) {
        const size_t length = count - begin < CHUNK ? count - begin : CHUNK;
        float wanted[CHUNK] = {0}, first[CHUNK] = {0}, second[CHUNK] = {0};
        float *const states[] = {first, second};
        range_step(optimizer, length, average + begin, wanted, states);
        for (size_t i = 0; i < length; i++)
            errors += !(fabsf(weights[begin + i] - wanted[i]) <= 1e-5f * fabsf(wanted[i]) + 1e-9f);
    }
    return errors;
}
