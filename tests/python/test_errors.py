#!/usr/bin/env python3
"""Wrong arguments; ranks that disagree, end, stop or are late; Ctrl-C. Tests each rank's error, how soon it comes, and what
still works."""
import datetime
import os
import re
import signal
import sys
import threading
import time

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, Skip, expect
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WITHIN_S = 20  # after a fault, on a loaded machine; less than GROUP_TIMEOUT, even with SHORT added
INTERRUPTED_WITHIN_S = 0.1  # the best of INTERRUPTIONS rounds; on a busy machine of more
INTERRUPTIONS, INTERRUPTIONS_MAX = 3, 20
SHORT = datetime.timedelta(seconds=2)
JOINED = datetime.timedelta(seconds=6)  # the timeout of a group that all ranks have to join in time


def only_shoal():
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo does not do it")


def refused(function, words):
    """The call raises an error about its arguments, before anything is posted."""
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        expect(not isinstance(error, dist.DistBackendError), "a wrong argument is told as a failure of the back-end", error)
        expect(re.search(words, str(error), re.I), f"the text lacks {words!r}:", error)
        return
    raise AssertionError("nothing was raised")


def fails(function, *words, within_s=WITHIN_S):
    """The call raises DistBackendError in time, and its text has all the words. Returns the text."""
    began = time.monotonic()
    try:
        function()
    except dist.DistBackendError as error:
        took = time.monotonic() - began
        for word in words:
            expect(re.search(word, str(error)), f"the text lacks {word!r}:", error)
        expect(took < within_s, f"it took {took:.1f} s")
        print(f"after {took:.2f} s: {error}")
        return str(error)
    raise AssertionError("no DistBackendError was raised")


def still_works(world, group=None):
    tensor = torch.ones(100)
    dist.all_reduce(tensor, group=group)
    expect(tensor[99].item() == dist.get_world_size(group), tensor)


def back_end():
    """Returns the object that receives this process's calls for CPU tensors."""
    group = distributed_c10d._get_default_group()
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return group


def fake_cuda_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(3, device="cuda")


# ---- Wrong arguments: (name, call, pattern of the text) ----

WRONG = (
    ("a CUDA tensor", lambda world: back_end().allreduce([fake_cuda_tensor()], dist.AllreduceOptions()), "cuda:0, (which|but)"),
    ("a meta tensor", lambda world: back_end().allreduce([torch.empty(3, device="meta")], dist.AllreduceOptions()), "meta, (which|but)"),
    ("a sparse tensor", lambda world: dist.all_reduce(torch.eye(3).to_sparse_csr()), "sparse|layout|dense"),
    ("no tensor", lambda world: dist.all_reduce([1, 2]), "tensor"),
    ("types that differ in a list",
     lambda world: dist.all_gather([torch.empty(3, dtype=torch.int64)] * world.size, torch.ones(3)), "dtype|type"),
    ("too many outputs", lambda world: dist.all_gather([torch.empty(3)] * (world.size + 1), torch.ones(3)),
     r"size|length|outputs|\d"),
    ("an output that is too long", lambda world: dist.all_gather_into_tensor(torch.empty(3 * world.size + 1), torch.ones(3)),
     "size|elements"),
    ("an input that is too short", lambda world: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * world.size - 1)),
     "size|elements"),
    ("lists of another length", lambda world: dist.all_gather_coalesced(
        [[torch.empty(3)]] * world.size, [torch.ones(3), torch.ones(4)]), "list|length"),
    ("a sparse tensor in a list", lambda world: dist.all_gather_coalesced(
        [[torch.empty(9), torch.empty(4)]] * world.size, [torch.eye(3).to_sparse_csr(), torch.ones(4)]), "sparse|layout|dense"),
    ("lists of another type", lambda world: dist.all_gather_coalesced(
        [[torch.empty(3, dtype=torch.int32), torch.empty(4)]] * world.size, [torch.ones(3), torch.ones(4)]), "dtype|type"),
    ("outputs of another size", lambda world: dist.all_gather([torch.empty(4)] * world.size, torch.ones(3)),
     "size|elements|shape"),
    ("a root beyond the group", lambda world: dist.broadcast(torch.ones(3), world.size), "rank|root"),
    ("a peer beyond the group", lambda world: dist.send(torch.ones(3), world.size), "rank|peer"),
    ("a message to itself", lambda world: dist.send(torch.ones(3), world.rank), "rank|itself|self"),
    ("int16 to be summed", lambda world: dist.all_reduce(torch.ones(3, dtype=torch.int16)), "int16|short"),
    ("bits of float32", lambda world: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), "float|BAND|bit"),
    ("half a scale for int32", lambda world: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
     "whole|integer|scale|factor"),
    ("splits that do not add up", lambda world: dist.all_to_all_single(torch.empty(world.size), torch.ones(world.size),
                                                                       [2] * world.size, [1] * world.size), "split|size"),
    ("a negative split", lambda world: dist.all_to_all_single(torch.empty(2), torch.ones(2), None, [-1, 3]), "split|size"),
    ("too few splits", lambda world: dist.all_to_all_single(torch.empty(4), torch.ones(4), [4] * (world.size - 1), None),
     "split|size"),
)
GLOO_DOES = ("int16 to be summed", "a peer beyond the group", "a CUDA tensor", "a meta tensor", "half a scale for int32",
             "bits of float32", "outputs of another size", "too many outputs")


