/* The page of `shoal advise`, as text or HTML. */
#include "advise.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "advise_page.h"

enum { TIME_BYTES = 32 };

static double gib(double bytes)
{
    return bytes / 0x1p30;
}

/* Returns "3.2 h". */
static const char *time_name(double seconds, char text_out[TIME_BYTES])
{
    if (seconds < 120)
        snprintf(text_out, TIME_BYTES, "%.3g s", seconds);
    else if (seconds < 7200)
        snprintf(text_out, TIME_BYTES, "%.1f min", seconds / 60);
    else if (seconds < 172800)
        snprintf(text_out, TIME_BYTES, "%.1f h", seconds / 3600);
    else
        snprintf(text_out, TIME_BYTES, "%.1f days", seconds / 86400);
    return text_out;
}

/* ---- 1. Workers, batch, iterations --------------------------------------------------------------------------------------- */

static const char *fault_text(enum advise_fault fault)
{
    return fault == ADVISE_FAULT_BATCH     ? "fewer samples than workers"
           : fault == ADVISE_FAULT_SAMPLES ? "more samples than the data set"
                                           : "not possible";
}

static void counts_row_print(const struct advise_page *page, const struct advise_point *point)
{
    const struct advise_counts *counts = &point->counts;
    struct advise_row row = {.count = 0};
    advise_row_add(&row, "%zu", point->machines);
    advise_row_add(&row, "%zu", counts->workers);
    advise_row_add(&row, "%zu", point->batch);
    if (point->fault) {
        advise_row_add(&row, "%s", fault_text(point->fault));
    } else {
        advise_row_add(&row, counts->least == counts->most ? "%zu" : "%zu or %zu", counts->least, counts->most);
        advise_row_add(&row, "%zu", counts->kept);
        advise_row_add(&row, "%zu", counts->last ? counts->last : point->batch);
        advise_row_add(&row, "%.0f", counts->steps);
    }
    advise_page_row(page, &row, 9, 13, false);
}

static void counts_formulas_print(const struct advise_page *page, const struct advise_question *question,
                                  const struct advise_point *point)
{
    const struct advise_counts *counts = &point->counts;
    advise_page_text(page,
                     "workers = machines x workers of a machine = %zu x %zu = %zu. replicas = workers / (tensor x pipeline "
                     "degree): as many as workers in data parallelism, sharded or not.",
                     point->machines, point->per_machine, counts->workers);
    if (point->fault)
        return;
    advise_page_text(page,
                     "samples of a worker = batch / replicas = %zu / %zu = %.4g. iterations of an epoch = samples / batch = "
                     "%zu / %zu = %.6g: %zu if the last, smaller one is kept, %zu if it is dropped. steps = epochs x "
                     "iterations = %g x %zu = %.0f.",
                     point->batch, counts->replicas, (double)point->batch / (double)counts->replicas, question->samples,
                     point->batch, (double)question->samples / (double)point->batch, counts->kept, counts->dropped,
                     question->epochs, counts->kept, counts->steps);
    if (counts->least < counts->most)
        advise_page_text(page,
                         "%zu workers do not divide the batch: %zu of them %s %zu sample%s, and those with %zu wait for them. "
                         "%zu workers divide a batch of %zu or %zu. (For the samples of an epoch, data.h has three tails: pad, "
                         "drop and keep.)",
                         counts->replicas, counts->with_most, counts->with_most == 1 ? "has" : "have", counts->most,
                         counts->most == 1 ? "" : "s", counts->least, counts->replicas, counts->least * counts->replicas,
                         counts->most * counts->replicas);
}

static void counts_print(const struct advise_page *page, const struct advise_question *question,
                         const struct advise_answer *answer)
{
    const struct advise_row header = {
        .cells = {"machines", "workers", "batch", "per worker", "iterations", "samples last", "steps"}, .count = 7};
    advise_page_heading(page, "Workers, batch, iterations");
    advise_page_table_begin(page);
    advise_page_row(page, &header, 9, 13, true);
    for (int i = 0; i < answer->count; i++)
        counts_row_print(page, &answer->points[i]);
    advise_page_table_end(page);
    counts_formulas_print(page, question, &answer->points[advise_shown(answer)]);
}

