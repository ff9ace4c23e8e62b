/* The agreement of survivors without connections: messages are delivered in any order, late or twice, and ranks are lost at any
 * moment. Every run uses the same seeds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "membership/survivors_board.h"

#define RANKS_MAX 9
#define MESSAGES_MAX 4096
#define SEEDS 4000

struct letter {
    int from;
    struct shoal_survivors_message message;
    bool has[RANKS_MAX]; /* the ranks that have it, the sender included */
};

struct world {
    int size;
    bool drops; /* letters, as when there are too many */
    uint64_t random;
    struct shoal_survivors ranks[RANKS_MAX];
    bool is_dead[RANKS_MAX];
    bool has_called[RANKS_MAX];
    bool has_returned[RANKS_MAX];
    struct shoal_survivors_view proposed[RANKS_MAX], returned[RANKS_MAX];
    struct letter *letters;
    int letter_count;
};

static uint32_t draw(struct world *world, uint32_t below)
{
    world->random = world->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(world->random >> 33) % below;
}

static struct world *make_world(int size, uint64_t seed)
{
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    world->size = size;
    world->random = seed * 977 + 1;
    world->letters = calloc(MESSAGES_MAX, sizeof *world->letters);
    assert_non_null(world->letters);
    for (int r = 0; r < size; r++)
        assert_true(shoal_survivors_init(&world->ranks[r], r, size));
    return world;
}

static void free_world(struct world *world)
{
    for (int r = 0; r < world->size; r++)
        shoal_survivors_fini(&world->ranks[r]);
    free(world->letters);
    free(world);
}

/* Writes and reads the message, as in transit. */
static void post(struct world *world, int from, const struct shoal_survivors_message *message)
{
    unsigned char bytes[SHOAL_SURVIVORS_BYTES_MAX];
    const size_t count = shoal_survivors_write(message, world->size, bytes);
    assert_true(world->letter_count < MESSAGES_MAX);
    struct letter *letter = &world->letters[world->letter_count++];
    *letter = (struct letter){.from = from};
    assert_true(shoal_survivors_read(bytes, count, world->size, &letter->message));
    letter->has[from] = true;
}

static void take_result(struct world *world, int rank)
{
    const struct shoal_survivors_view *agreed = shoal_survivors_agreed(&world->ranks[rank]);
    if (!agreed || world->has_returned[rank])
        return;
    world->returned[rank] = *agreed;
    world->has_returned[rank] = true;
    shoal_survivors_finish(&world->ranks[rank]);
}

static void work(struct world *world, int rank)
{
    struct shoal_survivors_message message;
    shoal_survivors_step(&world->ranks[rank]);
    while (shoal_survivors_take(&world->ranks[rank], &message))
        post(world, rank, &message);
    take_result(world, rank);
}

static void call(struct world *world, int rank)
{
    if (world->is_dead[rank] || world->has_called[rank])
        return;
    world->has_called[rank] = true;
    assert_true(shoal_survivors_propose(&world->ranks[rank], &world->proposed[rank]));
    work(world, rank);
}

/* A living rank that has a letter passes it on. */
static bool can_come(const struct world *world, const struct letter *letter)
{
    for (int r = 0; r < world->size; r++) {
        if (letter->has[r] && !world->is_dead[r])
            return true;
    }
    return false;
}

static bool deliver(struct world *world, int number, int to)
{
    struct letter *letter = &world->letters[number];
    if (world->is_dead[to] || letter->has[to] || !can_come(world, letter))
        return false;
    letter->has[to] = true;
    if (world->drops && draw(world, 10) == 0)
        return true;
    const struct shoal_survivors_message message = letter->message;
    shoal_survivors_receive(&world->ranks[to], letter->from, &message);
    if (draw(world, 20) == 0)
        shoal_survivors_receive(&world->ranks[to], letter->from, &message);
    work(world, to);
    return true;
}

static void lose(struct world *world, int rank)
{
    int living = 0;
    for (int r = 0; r < world->size; r++)
        living += !world->is_dead[r];
    if (living > 1)
        world->is_dead[rank] = true;
}

static void tell_loss(struct world *world, int of, int to)
{
    if (!world->is_dead[of] || world->is_dead[to])
        return;
    shoal_survivors_end(&world->ranks[to], of);
    work(world, to);
}

