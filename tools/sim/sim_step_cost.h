/* The cost of the operations on a buffer of gradients, for `shoal sim step`: which ranks of which hosts take part, what
 * shoal_simulate predicts, and the answers so far. Main thread. */
#ifndef SHOAL_TOOLS_SIM_STEP_COST_H
#define SHOAL_TOOLS_SIM_STEP_COST_H

#include "sim_step.h"
#include "step/step_replay.h"

/* A collective as one of its communicators runs it. Others of the same kind run on the same hosts at the same time. */
struct sim_step_operation {
    const char *collective; /* as in struct shoal_question; NULL if steps do not have the operation */
    size_t hosts, ranks_per_host;
    size_t sharing; /* communicators that share the adapter of a host */
    size_t parts;   /* 1: operates on a whole buffer. Otherwise on one shard of this many */
};

/* The operations of a step on that many hosts, by enum step_way. Returns false after printing one line if the options do not
 * fit that many hosts. */
bool sim_step_operations_find(const struct sim_step_options *options, size_t hosts,
                              struct sim_step_operation operations_out[STEP_WAYS]);

/* Returns how many ranks share one copy of the states on that many hosts. */
size_t sim_step_degree(const struct sim_step_options *options, size_t hosts);

/* Answers are kept, because several profiles ask the same questions. */
struct sim_step_answers {
    struct sim_step_answer *at;
    size_t count, capacity;
};

void sim_step_answers_free(struct sim_step_answers *answers);

struct sim_step_price {
    struct step_cost cost;
    double wire_us; /* the wire's part of the cost */
    const char *algorithm;
};

/* Predicts an operation on a buffer of `bytes` bytes. name is for the line about a long prediction. Returns 0, or an exit code
 * after printing one line. */
int sim_step_price_ask(struct sim_step_answers *answers, const struct sim_step_options *options, const char *name,
                       const struct sim_step_operation *operation, size_t bytes, struct sim_step_price *price_out);

/* Predicts the step of one row, whose profile and hosts are set; its other fields are results, and 0 before. Returns 0, or
 * an exit code after printing one line. (In sim_step.c.) */
int sim_step_row_ask(const struct sim_step_options *options, struct sim_step_answers *answers, struct sim_step_row *row);

/* Print one line, and return the exit code. */
int sim_step_memory_fail(void);
int sim_step_status_fail(enum shoal_status status, const char *reason);

#endif
