#!/usr/bin/env python3
"""Tensors on a device over "shoal": torch, the back-end in C++, the library, and the stand-in for CUDA's driver in its
hostile modes (device/stand_in.cpp, tests/mock/cuda/mock_cuda.h). A fault that the stand-in notices fails the case.

With STAND_IN_NAME=cuda the device replaces CUDA, also by name, in a torch built for CPUs, and only the cases of streams
run. With SHOAL_TEST_CUDA the device is a GPU of this machine (device/real_cuda.py; make test-gpu)."""
import contextlib
import dataclasses
import datetime
import io
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import ranks

os.environ.setdefault("MOCK_CUDA", "late=20,torn=3,poison,reuse,devices=2")  # read when a rank loads the driver

import inputs  # noqa: E402
import test_ddp  # noqa: E402
import test_ops  # noqa: E402
import test_reduction  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from inputs import check, numbers, operators, place, reduced  # noqa: E402
from ranks import Case, expect  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

sys.path.insert(1, str(pathlib.Path(__file__).with_name("device")))
IS_REAL = "SHOAL_TEST_CUDA" in os.environ
if IS_REAL:
    import real_cuda as stand_in  # noqa: E402
    ranks.START = "spawn"  # importing torch's optimizers counts GPUs
else:
    import stand_in  # noqa: E402
    import torch._dynamo  # noqa: E402, F401: else each rank's first optimizer imports it, in two seconds

inputs.DEVICE = stand_in.NAME
ranks.SHIMS = [shim for shim in ranks.SHIMS if shim == "c++"]  # the shim that supports devices
SIZE = 2
LONG = 3 << 20  # in float32: several units of a ring


def load_backend():
    stand_in.start()
    import shoal.torch  # noqa: F401


ranks.load_backend = load_backend


# ---- Every operation, type and layout: the cases of test_ops.py, with tensors on the device ----

TYPES = (torch.float32, torch.bfloat16, torch.bool)
COUNTS = (0, 7, 5000)


def reducing_case(operation):
    def body(world):
        for type_ in TYPES:
            for turn, name in enumerate(operators(type_)):
                layout = inputs.LAYOUTS[turn % len(inputs.LAYOUTS)]
                operation(world, type_, COUNTS[turn % len(COUNTS)], name, layout, turn % 2 == 1)
        operation(world, torch.float32, COUNTS[-1], "SUM", "strided", True)
    return Case(operation.__name__, body, sizes=(3,))


def moving_case(operation):
    def body(world):
        for type_ in (torch.float32, torch.complex64):
            for turn, layout in enumerate(inputs.LAYOUTS):
                operation(world, type_, COUNTS[turn % len(COUNTS)], layout, turn % 2 == 1)
        operation(world, torch.float32, COUNTS[-1], "strided", True)
    return Case(operation.__name__, body, sizes=(3,))


def on_device(body, *arguments):
    """Returns a case of test_ops.py in which torch creates tensors on the device by default."""
    def there(world):
        with stand_in.device():
            body(world, *arguments)
    return there


THERE = (test_ops.works_finished_out_of_order, test_ops.works_dropped, test_ops.works_dropped_of_tensors_with_gaps,
         test_ops.futures, test_ops.futures_chained, test_ops.messages_beside_collectives, test_ops.batches_that_cross,
         test_ops.objects, test_ops.barriers)

# ---- Streams ----


def ones(count=LONG, value=1.0):
    return torch.full((count,), value, device=stand_in.NAME)


class Held:
    """Holds the device, so that nothing runs there, until the block ends."""

    def __enter__(self):
        stand_in.driver.hold(True)

    def __exit__(self, *_):
        stand_in.driver.hold(False)


def waits_on_the_stream_only(world):
    """Both forms of the call, and wait(), return while the device is held. A later read on the stream gets the sum."""
    for async_op in (True, False):
        tensor, copy = ones(), ones(value=0.0)
        with Held():
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
                expect(not work.is_completed(), "it is done, and nothing has run")
            copy.copy_(tensor)
        check(copy, torch.full((LONG,), float(world.size)))


def a_source_is_written_after_wait(world):
    """The sum contains neither what the stream writes to a tensor after wait() nor what it held before the call."""
    tensor, before, later = ones(value=0.0), ones(), ones(value=77.0)
    result = ones(value=0.0)
    with Held():
        tensor.copy_(before)
        dist.all_reduce(tensor, async_op=True).wait()
        result.copy_(tensor)
        tensor.copy_(later)
    check(result, torch.full((LONG,), float(world.size)))
    check(tensor, torch.full((LONG,), 77.0))