/* Lets one random event happen. */
static void happen(struct world *world, uint32_t losses_per_myriad)
{
    const int rank = (int)draw(world, (uint32_t)world->size), other = (int)draw(world, (uint32_t)world->size);
    const uint32_t recent = world->letter_count < 40 ? (uint32_t)world->letter_count : 40;
    if (draw(world, 10000) < losses_per_myriad)
        lose(world, rank);
    switch (draw(world, 8)) {
    case 0:
        call(world, rank);
        return;
    case 1:
        tell_loss(world, other, rank);
        return;
    case 2:
        if (draw(world, 10) == 0 && !world->is_dead[rank] && world->letter_count < MESSAGES_MAX / 2)
            shoal_survivors_repeat(&world->ranks[rank]);
        return;
    default:
        if (world->letter_count)
            (void)deliver(world, world->letter_count - 1 - (int)draw(world, recent), rank);
        return;
    }
}

/* Delivers every letter that can arrive, and reports every loss to every rank. */
static void settle(struct world *world)
{
    world->drops = false;
    for (int round = 0; round < 6; round++) {
        for (int r = 0; r < world->size; r++) {
            call(world, r);
            for (int of = 0; of < world->size; of++)
                tell_loss(world, of, r);
        }
        for (int moved = 1; moved;) {
            moved = 0;
            for (int i = 0; i < world->letter_count; i++) {
                for (int r = 0; r < world->size; r++)
                    moved += deliver(world, i, r);
            }
        }
        for (int r = 0; r < world->size; r++) {
            if (!world->is_dead[r])
                shoal_survivors_repeat(&world->ranks[r]);
            if (!world->is_dead[r])
                work(world, r);
        }
    }
}

static void propose_all(struct world *world)
{
    for (int r = 0; r < world->size; r++) {
        struct shoal_survivors_view *view = &world->proposed[r];
        *view = (struct shoal_survivors_view){.least = 10 + draw(world, 5)};
        for (int of = 0; of < world->size; of++)
            shoal_survivors_put(view, of, true);
    }
}

static bool equal(const struct shoal_survivors_view *a, const struct shoal_survivors_view *b)
{
    return memcmp(a->alive, b->alive, sizeof a->alive) == 0 && a->least == b->least;
}

static uint64_t least_of(const struct world *world, const struct shoal_survivors_view *set)
{
    uint64_t least = UINT64_MAX;
    for (int r = 0; r < world->size; r++) {
        if (shoal_survivors_has(set, r) && world->proposed[r].least < least)
            least = world->proposed[r].least;
    }
    return least;
}

/* All living ranks have returned the same decision, with the least number of its ranks. */
static void expect_agreement(const struct world *world, uint64_t seed)
{
    const struct shoal_survivors_view *first = NULL;
    for (int r = 0; r < world->size; r++) {
        if (world->is_dead[r])
            continue;
        if (!world->has_returned[r])
            fail_msg("seed %llu: rank %d of %d waits for rank %d", (unsigned long long)seed, r, world->size,
                     shoal_survivors_missing(&world->ranks[r], 0));
        first = first ? first : &world->returned[r];
        if (!equal(first, &world->returned[r]))
            fail_msg("seed %llu: rank %d returned another decision", (unsigned long long)seed, r);
        assert_true(shoal_survivors_has(first, r));
    }
    assert_int_equal(first->least, least_of(world, first));
}

static void survivors_agree_whatever_is_lost_and_late(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct world *world = make_world(1 + (int)(seed % RANKS_MAX), seed);
        propose_all(world);
        world->drops = seed % 2;
        for (uint32_t i = 0, steps = 100 + draw(world, 900); i < steps; i++)
            happen(world, (uint32_t)(seed / 2 % 4) * 40);
        settle(world);
        expect_agreement(world, seed);
        free_world(world);
    }
}

/* One agreement follows the other, while some ranks have not finished the one before. */
static void survivors_agree_again_and_again(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < SEEDS / 10; seed++) {
        struct world *world = make_world(5, seed);
        for (int epoch = 0; epoch < 4; epoch++) {
            propose_all(world);
            for (int i = 0; i < 200; i++)
                happen(world, 50);
            settle(world);
            expect_agreement(world, seed);
            memset(world->has_called, 0, sizeof world->has_called);
            memset(world->has_returned, 0, sizeof world->has_returned);
            if (world->letter_count > MESSAGES_MAX / 8)
                break;
        }
        free_world(world);
    }
}

