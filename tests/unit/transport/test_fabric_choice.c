/* The choice of libfabric and of its provider, and why others are not chosen; on machines that a mock describes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <ftw.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "comm/settings.h"
#include "transport/fabric/fabric_filter.h"
#include "transport/fabric/fabric_providers.h"

struct heard {
    char text[2048];
};

static void hear(void *arg, int level, const char *line)
{
    struct heard *heard = arg;
    (void)level;
    snprintf(heard->text, sizeof heard->text, "%s", line);
}

static enum shoal_status open_library(const char *path, struct shoal_fabric_library *library, struct heard *heard)
{
    struct shoal_settings settings;
    struct shoal_log log;
    char error[256];
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&log, &settings.log, hear, heard);
    const enum shoal_status status = shoal_fabric_library_open(path, &log, library);
    shoal_log_fini(&log);
    return status;
}

static struct shoal_nic nic_at(const char *text)
{
    struct shoal_nic nic = {.name = "eth0", .is_up = true};
    struct sockaddr_in *address = (struct sockaddr_in *)(void *)&nic.address;
    address->sin_family = AF_INET;
    assert_int_equal(inet_pton(AF_INET, text, &address->sin_addr), 1);
    return nic;
}

/* On that machine, with that wish, the provider `name` is chosen (NULL: none). The reason contains `why`; the log reports that
 * `rejected` was rejected for `because`. */
struct choice {
    const char *machine, *address, *wanted, *name;
    enum shoal_fabric_way way;
    const char *why, *rejected, *because;
};

static const struct choice choices[] = {
    {"aws", "10.0.0.5", "", "efa", SHOAL_FABRIC_WRITES, "best", "verbs;ofi_rxm", "finds no device"},
    {"short", "10.0.0.5", "", NULL, SHOAL_FABRIC_REJECTED, "net cannot send and receive messages (FI_MSG) of 17408", NULL,
     NULL},
    {"aws", "10.0.0.5", "tcp", "tcp", SHOAL_FABRIC_WRITES, "SHOAL_PROVIDER", "net", "finds no device"},
    {"infiniband", "10.1.0.5", "", "verbs;ofi_rxm", SHOAL_FABRIC_WRITES, "best", "net", "no endpoint on eth0 (10.1.0.5)"},
    {"infiniband", "10.0.0.5", "", "net", SHOAL_FABRIC_WRITES, "best", "verbs;ofi_rxm", "no endpoint on eth0 (10.0.0.5)"},
    {"infiniband", "10.0.0.5", "tcp;ofi_rxm", "tcp;ofi_rxm", SHOAL_FABRIC_WRITES, "SHOAL_PROVIDER", "efa", "no device"},
    {"infiniband", "10.0.0.5", "efa", NULL, SHOAL_FABRIC_REJECTED, "SHOAL_PROVIDER=efa: it finds no device", NULL, NULL},
    {"old", "10.0.0.5", "", NULL, SHOAL_FABRIC_REJECTED, "tcp has no reliable unconnected endpoint", "tcp", "FI_EP_RDM"},
    {"old", "10.0.0.5", "udp;ofi_rxd", "udp;ofi_rxd", SHOAL_FABRIC_SENDS, "SHOAL_PROVIDER", NULL, NULL},
    {"no-immediate", "10.0.0.5", "", "net", SHOAL_FABRIC_SENDS, "best", NULL, NULL},
    {"tagged-only", "10.0.0.5", "", NULL, SHOAL_FABRIC_REJECTED, "net cannot send and receive messages", NULL, NULL},
    {"nothing", "10.0.0.5", "", NULL, SHOAL_FABRIC_REJECTED, "no provider of libfabric can be used: efa finds", NULL, NULL},
    {"aws", "10.0.0.5", "ib", NULL, SHOAL_FABRIC_REJECTED, "SHOAL_PROVIDER is \"ib\", but may be efa, verbs;ofi_rxm", NULL,
     NULL},
};

