#include "sim_step_cost.h"

#include <stdlib.h>
#include <string.h>

#include "sim_progress.h"
#include "tool.h"

int sim_step_memory_fail(void)
{
    fputs("shoal sim: no memory\n", stderr);
    return 1;
}

int sim_step_status_fail(enum shoal_status status, const char *reason)
{
    const size_t length = strcspn(reason, "\n");
    fprintf(stderr, "shoal sim: %.*s\n", *reason ? (int)length : (int)strlen(shoal_status_text(status)),
            *reason ? reason : shoal_status_text(status));
    return status == SHOAL_ERR_ARGUMENT ? TOOL_EXIT_USAGE : 1;
}

/* ---- Teams --------------------------------------------------------------------------------------------------------------- */

size_t sim_step_degree(const struct sim_step_options *options, size_t hosts)
{
    const size_t local = options->question.ranks_per_host;
    const int degree = options->optimizing.degree;
    if (!options->optimizing.is_sharded)
        return 1;
    return degree == SHOAL_DEGREE_HOST ? local : degree ? (size_t)degree : hosts * local;
}

/* Teams of consecutive ranks are either parts of a host, or whole hosts. */
bool sim_step_operations_find(const struct sim_step_options *options, size_t hosts,
                              struct sim_step_operation operations_out[STEP_WAYS])
{
    const size_t local = options->question.ranks_per_host, ranks = hosts * local, degree = sim_step_degree(options, hosts);
    memset(operations_out, 0, STEP_WAYS * sizeof *operations_out);
    operations_out[STEP_WAY_SUM] = (struct sim_step_operation){"allreduce", hosts, local, 1, 1};
    if (!options->optimizing.is_sharded)
        return true;
    if (ranks % degree)
        return !tool_usage_fail("sim step", "--shard %zu does not divide the %zu ranks of %zu host%s", degree, ranks, hosts,
                                hosts == 1 ? "" : "s");
    if (degree % local && local % degree)
        return !tool_usage_fail(
            "sim step", "--shard %zu takes parts of several hosts of %zu ranks: whole hosts, or parts of one", degree, local);
    const size_t team_hosts = degree > local ? degree / local : 1, team_local = degree > local ? local : degree;
    operations_out[STEP_WAY_SUM] = (struct sim_step_operation){"reducescatter", team_hosts, team_local, 1, 1};
    operations_out[STEP_WAY_GATHER] = (struct sim_step_operation){"allgather", team_hosts, team_local, 1, 1};
    if (degree < ranks)
        operations_out[STEP_WAY_ACROSS] =
            (struct sim_step_operation){"allreduce", hosts / team_hosts, local / team_local, team_local, degree};
    return true;
}

/* ---- Asking -------------------------------------------------------------------------------------------------------------- */

struct sim_step_answer {
    struct sim_step_operation operation;
    size_t bytes;
    struct shoal_simulated simulated;
};

void sim_step_answers_free(struct sim_step_answers *answers)
{
    free(answers->at);
}

static bool answer_keep(struct sim_step_answers *answers, const struct sim_step_answer *answer)
{
    if (answers->count == answers->capacity) {
        const size_t capacity = answers->capacity ? 2 * answers->capacity : 64;
        struct sim_step_answer *larger = reallocarray(answers->at, capacity, sizeof *larger);
        if (!larger)
            return false;
        answers->at = larger;
        answers->capacity = capacity;
    }
    answers->at[answers->count++] = *answer;
    return true;
}

static bool is_same(const struct sim_step_operation *a, const struct sim_step_operation *b)
{
    return !strcmp(a->collective, b->collective) && a->hosts == b->hosts && a->ranks_per_host == b->ranks_per_host &&
           a->sharing == b->sharing;
}

/* The communicators that share an adapter get equal parts of its rate and of its bucket, and those of a host's ranks a part of
 * its cores. If hosts share one machine, an operation has all of its cores: that others use them meanwhile is left out. */
static struct shoal_simulation question_of(const struct sim_step_options *options, const struct sim_step_operation *operation,
                                           size_t bytes)
{
    struct shoal_simulation question = options->question;
    question.collective = operation->collective;
    question.hosts = operation->hosts;
    question.ranks_per_host = operation->ranks_per_host;
    question.bytes = bytes;
    question.rate_gbit_s /= (double)operation->sharing;
    question.burst_gbit_s /= (double)operation->sharing;
    question.burst_bytes /= operation->sharing;
    if (question.cores && !question.one_machine)
        question.cores = (question.cores * operation->ranks_per_host + options->question.ranks_per_host - 1) /
                         options->question.ranks_per_host;
    return question;
}