/* Delivers the letters of that kind of one rank now. */
static void bring(struct world *world, int from, enum shoal_survivors_kind kind, int to)
{
    for (int i = 0; i < world->letter_count; i++) {
        if (world->letters[i].from == from && world->letters[i].message.kind == kind)
            (void)deliver(world, i, to);
    }
}

static void bring_to_all(struct world *world, int from, enum shoal_survivors_kind kind)
{
    for (int r = 0; r < world->size; r++)
        bring(world, from, kind, r);
}

static void propose_and_hear(struct world *world)
{
    propose_all(world);
    for (int r = 0; r < world->size; r++)
        call(world, r);
    for (int r = 0; r < world->size; r++)
        bring_to_all(world, r, SHOAL_SURVIVORS_PROPOSAL);
}

static void lose_and_tell(struct world *world, int rank)
{
    lose(world, rank);
    for (int r = 0; r < world->size; r++)
        tell_loss(world, rank, r);
}

/* Rank 3 has returned with the lost coordinator in the set: so must the others. */
static void survivors_repeat_what_one_of_them_returned(void **state)
{
    struct world *world = make_world(4, 1);
    (void)state;
    propose_and_hear(world);
    bring_to_all(world, 0, SHOAL_SURVIVORS_PREPARE);
    for (int r = 1; r < 4; r++)
        bring(world, r, SHOAL_SURVIVORS_PROMISE, 0);
    bring_to_all(world, 0, SHOAL_SURVIVORS_DECISION);
    for (int r = 1; r < 4; r++)
        bring(world, r, SHOAL_SURVIVORS_ADOPTED, 3);
    assert_true(world->has_returned[3]);
    assert_false(world->has_returned[1] || world->has_returned[2]);
    lose_and_tell(world, 0);
    for (int r = 2; r < 4; r++) {
        bring(world, 1, SHOAL_SURVIVORS_PREPARE, r);
        bring(world, r, SHOAL_SURVIVORS_PROMISE, 1);
    }
    settle(world);
    expect_agreement(world, 1);
    assert_true(shoal_survivors_has(&world->returned[1], 0));
    free_world(world);
}

/* A decision does not count if it arrives after all have promised to follow another rank. */
static void survivors_do_not_follow_a_late_decision(void **state)
{
    struct world *world = make_world(4, 1);
    (void)state;
    propose_and_hear(world);
    bring_to_all(world, 0, SHOAL_SURVIVORS_PREPARE);
    for (int r = 1; r < 4; r++)
        bring(world, r, SHOAL_SURVIVORS_PROMISE, 0);
    for (int r = 1; r < 4; r++) { /* its decision is still under way */
        shoal_survivors_end(&world->ranks[r], 0);
        work(world, r);
    }
    bring_to_all(world, 1, SHOAL_SURVIVORS_PREPARE);
    bring(world, 2, SHOAL_SURVIVORS_PROMISE, 1);
    bring_to_all(world, 0, SHOAL_SURVIVORS_DECISION);
    for (int r = 1; r < 4; r++)
        bring_to_all(world, r, SHOAL_SURVIVORS_ADOPTED);
    assert_false(world->has_returned[1] || world->has_returned[2] || world->has_returned[3]);
    lose(world, 0);
    settle(world);
    expect_agreement(world, 1);
    assert_false(shoal_survivors_has(&world->returned[1], 0));
    free_world(world);
}

/* The others leave rank 0 out, which calls as they do. All learn the same, rank 0 included. */
static void survivors_leave_out_a_rank_that_others_exclude(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < SEEDS / 10; seed++) {
        struct world *world = make_world(6, seed);
        propose_all(world);
        for (int r = 1; r < 6; r++)
            shoal_survivors_put(&world->proposed[r], 0, false);
        for (int i = 0; i < 100; i++)
            happen(world, 0);
        settle(world);
        for (int r = 1; r < 6; r++) {
            assert_true(world->has_returned[r]);
            assert_false(shoal_survivors_has(&world->returned[r], 0));
            assert_int_equal(shoal_survivors_count(&world->returned[r], 6), 5);
            assert_true(equal(&world->returned[r], &world->returned[1]));
        }
        assert_true(shoal_survivors_is_left_out(&world->ranks[0]) || equal(&world->returned[0], &world->returned[1]));
        free_world(world);
    }
}

static void exclude_some(struct world *world)
{
    propose_all(world);
    for (int r = 0; r < world->size; r++) {
        for (int of = 0; of < world->size; of++)
            shoal_survivors_put(&world->proposed[r], of, of == r || draw(world, 6) > 0);
    }
}

