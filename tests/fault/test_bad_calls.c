/* Invalid arguments of every call: refused with one line that names the function and the error; the communicator is unchanged.
 * A case is one way to spoil valid arguments, tried on each call that has such arguments. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "fault_calls.h"

#define RANKS 2
#define COUNT ((size_t)4)
#define WRONG_POINTER ((void *)(uintptr_t)1)

/* Valid arguments of this rank, until they are spoiled. */
struct arguments {
    const struct fault_call *call;
    struct shoal_comm *comm;
    int rank;
    void *input;
    void *output;
    size_t count;
    size_t given[RANKS], given_at[RANKS], taken[RANKS], taken_at[RANKS]; /* of parts */
    bool has_given, has_taken;
    struct shoal_tensor tensors[2];
    struct shoal_message messages[2];
    bool has_list; /* of tensors or messages */
    enum shoal_type type;
    enum shoal_op op;
    int root;
    struct shoal_options options;
    struct shoal_request **request_out; /* NULL: blocks */
    double number;                      /* of the case */
};

struct spoiler {
    bool (*can)(const struct arguments *a);
    void (*spoil)(struct arguments *a);
    const char *says[2];
    double number;
    bool is_posted;
};

/* ---- Valid arguments ----------------------------------------------------------------------------------------------------- */

static const struct operation_row *row_of(const struct arguments *a)
{
    static const struct operation_row both = {.is_input_partitioned = true, .is_output_partitioned = true};
    return a->call->is_exchange ? &both : operation_row(a->call->kind);
}

static struct arguments make_arguments(struct fault_rank *self, const struct fault_call *call)
{
    static float memory[2][RANKS * COUNT + 1];
    struct arguments a = {.call = call, .comm = self->comm, .rank = self->rank, .input = memory[0], .output = memory[1]};
    const int peer = 1 - self->rank;
    a.count = COUNT;
    for (size_t i = 0; i < RANKS; i++) {
        a.given[i] = a.taken[i] = COUNT;
        a.given_at[i] = a.taken_at[i] = i * COUNT;
    }
    for (int i = 0; i < 2; i++) {
        a.tensors[i] = (struct shoal_tensor){memory[0] + (size_t)i * COUNT, memory[1] + (size_t)i * COUNT, COUNT / RANKS};
        a.messages[i] = (struct shoal_message){i == 0, memory[i], COUNT, SHOAL_FLOAT32, peer, 0};
    }
    a.has_given = a.has_taken = a.has_list = true;
    a.options = (struct shoal_options)SHOAL_OPTIONS_INIT;
    return a;
}

/* ---- Calling ------------------------------------------------------------------------------------------------------------- */

#define CALL(call_, post_, ...) \
    (a->request_out ? post_(__VA_ARGS__, &a->options, request_out) : call_(__VA_ARGS__, &a->options))

static enum shoal_status call_list(const struct arguments *a, struct shoal_request **request_out)
{
    const struct shoal_tensor *tensors = a->has_list ? a->tensors : NULL;
    if (a->call->is_exchange)
        return CALL(shoal_exchange, shoal_exchange_post, a->comm, a->has_list ? a->messages : NULL, 2);
    switch (a->call->kind) {
    case OPERATION_ALLREDUCE:
        return CALL(shoal_allreduce_coalesced, shoal_allreduce_coalesced_post, a->comm, tensors, 2, a->type, a->op);
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatter_coalesced, shoal_reduce_scatter_coalesced_post, a->comm, tensors, 2, a->type, a->op);
    case OPERATION_BROADCAST:
        return CALL(shoal_broadcast_coalesced, shoal_broadcast_coalesced_post, a->comm, tensors, 2, a->type, a->root);
    default:
        return CALL(shoal_allgather_coalesced, shoal_allgather_coalesced_post, a->comm, tensors, 2, a->type);
    }
}

static enum shoal_status call_parts(const struct arguments *a, struct shoal_request **request_out)
{
    const size_t *given = a->has_given ? a->given : NULL, *taken = a->has_taken ? a->taken : NULL;
    switch (a->call->kind) {
    case OPERATION_ALLGATHER:
        return CALL(shoal_allgatherv, shoal_allgatherv_post, a->comm, a->input, a->output, taken, a->taken_at, a->type);
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatterv, shoal_reduce_scatterv_post, a->comm, a->input, a->output, given, a->type, a->op);
    default:
        return CALL(shoal_alltoallv, shoal_alltoallv_post, a->comm, a->input, given, a->given_at, a->output, taken, a->taken_at,
                    a->type);
    }
}

