#!/usr/bin/env python3
"""How processes begin and end: every way to start, processes that fork, groups made and destroyed, and what is left behind.

Most cases start separate programs, as a user would: the texts below. Each prints only what its case expects.
"""
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import ranks
import tap
import torch
import torch._dynamo  # noqa: F401: else each process's first DistributedDataParallel imports it, in two seconds
import torch.distributed as dist
from ranks import Case, Skip, expect

STARTED_S = 180  # for new processes, which import torch, on a loaded machine
COMMAND = os.environ.get("SHOAL_COMMAND", str(ranks.TOP / "build/shoal"))
BEGIN = """
import os, sys, torch, torch.distributed as dist
if "BACKEND" in os.environ and "shoal" in os.environ["BACKEND"]:
    import shoal.torch
BACKEND = os.environ.get("BACKEND", "shoal")
"""
SUM = """
tensor = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
assert tensor[-1].item() == sum(range(1, dist.get_world_size() + 1)), tensor
"""


# ---- Ranks that this file launches ----


def environment(shim, **variables):
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    result = {name: value for name, value in os.environ.items() if name not in of_ranks}
    # No warning of a rank that imports torch for long: stderr must be empty.
    result.update(BACKEND=ranks.BACKEND, SHOAL_TORCH_SHIM=shim, SHOAL_WARN_MS=str(1000 * STARTED_S), **{name: str(value) for name, value in variables.items()})
    return result


def ranked(shim, size, folder, **variables):
    """Returns the environment of each rank of a job."""
    port = ranks.free_port()
    return [environment(shim, RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=port, FOLDER=folder, **variables) for rank in range(size)]


