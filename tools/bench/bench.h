/* Shared by the files of `shoal bench`: the options, one line of results, and the page that local workers share for the bare
 * cache-line exchange. Uses only Shoal's public header. Everything here runs on the main thread of its process. */
#ifndef SHOAL_TOOLS_BENCH_H
#define SHOAL_TOOLS_BENCH_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stdint.h>

enum bench_collective {
    BENCH_ALLREDUCE,
    BENCH_REDUCE,
    BENCH_REDUCESCATTER,
    BENCH_BROADCAST,
    BENCH_ALLGATHER,
    BENCH_GATHER,
    BENCH_SCATTER,
    BENCH_ALLTOALL,
    BENCH_BARRIER,
    BENCH_PROBE,
    BENCH_COLLECTIVES
};

enum bench_memory { BENCH_PLAIN, BENCH_SHARED, BENCH_GPU };

enum bench_operand { BENCH_NONE, BENCH_VECTOR, BENCH_PARTS };

/* How a collective uses its operands. */
struct bench_kind {
    const char *name;
    enum bench_operand input, output;
    bool input_at_root, output_at_root; /* the other ranks have none */
    bool reduces;
    int bus_trips;   /* how often one rank's memory or wire must carry the larger operand, */
    bool bus_others; /* without this rank's share of it */
};
const struct bench_kind *bench_kind(enum bench_collective collective);

/* BENCH_TRIAL: within this many operations of a size, rank 0 tries both ways of writing (src/engine/stores.h). */
enum { BENCH_TRIAL = 60 };
enum {
    BENCH_WARMUPS = 3,
    BENCH_ITERATIONS_MAX = 100000,
    BENCH_RANKS_MAX = 1024,
    BENCH_RANKS_USUAL = 2,
    BENCH_ROOT = 0,
    BENCH_SCALE = 2
};

struct bench_options {
    bool help;
    int collective; /* enum bench_collective; -1 if not given */
    int ranks;      /* 0 if not given */
    size_t bytes_min, bytes_max;
    int factor;
    int memory; /* enum bench_memory */
    bool in_place;
    bool pin;
    int bind; /* enum bind_mode */
    int warm; /* 0 fresh, 1 warm */
    enum shoal_type type;
    int op; /* enum shoal_op */
    bool check;
    int json;       /* 0 table, 1 json */
    bool wide;      /* all columns of the table */
    int probe;      /* 0 none, 1 memory */
    int iterations; /* 0: depends on the size */
    int seconds;    /* most time for one size, roughly */
    size_t offset_bytes, gap_bytes;
    int timeout_s;
    int late_ms; /* the last rank arrives this much later, and time counts from its arrival; 0: off */
};

/* Reads the arguments after the command's name. If one is invalid, prints one line to stderr and returns false. */
bool bench_options_parse(int argc, char **argv, struct bench_options *options_out);

/* Returns "plain" and so on. Static storage. */
const char *bench_memory_name(int memory);

/* Returns "sum" and so on. Static storage. */
const char *bench_op_name(int op);

/* One line of results. Times are the slowest rank's. */
struct bench_result {
    enum bench_collective collective;
    int ranks;
    int hosts;
    size_t bytes; /* of the larger operand */
    const char *algorithm;
    size_t iterations;
    double median_us, p99_us;
    double exchange_ns; /* negative: not measured */
    double loop_us;     /* per operation, of many in a row without barriers */
    double cpu_us;      /* of the same operations, all ranks together */
    uint64_t errors;    /* wrong elements, all ranks and iterations together */
};

double bench_algbw_gb_s(const struct bench_result *result);
double bench_busbw_gb_s(const struct bench_result *result);

/* For rank 0. probe: the memory probe's result for the same size, or NULL. */
void bench_header_print(const struct bench_options *options, int ranks, int hosts, double exchange_ns);
void bench_result_print(const struct bench_options *options, const struct bench_result *result,
                        const struct bench_result *probe);

/* For the functions of a rank, which return the status of the first call that fails. */
#define BENCH_TRY(expression)                              \
    do {                                                   \
        const enum shoal_status try_status = (expression); \
        if (try_status != SHOAL_OK)                        \
            return try_status;                             \
    } while (0)

/* Prints "2 MiB" to text_out, which has 24 bytes, and returns it. */
char *bench_size_print(size_t bytes, char text_out[24]);

/* Returns seconds on the monotonic clock. */
double bench_now(void);

/* The page that local workers share. Create it before forking them. Returns NULL without memory. */
struct bench_area;
struct bench_area *bench_area_create(void);
void bench_area_destroy(struct bench_area *area);

/* Measures a bare cache-line exchange between ranks 0 and 1 while the others sleep. All ranks call it; `number` counts the
 * calls from 1. *ns_out is for rank 0. Returns false if the others did not arrive within timeout_s. */
bool bench_exchange_measure(struct bench_area *area, int rank, uint64_t number, double timeout_s, double *ns_out);

/* Reads and writes bytes at memory once, with ordinary stores. */
void bench_memory_touch(void *memory, size_t bytes);

/* The contents of a buffer. The input of rank r is r % 8 + (k + turn) % 7, so sums are exact in any order, and a stale result
 * never looks right. Each part of a partitioned operand has its own turn. */
struct bench_pattern {
    enum shoal_type type;
    enum shoal_op op;
    int first, ranks; /* the operator was applied to the inputs of `ranks` ranks, from `first` on */
    uint64_t turn;
};

/* Fills count elements with the input of rank pattern->first. */
void bench_pattern_write(void *memory, size_t count, const struct bench_pattern *pattern);

/* Returns the number of elements that differ from the pattern. */
uint64_t bench_pattern_verify(const void *memory, size_t count, const struct bench_pattern *pattern);

/* Local workers, each a process with the environment of a launcher. */
struct bench_crew {
    int ranks; /* 0: the usual number */
    bool pin;
    int bind; /* enum bind_mode */
    int (*run)(const void *arg);
    const void *arg;
};

/* Calls `run` in each worker; its result is the worker's exit code. Returns the exit code of the first worker that failed, or
 * 0. */
int bench_crew_run(const struct bench_crew *wanted);

/* `shoal bench step`; argv[0] is "step". Returns the exit code. */
int bench_step_run(int argc, char **argv);

/* `shoal bench scaling`; argv[0] is "scaling". Returns the exit code. */
int bench_scaling_run(int argc, char **argv);

/* `shoal bench pipeline`; argv[0] is "pipeline". Returns the exit code. */
int bench_pipeline_run(int argc, char **argv);

/* `shoal bench optimizer`; argv[0] is "optimizer". Returns the exit code. */
int bench_optimizer_run(int argc, char **argv);

/* Runs the whole measurement as one rank of the job that the environment describes. area is NULL under a foreign launcher.
 * Returns the exit code, after printing the reason if it is not 0. */
int bench_worker_run(const struct bench_options *options, struct bench_area *area);

#endif