/* Ranks exclude others at random, ranks are lost at random, and letters drop. Not all may return. But a rank that returns shares
 * its decision with every living rank in it, and no decision has two ranks of which one excludes the other. */
static void survivors_never_continue_with_different_sets(void **state)
{
    unsigned returned = 0;
    (void)state;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct world *world = make_world(2 + (int)(seed % (RANKS_MAX - 1)), seed);
        exclude_some(world);
        world->drops = seed % 2;
        for (uint32_t i = 0, steps = 100 + draw(world, 900); i < steps; i++)
            happen(world, (uint32_t)(seed / 2 % 4) * 40);
        settle(world);
        for (int r = 0; r < world->size; r++) {
            const struct shoal_survivors_view *view = &world->returned[r];
            if (world->is_dead[r] || !world->has_returned[r] || !shoal_survivors_has(view, r))
                continue;
            returned++;
            for (int of = 0; of < world->size; of++) {
                if (!shoal_survivors_has(view, of))
                    continue;
                assert_true(shoal_survivors_has(&world->proposed[r], of) && shoal_survivors_has(&world->proposed[of], r));
                assert_true(world->is_dead[of] || (world->has_returned[of] && equal(&world->returned[of], view)));
            }
        }
        free_world(world);
    }
    assert_true(returned > SEEDS);
}

/* A rank that never calls holds up the others, until they exclude it. It may also be more than half of them. */
static void survivors_do_not_wait_for_a_rank_that_they_exclude(void **state)
{
    (void)state;
    for (int silent = 1; silent < 4; silent++) {
        struct world *world = make_world(4, 1);
        propose_all(world);
        for (int r = 0; r < silent; r++)
            world->has_called[r] = true;
        settle(world);
        for (int r = silent; r < 4; r++) {
            assert_false(world->has_returned[r]);
            for (int of = 0; of < silent; of++)
                shoal_survivors_put(&world->proposed[r], of, false);
            world->has_called[r] = false; /* it asks again */
        }
        settle(world);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(world->has_returned[r], r >= silent);
            if (r >= silent)
                assert_int_equal(shoal_survivors_count(&world->returned[r], 4), 4 - silent);
        }
        free_world(world);
    }
}

/* Rank 3 stops after it has proposed: before its promise, after it, or when others have adopted the decision. */
static struct world *make_world_that_waits(int stops_after)
{
    struct world *world = make_world(4, 1);
    propose_and_hear(world);
    bring_to_all(world, 0, SHOAL_SURVIVORS_PREPARE);
    for (int r = 1; r < 3 + (stops_after > 0); r++)
        bring(world, r, SHOAL_SURVIVORS_PROMISE, 0);
    for (int r = 1; r < 3 && stops_after > 1; r++)
        bring(world, 0, SHOAL_SURVIVORS_DECISION, r);
    for (int r = 0; r < 3; r++)
        assert_false(world->has_returned[r]);
    world->is_dead[3] = true; /* the others regard it as alive: nobody reports it as lost */
    return world;
}

static void agree_without_rank_3(struct world *world)
{
    for (int r = 0; r < 3; r++) {
        shoal_survivors_put(&world->proposed[r], 3, false);
        world->has_called[r] = world->has_returned[r] = false;
    }
    for (int r = 0; r < 3; r++)
        call(world, r);
    for (int i = 0; i < world->letter_count; i++) {
        for (int r = 0; r < 3; r++)
            (void)deliver(world, i, r);
    }
    for (int r = 0; r < 3; r++)
        assert_true(world->has_returned[r] && equal(&world->returned[r], &world->returned[0]));
}

/* The others, which may have adopted a decision with rank 3, exclude it, agree twice and end. When it resumes, it learns that it
 * was left out, at the latest in the next agreement. With `misses`, it receives only the messages of that one, as from
 * boards. */
