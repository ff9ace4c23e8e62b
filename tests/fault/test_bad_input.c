/* Invalid arguments and settings, and starts that cannot succeed: each has one clear error that names the remedy; a
 * communicator that refused a call still works. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "fault_harness.h"

struct bad {
    enum shoal_status (*call)(struct fault_rank *self);
    enum shoal_status status;
    const char *says[3]; /* each is in the line */
    int ranks;           /* 0: two, with a communicator; otherwise the call creates what it needs */
    int more_lines;      /* than one, on rank 0 */
};

/* ---- The messages -------------------------------------------------------------------------------------------------------- */

/* Makes the call and captures stderr; text receives the log and stderr. */
static enum shoal_status call_and_listen(struct fault_rank *self, const struct bad *bad, char *text, size_t bytes)
{
    const int keep = memfd_create("stderr", MFD_CLOEXEC), saved = dup(STDERR_FILENO);
    const size_t logged = strlen(self->mine->log);
    if (!fault_check(self, keep >= 0 && saved >= 0 && dup2(keep, STDERR_FILENO) >= 0, "cannot keep stderr"))
        return SHOAL_OK;
    const enum shoal_status status = bad->call(self);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    const ssize_t got = pread(keep, text, bytes - 1, 0);
    text[got > 0 ? got : 0] = 0;
    close(keep);
    close(saved);
    snprintf(text + strlen(text), bytes - strlen(text), "%s", self->mine->log + logged);
    return status;
}

static int count_newlines(const char *text)
{
    int count = 0;
    for (; (text = strchr(text, '\n')); text++)
        count++;
    return count;
}

static void body(struct fault_rank *self)
{
    const struct bad *bad = self->parameters;
    static char text[8192];
    float x[3];
    const enum shoal_status status = call_and_listen(self, bad, text, sizeof text);
    fault_check(self, status == bad->status, "%s, not %s; it says: %s", shoal_status_name(status),
                shoal_status_name(bad->status), text);
    const int lines = 1 + (self->rank == 0 ? bad->more_lines : 0);
    fault_check(self, count_newlines(text) == lines, "%d lines, not %d: %s", count_newlines(text), lines, text);
    for (size_t i = 0; i < FAULT_COUNT_OF(bad->says) && bad->says[i]; i++)
        fault_check(self, strstr(text, bad->says[i]) != NULL, "\"%s\" is not in: %s", bad->says[i], text);
    if (bad->ranks == 0)
        fault_allreduce_once(self, self->comm, x, 3);
}

static void play(struct fault_test *test)
{
    const struct bad *bad = test->parameters;
    const struct fault_job job = {
        .size = bad->ranks ? bad->ranks : 2, .body = body, .parameters = bad, .is_bare = bad->ranks != 0};
    fault_run(test, &job);
}

/* ---- Calls on a communicator --------------------------------------------------------------------------------------------- */

#define ALLREDUCE(comm, input, output, count, type, op) shoal_allreduce(comm, input, output, count, type, op, NULL)

static enum shoal_status null_comm(struct fault_rank *self)
{
    float x = 0;
    (void)self;
    return ALLREDUCE(NULL, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM);
}

static enum shoal_status null_input(struct fault_rank *self)
{
    float x = 0;
    return ALLREDUCE(self->comm, NULL, &x, 1, SHOAL_FLOAT32, SHOAL_SUM);
}

static enum shoal_status null_output(struct fault_rank *self)
{
    float x = 0;
    return ALLREDUCE(self->comm, &x, NULL, 1, SHOAL_FLOAT32, SHOAL_SUM);
}

static enum shoal_status null_buffer_of_send(struct fault_rank *self)
{
    return shoal_send(self->comm, NULL, 1, SHOAL_FLOAT32, 1 - self->rank, 0, NULL);
}

static enum shoal_status null_request_out(struct fault_rank *self)
{
    float x = 0;
    return shoal_allreduce_post(self->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL, NULL);
}

static enum shoal_status wrong_type(struct fault_rank *self)
{
    float x = 0;
    return ALLREDUCE(self->comm, &x, &x, 1, (enum shoal_type)99, SHOAL_SUM);
}