static void fabric_takes_the_best_provider_of_the_machine(void **state)
{
    (void)state;
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    struct heard heard = {""};
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    for (size_t i = 0; i < SHOAL_COUNT_OF(choices); i++) {
        const struct choice *choice = &choices[i];
        const struct shoal_nic nic = nic_at(choice->address);
        char reason[1200];
        setenv("SHOAL_MOCK_FABRIC", choice->machine, 1);
        shoal_fabric_providers_find(&library, &nic, (struct shoal_fabric_share){0}, providers);
        const struct shoal_fabric_provider *taken =
            shoal_fabric_providers_choose(providers, choice->wanted, reason, sizeof reason);
        if ((taken != NULL) != (choice->name != NULL) || (taken && strcmp(taken->name, choice->name) != 0) ||
            (taken && taken->way != choice->way) || !strstr(reason, choice->why))
            fail_msg("%s, \"%s\": %s, because: %s", choice->machine, choice->wanted, taken ? taken->name : "none", reason);
        if (taken && strcmp(taken->name, "efa") == 0 && !strstr(taken->text, "rdmap0s6-rdm"))
            fail_msg("efa's bare device is taken: %s", taken->text);
        for (int p = 0; p < SHOAL_FABRIC_PROVIDERS && choice->rejected; p++) {
            if (strcmp(providers[p].name, choice->rejected) != 0)
                continue;
            assert_int_equal(providers[p].way, SHOAL_FABRIC_REJECTED);
            if (!strstr(providers[p].text, choice->because))
                fail_msg("%s: %s %s", choice->machine, choice->rejected, providers[p].text);
        }
        shoal_fabric_providers_free(&library, providers);
    }
    unsetenv("SHOAL_MOCK_FABRIC");
    shoal_fabric_library_close(&library);
}

/* If the processor would have to copy GPU memory, the provider counts as one without GPU support. It is not asked if no rank
 * wants GPU memory. */
static void fabric_adapters_that_read_gpus(void **state)
{
    static const struct {
        const char *machine, *provider;
        bool is_wanted, reads;
    } cases[] = {{"gpudirect", "efa", true, true},
                 {"gpudirect", "efa", false, false},
                 {"aws", "efa", true, false},
                 {"gpudirect-tcp", "tcp", true, false}};
    const struct shoal_nic nic = nic_at("10.0.0.5");
    (void)state;
    struct shoal_fabric_library library;
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    struct heard heard = {""};
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        char reason[1200];
        setenv("SHOAL_MOCK_FABRIC", cases[i].machine, 1);
        shoal_fabric_providers_find_best(&library, &nic, "", cases[i].is_wanted, (struct shoal_fabric_share){0}, providers);
        const struct shoal_fabric_provider *taken = shoal_fabric_providers_choose(providers, "", reason, sizeof reason);
        assert_non_null(taken);
        assert_string_equal(taken->name, cases[i].provider);
        assert_int_equal(taken->way, SHOAL_FABRIC_WRITES);
        assert_int_equal(taken->reads_devices, cases[i].reads);
        assert_int_equal(strstr(taken->text, "it reads memory of GPUs") != NULL, cases[i].reads);
        shoal_fabric_providers_free(&library, providers);
    }
    unsetenv("SHOAL_MOCK_FABRIC");
    shoal_fabric_library_close(&library);
}

/* Expects that rank `rank` of `ranks` has these adapters, first endpoint first: "rdmap16s27-rdm, rdmap32s27-rdm, 2 of 4". */
static void expect_share(const struct shoal_fabric_library *library, const char *provider, const struct shoal_nic *nic,
                         struct shoal_fabric_share share, const char *adapters)
{
    struct shoal_fabric_provider providers[SHOAL_FABRIC_PROVIDERS];
    char reason[1200], wanted[160];
    snprintf(wanted, sizeof wanted, "writes into peers' memory on %s", adapters);
    shoal_fabric_providers_find_best(library, nic, provider, false, share, providers);
    const struct shoal_fabric_provider *taken = shoal_fabric_providers_choose(providers, provider, reason, sizeof reason);
    assert_non_null(taken);
    if (strncmp(taken->text, wanted, strlen(wanted)) != 0)
        fail_msg("rank %d of %d, at most %d: \"%s\", not \"%s\"", share.rank, share.ranks, share.most, taken->text, wanted);
    shoal_fabric_providers_free(library, providers);
}

#define P4D_0 "rdmap16s27-rdm"
#define P4D_1 "rdmap32s27-rdm"
#define P4D_2 "rdmap144s27-rdm"
#define P4D_3 "rdmap160s27-rdm"

