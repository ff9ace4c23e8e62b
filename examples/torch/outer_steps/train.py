#!/usr/bin/env python3
"""Trains the network of ../fashion_mnist three times: with gradients averaged in every step, with parameters averaged every few
steps (LocalSGD), and with outer steps of Nesterov momentum (DiLoCo). Prints the result of each and the bytes that it sent.

Run: shoal run -n 2 python3 train.py, or torchrun --nproc-per-node 2 train.py (--help lists the options).
"""
import argparse
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler

import shoal.torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "fashion_mnist"))
import train as fashion_mnist  # noqa: E402

METHODS = ("synchronous", "local-sgd", "diloco")


def parse_options():
    parser = argparse.ArgumentParser(description="trains on Fashion-MNIST with and without averages in each step",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, default="/usr/share/datasets/fashion-mnist", metavar="DIR",
                        help="the four idx files, .gz or not")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="passes over the training images")
    parser.add_argument("--batch", type=int, default=120, metavar="N", help="images per step, over all workers together")
    parser.add_argument("--lr", type=float, default=0.05, metavar="X", help="learning rate of the first step; it falls to 0")
    parser.add_argument("--every", type=int, default=32, metavar="H", help="steps between two exchanges of a parameter")
    parser.add_argument("--fragments", type=int, default=4, metavar="F", help="fragments of DiLoCo, exchanged one after another")
    parser.add_argument("--delay", type=int, default=2, metavar="D", help="steps in which an exchange of DiLoCo is under way")
    parser.add_argument("--compress", default="none", choices=("none", "fp16", "bf16", "int8"), help="format of DiLoCo's data between hosts")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the first weights and of the order of images")
    parser.add_argument("--limit", type=int, default=60000, metavar="N", help="use only the first N training images")
    return parser.parse_args()


class Synchronous:
    """Averages gradients in each backward pass, which sends the same number of bytes each time."""

    def __init__(self, network):
        self.network, self.steps = shoal.torch.DistributedDataParallel(network), 0

    def step(self):
        self.steps += 1

    def finish(self):
        pass

    @property
    def sent_bytes(self):
        return self.steps * self.network._get_ddp_logging_data()["sent_bytes"]


class Outer:
    """Averages nothing in a backward pass."""

    def __init__(self, network, outer):
        self.network, self.outer = network, outer
        self.step, self.finish = outer.step, outer.finish

    @property
    def sent_bytes(self):
        return self.outer.stats()["sent_bytes"]


def prepare(method, network, options):
    if method == "synchronous":
        return Synchronous(network)
    if method == "local-sgd":
        return Outer(network, shoal.torch.LocalSGD(network, every=options.every))
    return Outer(network, shoal.torch.DiLoCo(network, every=options.every, fragments=options.fragments, delay=options.delay,
                                             compression=options.compress))


def train(method, options, images, labels):
    """Returns the trained network, the last epoch's mean loss on this worker, and the bytes that it sent."""
    torch.manual_seed(options.seed)
    run = prepare(method, fashion_mnist.make_network(), options)
    share = shoal.torch.divide_batch(options.batch)
    sampler = shoal.torch.DistributedSampler(min(options.limit, len(images)), seed=options.seed, drop_last=True)
    batches = BatchSampler(sampler, share.per_rank, drop_last=True)
    optimizer = torch.optim.SGD(run.network.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.epochs * len(batches))
    for epoch in range(options.epochs):
        loss_sum = 0.0
        sampler.set_epoch(epoch)
        for mine in batches:
            loss = cross_entropy(run.network(fashion_mnist.scaled(images[mine])), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.step()
            loss_sum += loss.item()
    run.finish()
    return run.network, loss_sum / len(batches), run.sent_bytes


def main():
    options = parse_options()
    images, labels = fashion_mnist.read_images(options.data, "train")
    test_images, test_labels = fashion_mnist.read_images(options.data, "t10k")
    dist.init_process_group("shoal", init_method="shoal://")
    if dist.get_rank() == 0:
        print(f"workers: {dist.get_world_size()}, {shoal.torch.divide_batch(options.batch).per_rank} images each in a step", flush=True)
    for method in options.methods:
        begun_s = time.monotonic()
        network, loss, sent_bytes = train(method, options, images, labels)
        took_s = time.monotonic() - begun_s
        totals = torch.tensor([loss / dist.get_world_size(), fashion_mnist.count_right(network, test_images, test_labels)],
                              dtype=torch.float64)
        dist.all_reduce(totals)
        loss, right = totals.tolist()
        if dist.get_rank() == 0:
            print(f"{method:12} loss {loss:.4f}  test accuracy {100 * right / len(test_images):.2f} %  "
                  f"{sent_bytes / 1e6:8.2f} MB sent by each worker  {took_s:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
