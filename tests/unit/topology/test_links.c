/* How GPUs are connected: on trees of files that imitate other machines, and on trees that lack what a machine should have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "inspect/describe_gpus.h"
#include "topology/links.h"

/* ---- A machine made of files --------------------------------------------------------------------------------------------- */

static char sys[64];

enum { PATH_BYTES = 512 };

SHOAL_PRINTF(2, 3) static void print_path(char path_out[PATH_BYTES], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    assert_in_range(vsnprintf(path_out, PATH_BYTES, format, args), 1, PATH_BYTES - 1);
    va_end(args);
}

static void make_folders(const char *path)
{
    char name[PATH_BYTES];
    print_path(name, "%s/%s", sys, path);
    for (char *at = name + strlen(sys) + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        (void)mkdir(name, 0700); /* it may exist */
        *at = '/';
    }
    (void)mkdir(name, 0700);
}

static void put_line(const char *folder, const char *name, const char *line)
{
    char path[PATH_BYTES];
    print_path(path, "%s/%s/%s", sys, folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s\n", line);
    assert_int_equal(fclose(file), 0);
}

static void put_link(const char *folder, const char *name, const char *device)
{
    char path[PATH_BYTES], target[PATH_BYTES];
    make_folders(folder);
    print_path(path, "%s/%s/%s", sys, folder, name);
    print_path(target, "%s/devices/%s", sys, device);
    assert_int_equal(symlink(target, path), 0);
}

/* Creates a PCI device at its place in the tree. node NULL: it has no NUMA node. */
static void put_device(const char *place, const char *vendor, const char *class, const char *node)
{
    char path[PATH_BYTES];
    print_path(path, "devices/%s", place);
    make_folders(path);
    put_line(path, "vendor", vendor);
    put_line(path, "class", class);
    if (node)
        put_line(path, "numa_node", node);
    put_link("bus/pci/devices", strrchr(place, '/') + 1, place);
}

static void put_gpu(const char *place, const char *node)
{
    put_device(place, "0x10de", "0x030200", node);
}

static void put_adapter(const char *kind, const char *name, const char *place, const char *node)
{
    char folder[PATH_BYTES];
    put_device(place, "0x1d0f", "0x020000", node);
    print_path(folder, "class/%s/%s", kind, name);
    put_link(folder, "device", place);
}

static int open_sys(void **state)
{
    (void)state;
    strcpy(sys, "/tmp/shoal-links-XXXXXX");
    return mkdtemp(sys) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)about, (void)type, (void)place;
    return remove(path);
}