/* ---- 2. Memory ----------------------------------------------------------------------------------------------------------- */

static void memory_row_print(const struct advise_page *page, const struct advise_rung *rung)
{
    const struct advise_memory *memory = &rung->memory;
    const double parts[] = {memory->weights,     memory->gradients, memory->states,   memory->master,
                            memory->activations, memory->buffers,   memory->constant, memory->total};
    struct advise_row row = {.count = 0};
    advise_row_add(&row, "%s", advise_way_names[rung->kind]);
    for (size_t i = 0; rung->why <= ADVISE_TOO_LARGE && i < sizeof parts / sizeof parts[0]; i++)
        advise_row_add(&row, "%.2f", gib(parts[i]));
    advise_row_add(&row, "%s", rung->why == ADVISE_FITS ? "yes" : rung->why == ADVISE_TOO_LARGE ? "no" : "-");
    advise_page_row(page, &row, 20, 9, false);
}

static void setup_name(const struct advise_rung *rung, char text[160])
{
    const struct advise_setup *setup = &rung->setup;
    int length = snprintf(text, 160, "microbatches of %.0f sample%s, %s", setup->micro, setup->micro == 1 ? "" : "s",
                          setup->is_16 ? "16 bit" : "float32");
    if (setup->recomputes)
        length += snprintf(text + length, 160 - (size_t)length, ", recomputation");
    if (setup->shards)
        length += snprintf(text + length, 160 - (size_t)length, ", %.0f shards", setup->shard_workers);
    if (setup->tensor > 1)
        length += snprintf(text + length, 160 - (size_t)length, ", tensor degree %.0f", setup->tensor);
    if (setup->stages > 1)
        snprintf(text + length, 160 - (size_t)length, ", %.0f stages", setup->stages);
}

static void rung_print(const struct advise_page *page, const struct advise_question *question, const struct advise_rung *rung,
                       int number)
{
    const char *name = advise_way_names[rung->kind], *text = advise_way_texts[rung->kind];
    const double usable = gib(advise_usable_bytes(question->memory_bytes));
    char setup[160];
    setup_name(rung, setup);
    if (rung->why == ADVISE_ONE_WORKER)
        advise_page_text(page, "%d. %s (%s): no, there is one worker, and nobody to share with.", number, name, text);
    else if (rung->why == ADVISE_NOT_POSSIBLE)
        advise_page_text(page, "%d. %s (%s): no, this model or this number of workers cannot be divided in this way.", number,
                         name, text);
    else if (rung->why == ADVISE_NOT_KNOWN)
        advise_page_text(page, "%d. %s (%s): not known, the profile does not have what it saves.", number, name, text);
    else if (rung->why == ADVISE_TOO_LARGE)
        advise_page_text(page,
                         "%d. %s (%s): no, %.2f GiB are more than %.2f; %.2f of them are weights, gradients and states. "
                         "Tried last: %s.",
                         number, name, text, gib(rung->memory.total), usable,
                         gib(rung->memory.weights + rung->memory.gradients + rung->memory.states + rung->memory.master), setup);
    else
        advise_page_text(page, "%d. %s (%s): yes, %.2f of %.2f GiB, with %s.", number, name, text, gib(rung->memory.total),
                         usable, setup);
}

static void nothing_fits_print(const struct advise_page *page, const struct advise_question *question,
                               const struct advise_point *point)
{
    const struct advise_memory *memory = &point->rungs[ADVISE_WAY_PARAMETERS].memory;
    const double left = advise_usable_bytes(question->memory_bytes) - memory->activations - memory->buffers - memory->constant;
    const double shared = memory->weights + memory->gradients + memory->states + memory->master;
    advise_page_text(page, "Nothing fits on %zu machine%s: take more machines, or workers with more memory.", point->machines,
                     point->machines == 1 ? "" : "s");
    if (point->rungs[ADVISE_WAY_PARAMETERS].why == ADVISE_TOO_LARGE && left > 0)
        advise_page_text(
            page, "With sharded parameters, %.0f workers would do: %.2f GiB are shared, and each has room for %.2f.",
            ceil(shared * (double)point->counts.workers / left), gib(shared * (double)point->counts.workers), gib(left));
}

