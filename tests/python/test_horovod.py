#!/usr/bin/env python3
"""Horovod's names (shoal.horovod.torch): operations matched by name, joins, process sets, and training as one process."""
import os
import pathlib
import tempfile
import time
import warnings

import ranks
import tap
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
from ranks import Case, Skip, expect
from torch.multiprocessing.reductions import StorageWeakRef

COMMAND = os.environ.get("SHOAL_COMMAND", str(ranks.TOP / "build/shoal"))


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


def handles_and_groups(world):
    hvd = begun()
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(1e-3)
    expect(hvd.synchronize(handle).tolist() == [world.size] * 2, "polled")
    both = [torch.full((world.size,), float(world.rank)), torch.full((world.size, 2), 1.0)]
    sums = [sum(range(world.size)), world.size]
    expect([each.unique().tolist() for each in hvd.grouped_allreduce(both, op=hvd.Sum)] == [[each] for each in sums], "all-reduce")
    expect([each.shape[0] for each in hvd.grouped_allgather(both)] == [world.size ** 2] * 2, "all-gather")
    expect([each.unique().tolist() for each in hvd.grouped_reducescatter(both, op=hvd.Sum)] == [[each] for each in sums], "reduce-scatter")
    rounded = hvd.allreduce(torch.tensor([1 + 2 ** -12]), compression=hvd.Compression.fp16)
    expect(rounded.dtype is torch.float32 and rounded.item() == 1, "it travels as float16", rounded)
    place = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
    expect(place == (world.rank, world.size, 0, 1, True), place)


def averages_of_float16(world):
    """On two hosts: the sum of one is not a float16, the average is."""
    os.environ["SHOAL_HOST_ID"] = f"host-{world.rank // 2}"
    hvd = begun()
    for count in (8, 100_000):
        average = hvd.allreduce(torch.full((count,), 40000.0, dtype=torch.float16), op=hvd.Average)
        expect(average.unique().tolist() == [40000.0], count, average)


def operations_have_gradients(world):
    """Each rank weighs what it got by its rank and one."""
    hvd = begun()
    weights = torch.arange(1.0, world.size + 1)
    mean, own = weights.mean().item(), world.rank + 1.0
    table = (
        ("sum", lambda x: hvd.allreduce(x, op=hvd.Sum), [weights.sum().item()] * world.size),
        ("average", hvd.allreduce, [mean] * world.size),
        ("all-gather", hvd.allgather, [mean] * world.size),
        ("broadcast", lambda x: hvd.broadcast(x, 0), [0.0 if world.rank else mean] * world.size),
        ("reduce-scatter", lambda x: hvd.reducescatter(x, op=hvd.Average), weights.tolist()),
        ("sum, scattered", lambda x: hvd.reducescatter(x, op=hvd.Sum), (weights * world.size).tolist()),
        ("all-to-all", hvd.alltoall, weights.tolist()),
    )
    for name, operation, wanted in table:
        x = torch.ones(world.size, requires_grad=True)
        (operation(x) * own).sum().backward()
        expect(torch.allclose(x.grad, torch.tensor(wanted)), name, x.grad, wanted)


def some_ranks_train(world):
    """A set made by init() trains alone, with sparse gradients that are made dense for the exchange."""
    import shoal.horovod.torch as hvd
    first_and_last = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[first_and_last])
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), sparse_as_dense=True, process_set=first_and_last)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([world.rank])).sum().backward()
        optimizer.step()
    wanted = [0.0, -2.0, 0.0, 0.0] if world.rank == 1 else [-1.0, 0.0, -1.0, 0.0]
    expect(table.weight[:, 0].tolist() == wanted, table.weight)


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


def what_an_ended_rank_lacks_fails_beside_sets(world):
    """Rank 0 waits for the end of rank 1, which waits for rank 0 in the set of all ranks."""
    import shoal.horovod.torch as hvd
    hvd.init(process_sets=[[0, 1]])
    if world.rank:
        raises(hvd.HorovodInternalError, hvd.barrier, "rank 0", "shutdown()")
    hvd.shutdown()


def trains_as_one(world):
    """Two passes a step, in groups, compressed or not, compared with one process on the whole batch."""
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


