#!/usr/bin/env python3
"""The shim in pure Python (python/shoal/torch/_python.py): its internals. Other tests cover what both shims do for a user."""
import gc
import os
import pathlib
import signal
import threading
import time
from datetime import timedelta

import ranks
import torch
import torch.distributed as dist
from ranks import Case, expect

ranks.SHIMS = ["python"]


def start():
    """Starts the default group of two ranks. Returns the package and the store through which they met."""
    import shoal.torch

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0")
    dist.init_process_group("shoal", store=store, rank=int(os.environ["RANK"]), world_size=2, timeout=ranks.GROUP_TIMEOUT)
    return shoal.torch, store


def callback_that_waits_for_another_future(world):
    start()

    def nested(depth):
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] + (nested(depth - 1).wait() if depth else 0))

    expect(nested(4).wait().tolist() == [10, 10, 10])


def futures_out_of_order(world):
    start()
    rank, late = dist.get_rank(), torch.zeros(4)
    if rank == 0:
        first = dist.irecv(late, 1).get_future()
        later = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        expect(later.wait()[0].tolist() == [2, 2] and not first.done())
        dist.barrier()
        expect(first.wait()[0].tolist() == [7] * 4)
    else:
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        dist.send(torch.full((4,), 7.0), 0)


def dropped_work_keeps_its_tensors(world):
    start()
    for number in range(200):
        dist.all_reduce(torch.full((30000,), 1.0), async_op=True)
        torch.full((30000,), float("nan"))  # would reuse the memory of a tensor that was freed too early
    kept = torch.zeros(10, 10)
    dist.all_reduce(kept[:, ::2].fill_(1), async_op=True)
    deadline = time.monotonic() + 40
    while kept[0, 0] != 2 and time.monotonic() < deadline:  # copied back although nobody waits
        time.sleep(0.001)
    expect(kept[:, ::2].eq(2).all() and kept[:, 1::2].eq(0).all(), kept)
    dist.barrier()
    group = dist.group.WORLD
    group._sweep()
    expect(not group.running, group.running)


def interrupt_in_a_synchronous_call(world):
    _, store = start()
    if dist.get_rank() == 0:
        interrupted, tensor = [], torch.ones(100000)

        def interrupt():
            while not ranks.is_under_way():
                time.sleep(0.001)
            time.sleep(0.3)
            interrupted.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            dist.all_reduce(tensor)
            raise AssertionError("the all-reduce ended before the other rank came")
        except KeyboardInterrupt:
            took_s = time.monotonic() - interrupted[0]
        expect(took_s < 10, f"{took_s} s from the signal to Python")  # 0.1 if no other program gets in the way
        view = weak(tensor)
        del tensor
        gc.collect()
        expect(view() is not None, "freed under the operation")
        store.set("interrupted", "yes")
    else:
        store.wait(["interrupted"])
        other = torch.ones(100000)
        dist.all_reduce(other)
        expect(other[99999] == 2)
    dist.barrier()


def weak(thing):
    import weakref
    return weakref.ref(thing)


def error_reaches_cpp(world):
    start()
    future = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True).get_future()
    chained = future.then(lambda done: done.value()).then(lambda done: done.value())
    for waiting in (future, chained):
        try:
            waiting.wait()
            raise AssertionError("no error")
        except RuntimeError as error:
            expect(all(f"called all-reduce of {count} float32" in str(error) for count in (3, 4)), error)  # both sides


def wait_gives_up_and_the_operation_goes_on(world):
    _, store = start()
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        try:
            work.wait(timedelta(milliseconds=100))
            raise AssertionError("done without the other rank")
        except RuntimeError as error:
            expect("100 ms" in str(error), error)
        expect(not work.is_completed() and work.exception() is None)
        store.set("gave up", "yes")
        work.wait()
        expect(work.is_completed() and work.is_success() and work.result()[0] is tensor)
    else:
        store.wait(["gave up"])
        dist.all_reduce(tensor)
    expect(tensor.tolist() == [2, 2, 2])


def child_has_a_context_of_its_own(world):
    shim, _ = start()
    context = shim._communicator.context
    parents, inherited = context(), shim.empty(4096)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            mine = shim.empty(4096).fill_(5)
            del inherited
            gc.collect()
            code = 0 if "fork" in str(error) and context() != parents and mine.sum() == 5 * 4096 else 2
        os._exit(code)
    expect(os.waitpid(child, 0)[1] == 0)
    inherited.fill_(1)
    dist.all_reduce(inherited)
    expect(inherited.eq(2).all())


def memory_stays_flat(world):
    shim, _ = start()
    whole, part = torch.ones(500), torch.ones(50, 50)[:, ::2]

    def round_of_calls():
        for _ in range(300):
            dist.all_reduce(whole)
            dist.all_reduce(whole, async_op=True)
            dist.all_reduce(part, async_op=True).get_future().wait()
            dist.all_reduce(shim.empty(1 << 16, dtype=torch.uint8))
        dist.barrier()
        gc.collect()
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4

    round_of_calls()
    before_kib = round_of_calls()
    for _ in range(3):
        after_kib = round_of_calls()
    expect(after_kib - before_kib < 4096, f"{after_kib - before_kib} KiB more after 3,600 calls")
    expect(threading.active_count() < 6, threading.enumerate())


