/* Environments in which Shoal must work: a small /dev/shm, a read-only root, no special rights, no libsodium, few descriptors,
 * memory of both kinds. */
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fault_harness.h"

/* ---- Preparations in each rank ------------------------------------------------------------------------------------------- */

static bool own_mounts(struct fault_rank *self)
{
    if (unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0)
        return true;
    fault_cannot(self, "an own mount namespace is not permitted here: %s", strerror(errno));
    return false;
}

static void small_dev_shm(struct fault_rank *self)
{
    struct statvfs size;
    if (!own_mounts(self))
        return;
    if (mount("none", "/dev/shm", "tmpfs", 0, "size=64m") != 0)
        fault_cannot(self, "cannot mount a small /dev/shm: %s", strerror(errno));
    else
        fault_check(self, statvfs("/dev/shm", &size) == 0 && size.f_blocks * size.f_frsize == (64 << 20),
                    "/dev/shm has another size");
}

static void read_only_root(struct fault_rank *self)
{
    if (!own_mounts(self))
        return;
    if (mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) != 0)
        fault_cannot(self, "cannot make the root read-only: %s", strerror(errno));
    else
        fault_check(self, access("/", W_OK) != 0, "the root is still writable");
}

static void no_capabilities(struct fault_rank *self)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    if (syscall(SYS_capset, &head, none) != 0)
        fault_cannot(self, "cannot give up capabilities: %s", strerror(errno));
}

static void ordinary_user(struct fault_rank *self)
{
    if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0)
        fault_cannot(self, "cannot become an ordinary user: %s", strerror(errno));
}