def wrong_case(name, call, words):
    def body(world):
        if ranks.BACKEND == "gloo" and name in GLOO_DOES:
            raise Skip("Gloo has no such rule")
        refused(lambda: call(world), words)
        still_works(world)
    return Case(name, body, sizes=(2,))


def gather_77():
    dist.all_gather_into_tensor(torch.empty(77 * dist.get_world_size()), torch.ones(77))


def split_all_to_all(count):
    size = dist.get_world_size()
    dist.all_to_all_single(torch.empty(count * size), torch.ones(count * size), [count] * size, [count] * size)


def gather_list(count):
    dist.all_gather([torch.empty(count) for _ in range(dist.get_world_size())], torch.ones(count))


def gather_types(*types):
    inputs = [torch.ones(10, dtype=dtype) for dtype in types]
    outputs = [[torch.empty_like(each) for each in inputs] for _ in range(dist.get_world_size())]
    back_end().allgather_coalesced(outputs, inputs, distributed_c10d.AllgatherOptions()).wait()


# ---- Ranks that disagree: (name, what rank 0 calls, what the others call, words of both sides) ----

DISAGREEMENTS = (
    ("counts", lambda: dist.all_reduce(torch.ones(1010)), lambda: dist.all_reduce(torch.ones(1111)), ("1010", "1111")),
    ("large counts", lambda: dist.all_reduce(torch.ones(1000100)), lambda: dist.all_reduce(torch.ones(2000200)),
     ("1000100", "2000200")),
    ("types", lambda: dist.all_reduce(torch.ones(10)), lambda: dist.all_reduce(torch.ones(10, dtype=torch.float64)),
     ("float32", "float64")),
    ("types of as many bytes", lambda: dist.broadcast(torch.ones(10, dtype=torch.int16), 0),
     lambda: dist.broadcast(torch.ones(10, dtype=torch.uint16), 0), ("20 bytes of torch.int16", "20 bytes of torch.uint16")),
    ("bytes and a type that travels as bytes", lambda: dist.broadcast(torch.ones(20, dtype=torch.uint8), 0),
     lambda: dist.broadcast(torch.ones(10, dtype=torch.int16), 0), ("20 uint8", "20 bytes of torch.int16")),
    ("truth values", lambda: dist.all_reduce(torch.ones(10, dtype=torch.bool)),
     lambda: dist.all_reduce(torch.ones(10, dtype=torch.uint8)), ("10 bytes of torch.bool", "10 uint8")),
    ("types of lists", lambda: gather_types(torch.int32, torch.int32), lambda: gather_types(torch.float32, torch.float32),
     ("bytes of torch.int32", "bytes of torch.float32")),
    ("types of mixed lists", lambda: gather_types(torch.int32, torch.float32), lambda: gather_types(torch.float32, torch.int32),
     ("bytes of several types",)),
    ("operators", lambda: dist.all_reduce(torch.ones(10)), lambda: dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX),
     ("sum", "max")),
    ("operations", lambda: dist.all_reduce(torch.ones(10)), lambda: dist.broadcast(torch.ones(10), 0),
     ("all-?reduce", "broadcast")),
    ("roots", lambda: dist.broadcast(torch.ones(10), 0), lambda: dist.broadcast(torch.ones(10), 1),
     ("root 0|from 0|rank 0", "root 1|from 1|rank 1")),
    ("order", lambda: [dist.all_reduce(torch.ones(33)), gather_77()], lambda: [gather_77(), dist.all_reduce(torch.ones(33))],
     ("all-?reduce", "all-?gather")),
    ("splits", lambda: split_all_to_all(2), lambda: split_all_to_all(3), ("2", "3")),
    ("gathered lists", lambda: gather_list(55), lambda: gather_list(66), ("55", "66")),
    ("a barrier", lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(10)), ("barrier", "all-?reduce")),
)


