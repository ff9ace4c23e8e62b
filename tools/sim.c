/* `shoal sim`: predicts how long a collective would take on other machines. */
#include "sim.h"
#include "sim_progress.h"

#include "tool.h"

#include <stdlib.h>
#include <string.h>

static const char help_text[] =
    "Usage: shoal sim COLLECTIVE [options]\n"
    "       shoal sim step [options]          a whole training step: shoal sim step --help\n"
    "\n"
    "COLLECTIVE is allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier; dashes are\n"
    "allowed (reduce-scatter), the root is rank 0.\n"
    "\n"
    "Predicts how long a collective takes on hosts that need not be there. It runs the plans that would run there, with the\n"
    "same choice of algorithm, chunks and slots, on a model of cores and of a network. Nothing is measured, and the answer is\n"
    "the same everywhere; it is as good as the numbers of the model: --explain-model says what to measure for them.\n"
    "\n"
    "LIST is one number, several with commas between (1,2,6), or ranges (1-256), which go up by --factor. Sizes take K, M, G\n"
    "(powers of 1024).\n"
    "\n"
    "    --hosts LIST             how many hosts (2)\n"
    "    --ranks-per-host L       on each (1)\n"
    "    --bytes LIST             the larger operand, all parts where it has one per rank (1MiB)\n"
    "    --factor N               from one number of a range to the next (2)\n"
    "    --type TYPE              the element, such as float32, bfloat16 or int8 (float32)\n"
    "    --operands plain|shared  ordinary memory, or from shoal_mem_alloc, which ranks of a host map (plain)\n"
    "    --algorithm NAME         a row of `shoal info --algorithms`, such as ring or mesh, instead of the table's choice,\n"
    "                             where it can serve\n"
    "    --every-chunk            simulate all chunks, also when the time from one to the next has settled\n"
    "    --rate RATE              payload that a host's adapter sends, and receives at the same time (25gbit)\n"
    "    --latency TIME           one way (30us)\n"
    "    --message-us US          CPU time of a message, where it is sent and again where it is received (2)\n"
    "    --stack RATE             what a core moves into or out of the network, as a kernel's TCP has it: 4GB/s; 0: the\n"
    "                             adapter does it alone (0)\n"
    "    --memory RATE            what a rank reads and writes in all (5GB/s); a copy reads and writes\n"
    "    --signal-us US           a signal to a rank of the same host (0.2)\n"
    "    --header SIZE            what a message has beside its payload (64)\n"
    "    --frame SIZE             after so many bytes an adapter goes on with another host's message (64K)\n"
    "    --burst SIZE             of a token bucket that each adapter has each way: after a pause so many bytes do not wait "
    "for\n"
    "                             --rate, as behind traffic shapers and on cloud hosts (0)\n"
    "    --burst-rate RATE        how fast they go (in no time)\n"
    "    --pause TIME             since the adapter sent all it could: so long the bucket has filled; 0: it is full (0)\n"
    "    --cores N                of a host, which its ranks share (as many as ranks)\n"
    "    --one-machine            hosts are emulated on one machine, whose --cores all ranks share\n"
    "    --pcie LINK              operands lie on GPUs, whose links to host memory carry so much each way at the same time:\n"
    "                             gen3, gen4, gen5, or a rate such as 24GB/s (operands are in host memory)\n"
    "    --pcie-switch LINK       the same of each PCIe switch, for all GPUs below it (no switch is a limit)\n"
    "    --switch-gpus N          below each switch (all of a host)\n"
    "    --switch-adapters        adapters are below the switches, too, divided among them\n"
    "    --nvlink LINK            GPUs of a host sum all-reduces among themselves, over links of so much each way: gen2, "
    "gen3,\n"
    "                             gen4, or a rate, such as PCIe's; only slices leave a host, through --pcie\n"
    "    --unit SIZE              of a copy between GPU and host memory (1M)\n"
    "    --ring SIZE              host memory for such units, each way (room for a chunk and three units)\n"
    "    --copy-us US             before the first byte of a copy (7)\n"
    "    --host-memory RATE       what all ranks of a host read and write, with their copies (--memory alone is a limit)\n"
    "    --format table|json|csv  json: one object per line (table)\n"
    "    --plot FILE              also draw the times, as SVG: over hosts, or of one number of hosts over sizes\n"
    "    --explain-model          print what the model takes for a message, a stream, a copy; with these options\n"
    "\n"
    "Examples:\n"
    "    shoal sim allreduce --hosts 4 --bytes 64M --rate 1gbit\n"
    "    shoal sim allreduce --hosts 1-256 --ranks-per-host 8 --bytes 100M,1G --plot scaling.svg\n"
    "    shoal sim allreduce --hosts 16 --bytes 1K-1G --factor 8 --algorithm ring\n"
    "    shoal sim allreduce --hosts 1 --ranks-per-host 8 --bytes 64M --pcie gen4 --memory 20GB/s --host-memory 300GB/s\n"
    "    shoal sim --explain-model --rate 10gbit --latency 50us\n"
    "\n"
    "Environment: SHOAL_CHUNK_BYTES, SHOAL_DEPTH, SHOAL_INLINE_BYTES and SHOAL_ALGORITHMS count as in a run.\n"
    "\n"
    "Exit codes: 0 success, 1 failure, 2 the arguments make no sense.\n";

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
    return options->plot && !sim_plot_write(options, rows, count) ? 1 : 0;
}

int shoal_tool_sim(int argc, char **argv)
{
    struct sim_options options;
    if (argc > 1 && !strcmp(argv[1], "step"))
        return sim_step_run(argc - 1, argv + 1);
    if (!sim_options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.help || options.explains_model) {
        if (options.help)
            fputs(help_text, stdout);
        else
            sim_model_print(&options.question);
        return tool_output_finish("sim", 0);
    }
    if (options.plot && !sim_plot_check(options.plot))
        return 1;
    struct sim_row *rows = calloc((size_t)options.hosts.count * (size_t)options.bytes.count, sizeof *rows);
    if (!rows) {
        fputs("shoal sim: no memory\n", stderr);
        return 1;
    }
    const int code = questions_ask(&options, rows);
    free(rows);
    return tool_output_finish("sim", code);
}
