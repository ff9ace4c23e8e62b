/* The choice of a network interface, and its reason. The machines are tables; one test uses the machine that it runs on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

#include "topology/nic.h"

static struct sockaddr_storage address_from(const char *text)
{
    struct sockaddr_storage storage = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)&storage;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)&storage;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1)
        storage.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1)
        storage.ss_family = AF_INET6;
    else
        fail_msg("%s is no address", text);
    return storage;
}

struct row {
    const char *name, *address;
    bool is_down, is_loopback;
};

/* A cloud machine: two networks, a container bridge, one interface without a carrier. */
static const struct row machine[] = {
    {"lo", "127.0.0.1", false, true},        {"docker0", "172.17.0.1", false, false}, {"eth0", "10.0.0.5", false, false},
    {"eth1", "10.1.0.5", false, false},      {"ens9", "192.168.7.2", true, false},    {"lo", "::1", false, true},
    {"eth0", "fd00:0:0:1::5", false, false}, {"eth0", "fe80::5", false, false},       {"eth1", "fd00:0:0:2::5", false, false},
};

static struct shoal_nics nics_from(const struct row *rows, size_t count)
{
    struct shoal_nics nics = {.count = (int)count};
    for (size_t i = 0; i < count; i++) {
        struct shoal_nic *nic = &nics.at[i];
        *nic = (struct shoal_nic){.is_up = !rows[i].is_down, .is_loopback = rows[i].is_loopback};
        strcpy(nic->name, rows[i].name);
        nic->address = address_from(rows[i].address);
    }
    return nics;
}

/* text: "eth0 (10.0.0.5)", or NULL if no interface is chosen. The reason contains `why`. */
static void expect_choice(const char *wanted, const char *source, const char *text, const char *why)
{
    const struct shoal_nics nics = nics_from(machine, SHOAL_COUNT_OF(machine));
    struct sockaddr_storage from;
    char reason[600], taken[SHOAL_NIC_TEXT_MAX] = "nothing";
    if (source)
        from = address_from(source);
    const struct shoal_nic *nic =
        shoal_nic_choose(&nics, wanted, source ? (const struct sockaddr *)(const void *)&from : NULL, reason, sizeof reason);
    if (nic)
        shoal_nic_print(nic, taken);
    if (strcmp(taken, text ? text : "nothing") != 0 || !strstr(reason, why))
        fail_msg("SHOAL_NIC=%s, source %s: %s, because: %s", wanted ? wanted : "", source ? source : "unknown", taken, reason);
}

static void nic_follows_the_route(void **state)
{
    (void)state;
    expect_choice(NULL, "10.1.0.5", "eth1 (10.1.0.5)", "the route to the others");
    expect_choice("", "fd00:0:0:2::5", "eth1 (fd00:0:0:2::5)", "the route to the others");
    expect_choice(NULL, "fe80::5", "eth0 (fe80::5)", "the route to the others");
    expect_choice(NULL, "127.0.0.1", "lo (127.0.0.1)", "the route to the others");
}

static void nic_without_a_route_is_the_first_that_is_up(void **state)
{
    (void)state;
    expect_choice(NULL, NULL, "docker0 (172.17.0.1)", "the first one that is up");
    expect_choice(NULL, "10.9.9.9", "docker0 (172.17.0.1)", "the first one that is up");
    expect_choice(NULL, "fd99::1", "eth0 (fd00:0:0:1::5)", "the first one that is up");
}

static void nic_is_named_in_every_way(void **state)
{
    (void)state;
    expect_choice("eth1", "10.0.0.5", "eth1 (10.1.0.5)", "SHOAL_NIC=eth1");
    expect_choice("eth1", "10.1.0.5", "eth1 (10.1.0.5)", "the route to the others");
    expect_choice("eth*", "10.9.9.9", "eth0 (10.0.0.5)", "SHOAL_NIC=eth*");
    expect_choice("eth1,eth0", NULL, "eth1 (10.1.0.5)", "SHOAL_NIC=eth1,eth0");
    expect_choice("10.1.0.0/16", "10.0.0.5", "eth1 (10.1.0.5)", "SHOAL_NIC=10.1.0.0/16");
    expect_choice("10.1.0.4/31", NULL, "eth1 (10.1.0.5)", "SHOAL_NIC=");
    expect_choice("0.0.0.0/0", NULL, "lo (127.0.0.1)", "SHOAL_NIC=");
    expect_choice("fd00:0:0:2::/64", NULL, "eth1 (fd00:0:0:2::5)", "SHOAL_NIC=");
    expect_choice("lo", NULL, "lo (127.0.0.1)", "SHOAL_NIC=lo");
}

