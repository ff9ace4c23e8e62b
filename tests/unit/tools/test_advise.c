/* The arithmetic of `shoal advise`. Expected numbers are taken from the papers that comments name, or were computed by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include <shoal/pipeline.h>

#include "../../../tools/advise/advise_counts.h"
#include "../../../tools/advise/advise_memory.h"
#include "../../../tools/advise/advise_model.h"
#include "../../../tools/advise/advise_rate.h"
#include "../../../tools/advise/advise_shape.h"

static void assert_near(double value, double wanted, double error)
{
    if (fabs(value - wanted) > error)
        fail_msg("%.9g is not %.9g +- %g", value, wanted, error);
}

/* ---- Counts -------------------------------------------------------------------------------------------------------------- */

static struct advise_counts counts_of(size_t machines, size_t per_machine, size_t batch, size_t samples, double epochs)
{
    const struct advise_job job = {machines, per_machine, 1, batch, samples, epochs};
    struct advise_counts counts;
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_NONE);
    return counts;
}

static void counts_follow_from_machines_batch_and_samples(void **state)
{
    (void)state;
    assert_int_equal(counts_of(1, 1, 500, 5000, 1).kept, 10);
    assert_int_equal(counts_of(1, 1, 500, 5000, 1).last, 0);
    assert_int_equal(counts_of(2, 4, 8, 100, 1).workers, 8);
    const struct advise_counts uneven = counts_of(1, 1, 512, 5000, 3);
    assert_int_equal(uneven.dropped, 9);
    assert_int_equal(uneven.kept, 10);
    assert_int_equal(uneven.last, 392);
    assert_true(uneven.steps == 30 && uneven.samples_seen == 15000);
    const struct advise_counts two = counts_of(4, 8, 64, 1000, 1);
    assert_int_equal(two.workers, 32);
    assert_int_equal(two.replicas, 32);
    assert_int_equal(two.least, 2);
    assert_int_equal(two.most, 2);
    assert_int_equal(two.with_most, 32);
}

static void a_batch_that_workers_do_not_divide_is_spread(void **state)
{
    (void)state;
    const struct advise_counts counts = counts_of(1, 7, 45, 45, 0.5);
    assert_int_equal(counts.least, 6);
    assert_int_equal(counts.most, 7);
    assert_int_equal(counts.with_most, 3);
    assert_int_equal(counts.with_most * counts.most + (7 - counts.with_most) * counts.least, 45);
    assert_true(counts.steps == 1); /* half an epoch of one iteration */
}

static void a_degree_makes_fewer_replicas(void **state)
{
    (void)state;
    struct advise_counts counts;
    struct advise_job job = {4, 8, 16, 64, 1000, 1};
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_NONE);
    assert_int_equal(counts.workers, 32);
    assert_int_equal(counts.replicas, 2);
    assert_int_equal(counts.most, 32);
    job.degree = 5;
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_DEGREE);
}

static void counts_name_what_is_wrong(void **state)
{
    (void)state;
    const struct advise_job good = {4, 8, 1, 64, 1000, 1};
    struct advise_counts counts;
    for (int i = 0; i < 6; i++) {
        struct advise_job job = good;
        size_t *const numbers[] = {&job.machines, &job.per_machine, &job.degree, &job.batch, &job.samples};
        if (i < 5)
            *numbers[i] = 0;
        else
            job.epochs = NAN;
        assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_ZERO);
    }
    struct advise_job job = good;
    job.batch = 31;
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_BATCH);
    assert_int_equal(counts.workers, 32);
    job.batch = 1001;
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_SAMPLES);
    job.machines = SIZE_MAX / 8 + 1;
    assert_int_equal(advise_counts_find(&job, &counts), ADVISE_FAULT_HUGE);
}

