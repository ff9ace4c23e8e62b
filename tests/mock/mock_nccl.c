/* The few entry points of NCCL that bench/gpu_nccl.c calls, so that the measurement is tested without NCCL and without a GPU:
 * sums of float32 among processes of one machine, over the driver that the program has loaded. The call waits for all of the
 * work. An id is the name of a file that the ranks map. */
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define FLOATS_MAX ((size_t)1 << 18) /* of an operand */
#define RANKS_MAX 8

enum { SUCCESS, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, FLOAT32 = 7, SUM = 0 };

struct id {
    char path[128];
};

struct meeting {
    atomic_uint arrived; /* never reset */
    float inputs[RANKS_MAX][FLOATS_MAX];
};

struct comm {
    struct meeting *meeting;
    int rank, ranks;
    unsigned turns; /* how often all have met */
    int (*synchronize)(void *stream);
    int (*download)(void *here, unsigned long long there, size_t bytes);
    int (*upload)(unsigned long long there, const void *here, size_t bytes);
};

static void meet(struct comm *comm)
{
    const unsigned all = ++comm->turns * (unsigned)comm->ranks;
    atomic_fetch_add(&comm->meeting->arrived, 1);
    while (atomic_load(&comm->meeting->arrived) < all)
        sched_yield();
}

static int find_in_driver(const char *name, int version, void *function_out)
{
    int (*find)(const char *name, void **function, int version, uint64_t flags, int *why);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *found = NULL;
    void *finder = driver ? dlsym(driver, "cuGetProcAddress_v2") : NULL;
    int why;
    if (!finder)
        return SYSTEM_ERROR;
    memcpy(&find, &finder, sizeof find);
    if (find(name, &found, version, 1, &why) != 0 || !found)
        return SYSTEM_ERROR;
    memcpy(function_out, &found, sizeof found);
    return SUCCESS;
}

EXPORT int ncclGetVersion(int *version);
EXPORT int ncclGetVersion(int *version)
{
    *version = 99999;
    return SUCCESS;
}

EXPORT int ncclGetUniqueId(struct id *id);
EXPORT int ncclGetUniqueId(struct id *id)
{
    memset(id, 0, sizeof *id);
    strcpy(id->path, "/dev/shm/mock_nccl.XXXXXX");
    const int fd = mkstemp(id->path);
    if (fd < 0 || ftruncate(fd, sizeof(struct meeting)) != 0)
        return SYSTEM_ERROR;
    close(fd);
    return SUCCESS;
}

EXPORT int ncclCommInitRank(struct comm **comm_out, int ranks, struct id id, int rank);
EXPORT int ncclCommInitRank(struct comm **comm_out, int ranks, struct id id, int rank)
{
    struct comm *comm = calloc(1, sizeof *comm);
    const int fd = open(id.path, O_RDWR | O_CLOEXEC);
    if (!comm || fd < 0 || ranks > RANKS_MAX)
        return SYSTEM_ERROR;
    *comm = (struct comm){.rank = rank, .ranks = ranks};
    comm->meeting = mmap(NULL, sizeof *comm->meeting, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (comm->meeting == MAP_FAILED || find_in_driver("cuStreamSynchronize", 2000, &comm->synchronize) != SUCCESS ||
        find_in_driver("cuMemcpyDtoH", 3020, &comm->download) != SUCCESS ||
        find_in_driver("cuMemcpyHtoD", 3020, &comm->upload) != SUCCESS)
        return SYSTEM_ERROR;
    meet(comm);
    if (rank == 0)
        unlink(id.path);
    *comm_out = comm;
    return SUCCESS;
}

EXPORT int ncclAllReduce(unsigned long long input, unsigned long long output, size_t count, int type, int op, struct comm *comm,
                         void *stream);
EXPORT int ncclAllReduce(unsigned long long input, unsigned long long output, size_t count, int type, int op, struct comm *comm,
                         void *stream)
{
    if (type != FLOAT32 || op != SUM || count > FLOATS_MAX)
        return INVALID_ARGUMENT;
    float *sums = calloc(count, sizeof *sums);
    if (!sums || comm->synchronize(stream) != 0 ||
        comm->download(comm->meeting->inputs[comm->rank], input, count * sizeof *sums) != 0)
        return SYSTEM_ERROR;
    meet(comm);
    for (int r = 0; r < comm->ranks; r++)
        for (size_t i = 0; i < count; i++)
            sums[i] += comm->meeting->inputs[r][i];
    meet(comm); /* all have finished reading */
    const int result = comm->upload(output, sums, count * sizeof *sums);
    free(sums);
    return result == 0 ? SUCCESS : SYSTEM_ERROR;
}

EXPORT int ncclCommDestroy(struct comm *comm);
EXPORT int ncclCommDestroy(struct comm *comm)
{
    munmap(comm->meeting, sizeof *comm->meeting);
    free(comm);
    return SUCCESS;
}
