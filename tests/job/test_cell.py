#!/usr/bin/env python3
"""One notebook cell, run by the SageMaker Python SDK v2 itself in local mode, and with its import changed to Shoal. The SDK
writes hyperparameters, channels and its compose file; SageMaker's training toolkit trains over Shoal in containers that a
stand-in for docker emulates; the SDK packs the model. Both runs have the same model and hyperparameters, and name the rank
that failed."""
import concurrent.futures
import functools
import json
import os
import pathlib
import shutil
import tempfile

from containers import TOP, WARM
from image import RUN_S, why_not
from jobs import DATA_PARALLEL, SHOAL, content, names_in
from scripts import CELL, HAND_OVER
from tap import call, expect, run_cases
from warm import start_other

SDK2 = TOP / "build/sdk2/bin/python3"
TORCH = TOP / "build/torch/bin/python3"
RANKS_EACH = 2
# Emulated containers have their own /tmp, but see the checkout.
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="cell-", dir=TOP / "build"))

NOTEBOOK = """
from {module} import PyTorch

estimator = PyTorch(entry_point="train.py", source_dir="{root}/{code}", role="arn:aws:iam::1:role/r", image_uri="shoal",
                    instance_count={hosts}, instance_type="local", output_path="file://{output}",
                    distribution={distribution}, hyperparameters={{"steps": 5, "fails": {fails}}})
estimator.fit({{"training": "file://{root}/data"}}, job_name="{job}")
print("the model is at", estimator.model_data)
"""
# A host has no GPUs here, by which the vendor counts ranks. So the number of ranks is at a place that both read.
DISTRIBUTION = {**DATA_PARALLEL, "mpi": {"enabled": False, "processes_per_host": RANKS_EACH}}
LOCAL = f"local: {{local_code: true, container_root: {ROOT}}}\n"
QUIET = "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
DOCKER = f'#!/bin/sh\nexec "{SDK2}" "{TOP}/tests/job/stand_in_docker.py" "$@"\n'


def prepare():
    for path, text in (("theirs/script.py", CELL), ("theirs/train.py", HAND_OVER.format(python=f"{WARM}/python3")),
                       ("ours/script.py", CELL), ("ours/train.py", HAND_OVER.format(python=python_with_torch())),
                       ("fails/train.py", CELL),  # its ranks end one after the other, as ranks of plain Python do
                       ("data/numbers.json", json.dumps([[n % 5, n % 3] for n in range(16)])),
                       ("bin/docker", DOCKER), ("home/.sagemaker/config.yaml", LOCAL), ("quiet.yaml", QUIET)):
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    (ROOT / "bin/docker").chmod(0o755)


def environment():
    """Returns an environment without account, metadata proxy or telemetry, in which our docker comes first."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SAGEMAKER_"))}
    return {**mine, "PATH": f"{ROOT}/bin:{os.environ['PATH']}", "HOME": f"{ROOT}/home", "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_EC2_METADATA_DISABLED": "true",
            "SAGEMAKER_USER_CONFIG_OVERRIDE": f"{ROOT}/quiet.yaml", "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": f"{ROOT}/quiet.yaml",
            "SAGEMAKER_SUPPRESS_V2_WARNING": "1", "SHOAL_JOBS": f"{ROOT}/jobs", "SHOAL_COMMAND": SHOAL,
            "SHOAL_TORCH_SHIM": "python", "OMP_NUM_THREADS": "1", "TEST_WARM_PYTHON": python_with_torch()}


@functools.cache
def python_with_torch():
    return start_other(TORCH, "torch")


class Cell:
    """Runs the cell. Holds its result and the text of the model's files, if there is an archive."""

    def __init__(self, module, hosts, fails=-1):
        job = f"cell-{hosts}-{'fails' if fails >= 0 else 'trains'}"
        is_ours = module.startswith("shoal")
        code = "theirs" if not is_ours else "fails" if fails >= 0 else "ours"
        text = NOTEBOOK.format(module=module, root=ROOT, code=code, output=ROOT / module / job,
                               hosts=hosts, distribution=DISTRIBUTION, fails=fails, job=job)
        python = TORCH if is_ours else SDK2
        self.code, self.out, self.err = call(python, "-W", "ignore", "-c", text, timeout=2 * RUN_S, env=environment())
        self.told = f"--- {job} by {module}\n{self.out}\n--- errors\n{self.err}"
        said = [line for line in self.out.splitlines() if line.startswith("the model is at file://")]
        self.model = said[0].split("file://", 1)[1] if said else None

    def file(self, name):
        expect(self.code == 0 and self.model, self.code, self.told)
        expect({"model.json", "hyperparameters.json"} <= set(names_in(self.model)), names_in(self.model))
        return json.loads(content(self.model, name))


