#include "bench.h"

#include <errno.h>
#include <string.h>

#include "tool.h"

static const char help_text[] =
    "Usage: shoal bench COLLECTIVE [options]\n"
    "       shoal bench step [options]        a whole training step: shoal bench step --help\n"
    "       shoal bench scaling [options]     training steps on 1, 2, 4, ... workers: shoal bench scaling --help\n"
    "       shoal bench pipeline [options]    steps of a pipeline: shoal bench pipeline --help\n"
    "       shoal bench optimizer [options]   steps of optimizers on one core: shoal bench optimizer --help\n"
    "\n"
    "COLLECTIVE is allreduce, reduce, reducescatter, broadcast, allgather, gather, scatter, alltoall or barrier.\n"
    "Dashes are allowed (reduce-scatter). The root is rank 0.\n"
    "\n"
    "Measures how long a collective takes here. It starts -n local workers; under shoal run, torchrun, mpirun or\n"
    "srun it uses the ranks that they started. Defaults are in parentheses.\n"
    "\n"
    "    -n N                     workers to start (2)\n"
    "    --min, --max SIZE        smallest and largest size (8, 256M), both included; K, M, G are powers of 1024. A size is\n"
    "                             the bytes of the larger operand, over all parts if it has one part per rank. It is\n"
    "                             rounded down to whole elements per part, at least one\n"
    "    --factor N               ratio of one size to the one before it (8)\n"
    "    --type TYPE              float32, float64, bfloat16, float16, int64, int32, int8, uint8 (float32); or short: f32, i8\n"
    "    --memory plain|shared|gpu\n"
    "                             plain: ordinary memory. shared: memory from shoal_mem_alloc, which other ranks map.\n"
    "                             gpu: memory of a CUDA device; rank r of a host uses device r modulo their number (plain)\n"
    "    --in-place               the output is the input, or one of them is this rank's part of the other\n"
    "    --op OPERATOR            sum, avg, max, min, prod, scaled-sum (by 2); for integers also bitand, bitor, bitxor (sum)\n"
    "    --format table|json      json: one object per size, each on its own line (table)\n"
    "    --check                  verify every element after each operation, outside the timing, not only once before each\n"
    "                             size\n"
    "    --inputs fresh|warm      fresh: rewrite the input before each operation, as a backward pass does; warm: leave it\n"
    "                             (fresh)\n"
    "    --iterations N           operations per size. Default: for a quarter of a second below 64 KiB (500 to 20,000), 60\n"
    "                             below 8 MiB, 12 above, and fewer if they would take too long\n"
    "    --seconds S              most time for one size, but at least 5 iterations (4)\n"
    "    --bind slice|core|none   cores of each worker: its own share of the cores that this command may use, one core, or\n"
    "                             the kernel's choice (slice); see shoal run --help\n"
    "    --pin                    instead of --bind: worker r stays on core r modulo their number. If there are more ranks\n"
    "                             than cores, --bind leaves them to the kernel, whose placement changes from second to\n"
    "                             second and decides the time of small operations\n"
    "    --probe memory           also time reading and writing each rank's own buffer once, all ranks at the same time:\n"
    "                             the bound for an all-reduce in place in shared memory. With --memory gpu, time a copy of\n"
    "                             the buffer to the host and one back\n"
    "    --late MS                the last rank sleeps for this time first; the time counts from its arrival to the end of\n"
    "                             the last rank\n"
    "    --wide                   show all columns of the table; without it, a row fits 100 columns\n"
    "    --offset BYTES           move both buffers by this much from the start of their page\n"
    "    --gap SIZE               distance from input to output; 256M is a hard case for some processors\n"
    "    --timeout S              an operation that takes longer fails (60)\n"
    "\n"
    "How an operation is measured: every rank rewrites its input (not timed), all ranks meet in a barrier, each rank times\n"
    "the operation, and the time of the slowest counts. A size begins with one operation whose result is verified element\n"
    "by element, and three warm-ups; then the median and the 99th percentile of the iterations count. Inputs are such that\n"
    "sums are exact in any order, so results are compared bit by bit. Without --iterations there are 57 more warm-ups if\n"
    "they fit into --seconds, because rank 0 tries two ways of writing during the first operations of a size.\n"
    "\n"
    "Figures:\n"
    "    algbw      bytes / time, for the bytes of the larger operand; 1 GB is 10^9 bytes\n"
    "    busbw      what the memory or wire of one rank carries: algbw times 2 (n-1)/n for allreduce, 1 for reduce and\n"
    "               broadcast, (n-1)/n for all others\n"
    "    loop       time per operation in a row of many, without barriers between them (--wide)\n"
    "    cpu        CPU time per operation in that row, of all ranks together\n"
    "    exchange   one bare cache-line exchange between ranks 0 and 1, measured just before; --wide shows it for each size.\n"
    "               Virtual cores sometimes share a cache (near, about 60 ns) and sometimes do not (far, about 260 ns); a\n"
    "               microsecond or more means that both ranks use one core, or that another program runs (crowded).\n"
    "               Compare only figures of the same state.\n"
    "\n"
    "Examples:\n"
    "    shoal bench allreduce\n"
    "    shoal bench allreduce --memory shared --in-place --probe memory --min 64M\n"
    "    shoal bench all-gather -n 4 --type bfloat16 --memory shared --in-place\n"
    "    shoal bench allreduce -n 3 --min 12345676 --max 12345676 --offset 4 --check --format json\n"
    "    mpirun -n 2 shoal bench broadcast --max 16M\n"
    "\n"
    "Exit codes: 0 success, 1 a worker failed or an element was wrong, 2 invalid arguments.\n";

/* The measurement by a worker of `shoal bench COLLECTIVE`. */
struct collective_task {
    const struct bench_options *options;
    struct bench_area *area;
};

static int collective_run(const void *arg)
{
    const struct collective_task *task = arg;
    return bench_worker_run(task->options, task->area);
}

int shoal_tool_bench(int argc, char **argv)
{
    struct bench_options options;
    if (argc > 1 && !strcmp(argv[1], "step"))
        return bench_step_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "scaling"))
        return bench_scaling_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "pipeline"))
        return bench_pipeline_run(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "optimizer"))
        return bench_optimizer_run(argc - 1, argv + 1);
    if (!bench_options_parse(argc, argv, &options))
        return TOOL_EXIT_USAGE;
    if (options.help) {
        fputs(help_text, stdout);
        return tool_output_finish("bench", 0);
    }
    if (tool_is_launched())
        return bench_worker_run(&options, NULL);
    struct bench_area *area = bench_area_create();
    if (!area) {
        fprintf(stderr, "shoal bench: no memory: %s\n", strerror(errno));
        return 1;
    }
    const struct collective_task task = {&options, area};
    const struct bench_crew wanted = {options.ranks, options.pin, options.bind, collective_run, &task};
    const int code = bench_crew_run(&wanted);
    bench_area_destroy(area);
    return code;
}