/* Table of arXiv 1812.06162: at 0.25, 1 and 4 critical batches, 1.25, 2 and 5 times the fewest samples. */
static void samples_grow_with_the_batch(void **state)
{
    (void)state;
    assert_near(advise_samples_factor(1e-9, 250, 1000), 1.25, 1e-9);
    assert_near(advise_samples_factor(1000, 4000, 1000), 2.5, 1e-12);
    assert_near(advise_samples_factor(4000, 1000, 1000), 0.4, 1e-12);
    assert_true(advise_samples_factor(1, 1e9, 0) == 1);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static double kept_of(double parameters, double workers, enum advise_shards shards, double states, bool is_16)
{
    const struct advise_model model = {.parameters = parameters};
    const struct advise_setup setup = {.micro = 1,
                                       .is_16 = is_16,
                                       .shards = shards,
                                       .shard_workers = workers,
                                       .tensor = 1,
                                       .stages = 1,
                                       .in_flight = 1,
                                       .states = states};
    const struct advise_memory memory = advise_memory_of(&model, &setup);
    assert_near(memory.weights + memory.gradients + memory.states + memory.master, memory.total, 1);
    return memory.total / 1e9;
}

/* Figure 1 of arXiv 1910.02054, and a model of 8.03e9 parameters. */
static void states_take_what_zero_says(void **state)
{
    (void)state;
    assert_near(kept_of(7.5e9, 64, ADVISE_WHOLE, 2, true), 120, 1e-6);
    assert_near(kept_of(7.5e9, 64, ADVISE_OPTIMIZER_SHARDS, 2, true), 31.4, 0.01);
    assert_near(kept_of(7.5e9, 64, ADVISE_PARAMETER_SHARDS, 2, true), 1.875, 1e-6);
    assert_near(kept_of(8.03e9, 8, ADVISE_WHOLE, 2, true), 128.5, 0.05);
    assert_near(kept_of(8.03e9, 8, ADVISE_OPTIMIZER_SHARDS, 2, true), 44.2, 0.05);
    assert_near(kept_of(8.03e9, 64, ADVISE_PARAMETER_SHARDS, 2, true), 2.0, 0.05);
    assert_near(kept_of(1e9, 1, ADVISE_WHOLE, 0, false), 8, 1e-9);  /* SGD, float32 */
    assert_near(kept_of(1e9, 1, ADVISE_WHOLE, 1, false), 12, 1e-9); /* momentum */
    assert_near(kept_of(1e9, 1, ADVISE_WHOLE, 2, false), 16, 1e-9); /* Adam */
}

/* Figure 1 of arXiv 2205.05198: GiB of activations on the first stage, s = 2048, without the ends of the model. */
static void layers_keep_what_korthikanti_measured(void **state)
{
    (void)state;
    static const struct {
        double layers, width, heads, micro, kept, selective, full;
    } models[] = {
        {48, 6144, 64, 4, 59.25, 29.25, 4.5},
        {128, 25600, 160, 1, 131.25, 81.25, 12.5},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const struct advise_model model = {.layers = 1, .width = models[i].width, .heads = models[i].heads, .sequence = 2048};
        struct advise_setup setup = {.micro = models[i].micro, .is_16 = true, .tensor = 8, .stages = 1};
        assert_near(models[i].layers * advise_layer_bytes(&model, &setup) / 0x1p30, models[i].kept, 1e-9);
        setup.fuses_attention = true;
        assert_near(models[i].layers * advise_layer_bytes(&model, &setup) / 0x1p30, models[i].selective, 1e-9);
        assert_near(models[i].layers * 2 * 2048 * models[i].micro * models[i].width / 0x1p30, models[i].full, 1e-9);
    }
}

/* Recomputation keeps each layer's input and one whole layer. A first stage keeps as much as all layers together. */
static void recomputation_and_stages_change_activations(void **state)
{
    (void)state;
    const struct advise_model model = {.layers = 24, .width = 1024, .heads = 16, .sequence = 512, .vocabulary = 0};
    struct advise_setup setup = {.micro = 2, .is_16 = true, .tensor = 1, .stages = 1, .in_flight = 1};
    const double columns = 2 * 512 * 1024, layer = columns * (34 + 5 * 8), ends = columns * (1 + 4) + 8 * 1024;
    assert_near(advise_memory_of(&model, &setup).activations, 24 * layer + ends, 1);
    setup.recomputes = true;
    assert_near(advise_memory_of(&model, &setup).activations, 24 * 2 * columns + layer + ends, 1);
    setup.recomputes = false;
    setup.stages = setup.in_flight = 4;
    assert_near(advise_memory_of(&model, &setup).activations, 24 * layer + 4 * (columns + 8 * 1024), 1);
    setup.is_16 = false;
    setup.stages = 1;
    assert_near(advise_layer_bytes(&model, &setup), columns * (66 + 9 * 8), 1);
}

/* torch's CPUs have masks of values, and compute attention of 16 bits in float32. */
static void attention_of_cpus_is_in_float32(void **state)
{
    (void)state;
    const struct advise_model model = {.layers = 24, .width = 1024, .heads = 16, .sequence = 512, .vocabulary = 0};
    struct advise_setup setup = {.micro = 1, .is_16 = true, .tensor = 1, .stages = 1, .has_value_masks = true};
    const double columns = 512 * 1024;
    assert_near(advise_layer_bytes(&model, &setup), columns * (4 * 2 + 2 * 2 + 3 * 4 + 9 * 2 + 12 * 8), 1);
    setup.tensor = 4;
    assert_near(advise_layer_bytes(&model, &setup), columns * (4 * 2 + 2 * 2 + (3 * 4 + 9 * 2 + 12 * 8) / 4.0), 1);
    setup.fuses_attention = true;
    assert_near(advise_layer_bytes(&model, &setup), columns * (4 * 2 + 2 * 2 + 12 * 2 / 4.0), 1);
}

/* The loss gathers the logits, and its backward pass makes two more values like them before there are gradients. */
static void tensor_parallelism_gathers_logits(void **state)
{
    (void)state;
    const struct advise_model model = {
        .parameters = 100, .largest_tensor = 40, .layers = 1, .width = 64, .heads = 1, .sequence = 128, .vocabulary = 1e6};
    struct advise_setup setup = {.micro = 1, .tensor = 2, .stages = 1, .in_flight = 1};
    const struct advise_memory half = advise_memory_of(&model, &setup);
    assert_near(half.gradients, 200, 0);
    assert_near(half.buffers, 2 * 4 * 128 * 1e6 - 200, 0);
    setup.tensor = 1;
    assert_near(advise_memory_of(&model, &setup).buffers, 160, 0);
    assert_near(advise_memory_of(&model, &setup).activations - half.activations, /* the layer's divided part */
                advise_layer_bytes(&model, &setup) - advise_layer_bytes(&model, &(struct advise_setup){.micro = 1, .tensor = 2}), 1);
}

/* If activations of 16 bits were measured, they replace the half. */
static void measured_activations_of_16_bits_count(void **state)
{
    (void)state;
    struct advise_model model = {.sample_bytes = 1000, .recomputed_bytes = 100};
    struct advise_setup setup = {.micro = 3, .is_16 = true, .tensor = 1, .stages = 1};
    assert_near(advise_memory_of(&model, &setup).activations, 1500, 0);
    model.sample_16_bytes = 800;
    assert_near(advise_memory_of(&model, &setup).activations, 2400, 1e-9);
    setup.recomputes = true;
    assert_near(advise_memory_of(&model, &setup).activations, 240, 1e-9);
    setup.is_16 = false;
    assert_near(advise_memory_of(&model, &setup).activations, 300, 0);
}

/* The last stage keeps one microbatch, and the logits of it: with a large vocabulary it is the heaviest. */
static void the_heaviest_stage_counts(void **state)
{
    (void)state;
    const struct advise_model model = {.layers = 2, .width = 64, .heads = 1, .sequence = 128, .vocabulary = 1e6};
    const struct advise_setup setup = {.micro = 1, .is_16 = true, .tensor = 1, .stages = 2, .in_flight = 2};
    assert_near(advise_memory_of(&model, &setup).activations, advise_layer_bytes(&model, &setup) + 4 * 128 * 64 + 4 * 128 * 1e6,
                1);
}

static void buffers_are_the_largest_tensor_or_the_units(void **state)
{
    (void)state;
    const struct advise_model model = {.parameters = 1000, .largest_tensor = 10, .largest_unit = 100};
    struct advise_setup setup = {.micro = 1, .shard_workers = 4, .tensor = 1, .stages = 1};
    assert_near(advise_memory_of(&model, &setup).buffers, 40, 0);
    setup.shards = ADVISE_PARAMETER_SHARDS;
    assert_near(advise_memory_of(&model, &setup).buffers, 5 * 400, 0);
}

/* ---- The ladder ---------------------------------------------------------------------------------------------------------- */

static const struct advise_model plain = {.parameters = 1e6, .largest_tensor = 1e5, .largest_unit = 1e5, .sample_bytes = 1e6};

static int climb(const struct advise_model *model, double workers, double batch, double usable,
                 struct advise_rung rungs[ADVISE_WAYS])
{
    const struct advise_setup wanted = {.states = 2};
    const struct advise_limits limits = {workers, workers < 8 ? workers : 8, batch, usable};
    return advise_ladder(model, &wanted, &limits, rungs);
}

/* 16e6 bytes of states, 4e5 of a buffer, 1e6 for each sample. */
static void the_first_way_that_fits_is_found(void **state)
{
    (void)state;
    struct advise_rung rungs[ADVISE_WAYS];
    assert_int_equal(climb(&plain, 4, 32, 16.4e6 + 8e6, rungs), ADVISE_WAY_DATA);
    assert_int_equal(climb(&plain, 4, 32, 16.4e6 + 8e6 - 1, rungs), ADVISE_WAY_SMALLER);
    assert_true(rungs[ADVISE_WAY_DATA].why == ADVISE_TOO_LARGE && rungs[ADVISE_WAY_DATA].setup.micro == 8);
    assert_true(rungs[ADVISE_WAY_SMALLER].setup.micro == 4 && rungs[ADVISE_WAY_SMALLER].microbatches == 2);
    assert_int_equal(climb(&plain, 4, 32, 16.4e6 + 1e6 - 1, rungs), ADVISE_WAY_TOGETHER); /* 16 bit saves half of a sample */
    assert_int_equal(rungs[ADVISE_WAY_RECOMPUTE].why, ADVISE_NOT_KNOWN);
    assert_false(rungs[ADVISE_WAY_TOGETHER].setup.recomputes);
    assert_int_equal(climb(&plain, 4, 32, 14e6, rungs), ADVISE_WAY_OPTIMIZER); /* 8e6 + 8e6 / 4 */
    assert_true(rungs[ADVISE_WAY_OPTIMIZER].setup.micro == 2 && !rungs[ADVISE_WAY_OPTIMIZER].setup.is_16);
    assert_int_equal(climb(&plain, 4, 32, 7e6, rungs), ADVISE_WAY_PARAMETERS);
    assert_int_equal(rungs[ADVISE_WAY_TENSOR].why, ADVISE_NOT_POSSIBLE);
    assert_int_equal(climb(&plain, 4, 32, 1e6, rungs), ADVISE_WAYS);
    assert_int_equal(rungs[ADVISE_WAY_DATA].why, ADVISE_TOO_LARGE);
}

static void one_worker_cannot_share(void **state)
{
    (void)state;
    struct advise_rung rungs[ADVISE_WAYS];
    assert_int_equal(climb(&plain, 1, 8, 10e6, rungs), ADVISE_WAYS);
    for (int kind = ADVISE_WAY_OPTIMIZER; kind < ADVISE_WAYS - 1; kind++)
        assert_int_equal(rungs[kind].why, ADVISE_ONE_WORKER);
}

/* Degrees divide workers and heads; a replica of several workers gets their samples. */
static void degrees_divide_workers_and_heads(void **state)
{
    (void)state;
    struct advise_rung rungs[ADVISE_WAYS];
    const struct advise_model model = {.parameters = 12e6,
                                       .largest_tensor = 1e5,
                                       .largest_unit = 1e6,
                                       .layers = 12,
                                       .width = 96,
                                       .heads = 6,
                                       .sequence = 16,
                                       .vocabulary = 100};
    climb(&model, 12, 24, 1, rungs);
    assert_true(rungs[ADVISE_WAY_PIPELINE].setup.stages == 12 && rungs[ADVISE_WAY_PIPELINE].per_replica == 24);
    climb(&model, 6, 24, 1, rungs);
    assert_true(rungs[ADVISE_WAY_TENSOR].setup.tensor == 6 && rungs[ADVISE_WAY_TENSOR].per_replica == 24);
    climb(&model, 6, 24, 1e9, rungs);
    assert_true(rungs[ADVISE_WAY_TENSOR].setup.tensor == 2 && rungs[ADVISE_WAY_TENSOR].per_replica == 8);
    assert_true(rungs[ADVISE_WAY_PIPELINE].setup.stages == 2 && rungs[ADVISE_WAY_PIPELINE].setup.micro == 1);
    climb(&model, 8, 24, 1, rungs); /* 8 workers of a machine: 2 divides them and 6 heads */
    assert_true(rungs[ADVISE_WAY_BOTH].setup.tensor == 2 && rungs[ADVISE_WAY_BOTH].setup.stages == 4);
}

/* The ladder counts what a schedule of 1F1B keeps on its first rank. */
static void in_flight_is_what_the_schedule_keeps(void **state)
{
    (void)state;
    static const uint32_t cases[][2] = {{2, 1}, {2, 8}, {5, 3}, {5, 5}, {7, 40}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
        struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
        struct shoal_schedule *schedule = NULL;
        options.ranks = cases[i][0];
        options.microbatches = cases[i][1];
        options.costs = (struct shoal_stage_costs){1, 1, 1, 0};
        assert_int_equal(shoal_schedule_create(&options, &schedule, NULL, 0), SHOAL_OK);
        assert_int_equal(shoal_schedule_time(schedule, &options.costs, 1, &times, NULL), SHOAL_OK);
        shoal_schedule_free(schedule);
        struct advise_rung rungs[ADVISE_WAYS];
        const struct advise_model model = {.parameters = 1e6, .largest_unit = 1e5, .sample_bytes = 1};
        climb(&model, cases[i][0], cases[i][1], 1e12, rungs);
        const struct advise_rung *rung = &rungs[ADVISE_WAY_PIPELINE];
        assert_true(rung->setup.stages == cases[i][0] && rung->microbatches == cases[i][1]);
        assert_true(rung->setup.in_flight == times.activations);
    }
}

/* ---- Models -------------------------------------------------------------------------------------------------------------- */

static struct advise_facts facts_of(const char *name)
{
    struct step_profile profile;
    assert_int_equal(step_profile_open(&profile, "test", name), 0);
    const struct advise_facts facts = advise_facts_of(&profile);
    step_profile_free(&profile);
    return facts;
}

static void built_in_models_have_facts(void **state)
{
    (void)state;
    const struct advise_facts resnet = facts_of("resnet50"), gpt2 = facts_of("gpt2"), bert = facts_of("bert-large");
    assert_true(resnet.model.recomputed_bytes < 0.6 * resnet.model.sample_bytes && resnet.batch_norms == 53);
    assert_true(resnet.model.parameters == 25557032 && resnet.optimizer == STEP_RULE_MOMENTUM);
    assert_true(gpt2.model.layers == 12 && gpt2.model.largest_unit == 50257.0 * 768 && gpt2.batch_norms == 0);
    assert_true(bert.model.layers == 24 && bert.optimizer == STEP_RULE_ADAMW);
    /* six operations for each parameter of the layers and position, and attention and head: between those and twice as many */
    assert_true(gpt2.sample_flop > 6 * 85e6 * 1024 && gpt2.sample_flop < 2 * 6 * 85e6 * 1024);
}

/* MiB that shoal.torch.profile has measured on a CPU: ResNet-50 of torchvision's structure, BERT-large and GPT-2 of transformers
 * (attention "sdpa" with dropout, which keeps its scores on a CPU). */
static void activations_are_those_that_were_measured(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double mib;
    } models[] = {{"resnet50", 82.035}, {"bert-large", 2087.82}, {"gpt2", 3013.54}};
    const struct advise_setup setup = {.micro = 1, .has_value_masks = true, .tensor = 1, .stages = 1};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const struct advise_facts facts = facts_of(models[i].name);
        const double mib = advise_memory_of(&facts.model, &setup).activations / 0x1p20;
        assert_near(mib / models[i].mib, 1, 0.01);
    }
}

