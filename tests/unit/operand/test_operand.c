/* The operands of calls: where their elements are, when ranges are ready, and what happens at the end. The test plays the
 * owner of asynchronous operands. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "alloc_limit.h"
#include "device/device_ring.h"
#include "device/device_stage.h"
#include "operand/call.h"
#include "operand/lent.h"
#include "operand/makers.h"
#include "operand/pieces.h"

#define RANKS 3

static const size_t element = sizeof(uint32_t);

static struct shoal_call call_of(enum shoal_collective_type collective, const uint32_t *input, uint32_t *output, size_t count)
{
    return (struct shoal_call){
        .collective = collective, .type = SHOAL_FLOAT32, .input = input, .output = output, .count = count};
}

static uint32_t *at_of(const struct shoal_call *call, enum shoal_block_operand which, int part, size_t at, size_t *run)
{
    return (uint32_t *)(void *)shoal_call_address(call, 1, element, which, part, at, run);
}

/* ---- Plain memory -------------------------------------------------------------------------------------------------------- */

static void plain_memory_has_no_object(void **state)
{
    (void)state;
    uint32_t input[6] = {0}, output[18] = {0};
    const struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, 6);
    for (int which = 0; which < 2; which++) {
        assert_null(shoal_call_operand(&call, (enum shoal_block_operand)which));
        assert_true(shoal_operand_is_ready(shoal_call_operand(&call, (enum shoal_block_operand)which), 0, 6));
        assert_true(shoal_operand_is_finished(shoal_call_operand(&call, (enum shoal_block_operand)which)));
        shoal_operand_release(NULL, 0, 6);
    }
    assert_false(shoal_call_is_asynchronous(&call));
    size_t run = 4;
    assert_ptr_equal(at_of(&call, SHOAL_OUTPUT, 2, 1, &run), &output[13]);
    assert_int_equal(run, 4);
    assert_ptr_equal(at_of(&call, SHOAL_INPUT, 0, 5, &run), &input[5]);
    assert_ptr_equal(shoal_call_contiguous(&call, SHOAL_INPUT), input);
    assert_ptr_equal(shoal_call_contiguous(&call, SHOAL_OUTPUT), output);
    assert_int_equal(shoal_call_bytes(&call, SHOAL_INPUT, 1, RANKS, element, 1), 24);
    assert_int_equal(shoal_call_bytes(&call, SHOAL_OUTPUT, 1, RANKS, element, 1), 72);
}

/* A rank that has no elements may pass NULL. */
static void no_memory_has_an_address_only_without_elements(void **state)
{
    (void)state;
    const struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, 0);
    size_t run = 0;
    assert_null(at_of(&call, SHOAL_INPUT, 0, 0, &run));
    assert_int_equal(run, 0);
}

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

static void parts_begin_at_their_offsets(void **state)
{
    (void)state;
    uint32_t input[32] = {0}, output[32] = {0};
    const size_t sent[RANKS] = {3, 0, 5}, received[RANKS] = {2, 0, 4}, received_at[RANKS] = {10, 0, 1};
    const struct shoal_call_arrays arrays = {.sent = sent, .received = received, .received_at = received_at};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLTOALL, input, output, 5);
    call.arrays = &arrays;
    assert_true(shoal_call_lay_out(&call, 1, RANKS));
    size_t run = 2;
    assert_ptr_equal(at_of(&call, SHOAL_INPUT, 2, 1, &run), &input[4]);
    assert_ptr_equal(at_of(&call, SHOAL_OUTPUT, 0, 1, &run), &output[11]);
    assert_ptr_equal(at_of(&call, SHOAL_OUTPUT, 2, 3, &run), &output[4]);
    assert_int_equal(run, 2);
    assert_int_equal(shoal_call_length(&call, 1, 1, 2), 5);
    assert_int_equal(shoal_call_length(&call, 1, 0, 1), 2);
    assert_int_equal(shoal_call_length(&call, 1, 1, 1), 0);
    assert_int_equal(shoal_call_bytes(&call, SHOAL_INPUT, 1, RANKS, element, 1), 8 * element);
    assert_int_equal(shoal_call_bytes(&call, SHOAL_OUTPUT, 1, RANKS, element, 1), 12 * element);
    assert_null(shoal_call_operand(&call, SHOAL_INPUT)); /* it is plain memory */
    assert_false(call.layout->is_received_in_row);
    shoal_layout_free(call.layout);
}

