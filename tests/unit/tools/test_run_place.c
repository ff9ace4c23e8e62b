/* Which host of the job `shoal run` takes this host for, from tables of options and environments. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "../../../tools/run/run_place.h"

/* A variable is "NAME=value"; the list ends with NULL. */
struct place_case {
    const char *variables[14];
    int hosts, index, workers; /* options; index is one more than the option, so that 0 is none */
    const char *meet;
    const char *expected; /* "HOSTS INDEX WORKERS MEET PORT", or words of the error */
};

static const char *variable_of(void *arg, const char *name)
{
    const struct place_case *one = arg;
    const size_t bytes = strlen(name);
    for (size_t i = 0; one->variables[i]; i++)
        if (strncmp(one->variables[i], name, bytes) == 0 && one->variables[i][bytes] == '=')
            return one->variables[i] + bytes + 1;
    return NULL;
}

static void check_one(const struct place_case *one, bool is_found_expected)
{
    struct run_place place;
    char text[RUN_PLACE_ERROR_MAX], error[RUN_PLACE_ERROR_MAX] = "";
    struct place_case copy = *one;
    const struct run_place_options options = {one->hosts, one->index - 1, one->workers, one->meet};
    const bool is_found = run_place_find(&options, variable_of, &copy, &place, error);
    if (is_found != is_found_expected)
        fail_msg("expected \"%s\", found: %s", one->expected, is_found ? "a place" : error);
    if (is_found) {
        snprintf(text, sizeof text, "%d %d %d %s %d", place.hosts, place.index, place.workers, place.meet, place.port);
        assert_string_equal(text, one->expected);
    } else if (!strstr(error, one->expected)) {
        fail_msg("expected \"%s\" in: %s", one->expected, error);
    }
}

#define CHECK_ALL(cases, is_found)                                  \
    for (size_t i = 0; i < sizeof(cases) / sizeof((cases)[0]); i++) \
    check_one(&(cases)[i], is_found)

#define PET(hosts, rank, workers)                                                                                  \
    "PET_NNODES=" hosts, "PET_NODE_RANK=" rank, "PET_NPROC_PER_NODE=" workers, "PET_MASTER_ADDR=job-node-0-0.job", \
        "PET_MASTER_PORT=29511"
#define SLURM(hosts, tasks, node)                                                                             \
    "SLURM_STEP_NUM_NODES=" hosts, "SLURM_STEP_NUM_TASKS=" tasks, "SLURM_NODEID=" node, "SLURM_PROCID=" node, \
        "SLURM_STEP_NODELIST=n[07-09,12]-a,gpu1", "SLURM_JOB_ID=3", "SLURM_STEP_ID=1"
#define OMPI(size, rank, local) "OMPI_COMM_WORLD_SIZE=" size, "OMPI_COMM_WORLD_RANK=" rank, "OMPI_COMM_WORLD_LOCAL_SIZE=" local
#define MPICH(size, rank, local) "PMI_SIZE=" size, "PMI_RANK=" rank, "MPI_LOCALNRANKS=" local
#define SM(hosts, own) "SM_HOSTS=" hosts, "SM_CURRENT_HOST=" own
#define DSTACK(hosts, rank, gpus) \
    "DSTACK_NODES_NUM=" hosts, "DSTACK_NODE_RANK=" rank, "DSTACK_GPUS_PER_NODE=" gpus, "DSTACK_MASTER_NODE_IP=10.0.0.1"

static void environments_say_all(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {.expected = "1 0 0  0"},
        {.workers = 3, .expected = "1 0 3  0"},
        {{"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=h1", "MASTER_PORT=5"}, .expected = "1 0 0  0"},
        {{PET("2", "1", "4")}, .expected = "2 1 4 job-node-0-0.job 29511"},
        {{PET("2", "1", "4")}, .workers = 8, .expected = "2 1 8 job-node-0-0.job 29511"},
        {{PET("2", "1", "auto")}, .workers = 8, .expected = "2 1 8 job-node-0-0.job 29511"},
        {{PET("1", "0", "4")}, .expected = "1 0 4  0"},
        {{"PET_NNODES=1", "PET_NPROC_PER_NODE=4"}, .expected = "1 0 4  0"},
        {{"PET_NNODES=2", "PET_NODE_RANK=0", "PET_MASTER_ADDR=h"}, .workers = 1, .expected = "2 0 1 h 29500"},
        {{SLURM("5", "5", "4")}, .workers = 2, .expected = "5 4 2 n07-a 21598"},
        {{SLURM("1", "1", "0")}, .expected = "1 0 0  0"},
        /* a batch script, in which only srun starts a step */
        {{"SLURM_PROCID=0", "SLURM_NNODES=2", "SLURM_NODEID=0", "SLURM_JOB_ID=3"}, .expected = "1 0 0  0"},
        {{OMPI("2", "1", "1"), "MASTER_ADDR=h1", "MASTER_PORT=4000"}, .workers = 2, .expected = "2 1 2 h1 4000"},
        {{OMPI("2", "1", "1")}, .workers = 2, .meet = "h2:4001", .expected = "2 1 2 h2 4001"},
        {{OMPI("1", "0", "1")}, .expected = "1 0 0  0"},
        {{MPICH("3", "2", "1")}, .workers = 2, .meet = "h2:4001", .expected = "3 2 2 h2 4001"},
        /* PMI-1 of srun: Slurm's variables contain more */
        {{"PMI_SIZE=2", "PMI_RANK=0", SLURM("2", "2", "0")}, .workers = 1, .expected = "2 0 1 n07-a 21598"},
        {{SM("[\"algo-1\",\"algo-2\"]", "algo-2")}, .workers = 2, .expected = "2 1 2 algo-1 7777"},
        {{SM("[\"algo-1\", \"algo-2\"]", "algo-1"), "SM_MASTER_ADDR=algo-9", "SM_MASTER_PORT=7000"},
         .workers = 2,
         .expected = "2 0 2 algo-9 7000"},
        {{SM("[\"algo-1\"]", "algo-1")}, .expected = "1 0 0  0"},
        {{DSTACK("2", "1", "8")}, .expected = "2 1 8 10.0.0.1 29500"},
        {{DSTACK("2", "1", "0"), "MASTER_PORT=12345"}, .workers = 3, .expected = "2 1 3 10.0.0.1 12345"},
    };
    CHECK_ALL(cases, true);
}

