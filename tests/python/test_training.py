#!/usr/bin/env python3
"""Training: every way to split the work has the gradients of one process that does it all, except for rounding."""
import gc
import os
import shutil
import tempfile
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ranks import Case, Skip, expect
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BATCH = 24  # divisible by every number of ranks and of micro-batches
STEPS = 500
WIDE = 300  # of the network for many steps, whose gradients are 0.4 MB
KEPT_BYTES = 12 << 20  # allowed growth of a process over the last 400 of these steps; torch itself needs some
warnings.filterwarnings("ignore")


# ---- The model, and the results of one process ----


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCH, 12, generator=generator), torch.randn(BATCH, 4, generator=generator)


def share(world, tensor):
    """Returns this rank's part of a batch."""
    return tensor.chunk(world.size)[world.rank]


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def trained_alone(steps=3, clip=None):
    """Returns the model after `steps` steps in one process, with the gradients of the last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(model, alone, tolerance=1e-5):
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        close(whole(ours.detach()), theirs.detach(), tolerance, name)
        close(whole(ours.grad), theirs.grad, tolerance, name + ".grad")


def close(ours, theirs, tolerance, *told):
    worst = (ours.float() - theirs.float()).abs().max().item() if ours.numel() else 0.0
    expect(ours.shape == theirs.shape and worst <= tolerance, *told, f"differs by {worst}, of which {tolerance} is allowed")


def train(world, model, optimizer, steps=3, clip=None):
    x, y = (share(world, tensor) for tensor in batch())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mapped_by_shoal():
    """Returns the pieces of shared memory, its own and its peers', that this process has mapped."""
    with open("/proc/self/maps") as file:
        return sum("shoal-memory" in line for line in file)


# ---- DistributedDataParallel ----

DDP_FORMS = (
    ("plain", {}, None, 1e-5),
    ("with find_unused_parameters", {"find_unused_parameters": True}, None, 1e-5),
    ("with gradient_as_bucket_view", {"gradient_as_bucket_view": True}, None, 1e-5),
    ("with static_graph", {"static_graph": True}, None, 1e-5),
    ("with many buckets", {"bucket_cap_mb": 0.0005}, None, 1e-5),
    ("with allreduce_hook", {}, default_hooks.allreduce_hook, 1e-5),
    ("with fp16_compress_hook", {}, default_hooks.fp16_compress_hook, 2e-3),
)


def ddp_case(name, options, hook, tolerance):
    def body(world):
        model = DistributedDataParallel(network(), **options)
        if hook:
            model.register_comm_hook(None, hook)
        train(world, model, sgd(model))
        compare(model.module, trained_alone(), tolerance)
    return Case(f"DDP {name}", body, sizes=(1, 2, 4))


class Branches(nn.Module):
    """Each rank uses one of two branches; the other has no gradient there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x, use_left):
        return (self.left if use_left else self.right)(x)


def ddp_unused(world):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x, y = (share(world, tensor) for tensor in batch())
    alone = Branches()
    shares = zip(*(tensor.chunk(world.size) for tensor in batch()))
    losses = [nn.functional.mse_loss(alone(its_x, rank % 2 == 0), its_y) for rank, (its_x, its_y) in enumerate(shares)]
    (sum(losses) / world.size).backward()
    nn.functional.mse_loss(model(x, world.rank % 2 == 0), y).backward()
    for ours, theirs in zip(model.module.parameters(), alone.parameters()):
        if theirs.grad is not None:
            close(ours.grad, theirs.grad, 1e-5)


def ddp_power_sgd(world):
    """A lossy compression: the replicas stay equal and the loss decreases."""
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = loss_of(model.module, *batch()).item()
    train(world, model, sgd(model), steps=10)
    expect(loss_of(model.module, *batch()).item() < before, "the loss did not go down")
    for parameter in model.module.parameters():
        others = [torch.empty_like(parameter) for _ in range(world.size)]
        dist.all_gather(others, parameter.detach())
        expect(all(torch.equal(other, others[0]) for other in others), "the replicas differ")


def ddp_buffers(world):
    """Running means and counters of BatchNorm are rank 0's."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    x, y = (share(world, tensor) for tensor in batch())
    for _ in range(3):
        loss_of(model, x, y).backward()
    model(x)  # first copies the buffers of rank 0, then adds this rank's batch to the means
    norm = model.module[1]
    expect(norm.num_batches_tracked.item() == 4, norm.num_batches_tracked)
    model.eval()
    model(x)
    means = [torch.empty(8) for _ in range(world.size)]
    dist.all_gather(means, norm.running_mean)
    expect(all(torch.equal(mean, means[0]) for mean in means), means)