/* Ranks compare the detail: it depends on the lengths of parts that all ranks know, and on nothing else. */
static void details_differ_with_lengths(void **state)
{
    (void)state;
    uint32_t memory[32] = {0};
    const size_t counts[3][RANKS] = {{1, 2, 3}, {1, 2, 3}, {3, 2, 1}}, at[RANKS] = {8, 16, 0};
    uint32_t details[3];
    for (int i = 0; i < 3; i++) {
        const struct shoal_call_arrays arrays = {.received = counts[i], .received_at = i == 1 ? at : NULL};
        struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, memory, memory, 3);
        call.arrays = &arrays;
        assert_true(shoal_call_lay_out(&call, 1, RANKS));
        details[i] = call.layout->detail;
        assert_true(details[i] != 0);
        shoal_layout_free(call.layout);
    }
    assert_int_equal(details[0], details[1]);
    assert_int_not_equal(details[0], details[2]);
}

/* ---- Several tensors ----------------------------------------------------------------------------------------------------- */

static void tensors_count_as_one_vector(void **state)
{
    (void)state;
    uint32_t a[4] = {0}, b[2 * RANKS] = {0}, c[5] = {0}, sum[3][5 * RANKS] = {{0}};
    const struct shoal_tensor tensors[] = {{NULL, NULL, 0}, {a, sum[0], 4}, {NULL, NULL, 0},
                                           {b, sum[1], 2},  {c, sum[2], 5}, {NULL, NULL, 0}};
    const struct shoal_call_arrays arrays = {.tensors = tensors, .tensor_count = 6, .has_tensors = true};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, NULL, NULL, 11);
    call.arrays = &arrays;
    assert_true(shoal_call_lay_out(&call, 1, RANKS));
    uint32_t *const inputs[11] = {a, a + 1, a + 2, a + 3, b, b + 1, c, c + 1, c + 2, c + 3, c + 4};
    const size_t lefts[11] = {4, 3, 2, 1, 2, 1, 5, 4, 3, 2, 1};
    for (size_t at = 0; at < 11; at++) {
        size_t run = 100;
        assert_ptr_equal(at_of(&call, SHOAL_INPUT, 0, at, &run), inputs[at]);
        assert_int_equal(run, lefts[at]);
        run = 1;
        assert_ptr_equal(at_of(&call, SHOAL_INPUT, 0, at, &run), inputs[at]);
        assert_int_equal(run, 1);
    }
    size_t run = 100;
    assert_ptr_equal(at_of(&call, SHOAL_OUTPUT, 2, 7, &run), &sum[2][2 * 5 + 1]); /* each tensor has all parts */
    assert_int_equal(run, 4);
    assert_false(shoal_call_is_asynchronous(&call));
    shoal_layout_free(call.layout);
}

static void one_tensor_is_plain_memory(void **state)
{
    (void)state;
    uint32_t input[2], output[2];
    const struct shoal_tensor tensor = {input, output, 2};
    const struct shoal_call_arrays arrays = {.tensors = &tensor, .tensor_count = 1, .has_tensors = true};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, 2);
    call.arrays = &arrays;
    assert_true(shoal_call_lay_out(&call, 1, RANKS));
    assert_null(call.layout);
    assert_ptr_equal(call.input, input);
    assert_ptr_equal(call.output, output);
}

static void no_tensor_is_an_empty_vector(void **state)
{
    (void)state;
    const struct shoal_call_arrays arrays = {.tensors = NULL, .tensor_count = 0, .has_tensors = true};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, 0);
    call.arrays = &arrays;
    assert_true(shoal_call_lay_out(&call, 1, RANKS));
    shoal_call_pack(&call, 1, element, 0, 0, shoal_call_contiguous(&call, SHOAL_INPUT));
    shoal_call_unpack(&call, 1, element, 0, 0, shoal_call_contiguous(&call, SHOAL_OUTPUT));
    shoal_layout_free(call.layout);
}

static void expect_piece(const struct shoal_call *call, size_t index, const void *at, size_t bytes)
{
    const struct shoal_call_piece piece = shoal_call_piece(call, 1, RANKS, index);
    assert_int_equal(piece.operand, index % 2 ? SHOAL_OUTPUT : SHOAL_INPUT);
    assert_int_equal(piece.tensor, index / 2);
    assert_ptr_equal(piece.at, at);
    assert_int_equal(piece.bytes, bytes);
}

static void an_operand_is_one_piece_of_memory(void **state)
{
    (void)state;
    uint32_t input[18] = {0}, output[18] = {0};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, 6);
    assert_int_equal(shoal_call_count_pieces(&call), 2);
    expect_piece(&call, 0, input, 24);
    expect_piece(&call, 1, output, 72);
    call.collective = SHOAL_COLLECTIVE_BROADCAST; /* from rank 0 */
    expect_piece(&call, 0, NULL, 0);
    expect_piece(&call, 1, output, 24);
    call.collective = SHOAL_COLLECTIVE_SEND;
    expect_piece(&call, 0, input, 24);
    expect_piece(&call, 1, NULL, 0);
    call.collective = SHOAL_COLLECTIVE_RECV;
    expect_piece(&call, 0, NULL, 0);
    expect_piece(&call, 1, output, 24);
    call.count = 0;
    expect_piece(&call, 1, NULL, 0);
}