static void survivors_leave_behind_a_rank_that_stops_in_the_middle(void **state)
{
    (void)state;
    for (int number = 0; number < 6; number++) {
        const bool misses = number % 2;
        struct world *world = make_world_that_waits(number / 2);
        agree_without_rank_3(world);
        agree_without_rank_3(world);
        assert_false(shoal_survivors_has(&world->returned[0], 3));
        world->is_dead[3] = false;
        for (int i = 0; i < world->letter_count; i++) {
            if (!misses || world->letters[i].message.epoch == 2)
                (void)deliver(world, i, 3);
        }
        for (int r = 0; r < 3; r++) /* it must not decide alone */
            shoal_survivors_end(&world->ranks[3], r);
        world->has_called[3] = world->has_returned[3] = false;
        call(world, 3);
        assert_int_equal(shoal_survivors_is_left_out(&world->ranks[3]), misses);
        assert_true(misses || (world->has_returned[3] && !shoal_survivors_has(&world->returned[3], 3)));
        free_world(world);
    }
}

/* Rank 0, the coordinator, decides, and its decision reaches nobody. */
static void decide_in_vain(struct world *world)
{
    propose_and_hear(world);
    bring_to_all(world, 0, SHOAL_SURVIVORS_PREPARE);
    for (int r = 1; r < world->size; r++)
        bring(world, r, SHOAL_SURVIVORS_PROMISE, 0);
}

/* Letters of rank 0 that have not come are lost. */
static void agree_without_rank_0(struct world *world)
{
    for (int r = 1; r < 3; r++) {
        shoal_survivors_put(&world->proposed[r], 0, false);
        world->has_called[r] = world->has_returned[r] = false;
        call(world, r);
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < world->letter_count; i++) {
            for (int r = 1; r < 3 && world->letters[i].from != 0; r++)
                (void)deliver(world, i, r);
        }
        for (int r = 1; r < 3; r++)
            shoal_survivors_repeat(&world->ranks[r]);
    }
    assert_true(world->has_returned[1] && world->has_returned[2] && !shoal_survivors_has(&world->returned[1], 0));
}

/* All of them before the next turn of rank 0, as from boards; `first`: the first epoch of which they are. */
static void bring_what_others_sent(struct world *world, uint64_t first)
{
    for (int i = 0; i < world->letter_count; i++) {
        if (world->letters[i].from != 0 && world->letters[i].message.epoch >= first)
            shoal_survivors_receive(&world->ranks[0], world->letters[i].from, &world->letters[i].message);
    }
    work(world, 0);
}

/* Rank 0, the coordinator, stops in the first or second agreement when it has decided and before others have its decision. They
 * exclude it, agree three times and perhaps end. When it resumes, its own decision names them all, but they have left it: it
 * returns nothing, although it receives only messages of later agreements. */
static void survivors_leave_behind_a_coordinator_whose_decision_nobody_has(void **state)
{
    (void)state;
    for (int number = 0; number < 16; number++) {
        struct world *world = make_world(3, 1);
        const uint64_t stops_in = 1 + (uint64_t)number % 2,
                       first = number / 2 % 2 ? stops_in + 1 + (uint64_t)number / 4 % 2 : 1;
        if (stops_in == 2) {
            propose_all(world);
            settle(world);
            for (int r = 0; r < 3; r++)
                assert_true(world->has_returned[r]);
            memset(world->has_called, 0, sizeof world->has_called);
            memset(world->has_returned, 0, sizeof world->has_returned);
        }
        decide_in_vain(world);
        world->is_dead[0] = true; /* nobody reports it as lost */
        for (int turn = 0; turn < 3; turn++)
            agree_without_rank_0(world);
        world->is_dead[0] = false;
        for (int r = 1; r < 3 && number / 8; r++)
            shoal_survivors_end(&world->ranks[0], r);
        bring_what_others_sent(world, first);
        assert_false(world->has_returned[0]);
        assert_true(shoal_survivors_is_left_out(&world->ranks[0]));
        free_world(world);
    }
}

static void survivors_name_whom_they_wait_for(void **state)
{
    struct world *world = make_world(4, 1);
    (void)state;
    propose_all(world);
    world->has_called[1] = world->has_called[3] = true;
    settle(world);
    for (int r = 0; r < 4; r += 2) {
        assert_false(world->has_returned[r]);
        assert_int_equal(shoal_survivors_missing(&world->ranks[r], 0), 1);
        assert_int_equal(shoal_survivors_missing(&world->ranks[r], 2), 3);
    }
    world->has_called[1] = world->has_called[3] = false;
    settle(world);
    expect_agreement(world, 1);
    free_world(world);
}