/* A p4d host: four adapters, one of which appears twice. Each belongs to one rank if there are at most four ranks. */
static void fabric_adapters_are_divided_among_the_ranks(void **state)
{
    static const struct {
        int ranks, most;
        const char *adapters[8]; /* of each rank */
    } hosts[] = {
        {0, 0, {P4D_0 ", one of 4"}},
        {1, 0, {P4D_0 ", " P4D_1 ", " P4D_2 ", " P4D_3 ", 4 of 4"}},
        {1, 3, {P4D_0 ", " P4D_1 ", " P4D_2 ", 3 of 4"}},
        {1, 1, {P4D_0 ", one of 4"}},
        {1, 16, {P4D_0 ", " P4D_1 ", " P4D_2 ", " P4D_3 ", 4 of 4"}},
        {2, 0, {P4D_0 ", " P4D_1 ", 2 of 4", P4D_2 ", " P4D_3 ", 2 of 4"}},
        {2, 1, {P4D_0 ", one of 4", P4D_2 ", one of 4"}},
        {3, 0, {P4D_0 ", one of 4", P4D_1 ", one of 4", P4D_2 ", " P4D_3 ", 2 of 4"}},
        {4, 0, {P4D_0 ", one of 4", P4D_1 ", one of 4", P4D_2 ", one of 4", P4D_3 ", one of 4"}},
        {5, 0, {P4D_0, P4D_0, P4D_1, P4D_2, P4D_3}},
        {8, 0, {P4D_0, P4D_0, P4D_1, P4D_1, P4D_2, P4D_2, P4D_3, P4D_3}},
    };
    const struct shoal_nic nic = nic_at("10.0.0.5");
    struct shoal_fabric_library library;
    struct heard heard = {""};
    (void)state;
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    for (size_t i = 0; i < SHOAL_COUNT_OF(hosts); i++) {
        for (int rank = 0; rank < hosts[i].ranks || rank == 0; rank++) {
            const struct shoal_fabric_share share = {.rank = rank, .ranks = hosts[i].ranks, .most = hosts[i].most};
            expect_share(&library, "", &nic, share, hosts[i].adapters[rank]);
            expect_share(&library, "tcp", &nic, share, "eth0; progress");
        }
    }
    unsetenv("SHOAL_MOCK_FABRIC");
    shoal_fabric_library_close(&library);
}

/* A host with three interfaces that others may reach, and one of containers. The first endpoint is always at the one that leads
 * to the others, eth1. */
static void fabric_interfaces_are_divided_among_the_ranks(void **state)
{
    static const struct {
        int ranks, most;
        const char *adapters[4];
    } hosts[] = {
        {0, 0, {"eth1, one of 3"}},
        {1, 0, {"eth1, eth0, eth2, 3 of 3"}},
        {1, 2, {"eth1, eth0, 2 of 3"}},
        {1, 1, {"eth1, one of 3"}},
        {2, 0, {"eth1 (messages only), eth0, one of 3", "eth1, eth2, 2 of 3"}},
        {2, 1, {"eth1, one of 3", "eth1, one of 3"}},
        {3, 0, {"eth1 (messages only), eth0, one of 3", "eth1, one of 3", "eth1 (messages only), eth2, one of 3"}},
        {4,
         0,
         {"eth1 (messages only), eth0, one of 3", "eth1 (messages only), eth0, one of 3", "eth1, one of 3",
          "eth1 (messages only), eth2, one of 3"}},
    };
    struct shoal_nics equal = {.count = 3, .at = {nic_at("10.0.0.5"), nic_at("10.1.0.5"), nic_at("10.2.0.5")}};
    const struct shoal_nic nic = equal.at[1];
    struct shoal_fabric_library library;
    struct heard heard = {""};
    (void)state;
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    setenv("SHOAL_MOCK_FABRIC", "rails", 1);
    for (size_t i = 0; i < SHOAL_COUNT_OF(hosts); i++) {
        for (int rank = 0; rank < hosts[i].ranks || rank == 0; rank++) {
            struct shoal_fabric_share share = {.rank = rank, .ranks = hosts[i].ranks, .nics = &equal, .most = hosts[i].most};
            expect_share(&library, "", &nic, share, hosts[i].adapters[rank]);
            share.nics = NULL;
            expect_share(&library, "", &nic, share, "eth1; progress");
        }
    }
    /* The last one leads to the others. It is not left out. */
    const struct shoal_fabric_share few = {.ranks = 1, .nics = &equal, .most = 2};
    expect_share(&library, "", &equal.at[2], few, "eth2, eth0, 2 of 3");
    unsetenv("SHOAL_MOCK_FABRIC");
    shoal_fabric_library_close(&library);
}

