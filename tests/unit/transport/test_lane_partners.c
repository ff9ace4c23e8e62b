/* Which lane of a peer each lane writes to, on hosts with many kinds of networks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "transport/fabric/lane.h"
#include "transport/fabric/lane_partners.h"

/* Writes an address; "efa" for one that is not an internet address. */
static size_t put_address(const char *text, void *at)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(4000)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(4000)};
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1) {
        memcpy(at, &v4, sizeof v4);
        return sizeof v4;
    }
    if (inet_pton(AF_INET6, text, &v6.sin6_addr) == 1) {
        memcpy(at, &v6, sizeof v6);
        return sizeof v6;
    }
    memset(at, 0xef, 32);
    return 32;
}

/* own: the first endpoint, then the lanes, with prefix lengths of 24 bits (64 for IPv6), or "efa". peers: the peer's lanes.
 * partners: the number of each lane's partner. Each list ends with NULL. */
struct partners_case {
    const char *own[SHOAL_LANES_MAX + 2], *peers[SHOAL_LANES_MAX + 1], *partners;
};

static const struct partners_case cases[] = {
    /* No lanes here, or none there. */
    {{"10.0.0.1"}, {"10.1.0.2"}, ""},
    {{"10.0.0.1", "10.1.0.1"}, {NULL}, "-1"},
    /* Networks match, in any order. */
    {{"10.0.0.1", "10.1.0.1", "10.2.0.1"}, {"10.1.0.2", "10.2.0.2"}, "0 1"},
    {{"10.0.0.1", "10.1.0.1", "10.2.0.1"}, {"10.2.0.2", "10.1.0.2"}, "1 0"},
    {{"fd00:0:0:1::1", "fd00:0:0:2::1", "fd00:0:0:3::1"}, {"fd00:0:0:3::2", "fd00:0:0:2::2"}, "1 0"},
    /* The peer's first endpoint is in another network than ours. */
    {{"10.0.0.1", "10.1.0.1"}, {"10.0.0.2"}, "-1"},
    {{"10.1.0.1", "10.0.0.1"}, {"10.0.0.2"}, "0"},
    /* A lane without a partner in its network does not take one that another adapter reaches. */
    {{"10.0.0.1", "10.1.0.1", "192.168.0.1"}, {"10.1.0.2"}, "0 -1"},
    {{"10.0.0.1", "192.168.0.1"}, {"10.0.0.2", "10.0.0.2"}, "-1"},
    /* Networks that only one side has: perhaps a route joins them, in order. */
    {{"10.0.0.1", "10.1.0.1", "10.2.0.1"}, {"10.11.0.1", "10.12.0.1"}, "0 1"},
    {{"10.0.0.1", "10.1.0.1", "10.2.0.1"}, {"10.12.0.1"}, "0 -1"},
    {{"10.0.0.1", "10.1.0.1", "10.2.0.1"}, {"10.2.0.2", "10.11.0.1"}, "1 0"},
    /* Several threads at an adapter: lanes of one network in order; those beyond the shorter list have no partner. */
    {{"10.0.0.1", "10.1.0.1", "10.0.0.1", "10.1.0.1"}, {"10.1.0.2", "10.0.0.2", "10.1.0.2"}, "0 1 2"},
    {{"10.0.0.1", "10.1.0.1", "10.0.0.1", "10.1.0.1"}, {"10.1.0.2", "10.0.0.2"}, "0 1 -1"},
    {{"10.0.0.1", "10.0.0.1", "10.0.0.1"}, {"10.0.0.2", "10.0.0.2", "10.0.0.2"}, "0 1"},
    {{"10.0.0.1", "10.0.0.1", "10.0.0.1"}, {"10.0.0.2"}, "0 -1"},
    /* Addresses without networks: in order. */
    {{"efa", "efa", "efa", "efa"}, {"efa", "efa", "efa"}, "0 1 2"},
    {{"efa", "efa", "efa", "efa"}, {"efa"}, "0 -1 -1"},
    {{"efa", "efa"}, {"efa", "efa", "efa"}, "0"},
    /* Families differ: a route is not excluded, and the probe decides. */
    {{"10.0.0.1", "10.1.0.1"}, {"fd00::1"}, "0"},
};

static void lanes_find_partners(void **state)
{
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        const struct partners_case *one = &cases[i];
        struct shoal_nic own[SHOAL_LANES_MAX + 1] = {0};
        struct shoal_fabric_address peers[SHOAL_LANES_MAX] = {0};
        int lanes = -1, peer_count = 0, partners[SHOAL_LANES_MAX];
        char text[100] = "";
        for (; one->own[lanes + 1]; lanes++) {
            own[lanes + 1].prefix_bits = strchr(one->own[lanes + 1], ':') ? 64 : 24;
            if (strcmp(one->own[lanes + 1], "efa") != 0)
                put_address(one->own[lanes + 1], &own[lanes + 1].address);
        }
        for (; one->peers[peer_count]; peer_count++)
            peers[peer_count].bytes = (uint16_t)put_address(one->peers[peer_count], peers[peer_count].at);
        shoal_lane_partners_find(own, lanes, peers, peer_count, partners);
        for (int l = 0; l < lanes; l++)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d", l ? " " : "", partners[l]);
        if (strcmp(text, one->partners) != 0)
            fail_msg("case %zu, first endpoint %s: \"%s\", not \"%s\"", i, one->own[0], text, one->partners);
    }
}

/* The largest numbers: each lane has a partner of its own. */
static void no_two_lanes_have_one_partner(void **state)
{
    struct shoal_nic own[SHOAL_LANES_MAX + 1] = {0};
    struct shoal_fabric_address peers[SHOAL_LANES_MAX] = {0};
    int partners[SHOAL_LANES_MAX];
    (void)state;
    for (unsigned networks = 1; networks <= SHOAL_LANES_MAX; networks++) {
        unsigned taken = 0;
        for (unsigned i = 0; i <= SHOAL_LANES_MAX; i++) {
            char text[20];
            own[i].prefix_bits = 24;
            snprintf(text, sizeof text, "10.%u.0.1", i % networks);
            put_address(text, &own[i].address);
            snprintf(text, sizeof text, "10.%u.0.2", (i * 7 + 3) % networks);
            if (i < SHOAL_LANES_MAX)
                peers[i].bytes = (uint16_t)put_address(text, peers[i].at);
        }
        shoal_lane_partners_find(own, SHOAL_LANES_MAX, peers, SHOAL_LANES_MAX, partners);
        for (int i = 0; i < SHOAL_LANES_MAX; i++) {
            if (partners[i] < 0)
                continue;
            assert_in_range(partners[i], 0, SHOAL_LANES_MAX - 1);
            assert_false(taken & 1u << partners[i]);
            taken |= 1u << partners[i];
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_find_partners),
        cmocka_unit_test(no_two_lanes_have_one_partner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
