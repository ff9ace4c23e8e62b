/* Which ranks are on one host, from each process's description of its machine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>
#include <unistd.h>

#include "membership/same_host.h"

static struct shoal_membership_identity identity(const char *boot_id, uint64_t network_namespace, const char *host_id)
{
    struct shoal_membership_identity who = {.network_namespace = network_namespace, .host = "a-name", .pid = 5};
    snprintf(who.boot_id, sizeof who.boot_id, "%s", boot_id);
    snprintf(who.host_id, sizeof who.host_id, "%s", host_id);
    return who;
}

static void two_threads_of_a_process_are_on_one_host(void **state)
{
    struct shoal_membership_identity a, b;
    (void)state;
    memset(&b, 0xAA, sizeof b);
    shoal_membership_identity_fill(&a, "", "this-host");
    shoal_membership_identity_fill(&b, "", "this-host");
    assert_memory_equal(&a, &b, sizeof a); /* no uninitialized bytes of the stack are sent */
    assert_true(shoal_membership_is_same_host(&a, &b));
    assert_string_equal(a.host, "this-host");
    assert_int_equal(a.pid, getpid());
}

/* One kernel and one network namespace make one host, unless SHOAL_HOST_ID overrules them, even if only one side sets it. */
static void kernel_and_namespace_decide_and_the_setting_overrules(void **state)
{
    static const struct {
        struct {
            const char *boot_id;
            uint64_t network_namespace;
            const char *host_id;
        } a, b;
        bool is_same;
        const char *difference;
    } cases[] = {
        {{"kernel-1", 7, ""}, {"kernel-1", 7, ""}, true, NULL},
        {{"kernel-1", 7, ""}, {"kernel-2", 7, ""}, false, "/proc/sys/kernel/random/boot_id is kernel-2 there, kernel-1 here"},
        {{"kernel-1", 7, ""}, {"kernel-1", 8, ""}, false, "/proc/self/ns/net is net:[8] there, net:[7] here"},
        {{"kernel-1", 7, "x"}, {"kernel-2", 8, "x"}, true, NULL},
        {{"kernel-1", 7, "x"}, {"kernel-1", 7, "y"}, false, "SHOAL_HOST_ID is \"y\" there, \"x\" here"},
        {{"kernel-1", 7, "x"}, {"kernel-1", 7, ""}, false, "SHOAL_HOST_ID is \"\" there, \"x\" here"},
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        const struct shoal_membership_identity a = identity(cases[i].a.boot_id, cases[i].a.network_namespace,
                                                            cases[i].a.host_id),
                                               b = identity(cases[i].b.boot_id, cases[i].b.network_namespace,
                                                            cases[i].b.host_id);
        char text[256];
        assert_int_equal(shoal_membership_is_same_host(&a, &b), cases[i].is_same);
        assert_int_equal(shoal_membership_is_same_host(&b, &a), cases[i].is_same);
        if (cases[i].is_same)
            continue;
        shoal_membership_print_difference(&b, &a, text, sizeof text);
        assert_string_equal(text, cases[i].difference);
    }
}

static void hosts_are_numbered_by_their_lowest_ranks(void **state)
{
    static const char *const host_of[] = {"c", "a", "c", "b", "a", "b", "c"};
    static const uint16_t wanted[] = {0, 1, 0, 2, 1, 2, 0};
    struct {
        char before[24]; /* as in an address blob */
        struct shoal_membership_identity who;
    } blobs[SHOAL_COUNT_OF(host_of)];
    uint16_t hosts[SHOAL_COUNT_OF(host_of)];
    struct shoal_log log;
    (void)state;
    shoal_log_init_quiet(&log);
    memset(blobs, 0xAA, sizeof blobs);
    for (size_t r = 0; r < SHOAL_COUNT_OF(host_of); r++)
        blobs[r].who = identity("kernel", 7, host_of[r]);
    const struct shoal_membership_identities identities = {&blobs[0].who, sizeof blobs[0], SHOAL_COUNT_OF(host_of)};
    for (int own = 0; own < identities.size; own++) { /* from each rank's view */
        shoal_membership_number_hosts(&identities, own, &log, hosts);
        assert_memory_equal(hosts, wanted, sizeof wanted);
    }
    shoal_log_fini(&log);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_threads_of_a_process_are_on_one_host),
        cmocka_unit_test(kernel_and_namespace_decide_and_the_setting_overrules),
        cmocka_unit_test(hosts_are_numbered_by_their_lowest_ranks),
    };
    return cmocka_run_group_tests_name("same_host", tests, NULL, NULL);
}