static void each_tensor_is_a_piece_of_memory(void **state)
{
    (void)state;
    uint32_t input[24] = {0}, output[8] = {0};
    const struct shoal_tensor tensors[] = {{input, output, 2}, {NULL, NULL, 0}, {input + 9, output + 3, 5}};
    struct shoal_call_arrays arrays = {.tensors = tensors, .tensor_count = 3, .has_tensors = true};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_REDUCE_SCATTER, NULL, NULL, 7);
    call.arrays = &arrays;
    assert_int_equal(shoal_call_count_pieces(&call), 6);
    expect_piece(&call, 0, input, 8 * RANKS);
    expect_piece(&call, 1, output, 8);
    expect_piece(&call, 2, NULL, 0);
    expect_piece(&call, 3, NULL, 0);
    expect_piece(&call, 4, input + 9, 20 * RANKS);
    expect_piece(&call, 5, output + 3, 20);
    arrays.tensor_count = 0;
    assert_int_equal(shoal_call_count_pieces(&call), 0);
    arrays.tensor_count = 1; /* plain memory, once the call is laid out */
    assert_int_equal(shoal_call_count_pieces(&call), 2);
}

/* Small operands travel with announcements, in scratch memory. Larger ones have none. */
static void small_tensors_are_packed(void **state)
{
    (void)state;
    const size_t most = SHOAL_PAYLOAD_MAX / element;
    uint32_t *memory = calloc(2 * most + 2, sizeof *memory);
    assert_non_null(memory);
    for (size_t count = most; count <= most + 1; count++) {
        const struct shoal_tensor tensors[] = {{memory, memory, 3}, {memory + 5, memory + 5, count - 3}};
        const struct shoal_call_arrays arrays = {.tensors = tensors, .tensor_count = 2, .has_tensors = true};
        struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, count);
        call.arrays = &arrays;
        assert_true(shoal_call_lay_out(&call, 1, RANKS));
        char *const packed = shoal_call_contiguous(&call, SHOAL_INPUT), *const result =
                                                                            shoal_call_contiguous(&call, SHOAL_OUTPUT);
        assert_true((packed != NULL) == (count == most) && (result != NULL) == (count == most));
        for (uint32_t i = 0; i < count + 2 && packed; i++)
            memory[i] = i;
        if (packed)
            shoal_call_pack(&call, 1, element, 0, count, packed);
        for (size_t i = 0; i < count && packed; i++)
            assert_int_equal(((uint32_t *)(void *)packed)[i], i < 3 ? i : i + 2);
        if (packed) {
            memset(result, 1, count * element);
            shoal_call_unpack(&call, 1, element, 0, count, result);
            assert_int_equal(memory[2], 0x01010101);
            assert_int_equal(memory[3], 3); /* between the tensors */
            assert_int_equal(memory[count + 1], 0x01010101);
        }
        shoal_layout_free(call.layout);
    }
    free(memory);
}

/* ---- Locating ------------------------------------------------------------------------------------------------------------ */

static void plain_memory_is_in_reach_of_peers(void **state)
{
    (void)state;
    uint32_t input[6] = {0}, output[18] = {0};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, input, output, 6);
    struct shoal_call_memory memory = shoal_call_locate(&call, SHOAL_OUTPUT, 1, RANKS, element);
    assert_ptr_equal(memory.at, output);
    assert_int_equal(memory.bytes, 18 * element);
    call.collective = SHOAL_COLLECTIVE_BROADCAST; /* of root 0: rank 1 does not contribute */
    assert_null(shoal_call_locate(&call, SHOAL_INPUT, 1, RANKS, element).at);
    call.root = 1;
    memory = shoal_call_locate(&call, SHOAL_INPUT, 1, RANKS, element);
    assert_ptr_equal(memory.at, input);
    assert_int_equal(memory.bytes, 6 * element);
    call.collective = SHOAL_COLLECTIVE_ALLTOALL;
    assert_ptr_equal(shoal_call_locate(&call, SHOAL_INPUT, 1, RANKS, element).at, input);
    call.output = input; /* it overwrites what peers would read */
    call.input = input;
    assert_null(shoal_call_locate(&call, SHOAL_INPUT, 1, RANKS, element).at);
}

