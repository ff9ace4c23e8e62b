#!/usr/bin/env python3
"""Scripts for SageMaker's model-parallel library, started as its users start them: by a launcher with SM_HP_MP_PARAMETERS, or as a
job. The script makes the calls of the vendor's first example: digits, an epoch of training, an evaluation, checkpoints."""
import json
import os
import pathlib
import re
import sys
import tempfile

import ranks  # first: finds a Python with torch, and sets the path to shoal for children  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import warm
from tap import call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(TOP / "tests/job"))
from jobs import Jobs  # noqa: E402

SHOAL = os.path.abspath(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
ENVIRONMENT = dict(os.environ)
PYTHON = warm.start()
SECONDS_MAX = 240  # importing torch takes long when other tests run

SCRIPT = """
import argparse, math, os
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
import smdistributed.modelparallel.torch as smp

class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)

    def forward(self, x):
        return torch.flatten(F.max_pool2d(F.relu(self.conv(x)), 2), 1)

class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(54, 16), nn.Linear(16, 4)

    def forward(self, x):
        return F.log_softmax(self.two(F.relu(self.one(x))), 1)

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.back = Front(), Back()

    def forward(self, x):
        return self.back(self.front(x))

@smp.step
def train_step(args, model, scaler, data, target):
    with torch.autocast("cpu", torch.bfloat16, enabled=args.amp > 0):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    model.backward(scaler.scale(loss) if args.amp else loss)
    return output, loss

@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    guess = output.argmax(dim=1, keepdim=True)
    return loss, guess.eq(target.view_as(guess)).sum().item()

def train(args, model, scaler, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        _, losses = train_step(args, model, scaler, data, target)
        loss = losses.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
    return loss.item()

def test(model, loader, count):
    model.eval()
    total = correct = 0
    with torch.no_grad():
        for data, target in loader:
            losses, hits = test_step(model, data, target)
            total, correct = total + sum(losses), correct + sum(hits)
    return total / count, correct

def digits(count, seed):
    # A bright quarter of an image is its class.
    made = torch.Generator().manual_seed(seed)
    target = torch.randint(4, (count,), generator=made)
    data = torch.rand(count, 1, 8, 8, generator=made)
    for number, place in enumerate(target.tolist()):
        data[number, 0, place // 2 * 4:place // 2 * 4 + 4, place % 2 * 4:place % 2 * 4 + 4] += 1.0
    return TensorDataset(data, target)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", default="")
    parser.add_argument("--partial", type=int, default=1)
    parser.add_argument("--mp_parameters", default="")
    args = parser.parse_args()
    torch.manual_seed(1)
    smp.init()
    dataset, tests = digits(256, 1), digits(64, 2)
    whole = len(dataset)
    if smp.dp_size() > 1:
        dataset = Subset(dataset, range(smp.dp_rank(), whole, smp.dp_size()))
    loader = DataLoader(dataset, batch_size=16)
    model = Both()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)
    saved = os.path.join(args.folder, "digits.pt")
    if args.folder and os.path.exists(saved + ("_0" if args.partial else "")):
        checkpoint = smp.load(saved, partial=bool(args.partial))
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    for epoch in range(args.epochs):
        train(args, model, scaler, loader, optimizer)
        loss, correct = test(model, DataLoader(tests, batch_size=16), len(tests))
        scheduler.step()
    if args.folder and smp.dp_rank() == 0:
        if args.partial:
            parts = {"model_state_dict": model.local_state_dict(), "optimizer_state_dict": optimizer.local_state_dict()}
        else:
            parts = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        smp.save(parts, saved, partial=bool(args.partial))
    smp.barrier()
    losses = smp.allgather(loss, smp.DP_GROUP)
    assert all(math.isclose(each, losses[0]) for each in losses), losses
    assert loss < (10.0 if args.epochs < 6 else 0.18 if smp.dp_size() > 1 else 0.08), loss
    smp.barrier()
    print(f"rank {smp.rank()} of {smp.size()}: pp {smp.pp_rank()} dp {smp.dp_rank()} loss {loss:.6f} right {correct}", flush=True)

main()
"""


LARGE = """
import os, resource, sys
import torch
from torch import nn
from torch.nn import functional as F
import smdistributed.modelparallel.torch as smp

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 8, batch_first=True)
        self.two, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.one(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.two(x))))

class GPT(nn.Module):
    def __init__(self, width=512, layers=8, words=64):
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

@smp.step
def train_step(model, inputs, targets):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss

smp.init({"pipeline_parallel_degree": int(sys.argv[1]), "microbatches": 4})
torch.set_num_threads(1)
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (held + (400 << 20), -1))  # the model needs 385 MiB, torch another 80
torch.manual_seed(1)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = smp.DistributedModel(model), smp.DistributedOptimizer(optimizer)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    losses.append(train_step(model, torch.arange(64).view(4, 16), torch.arange(64).view(4, 16)).reduce_mean().item())
    optimizer.step()
print(f"rank {smp.rank()} has {sum(each.numel() for each in model.local_parameters()) * 16 >> 20} MiB, losses {losses[0]} {losses[-1]}")
"""


def a_model_larger_than_a_worker_trains():
    """With a limit of memory that one process exceeds."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(LARGE)
        script.flush()
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}  # so that freed memory is returned
        code, out, err = call(SHOAL, "run", "-n", "1", PYTHON, script.name, "1", env=environment, timeout=SECONDS_MAX)
        expect(code and "allocate memory" in out + err, out, err)
        code, out, err = call(SHOAL, "run", "-n", "2", PYTHON, script.name, "2", env=environment, timeout=SECONDS_MAX)
    expect(code == 0, out, err)
    found = re.findall(r"rank (\d) has (\d+) MiB, losses ([.\d]+) ([.\d]+)", out)
    expect(len(found) == 2 and sum(int(each[1]) for each in found) > 380, out)
    expect(all(float(last) < float(first) for _, _, first, last in found) and found[0][2:] == found[1][2:], out)


def trained(count, parameters, *words, launcher=None):
    """Runs the script on a number of processes. Returns the loss of rank 0's replica, and the number of right answers."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        environment = {**ENVIRONMENT, "SM_HP_MP_PARAMETERS": json.dumps(parameters)}
        code, out, err = call(*(launcher or [SHOAL, "run", "-n", str(count)]), PYTHON, script.name, *words, env=environment,
                              timeout=SECONDS_MAX)
    expect(code == 0, out, err)
    for rank in range(count):
        expect(f"rank {rank} of {count}: " in out, out, err)
    loss, right = re.search(r"rank 0 of .* loss ([.\d]+) right (\d+)", out).groups()
    return float(loss), int(right)


def two_partitions_train():
    for pipeline in ("interleaved", "simple"):
        trained(2, {"partitions": 2, "microbatches": 4, "pipeline": pipeline})


def partitions_give_what_one_process_gives():
    parameters = {"partitions": 1, "microbatches": 4}
    alone = trained(1, parameters)
    both = trained(2, {**parameters, "partitions": 2})
    expect(alone[1] == both[1] and abs(alone[0] - both[0]) < 1e-4, alone, both)


def replicas_of_partitions_train():
    trained(4, {"ddp": True, "microbatches": 4, "partitions": 2, "pipeline": "interleaved", "placement_strategy": "spread"})


def replicas_of_the_whole_model_train():
    trained(2, {"ddp": True, "microbatches": 2, "partitions": 1})


def scaled_losses_train():
    trained(2, {"partitions": 2, "microbatches": 4}, "--amp", "1")


def training_continues_from_files():
    """The loss after two epochs and two more is that of four, with partial and with whole files."""
    parameters = {"partitions": 2, "microbatches": 4}
    wanted = trained(2, parameters, "--epochs", "4")
    for partial in ("1", "0"):
        with tempfile.TemporaryDirectory() as folder:
            trained(2, parameters, "--epochs", "2", "--folder", folder, "--partial", partial)
            expect(sorted(os.listdir(folder)) == (["digits.pt_0", "digits.pt_1"] if partial == "1" else ["digits.pt"]), os.listdir(folder))
            found = trained(2, parameters, "--epochs", "2", "--folder", folder, "--partial", partial)
            expect(abs(found[0] - wanted[0]) < 1e-5 and found[1] == wanted[1], found, wanted)


def variables_of_open_mpi_suffice():
    """As SageMaker starts such scripts."""
    starts = ("import os, subprocess, sys\n"
              "port = sys.argv[1]\n"
              "def environment(rank):\n"
              "    kept = {name: value for name, value in os.environ.items() if name not in ('RANK', 'WORLD_SIZE')}\n"
              "    return {**kept, 'MASTER_PORT': port, **{f'OMPI_COMM_WORLD_{name}': str(value) for name, value in (\n"
              "            ('RANK', rank), ('SIZE', 2), ('LOCAL_RANK', rank), ('LOCAL_SIZE', 2))}}\n"
              "started = [subprocess.Popen(sys.argv[2:], env=environment(rank)) for rank in range(2)]\n"
              "sys.exit(max(each.wait() for each in started))\n")
    trained(2, {"partitions": 2, "microbatches": 4}, launcher=[sys.executable, "-c", starts, str(ranks.free_port())])


def a_job_trains():
    """The parameters of `distribution`, on one host and on two, with mpi's processes_per_host and with torchrun's."""
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}
    for hosts, launcher in ((1, "mpi"), (2, "mpi"), (2, "torch_distributed")):
        beside = {"enabled": True, "processes_per_host": 4 // hosts} if launcher == "mpi" else {"enabled": True}
        distribution = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, launcher: beside}
        more = {"workers_per_host": 4 // hosts} if launcher != "mpi" else {}
        with Jobs(PYTHON) as jobs:
            jobs.run(SCRIPT, framework="pytorch", instance_count=hosts, hyperparameters={"epochs": 7}, distribution=distribution, **more)
            expect(all(f"rank {rank} of 4: pp {rank % 2} dp {rank // 2}" in jobs.out for rank in range(4)), hosts, launcher, jobs.out, jobs.err)


def processes_that_do_not_fit_are_refused():
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        environment = {**ENVIRONMENT, "SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2})}
        code, out, err = call(SHOAL, "run", "-n", "3", PYTHON, script.name, env=environment, timeout=SECONDS_MAX)
        expect(code and "3 ranks cannot be divided into replicas of 2" in err, out, err)
        code, out, err = call(PYTHON, script.name, env=environment, timeout=SECONDS_MAX)
        expect(code and "this process is not a rank of a job" in err, out, err)


run_cases([two_partitions_train, partitions_give_what_one_process_gives, replicas_of_partitions_train, replicas_of_the_whole_model_train,
           scaled_losses_train, training_continues_from_files, variables_of_open_mpi_suffice, a_job_trains,
           a_model_larger_than_a_worker_trains,
           processes_that_do_not_fit_are_refused])
