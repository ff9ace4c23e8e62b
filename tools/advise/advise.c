/* `shoal advise`: how to scale the training of a model, computed from its profile. */
#include "advise.h"

#include <stdlib.h>

#include "tool.h"

static const char help_text[] =
    "Usage: shoal advise --profile MODEL --samples N --batch N --machine SHAPE [options]\n"
    "\n"
    "Answers how to train a model on more machines: how many samples each worker computes, in how many steps; what fits into\n"
    "a worker's memory, and which way of training to take if the model does not fit; how long a step and the job take, and\n"
    "what they cost, on each number of machines; which learning rate belongs to the new batch; what to write into the job.\n"
    "Each number comes with its formula, and the page ends with how sure each is. Nothing is measured, and no machine is\n"
    "asked. K, M, G are powers of 1024. Defaults are in parentheses.\n"
    "\n"
    "    --profile MODEL          resnet50, bert-large, gpt2, or a file as in shoal sim step --help, or one that\n"
    "                             shoal.torch.profile(model, example).save(FILE) wrote: times and activations are then\n"
    "                             measured ones\n"
    "    --samples N              samples of the data set\n"
    "    --batch N                samples of a step, of all workers together\n"
    "    --machine SHAPE          p3.2xlarge, p3.8xlarge, p3.16xlarge, p3dn.24xlarge, p4d.24xlarge, p4de.24xlarge,\n"
    "                             p5.4xlarge, p5.48xlarge, p5e.48xlarge, p5en.48xlarge, p6-b200.48xlarge,\n"
    "                             p6-b300.48xlarge, g4dn.xlarge, g4dn.12xlarge, g4dn.metal, g5.xlarge, g5.12xlarge,\n"
    "                             g5.48xlarge, g6.xlarge, g6.12xlarge, g6.48xlarge, g6e.xlarge, g6e.48xlarge, dgx-1,\n"
    "                             dgx-a100, dgx-h100, dgx-b200; \"ml.\" may come before it.\n"
    "                             this: the GPUs that CUDA_VISIBLE_DEVICES leaves; without any, the cores and the free\n"
    "                             memory of this machine. FILE: hosts, one a line, as for shoal doctor --hosts. Each\n"
    "                             counts as a machine like this one; slots=N are its workers\n"
    "    --count LIST             numbers of machines: 1,2,6, or a range such as 1-16 whose numbers double (1, or\n"
    "                             all hosts of FILE)\n"
    "    --epochs E               passes over the samples (1)\n"
    "    --per-machine N          workers of a machine (its GPUs; one without GPUs)\n"
    "    --worker-memory SIZE     memory of a worker (that of its GPU, or its share of the machine's)\n"
    "    --type TYPE              of weights, gradients and activations: float32, bfloat16 or float16; 16 bits with float32\n"
    "                             masters (float32)\n"
    "    --optimizer RULE         sgd, momentum, adam, adamw, adagrad, lion or lamb (momentum for resnet50, else adamw)\n"
    "    --backward MS            measured length of a backward pass of one worker, in milliseconds, for --measured-batch\n"
    "                             samples (operations of the model, divided by an assumed share of the GPU's peak)\n"
    "    --forward MS             measured length of the forward pass (half of --backward)\n"
    "    --measured-batch N       samples of these passes\n"
    "    --activations SIZE       bytes that a sample's forward pass keeps for its backward pass, in float32 (formulas for\n"
    "                             the built-in models)\n"
    "    --batch-norms N          layers of batch normalization in a model from a file\n"
    "    --fused-attention        a transformer does not keep the scores of its attention, as with torch's\n"
    "                             scaled_dot_product_attention\n"
    "    --keep batch|worker      what stays when machines are added: the batch, or each worker's samples. With worker,\n"
    "                             --batch is for the first number of --count (batch)\n"
    "    --from-batch N           the batch for which learning rate and epochs are known (--batch)\n"
    "    --learning-rate RATE     the learning rate there\n"
    "    --critical-batch N       the critical batch: steps then grow with the batch as in McCandlish et al. 2018\n"
    "    --price PRICE            of a machine for an hour, with its currency: 3.06USD. Also of a larger shape of the family,\n"
    "                             which is then compared (the next larger one): 3.06USD,p3.16xlarge=24.48USD\n"
    "    --finish-by TIME         finds the fewest machines that need at most this long: 30min, 12h, 2d\n"
    "    --format text|json|html  json: one object; html: one file with the curve, without scripts (text)\n"
    "    --rate RATE, --latency TIME, --message-us US, --stack RATE, --memory RATE, --signal-us US, --header SIZE,\n"
    "    --frame SIZE, --burst SIZE, --burst-rate RATE, --pause TIME, --cores N, --threads N, --one-machine,\n"
    "    --pcie LINK, --pcie-switch LINK, --switch-gpus N, --switch-adapters, --nvlink LINK, --unit SIZE, --ring SIZE,\n"
    "    --copy-us US, --host-memory RATE\n"
    "                             the network and the inside of a machine, as in shoal sim --help (those of the shape)\n"
    "\n"
    "The ways are tried in the order of the page. Data parallel, smaller batch, 16 bit and recomputation keep the whole model\n"
    "on each worker. The others divide it: they take the largest microbatch that fits, and 16 bit or recomputation only if\n"
    "the model does not fit without. Steps of the first seven ways are simulated as shoal sim step does; those of tensor\n"
    "parallelism and pipelines are arithmetic, with equal stages and the 1F1B schedule.\n"
    "\n"
    "Examples:\n"
    "    shoal advise --profile resnet50 --samples 1281167 --batch 256 --epochs 90 --machine p3.2xlarge --count 1-8\n"
    "    shoal advise --profile gpt2 --samples 9000000 --batch 512 --machine p4d.24xlarge --count 1-16 --type bfloat16\n"
    "    shoal advise --profile resnet50 --samples 50000 --batch 64 --machine p3dn.24xlarge --count 4\n"
    "    shoal advise --profile resnet50 --samples 1281167 --batch 256 --machine p3.2xlarge --price 3.06USD --finish-by 12h\n"
    "    shoal advise --profile gpt2 --samples 100000 --batch 32 --machine this --backward 900 --measured-batch 4\n"
    "\n"
    "Exit codes:\n"
    "    0    success\n"
    "    1    failure\n"
    "    2    invalid arguments or an invalid profile\n"
    "    3    no way fits into memory, or divides the batch, with any number of machines given\n"
    "    4    no number of machines finishes in time\n";

