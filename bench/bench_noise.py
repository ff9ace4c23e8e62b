#!/usr/bin/env python3
"""Trains on Fashion-MNIST with eight times the batch that a learning rate was tuned for, as it is and with each rule of
docs/batch-size.md, and measures the noise scale with 2 to 8 workers.

  bench/bench_noise.py                        both parts, three seeds each
  bench/bench_noise.py --images 4000 --seeds 1 --epochs 2      a try
  bench/bench_noise.py --write                also writes docs/figures/noise.md

Needs `make build/torch`, and the Debian package dataset-fashion-mnist. Each training is a `shoal run` of this program with
--train; the network is that of examples/torch/fashion_mnist. Figures of accuracy do not depend on how busy the machine is.
Takes half an hour on two cores."""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON, SHOAL = ROOT / "build/torch/bin/python3", ROOT / "build/shoal"
FIGURE = ROOT / "docs/figures/noise.md"
OLD_BATCH, FACTOR, RATE = 8, 8, 0.005
BATCH = OLD_BATCH * FACTOR
# Name of a row, the rule, its batch, and the share of the epochs that are warm-up.
ROWS = (("old batch", "none", OLD_BATCH, 0), ("8 times the batch, same rate", "none", BATCH, 0), ("linear", "linear", BATCH, 0.2),
        ("square root", "sqrt", BATCH, 0), ("AdaScale", "adascale", BATCH, 0))
WORKERS = (2, 4, 8)
STEADY_BATCH, POINTS = 128, (50, 100, 200, 300)  # second part: reports the noise scale after these steps


# ---- One training ----


def example():
    """The module of the example, for its network and its images."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples/torch/fashion_mnist/train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(options):
    """On each worker. The schedule counts steps of the old batch, and the training ends when they are over."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import shoal.torch
    theirs = example()
    torch.set_num_threads(1)
    images, labels = theirs.read_images(pathlib.Path(options.data), "train")
    test_images, test_labels = theirs.read_images(pathlib.Path(options.data), "t10k")
    dist.init_process_group("shoal", init_method="shoal://")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    network = shoal.torch.DistributedDataParallel(theirs.make_network(), noise_scale=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    total = options.epochs * options.images // OLD_BATCH  # steps of the old batch
    scheduler = shoal.torch.ScaledLR(optimizer, options.rule, old_batch=OLD_BATCH, batch=options.batch, model=network,
                                     schedule=lambda step: max(1 - step / total, 0), warmup=options.warmup * total)
    shuffler = torch.Generator().manual_seed(options.seed)
    samples, points = 0, {}
    while scheduler.iterations < total - 0.5 and (not options.steps or scheduler.last_epoch < options.steps):
        for share in torch.randperm(options.images, generator=shuffler).split(options.batch):
            if len(share) < options.batch or scheduler.iterations >= total - 0.5:
                break
            mine = share.view(workers, -1)[rank]
            cross_entropy(network(theirs.scaled(images[mine])), labels[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            samples += options.batch
            if scheduler.last_epoch in POINTS:
                noise = network.noise_scale()
                points[scheduler.last_epoch] = noise.scale, noise.error, noise.low
    noise = network.noise_scale()
    right = torch.tensor(theirs.count_right(network.module, test_images, test_labels))
    dist.all_reduce(right)
    if rank == 0:
        print(json.dumps({"accuracy": 100 * right.item() / len(test_labels), "steps": scheduler.last_epoch, "samples": samples,
                          "points": points, "noise": (noise.scale, noise.error, noise.low)}), flush=True)
    dist.destroy_process_group()


def run(options, workers, seed, rule, batch, warmup, steps=0):
    """Returns what rank 0 of a training prints."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}", "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"),
                   "OMP_NUM_THREADS": "1"}
    command = [SHOAL, "run", "-n", workers, PYTHON, __file__, "--train", "--seed", seed, "--rule", rule, "--batch", batch, "--warmup",
               warmup, "--steps", steps, "--images", options.images, "--epochs", options.epochs, "--data", options.data]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    lines = [line.partition("| ")[2] for line in done.stdout.splitlines() if line.startswith("0| {")]
    if done.returncode or not lines:
        sys.exit(f"bench_noise.py: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1])


# ---- Both parts ----


def mean_text(values, digits):
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def noise_text(scale, error, low):
    return f"{scale:.0f} ± {error:.0f}" if math.isfinite(error) else f"above {low:.0f}"


def measure_accuracy(options, out):
    out("| run | rate at first | steps | samples, over those of the old batch | test accuracy, % | each seed | noise scale at the end |")
    out("|---|---:|---:|---:|---:|---|---|")
    old = None
    for name, rule, batch, warmup in ROWS:
        found = [run(options, 2, seed, rule, batch, warmup) for seed in range(1, options.seeds + 1)]
        accuracies = [each["accuracy"] for each in found]
        samples = statistics.mean(each["samples"] for each in found)
        old = old or samples
        factor = {"linear": FACTOR, "sqrt": FACTOR ** 0.5}.get(rule, 1)
        rate = "follows the gain" if rule == "adascale" else f"{RATE * factor:.3g}"
        out(f"| {name}, {batch} | {rate} | {statistics.mean(each['steps'] for each in found):.0f} | {samples / old:.2f} | "
            f"{mean_text(accuracies, 2)} | {', '.join(f'{each:.2f}' for each in accuracies)} | {', '.join(noise_text(*each['noise']) for each in found)} |")


def measure_steadiness(options, out):
    out(f"| workers | samples of a worker | {' | '.join(f'after {point} steps' for point in POINTS)} |")
    out(f"|---:|---:|{'---:|' * len(POINTS)}")
    for workers in WORKERS:
        found = [run(options, workers, seed, "sqrt", STEADY_BATCH, 0, max(POINTS)) for seed in range(1, options.seeds + 1)]
        cells = []
        for point in POINTS:
            pairs = [each["points"][str(point)] for each in found if str(point) in each["points"]]
            cells.append("; ".join(noise_text(*pair) for pair in pairs))
        out(f"| {workers} | {STEADY_BATCH // workers} | {' | '.join(cells)} |")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--images", type=int, default=10000, help="of the training set")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/figures/noise.md")
    for name, kind in (("train", None), ("seed", int), ("rule", str), ("batch", int), ("warmup", float), ("steps", int)):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **({"type": kind} if kind else {"action": "store_true"}))
    return parser.parse_args()


def main():
    options = parse_options()
    if options.train:
        train(options)
        return
    lines = []

    def out(line):
        lines.append(line)
        print(line, flush=True)
    out("# Eight times the batch, and the noise scale\n")
    out("`bench/bench_noise.py --write`\n")
    out(f"A small convolutional network on {options.images} images of Fashion-MNIST, {options.epochs} epochs, SGD with momentum. The rate is "
        f"{RATE} for a batch\nof {OLD_BATCH} and falls to 0. Two workers, {options.seeds} seeds: mean (least .. most). AdaScale trains until its "
        "gains add up to the steps of\nthe old batch, so it uses more samples.\n")
    measure_accuracy(options, out)
    out(f"\nThe noise scale of the same training with a batch of {STEADY_BATCH} and the square root, shared by more workers: each of {options.seeds} "
        "seeds, with its\nstandard error, in samples.\n")
    measure_steadiness(options, out)
    if options.write:
        FIGURE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
