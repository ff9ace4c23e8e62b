/* What to paste into a job: the document, and the lines of the script. */
#include "advise.h"

#include <math.h>
#include <string.h>

static bool is_cloud(const struct advise_shape *shape)
{
    return strchr(shape->name, '.') != NULL;
}

static bool divides_model(const struct advise_rung *rung)
{
    return rung->setup.tensor > 1 || rung->setup.stages > 1;
}

/* smdistributed.modelparallel divides models in the memory of hosts only. */
static bool is_by_smp(const struct advise_question *question, const struct advise_rung *rung)
{
    return divides_model(rung) && !question->shape.accelerator;
}

/* Returns the fewest microbatches that divide the samples of a replica, and are not fewer than those of the way.
 * smp.step refuses others. */
static double microbatches_of_smp(const struct advise_rung *rung)
{
    const size_t samples = (size_t)rung->per_replica, least = (size_t)rung->microbatches;
    size_t found = samples;
    for (size_t divisor = 1; divisor <= samples / divisor; divisor++) {
        if (samples % divisor)
            continue;
        if (divisor >= least && divisor < found)
            found = divisor;
        if (samples / divisor >= least && samples / divisor < found)
            found = samples / divisor;
    }
    return (double)found;
}

/* ---- The document -------------------------------------------------------------------------------------------------------- */

static void number_print(const char *name, double value, FILE *out)
{
    fprintf(out, "distribution.smdistributed.modelparallel.parameters.%s = %.0f\n", name, value);
}

static void switch_print(const char *name, FILE *out)
{
    fprintf(out, "distribution.smdistributed.modelparallel.parameters.%s = true\n", name);
}

/* The memory of the first stage is that of as many active microbatches as there are stages; the package's default is two
 * more. */
static void smp_print(const struct advise_rung *rung, FILE *out)
{
    const struct advise_setup *setup = &rung->setup;
    fputs("distribution.mpi.enabled = true\n"
          "distribution.smdistributed.modelparallel.enabled = true\n",
          out);
    switch_print("ddp", out);
    number_print("pipeline_parallel_degree", setup->stages, out);
    number_print("microbatches", microbatches_of_smp(rung), out);
    if (setup->stages > 1)
        number_print("active_microbatches", fmin(setup->stages, microbatches_of_smp(rung)), out);
    if (setup->tensor > 1) {
        number_print("tensor_parallel_degree", setup->tensor, out);
        switch_print("prescaled_batch", out);
    }
    if (setup->is_16)
        switch_print("bf16", out);
}

static void document_print(const struct advise_question *question, const struct advise_point *point, FILE *out)
{
    const struct advise_rung *rung = &point->rungs[point->way];
    fprintf(out, "# job.toml\ninstance_count = %zu\n", point->machines);
    if (is_cloud(&question->shape))
        fprintf(out, "instance_type = \"ml.%s\"\n", question->shape.name);
    fprintf(out, "workers_per_host = %zu\n", point->per_machine);
    if (is_by_smp(question, rung))
        smp_print(rung, out);
    else
        fputs("distribution.smdistributed.dataparallel.enabled = true\n", out);
}

/* ---- The script ---------------------------------------------------------------------------------------------------------- */

static void microbatches_print(double samples, double count, FILE *out)
{
    fprintf(out, "\n# train.py: %.0f sample%s in each of %.0f microbatch%s of a step", samples,
            samples == 1 ? "" : "s", count, count == 1 ? "" : "es");
}

static void forms_print(const struct advise_rung *rung, FILE *out)
{
    microbatches_print(rung->setup.micro, rung->microbatches, out);
    if (rung->setup.is_16)
        fputs("; bfloat16, with float32 masters in the optimizer", out);
    if (rung->setup.recomputes)
        fputs("; torch.utils.checkpoint around each layer", out);
    fputs("\n", out);
}

static void wrapper_print(const struct advise_question *question, const struct advise_rung *rung, FILE *out)
{
    const bool is_gpu = question->shape.accelerator;
    if (rung->kind == ADVISE_WAY_PARAMETERS && is_gpu)
        fputs("# ShardedDataParallel trains on CPUs; on GPUs use torch's FSDP2 over the backend \"shoal\"\n"
              "torch.distributed.fsdp.fully_shard(model)\n",
              out);
    else if (rung->kind == ADVISE_WAY_PARAMETERS)
        fputs("model = shoal.torch.ShardedDataParallel(model, optimizer=optimizer, live_units=2)\n", out);
    else if (rung->kind == ADVISE_WAY_OPTIMIZER)
        fputs("model = shoal.torch.DistributedDataParallel(model, optimizer=optimizer,\n"
              "                                            bucket_cap_mb=25)\n",
              out);
    else
        fputs("model = shoal.torch.DistributedDataParallel(model, bucket_cap_mb=25)\n", out);
    if (rung->microbatches > 1)
        fputs("# all microbatches of a step but the last: with model.no_sync(): ...\n", out);
}

/* The calls that divide a model on GPUs. */
static void cuts_print(const struct advise_rung *rung, FILE *out)
{
    const struct advise_setup *setup = &rung->setup;
    fprintf(out,
            "# degrees: tensor %.0f, pipeline %.0f; microbatches: %.0f. "
            "With several replicas pass the process groups\n",
            setup->tensor, setup->stages, rung->microbatches);
    if (setup->tensor > 1)
        fprintf(out, "model = shoal.torch.tensor_parallel(model, %.0f)\n", setup->tensor);
    if (setup->stages > 1)
        fputs("# stages on GPUs: torch.distributed.pipelining over the backend \"shoal\"\n", out);
}

static void schedule_print(double stages, double microbatches, FILE *out)
{
    if (stages > 1)
        fprintf(out, "# schedule: shoal sim pipeline --stages %.0f --microbatches %.0f\n", stages, microbatches);
}

static void smp_script_print(const struct advise_rung *rung, FILE *out)
{
    const double microbatches = microbatches_of_smp(rung);
    microbatches_print(rung->per_replica / microbatches, microbatches, out);
    fprintf(out,
            "\n# batches of %.0f, from a sampler with num_replicas=smp.rdp_size(), rank=smp.rdp_rank(), "
            "drop_last=True\n"
            "import smdistributed.modelparallel.torch as smp\n"
            "smp.init()\n",
            rung->per_replica);
    if (rung->setup.is_16)
        fputs("# bf16 is autocast: float32 parameters and gradients need no masters, "
              "and are as many bytes in total\n",
              out);
    if (rung->setup.tensor > 1)
        fputs("with smp.tensor_parallelism():\n"
              "    model = Model()\n",
              out);
    fputs("model = smp.DistributedModel(model)\n", out);
    if (rung->setup.recomputes)
        fputs("# for each layer:\n"
              "smp.set_activation_checkpointing(layer)\n",
              out);
    fputs("optimizer = smp.DistributedOptimizer(optimizer)\n"
          "# forward and backward pass: a function with @smp.step (docs/model-parallel.md)\n",
          out);
    schedule_print(rung->setup.stages, microbatches, out);
}

void advise_job_print(const struct advise_question *question, const struct advise_point *point, FILE *out)
{
    const struct advise_rung *rung = &point->rungs[point->way];
    document_print(question, point, out);
    if (is_by_smp(question, rung)) {
        smp_script_print(rung, out);
        return;
    }
    forms_print(rung, out);
    if (divides_model(rung)) {
        cuts_print(rung, out);
        schedule_print(rung->setup.stages, rung->microbatches, out);
    } else {
        wrapper_print(question, rung, out);
    }
}