/* Returns the exit code of an answer. */
static int verdict(const struct advise_question *question, const struct advise_answer *answer)
{
    const struct advise_point *shown = &answer->points[advise_shown(answer)];
    if (shown->fault || shown->way == ADVISE_WAYS)
        return ADVISE_EXIT_NO_MEMORY;
    return question->finish_s > 0 && !answer->finishes ? ADVISE_EXIT_NO_TIME : 0;
}

static int question_answer(const struct advise_question *question)
{
    struct advise_answer *answer = malloc(sizeof *answer);
    if (!answer)
        return sim_step_memory_fail();
    const int code = advise_answer_find(question, answer);
    if (!code && question->format == ADVISE_JSON)
        advise_json_print(question, answer, stdout);
    else if (!code && question->format == ADVISE_HTML)
        advise_html_print(question, answer, stdout);
    else if (!code)
        advise_text_print(question, answer, stdout);
    const int exit_code = code ? code : verdict(question, answer);
    free(answer);
    return exit_code;
}

int shoal_tool_advise(int argc, char **argv)
{
    struct advise_question question;
    int code = TOOL_EXIT_USAGE;
    if (advise_options_parse(argc, argv, &question, &code)) {
        code = 0;
        if (question.help)
            fputs(help_text, stdout);
        else
            code = question_answer(&question);
        code = tool_output_finish("advise", code);
    }
    step_profile_free(&question.profile);
    return code;
}
