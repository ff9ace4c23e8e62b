/* Measures Shoal's kernels in a GPU's memory, with their 8 blocks. Prints one JSON object per line: the GB/s (of 10^9 bytes)
 * that a kernel reads and writes. Sums are also measured with all sources except the first in the next GPU's memory, if the
 * first GPU reaches it.
 *     build/bench/gpu_rates [BYTES]     of the longest array */
#include "device/gpu.h"
#include "gpu_driver.h"

#define ARRAYS (SHOAL_GPU_SOURCES_MAX + 1)
#define ROUNDS 5 /* the fastest counts */

enum kind { SUM, NARROW, WIDEN, QUANTIZE, DEQUANTIZE };

static const struct row {
    const char *name;
    enum kind kind;
    enum shoal_type type;
    int sources;
    size_t element;     /* of the longest array */
    double bytes_moved; /* for each element */
} rows[] = {
    {"sum of 2 float32", SUM, SHOAL_FLOAT32, 2, 4, 12},
    {"sum of 4 float32", SUM, SHOAL_FLOAT32, 4, 4, 20},
    {"sum of 8 float32", SUM, SHOAL_FLOAT32, 8, 4, 36},
    {"sum of 2 bfloat16", SUM, SHOAL_BFLOAT16, 2, 2, 6},
    {"sum of 4 bfloat16", SUM, SHOAL_BFLOAT16, 4, 2, 10},
    {"sum of 8 bfloat16", SUM, SHOAL_BFLOAT16, 8, 2, 18},
    {"sum of 8 float16", SUM, SHOAL_FLOAT16, 8, 2, 18},
    {"float32 to bfloat16", NARROW, SHOAL_BFLOAT16, 1, 4, 6},
    {"bfloat16 to float32", WIDEN, SHOAL_BFLOAT16, 1, 4, 6},
    {"float32 to 8 bits, with its error", QUANTIZE, SHOAL_FLOAT32, 1, 4, 13},
    {"8 bits to float32", DEQUANTIZE, SHOAL_FLOAT32, 1, 4, 5},
};

struct probe {
    struct shoal_log log;
    struct shoal_gpu *gpu;
    struct shoal_gpu_kernels *kernels;
    shoal_cu_stream stream;
    size_t bytes;
    shoal_cu_address arrays[ARRAYS]; /* the destination, and sources */
    shoal_cu_address peers[ARRAYS];  /* the same, but sources from the second on are the next GPU's; 0: no next GPU */
};

static void rates_must(struct probe *probe, enum shoal_status status)
{
    char text[SHOAL_LOG_TEXT_MAX] = "";
    if (status == SHOAL_OK)
        return;
    (void)shoal_log_last_error(&probe->log, text, sizeof text);
    fprintf(stderr, "gpu_rates: %s\n", text);
    exit(1);
}

static shoal_cu_address make_array(size_t bytes)
{
    shoal_cu_address at;
    CUDA(allocate(&at, bytes));
    return at;
}

static void make_peers(struct probe *probe)
{
    shoal_cu_device next;
    shoal_cu_context context;
    if (shoal_gpu_count(probe->gpu) < 2 || shoal_gpu_reach(probe->gpu, 0, 1) == SHOAL_GPU_REACH_NONE)
        return;
    CUDA(device_get(&next, 1));
    CUDA(primary_retain(&context, next));
    CUDA(peer_enable(context, 0));
    memcpy(probe->peers, probe->arrays, sizeof probe->peers);
    CUDA(context_push(context));
    for (int i = 2; i < ARRAYS; i++)
        probe->peers[i] = make_array(probe->bytes);
    CUDA(context_pop(&context));
}

static void open_rates(struct probe *probe, size_t bytes)
{
    shoal_cu_context context;
    memset(probe, 0, sizeof *probe);
    probe->bytes = bytes;
    (void)gpu_open(0);
    CUDA(context_current(&context));
    shoal_log_init_quiet(&probe->log);
    rates_must(probe, shoal_gpu_open(&probe->log, &probe->gpu));
    rates_must(probe, shoal_gpu_kernels_open(probe->gpu, context, &probe->kernels));
    CUDA(stream_create(&probe->stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    for (int i = 0; i < ARRAYS; i++)
        probe->arrays[i] = make_array(bytes);
    make_peers(probe);
}

static enum shoal_status launch(struct probe *probe, const struct row *row, const shoal_cu_address *at)
{
    const size_t count = probe->bytes / row->element;
    struct shoal_gpu_reduction sum = {
        .type = row->type, .op = SHOAL_SUM, .dest = at[0], .source_count = row->sources, .count = count};
    switch (row->kind) {
    case SUM:
        memcpy(sum.sources, at + 1, sizeof sum.sources);
        return shoal_gpu_reduce(probe->kernels, &sum, probe->stream);
    case NARROW:
        return shoal_gpu_narrow(probe->kernels, row->type, at[0], at[1], count, 1, probe->stream);
    case WIDEN:
        return shoal_gpu_widen(probe->kernels, row->type, at[0], at[1], count, 1, probe->stream);
    case QUANTIZE:
        return shoal_gpu_quantize(probe->kernels, at[0], at[1], at[2], at[3], count, probe->stream);
    default:
        return shoal_gpu_dequantize(probe->kernels, at[0], at[1], at[2], count, 1, false, probe->stream);
    }
}

/* Returns GB/s. */
static double rate_of(struct probe *probe, const struct row *row, const shoal_cu_address *at)
{
    double least = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = gpu_now();
        rates_must(probe, launch(probe, row, at));
        CUDA(stream_synchronize(probe->stream));
        const double took = gpu_now() - start;
        least = took < least ? took : least;
    }
    return row->bytes_moved * (double)(probe->bytes / row->element) / least * 1e-9;
}

static void print_row(struct probe *probe, const struct row *row)
{
    printf("{\"kernel\":\"%s\",\"bytes\":%zu,\"own_gb_s\":%.3f", row->name, probe->bytes, rate_of(probe, row, probe->arrays));
    if (row->kind == SUM && probe->peers[0])
        printf(",\"peer_gb_s\":%.3f", rate_of(probe, row, probe->peers));
    printf("}\n");
}

static void close_rates(struct probe *probe)
{
    for (int i = 0; i < ARRAYS; i++)
        CUDA(release(probe->arrays[i]));
    for (int i = 2; probe->peers[0] && i < ARRAYS; i++)
        CUDA(release(probe->peers[i]));
    CUDA(stream_destroy(probe->stream));
    shoal_gpu_kernels_close(probe->kernels);
    shoal_gpu_close(probe->gpu);
    shoal_log_fini(&probe->log);
}

int main(int count, char **words)
{
    struct probe probe;
    open_rates(&probe, count > 1 ? strtoul(words[1], NULL, 10) : (size_t)32 << 20);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++)
        print_row(&probe, &rows[i]);
    close_rates(&probe);
    return 0;
}