static enum shoal_status wrong_operator(struct fault_rank *self)
{
    float x = 0;
    return ALLREDUCE(self->comm, &x, &x, 1, SHOAL_FLOAT32, (enum shoal_op)17);
}

static enum shoal_status wrong_count(struct fault_rank *self)
{
    float x = 0;
    return ALLREDUCE(self->comm, &x, &x, (size_t)-5, SHOAL_FLOAT32, SHOAL_SUM);
}

static enum shoal_status overlapping(struct fault_rank *self)
{
    float x[10] = {0};
    return ALLREDUCE(self->comm, x, x + 3, 7, SHOAL_FLOAT32, SHOAL_SUM);
}

static enum shoal_status unaligned(struct fault_rank *self)
{
    _Alignas(8) char x[16] = {0};
    return ALLREDUCE(self->comm, x + 4, x + 4, 1, SHOAL_FLOAT64, SHOAL_SUM);
}

static enum shoal_status bad_root(struct fault_rank *self)
{
    float x = 0;
    return shoal_broadcast(self->comm, &x, &x, 1, SHOAL_FLOAT32, 2, NULL);
}

static enum shoal_status negative_root(struct fault_rank *self)
{
    float x = 0;
    return shoal_broadcast(self->comm, &x, &x, 1, SHOAL_FLOAT32, -1, NULL);
}

static enum shoal_status negative_tag(struct fault_rank *self)
{
    float x = 0;
    return shoal_send(self->comm, &x, 1, SHOAL_FLOAT32, 1 - self->rank, -1, NULL);
}

static enum shoal_status bad_peer(struct fault_rank *self)
{
    float x = 0;
    return shoal_recv(self->comm, &x, 1, SHOAL_FLOAT32, self->size, 0, NULL);
}

static enum shoal_status unset_options(struct fault_rank *self)
{
    struct shoal_options options = {0};
    return shoal_barrier(self->comm, &options);
}

static enum shoal_status null_comm_out(struct fault_rank *self)
{
    return shoal_comm_split(self->comm, 0, 0, NULL, NULL);
}

static enum shoal_status null_memory_out(struct fault_rank *self)
{
    return shoal_mem_alloc(self->context, 100, NULL);
}

static enum shoal_status foreign_memory(struct fault_rank *self)
{
    float x = 0;
    return shoal_mem_free(self->context, &x);
}

static enum shoal_status short_descriptor(struct fault_rank *self)
{
    const int fd = memfd_create("short", MFD_CLOEXEC);
    void *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const enum shoal_status status = shoal_mem_register(self->context, memory, 8192, fd, 0);
    munmap(memory, 8192);
    close(fd);
    return status;
}

static enum shoal_status second_world(struct fault_rank *self)
{
    char address[64];
    struct shoal_comm *comm = NULL;
    snprintf(address, sizeof address, "127.0.0.1:%d", 1);
    return shoal_comm_create_at(self->context, address, 5, 2, NULL, &comm);
}

static enum shoal_status too_much_memory(struct fault_rank *self)
{
    void *memory = NULL;
    return shoal_mem_alloc(self->context, (size_t)1 << 39, &memory);
}

static enum shoal_status use_after_finalize(struct fault_rank *self)
{
    struct shoal_comm *group = NULL;
    enum shoal_status status = shoal_comm_split(self->comm, 0, 0, NULL, &group);
    if (status == SHOAL_OK)
        status = shoal_comm_finalize(group);
    if (status == SHOAL_OK)
        status = shoal_barrier(group, NULL);
    shoal_comm_free(group);
    return status;
}

