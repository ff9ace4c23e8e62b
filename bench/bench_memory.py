#!/usr/bin/env python3
"""Memory that a rank takes, next to what `shoal advise` predicts: GPT-2, BERT-base, ResNet-50 and the GPT example, on the CPU, two
ranks, under each way of training.

  bench/bench_memory.py                                  all; needs 12 GB of memory, and half an hour
  bench/bench_memory.py --models resnet50 --ways sharded-optimizer
  bench/bench_memory.py --table                          print the table of the file, and measure nothing

It needs torch and transformers: build/trainers/bin/python3, and SHOAL_LIBRARY and SHOAL_COMMAND of a build. Each line of
docs/figures/memory.jsonl is one model and way.

Measured: after the first step, the ranks train on for some seconds while their memory is sampled (Pss: pages that both map count
half). The largest sum, less the sum before the model was made, divided by the ranks. malloc returns what is freed, because it maps
each larger block. Shoal's buffer cache (SHOAL_MEMORY_KEPT) is off. Predicted: weights, gradients, states, masters, activations and
buffers, without the constant part. Activations of BERT-base and the GPT example are measured by shoal.torch.profile, those of the
others follow from the formulas."""
import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP / "python"), str(TOP / "bench"), str(TOP / "examples/torch/gpt")]

COMMAND = os.environ.get("SHOAL_COMMAND", str(TOP / "build/shoal"))
RANKS, PERIOD_S, SAMPLE_S, LIMIT_S, MIB = 2, 5.0, 0.03, 900, 1 << 20
MODELS = {"gpt2": 1, "bert-base": 1, "resnet50": 4, "gpt-example": 4}  # samples of a rank
BUILT_IN = ("gpt2", "resnet50")
OPTIMIZERS = {"resnet50": "momentum"}  # the others: adamw
# the ladder's names of the ways
WAYS = {"data-parallel": "data parallel", "recomputation": "recomputation", "16-bit": "16 bit", "sharded-optimizer": "sharded optimizer",
        "sharded-parameters": "sharded parameters", "tensor-parallel": "tensor parallel", "pipeline": "pipeline"}
# Small blocks come from the heap; larger ones are mapped, and returned when they are freed. Shoal's buffer cache, which keeps up to
# 256 MiB of freed buffers, is off.
ENVIRONMENT = {"SHOAL_MEMORY_KEPT": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


# ---- a rank ----

def pss(pid="self"):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Case:
    """A model, a batch of it, and the loss."""

    def __init__(self, name, samples):
        import torch
        self.name, self.samples, self.torch = name, samples, torch
        torch.manual_seed(0)
        self.model, self.units = getattr(self, name.replace("-", "_"))()
        self.model.train()

    def gpt2(self):
        import transformers
        ids = self.torch.randint(50257, (self.samples, 1024))
        self.example, self.loss = {"input_ids": ids, "labels": ids}, lambda output: output.loss
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="sdpa")), ("GPT2Block",)

    def bert_base(self):
        import transformers
        ids = self.torch.randint(30522, (self.samples, 512))
        self.example = {"input_ids": ids, "labels": ids, "next_sentence_label": self.torch.zeros(self.samples, dtype=self.torch.long)}
        self.loss = lambda output: output.loss
        return transformers.BertForPreTraining(transformers.BertConfig(attn_implementation="sdpa")), ("BertLayer",)

    def resnet50(self):
        import activations
        labels = self.torch.randint(1000, (self.samples,))
        self.example, self.loss = (self.torch.randn(self.samples, 3, 224, 224),), lambda output: self.cross_entropy(output, labels)
        return activations.resnet50(), ("Block",)

    def gpt_example(self):
        import train
        ids = self.torch.randint(train.TOKENS, (self.samples, 256))
        options = argparse.Namespace(width=512, context=256, layers=8)
        self.example, self.loss = (ids,), lambda output: self.cross_entropy(output.flatten(0, 1), ids.flatten())
        return train.Gpt(options), ("Block",)

    def cross_entropy(self, output, labels):
        return self.torch.nn.functional.cross_entropy(output, labels)

    def run(self, network):
        return self.loss(network(**self.example) if isinstance(self.example, dict) else network(*self.example))

    def recompute(self):
        if hasattr(self.model, "gradient_checkpointing_enable"):
            self.model.gradient_checkpointing_enable()
            return
        from torch.utils.checkpoint import checkpoint
        for module in self.model.modules():
            if type(module).__name__ in self.units:
                module.forward = lambda x, plain=module.forward: checkpoint(plain, x, use_reentrant=False)

    def halve(self):
        self.model.bfloat16()
        if not isinstance(self.example, dict):
            self.example = tuple(each.bfloat16() if each.is_floating_point() else each for each in self.example)

    def optimizer(self, parameters):
        if OPTIMIZERS.get(self.name) == "momentum":
            return self.torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        return self.torch.optim.AdamW(parameters, lr=1e-4)