def ddp_buckets_are_shared(world):
    """DDP asks the group for the memory of its buckets, so that nothing is copied on the way to other ranks."""
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo gives no memory")
    if world.shim == "python":
        raise Skip("torch asks no group in Python")
    before = mapped_by_shoal()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    expect(mapped_by_shoal() > before, "the buckets lie in ordinary memory")
    train(world, model, sgd(model))
    compare(model.module, trained_alone())


def complex_gradients(type_, group, **options):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7, dtype=type_), nn.Linear(7, 3, dtype=type_))
    model = DistributedDataParallel(model, process_group=group, **options)
    for step in range(2):  # DDP creates new buckets after the first step
        x = torch.randn(4, 5, dtype=type_) * (dist.get_rank() + 1)
        model(x).abs().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def ddp_complex(world):
    """The sums equal those of Gloo. DDP treats complex gradients as twice as many real numbers."""
    gloo = dist.new_group(backend="gloo")
    for type_, tolerance in ((torch.complex64, 1e-5), (torch.complex128, 1e-12)):
        for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
            for ours, theirs in zip(complex_gradients(type_, None, **options), complex_gradients(type_, gloo, **options)):
                expect(ours.dtype is type_, ours.dtype)
                close(torch.view_as_real(ours), torch.view_as_real(theirs), tolerance, type_, options)


def ddp_no_sync(world):
    model = DistributedDataParallel(network())
    x, y = (share(world, tensor).chunk(2) for tensor in batch())
    with model.no_sync():
        (loss_of(model, x[0], y[0]) / 2).backward()
    (loss_of(model, x[1], y[1]) / 2).backward()
    alone = network()
    loss_of(alone, *batch()).backward()
    compare(model.module, alone)


# ---- Fully sharded ----


def sharded(model, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2_plain(world):
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
    train(world, model, sgd(model))
    compare(model, trained_alone())


def fsdp2_clipped(world):
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
    train(world, model, sgd(model), clip=0.05)
    compare(model, trained_alone(clip=0.05))


def fsdp2_bfloat16(world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)), mp_policy=policy)
    train(world, model, sgd(model))
    compare(model, trained_alone(), 2e-2)


def fsdp2_float16_gradients(world):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)), mp_policy=policy)
    train(world, model, sgd(model))
    compare(model, trained_alone(), 2e-3)


def fsdp2_divided_by(world):
    """A custom factor: gradients are scaled sums."""
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
    setter = getattr(model, "set_gradient_divide_factor", None) or getattr(model, "set_reduce_scatter_divide_factor", None)
    if setter is None:
        raise Skip("this torch has no such factor")
    for module in model.modules():
        getattr(module, setter.__name__, lambda factor: None)(4.0 * world.size)
    alone = network()
    (loss_of(alone, *batch()) / 4).backward()
    loss_of(model, *(share(world, tensor) for tensor in batch())).backward()
    compare(model, alone)