static void other_operands_are_out_of_reach(void **state)
{
    (void)state;
    uint32_t memory[32];
    const size_t counts[RANKS] = {1, 2, 3}, row[RANKS] = {0, 1, 3};
    const struct shoal_tensor tensors[] = {{memory, memory, 2}, {memory + 8, memory + 8, 3}};
    const struct shoal_call_arrays forms[] = {{.tensors = tensors, .tensor_count = 2, .has_tensors = true},
                                              {.received = counts},
                                              {.received = counts, .received_at = row}};
    for (int form = 0; form < 3; form++) {
        struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLGATHER, memory, memory + 16, 5);
        call.arrays = &forms[form];
        assert_true(shoal_call_lay_out(&call, 1, RANKS));
        const struct shoal_call_memory output = shoal_call_locate(&call, SHOAL_OUTPUT, 1, RANKS, element);
        /* Peers do not know the offsets that another rank has chosen. */
        assert_true((output.at == memory + 16) == (form == 1));
        assert_int_equal(output.bytes, form == 1 ? 6 * element : 0);
        assert_true((shoal_call_locate(&call, SHOAL_INPUT, 1, RANKS, element).at != NULL) ==
                    (form > 0 && shoal_collective_traits(SHOAL_COLLECTIVE_ALLGATHER)->is_input_reached));
        shoal_layout_free(call.layout);
    }
}

/* ---- Asynchronous operands ----------------------------------------------------------------------------------------------- */

/* An owner that the test plays. */
struct owned {
    struct shoal_operand base;
    size_t ready, released;
    int drops;
};

static bool owned_is_ready(const struct shoal_operand *operand, size_t begin, size_t end)
{
    (void)begin;
    return end <= ((const struct owned *)operand)->ready;
}

static void owned_release(struct shoal_operand *operand, size_t begin, size_t end)
{
    ((struct owned *)operand)->released += end - begin;
}

static void owned_drop(struct shoal_operand *operand)
{
    ((struct owned *)operand)->drops++;
}

static const struct shoal_operand_ops owned_ops = {.is_ready = owned_is_ready, .release = owned_release, .drop = owned_drop};

static void an_owner_need_not_have_all_functions(void **state)
{
    (void)state;
    uint32_t output[8];
    struct owned owned = {.base = {.ops = &owned_ops}, .ready = 4};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, output, 8);
    struct shoal_layout *former;
    assert_true(shoal_call_put_operands(&call, 1, RANKS, NULL, &owned.base, &former));
    assert_null(former);
    assert_true(shoal_call_is_asynchronous(&call));
    struct shoal_operand *operand = shoal_call_operand(&call, SHOAL_OUTPUT);
    assert_true(shoal_operand_is_ready(operand, 0, 4));
    assert_false(shoal_operand_is_ready(operand, 3, 5));
    assert_true(shoal_operand_is_ready(operand, 8, 8)); /* nothing is always ready */
    shoal_operand_release(operand, 0, 3);
    shoal_operand_release(operand, 3, 3);
    assert_int_equal(owned.released, 3);
    assert_true(shoal_operand_is_finished(operand));
    size_t run = 2;
    assert_ptr_equal(at_of(&call, SHOAL_OUTPUT, 0, 1, &run), &output[1]); /* the call's address */
    shoal_layout_free(call.layout);
    assert_int_equal(owned.drops, 1);
}

static const char *owned_lent_at(const struct shoal_operand *operand)
{
    return (const char *)operand;
}

/* Peers borrow the operands of a reduction, also of several tensors, which count as one vector. Nobody else writes the output of
 * a reduce-scatter, and an all-gather only moves data. */
static void operands_of_tensors_are_lent(void **state)
{
    (void)state;
    static const struct shoal_operand_ops lending_ops = {.lent_at = owned_lent_at, .drop = owned_drop};
    uint32_t memory[8] = {0};
    const struct shoal_tensor tensors[] = {{memory, memory, 1}, {memory + 4, memory + 4, 3}};
    const struct shoal_call_arrays arrays = {.tensors = tensors, .tensor_count = 2, .has_tensors = true};
    static const enum shoal_collective_type types[] = {SHOAL_COLLECTIVE_ALLREDUCE, SHOAL_COLLECTIVE_REDUCE_SCATTER,
                                                       SHOAL_COLLECTIVE_ALLGATHER};
    for (size_t i = 0; i < SHOAL_COUNT_OF(types); i++) {
        struct owned lenders[2] = {{.base = {.ops = &lending_ops}}, {.base = {.ops = &lending_ops}}};
        struct shoal_call call = call_of(types[i], NULL, NULL, 4);
        call.arrays = &arrays;
        assert_true(shoal_call_lay_out(&call, 1, RANKS));
        struct shoal_layout *former;
        assert_true(
            shoal_call_put_operands(&call, 1, RANKS, &lenders[SHOAL_INPUT].base, &lenders[SHOAL_OUTPUT].base, &former));
        for (int which = 0; which < 2; which++) {
            const struct shoal_call_memory found =
                shoal_call_locate(&call, (enum shoal_block_operand)which, 1, RANKS, element);
            const bool is_lent = types[i] == SHOAL_COLLECTIVE_ALLREDUCE ||
                                 (types[i] == SHOAL_COLLECTIVE_REDUCE_SCATTER && which == SHOAL_INPUT);
            assert_ptr_equal(found.at, is_lent ? &lenders[which].base : NULL);
            assert_true(found.is_lent == is_lent);
        }
        shoal_layout_free(former);
        shoal_layout_free(call.layout);
        assert_true(lenders[SHOAL_INPUT].drops == 1 && lenders[SHOAL_OUTPUT].drops == 1);
    }
}

