#!/usr/bin/env python3
"""Trains a small GPT on the bytes of a text, its weights sharded over as many workers as were started (FSDP2), or its layers
divided among them (--pipeline), or each layer divided among neighbors (--tensor).

Run: shoal run -n 2 python3 train.py, or torchrun --nproc-per-node 2 train.py, or python3 train.py for one worker (--help
lists the options). A step's training data depend only on its number. So any number of workers trains the same, up to
rounding, and so does a run that was interrupted and continued from its checkpoint.
"""
import argparse
import math
import pathlib
import struct
import subprocess
import sys
import time

import numpy
import torch

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 7):
    sys.exit(f"train.py: FSDP2 runs on CPUs from torch 2.7 on, and this is torch {torch.__version__}; install a newer one")

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shoal.torch  # registers the back-end "shoal"

ADVICE = "run `apt install bible-kjv-text` or pass --data FILE, a text"
TOKENS = 256  # a token is a byte


def parse_options():
    parser = argparse.ArgumentParser(description="trains a small GPT on the bytes of a text",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, default="/usr/lib/bible.data", metavar="FILE",
                        help="a text, or the file of Debian's bible-kjv-text")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of the optimizer")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences per step, over all workers together")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="bytes of a sequence")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks of the network")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="width of the network; 64 for each head")
    parser.add_argument("--lr", type=float, default=2e-3, metavar="X", help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the first weights, the order and the sample")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR", help="continue from the last checkpoint in DIR, and write there")
    parser.add_argument("--save-every", type=int, default=100, metavar="N", help="steps from one checkpoint to the next")
    parser.add_argument("--sample", type=int, default=300, metavar="N", help="bytes of text to write at the end")
    parser.add_argument("--pipeline", metavar="NAME", help="divide the layers among the workers, with this schedule of Shoal: auto, "
                        "1f1b, zb-h1, v-half, ...")
    parser.add_argument("--replicate", action="store_true", help="with --pipeline: a stage may be on several workers, which divide the "
                        "sequences of each microbatch")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="divide each layer among N neighboring workers, which train on "
                        "the same sequences")
    parser.add_argument("--backend", default="shoal", metavar="NAME", help="back-end of torch.distributed, to compare")
    return parser.parse_args()


# ---- the text ----


def unpack_bible(packed):
    """Returns the text in Debian's bible.data: a header, offsets, and windows of text, each packed by compress(1) without
    its magic."""
    (windows,) = struct.unpack_from(">I", packed, 0x58)
    offsets = struct.unpack_from(f">{windows + 1}I", packed, 0x5C)
    pieces = [b"\x1f\x9d\x90" + packed[begin:end] for begin, end in zip(offsets, offsets[1:])]
    return b"".join(subprocess.run(["gzip", "-dc"], input=piece, stdout=subprocess.PIPE, check=True).stdout for piece in pieces)


def read_text(path):
    try:
        text = path.read_bytes()
        if text.startswith(b"EC02"):
            text = unpack_bible(text)
    except (OSError, struct.error, subprocess.CalledProcessError) as error:
        sys.exit(f"train.py: cannot read {path}: {error}; {ADVICE}")
    return torch.from_numpy(numpy.frombuffer(text, dtype=numpy.uint8).copy())