static enum shoal_status start_with_secret(struct fault_rank *self, struct shoal_context **context_out)
{
    static const char *const settings[] = {"SHOAL_SECRET=x", NULL};
    struct shoal_comm *comm = NULL;
    struct rlimit before, none;
    enum shoal_status status = fault_context(self, settings, context_out);
    getrlimit(RLIMIT_NOFILE, &before);
    none = (struct rlimit){0, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    if (status == SHOAL_OK)
        status = shoal_comm_create_at(*context_out, self->address, self->rank, self->size, NULL, &comm);
    setrlimit(RLIMIT_NOFILE, &before);
    shoal_comm_free(comm);
    return status;
}

/* libsodium is loaded once in a process, at the first request for a secret: here while no file can be opened. */
static void no_libsodium(struct fault_rank *self)
{
    struct shoal_context *context = NULL;
    const enum shoal_status status = start_with_secret(self, &context);
    fault_check(self, status == SHOAL_ERR_AUTH && strstr(self->mine->log, "install libsodium23"), "%s: %s",
                shoal_status_name(status), self->mine->log);
    shoal_context_destroy(context);
}

static void few_descriptors(struct fault_rank *self)
{
    const struct rlimit limit = {256, 256};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        fault_cannot(self, "cannot limit descriptors: %s", strerror(errno));
}

/* ---- Work in that environment -------------------------------------------------------------------------------------------- */

/* Uses small, large, plain and shared memory: 128 MiB of shared memory on each rank if is_large. */
static void use_everything(struct fault_rank *self, bool is_large)
{
    const size_t count = is_large ? (size_t)32 << 20 : (size_t)1 << 20;
    float *shared = fault_floats(self, true, count), *plain = fault_floats(self, false, count / 32);
    if (!shared || !plain)
        return;
    fault_allreduce_once(self, self->comm, plain, 2);
    fault_allreduce_once(self, self->comm, plain, count / 32);
    fault_allreduce_once(self, self->comm, shared, count);
    free(plain);
}

static void work(struct fault_rank *self)
{
    use_everything(self, true);
}

/* The end of a peer is also noticed without special rights. */
static void work_and_lose_a_rank(struct fault_rank *self)
{
    use_everything(self, false);
    if (self->rank == 1) {
        fault_act(self);
        kill(getpid(), SIGKILL);
    }
    fault_note(self, shoal_barrier(self->comm, NULL));
}

struct place {
    fault_body_fn prepare;
    bool is_deadly;
};

static void in_place(struct fault_test *test)
{
    const struct place *place = test->parameters;
    struct fault_job job = {.size = 2, .body = place->is_deadly ? work_and_lose_a_rank : work, .prepare = place->prepare};
    job.killed_by[1] = place->is_deadly ? SIGKILL : 0;
    if (!fault_run(test, &job) || !place->is_deadly)
        return;
    const struct fault_result *result = &test->shared->results[0];
    fault_expect(test, result->status == SHOAL_ERR_PEER_LOST && strstr(result->failure.text, "killed by signal 9"),
                 "rank 0: %s: %s", shoal_status_name(result->status), result->failure.text);
    fault_expect(test, result->failed_ns - test->shared->results[1].action_ns < FAULT_KNOWN_MS * FAULT_MS * FAULT_SLOW,
                 "rank 0 knew late");
}

/* ---- Many communicators, few descriptors --------------------------------------------------------------------------------- */

#define GROUPS 20

static void split_often(struct fault_rank *self)
{
    struct shoal_comm *groups[GROUPS] = {NULL};
    float *shared = fault_floats(self, true, 40000), plain[5000];
    if (!shared)
        return;
    for (int i = 0; i < GROUPS; i++) {
        const enum shoal_status status =
            shoal_comm_split(self->comm, i % 4 ? self->rank % (i % 4) : 0, -self->rank, NULL, &groups[i]);
        if (!fault_check(self, status == SHOAL_OK, "split %d: %s", i, shoal_status_name(status)))
            break;
    }
    for (int i = 0; i < GROUPS && groups[i]; i++) {
        fault_allreduce_once(self, groups[i], plain, 5000);
        fault_allreduce_once(self, groups[i], shared, 40000);
    }
    for (int i = 0; i < GROUPS; i++)
        shoal_comm_free(groups[i]);
    fault_allreduce_once(self, self->comm, shared, 40000);
}

static void many_groups(struct fault_test *test)
{
    const struct fault_job job = {.size = 8, .body = split_often, .prepare = few_descriptors, .limit_ms = 40000};
    fault_run(test, &job);
}

/* ---- Memory of both kinds in one call ------------------------------------------------------------------------------------ */

static float value_at(int rank, size_t i)
{
    return (float)((size_t)(rank + 1) * (i % 1000));
}

/* Whole numbers below 2^24: the sum is exact. */
static void reduce_mixed(struct fault_rank *self, float *input, float *output, size_t count)
{
    const size_t ranks = (size_t)self->size * (size_t)(self->size + 1) / 2;
    for (size_t i = 0; i < count; i++)
        input[i] = value_at(self->rank, i);
    const enum shoal_status status = shoal_allreduce(self->comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    fault_check(self, status == SHOAL_OK, "all-reduce of %zu: %s", count, shoal_status_name(status));
    for (size_t i = 0; i < count; i++) {
        if (!fault_check(self, output[i] == (float)(ranks * (i % 1000)), "element %zu of %zu is %g", i, count,
                         (double)output[i]))
            return;
    }
    for (size_t i = 0; i < count && input != output; i++)
        fault_check(self, input[i] == value_at(self->rank, i), "input %zu was changed", i);
}

static void broadcast_mixed(struct fault_rank *self, float *buffer, size_t count, int root)
{
    for (size_t i = 0; i < count; i++)
        buffer[i] = value_at(self->rank, i);
    const enum shoal_status status = shoal_broadcast(self->comm, buffer, buffer, count, SHOAL_FLOAT32, root, NULL);
    fault_check(self, status == SHOAL_OK, "broadcast of %zu: %s", count, shoal_status_name(status));
    for (size_t i = 0; i < count; i++) {
        if (!fault_check(self, buffer[i] == value_at(root, i), "element %zu of %zu is %g", i, count, (double)buffer[i]))
            return;
    }
}

/* Uses, round by round, every combination of ranks with shared input and shared output. */
static void mix_memory(struct fault_rank *self)
{
    static const size_t counts[] = {1, 1025, 70001, 1000003};
    const size_t most = 1000003;
    float *memory[4] = {fault_floats(self, false, most), fault_floats(self, false, most), fault_floats(self, true, most),
                        fault_floats(self, true, most)};
    if (self->mine->why[0])
        return;
    for (unsigned round = 0; round < (1u << self->size); round++) {
        const bool is_shared = round >> self->rank & 1, is_other_shared = (round + 1) >> self->rank & 1;
        const size_t count = counts[round % FAULT_COUNT_OF(counts)];
        reduce_mixed(self, memory[is_shared ? 2 : 0], memory[is_other_shared ? 3 : 1], count);
        reduce_mixed(self, memory[is_shared ? 2 : 0], memory[is_shared ? 2 : 0], count);
        broadcast_mixed(self, memory[is_shared ? 2 : 0], count, (int)(round % (unsigned)self->size));
    }
    free(memory[0]);
    free(memory[1]);
}

static void mixed_memory(struct fault_test *test)
{
    const struct fault_job job = {.size = *(const int *)test->parameters, .body = mix_memory, .limit_ms = 40000};
    fault_run(test, &job);
}

/* ---- Memory allocated before and after the communicator that uses it ----------------------------------------------------- */

static void split_between(struct fault_rank *self)
{
    const size_t count = 300000;
    struct shoal_comm *group = NULL;
    float *before = fault_floats(self, true, count), *used = fault_floats(self, true, count);
    if (!before || !used ||
        !fault_allreduce_once(self, self->comm, used, count)) /* `used` is known to the peers, `before` is not */
        return;
    const enum shoal_status status = shoal_comm_split(self->comm, self->rank % 2, 0, NULL, &group);
    if (!fault_check(self, status == SHOAL_OK, "shoal_comm_split: %s", shoal_status_name(status)))
        return;
    float *after = fault_floats(self, true, count);
    if (!after)
        return;
    for (int i = 0; i < 3; i++) {
        fault_allreduce_once(self, group, before, count);
        fault_allreduce_once(self, group, used, count);
        fault_allreduce_once(self, group, after, count);
        fault_allreduce_once(self, self->comm, after, count);
    }
    fault_check(self, shoal_mem_free(self->context, used) == SHOAL_OK, "shoal_mem_free");
    used = fault_floats(self, true, count); /* possibly at the same address */
    if (used)
        fault_allreduce_once(self, group, used, count);
    struct shoal_operation operation = {.struct_bytes = sizeof operation};
    fault_check(self, shoal_last_operation(group, &operation) == SHOAL_OK, "shoal_last_operation");
    struct shoal_memory_usage usage = {.struct_bytes = sizeof usage};
    fault_check(self, shoal_comm_memory(group, &usage) == SHOAL_OK && usage.staging_bytes == 0,
                "shared memory went through a staging buffer");
    shoal_comm_free(group);
    if (used)
        fault_allreduce_once(self, self->comm, used, count);
}

static void memory_around_split(struct fault_test *test)
{
    const struct fault_job job = {.size = 4, .body = split_between};
    fault_run(test, &job);
}

int main(int argc, char **argv)
{
    static const struct place shm = {small_dev_shm, false}, root = {read_only_root, false}, rights = {no_capabilities, true},
                              user = {ordinary_user, true}, sodium = {no_libsodium, true};
    static const int two = 2, four = 4;
    const struct fault_case cases[] = {
        {"environment_dev_shm_of_64_mib", in_place, &shm},
        {"environment_read_only_root", in_place, &root},
        {"environment_no_capabilities", in_place, &rights},
        {"environment_ordinary_user", in_place, &user},
        {"environment_without_libsodium_and_secret", in_place, &sodium},
        {"environment_256_descriptors_8_ranks_20_groups", many_groups, NULL},
        {"environment_plain_and_shared_2_ranks", mixed_memory, &two},
        {"environment_plain_and_shared_4_ranks", mixed_memory, &four},
        {"environment_memory_before_and_after_split", memory_around_split, NULL},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
