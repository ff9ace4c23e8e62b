/* Times NCCL's all-reduce exactly as `shoal bench allreduce --memory gpu --inputs warm` times Shoal's: float32, sums, out of
 * place, a GPU for each rank, one JSON object per line and size.
 *     shoal run -n 4 build/bench/gpu_nccl LIBRARY MIN MAX FACTOR ITERATIONS
 * LIBRARY is the path of libnccl.so.2, which is loaded, not linked. The ranks meet through Shoal, which passes on NCCL's id.
 * One result is compared element by element. Three warm-ups follow, then the iterations. Each iteration starts at a barrier,
 * and the slowest rank's time counts. Exit code 0: all sums were right. */
#include "gpu_driver.h"
#include "shoal/shoal.h"

enum { WARMUPS = 3, NCCL_FLOAT32 = 7, NCCL_SUM = 0 };

struct nccl_id {
    char bytes[128];
};

/* member, name, signature */
#define NCCL_CALLS(X)                                                                                                        \
    X(version, "ncclGetVersion", (int *version))                                                                             \
    X(make_id, "ncclGetUniqueId", (struct nccl_id * id))                                                                     \
    X(join, "ncclCommInitRank", (void **comm, int ranks, struct nccl_id id, int rank))                                       \
    X(allreduce, "ncclAllReduce",                                                                                            \
      (shoal_cu_address input, shoal_cu_address output, size_t count, int type, int op, void *comm, shoal_cu_stream stream)) \
    X(leave, "ncclCommDestroy", (void *comm))

struct bench {
    struct shoal_context *context;
    struct shoal_comm *world;
    int rank, ranks;
    struct {
#define NCCL_MEMBER(member, name, signature) int(*member) signature;
        NCCL_CALLS(NCCL_MEMBER)
#undef NCCL_MEMBER
    } nccl;
    int version;
    void *comm;
    shoal_cu_stream stream;
    shoal_cu_address input, output;
    float *host;
};

