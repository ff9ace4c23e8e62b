#!/usr/bin/env python3
"""Trains a GPT on two ranks by smdistributed.modelparallel and by others: in a pipeline, in shards, and by tensor parallelism.

  bench/bench_smp.py                                      all of them, three rounds
  bench/bench_smp.py --rounds 1 --steps 4 --layers 2 --width 64     a try
  bench/bench_smp.py --memory                             the memory of a rank, next to the prediction; no times

Needs `make build/torch/made build/torch/deepspeed`. Each round starts all of them in turns; a rank has one thread and one core. Every
one trains the same model from the same values on the same batches, so losses must equal those of one process.

Prints a table: the median step in milliseconds, the ratio of steps per second to smdistributed's in the same round (median, least and
most of the rounds; below 1: slower), and the largest relative difference of a loss from one process's. --json FILE also writes the
rounds.

--memory prints another table: the memory of each rank. Each rank first trains a tiny model in the same way, so that what Python, torch
and connections take is there, and is not counted: MiB "before". Then it trains on, while its memory is sampled (Pss: pages that both
ranks map count half); the largest sample, less that before the model was made. malloc returns what is freed, because it maps each
larger block, and Shoal's buffer cache (SHOAL_MEMORY_KEPT) is off. Predicted: what the partitioner counts for a rank, the parameters,
gradients, states, activations and buffers; for shards what `shoal advise` counts; for tensor parallelism what
shoal.torch.tensor.memory_of counts, and for activations the formulas of docs/advice.md.

Examples:
  bench/bench_smp.py --rounds 5 --json smp.json
  bench/bench_smp.py --only pipeline
  bench/bench_smp.py --only tensor --rounds 5
  bench/bench_smp.py --memory --layers 6 --width 192

Exit codes:
  0  all have run
  1  one failed, or its losses differ"""
import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOAL, PYTHON = ROOT / "build/shoal", ROOT / "build/torch/bin/python3"
RUN_S, WARMUPS, MICROBATCHES, NEAR = 900, 2, 4, 1e-4
PERIOD_S, SAMPLE_S = 4.0, 0.02  # how long steps are sampled, and how often
TINY = {"layers": 1, "width": 64, "words": 32, "context": 8, "batch": 8}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "SHOAL_MEMORY_KEPT": "0"}
OURS = {"pipeline": "smp pipeline", "shards": "smp shards", "tensor": "smp tensor"}
MODES = {"one": ["one process"],
         "pipeline": ["smp pipeline", "torch pipelining over shoal", "torch pipelining over gloo", "DeepSpeed PipelineModule over shoal"],
         "shards": ["smp shards", "FSDP2 over shoal", "FSDP2 over gloo"],
         "tensor": ["smp tensor", "parallelize_module over shoal", "parallelize_module over gloo"]}
HEAD, TENSOR = 64, 2  # the width of a head, and the degree


# ---- A rank ----------------------------------------------------------------------------------------------------------------


