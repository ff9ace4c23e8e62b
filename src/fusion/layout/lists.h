/* Compares lists of parameters over the ranks of a communicator. Reducers and outer steps call it when they are made. */
#ifndef SHOAL_FUSION_LISTS_H
#define SHOAL_FUSION_LISTS_H

#include "fusion/layout/parameters.h"

/* Returns the same hash for lists with the same counts, types and names. */
uint64_t fusion_parameters_hash(const struct fusion_parameters *parameters);

/* A collective call. Returns OK and rank -1 if all ranks can continue. Otherwise returns the status of the lowest rank that
 * cannot, and that rank. */
SHOAL_MUST_USE enum shoal_status fusion_ranks_ready(struct shoal_comm *comm, const struct shoal_options *options,
                                                    enum shoal_status own, int *rank_out);

/* Like fusion_ranks_ready(), for memory that the rank needs for the next exchange; text names the rank that has none. */
SHOAL_MUST_USE enum shoal_status fusion_ranks_have_memory(struct shoal_comm *comm, const struct shoal_options *options,
                                                          bool has_memory, char *text, size_t text_bytes);

/* A collective call, for lists whose hashes differ. Every rank looks for the first difference from rank 0's list, which has
 * first_count parameters. text then names the first difference of all, with both sides, the same on every rank. */
SHOAL_MUST_USE enum shoal_status fusion_lists_compare(struct shoal_comm *comm, const struct shoal_options *options,
                                                      const struct fusion_parameters *parameters, size_t first_count,
                                                      char *text, size_t text_bytes);

/* Returns the lowest rank that has the most common item; items have `bytes` bytes. */
int fusion_most_common(const void *items, size_t bytes, int count);

/* Compares one value of each rank: "rank 3 differs from most", "ranks 1, 3 differ from most". */
void fusion_list_others(const uint64_t *values, int count, char *text, size_t text_bytes);

#endif
