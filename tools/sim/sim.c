/* `shoal sim`: predicts how long a collective would take on other machines. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#include "sim_progress.h"
#include "tool.h"

static const char help_text[] =
    "Usage: shoal sim COLLECTIVE [options]\n"
    "       shoal sim step [options]          a whole training step: shoal sim step --help\n"
    "       shoal sim pipeline [options]      schedules of a pipeline: shoal sim pipeline --help\n"
    "\n"
    "COLLECTIVE is allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier.\n"
    "Dashes are allowed (reduce-scatter). The root is rank 0.\n"
    "\n"
    "Predicts how long a collective takes on hosts that you need not have. It executes the plans of a real run there, with\n"
    "the same choice of algorithm, chunks and slots, on a model of cores and of a network. It measures nothing, so its\n"
    "answers are the same on every machine. They are as good as the numbers of the model: --explain-model prints what to\n"
    "measure for them.\n"
    "\n"
    "LIST is one number, several with commas (1,2,6), or a range (1-256) whose numbers grow by --factor. K, M, G are powers\n"
    "of 1024. Defaults are in parentheses.\n"
    "\n"
    "    --hosts LIST             number of hosts (2)\n"
    "    --ranks-per-host L       ranks on each host (1)\n"
    "    --bytes LIST             bytes of the larger operand, over all parts if it has one per rank (1MiB)\n"
    "    --rate RATE              payload that a host's adapter sends, and receives at the same time (25gbit)\n"
    "    --latency TIME           one way (30us)\n"
    "    --format table|json|csv  json: one object per line (table)\n"
    "    --factor N               ratio of a number of a range to the one before it (2)\n"
    "    --type TYPE              type of the elements, such as float32, bfloat16 or int8 (float32)\n"
    "    --operands plain|shared  plain: ordinary memory; shared: from shoal_mem_alloc, which ranks of a host map (plain)\n"
    "    --algorithm NAME         an algorithm of shoal info --algorithms, such as ring or mesh, instead of the usual choice,\n"
    "                             for calls that it can serve\n"
    "    --every-chunk            simulate all chunks, even when the time from one to the next has settled\n"
    "    --message-us US          CPU time of a message at its sender, and again at its receiver (2)\n"
    "    --stack RATE             rate at which a core moves bytes into or out of the network, such as 4GB/s for a kernel's\n"
    "                             TCP; 0: the adapter moves them alone (0)\n"
    "    --memory RATE            bytes that a rank reads and writes, together; a copy reads and writes (5GB/s)\n"
    "    --signal-us US           time of a signal to a rank of the same host (0.2)\n"
    "    --header SIZE            bytes of a message in addition to its payload (64)\n"
    "    --frame SIZE             bytes after which an adapter turns to another host's message (64K)\n"
    "    --burst SIZE             size of a token bucket that each adapter has in each direction, as behind traffic shapers\n"
    "                             and on cloud hosts: after a pause, this many bytes are not limited by --rate (0)\n"
    "    --burst-rate RATE        rate of these bytes (they take no time)\n"
    "    --pause TIME             how long the buckets have filled since the adapters emptied them; 0: they are full (0)\n"
    "    --cores N                cores of a host, which its ranks share (as many as ranks)\n"
    "    --threads N              threads of each rank, as SHOAL_THREADS: they share its sums and copies, each at --memory;\n"
    "                             with --cores at most the cores for each rank (1)\n"
    "    --network-threads N      threads of each rank, as SHOAL_NETWORK_THREADS, that share the bytes of --stack;\n"
    "                             with --cores at most the cores for each rank (1)\n"
    "    --one-machine            the hosts are emulated on one machine, and all ranks share its --cores\n"
    "    --pcie LINK              operands are on GPUs. LINK is the rate between a GPU and host memory, each way at the same\n"
    "                             time: gen3, gen4, gen5, or a rate such as 24GB/s (operands are in host memory)\n"
    "    --pcie-switch LINK       rate between a PCIe switch and host memory, for all GPUs below the switch (no limit)\n"
    "    --switch-gpus N          GPUs below each switch (all of a host)\n"
    "    --switch-adapters        the adapters are also below the switches, divided among them\n"
    "    --nvlink LINK            the GPUs of a host sum all-reduces among themselves, over links of this rate each way:\n"
    "                             gen2, gen3, gen4, or a rate. Only slices then leave a host, through --pcie\n"
    "    --unit SIZE              size of a copy between GPU and host memory (1M)\n"
    "    --ring SIZE              host memory that holds such units, each way (as much as communicators have)\n"
    "    --copy-us US             delay before the first byte of a copy (7)\n"
    "    --host-memory RATE       bytes that all ranks of a host and their copies read and write (only --memory is a limit)\n"
    "    --explain-model          print what the model assumes for a message, a stream and a copy, with the given options\n"
    "\n"
    "Examples:\n"
    "    shoal sim allreduce --hosts 4 --bytes 64M --rate 1gbit\n"
    "    shoal sim allreduce --hosts 1-256 --ranks-per-host 8 --bytes 100M,1G --format csv\n"
    "    shoal sim allreduce --hosts 16 --bytes 1K-1G --factor 8 --algorithm ring\n"
    "    shoal sim allreduce --hosts 1 --ranks-per-host 8 --bytes 64M --pcie gen4 --memory 20GB/s --host-memory 300GB/s\n"
    "    shoal sim --explain-model --rate 10gbit --latency 50us\n"
    "\n"
    "Environment: SHOAL_CHUNK_BYTES, SHOAL_DEPTH, SHOAL_INLINE_BYTES and SHOAL_ALGORITHMS count as in a run.\n"
    "\n"
    "Exit codes: 0 success, 1 failure, 2 invalid arguments.\n";

/* The library adds its reason to its output. */
static int question_ask(const struct sim_options *options, size_t hosts, size_t bytes, struct sim_row *row_out, int number)
{
    struct sim_progress progress;
    char text[96], size[24];
    struct shoal_simulation question = options->question;
    const char *const settings[] = {options->algorithm, NULL};
    char reason[1024] = "";
    FILE *out = fmemopen(reason, sizeof reason, "w");
    question.hosts = hosts;
    question.bytes = bytes;
    question.settings = *options->algorithm ? settings : NULL;
    row_out->hosts = hosts;
    row_out->answer = (struct shoal_simulated)SHOAL_SIMULATED_INIT;
    snprintf(text, sizeof text, "%zu host%s, %s (row %d of %d)", hosts, hosts == 1 ? "" : "s",
             sim_size_print((double)bytes, size), number, options->hosts.count * options->bytes.count);
    sim_progress_start(&progress, text);
    const enum shoal_status status = shoal_simulate(&question, out, &row_out->answer);
    sim_progress_stop(&progress);
    if (out)
        fclose(out);
    if (status == SHOAL_OK)
        return 0;
    fprintf(stderr, "shoal sim: %s%s", *reason ? reason : shoal_status_text(status), *reason ? "" : "\n");
    return status == SHOAL_ERR_ARGUMENT ? TOOL_EXIT_USAGE : 1;
}

static int questions_ask(const struct sim_options *options, struct sim_row *rows)
{
    int count = 0;
    for (int h = 0; h < options->hosts.count; h++) {
        for (int b = 0; b < options->bytes.count; b++) {
            const int code = question_ask(options, options->hosts.at[h], options->bytes.at[b], &rows[count], count + 1);
            if (code)
                return code;
            if (count == 0)
                sim_header_print(options);
            sim_row_print(options, &rows[count++]);
        }
    }
    return 0;
}

int shoal_tool_sim(int argc, char **argv)
{
    struct sim_options options;
    if (argc > 1 && !strcmp(argv[1], "step"))
        return sim_step_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "pipeline"))
        return sim_pipeline_run(argc - 1, argv + 1);
    if (!sim_options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.help || options.explains_model) {
        if (options.help)
            fputs(help_text, stdout);
        else
            sim_model_print(&options.question);
        return tool_output_finish("sim", 0);
    }
    struct sim_row *rows = calloc((size_t)options.hosts.count * (size_t)options.bytes.count, sizeof *rows);
    if (!rows) {
        fputs("shoal sim: no memory\n", stderr);
        return 1;
    }
    const int code = questions_ask(&options, rows);
    free(rows);
    return tool_output_finish("sim", code);
}