def layers_of(options, is_by_head=False):
    """Returns the model as a list of layers, each of which takes one tensor. is_by_head: query, key and value of a head are neighbors, so
    a plan that divides columns divides heads; the values of the model stay the same."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(options.words, options.width), nn.Parameter(torch.randn(options.context, options.width))

        def forward(self, x):
            return self.words(x) + self.places

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = options.width
            self.one, self.all, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.two, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            if is_by_head:
                for each in (self.all.weight, self.all.bias):
                    each.data = each.data.unflatten(0, (3, width // HEAD, HEAD)).transpose(0, 1).flatten(0, 2).contiguous()

        def heads(self, x):
            """Returns queries, keys and values, in one tensor."""
            joined, (rows, length, width) = self.all(x), x.shape
            if is_by_head:
                return joined.view(rows, length, -1, 3, HEAD).permute(3, 0, 2, 1, 4)
            return joined.view(rows, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)

        def forward(self, x):
            parts = self.heads(self.one(x))
            mixed = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(gelu(self.up(self.two(x))))
    torch.manual_seed(1)
    return [Words(), *(Block() for _ in range(options.layers)), nn.LayerNorm(options.width), nn.Linear(options.width, options.words)]


def batch_of(options, step):
    import torch
    made = torch.Generator().manual_seed(step)
    words = torch.randint(options.words, (options.batch, options.context + 1), generator=made)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(logits, targets):
    from torch.nn.functional import cross_entropy
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def adam(parameters):
    import torch
    return torch.optim.AdamW(parameters, lr=1e-3)


def step_of(model):
    """Returns a function that trains a step of a model as one process does."""
    optimizer = adam(model.parameters())

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def one_process(options):
    from torch import nn
    model = nn.Sequential(*layers_of(options))
    return step_of(model)


def smp_of(options, parameters, share):
    import smdistributed.modelparallel.torch as smp
    from torch import nn
    smp.init(parameters)
    with smp.tensor_parallelism(parameters.get("tensor_parallel_degree", 1) > 1):
        model = nn.Sequential(*layers_of(options))
    inner = adam(model.parameters())
    model, optimizer = smp.DistributedModel(model), smp.DistributedOptimizer(inner)

    @smp.step
    def train(model, inputs, targets):
        loss = loss_of(model(inputs), targets)
        model.backward(loss)
        return loss

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = train(model, share(inputs), share(targets)).reduce_mean()
        optimizer.step()
        return loss.item()
    return step


def own_half(tensor):
    import torch.distributed as dist
    return tensor.chunk(2)[dist.get_rank()]


def smp_pipeline(options):
    return smp_of(options, {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}, lambda tensor: tensor)


def smp_shards(options):
    return smp_of(options, {"pipeline_parallel_degree": 1, "microbatches": 1, "ddp": True, "sharded_data_parallel_degree": 2,
                            "sdp_gradient_clipping": 1e9}, own_half)


def smp_tensor(options):
    return smp_of(options, {"pipeline_parallel_degree": 1, "microbatches": 1, "ddp": True, "tensor_parallel_degree": TENSOR,
                            "prescaled_batch": True}, lambda tensor: tensor)


def torch_pipelining(options, backend):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    begin(backend)
    layers, rank = layers_of(options), dist.get_rank()
    cut = 1 + options.layers // 2
    stage = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    optimizer = adam(stage.parameters())
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of)

    def step(inputs, targets):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        return sum(each.item() for each in losses) / MICROBATCHES if rank else None
    return step


def fsdp(options, backend):
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    begin(backend)
    model = nn.Sequential(*layers_of(options))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model.parameters())

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = loss_of(model(own_half(inputs)), own_half(targets))
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def divides_heads(options):
    """Returns true if ranks of tensor parallelism can have equal numbers of heads; else each of them computes all heads."""
    return options.width // HEAD % TENSOR == 0


def parallelized(options, backend):
    """By the plan that smp finds for the model."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    import shoal.torch.tensor
    begin(backend)
    model = nn.Sequential(*layers_of(options, divides_heads(options)))
    styles = {"qkv": ColwiseParallel(), "colwise": ColwiseParallel(), "rowwise": RowwiseParallel(),
              "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
              "embedding_rowwise": RowwiseParallel(input_layouts=Replicate())}
    plan = {name: styles[style] for name, style in shoal.torch.tensor.plan_of(model, TENSOR).items()}
    if not divides_heads(options):
        for number in range(1, 1 + options.layers):
            plan.update({f"{number}.all": ColwiseParallel(output_layouts=Replicate()), f"{number}.out": RowwiseParallel(input_layouts=Replicate())})
    model = parallelize_module(model, DeviceMesh.from_group(dist.group.WORLD, "cpu"), plan)
    return step_of(model)


def deepspeeds(options):
    begin("shoal")
    import deepspeed
    from deepspeed.pipe import PipelineModule
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # only inference uses it
    deepspeed.init_distributed()
    module = PipelineModule(layers=layers_of(options), num_stages=2, loss_fn=loss_of, partition_method="parameters")
    rows = options.batch // MICROBATCHES
    engine, *_ = deepspeed.initialize(model=module, optimizer=adam(module.parameters()), config={
        "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": MICROBATCHES, "train_batch_size": options.batch,
        "steps_per_print": 10**9})

    def step(inputs, targets):
        return engine.train_batch(data_iter=iter(list(zip(inputs.split(rows), targets.split(rows))))).item()
    return step


def begin(backend):
    import torch.distributed as dist
    import shoal.torch  # noqa: F401
    if not dist.is_initialized():
        dist.init_process_group(backend)


STEPS_OF = {"one process": one_process, "smp pipeline": smp_pipeline, "smp shards": smp_shards, "smp tensor": smp_tensor,
            "parallelize_module over shoal": lambda options: parallelized(options, "shoal"),
            "parallelize_module over gloo": lambda options: parallelized(options, "gloo"),
            "torch pipelining over shoal": lambda options: torch_pipelining(options, "shoal"),
            "torch pipelining over gloo": lambda options: torch_pipelining(options, "gloo"),
            "FSDP2 over shoal": lambda options: fsdp(options, "shoal"), "FSDP2 over gloo": lambda options: fsdp(options, "gloo"),
            "DeepSpeed PipelineModule over shoal": deepspeeds}