def start(shim, size, text, arguments=(), python=sys.executable, **variables):
    """Runs a program in new processes, which import torch themselves. Returns (stdout, stderr, exit code) of each rank."""
    running = []
    with tempfile.TemporaryDirectory(prefix="shoal-life-") as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(BEGIN + text)
        for its_own in ranked(shim, size, folder, **variables):
            running.append(subprocess.Popen([python, str(program), *arguments], env=its_own, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        try:
            return [(*process.communicate(timeout=STARTED_S), process.returncode) for process in running]
        finally:
            for process in running:
                process.kill()


def fork(shim, size, text, arguments=(), **variables):
    """Like start(), but in processes that have torch already, for cases that do not test how it is imported."""
    return start(shim, size, text, arguments, ranks.warm_python, **variables)


def is_clean(results, output=""):
    for rank, (out, err, code) in enumerate(results):
        expect(code == 0 and err == "" and out == output, f"rank {rank}: exit code {code}, stdout {out!r}, stderr:", err)


INIT = "dist.init_process_group(BACKEND)" + SUM
ENDS = (  # every end is clean: exit code 0, nothing on stderr
    ("after destroy_process_group", INIT + "dist.destroy_process_group()"),
    ("without destroy_process_group", INIT),
    ("with works nobody waited for", INIT + """
works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
dist.barrier()
"""),
    ("by sys.exit within a function, with a group more", INIT + """
def main():
    group = dist.new_group()
    dist.all_reduce(tensor, group=group)
    sys.exit(0)
main()
"""),
)


def end_case(run, name, text):
    return Case(f"exit {name}", lambda world: is_clean(run(world.shim, 2, text)), sizes=(1,), init=False,
                timeout_s=STARTED_S + 10)


def debug_detail(world):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group in one of torch's checkers."""
    text = "dist.set_debug_level_from_env()\n" + INIT + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
import time
time.sleep(3)  # a thread of torch's Gloo that frees a tensor while Python ends aborts the process
"""
    results = fork(world.shim, 2, text, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    expect(all(code == 0 for _, _, code in results), *results)


OF_BOTH_SHIMS = """
import warnings
warnings.simplefilter("ignore")
os.environ["SHOAL_TORCH_SHIM"] = ("c++", "python")[int(os.environ["RANK"])]
dist.init_process_group("shoal")
assert shoal.torch.shim() == os.environ["SHOAL_TORCH_SHIM"]
""" + SUM + """
import torch.distributed._functional_collectives as functional
rank, mine = dist.get_rank(), torch.full((4,), float(dist.get_rank()))
both, whole = torch.tensor([0.0] * 4 + [1.0] * 4), torch.empty(8)
dist.all_gather_into_tensor(whole, mine)
assert torch.equal(whole, both), whole
assert torch.equal(functional.all_gather_tensor(mine, 0, dist.group.WORLD).wait(), both)
assert functional.reduce_scatter_tensor(both, "sum", 0, dist.group.WORLD).wait().tolist() == [2.0 * rank] * 4
for count in (1, 2):
    outputs = [torch.empty(8) for _ in range(count)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, mine)
    assert all(torch.equal(output, both) for output in outputs), outputs
    sums = [mine.clone() for _ in range(count)]
    with dist._coalescing_manager():
        for one in sums:
            dist.all_reduce(one)
    assert all(one.tolist() == [1.0] * 4 for one in sums), sums
uneven = [torch.empty(2), torch.empty(3)]
dist.all_gather(uneven, torch.full((2 + rank,), float(rank)))
assert uneven[1].tolist() == [1.0] * 3, uneven
dist.all_to_all_single(whole, both)
dist.broadcast(mine, 1)
dist.gather(mine, [torch.empty(4), torch.empty(4)] if rank == 0 else None)
dist.scatter(mine, [mine.clone(), mine.clone()] if rank == 0 else None)
dist.reduce(mine, 0)
for type_ in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
    words = ["SUM", "MIN", "MAX", "PRODUCT"]
    words += ["AVG"] if type_ is not torch.bool else []
    words += ["BAND", "BOR", "BXOR"] if not type_.is_floating_point else []
    for word in words:
        dist.all_reduce(torch.ones(3).to(type_), getattr(dist.ReduceOp, word))
        dist.reduce_scatter(torch.ones(3).to(type_), [torch.ones(3).to(type_)] * 2, getattr(dist.ReduceOp, word))
    if type_ is not torch.bool:
        scaled = torch.ones(3).to(type_)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.0))
        assert scaled.tolist() == [4] * 3, scaled
    for count in (1, 2):
        lists = [[torch.empty(3, dtype=type_) for _ in range(count)] for _ in range(2)]
        dist.all_gather_coalesced(lists, [torch.full((3,), rank).to(type_)] * count)
        assert all(one.tolist() == [of] * 3 for of, row in enumerate(lists) for one in row), lists
        with dist._coalescing_manager():
            for _ in range(count):
                dist.reduce_scatter_tensor(torch.empty(3, dtype=type_), torch.ones(6).to(type_))
objects = [None, None]
dist.all_gather_object(objects, rank)
assert objects == [0, 1]
work = dist.isend(both, 1 - rank)
dist.recv(whole, 1 - rank)
work.wait()
dist.barrier()
print("of both")
"""


def ranks_of_both_shims(world):
    """A cluster in which only some hosts have a compiler."""
    if ranks.BACKEND != "shoal" or len(ranks.SHIMS) < 2:
        raise Skip("one shim only")
    is_clean(fork(world.shim, 2, OF_BOTH_SHIMS), "of both\n")


def beside_nccl(world):
    """cpu:shoal,cuda:nccl, as far as a torch without CUDA supports it."""
    if not dist.is_nccl_available():
        raise Skip("this torch has no NCCL")
    results = fork(world.shim, 2, 'dist.init_process_group("cpu:shoal,cuda:nccl")\n' + SUM)
    expect(all(code == 0 for _, _, code in results), *results)


def a_rank_that_raises(world):
    """A Python exception ends one rank. The others' errors name it, and they also end."""
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo does not name it")
    results = fork(world.shim, 3, INIT + """
if dist.get_rank() == 1:
    raise KeyError("planted")
try:
    dist.all_reduce(tensor)
except dist.DistBackendError as error:
    print("told" if "rank 1" in str(error) else error)
""")
    expect(results[1][2] == 1 and "planted" in results[1][1], results[1])
    for rank in (0, 2):
        expect(results[rank][2] == 0 and results[rank][0] == "told\n", rank, *results[rank])


# ---- Ways to begin ----