/* A name that is only the beginning of an adapter's does not count. If no name is offered, the ranks divide the adapters as
 * without names. */
static void fabric_the_adapters_near_a_gpu_are_taken(void **state)
{
    static const struct {
        const char *names[2], *adapters;
    } cases[] = {{{"rdmap32s27"}, P4D_1 ", one of 4"},
                 {{"rdmap160s27"}, P4D_3 ", one of 4"},
                 {{"rdmap32s27-rdm"}, P4D_1 ", one of 4"},
                 {{"rdmap160s27", "rdmap16s27"}, P4D_3 ", " P4D_0 ", 2 of 4"},
                 {{"rdmap160s27", "mlx5_0"}, P4D_3 ", one of 4"},
                 {{"rdmap160s27", "rdmap160s27"}, P4D_3 ", one of 4"},
                 {{"rdmap32s2"}, P4D_2 ", " P4D_3 ", 2 of 4"},
                 {{"mlx5_0", "mlx5_1"}, P4D_2 ", " P4D_3 ", 2 of 4"},
                 {{NULL}, P4D_2 ", " P4D_3 ", 2 of 4"}};
    const struct shoal_nic nic = nic_at("10.0.0.5");
    struct shoal_fabric_library library;
    struct heard heard = {""};
    (void)state;
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    setenv("SHOAL_MOCK_FABRIC", "p4d", 1);
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        char names[2][SHOAL_LINKS_NAME_MAX];
        struct shoal_fabric_share share = {.rank = 1, .ranks = 2, .names = (const char(*)[SHOAL_LINKS_NAME_MAX])names};
        for (; share.name_count < 2 && cases[i].names[share.name_count]; share.name_count++)
            strcpy(names[share.name_count], cases[i].names[share.name_count]);
        expect_share(&library, "", &nic, share, cases[i].adapters);
    }
    unsetenv("SHOAL_MOCK_FABRIC");
    shoal_fabric_library_close(&library);
}

static void fabric_library_says_what_is_wrong_with_the_file(void **state)
{
    (void)state;
    struct shoal_fabric_library library;
    struct heard heard = {""};
    assert_int_equal(open_library("/nonexistent/libfabric.so", &library, &heard), SHOAL_ERR_UNSUPPORTED);
    assert_non_null(strstr(heard.text, "SHOAL_LIBFABRIC cannot be loaded"));
    assert_int_equal(open_library("libc.so.6", &library, &heard), SHOAL_ERR_UNSUPPORTED);
    assert_non_null(strstr(heard.text, "is not libfabric 1.10 or newer"));
    setenv("SHOAL_MOCK_VERSION", "0x10009", 1); /* 1.9 */
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_ERR_UNSUPPORTED);
    assert_non_null(strstr(heard.text, "is not libfabric 1.10 or newer"));
    setenv("SHOAL_MOCK_VERSION", "0x20003", 1); /* 2.3 */
    assert_int_equal(open_library(MOCK_FABRIC, &library, &heard), SHOAL_OK);
    assert_int_equal(library.major, 2);
    assert_int_equal(library.minor, 3);
    unsetenv("SHOAL_MOCK_VERSION");
    shoal_fabric_library_close(&library);
}

/* ---- FI_PROVIDER --------------------------------------------------------------------------------------------------------- */

/* /sys/class/infiniband of a host. vendor NULL: a software adapter, which is on no bus. */
static void put_adapter(const char *devices, const char *name, const char *vendor)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", devices, name);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/%s/device", devices, name);
    if (!vendor)
        return;
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/%s/device/vendor", devices, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s\n", vendor);
    assert_int_equal(fclose(file), 0);
}

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)about, (void)type, (void)place;
    return remove(path);
}

static const struct {
    const char *filter, *wanted;
    bool without, with_efa, with_mellanox, with_software; /* what remains on hosts with such an adapter */
} filter_cases[] = {
    {"efa", "", false, true, false, false},
    {"EFA", "", false, true, false, false},
    {"verbs", "", false, false, true, true},
    {"verbs;ofi_rxm", "", false, false, true, true},
    {"efa,verbs", "", false, true, true, true},
    {"tcp", "", true, true, true, true},
    {"net", "", true, true, true, true},
    {"efa,tcp;ofi_rxm", "", true, true, true, true},
    {"^efa", "", true, true, true, true},
    {"sockets", "", false, false, false, false},
    {"psm3,tcpx", "", false, false, false, false},
    {"udp", "", false, false, false, false},
    {"udp", "udp;ofi_rxd", true, true, true, true},
    {"efa", "tcp", false, false, false, false},
    {"efa,tcp", "tcp", true, true, true, true},
    {"efa", "efa", false, true, false, false},
    {"tcp", "verbs;ofi_rxm", false, false, false, false},
};