def prepared():
    import warnings

    import torch
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.nn.Linear(64, 64)(torch.ones(1, 64)).sum().backward()


def rank(options):
    """Trains, and prints a line of JSON."""
    prepared()
    step = STEPS_OF[options.rank_of](options)
    losses, times = [], []
    for number in range(WARMUPS + options.steps):
        batch = batch_of(options, number)
        began = time.perf_counter()
        losses.append(step(*batch))
        times.append(1e3 * (time.perf_counter() - began))
    print("RESULT " + json.dumps({"losses": losses, "times": times[WARMUPS:]}), flush=True)


def pss(pid="self"):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def returned():
    """Frees what is not used, and returns the bytes of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return pss()


def rank_for_memory(options):
    """Trains for some seconds, while the parent samples the memory of this process."""
    import torch
    import torch.distributed as dist
    prepared()
    tiny = argparse.Namespace(**{**vars(options), **TINY})
    make, count = STEPS_OF[options.rank_of], int(os.environ["WORLD_SIZE"])
    step = make(tiny)
    for number in range(2):
        step(*batch_of(tiny, number))
    del step
    before = returned()
    step, batch = make(options), batch_of(options, 0)
    for _ in range(WARMUPS):
        step(*batch)
    returned()
    number, folder = int(os.environ["RANK"]), Path(options.memory_of)
    if count > 1:
        dist.barrier()
    (folder / f"begun.{number}").write_text(json.dumps({"pid": os.getpid(), "before": before}))
    began, is_over = time.monotonic(), torch.zeros(1)
    while not is_over.item():
        step(*batch)
        is_over.fill_(float(time.monotonic() - began > PERIOD_S))
        if count > 1:
            dist.all_reduce(is_over)
    (folder / f"ended.{number}").write_text("")
    if count > 1:
        dist.barrier()


# ---- Rounds ----------------------------------------------------------------------------------------------------------------


def command_of(mode, options):
    """Returns the words and the variables that start the ranks of a mode, and how many there are."""
    count = 1 if mode == "one process" else 2
    words = [SHOAL, "run", "-n", count, "--timeout", RUN_S, PYTHON, Path(__file__).resolve(), "--rank-of", mode]
    for name in ("steps", "layers", "width", "words", "context", "batch"):
        words += [f"--{name}", getattr(options, name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"),
                   "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'python/smdistributed'}"}
    return list(map(str, words)), environment, count


def run(mode, options):
    """Starts the ranks of a mode. Returns losses of each step, and the median step in milliseconds."""
    words, environment, count = command_of(mode, options)
    environment["MALLOC_MMAP_THRESHOLD_"] = "131072"
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    found = [json.loads(each) for each in re.findall(r"RESULT (\{.*\})", done.stdout)]
    if done.returncode or len(found) != count:
        sys.exit(f"bench_smp.py: {mode} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    losses = [statistics.mean(each for each in values if each is not None) for values in zip(*(each["losses"] for each in found))]
    return {"losses": losses, "ms": max(statistics.median(each["times"]) for each in found)}


def table(kind, rounds):
    """Prints the rows of the modes of a kind."""
    reference, ours = [each["one process"]["losses"] for each in rounds], OURS[kind]
    print(f"\n| {kind} | step, ms | steps per second | loss differs |")
    print("|---|---|---|---|")
    for mode in MODES[kind]:
        ratios = [each[ours]["ms"] / each[mode]["ms"] for each in rounds]
        far = max(abs(a - b) / abs(b) for each, wanted in zip(rounds, reference) for a, b in zip(each[mode]["losses"], wanted))
        print(f"| {mode} | {statistics.median(each[mode]['ms'] for each in rounds):.0f} | {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f}) | {far:.0e} |")
        if not far <= NEAR:  # also if it is not a number
            sys.exit(f"bench_smp.py: the losses of {mode} differ from one process's by {far:.1e}")


# ---- Memory ----------------------------------------------------------------------------------------------------------------


def memory(mode, options):
    """Returns for each rank: bytes before, most bytes that the training has added, and the bytes that are predicted, or None."""
    words, environment, count = command_of(mode, options)
    with tempfile.TemporaryDirectory(prefix="shoal-smp-") as place, tempfile.TemporaryFile("w+") as output:
        folder = Path(place)
        process = subprocess.Popen([*words, "--memory-of", place], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   env={**environment, **MALLOC})
        begun, most = [folder / f"begun.{rank}" for rank in range(count)], [0] * count
        while process.poll() is None and not (folder / "ended.0").exists():
            time.sleep(SAMPLE_S)
            if all(each.exists() and each.stat().st_size for each in begun):
                for rank, each in enumerate(begun):
                    most[rank] = max(most[rank], pss(json.loads(each.read_text())["pid"]))
        code = process.wait()
        output.seek(0)
        text = output.read()
        if code or not all(most):
            sys.exit(f"bench_smp.py: {mode} failed:\n{text[-3000:]}")
        before = [json.loads(each.read_text())["before"] for each in begun]
    predicted = [float(each) * 2**20 for each in re.findall(r"rank \d: ([\d.]+) MiB", text)][-count:] or [None] * count
    return [(start, top - start, wanted) for start, top, wanted in zip(before, most, predicted)]


def profile(options):
    """Prints the file of the model's profile, for the half of a batch that a rank of shards has."""
    from torch import nn
    import shoal.torch
    prepared()
    inputs, targets = batch_of(options, 0)
    half = len(inputs) // 2
    measured = shoal.torch.profile(nn.Sequential(*layers_of(options)), inputs[:half], lambda result: loss_of(result, targets[:half]), steps=1)
    measured.save(options.memory_of)


