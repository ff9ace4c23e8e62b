"""Ranks for the tests of the PyTorch back-end.

A test program imports ranks first (which finds a Python with torch), then torch, and passes a table of cases to run(). The
ranks are forked from the program, because importing torch takes seconds and forking a hundredth of one; nothing of Shoal is
loaded before the fork. One set of ranks runs case after case. A new set is forked after a failed case, and for each case
with `fresh`. Every case runs for each of its shims and numbers of ranks, on all ranks at once. It passes if its function
returns on all of them.

  test_ops.py                      everything
  test_ops.py python 3 gather      only cases whose line contains all of these words

SHOAL_TEST_BACKEND=gloo runs the same cases over Gloo, to show that they test torch's semantics. Cases that Gloo does not
support are skipped with Gloo's message. SHOAL_TEST_SHIMS=python leaves the other shim out.
"""
import dataclasses
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(TOP / "tests/multi"))
import tap  # noqa: E402
import warm  # noqa: E402

Skip = tap.Skip
expect = tap.expect
free_port = tap.free_port

BACKEND = os.environ.get("SHOAL_TEST_BACKEND", "shoal")
SHIMS = os.environ.get("SHOAL_TEST_SHIMS", "c++ python").split() if BACKEND == "shoal" else [BACKEND]
TIMEOUT_S = 180  # of a case; long, because other work may share the machine: some need 30 s at a load of 20
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
GRACE_S = 10 if BACKEND == "shoal" else 2  # for the other ranks, once a rank has failed
COMPILED_S = 400  # for compiling the C++ shim if it is not cached
LOG_LINES = 40  # of each rank, printed when a case fails
START = "fork"  # or "spawn", if a driver that cannot be forked has started: ranks import the program again and use its CASES
GLOO_CANNOT = re.compile("gloo|not support|unsupported|invalid scalar|unhandled|contiguous|dense|not impl|cannot use", re.I)


@dataclasses.dataclass
class World:
    """The arguments of a case on each rank."""
    rank: int
    size: int
    shim: str


@dataclasses.dataclass
class Case:
    name: str
    body: typing.Callable  # body(world), on every rank
    sizes: tuple = (1, 2, 3, 4)
    init: bool = True  # False: the body itself makes the default group, from the environment
    fresh: bool = False  # the case leaves processes or groups behind that no other case can use
    ends: tuple = ()  # ranks that send no verdict, because they end or stop
    timeout_s: float = TIMEOUT_S
    variables: dict = dataclasses.field(default_factory=dict)  # of the environment; only with fresh


def use_python_with_torch():
    """Restarts this program with a Python that has torch, if this one has none. Skips the program if none is found."""
    import importlib.util
    if importlib.util.find_spec("torch"):
        return
    for python in [os.environ.get("SHOAL_TEST_PYTHON", ""), *sorted(map(str, TOP.glob("build*/*/bin/python3")))]:
        if os.access(python, os.X_OK) and list(pathlib.Path(python).parent.parent.glob("lib/*/*/torch")):
            os.execv(python, [python, *sys.argv])
    print("1..0 # SKIP no torch: set SHOAL_TEST_PYTHON to a python that has it")
    sys.exit(0)


def prepare_environment():
    """Sets up the environment of a process that uses Shoal from this checkout; children inherit it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SHOAL_LIBRARY", str(TOP / "build/libshoal.so"))
    package = str(TOP / "python")
    if package not in os.environ.get("PYTHONPATH", "").split(":"):
        os.environ["PYTHONPATH"] = ":".join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    for folder in reversed(os.environ["PYTHONPATH"].split(":")):
        if folder not in sys.path:
            sys.path.insert(1, folder)


def load_backend():
    """Registers the back-end under test."""
    if BACKEND == "shoal":
        import shoal.torch  # noqa: F401


# ---- A rank ----


_meetings = 0  # how often all ranks of the world have met


def meet(world):
    """Returns when all ranks have called it. They meet in the store, not in a collective: one rank may leave a collective, and
    then end or break the communicator, while another is still inside. All ranks must call it before one of them does that."""
    global _meetings
    import torch.distributed as dist
    _meetings += 1
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"meeting {_meetings}", 1) == world.size:
        store.set(f"met {_meetings}", "")
    store.wait([f"met {_meetings}"], datetime.timedelta(seconds=TIMEOUT_S))


def enter_world(world, port, case):
    global _meetings
    import torch.distributed as dist
    _meetings = 0  # a rank that was not in the last world has counted fewer
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank),
                      LOCAL_WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    load_backend()
    if case.init:
        dist.init_process_group(BACKEND, timeout=GROUP_TIMEOUT)


def verdict_of(function):
    try:
        function()
        return "ok", ""
    except Skip as reason:
        return "skip", str(reason)
    except BaseException as error:  # whatever it is, the launcher must get it
        if BACKEND == "gloo" and isinstance(error, (RuntimeError, ValueError, TypeError)) and GLOO_CANNOT.search(str(error)):
            return "skip", "gloo: " + str(error).splitlines()[0][:100]
        return "fail", traceback.format_exc()


def serve(rank, shim, log, pipe, cases, variables):
    """Runs a rank: receives (case, size, port) and sends the verdict. A size of 0 keeps the world as it is. `cases` is None
    in a process that has imported the program again; it then uses the program's CASES."""
    cases = cases or sys.modules["__mp_main__"].CASES
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gc.freeze()  # imported objects are never garbage
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(variables)
    if BACKEND == "shoal":
        os.environ["SHOAL_TORCH_SHIM"] = shim
    world = None
    while True:
        try:
            number, size, port = pipe.recv()
        except EOFError:
            os._exit(0)
        case = cases[number]
        entered = "ok", ""
        if size:
            world = World(rank, size, shim)
            entered = verdict_of(lambda: enter_world(world, port, case))
        verdict = verdict_of(lambda: case.body(world)) if entered[0] == "ok" else entered
        sys.stdout.flush()
        pipe.send(verdict)