static void nic_is_excluded_in_every_way(void **state)
{
    (void)state;
    expect_choice("^docker0", NULL, "eth0 (10.0.0.5)", "SHOAL_NIC=^docker0");
    expect_choice("^docker*,^10.0.0.0/24", NULL, "eth1 (10.1.0.5)", "SHOAL_NIC=");
    expect_choice("^eth0", "10.0.0.5", "docker0 (172.17.0.1)", "SHOAL_NIC=^eth0");
    expect_choice("eth*,^eth0", "10.0.0.5", "eth1 (10.1.0.5)", "SHOAL_NIC=eth*,^eth0");
    expect_choice("^docker0", "10.1.0.5", "eth1 (10.1.0.5)", "the route to the others");
}

static void nic_that_is_missing_is_told_with_those_there_are(void **state)
{
    (void)state;
    expect_choice("ib0", "10.0.0.5", NULL,
                  "left by SHOAL_NIC=ib0 and can reach the others; there are: lo (127.0.0.1), docker0");
    expect_choice("ens9", NULL, NULL, "ens9 (192.168.7.2), down");
    expect_choice("^*", NULL, NULL, "left by SHOAL_NIC=^*");
    expect_choice("10.1.0.4/32", NULL, NULL, "left by SHOAL_NIC=");
}

static void nic_wish_that_makes_no_sense_is_refused(void **state)
{
    (void)state;
    expect_choice("eth0,10.0.0.0/33", NULL, NULL, "SHOAL_NIC has \"10.0.0.0/33\"");
    expect_choice("10.0.0/8", NULL, NULL, "SHOAL_NIC has \"10.0.0/8\"");
    expect_choice("10.0.0.0/", NULL, NULL, "SHOAL_NIC has");
    expect_choice("10.0.0.0/8x", NULL, NULL, "SHOAL_NIC has");
    expect_choice("fd00::/129", NULL, NULL, "SHOAL_NIC has");
    expect_choice("e*0", NULL, NULL, "SHOAL_NIC has \"e*0\"");
    expect_choice("^", NULL, NULL, "SHOAL_NIC has \"^\"");
    expect_choice("eth0,,eth1", NULL, NULL, "SHOAL_NIC has \"\"");
    expect_choice("a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q", NULL, NULL, "SHOAL_NIC has \"q\"");
    expect_choice("an-interface-whose-name-is-longer-than-any-address-there-is", NULL, NULL, "SHOAL_NIC has \"an-interface");
}

/* ---- Equal interfaces ---------------------------------------------------------------------------------------------------- */

/* A machine with two networks for data, one for administration, containers, and interfaces that others cannot reach. */
static const struct {
    const char *name, *address;
    unsigned prefix_bits, speed;
    const char *driver;
    bool is_down, is_loopback;
} rails[] = {
    {"lo", "127.0.0.1", 8, 0, "", false, true},
    {"mgmt", "192.168.1.5", 24, 1000, "mlx5_core", false, false},
    {"rail2", "10.2.0.5", 24, 100000, "mlx5_core", false, false},
    {"rail1", "10.1.0.5", 24, 100000, "mlx5_core", false, false},
    {"rail1", "10.1.7.5", 24, 100000, "mlx5_core", false, false},
    {"again", "10.2.0.6", 24, 100000, "mlx5_core", false, false},
    {"rail2:7", "10.7.0.5", 24, 100000, "mlx5_core", false, false},
    {"rail3", "10.3.0.5", 24, 100000, "mlx5_core", true, false},
    {"other", "10.4.0.5", 24, 100000, "ice", false, false},
    {"docker0", "172.17.0.1", 16, 0, "bridge", false, false},
    {"veth1", "10.5.0.1", 24, 0, "", false, false},
    {"veth2", "10.6.0.1", 24, 0, "", false, false},
    {"rail1", "fd00:0:0:1::5", 64, 100000, "mlx5_core", false, false},
    {"rail2", "fd00:0:0:2::5", 64, 100000, "mlx5_core", false, false},
    {"rail2", "fe80::5", 64, 100000, "mlx5_core", false, false},
};