def predicted_of_shards(options):
    """Returns the bytes that `shoal advise` predicts for a rank that has half of parameters, gradients and states."""
    words, environment, _ = command_of("profile", options)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([*words[words.index(str(PYTHON)):], "--memory-of", file.name], check=True, env=environment, stderr=subprocess.DEVNULL)
        advice = subprocess.run([SHOAL, "advise", "--profile", file.name, "--samples", "1000", "--batch", str(options.batch), "--machine", "this",
                                 "--per-machine", "2", "--worker-memory", "1000G", "--optimizer", "adamw", "--format", "json"], check=True,
                                capture_output=True, text=True, env={**environment, "CUDA_VISIBLE_DEVICES": ""})
    rungs = {rung["way"]: rung for rung in json.loads(advice.stdout)["points"][0]["ladder"]}
    return rungs["sharded parameters"]["total_bytes"] - rungs["sharded parameters"]["constant_bytes"]


def of_tensor(options):
    """Prints the bytes that a rank has of a divided model's parameters, gradients and states, and activations: those of docs/advice.md for
    values of 4 bytes without dropout, with fused attention."""
    from torch import nn
    import shoal.torch.tensor
    parameters = shoal.torch.tensor.memory_of(nn.Sequential(*layers_of(options)), TENSOR)["bytes"]
    positions = options.batch * options.context
    attention, feed = 4 / (TENSOR if divides_heads(options) else 1), 8 / TENSOR
    layers = options.layers * 4 * positions * options.width * (4 + attention + feed)
    logits = 4 * positions * options.words
    head = 2 * 4 * positions * options.width + logits
    buffers = max(0, 2 * logits - parameters)  # the backward pass of the loss, before gradients are there
    print(4 * parameters + layers + head + 8 * positions + buffers)


def predicted_of_tensor(options):
    words, environment, _ = command_of("tensor's prediction", options)
    done = subprocess.run(words[words.index(str(PYTHON)):], check=True, env=environment, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def memory_table(modes, options):
    """Prints a row for each rank."""
    of_all = {OURS[kind]: predict(options) for kind, predict in (("shards", predicted_of_shards), ("tensor", predicted_of_tensor))
              if OURS[kind] in modes}
    print("| | rank | before, MiB | training, MiB | predicted, MiB | predicted / measured |\n|---|---:|---:|---:|---:|---:|")
    for mode in modes:
        for rank, (before, added, predicted) in enumerate(memory(mode, options)):
            predicted = of_all.get(mode, predicted)
            wanted = ["", ""] if predicted is None else [f"{predicted / 2**20:.1f}", f"{predicted / added:.2f}"]
            print(f"| {mode} | {rank} | {before / 2**20:.0f} | {added / 2**20:.1f} | {' | '.join(wanted)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rounds", 3), ("steps", 10), ("layers", 8), ("width", 256), ("words", 512), ("context", 64), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument("--only", choices=sorted(OURS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--memory", action="store_true", help="measure the memory of ranks")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of == "profile":
        return profile(options)
    if options.rank_of == "tensor's prediction":
        return of_tensor(options)
    if options.rank_of:
        return rank_for_memory(options) if options.memory_of else rank(options)
    kinds = [options.only] if options.only else list(OURS)
    modes = [mode for kind in ("one", *kinds) for mode in MODES[kind]]
    if options.memory:
        return memory_table(modes, options)
    rounds = [{mode: run(mode, options) for mode in modes} for _ in range(options.rounds)]
    if options.json:
        options.json.write_text(json.dumps(rounds))
    for kind in kinds:
        table(kind, rounds)


if __name__ == "__main__":
    main()
