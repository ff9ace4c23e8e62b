/* The library's answers about itself: structs that were not initialized, invalid questions, tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory_store.h"
#include "plan/plan.h"

#define TEXT_BYTES 65536

/* ---- Structs to be filled ------------------------------------------------------------------------------------------------ */

struct alone {
    struct memory_store store;
    struct shoal_context *context;
    struct shoal_comm *comm;
    char logged[2048];
};

static void keep_line(void *arg, int level, const char *line)
{
    struct alone *alone = arg;
    const size_t used = strlen(alone->logged);
    (void)level;
    snprintf(alone->logged + used, sizeof alone->logged - used, "%s\n", line);
}

static int set_up(void **state)
{
    struct alone *alone = calloc(1, sizeof *alone);
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    memory_store_init(&alone->store);
    const struct shoal_store store = memory_store_callbacks(&alone->store);
    options.log = keep_line;
    options.log_arg = alone;
    *state = alone;
    return shoal_context_create(&options, &alone->context) ||
           shoal_comm_create_with(alone->context, &store, 0, 1, NULL, &alone->comm);
}

static int tear_down(void **state)
{
    struct alone *alone = *state;
    shoal_comm_free(alone->comm);
    shoal_context_destroy(alone->context);
    memory_store_fini(&alone->store);
    free(alone);
    return 0;
}

static void assert_told(struct alone *alone, enum shoal_status status, const char *call, const char *init)
{
    assert_int_equal(status, SHOAL_ERR_ARGUMENT);
    if (!strstr(alone->logged, call) || !strstr(alone->logged, init))
        fail_msg("\"%s\" names not %s and %s", alone->logged, call, init);
    assert_ptr_equal(strchr(alone->logged, '\n'), strrchr(alone->logged, '\n'));
    alone->logged[0] = 0;
}

static void describe_tells_of_structs_that_were_not_begun(void **state)
{
    struct alone *alone = *state;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct shoal_operation operation = SHOAL_OPERATION_INIT;
    struct shoal_memory_usage usage = SHOAL_MEMORY_USAGE_INIT;
    failure.struct_bytes = operation.struct_bytes = usage.struct_bytes = 0;
    assert_told(alone, shoal_last_failure(NULL, alone->comm, &failure), "shoal_last_failure", "SHOAL_FAILURE_INIT");
    assert_told(alone, shoal_last_failure(alone->context, NULL, NULL), "shoal_last_failure", "SHOAL_FAILURE_INIT");
    assert_told(alone, shoal_last_operation(alone->comm, &operation), "shoal_last_operation", "SHOAL_OPERATION_INIT");
    assert_told(alone, shoal_comm_memory(alone->comm, &usage), "shoal_comm_memory", "SHOAL_MEMORY_USAGE_INIT");
}

static void describe_fills_structs_that_were_begun(void **state)
{
    struct alone *alone = *state;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct shoal_operation operation = SHOAL_OPERATION_INIT;
    struct shoal_memory_usage usage = SHOAL_MEMORY_USAGE_INIT;
    float x = 1;
    assert_int_equal(shoal_allreduce(alone->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL), SHOAL_OK);
    assert_int_equal(shoal_last_operation(alone->comm, &operation), SHOAL_OK);
    assert_int_equal(operation.struct_bytes, sizeof operation);
    assert_non_null(operation.algorithm);
    assert_int_equal(shoal_comm_memory(alone->comm, &usage), SHOAL_OK);
    assert_true(usage.local_bytes > 0);
    assert_int_equal(shoal_last_failure(alone->context, alone->comm, &failure), SHOAL_PENDING);
    assert_string_equal(alone->logged, "");
}

/* An invalid request for the last failure does not replace the last failure. */
static void describe_keeps_the_last_failure(void **state)
{
    struct alone *alone = *state;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    assert_int_equal(shoal_mem_free(alone->context, &failure), SHOAL_ERR_ARGUMENT);
    failure.struct_bytes = 0;
    assert_int_equal(shoal_last_failure(alone->context, NULL, &failure), SHOAL_ERR_ARGUMENT);
    failure.struct_bytes = sizeof failure;
    assert_int_equal(shoal_last_failure(alone->context, NULL, &failure), SHOAL_OK);
    assert_null(strstr(failure.text, "struct_bytes"));
}