/* Operands that are put in place of others are dropped with the call's layout, and the others with its former one. */
static void operands_replace_others(void **state)
{
    (void)state;
    struct owned first = {.base = {.ops = &owned_ops}}, second = {.base = {.ops = &owned_ops}},
                 kept = {.base = {.ops = &owned_ops}};
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, 8);
    struct shoal_layout *former;
    assert_true(shoal_call_put_operands(&call, 1, RANKS, &first.base, &kept.base, &former));
    assert_null(former);
    struct shoal_layout *const before = call.layout;
    assert_true(shoal_call_put_operands(&call, 1, RANKS, &second.base, NULL, &former));
    assert_ptr_equal(former, before);
    assert_ptr_equal(shoal_call_operand(&call, SHOAL_INPUT), &second.base);
    assert_ptr_equal(shoal_call_operand(&call, SHOAL_OUTPUT), &kept.base);
    assert_int_equal(first.drops, 0);
    shoal_layout_free(former);
    assert_int_equal(first.drops, 1);
    assert_int_equal(kept.drops, 0);
    shoal_layout_free(call.layout);
    assert_int_equal(first.drops, 1);
    assert_int_equal(second.drops, 1);
    assert_int_equal(kept.drops, 1);
}

/* Whoever copies an operand looks up addresses in the former layout, also when the call is over. */
static void a_former_layout_has_the_same_parts(void **state)
{
    (void)state;
    uint32_t input[16] = {0}, output[16] = {0};
    const size_t sent[RANKS] = {3, 0, 5}, received[RANKS] = {2, 0, 4};
    const struct shoal_call_arrays arrays = {.sent = sent, .received = received};
    for (int is_call_first = 0; is_call_first < 2; is_call_first++) {
        const long live = alloc_live;
        struct owned owned = {.base = {.ops = &owned_ops}};
        struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLTOALL, input, output, 5), copied;
        call.arrays = &arrays;
        assert_true(shoal_call_lay_out(&call, 1, RANKS));
        copied = call;
        assert_true(shoal_call_put_operands(&call, 1, RANKS, &owned.base, NULL, &copied.layout));
        assert_ptr_not_equal(call.layout, copied.layout);
        assert_int_equal(call.layout->detail, copied.layout->detail);
        assert_true(shoal_call_has_peer_counts(&call));
        shoal_layout_free(is_call_first ? call.layout : copied.layout);
        const struct shoal_call *left = is_call_first ? &copied : &call;
        size_t run = 2;
        assert_ptr_equal(at_of(left, SHOAL_INPUT, 2, 1, &run), &input[4]);
        assert_ptr_equal(at_of(left, SHOAL_OUTPUT, 2, 3, &run), &output[5]);
        assert_int_equal(shoal_call_length(left, 1, 1, 2), 5);
        assert_int_equal(owned.drops, is_call_first);
        shoal_layout_free(left->layout);
        assert_int_equal(owned.drops, 1);
        assert_int_equal(alloc_live, live);
    }
}

static void without_memory_nothing_changes(void **state)
{
    (void)state;
    uint32_t memory[16] = {0};
    const size_t counts[RANKS] = {1, 2, 3};
    const struct shoal_tensor tensors[] = {{memory, memory, 1}, {memory + 4, memory + 4, 7}};
    const struct shoal_call_arrays forms[] = {{.sent = counts, .received = counts},
                                              {.tensors = tensors, .tensor_count = 2, .has_tensors = true}};
    for (int form = 0; form < 2; form++) {
        bool is_put = false;
        long limit = 0;
        const long live = alloc_live;
        for (; !is_put; limit++) {
            struct owned owned = {.base = {.ops = &owned_ops}};
            struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLTOALL, memory, memory, 8);
            call.arrays = &forms[form];
            alloc_left = limit;
            const bool is_laid_out = shoal_call_lay_out(&call, 1, RANKS);
            struct shoal_layout *const before = call.layout;
            struct shoal_layout *former = NULL;
            is_put = shoal_call_put_operands(&call, 1, RANKS, &owned.base, NULL, &former);
            alloc_left = LONG_MAX;
            assert_true(is_laid_out == (before != NULL));
            assert_true(is_put || call.layout == before);
            assert_true(is_put == (shoal_call_operand(&call, SHOAL_INPUT) == &owned.base));
            assert_true(former == (is_put ? before : NULL));
            assert_true(form == 0 || is_put || !before || (before->operands[SHOAL_INPUT] && before->operands[SHOAL_OUTPUT]));
            shoal_layout_free(former);
            shoal_layout_free(call.layout);
            assert_int_equal(owned.drops, is_put);
            assert_int_equal(alloc_live, live);
            assert_true(limit < 100);
        }
        assert_true(limit > 2); /* there were allocations to fail */
    }
}

