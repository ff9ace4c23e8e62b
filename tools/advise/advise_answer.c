/* The whole answer: all numbers of machines, larger shapes, and the fewest machines that meet a time limit. */
#include "advise.h"

#include <math.h>

const char *const advise_sures[ADVISE_SURES] = {"computed", "given", "measured", "modeled", "assumed"};

/* Asks about as many workers in a larger shape, if they fill its machines. */
static int larger_find(const struct advise_question *question, struct sim_step_answers *answers, struct advise_answer *answer,
                       int i)
{
    const struct advise_shape *larger = question->larger ? question->larger : advise_shape_larger(&question->shape);
    const struct advise_point *point = &answer->points[i];
    if (!larger || question->has_per_machine || !point->has_step || point->counts.workers % larger->accelerators)
        return 0;
    const int code =
        advise_point_find(question, larger, point->counts.workers / larger->accelerators, answers, &answer->larger[i]);
    answer->has_larger[i] = !code && answer->larger[i].has_step;
    return code;
}

/* ---- A time limit -------------------------------------------------------------------------------------------------------- */

static bool is_in_time(const struct advise_question *question, const struct advise_point *point)
{
    return point->has_step && point->seconds <= question->finish_s;
}

/* Keeps the point if it is better than the one before: in time with fewer machines, or else faster. */
static void finish_keep(const struct advise_question *question, const struct advise_point *point, struct advise_answer *answer)
{
    const struct advise_point *best = &answer->finish;
    const bool is_met = is_in_time(question, point);
    if (!point->has_step || (answer->finishes && !is_met))
        return;
    if (answer->has_finish &&
        (is_met ? answer->finishes && best->machines <= point->machines : best->seconds <= point->seconds))
        return;
    answer->finish = *point;
    answer->has_finish = true;
    answer->finishes = is_met;
}

/* Doubles the machines until the limit is met, workers have no samples, or two doublings brought nothing: beyond a few hundred
 * machines the network decides, and a simulation takes minutes. *low_out and *high_out are numbers of machines that do not meet
 * the limit and do; *high_out is 0 if none was found. */
static int finish_double(const struct advise_question *question, struct sim_step_answers *answers, struct advise_answer *answer,
                         size_t *low_out, size_t *high_out)
{
    struct advise_point point;
    double best_s = INFINITY;
    int useless = 0;
    const size_t possible = SHOAL_RANKS_MAX / question->per_machine;
    const size_t most = question->file_hosts && question->file_hosts < possible ? question->file_hosts : possible;
    for (size_t machines = 1; machines <= most && !*high_out && useless < 2; machines *= 2) {
        const int code = advise_point_find(question, &question->shape, machines, answers, &point);
        if (code)
            return code;
        finish_keep(question, &point, answer);
        if (point.fault) { /* more workers than samples: the most that have some, once */
            const size_t last = question->batch / question->per_machine;
            if (machines <= last || last <= *low_out)
                break;
            machines = last;
            useless = 2;
            const int again = advise_point_find(question, &question->shape, machines, answers, &point);
            if (again || point.fault)
                return again;
            finish_keep(question, &point, answer);
        }
        *(is_in_time(question, &point) ? high_out : low_out) = machines;
        useless = point.has_step && point.seconds > 0.99 * best_s ? useless + 1 : 0;
        best_s = point.has_step ? fmin(best_s, point.seconds) : best_s;
    }
    return 0;
}

/* Halves the gap. Between two numbers of machines the time may rise a little, when samples no longer divide. */
static int finish_find(const struct advise_question *question, struct sim_step_answers *answers, struct advise_answer *answer)
{
    struct advise_point point;
    size_t low = 0, high = 0;
    int code = finish_double(question, answers, answer, &low, &high);
    while (!code && high > low + 1) {
        const size_t middle = low + (high - low) / 2;
        code = advise_point_find(question, &question->shape, middle, answers, &point);
        if (code)
            break;
        finish_keep(question, &point, answer);
        *(is_in_time(question, &point) ? &high : &low) = middle;
    }
    return code;
}

/* ---- All ----------------------------------------------------------------------------------------------------------------- */

static bool fits(const struct advise_point *point)
{
    return !point->fault && point->way < ADVISE_WAYS;
}

int advise_shown(const struct advise_answer *answer)
{
    int shown = answer->count - 1;
    for (int i = answer->count - 1; i >= 0; i--) {
        const struct advise_point *point = &answer->points[i], *best = &answer->points[shown];
        if (fits(point) && (!fits(best) || (point->has_step && point->seconds < best->seconds)))
            shown = i;
    }
    return shown;
}

static int points_find(const struct advise_question *question, struct sim_step_answers *answers, struct advise_answer *answer)
{
    int code = 0;
    for (int i = 0; i < question->counts.count && !code; i++) {
        code = advise_point_find(question, &question->shape, question->counts.at[i], answers, &answer->points[i]);
        answer->count = i + 1;
        if (!code)
            code = larger_find(question, answers, answer, i);
    }
    if (!code && question->finish_s > 0)
        code = finish_find(question, answers, answer);
    return code;
}

int advise_answer_find(const struct advise_question *question, struct advise_answer *answer_out)
{
    struct sim_step_answers answers = {.count = 0};
    *answer_out = (struct advise_answer){.count = 0};
    const int code = points_find(question, &answers, answer_out);
    sim_step_answers_free(&answers);
    if (code)
        return code;
    const struct advise_rate_question rates = {question->optimizer, question->from_batch,
                                               (double)answer_out->points[advise_shown(answer_out)].batch};
    answer_out->rate_count = advise_rates_find(&rates, answer_out->rates);
    return 0;
}