/* ---- Questions ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status ask(const struct shoal_question *question, char text[TEXT_BYTES])
{
    FILE *out = fmemopen(text, TEXT_BYTES, "w");
    assert_non_null(out);
    const enum shoal_status status = shoal_explain(question, out);
    fclose(out);
    return status;
}

static void assert_refused(const struct shoal_question *question, const char *wanted)
{
    static char text[TEXT_BYTES];
    assert_int_equal(ask(question, text), SHOAL_ERR_ARGUMENT);
    assert_string_equal(text, wanted);
}

static void describe_refuses_with_one_line(void **state)
{
    const struct shoal_question begun = SHOAL_QUESTION_INIT;
    struct shoal_question question = begun;
    (void)state;
    assert_refused(NULL, "the question is NULL, or its struct_bytes is not set: use SHOAL_QUESTION_INIT\n");
    question.struct_bytes = 0;
    assert_refused(&question, "the question is NULL, or its struct_bytes is not set: use SHOAL_QUESTION_INIT\n");
    question = begun;
    assert_refused(&question, "there is no collective \"\"; there are all-reduce, reduce, reduce-scatter, broadcast, "
                              "all-gather, gather, scatter, all-to-all, barrier\n");
    question.collective = "reduce-scatter";
    question.ranks = 3;
    question.bytes = 8;
    assert_refused(&question, "bytes is 8, less than one element for each of 3 ranks\n");
    question.bytes = 1;
    assert_refused(&question, "bytes is 1, which is not a whole number of elements\n");
    assert_int_equal(shoal_explain(&question, NULL), SHOAL_ERR_ARGUMENT);
}

/* A program that was built before the last field existed passes a shorter struct: the bytes after it are not read. */
static void describe_takes_questions_of_before(void **state)
{
    static char text[TEXT_BYTES];
    struct shoal_question question = SHOAL_QUESTION_INIT;
    (void)state;
    question.collective = "broadcast";
    question.struct_bytes = offsetof(struct shoal_question, hosts);
    question.hosts = 77;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(strstr(text, "over 2 ranks on one host\n"));
    question.struct_bytes = offsetof(struct shoal_question, on_gpus);
    question.hosts = 2;
    question.on_gpus = 1;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(strstr(text, "over 2 ranks on 2 hosts\n"));
    assert_null(strstr(text, "GPUs"));
    question.struct_bytes = offsetof(struct shoal_question, hosts);
    question.struct_bytes--;
    assert_refused(&question, "the question is NULL, or its struct_bytes is not set: use SHOAL_QUESTION_INIT\n");
}

/* Sums of a host borrow operands on GPUs. For other collectives they are like ordinary memory. */
static void describe_names_the_gpus_of_operands(void **state)
{
    static char plain[TEXT_BYTES], text[TEXT_BYTES];
    struct shoal_question question = SHOAL_QUESTION_INIT;
    (void)state;
    question.collective = "allgather";
    question.ranks = 4;
    assert_int_equal(ask(&question, plain), SHOAL_OK);
    question.on_gpus = 1;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_int_equal(strncmp(text, plain, strlen(plain)), 0);
    assert_non_null(strstr(text + strlen(plain), "\noperands on GPUs: their copy engines"));
    assert_non_null(strstr(text + strlen(plain), "\nGPUs    "));
    question.collective = "allreduce";
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(strstr(text, "\nalgorithm owners-lent, "));
    assert_non_null(strstr(text, "\noperands: sums read and write the rings through which operands on GPUs pass\n"));
    assert_non_null(strstr(text, "\nwait to lend in, out: "));
    assert_non_null(strstr(text, "  0  wait    to lend in, out\n"));
    assert_non_null(strstr(text, "\noperands on GPUs: their copy engines"));
    question.shared_output = 1;
    assert_refused(&question, "operands are in memory of GPUs or in memory from shoal_mem_alloc, but not in both\n");
}

/* With one rank on each host the plan of an all-gather only sends its input. With two ranks the input is copied for the
 * neighbor. */
static void describe_tells_inputs_that_stay_on_the_gpu(void **state)
{
    static char text[TEXT_BYTES];
    struct shoal_question question = SHOAL_QUESTION_INIT;
    (void)state;
    question.collective = "allgather";
    question.ranks = 2;
    question.hosts = 2;
    question.bytes = 2 << 20;
    question.on_gpus = 1;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(
        strstr(text, "inputs of 2 ranks, 1048576 bytes each, would, with SHOAL_GPUDIRECT_BYTES, stay on their GPUs"));
    setenv("SHOAL_GPUDIRECT_BYTES", "1M", 1);
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(strstr(text, "inputs of 2 ranks, 1048576 bytes each, stay on their GPUs"));
    question.ranks = 4;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_null(strstr(text, "on their GPUs"));
    unsetenv("SHOAL_GPUDIRECT_BYTES");
}

static void describe_plans_over_hosts(void **state)
{
    static char text[TEXT_BYTES];
    struct shoal_question question = SHOAL_QUESTION_INIT;
    (void)state;
    question.collective = "broadcast";
    question.hosts = 2;
    assert_int_equal(ask(&question, text), SHOAL_OK);
    assert_non_null(strstr(text, "over 2 ranks on 2 hosts\nalgorithm mesh, because"));
    assert_non_null(strstr(text, "  0  wait    1 #1\n  1  put     in[0] 0/1 -> stg[1].2 0/1@0\n"));
    question.hosts = 3;
    assert_refused(&question, "hosts is 3, but may be 1 to the number of ranks, 2\n");
    question.hosts = 0;
    assert_refused(&question, "hosts is 0, but may be 1 to the number of ranks, 2\n");
    question.hosts = SIZE_MAX;
    assert_refused(&question, "hosts is 18446744073709551615, but may be 1 to the number of ranks, 2\n");
    question.hosts = 64;
    question.ranks = SHOAL_PLAN_RANKS_MAX + 1;
    assert_refused(&question, "ranks is 4097, but may be 1 to 4096\n");
}

