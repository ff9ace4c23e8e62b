#!/usr/bin/env python3
"""The engine "sagemaker": a job document goes to SageMaker through the vendor's SDKs, v2 and v3, and becomes the training
job that it describes. moto's server replaces AWS and keeps the requests."""
import functools
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest.mock

from shoal.job import engines
from shoal.job import sagemaker as engine
from shoal.job.document.folder import JobFolder, Status
from shoal.job.engines.shared import EngineError
from tap import Skip, call, expect, run_cases
from warm import start_other

TOP = pathlib.Path(__file__).resolve().parents[2]
SDKS = {"v2": (TOP / "build/sdk2/bin/python3", "sagemaker.pytorch"),
        "v3": (TOP / "build/sdk3/bin/python3", "sagemaker.train.model_trainer")}
MOTO = TOP / "build/job/bin/python3"
SDK_S = 180  # its import takes long when other tests run
SERVER = """
import json
import sys
import boto3
from moto.iam.responses import IamResponse
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer
real = SageMakerResponse.create_training_job
def create_training_job(self):
    with open(sys.argv[1], "w") as file:
        file.write(self.body)
    return real(self)
SageMakerResponse.create_training_job = create_training_job
# SDK v3 asks whether the role may write to the bucket, which moto does not know.
IamResponse.simulate_principal_policy = lambda self: "<R><SimulatePrincipalPolicyResult/></R>"
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
aws = {"endpoint_url": "http://%s:%d" % server.get_host_and_port(), "region_name": "us-east-1", "aws_access_key_id": "testing",
       "aws_secret_access_key": "testing"}
for bucket in ("results", "data"):
    boto3.client("s3", **aws).create_bucket(Bucket=bucket)
trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
boto3.client("iam", **aws).create_role(RoleName="trainer", AssumeRolePolicyDocument=json.dumps(
    {"Version": "2012-10-17", "Statement": [trust]}))
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:1"
ROLE = "arn:aws:iam::123456789012:role/trainer"
# Without its own bucket, SDK v3 asks AWS's server for the account.
NO_TELEMETRY = """
SchemaVersion: '1.0'
SageMaker:
  PythonSDK:
    Modules:
      TelemetryOptOut: true
      Session: {DefaultS3Bucket: results}
"""
DOCUMENT = {
    "entry_point": "train.py", "base_job_name": "cell", "framework": "pytorch", "instance_count": 2,
    "instance_type": "ml.c5.4xlarge", "workers_per_host": 4, "max_run": 7200, "restarts": 2,
    "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "hyperparameters": {"epochs": 3, "name": "a b"}, "environment": {"COLOUR": "red"}, "output_path": "s3://results/cell",
    "metric_definitions": [{"name": "loss", "regex": "loss=([0-9.]+)"}],
    "channels": {"train": {"uri": "s3://data/train", "distribution": "ShardedByS3Key", "input_mode": "FastFile",
                           "shuffle_seed": 7}},
    "checkpoints": {"uri": "s3://results/checkpoints"},
    "where": {"engine": "sagemaker", "options": {"image": IMAGE, "role": ROLE}}}
# Run by the interpreter of an SDK: starts and queries the job as `shoal job` does. Prints SageMaker's data about it.
SUBMIT = """
import json
import sys

from shoal.job import engines
from shoal.job.document import JobError, reading
from shoal.job.document.folder import jobs_folder

try:
    folder = engines.job_start(reading.job_of(json.loads(sys.argv[1])))
except JobError as error:
    left = [path.name for path in jobs_folder().iterdir()]
    sys.exit("\\n".join([*map(str, error.problems), f"folders: {left}"]))
