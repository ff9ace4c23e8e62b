#!/usr/bin/env python3
"""SageMaker's own Python SDK v3 (sagemaker-train) makes a training job with our driver, and its generated start script runs
the job on two emulated hosts. No account and no network: the test uses the SDK's output as the platform would."""
import json
import os
import pathlib
import shutil
import sys
import tempfile

from containers import INSTANCE_TYPE, TOP, WARM, Containers, Skip, expect
from scripts import HAND_OVER, PLAIN, TRAIN
from tap import call, run_cases
from warm import start_other

SDK = TOP / "build/sdk3/bin/python3"
TORCH = TOP / "build/torch/bin"
LIBRARY = pathlib.Path(os.environ.get("SHOAL_LIBRARY", TOP / "build/libshoal.so"))
HOSTS, RANKS_EACH = 2, 2
RANKS = HOSTS * RANKS_EACH
TOTAL = RANKS * (RANKS + 1) / 2
HYPERPARAMETERS = {"backend": "shoal", "steps": 5}
RUN_S = 200
SDK_S = 120  # its import takes long when other tests run

# Run by the SDK's interpreter: writes ModelTrainer's output for a job to a folder.
GENERATE = """
import json
import pathlib
import shutil
import sys

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, SourceCode
from sagemaker.train.model_trainer import Mode
from shoal.job.sagemaker import Shoal

folder, hyperparameters = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
trainer = ModelTrainer(training_mode=Mode.LOCAL_CONTAINER, training_image="shoal:1", base_job_name="cell",
                       source_code=SourceCode(source_dir=str(folder / "code"), entry_script="train.py"),
                       compute=Compute(instance_type="local_cpu", instance_count=2), hyperparameters=hyperparameters,
                       distributed=Shoal(process_count_per_node=2), local_container_root=str(folder))
made = trainer._create_training_job_args()
shutil.copytree(trainer._temp_code_dir.name, folder / "sm_drivers")
algorithm = made["algorithm_specification"]
(folder / "made.json").write_text(json.dumps({
    "hyperparameters": made["hyper_parameters"], "command": [*algorithm.container_entrypoint, *algorithm.container_arguments],
    "channels": [channel.channel_name for channel in made["input_data_config"]]}))
"""


NO_TELEMETRY = "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"


class Made:
    """The SDK's output for a job."""

    def __init__(self, folder, hyperparameters):
        (folder / "code").mkdir()
        (folder / "code/train.py").write_text("")
        (folder / "config.yaml").write_text(NO_TELEMETRY)
        code, out, err = call(with_sdk, "-c", GENERATE, folder, json.dumps(hyperparameters), timeout=SDK_S, cwd=folder, env={
            **os.environ, "PYTHONPATH": str(TOP / "python"), "AWS_DEFAULT_REGION": "us-west-2", "HOME": str(folder),
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "config.yaml")})
        expect(code == 0, out, err)
        self.folder = folder
        self.__dict__.update(json.loads((folder / "made.json").read_text()))


def variables():
    """Returns the variables of an image with Shoal."""
    return {"PATH": f"{TORCH}:{os.environ['PATH']}", "PYTHONPATH": str(TOP / "python"), "SHOAL_LIBRARY": str(LIBRARY),
            "SHOAL_TORCH_SHIM": "python", "TRAINING_JOB_NAME": "cell", "HOME": "/tmp/home"}


class Run:
    """Runs the generated command on every host, as the platform does."""

    def __init__(self, script, hyperparameters, hosts=HOSTS, **more):
        names, python = [f"algo-{number + 1}" for number in range(hosts)], with_torch if script is TRAIN else None
        with Containers(names, python=python) as containers:
            for host in containers.hosts:
                code = host.base / "input/data/code"
                code.mkdir()
                (code / "script.py").write_text(script)
                (code / "train.py").write_text(HAND_OVER.format(python=f"{WARM}/python3") if python else script)
                shutil.copytree(made.folder / "sm_drivers", host.base / "input/data/sm_drivers")
                host.config("hyperparameters", {name: str(value) for name, value in hyperparameters.items()})
                host.config("inputdataconfig", {name: {"TrainingInputMode": "File"} for name in made.channels})
            containers.run(made.command, {**variables(), **more}, RUN_S)
            self.told = containers.told()
            self.codes = [host.code for host in containers.hosts]
            self.outputs = [host.output() for host in containers.hosts]
            self.failures = [host.file("output/failure") for host in containers.hosts]
            self.models = [sorted(path.name for path in (host.base / "model").iterdir()) for host in containers.hosts]


