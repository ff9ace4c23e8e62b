"""Training scripts that tests of jobs pass to other projects' launchers."""

# Runs script.py, in the same folder, in an interpreter that has imported the modules that it needs (warm.py).
HAND_OVER = """
import os
import sys

python, script = {python!r}, os.path.join(os.path.dirname(os.path.abspath(__file__)), "script.py")
os.execv(python, [python, script, *sys.argv[1:]])
"""

# Any backend: `--backend smddp` or shoal. Each rank prints a line and also writes it to a file; rank 0 writes a model; with
# `--fails RANK` that rank raises.
TRAIN = """
import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
parser.add_argument("--steps", type=int)
parser.add_argument("--fails", type=int, default=-1)
args = parser.parse_args()
if args.backend == "smddp":
    assert os.environ["SMDATAPARALLEL_LOCAL_RANK"] == os.environ["LOCAL_RANK"], "smddprun has told the rank"
    import smdistributed.dataparallel.torch.torch_smddp
else:
    import shoal.torch
dist.init_process_group(args.backend)
rank, size = dist.get_rank(), dist.get_world_size()
if rank == args.fails:
    raise ValueError(f"rank {rank} has no data")

# Each rank has its share of a batch, and gets the weights that the whole batch gives. Neither DDP nor an optimizer: importing
# them takes longer than all the rest.
torch.manual_seed(3)
inputs, targets = torch.randn(16, 4), torch.randn(16, 2)

def train(inputs, targets, average):
    weights = torch.ones(4, 2, requires_grad=True)
    for _ in range(args.steps):
        torch.nn.functional.mse_loss(inputs @ weights, targets).backward()
        average(weights.grad)
        weights = (weights - 0.1 * weights.grad).detach().requires_grad_()
    return weights.detach()

weights = train(inputs.chunk(size)[rank], targets.chunk(size)[rank], lambda grad: dist.all_reduce(grad, dist.ReduceOp.AVG))
assert torch.allclose(weights, train(inputs, targets, lambda grad: None), atol=1e-6), weights
total = torch.full((1000,), float(rank + 1))
dist.all_reduce(total)
told = f"rank {rank} of {size}, local rank {os.environ['LOCAL_RANK']}: {total[999].item()} by {dist.get_backend()}\\n"
print(told, end="", flush=True)
with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], f"rank-{rank}"), "w") as file:
    file.write(told)
if rank == 0:
    torch.save(weights, os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
dist.destroy_process_group()
"""

# Without PyTorch, whose import is most of the cost of TRAIN: ranks join like those of a C program.
PLAIN = """
import argparse
import ctypes
import os

from shoal import _native

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--fails", type=int, default=-1)
args = parser.parse_args()
library, context, comm = _native.load(), _native.create_context(), ctypes.c_void_p()

def check(status):
    if status:
        raise RuntimeError(str(_native.error_of(status, context, comm)))

check(library.comm_create(context, None, ctypes.byref(comm)))
rank, size, place = library.comm_rank(comm), library.comm_size(comm), _native.Place()
check(library.comm_place(comm, rank, ctypes.byref(place)))
total = (ctypes.c_float * 1000)()
for step in range(args.steps):
    if rank == args.fails:
        raise ValueError(f"rank {rank} has no data")
    total[:] = [float(rank + 1)] * 1000
    check(library.allreduce(comm, total, total, 1000, _native.FLOAT32, _native.SUM, None))
told = f"rank {rank} of {size}, local rank {place.local_rank}: {total[999]} by C\\n"
print(told, end="", flush=True)
with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], f"rank-{rank}"), "w") as file:
    file.write(told)
if rank == 0:
    open(os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"), "w").close()
check(library.comm_finalize(comm))
"""

# The script of a cell's estimator: each rank reads its share of the channel's numbers. The model is the value that all
# agree on.
CELL = """
import argparse
import json
import os
import shutil

import torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--fails", type=int)
args = parser.parse_args()
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == args.fails:
    raise ValueError(f"rank {rank} has no data")
with open(os.path.join(os.environ["SM_CHANNEL_TRAINING"], "numbers.json")) as file:
    mine = torch.tensor(json.load(file), dtype=torch.float32).chunk(size)[rank]
print(f"rank {rank} of {size} has {len(mine)} examples", flush=True)
weights = torch.zeros(2, requires_grad=True)
for _ in range(args.steps):
    (mine @ weights - 1).square().mean().backward()
    dist.all_reduce(weights.grad, dist.ReduceOp.AVG)
    weights = (weights - 0.01 * weights.grad).detach().requires_grad_()
if rank == 0:
    model = {"ranks": size, "backend": dist.get_backend(), "weights": [round(weight, 4) for weight in weights.tolist()]}
    with open(os.path.join(os.environ["SM_MODEL_DIR"], "model.json"), "w") as file:
        json.dump(model, file)
    shutil.copy(os.path.join(os.environ["SM_INPUT_CONFIG_DIR"], "hyperparameters.json"), os.environ["SM_MODEL_DIR"])
dist.destroy_process_group()
"""