def a_scheduler_made_before(world):
    """It sees the steps of the optimizer that wraps its own, and these average."""
    hvd = begun()
    parameter = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([parameter], 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, [("parameter", parameter)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (1.0, 0.5):
            optimizer.zero_grad()
            before = parameter[0].item()
            (parameter * (world.rank + 1.0)).sum().backward()
            optimizer.step()
            scheduler.step()
            expect(abs(before - rate * (world.size + 1) / 2 - parameter[0].item()) < 1e-6, rate, before, parameter)


def parameters_that_change(world):
    """Unfrozen ones, added ones, and one whose node was made anew."""
    hvd = begun()
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    torch.nn.init.zeros_(layers[2].weight)
    layers[1].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each.weight for each in layers[:2]], 0.1), [("a", layers[0].weight),
                                                                                                      ("b", layers[1].weight)])
    for step in range(4):
        if step == 1:
            layers[1].requires_grad_(True)
        if step == 2:
            optimizer.add_param_group({"params": [layers[2].weight]})
        if step == 3:
            layers.double().float()
        optimizer.zero_grad()
        sum(layer(torch.full((1, 2), world.rank + 1.0)) for layer in layers).sum().backward()
        optimizer.step()
        for layer in layers[:min(step, 1) + 1 + (step > 1)]:
            expect(layer.weight.grad.eq((world.size + 1) / 2).all(), step, layer.weight.grad)


class Mixed(torch.nn.Module):
    """Gradients that are sparse, not contiguous, absent on all ranks but one, and plain."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 3, sparse=True)
        self.convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.spare, self.dense = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, numbers, uses_spare):
        image = self.table(numbers).permute(0, 3, 1, 2)
        hidden = self.convolution(image).tanh().mean((2, 3))
        return self.dense(self.spare(hidden) if uses_spare else hidden).square().mean()


def mean_of_gradients(model, batches):
    """Returns the averages that one process computes."""
    copy = Mixed().double()
    copy.load_state_dict(model.state_dict())
    for rank, batch in enumerate(batches):
        (copy(batch, rank == 0) / len(batches)).backward()
    return [parameter.grad.to_dense() for parameter in copy.parameters()]


def gradients_of_every_kind(world):
    """Each gradient is the average, even if others have separate memory from the second step on; also with zeroed gradients."""
    hvd = begun()
    torch.manual_seed(7)
    model = Mixed().double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(6):
        batches = torch.randint(6, (world.size, 2, 3, 3))
        optimizer.zero_grad(set_to_none=step < 4)
        model(batches[world.rank], world.rank == 0).backward()
        optimizer.synchronize()
        for (name, ours), theirs in zip(model.named_parameters(), mean_of_gradients(model, batches)):
            expect(torch.allclose(ours.grad.to_dense(), theirs, rtol=1e-12, atol=1e-14), step, name, ours.grad, theirs)
        with optimizer.skip_synchronize():
            optimizer.step()


def gradients_stay_in_a_row(world):
    """From the second step on each gradient has the same address and borders its neighbor, and the temporary ones are freed."""
    hvd = begun()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
                                         backward_passes_per_step=2)
    made, places = [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: made.append(StorageWeakRef(it.grad.untyped_storage())))
    for step in range(4):
        optimizer.zero_grad()
        made.clear()
        model(torch.ones(1, 8)).sum().backward()
        alive = sum(not storage.expired() for storage in made)
        expect(len(made) == 6 and (alive == 0 or step == 0), f"step {step}: {alive} gradients are alive beside those that are averaged")
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        places.append(sorted((each.grad.data_ptr(), each.grad.nbytes) for each in model.parameters()))
    expect(places[1] == places[2] == places[3], places)
    expect(all(start + length == following for (start, length), (following, _) in zip(places[1], places[1][1:])), places[1])


def gradients_are_agreed_on_together(world):
    """The gradients of a step are agreed on in one round. In its first step rank 1 produces them in another order."""
    hvd = begun()
    from shoal.horovod._common import controller as controllers
    from shoal.horovod.torch import _world
    rounds, executor = [], _world._controllers[0]._executor
    gather = executor.gather
    executor.gather = lambda block: (rounds.append(1), gather(block))[1]
    held_s, controllers.HELD_S = controllers.HELD_S, 1e6
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    named = [(f"{i}.{name}", each) for i, layer in enumerate(layers) for name, each in layer.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named], 0.1), named)
    counts = []
    for step in range(4):
        rounds.clear()
        optimizer.zero_grad()
        hidden = torch.full((1, 8), world.rank + 1.0)
        for layer in reversed(layers) if (world.rank, step) == (1, 0) else layers:
            hidden = layer(hidden)
        hidden.sum().backward()
        optimizer.step()
        counts.append(len(rounds))
    controllers.HELD_S = held_s
    expect(counts == [1] * 4, counts)
    everywhere = hvd.allgather_object([each.grad.tolist() for _, each in named])
    expect(all(each == everywhere[0] for each in everywhere), "ranks have other averages")


def gradients_without_shared_memory(world):
    """Rank 0 gets no shared memory in its first step, while its gradients are on their way. The shim raises the error."""
    begun()
    import shoal.torch
    empty = shoal.torch.empty
    if world.rank == 0:
        shoal.torch.empty = lambda elements, **options: empty(1 << 55, **options)
    try:
        gradients_of_every_kind(world)
    finally:
        shoal.torch.empty = empty


def gradients_over_gloo(world):
    """The program's own default group, made without naming a back-end, has neither averages nor Shoal's memory."""
    if world.shim != ranks.SHIMS[-1]:
        raise Skip("no shim is asked")
    torch.distributed.init_process_group(timeout=ranks.GROUP_TIMEOUT)
    hvd = begun()
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(world.rank))).sum().backward()
        optimizer.step()
    expect(torch.equal(model.weight, torch.full((1, 3), 1.0 - world.size)), model.weight)
    expect(optimizer._shoal_gradients._memory is None, "gradients lie in memory of Shoal's")


def states_are_shared(world):
    """The state, the options and the next step are rank 0's, whether or not an optimizer is wrapped and whether or not it
    has state."""
    hvd = begun()
    makers = (lambda groups: torch.optim.Adam(groups, lr=0.1 * (world.rank + 1), amsgrad=True),
              lambda groups: torch.optim.SGD(groups, lr=0.1 * (world.rank + 1), momentum=0.9))
    for make in makers:
        for is_wrapped in (False, True):
            torch.manual_seed(3)
            layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
            groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": 0.01 + world.rank}]
            optimizer = make(groups)
            if world.rank == 0:
                for _ in range(2):
                    step_of(layers, optimizer)
            optimizer = hvd.DistributedOptimizer(optimizer) if is_wrapped else optimizer
            hvd.broadcast_parameters([each for layer in layers for each in layer.parameters()], 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
            step_of(layers, optimizer)
            told = [(describe(optimizer.state_dict()), [layer.weight.tolist() for layer in layers])]
            everywhere = hvd.allgather_object(told)
            expect(all(each == told for each in everywhere), *everywhere)
            expect([group["lr"] for group in optimizer.param_groups] == [0.1, 0.01], optimizer.param_groups)


def step_of(layers, optimizer):
    optimizer.zero_grad()
    layers[1](layers[0](torch.ones(2, 3))).sum().backward()
    optimizer.step()


def describe(value):
    """Describes a value without tensors, so that == compares."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: describe(each) for key, each in value.items()}
    return [describe(each) for each in value] if isinstance(value, (list, tuple)) else value


