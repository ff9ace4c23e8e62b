#!/usr/bin/env python3
"""Megatron-core's calls of torch.distributed with their shapes, types and groups, taken from the sources of megatron-core
0.16.1, which itself needs CUDA. Each case is named after the file that makes the calls.

Four ranks are a grid of two by two, in Megatron's order "tp-dp". Ranks 0 and 1 share layers (tensor parallel); 0 and 2 have
the same part of them (data or pipeline parallel). Two ranks are one tensor parallel group."""
import datetime
import warnings

import ranks
import torch
import torch.distributed as dist
from ranks import Case, expect

SEQUENCE, BATCH, HIDDEN = 6, 3, 8
WIDE = (torch.float32, torch.bfloat16)


class Grid:
    """The groups of Megatron's parallel_state for a rank; all ranks make them in the same order."""

    def __init__(self, world, **options):
        self.tp_ranks = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
        self.dp_ranks = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
        made = {}
        for group in [[rank, rank + 1] for rank in range(0, world.size, 2)] + [list(range(at, world.size, 2)) for at in (0, 1)]:
            made[tuple(group)] = dist.new_group(group, timeout=datetime.timedelta(seconds=30), **options)
        self.tp, self.dp = made[tuple(self.tp_ranks)], made[tuple(self.dp_ranks)]
        self.tp_rank, self.dp_rank = self.tp_ranks.index(world.rank), self.dp_ranks.index(world.rank)


def numbers(shape, rank, type_=torch.float32):
    """Returns small integers that differ between ranks and are exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 3)) % 7 + rank).to(type_).reshape(shape)


def same(found, expected, what=""):
    expect(found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected), what, found, expected)


# ---- parallel_state.py ----


def groups_of_parallel_state(world):
    """new_group with all arguments that create_group passes; groups of one; subgroups by enumeration; barriers."""
    grid = Grid(world, backend=ranks.BACKEND, pg_options=None, use_local_synchronization=False, group_desc="TENSOR")
    expect(dist.get_process_group_ranks(grid.tp) == grid.tp_ranks and dist.get_world_size(grid.tp) == 2)
    expect(dist.get_global_rank(grid.dp, 0) == grid.dp_ranks[0] and dist.get_group_rank(grid.tp, world.rank) == grid.tp_rank)
    for group in (grid.tp, grid.dp):
        dist.barrier(group)
        dist.barrier(group=group, async_op=False)
        dist.barrier(group=group, device_ids=[0])
    halves = [[rank, rank + 1] for rank in range(0, world.size, 2)]
    mine, all_of_them = dist.new_subgroups_by_enumeration(halves, backend=ranks.BACKEND)
    expect(len(all_of_them) == len(halves) and dist.get_process_group_ranks(mine) == grid.tp_ranks)
    alone = [dist.new_group(ranks=[rank]) for rank in range(world.size)][world.rank]
    value = numbers((5,), world.rank)
    dist.all_reduce(value, group=alone)
    same(value, numbers((5,), world.rank))


# ---- tensor_parallel ----


def mappings(world):
    """Activations of (sequence, batch, hidden): reduced, gathered along the first and the last dimension, scattered,
    exchanged."""
    grid = Grid(world)
    for type_ in WIDE:
        each = [numbers((SEQUENCE, BATCH, HIDDEN), rank, type_) for rank in grid.tp_ranks]
        mine, total = each[grid.tp_rank], each[0] + each[1]
        reduced = mine.transpose(0, 1).contiguous()
        dist.all_reduce(reduced, group=grid.tp)
        same(reduced, total.transpose(0, 1).contiguous(), "reduced")
        gathered = torch.empty(2 * SEQUENCE, BATCH, HIDDEN, dtype=type_)
        dist.all_gather_into_tensor(gathered, mine.contiguous(), group=grid.tp)
        same(gathered, torch.cat(each), "gathered along the first dimension")
        same(torch.cat(gathered.chunk(2, dim=0), dim=2), torch.cat(each, dim=2), "gathered along the last dimension")
        shard = torch.empty(SEQUENCE // 2, BATCH, HIDDEN, dtype=type_)
        dist.reduce_scatter_tensor(shard, mine.contiguous(), group=grid.tp)
        same(shard, total.chunk(2)[grid.tp_rank], "scattered")
        uneven = list(torch.split(mine, [SEQUENCE - 1, 1]))
        part = torch.empty_like(uneven[grid.tp_rank])
        dist.reduce_scatter(part, uneven, group=grid.tp)
        same(part, torch.split(total, [SEQUENCE - 1, 1])[grid.tp_rank], "scattered unevenly")
        parts = [torch.empty((SEQUENCE - rank, BATCH, HIDDEN), dtype=type_) for rank in range(2)]
        dist.all_gather(parts, mine[:SEQUENCE - grid.tp_rank], group=grid.tp)
        for rank, found in enumerate(parts):
            same(found, each[rank][:SEQUENCE - rank], "gathered unevenly")


def layers(world):
    """A linear layer's backward pass: its input is gathered and its gradient reduced or scattered during the products."""
    grid = Grid(world)
    for type_ in WIDE:
        each = [numbers((SEQUENCE, BATCH, HIDDEN), rank, type_) for rank in grid.tp_ranks]
        buffer = torch.empty(2 * SEQUENCE, BATCH, HIDDEN, dtype=type_)
        gather = dist.all_gather_into_tensor(buffer, each[grid.tp_rank], group=grid.tp, async_op=True)
        gradient = each[grid.tp_rank] * 2
        reduce = dist.all_reduce(gradient, group=grid.tp, async_op=True)
        whole = torch.cat([each[grid.tp_rank], each[grid.tp_rank]])
        part = torch.empty(SEQUENCE, BATCH, HIDDEN, dtype=type_)
        scatter = dist.reduce_scatter_tensor(part, whole, group=grid.tp, async_op=True)
        product = each[0].float() @ torch.ones(HIDDEN, HIDDEN)
        for work in (gather, reduce, scatter):
            work.wait()
        same(buffer, torch.cat(each), "input")
        same(gradient, 2 * (each[0] + each[1]), "gradient")
        same(part, each[0] + each[1], "part of the gradient")
        expect(product.shape == each[0].shape)


