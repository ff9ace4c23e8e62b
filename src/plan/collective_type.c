#include "plan/collective_type.h"

/* In a broadcast, a scatter and an all-to-all, no rank writes into another's output: root, or a rank in place, would have to
 * write while the receiver may still be reading. */
const struct shoal_collective_traits shoal_collective_rows[SHOAL_COLLECTIVE_END + 1] = {
    [SHOAL_COLLECTIVE_NONE] = {.name = "none"},
    [SHOAL_COLLECTIVE_ALLREDUCE] = {"all-reduce", {.is_reduced = true}, true, true},
    [SHOAL_COLLECTIVE_REDUCE] = {"reduce", {.root_receives = true, .is_reduced = true}, true, true},
    [SHOAL_COLLECTIVE_REDUCE_SCATTER] = {"reduce-scatter", {.is_input_partitioned = true, .is_reduced = true}, true, false},
    [SHOAL_COLLECTIVE_BROADCAST] = {"broadcast", {.root_contributes = true}, true, false},
    [SHOAL_COLLECTIVE_ALLGATHER] = {"all-gather", {.is_output_partitioned = true}, true, true},
    [SHOAL_COLLECTIVE_GATHER] = {"gather", {.root_receives = true, .is_output_partitioned = true}, true, true},
    [SHOAL_COLLECTIVE_SCATTER] = {"scatter", {.root_contributes = true, .is_input_partitioned = true}, true, false},
    [SHOAL_COLLECTIVE_ALLTOALL] = {"all-to-all", {.is_input_partitioned = true, .is_output_partitioned = true}, true, false},
    [SHOAL_COLLECTIVE_BARRIER] = {"barrier", {.is_empty = true}, false, false},
    [SHOAL_COLLECTIVE_SPLIT] = {"split", {.is_output_partitioned = true}, false, false},
    [SHOAL_COLLECTIVE_SEND] = {.name = "send"},
    [SHOAL_COLLECTIVE_RECV] = {.name = "receive"},
    [SHOAL_COLLECTIVE_DRAIN] = {.name = "drain"},
    [SHOAL_COLLECTIVE_GROUP] = {.name = "group"},
    [SHOAL_COLLECTIVE_END] = {.name = "unknown operation"},
};

static bool is_same_word(const char *name, const char *word)
{
    while (*name && *word) {
        name += *name == '-';
        word += *word == '-';
        if (*name++ != *word++)
            return false;
    }
    return *name == *word;
}

enum shoal_collective_type shoal_collective_find(const char *name)
{
    for (int collective = SHOAL_COLLECTIVE_ALLREDUCE; name && collective <= SHOAL_COLLECTIVE_BARRIER; collective++) {
        if (is_same_word(shoal_collective_rows[collective].name, name))
            return (enum shoal_collective_type)collective;
    }
    return SHOAL_COLLECTIVE_NONE;
}
