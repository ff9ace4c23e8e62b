/* Tests of faults on real processes. A job is a few ranks that run one function. Each rank is a forked process with a
 * communicator over all of them. The parent sets a time limit, checks how the ranks ended and what they reported through shared
 * pages, and makes sure that nothing remains: no process, no descriptor, thread or mapping in a rank that ended in order, no
 * socket, nothing in /dev/shm.
 *
 * A program is a table of cases and a main that calls fault_main; it prints TAP. In the parent, only one thread may use these
 * functions. In a rank, any thread may call the fault_rank functions. */
#ifndef SHOAL_TESTS_FAULT_HARNESS_H
#define SHOAL_TESTS_FAULT_HARNESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <shoal/shoal.h>

#define FAULT_RANKS_MAX 8
#define FAULT_MS UINT64_C(1000000)
#define FAULT_KNOWN_MS 8000 /* for an end or an abort, on a busy machine; the deadline, which must not report it, is minutes */
#define FAULT_LOG_BYTES 32768

#if defined(__SANITIZE_ADDRESS__)
#define FAULT_SLOW 3 /* everything takes longer with sanitizers */
#else
#define FAULT_SLOW 1
#endif

#define FAULT_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))
#define FAULT_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* A rank's report to the parent. */
struct fault_result {
    pid_t pid;
    _Atomic uint64_t action_ns; /* when it caused the fault that its peers must notice */
    uint64_t failed_ns;         /* when its call returned */
    enum shoal_status status;   /* of that call */
    bool has_failure;
    struct shoal_failure failure;
    atomic_int stage; /* for the job's use: the stage that the rank has reached */
    double number;    /* for the job's use */
    char why[1024];   /* the first check that failed */
    char skip[256];   /* why the job cannot run here */
    char log[FAULT_LOG_BYTES];
    int end; /* status of waitpid; the parent writes it */
};

struct fault_shared {
    struct fault_result results[FAULT_RANKS_MAX];
};

struct fault_rank {
    int rank;
    int size;
    char address[64];
    const void *parameters;
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct fault_result *mine;
    struct fault_shared *shared;
    bool may_leave_memory; /* set by bodies that cannot free their memory */
};

typedef void (*fault_body_fn)(struct fault_rank *self);

struct fault_job {
    int size;
    fault_body_fn body;
    const void *parameters;
    const char *const *settings;     /* NULL, or more settings; NULL-terminated */
    fault_body_fn prepare;           /* runs before anything is created; NULL: nothing */
    bool is_bare;                    /* the body creates context and communicator itself */
    unsigned limit_ms;               /* after it all ranks are killed; 0: 20 s */
    int killed_by[FAULT_RANKS_MAX];  /* the signal that must end a rank, 0: none */
    int exits_with[FAULT_RANKS_MAX]; /* its expected exit code */
};

struct fault_test {
    const char *name;
    const void *parameters;
    struct fault_shared *shared; /* of the last job */
    bool has_failed;
    char skip[256];
};

struct fault_case {
    const char *name;
    void (*run)(struct fault_test *test);
    const void *parameters;
};

/* ---- The program ---- */

/* Runs the cases (those whose names contain argv[1], if it is present); returns the exit code. */
int fault_main(int argc, char **argv, const struct fault_case *cases, size_t count);

/* ---- The parent ---- */

/* Returns false, and fails the test, if a rank did not end as expected, left something behind or reported a failed check. Also
 * returns false if the job was skipped. */
bool fault_run(struct fault_test *test, const struct fault_job *job);

/* Notes a failure unless condition; returns condition. */
bool fault_expect(struct fault_test *test, bool condition, const char *format, ...) FAULT_PRINTF(3, 4);
bool fault_skip(struct fault_test *test, const char *format, ...) FAULT_PRINTF(2, 3);
/* Prints the log of each rank. */
void fault_print_logs(const struct fault_test *test, int size);

/* ---- A rank ---- */

uint64_t fault_now_ns(void);
void fault_sleep_ms(unsigned ms);
/* Records why the rank's check failed, unless condition; returns condition. */
bool fault_check(struct fault_rank *self, bool condition, const char *format, ...) FAULT_PRINTF(3, 4);
/* Reports that the job cannot run here. */
void fault_cannot(struct fault_rank *self, const char *format, ...) FAULT_PRINTF(2, 3);
/* Records the result of the call that should fail, with the communicator's failure. */
void fault_note(struct fault_rank *self, enum shoal_status status);
/* Records that the rank now causes the fault that its peers must notice. */
void fault_act(struct fault_rank *self);
/* Waits until all ranks except `except` (-1: none) have reached the stage; returns false after 30 s. */
bool fault_await(struct fault_rank *self, int stage, int except);
void fault_reach(struct fault_rank *self, int stage);
/* Creates a context with the harness's log and settings. */
enum shoal_status fault_context(struct fault_rank *self, const char *const *settings, struct shoal_context **context_out);
/* Returns a port that no process uses; in one process, another port while the first is held. */
int fault_free_port(void);
/* Returns count float32, shared (shoal_mem_alloc) or plain, or NULL after a failed check. The caller frees plain ones. */
float *fault_floats(struct fault_rank *self, bool is_shared, size_t count);
/* Sums rank + 1 in place and checks the result; returns false after a failed check. */
bool fault_allreduce_once(struct fault_rank *self, struct shoal_comm *comm, float *buffer, size_t count);

/* The resources that a process holds. */
struct fault_holdings {
    int descriptors;
    int threads;
    int mappings; /* mappings of Shoal's segments */
};
struct fault_holdings fault_holdings(void);
/* Returns the bytes of address space that this process has mapped, and those of them that are in memory. */
size_t fault_mapped_bytes(void);
size_t fault_resident_bytes(void);

#endif
