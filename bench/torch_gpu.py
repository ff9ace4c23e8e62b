#!/usr/bin/env python3
"""Times training steps of DistributedDataParallel on GPUs: prints one JSON object for each model, way and round.
bench/bench_gpu.py runs it, with a python whose torch was built for CUDA. Each of N ranks uses the next GPU, modulo the GPUs.
Without torchvision there is no ResNet-50:

  build/shoal run -n 2 python3 bench/torch_gpu.py [resnet50] [gpt2]
  build/shoal run -n 2 python3 bench/torch_gpu.py --rounds 2 --way alone --way "Shoal's class" gpt2

Ways: each rank by itself; torch's class over Shoal, without and with gradient_as_bucket_view; Shoal's class; torch's class
over Gloo, and over NCCL if each rank has its own GPU."""
import argparse
import datetime
import json
import os
import time

import shoal.torch
import torch
import torch.distributed as dist
from torch import nn

try:
    import torchvision
except ImportError:
    torchvision = None

WARMUPS, STEPS = 4, 5
WAYS = ("alone", "Shoal", "Shoal, views", "Shoal's class", "Gloo", "NCCL")


class Gpt2(nn.Module):
    """GPT-2 small's shapes, without positions. The head is the embedding, whose gradient is complete only at the very end."""

    def __init__(self, width=768, layers=12, words=50257):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, batch_first=True, norm_first=True)
                                    for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch):
        hidden = self.words(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).flatten(0, 1)


def resnet50():
    batch, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(1000, (64,), device="cuda")
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    return model, batch.to(memory_format=torch.channels_last), labels


def gpt2():
    batch = torch.randint(50257, (8, 512), device="cuda")
    return Gpt2().cuda(), batch, batch.flatten()


MODELS = {"resnet50": resnet50, "gpt2": gpt2} if torchvision else {"gpt2": gpt2}


class Training:
    def __init__(self, model, wrap):
        torch.manual_seed(1)
        plain, self.batch, self.labels = MODELS[model]()
        self.model = wrap(plain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.batch), self.labels)
        loss.backward()
        self.optimizer.step()


def time_ms(training, beside, steps):
    """Returns the time of a step on the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier(group=beside)
    begin = time.perf_counter()
    for _ in range(steps):
        training.step()
    torch.cuda.synchronize()
    taken = torch.tensor([(time.perf_counter() - begin) / steps * 1e3])
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=beside)
    return taken.item()


def ways(beside):
    torchs = nn.parallel.DistributedDataParallel
    rows = {"alone": lambda model: model, "Shoal": torchs, "Shoal, views": lambda model: torchs(model, gradient_as_bucket_view=True),
            "Shoal's class": shoal.torch.DistributedDataParallel, "Gloo": lambda model: torchs(model, process_group=beside)}
    if dist.get_world_size() <= torch.cuda.device_count():
        group = dist.new_group(backend="nccl")
        rows["NCCL"] = lambda model: torchs(model, process_group=group)
    return rows


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"all of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (5)")
    parser.add_argument("--way", action="append", choices=WAYS, metavar="NAME", help=f"only these: {', '.join(WAYS)}")
    options = parser.parse_args()
    for model in options.models:
        if model not in MODELS:
            parser.error(f"there is no model {model}; there are {', '.join(MODELS)}")
    return options


def main(options):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:shoal", timeout=datetime.timedelta(seconds=60))
    beside = dist.new_group(backend="gloo")
    for model in options.models or MODELS:
        trainings = {way: Training(model, wrap) for way, wrap in ways(beside).items() if way in (options.way or WAYS)}
        for training in trainings.values():
            time_ms(training, beside, WARMUPS)
        for turn in range(options.rounds):
            for way, training in trainings.items():
                row = {"model": model, "way": way, "round": turn, "step_ms": time_ms(training, beside, STEPS)}
                if dist.get_rank() == 0:
                    print(json.dumps({**row, "torch": torch.__version__, "ranks": dist.get_world_size()}), flush=True)
        del training, trainings
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
