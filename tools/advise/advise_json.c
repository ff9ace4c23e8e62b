/* The answer of `shoal advise` as one JSON object. docs/advice.md describes its fields. */
#include "advise.h"

#include <math.h>
#include <stdlib.h>

#include "base/json_text.h"

struct json {
    FILE *out;
    bool is_next; /* a comma comes before the next value */
};

static void comma(struct json *json)
{
    if (json->is_next)
        fputs(", ", json->out);
    json->is_next = true;
}

static void key(struct json *json, const char *name)
{
    comma(json);
    fprintf(json->out, "\"%s\": ", name);
}

static void open_as(struct json *json, const char *name, char bracket)
{
    if (name)
        key(json, name);
    else
        comma(json);
    fputc(bracket, json->out);
    json->is_next = false;
}

static void close_as(struct json *json, char bracket)
{
    fputc(bracket, json->out);
    json->is_next = true;
}

static void number(struct json *json, const char *name, double value)
{
    key(json, name);
    if (isfinite(value))
        fprintf(json->out, "%.17g", value);
    else
        fputs("null", json->out);
}

/* A number that may be unknown, which is null. */
static void number_if(struct json *json, const char *name, bool is_known, double value)
{
    number(json, name, is_known ? value : NAN);
}

static void text(struct json *json, const char *name, const char *value)
{
    key(json, name);
    shoal_json_print_text(json->out, value);
}

static void truth(struct json *json, const char *name, bool value)
{
    key(json, name);
    fputs(value ? "true" : "false", json->out);
}

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

/* How sure the numbers of each kind are. */
static void sure_write(struct json *json, const struct advise_question *question)
{
    open_as(json, "sure", '{');
    text(json, "counts", advise_sures[ADVISE_COMPUTED]);
    text(json, "states", advise_sures[ADVISE_COMPUTED]);
    text(json, "activations", advise_sures[question->activations_sure]);
    text(json, "constant", advise_sures[ADVISE_ASSUMED]);
    text(json, "sample_us", advise_sures[question->sample_sure]);
    text(json, "network", advise_sures[question->has_rate ? ADVISE_GIVEN : ADVISE_ASSUMED]);
    text(json, "step_us", advise_sures[ADVISE_MODELED]);
    close_as(json, '}');
}

static void question_write(struct json *json, const struct advise_question *question)
{
    open_as(json, "question", '{');
    text(json, "profile", question->profile.name);
    number(json, "parameters", (double)question->profile.elements);
    number(json, "samples", (double)question->samples);
    number(json, "batch", (double)question->batch);
    number(json, "epochs", question->epochs);
    text(json, "machine", question->shape.name);
    text(json, "accelerator", question->shape.accelerator ? question->shape.accelerator : "");
    number(json, "hosts_of_file", (double)question->file_hosts);
    number(json, "workers_per_machine", (double)question->per_machine);
    number(json, "worker_memory_bytes", question->memory_bytes);
    number(json, "usable_bytes", advise_usable_bytes(question->memory_bytes));
    text(json, "type", question->is_16 ? "bfloat16" : "float32");
    text(json, "optimizer", step_rules[question->optimizer]);
    number_if(json, "sample_us", question->sample_us > 0, question->sample_us);
    number(json, "rate_gbit_s", question->network.rate_gbit_s);
    number(json, "pcie_gb_s", question->network.pcie_gb_s);
    number(json, "nvlink_gb_s", question->network.nvlink_gb_s);
    number_if(json, "price", question->price >= 0, question->price);
    text(json, "currency", question->currency);
    number_if(json, "finish_by_s", question->finish_s > 0, question->finish_s);
    close_as(json, '}');
}

static void rung_write(struct json *json, const struct advise_rung *rung)
{
    static const char *const whys[] = {"fits", "too large", "one worker", "not possible", "not known"};
    const struct advise_memory *memory = &rung->memory;
    open_as(json, NULL, '{');
    text(json, "way", advise_way_names[rung->kind]);
    text(json, "answer", whys[rung->why]);
    if (rung->why <= ADVISE_TOO_LARGE) {
        number(json, "microbatch", rung->setup.micro);
        number(json, "microbatches", rung->microbatches);
        truth(json, "is_16_bit", rung->setup.is_16);
        truth(json, "recomputes", rung->setup.recomputes);
        number(json, "shards", rung->setup.shards ? rung->setup.shard_workers : 1);
        number(json, "tensor", rung->setup.tensor);
        number(json, "stages", rung->setup.stages);
        number(json, "weights_bytes", memory->weights);
        number(json, "gradients_bytes", memory->gradients);
        number(json, "states_bytes", memory->states);
        number(json, "master_bytes", memory->master);
        number(json, "activations_bytes", memory->activations);
        number(json, "buffers_bytes", memory->buffers);
        number(json, "constant_bytes", memory->constant);
        number(json, "total_bytes", memory->total);
    }
    close_as(json, '}');
}