def step_of(case, way, microbatches):
    """Returns a function that trains one step."""
    import shoal.torch
    model = case.model
    if way == "recomputation":
        case.recompute()
    if way == "16-bit":
        case.halve()
    if way == "pipeline":
        return pipeline_step(case, microbatches)
    if way == "tensor-parallel":
        model = shoal.torch.tensor_parallel(model)
    optimizer = case.optimizer(model.parameters())
    if way == "sharded-parameters":
        units = {type(module) for module in model.modules() if type(module).__name__ in case.units}
        network = shoal.torch.ShardedDataParallel(model, optimizer, units=units)
    elif way in ("sharded-optimizer", "16-bit"):
        network = shoal.torch.DistributedDataParallel(model, optimizer=optimizer, degree=1 if way == "16-bit" else None)
    elif way == "tensor-parallel":
        network = model
    else:
        network = shoal.torch.DistributedDataParallel(model)

    def step():
        case.run(network).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


CUTS = {"gpt-example": ["blocks.4"]}  # the prediction is for equal stages


def pipeline_step(case, microbatches):
    import shoal.torch
    import torch.distributed as dist
    if case.name not in CUTS:
        raise NotImplementedError("NotImplementedError: no two stages of it are equal, or it takes more than tensors")
    (inputs,) = case.example
    whole = case.torch.cat([inputs] * RANKS)
    network = shoal.torch.Pipeline(case.model, whole[:len(whole) // microbatches], microbatches=microbatches, cuts=CUTS[case.name],
                                   loss=lambda x, y: case.cross_entropy(x.flatten(0, 1), y.flatten()))
    case.model = None
    optimizer = case.optimizer(network.parameters())

    def step():
        network.step(whole if dist.get_rank() == 0 else None, whole if dist.get_rank() == RANKS - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    return step


def worker(name, way, samples, microbatches, folder):
    import torch
    import torch.distributed as dist
    import torch.utils.checkpoint  # noqa: F401
    import shoal.torch
    if name in ("gpt2", "bert-base"):
        import transformers  # noqa: F401
    dist.init_process_group("shoal")
    rank = dist.get_rank()
    layer = torch.nn.Linear(8, 8)
    shoal.torch.DistributedDataParallel(layer)(torch.ones(1, 8)).sum().backward()
    del layer
    before = pss()
    case = Case(name, samples)
    step = step_of(case, way, microbatches)
    step()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    (folder / f"begun.{rank}").write_text(json.dumps({"pid": os.getpid(), "before": before}))
    begun, steps = time.monotonic(), 0
    while True:
        step()
        steps += 1
        is_over = torch.tensor(float(time.monotonic() - begun > PERIOD_S))
        dist.all_reduce(is_over)
        if is_over.item():
            break
    (folder / f"ended.{rank}").write_text(str(steps))
    dist.barrier()
    dist.destroy_process_group()


# ---- the measurement ----

def measured(name, way, samples, microbatches, limit_s):
    """Returns the bytes of a rank."""
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as place:
        folder = pathlib.Path(place)
        words = [COMMAND, "run", "-n", str(RANKS), sys.executable, __file__, "--worker", name, way, str(samples), str(microbatches), place]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(TOP / "python")})
        most, ranks, until = 0, [], time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < until:
            if not ranks and all((folder / f"begun.{rank}").exists() for rank in range(RANKS)):
                time.sleep(0.1)
                ranks = [json.loads((folder / f"begun.{rank}").read_text()) for rank in range(RANKS)]
            if ranks and not (folder / "ended.0").exists():
                try:
                    most = max(most, sum(pss(rank["pid"]) for rank in ranks))
                except (OSError, StopIteration):
                    break
            time.sleep(SAMPLE_S)
        if time.monotonic() >= until:
            process.terminate()
        out = process.communicate()[0]
        if time.monotonic() >= until:
            raise RuntimeError(f"not done within {limit_s:.0f} s")
        if process.returncode or not most:
            reason = next((line for line in reversed(out.splitlines()) if "Error" in line), out[-300:])
            raise RuntimeError(reason)
        return (most - sum(rank["before"] for rank in ranks)) / RANKS