/* ---- Starts -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status make_context(struct fault_rank *self, const char *setting)
{
    const char *const settings[] = {setting, NULL};
    struct shoal_context *context = NULL;
    const enum shoal_status status = fault_context(self, settings, &context);
    shoal_context_destroy(context);
    return status;
}

static enum shoal_status null_context_out(struct fault_rank *self)
{
    (void)self;
    return shoal_context_create(NULL, NULL);
}

static enum shoal_status null_context(struct fault_rank *self)
{
    struct shoal_comm *comm;
    (void)self;
    return shoal_comm_create(NULL, NULL, &comm);
}

static enum shoal_status unknown_setting(struct fault_rank *self)
{
    return make_context(self, "SHOAL_DEPHT=4");
}

static enum shoal_status override_unknown(struct fault_rank *self)
{
    return make_context(self, "SHOAL_ALGORITHMS=reduce=owners,gather=ring");
}

static enum shoal_status rules_missing(struct fault_rank *self)
{
    return make_context(self, "SHOAL_ALGORITHMS=/no/such/rules.csv");
}

static enum shoal_status log_level(struct fault_rank *self)
{
    return make_context(self, "SHOAL_LOG=verbose");
}

static enum shoal_status log_module(struct fault_rank *self)
{
    return make_context(self, "SHOAL_LOG=info,shm,foo");
}

static enum shoal_status setting_no_number(struct fault_rank *self)
{
    return make_context(self, "SHOAL_TIMEOUT_MS=soon");
}

static enum shoal_status setting_out_of_range(struct fault_rank *self)
{
    return make_context(self, "SHOAL_DEPTH=17");
}

static enum shoal_status variable_no_size(struct fault_rank *self)
{
    setenv("SHOAL_CHUNK_BYTES", "12Q", 1);
    const enum shoal_status status = make_context(self, NULL);
    unsetenv("SHOAL_CHUNK_BYTES");
    return status;
}

static enum shoal_status create_at(struct fault_rank *self, const char *address, int rank, int size)
{
    struct shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    options.create_timeout_ms = 700 * FAULT_SLOW;
    enum shoal_status status = fault_context(self, NULL, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create_at(context, address, rank, size, &options, &comm);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return status;
}

static enum shoal_status null_address(struct fault_rank *self)
{
    return create_at(self, NULL, 0, 1);
}

static enum shoal_status address_without_port(struct fault_rank *self)
{
    return create_at(self, "127.0.0.1", 0, 2);
}

static enum shoal_status rank_beyond_size(struct fault_rank *self)
{
    return create_at(self, self->address, 2, 2);
}

/* Ranks 0 and 1 of 3 are present. */
static enum shoal_status missing_worker(struct fault_rank *self)
{
    return create_at(self, self->address, self->rank, 3);
}

static enum shoal_status missing_rank_0(struct fault_rank *self)
{
    return create_at(self, self->address, 1, 2);
}

static enum shoal_status port_in_use(struct fault_rank *self)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    char address[64];
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_taken = fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 1) == 0 &&
                          getsockname(fd, (struct sockaddr *)&at, &bytes) == 0;
    fault_check(self, is_taken, "cannot take a port: %s", strerror(errno));
    snprintf(address, sizeof address, "127.0.0.1:%d", ntohs(at.sin_port));
    const enum shoal_status status = create_at(self, address, 0, 2);
    close(fd);
    return status;
}

