#!/usr/bin/env python3
"""Horovod's names (shoal.horovod.torch): operations matched by name, joins, process sets, and training as one process."""
import os
import tempfile

import ranks
import torch
from ranks import Case, expect


def begun():
    import shoal.horovod.torch as hvd
    hvd.init()
    return hvd


def raises(kind, function, *words):
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error))
        return
    raise AssertionError(f"no {kind.__name__}")


def any_order(world):
    hvd = begun()
    names = sorted(map(str, range(8)), reverse=bool(world.rank % 2))
    handles = {name: hvd.allreduce_async(torch.full((3,), float(name) + world.rank), name=name, op=hvd.Sum) for name in names}
    for name in sorted(handles):
        wanted = sum(float(name) + rank for rank in range(world.size))
        expect(hvd.synchronize(handles[name]).tolist() == [wanted] * 3, name)


def uneven(world):
    hvd = begun()
    rows = hvd.allgather(torch.full((world.rank + 1, 2), world.rank))
    expect(rows[:, 0].tolist() == [rank for rank in range(world.size) for _ in range(rank + 1)], rows)
    sent = torch.arange(world.size) + 10 * world.rank
    got, counts = hvd.alltoall(sent, splits=[1] * world.size)
    expect(got.tolist() == [10 * rank + world.rank for rank in range(world.size)] and counts.tolist() == [1] * world.size, got)
    part = hvd.reducescatter(torch.ones(2 * world.size + 1), op=hvd.Sum)
    expect(part.tolist() == [world.size] * (2 + (world.rank == 0)), part)
    expect(hvd.allgather_object({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)], "objects")


def mismatches(world):
    hvd = begun()
    raises(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.zeros(3 + world.rank), name="ragged"), "Mismatched", "ragged")
    dtype = torch.int32 if world.rank else torch.float32
    raises(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.zeros(3, dtype=dtype)), "Mismatched data types")
    raises(NotImplementedError, lambda: hvd.allreduce(torch.zeros(3), op=hvd.Adasum), "Adasum")
    if world.rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
        raises(ValueError, lambda: hvd.allreduce_async(torch.ones(1), name="twice"), "same name")
    hvd.barrier()
    if world.rank:
        handle = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
    expect(hvd.synchronize(handle).item() == world.size, "work goes on")


def joins(world):
    hvd = begun()
    for _ in range(world.rank + 1):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)
    expect(hvd.join() == world.size - 1, "the last rank")
    expect(hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size, "after it")


def sets(world):
    hvd = begun()
    first = hvd.add_process_set([0])
    if world.rank == 0:
        expect(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 1, "one rank")
    else:
        raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=first), "not in process set")
    expect(hvd.remove_process_set(first) and not hvd.remove_process_set(first), "removed once")


def trains_as_one(world):
    """Two passes a step, in groups and compressed or not, against one process on the whole batch."""
    hvd = begun()
    for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        torch.manual_seed(5)
        model, alone = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double() for _ in "12")
        alone.load_state_dict(model.state_dict())
        if world.rank:
            torch.nn.init.zeros_(model[0].weight)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options)
        reference = torch.optim.SGD(alone.parameters(), 0.1)
        for _ in range(3):
            batch = torch.randn(world.size, 6, 4, dtype=torch.float64)
            for _ in range(options.get("backward_passes_per_step", 1)):
                model(batch[world.rank]).square().mean().backward()
                (alone(batch).square().mean() * (world.size if "op" in options else 1)).backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        for ours, theirs in zip(model.parameters(), alone.parameters()):
            expect(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14), options)


def norm_over_all_ranks(world):
    hvd = begun()
    whole = torch.arange(12.0).view(6, 2).square()
    alone, mine = torch.nn.BatchNorm1d(2), hvd.SyncBatchNorm(2)
    part = slice(world.rank * 6 // world.size, (world.rank + 1) * 6 // world.size)
    expect(torch.allclose(mine(whole[part]), alone(whole)[part], atol=1e-5), "output")
    expect(torch.allclose(mine.running_var, alone.running_var), mine.running_var, alone.running_var)
    raises(ValueError, lambda: hvd.SyncBatchNorm(2, process_set=hvd.ProcessSet([0])), "over all ranks")


def goes_on_after_a_restart(world):
    """The second run stands for what a launcher starts after the first one failed."""
    hvd = begun()

    def train(state, fails):
        seen.append((state.epoch, state.model.weight.item()))
        with torch.no_grad():
            state.model.weight += 1
        state.epoch += 1
        state.commit()
        state.epoch = 99  # lost
        if fails:
            raise RuntimeError("died")

    seen, resets = [], []
    with tempfile.TemporaryDirectory() as own:
        os.environ["HOROVOD_ELASTIC_STATE"] = os.path.join(hvd.broadcast_object(own), "state")
        for fails in (True, False):
            model = torch.nn.Linear(1, 1)
            state = hvd.elastic.TorchState(model, torch.optim.Adam(model.parameters()), epoch=5 * world.rank)
            state.register_reset_callbacks([lambda: resets.append(1)])
            if fails:
                raises(RuntimeError, lambda: hvd.elastic.run(train)(state, True), "died")
            else:
                hvd.elastic.run(train)(state, False)
        hvd.barrier()
        expect(not os.path.exists(os.environ.pop("HOROVOD_ELASTIC_STATE")), "the file is gone at the end")
    expect([epoch for epoch, _ in seen] == [0, 1] and abs(seen[1][1] - seen[0][1] - 1) < 1e-6 and resets == [1], seen, resets)


def ended(body):
    """The next case may have another number of ranks."""
    def run(world):
        body(world)
        begun().shutdown()
    return run


CASES = [Case(body.__name__, ended(body), sizes=(1, 2, 3)) for body in (any_order, uneven, joins, trains_as_one, norm_over_all_ranks,
                                                                    goes_on_after_a_restart)]
CASES += [Case("mismatches", ended(mismatches), sizes=(2,)), Case("sets", ended(sets), sizes=(2, 3))]

if __name__ == "__main__":
    ranks.run(CASES)