/* The seconds of a step on A100s in table 5 of arXiv 2205.05198, and the share of 312 TFLOP/s that they are. */
static void operations_give_the_published_utilization(void **state)
{
    (void)state;
    static const struct {
        size_t layers;
        double width, batch, gpus, seconds, percent;
    } runs[] = {{48, 6144, 4, 8, 1.10, 41.7},
                {96, 12288, 64, 64, 13.75, 51.4},
                {105, 20480, 280, 280, 37.83, 56.0},
                {128, 25600, 512, 512, 71.49, 56.3}};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        const struct advise_model model = {
            .layers = runs[i].layers, .width = runs[i].width, .sequence = 2048, .vocabulary = 51200};
        const double flop = runs[i].batch * advise_transformer_flop(&model);
        assert_near(100 * flop / (runs[i].seconds * runs[i].gpus * 312e12), runs[i].percent, 0.1);
    }
}

/* ---- Learning rates ------------------------------------------------------------------------------------------------------ */

static int rates_of(int optimizer, double from, double batch, struct advise_rate rates[ADVISE_RATES_MAX])
{
    const struct advise_rate_question question = {optimizer, from, batch};
    const int count = advise_rates_find(&question, rates);
    assert_in_range(count, 1, ADVISE_RATES_MAX);
    for (int i = 0; i < count; i++) {
        assert_true(rates[i].factor > 0 && rates[i].epsilon > 0 && rates[i].decay > 0);
        assert_true(*rates[i].rule && *rates[i].text && *rates[i].limits && *rates[i].source);
    }
    return count;
}