/* ---- Copies of a device -------------------------------------------------------------------------------------------------- */

#define SLOT_BYTES ((size_t)1024)
#define UNIT (SLOT_BYTES / sizeof(uint32_t))

struct bench {
    struct shoal_device_ring ring;
    struct shoal_device_ring_operand *copied;
    struct shoal_operand *operand;
    void *memory;
};

static void open_bench(struct bench *bench, bool is_inward, size_t count)
{
    bench->memory = aligned_alloc(SHOAL_PAGE, shoal_device_ring_bytes(2, SLOT_BYTES));
    assert_non_null(bench->memory);
    shoal_device_ring_init(&bench->ring, is_inward, 2, SLOT_BYTES, 7, bench->memory);
    bench->copied = shoal_device_ring_open(&bench->ring, 1, 1, count, element);
    assert_non_null(bench->copied);
    bench->operand = shoal_operand_of_device_copy(bench->copied);
    assert_non_null(bench->operand);
    shoal_device_ring_reserve(bench->copied);
}

static void a_device_copy_is_ready_unit_by_unit(void **state)
{
    (void)state;
    struct bench bench;
    open_bench(&bench, true, 2 * UNIT);
    assert_false(bench.operand->is_only_put);
    assert_false(shoal_operand_is_ready(bench.operand, 0, 1));
    atomic_store(&bench.ring.by_stream[0].value, 8); /* the stream has copied the first unit in */
    assert_true(shoal_operand_is_ready(bench.operand, 0, UNIT));
    assert_false(shoal_operand_is_ready(bench.operand, 0, UNIT + 1));
    size_t run = 2 * UNIT;
    assert_ptr_equal(bench.operand->ops->address(bench.operand, 0, 3, &run), bench.ring.data + 3 * element);
    assert_int_equal(run, UNIT - 3);
    shoal_operand_release(bench.operand, 0, UNIT);
    assert_int_equal(atomic_load(&bench.ring.by_engine[0].value), 8);
    shoal_device_ring_leave(bench.copied);
    shoal_operand_drop(bench.operand); /* not all was released: the stream must not wait for ever */
    assert_true(bench.ring.is_let_go);
    free(bench.memory);
}

static void an_output_is_finished_when_its_device_has_it(void **state)
{
    (void)state;
    struct bench bench;
    open_bench(&bench, false, UNIT);
    assert_true(shoal_operand_is_ready(bench.operand, 0, UNIT));
    assert_false(shoal_operand_is_finished(bench.operand));
    shoal_operand_release(bench.operand, 0, UNIT);
    assert_false(shoal_operand_is_finished(bench.operand));
    atomic_store(&bench.ring.by_stream[0].value, 8);
    assert_true(shoal_operand_is_finished(bench.operand));
    shoal_device_ring_leave(bench.copied);
    shoal_operand_drop(bench.operand);
    assert_false(bench.ring.is_let_go);
    free(bench.memory);
}

static void an_input_that_stays_is_only_put(void **state)
{
    (void)state;
    uint32_t memory[5] = {0};
    struct shoal_device_ring ring;
    void *counters = aligned_alloc(SHOAL_PAGE, shoal_device_ring_bytes(2, 0));
    assert_non_null(counters);
    shoal_device_ring_init(&ring, true, 2, 0, 0, counters);
    atomic_int holders = 1;
    struct shoal_device_ring_operand *copied = shoal_device_ring_open_stay(&ring, 5, &holders);
    assert_non_null(copied);
    struct shoal_operand *operand = shoal_operand_of_device_copy(copied);
    assert_non_null(operand);
    shoal_device_ring_reserve(copied);
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_SCATTER, memory, NULL, 5);
    struct shoal_layout *former;
    assert_true(shoal_call_put_operands(&call, 1, RANKS, operand, NULL, &former));
    assert_null(former);
    assert_true(shoal_operand_is_only_put(shoal_call_operand(&call, SHOAL_INPUT)));
    assert_false(shoal_operand_is_only_put(shoal_call_operand(&call, SHOAL_OUTPUT)));
    size_t run = 3;
    assert_ptr_equal(at_of(&call, SHOAL_INPUT, 0, 2, &run), &memory[2]); /* the device's address, for the adapter */
    shoal_device_ring_leave(copied);
    shoal_layout_free(call.layout);
    assert_int_equal(holders, 0);
    free(counters);
}

