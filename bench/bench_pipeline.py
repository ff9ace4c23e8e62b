#!/usr/bin/env python3
"""Compares the stages that Shoal finds for a model (shoal.torch.Pipeline without cuts) with as many layers on each of two ranks.
(bench/torch_pipeline.py compares with torch.distributed.pipelining.)

  bench/bench_pipeline.py                       three models, 1F1B, five rounds
  bench/bench_pipeline.py --model resnet --rounds 1 --steps 2     a try

Needs `make build/torch/made`. Each round starts both, in turns; nothing else runs. A rank has one thread and one core. The first
measured steps must have the same losses, within rounding.

Prints a table for each model: the median step in milliseconds, and its ratio to the automatic stages in the same round (median,
least and most of the rounds); then the stages, with the step that the library predicts. --json FILE also writes the rounds.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOAL, PYTHON = ROOT / "build/shoal", ROOT / "build/torch/bin/python3"
CUTS = {"automatic": "auto", "equal layers": "middle"}
MODELS = ["gpt2-head", "resnet", "unequal"]
RUN_S, WARMUPS, RANKS = 900, 2, 2


# ---- Models: lists of layers ---------------------------------------------------------------

def block_of(width):
    import torch
    return torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True)


class Residual:
    """Made late, because torch is imported by ranks only."""

    def __new__(cls, channels, out, stride):
        import torch
        from torch import nn

        class Bottleneck(nn.Module):
            def __init__(self):
                super().__init__()
                narrow = out // 4
                self.body = nn.Sequential(
                    nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(),
                    nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(),
                    nn.Conv2d(narrow, out, 1, bias=False), nn.BatchNorm2d(out))
                self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 or channels != out else nn.Identity()

            def forward(self, x):
                return torch.relu(self.body(x) + self.skip(x))
        return Bottleneck()


def layers_of(model, options):
    """Returns the layers, the shape of one sample, and whether samples are words."""
    from torch import nn
    if model == "gpt2-head":  # the head has as many operations as several blocks
        words = 8192
        return [nn.Embedding(words, options.width), *(block_of(options.width) for _ in range(options.layers)),
                nn.Linear(options.width, words)], (options.words,), words
    if model == "unequal":
        widths = [64 * 2 ** (i % 4) for i in range(options.layers)]
        return [nn.Sequential(nn.Linear(128, 8 * width), nn.GELU(), nn.Linear(8 * width, 128)) for width in sorted(widths)], (options.words, 128), 0
    shape = [(64, 256, 1)] + [(256, 256, 1)] * 2 + [(256, 512, 2)] + [(512, 512, 1)] * 3 + [(512, 1024, 2)] + [(1024, 1024, 1)] * 5 + \
        [(1024, 2048, 2)] + [(2048, 2048, 1)] * 2
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return [stem, *(Residual(*each) for each in shape), head], (3, 96, 96), 0


def batch_of(shape, words, samples):
    import torch
    torch.manual_seed(7)
    return torch.randint(words, (samples, *shape)) if words else torch.randn(samples, *shape)


def loss_of(result, target):
    return ((result - target) ** 2).mean()


# ---- A rank ----------------------------------------------------------------------------------------------------------------

def pipeline_of(layers, example, options):
    import shoal.torch
    from torch import nn
    cuts = None if options.cut == "auto" else [str((len(layers) + 1) // 2)]
    units = {id(layer) for layer in layers}
    pipeline = shoal.torch.Pipeline(nn.Sequential(*layers), example, microbatches=options.microbatches, schedule=options.schedule,
                                    loss=loss_of, cuts=cuts, units=lambda module: id(module) in units)

    def step(inputs, targets):
        loss = pipeline.step(inputs, targets)
        for parameter in pipeline.parameters():
            parameter.grad = None
        return float(loss)
    return step, pipeline


def rank_main(options):
    sys.path[:0] = [str(ROOT / "python")]
    import torch
    import torch.distributed as dist
    import shoal.torch  # noqa: F401: the back-end
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    torch.manual_seed(1)
    layers, shape, words = layers_of(options.model, options)
    inputs = batch_of(shape, words, options.microbatches * options.samples)
    example = inputs[:options.samples]
    with torch.no_grad():
        width = example
        for layer in layers:
            width = layer(width)
    targets = torch.randn(len(inputs), *width.shape[1:])
    step, pipeline = pipeline_of(layers, example, options)
    losses, times = [], []
    for number in range(WARMUPS + options.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(inputs, targets))
        times.append(time.perf_counter() - start)
    told = torch.tensor([times[WARMUPS:], losses[WARMUPS:]], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"way": options.cut, "step_ms": statistics.median(told[0].tolist()) * 1e3, "loss": told[1][0].item(),
                          "text": pipeline.explain()}))


# ---- All -------------------------------------------------------------------------------------------------------------------

def run(cut, model, options):
    words = [SHOAL, "run", "-n", str(RANKS), "--no-prefix", "--bind", "core", PYTHON, Path(__file__).resolve(), "--cut", cut,
             "--model", model]
    for name in ("schedule", "width", "layers", "words", "samples", "microbatches", "steps"):
        words += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"),
                   "OMP_NUM_THREADS": "1", "SHOAL_LOG": "warn"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, env=environment)
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"way"')]
    if done.returncode or len(rows) != 1:
        print(f"{model}, {cut}: failed: {(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
        return None
    return json.loads(rows[0])


def table(rounds, names):
    print(f"\n{'':24}{'step ms':>10}{'ratio':>8}  {'least - most':>13}")
    for name in names:
        rows = [one[name] for one in rounds if one.get(name)]
        if not rows:
            print(f"{name:24}{'failed':>10}")
            continue
        ratios = [one[name]["step_ms"] / one[names[0]]["step_ms"] for one in rounds if one.get(name) and one.get(names[0])]
        print(f"{name:24}{statistics.median(row['step_ms'] for row in rows):10.1f}{statistics.median(ratios):8.3f}  "
              f"{min(ratios):5.3f} - {max(ratios):5.3f}")


def measure(model, options):
    """Returns the rounds and the exit code."""
    names, rounds, code = list(CUTS), [], 0
    for number in range(options.rounds):
        rows = {}
        for name in names[number % 2:] + names[:number % 2]:
            rows[name] = run(CUTS[name], model, options)
            print(f"{model}, round {number + 1}: {name}: " + (f"{rows[name]['step_ms']:.1f} ms" if rows[name] else "failed"), flush=True)
        rounds.append(rows)
        losses = [row["loss"] for row in rows.values() if row]
        if len(losses) < 2 or abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
            print(f"failed, or wrong losses: {losses}", file=sys.stderr)
            code = 1
    table(rounds, names)
    print(next((one["automatic"]["text"] for one in rounds if one["automatic"]), ""), "\n")
    return rounds, code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    parser.add_argument("--width", type=int, default=512, help="of a block; a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--words", type=int, default=128, help="of a sample")
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="measured in a round")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cut", choices=CUTS.values(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cut:
        return rank_main(options)
    rounds, code = [], 0
    for model in [options.model] if options.model else MODELS:
        some, failed = measure(model, options)
        rounds, code = rounds + some, code or failed
    if options.json:
        options.json.write_text("".join(json.dumps(one) + "\n" for one in rounds))
    return code


if __name__ == "__main__":
    sys.exit(main())
