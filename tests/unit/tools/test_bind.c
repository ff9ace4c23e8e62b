/* The cores that each worker of `shoal run` gets, on invented machines; one test reads an invented /sys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../../tools/bind.h"

enum { WORKERS_MAX = 16 };

/* A machine of sockets of cores of threads. Linux numbers the first threads of all cores, then the second ones. Each socket is
 * a NUMA node. */
static int machine_make(int sockets, int cores, int threads, struct bind_cpu *cpus)
{
    const int all = sockets * cores;
    for (int id = 0; id < all * threads; id++)
        cpus[id] = (struct bind_cpu){.id = id, .node = id % all / cores, .package = id % all / cores, .core = id % all};
    return all * threads;
}

/* wanted: the workers' masks in order, as "0-1+8-9 2-3+10-11"; NULL: no worker is bound. */
static void expect_shares(struct bind_cpu *cpus, int count, enum bind_mode mode, int workers, const char *wanted)
{
    cpu_set_t masks[WORKERS_MAX];
    char text[512] = "", mask[64];
    const bool is_partitioned = bind_cut(cpus, count, mode, workers, masks);
    assert_int_equal(is_partitioned, wanted != NULL);
    for (int w = 0; is_partitioned && w < workers; w++) {
        bind_mask_print(&masks[w], mask, sizeof mask);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", w ? " " : "", mask);
    }
    if (wanted)
        assert_string_equal(text, wanted);
}

static void expect_of_machine(int sockets, int cores, int threads, enum bind_mode mode, int workers, const char *wanted)
{
    struct bind_cpu cpus[64];
    expect_shares(cpus, machine_make(sockets, cores, threads, cpus), mode, workers, wanted);
}

static void shares_follow_nodes_and_physical_cores(void **state)
{
    (void)state;
    expect_of_machine(2, 4, 2, BIND_SLICE, 2, "0-3+8-11 4-7+12-15");
    expect_of_machine(2, 4, 2, BIND_SLICE, 4, "0-1+8-9 2-3+10-11 4-5+12-13 6-7+14-15");
    expect_of_machine(2, 4, 2, BIND_SLICE, 8, "0+8 1+9 2+10 3+11 4+12 5+13 6+14 7+15");
    expect_of_machine(2, 4, 2, BIND_CORE, 2, "0+8 4+12");
    expect_of_machine(2, 4, 2, BIND_CORE, 8, "0+8 1+9 2+10 3+11 4+12 5+13 6+14 7+15");
}

static void threads_are_parted_only_where_cores_do_not_suffice(void **state)
{
    (void)state;
    expect_of_machine(1, 2, 2, BIND_SLICE, 4, "0 2 1 3");
    expect_of_machine(1, 2, 2, BIND_SLICE, 3, "0 2 1+3");
    expect_of_machine(2, 4, 2, BIND_CORE, 16, "0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15");
}

static void uneven_shares_differ_by_one(void **state)
{
    (void)state;
    expect_of_machine(1, 8, 1, BIND_SLICE, 3, "0-1 2-4 5-7");
    expect_of_machine(1, 7, 1, BIND_SLICE, 2, "0-2 3-6");
    expect_of_machine(1, 8, 1, BIND_CORE, 3, "0 2 5");
}

static void more_workers_than_cores_are_not_bound(void **state)
{
    (void)state;
    expect_of_machine(1, 2, 1, BIND_SLICE, 3, NULL);
    expect_of_machine(1, 2, 2, BIND_SLICE, 5, NULL);
    expect_of_machine(1, 1, 1, BIND_CORE, 2, NULL);
    expect_of_machine(1, 1, 1, BIND_SLICE, 1, "0");
}

/* With a mask of taskset, a cpuset or offline cores, only the remaining cores count. Their numbers need not be in order. */
static void holes_in_the_mask_are_left_out(void **state)
{
    (void)state;
    struct bind_cpu some[] = {{13, 1, 1, 5}, {1, 0, 0, 1}, {5, 1, 1, 5}, {6, 1, 1, 6}, {9, 0, 0, 1}, {3, 0, 0, 3}};
    expect_shares(some, 6, BIND_SLICE, 2, "1+3+9 5-6+13");
    expect_shares(some, 6, BIND_SLICE, 4, "1+9 3 5+13 6");
    expect_shares(some, 6, BIND_CORE, 2, "1+9 5+13");
}