/* ---- Sums of devices ----------------------------------------------------------------------------------------------------- */

/* The steps that name a slot are works of the device, in the order of its plan; the engine does all others. */
static void a_device_sum_runs_steps_that_name_slots(void **state)
{
    (void)state;
    const struct shoal_device_stage_options options = {.slots = 2, .slot_bytes = SHOAL_PAGE, .ranks = 2, .hosts = 2};
    struct shoal_device_stage stage;
    void *memory = aligned_alloc(SHOAL_PAGE, shoal_device_stage_bytes(&options));
    assert_non_null(memory);
    shoal_device_stage_init(&stage, &options, memory);
    struct shoal_device_sum *sum = shoal_device_sum_open(&stage, 3 * SHOAL_PAGE / element, element);
    assert_non_null(sum);
    struct shoal_operand *both = shoal_operand_of_device_sum(sum);
    assert_non_null(both);
    shoal_device_sum_reserve(sum);
    const struct shoal_block slot = shoal_on_device(0, SHOAL_ON_DEVICE_SLOT, 0, 1),
                             out = shoal_on_device(0, SHOAL_ON_DEVICE_OUT, 0, 1),
                             back = shoal_on_device(0, SHOAL_ON_DEVICE_BACK, 0, 1), staging = shoal_staging(0, 0, 0, 1);
    const struct {
        struct shoal_block from, to;
        enum shoal_device_work work;
    } steps[] = {{shoal_input(0, 0, 1), slot, SHOAL_DEVICE_BRING},
                 {slot, slot, SHOAL_DEVICE_REDUCE},
                 {slot, out, SHOAL_DEVICE_HAND_OUT},
                 {back, slot, SHOAL_DEVICE_TAKE_BACK},
                 {slot, shoal_output(0, 0, 1), SHOAL_DEVICE_GATHER}};
    assert_int_equal(both->ops->run(both, out, staging, 0), SHOAL_OPERAND_DOES_NOTHING);
    assert_int_equal(both->ops->run(both, staging, back, 0), SHOAL_OPERAND_DOES_NOTHING);
    for (size_t i = 0; i < SHOAL_COUNT_OF(steps); i++) {
        assert_int_equal(both->ops->run(both, steps[i].from, steps[i].to, 1), SHOAL_OPERAND_IS_AT_WORK);
        assert_int_equal(atomic_load(&stage.begin[steps[i].work][1].value), 1); /* the device's stream begins */
        assert_int_equal(atomic_load(&stage.begin[steps[i].work][0].value), 0);
        atomic_store(&stage.ended[steps[i].work][1].value, 1);
        assert_int_equal(both->ops->run(both, steps[i].from, steps[i].to, 1), SHOAL_OPERAND_HAS_DONE);
    }
    assert_int_equal(both->chunk_elements, SHOAL_PAGE / element);
    assert_true(both->ops->block_address(both, out, 1, 1) - both->ops->block_address(both, out, 1, 0) == (ptrdiff_t)element);
    assert_ptr_not_equal(both->ops->block_address(both, out, 1, 0), both->ops->block_address(both, back, 1, 0));
    shoal_device_sum_leave(sum);
    shoal_operand_drop(both);
    free(memory);
}

/* One object is both operands, and is dropped once. Ranks compare who does the steps. */
static void a_device_sum_is_both_operands(void **state)
{
    (void)state;
    const struct shoal_device_stage_options options = {.slots = 2, .slot_bytes = SHOAL_PAGE, .ranks = 2, .hosts = 1};
    struct shoal_device_stage stage;
    void *memory = aligned_alloc(SHOAL_PAGE, shoal_device_stage_bytes(&options));
    assert_non_null(memory);
    shoal_device_stage_init(&stage, &options, memory);
    struct shoal_device_sum *sum = shoal_device_sum_open(&stage, 5, element);
    struct shoal_call call = call_of(SHOAL_COLLECTIVE_ALLREDUCE, NULL, NULL, 5);
    assert_non_null(sum);
    assert_int_equal(shoal_call_way(&call), SHOAL_WAY_ENGINES);
    struct shoal_operand *both = shoal_operand_of_device_sum(sum);
    assert_non_null(both);
    struct shoal_layout *former;
    assert_true(shoal_call_put_operands(&call, 1, 2, both, both, &former));
    assert_null(former);
    assert_int_equal(shoal_call_way(&call), SHOAL_WAY_OWNERS);
    assert_true(shoal_call_is_asynchronous(&call));
    assert_true(shoal_operand_is_ready(both, 0, 5)); /* its steps wait instead */
    assert_true(shoal_operand_is_finished(both));
    shoal_operand_release(both, 0, 5);
    shoal_layout_free(call.layout);
    assert_int_equal(sum->holders, 1);
    shoal_device_sum_leave(sum);
    free(memory);
}