static void describe_counts_no_dashes(void **state)
{
    static const char *const names[] = {"reduce-scatter", "reducescatter", "all-to-all", "alltoall", "allto-all"};
    static char text[TEXT_BYTES];
    struct shoal_question question = SHOAL_QUESTION_INIT;
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        question.collective = names[i];
        assert_int_equal(ask(&question, text), SHOAL_OK);
        assert_ptr_equal(strstr(text, *names[i] == 'r' ? "reduce-scatter of 1048576 bytes" : "all-to-all of 1048576 bytes"),
                         text);
    }
}

/* ---- Tables -------------------------------------------------------------------------------------------------------------- */

static void describe_tables_with_a_wrong_variable(void **state)
{
    static char text[TEXT_BYTES];
    FILE *out = fmemopen(text, sizeof text, "w");
    (void)state;
    assert_non_null(out);
    setenv("SHOAL_DEPTH", "99", 1);
    assert_int_equal(shoal_print_settings(NULL, out), SHOAL_ERR_ARGUMENT);
    fflush(out);
    assert_string_equal(text, "SHOAL_DEPTH is 99, but may be 1 to 16\n");
    assert_int_equal(shoal_print_algorithms(out), SHOAL_ERR_ARGUMENT);
    unsetenv("SHOAL_DEPTH");
    fflush(out);
    assert_non_null(strstr(text, "at-root"));
    assert_string_equal(text + strlen(text) - 38, "SHOAL_DEPTH is 99, but may be 1 to 16\n");
    assert_int_equal(shoal_print_settings(NULL, out), SHOAL_OK);
    assert_int_equal(shoal_print_algorithms(out), SHOAL_OK);
    fclose(out);
}

/* ---- Diagnosis ----------------------------------------------------------------------------------------------------------- */

struct diagnosed {
    int findings, errors;
    bool has_cores;
};

static void count_finding(void *arg, enum shoal_finding_level level, const char *subject, const char *found, const char *advice)
{
    struct diagnosed *diagnosed = arg;
    assert_true(*found);
    assert_true(level < SHOAL_FINDING_WARNING || *advice);
    diagnosed->findings++;
    diagnosed->errors += level == SHOAL_FINDING_ERROR;
    diagnosed->has_cores |= !strcmp(subject, "cores") && level == SHOAL_FINDING_WARNING && strstr(found, "4096 ranks");
}

static void describe_diagnosis_tells_findings(void **state)
{
    (void)state;
    struct shoal_diagnosis_options options = SHOAL_DIAGNOSIS_OPTIONS_INIT;
    struct diagnosed diagnosed = {0};
    options.ranks = SHOAL_RANKS_MAX;
    options.towards = "127.0.0.1";
    const enum shoal_status status = shoal_diagnose(&options, count_finding, &diagnosed);
    assert_int_equal(status, diagnosed.errors ? SHOAL_ERR_UNSUPPORTED : SHOAL_OK);
    assert_true(diagnosed.has_cores);
}

static void describe_diagnosis_refuses_what_makes_no_sense(void **state)
{
    (void)state;
    struct shoal_diagnosis_options options = SHOAL_DIAGNOSIS_OPTIONS_INIT;
    struct diagnosed diagnosed = {0};
    assert_int_equal(shoal_diagnose(&options, NULL, NULL), SHOAL_ERR_ARGUMENT);
    options.ranks = -1;
    assert_int_equal(shoal_diagnose(&options, count_finding, &diagnosed), SHOAL_ERR_ARGUMENT);
    options.ranks = SHOAL_RANKS_MAX + 1;
    assert_int_equal(shoal_diagnose(&options, count_finding, &diagnosed), SHOAL_ERR_ARGUMENT);
    options = (struct shoal_diagnosis_options){.struct_bytes = 0};
    assert_int_equal(shoal_diagnose(&options, count_finding, &diagnosed), SHOAL_ERR_ARGUMENT);
    assert_int_equal(diagnosed.findings, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(describe_tells_of_structs_that_were_not_begun, set_up, tear_down),
        cmocka_unit_test_setup_teardown(describe_fills_structs_that_were_begun, set_up, tear_down),
        cmocka_unit_test_setup_teardown(describe_keeps_the_last_failure, set_up, tear_down),
        cmocka_unit_test(describe_refuses_with_one_line),
        cmocka_unit_test(describe_takes_questions_of_before),
        cmocka_unit_test(describe_names_the_gpus_of_operands),
        cmocka_unit_test(describe_tells_inputs_that_stay_on_the_gpu),
        cmocka_unit_test(describe_plans_over_hosts),
        cmocka_unit_test(describe_counts_no_dashes),
        cmocka_unit_test(describe_diagnosis_tells_findings),
        cmocka_unit_test(describe_diagnosis_refuses_what_makes_no_sense),
        cmocka_unit_test(describe_tables_with_a_wrong_variable),
    };
    return cmocka_run_group_tests_name("describe", tests, NULL, NULL);
}
