/* Shared by the files of `shoal advise`: the question, the answer, how it is printed. Main thread. */
#ifndef SHOAL_TOOLS_ADVISE_H
#define SHOAL_TOOLS_ADVISE_H

#include "advise_counts.h"
#include "advise_memory.h"
#include "advise_model.h"
#include "advise_rate.h"
#include "advise_shape.h"
#include "sim/sim_step.h"
#include "sim/sim_step_cost.h"

enum { ADVISE_EXIT_NO_MEMORY = 3, ADVISE_EXIT_NO_TIME = 4, ADVISE_CURRENCY_BYTES = 8 };
enum advise_format { ADVISE_TEXT, ADVISE_JSON, ADVISE_HTML };
enum advise_keep { ADVISE_KEEP_BATCH, ADVISE_KEEP_WORKER };

/* How sure a number is. */
enum advise_sure { ADVISE_COMPUTED, ADVISE_GIVEN, ADVISE_MEASURED, ADVISE_MODELED, ADVISE_ASSUMED, ADVISE_SURES };
extern const char *const advise_sures[ADVISE_SURES];

struct advise_question {
    bool help;
    struct step_profile profile;
    struct advise_facts facts;
    size_t samples, batch;
    double epochs;
    struct advise_shape shape;
    size_t per_machine; /* workers of a machine */
    size_t file_hosts;  /* hosts of a file, which are described as this machine; 0: --machine is a shape or this machine */
    struct sim_values counts;
    int optimizer; /* enum step_rule */
    bool is_16, fuses_attention;
    double sample_us; /* of forward and backward pass for a sample on a worker; 0: not known */
    enum advise_sure sample_sure;
    double forward_share;              /* of that */
    int keep;                          /* enum advise_keep */
    double from_batch;                 /* for which learning rate and epochs are known */
    double rate;                       /* the learning rate there; 0: not given */
    double critical;                   /* critical batch; 0: not given */
    double price, larger_price;        /* an hour of one machine; below 0: not given */
    const struct advise_shape *larger; /* to compare with; NULL: the next larger shape of the family */
    char currency[ADVISE_CURRENCY_BYTES];
    double finish_s;                 /* 0: no limit */
    int format;                      /* enum advise_format */
    struct shoal_simulation network; /* the one of `shape`, changed by options */
    bool has_rate, has_pcie, has_nvlink, has_per_machine;
    enum advise_sure activations_sure;
    double memory_bytes; /* of a worker */
};

/* One number of machines. */
struct advise_point {
    const struct advise_shape *shape;
    size_t machines, per_machine, batch;
    enum advise_fault fault;
    struct advise_counts counts;
    struct advise_rung rungs[ADVISE_WAYS];
    int way; /* index of the first rung that fits; ADVISE_WAYS: none */
    bool has_step;
    double step_us, compute_us, efficiency; /* for a whole step, with all microbatches */
    bool is_simulated;                      /* else the step is arithmetic */
    const char *limit;                      /* what would shorten a simulated step most, as in shoal sim step; else NULL */
    double steps, seconds, cost;            /* of the job; cost below 0: not known */
};

enum { ADVISE_POINTS_MAX = SIM_VALUES_MAX };
struct advise_answer {
    struct advise_point points[ADVISE_POINTS_MAX];
    int count;
    struct advise_point larger[ADVISE_POINTS_MAX]; /* as many workers in a larger shape of the family */
    bool has_larger[ADVISE_POINTS_MAX];
    struct advise_point finish; /* of fewest machines that meet the limit; or the fastest that was found */
    bool has_finish, finishes;
    struct advise_rate rates[ADVISE_RATES_MAX];
    int rate_count;
};

/* Reads the arguments. Returns false after printing one line; *code_out is then the exit code. Free question_out->profile in
 * any case. */
bool advise_options_parse(int argc, char **argv, struct advise_question *question_out, int *code_out);

/* Returns the memory of a worker that may be used: a part stays free for fragments. */
double advise_usable_bytes(double memory_bytes);

/* Describes a number of machines of a shape: counts, ladder, predicted step, time, cost. Returns 0, or an exit code after
 * printing one line. */
int advise_point_find(const struct advise_question *question, const struct advise_shape *shape, size_t machines,
                      struct sim_step_answers *answers, struct advise_point *point_out);

/* Answers the whole question. Returns 0, or an exit code after printing one line. */
int advise_answer_find(const struct advise_question *question, struct advise_answer *answer_out);

/* Returns the index of the point whose details are shown: the fastest one that fits; without times the last one that fits; or
 * the last one. */
int advise_shown(const struct advise_answer *answer);

/* Print the answer. Texts that the pages share are below. */
void advise_text_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out);
void advise_json_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out);
void advise_html_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out);
void advise_job_print(const struct advise_question *question, const struct advise_point *point, FILE *out);

/* Draws efficiency and time over machines, as an svg element. */
void advise_svg_print(const struct advise_question *question, const struct advise_answer *answer, FILE *out);

#endif