static void options_come_first(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {.hosts = 2, .index = 2, .workers = 4, .meet = "node1:29500", .expected = "2 1 4 node1 29500"},
        {.hosts = 2, .index = 1, .workers = 4, .meet = "[fd77::1]:29500", .expected = "2 0 4 fd77::1 29500"},
        {{"MASTER_ADDR=h1"}, .hosts = 2, .index = 1, .workers = 4, .expected = "2 0 4 h1 29500"},
        {.hosts = 1, .expected = "1 0 0  0"},
        {.hosts = 1, .index = 1, .workers = 2, .expected = "1 0 2  0"},
        {{PET("2", "1", "4")}, .hosts = 3, .index = 3, .workers = 1, .meet = "h:1", .expected = "3 2 1 h 1"},
        {{PET("2", "1", "4")}, .hosts = 2, .expected = "2 1 4 job-node-0-0.job 29511"},
        {{PET("2", "1", "4")}, .index = 1, .expected = "2 0 4 job-node-0-0.job 29511"},
        {{SLURM("2", "8", "1")}, .hosts = 1, .workers = 2, .expected = "1 0 2  0"},
        {{OMPI("4", "1", "2")}, .hosts = 1, .workers = 2, .expected = "1 0 2  0"},
    };
    CHECK_ALL(cases, true);
}

static void sources_that_agree_are_joined(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {{OMPI("2", "1", "1"), PET("2", "1", "4")}, .expected = "2 1 4 job-node-0-0.job 29511"},
        /* under mpirun, a rank on another host sees the first host's SM_CURRENT_HOST */
        {{OMPI("2", "1", "1"), SM("[\"algo-1\",\"algo-2\"]", "algo-1")}, .workers = 2, .expected = "2 1 2 algo-1 7777"},
        /* mpirun inside an allocation starts its daemons by srun, fewer than there are hosts */
        {{OMPI("2", "1", "1"), SLURM("1", "1", "0")}, .workers = 2, .meet = "h:5", .expected = "2 1 2 h 5"},
    };
    CHECK_ALL(cases, true);
}