def cross_entropy(world):
    """Logits of (sequence, batch) with the vocabulary in parts: their maximum, the target's, and the sum of exponentials.
    Also the fused form, which sums the last two in one tensor and splits it afterwards."""
    grid = Grid(world)
    logits = [numbers((SEQUENCE, BATCH), rank) for rank in grid.tp_ranks]
    most = logits[grid.tp_rank].clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=grid.tp)
    same(most, torch.maximum(*logits))
    for one in (logits[grid.tp_rank].clone(), torch.stack([logits[grid.tp_rank]] * 2)):
        expected = logits[0] + logits[1]
        dist.all_reduce(one, op=dist.ReduceOp.SUM, group=grid.tp)
        same(one, expected if one.dim() == 2 else torch.stack([expected] * 2))


def data(world):
    """A batch that only the first rank of a tensor parallel group has: its sizes, then all of it flat, in 64-bit integers."""
    grid = Grid(world)
    batch = {"text": torch.arange(20).reshape(4, 5), "mask": torch.ones(4, 1, dtype=torch.int64)}
    sizes = torch.zeros(2 * 5, dtype=torch.int64)
    if grid.tp_rank == 0:
        for at, value in enumerate(batch.values()):
            sizes[5 * at:5 * at + value.dim()] = torch.tensor(value.shape)
    dist.broadcast(sizes, grid.tp_ranks[0], group=grid.tp)
    expect(sizes.tolist() == [4, 5, 0, 0, 0, 4, 1, 0, 0, 0], sizes)
    flat = torch.cat([value.reshape(-1) for value in batch.values()]) if grid.tp_rank == 0 else torch.empty(24, dtype=torch.int64)
    dist.broadcast(flat, grid.tp_ranks[0], group=grid.tp)
    same(flat, torch.cat([value.reshape(-1) for value in batch.values()]))


# ---- distributed, optimizer ----


def param_and_grad_buffer(world):
    """One buffer of all gradients, in buckets whose shards are views of it. Buckets are averaged, or scattered in place,
    many at a time; then parameters are gathered in place from the shards."""
    grid = Grid(world)
    size = world.size // 2
    for type_ in WIDE:
        each = [numbers((2, 4 * size), rank, type_) * 2 for rank in grid.dp_ranks]
        total = sum(each[1:], each[0])
        buffer = each[grid.dp_rank].clone()
        with dist._coalescing_manager(grid.dp, async_ops=True) as many:
            for bucket in buffer:
                dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=grid.dp, async_op=True)
        many.wait()
        same(buffer, total / size)
        buffer = each[grid.dp_rank].clone()
        views = [bucket.view(size, -1)[grid.dp_rank] for bucket in buffer]
        with dist._coalescing_manager(grid.dp, async_ops=True) as many:
            for bucket, view in zip(buffer, views):
                dist.reduce_scatter_tensor(view, bucket, op=dist.ReduceOp.SUM, group=grid.dp, async_op=True)
        many.wait()
        for view, bucket in zip(views, total):
            same(view, bucket.view(size, -1)[grid.dp_rank])
        with dist._coalescing_manager(grid.dp, async_ops=True) as many:
            for bucket, view in zip(buffer, views):
                dist.all_gather_into_tensor(bucket, view, group=grid.dp, async_op=True)
        many.wait()
        same(buffer, total)