static void memory_print(const struct advise_page *page, const struct advise_question *question,
                         const struct advise_point *point)
{
    const struct advise_row header = {
        .cells = {"way", "weights", "gradients", "states", "master", "activat.", "buffers", "constant", "total", "fits"},
        .count = 10};
    advise_page_heading(page, "Memory of a worker");
    if (point->fault) {
        advise_page_text(page, "No way to divide this batch: %s.", fault_text(point->fault));
        return;
    }
    advise_page_text(page, "GiB on %zu machine%s, %zu sample%s per worker, %s; %.2f GiB, of which %.2f can be used.%s",
                     point->machines, point->machines == 1 ? "" : "s", point->counts.most, point->counts.most == 1 ? "" : "s",
                     step_rules[question->optimizer], gib(question->memory_bytes),
                     gib(advise_usable_bytes(question->memory_bytes)),
                     question->facts.model.layers || question->facts.model.sample_bytes > 0
                         ? ""
                         : " Activations are not known, so totals are too small: give --activations.");
    advise_page_table_begin(page);
    advise_page_row(page, &header, 20, 9, true);
    for (int kind = 0; kind < ADVISE_WAYS; kind++)
        memory_row_print(page, &point->rungs[kind]);
    advise_page_table_end(page);
    advise_page_text(page, "The first way that fits:");
    for (int kind = 0; kind < ADVISE_WAYS && kind <= point->way; kind++)
        rung_print(page, question, &point->rungs[kind], kind + 1);
    if (point->way == ADVISE_WAYS)
        nothing_fits_print(page, question, point);
}

/* ---- 3. Steps, time, cost ------------------------------------------------------------------------------------------------ */

static void point_row_print(const struct advise_page *page, const struct advise_question *question,
                            const struct advise_point *point, bool is_larger)
{
    char text[TIME_BYTES];
    struct advise_row row = {.count = 0};
    if (is_larger)
        advise_row_add(&row, "%zu %.24s", point->machines, point->shape->name);
    else
        advise_row_add(&row, "%zu", point->machines);
    advise_row_add(&row, "%zu", point->counts.workers);
    if (!point->has_step) {
        advise_row_add(&row, "%s", point->fault ? fault_text(point->fault) : "nothing fits");
        advise_page_row(page, &row, 18, 12, false);
        return;
    }
    advise_row_add(&row, "%.2f", point->step_us / 1e3);
    advise_row_add(&row, "%.1f%%", 100 * point->efficiency);
    advise_row_add(&row, "%.0f", (double)point->batch / point->step_us * 1e6);
    advise_row_add(&row, "%s", time_name(point->seconds, text));
    if (point->cost >= 0)
        advise_row_add(&row, "%.2f %s", point->cost, question->currency);
    else
        advise_row_add(&row, "-");
    advise_row_add(&row, "%s", point->is_simulated ? "simulated" : "arithmetic");
    advise_row_add(&row, " %s", advise_way_names[point->way]);
    advise_page_row(page, &row, 18, 12, false);
}

static void larger_print(const struct advise_page *page, const struct advise_question *question,
                         const struct advise_point *point, const struct advise_point *larger)
{
    const double work = (double)point->machines * point->seconds, larger_work = (double)larger->machines * larger->seconds;
    char own[TIME_BYTES], other[TIME_BYTES];
    advise_page_text(page, "One bigger machine first: %zu x %s instead of %zu x %s takes %s instead of %s.", larger->machines,
                     larger->shape->name, point->machines, point->shape->name, time_name(larger->seconds, other),
                     time_name(point->seconds, own));
    if (question->price >= 0 && larger_work > 0)
        advise_page_text(page,
                         "It costs less if an hour of it costs less than %.2f %s (its time on all machines is %.3g of the "
                         "other's)%s.",
                         question->price * work / larger_work, question->currency, larger_work / work,
                         larger->cost < 0             ? ""
                         : larger->cost < point->cost ? ": with the price given it does"
                                                      : ": with the price given it does not");
}

