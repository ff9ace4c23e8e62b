#!/usr/bin/env python3
"""Measures what communication and optimizer add to a training step: an optimizer in the reduction and sharded parameters
(shoal.torch.ShardedDataParallel), compared with DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed's ZeRO,
each over Shoal and over Gloo.

  bench/bench_optimizer.py                    GPT-2 small (124 million parameters), AdamW, two ranks, five rounds
  bench/bench_optimizer.py --only reduction ddp
  bench/bench_optimizer.py --only shards fsdp2 deepspeed3 --chained       sharded parameters
  bench/bench_optimizer.py --model tiny --rounds 1 --steps 3      a try

Needs `make build/torch/deepspeed`. Each round starts the ranks of all contestants one after the other, in rotated order; nothing
else runs. A rank has one thread and one core. The model has the parameters of GPT-2 in its blocks, and little computation for
each: see bench/torch_training.py. Each rank also times steps without communication and optimizer. What both add is the median
step less the fastest such median of the round, because that one depends on how a contestant has left the memory. With
--chained the inputs require gradients, so that the backward pass needs the parameters again, as in a chain of layers. After the
first step the loss must be that of the first contestant, within rounding; later ones amplify differences in rounding.

Prints a table: what is added, in milliseconds; its ratio to the first contestant in the same round (median, least and most of
the rounds); and the resident memory of a rank. --json FILE also writes the rounds.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOAL, PYTHON = ROOT / "build/shoal", ROOT / "build/torch/bin/python3"
OWN = ("reduction", "shards")  # over Shoal only
WAYS = (*OWN, "ddp", "zero", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")
CONTESTANTS = [*OWN, *(f"{way}-{backend}" for way in WAYS[len(OWN):] for backend in ("shoal", "gloo"))]
MODELS = {"gpt2": (768, 12, 50257, 1024), "small": (384, 6, 8192, 512), "tiny": (64, 2, 512, 64)}
COLUMNS, RATE, RUN_S, WARMUPS = 4, 1e-3, 600, 2


# ---- A rank ----------------------------------------------------------------------------------------------------------------

def blocks_of(model):
    """Returns the shapes of the model's parameters, in units of which FSDP2 gathers one at a time."""
    import torch_training
    width, layers, words, positions = MODELS[model]
    shapes = torch_training.gpt2_shapes(width, layers, words, positions)
    rest = shapes[2:-2]
    return [shapes[:2], *(rest[i:i + len(rest) // layers] for i in range(0, len(rest), len(rest) // layers)), shapes[-2:]]


def stack_of(model):
    import torch
    import torch_training

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch_training.Shaped(shapes, COLUMNS) for shapes in blocks_of(model))

        def forward(self, batches):
            return sum(block(batch) for block, batch in zip(self.blocks, batches))
    return Stack()


def wrapped(way, module):
    """Returns a function of a step, and what it needs to stay alive."""
    import torch
    adamw = dict(lr=RATE, weight_decay=0.01)
    if way.startswith("deepspeed"):
        return deepspeed_step(int(way[-1]), module, adamw)
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        for block in module.blocks:
            fully_shard(block)
        model = fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    elif way == "reduction":
        import shoal.torch
        optimizer = torch.optim.AdamW(module.parameters(), **adamw)
        model = shoal.torch.DistributedDataParallel(module, optimizer=optimizer)
    elif way == "shards":
        import shoal.torch
        optimizer = torch.optim.AdamW(module.parameters(), **adamw)
        model = shoal.torch.ShardedDataParallel(module, optimizer)
    else:
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        if way == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **adamw)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)

    def step(batches):
        optimizer.zero_grad()
        loss = model(batches)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def deepspeed_step(stage, module, adamw):
    import torch.distributed as dist
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # only inference uses it
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    size = dist.get_world_size()
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=DeepSpeedCPUAdam(module.parameters(), adamw_mode=True, **adamw),
        config={"train_batch_size": size, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1 << 30,
                "zero_optimization": {"stage": stage}})

    def step(batches):
        loss = engine(batches)
        engine.backward(loss)
        engine.step()
        return loss.item()
    return step