def on_another_stream(world):
    """The call uses the current stream, whichever it is."""
    stream = stand_in.api().Stream()
    tensor, before, result = ones(value=0.0), ones(), ones(value=0.0)
    stream.wait_stream(stand_in.api().current_stream())
    with Held(), stand_in.api().stream(stream):
        tensor.copy_(before)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        result.copy_(tensor)
    stand_in.api().current_stream().wait_stream(stream)
    check(result, torch.full((LONG,), float(world.size)))


def tensors_are_held(world):
    """A tensor that the program drops at once is kept until somebody waits or the work is done. Otherwise its memory would
    be reused."""
    output, mine, other = ones(world.size * LONG, 0.0), ones(value=float(world.rank)), ones(value=77.0)
    with Held():
        work = dist.all_gather_into_tensor(output, another(mine), async_op=True)
        others = [another(other) for _ in range(3)]
        work.wait()
    check(output, torch.arange(float(world.size)).repeat_interleave(LONG))
    for _ in range(5):  # nobody waits for these, and their elements are not contiguous
        dist.all_reduce(another(mine)[::2], async_op=True)
    check_sum(world)
    del others


def copies_are_held(world):
    """Copies that a call makes live until its stream has used them, whichever stream waits."""
    stream, tensor = stand_in.api().Stream(), place(torch.ones(5000), "strided")
    with Held():
        work = dist.all_reduce(tensor, async_op=True)
        with stand_in.api().stream(stream):
            work.wait()
        del work
    stand_in.api().current_stream().wait_stream(stream)
    check(tensor, torch.full((5000,), float(world.size)))


def another(source):
    """Returns a new tensor with these elements, filled without waiting for the device."""
    return torch.empty_like(source).copy_(source)


def wait_with_a_timeout(world):
    """wait(timeout) blocks the host until the work is done or the timeout has passed. After a timeout nothing is lost."""
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait(ranks.GROUP_TIMEOUT)
    expect(work.is_completed() and work.is_success(), "wait(timeout) came back before the end")
    with Held():
        work = dist.all_reduce(tensor, async_op=True)
        text = timeout_of(work)
        expect("timed out after 200 ms" in text, text)
    work.wait(ranks.GROUP_TIMEOUT)
    check(tensor, torch.full((LONG,), float(world.size ** 2)))


def timeout_of(work):
    """Returns the error text of a wait of 200 ms, during which the device is held."""
    try:
        work.wait(datetime.timedelta(milliseconds=200))
    except dist.DistBackendError as error:
        return str(error)
    return "wait(timeout) came back"


def wait_on_a_thread(world):
    """Only Python's main thread handles signals, but a wait on another thread also ends."""
    tensor, told = ones(), []
    dist.all_reduce(tensor, async_op=True).wait(ranks.GROUP_TIMEOUT)  # allocates, which would wait while a GPU sleeps
    with Held():
        work = dist.all_reduce(tensor, async_op=True)
        thread = threading.Thread(target=lambda: told.append(timeout_of(work)))
        thread.start()
        thread.join(ranks.TIMEOUT_S)
        expect(told and "timed out after 200 ms" in told[0], told)
    work.wait(ranks.GROUP_TIMEOUT)
    check(tensor, torch.full((LONG,), float(world.size ** 2)))


def wait_for_copies_back(world):
    """The timeout and signals also end a wait for the copies after a request. Here the request is done and the copies are
    held."""
    tensors, options = [place(torch.ones(5), "strided") for _ in range(40)], dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    with Held():
        work = dist.group.WORLD.allreduce_coalesced(tensors, options)
        result = work.get_future_result()
        while not result.done():
            stand_in.driver.step(1)
            time.sleep(0.005)
        began = time.monotonic()
        try:
            work.wait(datetime.timedelta(milliseconds=200))
            raise AssertionError("wait(timeout) came back before the copies")
        except dist.DistBackendError as error:
            expect("timed out after 200 ms" in str(error), error)
        expect(0.2 <= time.monotonic() - began < 10, time.monotonic() - began)
        with interrupted(0.2):
            work.wait(ranks.GROUP_TIMEOUT)
    work.wait(ranks.GROUP_TIMEOUT)
    for tensor in tensors:
        check(tensor, torch.full((5,), float(world.size)))