def fsdp2_two_dimensions(world):
    """HSDP: replicas of shards."""
    for shape in {(1, world.size), (world.size, 1), (2, world.size // 2)} if world.size > 1 else {(1, 1)}:
        model = sharded(network(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        train(world, model, sgd(model))
        compare(model, trained_alone())


def fsdp2_memory_of_the_group(world):
    model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        raise Skip("this torch asks no group for memory")
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo gives no memory")
    for module in model.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    before = mapped_by_shoal()
    train(world, model, sgd(model), steps=5)
    compare(model, trained_alone(steps=5))
    expect(mapped_by_shoal() > before, "FSDP2 did not ask for memory that peers can map")


def fsdp2_complex_memory_of_the_group(world):
    """Unlike DDP's buckets, memory of the group has the requested type here."""
    torch.manual_seed(5)
    alone = nn.Linear(6, 8, dtype=torch.complex64)
    x = torch.randn(4, 6, dtype=torch.complex64)
    wanted = alone(x).detach()
    model = fully_shard(alone, mesh=init_device_mesh("cpu", (world.size,)))
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        raise Skip("this torch asks no group for memory")
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo gives no memory")
    model.set_allocate_memory_from_process_group_for_comm(True)
    with torch.no_grad():
        close(torch.view_as_real(model(x)), torch.view_as_real(wanted), 1e-5)


# FSDP of the first generation: (name, options, clip, tolerance).
FSDP1_FORMS = (
    ("plain", {}, None, 1e-5),
    ("clipped", {}, 0.05, 1e-5),
    ("with SHARD_GRAD_OP", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, None, 1e-5),
    ("with NO_SHARD", {"sharding_strategy": ShardingStrategy.NO_SHARD}, None, 1e-5),
    ("with use_orig_params", {"use_orig_params": True}, None, 1e-5),
    ("with a unit per layer", {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, None, 1e-5),
    ("with bfloat16", {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, None, 2e-2),
)


def fsdp1_model(**options):
    return FullyShardedDataParallel(network(), device_id=torch.device("cpu"), **options)


def compare_parameters(model, alone, tolerance=1e-5):
    with FullyShardedDataParallel.summon_full_params(model):
        ours, theirs = list(model.parameters()), list(alone.parameters())
        expect(len(ours) == len(theirs), len(ours), len(theirs))
        for one, other in zip(ours, theirs):
            close(one.detach(), other.detach(), tolerance)


def fsdp1_case(name, options, clip, tolerance):
    def body(world):
        model = fsdp1_model(**options)
        optimizer = sgd(model)
        x, y = (share(world, tensor) for tensor in batch())
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if clip:
                model.clip_grad_norm_(clip)
            optimizer.step()
        compare_parameters(model, trained_alone(clip=clip), tolerance)
    return Case(f"FSDP1 {name}", body, sizes=(1, 2, 4))


def fsdp1_two_dimensions(world):
    """Replicas of shards."""
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp1_model(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    train(world, model, sgd(model))
    compare_parameters(model, trained_alone())


def fsdp1_state(world):
    """State dictionaries, whole and in shards, of the model and of an optimizer with state."""
    model = fsdp1_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(world, model, optimizer)
    others = []
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
        others.append(fsdp1_model())
        adam = torch.optim.Adam(others[-1].parameters(), lr=0.01)
        with FullyShardedDataParallel.state_dict_type(others[-1], kind):
            others[-1].load_state_dict(state[0])
            adam.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(others[-1], adam, state[1]))
        train(world, others[-1], adam, steps=1)
    train(world, model, optimizer, steps=1)
    with FullyShardedDataParallel.summon_full_params(model):
        for other in others:
            compare_parameters(other, model, 1e-6)


def zero_redundancy(world):
    for options in ({}, {"parameters_as_bucket_view": True}):
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, **options)
        train(world, model, optimizer, steps=4)
        alone = network()
        adam = torch.optim.Adam(alone.parameters(), lr=0.01)
        for _ in range(4):
            adam.zero_grad()
            loss_of(alone, *batch()).backward()
            adam.step()
        for ours, theirs in zip(model.module.parameters(), alone.parameters()):
            close(ours.detach(), theirs.detach(), 1e-4)
        optimizer.consolidate_state_dict(to=0)
        if world.rank == 0:
            state = optimizer.state_dict()["state"]
            for number, theirs in adam.state_dict()["state"].items():
                close(state[number]["exp_avg"], theirs["exp_avg"], 1e-5, number)


def zero_step_in_a_hook(world):
    """Each owner steps as soon as its bucket is ready, and broadcasts, during the backward pass."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    x, y = (share(world, tensor) for tensor in batch())
    for _ in range(5):
        model.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    alone = trained_alone(steps=3)  # an overlapped optimizer spends the first two steps on learning the order of buckets
    for ours, theirs in zip(model.module.parameters(), alone.parameters()):
        close(ours.detach(), theirs.detach(), 1e-5)


# ---- Tensor parallel, DTensor ----


def tensor_parallel(world):
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss_of(model, *batch()).backward()
    alone = network()
    loss_of(alone, *batch()).backward()
    compare(model, alone)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def sequence_parallel(world):
    mesh = init_device_mesh("cpu", (world.size,))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1))}
    model = parallelize_module(Block(), mesh, plan)
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(5))
    output = model(x.chunk(world.size, dim=1)[world.rank])
    output.square().sum().backward()
    alone = Block()
    expected = alone(x)
    expected.square().sum().backward()
    close(output.detach(), expected.detach().chunk(world.size, dim=1)[world.rank], 1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        close(whole(ours.grad), theirs.grad, 1e-4, name)


def dtensor_redistribute(world):
    mesh = init_device_mesh("cpu", (world.size,))
    placements = (Replicate(), Shard(0), Shard(1))
    for shape in ((8, 12), (5, 7), (1, 3)):  # some of them do not divide evenly
        tensor = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        for first in placements:
            for second in placements:
                given = distribute_tensor(tensor, mesh, [first])
                expect(torch.equal(given.redistribute(mesh, [second]).full_tensor(), tensor), shape, first, second)
    for target in placements:
        part = DTensor.from_local(torch.full((6, 5), float(world.rank)), mesh, [Partial()])
        result = part.redistribute(mesh, [target]).full_tensor()
        expect(torch.equal(result, torch.full((6, 5), float(sum(range(world.size))))), target)


# ---- Pipelining ----

SCHEDULES = (  # class, stages per rank
    ("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleLoopedBFS", 2),
    ("ScheduleInterleavedZeroBubble", 2), ("ScheduleZBVZeroBubble", 2), ("ScheduleDualPipeV", 2),
)


def pipeline_network(stages):
    torch.manual_seed(6)
    return [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(stages)]


def pipeline_case(name, per_rank):
    def body(world):
        kind = getattr(schedules, name, None)
        if kind is None:
            raise Skip("this torch has no such schedule")
        count = world.size * per_rank
        mine = [world.rank] if per_rank == 1 else [world.rank, world.rank + world.size]
        if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
            mine = [world.rank, count - 1 - world.rank]
        parts = pipeline_network(count)
        stages = [PipelineStage(parts[number], number, count, torch.device("cpu")) for number in mine]
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(BATCH, 12, generator=generator), torch.randn(BATCH, 12, generator=generator)
        schedule = kind(stages[0] if per_rank == 1 else stages, n_microbatches=8, loss_fn=nn.functional.mse_loss)
        alone = nn.Sequential(*pipeline_network(count))
        nn.functional.mse_loss(alone(x), y).backward()
        for turn in range(2):
            for part in parts:
                part.zero_grad()
            losses = []
            schedule.step(*([x] if 0 in mine else []), **({"target": y, "losses": losses} if count - 1 in mine else {}))
            for number in mine:
                for ours, theirs in zip(parts[number].parameters(), alone[number].parameters()):
                    close(ours.grad, theirs.grad, 1e-5, name, turn, number)
    return Case(f"pipelining {name}", body, sizes=(1, 2, 4))


# ---- Checkpoints ----


def shared_folder(world):
    box = [tempfile.mkdtemp(prefix="shoal-checkpoint-") if world.rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def distributed_checkpoint(world):
    folder = shared_folder(world)
    try:
        for turn, save in enumerate((checkpoint.save, lambda *args, **kwargs: checkpoint.async_save(*args, **kwargs).result())):
            model = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
            train(world, model, sgd(model), steps=2 + turn)
            state = {"model": model.state_dict(), "step": torch.tensor(turn)}
            save(state, checkpoint_id=os.path.join(folder, str(turn)))
            dist.barrier()
            fresh = sharded(network(), mesh=init_device_mesh("cpu", (world.size,)))
            target = {"model": fresh.state_dict(), "step": torch.tensor(-1)}
            checkpoint.load(target, checkpoint_id=os.path.join(folder, str(turn)))
            fresh.load_state_dict(target["model"])
            for ours, theirs in zip(fresh.parameters(), trained_alone(steps=2 + turn).parameters()):
                close(whole(ours.detach()), theirs.detach(), 1e-5)
            expect(target["step"].item() == turn)
            dist.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


# ---- Under torch's own checker ----


def under_detail(world):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: before each call, torch compares it on all ranks, over its own Gloo group."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(ranks.BACKEND, timeout=ranks.GROUP_TIMEOUT)
    if world.shim == "python":
        raise Skip("torch takes a group in Python as it is")
    wrapper = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    expect("Wrapper" in wrapper, "torch did not put its checker before the back-end", wrapper)
    for body in (fsdp2_plain, fsdp2_two_dimensions, fsdp1_state, zero_redundancy, tensor_parallel, sequence_parallel,
                 dtensor_redistribute, distributed_checkpoint, pipeline_case("Schedule1F1B", 1).body):
        body(world)
        print(f"{body.__name__} is done")


# ---- Many steps ----


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def losses_of(world, group):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(12, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 4))
    model = DistributedDataParallel(layers, process_group=group)
    optimizer = sgd(model)
    losses, at_100 = [], 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (share(world, torch.randn(BATCH, width, generator=generator)) for width in (12, 4))
        optimizer.zero_grad()
        loss = loss_of(model, x, y.add(x[:, :4]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 100:
            at_100 = resident_bytes()
    return torch.tensor(losses), resident_bytes() - at_100


def many_steps(world):
    """500 steps: the loss curve equals Gloo's, and memory does not grow."""
    ours, grown = losses_of(world, None)
    theirs, _ = losses_of(world, dist.new_group(backend="gloo"))
    print(f"grown by {grown >> 10} KiB")
    expect(grown < KEPT_BYTES, f"the process grew by {grown >> 10} KiB in 400 steps")
    close(ours, theirs, 1e-4, "losses")
    expect(ours[-50:].mean() < 0.8 * ours[:10].mean(), "the loss does not go down", ours[:10].mean(), ours[-50:].mean())


PLAIN = (ddp_unused, ddp_power_sgd, ddp_buffers, ddp_complex, ddp_no_sync, fsdp2_complex_memory_of_the_group, fsdp2_plain, fsdp2_clipped, fsdp2_bfloat16, fsdp2_float16_gradients, fsdp2_divided_by,
         fsdp2_two_dimensions,
         fsdp1_state, zero_redundancy, zero_step_in_a_hook, tensor_parallel, sequence_parallel, dtensor_redistribute,
         distributed_checkpoint)

CASES = [ddp_case(*row) for row in DDP_FORMS]
CASES += [Case(body.__name__, body, sizes=(1, 2, 4)) for body in PLAIN]
CASES += [fsdp1_case(*row) for row in FSDP1_FORMS]
CASES += [Case("fsdp1_two_dimensions", fsdp1_two_dimensions, sizes=(4,))]
CASES += [Case(body.__name__, body, sizes=(1, 2, 4), fresh=True) for body in (ddp_buckets_are_shared, fsdp2_memory_of_the_group)]
CASES += [pipeline_case(*row) for row in SCHEDULES]
CASES += [Case("under_detail", under_detail, sizes=(2,), init=False, fresh=True, timeout_s=300)]
CASES += [Case("many_steps", many_steps, sizes=(2,), timeout_s=300)]

if __name__ == "__main__":
    ranks.run(CASES)
