#!/usr/bin/env python3
"""Jobs that train with PyTorch and the backend "shoal" over two hosts. tests/python/with_torch.py starts this if there is a
PyTorch."""
import re

import torch  # noqa: F401
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import warm
from jobs import DATA_PARALLEL, Jobs, names_in
from shoal.job.document.folder import JobFolder
from shoal.job.watching import losses
from shoal.job.watching.metrics import Reader
from tap import expect, run_cases

PYTHON = warm.start()

TRAIN = """
    import argparse, os
    import torch, torch.distributed as dist
    import shoal.torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    steps = parser.parse_args().steps
    dist.init_process_group("shoal")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(steps):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.environ.get("FAILS") == str(dist.get_rank()) and step == 1:
            raise ValueError("a bad sample")
    print("weights", sum(parameter.double().sum().item() for parameter in model.parameters()), flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
    dist.destroy_process_group()
"""


def hosts_train_the_same_model():
    with Jobs(PYTHON) as jobs:
        jobs.run(TRAIN, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, hyperparameters={"steps": 3})
        weights = re.findall(r"\| weights (\S+)$", jobs.out, re.M)
        expect(len(weights) == 4 and len(set(weights)) == 1, jobs.out, jobs.err)
        expect(names_in(jobs.folder() / "model.tar.gz") == ["model.pt"])


def rank_that_fails_ends_all_hosts_and_is_named():
    with Jobs() as jobs:
        status = jobs.run(TRAIN, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, hyperparameters={"steps": 1000},
                          environment={"FAILS": "3"}, code=1)
        expect(status["failure_reason"] == "algo-2: rank 3 exited with code 1: ValueError: a bad sample", status, jobs.told())
        jobs.wait_for_silence()


# Trains until the job has recorded the waits of both ranks, which takes a few samples of its metrics.
LOADS = """
    import json, os, time
    import torch, torch.distributed as dist
    import shoal.torch

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            time.sleep(0.1)
            return torch.ones(8)

    def are_recorded():
        path = "../../../metrics.jsonl"
        lines = map(json.loads, open(path).read().rpartition("\\n")[0].splitlines()) if os.path.exists(path) else ()
        recorded = torch.tensor({line["rank"] for line in lines if line["name"] == "shoal/input"} == {0, 1}).int()
        dist.all_reduce(recorded, dist.ReduceOp.MIN)
        return bool(recorded)

    dist.init_process_group("shoal")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=1):
        model(batch).mean().backward()
        if are_recorded():
            break
    dist.destroy_process_group()
"""


def waits_for_data_are_seen():
    """The script has a plain DataLoader. Its time in next() becomes a metric of each rank, and the report's first line of losses."""
    with Jobs() as jobs:
        jobs.run(LOADS, workers_per_host=2, distribution=DATA_PARALLEL)
        folder = JobFolder("job", jobs.jobs)
        reader = Reader(folder)
        reader.read()
        waits = {rank: series.mean() for (_, rank), series in reader.of("shoal/input").items()}
        expect(sorted(waits) == [0, 1] and all(0 < share <= 1 for share in waits.values()), waits, jobs.told())
        expect(losses.losses_of(reader)[0].share > 0 and not list(folder.traces.glob(".*.input")), list(folder.traces.iterdir()))


def a_script_of_version_2_trains():
    """As in the vendor's notebooks for Llama: torchrun, shards, and a model that tensor-parallel ranks divide."""
    script = """
        import torch, torch.distributed as dist
        import torch.sagemaker as tsm
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.sagemaker.grad_norm import clip_grad_norm_

        dist.init_process_group("shoal")
        tsm.init()
        torch.manual_seed(1)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        plain._tp_plan = {"0": "colwise", "2": "rowwise"}
        model = FSDP(tsm.transform(plain))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.ones(3, 4)).square().sum().backward()
            norm = clip_grad_norm_(model, 1.0)
            optimizer.step()
        print(f"rank {tsm.state.rank} of {tsm.state.world_size}: tensor {tsm.state.tp_rank} shards {model.process_group.size()} {norm:.4f}")
    """
    parameters = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2, "sm_activation_offloading": True, "activation_loading_horizon": 2}
    distribution = {"torch_distributed": {"enabled": True}, "mpi": {"enabled": False, "processes_per_host": 4},
                    "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}
    with Jobs() as jobs:
        jobs.run(script, distribution=distribution, framework="pytorch")
        found = re.findall(r"rank (\d) of 4: tensor (\d) shards 2 ([\d.]+)", jobs.out)
        expect(sorted(each[:2] for each in found) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], jobs.out, jobs.err)
        expect(len({each[2] for each in found}) == 1, found)
        expect("sm_activation_offloading has no effect" in jobs.out + jobs.err, jobs.out, jobs.err)


run_cases([hosts_train_the_same_model, a_script_of_version_2_trains, waits_for_data_are_seen, rank_that_fails_ends_all_hosts_and_is_named])