static void momentum_scales_linearly_within_its_range(void **state)
{
    (void)state;
    struct advise_rate rates[ADVISE_RATES_MAX];
    rates_of(STEP_RULE_MOMENTUM, 256, 8192, rates);
    assert_string_equal(rates[0].rule, "linear");
    assert_true(rates[0].factor == 32 && rates[0].warmup_epochs == 5 && rates[0].is_in_range);
    assert_near(rates[1].factor, sqrt(32), 1e-12);
    assert_int_equal(rates_of(STEP_RULE_SGD, 256, 8193, rates), 4);
    assert_false(rates[0].is_in_range);
    assert_true(rates[3].is_in_range && !strcmp(rates[3].rule, "LARS"));
    rates_of(STEP_RULE_MOMENTUM, 256, 65536, rates);
    assert_false(rates[3].is_in_range);
    rates_of(STEP_RULE_MOMENTUM, 256, 64, rates);
    assert_true(rates[0].factor == 0.25 && rates[0].warmup_epochs == 0);
}

static void adam_moves_its_betas_while_it_can(void **state)
{
    (void)state;
    struct advise_rate rates[ADVISE_RATES_MAX];
    rates_of(STEP_RULE_ADAMW, 64, 256, rates);
    assert_near(rates[0].factor, 2, 1e-12);
    assert_near(rates[0].beta1, 0.6, 1e-12);
    assert_near(rates[0].beta2, 0.996, 1e-12);
    assert_near(rates[0].epsilon, 0.5, 1e-12);
    assert_true(rates[0].is_in_range);
    assert_int_equal(rates_of(STEP_RULE_ADAMW, 64, 640, rates), 3);
    assert_true(!rates[0].is_in_range && rates[0].beta1 == 0);
    assert_true(rates[2].decay == 10 && rates[2].factor == 1);
    assert_int_equal(rates_of(STEP_RULE_ADAM, 64, 640, rates), 2);
    assert_int_equal(rates_of(STEP_RULE_LION, 64, 640, rates), 1);
}