# ---- The launcher ----


class Job:
    """A set of ranks, forked from this process."""

    def __init__(self, count, shim, cases, variables):
        context = multiprocessing.get_context(START)
        given = cases if START == "fork" else None
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        self.logs = [pathlib.Path(self.folder.name, f"rank{rank}") for rank in range(count)]
        self.pipes, self.ranks = [], []
        self.size = 0
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, shim, self.logs[rank], theirs, given, variables))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def run(self, number, case, size):
        """Runs a case; returns the verdict of each rank, None for a rank that sent none."""
        enter = self.size != size or not case.init
        port = free_port() if enter else 0
        self.size = size if case.init else 0
        for pipe in self.pipes[:size]:
            pipe.send((number, size if enter else 0, port))
        verdicts = [None] * size
        waited = {self.pipes[rank]: rank for rank in range(size) if rank not in case.ends}
        deadline = time.monotonic() + case.timeout_s
        while waited and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(waited, deadline - time.monotonic()):
                rank = waited.pop(pipe)
                try:
                    verdicts[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.ranks[rank].join(5)
                    verdicts[rank] = "fail", f"it ended with code {self.ranks[rank].exitcode}"
                if verdicts[rank][0] != "ok":  # the others may wait for it: they get some time to report that
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waited.values():
            verdicts[rank] = "fail", f"no verdict after {case.timeout_s} s; its threads are told below"
            self.ask_for_stacks(rank)
        return verdicts

    def ask_for_stacks(self, rank):
        if self.ranks[rank].is_alive():
            os.kill(self.ranks[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)

    def tail(self, rank):
        return "\n".join(self.logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:])

    def end(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.ranks:
            os.kill(process.pid, signal.SIGKILL) if process.is_alive() else None
            process.join()
        self.folder.cleanup()


def is_under_way():
    """Returns true if an operation of this process is under way, according to its flight recorder."""
    from shoal import _native
    found = []
    told = _native.WatchFn(lambda _, watched: found.append(watched.contents.under_way))
    _native.load().watch(os.getpid(), told, None, None, 0)
    return any(found)


def told(job, verdicts):
    """Returns the output of the ranks of a failed case."""
    text = []
    for rank, verdict in enumerate(verdicts):
        if verdict and verdict[0] == "fail":
            text.append(f"rank {rank}: {verdict[1]}")
        printed = job.tail(rank)
        if printed:
            text.append(f"rank {rank} printed:\n{printed}")
    return "\n".join(text)


def load_shim(shim, pipe):
    os.environ["SHOAL_TORCH_SHIM"] = shim
    try:
        import shoal.torch
        pipe.send("" if shoal.torch.shim() == shim else f"{shoal.torch.shim()} serves instead of {shim}")
    except BaseException:
        pipe.send(traceback.format_exc())


@functools.lru_cache
def fault_of(shim):
    """Returns why a shim does not load, or "". A separate process loads it once, so that no rank waits for a compiler."""
    if BACKEND != "shoal":
        return ""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=load_shim, args=(shim, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(COMPILED_S) else f"the shim {shim} was not loaded after {COMPILED_S} s"
    except EOFError:
        return f"loading the shim {shim} ended a process"
    finally:
        process.kill()
        process.join()


class Runner:
    def __init__(self, cases, count):
        self.cases = cases
        self.count = count
        self.job = None
        self.kind = None  # what kind of ranks self.job has

    def job_for(self, shim, case):
        kind = shim, tuple(sorted(case.variables.items()))
        if self.job and (self.kind != kind or case.fresh):
            self.leave()
        if not self.job:
            self.job, self.kind = Job(self.count, shim, self.cases, case.variables), kind
        return self.job

    def leave(self):
        if self.job:
            self.job.end()
        self.job = None

    def run(self, shim, number, size):
        case = self.cases[number]
        if fault_of(shim):
            if shim == "c++" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
                raise Skip("no C++ compiler here")
            raise AssertionError(fault_of(shim))
        job = self.job_for(shim, case)
        verdicts = job.run(number, case, size)
        reasons = [verdict[1] for verdict in verdicts if verdict and verdict[0] == "skip"]
        failed = any(verdict and verdict[0] == "fail" for verdict in verdicts)
        if reasons and BACKEND == "gloo":  # the other ranks may have waited for the one that Gloo refused
            failed = False
        text = told(job, verdicts) if failed else ""
        if failed or reasons or case.fresh:
            self.leave()
        if failed:
            raise AssertionError(text)
        if reasons:
            raise Skip(reasons[0])


# ---- The table of cases ----


warm_python = None  # runs a program like Python (warm.py), for this process and the ranks it forks


def run(cases, has_programs=False):
    """Runs the cases and exits. Call it at the end of the program, after importing torch and before any fork. Set
    has_programs if some cases run programs with warm_python."""
    global warm_python
    warm_python = warm.start() if has_programs else None
    runner = Runner(cases, max(max(case.sizes) for case in cases))
    functions = []
    for shim in SHIMS:
        for size in sorted({size for case in cases for size in case.sizes}):
            for number, case in enumerate(cases):
                name = f"{shim} {size} ranks {case.name}"
                if size in case.sizes and chosen(name):
                    functions.append(named(name, lambda shim=shim, number=number, size=size: runner.run(shim, number, size)))
    try:
        tap.run_cases(functions)
    finally:
        runner.leave()


def chosen(name):
    return all(word in name.split() if word.isdigit() else word in name for word in sys.argv[1:])


def named(name, function):
    function.__name__ = name
    return function


use_python_with_torch()
prepare_environment()
