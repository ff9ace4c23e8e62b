"""One rank of the job that bench/bench_watching.py starts: trains a small network of torch's over Shoal and prints a line each
step, so that its agent has something to watch. Rank 0 writes the time of the steps to output/data/steps.json.

WATCHED_STEPS is the number of steps, WATCHED_BATCHES the number of batches per step; the gradients of all but the last batch
add up on their rank."""
import contextlib
import json
import os
import time
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn

import shoal.torch  # noqa: F401  registers the back-end "shoal"

WARMUPS = 5
BATCH = 64


def main():
    steps, batches = int(os.environ["WATCHED_STEPS"]), int(os.environ["WATCHED_BATCHES"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("shoal")
    network = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                                                                nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    times = []
    for step in range(WARMUPS + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        for batch in range(batches):
            with network.no_sync() if batch < batches - 1 else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(network(images), labels)
                loss.backward()
        optimizer.step()
        rate = batches * BATCH / (time.perf_counter() - began)
        print(f"step {step} loss={loss.item():.4f}; images_per_s={rate:.0f};", flush=True)
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        ms = [one * 1e3 for one in times[WARMUPS:]]
        Path(os.environ["SM_OUTPUT_DATA_DIR"], "steps.json").write_text(json.dumps(
            {"mean_ms": round(mean(ms), 4), "median_ms": round(median(ms), 4), "seconds": round(sum(ms) / 1e3, 2)}))
    dist.destroy_process_group()


main()
