/* Which rank has which part of a model: arithmetic alone. See the public header.
 *
 * A rank is a number in a mixed radix: a digit for each letter of the strategy. A group lets some digits vary; the digit of the
 * replicas has two parts, the shard and its replica, so there are four digits. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/struct_bytes.h"
#include "shoal/placement.h"

enum digit { PIPELINE, TENSOR, SHARD, SHARD_REPLICA, DIGITS };

#define BIT(digit) (1U << (digit))

/* The digits that vary inside a group of each kind. */
static const unsigned varying_of_kind[] = {
    [SHOAL_GROUP_WORLD] = BIT(DIGITS) - 1,
    [SHOAL_GROUP_PIPELINE] = BIT(PIPELINE),
    [SHOAL_GROUP_TENSOR] = BIT(TENSOR),
    [SHOAL_GROUP_REPLICAS] = BIT(SHARD) | BIT(SHARD_REPLICA),
    [SHOAL_GROUP_DATA] = BIT(TENSOR) | BIT(SHARD) | BIT(SHARD_REPLICA),
    [SHOAL_GROUP_MODEL] = BIT(PIPELINE) | BIT(TENSOR),
    [SHOAL_GROUP_SHARDS] = BIT(SHARD),
    [SHOAL_GROUP_SHARD_REPLICAS] = BIT(SHARD_REPLICA),
};

/* A checked placement: the digits in the order of their strides, the fastest first. */
struct digits {
    enum digit order[DIGITS];
    int degree[DIGITS]; /* by digit */
    int stride[DIGITS]; /* by digit */
};

__attribute__((format(printf, 3, 4))) static enum shoal_status refuse(char *error, size_t error_bytes, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (error && error_bytes)
        vsnprintf(error, error_bytes, format, args);
    va_end(args);
    return SHOAL_ERR_ARGUMENT;
}

/* Returns the letters of a strategy, or NULL if it is not one. */
static const char *letters_of(const char *strategy)
{
    if (!strategy || strcmp(strategy, "cluster") == 0)
        return "DPT";
    if (strcmp(strategy, "spread") == 0)
        return "TPD";
    const int is_permutation = strlen(strategy) == 3 && strchr(strategy, 'D') && strchr(strategy, 'P') && strchr(strategy, 'T');
    return is_permutation ? strategy : NULL;
}

static enum shoal_status check_degrees(const struct shoal_placement *placement, char *error, size_t error_bytes)
{
    if (!placement || placement->struct_bytes < sizeof *placement)
        return refuse(error, error_bytes, "placement is NULL, or its struct_bytes is not set: use SHOAL_PLACEMENT_INIT");
    if (placement->ranks < 1 || placement->pipeline < 1 || placement->tensor < 1 || placement->shards < 1)
        return refuse(error, error_bytes, "%d ranks, pipeline degree %d, tensor degree %d, %d shards: each must be at least 1",
                      placement->ranks, placement->pipeline, placement->tensor, placement->shards);
    const int64_t whole = (int64_t)placement->pipeline * placement->tensor;
    if (placement->ranks % whole)
        return refuse(error, error_bytes,
                      "%d ranks cannot be divided into replicas of %" PRId64
                      " (pipeline degree %d x tensor degree %d): start a multiple of %" PRId64,
                      placement->ranks, whole, placement->pipeline, placement->tensor, whole);
    const int replicas = (int)(placement->ranks / whole);
    if (replicas % placement->shards)
        return refuse(
            error, error_bytes,
            "%d replicas (%d ranks / pipeline degree %d / tensor degree %d) cannot be divided into groups of %d shards: "
            "use a divisor of %d",
            replicas, placement->ranks, placement->pipeline, placement->tensor, placement->shards, replicas);
    return SHOAL_OK;
}

/* Fills in the order of the digits for the letters of a strategy. The digit of the replicas becomes two, of which the shard is
 * the faster. */
static void order_digits(const char *letters, enum digit *order)
{
    size_t count = 0;
    for (size_t i = strlen(letters); i-- > 0;) {
        if (letters[i] == 'D') {
            order[count++] = SHARD;
            order[count++] = SHARD_REPLICA;
        } else {
            order[count++] = letters[i] == 'P' ? PIPELINE : TENSOR;
        }
    }
}

