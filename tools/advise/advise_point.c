/* One number of machines: its counts, the first way that fits, the step of that way, time and cost. */
#include "advise.h"

#include <math.h>
#include <shoal/pipeline.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

/* Allocators leave gaps: 5 to 10 % of an accelerator's memory are usually lost. */
static const double usable_share = 0.92;

double advise_usable_bytes(double memory_bytes)
{
    return usable_share * memory_bytes;
}

/* ---- Times of a microbatch ----------------------------------------------------------------------------------------------- */

struct scene {
    const struct advise_question *question;
    struct advise_point *point;
    const struct advise_rung *rung;
    struct shoal_simulation network;
    double forward_us, backward_us; /* in which a worker computes a microbatch */
    double value_bytes;
};

/* A model that is cut among workers costs each its share. Recomputation repeats the forward pass. */
static void passes_find(struct scene *scene)
{
    const struct advise_question *question = scene->question;
    const struct advise_setup *setup = &scene->rung->setup;
    const double us = question->sample_us * setup->micro / (setup->tensor * setup->stages);
    scene->forward_us = us * question->forward_share;
    scene->backward_us = us - scene->forward_us + (setup->recomputes ? scene->forward_us : 0);
    scene->value_bytes = setup->is_16 ? 2 : 4;
}

/* Returns the microseconds in which the workers of a machine sum a tensor among themselves. */
static double local_sum_us(const struct scene *scene, double bytes, double workers)
{
    const struct shoal_simulation *network = &scene->network;
    const double rate = network->nvlink_gb_s > 0 ? network->nvlink_gb_s
                        : network->pcie_gb_s > 0 ? network->pcie_gb_s / 2 /* up, and down again */
                                                 : network->memory_gb_s / 3;
    return 2 * (workers - 1) / workers * bytes * 1e-3 / rate;
}