/* 5e-3 / 8 at 512 and 5e-3 at 32768, table 4 of arXiv 1904.00962. */
static void lamb_scales_by_the_root_within_its_range(void **state)
{
    (void)state;
    struct advise_rate rates[ADVISE_RATES_MAX];
    rates_of(STEP_RULE_LAMB, 512, 32768, rates);
    assert_near(rates[0].factor, 8, 1e-12);
    assert_true(rates[0].is_in_range);
    rates_of(STEP_RULE_LAMB, 512, 32769, rates);
    assert_false(rates[0].is_in_range);
    rates_of(STEP_RULE_ADAGRAD, 1, 4, rates);
    assert_near(rates[0].factor, 2, 1e-12);
}

static void batch_norm_wants_samples(void **state)
{
    (void)state;
    assert_int_equal(advise_norm_judge(16), ADVISE_NORM_FINE);
    assert_int_equal(advise_norm_judge(15), ADVISE_NORM_NOTE);
    assert_int_equal(advise_norm_judge(8), ADVISE_NORM_NOTE);
    assert_int_equal(advise_norm_judge(7), ADVISE_NORM_WARNING);
    assert_true(advise_norm_group(2) == 16 && advise_norm_group(3) == 11 && advise_norm_group(32) == 1 &&
                advise_norm_group(64) == 1);
}

