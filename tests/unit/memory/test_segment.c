/* Segments: how pins keep them, and what the kernel may require of a memfd. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/settings.h"
#include "memory/segment.h"
#include "quiet_log.h"
#include "topology/features.h"

#define BYTES ((uint64_t)16 * SHOAL_PAGE)

static struct shoal_segment *make(struct shoal_segment_budget *budget)
{
    struct shoal_segment *segment;
    assert_int_equal(shoal_segment_create(&quiet, "shoal-test", BYTES, &segment), SHOAL_OK);
    assert_int_equal(shoal_segment_reserve(segment, &quiet, 0, BYTES, budget, "a test"), SHOAL_OK);
    memset(segment->base, 7, BYTES);
    return segment;
}

static void pages_that_are_pinned_are_not_replaced(void **state)
{
    struct shoal_segment_budget budget = {0};
    struct shoal_segment *segment = make(&budget);
    const int fd = segment->fd;
    (void)state;
    assert_ptr_equal(shoal_segment_pin(segment), segment);
    assert_int_equal(shoal_segment_renew(segment, &quiet, 0), SHOAL_ERR_STATE);
    assert_int_equal(segment->fd, fd);
    shoal_segment_unpin(segment);
    assert_int_equal(shoal_segment_renew(segment, &quiet, 0), SHOAL_OK);
    assert_int_not_equal(segment->fd, fd);
    assert_int_equal(segment->base[BYTES - 1], 7);
    shoal_segment_release(segment, &budget);
}

static void pages_that_are_pinned_go_with_the_last_pin(void **state)
{
    struct shoal_segment_budget budget = {0};
    struct shoal_segment *segment = make(&budget);
    (void)state;
    shoal_segment_pin(segment);
    shoal_segment_pin(segment);
    shoal_segment_discard(segment);
    shoal_segment_unpin(segment);
    assert_int_equal(segment->base[0], 7);
    shoal_segment_unpin(segment);
    assert_int_equal(segment->base[0], 0);
    shoal_segment_release(segment, &budget);
}

/* ---- Machines with requirements */

#define NOEXEC_SEAL 8U /* MFD_NOEXEC_SEAL */
#define CANNOT_FILTER 99

/* From now on memfd_create fails for this process with `error` if the flag is set, or if it is not. */
static bool refuse_memfd(bool is_set, unsigned error)
{
    const unsigned refusal = SECCOMP_RET_ERRNO | error;
    struct sock_filter rows[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NOEXEC_SEAL, is_set ? 0 : 1, is_set ? 1 : 0),
        BPF_STMT(BPF_RET | BPF_K, refusal),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {SHOAL_COUNT_OF(rows), rows};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void make_where_refused(bool is_set, unsigned error)
{
    int status;
    const pid_t child = fork();
    if (child == 0) {
        struct shoal_segment *segment;
        if (!refuse_memfd(is_set, error))
            _exit(CANNOT_FILTER);
        _exit(shoal_segment_create(&quiet, "shoal-test", BYTES, &segment) != SHOAL_OK);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CANNOT_FILTER) {
        print_message("skipped: no filter of system calls can be set here\n");
        skip();
    }
    assert_int_equal(status, 0);
}

static void segments_are_made_where_files_that_may_be_run_are_refused(void **state)
{
    (void)state;
    make_where_refused(false, EACCES); /* as with vm.memfd_noexec=2 */
}

static void segments_are_made_by_kernels_that_do_not_know_the_flag(void **state)
{
    (void)state;
    make_where_refused(true, EINVAL);
}

/* As a container's seccomp profile does. */
static void a_refused_segment_says_what_to_do(void **state)
{
    int status;
    (void)state;
    const pid_t child = fork();
    if (child == 0) {
        struct shoal_segment *segment;
        char text[512] = "";
        if (!refuse_memfd(false, EPERM) || !refuse_memfd(true, EPERM))
            _exit(CANNOT_FILTER);
        if (shoal_segment_create(&quiet, "shoal-test", BYTES, &segment) != SHOAL_ERR_SYSTEM)
            _exit(1);
        (void)shoal_log_last_error(&quiet, text, sizeof text);
        _exit(!strstr(text, "memfd_create failed: Operation not permitted; ") || !strstr(text, "seccomp profile"));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CANNOT_FILTER)
        skip();
    assert_int_equal(status, 0);
}

/* ---- What a kernel promises ---- */

static void locked_pages_are_copied_at_fork_from_linux_5_13_on(void **state)
{
    static const char *const with[] = {"5.13.0-19-generic", "5.13", "5.15.167.4-microsoft-standard-WSL2", "6.1.0-1", "10.0"};
    static const char *const without[] = {"5.12.19", "5.4.0-150", "4.18.0-553.el8.x86_64", "3.10.0", "", "unknown"};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(with); i++)
        assert_true(shoal_topology_release_copies_locked_pages(with[i]));
    for (size_t i = 0; i < SHOAL_COUNT_OF(without); i++)
        assert_false(shoal_topology_release_copies_locked_pages(without[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_that_are_pinned_are_not_replaced),
        cmocka_unit_test(pages_that_are_pinned_go_with_the_last_pin),
        cmocka_unit_test(segments_are_made_where_files_that_may_be_run_are_refused),
        cmocka_unit_test(segments_are_made_by_kernels_that_do_not_know_the_flag),
        cmocka_unit_test(a_refused_segment_says_what_to_do),
        cmocka_unit_test(locked_pages_are_copied_at_fork_from_linux_5_13_on),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