@contextlib.contextmanager
def interrupted(after_s):
    """Sends a signal after this time. Fails unless its handler's exception leaves the block."""
    def handler(*_):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
        raise AssertionError("nothing was interrupted")
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def blocking_mode(world):
    os.environ["SHOAL_TORCH_BLOCKING_WAIT"] = "1"
    work = dist.all_reduce(ones(), async_op=True)
    work.wait()
    expect(work.is_completed(), "wait() came back before the end")
    os.environ["SHOAL_TORCH_BLOCKING_WAIT"] = "yes"
    try:
        work.wait()
        raise AssertionError("a word that means nothing was taken")
    except ValueError as error:
        expect('SHOAL_TORCH_BLOCKING_WAIT is "yes", but must be 0 or 1' in str(error), error)
    finally:
        del os.environ["SHOAL_TORCH_BLOCKING_WAIT"]
    dist.barrier()


def futures_are_complete_at_once(world):
    """Streams order the use of a future's value, so the future is complete at once; only the work's result waits for the
    end."""
    tensor, copy = ones(), ones(value=0.0)
    with Held():
        work = dist.all_reduce(tensor, async_op=True)
        future, result = work.get_future(), work.get_future_result()
        expect(future.done() and not result.done(), "of a work that has not begun", future.done(), result.done())
        chained = future.then(lambda done: copy.copy_(done.value()[0]))
        expect(chained.done(), "a callback waited")
        chained.wait()
    check(copy, torch.full((LONG,), float(world.size)))
    expect(result.wait() == 0, result.value())


def futures_of_batches(world):
    """Like those of single works: complete at once, and a use of the value comes after the batch on the stream."""
    peer, got, copies = 1 - world.rank, ones(value=0.0), [ones(value=0.0) for _ in range(2)]
    calls = [dist.P2POp(dist.isend, ones(value=float(world.rank + 1)), peer), dist.P2POp(dist.irecv, got, peer)]
    with Held():
        future = dist.batch_isend_irecv(calls)[0].get_future()
        expect(future.done(), "it waited")
        chained = future.then(lambda done: copies[0].copy_(done.value()[1]))
        future.wait()
        copies[1].copy_(got)
        chained.wait()
    for copy in copies:
        check(copy, torch.full((LONG,), float(peer + 1)))


def copies_that_fail(world):
    """A refused copy back becomes the error of the call's future and work. The group continues."""
    peer, got = 1 - world.rank, place(torch.zeros(5), "strided")
    sent = dist.isend(ones(5), peer)
    stand_in.driver.fail("cuLaunchKernel", 1, 1)
    work = dist.irecv(got, peer)
    for call in (work.get_future().wait, work.wait):
        try:
            call()
            raise AssertionError("nothing was raised")
        except RuntimeError as error:
            expect("answered CUDA_ERROR_INVALID_VALUE" in str(error), error)
    sent.wait()
    check_sum(world)


def coalesced_there(world):
    for async_ops in (False, True):
        tensors, copies = [ones(count) for count in (5, LONG, 7)], [ones(count, 0.0) for count in (5, LONG, 7)]
        with Held():
            with dist._coalescing_manager(device=stand_in.device(), async_ops=async_ops) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            if async_ops:
                manager.wait()
            for tensor, copy in zip(tensors, copies):
                copy.copy_(tensor)
        for copy in copies:
            check(copy, torch.full((copy.numel(),), float(world.size)))


def messages_both_ways(world):
    """Each rank sends first, because a send does not wait for a receive after it on the stream."""
    peer, got = 1 - world.rank, ones(value=0.0)
    works = [dist.isend(ones(value=float(world.rank)), peer), dist.irecv(got, peer)]
    for work in works:
        work.wait()
    check(got, torch.full((LONG,), float(peer)))


def batch(world, count):
    """Both ranks list their sends first. One receives in another order than the other sends."""
    peer, tags = 1 - world.rank, (1, 2) if world.rank else (2, 1)
    got = {tag: ones(count, 0.0) for tag in tags}
    calls = [dist.P2POp(dist.isend, ones(count, float(world.rank + tag)), peer, tag=tag) for tag in (1, 2)]
    calls += [dist.P2POp(dist.irecv, got[tag], peer, tag=tag) for tag in tags]
    works = dist.batch_isend_irecv(calls)
    expect(len(works) == 1, works)
    works[0].wait()
    for tag in tags:
        check(got[tag], torch.full((count,), float(peer + tag)))