/* ---- Shapes -------------------------------------------------------------------------------------------------------------- */

static void shapes_are_found_by_name(void **state)
{
    (void)state;
    const struct advise_shape *shape = advise_shape_find("ml.p4d.24xlarge");
    assert_non_null(shape);
    assert_ptr_equal(shape, advise_shape_find("p4d.24xlarge"));
    assert_true(shape->accelerators == 8 && shape->memory_gib == 40 && shape->network_gbit == 400);
    assert_null(advise_shape_find("p4d.25xlarge"));
    assert_null(advise_shape_find(""));
    assert_string_equal(advise_shape_nearest("p4d.25xlarge"), "p4d.24xlarge");
    assert_string_equal(advise_shape_nearest("ml.p3.16xlarg"), "p3.16xlarge");
    assert_null(advise_shape_nearest("mainframe"));
}

static void families_grow(void **state)
{
    (void)state;
    const struct advise_shape *shape = advise_shape_larger(advise_shape_find("p3.2xlarge"));
    assert_string_equal(shape->name, "p3.8xlarge");
    shape = advise_shape_larger(shape);
    assert_string_equal(shape->name, "p3.16xlarge");
    assert_null(advise_shape_larger(shape));
    assert_null(advise_shape_larger(advise_shape_find("p3dn.24xlarge")));
}