static enum shoal_status call_plain(const struct arguments *a, struct shoal_request **request_out)
{
    switch (a->call->kind) {
    case OPERATION_ALLREDUCE:
        return CALL(shoal_allreduce, shoal_allreduce_post, a->comm, a->input, a->output, a->count, a->type, a->op);
    case OPERATION_REDUCE:
        return CALL(shoal_reduce, shoal_reduce_post, a->comm, a->input, a->output, a->count, a->type, a->op, a->root);
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatter, shoal_reduce_scatter_post, a->comm, a->input, a->output, a->count, a->type, a->op);
    case OPERATION_BROADCAST:
        return CALL(shoal_broadcast, shoal_broadcast_post, a->comm, a->input, a->output, a->count, a->type, a->root);
    case OPERATION_ALLGATHER:
        return CALL(shoal_allgather, shoal_allgather_post, a->comm, a->input, a->output, a->count, a->type);
    case OPERATION_GATHER:
        return CALL(shoal_gather, shoal_gather_post, a->comm, a->input, a->output, a->count, a->type, a->root);
    case OPERATION_SCATTER:
        return CALL(shoal_scatter, shoal_scatter_post, a->comm, a->input, a->output, a->count, a->type, a->root);
    default:
        return CALL(shoal_alltoall, shoal_alltoall_post, a->comm, a->input, a->output, a->count, a->type);
    }
}

static enum shoal_status call(const struct arguments *a, struct shoal_request **request_out)
{
    if (a->call->is_exchange || a->call->form == FORM_TENSORS)
        return call_list(a, request_out);
    return a->call->form == FORM_PARTS ? call_parts(a, request_out) : call_plain(a, request_out);
}

/* ---- Properties of a call ------------------------------------------------------------------------------------------------ */

static bool any_call(const struct arguments *a)
{
    return a->call != NULL;
}

static bool is_exchange(const struct arguments *a)
{
    return a->call->is_exchange;
}

static bool has_list(const struct arguments *a)
{
    return a->call->is_exchange || a->call->form == FORM_TENSORS;
}

static bool is_reduction(const struct arguments *a)
{
    return row_of(a)->is_reduced;
}

static bool has_root(const struct arguments *a)
{
    return row_of(a)->root_contributes || row_of(a)->root_receives;
}

static bool has_given(const struct arguments *a)
{
    return a->call->form == FORM_PARTS && row_of(a)->is_input_partitioned;
}

static bool has_taken(const struct arguments *a)
{
    return a->call->form == FORM_PARTS && row_of(a)->is_output_partitioned;
}

static bool has_both_parts(const struct arguments *a)
{
    return has_given(a) && has_taken(a);
}

static bool has_input(const struct arguments *a)
{
    return !row_of(a)->root_contributes || a->rank == a->root;
}

static bool has_output(const struct arguments *a)
{
    return !row_of(a)->root_receives || a->rank == a->root;
}

static bool has_two_wholes_or_parts(const struct arguments *a)
{
    return has_input(a) && has_output(a) && row_of(a)->is_input_partitioned == row_of(a)->is_output_partitioned &&
           !is_exchange(a);
}

static bool has_a_whole_and_parts(const struct arguments *a)
{
    return has_input(a) && has_output(a) && row_of(a)->is_input_partitioned != row_of(a)->is_output_partitioned;
}

static bool is_sum_of_tensors(const struct arguments *a)
{
    return a->call->form == FORM_TENSORS && a->call->kind == OPERATION_ALLREDUCE;
}

/* ---- Ways to spoil arguments --------------------------------------------------------------------------------------------- */

/* Sets the pointers of all operands that a call may read. */
static void set_operands(struct arguments *a, void *input, void *output)
{
    a->input = input;
    a->output = output;
    a->tensors[1].input = input;
    a->tensors[1].output = output;
}

static void spoil_type(struct arguments *a)
{
    a->type = a->messages[1].type = (enum shoal_type)(int)a->number;
}