def a_batch_is_one_work(world):
    for count in (0, 7, LONG):
        batch(world, count)
    with dist._coalescing_manager(device=stand_in.device()):  # with a collective among the messages
        got, tensor = ones(5, 0.0), ones(5)
        dist.isend(ones(5, 2.0), 1 - world.rank)
        dist.all_reduce(tensor)
        dist.irecv(got[::1], 1 - world.rank)
    check(got, torch.full((5,), 2.0))
    check(tensor, torch.full((5,), 2.0))


def a_batch_that_is_refused(world):
    """A bad tensor ends the batch. Messages after it are sent, those before it are not."""
    peer, got = 1 - world.rank, ones(5, 0.0)
    dist.group.WORLD._start_coalescing(stand_in.device())
    dist.isend(ones(5, 7.0), peer)
    try:
        dist.isend(torch.ones(5, device=stand_in.device(1)), peer)
        raise AssertionError("a bad tensor was taken")
    except ValueError as error:
        expect("are on different devices" in str(error), error)
    works = [dist.isend(ones(5, 2.0), peer), dist.irecv(got, peer)]
    for work in works:
        work.wait()
    check(got, torch.full((5,), 2.0))


def beside_another_back_end(world):
    group = dist.new_group(backend=f"cpu:gloo,{stand_in.NAME}:shoal")
    here, there = torch.ones(5), ones(5)
    dist.all_reduce(here, group=group)
    dist.all_reduce(there, group=group)
    check(here, torch.full((5,), 2.0))
    check(there, torch.full((5,), 2.0))
    alone = dist.new_group(backend=f"{stand_in.NAME}:shoal")
    dist.all_reduce(there, group=alone)
    check(there, torch.full((5,), 4.0))
    dist.barrier(group=alone)


def a_factor_there(world):
    tensor = ones(100)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([3.0], device=stand_in.NAME)))
    check(tensor, torch.full((100,), 6.0))


def a_group_is_destroyed(world):
    """A call is under way on the device. Whatever happens to it, streams continue and other groups are unharmed."""
    for _ in range(2):
        group, tensor = dist.new_group(), ones()
        with Held():
            work = dist.all_reduce(tensor, group=group, async_op=True)
            with contextlib.suppress(dist.DistBackendError):  # another rank may have left before
                work.wait()
            dist.destroy_process_group(group)
        stand_in.api().synchronize()
        del work
    check_sum(world)


def some_ranks_there(world):
    """One rank's tensors are on the device, another one's in host memory."""
    for root in range(world.size):
        device = stand_in.NAME if world.rank == 0 else "cpu"
        tensor = torch.full((LONG,), float(world.rank + 1), device=device)
        dist.all_reduce(tensor)
        check(tensor, torch.full((LONG,), 3.0))
        dist.broadcast(tensor.fill_(world.rank), root)
        check(tensor, torch.full((LONG,), float(root)))


def a_second_device(world):
    """A group uses separate streams for each device of a process, but one call cannot use both devices."""
    for index in (0, 1, 0):
        tensor = torch.ones(1000, device=stand_in.device(index))
        dist.all_reduce(tensor, async_op=index == 1)
        dist.all_reduce(tensor, async_op=True).wait(ranks.GROUP_TIMEOUT)
        check(tensor, torch.full((1000,), 4.0))
    try:
        output, tensor = (torch.ones(count, device=stand_in.device(count - 1)) for count in (world.size, 1))
        dist.all_gather_into_tensor(output, tensor)
        raise AssertionError("tensors of two devices were taken")
    except ValueError as error:
        expect(f"shoal: the tensors of one call are on different devices, {stand_in.NAME}:" in str(error), error)
    check_sum(world)


def check_sum(world):
    tensor = ones(100)
    dist.all_reduce(tensor)
    check(tensor, torch.full((100,), float(world.size)))


def a_captured_stream(world):
    stream = stand_in.api().Stream()
    tensor = ones(100)
    for async_op in (False, True):
        with stand_in.api().stream(stream):
            stand_in.driver.capture(stream, True)
            try:
                dist.all_reduce(tensor, async_op=async_op)
                raise AssertionError("a call was captured")
            except NotImplementedError as error:
                expect("is being captured into a graph" in str(error), error)
            finally:
                stand_in.driver.capture(stream, False)
    check_sum(world)


def a_barrier_of_the_device(world):
    """A rank reaches the barrier when its current stream does."""
    tensor = ones()
    dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    expect(stand_in.api().current_stream().query(), "the stream goes on after the barrier")