def sums(world, group=None):
    tensor = torch.ones(1000) * (world.rank + 1)
    dist.all_reduce(tensor, group=group)
    expect(tensor[-1].item() == sum(range(1, world.size + 1)), tensor)


def master():
    return "127.0.0.1", int(os.environ["MASTER_PORT"])


def meeting_file():
    return os.path.join(tempfile.gettempdir(), f"shoal-life-{os.getppid()}-{master()[1]}")


BEGINNINGS = (  # name, arguments of init_process_group in addition to rank and world_size
    ("tcp://", lambda world: {"init_method": "tcp://{}:{}".format(*master())}),
    ("file://", lambda world: {"init_method": "file://" + meeting_file()}),
    ("a TCPStore", lambda world: {"store": dist.TCPStore(*master(), world.size, world.rank == 0)}),
    ("a FileStore", lambda world: {"store": dist.FileStore(meeting_file(), world.size)}),
    ("a PrefixStore", lambda world: {"store": dist.PrefixStore("a", dist.TCPStore(*master(), world.size, world.rank == 0))}),
)


def beginning_case(name, arguments):
    def body(world):
        dist.init_process_group(ranks.BACKEND, rank=world.rank, world_size=world.size, **arguments(world))
        sums(world)
        sums(world, dist.new_group())
        dist.barrier()
        dist.destroy_process_group()
        if os.path.exists(meeting_file()):
            pathlib.Path(meeting_file()).unlink(missing_ok=True)  # a FileStore may already have done so
    return Case(f"begin by {name}", body, sizes=(2,), init=False, fresh=True)