def draw_batch(text, options, step):
    """Returns this worker's share of the sequences of a step, and for each of their bytes the next one. In a pipeline all workers
    have all of them, and workers that divide layers have the same ones."""
    draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    begins = torch.randint(len(text) - options.context, (options.batch,), generator=draw)
    own = begins if options.pipeline else begins.chunk(dist.get_world_size() // options.tensor)[dist.get_rank() // options.tensor]
    rows = (own[:, None] + torch.arange(options.context + 1)).long()
    sequences = text[rows].long()
    return sequences[:, :-1], sequences[:, 1:]


# ---- the network ----


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        return self.mix(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


class Gpt(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, options.width)
        self.places = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, TOKENS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(network):
    """Shards the weights over all workers. A block's weights are whole only while the block needs them (FSDP2)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def divide_layers(network, options):
    """Divides each layer among neighbors. Workers with the same part of the layers average their gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // options.tensor, options.tensor), mesh_dim_names=("data", "tensor"))
    shoal.torch.tensor_parallel(network, mesh["tensor"])
    return shoal.torch.DistributedDataParallel(network, process_group=mesh.get_group("data"))


def divide(network, options):
    """Divides the network's units among the workers, so that a step is short. Each keeps its own ones."""
    microbatches = min(options.batch, 2 * dist.get_world_size())
    example = torch.zeros(-(-options.batch // microbatches), options.context, dtype=torch.long)
    pipeline = shoal.torch.Pipeline(network, example, microbatches=microbatches, schedule=options.pipeline, loss=loss_of,
                                    replicate="auto" if options.replicate else None)
    tell(pipeline.explain())
    return pipeline


# ---- checkpoints: a folder for each, named by its step; every worker writes the shards it has ----


def find_checkpoint(folder):
    """Returns the step of the last complete checkpoint in a folder, or 0 if there is none."""
    whole = [path.parent.name for path in folder.glob("step-*/.metadata")]  # .metadata is written last
    return max((int(name[len("step-"):]) for name in whole), default=0)


BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # each worker has the states of other weights


def save(folder, step, network, optimizer, options):
    weights, moments = get_state_dict(network, optimizer, options=BY_NAME)
    if options.tensor > 1:
        weights, moments = (shoal.torch.tensor.whole(network, each) for each in (weights, moments))
    checkpoint.save({"network": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")


def load(folder, step, network, optimizer, options):
    weights, moments = get_state_dict(network, optimizer, options=BY_NAME)
    if options.tensor > 1:
        weights, moments = (shoal.torch.tensor.whole(network, each) for each in (weights, moments))
    checkpoint.load({"network": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
    if options.tensor > 1:
        weights, moments = (shoal.torch.tensor.own(network, each) for each in (weights, moments))
    set_state_dict(network, optimizer, model_state_dict=weights, optim_state_dict=moments, options=BY_NAME)


# ---- the run ----


def learning_rate(options, step):
    """Rises over the first tenth of the steps, then falls to zero as half a cosine."""
    rise = options.steps / 10
    return options.lr * (step / rise if step < rise else 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (options.steps - rise)))


def mean_of_workers(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def loss_of(result, following):
    return cross_entropy(result.flatten(0, 1), following.flatten())


def descend(network, sequences, following):
    """Computes the gradients of a step. Returns the loss."""
    if isinstance(network, shoal.torch.Pipeline):
        loss = network.step(sequences, following)
        network.clip_grad_norm_(1.0)
        return loss
    loss = loss_of(network(sequences), following)
    loss.backward()
    if isinstance(network, shoal.torch.DistributedDataParallel):
        shoal.torch.tensor.clip_grad_norm_(network.module, 1.0)
        return loss
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    return loss


def odds_of_next(network, sequence):
    """Returns how likely each byte is to follow. All workers call it."""
    result = network(sequence)
    if isinstance(network, shoal.torch.Pipeline):  # the result is on the worker of the last stage
        results = [result]
        dist.broadcast_object_list(results, network.schedule.rank_of(network.schedule.stages - 1))
        result = results[0]
    return result[0, -1].softmax(0)


@torch.no_grad()
def write_sample(network, options, prompt):
    """Continues a prompt. Every worker computes the same text, because each has only a part of the weights."""
    if not options.pipeline and options.tensor == 1:
        network.set_reshard_after_forward(False)  # the weights stay whole from the first byte on
    draw = torch.Generator().manual_seed(options.seed)
    text = list(prompt)
    for _ in range(options.sample):
        odds = odds_of_next(network, torch.tensor([text[-options.context:]]))
        text.append(torch.multinomial(odds, 1, generator=draw).item())
    return bytes(text).decode("ascii", errors="replace")


def train(network, optimizer, text, options, done):
    """Takes the steps after the first `done`. Rank 0 prints the loss."""
    begun_s = time.monotonic()
    for step in range(done + 1, options.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(options, step)
        sequences, following = draw_batch(text, options, step)
        optimizer.zero_grad()
        loss = descend(network, sequences, following)
        optimizer.step()
        if step % 20 == 0 or step in (1, options.steps):
            mean = mean_of_workers(loss.item())
            tokens = (step - done) * options.batch * options.context / (time.monotonic() - begun_s)
            tell(f"step {step:4}/{options.steps}  loss {mean:.4f}  {tokens:6.0f} tokens/s")
        if options.checkpoint and (step % options.save_every == 0 or step == options.steps):
            save(options.checkpoint, step, weights_of(network), optimizer, options)
            tell(f"wrote {options.checkpoint}/step-{step}")


def weights_of(network):
    """Returns the module with this worker's weights."""
    return network.module if isinstance(network, (shoal.torch.Pipeline, shoal.torch.DistributedDataParallel)) else network


def tell(line):
    if dist.get_rank() == 0:
        print(line, flush=True)


def main():
    options = parse_options()
    text = read_text(options.data)
    dist.init_process_group(options.backend, init_method="shoal://")  # with any launcher; without one: one worker
    workers = dist.get_world_size()
    if options.tensor < 1 or workers % options.tensor or (options.pipeline and options.tensor > 1):
        sys.exit(f"train.py: --tensor {options.tensor} has to divide the number of workers, {workers}, and goes without --pipeline")
    shares = workers // options.tensor
    if not options.pipeline and (options.batch % shares or options.batch < shares):
        sys.exit(f"train.py: {shares} workers cannot share batches of {options.batch} sequences; "
                 f"pass a --batch that is a multiple of {shares}")
    if len(text) <= options.context or options.width % 64:
        sys.exit(f"train.py: {options.data} has {len(text)} bytes, --context is {options.context} and --width {options.width}; "
                 "a text has to be longer than the context, and the width a multiple of 64")

    torch.manual_seed(options.seed)  # every worker makes the same whole network and keeps its part
    network = Gpt(options)
    count = sum(parameter.numel() for parameter in network.parameters())
    network = divide(network, options) if options.pipeline else divide_layers(network, options) if options.tensor > 1 else shard(network)
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    tell(f"{len(text)} bytes of text, {count} parameters, "
         f"workers: {workers}, batch {options.batch} x {options.context}")
    done = find_checkpoint(options.checkpoint) if options.checkpoint else 0
    if done:
        load(options.checkpoint, done, weights_of(network), optimizer, options)
        tell(f"going on from {options.checkpoint}/step-{done}")
    train(network, optimizer, text, options, done)
    tell(write_sample(network, options, b"And God said"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