def a_rank_that_dies(world):
    """Streams continue. A wait raises the failure, as does the next call."""
    check_sum(world)
    ranks.meet(world)
    if world.rank == 1:
        os._exit(3)
    time.sleep(0.2)
    work = dist.all_reduce(ones(), async_op=True)
    result = work.get_future_result()
    for call in (lambda: work.wait(ranks.GROUP_TIMEOUT), work.wait, lambda: dist.all_reduce(ones(5))):
        try:
            call()
            raise AssertionError("nothing was raised")
        except dist.DistBackendError as error:
            expect("rank 1" in str(error), error)
    stand_in.api().synchronize()
    expect(result.wait() == 2 and not work.is_success(), result.value())
    check(ones(5).clone(), torch.ones(5))


def a_driver_that_refuses(world):
    """A copy of one rank is refused while the others depend on it. All get the driver's error, streams continue, and a new
    group works."""
    check_sum(world)
    ranks.meet(world)
    if world.rank == 0:
        stand_in.driver.fail("cuStreamBatchMemOp", 2, 304)
    try:
        dist.all_reduce(ones(), async_op=True).wait(ranks.GROUP_TIMEOUT)
        raise AssertionError("nothing was raised")
    except dist.DistBackendError as error:
        expect("answered CUDA_ERROR_OPERATING_SYSTEM" in str(error), error)
    stand_in.api().synchronize()
    tensor = ones(100)
    dist.all_reduce(tensor, group=dist.new_group())
    check(tensor, torch.full((100,), float(world.size)))


def dropped_after_a_failure(world):
    """After a failure, the memory of a call is reused only when the library's copies no longer use it."""
    value = ones(value=77.0)
    check_sum(world)
    with Held():
        works = [dist.all_reduce(another(value), async_op=True) for _ in range(2)]
        result = works[0].get_future_result()
        ranks.meet(world)  # all have posted
        if world.rank == 1:
            os._exit(3)
        expect(result.wait() == 2, result.value())
        time.sleep(0.2)
        del works
        others = [another(value) for _ in range(3)]
    for other in others:
        check(other, torch.full((LONG,), 77.0))


def no_device_is_there(world):
    """torch is built for the device, but the machine has none: each message of a batch is a separate work."""
    peer, got = 1 - world.rank, torch.zeros(5)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(5), peer), dist.P2POp(dist.irecv, got, peer)])
    expect(len(works) == 2, works)
    for work in works:
        work.wait()
    check(got, torch.ones(5))


STREAMS = (waits_on_the_stream_only, a_source_is_written_after_wait, on_another_stream, tensors_are_held, copies_are_held,
           wait_with_a_timeout, wait_on_a_thread, wait_for_copies_back, blocking_mode, futures_are_complete_at_once,
           futures_of_batches, copies_that_fail, coalesced_there, messages_both_ways, a_batch_is_one_work, a_batch_that_is_refused,
           beside_another_back_end, a_factor_there, a_group_is_destroyed, some_ranks_there, a_second_device,
           a_captured_stream, a_barrier_of_the_device)


# ---- Other modes of the driver ----


def hostile_case(modes):
    """Returns a case with buckets posted together, copies back, messages, and a training step."""
    def body(world):
        tensors = [ones(count, world.rank + 1.0) for count in (LONG, 5, 0, 70_000) * 2]
        gaps = place(torch.ones(2501), "strided")
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (*tensors, gaps)]
        for work in works:
            work.wait()
        for tensor in tensors:
            check(tensor, torch.full((tensor.numel(),), 3.0))
        check(gaps, torch.full((2501,), 2.0))
        got = ones(value=0.0)
        for sender in range(world.size):
            dist.send(tensors[0], 1 - sender) if world.rank == sender else dist.recv(got, sender)
        check(got, torch.full((LONG,), 3.0))
        batch(world, LONG)
        compare_training("DDP", data_parallel, sgd, world)
    return Case(f"driver {modes}", body, sizes=(SIZE,), fresh=True, variables={"MOCK_CUDA": modes})


HOSTILE = ("queues=1,late=20", "queues=2,depth=64,torn=4,poison", "late=100,idle,pageable,seed=7")


# ---- Training: the same parameters as on the CPU, bit by bit, because the same code computes ----


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(world, device, wrap, optimizer_of, steps=3):
    """Returns the parameters after `steps` steps, whole and on the CPU."""
    generator = torch.Generator().manual_seed(2 + world.rank)
    x, y = (torch.randn(8, width, generator=generator).to(device) for width in (12, 4))
    model = wrap(network().to(device), device)
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).detach().cpu() for each in model.parameters()]