static void finish_print(const struct advise_page *page, const struct advise_question *question,
                         const struct advise_answer *answer)
{
    char limit[TIME_BYTES], text[TIME_BYTES];
    if (question->finish_s <= 0)
        return;
    time_name(question->finish_s, limit);
    if (answer->finishes)
        advise_page_text(page, "To finish within %s: %zu machine%s (%s).", limit, answer->finish.machines,
                         answer->finish.machines == 1 ? "" : "s", time_name(answer->finish.seconds, text));
    else if (answer->has_finish)
        advise_page_text(
            page, "No number of machines finishes within %s: the fastest found, %zu, needs %s.%s", limit,
            answer->finish.machines, time_name(answer->finish.seconds, text),
            question->keep == ADVISE_KEEP_BATCH ? " A larger batch has more to divide: see --batch and --keep worker." : "");
    else
        advise_page_text(page, "No number of machines finishes within %s: the model fits on none that was tried.", limit);
}

static void points_print(const struct advise_page *page, const struct advise_question *question,
                         const struct advise_answer *answer)
{
    const struct advise_row header = {
        .cells = {"machines", "workers", "step/ms", "efficiency", "samples/s", "job", "cost", "step is", " way"}, .count = 9};
    advise_page_table_begin(page);
    advise_page_row(page, &header, 18, 12, true);
    for (int i = 0; i < answer->count; i++) {
        point_row_print(page, question, &answer->points[i], false);
        if (answer->has_larger[i])
            point_row_print(page, question, &answer->larger[i], true);
    }
    advise_page_table_end(page);
}

/* What would shorten the step most, and how to get it. */
static void limit_print(const struct advise_page *page, const struct advise_point *point)
{
    static const char *const limits[][2] = {
        {"wire",
         "the network. A larger batch (--keep worker) or --type bfloat16 moves fewer bytes for each sample; so do larger "
         "machines, and on slow networks compression (docs/gradients.md) and outer steps (docs/outer.md)"},
        {"hosts", "memory and messages inside a machine, and latency. Fewer workers with more samples each need fewer of them"},
        {"copies", "copies into and out of buffers. Gradients that are made in the buffers need none"},
        {"order", "the order of gradients: the last ones are ready when the backward pass ends, and then cross the network"},
    };
    for (size_t i = 0; point->limit && i < sizeof limits / sizeof limits[0]; i++)
        if (!strcmp(point->limit, limits[i][0]))
            advise_page_text(page, "On %zu machine%s the step is longer than its computation by %.2f ms, mostly because of %s.",
                             point->machines, point->machines == 1 ? "" : "s", (point->step_us - point->compute_us) / 1e3,
                             limits[i][1]);
}

static void steps_print(const struct advise_page *page, const struct advise_question *question,
                        const struct advise_answer *answer)
{
    advise_page_heading(page, "Step, time, cost");
    if (question->sample_us <= 0) {
        advise_page_text(page, "How long a step takes here is not known. Measure one worker, and give --backward MS "
                               "--measured-batch N.");
        return;
    }
    points_print(page, question, answer);
    if (page->is_html)
        advise_svg_print(question, answer, page->out);
    advise_page_text(page,
                     "efficiency = throughput of all workers / (workers x throughput of a lone worker) = %.4g us x batch / "
                     "workers / step. job = steps x step; loading, evaluation and checkpoints are not in it. cost = machines x "
                     "price x job.%s",
                     question->sample_us,
                     question->critical > 0 ? " steps grow by (critical + batch) / (critical + old batch)." : "");
    limit_print(page, &answer->points[advise_shown(answer)]);
    for (int i = 0; i < answer->count; i++)
        if (answer->has_larger[i])
            larger_print(page, question, &answer->points[i], &answer->larger[i]);
    finish_print(page, question, answer);
}

/* ---- 4. Learning rate, batch norm ---------------------------------------------------------------------------------------- */

