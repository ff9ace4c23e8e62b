/* What to paste into a job: the document, and the lines of the script. */
#include "advise.h"

#include <string.h>

static bool is_cloud(const struct advise_shape *shape)
{
    return strchr(shape->name, '.') != NULL;
}

static void document_print(const struct advise_question *question, const struct advise_point *point, FILE *out)
{
    fprintf(out, "# job.toml\ninstance_count = %zu\n", point->machines);
    if (is_cloud(&question->shape))
        fprintf(out, "instance_type = \"ml.%s\"\n", question->shape.name);
    fprintf(out, "workers_per_host = %zu\n", point->per_machine);
    fputs("distribution.smdistributed.dataparallel.enabled = true\n", out);
}

static void microbatches_print(const struct advise_rung *rung, FILE *out)
{
    fprintf(out, "\n# train.py: %.0f sample%s in each of %.0f microbatch%s of a step", rung->setup.micro,
            rung->setup.micro == 1 ? "" : "s", rung->microbatches, rung->microbatches == 1 ? "" : "es");
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
    else if (rung->kind < ADVISE_WAY_TENSOR)
        fputs("model = shoal.torch.DistributedDataParallel(model, bucket_cap_mb=25)\n", out);
    if (rung->microbatches > 1 && rung->kind < ADVISE_WAY_TENSOR)
        fputs("# all microbatches of a step but the last: with model.no_sync(): ...\n", out);
}

/* The calls that divide the model. Pipeline refuses models on GPUs. */
static void cuts_print(const struct advise_question *question, const struct advise_rung *rung, FILE *out)
{
    const struct advise_setup *setup = &rung->setup;
    if (setup->tensor > 1)
        fprintf(out, "model = shoal.torch.tensor_parallel(model, %.0f)\n", setup->tensor);
    if (setup->stages > 1 && question->shape.accelerator)
        fputs("# stages on GPUs: torch.distributed.pipelining over the backend \"shoal\"\n", out);
    else if (setup->stages > 1)
        fprintf(out, "pipeline = shoal.torch.Pipeline(model, example, microbatches=%.0f)\n", rung->microbatches);
}

static void degrees_print(const struct advise_question *question, const struct advise_rung *rung, FILE *out)
{
    const struct advise_setup *setup = &rung->setup;
    if (rung->kind < ADVISE_WAY_TENSOR)
        return;
    fprintf(out, "# degrees: tensor %.0f, pipeline %.0f; microbatches: %.0f. With several replicas pass the process groups\n",
            setup->tensor, setup->stages, rung->microbatches);
    cuts_print(question, rung, out);
    if (setup->stages > 1)
        fprintf(out, "# schedule: shoal sim pipeline --stages %.0f --microbatches %.0f\n", setup->stages, rung->microbatches);
}

void advise_job_print(const struct advise_question *question, const struct advise_point *point, FILE *out)
{
    const struct advise_rung *rung = &point->rungs[point->way];
    document_print(question, point, out);
    microbatches_print(rung, out);
    wrapper_print(question, rung, out);
    degrees_print(question, rung, out);
}