def compare_training(name, wrap, optimizer_of, world):
    there, here = (trained(world, device, wrap, optimizer_of) for device in (stand_in.NAME, "cpu"))
    for ours, theirs in zip(there, here):
        expect(is_same(ours, theirs), name, ours, theirs)


def is_same(ours, theirs):
    """Compares bit by bit. A real GPU computes in another order, so its numbers are compared with a tolerance."""
    return torch.allclose(ours, theirs, 1e-3, 1e-5) if IS_REAL else torch.equal(ours, theirs)


def training_case(*row):
    return Case(row[0], lambda world: compare_training(*row, world), sizes=(SIZE,), timeout_s=300)


def data_parallel(model, device):
    return DistributedDataParallel(model, bucket_cap_mb=0.0005)


def data_parallel_views(model, device):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model, device):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_class(**options):
    """Wraps a module in shoal.torch's class, over the gradient engine."""
    def wrap(model, device):
        import shoal.torch
        return shoal.torch.DistributedDataParallel(model, **options)
    return wrap


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def zero(parameters):
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


def sums_among_devices(world):
    """SHOAL_GPU_PEER_BYTES, and a device for each rank: the values are the same, and each all-reduce there uses the plan
    `peers`. Choosing a device does not make its context current, but the group needs a current context: the back-end sets
    it."""
    stand_in.api().set_device(world.rank % stand_in.api().device_count())
    with tempfile.TemporaryDirectory() as folder:
        flight = pathlib.Path(folder, "flight")
        os.environ["SHOAL_TRACE_FILE"] = str(flight)
        dist.init_process_group("shoal", timeout=ranks.GROUP_TIMEOUT)
        on_cpu = dist.new_group()
        check_sum(world)
        compare_training("DDP", lambda model, device: DistributedDataParallel(
            model, bucket_cap_mb=0.0005, process_group=on_cpu if device == "cpu" else None), sgd, world)
        dist.destroy_process_group()
        records = [json.loads(line) for line in flight.read_text().splitlines()]
    ways = [record["algorithm"] for record in records if (record["comm"], record["kind"]) == ("torch.0", "all-reduce")]
    expect(len(ways) > 3 and set(ways) == {"peers"}, ways, records)


TRAINING = (("DDP with many buckets", data_parallel, sgd), ("DDP with views", data_parallel_views, sgd), ("FSDP2", sharded, sgd),
            ("ZeRO", data_parallel, zero), ("own class", own_class(), sgd), ("own class, many buffers", own_class(bucket_cap_mb=0.0005), sgd),
            ("own class, ZeRO", own_class(), zero), ("own class, static graph", own_class(static_graph=True), sgd))


# ---- shoal.torch.DistributedDataParallel: cases of test_ddp.py, with modules on the device ----

OWN_CLASS = (test_ddp.begins_as_rank_0, test_ddp.no_sync, test_ddp.adds_to_averages, test_ddp.keeps_gradients,
             test_ddp.frees_gradients, test_ddp.unused, test_ddp.several_models, test_ddp.hooks_of_others,
             test_ddp.missing_gradient, test_ddp.broken_backward, test_ddp.made_and_dropped, test_ddp.saved_and_copied)


# With optimizer=, which then runs on the CPU. The stand-in has no convolution.
REDUCTION = (test_reduction.half_precision, test_reduction.schedules_and_groups, test_reduction.accumulates, test_reduction.clips,
             test_reduction.clips_early, test_reduction.scales, test_reduction.resumes, test_reduction.resumes_half_precision,
             test_reduction.changes_parameters, test_reduction.closures_and_hooks, test_reduction.moves_parameters,
             test_reduction.replaces_parameters, test_reduction.loads_an_empty_state, test_reduction.scheduled_before,
             test_reduction.looks_between_steps, test_reduction.refuses)


def own_class_joins(world):
    """Ranks have different numbers of batches and end with the last rank's model, which equals that of the same training on
    the CPU."""
    def trained_on(device, by_all):
        model = own_class()(network().to(device), device)
        optimizer = sgd(model.parameters())
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(1 + 2 * world.rank):
                optimizer.zero_grad()
                x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(device)
                model(x).square().mean().backward()
                optimizer.step()
        return [each.detach().cpu() for each in model.parameters()]

    for by_all in (True, False):
        for ours, theirs in zip(trained_on(stand_in.NAME, by_all), trained_on("cpu", by_all)):
            expect(is_same(ours, theirs), by_all, ours, theirs)
            same = [torch.empty_like(ours) for _ in range(world.size)]
            dist.all_gather(same, ours)
            expect(all(torch.equal(each, ours) for each in same), by_all, "differs between ranks")