static void fabric_filter_counts_only_providers_that_have_an_adapter(void **state)
{
    char folder[] = "/tmp/shoal-filter-XXXXXX", efa[64], mellanox[64], software[64], none[64];
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(none, sizeof none, "%s/none", folder);
    snprintf(efa, sizeof efa, "%s/efa", folder);
    snprintf(mellanox, sizeof mellanox, "%s/mellanox", folder);
    snprintf(software, sizeof software, "%s/software", folder);
    assert_int_equal(mkdir(efa, 0700) || mkdir(mellanox, 0700) || mkdir(software, 0700), 0);
    put_adapter(efa, "rdmap0s6", "0x1d0f");
    put_adapter(mellanox, "mlx5_0", "0x15b3");
    put_adapter(software, "rxe0", NULL);
    for (size_t i = 0; i < SHOAL_COUNT_OF(filter_cases); i++) {
        const char *filter = filter_cases[i].filter, *wanted = filter_cases[i].wanted;
        if (shoal_fabric_filter_leaves_any(filter, wanted, none) != filter_cases[i].without ||
            shoal_fabric_filter_leaves_any(filter, wanted, efa) != filter_cases[i].with_efa ||
            shoal_fabric_filter_leaves_any(filter, wanted, mellanox) != filter_cases[i].with_mellanox ||
            shoal_fabric_filter_leaves_any(filter, wanted, software) != filter_cases[i].with_software)
            fail_msg("FI_PROVIDER=%s, SHOAL_PROVIDER=%s", filter, wanted);
    }
    assert_int_equal(nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
}

/* "sockets" is never taken, whatever this machine has. */
static void fabric_filter_is_hidden_with_one_line_and_put_back(void **state)
{
    struct shoal_settings settings;
    struct shoal_log log;
    struct heard heard = {""};
    char error[256];
    (void)state;
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    shoal_log_init(&log, &settings.log, hear, &heard);
    setenv("FI_PROVIDER", "tcp", 1);
    assert_null(shoal_fabric_filter_hide("", &log));
    assert_string_equal(getenv("FI_PROVIDER"), "tcp");
    assert_string_equal(heard.text, "");
    setenv("FI_PROVIDER", "sockets", 1);
    log.rank = 1; /* only rank 0 warns, the others log at level info */
    char *entry = shoal_fabric_filter_hide("", &log);
    assert_non_null(entry);
    assert_null(getenv("FI_PROVIDER"));
    assert_string_equal(heard.text, "");
    assert_null(shoal_fabric_filter_hide("", &log));
    setenv("SOMETHING_ELSE", "meanwhile", 1);
    shoal_fabric_filter_restore(entry);
    assert_string_equal(getenv("FI_PROVIDER"), "sockets");
    log.rank = 0;
    entry = shoal_fabric_filter_hide("", &log);
    assert_null(getenv("FI_PROVIDER"));
    assert_non_null(strstr(heard.text, "FI_PROVIDER=sockets is ignored: it leaves libfabric no provider that can serve"));
    shoal_fabric_filter_restore(entry);
    assert_string_equal(getenv("FI_PROVIDER"), "sockets");
    unsetenv("FI_PROVIDER");
    shoal_log_fini(&log);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fabric_takes_the_best_provider_of_the_machine),
        cmocka_unit_test(fabric_adapters_are_divided_among_the_ranks),
        cmocka_unit_test(fabric_interfaces_are_divided_among_the_ranks),
        cmocka_unit_test(fabric_adapters_that_read_gpus),
        cmocka_unit_test(fabric_the_adapters_near_a_gpu_are_taken),
        cmocka_unit_test(fabric_library_says_what_is_wrong_with_the_file),
        cmocka_unit_test(fabric_filter_counts_only_providers_that_have_an_adapter),
        cmocka_unit_test(fabric_filter_is_hidden_with_one_line_and_put_back),
    };
    return cmocka_run_group_tests_name("fabric_choice", tests, NULL, NULL);
}