static void rate_print(const struct advise_page *page, const struct advise_question *question, const struct advise_rate *rate)
{
    char more[160] = "";
    int length = 0;
    if (question->rate > 0)
        length += snprintf(more, sizeof more, " Here: %.4g instead of %.4g.", rate->factor * question->rate, question->rate);
    if (rate->warmup_epochs > 0)
        length += snprintf(more + length, sizeof more - (size_t)length, " Warm-up: %g epochs.", rate->warmup_epochs);
    if (rate->beta1 > 0)
        snprintf(more + length, sizeof more - (size_t)length, " 0.9 and 0.999 become %.4g and %.5g.", rate->beta1, rate->beta2);
    advise_page_text(page, "%s: %s. Rate x %.4g.%s Range: %s.%s Source: %s.", rate->rule, rate->text, rate->factor, more,
                     rate->limits, rate->is_in_range ? "" : " THIS BATCH IS OUTSIDE, or the range is not known.", rate->source);
}

static void rates_print(const struct advise_page *page, const struct advise_question *question,
                        const struct advise_answer *answer)
{
    const double batch = (double)answer->points[advise_shown(answer)].batch, k = batch / question->from_batch;
    advise_page_heading(page, "Learning rate");
    if (k == 1) {
        advise_page_text(page, "The batch is the one for which the rate is known (--from-batch): keep the rate.");
        return;
    }
    advise_page_text(
        page,
        "k = new batch / old batch = %.0f / %.0f = %.4g. The published rules follow; try them in this order. No rule "
        "held for all models (Shallue et al. 2018, arXiv 1811.03600): compare the losses of 200 steps with "
        "this rate, half of it and twice it.",
        batch, question->from_batch, k);
    for (int i = 0; i < answer->rate_count; i++)
        rate_print(page, question, &answer->rates[i]);
    advise_page_text(page, "A schedule that counts steps must be divided by k.");
}

static void norms_print(const struct advise_page *page, const struct advise_question *question,
                        const struct advise_point *point)
{
    const int norms = question->facts.batch_norms;
    if (!norms || point->fault)
        return;
    advise_page_heading(page, "Batch normalization");
    if (norms < 0) {
        advise_page_text(page, "A profile has no kinds of layers: give --batch-norms N to be warned.");
        return;
    }
    const double samples = point->way == ADVISE_WAYS ? (double)point->counts.least
                                                     : fmin(point->rungs[point->way].setup.micro, (double)point->counts.least);
    const enum advise_norm verdict = advise_norm_judge(samples);
    advise_page_text(page, "Each of the %d layers of batch norm sees %.0f sample%s at a time: %s.", norms, samples,
                     samples == 1 ? "" : "s",
                     verdict == ADVISE_NORM_FINE   ? "enough"
                     : verdict == ADVISE_NORM_NOTE ? "few; compare with a larger batch"
                                                   : "too few, expect a worse model");
    if (verdict != ADVISE_NORM_FINE)
        advise_page_text(
            page,
            "Share statistics among %.0f workers (shoal.torch.SyncBatchNorm with a process group of them), use group "
            "norm, or freeze the statistics when fine-tuning. ResNet-50 on ImageNet with 32, 16, 8, 4, 2 images "
            "on each GPU: error 23.6, 23.7, 24.8, 27.3, 34.7 %%; with group norm about 24.1 %% for all (Wu and He "
            "2018, arXiv 1803.08494).",
            fmin(advise_norm_group(samples), (double)point->counts.workers));
}

/* ---- 5. The job, and how sure it is -------------------------------------------------------------------------------------- */

static void job_print(const struct advise_page *page, const struct advise_question *question, const struct advise_point *point)
{
    char *text = NULL;
    size_t length = 0;
    FILE *out = point->fault || point->way == ADVISE_WAYS ? NULL : open_memstream(&text, &length);
    if (!out)
        return;
    advise_job_print(question, point, out);
    fclose(out);
    advise_page_heading(page, "For the job");
    advise_page_code(page, text ? text : "");
    free(text);
}