def hash_store(world):
    dist.init_process_group(ranks.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    sums(world)


def named_by_device(world):
    dist.init_process_group("cpu:" + ranks.BACKEND)
    sums(world)
    sums(world, dist.new_group(backend="cpu:" + ranks.BACKEND))


def begun_again(world):
    for turn in range(3):
        dist.init_process_group(ranks.BACKEND, init_method="env://")
        sums(world)
        sums(world, dist.new_group())
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(master()[1] + 1)  # ranks.free_port() returns the first of several


def the_same_store_again(world):
    """torchrun passes the same store of its agent each time a process joins."""
    store = dist.TCPStore(*master(), world.size, world.rank == 0)
    for turn in range(3):
        dist.init_process_group(ranks.BACKEND, store=store, rank=world.rank, world_size=world.size)
        sums(world)
        sums(world, dist.new_group())
        dist.barrier()
        dist.destroy_process_group()


def gloo_beside(world):
    dist.init_process_group(ranks.BACKEND)
    for group in (dist.new_group(backend="gloo"), dist.new_group(backend=ranks.BACKEND), None):
        sums(world, group)


def group_in_a_world_of_gloo(world):
    dist.init_process_group("gloo")
    sums(world)
    sums(world, dist.new_group(backend=ranks.BACKEND))
    sums(world)


def registered(world):
    if ranks.BACKEND != "shoal":
        raise Skip("of shoal")
    import shoal.torch
    shoal.torch.register()  # a second time
    expect(dist.Backend.backend_capability["shoal"] == ["cpu", "cuda"], dist.Backend.backend_capability)
    expect(dist.is_backend_available("shoal"))
    dist.init_process_group("shoal")
    expect(dist.get_backend() == "shoal" and shoal.torch.shim() == world.shim, dist.get_backend(), shoal.torch.shim())


# ---- Launchers ----


def launched(world, command, text=INIT):
    with tempfile.TemporaryDirectory(prefix="shoal-life-") as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(BEGIN + text + 'print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="")')
        variables = environment(world.shim)
        code, out, err = tap.call(*command, ranks.warm_python, program, timeout=STARTED_S, env=variables)
        expect(code == 0, code, out, err)
        for rank in range(2):
            expect(f"rank {rank} of 2" in out, out, err)


def torchrun(world):
    launched(world, [ranks.warm_python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", ranks.free_port(),
                     "--no-python"])


def shoal_run(world):
    if not os.access(COMMAND, os.X_OK):
        raise Skip("no command shoal: build it, or set SHOAL_COMMAND")
    launched(world, [COMMAND, "run", "-n", 2])


# The process knows its rank although torch's variables are not set, and can begin again.
FROM_MPI = """
assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ), os.environ
""" + INIT + """
assert dist.get_rank() == dist.get_node_local_rank(), dist.get_node_local_rank()
gloo = dist.new_group(backend="gloo")
dist.all_reduce(tensor, group=gloo)
dist.barrier()
dist.destroy_process_group()
dist.init_process_group(BACKEND, init_method="shoal://")
""" + SUM


def mpirun(*names):
    """Needs no wrapper. Uses the first of the named programs that is installed."""
    def body(world):
        if ranks.BACKEND != "shoal":
            raise Skip("Gloo needs RANK and its like")
        command = next(filter(shutil.which, names), None)
        if not command:
            raise Skip(f"no {names[0]}")
        as_root = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in names[0] else []
        launched(world, [command, *as_root, "-n", 2], FROM_MPI)
    return Case(f"{names[0]}", body, sizes=(1,), init=False, timeout_s=STARTED_S + 10)


def from_no_launcher(world):
    """One rank works with shoal:// alone. If a launcher contradicts the call, the call is refused."""
    if ranks.BACKEND != "shoal":
        raise Skip("of shoal")
    text = """
dist.init_process_group(BACKEND, init_method="shoal://")
assert dist.get_world_size() == 1
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
try:
    dist.init_process_group(BACKEND, init_method="shoal://", rank=1, world_size=2)
except ValueError as error:
    assert "rank 0 of 1" in str(error), error
else:
    raise AssertionError("rank 1 of 2 came to be")
try:
    dist.init_process_group(BACKEND)
except ValueError as error:
    assert "RANK" in str(error), error
else:
    raise AssertionError("env:// needs RANK where there is no launcher")
"""
    with tempfile.TemporaryDirectory(prefix="shoal-life-") as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(BEGIN + text)
        code, out, err = tap.call(ranks.warm_python, program, timeout=STARTED_S, env=environment(world.shim))
    expect((code, out, err) == (0, "", ""), code, out, err)


def a_store_that_is_not_rank_0s(world):
    """Another program, or none, is at the port. The rank never joins strangers, and the text suggests a remedy."""
    if ranks.BACKEND != "shoal":
        raise Skip("of shoal")
    from datetime import timedelta
    from shoal.torch import _rendezvous
    stranger = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    stranger.set("token", "of another job")
    for port, reason in ((stranger.port, "another program listens there"), (ranks.free_port(), "refused")):
        try:
            _rendezvous._connect({"port": port, "token": "ours", "addresses": ["127.0.0.1"]}, False, 2, timedelta(seconds=5))
        except dist.DistBackendError as error:
            expect(reason in str(error) and "MASTER_ADDR" in str(error), error)
        else:
            raise AssertionError("a store of others was taken")


def variables_win(world):
    """Variables like torchrun's also count under mpirun, because a wrapper script may have set them on purpose."""
    command = next(filter(shutil.which, ("mpirun.openmpi", "mpirun")), None)
    if not command:
        raise Skip("no mpirun")
    names = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}
    shell = " ".join(f"{ours}=${theirs}" for ours, theirs in names.items())
    launched(world, [command, "--allow-run-as-root", "--oversubscribe", "-n", 2, "env", "MASTER_ADDR=127.0.0.1",
                     f"MASTER_PORT={ranks.free_port()}", "sh", "-c", f'{shell} exec "$0" "$@"'])


MULTIPROCESSING = """
import torch.multiprocessing as multiprocessing
def work(rank, port):
    if BACKEND == "shoal":
        import shoal.torch
    dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
""" + "\n".join("    " + line for line in SUM.splitlines()) + """
    dist.destroy_process_group()
if __name__ == "__main__":
    multiprocessing.start_processes(work, args=(int(os.environ["MASTER_PORT"]),), nprocs=2, start_method=sys.argv[1])
"""


def multiprocessing_case(method):
    return Case(f"torch.multiprocessing with {method}",
                lambda world: is_clean(fork(world.shim, 1, MULTIPROCESSING, [method])), sizes=(1,), init=False,
                timeout_s=STARTED_S + 10)


# ---- Processes that fork ----