static void spoil_operator(struct arguments *a)
{
    a->op = (enum shoal_op)(int)a->number;
}

static void scale_integers(struct arguments *a)
{
    a->type = SHOAL_INT32;
    a->op = SHOAL_SCALED_SUM;
    a->options.scale = a->number;
}

static void spoil_root(struct arguments *a)
{
    a->root = (int)a->number;
}

static void spoil_count(struct arguments *a)
{
    a->count = a->given[1] = a->taken[1] = a->tensors[1].count = a->messages[1].count = (size_t)(int64_t)a->number;
}

static void spoil_given_at(struct arguments *a)
{
    a->given_at[1] = (size_t)-1;
}

static void spoil_taken_at(struct arguments *a)
{
    a->taken_at[0] = (size_t)-1;
}

static void take_given_away(struct arguments *a)
{
    a->has_given = false;
}

static void take_taken_away(struct arguments *a)
{
    a->has_taken = false;
}

static void take_list_away(struct arguments *a)
{
    a->has_list = false;
}

static void take_input_away(struct arguments *a)
{
    set_operands(a, NULL, a->output);
    a->messages[0].buffer = NULL;
}

static void take_output_away(struct arguments *a)
{
    set_operands(a, a->input, NULL);
    a->messages[1].buffer = NULL;
}

static void shift_input(struct arguments *a)
{
    set_operands(a, (char *)a->input + 1, a->output);
    a->messages[0].buffer = a->input;
}

static void shift_output(struct arguments *a)
{
    set_operands(a, a->input, (char *)a->output + 2);
    a->messages[1].buffer = a->output;
}

/* Makes the output begin one element after the input. */
static void overlap(struct arguments *a)
{
    set_operands(a, a->input, (float *)a->input + 1);
}

/* Makes the whole operand overlap the other rank's part. */
static void overlap_other_part(struct arguments *a)
{
    const size_t part = a->call->form == FORM_TENSORS ? a->tensors[1].count : COUNT;
    float *const base = a->input, *const other = base + (size_t)(1 - a->rank) * part;
    set_operands(a, row_of(a)->is_input_partitioned ? base : other, row_of(a)->is_input_partitioned ? other : base);
}

static void overlap_parts(struct arguments *a)
{
    a->taken_at[1] = COUNT - 1;
}

static void replace_with_other_counts(struct arguments *a)
{
    a->output = a->input;
    a->taken[1 - a->rank]--;
}

static void replace_at_other_places(struct arguments *a)
{
    a->output = a->input;
    a->taken_at[1]++;
}

static void give_itself_more(struct arguments *a)
{
    a->given[a->rank]++;
}

static void make_tensors_huge(struct arguments *a)
{
    for (int i = 0; i < 2; i++) {
        a->tensors[i].count = SIZE_MAX / 16 / RANKS;
        a->tensors[i].output = (void *)(uintptr_t)a->tensors[i].input;
    }
}

static void spoil_options(struct arguments *a)
{
    a->options.struct_bytes = (size_t)a->number;
}

static void spoil_peer(struct arguments *a)
{
    a->messages[1].peer = (int)a->number;
}

static void spoil_tag(struct arguments *a)
{
    a->messages[0].tag = -1;
}

/* Passes no place for the request; all else is unchanged. */
static void give_no_place(struct arguments *a)
{
    (void)a;
}

/* ---- The ranks ----------------------------------------------------------------------------------------------------------- */

static int count_newlines(const char *text)
{
    int count = 0;
    for (; (text = strchr(text, '\n')); text++)
        count++;
    return count;
}

static void check_refusal(struct fault_rank *self, const struct spoiler *spoiler, const char *name, const char *line)
{
    char function[64];
    snprintf(function, sizeof function, "shoal_%s%s", name, spoiler->is_posted ? "_post on" : " on");
    fault_check(self, count_newlines(line) == 1 && strstr(line, function), "%s: %d lines: %s", name, count_newlines(line),
                line);
    for (size_t i = 0; i < FAULT_COUNT_OF(spoiler->says) && spoiler->says[i]; i++)
        fault_check(self, strstr(line, spoiler->says[i]) != NULL, "%s: \"%s\" is not in: %s", name, spoiler->says[i], line);
}