/* ---- Operands that a peer lends ------------------------------------------------------------------------------------------ */

/* The card is at the beginning of the segment in which the operand is, wherever that begins there. */
static void a_card_is_found_from_the_first_element(void **state)
{
    (void)state;
    const uint64_t offsets[] = {0, 4096, SHOAL_LOCATION_OFFSET_MAX};
    for (size_t i = 0; i < SHOAL_COUNT_OF(offsets); i++) {
        const struct shoal_lent_card card = shoal_lent_card_of(shoal_location_of(77, offsets[i]));
        assert_int_equal(card.at, shoal_location_of(77, 0));
        assert_int_equal(card.bytes, sizeof(struct shoal_device_card));
    }
}

/* A segment of a peer has a card and two rings, of 3 slots with 32 elements in each of two parts. The operands begin in slot 2,
 * so their next unit is in slot 0. */
static void lent_elements_are_found_in_the_ring_of_their_operand(void **state)
{
    (void)state;
    enum { LENT_SLOTS = 3, LENT_UNIT = 32, LENT_PARTS = 2, LENT_SLOT = LENT_UNIT * LENT_PARTS };
    struct {
        struct shoal_device_card card;
        uint32_t rings[2][LENT_SLOTS * LENT_SLOT];
    } *const segment = calloc(1, sizeof *segment);
    assert_non_null(segment);
    for (int is_inward = 0; is_inward < 2; is_inward++) {
        const struct shoal_device_ring ring = {.is_inward = is_inward,
                                               .slots = LENT_SLOTS,
                                               .slot_bytes = LENT_SLOT * sizeof(uint32_t),
                                               .data = (char *)segment->rings[is_inward]};
        shoal_device_card_describe(&segment->card, &ring);
    }
    for (int is_inward = 0; is_inward < 2; is_inward++) {
        uint32_t *const ring = segment->rings[is_inward];
        const struct shoal_lent lent = {.card = &segment->card,
                                        .first = (const char *)&ring[2 * LENT_SLOT],
                                        .operand = is_inward ? SHOAL_INPUT : SHOAL_OUTPUT,
                                        .most_parts = LENT_PARTS,
                                        .element_bytes = sizeof(uint32_t)};
        size_t run = 100;
        assert_ptr_equal(shoal_lent_address(&lent, 0, 0, &run), &ring[2 * LENT_SLOT]);
        assert_int_equal(run, LENT_UNIT);
        run = 100;
        assert_ptr_equal(shoal_lent_address(&lent, 1, 3, &run), &ring[2 * LENT_SLOT + LENT_UNIT + 3]);
        assert_int_equal(run, LENT_UNIT - 3);
        run = 5;
        assert_ptr_equal(shoal_lent_address(&lent, 1, LENT_UNIT + 4, &run), &ring[LENT_UNIT + 4]);
        assert_int_equal(run, 5);
    }
    free(segment);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_memory_has_no_object),
        cmocka_unit_test(no_memory_has_an_address_only_without_elements),
        cmocka_unit_test(parts_begin_at_their_offsets),
        cmocka_unit_test(details_differ_with_lengths),
        cmocka_unit_test(tensors_count_as_one_vector),
        cmocka_unit_test(one_tensor_is_plain_memory),
        cmocka_unit_test(no_tensor_is_an_empty_vector),
        cmocka_unit_test(an_operand_is_one_piece_of_memory),
        cmocka_unit_test(each_tensor_is_a_piece_of_memory),
        cmocka_unit_test(small_tensors_are_packed),
        cmocka_unit_test(plain_memory_is_in_reach_of_peers),
        cmocka_unit_test(other_operands_are_out_of_reach),
        cmocka_unit_test(an_owner_need_not_have_all_functions),
        cmocka_unit_test(operands_of_tensors_are_lent),
        cmocka_unit_test(operands_replace_others),
        cmocka_unit_test(a_former_layout_has_the_same_parts),
        cmocka_unit_test(without_memory_nothing_changes),
        cmocka_unit_test(a_device_copy_is_ready_unit_by_unit),
        cmocka_unit_test(an_output_is_finished_when_its_device_has_it),
        cmocka_unit_test(an_input_that_stays_is_only_put),
        cmocka_unit_test(a_device_sum_runs_steps_that_name_slots),
        cmocka_unit_test(a_device_sum_is_both_operands),
        cmocka_unit_test(a_card_is_found_from_the_first_element),
        cmocka_unit_test(lent_elements_are_found_in_the_ring_of_their_operand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