def finalize_model_grads(world):
    """Gradients of layer norms, flattened together; those of embeddings that two stages share; token counts."""
    grid = Grid(world)
    each = [[numbers((HIDDEN,), rank), numbers((2, HIDDEN), rank)] for rank in grid.tp_ranks]
    mine = each[grid.tp_rank]
    together = torch._utils._flatten_dense_tensors(mine)
    dist.all_reduce(together, op=dist.ReduceOp.SUM, group=grid.tp)
    for at, found in enumerate(torch._utils._unflatten_dense_tensors(together, mine)):
        same(found, each[0][at] + each[1][at])
    tokens = torch.tensor(world.rank + 1, dtype=torch.int)
    dist.broadcast(tokens, src=grid.dp_ranks[-1], group=grid.dp)
    expect(tokens.item() == grid.dp_ranks[-1] + 1, tokens)
    dist.all_reduce(tokens, group=grid.tp)
    expect(tokens.item() == 2 * world.size - 1, tokens)  # the last two ranks' value


def clip_grads(world):
    """Norms and flags: tensors of one element, and of none."""
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    expect(total.item() == world.size * (world.size + 1) / 2, total)
    for value in (torch.tensor(float(world.rank)), torch.tensor([world.rank], dtype=torch.float)):
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        expect(value.item() == world.size - 1, value)
    blocks = torch.tensor(world.rank + 5, dtype=torch.int32)
    dist.all_reduce(blocks, op=dist.ReduceOp.MIN)
    expect(blocks.item() == 5, blocks)


def distrib_optimizer(world):
    """Checkpoints: shards are gathered to a group's first rank, given by its global rank, and scattered again."""
    grid = Grid(world)
    size, first = world.size // 2, grid.dp_ranks[0]
    mine = numbers((11,), world.rank)
    gathered = [torch.empty(11) for _ in range(size)] if grid.dp_rank == 0 else None
    dist.gather(mine, gathered, first, grid.dp)
    for rank, found in zip(grid.dp_ranks, gathered or []):
        same(found, numbers((11,), rank))
    found = torch.empty(11)
    dist.scatter(found, gathered, first, grid.dp)
    same(found, mine)
    everyone = [torch.empty(11) for _ in range(size)]
    dist.all_gather(everyone, mine, grid.dp)
    for rank, found in zip(grid.dp_ranks, everyone):
        same(found, numbers((11,), rank))


# ---- pipeline_parallel ----


def p2p_communication(world):
    """Shapes first, then activations forward and gradients backward: in one batch, and in halves, with even ranks sending
    first."""
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for type_, shape in ((torch.int64, (3,)), (torch.bfloat16, (SEQUENCE, BATCH, HIDDEN)), (torch.float32, (SEQUENCE, BATCH, HIDDEN))):
        forward, backward = numbers(shape, world.rank, type_), numbers(shape, world.rank + 5, type_)
        got = [torch.empty(shape, dtype=type_) for _ in range(2)]
        for way in (batched, by_halves):
            for one in got:
                one.zero_()
            way(world, (backward, got[0], before), (forward, got[1], after))
            same(got[0], numbers(shape, before, type_), "activations from the stage before")
            same(got[1], numbers(shape, after + 5, type_), "gradients from the stage after")


def batched(world, *neighbours):
    """With two ranks both neighbours are the same rank, and messages match in the order sent: each rank first sends to its
    previous stage, and first receives from its next one."""
    (to_before, from_before, before), (to_after, from_after, after) = neighbours
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, to_before, before, None), dist.P2POp(dist.irecv, from_after, after, None),
                                    dist.P2POp(dist.isend, to_after, after, None), dist.P2POp(dist.irecv, from_before, before, None)])
    for work in works:
        work.wait()


def by_halves(world, *neighbours):
    (to_before, from_before, before), (to_after, from_after, after) = neighbours
    halves = [[lambda: dist.isend(tensor=to_after, dst=after), lambda: dist.irecv(tensor=from_before, src=before)],
              [lambda: dist.isend(tensor=to_before, dst=before), lambda: dist.irecv(tensor=from_after, src=after)]]
    for work in [start() for half in halves for start in (reversed(half) if world.rank % 2 else half)]:
        work.wait()


