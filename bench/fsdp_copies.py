#!/usr/bin/env python3
"""Counts what a step with sharded parameters copies, allocates and sends, and how long that takes: FSDP2 over Shoal, and
shoal.torch.ShardedDataParallel.

  bench/fsdp_copies.py                  GPT-2 small (124 million parameters), AdamW, two ranks
  bench/fsdp_copies.py --model tiny     a try

Needs `make build/torch`. The model is that of bench/bench_optimizer.py; its inputs require gradients, so that the backward pass
needs the parameters, as in a chain of layers. Bytes are exact: those that rank 0 writes in one step. Times are those that its
thread spends on a core, medians of some steps: other work on the machine changes them less than times on a clock, but they
are approximate. Waits are not in them. Shoal's own thread, which gathers ahead, is in the last row only.
"""
import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_optimizer

ROOT = Path(__file__).resolve().parent.parent
WARMUPS = 2
# torch's operators, by what they do in a step of FSDP2.
ROWS = {
    "all_gather_copy_in": "shards into the buffer of the all-gather",
    "_allgather_base_": "all-gather",
    "split_with_sizes_copy": "gathered values into parameters",
    "chunk_cat": "gradients into the buffer of the reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "_fused_adamw_": "optimizer",
}
# The same parts of ShardedDataParallel, by calls of the engine.
CALLS = {"gather": "all-gather", "ready": "gradients into the buffer of the reduce-scatter", "step": "reduce-scatter, and optimizer"}


class Counts:
    """Bytes, calls and seconds of each part in one step."""

    def __init__(self):
        self.bytes, self.calls, self.seconds = collections.Counter(), collections.Counter(), collections.Counter()

    def add(self, part, count, seconds=0.0):
        self.bytes[part] += count
        self.calls[part] += 1
        self.seconds[part] += seconds

    def timed(self, part, count, call, *words, **options):
        start = time.thread_time()
        result = call(*words, **options)
        self.add(part, count, time.thread_time() - start)
        return result


def bytes_of(value):
    import torch
    if isinstance(value, torch.Tensor):
        own = getattr(value, "_local_tensor", value)  # of a DTensor
        return own.numel() * own.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def written(name, words, options):
    """The bytes that an operator of ROWS writes."""
    if name == "_fused_adamw_":
        return 3 * bytes_of(words[0])  # parameters and two states
    if name == "_reduce_scatter_base_":
        return bytes_of(words[0])
    return bytes_of(options["out"] if "out" in options else words[0])


def counter_of_operators(counts):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, words=(), options=None):
            name, options = function.overloadpacket.__name__, options or {}
            if name in ROWS:
                return counts.timed(ROWS[name], written(name, words, options), function, *words, **options)
            result = function(*words, **options)
            if name in ("empty", "empty_like"):
                counts.add("allocated", bytes_of(result))
            return result
    return Counter()