/* If the firmware numbers the cores of two nodes alternately, cores with adjacent numbers are not neighbors. */
static void nodes_that_alternate_are_told_apart(void **state)
{
    (void)state;
    struct bind_cpu cpus[] = {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 0, 0, 2}, {3, 1, 1, 3}};
    expect_shares(cpus, 4, BIND_SLICE, 2, "0+2 1+3");
}

/* wanted: as in expect_shares(), for workers whose GPUs are in those nodes. */
static void expect_turned(int workers, const int *nodes, const char *wanted)
{
    struct bind_cpu cpus[64];
    cpu_set_t masks[WORKERS_MAX];
    char text[512] = "", mask[64];
    const int count = machine_make(4, 2, 1, cpus);
    assert_true(bind_cut(cpus, count, BIND_SLICE, workers, masks));
    bind_turn(cpus, count, workers, nodes, masks);
    for (int w = 0; w < workers; w++) {
        bind_mask_print(&masks[w], mask, sizeof mask);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", w ? " " : "", mask);
    }
    assert_string_equal(text, wanted);
}

/* Four nodes of two cores. A DGX A100 has its first GPUs in the last node but one. */
static void shares_are_near_the_workers_gpus(void **state)
{
    (void)state;
    expect_turned(8, (const int[]){3, 3, 1, 1, 2, 2, 0, 0}, "6 7 2 3 4 5 0 1");
    expect_turned(8, (const int[]){0, 0, 1, 1, 2, 2, 3, 3}, "0 1 2 3 4 5 6 7");
    expect_turned(4, (const int[]){3, 2, 1, 0}, "6-7 4-5 2-3 0-1");
    expect_turned(4, (const int[]){1, 1, 1, 1}, "2-3 0-1 4-5 6-7"); /* the others get the remaining shares */
    expect_turned(4, (const int[]){-1, 9, 0, -1}, "2-3 4-5 0-1 6-7");
}

static void long_masks_are_cut(void **state)
{
    (void)state;
    cpu_set_t mask;
    char text[16];
    CPU_ZERO(&mask);
    for (size_t id = 100; id < 200; id += 2)
        CPU_SET(id, &mask);
    bind_mask_print(&mask, text, sizeof text);
    assert_string_equal(text, "100+102+104...");
    CPU_ZERO(&mask);
    bind_mask_print(&mask, text, sizeof text);
    assert_string_equal(text, "");
}

static void file_write(const char *folder, const char *name, const char *text)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* CPU 3 is the second thread of CPU 1, in node 1; sysfs has no data on CPU 2. */
static void machine_is_read_from_sys(void **state)
{
    (void)state;
    char root[] = "/tmp/shoal-bind-XXXXXX", folder[200], command[300];
    struct bind_cpu cpus[CPU_SETSIZE];
    cpu_set_t mask;
    assert_non_null(mkdtemp(root));
    for (int id = 1; id <= 3; id += 2) {
        snprintf(command, sizeof command, "mkdir -p %s/devices/system/cpu/cpu%d/topology %s/devices/system/cpu/cpu%d/node1",
                 root, id, root, id);
        assert_int_equal(system(command), 0);
        snprintf(folder, sizeof folder, "%s/devices/system/cpu/cpu%d/topology", root, id);
        file_write(folder, "physical_package_id", "1\n");
        file_write(folder, "thread_siblings_list", "1,3\n");
    }
    CPU_ZERO(&mask);
    CPU_SET(2, &mask);
    CPU_SET(3, &mask);
    assert_int_equal(bind_machine_read(root, &mask, cpus), 2);
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
    assert_memory_equal(&cpus[0], (&(struct bind_cpu){2, 0, 0, 2}), sizeof cpus[0]);
    assert_memory_equal(&cpus[1], (&(struct bind_cpu){3, 1, 1, 1}), sizeof cpus[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_follow_nodes_and_physical_cores),
        cmocka_unit_test(threads_are_parted_only_where_cores_do_not_suffice),
        cmocka_unit_test(uneven_shares_differ_by_one),
        cmocka_unit_test(more_workers_than_cores_are_not_bound),
        cmocka_unit_test(holes_in_the_mask_are_left_out),
        cmocka_unit_test(nodes_that_alternate_are_told_apart),
        cmocka_unit_test(shares_are_near_the_workers_gpus),
        cmocka_unit_test(long_masks_are_cut),
        cmocka_unit_test(machine_is_read_from_sys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