def bridge_communicator(world):
    """From one grid to another: plain sends and receives of parts; a leader broadcasts shapes and data."""
    grid = Grid(world)
    whole = numbers((SEQUENCE, BATCH, HIDDEN), 1)
    if world.rank == 0:
        for rank, part in zip(range(1, world.size), torch.tensor_split(whole, world.size - 1)):
            dist.send(part.contiguous(), dst=rank)
    else:
        part = torch.empty_like(torch.tensor_split(whole, world.size - 1)[world.rank - 1])
        dist.recv(part, src=0)
        same(part, torch.tensor_split(whole, world.size - 1)[world.rank - 1])
    shape = torch.tensor(whole.shape) if grid.tp_rank == 0 else torch.zeros(3, dtype=torch.int64)
    dist.broadcast(shape, src=grid.tp_ranks[0], group=grid.tp)
    found = whole.clone() if grid.tp_rank == 0 else torch.empty(shape.tolist())
    dist.broadcast(found, src=grid.tp_ranks[0], group=grid.tp)
    same(found, whole)


# ---- transformer/moe ----


def token_dispatcher(world):
    """Tokens to experts and back: an all-gather of counts; then rows, none for some ranks; an average."""
    counts = torch.tensor([(world.rank + other) % 3 for other in range(world.size)])
    table = torch.empty(world.size, world.size, dtype=torch.int64)
    dist.all_gather_into_tensor(table.view(-1), counts)
    same(table, torch.tensor([[(rank + other) % 3 for other in range(world.size)] for rank in range(world.size)]))
    sends, comes = counts.tolist(), table[:, world.rank].tolist()
    for type_ in WIDE:
        tokens = numbers((sum(sends), HIDDEN), world.rank, type_)
        got = torch.empty(sum(comes), HIDDEN, dtype=type_)
        dist.all_to_all_single(got, tokens, output_split_sizes=comes, input_split_sizes=sends)
        expected = [numbers((sum(table[rank].tolist()), HIDDEN), rank, type_).split(table[rank].tolist())[world.rank]
                    for rank in range(world.size)]
        same(got, torch.cat(expected))
        back = torch.empty_like(tokens)
        dist.all_to_all_single(back, got, output_split_sizes=sends, input_split_sizes=comes)
        same(back, tokens)
    losses = torch.full((4,), float(world.rank * 2))
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    same(losses, torch.full((4,), float(world.size - 1)))


# ---- dist_checkpointing, timers.py, rerun_state_machine.py ----


def objects_and_times(world):
    """Plans and metadata as objects; a table of times with one row per rank, gathered in place."""
    everyone = [None] * world.size
    dist.all_gather_object(everyone, {"rank": world.rank, "shards": [world.rank] * world.rank})
    expect([one["rank"] for one in everyone] == list(range(world.size)), everyone)
    told = [{"plan": 7}, None] if world.rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    expect(told == [{"plan": 7}, None], told)
    stats = [None] * world.size if world.rank == 0 else None
    dist.gather_object({"rank": world.rank}, stats if world.rank == 0 else None)
    expect(world.rank != 0 or stats == [{"rank": rank} for rank in range(world.size)], stats)
    plan = [None]
    dist.scatter_object_list(plan, [f"plan {rank}" for rank in range(world.size)] if world.rank == 0 else None, src=0)
    expect(plan == [f"plan {world.rank}"], plan)
    times = torch.zeros(world.size, 3)
    times[world.rank] = world.rank + 1
    dist.all_gather_into_tensor(times.view(-1), times[world.rank, :].view(-1))
    same(times, torch.arange(1.0, world.size + 1).repeat_interleave(3).view(world.size, 3))
    for name in ("_all_gather_base", "_reduce_scatter_base"):  # names in older versions
        out = torch.empty(2 * world.size if name == "_all_gather_base" else 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(dist, name)(out, torch.ones(2 if name == "_all_gather_base" else 2 * world.size))
        expect(out.tolist() == [1.0 if name == "_all_gather_base" else float(world.size)] * len(out), out)


CASES = [Case(body.__name__, body, sizes=(2, 4))
         for body in (groups_of_parallel_state, mappings, layers, cross_entropy, data, param_and_grad_buffer, finalize_model_grads,
                      clip_grads, distrib_optimizer, p2p_communication, bridge_communicator, token_dispatcher, objects_and_times)]

if __name__ == "__main__":
    ranks.run(CASES)
