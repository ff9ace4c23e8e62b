#!/usr/bin/env python3
"""Every operation of torch.distributed with exact results: types, operators, sizes, layouts in memory, sync and async."""
import itertools
import os
import threading
import time
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank does at its first functional collective, in up to half a minute
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from inputs import (LAYOUTS, MOVED, REDUCED, check, guarded, name_of, numbers, on_host, operators, place,
                    reduce_op, reduced)
from ranks import Case, Skip, expect

COUNTS = (0, 1, 7, 1000, 20_001)
LARGE = (1 << 20) + 5
HUGE = 18 << 20  # in float32: more than 64 MiB
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=UserWarning)


def is_wrapped(work):
    """From torch 2.14 on, works of Python back-ends are wrapped in one that forwards only wait and get_future."""
    return type(work) is dist.Work and ranks.BACKEND == "shoal" and os.environ["SHOAL_TORCH_SHIM"] == "python"


def is_done(work):
    """Returns true if the work is done, by a query that does not wait."""
    if isinstance(work, torch._C.Future):
        return work.done()
    return work.get_future().done() if is_wrapped(work) else work.is_completed()


def finish(work):
    if work is not None:
        work.wait()
        is_told = on_host() and not is_wrapped(work) and ranks.BACKEND != "gloo"
        expect(is_done(work) or not is_told, "wait() came back and the work is not done")


def variants(every):
    """Returns counts with layouts, sync and async: all combinations, or each count once."""
    if every:
        return itertools.product(COUNTS, LAYOUTS, (False, True))
    return ((count, LAYOUTS[turn % len(LAYOUTS)], turn % 2 == 1) for turn, count in enumerate(COUNTS))


def part(vector, index, count):
    return vector[index * count:(index + 1) * count]


def filled(count, type_, layout="contiguous"):
    return place(guarded(count, type_), layout)


# ---- Operations that reduce: (world, type, count, operator, layout, async) ----


def all_reduce(world, type_, count, name, layout, async_op):
    given = [numbers(rank, count, type_, name) for rank in range(world.size)]
    tensor = place(given[world.rank], layout)
    finish(dist.all_reduce(tensor, reduce_op(name), async_op=async_op))
    check(tensor, reduced(given, name), name, count, layout)


def reduce(world, type_, count, name, layout, async_op):
    for root in range(world.size):
        given = [numbers(rank, count, type_, name, root) for rank in range(world.size)]
        tensor = place(given[world.rank], layout)
        finish(dist.reduce(tensor, root, reduce_op(name), async_op=async_op))
        if world.rank == root:
            check(tensor, reduced(given, name), name, count, layout, root)


def reduce_scatter_tensor(world, type_, count, name, layout, async_op):
    given = [numbers(rank, count * world.size, type_, name) for rank in range(world.size)]
    output = filled(count, type_, layout)
    finish(dist.reduce_scatter_tensor(output, place(given[world.rank], layout), reduce_op(name), async_op=async_op))
    check(output, part(reduced(given, name), world.rank, count), name, count, layout)


def reduce_scatter(world, type_, count, name, layout, async_op):
    given = [numbers(rank, count * world.size, type_, name) for rank in range(world.size)]
    output = filled(count, type_, layout)
    parts = [place(part(given[world.rank], rank, count), layout) for rank in range(world.size)]
    finish(dist.reduce_scatter(output, parts, reduce_op(name), async_op=async_op))
    check(output, part(reduced(given, name), world.rank, count), name, count, layout)


