#!/usr/bin/env python3
"""Scripts for SageMaker's data-parallel library over Shoal: in the style since 1.4, in the earlier one, and messages."""
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile

import ranks  # first: finds a Python with torch, and sets the path to shoal for children  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import warm
from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
SMDDP = TOP / "python/smdistributed"
SHOAL = os.environ.get("SHOAL_COMMAND", TOP / "build/shoal")
ENVIRONMENT = dict(os.environ)
PYTHON = warm.start()
SECONDS_MAX = 240  # importing torch takes long when other tests run

# Both scripts train this: each of two workers has half of a batch and gets the weights that the whole batch gives.
PROBLEM = """
import torch
torch.manual_seed(3)
inputs, targets = torch.randn(8, 4), torch.randn(8, 2)

def train(network, inputs, targets):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in network.parameters()])

def make_network():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))

def check(weights):
    assert torch.allclose(weights, train(make_network(), inputs, targets), atol=1e-6), weights
"""

SINCE_1_4 = PROBLEM + """
import os
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import smdistributed.dataparallel.torch.torch_smddp

dist.init_process_group(backend="smddp")
rank, size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
assert dist.get_backend() == "smddp" and os.environ["SMDATAPARALLEL_LOCAL_RANK"] == str(local_rank)
check(train(DDP(make_network()), inputs.chunk(size)[rank], targets.chunk(size)[rank]))

# Calls that the original documents.
x = torch.full((5,), float(rank + 1))
dist.all_reduce(x)
assert x.tolist() == [3.0] * 5, x
dist.broadcast(x.fill_(rank), src=1)
assert x.tolist() == [1.0] * 5, x
dist.reduce(x, dst=0, op=dist.ReduceOp.MAX)
parts = [torch.empty(5) for _ in range(size)]
dist.all_gather(parts, torch.full((5,), float(rank)))
assert [part[0].item() for part in parts] == [0.0, 1.0], parts
dist.barrier()

# Calls that the original refuses.
beside = dist.new_group(backend="gloo")
dist.all_reduce(x.fill_(1), group=beside)
assert x.tolist() == [2.0] * 5, x
time.sleep(2)  # Gloo's thread frees the tensor when it gets Python's lock; a process that ends before is aborted
average = torch.tensor([float(rank)])
dist.all_reduce(average, op=dist.ReduceOp.AVG)
assert average.item() == 0.5, average
whole = torch.empty(2)
dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
assert whole.tolist() == [0.0, 1.0], whole
dist.reduce_scatter_tensor(average, torch.tensor([1.0, 2.0]))
assert average.item() == [2.0, 4.0][rank], average
mine = dist.new_group([0])
if rank == 0:
    dist.all_reduce(average, group=mine)
dist.destroy_process_group()
print(f"rank {rank} trained")
"""

BEFORE_1_4 = PROBLEM + """
import shoal.torch
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
import smdistributed.dataparallel.torch.parallel
assert smdistributed.dataparallel.torch.parallel.DistributedDataParallel is DDP

assert dist.is_available() and not dist.is_initialized()
dist.init_process_group("whatever", timeout="is ignored")
assert dist.is_initialized()
rank, size = dist.get_rank(dist.group.WORLD), dist.get_world_size()
assert (size, dist.get_local_rank()) == (2, rank)
network = DDP(make_network(), None, None, False, dist.group.WORLD, 1)
assert isinstance(network, shoal.torch.DistributedDataParallel) and network.bucket_bytes_cap == 1 << 20
assert isinstance(network, torch.nn.parallel.DistributedDataParallel) and not network.forward_sync_buffers
with network.no_sync():
    network(inputs).sum().backward()
check(train(network, inputs.chunk(size)[rank], targets.chunk(size)[rank]))

x = torch.tensor([float(rank), 4.0])
assert dist.all_reduce(x, dist.ReduceOp.AVERAGE, dist.group.WORLD, False) is None
assert x.tolist() == [0.5, 4.0], x
handle = dist.all_reduce(x, op=dist.ReduceOp.SUM, async_op=True)
handle.wait()
assert x.tolist() == [1.0, 8.0], x
dist.broadcast(x.fill_(rank), 1)
assert x.tolist() == [1.0, 1.0], x
dist.reduce(x, 1, dist.ReduceOp.MIN)
parts = [torch.empty(1) for _ in range(size)]
dist.all_gather(parts, torch.tensor([float(rank)]))
assert [part.item() for part in parts] == [0.0, 1.0], parts
swapped = torch.empty(2)
dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
assert swapped.tolist() == [[0.0, 10.0], [1.0, 11.0]][rank], swapped
dist.barrier()
print(f"rank {rank} trained")
"""


