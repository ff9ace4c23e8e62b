#!/usr/bin/env python3
"""One rank of what bench/bench_torch.py and bench/bench_hosts.py measure through PyTorch. Rank 0 prints a JSON object per
figure.

    torch_worker.py CONTESTANT TASK [options] [BYTES...]      under any launcher that sets RANK, WORLD_SIZE and MASTER_*

CONTESTANT is shoal, gloo or deepspeed. deepspeed is Gloo's group with DeepSpeed's inference_all_reduce, through shared
memory. TASK is a collective, or a training of bench/torch_training.py. Bytes are those of the larger operand. Without any on
the command line they are read from stdin, one size a line, so that two contestants can be measured in turns without starting
anew.

A collective is timed as `shoal bench` times it: float32, sums. One operation's result is compared element by element. Three
warm-ups follow, then as many iterations as in bench/mpi_bench.c. Each rewrites its input (untimed), begins when all ranks
have met, and counts the slowest rank. With --area, a file that the ranks of one host map, they meet there, whatever the
contestant. A slow barrier of the contestant's own would release ranks one by one, and their waits for each other would
count.
"""
import argparse
import contextlib
import ctypes
import json
import mmap
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

WARMUPS, ITERATIONS_MIN, ITERATIONS_MAX = 3, 5, 20000
EXCHANGE_LIMIT_S = 60.0
AREA_BYTES = 8192
MEETING_AT, LINE_BYTES = 4096, 128  # in the area, after struct bench_area of tools/bench/bench_probe.c


# ---- Meeting of ranks ------------------------------------------------------------------------------------------------------