def group_is_named_by_what_torch_asks(world):
    start()
    group = dist.new_group([0, 1])
    expect(group.name() == "shoal" and dist.get_backend(group) == "shoal" and group.group_name, group.group_name)
    memory = group._get_backend(torch.device("cpu")).allocate_tensor(10, dtype=torch.bfloat16, device=torch.device("cpu"))
    expect(memory.shape == (10,) and memory.dtype is torch.bfloat16 and memory.data_ptr() % 4096 == 0)
    served = [group._get_backend(torch.device("cpu")).supports_tensor_alloc(device) for device in ("cpu", torch.device("cuda:0"), -1, 0)]
    expect(served == [True, False, False, False], served)
    group.shutdown()
    try:
        dist.barrier(group)
        raise AssertionError("a barrier of a group that was shut down")
    except RuntimeError as error:
        expect("destroyed" in str(error), error)


def newest_works_live_on(world):
    """Works live on for torch before 2.8, whose C++ code keeps a work without its Python object and may wait for it twice."""
    start()
    from shoal.torch import _python
    _python.KEPT_WORKS = 2
    views = []
    for number in range(3):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        views.append(weak(work))
    dist.barrier()  # a work that was waited for at once is not kept
    del work
    gc.collect()
    expect([view() is None for view in views] == [True, False, False], views)
    expect(views[1]().wait() and views[2]().get_future().wait()[0].tolist() == [2, 2])


def works_live_until_somebody_has_waited(world):
    """All works live until a wait, for the functional collectives of torch before 2.8, which post many before they wait for
    one."""
    start()
    from shoal.torch import _python
    _python.KEPT_WORKS = 2
    kept = torch.zeros(10, 10)
    views = [weak(dist.all_reduce(torch.ones(2), async_op=True)) for _ in range(3)]
    views.append(weak(dist.all_reduce(kept[:, ::2].fill_(1), async_op=True)))  # its copy makes the shim itself use a future
    views.append(weak(dist.all_reduce(torch.ones(2), async_op=True)))
    views.append(weak(dist.all_reduce(torch.ones(2), async_op=True)))
    dist.barrier()
    dist.group.WORLD._sweep()
    gc.collect()
    expect(all(view() for view in views) and not dist.group.WORLD.running, views)
    for view in views:
        view().wait()
    gc.collect()
    expect([view() is None for view in views[:3] + views[4:]] == [True] * 3 + [False] * 2, views)  # a future's thread has one


def kept_works_end_with_their_group(world):
    """Works hold their group. Messages are not kept, because only Python posts them."""
    start()
    from shoal.torch import _python
    _python.KEPT_WORKS = 2
    gc.disable()
    group, message, waited, unwaited = dist.new_group([0, 1]), torch.ones(2), torch.ones(2), torch.ones(2)
    (dist.recv if world.rank else dist.send)(message, 1 - world.rank, group)
    views = [weak(tensor) for tensor in (message, waited, unwaited)]
    del message
    expect(views[0]() is None, "a message is kept")
    dist.all_reduce(waited, group=group, async_op=True).wait()
    dist.all_reduce(unwaited, group=group, async_op=True)
    dist.barrier(group)
    group._sweep()
    del waited, unwaited
    expect(all(view() is not None for view in views[1:]), views)
    views.append(weak(group))
    dist.destroy_process_group(group)
    del group
    expect(not any(view() for view in views[:3]) and views[3]() is None, views)


def a_block_that_an_exception_left_keeps_no_works(world):
    """torch does not end such a block."""
    start()
    dist.group.WORLD._start_coalescing(torch.device("cpu"))
    views = []
    for _ in range(20):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        views.append(weak(work))
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    del work
    gc.collect()
    alive = sum(view() is not None for view in views) - len(dist.group.WORLD._kept)
    expect(alive <= 0 and not dist.group.WORLD._coalesced, alive)


def a_block_waits_for_copies_and_futures(world):
    start()
    columns = torch.zeros(2, 10, 2)
    if world.rank == 0:
        time.sleep(0.3)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        for tensor in columns:
            if world.rank == 0:
                dist.isend(torch.ones(10), 1)
            else:
                future = dist.irecv(tensor[:, 0], 0).get_future()
    block.wait()
    expect(world.rank == 0 or columns[:, :, 0].eq(1).all() and future.wait(), columns)


CASES = [Case(body.__name__, body, sizes=(2,), init=False, fresh=True) for body in (
    callback_that_waits_for_another_future, futures_out_of_order, dropped_work_keeps_its_tensors,
    interrupt_in_a_synchronous_call, error_reaches_cpp, wait_gives_up_and_the_operation_goes_on,
    child_has_a_context_of_its_own, memory_stays_flat, newest_works_live_on,
    works_live_until_somebody_has_waited, kept_works_end_with_their_group, a_block_that_an_exception_left_keeps_no_works,
    a_block_waits_for_copies_and_futures, group_is_named_by_what_torch_asks)]

if __name__ == "__main__":
    ranks.run(CASES)
