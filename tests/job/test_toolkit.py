#!/usr/bin/env python3
"""SageMaker's own training toolkit (sagemaker-training, sagemaker-pytorch-training) trains over Shoal, on two emulated
hosts algo-1 and algo-2 with two ranks each: by `smddprun`, `mpirun` and torchrun. The toolkit is the unchanged one from
pip, which sleeps 30 s at the end of a job of mpirun; sshd is Debian's."""
import concurrent.futures
import functools
import json
import re
import sys

from containers import INSTANCE_TYPE, TOP, WARM, Containers, expect
from image import RUN_S, SSHD, START, variables, why_not
from scripts import HAND_OVER, PLAIN, TRAIN
from tap import run_cases
from warm import start_other

HOSTS, RANKS_EACH = ["algo-1", "algo-2"], 2
RANKS = len(HOSTS) * RANKS_EACH

# The SDK v2 sends these for each `distribution`.
SMDDP = {"sagemaker_distributed_dataparallel_enabled": True, "sagemaker_instance_type": INSTANCE_TYPE,
         "sagemaker_distributed_dataparallel_custom_mpi_options": ""}
MPI = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_custom_mpi_options": ""}
TORCHRUN = {"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": INSTANCE_TYPE}
COMMON = {"sagemaker_mpi_num_of_processes_per_host": RANKS_EACH, "sagemaker_program": "train.py", "sagemaker_job_name": "cell",
          "sagemaker_container_log_level": 20, "sagemaker_region": "us-west-2", "sagemaker_submit_directory": "/opt/ml/code",
          "steps": 5}


def prepare(containers, script, hyperparameters):
    """Writes code and hyperparameters; returns the variables of the image."""
    for host in containers.hosts:
        (host.base / "code").mkdir()
        (host.base / "code/script.py").write_text(script)
        (host.base / "code/train.py").write_text(HAND_OVER.format(python=f"{WARM}/python3") if script is TRAIN else script)
        host.config("hyperparameters", {name: json.dumps(value) for name, value in {**COMMON, **hyperparameters}.items()})
    return {**variables(containers), "TRAINING_JOB_NAME": "cell", "AWS_DEFAULT_REGION": "us-west-2"}


class Run:
    """Runs the toolkit and holds its results."""

    def __init__(self, script, hyperparameters, until=None):
        with Containers(HOSTS, SSHD, python=python if script is TRAIN else None) as containers:
            containers.run(START, prepare(containers, script, hyperparameters), RUN_S, until)
            self.told = containers.told()
            self.outputs = [host.output() for host in containers.hosts]
            self.codes = [host.code for host in containers.hosts]
            self.failures = [host.file("output/failure") for host in containers.hosts]
            self.successes = [host.file("output/success") for host in containers.hosts]
            self.ranks = [containers.hosts[rank // RANKS_EACH].file(f"output/data/rank-{rank}") for rank in range(RANKS)]
            self.models = [sorted(path.name for path in (host.base / "model").iterdir()) for host in containers.hosts]


def said(text):
    """Removes tags, line ends and spaces, because mpirun may cut a line anywhere."""
    return "".join(re.sub(r"\[1,mpirank:\d+,algo-\d+\]<std(out|err)>:", "", text).split())


def expect_trained(run, backend):
    expect((run.codes, run.successes, run.failures) == ([0, 0], ["", ""], [None, None]), run.codes, run.told)
    total = RANKS * (RANKS + 1) / 2
    lines = [f"rank {rank} of {RANKS}, local rank {rank % RANKS_EACH}: {total} by {backend}\n" for rank in range(RANKS)]
    expect(run.ranks == lines, run.ranks, run.told)
    expect(run.models == [["model.pt"], []], run.models)
    expect(said("".join(run.outputs)).count(said("FI_PROVIDER=efa is ignored")) == 1, "one line", run.told)


def has_failed(containers):
    """After a failure the other host's toolkit waits for minutes. The platform ends it, and so does this test."""
    return containers.hosts[0].code is not None


def master_told(run):
    return run.outputs[0]


STARTS = {
    "smddp": functools.partial(Run, TRAIN, {**SMDDP, "backend": "smddp"}),
    "mpi": functools.partial(Run, PLAIN, MPI),
    "torchrun": functools.partial(Run, TRAIN, {**TORCHRUN, "backend": "shoal"}),
    "fails": functools.partial(Run, PLAIN, {**SMDDP, "fails": 3}, has_failed),
}
runs = {}
python = None  # has imported the modules that TRAIN needs


def the_toolkit_trains_by_smddprun():
    run = runs["smddp"].result()
    expect_trained(run, "smddp")
    expect("smddprun" in master_told(run) and "-m mpi4py train.py --backend smddp --steps 5" in master_told(run), run.told)
    expect(master_told(run).count("Running smdistributed.dataparallel v") == 1, run.told)


def the_toolkit_trains_by_mpirun():
    run = runs["mpi"].result()
    expect_trained(run, "C")
    expect("mpirun --host algo-1:2,algo-2:2" in master_told(run) and "-m mpi4py train.py" in master_told(run), run.told)


def the_toolkit_trains_by_torchrun():
    run = runs["torchrun"].result()
    expect_trained(run, "shoal")
    for index, told in enumerate(run.outputs):
        command = f"torchrun --nnodes 2 --nproc_per_node 2 --master_addr algo-1 --master_port 7777 --node_rank {index} train.py"
        expect(command in told, command, run.told)


def a_rank_that_fails_is_the_failure_of_the_job():
    run = runs["fails"].result()
    expect(run.codes[0] == 1 and run.successes[0] is None, run.told)
    failure = run.failures[0] or ""
    expect(failure.startswith("ExecuteUserScriptError:\nExitCode 1\n"), failure, run.told)
    expect("ValueError" in failure and said("rank 3 has no data") in said(failure), failure, run.told)


def main():
    reason = why_not()
    if reason:
        print(f"1..0 # SKIP {reason}")
        return
    global python
    python = start_other(TOP / "build/torch/bin/python3", "torch")
    wanted = [name for name in STARTS if not sys.argv[1:] or name in sys.argv[1:]]
    cases = {"smddp": the_toolkit_trains_by_smddprun, "mpi": the_toolkit_trains_by_mpirun,
             "torchrun": the_toolkit_trains_by_torchrun, "fails": a_rank_that_fails_is_the_failure_of_the_job}
    # They mostly sleep, so two of them run at once.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs.update({name: pool.submit(STARTS[name]) for name in wanted})
        run_cases([cases[name] for name in wanted])


main()