static void try_call(struct fault_rank *self, const struct fault_call *tried)
{
    const struct spoiler *spoiler = self->parameters;
    struct arguments a = make_arguments(self, tried);
    struct shoal_request *request = WRONG_POINTER;
    const size_t logged = strlen(self->mine->log);
    if (!spoiler->can(&a))
        return;
    a.number = spoiler->number;
    spoiler->spoil(&a);
    a.request_out = spoiler->is_posted ? &request : NULL;
    const enum shoal_status status = call(&a, spoiler->spoil == give_no_place ? NULL : a.request_out);
    fault_check(self, status == SHOAL_ERR_ARGUMENT, "%s gave %s", tried->name, shoal_status_name(status));
    fault_check(self, request == WRONG_POINTER, "%s has written a request", tried->name);
    check_refusal(self, spoiler, tried->name, self->mine->log + logged);
}

static void call_each_well(struct fault_rank *self)
{
    for (int i = 0; i < FAULT_CALLS; i++) {
        const struct fault_load load = {&fault_calls[i], 0, COUNT, false, false};
        struct fault_operands operands;
        if (!fault_operands_make(self, &load, &operands))
            return;
        fault_operands_call_well(self, &operands, self->comm);
        fault_operands_free(&operands);
    }
}

static void body(struct fault_rank *self)
{
    for (int i = 0; i < FAULT_CALLS && !self->mine->why[0]; i++)
        try_call(self, &fault_calls[i]);
    fault_check(self, self->mine->log[0] || self->rank != 0, "no call was tried");
    if (!self->mine->why[0])
        call_each_well(self);
}

static void play(struct fault_test *test)
{
    const struct fault_job job = {.size = RANKS, .body = body, .parameters = test->parameters};
    fault_run(test, &job);
}

/* ---- Calls that are not refused, and calls that are refused for ever ----------------------------------------------------- */

/* Passes the options of a program built before `scale` existed. */
static void use_old_options(struct fault_rank *self)
{
    struct shoal_options options = {.struct_bytes = offsetof(struct shoal_options, scale), .timeout_ms = 5000, .scale = 7};
    float x = 2;
    const enum shoal_status status = shoal_allreduce(self->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SCALED_SUM, &options);
    fault_check(self, status == SHOAL_OK && x == 4, "%s, %g", shoal_status_name(status), (double)x);
}

static void old_options(struct fault_test *test)
{
    const struct fault_job job = {.size = RANKS, .body = use_old_options};
    fault_run(test, &job);
}

/* Rank 1 sends and receives nothing: offsets of empty parts need not match, and operands may be missing. */
static void give_and_take_nothing(struct fault_rank *self)
{
    const size_t some[RANKS] = {3}, none[RANKS] = {0}, at[RANKS] = {0};
    const float given[3] = {1, 2, 3};
    float taken[3] = {0};
    const enum shoal_status status = self->rank == 1
                                         ? shoal_alltoallv(self->comm, NULL, none, at, NULL, none, NULL, SHOAL_FLOAT32, NULL)
                                         : shoal_alltoallv(self->comm, given, some, at, taken, some, NULL, SHOAL_FLOAT32, NULL);
    fault_check(self, status == SHOAL_OK, "%s", shoal_status_name(status));
    fault_check(self, self->rank || taken[2] == 3, "what rank 0 gave to itself is %g", (double)taken[2]);
}

static void nothing_at_offsets(struct fault_test *test)
{
    const struct fault_job job = {.size = RANKS, .body = give_and_take_nothing};
    fault_run(test, &job);
}

/* Checks whether tensors may be summed in one call. */
enum { LENGTH = 20 };