def the_sdk_makes_a_job_with_our_driver():
    global made
    made = Made(pathlib.Path(folder.name), HYPERPARAMETERS)
    expect(made.channels == ["code", "sm_drivers"] and "sm_train.sh" in made.command[-1], vars(made))
    expect(made.hyperparameters == {name: str(value) for name, value in HYPERPARAMETERS.items()}, vars(made))
    drivers = made.folder / "sm_drivers"
    start = (drivers / "sm_train.sh").read_text()
    expect("distributed_drivers/shoal_driver.py" in start, start)
    settings = json.loads((drivers / "distributed.json").read_text())
    expect(settings["process_count_per_node"] == RANKS_EACH and len(settings["secret"]) == 64, settings)


def the_generated_script_trains_by_our_driver():
    run = Run(TRAIN, HYPERPARAMETERS)
    expect(run.codes == [0] * HOSTS and run.failures == [None] * HOSTS, run.told)
    for rank in range(RANKS):
        line = f"{rank}| rank {rank} of {RANKS}, local rank {rank % RANKS_EACH}: {TOTAL} by shoal\n"
        expect(run.outputs[rank // RANKS_EACH].count(line) == 1, line, run.told)
    expect(run.models == [["model.pt"], []], run.models)
    expect("Running Shoal Driver" in run.outputs[0] and "without a secret" not in run.told, run.told)


def a_rank_that_fails_is_the_failure_of_the_job():
    run = Run(PLAIN, {"steps": 5, "fails": 3})
    own, other = run.failures[1] or "", run.failures[0] or ""
    expect(0 not in run.codes, run.told)
    expect(own.startswith("shoal run: rank 3 ") and "failed first: exited with code 1" in own, own, run.told)
    expect("ValueError: rank 3 has no data" in own and len(own) <= 1024, own, run.told)
    expect(other.startswith("shoal run: "), other, run.told)


def a_container_without_shoal_says_so():
    run = Run(PLAIN, {"steps": 5}, hosts=1, PYTHONPATH="")
    told = run.failures[0] or ""
    expect(run.codes == [127] and told.startswith("the container has no Shoal for ") and "requirements" in told, run.told)


REFUSED = """
from shoal.job.sagemaker import Shoal
for words in ({"process_count_per_node": 0}, {"proces_count": 2}, {"run_options": "--bind core"}):
    try:
        print(Shoal(**words))
    except ValueError as error:
        print(error)
print(Shoal(process_count_per_node=2), Shoal().secret == Shoal().secret)
"""


def the_class_refuses_what_it_does_not_know():
    code, out, err = call(with_sdk, "-c", REFUSED, timeout=SDK_S, env={**os.environ, "PYTHONPATH": str(TOP / "python")})
    for told in ("greater than or equal to 1", "Extra inputs are not permitted", "Input should be a valid list",
                 "process_count_per_node=2 run_options=None False\n"):
        expect(code == 0 and told in out, told, code, out, err)


def why_not():
    for path, what in ((SDK, "the SDK"), (TORCH / "python3", "PyTorch"), (LIBRARY, "the library")):
        if not path.exists():
            return f"there is no {path} ({what}): `make test-all` makes it"
    try:
        with Containers(["algo-1"]):
            return None
    except Skip as reason:
        return str(reason)


reason = why_not()
if reason:
    print(f"1..0 # SKIP {reason}")
    sys.exit(0)
with_sdk, with_torch = start_other(SDK, "sagemaker.train.model_trainer"), start_other(TORCH / "python3", "torch")
made, folder = None, tempfile.TemporaryDirectory()
run_cases([the_sdk_makes_a_job_with_our_driver, the_generated_script_trains_by_our_driver,
           a_rank_that_fails_is_the_failure_of_the_job, a_container_without_shoal_says_so,
           the_class_refuses_what_it_does_not_know])
