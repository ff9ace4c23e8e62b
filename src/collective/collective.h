/* The algorithms: each builder appends what one rank does for one piece. They are arithmetic on ranks and blocks: no I/O, no
 * pointer, no byte count. All ranks must build from the same view (and root). Any thread; nothing is shared.
 *
 * Who writes which part of a window is the same in all algorithms, so that plans may follow each other in a slot in any order:
 *   OWN      the rank itself. Any rank that reaches it may read, and gives credit; the rank waits for the credit of all that
 *            reach it before its first write, whatever ran before.
 *   RING     its left neighbour. Only the rank reads, and gives credit to the left.
 *   MESH..   the carriers on the other hosts, one part per host; see allreduce_mesh.c. */
#ifndef SHOAL_COLLECTIVE_COLLECTIVE_H
#define SHOAL_COLLECTIVE_COLLECTIVE_H

#include "plan/plan.h"

enum shoal_part { SHOAL_PART_OWN, SHOAL_PART_RING, SHOAL_PART_MESH };

/* One host; all-reduce, reduce, reduce-scatter, as view->shape says: every rank reduces the block that it owns. */
void shoal_owners_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host; reduce: root reduces all. */
void shoal_reduce_at_root_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* One host; whatever only moves, as view->shape says: broadcast, scatter, gather, all-gather, all-to-all. */
void shoal_copies_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Several hosts with any number of ranks each: every rank carries slices over the network. */
void shoal_allreduce_mesh_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Any hosts: blocks travel from neighbour to neighbour. The input is block (0, 1), the output has a block per rank. */
void shoal_allgather_ring_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

/* Any hosts: everybody signals everybody. */
void shoal_barrier_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root);

#endif