static void sum_tensors(struct fault_rank *self, bool are_apart, const struct shoal_tensor *tensors, size_t count)
{
    const size_t logged = strlen(self->mine->log);
    const enum shoal_status status = shoal_allreduce_coalesced(self->comm, tensors, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    fault_check(self, status == (are_apart ? SHOAL_OK : SHOAL_ERR_ARGUMENT), "tensors that are %s: %s",
                are_apart ? "apart" : "not apart", shoal_status_name(status));
    fault_check(self, are_apart || strstr(self->mine->log + logged, "an output overlaps an operand of another tensor"), "%s",
                self->mine->log + logged);
}

static void overlap_tensors(struct fault_rank *self)
{
    float a[2 * LENGTH] = {0}, b[2 * LENGTH];
    const struct shoal_tensor shorter_first[] = {{a, b, LENGTH / 2}, {a, a, LENGTH}};
    const struct shoal_tensor shorter_last[] = {{a, a, LENGTH}, {a, b, LENGTH / 2}};
    const struct shoal_tensor one_output[] = {{a, b, LENGTH}, {a + LENGTH, b + LENGTH - 1, LENGTH}};
    const struct shoal_tensor behind_its_own[] = {{a, b, LENGTH}, {a, b + LENGTH, LENGTH / 2}, {a + 1, a + LENGTH - 1, 2}};
    const struct shoal_tensor shared_input[] = {{a, b, LENGTH}, {a, b + LENGTH, LENGTH}};
    const struct shoal_tensor neighbours[] = {{a, a, LENGTH}, {a + LENGTH, a + LENGTH, LENGTH}};
    sum_tensors(self, false, shorter_first, 2);
    sum_tensors(self, false, shorter_last, 2);
    sum_tensors(self, false, one_output, 2);
    sum_tensors(self, false, behind_its_own, 3);
    sum_tensors(self, true, shared_input, 2);
    sum_tensors(self, true, neighbours, 2);
}

static void tensors_apart(struct fault_test *test)
{
    const struct fault_job job = {.size = RANKS, .body = overlap_tensors};
    fault_run(test, &job);
}

static void use_finalized(struct fault_rank *self)
{
    struct shoal_request *request = WRONG_POINTER;
    fault_check(self, shoal_comm_finalize(self->comm) == SHOAL_OK, "shoal_comm_finalize");
    for (int i = 0; i < FAULT_CALLS; i++) {
        struct arguments a = make_arguments(self, &fault_calls[i]);
        const size_t logged = strlen(self->mine->log);
        a.request_out = i % 2 ? &request : NULL;
        const enum shoal_status status = call(&a, a.request_out);
        const char *line = self->mine->log + logged;
        fault_check(self, status == SHOAL_ERR_STATE && request == WRONG_POINTER, "%s gave %s", fault_calls[i].name,
                    shoal_status_name(status));
        fault_check(self, count_newlines(line) == 1 && strstr(line, "finalized") && strstr(line, fault_calls[i].name), "%s: %s",
                    fault_calls[i].name, line);
    }
}

static void finalized(struct fault_test *test)
{
    const struct fault_job job = {.size = RANKS, .body = use_finalized};
    fault_run(test, &job);
}

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

#define SPOIL(can_, spoil_, number_, ...)                                                                    \
    play, &(const struct spoiler)                                                                            \
    {                                                                                                        \
        .can = (can_), .spoil = (spoil_), .number = (number_), .says = {__VA_ARGS__}, .is_posted = IS_POSTED \
    }

#define IS_POSTED false
static const struct fault_case cases[] = {
    {"bad_type", SPOIL(any_call, spoil_type, SHOAL_TYPE_END, "none of enum shoal_type")},
    {"bad_type_negative", SPOIL(any_call, spoil_type, -1, "type is -1, none of enum shoal_type")},
    {"bad_operator", SPOIL(is_reduction, spoil_operator, SHOAL_OP_END, "none of enum shoal_op")},
    {"bad_operator_negative", SPOIL(is_reduction, spoil_operator, -1, "op is -1, none of enum shoal_op")},
    {"bad_bitand_of_floats", SPOIL(is_reduction, spoil_operator, SHOAL_BITAND, "bitwise", "only for integers")},
    {"bad_bitxor_of_floats", SPOIL(is_reduction, spoil_operator, SHOAL_BITXOR, "bitwise", "only for integers")},
    {"bad_scale_fraction", SPOIL(is_reduction, scale_integers, 1.5, "scale of integers is 1.5", "whole number")},
    {"bad_scale_huge", SPOIL(is_reduction, scale_integers, 0x1p63, "scale of integers", "whole number")},
    {"bad_scale_infinite", SPOIL(is_reduction, scale_integers, -INFINITY, "scale of integers", "whole number")},
    {"bad_scale_nan", SPOIL(is_reduction, scale_integers, NAN, "scale of integers is", "whole number")},
    {"bad_root_beyond", SPOIL(has_root, spoil_root, RANKS, "root is 2, but there are 2 ranks")},
    {"bad_root_negative", SPOIL(has_root, spoil_root, -1, "root is -1, but there are 2 ranks")},
    {"bad_count_negative",
     SPOIL(any_call, spoil_count, -5, " is 18446744073709551611, larger than memory can be", "negative number")},
    {"bad_count_huge", SPOIL(any_call, spoil_count, 0x1p60, "larger than memory can be", "negative number")},
    {"bad_input_offset", SPOIL(has_both_parts, spoil_given_at, 0, "an offset is 18446744073709551615", "negative number")},
    {"bad_output_offset", SPOIL(has_taken, spoil_taken_at, 0, "an offset is 18446744073709551615", "negative number")},
    {"bad_input_counts_null", SPOIL(has_given, take_given_away, 0, "array of counts is NULL")},
    {"bad_output_counts_null", SPOIL(has_taken, take_taken_away, 0, "array of counts is NULL")},
    {"bad_list_null", SPOIL(has_list, take_list_away, 0, "is NULL, but their number is not 0")},
    {"bad_input_null", SPOIL(has_input, take_input_away, 0, "input is NULL, but count is not 0")},
    {"bad_output_null", SPOIL(has_output, take_output_away, 0, "output is NULL, but count is not 0")},
    {"bad_input_alignment", SPOIL(has_input, shift_input, 0, "input is 0x", "not aligned to its elements of 4 bytes")},
    {"bad_output_alignment", SPOIL(has_output, shift_output, 0, "output is 0x", "not aligned to its elements of 4 bytes")},
    {"bad_overlap", SPOIL(has_two_wholes_or_parts, overlap, 0, "overlap", "same address or apart")},
    {"bad_overlap_with_parts", SPOIL(has_a_whole_and_parts, overlap, 0, "overlap", "this rank's part")},
    {"bad_overlap_with_other_part", SPOIL(has_a_whole_and_parts, overlap_other_part, 0, "overlap", "this rank's part")},
    {"bad_overlap_of_parts", SPOIL(has_taken, overlap_parts, 0, "parts of the output overlap")},
    {"bad_counts_in_place", SPOIL(has_both_parts, replace_with_other_counts, 0, "in place, counts and offsets")},
    {"bad_offsets_in_place", SPOIL(has_both_parts, replace_at_other_places, 0, "in place, counts and offsets")},
    {"bad_counts_with_itself", SPOIL(has_both_parts, give_itself_more, 0, "elements to itself, but receives")},
    {"bad_tensors_huge", SPOIL(is_sum_of_tensors, make_tensors_huge, 0, "tensors are larger than memory can be")},
    {"bad_options_unset", SPOIL(any_call, spoil_options, 0, "struct_bytes is not set", "SHOAL_OPTIONS_INIT")},
    {"bad_options_short", SPOIL(any_call, spoil_options, 15, "struct_bytes is not set", "SHOAL_OPTIONS_INIT")},
    {"bad_peer_beyond", SPOIL(is_exchange, spoil_peer, RANKS, "peer is 2", "one of the 2 ranks")},
    {"bad_peer_negative", SPOIL(is_exchange, spoil_peer, -1, "peer is -1", "one of the 2 ranks")},
    {"bad_tag_negative", SPOIL(is_exchange, spoil_tag, 0, "tag is -1")},
#undef IS_POSTED
#define IS_POSTED true
    {"bad_type_posted", SPOIL(any_call, spoil_type, SHOAL_TYPE_END, "none of enum shoal_type")},
    {"bad_count_posted", SPOIL(any_call, spoil_count, -1, "larger than memory can be", "negative number")},
    {"bad_output_null_posted", SPOIL(has_output, take_output_away, 0, "output is NULL, but count is not 0")},
    {"bad_options_posted", SPOIL(any_call, spoil_options, 8, "struct_bytes is not set", "SHOAL_OPTIONS_INIT")},
    {"bad_request_out_null", SPOIL(any_call, give_no_place, 0, "request_out is NULL")},
    {"old_options_are_right", old_options, NULL},
    {"nothing_at_offsets_is_right", nothing_at_offsets, NULL},
    {"tensors_have_to_be_apart", tensors_apart, NULL},
    {"finalized_refuses_every_call", finalized, NULL},
};

int main(int argc, char **argv)
{
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