static int simulate(const struct sim_step_options *options, const char *name, const struct sim_step_operation *operation,
                    size_t bytes, struct shoal_simulated *answer_out)
{
    struct sim_progress progress;
    char text[96], size[24], reason[1024] = "";
    const struct shoal_simulation question = question_of(options, operation, bytes);
    FILE *out = fmemopen(reason, sizeof reason, "w");
    *answer_out = (struct shoal_simulated)SHOAL_SIMULATED_INIT;
    snprintf(text, sizeof text, "%.32s on %zu host%s, %s", name, question.hosts, question.hosts == 1 ? "" : "s",
             sim_size_print((double)bytes, size));
    sim_progress_start(&progress, text);
    const enum shoal_status status = shoal_simulate(&question, out, answer_out);
    sim_progress_stop(&progress);
    if (out)
        fclose(out);
    return status ? sim_step_status_fail(status, reason) : 0;
}

static int ask(struct sim_step_answers *answers, const struct sim_step_options *options, const char *name,
               const struct sim_step_operation *operation, size_t bytes, struct shoal_simulated *answer_out)
{
    struct sim_step_answer answer = {.operation = *operation, .bytes = bytes};
    for (size_t i = 0; i < answers->count; i++) {
        const struct sim_step_answer *known = &answers->at[i];
        if (known->bytes == bytes && is_same(&known->operation, operation)) {
            *answer_out = known->simulated;
            return 0;
        }
    }
    const int code = simulate(options, name, operation, bytes, &answer.simulated);
    if (code)
        return code;
    *answer_out = answer.simulated;
    return answer_keep(answers, &answer) ? 0 : sim_step_memory_fail();
}

/* Returns the size beyond which time grows linearly, rounded up so that all ranks own equal parts. */
static size_t even_bytes(const struct sim_step_operation *operation)
{
    enum { EVEN_BYTES = 16 << 20, PART_BYTES = 64 };
    const size_t unit = PART_BYTES * operation->hosts * operation->ranks_per_host;
    return (EVEN_BYTES + unit - 1) / unit * unit;
}

/* Simulates a buffer, and one of twice its length: consecutive buffers continue in chunks, like one long buffer. Sizes above
 * even_bytes() are extrapolated from that size and its double, because simulating thousands of ranks takes long. */
int sim_step_price_ask(struct sim_step_answers *answers, const struct sim_step_options *options, const char *name,
                       const struct sim_step_operation *operation, size_t bytes, struct sim_step_price *price_out)
{
    const size_t own_bytes = bytes / operation->parts, even = even_bytes(operation);
    const size_t once_bytes = own_bytes < even ? own_bytes : even;
    struct shoal_simulated once, twice;
    *price_out = (struct sim_step_price){.algorithm = "alone"};
    if (operation->hosts * operation->ranks_per_host == 1 && options->optimizing.is_sharded)
        return 0; /* a team of one rank has nothing to do */
    int code = ask(answers, options, name, operation, once_bytes, &once);
    if (!code)
        code = ask(answers, options, name, operation, 2 * once_bytes, &twice);
    if (code)
        return code;
    const double times = (double)own_bytes / (double)once_bytes, more_us = twice.time_us - once.time_us;
    const double apart_us = more_us > once.time_us ? once.time_us : more_us > once.bound_us ? more_us : once.bound_us;
    price_out->cost.alone_us = once.time_us + more_us * (times - 1);
    price_out->cost.apart_us = apart_us * times;
    price_out->wire_us = once.bound_us * times;
    price_out->algorithm = twice.algorithm;
    return 0;
}

double sim_step_threads_rate(const struct shoal_simulation *question, double each_gb_s)
{
    const size_t ranks = question->ranks_per_host, share = question->cores ? question->cores / ranks : SIZE_MAX;
    const size_t wanted = question->threads ? question->threads : 1, threads = wanted < share ? wanted : share;
    const double all = (double)threads * each_gb_s, host = question->host_memory_gb_s / (double)ranks;
    const double most = host > 0 && host < all ? host : all;
    return most > each_gb_s ? most : each_gb_s;
}