/* Rank 1 is refused. Rank 0 logs that and waits for another one that matches, so that a stranger cannot end the job. */
static enum shoal_status start_different(struct fault_rank *self, const char *setting)
{
    const char *const settings[] = {setting, "SHOAL_BOOTSTRAP_TIMEOUT_MS=1500", NULL};
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    enum shoal_status status = fault_context(self, settings, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create_at(context, self->address, self->rank, 2, NULL, &comm);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return self->rank == 0 && status == SHOAL_ERR_TIMEOUT ? SHOAL_ERR_AUTH : status;
}

static enum shoal_status different_settings(struct fault_rank *self)
{
    return start_different(self, self->rank ? "SHOAL_DEPTH=2" : "SHOAL_DEPTH=3");
}

static enum shoal_status different_overrides(struct fault_rank *self)
{
    return start_different(self, self->rank ? "SHOAL_ALGORITHMS=reduce=owners" : "SHOAL_ALGORITHMS=reduce=owners@0-4K");
}

static enum shoal_status rules_on_one_rank(struct fault_rank *self)
{
    return start_different(self, self->rank ? "SHOAL_ALGORITHMS=broadcast=copies" : "SHOAL_ALGORITHMS=");
}

/* Found while ranks meet: each knows of the other. */
static enum shoal_status hosts_without_network(struct fault_rank *self)
{
    setenv("SHOAL_LIBFABRIC", "/nonexistent/libfabric.so", 1);
    return start_different(self, self->rank ? "SHOAL_HOST_ID=h1" : "SHOAL_HOST_ID=h0");
}

static enum shoal_status different_secrets(struct fault_rank *self)
{
    return start_different(self, self->rank ? "SHOAL_SECRET=fish" : "SHOAL_SECRET=bird");
}

static enum shoal_status bad_world_size(struct fault_rank *self)
{
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "two", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "29500", 1);
    enum shoal_status status = fault_context(self, NULL, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create(context, NULL, &comm);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return status;
}

static enum shoal_status no_descriptors(struct fault_rank *self)
{
    struct rlimit limit, before;
    struct shoal_context *context = NULL;
    getrlimit(RLIMIT_NOFILE, &before);
    const int next = dup(0);
    close(next);
    limit = before;
    limit.rlim_cur = (rlim_t)next;
    setrlimit(RLIMIT_NOFILE, &limit);
    const enum shoal_status status = fault_context(self, NULL, &context);
    setrlimit(RLIMIT_NOFILE, &before);
    shoal_context_destroy(context);
    return status;
}

/* A size for which the machine has no contiguous address space. */
static enum shoal_status no_address_space(struct fault_rank *self)
{
    struct rlimit limit, before;
    struct shoal_context *context = NULL;
    void *memory = NULL;
    enum shoal_status status = fault_context(self, NULL, &context);
    getrlimit(RLIMIT_AS, &before);
    limit = before;
    limit.rlim_cur = (rlim_t)fault_mapped_bytes() + ((rlim_t)256 << 20);
    setrlimit(RLIMIT_AS, &limit);
    if (status == SHOAL_OK)
        status = shoal_mem_alloc(context, (size_t)300 << 20, &memory);
    setrlimit(RLIMIT_AS, &before);
    shoal_context_destroy(context);
    return status;
}

/* ---- Variables that are not settings ------------------------------------------------------------------------------------- */

static void set_misspelt(struct fault_rank *self)
{
    (void)self;
    setenv("SHOAL_DEPHT", "8", 1);
    setenv("SHOAL_TIMEOUT", "30", 1);
    setenv("SHOAL_FOLDER_OF_MINE", "/tmp", 1);
    setenv("SHOAL_RUN_TERMINAL", "1", 1);
}

/* A second world of the same context logs nothing more. */
static void make_two_worlds(struct fault_rank *self)
{
    float x[3];
    struct shoal_comm *second = NULL;
    const enum shoal_status status = shoal_comm_create_at(self->context, self->address, self->rank, self->size, NULL, &second);
    if (fault_check(self, status == SHOAL_OK, "%s", shoal_status_name(status)))
        fault_allreduce_once(self, second, x, 3);
    shoal_comm_free(second);
    const char *log = self->mine->log;
    fault_check(self, count_newlines(log) == (self->rank ? 0 : 2), "it says: %s", log);
    if (self->rank == 0)
        fault_check(self,
                    strstr(log, "SHOAL_DEPHT is not a setting; did you mean SHOAL_DEPTH?") &&
                        strstr(log, "SHOAL_TIMEOUT is not a setting; did you mean SHOAL_TIMEOUT_MS?"),
                    "it says: %s", log);
}

static void misspelt(struct fault_test *test)
{
    const struct fault_job job = {.size = 2, .prepare = set_misspelt, .body = make_two_worlds};
    fault_run(test, &job);
}

#define BAD(...)        \
    &(const struct bad) \
    {                   \
        __VA_ARGS__     \
    }

static const struct fault_case cases[] = {
    {"bad_comm_null", play, BAD(null_comm, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "NULL"}, 0, 0)},
    {"bad_input_null", play, BAD(null_input, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "input is NULL"}, 0, 0)},
    {"bad_output_null", play, BAD(null_output, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "output is NULL"}, 0, 0)},
    {"bad_send_buffer_null", play, BAD(null_buffer_of_send, SHOAL_ERR_ARGUMENT, {"shoal_send", "NULL"}, 0, 0)},
    {"bad_request_out_null", play, BAD(null_request_out, SHOAL_ERR_ARGUMENT, {"request_out is NULL"}, 0, 0)},
    {"bad_type", play, BAD(wrong_type, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "type is 99", "enum shoal_type"}, 0, 0)},
    {"bad_operator", play, BAD(wrong_operator, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "op is 17", "enum shoal_op"}, 0, 0)},
    {"bad_count", play, BAD(wrong_count, SHOAL_ERR_ARGUMENT, {"shoal_allreduce", "count", "negative"}, 0, 0)},
    {"bad_overlap", play, BAD(overlapping, SHOAL_ERR_ARGUMENT, {"overlap", "same address or apart"}, 0, 0)},
    {"bad_alignment", play, BAD(unaligned, SHOAL_ERR_ARGUMENT, {"aligned"}, 0, 0)},
    {"bad_root", play, BAD(bad_root, SHOAL_ERR_ARGUMENT, {"shoal_broadcast", "root is 2, but there are 2 ranks"}, 0, 0)},
    {"bad_root_negative", play, BAD(negative_root, SHOAL_ERR_ARGUMENT, {"shoal_broadcast", "root"}, 0, 0)},
    {"bad_tag", play, BAD(negative_tag, SHOAL_ERR_ARGUMENT, {"shoal_send", "tag is -1"}, 0, 0)},
    {"bad_peer", play, BAD(bad_peer, SHOAL_ERR_ARGUMENT, {"shoal_recv", "peer is"}, 0, 0)},
    {"bad_options", play, BAD(unset_options, SHOAL_ERR_ARGUMENT, {"struct_bytes", "SHOAL_OPTIONS_INIT"}, 0, 0)},
    {"bad_comm_out_null", play, BAD(null_comm_out, SHOAL_ERR_ARGUMENT, {"shoal_comm_split", "comm_out is NULL"}, 0, 0)},
    {"bad_memory_out_null", play, BAD(null_memory_out, SHOAL_ERR_ARGUMENT, {"shoal_mem_alloc", "NULL"}, 0, 0)},
    {"bad_memory_freed", play, BAD(foreign_memory, SHOAL_ERR_ARGUMENT, {"shoal_mem_alloc"}, 0, 0)},
    {"bad_memory_registered", play, BAD(short_descriptor, SHOAL_ERR_ARGUMENT, {"shoal_mem_register", "descriptor"}, 0, 0)},
    {"bad_rank_in_world", play, BAD(second_world, SHOAL_ERR_ARGUMENT, {"rank 5 of 2"}, 0, 0)},
    {"bad_amount_of_memory", play, BAD(too_much_memory, SHOAL_ERR_MEMORY, {"shoal_mem_alloc", "549755813888", "leaves"}, 0, 0)},
    {"bad_use_after_finalize", play, BAD(use_after_finalize, SHOAL_ERR_STATE, {"world.1", "finalized"}, 0, 0)},
    {"bad_context_out_null", play, BAD(null_context_out, SHOAL_ERR_ARGUMENT, {"context_out is NULL"}, 1, 0)},
    {"bad_context_null", play, BAD(null_context, SHOAL_ERR_ARGUMENT, {"shoal_comm_create", "NULL"}, 1, 0)},
    {"bad_setting_unknown", play,
     BAD(unknown_setting, SHOAL_ERR_ARGUMENT, {"SHOAL_DEPHT", "shoal info", "did you mean SHOAL_DEPTH?"}, 1, 0)},
    {"bad_setting_log_level", play,
     BAD(log_level, SHOAL_ERR_ARGUMENT, {"SHOAL_LOG is \"verbose\"", "may be warn, info, debug"}, 1, 0)},
    {"bad_setting_log_module", play,
     BAD(log_module, SHOAL_ERR_ARGUMENT, {"SHOAL_LOG is \"info,shm,foo\"", "commas, bootstrap, comm,"}, 1, 0)},
    {"bad_setting_no_number", play,
     BAD(setting_no_number, SHOAL_ERR_ARGUMENT, {"SHOAL_TIMEOUT_MS", "soon", "whole number"}, 1, 0)},
    {"bad_setting_override", play,
     BAD(override_unknown, SHOAL_ERR_ARGUMENT, {"SHOAL_ALGORITHMS, tuning override 2", "\"ring\"", "direct, copies"}, 1, 0)},
    {"bad_setting_rules_missing", play,
     BAD(rules_missing, SHOAL_ERR_ARGUMENT, {"SHOAL_ALGORITHMS", "/no/such/rules.csv", "No such file"}, 1, 0)},
    {"bad_setting_out_of_range", play, BAD(setting_out_of_range, SHOAL_ERR_ARGUMENT, {"SHOAL_DEPTH is 17", "1 to 16"}, 1, 0)},
    {"bad_variable_no_size", play, BAD(variable_no_size, SHOAL_ERR_ARGUMENT, {"SHOAL_CHUNK_BYTES", "12Q", "256K"}, 1, 0)},
    {"bad_address_null", play, BAD(null_address, SHOAL_ERR_ARGUMENT, {"address is NULL"}, 1, 0)},
    {"bad_address_without_port", play, BAD(address_without_port, SHOAL_ERR_ARGUMENT, {"127.0.0.1", "host:port"}, 1, 0)},
    {"bad_rank_beyond_size", play, BAD(rank_beyond_size, SHOAL_ERR_ARGUMENT, {"rank 2 of 2"}, 1, 0)},
    {"bad_world_size", play, BAD(bad_world_size, SHOAL_ERR_ARGUMENT, {"WORLD_SIZE", "two"}, 1, 0)},
    {"bad_start_missing_worker", play,
     BAD(missing_worker, SHOAL_ERR_TIMEOUT,
         {"rank 2 of 3 did not come within", "SHOAL_BOOTSTRAP_TIMEOUT_MS", "did it start, and call shoal_comm_create?"}, 2, 0)},
    {"bad_start_missing_rank_0", play, BAD(missing_rank_0, SHOAL_ERR_TIMEOUT, {"rank 0", "127.0.0.1"}, 1, 0)},
    {"bad_start_port_in_use", play, BAD(port_in_use, SHOAL_ERR_SYSTEM, {"in use", "127.0.0.1"}, 1, 0)},
    {"bad_start_different_settings", play,
     BAD(different_settings, SHOAL_ERR_AUTH, {"rank 1", "refused", "SHOAL_DEPTH is 2 there, 3 on rank 0"}, 2, 1)},
    {"bad_start_different_rules", play,
     BAD(different_overrides, SHOAL_ERR_AUTH, {"rank 1", "refused", "SHOAL_ALGORITHMS"}, 2, 1)},
    {"bad_start_rules_on_one_rank", play,
     BAD(rules_on_one_rank, SHOAL_ERR_AUTH, {"rank 1", "refused", "SHOAL_ALGORITHMS"}, 2, 1)},
    {"bad_start_different_secrets", play, BAD(different_secrets, SHOAL_ERR_AUTH, {"rank 1", "refused", "SHOAL_SECRET"}, 2, 1)},
    {"bad_start_hosts_without_network", play,
     BAD(hosts_without_network, SHOAL_ERR_UNSUPPORTED, {"/nonexistent/libfabric.so", "SHOAL_LIBFABRIC"}, 2, 0)},
    {"misspelt_variable_is_named_on_rank_0", misspelt, NULL},
    {"bad_limit_of_descriptors", play, BAD(no_descriptors, SHOAL_ERR_SYSTEM, {"ulimit -n"}, 1, 0)},
    {"bad_limit_of_address_space", play,
     BAD(no_address_space, SHOAL_ERR_MEMORY, {"cannot map", "Cannot allocate memory"}, 1, 0)},
};

int main(int argc, char **argv)
{
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