def all_reduce_coalesced(world, type_, count, name, layout, async_op):
    counts = [count, 3, count // 2]
    given = [[numbers(rank, count, type_, name, salt) for rank in range(world.size)] for salt, count in enumerate(counts)]
    tensors = [place(inputs[world.rank], layout) for inputs in given]
    finish(dist.all_reduce_coalesced(tensors, reduce_op(name), async_op=async_op))
    for tensor, inputs in zip(tensors, given):
        check(tensor, reduced(inputs, name), name, counts, layout)


# ---- Operations that move: (world, type, count, layout, async) ----


def broadcast(world, type_, count, layout, async_op):
    for root in range(world.size):
        tensor = place(numbers(world.rank, count, type_, salt=root), layout)
        finish(dist.broadcast(tensor, root, async_op=async_op))
        check(tensor, numbers(root, count, type_, salt=root), count, layout, root)


def all_gather(world, type_, count, layout, async_op):
    outputs = [filled(count, type_, layout) for _ in range(world.size)]
    finish(dist.all_gather(outputs, place(numbers(world.rank, count, type_), layout), async_op=async_op))
    for rank, output in enumerate(outputs):
        check(output, numbers(rank, count, type_), count, layout, rank)


def all_gather_in_one_piece(world, type_, count, layout, async_op):
    """The list contains views of one tensor, one after another; the input is one of them."""
    whole = place(torch.cat([numbers(world.rank, count, type_)] * world.size), "unaligned")
    outputs = list(whole.split(count)) if count else [whole] * world.size
    finish(dist.all_gather(outputs, outputs[world.rank], async_op=async_op))
    check(whole, torch.cat([numbers(rank, count, type_) for rank in range(world.size)]), count, layout)


def all_gather_into_tensor(world, type_, count, layout, async_op):
    given = place(numbers(world.rank, count, type_), layout)
    expected = torch.cat([numbers(rank, count, type_) for rank in range(world.size)])
    output = filled(count * world.size, type_, "contiguous" if layout == "transposed" else layout)
    flat = given if given.dim() == 1 else given.reshape(-1)
    finish(dist.all_gather_into_tensor(output, flat, async_op=async_op))
    check(output, expected, count, layout)
    stacked = filled(count * world.size, type_, "unaligned").view(world.size, count)
    finish(dist.all_gather_into_tensor(stacked, flat, async_op=async_op))
    check(stacked, expected, count, layout, "stacked")


def gather(world, type_, count, layout, async_op):
    for root in range(world.size):
        outputs = [filled(count, type_, layout) for _ in range(world.size)] if world.rank == root else None
        finish(dist.gather(place(numbers(world.rank, count, type_, salt=root), layout), outputs, root, async_op=async_op))
        for rank, output in enumerate(outputs or []):
            check(output, numbers(rank, count, type_, salt=root), count, layout, root, rank)


def scatter(world, type_, count, layout, async_op):
    for root in range(world.size):
        whole = numbers(root, count * world.size, type_)
        parts = [place(part(whole, rank, count), layout) for rank in range(world.size)] if world.rank == root else None
        output = filled(count, type_, layout)
        finish(dist.scatter(output, parts, root, async_op=async_op))
        check(output, part(whole, world.rank, count), count, layout, root)


def all_to_all_single(world, type_, count, layout, async_op):
    given = place(numbers(world.rank, count * world.size, type_), "contiguous" if layout == "transposed" else layout)
    output = filled(count * world.size, type_, "contiguous" if layout == "transposed" else layout)
    finish(dist.all_to_all_single(output, given, async_op=async_op))
    check(output, torch.cat([part(numbers(rank, count * world.size, type_), world.rank, count) for rank in range(world.size)]),
          count, layout)


def splits(count, size):
    """Returns a table: table[r][p] is the number of elements that rank r sends to rank p. Some are zero."""
    return [[(rank + 2 * peer) % 3 * count for peer in range(size)] for rank in range(size)]


def sent(world, type_, table, rank, salt=0):
    """Returns the elements that this rank receives from another one by such a table."""
    whole = numbers(rank, sum(table[rank]), type_, salt=salt)
    return whole.split(table[rank])[world.rank]


def all_to_all_single_uneven(world, type_, count, layout, async_op):
    table = splits(count, world.size)
    layout = "unaligned" if layout == "transposed" else layout
    takes = [table[rank][world.rank] for rank in range(world.size)]
    output = filled(sum(takes), type_, layout)
    given = place(numbers(world.rank, sum(table[world.rank]), type_), layout)
    finish(dist.all_to_all_single(output, given, takes, table[world.rank], async_op=async_op))
    check(output, torch.cat([sent(world, type_, table, rank) for rank in range(world.size)]), count, layout)


def all_to_all(world, type_, count, layout, async_op):
    table = splits(count, world.size)
    gives = [place(t, layout) for t in numbers(world.rank, sum(table[world.rank]), type_).split(table[world.rank])]
    outputs = [filled(table[rank][world.rank], type_, layout) for rank in range(world.size)]
    finish(dist.all_to_all(outputs, gives, async_op=async_op))
    for rank, output in enumerate(outputs):
        check(output, sent(world, type_, table, rank), count, layout, rank)


def send_recv(world, type_, count, layout, async_op):
    """A ring, in both directions, with tags."""
    if world.size == 1:
        return
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    output = filled(count, type_, layout)
    given = place(numbers(world.rank, count, type_), layout)
    if async_op:
        works = [dist.isend(given, right, tag=5), dist.irecv(output, left, tag=5)]
        for work in reversed(works):
            finish(work)
    else:
        for sender in range(world.size):
            if world.rank == sender:
                dist.send(given, right, tag=sender)
            if world.rank == (sender + 1) % world.size:
                expect(dist.recv(output, sender, tag=sender) == sender, "recv() does not return the rank of the sender")
    check(output, numbers(left, count, type_), count, layout)


REDUCING = (all_reduce, reduce, reduce_scatter_tensor, reduce_scatter, all_reduce_coalesced)
MOVING = (broadcast, all_gather, all_gather_in_one_piece, all_gather_into_tensor, gather, scatter, all_to_all_single,
          all_to_all_single_uneven, all_to_all, send_recv)


def sizes_for(type_):
    """Returns every number of ranks for one type, and an even and an odd one for the others."""
    return (1, 2, 3, 4) if type_ is torch.float32 else (2, 3)


def reducing_case(operation, type_):
    def body(world):
        for name in operators(type_):
            for count, layout, async_op in variants(every=name == "SUM" and type_ is torch.float32):
                operation(world, type_, count, name, layout, async_op)
    return Case(f"{operation.__name__} {name_of(type_)}", body, sizes=sizes_for(type_))


def moving_case(operation, type_):
    def body(world):
        for count, layout, async_op in variants(every=type_ is torch.float32):
            operation(world, type_, count, layout, async_op)
    return Case(f"{operation.__name__} {name_of(type_)}", body, sizes=sizes_for(type_))


# ---- Sizes ----


def large(world):
    for layout, async_op in (("contiguous", False), ("unaligned", True), ("strided", False)):
        all_reduce(world, torch.float32, LARGE, "SUM", layout, async_op)
        all_gather(world, torch.bfloat16, LARGE, layout, async_op)
        reduce_scatter_tensor(world, torch.float32, LARGE // world.size, "AVG", layout, async_op)
        all_to_all_single(world, torch.uint8, LARGE // world.size, layout, async_op)
        broadcast(world, torch.int64, LARGE // 4, layout, async_op)
        send_recv(world, torch.float64, LARGE // 2, layout, async_op)


def huge(world):
    tensor = torch.full((HUGE,), float(world.rank + 1))
    dist.all_reduce(tensor)
    total = float(sum(range(1, world.size + 1)))
    expect(tensor.min() == total and tensor.max() == total, tensor.min(), tensor.max(), total)


def inputs_negated_lazily(world):
    """torch itself accepts no conjugated inputs. For negated outputs it passes copies to every back-end."""
    def negated(values):
        view = torch.complex(values, -values).conj().imag
        expect(view.is_neg() and torch.equal(view, values), "torch negates at once: the test asks nothing")
        return view
    mine = torch.arange(100.0) + world.rank
    gathered, received = ([torch.empty(100) for _ in range(world.size)] for _ in range(2))
    dist.all_gather(gathered, negated(mine))
    dist.all_to_all(received, [negated(mine) for _ in range(world.size)])
    for rank in range(world.size):
        check(gathered[rank], torch.arange(100.0) + rank)
        check(received[rank], torch.arange(100.0) + rank)


def scalars(world):
    tensor = torch.tensor(float(world.rank))
    dist.all_reduce(tensor)
    expect(tensor.dim() == 0 and tensor.item() == sum(range(world.size)), tensor)
    outputs = [torch.tensor(0) for _ in range(world.size)]
    dist.all_gather(outputs, torch.tensor(world.rank))
    expect([output.item() for output in outputs] == list(range(world.size)), outputs)
    stacked = torch.zeros(world.size)
    dist.all_gather_into_tensor(stacked, torch.tensor(float(world.rank)))
    expect(stacked.tolist() == list(range(world.size)), stacked)
    dist.broadcast(tensor.fill_(world.rank + 5), 0)
    expect(tensor.item() == 5, tensor)


def matrices(world):
    """Shapes other than vectors: only a tensor's elements matter, not its shape."""
    given = torch.arange(24.).reshape(2, 3, 4) + world.rank
    outputs = [torch.empty(2, 3, 4) for _ in range(world.size)]
    dist.all_gather(outputs, given.transpose(0, 2).contiguous().transpose(0, 2))
    for rank, output in enumerate(outputs):
        expect(torch.equal(output, torch.arange(24.).reshape(2, 3, 4) + rank), output)
    image = (torch.arange(48.).reshape(1, 3, 4, 4) + world.rank).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    expected = world.size * torch.arange(48.).reshape(1, 3, 4, 4) + sum(range(world.size))
    expect(torch.equal(image, expected) and image.is_contiguous(memory_format=torch.channels_last), image)
    output = torch.empty(5, 2)
    dist.reduce_scatter_tensor(output, torch.ones(5 * world.size, 2))
    expect(torch.equal(output, torch.full((5, 2), float(world.size))), output)


def parameters(world):
    """Tensors that require gradients are read and written like others."""
    parameter = torch.nn.Parameter(torch.full((10,), float(world.rank)))
    with torch.no_grad():
        dist.broadcast(parameter, world.size - 1)
    expect(torch.equal(parameter.data, torch.full((10,), world.size - 1.0)), parameter)
    dist.all_reduce(parameter.data)
    expect(parameter[0].item() == world.size * (world.size - 1), parameter)


# ---- Works and futures ----


def works_finished_out_of_order(world):
    tensors = [torch.full((1 + 500 * turn,), float(world.rank + turn)) for turn in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for turn in sorted(range(40), key=lambda turn: turn * 17 % 40):
        finish(works[turn])
        check(tensors[turn], torch.full_like(tensors[turn], sum(rank + turn for rank in range(world.size))), turn)


def works_dropped(world):
    """Nobody waits for the works or keeps their tensors. They still complete, in order."""
    for turn in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    expect(tensor.item() == world.size)


def works_dropped_of_tensors_with_gaps(world):
    """Data received into a copy reaches the tensor even if nobody waits for the work."""
    for turn in range(20):
        matrix = torch.full((50, 20), float(world.rank))
        dist.all_reduce(matrix[:, ::2], async_op=True)
        dist.barrier()
        deadline = time.monotonic() + 40
        while matrix[-1, -2].item() != sum(range(world.size)) and time.monotonic() < deadline:
            time.sleep(0.001)
        check(matrix[:, ::2].clone(), torch.full((50, 10), float(sum(range(world.size)))), turn)
        check(matrix[:, 1::2].clone(), torch.full((50, 10), float(world.rank)), turn)


def works_polled_beside_their_futures(world):
    """Several ways to notice completion, at the same time and from several threads."""
    for turn in range(50):
        tensor = torch.full((1 + 3000 * (turn % 2),), float(world.rank))
        work = dist.all_reduce(tensor, async_op=True)
        called = threading.Event()
        work.get_future().add_done_callback(lambda _, called=called: called.set())
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        while not is_done(work):
            pass
        expect(is_wrapped(work) or work.is_success(), turn)
        expect(called.wait(40), turn)
        waiter.join()
        check(tensor, torch.full_like(tensor, sum(range(world.size))), turn)


def futures(world):
    tensor = torch.full((100,), float(world.rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    total = float(sum(range(world.size)))
    expect(torch.equal(doubled.wait(), torch.full((100,), 2 * total)), doubled.value())
    expect(isinstance(future.wait(), list) and future.value()[0].data_ptr() == tensor.data_ptr(), future.value())
    expect(future.done())
    outputs = [torch.empty(3) for _ in range(world.size)]
    work = dist.all_gather(outputs, torch.full((3,), float(world.rank)), async_op=True)
    value = work.get_future().wait()
    expect([round(float(torch.as_tensor(tensor).flatten()[0])) for tensor in flat(value)] == list(range(world.size)), value)
    called = threading.Event()
    work = dist.broadcast(tensor, 0, async_op=True)
    work.get_future().add_done_callback(lambda _: called.set())
    work.wait()
    expect(called.wait(10), "the callback of a future was not called")


def flat(value):
    for item in value:
        yield from flat(item) if isinstance(item, (list, tuple)) else [item]


def futures_chained(world):
    """A callback starts the next collective, as hooks of DDP do."""
    tensor = torch.ones(10)
    first = dist.all_reduce(tensor, async_op=True).get_future()

    def again(done):
        other = done.value()[0].clone()
        return dist.all_reduce(other, async_op=True).get_future()
    result = first.then(again).wait()
    while isinstance(result, torch._C.Future):
        result = result.wait()
    expect(result[0][0].item() == world.size ** 2, result)


def work_facts(world):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    expect(work.wait(), "wait() is not True")
    if is_wrapped(work):
        expect(is_done(work), "the future of a finished work is not done")
        raise Skip("torch asks works in Python for wait() and get_future() alone")
    expect(work.is_completed() and work.is_success(), "a finished work is no success")
    try:
        expect(work.exception() is None, work.exception())
    except TypeError as error:
        raise Skip(f"torch hands on no exception of C++: {error}") from None


def futures_after_wait(world):
    """A future that was taken before is done when wait() returns, and so is one that is taken afterwards."""
    late = 0
    for _ in range(1000):
        work = dist.all_reduce(torch.ones(16), async_op=True)
        before = work.get_future()
        work.wait()
        seen = []
        work.get_future().then(lambda _: seen.append(1))  # noqa: B023
        late += not (before.done() and seen)
    expect(late == 0, late, "futures of 1000 were not done after wait()")


def wait_with_timeout(world):
    work = dist.all_reduce(torch.ones(10), async_op=True)
    expect(work.wait(ranks.GROUP_TIMEOUT))
    work = dist.barrier(async_op=True)
    expect(work.wait(ranks.GROUP_TIMEOUT))


# ---- Messages ----


def messages_outstanding(world):
    """Several messages with several tags to each peer, received in another order of tags than sent."""
    tags = (0, 3, 7)
    works, got = [], {}
    for peer in range(world.size):
        if peer != world.rank:
            works += [dist.isend(numbers(world.rank, 10 + 4000 * turn, torch.float32, salt=tag), peer, tag=tag)
                      for tag in tags for turn in range(3)]
    for peer in range(world.size):
        if peer != world.rank:
            for tag in reversed(tags):
                for turn in range(3):
                    got[peer, tag, turn] = torch.empty(10 + 4000 * turn)
                    works.append(dist.irecv(got[peer, tag, turn], peer, tag=tag))
    for work in works:
        finish(work)
    for (peer, tag, turn), tensor in got.items():
        check(tensor, numbers(peer, 10 + 4000 * turn, torch.float32, salt=tag), peer, tag, turn)


def batch(world, receives_first):
    """Each rank sends to all, itself among them."""
    for count in (0, 5, 100_000):
        outputs = {peer: torch.empty(count) for peer in range(world.size)}
        receives = [dist.P2POp(dist.irecv, output, peer) for peer, output in outputs.items()]
        sends = [dist.P2POp(dist.isend, numbers(world.rank, count, torch.float32), peer) for peer in outputs]
        operations = receives + sends if receives_first else sends + receives
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer, output in outputs.items():
            check(output, numbers(peer, count, torch.float32), peer, count)


def batches_that_cross(world):
    """Two messages between the same ranks in one batch. One side lists the second one first, with its tag."""
    if world.size == 1:
        return
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    a, b = torch.empty(50_000), torch.empty(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((50_000,), world.rank + .5), right, tag=1),
                                        dist.P2POp(dist.isend, torch.full((3,), world.rank + .25), right, tag=2),
                                        dist.P2POp(dist.irecv, b, left, tag=2), dist.P2POp(dist.irecv, a, left, tag=1)]):
        work.wait()
    check(a, torch.full((50_000,), left + .5))
    check(b, torch.full((3,), left + .25))


def messages_beside_collectives(world):
    if world.size == 1:
        return
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    output = torch.empty(1000)
    receive = dist.irecv(output, left)
    tensor = torch.ones(5000)
    reduce_work = dist.all_reduce(tensor, async_op=True)
    send = dist.isend(torch.full((1000,), float(world.rank)), right)
    dist.barrier()
    for work in (receive, send, reduce_work):
        finish(work)
    check(output, torch.full((1000,), float(left)))
    check(tensor, torch.full((5000,), float(world.size)))


# ---- Objects, barriers, coalescing, functional forms ----


def objects(world):
    mine = {"rank": world.rank, "text": "x" * (1000 * world.rank), "list": list(range(world.rank))}
    every = [{"rank": rank, "text": "x" * (1000 * rank), "list": list(range(rank))} for rank in range(world.size)]
    outputs = [None] * world.size
    dist.all_gather_object(outputs, mine)
    expect(outputs == every, outputs)
    for root in range(world.size):
        outputs = [None] * world.size if world.rank == root else None
        dist.gather_object(mine, outputs, dst=root)
        expect(world.rank != root or outputs == every, outputs)
        shared = [mine, None] if world.rank == root else [None, None]
        dist.broadcast_object_list(shared, src=root)
        expect(shared == [every[root], None], shared)
        taken = [None]
        dist.scatter_object_list(taken, every if world.rank == root else None, src=root)
        expect(taken == [mine], taken)
    if world.size > 1:
        if world.rank == 0:
            dist.send_object_list([mine, "second"], dst=1)
        if world.rank == 1:
            taken = [None, None]
            dist.recv_object_list(taken, src=0)
            expect(taken == [every[0], "second"], taken)


def barriers(world):
    for _ in range(20):
        dist.barrier()
    work = dist.barrier(async_op=True)
    finish(work)


def barrier_waits(world):
    """No rank leaves the barrier before the last has come. The store counts the arrivals."""
    store = dist.distributed_c10d._get_default_store()
    for turn in range(10):
        store.add(f"came{turn}", 1)
        dist.barrier()
        expect(store.add(f"came{turn}", 0) == world.size, "a barrier let a rank go before all had come")


def monitored_barrier(world):
    """By the group's own method, because torch.distributed.monitored_barrier requires Gloo by name."""
    dist.group.WORLD.monitored_barrier(ranks.GROUP_TIMEOUT)
    dist.group.WORLD.monitored_barrier(ranks.GROUP_TIMEOUT, wait_all_ranks=True)
    if ranks.BACKEND == "shoal":
        import shoal.torch
        shoal.torch.monitored_barrier(timeout=ranks.GROUP_TIMEOUT)
    dist.barrier()


def coalesced(world, device, async_ops):
    """all_reduce, all_gather_into_tensor and reduce_scatter_tensor under _coalescing_manager."""
    for type_ in REDUCED:
        for name in operators(type_):
            coalesced_reductions(world, device, async_ops, type_, name)
    for type_ in MOVED:
        given = [[numbers(rank, count, type_) for rank in range(world.size)] for count in (3, 0, 700)]
        outputs = [guarded(len(inputs[0]) * world.size, type_) for inputs in given]
        coalesce(device, async_ops, dist.all_gather_into_tensor,
                 [(output, place(inputs[world.rank])) for output, inputs in zip(outputs, given)])
        for output, inputs in zip(outputs, given):
            check(output, torch.cat(inputs), type_)


def coalesced_reductions(world, device, async_ops, type_, name):
    counts = (5, 0, 1000)
    given = [[numbers(rank, count, type_, name) for rank in range(world.size)] for count in counts]
    tensors = [place(inputs[world.rank]) for inputs in given]
    coalesce(device, async_ops, dist.all_reduce, [(tensor, reduce_op(name)) for tensor in tensors])
    for tensor, inputs in zip(tensors, given):
        check(tensor, reduced(inputs, name), type_, name)
    given = [[numbers(rank, count * world.size, type_, name) for rank in range(world.size)] for count in counts]
    outputs = [guarded(count, type_) for count in counts]
    coalesce(device, async_ops, dist.reduce_scatter_tensor,
             [(output, place(inputs[world.rank]), reduce_op(name)) for output, inputs in zip(outputs, given)])
    for output, inputs in zip(outputs, given):
        check(output, part(reduced(inputs, name), world.rank, len(output)), type_, name)


def coalesce(device, async_ops, operation, calls):
    with dist._coalescing_manager(device=device, async_ops=async_ops) as cm:
        for words in calls:
            operation(*words)
    if async_ops:
        cm.wait()


def coalescing_never_ended(world):
    """If an exception leaves a block, torch may not end it. The next block begins anew."""
    dist.group.WORLD._start_coalescing(torch.device("cpu"))
    coalesced(world, torch.device("cpu"), True)


def gathered_lists(world):
    """all_gather_coalesced: a list of outputs for each rank."""
    for type_ in MOVED:
        given = [[numbers(rank, count, type_) for count in (3, 0, 500)] for rank in range(world.size)]
        outputs = [[guarded(len(tensor), type_) for tensor in inputs] for inputs in given]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_gather_coalesced(outputs, given[world.rank])
        for list_, inputs in zip(outputs, given):
            for output, tensor in zip(list_, inputs):
                check(output, tensor, type_)


def coalesced_messages(world):
    if world.size == 1:
        return
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    output = torch.empty(2000)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as cm:
        dist.irecv(output, left)
        dist.isend(torch.full((2000,), float(world.rank)), right)
    cm.wait()
    check(output, torch.full((2000,), float(left)))


def functional_forms(world):
    group = dist.group.WORLD
    mine = torch.full((4,), float(world.rank))
    total = float(sum(range(world.size)))
    every = torch.arange(world.size).repeat_interleave(4).to(torch.float32)
    check(functional.wait_tensor(functional.all_reduce(mine, "sum", group)), torch.full((4,), total))
    check(functional.wait_tensor(functional.all_reduce(mine, "avg", group)), torch.full((4,), total / world.size))
    check(functional.wait_tensor(functional.all_gather_tensor(mine, 0, group)), every)
    beside = functional.wait_tensor(functional.all_gather_tensor(mine.view(2, 2), 1, group))
    check(beside.reshape(2, -1, 2).transpose(0, 1).reshape(-1), every)
    check(functional.wait_tensor(functional.reduce_scatter_tensor(every, "sum", 0, group)),
          torch.full((4,), float(world.size * world.rank)))
    check(functional.wait_tensor(functional.broadcast(mine, world.size - 1, group)), torch.full((4,), world.size - 1.0))
    pair = functional.all_reduce_coalesced([mine, every], "sum", group)
    check(functional.wait_tensor(pair[0]), torch.full((4,), total))
    check(functional.wait_tensor(pair[1]), every * world.size)
    pair = functional.all_gather_into_tensor_coalesced([mine, mine.to(torch.int64)], group)
    check(functional.wait_tensor(pair[0]), every)
    check(functional.wait_tensor(pair[1]), every.to(torch.int64))
    pair = functional.reduce_scatter_tensor_coalesced([every, every], "sum", [0, 0], group)
    check(functional.wait_tensor(pair[1]), torch.full((4,), float(world.size * world.rank)))
    check(functional.wait_tensor(pair[0]), torch.full((4,), float(world.size * world.rank)))


def functional_exchanges(world):
    group = dist.group.WORLD
    every = torch.arange(world.size).repeat_interleave(4).to(torch.float32)
    table = splits(2, world.size)
    takes = [table[rank][world.rank] for rank in range(world.size)]
    whole = numbers(world.rank, sum(table[world.rank]), torch.float32)
    try:
        check(functional.wait_tensor(functional.all_to_all_single(every, None, None, group)),
              torch.full((4 * world.size,), float(world.rank)))
    except RuntimeError as error:
        if "No backend type associated" in str(error):
            raise Skip("this torch asks no group in Python for it") from None
        raise
    check(functional.wait_tensor(functional.all_to_all_single(whole, takes, table[world.rank], group)),
          torch.cat([sent(world, torch.float32, table, rank) for rank in range(world.size)]))


def functional_gradients(world):
    mine = torch.full((4,), float(world.rank + 1), requires_grad=True)
    functional.all_gather_tensor_autograd(mine, 0, dist.group.WORLD).square().sum().backward()
    check(mine.grad, torch.full((4,), 2.0 * world.size * (world.rank + 1)))


# ---- Groups ----


def sum_in(group, members):
    tensor = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(tensor, group=group)
    expect(tensor.tolist() == [sum(members), len(members)], members, tensor)


def groups(world):
    lists = [list(range(world.size)), [0], list(range(0, world.size, 2)), list(range(1, world.size)), [world.size - 1]]
    made = [(members, dist.new_group(members)) for members in lists if members]
    for members, group in made + made[::-1]:
        if world.rank in members:
            sum_in(group, members)
            sub = members.index(world.rank)
            expect(dist.get_rank(group) == sub and dist.get_world_size(group) == len(members))
            tensor = torch.tensor([world.rank])
            dist.broadcast(tensor, members[-1], group=group)
            expect(tensor.item() == members[-1], "broadcast within a group", members, tensor)
            outputs = [torch.tensor([-1]) for _ in members]
            dist.all_gather(outputs, torch.tensor([world.rank]), group=group)
            expect([output.item() for output in outputs] == members, "all_gather within a group", members, outputs)
            if len(members) > 1 and sub < 2:
                message = torch.tensor([world.rank])
                dist.send(message, members[1], group=group) if sub == 0 else dist.recv(message, members[0], group=group)
                expect(message.item() == members[0], "a message within a group", message)
    for members, group in made:
        if world.rank in members:
            dist.destroy_process_group(group)
    sum_in(None, list(range(world.size)))


def group_that_is_split(world):
    """torch uses this for a device mesh with NCCL. A rank that is not a member has no group."""
    if world.shim != "c++" or not hasattr(dist.group.WORLD, "split_group"):
        raise Skip("the shim in Python has no split" if world.shim == "python" else "this torch or back-end has no split")
    members = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    for turn in range(2):
        half = dist.group.WORLD.split_group(members, group_name=f"half {world.rank % 2} of {turn}")
        expect(half.size() == len(members) and members[half.rank()] == world.rank, half.size(), half.rank())
        tensor = torch.tensor([float(world.rank), 1.0])
        half.allreduce([tensor]).wait()
        expect(tensor.tolist() == [sum(members), len(members)], tensor)
    last = dist.group.WORLD.split_group([world.size - 1], group_name="last")
    expect((last is not None) == (world.rank == world.size - 1), last)


def groups_in_another_order(world):
    """Members are listed in reverse. Ranks are numbered as the group lists them."""
    members = list(range(world.size))[::-1]
    group = dist.new_group(members)
    outputs = [torch.tensor([-1]) for _ in members]
    dist.all_gather(outputs, torch.tensor([world.rank]), group=group)
    expect([output.item() for output in outputs] == [dist.get_global_rank(group, rank) for rank in range(world.size)], outputs)
    dist.destroy_process_group(group)


def groups_made_locally(world):
    """use_local_synchronization: only members call."""
    if world.size < 3:
        return
    members = [0, 1] if world.rank < 2 else list(range(2, world.size))
    for _ in range(2):  # torch gives the second group the same name
        group = dist.new_group(members, use_local_synchronization=True)
        sum_in(group, members)
        dist.destroy_process_group(group)


def subgroups(world):
    group, made = dist.new_subgroups_by_enumeration([[rank] for rank in range(world.size)])
    sum_in(group, [world.rank])
    for one in made:
        if one != dist.GroupMember.NON_GROUP_MEMBER and one is group:
            dist.destroy_process_group(one)


def groups_at_once(world):
    """Two operations run on different groups. The waits come in the opposite order."""
    other = dist.new_group()
    a, b = torch.ones(50_000), torch.ones(10)
    works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=other, async_op=True)]
    for work in reversed(works):
        work.wait()
    expect(a[-1].item() == b[0].item() == world.size)
    dist.destroy_process_group(other)


def threads(world):
    """Each thread has its own group; their operations run at the same time."""
    made = [dist.new_group() for _ in range(4)]
    failures = []

    def work(group, salt):
        try:
            for turn in range(30):
                given = [numbers(rank, 10 + 300 * turn, torch.float32, salt=salt) for rank in range(world.size)]
                tensor = given[world.rank].clone()
                dist.all_reduce(tensor, group=group)
                check(tensor, reduced(given, "SUM"), salt, turn)
        except BaseException as error:
            failures.append(repr(error))
    running = [threading.Thread(target=work, args=(group, salt)) for salt, group in enumerate(made)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    expect(not failures, failures)
    for group in made:
        dist.destroy_process_group(group)


def other_threads_run_while_one_waits(world):
    """A wait releases the interpreter for other threads."""
    if world.size == 1:
        return
    counter, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counter[0] += 1
    thread = threading.Thread(target=count)
    thread.start()
    store = dist.distributed_c10d._get_default_store()
    if world.rank == world.size - 1:  # comes long after all others
        store.wait([f"about to wait {rank}" for rank in range(world.size - 1)])
        time.sleep(0.3)
    before = counter[0]
    store.set(f"about to wait {world.rank}", "")
    dist.barrier()
    during = counter[0] - before
    stop.set()
    thread.join()
    expect(world.rank == world.size - 1 or during > 1000, f"beside a waiting rank another thread counted to {during} only")


def is_at(line, address):
    """Returns true if a line of /proc/PID/maps describes the mapping at that address."""
    begin, end = line.split()[0].split("-")
    return int(begin, 16) <= address < int(end, 16)


def memory_of_shoal(world):
    """shoal.torch.empty: these look like ordinary tensors, in memory that the other ranks map."""
    if ranks.BACKEND != "shoal":
        raise Skip("only shoal has it")
    import shoal.torch
    for type_ in MOVED:
        tensor = shoal.torch.empty(1000, dtype=type_)
        expect(tensor.dtype is type_ and tensor.shape == (1000,) and tensor.is_contiguous(), tensor)
        tensor.copy_(numbers(world.rank, 1000, type_))
        dist.broadcast(tensor, world.size - 1)
        check(tensor, numbers(world.size - 1, 1000, type_), type_)
        with open("/proc/self/maps") as file:
            places = [line for line in file if is_at(line, tensor.data_ptr())]
        expect(len(places) == 1 and "shoal-memory" in places[0], places)
    shaped = shoal.torch.empty(3, 50_001)
    expect(shaped.shape == (3, 50_001) and shaped.dtype is torch.float32)
    shaped.fill_(world.rank)
    dist.all_reduce(shaped)
    check(shaped, torch.full((3 * 50_001,), float(sum(range(world.size)))))
    view = shaped[1, 5:]
    del shaped
    view.fill_(world.rank)
    dist.all_reduce(view)
    check(view.clone(), torch.full((49_996,), float(sum(range(world.size)))))
    given = shoal.torch.empty(world.size * 4096)
    given.fill_(world.rank)
    output = shoal.torch.empty(4096)
    dist.reduce_scatter_tensor(output, given)
    check(output, torch.full((4096,), float(sum(range(world.size)))))
    dist.all_gather_into_tensor(given, output.fill_(world.rank))
    check(given, torch.arange(world.size).repeat_interleave(4096).to(torch.float32))
    expect(shoal.torch.empty(0).numel() == 0)
    expect(shoal.torch.empty(2, device="cpu").shape == (2,) and shoal.torch.empty(2, device=torch.device("cpu")).shape == (2,))
    try:
        shoal.torch.empty(2, device="cuda")
    except ValueError as error:
        expect("of the CPU, not of cuda" in str(error) and "torch.empty(..., device=" in str(error), error)
    else:
        raise AssertionError("memory of a GPU was promised")
    expect(shoal.torch.shim() == world.shim, shoal.torch.shim())


def every_collective(world, group=None):
    def parts():
        return [torch.ones(3, 5) for _ in range(world.size)]

    tensor, wide, is_first = torch.ones(3, 5), torch.ones(3 * world.size, 5), world.rank == 0
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.broadcast(tensor, world.size - 1, group=group)
    dist.reduce(tensor, 0, group=group)
    dist.all_gather(parts(), tensor, group=group)
    dist.gather(tensor, parts() if is_first else None, dst=0, group=group)
    dist.scatter(tensor, parts() if is_first else None, src=0, group=group)
    dist.all_to_all_single(torch.empty_like(wide), wide, group=group)
    dist.all_reduce_coalesced([tensor, torch.ones(7)], group=group)
    if world.size > 1 and world.rank < 2:
        (dist.send if is_first else dist.recv)(torch.ones(4, 3), 1 - world.rank, group=group)
    dist.barrier(group=group)


def events_of(profile, back_end):
    """Returns (name, shapes of the inputs) of a back-end's events, in their order."""
    events = [event for event in profile.events() if event.name.startswith(back_end)]
    return [(event.name[len(back_end):], event.input_shapes, event.is_async)
            for event in sorted(events, key=lambda event: event.time_range.start)]


def profiles_show_shapes(world):
    """Each operation is an event with the shapes of its inputs, as with Gloo. torch names some by only a part of the name:
    "all_reduce" is also Gloo's "all_reduce_coalesced"."""
    if ranks.BACKEND != "shoal":
        raise Skip("it compares with Gloo's")
    told = []
    for back_end, group in (("gloo:", dist.new_group(backend="gloo")), ("shoal:", None)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            every_collective(world, group)
        told.append(events_of(profile, back_end))
    theirs, ours = told
    expect(len(ours) == len(theirs) > 9, ours, theirs)
    for (our_name, our_shapes, is_async), (name, shapes, _) in zip(ours, theirs):
        expect(our_name.startswith(name) and our_shapes == shapes, our_name, our_shapes, name, shapes)
        expect(is_async == (world.shim == "c++"), our_name)  # a Python Work has no event that continues after the call


PLAIN = (inputs_negated_lazily, scalars, matrices, parameters, works_finished_out_of_order, works_dropped,
         works_dropped_of_tensors_with_gaps, works_polled_beside_their_futures, futures, futures_chained, futures_after_wait,
         work_facts, wait_with_timeout, messages_outstanding, batches_that_cross, messages_beside_collectives, objects, barriers,
         barrier_waits, monitored_barrier, coalescing_never_ended, gathered_lists, coalesced_messages,
         functional_forms, functional_exchanges, functional_gradients, groups, groups_in_another_order, groups_made_locally,
         group_that_is_split, subgroups, groups_at_once, profiles_show_shapes, threads, other_threads_run_while_one_waits, memory_of_shoal)

CASES = [reducing_case(operation, type_) for operation in REDUCING for type_ in REDUCED]
CASES += [moving_case(operation, type_) for operation in MOVING for type_ in MOVED]
CASES += [Case(body.__name__, body) for body in PLAIN]
CASES += [Case("large", large, timeout_s=300), Case("huge", huge, sizes=(2,))]
CASES += [Case(f"batch_isend_irecv {'receives' if first else 'sends'} first", lambda world, first=first: batch(world, first))
          for first in (False, True)]
CASES += [Case(f"coalesced {device} {'async' if async_ops else 'sync'}",
               lambda world, device=device, async_ops=async_ops: coalesced(world, device and torch.device(device), async_ops))
          for device in (None, "cpu") for async_ops in (False, True)]

if __name__ == "__main__":
    ranks.run(CASES)