static void ladder_write(struct json *json, const struct advise_point *point)
{
    open_as(json, "ladder", '[');
    for (int kind = 0; kind < ADVISE_WAYS; kind++)
        rung_write(json, &point->rungs[kind]);
    close_as(json, ']');
}

static void point_write(struct json *json, const char *name, const struct advise_point *point)
{
    static const char *const faults[] = {"", "zero", "degree", "fewer samples than workers", "batch above samples", "huge"};
    const struct advise_counts *counts = &point->counts;
    open_as(json, name, '{');
    text(json, "machine", point->shape->name);
    number(json, "machines", (double)point->machines);
    number(json, "workers", (double)counts->workers);
    number(json, "replicas", (double)counts->replicas);
    number(json, "batch", (double)point->batch);
    text(json, "fault", faults[point->fault]);
    if (!point->fault) {
        number(json, "least_per_worker", (double)counts->least);
        number(json, "most_per_worker", (double)counts->most);
        number(json, "iterations_kept", (double)counts->kept);
        number(json, "iterations_dropped", (double)counts->dropped);
        number(json, "last_batch", (double)(counts->last ? counts->last : point->batch));
        number(json, "steps", point->has_step ? point->steps : counts->steps);
        text(json, "way", point->way < ADVISE_WAYS ? advise_way_names[point->way] : "");
        number_if(json, "step_us", point->has_step, point->step_us);
        text(json, "limit", point->limit ? point->limit : "");
        text(json, "step_us_is", !point->has_step ? "" : point->is_simulated ? "simulated" : "arithmetic");
        number_if(json, "efficiency", point->has_step, point->efficiency);
        number_if(json, "job_s", point->has_step, point->seconds);
        number_if(json, "cost", point->cost >= 0, point->cost);
        ladder_write(json, point);
    }
    close_as(json, '}');
}

static void rates_write(struct json *json, const struct advise_question *question, const struct advise_answer *answer)
{
    open_as(json, "learning_rates", '[');
    for (int i = 0; i < answer->rate_count; i++) {
        const struct advise_rate *rate = &answer->rates[i];
        open_as(json, NULL, '{');
        text(json, "rule", rate->rule);
        number(json, "factor", rate->factor);
        number_if(json, "rate", question->rate > 0, rate->factor * question->rate);
        number(json, "warmup_epochs", rate->warmup_epochs);
        number_if(json, "beta1", rate->beta1 > 0, rate->beta1);
        number_if(json, "beta2", rate->beta2 > 0, rate->beta2);
        number(json, "epsilon_factor", rate->epsilon);
        number(json, "decay_factor", rate->decay);
        truth(json, "is_in_range", rate->is_in_range);
        text(json, "range", rate->limits);
        text(json, "source", rate->source);
        close_as(json, '}');
    }
    close_as(json, ']');
}

static void job_write(struct json *json, const struct advise_question *question, const struct advise_point *point)
{
    char *job = NULL;
    size_t length = 0;
    FILE *out = point->fault || point->way == ADVISE_WAYS ? NULL : open_memstream(&job, &length);
    if (out) {
        advise_job_print(question, point, out);
        fclose(out);
    }
    text(json, "job", job ? job : "");
    free(job);
}

void advise_json_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out)
{
    struct json json = {out, false};
    open_as(&json, NULL, '{');
    question_write(&json, question);
    open_as(&json, "points", '[');
    for (int i = 0; i < answer->count; i++) {
        point_write(&json, NULL, &answer->points[i]);
        if (answer->has_larger[i])
            point_write(&json, NULL, &answer->larger[i]);
    }
    close_as(&json, ']');
    number(&json, "shown", (double)answer->points[advise_shown(answer)].machines);
    truth(&json, "finishes", answer->finishes);
    if (answer->has_finish)
        point_write(&json, "finish", &answer->finish);
    rates_write(&json, question, answer);
    number_if(&json, "batch_norms", question->facts.batch_norms >= 0, question->facts.batch_norms);
    sure_write(&json, question);
    job_write(&json, question, &answer->points[advise_shown(answer)]);
    close_as(&json, '}');
    fputc('\n', out);
}