static void sure_print(const struct advise_page *page, const struct advise_question *question)
{
    const struct shoal_simulation *network = &question->network;
    advise_page_heading(page, "How sure this is");
    advise_page_text(page, "computed: workers, batch, iterations, bytes of weights, gradients, states and masters.");
    advise_page_text(
        page, "modeled: %ssteps (shoal sim step, %g Gbit/s and %g us between machines%s; the network's rate is %s).",
        question->activations_sure != ADVISE_MODELED ? ""
                                                     : "activations (formulas of the model's layers; measure a step to know), ",
        network->rate_gbit_s, network->latency_us, network->nvlink_gb_s > 0 ? ", NVLink inside" : "",
        question->has_rate                  ? "as given"
        : question->shape.network_gbit <= 0 ? "not known, and assumed"
        : question->shape.is_baseline       ? "the shape's guaranteed one"
                                            : "the shape's peak, which is seldom reached");
    if (question->sample_us > 0)
        advise_page_text(page, "%s: %.4g us of computing for each sample%s.", advise_sures[question->sample_sure],
                         question->sample_us,
                         question->sample_sure != ADVISE_ASSUMED
                             ? ", in proportion to the samples"
                             : ": operations / peak / an assumed share of it; --backward replaces this with a measurement");
    advise_page_text(page,
                     "assumed: %.1f GiB for driver, kernels and process; 8 %% of memory lost to fragments; machines that all "
                     "run equally fast; epochs as given%s.",
                     question->shape.accelerator ? 1.0 : 0.5,
                     question->critical > 0 ? " for --from-batch" : ", whatever the batch (--critical-batch changes that)");
    if (question->file_hosts)
        advise_page_text(page, "assumed: the %zu hosts of the file are like this machine; none was asked.",
                         question->file_hosts);
}

static double machine_hours(const struct advise_point *point)
{
    return (double)point->machines * point->seconds / 3600;
}

/* Names the fastest number of machines, and the one of fewest machine hours. */
static void summary_print(const struct advise_page *page, const struct advise_answer *answer)
{
    const struct advise_point *fastest = &answer->points[advise_shown(answer)], *least = fastest, *larger = NULL;
    char time[TIME_BYTES], other[TIME_BYTES];
    if (!fastest->has_step)
        return;
    for (int i = 0; i < answer->count; i++) {
        if (answer->points[i].has_step && machine_hours(&answer->points[i]) < machine_hours(least))
            least = &answer->points[i];
        if (answer->has_larger[i] && answer->larger[i].seconds < (larger ? larger : fastest)->seconds)
            larger = &answer->larger[i];
    }
    advise_page_text(page, "In short: %zu machine%s, %s, %s %s and %.4g machine hours.", fastest->machines,
                     fastest->machines == 1 ? "" : "s", advise_way_names[fastest->way],
                     fastest->machines == 1 ? "needs" : "need", time_name(fastest->seconds, time), machine_hours(fastest));
    if (least != fastest)
        advise_page_text(page, "Fewest machine hours: %zu machine%s, %.4g in %s.", least->machines,
                         least->machines == 1 ? "" : "s", machine_hours(least), time_name(least->seconds, other));
    if (larger)
        advise_page_text(page, "Faster than all of these: %zu x %s, %s.", larger->machines, larger->shape->name,
                         time_name(larger->seconds, other));
}

static void page_write(const struct advise_page *page, const struct advise_question *question,
                       const struct advise_answer *answer)
{
    const struct advise_shape *shape = &question->shape;
    const struct advise_point *shown = &answer->points[advise_shown(answer)];
    char title[256], model[STEP_NAME_BYTES];
    snprintf(model, sizeof model, "%s", question->profile.name);
    snprintf(title, sizeof title, "%.80s on %s: %zu %s per machine, %s, %s", model, shape->name, question->per_machine,
             shape->accelerator           ? shape->accelerator
             : question->per_machine == 1 ? "worker"
                                          : "workers",
             question->is_16 ? "16 bit" : "float32", step_rules[question->optimizer]);
    advise_page_begin(page, title);
    summary_print(page, answer);
    counts_print(page, question, answer);
    memory_print(page, question, shown);
    steps_print(page, question, answer);
    rates_print(page, question, answer);
    norms_print(page, question, shown);
    job_print(page, question, shown);
    sure_print(page, question);
    advise_page_end(page);
}

void advise_text_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out)
{
    const struct advise_page page = {out, false};
    page_write(&page, question, answer);
}

void advise_html_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out)
{
    const struct advise_page page = {out, true};
    page_write(&page, question, answer);
}