static void must(bool is_good, const char *call, const char *why)
{
    if (is_good)
        return;
    fprintf(stderr, "gpu_nccl: %s: %s\n", call, why);
    exit(1);
}
#define SHOAL(call)                                                            \
    do {                                                                       \
        const enum shoal_status status_ = shoal_##call;                        \
        must(status_ == SHOAL_OK, "shoal_" #call, shoal_status_name(status_)); \
    } while (0)
#define NCCL(bench, call) must((bench)->nccl.call == 0, "NCCL's " #call, "an error; NCCL_DEBUG=WARN says more")

static void open_nccl(struct bench *bench, const char *path)
{
    struct nccl_id id;
    void *library = dlopen(path, RTLD_NOW);
    must(library != NULL, path, library ? "" : dlerror());
#define NCCL_FIND(member, name, signature) mock_client_symbol(library, name, &bench->nccl.member);
    NCCL_CALLS(NCCL_FIND)
#undef NCCL_FIND
    NCCL(bench, version(&bench->version));
    if (bench->rank == 0)
        NCCL(bench, make_id(&id));
    SHOAL(broadcast(bench->world, &id, &id, sizeof id, SHOAL_UINT8, 0, NULL));
    NCCL(bench, join(&bench->comm, bench->ranks, id, bench->rank));
}

static void open_bench(struct bench *bench, const char *path, size_t bytes)
{
    SHOAL(context_create(NULL, &bench->context));
    SHOAL(comm_create(bench->context, NULL, &bench->world));
    bench->rank = shoal_comm_rank(bench->world);
    bench->ranks = shoal_comm_size(bench->world);
    (void)gpu_open(bench->rank);
    CUDA(stream_create(&bench->stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    CUDA(allocate(&bench->input, bytes));
    CUDA(allocate(&bench->output, bytes));
    bench->host = malloc(bytes);
    must(bench->host != NULL, "malloc", "no memory");
    open_nccl(bench, path);
}

static void close_bench(struct bench *bench)
{
    NCCL(bench, leave(bench->comm));
    CUDA(release(bench->input));
    CUDA(release(bench->output));
    CUDA(stream_destroy(bench->stream));
    free(bench->host);
    SHOAL(comm_finalize(bench->world));
    shoal_comm_free(bench->world);
    shoal_context_destroy(bench->context);
}

/* Returns the microseconds of the slowest rank. */
static double run_once(const struct bench *bench, size_t count)
{
    double slowest;
    SHOAL(barrier(bench->world, NULL));
    const double start = gpu_now();
    NCCL(bench, allreduce(bench->input, bench->output, count, NCCL_FLOAT32, NCCL_SUM, bench->comm, bench->stream));
    CUDA(stream_synchronize(bench->stream));
    const double took = (gpu_now() - start) * 1e6;
    SHOAL(allreduce(bench->world, &took, &slowest, 1, SHOAL_FLOAT64, SHOAL_MAX, NULL));
    return slowest;
}

/* Returns how many of this rank's elements are not the sum of all ranks' inputs. */
static size_t count_errors(const struct bench *bench, size_t count)
{
    const float wanted = (float)(bench->ranks * (bench->ranks + 1)) / 2;
    size_t errors = 0;
    for (size_t i = 0; i < count; i++)
        bench->host[i] = (float)(bench->rank + 1);
    CUDA(copy_to_device_now(bench->input, bench->host, count * sizeof *bench->host));
    (void)run_once(bench, count);
    CUDA(copy_to_host_now(bench->host, bench->output, count * sizeof *bench->host));
    for (size_t i = 0; i < count; i++)
        errors += bench->host[i] != wanted;
    return errors;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_row(const struct bench *bench, size_t bytes, const double *times, size_t iterations, int64_t errors)
{
    const double median = times[iterations / 2], algbw = (double)bytes / median * 1e-3;
    printf("{\"collective\":\"allreduce\",\"ranks\":%d,\"bytes\":%zu,\"dtype\":\"float32\",\"memory\":\"gpu\","
           "\"algorithm\":\"nccl %d\",\"iterations\":%zu,\"median_us\":%.3f,\"p99_us\":%.3f,\"algbw_gb_s\":%.4f,"
           "\"busbw_gb_s\":%.4f,\"errors\":%lld}\n",
           bench->ranks, bytes, bench->version, iterations, median, times[iterations * 99 / 100], algbw,
           algbw * 2 * (bench->ranks - 1) / bench->ranks, (long long)errors);
    fflush(stdout);
}

/* Returns how many elements of all ranks were wrong. */
static int64_t measure(const struct bench *bench, size_t bytes, size_t iterations)
{
    const size_t count = bytes / sizeof(float);
    const int64_t own = (int64_t)count_errors(bench, count);
    int64_t errors;
    double *times = malloc(iterations * sizeof *times);
    must(times != NULL, "malloc", "no memory");
    SHOAL(allreduce(bench->world, &own, &errors, 1, SHOAL_INT64, SHOAL_SUM, NULL));
    for (int i = 0; i < WARMUPS; i++)
        (void)run_once(bench, count);
    for (size_t i = 0; i < iterations; i++)
        times[i] = run_once(bench, count);
    qsort(times, iterations, sizeof *times, by_value);
    if (bench->rank == 0)
        print_row(bench, bytes, times, iterations, errors);
    free(times);
    return errors;
}

int main(int count, char **words)
{
    struct bench bench = {.rank = 0};
    int64_t errors = 0;
    if (count != 6) {
        fprintf(stderr, "usage: gpu_nccl LIBRARY MIN MAX FACTOR ITERATIONS\n");
        return 2;
    }
    const size_t least = strtoull(words[2], NULL, 10), most = strtoull(words[3], NULL, 10),
                 factor = strtoull(words[4], NULL, 10), iterations = strtoull(words[5], NULL, 10);
    must(least >= sizeof(float) && factor > 1 && iterations > 0, "arguments", "MIN 4, FACTOR 2, ITERATIONS 1 at least");
    open_bench(&bench, words[1], most);
    for (size_t bytes = least; bytes <= most; bytes *= factor)
        errors += measure(&bench, bytes, iterations);
    close_bench(&bench);
    return errors != 0;
}