def count_storages(counts):
    """FSDP2 allocates and frees the memory of whole parameters by resizing their storages."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    original = _fsdp_param.alloc_storage

    def alloc_storage(tensor):
        counts.add("allocated", bytes_of(tensor))
        return original(tensor)
    _fsdp_param.alloc_storage = alloc_storage


def count_calls(counts):
    from shoal.torch import _shards

    def counted(name):
        original = getattr(_shards.Shards, name)

        def call(shards, *words):
            return counts.timed(CALLS[name], size_of(shards, name, words), original, shards, *words)
        setattr(_shards.Shards, name, call)
    for name in CALLS:
        counted(name)


def size_of(shards, name, words):
    """The bytes that a call of the engine writes."""
    import torch.distributed as dist
    own = 4 * sum(shards._counts) // dist.get_world_size()
    if name == "gather":
        return sum(4 * shards._counts[index] for index in words[0].indices)
    return bytes_of(words[1]) if name == "ready" else 4 * own  # the sum, the parameters and two states


# ---- A rank ----------------------------------------------------------------------------------------------------------------


def measured(way, options):
    """Returns the parts of a step, its milliseconds, and those of all threads of the process."""
    import torch.distributed as dist
    module = bench_optimizer.stack_of(options.model)
    batches = [block.batch_make(dist.get_rank()).requires_grad_() for block in module.blocks]
    step, counts = bench_optimizer.wrapped(way, module), Counts()
    for _ in range(WARMUPS):
        step(batches)
    (count_calls if way == "shards" else count_storages)(counts)
    whole = []
    for _ in range(options.steps):
        start = time.thread_time(), time.process_time()
        step(batches)
        whole.append((time.thread_time() - start[0], time.process_time() - start[1]))
    rows = parts_of(way, step, batches, counts, options.steps)
    return rows, *(1e3 * statistics.median(column) for column in zip(*whole))


def parts_of(way, step, batches, counts, steps):
    """Pairs of a part and its calls, bytes and median milliseconds in a step."""
    seen = []
    for _ in range(steps):
        counts.__init__()
        if way == "shards":
            step(batches)
        else:
            with counter_of_operators(counts):
                step(batches)
        seen.append({part: (counts.calls[part], counts.bytes[part], 1e3 * counts.seconds[part]) for part in counts.calls})
    return {part: (*seen[-1][part][:2], statistics.median(one[part][2] for one in seen)) for part in seen[-1]}


def alone_ms(options):
    """The forward and backward pass of a module that is not wrapped."""
    module = bench_optimizer.stack_of(options.model)
    batches = [block.batch_make(0).requires_grad_() for block in module.blocks]
    times = []
    for _ in range(WARMUPS + options.steps):
        start = time.thread_time()
        module.zero_grad()
        module(batches).backward()
        times.append(time.thread_time() - start)
    return 1e3 * statistics.median(times[WARMUPS:])


def rank_main(options):
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]
    import torch
    import torch.distributed as dist
    import shoal.torch  # noqa: F401: the back-end
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    alone = alone_ms(options)
    rows, whole, process = measured(options.rank, options)
    rows["the rest: forward, backward, framework, new pages"] = (0, 0, whole - sum(row[2] for row in rows.values()))
    if dist.get_rank() == 0:
        print(json.dumps({"way": options.rank, "rows": rows, "whole_ms": whole, "process_ms": process,
                          "alone_ms": alone}))


# ---- Both ------------------------------------------------------------------------------------------------------------------


def run(way, options):
    words = [bench_optimizer.SHOAL, "run", "-n", "2", "--no-prefix", "--bind", "core", bench_optimizer.PYTHON, Path(__file__).resolve(),
             "--rank", way, "--model", options.model, "--steps", str(options.steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"),
                   "OMP_NUM_THREADS": "1", "SHOAL_LOG": "warn"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=bench_optimizer.RUN_S, env=environment)
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"way"')]
    if done.returncode or len(rows) != 1:
        sys.exit(f"{way} failed: {(done.stdout + done.stderr)[-2000:]}")
    return json.loads(rows[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=bench_optimizer.MODELS, default="gpt2")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options)
    for way, name in (("fsdp2", "FSDP2 over Shoal"), ("shards", "shoal.torch.ShardedDataParallel")):
        told = run(way, options)
        print(f"{name + ', a step':52}{'calls':>7}{'MiB':>9}{'ms':>8}")
        for part, (calls, count, ms) in told["rows"].items():
            print(f"  {part:50}{calls or '':>7}{f'{count / (1 << 20):.1f}' if calls else '':>9}{ms:8.1f}")
        print(f"  {'all':50}{'':16}{told['whole_ms']:8.1f}")
        print(f"  {'all, with other threads':50}{'':16}{told['process_ms']:8.1f}")
        print(f"  {'forward and backward pass of a plain module':50}{'':16}{told['alone_ms']:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
