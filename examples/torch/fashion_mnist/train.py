#!/usr/bin/env python3
"""Trains a small convolutional network on Fashion-MNIST with DistributedDataParallel, on as many workers as were started.

Run: shoal run -n 2 python3 train.py, or torchrun --nproc-per-node 2 train.py, or python3 train.py for one worker (--help
lists the options). Each worker computes its share of every batch, so any number of workers trains the same, up to rounding.
"""
import argparse
import gzip
import os
import pathlib
import sys
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal.torch  # noqa: F401  registers the back-end "shoal"

ADVICE = "run `apt install dataset-fashion-mnist` or pass --data DIR"
PIXEL_MEAN, PIXEL_DEVIATION = 72.94, 90.02  # mean and deviation of the training images, measured once
PIXEL_HEADER, LABEL_HEADER = 16, 8  # bytes of an idx file before its numbers


def parse_options():
    parser = argparse.ArgumentParser(description="trains a small convolutional network on Fashion-MNIST",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, default="/usr/share/datasets/fashion-mnist", metavar="DIR",
                        help="the four idx files, .gz or not")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="passes over the training images")
    parser.add_argument("--batch", type=int, default=120, metavar="N", help="images per step, over all workers together")
    parser.add_argument("--lr", type=float, default=0.05, metavar="X", help="learning rate of the first step; it falls to 0")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the first weights and of the order of images")
    parser.add_argument("--limit", type=int, default=60000, metavar="N", help="use only the first N training images")
    parser.add_argument("--backend", default="shoal", metavar="NAME", help="back-end of torch.distributed, to compare")
    return parser.parse_args()


def read_idx(folder, name, header_bytes):
    """Reads the numbers of an idx file: a header, then one byte per number."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            numbers = numpy.frombuffer(file.read(), dtype=numpy.uint8, offset=header_bytes)
    except (OSError, EOFError, ValueError) as error:
        sys.exit(f"train.py: cannot read {path}: {error}; {ADVICE}")
    return torch.from_numpy(numbers.copy())


def read_images(folder, kind):
    """Reads the images and labels of a set, "train" or "t10k"."""
    images = read_idx(folder, f"{kind}-images-idx3-ubyte", PIXEL_HEADER)
    labels = read_idx(folder, f"{kind}-labels-idx1-ubyte", LABEL_HEADER)
    if images.numel() != labels.numel() * 28 * 28:
        sys.exit(f"train.py: {folder} holds {images.numel()} pixels for {labels.numel()} images of 28 x 28; {ADVICE}")
    return images.view(-1, 1, 28, 28), labels.long()


def make_network():
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
                            nn.Conv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
                            nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))
    return network.to(memory_format=torch.channels_last)  # twice as fast on a CPU


def scaled(pixels):
    return (pixels - PIXEL_MEAN) / PIXEL_DEVIATION


class Progress:
    """Rank 0's output during an epoch: a bar on a terminal, a line every five seconds elsewhere, a last line in both."""

    def __init__(self, title, images):
        # `shoal run` reads the workers' output through pipes, and sets SHOAL_RUN_TERMINAL if it shows it on a terminal.
        self.on_terminal = sys.stdout.isatty() or "SHOAL_RUN_TERMINAL" in os.environ
        self.title = title
        self.images = images
        self.begun_s = time.monotonic()
        self.shown_s = 0 if self.on_terminal else self.begun_s  # the bar is there from the first step on

    def step(self, done, loss):
        now_s = time.monotonic()
        if dist.get_rank() != 0 or now_s - self.shown_s < (0.1 if self.on_terminal else 5):
            return
        filled = 20 * done // self.images
        line = (f"{self.title} [{'#' * filled}{'-' * (20 - filled)}] {100 * done // self.images:3} %  "
                f"{done / max(now_s - self.begun_s, 1e-6):6.0f} images/s  loss {loss:.4f}")
        print(f"\r{line}\033[K" if self.on_terminal else f"{line}\n", end="", flush=True)
        self.shown_s = now_s

    def finish(self, text):
        if dist.get_rank() == 0:
            over = "\r\033[K" if self.on_terminal else ""
            print(f"{over}{self.title}  {text}  {time.monotonic() - self.begun_s:.1f} s", flush=True)


def train_epoch(network, optimizer, schedule, images, labels, order, progress):
    """Trains on this worker's columns of the rows of `order`, a batch each; returns the mean loss of its images."""
    loss_sum = 0.0
    for step, share in enumerate(order[:, dist.get_rank()], 1):
        loss = cross_entropy(network(scaled(images[share])), labels[share])
        optimizer.zero_grad()
        loss.backward()  # meanwhile DistributedDataParallel averages the gradients over the workers
        optimizer.step()
        schedule.step()
        loss_sum += loss.item()
        progress.step(step * order[0].numel(), loss_sum / step)
    return loss_sum / len(order)


@torch.no_grad()
def count_right(network, images, labels):
    """Returns how many images the network classifies correctly, of this worker's share of the test images."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    pairs = zip(images[mine].split(500), labels[mine].split(500))
    return sum((network(scaled(pixels)).argmax(1) == names).sum().item() for pixels, names in pairs)


def main():
    options = parse_options()
    images, labels = read_images(options.data, "train")
    test_images, test_labels = read_images(options.data, "t10k")

    dist.init_process_group(options.backend, init_method="shoal://")  # with any launcher; without one: one worker
    rank, workers = dist.get_rank(), dist.get_world_size()

    count = min(options.limit, len(images))
    if options.batch % workers or not workers <= options.batch <= count:
        sys.exit(f"train.py: {workers} workers cannot share batches of {options.batch} of {count} images; "
                 f"pass a --batch that is a multiple of {workers} and no more than the images")
    steps = count // options.batch  # per epoch; images that fill no batch wait for the next epoch's order
    torch.manual_seed(options.seed)
    network = DistributedDataParallel(make_network())
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.epochs * steps)
    if rank == 0:
        print(f"{steps * options.batch} training and {len(test_images)} test images, workers: {workers}, "
              f"batch {options.batch}, {sum(p.numel() for p in network.parameters())} parameters", flush=True)

    shuffler = torch.Generator().manual_seed(options.seed)  # the same on all workers
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(count, generator=shuffler)[:steps * options.batch]
        progress = Progress(f"epoch {epoch}/{options.epochs}", order.numel())
        loss = train_epoch(network, optimizer, schedule, images, labels, order.view(steps, workers, -1), progress)
        totals = torch.tensor([loss / workers, count_right(network.module, test_images, test_labels)], dtype=torch.float64)
        dist.all_reduce(totals)
        loss, right = totals.tolist()
        progress.finish(f"loss {loss:.4f}  test accuracy {100 * right / len(test_images):.2f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