def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def rank_main(options):
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]
    import torch
    import torch.distributed as dist
    import shoal.torch  # noqa: F401: the back-end
    torch.set_num_threads(1)
    way, _, backend = options.rank.partition("-")
    dist.init_process_group(backend or "shoal")
    alone = stack_of(options.model)
    batches = [block.batch_make(dist.get_rank()).requires_grad_(options.chained) for block in alone.blocks]
    with contextlib.redirect_stdout(sys.stderr):
        step = wrapped(way, stack_of(options.model))

    def step_alone():
        alone.zero_grad()
        alone(batches).backward()

    def timed(call, *words):
        dist.barrier()
        start = time.perf_counter()
        result = call(*words)
        return time.perf_counter() - start, result
    losses = [step(batches) for _ in range(WARMUPS)]
    times = []
    for _ in range(options.steps):
        (took, loss), (took_alone, _) = timed(step, batches), timed(step_alone)
        losses.append(loss)
        times.append((took, took_alone))
    columns = torch.tensor(times, dtype=torch.float64).T.contiguous()
    dist.all_reduce(columns, op=dist.ReduceOp.MAX)
    del alone
    if dist.get_rank() == 0:
        together, by_itself = (statistics.median(column) * 1e3 for column in columns.tolist())
        print(json.dumps({"way": options.rank, "step_ms": together, "alone_ms": by_itself, "loss": losses[1],
                          "rss_mib": resident_mib()}))


# ---- All -------------------------------------------------------------------------------------------------------------------

def run(contestant, options):
    words = [SHOAL, "run", "-n", "2", "--no-prefix", "--bind", "core", PYTHON, Path(__file__).resolve(), "--rank", contestant, "--model",
             options.model, "--steps", str(options.steps), *["--chained"] * options.chained]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"),
                   "OMP_NUM_THREADS": "1", "SHOAL_LOG": "warn", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, env=environment)
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"way"')]
    if done.returncode or len(rows) != 1:
        print(f"{contestant} failed: {(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
        return None
    return json.loads(rows[0])


def table(rounds, names):
    print(f"\n{'':18}{'added ms':>10}{'ratio':>8}  {'least - most':>13}{'step ms':>10}{'RSS MiB':>10}")
    for name in names:
        rows = [one[name] for one in rounds if one.get(name)]
        if not rows:
            print(f"{name:18}{'failed':>10}")
            continue
        ratios = [one[name]["added_ms"] / one[names[0]]["added_ms"] for one in rounds if one.get(name) and one.get(names[0])]
        added, step, rss = (statistics.median(row[key] for row in rows) for key in ("added_ms", "step_ms", "rss_mib"))
        print(f"{name:18}{added:10.1f}{statistics.median(ratios):8.2f}  {min(ratios):5.2f} - {max(ratios):5.2f}{step:10.1f}{rss:10.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="measured in a round")
    parser.add_argument("--chained", action="store_true", help="the backward pass needs the parameters, as in a chain of layers")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options)
    names = [name for name in CONTESTANTS if name.partition("-")[0] in options.only]
    rounds, code = [], 0
    for number in range(options.rounds):
        order = names[number % len(names):] + names[:number % len(names)]
        rows = {}
        for name in order:
            rows[name] = run(name, options)
            print(f"round {number + 1}: {name}: " + (f"{rows[name]['step_ms']:.1f} ms" if rows[name] else "failed"), flush=True)
        alone_ms = min((row["alone_ms"] for row in rows.values() if row), default=0)
        for row in filter(None, rows.values()):
            row["added_ms"] = row["step_ms"] - alone_ms
        rounds.append(rows)
        losses = {name: row["loss"] for name, row in rows.items() if row}
        wanted = losses.get(names[0])
        odd = {name: loss for name, loss in losses.items() if wanted and not abs(loss - wanted) <= 1e-3 * abs(wanted)}
        if odd or None in rows.values():
            print(f"wrong losses: {odd}, instead of {wanted}" if odd else "a contestant failed", file=sys.stderr)
            code = 1
    table(rounds, names)
    if options.json:
        options.json.write_text("".join(json.dumps(one) + "\n" for one in rounds))
    return code


if __name__ == "__main__":
    sys.exit(main())