first = folder.status()
status = engines.job_status(folder)
print(json.dumps({"status": status.status, "model": status.model, "exit_code": status.exit_code, "name": first.engine_id}))
"""


class Server:
    """moto, in a process that ends with this one."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.sent = pathlib.Path(self.folder.name, "sent")  # the body of the last CreateTrainingJob; moto keeps only a part
        self.process = subprocess.Popen([MOTO, "-c", SERVER, self.sent], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.folder.cleanup()


@functools.cache
def python_with(sdk):
    """Returns an interpreter that has imported the SDK."""
    python, module = SDKS[sdk]
    if not python.exists():
        raise Skip(f"there is no {python}: `make test-all` makes it")
    return start_other(python, module)


def submit(sdk, document, **more):
    """Submits the document to SageMaker through this SDK; returns (exit code, stdout, stderr)."""
    python = python_with(sdk)
    with tempfile.TemporaryDirectory() as folder:
        code = pathlib.Path(folder, "code")
        code.mkdir()
        (code / "train.py").write_text("")
        (code / "more.txt").write_text("")
        pathlib.Path(folder, "config.yaml").write_text(NO_TELEMETRY)
        environment = {
            **os.environ, "PYTHONPATH": str(TOP / "python"), "HOME": folder, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": server.url, "SAGEMAKER_USER_CONFIG_OVERRIDE": f"{folder}/config.yaml",
            "SHOAL_JOBS": f"{folder}/jobs", **more}
        text = json.dumps({"source_dir": str(code), **document})
        return call(python, "-c", SUBMIT, text, env=environment, timeout=SDK_S, cwd=folder)


def the_document_becomes_a_training_job(sdk):
    code, out, err = submit(sdk, DOCUMENT)
    expect(code == 0, out, err)
    made = json.loads(out.splitlines()[-1])
    told = json.loads(server.sent.read_text())
    algorithm, resources = told["AlgorithmSpecification"], told["ResourceConfig"]
    expect(algorithm["TrainingImage"] == IMAGE, algorithm)
    expect(algorithm["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss=([0-9.]+)"}], algorithm)
    expect((resources["InstanceCount"], resources["InstanceType"]) == (2, "ml.c5.4xlarge"), resources)
    expect(told["RoleArn"] == ROLE and told["StoppingCondition"]["MaxRuntimeInSeconds"] == 7200, told)
    expect(told["Environment"]["COLOUR"] == "red" and told["OutputDataConfig"]["S3OutputPath"] == "s3://results/cell", told)
    expect(told["CheckpointConfig"] == {"S3Uri": "s3://results/checkpoints", "LocalPath": "/opt/ml/checkpoints"}, told)
    train = {channel["ChannelName"]: channel for channel in told["InputDataConfig"]}["train"]
    source = train["DataSource"]["S3DataSource"]
    expect((source["S3Uri"], source["S3DataDistributionType"]) == ("s3://data/train", "ShardedByS3Key"), train)
    expect(train["InputMode"] == "FastFile" and train["ShuffleConfig"] == {"Seed": 7}, train)
    expect_started(sdk, told)
    expect(made["status"] == "Completed" and made["exit_code"] == 0 and made["model"].startswith("s3://results/cell"), made)


def expect_started(sdk, told):
    """Checks how the container starts the workers."""
    sent = told["HyperParameters"]
    if sdk == "v2":
        expect((sent["epochs"], sent["name"]) == ("3", '"a b"'), sent)
        expect(sent["sagemaker_distributed_dataparallel_enabled"] == "true", sent)
        expect(sent["sagemaker_mpi_num_of_processes_per_host"] == "4" and sent["sagemaker_program"] == '"train.py"', sent)
    else:
        channels = [channel["ChannelName"] for channel in told["InputDataConfig"]]
        expect((sent["epochs"], sent["name"]) == ("3", "a b") and channels == ["train", "code", "sm_drivers"], sent, channels)
        expect("sm_train.sh" in told["AlgorithmSpecification"]["ContainerArguments"][-1], told)


def all_that_cannot_be_sent_is_said_at_once(sdk):
    wrong = {**DOCUMENT, "instance_type": "c5.large", "output_path": "/results", "requirements": "more.txt",
             "where": {"engine": "sagemaker", "options": {"role": ROLE, "queue": "fast", "volume_size": "30"}}}
    code, out, err = submit(sdk, wrong)
    for line in ("instance_type: is c5.large, and SageMaker's begin with ml.", "output_path: is ",
                 "where.options.queue: is not known", "where.options.image: is missing",
                 "where.options.volume_size: needs int, not '30'",
                 *(["requirements: is more.txt"] if sdk == "v2" else [])):
        expect(code == 1 and line in err, line, code, out, err)


def what_the_service_refuses_is_said_and_nothing_is_left():
    code, out, err = submit("v2", DOCUMENT, AWS_ENDPOINT_URL="http://127.0.0.1:1", AWS_MAX_ATTEMPTS="1")
    expect(code == 1 and "SageMaker's SDK v2 has not started the job: EndpointConnectionError" in err, code, out, err)
    expect("folders: []" in err, err)


