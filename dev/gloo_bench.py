"""Times Gloo's collectives, through PyTorch, exactly as `shoal bench` times Shoal's: one JSON object, from rank 0.

    gloo_bench.py allreduce|allgather BYTES SECONDS      under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT

Bytes are those of the larger operand. float32, sums, out of place where the call offers it (an all-reduce of PyTorch is in
place). One operation whose result is compared, three warm-ups, then as many iterations as dev/mpi_bench.c has; each rewrites
its input (untimed), starts at a barrier and counts the slowest rank."""
import json
import sys
import time

import torch
import torch.distributed as dist

WARMUPS, ITERATIONS_MIN, ITERATIONS_MAX = 3, 5, 20000


class Allreduce:
    def __init__(self, elements, ranks, rank):
        self.elements, self.ranks, self.rank = elements, ranks, rank
        self.data = torch.empty(elements)

    def rewrite(self):
        self.data.fill_(self.rank + 1)

    def operate(self):
        dist.all_reduce(self.data)

    def is_right(self):
        return bool((self.data == self.ranks * (self.ranks + 1) // 2).all())


class Allgather:
    def __init__(self, elements, ranks, rank):
        self.part, self.rank = max(1, elements // ranks), rank
        self.elements = self.part * ranks
        self.input, self.parts = torch.empty(self.part), [torch.empty(self.part) for _ in range(ranks)]

    def rewrite(self):
        self.input.fill_(self.rank + 1)

    def operate(self):
        dist.all_gather(self.parts, self.input)

    def is_right(self):
        return all(bool((part == number + 1).all()) for number, part in enumerate(self.parts))


def slowest(seconds):
    """Of each entry, over all ranks."""
    joined = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(joined, op=dist.ReduceOp.MAX)
    return joined.tolist()


def iterate(task):
    task.rewrite()
    dist.barrier()
    start = time.perf_counter()
    task.operate()
    return time.perf_counter() - start


def iterations_choose(task, size, seconds):
    start = time.perf_counter()
    for _ in range(WARMUPS):
        iterate(task)
    took = slowest([(time.perf_counter() - start) / WARMUPS])[0]
    usual = min(max(0.25 / took, 500), ITERATIONS_MAX) if size < 65536 else 60 if size < 8 << 20 else 12
    return int(usual if seconds / took >= usual else max(seconds / took, ITERATIONS_MIN))


def loop_measure(task, iterations):
    """Microseconds of the slowest rank, and CPU time of all ranks together, per operation of those in a row."""
    rounds = iterations // 4 + 1
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        task.operate()
    cpu, mine = time.process_time() - cpu_start, time.perf_counter() - start
    total = torch.tensor([cpu], dtype=torch.float64)
    dist.all_reduce(total)
    return slowest([mine])[0] * 1e6 / rounds, total.item() * 1e6 / rounds


def main():
    collective, size, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = {"allreduce": Allreduce, "allgather": Allgather}[collective](max(1, size // 4), ranks, rank)
    iterate(task)
    if not task.is_right():
        sys.exit(f"gloo_bench: rank {rank}: a result of {collective} of {size} bytes is wrong")
    iterations = iterations_choose(task, size, seconds)
    times = sorted(slowest([iterate(task) for _ in range(iterations)]))
    loop_us, cpu_us = loop_measure(task, iterations)
    if rank == 0:
        print(json.dumps({"collective": collective, "ranks": ranks, "bytes": task.elements * 4, "dtype": "float32",
                          "iterations": iterations, "median_us": times[iterations // 2] * 1e6,
                          "p99_us": times[iterations * 99 // 100] * 1e6, "exchange_ns": None, "loop_us": loop_us,
                          "cpu_us": cpu_us}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