def disagreement_case(name, first, other, words):
    def body(world):
        only_shoal()

        def call():
            (first if world.rank == 0 else other)()
            dist.barrier()  # a rank that only sends may be done before the others have come
        fails(call, *words)
        fails(lambda: dist.all_reduce(torch.ones(1)), *words)  # the first cause remains
    return Case(f"disagreement in {name}", body, sizes=(2, 3), fresh=True)


def message_of_another_size(world):
    only_shoal()
    if world.rank == 0:
        fails(lambda: [dist.send(torch.ones(30_303), 1), dist.barrier()], "30303", "20202")
    else:
        fails(lambda: [dist.recv(torch.ones(20_202), 0), dist.barrier()], "30303", "20202")


def message_of_another_type(world):
    only_shoal()
    if world.rank == 0:
        fails(lambda: [dist.send(torch.ones(10, dtype=torch.bool), 1), dist.barrier()], "torch.bool", "uint8")
    else:
        fails(lambda: [dist.recv(torch.ones(10, dtype=torch.uint8), 0), dist.barrier()], "torch.bool", "uint8")


# ---- A rank that ends: what the others wait in when rank 1 is killed ----

WAITS = (
    ("all_reduce", lambda world: dist.all_reduce(torch.ones(10))),
    ("a large all_reduce", lambda world: dist.all_reduce(torch.ones(4 << 20))),
    ("an async all_reduce", lambda world: dist.all_reduce(torch.ones(10), async_op=True).wait()),
    ("barrier", lambda world: dist.barrier()),
    ("broadcast", lambda world: dist.broadcast(torch.ones(10), 1)),
    ("recv", lambda world: dist.recv(torch.ones(10), 1)),
    ("a large send", lambda world: dist.send(torch.ones(4 << 20), 1)),
    ("all_to_all_single", lambda world: dist.all_to_all_single(torch.empty(3), torch.ones(3))),
    ("an object collective", lambda world: dist.all_gather_object([None] * 3, "text")),
)


def killed_case(name, wait):
    def body(world):
        pair = dist.new_group([0, 2])
        for _ in range(5):
            still_works(world)
        ranks.meet(world)
        if world.rank == 1:
            time.sleep(0.2)  # by then the others usually wait
            os.kill(os.getpid(), signal.SIGKILL)
        only_shoal()
        fails(lambda: wait(world), "rank 1")
        fails(lambda: dist.all_reduce(torch.ones(1)), "rank 1")
        still_works(world, pair)  # a group without the lost rank
    return Case(f"rank 1 killed while others wait in {name}", body, sizes=(3,), fresh=True, ends=(1,))


def shrink_group(world):
    only_shoal()
    if world.shim == "python" or not hasattr(dist, "shrink_group"):
        raise Skip("only the C++ shim, since torch.distributed.shrink_group")
    return dist.shrink_group