def fork_after_init(world):
    """A call in a forked child raises; the parent continues."""
    if ranks.BACKEND != "shoal":
        raise Skip("Gloo's child waits for ever")
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(3))
                os.write(writing, b"nothing was raised")
            except BaseException as error:
                os.write(writing, b"raised " + str(error).encode()[:400])
            os._exit(0)
        os.close(writing)
        dist.all_reduce(torch.ones(3))
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        expect(told.startswith("raised") and "fork" in told, told)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        expect(tensor[0].item() == world.size)


def subprocesses(world):
    """A program started in the middle inherits no descriptor and disturbs nothing."""
    for turn in range(5):
        work = dist.all_reduce(torch.ones(10_000), async_op=True)
        expect(subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout.split()[:3] == ["0", "1", "2"])
        work.wait()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([float(index * index)])


def loader_case(method):
    def body(world):
        multiprocessing.set_executable(ranks.warm_python)  # for workers started by spawn
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context=method,
                                             persistent_workers=method == "spawn")
        seen = 0
        for _ in range(2):
            for x, y in loader:
                model.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                seen += len(x)
        expect(seen == 64, seen)
    return Case(f"DataLoader with workers by {method}", body, sizes=(2,), timeout_s=STARTED_S)


# ---- What is left behind ----