static int close_sys(void **state)
{
    (void)state;
    return nftw(sys, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- What is expected ---------------------------------------------------------------------------------------------------- */

static struct shoal_links links;

/* Rows of words as in `shoal info`, one for each GPU. */
static void expect_gpus(const char *const *rows)
{
    for (int gpu = 0; gpu < links.gpus; gpu++) {
        char row[512] = "";
        for (int peer = 0; peer < links.gpus; peer++) {
            const enum shoal_path link = shoal_links_between(&links, gpu, peer);
            assert_int_equal(link, shoal_links_between(&links, peer, gpu));
            snprintf(row + strlen(row), sizeof row - strlen(row), "%s%s", peer ? " " : "", shoal_path_word(link));
        }
        assert_string_equal(row, rows[gpu]);
    }
}

/* "name:word" of each GPU's adapter. */
static void expect_adapters(const char *const *adapters)
{
    for (int gpu = 0; gpu < links.gpus; gpu++) {
        char text[128];
        const int adapter = shoal_links_choose_adapter(&links, gpu);
        assert_in_range(adapter, 0, links.adapters - 1);
        snprintf(text, sizeof text, "%s:%s", links.adapter[adapter].name,
                 shoal_path_word(shoal_links_to_adapter(&links, gpu, adapter)));
        assert_string_equal(text, adapters[gpu]);
    }
}

/* Expects the adapter of a rank of this host; NULL: no adapter is named. */
static void expect_name(int rank, int ranks, const char *wanted)
{
    char names[1][SHOAL_LINKS_NAME_MAX];
    assert_int_equal(shoal_links_name_adapters(sys, rank, ranks, 1, names), wanted != NULL);
    if (wanted)
        assert_string_equal(names[0], wanted);
}

/* Expects the adapters of a rank of this host, at most that many. */
static void expect_names(int rank, int ranks, int most, const char *wanted)
{
    char names[SHOAL_LINKS_ADAPTERS_MAX][SHOAL_LINKS_NAME_MAX], text[1024] = "";
    const int count = shoal_links_name_adapters(sys, rank, ranks, most, names);
    for (int i = 0; i < count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%.*s", i ? " " : "", SHOAL_LINKS_NAME_MAX - 1, names[i]);
    assert_string_equal(text, wanted);
}

/* ---- Machines ------------------------------------------------------------------------------------------------------------ */

/* p4d: a virtual machine that hides its switches; each has its own root complex. PCI ids as AWS publishes them. */
static void links_of_a_p4d(void **state)
{
    static const char *const buses[] = {"10", "20", "90", "a0"};
    static const char *const rows[] = {
        "- root node node sockets sockets sockets sockets", "root - node node sockets sockets sockets sockets",
        "node node - root sockets sockets sockets sockets", "node node root - sockets sockets sockets sockets",
        "sockets sockets sockets sockets - root node node", "sockets sockets sockets sockets root - node node",
        "sockets sockets sockets sockets node node - root", "sockets sockets sockets sockets node node root -"};
    static const char *const joined[] = {"- nvlink", "nvlink -"};
    static const char *const adapters[] = {"rdmap16s27:root",  "rdmap16s27:root",  "rdmap32s27:root",  "rdmap32s27:root",
                                           "rdmap144s27:root", "rdmap144s27:root", "rdmap160s27:root", "rdmap160s27:root"};
    char place[64], name[32], cores[64];
    (void)state;
    for (int i = 0; i < 4; i++) {
        const char *bus = buses[i], *node = i < 2 ? "0" : "1";
        for (int gpu = 0; gpu < 2; gpu++) {
            snprintf(place, sizeof place, "pci0000:%s/0000:%s:1%c.0", bus, bus, gpu ? 'd' : 'c');
            put_gpu(place, node);
        }
        snprintf(place, sizeof place, "pci0000:%s/0000:%s:1b.0", bus, bus);
        snprintf(name, sizeof name, "rdmap%lds27", strtol(bus, NULL, 16));
        put_adapter("infiniband", name, place, node);
    }
    make_folders("devices/system/node/node1");
    put_line("devices/system/node/node1", "cpulist", "24-47,72-95");
    shoal_links_read(sys, &links);
    assert_int_equal(links.gpus, 8);
    assert_int_equal(links.adapters, 4);
    expect_gpus(rows);
    expect_adapters(adapters);
    expect_name(5, 8, "rdmap144s27");
    expect_name(3, 4, NULL); /* it is unknown which rank uses which GPU */
    assert_int_equal(links.gpu[3].node, 0);
    assert_int_equal(links.gpu[4].node, 1);
    shoal_links_print_cores(sys, 1, cores, sizeof cores);
    assert_string_equal(cores, "24-47,72-95");
    shoal_links_print_cores(sys, 7, cores, sizeof cores);
    assert_string_equal(cores, "");
    links.is_nvlink[0][1] = links.is_nvlink[1][0] = true;
    links.gpus = 2;
    expect_gpus(joined);
    expect_adapters(adapters); /* NVLink leads to no adapter */
}

/* p5: the switches are visible. Below each of 8 are one GPU and four adapters, and two switches share one root complex. */
static void links_of_a_p5(void **state)
{
    char place[160], name[32];
    (void)state;
    for (int i = 0; i < 8; i++) {
        const char *node = i < 4 ? "0" : "1";
        const int root = i / 2 * 0x20 + 0x10, bus = 0x11 + i * 0x10;
        const int length =
            snprintf(place, sizeof place, "pci0000:%02x/0000:%02x:0%d.0/0000:%02x:00.0/", root, root, i % 2 + 1, bus);
        snprintf(place + length, sizeof place - (size_t)length, "0000:%02x:00.0/0000:%02x:00.0", bus + 1, bus + 2);
        put_gpu(place, node);
        for (int a = 0; a < 4; a++) {
            snprintf(place + length, sizeof place - (size_t)length, "0000:%02x:0%d.0/0000:%02x:00.0", bus + 1, a + 1,
                     bus + 3 + a);
            snprintf(name, sizeof name, "rdmap%ds0", bus + 3 + a);
            put_adapter("infiniband", name, place, node);
        }
    }
    shoal_links_read(sys, &links);
    assert_int_equal(links.gpus, 8);
    assert_int_equal(links.adapters, 32);
    assert_int_equal(shoal_links_between(&links, 0, 1), SHOAL_PATH_ROOT);
    assert_int_equal(shoal_links_between(&links, 0, 2), SHOAL_PATH_NODE);
    assert_int_equal(shoal_links_between(&links, 3, 4), SHOAL_PATH_SOCKETS);
    for (int gpu = 0; gpu < 8; gpu++) {
        const int adapter = shoal_links_choose_adapter(&links, gpu);
        snprintf(name, sizeof name, "rdmap%ds0", 0x11 + gpu * 0x10 + 3);
        assert_string_equal(links.adapter[adapter].name, name);
        assert_int_equal(shoal_links_to_adapter(&links, gpu, adapter), SHOAL_PATH_SWITCH);
    }
    expect_names(0, 8, 16, "rdmap20s0 rdmap21s0 rdmap22s0 rdmap23s0");
    expect_names(7, 8, 16, "rdmap132s0 rdmap133s0 rdmap134s0 rdmap135s0");
    expect_names(7, 8, 3, "rdmap132s0 rdmap133s0 rdmap134s0");
    expect_names(1, 4, 16, ""); /* it is unknown which rank uses which GPU */
}

/* g5: PCIe only, all on one bus of a virtual machine. Its NUMA nodes are trusted. */
static void links_of_a_g5(void **state)
{
    static const char *const rows[] = {
        "- root root root sockets sockets sockets sockets", "root - root root sockets sockets sockets sockets",
        "root root - root sockets sockets sockets sockets", "root root root - sockets sockets sockets sockets",
        "sockets sockets sockets sockets - root root root", "sockets sockets sockets sockets root - root root",
        "sockets sockets sockets sockets root root - root", "sockets sockets sockets sockets root root root -"};
    static const char *const adapters[] = {"eth0:sockets", "eth0:sockets", "eth0:sockets", "eth0:sockets",
                                           "eth0:root",    "eth0:root",    "eth0:root",    "eth0:root"};
    char place[64];
    (void)state;
    for (int i = 0; i < 8; i++) {
        snprintf(place, sizeof place, "pci0000:00/0000:00:1%x.0", 6 + i);
        put_gpu(place, i < 4 ? "0" : "1");
    }
    put_adapter("net", "eth0", "pci0000:00/0000:00:15.0", "1");
    put_device("pci0000:00/0000:00:05.0", "0x1d0f", "0x030000", "0"); /* a console is not a GPU that counts */
    make_folders("class/net/lo");
    shoal_links_read(sys, &links);
    assert_int_equal(links.gpus, 8);
    assert_int_equal(links.adapters, 1);
    expect_gpus(rows);
    expect_adapters(adapters);
}

/* A workstation: two cards below a switch, one next to it; NUMA is off. The network is virtio's, whose device has no node. */
static void links_without_numa(void **state)
{
    static const char *const rows[] = {"- switch node", "switch - node", "node node -"};
    static const char *const adapters[] = {"eth0:node", "eth0:node", "eth0:root"};
    (void)state;
    put_gpu("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0", "-1");
    put_gpu("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:44:00.0", "-1");
    put_gpu("pci0000:80/0000:80:03.1/0000:81:00.0", "-1");
    put_device("pci0000:80/0000:80:04.0", "0x1af4", "0x020000", "-1");
    make_folders("devices/pci0000:80/0000:80:04.0/virtio2");
    put_link("class/net/eth0", "device", "pci0000:80/0000:80:04.0/virtio2");
    shoal_links_read(sys, &links);
    expect_gpus(rows);
    expect_adapters(adapters);
    assert_string_equal(links.adapter[0].device.pci, "0000:80:04.0");
    assert_int_equal(links.adapter[0].device.node, -1);
}

/* Four GPUs of a socket, two adapters for both sockets, on the first: near GPUs share them out, and so do far ones. */
static void links_divide_adapters_among_gpus(void **state)
{
    static const char *const adapters[] = {"mlx5_0:node",    "mlx5_0:node",    "mlx5_1:node",    "mlx5_1:node",
                                           "mlx5_0:sockets", "mlx5_0:sockets", "mlx5_1:sockets", "mlx5_1:sockets"};
    char place[64];
    (void)state;
    for (int i = 0; i < 8; i++) {
        snprintf(place, sizeof place, "pci0000:%02x/0000:%02x:00.0", 0x10 + 0x10 * i, 0x10 + 0x10 * i);
        put_gpu(place, i < 4 ? "0" : "1");
    }
    put_adapter("infiniband", "mlx5_1", "pci0000:06/0000:06:00.0", "0");
    put_adapter("infiniband", "mlx5_0", "pci0000:05/0000:05:00.0", "0");
    put_adapter("net", "eth0", "pci0000:07/0000:07:00.0", "0"); /* with RDMA devices present, it does not count as an adapter */
    make_folders("class/infiniband/rxe0");                      /* a software device: on no bus */
    shoal_links_read(sys, &links);
    assert_int_equal(links.adapters, 2);
    expect_adapters(adapters);
}

/* ---- In words, with a driver --------------------------------------------------------------------------------------------- */

static char words[4096];

#if defined(__x86_64__)
#define GDRCOPY_FOUND "2.5\n"
#define GDRCOPY_WITHOUT_MODULE "none (libgdrapi.so.2 finds no kernel module"
#else
#define GDRCOPY_FOUND "none (it is used on x86-64 only)\n"
#define GDRCOPY_WITHOUT_MODULE GDRCOPY_FOUND
#endif

/* What `shoal info` prints, with the driver's devices at 0000:01:00.0, 0000:02:00.0 ... */
static const char *describe(const char *modes)
{
    bool (*set)(const char *modes);
    void (*reset)(void);
    void *library = dlopen(MOCK_CUDA, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    void *found[2] = {dlsym(library, "mock_cuda_set"), dlsym(library, "mock_cuda_reset")};
    assert_non_null(found[0]);
    assert_non_null(found[1]);
    memcpy(&set, &found[0], sizeof set);
    memcpy(&reset, &found[1], sizeof reset);
    reset();
    assert_true(set(modes));
    FILE *out = fmemopen(words, sizeof words, "w");
    assert_non_null(out);
    shoal_describe_gpus(sys, out);
    assert_int_equal(fclose(out), 0);
    return words;
}

static void links_in_words(void **state)
{
    static const char wanted[] =
        "GPUs                  4 that this process may use; CUDA driver 12.4\n"
        "  GPU 0               Stand-in 0 at 0000:01:00.0, NUMA node 0 (cores 0-3), adapter mlx5_0 (one root "
        "complex)\n"
        "  GPU 1               Stand-in 1 at 0000:02:00.0, NUMA node 0 (cores 0-3), adapter mlx5_0 (one PCIe "
        "switch)\n"
        "  GPU 2               Stand-in 2 at 0000:03:00.0, NUMA node 1, adapter mlx5_0 (across sockets)\n"
        "  GPU 3               Stand-in 3 at 0000:04:00.0, NUMA node not known, adapter mlx5_0 (unknown)\n"
        "  links of GPUs              0       1       2       3\n"
        "                     0       -  nvlink sockets       ?\n"
        "                     1  nvlink       - sockets       ?\n"
        "                     2 sockets sockets       -       ?\n"
        "                     3       ?       ?       ?       -\n"
        "  memory of others    is reached (12 of 12 pairs)\n"
        "  GPUDirect           the driver exports memory of 0 of 4 GPUs to adapters; `shoal info --providers` "
        "shows which provider reads it\n"
        "  GDRCopy             "; /* and what this machine has */
    (void)state;
    put_gpu("pci0000:00/0000:00:01.0/0000:01:00.0", "0");
    put_gpu("pci0000:00/0000:00:02.0/0000:02:00.0", "0");
    put_gpu("pci0000:80/0000:03:00.0", "1");
    put_adapter("infiniband", "mlx5_0", "pci0000:00/0000:00:02.0/0000:04:00.0", "0");
    make_folders("devices/system/node/node0");
    put_line("devices/system/node/node0", "cpulist", "0-3");
    assert_memory_equal(describe("devices=4,nvlink=2"), wanted, sizeof wanted - 1);
    assert_non_null(strstr(describe("devices=2,nvlink=2,peers=0"), "  0       -    root\n"));
    assert_non_null(strstr(words, "  memory of others    is not reached (0 of 2 pairs)\n"));
    assert_null(strstr(describe("devices=1"), "links"));
    assert_non_null(strstr(describe("devices=2,dmabuf"), "exports memory of 2 of 2 GPUs"));
    assert_non_null(strstr(describe("devices=0"), "GPUs                  none of 3 that this process may use:\n  "));
    assert_non_null(strstr(words, "CUDA_ERROR_NO_DEVICE"));
    assert_null(strstr(words, "GPU 0"));
    assert_non_null(dlopen(MOCK_GDR, RTLD_NOW | RTLD_LOCAL));
    assert_non_null(strstr(describe("devices=1,gdrcopy"), "  GDRCopy             " GDRCOPY_FOUND));
    assert_non_null(strstr(describe("devices=1"), "  GDRCopy             " GDRCOPY_WITHOUT_MODULE));
}

/* ---- Missing data -------------------------------------------------------------------------------------------------------- */

static void links_that_are_not_shown_are_unknown(void **state)
{
    char cores[8] = "x";
    (void)state;
    shoal_links_read("/nowhere", &links);
    assert_int_equal(links.gpus + links.adapters, 0);
    expect_name(0, 0, NULL);
    assert_int_equal(shoal_links_find_gpu(&links, "0000:10:1C.0"), -1);
    assert_int_equal(shoal_links_choose_adapter(&links, -1), -1);
    assert_int_equal(shoal_links_between(&links, -1, -1), SHOAL_PATH_UNKNOWN);
    shoal_links_print_cores("/nowhere", -1, cores, sizeof cores);
    assert_string_equal(cores, "");
    put_gpu("pci0000:10/0000:10:1c.0", NULL);
    put_gpu("pci0000:20/0000:20:1c.0", "0");
    put_gpu("pci0000:20/0000:20:1d.0", "no number");
    put_link("bus/pci/devices", "0000:30:00.0", "pci0000:30/0000:30:00.0"); /* leads nowhere */
    make_folders("bus/pci/devices/0000:40:00.0");                           /* outside the tree of devices */
    put_line("bus/pci/devices/0000:40:00.0", "vendor", "0x10de");
    put_line("bus/pci/devices/0000:40:00.0", "class", "0x030200");
    shoal_links_read(sys, &links);
    assert_int_equal(links.gpus, 3);
    assert_int_equal(shoal_links_find_gpu(&links, "0000:20:1D.0"), 2);
    assert_int_equal(shoal_links_find_gpu(&links, "0000:20:1D.0 and more than any id has"), -1);
    assert_int_equal(shoal_links_between(&links, 0, 1), SHOAL_PATH_UNKNOWN);
    assert_int_equal(shoal_links_between(&links, 1, 2), SHOAL_PATH_ROOT);
    assert_int_equal(shoal_links_choose_adapter(&links, 0), -1);
    expect_name(0, 3, NULL); /* no adapter */
}

/* A GPU that sysfs does not show gets the first adapter. */
static void links_more_than_the_table_holds_are_left_out(void **state)
{
    char place[64];
    (void)state;
    for (int i = 0; i < SHOAL_LINKS_GPUS_MAX + 3; i++) {
        snprintf(place, sizeof place, "pci0000:00/0000:00:%02x.%d", i / 8, i % 8);
        put_gpu(place, "0");
    }
    put_adapter("infiniband", "mlx5_0", "pci0000:10/0000:10:00.0", "0");
    shoal_links_read(sys, &links);
    assert_int_equal(links.gpus, SHOAL_LINKS_GPUS_MAX);
    assert_int_equal(shoal_links_choose_adapter(&links, -1), 0);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, open_sys, close_sys)
    const struct CMUnitTest tests[] = {
        CASE(links_of_a_p4d),
        CASE(links_of_a_p5),
        CASE(links_of_a_g5),
        CASE(links_without_numa),
        CASE(links_divide_adapters_among_gpus),
        CASE(links_in_words),
        CASE(links_that_are_not_shown_are_unknown),
        CASE(links_more_than_the_table_holds_are_left_out),
    };
    return cmocka_run_group_tests_name("links", tests, NULL, NULL);
}