def without_an_sdk_it_says_what_to_install():
    probe = ("import sys\nfrom shoal.job import sagemaker\nfrom shoal.job.document import JobError\n"
             "try:\n    sagemaker.sdk_installed(*sys.argv[1:])\nexcept JobError as error:\n    print(error)\n"
             "try:\n    sagemaker.Shoal\nexcept ImportError as error:\n    print(error)\n")
    environment = {**os.environ, "PYTHONPATH": str(TOP / "python")}
    code, out, err = call(sys.executable, "-S", "-c", probe, env=environment)
    expect(code == 0 and "it is not installed: pip install 'sagemaker>=3'" in out, out, err)
    expect("shoal.job.sagemaker.Shoal is for the SageMaker Python SDK v3" in out, out, err)
    code, out, err = call(sys.executable, "-S", "-c", probe, "v2", env=environment)
    expect("v2 as where.options says, and it is not installed: pip install 'sagemaker<3'" in out, out, err)


def stop_asks_sagemaker_for_the_end():
    """The calls of boto3's client, and the reactions to its answers and refusals."""
    calls = []

    def answer(**words):
        calls.append(words)
        if words["TrainingJobName"] == "refused":
            raise RuntimeError("AccessDenied")
        return {}

    def client(service):
        expect(service == "sagemaker", service)
        return types.SimpleNamespace(stop_training_job=answer)

    with tempfile.TemporaryDirectory() as place, unittest.mock.patch.dict(
            sys.modules, boto3=types.SimpleNamespace(client=client)):
        for name, engine_id, state in (("first", "first-of-aws", "Stopping"), ("own", None, "Stopping"),
                                       ("bad", "refused", "Training")):
            folder = JobFolder(name, pathlib.Path(place))
            folder.create()
            folder.status_write(Status(name, status="Training", engine="sagemaker", engine_id=engine_id))
            try:
                engine.stop(folder)
                expect(state == "Stopping", name)
            except EngineError as error:
                told = "SageMaker does not answer stop_training_job for refused: RuntimeError: AccessDenied"
                expect(name == "bad" and str(error) == told, error)
            expect(folder.status().status == state, folder.status())
    expect(calls == [{"TrainingJobName": name} for name in ("first-of-aws", "own", "refused")], calls)


def a_refusal_that_passes_ends_no_wait():
    """Throttling, and a token that is renewed; then the truth."""
    answers = [RuntimeError("ThrottlingException"), RuntimeError("ExpiredTokenException"), {"TrainingJobStatus": "InProgress"},
               RuntimeError("ThrottlingException"), {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: no such column"}]

    def describe(TrainingJobName):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    told = io.StringIO()
    client = types.SimpleNamespace(describe_training_job=describe)
    with tempfile.TemporaryDirectory() as place, unittest.mock.patch.dict(
            sys.modules, boto3=types.SimpleNamespace(client=lambda _: client)), unittest.mock.patch.multiple(engine, ASK_S=0.0), \
            unittest.mock.patch.multiple(engines, STATUS_S=0.0, LOOK_S=0.0):
        folder = JobFolder("job", pathlib.Path(place))
        folder.create()
        folder.status_write(Status("job", status="Training", engine="sagemaker", engine_id="job"))
        status = engines.job_wait(folder, told=told)
        expect(status == folder.status() and (status.status, status.failure_reason) == ("Failed", "AlgorithmError: no such column"), status)
        answers.append(RuntimeError("AccessDenied"))
        folder.status_write(Status("job", status="Training", engine="sagemaker", engine_id="job"))
        with unittest.mock.patch.multiple(engines, PATIENCE_S=-1.0):
            try:
                expect(False, engines.job_wait(folder))
            except EngineError as error:
                expect("AccessDenied" in str(error), error)
    expect(told.getvalue().count("ThrottlingException; the job may well continue") == 2 and not answers, told.getvalue())


def case(function, sdk):
    run = functools.partial(function, sdk)
    run.__name__ = f"{function.__name__}_{sdk}"
    return run


if not MOTO.exists():
    print(f"1..0 # SKIP there is no {MOTO}: `make test-all` makes it")
    sys.exit(0)
server = Server()
try:
    of_both = (the_document_becomes_a_training_job, all_that_cannot_be_sent_is_said_at_once)
    cases = [*(case(function, sdk) for function in of_both for sdk in SDKS),
             what_the_service_refuses_is_said_and_nothing_is_left, without_an_sdk_it_says_what_to_install,
             stop_asks_sagemaker_for_the_end, a_refusal_that_passes_ends_no_wait]
    run_cases([one for one in cases if not sys.argv[1:] or one.__name__ in sys.argv[1:]])
finally:
    server.close()
