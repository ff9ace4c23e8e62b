/* The algorithms: each builder appends what one rank does for one chunk. Builders only compute with ranks and blocks: no I/O,
 * no pointers, no byte counts. All ranks must build from the same view and root. Any thread; nothing is shared.
 *
 * All algorithms follow these rules for writing to staging buffers, so that their plans may follow each other in a slot in any
 * order:
 *   On one host, part 0 belongs to its rank: only that rank writes it. Any rank that can map it may read it, and then signals
 *   a credit. Before its first write a rank waits for the credits of all ranks that can map the part, whatever ran before.
 *   Over several hosts, remote ranks write into the other parts, each after a clear-to-send in the same chunk; see rails.h. */
#ifndef SHOAL_COLLECTIVE_COLLECTIVE_H
#define SHOAL_COLLECTIVE_COLLECTIVE_H

#include "plan/plan.h"

enum { SHOAL_PART_OWN };

/* One host; all-reduce, reduce, reduce-scatter, according to view->shape: every rank reduces the block that it owns. */
void shoal_owners_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host; all-reduce: every rank reduces everything. */
void shoal_one_shot_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host, or several with equal numbers of ranks; all-reduce: the devices of a host sum among themselves. */
void shoal_peers_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host; reduce: root reduces everything. */
void shoal_reduce_at_root_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host; collectives that only move data, according to view->shape: broadcast, scatter, gather, all-gather, all-to-all. */
void shoal_copies_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* From here on: several hosts, each with any number of ranks. Each host to all hosts: all-reduce, reduce, reduce-scatter,
 * all-gather, broadcast. */
void shoal_mesh_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Each host to the next one: all-reduce, reduce-scatter, all-gather. */
void shoal_ring_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Between hosts at distances that are powers of two: all-reduce of whole sums, and of halves. */
void shoal_doubling_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);
void shoal_halving_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Between hosts at distances that are powers of two: all-gather. */
void shoal_bruck_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Each contributing rank to each receiving rank: gather, scatter, all-to-all. */
void shoal_pairs_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

void shoal_barrier_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

#endif