STARTS = {"theirs on one": ("sagemaker.pytorch", 1), "theirs on two": ("sagemaker.pytorch", 2),
          "theirs fails": ("sagemaker.pytorch", 2, 3), "ours on one": ("shoal.job", 1), "ours on two": ("shoal.job", 2),
          "ours fails": ("shoal.job", 2, 3)}
runs = {}


def run(name):
    return runs[name].result()


def expect_trained(name, hosts):
    cell = run(name)
    model, ranks = cell.file("model.json"), hosts * RANKS_EACH
    expect(model["ranks"] == ranks and model["backend"] == "smddp", model, cell.told)
    for rank in range(ranks):
        expect(f"rank {rank} of {ranks} has {16 // ranks} examples" in cell.out + cell.err, rank, cell.told)


def the_sdk_trains_on_one_instance():
    expect_trained("theirs on one", 1)


def the_sdk_trains_on_two_instances():
    expect_trained("theirs on two", 2)


def ours_trains_as_well():
    expect_trained("ours on one", 1)
    expect_trained("ours on two", 2)


def both_give_the_same():
    for count in ("on one", "on two"):
        theirs, ours = run(f"theirs {count}"), run(f"ours {count}")
        expect(theirs.file("model.json") == ours.file("model.json"), theirs.file("model.json"), ours.file("model.json"))
        theirs, ours = theirs.file("hyperparameters.json"), ours.file("hyperparameters.json")
        expect({"steps", "fails", "sagemaker_program", "sagemaker_distributed_dataparallel_enabled"} <= set(theirs), theirs)
        places = [json.loads(each.pop("sagemaker_submit_directory")) for each in (theirs, ours)]
        expect(theirs == ours, theirs, ours)
        # Ours has another root instead of a container's /opt/ml.
        expect(places[0] == "/opt/ml/code" and places[1].endswith("/hosts/algo-1/code"), places)


def a_script_that_raises_is_an_error_that_names_the_rank():
    for name in ("theirs fails", "ours fails"):
        cell = run(name)
        expect(cell.code == 1 and cell.model is None, cell.code, cell.told)
        expect("[rank3]: ValueError: rank 3 has no data" in cell.out, cell.told)
    # The SDK's error; its line may be cut anywhere.
    theirs = "".join((run("theirs fails").out + run("theirs fails").err).split())
    expect("RuntimeError:Failedtorun:['docker','compose','-f'" in theirs, theirs)
    expect("'up','--build','--abort-on-container-exit'].Processexitedwithcode:1" in theirs, theirs)
    ours = run("ours fails")
    expect("UnexpectedStatusException: Error for Training job cell-2-fails: Failed. Reason: algo-2: rank 3 exited with code 1: "
           "ValueError: rank 3 has no data." in ours.err, ours.told)


def main():
    reason = why_not() or (None if SDK2.exists() else f"there is no {SDK2}: `make test-all` makes it")
    if reason:
        print(f"1..0 # SKIP {reason}")
        return
    prepare()
    # The toolkit mostly sleeps, so two runs go at once.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs.update({name: pool.submit(Cell, *words) for name, words in STARTS.items()})
        run_cases([the_sdk_trains_on_one_instance, the_sdk_trains_on_two_instances, ours_trains_as_well, both_give_the_same,
                   a_script_that_raises_is_an_error_that_names_the_rank])


try:
    main()
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