def held():
    """Returns the descriptors, threads and resident KiB of this process."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def make_groups(count):
    for turn in range(count):
        group = dist.new_group()
        tensor = torch.ones(1000 * (turn % 3))
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
    dist.barrier()


def many_groups(world):
    """50 groups, made and destroyed one after another, leave nothing behind."""
    make_groups(5)
    before = held()
    make_groups(50)
    after = held()
    print(f"descriptors, threads, KiB: {before} before, {after} after")
    expect(after[0] <= before[0] + 2 and after[1] <= before[1] + 1, "descriptors or threads are left:", before, after)
    expect(after[2] < before[2] + 20_000, "memory grew:", before, after)


def many_groups_over_hosts(world):
    """many_groups, but each group has connections between hosts."""
    os.environ["SHOAL_HOST_ID"] = f"host-{world.rank}"
    dist.init_process_group(ranks.BACKEND, timeout=ranks.GROUP_TIMEOUT)
    many_groups(world)


def groups_together(world):
    """20 groups work at the same time."""
    made = [dist.new_group() for _ in range(20)]
    for group in made + made[::-1]:
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=group)
        expect(tensor[0].item() == world.size)
    for group in made:
        dist.destroy_process_group(group)


def split_by_torch(world):
    """Makes the calls of torch.distributed.split_group, which torch refuses on machines without an accelerator."""
    if world.shim != "c++" or not hasattr(dist.group.WORLD, "split_group"):
        raise Skip("only versions of torch with ProcessGroup.split_group ask for it, and only the shim in C++")
    group = dist.group.WORLD.split_group([0, 1], group_name="both")
    tensor = torch.tensor([1.0, 2.0]) * (world.rank + 1)
    group.allreduce([tensor]).wait()
    expect(group.rank() == world.rank and tensor.tolist() == [3, 6], group.rank(), tensor)
    alone = dist.group.WORLD.split_group([0], group_name="alone")
    expect((alone is not None) == (world.rank == 0), alone)


def many_collectives(world):
    """200 collectives of each kind leave nothing behind."""
    tensor, lists = torch.ones(50_000), [torch.empty(50_000) for _ in range(world.size)]

    def turn():
        dist.all_reduce(tensor.fill_(1), async_op=True).wait()
        dist.all_reduce(tensor[::2])
        dist.all_gather(lists, tensor)
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor.fill_(1), async_op=True).get_future().wait()
    # As many threads complete futures as are busy or have not yet gone back to rest: a few, not 200.
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(8)]
    for future in [work.get_future() for work in works]:  # creates as many threads as there will be
        future.wait()
    for _ in range(50):
        turn()
    before = held()
    for _ in range(200):
        turn()
    after = held()
    expect(after[0] <= before[0] and after[1] <= before[1] + 8 and after[2] < before[2] + 8_000, before, after)


def memory_is_given_back(world):
    if ranks.BACKEND != "shoal":
        raise Skip("only shoal has it")
    import shoal.torch

    def turn():
        tensor = shoal.torch.empty(4 << 20)  # 16 MiB
        tensor.fill_(1)
        dist.all_reduce(tensor)
        return tensor[5:7]
    for _ in range(3):
        turn()
    before = held()
    for _ in range(30):
        view = turn()
        expect(view[0].item() == world.size, "a view outlives the name of its tensor")
    after = held()
    expect(after[0] <= before[0] + 2 and after[2] < before[2] + 64_000, before, after)


def threads_that_end(world):
    """Threads that used a group end, and the group continues to work."""
    for _ in range(5):
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
        thread.start()
        thread.join()
    dist.barrier()


def threads_for_callbacks(world):
    """They are few although callbacks wait for the interpreter, as many as callbacks need that wait for other futures, and most of
    them end when there is nothing to do."""
    def count():
        return len(os.listdir("/proc/self/task"))
    dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    before, called, most = count(), [], 0
    for _ in range(4):
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(200)]
        futures = [work.get_future().then(lambda _: called.append(1)) for work in works]
        most = max([most, *(count() for _ in range(100))])
        torch.futures.wait_all(futures)
    expect(len(called) == 800, len(called))
    expect(most - before < 60, most - before, "threads for callbacks")

    def again(_):
        time.sleep(0.05 * world.rank)  # rank 0's futures of these are completed by other threads
        return dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(100)]
    torch.futures.wait_all([work.get_future().then(again) for work in works])
    until = time.monotonic() + 30
    while count() > before + 6 and time.monotonic() < until:
        time.sleep(0.1)
    expect(count() <= before + 6, count() - before, "threads are left")


def ranks_that_are_threads(world):
    """Each has a context of its own, in group after group."""
    import concurrent.futures

    from shoal.torch import join
    size, meet = 3, threading.Barrier(3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def take_part(rank, turn):
        meet.wait(STARTED_S)
        group = join(dist.PrefixStore(f"turn {turn}", store), rank, size, ranks.GROUP_TIMEOUT, f"group {turn}", [])
        tensor = torch.full((1000,), rank + 1.0)
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        received = torch.zeros(4)
        works = group.send([tensor[:4]], (rank + 1) % size, 0), group.recv([received], (rank - 1) % size, 0)
        for work in works:
            work.wait()
        group.shutdown()
        return tensor[-1].item(), received[0].item()
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        for turn in range(5):
            found = [each.result() for each in [pool.submit(take_part, rank, turn) for rank in range(size)]]
            expect(found == [(6, 6)] * size, turn, found)


ALONE = (debug_detail, ranks_of_both_shims, beside_nccl, a_rank_that_raises, ranks_that_are_threads, torchrun, shoal_run,
         variables_win, from_no_launcher, a_store_that_is_not_rank_0s)
IN_PAIRS = (fork_after_init, subprocesses, many_groups, groups_together, split_by_torch, many_collectives,
            memory_is_given_back, threads_that_end, threads_for_callbacks)
CASES = [beginning_case(*row) for row in BEGINNINGS]
CASES += [Case("hash_store", hash_store, sizes=(1,), init=False, fresh=True)]
CASES += [Case(body.__name__, body, sizes=(2,), init=False, fresh=True)
          for body in (named_by_device, begun_again, the_same_store_again, gloo_beside, group_in_a_world_of_gloo, registered)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in IN_PAIRS]
CASES += [Case("many_groups_over_hosts", many_groups_over_hosts, sizes=(2,), init=False, fresh=True)]
CASES += [loader_case(method) for method in ("fork", "spawn")]
# Cases that start separate programs.
CASES += [end_case(start if number == 0 else fork, *row) for number, row in enumerate(ENDS)]
CASES += [Case(body.__name__, body, sizes=(1,), init=False, timeout_s=STARTED_S + 10) for body in ALONE]
CASES += [mpirun("mpirun.openmpi", "mpirun"), mpirun("mpirun.mpich", "mpiexec.hydra")]
CASES += [multiprocessing_case(method) for method in ("spawn", "fork")]

if __name__ == "__main__":
    ranks.run(CASES, has_programs=True)