def profile_of(name, samples, folder):
    """Returns the words for --profile; measures the model if it is not built in."""
    if name in BUILT_IN:
        return name
    import shoal.torch
    case, file = Case(name, samples), folder / f"{name}.json"
    profile = shoal.torch.profile(case.model, case.example, case.loss, steps=1)
    case.halve()
    profile.activation_16_bytes = shoal.torch.profile(case.model, case.example, case.loss, steps=1).activation_16_bytes
    profile.save(file)
    return str(file)


def predicted(name, samples, profile):
    """Returns the rungs by their names."""
    words = ["advise", "--profile", profile, "--samples", "1000", "--batch", str(RANKS * samples), "--machine", "this", "--per-machine",
             str(RANKS), "--worker-memory", "1000G", "--optimizer", OPTIMIZERS.get(name, "adamw"), "--format", "json"]
    out = subprocess.run([COMMAND, *words], check=True, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}).stdout
    return {rung["way"]: rung for rung in json.loads(out)["points"][0]["ladder"]}


def table(rows):
    print("| model | samples of a rank | way | measured, MiB | predicted, MiB | predicted / measured |\n|---|---:|---|---:|---:|---:|")
    for row in rows:
        ratio = row["predicted_bytes"] / row["measured_bytes"] if row["measured_bytes"] and row["predicted_bytes"] else None
        cells = [f"{row[key] / MIB:.0f}" if row[key] else "–" for key in ("measured_bytes", "predicted_bytes")]
        print(f"| {row['model']} | {row['samples']} | {row['way']} | {' | '.join(cells)} | {f'{ratio:.2f}' if ratio else row['why']} |")


def again(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as place:
        rungs = {name: predicted(name, MODELS[name], profile_of(name, MODELS[name], pathlib.Path(place)))
                 for name in {row["model"] for row in rows}}
    for row in rows:
        rung = rungs[row["model"]][row["way"]]
        row["predicted_bytes"] = bytes_of(rung)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table(rows)


def bytes_of(rung):
    """Returns the bytes without the constant part, or None if the way is not known."""
    return rung["total_bytes"] - rung["constant_bytes"] if "total_bytes" in rung else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=pathlib.Path, default=TOP / "docs/figures/memory.jsonl")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="time for one case")
    parser.add_argument("--again", action="store_true", help="predict anew for the file's rows, and keep what was measured")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, way, samples, microbatches, folder = options.worker
        return worker(name, way, int(samples), int(microbatches), pathlib.Path(folder))
    if options.again:
        return again(options.out)
    if options.table:
        return table([json.loads(line) for line in options.out.read_text().splitlines()])
    rows = []
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as place:
        for name in options.models:
            rungs = predicted(name, MODELS[name], profile_of(name, MODELS[name], pathlib.Path(place)))
            for way in options.ways:
                rung = rungs[WAYS[way]]
                # the ranks of a tensor group train on the same samples
                samples = int(rung.get("microbatch", MODELS[name])) if way == "tensor-parallel" else MODELS[name]
                row = {"model": name, "samples": samples, "way": WAYS[way], "measured_bytes": None, "why": rung["answer"],
                       "predicted_bytes": bytes_of(rung)}
                print(f"# {name}, {way}", file=sys.stderr, flush=True)
                try:
                    row["measured_bytes"] = measured(name, way, samples, rung.get("microbatches") or 1, options.limit)
                except RuntimeError as error:
                    row["why"] = str(error)
                    print(f"# {error}", file=sys.stderr, flush=True)
                rows.append(row)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