static void every_shape_is_whole(void **state)
{
    (void)state;
    size_t count = 0;
    for (const struct advise_shape *shape; (shape = advise_shape_at(count)); count++) {
        assert_ptr_equal(advise_shape_find(shape->name), shape);
        assert_true(shape->accelerator && shape->accelerators >= 1 && shape->accelerators <= 8 && shape->memory_gib >= 16);
        assert_true(shape->network_gbit >= 2.5 && shape->pcie_gb_s > 0 && shape->tflop_s_16 > shape->tflop_s_32);
        assert_true(shape->tflop_s_32 > 0 && shape->cores >= 4 && shape->host_gib >= 16);
        assert_true(shape->accelerators > 1 || shape->nvlink_gb_s == 0);
    }
    assert_true(count > 20);
    const struct advise_shape here = advise_shape_here();
    assert_true(here.cores >= 1 && here.host_gib >= 0 && (here.accelerators > 0) == (here.accelerator != NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_follow_from_machines_batch_and_samples),
        cmocka_unit_test(a_batch_that_workers_do_not_divide_is_spread),
        cmocka_unit_test(a_degree_makes_fewer_replicas),
        cmocka_unit_test(counts_name_what_is_wrong),
        cmocka_unit_test(samples_grow_with_the_batch),
        cmocka_unit_test(states_take_what_zero_says),
        cmocka_unit_test(layers_keep_what_korthikanti_measured),
        cmocka_unit_test(recomputation_and_stages_change_activations),
        cmocka_unit_test(attention_of_cpus_is_in_float32),
        cmocka_unit_test(tensor_parallelism_gathers_logits),
        cmocka_unit_test(measured_activations_of_16_bits_count),
        cmocka_unit_test(the_heaviest_stage_counts),
        cmocka_unit_test(buffers_are_the_largest_tensor_or_the_units),
        cmocka_unit_test(the_first_way_that_fits_is_found),
        cmocka_unit_test(one_worker_cannot_share),
        cmocka_unit_test(degrees_divide_workers_and_heads),
        cmocka_unit_test(in_flight_is_what_the_schedule_keeps),
        cmocka_unit_test(built_in_models_have_facts),
        cmocka_unit_test(activations_are_those_that_were_measured),
        cmocka_unit_test(operations_give_the_published_utilization),
        cmocka_unit_test(momentum_scales_linearly_within_its_range),
        cmocka_unit_test(adam_moves_its_betas_while_it_can),
        cmocka_unit_test(lamb_scales_by_the_root_within_its_range),
        cmocka_unit_test(batch_norm_wants_samples),
        cmocka_unit_test(shapes_are_found_by_name),
        cmocka_unit_test(families_grow),
        cmocka_unit_test(every_shape_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