static enum shoal_status open_digits(struct digits *digits, const struct shoal_placement *placement, int rank, char *error,
                                     size_t error_bytes)
{
    const enum shoal_status status = check_degrees(placement, error, error_bytes);
    if (status != SHOAL_OK)
        return status;
    const char *letters = letters_of(placement->strategy);
    if (!letters)
        return refuse(error, error_bytes,
                      "the placement strategy is \"%s\", but must be cluster, spread, or the letters D, P and T in any order",
                      placement->strategy);
    if (rank < 0 || rank >= placement->ranks)
        return refuse(error, error_bytes, "rank %d is out of range: there are %d ranks", rank, placement->ranks);
    digits->degree[PIPELINE] = placement->pipeline;
    digits->degree[TENSOR] = placement->tensor;
    digits->degree[SHARD] = placement->shards;
    digits->degree[SHARD_REPLICA] = placement->ranks / placement->pipeline / placement->tensor / placement->shards;
    order_digits(letters, digits->order);
    int stride = 1;
    for (size_t i = 0; i < DIGITS; i++) {
        digits->stride[digits->order[i]] = stride;
        stride *= digits->degree[digits->order[i]];
    }
    return SHOAL_OK;
}

static int placement_digit(const struct digits *digits, enum digit digit, int rank)
{
    return rank / digits->stride[digit] % digits->degree[digit];
}

/* Returns the rank's number among those that differ in these digits only, in the order of ranks. */
static int number_in(const struct digits *digits, unsigned varying, int rank)
{
    int number = 0, stride = 1;
    for (size_t i = 0; i < DIGITS; i++) {
        const enum digit digit = digits->order[i];
        if (varying & BIT(digit)) {
            number += placement_digit(digits, digit, rank) * stride;
            stride *= digits->degree[digit];
        }
    }
    return number;
}

/* Returns the rank that has a number in the group of another rank: the inverse of number_in. */
static int rank_at(const struct digits *digits, unsigned varying, int rank, int number)
{
    for (size_t i = 0; i < DIGITS; i++) {
        const enum digit digit = digits->order[i];
        if (varying & BIT(digit)) {
            rank += (number % digits->degree[digit] - placement_digit(digits, digit, rank)) * digits->stride[digit];
            number /= digits->degree[digit];
        }
    }
    return rank;
}

enum shoal_status shoal_placement_locate(const struct shoal_placement *placement, int rank,
                                         struct shoal_coordinates *coordinates_out, char *error, size_t error_bytes)
{
    struct digits digits;
    const enum shoal_status status = open_digits(&digits, placement, rank, error, error_bytes);
    if (status != SHOAL_OK)
        return status;
    if (!shoal_struct_bytes(coordinates_out))
        return refuse(error, error_bytes,
                      "coordinates_out is NULL, or its struct_bytes is not set: use SHOAL_COORDINATES_INIT");
    const struct shoal_coordinates coordinates = {
        .struct_bytes = sizeof coordinates,
        .pp = number_in(&digits, varying_of_kind[SHOAL_GROUP_PIPELINE], rank),
        .tp = number_in(&digits, varying_of_kind[SHOAL_GROUP_TENSOR], rank),
        .rdp = number_in(&digits, varying_of_kind[SHOAL_GROUP_REPLICAS], rank),
        .dp = number_in(&digits, varying_of_kind[SHOAL_GROUP_DATA], rank),
        .mp = number_in(&digits, varying_of_kind[SHOAL_GROUP_MODEL], rank),
        .shard = number_in(&digits, varying_of_kind[SHOAL_GROUP_SHARDS], rank),
        .shard_replica = number_in(&digits, varying_of_kind[SHOAL_GROUP_SHARD_REPLICAS], rank),
    };
    shoal_struct_copy_out(coordinates_out, &coordinates, sizeof coordinates);
    return SHOAL_OK;
}

enum shoal_status shoal_placement_group(const struct shoal_placement *placement, enum shoal_group kind, int rank,
                                        int *ranks_out, size_t capacity, size_t *count_out, char *error, size_t error_bytes)
{
    struct digits digits;
    const enum shoal_status status = open_digits(&digits, placement, rank, error, error_bytes);
    if (status != SHOAL_OK)
        return status;
    if ((unsigned)kind >= sizeof varying_of_kind / sizeof *varying_of_kind)
        return refuse(error, error_bytes, "kind is %d, which is none of enum shoal_group", (int)kind);
    if (!count_out)
        return refuse(error, error_bytes, "count_out is NULL");
    size_t count = 1;
    for (size_t i = 0; i < DIGITS; i++)
        count *= varying_of_kind[kind] & BIT(i) ? (size_t)digits.degree[i] : 1;
    if (ranks_out && capacity < count)
        return refuse(error, error_bytes, "the group has %zu ranks, and there is room for %zu", count, capacity);
    *count_out = count;
    for (size_t i = 0; ranks_out && i < count; i++)
        ranks_out[i] = rank_at(&digits, varying_of_kind[kind], rank, (int)i);
    return SHOAL_OK;
}