def python(text, launcher=(), env=ENVIRONMENT):
    """Runs a script; returns exit code, stdout, stderr."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "train.py"
        script.write_text(text)
        return call(*launcher, PYTHON, script, env=env, timeout=SECONDS_MAX)


def trains(text, launcher, env=ENVIRONMENT):
    code, out, err = python(text, launcher, env)
    expect(code == 0 and all(out.count(f"rank {rank} trained") == 1 for rank in range(2)), code, out, err)
    return out + err


def alone():
    """Returns an environment without a launcher."""
    return {name: value for name, value in ENVIRONMENT.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def a_script_since_1_4_trains():
    told = trains(SINCE_1_4, [SHOAL, "run", "-n", "2"])
    expect(told.count("Running smdistributed.dataparallel v") == 1 and told.count("SMDDP: Single node mode") == 1, told)
    expect("deprecated since" not in told, told)


def a_script_before_1_4_trains_and_is_told_what_to_write_now():
    told = trains(BEFORE_1_4, [SHOAL, "run", "-n", "2"])
    expect("deprecated since 1.4.0" in told and 'init_process_group(backend="smddp")' in told, told)


def mpirun_starts_it_as_sagemaker_does():
    if not shutil.which("mpirun.openmpi"):
        raise Skip("no Open MPI here")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    port = f"SMDATAPARALLEL_SERVER_PORT={ranks.free_port()}"
    trains(SINCE_1_4, ["mpirun.openmpi", *root, "--oversubscribe", "-n", "2", "-x", port], alone())


def without_the_import_torch_does_not_know_the_name():
    code, out, err = python("import torch.distributed as dist\n"
                            "dist.init_process_group('smddp', store=dist.HashStore(), rank=0, world_size=1)\n")
    expect(code != 0 and "smddp" in err.splitlines()[-1], out, err)


def outside_a_job_the_old_api_says_so():
    code, out, err = python("import smdistributed.dataparallel.torch.distributed as dist\nassert not dist.is_available()\n"
                            "dist.init_process_group()\n", env=alone())
    expect(code == 1 and "exceptions.SMDDPError: this process is not a rank of a job" in err and "shoal run" in err, out, err)
    code, out, err = python("import smdistributed.dataparallel.torch.distributed as dist\ndist.get_local_rank()\n",
                            env={**alone(), "RANK": "0", "WORLD_SIZE": "1"})
    expect(code == 1 and "set LOCAL_RANK" in err, out, err)


def smddprun(*words, **variables):
    """Runs the command that mpirun starts on each rank, as a module."""
    env = {name: value for name, value in alone().items() if not name.startswith(("LOCAL_", "MASTER_"))}
    return call(sys.executable, "-m", "smdistributed.dataparallel._smddprun", *words, env={**env, **variables})


RANK_3 = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SMDATAPARALLEL_SERVER_ADDR": "algo-1", "SMDATAPARALLEL_SERVER_PORT": "7592"}


def smddprun_tells_the_script_which_rank_it_is():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SMDATAPARALLEL_LOCAL_RANK")
    asked = ["sh", "-c", "echo " + " ".join(f"${name}" for name in names) + " $1", "sh", "an argument"]
    expect(smddprun(*asked, **RANK_3) == (0, "3 4 1 2 algo-1 7592 1 an argument\n", ""), smddprun(*asked, **RANK_3))
    code, out, err = smddprun(*asked, **{**RANK_3, "RANK": "2", "MASTER_PORT": "1234"})
    expect((code, out, err) == (0, "2 4 1 2 algo-1 1234 1 an argument\n", ""), "what is set stays", code, out, err)


def smddprun_ends_as_the_script_does_or_says_why_it_cannot_start_it():
    for words, variables, code, told in (
            (["sh", "-c", "exit 7"], RANK_3, 7, ""),
            (["/nowhere/python"], RANK_3, 127, "smddprun: there is no program '/nowhere/python'"),
            ([SMDDP / "README.md"], RANK_3, 126, "README.md' cannot be started: Permission denied"),
            ([], RANK_3, 2, "smddprun: no program is named; usage: mpirun"),
            (["-n", "2", "true"], RANK_3, 2, "smddprun: no program is named; usage: mpirun"),
            (["true"], {}, 2, "nothing says which rank this is (OMPI_COMM_WORLD_RANK and _SIZE, or RANK and WORLD_SIZE)")):
        got, out, err = smddprun(*words, **variables)
        expect(got == code and told in err and out == "", words, got, out, err)
    code, out, err = smddprun("--help")
    expect(code == 0 and out.startswith("usage: mpirun"), code, out, err)


def libraries_that_look_for_it_find_it():
    # As transformers and accelerate do: the platform's flag, and whether the package can be imported.
    probe = ("import importlib.util, json, os\n"
             "assert json.loads(os.environ['SM_FRAMEWORK_PARAMS'])['sagemaker_distributed_dataparallel_enabled']\n"
             "assert importlib.util.find_spec('smdistributed') is not None\n"
             "import smdistributed.dataparallel.torch.torch_smddp, torch.distributed as dist\n"
             "dist.init_process_group(backend='smddp')\n"
             "print('rank', int(os.environ['SMDATAPARALLEL_LOCAL_RANK']), 'trained')\n"
             "dist.destroy_process_group()\n")
    flag = json.dumps({"sagemaker_distributed_dataparallel_enabled": True})
    trains(probe, [SHOAL, "run", "-n", "2"], {**ENVIRONMENT, "SM_FRAMEWORK_PARAMS": flag})


def the_name_is_shared_with_other_packages():
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "smdistributed/another").mkdir(parents=True)
        (pathlib.Path(folder) / "smdistributed/another/__init__.py").write_text("")
        code, out, err = python("import smdistributed.another, smdistributed.dataparallel, smdistributed.modelparallel\n",
                                env={**ENVIRONMENT, "PYTHONPATH": f"{folder}:{ENVIRONMENT['PYTHONPATH']}"})
        expect(code == 0, out, err)


def it_installs_alone():
    if not importlib.util.find_spec("pip") or not importlib.util.find_spec("setuptools"):
        raise Skip("no pip and setuptools here")
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/source", f"{folder}/target"
        shutil.copytree(SMDDP, source)  # pip leaves files in the folder in which it builds
        code, out, err = call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                              "--no-build-isolation", "--target", target, source, timeout=SECONDS_MAX)
        expect(code == 0, out, err)
        code, out, err = python("import smdistributed.dataparallel.torch.parallel as p; print(p.__file__)\n",
                                env={**ENVIRONMENT, "PYTHONPATH": f"{target}:{os.environ['PYTHONPATH']}"})
        expect(code == 0 and out.startswith(target), out, err)
        expect(not os.path.exists(f"{target}/smdistributed/__init__.py"))
        missing = [path for path in SMDDP.rglob("*.py") if not os.path.exists(f"{target}/smdistributed/{path.relative_to(SMDDP)}")]
        expect(not missing, "not in the package:", missing)
        # In a process of its own, because warm ones have imported torch already.
        code, out, err = call(sys.executable, "-c", "import torch.sagemaker.utils.utils as u; print(u.__file__)", timeout=SECONDS_MAX,
                              env={**ENVIRONMENT, "PYTHONPATH": f"{target}:{os.environ['PYTHONPATH']}"})
        expect(code == 0 and out.startswith(target), out, err)
        code, out, err = call(f"{target}/bin/smddprun", "sh", "-c", "echo $RANK of $WORLD_SIZE",
                              env={**ENVIRONMENT, "PYTHONPATH": f"{target}:{os.environ['PYTHONPATH']}", **RANK_3})
        expect(code == 0 and out.endswith(" of 4\n"), code, out, err)


run_cases([
    a_script_since_1_4_trains,
    a_script_before_1_4_trains_and_is_told_what_to_write_now,
    mpirun_starts_it_as_sagemaker_does,
    without_the_import_torch_does_not_know_the_name,
    outside_a_job_the_old_api_says_so,
    smddprun_tells_the_script_which_rank_it_is,
    smddprun_ends_as_the_script_does_or_says_why_it_cannot_start_it,
    libraries_that_look_for_it_find_it,
    the_name_is_shared_with_other_packages,
    it_installs_alone,
])