/* Two sums in each pass of a layer (Shoeybi et al. 2019, arXiv 1909.08053). */
static void tensor_add(struct scene *scene)
{
    const struct advise_model *model = &scene->question->facts.model;
    const struct advise_setup *setup = &scene->rung->setup;
    const double bytes = scene->value_bytes * model->sequence * model->width * setup->micro;
    const double us = 2 * (double)model->layers / setup->stages * local_sum_us(scene, bytes, setup->tensor);
    if (setup->tensor <= 1)
        return;
    scene->forward_us += us;
    scene->backward_us += us;
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* Returns the microseconds in which replicas sum the gradients of their cuts, if nothing hides that. The workers of a machine
 * share its adapter; a machine that has whole replicas sums those first, inside. */
static double gradients_us(const struct scene *scene)
{
    const struct advise_setup *setup = &scene->rung->setup;
    const double replicas = (double)scene->point->counts.workers / (setup->tensor * setup->stages);
    const double bytes = scene->value_bytes * scene->question->facts.model.parameters / setup->stages;
    const double us = 2 * (replicas - 1) / replicas * bytes * 8e-3 / scene->network.rate_gbit_s;
    return scene->point->machines > 1 ? us : local_sum_us(scene, bytes / setup->tensor, replicas);
}

/* Simulates the last microbatch's backward pass, with the sums that it hides. */
static int row_find(const struct scene *scene, struct sim_step_answers *answers, struct sim_step_row *row_out)
{
    struct sim_step_options options = {.question = scene->network, .profile_count = 1, .flight_bytes = 100 << 20};
    options.profiles[0] = scene->question->profile;
    options.profiles[0].element_bytes = (size_t)scene->value_bytes;
    options.question.type = scene->rung->setup.is_16 ? SHOAL_BFLOAT16 : SHOAL_FLOAT32;
    options.question.ranks_per_host = scene->point->per_machine;
    options.question.shared = options.question.pcie_gb_s <= 0;
    options.backward_us[0] = scene->backward_us;
    options.forward_us[0] = scene->forward_us;
    *row_out = (struct sim_step_row){.hosts = scene->point->machines};
    return sim_step_row_ask(&options, answers, row_out);
}

/* A lone worker sums nothing. Sharded parameters are gathered before both passes of each microbatch, and gradients are reduced
 * once: a gather moves half as much as an all-reduce. All of that may overlap with computation. */
static int whole_step(struct scene *scene, struct sim_step_answers *answers)
{
    struct sim_step_row row;
    const double times = scene->rung->microbatches, pass_us = scene->forward_us + scene->backward_us;
    scene->point->step_us = times * pass_us;
    if (scene->point->counts.workers == 1)
        return 0;
    const int code = row_find(scene, answers, &row);
    if (code)
        return code;
    scene->point->step_us = times * pass_us - scene->backward_us + row.step_us;
    scene->point->is_simulated = scene->rung->setup.shards != ADVISE_PARAMETER_SHARDS;
    scene->point->limit = scene->point->is_simulated ? sim_step_limit_name(row.limit) : NULL;
    if (!scene->point->is_simulated)
        scene->point->step_us = fmax(scene->point->step_us, (times + 0.5) * row.sum_us);
    return 0;
}

enum { SCHEDULE_ACTIONS_MAX = 1 << 20 };

/* Returns the length of a pipeline's step by its schedule; of very long ones by the formula of 1F1B. Returns below 0 on
 * failure. */
static double pipeline_us(const struct scene *scene)
{
    const struct advise_model *model = &scene->question->facts.model;
    const struct advise_setup *setup = &scene->rung->setup;
    const double bytes = scene->value_bytes * model->sequence * model->width * setup->micro;
    const double transfer_us = bytes * 8e-3 / scene->network.rate_gbit_s + scene->network.latency_us;
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    struct shoal_schedule *schedule = NULL;
    if (setup->stages * scene->rung->microbatches > SCHEDULE_ACTIONS_MAX)
        return (scene->rung->microbatches + setup->stages - 1) * (scene->forward_us + scene->backward_us);
    options.ranks = (uint32_t)setup->stages;
    options.microbatches = (uint32_t)scene->rung->microbatches;
    options.costs =
        (struct shoal_stage_costs){scene->forward_us, scene->backward_us / 2, scene->backward_us / 2, transfer_us, 0, 0, 0};
    enum shoal_status status = shoal_schedule_create(&options, &schedule, NULL, 0);
    if (status == SHOAL_OK)
        status = shoal_schedule_time(schedule, &options.costs, 1, &times, NULL);
    shoal_schedule_free(schedule);
    return status == SHOAL_OK ? times.step : -1;
}

static int cut_step(struct scene *scene)
{
    const struct advise_setup *setup = &scene->rung->setup;
    tensor_add(scene);
    double us = scene->rung->microbatches * (scene->forward_us + scene->backward_us);
    if (setup->stages > 1)
        us = pipeline_us(scene);
    if (us < 0)
        return sim_step_memory_fail();
    scene->point->step_us = us + gradients_us(scene);
    return 0;
}

/* Efficiency compares with as many workers that compute samples without recomputation, cuts or communication. */
static int step_find(const struct advise_question *question, struct sim_step_answers *answers, struct advise_point *point)
{
    const struct advise_rung *rung = &point->rungs[point->way];
    struct scene scene = {question, point, rung, question->network, 0, 0, 4};
    if (point->shape != &question->shape) {
        scene.network.rate_gbit_s = point->shape->network_gbit;
        scene.network.pcie_gb_s = point->shape->pcie_gb_s;
        scene.network.nvlink_gb_s = point->shape->nvlink_gb_s;
    }
    if (point->per_machine < 2 || point->per_machine > 8) /* NVLink joins two to eight GPUs */
        scene.network.nvlink_gb_s = 0;
    passes_find(&scene);
    const int code = rung->kind >= ADVISE_WAY_TENSOR ? cut_step(&scene) : whole_step(&scene, answers);
    if (code)
        return code;
    point->has_step = true;
    point->compute_us = question->sample_us * (double)point->batch / (double)point->counts.workers;
    point->efficiency = point->compute_us / point->step_us;
    return 0;
}

/* ---- Time and cost ------------------------------------------------------------------------------------------------------- */

static void bill_find(const struct advise_question *question, struct advise_point *point)
{
    const bool is_larger = point->shape != &question->shape;
    const double price = is_larger ? question->larger_price : question->price;
    point->steps =
        ceil(point->counts.steps * advise_samples_factor(question->from_batch, (double)point->batch, question->critical));
    point->seconds = point->steps * point->step_us / 1e6;
    point->cost = price < 0 ? -1 : price * (double)point->machines * point->seconds / 3600;
}

static size_t batch_of(const struct advise_question *question, const struct advise_point *point)
{
    if (question->keep == ADVISE_KEEP_BATCH)
        return question->batch;
    const size_t first = question->counts.at[0] * question->per_machine;
    return question->batch / first * point->machines * point->per_machine;
}

static void ladder_find(const struct advise_question *question, struct advise_point *point)
{
    const struct advise_setup wanted = {
        .is_16 = question->is_16,
        .fuses_attention = question->fuses_attention,
        .has_value_masks = !question->shape.accelerator,
        .states = (double)step_rule_states(question->optimizer),
        .constant_bytes = question->shape.accelerator ? 0x1p30 : 0x1p29,
    };
    const struct advise_limits limits = {
        .workers = (double)point->counts.workers,
        .per_machine = (double)point->per_machine,
        .batch = (double)point->batch,
        .usable_bytes = advise_usable_bytes(question->memory_bytes),
    };
    point->way = advise_ladder(&question->facts.model, &wanted, &limits, point->rungs);
}

int advise_point_find(const struct advise_question *question, const struct advise_shape *shape, size_t machines,
                      struct sim_step_answers *answers, struct advise_point *point_out)
{
    struct advise_point *point = point_out;
    *point = (struct advise_point){.shape = shape, .machines = machines, .way = ADVISE_WAYS, .cost = -1};
    point->per_machine = shape == &question->shape ? question->per_machine : shape->accelerators;
    point->batch = batch_of(question, point);
    const struct advise_job job = {machines, point->per_machine, 1, point->batch, question->samples, question->epochs};
    point->fault = advise_counts_find(&job, &point->counts);
    if (point->fault)
        return 0;
    ladder_find(question, point);
    if (point->way == ADVISE_WAYS || question->sample_us <= 0)
        return 0;
    const int code = step_find(question, answers, point);
    if (!code)
        bill_find(question, point);
    return code;
}