class Area:
    """Memory that the ranks of one host share: each counts its meetings on its own line and waits for the others' counts.
    Only for uses that need no memory order: nothing but the count is passed."""

    def __init__(self, path, probe, rank, ranks):
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), AREA_BYTES)
        self.counts = memoryview(self.map)[MEETING_AT:].cast("Q")[::LINE_BYTES // 8]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.measure = ctypes.CDLL(probe).bench_exchange_measure
        self.measure.restype = ctypes.c_bool
        self.rank, self.ranks, self.exchanges = rank, ranks, 0
        self.is_crowded = ranks > len(os.sched_getaffinity(0))

    def meet(self):
        counts, number = self.counts, self.counts[self.rank] + 1
        counts[self.rank] = number
        for other in range(self.ranks):
            while counts[other] < number:
                if self.is_crowded:
                    os.sched_yield()

    def exchange_ns(self):
        """Returns the time of a bare exchange of cache lines between ranks 0 and 1."""
        self.exchanges += 1
        took = ctypes.c_double(-1)
        if not self.measure(ctypes.c_void_p(self.address), self.rank, ctypes.c_uint64(self.exchanges),
                            ctypes.c_double(EXCHANGE_LIMIT_S), ctypes.byref(took)):
            sys.exit(f"torch_worker: rank {self.rank}: another rank did not come to the exchange of cache lines")
        return took.value


class Apart:
    """Ranks of several hosts share no memory: they meet by the contestant's own barrier."""

    def meet(self):
        dist.barrier()

    def exchange_ns(self):
        return None


# ---- Collectives -----------------------------------------------------------------------------------------------------------

class AllReduce:
    """PyTorch's all-reduce is in place."""

    def __init__(self, elements, rank, ranks, empty, operate=dist.all_reduce):
        self.elements, self.rank, self.ranks, self.all_reduce = elements, rank, ranks, operate
        self.input = empty(elements)

    def operate(self):
        self.all_reduce(self.input)

    def result(self):
        return self.input

    def expected(self):
        return pattern(self.elements, 1) * (self.ranks * (self.ranks + 1) // 2)


class AllGather:
    def __init__(self, elements, rank, ranks, empty):
        self.part, self.rank, self.ranks = max(1, elements // ranks), rank, ranks
        self.elements = self.part * ranks
        self.input = empty(self.part)
        self.outputs_make(empty)

    def outputs_make(self, empty):
        self.output = empty(self.elements)

    def operate(self):
        dist.all_gather_into_tensor(self.output, self.input)

    def result(self):
        return self.output

    def expected(self):
        return torch.cat([pattern(self.part, rank + 1) for rank in range(self.ranks)])


class AllGatherList(AllGather):
    """All-gathers into a list of separate tensors."""

    def outputs_make(self, empty):
        self.outputs = [empty(self.part) for _ in range(self.ranks)]

    def operate(self):
        dist.all_gather(self.outputs, self.input)

    def result(self):
        return torch.cat(self.outputs)


class ReduceScatter:
    def __init__(self, elements, rank, ranks, empty):
        self.part, self.rank, self.ranks = max(1, elements // ranks), rank, ranks
        self.elements = self.part * ranks
        self.input, self.output = empty(self.elements), empty(self.part)

    def operate(self):
        dist.reduce_scatter_tensor(self.output, self.input)

    def result(self):
        return self.output

    def expected(self):
        whole = pattern(self.elements, 1) * (self.ranks * (self.ranks + 1) // 2)
        return whole[self.rank * self.part:][:self.part]


COLLECTIVES = {"all_reduce": AllReduce, "all_gather_into_tensor": AllGather, "all_gather": AllGatherList,
               "reduce_scatter_tensor": ReduceScatter}


def pattern(elements, factor):
    """Returns whole numbers, so that sums are exact in any order."""
    return (torch.arange(elements) % 251).float() * factor


def result_check(task, collective):
    """Checks one operation on inputs that differ between elements and between ranks."""
    task.input.copy_(pattern(task.input.numel(), task.rank + 1))
    task.operate()
    if not torch.equal(task.result(), task.expected()):
        sys.exit(f"torch_worker: rank {task.rank}: a result of {collective} of {task.elements * 4} bytes is wrong")


# ---- Timing ----------------------------------------------------------------------------------------------------------------

def slowest(seconds):
    """Returns the largest value of each entry over all ranks."""
    joined = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(joined, op=dist.ReduceOp.MAX)
    return joined.tolist()


def iterate(task, place):
    task.input.fill_(task.rank + 1)
    place.meet()
    start = time.perf_counter()
    task.operate()
    return time.perf_counter() - start


def iterations_choose(task, place, size, seconds):
    start = time.perf_counter()
    for _ in range(WARMUPS):
        iterate(task, place)
    took = slowest([(time.perf_counter() - start) / WARMUPS])[0]
    usual = min(max(0.25 / took, 500), ITERATIONS_MAX) if size < 65536 else 60 if size < 8 << 20 else 12
    return int(usual if seconds / took >= usual else max(seconds / took, ITERATIONS_MIN))


def loop_measure(task, place, iterations):
    """Measures operations in a row. Returns, per operation, microseconds of the slowest rank and CPU time of all ranks
    together."""
    rounds = iterations // 4 + 1
    place.meet()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        task.operate()
    cpu, mine = time.process_time() - cpu_start, time.perf_counter() - start
    total = torch.tensor([cpu], dtype=torch.float64)
    dist.all_reduce(total)
    return slowest([mine])[0] * 1e6 / rounds, total.item() * 1e6 / rounds


@contextlib.contextmanager
def busy_thread(is_wanted):
    """A Python thread that never rests, like a careless data loader's."""
    is_over = threading.Event()

    def work():
        while not is_over.is_set():
            sum(range(100))

    thread = threading.Thread(target=work, daemon=True)
    if is_wanted:
        thread.start()
    yield
    is_over.set()
    if is_wanted:
        thread.join()


def measure(options, place, task_make, size):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange_ns = place.exchange_ns()
    task = task_make(max(1, size // 4), rank, ranks)
    result_check(task, options.task)
    with busy_thread(options.busy):
        iterations = iterations_choose(task, place, size, options.seconds)
        times = sorted(slowest([iterate(task, place) for _ in range(iterations)]))
    loop_us, cpu_us = loop_measure(task, place, iterations)
    return {"collective": options.task, "ranks": ranks, "bytes": task.elements * 4, "dtype": "float32",
            "iterations": iterations, "median_us": times[iterations // 2] * 1e6, "p99_us": times[iterations * 99 // 100] * 1e6,
            "exchange_ns": exchange_ns, "loop_us": loop_us, "cpu_us": cpu_us}


# ---- Contestants -----------------------------------------------------------------------------------------------------------

def deepspeed_open():
    """Opens DeepSpeed's own call, which builds its kernel at its first use. LOCAL_SIZE makes it treat all ranks as one
    host's."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        deepspeed.init_distributed("gloo")
    if not deepspeed.comm.comm.cdb.shm_comm_op:
        sys.exit("torch_worker: DeepSpeed finds no compiler for its kernel")
    return deepspeed.comm.inference_all_reduce


def task_maker(options):
    """Returns a function of (elements, rank, ranks) that makes the task."""
    empty = torch.empty
    if options.memory == "zero-copy":
        import shoal.torch
        empty = shoal.torch.empty
    if options.contestant == "deepspeed":
        operate = deepspeed_open()
        return lambda elements, rank, ranks: AllReduce(elements, rank, ranks, empty, operate)
    return lambda *size: COLLECTIVES[options.task](*size, empty)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=["shoal", "gloo", "deepspeed"])
    parser.add_argument("task", help=f"{', '.join(COLLECTIVES)}, or train")
    parser.add_argument("sizes", nargs="*", type=int, metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=2, help="most time for one size, about (2)")
    parser.add_argument("--memory", choices=["ordinary", "zero-copy"], default="ordinary",
                        help="zero-copy: tensors of shoal.torch.empty")
    parser.add_argument("--busy", action="store_true", help="with a second thread of Python that computes all the time")
    parser.add_argument("--pin", action="store_true", help="each rank on one core; ranks share cores if there are too few")
    parser.add_argument("--area", metavar="FILE", help="file in which the ranks of one host meet")
    parser.add_argument("--probe", metavar="LIBRARY", help="tools/bench/bench_probe.c as a library; with --area")
    parser.add_argument("--model", help="what to train; see bench/torch_training.py")
    parser.add_argument("--steps", type=int, default=10, help="steps of a training, each with and without communication (10)")
    return parser.parse_args()


def pin(rank):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main():
    options = arguments()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Area(options.area, options.probe, rank, ranks) if options.area else Apart()
    if options.pin:
        pin(rank)
    torch.set_num_threads(1)
    if options.contestant == "shoal":
        import shoal.torch  # noqa: F401
    dist.init_process_group("shoal" if options.contestant == "shoal" else "gloo")
    if options.task == "train":
        import torch_training
        print_first(rank, torch_training.measure(options.model, options.steps, place))
    else:
        task_make = task_maker(options)
        for size in options.sizes or map(int, sys.stdin):
            print_first(rank, measure(options, place, task_make, size))
    dist.destroy_process_group()


def print_first(rank, result):
    if rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