/* Only what was written is read. */
static void survivors_read_no_nonsense(void **state)
{
    struct shoal_survivors_message message = {.kind = SHOAL_SURVIVORS_PROPOSAL, .epoch = 3, .view.least = 5}, read;
    unsigned char bytes[SHOAL_SURVIVORS_BYTES_MAX + 1];
    (void)state;
    for (int r = 0; r < 11; r++)
        shoal_survivors_put(&message.view, r, r != 4);
    const size_t count = shoal_survivors_write(&message, 11, bytes);
    assert_int_equal(count, SHOAL_SURVIVORS_HEAD_BYTES + 2);
    assert_true(shoal_survivors_read(bytes, count, 11, &read));
    assert_int_equal(shoal_survivors_count(&read.view, 11), 10);
    assert_int_equal(read.view.least, 5);
    for (size_t less = 0; less < count; less++)
        assert_false(shoal_survivors_read(bytes, less, 11, &read));
    assert_false(shoal_survivors_read(bytes, count + 1, 11, &read));
    assert_false(shoal_survivors_read(bytes, count, 9, &read)); /* it has no rank 10 */
    const unsigned char spoiled[][2] = {{0, 0},  {0, 6}, {0, SHOAL_SURVIVORS_DECISION}, {1, 2}, {2, 2}, {8, 0},
                                        {16, 1}, {24, 1}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(spoiled); i++) {
        unsigned char copy[sizeof bytes];
        memcpy(copy, bytes, sizeof bytes);
        copy[spoiled[i][0]] = spoiled[i][1];
        if (shoal_survivors_read(copy, count, 11, &read))
            fail_msg("byte %d as %d is read", spoiled[i][0], spoiled[i][1]);
    }
    message = (struct shoal_survivors_message){.kind = SHOAL_SURVIVORS_PREPARE, .epoch = 1, .ballot = UINT64_MAX / 2 + 2};
    assert_false(shoal_survivors_read(bytes, shoal_survivors_write(&message, 11, bytes), 11, &read)); /* has no next one */
    message.ballot -= UINT64_C(1) << 40;
    assert_true(shoal_survivors_read(bytes, shoal_survivors_write(&message, 11, bytes), 11, &read));
}

/* A board keeps the last message of each kind, and a reader gets each version once. */
static void survivors_board_keeps_the_last_message_of_each_kind(void **state)
{
    struct shoal_survivors_board *board = calloc(1, sizeof *board);
    struct shoal_survivors_message message = {.kind = SHOAL_SURVIVORS_PREPARE, .epoch = 1, .ballot = 4096}, read;
    uint64_t version = 0, other = 0;
    (void)state;
    assert_non_null(board);
    assert_false(shoal_survivors_board_get(board, SHOAL_SURVIVORS_PREPARE, 3, &version, &read));
    shoal_survivors_board_put(board, 3, &message);
    message.ballot = 8192;
    shoal_survivors_board_put(board, 3, &message);
    assert_false(shoal_survivors_board_get(board, SHOAL_SURVIVORS_ADOPTED, 3, &other, &read));
    assert_true(shoal_survivors_board_get(board, SHOAL_SURVIVORS_PREPARE, 3, &version, &read));
    assert_int_equal(read.ballot, 8192);
    assert_false(shoal_survivors_board_get(board, SHOAL_SURVIVORS_PREPARE, 3, &version, &read));
    atomic_fetch_add(&board->notes[SHOAL_SURVIVORS_PREPARE - 1].version, 1); /* its writer died in the middle */
    assert_false(shoal_survivors_board_get(board, SHOAL_SURVIVORS_PREPARE, 3, &version, &read));
    free(board);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(survivors_agree_whatever_is_lost_and_late),
        cmocka_unit_test(survivors_agree_again_and_again),
        cmocka_unit_test(survivors_repeat_what_one_of_them_returned),
        cmocka_unit_test(survivors_do_not_follow_a_late_decision),
        cmocka_unit_test(survivors_leave_out_a_rank_that_others_exclude),
        cmocka_unit_test(survivors_never_continue_with_different_sets),
        cmocka_unit_test(survivors_do_not_wait_for_a_rank_that_they_exclude),
        cmocka_unit_test(survivors_leave_behind_a_rank_that_stops_in_the_middle),
        cmocka_unit_test(survivors_leave_behind_a_coordinator_whose_decision_nobody_has),
        cmocka_unit_test(survivors_name_whom_they_wait_for),
        cmocka_unit_test(survivors_read_no_nonsense),
        cmocka_unit_test(survivors_board_keeps_the_last_message_of_each_kind),
    };
    return cmocka_run_group_tests_name("survivors", tests, NULL, NULL);
}