def norm_over_all_ranks(world):
    hvd = begun()
    whole = torch.arange(12.0).view(6, 2).square()
    alone, mine = torch.nn.BatchNorm1d(2), hvd.SyncBatchNorm(2)
    part = slice(world.rank * 6 // world.size, (world.rank + 1) * 6 // world.size)
    expect(torch.allclose(mine(whole[part]), alone(whole)[part], atol=1e-5), "output")
    expect(torch.allclose(mine.running_var, alone.running_var), mine.running_var, alone.running_var)
    raises(ValueError, lambda: hvd.SyncBatchNorm(2, process_set=hvd.ProcessSet([0])), "over all ranks")


def goes_on_after_a_restart(world):
    """The second run represents the one that a launcher starts after a failure."""
    hvd = begun()

    def train(state, fails):
        seen.append((state.epoch, state.model.weight.item()))
        with torch.no_grad():
            state.model.weight += 1
        state.epoch += 1
        state.commit()
        state.epoch = 99  # lost, because it is not committed
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


def samples_go_on_within_an_epoch(world):
    """The ranks divide the samples that the latest commit did not count. An epoch has each sample once, and some twice if
    they do not divide evenly."""
    hvd = begun()
    count, batch = 7 * world.size - 1, 2
    sampler = hvd.elastic.ElasticSampler(range(count), seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.set_epoch(4)
    first = list(sampler)
    for number in range(2):
        sampler.record_batch(number, batch)
    state.commit()
    sampler.record_batch(2, batch)
    state.restore()
    expect(len(first) == 7 and len(sampler) == 3 and state.sampler.epoch == 4, first, list(sampler))
    taken = [sum(each, []) for each in zip(*hvd.allgather_object((first[:2 * batch], list(sampler))))]
    expect(set(taken[0]).isdisjoint(taken[1]) and set(sum(taken, [])) == set(range(count)), taken)
    sampler.set_epoch(5)
    expect(len(sampler) == 7 and list(sampler) != first, first, list(sampler))
    tiny = hvd.elastic.ElasticSampler(range(1), shuffle=False)
    expect(list(tiny) == [0], list(tiny))
    tiny.record_batch(0, 1)
    tiny.reset()
    expect(list(tiny) == [], list(tiny))


DIES_IN_A_COMMIT = """
import os, signal, torch
import shoal.horovod.torch as hvd

def replace_or_die(*names, replace=os.replace):
    if state.epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)

@hvd.elastic.run
def train(state):
    while state.epoch < 4:
        print("epoch", state.epoch, state.model.weight.item(), flush=True)
        hvd.barrier()
        with torch.no_grad():
            state.model.weight += 1
        state.epoch += 1
        state.commit()
        hvd.barrier()

hvd.init()
if os.environ["SHOAL_RESTART"] == "0":
    os.replace = replace_or_die
model = torch.nn.Linear(1, 1)
torch.nn.init.constant_(model.weight, 10.0 * hvd.rank())
state = hvd.elastic.TorchState(model, epoch=0)
train(state)
print("ended", model.weight.item(), flush=True)
"""


def goes_on_after_a_death(world):
    """Rank 0 is killed when its third commit is written but not yet in place. The launcher restarts all ranks, which resume
    from the second."""
    if world.shim != ranks.SHIMS[-1]:
        raise Skip("one shim is enough")
    with tempfile.TemporaryDirectory() as folder:
        program, state = pathlib.Path(folder, "train.py"), pathlib.Path(folder, "state")
        program.write_text(DIES_IN_A_COMMIT)
        code, out, err = tap.call(COMMAND, "run", "-n", "2", "--restarts", "1", ranks.warm_python, program, timeout=150,
                                  env={**os.environ, "HOROVOD_ELASTIC_STATE": str(state), "SHOAL_TORCH_SHIM": world.shim})
        expect(code == 0 and not state.exists(), code, out, err)
    wanted = [f"epoch {epoch} {epoch}.0" for epoch in (0, 1, 2, 2, 3)] + ["ended 4.0"]
    for rank in "01":
        expect([line[3:] for line in out.splitlines() if line.startswith(f"{rank}| ")] == wanted, out, err)
    expect("rank 0 (pid" in err and "killed by signal 9" in err, err)


def ended(body):
    """Ends Horovod, because the next case may have another number of ranks."""
    def run(world):
        body(world)
        begun().shutdown()
    return run


CASES = [Case(body.__name__, ended(body), sizes=(1, 2, 3)) for body in (any_order, uneven, joins, trains_as_one, norm_over_all_ranks,
                                                                    goes_on_after_a_restart)]
CASES += [Case(body.__name__, ended(body), sizes=(2,)) for body in (handles_and_groups, gradients_stay_in_a_row, states_are_shared,
                                                                  gradients_are_agreed_on_together, a_scheduler_made_before,
                                                                  parameters_that_change)]
CASES += [Case(body.__name__, ended(body), sizes=(2, 3)) for body in (operations_have_gradients, gradients_of_every_kind,
                                                                    samples_go_on_within_an_epoch)]
CASES += [Case("gradients_without_shared_memory", ended(gradients_without_shared_memory), sizes=(2,))]
CASES += [Case("gradients_over_gloo", ended(gradients_over_gloo), sizes=(2,), init=False)]
CASES += [Case("averages_of_float16", ended(averages_of_float16), sizes=(4,), init=False, fresh=True)]
CASES += [Case("goes_on_after_a_death", goes_on_after_a_death, sizes=(1,), init=False, timeout_s=170)]
CASES += [Case("some_ranks_train", ended(some_ranks_train), sizes=(3,))]
CASES += [Case("what_an_ended_rank_lacks_fails_beside_sets", what_an_ended_rank_lacks_fails_beside_sets, sizes=(3,))]
CASES += [Case("mismatches", ended(mismatches), sizes=(2,)), Case("sets", ended(sets), sizes=(2, 3))]

if __name__ == "__main__":
    ranks.run(CASES, has_programs=True)