static void mistakes_name_the_variable(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {{"PET_NNODES=1:4", "PET_NODE_RANK=0"}, .expected = "PET_NNODES is '1:4', but must be one number"},
        {{"PET_NNODES=two"}, .expected = "PET_NNODES is 'two', but must be a whole number from 1 to 4096"},
        {{"PET_NNODES=0"}, .expected = "PET_NNODES is '0'"},
        {{"PET_NNODES=2"}, .expected = "PET_NNODES is set, but PET_NODE_RANK is not"},
        {{PET("2", "2", "4")}, .expected = "PET_NODE_RANK is 2, but with PET_NNODES 2 it may be 0 to 1"},
        {{PET("2", "-1", "4")}, .expected = "PET_NODE_RANK is '-1'"},
        {{PET("2", "1", "0")}, .expected = "PET_NPROC_PER_NODE is '0'"},
        {{PET("2", "1", "auto")}, .expected = "nothing says how many workers each of the 2 hosts starts; say -n N"},
        {{PET("4096", "1", "2")}, .expected = "4096 hosts, this one with 2 workers, are more than 4096 ranks"},
        {{"PET_NNODES=2", "PET_NODE_RANK=0", "PET_MASTER_ADDR=h", "PET_MASTER_PORT=65536"},
         .expected = "PET_MASTER_PORT is '65536'"},
        {{"PET_NNODES=2", "PET_NODE_RANK=0"},
         .workers = 1,
         .expected = "nothing says where 2 hosts meet; say --meet HOST:PORT"},
        {{OMPI("2", "1", "1")}, .workers = 1, .expected = "nothing says where 2 hosts meet"},
        {{OMPI("4", "1", "2")}, .workers = 1, .expected = "OMPI_COMM_WORLD_LOCAL_SIZE is 2: mpirun has started this number"},
        {{"OMPI_COMM_WORLD_RANK=1"}, .expected = "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not"},
        {{MPICH("4", "4", "1")}, .workers = 1, .expected = "PMI_RANK is 4, but with PMI_SIZE 4 it may be 0 to 3"},
        {{MPICH("4", "3", "4")}, .workers = 1, .expected = "MPI_LOCALNRANKS is 4"},
        {{SLURM("2", "8", "1")}, .workers = 1, .expected = "SLURM_STEP_NUM_TASKS is 8 on 2 hosts"},
        {{SLURM("2", "2", "2")}, .workers = 1, .expected = "SLURM_NODEID is 2"},
        {{"SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID=0"}, .expected = "SLURM_STEP_NUM_NODES is not"},
        {{"SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_NODEID=0", "SLURM_STEP_NODELIST=,"},
         .workers = 1,
         .expected = "SLURM_STEP_NODELIST is ','"},
        {{SM("algo-1", "algo-1")}, .expected = "SM_HOSTS is 'algo-1', but must be a list"},
        {{SM("[\"algo-1\", 7]", "algo-1")}, .expected = "SM_HOSTS is '[\"algo-1\", 7]', but must be a list"},
        {{SM("[\"algo-1\",\"algo-2\"]", "algo-12")}, .expected = "SM_CURRENT_HOST is 'algo-12', which is none of SM_HOSTS"},
        {{"SM_HOSTS=[\"algo-1\",\"algo-2\"]"}, .expected = "SM_CURRENT_HOST is '', which is none of SM_HOSTS"},
        {{SM("[\"a\",\"b\"]", "b"), "SM_MASTER_PORT=x"}, .workers = 1, .expected = "SM_MASTER_PORT is 'x'"},
        {{DSTACK("2", "2", "8")}, .expected = "DSTACK_NODE_RANK is 2"},
        {{DSTACK("2", "1", "many")}, .expected = "DSTACK_GPUS_PER_NODE is 'many'"},
        {{DSTACK("2", "1", "2"), "MASTER_PORT=0"}, .expected = "MASTER_PORT is '0'"},
    };
    CHECK_ALL(cases, false);
}

static void conflicts_name_both(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {{SLURM("2", "2", "1"), PET("3", "1", "4")},
         .expected = "SLURM_STEP_NUM_NODES counts 2 hosts, but PET_NNODES counts 3"},
        {{SLURM("2", "2", "1"), "PET_NNODES=2", "PET_NODE_RANK=0"},
         .expected = "SLURM_NODEID makes this host 1, PET_NODE_RANK makes it 0; say which with --host-index"},
        {{SLURM("2", "2", "1"), SM("[\"a\",\"b\"]", "a")},
         .expected = "SLURM_NODEID makes this host 1, SM_CURRENT_HOST makes it 0"},
        {{OMPI("1", "0", "1"), DSTACK("2", "0", "4")},
         .expected = "OMPI_COMM_WORLD_SIZE counts 1 host, but DSTACK_NODES_NUM counts 2"},
        {{PET("2", "1", "4")}, .hosts = 3, .expected = "--hosts is 3, but PET_NNODES counts 2"},
    };
    CHECK_ALL(cases, false);
}

static void wrong_options(void **state)
{
    (void)state;
    static const struct place_case cases[] = {
        {.hosts = 2,
         .workers = 1,
         .meet = "h:1",
         .expected = "--hosts is 2, and nothing says which of them this is; say --host-index"},
        {.hosts = 2,
         .index = 3,
         .workers = 1,
         .meet = "h:1",
         .expected = "--host-index is 2, but with 2 hosts it may be 0 to 1"},
        {.hosts = 1, .index = 2, .expected = "--host-index is 1, but with 1 host it may be 0 to 0"},
        {.index = 1, .expected = "--host-index is for several hosts"},
        {.meet = "h:1", .expected = "--meet is for several hosts"},
        {.hosts = 2, .index = 1, .workers = 1, .expected = "nothing says where 2 hosts meet"},
        {.hosts = 2, .index = 1, .meet = "h:1", .expected = "say -n N"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "h", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = ":1", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "h:", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "h:0", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "h:65536", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "fd77::1:29500", .expected = "--meet takes HOST:PORT"},
        {.hosts = 2, .index = 1, .workers = 1, .meet = "[]:1", .expected = "--meet takes HOST:PORT"},
    };
    CHECK_ALL(cases, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(environments_say_all),          cmocka_unit_test(options_come_first),
        cmocka_unit_test(sources_that_agree_are_joined), cmocka_unit_test(mistakes_name_the_variable),
        cmocka_unit_test(conflicts_name_both),           cmocka_unit_test(wrong_options),
    };
    return cmocka_run_group_tests_name("run_place", tests, NULL, NULL);
}