/* names: of the interfaces that are equal to the one with this address, in their order. */
static void expect_equal(const char *wanted, const char *address, const char *names)
{
    struct shoal_nics nics = {.count = SHOAL_COUNT_OF(rails)}, equal;
    const struct shoal_nic *chosen = NULL;
    const struct sockaddr_storage at = address_from(address);
    char text[200] = "";
    for (int i = 0; i < nics.count; i++) {
        struct shoal_nic *nic = &nics.at[i];
        *nic = (struct shoal_nic){.address = address_from(rails[i].address),
                                  .prefix_bits = rails[i].prefix_bits,
                                  .speed = rails[i].speed,
                                  .is_up = !rails[i].is_down,
                                  .is_loopback = rails[i].is_loopback};
        strcpy(nic->name, rails[i].name);
        strcpy(nic->driver, rails[i].driver);
        chosen = shoal_nic_has_address(nic, (const struct sockaddr *)(const void *)&at) ? nic : chosen;
    }
    assert_non_null(chosen);
    const int count = shoal_nic_equals(&nics, chosen, wanted, &equal);
    assert_int_equal(count, equal.count);
    for (int i = 0; i < equal.count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", equal.at[i].name);
    assert_string_equal(text, names);
}

static void nic_has_equals(void **state)
{
    (void)state;
    expect_equal(NULL, "10.2.0.5", "rail1 rail2");
    expect_equal("", "10.1.0.5", "rail1 rail2");
    expect_equal(NULL, "fd00:0:0:2::5", "rail1 rail2");
    expect_equal(NULL, "192.168.1.5", "mgmt");
    expect_equal(NULL, "10.4.0.5", "other");
    expect_equal(NULL, "172.17.0.1", "docker0");
    expect_equal(NULL, "10.6.0.1", "veth1 veth2");
    expect_equal(NULL, "127.0.0.1", "lo");
    expect_equal("^rail1", "10.2.0.5", "rail2");
    expect_equal("rail2", "10.2.0.5", "rail2");
    expect_equal("rail2,rail1,mgmt", "10.2.0.5", "rail1 rail2");
    expect_equal("10.0.0.0/8", "10.2.0.5", "rail1 rail2");
    expect_equal("lo,veth*", "10.5.0.1", "veth1 veth2");
    expect_equal("not a wish/99", "10.2.0.5", "rail2");
}

static void nic_reaches_its_network(void **state)
{
    static const struct {
        const char *own, *other;
        unsigned bits;
        bool reaches;
    } cases[] = {{"10.1.0.5", "10.1.0.9", 24, true},  {"10.1.0.5", "10.1.1.9", 24, false}, {"10.1.0.5", "10.1.0.4", 31, true},
                 {"10.1.0.5", "10.1.0.6", 31, false}, {"10.1.0.5", "10.1.0.5", 32, true},  {"10.1.0.5", "10.1.0.4", 32, false},
                 {"fd00::5", "fd00::ffff", 64, true}, {"fd00::5", "fd01::5", 64, false},   {"fd00::5", "10.1.0.5", 8, false},
                 {"10.1.0.5", "fd00::5", 8, false}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        const struct shoal_nic nic = {.address = address_from(cases[i].own), .prefix_bits = cases[i].bits};
        const struct sockaddr_storage other = address_from(cases[i].other);
        if (shoal_nic_reaches(&nic, (const struct sockaddr *)(const void *)&other) != cases[i].reaches)
            fail_msg("%s/%u and %s", cases[i].own, cases[i].bits, cases[i].other);
    }
}

static void nic_of_this_machine_is_found(void **state)
{
    (void)state;
    struct shoal_nics nics;
    struct sockaddr_storage source;
    const struct sockaddr_storage peer = address_from("127.0.0.1");
    char reason[600];
    assert_true(shoal_nics_find(&nics));
    assert_true(nics.count > 0);
    assert_true(shoal_nic_route((const struct sockaddr *)(const void *)&peer, sizeof(struct sockaddr_in), &source));
    const struct shoal_nic *nic =
        shoal_nic_choose(&nics, NULL, (const struct sockaddr *)(const void *)&source, reason, sizeof reason);
    assert_non_null(nic);
    assert_true(nic->is_loopback);
    assert_int_equal(nic->prefix_bits, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nic_follows_the_route),
        cmocka_unit_test(nic_without_a_route_is_the_first_that_is_up),
        cmocka_unit_test(nic_is_named_in_every_way),
        cmocka_unit_test(nic_is_excluded_in_every_way),
        cmocka_unit_test(nic_that_is_missing_is_told_with_those_there_are),
        cmocka_unit_test(nic_wish_that_makes_no_sense_is_refused),
        cmocka_unit_test(nic_has_equals),
        cmocka_unit_test(nic_reaches_its_network),
        cmocka_unit_test(nic_of_this_machine_is_found),
    };
    return cmocka_run_group_tests_name("nic", tests, NULL, NULL);
}
