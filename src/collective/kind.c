#include "collective/kind.h"

/* Of a broadcast, a scatter or an all-to-all no output is reached: root, or a giver in place, would have to write where the
 * taker may still be reading what was there before. */
static const struct shoal_kind_row rows[SHOAL_KIND_END] = {
    [SHOAL_KIND_NONE] = {.name = "none"},
    [SHOAL_KIND_ALLREDUCE] = {"all-reduce", {.is_reduced = true}, true, true},
    [SHOAL_KIND_REDUCE] = {"reduce", {.root_takes = true, .is_reduced = true}, true, true},
    [SHOAL_KIND_REDUCE_SCATTER] = {"reduce-scatter", {.is_input_cut = true, .is_reduced = true}, true, false},
    [SHOAL_KIND_BROADCAST] = {"broadcast", {.root_gives = true}, true, false},
    [SHOAL_KIND_ALLGATHER] = {"all-gather", {.is_output_cut = true}, true, true},
    [SHOAL_KIND_GATHER] = {"gather", {.root_takes = true, .is_output_cut = true}, true, true},
    [SHOAL_KIND_SCATTER] = {"scatter", {.root_gives = true, .is_input_cut = true}, true, false},
    [SHOAL_KIND_ALLTOALL] = {"all-to-all", {.is_input_cut = true, .is_output_cut = true}, true, false},
    [SHOAL_KIND_BARRIER] = {"barrier", {.is_empty = true}, false, false},
    [SHOAL_KIND_EXCHANGE] = {"exchange", {.is_output_cut = true}, false, false},
    [SHOAL_KIND_SEND] = {.name = "send"},
    [SHOAL_KIND_RECV] = {.name = "receive"},
    [SHOAL_KIND_DRAIN] = {.name = "drain"},
    [SHOAL_KIND_GROUP] = {.name = "group"},
};

const struct shoal_kind_row *shoal_kind_row(enum shoal_kind kind)
{
    static const struct shoal_kind_row unknown = {.name = "unknown operation"};
    return (unsigned)kind < SHOAL_KIND_END ? &rows[kind] : &unknown;
}

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

enum shoal_kind shoal_kind_find(const char *name)
{
    for (int kind = SHOAL_KIND_ALLREDUCE; name && kind <= SHOAL_KIND_BARRIER; kind++) {
        if (is_same_word(rows[kind].name, name))
            return (enum shoal_kind)kind;
    }
    return SHOAL_KIND_NONE;
}