def shrunk(world):
    """Ranks 0 and 2 continue without the killed one, in a default group of two."""
    shrink = shrink_group(world)
    still_works(world)
    ranks.meet(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(lambda: dist.all_reduce(torch.ones(10)), "rank 1")
    shrink([1])
    expect((dist.get_rank(), dist.get_world_size()) == (world.rank // 2, 2), dist.get_rank(), dist.get_world_size())
    still_works(world)
    tensor = torch.full((70001,), float(world.rank + 1))
    dist.all_reduce(tensor)
    expect(bool((tensor == 4).all()), tensor)


def shrunk_while_it_works(world):
    """A rank that lives is excluded. SHRINK_ABORT ends the operations of the old group."""
    shrink = shrink_group(world)
    still_works(world)
    ranks.meet(world)
    if world.rank == 0:
        fails(lambda: dist.all_reduce(torch.ones(10)), "abort")
        return
    group = shrink([0], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    expect((group.rank(), group.size()) == (world.rank - 1, world.size - 1), group.rank(), group.size())
    still_works(world)


def shrunk_without_a_lost_rank_of_the_list(world):
    """Two ranks are lost, but the list has one: torch would number the others wrongly. Rank 0 has torch's store and lives."""
    shrink = shrink_group(world)
    still_works(world)
    ranks.meet(world)
    if world.rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    fails(lambda: dist.all_reduce(torch.ones(10)), "rank [13]")
    fails(lambda: shrink([3]), "more ranks are lost than ranks_to_exclude lists: 1;")
    shrink([1, 3])
    expect((dist.get_rank(), dist.get_world_size()) == (world.rank // 2, 2), dist.get_rank(), dist.get_world_size())
    still_works(world)


def shrunk_with_lists_that_differ(world):
    """The list of rank 1 has all lost ranks, but that of rank 0 does not: neither of them continues alone."""
    shrink = shrink_group(world)
    still_works(world)
    ranks.meet(world)
    if world.rank in (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    fails(lambda: dist.all_reduce(torch.ones(10)), "rank [23]")
    if world.rank == 0:
        fails(lambda: shrink([3]), "more ranks are lost than ranks_to_exclude lists: 2;")
    else:
        fails(lambda: shrink([2, 3]), "ranks_to_exclude differs between the ranks: 2 here, and 1 on rank 0;")
    shrink([2, 3])
    expect((dist.get_rank(), dist.get_world_size()) == (world.rank, 2), dist.get_rank(), dist.get_world_size())
    still_works(world)


def killed_in_mid_step(world):
    """A thread kills the rank during computation or communication, whichever it is."""
    if world.rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    only_shoal()

    def steps():
        while True:
            dist.all_reduce(torch.ones(1 << 20))
    fails(steps, "rank 1", within_s=WITHIN_S + 1)


def training_step(world, kind):
    """Returns a step that waits in torch's C++ (DDP's backward waits for a Future), or one that waits in Python."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    if kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
    else:
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world.size,)))
        model = fully_shard(layers, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x = torch.randn(16, 256)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return step


def killed_in_training_case(kind):
    def body(world):
        step = training_step(world, kind)
        step()
        only_shoal()
        if world.rank == 1:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True:
                step()
        began = time.monotonic()
        try:
            while time.monotonic() < began + WITHIN_S + 1:
                step()
        except RuntimeError as error:
            through_a_future = kind == "DDP" and world.shim == "python"  # a future passes only RuntimeError: docs/python.md
            expect(through_a_future or isinstance(error, dist.DistBackendError), "another type of error", type(error))
            expect(time.monotonic() - began < WITHIN_S + 1, f"it took {time.monotonic() - began:.1f} s")
            expect("rank 1" in str(error), "the text does not name rank 1:", error)
        else:
            raise AssertionError("nothing was raised")
    return Case(f"rank 1 killed in training with {kind}", body, sizes=(3,), fresh=True, ends=(1,))


def exited(world):
    """A rank's program ends in the middle."""
    ranks.meet(world)  # they are all in the group
    if world.rank == 1:
        os._exit(3)
    only_shoal()
    fails(lambda: dist.all_reduce(torch.ones(10)), "rank 1")


# ---- A rank that stops or is late ----


def is_away(world, absent):
    """The absent rank takes no part. It returns from here when another rank reports that it got its error."""
    if world.rank == absent:
        distributed_c10d._get_default_store().wait(["told"], datetime.timedelta(seconds=40))
    return world.rank == absent


def say_told():
    distributed_c10d._get_default_store().set("told", "yes")


def begin(world, timeout):
    """Makes the default group with this timeout. The ranks meet before, with more time: some may still import the back-end."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world.size, world.rank == 0, ranks.GROUP_TIMEOUT)
    dist.init_process_group(ranks.BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    ranks.meet(world)


def stopped(world):
    begin(world, JOINED)
    still_works(world)
    ranks.meet(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    only_shoal()
    fails(lambda: dist.all_reduce(torch.ones(10)), "rank 1", within_s=JOINED.total_seconds() + WITHIN_S)


def stopped_with_its_own_group(world):
    ranks.meet(world)
    group = dist.new_group(timeout=JOINED)
    still_works(world, group)
    ranks.meet(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    only_shoal()
    fails(lambda: dist.all_reduce(torch.ones(10), group=group), "rank 1", within_s=JOINED.total_seconds() + WITHIN_S)


def timeouts_of_one_call_and_of_a_group(world):
    """A call's own timeout, although the group's is longer; and a group's timeout that is set later."""
    group = dist.new_group()
    if is_away(world, 1):
        return
    only_shoal()
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    within_s = SHORT.total_seconds() + WITHIN_S
    fails(lambda: dist.group.WORLD.allreduce([torch.ones(10)], options).wait(), "rank 1", "timed out", within_s=within_s)
    if hasattr(dist.ProcessGroup, "set_timeout"):  # older versions of torch have none
        group.set_timeout(SHORT)
        fails(lambda: dist.all_reduce(torch.ones(10), group=group), "rank 1", "timed out", within_s=within_s)
    say_told()


def wait_with_a_timeout(world):
    """The wait ends with an error, but the operation continues."""
    tensor = torch.ones(10)
    store = distributed_c10d._get_default_store()
    if world.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        began = time.monotonic()
        try:
            work.wait(datetime.timedelta(seconds=1))
        except RuntimeError as error:
            took = time.monotonic() - began
            expect(re.search("timed out", str(error), re.I), error)
            expect(0.9 < took < 1 + WITHIN_S, f"it took {took:.2f} s")
        else:
            raise AssertionError("wait() did not time out")
        store.set("waited", "yes")
        only_shoal()
        expect(work.wait(), "the second wait")
    else:
        store.wait(["waited"])
        only_shoal()
        dist.all_reduce(tensor)
    expect(tensor[0].item() == world.size, tensor)
    still_works(world)


def monitored_barrier_names_who_is_missing(world):
    if is_away(world, 2):
        return
    began = time.monotonic()
    try:
        dist.group.WORLD.monitored_barrier(SHORT, wait_all_ranks=True)
    except RuntimeError as error:
        expect(world.rank != 0 or re.search(r"\brank 2\b", str(error)), "the missing rank is not named:", error)
        expect(time.monotonic() - began < SHORT.total_seconds() + WITHIN_S)
    else:
        raise AssertionError("monitored_barrier() came back without rank 2")
    if world.rank == 0:
        say_told()


def group_without_all(world):
    """If a rank makes a group and another does not, its error names the missing one."""
    os.environ["SHOAL_BOOTSTRAP_TIMEOUT_MS"] = "6000"
    begin(world, JOINED)
    if is_away(world, 1):
        return
    only_shoal()
    began = time.monotonic()
    try:
        group = dist.new_group(timeout=JOINED)
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        expect(re.search(r"\brank 1\b", str(error)), "the missing rank is not named:", error)
        expect("timed out" in str(error), error)
        expect(time.monotonic() - began < 30)
    else:
        raise AssertionError("a group was made without one of its ranks")
    finally:
        say_told()


# ---- Ctrl-C ----

INTERRUPTED = (
    ("all_reduce", lambda tensor: dist.all_reduce(tensor), lambda tensor: dist.all_reduce(tensor)),
    ("wait", lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), lambda tensor: dist.all_reduce(tensor)),
    ("barrier", lambda tensor: dist.barrier(), lambda tensor: dist.barrier()),
    ("recv", lambda tensor: dist.recv(tensor, 1), lambda tensor: dist.send(tensor, 0)),
    ("broadcast", lambda tensor: dist.broadcast(tensor, 1), lambda tensor: dist.broadcast(tensor, 1)),
    ("all_gather", lambda tensor: dist.all_gather([torch.empty(100), torch.empty(100)], tensor),
     lambda tensor: dist.all_gather([torch.empty(100), torch.empty(100)], tensor)),
)


def interrupt_within(function, seconds, is_posting):
    """Sends SIGINT to this process, `seconds` after this thread is inside the function and an operation is under way. An
    earlier signal would find nothing to interrupt. Returns a list that gets the time of sending."""
    sent_at, thread = [], threading.get_ident()

    def is_inside():
        frame = sys._current_frames()[thread]
        while frame and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    def send():
        while not is_inside() or (is_posting and not ranks.is_under_way()):
            time.sleep(0.0005)
        time.sleep(seconds)
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=send, daemon=True).start()
    return sent_at


def interrupted(function, seconds, is_posting=True):
    """Calls a function that waits. Returns how long after Ctrl-C it ended. is_posting: it waits for an operation that it
    posts."""
    sent_at = interrupt_within(function, seconds, is_posting)
    try:
        function()
    except KeyboardInterrupt:
        return time.monotonic() - sent_at[0]
    raise AssertionError("no KeyboardInterrupt")


def interrupted_case(name, waiting, late):
    """Interrupts as soon as the operation is posted, and later."""
    def body(world):
        only_shoal()
        store, took = distributed_c10d._get_default_store(), []
        def is_prompt():
            return all(min(took[phase::3]) < INTERRUPTED_WITHIN_S for phase in range(3))
        for turn in range(3 * INTERRUPTIONS_MAX):
            tensor = torch.ones(100)
            if world.rank == 0:
                took.append(interrupted(lambda: waiting(tensor), (0, 0.1, 0.4)[turn % 3]))
                del tensor
                store.set(f"interrupted {turn}", "enough" if turn + 1 >= 3 * INTERRUPTIONS and is_prompt() else "yes")
            else:
                store.wait([f"interrupted {turn}"])
                late(tensor)
            still_works(world)
            if store.get(f"interrupted {turn}") == b"enough":
                break
        print("back in Python after", *(f"{1000 * one:.0f}" for one in took), "ms")
        expect(not took or is_prompt(), "it took", *took)
    return Case(f"Ctrl-C in {name}", body, sizes=(2,), fresh=True)


def interrupted_while_joining(world):
    """The other rank joins the new group later. The interrupted rank has no group, and continues."""
    only_shoal()
    store = distributed_c10d._get_default_store()
    if world.rank == 0:
        took = interrupted(lambda: dist.new_group(timeout=datetime.timedelta(seconds=20)), 0.4, is_posting=False)
        expect(took < WITHIN_S / 2, f"it took {took:.2f} s")
        store.set("interrupted", "yes")
        still_works(world)
    else:
        store.wait(["interrupted"])
        still_works(world)


# ---- Abort, destroyed groups ----


def aborted(world, post, end, told):
    """Rank 0 aborts its operations. The others call afterwards and get the error."""
    store = distributed_c10d._get_default_store()
    if world.rank == 0:
        works = post()
        end()
        for work in works:
            fails(work.wait, "[Aa]bort")
        store.set("aborted", "yes")
    else:
        store.wait(["aborted"])
        fails(lambda: dist.all_reduce(torch.ones(10)), told)


def abort(world):
    only_shoal()
    aborted(world, lambda: [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)],
            lambda: threading.Timer(0.3, lambda: back_end().abort()).start(), "[Aa]bort")


def abort_by_torch(world):
    """torch's own call ends all groups. Then a new one can be made over the same server."""
    only_shoal()
    if not hasattr(distributed_c10d, "_abort_process_group"):
        raise Skip("this torch has no such call")
    store = distributed_c10d._get_default_store()
    group = dist.new_group()
    ranks.meet(world)  # they are all in the group
    aborted(world, lambda: [dist.all_reduce(torch.ones(10), group=one, async_op=True) for one in (None, group)],
            distributed_c10d._abort_process_group, "[Aa]bort|rank 0")
    if world.rank != 0:
        distributed_c10d._abort_process_group()
    dist.init_process_group(ranks.BACKEND, store=dist.PrefixStore("again", store), rank=world.rank, world_size=world.size,
                            timeout=ranks.GROUP_TIMEOUT)
    still_works(world)


def destroyed_group(world):
    group = dist.new_group()
    still_works(world, group)
    dist.destroy_process_group(group)
    only_shoal()
    refused(lambda: dist.all_reduce(torch.ones(1), group=group), "group")
    still_works(world)


def work_kept_beyond_its_group(world):
    """A finished work can be queried after its group is destroyed; one under way fails or completes."""
    group = dist.new_group()
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    dist.destroy_process_group(group)
    expect(work.is_completed() and tensor[0].item() == world.size)
    still_works(world)


def failed_work_tells(world):
    """The other ways in which a work reports its failure."""
    store = distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["posted 0", "posted 2"])
        os.kill(os.getpid(), signal.SIGKILL)
    only_shoal()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    future = work.get_future()
    store.set(f"posted {world.rank}", "yes")
    fails(work.wait, "rank 1")
    expect(work.is_completed() and not work.is_success(), "a failed work is no success")
    refused_by_future = []
    try:
        future.wait()
    except RuntimeError as error:
        refused_by_future.append(str(error))
    expect(refused_by_future and "rank 1" in refused_by_future[0], refused_by_future)


CASES = [wrong_case(*row) for row in WRONG]
CASES += [disagreement_case(*row) for row in DISAGREEMENTS]
CASES += [Case(body.__name__, body, sizes=(2,), fresh=True) for body in (message_of_another_size, message_of_another_type)]
CASES += [killed_case(*row) for row in WAITS]
CASES += [Case(body.__name__, body, sizes=(3,), fresh=True, ends=(1,))
          for body in (killed_in_mid_step, exited, stopped_with_its_own_group, failed_work_tells)]
CASES += [Case("shrunk", shrunk, sizes=(3,), fresh=True, ends=(1,)),
          Case("shrunk_while_it_works", shrunk_while_it_works, sizes=(2, 3), fresh=True),
          Case("shrunk_without_a_lost_rank_of_the_list", shrunk_without_a_lost_rank_of_the_list, sizes=(4,), fresh=True, ends=(1, 3)),
          Case("shrunk_with_lists_that_differ", shrunk_with_lists_that_differ, sizes=(4,), fresh=True, ends=(2, 3))]
CASES += [killed_in_training_case(kind) for kind in ("DDP", "FSDP2")]
CASES += [Case("stopped", stopped, sizes=(3,), init=False, fresh=True, ends=(1,))]
CASES += [Case("group_without_all", group_without_all, sizes=(3,), init=False, fresh=True)]
CASES += [Case("monitored_barrier_names_who_is_missing", monitored_barrier_names_who_is_missing, sizes=(3,), fresh=True)]
CASES += [interrupted_case(*row) for row in INTERRUPTED]
CASES += [Case("Ctrl-C while joining a group", interrupted_while_joining, sizes=(2,), fresh=True)]
CASES += [Case(body.__name__, body, sizes=(2,), fresh=True)
          for body in (wait_with_a_timeout, timeouts_of_one_call_and_of_a_group, abort, abort_by_torch)]
CASES += [Case(body.__name__, body, sizes=(2, 3)) for body in (destroyed_group, work_kept_beyond_its_group)]

if __name__ == "__main__":
    ranks.run(CASES)