def own_class_on_other_streams(world):
    """Each step uses another stream than the one on which the module was created, and one device is not the process's
    current one."""
    def trained_on_streams(device):
        model = own_class()(network().to(device), device)
        optimizer = sgd(model.parameters())
        for step in range(4):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(device)
            with on_a_stream(device):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return [each.detach().cpu() for each in model.parameters()]

    expected = trained_on_streams(torch.device("cpu"))
    for index in (0, 1):
        for ours, theirs in zip(trained_on_streams(stand_in.device(index)), expected):
            expect(is_same(ours, theirs), index, ours, theirs)


@contextlib.contextmanager
def on_a_stream(device):
    if device.type == "cpu":
        yield
        return
    stream, before = stand_in.api().Stream(device), stand_in.api().current_stream(device)
    stream.wait_stream(before)
    with stand_in.api().stream(stream):
        yield
    before.wait_stream(stream)


def own_class_compresses(world):
    """Between hosts: the same bits as training on the CPU."""
    os.environ["SHOAL_HOST_ID"] = f"host-{world.rank}"
    dist.init_process_group("shoal", timeout=ranks.GROUP_TIMEOUT)
    for compression in ("fp16", "int8"):
        compare_training(compression, own_class(compression=compression, bucket_cap_mb=0.0005), sgd, world)


def own_class_compares(world):
    model = own_class()(network().to(stand_in.NAME), stand_in.NAME)
    model.compare_parameters()
    with torch.no_grad():
        model.module[2].bias.add_(world.rank)
    test_ddp.message_of(RuntimeError, model.compare_parameters, "2.bias")


def own_class_moves_inputs(world):
    """If device_ids names the device, inputs are moved there, as by torch's class."""
    model, alone = own_class(device_ids=[0])(network().to(stand_in.NAME), stand_in.NAME), network()
    x = torch.ones(8, 12)
    ours, theirs = model(x).detach().cpu(), alone(x).detach()
    expect(is_same(ours, theirs), ours, theirs)
    expect(model.device_ids == [0] and model.output_device == 0 and model.device == stand_in.device(), vars(model))


def own_class_comes_to_the_cpu(world):
    """A module saved on a device is loaded on a machine without one."""
    model, file, x = own_class(device_ids=[0])(network().to(stand_in.NAME), stand_in.NAME), io.BytesIO(), torch.ones(8, 12)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=False)
    expect(loaded.device_type == loaded.device.type == "cpu" and loaded.device_ids is loaded.output_device is None, vars(loaded))
    for each in (model, loaded):
        each(x * world.rank).sum().backward()
    for there, here in zip(model.parameters(), loaded.parameters()):
        expect(is_same(there.grad.cpu(), here.grad), there.grad, here.grad)


def own_class_refuses(world):
    import shoal.torch
    module = network().to(stand_in.NAME)
    for options, words in (({"device_ids": [1]}, f"device_ids=[1], but the module is on {stand_in.device()}"),
                           ({"device_ids": [0, 1]}, "device_ids=[0, 1], but the module is on"),
                           ({"output_device": 1}, "output_device=1, but the module is on"),
                           ({"process_group": dist.new_group(backend="gloo")}, f"tensors of {stand_in.NAME} devices in this")):
        test_ddp.message_of(ValueError, lambda: shoal.torch.DistributedDataParallel(module, **options), words)
    module[0].to("cpu")
    test_ddp.message_of(ValueError, lambda: shoal.torch.DistributedDataParallel(module), "parameter 0.weight is on cpu",
                        f"2.weight on {stand_in.device()}", "models on one device")


def own_class_after_a_death(world):
    """The next call names a rank that ended in the middle of training."""
    model = own_class()(network().to(stand_in.NAME), stand_in.NAME)
    x = torch.ones(8, 12, device=stand_in.NAME)
    model(x).sum().backward()
    model.zero_grad()
    stand_in.api().synchronize()
    dist.barrier()
    ranks.meet(world)
    if world.rank == 1:
        os._exit(3)
    def step_until_told():
        for _ in range(100):
            model(x).sum().backward()
            stand_in.api().synchronize()
    test_ddp.message_of(RuntimeError, step_until_told, "rank 1")
    stand_in.api().synchronize()


