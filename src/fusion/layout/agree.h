/* What the ranks of a communicator agree on when they make a reducer or outer steps together. Each function is a collective
 * call, even on a rank that has found an error of its own, so that all ranks return the same status. */
#ifndef SHOAL_FUSION_AGREE_H
#define SHOAL_FUSION_AGREE_H

#include "fusion/layout/parameters.h"

/* A value that must be the same on all ranks. */
struct fusion_option {
    const char *name;
    enum { FUSION_NUMBER, FUSION_REAL, FUSION_HASH, FUSION_LIST } kind; /* how it is printed */
    uint64_t word;                                                      /* the value, or a hash */
    const double *list; /* LIST: `count` values, of which the first that differs is printed; NULL: all are 1 */
    size_t count;       /* the same on all ranks if all options before are */
};

#define FUSION_OPTIONS_MAX 40

static inline struct fusion_option fusion_number(const char *name, uint64_t value)
{
    return (struct fusion_option){name, FUSION_NUMBER, value, NULL, 0};
}

static inline struct fusion_option fusion_hash_option(const char *name, uint64_t hash)
{
    return (struct fusion_option){name, FUSION_HASH, hash, NULL, 0};
}

/* The list is read during the agreement only. */
static inline struct fusion_option fusion_list_option(const char *name, uint64_t hash, const double *list, size_t count)
{
    return (struct fusion_option){name, FUSION_LIST, hash, list, count};
}

static inline struct fusion_option fusion_real(const char *name, double value)
{
    struct fusion_option option = {name, FUSION_REAL, 0, NULL, 0};
    memcpy(&option.word, &value, sizeof value);
    return option;
}

/* What is compared, and how a line about it begins. */
struct fusion_agreement {
    struct shoal_context *context;
    struct shoal_comm *comm;
    uint32_t timeout_ms;
    const char *name, *call; /* the object's name, and the public function */
    const struct fusion_parameters *parameters;
    struct fusion_option options[FUSION_OPTIONS_MAX];
    size_t option_count;
};

/* Collects each rank's verdict on its arguments: status and text. Returns the status that all ranks agree on and reports its
 * text: that of the lowest rank that found an error, or the first parameter or option that differs. */
SHOAL_MUST_USE enum shoal_status fusion_agree(const struct fusion_agreement *agreement, enum shoal_status status,
                                              const char *text);

/* For a rank that has no memory to begin with: it takes part in the first split of `comm` with no color. The others then miss
 * it, so fusion_all_split fails on them. `call` is the public function. */
enum shoal_status fusion_decline(struct shoal_context *context, struct shoal_comm *comm, const char *call);
SHOAL_MUST_USE enum shoal_status fusion_all_split(struct shoal_context *context, const struct shoal_comm *comm,
                                                  const struct shoal_comm *split, const char *call);

#endif