OWN = (own_class_joins, own_class_on_other_streams, own_class_compares, own_class_moves_inputs, own_class_comes_to_the_cpu,
       own_class_refuses)

CASES = [reducing_case(operation) for operation in test_ops.REDUCING]
CASES += [moving_case(operation) for operation in test_ops.MOVING]
CASES += [Case(body.__name__, on_device(body), sizes=(2,)) for body in THERE]
CASES += [Case(f"batch_isend_irecv {'receives' if first else 'sends'} first", on_device(test_ops.batch, first), sizes=(3,))
          for first in (False, True)]
STREAM_CASES = [Case(body.__name__, body, sizes=(SIZE,)) for body in STREAMS]
CASES += STREAM_CASES
CASES += [hostile_case(modes) for modes in HOSTILE]
CASES += [Case(body.__name__, body, sizes=(3,), fresh=True, ends=(1,))
          for body in (a_rank_that_dies, dropped_after_a_failure)]
CASES += [Case("a_driver_that_refuses", a_driver_that_refuses, sizes=(SIZE,), fresh=True)]
CASES += [Case("sums_among_devices", sums_among_devices, sizes=(SIZE,), init=False, fresh=True,
               variables={"SHOAL_GPU_PEER_BYTES": "1", "SHOAL_GPU_UNIT_BYTES": "4096"})]
CASES += [training_case(*row) for row in TRAINING]
CASES += [Case(f"own class: {body.__name__}", on_device(body), sizes=(SIZE,), timeout_s=300) for body in OWN_CLASS]
CASES += [Case(f"own class: {name}", on_device(test_ddp.model_case(name, test_ddp.MODELS[name]).body), sizes=(SIZE,), timeout_s=300)
          for name in ("plain", "mixed")]  # compared with torch's class on the device, and with one process
CASES += [Case(f"optimizer: {body.__name__}", on_device(body), sizes=(SIZE,), timeout_s=300) for body in REDUCTION]
CASES += [Case(f"optimizer: {name}", on_device(test_reduction.optimizer_case(name, make, (test_reduction.plain,)).body), sizes=(SIZE,))
          for name, make in test_reduction.OPTIMIZERS.items()]
CASES += [Case(body.__name__, body, sizes=(SIZE,), timeout_s=300) for body in OWN]
CASES += [Case("own_class_compresses", own_class_compresses, sizes=(SIZE,), init=False, fresh=True),
          Case("own_class_after_a_death", own_class_after_a_death, sizes=(3,), fresh=True, ends=(1,))]


# These cases, and any backward pass, ask torch for its accelerator; a torch built for CPUs has none.
ASKS_TORCH = ("futures_of_batches", "a_batch_is_one_work", "beside_another_back_end")
if stand_in.NAME == "cuda" and not IS_REAL:
    CASES = [case for case in STREAM_CASES if case.name not in ASKS_TORCH]


def without_faults(case):
    def body(world):
        case.body(world)
        stand_in.api().synchronize()
        fault = stand_in.driver.faults()
        expect(not fault, fault)
    return dataclasses.replace(case, body=body)


CASES = [without_faults(case) for case in CASES]
CASES += [Case("no_device_is_there", no_device_is_there, sizes=(SIZE,), fresh=True, variables={"MOCK_CUDA": "devices=0"})]

# These cases need a driver that fails, has special modes, or stops at a point that only the stand-in can choose.
STAND_INS_OWN = {"copies_that_fail", "wait_for_copies_back", "dropped_after_a_failure", "a_driver_that_refuses", "no_device_is_there",
                 *(f"driver {modes}" for modes in HOSTILE)}
if IS_REAL:
    CASES = [case for case in CASES if case.name not in STAND_INS_OWN]


def why_not():
    if IS_REAL:
        return "" if torch.cuda.is_available() else "torch sees no GPU"
    return "torch is built for CUDA, whose place the stand-in would take" if stand_in.NAME == "cuda" and torch.version.cuda else ""


if __name__ == "__main__":
    if why_not():
        print("1..0 # SKIP", why_not())
        sys.exit()
    if os.fork() == 0:  # compiles in a child, so that no rank waits for a compiler and this process loads nothing
        stand_in.compiled()
        os._exit(0)
    os.wait()
    ranks.run(CASES)
